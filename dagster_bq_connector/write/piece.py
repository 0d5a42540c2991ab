"""Rows under way, which know their place in the data that was given."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one batch; `indices` are their positions in the data, or where they begin there."""

    batch: pa.RecordBatch
    indices: np.ndarray[tuple[int], np.dtype[np.int64]] | int

    def index(self, row: int) -> int:
        """The position in the data of one of the rows."""
        return self.indices + row if isinstance(self.indices, int) else int(self.indices[row])

    def slice(self, start: int, rows: int) -> Piece:
        """Rows that follow each other."""
        if start == 0 and rows == self.batch.num_rows:
            return self
        indices = self.indices
        kept = indices + start if isinstance(indices, int) else indices[start : start + rows]
        return Piece(self.batch.slice(start, rows), kept)

    def without(self, bad: Iterable[int]) -> Piece:
        """The rows but for some."""
        good = np.setdiff1d(np.arange(self.batch.num_rows), list(bad))
        first = self.indices
        kept = good + first if isinstance(first, int) else first[good]
        return Piece(self.batch.take(pa.array(good, pa.int64())), kept)


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that was sent.

    Attributes:
        answer: What becomes of it.
        piece: Its rows.
        size: Its bytes.
        at: When it was sent, by the monotonic clock.
    """

    answer: Future[int | None]
    piece: Piece
    size: int
    at: float
