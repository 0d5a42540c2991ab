"""Quick ways through a batch and the exact ones: they give the same, whatever the messages are."""

import json
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from google.cloud.bigquery import SchemaField
from hypothesis import given
from hypothesis import strategies as st

from dagster_bq_connector.cdc.envelope import arrays, batch, images
from dagster_bq_connector.cdc.envelope.debezium_json import DebeziumJson
from dagster_bq_connector.cdc.event import Events, Rows
from dagster_bq_connector.cdc.ordering import postgres
from dagster_bq_connector.cdc.ordering.postgres import PostgresLsn
from support.debezium import batch as batch_of_topic
from support.debezium import event, with_schema

MARKER = "__debezium_unavailable_value"
COLUMNS = [
    SchemaField("id", "INTEGER", "REQUIRED"),
    SchemaField("name", "STRING"),
    SchemaField("price", "FLOAT"),
    SchemaField("amount", "NUMERIC", precision=10, scale=2),
    SchemaField("paid", "BOOLEAN"),
    SchemaField("at", "TIMESTAMP"),
]
FIELDS = [{"type": "int64", "field": "id"}, {"type": "string", "field": "name"}]
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
anything = scalars | st.lists(scalars, max_size=2) | st.dictionaries(st.text(), scalars, max_size=2)
FITTING: dict[str, st.SearchStrategy[Any]] = {
    "id": st.integers(-(2**63), 2**63 - 1),
    "name": st.text() | st.just(MARKER),
    "price": st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9),
    "amount": st.sampled_from(["BNI=", "AA==", "AAAAAAE=", "////", "AQID"]),
    "paid": st.booleans(),
    "at": st.just("2023-11-14T22:13:20.004567Z"),
}
fitting = st.fixed_dictionaries(FITTING).map(lambda row: list(row.items()))
# Names that the table has, in another case, or not at all; one may come twice.
names = st.sampled_from([*FITTING, "ID", "Name", "other", "__op"])
strange = st.lists(st.tuples(names, anything), max_size=8)


def text_of(fields: list[tuple[str, Any]], spaced: bool, ascii_only: bool) -> str:
    """An object as JSON: fields may come twice, and its lines may be broken."""
    parts = [
        f"{json.dumps(name)}:{json.dumps(value, ensure_ascii=ascii_only)}" for name, value in fields
    ]
    return "{" + (",\n" if spaced else ",").join(parts) + "}"


def encoded(text: str) -> bytes:
    return text.encode(errors="replace")  # a half of a surrogate pair is no JSON


objects = st.builds(text_of, fitting | strange, st.booleans(), st.booleans())
rows_as_text = objects | st.sampled_from(["5", "null", "[1]", '"x"', "{}", " { } "])


@st.composite
def envelopes(draw: st.DrawFn) -> bytes:
    """A message; most are changes."""
    value = event(draw(st.sampled_from("curdx")), lsn=draw(st.integers(1, 2**64 - 1)))
    value["after"] = "ROW"
    change = draw(st.sampled_from(["", "", "", "source", "op", "after", "sequence", "lsn"]))
    if change in value:
        del value[change]
    elif change:
        value["source"][change] = draw(scalars)
    text = json.dumps(value).replace('"ROW"', draw(rows_as_text))
    kinds = ["", "", "", "schema", "null", "cut", "twice", "beat"]
    match draw(st.sampled_from(kinds)):
        case "schema":
            text = json.dumps(with_schema(FIELDS, {"x": 0})).replace('{"x": 0}', text)
        case "null":
            text = f'{{"schema":null,"payload":{text}}}'
        case "cut":
            text = text[: draw(st.integers(0, len(text)))]
        case "twice":
            text = f'{{"op":"c","source":7,{text[1:]}'
        case "beat":
            text = '{"ts_ms":1}'
        case _:
            pass
    return encoded(text)


keys = st.sampled_from([{"id": 1}, {"id": 2}, {"b": "ü", "a": 1}, {"id": None}, None, b"{"])


def exactly() -> ExitStack:
    """Every value is taken alone."""
    stack = ExitStack()
    for module, name in (
        ("envelope.envelopes", "strings"),
        ("envelope.values", "strings"),
        ("envelope.images", "_together"),
        ("ordering.postgres", "_alike"),
    ):
        path = f"dagster_bq_connector.cdc.{module}.{name}"
        stack.enter_context(patch(path, lambda *given: None))
    return stack


