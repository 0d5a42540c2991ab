"""Endpoints and credentials become clients, opened on first use and shared in a process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import google.auth.credentials
import google.auth.transport.grpc
import google.auth.transport.requests
import grpc
import requests.adapters
from google.api_core import client_info
from google.api_core.client_options import ClientOptions
from google.cloud import bigquery, storage
from google.cloud.bigquery_storage_v1 import BigQueryReadClient as ReadClient
from google.cloud.bigquery_storage_v1 import BigQueryWriteClient as WriteClient
from google.cloud.bigquery_storage_v1.services.big_query_read.transports import (
    BigQueryReadGrpcTransport,
)
from google.cloud.bigquery_storage_v1.services.big_query_write.transports import (
    BigQueryWriteGrpcTransport,
)

from dagster_bq_connector.credentials import GOOGLE, Credentials
from dagster_bq_connector.endpoints import Endpoint, Endpoints
from dagster_bq_connector.errors import ConfigurationError

AGENT = "dagster-bq-connector/0.1.0"
HTTP_CONNECTIONS = 32
# A TCP connection of its own for each of an append's first calls: one alone carries at most a
# hundred calls to Google's front ends, and far away not the bytes of several.
APPEND_CHANNELS = 8
# Of each call, gRPC receives two mebibytes ahead. By default it would measure the connection and
# receive ahead as much as that carries: tens of mebibytes a read stream, whoever takes them.
LOOKAHEAD_BYTES = 2 * 1024 * 1024
# By default a message comes in frames of 16 KiB: larger ones took a fifth less of the client's CPU
# in a read of messages of 1 MiB (benchmarks/io_manager.py).
FRAME_BYTES = 1024 * 1024
# Pings keep a connection that only waits for acknowledgements alive through proxies; one a minute
# is what Google's own Storage Write clients send. Left alone, gRPC waits up to two minutes before
# it tries a lost connection again, and fails every call until then: our own pauses are shorter.
CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # a minute by default, whatever the line above says
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 10_000),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
    ("grpc.http2.max_frame_size", FRAME_BYTES),
    ("grpc.primary_user_agent", AGENT),
)

T = TypeVar("T")
_Config = TypeVar("_Config", bigquery.QueryJobConfig, bigquery.LoadJobConfig)


@dataclass(frozen=True, slots=True)
class JobDefaults:
    """What every query and load job gets unless it says otherwise.

    Attributes:
        priority: `INTERACTIVE` or `BATCH`, for query jobs.
        reservation: `projects/P/locations/L/reservations/R` that runs the jobs.
        maximum_bytes_billed: A query that would bill more bytes fails.
        job_timeout_ms: Milliseconds after which BigQuery ends a job.
        labels: Labels of every job, as (key, value) pairs.
    """

    priority: str | None = None
    reservation: str | None = None
    maximum_bytes_billed: int | None = None
    job_timeout_ms: int | None = None
    labels: tuple[tuple[str, str], ...] = ()

    def query_config(self) -> bigquery.QueryJobConfig:
        """The defaults of query jobs."""
        config = self._apply(bigquery.QueryJobConfig())
        if self.priority:
            config.priority = self.priority
        if self.maximum_bytes_billed:
            config.maximum_bytes_billed = self.maximum_bytes_billed
        return config

    def load_config(self) -> bigquery.LoadJobConfig:
        """The defaults of load jobs."""
        return self._apply(bigquery.LoadJobConfig())

    def _apply(self, config: _Config) -> _Config:
        if self.labels:
            config.labels = dict(self.labels)
        if self.job_timeout_ms:
            config.job_timeout_ms = self.job_timeout_ms
        if self.reservation:
            config.reservation = self.reservation
        return config


class _RestClient(bigquery.Client):
    """Google's REST client, whose read sessions go to the same place as its other calls.

    It opens a Storage Read client for `to_dataframe` and `to_arrow`, by a private method and
    always to the real service: beside an emulator, or a private endpoint, that is the wrong one.
    """

    def __init__(self, open_read: Callable[[], ReadClient | None], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._open_read = open_read

    def _ensure_bqstorage_client(
        self,
        bqstorage_client: ReadClient | None = None,
        client_options: object = None,
        client_info: object = None,
        transport: object = None,
    ) -> ReadClient | None:
        return bqstorage_client or self._open_read()


class Clients:
    """The clients of one pair of endpoints and credentials, each opened on first use.

    Safe to use from several threads. Take it from `shared_clients`, so that a process has one.
    """

    def __init__(self, endpoints: Endpoints, credentials: Credentials) -> None:
        """Keep what is needed to open clients; nothing is opened or looked up yet.

        Raises:
            ConfigurationError: Credentials would go over a connection without TLS.
        """
        if endpoints.emulators and credentials.given:
            raise ConfigurationError(
                f"Credentials are set, and {endpoints.emulators[0]} is an emulator or has no TLS: "
                "they are not sent there. Use an https endpoint, or no credentials."
            )
        if credentials.anonymous and credentials.given:
            raise ConfigurationError("Credentials are set, and anonymous=True: leave one out.")
        self.endpoints = endpoints
        self._given = replace(credentials, anonymous=True) if endpoints.emulators else credentials
        self._lock = threading.RLock()
        self._opened: dict[object, Any] = {}

    @property
    def request_limit(self) -> int | None:
        """Bytes of one append that the Storage API takes, as it was found out by a refusal.

        It holds in this process for everybody who calls that endpoint. None before a refusal.
        """
        return _request_limits.get(self.endpoints.storage)

    def remember_request_limit(self, size: int) -> None:
        """Keep the limit, if it is the smallest yet."""
        known = _request_limits.get(self.endpoints.storage, size)
        _request_limits[self.endpoints.storage] = min(known, size)

    def forget(self) -> None:
        """Open all anew on next use: in a forked child, to which no connection belongs.

        What the parent opened is kept, but not used: to close it would wait for the parent's
        threads, which the child has not.
        """
        _left_to_the_parent.append(self._opened)
        self._lock, self._opened = threading.RLock(), {}

    def _once(self, key: object, open_it: Callable[[], T]) -> T:
        with self._lock:
            if key not in self._opened:
                self._opened[key] = open_it()
            return self._opened[key]

    @property
    def _loaded(self) -> tuple[google.auth.credentials.Credentials, str | None]:
        return self._once("credentials", self._given.load)

    @property
    def credentials(self) -> google.auth.credentials.Credentials:
        """The credentials that every client uses."""
        return self._loaded[0]

    def default_project(self) -> str:
        """The project that the environment or the credentials name.

        Raises:
            ConfigurationError: Neither names one.
        """
        if project := os.environ.get("GOOGLE_CLOUD_PROJECT"):
            return project
        if not self.endpoints.emulators and (project := self._loaded[1]):
            return project
        raise ConfigurationError(
            "No project: set `project` on the resource, or GOOGLE_CLOUD_PROJECT."
        )

    def rest(
        self, project: str, location: str | None = None, defaults: JobDefaults | None = None
    ) -> bigquery.Client:
        """The REST client whose jobs run, and are billed, in `project`."""
        defaults = defaults or JobDefaults()

        def open_it() -> bigquery.Client:
            return _RestClient(
                self._read_for_rest,
                project=project,
                location=location,
                credentials=self.credentials,
                _http=self._once("session", self._session),
                client_options=self._options("rest"),
                client_info=client_info.ClientInfo(user_agent=AGENT),
                default_query_job_config=defaults.query_config(),
                default_load_job_config=defaults.load_config(),
            )

        return self._once(("rest", project, location, defaults), open_it)

    def cloud_storage(self, project: str) -> storage.Client:
        """The Cloud Storage client."""

        def open_it() -> storage.Client:
            return storage.Client(
                project=project,
                credentials=self.credentials,
                client_options=self._options("cloud_storage"),
                client_info=client_info.ClientInfo(user_agent=AGENT),
            )

        return self._once(("cloud_storage", project), open_it)

    @property
    def channel(self) -> grpc.Channel:
        """The gRPC channel to the Storage API, for reading and writing."""
        return self.append_channel(0)

    def append_channel(self, number: int) -> grpc.Channel:
        """The channel for the connection of an append with that number, from 0."""
        number %= APPEND_CHANNELS
        own = (("grpc.use_local_subchannel_pool", 1),) if number else ()
        return self._once(("channel", number), lambda: self._channel(own))

    @property
    def read(self) -> ReadClient:
        """The Storage Read client, for control calls; rows go over `channel` directly."""
        return self._once("read", lambda: _read_client(self.channel))

    @property
    def write(self) -> WriteClient:
        """The Storage Write client, for control calls; rows go over `append_channel` directly."""
        return self._once(
            "write", lambda: WriteClient(transport=BigQueryWriteGrpcTransport(channel=self.channel))
        )

    def _read_for_rest(self) -> ReadClient | None:
        """A read client with a channel of its own, which the REST client closes after use.

        None, and the rows come over REST, beside a REST emulator alone.
        """
        try:
            return _read_client(self._channel())
        except ConfigurationError:
            return None

    def _channel(self, more: tuple[tuple[str, int], ...] = ()) -> grpc.Channel:
        self.endpoints.check("storage")
        options = CHANNEL_OPTIONS + more
        endpoint = self.endpoints.storage
        if endpoint and not endpoint.tls:
            return grpc.insecure_channel(endpoint.address, options=options)
        address = endpoint.address if endpoint else self._service("bigquerystorage")
        return google.auth.transport.grpc.secure_authorized_channel(
            self.credentials,
            google.auth.transport.requests.Request(),
            address if ":" in address else f"{address}:443",
            options=options,
        )

    def _session(self) -> google.auth.transport.requests.AuthorizedSession:
        session = google.auth.transport.requests.AuthorizedSession(self.credentials)
        session.mount("https://", requests.adapters.HTTPAdapter(pool_maxsize=HTTP_CONNECTIONS))
        session.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=HTTP_CONNECTIONS))
        return session

    def _service(self, name: str) -> str:
        return f"{name}.{self._given.universe_domain}"

    def _options(self, service: str) -> ClientOptions:
        self.endpoints.check(service)
        endpoint: Endpoint | None = getattr(self.endpoints, service)
        domain = self._given.universe_domain
        if endpoint is None:
            return ClientOptions(universe_domain=None if domain == GOOGLE else domain)
        return ClientOptions(api_endpoint=endpoint.url)


def _read_client(channel: grpc.Channel) -> ReadClient:
    return ReadClient(transport=BigQueryReadGrpcTransport(channel=channel))


_request_limits: dict[Endpoint | None, int] = {}
_left_to_the_parent: list[object] = []
_shared: dict[tuple[Endpoints, Credentials], Clients] = {}
_shared_lock = threading.Lock()


def shared_clients(endpoints: Endpoints, credentials: Credentials) -> Clients:
    """The clients of this process for these endpoints and credentials.

    Dagster copies a resource wherever it is nested; all copies come here for the same clients.
    """
    with _shared_lock:
        key = (endpoints, credentials)
        if key not in _shared:
            _shared[key] = Clients(endpoints, credentials)
        return _shared[key]


def _forget_after_fork() -> None:
    """A forked child opens its own: neither gRPC channels nor HTTP connections can be shared.

    gRPC stands a fork between calls. In the middle of one, the child may abort: Dagster's
    executors, which spawn, do not do that.
    """
    global _shared_lock
    _shared_lock = threading.Lock()
    for clients in _shared.values():
        clients.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
