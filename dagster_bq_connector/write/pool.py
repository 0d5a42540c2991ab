"""Several connections to one write stream, for what one alone is too slow for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias

from dagster_bq_connector.write.connection import WINDOW_BYTES, Connection, Turnstile

# In flight over all connections, unless each then had too little for a few requests.
POOL_BYTES = 64 * 1024 * 1024
SMALLEST_WINDOW = 4 * 1024 * 1024

Connect: TypeAlias = Callable[[int, Turnstile, int], Connection]


class Pool:
    """Sends each request over the connection with the least in flight.

    A call is opened when all those before it have something in flight. A connection that breaks
    sends its own requests again, and the others go on.
    """

    def __init__(self, connect: Connect, count: int) -> None:
        """Prepare `count` connections; no call is opened yet.

        Args:
            connect: Makes the connection of a number, from 0, with a window of so many bytes.
            count: How many; 1 or more.
        """
        self._connect, self._turnstile = connect, Turnstile()
        self._window = max(SMALLEST_WINDOW, min(WINDOW_BYTES, POOL_BYTES // count))
        self._connections = [self._make(number) for number in range(count)]
        self._reconnects = 0  # of connections that are gone

    def send(self, payload: bytes) -> Future[int | None]:
        """Queue one request; wait while all windows are full.

        Returns, and raises when no connection is left that has not failed, as `Connection.send`.
        """
        with self._turnstile.lock:
            while True:
                alive = [each for each in self._connections if not each.failed]
                if free := [each for each in alive if each.takes(len(payload))]:
                    return min(free, key=lambda each: each.load).send(payload)
                if not alive:
                    return self._connections[0].send(payload)
                self._turnstile.room.wait()

    @property
    def reconnects(self) -> int:
        """How often a call broke while requests were under way."""
        return self._reconnects + sum(each.reconnects for each in self._connections)

    @property
    def updated_schema(self) -> Any:
        """The table's schema, once a server has told a connection that it changed."""
        told = (each.updated_schema for each in self._connections)
        return next((schema for schema in told if schema is not None), None)

    def mend(self) -> None:
        """Put new connections in the place of those that failed for good."""
        for number, each in enumerate(self._connections):
            if each.failed:
                each.abandon()
                self._replace(number)

    def renew(self) -> None:
        """Wait for all answers, then put new connections in the place of all."""
        self.close()
        for number in range(len(self._connections)):
            self._replace(number)

    def close(self) -> None:
        """Wait for all answers, then end the calls."""
        for each in self._connections:
            each.close()

    def abandon(self) -> None:
        """End the calls now. Requests without answer fail."""
        for each in self._connections:
            each.abandon()

    def _make(self, number: int) -> Connection:
        return self._connect(number, self._turnstile, self._window)

    def _replace(self, number: int) -> None:
        self._reconnects += self._connections[number].reconnects
        self._connections[number] = self._make(number)
