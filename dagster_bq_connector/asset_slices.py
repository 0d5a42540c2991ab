"""The partitions of a Dagster asset are rows of its table, and sometimes partitions of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import dagster as dg
import pyarrow as pa
from google.cloud import bigquery

from dagster_bq_connector.errors import ConfigurationError, PartitionError
from dagster_bq_connector.schema.types import wire_field
from dagster_bq_connector.table.options import Granularity, TableOptions, TimePartitioning
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.table.row_slice import KeyFilter, RowSlice
from dagster_bq_connector.table.slice import TableSlice, TimeFilter
from dagster_bq_connector.table.window import Window

Filter: TypeAlias = KeyFilter | TimeFilter

_BETWEEN_DIMENSIONS = "|"
_COLUMN = re.compile(r"\w+")
_TIMES: dict[str, tuple[Granularity, ...]] = {
    "DATE": ("day", "month", "year"),
    "DATETIME": ("hour", "day", "month", "year"),
    "TIMESTAMP": ("hour", "day", "month", "year"),
}
_SCHEDULES: dict[str, Granularity] = {
    "0 * * * *": "hour",
    "@hourly": "hour",
    "0 0 * * *": "day",
    "@daily": "day",
    "@midnight": "day",
    "0 0 1 * *": "month",
    "@monthly": "month",
}


@dataclass(frozen=True)
class Dimension:
    """One dimension of an asset's partitions.

    Attributes:
        column: The column, or SQL expression, that says which partition a row belongs to.
        definition: The partitions.
    """

    column: str
    definition: dg.PartitionsDefinition[Any]

    def filter(self, keys: Sequence[str]) -> Filter:
        """The rows of some partitions."""
        if isinstance(self.definition, dg.TimeWindowPartitionsDefinition):
            return TimeFilter(self.column, tuple(self.window(key) for key in keys), tuple(keys))
        return KeyFilter(self.column, tuple(keys))

    def window(self, key: str) -> Window:
        """The time that a partition stands for."""
        assert isinstance(self.definition, dg.TimeWindowPartitionsDefinition)
        window = self.definition.time_window_for_partition_key(key)
        return Window(window.start, window.end)

    def layout(self, columns: Iterable[bigquery.SchemaField]) -> TimePartitioning | None:
        """How a new table with these columns is partitioned for it; None when it cannot be.

        Weeks, and other times that are no partitions of BigQuery, are kept by day.
        """
        if not isinstance(self.definition, dg.TimeWindowPartitionsDefinition):
            return None
        granularity = granularity_of(self.definition) or "day"
        for column in columns:
            if column.name.casefold() == self.column.casefold():
                single = column.mode != "REPEATED"
                if single and granularity in _TIMES.get(column.field_type, ()):
                    return TimePartitioning(column.name, granularity)
                break
        return None


@dataclass(frozen=True)
class AssetPartitions:
    """Some partitions of an asset whose table is `table`.

    Attributes:
        table: The table.
        dimensions: The dimensions of its partitions by name; one is called `""`.
        keys: The partition keys.
    """

    table: TableRef
    dimensions: Mapping[str, Dimension]
    keys: tuple[str, ...]

    @classmethod
    def of(
        cls,
        table: TableRef,
        definition: dg.PartitionsDefinition[Any],
        keys: Iterable[str],
        expression: object,
    ) -> AssetPartitions:
        """Match the dimensions of a definition with their columns.

        Args:
            table: The table of the asset.
            definition: The asset's partitions.
            keys: The partition keys.
            expression: The asset's metadata `partition_expr`: a column or SQL expression; of
                several dimensions, one for the name of each.

        Raises:
            ConfigurationError: `expression` does not name a column for each dimension.
        """
        definitions: dict[str, dg.PartitionsDefinition[Any]] = {"": definition}
        columns: Any = {"": expression}
        if isinstance(definition, dg.MultiPartitionsDefinition):
            definitions = {part.name: part.partitions_def for part in definition.partitions_defs}
            columns = expression if isinstance(expression, Mapping) else {}
        lacking = [name for name in definitions if not _says(columns.get(name))]
        if lacking:
            example = '"created_at"'
            if isinstance(definition, dg.MultiPartitionsDefinition):
                pairs = ", ".join(f'"{name}": "<its column>"' for name in definitions)
                example = f"{{{pairs}}}"
            found = "" if expression is None else f", but partition_expr={expression!r}"
            raise ConfigurationError(
                f"The asset of {table} has partitions, and its metadata does not say which column "
                f'they are of{found}: set metadata={{"partition_expr": {example}}} on the asset.'
            )
        dimensions = {name: Dimension(columns[name], definitions[name]) for name in definitions}
        return cls(table, dimensions, tuple(keys))

    def rows(self, options: TableOptions | None = None) -> RowSlice:
        """The rows of each partition."""
        parts = tuple((key, self._filters(key)) for key in self.keys)
        return RowSlice(self.table, parts, options)

    def partitions(self) -> TableSlice | None:
        """The same as partitions of a table by time; None when they are none of BigQuery's.

        Whether the windows are whole partitions of one table is for `is_partitions_of` or `fits`.
        """
        [dimension, *others] = self._ordered
        times = isinstance(dimension.definition, dg.TimeWindowPartitionsDefinition)
        if others or not times or not _COLUMN.fullmatch(dimension.column):
            return None
        granularity = granularity_of(dimension.definition)
        if granularity is None:
            return None
        windows = tuple((key, dimension.window(key)) for key in self.keys)
        layout = TableOptions(TimePartitioning(dimension.column, granularity))
        return TableSlice(self.table, dimension.column, granularity, windows, options=layout)

    def layout(self, columns: Sequence[bigquery.SchemaField]) -> TimePartitioning | None:
        """How a new table with these columns is partitioned."""
        layouts = (dimension.layout(columns) for dimension in self._ordered)
        return next((layout for layout in layouts if layout), None)

    @property
    def _ordered(self) -> list[Dimension]:
        return list(self.dimensions.values())

    def _filters(self, key: str) -> tuple[Filter, ...]:
        return tuple(d.filter([k]) for d, k in zip(self._ordered, self._parts(key), strict=True))

    def _parts(self, key: str) -> list[str]:
        """The key of each dimension."""
        if list(self.dimensions) == [""]:
            return [key]
        if isinstance(key, dg.MultiPartitionKey):
            return [key.keys_by_dimension[name] for name in self.dimensions]
        # Some partition mappings give it as text, in the order of the definition's dimensions.
        parts = key.split(_BETWEEN_DIMENSIONS)
        if len(parts) != len(self.dimensions):
            names = _BETWEEN_DIMENSIONS.join(f"<{name}>" for name in self.dimensions)
            raise PartitionError(f"{key!r} of {self.table} is no key of {names}.")
        return parts


def _says(expression: object) -> bool:
    return isinstance(expression, str) and bool(expression.strip())


def fits(slice_: TableSlice, columns: Sequence[bigquery.SchemaField]) -> bool:
    """Whether the windows of a slice are whole partitions of a new table with these columns."""
    folded = (slice_.column or "").casefold()
    kind: pa.DataType | None = None
    for column in columns:
        if column.name.casefold() == folded and column.mode != "REPEATED":
            kind = wire_field(column).type
    try:
        return kind is not None and bool(slice_.partitions(kind))
    except PartitionError:
        return False


def granularity_of(definition: dg.PartitionsDefinition[Any]) -> Granularity | None:
    """Whether partitions are the hours, days or months of their calendar; None when they are not.

    The windows of single keys do not tell: on the day on which the clocks go forward, an hour ends
    two hours later by the clock.
    """
    if not isinstance(definition, dg.TimeWindowPartitionsDefinition):
        return None
    return _SCHEDULES.get(" ".join(definition.cron_schedule.split()))
