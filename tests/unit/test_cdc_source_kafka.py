"""What is decided of Kafka without a broker: options, shares of a plan, and what offsets tell."""

import sys
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from dagster_bq_connector.cdc.source.kafka import KafkaMessages
from dagster_bq_connector.cdc.source.kafka_broker import KafkaOptions
from dagster_bq_connector.cdc.source.kafka_offsets import Place, Seen, begin_of, check, share
from dagster_bq_connector.errors import ChangesLostError, ConfigurationError, SourceChangedError


@hypothesis.given(
    counts=st.lists(st.integers(0, 50), min_size=1, max_size=12), most=st.integers(1, 300)
)
def test_shares_are_even_and_never_empty(counts: list[int], most: int) -> None:
    available = {("t", number): count for number, count in enumerate(counts)}
    shares = share(available, most)
    assert sum(shares.values()) == min(most, sum(counts))
    given = [shares.get(partition, 0) for partition in available]
    assert all(0 <= got <= count for got, count in zip(given, counts, strict=True))
    # Whoever got less than another by more than the rest of the division got all it has.
    assert all(
        got == count or got >= max(given) - 1 for got, count in zip(given, counts, strict=True)
    )


def seen(first: int, end: int, topic_id: str = "new") -> Seen:
    return Seen({"t": topic_id}, {("t", 0): first}, {("t", 0): end})


@pytest.mark.parametrize(
    ("offset", "known", "now", "error", "says"),
    [
        (5, "id", seen(0, 9, "id"), None, ""),
        (5, "id", seen(5, 5, "id"), None, ""),
        (5, "", seen(0, 9, "id"), None, ""),
        (5, "id", seen(0, 9, ""), None, ""),
        (5, "id", seen(0, 9), SourceChangedError, "its id is new, and was id"),
        (5, "", seen(0, 4, ""), SourceChangedError, "partition 0 ends at offset 4, before"),
        (5, "id", seen(6, 9, "id"), ChangesLostError, "offset 5, and the first that is there is 6"),
        (5, "id", Seen({"t": "id"}, {}, {}), SourceChangedError, "it has no partition 0 any more"),
        (5, "id", Seen({}, {}, {}), None, ""),
    ],
)
def test_what_offsets_tell(
    offset: int, known: str, now: Seen, error: type[Exception] | None, says: str
) -> None:
    if error is None:
        check({("t", 0): offset}, {"t": known}, now)
        return
    with pytest.raises(error, match=says):
        check({("t", 0): offset}, {"t": known}, now)


def test_a_new_partition_begins_with_its_first_offset() -> None:
    now = Seen({"t": "", "u": ""}, {("t", 0): 0, ("t", 1): 0, ("u", 0): 7}, {})
    now = Seen(now.ids, now.first, dict.fromkeys(now.first, 9))
    assert begin_of(Place({("t", 0): 4}), now) == {("t", 0): 4, ("t", 1): 0, ("u", 0): 7}


def test_a_position_is_json_that_people_can_read() -> None:
    place = Place({("t", 10): 4, ("t", 2): 5, ("u", 0): 1}, {"t": "id"}, {("u", 0): 0})
    position = place.as_position()
    assert position == {
        "offsets": {"t": {"2": 5, "10": 4}, "u": {"0": 1}},
        "ids": {"t": "id"},
        "begun": {"u": {"0": 0}},
    }
    assert Place.of(position) == place


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"topics": []}, "No topics"),
        ({"topics": "^(orders"}, "a pattern cannot be read"),
        ({"topics": "a", "settings": {"sasl.password": "x"}}, "sasl.password is set by password"),
        ({"topics": "a", "settings": {"isolation.level": "x"}}, "reading rests on it"),
        ({"topics": "a", "user": "ann", "security_protocol": "SSL"}, "write SASL_SSL"),
    ],
)
def test_options_that_cannot_work(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        KafkaOptions("localhost:9092", **fields)


def test_the_fields_become_settings() -> None:
    options = KafkaOptions(
        "b1:9093,b2:9093",
        ["orders", r"^shop\.", r"^__"],
        sasl_mechanism="SCRAM-SHA-512",
        user="ann",
        password="s3cret",
        ca_file="ca.pem",
        settings={"socket.keepalive.enable": True, "ssl.key.password": "s3cret too"},
    )
    assert options.client_settings() == {
        "bootstrap.servers": "b1:9093,b2:9093",
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "ann",
        "sasl.password": "s3cret",
        "ssl.ca.location": "ca.pem",
        "client.id": "dagster-bq-connector",
        "log_level": 2,
        "socket.keepalive.enable": True,
        "ssl.key.password": "s3cret too",
    }
    assert "s3cret" not in repr(options)
    wanted = {"orders": True, "shop.a": True, "a.shop.b": False, "orders2": False}
    wanted |= {"__debezium-heartbeat.shop": True, "__consumer_offsets": False}
    assert {topic: options.wants(topic) for topic in wanted} == wanted
    assert KafkaOptions("b", "a", ca_file="ca.pem").protocol == "SSL"
    assert KafkaOptions("b", "a").protocol == "PLAINTEXT"
    assert KafkaOptions("b", "a", user="ann").client_settings()["sasl.mechanism"] == "PLAIN"


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(ConfigurationError, match=r'pip install "dagster-bq-connector\[kafka\]"'):
        KafkaMessages(KafkaOptions("localhost:9092", "orders"))
