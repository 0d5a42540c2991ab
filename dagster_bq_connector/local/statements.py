"""Statements that change rows, and the one conversion that upstream lacks.

Of transactions that change one table, the first to commit wins; the others fail as the service's
do. A statement outside a transaction waits for its turn instead (upstream's lock of the table), but
not for a transaction. A table that requires a partition filter requires it of UPDATE and DELETE
too. Text becomes an INTERVAL in the one form that the service writes: `Y-M D H:M:S.F`.

Seams: `query._run`, and the rules that every statement passes.
"""

from collections.abc import Callable
from typing import Any

import duckdb
from sqlglot import exp

from dagster_bq_connector.local.staging import CONFLICT
from dagster_bq_connector.local.upstream import (
    BigQueryError,
    database,
    metadata,
    models,
    names,
    query,
    translation,
)

FILTERED = (exp.Update, exp.Delete)  # upstream refuses every MERGE of such a table
CHANGING = (*FILTERED, exp.Insert, exp.Merge, exp.TruncateTable)
TO_INTERVAL, TO_INTERVAL_OR_NULL = "bq.main._to_interval", "bq.main._to_interval_or_null"
_PATTERN = r"([+-]?)(\d+)-(\d+) ([+-]?\d+) ([+-]?)(\d+):(\d+):(\d+)(?:\.(\d{1,6}))?"


def _part(number: int) -> str:
    return f"CAST(regexp_extract(CAST(t AS VARCHAR), '{_PATTERN}', {number}) AS BIGINT)"


def _sign(number: int) -> str:
    sign = f"regexp_extract(CAST(t AS VARCHAR), '{_PATTERN}', {number})"
    return f"(CASE WHEN {sign} = '-' THEN -1 ELSE 1 END)"


MACROS = f"""
CREATE OR REPLACE MACRO {TO_INTERVAL_OR_NULL}(t) AS CASE
    WHEN typeof(t) = 'INTERVAL' THEN TRY_CAST(t AS INTERVAL)
    WHEN regexp_full_match(CAST(t AS VARCHAR), '{_PATTERN}') THEN
        to_months(CAST({_sign(1)} * ({_part(2)} * 12 + {_part(3)}) AS INTEGER))
        + to_days(CAST({_part(4)} AS INTEGER))
        + to_microseconds({_sign(5)} * (
            ({_part(6)} * 3600 + {_part(7)} * 60 + {_part(8)}) * 1000000
            + CAST(rpad(regexp_extract(CAST(t AS VARCHAR), '{_PATTERN}', 9), 6, '0') AS BIGINT)
        ))
END;
CREATE OR REPLACE MACRO {TO_INTERVAL}(t) AS CASE
    WHEN t IS NOT NULL AND {TO_INTERVAL_OR_NULL}(t) IS NULL
    THEN CAST(error('Invalid INTERVAL value: ' || CAST(t AS VARCHAR)) AS INTERVAL)
    ELSE {TO_INTERVAL_OR_NULL}(t)
END
"""


def interval(tree: Any, context: Any) -> Any:
    """A rule: casts to INTERVAL go through the macros."""
    for node in list(tree.find_all(exp.Cast)):
        if not node.to.is_type(exp.DataType.Type.INTERVAL):
            continue
        macro = TO_INTERVAL_OR_NULL if isinstance(node, exp.TryCast) else TO_INTERVAL
        node.replace(exp.Anonymous(this=macro, expressions=[node.this]))
    return tree


def checked(run: Callable[..., Any]) -> Callable[..., Any]:
    """A statement that needs a partition filter has one, and a lost race is called one."""

    def inner(cur: duckdb.DuckDBPyConnection, tree: Any, context: Any, *more: Any) -> Any:
        if isinstance(tree, CHANGING):
            context.system["_changed"] = names.label(*query._target(tree, context))
        if isinstance(tree, FILTERED):
            _refuse_unfiltered(tree, query._target(tree, context))
        try:
            return run(cur, tree, context, *more)
        except duckdb.Error as error:
            if CONFLICT not in str(error):
                raise
            table = context.system.get("_changed", "")
            text = f"Transaction is aborted due to concurrent update against table {table}."
            raise BigQueryError("invalidQuery", text) from error

    return inner


def _refuse_unfiltered(tree: Any, target: tuple[str, ...]) -> None:
    stored = metadata.load(models.Table, *target) if len(target) > 1 else None
    if stored is None or not stored.requirePartitionFilter:
        return
    layout = stored.timePartitioning or stored.rangePartitioning
    column = (layout and layout.field) or "_PARTITIONTIME"
    wanted = {column.casefold()} | ({"_partitiondate"} if layout and not layout.field else set())
    where = tree.args.get("where")
    found = {c.name.casefold() for c in where.find_all(exp.Column)} if where else set()
    if not wanted & found:
        text = (
            f"Cannot query over table '{'.'.join(target)}' without a filter over column(s) "
            f"'{column}' that can be used for partition elimination"
        )
        raise BigQueryError("invalidQuery", text)


def install() -> None:
    database.execute(MACROS)
    query._run = checked(query._run)
    translation.STATEMENT_RULES.insert(0, interval)
