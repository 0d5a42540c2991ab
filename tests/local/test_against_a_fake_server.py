"""The writer and the reader against a Storage API that refuses, stalls and drains.

The table itself is in the local BigQuery; only the Storage API is the fake.
"""

from typing import Any

import grpc
import pyarrow as pa
import pytest
from google.cloud.bigquery_storage_v1 import types
from google.rpc import status_pb2

from dagster_bq_connector import BigQueryResource, DefaultStreamWriter
from dagster_bq_connector.errors import (
    FailedRowsError,
    QuotaError,
    RefusedError,
    TableNotFoundError,
    UnreachableError,
)
from dagster_bq_connector.write import default_stream
from support.fake_storage import FakeStorage, Received, acknowledged

MIB = 1024 * 1024


@pytest.fixture
def faked(
    bigquery: BigQueryResource, fields: dict[str, Any], storage: FakeStorage
) -> BigQueryResource:
    other = {"storage_endpoint": f"http://{storage.address}", "deadline_seconds": 20}
    return BigQueryResource(**(fields | other))


def test_a_refused_size_is_halved_and_remembered(
    faked: BigQueryResource, storage: FakeStorage, dataset: str
) -> None:
    """Public failure case 8: twelve hundred rows of ten kilobytes, and a limit of four MiB."""
    received, limit = Received(), 4 * MIB

    storage.append = received.refusing(limit)
    writer = DefaultStreamWriter(bigquery=faked)
    rows = pa.table({"id": range(1200), "doc": ["x" * 10_000] * 1200})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default_stream, "PREFERRED_BYTES", default_stream.REQUEST_LIMIT)
        assert writer.append(rows, f"{dataset}.t").rows == 1200
        assert sorted(received.ids) == list(range(1200))
        assert any(size > limit for size in received.sizes)
        received.sizes.clear()
        writer.append(rows, f"{dataset}.t")
    assert received.sizes
    assert all(size <= limit for size in received.sizes)


def test_rows_are_cut_by_their_bytes_on_the_wire(
    faked: BigQueryResource, storage: FakeStorage, dataset: str
) -> None:
    received = Received()

    def append(requests, _context):
        decode = received.call()
        for request in requests:
            received.ids += decode(request)["id"].to_pylist()
            yield acknowledged()

    storage.append = append
    # Uneven on purpose: a mean size says nothing about the largest requests.
    sizes = [9 * MIB if n % 100 == 7 else 10 for n in range(300)]
    rows = pa.table({"id": range(300), "doc": ["x" * size for size in sizes]})
    assert DefaultStreamWriter(bigquery=faked).append(rows, f"{dataset}.t").rows == 300
    assert received.ids == list(range(300))
    assert max(received.sizes) <= 10 * MIB


def test_success_is_the_acknowledgement(
    faked: BigQueryResource, bigquery: BigQueryResource, storage: FakeStorage, dataset: str
) -> None:
    """Public failure case 15: the row count of the metadata lags behind; it is not asked."""
    storage.append = lambda requests, _: (acknowledged() for _ in requests)
    result = DefaultStreamWriter(bigquery=faked).append(pa.table({"id": [1, 2]}), f"{dataset}.t")
    assert result.rows == 2
    with bigquery.get_client() as client:
        assert client.get_table(f"{dataset}.t").num_rows == 0


def test_rows_that_the_server_refuses_are_taken_out(
    faked: BigQueryResource, storage: FakeStorage, dataset: str
) -> None:
    received = Received()

    def append(requests, _context):
        decode = received.call()
        for request in requests:
            ids = decode(request)["id"].to_pylist()
            if bad := [n for n, id_ in enumerate(ids) if id_ % 10 == 3]:
                errors = [types.RowError(index=n, message="no threes") for n in bad]
                status = status_pb2.Status(code=3, message="Errors found while processing rows.")
                yield types.AppendRowsResponse(error=status, row_errors=errors)
            else:
                received.ids += ids
                yield acknowledged()

    storage.append = append
    with pytest.raises(FailedRowsError, match="no threes") as caught:
        DefaultStreamWriter(bigquery=faked).append(
            pa.table({"id": range(50)}).to_reader(max_chunksize=20), f"{dataset}.t"
        )
    assert [row.index for row in caught.value.rows] == [3, 13, 23, 33, 43]
    assert caught.value.written == 45
    assert sorted(received.ids) == [n for n in range(50) if n % 10 != 3]


