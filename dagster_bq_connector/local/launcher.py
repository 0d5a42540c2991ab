"""`LocalBigQuery`: the caller's side of the embedded BigQuery. Standard library only."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

START_SECONDS = 180  # a first start may download DuckDB's extensions
STOP_SECONDS = 10  # the server gives itself less, see server.py
LOG_TAIL = 4000  # characters of server.log that go into an error
# What local-bigquery takes in a request, without an end that is not a letter or a digit.
PROJECT = re.compile(r"([a-z0-9.-]+:)?[a-z0-9]([a-z0-9-]*[a-z0-9])?")
# A project is a database of this name in DuckDB, beside those that are there already.
RESERVED = ("bq", "emulator", "main", "memory", "system", "temp")
# local-bigquery and DuckDB take these for more than characters of a file's name.
FORBIDDEN = "'{}?\\\0"

# Only this package is put on the server's path, never the folder it lies in: that folder may be the
# site-packages of another Python. The package's own __init__ is passed over for the same reason.
BOOTSTRAP = """
import json, sys, types
sys.path[:] = [entry for entry in sys.path if entry]
if sys.version_info < (3, 13):
    version = ".".join(map(str, sys.version_info[:3]))
    print(json.dumps({"error": "it needs Python 3.13 or newer, and %s is Python %s. "
        'Run pip install "dagster-bq-connector[local]" on Python 3.13, and start it there or '
        "name that interpreter with python=." % (sys.executable, version)}))
    sys.exit(1)
