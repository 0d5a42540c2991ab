"""A change stream, and the run that drains it: plan after plan, each applied and then committed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from dagster_bq_connector.cdc.lease import Lease
from dagster_bq_connector.cdc.ordering.profile import State
from dagster_bq_connector.cdc.source.source import Lag, Position, Source
from dagster_bq_connector.cdc.watermark import (
    Clock,
    Plan,
    StreamState,
    Watermark,
    table_name,
    utc_now,
)
from dagster_bq_connector.errors import (
    ConfigurationError,
    ConnectorError,
    OrderBreakError,
    PlanMismatchError,
    StreamStoppedError,
    TableMismatchError,
)
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.table.ref import TableRef

if TYPE_CHECKING:
    from dagster_bq_connector.cdc.apply.upsert import Applied

# A plan that as many runs took and were not heard of again may be too large for them.
LOST_RUNS = 2


@dataclass(frozen=True)
class Pace:
    """When changes are worth a run, and how long one goes on.

    Attributes:
        min_rows: A run begins when as many changes wait.
        max_delay: It begins, too, when the oldest of them has waited for so long.
        max_changes: How many messages a plan may hold: what one run applies before it commits.
        max_run_seconds: A run that has worked for so long begins no other plan.
        lease_seconds: A run that was not heard of for so long may be replaced.
    """

    min_rows: int = 10_000
    max_delay: timedelta = timedelta(minutes=1)
    max_changes: int = 100_000
    max_run_seconds: float = 600.0
    lease_seconds: float = 60.0

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigurationError: A number that is not more than 0.
        """
        for name in ("min_rows", "max_changes", "max_run_seconds", "lease_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: it must be more than 0.")
        if self.max_delay < timedelta(0):
            raise ConfigurationError(f"max_delay={self.max_delay!r}: it must not be negative.")

    def is_due(self, lag: Lag, now: Clock) -> bool:
        """Whether what waits is worth a run.

        What has no time, such as the marks of Kafka's transactions, waits until it is many.
        """
        if lag.changes >= self.min_rows:
            return True
        return lag.oldest is not None and now() - lag.oldest >= self.max_delay


@dataclass(frozen=True, slots=True)
class Request:
    """The plan that a run was launched for.

    Attributes:
        plan: Its id.
        start: Where it begins.
        stop: Where it ends.
    """

    plan: str
    start: Position | None
    stop: Position


@dataclass
class Drained:
    """What a run did.

    Attributes:
        plans: The ids of the plans that it committed.
        applied: What became of their messages, a plan each.
        replayed: Whether the plan that it was launched for was committed before.
        start: Where the stream stood when the run began.
        stop: Where it stands now.
        lag: What waits after it; None when the source could not tell.
    """

    start: Position | None = None
    stop: Position | None = None
    plans: list[str] = field(default_factory=list[str])
    applied: list[Applied] = field(default_factory=list["Applied"])
    replayed: bool = False
    lag: Lag | None = field(default_factory=lambda: Lag(0, None))


class ApplyMode(Protocol):
    """What applies the messages of a plan. Doing it twice changes nothing."""

    def apply(
        self,
        messages: Iterable[pa.RecordBatch],
        state: State,
        progress: Progress,
        check: Callable[[], None],
    ) -> Applied:
        """Apply messages, and return when BigQuery has acknowledged all of them.

        Args:
            messages: Of the schema MESSAGES, in their order.
            state: That of the ordering profile.
            progress: Counts the messages.
            check: To be called before each batch; raises when the stream is held no more.
        """
        ...


