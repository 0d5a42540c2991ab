"""Events that cannot be applied: named, and dealt with as the policy says; dead letters."""

import datetime as dt
import re
import uuid
from typing import Any

import pytest
from google.cloud.bigquery import SchemaField
from google.cloud.bigquery_storage_v1 import types
from google.rpc import status_pb2

from dagster_bq_connector import BigQueryResource
from dagster_bq_connector.cdc.apply.redrive import redrive
from dagster_bq_connector.cdc.apply.upsert import Upsert
from dagster_bq_connector.cdc.event import FILE, MESSAGES, Fate
from dagster_bq_connector.cdc.table import CdcTable, DeadLetters
from dagster_bq_connector.errors import ConfigurationError, FailedEventsError
from dagster_bq_connector.progress import Progress
from support.debezium import event, with_schema
from support.fake_storage import FakeStorage, acknowledged
from support.protobuf_rows import message_class
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

GOOD = change("c", 10, 7, 7, "good")
ROW = {"id": 1, "n": 1, "s": "x"}
UNAVAILABLE = "__debezium_unavailable_value"
BASE64 = "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ=="
# What is wrong with a message, and what is said of it.
BAD: dict[str, tuple[Any, str]] = {
    "no JSON": (({"id": 1}, b"{"), "is no JSON object"),
    "no envelope": (({"id": 1}, {"id": 1}), "is no change event of Debezium"),
    "an unknown operation": (({"id": 1}, event("x", ROW)), "the operation 'x' is not known"),
    "a wrong key": (({"nr": 1}, event("c", ROW)), "wrong key: that of the message has 'nr', and"),
    "a key with more": (({"id": 1, "n": 1}, event("c", ROW)), "wrong key.* 'id', 'n', and"),
    "a key of null": (({"id": None}, event("c", ROW)), "null in 'id', which no primary key has"),
    "a key that is no object": ((b"7", event("c", ROW)), "is no JSON object of the key's columns"),
    "no key": ((None, event("c", ROW)), "the message has no key"),
    "null in a key column": (({"id": 1}, event("c", ROW | {"id": None})), "null in 'id', which b"),
    "no key column": (({"id": 1}, event("c", {"n": 1})), "no column 'id', which belongs to the p"),
    "a wrong type": (change("c", 20, 1, "x"), "x is text, which a INTEGER column does not take"),
    "an overflowing integer": (change("c", 20, 1, 2**63), "9223372036854775808"),
    "a column the table lacks": (change("c", 20, 1, more=1), "has no column 'more'"),
    "a missing LSN": (({"id": 1}, event("c", ROW, sequence=None)), "null is not an array of two"),
    "a value that was not sent": (change("u", 20, 1, 1, UNAVAILABLE), "REPLICA IDENTITY FULL"),
    "a row that is no object": (
        ({"id": 1}, event("c", [1])),
        "the row \\('after'\\) is no JSON ob",
    ),
}
_LSNS = event("c", ROW, lsn=20)
_LSNS["source"]["lsn"] = 21
# What ExtractNewRecordState adds to a row.
ADDED: dict[str, Any] = {
    "__op": "c",
    "__source_schema": "public",
    "__source_table": "orders",
    "__source_sequence": '["19","20"]',
    "__source_lsn": 20,
    "__source_snapshot": "false",
    "__source_ts_ms": 20,
}
BAD["contradicting LSNs"] = (({"id": 1}, _LSNS), "21 is not the second LSN of source.sequence")


def letters(bigquery: BigQueryResource, table: str, columns: str) -> list[tuple[Any, ...]]:
    return rows(bigquery, table, columns)


def redriven(applying: Upsert, drop: bool = False) -> tuple[int, int]:
    with Progress("again", lambda _: None) as progress:
        done = redrive(applying, progress, may_drop=lambda *_: drop)
    return done.applied, done.failed


@pytest.fixture(scope="module")
def table(bigquery: BigQueryResource) -> str:
    """A table that no bad event has changed."""
    dataset = f"bad_{uuid.uuid4().hex[:12]}"
    with bigquery.get_client() as client:
        client.create_dataset(dataset)
    apply(upsert(bigquery, orders(f"{dataset}.t")), changes(GOOD))
    return f"{dataset}.t"


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_event_is_named_and_nothing_of_its_batch_is_sent(
    bigquery: BigQueryResource, table: str, kind: str
) -> None:
    message, text = BAD[kind]
    given = changes(GOOD, message, change("c", 30, 8, 8, "good, too"))
    with pytest.raises(FailedEventsError, match=rf"shop.public.orders\[0\]@1.*{text}") as caught:
        apply(upsert(bigquery, orders(table)), given)
    assert len(caught.value.events) == 1
    assert rows(bigquery, table) == [(7, 7, "good")]


