"""The messages of a batch: their fates, and the changes among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import UNSET

from dagster_bq_connector.cdc.envelope import envelopes
from dagster_bq_connector.cdc.envelope.connect import Meaning
from dagster_bq_connector.cdc.envelope.envelopes import ADDED, Found, Shape, shape
from dagster_bq_connector.cdc.envelope.images import JSON_ERRORS, Json
from dagster_bq_connector.cdc.envelope.keys import canonical_keys
from dagster_bq_connector.cdc.envelope.payloads import NO_SCHEMA, Payloads
from dagster_bq_connector.cdc.event import FATES, Events, FailedEvent, Fate, Indices, Mask

_compute: Any = pc  # its stubs know a part of what it takes
_CODE = {fate: code for code, fate in enumerate(FATES)}
_CHANGES = ("c", "u", "r", "d")
_NO_ENVELOPE = (
    "is no change event of Debezium: it has no operation and source, nor the __op and __deleted of "
    "ExtractNewRecordState"
)


@dataclass(frozen=True)
class Parsed:
    """What is kept of changes for their full parse.

    Attributes:
        images: Of each change its row, of a delete its key.
        schemas: Of each change the place of the image's schema in `meanings`.
        meanings: The schemas of images; the first is None, for images without one.
    """

    images: list[Json]
    schemas: Indices
    meanings: list[Meaning | None]


class Batch:
    """The messages of a batch while their fates are found."""

    def __init__(self, messages: pa.RecordBatch, payloads: Payloads, form: Shape) -> None:
        self.messages, self.payloads, self.form = messages, payloads, form
        self.fates = np.full(messages.num_rows, _CODE[Fate.failed], np.uint8)
        self.failed: dict[int, FailedEvent] = {}
        absent = payloads.starts == payloads.stops
        self._given = np.flatnonzero(~absent)
        self.fates[absent] = _CODE[Fate.tombstone]
        self._left: list[int] = []  # what may be unwrapped

    def fail(self, message: int, reason: str, column: str | None = None) -> None:
        """Fail a message. The first reason stays."""
        self.fates[message] = _CODE[Fate.failed]
        self.failed.setdefault(message, FailedEvent(message, column, reason))

    def wrapped(self) -> Found:
        """Find the changes that have their envelope, and all messages that change no row."""
        slices = self.payloads.slices(self._given)
        parsed, _ = envelopes.parse_each(self.form.envelope, slices, self.form.empty)
        operations = envelopes.texts([envelope.op for envelope in parsed])
        change = _compute.is_in(operations, value_set=pa.array(_CHANGES))
        change = change.to_numpy(zero_copy_only=False)
        if not all(sources := [envelope.source for envelope in parsed]):
            change &= np.array([source is not None for source in sources])
        topics = self.messages.column("topic")
        for place in np.flatnonzero(~change).tolist():
            message, envelope = int(self._given[place]), parsed[place]
            fate = self._fate(envelope, slices[place], topics[message].as_py())
            if fate is None:
                self._left.append(message)
            else:
                self.fates[message] = _CODE[fate]
        places = np.flatnonzero(change)
        kept = parsed if len(places) == len(parsed) else [parsed[i] for i in places.tolist()]
        return envelopes.wrapped(kept, self._given[places].tolist(), self.form.paths)

    def _fate(self, envelope: Any, value: Json, topic: str) -> Fate | None:
        if value == b"null":  # below a schema
            return Fate.tombstone
        return envelopes.fate_without_row(envelope, topic)

    def unwrapped(self) -> Found:
        """Find the changes without their envelope. All messages that are left then fail."""
        left = np.array(self._left, np.int64)
        slices = self.payloads.slices(left)
        blank = self.form.unwrapped(b"{}")
        parsed, failed = envelopes.parse_each(self.form.unwrapped, slices, blank)
        good: list[int] = []
        for place, (message, row) in enumerate(zip(self._left, parsed, strict=True)):
            reason = failed.get(place)
            if reason is not None:
                self.fail(message, f"the message is no JSON object: {reason}")
            elif row.op is UNSET and row.deleted is UNSET:
                self.fail(message, self._no_envelope(slices[place]))
            elif absent := self._absent(row):
                self.fail(
                    message,
                    f"the unwrapped message lacks {', '.join(absent)}, which its order needs: set "
                    f"{self.form.add_fields} on ExtractNewRecordState",
                )
            else:
                good.append(place)
        self._check_tombstones(self._left, parsed)
        return envelopes.unwrapped(
            [parsed[place] for place in good],
            left[good].tolist(),
            [slices[place] for place in good],
            self.form.paths,
        )

    def _absent(self, row: Any) -> list[str]:
        paths = ["source.table", *self.form.paths]
        names = [path.replace(".", "_") for path in paths]
        found = [f"{ADDED}{name}" for name in names if getattr(row, name) is UNSET]
        if row.source_schema is UNSET and row.source_db is UNSET:
            found.append(f"{ADDED}source_schema")
        return found

    def _no_envelope(self, value: Json) -> str:
        """Why a JSON object without the marks of ExtractNewRecordState is no change."""
        try:
            envelope = self.form.envelope(value)
        except JSON_ERRORS as error:
            return f"the message {_NO_ENVELOPE} ({error})"
        if envelope.op is None:
            return f"the message {_NO_ENVELOPE}"
        if envelope.source is None:
            return f"the message has the operation {envelope.op!r} but no source"
        return (
            f"the operation {envelope.op!r} is not known: there are c, u, r, d, t (truncate) and m "
            "(logical message)"
        )

    def _check_tombstones(self, messages: Sequence[int], rows: Sequence[Any]) -> None:
        """Where nothing but tombstones tells of deletes, those must not be passed over."""
        column: Any = self.messages.column("topic")
        topics = column.indices.to_numpy()
        pairs = list(zip(topics[list(messages)].tolist(), rows, strict=True)) if messages else []
        marked = {topic for topic, row in pairs if row.deleted is not UNSET}
        plain = {topic for topic, row in pairs if row.op is not UNSET}
        for topic in plain - marked:
            tombstones = (topics == topic) & (self.fates == _CODE[Fate.tombstone])
            for message in np.flatnonzero(tombstones).tolist():
                self.fail(
                    message,
                    "a tombstone is all that tells of this delete, and it has no place in the "
                    "order: set delete.tombstone.handling.mode=rewrite on ExtractNewRecordState",
                )


def find_events(
    messages: pa.RecordBatch, values: Payloads, keys: Payloads, paths: Sequence[str]
) -> Events:
    """Find the changes in messages, and the fates of all of them.

    Args:
        messages: Of the schema MESSAGES.
        values: The payloads of their values.
        keys: Those of their keys.
        paths: The coordinates that are wanted.
    """
    batch = Batch(messages, values, shape(tuple(paths)))
    whole, bare = batch.wrapped(), batch.unwrapped()
    count = len(whole.messages)
    return _assembled(batch, whole.with_(bare), count, keys)


def _assembled(batch: Batch, found: Found, in_envelope: int, keys: Payloads) -> Events:
    """Put the changes together, in the order of their messages.

    Args:
        batch: The messages.
        found: The changes.
        in_envelope: As many of them, from the first, have their envelope.
        keys: The payloads of the messages' keys.
    """
    messages = np.array(found.messages, np.int64)
    operations = envelopes.texts(found.operations)
    named = _tables(envelopes.texts(found.schemas), envelopes.texts(found.tables))
    canonical, wrong = canonical_keys(keys.values(messages))
    good = np.ones(len(messages), np.bool_)
    for index, reason in wrong.items():
        batch.fail(int(messages[index]), reason)
        good[index] = False
    _check(batch, good, messages, operations, named)
    deletes = _compute.equal(operations, "d").to_numpy(zero_copy_only=False)
    schemas, meanings = _schemas(batch.payloads, keys, messages, deletes, in_envelope)
    images, rows = found.images, np.flatnonzero(deletes)
    for index, key in zip(rows.tolist(), keys.slices(messages[rows]), strict=True):
        images[index] = key
    arrays = [
        pa.array(messages.astype(np.int32)),
        named,
        operations.dictionary_encode(),
        canonical,
        pa.StructArray.from_arrays(
            [envelopes.texts(values) for values in found.coordinates],
            fields=[pa.field(path, pa.string()) for path in batch.form.paths],
        ),
    ]
    names = ["message", "table", "operation", "key", "coordinates"]
    changes = pa.RecordBatch.from_arrays(arrays, names)
    if in_envelope < len(messages) or not good.all():
        kept = np.argsort(messages, kind="stable")
        kept = kept[good[kept]]
        changes, messages, schemas = (
            changes.take(pa.array(kept, pa.int64())),
            messages[kept],
            schemas[kept],
        )
        images = [images[index] for index in kept.tolist()]
    batch.fates[messages] = _CODE[Fate.change]
    failed = [batch.failed[message] for message in sorted(batch.failed)]
    parsed = Parsed(images, schemas, meanings)
    return Events(batch.messages, batch.fates, changes, failed, parsed)


def _tables(schemas: Any, tables: Any) -> Any:
    """`schema.table` of each change, a dictionary; null where one is missing."""
    schemas, tables = schemas.dictionary_encode(), tables.dictionary_encode()
    firsts, seconds = schemas.dictionary.to_pylist(), tables.dictionary.to_pylist()
    names = [f"{first}.{second}" for first in firsts for second in seconds]
    codes = _compute.add(_compute.multiply(schemas.indices, len(seconds)), tables.indices)
    return pa.DictionaryArray.from_arrays(codes, pa.array(names, pa.string()))


def _check(
    batch: Batch,
    good: Mask,
    messages: Indices,
    operations: Any,
    named: Any,
) -> None:
    """Fail changes without a table, or with an operation that there is not."""
    unnamed = named.is_null().to_numpy(zero_copy_only=False)
    known = _compute.is_in(operations, value_set=pa.array(_CHANGES)).to_numpy(zero_copy_only=False)
    for index in np.flatnonzero(good & (unnamed | ~known)).tolist():
        operation = operations[index].as_py()
        if unnamed[index]:
            reason = "the source's schema and table are missing: the table is not known"
        else:
            reason = f"the operation {operation!r} of an unwrapped message is not known"
        batch.fail(int(messages[index]), reason)
        good[index] = False


def _schemas(
    values: Payloads, keys: Payloads, messages: Indices, deletes: Mask, in_envelope: int
) -> tuple[Indices, list[Meaning | None]]:
    """The schema of each change's image: of the envelope's row, of an unwrapped row, of a key."""
    count = len(values.meanings)
    rows = [meaning.fields.get("after") for meaning in values.meanings]
    meanings: list[Meaning | None] = [None, *rows, *values.meanings, *keys.meanings]
    of_value, of_key = values.schemas[messages], keys.schemas[messages]
    schemas = np.where(
        of_value == NO_SCHEMA,
        0,
        1 + of_value + np.where(np.arange(len(messages)) < in_envelope, 0, count),
    )
    of_deletes = np.where(of_key == NO_SCHEMA, 0, 1 + of_key + 2 * count)
    return np.where(deletes, of_deletes, schemas), meanings
