"""`python -m dagster_bq_connector.local`: the embedded BigQuery until Ctrl-C.

Prints one KEY=VALUE a line, then `ready`.
"""

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path

from dagster_bq_connector.local.launcher import LocalBigQuery

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
POLL_SECONDS = 0.5


class Stopped(BaseException):
    """Somebody asked for the end. Not an Exception: nothing on the way may swallow it."""


def _stop(number: int, frame: object) -> None:
    for name in SIGNALS:  # once: a second signal must not break the clean-up
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    raise Stopped


def _listen() -> None:
    for name in SIGNALS:
        number = getattr(signal, name)
        if signal.getsignal(number) != signal.SIG_IGN or name != "SIGHUP":  # nohup keeps its word
            signal.signal(number, _stop)


def _follow_stdin() -> None:
    while os.read(0, 1):  # not sys.stdin: its lock would be in the way when the process ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m dagster_bq_connector.local", description="Run an embedded BigQuery until Ctrl-C."
    )
    parser.add_argument("--project", default="local-project", help="the default project")
    parser.add_argument(
        "--data-dir", type=Path, help="where tables and objects live; a temporary folder by default"
    )
    parser.add_argument(
        "--refuse-streamed-tables",
        action="store_true",
        help="a table that received CDC rows refuses Storage reads and copies",
    )
    parser.add_argument(
        "--mask-missing-tables",
        action="store_true",
        help="a missing table answers PERMISSION_DENIED on the Storage API",
    )
    parser.add_argument(
        "--follow-stdin",
        action="store_true",
        help="stop also when standard input ends: for a parent that holds the other end of a pipe",
    )
    return parser.parse_args()


def main() -> int:
    """Run until a signal. Returns the exit code: 0 after a signal, 1 when the server failed."""
    options = _options()
    if options.follow_stdin:
        threading.Thread(target=_follow_stdin, daemon=True).start()
    local = LocalBigQuery(
        options.project,
        options.data_dir,
        refuse_streamed_tables=options.refuse_streamed_tables,
        mask_missing_tables=options.mask_missing_tables,
    )
    try:
        _listen()
        with local:
            lines = [f"{key}={value}" for key, value in local.environment.items()]
            sys.stdout.write("\n".join([*lines, "ready", ""]))
            sys.stdout.flush()
            while local.is_running:
                time.sleep(POLL_SECONDS)
            sys.stderr.write(f"The local BigQuery ended by itself.\n{local.log_tail}\n")
            return 1
    except Stopped:
        return 0
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
