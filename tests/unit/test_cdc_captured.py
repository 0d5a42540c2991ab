"""Events that Debezium 3.6 has made of PostgreSQL 15: all decode, and what becomes of each."""

import datetime as dt
from collections import Counter
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.cdc.envelope.debezium_json import DebeziumJson
from dagster_bq_connector.cdc.event import FATES, Events, Fate, Rows
from dagster_bq_connector.cdc.fold import fold
from dagster_bq_connector.cdc.ordering.postgres import PostgresLsn
from support.debezium import captured

ORDERS = [
    SchemaField("id", "INTEGER", "REQUIRED"),
    SchemaField("customer", "STRING", "REQUIRED"),
    SchemaField("amount", "NUMERIC", precision=10, scale=2),
    SchemaField("updated_at", "TIMESTAMP", "REQUIRED"),
    SchemaField("note", "STRING"),
]
TYPES = {
    "id": "INTEGER",
    "n": "NUMERIC",
    "n0": "BIGNUMERIC",
    "m": "NUMERIC",
    "i2": "INTEGER",
    "i4": "INTEGER",
    "f4": "FLOAT",
    "f8": "FLOAT",
    "b": "BOOLEAN",
    "t": "STRING",
    "vc": "STRING",
    "ch": "STRING",
    "d": "DATE",
    "tm": "TIME",
    "tmtz": "TIME",
    "ts": "DATETIME",
    "tstz": "TIMESTAMP",
    "iv": "INTERVAL",
    "by": "BYTES",
    "j": "JSON",
    "jb": "JSON",
    "u": "STRING",
    "ia": "JSON",
    "ta": "JSON",
    "na": "JSON",
    "en": "STRING",
    "bt": "BOOLEAN",
    "b8": "BYTES",
    "vb": "BYTES",
    "ip": "STRING",
    "cd": "STRING",
    "mac": "STRING",
    "xm": "STRING",
    "pt": "GEOGRAPHY",
    "ir": "STRING",
    "tsr": "STRING",
    "hs": "STRING",
    "big": "STRING",
}
SCALES = {"n": (18, 4), "m": (10, 2)}
# The captured row of all types, as BigQuery has it.
ROW = {
    "id": 2,
    "n": Decimal("12345678901234.5678"),
    "n0": Decimal("1.23456789012345678901234567890"),
    "m": Decimal("12.34"),
    "i2": -5,
    "i4": 2147483647,
    "f4": 1.5,
    "f8": 3.141592653589793,
    "b": True,
    "t": "héllo 😀",
    "vc": "abc",
    "ch": "x    ",
    "d": dt.date(2026, 8, 1),
    "tm": dt.time(12, 34, 56, 789012),
    "tmtz": dt.time(10, 34, 56, 789012),
    "ts": dt.datetime(2026, 8, 1, 12, 34, 56, 789012),
    "tstz": dt.datetime(2026, 8, 1, 10, 34, 56, 789012, dt.UTC),
    "iv": pa.MonthDayNano([0, 0, 37_091_106_789_000_000]),
    "by": b"\xde\xad\xbe\xef",
    "j": '{"a": 1,"a":2}',
    "jb": '{"b": [1, 2, {"c": null}]}',
    "u": "b5d1c2a0-0000-4000-8000-000000000001",
    "ia": "[1,2,null]",
    "ta": '["a","b,c",null]',
    "en": "happy",
    "bt": True,
    "b8": b"\xaa",
    "vb": b"\x05",
    "ip": "10.0.0.1/24",
    "cd": "10.0.0.0/8",
    "mac": "08:00:2b:01:02:03",
    "xm": "<a>x</a>",
    "pt": "POINT(1.5 2.5)",
    "ir": "[1,10)",
    "tsr": '["2026-01-01 00:00:00+00","2026-02-01 00:00:00+00")',
    "hs": "'a' 'cat' 'fat'",
    "big": "xxxxxxxxxx",
}

each_form = pytest.mark.parametrize("schemas", [False, True], ids=["plain", "with schemas"])


