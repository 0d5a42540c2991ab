"""Appends as protobuf: ours, from batches, against Google's writer with a message object a row."""

import time
from collections.abc import Callable
from typing import Any

import grpc
import pyarrow as pa
from google.cloud import bigquery_storage_v1 as official
from google.cloud.bigquery_storage_v1 import types, writer
from google.cloud.bigquery_storage_v1.services.big_query_write.transports import (
    BigQueryWriteGrpcTransport,
)
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from benchmarks.data import batches
from dagster_bq_connector.clients import Clients, Credentials
from dagster_bq_connector.endpoints import Endpoint, Endpoints
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.retry import Backoff
from dagster_bq_connector.schema.data import Batches
from dagster_bq_connector.schema.proto import row_type
from dagster_bq_connector.schema.types import table_fields
from dagster_bq_connector.table.admin import EnsuredTable
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.write import default_stream
from dagster_bq_connector.write.connection import Connection, append_rows
from dagster_bq_connector.write.encode import Request
from dagster_bq_connector.write.protobuf import ProtobufEncoder

ROWS = 1_000_000
FEW = 300_000  # for the writer that takes seconds for them
TABLE = TableRef("d", "t", "p")
STREAM = f"{TABLE.path}/streams/_default"


def measure(name: str, rows: int, call: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"  {name:45} {rows / wall:12,.0f} rows/s {rows / cpu:12,.0f} rows/CPU s")
    return rows / wall, rows / cpu


def message_class(descriptor: descriptor_pb2.DescriptorProto) -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="row.proto", package="benchmark")
    file.message_type.add().CopyFrom(descriptor)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("benchmark.Row"))


def googles(address: str, data: list[pa.RecordBatch]) -> Callable[[], None]:
    """What Google's samples do: fill a message a row, serialize it, send them by the batch.

    The rows are Python values already, the fastest way to fill a message is taken (an attribute
    after the other), and all batches are under way at once.
    """
    schema = data[0].schema
    descriptor = row_type(table_fields(schema))
    for field in descriptor.field:
        if field.name in ("amount", "civil"):  # as in the samples, not as bytes and packed bits
            field.type = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
    message = message_class(descriptor)
    kinds = {"day": pa.int32(), "created_at": pa.int64(), "amount": pa.string()}
    kinds["civil"] = pa.string()
    plain = pa.schema([field.with_type(kinds.get(field.name, field.type)) for field in schema])
    rows = [list(zip(*batch.cast(plain).to_pydict().values(), strict=True)) for batch in data]

    def call() -> None:
        channel = grpc.insecure_channel(address)
        transport = BigQueryWriteGrpcTransport(channel=channel)
        client = official.BigQueryWriteClient(transport=transport)
        template = types.AppendRowsRequest(write_stream=STREAM)
        template.proto_rows.writer_schema.proto_descriptor = descriptor
        stream = writer.AppendRowsStream(client, template)
        futures = []
        for batch in rows:
            serialized = []
            for values in batch:
                row = message()
                (
                    row.id,
                    row.quantity,
                    row.price,
                    row.weight,
                    row.paid,
                    row.customer,
                    row.note,
                    row.country,
                    row.amount,
                    row.day,
                    row.created_at,
                    row.civil,
                ) = values
                serialized.append(row.SerializeToString())
            request = types.AppendRowsRequest()
            request.proto_rows.rows = types.ProtoRows(serialized_rows=serialized)
            futures.append(stream.send(request))
        for future in futures:
            future.result()
        stream.close()
        channel.close()

    return call


def protobuf(address: str) -> None:
    data = batches(ROWS)
    schema = data[0].schema
    columns = table_fields(schema)
    clients = Clients(Endpoints(storage=Endpoint(address, tls=False)), Credentials())
    table = EnsuredTable(TABLE, columns, age=10**6)

    def ours() -> None:
        with Progress("append", log=lambda _: None) as progress:
            default_stream.append(
                clients, table, Batches(schema, iter(data)), progress, 60, encoder=ProtobufEncoder
            )

    encoder = ProtobufEncoder(columns, schema, STREAM)

    def encoded() -> list[bytes]:
        return [
            cut.payload
            for batch in data
            for cut in encoder.cut(batch, 2**23, 2**21)
            if isinstance(cut, Request)
        ]

    payloads = encoded()

    def prepared() -> None:
        open_call = append_rows(clients.channel, STREAM)
        connection = Connection(open_call, encoder.first, backoff=Backoff())
        for payload in payloads:
            connection.send(payload)
        connection.close()

    few = data[: FEW // data[0].num_rows]
    print("Append, protobuf, one connection:")
    ours()  # opens the connection
    best = measure("ours, from batches to acknowledgements", ROWS, ours)
    measure("ours, the encoding alone", ROWS, encoded)
    measure("ours, the same requests prepared", ROWS, prepared)
    other = measure("Google's writer, a message a row", FEW, googles(address, few))
    print(
        f"  {best[0] / other[0]:.1f} times Google's writer, "
        f"{best[1] / other[1]:.1f} times a CPU second\n"
    )
