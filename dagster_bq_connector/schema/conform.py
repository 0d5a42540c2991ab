"""The cast of batches to the columns of one table, without loss and row by row where it fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.errors import FailedRow, SchemaError
from dagster_bq_connector.schema.cast import cast_array, nulls
from dagster_bq_connector.schema.data import fitting_before
from dagster_bq_connector.schema.fit import mismatches
from dagster_bq_connector.schema.limits import check_values, takes_any
from dagster_bq_connector.schema.names import refuse_twins
from dagster_bq_connector.schema.place import Place
from dagster_bq_connector.schema.types import wire_field


@dataclass(frozen=True)
class Conformed:
    """Rows as they travel, and the rows that could not be made so.

    Attributes:
        batch: The good rows, in their order.
        positions: For each good row its position in the batch that came in; None when all are
            good.
        failed: The other rows; their `index` is the position in the batch that came in.
    """

    batch: pa.RecordBatch
    positions: np.ndarray[tuple[int], np.dtype[np.int64]] | None
    failed: list[FailedRow]


class Conformer:
    """Casts batches to the columns of one table, without loss."""

    def __init__(
        self, schema: pa.Schema, columns: Sequence[SchemaField], complete: bool = False
    ) -> None:
        """Match the columns by name, ignoring case as BigQuery does.

        Args:
            schema: The columns of the first batch.
            columns: The columns of the table.
            complete: Add the columns that the data lacks, as nulls.

        Raises:
            SchemaError: A column that the table lacks, a required one that the data lacks, or
                types that cannot be cast without loss. Every offender is named. Or no columns at
                all.
        """
        if not schema.names:
            raise SchemaError(
                "The data has no columns: pass those of the table, also when there are no rows."
            )
        refuse_twins(schema.names)
        known = {column.name.casefold(): column for column in columns}
        if unknown := [name for name in schema.names if name.casefold() not in known]:
            raise SchemaError(
                f"The table has no column {', '.join(map(repr, unknown))}: add it to the table, as "
                "TableOptions(evolution='add') does, or drop it from the data. The table has "
                f"{', '.join(c.name for c in columns)}."
            )
        given = {name.casefold() for name in schema.names}
        missing = [
            c.name for c in columns if c.mode == "REQUIRED" and c.name.casefold() not in given
        ]
        if missing:
            named = ", ".join(map(repr, missing))
            raise SchemaError(f"The data lacks the required column {named}.")
        self._names = schema.names
        self._columns = [known[name.casefold()] for name in schema.names]
        self._unchecked = [takes_any(column) for column in self._columns]
        self._added = [c for c in columns if c.name.casefold() not in given] if complete else []
        self._checked: list[pa.Schema] = []
        self._seen = 0  # rows of the batches so far
        self._check(schema)
        self._taken = [wire_field(column) for column in self._columns]
        self.schema = pa.schema([*self._taken, *map(wire_field, self._added)])

    def __call__(self, batch: pa.RecordBatch) -> Conformed:
        """Cast one batch.

        A value that does not fit its column (too large, too precise, null where none may be)
        fails its row and no other.

        Raises:
            SchemaError: The batch has types that cannot be cast without loss.
        """
        self._check(batch.schema)
        self._seen += batch.num_rows
        failed: dict[int, FailedRow] = {}
        arrays: list[pa.Array[Any]] = []
        same = batch.schema.equals(self.schema, check_metadata=True)
        for name, field, column, unchecked in zip(
            self._names, self._taken, self._columns, self._unchecked, strict=True
        ):
            place, given = Place(column.name, failed), batch.column(name)
            array = cast_array(given, field.type, place)
            if not unchecked:
                check_values(array, column, place)
            same = same and array is given
            arrays.append(array)
        arrays += [nulls(batch.num_rows, wire_field(column).type) for column in self._added]
        if same and not failed:
            return Conformed(batch, None, [])
        if not failed:
            return Conformed(pa.RecordBatch.from_arrays(arrays, schema=self.schema), None, [])
        good = np.ones(batch.num_rows, dtype=bool)
        good[list(failed)] = False
        positions = np.flatnonzero(good)
        kept = pa.array(positions, pa.int64())
        arrays = [array.take(kept) for array in arrays]
        rows = [failed[index] for index in sorted(failed)]
        return Conformed(pa.RecordBatch.from_arrays(arrays, schema=self.schema), positions, rows)

    def _check(self, schema: pa.Schema) -> None:
        """Types may change from piece to piece of the data: each new schema is looked at once."""
        if any(schema.equals(other) for other in self._checked):
            return
        found = [
            problem
            for name, column in zip(self._names, self._columns, strict=True)
            for problem in mismatches(schema.field(name).type, column, column.name)
        ]
        if found:
            raise SchemaError(
                f"The data does not fit the table: {'; '.join(found)}.{fitting_before(self._seen)}"
            )
        self._checked.append(schema)
