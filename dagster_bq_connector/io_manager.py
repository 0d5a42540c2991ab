"""`BigQueryIOManager`: what assets return becomes tables, and tables become what assets take."""

import types
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Union, cast, get_args, get_origin

import dagster as dg
import pyarrow as pa
from pydantic import Field

from dagster_bq_connector.asset_slices import AssetPartitions, fits
from dagster_bq_connector.errors import (
    ConfigurationError,
    DatasetNotFoundError,
    SchemaError,
    TableNotFoundError,
    UnsupportedError,
)
from dagster_bq_connector.metadata import MaterializedWrite
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.read.rows import Rows
from dagster_bq_connector.read.session import ReadSession
from dagster_bq_connector.read.stream import StreamReader
from dagster_bq_connector.resources import STRICT, BigQueryReader, Connected
from dagster_bq_connector.schema.data import open_data
from dagster_bq_connector.schema.frames import frame_package
from dagster_bq_connector.schema.types import table_fields
from dagster_bq_connector.table.options import Evolution, TableOptions, partitioning_of
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.table.row_slice import RowSlice, every_row
from dagster_bq_connector.table.slice import TableSlice
from dagster_bq_connector.write_keys import writing_output
from dagster_bq_connector.writers import BigQueryWriter

_FORMS = (
    "pyarrow.Table, pyarrow.RecordBatchReader, polars.DataFrame, polars.LazyFrame or "
    "pandas.DataFrame"
)
_ELSEWHERE = (
    'give the mapped output another IO manager, dg.Out(io_manager_key="..."), and let the op '
    "that collects them return all the rows."
)
# What Dagster calls an output that nobody named.
DEFAULT_OUTPUT = "result"


