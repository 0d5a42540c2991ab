"""Debezium's envelopes, parsed as far as operation, table and source coordinates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import UNSET
from msgspec.structs import astuple

from dagster_bq_connector.cdc.envelope.arrays import integers, lines, strings
from dagster_bq_connector.cdc.envelope.images import JSON_ERRORS, Json
from dagster_bq_connector.cdc.event import Fate, Indices

# What Debezium prefixes the fields with that it adds to unwrapped messages (add.fields.prefix).
ADDED = "__"
Change: TypeAlias = Literal["c", "u", "r", "d"]  # the operations that change a row
_MARKS = ("status", "ts_ms", "ddl", "payload")


def _optional(names: Iterable[str]) -> list[Any]:
    return [(name, Any | msgspec.UnsetType, UNSET) for name in names]


@dataclass(frozen=True)
class Shape:
    """The parsers of envelopes for one set of coordinates.

    Attributes:
        paths: Dotted paths of the coordinates, as `source.lsn`.
        change: Parses the envelope of a change, and nothing else.
        envelope: Parses what has the form of an envelope, for what is no change.
        unwrapped: Parses what ExtractNewRecordState adds to a row.
        empty: An envelope without anything.
    """

    paths: tuple[str, ...]
    change: Callable[[Json], Any]
    envelope: Callable[[Json], Any]
    unwrapped: Callable[[Json], Any]
    empty: Any

    @property
    def add_fields(self) -> str:
        """The setting of ExtractNewRecordState that adds all that is needed."""
        return f"add.fields={','.join(['op', 'source.schema', 'source.table', *self.paths])}"


@lru_cache(maxsize=32)
def shape(paths: tuple[str, ...]) -> Shape:
    """The parsers for these coordinates."""
    parts: dict[str, dict[str, None]] = {
        "source": dict.fromkeys(("schema", "table", "db")),
        "transaction": {},
    }
    for path in paths:
        group, _, name = path.partition(".")
        parts[group][name] = None
    source = msgspec.defstruct("Source", _optional(parts["source"]), gc=False)
    transaction = msgspec.defstruct("Transaction", _optional(parts["transaction"]), gc=False)
    change = msgspec.defstruct(
        "Change",
        [
            ("op", Change),
            ("source", source),
            ("after", msgspec.Raw, msgspec.Raw(b"")),
            ("transaction", transaction | None, None),
        ],
        gc=False,
    )
    fields: list[Any] = [
        ("op", Any, None),
        ("source", source | None, None),
        ("transaction", transaction | None, None),
        *_optional(_MARKS),
        *_optional(("added_op", "added_deleted")),
    ]
    envelope = msgspec.defstruct(
        "Envelope",
        fields,
        rename={"added_op": f"{ADDED}op", "added_deleted": f"{ADDED}deleted"},
        gc=False,
    )
    needed = ("op", "deleted", "source.schema", "source.table", "source.db", *paths)
    renamed = {path.replace(".", "_"): f"{ADDED}{path.replace('.', '_')}" for path in needed}
    unwrapped = msgspec.defstruct("Unwrapped", _optional(renamed), rename=renamed, gc=False)
    return Shape(
        paths,
        msgspec.json.Decoder(change).decode,
        msgspec.json.Decoder(envelope).decode,
        msgspec.json.Decoder(unwrapped).decode,
        envelope(),
    )


@dataclass(frozen=True)
class Found:
    """Changes, a column a field.

    Attributes:
        messages: Which messages they come from.
        texts: Strings: the operation, the schema, the table. Then the coordinates, see `scalars`.
        images: The rows, as `lines` gives them.
    """

    messages: Indices
    texts: list[Any]
    images: Any


def joined(parts: Sequence[Found], paths: Sequence[str]) -> Found:
    """The changes of all parts, one after the other."""
    if not parts:
        return Found(np.empty(0, np.int64), [texts([])] * (3 + len(paths)), lines([]))
    columns = zip(*[part.texts for part in parts], strict=True)
    return Found(
        np.concatenate([part.messages for part in parts]),
        [_concatenated(pieces) for pieces in columns],
        pa.concat_arrays([part.images for part in parts]),
    )


def _concatenated(pieces: Sequence[pa.Array[Any]]) -> pa.Array[Any]:
    """Scalars that may be text in one part, and integers in another."""
    if len({piece.type for piece in pieces}) > 1:
        pieces = [piece.cast(pa.string()) for piece in pieces]
    return pa.concat_arrays(pieces)


def parse_each(
    parser: Callable[[Json], Any], values: Iterable[Json], empty: Any
) -> tuple[list[Any], dict[int, str]]:
    """Parse values; those that fail become `empty`, with their reasons by index."""
    found: list[Any] = []
    failed: dict[int, str] = {}
    left = iter(values)
    while True:
        try:
            # What was parsed before one that fails stays in the list.
            found.extend(map(parser, left))
            return found, failed
        except JSON_ERRORS as error:
            failed[len(found)] = str(error)
            found.append(empty)


def wrapped(changes: Sequence[Any], messages: Indices, paths: Sequence[str]) -> Found:
    """The changes that envelopes tell of, one or more."""
    sources = [change.source for change in changes]
    names = sources[0].__struct_fields__
    columns = dict(zip(names, zip(*map(astuple, sources), strict=True), strict=True))
    coordinates: list[Sequence[Any]] = []
    for path in paths:
        group, _, name = path.partition(".")
        if group == "source":
            coordinates.append(columns[name])
        else:
            parts = [change.transaction for change in changes]
            coordinates.append([None if part is None else getattr(part, name) for part in parts])
    operations = [change.op for change in changes]
    named = (operations, _either(columns["schema"], columns["db"]), columns["table"])
    found = [*map(texts, named), *map(scalars, coordinates)]
    return Found(messages, found, lines([change.after for change in changes]))


def unwrapped(
    rows: Sequence[Any], messages: Indices, values: Sequence[Json], paths: Sequence[str]
) -> Found:
    """The changes among rows that ExtractNewRecordState has taken out of their envelopes."""
    deleted = ("true", True)
    named = [
        ["d" if row.deleted in deleted else "u" if row.op is UNSET else row.op for row in rows],
        _either([row.source_schema for row in rows], [row.source_db for row in rows]),
        [row.source_table for row in rows],
    ]
    coordinates = [[getattr(row, path.replace(".", "_")) for row in rows] for path in paths]
    found = [*map(texts, named), *map(scalars, coordinates)]
    return Found(messages, found, lines(values))


def _either(schemas: Sequence[Any], databases: Sequence[Any]) -> Sequence[Any]:
    """The schema, or the database, where a source has no schemas, as MySQL."""
    if set(map(type, schemas)) == {str} and all(schemas):
        return schemas
    return [
        database if schema is UNSET or not schema else schema
        for schema, database in zip(schemas, databases, strict=True)
    ]


def fate_without_row(envelope: Any, topic: str) -> Fate | None:
    """The fate of a message that changes no row; None when it is not known.

    Heartbeats have a time alone, transaction markers a status, schema changes their statement.
    """
    if envelope.op == "t" and envelope.source is not None:
        return Fate.truncate
    if envelope.op == "m" and envelope.source is not None:
        return Fate.logical_message
    if envelope.op is not None or envelope.added_op is not UNSET:
        return None
    if envelope.ddl is not UNSET and envelope.source is not None:
        return Fate.schema_change
    if envelope.status in ("BEGIN", "END"):
        return Fate.transaction
    only_time = envelope.ts_ms is not UNSET and envelope.source is None
    return Fate.heartbeat if only_time or topic.startswith("__debezium-heartbeat") else None


def texts(values: Sequence[Any]) -> pa.Array[Any]:
    """JSON scalars as the text that they had: numbers in digits, null where there is none."""
    found = scalars(values)
    return found if pa.types.is_string(found.type) else found.cast(pa.string())


def scalars(values: Sequence[Any]) -> pa.Array[Any]:
    """JSON scalars: int64 where all are such integers, else strings as by `texts`."""
    found = strings(values)
    if found is not None:
        return found
    kinds = set(map(type, values)) - {type(None)}
    if kinds == {int}:
        try:
            return integers(values)
        except OverflowError:
            pass
    return pa.array(values if kinds <= {str} else list(map(_text, values)), pa.string())


def _text(value: Any) -> str | None:
    if value is None or value is UNSET:
        return None
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
