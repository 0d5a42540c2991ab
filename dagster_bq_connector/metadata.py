"""Results become Dagster metadata, runs become job labels."""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TypeAlias

import dagster as dg
from dagster import DagsterInvariantViolationError
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.cdc.stream import Drained
from dagster_bq_connector.progress import Log
from dagster_bq_connector.schema.types import type_name
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.write.result import WriteResult

Context: TypeAlias = dg.AssetExecutionContext | dg.OpExecutionContext

MAX_LABEL = 63  # characters of a label's value, as BigQuery limits them
DIGEST = 8


class MaterializedWrite(WriteResult):
    """A `WriteResult` that knows Dagster."""

    @classmethod
    def of(cls, result: WriteResult) -> MaterializedWrite:
        """The same result."""
        return cls(**vars(result))

    def to_metadata(self) -> dict[str, Any]:
        """Dagster's standard metadata of a table, and what the write did.

        `dagster/partition_row_count` stands for a write of one partition,
        `dagster/row_count` for one that has no partitions; of several partitions each has its own
        (see `to_materialize_result`), and the totals are called `dagster_bq/run_rows` and so on.
        """
        table, several = self.table, len(self.partitions) > 1
        scope = "run_" if several else ""
        metadata: dict[str, Any] = {
            **_address(table),
            "dagster_bq/operation": self.operation,
            "dagster_bq/write_method": self.method,
            f"dagster_bq/{scope}rows": self.rows,
            f"dagster_bq/{scope}bytes": self.bytes,
        }
        if self.columns:  # a long write that was not given rows has not looked them up
            metadata["dagster/column_schema"] = table_schema(self.columns)
        if self.jobs:
            metadata[f"dagster_bq/{scope}jobs"] = list(self.jobs)
        if self.streams:
            metadata[f"dagster_bq/{scope}streams"] = list(self.streams)
        if self.replayed:
            metadata["dagster_bq/replayed"] = True
        if not several:
            count = "partition_row_count" if self.partitions else "row_count"
            metadata[f"dagster/{count}"] = self.rows
        return metadata

    def to_materialize_result(self, **arguments: Any) -> dg.MaterializeResult[Any]:
        """What an asset returns.

        In a run of several partitions, each partition's materialization is given its own row count.

        Args:
            arguments: Further arguments of `dg.MaterializeResult`; `metadata` among them is added
                to the standard one.
        """
        self.report_partitions(arguments.get("asset_key"))
        metadata = self.to_metadata() | dict(arguments.pop("metadata", None) or {})
        return dg.MaterializeResult[Any](metadata=metadata, **arguments)

    def report_partitions(self, asset_key: Any = None) -> None:
        """Give each of several partitions of the run its own row count.

        Args:
            asset_key: The asset, when the run's step has several.
        """
        context = run_context()
        if not isinstance(context, dg.AssetExecutionContext) or len(self.partitions) < 2:
            return
        if context.has_partition_key_range and set(self.partitions) <= set(context.partition_keys):
            for key, rows in self.partitions.items():
                context.add_asset_metadata(
                    {"dagster/partition_row_count": rows, "dagster_bq/rows": rows},
                    asset_key=asset_key,
                    partition_key=key,
                )


