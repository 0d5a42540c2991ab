"""The page on PostgreSQL is run: its statements, its connector, and what a stream reads then."""

import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

from dagster_bq_connector import DebeziumJson, PostgresLsn
from dagster_bq_connector.cdc.event import FATES
from dagster_bq_connector.cdc.source.kafka import KafkaMessages
from dagster_bq_connector.cdc.source.kafka_broker import KafkaOptions
from support.kafka import KafkaBroker, kafka_broker
from support.postgres import PostgresServer, postgres_server
from support.replication import Replication, Settings

PAGE = (Path(__file__).parents[2] / "docs" / "postgresql.md").read_text()
ARRIVED_SECONDS = 60
WANTED = {"change": 3, "tombstone": 1, "truncate": 1}


def statements(number: int) -> list[Any]:
    """Those of a block of the page."""
    found = re.findall(r"^ *```sql\n(.*?)^ *```", PAGE, re.DOTALL | re.MULTILINE)
    return [each for each in found[number].split(";") if each.strip()]


def settings(postgres: PostgresServer, kafka: KafkaBroker, folder: Path) -> Settings:
    """The page's connector, in the tests' place of Kafka Connect."""
    [text] = re.findall(r"^```json\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    config: dict[str, str] = json.loads(text)["config"]
    tables = config["table.include.list"].split(",")
    for name in ("key.converter", "value.converter", "tasks.max"):
        del config[name]
    here = {"hostname": "127.0.0.1", "port": str(postgres.port), "dbname": "postgres"}
    config |= {f"database.{name}": value for name, value in here.items()}
    config["heartbeat.interval.ms"] = "500"
    return Settings(postgres.port, kafka.address, str(folder), tables, more=config)


def fates(kafka: KafkaBroker) -> Counter[str]:
    """What a stream of all topics makes of the messages that are there."""
    source = KafkaMessages(KafkaOptions(kafka.address, r"^shop\."))
    found = Counter[str]()
    stop = source.plan(None, 1_000)
    for messages in source.read(None, stop) if stop else ():
        events = DebeziumJson().events(messages, PostgresLsn())
        assert not events.failed, events.failed[0].named(messages)
        found += Counter(str(FATES[fate]) for fate in events.fates.tolist())
    return found


def test_what_the_page_says_is_done(tmp_path: Path) -> None:
    with postgres_server() as postgres, kafka_broker(tmp_path / "kafka") as kafka:
        for table in ("customers", "orders"):
            postgres.execute(f"CREATE TABLE {table} (id integer PRIMARY KEY, note text)")
        postgres.execute("INSERT INTO customers VALUES (1, 'there before')")
        for statement in statements(0):
            postgres.execute(statement)
        replication = Replication(settings(postgres, kafka, tmp_path / "debezium"))
        try:
            replication.start()
            postgres.execute("INSERT INTO orders VALUES (1, 'new')")
            postgres.execute("DELETE FROM customers")
            postgres.execute("TRUNCATE orders")
            end = time.monotonic() + ARRIVED_SECONDS
            found = fates(kafka)
            while not WANTED.items() <= found.items() or not found["logical_message"]:
                assert time.monotonic() < end, (found, replication.log)
                time.sleep(0.2)
                found = fates(kafka)
            [slot] = postgres.execute(statements(2)[0])
            assert slot[:3] == ("dagster", True, "reserved")
        finally:
            replication.stop()
