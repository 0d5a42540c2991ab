"""The IO manager against the local BigQuery: inputs, outputs, addresses and what it refuses."""

import datetime as dt
from decimal import Decimal
from typing import Any

import dagster as dg
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from dagster_bq_connector import (
    BigQueryIOManager,
    BigQueryReader,
    BigQueryResource,
    DefaultStreamWriter,
    FileLoadsWriter,
    TableOptions,
    TableRef,
    TimePartitioning,
)
from dagster_bq_connector.asset_slices import AssetPartitions
from dagster_bq_connector.errors import (
    ConfigurationError,
    PartitionError,
    SchemaError,
    TableNotFoundError,
    UnsupportedError,
)
from dagster_bq_connector.read.rows import Rows
from support.partitioned_assets import DAILY, FORMS, KINDS, as_table, ids, rows_of

COLUMNS = pa.table({"id": [1, 2, 3], "name": ["a", "b", "c"]})


@pytest.fixture
def io_manager(load_writer: FileLoadsWriter, dataset: str) -> BigQueryIOManager:
    return BigQueryIOManager(writer=load_writer, dataset=dataset)


def run(assets: list[Any], io_manager: BigQueryIOManager, **arguments: Any) -> Any:
    return dg.materialize(assets, resources={"io_manager": io_manager}, **arguments)


def cause_of(assets: list[Any], io_manager: BigQueryIOManager, **arguments: Any) -> BaseException:
    """Why a run fails."""
    result = run(assets, io_manager, raise_on_error=False, **arguments)
    assert not result.success
    [failure] = [e for e in result.all_events if e.is_step_failure]
    return failure.event_specific_data.error


def test_every_form_that_an_input_may_have(io_manager: BigQueryIOManager) -> None:
    taken: dict[str, Any] = {}

    @dg.asset
    def table():
        return COLUMNS

    @dg.asset
    def bare(table) -> None:
        taken["bare"] = table

    @dg.asset
    def reader(table: pa.RecordBatchReader) -> None:
        taken["reader"] = table.read_all()

    @dg.asset
    def rows(table: Rows) -> None:
        taken["rows"] = table.to_arrow()

    @dg.asset
    def optional(table: pl.DataFrame | None) -> None:
        taken["optional"] = table

    assert run([table, bare, reader, rows, optional], io_manager).success
    assert isinstance(taken["optional"], pl.DataFrame)
    for form in ("bare", "reader", "rows"):
        assert taken[form].sort_by("id").equals(COLUMNS), form
    assert taken["optional"].sort("id").equals(pl.from_arrow(COLUMNS))


def test_rows_go_from_table_to_table_without_being_held(
    io_manager: BigQueryIOManager, reader: BigQueryReader, dataset: str
) -> None:
    @dg.asset
    def table() -> pa.Table:
        return COLUMNS

    @dg.asset
    def copy(table: Rows) -> Rows:
        return table

    assert run([table, copy], io_manager).success
    assert reader.read(f"{dataset}.copy").to_arrow().sort_by("id").equals(COLUMNS)


def test_where_the_dataset_of_an_asset_comes_from(
    bigquery: BigQueryResource, load_writer: FileLoadsWriter, reader: BigQueryReader, dataset: str
) -> None:
    nowhere = BigQueryIOManager(writer=load_writer)

    @dg.asset(metadata={"schema": dataset})
    def by_metadata() -> pa.Table:
        return COLUMNS

    @dg.asset(key_prefix=["warehouse", dataset])
    def by_prefix() -> pa.Table:
        return COLUMNS

    @dg.asset
    def by_nothing() -> pa.Table:
        return COLUMNS

    assert run([by_metadata, by_prefix], nowhere).success
    for name in ("by_metadata", "by_prefix"):
        assert ids(reader.read(f"{dataset}.{name}").to_arrow()) == [1, 2, 3]
    assert "'by_nothing' has no dataset" in str(cause_of([by_nothing], nowhere))


