"""A read session: the rows of a table as they were when it was made, in parallel streams."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import grpc
import pyarrow as pa
from google.api_core.exceptions import GoogleAPICallError, RetryError
from google.cloud import bigquery_storage_v1
from google.cloud.bigquery_storage_v1 import types

from dagster_bq_connector.errors import (
    ConnectorError,
    Fault,
    PartitionFilterError,
    RefusedError,
    classify,
    error_text,
    explain,
)
from dagster_bq_connector.read.extensions import REDUNDANT, without_extensions
from dagster_bq_connector.read.request import ReadRequest, missing_filter
from dagster_bq_connector.retry import ANSWER_SECONDS, PASSING, Backoff

_UNFILTERED = re.compile(r"without a filter over column", re.I)


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
        PartitionFilterError: The table requires a filter on another column.
        TableNotFoundError: The table is missing, or may not be read.
        UnreachableError: No answer within the deadline.
    """
    options = types.ReadSession.TableReadOptions(row_restriction=request.restriction)
    options.selected_fields.extend(request.selected)
    wanted = types.ReadSession(
        table=request.table.path, data_format=types.DataFormat.ARROW, read_options=options
    )
    try:
        made = _create(client, wanted, f"projects/{project}", request.max_streams, deadline)
    except (GoogleAPICallError, RetryError, grpc.RpcError) as error:
        raise _explained(error, request) from error
    sent = pa.ipc.read_schema(pa.py_buffer(made.arrow_schema.serialized_schema))
    schema = without_extensions(sent, REDUNDANT)
    return ReadSession(
        name=made.name,
        streams=tuple(stream.name for stream in made.streams),
        source=schema,
        schema=_ordered(schema, request.columns),
        estimated_rows=int(made.estimated_row_count),
    )


def _create(
    client: bigquery_storage_v1.BigQueryReadClient,
    wanted: types.ReadSession,
    parent: str,
    streams: int,
    deadline: float,
) -> types.ReadSession:
    """Ask until there is an answer, the deadline counted from the first time."""
    end, pauses = time.monotonic() + deadline, Backoff(deadline=deadline).pauses()
    while True:
        left = end - time.monotonic()
        try:
            return client.create_read_session(
                parent=parent,
                read_session=wanted,
                max_stream_count=streams,
                retry=None,
                timeout=min(ANSWER_SECONDS, max(left, 0.1)),
            )
        except (GoogleAPICallError, RetryError, grpc.RpcError) as error:
            pause = next(pauses, None)
            left = end - time.monotonic()
            if classify(error) not in PASSING or pause is None or left <= 0:
                raise
        time.sleep(min(pause, left))


def _explained(error: Exception, request: ReadRequest) -> ConnectorError:
    """The error that tells what to change in the request."""
    text = error_text(error)
    if request.filter_column and _UNFILTERED.search(text):
        told = missing_filter(request.table, request.filter_column)
        return PartitionFilterError(
            f"{told} The filter was {request.restriction!r}. BigQuery said: {text}"
        )
    if request.restriction and classify(error) is Fault.REFUSED:
        return RefusedError(f"{request.table} cannot be read where {request.restriction}: {text}")
    return explain(error, f"Reading {request.table}")


def _ordered(schema: pa.Schema, columns: tuple[str, ...] | None) -> pa.Schema:
    """BigQuery gives columns in the table's order; the caller gets the order asked for."""
    if columns is None:
        return schema
    known = {name.casefold(): name for name in schema.names}
    heads = dict.fromkeys(column.partition(".")[0] for column in columns)
    if lost := [head for head in heads if head.casefold() not in known]:
        raise RefusedError(f"The server sends no column {lost[0]!r}: read all columns.")
    return pa.schema([schema.field(known[head.casefold()]) for head in heads])
