"""The tables that changes go to: created, verified, reconciled, given columns."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest
from google.cloud import bigquery as google
from google.cloud.bigquery import SchemaField

from dagster_bq_connector import (
    BigQueryResource,
    ExactlyOnceWriter,
    FileLoadsWriter,
    TimePartitioning,
)
from dagster_bq_connector.cdc.event import Fate
from dagster_bq_connector.cdc.table import CdcTable
from dagster_bq_connector.errors import (
    ConfigurationError,
    ConnectorError,
    FailedEventsError,
    SchemaError,
    TableMismatchError,
    TableNotFoundError,
    UnsupportedError,
)
from dagster_bq_connector.write import default_stream
from support.debezium import event, with_schema
from support.fake_storage import FakeStorage, acknowledged, refused
from support.slices import regions
from support.upserts import (
    COLUMNS,
    FIELDS,
    SOURCE,
    apply,
    change,
    changes,
    orders,
    rows,
    upsert,
)

TEN_MINUTES = timedelta(minutes=10)
CREATED = changes(change("c", 10, 1, 1, "x"))
NOTE: dict[str, Any] = {"type": "string", "optional": True, "field": "note"}


def make(bigquery: BigQueryResource, sql: str) -> None:
    with bigquery.get_client() as client:
        client.query_and_wait(sql)


def get(bigquery: BigQueryResource, table: str) -> google.Table:
    with bigquery.get_client() as client:
        return client.get_table(table)


def staleness(bigquery: BigQueryResource, table: str) -> list[tuple[Any, ...]]:
    """As INFORMATION_SCHEMA has it."""
    dataset, _, name = table.partition(".")
    where = f"table_name = '{name}' AND option_name = 'max_staleness'"
    return rows(
        bigquery, f"{dataset}.INFORMATION_SCHEMA.TABLE_OPTIONS WHERE {where}", "option_value"
    )


def schemed(op: str, lsn: int, fields: list[dict[str, Any]], **row: Any) -> tuple[Any, Any]:
    """A change below its schemas."""
    after = None if op == "d" else row
    value = with_schema(fields, event(op, after, lsn=lsn, committed=lsn - 1, ts_ms=lsn))
    schema = {"type": "struct", "fields": [fields[0]], "optional": False}
    return {"schema": schema, "payload": {"id": row["id"]}}, value


@pytest.mark.parametrize("of_messages", [True, False])
def test_a_missing_table_is_created_with_its_contract(
    bigquery: BigQueryResource, dataset: str, of_messages: bool
) -> None:
    """Public failure case 18: the primary key is that of the message's key."""
    table = f"{dataset}.t"
    given, schema = CREATED, COLUMNS
    if of_messages:
        given, schema = changes(schemed("c", 10, FIELDS, id=1, n=1, s="x")), []
    apply(upsert(bigquery, orders(table, schema=schema, max_staleness=TEN_MINUTES)), given)
    found = get(bigquery, table)
    assert found.table_constraints is not None
    assert found.table_constraints.primary_key is not None
    assert found.table_constraints.primary_key.columns == ["id"]
    assert found.clustering_fields == ["id"]
    assert [(field.name, field.field_type) for field in found.schema] == [
        ("id", "INTEGER"),
        ("n", "INTEGER"),
        ("s", "STRING"),
    ]
    assert staleness(bigquery, table) == [("0-0 0 0:10:0",)]
    assert rows(bigquery, table) == [(1, 1, "x")]


def test_partitioning_clustering_and_the_order_of_a_key(
    bigquery: BigQueryResource, dataset: str
) -> None:
    table = f"{dataset}.t"
    schema = [SchemaField("a", "INTEGER"), SchemaField("z", "BYTES"), SchemaField("day", "DATE")]
    how = {"schema": schema, "partitioning": TimePartitioning("day")}
    row = {"a": 1, "z": "AQ==", "day": 20_000}
    given = changes(({"z": "AQ==", "a": 1}, event("c", row)))
    apply(upsert(bigquery, orders(table, **how)), given)
    found = get(bigquery, table)
    assert found.table_constraints.primary_key.columns == ["z", "a"]
    assert found.clustering_fields == ["a"]  # BigQuery clusters by no BYTES
    assert found.time_partitioning.field == "day"
    apply(upsert(bigquery, orders(table, **how)), changes(({"a": 1, "z": "AQ=="}, event("d"))))
    assert rows(bigquery, table) == []
    other = f"{dataset}.other"
    apply(upsert(bigquery, orders(other, clustering=["n", "s"], primary_key=["ID"])), CREATED)
    found = get(bigquery, other)
    assert found.clustering_fields == ["n", "s"]
    assert found.table_constraints.primary_key.columns == ["id"]


