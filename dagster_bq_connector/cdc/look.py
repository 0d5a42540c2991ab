"""What a tick of the sensor finds of a stream: whether a run should begin, and why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from dagster_bq_connector.cdc.source.source import Lag, Source
from dagster_bq_connector.cdc.stream import Pace
from dagster_bq_connector.cdc.watermark import Plan, StreamState, Watermark
from dagster_bq_connector.errors import LedgerError, StreamStoppedError

# After a run that failed, the next one begins later each time.
FIRST_PAUSE = timedelta(seconds=30)
LONGEST_PAUSE = timedelta(hours=1)
# As many runs are launched a lease apart although none begins.
PATIENCE = 3
# Runs that were launched before are forgotten: there may always be some that nobody ended.
MEMORY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class LaunchedRun:
    """A run that was launched for a stream and has not ended.

    Attributes:
        id: Its id.
        phase: Whether it waits in a queue, is being started, or runs.
        since: Since when it is in this phase, or since a time before.
    """

    id: str
    phase: Literal["queued", "starting", "running"]
    since: datetime


@dataclass(frozen=True, slots=True)
class Tried:
    """Runs that were launched from where a stream stands, since it has stood there.

    Attributes:
        runs: How many.
        ended: When the last of them ended; None when none has.
    """

    runs: int
    ended: datetime | None


@dataclass(frozen=True, slots=True)
class Seen:
    """What a tick found.

    Attributes:
        state: What the stream's entry says.
        reason: Why a run should begin, or why none should, for people.
        lag: What waits; None when it was not asked for.
        plan: What a run should apply; None when none should begin.
    """

    state: StreamState
    reason: str
    lag: Lag | None = None
    plan: Plan | None = None


@dataclass(frozen=True, slots=True)
class Runs:
    """What is known of runs.

    Attributes:
        live: The runs of the stream that have not ended.
        tried: Those that were launched from where a state stands.
        is_over: Whether a run is known to have ended.
    """

    live: Callable[[], Sequence[LaunchedRun]]
    tried: Callable[[StreamState], Tried]
    is_over: Callable[[str], bool]


def look(watermark: Watermark, source: Source, pace: Pace, runs: Runs, had_plans: int) -> Seen:
    """Look at a stream. Nothing is changed, no query is run.

    Args:
        watermark: The stream's entry.
        source: Its source.
        pace: When changes are worth a run.
        runs: What is known of runs.
        had_plans: How many committed plans the sensor's cursor knows of.

    Raises:
        LedgerError: The entry is gone, while the cursor shows that plans were committed.
        StreamStoppedError: It waits for an operator.
        ConnectorError: The ledger or the source cannot be reached, or changes are lost.
    """
    found = watermark.read()
    if found is None and had_plans:
        raise lost_entry(watermark, f"the sensor's cursor shows {had_plans} committed plan(s)")
    state, now = found or StreamState(), watermark.now()
    if state.stopped:
        raise StreamStoppedError(watermark.stream, state.stopped)
    holder, lease = state.holder, pace.lease_seconds
    if holder and holder.is_heard(now, lease) and not runs.is_over(holder.run):
        return Seen(state, f"run {holder.run} is at work")
    plan, lag, reason = state.plan, None, "a plan was begun and not committed"
    if plan is None:
        stop = source.plan(state.position, pace.max_changes)
        if stop is None:
            return Seen(state, "no changes", Lag(0, None))
        lag = source.lag(state.position)
        reason = _waiting(lag)
        if not pace.is_due(lag, watermark.now):
            return Seen(state, f"{reason}, which is not worth a run yet", lag)
        plan = state.plan_to(stop, pace.max_changes)
    if (text := in_flight(runs.live(), state.moved, now, lease)) is not None:
        return Seen(state, text, lag)
    tried = runs.tried(state)
    if (again := _again(state, tried, now)) is not None and again > now:
        failure = f": {state.failure.reason}" if state.failure else ""
        text = f"the last run failed, the next begins at {again:%H:%M:%S} UTC{failure}"
        return Seen(state, text, lag)
    return Seen(state, reason, lag, plan)


def _waiting(lag: Lag) -> str:
    since = f", the oldest since {lag.oldest:%Y-%m-%d %H:%M:%S} UTC" if lag.oldest else ""
    return f"{lag.changes:,} messages wait{since}"


def in_flight(
    live: Sequence[LaunchedRun], moved: datetime | None, now: datetime, lease: float
) -> str | None:
    """Why runs are waited for that do not hold the stream.

    One that was started may be dead, so that another is launched after a lease; and later each
    time, for where no run begins they would only become more.

    Args:
        live: The runs.
        moved: When the stream got where it stands; runs that were launched before do not count.
        now: The time.
        lease: Seconds.
    """
    for run in live:
        if run.phase == "queued":
            return f"run {run.id} is queued"
        if (now - run.since).total_seconds() < lease:
            return f"run {run.id} is {'being started' if run.phase == 'starting' else 'beginning'}"
    after = max(now - MEMORY, moved or now - MEMORY)
    newest = [run.since for run in live if run.phase == "starting" and run.since > after]
    if len(newest) <= PATIENCE:
        return None
    doubled = timedelta(seconds=lease * 2 ** min(len(newest) - PATIENCE, 12))
    pause = min(LONGEST_PAUSE, doubled)
    if (again := max(newest) + pause) <= now:
        return None
    return f"{len(newest)} runs do not begin, the next is launched at {again:%H:%M:%S} UTC"


def _again(state: StreamState, tried: Tried, now: datetime) -> datetime | None:
    """When the next run may begin, after some that did not get on."""
    failure = state.failure
    ends = [at for at in (tried.ended, failure.at if failure else None) if at is not None]
    # One that ended in time to come was written by a clock that is wrong: it may be years ahead.
    ends = [at for at in ends if at <= now + LONGEST_PAUSE]
    if not ends:
        return None
    count = max(tried.runs, failure.count if failure else 0)
    return max(ends) + min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(count - 1, 10))


def lost_entry(watermark: Watermark, known: str) -> LedgerError:
    """The error for an entry that is gone.

    Args:
        watermark: The stream's.
        known: Why it is known that there was one.
    """
    stream = watermark.stream
    return LedgerError(
        f"Stream {stream!r}: its entry is gone from the ledger ({watermark.place}), while {known}. "
        "Nothing is read until it is known where to go on. Put the entry back, or give the stream "
        f"a position: python -m dagster_bq_connector.cdc reset {stream} --position JSON, or "
        "--beginning to read all that the source still has, which changes no row that is right."
    )
