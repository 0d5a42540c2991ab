"""A write whose table is given other columns before it is tried again lands once."""

import datetime as dt

import pyarrow as pa
import pytest

from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    BigQueryWriter,
    DailyTable,
    ExactlyOnceWriter,
    FileLoadsWriter,
)
from dagster_bq_connector.errors import RefusedError
from dagster_bq_connector.table.slice import TableSlice
from dagster_bq_connector.write import steps

DAYS = [dt.date(2026, 8, day) for day in (1, 2)]
DATA = pa.table({"day": pa.array(DAYS, pa.date32()), "n": [1, 2]})
JSON = "ADD COLUMN document JSON"  # which no load job takes from Parquet


def both_days(dataset: str) -> TableSlice:
    return DailyTable(f"{dataset}.t", column="day").for_keys([str(day) for day in DAYS])


def alter(bigquery: BigQueryResource, dataset: str, change: str) -> None:
    with bigquery.get_client() as client:
        client.query_and_wait(f"ALTER TABLE {dataset}.t {change}")


def numbers(reader: BigQueryReader, dataset: str) -> list[int]:
    return sorted(reader.read(f"{dataset}.t", ["n"]).to_arrow()["n"].to_pylist())


def test_a_write_that_was_done_by_other_jobs_counts_as_done(
    dataset: str, bigquery: BigQueryResource, load_writer: FileLoadsWriter, reader: BigQueryReader
) -> None:
    """A load job a partition, or one transaction: by that the columns of the table decide."""
    slice_ = both_days(dataset)
    loads = load_writer.append(DATA, slice_, key=f"{dataset} k")
    alter(bigquery, dataset, JSON)
    again = load_writer.append(DATA, slice_, key=f"{dataset} k")
    assert (again.replayed, again.rows, again.jobs) == (True, 2, loads.jobs)
    assert not load_writer.append(DATA, slice_, key=f"{dataset} transaction").replayed
    alter(bigquery, dataset, "DROP COLUMN document")
    again = load_writer.append(DATA, slice_, key=f"{dataset} transaction")
    assert (again.replayed, again.rows) == (True, 2)
    assert numbers(reader, dataset) == [1, 1, 2, 2]


@pytest.mark.parametrize("by_streams", [False, True])
def test_a_write_that_was_done_in_part_by_other_jobs_is_refused(
    dataset: str,
    bigquery: BigQueryResource,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
    monkeypatch: pytest.MonkeyPatch,
    by_streams: bool,
) -> None:
    inserted: list[str] = []

    def refuse_the_second(step: str, over: bool) -> None:
        if step == "insert job" and not over:
            inserted.append(step)
            if len(inserted) == 2:
                raise RefusedError("no")

    monkeypatch.setattr(steps, "_observers", [refuse_the_second])
    with pytest.raises(RefusedError, match="Only 2026-08-01 were written"):
        load_writer.replace(DATA, both_days(dataset), key=f"{dataset} k")
    alter(bigquery, dataset, JSON)
    once = ExactlyOnceWriter(bigquery=bigquery, ledger=f"{dataset}_ledger")
    writer: BigQueryWriter = once if by_streams else load_writer
    with pytest.raises(RefusedError, match=r"done in part.*1 of 2 jobs \(dagster_bq_.*_20260801\)"):
        writer.replace(DATA, both_days(dataset), key=f"{dataset} k")
    assert numbers(reader, dataset) == [1]
