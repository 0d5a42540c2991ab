"""A random workload on the tests' source, which its seed alone decides.

workload = Workload(seed=1)
workload.create(connection)
workload.run(connection, changes=500)
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import psycopg
from google.cloud.bigquery import SchemaField

from support.workload_tables import TABLES, TYPES, Table

Key = tuple[Any, ...]
KINDS = {
    "insert": 40,
    "update": 25,
    "update of few columns": 30,
    "key change": 7,
    "delete": 12,
    "insert again": 8,
}
ROLLED_BACK = 0.06  # of the transactions
LONGEST = 12  # changes in a transaction
COLUMN_EVERY = 150  # changes, until each table has its later columns


@dataclass
class Content:
    """What of a table the workload knows: its keys, and its columns now."""

    table: Table
    live: dict[Key, None] = field(default_factory=dict[Key, None])  # a set that keeps its order
    gone: dict[Key, None] = field(default_factory=dict[Key, None])
    added: int = 0

    @property
    def columns(self) -> dict[str, Any]:
        later = list(self.table.later.items())[: self.added]
        return {name: value for name, (_, value) in [*self.table.columns.items(), *later]}

    def copy(self) -> "Content":
        return Content(self.table, dict(self.live), dict(self.gone), self.added)


class Workload:
    """Changes of several tables, transaction by transaction.

    Attributes:
        counts: Changes that were committed, by their kind; `transactions`, `rolled back` (of the
            transactions) and `columns added`, too.
    """

    def __init__(self, seed: int, tables: Sequence[Table] = TABLES) -> None:
        self._random = Random(seed)
        self._tables = tables
        self._contents = {table.name: Content(table) for table in tables}
        self.counts: Counter[str] = Counter()

    @property
    def names(self) -> list[str]:
        """The tables, as the source names them."""
        return [table.name for table in self._tables]

    def fields(self, table: Table) -> list[SchemaField]:
        """The columns of BigQuery for those that a table has now."""
        later = list(table.later)[self._contents[table.name].added :]
        return [field for field in table.fields() if field.name not in later]

    @property
    def changes(self) -> int:
        """How many changes were committed."""
        return sum(self.counts[kind] for kind in KINDS)

    @property
    def events(self) -> int:
        """How many events Debezium makes of them: a changed key is a delete and a create."""
        return self.changes + self.counts["key change"]

    def create(self, connection: psycopg.Connection[Any]) -> None:
        """Make the tables."""
        connection.execute(TYPES.encode())
        for table in self._tables:
            for statement in table.create():
                connection.execute(statement.encode())

    def run(self, connection: psycopg.Connection[Any], changes: int) -> None:
        """Commit at least so many changes more."""
        end = self.changes + changes
        while self.changes < end:
            self._maybe_add_column(connection)
            self._transaction(connection, min(end - self.changes, LONGEST))

    def _transaction(self, connection: psycopg.Connection[Any], most: int) -> None:
        before = {name: content.copy() for name, content in self._contents.items()}
        done: Counter[str] = Counter()
        abandoned = self._random.random() < ROLLED_BACK
        with connection.transaction(force_rollback=abandoned):
            for kind, statement, values in self._changes(self._random.randint(1, most)):
                connection.execute(statement.encode(), values)
                done[kind] += 1
        if abandoned:
            self._contents = before
            self.counts["rolled back"] += 1
        else:
            self.counts.update(done)
            self.counts["transactions"] += 1

    def _changes(self, count: int) -> Iterator[tuple[str, str, list[Any]]]:
        for _ in range(count):
            content = self._random.choice(list(self._contents.values()))
            kind = self._random.choices(list(KINDS), list(KINDS.values()))[0]
            known = content.gone if kind == "insert again" else content.live
            kind = kind if known else "insert"
            yield kind, *self._change(kind, content)

    def _change(self, kind: str, content: Content) -> tuple[str, list[Any]]:
        if kind == "insert":
            return self._insert(content, self._new_key(content))
        if kind == "insert again":
            return self._insert(content, self._any(content.gone))
        key = self._any(content.live)
        if kind == "delete":
            del content.live[key]
            content.gone[key] = None
            where = _equal(content.table.key, " AND ")
            return f"DELETE FROM {content.table.name} WHERE {where}", list(key)
        columns = content.columns
        if kind == "key change":
            return self._move(content, key)
        names = list(columns)
        if kind == "update of few columns":
            small = [name for name in names if name != content.table.large]
            names = self._random.sample(small, self._random.randint(1, min(2, len(small))))
        values = [columns[name](self._random) for name in names]
        return _update(content.table, names), [*values, *key]

    def _insert(self, content: Content, key: Key) -> tuple[str, list[Any]]:
        content.gone.pop(key, None)
        content.live[key] = None
        names = [*content.table.key, *content.columns]
        values = [*key, *(value(self._random) for value in content.columns.values())]
        places = ", ".join(["%s"] * len(names))
        return f"INSERT INTO {content.table.name} ({', '.join(names)}) VALUES ({places})", values

    def _move(self, content: Content, key: Key) -> tuple[str, list[Any]]:
        """Change a key, and perhaps more; the large text stays as it is."""
        new = self._new_key(content)
        del content.live[key]
        content.gone[key] = None
        content.gone.pop(new, None)
        content.live[new] = None
        small = [name for name in content.columns if name != content.table.large]
        names = self._random.sample(small, self._random.randint(0, 1))
        values = [content.columns[name](self._random) for name in names]
        return _update(content.table, [*content.table.key, *names]), [*new, *values, *key]

    def _new_key(self, content: Content) -> Key:
        while True:
            key = tuple(value(self._random) for _, value in content.table.key.values())
            if key not in content.live:
                return key

    def _any(self, keys: dict[Key, None]) -> Key:
        return self._random.choice(list(keys))

    def _maybe_add_column(self, connection: psycopg.Connection[Any]) -> None:
        for content in self._contents.values():
            later = list(content.table.later.items())
            if content.added < min(len(later), self.changes // COLUMN_EVERY):
                name, (kind, _) = later[content.added]
                statement = f"ALTER TABLE {content.table.name} ADD COLUMN {name} {kind}"
                connection.execute(statement.encode())
                content.added += 1
                self.counts["columns added"] += 1


def _update(table: Table, names: Sequence[str]) -> str:
    return f"UPDATE {table.name} SET {_equal(names, ', ')} WHERE {_equal(table.key, ' AND ')}"


def _equal(names: Any, separator: str) -> str:
    return separator.join(f"{name} = %s" for name in names)
