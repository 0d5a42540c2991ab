"""Change events in tables of the local BigQuery: what every operation becomes."""

from decimal import Decimal
from typing import Any

import pytest
from google.cloud.bigquery import SchemaField

from dagster_bq_connector import BigQueryResource
from dagster_bq_connector.cdc.apply.upsert import Applied, Upsert
from dagster_bq_connector.cdc.envelope.debezium_json import DebeziumJson
from dagster_bq_connector.cdc.event import Fate
from dagster_bq_connector.cdc.ordering.postgres import PostgresLsn
from dagster_bq_connector.cdc.table import CdcTable
from dagster_bq_connector.progress import Progress
from support.debezium import captured

ORDERS_COLUMNS = [
    SchemaField("id", "INTEGER", "REQUIRED"),
    SchemaField("customer", "STRING", "REQUIRED"),
    SchemaField("amount", "NUMERIC", precision=10, scale=2),
    SchemaField("updated_at", "TIMESTAMP", "REQUIRED"),
    SchemaField("note", "STRING"),
]
COMPOSITE_COLUMNS = [
    SchemaField("a", "INTEGER"),
    SchemaField("b", "STRING"),
    SchemaField("v", "INTEGER"),
]


def upsert(bigquery: BigQueryResource, tables: dict[str, CdcTable], **more: Any) -> Upsert:
    more.setdefault("format", DebeziumJson(time_precision="microseconds"))
    more.setdefault("ordering", PostgresLsn(transaction_order=True))
    return Upsert(bigquery.connect(), "shop", tables=tables, **more)


def apply(upsert: Upsert, *batches: Any) -> Applied:
    with Progress("applying", lambda _: None) as progress:
        return upsert.apply(batches, {}, progress)


def rows(bigquery: BigQueryResource, table: str, columns: str = "*") -> list[tuple[Any, ...]]:
    with bigquery.get_client() as client:
        found = client.query_and_wait(f"SELECT {columns} FROM {table}")
        return sorted((tuple(row.values()) for row in found), key=repr)


@pytest.mark.parametrize("schemas", [True, False], ids=["with schemas", "plain"])
def test_a_captured_run_ends_in_the_tables_of_the_source(
    bigquery: BigQueryResource, dataset: str, schemas: bool
) -> None:
    more: dict[str, Any] = {} if schemas else {"schema": ORDERS_COLUMNS}
    composite = {} if schemas else {"schema": COMPOSITE_COLUMNS}
    tables = {
        "public.orders": CdcTable(f"{dataset}.orders", **more),
        "public.composite": CdcTable(f"{dataset}.composite", **composite),
    }
    applied = apply(upsert(bigquery, tables), captured(schemas))
    assert rows(bigquery, f"{dataset}.orders", "id, customer, CAST(amount AS NUMERIC), note") == [
        (1, "ann", Decimal("100.99"), None),
        (1001, "bob", None, None),
        (4, "t1", Decimal(4), None),
        (6, "d", Decimal(6), None),
    ]
    assert rows(bigquery, f"{dataset}.composite") == [(1, "y", 2)]
    assert applied.messages == 80
    assert applied.fates == {
        Fate.change: 32,
        Fate.tombstone: 6,
        Fate.truncate: 1,
        Fate.heartbeat: 4,
        Fate.transaction: 36,
        Fate.logical_message: 1,
    }
    assert applied.others == {"public.types": 6, "public.toast": 4, "public.nopk": 1}
    orders = applied.tables["public.orders"]
    assert (orders.upserts, orders.deletes, orders.superseded, orders.failed) == (4, 3, 10, 0)
    assert orders.missing == {"note"}
    assert applied.tables["public.composite"].deletes == 1
    assert applied.first_sequence is not None
    assert applied.first_sequence.startswith("0" * 16)
    assert applied.failed == 0
