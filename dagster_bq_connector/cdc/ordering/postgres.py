"""The order of PostgreSQL's write-ahead log, as Debezium tells it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dagster_bq_connector.cdc.event import Events, FailedEvent, Indices, Mask, name_of
from dagster_bq_connector.cdc.ordering.profile import (
    OrderingProfile,
    State,
    Unsigned,
    decimals,
    failures,
    field_values,
    sequence_texts,
    unsigned,
)
from dagster_bq_connector.errors import OrderBreakError

_compute: Any = pc  # its stubs know a part of what it takes
_SEQUENCE, _LSN = "source.sequence", "source.lsn"
_SNAPSHOT, _COMMIT = "source.snapshot", "source.ts_ms"
_ORDER = "transaction.total_order"
_PAIR = r'^\s*\[\s*(?:null|"(?P<committed>[^"\s]+)")\s*,\s*"(?P<current>[^"\s]+)"\s*\]\s*$'
_PLAIN = re.compile(
    r'\[(?:null|"(?P<committed>0|[1-9][0-9]{0,18})"),"(?P<current>0|[1-9][0-9]{0,18})"\]'
)
_SIGNED = r"^-[1-9][0-9]{0,18}$"
_LOWEST = "9223372036854775808"  # without its sign
_RECORD = ("lsn", "commit_ms", "break_ms")
# Transactions that commit at once may be stamped in another order than they are logged in.
_SKEW_MS = 1_000


@dataclass(frozen=True)
class PostgresLsn(OrderingProfile):
    """Two sections: the LSN of the last commit before the change, and the change's own.

    They come from `source.sequence`; `source.lsn`, where it is given, must be the second. Rows of
    a snapshot have no commit before them, so they come first. Times are never used for order.

    A failover must keep the replication slot. A server whose log is another one is noticed when
    its LSNs are lower while its commits are later. A new slot of the same server is not: its LSNs
    go on, and what was committed between the two slots is missing; only Debezium can tell.

    Attributes:
        transaction_order: Add a third section, the change's place in its transaction, which tells
            changes of one LSN apart: the delete and the create of a changed key have the same one.
            It needs the connector's `provide.transaction.metadata=true`. Without it the one that
            arrives later counts as the later one. Once a table has it, it must keep it.
    """

    transaction_order: bool = False

    @property
    def coordinates(self) -> Sequence[str]:
        """The source's sequence, LSN, snapshot marker and commit time."""
        return [_SEQUENCE, _LSN, _SNAPSHOT, _COMMIT] + [_ORDER] * self.transaction_order

    def sequences(self, changes: pa.RecordBatch) -> tuple[pa.Array[Any], list[FailedEvent]]:
        """See `OrderingProfile`."""
        pair = _Pair.of(changes)
        failed = failures(
            changes,
            ~pair.right,
            _SEQUENCE,
            field_values(changes, _SEQUENCE),
            "is not an array of two LSNs as text, the first of them or null: the change has no "
            "place in the order. It must come from Debezium's PostgreSQL connector, 1.5 or later",
        )
        lsn = field_values(changes, _LSN)
        values, readable = _lsns(lsn)
        given = lsn.is_valid().to_numpy(zero_copy_only=False)
        differs = pair.right & given & (~readable | (values != pair.current))
        reason = f"is not the second LSN of {_SEQUENCE}: the message was altered on its way"
        failed += failures(changes, differs, _LSN, lsn, reason)
        right, sections = pair.right & ~differs, [pair.committed, pair.current]
        if self.transaction_order:
            order, ordered, more = self._orders(changes, right)
            failed, right, sections = failed + more, right & ordered, [*sections, order]
        return sequence_texts(sections, right), sorted(failed, key=lambda event: event.message)

    def _orders(
        self, changes: pa.RecordBatch, right: Mask
    ) -> tuple[Unsigned, Mask, list[FailedEvent]]:
        texts = field_values(changes, _ORDER)
        order, ordered = unsigned(texts)
        # Rows of a snapshot belong to no transaction of the source.
        absent = texts.is_null().to_numpy(zero_copy_only=False)
        ordered |= absent & _snapshots(changes)
        reason = (
            "is no place in a transaction: set provide.transaction.metadata=true on the "
            "connector, or leave transaction_order off"
        )
        return order, ordered, failures(changes, right & ~ordered, _ORDER, texts, reason)

    def advance(self, state: State, events: Events) -> State:
        """See `OrderingProfile`. The state is the highest last-commit LSN and commit time.

        What was committed before a break that was acknowledged belongs to the history before it:
        it comes again, since the plan with the break was not committed, and is no break.
        """
        changes = events.changes
        pair, (times, timed) = _Pair.of(changes), unsigned(field_values(changes, _COMMIT))
        current = times >= np.uint64(state.get("since_ms", 0))
        chosen = np.flatnonzero(pair.right & timed & current & ~_snapshots(changes))
        if not len(chosen):
            return state
        lsns = np.concatenate([[np.uint64(state.get("lsn", 0))], pair.committed[chosen]])
        times = np.concatenate([[np.uint64(state.get("commit_ms", 0))], times[chosen]])
        highest = np.maximum.accumulate(lsns)
        in_order = np.append(True, lsns[1:] >= highest[:-1])
        latest = np.maximum.accumulate(np.where(in_order, times, np.uint64(0)))
        broken = ~in_order[1:] & (times[1:] > latest[:-1] + np.uint64(_SKEW_MS))
        if broken.any():
            first = int(np.flatnonzero(broken)[0])
            message = int(changes.column("message")[int(chosen[first])].as_py())
            place = name_of(events.messages, message)
            raise _lost(place, lsns[first + 1], times[first + 1], highest[first], latest[first])
        return {**state, "lsn": int(highest[-1]), "commit_ms": int(latest[-1])}

    def acknowledge(self, state: State) -> State:
        """See `OrderingProfile`: the record of highest LSNs starts anew, with the break."""
        kept = {name: value for name, value in state.items() if name not in _RECORD}
        return {**kept, "since_ms": state["break_ms"]} if "break_ms" in state else kept


