"""How many runs a stream costs, on a clock that the test moves: Kafka holds the times."""

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from dagster_bq_connector import BigQueryResource
from dagster_bq_connector.cdc.look import Runs, Tried, look
from dagster_bq_connector.cdc.source.kafka import KafkaMessages
from dagster_bq_connector.cdc.source.kafka_broker import KafkaOptions
from dagster_bq_connector.cdc.stream import Pace
from support.draining import EAGER, Numbers, Simulated
from support.kafka import KafkaBroker, kafka_broker

NO_RUNS = Runs(live=list, tried=lambda state: Tried(0, None), is_over=lambda run: False)


class Topic(Numbers):
    """Numbers in a topic, one a second by the stream's clock."""

    def __init__(self, broker: KafkaBroker, bigquery: BigQueryResource, ledger: str) -> None:
        super().__init__(Path(), bigquery, ledger, EAGER)
        self._broker, self._topic = broker, broker.create()

    @property
    def source(self) -> Any:
        return KafkaMessages(KafkaOptions(self._broker.address, self._topic))

    def put(self, count: int) -> None:
        """The changes of the last seconds."""
        producer = Producer({"bootstrap.servers": self._broker.address})
        for number in range(count):
            at = self.now() - timedelta(seconds=count - number)
            value = json.dumps({"n": self.there + number})
            producer.produce(self._topic, value, timestamp=int(at.timestamp() * 1000))
        assert producer.flush(30) == 0
        self.there += count


@pytest.fixture
def numbers(
    tmp_path_factory: pytest.TempPathFactory, bigquery: BigQueryResource, dataset: str
) -> Iterator[Topic]:
    with kafka_broker(tmp_path_factory.mktemp("kafka")) as broker:
        yield Topic(broker, bigquery, dataset)


def test_an_hour_of_a_trickle_costs_the_runs_that_the_settings_imply(numbers: Topic) -> None:
    """One change a second, a tick a minute, on a clock that the test moves."""
    clock = numbers.now = Simulated()
    numbers.pace = Pace(min_rows=10_000, max_delay=timedelta(minutes=1))
    runs, late = 0, 0.0
    for _ in range(60):
        clock.pass_by(60)
        numbers.put(60)
        if look(numbers.watermark, numbers.source, numbers.pace, NO_RUNS, 0).plan is None:
            continue
        runs += 1
        waiting = numbers.there - len(numbers.mode.numbers)
        late = max(late, waiting)  # seconds, since one change comes in a second
        drained = numbers.worker(f"run-{runs}").drain()
        assert len(drained.plans) == 1
    assert 20 <= runs <= 60  # one a minute at most, since a change may wait for a minute
    assert late <= 60 + 60  # and for the next tick
    assert numbers.there - len(numbers.mode.numbers) <= 120
    assert numbers.mode.numbers == list(range(len(numbers.mode.numbers)))


def test_an_idle_stream_starts_no_run(numbers: Topic) -> None:
    clock = numbers.now = Simulated()
    numbers.put(10)
    clock.pass_by(3600)
    numbers.worker().drain()
    before = numbers.watermark.read()
    for _ in range(5):
        clock.pass_by(3600)
        seen = look(numbers.watermark, numbers.source, numbers.pace, NO_RUNS, 1)
        assert (seen.plan, seen.reason) == (None, "no changes")
    assert numbers.watermark.read() == before  # a tick writes nothing
