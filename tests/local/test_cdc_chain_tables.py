"""Changes of a real PostgreSQL, by Debezium and Kafka: BigQuery's tables equal the source's."""

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dagster_bq_connector import BigQueryResource
from dagster_bq_connector.cdc.apply.upsert import Applied, Upsert
from dagster_bq_connector.cdc.envelope.debezium_json import DebeziumJson
from dagster_bq_connector.cdc.event import Fate
from dagster_bq_connector.cdc.ordering.postgres import PostgresLsn
from dagster_bq_connector.cdc.source.kafka import KafkaMessages
from dagster_bq_connector.cdc.source.kafka_broker import KafkaOptions
from dagster_bq_connector.cdc.stream import Drained, Pace, Worker
from dagster_bq_connector.cdc.table import CdcTable
from dagster_bq_connector.cdc.watermark import Watermark
from dagster_bq_connector.progress import Progress
from support.chain import Chain, chain
from support.comparing import compare_table
from support.ledgers import ledger_at
from support.workload_tables import TABLES


def worker(running: Chain, bigquery: BigQueryResource, dataset: str, mode: Upsert) -> Worker:
    options = KafkaOptions(running.kafka.address, running.topics(), deadline=30.0)
    return Worker(
        watermark=Watermark(ledger_at(bigquery, dataset), "spine"),
        source=KafkaMessages(options),
        mode=mode,
        pace=Pace(min_rows=1, max_changes=1000),
        run="run",
        is_over=lambda run: False,
        tell=print,
        progress=lambda what: Progress(what, print),
    )


def assert_equal(running: Chain, bigquery: BigQueryResource, dataset: str) -> None:
    with running.postgres.connect() as connection, bigquery.get_client() as client:
        for table in TABLES:
            address = f"{client.project}.{dataset}.{table.name.split('.')[1]}"
            difference = compare_table(connection, table.name, client, address)
            assert str(difference) == "", table.name
            assert difference.rows > 10


def summed(drained: list[Drained]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for applied in (each for one in drained for each in one.applied):
        assert isinstance(applied, Applied)
        counts["events"] += applied.fates[Fate.change]
        counts["failed"] += applied.failed
        for table in applied.tables.values():
            counts["upserts"] += table.upserts
            counts["deletes"] += table.deletes
            counts["superseded"] += table.superseded
    return counts


# With schemas tests/daemon does the same.
FORMS = {"plain": False, "with schemas": True} if os.environ.get("SOAK") else {"plain": False}


@pytest.mark.parametrize("schemas", FORMS.values(), ids=FORMS)
def test_the_tables_equal_those_of_the_source(
    bigquery: BigQueryResource, dataset: str, tmp_path: Path, schemas: bool
) -> None:
    more: dict[str, Any] = {"schemas": schemas}
    if not schemas:
        more |= {"one_topic": "changes", "transactions": False}
    tables = {
        table.name: CdcTable(
            f"{dataset}.{table.name.split('.')[1]}", schema=() if schemas else table.fields()
        )
        for table in TABLES
    }
    mode = Upsert(
        bigquery.connect(),
        "spine",
        DebeziumJson(time_precision="microseconds"),
        PostgresLsn(transaction_order=schemas),
        tables,
    )
    drained: list[Drained] = []
    with chain(tmp_path, seed=11 + schemas, **more) as running:
        for number in range(3):
            running.run(160)
            if number == 1:  # some of it comes again
                running.replication.restart(signal.SIGKILL)
            running.wait()
            drained.append(worker(running, bigquery, dataset, mode).drain())
        assert running.workload.counts["columns added"] == 4
        counts = summed(drained)
        assert_equal(running, bigquery, dataset)
    assert counts["failed"] == 0
    assert counts["events"] >= running.workload.events
    assert counts["events"] == counts["upserts"] + counts["deletes"] + counts["superseded"]