@dataclass(frozen=True)
class _Pair:
    """The two LSNs of each change, and whether they could be read."""

    committed: Unsigned
    current: Unsigned
    right: Mask

    @classmethod
    def of(cls, changes: pa.RecordBatch) -> _Pair:
        texts = field_values(changes, _SEQUENCE).cast(pa.string())
        if alike := _alike(texts):
            return cls(*alike, np.ones(len(texts), np.bool_))
        found = _compute.extract_regex(texts, _PAIR)
        matched = found.is_valid().to_numpy(zero_copy_only=False)
        first, second = found.flatten()
        absent = _compute.fill_null(_compute.equal(first, ""), True).to_numpy(zero_copy_only=False)
        committed, first_right = _lsns(first)
        current, second_right = _lsns(second)
        return cls(committed, current, matched & (first_right | absent) & second_right)


def _alike(texts: Any) -> tuple[Unsigned, Unsigned] | None:
    """The pairs of texts whose digits stand in the same places, as of most batches they do.

    None when they do not, or when the numbers are not plain ones of up to 19 digits, which all fit.
    """
    if not len(texts) or texts.null_count:
        return None
    first = _PLAIN.fullmatch(texts[0].as_py())
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(texts) + 1, texts.offset * 4)
    if first is None or not (np.diff(bounds) == first.end()).all():
        return None
    octets = np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]].reshape(len(texts), -1)
    columns = np.ascontiguousarray(octets.T)
    digits = np.zeros(first.end(), np.bool_)
    found: list[Unsigned] = []
    for start, stop in (first.span("committed"), first.span("current")):
        digits[start:stop] = True
        found.append(decimals(columns[start:stop], len(texts)))
        if stop - start > 1 and (columns[start] == ord("0")).any():
            return None
    numerals = columns[digits] - np.uint8(ord("0"))
    same = columns[~digits] == columns[~digits, :1]
    return (found[0], found[1]) if (numerals < 10).all() and same.all() else None


def _lsns(texts: Any) -> tuple[Unsigned, Mask]:
    """LSNs as numbers, and where they are right. Above 2**63 they may be printed as negative."""
    if pa.types.is_integer(texts.type):
        signed = _compute.fill_null(texts, 0).to_numpy()
        return signed.view(np.uint64), texts.is_valid().to_numpy(zero_copy_only=False)
    values, right = unsigned(texts)
    if right.all():
        return values, right
    signed = _compute.fill_null(_compute.match_substring_regex(texts, _SIGNED), False)
    rows: Indices = np.flatnonzero(signed.to_numpy(zero_copy_only=False))
    if len(rows):
        magnitudes = _compute.utf8_ltrim(texts.take(pa.array(rows)), characters="-")
        sizes, _ = unsigned(magnitudes)
        fits = sizes <= np.uint64(_LOWEST)
        values, right = values.copy(), right.copy()
        values[rows] = np.where(fits, np.uint64(0) - sizes, np.uint64(0))
        right[rows] = fits
    return values, right


def _snapshots(changes: pa.RecordBatch) -> Mask:
    """Which changes are rows of a snapshot: `false` and null are streamed, all else is not."""
    marks = _compute.fill_null(field_values(changes, _SNAPSHOT).cast(pa.string()), "false")
    return _compute.not_equal(marks, "false").to_numpy(zero_copy_only=False)


def _lost(place: str, lsn: Any, time: Any, highest: Any, latest: Any) -> OrderBreakError:
    return OrderBreakError(
        f"{place}: it was committed after LSN {int(lsn)}, which is lower than {int(highest)}, the "
        f"highest seen, but {int(time) - int(latest)} ms later than any change before it. A "
        "redelivery cannot explain that: the replication slot was made anew, or the connector "
        "reads another server. What the tables hold would win over what comes now. Take a new "
        "snapshot into new tables, or make the tables anew, then acknowledge the break.",
        {"break_ms": int(time)},
    )
