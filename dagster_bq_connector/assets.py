"""`cdc_assets`: the tables of a change stream as assets, which are materialized as one."""

import hashlib
import json
import keyword
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import dagster as dg

from dagster_bq_connector.cdc.apply.upsert import Upsert, check_settings
from dagster_bq_connector.cdc.envelope.debezium_json import DebeziumJson
from dagster_bq_connector.cdc.look import lost_entry
from dagster_bq_connector.cdc.ordering.profile import OrderingProfile
from dagster_bq_connector.cdc.source.source import Source
from dagster_bq_connector.cdc.stream import Pace, Request, Worker
from dagster_bq_connector.cdc.table import CdcTable, FailedRowPolicy
from dagster_bq_connector.cdc.watermark import Watermark
from dagster_bq_connector.cdc_sources import CdcSource
from dagster_bq_connector.errors import (
    ConfigurationError,
    LeaseLostError,
    OrderBreakError,
    PlanMismatchError,
    StreamStoppedError,
    TableMismatchError,
)
from dagster_bq_connector.ledger import open_ledger
from dagster_bq_connector.ledger.bigquery import DATASET
from dagster_bq_connector.metadata import drained_metadata, log
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.resource_arguments import taking
from dagster_bq_connector.resources import Connected
from dagster_bq_connector.table.ref import TableRef

# Tags of runs. The first is the name, too, of the metadata in which assets carry their stream.
STREAM, PLAN, START = "dagster_bq/stream", "dagster_bq/plan", "dagster_bq/start"
# The name of the source's table, in the metadata of its asset.
TABLE = "dagster_bq/source_table"
# Where a stream stood after a run, in the metadata of its materializations.
STOP = "dagster_bq/stop"
NO_RUN_RETRIES = {"dagster/max_retries": "0"}
# After these a retry would do the same again, or what another run does.
FINAL = (PlanMismatchError, StreamStoppedError, LeaseLostError, OrderBreakError, TableMismatchError)
SOURCE_SECONDS = 60.0
BY_HAND = (
    "Leave the config empty to apply what waits; to begin elsewhere, give the stream another "
    "position: python -m dagster_bq_connector.cdc reset"
)


class PlanConfig(dg.Config):
    """The plan that a sensor launched a run for. Without it a run plans for itself.

    Attributes:
        plan (str): Its id; empty to plan here.
        start (str): The position where it begins, as JSON.
        stop (str): The position where it ends, as JSON.
    """

    plan: str = ""
    start: str = "null"
    stop: str = "null"

    def to_request(self) -> Request | None:
        """The same for the lower floor.

        Raises:
            ConfigurationError: It was written by hand, and is no plan.
        """
        try:
            start, stop = json.loads(self.start), json.loads(self.stop)
        except ValueError as error:
            text = f"The start and stop of a plan are JSON: {error}. {BY_HAND}"
            raise ConfigurationError(text) from error
        if not self.plan and (start, stop) != (None, None):
            raise ConfigurationError(f"A range without the id of its plan. {BY_HAND}")
        return Request(self.plan, start, stop) if self.plan else None