def everything(messages: pa.RecordBatch) -> tuple[Events, Any, Any, Rows]:
    envelope, profile = DebeziumJson(), PostgresLsn()
    found = envelope.events(messages, profile)
    sequences, failed = profile.sequences(found.changes)
    chosen = np.arange(found.changes.num_rows)
    return found, sequences, failed, envelope.rows(found, chosen, COLUMNS)


def as_texts(changes: pa.RecordBatch) -> list[dict[str, Any]]:
    """Changes; integers among the coordinates as text, which they are beside other values."""
    found = changes.to_pylist()
    for change in found:
        for path, value in change["coordinates"].items():
            change["coordinates"][path] = value if value is None else str(value)
    return found


def assert_same(one: Rows, other: Rows) -> None:
    assert one.batch.schema == other.batch.schema
    assert repr(one.batch.to_pylist()) == repr(other.batch.to_pylist())
    assert one.kept.tolist() == other.kept.tolist()
    assert one.failed == other.failed
    assert one.unknown == other.unknown
    for mine, theirs in ((one.unavailable, other.unavailable), (one.missing, other.missing)):
        assert {k: m.tolist() for k, m in mine.items()} == {
            k: m.tolist() for k, m in theirs.items()
        }


@given(st.lists(st.tuples(keys, envelopes()), max_size=12), st.integers(1, 5))
def test_both_ways_give_the_same(messages: list[tuple[Any, bytes]], size: int) -> None:
    with patch.object(batch, "CHUNK", size), patch.object(images, "CHUNK", size):
        found, sequences, failed, rows = everything(batch_of_topic(*messages))
    with exactly():
        wanted, its_sequences, its_failed, its_rows = everything(batch_of_topic(*messages))
    assert found.fates.tolist() == wanted.fates.tolist()
    assert found.failed == wanted.failed
    assert as_texts(found.changes) == as_texts(wanted.changes)
    assert (sequences.to_pylist(), failed) == (its_sequences.to_pylist(), its_failed)
    assert_same(rows, its_rows)


@given(st.lists(st.tuples(keys, envelopes()), min_size=1, max_size=8))
def test_a_message_has_the_fate_that_it_has_alone(messages: list[tuple[Any, bytes]]) -> None:
    found = DebeziumJson().events(batch_of_topic(*messages), PostgresLsn())
    alone = [DebeziumJson().events(batch_of_topic(message), PostgresLsn()) for message in messages]
    assert found.fates.tolist() == [its.fates[0] for its in alone]
    assert [one.reason for one in found.failed] == [f.reason for its in alone for f in its.failed]
    changes = [change for its in alone for change in as_texts(its.changes)]
    assert [change | {"message": 0} for change in as_texts(found.changes)] == changes


@given(st.lists(fitting, min_size=1, max_size=20), st.booleans())
def test_rows_that_fit_are_what_json_says(rows: list[Any], ascii_only: bool) -> None:
    messages = [
        (
            {"id": number},
            encoded(json.dumps(event("u", 0)).replace('"after": 0', f'"after": {text}')),
        )
        for number, text in enumerate(text_of(row, False, ascii_only) for row in rows)
    ]
    *_, found = everything(batch_of_topic(*messages))
    assert not found.failed
    wanted = [dict(row) for row in rows]
    assert found.batch.column("id").to_pylist() == [row["id"] for row in wanted]
    assert found.batch.column("price").to_pylist() == [float(row["price"]) for row in wanted]
    names = [None if row["name"] == MARKER else row["name"] for row in wanted]
    assert found.batch.column("name").to_pylist() == names


@given(st.lists(st.text() | st.just("\0")) | st.lists(st.none() | st.text() | st.integers()))
def test_strings(values: list[Any]) -> None:
    found = arrays.strings(values)
    if found is None:
        plain = all(isinstance(value, str) for value in values)
        assert not values or not plain or any("\0" in value for value in values)
    else:
        found.validate(full=True)
        assert found.to_pylist() == values


@pytest.mark.parametrize("value", ["", "\0", "ü", "x" * 100])
def test_strings_that_are_all_the_same(value: str) -> None:
    found = arrays.strings([value] * 5)
    assert found is not None
    assert found.to_pylist() == [value] * 5


@given(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)))
def test_integers(values: list[int | None]) -> None:
    assert arrays.integers(values).to_pylist() == values


