"""What exists, asked of the lake's own records.

Upstream asks DuckDB's `duckdb_tables()`, which opens every table of every database to estimate its
size: a millisecond a table, several times a query, and deleted rows are counted. With the hundred
tables of a busy project that is most of the time of every call.

Seams: `database.objects`, and the cursor that `query.execute` is given.
"""

from typing import Any

import duckdb

from dagster_bq_connector.local.upstream import database, query

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
TEMPORARY = "SELECT table_name FROM duckdb_tables() WHERE temporary"
Objects = list[tuple[str, str, int]]
_objects, _execute = database.objects, query.execute


def objects(database_name: str, schema: str, table_id: str | None = None) -> Objects:
    """Name, kind and number of rows of the tables and views of a schema, or of one of them."""
    if database_name in database._attached:
        lake = database.quote(f"__ducklake_metadata_{database_name}", "main")
        return _of_lake(lake, schema, table_id)
    if table_id is None or database_name != "emulator":
        return _objects(database_name, schema, table_id)
    try:
        name = database.quote(database_name, schema, table_id)
        [(count,)] = database.fetch(f"SELECT count(*) FROM {name}")
    except duckdb.CatalogException:
        return []
    return [(table_id, "TABLE", count)]


def _of_lake(lake: str, schema: str, table_id: str | None) -> Objects:
    with database.cursor() as cur:
        found = cur.execute(RELATIONS.format(lake=lake), [schema]).fetchall()
        rows = ROWS.format(lake=lake)
        return [
            (name, kind, cur.execute(rows, [id]).fetchall()[0][0] if kind == "TABLE" else 0)
            for name, kind, id in found
            if table_id in (None, name)
        ]


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
    query.execute = execute
