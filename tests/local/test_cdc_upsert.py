"""Change events in tables of the local BigQuery: what every operation becomes."""

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from google.cloud.bigquery import SchemaField

from dagster_bq_connector import BigQueryResource
from dagster_bq_connector.cdc.apply import batches, target
from dagster_bq_connector.cdc.event import Fate
from dagster_bq_connector.cdc.ordering.postgres import PostgresLsn
from dagster_bq_connector.cdc.table import CdcTable
from dagster_bq_connector.errors import FailedEventsError, OrderBreakError
from support.debezium import captured, event
from support.fake_storage import acknowledged
from support.upserts import SOURCE, apply, change, changes, orders, rows, upsert

ORDERS_COLUMNS = [
    SchemaField("id", "INTEGER", "REQUIRED"),
    SchemaField("customer", "STRING", "REQUIRED"),
    SchemaField("amount", "NUMERIC", precision=10, scale=2),
    SchemaField("updated_at", "TIMESTAMP", "REQUIRED"),
    SchemaField("note", "STRING"),
]
COMPOSITE_COLUMNS = [
    SchemaField("a", "INTEGER"),
    SchemaField("b", "STRING"),
    SchemaField("v", "INTEGER"),
]


@pytest.mark.parametrize("schemas", [True, False], ids=["with schemas", "plain"])
def test_a_captured_run_ends_in_the_tables_of_the_source(
    bigquery: BigQueryResource, dataset: str, schemas: bool
) -> None:
    more: dict[str, Any] = {} if schemas else {"schema": ORDERS_COLUMNS}
    composite = {} if schemas else {"schema": COMPOSITE_COLUMNS}
    tables = {
        "public.orders": CdcTable(f"{dataset}.orders", **more),
        "public.composite": CdcTable(f"{dataset}.composite", **composite),
    }
    applied = apply(
        upsert(bigquery, tables, ordering=PostgresLsn(transaction_order=True)), captured(schemas)
    )
    assert rows(bigquery, f"{dataset}.orders", "id, customer, CAST(amount AS NUMERIC), note") == [
        (1, "ann", Decimal("100.99"), None),
        (1001, "bob", None, None),
        (4, "t1", Decimal(4), None),
        (6, "d", Decimal(6), None),
    ]
    assert rows(bigquery, f"{dataset}.composite") == [(1, "y", 2)]
    assert applied.messages == 80
    assert applied.fates == {
        Fate.change: 32,
        Fate.tombstone: 6,
        Fate.truncate: 1,
        Fate.heartbeat: 4,
        Fate.transaction: 36,
        Fate.logical_message: 1,
    }
    assert applied.others == {"public.types": 6, "public.toast": 4, "public.nopk": 1}
    orders = applied.tables["public.orders"]
    assert (orders.upserts, orders.deletes, orders.superseded, orders.failed) == (4, 3, 10, 0)
    assert orders.missing == {"note"}
    assert applied.tables["public.composite"].deletes == 1
    assert applied.first_sequence is not None
    assert applied.first_sequence.startswith("0" * 16)
    assert applied.failed == 0


ROW = [(1, 1, "old")]
# What the table holds of a key before: nothing, a row of an older change, one of a newer change, or
# a newer delete.
BEFORE: dict[str, Callable[[int], list[Any]]] = {
    "nothing": lambda key: [],
    "an older row": lambda key: [change("c", 10, key, 1, "old")],
    "a newer row": lambda key: [change("u", 90, key, 1, "old")],
    "a newer delete": lambda key: [change("d", 90, key)],
}
# And what comes of each operation then.
OUTCOMES = {
    "c": {"nothing": "new", "an older row": "new", "a newer row": "old", "a newer delete": None},
    "u": {"nothing": "new", "an older row": "new", "a newer row": "old", "a newer delete": None},
    "r": {"nothing": "new", "an older row": "new", "a newer row": "old", "a newer delete": None},
    "d": {"nothing": None, "an older row": None, "a newer row": "old", "a newer delete": None},
}
# Messages that change no row of the table.
PASSED: dict[str, tuple[tuple[Any, Any], Fate]] = {
    "tombstone": (({"id": 1}, None), Fate.tombstone),
    "heartbeat": (({"serverName": "shop"}, {"ts_ms": 1}), Fate.heartbeat),
    "transaction": (({"id": "7:1"}, {"status": "BEGIN", "id": "7:1"}), Fate.transaction),
    "logical message": (({"prefix": "p"}, event("m", lsn=20)), Fate.logical_message),
    "schema change": ((None, {"ddl": "DROP", "source": {"db": "shop"}}), Fate.schema_change),
}


