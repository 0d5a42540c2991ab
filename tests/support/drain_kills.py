"""Runs of a change stream in processes that die, or stop for a while, at any step."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from google.cloud.bigquery import SchemaField

from dagster_bq_connector import BigQueryResource, CdcTable, DeadLetters, DebeziumJson, PostgresLsn
from dagster_bq_connector.cdc.apply.upsert import Upsert
from dagster_bq_connector.cdc.source.files import FileMessages
from dagster_bq_connector.cdc.stream import Pace, Worker
from dagster_bq_connector.cdc.watermark import Watermark
from dagster_bq_connector.progress import Progress
from support.forks import Attempt, fork_for, observe, tell_steps
from support.ledgers import ledger_at

COLUMNS = [SchemaField("id", "INTEGER"), SchemaField("name", "STRING")]


@dataclass(kw_only=True)
class Drain(Attempt):
    """One run of a stream.

    Attributes:
        fields: Of its BigQuery resource.
        dataset: Of its ledger and its tables.
        stream: Its name, and that of its table.
        folder: Where its changes are.
        lease: Seconds of its lease.
    """

    fields: dict[str, Any]
    dataset: str
    stream: str
    folder: str
    lease: float


def watermark_of(bigquery: BigQueryResource, dataset: str, stream: str) -> Watermark:
    return Watermark(ledger_at(bigquery, dataset), stream)


def drain(order: Drain) -> None:
    """Drain the stream, unless killed on the way."""
    named = observe(order)
    bigquery = BigQueryResource(**order.fields)
    tables = {"public.orders": CdcTable(f"{order.dataset}.{order.stream}", schema=COLUMNS)}
    upsert = Upsert(
        bigquery.connect(),
        order.stream,
        DebeziumJson(),
        PostgresLsn(),
        tables,
        DeadLetters(f"{order.dataset}.letters"),
    )
    worker = Worker(
        watermark=watermark_of(bigquery, order.dataset, order.stream),
        source=FileMessages(order.folder),
        mode=upsert,
        pace=Pace(1, timedelta(0), max_changes=4, lease_seconds=order.lease),
        run=f"run {order.die} {order.stop}",
        is_over=lambda run: False,
        tell=lambda text: None,
        progress=lambda what: Progress(what, lambda text: None),
    )
    worker.drain()
    tell_steps(order, named)


if __name__ == "__main__":
    fork_for(Drain, drain)
