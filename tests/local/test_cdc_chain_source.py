"""Changes of a real PostgreSQL, through Debezium and Kafka: the last of each key is its row.

Nothing is written to BigQuery here; what is folded is compared with the source itself.
"""

import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.cdc.envelope.debezium_json import DebeziumJson
from dagster_bq_connector.cdc.event import Events, Fate
from dagster_bq_connector.cdc.fold import fold
from dagster_bq_connector.cdc.ordering.postgres import PostgresLsn
from dagster_bq_connector.cdc.source.kafka import KafkaMessages
from dagster_bq_connector.cdc.source.kafka_broker import KafkaOptions
from support.chain import Chain, chain
from support.comparing import Difference, compare_rows
from support.replication import settled
from support.workload_tables import TABLES

SEED = 5
PASSED_OVER = (Fate.tombstone, Fate.heartbeat, Fate.transaction, Fate.logical_message)


@dataclass
class Event:
    """An event, as Debezium's engine hands it over."""

    text: str | None

    def value(self) -> str | None:
        return self.text


def messages_of(running: Chain) -> pa.RecordBatch:
    """All messages of the topics, read in a few ranges."""
    options = KafkaOptions(running.kafka.address, running.topics(), deadline=30.0)
    kafka = KafkaMessages(options)
    batches: list[pa.RecordBatch] = []
    position = None
    while (stop := kafka.plan(position, 400)) is not None:
        batches += kafka.read(position, stop)
        position = stop
    [whole] = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return whole


def rows_of(
    format_: DebeziumJson,
    events: Events,
    sequences: Any,
    table: str,
    columns: Sequence[SchemaField],
) -> list[dict[str, Any]]:
    """The rows of a table that remain."""
    changes = events.changes
    kept = fold(changes.column("key"), changes.column("table"), sequences)
    tables = changes.column("table").cast(pa.string()).to_numpy(zero_copy_only=False)
    operations = changes.column("operation").cast(pa.string()).to_numpy(zero_copy_only=False)
    kept = kept[(tables[kept] == table) & (operations[kept] != "d")]
    rows = format_.rows(events, np.asarray(kept), columns)
    assert (rows.failed, dict(rows.unavailable), dict(rows.unknown)) == ([], {}, {})
    # The last change of a row may be older than a column, which is null then.
    assert set(rows.missing) <= {name for each in TABLES for name in each.later}
    return rows.batch.to_pylist()


def compare(running: Chain, transaction_order: bool = False) -> dict[str, Difference]:
    """Fold all that came, and compare it with the source."""
    running.wait()
    format_ = DebeziumJson(time_precision="microseconds")
    profile = PostgresLsn(transaction_order=transaction_order)
    messages = messages_of(running)
    events = format_.events(messages, profile)
    assert events.failed == []
    state = profile.advance({}, events)
    assert profile.advance(state, events) == state  # all of it came again
    sequences, failed = profile.sequences(events.changes)
    assert failed == []
    fates = {fate: events.count(fate) for fate in Fate if events.count(fate)}
    assert set(fates) <= {Fate.change, *PASSED_OVER}
    assert fates[Fate.change] >= running.workload.events
    differences: dict[str, Difference] = {}
    with running.postgres.connect() as connection:
        for table in TABLES:
            columns = format_.columns(events, table.name) or running.workload.fields(table)
            rows = rows_of(format_, events, sequences, table.name, columns)
            differences[table.name] = compare_rows(connection, table.name, columns, rows)
    return differences


def assert_equal(differences: dict[str, Difference]) -> None:
    assert {name: str(each) for name, each in differences.items()} == dict.fromkeys(differences, "")
    assert all(each.rows > 10 for each in differences.values())


KILLED = ["Kafka"]
if os.environ.get("SOAK"):
    KILLED += ["Debezium", "PostgreSQL", "PostgreSQL stops"]


def test_messages_with_schemas(tmp_path: Path) -> None:
    with chain(tmp_path, SEED) as running:
        running.run(500)
        assert_equal(compare(running, transaction_order=True))
        assert running.workload.counts["columns added"] == 4


def test_messages_without_schemas_in_one_topic(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"schemas": False, "transactions": False, "one_topic": "changes"}
    with chain(tmp_path, SEED + 1, **settings) as running:
        running.run(500)
        assert_equal(compare(running))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    folder = tmp_path_factory.mktemp("chain")
    with chain(folder, SEED + 2, schemas=False, partitions=3) as running:
        yield running


@pytest.mark.parametrize("killed", KILLED)
def test_a_part_is_killed_on_the_way(running: Chain, killed: str) -> None:
    running.run(150)
    if killed == "Debezium":
        running.replication.restart(signal.SIGKILL)
    elif killed == "Kafka":
        running.kill_kafka()
    else:
        how = signal.SIGKILL if killed == "PostgreSQL" else signal.SIGINT
        running.postgres.restart(how)
    running.run(50)
    assert_equal(compare(running))


def test_differences_are_named(running: Chain) -> None:
    """A comparison that finds nothing would show nothing."""
    stock = TABLES[2]
    with running.postgres.connect() as connection:
        found = connection.execute("SELECT item::text, quantity, place FROM stock ORDER BY item")
        rows = [dict(zip(("item", "quantity", "place"), row, strict=True)) for row in found]
        changed = [{**rows[0], "quantity": 4711}, *rows[2:], rows[3], {**rows[1], "item": "x"}]
        difference = compare_rows(connection, stock.name, stock.fields(), changed)
        same = compare_rows(connection, stock.name, stock.fields()[:2], rows)
    assert difference.missing == [(rows[1]["item"],)]
    assert difference.extra == [("x",)]
    assert difference.doubled == [(rows[3]["item"],)]
    of_first = f"quantity: 4711 instead of {rows[0]['quantity']}"
    assert difference.different == {(rows[0]["item"],): of_first}
    assert Counter(same.counts) == Counter({"columns": 1})
    assert same.columns == ["place"]


def test_a_delete_is_done_with_what_follows_it() -> None:
    """The half of a changed key must not be stored as done: a kill would lose the other."""
    delete, create, heartbeat = Event('{"op":"d"}'), Event('{"op":"c"}'), Event('{"ts_ms":1}')
    tombstone = Event(None)
    assert settled([create, delete]) == 1
    assert settled([create, delete, tombstone]) == 1
    assert settled([delete, tombstone, create]) == 3
    assert settled([delete, tombstone, heartbeat]) == 3
    assert settled([delete, tombstone]) == settled([tombstone]) == settled([]) == 0