@pytest.mark.parametrize("op", OUTCOMES)
def test_each_operation_on_each_state_of_its_row(
    bigquery: BigQueryResource, dataset: str, op: str
) -> None:
    """In batches of their own, twice, and all in one batch."""
    keys = {before: key for key, before in enumerate(BEFORE)}
    earlier = [each for before, key in keys.items() for each in BEFORE[before](key)]
    given = [change(op, 20, key, 2, "new") for key in keys.values()]
    expected = [
        (key, 2 if text == "new" else 1, text)
        for before, key in keys.items()
        if (text := OUTCOMES[op][before])
    ]
    apart, together = f"{dataset}.apart", f"{dataset}.together"
    applying = upsert(bigquery, orders(apart))
    apply(applying, changes(*earlier))
    for _ in range(2):
        assert apply(applying, changes(*given)).fates == {Fate.change: 4}
        assert rows(bigquery, apart) == expected
    apply(upsert(bigquery, orders(together)), changes(*earlier, *given))
    assert rows(bigquery, together) == expected


@pytest.mark.parametrize("kind", PASSED)
def test_messages_that_change_no_row_are_counted(
    bigquery: BigQueryResource, dataset: str, kind: str
) -> None:
    message, fate = PASSED[kind]
    given = changes(change("c", 10, 1, 1, "old"), message)
    applied = apply(upsert(bigquery, orders(f"{dataset}.t")), given)
    assert applied.fates == {Fate.change: 1, fate: 1}
    assert rows(bigquery, f"{dataset}.t") == ROW


def test_a_truncate_stops_the_stream_unless_it_is_ignored(
    bigquery: BigQueryResource, dataset: str
) -> None:
    table = f"{dataset}.t"
    apply(upsert(bigquery, orders(table)), changes(change("c", 10, 1, 1, "old")))
    truncate = changes(change("c", 20, 2), (None, event("t", lsn=30, committed=29, ts_ms=30)))
    for policy in ("fail", "drop"):
        with pytest.raises(FailedEventsError, match=r"@1: public.orders was truncated") as info:
            apply(upsert(bigquery, orders(table), failed_rows=policy), truncate)
        assert "truncates='ignore'" in str(info.value)
        assert rows(bigquery, table) == ROW
    applied = apply(upsert(bigquery, orders(table), truncates="ignore"), truncate)
    assert applied.fates == {Fate.change: 1, Fate.truncate: 1}
    assert len(rows(bigquery, table)) == 2
    other = changes((None, event("t", table="customers")))
    assert apply(upsert(bigquery, orders(table)), other).fates == {Fate.truncate: 1}


def test_a_changed_key_in_any_order(bigquery: BigQueryResource, dataset: str) -> None:
    """Public failure case 24: d(1), tombstone, c(2) with one LSN, delivered out of order."""
    table = f"{dataset}.t"
    delete, tombstone, create = change("d", 20, 1), ({"id": 1}, None), change("c", 20, 2, 1, "x")
    applying = upsert(bigquery, orders(table))
    apply(applying, changes(change("c", 10, 1, 1, "x")))
    apply(applying, changes(create), changes(tombstone), changes(delete))
    assert rows(bigquery, table) == [(2, 1, "x")]
    apply(applying, changes(tombstone, create, delete))
    assert rows(bigquery, table) == [(2, 1, "x")]


def test_a_plan_may_be_applied_again_and_nothing_changes(
    bigquery: BigQueryResource, dataset: str
) -> None:
    table = f"{dataset}.t"
    applying = upsert(bigquery, orders(table))
    first = changes(change("c", 10, 1, 1, "a"), change("c", 11, 2, 2, "b"))
    second = changes(change("u", 20, 1, 3, "c"), change("d", 21, 2))
    applied = apply(applying, first, second)
    assert apply(applying, first, second) == applied
    assert apply(applying, first).state != applied.state
    assert rows(bigquery, table) == [(1, 3, "c")]