def test_bad_events_that_are_dropped_are_counted_and_named(
    bigquery: BigQueryResource, dataset: str
) -> None:
    """All of them in one batch, good ones between them."""
    # Beside the others of its key, that value is known.
    bad = [each for kind, each in BAD.items() if kind != "a value that was not sent"]
    good = [change("c", 30 + n, 100 + n, n, "good") for n in range(len(bad))]
    pairs = zip(good, (message for message, _ in bad), strict=True)
    given = changes(*(each for pair in pairs for each in pair))
    applied = apply(upsert(bigquery, orders(f"{dataset}.t"), failed_rows="drop"), given)
    assert rows(bigquery, f"{dataset}.t", "n") == sorted(((n,) for n in range(len(bad))), key=repr)
    assert applied.fates == {Fate.change: len(bad), Fate.failed: len(bad)}
    assert applied.failed == len(bad)
    texts = [text for _, text in bad]
    for number, (event_, text) in enumerate(zip(applied.failed_events, texts, strict=False)):
        assert re.search(rf"shop.public.orders\[0\]@{2 * number + 1}\b.*{text}", event_)
    assert len(applied.failed_events) == FailedEventsError.SHOWN


def test_an_operator_reads_where_what_and_what_to_do(
    bigquery: BigQueryResource, dataset: str
) -> None:
    given = changes(*(change("c", 10 + n, n, "x") for n in range(12)))
    with pytest.raises(FailedEventsError) as caught:
        apply(upsert(bigquery, orders(f"{dataset}.t")), given)
    lines = str(caught.value).splitlines()
    assert lines[0] == "12 event(s) of stream 'shop' cannot be applied:"
    assert lines[1].startswith("  shop.public.orders[0]@0, column 'n': x is text")
    assert (len(lines), lines[-2]) == (13, "  … and 2 more")
    for remedy in ("stands where", "Mend", "'drop'", "DeadLetters(table)", "skip"):
        assert remedy in lines[-1]


def test_a_line_of_a_file_is_named_by_file_and_line(
    bigquery: BigQueryResource, dataset: str
) -> None:
    schema = MESSAGES.with_metadata({FILE: b"changes-1.ndjson"})
    given = changes(GOOD, change("c", 20, 1, "x")).cast(schema)
    with pytest.raises(FailedEventsError, match=r"\n  changes-1.ndjson, line 1, column 'n': x is"):
        apply(upsert(bigquery, orders(f"{dataset}.t")), given)
    kept = f"{dataset}.letters"
    applying = upsert(bigquery, orders(f"{dataset}.t"), failed_rows=DeadLetters(kept))
    apply(applying, given)
    where = "source, file, topic, `partition`, `offset`"
    expected = ("changes-1.ndjson, line 1", "changes-1.ndjson", "shop.public.orders", 0, 1)
    assert letters(bigquery, kept, where) == [expected]
    assert redriven(applying) == (0, 1)
    assert letters(bigquery, kept, where) == [expected]


def test_the_change_before_takes_the_place_of_one_that_fails(
    bigquery: BigQueryResource, dataset: str
) -> None:
    table = f"{dataset}.t"
    given = changes(
        change("c", 10, 1, 1, "first"),
        change("u", 11, 1, 2, "second"),
        change("u", 12, 1, "bad", "third"),
        change("u", 13, 1, 2**70, "fourth"),
        change("c", 10, 2, "bad", "never good"),
        change("c", 11, 3, "bad", "first"),
        change("u", 12, 3, 3, "second"),
        change("u", 14, 4, "bad", "x"),
        change("d", 13, 4),
    )
    applied = apply(upsert(bigquery, orders(table), failed_rows="drop"), given)
    assert rows(bigquery, table) == [(1, 2, "second"), (3, 3, "second")]
    done = applied.tables[SOURCE]
    assert (done.upserts, done.deletes, done.superseded, done.failed) == (2, 1, 2, 4)
    assert [event.partition(",")[0][-1] for event in applied.failed_events] == ["2", "3", "4", "7"]


