"""A read session: the rows of a table as they were when it was made, in parallel streams."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
import pyarrow as pa
from google.api_core.exceptions import GoogleAPICallError, RetryError
from google.cloud import bigquery_storage_v1
from google.cloud.bigquery_storage_v1 import types

from dagster_bq_connector.errors import Fault, RefusedError, classify, error_text, explain
from dagster_bq_connector.read.request import ReadRequest
from dagster_bq_connector.retry import Backoff


@dataclass(frozen=True)
class ReadSession:
    """A session that the service holds for at least six hours. It can be pickled.

    Attributes:
        name: The session's resource name.
        streams: The resource names of its read streams; none when the table has no rows.
        source: Arrow columns as the service sends them, in the table's order.
        schema: The same columns in the order that was asked for.
        estimated_rows: How many rows there may be.
    """

    name: str
    streams: tuple[str, ...]
    source: pa.Schema
    schema: pa.Schema
    estimated_rows: int


def create_session(
    client: bigquery_storage_v1.BigQueryReadClient,
    request: ReadRequest,
    project: str,
    deadline: float,
) -> ReadSession:
    """Make a read session.

    Args:
        client: The Storage Read client.
        request: What to read.
        project: The project that is billed.
        deadline: Seconds to try for.

    Raises:
        RefusedError: The row filter is wrong, or the table cannot be read so.
        TableNotFoundError: The table is missing, or may not be read.
        UnreachableError: No answer within the deadline.
    """
    options = types.ReadSession.TableReadOptions(row_restriction=request.restriction)
    options.selected_fields.extend(request.columns or ())
    wanted = types.ReadSession(
        table=request.table.path, data_format=types.DataFormat.ARROW, read_options=options
    )
    try:
        made = Backoff(deadline=deadline).call(
            lambda: client.create_read_session(
                parent=f"projects/{project}",
                read_session=wanted,
                max_stream_count=request.max_streams,
                retry=None,
                timeout=min(60.0, deadline),
            )
        )
    except (GoogleAPICallError, RetryError, grpc.RpcError) as error:
        if request.restriction and classify(error) is Fault.REFUSED:
            raise RefusedError(
                f"{request.table} cannot be read where {request.restriction}: {error_text(error)}"
            ) from error
        raise explain(error, f"Reading {request.table}") from error
    schema = pa.ipc.read_schema(pa.py_buffer(made.arrow_schema.serialized_schema))
    return ReadSession(
        name=made.name,
        streams=tuple(stream.name for stream in made.streams),
        source=schema,
        schema=_ordered(schema, request.columns),
        estimated_rows=int(made.estimated_row_count),
    )


def _ordered(schema: pa.Schema, columns: tuple[str, ...] | None) -> pa.Schema:
    """BigQuery gives columns in the table's order; the caller gets the order asked for."""
    if columns is None:
        return schema
    known = {name.casefold(): name for name in schema.names}
    if lost := [c for c in columns if c.partition(".")[0].casefold() not in known]:
        raise RefusedError(f"The server sends no column {lost[0]!r}: read the whole struct.")
    heads = dict.fromkeys(known[column.partition(".")[0].casefold()] for column in columns)
    return pa.schema([schema.field(name) for name in heads])
