"""The lease of a stream: one run at a time works on it, and is heard of while it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

from dagster_bq_connector.cdc.watermark import (
    Holder,
    Plan,
    StreamState,
    Watermark,
    committed,
    failed,
    shortened,
)
from dagster_bq_connector.errors import ConnectorError, LeaseLostError
from dagster_bq_connector.ledger.document import new_nonce
from dagster_bq_connector.write.steps import step

# How often a holder is heard of in the length of a lease: three beats may be late.
BEATS = 4
POLL_SECONDS = 1.0


class Lease:
    """Holds a stream for a run, in a `with` statement.

    A beat goes to the entry every quarter of the lease, from a thread. A holder that was not heard
    of for a lease may be replaced by anybody; it finds out before its next batch, and by its
    commit.
    """

    def __init__(
        self,
        watermark: Watermark,
        run: str,
        seconds: float,
        is_over: Callable[[str], bool],
        tell: Callable[[str], object],
    ) -> None:
        """Prepare to hold the stream for `run`.

        Args:
            watermark: The stream's.
            run: The run's id, for people and for `is_over`.
            seconds: How long a holder may not be heard of.
            is_over: Whether a run is known to have ended, so that it need not be waited for.
            tell: Is told what is waited for.
        """
        self._watermark, self._seconds = watermark, seconds
        self._run, self._nonce = run, new_nonce()
        self._is_over, self._tell = is_over, tell
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._beats: threading.Thread | None = None
        self._heard = 0.0  # by the monotonic clock
        self._lost = False
        self._tried: str | None = None  # the plan that was taken last
        self.state = StreamState()

    def __enter__(self) -> Lease:
        """Wait until nobody else holds the stream, and take it.

        Raises:
            ConnectorError: The ledger cannot be reached.
        """
        while (holder := self._try()) is not None:
            self._tell(f"waiting for run {holder.run}, which is at work on the stream")
            time.sleep(min(POLL_SECONDS, self._seconds / BEATS))
        self._beats = threading.Thread(target=self._beat_on, name="cdc-lease", daemon=True)
        self._beats.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._beats:
            self._beats.join()
        if self._lost:
            return
        reason = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else None

        def release(state: StreamState) -> StreamState:
            if not self._is_mine(state):
                return state
            if state.plan and state.plan.id == self._tried and state.plan.lost:
                state = replace(state, plan=replace(state.plan, lost=state.plan.lost - 1))
            state = replace(state, holder=None)
            return failed(state, reason, self._watermark.now()) if reason else state

        try:
            with step("release stream"):
                self.state = self._watermark.change(release)
        except ConnectorError:
            if error is None:  # it is free when the lease is over; all work is committed
                self._tell("the stream could not be released, and is free when its lease is over")

    def check(self) -> None:
        """See that the stream is still held. No call is made when it was shown a moment ago.

        Raises:
            LeaseLostError: Another run has taken it.
        """
        if self._lost or time.monotonic() - self._heard > self._seconds / 2:
            self._beat()
        if self._lost:
            raise self._taken()

    def take(self, plan: Plan, tables: Mapping[str, str]) -> Plan:
        """Make a plan the one that is worked on, and count the try.

        A plan that stands in the entry is exchanged for the one given only by who has read that
        it stands there.

        Args:
            plan: The plan.
            tables: Where its changes go, as in `StreamState`.

        Raises:
            LeaseLostError: Another run has taken the stream.
        """

        def edit(state: StreamState) -> StreamState:
            self._must_hold(state)
            known = {**state.tables, **tables}
            return replace(state, plan=replace(plan, lost=plan.lost + 1), tables=known)

        with step("take plan"):
            self.state = self._change(edit)
        assert self.state.plan is not None
        self._tried = plan.id
        return self.state.plan

    def commit(self, plan: Plan, ordering: Mapping[str, Any]) -> bool:
        """Move the position to the end of a plan.

        Returns:
            Whether it was moved now; False when the same plan was committed by another run.

        Raises:
            LeaseLostError: Another plan stands in the entry.
        """
        moved = False

        def edit(state: StreamState) -> StreamState:
            nonlocal moved
            moved = state.plan is not None and state.plan.id == plan.id
            if moved:
                return committed(state, plan, ordering, self._watermark.now())
            if any(plan.id == done for done, _ in state.done):
                return state
            raise self._taken()

        with step("commit plan"):
            self.state = self._change(edit)
        return moved

    def stop(self, reason: str, noted: Mapping[str, Any]) -> None:
        """Stop the stream until an operator acknowledges why.

        Args:
            reason: Why.
            noted: What the ordering profile is to know of it when it is acknowledged.
        """

        def edit(state: StreamState) -> StreamState:
            self._must_hold(state)
            ordering = {**state.ordering, **noted}
            return replace(state, stopped=shortened(reason), ordering=ordering)

        with step("stop stream"):
            self.state = self._change(edit)

    def _try(self) -> Holder | None:
        """Take the stream. The holder that is waited for, when there is one."""
        waited: Holder | None = None

        def edit(state: StreamState) -> StreamState:
            nonlocal waited
            waited = state.holder if self._is_held(state) else None
            if waited:
                return state
            now = self._watermark.now()
            return replace(state, holder=Holder(self._run, self._nonce, now))

        with step("take stream"):
            self.state = self._watermark.change(edit)
        self._heard = time.monotonic()
        return waited

    def _is_held(self, state: StreamState) -> bool:
        holder = state.holder
        if holder is None or holder.run == self._run:  # an earlier step of the same run
            return False
        is_heard = holder.is_heard(self._watermark.now(), self._seconds)
        return is_heard and not self._is_over(holder.run)

    def _beat_on(self) -> None:
        while not self._lost and not self._ended.wait(self._seconds / BEATS):
            try:
                self._beat()
            except ConnectorError as error:
                self._tell(f"the lease could not be renewed, which is tried again: {error}")

    def _beat(self) -> None:
        def edit(state: StreamState) -> StreamState:
            self._must_hold(state)
            return replace(state, holder=Holder(self._run, self._nonce, self._watermark.now()))

        try:
            self._change(edit)
        except LeaseLostError:
            self._lost = True

    def _change(self, edit: Callable[[StreamState], StreamState]) -> StreamState:
        """Change the entry; beats and commits of one process do not race."""
        with self._lock:
            state = self._watermark.change(edit)
            self._heard = time.monotonic()
            return state

    def _must_hold(self, state: StreamState) -> None:
        if not self._is_mine(state):
            raise self._taken()

    def _is_mine(self, state: StreamState) -> bool:
        return state.holder is not None and state.holder.nonce == self._nonce

    def _taken(self) -> LeaseLostError:
        return LeaseLostError(
            f"Stream {self._watermark.stream!r}: another run has taken it over, because this one "
            f"was not heard of for {self._seconds:g} s, or it was reset by hand. Nothing is lost: "
            "what this run has committed stays, and the other one applies the rest."
        )
