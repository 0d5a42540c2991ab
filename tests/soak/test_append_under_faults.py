"""Appends over the default stream while the server fails in every way that it is known to.

`make test` runs it small; `make soak` at full count, and writes tests/SOAK.md.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from threading import Lock
from typing import Any

import grpc
import pyarrow as pa
import pytest
from google.cloud.bigquery_storage_v1 import types
from google.rpc import status_pb2

from dagster_bq_connector import BigQueryResource, DefaultStreamWriter
from dagster_bq_connector.errors import FailedRowsError
from dagster_bq_connector.write import default_stream
from support.fake_storage import FakeStorage, acknowledged, refused
from support.fault_schedule import ENDINGS
from support.proxy import Proxy
from support.soak_report import table, write_section

SEED = int(os.environ.get("SOAK_SEED", "20260801"))
REQUESTS = int(os.environ.get("SOAK_REQUESTS", "300"))
ROWS = 10  # of one request

# What may befall a request, and how often in a thousand.
FAULTS = {
    "unavailable": 15,
    "idle": 10,
    "restart": 10,
    "internal": 10,
    "throttled": 10,
    "throttled in the answer": 10,
    "row refused": 20,
    "lost acknowledgement": 15,
    "clean end": 10,
    "stall": 3,
    "schema lag": 5,
    "connection cut": 5,
    "connection cut after storing": 5,
}
# Those that end a call.
ENDED = {
    "unavailable": "UNAVAILABLE",
    "idle": "ABORTED, idle",
    "restart": "ABORTED, restart",
    "internal": "INTERNAL",
    "throttled": "RESOURCE_EXHAUSTED",
}
CONNECTIONS = 3


class FailingServer:
    """Stores rows, and fails by a seeded schedule."""

    def __init__(self, seed: int, proxy: Proxy) -> None:
        self.random, self.proxy, self.lock = random.Random(seed), proxy, Lock()
        self.seen = 0
        self.fired: Counter[str] = Counter()
        self.stored: Counter[int] = Counter()

    def fault(self) -> str | None:
        self.seen += 1
        if self.seen % 10 == 0 and self.seen // 10 <= len(FAULTS):  # each once, whatever comes
            name = list(FAULTS)[self.seen // 10 - 1]
            self.fired[name] += 1
            return name
        number = self.random.randrange(1000)
        for name, share in FAULTS.items():
            if number < share:
                self.fired[name] += 1
                return name
            number -= share
        return None

    def append(self, requests: Any, context: grpc.ServicerContext) -> Any:
        schema = None
        for request in requests:
            if serialized := request.arrow_rows.writer_schema.serialized_schema:
                schema = pa.ipc.read_schema(pa.py_buffer(serialized))
            data = pa.py_buffer(request.arrow_rows.rows.serialized_record_batch)
            ids = pa.ipc.read_record_batch(data, schema)["id"].to_pylist()
            with self.lock:
                fault = self.fault()
            if fault == "connection cut":
                self.proxy.cut()
                return
            if fault == "schema lag":
                yield refused(types.StorageError.StorageErrorCode.SCHEMA_MISMATCH_EXTRA_FIELDS, "?")
                continue
            if fault == "stall":
                while context.is_active():
                    time.sleep(0.01)
                return
            if fault == "clean end":
                return
            self.abort(fault, context)
            if fault == "throttled in the answer":
                yield types.AppendRowsResponse(error=status_pb2.Status(code=8, message="later"))
            elif fault == "row refused":
                error = types.RowError(index=0, message="not today")
                status = status_pb2.Status(code=3, message="Errors found while processing rows.")
                yield types.AppendRowsResponse(error=status, row_errors=[error])
            else:
                with self.lock:
                    self.stored.update(ids)
                if fault == "connection cut after storing":
                    self.proxy.cut()
                    return
                if fault == "lost acknowledgement":
                    context.abort(grpc.StatusCode.UNAVAILABLE, "gone with the answer")
                yield acknowledged()

    def abort(self, fault: str | None, context: grpc.ServicerContext) -> None:
        if fault in ENDED:
            context.abort(*ENDINGS[ENDED[fault]])


def batches() -> Iterator[pa.RecordBatch]:
    """A source that is slow at times, so that the calls rest."""
    for number in range(REQUESTS):
        if number % 50 == 49:
            time.sleep(0.2)
        yield pa.record_batch({"id": range(number * ROWS, (number + 1) * ROWS)})


def test_no_row_is_lost(
    fields: dict[str, Any],
    storage: FakeStorage,
    dataset: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proxy = Proxy(storage.port)
    server = FailingServer(SEED, proxy)
    storage.append = server.append
    monkeypatch.setattr(default_stream, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(default_stream, "IDLE_SECONDS", 0.05)
    endpoint = {"storage_endpoint": f"http://{proxy.address}", "deadline_seconds": 60}
    bigquery = BigQueryResource(**(fields | endpoint))
    writer = DefaultStreamWriter(bigquery=bigquery, connections=CONNECTIONS)
    began = time.monotonic()
    refused: set[int] = set()
    written = 0
    try:
        written = writer.append(batches(), f"{dataset}.t").rows
    except FailedRowsError as error:
        refused, written = {row.index for row in error.rows}, error.written
    seconds = time.monotonic() - began
    proxy.stop()
    sent = set(range(REQUESTS * ROWS))
    lost = sent - refused - set(server.stored)
    assert lost == set()
    assert written == len(sent) - len(refused)
    assert len(refused) <= server.fired["row refused"]
    doubled = sum(server.stored.values()) - len(server.stored)
    assert [name for name in FAULTS if not server.fired[name]] == []
    if os.environ.get("SOAK"):
        report(server, len(sent), len(refused), doubled, seconds)


def report(server: FailingServer, sent: int, refused: int, doubled: int, seconds: float) -> None:
    counts = [
        (f"requests of {ROWS} rows", f"{REQUESTS:,}"),
        ("connections, from a source that pauses longer than they rest", f"{CONNECTIONS}"),
        ("rows", f"{sent:,}"),
        ("refused by the server, and named", f"{refused:,}"),
        ("lost", "0"),
        ("stored more than once (the method is at least once)", f"{doubled:,}"),
    ]
    fired = [(name, f"{server.fired[name]:,}") for name in FAULTS]
    text = f"{table(('', ''), counts)}\n\n{table(('fault', 'fired'), fired)}"
    write_section("Appends over the default stream under faults", SEED, seconds, text)
