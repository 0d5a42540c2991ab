"""`TableSlice`: the partitions of a table that one operation reads or replaces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.cloud import bigquery

from dagster_bq_connector.errors import PartitionError
from dagster_bq_connector.schema.types import wire_field
from dagster_bq_connector.table.literals import key_value, literal, quoted
from dagster_bq_connector.table.options import (
    Granularity,
    TableOptions,
    TimePartitioning,
    partitioning_of,
)
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.table.window import Window, comes_twice, merged_windows

INGESTION_TIME = "_PARTITIONTIME"
_ID_LENGTH: dict[Granularity, int] = {"hour": 10, "day": 8, "month": 6, "year": 4}
_UTC = ZoneInfo("UTC")
_HOUR = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class TimeFilter:
    """Rows whose `column` lies in one of `windows`. The literals follow the column's type.

    A TIMESTAMP column is compared with the instants at which the windows start and end, a DATETIME
    or DATE column with what the clocks of their zone show then; where they show one time twice, a
    DATETIME does not say which of two hours a row belongs to. A STRING column holds the
    partition key as it is written, and an INT64 column its digits: the key `2026-08-01` is
    20260801, and `2026-08-01-13:00` is 202608011300.

    Attributes:
        column: A column, or any SQL expression over the columns of the table.
        windows: The times.
        keys: The partition keys that the windows stand for; needed for STRING and INT64 alone.
    """

    column: str
    windows: tuple[Window, ...]
    keys: tuple[str, ...] = ()

    def sql(self, type_name: str, name: str | None = None) -> str:
        """The filter as SQL.

        Args:
            type_name: What the column is in the table read: `DATE`, `DATETIME`, `TIMESTAMP`,
                `STRING` or `INTEGER`.
            name: How the column is written in SQL; its quoted name when None.

        Raises:
            PartitionError: The column has another type, or it is a DATE and a window is no days,
                or a DATETIME and one of the two hours that the clocks show alike is lacking.
        """
        if name is None:
            name = self.column if self.column == INGESTION_TIME else quoted(self.column)
        if not self.windows:
            raise PartitionError(f"No window of time was given for column {self.column!r}.")
        if type_name in ("STRING", "INTEGER"):
            return f"{name} IN ({', '.join(map(literal, self.values(type_name)))})"
        by_hour = any(window.length <= _HOUR for window in self.windows)
        bounds = [self._bounds(w, type_name, by_hour) for w in merged_windows(self.windows)]
        return " OR ".join(
            f"({name} >= {literal(start)} AND {name} < {literal(end)})" for start, end in bounds
        )

    def bounds(self, window: Window, type_name: str) -> tuple[date, date]:
        """The ends of a window as values of a DATE, DATETIME or TIMESTAMP column.

        Raises:
            PartitionError: As `sql` does.
        """
        return self._bounds(window, type_name, window.length <= _HOUR)

    def _bounds(self, window: Window, type_name: str, by_hour: bool) -> tuple[date, date]:
        # Longer partitions than an hour have no key for the second time that the clocks show: all
        # the rows of that time are of one of them.
        strict = by_hour and type_name == "DATETIME"
        if strict and (comes_twice(window.start) or comes_twice(window.end)):
            raise PartitionError(
                f"Column {self.column!r} is a DATETIME, and {window} begins or ends at a time that "
                f"the clocks of {window.start.tzinfo} show twice when they go back, so its rows "
                "cannot be told from those of the other such time: use a TIMESTAMP column, or "
                "partitions with timezone='UTC'."
            )
        return self._end(window.start, type_name), self._end(window.end, type_name)

    def values(self, type_name: str) -> list[str | int]:
        """What a STRING or INT64 column holds in the rows of the windows."""
        if len(self.keys) != len(self.windows):
            raise PartitionError(
                f"Column {self.column!r} is {type_name}, and the partition keys of the windows are "
                "not known: filter by a DATE, DATETIME or TIMESTAMP column."
            )
        if type_name == "STRING":
            return list(self.keys)
        digits = ("".join(filter(str.isdecimal, key)) for key in self.keys)
        return [key_value(number, type_name, self.column) for number in digits]

    def _end(self, moment: datetime, type_name: str) -> date:
        if type_name == "TIMESTAMP":
            return moment.astimezone(_UTC)
        if type_name == "DATETIME":
            return moment.replace(tzinfo=None)
        if type_name == "DATE":
            if (moment.hour, moment.minute, moment.second, moment.microsecond) != (0, 0, 0, 0):
                raise PartitionError(
                    f"Column {self.column!r} is a DATE, which cannot be compared with {moment}."
                )
            return moment.date()
        raise PartitionError(
            f"Column {self.column!r} is {type_name}; a window of time needs a DATE, DATETIME, "
            "TIMESTAMP, STRING or INT64 column."
        )


@dataclass(frozen=True)
class TableSlice:
    """Whole partitions of one table, or the tables of a sharded layout.

    Attributes:
        table: The table; of a sharded layout the prefix of its tables.
        column: The column that decides where a row belongs; None when the operation alone does.
        granularity: How long one partition is.
        windows: Each partition key of the operation with the time that it stands for.
        sharded: Whether every partition is a table `<table>_<id>` of its own.
        options: The layout of a table that is created.
    """

    table: TableRef
    column: str | None
    granularity: Granularity
    windows: tuple[tuple[str, Window], ...]
    sharded: bool = False
    options: TableOptions | None = None

    @property
    def filter(self) -> TimeFilter:
        """The rows of the slice, for a table that is not sharded."""
        keys, windows = zip(*self.windows, strict=True) if self.windows else ((), ())
        return TimeFilter(self.column or INGESTION_TIME, windows, keys)

    def resolve(self, project: str) -> TableSlice:
        """The same slice with the project that its table may lack."""
        return replace(self, table=TableRef.parse(self.table, project=project))

    def address(self, partition: str) -> TableRef:
        """The destination of one partition: `t$20260801`, or `t_20260801` when sharded."""
        if self.sharded:
            return TableRef(
                self.table.dataset, f"{self.table.table}_{partition}", self.table.project
            )
        return self.table.at(partition)

    def partitions(self, kind: pa.DataType | None) -> dict[str, str]:
        """The ids of the partitions, each with the partition key that it stands for.

        Args:
            kind: The Arrow type of the column (date32, or a timestamp with or without time zone);
                None for a slice without column.

        Raises:
            PartitionError: A window is not exactly one partition: a day of Berlin is no partition
                of a table that is partitioned by the days of UTC.
        """
        zone = self._zone(kind)
        ids: dict[str, str] = {}
        for key, window in self.windows:
            start = window.start.astimezone(zone) if zone else window.start
            if not zone and self.granularity == "hour" and _changes_clocks(start):
                raise PartitionError(
                    f"{self.table} has an hour twice when the clocks of {start.tzinfo} go back, "
                    "so its hours are no partitions: use timezone='UTC', or partition by a "
                    "TIMESTAMP column."
                )
            end = window.end.astimezone(zone) if zone else window.end
            if start != _floor(start, self.granularity) or end != _following(
                start, self.granularity
            ):
                raise PartitionError(self._no_partition(key, window, zone))
            ids[_id(start.year, start.month, start.day, start.hour, self.granularity)] = key
        return ids

    def is_partitions_of(self, table: bigquery.Table) -> bool:
        """Whether the slice is whole partitions of a table as it stands.

        If so, each of them can be replaced by a load job of its own. Rows of any other table are
        replaced by the filters of a `RowSlice`.

        Args:
            table: The metadata of the table.
        """
        layout = partitioning_of(table)
        if self.sharded or not isinstance(layout, TimePartitioning):
            return False
        if (_fold(layout.column), layout.granularity) != (_fold(self.column), self.granularity):
            return False
        column = find_column(table.schema, self.column) if self.column else None
        try:
            self.partitions(wire_field(column).type if column else None)
        except PartitionError:
            return False
        return True

    def split(self, batch: pa.RecordBatch, first: int) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Divide a batch by partition.

        Args:
            batch: Rows as they travel.
            first: Position of its first row in the data, for the error.

        Yields:
            A partition's id and its rows, in their order.

        Raises:
            PartitionError: A row belongs to none of the slice's partitions, or the slice has
                several but no column that tells them apart.
        """
        if self.column is None:
            yield self._only(), batch
            return
        values = self._values(batch)
        known = self.partitions(values.type)
        starts = pc.floor_temporal(self._civil(values), unit=self.granularity)
        encoded = starts.cast(pa.timestamp("s")).dictionary_encode()
        # Not as datetimes: a column may hold years that those do not have.
        parts: Any = (pc.year, pc.month, pc.day, pc.hour)
        numbers = zip(*(part(encoded.dictionary).to_pylist() for part in parts), strict=True)
        ids = [_id(year, month, day, hour, self.granularity) for year, month, day, hour in numbers]
        codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        for code in np.unique(codes):
            partition = "__NULL__" if code < 0 else ids[code]
            rows = np.flatnonzero(codes == code)
            if partition not in known:
                row = int(rows[0])
                value = values.slice(row, 1).cast(pa.string())[0].as_py()
                self._refuse(value, first + row, partition, known)
            yield (
                partition,
                batch if len(rows) == len(codes) else batch.take(pa.array(rows, pa.int64())),
            )

    def _only(self) -> str:
        ids = list(self.partitions(None))
        if len(ids) != 1:
            raise PartitionError(
                f"{self.table} is partitioned by time of ingestion, so the rows of "
                f"{len(ids)} partitions cannot be told apart: run one partition at a time, or "
                "name a column."
            )
        return ids[0]

    def _values(self, batch: pa.RecordBatch) -> pa.Array[Any]:
        names = [name for name in batch.schema.names if name.casefold() == _fold(self.column)]
        if not names:
            raise PartitionError(
                f"The data lacks the column {self.column!r}, which partitions {self.table}."
            )
        values = batch.column(names[0])
        if not isinstance(values, (pa.Date32Array, pa.TimestampArray)):
            raise PartitionError(
                f"Column {self.column!r} has the Arrow type {values.type}; {self.table} is "
                "partitioned by a DATE, DATETIME or TIMESTAMP."
            )
        return values

    def _no_partition(self, key: str, window: Window, zone: tzinfo | None) -> str:
        whole, remedy = f"one {self.granularity}", f"use the partitions of a {self.granularity}."
        if zone:
            whole += " of UTC, by which a TIMESTAMP column is partitioned"
            remedy = (
                "partition by a DATE or DATETIME column, use timezone='UTC', or the sharded layout."
            )
        return f"Partition {key!r} of {self.table} is {window}, which is not {whole}: {remedy}"

    @property
    def _local(self) -> tzinfo | None:
        return self.windows[0][1].start.tzinfo if self.windows else None

    def _zone(self, kind: pa.DataType | None) -> tzinfo | None:
        """The zone whose calendar decides; None when the windows' own does."""
        by_instant = kind is None or (isinstance(kind, pa.TimestampType) and kind.tz is not None)
        return _UTC if by_instant and not self.sharded else None

    def _civil(self, values: pa.Array[Any]) -> pa.Array[Any]:
        """The times by the calendar that decides, without zone."""
        if isinstance(values.type, pa.TimestampType) and values.type.tz is not None:
            zone = str(self._local or _UTC) if self.sharded else "UTC"
            zoned: Any = values.cast(pa.timestamp("us", zone))
            return pc.local_timestamp(zoned)
        return values.cast(pa.timestamp("s")) if isinstance(values, pa.Date32Array) else values

    def _refuse(self, value: str | None, index: int, partition: str, known: dict[str, str]) -> None:
        raise PartitionError(
            f"Row {index} belongs to another partition: {self.column!r} is {value} "
            f"(partition {partition}), and the operation writes {', '.join(sorted(known))} of "
            f"{self.table}. Filter the rows, or run that partition."
        )