def test_a_required_column_that_a_row_lacks(bigquery: BigQueryResource, dataset: str) -> None:
    columns = [COLUMNS[0], COLUMNS[1], SchemaField("s", "STRING", "REQUIRED")]
    given = changes(({"id": 1}, event("c", {"id": 1, "n": 1})), GOOD, change("d", 40, 9))
    tables = orders(f"{dataset}.t", schema=columns)
    applied = apply(upsert(bigquery, tables, failed_rows="drop"), given)
    assert "no column 's', which is REQUIRED" in applied.failed_events[0]
    assert rows(bigquery, f"{dataset}.t") == [(7, 7, "good")]
    assert applied.tables[SOURCE].deletes == 1


def test_a_large_value_that_was_not_sent_is_that_of_the_change_before(
    bigquery: BigQueryResource, dataset: str
) -> None:
    """Public failure case 26: c(big="X", n=1), u(big=marker, n=2) ends as big="X", n=2."""
    table = f"{dataset}.t"
    given = changes(
        change("c", 10, 1, 1, "X"),
        change("u", 11, 1, 2, UNAVAILABLE),
        change("u", 12, 1, 3, UNAVAILABLE),
        change("c", 10, 2, 1, "Y"),
        change("d", 11, 2),
        change("u", 12, 2, 2, UNAVAILABLE),  # over a delete it is not known
        change("u", 13, 3, 3, UNAVAILABLE),  # nor is it without any change before
        change("u", 9, 4, 1, UNAVAILABLE),
        change("u", 12, 4, 2, "Z"),
    )
    applied = apply(upsert(bigquery, orders(table), failed_rows="drop"), given)
    assert rows(bigquery, table) == [(1, 3, "X"), (4, 2, "Z")]
    assert applied.failed == 2
    assert all(
        "ALTER TABLE public.orders REPLICA IDENTITY FULL" in e for e in applied.failed_events
    )
    apply(
        upsert(bigquery, orders(table), failed_rows="drop"),
        changes(change("u", 20, 1, 4, UNAVAILABLE)),
    )
    assert rows(bigquery, table) == [(1, 3, "X"), (4, 2, "Z")]  # never the marker


@pytest.mark.parametrize(
    ("kind", "field", "first", "marker", "value"),
    [
        (
            "BYTES",
            {"type": "bytes"},
            "3q0=",
            "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ==",
            b"\xde\xad",
        ),
        (
            "STRING",
            {"type": "array", "items": {"type": "string", "optional": True}},
            ["a", "b"],
            [UNAVAILABLE],
            ["a", "b"],
        ),
        ("JSON", {"type": "string", "name": "io.debezium.data.Json"}, "[1]", UNAVAILABLE, [1]),
    ],
)
def test_the_marker_in_other_disguises(
    bigquery: BigQueryResource,
    dataset: str,
    kind: str,
    field: dict[str, Any],
    first: Any,
    marker: Any,
    value: Any,
) -> None:
    """Public failure case 26: base64 of the marker, an array of the marker."""
    fields = [FIELDS[0], field | {"optional": True, "field": "big"}]
    given = changes(
        *(
            ({"id": 1}, with_schema(fields, event(op, {"id": 1, "big": big}, lsn, lsn - 1)))
            for op, lsn, big in (("c", 10, first), ("u", 11, marker))
        )
    )
    apply(upsert(bigquery, orders(f"{dataset}.t", schema=[])), given)
    assert rows(bigquery, f"{dataset}.t") == [(1, value)]
    with bigquery.get_client() as client:
        assert client.get_table(f"{dataset}.t").schema[1].field_type == kind


def test_dead_letters_hold_the_event_and_the_reason(
    bigquery: BigQueryResource, dataset: str
) -> None:
    """A replay of the plan doubles none of them."""
    table, kept = f"{dataset}.t", f"{dataset}.letters"
    applying = upsert(bigquery, orders(table), failed_rows=DeadLetters(kept), run_id="run-1")
    bad = change("c", 20, 1, "x")
    given = changes(GOOD, bad, ({"id": 1}, b"{"))
    began = dt.datetime.now(dt.UTC)
    applied = apply(applying, given)
    assert apply(applying, given) == applied
    assert applied.failed == 2
    assert rows(bigquery, table) == [(7, 7, "good")]
    first, second = letters(bigquery, kept, "* EXCEPT (reason, failed_at)")
    assert first[:7] == (
        "shop",
        "shop.public.orders[0]@1",
        "shop.public.orders",
        0,
        1,
        None,
        SOURCE,
    )
    assert first[7:] == (b'{"id":1}', given.column("value")[1].as_py(), "n", "run-1")
    assert second[6:] == (None, b'{"id":1}', b"{", None, "run-1")
    [(reason, failed_at), _] = letters(bigquery, kept, "reason, failed_at")
    assert "is no JSON object" in reason or "is text" in reason
    assert began <= failed_at <= dt.datetime.now(dt.UTC)


