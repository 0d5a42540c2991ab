"""Appends as Arrow: ours, from batches, against the same requests prepared and Google's writer."""

import statistics
import time

import grpc
import pyarrow as pa
from google.cloud import bigquery_storage_v1 as official
from google.cloud.bigquery_storage_v1 import types, writer
from google.cloud.bigquery_storage_v1.services.big_query_write.transports import (
    BigQueryWriteGrpcTransport,
)

from benchmarks.backend import ROWS, STREAM, TABLE, clients_of, server
from benchmarks.data import batches
from benchmarks.protobuf import FEW, googles
from benchmarks.report import Call, Report
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.retry import Backoff
from dagster_bq_connector.schema.data import Batches
from dagster_bq_connector.schema.types import table_fields
from dagster_bq_connector.table.admin import EnsuredTable
from dagster_bq_connector.write import default_stream
from dagster_bq_connector.write.connection import Connection, append_rows
from dagster_bq_connector.write.encode import ArrowEncoder, Request

SMALL = 200_000  # rows for the way that takes seconds for them


def run(report: Report) -> None:
    data = batches(ROWS)
    schema, size = data[0].schema, sum(batch.nbytes for batch in data)
    encoder = ArrowEncoder(schema, STREAM)
    payloads = [
        cut.payload
        for batch in data
        for cut in encoder.cut(batch, 2**23, 2**21)
        if isinstance(cut, Request)
    ]
    with server() as address:
        clients = clients_of(address)
        table = EnsuredTable(TABLE, table_fields(schema), age=10**6)

        def ours() -> None:
            with Progress("append", log=lambda _: None) as progress:
                default_stream.append(clients, table, Batches(schema, iter(data)), progress, 60)

        def prepared() -> None:
            open_call = append_rows(clients.channel, STREAM)
            connection = Connection(open_call, encoder.first, backoff=Backoff())
            for payload in payloads:
                connection.send(payload)
            connection.close()

        report.section("Append as Arrow, one connection, 12 mixed columns")
        found = report.compare(
            {
                "ours, from batches to acknowledgements": Call(ours, ROWS, size),
                "ours, the same requests prepared": Call(prepared, ROWS, size),
            }
        )
        best, limit = found.values()
        report.result("of the same bytes prepared", 100 * best.rows / limit.rows, " %", 50)
        few = data[: SMALL // data[0].num_rows]
        rows = data[: FEW // data[0].num_rows]
        other = report.compare(
            {
                "Google's writer, Arrow, `send().result()`": Call(_waiting(address, few), SMALL),
                "Google's writer, a protobuf message a row": Call(googles(address, rows), FEW),
            },
            repeats=3,
        )
        arrow, messages = other.values()
        report.result("against Arrow and `result()`", best.rows / arrow.rows, " times")
        report.result("against protobuf messages", best.rows / messages.rows, " times", 25)
        wait = _acknowledgement(clients.channel, encoder, data[0])
        report.result("one row to its acknowledgement, median of 1,000", wait, " ms", -1)


def _waiting(address: str, data: list[pa.RecordBatch]):
    """Each request is sent when the one before it was acknowledged."""

    def call() -> None:
        channel = grpc.insecure_channel(address)
        client = official.BigQueryWriteClient(transport=BigQueryWriteGrpcTransport(channel=channel))
        template = types.AppendRowsRequest(write_stream=STREAM)
        schema = data[0].schema.serialize().to_pybytes()
        template.arrow_rows.writer_schema.serialized_schema = schema
        stream = writer.AppendRowsStream(client, template)
        for batch in data:
            request = types.AppendRowsRequest()
            request.arrow_rows.rows.serialized_record_batch = batch.serialize().to_pybytes()
            stream.send(request).result()
        stream.close()
        channel.close()

    return call


def _acknowledgement(channel: grpc.Channel, encoder: ArrowEncoder, batch: pa.RecordBatch) -> float:
    connection = Connection(append_rows(channel, STREAM), encoder.first, backoff=Backoff())
    small = next(encoder.cut(batch.slice(0, 1), 2**23, 2**21))
    assert isinstance(small, Request)
    waited = []
    for _ in range(1000):
        began = time.perf_counter()
        connection.send(small.payload).result()
        waited.append((time.perf_counter() - began) * 1000)
    connection.close()
    return statistics.median(waited)
