"""Appends that another process makes: a module that it can import."""

from typing import Any

import pyarrow as pa

from dagster_bq_connector import BigQueryResource, DefaultStreamWriter


def append_ids(writer: DefaultStreamWriter, table: str, start: int, stop: int) -> None:
    """Append the ids of a range, a few rows a request."""
    rows = pa.table({"id": pa.array(range(start, stop), pa.int64())})
    assert writer.append(rows.to_reader(max_chunksize=30), table).rows == stop - start


def append_from_fields(fields: dict[str, Any], table: str, start: int, stop: int) -> None:
    """The same with a resource of its own: Dagster's are not to be pickled."""
    append_ids(DefaultStreamWriter(bigquery=BigQueryResource(**fields)), table, start, stop)