def test_dead_letters_are_applied_again_once_they_are_mended(
    bigquery: BigQueryResource, dataset: str
) -> None:
    """Their own sequences decide: an old event replaces no newer row, and deletes stay."""
    table, kept = f"{dataset}.t", f"{dataset}.letters"
    tables, policy = orders(table), {"failed_rows": DeadLetters(kept)}
    extra = {"more": 1}
    apply(
        upsert(bigquery, tables, **policy),
        changes(
            GOOD,
            change("c", 20, 1, 1, "to come", **extra),
            change("c", 21, 2, 2, "late", **extra),
            change("c", 22, 3, 3, "gone", **extra),
            change("c", 23, 4, "bad", "still"),
        ),
    )
    apply(
        upsert(bigquery, tables, **policy),
        changes(change("u", 30, 2, 2, "newer"), change("d", 31, 3)),
    )
    assert rows(bigquery, table) == [(2, 2, "newer"), (7, 7, "good")]
    assert redriven(upsert(bigquery, tables, **policy)) == (0, 4)
    with bigquery.get_client() as client:
        client.query_and_wait(f"ALTER TABLE {table} ADD COLUMN more INT64")
    assert redriven(upsert(bigquery, tables, **policy)) == (3, 1)
    expected = [(1, 1, "to come", 1), (2, 2, "newer", None), (7, 7, "good", None)]
    assert rows(bigquery, table) == expected
    assert letters(bigquery, kept, "source") == [("shop.public.orders[0]@4",)]
    assert redriven(upsert(bigquery, tables, **policy)) == (0, 1)
    assert redriven(upsert(bigquery, tables, **policy), drop=True) == (0, 1)
    assert letters(bigquery, kept, "source") == []
    assert rows(bigquery, table) == expected
    other = Upsert(**vars_of(upsert(bigquery, tables, **policy)) | {"stream": "another"})
    assert redriven(other) == (0, 0)  # their letters are not those of this stream


def vars_of(upsert: Upsert) -> dict[str, Any]:
    names = ("connection", "format", "ordering", "tables", "failed_rows")
    return {name: getattr(upsert, name) for name in names}


def test_no_value_is_taken_over_what_is_not_among_the_dead_letters(
    bigquery: BigQueryResource, dataset: str
) -> None:
    table, policy = f"{dataset}.t", {"failed_rows": DeadLetters(f"{dataset}.letters")}
    applying = upsert(bigquery, orders(table), **policy)
    apply(applying, changes(change("c", 10, 1, 1, "old", more=1)))
    apply(applying, changes(GOOD, change("u", 11, 1, 2, "newer")))
    apply(applying, changes(GOOD, GOOD, change("u", 12, 1, 3, UNAVAILABLE)))
    with bigquery.get_client() as client:
        client.query_and_wait(f"ALTER TABLE {table} ADD COLUMN more INT64")
    assert redriven(applying) == (1, 1)
    assert rows(bigquery, table, "id, n, s") == [(1, 2, "newer"), (7, 7, "good")]


def test_a_dead_letter_that_changes_no_row_by_itself_stays(
    bigquery: BigQueryResource, dataset: str
) -> None:
    """A tombstone fails beside the rows of its topic that do not tell of deletes."""
    kept = f"{dataset}.letters"
    applying = upsert(bigquery, orders(f"{dataset}.t"), failed_rows=DeadLetters(kept))
    row = {"id": 1, "n": 1, "s": "x"} | ADDED
    assert apply(applying, changes(({"id": 1}, row), ({"id": 2}, None))).failed == 1
    assert rows(bigquery, f"{dataset}.t") == [(1, 1, "x")]
    for _ in range(2):
        assert redriven(applying) == (0, 1)
        assert letters(bigquery, kept, "key") == [(b'{"id":2}',)]
    assert redriven(applying, drop=True) == (0, 1)
    assert letters(bigquery, kept, "key") == []


