"""A local BigQuery whose addresses and data outlive its process."""

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from dagster_bq_connector.local import LocalBigQuery
from support.proxy import Proxy

VARIABLES = {
    "api_endpoint": "BIGQUERY_EMULATOR_HOST",
    "storage_endpoint": "BIGQUERY_STORAGE_EMULATOR_HOST",
    "cloud_storage_endpoint": "STORAGE_EMULATOR_HOST",
}


class LastingBigQuery:
    """It can be killed and started again, while its clients keep their addresses."""

    def __init__(self, folder: Path) -> None:
        self._local = LocalBigQuery(data_dir=folder)
        self._proxies: dict[str, Proxy] = {}

    def __enter__(self) -> Self:
        self._local.start()
        self._proxies = {field: Proxy(port) for field, port in self._ports().items()}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with ExitStack() as stack:
            stack.callback(self._local.stop)
            for proxy in self._proxies.values():
                stack.callback(proxy.stop)

    @property
    def fields(self) -> dict[str, Any]:
        """Of a resource that is connected to it."""
        addresses = {name: f"http://{proxy.address}" for name, proxy in self._proxies.items()}
        project = self._local.environment["GOOGLE_CLOUD_PROJECT"]
        return {"project": project, "location": "US", "deadline_seconds": 60, **addresses}

    def kill(self) -> None:
        """Kill the server, and start another with its data."""
        process = self._local._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        for proxy in self._proxies.values():
            proxy.cut()
        self._local.stop()
        self._local.start()
        for field, port in self._ports().items():
            self._proxies[field].target = port

    def _ports(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for field, variable in VARIABLES.items():
            address = self._local.environment[variable]
            port = urlsplit(address if "//" in address else f"//{address}").port
            assert port is not None
            found[field] = port
        return found
