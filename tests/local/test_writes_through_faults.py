"""What one failing call means for a write. Whole schedules of them are in tests/soak."""

import datetime as dt
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    DailyTable,
    DefaultStreamWriter,
    ExactlyOnceWriter,
    FileLoadsWriter,
    RowSlice,
)
from dagster_bq_connector.errors import RefusedError
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.table.admin import Creation
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.write import own_stream, streams
from dagster_bq_connector.write.exactly_once import Sending
from dagster_bq_connector.write.piece import Piece
from dagster_bq_connector.write.streams import Type
from support.fault_schedule import GRPC_CALL, SCHEMA_LAG, STREAM_STATE, Schedule
from support.fault_schedule import LOST as ACKNOWLEDGEMENT_LOST
from support.fault_server import FaultServer, call_of
from support.http_proxy import LOST, PASSED, Call, HttpProxy, Verdict
from support.slices import content, rows_of

pytestmark = pytest.mark.local_only("proxies stand between, which have no certificate of Google's")


class Script(Schedule):
    """Faults of the next calls, as they are told."""

    def __init__(self, **faults: list[str | None]) -> None:
        self.left = faults

    def fault(self, call: str) -> str | None:
        left = self.left.get(call.partition(",")[0])
        return left.pop(0) if left else None


@pytest.fixture
def server(fields: dict[str, Any]) -> Iterator[FaultServer]:
    with FaultServer(fields | {"deadline_seconds": 30}) as server:
        yield server


@pytest.fixture
def faulty(server: FaultServer) -> BigQueryResource:
    return BigQueryResource(**server.fields)


@pytest.fixture
def once(faulty: BigQueryResource, dataset: str) -> ExactlyOnceWriter:
    return ExactlyOnceWriter(bigquery=faulty, ledger=f"{dataset}_ledger")


def pieces() -> list[pa.Table]:
    return [rows_of(("a", number)) for number in range(4)]


ROWS = [("a", number) for number in range(4)]


def test_a_stream_that_takes_no_more_rows_ends_the_attempt_and_not_the_write(
    dataset: str, once: ExactlyOnceWriter, server: FaultServer, reader: BigQueryReader
) -> None:
    name = f"{dataset}.t"
    server.schedule = Script(AppendRows=[None, None, STREAM_STATE])
    with pytest.raises(RefusedError, match="takes no more rows.*write again"):
        once.append(pieces(), name, key=f"{dataset} k")
    assert content(reader, name) == []
    assert not once.append(pieces(), name, key=f"{dataset} k").replayed
    assert content(reader, name) == ROWS
    assert server.fired.faults[STREAM_STATE] == 1


def test_rows_whose_acknowledgement_is_lost_are_there_once_if_that_was_asked_for(
    dataset: str, once: ExactlyOnceWriter, server: FaultServer, reader: BigQueryReader
) -> None:
    """Public failure case 13: the server stores a request, and its answer is lost."""
    server.schedule = Script(AppendRows=[None, ACKNOWLEDGEMENT_LOST])
    once.append(pieces(), f"{dataset}.once", key=f"{dataset} k")
    server.schedule = Script(AppendRows=[None, ACKNOWLEDGEMENT_LOST])
    DefaultStreamWriter(bigquery=once.bigquery).append(pieces(), f"{dataset}.at_least_once")
    assert server.fired.faults[ACKNOWLEDGEMENT_LOST] == 2
    assert content(reader, f"{dataset}.once") == ROWS
    found = content(reader, f"{dataset}.at_least_once")
    assert set(found) == set(ROWS)
    assert len(found) > len(ROWS)


@pytest.mark.parametrize("kind", ["once", "stream"])
def test_servers_that_know_a_column_and_servers_that_do_not(
    dataset: str,
    once: ExactlyOnceWriter,
    server: FaultServer,
    bigquery: BigQueryResource,
    reader: BigQueryReader,
    kind: str,
) -> None:
    """Public failure case 50: for seconds after a change, every other request is refused."""
    name = f"{dataset}.t"
    writer = once if kind == "once" else DefaultStreamWriter(bigquery=once.bigquery)
    with bigquery.get_client() as client:
        client.query_and_wait(f"CREATE TABLE {name} (region STRING)")
        client.query_and_wait(f"ALTER TABLE {name} ADD COLUMN n INT64")
    server.schedule = Script(AppendRows=[None, SCHEMA_LAG, None, SCHEMA_LAG])
    writer.append(pieces(), name, key=f"{dataset} k" if kind == "once" else None)
    assert server.fired.faults[SCHEMA_LAG] == 2
    assert content(reader, name) == ROWS


