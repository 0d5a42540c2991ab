"""Which changes of a batch are written: of each key the last good one, its values filled in."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_bq_connector.cdc.apply.batches import MOST_ROWS, put_together
from dagster_bq_connector.cdc.apply.contract import interval
from dagster_bq_connector.cdc.apply.keys import payload_of, source_table, wrong_keys
from dagster_bq_connector.cdc.apply.survivors import Chooser, Shape, Survivors
from dagster_bq_connector.cdc.envelope.debezium_json import DebeziumJson
from dagster_bq_connector.cdc.event import FILE, MESSAGES, name_of
from dagster_bq_connector.cdc.ordering.postgres import PostgresLsn
from support.debezium import batch, batch_of, event
from support.upserts import COLUMNS, SOURCE, change

MARKER = "__debezium_unavailable_value"
# Operation, key, place in the order, `n` (x does not fit), `s` (? was not sent).
Change = tuple[str, int, int, Any, str]

steps = st.tuples(
    st.sampled_from("cuuuud"),
    st.integers(0, 2),
    st.integers(1, 9),
    st.sampled_from([1, 2, 3, "x"]),
    st.sampled_from(["a", "b", "?", "?"]),
)


def chosen(given: list[Change], fills: bool = True) -> tuple[Survivors, list[dict[str, Any]]]:
    messages = batch(
        *(change(op, lsn * 10, key, n, MARKER if s == "?" else s) for op, key, lsn, n, s in given)
    )
    envelope, profile = DebeziumJson(), PostgresLsn()
    events = envelope.events(messages, profile)
    sequences, failed = profile.sequences(events.changes)
    assert not failed
    shape = Shape("d.t", SOURCE, COLUMNS, ["id"], True, fills)
    found = Chooser(envelope, events, sequences, shape).choose(np.arange(len(given)))
    return found, found.batch.to_pylist()


def by_loop(given: list[Change], fills: bool) -> tuple[dict[int, Any], set[int]]:
    """The row of each key that has one, or None when it is deleted; and who has failed."""
    last: dict[int, Any] = {}
    failed: set[int] = set()
    for key in {key for _, key, *_ in given}:
        order = [index for index, its in enumerate(given) if its[1] == key]
        order.sort(key=lambda index: given[index][2])
        known: str | None = None  # of the large value
        late: set[int] = set()
        for index in order:
            op, _, _, n, s = given[index]
            if op == "d":
                known, late, last[key] = None, set(), None
                continue
            if n == "x":
                known = None  # it may have changed it
                late.add(index)
                continue
            known = s if s != "?" else known if fills else None
            if known is None:
                late.add(index)
                continue
            late, last[key] = set(), (n, known)
            known = known if fills or s != "?" else None
        failed |= late
    return last, failed


@given(st.lists(steps, max_size=14), st.booleans())
def test_it_is_what_a_loop_finds(changes: list[Change], fills: bool) -> None:
    if not changes:
        return
    found, rows = chosen(changes, fills)
    last, failed = by_loop(changes, fills)
    ops = [changes[index][0] for index in found.changes.tolist()]
    assert {
        row["id"]: None if op == "d" else (row["n"], row["s"])
        for op, row in zip(ops, rows, strict=True)
    } == last
    assert set(found.failed) == failed
    assert len(rows) == len(last)


def test_what_bigquery_refuses_gives_way_to_the_change_before() -> None:
    messages = batch(*(change("u", lsn, 1, lsn, "a") for lsn in (10, 20, 30)))
    envelope, profile = DebeziumJson(), PostgresLsn()
    events = envelope.events(messages, profile)
    sequences, _ = profile.sequences(events.changes)
    shape = Shape("d.t", SOURCE, COLUMNS, ["id"], True)
    chooser = Chooser(envelope, events, sequences, shape)
    candidates = np.arange(3)
    assert chooser.choose(candidates).changes.tolist() == [2]
    assert chooser.but_for([2], candidates).changes.tolist() == [1]
    assert chooser.but_for([0, 1, 2], candidates).changes.tolist() == []


@pytest.mark.parametrize(
    ("key", "right"),
    [
        (b'{"id":1}', True),
        (b'{"ID":-1.5e3}', True),
        (b'{"id":"x"}', True),
        (b'{"id":"a \\"b\\" {"}', True),
        (b'{"id":true}', True),
        (b'{"id":{"scale":1,"value":"AQ=="}}', True),
        (b'{"id":[1]}', True),
        (b'{"nr":1}', False),
        (b'{"id":1,"nr":2}', False),
        (b'{"id":"1\\",\\"nr\\":\\"2"}', True),
    ],
)
def test_the_fields_of_keys(key: bytes, right: bool) -> None:
    assert (wrong_keys(pa.array([key]), ["Id"]) == {}) is right


def test_the_fields_of_keys_of_several_columns() -> None:
    texts = ['{"B":"x","a-1":1,"é":2}', '{"B":"x","a-1":1}', '{"A-1":1,"b":"x","É":2}']
    keys = [text.encode() for text in texts]
    found = wrong_keys(pa.array(keys), ["a-1", "b", "é"])
    assert found == {1: ("B", "a-1")}


def test_the_table_of_a_message_that_is_no_change() -> None:
    assert source_table(b'{"source":{"schema":"public","table":"t"}}') == "public.t"
    assert source_table(b'{"source":{"db":"shop","table":"t"}}') == "shop.t"
    assert source_table(b'{"schema":{},"payload":{"source":{"schema":"s","table":"t"}}}') == "s.t"
    assert source_table(b'{"id":1,"__source_schema":"s","__source_table":"t"}') == "s.t"
    for none in (None, b"", b"{", b"[]", b"7", b"{}", b'{"source":7}', b'{"source":{}}', b"\xff"):
        assert source_table(none) is None
    assert payload_of(b'{"schema":1,"payload":null}') == {}


def test_batches_are_put_together_as_far_as_they_are_of_one_file() -> None:
    first, second, third = (batch_of([(topic, {"id": 1}, None)] * 2) for topic in ("a", "b", "a"))
    [one] = put_together([first, second, first.slice(0, 0), third])
    assert [name_of(one, index) for index in range(6)] == [
        "a[0]@0",
        "a[0]@1",
        "b[0]@0",
        "b[0]@1",
        "a[0]@0",
        "a[0]@1",
    ]
    assert one.schema.equals(MESSAGES)
    files = [
        each.cast(MESSAGES.with_metadata({FILE: name}))
        for each, name in ((first, b"1"), (second, b"1"), (third, b"2"))
    ]
    assert [each.num_rows for each in put_together(files)] == [4, 2]
    assert [name_of(each, 0) for each in put_together(files)] == ["1, line 0", "2, line 0"]
    assert list(put_together([])) == list(put_together([first.slice(0, 0)])) == []


def test_batches_that_are_put_together_are_bounded() -> None:
    large = batch_of([("a", {"id": 1}, {"text": "x" * 1_000_000})] * 10)
    assert [each.num_rows for each in put_together([large] * 7)] == [30, 30, 10]
    small = batch_of([("a", {"id": 1}, None)] * 10_000)
    sizes = [each.num_rows for each in put_together([small] * 11)]
    assert sizes == [MOST_ROWS, MOST_ROWS, 10_000]


def test_a_delete_has_but_its_key() -> None:
    messages = batch(({"id": 3}, event("d", lsn=20)))
    envelope, profile = DebeziumJson(), PostgresLsn()
    events = envelope.events(messages, profile)
    sequences, _ = profile.sequences(events.changes)
    shape = Shape("d.t", SOURCE, COLUMNS, ["id"], True)
    found = Chooser(envelope, events, sequences, shape).choose(np.arange(1))
    assert found.batch.to_pylist() == [{"id": 3, "n": None, "s": None}]
    assert (found.failed, found.missing) == ({}, frozenset())


def test_times_as_the_rest_api_writes_them() -> None:
    assert interval(timedelta(minutes=10)) == "0-0 0 0:10:0"
    assert interval(timedelta(days=3, hours=25, seconds=61)) == "0-0 4 1:1:1"