def columns_of_types(**others: str) -> list[SchemaField]:
    found: list[SchemaField] = []
    for name, kind in (TYPES | others).items():
        precision, scale = SCALES.get(name, (None, None))
        more = {} if precision is None else {"precision": precision, "scale": scale}
        found.append(SchemaField(name, kind, **more))
    return found


def decoded(schemas: bool) -> tuple[DebeziumJson, Events]:
    envelope = DebeziumJson(time_precision="microseconds")
    return envelope, envelope.events(captured(schemas), PostgresLsn(transaction_order=True))


def of_table(events: Events, table: str) -> np.ndarray[Any, Any]:
    tables = events.changes.column("table").to_pylist()
    return np.array([index for index, name in enumerate(tables) if name == table], np.int64)


def rows_of(schemas: bool, table: str, columns: list[SchemaField]) -> tuple[Events, Rows]:
    envelope, events = decoded(schemas)
    return events, envelope.rows(events, of_table(events, table), columns)


@each_form
def test_what_becomes_of_each_operation(schemas: bool) -> None:
    _, events = decoded(schemas)
    assert Counter(FATES[code] for code in events.fates.tolist()) == {
        Fate.change: 31,
        Fate.tombstone: 6,
        Fate.truncate: 1,
        Fate.heartbeat: 4,
        Fate.transaction: 36,
        Fate.logical_message: 1,
        Fate.failed: 1,
    }
    changes = events.changes.select(["table", "operation"]).to_pylist()
    assert Counter((c["table"], c["operation"]) for c in changes) == {
        ("public.orders", "r"): 2,
        ("public.orders", "c"): 5,
        ("public.orders", "u"): 7,
        ("public.orders", "d"): 3,
        ("public.types", "r"): 2,
        ("public.types", "c"): 1,
        ("public.types", "u"): 2,
        ("public.types", "d"): 1,
        ("public.toast", "r"): 1,
        ("public.toast", "u"): 1,
        ("public.toast", "d"): 1,
        ("public.toast", "c"): 1,
        ("public.composite", "c"): 2,
        ("public.composite", "u"): 1,
        ("public.composite", "d"): 1,
    }


@each_form
def test_a_table_without_a_key_is_refused_by_name(schemas: bool) -> None:
    _, events = decoded(schemas)
    assert [failed.named(events.messages) for failed in events.failed] == [
        "inv_pg.public.nopk[0]@50: the message has no key, so it is not known which row it changes:"
        " give the source's table a primary key, or set message.key.columns on the connector"
    ]


@each_form
def test_the_final_rows(schemas: bool) -> None:
    envelope, events = decoded(schemas)
    sequences, failed = PostgresLsn(transaction_order=True).sequences(events.changes)
    assert not failed
    last = fold(events.changes.column("key"), events.changes.column("table"), sequences)
    orders = np.intersect1d(last, of_table(events, "public.orders"))
    rows = envelope.rows(events, orders, ORDERS)
    operations = events.changes.column("operation").take(pa.array(rows.kept)).to_pylist()
    found = {
        row["id"]: (operation, row["customer"], row["amount"])
        for row, operation in zip(rows.batch.to_pylist(), operations, strict=True)
    }
    assert not rows.failed
    assert found == {
        1: ("u", "ann", Decimal("100.99")),
        2: ("d", None, None),
        3: ("d", None, None),
        4: ("u", "t1", Decimal("4.00")),
        5: ("d", None, None),
        6: ("u", "d", Decimal("6.00")),
        1001: ("u", "bob", None),
    }


@each_form
def test_a_column_that_is_not_there_yet_is_missing_and_no_null(schemas: bool) -> None:
    events, rows = rows_of(schemas, "public.orders", ORDERS)
    changes = events.changes.take(pa.array(rows.kept))
    values = events.messages.column("value").take(changes.column("message")).to_pylist()
    operations = changes.column("operation").to_pylist()
    has = [b'"note":"' in value.partition(b'"after"')[2] for value in values]
    lacks = [op != "d" and not its for op, its in zip(operations, has, strict=True)]
    assert rows.missing["note"].tolist() == lacks
    assert {True, False} <= set(lacks)
    assert not rows.unavailable
    assert set(rows.missing) == {"note"}


