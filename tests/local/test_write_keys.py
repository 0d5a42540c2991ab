"""Within Dagster the key of a write is made of what runs: op, mapped copy, partitions, run."""

import datetime as dt
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from dagster_bq_connector import (
    BigQueryIOManager,
    BigQueryReader,
    BigQueryResource,
    BigQueryWriter,
    DailyTable,
    ExactlyOnceWriter,
)
from dagster_bq_connector.errors import FailedRowsError, WriteKeyError
from dagster_bq_connector.metadata import MaterializedWrite

FIRST_DAY = dt.date(2022, 1, 1)


@pytest.fixture
def once(bigquery: BigQueryResource, dataset: str) -> ExactlyOnceWriter:
    return ExactlyOnceWriter(bigquery=bigquery, ledger=f"{dataset}_ledger")


@pytest.fixture(params=["exactly_once", "file_loads"])
def keyed(request: pytest.FixtureRequest) -> BigQueryWriter:
    """The writers that take a key."""
    name = {"exactly_once": "once", "file_loads": "load_writer"}[request.param]
    return request.getfixturevalue(name)


@pytest.fixture
def numbers(reader: BigQueryReader, dataset: str) -> Callable[[str], list[int]]:
    """The numbers in a table of the test."""

    def numbers(table: str = "t") -> list[int]:
        return sorted(reader.read(f"{dataset}.{table}").to_arrow()["n"].to_pylist())

    return numbers


def rows(*numbers: int) -> pa.Table:
    return pa.table({"n": pa.array(numbers, pa.int64())})


def test_many_partitions_fit_into_an_entry(dataset: str, once: ExactlyOnceWriter) -> None:
    """Their keys and their counts would take more than a description of the ledger holds."""
    days = [FIRST_DAY + dt.timedelta(number) for number in range(1_300)]
    data = pa.table({"day": pa.array(days, pa.date32()), "n": range(len(days))})
    slice_ = DailyTable(f"{dataset}.t", column="day").for_keys([str(day) for day in days])
    found: dict[str, MaterializedWrite] = {}

    @dg.asset
    def many(writer: BigQueryWriter) -> None:
        found["first"] = writer.append(data, slice_)

    assert dg.materialize([many], resources={"writer": once}).success
    assert found["first"].partitions == {str(day): 1 for day in days}
    results = [once.append(data, slice_, key=f"{dataset} k") for _ in range(2)]
    assert [(each.rows, each.replayed) for each in results] == [(1_300, False), (1_300, True)]


def test_two_writes_to_one_table_need_keys(
    dataset: str, keyed: BigQueryWriter, numbers: Callable[..., list[int]]
) -> None:
    @dg.asset
    def twice(writer: BigQueryWriter) -> None:
        writer.append(rows(1), f"{dataset}.t")
        with pytest.raises(WriteKeyError, match=r"t already.*one call.*key=\""):
            writer.append(rows(2), f"{dataset}.t")
        for number in (3, 4):
            writer.append(rows(number), f"{dataset}.t", key=f"{dataset} {number}")
        writer.append(rows(5), f"{dataset}.other")

    assert dg.materialize([twice], resources={"writer": keyed}).success
    assert (numbers(), numbers("other")) == ([1, 3, 4], [5])


def test_a_step_may_mend_what_was_refused(
    dataset: str, keyed: BigQueryWriter, numbers: Callable[..., list[int]]
) -> None:
    bad = pa.table({"n": pa.array([1, 2**63], pa.uint64())})
    table = f"{dataset}.t"

    @dg.asset(retry_policy=dg.RetryPolicy(max_retries=1))
    def mended(context: dg.AssetExecutionContext, writer: BigQueryWriter) -> None:
        if not context.retry_number:
            with pytest.raises(FailedRowsError):
                writer.append(bad, table)
            assert not writer.append(bad.slice(0, 1), table).replayed
            raise RuntimeError("after the write")
        assert writer.append(bad, table).replayed
        with pytest.raises(WriteKeyError, match="already"):
            writer.append(rows(2), table)

    assert dg.materialize([mended], resources={"writer": keyed}).success
    assert numbers() == [1]


