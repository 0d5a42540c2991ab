"""The bookings of the demo: changes come file by file, and rows are seen to change."""

import contextlib
import json
import shutil
from collections.abc import Iterable
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import dagster as dg

from dagster_bq_connector import BigQueryResource
from flights.defs import bookings
from flights.defs.resources import RECORDED

# A file for what was there before the first day, and one for each of a week.
BEFORE, *DAYS = sorted(path.stem for path in RECORDED.glob("*.ndjson"))
SHOWN = (50081, 50066)  # one booking is flown on the last day, the other is cancelled and deleted
TABLES = ("bookings", "passengers")
DAY_0 = date(1970, 1, 1)  # Debezium counts days from here
COUNTS = ("upserts", "deletes")
Row = dict[str, Any]


def feed(folder: Path, day: str) -> None:
    """Let the changes of a day come to the folder that the stream reads."""
    folder.mkdir(exist_ok=True)
    part = folder / f"{day}.part"  # whole before it has a name that is looked for
    shutil.copyfile(RECORDED / f"{day}.ndjson", part)
    part.rename(folder / f"{day}.ndjson")


def replay(
    definitions: dg.Definitions,
    instance: dg.DagsterInstance,
    bigquery: BigQueryResource,
    folder: Path,
    days: Iterable[str],
    run_config: dict[str, Any],
) -> None:
    """Feed day after day, apply each, and print two rows as they are then."""
    job = definitions.resolve_implicit_global_asset_job_def()
    columns = "".join(f"  {f'booking {number}':26}" for number in SHOWN)
    print("Changes of bookings, as Debezium took them from PostgreSQL, a file a day:\n")
    print(f"  {'':10}  upserts  deletes{columns}".rstrip())
    for day in days:
        feed(folder, day)
        result = job.execute_in_process(
            instance=instance, asset_selection=list(bookings.changes.keys), run_config=run_config
        )
        metadata = [event.metadata for event in _materialized(result)]
        upserts, deletes = (
            sum(int(str(each[f"dagster_bq/{name}"].value)) for each in metadata) for name in COUNTS
        )
        rows = {row["id"]: row for row in rows_of(bigquery, "bookings")}
        shown = "".join(f"  {_told(rows.get(number)):26}" for number in SHOWN)
        print(f"  {day}  {upserts:7,}  {deletes:7,}{shown}".rstrip(), flush=True)


def compare(bigquery: BigQueryResource, folder: Path) -> bool:
    """Whether the tables are what the changes make of them, one after the other."""
    equal = True
    print()
    for table, expected in as_recorded(folder).items():
        found = rows_of(bigquery, table)
        same = sorted(found, key=_id) == sorted(expected, key=_id)
        equal = equal and same
        verdict = "all of them equal" if same else "NOT equal"
        print(f"  {table}: {len(expected):,} rows at the source, {len(found):,} here: {verdict}")
    return equal


def as_recorded(folder: Path) -> dict[str, list[Row]]:
    """The rows that the source had after the changes in a folder, by table."""
    tables: dict[str, dict[int, Row]] = {name: {} for name in TABLES}
    for path in sorted(folder.glob("*.ndjson")):
        for line in path.read_text().splitlines():
            message = json.loads(line)
            key, value = message["key"]["id"], message["value"]
            if value is None:  # a tombstone: the delete itself came before
                continue
            rows = tables[value["source"]["table"]]
            if value["op"] == "d":
                del rows[key]
            else:
                rows[key] = _typed(value["after"])
    return {name: list(rows.values()) for name, rows in tables.items()}


def rows_of(bigquery: BigQueryResource, table: str) -> list[Row]:
    """The rows of a table in BigQuery."""
    with bigquery.get_client() as client:
        return [
            dict(row.items()) for row in client.query_and_wait(f"SELECT * FROM flights.{table}")
        ]


def _materialized(result: dg.ExecuteInProcessResult) -> Iterable[dg.AssetMaterialization]:
    for event in result.get_asset_materialization_events():
        yield event.materialization


def _typed(row: Row) -> Row:
    """A row of a message with BigQuery's types."""
    typed = row | {"updated_at": datetime.fromisoformat(row["updated_at"])}
    with contextlib.suppress(KeyError):  # passengers have neither
        typed["flight_date"] = DAY_0 + timedelta(days=row["flight_date"])
        typed["price"] = Decimal(row["price"])
    return typed


def _told(row: Row | None) -> str:
    if row is None:
        return "gone"
    return f"{row['status']}, seat {row['seat'] or '-'}, ${row['price']:.2f}"


def _id(row: Row) -> int:
    return row["id"]
