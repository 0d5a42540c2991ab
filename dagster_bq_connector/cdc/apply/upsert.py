"""Native change data capture: the last change of each key goes to BigQuery with its sequence.

BigQuery keeps, for every key, the change with the greatest sequence. So the messages of a plan may
be applied again, in part or in whole, and nothing changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dagster_bq_connector.cdc.apply.batches import put_together
from dagster_bq_connector.cdc.apply.failures import Failures
from dagster_bq_connector.cdc.apply.keys import source_table
from dagster_bq_connector.cdc.apply.target import BigQuery, Prepared, TableApplied, Target
from dagster_bq_connector.cdc.envelope.debezium_json import DebeziumJson
from dagster_bq_connector.cdc.event import FATES, Events, FailedEvent, Fate, Indices
from dagster_bq_connector.cdc.ordering.profile import OrderingProfile, State
from dagster_bq_connector.cdc.table import (
    CdcTable,
    DeadLetters,
    FailedRowPolicy,
    Truncates,
    check_policy,
)
from dagster_bq_connector.errors import ConfigurationError, FailedEventsError
from dagster_bq_connector.progress import Progress

_compute: Any = pc  # its stubs know a part of what it takes


@dataclass
class Applied:
    """What became of the messages of a plan.

    Attributes:
        state: The ordering profile's state after them.
        messages: How many there were.
        fates: What became of them, failed changes among the failed.
        tables: What was applied, by the source's table; of the tables that had changes.
        others: Changes of tables that the stream does not name, by the source's table. They were
            passed over.
        failed: How many events have failed, parked ones among them.
        failed_events: The first ten of them, for people.
        first_sequence: The lowest sequence of a change of a named table; None without any.
        last_sequence: The highest.
    """

    state: State
    messages: int = 0
    fates: Counter[Fate] = field(default_factory=Counter[Fate])
    tables: dict[str, TableApplied] = field(default_factory=dict[str, TableApplied])
    others: Counter[str] = field(default_factory=Counter[str])
    failed: int = 0
    failed_events: list[str] = field(default_factory=list[str])
    first_sequence: str | None = None
    last_sequence: str | None = None


class Upsert:
    """Applies changes to tables by native change data capture."""

    def __init__(
        self,
        connection: BigQuery,
        stream: str,
        format: DebeziumJson,
        ordering: OrderingProfile,
        tables: Mapping[str, CdcTable],
        failed_rows: FailedRowPolicy = "fail",
        truncates: Truncates = "fail",
        run_id: str = "",
    ) -> None:
        """Keep what changes are applied by. Nothing is looked up yet.

        Args:
            connection: Where the tables are.
            stream: The stream's name.
            format: The envelope of the messages.
            ordering: Where the order of changes comes from.
            tables: The tables, by the source's table (`schema.table`).
            failed_rows: What becomes of events that no retry can save.
            truncates: `"fail"`: a truncated table stops the stream; `"ignore"`: it keeps its rows.
            run_id: The run, as dead letters name it.

        Raises:
            ConfigurationError: A policy that is none, or a table that is parked without dead
                letters.
        """
        check_settings(tables, failed_rows, truncates)
        self.connection, self.stream, self.run_id = connection, stream, run_id
        self.format, self.ordering, self.tables = format, ordering, dict(tables)
        self.failed_rows: FailedRowPolicy = failed_rows
        self.truncates: Truncates = truncates

    def apply(
        self,
        messages: Iterable[pa.RecordBatch],
        state: State,
        progress: Progress,
        check: Callable[[], None] = lambda: None,
    ) -> Applied:
        """Apply the messages of one plan, and wait until every row is acknowledged.

        Applying them again changes nothing.

        Args:
            messages: Batches of the schema MESSAGES.
            state: The ordering profile's state before them.
            progress: Counts acknowledged rows.
            check: Called before each batch; what it raises ends the plan.

        Returns:
            What became of them.

        Raises:
            OrderBreakError: The source's order is lost. Of the batch nothing was sent.
            FailedEventsError: Events cannot be applied, and the policy is to fail; or a table was
                truncated. Of the batch nothing was sent, unless it was BigQuery that refused.
            TableMismatchError, TableNotFoundError, UnsupportedError: A table is not as asked for.
            ConnectorError: BigQuery cannot be reached, or refuses the whole.
        """
        plan = Plan(self, state, progress)
        try:
            for batch in put_together(messages):
                check()
                plan.advance(events := plan.events(batch))
                plan.take(events)
            return plan.finish()
        except BaseException:
            plan.abandon()
            raise


class Plan:
    """The messages of one plan while they are applied."""

    def __init__(
        self, upsert: Upsert, state: State, progress: Progress, redriven: bool = False
    ) -> None:
        """Begin; nothing is opened before the first change.

        Args:
            upsert: What changes are applied by.
            state: The ordering profile's state.
            progress: Counts acknowledged rows.
            redriven: They are dead letters. Others that followed them may have been applied, and
                none of them is passed over.
        """
        self.applied = Applied(state)
        self._upsert, self._progress, self._redriven = upsert, progress, redriven
        self._targets: dict[str, Target] = {}
        self.failures = Failures(
            upsert.connection, upsert.stream, upsert.failed_rows, upsert.run_id, progress
        )

    def events(self, messages: pa.RecordBatch) -> Events:
        """The events of a batch."""
        return self._upsert.format.events(messages, self._upsert.ordering)

    def advance(self, events: Events) -> None:
        """Take note of the order of events, before anything of them is applied."""
        self.applied.state = self._upsert.ordering.advance(self.applied.state, events)

    def take(self, events: Events) -> None:
        """Apply the events of a batch: first all is prepared, then rows are sent."""
        self._count(events)
        self._refuse_truncates(events)
        sequences, unordered = self._upsert.ordering.sequences(events.changes)
        failed = self._failed(events)
        prepared: list[tuple[Target, Prepared]] = []
        for name, changes in _by_table(events).items():
            if name not in self._upsert.tables:
                failed += self._pass_over(events, changes, name)
                continue
            table = self.applied.tables.setdefault(name, TableApplied())
            if self._upsert.tables[name].parked:
                self._park(events, changes, name)
                continue
            chosen = self._ordered(sequences, changes)
            bad = _of_changes(events, unordered, changes) if len(chosen) < len(changes) else []
            if len(chosen):
                target = self._target(name)
                table = target.applied
                prepared.append((target, found := target.prepare(events, sequences, chosen)))
                bad += found.survivors.failed.values()
            table.failed += len(bad)
            failed += [(event, name) for event in bad]
        self._fail(events, failed)
        for target, found in prepared:
            target.send(found)

    def finish(self) -> Applied:
        """Wait until all is acknowledged, and end what is open."""
        applied = self.settle()
        self.close()
        return applied

    def settle(self) -> Applied:
        """Wait until all is acknowledged."""
        for target in self._targets.values():
            target.settle()
        self.failures.settle()
        self.applied.fates = +self.applied.fates  # without those that are none in the end
        self.applied.failed = self.failures.count
        self.applied.failed_events = self.failures.named
        return self.applied

    def close(self) -> None:
        """End what is open, once all is settled."""
        for each in (*self._targets.values(), self.failures):
            each.close()

    def abandon(self) -> None:
        """End what is open now."""
        for each in (*self._targets.values(), self.failures):
            each.abandon()

    def _target(self, name: str) -> Target:
        if name not in self._targets:

            def refused(events: Events, failed: list[FailedEvent]) -> None:
                self._fail(events, [(event, name) for event in failed])

            upsert = self._upsert
            target = Target(
                upsert.connection,
                upsert.format,
                name,
                upsert.tables[name],
                self._progress,
                refused,
                fills=not self._redriven,
            )
            target.applied = self.applied.tables[name]
            self._targets[name] = target
        return self._targets[name]

    def _count(self, events: Events) -> None:
        self.applied.messages += events.messages.num_rows
        counts = np.bincount(events.fates, minlength=len(FATES)).tolist()
        self.applied.fates.update({f: n for f, n in zip(FATES, counts, strict=True) if n})

    def _move(self, fate: Fate, to: Fate, count: int) -> None:
        if count:
            self.applied.fates[fate] -= count
            self.applied.fates[to] += count

    def _refuse_truncates(self, events: Events) -> None:
        """Stop at a truncate of a named table: its rows are to stay gone, or were not to go."""
        if self._upsert.truncates == "ignore":
            return
        found: list[str] = []
        for message in np.flatnonzero(events.fates == FATES.index(Fate.truncate)).tolist():
            name = source_table(events.messages.column("value")[message].as_py())
            if name is None or name in self._upsert.tables:
                reason = (
                    f"{name or 'a table'} was truncated at the source, and change data capture has "
                    "no such change"
                )
                found.append(FailedEvent(message, None, reason).named(events.messages))
        if found:
            remedy = (
                "Set truncates='ignore', by which its rows stay; if they are to be gone, drop the "
                "table then, and take a new snapshot of it at the source"
            )
            raise FailedEventsError(self._upsert.stream, found, remedy)

    def _failed(self, events: Events) -> list[tuple[FailedEvent, str | None]]:
        """The messages that are no changes; those of tables that are not named are passed over."""
        kept: list[tuple[FailedEvent, str | None]] = []
        for event in events.failed:
            name = source_table(events.messages.column("value")[event.message].as_py())
            if name is None or name in self._upsert.tables or self._redriven:
                kept.append((event, name))
                if name in self._upsert.tables:
                    self.applied.tables.setdefault(name, TableApplied()).failed += 1
            else:
                self.applied.others[name] += 1
                self._move(Fate.failed, Fate.change, 1)
        self._move(Fate.failed, Fate.change, len(kept))  # counted where they are dealt with
        return kept

    def _pass_over(
        self, events: Events, changes: Indices, name: str
    ) -> list[tuple[FailedEvent, str | None]]:
        """Changes of a table that the stream does not name. A dead letter stays one."""
        if not self._redriven:
            self.applied.others[name] += len(changes)
            return []
        messages = events.changes.column("message").take(pa.array(changes, pa.int64()))
        reason = f"the stream names no table for {name}: add it to its tables"
        return [
            (FailedEvent(message, None, reason), name) for message in messages.to_numpy().tolist()
        ]

    def _fail(self, events: Events, failed: Sequence[tuple[FailedEvent, str | None]]) -> None:
        self._move(Fate.change, Fate.failed, len(failed))
        failed = sorted(failed, key=lambda pair: pair[0].message)
        self.failures.add(
            events.messages, [event for event, _ in failed], [name for _, name in failed]
        )

    def _park(self, events: Events, changes: Indices, name: str) -> None:
        self.applied.tables[name].failed += len(changes)
        self._move(Fate.change, Fate.failed, len(changes))
        numbers = events.changes.column("message").take(pa.array(changes, pa.int64()))
        self.failures.park(events.messages.take(numbers), name)

    def _ordered(self, sequences: pa.Array[Any], changes: Indices) -> Indices:
        """The changes that have a sequence; notes the lowest and the highest."""
        taken = sequences.take(pa.array(changes, pa.int64()))
        bounds = _compute.min_max(taken).as_py()
        if bounds["min"] is not None:
            applied = self.applied
            applied.first_sequence = min(applied.first_sequence or bounds["min"], bounds["min"])
            applied.last_sequence = max(applied.last_sequence or bounds["max"], bounds["max"])
        return changes[taken.is_valid().to_numpy(zero_copy_only=False)]


def check_settings(
    tables: Mapping[str, CdcTable], failed_rows: FailedRowPolicy, truncates: Truncates
) -> None:
    """Refuse settings of an `Upsert` that cannot work.

    Raises:
        ConfigurationError: A policy that is none, or a table that is parked without dead letters.
    """
    check_policy(failed_rows)
    if truncates not in ("fail", "ignore"):
        raise ConfigurationError(f"truncates={truncates!r}: it is 'fail' or 'ignore'.")
    parked = [name for name, table in tables.items() if table.parked]
    if parked and not isinstance(failed_rows, DeadLetters):
        raise ConfigurationError(
            f"{', '.join(parked)}: the changes of a parked table are kept as dead letters, so "
            "failed_rows must be DeadLetters(table)."
        )


def _by_table(events: Events) -> dict[str, Indices]:
    """The changes of each table of the source."""
    tables: Any = events.changes.column("table")
    codes, names = tables.indices.to_numpy(), tables.dictionary.to_pylist()
    return {names[code]: np.flatnonzero(codes == code) for code in np.unique(codes).tolist()}


def _of_changes(
    events: Events, failed: Sequence[FailedEvent], changes: Indices
) -> list[FailedEvent]:
    """Those of failed events that are among changes."""
    taken = pa.array(changes, pa.int64())
    messages = set(events.changes.column("message").take(taken).to_pylist())
    return [event for event in failed if event.message in messages]
