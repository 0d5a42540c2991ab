"""A write whose process is killed at any step, and which is tried again, lands once.

The steps come from the code (`write/steps.py`): a first attempt that lives tells which there are.
"""

import datetime as dt
import io
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dagster_bq_connector import (
    BigQueryReader,
    FileLoadsWriter,
    TableOptions,
    TimePartitioning,
)
from support import kills
from support.forks import Attempts
from support.kills import ROWS, Order, rows_of
from support.soak_report import table, write_section

SOAK = bool(os.environ.get("SOAK"))
WRITES = [
    ("ExactlyOnceWriter", "append", "table"),
    ("ExactlyOnceWriter", "open", "table"),
    ("ExactlyOnceWriter", "replace", "partition"),
    ("ExactlyOnceWriter", "replace", "slice"),
    ("FileLoadsWriter", "append", "table"),
    ("FileLoadsWriter", "replace", "partition"),
    ("FileLoadsWriter", "replace", "slice"),
    ("FileLoadsWriter", "append", "table by copy"),
    ("FileLoadsWriter", "replace", "partition by copy"),
    ("FileLoadsWriter", "load_uris", "table"),
    ("FileLoadsWriter", "load_uris", "table by copy"),
]
FIRST_DAY = dt.date(2026, 1, 1)
OLD = 1_000_000  # numbers of the rows that were there before

BEGAN: list[float] = []
# By kind of write: its steps, their names, and at how many of them a process was killed or stopped.
STRUCK: dict[str, Counter[str]] = {}

pytestmark = pytest.mark.local_only("it kills some hundred processes, at a second of a job each")


@pytest.fixture(scope="module")
def attempts() -> Iterator[Attempts]:
    BEGAN.append(time.monotonic())
    with Attempts(kills.__file__) as attempts:
        yield attempts