@dataclass(frozen=True)
class CdcStream:
    """A change stream, as `cdc_assets` was given it."""

    name: str
    source: str
    bigquery: str
    format: DebeziumJson
    ordering: OrderingProfile
    tables: Mapping[str, CdcTable]
    failed_rows: FailedRowPolicy
    truncates: Literal["fail", "ignore"]
    pace: Pace
    ledger: str
    create_ledger: bool

    @property
    def op(self) -> str:
        """The name of its op; names that differ in what an op's name cannot have stay apart."""
        plain = re.sub(r"\W", "_", self.name, flags=re.ASCII)
        if plain == self.name:
            return plain
        return f"{plain}_{hashlib.sha256(self.name.encode()).hexdigest()[:8]}"

    def asset_key(self, table: str) -> dg.AssetKey:
        """The key of a table's asset, by default: dataset and table."""
        ref = TableRef.parse(self.tables[table].table)
        return dg.AssetKey([ref.dataset, ref.table])

    def connect(self, resources: Mapping[str, Any]) -> Connected:
        """The connection of its BigQuery resource."""
        return Connected.to(resources[self.bigquery])

    def open_source(
        self, resources: Mapping[str, Any], connected: Connected, deadline: float
    ) -> Source:
        """Its source; nothing is reached yet.

        Raises:
            ConfigurationError: The resource is no source of changes.
        """
        source = resources[self.source]
        if not isinstance(source, CdcSource):
            raise ConfigurationError(
                f"Stream {self.name!r}: the resource {self.source!r} is {type(source).__name__}: "
                "pass a KafkaSource or a FileSource."
            )
        return source.open_source(connected, deadline)

    def watermark(self, connected: Connected, deadline: float, create: bool) -> Watermark:
        """Its ledger entry; nothing is reached yet.

        Args:
            connected: The connection of the BigQuery resource.
            deadline: Seconds within which a call must be answered.
            create: Whether the entry may be written. Then it is looked up where a ledger that may
                have to be made should be. Who only reads finds nothing where there is no ledger.
        """
        location = connected.location
        if create and location is None:  # where the first table is
            first = next(iter(self.tables.values())).table
            location = connected.admin.location(connected.resolve(first))
        ledger = open_ledger(
            connected.clients,
            connected.billing_project,
            self.ledger,
            location,
            self.create_ledger,
            deadline,
        )
        return Watermark(ledger, self.name)

    def upsert(self, connected: Connected, run: str) -> Upsert:
        """What applies its changes."""
        return Upsert(
            connected,
            self.name,
            self.format,
            self.ordering,
            self.tables,
            self.failed_rows,
            self.truncates,
            run,
        )


