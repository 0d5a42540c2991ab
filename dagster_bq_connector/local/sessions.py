"""Storage Read: a session reads the table as it was when the session was made, or at snapshot_time.

The lake keeps every version of a table, so a session is pinned to one and nothing is copied. Query
results (dataset `_results`) never change and views have no versions; both are read as they are.

Seams: `read.translate` (puts the pin on the table of the session's query) and the handlers of
CreateReadSession and ReadRows. What is sent is in arrow.py.
"""

import contextvars
import datetime
from collections.abc import Callable
from typing import Any

import duckdb
import grpc
from google.cloud.bigquery_storage_v1 import types
from sqlglot import exp

from dagster_bq_connector.local import arrow, cdc
from dagster_bq_connector.local.faults import INVALID, StorageFault
from dagster_bq_connector.local.partitions import split
from dagster_bq_connector.local.upstream import (
    BigQueryError,
    Reference,
    database,
    errors,
    metadata,
    models,
    names,
    read,
    server,
    tables,
)

SERVICE = "google.cloud.bigquery.storage.v1.BigQueryRead"
INGESTION_TIME = "_PARTITIONTIME"
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
    _check_restriction(request.read_session.read_options.row_restriction, table)
    pin = _pinned(request, table)
    token = _pin.set(pin)
    try:
        return _created(request, table)
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


def _created(request: types.CreateReadSessionRequest, table: Reference) -> types.ReadSession:
    session = request.read_session
    if session.data_format == types.DataFormat.AVRO:
        return _create(request)
    with arrow.selecting(session):
        made = _create(request)
        columns = tables.columns(*table) if tables.exists(*table) else []
        arrow.remember(made, {column.name for column in columns if column.mode == "REQUIRED"})
    return made


def _check_restriction(restriction: str, table: Reference) -> None:
    """Upstream takes the first of several statements, and any filter once the table is pinned."""
    trees = read.parse(f"SELECT * FROM t WHERE {restriction}") if restriction else []
    if len(trees) > 1:
        raise StorageFault(INVALID, "Syntax error: Expected end of input but got ';'")
    stored = metadata.load(models.Table, *tables.physical(*table))
    if stored is None or not stored.requirePartitionFilter:
        return
    partitioning = stored.timePartitioning or stored.rangePartitioning
    field = (partitioning and partitioning.field) or INGESTION_TIME
    usable = {field.casefold()} | ({"_partitiondate"} if field == INGESTION_TIME else set())
    named = {found.name.casefold() for tree in trees for found in tree.find_all(exp.Column)}
    if not usable & named:
        text = (
            f"request failed: Cannot query over table '{'.'.join(table)}' without a filter over "
            f"column(s) '{field}' that can be used for partition elimination"
        )
        raise StorageFault(INVALID, text)


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
    arrow.install()
    server.SERVICES[SERVICE]["CreateReadSession"] = server._unary(
        create, types.CreateReadSessionRequest, types.ReadSession
    )
    server.SERVICES[SERVICE]["ReadRows"] = server._streaming(
        arrow.read_rows, types.ReadRowsRequest, types.ReadRowsResponse
    )
