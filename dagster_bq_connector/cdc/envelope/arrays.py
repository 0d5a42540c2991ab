"""Python values to Arrow, at less cost than Arrow's own conversion where they are plain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

# As many JSON documents are parsed at once: so that what they become stays in the processor's
# cache, and below the number of objects at which Python looks for garbage.
CHUNK = 1_000
_MOST_OCTETS = 2**31 - 1  # of one Arrow array of strings


def strings(values: Sequence[Any]) -> Any | None:
    """Text as an array. None when not all of the values are text, or one has the character NUL.

    Text that differs is joined, and found again by the NUL between: so no value is taken alone.
    """
    if not values or type(values[0]) is not str:
        return None
    if values[0] == values[-1] and values.count(values[0]) == len(values):
        return pa.repeat(pa.scalar(values[0], pa.string()), len(values))
    try:
        octets = "\0".join(values).encode()
    except (TypeError, UnicodeEncodeError):
        return None
    count = len(values)
    ends = np.flatnonzero(np.frombuffer(octets, np.uint8) == 0)
    if len(ends) != count - 1 or len(octets) > _MOST_OCTETS:
        return None
    offsets = np.zeros(count + 1, np.int32)
    offsets[1:-1] = ends - np.arange(count - 1)
    offsets[-1] = len(octets) - len(ends)
    data = octets.replace(b"\0", b"")
    return pa.Array.from_buffers(
        pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )


def lines(documents: Sequence[Any]) -> Any:
    """JSON documents as binary values, each with a newline after it.

    So the bytes of several values are text of which each line, or what stands for one, is JSON.
    """
    offsets = np.zeros(len(documents) + 1, np.int32)
    np.cumsum(np.fromiter(map(len, documents), np.int32, len(documents)) + 1, out=offsets[1:])
    data = b"\n".join([*documents, b""])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(documents), buffers)


def integers(values: Sequence[int | None]) -> Any:
    """64-bit integers as an array.

    Raises:
        OverflowError: One has more bits.
    """
    try:
        return pa.array(np.fromiter(values, np.int64, len(values)))
    except TypeError:  # there are nulls
        return pa.array(values, pa.int64())
