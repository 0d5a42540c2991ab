"""`make demo-debezium` without its page: what it prints, and the status with which it ends."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 600  # for all of it, on a busy machine


def demo(home: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT / "tests"), environment.get("PYTHONPATH", "")]
    options = ("--no-ui", "--seconds", "3", "--home", str(home))
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "demo_debezium.py"), *options],
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def test_it_ends_when_all_changes_are_applied(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("of somebody else")
    done = demo(tmp_path, os.environ)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    *_, (made, applied) = re.findall(r"([\d,]+) changes made, ([\d,]+) applied", said)
    assert made == applied
    assert int(made) > 140, "no booking changed after the snapshot"
    for table in ("passengers", "bookings"):
        rows = re.search(rf"public\.{table}: (\d+) rows in PostgreSQL: all of them equal", said)
        assert rows is not None, said
        assert int(rows[1]) > 60
    assert "Traceback" not in said
    assert (tmp_path / "notes.txt").exists(), "the demo removed a file that is not its own"


def test_without_java_it_says_what_to_install(tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    if initdb := shutil.which("initdb"):
        (programs / "initdb").symlink_to(Path(initdb).resolve())
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    done = demo(tmp_path / "home", environment | {"PATH": str(programs)})
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("Debezium needs Java 17: install it (apt-get install openjdk-17")
    assert "Traceback" not in done.stderr
