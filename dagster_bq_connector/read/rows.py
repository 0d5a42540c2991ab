"""`Rows`: what a read gives. Batches come from parallel streams, a bounded window ahead."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dagster_bq_connector.progress import Progress
from dagster_bq_connector.read.session import ReadSession
from dagster_bq_connector.read.stream import StreamReader
from dagster_bq_connector.schema.arrow import without_marks

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

WINDOW_BYTES = 64 * 1024 * 1024

OpenStream = Callable[[str, pa.Schema], StreamReader]


class Rows:
    """The rows of one or more read sessions.

    Iterate for batches, hand it to a writer, or take everything at once. The sessions are frozen,
    so that going over them again within six hours gives the same rows. Rows of different streams
    come in no order.

    Attributes:
        schema: Arrow columns of every batch.
        sessions: The read sessions behind it.
    """

    def __init__(
        self,
        sessions: Sequence[ReadSession],
        open_stream: OpenStream,
        progress: Callable[[], Progress],
    ) -> None:
        """Read `sessions`, of one schema, holding at most 64 MiB that nobody took yet."""
        self.sessions = tuple(sessions)
        self.schema = self.sessions[0].schema
        self._open_stream, self._progress = open_stream, progress

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        with self._progress() as progress:
            for session in self.sessions:
                names = self.schema.names
                readers = [self._open_stream(stream, session.source) for stream in session.streams]
                for batch in _Merged(readers, WINDOW_BYTES):
                    progress.advance(batch.num_rows)
                    yield batch.select(names)

    def __arrow_c_stream__(self, requested_schema: object = None) -> Any:
        """The Arrow C stream interface, for Polars, DuckDB and others."""
        schema = without_marks(self.schema)
        reader = pa.RecordBatchReader.from_batches(schema, (b.cast(schema) for b in self))
        return reader.__arrow_c_stream__(requested_schema)

    def to_reader(self) -> pa.RecordBatchReader:
        """A reader that fetches as it is read."""
        return pa.RecordBatchReader.from_batches(self.schema, iter(self))

    def to_arrow(self) -> pa.Table:
        """All rows as an Arrow table."""
        return pa.Table.from_batches(list(self), schema=self.schema)

    def to_polars(self) -> pl.DataFrame:
        """All rows as a Polars frame. Needs Polars."""
        import polars as pl

        frame = pl.from_arrow(self.to_arrow().cast(without_marks(self.schema)))
        assert isinstance(frame, pl.DataFrame)  # a table never becomes a series
        return frame

    def to_pandas(self) -> pd.DataFrame:
        """All rows as a pandas frame with Arrow types, so that integers with nulls stay integers.

        Needs pandas.
        """
        import pandas as pd

        return self.to_arrow().to_pandas(types_mapper=pd.ArrowDtype)


class _Merged:
    """Batches of several streams, each read in a thread of its own."""

    def __init__(self, readers: Sequence[StreamReader], window: int) -> None:
        self._readers, self._window = readers, window
        self._changed = threading.Condition()
        self._ready: deque[pa.RecordBatch] = deque()
        self._held = 0
        self._running = len(readers)
        self._error: Exception | None = None
        self._stopped = False
        self._checked = time.monotonic()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        threads = [
            threading.Thread(target=self._run, args=[reader], name="read-stream", daemon=True)
            for reader in self._readers
        ]
        try:
            for thread in threads:
                thread.start()
            while (batch := self._take()) is not None:
                yield batch
        finally:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            for reader in self._readers:
                reader.stop()

    def _take(self) -> pa.RecordBatch | None:
        with self._changed:
            while not self._ready and self._running and self._error is None:
                self._changed.wait(timeout=1.0)
                self._check_idle()
            self._check_idle()
            if self._error is not None:
                raise self._error
            if not self._ready:
                return None
            batch = self._ready.popleft()
            self._held -= batch.nbytes
            self._changed.notify_all()
            return batch

    def _check_idle(self) -> None:
        """Once a second, however often the other streams bring something."""
        if (now := time.monotonic()) - self._checked >= 1.0:
            self._checked = now
            for reader in self._readers:
                reader.check_idle()

    def _run(self, reader: StreamReader) -> None:
        error: Exception | None = None
        try:
            for batch in reader.batches():
                if not self._put(batch):
                    break
        except Exception as failure:  # noqa: BLE001  # it is raised where the rows are taken
            error = failure
        reader.stop()
        with self._changed:
            self._running -= 1
            self._error = self._error or error
            self._changed.notify_all()

    def _put(self, batch: pa.RecordBatch) -> bool:
        """Hand over a batch when there is room. False when nobody wants more."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopped or not self._held or self._held + batch.nbytes <= self._window
            )
            if self._stopped:
                return False
            self._ready.append(batch)
            self._held += batch.nbytes
            self._changed.notify_all()
            return True
