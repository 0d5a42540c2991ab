"""Table metadata: an etag that is a true compare-and-set, job ids, max_staleness.

Upstream checks, then writes; two threads can pass the check together. Here every read-modify-write
of a table's metadata holds one lock, and so does the step that takes a job id. Jobs that an earlier
process left running are ended: nobody else would ever end them. Upstream's etag is a digest of what
it stores, and columns are stored elsewhere: ALTER TABLE gives a new time of change, so a new etag.

A patch of the schema adds fields to structs too, where upstream adds columns only. A table is in
the location of its dataset.

Seams: `tables._alter`, `tables.defaults`, `tables.create/update/annotate/delete`, `ddl.apply`,
`datasets.create/update`, `runner.submit`, `query._run` for ALTER TABLE, and the registry
`options.TABLE_OPTIONS`.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

from sqlglot import exp

from dagster_bq_connector.local.upstream import (
    BigQueryError,
    database,
    datasets,
    ddl,
    metadata,
    models,
    options,
    query,
    runner,
    store,
    tables,
    types,
)

# Whoever needs a table's writer lock too takes that one first.
catalog_lock = threading.RLock()
_jobs_lock = threading.RLock()
# "years-months days hours:minutes:seconds", the form of the REST field, from INTERVAL '...' A TO B.
SPANS = {
    "YEAR TO SECOND": "{}",
    "DAY TO SECOND": "0-0 {}",
    "HOUR TO SECOND": "0-0 0 {}",
    "HOUR TO MINUTE": "0-0 0 {}:0",
}


def _locked(function: Callable[..., Any], lock: threading.RLock) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return function(*args, **kwargs)

    return inner


def touched(resource: Any) -> Any:
    """The resource as changed now, or a millisecond after its last change: never twice alike."""
    last = int(resource.lastModifiedTime or 0)
    return resource.replace(lastModifiedTime=str(max(int(metadata.now()), last + 1)))


def _touching(run: Callable[..., Any]) -> Callable[..., Any]:
    """ALTER TABLE under the lock, its first step included; failed steps may follow done ones."""

    def inner(
        cur: Any, tree: Any, context: Any, destination: Any, config: Any, dry_run: bool, *more: Any
    ) -> Any:
        given = (cur, tree, context, destination, config, dry_run, *more)
        alters = isinstance(tree, exp.Alter) and tree.text("kind").upper() == "TABLE"
        if dry_run or not alters:
            return run(*given)
        table = query._target(tree, context)
        with catalog_lock:
            try:
                return run(*given)
            finally:
                if tables.exists(*table):  # it may have another name now
                    stored = metadata.load(models.Table, *table) or tables.defaults(*table)
                    tables.record(*table, touched(stored))

    return inner


def _interval(node: Any, evaluate: Callable[[Any], Any]) -> str | None:
    """INTERVAL 10 MINUTE -> "0-0 0 0:10:0", NULL -> None.

    Upstream translates no INTERVAL '...' A TO B, so those are read here.
    """
    if isinstance(node, exp.Null):
        return None
    unit = node.args.get("unit")
    if isinstance(unit, exp.IntervalSpan):
        form = SPANS.get(unit.sql("bigquery").upper())
        if form is None:
            text = f"max_staleness: {unit.sql('bigquery')} is not supported here."
            raise BigQueryError("invalidQuery", text)
        return form.format(node.this.name)
    return evaluate(exp.Anonymous(this="bq.main._interval_string", expressions=[node.copy()]))


def _adding_fields(alter: Callable[..., None]) -> Callable[..., None]:
    def inner(project_id: str, dataset_id: str, table_id: str, given: list[Any]) -> None:
        table = (project_id, dataset_id, table_id)
        alter(*table, given)
        known = {field.name.casefold(): field for field in tables.columns(*table)}
        for field in given:
            _add_fields(tables.name(*table), known[field.name.casefold()], field, [])

    return inner


def _add_fields(table: str, old: Any, new: Any, above: list[str]) -> None:
    """Add what the struct `new` has and `old` has not, and so on in the structs below."""
    path = [*above, old.name, *(["element"] if old.mode == "REPEATED" else [])]
    known = {field.name.casefold(): field for field in old.fields or []}
    for field in new.fields or []:
        if (there := known.get(field.name.casefold())) is not None:
            _add_fields(table, there, field, path)
            continue
        name = database.quote(*path, field.name)
        database.execute(f"ALTER TABLE {table} ADD COLUMN {name} {types.duckdb_type(field)}")


def _located(defaults: Callable[..., Any]) -> Callable[..., Any]:
    def inner(project_id: str, dataset_id: str, table_id: str) -> Any:
        table = defaults(project_id, dataset_id, table_id)
        dataset = metadata.load(models.Dataset, project_id, dataset_id)
        return table.replace(location=dataset.location) if dataset and dataset.location else table

    return inner


def end_orphaned_jobs() -> None:
    text = "Job execution was cancelled: the local BigQuery was restarted."
    error = BigQueryError("stopped", text)
    for (resource,) in database.fetch("SELECT resource FROM emulator.jobs WHERE state <> 'DONE'"):
        job = models.Job.model_validate_json(resource)
        store.save(runner._done(job, job.statistics, error))


def install() -> None:
    end_orphaned_jobs()
    tables._alter = _adding_fields(tables._alter)
    tables.defaults = _located(tables.defaults)
    for module, name, lock in (
        (tables, "create", catalog_lock),
        (tables, "update", catalog_lock),
        (tables, "annotate", catalog_lock),
        (tables, "delete", catalog_lock),
        (ddl, "apply", catalog_lock),
        (datasets, "create", catalog_lock),
        (datasets, "update", catalog_lock),
        (runner, "submit", _jobs_lock),
    ):
        setattr(module, name, _locked(getattr(module, name), lock))
    query._run = _touching(query._run)
    options.TABLE_OPTIONS["max_staleness"] = options.Option(
        "maxStaleness", "INTERVAL", parse=_interval, render=str
    )
