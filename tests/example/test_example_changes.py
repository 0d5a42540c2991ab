"""The changes that the example project replays: all of them are read, and they end in one week."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import flights
from dagster_bq_connector.cdc.envelope.debezium_json import DebeziumJson
from dagster_bq_connector.cdc.event import Events, Fate
from dagster_bq_connector.cdc.fold import fold
from dagster_bq_connector.cdc.ordering.postgres import PostgresLsn
from dagster_bq_connector.cdc.source.files import FileMessages
from flights.defs.bookings import BOOKINGS, PASSENGERS

CHANGES = Path(flights.__file__).parent / "data" / "changes"
FORMAT = DebeziumJson(decimal_handling="string")
ORDER = PostgresLsn()
COLUMNS = {"public.passengers": PASSENGERS, "public.bookings": BOOKINGS}


@pytest.fixture(scope="module")
def events() -> Events:
    source = FileMessages(str(CHANGES))
    stop = source.plan(None, 100_000)
    assert stop is not None
    assert source.plan(stop, 1) is None
    batches = [batch.replace_schema_metadata(None) for batch in source.read(None, stop)]
    table = pa.Table.from_batches(batches)
    [messages] = table.combine_chunks().to_batches()
    return FORMAT.events(messages, ORDER)


def rows_of(events: Events, table: str) -> list[dict[str, Any]]:
    """What remains of a table."""
    sequences, failed = ORDER.sequences(events.changes)
    assert failed == []
    kept = fold(events.changes.column("key"), events.changes.column("table"), sequences)
    tables = events.changes.column("table").take(pa.array(kept)).to_pylist()
    operations = events.changes.column("operation").take(pa.array(kept)).to_pylist()
    found = zip(kept.tolist(), tables, operations, strict=True)
    last = [index for index, its, operation in found if its == table and operation != "d"]
    rows = FORMAT.rows(events, pa.array(last).to_numpy(), COLUMNS[table])
    assert rows.failed == []
    assert [rows.unknown, rows.missing, rows.unavailable] == [{}] * 3
    return rows.batch.to_pylist()


def test_a_file_a_day_small_enough_to_keep() -> None:
    names = sorted(path.name for path in CHANGES.iterdir())
    assert names == ["2012-12-31.ndjson", *(f"2013-01-0{n}.ndjson" for n in range(1, 8))]
    assert sum(path.stat().st_size for path in CHANGES.iterdir()) < 1_500_000
    snapshot = [json.loads(line) for line in (CHANGES / names[0]).read_text().splitlines()]
    assert {message["value"]["op"] for message in snapshot} == {"r"}


def test_every_message_is_read(events: Events) -> None:
    assert events.failed == []
    operations = Counter(events.changes.column("operation").to_pylist())
    assert set(operations) == set("rcud")
    assert events.count(Fate.change) == sum(operations.values()) > 1_500
    assert events.count(Fate.tombstone) == operations["d"] > 50
    state = ORDER.advance({}, events)
    assert ORDER.advance(state, events) == state


def test_the_week_ends_whole(events: Events) -> None:
    passengers = rows_of(events, "public.passengers")
    bookings = rows_of(events, "public.bookings")
    assert {row["passenger"] for row in bookings} <= {row["id"] for row in passengers}
    assert (len(passengers), len(bookings)) == (147, 514)
    statuses = Counter(row["status"] for row in bookings)
    assert statuses["flown"] == len(bookings) - statuses["cancelled"] > 400
    assert all(row["updated_at"].year in (2012, 2013) for row in bookings)
