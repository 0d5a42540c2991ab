"""Messages of a real broker: ranges of them, exactly, whatever is done to it."""

import contextlib
import datetime as dt
import json
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dagster_bq_connector.cdc.event import MESSAGES, name_of
from dagster_bq_connector.cdc.source import kafka_read
from dagster_bq_connector.cdc.source.kafka import KafkaMessages
from dagster_bq_connector.cdc.source.kafka_broker import KafkaOptions
from dagster_bq_connector.cdc.source.source import Position
from dagster_bq_connector.errors import (
    AccessDeniedError,
    ChangesLostError,
    ConfigurationError,
    SourceChangedError,
    SourceMissingError,
    UnreachableError,
)
from support.kafka import KafkaBroker, RefusingLogins, kafka_broker

SETTLED = 1.5  # seconds until the broker has put on disk what it acknowledged


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    with kafka_broker(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker


@pytest.fixture
def own(tmp_path: Path) -> Iterator[KafkaBroker]:
    """A broker that the test may stop."""
    with kafka_broker(tmp_path) as broker:
        yield broker


def source(broker: KafkaBroker, *topics: str, **fields: Any) -> KafkaMessages:
    return KafkaMessages(
        KafkaOptions(broker.address, topics, **{"deadline": 20.0, **fields}),
    )


def numbered(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


def through_json(position: Position | None) -> Position:
    """As the ledger keeps it."""
    assert position is not None
    return json.loads(json.dumps(position))


def planned(kafka: KafkaMessages, start: Position | None = None, most: int = 1000) -> Position:
    return through_json(kafka.plan(start, most))


def read(kafka: KafkaMessages, start: Position | None, stop: Position) -> pa.Table:
    batches = list(kafka.read(start, stop))
    assert all(batch.num_rows and batch.schema == MESSAGES for batch in batches)
    return pa.Table.from_batches(batches, MESSAGES)


def values(table: pa.Table) -> list[bytes | None]:
    return table["value"].to_pylist()


def test_a_range_of_one_topic(shared: KafkaBroker) -> None:
    topic = shared.create()
    shared.produce(topic, [b'{"op":"c"}', None])
    shared.produce(topic, [b"3"], key=None)
    kafka = source(shared, topic)
    stop = planned(kafka)
    found = read(kafka, None, stop)
    assert found.to_pylist() == [
        {"topic": topic, "partition": 0, "offset": 0, "key": b"k", "value": b'{"op":"c"}'},
        {"topic": topic, "partition": 0, "offset": 1, "key": b"k", "value": None},
        {"topic": topic, "partition": 0, "offset": 2, "key": None, "value": b"3"},
    ]
    assert name_of(found.to_batches()[0], 2) == f"{topic}[0]@2"
    assert stop["offsets"] == {topic: {"0": 3}}
    assert kafka.plan(stop, 10) is None
    assert kafka.head()["offsets"] == stop["offsets"]
    assert list(kafka.read(stop, stop)) == []


def test_ranges_follow_each_other_and_can_be_read_again(shared: KafkaBroker) -> None:
    topic = shared.create(partitions=3)
    for partition, count in enumerate((70, 5, 25)):
        shared.produce(topic, [b"%d-%d" % (partition, n) for n in range(count)], partition)
    kafka = source(shared, topic)
    seen: list[bytes | None] = []
    position: Position | None = None
    while (stop := kafka.plan(position, 20)) is not None:
        stop = through_json(stop)
        part = values(read(kafka, position, stop))
        shared.produce(topic, [b"later"], 1)  # after the range
        assert 0 < len(part) <= 20
        assert sorted(values(read(kafka, position, stop))) == sorted(part)  # type: ignore[type-var]
        seen, position = seen + part, stop
        if len(seen) > 200:
            break
    assert {value: n for value, n in Counter(seen).items() if n > 1 and value != b"later"} == {}
    for partition, count in enumerate((70, 5, 25)):
        mark = b"%d-" % partition
        own = [value for value in seen if value and value.startswith(mark)]
        assert own == [mark + b"%d" % number for number in range(count)]


def test_a_plan_is_shared_evenly(shared: KafkaBroker) -> None:
    topic = shared.create(partitions=4)
    for partition, count in enumerate((100, 3, 50, 0)):
        shared.produce(topic, numbered(count), partition)
    kafka = source(shared, topic)
    assert planned(kafka, most=23)["offsets"] == {topic: {"0": 10, "1": 3, "2": 10, "3": 0}}
    assert planned(kafka, most=1)["offsets"] == {topic: {"0": 1, "1": 0, "2": 0, "3": 0}}


def test_aborted_transactions_are_left_out_and_markers_end_a_range(shared: KafkaBroker) -> None:
    topic = shared.create()
    shared.commit(topic, numbered(3))  # offsets 0 to 2, and a marker
    shared.abort(topic, [b"aborted"] * 3)  # 4 to 6, and a marker
    kafka = source(shared, topic)
    stop = planned(kafka)
    assert stop["offsets"] == {topic: {"0": 8}}
    assert values(read(kafka, None, stop)) == numbered(3)
    # Ranges that end with markers, hold aborted messages alone, or a marker alone: at the end of
    # the topic, and when others follow.
    for _ in range(2):
        for begin, end, count in ((0, 2, 2), (2, 4, 1), (3, 4, 0), (4, 6, 0), (5, 8, 0), (7, 8, 0)):
            first = {**stop, "offsets": {topic: {"0": begin}}}
            last = {**stop, "offsets": {topic: {"0": end}}}
            assert len(values(read(kafka, first, last))) == count, (begin, end)
        shared.commit(topic, [b"after"])


def test_an_open_transaction_is_not_planned(shared: KafkaBroker) -> None:
    topic = shared.create()
    shared.commit(topic, [b"before"])
    kafka = source(shared, topic)
    with shared.transaction(topic, [b"open"]) as producer:
        shared.produce(topic, [b"behind"])
        assert kafka.head()["offsets"] == {topic: {"0": 2}}
        stop = planned(kafka)
        # The range ends with a marker, and what follows may not be read yet.
        assert values(read(kafka, None, stop)) == [b"before"]
        assert kafka.plan(stop, 10) is None
        assert kafka.lag(stop).changes == 0
        producer.commit_transaction(30)
    after = planned(kafka, stop)
    assert values(read(kafka, stop, after)) == [b"open", b"behind"]


def test_what_is_written_while_a_range_is_read_stays_out(shared: KafkaBroker) -> None:
    topic = shared.create(partitions=2)
    for partition in range(2):
        shared.produce(topic, numbered(500), partition)
    kafka = source(shared, topic)
    stop = planned(kafka)
    for partition in range(2):
        shared.produce(topic, [b"later"] * 500, partition)
    assert set(values(read(kafka, None, stop))) == set(numbered(500))
    assert kafka.lag(stop).changes == 1000


def test_batches_are_bounded(shared: KafkaBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = shared.create()
    shared.produce(topic, [b"x" * 10_000] * 300)
    kafka = source(shared, topic)
    stop = planned(kafka)
    monkeypatch.setattr(kafka_read, "BATCH_ROWS", 70)
    counts = [batch.num_rows for batch in kafka.read(None, stop)]
    assert sum(counts) == 300
    assert max(counts) <= 70
    monkeypatch.setattr(kafka_read, "BATCH_ROWS", 10_000)
    monkeypatch.setattr(kafka_read, "BATCH_BYTES", 100_000)
    batches = list(kafka.read(None, stop))
    assert sum(batch.num_rows for batch in batches) == 300


def test_many_topics_and_new_ones_by_a_pattern(shared: KafkaBroker) -> None:
    prefix = shared.create()
    pattern = rf"^{prefix}\."
    kafka = source(shared, pattern, prefix)
    assert kafka.plan(None, 10) is None
    orders = shared.create(f"{prefix}.orders")
    shared.produce(orders, [b"o1"])
    shared.produce(prefix, [b"named"])
    stop = planned(kafka)
    assert set(stop["offsets"]) == {prefix, orders}
    found = read(kafka, None, stop)
    assert set(zip(found["topic"].to_pylist(), values(found), strict=True)) == {
        (orders, b"o1"),
        (prefix, b"named"),
    }
    users = shared.create(f"{prefix}.users", partitions=2)
    shared.produce(users, [b"u1"], partition=1)
    shared.produce(orders, [b"o2"])
    after = planned(kafka, stop)
    assert sorted(values(read(kafka, stop, after))) == [b"o2", b"u1"]  # type: ignore[type-var]
    assert after["begun"] == {users: {"0": 0, "1": 0}}


def test_new_partitions_are_read_from_their_beginning(shared: KafkaBroker) -> None:
    topic = shared.create()
    shared.produce(topic, [b"0"])
    kafka = source(shared, topic)
    stop = planned(kafka)
    shared.grow(topic, 3)
    time.sleep(0.2)
    shared.produce(topic, [b"2"], partition=2)
    after = planned(kafka, stop)
    assert values(read(kafka, stop, after)) == [b"2"]
    assert after["offsets"] == {topic: {"0": 1, "1": 0, "2": 1}}


def test_a_topic_that_is_no_longer_asked_for_keeps_its_place(shared: KafkaBroker) -> None:
    one, two = shared.create(), shared.create()
    for topic in (one, two):
        shared.produce(topic, [b"1"])
    both = planned(source(shared, one, two))
    shared.produce(one, [b"2"])
    alone = planned(source(shared, one), both)
    assert alone["offsets"] == {one: {"0": 2}, two: {"0": 1}}
    shared.produce(two, [b"2"])
    again = source(shared, one, two)
    assert values(read(again, alone, planned(again, alone))) == [b"2"]


def test_offsets_that_expired_are_told(shared: KafkaBroker) -> None:
    topic = shared.create()
    shared.produce(topic, numbered(10))
    kafka = source(shared, topic)
    at_four = planned(kafka, most=4)
    late = planned(kafka, at_four, most=4)
    shared.expire(topic, 4)
    assert values(read(kafka, at_four, late)) == numbered(4, first=4)  # expired, but read: no loss
    shared.expire(topic, 6)
    for action in (
        lambda: kafka.plan(at_four, 4),
        lambda: kafka.lag(at_four),
        lambda: list(kafka.read(at_four, late)),
    ):
        with pytest.raises(ChangesLostError) as caught:
            action()
        assert (
            f"{topic}[0]: the stream stands at offset 4, and the first that is there is 6"
            in str(caught.value)
        )
        assert "retention.ms" in str(caught.value)
    # From the beginning there is nothing to lose: it begins with what is there.
    assert values(read(kafka, None, planned(kafka))) == numbered(4, first=6)


def test_what_a_plan_from_the_beginning_held_may_not_expire_unnoticed(shared: KafkaBroker) -> None:
    topic = shared.create()
    shared.produce(topic, numbered(10))
    kafka = source(shared, topic)
    stop = planned(kafka)
    shared.expire(topic, 3)
    with pytest.raises(ChangesLostError, match="stands at offset 0, and the first .* is 3"):
        list(kafka.read(None, stop))


def test_offsets_that_expire_while_they_are_read(
    shared: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = shared.create()
    shared.produce(topic, numbered(10))
    kafka = source(shared, topic)
    stop = planned(kafka)
    assign = kafka_read.assign

    def expire_first(*arguments: Any) -> None:
        shared.expire(topic, 5)
        assign(*arguments)

    monkeypatch.setattr(kafka_read, "assign", expire_first)
    with pytest.raises(ChangesLostError, match=rf"{topic}\[0\]: offset 0 is no longer there"):
        list(kafka.read(None, stop))


def test_a_topic_that_is_gone(shared: KafkaBroker) -> None:
    topic = shared.create()
    shared.produce(topic, numbered(2))
    kafka = source(shared, f"^{topic}")
    stop = planned(kafka)
    shared.delete(topic)
    for action in (
        lambda: kafka.plan(stop, 4),
        lambda: kafka.lag(stop),
        lambda: list(kafka.read(None, stop)),
    ):
        with pytest.raises(SourceMissingError, match=f"Topic '{topic}' does not exist"):
            action()
    with pytest.raises(SourceMissingError, match="Topic 'shop.ordres' does not exist"):
        source(shared, "shop.ordres").head()


def test_a_topic_that_was_created_again(shared: KafkaBroker) -> None:
    topic = shared.create(partitions=2)
    shared.produce(topic, numbered(5), 1)
    kafka = source(shared, topic)
    stop = planned(kafka)
    shared.delete(topic)
    time.sleep(0.2)
    shared.create(topic, partitions=2)
    shared.produce(topic, numbered(2), 1)
    for action in (lambda: kafka.plan(stop, 4), lambda: list(kafka.read(None, stop))):
        with pytest.raises(SourceChangedError, match="partition 1 ends at offset 2, before"):
            action()
    shared.delete(topic)
    time.sleep(0.2)
    shared.create(topic, partitions=1)
    with pytest.raises(SourceChangedError, match="it has no partition 1 any more"):
        kafka.plan(stop, 4)


def test_the_lag_says_since_when_a_message_waits(shared: KafkaBroker) -> None:
    topic = shared.create(partitions=3)
    before = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=1)
    shared.produce(topic, [b"1"], 0)
    kafka = source(shared, topic)
    stop = planned(kafka)
    time.sleep(1.2)
    between = dt.datetime.now(dt.UTC) - dt.timedelta(milliseconds=100)
    shared.produce(topic, [b"2", b"3"], 0)
    shared.produce(topic, [b"4"], 2)
    behind, all_of_it = kafka.lag(stop), kafka.lag(None)
    assert (behind.changes, all_of_it.changes) == (3, 4)
    assert behind.oldest is not None
    assert all_of_it.oldest is not None
    assert before < all_of_it.oldest < between < behind.oldest
    caught_up = kafka.lag(kafka.head())
    assert (caught_up.changes, caught_up.oldest) == (0, None)
    shared.abort(topic, [b"aborted"], 1)
    markers = kafka.lag(planned(kafka, stop) | {"offsets": {topic: {"0": 3, "1": 0, "2": 1}}})
    assert (markers.changes, markers.oldest) == (2, None)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_broker_restarts_between_plan_and_read(own: KafkaBroker, how: signal.Signals) -> None:
    topic = own.create(partitions=2)
    for partition in range(2):
        own.produce(topic, numbered(200), partition)
    own.commit(topic, numbered(3))
    kafka = source(own, topic)
    stop = planned(kafka)
    time.sleep(SETTLED)
    own.stop(how)
    own.start()
    assert Counter(values(read(kafka, None, stop))) == Counter(numbered(200) * 2 + numbered(3))
    assert kafka.plan(stop, 10) is None


def test_the_broker_restarts_while_a_range_is_read(
    own: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = own.create(partitions=2)
    for partition in range(2):
        own.produce(topic, numbered(600), partition)
    kafka = source(own, topic)
    stop = planned(kafka, most=10_000)
    time.sleep(SETTLED)
    assign = kafka_read.assign
    restart = threading.Timer(1, own.start)

    def assign_and_kill(*arguments: Any) -> None:
        own.stop(signal.SIGKILL)
        assign(*arguments)
        restart.start()

    monkeypatch.setattr(kafka_read, "assign", assign_and_kill)
    found = values(read(kafka, None, stop))
    restart.join()
    assert Counter(found) == Counter(numbered(600) * 2)


def test_a_broker_that_is_not_there_is_told_within_the_deadline() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    kafka = KafkaMessages(KafkaOptions(address, ["orders"], deadline=2))
    nameless = KafkaMessages(KafkaOptions("no-such-host.invalid:9092", "^orders", deadline=2))
    for action in (kafka.head, lambda: kafka.plan(None, 1), lambda: kafka.lag(None), nameless.head):
        with pytest.raises(UnreachableError, match="Kafka at .* no answer within 2 s"):
            action()


def test_a_broker_without_the_security_that_is_asked_for(shared: KafkaBroker) -> None:
    kafka = source(shared, "orders", security_protocol="SSL", deadline=2)
    with pytest.raises(UnreachableError, match=r"security_protocol \(SSL\).* Last report: .+"):
        kafka.head()


def test_an_answer_that_is_too_large_is_told(shared: KafkaBroker) -> None:
    """A broker that heeds no limit: the client ends the connection, and all that it waits for."""
    topic = shared.create()
    shared.produce(topic, [b"x" * 1_000] * 100)
    limits = {"message.max.bytes": 1_000, "fetch.max.bytes": 1_000}
    settings = {name: str(value) for name, value in limits.items()}
    settings["receive.message.max.bytes"] = "20000"
    kafka = source(shared, topic, settings=settings, deadline=3)
    stop = planned(kafka)
    for action in (lambda: kafka.lag(None), lambda: read(kafka, None, stop)):
        with pytest.raises(UnreachableError, match=r"Last report: .*receive\.message\.max\.bytes"):
            action()


def test_a_broker_that_falls_silent_is_told_within_the_deadline(
    own: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = own.create()
    own.produce(topic, numbered(20))
    kafka = source(own, topic, deadline=3)
    stop = planned(kafka)
    assign = kafka_read.assign

    def assign_and_hold(*arguments: Any) -> None:
        assign(*arguments)
        own.hold()

    actions = [kafka.head, lambda: kafka.plan(None, 1), lambda: kafka.lag(None)]
    with monkeypatch.context() as patch:
        patch.setattr(kafka_read, "assign", assign_and_hold)
        for action in (lambda: list(kafka.read(None, stop)), *actions):
            with pytest.raises(UnreachableError, match=r"no answer within 3 s"):
                action()
    own.go_on()
    assert read(kafka, None, stop).num_rows == 20


def test_a_login_that_is_refused_is_told_at_once(shared: KafkaBroker) -> None:
    topic = shared.create()
    shared.produce(topic, numbered(3))
    secret = "a-password-of-the-tests"
    login = {"user": "ann", "password": secret, "security_protocol": "SASL_PLAINTEXT"}
    allowed = source(shared, topic, **login)
    stop = planned(allowed)
    assert values(read(allowed, None, stop)) == numbered(3)
    with contextlib.closing(RefusingLogins(shared)) as refusing:
        for topics in (topic, f"^{topic}"):
            refused = KafkaMessages(KafkaOptions(refusing.address, topics, **login))
            with pytest.raises(
                AccessDeniedError, match="refuses the login: .*wrong password"
            ) as told:
                refused.head()
            assert secret not in f"{told.value!r} {told.value.__cause__!r}"


def test_settings_that_cannot_work_are_told_without_secrets(shared: KafkaBroker) -> None:
    secret = "a-password-of-the-tests"
    kafka = source(shared, "orders", settings={"ssl.key.password": secret, "acks": "everybody"})
    with pytest.raises(ConfigurationError, match="Kafka cannot be used as it is set") as caught:
        kafka.head()
    assert secret not in f"{caught.value!r} {caught.value.__cause__!r}"


def test_the_position_of_another_source_is_refused(shared: KafkaBroker) -> None:
    kafka = source(shared, shared.create())
    with pytest.raises(SourceChangedError, match="was not taken of Kafka"):
        kafka.plan({"file": "a.ndjson"}, 1)


def test_a_range_is_read_from_where_it_was_planned(shared: KafkaBroker) -> None:
    topic = shared.create()
    shared.produce(topic, numbered(3))
    kafka = source(shared, topic)
    one = planned(kafka, most=1)
    two = planned(kafka, one)
    with pytest.raises(SourceChangedError, match="planned from another position"):
        list(kafka.read(None, two))
