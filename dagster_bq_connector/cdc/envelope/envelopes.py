"""Debezium's envelopes, parsed as far as operation, table and source coordinates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec
import pyarrow as pa
from msgspec import UNSET

from dagster_bq_connector.cdc.envelope.images import JSON_ERRORS, Json
from dagster_bq_connector.cdc.event import Fate

# What Debezium prefixes the fields with that it adds to unwrapped messages (add.fields.prefix).
ADDED = "__"
_PLAIN = ("op", "source", "transaction", "after")
_MARKS = ("status", "ts_ms", "ddl", "payload")


def _optional(names: Iterable[str]) -> list[Any]:
    return [(name, Any | msgspec.UnsetType, UNSET) for name in names]


@dataclass(frozen=True)
class Shape:
    """The parsers of envelopes for one set of coordinates.

    Attributes:
        paths: Dotted paths of the coordinates, as `source.lsn`.
        envelope: Parses a whole envelope; see `_shape`.
        unwrapped: Parses what ExtractNewRecordState adds to a row.
    """

    paths: tuple[str, ...]
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
    fields: list[Any] = [
        ("op", Any, None),
        ("source", source | None, None),
        ("transaction", transaction | None, None),
        ("after", msgspec.Raw, msgspec.Raw(b"")),
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
        msgspec.json.Decoder(envelope).decode,
        msgspec.json.Decoder(unwrapped).decode,
        envelope(),
    )


@dataclass
class Found:
    """Changes of one kind, a list a field, in the order of their messages."""

    messages: list[int] = field(default_factory=list[int])
    operations: list[Any] = field(default_factory=list[Any])
    schemas: list[Any] = field(default_factory=list[Any])
    tables: list[Any] = field(default_factory=list[Any])
    coordinates: list[list[Any]] = field(default_factory=list[list[Any]])
    images: list[Json] = field(default_factory=list[Json])

    def with_(self, other: Found) -> Found:
        """These changes and then the others."""
        if not other.messages:
            return self
        pairs = zip(self.coordinates, other.coordinates, strict=True)
        return Found(
            self.messages + other.messages,
            self.operations + other.operations,
            self.schemas + other.schemas,
            self.tables + other.tables,
            [ours + theirs for ours, theirs in pairs],
            self.images + other.images,
        )


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


def wrapped(envelopes: Sequence[Any], messages: Sequence[int], paths: Sequence[str]) -> Found:
    """The changes among envelopes: those that have an operation and a source."""
    sources = [envelope.source for envelope in envelopes]
    coordinates: list[list[Any]] = []
    for path in paths:
        group, _, name = path.partition(".")
        if group == "source":
            values = [getattr(source, name) for source in sources]
        else:
            parts = [envelope.transaction for envelope in envelopes]
            values = [None if part is None else getattr(part, name) for part in parts]
        coordinates.append(values)
    return Found(
        list(messages),
        [envelope.op for envelope in envelopes],
        _either([s.schema for s in sources], [s.db for s in sources]),
        [source.table for source in sources],
        coordinates,
        [envelope.after for envelope in envelopes],
    )


def unwrapped(
    rows: Sequence[Any], messages: Sequence[int], values: Sequence[Json], paths: Sequence[str]
) -> Found:
    """The changes among rows that ExtractNewRecordState has taken out of their envelopes."""
    deleted = ("true", True)
    return Found(
        list(messages),
        ["d" if row.deleted in deleted else "u" if row.op is UNSET else row.op for row in rows],
        _either([row.source_schema for row in rows], [row.source_db for row in rows]),
        [row.source_table for row in rows],
        [[getattr(row, path.replace(".", "_")) for row in rows] for path in paths],
        list(values),
    )


def _either(schemas: list[Any], databases: list[Any]) -> list[Any]:
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


def texts(values: list[Any]) -> pa.Array[Any]:
    """JSON scalars as the text that they had: numbers in digits, null where there is none."""
    try:
        return pa.array(values, pa.string())
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        pass
    if set(map(type, values)) <= {int, type(None)}:
        try:
            return pa.array(values, pa.int64()).cast(pa.string())
        except OverflowError:
            pass
    return pa.array(list(map(_text, values)), pa.string())


def _text(value: Any) -> str | None:
    if value is None or value is UNSET:
        return None
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