def test_a_default_stream_is_never_over(
    dataset: str, faulty: BigQueryResource, server: FaultServer, reader: BigQueryReader
) -> None:
    server.schedule = Script(AppendRows=[STREAM_STATE, None, STREAM_STATE])
    DefaultStreamWriter(bigquery=faulty).append(pieces(), f"{dataset}.t")
    assert content(reader, f"{dataset}.t") == ROWS
    assert server.fired.faults[STREAM_STATE] == 2


@pytest.mark.parametrize("fault", GRPC_CALL)
def test_what_is_flushed_under_faults_is_visible_once(
    dataset: str,
    faulty: BigQueryResource,
    server: FaultServer,
    stream_writer: DefaultStreamWriter,
    reader: BigQueryReader,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    """A flush that was made answers ALREADY_EXISTS when it is repeated."""
    monkeypatch.setattr(streams, "ANSWER_SECONDS", 3.0)
    monkeypatch.setattr(own_stream, "STALL_SECONDS", 3.0)
    stream_writer.append(rows_of(("a", 0)).slice(0, 0), f"{dataset}.t")
    connected = faulty.connect()
    ref = TableRef.parse(f"{dataset}.t", connected.project)
    table = connected.admin.draft(ref, lambda: (), None, Creation()).make()
    server.schedule = Script(FlushRows=[fault])
    with Progress("Appending", print) as progress:
        sending = Sending(connected.clients, 1, progress, 30)
        [rows] = rows_of(*ROWS).to_batches()
        own = sending.open(table, rows.schema, Type.BUFFERED)
        own.send(Piece(rows, 0))
        [name] = own.finish()
        sending.streams.flush(name, 3)
    assert content(reader, f"{dataset}.t") == ROWS[:3]
    assert server.fired.faults[fault] == 1


def test_a_staging_table_whose_answer_was_lost_is_not_looked_up(
    dataset: str, fields: dict[str, Any], stream_writer: DefaultStreamWriter, reader: BigQueryReader
) -> None:
    """Google's client would look it up without a timeout, and wait for ever."""
    name = f"{dataset}.t"
    stream_writer.append(rows_of(("a", 9)), name)

    lost: list[Call] = []

    def decide(call: Call) -> Verdict:
        if call_of(call) == "tables.get" and "_dagster_bq_" in call.path:
            return Verdict(stalls=True)
        if call_of(call) == "tables.insert" and b"_dagster_bq_" in call.body and not lost:
            lost.append(call)
            return LOST
        return PASSED

    with HttpProxy(fields["api_endpoint"]) as proxy:
        proxy.decide = decide
        bigquery = BigQueryResource(**fields | {"api_endpoint": proxy.url, "deadline_seconds": 20})
        once = ExactlyOnceWriter(bigquery=bigquery, ledger=f"{dataset}_ledger")
        once.replace(rows_of(*ROWS), RowSlice.by_keys(name, "region", ["a"]), key=f"{dataset} k")
    assert lost
    assert content(reader, name) == ROWS


def test_a_limit_of_rates_that_cloud_storage_calls_forbidden_is_waited_for(
    dataset: str,
    faulty: BigQueryResource,
    server: FaultServer,
    staging: str,
    reader: BigQueryReader,
) -> None:
    server.schedule = Script(upload=["403 rateLimitExceeded", "403 rateLimitExceeded"])
    FileLoadsWriter(bigquery=faulty, staging=staging).append(pieces(), f"{dataset}.t")
    assert content(reader, f"{dataset}.t") == ROWS
    assert server.fired.faults["403 rateLimitExceeded"] == 2


def test_a_failure_that_passes_leaves_no_staged_file(
    dataset: str, fields: dict[str, Any], staging: str, staged: Callable[[], list[str]]
) -> None:
    failures: list[Verdict] = [
        Verdict(False, 503, "backendError"),
        Verdict(status=503, reason="backendError"),
    ]

    def decide(call: Call) -> Verdict:
        return failures.pop() if call.method == "DELETE" and failures else PASSED

    days = ["2026-08-01", "2026-08-02"]
    rows = pa.table({"day": pa.array(map(dt.date.fromisoformat, days), pa.date32()), "n": [1, 2]})
    slice_ = DailyTable(f"{dataset}.t", column="day").for_keys(days)
    with HttpProxy(fields["cloud_storage_endpoint"]) as proxy:
        proxy.decide = decide
        bigquery = BigQueryResource(**fields | {"cloud_storage_endpoint": proxy.url})
        FileLoadsWriter(bigquery=bigquery, staging=staging).append(rows, slice_)
    assert failures == []
    assert staged() == []