class Case:
    """One kind of write to one table; each try of it has a day and a part of its own."""

    def __init__(
        self,
        kind: tuple[str, str, str],
        dataset: str,
        fields: dict[str, Any],
        load_writer: FileLoadsWriter,
        reader: BigQueryReader,
    ) -> None:
        self.writer, self.operation, where = kind
        self.where, by_copy, _ = where.partition(" by copy")
        self.max_uris = 1 if by_copy else 0
        self.table, self.fields, self.reader = f"{dataset}.t", fields, reader
        self.options = {
            "ExactlyOnceWriter": {"ledger": f"{dataset}_ledger", "connections": 2},
            "FileLoadsWriter": {"staging": load_writer.staging},
            "DefaultStreamWriter": {},
        }[self.writer]
        layout = TableOptions(partitioning=TimePartitioning("day"))
        load_writer.append(rows_of(str(FIRST_DAY), 0, OLD, 1), self.table, layout)
        self.load_writer = load_writer

    def order(self, number: int, **more: Any) -> Order:
        return Order(
            writer=self.writer,
            fields=self.fields,
            options=self.options,
            operation=self.operation,
            table=self.table,
            where=self.where,
            day=str(FIRST_DAY + dt.timedelta(days=number)),
            part=number,
            uris=self.files(number) if self.operation == "load_uris" else [],
            max_uris=self.max_uris,
            key=None if self.writer == "DefaultStreamWriter" else f"{self.table} {number}",
            **more,
        )

    def prepare(self, numbers: range) -> None:
        """Rows that are there before: a replacement takes their place, an append joins them."""
        rows = [rows_of(str(FIRST_DAY + dt.timedelta(days=n)), n, OLD + n, 1) for n in numbers]
        self.load_writer.append(rows, self.table)
        for number in numbers if self.operation == "load_uris" else ():
            self.put(number)

    def put(self, number: int) -> None:
        """The files that `load_uris` loads."""
        connected = self.load_writer.bigquery.connect()
        client = connected.clients.cloud_storage(connected.project)
        for part, uri in enumerate(self.files(number)):
            bucket, _, name = uri.removeprefix("gs://").partition("/")
            rows = rows_of(str(FIRST_DAY + dt.timedelta(days=number)), number, part * 80, 80)
            sink = io.BytesIO()
            pq.write_table(rows, sink)
            client.bucket(bucket).blob(name).upload_from_string(sink.getvalue())

    def files(self, number: int) -> list[str]:
        """Their addresses."""
        home = f"{self.load_writer.staging}/given/{number}"
        return [f"{home}/{part}.parquet" for part in range(ROWS // 80)]

    def numbers(self, number: int) -> Counter[int]:
        found = self.reader.read(self.table, ["n"], f"part = {number}").to_arrow()
        return Counter(found["n"].to_pylist())

    def before(self, number: int) -> Counter[int]:
        return Counter([OLD + number])

    def after(self, number: int) -> Counter[int]:
        kept = Counter[int]() if self.operation == "replace" else self.before(number)
        return kept + Counter(range(ROWS))

    def may_be_seen(self, number: int) -> bool:
        """Whether what is there is none or all of a write, or one up to a checkpoint."""
        found, before = self.numbers(number), self.before(number)
        if self.operation != "open":
            return found in (before, self.after(number))
        more = found - before
        return found == before + more and more == Counter(range(len(more)))


@pytest.fixture
def case(
    request: pytest.FixtureRequest,
    dataset: str,
    fields: dict[str, Any],
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
) -> Case:
    return Case(request.param, dataset, fields, load_writer, reader)


def steps_of(case: Case, attempts: Attempts, path: Path) -> list[str]:
    """The steps of an attempt that lives, which is the case's number 1."""
    case.prepare(range(1, 2))
    assert attempts.run(case.order(1, steps=str(path / "steps"))) == 0
    assert case.numbers(1) == case.after(1)
    named: list[str] = json.loads((path / "steps").read_text())
    assert len(named) >= 2
    return named


def strikes(case: Case, named: list[str], how: str, every: int) -> Iterator[int]:
    """Where to strike. What was done there is counted, once the test has found nothing wrong."""
    kind = f"{case.writer} {case.operation} {case.where}{' by copy' if case.max_uris else ''}"
    struck = STRUCK.setdefault(kind, Counter())
    struck["steps"], struck["names"] = len(named), len(set(named))
    for point in points(named, every):
        yield point
        struck[how] += 1


def points(named: list[str], every: int = 1) -> list[int]:
    """Where to strike: in the soak at each step; here at some, which no two kinds have alike.

    Args:
        named: The steps of an attempt.
        every: How many names apart; the first is drawn by what the names are.
    """
    if SOAK:
        return list(range(len(named)))
    names = [named.index(step) for step in dict.fromkeys(named)]
    first = random.Random(" ".join(named)).randrange(min(every, len(names)))
    return names[first::every]


def ids(write: tuple[str, str, str]) -> str:
    return " ".join(write)


@pytest.mark.parametrize("case", WRITES, ids=ids, indirect=True)
def test_killed_at_any_step(case: Case, attempts: Attempts, tmp_path: Path) -> None:
    named = steps_of(case, attempts, tmp_path)
    case.prepare(range(2, 2 + len(named)))
    for point in strikes(case, named, "killed", every=10):
        number, step = 2 + point, named[point]
        assert attempts.run(case.order(number, die=point)) == -9, step
        assert case.may_be_seen(number), f"half a write, {step}"
        other = 100 if point % 2 else 17  # read again, the rows may come in other batches
        assert attempts.run(case.order(number, batch=other)) == 0, step
        assert case.numbers(number) == case.after(number), step


@pytest.mark.parametrize("case", WRITES, ids=ids, indirect=True)
def test_two_attempts_at_once(case: Case, attempts: Attempts, tmp_path: Path) -> None:
    """The first one stops at a step, goes on when the second one is done, and does no harm."""
    named = steps_of(case, attempts, tmp_path)
    case.prepare(range(2, 2 + len(named)))
    for point in strikes(case, named, "stopped", every=15):
        number, step = 2 + point, named[point]
        stopped, go = tmp_path / f"stopped{point}", tmp_path / f"go{point}"
        first = attempts.start(case.order(number, stop=point, stopped=str(stopped), go=str(go)))
        wait_for(stopped)
        second = attempts.run(case.order(number, batch=17))
        go.touch()
        taken_over = case.operation == "open" and not named[point].startswith("after close")
        assert (attempts.wait(first) == 0 or taken_over, second) == (True, 0), step
        assert case.numbers(number) == case.after(number), step


@pytest.mark.parametrize(
    "case", [("DefaultStreamWriter", "append", "table")], ids=ids, indirect=True
)
def test_the_default_stream_loses_nothing(case: Case, attempts: Attempts, tmp_path: Path) -> None:
    """At least once: rows of an attempt that was killed may be there twice, and none is lost."""
    named = steps_of(case, attempts, tmp_path)
    case.prepare(range(2, 2 + len(named)))
    for point in strikes(case, named, "killed", every=10):
        number, step = 2 + point, named[point]
        assert attempts.run(case.order(number, die=point)) == -9, step
        assert attempts.run(case.order(number, batch=17)) == 0, step
        assert case.after(number) <= case.numbers(number), step


def test_every_kind_of_write_was_struck() -> None:
    if len(STRUCK) <= len(WRITES):
        pytest.skip("the kinds were not all run")
    for kind, struck in STRUCK.items():
        least = struck["steps"] if SOAK else 1
        assert struck["killed"] >= least, kind
        assert struck["stopped"] >= least or kind.startswith("DefaultStreamWriter"), kind
    if SOAK:
        report()


def report() -> None:
    head = ("write", "steps taken", "of names", "killed at", "second attempt meanwhile at")
    counts = ("steps", "names", "killed", "stopped")
    rows = [(kind, *(f"{of[each]:,}" for each in counts)) for kind, of in STRUCK.items()]
    text = (
        "A process is killed with SIGKILL before and after each step that the code names, and the\n"
        "write is tried again with other batches. Then another one is stopped there while a\n"
        "second attempt does the write, and goes on after it. After each of these the rows were\n"
        "exact: lost 0, doubled 0 (default stream: lost 0). "
        f"A write has {ROWS} rows.\n\n{table(head, rows)}"
    )
    write_section("Writes whose process is killed", None, time.monotonic() - BEGAN[0], text)


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.01)
