"""How appends travel: over several connections, from threads and processes, at rest."""

import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dagster as dg
import grpc
import pyarrow as pa
import pytest

from dagster_bq_connector import BigQueryReader, BigQueryResource, DefaultStreamWriter
from dagster_bq_connector.errors import ConfigurationError
from dagster_bq_connector.write import default_stream, pool
from support.appending import append_from_fields, append_ids
from support.appending_job import appending
from support.fake_storage import FakeStorage, Received, Request, Response, acknowledged

SOAK = bool(os.environ.get("SOAK"))

MIB = 1024 * 1024


@pytest.fixture
def faked(fields: dict[str, Any], storage: FakeStorage) -> BigQueryResource:
    other = {"storage_endpoint": f"http://{storage.address}", "deadline_seconds": 20}
    return BigQueryResource(**(fields | other))


def ids_in(reader: BigQueryReader, table: str) -> list[int]:
    return sorted(reader.read(table).to_arrow()["id"].to_pylist())


def pieces(count: int, rows: int = 10) -> Iterator[pa.RecordBatch]:
    for number in range(count):
        yield pa.record_batch({"id": pa.array(range(number * rows, (number + 1) * rows))})


@pytest.mark.parametrize("connections", [1, 4])
def test_several_connections_bring_the_same_rows(
    bigquery: BigQueryResource, reader: BigQueryReader, dataset: str, connections: int
) -> None:
    writer = DefaultStreamWriter(bigquery=bigquery, connections=connections)
    assert writer.append(pieces(40), f"{dataset}.t").rows == 400
    assert ids_in(reader, f"{dataset}.t") == list(range(400))


def test_requests_are_spread_and_one_broken_connection_sends_its_own_again(
    faked: BigQueryResource, storage: FakeStorage, dataset: str
) -> None:
    received, all_open = Received(), threading.Barrier(4)
    calls: dict[int, list[int]] = {}
    numbers = itertools.count(1)

    def append(requests: Iterator[Request], context: grpc.ServicerContext) -> Iterator[Response]:
        decode, call = received.call(), next(numbers)
        calls[call] = []
        for number, request in enumerate(requests):
            ids = decode(request)["id"].to_pylist()
            calls[call] += ids
            if number == 0 and call <= 4:
                all_open.wait(20)  # none answers before all have a request
            if call == 2 and number == 3:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the connection is draining")
            received.ids += ids
            yield acknowledged()

    storage.append = append
    writer = DefaultStreamWriter(bigquery=faked, connections=4)
    result = writer.append(pieces(400), f"{dataset}.t")
    assert (result.rows, result.reconnects) == (4000, 1)
    assert sorted(received.ids) == list(range(4000))
    assert len(calls) == 5
    # What the broken call had taken without an answer came again over its successor, in order.
    broken = calls[2][-10:]
    assert calls[5][:10] == broken
    assert all(ids for ids in calls.values())


def test_few_rows_open_one_connection(
    faked: BigQueryResource, storage: FakeStorage, dataset: str
) -> None:
    storage.append = lambda requests, _: (acknowledged() for _ in requests)
    writer = DefaultStreamWriter(bigquery=faked, connections=8)
    assert writer.append(pa.table({"id": [1]}), f"{dataset}.t").rows == 1
    assert storage.append_calls == 1


@pytest.mark.parametrize("connections", [0, 65])
def test_a_number_of_connections_that_makes_no_sense_is_refused(
    bigquery: BigQueryResource, dataset: str, connections: int
) -> None:
    writer = DefaultStreamWriter(bigquery=bigquery, connections=connections)
    with pytest.raises(ConfigurationError, match=f"connections={connections}"):
        writer.append(pa.table({"id": [1]}), f"{dataset}.t")