def test_tables_of_one_topic_and_tables_that_nobody_names(
    bigquery: BigQueryResource, dataset: str
) -> None:
    tables = orders(f"{dataset}.t") | {"public.items": CdcTable(f"{dataset}.items")}
    tables["public.items"] = CdcTable(f"{dataset}.items", schema=orders("d.t")[SOURCE].schema)
    row = {"id": 7, "n": 7, "s": "x"}
    given = changes(
        change("c", 10, 1, 1, "old"),
        ({"id": 7}, event("c", row, table="items")),
        ({"id": 8}, event("c", row, table="nobody")),
        (None, event("c", row, table="keyless")),
    )
    applied = apply(upsert(bigquery, tables), given)
    assert rows(bigquery, f"{dataset}.t") == ROW
    assert rows(bigquery, f"{dataset}.items") == [(7, 7, "x")]
    assert applied.others == {"public.nobody": 1, "public.keyless": 1}
    assert applied.fates == {Fate.change: 4}
    assert {name: table.upserts for name, table in applied.tables.items()} == {
        SOURCE: 1,
        "public.items": 1,
    }


def test_order_that_is_lost_stops_before_anything_of_the_batch(
    bigquery: BigQueryResource, dataset: str
) -> None:
    table = f"{dataset}.t"
    lost = ({"id": 2}, event("c", {"id": 2}, lsn=3, committed=2, ts_ms=90_000))
    with pytest.raises(OrderBreakError):
        apply(
            upsert(bigquery, orders(table)),
            changes(change("c", 10, 1, 1, "old")),
            changes(change("c", 11, 3), lost),
        )
    with bigquery.get_client() as client:
        assert table.split(".")[1] not in [t.table_id for t in client.list_tables(dataset)]


def test_who_has_lost_the_lease_sends_nothing_more(
    bigquery: BigQueryResource, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "MOST_ROWS", 1)
    table, calls = f"{dataset}.t", list[int]()

    def check() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("the lease is lost")

    given = [changes(change("c", 10, 1, 1, "old")), changes(change("c", 11, 2))]
    with pytest.raises(RuntimeError, match="the lease is lost"):
        apply(upsert(bigquery, orders(table)), *given, check=check)
    assert len(calls) == 2
    assert rows(bigquery, table) in (ROW, [])  # what was under way may have arrived


def test_many_batches_in_bounded_memory(
    bigquery: BigQueryResource, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "MOST_ROWS", 50)
    monkeypatch.setattr(target, "HELD_BYTES", 50_000)
    given = [
        changes(*(change("u", 10 + n, n % 90, n, "x" * 100) for n in range(start, start + 100)))
        for start in range(0, 600, 100)
    ]
    applied = apply(upsert(bigquery, orders(f"{dataset}.t")), *given)
    done = applied.tables[SOURCE]
    assert (done.upserts, done.superseded) == (540, 60)
    expected = {n % 90: n for n in range(600)}
    assert rows(bigquery, f"{dataset}.t", "id, n") == sorted(expected.items(), key=repr)


def test_small_batches_are_put_together(bigquery: BigQueryResource, dataset: str) -> None:
    given = [changes(change("u", 10 + n, 1, n, "x")) for n in range(100)]
    checks: list[int] = []
    applying = upsert(bigquery, orders(f"{dataset}.t"))
    applied = apply(applying, *given, check=lambda: checks.append(1))
    assert len(checks) == 1
    assert applied.messages == 100
    assert (applied.tables[SOURCE].upserts, applied.tables[SOURCE].superseded) == (1, 99)
    assert rows(bigquery, f"{dataset}.t") == [(1, 99, "x")]


def test_nothing_to_apply(bigquery: BigQueryResource, dataset: str) -> None:
    applied = apply(upsert(bigquery, orders(f"{dataset}.t")))
    assert (applied.messages, applied.state, applied.tables) == (0, {}, {})
    assert applied.first_sequence is None


def test_every_change_carries_both_pseudo_columns(
    bigquery: BigQueryResource, dataset: str, fields: dict[str, Any], storage: Any
) -> None:
    """Public failure case 16: without them in the descriptor, changes are appended as rows."""
    received: list[Any] = []

    def append(requests, _context):
        for request in requests:
            received.append(request)
            yield acknowledged()

    storage.append = append
    faked = BigQueryResource(**(fields | {"storage_endpoint": f"http://{storage.address}"}))
    apply(upsert(faked, orders(f"{dataset}.t")), changes(change("c", 10, 1, 1, "x")))
    [request] = received
    assert request.write_stream.endswith("/tables/t/streams/_default")
    descriptor = request.proto_rows.writer_schema.proto_descriptor
    names = [field.name for field in descriptor.field]
    assert names == ["id", "n", "s", "_CHANGE_TYPE", "_CHANGE_SEQUENCE_NUMBER"]
    assert b"UPSERT" in request.proto_rows.rows.serialized_rows[0]