def _id(year: int, month: int, day: int, hour: int, granularity: Granularity) -> str:
    return f"{year:04d}{month:02d}{day:02d}{hour:02d}"[: _ID_LENGTH[granularity]]


def find_column(columns: Sequence[bigquery.SchemaField], name: str) -> bigquery.SchemaField | None:
    """The column of a name, whatever its case; None when there is none."""
    return next((c for c in columns if c.name.casefold() == name.casefold()), None)


def window_of(partition: str, granularity: Granularity) -> Window | None:
    """The time in UTC that the id of a partition stands for; None for one that is no time."""
    if len(partition) != _ID_LENGTH[granularity] or not partition.isdecimal():
        return None
    parts = [int(partition[:4]), *(int(partition[i : i + 2]) for i in range(4, len(partition), 2))]
    try:
        start = datetime(*(parts + [1, 1, 0][len(parts) - 1 :]), tzinfo=_UTC)
    except ValueError:
        return None
    return Window(start, _following(start, granularity))


def _fold(name: str | None) -> str | None:
    return name.casefold() if name else None


def _changes_clocks(moment: datetime) -> bool:
    """Whether the zone of a moment has summer time in its year."""
    offsets = {moment.replace(month=month, day=1).utcoffset() for month in range(1, 13)}
    return len(offsets) > 1


def _floor(moment: datetime, granularity: Granularity) -> datetime:
    moment = moment.replace(minute=0, second=0, microsecond=0)
    if granularity == "hour":
        return moment
    moment = moment.replace(hour=0)
    if granularity == "day":
        return moment
    return moment.replace(day=1) if granularity == "month" else moment.replace(day=1, month=1)


def _following(start: datetime, granularity: Granularity) -> datetime:
    """When the next partition starts, by the clocks of the moment's zone."""
    if granularity == "hour":
        return start + timedelta(hours=1)
    if granularity == "day":
        return start + timedelta(days=1)
    later = start + timedelta(days=31 if granularity == "month" else 366)
    return _floor(later, granularity)
