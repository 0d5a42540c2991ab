"""Connections to the fake server, and numbered requests for them."""

from typing import Any

import grpc
import pyarrow as pa
from google.cloud.bigquery_storage_v1 import types

from dagster_bq_connector.retry import Backoff
from dagster_bq_connector.write.connection import Connection, append_rows
from dagster_bq_connector.write.encode import ArrowEncoder, Request

STREAM = "projects/p/datasets/d/tables/t/streams/_default"
SCHEMA = pa.schema([("n", pa.int64())])
QUICK = Backoff(initial=0.01, cap=0.05, deadline=20)


def connect(channel: grpc.Channel, backoff: Backoff = QUICK, **options: Any) -> Connection:
    encoder = ArrowEncoder(SCHEMA, STREAM)
    return Connection(append_rows(channel, STREAM), encoder.first, backoff=backoff, **options)


def payload(number: int, size: int = 1) -> bytes:
    batch = pa.record_batch([pa.array([number] * size, pa.int64())], schema=SCHEMA)
    [request] = ArrowEncoder(SCHEMA, STREAM).cut(batch, 2**24, 2**24)
    assert isinstance(request, Request)
    return request.payload


def number_in(request: types.AppendRowsRequest) -> int:
    data = request.arrow_rows.rows.serialized_record_batch
    return pa.ipc.read_record_batch(pa.py_buffer(data), SCHEMA)["n"][0].as_py()
