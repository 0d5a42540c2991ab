"""Start, stop, persistence, and nothing left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import duckdb
import pytest
from google.api_core import exceptions
from google.cloud import bigquery

from dagster_bq_connector.local import LocalBigQuery, requirements

KEYS = [
    "BIGQUERY_EMULATOR_HOST",
    "BIGQUERY_STORAGE_EMULATOR_HOST",
    "STORAGE_EMULATOR_HOST",
    "GOOGLE_CLOUD_PROJECT",
]
# A caller that prints what it got and waits to be killed.
CALLER = """
import json, time
from dagster_bq_connector.local import LocalBigQuery
local = LocalBigQuery()
local.start()
print(json.dumps(local.environment), flush=True)
time.sleep(600)
"""


def processes() -> dict[int, tuple[int, str, str]]:
    """Parent, state and command line of every process, by id."""
    text = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,stat=,args="],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rows = [line.split(None, 3) for line in text.splitlines()]
    return {int(pid): (int(parent), stat, args) for pid, parent, stat, args in map(padded, rows)}


def padded(row: list[str]) -> list[str]:
    return [*row, ""][:4]


def descendants(root: int) -> dict[int, str]:
    """The processes below one, and their command lines."""
    table, found, level = processes(), {}, [root]
    while level:
        level = [pid for pid, (parent, _, _) in table.items() if parent in level]
        found |= {pid: table[pid][2] for pid in level}
    return found


def gone(pids, seconds=8.0) -> bool:
    """Whether they all end in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        table = processes()
        if not [pid for pid in pids if pid in table and not table[pid][1].startswith("Z")]:
            return True
        time.sleep(0.05)
    return False


def ended(local: LocalBigQuery, seconds=5.0) -> bool:
    """Whether it ends in time. A process is a zombie before the last of its threads is gone."""
    deadline = time.monotonic() + seconds
    while (running := local.is_running) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not running


def pick(found: dict[int, str], word: str) -> int:
    [pid] = [pid for pid, args in found.items() if word in args and "watchdog" not in args]
    return pid


