"""Offsets of Kafka partitions: as a position, as a bounded range, and whether they still hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from dagster_bq_connector.cdc.source.source import Position
from dagster_bq_connector.errors import (
    ChangesLostError,
    ConnectorError,
    SourceChangedError,
    SourceMissingError,
)

Partition: TypeAlias = tuple[str, int]  # a topic and the number of a partition
Offsets: TypeAlias = dict[Partition, int]
RESET = "give the stream another position and take a new snapshot of the source"


@dataclass(frozen=True, slots=True)
class Seen:
    """What a cluster says of some topics.

    Attributes:
        ids: What tells a topic from an earlier one of that name; empty where brokers do not say.
        first: The first offset that is there.
        end: The offset after the last that may be read: no open transaction is before it.
    """

    ids: dict[str, str]
    first: Offsets
    end: Offsets


@dataclass(frozen=True, slots=True)
class Place:
    """A position.

    Attributes:
        offsets: The next offset of each partition.
        ids: What tells a topic from one of that name that is created later, if it is known.
        begun: Of the partitions that the range to here read first, the offsets where it began.
    """

    offsets: Offsets = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    begun: Offsets = field(default_factory=dict)

    @staticmethod
    def of(position: Position | None) -> Place:
        """The place of a position; for None one before all.

        Raises:
            SourceChangedError: It is no position in Kafka.
        """
        if position is None:
            return Place()
        try:
            return Place(
                _partitions(position["offsets"]), position["ids"], _partitions(position["begun"])
            )
        except (KeyError, ValueError, AttributeError) as error:
            raise SourceChangedError(
                f"The stream's position was not taken of Kafka, which is its source: {RESET}. It "
                f"is {position!r}."
            ) from error

    def as_position(self) -> Position:
        """The same as JSON: topics, and their partitions as texts."""
        return {
            "offsets": _by_topic(self.offsets),
            "ids": self.ids,
            "begun": _by_topic(self.begun),
        }


def _partitions(topics: Mapping[str, Mapping[str, int]]) -> Offsets:
    return {
        (topic, int(partition)): offset
        for topic, offsets in topics.items()
        for partition, offset in offsets.items()
    }


def _by_topic(offsets: Offsets) -> dict[str, dict[str, int]]:
    topics: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        topics.setdefault(topic, {})[str(partition)] = offset
    return topics


def begin_of(place: Place, seen: Seen) -> Offsets:
    """Where reading goes on, of each partition that is there: a new one begins with its first.

    Raises:
        SourceChangedError: A topic is another one than the place was taken of.
        ChangesLostError: Offsets from the place on are gone.
    """
    check(place.offsets, place.ids, seen)
    return {
        partition: place.offsets.get(partition, first) for partition, first in seen.first.items()
    }


def check(offsets: Offsets, ids: Mapping[str, str], seen: Seen) -> None:
    """Refuse offsets of topics that are seen where reading cannot go on.

    Offsets of other topics are left out.

    Raises:
        SourceChangedError: A topic is another one than the offsets were taken of.
        ChangesLostError: They are before the first offset that is there.
    """
    for (topic, number), offset in sorted(offsets.items()):
        if topic not in seen.ids:
            continue
        partition = (topic, number)
        known, now = ids.get(topic), seen.ids[topic]
        if partition not in seen.end:
            raise _created_anew(topic, f"it has no partition {number} any more")
        if known and now and known != now:
            raise _created_anew(topic, f"its id is {now}, and was {known}")
        if seen.end[partition] < offset:
            raise _created_anew(
                topic,
                f"partition {number} ends at offset {seen.end[partition]}, before the position, "
                f"offset {offset}",
            )
        if offset < seen.first[partition]:
            raise ChangesLostError(
                f"{topic}[{number}]: the stream stands at offset {offset}, and the first that is "
                f"there is {seen.first[partition]}: what was between has expired or was deleted "
                f"unread. Nothing was skipped. Keep messages longer (retention.ms of the topic) "
                f"than the stream may stand still, and {RESET}."
            )


def missing(topic: str) -> ConnectorError:
    """The error for a topic that does not exist."""
    return SourceMissingError(
        f"Topic {topic!r} does not exist, or may not be seen with these credentials. Look at its "
        f"name; if it was deleted, {RESET}, or take the topic out of the stream. A topic that will "
        "only be created later is found by a pattern: topics='^…'."
    )


def _created_anew(topic: str, sign: str) -> ConnectorError:
    return SourceChangedError(
        f"Topic {topic!r} was deleted and created again, or has lost its end, since the stream "
        f"read it: {sign}. Nothing was skipped. {RESET[0].upper()}{RESET[1:]}."
    )


def share(available: Mapping[Partition, int], most: int) -> Offsets:
    """How much to read of each partition: as even as what there is allows, `most` in all.

    With more partitions than `most`, those with the most to read come first.
    """
    shares: Offsets = {}
    # From the smallest on: what one does not use is shared by those that follow.
    waiting = sorted((count, partition) for partition, count in available.items() if count > 0)
    for number, (count, partition) in enumerate(waiting):
        shares[partition] = min(count, most // (len(waiting) - number))
        most -= shares[partition]
    return shares
