"""`python -m dagster_bq_connector.ledger`: what it shows, asks and changes."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from dagster_bq_connector import BigQueryResource
from dagster_bq_connector.ledger import Key, Ledger
from dagster_bq_connector.ledger.__main__ import main
from support.ledgers import HOMES, STREAM, created, increment, ledger_at

Run = Callable[..., "Done"]
WRITE = Key("write", "asset orders, run 4711 " + "and so on " * 20)


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(params=HOMES)
def home(request: pytest.FixtureRequest, dataset: str, staging: str) -> str:
    return dataset if request.param == "bigquery" else staging


@pytest.fixture
def ledger(bigquery: BigQueryResource, home: str) -> Ledger:
    return ledger_at(bigquery, home)


@pytest.fixture
def where(fields: dict[str, Any], home: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The environment and the arguments that lead to the home."""
    if "api_endpoint" in fields:
        monkeypatch.setenv("BIGQUERY_EMULATOR_HOST", fields["api_endpoint"])
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", fields["cloud_storage_endpoint"])
    return ["--project", fields["project"], "--location", fields["location"], "--ledger", home]


@pytest.fixture
def run(
    where: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    def run(*arguments: str, answer: str = "") -> Done:
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        try:
            code = main([*where, *arguments])
        except SystemExit as left:
            code = int(str(left.code))
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    return run


def test_it_is_run_as_a_module(where: list[str], ledger: Ledger) -> None:
    created(ledger)
    command = [sys.executable, "-m", "dagster_bq_connector.ledger", *where]
    listed = subprocess.run([*command, "list"], capture_output=True, text=True, check=True)
    assert STREAM.name in listed.stdout
    asked = [*command, "delete", "stream:orders", "--version", "1"]
    declined = subprocess.run(asked, input="n", capture_output=True, text=True, check=False)
    assert (declined.returncode, declined.stderr) == (3, "")
    assert ledger.get(STREAM)


def test_list_and_show(run: Run, ledger: Ledger) -> None:
    assert run("list") == Done(0, "", "")
    created(ledger, {"position": {"lsn": 7}})
    created(ledger, {"n": 0}, WRITE)
    listed = run("list").stdout.splitlines()
    assert len(listed) == 2
    assert WRITE.name in listed[0]
    assert listed[0].endswith("…'")
    assert run("list", "--kind", "stream").stdout.split() == ["1", STREAM.name, "'orders'"]
    for given in ("stream:orders", STREAM.name):
        shown = run("show", given)
        first, _, rest = shown.stdout.partition("\n")
        assert first == f"stream 'orders' at version 1 in {ledger.place(STREAM.name)}"
        assert json.loads(rest) == {"position": {"lsn": 7}}
        assert shown.returncode == 0


def test_list_goes_on_past_what_it_cannot_read(
    run: Run, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    created(ledger)
    created(ledger, {"n": 0}, WRITE)
    read = ledger.__class__._read

    def spoilt(self: Ledger, name: str) -> tuple[str, str] | None:
        return ("hello", "token") if name == WRITE.name else read(self, name)

    monkeypatch.setattr(ledger.__class__, "_read", spoilt)
    done = run("list")
    assert done.returncode == 1
    assert f"{WRITE.name}" in done.stderr
    assert "was edited by hand" in done.stderr
    assert STREAM.name in done.stdout


def test_set_asks_and_compares_the_version(run: Run, ledger: Ledger) -> None:
    created(ledger)
    asked = ("set", "stream:orders", '{"n": 5}', "--version", "1")
    for answer in ("", "n\n", "what\n"):
        declined = run(*asked, answer=answer)
        assert declined.returncode == 3
        assert declined.stdout.endswith("Do it? [y/N] Nothing was changed.\n")
    entry = ledger.get(STREAM)
    assert entry
    assert entry.version == 1

    agreed = run(*asked, answer="y\n")
    assert agreed.returncode == 0, agreed.stderr
    assert agreed.stdout.endswith("Done: version 2.\n")
    entry = ledger.get(STREAM)
    assert entry
    assert (entry.version, entry.value) == (2, {"n": 5})

    late = run(*asked, "--yes")
    assert late.returncode == 1
    assert late.stderr == "stream 'orders' is at version 2, not 1: show it, and think again.\n"


def test_delete_says_what_it_does_and_asks(run: Run, ledger: Ledger) -> None:
    created(ledger)
    increment(ledger)
    declined = run("delete", STREAM.name, "--version", "2", answer="no\n")
    assert declined.returncode == 3
    assert "This deletes stream 'orders' at version 2" in declined.stdout
    assert "The stream then has no position" in declined.stdout
    assert run("delete", STREAM.name, "--version", "1", "--yes").returncode == 1
    assert ledger.get(STREAM)
    done = run("delete", STREAM.name, "--version", "2", "--yes")
    assert done.returncode == 0
    assert ledger.get(STREAM) is None
    again = run("delete", STREAM.name, "--version", "2", "--yes")
    assert again.returncode == 1
    assert again.stderr == f"There is no entry {STREAM.name}. `list` shows what there is.\n"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("show", "orders"), 1, "'orders' is no key: write write:TEXT or stream:TEXT"),
        (("show", "stream:none"), 1, "There is no entry stream:none."),
        (("set", "stream:orders", "{", "--version", "1"), 2, "no JSON"),
        (("set", "stream:orders", "[1]", "--version", "1"), 2, "no JSON object"),
        (("set", "stream:orders", "{}"), 2, "--version"),
        (("delete", "stream:orders"), 2, "--version"),
        ((), 2, "list | show | set | delete"),
    ],
)
def test_what_cannot_be_done_is_said(
    run: Run, arguments: tuple[str, ...], code: int, text: str
) -> None:
    done = run(*arguments)
    assert done.returncode == code
    assert text in done.stderr
    assert "Traceback" not in done.stderr
