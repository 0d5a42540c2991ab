"""Debezium's change events as JSON: with their envelopes, with or without schemas, or unwrapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.cdc.envelope.batch import Parsed, find_events
from dagster_bq_connector.cdc.envelope.connect import Meaning, column_of
from dagster_bq_connector.cdc.envelope.envelopes import ADDED
from dagster_bq_connector.cdc.envelope.forms import (
    BinaryHandling,
    DecimalHandling,
    Forms,
    TimePrecision,
)
from dagster_bq_connector.cdc.envelope.images import parse
from dagster_bq_connector.cdc.envelope.payloads import SchemaCache
from dagster_bq_connector.cdc.envelope.values import Column, Read, read
from dagster_bq_connector.cdc.event import Events, FailedEvent, Indices, Mask, Rows
from dagster_bq_connector.cdc.ordering.profile import OrderingProfile
from dagster_bq_connector.errors import FailedRow
from dagster_bq_connector.schema.place import Place
from dagster_bq_connector.schema.types import wire_field

_compute: Any = pc  # its stubs know a part of what it takes


@dataclass(frozen=True)
class DebeziumJson:
    """Debezium's JSON.

    With schemas in the messages (`value.converter.schemas.enable=true`) each value is read by its
    meaning. Without, by the type of the table's column; what that leaves open is said here, in
    the words of the connector's own settings. Which forms each column takes: `values.py`.

    Messages may be unwrapped by ExtractNewRecordState. It must then add what the order needs
    (`add.fields`), and keep deletes (`delete.tombstone.handling.mode=rewrite`).

    Attributes:
        time_precision: The connector's `time.precision.mode`, which says the unit of an integer
            that is a time or an instant. By `adaptive`, Debezium's default, it depends on the
            precision of the source's column, so that such an integer is refused.
        decimal_handling: The connector's `decimal.handling.mode`: whether a decimal's text is the
            base64 of its bytes or its digits. Numbers (`double`) are always taken.
        binary_handling: The connector's `binary.handling.mode`: `base64` for its `bytes`, too.
    """

    time_precision: TimePrecision = "adaptive"
    decimal_handling: DecimalHandling = "precise"
    binary_handling: BinaryHandling = "base64"
    _values: SchemaCache = field(
        default_factory=SchemaCache, init=False, repr=False, compare=False, hash=False
    )
    _keys: SchemaCache = field(
        default_factory=SchemaCache, init=False, repr=False, compare=False, hash=False
    )

    def events(self, messages: pa.RecordBatch, profile: OrderingProfile) -> Events:
        """Find the changes in messages. Their rows are not parsed.

        Args:
            messages: Of the schema MESSAGES.
            profile: Says which coordinates it needs.
        """
        values = self._values.payloads(messages.column("value"))
        keys = self._keys.payloads(messages.column("key"))
        return find_events(messages, values, keys, profile.coordinates)

    def rows(self, events: Events, chosen: Indices, columns: Sequence[SchemaField]) -> Rows:
        """Parse rows, exactly. One whose value does not fit fails, and no other.

        Args:
            events: What `events` returned.
            chosen: Indices of changes, all of one table.
            columns: The columns of that table. Of a delete, those of the key get their values
                from the message's key; the others are null, REQUIRED or not.
        """
        parsed: Parsed = events.parsed
        forms = Forms(self.time_precision, self.decimal_handling, self.binary_handling)
        operations = events.changes.column("operation").take(pa.array(chosen, pa.int64()))
        deletes = _compute.equal(operations.cast(pa.string()), "d").to_numpy(zero_copy_only=False)
        groups = parsed.schemas[chosen] * 2 + deletes
        parts: list[_Part] = []
        for group in np.unique(groups).tolist():
            places = np.flatnonzero(groups == group)
            images = parsed.images.take(pa.array(chosen[places], pa.int64()))
            meaning, is_delete = parsed.meanings[group // 2], bool(group % 2)
            parts.append(_part(images, places, columns, meaning, forms, is_delete))
        return _rows(events, chosen, columns, parts)

    def columns(self, events: Events, table: str) -> list[SchemaField] | None:
        """The columns of a table as the schemas of its changes have them.

        Args:
            events: What `events` returned.
            table: As in `Events.changes`.

        Returns:
            Those of the last schema, then what only earlier ones have, then what only keys have;
            all NULLABLE or REPEATED. None when no change of the table has a schema.
        """
        parsed: Parsed = events.parsed
        changes = events.changes
        of_table = _compute.equal(changes.column("table").cast(pa.string()), table)
        found = np.flatnonzero(of_table.to_numpy(zero_copy_only=False) & (parsed.schemas > 0))
        if not len(found):
            return None
        codes, firsts = np.unique(parsed.schemas[found][::-1], return_index=True)
        deletes = _compute.equal(changes.column("operation").cast(pa.string()), "d")
        last = len(found) - 1 - firsts  # of each schema its last change
        of_keys = deletes.to_numpy(zero_copy_only=False)[found[last]]
        columns: dict[str, SchemaField] = {}
        for place in np.lexsort((-last, of_keys)).tolist():
            meaning = parsed.meanings[int(codes[place])]
            for name, its in meaning.fields.items() if meaning else ():
                if not name.startswith(ADDED):
                    columns.setdefault(name.casefold(), column_of(name, its))
        return list(columns.values()) or None


@dataclass(frozen=True)
class _Part:
    """The rows of images that have one schema."""

    places: Indices  # among those chosen
    columns: list[Read]
    failed: dict[int, FailedRow]  # by index in this part
    unknown: dict[str, int]  # likewise
    is_delete: bool


def _part(
    images: Any,
    places: Indices,
    columns: Sequence[SchemaField],
    meaning: Meaning | None,
    forms: Forms,
    is_delete: bool,
) -> _Part:
    fields = {} if meaning is None else meaning.fields
    folded = {name.casefold(): its for name, its in fields.items()}
    parsed = parse(images, [column.name for column in columns], fields, ADDED)
    failed = {row: FailedRow(row, reason) for row, reason in parsed.failed.items()}
    found: list[Read] = []
    for column, values in zip(columns, parsed.columns, strict=True):
        if is_delete and column.mode == "REQUIRED":
            column = SchemaField.from_api_repr({**column.to_api_repr(), "mode": "NULLABLE"})
        its = Column(column, folded.get(column.name.casefold()), forms)
        found.append(read(its, values, Place(column.name, failed)))
    return _Part(places, found, failed, parsed.unknown, is_delete)


def _rows(
    events: Events, chosen: Indices, columns: Sequence[SchemaField], parts: Sequence[_Part]
) -> Rows:
    """Put the parts together in the order in which their changes were chosen."""
    places = np.concatenate([part.places for part in parts] or [np.empty(0, np.int64)])
    order = np.argsort(places, kind="stable")
    failed = {
        int(part.places[row]): failure for part in parts for row, failure in part.failed.items()
    }
    if failed:
        order = order[~np.isin(places[order], list(failed))]
    taken = pa.array(order, pa.int64())
    whole = len(parts) == 1 and not failed
    arrays: list[Any] = []
    masks: tuple[dict[str, Mask], dict[str, Mask]] = ({}, {})
    for number, column in enumerate(columns):
        reads = [part.columns[number] for part in parts]
        pieces: Any = [its.array for its in reads] or [pa.array([], wire_field(column).type)]
        arrays.append(pieces[0] if whole else pa.concat_arrays(pieces).take(taken))
        for its, kind in zip(masks, ("unavailable", "missing"), strict=True):
            mask = _mask(parts, number, kind)
            if mask is not None and (mask := mask[order]).any():
                its[column.name] = mask
    fields = [wire_field(column).with_nullable(column.mode != "REPEATED") for column in columns]
    messages = events.changes.column("message")
    failures = [
        FailedEvent(messages[int(chosen[place])].as_py(), failure.column, failure.reason)
        for place, failure in sorted(failed.items())
    ]
    unknown = {
        name: int(chosen[part.places[row]])
        for part in parts
        if not part.is_delete
        for name, row in part.unknown.items()
    }
    batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
    return Rows(batch, chosen[places[order]], failures, *masks, unknown)


def _mask(parts: Sequence[_Part], number: int, kind: str) -> Mask | None:
    """Which rows of all parts lack a column. Of a delete none does: it has but the key."""
    found = [None if part.is_delete else getattr(part.columns[number], kind) for part in parts]
    if all(mask is None for mask in found):
        return None
    sizes = [len(part.places) for part in parts]
    return np.concatenate(
        [np.zeros(n, np.bool_) if m is None else m for m, n in zip(found, sizes, strict=True)]
    )
