"""`table$20260801`: one partition of a table, as a name of rows.

Whatever stands behind a `$` is a partition id or an error: no table gets a name with one.

Seams, all looked up by upstream through their module: `tables.columns` and `tables.annotate` (a
load asks and says what it knows of its destination), `tables.get`, `tables.delete`,
`tabledata.list_rows` (a query job's result is read back from its destination), `copy.decorated` (a
copy's source), `ddl._partitioning` (upstream takes RANGE_BUCKET for a partition a day) and
`information_schema._partitions`. destinations.py writes.
"""

import datetime
import re
from dataclasses import dataclass
from typing import Any

from sqlglot import exp

from dagster_bq_connector.local import catalog
from dagster_bq_connector.local.upstream import (
    BigQueryError,
    Reference,
    copy,
    database,
    ddl,
    information_schema,
    names,
    results,
    tabledata,
    tables,
)

FORMATS: dict[str, str] = information_schema.PARTITION_FORMATS
NULL = "__NULL__"
SUMMARY = "__PARTITIONS_SUMMARY__"  # what `Client.list_partitions` reads
SUMMARY_COLUMNS = {
    "project_id": "STRING",
    "dataset_id": "STRING",
    "table_id": "STRING",
    "partition_id": "STRING",
}
_list_rows, _decorated = tabledata.list_rows, copy.decorated
_partitioning = ddl._partitioning


def split(table_id: str) -> tuple[str, str | None]:
    """The table's own id, and the partition's if there is one."""
    base, sign, id = table_id.partition("$")
    return base, id if sign else None


@dataclass(frozen=True)
class Partition:
    """One partition.

    Attributes:
        table: Its table.
        id: Its id, such as 20260801.
        column: The column that decides; None for the time of ingestion.
        test: SQL that is true for rows of the partition, `{value}` standing for the column.
        moment: The ingestion time of its rows, where that decides.
    """

    table: Reference
    id: str
    column: str | None
    test: str
    moment: datetime.datetime | None = None

    @property
    def label(self) -> str:
        return f"{names.label(*self.table)}${self.id}"

    def holds(self, value: str | None = None) -> str:
        """The test for `value`, SQL; by default for the partitioning column."""
        return self.test.format(value=value or database.quote(self.column or tables.INGESTION_TIME))

    def rows(self) -> str:
        return f"(SELECT *, rowid FROM {tables.name(*self.table)} WHERE {self.holds()})"


def partition(reference: Reference, layout: Any = None) -> Partition | None:
    """The partition that a name means, or None for a name without `$`.

    Args:
        reference: The name.
        layout: The partitioning of a table that does not exist yet; by default the table's own.

    Raises:
        BigQueryError: The table is missing or not partitioned, or has no such partition id.
    """
    base, id = split(reference[2])
    if id is None:
        return None
    table = (*reference[:2], base)
    resource = layout or tables.load(*table)
    if time := resource.timePartitioning:
        moment = None if id == NULL and time.field else _moment(id, time.type or "DAY")
        pattern = FORMATS[time.type or "DAY"]
        test = f"strftime({{value}}, '{pattern}') = '{id}'" if moment else "{value} IS NULL"
        return Partition(table, id, time.field, test, None if time.field else moment)
    if ranges := resource.rangePartitioning:
        return Partition(table, id, ranges.field, _range_test(id, ranges.range))
    text = f"Table {names.label(*table)} is not partitioned: the decorator ${id} cannot be used."
    raise BigQueryError("invalid", text)


def _moment(id: str, unit: str) -> datetime.datetime:
    pattern = FORMATS[unit]
    try:
        moment = datetime.datetime.strptime(id, pattern)
    except ValueError:
        moment = None
    if moment is None or moment.strftime(pattern) != id:
        text = f"Invalid partition id {id!r} for a table partitioned by {unit}."
        raise BigQueryError("invalid", text)
    return moment.replace(tzinfo=datetime.UTC)


def _range_test(id: str, bounds: Any) -> str:
    if id == NULL:
        return "{value} IS NULL"
    start, end, interval = (int(each) for each in (bounds.start, bounds.end, bounds.interval))
    lower = int(id) if re.fullmatch(r"-?\d+", id) else None
    if lower is None or not start <= lower < end or (lower - start) % interval:
        text = f"Invalid partition id {id!r} for a table partitioned by range."
        raise BigQueryError("invalid", text)
    return f"{{value}} >= {lower} AND {{value}} < {min(lower + interval, end)}"


def columns(project_id: str, dataset_id: str, table_id: str) -> Any:
    return catalog.columns(project_id, dataset_id, split(table_id)[0])


def _summary(reference: Reference) -> Any:
    """The table of a table's partitions."""
    table = (*reference[:2], split(reference[2])[0])
    fields = [{"name": name, "type": kind} for name, kind in SUMMARY_COLUMNS.items()]
    return tables.load(*table).without("schema").replace(schema={"fields": fields})


def _named(resource: Any, reference: Reference) -> Any:
    """A resource under its decorated name, which clients use to read its rows."""
    own = dict(zip(("projectId", "datasetId", "tableId"), reference, strict=True))
    return resource.replace(id=names.label(*reference), tableReference=own)


