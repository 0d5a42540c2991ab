"""The whole way of a change in front of the library: PostgreSQL, Debezium, Kafka."""

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from confluent_kafka import Consumer, TopicPartition

from support.kafka import KafkaBroker, kafka_broker
from support.postgres import PostgresServer, postgres_server
from support.replication import Replication, Settings
from support.workload import Workload

SETTLED = 5.0  # seconds until the broker has put on disk what it acknowledged
ARRIVED_SECONDS = 60


@dataclass
class Chain:
    """The three, running, with a workload in the first."""

    postgres: PostgresServer
    kafka: KafkaBroker
    replication: Replication
    workload: Workload

    def run(self, changes: int) -> None:
        """Commit changes at the source."""
        with self.postgres.connect() as connection:
            self.workload.run(connection, changes)

    def topics(self) -> list[str]:
        """Where the changes are, made when they are not there yet."""
        return self.replication.settings.topics()

    def wait(self) -> None:
        """Wait until Kafka has all that was committed: the slot has no more to give."""
        with self.postgres.connect() as connection:
            # A message of the source's own comes last: a slot moves with what is read of it only.
            mark = "SELECT pg_logical_emit_message(true, 'end', '')"
            end: Any = connection.execute(mark).fetchone()
            self._wait_for(connection, end[0])

    def _wait_for(self, connection: psycopg.Connection[Any], lsn: str) -> None:
        until = time.monotonic() + ARRIVED_SECONDS
        statement = "SELECT confirmed_flush_lsn >= %s::pg_lsn FROM pg_replication_slots"
        while connection.execute(statement, [lsn]).fetchone() != (True,):
            assert self.replication.is_running, f"Debezium ended:\n{self.replication.log}"
            assert time.monotonic() < until, f"Debezium is late:\n{self.replication.log}"
            time.sleep(0.1)

    def kill_kafka(self) -> None:
        """Kill the broker and start it again, as if it kept what it acknowledged.

        A broker of Kafka has then handed to the operating system what it has acknowledged; this one
        does so within half a second, on a machine that is not busy. So nothing new may come to it
        shortly before it is killed.
        """
        with self.replication.held():
            time.sleep(SETTLED)
            self.kafka.stop(signal.SIGKILL)
            self.kafka.start()

    def messages(self) -> int:
        """How many messages the topics of the tables hold."""
        consumer = Consumer(
            {"bootstrap.servers": self.kafka.address, "group.id": "counting", "log_level": 0}
        )
        partitions = range(self.replication.settings.partitions)
        places = [TopicPartition(t, n) for t in self.topics() for n in partitions]
        with contextlib.closing(consumer):
            return sum(consumer.get_watermark_offsets(place, timeout=30)[1] for place in places)


@contextlib.contextmanager
def chain(folder: Path, seed: int, **settings: Any) -> Iterator[Chain]:
    """A chain that runs until the block ends, with the workload's tables, still empty.

    Args:
        folder: For what Debezium and Kafka keep.
        seed: Of the workload.
        settings: Of `replication.Settings`.
    """
    workload = Workload(seed)
    with postgres_server() as postgres, kafka_broker(folder / "kafka") as kafka:
        with postgres.connect() as connection:
            workload.create(connection)
        told = Settings(
            postgres.port, kafka.address, str(folder / "debezium"), workload.names, **settings
        )
        for topic in told.topics():
            kafka.create(topic, told.partitions)
        replication = Replication(told)
        try:
            replication.start()
            yield Chain(postgres, kafka, replication, workload)
        finally:
            replication.stop(signal.SIGKILL)
