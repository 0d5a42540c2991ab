"""Writes by every method while each call on their way fails by a seeded schedule.

A write is tried again under its key until it succeeds; now and then its first attempt is abandoned
at some step, or two attempts run at once. `make test` runs a few schedules; `make soak` 500 of each
method, and writes tests/SOAK.md.
"""

import datetime as dt
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    BigQueryWriter,
    DailyTable,
    DefaultStreamWriter,
    ExactlyOnceWriter,
    FileLoadsWriter,
    RowSlice,
    TableOptions,
    TimePartitioning,
)
from dagster_bq_connector import retry as pauses
from dagster_bq_connector.errors import ConnectorError, QuotaError, UnreachableError
from dagster_bq_connector.write import default_stream, own_stream, staging, steps, streams
from support.fault_schedule import CALLS, FAULTS, SELDOM, Fired, Schedule
from support.fault_server import FaultServer
from support.kills import rows_of
from support.soak_report import table, write_section

SOAK = bool(os.environ.get("SOAK"))
SEED = int(os.environ.get("SOAK_SEED", "20260801"))
SCHEDULES = int(os.environ.get("SOAK_SCHEDULES", "500" if SOAK else "2"))
WORKERS = 8 if SOAK else 4  # threads: a write waits for most of its time
ROWS, BATCH = 40, 10
TABLE_LIFE = SELDOM["tables.insert"]  # writes to one table; the next is made under faults, too
TRIES = 12
FIRST_DAY = dt.date(2026, 1, 1)
OLD = 1_000_000  # numbers of the rows that a replacement finds

METHODS = {
    "default stream append": ("DefaultStreamWriter", "append", "table"),
    "exactly-once append": ("ExactlyOnceWriter", "append", "table"),
    "exactly-once replace": ("ExactlyOnceWriter", "replace", "partition"),
    "file loads append": ("FileLoadsWriter", "append", "table"),
    "file loads replace": ("FileLoadsWriter", "replace", "partition"),
    "replace a slice": ("FileLoadsWriter", "replace", "slice"),
}
pytestmark = pytest.mark.local_only("proxies stand between, which have no certificate of Google's")


class Abandoned(BaseException):
    """What ends an attempt as if its process had died: nothing is put in order."""


class Deaths(threading.local):
    """After how many more steps the attempt of a thread is abandoned."""

    left: int | None = None

    def observe(self, _name: str, _over: bool) -> None:
        if self.left is None:
            return
        if self.left <= 0:
            raise Abandoned
        self.left -= 1


@dataclass
class Outcome:
    """What came of the schedules of a method."""

    fired: list[Fired] = field(default_factory=list[Fired])
    counts: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    seconds: float = 0.0

    def total(self, name: str) -> int:
        return sum(each.faults[name] for each in self.fired)

    def calls(self, name: str) -> int:
        return sum(each.calls[name] for each in self.fired)


