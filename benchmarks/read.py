"""Reads to an Arrow table: ours, against Google's reader and against gRPC alone."""

import subprocess
import sys
import time

import grpc
import pyarrow as pa
from google.cloud import bigquery_storage_v1 as official
from google.cloud.bigquery_storage_v1 import types
from google.cloud.bigquery_storage_v1.services.big_query_read.transports import (
    BigQueryReadGrpcTransport,
)

from benchmarks.backend import ROWS, TABLE, clients_of, server
from benchmarks.data import batches
from benchmarks.report import Call, Report
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.read.request import ReadRequest
from dagster_bq_connector.read.rows import WINDOW_BYTES, Rows
from dagster_bq_connector.read.session import create_session
from dagster_bq_connector.read.stream import METHOD, StreamReader

MIB = 2**20
SLOW_ROWS = 10_000_000
STREAMS = 8


def open_rows(address: str) -> Rows:
    clients = clients_of(address)
    request = ReadRequest(TABLE, None, (), "", None, STREAMS)
    session = create_session(clients.read, request, "p", 60)

    def open_stream(stream: str) -> StreamReader:
        return StreamReader(clients.channel, stream, 60)

    return Rows([session], open_stream, lambda: Progress("read", log=lambda _: None))


def run(report: Report) -> None:
    size = sum(batch.nbytes for batch in batches(ROWS))
    with server() as address:

        def ours() -> None:
            assert open_rows(address).to_arrow().num_rows == ROWS

        def theirs() -> None:
            options = [("grpc.max_receive_message_length", -1)]
            channel = grpc.insecure_channel(address, options=options)
            client = official.BigQueryReadClient(
                transport=BigQueryReadGrpcTransport(channel=channel)
            )
            wanted = types.ReadSession(table=TABLE.path, data_format=types.DataFormat.ARROW)
            session = client.create_read_session(parent="projects/p", read_session=wanted)
            table = client.read_rows(session.streams[0].name).to_arrow(session)
            assert table.num_rows == ROWS
            channel.close()

        def raw() -> None:
            method = clients_of(address).channel.unary_stream(METHOD)
            request = types.ReadRowsRequest(read_stream="s/0")
            for _ in method(types.ReadRowsRequest.serialize(request)):
                pass

        report.section("Read to an Arrow table, one stream, 12 mixed columns")
        best, other, limit = report.compare(
            {
                "ours": Call(ours, ROWS, size),
                "Google's reader": Call(theirs, ROWS, size),
                "gRPC alone, nothing parsed": Call(raw, ROWS, size),
            }
        ).values()
    report.result("of Google's reader", 100 * best.rows / other.rows, " %", 100)
    report.result("of gRPC alone", 100 * best.rows / limit.rows, " %", 50)
    report.section(f"Read by a slow consumer, {SLOW_ROWS:,} rows, {STREAMS} streams")
    with server(ROWS, STREAMS, SLOW_ROWS // ROWS // STREAMS + 1) as address:
        command = [sys.executable, "-m", "benchmarks.read", address]
        grown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    report.lines.append("")
    report.result("resident memory grew by", float(grown), " MiB", -WINDOW_BYTES / MIB)


def resident() -> float:
    """MiB of this process that are in memory now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / MIB


def consume_slowly(address: str) -> float:
    """How far memory grows beyond what it was before the first row, in MiB."""
    rows = open_rows(address)
    pa.default_memory_pool()
    before, peak, taken = resident(), 0.0, 0
    for number, batch in enumerate(rows):
        taken += batch.num_rows
        if number % 10 == 0:
            time.sleep(0.02)
            peak = max(peak, resident())
    assert taken >= SLOW_ROWS, taken
    return peak - before


if __name__ == "__main__":
    print(consume_slowly(sys.argv[1]))
