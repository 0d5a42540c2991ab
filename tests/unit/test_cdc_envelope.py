"""Debezium's JSON: fates, keys, schemas, unwrapped rows, and messages that are none of it."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from google.cloud.bigquery import SchemaField
from hypothesis import given
from hypothesis import strategies as st

from dagster_bq_connector.cdc.envelope import payloads
from dagster_bq_connector.cdc.envelope.connect import Meaning
from dagster_bq_connector.cdc.envelope.debezium_json import DebeziumJson
from dagster_bq_connector.cdc.event import FATES, Events, Fate, Rows
from dagster_bq_connector.cdc.ordering.postgres import PostgresLsn
from dagster_bq_connector.cdc.source.lines import messages_of
from support.debezium import batch, batch_of, event, with_schema, written

COLUMNS = [SchemaField("id", "INTEGER", "REQUIRED"), SchemaField("name", "STRING")]
FIELDS = [
    {"type": "int32", "optional": False, "field": "id"},
    {"type": "string", "optional": True, "field": "name"},
]


def events(messages: pa.RecordBatch, envelope: DebeziumJson | None = None) -> Events:
    return (envelope or DebeziumJson()).events(messages, PostgresLsn())


def fates(found: Events) -> list[Fate]:
    return [FATES[code] for code in found.fates.tolist()]


def rows(found: Events, columns: list[SchemaField] = COLUMNS) -> Rows:
    return DebeziumJson().rows(found, np.arange(found.changes.num_rows), columns)


def reason(value: Any, key: Any = {"id": 1}) -> str:  # noqa: B006
    """Why a message fails, between two that do not."""
    good = ({"id": 7}, event(after={"id": 7, "name": "x"}))
    found = events(batch(good, (key, value), good))
    assert fates(found) == [Fate.change, Fate.failed, Fate.change]
    assert [one.message for one in found.failed] == [1]
    assert rows(found).batch.num_rows == 2
    return found.failed[0].named(found.messages)


@pytest.mark.parametrize("embedded", [False, True])
@pytest.mark.parametrize(
    ("topic", "value", "fate"),
    [
        ("shop.public.orders", event("c", {"id": 1}), Fate.change),
        ("shop.public.orders", event("r", {"id": 1}), Fate.change),
        ("shop.public.orders", event("d"), Fate.change),
        ("shop.public.orders", event("t"), Fate.truncate),
        ("shop.message", event("m", table=""), Fate.logical_message),
        ("shop.public.orders", None, Fate.tombstone),
        ("__debezium-heartbeat.shop", {"ts_ms": 1}, Fate.heartbeat),
        ("beats", {"ts_ms": 1}, Fate.heartbeat),
        ("shop.transaction", {"status": "BEGIN", "id": "7:20", "ts_ms": 1}, Fate.transaction),
        ("shop.transaction", {"status": "END", "id": "7:20", "event_count": 1}, Fate.transaction),
        (
            "shop",
            {"source": {"db": "shop"}, "databaseName": "shop", "ddl": "ALTER", "tableChanges": []},
            Fate.schema_change,
        ),
    ],
)
def test_fates(topic: str, value: Any, fate: Fate, embedded: bool) -> None:
    wrapped = {"schema": {"type": "struct", "fields": []}, "payload": value} if embedded else value
    found = events(batch_of([(topic, {"id": 1}, wrapped)]))
    assert fates(found) == [fate]
    assert not found.failed
    assert found.count(fate) == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"no JSON", "is no JSON object"),
        (b'{"op":', "is no JSON object"),
        (b"\xff\xfe", "is no JSON object"),
        (b"[" * 100_000, "is no JSON object"),
        (b"5", "is no JSON object"),
        (b"[1]", "is no JSON object"),
        ({"a": 1}, "no change event of Debezium"),
        ({"op": "c", "after": {"id": 1}}, "'c' but no source"),
        (event("x", {"id": 1}), "the operation 'x' is not known"),
        (event("c", {"id": 1}) | {"op": 5}, "the operation 5 is not known"),
        (event("c", {"id": 1}) | {"source": "public.orders"}, "no change event of Debezium"),
        (event("c", {"id": 1}, schema=None, db=None), "schema and table are missing"),
        (event("c", {"id": 1}) | {"source": {"schema": "public"}}, "schema and table are missing"),
    ],
)
def test_messages_that_are_no_change(value: Any, text: str) -> None:
    found = reason(value)
    assert found.startswith("shop.public.orders[0]@1: ")
    assert text in found


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (None, "message.key.columns"),
        (b"null", "message.key.columns"),
        (b"{", "@1: "),
        (b"7", "key.converter"),
        ({}, "key.converter"),
        ({"id": None}, "null in 'id'"),
    ],
)
def test_keys_that_are_none(key: Any, text: str) -> None:
    assert text in reason(event(after={"id": 1}), key)


@pytest.mark.parametrize("value", [5, "x", [1], None])
def test_rows_that_are_none(value: Any) -> None:
    found = events(batch(({"id": 1}, event(after={"id": 1})), ({"id": 2}, event("c", value))))
    assert fates(found) == [Fate.change, Fate.change]
    parsed = rows(found)
    assert parsed.kept.tolist() == [0]
    assert [one.message for one in parsed.failed] == [1]
    assert "'after'" in parsed.failed[0].reason


@given(
    st.dictionaries(st.text(), st.integers() | st.text() | st.booleans(), min_size=1), st.randoms()
)
def test_equal_keys_have_equal_bytes(key: dict[str, Any], random: Any) -> None:
    names = list(key)
    random.shuffle(names)
    other = {name: key[name] for name in names}
    forms = [
        json.dumps(key).encode(),
        json.dumps(other, indent=1, ensure_ascii=False).encode(),
        json.dumps({"schema": {"type": "struct"}, "payload": other}).encode(),
        json.dumps({**other, f"{names[0]}+": 1}).encode(),
    ]
    found = events(batch(*[(form, event(after={"id": 1})) for form in forms]))
    keys = found.changes.column("key").to_pylist()
    assert keys[0] == keys[1] == keys[2] != keys[3]
    assert json.loads(keys[0]) == key


@pytest.mark.parametrize("number", ["1" * 5_000, "1e400", "-1e400"])
def test_numbers_beyond_all_bounds_fail_alone(number: str) -> None:
    value = event(after={"id": 1, "name": 0})
    text = json.dumps(value).replace('"name": 0', f'"name": {number}')
    good = ({"id": 7}, event(after={"id": 7, "name": "x"}))
    found = rows(events(batch(good, ({"id": 1}, text.encode()), good)))
    assert found.batch.column("id").to_pylist() == [7, 7]
    assert len(found.failed) <= 1


def test_a_delete_has_only_its_key() -> None:
    value = event("d") | {"before": {"id": 2, "name": "filler"}}
    found = rows(events(batch(({"id": 1}, value))))
    assert found.batch.to_pylist() == [{"id": 1, "name": None}]
    assert not found.missing


def test_a_changed_key_is_a_delete_and_a_create() -> None:  # public failure 24
    first = event("d", lsn=20) | {"before": {"id": 1}}
    messages = batch(
        ({"id": 2}, event("c", {"id": 2, "name": "x"}, lsn=21)),
        ({"id": 1}, None),
        ({"id": 1}, first),
    )
    found = events(messages)
    assert found.changes.column("operation").to_pylist() == ["c", "d"]
    assert found.changes.column("key").to_pylist() == [b'{"id":2}', b'{"id":1}']


def test_the_key_comes_from_the_message_key() -> None:  # public failure 18
    found = events(batch(({"id": 1}, event("c", {"name": "x"}))))
    assert found.changes.column("key").to_pylist() == [b'{"id":1}']


def test_names_match_without_case() -> None:
    found = rows(events(batch(({"ID": 1}, event(after={"ID": 1, "Name": "x"})))))
    assert found.batch.to_pylist() == [{"id": 1, "name": "x"}]
    assert not found.unknown


def test_a_missing_column_is_no_null() -> None:
    messages = batch(
        ({"id": 1}, event(after={"id": 1, "name": None})),
        ({"id": 2}, event(after={"id": 2})),
        ({"id": 3}, event(after={"name": "x"})),
        ({"id": 4}, event(after={"id": None, "name": "x"})),
    )
    found = rows(events(messages))
    assert found.missing["name"].tolist() == [False, True, False]
    assert found.missing["id"].tolist() == [False, False, True]
    assert [(one.message, one.column) for one in found.failed] == [(3, "id")]


def test_rows_come_in_the_order_in_which_they_were_chosen() -> None:
    given = [({"id": n}, event("d" if n % 3 == 0 else "u", {"id": n})) for n in range(20)]
    found = events(batch(*given))
    chosen = np.array([5, 3, 19, 0, 6, 7])
    parsed = DebeziumJson().rows(found, chosen, COLUMNS)
    assert parsed.kept.tolist() == chosen.tolist()
    assert parsed.batch.column("id").to_pylist() == chosen.tolist()
    empty = DebeziumJson().rows(found, np.array([], np.int64), COLUMNS)
    assert empty.batch.num_rows == 0
    assert empty.batch.schema.names == ["id", "name"]


def test_each_schema_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[Any] = []

    def counted(schema: Any) -> Meaning:
        parsed.append(schema)
        return original(schema)

    original = Meaning.of
    monkeypatch.setattr(payloads.Meaning, "of", counted)
    wide = [*FIELDS, {"type": "boolean", "optional": True, "field": "paid"}]
    given = [
        (
            {"id": n},
            with_schema(wide if n % 7 == 0 else FIELDS, event(after={"id": n, "name": f"n{n}"})),
        )
        for n in range(500)
    ]
    envelope = DebeziumJson()
    for _ in range(3):
        found = events(batch(*given), envelope)
    assert fates(found) == [Fate.change] * 500
    assert len([schema for schema in parsed if "Envelope" in str(schema.get("name"))]) == 2
    columns = envelope.columns(found, "public.orders")
    assert columns is not None
    assert [column.name for column in columns] == ["id", "name", "paid"]
    assert rows(found).batch.column("name").to_pylist() == [f"n{n}" for n in range(500)]


def test_schemas_in_other_places() -> None:
    value = with_schema(FIELDS, event(after={"id": 1, "name": "x"}))
    turned = {"payload": value["payload"], "schema": value["schema"]}
    spaced = json.dumps(value, indent=1).encode() + b" \n"
    null = {"schema": None, "payload": value["payload"]}
    found = events(batch(*[({"id": 1}, form) for form in (value, turned, spaced, null)]))
    assert fates(found) == [Fate.change] * 4
    assert rows(found).batch.to_pylist() == [{"id": 1, "name": "x"}] * 4


ADDED = {
    "__op": "u",
    "__source_schema": "public",
    "__source_table": "orders",
    "__source_sequence": '["16","17"]',
    "__source_lsn": 17,
    "__source_snapshot": "false",
    "__source_ts_ms": 1,
}


def test_unwrapped_rows() -> None:
    messages = batch(
        ({"id": 1}, {"id": 1, "name": "x", **ADDED, "__deleted": "false"}),
        ({"id": 2}, {"id": 2, "name": "x", **ADDED, "__op": "d", "__deleted": "true"}),
        ({"id": 2}, None),
        ({"id": 3}, event(after={"id": 3, "name": "y"})),
        ({"id": 4}, {"id": 4, "op": 7, "source": "web", "status": 1, **ADDED, "__op": "c"}),
    )
    found = events(messages)
    assert fates(found) == [Fate.change, Fate.change, Fate.tombstone, Fate.change, Fate.change]
    assert found.changes.column("operation").to_pylist() == ["u", "d", "u", "c"]
    assert set(found.changes.column("table").to_pylist()) == {"public.orders"}
    sequences, failed = PostgresLsn().sequences(found.changes)
    assert not failed
    assert sequences[0].as_py() == "0000000000000010/0000000000000011"
    parsed = rows(found)
    assert parsed.batch.to_pylist() == [
        {"id": 1, "name": "x"},
        {"id": 2, "name": None},
        {"id": 3, "name": "y"},
        {"id": 4, "name": None},
    ]
    assert set(parsed.unknown) == {"op", "source", "status"}


@pytest.mark.parametrize("embedded", [False, True])
def test_a_null_that_has_bytes_is_a_tombstone(embedded: bool) -> None:
    """Arrow allows it, and the messages of files are such."""
    value = event(after={"id": 1, "name": "x"})
    given = with_schema(FIELDS, value) if embedded else value
    messages = batch(
        ({"id": 1}, given), ({"id": 2}, b"null"), ({"id": 3}, given), ({"id": 4}, given)
    )
    column = messages.column("value")
    _, offsets, data = column.buffers()
    buffers = [pa.py_buffer(bytes([0b1101])), offsets, data]
    nulls = pa.Array.from_buffers(column.type, len(column), buffers)
    found = events(messages.set_column(4, messages.schema.field(4), nulls))
    assert fates(found) == [Fate.change, Fate.tombstone, Fate.change, Fate.change]
    assert rows(found).batch.to_pylist() == [{"id": 1, "name": "x"}] * 3


def test_unwrapped_rows_with_their_schema() -> None:
    fields = [*FIELDS, {"type": "string", "optional": True, "field": "__op"}]
    value = {
        "schema": {"type": "struct", "fields": fields},
        "payload": {"id": 1, "name": "x", **ADDED},
    }
    found = events(batch(({"id": 1}, value)))
    assert rows(found).batch.to_pylist() == [{"id": 1, "name": "x"}]
    columns = DebeziumJson().columns(found, "public.orders")
    assert columns is not None
    assert [column.name for column in columns] == ["id", "name"]


@pytest.mark.parametrize("name", [name for name in ADDED if name.startswith("__source")])
def test_unwrapped_rows_without_their_order(name: str) -> None:
    value = {"id": 1, **{key: its for key, its in ADDED.items() if key != name}}
    text = reason(value)
    assert f"lacks {name}" in text
    assert "add.fields=op,source.schema,source.table,source.sequence" in text


def test_tombstones_that_are_all_there_is_of_deletes() -> None:
    messages = batch(({"id": 1}, {"id": 1, "name": "x", **ADDED}), ({"id": 2}, None))
    found = events(messages)
    assert fates(found) == [Fate.change, Fate.failed]
    assert "delete.tombstone.handling.mode=rewrite" in found.failed[0].reason


def test_bytes_that_lie_behind_a_null_are_none() -> None:
    """As in messages from files, where a null is a part of its line."""
    change, truncate = written(event(after={"id": 1})), written(event("t"))
    lines = [(b'{"id":1}', change), (b'{"id":1}', None), (None, truncate)]
    line = b'{"topic":"t","key":%b,"value":%b}\n'
    text = b"".join(line % (key or b"null", value or b"null") for key, value in lines)
    [messages] = messages_of([text], "0001.ndjson", 1, True)
    assert fates(events(messages)) == [Fate.change, Fate.tombstone, Fate.truncate]


def test_no_messages() -> None:
    found = events(batch())
    assert found.changes.num_rows == 0
    assert found.changes.schema.names == ["message", "table", "operation", "key", "coordinates"]
    assert not found.failed
