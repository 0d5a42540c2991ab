"""The server of most benchmarks, and what they have in common to reach it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dagster_bq_connector.clients import Clients, Credentials
from dagster_bq_connector.endpoints import Endpoint, Endpoints
from dagster_bq_connector.table.ref import TableRef

ROWS = 1_000_000
TABLE = TableRef("d", "t", "p")
STREAM = f"{TABLE.path}/streams/_default"


@contextmanager
def server(rows: int = ROWS, streams: int = 1, times: int = 1) -> Iterator[str]:
    """Start it; gives its address. Each of `streams` serves `rows` prepared rows `times` times."""
    command = [sys.executable, "-m", "benchmarks.server", str(rows), str(streams), str(times)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield f"127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.stdin.close()
        process.wait()


def clients_of(address: str) -> Clients:
    return Clients(Endpoints(storage=Endpoint(address, tls=False)), Credentials())
