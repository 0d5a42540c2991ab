"""Which rows of a table are written for a batch: of each key the last change that can be.

A change that cannot is a failed event, and the one before it takes its place. A large value that a
change left as it was, and that the source therefore did not send, is that of the change before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.cdc.apply.keys import wrong_keys
from dagster_bq_connector.cdc.envelope.debezium_json import DebeziumJson
from dagster_bq_connector.cdc.event import Events, FailedEvent, Indices, Mask
from dagster_bq_connector.cdc.fold import fold

_compute: Any = pc  # its stubs know a part of what it takes


@dataclass(frozen=True)
class Survivors:
    """What is left of changes of one table.

    Attributes:
        batch: Rows in the wire types of the table's columns; of deletes the key alone.
        changes: Of each row, which change it is.
        failed: The changes that cannot be applied, and that no later one has replaced.
        missing: Columns that rows lack, and that are null in them.
    """

    batch: pa.RecordBatch
    changes: Indices
    failed: dict[int, FailedEvent]
    missing: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Shape:
    """The table that changes are read for.

    Attributes:
        name: Its address.
        source: The source's table.
        columns: Its columns.
        key: Its primary key.
        evolves: Whether it is given columns that it lacks.
        fills: Whether a value that was not sent is that of the change before: not when changes
            may be missing between the two.
    """

    name: str
    source: str
    columns: Sequence[SchemaField]
    key: Sequence[str]
    evolves: bool
    fills: bool = True


@dataclass(frozen=True)
class _Read:
    """Rows, good and bad ones; those of changes that could not be read are not among them."""

    batch: pa.RecordBatch
    kept: Indices
    failed: dict[int, FailedEvent]  # by change
    unavailable: dict[str, Mask]
    missing: dict[str, Mask]

    @property
    def bad(self) -> Indices:
        """The changes that cannot be applied as they were read."""
        gone = [self.kept[mask] for mask in self.unavailable.values()]
        return np.unique(np.concatenate([np.array(list(self.failed), np.int64), *gone]))


class Chooser:
    """Chooses among the changes of one table in a batch."""

    def __init__(
        self, format: DebeziumJson, events: Events, sequences: pa.Array[Any], shape: Shape
    ) -> None:
        """Keep what is chosen from.

        Args:
            format: Has found the events.
            events: All of the batch.
            sequences: Those of all changes; not null for the changes that are chosen from.
            shape: The table.
        """
        self._format, self._shape = format, shape
        self.events, self._sequences = events, sequences
        changes = events.changes
        self._keys, self._tables = changes.column("key"), changes.column("table")
        self._messages = changes.column("message").to_numpy()

    def choose(self, candidates: Indices) -> Survivors:
        """Choose among changes of the table, which are given in the order of their arrival."""
        taken = pa.array(candidates, pa.int64())
        keys = self._keys.take(taken)
        places = fold(keys, self._tables.take(taken), self._sequences.take(taken))
        first = self._read(candidates[places])
        bad = first.bad
        if not len(bad):
            return self._survivors(first, np.arange(len(first.kept)), {})
        wanted = self._keys.take(pa.array(bad, pa.int64()))
        again = _compute.is_in(keys, value_set=wanted).to_numpy(zero_copy_only=False)
        second = self._last_good(candidates[again])
        good = np.flatnonzero(~np.isin(first.kept, bad))
        return _together(self._survivors(first, good, {}), second)

    def but_for(self, refused: Sequence[int], candidates: Indices) -> Survivors:
        """Choose anew for the keys of changes that BigQuery has refused, without these."""
        wanted = self._keys.take(pa.array(refused, pa.int64()))
        keys = self._keys.take(pa.array(candidates, pa.int64()))
        same = _compute.is_in(keys, value_set=wanted).to_numpy(zero_copy_only=False)
        return self.choose(candidates[same & ~np.isin(candidates, refused)])

    def failed(self, change: int, reason: str, column: str | None = None) -> FailedEvent:
        """The failed event of a change."""
        return FailedEvent(int(self._messages[change]), column, reason)

    def _survivors(self, read: _Read, places: Indices, failed: dict[int, FailedEvent]) -> Survivors:
        """The rows at some places of those that were read."""
        whole = len(places) == len(read.kept)
        batch = read.batch if whole else read.batch.take(pa.array(places, pa.int64()))
        missing = frozenset(name for name, mask in read.missing.items() if mask[places].any())
        return Survivors(batch, read.kept[places], failed, missing)

    def _read(self, chosen: Indices) -> _Read:
        """Read the rows of changes, and tell which of them the table cannot take."""
        rows = self._format.rows(self.events, chosen, self._shape.columns)
        of_message = np.searchsorted(self._messages, [event.message for event in rows.failed])
        failed = dict(zip(of_message.tolist(), rows.failed, strict=True))
        missing, unavailable = dict(rows.missing), dict(rows.unavailable)
        read = _Read(rows.batch, rows.kept, failed, unavailable, missing)
        self._fail_wrong_keys(read)
        self._fail_missing(read)
        if rows.unknown:
            self._fail_unknown(read, chosen, list(rows.unknown))
        return read

    def _fail(self, read: _Read, rows: Mask, reason: str, column: str) -> None:
        for change in read.kept[rows].tolist():
            read.failed.setdefault(change, self.failed(change, reason, column))

    def _fail_wrong_keys(self, read: _Read) -> None:
        shape, keys = self._shape, self._keys.take(pa.array(read.kept, pa.int64()))
        for row, names in wrong_keys(keys, shape.key).items():
            change = int(read.kept[row])
            reason = (
                f"a wrong key: that of the message has {_listed(names)}, and the primary key of "
                f"{shape.name} is {_listed(shape.key)}. Set message.key.columns on the connector, "
                "or CdcTable(primary_key=...) for a new table"
            )
            read.failed.setdefault(change, self.failed(change, reason))

    def _fail_missing(self, read: _Read) -> None:
        key = {name.casefold() for name in self._shape.key}
        for number, column in enumerate(self._shape.columns):
            name, in_key = column.name, column.name.casefold() in key
            if not in_key and column.mode != "REQUIRED":
                continue
            absent = read.missing.get(name)
            what = "belongs to the primary key" if in_key else "is REQUIRED"
            if absent is not None:
                reason = f"the row has no column {name!r}, which {what} of {self._shape.name}"
                self._fail(read, absent, f"{reason}: send it, or give the table another", name)
            values = read.batch.column(number)
            if in_key and values.null_count:
                empty = values.is_null().to_numpy(zero_copy_only=False)
                if name in read.unavailable:
                    empty &= ~read.unavailable[name]
                self._fail(read, empty, f"null in {name!r}, which {what}: give it a value", name)

    def _fail_unknown(self, read: _Read, chosen: Indices, names: Sequence[str]) -> None:
        """Fail all rows that have columns which the table lacks.

        Rows are read once more with these columns: it is not known before which rows have them.
        """
        probes = [SchemaField(name, "STRING") for name in names]
        columns = [*self._shape.columns, *probes]
        found = self._format.rows(self.events, chosen, columns)
        changes = self.events.changes.column("operation").take(pa.array(found.kept, pa.int64()))
        rows = _compute.not_equal(changes.cast(pa.string()), "d").to_numpy(zero_copy_only=False)
        remedy = "add it to the table, or set CdcTable(evolution='add')"
        if self._shape.evolves:
            remedy = (
                "the message does not say its type, so add the column to the table, or set "
                "value.converter.schemas.enable=true on the connector"
            )
        for name in names:
            reason = f"{self._shape.name} has no column {name!r}: {remedy}"
            there = rows if (gone := found.missing.get(name)) is None else rows & ~gone
            has = set(found.kept[there].tolist())
            misfits = [event.message for event in found.failed if event.column == name]
            has |= set(np.searchsorted(self._messages, misfits).tolist())
            for change in sorted(has):
                read.failed.setdefault(change, self.failed(change, reason, name))

    def _last_good(self, changes: Indices) -> Survivors:
        """The last change of each key that can be applied; those after it have failed."""
        read, taken = self._read(changes), pa.array(changes, pa.int64())
        codes = self._keys.take(taken).dictionary_encode().indices.to_numpy()
        ranks = _compute.rank(self._sequences.take(taken), tiebreaker="dense").to_numpy()
        order = np.lexsort((ranks, codes))  # stable: of equals the later arrival comes last
        codes, changes = codes[order], changes[order]
        begins = np.flatnonzero(np.append(True, codes[1:] != codes[:-1]))
        begin = begins[np.cumsum(np.append(True, codes[1:] != codes[:-1])) - 1]
        row_of = np.full(len(changes), -1, np.int64)
        where = {change: row for row, change in enumerate(read.kept.tolist())}
        row_of[:] = [where.get(change, -1) for change in changes.tolist()]
        read = self._fill(read, changes, row_of, begin)
        good = (row_of >= 0) & ~np.isin(changes, list(read.failed))
        last = np.maximum.reduceat(np.where(good, np.arange(len(changes)), -1), begins)
        last_of = last[np.searchsorted(begins, begin)]
        late = np.flatnonzero(~good & (np.arange(len(changes)) > last_of))
        failed = {change: read.failed[change] for change in changes[late].tolist()}
        return self._survivors(read, row_of[np.sort(last[last >= 0])], failed)

    def _fill(self, read: _Read, changes: Indices, row_of: Indices, begin: Indices) -> _Read:
        """Give values that were not sent those of the last change before that has them.

        Not over a delete, nor over a change that could not be read: it may have changed the value.

        Args:
            read: The rows.
            changes: By key, and in the order of their sequences.
            row_of: The row of each; -1 for those that could not be read.
            begin: Where the changes of each one's key begin.
        """
        if not read.unavailable:
            return read
        numbers = np.arange(len(changes))
        taken = self.events.changes.column("operation").take(pa.array(changes, pa.int64()))
        has_row = _compute.not_equal(taken.cast(pa.string()), "d").to_numpy(zero_copy_only=False)
        has_row &= row_of >= 0
        arrays, names = list(read.batch.columns), read.batch.schema.names
        for name, mask in read.unavailable.items():
            gone = has_row & mask[row_of]
            absent = read.missing.get(name)
            has = has_row if absent is None else has_row & ~absent[row_of]
            known = np.maximum.accumulate(np.where(gone, -1, numbers))
            found = gone & (known >= begin) & has[known] & self._shape.fills
            source = np.arange(len(read.kept))
            source[row_of[found]] = row_of[known[found]]
            column = names.index(name)
            arrays[column] = arrays[column].take(pa.array(source, pa.int64()))
            self._fail_unavailable(read, changes[gone & ~found], name)
        return replace(read, batch=pa.RecordBatch.from_arrays(arrays, schema=read.batch.schema))

    def _fail_unavailable(self, read: _Read, changes: Indices, name: str) -> None:
        reason = (
            "the change left this large value as it was, so the source did not send it, and no "
            f"change before it in the batch has it: ALTER TABLE {self._shape.source} REPLICA "
            "IDENTITY FULL at the source, so that every change has the whole row"
        )
        for change in changes.tolist():
            read.failed.setdefault(change, self.failed(change, reason, name))


def _together(one: Survivors, other: Survivors) -> Survivors:
    batch = pa.Table.from_batches([one.batch, other.batch]).combine_chunks()
    batches = batch.to_batches()
    return Survivors(
        batches[0] if batches else one.batch,
        np.concatenate([one.changes, other.changes]),
        one.failed | other.failed,
        one.missing | other.missing,
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
