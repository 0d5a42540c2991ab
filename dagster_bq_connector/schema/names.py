"""Names of columns: which BigQuery takes.

From BigQuery's documentation of schemas, "Column names" and "Flexible column names".
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from google.cloud.bigquery import SchemaField

from dagster_bq_connector.errors import SchemaError

MAX_CHARACTERS = 300
# Letters, marks, numbers, connectors, dashes and spaces of any script.
_CATEGORIES = ("L", "M", "N", "Pc", "Pd", "Zs")
_SPECIAL = frozenset("&%=+:'<>#|")
_RESERVED = (
    "_TABLE_",
    "_FILE_",
    "_PARTITION",
    "_ROW_TIMESTAMP",
    "__ROOT__",
    "_COLIDENTIFIER",
    "_CHANGE_SEQUENCE_NUMBER",
    "_CHANGE_TYPE",
    "_CHANGE_TIMESTAMP",
)


def has_flexible_name(column: SchemaField) -> bool:
    """Whether a column, or a field in it, has a name of other than ASCII letters, digits and _."""
    plain = column.name.isascii() and column.name.isidentifier()
    return not plain or any(map(has_flexible_name, column.fields))


def check_name(name: str, path: str) -> None:
    """Refuse a name that a column cannot have.

    Args:
        name: The name of a column, or of a field of a struct.
        path: What to call it, with dots for fields of structs.

    Raises:
        SchemaError: It is empty, has more than 300 characters, begins as only names of
            BigQuery's own do, or holds a character that no name may hold.
    """
    if not name:
        raise SchemaError(f"Column {path!r} has no name: give it one.")
    if len(name) > MAX_CHARACTERS:
        raise SchemaError(
            f"Column {path[:40]!r}… has a name of {len(name)} characters, and BigQuery takes "
            f"{MAX_CHARACTERS}: shorten it."
        )
    for prefix in _RESERVED:
        if name.upper().startswith(prefix):
            raise SchemaError(
                f"Column {path!r} begins with {prefix}, which BigQuery keeps for itself: rename it."
            )
    if illegal := [character for character in name if not _is_legal(character)]:
        offenders = ", ".join(map(repr, dict.fromkeys(illegal)))
        raise SchemaError(
            f"Column {path!r} holds {offenders}, which no column name may hold: rename it. "
            "Letters, digits, marks, dashes and spaces of any script are taken, and any of "
            "_ & % = + : ' < > # |"
        )


def refuse_twins(names: Iterable[str], path: str = "") -> None:
    """Refuse names that differ by case only.

    Args:
        names: The names of the columns, or of the fields of one struct.
        path: The struct's name with a dot after it.

    Raises:
        SchemaError: Two are one to BigQuery.
    """
    seen: dict[str, str] = {}
    for name in names:
        if (other := seen.get(name.casefold())) is not None:
            raise SchemaError(
                f"Columns {path + other!r} and {path + name!r} are one column to BigQuery, which "
                "ignores case: rename one."
            )
        seen[name.casefold()] = name


def _is_legal(character: str) -> bool:
    return character in _SPECIAL or unicodedata.category(character).startswith(_CATEGORIES)