def test_a_parked_table_lets_the_others_go_on(bigquery: BigQueryResource, dataset: str) -> None:
    table, kept = f"{dataset}.t", f"{dataset}.letters"
    items = {"public.items": CdcTable(f"{dataset}.items", schema=COLUMNS, parked=True)}
    policy = {"failed_rows": DeadLetters(kept)}
    parked = ({"id": 9}, event("c", {"id": 9, "n": 9, "s": "parked"}, table="items"))
    applied = apply(upsert(bigquery, orders(table) | items, **policy), changes(GOOD, parked))
    assert applied.tables["public.items"].failed == applied.failed == 1
    assert rows(bigquery, table) == [(7, 7, "good")]
    where = "source_table, reason, key"
    assert letters(bigquery, kept, where) == [("public.items", "parked", b'{"id":9}')]
    assert redriven(upsert(bigquery, orders(table) | items, **policy), drop=True) == (0, 1)
    assert redriven(upsert(bigquery, orders(table), **policy), drop=True) == (0, 1)
    [(source, reason, _)] = letters(bigquery, kept, where)
    assert (source, reason[:28]) == ("public.items", "the stream names no table fo")
    items = {"public.items": CdcTable(f"{dataset}.items", schema=COLUMNS)}
    assert redriven(upsert(bigquery, orders(table) | items, **policy)) == (1, 0)
    assert rows(bigquery, f"{dataset}.items") == [(9, 9, "parked")]
    assert letters(bigquery, kept, where) == []
    with pytest.raises(ConfigurationError, match="public.orders: the changes of a parked table"):
        upsert(bigquery, orders(table, parked=True))


def test_what_is_no_policy(bigquery: BigQueryResource, dataset: str) -> None:
    with pytest.raises(ConfigurationError, match="failed_rows='skip': it is 'fail', 'drop' or D"):
        upsert(bigquery, orders(f"{dataset}.t"), failed_rows="skip")
    with pytest.raises(ConfigurationError, match="truncates='maybe': it is 'fail' or 'ignore'"):
        upsert(bigquery, orders(f"{dataset}.t"), truncates="maybe")
    with pytest.raises(ConfigurationError, match="Stream 'shop' keeps no dead letters: its fail"):
        redriven(upsert(bigquery, orders(f"{dataset}.t")))


def refusing(bad: int, received: list[dict[str, Any]]) -> Any:
    """An `append` that refuses rows of one `n`, and keeps the others."""

    def append(requests, _context):
        message: Any = None
        for request in requests:
            schema = types.ProtoSchema.pb(request.proto_rows.writer_schema)
            if schema.proto_descriptor.name:
                message = message_class(schema.proto_descriptor)
            found = [message.FromString(row) for row in request.proto_rows.rows.serialized_rows]
            if wrong := [index for index, row in enumerate(found) if row.n == bad]:
                errors = [types.RowError(index=index, message="no such n") for index in wrong]
                status = status_pb2.Status(code=3, message="Errors found while processing rows.")
                yield types.AppendRowsResponse(error=status, row_errors=errors)
            else:
                received.extend({"id": row.id, "n": row.n} for row in found)
                yield acknowledged()

    return append


def test_rows_that_bigquery_refuses(
    bigquery: BigQueryResource, dataset: str, fields: dict[str, Any], storage: FakeStorage
) -> None:
    """Only they fail, and the changes before them take their place."""
    received: list[dict[str, Any]] = []
    storage.append = refusing(13, received)
    faked = BigQueryResource(**(fields | {"storage_endpoint": f"http://{storage.address}"}))
    given = changes(
        change("c", 10, 1, 1),
        change("u", 11, 1, 13),
        change("u", 12, 1, 13),
        change("c", 10, 2, 2),
        change("c", 10, 3, 13),
    )
    applied = apply(upsert(faked, orders(f"{dataset}.t"), failed_rows="drop"), given)
    assert sorted(received, key=lambda row: row["id"]) == [{"id": 1, "n": 1}, {"id": 2, "n": 2}]
    done = applied.tables[SOURCE]
    assert (done.upserts, done.superseded, done.failed) == (2, 0, 3)
    assert sorted(applied.failed_events) == [
        f"shop.public.orders[0]@{offset}: BigQuery has refused the row: no such n"
        for offset in (1, 2, 4)
    ]
    with pytest.raises(FailedEventsError, match="@2: BigQuery has refused the row: no such n"):
        apply(upsert(faked, orders(f"{dataset}.t")), given)


def test_a_row_that_is_too_large_for_any_request(bigquery: BigQueryResource, dataset: str) -> None:
    table = f"{dataset}.t"
    given = changes(GOOD, change("c", 20, 1, 1, "small"), change("u", 21, 1, 2, "x" * 10_500_000))
    applied = apply(upsert(bigquery, orders(table), failed_rows="drop"), given)
    assert rows(bigquery, table) == [(1, 1, "small"), (7, 7, "good")]
    assert "it takes 10,500," in applied.failed_events[0]
