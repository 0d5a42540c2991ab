"""A PostgreSQL server of the tests' own, whose log of changes can be read.

It needs the server programs of PostgreSQL 15 or later (`postgresql` in Debian); of no running
server is anything needed or touched.
"""

import contextlib
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, LiteralString

import psycopg

START_SECONDS = 60
HOST = "127.0.0.1"
USER = "postgres"  # and its database
# Waiting for the disk is left out: a killed process loses nothing of what it has written to files.
SETTINGS = {
    "wal_level": "logical",
    "listen_addresses": HOST,
    "unix_socket_directories": "",
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "32MB",
    "max_connections": "40",
    "max_wal_size": "256MB",
    "autovacuum": "off",
    "timezone": "UTC",
    "wal_sender_timeout": "10s",
}


class PostgresServer:
    """A server in a folder of its own. What it holds outlives a restart, and a kill."""

    def __init__(self) -> None:
        self._programs = _programs()
        self._account = _account()
        with socket.socket() as free:
            free.bind((HOST, 0))
            self.port: int = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        # Not below the folder of a test, where only the tests' own user may look.
        self._folder = Path(tempfile.mkdtemp(prefix="postgres-"))
        if self._account:
            os.chown(self._folder, self._account.pw_uid, self._account.pw_gid)
        self._run("initdb", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync")

    def start(self) -> None:
        """Start it, and wait until it answers."""
        options = [f"-c{name}={value}" for name, value in SETTINGS.items()]
        end = time.monotonic() + START_SECONDS
        self._process = self._launch(options)
        while True:
            with contextlib.suppress(psycopg.OperationalError), self.connect(connect_timeout=5):
                return
            # Those that a killed server has left behind may need a moment to see it.
            if self._process.poll() is not None:
                time.sleep(0.2)
                self._process = self._launch(options)
            assert time.monotonic() < end, f"PostgreSQL does not answer:\n{self.log}"
            time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End it: at once and in order by SIGINT, without a word by SIGKILL."""
        if self._process is None:
            return
        self._process.send_signal(how)
        self._process.wait(START_SECONDS)
        self._process = None

    def restart(self, how: signal.Signals = signal.SIGINT) -> None:
        self.stop(how)
        self.start()

    def remove(self) -> None:
        """End it, and remove what it holds."""
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def connect(self, **options: Any) -> psycopg.Connection[tuple[Any, ...]]:
        """A connection that commits each statement, unless it is in a transaction."""
        return psycopg.connect(
            **{"host": HOST, "port": self.port, "user": USER, "dbname": USER, **options},
            autocommit=True,
        )

    def execute(self, statement: LiteralString, *values: Any) -> list[tuple[Any, ...]]:
        """Run a statement on a connection of its own. Gives its rows."""
        with self.connect() as connection, connection.cursor() as cursor:
            cursor.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else []

    @property
    def log(self) -> str:
        """The end of what it logged."""
        log = self._folder / "log"
        return log.read_text(errors="replace")[-4000:] if log.exists() else ""

    def _launch(self, options: list[str]) -> subprocess.Popen[bytes]:
        command = [str(self._programs / "postgres"), "-D", str(self._folder / "data")]
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(
                [*command, f"-p{self.port}", *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self._folder,
                **self._as_account(),
            )

    def _run(self, program: str, *options: str) -> None:
        command = [str(self._programs / program), "-D", str(self._folder / "data")]
        done = subprocess.run(
            [*command, f"--username={USER}", *options],
            capture_output=True,
            text=True,
            check=False,
            cwd=self._folder,
            **self._as_account(),
        )
        assert done.returncode == 0, f"{program} failed:\n{done.stdout}\n{done.stderr}"

    def _as_account(self) -> dict[str, Any]:
        if self._account is None:
            return {}
        user, group = self._account.pw_uid, self._account.pw_gid
        return {"user": user, "group": group, "extra_groups": []}


def _programs() -> Path:
    """Where the server programs are: on the path, or where Debian keeps those of each version."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    folders = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    versions = {int(re.findall(r"\d+", path.parts[-3])[0]): path.parent for path in folders}
    if not versions:
        raise FileNotFoundError(
            "This needs the server programs of PostgreSQL (initdb, postgres), 15 or later: "
            "install them (apt-get install postgresql) or put them on the path."
        )
    return versions[max(versions)]


def _account() -> pwd.struct_passwd | None:
    """Whose process it has to be: PostgreSQL does not run as root."""
    if os.geteuid():
        return None
    try:
        return pwd.getpwnam(USER)
    except KeyError as error:
        raise LookupError(
            f"PostgreSQL does not run as root, and there is no user {USER!r} whose it could be "
            "instead: install PostgreSQL's package, which makes one, or run the tests as another "
            "user."
        ) from error


@contextlib.contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """A server that runs until the block ends."""
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.stop(signal.SIGKILL)
        server.remove()
