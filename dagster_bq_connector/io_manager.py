"""`BigQueryIOManager`: what assets return becomes tables, and tables become what assets take."""

import types
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Union, get_args, get_origin

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
from dagster_bq_connector.read.rows import Rows
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


class BigQueryIOManager(dg.ConfigurableIOManager):
    """Stores what assets and ops return in tables, and loads tables for what they take.

    An asset's table is the last part of its key. Its dataset is the metadata `schema` of the
    asset, else `dataset`, else the part of the key before the last.

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
        """Refuse a writer that cannot do what `mode` asks, as soon as both are known."""
        super().model_post_init(context)
        self._check()

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Write what an asset or op returned.

        Raises:
            SchemaError: It holds no rows that can be written, or does not fit the table.
            PartitionError: A row belongs to another partition. Nothing was changed.
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
                f"Output {context.name!r} of a mapped step would replace those of the other "
                'steps: collect them first, or use mode="append".'
            )
        connected = Connected.to(self.writer.bigquery)
        table = connected.resolve(self._address(context, context))
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
            UnsupportedError: Its annotation is no form that rows can be given in.
            TableNotFoundError: The table does not exist: materialize the asset first.
            ConnectorError: As `BigQueryReader.read` raises them.
        """
        upstream = context.upstream_output
        if upstream is None:
            raise ConfigurationError(
                f"Input {context.name!r} comes from no asset or op, so its table is unknown."
            )
        form = _form(context)
        connected = Connected.to(self.writer.bigquery)
        table = connected.resolve(self._address(context, upstream))
        columns, where = _pushed_down(context)
        source: TableRef | RowSlice = table
        if context.has_asset_partitions:
            expression = (upstream.definition_metadata or {}).get("partition_expr")
            keys = list(context.asset_partition_keys)
            definition = context.asset_partitions_def
            partitions = AssetPartitions.of(table, definition, keys, expression)
            if keys:
                source = partitions.rows()
            else:  # a mapping may lead to no partition at all
                where = _no_row(connected, table)
        reader = BigQueryReader(bigquery=self.writer.bigquery)
        if form == "lazy":
            return reader.scan(source, columns, where)
        return _convert(reader.read(source, columns, where), form)

    def _check(self) -> None:
        writer: object = self.writer
        if isinstance(writer, BigQueryWriter) and self.mode == "replace" and not writer.replaces:
            raise ConfigurationError(
                f"{type(writer).__name__} cannot replace what is there, and mode is 'replace': "
                'use FileLoadsWriter, or mode="append".'
            )

    def _address(
        self, context: dg.OutputContext | dg.InputContext, output: dg.OutputContext
    ) -> str:
        metadata = output.definition_metadata or {}
        path = list(context.asset_key.path) if context.has_asset_key else []
        table = path[-1] if path else metadata.get("table") or output.name
        dataset = metadata.get("schema") or self.dataset or (path[-2] if len(path) > 1 else None)
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
        expression = (context.definition_metadata or {}).get("partition_expr")
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
    if context.has_asset_key:
        return f"Asset {context.asset_key.to_user_string()!r}"
    return f"Output {context.name!r}"


def _is_mapped(context: dg.OutputContext) -> bool:
    """Whether other steps, or outputs, of the same run write the same table."""
    try:
        return context.mapping_key is not None or context.step_key.endswith("]")
    except dg.DagsterInvariantViolationError:  # a context that somebody built, of no step
        return False


def _pushed_down(context: dg.InputContext) -> tuple[Sequence[str] | None, str | None]:
    """The columns and the filter that the metadata of an input ask for."""
    metadata = context.definition_metadata or {}
    columns, where = metadata.get("columns"), metadata.get("where")
    if columns is not None and (isinstance(columns, str) or not isinstance(columns, Sequence)):
        raise ConfigurationError(
            f"columns={columns!r} of input {context.name!r}: write a list of column names."
        )
    if where is not None and not isinstance(where, str):
        raise ConfigurationError(f"where={where!r} of input {context.name!r}: write SQL.")
    return columns, where


def _form(context: dg.InputContext) -> str:
    """The form that an input's annotation asks for."""
    kind: Any = context.dagster_type.typing_type
    if get_origin(kind) in (Union, types.UnionType):
        [kind, *_] = [part for part in get_args(kind) if part is not type(None)]
    kind = get_origin(kind) or kind
    if kind is Any or kind is pa.Table:
        return "arrow"
    if kind is pa.RecordBatchReader:
        return "reader"
    if kind is Rows:
        return "rows"
    if isinstance(kind, type) and (package := frame_package(kind)):
        return "lazy" if kind.__name__ == "LazyFrame" else package
    raise UnsupportedError(
        f"Input {context.name!r} is annotated {kind}, which no table can be loaded as: annotate "
        f"it {_FORMS}."
    )


def _no_row(connected: Connected, table: TableRef) -> str:
    """A filter that no row passes, and a table takes that requires one of its partitions."""
    every = every_row(partitioning_of(connected.admin.get(table)))
    return f"{every} AND FALSE" if every else "FALSE"


def _convert(rows: Rows, form: str) -> Any:
    if form == "pandas":
        return rows.to_pandas()
    if form == "polars":
        return rows.to_polars()
    if form == "reader":
        return rows.to_reader()
    return rows if form == "rows" else rows.to_arrow()
