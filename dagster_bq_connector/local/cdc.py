"""Change data capture on the default stream: _CHANGE_TYPE and _CHANGE_SEQUENCE_NUMBER.

A change is applied when its sequence is not below the highest one seen for its key, deletes
included; of equal sequences the later arrival wins. The highest sequence of every key lives in
`emulator.cdc_keys` and survives a restart. It is written after the rows, since one transaction
cannot write both databases: a crash between the two leaves rows without their sequence, of a
request that was never acknowledged, and its replay repairs that.

Kept for ever, where the service keeps deletes for two days. Applied at once, where the service may
wait for max_staleness.

Seams: `runner.HANDLERS["copy"]` for the refusal of copies, `query._run` for that of DML, and
`tables.record`, which sees every change of a primary key. streams.py calls `apply`, destinations.py
calls `forget`.
"""

import re
from collections.abc import Callable
from typing import Any

import duckdb
from sqlglot import exp

from dagster_bq_connector.local.faults import INVALID, StorageFault
from dagster_bq_connector.local.staging import OFFSET, Row, Stage, identity, publish_rows
from dagster_bq_connector.local.upstream import (
    BigQueryError,
    Reference,
    database,
    metadata,
    models,
    names,
    query,
    runner,
    tables,
)

CHANGE_TYPE, SEQUENCE = PSEUDO_COLUMNS = ("_CHANGE_TYPE", "_CHANGE_SEQUENCE_NUMBER")
KINDS = ("UPSERT", "DELETE")
MUTATIONS = (exp.Update, exp.Delete, exp.Merge, exp.TruncateTable)
SECTION = 16  # hexadecimal digits
SEQUENCE_TEXT = re.compile(rf"[0-9A-Fa-f]{{1,{SECTION}}}(/[0-9A-Fa-f]{{1,{SECTION}}}){{0,3}}")
SCHEMA = """
CREATE TABLE IF NOT EXISTS emulator.cdc_keys (
    table_uuid VARCHAR, key VARCHAR, sequence VARCHAR NOT NULL, PRIMARY KEY (table_uuid, key)
)
"""
# The last change of each key in the stage, unless a later one is known already. The names are given
# before anything is sorted by them, since the table may have columns of these names.
WINNERS = """
CREATE OR REPLACE TEMP TABLE cdc_winners AS
SELECT last.* FROM (
    FROM (SELECT {key} AS key, {offset} AS position, {sequence} AS sequence FROM {stage})
    QUALIFY row_number() OVER (PARTITION BY key ORDER BY sequence DESC, position DESC) = 1
) AS last
LEFT JOIN emulator.cdc_keys AS known ON known.table_uuid = ? AND known.key = last.key
WHERE known.sequence IS NULL OR last.sequence >= known.sequence
"""


def comparable(sequence: str | None) -> str:
    """Text that sorts as BigQuery orders sequences; no sequence sorts first.

    Sections get equal width: "A/0" becomes "000000000000000A/0000000000000000".
    """
    sections = filter(None, (sequence or "").split("/"))
    return "/".join(section.upper().rjust(SECTION, "0") for section in sections)


def apply(table: Reference, rows: list[Row]) -> list[Row]:
    """Apply changes, all or none.

    Args:
        table: Their table.
        rows: Decoded rows with the two pseudo-columns.

    Returns:
        The row errors, as insertAll gives them.

    Raises:
        StorageFault: The table has no primary key.
    """
    resource = tables.load(*table)
    keys = _primary_key(resource)
    if not keys:
        text = f"{CHANGE_TYPE} needs a primary key on table {names.label(*table)}."
        raise StorageFault(INVALID, text)
    required = [field.name for field in tables.fields(resource) if field.mode == "REQUIRED"]
    problems = [(index, _problem(row, keys, required)) for index, row in enumerate(rows)]
    if errors := [_error(index, text) for index, text in problems if text]:
        return errors
    stage = Stage(table, extra=PSEUDO_COLUMNS, required=())
    try:
        errors = stage.insert([row | {SEQUENCE: comparable(row.get(SEQUENCE))} for row in rows])
        if not errors:
            _merge(table, keys, stage, len(rows))
        return errors
    finally:
        stage.drop()


def _error(index: int, text: str) -> Row:
    return {"index": index, "errors": [{"message": text}]}


def _primary_key(resource: Any) -> list[str]:
    constraints = resource.tableConstraints
    return list(constraints.primaryKey.columns) if constraints and constraints.primaryKey else []