def test_a_step_may_open_a_long_write_again(
    dataset: str, once: ExactlyOnceWriter, numbers: Callable[..., list[int]]
) -> None:
    @dg.asset
    def long(writer: ExactlyOnceWriter) -> None:
        for after in (None, 1):
            with suppress(ConnectionError), writer.open(f"{dataset}.t") as write:
                assert write.position == after
                write.append(rows(1 if after is None else 2))
                write.checkpoint(1 if after is None else 2)
                if after is None:
                    raise ConnectionError("of the source")
        with pytest.raises(WriteKeyError, match="already"):
            writer.open(f"{dataset}.t")

    assert dg.materialize([long], resources={"writer": once}).success
    assert numbers() == [1, 2]


def test_steps_of_one_run_and_runs_of_one_step_are_other_writes(
    dataset: str, keyed: BigQueryWriter, numbers: Callable[..., list[int]]
) -> None:
    """Mapped steps, ops by another name, and assets, into one table."""

    @dg.op(out=dg.DynamicOut(int))
    def spread() -> Iterator[dg.DynamicOutput[int]]:
        for number in (1, 2, 3):
            yield dg.DynamicOutput(number, f"n{number}")

    @dg.op
    def store(writer: BigQueryWriter, number: int) -> None:
        writer.append(rows(number), f"{dataset}.t")

    @dg.op
    def four() -> int:
        return 4

    @dg.job(resource_defs={"writer": keyed})
    def job() -> None:
        spread().map(store)
        store.alias("again")(four())

    for _ in range(2):
        assert job.execute_in_process().success
    assert numbers() == [1, 1, 2, 2, 3, 3, 4, 4]


def test_an_asset_of_two_tables(
    dataset: str, keyed: BigQueryWriter, numbers: Callable[..., list[int]]
) -> None:
    @dg.multi_asset(specs=[dg.AssetSpec("a"), dg.AssetSpec("b")])
    def both(writer: BigQueryWriter) -> Iterator[dg.MaterializeResult]:
        for number, name in enumerate("ab"):
            result = writer.append(rows(number), f"{dataset}.{name}")
            yield result.to_materialize_result(asset_key=name)

    assert dg.materialize([both], resources={"writer": keyed}).success
    assert (numbers("a"), numbers("b")) == ([0], [1])


def test_a_retried_step_writes_once(
    dataset: str, keyed: BigQueryWriter, numbers: Callable[..., list[int]]
) -> None:
    """It failed after its writes: one that has a key, and one that has the step's."""
    replays: list[bool] = []

    @dg.asset(retry_policy=dg.RetryPolicy(max_retries=2))
    def flaky(context: dg.AssetExecutionContext, writer: BigQueryWriter) -> None:
        number = context.retry_number
        by_step = writer.append(rows(number), f"{dataset}.t")
        by_user = writer.append(rows(10 + number), f"{dataset}.t", key=f"{dataset} more")
        replays.extend([by_step.replayed, by_user.replayed])
        if number < 2:
            raise RuntimeError("after the write")

    assert dg.materialize([flaky], resources={"writer": keyed}).success
    assert numbers() == [0, 10]
    assert replays == [False, False, True, True, True, True]


def test_partitions_and_ranges_of_them(
    dataset: str, keyed: BigQueryWriter, numbers: Callable[..., list[int]]
) -> None:
    @dg.asset(
        partitions_def=dg.StaticPartitionsDefinition(["1", "2", "3"]),
        backfill_policy=dg.BackfillPolicy.single_run(),
    )
    def parted(context: dg.AssetExecutionContext, writer: BigQueryWriter) -> None:
        writer.append(rows(*map(int, context.partition_keys)), f"{dataset}.t")

    span = {"dagster/asset_partition_range_start": "2", "dagster/asset_partition_range_end": "3"}
    assert dg.materialize([parted], partition_key="1", resources={"writer": keyed}).success
    assert dg.materialize([parted], tags=span, resources={"writer": keyed}).success
    assert numbers() == [1, 2, 3]