def test_an_external_asset_is_read(
    io_manager: BigQueryIOManager, load_writer: FileLoadsWriter, dataset: str
) -> None:
    load_writer.append(COLUMNS, f"{dataset}.given")
    given = dg.AssetSpec("given").with_io_manager_key("io_manager")
    taken = []

    @dg.asset(ins={"given": dg.AssetIn(metadata={"columns": ["NAME"], "where": "id = 2"})})
    def after(given: pd.DataFrame) -> None:
        taken.append(given)

    assert run([given, after], io_manager, selection=[after]).success
    assert taken[0].to_dict("list") == {"name": ["b"]}


@pytest.mark.parametrize("kind", ["DATE", "DATETIME", "TIMESTAMP", "INT64", "STRING"])
@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_days_in_a_column_of_any_type(
    kind: str,
    zone: str,
    dataset: str,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
) -> None:
    """Public failure case 51: a DATE was compared with the text of a timestamp.

    A day is that of the definition's time zone; a STRING holds the partition key, an INT64 its
    digits.
    """
    days = [dt.date(2026, 8, day) for day in (1, 1, 2)]
    noons = [dt.datetime(day.year, day.month, day.day, 23, 30) for day in days]
    columns: dict[str, pa.Array] = {
        "DATE": pa.array(days, pa.date32()),
        "DATETIME": pa.array(noons, pa.timestamp("us")),
        "TIMESTAMP": pa.compute.assume_timezone(pa.array(noons, pa.timestamp("us")), zone),
        "INT64": pa.array([20260801, 20260801, 20260802]),
        "STRING": pa.array([day.isoformat() for day in days]),
    }
    rows = pa.table({"id": [0, 1, 2], "day": columns[kind]})
    given, taken = {"rows": rows}, {}
    io_manager = BigQueryIOManager(writer=load_writer, dataset=dataset)
    daily = dg.DailyPartitionsDefinition("2026-08-01", end_date="2026-08-05", timezone=zone)

    @dg.asset(
        partitions_def=daily,
        metadata={"partition_expr": "day"},
        backfill_policy=dg.BackfillPolicy.single_run(),
    )
    def table() -> pa.Table:
        return given["rows"]

    @dg.asset(partitions_def=daily)
    def after(table: pa.Table) -> None:
        taken["rows"] = table

    span = {
        "dagster/asset_partition_range_start": "2026-08-01",
        "dagster/asset_partition_range_end": "2026-08-02",
    }
    assert run([table], io_manager, tags=span).success
    given["rows"] = rows.slice(1, 1)
    assert run([table], io_manager, partition_key="2026-08-01").success
    assert ids(reader.read(f"{dataset}.table").to_arrow()) == [1, 2]
    assert run([table, after], io_manager, selection=[after], partition_key="2026-08-02").success
    assert ids(taken["rows"]) == [2]


def test_an_expression_says_which_partition_a_row_belongs_to(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader
) -> None:
    start = int(dt.datetime(2026, 8, 1, 12, tzinfo=dt.UTC).timestamp())
    given = {"rows": pa.table({"id": [1, 2], "seconds": [start, start + 60]})}
    io_manager = BigQueryIOManager(writer=load_writer, dataset=dataset)

    @dg.asset(partitions_def=DAILY, metadata={"partition_expr": "TIMESTAMP_SECONDS(seconds)"})
    def table() -> pa.Table:
        return given["rows"]

    assert run([table], io_manager, partition_key="2026-08-01").success
    given["rows"] = pa.table({"id": [3], "seconds": [start + 86_400]})
    assert run([table], io_manager, partition_key="2026-08-02").success
    assert "another partition" in str(cause_of([table], io_manager, partition_key="2026-08-01"))
    given["rows"] = given["rows"].slice(0, 0)
    assert run([table], io_manager, partition_key="2026-08-01").success
    assert ids(reader.read(f"{dataset}.table").to_arrow()) == [3]