def _problem(row: Row, keys: list[str], required: list[str]) -> str | None:
    if row.get(CHANGE_TYPE) not in KINDS:
        return f"The given value is not a valid CHANGE_TYPE: {row.get(CHANGE_TYPE)}"
    sequence = row.get(SEQUENCE)
    if sequence is not None and not SEQUENCE_TEXT.fullmatch(sequence):
        return f"The given value is not a valid CHANGE_SEQUENCE_NUMBER: {sequence}"
    needed = keys if row[CHANGE_TYPE] == "DELETE" else [*keys, *required]
    given = {name.casefold() for name, value in row.items() if value is not None}
    missing = [name for name in needed if name.casefold() not in given]
    return f"Missing required field: {missing[0]}." if missing else None


def _merge(table: Reference, keys: list[str], stage: Stage, count: int) -> None:
    quoted = [database.quote(name) for name in keys]
    texts = ", ".join(f"CAST({name} AS VARCHAR)" for name in quoted)
    columns = ", ".join(quoted)
    chosen = f"{OFFSET} IN (SELECT position FROM cdc_winners)"
    winners = WINNERS.format(
        key=f"CAST(to_json([{texts}]) AS VARCHAR)",
        offset=OFFSET,
        sequence=database.quote(SEQUENCE),
        stage=stage.name,
    )
    with database.writing(*table), database.cursor() as cur:
        uuid = identity(*table)
        cur.execute(winners, [uuid])

        def put() -> None:
            cur.execute(
                f"DELETE FROM {tables.name(*table)} WHERE ({columns}) IN "
                f"(SELECT ({columns}) FROM {stage.name} WHERE {chosen})"
            )
            upserts = f"{database.quote(CHANGE_TYPE)} = 'UPSERT' AND {chosen}"
            stage.publish(cur, 0, count, where=upserts)

        publish_rows(cur, put)
        cur.execute(
            "INSERT OR REPLACE INTO emulator.cdc_keys SELECT ?, key, sequence FROM cdc_winners",
            [uuid],
        )


def is_streamed(table: Reference) -> bool:
    """Whether the table, as it stands now, has received changes."""
    if table[0] not in database.projects():
        return False
    found = "SELECT 1 FROM emulator.cdc_keys WHERE table_uuid = ? LIMIT 1"
    return bool(database.fetch(found, [identity(*table)]))


def forget(table: Reference) -> None:
    """Forget the sequences of a table whose rows were all replaced, or whose key is another."""
    database.execute("DELETE FROM emulator.cdc_keys WHERE table_uuid = ?", [identity(*table)])


def refusing_copy(run: Callable[..., Any]) -> Callable[..., Any]:
    def inner(cur: duckdb.DuckDBPyConnection, config: Any, upload: str | None) -> Any:
        for source in config.sourceTables or [config.sourceTable]:
            project_id, dataset_id, table_id = tables.reference(source)
            reference = (project_id, dataset_id, table_id.partition("$")[0])
            if is_streamed(reference):
                label = names.label(*reference)
                text = f"Table {label} has pending change data capture and cannot be copied."
                raise BigQueryError("invalid", text)
        return run(cur, config, upload)

    return inner


def refusing_dml(run: Callable[..., Any]) -> Callable[..., Any]:
    def inner(cur: duckdb.DuckDBPyConnection, tree: Any, context: Any, *more: Any) -> Any:
        if isinstance(tree, MUTATIONS):
            target = query._target(tree, context)
            if is_streamed(target):
                verb = query.statement_type(tree).replace("_", " ")
                text = (
                    f"{verb} statement over table {names.label(*target)} would affect rows "
                    "written by change data capture, which is not supported."
                )
                raise BigQueryError("invalidQuery", text)
        return run(cur, tree, context, *more)

    return inner


def forgetting(record: Callable[..., None]) -> Callable[..., None]:
    """The sequences are those of keys: of other columns, equal values mean another row."""

    def inner(project_id: str, dataset_id: str, table_id: str, resource: Any) -> None:
        table = (project_id, dataset_id, table_id)
        stored = metadata.load(models.Table, *table)  # None under a new name: the key is the same
        record(*table, resource)
        if stored and _primary_key(stored) != _primary_key(resource):
            forget(table)

    return inner


def install(refuse_copies: bool = False) -> None:
    database.execute(SCHEMA)
    query._run = refusing_dml(query._run)
    tables.record = forgetting(tables.record)
    if refuse_copies:
        runner.HANDLERS["copy"] = refusing_copy(runner.HANDLERS["copy"])
