"""The protocol of a change stream: its entry, plans and lease, whatever the runs do."""

import dataclasses
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagster_bq_connector import BigQueryResource
from dagster_bq_connector.cdc.lease import Lease
from dagster_bq_connector.cdc.look import LaunchedRun, Runs, Tried, in_flight, look
from dagster_bq_connector.cdc.stream import Pace, Request
from dagster_bq_connector.cdc.watermark import Plan, StreamState, failed, utc_now
from dagster_bq_connector.errors import (
    ConfigurationError,
    LeaseLostError,
    LedgerError,
    OrderBreakError,
    PlanMismatchError,
    StreamStoppedError,
)
from support.draining import EAGER, Numbers, Simulated, Written
from support.ledgers import ledger_at

NO_RUNS = Runs(live=list, tried=lambda state: Tried(0, None), is_over=lambda run: False)


@pytest.fixture
def numbers(tmp_path: Path, bigquery: BigQueryResource, dataset: str) -> Numbers:
    folder = tmp_path / "changes"
    folder.mkdir()
    return Numbers(folder, bigquery, dataset)


def request_of(plan: Plan) -> Request:
    return Request(plan.id, plan.start, plan.stop)


def planned(numbers: Numbers) -> Plan:
    seen = look(numbers.watermark, numbers.source, numbers.pace, NO_RUNS, 0)
    assert seen.plan, seen.reason
    return seen.plan


def launches(hours: int, phase: Any) -> list[float]:
    """When runs are launched of which none begins, of a lease of a minute; in minutes."""
    now = begin = utc_now()
    live: list[LaunchedRun] = []
    while now < begin + timedelta(hours=hours):
        if in_flight(live, None, now, 60.0) is None:
            live.append(LaunchedRun(str(len(live)), phase, now))
        now += timedelta(seconds=30)
    return [(run.since - begin).total_seconds() / 60 for run in live]


def test_runs_that_do_not_begin_are_launched_ever_later() -> None:
    found = launches(hours=30, phase="starting")
    assert found[:8] == [0, 1, 2, 3, 5, 9, 17, 33]
    gaps = np.diff(found[10:])
    assert (gaps == 60).all(), gaps
    # Those that began and were not heard of are dead: each lease one may take their place.
    assert launches(hours=1, phase="running") == list(range(60))


def test_runs_of_before_are_no_reason_to_wait(numbers: Numbers) -> None:
    numbers.put(250)
    now = utc_now()
    live = [LaunchedRun(str(n), "starting", now - timedelta(minutes=n + 1)) for n in range(9)]
    runs = dataclasses.replace(NO_RUNS, live=lambda: live)
    pace = dataclasses.replace(numbers.pace, lease_seconds=60.0)
    seen = look(numbers.watermark, numbers.source, pace, runs, 0)
    assert seen.reason.startswith("9 runs do not begin, the next is launched at ")
    die(numbers, pytest.MonkeyPatch(), at=150)  # one plan is committed
    numbers.watermark.change(lambda state: dataclasses.replace(state, holder=None))
    assert look(numbers.watermark, numbers.source, pace, runs, 0).plan


class Died(BaseException):
    """The process ends here: nothing is done any more."""


