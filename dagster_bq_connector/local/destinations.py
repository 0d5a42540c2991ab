"""Where load, copy and query jobs put their rows: tables and partitions, by write disposition.

Upstream appends well where the schema stays as it is, and is left to it. The rest is here: what
replaces rows, what adds columns, what makes a table, and what goes into one partition. A query is
run to its end before anything changes, since it may read the very rows that it replaces; then one
transaction changes the table, or nothing does.

    WRITE_TRUNCATE        the job's schema, no keys; partitioning and clustering stay
    WRITE_TRUNCATE_DATA   the table's schema, modes and keys stay
    into a partition      rows of that partition only, by either

A copy brings its source's modes, keys and layout along. Tables partitioned by ingestion time get
upstream's hidden column, however they are made.

Seams: `tables.write`, where every job lands, and `tables.create` and `tables.update`.
"""

import contextlib
import functools
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import duckdb

from dagster_bq_connector.local import cdc
from dagster_bq_connector.local.metadata import catalog_lock, touched
from dagster_bq_connector.local.partitions import Partition, partition, split
from dagster_bq_connector.local.staging import transaction
from dagster_bq_connector.local.upstream import (
    BigQueryError,
    Reference,
    database,
    errors,
    metadata,
    models,
    names,
    results,
    tables,
    types,
)

INCOMING = "temp.main.__incoming"
REPLACING = ("WRITE_TRUNCATE", "WRITE_TRUNCATE_DATA")
LAYOUT: tuple[str, ...] = tables.LAYOUT
HIDDEN: str = tables.INGESTION_TIME
_write = tables.write


def kind_of(table: Reference) -> str | None:
    """TABLE, VIEW, EMPTY for a table without columns yet, or None for no table."""
    found = tables._lookup(*table)
    return found[0] if found else None


@dataclass(frozen=True)
class Job:
    """What a job wants of its destination.

    Attributes:
        table: The table, without a decorator.
        partition_id: The partition, if the destination is one.
        config: The job's configuration.
        disposition: What happens to the rows that are there.
        prefix: How upstream's errors about the schema begin.
    """

    table: Reference
    partition_id: str | None
    config: Any
    disposition: str
    prefix: str

    @property
    def label(self) -> str:
        return names.label(*self.table)

    @property
    def sources(self) -> list[Reference]:
        """The tables that a copy job copies."""
        found = getattr(self.config, "sourceTables", None) or []
        if not found and (source := getattr(self.config, "sourceTable", None)):
            found = [source]
        return [tables.reference(each) for each in found]

    @functools.cached_property
    def copied(self) -> Any:
        """The whole table that a copy job copies; of several, which are alike, the first."""
        sources = self.sources
        if not sources or any(split(name)[1] or "@" in name for *_, name in sources):
            return None
        return tables.load(*sources[0])

    @property
    def update_options(self) -> list[str]:
        return getattr(self.config, "schemaUpdateOptions", None) or []

    def layout(self, columns: list[str]) -> Any:
        """The partitioning and clustering that the job asks for, its columns checked."""
        # WRITE_APPEND: where the disposition allows schema updates is decided here.
        asked = tables.layout(columns, self.config, "WRITE_APPEND")
        if self.partition_id is None and self.copied is not None:
            return self.copied.only(*LAYOUT)
        return asked

    def required(self) -> set[str]:
        """Columns of a table yet to be made that must not be NULL."""
        schema = getattr(self.config, "schema_", None)
        fields = (schema and schema.fields) or []
        if self.copied is not None:
            fields = tables.fields(self.copied)
        return {field.name.casefold() for field in fields if field.mode == "REQUIRED"}


def write(
    cur: duckdb.DuckDBPyConnection,
    query: str,
    params: dict[str, Any] | None,
    reference: Reference,
    config: Any,
    default: str = "WRITE_EMPTY",
    prefix: str = "Invalid schema update. ",
    isolated: bool = False,
) -> bool:
    """Put a query's rows where a job wants them.

    Returns:
        Whether the table got its schema from the job.
    """
    if reference[1] == tables.RESULTS:
        return _write(cur, query, params, reference, config, default, prefix, isolated)
    base, id = split(reference[2])
    job = Job((*reference[:2], base), id, config, config.writeDisposition or default, prefix)
    kind = kind_of(job.table)
    appends = id is None and kind == "TABLE" and job.disposition == "WRITE_APPEND"
    if appends and not job.update_options:  # which upstream would keep of a job that fails
        asked = job.layout(cur.sql(query, params=params).columns)
        _check_layout(job, asked, tables.load(*job.table))
        created = _write(cur, query, params, reference, config, default, prefix, isolated)
        _touch(job.table)
        return created
    if isolated and (id or kind):
        text = "In a session, a query can only append to a table, as it is, or make one here."
        raise BigQueryError("notImplemented", text)
    with _incoming(cur, query, params), database.writing(*job.table), catalog_lock:
        return _put(cur, job)


