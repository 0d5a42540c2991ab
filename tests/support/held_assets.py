"""An asset that writes, and that stands still in the middle until it is let go or terminated."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pyarrow as pa

from dagster_bq_connector import (
    BigQueryResource,
    BigQueryWriter,
    ExactlyOnceWriter,
    FileLoadsWriter,
    RowSlice,
)
from dagster_bq_connector.write import steps
from support.keyed_assets import CONNECTION

ROWS = 1000


class Held(dg.Config):
    """What is written, and where the flags lie that tell how far it is.

    Attributes:
        writer: `once` or `load`.
        operation: `append` or `replace`.
        table: `dataset.table`.
        own_process: Whether the step has a process of its own, and the run another.
        step: Where it stands still: a step of the write, or `rows` for between its rows.
        flags: A directory: `here` is made when it stands still, `go` lets it go on, and `inserted`
            is made when the step is over. With `free` nothing is held.
    """

    writer: str
    operation: str
    table: str
    step: str
    flags: str
    own_process: bool

    def flag(self, name: str) -> Path:
        return Path(self.flags) / name

    def hold(self) -> None:
        """Stand still."""
        self.flag("pid").write_text(str(os.getppid() if self.own_process else os.getpid()))
        self.flag("here").touch()
        while not self.flag("go").exists():
            time.sleep(0.02)

    def observe(self, step: str, over: bool) -> None:
        if step == self.step and not over:
            self.hold()
        elif step == self.step:
            self.flag("inserted").touch()

    def rows(self) -> Iterator[pa.Table]:
        yield pa.table({"part": [1] * ROWS, "n": range(ROWS)})
        if self.step == "rows" and not self.flag("free").exists():
            self.hold()
        yield pa.table({"part": [1] * ROWS, "n": range(ROWS, 2 * ROWS)})


@dg.asset
def held(config: Held, once: ExactlyOnceWriter, load: FileLoadsWriter) -> None:
    if not config.flag("free").exists():
        steps.observe(config.observe)
    writer: BigQueryWriter = once if config.writer == "once" else load
    if config.operation == "append":
        writer.append(config.rows(), config.table)
    else:
        writer.replace(config.rows(), RowSlice.by_keys(config.table, "part", ["1"]))


if CONNECTION in os.environ:
    connection = json.loads(os.environ[CONNECTION])
    bigquery = BigQueryResource(**connection["fields"])
    defs = dg.Definitions(
        assets=[held],
        jobs=[dg.define_asset_job("held_job", [held])],
        resources={
            "once": ExactlyOnceWriter(bigquery=bigquery, ledger=connection["ledger"]),
            "load": FileLoadsWriter(bigquery=bigquery, staging=connection["staging"]),
        },
    )