def drained_metadata(
    stream: str, table: str, destination: TableRef, drained: Drained
) -> dict[str, Any]:
    """What a run of a change stream did to one of its tables, and where the stream stands.

    Args:
        stream: The stream's name.
        table: The source's table.
        destination: The table.
        drained: What the run did.
    """
    parts = [applied.tables[table] for applied in drained.applied if table in applied.tables]
    sequences = [each for each in drained.applied if each.first_sequence and each.last_sequence]
    metadata: dict[str, Any] = {
        **_address(destination),
        "dagster_bq/stream": stream,
        "dagster_bq/upserts": sum(part.upserts for part in parts),
        "dagster_bq/deletes": sum(part.deletes for part in parts),
        "dagster_bq/superseded": sum(part.superseded for part in parts),
        "dagster_bq/failed": sum(part.failed for part in parts),
        "dagster_bq/bytes": sum(part.bytes for part in parts),
        "dagster_bq/messages": sum(applied.messages for applied in drained.applied),
        "dagster_bq/plans": len(drained.plans),
        "dagster_bq/start": dg.MetadataValue.json(drained.start or {}),
        "dagster_bq/stop": dg.MetadataValue.json(drained.stop or {}),
    }
    if (lag := drained.lag) is not None:
        waited = (datetime.now(UTC) - lag.oldest).total_seconds() if lag.oldest else 0.0
        metadata |= {"dagster_bq/lag": lag.changes, "dagster_bq/lag_seconds": waited}
    if sequences:
        metadata["dagster_bq/first_sequence"] = min(str(each.first_sequence) for each in sequences)
        metadata["dagster_bq/last_sequence"] = max(str(each.last_sequence) for each in sequences)
    if others := sum((applied.others for applied in drained.applied), Counter[str]()):
        metadata["dagster_bq/other_tables"] = dict(others)
    if drained.replayed:
        metadata["dagster_bq/replayed"] = True
    if parts and parts[-1].columns:
        metadata["dagster/column_schema"] = table_schema(parts[-1].columns)
    return metadata


def _address(table: TableRef) -> dict[str, Any]:
    return {
        "dagster/table_name": str(table),
        "dagster/uri": f"bigquery://{table.project}/{table.dataset}/{table.table}",
    }


def table_schema(columns: Any) -> dg.TableSchema:
    """BigQuery columns as Dagster shows them."""
    return dg.TableSchema(
        columns=[
            dg.TableColumn(
                name=column.name,
                type=_type_text(column),
                description=column.description,
                constraints=dg.TableColumnConstraints(nullable=column.mode != "REQUIRED"),
            )
            for column in columns
        ]
    )


def _type_text(column: SchemaField) -> str:
    text = type_name(column)
    if text == "RECORD":
        inner = ", ".join(f"{child.name} {_type_text(child)}" for child in column.fields)
        text = f"STRUCT<{inner}>"
    return f"ARRAY<{text}>" if column.mode == "REPEATED" else text


def run_context() -> Context | None:
    """The context of the step that runs in this thread; None outside of one."""
    try:
        return dg.AssetExecutionContext.get()
    except DagsterInvariantViolationError:
        return None


def log() -> Log | None:
    """Where progress goes: the log of the run, when there is one."""
    context = run_context()
    return context.log.info if context else None


def warn() -> Log:
    """Where warnings go: the log of the run, else Python's."""
    context = run_context()
    return context.log.warning if context else logging.getLogger("dagster_bq_connector").warning


def job_labels(context: Context | None) -> Mapping[str, str]:
    """The labels of a job that a run starts: run, job, asset and partition.

    Each value is encoded by `label_value`.
    """
    if context is None:
        return {}
    labels = {"dagster_run_id": context.run.run_id, "dagster_job": context.job_name}
    if context.has_assets_def and len(keys := context.selected_asset_keys) == 1:
        labels["dagster_asset"] = next(iter(keys)).to_user_string()
    if context.has_partition_key:
        labels["dagster_partition"] = context.partition_key
    elif context.has_partition_key_range:
        span = context.partition_key_range
        labels["dagster_partition"] = f"{span.start}_to_{span.end}"
    return {key: label_value(value) for key, value in labels.items()}


def label_value(text: str) -> str:
    """Any text as the value of a BigQuery label.

    Lower-case; `/` becomes `__`; whatever else a label does not take becomes `_`. A text that is
    changed by more than that, or longer than 63 characters, ends in `-` and the first 8
    hexadecimal digits of the SHA-256 of the original, so that different texts stay different.
    """
    plain = text.lower().replace("/", "__")
    clean = re.sub(r"[^\w-]", "_", plain)
    if clean == plain and len(clean) <= MAX_LABEL:
        return clean
    digest = hashlib.sha256(text.encode()).hexdigest()[:DIGEST]
    return f"{clean[: MAX_LABEL - DIGEST - 1]}-{digest}"
