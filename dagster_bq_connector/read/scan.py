"""A table as a Polars LazyFrame, of which only what a query needs is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from dagster_bq_connector.read.extensions import without_extensions
from dagster_bq_connector.read.frames import polars_schema
from dagster_bq_connector.read.rows import Rows

if TYPE_CHECKING:
    import polars as pl

OpenRows = Callable[[Sequence[str] | None], Rows]


def scan_rows(open_rows: OpenRows, schema: pa.Schema) -> pl.LazyFrame:
    """A frame that reads when it is collected.

    Args:
        open_rows: Opens a read of these columns, of all when None. It is called once for each time
            that the frame is collected, or for each of the plan's scans that Polars could not
            make one.
        schema: All columns, as `Rows.schema` gives them.
    """
    import polars as pl
    from polars.io.plugins import register_io_source

    empty = pl.DataFrame(polars_schema(without_extensions(schema)).empty_table())

    def read(
        columns: list[str] | None,
        predicate: pl.Expr | None,
        rows: int | None,
        batch_rows: int | None,
    ) -> Iterator[pl.DataFrame]:
        left = rows
        for frame in open_rows(columns).iter_polars():
            if left is not None:
                frame = frame.head(left)
                left -= frame.height
            if predicate is not None:
                frame = frame.filter(predicate)
            yield from frame.iter_slices(batch_rows) if batch_rows else [frame]
            if left == 0:
                return

    return register_io_source(read, schema=empty.schema)