def test_a_mapping_of_partitions_and_one_that_leads_nowhere(
    io_manager: BigQueryIOManager, dataset: str
) -> None:
    taken: dict[str, Any] = {}
    back = dg.TimeWindowPartitionMapping(start_offset=-1, end_offset=-1)
    last_two = dg.TimeWindowPartitionMapping(start_offset=-1)

    @dg.asset(partitions_def=DAILY, metadata={"partition_expr": "day"})
    def table(context: dg.AssetExecutionContext) -> pa.Table:
        return rows_of([context.partition_key], 2, first=10 * int(context.partition_key[-2:]))

    @dg.asset(partitions_def=DAILY, ins={"table": dg.AssetIn("table", partition_mapping=last_two)})
    def two_days(table: pl.DataFrame) -> None:
        taken["two"] = table

    @dg.asset(partitions_def=DAILY, ins={"table": dg.AssetIn("table", partition_mapping=back)})
    def day_before(table: pl.DataFrame) -> None:
        taken["before"] = table

    for key in ("2026-08-01", "2026-08-02", "2026-08-03"):
        assert run([table], io_manager, partition_key=key).success
    both = [table, two_days, day_before]
    chosen = [two_days, day_before]
    assert run(both, io_manager, selection=chosen, partition_key="2026-08-03").success
    assert (ids(taken["two"]), ids(taken["before"])) == ([20, 21, 30, 31], [20, 21])
    assert run(both, io_manager, selection=[day_before], partition_key="2026-08-01").success
    assert ids(taken["before"]) == []
    assert taken["before"].columns == ["id", "at", "day", "city", "amount"]


@pytest.mark.parametrize("kind", [*FORMS.values(), pa.RecordBatchReader, Rows])
def test_an_asset_that_takes_its_partition_before(
    kind: Any, bigquery: BigQueryResource, staging: str, dataset: str
) -> None:
    """The first has none before it, and no table, nor dataset, either."""
    writer = FileLoadsWriter(bigquery=bigquery, staging=staging, create_dataset=True)
    io_manager = BigQueryIOManager(writer=writer, dataset=dataset)
    with bigquery.get_client() as client:
        client.delete_dataset(dataset)
    back = dg.TimeWindowPartitionMapping(start_offset=-1, end_offset=-1)
    taken: list[Any] = []

    def total(context: dg.AssetExecutionContext, total: Any) -> pa.Table:
        assert isinstance(total, kind)
        taken.append(pa.table(total) if isinstance(total, Rows) else as_table(total))
        return rows_of([context.partition_key], taken[-1].num_rows + 1)

    total.__annotations__["total"] = kind
    asset = dg.asset(
        partitions_def=DAILY,
        metadata={"partition_expr": "day"},
        ins={"total": dg.AssetIn(partition_mapping=back)},
    )(total)
    for key in ("2026-08-01", "2026-08-02", "2026-08-03"):
        assert run([asset], io_manager, partition_key=key).success
    assert [rows.num_rows for rows in taken] == [0, 1, 2]
    assert [rows.num_columns for rows in taken] == [0, 5, 5]


def test_a_mapping_to_partitions_of_two_dimensions_by_text(io_manager: BigQueryIOManager) -> None:
    definition, columns, keys = KINDS["multi"]
    taken: dict[str, pl.DataFrame] = {}

    @dg.asset(partitions_def=definition, metadata={"partition_expr": columns})
    def table(context: dg.AssetExecutionContext) -> pa.Table:
        key = context.partition_key
        return rows_of([key], 2, first=10 * int(key[-2:]))

    def after(key: str) -> dg.AssetsDefinition:
        mapping = dg.SpecificPartitionsPartitionMapping([key])

        @dg.asset(ins={"table": dg.AssetIn(partition_mapping=mapping)})
        def after(table: pl.DataFrame) -> None:
            taken["rows"] = table

        return after

    for key in keys:
        assert run([table], io_manager, partition_key=key).success
    one = after(keys[1])
    assert run([table, one], io_manager, selection=[one]).success
    assert ids(taken["rows"]) == [20, 21]
    asset_partitions = AssetPartitions.of(TableRef("d", "t"), definition, ["paris"], columns)
    with pytest.raises(PartitionError, match=r"'paris' of d.t is no key of <city>\|<day>"):
        asset_partitions.rows()


