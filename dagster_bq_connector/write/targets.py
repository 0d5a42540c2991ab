"""Which tables and partitions the rows of one write go to, each by a job of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias, TypeVar

import pyarrow as pa
from google.cloud.bigquery import EncryptionConfiguration, SchemaField

from dagster_bq_connector.errors import PartitionError, SchemaError, UnsupportedError
from dagster_bq_connector.schema.types import type_name, wire_field
from dagster_bq_connector.table.admin import Draft, EnsuredTable
from dagster_bq_connector.table.membership import Membership
from dagster_bq_connector.table.options import TableOptions, TimePartitioning
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.table.row_slice import (
    BoundSlice,
    ExpressionType,
    RowSlice,
    every_row,
)
from dagster_bq_connector.table.slice import (
    INGESTION_TIME,
    TableSlice,
    TimeFilter,
    find_column,
    window_of,
)
from dagster_bq_connector.write.plain import is_loadable
from dagster_bq_connector.write.result import Operation

# A batch and the position of its first row, to (id of a target, rows) pairs.
Split: TypeAlias = Callable[[pa.RecordBatch, int], Iterable[tuple[str, pa.RecordBatch]]]
FindDraft: TypeAlias = Callable[[TableRef, TableOptions | None], Draft]
# A table and an expression over its columns, to the type of that.
FindType: TypeAlias = Callable[[EnsuredTable, str], str]
Built = TypeVar("Built")


@dataclass(frozen=True)
class Target:
    """A table or partition that one job writes.

    Attributes:
        id: What `Split` calls it.
        ref: The destination of the job.
        key: The partition key that it stands for; empty when the write has no keys.
        rows: SQL of the rows that a transaction replaces. Empty when only a job's destination can
            say it: of a load job, and of a query into a partition by the time of ingestion.
        encryption: The customer's key that encrypts the table: rows on their way are, too.
        location: Where its dataset is, and the jobs on it run.
        unchanged: Seconds since the table was last changed; None when it was made for this write.
    """

    id: str
    ref: TableRef
    key: str = ""
    rows: str = ""
    encryption: EncryptionConfiguration | None = None
    location: str | None = None
    unchanged: float | None = None


@dataclass(frozen=True)
class Targets:
    """The targets of one write.

    Attributes:
        table: The table; of a sharded layout the prefix of its tables.
        columns: The columns that all targets have.
        targets: One or more destinations.
        split: Divides rows among them, and refuses those that belong to none.
        staged: Whether the rows go to a staging table first, and from there by one transaction;
            otherwise a load job puts them into the target.
        slice: What is written of the one target, when that is a slice of its rows.
        counts: Rows by partition key of the slice, counted by `split`.
        others: The ids that the targets would have if the table had other columns.
    """

    table: TableRef
    columns: Sequence[SchemaField]
    targets: Sequence[Target]
    split: Split
    staged: bool = False
    slice: BoundSlice | None = None
    counts: Counter[str] = field(default_factory=Counter[str])
    others: Sequence[str] = ()

    @property
    def location(self) -> str | None:
        """Where the jobs run."""
        return self.targets[0].location

    def __str__(self) -> str:
        """What is written, so that two writes to the same place can be told from others."""
        slice_ = self.slice.slice.parts if self.slice else ()
        keys = [key for key, _ in slice_] or [each.key for each in self.targets if each.key]
        refs = [target.ref.at(None) if keys else target.ref for target in self.targets]
        places = ", ".join(map(str, dict.fromkeys(refs)))
        return f"{places} {keys}" if keys else places

    def check(self, batch: pa.RecordBatch, first: int) -> None:
        """Refuse rows that belong to no target, and count the others."""
        for _ in self.split(batch, first):
            pass


def of_table(
    ref: TableRef, find: FindDraft, options: TableOptions | None, streamed: bool = False
) -> Targets:
    """One table, or one partition of it, takes all rows.

    Args:
        ref: The table, with or without a partition.
        find: Finds it, or what it will be.
        options: Its layout.
        streamed: Whether the rows come by streams, so that there is always a staging table.
    """
    draft = find(ref, options)
    if not ref.partition:
        return _made(draft, partial(_of_whole, ref, streamed))
    layout = draft.table.partitioning
    names = [layout.column] if layout and layout.column else []
    return _made(draft, partial(_of_partition, ref, ref.partition, streamed), names)


def _of_whole(ref: TableRef, streamed: bool, table: EnsuredTable) -> Targets:
    rows = every_row(table.partitioning) or "TRUE"
    target = _target("", ref, table, rows=rows)
    staged = streamed or not is_loadable(table.columns)
    return Targets(ref, table.columns, [target], lambda batch, _: [("", batch)], staged)


def of_slice(
    slice_: TableSlice, find: FindDraft, options: TableOptions | None, streamed: bool = False
) -> Targets:
    """The partitions of a slice, or the tables of a sharded layout.

    Missing tables are created when nothing else is wrong.

    Args:
        slice_: The slice.
        find: Finds its tables, or what they will be.
        options: Their layout.
        streamed: Whether the rows come by streams, so that there is always a staging table.

    Raises:
        PartitionError: The windows are no partitions of the table.
    """
    layout = slice_.options.partitioning if slice_.options else None
    options = options or slice_.options or TableOptions()
    if layout and not options.partitioning:
        options = replace(options, partitioning=layout)
    if slice_.sharded:
        return _of_shards(slice_, find, options, streamed)
    names = [slice_.column] if slice_.column else []
    return _made(find(slice_.table, options), partial(_of_partitions, slice_, streamed), names)


def _of_partitions(slice_: TableSlice, streamed: bool, table: EnsuredTable) -> Targets:
    ids = slice_.partitions(_column_type(slice_, table.columns))
    staged = streamed or not is_loadable(table.columns)
    if staged and slice_.column:
        return replace(_of_rows(_as_rows(slice_), table, _no_expressions), others=tuple(ids))
    targets = [_target(id_, slice_.address(id_), table, key) for id_, key in ids.items()]
    others = [""] if slice_.column else []
    return Targets(slice_.table, table.columns, targets, slice_.split, staged, others=others)


def of_rows(
    slice_: RowSlice,
    find: FindDraft,
    options: TableOptions | None,
    find_type: FindType,
    operation: Operation,
) -> Targets:
    """Some rows of one table. It is created when it is missing, and nothing else is wrong.

    Raises:
        PartitionError: A key does not fit its column, or an expression does not fit the table.
        UnsupportedError: The filters are windows of the time of ingestion.
    """
    filters = [filter_ for _, filters in slice_.parts for filter_ in filters]
    if any(filter_.column == INGESTION_TIME for filter_ in filters):
        raise UnsupportedError(
            f"{slice_.table}: rows are given their time of ingestion by BigQuery, so no filter can "
            "tell where they go: write whole partitions, or filter by a column."
        )
    draft = find(slice_.table, options or slice_.options)
    targets = _made(
        draft,
        lambda table: _of_rows(slice_, table, partial(find_type, table)),
        [filter_.column for filter_ in filters],
    )
    if operation == "append" and not _needs_sql(targets):
        return replace(targets, staged=False)
    return targets


def of_files(
    table: TableRef | TableSlice, find: FindDraft, options: TableOptions | None
) -> Targets:
    """The one place of files that exist: a table, or one partition of it.

    Raises:
        UnsupportedError: Nothing says which file belongs to which of several partitions.
        PartitionError: The slice is no partition of the table.
    """
    if isinstance(table, TableRef):
        found = find(table, options).make()
        target = _target("", table, found)
        return Targets(table, found.columns, [target], lambda batch, _: [("", batch)])
    if len(table.windows) != 1:
        raise UnsupportedError(
            f"{len(table.windows)} partitions of {table.table} were given, and nothing says which "
            "files belong to which: load the files of each partition by a call of its own."
        )
    sliced = of_slice(table, find, options)
    if not sliced.slice:
        return replace(sliced, staged=False, others=())
    # Columns that Parquet cannot carry come well from other formats.
    [(id_, key)] = table.partitions(_column_type(table, sliced.columns)).items()
    target = replace(sliced.targets[0], id=id_, ref=table.address(id_), key=key, rows="")
    return Targets(table.table, sliced.columns, [target], table.split)


def of_stream(slice_: TableSlice | RowSlice, draft: Draft) -> tuple[EnsuredTable, Targets]:
    """The rows of a slice that are streamed into its table, where BigQuery finds their partition.

    `split` refuses those of others, and counts the rows. The table is created when it is missing,
    and nothing else is wrong.

    Raises:
        PartitionError: A key does not fit its column.
        UnsupportedError: No column says where a row belongs.
    """

    def refuse(expression: str) -> str:
        raise UnsupportedError(
            f"{expression!r} is no column of {slice_.table}, so rows cannot be checked before they "
            "are streamed: write them with FileLoadsWriter."
        )

    rows = slice_ if isinstance(slice_, RowSlice) else _as_rows(slice_)
    names = [filter_.column for _, filters in rows.parts for filter_ in filters]
    return _made(draft, lambda table: (table, _of_rows(rows, table, refuse)), names)


def check_streamable(slice_: TableSlice | RowSlice) -> None:
    """Refuse, before a table is made, what a stream cannot lead to.

    Raises:
        UnsupportedError: The slice is several tables, or partitions by time of ingestion.
    """
    if isinstance(slice_, TableSlice) and (slice_.sharded or slice_.column is None):
        raise UnsupportedError(
            f"BigQuery chooses the partition of a row that is streamed to {slice_.table}, and a "
            "stream leads to one table: write the partitions with FileLoadsWriter."
        )


def _target(id_: str, ref: TableRef, table: EnsuredTable, key: str = "", rows: str = "") -> Target:
    """A target in a table that exists."""
    return Target(id_, ref, key, rows, table.encryption, table.location, table.unchanged)


def _needs_sql(targets: Targets) -> bool:
    """Whether rows can be checked, or made what they are, by BigQuery alone."""
    expressions = targets.slice.expressions if targets.slice else ()
    return bool(expressions) or not is_loadable(targets.columns)


def _of_rows(slice_: RowSlice, table: EnsuredTable, expression_type: ExpressionType) -> Targets:
    bound = slice_.bind(table.columns, table.partitioning, expression_type)
    target = _target("", slice_.table, table, rows=bound.sql())
    counts: Counter[str] = Counter(dict.fromkeys((key for key, _ in slice_.parts), 0))
    membership = None if bound.expressions else Membership(bound)

    def split(batch: pa.RecordBatch, first: int) -> Iterator[tuple[str, pa.RecordBatch]]:
        if membership is not None:
            counts.update(membership.count(batch, first))
        yield "", batch

    return Targets(slice_.table, table.columns, [target], split, True, bound, counts)


def _of_partition(ref: TableRef, partition: str, streamed: bool, table: EnsuredTable) -> Targets:
    """One partition by its address. Its rows are checked where its id is a time of a column."""
    layout, staged = table.partitioning, streamed or not is_loadable(table.columns)
    by_time = layout if isinstance(layout, TimePartitioning) and layout.column else None
    window = window_of(partition, by_time.granularity) if by_time else None
    if by_time is None or window is None:
        target = _target("", ref, table)
        return Targets(ref, table.columns, [target], lambda batch, _: [("", batch)], staged)
    windows = ((partition, window),)
    slice_ = TableSlice(ref.at(None), by_time.column, by_time.granularity, windows)
    kind = type_name(_partition_column(slice_, table.columns))
    target = _target("", ref, table, rows=slice_.filter.sql(kind))

    def split(batch: pa.RecordBatch, first: int) -> Iterator[tuple[str, pa.RecordBatch]]:
        for _, rows in slice_.split(batch, first):
            yield "", rows

    return Targets(ref, table.columns, [target], split, staged)


def _made(draft: Draft, build: Callable[[EnsuredTable], Built], names: Iterable[str] = ()) -> Built:
    """What is built of a table, which is made or changed when that and the data are right.

    Args:
        draft: The table.
        build: Refuses what cannot be written to it.
        names: The columns that decide where a row belongs, and expressions.
    """
    _refuse_lacking(draft, names)
    built = build(draft.table)
    return build(draft.make()) if draft.given else built


def _refuse_lacking(draft: Draft, names: Iterable[str]) -> None:
    """No table is made or changed for data that cannot say where they belong."""
    for name in dict.fromkeys(names):
        known = find_column(draft.table.columns, name)
        if draft.given and known and not find_column(draft.given, name):
            raise PartitionError(
                f"The data lacks the column {name!r}, which decides the partition of a row of "
                f"{draft.table.ref}."
            )


def _of_shards(
    slice_: TableSlice, find: FindDraft, options: TableOptions, streamed: bool
) -> Targets:
    ids = slice_.partitions(None)
    drafts = [find(slice_.address(id_), options) for id_ in ids]
    columns = _same_columns([draft.table for draft in drafts])
    if slice_.column:
        _partition_column(slice_, columns)
        for draft in drafts:
            _refuse_lacking(draft, [slice_.column])
    tables = [draft.make() for draft in drafts]
    columns = _same_columns(tables)
    targets = [
        _target(id_, slice_.address(id_), table, key, every_row(table.partitioning) or "TRUE")
        for (id_, key), table in zip(ids.items(), tables, strict=True)
    ]
    staged = streamed or not is_loadable(columns)
    return Targets(slice_.table, columns, targets, slice_.split, staged)


def _as_rows(slice_: TableSlice) -> RowSlice:
    column = slice_.column
    assert column is not None  # by the time of ingestion no filter tells where rows go
    return RowSlice(
        slice_.table,
        tuple((key, (TimeFilter(column, (window,), (key,)),)) for key, window in slice_.windows),
    )


def _no_expressions(expression: str) -> str:
    raise PartitionError(f"{expression!r} is no column.")


def _same_columns(tables: Sequence[EnsuredTable]) -> Sequence[SchemaField]:
    first = tables[0]
    for table in tables[1:]:
        if _shape(table.columns) != _shape(first.columns):
            raise SchemaError(
                f"{table.ref} and {first.ref} have not the same columns, so one write cannot fill "
                "both: write them one by one."
            )
    return first.columns


def _shape(columns: Sequence[SchemaField]) -> dict[str, object]:
    return {c.name.casefold(): (type_name(c), c.mode, _shape(c.fields)) for c in columns}


def _column_type(slice_: TableSlice, columns: Sequence[SchemaField]) -> pa.DataType | None:
    return wire_field(_partition_column(slice_, columns)).type if slice_.column else None


def _partition_column(slice_: TableSlice, columns: Sequence[SchemaField]) -> SchemaField:
    column = find_column(columns, slice_.column or "")
    if column is None:
        raise PartitionError(
            f"{slice_.table} has no column {slice_.column!r} to be partitioned by."
        )
    if column.mode == "REPEATED" or type_name(column) not in ("DATE", "DATETIME", "TIMESTAMP"):
        what = "an array" if column.mode == "REPEATED" else type_name(column)
        raise PartitionError(
            f"Column {slice_.column!r} of {slice_.table} is {what}, and a table is partitioned by "
            "a DATE, DATETIME or TIMESTAMP: cast it, or name another column."
        )
    return column