def test_a_table_is_created_from_deletes_alone(bigquery: BigQueryResource, dataset: str) -> None:
    table = f"{dataset}.t"
    applying = upsert(bigquery, orders(table, schema=[]))
    apply(applying, changes(schemed("d", 20, FIELDS, id=1)))
    assert [field.name for field in get(bigquery, table).schema] == ["id"]
    late = schemed("c", 10, FIELDS, id=1, n=1, s="x")
    apply(applying, changes(late, schemed("c", 30, FIELDS, id=2, n=2, s="y")))
    assert rows(bigquery, table) == [(2, 2, "y")]


def test_a_missing_table_without_columns_is_refused(
    bigquery: BigQueryResource, dataset: str
) -> None:
    with pytest.raises(TableNotFoundError, match=r"does not exist, and the messages carry no sch"):
        apply(upsert(bigquery, orders(f"{dataset}.t", schema=[])), CREATED)
    with pytest.raises(ConfigurationError, match=r"primary key 'nr': neither its.*have 'nr'"):
        apply(upsert(bigquery, orders(f"{dataset}.t", primary_key=["nr"])), CREATED)


@pytest.mark.parametrize("key", [(), ("id",)])
def test_a_table_without_a_primary_key_is_refused(
    bigquery: BigQueryResource, dataset: str, key: tuple[str, ...]
) -> None:
    """Public failure cases 16 and 22: otherwise each change would be one more row, or none."""
    table = f"{dataset}.t"
    make(bigquery, f"CREATE TABLE {table} (id INT64, n INT64, s STRING)")
    with pytest.raises(TableMismatchError, match="has no primary key.* Nothing was sent") as caught:
        apply(upsert(bigquery, orders(table, primary_key=key, reconcile=True)), CREATED)
    assert rows(bigquery, table) == []
    statement = str(caught.value).rpartition("run: ")[2].replace("...", "`id`")
    make(bigquery, f"{statement}")
    apply(upsert(bigquery, orders(table, primary_key=key, clustering=())), CREATED, CREATED)
    assert rows(bigquery, table) == [(1, 1, "x")]


def test_a_source_without_a_key_is_an_error_and_no_empty_table(
    bigquery: BigQueryResource, dataset: str
) -> None:
    """Public failure cases 18 and 22: events without a key stop the stream."""
    given = changes((None, event("c", {"id": 1})))
    with pytest.raises(FailedEventsError, match=r"no key, so it is not known.* primary key"):
        apply(upsert(bigquery, orders(f"{dataset}.t")), given)


def test_what_differs_is_named(bigquery: BigQueryResource, dataset: str) -> None:
    table = f"{dataset}.t"
    make(
        bigquery,
        f"CREATE TABLE {table} (id INT64, n INT64, s STRING, PRIMARY KEY (n) NOT ENFORCED) "
        "CLUSTER BY s OPTIONS (max_staleness = INTERVAL 2 HOUR)",
    )
    asked = {"primary_key": ["id"], "max_staleness": TEN_MINUTES}
    for reconcile in (False, True):
        with pytest.raises(TableMismatchError) as caught:
            apply(upsert(bigquery, orders(table, **asked, reconcile=reconcile)), CREATED)
        text = str(caught.value)
        assert "primary key: asked for 'id', the table has 'n'" in text
        assert "clustered by: asked for n, the table has s" in text
        assert "max_staleness: asked for 0:10:00, the table has 2:00:00" in text
        assert ("CdcTable(reconcile=True)" in text) is not reconcile
    assert rows(bigquery, table) == []
    assert get(bigquery, table).clustering_fields == ["s"]


def test_what_may_be_changed_is(bigquery: BigQueryResource, dataset: str) -> None:
    table = f"{dataset}.t"
    make(
        bigquery,
        f"CREATE TABLE {table} (id INT64, n INT64, s STRING, PRIMARY KEY (id) NOT ENFORCED)",
    )
    with pytest.raises(TableMismatchError, match="clustered by: asked for id, the table has none"):
        apply(upsert(bigquery, orders(table)), CREATED)
    for asked, has in (
        ({"max_staleness": TEN_MINUTES}, [("0-0 0 0:10:0",)]),
        ({"max_staleness": timedelta(days=1, hours=2)}, [("0-0 1 2:0:0",)]),
        ({}, [("0-0 1 2:0:0",)]),  # left as it is
        ({"max_staleness": timedelta(0)}, []),
    ):
        apply(upsert(bigquery, orders(table, reconcile=True, **asked)), CREATED)
        assert staleness(bigquery, table) == has
        apply(upsert(bigquery, orders(table, **asked)), CREATED)  # verified
    assert get(bigquery, table).clustering_fields == ["id"]
    assert rows(bigquery, table) == [(1, 1, "x")]


