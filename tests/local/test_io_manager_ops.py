"""The IO manager and ops that are no assets: their tables, and which of them are refused."""

from typing import Any

import dagster as dg
import polars as pl
import pyarrow as pa
import pytest

from dagster_bq_connector import (
    BigQueryIOManager,
    BigQueryReader,
    FileLoadsWriter,
)
from dagster_bq_connector.errors import ConfigurationError, UnsupportedError
from support.partitioned_assets import ids

COLUMNS = pa.table({"id": [1, 2, 3], "name": ["a", "b", "c"]})


@pytest.fixture
def io_manager(load_writer: FileLoadsWriter, dataset: str) -> BigQueryIOManager:
    return BigQueryIOManager(writer=load_writer, dataset=dataset)


def run(assets: list[Any], io_manager: BigQueryIOManager, **arguments: Any) -> Any:
    return dg.materialize(assets, resources={"io_manager": io_manager}, **arguments)


def test_ops_have_tables_too(
    io_manager: BigQueryIOManager, reader: BigQueryReader, dataset: str
) -> None:
    taken = []

    @dg.op(out={"numbers": dg.Out(metadata={"table": "by_name"}), "others": dg.Out()})
    def produce() -> Any:
        yield dg.Output(COLUMNS, "numbers")
        yield dg.Output(COLUMNS.slice(1), "others")

    @dg.op(ins={"numbers": dg.In(metadata={"columns": ["id"]})})
    def consume(numbers: pa.Table, others: pl.LazyFrame) -> None:
        taken.extend([numbers, others.collect()])

    @dg.job(resource_defs={"io_manager": io_manager})
    def both() -> None:
        consume(*produce())

    # `consume` returns None, which dagster does not hand to the IO manager.
    assert both.execute_in_process().success
    assert ids(reader.read(f"{dataset}.by_name").to_arrow()) == [1, 2, 3]
    assert taken[0].column_names == ["id"]
    assert ids(taken[1]) == [2, 3]


def test_an_op_output_without_a_name_has_no_table(
    io_manager: BigQueryIOManager, reader: BigQueryReader, dataset: str
) -> None:
    """All of them would share the table `result`, and with it the asset that has that name."""

    @dg.asset
    def result() -> pa.Table:
        return COLUMNS

    @dg.op
    def first() -> pa.Table:
        return COLUMNS.slice(1)

    @dg.op(out=dg.Out(io_manager_key="memory"))
    def elsewhere() -> pa.Table:
        return COLUMNS.slice(1)

    @dg.op
    def last(rows: pa.Table) -> pa.Table:
        return rows

    @dg.graph_asset
    def refused() -> pa.Table:
        return last(first())

    @dg.graph_asset
    def stored() -> pa.Table:
        return last(elsewhere())

    assert run([result], io_manager).success
    with pytest.raises(ConfigurationError, match=r"of op 'refused\.first' has no name of its own"):
        run([refused], io_manager)
    resources = {"io_manager": io_manager, "memory": dg.mem_io_manager}
    assert dg.materialize([stored], resources=resources).success
    assert ids(reader.read(f"{dataset}.stored").to_arrow()) == [2, 3]
    assert ids(reader.read(f"{dataset}.result").to_arrow()) == [1, 2, 3]