@contextlib.contextmanager
def _incoming(
    cur: duckdb.DuckDBPyConnection, query: str, params: dict[str, Any] | None
) -> Generator[None]:
    cur.execute(f"CREATE OR REPLACE TEMP TABLE {INCOMING.split('.')[-1]} AS {query}", params)
    try:
        yield
    finally:
        cur.execute(f"DROP TABLE IF EXISTS {INCOMING}")


def _put(cur: duckdb.DuckDBPyConnection, job: Job) -> bool:
    kind = kind_of(job.table)
    if kind is None and job.config.createDisposition == "CREATE_NEVER":
        raise errors.not_found("Table", job.label)
    if kind == "VIEW":
        raise BigQueryError("invalid", f"{job.label} is a view: a job cannot write to it.")
    stored = metadata.load(models.Table, *job.table)
    if stored and stored.type == "SNAPSHOT":
        raise BigQueryError("invalid", f"Table {job.label} is a snapshot, which is immutable.")
    asked = job.layout(_incoming_columns(cur))
    if kind:
        _check_layout(job, asked, tables.load(*job.table))
    whole = job.partition_id is None
    if kind in (None, "EMPTY"):
        _make(cur, job, asked)
        return True
    if whole and job.disposition == "WRITE_TRUNCATE":
        _refuse_updates(job)
        _make(cur, job, asked)
        return True
    _fill(cur, job)
    _touch(job.table)
    if whole and job.disposition in REPLACING:
        cdc.forget(job.table)
    return False


def _incoming_columns(cur: duckdb.DuckDBPyConnection) -> list[str]:
    return cur.sql(f"SELECT * FROM {INCOMING}").columns


def _refuse_updates(job: Job) -> None:
    if job.update_options:
        text = (
            "Schema update options should only be specified with WRITE_APPEND disposition, "
            "WRITE_TRUNCATE_DATA, or WRITE_TRUNCATE on a table partition."
        )
        raise BigQueryError("invalid", text)


def _specification(layout: Any) -> str:
    if time := layout.timePartitioning:
        field = f",field:{time.field}" if time.field else ""
        return f"interval(type:{(time.type or 'DAY').lower()}{field})"
    if ranges := layout.rangePartitioning:
        bounds = ranges.range
        return (
            f"range(field:{ranges.field},start:{bounds.start},end:{bounds.end},"
            f"interval:{bounds.interval})"
        )
    return "none"


def _check_layout(job: Job, asked: Any, current: Any) -> None:
    """A job that names a partitioning must name the table's own."""
    expected, given = _specification(current), _specification(asked)
    unset = not asked.timePartitioning and not asked.rangePartitioning
    if unset and (job.partition_id or job.copied is None):
        return
    if given.casefold() != expected.casefold():
        text = (
            f"Incompatible table partitioning specification. Expected partitioning specification "
            f"{expected}, but input partitioning specification is {given}"
        )
        raise BigQueryError("invalid", text)


def _make(cur: duckdb.DuckDBPyConnection, job: Job, asked: Any) -> None:
    """Create or replace the table, with the job's schema and rows."""
    old = metadata.load(models.Table, *job.table)
    layout = (old.only(*LAYOUT) if old else models.Table()).merged(asked)
    target = _target(job, layout)
    _refuse_missing(job, layout, _incoming_columns(cur))
    if target:
        _refuse_strays(cur, target, exists=False)
    relation = cur.sql(f"SELECT * FROM {INCOMING}")
    required = job.required()
    definitions = [
        f"{database.quote(column)} {types.normalised(kind)}"
        + (" NOT NULL" if column.casefold() in required else "")
        for column, kind in zip(relation.columns, relation.types, strict=True)
        if column != HIDDEN
    ]
    ingested = _is_ingested(layout)
    if ingested:
        definitions.append(_hidden_column(layout.timePartitioning.type or "DAY"))
    name = tables.name(*job.table)
    with transaction(cur):
        cur.execute(f"CREATE OR REPLACE TABLE {name} ({', '.join(definitions)})")
        results.materialise(cur, _rows(cur, target, ingested), name, append=True)
    fresh = tables.defaults(*job.table)
    kept = (old or fresh).without("schema", "tableConstraints").merged(layout)
    if job.copied is not None:
        kept = kept.merged(job.copied.only("schema", "tableConstraints"))
    tables.record(*job.table, touched(kept))


def _refuse_missing(job: Job, layout: Any, columns: list[str]) -> None:
    """A kept partitioning needs its column in the new schema too."""
    known = {column.casefold() for column in columns}
    partitioning = layout.timePartitioning or layout.rangePartitioning
    wanted = [partitioning.field] if partitioning and partitioning.field else []
    wanted += (layout.clustering and layout.clustering.fields) or []
    if missing := [column for column in wanted if column.casefold() not in known]:
        text = (
            f"The field {missing[0]}, by which table {job.label} is partitioned or clustered, "
            "cannot be found in the schema."
        )
        raise BigQueryError("invalid", text)


def _target(job: Job, layout: Any) -> Partition | None:
    if job.partition_id is None:
        return None
    return partition((*job.table[:2], f"{job.table[2]}${job.partition_id}"), layout)