def test_import_costs_nothing():
    code = (
        "import sys, dagster_bq_connector.local as local; "
        "heavy = {'duckdb', 'local_bigquery', 'google.cloud', 'grpc', 'pyarrow', 'dagster'}; "
        "print(sorted(heavy & set(sys.modules)), local.__all__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] ['LocalBigQuery']\n"


def test_data_survive_sigkill_and_the_command_line_keeps_its_contract(
    tmp_path, command, make_lab, make_rows
):
    start, _ = command
    data = tmp_path / "data"
    process, environment = start("--data-dir", str(data), "--project", "kept-project")
    assert list(environment) == KEYS
    assert environment["GOOGLE_CLOUD_PROJECT"] == "kept-project"
    for key in ("BIGQUERY_EMULATOR_HOST", "STORAGE_EMULATOR_HOST"):
        assert environment[key].startswith("http://127.0.0.1:")
    assert environment["BIGQUERY_STORAGE_EMULATOR_HOST"].startswith("127.0.0.1:")
    below = descendants(process.pid)
    assert pick(below, "fake-gcs-server")

    lab = make_lab(environment)
    lab.new_dataset()
    table = lab.make("id INT64, name STRING, PRIMARY KEY (id) NOT ENFORCED")
    rows = make_rows(
        id="int64", name="string", _CHANGE_TYPE="string", _CHANGE_SEQUENCE_NUMBER="string"
    )

    def change(lab, id, name, kind, sequence):
        row = {"id": id, "name": name, "_CHANGE_TYPE": kind, "_CHANGE_SEQUENCE_NUMBER": sequence}
        connection = lab.connect(lab.default_stream(table), rows)
        assert connection.send([row]).error.code == 0

    change(lab, 1, "kept", "UPSERT", "5")
    change(lab, 2, None, "DELETE", "5")
    pending = lab.stream(table, "PENDING")
    plain = make_rows(id="int64")
    lab.connect(pending, plain).send([{"id": 9}], 0)
    lab.client.load_table_from_json([{"id": 7}], lab.name("loaded"), job_id="once").result()
    etag = lab.client.get_table(table).etag
    blob = lab.storage.create_bucket("kept-bucket").blob("a/b")
    blob.upload_from_string("kept")
    lab.close()

    process.kill()
    process.wait()
    assert gone(below)

    process, environment = start("--data-dir", str(data), "--project", "kept-project")
    again = make_lab(environment)
    again.dataset = lab.dataset
    assert again.rows(table) == [(1, "kept")]
    assert again.client.get_table(table).etag == etag
    change(again, 1, "stale", "UPSERT", "4")
    change(again, 2, "stale", "UPSERT", "4")
    assert again.rows(table) == [(1, "kept")]
    change(again, 2, "newer", "UPSERT", "6")
    assert again.rows(table) == [(1, "kept"), (2, "newer")]
    with pytest.raises(exceptions.Conflict):
        again.client.load_table_from_json([{"id": 7}], again.name("loaded"), job_id="once")
    assert again.rows(again.name("loaded")) == [(7,)]
    found = again.storage.bucket("kept-bucket").get_blob("a/b")
    assert found.download_as_bytes(if_generation_match=blob.generation) == b"kept"
    again.close()

    with pytest.raises(RuntimeError, match=r"in use by another local BigQuery \(process \d+\)"):
        LocalBigQuery(data_dir=data).start()
    assert process.poll() is None  # the first one does not mind

    below = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    rest = process.stdout.read()
    assert (process.wait(15), rest) == (0, "")
    assert gone(below)
    assert (data / "server.log").is_file()
    process.stdin.close()
    process.stdout.close()


def test_an_interrupt_while_it_starts_leaves_nothing():
    process = subprocess.Popen(
        [sys.executable, "-m", "dagster_bq_connector.local"],
        stdin=subprocess.DEVNULL,  # which is no reason to stop
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 20
    while not (below := descendants(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == (b"", b"")
    assert process.returncode == 0
    assert gone(below)


def test_a_killed_caller_leaves_nothing(tmp_path):
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER],
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert caller.stdout is not None
    environment = json.loads(caller.stdout.readline())
    assert list(environment) == KEYS
    below = descendants(caller.pid)
    assert len(below) == 3  # the server, the shell that guards Cloud Storage, Cloud Storage
    assert len(list(tmp_path.glob("local-bigquery-*"))) == 1
    caller.kill()
    caller.wait()
    caller.stdout.close()
    assert gone(below)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_server_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    local = LocalBigQuery()
    assert not local.is_running
    with local:
        assert set(KEYS) & set(os.environ) == set()  # nothing is set in the caller
        with pytest.raises(RuntimeError, match="started already"):
            local.start()
        assert local.is_running
        below = descendants(os.getpid())
        [server] = [
            pid for pid, args in below.items() if "server.main" in args and str(tmp_path) in args
        ]
        storage = descendants(server)
        assert pick(storage, "fake-gcs-server")
        os.kill(server, signal.SIGKILL)
        assert gone([*storage, server])
        assert ended(local)
    assert local.environment == {}
    assert list(tmp_path.iterdir()) == []
    local.stop()


def parts(data: Path) -> tuple[int, int, int]:
    """The server of a data folder, the shell that guards Cloud Storage, and Cloud Storage."""
    below = descendants(os.getpid())
    [server] = [pid for pid, args in below.items() if "server.main" in args and str(data) in args]
    storage = descendants(server)
    [shell] = [pid for pid, args in storage.items() if "watchdog" in args]
    return server, shell, pick(storage, "fake-gcs-server")


@pytest.mark.parametrize("also_server", [False, True])
def test_cloud_storage_ends_without_its_watchdog(tmp_path, also_server):
    with LocalBigQuery(data_dir=tmp_path) as local:
        server, shell, storage = parts(tmp_path)
        os.kill(shell, signal.SIGKILL)
        if also_server:
            os.kill(server, signal.SIGKILL)
            assert gone([server, shell])
            assert ended(local)
            assert gone([storage])
        assert local.is_running != also_server
    assert gone([server, shell, storage], 1)


def test_a_restart_meets_no_cloud_storage_of_a_former_life(tmp_path):
    """The caller, the server and the watchdog were killed at once."""
    first = LocalBigQuery(data_dir=tmp_path)
    first.start()
    server, shell, storage = parts(tmp_path)
    for pid in (shell, server):
        os.kill(pid, signal.SIGKILL)
    assert gone([server, shell])
    assert not gone([storage], 0.5)
    with LocalBigQuery(data_dir=tmp_path):
        assert gone([storage], 0.2)
        assert parts(tmp_path)[2] != storage
    first.stop()


@pytest.mark.parametrize("temporary", [False, True])
def test_a_dead_cloud_storage_ends_the_server(monkeypatch, tmp_path, temporary):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with LocalBigQuery(data_dir=None if temporary else tmp_path / "data") as local:
        server, shell, storage = parts(tmp_path)
        os.kill(storage, signal.SIGKILL)
        assert gone([server, shell, storage])
        assert ended(local)
        assert "Cloud Storage (fake-gcs-server) ended by itself" in local.log_tail
    assert len(list(tmp_path.iterdir())) == (0 if temporary else 1)


@pytest.mark.parametrize(
    "project",
    ["emulator", "memory", "system", "temp", "main", "bq", "", "UPPER", "a_b", "a.b", "a'b", "a-"],
)
def test_project_names_that_cannot_be_are_refused(monkeypatch, tmp_path, project):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RuntimeError, match="Name another project|is no project ID"):
        LocalBigQuery(project).start()
    assert list(tmp_path.iterdir()) == []


def test_a_project_of_a_domain(tmp_path, make_lab):
    for rows in (1, 2):  # the second time it is found again
        with LocalBigQuery("example.com:project", tmp_path / "a#b%41 c") as local:
            lab = make_lab(local.environment)
            dataset = bigquery.DatasetReference(lab.client.project, "kept")
            lab.client.create_dataset(dataset, exists_ok=True)
            lab.client.load_table_from_json([{"id": 1}], dataset.table("t")).result()
            assert lab.sql("SELECT id FROM `example.com:project.kept.t`") == [(1,)] * rows
            lab.close()


def test_data_folders_that_cannot_be_are_refused(monkeypatch, tmp_path):
    for character in "'{}?\\\0":
        with pytest.raises(RuntimeError, match=r"does not take .* in its path.*with data_dir\.$"):
            LocalBigQuery(data_dir=tmp_path / f"a{character}b").start()
    (file := tmp_path / "file").write_text("")
    for folder in (file, file / "below"):
        with pytest.raises(RuntimeError, match=r"cannot keep its data in '.*file.*Name a folder"):
            LocalBigQuery(data_dir=folder).start()
    assert list(tmp_path.iterdir()) == [file]
    (odd := tmp_path / "it's").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(odd))
    with pytest.raises(RuntimeError, match=r"data_dir or TMPDIR\.$"):
        LocalBigQuery().start()
    assert list(odd.iterdir()) == []


def wrapper(path: Path, prelude: str, python: str = sys.executable) -> Path:
    """An interpreter that runs some code first."""
    path.write_text(
        f'#!/bin/sh\nshift\ncode="$1"\nshift\nexec {python} -c "{prelude}\n$code" "$@"\n'
    )
    path.chmod(0o755)
    return path


def test_an_old_python_is_named(tmp_path):
    old = wrapper(tmp_path / "python", "import sys; sys.version_info = (3, 11, 2)")
    with pytest.raises(RuntimeError) as caught:
        LocalBigQuery(python=old).start()
    text = str(caught.value)
    assert "needs Python 3.13" in text
    assert "is Python 3.11.2" in text
    assert 'pip install "dagster-bq-connector[local]"' in text


def test_missing_packages_are_named(tmp_path):
    hide = "import sys; sys.modules['local_bigquery'] = None; sys.modules['cramjam'] = None"
    bare = wrapper(tmp_path / "python", hide)
    with pytest.raises(RuntimeError) as caught:
        LocalBigQuery(python=bare).start()
    text = str(caught.value)
    assert "lacks cramjam, local-bigquery" in text
    assert 'pip install "dagster-bq-connector[local]" on Python 3.13' in text


def test_missing_interpreters_and_crashes_are_said_with_the_log(tmp_path):
    with pytest.raises(RuntimeError, match="cannot run"):
        LocalBigQuery(python=tmp_path / "nowhere").start()
    crash = wrapper(tmp_path / "python", "import sys; sys.exit('the last words')")
    with pytest.raises(RuntimeError, match=r"(?s)did not start.*server\.log.*the last words"):
        LocalBigQuery("my-project", tmp_path / "data", python=crash).start()


class Offline:
    """A DuckDB without extensions and without a network."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def execute(self, sql):
        if sql.startswith("PRAGMA"):
            return self
        raise duckdb.IOException("Failed to download extension")

    def fetchall(self):
        return [("v1.5.5",)]


@pytest.mark.parametrize("version", ["1.5.5", "2.0.0"])
def test_missing_duckdb_extensions_are_named(monkeypatch, tmp_path, version):
    monkeypatch.setattr(duckdb, "__version__", version)
    home = os.environ.get("HOME")
    monkeypatch.setattr(requirements, "_wheel_file", lambda name, version: None)
    monkeypatch.setattr(duckdb, "connect", Offline)
    with pytest.raises(requirements.StartError) as caught:
        requirements.provide_duckdb_extensions(tmp_path)
    text = str(caught.value)
    assert "downloading ducklake failed (Failed to download extension)" in text
    assert (
        'two commands: pip install "dagster-bq-connector[local]" and then pip install '
        "duckdb==1.5.5 duckdb-extension-ducklake==1.5.5 duckdb-extension-httpfs==1.5.5 "
        "duckdb-extension-icu==1.5.5 duckdb-extension-spatial==1.5.5 (pip then says"
    ) in text
    assert f"DuckDB {version}'s extension" in text
    assert set(re.findall(r"==([\d.]+)", text)) == {"1.5.5"}
    assert os.environ.get("HOME") == home  # where DuckDB keeps what it loads down
