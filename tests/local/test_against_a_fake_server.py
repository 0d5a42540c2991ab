"""The writer and the reader against a Storage API that refuses, stalls and drains.

The table itself is in the local BigQuery; only the Storage API is the fake.
"""

import threading
import time
from typing import Any

import grpc
import pyarrow as pa
import pytest
from google.cloud.bigquery_storage_v1 import types
from google.rpc import status_pb2

from dagster_bq_connector import BigQueryReader, BigQueryResource, DefaultStreamWriter
from dagster_bq_connector.errors import (
    FailedRowsError,
    QuotaError,
    RefusedError,
    TableNotFoundError,
    UnreachableError,
)
from dagster_bq_connector.read import rows as read_rows
from dagster_bq_connector.read import stream as read_stream
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


class Served:
    """Serves prepared batches over a number of streams, and counts what was taken from it."""

    def __init__(self, storage: FakeStorage, streams: int, batches: int, rows: int) -> None:
        self.schema = pa.schema([("id", pa.int64())])
        self.batches, self.rows, self.sent = batches, rows, 0
        self.lock = threading.Lock()
        storage.session = types.ReadSession(
            name="s",
            arrow_schema=types.ArrowSchema(serialized_schema=self.schema.serialize().to_pybytes()),
            streams=[types.ReadStream(name=f"s/{n}") for n in range(streams)],
            estimated_row_count=streams * batches * rows,
        )
        storage.read = self.read
        self.offsets: list[int] = []

    def response(self, offset: int) -> types.ReadRowsResponse:
        numbers = pa.array(range(offset, offset + self.rows), pa.int64())
        data = pa.record_batch([numbers], schema=self.schema).serialize().to_pybytes()
        batch = types.ArrowRecordBatch(serialized_record_batch=data)
        return types.ReadRowsResponse(arrow_record_batch=batch, row_count=self.rows)

    def read(self, request, _context):
        self.offsets.append(request.offset)
        for number in range(request.offset // self.rows, self.batches):
            with self.lock:
                self.sent += 1
            yield self.response(number * self.rows)


@pytest.fixture
def table(bigquery: BigQueryResource, dataset: str) -> str:
    with bigquery.get_client() as client:
        client.query_and_wait(f"CREATE TABLE {dataset}.t (id INT64)")
    return f"{dataset}.t"


def test_a_slow_consumer_is_not_run_over(
    faked: BigQueryResource,
    storage: FakeStorage,
    table: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Public failure case 59: two hundred batches of a megabyte, and nobody who takes them."""
    monkeypatch.setattr(read_rows, "WINDOW_BYTES", 8 * MIB)
    served = Served(storage, streams=4, batches=50, rows=MIB // 8)
    taken: list[int] = []
    take = read_stream.StreamReader._next

    def counted(self):
        message = take(self)
        taken.append(1)
        return message

    monkeypatch.setattr(read_stream.StreamReader, "_next", counted)
    batches = iter(BigQueryReader(bigquery=faked).read(table))
    next(batches)
    before = -1
    while before != len(taken):  # until the readers have nothing to do any more
        before = len(taken)
        time.sleep(0.5)
    # The window, what each of four readers holds in its hand, and the one that was consumed.
    assert len(taken) <= 8 + 4 + 1
    assert served.sent < 150  # and gRPC, which has buffers of its own, does not fetch the rest
    assert sum(batch.num_rows for batch in batches) == 199 * served.rows
    assert served.sent == 200


def test_a_stream_goes_on_from_its_last_row(
    faked: BigQueryResource, storage: FakeStorage, table: str
) -> None:
    served = Served(storage, streams=1, batches=6, rows=10)
    whole = served.read

    def broken(request, context):
        for number, response in enumerate(whole(request, context)):
            if len(served.offsets) < 3 and number == 2:
                context.abort(grpc.StatusCode.UNAVAILABLE, "draining")
            yield response

    storage.read = broken
    got = BigQueryReader(bigquery=faked).read(table).to_arrow()["id"].to_pylist()
    assert got == list(range(60))
    assert served.offsets == [0, 20, 40]


def test_a_stream_that_stalls_is_opened_again(
    faked: BigQueryResource,
    storage: FakeStorage,
    table: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(storage, streams=1, batches=4, rows=10)
    whole = served.read

    def stalling(request, context):
        for number, response in enumerate(whole(request, context)):
            if len(served.offsets) == 1 and number == 1:
                while context.is_active():
                    time.sleep(0.01)
                return
            yield response

    storage.read = stalling
    monkeypatch.setattr(read_stream, "IDLE_SECONDS", 0.5)
    got = BigQueryReader(bigquery=faked).read(table).to_arrow()["id"].to_pylist()
    assert got == list(range(40))
    assert served.offsets == [0, 10]


def test_a_read_that_is_refused_keeps_the_reason(
    faked: BigQueryResource, storage: FakeStorage, table: str
) -> None:
    Served(storage, streams=2, batches=4, rows=10)

    def refused(_request, context):
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the session is over")
        yield

    storage.read = refused
    with pytest.raises(RefusedError, match="the session is over"):
        BigQueryReader(bigquery=faked).read(table).to_arrow()


def test_a_sibling_that_trickles_hides_no_stall(
    faked: BigQueryResource,
    storage: FakeStorage,
    table: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(storage, streams=2, batches=8, rows=10)
    whole, stalled, reopened = served.read, threading.Event(), threading.Event()

    def uneven(request, context):
        if request.read_stream == "s/0" and not stalled.is_set():
            stalled.set()
            while context.is_active():
                time.sleep(0.01)
            return
        if request.read_stream == "s/0":
            reopened.set()
            yield from whole(request, context)
            return
        for response in whole(request, context):
            if not reopened.is_set():
                time.sleep(0.3)
            yield response
        assert reopened.wait(20)  # the trickle goes on until the other stream was opened again

    storage.read = uneven
    monkeypatch.setattr(read_stream, "IDLE_SECONDS", 0.5)
    assert BigQueryReader(bigquery=faked).read(table).to_arrow().num_rows == 160


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
        (8, QuotaError, "BigQuery allows no more for now: later"),
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
    faked: BigQueryResource, storage: FakeStorage, table: str
) -> None:
    def append(requests, context):
        for _ in requests:
            if storage.append_calls < 2:
                context.abort(grpc.StatusCode.NOT_FOUND, "Not found: Table")
            yield acknowledged()

    storage.append = append
    assert DefaultStreamWriter(bigquery=faked).append(pa.table({"id": [1]}), table).rows == 1
