"""Load jobs with a schema from files that know their types.

Upstream takes every BYTES column of a declared schema for base64 text. That is right for CSV and
JSON; Parquet, Avro and ORC hold the bytes themselves.

It also makes a secret of DuckDB's for Cloud Storage within the transaction of each job, where two
jobs at once exclude each other.

Seams: `load._projection`, which knows the format, and `load._decoded`, which does not;
`load.paths`, which makes the secret.
"""

import threading
from contextvars import ContextVar
from typing import Any

from dagster_bq_connector.local.upstream import database, load

_typed: ContextVar[bool] = ContextVar("typed", default=False)


def install() -> None:
    """Decode base64 in text formats only, and make the secret outside of transactions."""
    project, decode, paths = load._projection, load._decoded, load.paths
    making = threading.Lock()

    def found(_cur: Any, uri: str) -> list[str]:
        with making, database.cursor() as cur:
            return paths(cur, uri)

    def projection(config: Any, fields: list[Any], columns: list[str]) -> tuple[str, str]:
        token = _typed.set((config.sourceFormat or "CSV") not in load.TEXT_FORMATS)
        try:
            return project(config, fields, columns)
        finally:
            _typed.reset(token)

    def decoded(expression: str, field: Any, depth: int = 0) -> str:
        return expression if _typed.get() else decode(expression, field, depth)

    load.paths = found
    load._projection, load._decoded = projection, decoded
