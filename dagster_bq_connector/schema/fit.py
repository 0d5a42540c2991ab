"""Which Arrow types go into which columns of a table that exists."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.types as at
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.schema.arrow import (
    element_type,
    extension,
    is_civil,
    is_instant,
    is_list,
    plain_type,
)
from dagster_bq_connector.schema.names import refuse_twins
from dagster_bq_connector.schema.types import SCALARS, child_fields, cure, type_name


def mismatches(kind: pa.DataType, column: SchemaField, path: str) -> list[str]:
    """Why values of an Arrow type cannot go into a column; empty when they can.

    Args:
        kind: The Arrow type.
        column: The column.
        path: What to call the column, with dots for fields of structs.

    Raises:
        SchemaError: A struct has two fields that differ by case only.
    """
    kind = plain_type(kind)
    if at.is_null(kind):
        return []
    if is_list(kind) != (column.mode == "REPEATED"):
        wanted = "a list" if column.mode == "REPEATED" else "single values"
        return [f"column {path!r} takes {wanted}, not {kind}"]
    if is_list(kind):
        kind = plain_type(element_type(kind))
    name = type_name(column)
    if at.is_null(kind):
        return []
    if name in ("RECORD", "RANGE"):
        return _struct_mismatches(kind, column, path)
    if name not in SCALARS:
        return [f"column {path!r} is {name}, which this library does not carry"]
    if SCALARS[name].takes(kind):
        return []
    return [f"column {path!r} is {name} and takes no Arrow {kind}: {_remedy(kind, name)}"]


def _remedy(kind: pa.DataType, name: str) -> str:
    if is_civil(kind) and name == "TIMESTAMP":
        return "it has no time zone: say which one, or use a DATETIME column"
    if is_instant(kind) and name == "DATETIME":
        return "it is an instant: say in which time zone it is read, or use a TIMESTAMP column"
    if name == "JSON":
        return "pass the JSON as text"
    if extension(kind) or at.is_union(kind):
        return cure(kind)
    return f"cast it to {SCALARS[name].wire}"


def _struct_mismatches(kind: pa.DataType, column: SchemaField, path: str) -> list[str]:
    name = type_name(column)
    if not isinstance(kind, pa.StructType):
        what = "struct of its fields" if name == "RECORD" else "struct of a start and an end"
        return [f"column {path!r} is {name} and takes no Arrow {kind}: pass a {what}"]
    given = [kind.field(index) for index in range(kind.num_fields)]
    refuse_twins([child.name for child in given], f"{path}.")
    known = {child.name.casefold(): child for child in child_fields(column)}
    names = {child.name.casefold() for child in given}
    problems = [
        # A range that lacks an end is not one without end: that is a null.
        f"column {path!r} lacks the required field {child.name!r}"
        for child in known.values()
        if (child.mode == "REQUIRED" or name == "RANGE") and child.name.casefold() not in names
    ]
    for field in given:
        child = known.get(field.name.casefold())
        if child is None:
            problems.append(f"column {path!r} has no field {field.name!r}")
        else:
            problems += mismatches(field.type, child, f"{path}.{child.name}")
    return problems
