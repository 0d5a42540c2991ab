"""The resources that connect to BigQuery and read from it; the writers are in writers.py."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import dagster as dg
import dagster_gcp
from google.cloud import bigquery
from pydantic import ConfigDict, Field

from dagster_bq_connector.clients import (
    Clients,
    JobDefaults,
    shared_clients,
)
from dagster_bq_connector.credentials import GOOGLE, Credentials
from dagster_bq_connector.endpoints import Endpoints
from dagster_bq_connector.errors import ConfigurationError, SchemaError, UnsupportedError
from dagster_bq_connector.metadata import log
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.read.request import Where, plan_read
from dagster_bq_connector.read.rows import Rows
from dagster_bq_connector.read.scan import scan_rows
from dagster_bq_connector.read.session import ReadSession, create_session
from dagster_bq_connector.read.stream import StreamReader
from dagster_bq_connector.table.admin import TableAdmin
from dagster_bq_connector.table.literals import refuse_long
from dagster_bq_connector.table.options import partitioning_of
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.table.row_slice import RowSlice
from dagster_bq_connector.table.slice import TableSlice, TimeFilter

if TYPE_CHECKING:
    import polars as pl

# Misspelt fields are refused; a refused value is not shown, since it may be a secret.
STRICT = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

TableLike: TypeAlias = str | TableRef
# The metadata of a table, to the filter of a read of it.
Restriction: TypeAlias = Callable[[bigquery.Table], Where | None]
Destination: TypeAlias = str | TableRef | TableSlice | RowSlice

# A table of 100,000 rows comes in one stream; more streams than this rarely help one machine.
READ_STREAMS = 8
DEADLINE_SECONDS = 300


@dataclass(frozen=True)
class Connected:
    """What reading and writing need of a BigQuery resource, ours or dagster_gcp's."""

    clients: Clients
    project: str
    billing_project: str
    location: str | None
    defaults: JobDefaults
    deadline: float

    @classmethod
    def to(cls, resource: dagster_gcp.BigQueryResource) -> "Connected":
        """The connection of a resource.

        Raises:
            ConfigurationError: It is none, or cannot connect.
        """
        given: object = resource
        if not isinstance(given, dagster_gcp.BigQueryResource):
            raise ConfigurationError(
                f"bigquery is {type(given).__name__}: pass a BigQueryResource, ours or that of "
                "dagster_gcp."
            )
        if isinstance(resource, BigQueryResource):
            return resource.connect()
        key = resource.gcp_credentials
        clients = shared_clients(Endpoints.resolve(), Credentials(service_account_json=key))
        project = resource.project or clients.default_project()
        return cls(clients, project, project, resource.location, JobDefaults(), DEADLINE_SECONDS)

    @property
    def rest(self) -> bigquery.Client:
        """The REST client."""
        return self.clients.rest(self.billing_project, self.location, self.defaults)

    @property
    def admin(self) -> TableAdmin:
        """Looks up and creates tables."""
        return TableAdmin(self.rest, self.deadline)

    def resolve(self, table: TableLike) -> TableRef:
        """The address with its project."""
        return TableRef.parse(table, project=self.project)


