"""The table that changes go to: created, verified or reconciled before the first of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from google.cloud import bigquery
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.cdc.table import CdcTable
from dagster_bq_connector.errors import (
    ConfigurationError,
    TableMismatchError,
    TableNotFoundError,
    UnsupportedError,
)
from dagster_bq_connector.schema.types import type_name
from dagster_bq_connector.table.admin import CDC_LABEL, READ_ONLY, EnsuredTable, TableAdmin, ensured
from dagster_bq_connector.table.evolution import with_columns
from dagster_bq_connector.table.literals import quoted, table_sql
from dagster_bq_connector.table.options import MAX_CLUSTERING, TableOptions
from dagster_bq_connector.table.ref import TableRef

# What BigQuery's documentation lists as types of columns to cluster by.
_CLUSTERED = frozenset(
    ("BIGNUMERIC", "BOOLEAN", "DATE", "DATETIME", "INTEGER", "NUMERIC", "STRING", "TIMESTAMP")
)
# An IntervalValue, as `0-0 0 0:10:0`: years, months, days, and a time.
_INTERVAL = re.compile(r"0-0 (\d+) (\d+):(\d+):(\d+)(?:\.\d+)?")


@dataclass(frozen=True)
class Contracted:
    """A table that takes changes.

    Attributes:
        table: The table.
        key: Its primary key, as it spells it.
    """

    table: EnsuredTable
    key: tuple[str, ...]


def ensure(
    admin: TableAdmin,
    ref: TableRef,
    cdc: CdcTable,
    message_key: Sequence[str],
    columns: Sequence[SchemaField],
) -> Contracted:
    """The table, as it was asked for.

    Args:
        admin: Looks it up and changes it.
        ref: Its address.
        cdc: What is asked for.
        message_key: The fields of the first message's key.
        columns: The columns that the messages' schemas have; empty when they carry none.

    Raises:
        TableMismatchError: It has no primary key, or differs in what may not be changed.
        TableNotFoundError: It is missing, and its columns are not known.
        UnsupportedError: It is no table.
        ConfigurationError: The primary key is none of its columns.
    """
    try:
        there = admin.get(ref)
    except TableNotFoundError as error:
        new = _new_table(ref, cdc, message_key, columns, error)
        there = new if admin.create(new) else admin.get(ref)
    return verify(admin, ref, cdc, there)


def _new_table(
    ref: TableRef,
    cdc: CdcTable,
    message_key: Sequence[str],
    columns: Sequence[SchemaField],
    error: TableNotFoundError,
) -> bigquery.Table:
    columns = with_columns(cdc.schema, columns)
    if not columns:
        raise TableNotFoundError(
            f"Table {ref} does not exist, and the messages carry no schemas to create it from: "
            "create it with a primary key, set CdcTable(schema=...), or set "
            "value.converter.schemas.enable=true on the connector."
        ) from error
    known = {column.name.casefold(): column for column in columns}
    wanted = tuple(cdc.primary_key) or tuple(message_key)
    if lacking := [name for name in wanted if name.casefold() not in known]:
        raise ConfigurationError(
            f"Table {ref} cannot be created with the primary key {_listed(wanted)}: neither its "
            f"schema nor the messages have {_listed(lacking)}."
        )
    key = [known[name.casefold()] for name in wanted]
    clustered = [column.name for column in key if type_name(column) in _CLUSTERED]
    chosen = clustered[:MAX_CLUSTERING] if cdc.clustering is None else cdc.clustering
    options = TableOptions(
        partitioning=cdc.partitioning,
        clustering=tuple(chosen),
        primary_key=tuple(column.name for column in key),
    )
    table = bigquery.Table(ref.to_api(), schema=columns)
    options.apply(table)
    table.labels = {CDC_LABEL: "true"}  # which a replacement of its rows is refused by
    if cdc.max_staleness:
        table.max_staleness = interval(cdc.max_staleness)
    return table


def verify(admin: TableAdmin, ref: TableRef, cdc: CdcTable, table: bigquery.Table) -> Contracted:
    """Check a table against what is asked for, and change what may be; see `ensure`."""
    if table.table_type in READ_ONLY:
        kind = table.table_type.lower().replace("_", " ")
        raise UnsupportedError(f"{ref} is a {kind}: changes are applied to a table.")
    constraints = table.table_constraints
    key = tuple(constraints.primary_key.columns) if constraints and constraints.primary_key else ()
    if not key:
        raise TableMismatchError(_without_key(ref, cdc))
    drifts, mendable = _drifts(cdc, table, key), _mendable(cdc, table, key)
    if drifts or (mendable and not cdc.reconcile):
        texts = "; ".join([*drifts, *mendable])
        remedy = "Change the table or what is asked for"
        if mendable and not cdc.reconcile:
            remedy += ", or set CdcTable(reconcile=True), which changes clustering and staleness"
        if drifts:
            remedy += ". BigQuery cannot change a primary key or partitioning in place"
        raise TableMismatchError(f"Table {ref} is not as the stream asks for: {texts}. {remedy}.")
    if mendable or (cdc.reconcile and CDC_LABEL not in table.labels):
        table = admin.change(ref, lambda found: _reconcile(cdc, found, key))
    return Contracted(ensured(ref, table, table.modified), key)


def _without_key(ref: TableRef, cdc: CdcTable) -> str:
    columns = ", ".join(map(quoted, cdc.primary_key)) or "..."
    return (
        f"Table {ref} has no primary key, without which BigQuery would append every change as a "
        f"row of its own. Nothing was sent. If no two rows of it have the same key, run: ALTER "
        f"TABLE {table_sql(ref)} ADD PRIMARY KEY ({columns}) NOT ENFORCED"
    )


def _drifts(cdc: CdcTable, table: bigquery.Table, key: Sequence[str]) -> list[str]:
    """What differs and cannot be changed in place."""
    found = TableOptions(partitioning=cdc.partitioning).differences(table)
    if cdc.primary_key and _folded(cdc.primary_key) != _folded(key):
        asked = f"asked for {_listed(cdc.primary_key)}, the table has {_listed(key)}"
        found.append(f"primary key: {asked}")
    return found


def _mendable(cdc: CdcTable, table: bigquery.Table, key: Sequence[str]) -> list[str]:
    """What differs and can be changed in place."""
    clustering = tuple(_clustering(cdc, table, key))
    found = TableOptions(clustering=clustering).differences(table)
    if cdc.max_staleness is not None and (has := _staleness(table)) != cdc.max_staleness:
        text = "none" if has == timedelta(0) else has
        found.append(f"max_staleness: asked for {cdc.max_staleness}, the table has {text}")
    return found


def _reconcile(cdc: CdcTable, table: bigquery.Table, key: Sequence[str]) -> list[str]:
    """Change what can be changed; gives the names of what was."""
    changed: list[str] = []
    clustering = _clustering(cdc, table, key)
    if TableOptions(clustering=tuple(clustering)).differences(table):
        table.clustering_fields = list(clustering)
        changed.append("clustering_fields")
    if cdc.max_staleness is not None and _staleness(table) != cdc.max_staleness:
        table.max_staleness = interval(cdc.max_staleness) if cdc.max_staleness else None
        changed.append("max_staleness")
    if CDC_LABEL not in table.labels:
        table.labels = {**table.labels, CDC_LABEL: "true"}
        changed.append("labels")
    return changed


def _clustering(cdc: CdcTable, table: bigquery.Table, key: Sequence[str]) -> Sequence[str]:
    """What the table is to be clustered by; nothing when that is left as it is."""
    if cdc.clustering is not None:
        return cdc.clustering
    types = {column.name.casefold(): type_name(column) for column in table.schema}
    names = [name for name in key if types.get(name.casefold()) in _CLUSTERED]
    return names[:MAX_CLUSTERING]


def interval(time: timedelta) -> str:
    """A time as the REST API writes it: years-months days hours:minutes:seconds."""
    minutes, seconds = divmod(time.seconds, 60)
    return f"0-0 {time.days} {minutes // 60}:{minutes % 60}:{seconds}"


def _staleness(table: bigquery.Table) -> timedelta | str:
    """A table's max_staleness; zero when it has none, its text when that is no plain time."""
    text = table.max_staleness
    if not text:
        return timedelta(0)
    if not (found := _INTERVAL.fullmatch(text)):
        return str(text)
    days, hours, minutes, seconds = map(int, found.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)


def _folded(names: Sequence[str]) -> set[str]:
    return {name.casefold() for name in names}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
