"""A stream's watermark: the ledger entry that says where it stands, and who is at work."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, TypeAlias, cast

from dagster_bq_connector.cdc.source.source import Position
from dagster_bq_connector.errors import LedgerError
from dagster_bq_connector.ledger import Key, Ledger

Clock: TypeAlias = Callable[[], datetime]

# A run that was launched for a plan is compared with so many that were committed last.
DONE_PLANS = 32
# A description of BigQuery's holds 16,384 characters, and positions need most of them.
REASON_CHARACTERS = 500
LONGEST_PAUSE = 5.0
MOST_AHEAD = 3600.0


def utc_now() -> datetime:
    """The time, by this machine's clock."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Plan:
    """One bounded range that is applied as a whole.

    Attributes:
        id: Made of the stream's number of plans and the range, so that whoever plans the same has
            the same id.
        start: The position where it begins; None for the beginning of the source.
        stop: The position before which it ends.
        changes: How many messages it was allowed to hold.
        lost: How many runs took it, and were not heard of again.
    """

    id: str
    start: Position | None
    stop: Position
    changes: int = 0
    lost: int = 0

    @classmethod
    def of(cls, number: int, start: Position | None, stop: Position, changes: int) -> Plan:
        """The plan of that number."""
        stop = json.loads(json.dumps(stop))  # as it will be read, whatever the source gave
        text = json.dumps([start, stop], sort_keys=True)
        return cls(f"{number}-{_digest(text)}", start, stop, changes)


@dataclass(frozen=True, slots=True)
class Holder:
    """Who is at work on a stream.

    Attributes:
        run: The id of the run, or what else tells people who it is.
        nonce: What tells this try from all others, of the same run too.
        beat: When it was last heard of.
    """

    run: str
    nonce: str
    beat: datetime

    def is_heard(self, now: datetime, seconds: float) -> bool:
        """Whether it was heard of in so many seconds.

        Not one that will be in more than an hour: its clock is wrong, by years perhaps.
        """
        return -MOST_AHEAD < (now - self.beat).total_seconds() < seconds


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that ended with an error, or several of them in a row.

    Attributes:
        count: How many in a row.
        at: When the last one ended.
        reason: Its error, shortened.
    """

    count: int
    at: datetime
    reason: str


@dataclass(frozen=True, slots=True)
class StreamState:
    """What the entry says.

    Attributes:
        position: Up to where changes are applied; None when none are.
        plans: The number of plans that were committed, since ever.
        plan: The plan that was begun. It stays until it is committed.
        holder: Who is at work.
        ordering: The state of the ordering profile.
        stopped: Why the stream is stopped until an operator acknowledges it.
        failure: How the last run ended, when it was with an error.
        done: Plans that were committed last, each as its id and its start.
        moved: When the position was last moved, by a commit or by hand.
        tables: Where the changes of each of the source's tables go, as `table_name` has it.
    """

    position: Position | None = None
    plans: int = 0
    plan: Plan | None = None
    holder: Holder | None = None
    ordering: Mapping[str, Any] = field(default_factory=dict[str, Any])
    stopped: str | None = None
    failure: Failure | None = None
    done: tuple[tuple[str, str], ...] = ()
    moved: datetime | None = None
    tables: Mapping[str, str] = field(default_factory=dict[str, str])

    def plan_to(self, stop: Position, changes: int) -> Plan:
        """The next plan, from where the stream stands."""
        return Plan.of(self.plans + 1, self.position, stop, changes)

    def is_done(self, plan: str, start: Position | None) -> bool:
        """Whether a plan was committed, or another one that began where it does."""
        return any(plan == id_ or start_name(start) == begun for id_, begun in self.done)

    def to_json(self) -> dict[str, Any]:
        """The value of the entry."""
        found = {
            "position": self.position,
            "plans": self.plans,
            "plan": self.plan and _without_start(self.plan),
            "holder": self.holder and _fields(self.holder),
            "ordering": dict(self.ordering),
            "stopped": self.stopped,
            "failure": self.failure and _fields(self.failure),
            "done": [list(pair) for pair in self.done],
            "moved": self.moved and self.moved.isoformat(),
            "tables": dict(self.tables),
        }
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], place: str) -> StreamState:
        """What an entry says.

        Raises:
            LedgerError: It is no entry of a stream.
        """
        try:
            plan, holder, failure = value.get("plan"), value.get("holder"), value.get("failure")
            return cls(
                position=value.get("position"),
                plans=int(value["plans"]),
                plan=Plan(**plan, start=value.get("position")) if plan else None,
                holder=Holder(**_timed(holder, "beat")) if holder else None,
                ordering=dict(value["ordering"]),
                stopped=value.get("stopped"),
                failure=Failure(**_timed(failure, "at")) if failure else None,
                done=tuple((str(id_), str(start)) for id_, start in value["done"]),
                moved=_time(value["moved"]) if value.get("moved") else None,
                tables=dict(value.get("tables") or {}),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerError(
                f"{place} is no entry of a stream, or was edited by hand: {error!r}. Look at it "
                "with `python -m dagster_bq_connector.ledger show`, and set it right."
            ) from error


class Watermark:
    """The entry of one stream. It is read with one call and no query, and changed by comparing."""

    def __init__(self, ledger: Ledger, stream: str, now: Clock = utc_now) -> None:
        """Use the entry of `stream`; nothing is read yet."""
        self._ledger, self._key, self.now = ledger, Key("stream", stream), now

    @property
    def stream(self) -> str:
        """The stream's name."""
        return self._key.text

    @property
    def place(self) -> str:
        """Where the entry is, for people."""
        return self._ledger.place(self._key.name)

    def read(self) -> StreamState | None:
        """What the entry says; None when there is none.

        Raises:
            LedgerError: What is there is no entry of a stream.
            ConnectorError: The ledger cannot be reached, or does not allow it.
        """
        entry = self._ledger.get(self._key)
        return None if entry is None else StreamState.from_json(entry.value, self.place)

    def change(self, edit: Callable[[StreamState], StreamState]) -> StreamState:
        """Change the entry, or make it.

        Args:
            edit: Gives the new state from the one that stands. It is called again when somebody
                else was first, and may raise to leave all as it is.

        Returns:
            The new state.

        Raises:
            LedgerError: Whether it was changed cannot be known, or it does not fit the ledger.
            ConnectorError: The ledger cannot be reached, or does not allow it.
        """
        pause = 0.05
        while True:
            entry = self._ledger.get(self._key)
            before = (
                StreamState() if entry is None else StreamState.from_json(entry.value, self.place)
            )
            after = edit(before)
            if entry is not None and after == before:
                return before
            value = after.to_json()
            if entry is None:
                written = self._ledger.create(self._key, value)
            else:
                written = self._ledger.compare_and_set(entry, value)
            if written.won:
                return after
            time.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(LONGEST_PAUSE, pause * 2)