OUTCOMES: dict[str, Outcome] = {}
DEATHS = Deaths()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same waits, but short; small requests and files; deaths."""
    longer = pauses.Backoff.pauses

    def shorter(self: pauses.Backoff) -> Iterator[float]:
        return (min(pause / 10, 0.2) for pause in longer(self))

    monkeypatch.setattr(pauses.Backoff, "pauses", shorter)
    for module in (pauses, staging):
        quicker = module.DEFAULT_RETRY.with_delay(initial=0.02, maximum=0.2)
        monkeypatch.setattr(module, "DEFAULT_RETRY", quicker)
    for module in (pauses, streams):
        monkeypatch.setattr(module, "ANSWER_SECONDS", 5.0)
    for module in (default_stream, own_stream):
        monkeypatch.setattr(module, "STALL_SECONDS", 2.0)
    for module in (default_stream, streams):  # a table lives longer here than it is new
        monkeypatch.setattr(module, "NEW_TABLE_SECONDS", 3600.0)
    monkeypatch.setattr(staging, "FILE_BYTES", 600)
    before = list(steps._observers)
    steps.observe(DEATHS.observe)
    yield
    steps._observers[:] = before


class Worker:
    """Runs schedules one by one, each a write of rows that no other has."""

    def __init__(self, method: str, number: int, dataset: str, server: FaultServer) -> None:
        self.kind, self.operation, self.where = METHODS[method]
        self.method, self.server = method, server
        self.name = f"{dataset}.{self.kind}_{self.operation}_{self.where}_{number}"
        self.ledger = f"{dataset}_ledger"
        self.counts: Counter[str] = Counter()

    def run(self, direct: BigQueryResource, staging: str, numbers: list[int]) -> list[str]:
        """Write to one table, and compare what it holds then with what it should."""
        name = f"{self.name}_{numbers[0]}"
        if self.operation == "replace":
            rows = [rows_of(day(n), n, OLD + n, 1) for n in numbers]
            layout = TableOptions(partitioning=TimePartitioning("day"))
            FileLoadsWriter(bigquery=direct, staging=staging).append(rows, name, layout)
        for number in numbers:
            self.schedule(Schedule(f"{SEED} {self.method}", number), number, name, staging)
        found: dict[int, Counter[int]] = {number: Counter() for number in numbers}
        for row in BigQueryReader(bigquery=direct).read(name, ["part", "n"]).to_arrow().to_pylist():
            found[row["part"]][row["n"]] += 1
        return [wrong for n in numbers if (wrong := self.compare(n, found[n]))]

    def schedule(self, schedule: Schedule, number: int, name: str, staging: str) -> None:
        """One write, by as many attempts as it takes."""
        self.server.schedule = schedule
        write = self.write(number, name, staging)
        twin = schedule.twin and self.kind != "DefaultStreamWriter"
        with ThreadPoolExecutor(2) as pool:
            tries = [pool.submit(self.persist, write, schedule, schedule.kill)]
            if twin:
                self.counts["two attempts at once"] += 1
                tries.append(pool.submit(self.persist, write, schedule, None))
            for each in tries:
                each.result()
        self.server.schedule = None

    def write(self, number: int, name: str, staging: str) -> Callable[[], Any]:
        """One attempt."""
        bigquery = BigQueryResource(**self.server.fields)
        kinds: dict[str, Callable[[], BigQueryWriter]] = {
            "DefaultStreamWriter": lambda: DefaultStreamWriter(bigquery=bigquery, connections=2),
            "ExactlyOnceWriter": lambda: ExactlyOnceWriter(
                bigquery=bigquery, ledger=self.ledger, connections=2
            ),
            "FileLoadsWriter": lambda: FileLoadsWriter(bigquery=bigquery, staging=staging),
        }
        kind = self.kind
        if self.where == "slice" and number % 2:
            kind = "ExactlyOnceWriter"
        writer = kinds[kind]()
        destination: Any = name
        if self.where == "partition":
            destination = DailyTable(name, column="day").for_keys([day(number)])
        elif self.where == "slice":
            destination = RowSlice.by_keys(name, "part", [str(number)])
        rows = rows_of(day(number), number, count=ROWS)
        pieces = [rows.slice(start, BATCH) for start in range(0, ROWS, BATCH)]
        key = None if kind == "DefaultStreamWriter" else f"{name} {number}"
        act = writer.append if self.operation == "append" else writer.replace
        return lambda: act(pieces, destination, key=key)

    def persist(self, write: Callable[[], Any], schedule: Schedule, kill: int | None) -> None:
        """Try until it succeeds."""
        for _ in range(TRIES):
            DEATHS.left, kill = kill, None
            try:
                write()
            except Abandoned:
                self.counts["abandoned"] += 1
            except ConnectorError as error:
                if not may_be_tried_again(error):
                    raise
                self.counts["failed, and tried again"] += 1
                schedule.outage = None
            else:
                return
            finally:
                DEATHS.left = None
        raise AssertionError(f"no success after {TRIES} tries")

    def compare(self, number: int, found: Counter[int]) -> str:
        """What is wrong with the rows of a write; nothing if all is right."""
        expected = Counter(range(ROWS))
        lost, more = expected - found, found - expected
        self.counts["rows"] += ROWS
        self.counts["lost"] += lost.total()
        self.counts["doubled"] += more.total()
        if self.kind == "DefaultStreamWriter":
            more = Counter({n: times for n, times in more.items() if n not in expected})
        return f"schedule {number}: lost {dict(lost)}, too many {dict(more)}" if lost + more else ""


def day(number: int) -> str:
    return str(FIRST_DAY + dt.timedelta(days=number))


def may_be_tried_again(error: ConnectorError) -> bool:
    """Whether the error's type or its text says so."""
    return isinstance(error, (UnreachableError, QuotaError)) or "write again" in str(error)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_written_under_faults_is_exact(
    method: str,
    dataset: str,
    fields: dict[str, Any],
    bigquery: BigQueryResource,
    staging: str,
    quick: None,
) -> None:
    outcome = OUTCOMES[method] = Outcome()
    lives = [range(n, min(n + TABLE_LIFE, SCHEDULES)) for n in range(0, SCHEDULES, TABLE_LIFE)]
    if SCHEDULES <= TABLE_LIFE:
        lives = [range(n, SCHEDULES, WORKERS) for n in range(min(WORKERS, SCHEDULES))]

    def work(number: int) -> None:
        with FaultServer(fields | {"deadline_seconds": 15}) as server:
            outcome.fired.append(server.fired)
            worker = Worker(method, number, dataset, server)
            for life in lives[number::WORKERS]:
                outcome.wrong += worker.run(bigquery, staging, list(life))
            outcome.counts.update(worker.counts)

    began = time.monotonic()
    with ThreadPoolExecutor(WORKERS) as pool:
        for done in [pool.submit(work, number) for number in range(min(WORKERS, len(lives)))]:
            done.result()
    outcome.seconds = time.monotonic() - began
    if SOAK:
        report()  # of the methods so far: they take long
    assert outcome.wrong == []
    assert outcome.counts["lost"] == 0
    if method != "default stream append":
        assert outcome.counts["doubled"] == 0


