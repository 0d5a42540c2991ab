"""The rows of several read streams, fetched ahead within a window of bytes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Sequence

from dagster_bq_connector.read.message import Message
from dagster_bq_connector.read.stream import StreamReader


class Merged:
    """Reads each stream in a thread of its own, and hands the messages on as they come.

    What is fetched but not taken stays within a window. A message counts from when it is asked
    for, as large as the largest so far. So only one that is larger than any before, or than its
    stream's share of the window, can pass the window.
    """

    def __init__(self, readers: Sequence[StreamReader], window: int) -> None:
        """Prepare to read; no thread is started before the first message is asked for.

        Args:
            readers: The streams.
            window: Bytes of messages held at most.
        """
        self._readers, self._window = readers, window
        self._lock = threading.Lock()
        self._arrived, self._room = (threading.Condition(self._lock) for _ in range(2))
        self._ready: deque[Message] = deque()
        self._held = 0  # bytes of what is ready
        self._fetching = 0  # messages asked for
        self._largest = 0
        # Nobody expects more than his share, so that all can fetch at once.
        self._share = self._expected = window // max(1, len(readers))
        self._running = len(readers)
        self._error: Exception | None = None
        self._stopped = False
        self._checked = time.monotonic()

    def __iter__(self) -> Generator[Message]:
        threads = [
            threading.Thread(target=self._run, args=[reader], name="read-stream", daemon=True)
            for reader in self._readers
        ]
        try:
            for thread in threads:
                thread.start()
            while (message := self._take()) is not None:
                yield message
                del message  # it is the consumer's now, who may have dropped it
        finally:
            with self._lock:
                self._stopped = True
                self._room.notify_all()
            for reader in self._readers:
                reader.stop()

    def _take(self) -> Message | None:
        with self._lock:
            while not self._ready and self._running and self._error is None:
                self._arrived.wait(timeout=1.0)
                self._check_idle()
            self._check_idle()
            if self._error is not None:
                raise self._error
            if not self._ready:
                return None
            message = self._ready.popleft()
            self._held -= message.data.nbytes
            self._room.notify_all()
            return message

    def _check_idle(self) -> None:
        """Once a second, however often the other streams bring something."""
        if (now := time.monotonic()) - self._checked >= 1.0:
            self._checked = now
            for reader in self._readers:
                reader.check_idle()

    def _run(self, reader: StreamReader) -> None:
        error: Exception | None = None
        try:
            messages = reader.messages()
            while self._may_fetch():
                message = next(messages, None)
                self._put(message)
                if message is None:
                    break
                del message
        except Exception as failure:  # noqa: BLE001  # it is raised where the rows are taken
            error = failure
        reader.stop()
        with self._lock:
            self._running -= 1
            self._error = self._error or error
            self._arrived.notify_all()

    def _may_fetch(self) -> bool:
        """Wait until there is room for one more message. False when nobody wants more."""
        with self._lock:
            self._room.wait_for(self._has_room)
            self._fetching += 1
            return not self._stopped

    def _has_room(self) -> bool:
        coming = (self._fetching + 1) * self._expected
        alone = not self._fetching and not self._ready
        return self._stopped or alone or self._held + coming <= self._window

    def _put(self, message: Message | None) -> None:
        with self._lock:
            self._fetching -= 1
            if message is not None:
                size = message.data.nbytes
                self._ready.append(message)
                self._held += size
                self._largest = max(self._largest, size)
                self._expected = min(self._share, self._largest)
            self._arrived.notify_all()
            self._room.notify_all()  # less may be expected than before
