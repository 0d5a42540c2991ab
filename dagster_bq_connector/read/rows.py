"""`Rows`: what a read gives. Batches come from parallel streams, a bounded window ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dagster_bq_connector.progress import Progress
from dagster_bq_connector.read.extensions import without_extensions
from dagster_bq_connector.read.frames import pandas_type, polars_batch, polars_schema
from dagster_bq_connector.read.merged import Merged
from dagster_bq_connector.read.session import ReadSession
from dagster_bq_connector.read.stream import StreamReader

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

MIB = 1024 * 1024
# What a read adds to the memory of its process at most, while nobody takes the rows. Messages may
# take what is left of it by gRPC and the allocators: that was measured with messages of 1.2 MB and
# one to eight streams (benchmarks/read.py).
WINDOW_BYTES = 96 * MIB
_BASE_BYTES = 32 * MIB
_STREAM_BYTES = 6 * MIB

OpenStream = Callable[[str], StreamReader]


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
        """Read `sessions`, which have one schema. Nothing is fetched yet."""
        self.sessions = tuple(sessions)
        self.schema = self.sessions[0].schema
        self._open_stream, self._progress = open_stream, progress

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self._read(lambda schema: schema)

    def __arrow_c_stream__(self, requested_schema: object = None) -> Any:
        """The Arrow C stream interface, for Polars, DuckDB and others.

        JSON and GEOGRAPHY are plain strings there: others do not know BigQuery's extension types.
        """
        schema = without_extensions(self.schema)
        reader = pa.RecordBatchReader.from_batches(schema, self._read(without_extensions))
        return reader.__arrow_c_stream__(requested_schema)

    def to_reader(self) -> pa.RecordBatchReader:
        """A reader that fetches as it is read."""
        return pa.RecordBatchReader.from_batches(self.schema, iter(self))

    def to_arrow(self) -> pa.Table:
        """All rows as an Arrow table."""
        return pa.Table.from_batches(list(self), schema=self.schema)

    def to_polars(self) -> pl.DataFrame:
        """All rows as a Polars frame. Needs Polars.

        Polars has no type for BIGNUMERIC and INTERVAL: the first becomes text, which `cast` to a
        `pl.Decimal` understands, the second a struct of months, days and nanoseconds.
        """
        import polars as pl

        schema = polars_schema(without_extensions(self.schema))
        batches = [polars_batch(batch) for batch in self._read(without_extensions)]
        table = pa.Table.from_batches(batches, schema=schema)
        frame = pl.from_arrow(table, rechunk=False)  # a copy that few queries need
        assert isinstance(frame, pl.DataFrame)  # a table never becomes a series
        return frame

    def iter_polars(self) -> Iterator[pl.DataFrame]:
        """The rows as Polars frames of some thousand rows, as they come; see `to_polars`."""
        import polars as pl

        for batch in self._read(without_extensions):
            # By way of a table: without columns, Polars takes the number of rows from it alone.
            frame = pl.from_arrow(pa.Table.from_batches([polars_batch(batch)]))
            assert isinstance(frame, pl.DataFrame)
            yield frame

    def to_pandas(self) -> pd.DataFrame:
        """All rows as a pandas frame with Arrow types, so that integers with nulls stay integers.

        Needs pandas. INTERVAL columns hold DateOffset objects.
        """
        return self.to_arrow().to_pandas(types_mapper=pandas_type)

    def _read(self, change: Callable[[pa.Schema], pa.Schema]) -> Iterator[pa.RecordBatch]:
        """The batches, with the schema changed in names and metadata only."""
        names = self.schema.names
        with self._progress() as progress:
            for session in self.sessions:
                source = change(session.source)
                readers = [self._open_stream(stream) for stream in session.streams]
                with closing(iter(Merged(readers, _held(len(readers))))) as messages:
                    for message in messages:
                        progress.advance(message.rows)
                        batch = message.decode(source).select(names)
                        del message  # its memory is not needed any more
                        yield batch
                        del batch


def _held(streams: int) -> int:
    """Bytes that a read of so many streams holds."""
    return WINDOW_BYTES - _BASE_BYTES - streams * _STREAM_BYTES
