"""What exists, asked of the lake's own records.

Upstream asks DuckDB's `duckdb_tables()` and `duckdb_columns()`, which open every table of every
database: a millisecond a table, several times a query, and deleted rows are counted. With the
hundred tables of a busy project that is most of the time of every call.

Seams: `database.objects`, `datasets.exists`, `tabledata.columns` (`tables.columns` is that of
partitions.py, which asks here), how a rule of SQL looks for the hidden column of ingestion time,
and the cursor that `query.execute` is given.
"""

from typing import Any

import duckdb

from dagster_bq_connector.local.upstream import (
    database,
    datasets,
    errors,
    hiding,
    names,
    query,
    tabledata,
    tables,
    types,
)

RELATIONS = """
SELECT t.table_name, 'TABLE', t.table_id
FROM {lake}.ducklake_table AS t JOIN {lake}.ducklake_schema AS s USING (schema_id)
WHERE s.schema_name = $1 AND s.end_snapshot IS NULL AND t.end_snapshot IS NULL
UNION ALL
SELECT v.view_name, 'VIEW', v.view_id
FROM {lake}.ducklake_view AS v JOIN {lake}.ducklake_schema AS s USING (schema_id)
WHERE s.schema_name = $1 AND s.end_snapshot IS NULL AND v.end_snapshot IS NULL
ORDER BY 1
"""
# The rows of the live files, without those that are deleted in them.
ROWS = """
SELECT CAST(coalesce(sum(record_count), 0) - (
    SELECT coalesce(sum(d.delete_count), 0)
    FROM {lake}.ducklake_delete_file AS d JOIN {lake}.ducklake_data_file AS f USING (data_file_id)
    WHERE d.table_id = $1 AND d.end_snapshot IS NULL AND f.end_snapshot IS NULL
) AS BIGINT)
FROM {lake}.ducklake_data_file WHERE table_id = $1 AND end_snapshot IS NULL
"""
SCHEMA = "SELECT 1 FROM {lake}.ducklake_schema WHERE schema_name = $1 AND end_snapshot IS NULL"
COLUMNS = """
SELECT c.column_name, c.nulls_allowed
FROM {lake}.ducklake_column AS c
JOIN {lake}.ducklake_table AS t USING (table_id)
JOIN {lake}.ducklake_schema AS s USING (schema_id)
WHERE s.schema_name = $1 AND t.table_name = $2 AND c.parent_column IS NULL
AND s.end_snapshot IS NULL AND t.end_snapshot IS NULL AND c.end_snapshot IS NULL
"""
TEMPORARY = "SELECT table_name FROM duckdb_tables() WHERE temporary"
Objects = list[tuple[str, str, int]]
_objects, _execute, _exists = database.objects, query.execute, datasets.exists
_upstream_hidden = hiding._hidden


def objects(database_name: str, schema: str, table_id: str | None = None) -> Objects:
    """Name, kind and number of rows of the tables and views of a schema, or of one of them."""
    if database_name in database._attached:
        return _of_lake(_lake(database_name), schema, table_id)
    if table_id is None or database_name != "emulator":
        return _objects(database_name, schema, table_id)
    try:
        name = database.quote(database_name, schema, table_id)
        [(count,)] = database.fetch(f"SELECT count(*) FROM {name}")
    except duckdb.CatalogException:
        return []
    return [(table_id, "TABLE", count)]


def _lake(database_name: str) -> str:
    """Where DuckLake keeps its records of a database."""
    return str(database.quote(f"__ducklake_metadata_{database_name}", "main"))


def _of_lake(lake: str, schema: str, table_id: str | None) -> Objects:
    with database.cursor() as cur:
        found = cur.execute(RELATIONS.format(lake=lake), [schema]).fetchall()
        rows = ROWS.format(lake=lake)
        return [
            (name, kind, cur.execute(rows, [id]).fetchall()[0][0] if kind == "TABLE" else 0)
            for name, kind, id in found
            if table_id in (None, name)
        ]


def exists(project_id: str, dataset_id: str) -> bool:
    """Whether there is such a dataset."""
    if project_id not in database._attached:
        return bool(_exists(project_id, dataset_id))
    return bool(database.fetch(SCHEMA.format(lake=_lake(project_id)), [dataset_id]))


def columns(project_id: str, dataset_id: str, table_id: str) -> list[Any]:
    """The fields of a table, without the hidden one of ingestion time."""
    stored = _stored(project_id, dataset_id, table_id)
    required = {name for name, nullable in stored if not nullable}
    table = tables.name(project_id, dataset_id, table_id)
    with database.cursor() as cur:
        try:
            relation = cur.sql(f"SELECT * FROM {table} LIMIT 0")
        except duckdb.CatalogException:
            label = names.label(project_id, dataset_id, table_id)
            raise errors.not_found("Table", label) from None
        return [
            types.field(column, kind, column in required)
            for column, kind in zip(relation.columns, relation.types, strict=True)
            if column != tables.INGESTION_TIME or dataset_id == tables.RESULTS
        ]


def _hidden(table: Any) -> bool:
    """Whether a table that a query names has the hidden column of ingestion time."""
    if table.catalog not in database._attached:
        return bool(_upstream_hidden(table))
    found = _stored(table.catalog, table.db, table.name)
    return any(name == tables.INGESTION_TIME for name, _ in found)


def _stored(project_id: str, dataset_id: str, table_id: str) -> list[tuple[str, bool]]:
    """Name and nullability of a table's columns; none for results, which may all hold nulls."""
    if project_id not in database._attached or dataset_id == tables.RESULTS:
        return []
    found: list[tuple[str, bool]] = database.fetch(
        COLUMNS.format(lake=_lake(project_id)), [dataset_id, table_id]
    )
    return found


class FreshCursor:
    """A cursor that was just opened, and so has no temporary tables to look for."""

    def __init__(self, cursor: duckdb.DuckDBPyConnection):
        self._cursor = cursor

    def sql(self, text: str, *args: Any, **kwargs: Any) -> Any:
        if text == TEMPORARY:
            text = "SELECT '' AS table_name LIMIT 0"
        return self._cursor.sql(text, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)


def execute(
    cur: duckdb.DuckDBPyConnection,
    project_id: str,
    job_id: str | None,
    config: Any,
    dry_run: bool = False,
    session: Any = None,
) -> Any:
    given = cur if session else FreshCursor(cur)
    return _execute(given, project_id, job_id, config, dry_run, session)


def install() -> None:
    database.objects = objects
    datasets.exists = exists
    tabledata.columns = columns
    hiding._hidden = _hidden
    query.execute = execute