def committed(
    state: StreamState, plan: Plan, ordering: Mapping[str, Any], now: datetime
) -> StreamState:
    """The state after a plan that was applied. A failure before it counts no more."""
    done = (*state.done, (plan.id, start_name(plan.start)))[-DONE_PLANS:]
    return replace(
        state,
        position=plan.stop,
        plans=state.plans + 1,
        plan=None,
        ordering=ordering,
        failure=None,
        done=done,
        moved=now,
    )


def moved_to(state: StreamState, position: Position | None, now: datetime) -> StreamState:
    """The state after an operator has given the stream another position.

    Whoever is at work loses the stream. What is known of the source's order stays.
    """
    return replace(
        state,
        position=position,
        plans=state.plans + 1,  # so that no plan has the id of one before
        plan=None,
        holder=None,
        failure=None,
        done=(),
        moved=now,
        tables={},
    )


def acknowledged(state: StreamState, ordering: Mapping[str, Any]) -> StreamState:
    """The state after an operator has dealt with why the stream was stopped.

    What comes next is planned anew: the old plan would read the topics of before, of a source that
    may be another one by now.

    Args:
        state: The state before.
        ordering: That of the ordering profile from now on.
    """
    number = state.plans + 1  # so that no plan has the id of one before
    return replace(
        state,
        plans=number,
        plan=None,
        stopped=None,
        failure=None,
        ordering=dict(ordering),
        tables={},  # they may be new ones, for a new snapshot
    )


def failed(state: StreamState, reason: str, now: datetime) -> StreamState:
    """The state after a run that ended with an error."""
    count = state.failure.count + 1 if state.failure else 1
    return replace(state, failure=Failure(count, now, shortened(reason)))


def shortened(reason: str) -> str:
    """A reason that fits the entry."""
    if _characters(reason) <= REASON_CHARACTERS:
        return reason
    end = REASON_CHARACTERS
    while _characters(cut := f"{reason[:end]}…") > REASON_CHARACTERS:
        end -= 1
    return cut


def start_name(start: Position | None) -> str:
    """A position in a few characters, for tags and comparison."""
    return _digest(json.dumps(start, sort_keys=True))


def _characters(text: str) -> int:
    """How many a text takes in the entry, where other than ASCII is written as six or twelve."""
    return len(json.dumps(text)) - 2


def table_name(table: object) -> str:
    """A table's address in a few characters, for comparison."""
    return _digest(str(table))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _fields(value: Plan | Holder | Failure) -> dict[str, Any]:
    found = {name: getattr(value, name) for name in value.__slots__}
    return {
        name: each.isoformat() if isinstance(each, datetime) else each
        for name, each in found.items()
    }


def _without_start(plan: Plan) -> dict[str, Any]:
    """A plan that stands begins where the stream does, and positions can be long."""
    return {name: value for name, value in _fields(plan).items() if name != "start"}


def _timed(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {**value, name: _time(cast("str", value[name]))}


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