@pytest.mark.parametrize("code", [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.PERMISSION_DENIED])
def test_a_new_table_may_be_unknown_for_a_while(
    faked: BigQueryResource,
    storage: FakeStorage,
    dataset: str,
    code: grpc.StatusCode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    received = Received()

    def append(requests, context):
        decode = received.call()
        for request in requests:
            if storage.append_calls < 3:
                context.abort(code, "Permission denied on table (or it may not exist).")
            received.ids += decode(request)["id"].to_pylist()
            yield acknowledged()

    storage.append = append
    writer = DefaultStreamWriter(bigquery=faked)
    reader = pa.table({"id": range(30)}).to_reader(max_chunksize=10)
    assert writer.append(reader, f"{dataset}.t").rows == 30
    assert sorted(received.ids) == list(range(30))
    storage.append_calls = 0
    monkeypatch.setattr(default_stream, "NEW_TABLE_SECONDS", 0.0)
    with pytest.raises(TableNotFoundError, match="may not write to it"):
        writer.append(pa.table({"id": [1]}), f"{dataset}.t")


def test_a_refusal_ends_the_append_at_once(
    faked: BigQueryResource, storage: FakeStorage, dataset: str
) -> None:
    def append(_requests, context):
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the schema is a poem")
        yield acknowledged()

    storage.append = append
    with pytest.raises(RefusedError, match="the schema is a poem"):
        DefaultStreamWriter(bigquery=faked).append(pa.table({"id": range(9)}), f"{dataset}.t")


def test_many_refused_sizes_halve_once(
    faked: BigQueryResource, storage: FakeStorage, dataset: str
) -> None:
    """Each refused request in flight once halved the limit again, down to nothing."""
    received, limit = Received(), MIB

    storage.append = received.refusing(limit)
    writer = DefaultStreamWriter(bigquery=faked)
    rows = pa.table({"id": range(4000), "doc": ["x" * 10_000] * 4000})
    assert writer.append(rows, f"{dataset}.t").rows == 4000
    assert sorted(received.ids) == list(range(4000))
    remembered = faked.connect().clients.request_limit
    assert remembered is not None
    assert limit // 4 < remembered <= limit


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        (8, QuotaError, "BigQuery allows no more for now.*BigQuery said: later"),
        (14, UnreachableError, "no success within the deadline. Last failure: later"),
    ],
)
def test_an_answer_that_asks_for_patience_is_not_asked_for_ever(
    fields: dict[str, Any],
    storage: FakeStorage,
    dataset: str,
    code: int,
    error: type[Exception],
    text: str,
) -> None:
    asked: list[int] = []

    def append(requests, _context):
        for _ in requests:
            asked.append(1)
            yield types.AppendRowsResponse(error=status_pb2.Status(code=code, message="later"))

    storage.append = append
    short = {"storage_endpoint": f"http://{storage.address}", "deadline_seconds": 1}
    writer = DefaultStreamWriter(bigquery=BigQueryResource(**(fields | short)))
    with pytest.raises(error, match=text):
        writer.append(pa.table({"id": [1]}), f"{dataset}.t")
    assert 2 <= len(asked) < 30


def test_a_new_table_costs_its_requests_one_wait_together(
    faked: BigQueryResource,
    storage: FakeStorage,
    dataset: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    received = Received()

    def append(requests, context):
        decode = received.call()
        for request in requests:
            ids = decode(request)["id"].to_pylist()
            if storage.append_calls < 4:
                context.abort(grpc.StatusCode.NOT_FOUND, "Not found: Table")
            received.ids += ids
            yield acknowledged()

    storage.append = append
    pauses: list[float] = []
    monkeypatch.setattr(default_stream.time, "sleep", pauses.append)
    rows = pa.table({"id": range(40)}).to_reader(max_chunksize=1)
    assert DefaultStreamWriter(bigquery=faked).append(rows, f"{dataset}.t").rows == 40
    assert sorted(received.ids) == list(range(40))
    assert len(pauses) == 3


def test_who_lost_the_race_to_create_is_as_patient(
    faked: BigQueryResource, bigquery: BigQueryResource, storage: FakeStorage, dataset: str
) -> None:
    table = f"{dataset}.t"
    with bigquery.get_client() as client:
        client.query_and_wait(f"CREATE TABLE {table} (id INT64)")

    def append(requests, context):
        for _ in requests:
            if storage.append_calls < 2:
                context.abort(grpc.StatusCode.NOT_FOUND, "Not found: Table")
            yield acknowledged()

    storage.append = append
    assert DefaultStreamWriter(bigquery=faked).append(pa.table({"id": [1]}), table).rows == 1
