"""Ledgers on both homes, reached directly or through a proxy."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from dagster_bq_connector import BigQueryResource
from dagster_bq_connector.clients import Clients
from dagster_bq_connector.credentials import Credentials
from dagster_bq_connector.endpoints import Endpoint
from dagster_bq_connector.ledger import Entry, Key, Ledger, open_ledger
from support.http_proxy import HttpProxy

T = TypeVar("T")
HOMES = ("bigquery", "cloud_storage")
STREAM = Key("stream", "orders")


def ledger_at(bigquery: BigQueryResource, home: str, **settings: Any) -> Ledger:
    connected = bigquery.connect()
    settings = {"deadline": connected.deadline, "location": connected.location, **settings}
    return open_ledger(connected.clients, connected.project, home, **settings)


def proxy_to(bigquery: BigQueryResource, home: str) -> HttpProxy:
    """A proxy in front of the service that keeps the home."""
    endpoints = bigquery.connect().clients.endpoints
    endpoint = endpoints.cloud_storage if home.startswith("gs://") else endpoints.rest
    assert endpoint
    return HttpProxy(endpoint.url)


def ledger_through(
    proxy: HttpProxy, bigquery: BigQueryResource, home: str, deadline: float = 60.0
) -> Ledger:
    connected = bigquery.connect()
    through = Endpoint.parse(proxy.url, tls=False)
    endpoints = replace(connected.clients.endpoints, rest=through, cloud_storage=through)
    return open_ledger(
        Clients(endpoints, Credentials()), connected.project, home, None, True, deadline
    )


def at_once(action: Callable[[int], T], times: int) -> list[T]:
    """Run in so many threads, which begin together."""
    begin = threading.Barrier(times)

    def run(number: int) -> T:
        begin.wait(timeout=60)
        return action(number)

    with ThreadPoolExecutor(times) as pool:
        return list(pool.map(run, range(times)))


def increment(ledger: Ledger, key: Key = STREAM) -> None:
    """Add one to a counter, by as many tries as it takes."""
    while True:
        entry = ledger.get(key)
        assert entry
        if ledger.compare_and_set(entry, {"n": entry.value["n"] + 1}).won:
            return


def move_on(ledger: Ledger, times: int) -> None:
    for _ in range(times):
        increment(ledger)


def created(ledger: Ledger, value: Any = None, key: Key = STREAM) -> Entry:
    written = ledger.create(key, value or {"n": 0})
    assert written.won
    assert written.entry
    return written.entry


def names(entries: Sequence[Entry]) -> list[str]:
    return sorted(str(entry.key) for entry in entries)
