"""What every source of changes offers, and the words for where it stands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

# A batch holds about this much at most, whatever a source has: what is read of a source and not
# yet applied is a few batches. One message may be larger.
BATCH_ROWS = 10_000
BATCH_BYTES = 8 * 1024 * 1024


# Where a stream stands in its source: a JSON object that only the source understands.
Position: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Lag:
    """What of a source has not been read.

    Attributes:
        changes: How many messages. Of Kafka at most so many, since offsets may hold no message;
            of files exact in the first 16 MiB and estimated from these for the rest.
        oldest: Since when the oldest of them has been waiting, or a time shortly before; None
            when there is none.
        bytes: Their size, when the source tells.
        files: In how many files they are, when they are in files.
    """

    changes: int
    oldest: datetime | None
    bytes: int | None = None
    files: int | None = None


class Source(Protocol):
    """A source of changes whose ranges can be read as often as needed.

    Each method answers or raises within the source's deadline. A method raises `UnreachableError`
    when the source does not answer, `AccessDeniedError` when it refuses the credentials,
    `SourceMissingError` when what should be read does not exist, `ChangesLostError` when changes
    after the position are gone, and `SourceChangedError` when the source is not the one that the
    position was taken of. None of them moves anything: after one, the position is what it was.
    """

    def head(self) -> Position:
        """The position after all that is there now."""
        ...

    def plan(self, start: Position | None, max_changes: int) -> Position | None:
        """Where a range that begins at `start` should end.

        Args:
            start: Where the stream stands; None for the beginning of the source.
            max_changes: How many messages the range may hold, at least 1.

        Returns:
            The position after its last message; None when there is nothing to read.
        """
        ...

    def read(self, start: Position | None, stop: Position) -> Iterator[pa.RecordBatch]:
        """The messages of exactly `[start, stop)`, with the columns of `MESSAGES`.

        Args:
            start: What the range was planned from.
            stop: What `plan` answered.

        Returns:
            Batches of at most `BATCH_ROWS` messages and about `BATCH_BYTES`, each batch of one
            order: that of the source. No batch is empty.
        """
        ...

    def lag(self, position: Position | None) -> Lag:
        """What there is after `position`, or at all when it is None."""
        ...
