"""`make bench`: each path against the way a user would otherwise go, as ratios of one run.

The server is another process on loopback that only acknowledges or only serves prepared bytes, so
these figures are of the client. CPU seconds are of this process.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import pyarrow as pa
from google.cloud import bigquery_storage_v1 as official
from google.cloud.bigquery_storage_v1 import types, writer
from google.cloud.bigquery_storage_v1.services.big_query_read.transports import (
    BigQueryReadGrpcTransport,
)
from google.cloud.bigquery_storage_v1.services.big_query_write.transports import (
    BigQueryWriteGrpcTransport,
)

from benchmarks.data import batches
from dagster_bq_connector.clients import Clients, Credentials
from dagster_bq_connector.endpoints import Endpoint, Endpoints
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.read.request import ReadRequest
from dagster_bq_connector.read.rows import Rows
from dagster_bq_connector.read.session import create_session
from dagster_bq_connector.read.stream import StreamReader
from dagster_bq_connector.retry import Backoff
from dagster_bq_connector.schema.data import Batches
from dagster_bq_connector.schema.types import table_fields
from dagster_bq_connector.table.admin import EnsuredTable
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.write import default_stream
from dagster_bq_connector.write.connection import Connection, append_rows
from dagster_bq_connector.write.encode import ArrowEncoder, Request

ROWS = 1_000_000
TABLE = TableRef("d", "t", "p")
STREAM = f"{TABLE.path}/streams/_default"


@contextmanager
def server() -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.server", str(ROWS)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield f"127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.stdin.close()
        process.wait()


def measure(name: str, rows: int, call: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"  {name:45} {rows / wall:12,.0f} rows/s {rows / cpu:12,.0f} rows/CPU s")
    return rows / wall, rows / cpu


def clients_of(address: str) -> Clients:
    return Clients(Endpoints(storage=Endpoint(address, tls=False)), Credentials())


def append(address: str, data: list[pa.RecordBatch]) -> None:
    schema = data[0].schema
    clients = clients_of(address)
    table = EnsuredTable(TABLE, table_fields(schema), age=10**6)

    def ours() -> None:
        with Progress("append", log=lambda _: None) as progress:
            default_stream.append(clients, table, Batches(schema, iter(data)), progress, 60)

    encoder = ArrowEncoder(schema, STREAM)
    payloads = [
        cut.payload
        for batch in data
        for cut in encoder.cut(batch, 2**23, 2**21)
        if isinstance(cut, Request)
    ]

    def prepared() -> None:
        open_call = append_rows(clients.channel, STREAM)
        connection = Connection(open_call, encoder.first, backoff=Backoff())
        for payload in payloads:
            connection.send(payload)
        connection.close()

    few = data[:20]

    def documented() -> None:
        transport = BigQueryWriteGrpcTransport(channel=grpc.insecure_channel(address))
        client = official.BigQueryWriteClient(transport=transport)
        template = types.AppendRowsRequest(write_stream=STREAM)
        template.arrow_rows.writer_schema.serialized_schema = schema.serialize().to_pybytes()
        stream = writer.AppendRowsStream(client, template)
        for batch in few:
            request = types.AppendRowsRequest()
            request.arrow_rows.rows.serialized_record_batch = batch.serialize().to_pybytes()
            stream.send(request).result()
        stream.close()

    print("Append, Arrow, one connection:")
    ours()  # opens the connection
    best = measure("ours, from batches to acknowledgements", ROWS, ours)
    limit = measure("ours, the same requests prepared", ROWS, prepared)
    other = measure("Google's writer, send().result()", sum(b.num_rows for b in few), documented)
    print(
        f"  {best[0] / limit[0]:.0%} of prepared, {best[0] / other[0]:.0f} times Google's writer\n"
    )

    connection = Connection(append_rows(clients.channel, STREAM), encoder.first, backoff=Backoff())
    small = next(encoder.cut(data[0].slice(0, 1), 2**23, 2**21)).payload
    waited = []
    for _ in range(1000):
        began = time.perf_counter()
        connection.send(small).result()
        waited.append((time.perf_counter() - began) * 1000)
    connection.close()
    print(f"  one row to its acknowledgement: median {statistics.median(waited):.2f} ms\n")


def read(address: str) -> None:
    clients = clients_of(address)

    def ours() -> None:
        session = create_session(clients.read, ReadRequest(TABLE, None, "", 1), "p", 60)

        def open_stream(stream: str, source: pa.Schema) -> StreamReader:
            return StreamReader(clients.channel, stream, source, 60)

        rows = Rows([session], open_stream, lambda: Progress("read", log=lambda _: None))
        assert rows.to_arrow().num_rows == ROWS

    def theirs() -> None:
        channel = grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)])
        client = official.BigQueryReadClient(transport=BigQueryReadGrpcTransport(channel=channel))
        wanted = types.ReadSession(table=TABLE.path, data_format=types.DataFormat.ARROW)
        session = client.create_read_session(parent="projects/p", read_session=wanted)
        table = client.read_rows(session.streams[0].name).to_arrow(session)
        assert table.num_rows == ROWS

    print("Read, Arrow, one stream, to a table:")
    ours()
    best, other = measure("ours", ROWS, ours), measure("Google's reader", ROWS, theirs)
    print(f"  {best[0] / other[0]:.2f} times Google's reader, {best[1] / other[1]:.2f} per CPU s\n")


def main() -> None:
    with server() as address:
        append(address, batches(ROWS))
        read(address)


if __name__ == "__main__":
    main()
