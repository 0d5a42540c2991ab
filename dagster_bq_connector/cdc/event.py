"""Messages of a change stream, and the changes that are found in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

Indices: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"
Mask: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.bool_]]"

# What every source gives. A null key is none, a null value a tombstone. In messages from a file the
# offset is the line, there is no partition, and the file's name stands in the metadata.
FILE = b"file"
MESSAGES: pa.Schema = pa.schema(
    [
        pa.field("topic", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
    ]
)


class Fate(StrEnum):
    """What becomes of a message.

    Attributes:
        change: It is a change of one row, and is applied.
        tombstone: It has no value: it follows a delete, so that Kafka can forget the key. Passed
            over, since the delete itself is applied.
        truncate: All rows of a table are gone. An error, unless truncates are allowed.
        heartbeat: It shows that the connector lives. Passed over.
        transaction: It marks where a transaction begins or ends. Passed over.
        schema_change: The source's tables have changed. Passed over: what columns there are is
            seen from the changes themselves.
        logical_message: The source's own messages (`pg_logical_emit_message`). Passed over.
        failed: It is no such thing. The failed-row policy decides.
    """

    change = "change"
    tombstone = "tombstone"
    truncate = "truncate"
    heartbeat = "heartbeat"
    transaction = "transaction"
    schema_change = "schema_change"
    logical_message = "logical_message"
    failed = "failed"


FATES = list(Fate)


@dataclass(frozen=True, slots=True)
class FailedEvent:
    """A message that no retry can save.

    Attributes:
        message: Its index in its batch of messages.
        column: The column or field at fault, when it is known.
        reason: What is wrong with it, and what to do.
    """

    message: int
    column: str | None
    reason: str

    def named(self, messages: pa.RecordBatch) -> str:
        """The same for people: which message, which column, why."""
        column = f", column {self.column!r}" if self.column else ""
        return f"{name_of(messages, self.message)}{column}: {self.reason}"


@dataclass(frozen=True)
class Events:
    """A batch of messages, parsed as far as their keys, operations and coordinates.

    Attributes:
        messages: The messages, of the schema MESSAGES.
        fates: Of each message, its place in FATES; uint8.
        changes: The changes in the order of their messages:

            - `message`, int32: the index of its message;
            - `table`, dictionary of string: `schema.table` as the source names it;
            - `operation`, dictionary of string: `c` create, `u` update, `r` read by a snapshot,
              `d` delete;
            - `key`, binary: JSON of the key's fields by their names, so written that equal keys
              have equal bytes;
            - `coordinates`, a struct: what the ordering profile asked for, each a string, or an
              int64 where all of the batch are integers that fit.
        failed: The messages that failed, in their order.
        parsed: What the envelope keeps for itself, for the full parse.
    """

    messages: pa.RecordBatch
    fates: np.ndarray[tuple[int], np.dtype[np.uint8]]
    changes: pa.RecordBatch
    failed: list[FailedEvent]
    parsed: Any = field(repr=False, compare=False)

    def count(self, fate: Fate) -> int:
        """How many messages have this fate."""
        return int((self.fates == FATES.index(fate)).sum())


@dataclass(frozen=True)
class Rows:
    """Rows of one table, as they travel.

    Attributes:
        batch: The rows in the wire types of the table's columns, in the order of `kept`. Of a
            delete only the columns of the key have values.
        kept: Of each row, which change it comes from.
        failed: The chosen changes that are not among the rows.
        unavailable: By column, in which of the rows the source had a value that it did not send,
            because the change left a large value as it was. What stands there is null, and must
            not be stored.
        missing: By column, in which of the rows it does not occur at all. Null, likewise.
        unknown: Names that the rows have and the table lacks; each with a change that has it.
    """

    batch: pa.RecordBatch
    kept: Indices
    failed: list[FailedEvent]
    unavailable: Mapping[str, Mask] = field(default_factory=dict[str, Mask])
    missing: Mapping[str, Mask] = field(default_factory=dict[str, Mask])
    unknown: Mapping[str, int] = field(default_factory=dict[str, int])


def name_of(messages: pa.RecordBatch, index: int) -> str:
    """How a message is named to people: `topic[partition]@offset`, or its file and line."""
    topic, partition, offset = (messages.column(name)[index].as_py() for name in MESSAGES.names[:3])
    if file := (messages.schema.metadata or {}).get(FILE):
        return f"{file.decode()}, line {offset}"
    return f"{topic}[{partition}]@{offset}"
