"""`python -m dagster_bq_connector.cdc`: what it shows, asks and changes."""

import io
import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_bq_connector import BigQueryResource
from dagster_bq_connector.cdc.watermark import StreamState, Watermark
from dagster_bq_connector.cdc_command import main
from support.change_files import ChangeFiles
from support.ledgers import ledger_at

DEFINITIONS = """
from datetime import timedelta

import dagster as dg
from google.cloud.bigquery import SchemaField

from dagster_bq_connector import (
    BigQueryResource, CdcTable, DeadLetters, DebeziumJson, FileSource, PostgresLsn, cdc_assets
)

def stream(name, **more):
    columns = [SchemaField("id", "INTEGER"), SchemaField("name", "STRING")]
    return cdc_assets(
        name,
        source="changes",
        format=DebeziumJson(),
        ordering=PostgresLsn(),
        tables={{"public.orders": CdcTable("{dataset}." + name, schema=columns)}},
        ledger="{dataset}",
        min_rows=1,
        max_delay=timedelta(0),
        **more,
    )

@dg.definitions
def defs():
    return dg.Definitions(
        assets=[stream("orders"), stream("kept", failed_rows=DeadLetters("{dataset}.letters"))],
        resources={{
            "bigquery": BigQueryResource(**{fields!r}),
            "changes": FileSource(path=dg.EnvVar("CHANGES")),
        }},
    )
"""
BAD = '{"topic": "shop.public.orders", "key": {"id": 9}, "value": 7}'


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChangeFiles:
    changes = ChangeFiles(tmp_path / "changes")
    monkeypatch.setenv("CHANGES", str(changes.folder))
    return changes


@pytest.fixture
def file(tmp_path: Path, dataset: str, fields: dict[str, Any]) -> Path:
    file = tmp_path / "streams.py"
    file.write_text(DEFINITIONS.format(dataset=dataset, fields=fields))
    return file


@pytest.fixture
def run(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str, answer: str = "") -> Done:
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        try:
            code = main(["-f", str(file), *arguments])
        except SystemExit as left:
            code = int(str(left.code))
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    return run


@pytest.fixture
def watermark(bigquery: BigQueryResource, dataset: str) -> Watermark:
    return Watermark(ledger_at(bigquery, dataset), "orders")


def position(changes: ChangeFiles, run: Run) -> Any:
    return json.loads(run("show", "orders").out).get("position")


def test_list_shows_what_waits(run: Run, changes: ChangeFiles, watermark: Watermark) -> None:
    changes.put(("c", 1, "ann"), ("c", 2, "bob"))
    done = run("list")
    assert done.code == 0
    [kept, orders] = done.out.splitlines()
    assert kept.startswith("kept: 0 plans committed, 2 messages wait since 20")
    assert orders.startswith("orders: 0 plans committed")
    watermark.change(lambda state: replace(state, stopped="another cluster."))
    assert "; STOPPED: another cluster." in run("list").out


def test_show_is_json(run: Run, changes: ChangeFiles, dataset: str) -> None:
    changes.put(("c", 1, "ann"))
    shown = json.loads(run("show", "orders").out)
    assert shown["stream"] == "orders"
    assert shown["tables"] == {"public.orders": f"{dataset}.orders"}
    assert shown["lag"]["messages"] == 1
    assert shown["plans"] == 0


def test_skip_shows_what_is_passed_over_and_asks(run: Run, changes: ChangeFiles) -> None:
    changes.put_lines(BAD, BAD)
    declined = run("skip", "orders", answer="n\n")
    assert declined.code == 3
    assert 'line 1: key {"id": 9}, value 7' in declined.out
    assert "1 message(s) are to be passed over" in declined.out
    assert position(changes, run) is None
    assert run("skip", "orders", answer="y\n").code == 0
    assert position(changes, run)["lines"] == 1
    assert run("skip", "orders", "--messages", "5", "--yes").code == 0
    assert position(changes, run)["lines"] == 2
    assert "Nothing waits" in run("skip", "orders", "--yes").out


