"""What a Kafka client tells in place of messages: what is waited for, and what is not."""

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from dagster_bq_connector.cdc.source.kafka_broker import Broker, KafkaOptions
from dagster_bq_connector.cdc.source.kafka_read import first_times
from dagster_bq_connector.errors import RefusedError, UnreachableError


def told(code: int, topic: str | None) -> Any:
    return SimpleNamespace(
        error=lambda: KafkaError(code, "cut off"),
        topic=lambda: topic,
        partition=lambda: 3 if topic else None,
        offset=lambda: 17 if topic else None,
    )


def times(message: Any) -> list[int]:
    client = SimpleNamespace(assign=lambda _: None, consume=lambda most, seconds: [message])
    return first_times(Broker(KafkaOptions("b:1", "t", deadline=0.05)), client, {("t", 3): 0})


def test_an_answer_that_was_cut_off_is_waited_for() -> None:
    with pytest.raises(UnreachableError, match="Last report: cut off"):
        times(told(KafkaError._BAD_MSG, None))


def test_a_damaged_message_is_not_passed_over() -> None:
    with pytest.raises(RefusedError, match=r"t\[3\]@17: the message is damaged: cut off\."):
        times(told(KafkaError._BAD_MSG, "t"))
