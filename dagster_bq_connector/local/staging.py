"""Hidden tables that hold rows which BigQuery has accepted but does not show yet.

A stage has the columns of its target, so that filling it *is* the check of the rows: the same code,
the same errors, nothing visible. It lives in upstream's own result schema, a native DuckDB file
beside the lake; publishing is one INSERT ... SELECT in one lake transaction. One transaction can
write to one attached database only, so a stage is filled before and dropped after, never inside.
"""

import contextlib
import uuid
from collections.abc import Callable, Collection, Generator
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from dagster_bq_connector.local import arrow_rows
from dagster_bq_connector.local.upstream import Reference, database, tables, write

OFFSET = "_stage_offset"
PREFIX = "stage-"
CONFLICT = "Transaction conflict"  # as DuckLake says it
ATTEMPTS = 10
Row = dict[str, Any]


@contextlib.contextmanager
def transaction(cur: duckdb.DuckDBPyConnection) -> Generator[None]:
    cur.begin()
    try:
        yield
    except BaseException:
        cur.rollback()
        raise
    cur.commit()


def identity(project_id: str, dataset_id: str, table_id: str) -> str | None:
    """What tells a table from another of the same name.

    New after DROP and CREATE, CREATE OR REPLACE or WRITE_TRUNCATE; kept by ALTER.
    """
    lake = database.quote(f"__ducklake_metadata_{project_id}", "main")
    rows = database.fetch(
        f"SELECT CAST(t.table_uuid AS VARCHAR) FROM {lake}.ducklake_table AS t "
        f"JOIN {lake}.ducklake_schema AS s USING (schema_id) "
        "WHERE s.schema_name = ? AND t.table_name = ? "
        "AND t.end_snapshot IS NULL AND s.end_snapshot IS NULL",
        [dataset_id, table_id],
    )
    return rows[0][0] if rows else None


def publish_rows(cur: duckdb.DuckDBPyConnection, work: Callable[[], None]) -> None:
    """Do work of a cursor in a transaction, again when the table was altered meanwhile.

    The caller holds the table's writer lock, which ALTER TABLE does not take; the service commits
    both. Of a table that was dropped, the next try says so.
    """
    for left in reversed(range(ATTEMPTS)):
        try:
            with transaction(cur):
                work()
            return
        except duckdb.Error as error:
            if not left or CONFLICT not in str(error):
                raise


class Stage:
    """Rows on their way to a table."""

    def __init__(
        self,
        target: Reference,
        extra: Collection[str] = (),
        required: Collection[str] | None = None,
    ):
        """Make an empty stage.

        Args:
            target: The table that the rows are for.
            extra: Text columns that stay behind when the rows are published.
            required: Columns that must not be NULL, in place of the target's own.
        """
        self.target = target
        self.identity = identity(*target)
        self.table: Reference = (target[0], tables.RESULTS, f"{PREFIX}{uuid.uuid4().hex}")
        self.name: str = tables.name(*self.table)
        fields = tables.columns(*target)
        self._columns = {field.name for field in fields}
        self._own = [OFFSET, *extra]
        kinds = {OFFSET: "BIGINT"} | dict.fromkeys(extra, "VARCHAR")
        select = [database.quote(field.name) for field in fields]
        select += [
            f"CAST(NULL AS {kind}) AS {database.quote(name)}" for name, kind in kinds.items()
        ]
        database.execute(
            f"CREATE TABLE {self.name} AS "
            f"SELECT {', '.join(select)} FROM {tables.name(*target)} LIMIT 0"
        )
        if required is None:
            required = [field.name for field in fields if field.mode == "REQUIRED"]
        for name in required:
            database.execute(
                f"ALTER TABLE {self.name} ALTER COLUMN {database.quote(name)} SET NOT NULL"
            )

    def insert(self, rows: list[Row] | pa.RecordBatch, start: int = 0) -> list[Row]:
        """Add all the rows, the first at offset `start`, or none.

        Returns:
            The row errors, as insertAll gives them.
        """
        self._follow_target()
        if isinstance(rows, pa.RecordBatch):
            return self._insert_batch(rows, start)
        numbered = [row | {OFFSET: start + index} for index, row in enumerate(rows)]
        try:
            errors = write._insert(self, numbered)
        except duckdb.Error as error:
            errors = [{"index": 0, "errors": [{"message": str(error)}]}]
        if errors:
            self.discard(start)
        return errors

    def _insert_batch(self, batch: pa.RecordBatch, start: int) -> list[Row]:
        # Not by pa.array, which looks for pandas: the server hides it.
        offsets = pa.py_buffer(np.arange(start, start + len(batch)))
        numbers = pa.Array.from_buffers(pa.int64(), len(batch), [None, offsets])
        numbered = batch.append_column(OFFSET, numbers)
        fields = tables.columns(*self.target)
        errors = arrow_rows.insert(self.name, fields, numbered, OFFSET)
        if errors:
            self.discard(start)
        return errors

    def publish(
        self, cur: duckdb.DuckDBPyConnection, start: int, stop: int, where: str = "true"
    ) -> None:
        """Copy the rows at offsets [start, stop) into the target, in the cursor's transaction."""
        left_behind = ", ".join(map(database.quote, self._own))
        cur.execute(
            f"INSERT INTO {tables.name(*self.target)} BY NAME "
            f"SELECT * EXCLUDE ({left_behind}) FROM {self.name} "
            f"WHERE {OFFSET} >= ? AND {OFFSET} < ? AND {where} ORDER BY {OFFSET}",
            [start, stop],
        )

    def discard(self, start: int = 0) -> None:
        database.execute(f"DELETE FROM {self.name} WHERE {OFFSET} >= ?", [start])

    def drop(self) -> None:
        database.execute(f"DROP TABLE IF EXISTS {self.name}")

    def _follow_target(self) -> None:
        """Take over columns that were added to the target while the stage was open."""
        for field in tables.columns(*self.target):
            if field.name in self._columns:
                continue
            column = database.quote(field.name)
            with database.cursor() as cur:
                source = f"SELECT {column} FROM {tables.name(*self.target)} LIMIT 0"
                [kind] = cur.sql(source).types
            database.execute(f"ALTER TABLE {self.name} ADD COLUMN {column} {kind}")
            self._columns.add(field.name)


def sweep() -> None:
    """Drop the stages of an earlier process: its streams are gone with it."""
    rows = database.fetch(
        "SELECT table_name FROM duckdb_tables() "
        "WHERE database_name = 'emulator' AND schema_name = ? AND contains(table_name, ?)",
        [tables.RESULTS, f":{PREFIX}"],
    )
    for (name,) in rows:
        database.execute(f"DROP TABLE {database.quote('emulator', tables.RESULTS, name)}")
