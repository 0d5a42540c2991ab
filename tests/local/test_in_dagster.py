"""The resources inside of runs: what a run's page shows, and what the jobs in BigQuery carry."""

import datetime as dt
import threading
import time
from typing import Any

import dagster as dg
import dagster_gcp
import pyarrow as pa
import pytest

from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    BigQueryWriter,
    DailyTable,
    DefaultStreamWriter,
    FileLoadsWriter,
    file_loads_writer,
)
from dagster_bq_connector import progress as progress_module
from dagster_bq_connector.errors import PartitionError


def rows_of(days: list[str]) -> pa.Table:
    dates = [dt.date.fromisoformat(day) for n, day in enumerate(days) for _ in range(n + 1)]
    return pa.table({"day": pa.array(dates, pa.date32()), "n": list(range(len(dates)))})


def run(
    asset: dg.AssetsDefinition, writer: BigQueryWriter, **arguments: Any
) -> list[dg.AssetMaterialization]:
    result = dg.materialize([asset], resources={"writer": writer}, **arguments)
    return [event.materialization for event in result.get_asset_materialization_events()]


@pytest.mark.parametrize("method", ["stream", "load"])
def test_what_a_materialization_shows(
    dataset: str,
    project: str,
    method: str,
    stream_writer: DefaultStreamWriter,
    load_writer: FileLoadsWriter,
) -> None:
    @dg.asset
    def table(writer: BigQueryWriter) -> dg.MaterializeResult:
        rows = pa.table({"id": [1, 2], "tags": [["a"], []], "s": [{"x": 1.5}, None]})
        return writer.append(rows, f"{dataset}.t").to_materialize_result(metadata={"mine": 7})

    [shown] = run(table, stream_writer if method == "stream" else load_writer)
    metadata = {key: value.value for key, value in shown.metadata.items()}
    assert metadata["dagster/row_count"] == 2
    assert metadata["dagster/table_name"] == f"{project}.{dataset}.t"
    assert metadata["dagster/uri"] == f"bigquery://{project}/{dataset}/t"
    assert metadata["mine"] == 7
    columns = {
        c.name: (c.type, c.constraints.nullable) for c in metadata["dagster/column_schema"].columns
    }
    assert columns == {
        "id": ("INTEGER", True),
        "tags": ("ARRAY<STRING>", True),
        "s": ("STRUCT<x FLOAT>", True),
    }


def test_each_partition_of_a_range_shows_its_own_rows(
    dataset: str, load_writer: FileLoadsWriter
) -> None:
    daily = DailyTable(f"{dataset}.t", column="day")

    @dg.asset(
        partitions_def=daily.partitions_def("2026-08-01"),
        backfill_policy=dg.BackfillPolicy.single_run(),
    )
    def table(context: dg.AssetExecutionContext, writer: BigQueryWriter) -> dg.MaterializeResult:
        rows = rows_of(list(context.partition_keys))
        return writer.replace(rows, daily.for_run(context)).to_materialize_result()

    [one] = run(table, load_writer, partition_key="2026-08-05")
    assert one.partition == "2026-08-05"
    assert one.metadata["dagster/partition_row_count"].value == 1
    assert "dagster/row_count" not in one.metadata
    tags = {
        "dagster/asset_partition_range_start": "2026-08-01",
        "dagster/asset_partition_range_end": "2026-08-03",
    }
    many = run(table, load_writer, tags=tags)
    counts = {m.partition: m.metadata["dagster/partition_row_count"].value for m in many}
    assert counts == {"2026-08-01": 1, "2026-08-02": 2, "2026-08-03": 3}
    assert counts == {m.partition: m.metadata["dagster_bq/rows"].value for m in many}
    assert {m.metadata["dagster_bq/run_rows"].value for m in many} == {6}


def test_an_asset_that_is_partitioned_otherwise(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader
) -> None:
    daily = DailyTable(f"{dataset}.t", column="day")
    load_writer.replace(rows_of(["2026-08-01", "2026-08-02"]), f"{dataset}.t")

    @dg.asset(partitions_def=dg.MonthlyPartitionsDefinition("2026-08-01"))
    def monthly(context: dg.AssetExecutionContext, reader: BigQueryReader) -> None:
        got = reader.read(f"{dataset}.t", where=daily.where(context)).to_arrow()
        assert got.num_rows == 3
        with pytest.raises(PartitionError, match="partitions_def"):
            daily.for_run(context)

    @dg.asset
    def whole(context: dg.AssetExecutionContext) -> None:
        for call in (daily.for_run, daily.where):
            with pytest.raises(PartitionError, match="This run has no partition"):
                call(context)

    assert dg.materialize(
        [monthly], resources={"reader": reader}, partition_key="2026-08-01"
    ).success
    assert dg.materialize([whole]).success


