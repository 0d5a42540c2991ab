"""Records the changes that the example project replays: `python -m support.record`.

A week of bookings is made in PostgreSQL and taken to Kafka by Debezium; what comes is written to a
file a day, its messages as they came. The first file is the snapshot.
"""

import argparse
import contextlib
import datetime as dt
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Message, TopicPartition

import flights
from support.bookings import DAYS, booked
from support.chain import Chain

SEED = 20130101
FOLDER = Path(flights.__file__).parent / "data" / "changes"


def record(folder: Path) -> None:
    """Write the files anew."""
    with tempfile.TemporaryDirectory() as place, booked(Path(place), SEED) as (bookings, running):
        read = _reader(running)
        _write(folder / f"{DAYS[0] - dt.timedelta(days=1)}.ndjson", next(read))
        for day in DAYS:
            bookings.day(day)
            running.wait()
            _write(folder / f"{day}.ndjson", next(read))
        print(dict(bookings.changes), bookings.changes.total())


def _reader(running: Chain) -> Iterator[list[Message]]:
    """What the topics hold now and did not hold before, in the order of the source."""
    consumer = Consumer(
        {
            "bootstrap.servers": running.kafka.address,
            "group.id": "record",
            "log_level": 0,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    places = [TopicPartition(topic, 0, 0) for topic in running.topics()]
    consumer.assign(places)
    taken = 0
    with contextlib.closing(consumer):
        while True:
            found: list[Message] = []
            while taken + len(found) < running.messages():
                found += consumer.consume(1000, 0.5)
            taken += len(found)
            yield _in_order(found)


def _in_order(messages: Iterable[Message]) -> list[Message]:
    """By their place in the source's log; what has no value follows what it follows."""
    lsn = dict[Any, int]()
    keyed: list[tuple[int, Message]] = []
    for message in messages:
        topic = message.topic()
        if (value := message.value()) is not None:
            lsn[topic] = json.loads(value)["source"]["lsn"]
        keyed.append((lsn[topic], message))
    return [message for _, message in sorted(keyed, key=lambda pair: pair[0])]


def _write(path: Path, messages: Iterable[Message]) -> None:
    lines = [_line(message) for message in messages]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))
    print(f"{path.name}: {len(lines)} messages, {path.stat().st_size:,} bytes")


def _line(message: Message) -> str:
    key, value = _text(message.key()), _text(message.value())
    return f'{{"topic":{json.dumps(message.topic())},"key":{key},"value":{value}}}\n'


def _text(value: str | bytes | None) -> str:
    return "null" if value is None else value.decode() if isinstance(value, bytes) else value


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--folder", type=Path, default=FOLDER)
    record(arguments.parse_args().folder)
