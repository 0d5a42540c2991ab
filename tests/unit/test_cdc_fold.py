"""The fold: the last change of each key, whatever the order and the cut of batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from dagster_bq_connector.cdc.fold import fold
from dagster_bq_connector.cdc.ordering.profile import sequence_texts

Change = tuple[str, int, int, int]  # table, key, and a sequence of two sections

small = st.integers(0, 3)
large = st.sampled_from([0, 1, 9, 10, 15, 16, 2**32, 2**63, 2**64 - 1])
changes = st.lists(st.tuples(st.sampled_from("ab"), small, large, large), max_size=60)


def texts(given: list[Change]) -> pa.Array[Any]:
    sections = [np.array([change[place] for change in given], np.uint64) for place in (2, 3)]
    return sequence_texts(sections, np.ones(len(given), np.bool_))


def folded(given: list[Change]) -> list[Change]:
    keys = pa.array([b"%d" % key for _, key, _, _ in given], pa.binary())
    tables = pa.array([table for table, *_ in given], pa.string()).dictionary_encode()
    return [given[index] for index in fold(keys, tables, texts(given)).tolist()]


def by_loop(given: list[Change]) -> dict[tuple[str, int], int]:
    last: dict[tuple[str, int], int] = {}
    for index, (table, key, *sequence) in enumerate(given):
        before = last.get((table, key))
        if before is None or tuple(sequence) >= given[before][2:]:
            last[table, key] = index
    return last


@given(changes)
def test_it_is_what_a_loop_finds(given: list[Change]) -> None:
    assert folded(given) == [given[index] for index in sorted(by_loop(given).values())]


@given(changes, st.randoms(), st.integers(1, 20))
def test_any_order_and_any_cut_ends_the_same(given: list[Change], random: Any, size: int) -> None:
    wanted = set(folded(given))
    batches = [given[start : start + size] for start in range(0, len(given), size)]
    batches += random.choices(batches, k=len(batches) // 2) if batches else []  # redelivered
    random.shuffle(batches)
    left = [change for batch in batches for change in folded(batch)]
    assert set(folded(left)) == wanted


def test_sequences_of_several_lengths() -> None:
    keys = pa.array([b"1", b"1", b"2"], pa.binary())
    tables = pa.array(["a"] * 3).dictionary_encode()
    short, long = "0" * 16, f"{'0' * 16}/{'0' * 16}"
    assert fold(keys, tables, pa.array([long, short, short])).tolist() == [0, 2]


def test_slices() -> None:
    keys = pa.array([b"0", b"1", b"1", b"2"], pa.binary()).slice(1)
    tables = pa.array(["a", "b", "b", "b"]).dictionary_encode().slice(1)
    sequences = texts([("", 0, 9, 9), ("", 0, 2, 1), ("", 0, 1, 2), ("", 0, 0, 0)]).slice(1)
    assert fold(keys, tables, sequences).tolist() == [0, 2]


def test_the_texts_of_sequences() -> None:
    right = np.array([True, False])
    sections = [np.array([10, 1], np.uint64), np.array([2**64 - 1, 1], np.uint64)]
    found = sequence_texts(sections, right).to_pylist()
    assert found == ["000000000000000A/FFFFFFFFFFFFFFFF", None]
