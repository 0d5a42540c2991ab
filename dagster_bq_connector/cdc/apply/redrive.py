"""Dead letters are applied again, once what they failed for is mended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.cloud import bigquery

from dagster_bq_connector.cdc.apply.batches import put_together
from dagster_bq_connector.cdc.apply.failures import PARKED, Letters, sources
from dagster_bq_connector.cdc.apply.upsert import Plan, Upsert
from dagster_bq_connector.cdc.event import FATES, FILE, MESSAGES, Fate
from dagster_bq_connector.errors import (
    ConfigurationError,
    FailedEventsError,
    TableNotFoundError,
    explain,
)
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.retry import rest_options
from dagster_bq_connector.table.admin import REST_ERRORS
from dagster_bq_connector.table.literals import table_sql
from dagster_bq_connector.table.ref import TableRef

_compute: Any = pc  # its stubs know a part of what it takes
Kept: TypeAlias = "tuple[Any, Any, Any]"  # as `Letters.kept`
MayDrop: TypeAlias = Callable[[int, Sequence[str]], bool]
_TRIED = [FATES.index(Fate.change), FATES.index(Fate.failed)]


@dataclass
class Redriven:
    """What became of dead letters.

    Attributes:
        applied: How many were applied, or had been replaced by a later one, and are gone.
        failed: How many failed again, belong to parked tables or change no row. They stay, unless
            they were dropped.
        dropped: How many of those are gone nevertheless.
        failed_events: The first ten of those that failed, for people.
    """

    applied: int = 0
    failed: int = 0
    dropped: int = 0
    failed_events: list[str] = field(default_factory=list[str])


def redrive(
    upsert: Upsert,
    progress: Progress,
    check: Callable[[], None] = lambda: None,
    may_drop: MayDrop = lambda count, events: False,
) -> Redriven:
    """Apply the dead letters of a stream again, and delete those that were applied.

    Their own sequences decide, so that an old event replaces no newer row. May be repeated, also
    after a failure in the middle, and beside runs of the stream.

    Args:
        upsert: Applies the stream's changes, and has the table of dead letters.
        progress: Counts acknowledged rows.
        check: Called before each batch; what it raises ends it.
        may_drop: Whether those that failed again are deleted, too; it is told how many they are,
            and the first ten of all that failed. What belongs to a table that is parked, or that
            the stream does not name, stays anyway.

    Raises:
        ConfigurationError: The stream keeps no dead letters.
        ConnectorError: As for `Upsert.apply`. No dead letter was deleted.
    """
    plan = Plan(upsert, {}, progress, redriven=True)
    letters = plan.failures.letters
    if letters is None:
        raise ConfigurationError(
            f"Stream {upsert.stream!r} keeps no dead letters: its failed_rows is "
            f"{upsert.failed_rows!r}."
        )
    read: list[pa.Array[Any]] = []
    passed: list[pa.Array[Any]] = []
    done = Redriven()
    letters.kept = []
    try:
        for batch in put_together(_messages(upsert, letters.ref)):
            check()
            events = plan.events(batch)
            tried = np.isin(events.fates, _TRIED)
            named = sources(batch)
            read.append(named.filter(pa.array(tried)))
            passed.append(named.filter(pa.array(~tried)))
            plan.take(events)
        applied = plan.settle()
        gone = _without(read, letters.kept)
        failed = _joined([*passed, *_failed(letters.kept, list(upsert.tables))])
        done.failed = applied.failed + sum(map(len, passed))
        done.failed_events = [*applied.failed_events, *_useless(passed)][: FailedEventsError.SHOWN]
        if not (len(failed) and may_drop(len(failed), done.failed_events)):
            failed = failed[:0]
        _remove(letters, pa.concat_arrays([gone, failed]))
        plan.close()
    except BaseException:
        plan.abandon()
        raise
    done.applied, done.dropped = len(gone), len(failed)
    return done


def _remove(letters: Letters, gone: pa.Array[Any]) -> None:
    if len(gone):
        letters.remove(gone)
        letters.settle()


def _without(read: list[pa.Array[Any]], kept: Sequence[Kept]) -> pa.Array[Any]:
    """The sources of letters that were read and not kept again."""
    names, again = _joined(read), _joined([named for named, _, _ in kept])
    return names.filter(_compute.invert(_compute.is_in(names, value_set=again)))


def _failed(kept: Sequence[Kept], tables: Sequence[str]) -> Iterator[pa.Array[Any]]:
    """The sources of letters that were kept again although their changes could be tried."""
    known = pa.array([*tables, None], pa.string())
    for named, its_tables, reasons in kept:
        tried = _compute.not_equal(reasons, PARKED)
        yield named.filter(_compute.and_(tried, _compute.is_in(its_tables, value_set=known)))


def _useless(passed: Sequence[pa.Array[Any]]) -> list[str]:
    """What is said of letters that are no changes when they stand alone."""
    names = _joined(passed)[: FailedEventsError.SHOWN].to_pylist()
    return [f"{name}: the message alone changes no row: only --drop ends it" for name in names]


def _joined(parts: Sequence[pa.Array[Any]]) -> Any:
    return pa.chunked_array(parts, pa.string()).combine_chunks()


def _messages(upsert: Upsert, ref: TableRef) -> Iterator[pa.RecordBatch]:
    """The messages of dead letters, in the order in which they came.

    By a query: BigQuery may refuse to read a table that changes are applied to by other ways.
    """
    connection = upsert.connection
    try:
        connection.admin.get(ref)
    except TableNotFoundError:  # nothing has failed yet
        return
    sql = (
        "SELECT topic, CAST(`partition` AS INT64) AS `partition`, `offset`, file, key, value "
        f"FROM {table_sql(ref)} WHERE stream = @stream "
        "ORDER BY file, topic, `partition`, `offset`"
    )
    named = bigquery.ScalarQueryParameter("stream", "STRING", upsert.stream)
    config = bigquery.QueryJobConfig(query_parameters=[named])
    options: Any = rest_options(connection.deadline)
    try:
        job = connection.rest.query(sql, job_config=config, **options)
        for page in job.result(**options).to_arrow_iterable():
            yield from _by_file(page)
    except (*REST_ERRORS, TimeoutError) as error:
        raise explain(error, f"Dead letters in {ref}") from error


def _by_file(page: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Messages, a batch for each file, and one for those that came from none."""
    files = page.column("file").cast(pa.string()).dictionary_encode()
    codes = _compute.fill_null(files.indices, -1).to_numpy()
    for code in np.unique(codes).tolist():
        rows = page.take(pa.array(np.flatnonzero(codes == code), pa.int64()))
        schema = MESSAGES
        if code >= 0:
            name = files.dictionary[code].as_py()
            schema = MESSAGES.with_metadata({FILE: name.encode()})
        topic = _compute.fill_null(rows.column("topic"), "").dictionary_encode()
        arrays = [topic, *(rows.column(name) for name in MESSAGES.names[1:])]
        pairs = zip(arrays, MESSAGES, strict=True)
        yield pa.RecordBatch.from_arrays(
            [array.cast(field.type) for array, field in pairs], schema=schema
        )
