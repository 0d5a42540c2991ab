"""Keys of messages against the primary keys of tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np
import pyarrow.compute as pc

from dagster_bq_connector.cdc.event import Events

_compute: Any = pc  # its stubs know a part of what it takes
_decode = msgspec.json.Decoder().decode
# Of a key that is canonical as it stands in nearly all messages: numbers, plain text.
_VALUE = r'(?:-?[0-9][0-9.eE+-]*|"[^"\\]*"|true|false)'


def key_fields(events: Events, change: int) -> tuple[str, ...]:
    """The fields of a change's key, in the order in which the message has them."""
    message = events.changes.column("message")[change].as_py()
    return tuple(payload_of(events.messages.column("key")[message].as_py()))


def payload_of(value: bytes | None) -> dict[str, Any]:
    """A JSON object, below the schema that may stand before it; empty when it is none."""
    try:
        found = _decode(value or b"null")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    if isinstance(found, dict) and set(cast("dict[str, Any]", found)) == {"schema", "payload"}:
        found = cast("dict[str, Any]", found)["payload"]
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def wrong_keys(keys: Any, primary_key: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """The keys whose fields are not exactly those of a primary key, case aside.

    Args:
        keys: As in `Events.changes`.
        primary_key: Its columns.

    Returns:
        The fields of the wrong ones, by their index.
    """
    fields = ",".join(f'"(?i:{re.escape(name)})":{_VALUE}' for name in sorted(primary_key))
    right = _compute.match_substring_regex(keys, rf"^\{{{fields}\}}$")
    wanted = sorted(name.casefold() for name in primary_key)
    wrong: dict[int, tuple[str, ...]] = {}
    for index in np.flatnonzero(~right.to_numpy(zero_copy_only=False)).tolist():
        names = tuple(_decode(keys[index].as_py()))
        if sorted(name.casefold() for name in names) != wanted:
            wrong[index] = names
    return wrong


def source_table(value: bytes | None) -> str | None:
    """`schema.table` of a message that is no change, or none that can be applied.

    Args:
        value: The message's value, with its envelope or unwrapped.

    Returns:
        As in `Events.changes`; None when it does not say it.
    """
    found = payload_of(value)
    source: Any = found.get("source")
    if isinstance(source, dict):
        source = cast("dict[str, Any]", source)
        schema, table = source.get("schema") or source.get("db"), source.get("table")
    else:
        schema = found.get("__source_schema") or found.get("__source_db")
        table = found.get("__source_table")
    return f"{schema}.{table}" if schema and table else None
