"""Attempts in processes of their own, which die or stop for a while at a step that code names.

A program of attempts forks a process for each that it is asked for, so that none has to import
everything again; it has opened no connection itself.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dagster_bq_connector.write import steps


@dataclass(kw_only=True)
class Attempt:
    """What every attempt may be told.

    Attributes:
        die: At which step it is killed, by number from 0; never when None.
        stop: The same, for waiting until `go` exists; `stopped` is made then.
        go: A path.
        stopped: A path.
        steps: Where the names of its steps are written, when it lives.
    """

    die: int | None = None
    stop: int | None = None
    go: str = ""
    stopped: str = ""
    steps: str = ""


def observe(order: Attempt) -> list[str]:
    """Die or stop at a step, as it was ordered. Gives the names of the steps, as they come."""
    named: list[str] = []

    def observer(step: str, over: bool) -> None:
        number = len(named)
        named.append(f"{'after' if over else 'before'} {step}")
        if number == order.die:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == order.stop:
            Path(order.stopped).touch()
            while not Path(order.go).exists():
                time.sleep(0.01)

    steps.observe(observer)
    return named


def tell_steps(order: Attempt, named: list[str]) -> None:
    """Write the names of the steps where they are asked for."""
    if order.steps:
        Path(order.steps).write_text(json.dumps(named))


@dataclass
class Attempts:
    """Starts attempts of a program, and tells how they ended."""

    program: str
    process: Any = field(default=None)

    def __enter__(self) -> "Attempts":
        self.process = subprocess.Popen(
            [sys.executable, self.program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def start(self, order: Attempt) -> int:
        """Start an attempt. Gives its process id."""
        return int(self._ask({"order": vars(order)}))

    def wait(self, pid: int) -> int:
        """Wait for an attempt. Gives 0, what it failed with, or minus the signal it died of."""
        return int(self._ask({"wait": pid}))

    def run(self, order: Attempt) -> int:
        """Start, and wait."""
        return self.wait(self.start(order))

    def _ask(self, question: dict[str, Any]) -> str:
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()


def fork_for(kind: Callable[..., Any], attempt: Callable[[Any], object]) -> None:
    """Fork for orders, which are read from standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed by the attempts is no answer
    for line in sys.stdin:
        question = json.loads(line)
        if "wait" in question:
            _, status = os.waitpid(question["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        elif (answer := os.fork()) == 0:
            code = 1
            try:
                attempt(kind(**question["order"]))
                code = 0
            except Exception:  # noqa: BLE001  # it is shown, and its process ends
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(answer, file=answers, flush=True)