def cdc_assets(
    stream: str,
    *,
    source: str,
    format: DebeziumJson,
    ordering: OrderingProfile,
    tables: Mapping[str, CdcTable],
    apply: Literal["upsert"] = "upsert",
    failed_rows: FailedRowPolicy = "fail",
    truncates: Literal["fail", "ignore"] = "fail",
    min_rows: int = Pace.min_rows,
    max_delay: timedelta = Pace.max_delay,
    max_changes: int = Pace.max_changes,
    max_run_seconds: float = Pace.max_run_seconds,
    lease_seconds: float = Pace.lease_seconds,
    bigquery: str = "bigquery",
    ledger: str = DATASET,
    create_ledger: Literal["if_missing", "never"] = "if_missing",
    group_name: str | None = None,
) -> dg.AssetsDefinition:
    """The tables of a change stream, as assets that are materialized together.

    A run reads what its source has, plan after plan, and applies each plan before the stream's
    ledger entry moves: whatever dies, nothing is lost, and what is applied twice changes nothing.
    `build_cdc_sensor` launches such runs. Materialize in the page does the same by hand; beside a
    run that is under way it waits for it.

    Args:
        stream: The stream's name: what its ledger entry is found by. Renaming it begins anew. Two
            deployments with one name and one ledger, such as a laptop beside production, would
            each take some of the changes from the other; the one with other tables is refused.
        source: The resource key of its source, a `KafkaSource` or `FileSource`.
        format: How its messages are written.
        ordering: How the source's coordinates become an order.
        tables: The destination of each table of the source, by `schema.table`. Changes of other
            tables are passed over, and counted.
        apply: `upsert`: native CDC of BigQuery, by the default stream and a primary key. Large
            values that did not change must be sent: PostgreSQL needs REPLICA IDENTITY FULL.
        failed_rows: What becomes of messages that no retry can save: `fail` the run, so that the
            stream stays where it is; `drop` and count them; or keep them in a table, `DeadLetters`.
        truncates: Whether a TRUNCATE of a source's table makes the run `fail`, or is passed over.
        min_rows: So many messages that wait are worth a run; 10,000.
        max_delay: So is a message that has waited for so long; a minute.
        max_changes: How many messages a plan may hold; 100,000.
        max_run_seconds: A run that has worked for so long begins no other plan; 600.
        lease_seconds: Another run may take over from one that was not heard of for so long; 60. The
            clocks of machines that run Dagster must agree to a small part of it.
        bigquery: The resource key of the BigQuery resource.
        ledger: Where the stream's entry is: a dataset, project.dataset or gs://bucket/prefix. With
            hundreds of Kafka partitions it must be Cloud Storage.
        create_ledger: Whether a missing ledger dataset is created.
        group_name: The group of the assets.

    Returns:
        The assets, one a table, with the key `[dataset, table]`. They cannot be materialized one
        without the others. `map_asset_specs` changes owners, kinds and so on.

    Raises:
        ConfigurationError: A setting that cannot work, or two tables with one destination.
    """
    pace = Pace(min_rows, max_delay, max_changes, max_run_seconds, lease_seconds)
    create = create_ledger == "if_missing"
    described = CdcStream(
        stream,
        source,
        bigquery,
        format,
        ordering,
        tables,
        failed_rows,
        truncates,
        pace,
        ledger,
        create,
    )
    _check(described, apply)

    def run(
        context: dg.AssetExecutionContext, config: PlanConfig, **resources: Any
    ) -> Iterator[dg.MaterializeResult[Any]]:
        # A run by hand has no tag yet.
        context.instance.add_run_tags(context.run.run_id, {STREAM: stream})
        worker = _worker(described, context, resources, described.connect(resources))
        try:
            _drain(worker, context, config)
        except BaseException:
            _observe(context, worker)
            raise
        for key, metadata in _reports(context, worker):
            yield dg.MaterializeResult[Any](asset_key=key, metadata=metadata)

    specs = [_spec(described, table, group_name) for table in tables]
    arguments = {"context": dg.AssetExecutionContext, "config": PlanConfig}
    function = taking(run, bigquery, [source], **arguments)
    return dg.multi_asset(name=described.op, specs=specs, can_subset=False)(function)


def stream_of(assets: dg.AssetsDefinition) -> CdcStream:
    """The stream of what `cdc_assets` gave.

    Raises:
        ConfigurationError: It gave something else.
    """
    given: object = assets
    specs = list(given.specs) if isinstance(given, dg.AssetsDefinition) else []
    found = specs[0].metadata.get(STREAM) if specs else None
    if not isinstance(found, CdcStream):
        raise ConfigurationError(f"{given!r} is no change stream: pass what cdc_assets returned.")
    return found


def is_run_over(instance: dg.DagsterInstance, run_id: str) -> bool:
    """Whether a run is known to have ended. One that is not known here may be at work elsewhere."""
    run = instance.get_run_by_id(run_id)
    return run is not None and run.is_finished


def _refuse_lost_entry(context: dg.AssetExecutionContext, watermark: Watermark) -> None:
    """Begin no stream anew of which Dagster knows that it was somewhere.

    Raises:
        LedgerError: The entry is gone. From the beginning of the source some changes may be, too.
    """
    if watermark.read() is not None:
        return
    for key in context.selected_asset_keys:
        event = context.instance.get_latest_materialization_event(key)
        shown = [event.asset_materialization if event else None]
        records = context.instance.fetch_observations(key, limit=1).records
        for found in [*shown, *(record.asset_observation for record in records)]:
            if found is not None and (stop := found.metadata.get(STOP)) is not None and stop.value:
                where = json.dumps(stop.value)
                raise lost_entry(watermark, f"a run has shown the position {where}")


