"""The demo without its page, and the status with which it ends."""

import sys
from pathlib import Path

import pytest

from dagster_bq_connector import BigQueryReader
from flights import demo

VARIABLES = (
    "BIGQUERY_EMULATOR_HOST",
    "BIGQUERY_STORAGE_EMULATOR_HOST",
    "STORAGE_EMULATOR_HOST",
    "GOOGLE_CLOUD_PROJECT",
    "DAGSTER_HOME",
)


def test_its_status_says_whether_a_row_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # the demo sets them for good; this takes them back after it
    monkeypatch.setattr(demo, "WEEK", demo.WEEK[:1])
    monkeypatch.setattr(sys, "argv", ["demo", "--no-ui", "--home", str(tmp_path)])
    assert demo.main() == 0
    assert "airlines: 16 rows went in, 16 came out: all read back" in capsys.readouterr().out
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