def test_appending_adds_and_still_checks_the_partition(
    dataset: str,
    load_writer: FileLoadsWriter,
    stream_writer: DefaultStreamWriter,
    reader: BigQueryReader,
) -> None:
    for writer, name in ((load_writer, "loaded"), (stream_writer, "streamed")):
        io_manager = BigQueryIOManager(writer=writer, dataset=dataset, mode="append")
        given = {"rows": rows_of(["2026-08-01"], 2)}

        @dg.asset(name=name, partitions_def=DAILY, metadata={"partition_expr": "day"})
        def table(given: dg.ResourceParam[dict[str, pa.Table]]) -> pa.Table:
            return given["rows"]

        def append(
            io_manager: BigQueryIOManager = io_manager,
            table: dg.AssetsDefinition = table,
            given: dict[str, pa.Table] = given,
        ) -> None:
            resources = {"io_manager": io_manager, "given": given}
            dg.materialize([table], resources=resources, partition_key="2026-08-01")

        append()
        append()
        assert ids(reader.read(f"{dataset}.{name}").to_arrow()) == [0, 0, 1, 1]
        given["rows"] = rows_of(["2026-08-02"], 1)
        with pytest.raises(PartitionError, match="Row 0 belongs to another partition"):
            append()
        assert ids(reader.read(f"{dataset}.{name}").to_arrow()) == [0, 0, 1, 1]


def test_a_table_that_requires_a_filter(
    dataset: str, load_writer: FileLoadsWriter, bigquery: BigQueryResource
) -> None:
    """Public failure case 55: its partitions could be neither replaced nor read."""
    options = TableOptions(TimePartitioning("day"), require_partition_filter=True)
    load_writer.append(rows_of(["2026-08-01"], 1), f"{dataset}.table", options)
    load_writer.append(rows_of(["2026-08-02"], 1), f"{dataset}.by_city", options)
    io_manager = BigQueryIOManager(writer=load_writer, dataset=dataset)
    taken: dict[str, Any] = {}
    cities = dg.StaticPartitionsDefinition(["berlin", "paris"])

    @dg.asset(partitions_def=DAILY, metadata={"partition_expr": "day"})
    def table() -> pa.Table:
        return rows_of(["2026-08-01"], 2, first=10)

    @dg.asset(partitions_def=cities, metadata={"partition_expr": "city"})
    def by_city() -> pa.Table:
        return rows_of(["berlin"], 2, first=20)

    @dg.asset(partitions_def=DAILY)
    def after(table: pl.DataFrame) -> None:
        taken["table"] = table

    assert run([table, after], io_manager, partition_key="2026-08-01").success
    assert ids(taken["table"]) == [10, 11]
    assert run([by_city], io_manager, partition_key="berlin").success
    with bigquery.get_client() as client:
        query = f"SELECT id FROM `{dataset}.by_city` WHERE day IS NOT NULL ORDER BY id"
        assert [row["id"] for row in client.query_and_wait(query)] == [20, 21]


def test_a_column_more_is_refused_or_added(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader
) -> None:
    """Public failure case 54: the second run has a column that the table lacks."""
    given = {"rows": rows_of(["2026-08-01"], 2)}

    @dg.asset(partitions_def=DAILY, metadata={"partition_expr": "day"})
    def table() -> pa.Table:
        return given["rows"]

    fixed = BigQueryIOManager(writer=load_writer, dataset=dataset)
    growing = BigQueryIOManager(writer=load_writer, dataset=dataset, evolution="add")
    assert run([table], fixed, partition_key="2026-08-01").success
    given["rows"] = rows_of(["2026-08-02"], 1).append_column("note", pa.array(["new"]))
    with pytest.raises(SchemaError, match="no column 'note'"):
        run([table], fixed, partition_key="2026-08-02")
    assert run([table], growing, partition_key="2026-08-02").success
    notes = reader.read(f"{dataset}.table").to_arrow()["note"].to_pylist()
    assert sorted(notes, key=str) == [None, None, "new"]