def _check(stream: CdcStream, apply: str) -> None:
    """Refuse what cannot work, when the definitions are loaded."""
    check_settings(stream.tables, stream.failed_rows, stream.truncates)
    if apply != "upsert":
        raise ConfigurationError(f"apply={apply!r}: it is 'upsert'.")
    if isinstance(stream.ledger, dg.EnvVar):
        raise ConfigurationError(
            f"Stream {stream.name!r}: an EnvVar is read by resources only; write "
            "ledger=os.environ[...]."
        )
    if not stream.name.strip():
        raise ConfigurationError("A stream needs a name: its ledger entry is found by it.")
    if not stream.tables:
        raise ConfigurationError(f"Stream {stream.name!r}: tables is empty.")
    for key in (stream.source, stream.bigquery):
        if not key.isidentifier() or keyword.iskeyword(key) or key in ("context", "config"):
            raise ConfigurationError(
                f"Stream {stream.name!r}: {key!r} cannot be the key of a resource here: it is a "
                "parameter of the assets' function. Take a name of letters, digits and _, other "
                "than context, config and Python's own words."
            )
    for table in stream.tables:
        if not re.fullmatch(r"[^.]+\.[^.]+", table):
            raise ConfigurationError(
                f"Stream {stream.name!r}: {table!r} names no table of the source: write "
                "schema.table, as 'public.orders'."
            )
    keys = [stream.asset_key(table) for table in stream.tables]
    if len(set(keys)) < len(keys):
        raise ConfigurationError(
            f"Stream {stream.name!r}: two tables of the source have one destination, where rows of "
            "equal keys would take each other's place."
        )


def _spec(stream: CdcStream, table: str, group_name: str | None) -> dg.AssetSpec:
    destination = TableRef.parse(stream.tables[table].table)
    return dg.AssetSpec(
        stream.asset_key(table),
        group_name=group_name,
        kinds={"bigquery"},
        description=f"{table} as the change stream {stream.name!r} has applied it.",
        metadata={STREAM: stream, TABLE: table, "dagster/table_name": str(destination)},
    )


def _worker(
    stream: CdcStream,
    context: dg.AssetExecutionContext,
    resources: Mapping[str, Any],
    connected: Connected,
) -> Worker:
    instance, run_id = context.instance, context.run.run_id
    return Worker(
        watermark=stream.watermark(connected, connected.deadline, create=True),
        source=stream.open_source(resources, connected, SOURCE_SECONDS),
        mode=stream.upsert(connected, run_id),
        pace=stream.pace,
        run=run_id,
        is_over=lambda other: is_run_over(instance, other),
        tell=context.log.info,
        progress=lambda what: Progress(what, log()),
        tables={name: connected.resolve(table.table) for name, table in stream.tables.items()},
    )


def _drain(worker: Worker, context: dg.AssetExecutionContext, config: PlanConfig) -> None:
    """Do the work of a run. What must not be tried again is said to Dagster."""
    _refuse_lost_entry(context, worker.watermark)
    try:
        worker.drain(config.to_request())
    except FINAL as error:
        context.instance.add_run_tags(context.run.run_id, NO_RUN_RETRIES)
        raise dg.Failure(str(error), allow_retries=False) from error


def _observe(context: dg.AssetExecutionContext, worker: Worker) -> None:
    """Show what a run that fails has committed before, beside the assets that have failed."""
    if not worker.done.plans:
        return
    try:
        for key, metadata in _reports(context, worker):
            context.log_event(dg.AssetObservation(key, metadata=metadata))
    except Exception as error:  # noqa: BLE001  # what the run fails for is told
        context.log.warning(f"What the run committed cannot be shown: {error}")


def _reports(
    context: dg.AssetExecutionContext, worker: Worker
) -> Iterator[tuple[dg.AssetKey, dict[str, Any]]]:
    """Of each asset its key, and what became of its table."""
    stream = worker.watermark.stream
    for spec in context.assets_def.specs:
        table = spec.metadata[TABLE]
        yield spec.key, drained_metadata(stream, table, worker.tables[table], worker.done)