def test_what_is_in_flight_over_all_connections_is_bounded(
    faked: BigQueryResource, storage: FakeStorage, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "POOL_BYTES", 4 * MIB)
    monkeypatch.setattr(pool, "SMALLEST_WINDOW", MIB)
    go_on, taken = threading.Event(), list[int]()

    def append(requests: Iterator[Request], _context: object) -> Iterator[Response]:
        for _ in requests:
            go_on.wait(20)
            yield acknowledged()

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(100):
            taken.append(number)
            yield pa.record_batch({"id": [number], "doc": ["x" * (MIB // 2 - 2000)]})

    def append_all() -> None:
        rows.append(writer.append(batches(), f"{dataset}.t").rows)

    storage.append, rows = append, list[int]()
    writer = DefaultStreamWriter(bigquery=faked, connections=4)
    thread = threading.Thread(target=append_all)
    thread.start()
    full = 4 * 2 + 1  # two in each window, and one that waits for room
    end = time.monotonic() + 60
    while len(taken) < full and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(1)
    in_flight = len(taken)
    go_on.set()
    assert in_flight == full
    thread.join(60)
    assert rows == [100]


def test_a_full_connection_does_not_hold_up_the_others(
    faked: BigQueryResource, storage: FakeStorage, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "POOL_BYTES", 2048)
    monkeypatch.setattr(pool, "SMALLEST_WINDOW", 1024)
    go_on, received, numbers = threading.Event(), Received(), itertools.count(1)

    def append(requests: Iterator[Request], _context: object) -> Iterator[Response]:
        decode, call = received.call(), next(numbers)
        for request in requests:
            ids = decode(request)["id"].to_pylist()
            if call == 1:
                assert go_on.wait(20)
            received.ids += ids
            if len(received.ids) == 150:
                go_on.set()
            yield acknowledged()

    storage.append = append
    writer = DefaultStreamWriter(bigquery=faked, connections=2)
    assert writer.append(pieces(200, rows=1), f"{dataset}.t").rows == 200
    assert sorted(received.ids) == list(range(200))


def test_a_slow_source_lets_its_calls_rest(
    faked: BigQueryResource, storage: FakeStorage, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Public failure case 1: the service would end the call after ten minutes, with an error."""
    monkeypatch.setattr(default_stream, "IDLE_SECONDS", 0.1)
    received, ended = Received(), threading.Semaphore(0)

    def append(requests: Iterator[Request], context: grpc.ServicerContext) -> Iterator[Response]:
        context.add_callback(ended.release)
        decode = received.call()
        for request in requests:
            received.ids += decode(request)["id"].to_pylist()
            yield acknowledged()

    def slowly() -> Iterator[pa.RecordBatch]:
        for number, piece in enumerate(pieces(4)):
            assert number == 0 or ended.acquire(timeout=20)
            yield piece

    storage.append = append
    result = DefaultStreamWriter(bigquery=faked).append(slowly(), f"{dataset}.t")
    assert (result.rows, result.reconnects) == (40, 0)
    assert received.ids == list(range(40))
    assert storage.append_calls == 4


def test_a_network_that_stalls_stops_no_append(
    faked: BigQueryResource, storage: FakeStorage, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Public failure case 60: the server stops sending without closing."""
    monkeypatch.setattr(default_stream, "STALL_SECONDS", 0.5)
    received = Received()

    def append(requests: Iterator[Request], context: grpc.ServicerContext) -> Iterator[Response]:
        decode, call = received.call(), storage.append_calls
        for number, request in enumerate(requests):
            ids = decode(request)["id"].to_pylist()
            while call == 1 and number == 2 and context.is_active():
                time.sleep(0.01)
            received.ids += ids
            yield acknowledged()

    storage.append = append
    result = DefaultStreamWriter(bigquery=faked).append(pieces(5), f"{dataset}.t")
    assert result.rows == 50
    assert set(received.ids) == set(range(50))
    assert storage.append_calls == 2


def test_a_limit_that_was_found_holds_for_the_endpoint(
    fields: dict[str, Any], faked: BigQueryResource, storage: FakeStorage, dataset: str
) -> None:
    received, rows = Received(), pa.table({"id": range(300), "doc": ["x" * 10_000] * 300})
    storage.append = received.refusing(MIB)
    DefaultStreamWriter(bigquery=faked).append(rows, f"{dataset}.t")
    assert any(size > MIB for size in received.sizes)
    received.sizes.clear()
    # Other clients of the same endpoint know it too.
    same = {"storage_endpoint": f"http://{storage.address}", "quota_project": "other"}
    again = BigQueryResource(**(fields | same))
    assert again.connect().clients is not faked.connect().clients
    DefaultStreamWriter(bigquery=again).append(rows, f"{dataset}.t")
    assert received.sizes
    assert all(size <= MIB for size in received.sizes)
    # Another endpoint may take more.
    other = FakeStorage()
    elsewhere = BigQueryResource(**(fields | {"storage_endpoint": f"http://{other.address}"}))
    assert elsewhere.connect().clients.request_limit is None
    received.sizes.clear()
    other.append = received.refusing(10 * MIB)
    DefaultStreamWriter(bigquery=elsewhere).append(rows, f"{dataset}.t")
    other.stop()
    assert any(size > MIB for size in received.sizes)


@pytest.mark.parametrize("connections", [1, 3])
def test_eight_threads_append_through_one_writer(
    bigquery: BigQueryResource, reader: BigQueryReader, dataset: str, connections: int
) -> None:
    writer = DefaultStreamWriter(bigquery=bigquery, connections=connections)
    starts = range(0, 1600, 100)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: append_ids(writer, f"{dataset}.t", n, n + 100), starts))
    assert ids_in(reader, f"{dataset}.t") == list(range(1600))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_process_appends_between_appends_of_its_parent(
    fields: dict[str, Any],
    stream_writer: DefaultStreamWriter,
    reader: BigQueryReader,
    dataset: str,
    method: Any,
) -> None:
    """As a step does in a process of Dagster's, and whatever a user forks."""
    table, start = f"{dataset}.t", multiprocessing.get_context(method).Process
    append_ids(stream_writer, table, 0, 100)  # the parent's channel is open, with its threads
    assert ids_in(reader, table) == list(range(100))
    starts = (100, 300) if SOAK or method == "fork" else (100,)  # a new process takes its time
    for first in starts:
        run: Any = (append_from_fields, fields) if method != "fork" else (append_ids, stream_writer)
        child = start(target=run[0], args=(run[1], table, first, first + 100))
        child.start()
        child.join(120)
        hung = child.is_alive()
        child.kill()
        assert not hung
        assert child.exitcode == 0
        append_ids(stream_writer, table, first + 100, first + 200)
    assert ids_in(reader, table) == list(range(starts[-1] + 200))


@pytest.mark.parametrize("method", ["forkserver"])
def test_the_steps_of_a_run_append_from_processes_of_their_own(
    fields: dict[str, Any],
    stream_writer: DefaultStreamWriter,
    reader: BigQueryReader,
    dataset: str,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = f"{dataset}.t"
    monkeypatch.chdir(Path(__file__).parents[1])  # where the steps find the module of the job
    monkeypatch.setenv("DAGSTER_DISABLE_TELEMETRY", "yes")
    append_ids(stream_writer, table, 0, 100)  # in this process first
    steps = {
        name: {"config": {"fields": fields, "table": table, "first": first}}
        for name, first in (("one", 100), ("two", 200))
    }
    execution = {"max_concurrent": 2, "start_method": {method: {}}}
    with dg.DagsterInstance.local_temp() as instance:
        result = dg.execute_job(
            dg.reconstructable(appending),
            instance=instance,
            run_config={"execution": {"config": execution}, "ops": steps},
        )
        assert result.success
    append_ids(stream_writer, table, 300, 400)
    assert ids_in(reader, table) == list(range(400))
