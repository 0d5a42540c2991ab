"""A run of a change stream that is killed, or sleeps past its lease, at any step: nothing is lost.

The steps come from the code (`write/steps.py`): a first run that lives tells which there are.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dagster_bq_connector import BigQueryResource
from support import drain_kills
from support.change_files import ChangeFiles
from support.drain_kills import Drain, watermark_of
from support.forks import Attempts
from support.soak_report import table, write_section

SOAK = bool(os.environ.get("SOAK"))
LEASE = 0.5
BAD = '{"topic": "shop.public.orders", "key": {"id": 9}, "value": 7}'
ROWS = [(1, "eve"), (3, "cat"), (4, "dan"), (6, "fay")]
BEGAN: list[float] = []
STRUCK: dict[str, dict[str, int]] = {}

pytestmark = pytest.mark.local_only("it kills some dozens of processes")


@pytest.fixture(scope="module")
def attempts() -> Iterator[Attempts]:
    BEGAN.append(time.monotonic())
    with Attempts(drain_kills.__file__) as attempts:
        yield attempts


class Case:
    """Streams of one history: inserts, updates, a delete, a changed key and a bad message."""

    def __init__(
        self, dataset: str, fields: dict[str, Any], bigquery: BigQueryResource, path: Path
    ) -> None:
        self.dataset, self.fields, self.bigquery = dataset, fields, bigquery
        changes = ChangeFiles(path / "changes")
        self.folder = str(changes.folder)
        changes.put(("c", 1, "ann"), ("c", 2, "bob"), ("u", 1, "eve"), ("c", 3, "cat"))
        changes.put_lines(BAD)
        changes.put(("d", 2, None), ("c", 4, "dan"), ("c", 5, "fay"))
        changes.put(("d", 5, None), ("c", 6, "fay"))

    def order(self, number: int, **more: Any) -> Drain:
        return Drain(
            fields=self.fields,
            dataset=self.dataset,
            stream=f"s{number}",
            folder=self.folder,
            lease=LEASE,
            **more,
        )

    def check(self, number: int) -> None:
        """All is there once, and the stream stands at the end."""
        stream = f"s{number}"
        state = watermark_of(self.bigquery, self.dataset, stream).read()
        assert state
        assert state.position
        assert state.position["file"] == "000003.ndjson"
        assert (state.plan, state.holder, state.stopped, state.failure) == (None,) * 4
        with self.bigquery.get_client() as client:
            found = client.query_and_wait(f"SELECT id, name FROM {self.dataset}.{stream}")
            assert sorted(tuple(row.values()) for row in found) == ROWS
            letters = client.query_and_wait(
                f"SELECT source FROM {self.dataset}.letters WHERE stream = '{stream}'"
            )
            assert [Path(row[0]).name for row in letters] == ["000001.ndjson, line 1"]


@pytest.fixture
def case(dataset: str, fields: dict[str, Any], bigquery: BigQueryResource, tmp_path: Path) -> Case:
    return Case(dataset, fields, bigquery, tmp_path)


def steps_of(case: Case, attempts: Attempts, path: Path) -> list[str]:
    assert attempts.run(case.order(0, steps=str(path / "steps"))) == 0
    case.check(0)
    named: list[str] = json.loads((path / "steps").read_text())
    names = {"take stream", "take plan", "append rows", "commit plan", "release stream"}
    assert names <= {name.removeprefix("before ").removeprefix("after ") for name in named}
    return named


def points(named: list[str], every: int) -> list[int]:
    """Where to strike: in the soak at each step; here at each name's first, or at some of these."""
    if SOAK:
        return list(range(len(named)))
    return [named.index(name) for name in dict.fromkeys(named)][::every]


def test_killed_at_any_step(case: Case, attempts: Attempts, tmp_path: Path) -> None:
    named = steps_of(case, attempts, tmp_path)
    chosen = points(named, every=1)
    for point in chosen:
        assert attempts.run(case.order(1 + point, die=point)) == -9, named[point]
        assert attempts.run(case.order(1 + point)) == 0, named[point]
        case.check(1 + point)
    STRUCK["killed"] = {"steps": len(named), "struck": len(chosen)}


def test_asleep_past_its_lease_at_any_step(case: Case, attempts: Attempts, tmp_path: Path) -> None:
    named = steps_of(case, attempts, tmp_path)
    chosen = points(named, every=4)
    for point in chosen:
        go, stopped = tmp_path / f"go {point}", tmp_path / f"stopped {point}"
        asleep = attempts.start(case.order(1 + point, stop=point, go=str(go), stopped=str(stopped)))
        while not stopped.exists():
            time.sleep(0.01)
        # Its thread beats on as long as its main thread waits: only then the other would wait, too.
        os.kill(asleep, 19)  # SIGSTOP
        assert attempts.run(case.order(1 + point)) == 0, named[point]
        go.touch()
        os.kill(asleep, 18)  # SIGCONT
        assert attempts.wait(asleep) in (0, 1), named[point]  # 1: it found that it was replaced
        case.check(1 + point)
    STRUCK["asleep"] = {"steps": len(named), "struck": len(chosen)}


def test_the_counts_are_written_down() -> None:
    assert STRUCK["killed"]["struck"] >= 10
    assert STRUCK["asleep"]["struck"] >= 3
    if SOAK:
        rows = [(how, str(n["steps"]), str(n["struck"]), "0", "0") for how, n in STRUCK.items()]
        text = (
            "Each run applies a history of inserts, updates, a delete, a changed key and a bad "
            "message in several plans. After each strike another run goes on.\n\n"
        )
        text += table(("how", "steps", "struck", "lost", "doubled"), rows)
        write_section(
            "Runs of a change stream, killed or put to sleep at each step",
            None,
            time.monotonic() - BEGAN[0],
            text,
        )
