"""Where the payload of each message lies, below the schema that may stand before it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dagster_bq_connector.cdc.envelope.connect import Meaning
from dagster_bq_connector.cdc.event import Indices, Mask

NO_SCHEMA = -1

_compute: Any = pc  # its stubs know a part of what it takes
_EMBEDDED = r'^\s*\{\s*"(?:schema|payload)"\s*:'
_FIRST = b'{"'
_NAMES = list(b"sp")
_BEFORE_PAYLOAD = re.compile(rb'"payload"\s*:\s*\Z')
# As many schemas are kept. Each is some kilobytes of JSON; a stream has one or two a table.
_MOST = 2_000
# As many are looked for in a batch by comparing all of its messages with each. Should every
# message have a schema of its own, the others are parsed one by one.
_MOST_IN_BATCH = 256


class _Embedded(msgspec.Struct):
    schema: msgspec.Raw
    payload: msgspec.Raw


_embedded = msgspec.json.Decoder(_Embedded)


@dataclass(frozen=True)
class Payloads:
    """The payloads of a column of messages.

    Attributes:
        column: The column.
        data: Its bytes.
        starts: Where in them each payload starts.
        stops: And where it stops. A null has no bytes.
        schemas: Of each payload the place of its schema in `meanings`, or NO_SCHEMA.
        meanings: The schemas that occur.
    """

    column: pa.Array[Any]
    data: memoryview
    starts: Indices
    stops: Indices
    schemas: Indices
    meanings: list[Meaning]

    def value(self, index: int) -> bytes:
        """The bytes of one of them."""
        return bytes(self.data[self.starts[index] : self.stops[index]])

    def views(self, indices: Indices) -> list[memoryview]:
        """Views of some of them, in that order. A null is empty."""
        data = self.data
        bounds = zip(self.starts[indices].tolist(), self.stops[indices].tolist(), strict=True)
        return [data[start:stop] for start, stop in bounds]

    def values(self, indices: Indices) -> pa.Array[Any]:
        """The bytes of some of them, in that order. A null is null or empty."""
        if self._cells is not None:
            return self._cells.take(pa.array(indices * 2))
        first, count = int(indices[0]) if len(indices) else 0, len(indices)
        if np.array_equal(indices, np.arange(first, first + count)):
            return self.column.slice(first, count)  # no copy is needed
        taken: Any = pa.array(indices)
        return self.column.take(taken)

    @cached_property
    def _cells(self) -> Any | None:
        """The payloads, and after each what stands before the next; None for the column itself."""
        sizes = _compute.fill_null(_compute.binary_length(self.column), 0).to_numpy()
        if np.array_equal(self.stops - self.starts, sizes):
            return None
        bounds = np.column_stack([self.starts, self.stops]).astype(np.int32).ravel()
        buffers = [None, pa.py_buffer(bounds), pa.py_buffer(self.data)]
        return pa.Array.from_buffers(pa.binary(), len(bounds) - 1, buffers)


class SchemaCache:
    """Finds payloads, and parses each schema but once.

    The schema stands before its payload in most messages, and with the same bytes in all messages
    of a table, until the table changes: so a schema is known by the bytes before the payload.
    Parsing it each time takes thirty times as long as the payload.
    """

    def __init__(self) -> None:
        self._meanings: dict[bytes, Meaning] = {}
        self._sizes: set[int] = set()

    def payloads(self, values: pa.Array[Any]) -> Payloads:
        """Find the payloads of binary values. What is no JSON is its own payload."""
        _, offsets, data = values.buffers()
        bounds = np.frombuffer(offsets, np.int32, len(values) + 1, values.offset * 4)
        starts, stops = bounds[:-1].astype(np.int64), bounds[1:].astype(np.int64)
        if values.null_count:  # bytes may lie behind a null: those of files have the text `null`
            absent = values.is_null().to_numpy(zero_copy_only=False)
            stops[absent] = starts[absent]
        found = Payloads(
            values,
            memoryview(data if data is not None else b""),
            starts,
            stops,
            np.full(len(values), NO_SCHEMA, np.int64),
            [],
        )
        left = _likely(found)
        while len(left) and self._known(found.value(int(left[0]))):
            left = self._find(values, found, left)
        left = left[_mask(_compute.match_substring_regex(_taken(values, left), _EMBEDDED))]
        for _ in range(_MOST_IN_BATCH):
            if not len(left):
                break
            left = self._find(values, found, left)
        for index in left.tolist():
            self._parse(found, index, keep=False)
        return found

    def _find(self, values: Any, found: Payloads, left: Indices) -> Indices:
        """Find all payloads below the schema of the first message that is left."""
        first = int(left[0])
        value = found.value(first)
        prefix = self._known(value) or self._parse(found, first, keep=True)
        if prefix is None:
            return left[1:]
        candidates = _taken(values, left)
        same = _compute.starts_with(candidates, prefix)
        same = _mask(_compute.and_(same, _compute.ends_with(candidates, b"}")))
        rows = left[same]
        found.starts[rows] += len(prefix)
        found.stops[rows] -= 1
        found.schemas[rows] = len(found.meanings)
        found.meanings.append(self._meanings[prefix])
        return left[~same] if same[0] else left[1:]

    def _known(self, value: bytes) -> bytes | None:
        if value.endswith(b"}"):
            for size in self._sizes:
                if (prefix := value[:size]) in self._meanings:
                    return prefix
        return None

    def _parse(self, found: Payloads, index: int, keep: bool) -> bytes | None:
        """Parse one message. Its prefix, if messages like it are known by one."""
        value = found.value(index)
        try:
            message = _embedded.decode(value)
            schema = msgspec.json.decode(message.schema)
            meaning = None if schema is None else Meaning.of(schema)
        except (msgspec.DecodeError, ValueError, AttributeError):
            return None  # whoever parses the payload says what is wrong
        payload = bytes(message.payload)
        start = value.rindex(payload)
        prefix = value[:start]
        if meaning is None or not keep or not self._is_prefix(value, prefix, payload):
            found.starts[index] += start
            found.stops[index] = found.starts[index] + len(payload)
            if meaning is not None:
                found.schemas[index] = len(found.meanings)
                found.meanings.append(meaning)
            return None
        if len(self._meanings) >= _MOST:
            self._meanings.clear()
            self._sizes.clear()
        self._sizes.add(len(prefix))
        self._meanings[prefix] = meaning
        return prefix

    @staticmethod
    def _is_prefix(value: bytes, prefix: bytes, payload: bytes) -> bool:
        ends = len(value) == len(prefix) + len(payload) + 1
        return ends and _BEFORE_PAYLOAD.search(prefix[-64:]) is not None


def _likely(found: Payloads) -> Indices:
    """Which values may begin with a schema, by their first bytes.

    It spares the pattern for most messages without a schema, which begin with `{"before"`.
    """
    indices = np.flatnonzero(found.stops - found.starts >= len(_FIRST) + 1)
    octets, starts = np.frombuffer(found.data, np.uint8), found.starts[indices]
    plain = (octets[starts] == _FIRST[0]) & (octets[starts + 1] == _FIRST[1])
    return indices[~plain | np.isin(octets[starts + 2], _NAMES)]


def _taken(values: Any, indices: Indices) -> Any:
    """The values at indices that ascend."""
    return values if len(indices) == len(values) else values.take(pa.array(indices))


def _mask(values: Any) -> Mask:
    return values.to_numpy(zero_copy_only=False)