class BigQueryIOManager(dg.ConfigurableIOManager):
    """Stores what assets and ops return in tables, and loads tables for what they take.

    An asset's table is the last part of its key. Its dataset is the metadata `schema` of the
    asset, else `dataset`, else the part of the key before the last. An op's output that is no
    asset has the table that its metadata `table` says, else that of its name; one with neither is
    refused, since all such would share the table `result`.

    Outputs may be whatever a writer takes. Inputs come as their annotation says: a
    `pyarrow.Table` (also without annotation), a `pyarrow.RecordBatchReader`, `Rows`, a Polars
    `DataFrame` or `LazyFrame`, or a pandas `DataFrame` with Arrow types.

    Metadata of an asset: `schema` is its dataset (or `project.dataset`); `partition_expr` is the
    column, or SQL expression, that says which partition a row belongs to (of a multi-partitioned
    asset, one for each dimension by name). Metadata of an input (`AssetIn`, `In`): `columns` are
    those to read, `where` is a filter in SQL; both are evaluated by BigQuery.

    A partition of an asset is replaced alone and at once: as a partition of the table when it is
    one, and otherwise by one transaction. Rows that belong to another partition are refused.

    Example:
        ```python
        io_manager = BigQueryIOManager(
            writer=FileLoadsWriter(bigquery=bigquery, staging="gs://my-staging/dagster"),
            dataset="shop",
        )
        ```
    """

    model_config = STRICT

    writer: dg.ResourceDependency[BigQueryWriter]
    dataset: str | None = Field(
        default=None, description="The dataset of assets whose metadata and key name none."
    )
    mode: Literal["replace", "append"] = Field(
        default="replace",
        description="Whether an output takes the place of the rows that are there, or is added.",
    )
    evolution: Evolution = Field(
        default="none",
        description='Whether columns that a table lacks are added to it ("add") or refused.',
    )

    def model_post_init(self, context: Any, /) -> None:
        """Refuse what is no writer, or cannot do what `mode` asks, as soon as both are known."""
        super().model_post_init(context)
        self._check()

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Write what an asset or op returned.

        Raises:
            ConfigurationError: It has no table of its own, or no dataset.
            SchemaError: It holds no rows that can be written, or does not fit the table.
            PartitionError: A row belongs to another partition; it says what was written.
            ConnectorError: As `BigQueryWriter.replace` and `append` raise them.
        """
        self._check()
        if obj is None:
            raise SchemaError(
                f"{_name(context)} returned None, which is no rows: return a frame or table, or "
                "annotate it `-> None` when it stores nothing."
            )
        if _is_mapped(context) and self.mode == "replace":
            raise UnsupportedError(
                f"{_name(context)} would replace the rows of the other mapping keys, which have "
                f'the same table: {_ELSEWHERE} When no op takes them, mode="append" keeps all.'
            )
        address = self._address(context, context)
        if self.mode == "replace" and (other := _sharer(context)):
            raise ConfigurationError(
                f"{_name(context)} and {other} would replace each other in {address}: give each "
                'its own metadata={"table": ...} or name.'
            )
        connected = Connected.to(self.writer.bigquery)
        table = connected.resolve(address)
        batches = open_data(obj)
        destination = self._destination(connected, context, table, batches.schema)
        layout = None if isinstance(destination, TableRef) else destination.options
        options = replace(layout or TableOptions(), evolution=self.evolution)
        write = self.writer.replace if self.mode == "replace" else self.writer.append
        with writing_output(context.name, context.mapping_key):
            result = write(batches, destination, options)
        self._report(context, result)

    def load_input(self, context: dg.InputContext) -> Any:
        """Read what an asset or op takes.

        Raises:
            UnsupportedError: Its annotation is no form that rows can be given in, or it comes
                from a mapped step or a dynamic output, which have no table of their own.
            TableNotFoundError: The table does not exist: materialize the asset first. Of no
                partition it is empty and without columns instead.
            ConnectorError: As `BigQueryReader.read` raises them.
        """
        self._check()
        upstream = context.upstream_output
        if upstream is None:
            raise ConfigurationError(
                f"{_input_name(context)} comes from no asset or op, so its table is unknown."
            )
        if _is_mapped(upstream):
            raise UnsupportedError(
                f"{_input_name(context)} would get the rows of all mapping keys of one run and "
                f"of those before, which have the same table: {_ELSEWHERE}"
            )
        form = _form(context)
        connected = Connected.to(self.writer.bigquery)
        table = connected.resolve(self._address(context, upstream))
        columns, where = _pushed_down(context)
        source: TableRef | RowSlice = table
        if context.has_asset_partitions:
            expression = _said(upstream.definition_metadata, "partition_expr")
            keys = list(context.asset_partition_keys)
            definition = context.asset_partitions_def
            partitions = AssetPartitions.of(table, definition, keys, expression)
            if keys:
                source = partitions.rows()
            else:  # a mapping may lead to no partition at all
                try:
                    where = _no_row(connected, table)
                except (TableNotFoundError, DatasetNotFoundError):
                    return _nothing(form)
        reader = BigQueryReader(bigquery=self.writer.bigquery)
        if form == "lazy":
            return reader.scan(source, columns, where)
        return _convert(reader.read(source, columns, where), form)

    def _check(self) -> None:
        writer: Any = cast(Any, self.writer)  # or what was passed instead
        if isinstance(writer, dg.ResourceDefinition):  # a function: a run shows what it returns
            return
        # One that is configured at launch knows its class.
        kind: type = getattr(writer, "resource_cls", type(writer))
        if not issubclass(kind, BigQueryWriter):
            given = "it has none" if writer is None else f"{kind.__name__} is none"
            raise ConfigurationError(
                f"BigQueryIOManager needs a writer, and {given}: pass writer=FileLoadsWriter(...) "
                'or, with mode="append", DefaultStreamWriter(...).'
            )
        if self.mode == "replace" and not kind.replaces:
            raise ConfigurationError(
                f"{kind.__name__} cannot replace what is there, and mode is 'replace': "
                'use FileLoadsWriter, or mode="append".'
            )

    def _address(
        self, context: dg.OutputContext | dg.InputContext, output: dg.OutputContext
    ) -> str:
        path = list(context.asset_key.path) if context.has_asset_key else []
        table = path[-1] if path else _op_table(output)
        dataset = _text(output, "schema") or self.dataset or (path[-2] if len(path) > 1 else None)
        if not dataset:
            raise ConfigurationError(
                f"{_name(context)} has no dataset: set `dataset` on the IO manager, "
                'metadata={"schema": "my_dataset"} on it, or a key_prefix on the asset.'
            )
        return f"{dataset}.{table}"

    def _destination(
        self, connected: Connected, context: dg.OutputContext, table: TableRef, schema: pa.Schema
    ) -> TableRef | TableSlice | RowSlice:
        """Partitions of the table when they are such; otherwise rows of it."""
        if not context.has_asset_partitions:
            return table
        expression = _said(context.definition_metadata, "partition_expr")
        definition, keys = context.asset_partitions_def, context.asset_partition_keys
        partitions = AssetPartitions.of(table, definition, keys, expression)
        whole = partitions.partitions()
        try:
            there = connected.admin.get(table)
        except (TableNotFoundError, DatasetNotFoundError):
            layout = partitions.layout(columns := table_fields(schema))
            if whole is not None and layout is not None and fits(whole, columns):
                return whole
            return partitions.rows(TableOptions(layout))
        if whole is not None and whole.is_partitions_of(there):
            return whole
        return partitions.rows()

    def _report(self, context: dg.OutputContext, result: MaterializedWrite) -> None:
        """Add the metadata of a write, but for what the asset said itself."""
        said = set(context.output_metadata or {})
        found = {key: value for key, value in result.to_metadata().items() if key not in said}
        context.add_output_metadata(found)
        if context.has_asset_key:
            result.report_partitions(context.asset_key)


def _name(context: dg.OutputContext | dg.InputContext) -> str:
    """What is stored or loaded, for messages."""
    if context.has_asset_key:
        return f"Asset {context.asset_key.to_user_string()!r}"
    if isinstance(context, dg.InputContext):
        return _input_name(context)
    name, step = _known(context, "name"), _known(context, "step_key")
    return (f"Output {name!r}" if name else "The output") + (f" of op {step!r}" if step else "")


def _input_name(context: dg.InputContext) -> str:
    """An input, for messages; an asset that is loaded outside of a run has no input."""
    if context.has_input_name:
        return f"Input {context.name!r}"
    return _name(context) if context.has_asset_key else "The input"


def _known(context: dg.OutputContext | dg.InputContext, attribute: str) -> Any:
    """An attribute of a context; None in one that somebody built without it."""
    try:
        return getattr(context, attribute)
    except dg.DagsterInvariantViolationError:
        return None


def _op_table(output: dg.OutputContext) -> str:
    """The table of an op's output that is no asset."""
    table, name = _text(output, "table"), _known(output, "name")
    if table is None and name in (None, DEFAULT_OUTPUT):
        raise ConfigurationError(
            f"{_name(output)} has no name of its own, so that every such output would be the "
            f'table {DEFAULT_OUTPUT!r}: set dg.Out(metadata={{"table": "my_table"}}) or '
            'out={"my_table": dg.Out()}; or, as for the inner ops of a graph asset, '
            'dg.Out(io_manager_key="...") of another IO manager.'
        )
    return table or name


