"""The write key of a call, from what Dagster runs."""

import hashlib
import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import dagster as dg

from dagster_bq_connector.errors import WriteKeyError
from dagster_bq_connector.metadata import Context, run_context
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.table.row_slice import RowSlice
from dagster_bq_connector.table.slice import TableSlice
from dagster_bq_connector.write.key import WriteKey
from dagster_bq_connector.write.result import Operation

# Tags of runs, which Dagster writes; their names stand in its documentation of run tags.
RETRY_NUMBER = "dagster/retry_number"
RESUMED = "dagster/is_resume_retry"
ASSETS_RESUMED = "dagster/is_asset_resume_retry"
STEP_SELECTION = "dagster/step_selection"
LONGEST_KEYS = 1000  # characters of partition keys that a write key has in full
GENERATIONS = 1000  # of retries of retries, which are followed back

# What each step that runs in this process has written, with its tries.
_written: "weakref.WeakKeyDictionary[Any, set[tuple[int, str]]]" = weakref.WeakKeyDictionary()
_writing = threading.Lock()  # two threads of a step may share its context
# The output that an IO manager stores; empty while the step itself writes.
_output: ContextVar[str] = ContextVar("output", default="")


@contextmanager
def writing_output(name: str, mapping_key: str | None = None) -> Generator[None]:
    """What is written within is an output of the step: other outputs are other writes.

    Args:
        name: Of the output.
        mapping_key: Which of its values, when it is a dynamic one.
    """
    token = _output.set(name if mapping_key is None else f"{name}[{mapping_key}]")
    try:
        yield
    finally:
        _output.reset(token)


def write_key(
    operation: Operation, table: TableRef | TableSlice | RowSlice, key: str | None
) -> WriteKey:
    """The key of a write that is about to be tried.

    Args:
        operation: What is done.
        table: To what.
        key: The user's own key. None for that of the step; outside of a step each call is then a
            write of its own.

    Raises:
        WriteKeyError: The step has written there already, and has given no key.
    """
    if key is not None:
        return WriteKey.of_user(key)
    context = run_context()
    if context is None:
        return WriteKey.unique()
    text = f"{operation} {place_of(table)} by {_step(context)} of run {_first_run(context)}"
    this = (context.retry_number, text)
    with _writing:
        written = _written.setdefault(context.get_step_execution_context(), set())
        known = this in written
        written.add(this)
    if known:
        raise WriteKeyError(
            f"This step has written to {place_of(table)} already, and a retry could not tell the "
            "two writes apart. Write all rows by one call (an iterable of frames will do), or give "
            'each call a key that a retry gives again: key="orders of 2026-08-01, first part". The '
            "id of the run is none: a run that is retried has another."
        )
    return WriteKey.of(text)


def give_back(key: WriteKey) -> None:
    """Let the step use its key again: nothing was written under it that the next try cannot find.

    Args:
        key: That of a write whose data were refused, or of a long one that was left open.
    """
    if (context := run_context()) is not None:
        written = _written.get(context.get_step_execution_context(), set())
        written.discard((context.retry_number, key.text))


def place_of(table: TableRef | TableSlice | RowSlice) -> str:
    """A table, or the part of it that a write is about, as text.

    Of many partition keys it has the first, the last and a digest of all: the text stands in the
    ledger entry of the write, whose size is bounded.
    """
    if isinstance(table, TableRef):
        return str(table)
    keys = [key for key, _ in (table.windows if isinstance(table, TableSlice) else table.parts)]
    if len(text := str(keys)) <= LONGEST_KEYS:
        return f"{table.table} {text}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:40]
    return f"{table.table} {len(keys)} partitions, {keys[0]!r} to {keys[-1]!r} ({digest})"


def _step(context: Context) -> str:
    """The op, which of its mapped copies or partitions it is, and which of its outputs."""
    op = context.op_execution_context
    parts = [str(op.op_handle)]
    if mapping := op.get_mapping_key():
        parts.append(f"[{mapping}]")
    if context.has_partition_key:
        parts.append(f"partition {context.partition_key}")
    elif context.has_partition_key_range:
        span = context.partition_key_range
        parts.append(f"partitions {span.start} to {span.end}")
    if output := _output.get():
        parts.append(f"output {output}")
    return " ".join(parts)


def _first_run(context: Context) -> str:
    """The id of the run that began what this one goes on with."""
    instance, step = context.instance, context.get_step_execution_context().step.key
    run: dg.DagsterRun | None = context.run
    first = context.run.run_id
    for _ in range(GENERATIONS):
        if run is None or run.parent_run_id is None:
            return first
        parent = instance.get_run_by_id(run.parent_run_id)
        if not _goes_on(instance, run, parent, step):
            return first
        first, run = run.parent_run_id, parent
    return first


def _goes_on(
    instance: dg.DagsterInstance, run: dg.DagsterRun, parent: dg.DagsterRun | None, step: str
) -> bool:
    """Whether a run is a retry of its parent, or a re-execution from its failure.

    Any other re-execution writes anew, as its user asked.
    """
    number = run.tags.get(RETRY_NUMBER)
    # Who re-executes steps of a retry on Dagster's page copies its number; the daemon counts on.
    if number and (parent is None or number != parent.tags.get(RETRY_NUMBER)):
        return True
    if run.tags.get(RESUMED) == "true":
        return True
    if run.tags.get(ASSETS_RESUMED) == "true" and run.step_keys_to_execute is None:
        resumed = True  # or all assets of a run that has been resumed: the tag is copied to it
    else:
        resumed = STEP_SELECTION not in run.tags and _has_past(instance, run)
    return resumed and step not in _succeeded(instance, run.parent_run_id)


def _has_past(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    """Whether a run has begun with what its parent left: `execute_job` writes no tag of that."""
    if run.execution_plan_snapshot_id is None:
        return False
    plan = instance.get_execution_plan_snapshot(run.execution_plan_snapshot_id)
    known = plan.initial_known_state
    return known is not None and known.parent_state is not None


def _succeeded(instance: dg.DagsterInstance, run_id: str | None) -> set[str]:
    """The steps of a run that were done: to take one again is to ask for another write."""
    stats = instance.get_run_step_stats(run_id) if run_id else []
    return {each.step_key for each in stats if each.status and each.status.value == "SUCCESS"}