def die(numbers: Numbers, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """A run dies while it applies a number: it does not release the stream."""

    def end(number: int) -> None:
        if number == at:
            raise Died

    with monkeypatch.context() as patch:
        patch.setattr(Lease, "__exit__", lambda self, *error: self._ended.set())
        patch.setattr(numbers.mode, "before", end)
        with pytest.raises(Died):
            numbers.worker("dead").drain()


def test_a_run_drains_plan_after_plan(numbers: Numbers) -> None:
    numbers.put(250)
    drained = numbers.worker().drain()
    assert numbers.mode.numbers == list(range(250))
    assert [plan.split("-")[0] for plan in drained.plans] == ["1", "2", "3"]
    assert [applied.messages for applied in drained.applied] == [100, 100, 50]
    state = numbers.state
    assert (state.plans, state.plan, state.holder, state.failure) == (3, None, None, None)
    assert state.position == drained.stop
    assert state.ordering == {"seen": 250}
    assert drained.start is None
    assert drained.lag.changes == 0


def test_a_run_goes_on_where_the_last_one_ended(numbers: Numbers) -> None:
    numbers.put(30)
    numbers.worker().drain()
    numbers.put(5)
    drained = numbers.worker("run-2").drain()
    assert numbers.mode.numbers == list(range(35))
    assert drained.start is not None
    assert numbers.worker("run-3").drain().plans == []


def test_the_end_of_a_run_is_told_by_its_pace(numbers: Numbers) -> None:
    numbers.pace = dataclasses.replace(EAGER, min_rows=40, max_delay=timedelta(hours=1))
    numbers.put(130)
    drained = numbers.worker().drain()
    assert len(drained.plans) == 1  # thirty that came a moment ago are not worth another
    assert drained.lag.changes == 30
    numbers.pace = dataclasses.replace(EAGER, max_run_seconds=1e-9)
    numbers.put(300)
    assert len(numbers.worker("run-2").drain().plans) == 1


def test_a_plan_stays_until_it_is_committed(
    numbers: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers.put(20)
    die(numbers, monkeypatch, at=7)
    left = numbers.state
    assert left.plan
    assert left.position is None
    numbers.put(500)  # what comes later does not make it longer
    seen = look(
        numbers.watermark,
        numbers.source,
        numbers.pace,
        Runs(list, NO_RUNS.tried, lambda _: True),
        0,
    )
    assert seen.plan
    assert (seen.plan.id, seen.plan.stop) == (left.plan.id, left.plan.stop)
    numbers.over.add("dead")
    drained = numbers.worker("next").drain(request_of(seen.plan))
    assert drained.plans[0] == left.plan.id
    assert sorted(set(numbers.mode.numbers)) == list(range(520))
    assert numbers.mode.numbers[:7] == numbers.mode.numbers[7:14] == list(range(7))


def test_a_plan_that_kills_its_runs_is_made_smaller(
    numbers: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers.put(100)
    numbers.over.add("dead")
    die(numbers, monkeypatch, at=99)
    first = numbers.state.plan
    assert first
    assert first.lost == 1
    die(numbers, monkeypatch, at=99)
    assert numbers.state.plan
    assert (numbers.state.plan.id, numbers.state.plan.lost) == (first.id, 2)
    numbers.mode.numbers.clear()
    drained = numbers.worker().drain()
    assert [applied.messages for applied in drained.applied] == [50, 50]
    assert first.id not in drained.plans
    assert numbers.mode.numbers == list(range(100))


def test_a_plan_of_one_message_is_made_no_smaller(
    numbers: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers.pace = dataclasses.replace(EAGER, max_changes=2)
    numbers.put(2)
    numbers.over.add("dead")
    for _ in range(6):
        die(numbers, monkeypatch, at=0)
    assert numbers.state.plan
    assert numbers.state.plan.changes == 1
    numbers.worker().drain()
    assert sorted(set(numbers.mode.numbers)) == [0, 1]


def test_an_error_is_not_a_reason_for_a_smaller_plan(numbers: Numbers) -> None:
    numbers.put(10)

    def refuse(number: int) -> None:
        raise ValueError(f"number {number}")

    numbers.mode = Written(before=refuse)
    for count in range(1, 4):
        with pytest.raises(ValueError, match="number 0"):
            numbers.worker(f"run-{count}").drain()
        state = numbers.state
        assert state.plan
        assert state.plan.lost == 0
        assert state.failure
        assert (state.failure.count, state.failure.reason) == (count, "ValueError: number 0")
        assert state.holder is None
    numbers.mode = Written()
    numbers.worker().drain()
    assert numbers.state.failure is None


def test_a_run_that_was_launched_twice_reports_a_replay(numbers: Numbers) -> None:
    numbers.put(10)
    request = request_of(planned(numbers))
    assert not numbers.worker("run-1").drain(request).replayed
    numbers.put(3)
    drained = numbers.worker("run-2").drain(request)
    assert drained.replayed
    assert drained.plans == []
    assert numbers.mode.numbers == list(range(10))


def test_two_plans_of_one_start_are_applied_once(numbers: Numbers) -> None:
    """Two daemons look one after the other, and launch runs of different ends."""
    numbers.put(10)
    short = request_of(planned(numbers))
    numbers.put(10)
    long = request_of(planned(numbers))
    assert short.plan != long.plan
    numbers.worker("run-1").drain(long)
    drained = numbers.worker("run-2").drain(short)
    assert drained.replayed
    assert numbers.mode.numbers == list(range(20))


def test_a_run_of_another_position_applies_nothing(numbers: Numbers) -> None:
    numbers.put(10)
    numbers.worker().drain()
    numbers.put(10)
    request = request_of(planned(numbers))
    numbers.watermark.change(lambda state: StreamState(plans=state.plans + 1))
    numbers.mode.numbers.clear()
    with pytest.raises(PlanMismatchError, match=r"plan 2-\w+, which begins at .*stands at None"):
        numbers.worker("run-2").drain(request)
    assert numbers.mode.numbers == []


def test_a_break_stops_the_stream_until_it_is_acknowledged(numbers: Numbers) -> None:
    numbers.put(10)

    def tear(number: int) -> None:
        raise OrderBreakError("another cluster.")

    numbers.mode = Written(before=tear)
    with pytest.raises(OrderBreakError):
        numbers.worker().drain()
    numbers.mode = Written()
    with pytest.raises(StreamStoppedError, match=r"another cluster.*acknowledge numbers"):
        numbers.worker().drain()
    with pytest.raises(StreamStoppedError):
        look(numbers.watermark, numbers.source, numbers.pace, NO_RUNS, 0)
    numbers.watermark.change(lambda state: dataclasses.replace(state, stopped=None))
    numbers.worker().drain()
    assert numbers.mode.numbers == list(range(10))


def test_beside_a_live_run_another_waits(numbers: Numbers) -> None:
    numbers.put(10)
    at_work, may_end = threading.Event(), threading.Event()

    def hold(number: int) -> None:
        at_work.set()
        assert may_end.wait(60)

    first = Numbers(numbers.folder, numbers.bigquery, numbers.ledger, mode=Written(before=hold))
    thread = threading.Thread(target=first.worker("run-1").drain)
    thread.start()
    assert at_work.wait(60)
    seen = look(numbers.watermark, numbers.source, numbers.pace, NO_RUNS, 0)
    assert (seen.plan, seen.reason) == (None, "run run-1 is at work")
    second = threading.Thread(target=numbers.worker("run-2").drain)
    second.start()
    while not numbers.said:
        second.join(0.05)
    assert numbers.said[0] == "waiting for run run-1, which is at work on the stream"
    may_end.set()
    thread.join(60)
    second.join(60)
    assert first.mode.numbers == list(range(10))
    assert numbers.mode.numbers == []


class Asleep(Lease):
    """Of a process that is stopped: it does not beat."""

    def _beat_on(self) -> None:
        pass


def test_a_run_that_slept_while_another_did_its_plan_ends(numbers: Numbers) -> None:
    numbers.put(250)
    numbers.pace = dataclasses.replace(EAGER, lease_seconds=0.4)

    def sleep(number: int) -> None:
        if number == 120:  # in its second plan
            other = Numbers(numbers.folder, numbers.bigquery, numbers.ledger, numbers.pace)
            drained = other.worker("other").drain()
            assert [applied.messages for applied in drained.applied] == [100, 50]

    numbers.mode = Written(before=sleep)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dagster_bq_connector.cdc.stream.Lease", Asleep)
        assert len(numbers.worker("slept").drain().plans) == 1
    state = numbers.state
    assert (state.plans, state.ordering, state.failure) == (3, {"seen": 250}, None)


def test_a_run_that_slept_past_its_lease_goes_no_further(numbers: Numbers) -> None:
    numbers.put(10)
    plan = planned(numbers)
    free = numbers.over.__contains__
    numbers.over.add("slept")
    with (
        Asleep(numbers.watermark, "slept", 0.2, free, print) as slept,
        Lease(numbers.watermark, "other", 60, free, print) as other,
    ):
        threading.Event().wait(0.2)  # it is asked for again in the length of a lease
        for step in (slept.check, lambda: slept.take(plan, {}), lambda: slept.stop("no", {})):
            with pytest.raises(LeaseLostError, match="another run has taken it over"):
                step()
        with pytest.raises(LeaseLostError):
            slept.commit(plan, {})
        slept.__exit__(None, None, None)
        other.check()
        assert other.commit(other.take(plan, {}), {})
    assert numbers.state.position == plan.stop


def test_a_lease_is_kept_while_work_goes_on(numbers: Numbers) -> None:
    numbers.put(1)
    numbers.pace = dataclasses.replace(EAGER, lease_seconds=1)
    beats: set[str] = set()

    def work(number: int) -> None:
        while len(beats) < 4:
            assert numbers.state.holder
            assert numbers.state.holder.run == "run-1"
            beats.add(numbers.state.holder.beat.isoformat())

    numbers.mode = Written(before=work)
    assert numbers.worker().drain().plans


def test_a_holder_that_is_known_to_have_ended_is_not_waited_for(
    numbers: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers.put(10)
    numbers.pace = dataclasses.replace(EAGER, lease_seconds=3600)
    die(numbers, monkeypatch, at=3)
    assert look(numbers.watermark, numbers.source, numbers.pace, NO_RUNS, 0).plan is None
    numbers.over.add("dead")
    assert numbers.worker("run-2").drain().plans


def test_a_lost_entry_stops_a_stream_whose_cursor_shows_progress(numbers: Numbers) -> None:
    numbers.put(10)
    numbers.worker().drain()
    ledger = ledger_at(numbers.bigquery, numbers.ledger)
    [entry] = ledger.entries()
    ledger.delete(entry)
    with pytest.raises(LedgerError, match=r"entry is gone.*1 committed plan.*reset numbers"):
        look(numbers.watermark, numbers.source, numbers.pace, NO_RUNS, had_plans=1)
    assert look(numbers.watermark, numbers.source, numbers.pace, NO_RUNS, had_plans=0).plan


def test_runs_that_fail_begin_later_each_time(numbers: Numbers) -> None:
    numbers.put(10)
    clock = numbers.now = Simulated()
    for count, pause in enumerate([30, 60, 120, 240, 480, 960, 1920, 3600, 3600], start=1):
        numbers.watermark.change(lambda state: failed(state, "no such column", clock()))
        assert numbers.state.failure
        assert numbers.state.failure.count == count
        clock.pass_by(pause - 1)
        seen = look(numbers.watermark, numbers.source, numbers.pace, NO_RUNS, 0)
        assert seen.plan is None
        assert "no such column" in seen.reason
        clock.pass_by(1)
        assert look(numbers.watermark, numbers.source, numbers.pace, NO_RUNS, 0).plan


def test_a_tick_counts_runs_that_never_reached_the_stream(numbers: Numbers) -> None:
    """Such as those whose code does not load: the entry knows nothing of them."""
    numbers.put(10)
    clock = numbers.now = Simulated()
    tried = Tried(3, clock())
    runs = Runs(list, lambda state: tried, lambda run: False)
    assert look(numbers.watermark, numbers.source, numbers.pace, runs, 0).plan is None
    clock.pass_by(120)
    assert look(numbers.watermark, numbers.source, numbers.pace, runs, 0).plan


def test_what_waits_becomes_worth_a_run(numbers: Numbers) -> None:
    numbers.pace = Pace(min_rows=100, max_delay=timedelta(minutes=1))
    assert look(numbers.watermark, numbers.source, numbers.pace, NO_RUNS, 0).reason == "no changes"
    numbers.put(10)
    seen = look(numbers.watermark, numbers.source, numbers.pace, NO_RUNS, 0)
    assert seen.plan is None
    assert "10 messages wait" in seen.reason
    numbers.put(90)
    assert look(numbers.watermark, numbers.source, numbers.pace, NO_RUNS, 0).plan
    late = Pace(min_rows=10**6, max_delay=timedelta(0))
    assert look(numbers.watermark, numbers.source, late, NO_RUNS, 0).plan


@pytest.mark.parametrize("setting", ["min_rows", "max_changes", "max_run_seconds", "lease_seconds"])
def test_a_pace_that_cannot_work_is_refused(setting: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{setting}=0"):
        Pace(**{setting: 0})


def test_an_entry_that_was_edited_by_hand_is_told(numbers: Numbers) -> None:
    numbers.put(1)
    numbers.worker().drain()
    ledger = ledger_at(numbers.bigquery, numbers.ledger)
    [entry] = ledger.entries()
    ledger.compare_and_set(entry, {"position": 3})
    with pytest.raises(LedgerError, match=r"is no entry of a stream, or was edited by hand"):
        numbers.worker().drain()


@pytest.mark.parametrize(
    ("phase", "age", "reason"),
    [
        ("queued", 10_000, "run r is queued"),
        ("starting", 59, "run r is being started"),
        ("starting", 61, None),  # such as one whose launcher died: it may never start
        ("running", 59, "run r is beginning"),
        ("running", 61, None),  # it would hold the stream by now
    ],
)
def test_a_run_that_was_launched_is_waited_for(
    numbers: Numbers, phase: Any, age: float, reason: str | None
) -> None:
    numbers.pace = dataclasses.replace(EAGER, lease_seconds=60)
    numbers.put(1)
    run = LaunchedRun("r", phase, utc_now() - timedelta(seconds=age))
    runs = Runs(lambda: [run], NO_RUNS.tried, NO_RUNS.is_over)
    seen = look(numbers.watermark, numbers.source, numbers.pace, runs, 0)
    assert (seen.plan is None) is (reason is not None)
    if reason:
        assert seen.reason == reason


def test_a_burst_does_not_wait(numbers: Numbers) -> None:
    numbers.pace = Pace(min_rows=100, max_delay=timedelta(hours=1))
    numbers.put(99)
    assert look(numbers.watermark, numbers.source, numbers.pace, NO_RUNS, 0).plan is None
    numbers.put(1)
    assert look(numbers.watermark, numbers.source, numbers.pace, NO_RUNS, 0).plan
