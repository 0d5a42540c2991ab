"""Storage Read: a session reads the table as it was when the session was made, or at snapshot_time.

The lake keeps every version of a table, so a session is pinned to one and nothing is copied. Query
results (dataset `_results`) never change and views have no versions; both are read as they are.

Seams: `read.translate` (puts the pin on the table of the session's query) and the handler of
CreateReadSession.
"""

import contextvars
import datetime
from collections.abc import Callable
from typing import Any

import duckdb
import grpc
import pyarrow as pa
from google.cloud.bigquery_storage_v1 import types
from sqlglot import exp

from dagster_bq_connector.local import arrow_rows, cdc
from dagster_bq_connector.local.faults import INVALID, StorageFault
from dagster_bq_connector.local.partitions import split
from dagster_bq_connector.local.upstream import (
    BigQueryError,
    Reference,
    database,
    errors,
    names,
    read,
    server,
    tables,
)

SERVICE = "google.cloud.bigquery.storage.v1.BigQueryRead"
_pin: contextvars.ContextVar[exp.HistoricalData | None] = contextvars.ContextVar(
    "pin", default=None
)
_translate, _create = read.translate, read.create_session


def translate(tree: Any, context: Any) -> Any:
    if (pin := _pin.get()) and (table := tree.find(exp.Table)):
        table.set(
            "when", pin.copy()
        )  # breadth first: the session's own, never one of its restriction
    return _translate(tree, context)


def _pinned(request: types.CreateReadSessionRequest, table: Reference) -> exp.HistoricalData | None:
    modifiers = request.read_session.table_modifiers
    if "snapshot_time" in modifiers:
        moment: Any = modifiers.snapshot_time  # a datetime, whatever the stub says
        if moment > datetime.datetime.now(datetime.UTC):
            text = f"Invalid snapshot time {moment.isoformat()}: it is in the future."
            raise StorageFault(INVALID, text)
        literal = exp.cast(exp.Literal.string(moment.isoformat()), "TIMESTAMPTZ")
        return exp.HistoricalData(this="AT", kind="TIMESTAMP", expression=literal)
    objects = database.objects(*tables.physical(*table))
    if table[1] == tables.RESULTS or not objects or objects[0][1] != "TABLE":
        return None
    # A version, not the clock: a commit under way may carry an earlier time than now.
    [(version,)] = database.fetch("SELECT id FROM ducklake_current_snapshot(?)", [table[0]])
    number = exp.Literal.number(version)
    return exp.HistoricalData(this="AT", kind="VERSION", expression=number)


def create_session(request: types.CreateReadSessionRequest) -> types.ReadSession:
    table = read.table(request.read_session.table)
    if split(table[2])[1] is not None:
        text = (
            f"Partition decorators are not supported in the Storage Read API: {table[2]}. "
            "Use a row restriction."
        )
        raise StorageFault(INVALID, text)
    pin = _pinned(request, table)
    token = _pin.set(pin)
    try:
        return _marked(_create(request), table)
    except (BigQueryError, duckdb.Error) as error:
        travels = pin is not None and pin.text("kind") == "TIMESTAMP"
        absent = "snapshot" in str(error) or errors.from_exception(error).reason == "notFound"
        if travels and absent and tables.exists(*table):
            label = names.label(*table)
            text = f"Invalid time travel timestamp for table {label}: it did not exist then."
            raise StorageFault(INVALID, text) from error
        raise
    finally:
        _pin.reset(token)


def _marked(session: types.ReadSession, table: Reference) -> types.ReadSession:
    """The session, whose Arrow schema says which text is JSON and which struct a RANGE."""
    if serialized := session.arrow_schema.serialized_schema:
        schema = pa.ipc.read_schema(pa.py_buffer(serialized))
        schema = arrow_rows.marked(schema, tables.columns(*table))
        session.arrow_schema = types.ArrowSchema(serialized_schema=schema.serialize().to_pybytes())
    return session


def refusing_streamed(create: Callable[..., types.ReadSession]) -> Callable[..., types.ReadSession]:
    def inner(request: types.CreateReadSessionRequest) -> types.ReadSession:
        table = request.read_session.table
        if cdc.is_streamed(read.table(table)):
            text = (
                f"Table {table} has pending change data capture and cannot be read with the "
                "Storage Read API."
            )
            raise StorageFault(grpc.StatusCode.FAILED_PRECONDITION, text)
        return create(request)

    return inner


def install(refuse_streamed: bool = False) -> None:
    read.translate = translate
    create = refusing_streamed(create_session) if refuse_streamed else create_session
    server.SERVICES[SERVICE]["CreateReadSession"] = server._unary(
        create, types.CreateReadSessionRequest, types.ReadSession
    )
