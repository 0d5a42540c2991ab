"""Whatever load jobs replace, `ExactlyOnceWriter` replaces too, at once or not at all."""

import datetime as dt
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    DailyTable,
    ExactlyOnceWriter,
    RangePartitioning,
    RowSlice,
    TableOptions,
)
from dagster_bq_connector.errors import ConfigurationError, PartitionError
from dagster_bq_connector.write import replacement
from dagster_bq_connector.write.own_stream import OwnStreams

FIRST, SECOND = dt.date(2026, 8, 1), dt.date(2026, 8, 2)
KEYS = [str(FIRST), str(SECOND)]
BY_TENS = TableOptions(RangePartitioning("n", 0, 100, 10))


@pytest.fixture
def once(bigquery: BigQueryResource) -> ExactlyOnceWriter:
    return ExactlyOnceWriter(bigquery=bigquery)


def rows_of(*rows: tuple[dt.date, int]) -> pa.Table:
    days, numbers = [day for day, _ in rows], [n for _, n in rows]
    return pa.table({"day": pa.array(days, pa.date32()), "n": pa.array(numbers, pa.int64())})


def content(reader: BigQueryReader, table: Any) -> list[int]:
    return sorted(reader.read(table, ["n"]).to_arrow()["n"].to_pylist())


LAYOUTS = ["column", "ingestion", "range", "sharded", "whole", "slice"]


def place(layout: str, dataset: str, keys: list[str]) -> Any:
    """What is replaced: the part with these days, or with numbers below ten."""
    name = f"{dataset}.t"
    return {
        "column": DailyTable(name, column="day").for_keys(keys),
        "ingestion": DailyTable(name).for_keys(keys),
        "range": f"{name}$0",
        "sharded": DailyTable(name, column="day", layout="sharded").for_keys(keys),
        "whole": name,
        "slice": RowSlice.by_keys(name, "day", keys),
    }[layout]


def options(layout: str) -> TableOptions | None:
    return BY_TENS if layout == "range" else None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_there_goes_and_what_is_beside_stays(
    layout: str, dataset: str, once: ExactlyOnceWriter, reader: BigQueryReader
) -> None:
    def replace(keys: list[str], *rows: tuple[dt.date, int]) -> Any:
        key = f"{dataset} {keys} {rows}"
        table = place(layout, dataset, keys)
        return once.replace(rows_of(*rows), table, options(layout), key=key)

    def found() -> list[int]:
        where = place(layout, dataset, KEYS) if layout == "sharded" else f"{dataset}.t"
        return content(reader, where)

    if layout == "ingestion":  # of which a write has one day's rows, by their address
        replace(KEYS[1:], (SECOND, 3))
        replace(KEYS[:1], (FIRST, 1), (FIRST, 2))
    elif layout in ("range", "whole"):
        replace(KEYS, (FIRST, 1), (SECOND, 2))
        if layout == "range":
            once.append(rows_of((SECOND, 13)), f"{dataset}.t", key=f"{dataset} more")
    else:
        replace(KEYS, (FIRST, 1), (FIRST, 2), (SECOND, 3))
    beside = {"range": [13], "whole": []}.get(layout, [3])
    assert replace(KEYS[:1], (FIRST, 7), (FIRST, 8)).rows == 2
    assert found() == sorted([7, 8, *beside])
    assert replace(KEYS[:1]).rows == 0
    assert found() == beside
    assert replace(KEYS[:1], (FIRST, 7), (FIRST, 8)).replayed  # the key that was used before
    assert found() == beside


def test_the_rows_under_way_to_many_tables_are_bounded_together(
    dataset: str, once: ExactlyOnceWriter, reader: BigQueryReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound, held = replacement._bound, list[tuple[int, int]]()

    def watched(targets: Sequence[OwnStreams]) -> None:
        before = sum(each.held for each in targets)
        bound(targets)
        held.append((before, sum(each.held for each in targets)))

    monkeypatch.setattr(replacement, "_bound", watched)
    monkeypatch.setattr(replacement, "POOL_BYTES", 4_000)
    rows = [rows_of((FIRST, n), (SECOND, 100 + n)) for n in range(50)]
    once.replace(rows, place("sharded", dataset, KEYS), key=f"{dataset} k")
    assert max(before for before, _ in held) > 4_000
    assert max(after for _, after in held) <= 4_000
    assert len(content(reader, place("sharded", dataset, KEYS))) == 100


@pytest.mark.parametrize("layout", ["column", "sharded", "slice"])
def test_a_row_of_another_part_changes_nothing(
    layout: str, dataset: str, once: ExactlyOnceWriter, reader: BigQueryReader
) -> None:
    both = place(layout, dataset, KEYS)
    once.replace(rows_of((FIRST, 1), (SECOND, 2)), both, key=f"{dataset} both")
    one = place(layout, dataset, KEYS[:1])
    with pytest.raises(PartitionError, match="No row was written"):
        once.replace(rows_of((FIRST, 3), (SECOND, 4)), one, key=f"{dataset} stray")
    where = both if layout == "sharded" else f"{dataset}.t"
    assert content(reader, where) == [1, 2]


@pytest.mark.local_only("it needs a dataset that is elsewhere")
def test_a_resource_elsewhere_than_the_dataset(
    dataset: str, fields: dict[str, Any], once: ExactlyOnceWriter, reader: BigQueryReader
) -> None:
    once.replace(rows_of((FIRST, 1)), f"{dataset}.t", key=f"{dataset} first")
    elsewhere = ExactlyOnceWriter(bigquery=BigQueryResource(**fields | {"location": "EU"}))
    with pytest.raises(ConfigurationError, match="resource is EU, and .*t is in US"):
        elsewhere.replace(rows_of((FIRST, 2)), f"{dataset}.t", key=f"{dataset} second")
    assert content(reader, f"{dataset}.t") == [1]