class BigQueryResource(dagster_gcp.BigQueryResource):
    """A connection to BigQuery. It is accepted wherever dagster_gcp's resource of that name is.

    Nothing is opened before it is used, and no environment variable is ever set. Clients are
    shared by everything in the process that has the same endpoints and credentials.

    Emulators: `BIGQUERY_EMULATOR_HOST`, `BIGQUERY_STORAGE_EMULATOR_HOST` and
    `STORAGE_EMULATOR_HOST` are honoured. They are called without credentials, and when one of them
    is set, the services without one are refused rather than reached for real.

    Attributes:
        project (str | None): Where tables are looked for; `GOOGLE_CLOUD_PROJECT`, or the project of
            the credentials, when not set.
        location (str | None): Where jobs run and missing datasets are created, such as `EU`. It
            must be the location of the datasets and of the staging bucket.

    Example:
        ```python
        bigquery = BigQueryResource(project="my-project", location="EU")
        ```
    """

    model_config = STRICT

    gcp_credentials: str | None = Field(
        default=None,
        repr=False,
        description="A service account's JSON key, as it is or in base64. Application Default "
        "Credentials when not set.",
    )
    billing_project: str | None = Field(
        default=None,
        description="The project whose jobs and read sessions these are; `project` when not set.",
    )
    impersonate_service_account: str | None = Field(
        default=None, description="The service account to act as."
    )
    impersonation_delegates: list[str] = Field(
        default=[], description="The chain of service accounts that leads to it."
    )
    quota_project: str | None = Field(
        default=None, description="The project that is charged for the quota of calls."
    )
    universe_domain: str = Field(
        default=GOOGLE, description="The domain of the cloud that is called: `googleapis.com`."
    )
    anonymous: bool = Field(default=False, description="Send no credentials.")
    api_endpoint: str | None = Field(
        default=None, description="URL of the REST API, for private and regional endpoints."
    )
    storage_endpoint: str | None = Field(
        default=None, description="host:port of the Storage API; with http:// it has no TLS."
    )
    cloud_storage_endpoint: str | None = Field(
        default=None, description="URL of Cloud Storage, for private and regional endpoints."
    )
    priority: str | None = Field(default=None, description="INTERACTIVE or BATCH, for query jobs.")
    reservation: str | None = Field(
        default=None, description="projects/P/locations/L/reservations/R that runs the jobs."
    )
    maximum_bytes_billed: int | None = Field(
        default=None, description="A query that would bill more bytes fails."
    )
    job_timeout_seconds: int | None = Field(
        default=None, description="Seconds after which BigQuery ends a job."
    )
    labels: dict[str, str] = Field(default={}, description="Labels of every job.")
    deadline_seconds: int = Field(
        default=DEADLINE_SECONDS,
        description="Seconds for which a call is tried again before it fails; 300 when not set. "
        "Load jobs may run longer.",
    )

    @contextmanager
    def get_client(self) -> Generator[bigquery.Client]:
        """The REST client. It is shared: leaving the block does not close it.

        Yields:
            Google's `bigquery.Client`, for queries and everything else that it can do.

        Raises:
            ConfigurationError: No project, no credentials, or endpoints that do not go together.
        """
        yield self.connect().rest

    def get_object_to_set_on_execution_context(self) -> Any:
        """What `context.resources.bigquery` is under `required_resource_keys`: the client."""
        return self.connect().rest

    def connect(self) -> Connected:
        """The connection, for what reads and writes through it.

        Raises:
            ConfigurationError: No project, no credentials, or endpoints that do not go together.
        """
        if self.deadline_seconds <= 0:
            raise ConfigurationError(f"deadline_seconds={self.deadline_seconds}: it must be more.")
        endpoints = Endpoints.resolve(
            self.api_endpoint, self.storage_endpoint, self.cloud_storage_endpoint
        )
        credentials = Credentials(
            service_account_json=self.gcp_credentials,
            impersonate=self.impersonate_service_account,
            delegates=tuple(self.impersonation_delegates),
            quota_project=self.quota_project,
            universe_domain=self.universe_domain,
            anonymous=self.anonymous,
        )
        clients = shared_clients(endpoints, credentials)
        project = self.project or clients.default_project()
        timeout = self.job_timeout_seconds
        defaults = JobDefaults(
            priority=self.priority,
            reservation=self.reservation,
            maximum_bytes_billed=self.maximum_bytes_billed,
            job_timeout_ms=None if timeout is None else timeout * 1000,
            labels=tuple(sorted(self.labels.items())),
        )
        billing = self.billing_project or project
        return Connected(clients, project, billing, self.location, defaults, self.deadline_seconds)


