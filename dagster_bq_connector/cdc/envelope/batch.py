"""The messages of a batch: their fates, and the changes among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import UNSET

from dagster_bq_connector.cdc.envelope import envelopes
from dagster_bq_connector.cdc.envelope.arrays import CHUNK, lines
from dagster_bq_connector.cdc.envelope.connect import Meaning
from dagster_bq_connector.cdc.envelope.envelopes import ADDED, Change, Found, Shape, shape
from dagster_bq_connector.cdc.envelope.images import JSON_ERRORS, Json
from dagster_bq_connector.cdc.envelope.keys import canonical_keys
from dagster_bq_connector.cdc.envelope.payloads import NO_SCHEMA, Payloads
from dagster_bq_connector.cdc.event import FATES, Events, FailedEvent, Fate, Indices, Mask

_compute: Any = pc  # its stubs know a part of what it takes
_CODE = {fate: code for code, fate in enumerate(FATES)}
_CHANGES = get_args(Change)
_NO_ENVELOPE = (
    "is no change event of Debezium: it has no operation and source, nor the __op and __deleted of "
    "ExtractNewRecordState"
)


@dataclass(frozen=True)
class Parsed:
    """What is kept of changes for their full parse.

    Attributes:
        images: Of each change its row, of a delete its key, as `lines` gives them.
        schemas: Of each change the place of the image's schema in `meanings`.
        meanings: The schemas of images; the first is None, for images without one.
    """

    images: Any
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
        parts: list[Found] = []
        for start in range(0, len(self._given), CHUNK):
            messages = self._given[start : start + CHUNK]
            values = self.payloads.views(messages)
            parsed, failed = envelopes.parse_each(self.form.change, values, None)
            if failed:
                for place in failed:
                    self._pass_over(int(messages[place]), values[place])
                messages = np.delete(messages, list(failed))
                parsed = [change for change in parsed if change is not None]
            if parsed:
                parts.append(envelopes.wrapped(parsed, messages, self.form.paths))
        return envelopes.joined(parts, self.form.paths)

    def _pass_over(self, message: int, value: Json) -> None:
        """Find the fate of a message that is no change in its envelope."""
        ([envelope], _) = envelopes.parse_each(self.form.envelope, [value], self.form.empty)
        fate = self._fate(envelope, value, self.messages.column("topic")[message].as_py())
        if fate is None:
            self._left.append(message)
        else:
            self.fates[message] = _CODE[fate]

    def _fate(self, envelope: Any, value: Json, topic: str) -> Fate | None:
        if value == b"null":  # below a schema
            return Fate.tombstone
        return envelopes.fate_without_row(envelope, topic)

    def unwrapped(self) -> Found:
        """Find the changes without their envelope. All messages that are left then fail."""
        left = np.array(self._left, np.int64)
        slices = self.payloads.views(left)
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
            left[good],
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
    found = envelopes.joined([whole, bare], paths) if len(bare.messages) else whole
    return _assembled(batch, found, len(whole.messages), keys)


def _assembled(batch: Batch, found: Found, in_envelope: int, keys: Payloads) -> Events:
    """Put the changes together, in the order of their messages.

    Args:
        batch: The messages.
        found: The changes.
        in_envelope: As many of them, from the first, have their envelope.
        keys: The payloads of the messages' keys.
    """
    messages = found.messages
    operations, schemas, tables, *coordinates = found.texts
    named = _tables(schemas, tables)
    canonical, wrong = canonical_keys(keys.values(messages))
    good = np.ones(len(messages), np.bool_)
    for index, reason in wrong.items():
        batch.fail(int(messages[index]), reason)
        good[index] = False
    _check(batch, good, messages, operations, named)
    deletes = _compute.equal(operations, "d").to_numpy(zero_copy_only=False)
    schemas, meanings = _schemas(batch.payloads, keys, messages, deletes, in_envelope)
    images = found.images
    if deletes.any():
        its_keys = lines(_compute.fill_null(keys.values(messages[deletes]), b"").to_pylist())
        images = _compute.replace_with_mask(images, deletes, its_keys)
    arrays = [
        pa.array(messages.astype(np.int32)),
        named,
        operations.dictionary_encode(),
        canonical,
        pa.StructArray.from_arrays(coordinates, list(batch.form.paths)),
    ]
    names = ["message", "table", "operation", "key", "coordinates"]
    changes = pa.RecordBatch.from_arrays(arrays, names)
    if in_envelope < len(messages) or not good.all():
        kept = np.argsort(messages, kind="stable")
        kept = kept[good[kept]]
        taken = pa.array(kept, pa.int64())
        changes, images = changes.take(taken), images.take(taken)
        messages, schemas = messages[kept], schemas[kept]
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
