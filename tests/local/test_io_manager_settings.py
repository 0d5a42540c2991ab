"""The IO manager: its writer, the metadata of assets and inputs, and contexts built by hand."""

from typing import Any, cast

import dagster as dg
import polars as pl
import pyarrow as pa
import pytest

from dagster_bq_connector import (
    BigQueryIOManager,
    BigQueryReader,
    BigQueryResource,
    DefaultStreamWriter,
    FileLoadsWriter,
)
from dagster_bq_connector.errors import ConfigurationError, UnsupportedError
from support.partitioned_assets import DAILY, ids, rows_of

COLUMNS = pa.table({"id": [1, 2, 3], "name": ["a", "b", "c"]})


@pytest.fixture
def io_manager(load_writer: FileLoadsWriter, dataset: str) -> BigQueryIOManager:
    return BigQueryIOManager(writer=load_writer, dataset=dataset)


def run(assets: list[Any], io_manager: BigQueryIOManager, **arguments: Any) -> Any:
    return dg.materialize(assets, resources={"io_manager": io_manager}, **arguments)


def test_loading_outside_of_a_run(io_manager: BigQueryIOManager) -> None:
    @dg.asset
    def table() -> pa.Table:
        return COLUMNS

    assert run([table], io_manager).success
    definitions = dg.Definitions(assets=[table], resources={"io_manager": io_manager})
    assert ids(definitions.load_asset_value("table")) == [1, 2, 3]
    for kind in (str, list):
        with pytest.raises(UnsupportedError, match="Asset 'table' is annotated <class"):
            definitions.load_asset_value("table", python_type=kind)

    key = dg.AssetKey("table")
    stored = dg.build_output_context(asset_key=key)
    built = dg.build_input_context(asset_key=key, upstream_output=stored)
    assert io_manager.load_input(built).equals(COLUMNS)
    with pytest.raises(ConfigurationError, match="The input comes from no asset or op"):
        io_manager.load_input(dg.build_input_context())
    for nameless in (dg.build_output_context(), dg.build_output_context(name="result")):
        with pytest.raises(ConfigurationError, match="has no name of its own"):
            io_manager.load_input(dg.build_input_context(upstream_output=nameless))


def test_metadata_may_be_given_as_values_of_dagster(io_manager: BigQueryIOManager) -> None:
    taken: dict[str, pl.DataFrame] = {}
    text, json = dg.MetadataValue.text, dg.MetadataValue.json
    dataset = text(cast("str", io_manager.dataset))
    nowhere = BigQueryIOManager(writer=io_manager.writer)

    @dg.asset(partitions_def=DAILY, metadata={"partition_expr": text("day"), "schema": dataset})
    def table() -> pa.Table:
        return rows_of(["2026-08-01"], 3)

    asked = {"columns": json(["id", "city"]), "where": text("id > 0")}

    @dg.asset(partitions_def=DAILY, ins={"table": dg.AssetIn(metadata=asked)})
    def after(table: pl.DataFrame) -> None:
        taken["rows"] = table

    assert run([table, after], nowhere, partition_key="2026-08-01").success
    assert (taken["rows"].columns, ids(taken["rows"])) == (["id", "city"], [1, 2])


@pytest.mark.parametrize(
    ("metadata", "asked", "text"),
    [
        ({"schema": 1}, {}, "Asset 'table' has the metadata schema=1: write it as text"),
        ({"partition_expr": 1}, {}, r"but partition_expr=1: set metadata=\{"),
        ({}, {"columns": [1]}, r"Input 'table' has the metadata columns=\[1\]: write a list of"),
        ({}, {"columns": dg.MetadataValue.json({"id": 1})}, "write a list of column names"),
        ({}, {"where": 1}, "Input 'table' has the metadata where=1: write it as text"),
    ],
)
def test_metadata_that_is_no_such_thing(
    metadata: dict[str, Any], asked: dict[str, Any], text: str, io_manager: BigQueryIOManager
) -> None:
    daily = {"partition_expr": "day"} | metadata

    @dg.asset(partitions_def=DAILY, metadata=daily)
    def table() -> pa.Table:
        return rows_of(["2026-08-01"], 1)

    @dg.asset(partitions_def=DAILY, ins={"table": dg.AssetIn(metadata=asked)})
    def after(table: pl.DataFrame) -> None: ...

    with pytest.raises(ConfigurationError, match=text):
        run([table, after], io_manager, partition_key="2026-08-01")


def test_what_is_no_writer_is_refused(
    bigquery: BigQueryResource, load_writer: FileLoadsWriter, reader: BigQueryReader, dataset: str
) -> None:
    with pytest.raises(ConfigurationError, match=r"needs a writer, and it has none: pass writer="):
        BigQueryIOManager(dataset=dataset)
    with pytest.raises(ConfigurationError, match="needs a writer, and BigQueryResource is none"):
        BigQueryIOManager(writer=bigquery, dataset=dataset)
    later = DefaultStreamWriter.configure_at_launch()
    with pytest.raises(ConfigurationError, match="DefaultStreamWriter cannot replace"):
        BigQueryIOManager(writer=later, dataset=dataset)

    @dg.asset
    def table() -> pa.Table:
        return COLUMNS

    @dg.resource
    def made() -> FileLoadsWriter:
        return load_writer

    @dg.resource
    def no_writer() -> BigQueryReader:
        return reader

    def run_with(writer: dg.ResourceDefinition) -> bool:
        io_manager = BigQueryIOManager(writer=writer, dataset=dataset)
        return dg.materialize([table], resources={"w": writer, "io_manager": io_manager}).success

    assert run_with(made)
    with pytest.raises(dg.DagsterError) as caught:
        run_with(no_writer)
    assert isinstance(caught.value.__cause__, ConfigurationError)
    assert "needs a writer, and BigQueryReader is none" in str(caught.value.__cause__)
