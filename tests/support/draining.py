"""Runs of a change stream without Dagster: changes in files, and a mode that writes down."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from dagster_bq_connector import BigQueryResource
from dagster_bq_connector.cdc.source.files import FileMessages
from dagster_bq_connector.cdc.stream import Pace, Worker
from dagster_bq_connector.cdc.watermark import Clock, StreamState, Watermark, utc_now
from dagster_bq_connector.progress import Progress
from support.ledgers import ledger_at

EAGER = Pace(min_rows=1, max_delay=timedelta(0), max_changes=100, lease_seconds=5)


class Simulated:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.time = datetime(2026, 8, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.time

    def pass_by(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)


@dataclass
class Written:
    """What applies changes: it writes down their numbers, and counts them in the state."""

    numbers: list[int] = field(default_factory=list[int])
    before: Callable[[int], object] = lambda number: None

    def apply(
        self,
        messages: Iterable[pa.RecordBatch],
        state: Mapping[str, Any],
        progress: Progress,
        check: Callable[[], None],
    ) -> Any:
        count = 0
        for batch in messages:
            check()
            for value in batch.column("value").to_pylist():
                number = json.loads(value)["n"]
                self.before(number)
                self.numbers.append(number)
                count += 1
        seen = state.get("seen", 0) + count
        return SimpleNamespace(state={"seen": seen}, messages=count, tables={})


@dataclass
class Numbers:
    """A stream of numbers, and the runs that drain it."""

    folder: Path
    bigquery: BigQueryResource
    ledger: str
    pace: Pace = EAGER
    mode: Written = field(default_factory=Written)
    now: Clock = utc_now
    over: set[str] = field(default_factory=set[str])
    said: list[str] = field(default_factory=list[str])
    there: int = 0

    def put(self, count: int) -> None:
        """More changes, in a file of their own."""
        numbers = range(self.there, self.there + count)
        lines = [json.dumps({"topic": "t", "key": {"n": n}, "value": {"n": n}}) for n in numbers]
        file = self.folder / f"{self.there:08}.ndjson"
        partial = file.with_suffix(".part")
        partial.write_text("".join(f"{line}\n" for line in lines))
        partial.rename(file)
        self.there += count

    @property
    def source(self) -> FileMessages:
        return FileMessages(str(self.folder))

    @property
    def watermark(self) -> Watermark:
        return Watermark(ledger_at(self.bigquery, self.ledger), "numbers", self.now)

    @property
    def state(self) -> StreamState:
        return self.watermark.read() or StreamState()

    def worker(self, run: str = "run-1", **changes: Any) -> Worker:
        fields: dict[str, Any] = {
            "watermark": self.watermark,
            "source": self.source,
            "mode": self.mode,
            "pace": self.pace,
            "run": run,
            "is_over": self.over.__contains__,
            "tell": self.said.append,
            "progress": lambda what: Progress(what, self.said.append),
            "now": self.now,
        }
        return Worker(**{**fields, **changes})
