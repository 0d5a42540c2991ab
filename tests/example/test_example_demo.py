"""The demo without its page, and the status with which it ends."""

import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from dagster_bq_connector import BigQueryReader, BigQueryResource
from flights import demo, demo_bookings

VARIABLES = (
    "BIGQUERY_EMULATOR_HOST",
    "BIGQUERY_STORAGE_EMULATOR_HOST",
    "STORAGE_EMULATOR_HOST",
    "GOOGLE_CLOUD_PROJECT",
    "DAGSTER_HOME",
    "FLIGHTS_CHANGES",
)


def test_what_it_says_of_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # the demo sets them for good; this takes them back after it
    monkeypatch.setattr(demo, "WEEK", demo.WEEK[:1])
    monkeypatch.setattr(demo_bookings, "DAYS", demo_bookings.DAYS[:1])
    monkeypatch.setattr(sys, "argv", ["demo", "--no-ui", "--home", str(tmp_path)])
    compare = demo.read_back

    def lose_a_row_afterwards(reader: BigQueryReader) -> bool:
        complete = compare(reader)
        with reader.bigquery.get_client() as client:
            client.query_and_wait("DELETE FROM flights.airlines WHERE carrier = 'HA'")
        assert not compare(reader)
        return complete

    monkeypatch.setattr(demo, "read_back", lose_a_row_afterwards)
    assert demo.main() == 0
    said = capsys.readouterr().out
    assert "airlines: 16 rows went in, 16 came out: all read back" in said
    assert "airlines: 16 rows went in, 15 came out: NOT what was read back" in said
    assert "bookings: 142 rows at the source, 142 here: all of them equal" in said
    assert re.search(r"2012-12-31 +140 +0  booked, seat 28A, \$253\.68 +booked, seat 19D", said)
    assert re.search(r"2013-01-01 +125 +2  booked, seat 13D, \$253\.68 +booked, seat 10C", said)


@pytest.mark.parametrize("missing", ["load_week", "replay_bookings"])
def test_its_status_says_that_a_row_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    local = SimpleNamespace(environment={"GOOGLE_CLOUD_PROJECT": "local-project"})
    monkeypatch.setattr(demo, "LocalBigQuery", lambda data_dir: nullcontext(local))
    monkeypatch.setattr(sys, "argv", ["demo", "--no-ui", "--home", str(tmp_path)])
    for name in ("load_week", "replay_bookings"):
        monkeypatch.setattr(demo, name, lambda *_, complete=name != missing: complete)
    assert demo.main() == 1


@pytest.mark.parametrize(
    ("problem", "verdict"),
    [
        ("missing", "bookings: 3 rows at the source, 2 here: NOT equal"),
        ("doubled", "bookings: 3 rows at the source, 4 here: NOT equal"),
        ("another seat", "bookings: 3 rows at the source, 3 here: NOT equal"),
        ("", "bookings: 3 rows at the source, 3 here: all of them equal"),
    ],
)
def test_bookings_are_compared_value_by_value(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    problem: str,
    verdict: str,
) -> None:
    lines = (demo_bookings.RECORDED / f"{demo_bookings.BEFORE}.ndjson").read_text().splitlines()
    (tmp_path / "a.ndjson").write_text("\n".join(lines[:3]) + "\n")
    there = demo_bookings.as_recorded(tmp_path)
    rows = [dict(row) for row in reversed(there["bookings"])]
    if problem == "missing":
        rows.pop()
    elif problem == "doubled":
        rows.append(rows[0])
    elif problem:
        rows[1]["seat"] = "99Z"
    found = {"bookings": rows, "passengers": there["passengers"]}
    monkeypatch.setattr(demo_bookings, "rows_of", lambda _, table: found[table])
    bigquery = BigQueryResource(project="p")
    assert demo_bookings.compare(bigquery, tmp_path) is (not problem)
    assert verdict in capsys.readouterr().out


def test_a_port_that_is_taken_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    monkeypatch.setattr(demo, "is_taken", lambda port: port == 3999)
    monkeypatch.setattr(sys, "argv", ["demo", "--port", "3999", "--home", str(home)])
    with pytest.raises(SystemExit) as ended:
        demo.main()
    assert ended.value.code == 2
    assert "port 3999 is taken" in capsys.readouterr().err
    assert not home.exists()