def test_every_fault_has_fired() -> None:
    if set(OUTCOMES) != set(METHODS):
        pytest.skip("the methods were not all run")
    total = {name: sum(each.total(name) for each in OUTCOMES.values()) for name in FAULTS}
    missing = [name for name, times in total.items() if not times]
    if not SOAK:  # a few schedules do not meet them all
        assert len(missing) <= len(FAULTS) // 2, missing
        return
    assert missing == []
    for method, outcome in OUTCOMES.items():
        possible = [f for f in FAULTS if any(f in CALLS[c] and outcome.calls(c) for c in CALLS)]
        assert [name for name in possible if not outcome.total(name)] == [], method


def report() -> None:
    outcomes = OUTCOMES.values()
    total = {name: sum(each.total(name) for each in outcomes) for name in FAULTS}
    counted = ("rows", "lost", "doubled", "abandoned", "two attempts at once")
    counted += ("failed, and tried again",)
    rows = [("schedules", *(f"{SCHEDULES:,}" for _ in outcomes))]
    rows += [(name, *(f"{each.counts[name]:,}" for each in outcomes)) for name in counted]
    rows += [("seconds", *(f"{each.seconds:,.0f}" for each in outcomes))]
    fired = [
        (
            name,
            *(f"{each.total(name):,}" if each.total(name) else "" for each in outcomes),
            f"{n:,}",
        )
        for name, n in total.items()
    ]
    text = (
        "Every call of a write fails with a chance of a tenth to four tenths. A write is tried\n"
        "again under its key until it succeeds.\n\n"
        f"{table(('', *OUTCOMES), rows)}\n\n"
        "How often each fault fired; empty where the method makes no call that fails so.\n\n"
        f"{table(('fault', *OUTCOMES, 'all'), fired)}"
    )
    seconds = sum(each.seconds for each in outcomes)
    write_section("Writes by every method under faults", SEED, seconds, text)
