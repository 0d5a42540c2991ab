"""The demo without its page: what it prints, and the status with which it ends."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dagster_bq_connector import BigQueryReader
from flights import demo, source

DEADLINE_SECONDS = 300
VARIABLES = (
    "BIGQUERY_EMULATOR_HOST",
    "BIGQUERY_STORAGE_EMULATOR_HOST",
    "STORAGE_EMULATOR_HOST",
    "GOOGLE_CLOUD_PROJECT",
    "DAGSTER_HOME",
)


def test_every_row_of_every_table_is_read_back(tmp_path: Path) -> None:
    keep = tmp_path / "notes.txt"
    keep.write_text("of somebody else")
    done = subprocess.run(
        [sys.executable, "-m", "flights.demo", "--no-ui", "--home", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        cwd=tmp_path,
        env=os.environ | {"GRPC_VERBOSITY": "NONE"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = {
        name: (went_in, came_out, verdict)
        for name, went_in, came_out, verdict in re.findall(
            r"^  (\w+): ([\d,]+) rows went in, ([\d,]+) came out: (.*)$", done.stdout, re.M
        )
    }
    expected = {"flights": source.flights_of(demo.WEEK).num_rows} | {
        name: source.table(name).num_rows for name in ("weather", "planes", "airports", "airlines")
    }
    assert said == {
        name: (f"{rows:,}", f"{rows:,}", "all read back") for name, rows in expected.items()
    }
    assert "Traceback" not in done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    assert keep.exists(), "the demo removed a file that is not its own"


def test_a_row_that_is_missing_ends_it_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # the demo sets them for good; this takes them back after it
    monkeypatch.setattr(demo, "WEEK", demo.WEEK[:1])
    monkeypatch.setattr(sys, "argv", ["demo", "--no-ui", "--home", str(tmp_path)])
    compare = demo.read_back

    def lose_a_row(reader: BigQueryReader) -> bool:
        assert compare(reader)
        with reader.bigquery.get_client() as client:
            client.query_and_wait("DELETE FROM flights.airlines WHERE carrier = 'HA'")
        return compare(reader)

    monkeypatch.setattr(demo, "read_back", lose_a_row)
    assert demo.main() == 1
    said = capsys.readouterr().out
    assert "airlines: 16 rows went in, 16 came out: all read back" in said
    assert "airlines: 16 rows went in, 15 came out: NOT what was read back" in said


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