@dataclass
class Worker:
    """A run at work on a stream.

    Attributes:
        watermark: The stream's entry.
        source: Where its changes come from.
        mode: What applies them.
        pace: How much it does at a time, and how long it goes on.
        run: The run's id.
        is_over: Whether a run is known to have ended.
        tell: Is told of each plan, and of waits.
        progress: Opens the progress of a plan.
        now: The time.
        tables: The address of each table that changes go to, by the source's table.
        done: What `drain` did, so far as it came.
    """

    watermark: Watermark
    source: Source
    mode: ApplyMode
    pace: Pace
    run: str
    is_over: Callable[[str], bool]
    tell: Callable[[str], object]
    progress: Callable[[str], Progress]
    now: Clock = utc_now
    tables: Mapping[str, TableRef] = field(default_factory=dict[str, TableRef])
    done: Drained = field(default_factory=Drained)

    def drain(self, request: Request | None = None) -> Drained:
        """Apply what there is, plan after plan, until the rest is not worth a run.

        Args:
            request: The plan that the run was launched for; None to plan here.

        Raises:
            PlanMismatchError: The stream stands elsewhere than the plan begins.
            StreamStoppedError: It waits for an operator.
            TableMismatchError: What was applied so far is in other tables.
            LeaseLostError: Another run has taken it.
            OrderBreakError: The order of its source is lost; it is stopped from now on.
            ConnectorError: Reading or applying failed. The position is what it was; what was
                applied of the plan is applied again by the next run, which changes nothing.
        """
        seconds = self.pace.lease_seconds
        with Lease(self.watermark, self.run, seconds, self.is_over, self.tell) as lease:
            ends = time.monotonic() + self.pace.max_run_seconds
            self.done = done = Drained(start=lease.state.position, stop=lease.state.position)
            plan = self._first(lease.state, request, done)
            while plan is not None:
                self._apply(lease, plan, done)
                plan = self._following(lease.state, done, ends)
        return done

    def _first(self, state: StreamState, request: Request | None, done: Drained) -> Plan | None:
        """The plan to begin with; None when there is nothing to do."""
        if state.stopped:
            raise StreamStoppedError(self.watermark.stream, state.stopped)
        self._refuse_other_tables(state)
        if request is None:
            return self._next(state)
        if request.start != state.position:
            if not state.is_done(request.plan, request.start):
                raise self._mismatch(request, state)
            done.replayed = True
            self.tell(f"plan {request.plan} was committed before")
            return None
        if state.plan:  # what was begun goes on, whoever planned it
            return self._next(state)
        plan = state.plan_to(request.stop, self.pace.max_changes)
        if plan.id != request.plan:  # it was made before a reset to the same place, or by hand
            raise self._mismatch(request, state)
        return plan

    def _following(self, state: StreamState, done: Drained, ends: float) -> Plan | None:
        """The plan after one that was committed; None when the rest is not worth one.

        What was committed is reported, even if the source fails now: the next look at it tells.
        """
        try:
            done.lag = self.source.lag(state.position)
            is_over = time.monotonic() >= ends or not self.pace.is_due(done.lag, self.now)
            return None if is_over else self._next(state)
        except ConnectorError as error:
            done.lag = None
            self.tell(f"the run ends here, since its source does not tell what waits: {error}")
            return None

    def _next(self, state: StreamState) -> Plan | None:
        """The plan that stands in the entry, or a new one."""
        if state.plan is None:
            stop = self.source.plan(state.position, self.pace.max_changes)
            return state.plan_to(stop, self.pace.max_changes) if stop is not None else None
        plan = state.plan
        if plan.lost < LOST_RUNS or plan.changes <= 1:
            return plan
        changes = max(1, plan.changes // 2)
        stop = self.source.plan(plan.start, changes)
        if stop is None or stop == plan.stop:
            return plan
        self.tell(
            f"{plan.lost} runs took plan {plan.id} and were not heard of again: it is exchanged "
            f"for one of at most {changes:,} messages"
        )
        return state.plan_to(stop, changes)

    def _apply(self, lease: Lease, plan: Plan, done: Drained) -> None:
        plan = lease.take(plan, {name: table_name(ref) for name, ref in self.tables.items()})
        self.tell(f"plan {plan.id}: from {plan.start} to {plan.stop}")
        with self.progress(f"Stream {self.watermark.stream!r}, plan {plan.id}") as progress:
            messages = self.source.read(plan.start, plan.stop)
            try:
                applied = self.mode.apply(messages, lease.state.ordering, progress, lease.check)
            except OrderBreakError as error:
                lease.stop(str(error), error.noted)
                raise
        if lease.commit(plan, applied.state):
            done.plans.append(plan.id)
            done.applied.append(applied)
        done.stop = lease.state.position

    def _refuse_other_tables(self, state: StreamState) -> None:
        """Refuse to put the rest of a stream's changes elsewhere than those before."""
        for name, ref in self.tables.items():
            if state.tables.get(name, table_name(ref)) != table_name(ref):
                stream = self.watermark.stream
                raise TableMismatchError(
                    f"Stream {stream!r}: the changes of {name} went to another table than {ref} so "
                    "far, which would lack all of them. Does another deployment use the same "
                    "stream name and ledger? Give this one its own. If the table is meant to be "
                    "another, read the changes again: python -m dagster_bq_connector.cdc reset "
                    f"{stream} --beginning"
                )

    def _mismatch(self, request: Request, state: StreamState) -> PlanMismatchError:
        return PlanMismatchError(
            f"Stream {self.watermark.stream!r}: this run was launched for plan {request.plan}, "
            f"which begins at {request.start}, and the stream stands at {state.position}: it was "
            "given another position since, the plan is long done, or it was written by hand. "
            "Nothing was applied. The sensor plans anew; do not run this one again."
        )
