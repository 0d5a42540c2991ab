"""Order: any permutation and repetition of the batches of a history ends in the same table."""

import random
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_bq_connector import BigQueryResource
from dagster_bq_connector.cdc.ordering.postgres import PostgresLsn
from support.debezium import event
from support.upserts import apply, changes, orders, rows, upsert

Row = tuple[int, int, str]
Message = tuple[Any, Any]
KEYS = 4
STEPS = st.tuples(st.sampled_from("ccuuukdd"), st.integers(0, 9), st.integers(0, 9))


class History:
    """A table of a source, and the messages of its changes as PostgreSQL's connector sends them."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.messages: list[Message] = []
        self._lsn = 100

    def step(self, kind: str, first: int, second: int) -> None:
        """One statement; what cannot be done to the rows that there are becomes an insert."""
        free = [key for key in range(KEYS) if key not in self.rows]
        there = sorted(self.rows)
        self._lsn += 10
        if (kind == "c" or not there) and free:
            key = free[first % len(free)]
            self._put("c", key, 1)
        elif kind == "k" and free:  # another key: a delete and a create with one LSN
            old, new = there[first % len(there)], free[second % len(free)]
            self._delete(old, 1)
            self._put("c", new, 2)
        elif kind == "d":
            self._delete(there[first % len(there)], 1)
        else:
            self._put("u", there[first % len(there)], 1)

    def _put(self, op: str, key: int, order: int) -> None:
        row = {"id": key, "n": len(self.messages), "s": f"{op}{self._lsn}"}
        self.rows[key] = (row["id"], row["n"], row["s"])
        self._add(op, key, row, order)

    def _delete(self, key: int, order: int) -> None:
        del self.rows[key]
        self._add("d", key, None, order)
        self.messages.append(({"id": key}, None))

    def _add(self, op: str, key: int, row: Any, order: int) -> None:
        found = event(op, row, self._lsn, self._lsn - 1, ts_ms=self._lsn)
        found["transaction"] = {"id": str(self._lsn), "total_order": order}
        self.messages.append(({"id": key}, found))


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[list[list[Message]], list[Row]]:
    """Batches of a history, some of them twice, in any order; and the rows in the end."""
    history = History()
    for step in draw(st.lists(STEPS, min_size=1, max_size=25)):
        history.step(*step)
    size = draw(st.integers(1, 8))
    whole = history.messages
    batches = [whole[start : start + size] for start in range(0, len(whole), size)]
    again = draw(st.lists(st.sampled_from(batches), max_size=3))
    return draw(st.permutations(batches + again)), sorted(history.rows.values())


@pytest.fixture(scope="module")
def new_table(bigquery: BigQueryResource) -> Callable[[], str]:
    """Names a table that no other example has."""
    dataset = f"order_{uuid.uuid4().hex[:12]}"
    with bigquery.get_client() as client:
        client.create_dataset(dataset)
    return lambda: f"{dataset}.t{uuid.uuid4().hex[:8]}"


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(delivery=deliveries())
def test_any_order_and_repetition_of_batches_ends_in_the_same_table(
    bigquery: BigQueryResource,
    new_table: Callable[[], str],
    delivery: tuple[list[list[Message]], list[Row]],
) -> None:
    batches, expected = delivery
    table = new_table()
    applying = upsert(bigquery, orders(table), ordering=PostgresLsn(transaction_order=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dagster_bq_connector.cdc.apply.batches.MOST_ROWS", 1)
        apply(applying, *(changes(*batch) for batch in batches))
    assert rows(bigquery, table) == expected


def test_a_long_history_in_any_cut_and_order(
    bigquery: BigQueryResource, new_table: Callable[[], str]
) -> None:
    """Many batches of one plan, so that several requests are under way at once."""
    chance, history = random.Random(5), History()
    for _ in range(500):
        history.step(chance.choice("ccuuukdd"), chance.randrange(10), chance.randrange(10))
    whole = history.messages
    batches = [whole[start : start + 40] for start in range(0, len(whole), 40)]
    batches += chance.sample(batches, 10)
    chance.shuffle(batches)
    table = new_table()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dagster_bq_connector.cdc.apply.batches.MOST_ROWS", 40)
        applying = upsert(bigquery, orders(table), ordering=PostgresLsn(transaction_order=True))
        apply(applying, *(changes(*batch) for batch in batches))
    assert rows(bigquery, table) == sorted(history.rows.values())