def _fill(cur: duckdb.DuckDBPyConnection, job: Job) -> None:
    """Replace or add rows of a table that keeps its schema."""
    current = tables.load(*job.table)
    target = _target(job, current)
    if target:
        _refuse_strays(cur, target, exists=True)
    name, condition = tables.name(*job.table), target.holds() if target else "true"
    if job.disposition == "WRITE_EMPTY":
        found = cur.execute(f"SELECT 1 FROM {name} WHERE {condition} LIMIT 1").fetchall()
        if found:
            raise errors.already_exists("Table", target.label if target else job.label)
    with transaction(cur):
        visible = cur.sql(f"SELECT {_visible(cur)} FROM {INCOMING}")
        tables.evolve(cur, job.table, visible, job.update_options, job.prefix)
        if job.disposition in REPLACING:
            cur.execute(f"DELETE FROM {name} WHERE {condition}")
        rows = _rows(cur, target, _is_ingested(current))
        results.materialise(cur, rows, name, append=True)


def _refuse_strays(cur: duckdb.DuckDBPyConnection, target: Partition, exists: bool) -> None:
    """Refuse rows of other partitions.

    A table partitioned by ingestion time has none: the partition is where the rows are put.
    """
    if target.column is None:
        return
    fields = tables.columns(*target.table) if exists else []
    kinds = {field.name.casefold(): types.duckdb_type(field) for field in fields}
    name = target.column.casefold()
    arriving = {column.casefold() for column in _incoming_columns(cur)}
    value = database.quote(target.column) if name in arriving else "NULL"
    value = f"CAST({value} AS {kinds[name]})" if name in kinds else value
    stray = f"({target.holds(value)}) IS NOT TRUE"
    [(strays,)] = cur.execute(f"SELECT count(*) FROM {INCOMING} WHERE {stray}").fetchall()
    if strays:
        text = (
            "Some rows belong to different partitions rather than destination partition "
            f"{target.label} ({strays} rows)."
        )
        raise BigQueryError("invalid", text)


def _rows(cur: duckdb.DuckDBPyConnection, target: Partition | None, ingested: bool) -> str:
    """The incoming rows as they go into the table, with their time of ingestion if it has one."""
    if target and target.moment:
        moment = f"TIMESTAMPTZ '{target.moment.isoformat()}' AS {database.quote(HIDDEN)}"
        return f"SELECT {_visible(cur)}, {moment} FROM {INCOMING}"
    return f"SELECT {'*' if ingested else _visible(cur)} FROM {INCOMING}"


def _visible(cur: duckdb.DuckDBPyConnection) -> str:
    """The incoming columns but the hidden one, which a copy brings along."""
    carried = HIDDEN in _incoming_columns(cur)
    return f"* EXCLUDE ({database.quote(HIDDEN)})" if carried else "*"


def _hidden_column(unit: str) -> str:
    truncated = f"date_trunc('{unit.lower()}', CURRENT_TIMESTAMP)"
    return f"{database.quote(HIDDEN)} TIMESTAMPTZ DEFAULT CAST({truncated} AS TIMESTAMPTZ)"


def _touch(table: Reference) -> None:
    """Say that the table changed, and give it a record if a job of upstream's made it."""
    with catalog_lock:
        stored = metadata.load(models.Table, *table) or tables.defaults(*table)
        tables.record(*table, touched(stored))


def _is_ingested(table: Any) -> bool:
    """Whether the time of ingestion decides the partition of a row."""
    return table.timePartitioning is not None and not table.timePartitioning.field


def _create(original: Any) -> Any:
    def create(project_id: str, dataset_id: str, body: Any, translate: Any) -> Any:
        if not _is_ingested(body) or not tables.fields(body):
            return original(project_id, dataset_id, body, translate)
        with catalog_lock:
            original(project_id, dataset_id, body.without("schema"), translate)
            schema = body.only("schema")
            table_id = body.tableReference.tableId
            return tables.update(project_id, dataset_id, table_id, schema, None, False)

    return create


def _update(original: Any) -> Any:
    def update(
        project_id: str, dataset_id: str, table_id: str, body: Any, etag: str | None, replace: bool
    ) -> Any:
        table = (project_id, dataset_id, table_id)
        with catalog_lock:
            stored = metadata.load(models.Table, *table)
            fields = tables.fields(body)
            if stored and fields and _is_ingested(stored) and kind_of(table) == "EMPTY":
                metadata.check_etag(stored, etag)
                names.fields(fields)
                definitions = [types.column(field) for field in fields]
                definitions.append(_hidden_column(stored.timePartitioning.type or "DAY"))
                name = tables.name(*table)
                database.execute(f"CREATE TABLE {name} ({', '.join(definitions)})")
            return original(project_id, dataset_id, table_id, body, etag, replace)

    return update


def install() -> None:
    """Replace where jobs write. After metadata.install, whose locks stay inside."""
    tables.write = write
    tables.create = _create(tables.create)
    tables.update = _update(tables.update)