def _sharer(context: dg.OutputContext) -> str | None:
    """Another output of an op of the same job that has the same table."""
    step = _known(context, "step_context")
    if step is None or context.has_asset_key:
        return None
    own = _place(step.op_def.output_def_named(context.name))
    for other in step.execution_plan.steps:
        for output in other.step_outputs:
            if output.asset_key or (other.key, output.name) == (context.step_key, context.name):
                continue
            node = step.job_def.get_node(other.node_handle)
            definition = node.output_def_named(output.name)
            if not definition.dagster_type.is_nothing and _place(definition) == own:
                return f"{output.name!r} of op {other.key!r}"
    return None


def _place(definition: Any) -> tuple[object, ...]:
    """Where an output of an op is stored."""
    table, dataset = (_said(definition.metadata, key) for key in ("table", "schema"))
    return definition.io_manager_key, dataset, table or definition.name


def _is_mapped(context: dg.OutputContext) -> bool:
    """Whether other steps, or outputs, of the same run write the same table."""
    return context.mapping_key is not None or (_known(context, "step_key") or "").endswith("]")


def _pushed_down(context: dg.InputContext) -> tuple[Sequence[str] | None, str | None]:
    """The columns and the filter that the metadata of an input ask for."""
    columns = _said(context.definition_metadata, "columns")
    listed = isinstance(columns, Sequence) and not isinstance(columns, str)
    if columns is not None and not (listed and all(isinstance(name, str) for name in columns)):
        raise ConfigurationError(
            f"{_input_name(context)} has the metadata columns={columns!r}: write a list of column "
            "names."
        )
    return columns, _text(context, "where")


def _text(context: dg.OutputContext | dg.InputContext, key: str) -> str | None:
    """An entry of the metadata that is text."""
    value = _said(context.definition_metadata, key)
    if value is None or isinstance(value, str):
        return value
    owner = _input_name(context) if isinstance(context, dg.InputContext) else _name(context)
    raise ConfigurationError(f"{owner} has the metadata {key}={value!r}: write it as text.")


def _said(metadata: Mapping[str, Any] | None, key: str) -> Any:
    """An entry of metadata, also of one that was given as a `MetadataValue`."""
    value = (metadata or {}).get(key)
    return value.value if isinstance(value, dg.MetadataValue) else value


def _form(context: dg.InputContext) -> str:
    """The form that an input's annotation asks for; of a list, that of its items."""
    declared = _known(context, "dagster_type")
    kind: Any = declared.typing_type if declared else Any
    if get_origin(kind) is list and context.has_input_name:  # what fans in is loaded one by one
        [kind] = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        [kind, *_] = [part for part in get_args(kind) if part is not type(None)]
    kind = get_origin(kind) or kind
    if kind in (Any, object, pa.Table):
        return "arrow"
    if kind is pa.RecordBatchReader:
        return "reader"
    if kind is Rows:
        return "rows"
    if isinstance(kind, type) and (package := frame_package(kind)):
        return "lazy" if kind.__name__ == "LazyFrame" else package
    raise UnsupportedError(
        f"{_input_name(context)} is annotated {kind}, which no table can be loaded as: annotate "
        f"it {_FORMS}."
    )


def _no_row(connected: Connected, table: TableRef) -> str:
    """A filter that no row passes, and a table takes that requires one of its partitions."""
    every = every_row(partitioning_of(connected.admin.get(table)))
    return f"{every} AND FALSE" if every else "FALSE"


def _nothing(form: str) -> Any:
    """No rows, nor columns: what an asset that takes itself gets before its table is there."""
    if form == "lazy":
        import polars as pl

        return pl.LazyFrame()
    schema = pa.schema([])
    session = ReadSession("", (), schema, schema, 0)
    return _convert(Rows([session], _no_stream, lambda: Progress("reading")), form)


def _no_stream(stream: str) -> StreamReader:
    raise AssertionError(f"{stream} is of no session")


def _convert(rows: Rows, form: str) -> Any:
    if form == "pandas":
        return rows.to_pandas()
    if form == "polars":
        return rows.to_polars()
    if form == "reader":
        return rows.to_reader()
    return rows if form == "rows" else rows.to_arrow()
