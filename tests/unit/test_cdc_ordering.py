"""PostgreSQL's order: every value of the reference table, and the rules of a break."""

import json
from typing import Any

import pyarrow as pa
import pytest

from dagster_bq_connector.cdc.envelope.debezium_json import DebeziumJson
from dagster_bq_connector.cdc.event import Events
from dagster_bq_connector.cdc.ordering.postgres import PostgresLsn
from dagster_bq_connector.errors import OrderBreakError
from support.debezium import batch, event


def events(*values: dict[str, Any], profile: PostgresLsn | None = None) -> Events:
    messages = batch(*[({"id": index}, value) for index, value in enumerate(values)])
    return DebeziumJson().events(messages, profile or PostgresLsn())


def sequence(text: Any, lsn: Any = None, **more: Any) -> tuple[str | None, list[str]]:
    found = events(event(sequence=text, lsn=lsn, **more))
    texts, failed = PostgresLsn().sequences(found.changes)
    return texts[0].as_py(), [str(one.column) for one in failed]


@pytest.mark.parametrize(
    ("text", "lsn", "wanted"),
    [
        ('[null,"16"]', 16, "0000000000000000/0000000000000010"),
        ('["16","17"]', 17, "0000000000000010/0000000000000011"),
        ('["17","18"]', 18, "0000000000000011/0000000000000012"),
        ('["18","19"]', 19, "0000000000000012/0000000000000013"),
        ('["19","20"]', 20, "0000000000000013/0000000000000014"),
        ('["19","21"]', 21, "0000000000000013/0000000000000015"),
        ('[null,"-9223372036854775808"]', None, "0000000000000000/8000000000000000"),
        ('[null,"9223372036854775808"]', None, "0000000000000000/8000000000000000"),
        ('[null,"-1"]', None, "0000000000000000/FFFFFFFFFFFFFFFF"),
        ('[null,"18446744073709551615"]', None, "0000000000000000/FFFFFFFFFFFFFFFF"),
        ('[null,"-1"]', 18446744073709551615, "0000000000000000/FFFFFFFFFFFFFFFF"),
        ('[null,"18446744073709551615"]', -1, "0000000000000000/FFFFFFFFFFFFFFFF"),
        (' [ "16" , "17" ] ', 17, "0000000000000010/0000000000000011"),
    ],
)
def test_sequences(text: str, lsn: int | None, wanted: str) -> None:
    assert sequence(text, lsn) == (wanted, [])


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        '{"a":"1"}',
        '["16"]',
        '["16","17","18"]',
        "[16,17]",
        '["16",null]',
        "[null,null]",
        '["16","17"] more',
        '["16","18446744073709551616"]',
        '["16","-9223372036854775809"]',
        '["16","17.5"]',
        '["16","0x11"]',
        '["16","017"]',
        '["16","+17"]',
        '["","17"]',
        "",
        None,
    ],
)
def test_sequences_that_are_none(text: str | None) -> None:
    assert sequence(text) == (None, ["source.sequence"])


@pytest.mark.parametrize("lsn", [18, -17, "x", 17.5, "0x11", 2**64])
def test_an_lsn_that_differs(lsn: Any) -> None:
    assert sequence('["16","17"]', lsn) == (None, ["source.lsn"])


def test_one_bad_sequence_fails_alone() -> None:
    found = events(event(lsn=17), event(sequence="x"), event(lsn=19))
    texts, failed = PostgresLsn().sequences(found.changes)
    assert [text is None for text in texts.to_pylist()] == [False, True, False]
    assert [one.message for one in failed] == [1]
    assert "place in the order" in failed[0].reason


def test_times_have_no_part_in_it() -> None:
    assert sequence('["16","17"]', 17, ts_ms=1) == sequence('["16","17"]', 17, ts_ms=10**15)


def test_the_order_within_a_transaction() -> None:
    profile = PostgresLsn(transaction_order=True)
    first = event(lsn=20) | {"transaction": {"id": "7:20", "total_order": 1}}
    second = event(lsn=20) | {"transaction": {"id": "7:20", "total_order": 2}}
    snapshot = event("r", lsn=16, committed=None, snapshot="first_in_data_collection")
    without = event(lsn=21)
    found = events(first, second, snapshot, without, profile=profile)
    texts, failed = profile.sequences(found.changes)
    assert texts.to_pylist() == [
        "000000000000000A/0000000000000014/0000000000000001",
        "000000000000000A/0000000000000014/0000000000000002",
        "0000000000000000/0000000000000010/0000000000000000",
        None,
    ]
    assert [one.message for one in failed] == [3]
    assert "provide.transaction.metadata=true" in failed[0].reason


def advanced(state: Any, *steps: tuple[int, int], **more: Any) -> Any:
    """Advance by changes of (last committed LSN, commit time in ms)."""
    given = [event(lsn=lsn + 1, committed=lsn, ts_ms=at, **more) for lsn, at in steps]
    state = PostgresLsn().advance(state, events(*given))
    assert json.loads(json.dumps(state)) == state
    return state


def test_a_redelivery_is_no_break() -> None:
    state = advanced({}, (10, 1_000), (20, 5_000), (30, 9_000))
    assert advanced(state, (10, 1_000), (20, 5_000), (30, 9_000)) == state
    assert advanced(state, (40, 12_000), (20, 5_000)) == {"lsn": 40, "commit_ms": 12_000}
    # Of several partitions one may lag.
    assert advanced(state, (15, 4_000)) == state
    # What commits at once may be stamped in another order.
    assert advanced(state, (29, 9_400)) == state


@pytest.mark.parametrize("step", [(5, 60_000), (29, 10_001)])
def test_a_lower_lsn_with_a_later_commit_is_a_break(step: tuple[int, int]) -> None:
    state = advanced({}, (10, 1_000), (30, 9_000))
    with pytest.raises(OrderBreakError, match=r"shop.public.orders\[0\]@1: .*slot was made anew"):
        advanced(state, (30, 9_000), step)
    assert PostgresLsn().acknowledge(state) == {}
    assert advanced(PostgresLsn().acknowledge(state), step)["lsn"] == step[0]


def test_a_break_within_one_batch() -> None:
    with pytest.raises(OrderBreakError, match="lower than 30"):
        advanced({}, (30, 9_000), (5, 60_000))


def test_rows_of_a_snapshot_break_nothing() -> None:
    state = advanced({}, (30, 9_000))
    assert advanced(state, (5, 60_000), snapshot="last") == state


def test_the_state_keeps_what_it_does_not_know() -> None:
    assert advanced({"more": 1}, (10, 1_000)) == {"more": 1, "lsn": 10, "commit_ms": 1_000}


def test_no_changes() -> None:
    found = events()
    assert PostgresLsn().sequences(found.changes)[0].equals(pa.array([], pa.string()))
    assert PostgresLsn().advance({"lsn": 1}, found) == {"lsn": 1}