def test_what_a_materialization_shows(
    io_manager: BigQueryIOManager, dataset: str, project: str
) -> None:
    @dg.asset
    def table() -> dg.MaterializeResult[pa.Table]:
        return dg.MaterializeResult(value=COLUMNS, metadata={"dagster/row_count": 7, "mine": 1})

    result = run([table], io_manager)
    [event] = result.get_asset_materialization_events()
    shown = {key: value.value for key, value in event.materialization.metadata.items()}
    assert shown["dagster/row_count"] == 7  # what the asset says itself stays
    assert (shown["dagster_bq/rows"], shown["mine"]) == (3, 1)
    assert shown["dagster/table_name"] == f"{project}.{dataset}.table"
    assert [column.name for column in shown["dagster/column_schema"].columns] == ["id", "name"]


def test_a_pandas_frame_keeps_its_types(io_manager: BigQueryIOManager) -> None:
    frame = pd.DataFrame(
        {
            "n": pd.array([1, None], dtype="Int64"),
            "day": [dt.date(2026, 8, 1), None],
            "price": [Decimal("1.10"), Decimal("2.000000001")],
            "kind": pd.Categorical(["x", "y"]),
            "at": pd.to_datetime(["2026-08-01T00:00:00Z", None]),
        },
        index=pd.Index([10, 20], name="id"),
    )
    taken = {}

    @dg.asset
    def table() -> pd.DataFrame:
        return frame

    @dg.asset
    def after(table: pd.DataFrame) -> None:
        taken["frame"] = table.sort_values("id")

    assert run([table, after], io_manager).success
    got = pa.Table.from_pandas(taken["frame"], preserve_index=False)
    assert got.to_pydict() == {
        "id": [10, 20],
        "n": [1, None],
        "day": [dt.date(2026, 8, 1), None],
        "price": [Decimal("1.10"), Decimal("2.000000001")],
        "kind": ["x", "y"],
        "at": [dt.datetime(2026, 8, 1, tzinfo=dt.UTC), None],
    }


def test_what_is_refused_says_why(
    io_manager: BigQueryIOManager, stream_writer: DefaultStreamWriter, dataset: str
) -> None:
    with pytest.raises(ConfigurationError, match="DefaultStreamWriter cannot replace"):
        BigQueryIOManager(writer=stream_writer, dataset=dataset)

    @dg.asset
    def nothing():
        return None

    @dg.asset
    def number() -> int:
        return 7

    @dg.asset(partitions_def=DAILY)
    def no_column() -> pa.Table:
        return COLUMNS

    @dg.asset
    def table() -> pa.Table:
        return COLUMNS

    @dg.asset
    def wrong_form(table: dict) -> None: ...

    @dg.asset(ins={"table": dg.AssetIn(metadata={"columns": "id"})})
    def wrong_columns(table: pa.Table) -> None: ...

    @dg.asset
    def missing() -> pa.Table:
        return COLUMNS

    @dg.asset
    def too_early(missing: pa.Table) -> None: ...

    assert run([table], io_manager).success
    cases: list[tuple[list[Any], dict[str, Any], type[Exception], str]] = [
        ([nothing], {}, SchemaError, "returned None"),
        ([number], {}, SchemaError, "int holds no rows"),
        ([no_column], {"partition_key": "2026-08-01"}, ConfigurationError, "partition_expr"),
        ([table, wrong_form], {"selection": [wrong_form]}, UnsupportedError, "annotate it"),
        ([table, wrong_columns], {"selection": [wrong_columns]}, ConfigurationError, "list of"),
        ([missing, too_early], {"selection": [too_early]}, TableNotFoundError, "does not exist"),
    ]
    for assets, arguments, kind, text in cases:
        with pytest.raises(Exception, match=text) as caught:
            run(assets, io_manager, **arguments)
        chain = [caught.value, caught.value.__cause__]
        assert any(isinstance(error, kind) for error in chain), caught.value
