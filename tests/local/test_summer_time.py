"""Partitions shorter than a day, in the night in which summer time ends and an hour comes twice."""

import datetime as dt
import itertools
from collections.abc import Sequence
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dagster_bq_connector import BigQueryIOManager, BigQueryReader, DailyTable, FileLoadsWriter
from dagster_bq_connector.errors import PartitionError

ZONE = "Europe/Berlin"
# A schedule, and from when to when it is looked at: the clocks go from 03:00 back to 02:00.
SCHEDULES = {
    "hours": ("0 * * * *", "2026-10-25-01:00", "2026-10-25-04:00"),
    "half hours": ("*/30 * * * *", "2026-10-25-01:30", "2026-10-25-03:30"),
}
QUARTER = dt.timedelta(minutes=15)


def partitions(schedule: str) -> dg.TimeWindowPartitionsDefinition:
    cron, start, end = SCHEDULES[schedule]
    return dg.TimeWindowPartitionsDefinition(
        start=start, end=end, fmt="%Y-%m-%d-%H:%M", cron_schedule=cron, timezone=ZONE
    )


def quarters(start: dt.datetime, end: dt.datetime) -> pa.Table:
    """A row each quarter of an hour."""
    moment, end, found = start.astimezone(dt.UTC), end.astimezone(dt.UTC), []
    while moment < end:
        found.append(moment)
        moment += QUARTER
    return pa.table({"at": pa.array(found, pa.timestamp("us", "UTC"))})


def moments(rows: pa.Table) -> list[dt.datetime]:
    return sorted(moment.astimezone(dt.UTC) for moment in rows["at"].to_pylist())


def of_keys(definition: dg.TimeWindowPartitionsDefinition, keys: Sequence[str]) -> Any:
    """What the rows of some partitions are."""
    windows = [definition.time_window_for_partition_key(key) for key in keys]
    return sorted(moment for w in windows for moment in moments(quarters(w.start, w.end)))


def assets_of(definition: dg.TimeWindowPartitionsDefinition) -> dg.AssetsDefinition:
    @dg.asset(
        name="table",
        partitions_def=definition,
        metadata={"partition_expr": "at"},
        backfill_policy=dg.BackfillPolicy.single_run(),
    )
    def table(context: dg.AssetExecutionContext) -> pa.Table:
        window = context.partition_time_window
        return quarters(window.start, window.end)

    return table


def backfill(
    table: dg.AssetsDefinition, io_manager: BigQueryIOManager, first: str, last: str
) -> None:
    tags = {"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": last}
    assert dg.materialize([table], resources={"io_manager": io_manager}, tags=tags).success


@pytest.fixture
def io_manager(load_writer: FileLoadsWriter, dataset: str) -> BigQueryIOManager:
    return BigQueryIOManager(writer=load_writer, dataset=dataset)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_backfill_again_replaces_the_same_rows(
    schedule: str, io_manager: BigQueryIOManager, reader: BigQueryReader, dataset: str
) -> None:
    """Hours are partitions of the table, and half hours are rows of it."""
    definition = partitions(schedule)
    table, keys = assets_of(definition), definition.get_partition_keys()
    everything = of_keys(definition, keys)
    backfill(table, io_manager, keys[0], keys[-1])
    assert moments(reader.read(f"{dataset}.table").to_arrow()) == everything
    for first, last in itertools.pairwise(keys):
        backfill(table, io_manager, first, last)
        assert moments(reader.read(f"{dataset}.table").to_arrow()) == everything, (first, last)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_input_has_the_partition_before_too(
    schedule: str, io_manager: BigQueryIOManager
) -> None:
    definition = partitions(schedule)
    table, keys = assets_of(definition), definition.get_partition_keys()
    last_two = dg.TimeWindowPartitionMapping(start_offset=-1)
    taken: dict[str, Any] = {}

    @dg.asset(partitions_def=definition, ins={"table": dg.AssetIn(partition_mapping=last_two)})
    def after(table: pa.Table) -> None:
        taken["rows"] = table

    backfill(table, io_manager, keys[0], keys[-1])
    for before, key in itertools.pairwise(keys):
        dg.materialize(
            [table, after],
            selection=[after],
            partition_key=key,
            resources={"io_manager": io_manager},
        )
        assert moments(taken["rows"]) == of_keys(definition, [before, key]), key


def test_hours_of_a_daily_table_together_and_apart(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader
) -> None:
    hourly = DailyTable(f"{dataset}.t", column="at", granularity="hour", timezone=ZONE)
    definition = hourly.partitions_def(*SCHEDULES["hours"][1:])
    one, two, again, three = keys = definition.get_partition_keys()
    everything = of_keys(definition, keys)
    rows = quarters(everything[0], everything[-1] + QUARTER)
    load_writer.replace(rows, hourly.for_keys(keys))
    for some in ([two], [again], [one, two], [two, again], [one, again], [two, three], keys):
        got = reader.read(hourly.for_keys(some)).to_arrow()
        assert moments(got) == of_keys(definition, some), some
    beside = quarters(*definition.time_window_for_partition_key(two))
    assert load_writer.replace(beside, hourly.for_keys([two])).partitions == {two: 4}
    assert moments(reader.read(f"{dataset}.t").to_arrow()) == everything


@pytest.mark.parametrize("expression", ["at", "DATETIME_ADD(at, INTERVAL 0 DAY)"])
def test_a_datetime_does_not_tell_two_hours_apart(
    expression: str, io_manager: BigQueryIOManager, reader: BigQueryReader, dataset: str
) -> None:
    """Neither is written nor read alone; both are read together."""
    definition = partitions("hours")
    one, two, again, three = definition.get_partition_keys()
    taken: dict[str, pa.Table] = {}

    @dg.asset(partitions_def=definition, metadata={"partition_expr": expression})
    def table(context: dg.AssetExecutionContext) -> pa.Table:
        window = context.partition_time_window
        rows = quarters(window.start, window.end)
        zoned = rows["at"].cast(pa.timestamp("us", ZONE))
        return pa.table({"at": pc.local_timestamp(zoned)})

    @dg.asset(partitions_def=definition)
    def same(table: pa.Table) -> None: ...

    three_hours = dg.SpecificPartitionsPartitionMapping([two, again, three])

    @dg.asset(ins={"table": dg.AssetIn(partition_mapping=three_hours)})
    def together(table: pa.Table) -> None:
        taken["rows"] = table

    def run(asset: dg.AssetsDefinition, key: str | None = None) -> None:
        resources = {"io_manager": io_manager}
        every = [table, same, together]
        dg.materialize(every, selection=[asset], partition_key=key, resources=resources)

    for key in (one, three):
        run(table, key)
    for asset, key in itertools.product((table, same), (two, again)):
        with pytest.raises(PartitionError, match="clocks of Europe/Berlin show twice"):
            run(asset, key)
    assert reader.read(f"{dataset}.table").to_arrow().num_rows == 8
    run(together)
    assert taken["rows"].num_rows == 4
