"""Dagster as it is deployed: daemons, code servers and runs, all in processes of their own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import dagster as dg
import yaml
from dagster._core.scheduler.instigation import SensorInstigatorData
from dagster._core.storage.dagster_run import FINISHED_STATUSES

from support.spine import VARIABLE, Spine

TESTS = Path(__file__).parents[1]
SENSOR_SECONDS = "60"
PID = re.compile(r"Executing steps in process \(pid: (\d+)\)")


class Deployment:
    """An instance of Dagster with one code location, and as many daemons as are started.

    Attributes:
        home: The instance's folder.
    """

    def __init__(self, home: Path, spine: Spine, retries: bool = False, late: bool = False) -> None:
        """Set it up; nothing runs yet.

        Args:
            home: A new folder.
            spine: The stream of the code location.
            retries: Whether runs that fail are retried by Dagster.
            late: Whether runs are launched late, now and then.
        """
        home.mkdir(parents=True)
        self.home, self._spine = home, spine
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.configure(retries, late)
        self.locate("first")
        with self.instance():  # two processes that make its databases at once may both fail
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def configure(self, retries: bool, late: bool) -> None:
        """Say how daemons behave that are started from now on."""
        settings: dict[str, Any] = {
            "telemetry": {"enabled": False},
            "run_retries": {"enabled": retries, "max_retries": 2},
            "run_monitoring": {"enabled": True, "poll_interval_seconds": 5},
            "run_coordinator": {
                "module": "dagster.core.run_coordinator",
                "class": "QueuedRunCoordinator",
                "config": {"dequeue_interval_seconds": 1},
            },
        }
        if late:
            settings["run_launcher"] = {"module": "support.spine", "class": "LateLauncher"}
        (self.home / "dagster.yaml").write_text(yaml.safe_dump(settings))

    def locate(self, name: str) -> None:
        """Name the code location, for daemons that are started from now on."""
        module = {"module_name": "support.spine", "location_name": name}
        workspace = {"load_from": [{"python_module": module}]}
        (self.home / "workspace.yaml").write_text(yaml.safe_dump(workspace))

    def start_daemon(self) -> None:
        """Start a daemon, beside those that run."""
        with (self.home / "daemon.log").open("ab") as log:
            daemon = subprocess.Popen(
                [sys.executable, "-m", "dagster._daemon", "run", "-w", "workspace.yaml"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.home,
                start_new_session=True,
                env=self._environment(),
            )
        self._daemons.append(daemon)

    def kill_daemon(self, which: int = 0) -> None:
        """Kill one daemon; its code server ends by itself, runs go on."""
        daemon = self._daemons.pop(which)
        daemon.kill()
        daemon.wait()

    @property
    def daemons(self) -> int:
        return len(self._daemons)

    @property
    def log(self) -> str:
        """The end of what the daemons logged."""
        return (self.home / "daemon.log").read_text(errors="replace")[-8000:]

    def worker_of(self, run: str) -> int | None:
        """The process that executes a run, when it is there."""
        with self.instance() as instance:
            events = instance.all_logs(run, of_type=dg.DagsterEventType.ENGINE_EVENT)
        pids = [
            PID.search(event.dagster_event.message or "") for event in events if event.dagster_event
        ]
        found = [int(pid[1]) for pid in pids if pid]
        return found[-1] if found and found[-1] in self._processes() else None

    def failures(self, text: str) -> int:
        """How many runs failed by an error that has this text."""
        count = 0
        with self.instance() as instance:
            ended = dg.RunsFilter(statuses=FINISHED_STATUSES)
            for record in instance.get_run_records(ended):
                run = record.dagster_run.run_id
                events = instance.all_logs(run, of_type=dg.DagsterEventType.STEP_FAILURE)
                count += any(text in str(event.dagster_event) for event in events)
        return count

    def code_servers(self) -> list[int]:
        """The processes that hold the definitions."""
        return [pid for pid, command in self._processes().items() if "api grpc" in command]

    def stop(self) -> None:
        """Kill everything that belongs to it."""
        self._daemons, daemons = [], self._daemons
        for daemon in daemons:
            daemon.kill()
            daemon.wait()
        while found := self._processes():  # some are about to start others
            for pid in found:
                kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def wipe_cursors(self) -> int:
        """Set the sensors' cursors to nothing. Gives how many there were."""
        wiped = 0
        with self.instance() as instance:
            for state in instance.all_instigator_state():
                data = state.instigator_data
                if isinstance(data, SensorInstigatorData) and data.cursor:
                    blank = data._replace(cursor=None)
                    instance.update_instigator_state(state.with_data(blank))
                    wiped += 1
        return wiped

    @contextmanager
    def instance(self) -> Iterator[dg.DagsterInstance]:
        with dg.DagsterInstance.from_config(str(self.home)) as instance:
            yield instance

    def statuses(self) -> dict[str, int]:
        """How many runs there are of each status."""
        counts: dict[str, int] = {}
        with self.instance() as instance:
            for record in instance.get_run_records():
                name = record.dagster_run.status.value
                counts[name] = counts.get(name, 0) + 1
        return counts

    def live(self) -> int:
        """How many runs have not ended."""
        ended = {status.value for status in FINISHED_STATUSES}
        return sum(count for status, count in self.statuses().items() if status not in ended)

    def _environment(self) -> dict[str, str]:
        return os.environ | {
            "DAGSTER_HOME": str(self.home),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), *sys.path])),
            "DAGSTER_SENSOR_GRPC_TIMEOUT_SECONDS": SENSOR_SECONDS,
            VARIABLE: json.dumps(asdict(self._spine)),
        }

    def _processes(self) -> dict[int, str]:
        """All processes of this instance, by what their environment says, with their commands."""
        mark = f"DAGSTER_HOME={self.home}".encode()
        found: dict[int, str] = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    command = (folder / "cmdline").read_bytes()
                    if command:  # a zombie has none
                        found[int(folder.name)] = command.replace(b"\0", b" ").decode()
            except OSError:  # it has ended, or is another's
                continue
        found.pop(os.getpid(), None)
        return found


def kill(pid: int, how: signal.Signals) -> bool:
    """Send a signal to a process that may have ended. Whether it was there."""
    try:
        os.kill(pid, how)
    except ProcessLookupError:
        return False
    return True


def until(condition: Callable[[], bool], seconds: float, say: Callable[[], str]) -> None:
    """Wait until a condition holds. `say` tells what was found when it does not."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, say()
        time.sleep(0.5)