def test_a_key_outside_of_the_definition_is_named(dataset: str) -> None:
    daily = DailyTable(f"{dataset}.t", column="day")

    @dg.asset(partitions_def=daily.partitions_def("2026-08-01"))
    def table() -> None: ...

    with pytest.raises(dg.DagsterUnknownPartitionError, match="2025-01-01"):
        dg.materialize([table], partition_key="2025-01-01")


def test_jobs_carry_the_run_the_asset_and_the_partition(
    dataset: str, bigquery: BigQueryResource, fields: dict[str, Any], staging: str
) -> None:
    daily = DailyTable(f"{dataset}.t", column="day")
    labelled = BigQueryResource(**fields, labels={"team": "data"})
    writer = FileLoadsWriter(bigquery=labelled, staging=staging)

    @dg.asset(key=["shop", "Orders"], partitions_def=daily.partitions_def("2026-08-01"))
    def orders(context: dg.AssetExecutionContext, writer: BigQueryWriter) -> dg.MaterializeResult:
        rows = rows_of([context.partition_key])
        return writer.replace(rows, daily.for_run(context)).to_materialize_result()

    result = dg.materialize([orders], resources={"writer": writer}, partition_key="2026-08-01")
    [event] = result.get_asset_materialization_events()
    [job_id] = event.materialization.metadata["dagster_bq/jobs"].value
    with bigquery.get_client() as client:
        labels = client.get_job(job_id).labels
    own = {"dagster_bq_attempt", "dagster_bq_rows", "dagster_bq_write"}  # see write/proof.py
    assert {key: value for key, value in labels.items() if key not in own} == {
        "team": "data",
        "dagster_run_id": result.run_id,
        "dagster_job": labels["dagster_job"],
        "dagster_asset": "shop__orders",
        "dagster_partition": "2026-08-01",
    }


def test_the_ops_of_dagster_gcp_work_with_our_resource(bigquery: BigQueryResource) -> None:
    """One of them takes a frame of rows: over our endpoints, not over those of the service."""
    name = f"made_by_op_{time.time_ns()}"
    make = dagster_gcp.bq_create_dataset.configured(
        {"dataset": name, "exists_ok": True}, name="make"
    )
    ask = dagster_gcp.bq_op_for_queries(["SELECT 1 AS one"]).alias("ask")
    drop = dagster_gcp.bq_delete_dataset.configured(
        {"dataset": name, "delete_contents": True}, name="drop"
    )

    @dg.job(resource_defs={"bigquery": bigquery})
    def job() -> None:
        drop(make())
        ask()

    result = job.execute_in_process()
    [frame] = result.output_for_node("ask")
    assert frame["one"].tolist() == [1]
    with bigquery.get_client() as client:
        assert name not in [dataset.dataset_id for dataset in client.list_datasets()]


def test_long_work_says_so_in_the_log(
    dataset: str,
    project: str,
    stream_writer: DefaultStreamWriter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress_module, "INTERVAL_SECONDS", 0.0)

    @dg.asset
    def table(writer: BigQueryWriter) -> dg.MaterializeResult:
        batches = pa.table({"id": range(3000)}).to_reader(max_chunksize=1000)
        return writer.append(batches, f"{dataset}.t").to_materialize_result()

    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize([table], resources={"writer": stream_writer}, instance=instance)
        lines = [
            record.event_log_entry.user_message
            for record in instance.get_records_for_run(result.run_id).records
        ]
    shown = [line for line in lines if line.startswith(f"Appending to {project}.{dataset}.t:")]
    assert len(shown) == 3
    assert "3,000 rows" in shown[-1]


def test_waiting_for_load_jobs_says_so_in_the_log(
    dataset: str, load_writer: FileLoadsWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "INTERVAL_SECONDS", 0.0)
    lines: list[str] = []
    monkeypatch.setattr(file_loads_writer, "log", lambda: lines.append)
    daily = DailyTable(f"{dataset}.t", column="day")
    days = ["2026-08-01", "2026-08-02"]
    load_writer.replace(rows_of(days), daily.for_keys(days))
    said = [line.partition(": ")[2] for line in lines]
    assert "3 rows" in said[1]
    assert "0 of 2 jobs done" in said
    assert said[-1] == "1 of 2 jobs done"


def test_writers_can_be_used_from_several_threads(
    dataset: str, stream_writer: DefaultStreamWriter, reader: BigQueryReader
) -> None:
    """Losing the race to create the table is success."""

    def append(first: int) -> None:
        stream_writer.append(pa.table({"id": range(first, first + 100)}), f"{dataset}.t")

    threads = [threading.Thread(target=append, args=[n * 100]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(reader.read(f"{dataset}.t").to_arrow()["id"].to_pylist()) == list(range(400))