@given(st.lists(st.binary()))
def test_lines(documents: list[bytes]) -> None:
    found = arrays.lines(documents)
    found.validate(full=True)
    assert found.to_pylist() == [document + b"\n" for document in documents]


parts = st.sampled_from(["0", "7", "10", "017", "1x", "9" * 19, "9" * 20, "-1", "12345", "54321"])
pairs = st.builds(lambda a, b: f'["{a}","{b}"]', parts, parts)


@given(st.lists(pairs | parts.map(lambda part: f'[null,"{part}"]'), min_size=1, max_size=4))
def test_sequences(texts: list[str]) -> None:
    messages = batch_of_topic(*[({"id": 1}, event(sequence=text, lsn=None)) for text in texts])
    changes = DebeziumJson().events(messages, PostgresLsn()).changes
    found, failed = PostgresLsn().sequences(changes)
    with patch.object(postgres, "_alike", lambda texts: None):
        wanted, its_failed = PostgresLsn().sequences(changes)
    assert (found.to_pylist(), failed) == (wanted.to_pylist(), its_failed)


def test_names_that_differ_in_case_alone_fail_their_row() -> None:
    rows = [{"id": 1, "name": "x"}, {"id": 2, "ID": 3}, {"ID": 4, "name": "y"}, {"id": 5}]
    messages = [({"id": number}, event(after=row)) for number, row in enumerate(rows)]
    *_, found = everything(batch_of_topic(*messages))
    assert found.batch.column("id").to_pylist() == [1, 4, 5]
    assert [one.message for one in found.failed] == [1]
    assert "differ in case alone" in found.failed[0].reason


def test_keys_below_a_schema_that_is_null() -> None:
    key = b'{"schema":null,"payload":{"id":1}}'
    found = DebeziumJson().events(batch_of_topic((key, event(after={"id": 1}))), PostgresLsn())
    assert found.changes.column("key").to_pylist() == [b'{"id":1}']


ADDED = {"op": "u", "source_schema": "public", "source_table": "orders", "source_lsn": 17}
ADDED |= {"source_sequence": '["16","17"]', "source_snapshot": "false", "source_ts_ms": 1}


@given(st.lists(st.sampled_from(["wrapped", "bare", "delete", "beat"]), max_size=8), st.booleans())
def test_keys_stay_with_their_rows(kinds: list[str], embedded: bool) -> None:
    messages: list[tuple[Any, Any]] = []
    for number, kind in enumerate(kinds):
        row = {"id": number, "name": f"n{number}"}
        value: dict[str, Any] = event("d" if kind == "delete" else "u", row)
        if kind == "bare":
            value = row | {f"__{name}": its for name, its in ADDED.items()}
        key: Any = {"id": number}
        if embedded and number % 2:
            key = {"schema": {"type": "struct", "fields": []}, "payload": key}
        messages.append((key, {"ts_ms": 1} if kind == "beat" else value))
    found, *_, rows = everything(batch_of_topic(*messages))
    numbers = [number for number, kind in enumerate(kinds) if kind != "beat"]
    assert found.changes.column("message").to_pylist() == numbers
    assert found.changes.column("key").to_pylist() == [b'{"id":%d}' % n for n in numbers]
    assert rows.batch.column("id").to_pylist() == numbers
    names = [None if kinds[n] == "delete" else f"n{n}" for n in numbers]
    assert rows.batch.column("name").to_pylist() == names


def test_payloads_below_schemas_that_are_known_and_that_are_not() -> None:
    envelope = DebeziumJson()
    wide = [*FIELDS, {"type": "boolean", "field": "paid"}]
    value = event(after={"id": 1, "name": "x"})
    spaced = b" " + json.dumps(with_schema(FIELDS, value), indent=1).encode()
    forms = [with_schema(FIELDS, value), value, with_schema(wide, value), spaced, {"size": 1}]
    for count in (1, 2, 5, 5):
        chosen = forms[:count][::-1]
        found = envelope.events(
            batch_of_topic(*[({"id": 1}, its) for its in chosen]), PostgresLsn()
        )
        assert found.changes.num_rows == count - (count == 5)
        rows = envelope.rows(found, np.arange(found.changes.num_rows), COLUMNS[:2])
        assert rows.batch.to_pylist() == [{"id": 1, "name": "x"}] * rows.batch.num_rows
