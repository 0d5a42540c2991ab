"""What every ordering profile does: from a source's coordinates to `_CHANGE_SEQUENCE_NUMBER`."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dagster_bq_connector.cdc.event import Events, FailedEvent, Mask

State: TypeAlias = Mapping[str, Any]  # JSON, in the ledger entry of the stream
Unsigned: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint64]]"

_compute: Any = pc  # its stubs know a part of what it takes
_MAXIMUM = "18446744073709551615"


class OrderingProfile(abc.ABC):
    """The rule that turns source coordinates into a sequence, and notices when order is lost."""

    @property
    @abc.abstractmethod
    def coordinates(self) -> Sequence[str]:
        """What it needs of the envelope: dotted paths, as `source.lsn`.

        They come as `Events.changes` has them; what is null or absent is null.
        """

    @abc.abstractmethod
    def sequences(self, changes: pa.RecordBatch) -> tuple[pa.Array[Any], list[FailedEvent]]:
        """Give each change its place in the order of the source.

        Args:
            changes: As in `Events.changes`.

        Returns:
            Strings of one to four sections of 16 digits, null for changes that failed; and those.
        """

    @abc.abstractmethod
    def advance(self, state: State, events: Events) -> State:
        """Take note of changes, before they are applied.

        Args:
            state: What the last call returned; empty at the beginning.
            events: Changes, in the order of their arrival.

        Returns:
            The new state: JSON that does not grow.

        Raises:
            OrderBreakError: The source's order is lost: what is seen is more than a redelivery.
                What `acknowledge` needs of it stands in the error, and then in its state.
        """

    @abc.abstractmethod
    def acknowledge(self, state: State) -> State:
        """The state after an operator has dealt with a break: it lets the stream go on.

        What stands before the break in its plan comes again, before the break itself does.
        """


def unsigned(values: Any) -> tuple[Unsigned, Mask]:
    """Unsigned 64-bit decimals as numbers.

    Args:
        values: A coordinate; nulls among them.

    Returns:
        The numbers, and where they are right; a wrong one, and a null, is 0.
    """
    if pa.types.is_integer(values.type):
        numbers = _compute.fill_null(values, -1).to_numpy()
        return np.maximum(numbers, 0).view(np.uint64), numbers >= 0
    return _unsigned_texts(values)


def _unsigned_texts(texts: Any) -> tuple[Unsigned, Mask]:
    right = _compute.ascii_is_decimal(texts)
    lengths = _compute.binary_length(texts)
    if _compute.any(_compute.starts_with(texts, "0")).as_py():
        zeros = _compute.and_(_compute.starts_with(texts, "0"), _compute.greater(lengths, 1))
        right = _compute.and_(right, _compute.invert(zeros))
    if (_compute.max(lengths).as_py() or 0) >= len(_MAXIMUM):
        # Of as many digits as the maximum, texts compare as numbers do.
        fits = _compute.and_(
            _compute.equal(lengths, len(_MAXIMUM)), _compute.less_equal(texts, _MAXIMUM)
        )
        right = _compute.and_(right, _compute.or_(_compute.less(lengths, len(_MAXIMUM)), fits))
    right = _compute.fill_null(right, False)
    found = right.to_numpy(zero_copy_only=False)
    digits = texts if found.all() else _compute.if_else(right, texts, "0")
    return digits.cast(pa.uint64()).to_numpy(), found


def decimals(digits: Any, count: int) -> Unsigned:
    """Numbers from their digits.

    Args:
        digits: ASCII, at most 19 rows: the first digit of each number, the second, and so on.
        count: How many numbers there are.
    """
    found = np.zeros(count, np.uint64)
    for row in digits:
        found *= np.uint64(10)
        found += row - np.uint8(ord("0"))
    return found


def sequence_texts(sections: Sequence[Unsigned], right: Mask) -> pa.Array[Any]:
    """Sections as text: 16 uppercase digits each, with a slash between; null where not `right`."""
    count, width = len(right), 17 * len(sections) - 1
    text = np.full((count, width), ord("/"), np.uint8)
    for place, section in enumerate(sections):
        digits = section.astype(">u8").tobytes().hex().upper().encode()
        text[:, place * 17 : place * 17 + 16] = np.frombuffer(digits, np.uint8).reshape(count, 16)
    valid = None if right.all() else pa.py_buffer(np.packbits(right, bitorder="little"))
    offsets = np.arange(0, count * width + 1, width, dtype=np.int32)
    buffers = [valid, pa.py_buffer(offsets), pa.py_buffer(text)]
    return pa.Array.from_buffers(pa.string(), count, buffers)


def field_values(changes: pa.RecordBatch, path: str) -> Any:
    """The values of one coordinate."""
    coordinates: Any = changes.column("coordinates")
    return coordinates.field(path)


def failures(
    changes: pa.RecordBatch, wrong: Mask, path: str, texts: Any, reason: str
) -> list[FailedEvent]:
    """The changes that fail for what one coordinate is."""
    rows = np.flatnonzero(wrong)
    if not len(rows):
        return []
    taken = pa.array(rows, pa.int64())
    messages: list[Any] = changes.column("message").take(taken).to_pylist()
    values = texts.take(taken).to_pylist()
    return [
        FailedEvent(message, path, f"{'null' if value is None else value} {reason}")
        for message, value in zip(messages, values, strict=True)
    ]