def test_a_view_takes_no_changes(bigquery: BigQueryResource, dataset: str) -> None:
    make(bigquery, f"CREATE VIEW {dataset}.v AS SELECT 1 AS id")
    with pytest.raises(UnsupportedError, match="is a view: changes are applied to a table"):
        apply(upsert(bigquery, orders(f"{dataset}.v")), CREATED)


def test_the_types_of_an_existing_table_win(bigquery: BigQueryResource, dataset: str) -> None:
    table = f"{dataset}.t"
    key = "PRIMARY KEY (ID) NOT ENFORCED"
    make(bigquery, f"CREATE TABLE {table} (ID INT64 NOT NULL, N NUMERIC, s STRING NOT NULL, {key})")
    given = changes(
        schemed("c", 10, FIELDS, id=1, n=1, s="x"),
        schemed("c", 11, FIELDS, id=2, n=2, s="y"),
        schemed("d", 12, FIELDS, id=1),
    )
    apply(upsert(bigquery, orders(table, clustering=())), given)
    assert rows(bigquery, table) == [(2, 2, "y")]


def test_a_new_column_comes_before_its_first_row(bigquery: BigQueryResource, dataset: str) -> None:
    table = f"{dataset}.t"
    applying = upsert(bigquery, orders(table, schema=[]))
    more = [*FIELDS, NOTE]
    applied = apply(
        applying,
        changes(schemed("c", 10, FIELDS, id=1, n=1, s="x")),
        changes(
            schemed("c", 11, FIELDS, id=2, n=2, s="y"),
            schemed("u", 12, more, id=1, n=2, s="x", note="new"),
            schemed("c", 13, FIELDS, id=3, n=3, s="z"),
        ),
    )
    assert rows(bigquery, table) == [(1, 2, "x", "new"), (2, 2, "y", None), (3, 3, "z", None)]
    assert [c.mode for c in get(bigquery, table).schema] == ["NULLABLE"] * 4
    assert applied.tables[SOURCE].missing == {"note"}
    assert [c.name for c in applied.tables[SOURCE].columns] == ["id", "n", "s", "note"]