def test_reset_to_the_beginning_the_head_or_a_position(run: Run, changes: ChangeFiles) -> None:
    changes.put(("c", 1, "ann"))
    changes.put(("c", 2, "bob"))
    run("skip", "orders", "--yes")
    first = position(changes, run)
    assert run("reset", "orders", "--head", "--yes").code == 0
    assert position(changes, run)["file"] == "000001.ndjson"
    done = run("reset", "orders", "--position", json.dumps(first), "--yes")
    assert "in no table" in done.out
    assert position(changes, run) == first
    assert run("reset", "orders", "--beginning", answer="y").code == 0
    assert position(changes, run) is None
    assert run("reset", "orders", "--position", "7").code == 2
    assert run("reset", "orders").code == 2


def test_a_move_by_hand_ends_the_plan_and_whoever_is_at_work(
    run: Run, changes: ChangeFiles, watermark: Watermark
) -> None:
    changes.put(("c", 1, "ann"))
    before = watermark.change(lambda state: replace(state, plan=state.plan_to({"n": 1}, 5)))
    assert run("reset", "orders", "--beginning", "--yes").code == 0
    after = watermark.read() or StreamState()
    assert before.plan
    assert (after.plan, after.holder) == (None, None)
    assert after.plan_to({"n": 1}, 5).id != before.plan.id


def test_acknowledge_lets_a_stopped_stream_go_on(
    run: Run, changes: ChangeFiles, watermark: Watermark
) -> None:
    assert "is not stopped" in run("acknowledge", "orders").out
    ordering = {"lsn": 900, "commit_ms": 5}
    watermark.change(lambda state: replace(state, stopped="a lower LSN.", ordering=ordering))
    assert run("acknowledge", "orders", answer="").code == 3
    done = run("acknowledge", "orders", answer="yes\n")
    assert done.code == 0
    assert "a lower LSN." in done.out
    state = watermark.read() or StreamState()
    assert (state.stopped, state.ordering) == (None, {})


def test_redrive_applies_dead_letters_again(
    run: Run, changes: ChangeFiles, bigquery: BigQueryResource, dataset: str, file: Path
) -> None:
    changes.put(("c", 1, "ann"))
    changes.put_lines(BAD)
    assert "keeps no dead letters" in run("redrive", "orders").err
    definitions = runpy.run_path(str(file))["defs"]()
    [kept] = [each for each in definitions.assets if each.op.name == "kept"]
    assert dg.materialize([kept], resources=definitions.resources).success
    done = run("redrive", "kept")
    assert done.code == 1
    assert "0 dead letter(s) were applied; 1 failed again and stay." in done.out
    assert "line 1" in done.out
    done = run("redrive", "kept", "--drop", answer="n\n")
    assert done.code == 3
    assert "line 1" in done.out
    assert "1 dead letter(s) are to be deleted" in done.out
    assert "0 dead letter(s) were applied; 1 failed again and stay." in done.out
    done = run("redrive", "kept", "--drop", answer="y\n")
    assert done.code == 0
    assert "1 failed again and are deleted; 0 failed again and stay." in done.out
    assert "0 dead letter(s) were applied; 0 failed again" in run("redrive", "kept").out


def test_what_is_not_there_is_named(run: Run, changes: ChangeFiles, tmp_path: Path) -> None:
    done = run("show", "nothing")
    assert (done.code, done.out) == (1, "")
    assert "No stream 'nothing'; the definitions have 'kept', 'orders'." in done.err
    assert main(["-f", str(tmp_path / "none.py"), "list"]) == 1
    assert main(["-m", "no_such_module", "list"]) == 1


def test_a_source_that_is_gone_is_told_beside_the_others(
    run: Run, changes: ChangeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHANGES", str(changes.folder / "none"))
    done = run("list")
    assert done.code == 1
    assert done.err.count("does not exist") == 2


def test_the_module_runs_in_a_project(file: Path, changes: ChangeFiles, tmp_path: Path) -> None:
    changes.put(("c", 1, "ann"))
    project = tmp_path / "project"
    (project / "src" / "shop").mkdir(parents=True)
    (project / "src" / "shop" / "__init__.py").touch()
    (project / "src" / "shop" / "definitions.py").write_text(file.read_text())
    (project / "pyproject.toml").write_text('[tool.dg.project]\nroot_module = "shop"\n')
    command = [sys.executable, "-m", "dagster_bq_connector.cdc", "list"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "orders: 0 plans committed, 1 messages wait" in done.stdout