@each_form
def test_a_column_that_the_table_lacks_is_named(schemas: bool) -> None:
    events, rows = rows_of(schemas, "public.orders", ORDERS[:4])
    assert list(rows.unknown) == ["note"]
    change = rows.unknown["note"]
    message = events.changes.column("message")[change].as_py()
    assert b'"note"' in events.messages.column("value")[message].as_py()


@each_form
def test_a_large_value_that_was_not_sent(schemas: bool) -> None:
    columns = [
        SchemaField("id", "INTEGER"),
        SchemaField("big", "STRING"),
        SchemaField("v", "INTEGER"),
    ]
    _, rows = rows_of(schemas, "public.toast", columns)
    assert rows.batch.column("v").to_pylist() == [1, 2, None, 2]
    assert rows.batch.column("big").is_null().to_pylist() == [False, True, True, True]
    assert rows.unavailable["big"].tolist() == [False, True, False, True]


@each_form
def test_every_type(schemas: bool) -> None:
    _, rows = rows_of(schemas, "public.types", columns_of_types())
    empty, full, *_ = rows.batch.to_pylist()
    assert {name for name, value in empty.items() if value is not None} == {"id"}
    arrays = full.pop("na")
    assert arrays == ('["1.10","2.20"]' if schemas else '["bg==","ANw="]')
    assert full == ROW
    assert set(rows.unknown) == {"ts3"}


@each_form
def test_infinite_values_are_refused_or_become_text(schemas: bool) -> None:
    _, rows = rows_of(schemas, "public.types", columns_of_types())
    refused = {(failed.message, failed.column): failed.reason for failed in rows.failed}
    if schemas:  # as text a decimal may be NaN; as bytes it has become null
        assert refused.pop((38, "n")) == (
            "NAN is no number that a decimal column can hold: use a STRING column"
        )
    assert set(refused) == {(32, "d"), (35, "d")}
    assert all("infinity" in reason and "STRING" in reason for reason in refused.values())
    if schemas:
        texts = columns_of_types(d="STRING", ts="STRING", ts3="STRING", tstz="STRING", n="STRING")
        _, rows = rows_of(schemas, "public.types", texts)
        assert not rows.failed
        created = rows.batch.slice(2, 1).to_pylist()[0]
        assert [created[name] for name in ("d", "ts", "ts3", "tstz")] == [
            "infinity",
            "-infinity",
            "infinity",
            "infinity",
        ]
        assert rows.batch.column("n")[4].as_py() == "NAN"
        assert rows.batch.column("ts3")[1].as_py() == "2026-08-01 12:34:56.789"


def test_the_columns_of_a_message_with_its_schema() -> None:
    envelope, events = decoded(schemas=True)
    found = envelope.columns(events, "public.types")
    assert found is not None
    kinds = {column.name: column.field_type for column in found}
    expected = TYPES | {"ts3": "DATETIME", "n": "STRING", "n0": "STRING", "m": "STRING"}
    expected |= {"ia": "INTEGER", "ta": "STRING", "na": "STRING"}
    assert kinds == expected
    assert {c.name for c in found if c.mode == "REPEATED"} == {"ia", "ta", "na"}
    orders = envelope.columns(events, "public.orders")
    assert orders is not None
    names = [column.name for column in orders]
    assert names == ["id", "customer", "amount", "updated_at", "note"]  # dropped meanwhile
    envelope, events = decoded(schemas=False)
    assert envelope.columns(events, "public.types") is None


@each_form
def test_the_log_of_the_run_is_in_order(schemas: bool) -> None:
    _, events = decoded(schemas)
    profile = PostgresLsn(transaction_order=True)
    state = profile.advance({}, events)
    assert profile.advance(state, events) == state
    sequences, _ = profile.sequences(events.changes)
    texts = sequences.to_pylist()
    assert texts == sorted(texts)
