"""Appends to a table that changes while they run, or just before.

The table itself is in the local BigQuery; the Storage API is the fake one, which scripts what the
service's servers do until each of them has noticed.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import grpc
import pyarrow as pa
import pytest
from google.cloud.bigquery import SchemaField
from google.cloud.bigquery_storage_v1 import types
from google.rpc import status_pb2

from dagster_bq_connector import BigQueryResource, DefaultStreamWriter
from dagster_bq_connector.errors import QuotaError, SchemaError, TableNotFoundError
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.retry import Backoff
from dagster_bq_connector.schema.data import Batches
from dagster_bq_connector.table.admin import EnsuredTable
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.write import default_stream
from support.fake_storage import FakeStorage, Received, Request, Response, acknowledged, refused

Code = types.StorageError.StorageErrorCode
ID = SchemaField("id", "INT64")
EXTRA = "Input schema has more fields than BigQuery schema, extra fields: 'c'"


@pytest.fixture
def faked(fields: dict[str, Any], storage: FakeStorage) -> BigQueryResource:
    other = {"storage_endpoint": f"http://{storage.address}", "deadline_seconds": 20}
    return BigQueryResource(**(fields | other))


@pytest.fixture
def writer(faked: BigQueryResource, monkeypatch: pytest.MonkeyPatch) -> DefaultStreamWriter:
    monkeypatch.setattr(default_stream, "POLL", Backoff(initial=0.01, cap=0.05))
    return DefaultStreamWriter(bigquery=faked)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the progress says of waits."""
    said: list[str] = []
    monkeypatch.setattr(Progress, "wait", lambda _self, state: said.append(state))
    return said


def sql(bigquery: BigQueryResource, statement: str) -> None:
    with bigquery.get_client() as client:
        client.query_and_wait(statement)


def with_column(*ids: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(ids), "c": pa.array([f"c{id_}" for id_ in ids])})


def without_column(*ids: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(ids)})


def aborted(context: grpc.ServicerContext) -> Response:
    from grpc_status import rpc_status

    context.abort_with_status(
        rpc_status.to_status(refused(Code.SCHEMA_MISMATCH_EXTRA_FIELDS, EXTRA).error)
    )
    raise AssertionError


def answered(_context: grpc.ServicerContext) -> Response:
    return refused(Code.SCHEMA_MISMATCH_EXTRA_FIELDS, EXTRA)


@pytest.mark.parametrize("refuse", [answered, aborted])
@pytest.mark.parametrize("connections", [1, 3])
def test_a_column_that_was_just_added_is_waited_for(
    faked: BigQueryResource,
    writer: DefaultStreamWriter,
    storage: FakeStorage,
    dataset: str,
    told: list[str],
    refuse: Any,
    connections: int,
) -> None:
    """Public failure case 10: ALTER TABLE ADD COLUMN, an append at once, and three refusals."""
    received, rows, numbers = Received(), list[Any](), itertools.count(1)

    def append(requests: Iterator[Request], context: grpc.ServicerContext) -> Iterator[Response]:
        decode, call = received.call(), next(numbers)
        for request in requests:
            batch = decode(request)
            if call <= 3:
                yield refuse(context)
            else:
                rows.extend(batch.to_pylist())
                yield acknowledged()

    storage.append = append
    sql(faked, f"CREATE TABLE {dataset}.t (id INT64)")
    sql(faked, f"ALTER TABLE {dataset}.t ADD COLUMN c STRING")
    writer = DefaultStreamWriter(bigquery=faked, connections=connections)
    data = [with_column(n) for n in range(5)]
    assert writer.append(data, f"{dataset}.t").rows == 5
    assert sorted(row["id"] for row in rows) == list(range(5))
    assert all(row["c"] == f"c{row['id']}" for row in rows)
    assert all(schema.names == ["id", "c"] for schema in received.schemas)
    assert storage.append_calls >= 4
    assert any(EXTRA in wait for wait in told)


