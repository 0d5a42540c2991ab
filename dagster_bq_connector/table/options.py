"""How a table is laid out when it is created, and what an existing one is checked against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import NoneType
from typing import Any, Literal

from google.cloud import bigquery
from google.cloud.bigquery.table import PrimaryKey, TableConstraints

from dagster_bq_connector.errors import ConfigurationError

Granularity = Literal["hour", "day", "month", "year"]
Evolution = Literal["none", "add"]

MAX_CLUSTERING = 4  # columns of a table, as BigQuery limits them
MAX_PRIMARY_KEY = 16


@dataclass(frozen=True, slots=True)
class TimePartitioning:
    """One partition a `granularity` of a column, or of the time when a row was ingested.

    Attributes:
        column: A DATE, DATETIME or TIMESTAMP column; None partitions by time of ingestion.
        granularity: How long one partition is: `hour`, `day`, `month` or `year`.
        expiration: How long a partition is kept; for ever when None.

    Raises:
        ConfigurationError: Another granularity.
    """

    column: str | None = None
    granularity: Granularity = "day"
    expiration: timedelta | None = None

    def __post_init__(self) -> None:
        if self.granularity not in ("hour", "day", "month", "year"):
            raise ConfigurationError(
                f"granularity={self.granularity!r}: it is 'hour', 'day', 'month' or 'year'."
            )

    def to_api(self) -> bigquery.TimePartitioning:
        """The same as Google's client takes it."""
        keep = self.expiration
        return bigquery.TimePartitioning(
            type_=self.granularity.upper(),
            field=self.column,
            expiration_ms=None if keep is None else int(keep.total_seconds() * 1000),
        )

    def __str__(self) -> str:
        return f"by {self.granularity} of {self.column or 'ingestion'}"


@dataclass(frozen=True, slots=True)
class RangePartitioning:
    """One partition every `interval` of an INTEGER column, from `start` up to before `end`.

    Attributes:
        column: The INTEGER column.
        start: The first value of the first partition.
        end: The value before which the last one ends.
        interval: How many values are one partition.
    """

    column: str
    start: int
    end: int
    interval: int

    def to_api(self) -> bigquery.RangePartitioning:
        """The same as Google's client takes it."""
        bounds = bigquery.PartitionRange(start=self.start, end=self.end, interval=self.interval)
        return bigquery.RangePartitioning(range_=bounds, field=self.column)

    def __str__(self) -> str:
        return f"by range of {self.column} [{self.start}, {self.end}) step {self.interval}"


@dataclass(frozen=True)
class TableOptions:
    """The layout of a table.

    A missing table is created with it. Of an existing one `partitioning`, `clustering` and
    `primary_key` are checked when they are set; the rest is left as it is.

    Attributes:
        partitioning: By time or by a range of integers; None leaves it open.
        clustering: Up to 4 columns, most selective first.
        primary_key: Up to 16 columns, NOT ENFORCED as every key of BigQuery.
        require_partition_filter: Refuse queries that would read every partition.
        description: Text for people.
        labels: Labels of the table.
        expiration: How long after its creation the table is dropped; never when None.
        evolution: What becomes of an existing table that lacks columns of the data. `"none"`: it
            is never changed, and the write is refused. `"add"`: the columns, and fields of
            structs, are added as NULLABLE ones before anything is written, if the others fit; they
            stay when a row is refused afterwards. No column is ever dropped, and no type changed.

    Raises:
        ConfigurationError: More columns than BigQuery takes, or an evolution that is none.
    """

    partitioning: TimePartitioning | RangePartitioning | None = None
    clustering: tuple[str, ...] = ()
    primary_key: tuple[str, ...] = ()
    require_partition_filter: bool = False
    description: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    expiration: timedelta | None = None
    evolution: Evolution = "none"

    def __post_init__(self) -> None:
        if self.evolution not in ("none", "add"):
            raise ConfigurationError(f"evolution={self.evolution!r}: it is 'none' or 'add'.")
        layout: object = self.partitioning
        if not isinstance(layout, (TimePartitioning, RangePartitioning, NoneType)):
            raise ConfigurationError(
                f"partitioning={layout!r}: it is a TimePartitioning or a RangePartitioning."
            )
        for name, limit in (("clustering", MAX_CLUSTERING), ("primary_key", MAX_PRIMARY_KEY)):
            if isinstance(columns := getattr(self, name), str):
                raise ConfigurationError(f"{name}={columns!r}: write a tuple of column names.")
            object.__setattr__(self, name, tuple(columns))
            if len(getattr(self, name)) > limit:
                raise ConfigurationError(f"{name} takes {limit} columns at most.")

    def apply(self, table: bigquery.Table) -> None:
        """Lay out a table that is about to be created."""
        if isinstance(self.partitioning, TimePartitioning):
            table.time_partitioning = self.partitioning.to_api()
        elif isinstance(self.partitioning, RangePartitioning):
            table.range_partitioning = self.partitioning.to_api()
        if self.require_partition_filter:
            table.require_partition_filter = True
        if self.clustering:
            table.clustering_fields = list(self.clustering)
        if self.primary_key:
            key = PrimaryKey(list(self.primary_key))
            table.table_constraints = TableConstraints(primary_key=key, foreign_keys=None)
        table.description = self.description
        table.labels = dict(self.labels)

    def differences(self, table: bigquery.Table) -> list[str]:
        """What an existing table has otherwise, a sentence each; empty when all is as asked."""
        constraints = table.table_constraints
        key = constraints.primary_key if constraints else None
        actual = {
            "partitioned": partitioning_of(table),
            "clustered by": tuple(table.clustering_fields or ()),
            "primary key": tuple(key.columns) if key else (),
        }
        wanted = {
            "partitioned": self.partitioning,
            "clustered by": self.clustering,
            "primary key": self.primary_key,
        }
        return [
            f"{what}: asked for {_text(wanted[what])}, the table has {_text(actual[what])}"
            for what in wanted
            if wanted[what] and not _same(wanted[what], actual[what])
        ]


def partitioning_of(table: bigquery.Table) -> TimePartitioning | RangePartitioning | None:
    """How an existing table is partitioned, without the expiration of its partitions."""
    if (by_time := table.time_partitioning) is not None:
        names: dict[str, Granularity] = {
            "HOUR": "hour",
            "DAY": "day",
            "MONTH": "month",
            "YEAR": "year",
        }
        return TimePartitioning(by_time.field, names[by_time.type_ or "DAY"])
    if (by_range := table.range_partitioning) is not None and by_range.field:
        bounds: Any = by_range.range_  # its numbers come as text
        return RangePartitioning(
            by_range.field, int(bounds.start), int(bounds.end), int(bounds.interval)
        )
    return None


def _same(wanted: object, actual: object) -> bool:
    if isinstance(wanted, TimePartitioning) and isinstance(actual, TimePartitioning):
        return (_fold(wanted.column), wanted.granularity) == (
            _fold(actual.column),
            actual.granularity,
        )
    if isinstance(wanted, tuple) and isinstance(actual, tuple):
        return [_fold(name) for name in wanted] == [_fold(name) for name in actual]
    return wanted == actual


def _fold(name: object) -> str | None:
    """Column names differ by more than case."""
    return name.casefold() if isinstance(name, str) else None


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return "nothing" if value is None else str(value)