def _get(original: Any) -> Any:
    def get(
        project_id: str,
        dataset_id: str,
        table_id: str,
        selected_fields: str | None = None,
        view: str | None = None,
    ) -> Any:
        reference = (project_id, dataset_id, table_id)
        if split(table_id)[1] == SUMMARY:
            return _named(_summary(reference), reference)
        if not (target := partition(reference)):
            return original(project_id, dataset_id, table_id, selected_fields, view)
        [(count,)] = database.fetch(f"SELECT count(*) FROM {target.rows()}")
        resource = original(*target.table, selected_fields, view)
        return _named(resource.replace(numRows=str(count)), reference)

    return get


def _delete(original: Any) -> Any:
    def delete(project_id: str, dataset_id: str, table_id: str) -> None:
        if not (target := partition((project_id, dataset_id, table_id))):
            original(project_id, dataset_id, table_id)
            return
        with database.writing(*target.table):
            database.execute(f"DELETE FROM {tables.name(*target.table)} WHERE {target.holds()}")

    return delete


def _annotate(original: Any) -> Any:
    def annotate(reference: Reference, changes: Any) -> None:
        original((*reference[:2], split(reference[2])[0]), changes)

    return annotate


def source(project_id: str, dataset_id: str, table_id: str) -> str | None:
    if target := partition((project_id, dataset_id, table_id)):
        return f"(SELECT * FROM {tables.name(*target.table)} WHERE {target.holds()})"
    return _decorated(project_id, dataset_id, table_id)


def list_rows(
    project_id: str,
    dataset_id: str,
    table_id: str,
    max_results: int | None,
    start: int,
    selected_fields: str | None,
    int64_timestamps: bool,
) -> Any:
    reference = (project_id, dataset_id, table_id)
    if split(table_id)[1] is None:
        more = (max_results, start, selected_fields, int64_timestamps)
        return _list_rows(*reference, *more)
    if split(table_id)[1] == SUMMARY:
        fields = tables.fields(_summary(reference))
        rows = _summary_rows((project_id, dataset_id, split(table_id)[0]))
    else:
        target = partition(reference)
        assert target is not None
        fields = tables.columns(*target.table)
        rows = target.rows()
    if selected_fields:
        wanted = {name.strip().casefold() for name in selected_fields.split(",")}
        fields = [field for field in fields if field.name.casefold() in wanted]
    shown = [field.name.casefold() for field in fields]
    with database.cursor() as cur:
        page = results.page(cur, rows, max_results, start, shown, int64_timestamps)
    return page, fields


def _summary_rows(table: Reference) -> str:
    ids = [id for id, _ in partitions(tables.load(*table)) if id is not None]
    listed = ", ".join(f"'{id}'" for id in ids)
    own = ", ".join(
        f"'{part}' AS {name}" for part, name in zip(table, SUMMARY_COLUMNS, strict=False)
    )
    return (
        f"(SELECT {own}, partition_id, row_number() OVER () AS rowid "
        f"FROM (SELECT unnest(CAST([{listed}] AS VARCHAR[])) AS partition_id))"
    )


def partitions(table: Any) -> list[tuple[str | None, int]]:
    """The partitions of a table that hold rows, and how many; (None, rows) when it has none."""
    project_id, dataset_id, table_id = tables.reference(table.tableReference)
    name = tables.name(project_id, dataset_id, table_id)
    if table.type != "TABLE" or not (table.timePartitioning or table.rangePartitioning):
        return [(None, int(table.numRows))]
    if not tables.fields(table):
        return []
    if time := table.timePartitioning:
        column = database.quote(time.field or tables.INGESTION_TIME)
        id = f"strftime({column}, '{FORMATS[time.type or 'DAY']}')"
    else:
        ranges = table.rangePartitioning
        column = database.quote(ranges.field)
        start, end, interval = ranges.range.start, ranges.range.end, ranges.range.interval
        lower = f"({column} - ({start})) // {interval} * {interval} + ({start})"
        inside = f"{column} >= {start} AND {column} < {end}"
        id = (
            f"CASE WHEN {column} IS NULL THEN NULL WHEN {inside} THEN CAST({lower} AS VARCHAR) "
            "ELSE '__UNPARTITIONED__' END"
        )
    return database.fetch(
        f"SELECT coalesce({id}, '{NULL}'), count(*) FROM {name} GROUP BY 1 ORDER BY 1"
    )


def partitioning(node: exp.PartitionedByProperty) -> dict[str, Any]:
    if node.this.name != "bq.main.range_bucket":
        return _partitioning(node)
    column, series = node.this.expressions
    start, end, interval = (bound.sql() for bound in series.expressions)
    bounds = {"start": start, "end": end, "interval": interval}
    return {"rangePartitioning": {"field": column.name, "range": bounds}}


def install() -> None:
    """Replace what upstream knows of names. After metadata.install, whose locks stay inside."""
    tables.columns = columns
    tables.annotate = _annotate(tables.annotate)
    tables.get = _get(tables.get)
    tables.delete = _delete(tables.delete)
    copy.decorated = source
    tabledata.list_rows = list_rows
    ddl._partitioning = partitioning
    information_schema._partitions = partitions
