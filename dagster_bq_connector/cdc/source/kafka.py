"""Changes from Kafka topics, by offsets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime

import pyarrow as pa

from dagster_bq_connector.cdc.source.kafka_broker import Broker, KafkaOptions
from dagster_bq_connector.cdc.source.kafka_offsets import (
    Offsets,
    Place,
    Seen,
    begin_of,
    check,
    share,
)
from dagster_bq_connector.cdc.source.kafka_read import RangeReader, first_times
from dagster_bq_connector.cdc.source.source import Lag, Position, Source
from dagster_bq_connector.errors import SourceChangedError

DAY_SECONDS = 86_400.0
# One message of each partition is looked at for its time, and no more is fetched than need be.
LOOK = {"fetch.message.max.bytes": 64 * 1024, "queued.max.messages.kbytes": 1024}


class KafkaMessages(Source):
    """The messages of topics of Kafka: of committed transactions, and of producers without any.

    A position is the next offset of each partition. Partitions and topics that come later are
    read from their beginning. No consumer group is used, nothing is committed to the cluster.
    Topics that the stream no longer asks for keep their place in the position.
    """

    def __init__(self, options: KafkaOptions) -> None:
        """Read what `options` say; nothing is reached yet.

        Raises:
            ConfigurationError: The package for Kafka is missing.
        """
        self._broker = Broker(options)

    def head(self) -> Position:
        """The position after all that is there now, open transactions left out.

        Raises:
            SourceMissingError: A topic that is named does not exist.
            AccessDeniedError: The cluster refuses the credentials.
            UnreachableError: No answer within the deadline.
        """
        seen = self._broker.see(())
        return Place(seen.end, seen.ids, {}).as_position()

    def plan(self, start: Position | None, max_changes: int) -> Position | None:
        """Where a range that begins at `start` should end; None when there is nothing to read.

        What it holds is shared evenly by the partitions.

        Raises:
            SourceMissingError: A topic that is named, or was read, does not exist.
            ChangesLostError: Offsets from the position on are gone.
            SourceChangedError: A topic was deleted and created again.
            AccessDeniedError: The cluster refuses the credentials.
            UnreachableError: No answer within the deadline.
        """
        place = Place.of(start)
        seen = self._broker.see({topic for topic, _ in place.offsets})
        begin = begin_of(place, seen)
        shares = share(_waiting(begin, seen), max_changes)
        if not shares:
            return None
        ends = {partition: offset + shares.get(partition, 0) for partition, offset in begin.items()}
        begun = {key: offset for key, offset in begin.items() if key not in place.offsets}
        return Place(place.offsets | ends, place.ids | seen.ids, begun).as_position()

    def read(self, start: Position | None, stop: Position) -> Iterator[pa.RecordBatch]:
        """The messages of exactly `[start, stop)`; the columns are those of `MESSAGES`.

        Those of a partition are in its order.

        Raises:
            ConnectorError: As `plan`.
        """
        end = Place.of(stop)
        begin = end.begun | Place.of(start).offsets
        if strange := next((key for key in end.offsets if key not in begin), None):
            raise SourceChangedError(
                f"The range was planned from another position than it is read from, which has no "
                f"{strange[0]}[{strange[1]}]. Nothing was read: plan it anew."
            )
        begin = {key: begin[key] for key, offset in end.offsets.items() if begin[key] < offset}
        if not begin:
            return
        seen = self._broker.see({topic for topic, _ in begin}, more=False)
        check(begin, end.ids, seen)
        check({key: end.offsets[key] for key in begin}, end.ids, _from_zero(seen))
        with closing(self._broker.consumer()) as consumer:
            yield from RangeReader(self._broker, begin, end.offsets).batches(consumer)

    def lag(self, position: Position | None) -> Lag:
        """What there is after `position`: offsets, and when the first message of them was written.

        `oldest` is None, too, when the offsets hold no message.

        Raises:
            ConnectorError: As `plan`.
        """
        place = Place.of(position)
        seen = self._broker.see({topic for topic, _ in place.offsets})
        begin = begin_of(place, seen)
        waiting = _waiting(begin, seen)
        if not waiting:
            return Lag(0, None)
        with closing(self._broker.consumer(**LOOK)) as consumer:
            times = first_times(self._broker, consumer, {key: begin[key] for key in waiting})
        return Lag(sum(waiting.values()), _time(min(times)) if times else None)


def _time(milliseconds: int) -> datetime:
    """When a message was written. A time that no clock shows yet, as of microseconds, is 1970."""
    is_time = milliseconds / 1000 < time.time() + DAY_SECONDS
    return datetime.fromtimestamp(milliseconds / 1000 if is_time else 0, UTC)


def _waiting(begin: Offsets, seen: Seen) -> Offsets:
    """How many offsets there are to read, of each partition that has some."""
    return {key: seen.end[key] - offset for key, offset in begin.items() if seen.end[key] > offset}


def _from_zero(seen: Seen) -> Seen:
    """The same, for offsets of which only the end is to be checked."""
    return Seen(seen.ids, dict.fromkeys(seen.first, 0), seen.end)
