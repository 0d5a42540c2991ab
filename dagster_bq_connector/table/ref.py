"""`TableRef`: the address of a table, or of one of its partitions."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace

from google.cloud import bigquery

from dagster_bq_connector.errors import InvalidNameError

MAX_BYTES = 1024  # of the UTF-8 of a dataset's or a table's name
# Unicode categories that a table name may hold, beside "-": letters, marks, numbers, connectors
# and spaces (BigQuery's documentation of table naming).
_TABLE_CATEGORIES = ("L", "M", "N", "Pc", "Zs")
_PROJECT = re.compile(r"([a-z0-9.-]+:)?[A-Za-z0-9][A-Za-z0-9_-]*")
_PROJECT_TAKES = "letters, digits, '-' and '_', after a domain with ':' if it has one"
_DATASET = re.compile(r"\w+", re.ASCII)
_PARTITION = re.compile(r"\w+", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class TableRef:
    """`project.dataset.table`, with an optional partition (`$20260801`).

    Attributes:
        dataset: The dataset's name.
        table: The table's name, without partition.
        project: The project; None means the project of the resource that uses the address.
        partition: The partition's id, such as `20260801`, `2026080113`, `202608` or `__NULL__`.

    Raises:
        InvalidNameError: A part holds what BigQuery does not take there.
    """

    dataset: str
    table: str
    project: str | None = None
    partition: str | None = None

    def __post_init__(self) -> None:
        if self.project is not None and not _PROJECT.fullmatch(self.project):
            raise self._invalid("project", self.project, _PROJECT_TAKES)
        if not _DATASET.fullmatch(self.dataset) or len(self.dataset) > MAX_BYTES:
            raise self._invalid("dataset", self.dataset, "letters, digits and '_'")
        if not _is_table_name(self.table):
            takes = "letters, marks, digits, '_', '-' and spaces of any script, up to 1,024 bytes"
            raise self._invalid("table", self.table, takes)
        if self.partition is not None and not _PARTITION.fullmatch(self.partition):
            raise self._invalid("partition", self.partition, "a partition id such as 20260801")

    @classmethod
    def parse(
        cls, text: str | TableRef, project: str | None = None, dataset: str | None = None
    ) -> TableRef:
        """Read `t`, `d.t`, `p.d.t`, `p:d.t`, any of them in backticks or with `$partition`.

        Args:
            text: The address; a `TableRef` gets only the project that it lacks.
            project: The project of an address that names none. It may be scoped to a domain
                (`example.com:my-project`).
            dataset: The dataset of an address that names none.

        Raises:
            InvalidNameError: The address cannot be read, or lacks a dataset.
        """
        if isinstance(text, TableRef):
            return text if text.project else replace(text, project=project)
        given: object = text
        if not isinstance(given, str):
            raise InvalidNameError(
                f"{given!r} is no table: pass 'dataset.table', a TableRef, or what for_run() or "
                "for_keys() of a DailyTable gives."
            )
        if text.count("`") % 2:
            raise InvalidNameError(f"{text!r} has a backtick too many or too few.")
        plain = text.strip().replace("`", "")  # spaces within the backticks belong to the name
        address, dollar, partition = plain.partition("$")
        left, colon, right = address.rpartition(":")
        parts = right.split(".")
        if colon and len(parts) == 2:
            parts = [left, *parts]
        elif colon:
            parts = [f"{left}:{parts[0]}", *parts[1:]]
        if not 1 <= len(parts) <= 3 or (colon and len(parts) != 3):
            raise InvalidNameError(
                f"{text!r} is no table address: write dataset.table or project.dataset.table."
            )
        owner = parts[-3] if len(parts) == 3 else project
        home = parts[-2] if len(parts) > 1 else dataset
        if home is None:
            raise InvalidNameError(f"{text!r} names no dataset: write dataset.table.")
        return cls(home, parts[-1], owner, partition if dollar else None)

    def at(self, partition: str | None) -> TableRef:
        """The same table with another partition, or with none."""
        return replace(self, partition=partition)

    def to_api(self) -> bigquery.TableReference:
        """The address as Google's client takes it, partition included."""
        name = f"{self.table}${self.partition}" if self.partition else self.table
        return bigquery.TableReference(bigquery.DatasetReference(self._owner, self.dataset), name)

    @property
    def path(self) -> str:
        """The resource name of the table in the Storage API, without partition."""
        return f"projects/{self._owner}/datasets/{self.dataset}/tables/{self.table}"

    def __str__(self) -> str:
        address = ".".join(part for part in (self.project, self.dataset, self.table) if part)
        text = f"{address}${self.partition}" if self.partition else address
        return text if text == text.strip() else f"`{text}`"

    @property
    def _owner(self) -> str:
        if self.project is None:
            raise InvalidNameError(f"{self} names no project: write project.dataset.table.")
        return self.project

    def _invalid(self, part: str, value: str, takes: str) -> InvalidNameError:
        offenders = "".join(sorted({c for c in value if not (c.isalnum() or c in "_-")}))
        blame = f" (look at {offenders!r})" if offenders else ""
        return InvalidNameError(f"{value!r} is no {part} name{blame}: a {part} takes {takes}.")


def _is_table_name(name: str) -> bool:
    if not name or len(name.encode()) > MAX_BYTES:
        return False
    return all(c == "-" or unicodedata.category(c).startswith(_TABLE_CATEGORIES) for c in name)
