"""Writes in processes that die, or stop for a while, at any step that the code names.

Run as a program, it forks a process for each order that it reads, so that none has to import
everything again; it has opened no connection itself.
"""

import datetime as dt
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from dagster_bq_connector import (
    BigQueryResource,
    BigQueryWriter,
    DailyTable,
    DefaultStreamWriter,
    ExactlyOnceWriter,
    FileLoadsWriter,
    RowSlice,
)
from dagster_bq_connector.write import default_stream, own_stream, parts, staging, steps

ROWS = 240
SCHEMA = pa.schema([("day", pa.date32()), ("part", pa.int64()), ("n", pa.int64())])


def rows_of(day: str, part: int, first: int = 0, count: int = ROWS) -> pa.Table:
    """Numbered rows of one day and part."""
    columns = [
        pa.array([dt.date.fromisoformat(day)] * count, pa.date32()),
        pa.array([part] * count, pa.int64()),
        pa.array(range(first, first + count), pa.int64()),
    ]
    return pa.table(columns, schema=SCHEMA)


@dataclass
class Order:
    """One attempt at a write.

    Attributes:
        writer: Its class.
        fields: Of its BigQuery resource.
        options: Of the writer.
        operation: `append`, `replace`, `open` or `load_uris`.
        table: `dataset.table`.
        where: `table`, `partition` (of the day) or `slice` (of the part).
        day: The day of the rows.
        part: The part of the rows.
        key: The write key.
        uris: The files of `load_uris`.
        batch: Rows of a batch.
        max_uris: Files of a load job, if it is to be less than BigQuery takes.
        die: At which step it is killed, by number from 0; never when None.
        stop: The same, for waiting until `go` exists; `stopped` is made then.
        go: A path.
        stopped: A path.
        steps: Where the names of its steps are written, when it lives.
    """

    writer: str
    fields: dict[str, Any]
    options: dict[str, Any]
    operation: str
    table: str
    where: str
    day: str
    part: int
    key: str | None
    uris: list[str] = field(default_factory=list)
    batch: int = 100
    max_uris: int = 0
    die: int | None = None
    stop: int | None = None
    go: str = ""
    stopped: str = ""
    steps: str = ""


def attempt(order: Order) -> None:
    """Write, unless killed on the way."""
    default_stream.PREFERRED_BYTES = own_stream.PREFERRED_BYTES = 1_500
    staging.FILE_BYTES = 1_500
    parts.MAX_URIS = order.max_uris or parts.MAX_URIS
    named: list[str] = []

    def observe(step: str, over: bool) -> None:
        number = len(named)
        named.append(f"{'after' if over else 'before'} {step}")
        if number == order.die:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == order.stop:
            Path(order.stopped).touch()
            while not Path(order.go).exists():
                time.sleep(0.01)

    steps.observe(observe)
    kinds = {
        each.__name__: each for each in (DefaultStreamWriter, ExactlyOnceWriter, FileLoadsWriter)
    }
    writer: BigQueryWriter = kinds[order.writer](
        bigquery=BigQueryResource(**order.fields), **order.options
    )
    rows = rows_of(order.day, order.part)
    pieces = [rows.slice(start, order.batch) for start in range(0, ROWS, order.batch)]
    destination: Any = order.table
    if order.where == "partition":
        destination = DailyTable(order.table, column="day").for_keys([order.day])
    elif order.where == "slice":
        destination = RowSlice.by_keys(order.table, "part", [str(order.part)])
    if order.operation == "open":
        write_on(writer, destination, order)
    elif isinstance(writer, FileLoadsWriter) and order.operation == "load_uris":
        writer.load_uris(order.uris, destination, key=order.key)
    else:
        write = writer.append if order.operation == "append" else writer.replace
        write(pieces, destination, key=order.key)
    if order.steps:
        Path(order.steps).write_text(json.dumps(named))


def write_on(writer: Any, destination: str, order: Order) -> None:
    """A long write, from the last checkpoint to the end."""
    with writer.open(destination, key=order.key) as write:
        for start in range(write.position or 0, ROWS, order.batch):
            count = min(order.batch, ROWS - start)
            write.append(rows_of(order.day, order.part, start, count))
            write.checkpoint(start + count)


@dataclass
class Attempts:
    """Starts attempts, and tells how they ended."""

    process: Any = field(default=None)

    def __enter__(self) -> "Attempts":
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def start(self, order: Order) -> int:
        """Start an attempt. Gives its process id."""
        return int(self._ask({"order": vars(order)}))

    def wait(self, pid: int) -> int:
        """Wait for an attempt. Gives 0, what it failed with, or minus the signal it died of."""
        return int(self._ask({"wait": pid}))

    def run(self, order: Order) -> int:
        """Start, and wait."""
        return self.wait(self.start(order))

    def _ask(self, question: dict[str, Any]) -> str:
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()


def main() -> None:
    """Fork for orders."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed by the attempts is no answer
    for line in sys.stdin:
        question = json.loads(line)
        if "wait" in question:
            _, status = os.waitpid(question["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        elif (answer := os.fork()) == 0:
            code = 1
            try:
                attempt(Order(**question["order"]))
                code = 0
            except Exception:  # noqa: BLE001  # it is shown, and its process ends
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    main()
