"""An asset without partitions reads all those of another, whose keys are too many for a filter."""

from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from dagster_bq_connector import BigQueryIOManager, BigQueryReader, FileLoadsWriter
from dagster_bq_connector.errors import PartitionError
from dagster_bq_connector.table import literals

TEXT = "%Y-%m-%d-%H:%M"
HOURS = dg.HourlyPartitionsDefinition("2026-08-01-00:00", end_date="2026-08-05-00:00")


def test_each_way_that_the_error_names(
    dataset: str,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(literals, "MAX_SQL_BYTES", 1_000)
    hours = ["2026-07-31-23:00", "2026-08-01-00:00", "2026-08-04-23:00", None]
    load_writer.append(pa.table({"hour": hours, "id": [0, 1, 2, 3]}), f"{dataset}.table")
    io_manager = BigQueryIOManager(writer=load_writer, dataset=dataset)

    def taken(expression: str, mapping: dg.PartitionMapping | None = None) -> list[int]:
        found: dict[str, Any] = {}
        table = dg.AssetSpec("table", metadata={"partition_expr": expression}, partitions_def=HOURS)

        @dg.asset(ins={"table": dg.AssetIn(partition_mapping=mapping)})
        def everything(table: pa.Table) -> None:
            found["ids"] = sorted(table["id"].to_pylist())

        resources = {"io_manager": io_manager}
        dg.materialize([table, everything], selection=[everything], resources=resources)
        return found["ids"]

    with pytest.raises(PartitionError, match="1,000: take fewer partitions") as caught:
        taken("hour")
    for way in (f"PARSE_TIMESTAMP('{TEXT}', hour)", "BigQueryReader.read(table)"):
        assert way in str(caught.value)
    assert taken("hour", dg.SpecificPartitionsPartitionMapping(["2026-08-01-00:00"])) == [1]
    assert taken(f"PARSE_TIMESTAMP('{TEXT}', hour)") == [1, 2]
    assert sorted(reader.read(f"{dataset}.table").to_arrow()["id"].to_pylist()) == [0, 1, 2, 3]
