"""The last change of each key. Rows are not looked at: only which of them remain is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dagster_bq_connector.cdc.event import Indices

_compute: Any = pc  # its stubs know a part of what it takes


def fold(keys: pa.Array[Any], tables: pa.Array[Any], sequences: pa.Array[Any]) -> Indices:
    """Find the change of each key that remains.

    Args:
        keys: Canonical keys; none is null.
        tables: Of each change its table; a dictionary.
        sequences: `_CHANGE_SEQUENCE_NUMBER` as an ordering profile writes it: sections of 16
            digits, so that the order of texts is that of numbers. None is null.

    Returns:
        Indices of changes in ascending order, one for each key of each table: the one with the
        greatest sequence, among equals the one that came last, as BigQuery has it.
    """
    if not len(keys):
        return np.empty(0, np.int64)
    codes = _codes(keys) + _codes(tables) * len(keys)
    if codes.max() >= len(keys):  # several tables
        codes = np.unique(codes, return_inverse=True)[1]
    last = np.full(int(codes.max()) + 1, -1, np.int64)
    order = _order(sequences)
    # Of several values assigned to one place, the last one stays.
    last[codes[order]] = order
    return np.sort(last[last >= 0])


def _codes(values: Any) -> Indices:
    encoded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    return encoded.indices.cast(pa.int64()).to_numpy()


def _order(sequences: Any) -> Indices:
    """The order by sequence, and of arrival among equals."""
    if (
        len(sequences) < 2
        or _compute.all(_compute.less_equal(sequences[:-1], sequences[1:])).as_py()
    ):
        return np.arange(len(sequences))
    sections = _sections(sequences)
    if sections is None:
        return _compute.array_sort_indices(sequences).to_numpy().astype(np.int64)
    return np.lexsort(sections[::-1])


def _sections(sequences: Any) -> list[Any] | None:
    """The sections as numbers; None when not all sequences have as many of 16 digits."""
    _, offsets, data = sequences.buffers()
    count = len(sequences)
    bounds = np.frombuffer(offsets, np.int32, count + 1, sequences.offset * 4)
    width = int(bounds[1] - bounds[0])
    if (width + 1) % 17 or not (np.diff(bounds) == width).all():
        return None
    digits = np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]].reshape(count, width)
    found: list[Any] = []
    for start in range(0, width, 17):
        nibbles = digits[:, start : start + 16] - np.uint8(48)
        nibbles -= (nibbles > 9).astype(np.uint8) * np.uint8(7)  # of A to F
        pairs = np.ascontiguousarray(nibbles[:, ::2] << 4 | nibbles[:, 1::2])
        found.append(pairs.view(">u8")[:, 0].astype(np.uint64))
    return found
