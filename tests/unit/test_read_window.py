"""How much of a read is held while nobody takes it, with streams that are only counted."""

import itertools
import random
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from dagster_bq_connector.read.merged import Merged
from dagster_bq_connector.read.message import Message

WINDOW = 10_000


class Held:
    """Bytes that were fetched and not taken."""

    def __init__(self) -> None:
        self.bytes = self.peak = 0
        self.lock = threading.Lock()

    def add(self, size: int) -> None:
        with self.lock:
            self.bytes += size
            self.peak = max(self.peak, self.bytes)


class CountedReader:
    """Stands for a StreamReader: its messages count as held from when they are fetched."""

    def __init__(self, held: Held, sizes: Sequence[int]) -> None:
        self.held, self.sizes, self.stopped = held, sizes, False

    def messages(self) -> Iterator[Message]:
        for size in self.sizes:
            self.held.add(size)
            yield Message(1, memoryview(bytes(size)))

    def stop(self) -> None:
        self.stopped = True

    def check_idle(self) -> None:
        pass


def taken(merged: Merged, held: Held) -> Iterator[int]:
    for message in merged:
        held.add(-message.data.nbytes)
        yield message.data.nbytes


@pytest.mark.parametrize("streams", [1, 2, 8])
def test_what_is_held_fills_the_window_and_no_more(streams: int) -> None:
    """Public failure case 59: a consumer that takes one message and then rests."""
    size = 500
    held = Held()
    readers = [CountedReader(held, [size] * 200) for _ in range(streams)]
    messages = taken(Merged(readers, WINDOW), held)  # type: ignore[arg-type]
    assert next(messages) == size
    end = time.monotonic() + 20
    while held.bytes < WINDOW:
        assert time.monotonic() < end, f"only {held.bytes} are held"
        time.sleep(0.01)
    for _ in itertools.islice(messages, 50):  # room for more comes and goes
        pass
    assert sum(messages) == (streams * 200 - 51) * size
    assert held.peak <= WINDOW
    assert all(reader.stopped for reader in readers)


@pytest.mark.parametrize("streams", [1, 3, 8])
def test_messages_of_any_size_come_through(streams: int) -> None:
    """Larger ones than the window too, one at a time in each stream."""
    sizes = random.Random(streams).choices([1, 10, 5_000, 15_000], k=100)
    held = Held()
    merged = Merged([CountedReader(held, sizes) for _ in range(streams)], WINDOW)  # type: ignore[arg-type]
    assert sum(taken(merged, held)) == streams * sum(sizes)
    assert held.bytes == 0
    assert held.peak <= WINDOW + streams * max(sizes)