def test_a_new_column_between_two_batches_of_a_plan(
    bigquery: BigQueryResource, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagster_bq_connector.cdc.apply.batches.MOST_ROWS", 1)
    table, more = f"{dataset}.t", [*FIELDS, NOTE]
    apply(
        upsert(bigquery, orders(table, schema=[])),
        changes(schemed("c", 10, FIELDS, id=1, n=1, s="x")),
        changes(schemed("c", 11, more, id=2, n=2, s="y", note="new")),
        changes(schemed("c", 12, FIELDS, id=3, n=3, s="z")),
        changes(schemed("u", 13, more, id=1, n=4, s="x", note="newer")),
    )
    assert rows(bigquery, table) == [(1, 4, "x", "newer"), (2, 2, "y", "new"), (3, 3, "z", None)]


def test_the_service_is_late_with_a_new_column(
    bigquery: BigQueryResource,
    dataset: str,
    fields: dict[str, Any],
    storage: FakeStorage,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Public failure case 10: the rows wait for the column; neither they nor it are dropped."""
    monkeypatch.setattr("dagster_bq_connector.cdc.apply.batches.MOST_ROWS", 1)
    pauses: list[float] = []
    monkeypatch.setattr(default_stream.time, "sleep", pauses.append)
    taken: list[int] = []  # rows, by the number of their descriptor's columns

    def append(requests, _context):
        columns = 0
        for request in requests:
            descriptor = request.proto_rows.writer_schema.proto_descriptor
            columns = len(descriptor.field) or columns
            if columns == 6 and storage.append_calls < 5:
                yield refused(7, "Input schema has more fields than BigQuery schema: 'note'.")
            else:
                taken.append(columns)
                yield acknowledged()

    storage.append = append
    faked = BigQueryResource(**(fields | {"storage_endpoint": f"http://{storage.address}"}))
    applied = apply(
        upsert(faked, orders(f"{dataset}.t", schema=[])),
        changes(schemed("c", 10, FIELDS, id=1, n=1, s="x")),
        changes(schemed("c", 11, [*FIELDS, NOTE], id=2, n=2, s="y", note="new")),
        changes(schemed("c", 12, FIELDS, id=3, n=3, s="z")),
    )
    assert taken == [5, 6, 6]
    assert len(pauses) == 3
    assert applied.tables[SOURCE].upserts == 3
    monkeypatch.setattr(default_stream, "SCHEMA_LAG_SECONDS", 0.0)
    storage.append_calls = -1_000
    with pytest.raises(
        SchemaError, match=r"the columns of the rows \('note'\), but .* not noticed"
    ):
        apply(upsert(faked, orders(f"{dataset}.t")), changes(schemed("c", 13, FIELDS, id=4)))


@pytest.mark.parametrize("evolution", ["none", "add"])
def test_a_column_that_the_table_lacks_fails_its_events_alone(
    bigquery: BigQueryResource, dataset: str, evolution: str
) -> None:
    """With evolution off, or when no schema says what the column is."""
    table = f"{dataset}.t"
    given = [
        change("c", 10, 1, 1, "x"),
        change("u", 11, 1, 2, "y", note=7),
        change("c", 12, 2, 2, "y", note=None),
        change("c", 13, 3, 3, "z"),
        change("d", 14, 4),
    ]
    tables = orders(table, evolution=evolution)
    with pytest.raises(FailedEventsError) as caught:
        apply(upsert(bigquery, tables), changes(*given))
    remedy = "evolution='add'" if evolution == "none" else "schemas.enable=true"
    assert [remedy in event for event in caught.value.events] == [True, True]
    assert [event.partition(":")[0] for event in caught.value.events] == [
        "shop.public.orders[0]@1, column 'note'",
        "shop.public.orders[0]@2, column 'note'",
    ]
    assert rows(bigquery, table) == []
    applied = apply(upsert(bigquery, tables, failed_rows="drop"), changes(*given))
    assert rows(bigquery, table) == [(1, 1, "x"), (3, 3, "z")]
    assert applied.tables[SOURCE].failed == applied.failed == applied.fates[Fate.failed] == 2


def test_a_table_that_goes_away_meanwhile(
    bigquery: BigQueryResource, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagster_bq_connector.cdc.apply.batches.MOST_ROWS", 1)
    monkeypatch.setattr(default_stream, "NEW_TABLE_SECONDS", 0.0)
    table, calls = f"{dataset}.t", list[int]()

    def drop_the_table() -> None:
        calls.append(1)
        if len(calls) == 3:
            while len(rows(bigquery, table)) < 2:  # until all is there that was sent
                pass
            make(bigquery, f"DROP TABLE {table}")

    given = [changes(change("c", 10 + n, n)) for n in range(4)]
    with pytest.raises(ConnectorError, match=rf"{table}.* (is gone|not exist)"):
        apply(upsert(bigquery, orders(table)), *given, check=drop_the_table)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"evolution": "relax"}, "it is 'none' or 'add'"),
        ({"primary_key": "id"}, "write a list of column names"),
        ({"clustering": list("abcde")}, "clustering takes 4 columns at most"),
        ({"max_staleness": timedelta(-1)}, "no time before now"),
        ({"table": "shop.orders$20260801"}, "is one partition: changes are applied to a whole"),
    ],
)
def test_what_is_no_table(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        CdcTable(**({"table": "shop.orders"} | wrong))


@pytest.mark.parametrize("created", [True, False])
def test_rows_of_a_stream_are_not_replaced(
    bigquery: BigQueryResource,
    dataset: str,
    load_writer: FileLoadsWriter,
    staged: Callable[[], list[str]],
    created: bool,
) -> None:
    """Public failure case 19: refused by every writer, and before anything is staged."""
    table = f"{dataset}.t"
    if not created:
        key = "PRIMARY KEY (id) NOT ENFORCED"
        make(bigquery, f"CREATE TABLE {table} (id INT64, n INT64, s STRING, {key})")
    apply(upsert(bigquery, orders(table, reconcile=not created)), CREATED)
    assert get(bigquery, table).labels == {"dagster_bq_cdc": "true"}
    data = pa.table({"id": [2], "n": [2], "s": ["y"]})
    once = ExactlyOnceWriter(bigquery=bigquery, ledger=f"{dataset}_ledger")
    for writer in (load_writer, once):
        for place in (table, regions(table, "x", column="s")):
            with pytest.raises(UnsupportedError, match="change data capture streams into it"):
                writer.replace(data, place, key=f"{dataset} {place}")
    with pytest.raises(UnsupportedError, match="take the label away"):
        load_writer.load_uris("gs://b/f", table, operation="replace", key=f"{dataset} uris")
    assert rows(bigquery, table) == [(1, 1, "x")]
    assert staged() == []
    with bigquery.get_client() as client:
        assert [each.table_id for each in client.list_tables(dataset)] == ["t"]
