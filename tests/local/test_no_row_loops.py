"""Public failure case 61: what a path costs is a matter of its batches, not of its rows.

Seconds would tell more of the machine than of a change. Steps of the interpreter do not: a loop
over rows takes one for each of them.
"""

import datetime as dt
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa
import pytest

from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    BigQueryWriter,
    DefaultStreamWriter,
    ExactlyOnceWriter,
    FileLoadsWriter,
    RowSlice,
)

FEW, MANY = 1_000, 21_000
TOOL = sys.monitoring.PROFILER_ID
EVENTS = sys.monitoring.events.PY_START | sys.monitoring.events.JUMP


@contextmanager
def counted(steps: list[int]) -> Iterator[None]:
    """Adds the calls and turns of loops of all threads meanwhile."""
    count = 0

    def add(*_: object) -> None:
        nonlocal count
        count += 1

    sys.monitoring.use_tool_id(TOOL, "rows")
    for event in (sys.monitoring.events.PY_START, sys.monitoring.events.JUMP):
        sys.monitoring.register_callback(TOOL, event, add)
    sys.monitoring.set_events(TOOL, EVENTS)
    try:
        yield
    finally:
        sys.monitoring.set_events(TOOL, 0)
        sys.monitoring.free_tool_id(TOOL)
        steps.append(count)


def rows_of(count: int, time: bool) -> pa.Table:
    """Columns of the common types; with a TIME, which makes streams send protobuf messages."""
    start = dt.datetime(2026, 8, 1, tzinfo=dt.UTC)
    columns = {
        "n": pa.array(range(count), pa.int64()),
        "text": pa.array([f"row {n}" if n % 3 else None for n in range(count)]),
        "at": pa.array([start] * count, pa.timestamp("us", "UTC")),
        "tags": pa.array([["a", "b"]] * count, pa.list_(pa.string())),
    }
    if time:
        columns["clock"] = pa.array([dt.time(1, 2, 3)] * count, pa.time64("us"))
    return pa.table(columns)


def writer_of(kind: str, bigquery: BigQueryResource, dataset: str, staging: str) -> BigQueryWriter:
    match kind:
        case "default stream":
            return DefaultStreamWriter(bigquery=bigquery)
        case "exactly once":
            return ExactlyOnceWriter(bigquery=bigquery, ledger=f"{dataset}_ledger")
        case _:
            return FileLoadsWriter(bigquery=bigquery, staging=staging)


def do_not_grow(run: Callable[[int], int]) -> None:
    """Run with few rows to warm up, with few, and with many."""
    run(FEW)
    steps: list[int] = []
    for rows in (FEW, MANY):
        with counted(steps):
            assert run(rows) == rows
    few, many = steps
    assert few > 100  # it does count
    assert many - few < (MANY - FEW) / 10, steps


@pytest.mark.parametrize(
    ("kind", "operation", "time"),
    [
        ("default stream", "append", False),
        ("default stream", "append", True),
        ("exactly once", "append", False),
        ("exactly once", "replace", True),
        ("exactly once", "slice", False),
        ("file loads", "append", False),
        ("file loads", "slice", True),
    ],
)
def test_a_write_takes_no_step_for_each_row(
    kind: str, operation: str, time: bool, bigquery: BigQueryResource, dataset: str, staging: str
) -> None:
    writer, keys = writer_of(kind, bigquery, dataset, staging), iter(range(9))
    name = f"{dataset}.t"
    given = {count: rows_of(count, time) for count in (FEW, MANY)}
    if operation == "slice":
        given = {
            count: rows.append_column("part", pa.array(["a"] * count))
            for count, rows in given.items()
        }

    def write(count: int) -> int:
        key = None if kind == "default stream" else f"{dataset} {next(keys)}"
        if operation == "append":
            return writer.append(given[count], name, key=key).rows
        table = RowSlice.by_keys(name, "part", ["a"]) if operation == "slice" else name
        return writer.replace(given[count], table, key=key).rows

    do_not_grow(write)


@pytest.mark.parametrize("form", ["arrow", "polars", "pandas"])
def test_a_read_takes_no_step_for_each_row(
    form: str, bigquery: BigQueryResource, dataset: str, load_writer: FileLoadsWriter
) -> None:
    for count in (FEW, MANY):
        load_writer.append(rows_of(count, time=False), f"{dataset}.t{count}")
    reader = BigQueryReader(bigquery=bigquery)

    def read(count: int) -> int:
        rows = reader.read(f"{dataset}.t{count}")
        return len(
            {"arrow": rows.to_arrow, "polars": rows.to_polars, "pandas": rows.to_pandas}[form]()
        )

    do_not_grow(read)