def test_a_column_is_not_waited_for_without_end(
    faked: BigQueryResource,
    writer: DefaultStreamWriter,
    storage: FakeStorage,
    dataset: str,
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage.append = lambda requests, context: (answered(context) for _ in requests)
    monkeypatch.setattr(default_stream, "SCHEMA_LAG_SECONDS", 0.3)
    sql(faked, f"CREATE TABLE {dataset}.t (id INT64, c STRING)")
    with pytest.raises(SchemaError) as caught:
        writer.append(with_column(1), f"{dataset}.t")
    text = str(caught.value)
    assert f"{dataset}.t has the columns of the rows ('c')" in text
    assert "append the rows again later" in text
    assert EXTRA in text
    assert len(told) >= 3


def test_a_column_that_was_lost_is_named_at_once(
    faked: BigQueryResource,
    writer: DefaultStreamWriter,
    storage: FakeStorage,
    dataset: str,
    told: list[str],
) -> None:
    def append(requests: Iterator[Request], context: grpc.ServicerContext) -> Iterator[Response]:
        next(requests)
        yield acknowledged()
        next(requests)
        sql(faked, f"ALTER TABLE {dataset}.t DROP COLUMN c")
        yield answered(context)

    storage.append = append
    sql(faked, f"CREATE TABLE {dataset}.t (id INT64, c STRING)")
    with pytest.raises(SchemaError, match=r"has changed.*The table has no column 'c'") as caught:
        writer.append([with_column(1, 2), with_column(3)], f"{dataset}.t")
    assert caught.value.__notes__ == ["2 row(s) of this append were acknowledged before it failed."]
    assert told == []


def changed(**columns: str) -> Response:
    """An acknowledgement that tells of the table's columns."""
    fields = [{"name": name, "type": kind, "mode": "NULLABLE"} for name, kind in columns.items()]
    return Response(append_result={}, updated_schema={"fields": fields})


@pytest.mark.parametrize("tells", [True, False])
def test_a_later_batch_may_have_a_column_that_the_table_gained(
    faked: BigQueryResource,
    writer: DefaultStreamWriter,
    storage: FakeStorage,
    dataset: str,
    tells: bool,
) -> None:
    received, rows = Received(), list[Any]()

    def append(requests: Iterator[Request], _context: object) -> Iterator[Response]:
        decode = received.call()
        for request in requests:
            rows.extend(decode(request).to_pylist())
            yield changed(id="INT64", c="STRING") if tells and len(rows) == 1 else acknowledged()

    def batches() -> Iterator[pa.RecordBatch]:
        yield without_column(1)
        sql(faked, f"ALTER TABLE {dataset}.t ADD COLUMN c STRING")
        yield without_column(2)
        yield with_column(3)
        yield without_column(4)

    storage.append = append
    sql(faked, f"CREATE TABLE {dataset}.t (id INT64)")
    data = Batches(pa.schema([("id", pa.int64())]), batches())
    result = writer.append(data, f"{dataset}.t")
    assert result.rows == 4
    assert [column.name for column in result.columns] == ["id", "c"]
    assert rows == [{"id": 1}, {"id": 2}, {"id": 3, "c": "c3"}, {"id": 4}]
    assert [schema.names for schema in received.schemas] == [["id"], ["id", "c"], ["id"]]


def test_a_change_that_does_not_touch_the_rows_needs_no_new_call(
    faked: BigQueryResource, writer: DefaultStreamWriter, storage: FakeStorage, dataset: str
) -> None:
    received = Received()

    def append(requests: Iterator[Request], _context: object) -> Iterator[Response]:
        decode = received.call()
        for request in requests:
            received.ids += decode(request)["id"].to_pylist()
            yield changed(id="INT64", c="STRING")

    def batches() -> Iterator[pa.RecordBatch]:
        yield without_column(1)
        sql(faked, f"ALTER TABLE {dataset}.t ADD COLUMN c STRING")
        for number in range(2, 9):
            yield without_column(number)

    storage.append = append
    sql(faked, f"CREATE TABLE {dataset}.t (id INT64)")
    result = writer.append(Batches(pa.schema([("id", pa.int64())]), batches()), f"{dataset}.t")
    assert received.ids == list(range(1, 9))
    assert [column.name for column in result.columns] == ["id", "c"]
    assert storage.append_calls == 1


def test_a_column_that_the_table_lacks_is_refused_midway(
    faked: BigQueryResource, writer: DefaultStreamWriter, storage: FakeStorage, dataset: str
) -> None:
    storage.append = lambda requests, _: (acknowledged() for _ in requests)
    data = iter([without_column(1, 2), with_column(3)])
    with pytest.raises(SchemaError, match="has no column 'c'") as caught:
        writer.append(Batches(pa.schema([("id", pa.int64())]), data), f"{dataset}.t")
    assert "2 row(s) of this append were acknowledged" in caught.value.__notes__[0]


def not_found_twice(storage: FakeStorage, received: Received) -> Any:
    def append(requests: Iterator[Request], context: grpc.ServicerContext) -> Iterator[Response]:
        decode, call = received.call(), storage.append_calls
        for request in requests:
            batch = decode(request)
            if call <= 2:
                context.abort(grpc.StatusCode.NOT_FOUND, "Requested entity was not found.")
            received.ids += batch["id"].to_pylist()
            yield acknowledged()

    return append


def test_every_row_arrives_in_a_table_that_was_just_made_anew(
    faked: BigQueryResource, writer: DefaultStreamWriter, storage: FakeStorage, dataset: str
) -> None:
    """Public failure case 11: dropped and created again, an append at once, NOT_FOUND twice."""
    received = Received()
    storage.append = not_found_twice(storage, received)
    sql(faked, f"CREATE TABLE {dataset}.t (id INT64)")
    sql(faked, f"DROP TABLE {dataset}.t")
    data = pa.table({"id": range(30)}).to_reader(max_chunksize=10)
    assert writer.append(data, f"{dataset}.t").rows == 30
    assert sorted(received.ids) == list(range(30))
    assert storage.append_calls == 3


def lower_floor(faked: BigQueryResource, found: EnsuredTable | Exception) -> int:
    """Append ten rows to an old table; `found` is what it is when it is looked up again."""
    table = EnsuredTable(TableRef("d", "t", "p"), [ID], age=10**6)

    def look_up() -> EnsuredTable:
        if isinstance(found, Exception):
            raise found
        return found

    data = pa.table({"id": range(10)})
    with Progress("append") as progress:
        batches = Batches(data.schema, iter(data.to_batches()))
        clients = faked.connect().clients
        return default_stream.append(clients, table, batches, progress, 20, look_up=look_up).rows


@pytest.mark.usefixtures("writer")
def test_a_table_made_anew_while_rows_are_appended_is_waited_for(
    faked: BigQueryResource, storage: FakeStorage
) -> None:
    received = Received()
    storage.append = not_found_twice(storage, received)
    anew = EnsuredTable(TableRef("d", "t", "p"), [ID], age=1.0)
    assert lower_floor(faked, anew) == 10
    assert sorted(received.ids) == list(range(10))


@pytest.mark.usefixtures("writer")
def test_a_table_that_is_gone_is_not_waited_for(
    faked: BigQueryResource, storage: FakeStorage, told: list[str]
) -> None:
    storage.append = not_found_twice(storage, Received())
    with pytest.raises(TableNotFoundError, match="dropped"):
        lower_floor(faked, TableNotFoundError("it was dropped"))
    old = EnsuredTable(TableRef("d", "t", "p"), [ID], age=10**6)
    with pytest.raises(TableNotFoundError, match="may not write to it"):
        lower_floor(faked, old)
    assert told == []


def test_a_quota_of_a_day_is_not_waited_for(
    faked: BigQueryResource, writer: DefaultStreamWriter, storage: FakeStorage, dataset: str
) -> None:
    def append(requests: Iterator[Request], _context: object) -> Iterator[Response]:
        for _ in requests:
            yield Response(
                error=status_pb2.Status(code=8, message="Quota 'Bytes per day' exceeded")
            )

    storage.append = append
    with pytest.raises(QuotaError, match="used up.*write less often.*Quota 'Bytes per day'"):
        writer.append(without_column(1), f"{dataset}.t")
    assert storage.append_calls == 1