package = types.ModuleType("dagster_bq_connector")
package.__path__ = [sys.argv[1]]
sys.modules[package.__name__] = package
from dagster_bq_connector.local import server
server.main(sys.argv[2])
"""


class LocalBigQuery:
    """An embedded BigQuery and Cloud Storage, for a `with` block or between `start` and `stop`.

    It runs in a child process and dies with the process that started it, however that one ends. (A
    process that forks without exec shares it: then it lives as long as the last of them.)

    Attributes:
        environment: The variables that point clients here, once started:
            `BIGQUERY_EMULATOR_HOST` (REST, a URL), `BIGQUERY_STORAGE_EMULATOR_HOST` (gRPC, host and
            port), `STORAGE_EMULATOR_HOST` (Cloud Storage, a URL) and `GOOGLE_CLOUD_PROJECT`. They
            are not set in this process.
    """

    def __init__(
        self,
        project: str = "local-project",
        data_dir: str | os.PathLike[str] | None = None,
        refuse_streamed_tables: bool = False,
        mask_missing_tables: bool = False,
        *,
        python: str | os.PathLike[str] = sys.executable,
    ):
        """Say what to start; nothing happens yet.

        Args:
            project: The default project.
            data_dir: Where tables and objects live, made when missing. By default a temporary
                folder, removed at the end.
            refuse_streamed_tables: A table that received CDC rows refuses Storage reads and copies,
                as the service does while changes wait to be applied.
            mask_missing_tables: A missing table answers PERMISSION_DENIED on the Storage API, as to
                a caller without rights on its dataset.
            python: The interpreter that runs the server: Python 3.13 with the `local` extra.
        """
        self._options: dict[str, Any] = {
            "project": project,
            "refuse_streamed_tables": refuse_streamed_tables,
            "mask_missing_tables": mask_missing_tables,
        }
        self._data_dir = data_dir
        self._python = os.fspath(python)
        self._process: subprocess.Popen[bytes] | None = None
        self._temporary: str | None = None
        self._log = Path()
        self._log_start = 0
        self.environment: dict[str, str] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        """Whether the server lives."""
        return self._process is not None and not _ended(self._process)

    @property
    def log_tail(self) -> str:
        """The end of what the server logged since it was started."""
        if not self._log.is_file():
            return ""
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")[-LOG_TAIL:].strip()

    def start(self) -> None:
        """Start the server and wait until it answers: 3 to 5 seconds.

        Raises:
            RuntimeError: It runs already, cannot have this project or data folder, or did not
                start; the message says why, with the end of its log.
        """
        if self._process is not None:
            raise RuntimeError("The local BigQuery was started already.")
        if sys.platform == "win32":
            raise RuntimeError("The local BigQuery runs on Linux and macOS only.")
        _check_project(self._options["project"])
        try:
            answer = self._launch(self._folder())
            if "environment" not in answer:
                reason = answer.get("error", "it ended without a word.")
                raise RuntimeError(self._failure(reason))
        except BaseException:
            self.stop()
            raise
        self.environment = answer["environment"]

    def stop(self) -> None:
        """Stop the server, and remove its data when they are temporary. A second time is fine."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None
        self.environment = {}

    def _folder(self) -> Path:
        """Make the data folder."""
        if self._data_dir is None:
            self._temporary = tempfile.mkdtemp(prefix="local-bigquery-")
        data = Path(self._temporary or os.fspath(self._data_dir or "")).absolute()
        if found := [character for character in FORBIDDEN if character in str(data)]:
            raise RuntimeError(
                f"The local BigQuery cannot keep its data in {str(data)!r}: DuckDB does not take "
                f"{' '.join(map(repr, found))} in its path. Name another folder with data_dir"
                f"{' or TMPDIR' if self._temporary else ''}."
            )
        try:
            data.mkdir(parents=True, exist_ok=True)
            (data / "server.log").open("ab").close()
        except OSError as error:
            raise RuntimeError(
                f"The local BigQuery cannot keep its data in {str(data)!r}: {error}. Name a folder "
                "with data_dir that can be made and written."
            ) from error
        return data

    def _launch(self, data: Path) -> dict[str, Any]:
        """Start the child process and return the one line that it says."""
        self._log = data / "server.log"
        options = self._options | {"data_dir": str(data), "temporary": bool(self._temporary)}
        package = str(Path(__file__).parents[1])
        command = [self._python, "-c", BOOTSTRAP, package, json.dumps(options)]
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=self._child_environment(),
                    start_new_session=True,  # a Ctrl-C in the terminal is for the caller
                )
            except OSError as error:
                raise RuntimeError(self._failure(f"cannot run {self._python}: {error}.")) from error
        self._process = process
        timer = threading.Timer(START_SECONDS, _kill, [process])
        timer.daemon = True
        timer.start()
        try:
            assert process.stdout is not None
            return _parsed(process.stdout.readline())
        finally:
            timer.cancel()

    def _child_environment(self) -> dict[str, str]:
        if self._python == sys.executable:
            return dict(os.environ)
        foreign = ("PYTHONPATH", "PYTHONHOME")  # they belong to the caller's Python
        return {name: value for name, value in os.environ.items() if name not in foreign}

    def _failure(self, reason: str) -> str:
        text = f"The local BigQuery did not start: {reason}"
        if tail := self.log_tail:
            text += f"\nThe end of {self._log}:\n{tail}"
        return text


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        return json.loads(line)
    except ValueError:
        return {}  # the server ended, or something else printed: its log says more


def _check_project(project: str) -> None:
    if project in RESERVED:
        raise RuntimeError(
            f"The project {project!r} is a name that the local BigQuery needs for itself, as "
            f"{', '.join(RESERVED)} are. Name another project."
        )
    if not PROJECT.fullmatch(project):
        raise RuntimeError(
            f"{project!r} is no project ID. It has small letters, digits and hyphens only, none of "
            "the latter at an end, and perhaps a domain before it, as in example.com:my-project."
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let the server see that its standard input ended, and make sure that all of it is gone."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    if process.returncode is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        _kill_group(process)
        process.wait()
    process.stdout.close()


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the server has ended. When that is news, the rest of its process group ends too."""
    if process.returncode is None and process.poll() is not None:
        _kill_group(process)
    return process.returncode is not None


def _kill(process: subprocess.Popen[bytes]) -> None:
    if not _ended(process):
        _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the session of its own that the server is: Cloud Storage may outlive it.

    Not long after its end: later the number may be another's.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):  # none left, or zombies only
        os.killpg(process.pid, signal.SIGKILL)
