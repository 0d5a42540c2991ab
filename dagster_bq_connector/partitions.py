"""`DailyTable`: the partition keys of an asset are the partitions of a BigQuery table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import dagster as dg

from dagster_bq_connector.errors import ConfigurationError, PartitionError
from dagster_bq_connector.table.options import TableOptions, TimePartitioning
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.table.row_slice import listed
from dagster_bq_connector.table.slice import INGESTION_TIME, TableSlice, TimeFilter
from dagster_bq_connector.table.window import Window

Context: TypeAlias = dg.AssetExecutionContext | dg.OpExecutionContext

_DEFINITIONS = {
    "hour": dg.HourlyPartitionsDefinition,
    "day": dg.DailyPartitionsDefinition,
    "month": dg.MonthlyPartitionsDefinition,
}
_EARLIEST = {"hour": "0001-01-02-00:00", "day": "0001-01-02", "month": "0001-02-01"}


@dataclass(frozen=True)
class DailyTable:
    """A table with one partition, or one table, a day (or hour, or month).

    With `layout="partitioned"` the key `2026-08-01` is the partition `table$20260801`; with
    `layout="sharded"` it is the table `table_20260801`.

    Attributes:
        table: The table, `dataset.table` or `project.dataset.table`; when sharded, the prefix.
        column: The DATE, DATETIME or TIMESTAMP column that decides where a row belongs. None
            partitions by time of ingestion: the run decides, one partition at a time.
        granularity: How long one partition is.
        timezone: Whose days they are. A TIMESTAMP column is partitioned by BigQuery in UTC, so
            another zone needs a DATE or DATETIME column, or the sharded layout.
        layout: One table with partitions, or a table a partition.
        options: The rest of the layout of tables that are created: clustering and so on.

    Raises:
        InvalidNameError: `table` is no address.
        ConfigurationError: `options` has a partitioning of its own.
    """

    table: str
    column: str | None = None
    granularity: Literal["hour", "day", "month"] = "day"
    timezone: str = "UTC"
    layout: Literal["partitioned", "sharded"] = "partitioned"
    options: TableOptions = field(default_factory=TableOptions)

    def __post_init__(self) -> None:
        TableRef.parse(self.table)
        if self.granularity not in _DEFINITIONS:
            known = ", ".join(map(repr, _DEFINITIONS))
            raise ConfigurationError(f"granularity={self.granularity!r}: it is one of {known}.")
        if self.layout not in ("partitioned", "sharded"):
            raise ConfigurationError(f"layout={self.layout!r}: it is 'partitioned' or 'sharded'.")
        try:
            ZoneInfo(self.timezone)
        except (ZoneInfoNotFoundError, ValueError) as error:
            raise ConfigurationError(
                f"timezone={self.timezone!r} is no time zone: write Europe/Berlin, say."
            ) from error
        if self.options.partitioning is not None:
            raise ConfigurationError(
                f"DailyTable({self.table!r}) decides the partitioning; leave it out of options."
            )

    def partitions_def(
        self, start: str, end: str | None = None
    ) -> dg.TimeWindowPartitionsDefinition:
        """The partitions of an asset that this table holds.

        Args:
            start: The first key: `2026-08-01` (a day or month) or `2026-08-01-00:00` (an hour).
            end: The key before which it ends; it goes on with time when None.

        Returns:
            Dagster's hourly, daily or monthly definition, in `timezone`.
        """
        return _DEFINITIONS[self.granularity](
            start_date=start, end_date=end, timezone=self.timezone
        )

    def for_run(self, context: Context) -> TableSlice:
        """The partitions of this run, to replace: one, or the many of a single-run backfill.

        Args:
            context: The run, as the asset is given it.

        Returns:
            What `BigQueryWriter.replace`, `append` and `BigQueryReader.read` take for a table.

        Raises:
            PartitionError: The run has no partition, or its asset is partitioned otherwise.
        """
        keys = _keys(context)
        definition = context.assets_def.partitions_def if context.has_assets_def else None
        slice_ = self.for_keys(keys)
        if isinstance(definition, dg.TimeWindowPartitionsDefinition):
            for key, window in slice_.windows:
                found = definition.time_window_for_partition_key(key)
                theirs = Window(found.start, found.end)
                if theirs != window:
                    raise PartitionError(
                        f"Partition {key!r} of the asset is {theirs}, and of {self} it is "
                        f"{window}: use {self.table}'s partitions_def() for the asset."
                    )
        return slice_

    def for_keys(self, keys: Iterable[str]) -> TableSlice:
        """The partitions with these keys, outside of a run.

        Args:
            keys: Partition keys as Dagster writes them: `2026-08-01`, or `2026-08-01-13:00`.

        Returns:
            The same as `for_run`.

        Raises:
            PartitionError: A key is not written as this granularity's are.
        """
        windows = tuple((key, self._window(key)) for key in listed(keys))
        if not windows:
            raise PartitionError(f"No partition key of {self} was given: name at least one.")
        if (table := TableRef.parse(self.table)).partition:
            raise PartitionError(f"{table} is one partition: a DailyTable is {table.at(None)}.")
        layout = None
        if self.layout == "partitioned":
            layout = TimePartitioning(self.column, self.granularity)
        return TableSlice(
            table=table,
            column=self.column,
            granularity=self.granularity,
            windows=windows,
            sharded=self.layout == "sharded",
            options=replace(self.options, partitioning=layout),
        )

    def where(self, context: Context, column: str | None = None) -> TimeFilter:
        """The rows of this run's partitions, for reading from any table.

        The literals follow the type of the column in the table that is read: see `TimeFilter`,
        which also says what a STRING or INT64 column is compared with.

        Args:
            context: The run.
            column: The column of that table that is filtered; the one of this table when None.

        Returns:
            What `BigQueryReader.read` takes for `where`.

        Raises:
            PartitionError: The run has no partition, or a partition that is no time.
        """
        definition = context.assets_def.partitions_def if context.has_assets_def else None
        keys = tuple(_keys(context))
        if isinstance(definition, dg.TimeWindowPartitionsDefinition):
            found = [definition.time_window_for_partition_key(key) for key in keys]
            windows = tuple(Window(window.start, window.end) for window in found)
        else:
            windows = tuple(self._window(key) for key in keys)
        return TimeFilter(column or self.column or INGESTION_TIME, windows, keys)

    def _window(self, key: str) -> Window:
        definition = _DEFINITIONS[self.granularity](
            start_date=_EARLIEST[self.granularity], timezone=self.timezone
        )
        error: Exception | None = None
        try:
            window = definition.time_window_for_partition_key(key)
            # A key between two others is rounded up: the 15th would be the month after.
            if definition.get_partition_key_for_timestamp(window.start.timestamp()) == key:
                return Window(window.start, window.end)
        except (ValueError, TypeError, OverflowError) as caught:
            error = caught
        raise PartitionError(
            f"{key!r} is no partition key of {self}: write the start of a {self.granularity} as "
            f"{definition.fmt}."
        ) from error

    def __str__(self) -> str:
        return f"{self.table} by {self.granularity} of {self.timezone}"


def _keys(context: Context) -> list[str]:
    if not (context.has_partition_key or context.has_partition_key_range):
        raise PartitionError(
            "This run has no partition: give the asset a partitions_def, and materialize a "
            "partition of it."
        )
    return list(context.partition_keys)