class BigQueryReader(dg.ConfigurableResource[Any]):
    """Reads tables through Storage Read sessions, as Arrow.

    Attributes:
        bigquery (BigQueryResource): The connection, ours or that of dagster_gcp.

    Example:
        ```python
        rows = reader.read("shop.orders", columns=["id", "amount"], where="amount > 10")
        frame = rows.to_polars()
        ```
    """

    model_config = STRICT

    bigquery: dg.ResourceDependency[dagster_gcp.BigQueryResource]

    def read(
        self,
        table: Destination,
        columns: Sequence[str] | None = None,
        where: Where | None = None,
    ) -> Rows:
        """Open a read of a table as it is now.

        Args:
            table: The table; or what `DailyTable.for_run` gives: then its partitions, or its
                tables when sharded; or a `RowSlice`: then its rows.
            columns: The columns to read; only these travel. All when None.
            where: A filter in SQL, evaluated by BigQuery, or what `DailyTable.where` gives. Of a
                slice it takes the rows that pass this filter too.

        Returns:
            Rows to iterate over, to hand to a writer, or to take as a table or frame. Nothing is
            fetched before that.

        Raises:
            TableNotFoundError, DatasetNotFoundError: It does not exist, or may not be seen.
            SchemaError: It has no such column.
            UnsupportedError: It is a view, or one partition by its address.
            PartitionError: The filters of a slice do not fit the columns.
            RefusedError: The filter is wrong.
            AccessDeniedError: The credentials do not allow it.
            UnreachableError: No answer within the deadline.
        """
        connected = Connected.to(self.bigquery)
        if isinstance(table, TableSlice):
            slice_ = table.resolve(connected.project)
            if slice_.sharded:
                # The shards' names follow the calendar of the windows, whatever the column's type.
                shards = [slice_.address(id_) for id_ in slice_.partitions(None)]
                return self._open(connected, shards, columns, _always(where))
            table = RowSlice(slice_.table, (("", (slice_.filter,)),))
        if isinstance(table, RowSlice):
            rows = table.resolve(connected.project)
            restrict = partial(_rows_of, connected, rows, where)
            return self._open(connected, [rows.table], columns, restrict)
        return self._open(connected, [connected.resolve(table)], columns, _always(where))

    def scan(
        self,
        table: Destination,
        columns: Sequence[str] | None = None,
        where: Where | None = None,
    ) -> "pl.LazyFrame":
        """A Polars LazyFrame of a table, of which only what its query needs is read.

        Columns that the query does not use never travel, and a `head` that comes first ends the
        read early. Filters of Polars are applied here, to rows that have travelled: what BigQuery
        shall filter belongs into `where`. Columns have the types that `Rows.to_polars` gives.

        Making the frame opens one read session, for the columns' types, and reads no row. Each
        `collect` opens its own, so it sees the table as it is then, and can be repeated. A query
        that uses the frame twice, such as a join with itself, may read it twice. Needs Polars.

        Args:
            table: As in `read`.
            columns: The columns of the frame, in this order; all when None.
            where: As in `read`.

        Raises:
            ConnectorError: As `read` does, here and again when the frame is collected.
        """

        def open_rows(needed: Sequence[str] | None) -> Rows:
            if needed is None or columns is None:
                return self.read(table, columns if needed is None else needed, where)
            heads = {name.casefold() for name in needed}
            chosen = [name for name in columns if name.partition(".")[0].casefold() in heads]
            return self.read(table, chosen, where)

        return scan_rows(open_rows, open_rows(None).schema)

    def _open(
        self,
        connected: Connected,
        tables: Sequence[TableRef],
        columns: Sequence[str] | None,
        where: Restriction,
    ) -> Rows:
        admin, deadline = connected.admin, connected.deadline
        sessions: list[ReadSession] = []
        for ref in tables:
            found = admin.get(ref)
            request = plan_read(found, ref, columns, where(found), READ_STREAMS)
            client, billing = connected.clients.read, connected.billing_project
            sessions.append(create_session(client, request, billing, deadline))
        _refuse_other_columns(tables, sessions)
        total = sum(session.estimated_rows for session in sessions)
        what, sink = f"Reading {', '.join(map(str, tables))}", log()

        def open_stream(stream: str) -> StreamReader:
            return StreamReader(connected.clients.channel, stream, deadline)

        return Rows(sessions, open_stream, lambda: Progress(what, sink, total))


def _always(where: Where | None) -> Restriction:
    def restrict(table: bigquery.Table) -> Where | None:
        return where

    return restrict


def _rows_of(
    connected: Connected, slice_: RowSlice, where: Where | None, table: bigquery.Table
) -> str:
    """The rows of a slice that pass a filter too, as SQL."""
    layout = partitioning_of(table)
    find_type = partial(connected.admin.expression_type, slice_.table, layout)
    sql = slice_.bind(table.schema, layout, find_type).sql()
    if isinstance(where, TimeFilter):
        more = RowSlice(slice_.table, (("", (where,)),))
        where = more.bind(table.schema, layout, find_type).sql()
    if where is not None and not isinstance(where, str):
        raise UnsupportedError(
            f"where is {type(where).__name__}: write SQL, or pass what where() of a DailyTable "
            "gives."
        )
    # A filter may end in a comment, which ends with its line.
    return refuse_long(f"({sql}) AND ({where}\n)", slice_.table) if where else sql


def _refuse_other_columns(tables: Sequence[TableRef], sessions: Sequence[ReadSession]) -> None:
    """The tables of a sharded layout can be read as one when they have the same columns."""
    first = {field.name: field.type for field in sessions[0].schema}
    for table, session in zip(tables, sessions, strict=True):
        if (other := {field.name: field.type for field in session.schema}) != first:
            raise SchemaError(
                f"{table} has the columns {_columns_text(other)}, and {tables[0]} has "
                f"{_columns_text(first)}: name the columns that both have."
            )


def _columns_text(columns: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in columns.items())