def test_outputs_that_would_share_a_table_are_refused(
    io_manager: BigQueryIOManager,
    reader: BigQueryReader,
    dataset: str,
    load_writer: FileLoadsWriter,
) -> None:
    @dg.op(out=dg.Out(metadata={"table": "shared"}))
    def one() -> pa.Table:
        return COLUMNS

    @dg.op(out={"shared": dg.Out()})
    def other() -> pa.Table:
        return COLUMNS

    @dg.op(out={"a": dg.Out(), "b": dg.Out(metadata={"table": "a"})})
    def both() -> tuple[pa.Table, pa.Table]:
        return COLUMNS, COLUMNS

    @dg.op(out=dg.Out(metadata={"table": "shared"}))
    def stores_nothing() -> None: ...

    def job_of(*ops: Any, by: BigQueryIOManager = io_manager) -> dg.JobDefinition:
        @dg.job(resource_defs={"io_manager": by})
        def job() -> None:
            for op in ops:
                op()

        return job

    for ops in ([one, other], [one.alias("x"), one.alias("y")], [both]):
        with pytest.raises(ConfigurationError, match="would replace each other"):
            job_of(*ops).execute_in_process()
    assert job_of(one.alias("x"), stores_nothing).execute_in_process().success
    adding = BigQueryIOManager(writer=load_writer, dataset=dataset, mode="append")
    assert job_of(one, other, by=adding).execute_in_process().success
    assert ids(reader.read(f"{dataset}.shared").to_arrow()) == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_what_fans_in_comes_as_a_list(io_manager: BigQueryIOManager) -> None:
    taken: dict[str, list[Any]] = {}

    @dg.op(out={"one": dg.Out()})
    def one() -> pa.Table:
        return COLUMNS

    @dg.op(out={"two": dg.Out()})
    def two() -> pa.Table:
        return COLUMNS.slice(1)

    @dg.op
    def frames(rows: list[pl.DataFrame]) -> None:
        taken["frames"] = rows

    @dg.op
    def tables(rows: list) -> None:
        taken["tables"] = rows

    @dg.op
    def numbers(rows: list[int]) -> None: ...

    def job_of(consumer: dg.OpDefinition) -> dg.JobDefinition:
        @dg.job(resource_defs={"io_manager": io_manager})
        def job() -> None:
            consumer([one(), two()])

        return job

    for consumer, form in ((frames, pl.DataFrame), (tables, pa.Table)):
        assert job_of(consumer).execute_in_process().success
        rows = taken[consumer.name]
        assert [type(part) for part in rows] == [form, form]
        assert [ids(part) for part in rows] == [[1, 2, 3], [2, 3]]
    with pytest.raises(UnsupportedError, match="'rows' is annotated <class 'int'>"):
        job_of(numbers).execute_in_process()


def test_mapped_steps_share_a_table(
    io_manager: BigQueryIOManager,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
    dataset: str,
) -> None:
    """They would replace each other; and of what they append, each would be given all."""

    @dg.op(out=dg.DynamicOut(io_manager_key="memory"))
    def spread() -> Any:
        yield dg.DynamicOutput(1, mapping_key="one")
        yield dg.DynamicOutput(2, mapping_key="two")

    @dg.op(out={"pieces": dg.DynamicOut()})
    def spread_rows() -> Any:
        yield dg.DynamicOutput(COLUMNS, mapping_key="one", output_name="pieces")
        yield dg.DynamicOutput(COLUMNS, mapping_key="two", output_name="pieces")

    @dg.op(out={"mapped": dg.Out()})
    def each(number: int) -> pa.Table:
        return COLUMNS

    @dg.op
    def take(rows: pa.Table) -> None: ...

    @dg.op
    def take_all(rows: list[pa.Table]) -> None: ...

    def stored() -> None:
        spread().map(each)

    def collected() -> None:
        take_all(spread().map(each).collect())

    def chained() -> None:
        spread().map(lambda number: take(each(number)))

    def dynamic() -> None:
        spread_rows().map(take)

    def execute(graph: Any, by: BigQueryIOManager) -> None:
        resources = {"io_manager": by, "memory": dg.mem_io_manager}
        dg.job(resource_defs=resources)(graph).execute_in_process()

    adding = BigQueryIOManager(writer=load_writer, dataset=dataset, mode="append")
    for graph in (stored, dynamic):
        with pytest.raises(UnsupportedError, match="would replace the rows of the other mapping"):
            execute(graph, io_manager)
    execute(stored, adding)
    assert ids(reader.read(f"{dataset}.mapped").to_arrow()) == [1, 1, 2, 2, 3, 3]
    for graph in (collected, chained, dynamic):
        with pytest.raises(UnsupportedError, match="would get the rows of all mapping keys"):
            execute(graph, adding)
