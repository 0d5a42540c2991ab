"""Changes of one source table, applied to a table of the local BigQuery."""

from typing import Any

import pyarrow as pa
from google.cloud.bigquery import SchemaField

from dagster_bq_connector import BigQueryResource
from dagster_bq_connector.cdc.apply.upsert import Applied, Upsert
from dagster_bq_connector.cdc.envelope.debezium_json import DebeziumJson
from dagster_bq_connector.cdc.ordering.postgres import PostgresLsn
from dagster_bq_connector.cdc.table import CdcTable
from dagster_bq_connector.progress import Progress
from support.debezium import batch, event

SOURCE = "public.orders"
COLUMNS = [SchemaField("id", "INTEGER"), SchemaField("n", "INTEGER"), SchemaField("s", "STRING")]
# The same, as Kafka Connect writes it into messages.
FIELDS: list[dict[str, Any]] = [
    {"type": "int64", "field": "id"},
    {"type": "int64", "optional": True, "field": "n"},
    {"type": "string", "optional": True, "field": "s"},
]


def upsert(bigquery: BigQueryResource, tables: dict[str, CdcTable], **more: Any) -> Upsert:
    more.setdefault("format", DebeziumJson(time_precision="microseconds"))
    more.setdefault("ordering", PostgresLsn())
    return Upsert(bigquery.connect(), "shop", tables=tables, **more)


def apply(upsert: Upsert, *batches: pa.RecordBatch, **more: Any) -> Applied:
    with Progress("applying", lambda _: None) as progress:
        return upsert.apply(batches, more.pop("state", {}), progress, **more)


def orders(table: str, **more: Any) -> dict[str, CdcTable]:
    """The one table of a stream."""
    return {SOURCE: CdcTable(table, **({"schema": COLUMNS} | more))}


def change(
    op: str, lsn: int, id: Any = 1, n: Any = None, s: Any = None, **more: Any
) -> tuple[Any, Any]:
    """Key and value of a change; `more` are further columns."""
    row = None if op == "d" else {"id": id, "n": n, "s": s} | more
    return {"id": id}, event(op, row, lsn=lsn, committed=lsn - 1, ts_ms=lsn)


def changes(*given: tuple[Any, Any], **more: Any) -> pa.RecordBatch:
    return batch(*given, **more)


def rows(bigquery: BigQueryResource, table: str, columns: str = "*") -> list[tuple[Any, ...]]:
    with bigquery.get_client() as client:
        found = client.query_and_wait(f"SELECT {columns} FROM {table}")
        return sorted((tuple(row.values()) for row in found), key=repr)