def test_replacements_of_two_runs_and_of_the_first_again(
    dataset: str, keyed: BigQueryWriter, numbers: Callable[..., list[int]]
) -> None:
    @dg.asset
    def table(context: dg.AssetExecutionContext, writer: BigQueryWriter) -> None:
        writer.replace(rows(int(context.run.tags["number"])), f"{dataset}.t")

    for number in (1, 2, 1):
        tags = {"number": str(number)}
        assert dg.materialize([table], tags=tags, resources={"writer": keyed}).success
        assert numbers() == [number]


def test_a_thread_of_the_users_has_no_step(
    dataset: str, once: ExactlyOnceWriter, numbers: Callable[..., list[int]]
) -> None:
    errors: list[Exception] = []

    @dg.asset
    def threaded(writer: ExactlyOnceWriter) -> None:
        def write(key: str | None) -> None:
            try:
                writer.append(rows(1), f"{dataset}.t", key=key)
            except WriteKeyError as error:
                errors.append(error)

        for key in (None, f"{dataset} in a thread"):
            thread = threading.Thread(target=write, args=[key])
            thread.start()
            thread.join()

    assert dg.materialize([threaded], resources={"writer": once}).success
    [error] = errors
    assert 'pass key="..."' in str(error)
    assert numbers() == [1]


@pytest.mark.parametrize("mode", ["replace", "append"])
def test_outputs_that_the_io_manager_stores(
    dataset: str, keyed: BigQueryWriter, numbers: Callable[..., list[int]], mode: Any
) -> None:
    """Several of one step, in a step that is retried when the first of them is stored."""
    tries: list[int] = []

    @dg.multi_asset(
        outs={"a": dg.AssetOut(), "b": dg.AssetOut()}, retry_policy=dg.RetryPolicy(max_retries=1)
    )
    def both(context: dg.AssetExecutionContext) -> Iterator[dg.Output[pa.Table]]:
        tries.append(context.retry_number)
        yield dg.Output(rows(10 * len(tries)), "a")
        if context.retry_number == 0:
            raise RuntimeError("between its outputs")
        yield dg.Output(rows(10 * len(tries) + 1), "b")

    manager = BigQueryIOManager(writer=keyed, dataset=dataset, mode=mode)
    for expected in (([10], [21]), ([10, 30], [21, 41]) if mode == "append" else ([30], [41])):
        assert dg.materialize([both], resources={"io_manager": manager}).success
        assert (numbers("a"), numbers("b")) == expected


def test_outputs_that_share_a_table(
    dataset: str, keyed: BigQueryWriter, numbers: Callable[..., list[int]]
) -> None:
    shared = {"table": "t"}

    @dg.op(out={"one": dg.Out(metadata=shared), "two": dg.Out(metadata=shared)})
    def two_outputs() -> Iterator[dg.Output[pa.Table]]:
        yield dg.Output(rows(1), "one")
        yield dg.Output(rows(2), "two")

    @dg.op(out=dg.DynamicOut(metadata=shared))
    def dynamic() -> Iterator[dg.DynamicOutput[pa.Table]]:
        for number in (3, 4):
            yield dg.DynamicOutput(rows(number), f"n{number}")

    @dg.op(out=dg.DynamicOut(io_manager_key="memory"))
    def spread() -> Iterator[dg.DynamicOutput[int]]:
        for number in (5, 6):
            yield dg.DynamicOutput(number, f"n{number}")

    @dg.op(out=dg.Out(metadata=shared))
    def mapped(number: int) -> pa.Table:
        return rows(number)

    manager = BigQueryIOManager(writer=keyed, dataset=dataset, mode="append")

    @dg.job(resource_defs={"io_manager": manager, "memory": dg.mem_io_manager})
    def job() -> None:
        two_outputs()
        dynamic()
        spread().map(mapped)

    assert job.execute_in_process().success
    assert numbers() == [1, 2, 3, 4, 5, 6]
