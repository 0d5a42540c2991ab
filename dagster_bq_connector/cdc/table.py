"""What a user says of a table that changes are applied to, and of changes that cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeAlias

from google.cloud.bigquery import SchemaField

from dagster_bq_connector.errors import ConfigurationError
from dagster_bq_connector.table.options import (
    MAX_CLUSTERING,
    MAX_PRIMARY_KEY,
    Evolution,
    RangePartitioning,
    TimePartitioning,
)
from dagster_bq_connector.table.ref import TableRef

Truncates: TypeAlias = Literal["fail", "ignore"]


@dataclass(frozen=True)
class CdcTable:
    """A table that the changes of one source table are applied to.

    A missing table is created. An existing one keeps its columns' types, and must have a primary
    key; its primary key, clustering and `max_staleness` are checked before the first change.

    Attributes:
        table: Its address.
        primary_key: Up to 16 columns. Empty: the fields of the messages' key, in their order.
        max_staleness: How old the answer to a query may be, so that BigQuery need not apply
            waiting changes at each query. None leaves it as it is, `timedelta(0)` clears it.
        schema: Columns of a table that is created, before any that the messages' schemas have
            besides. Needed when messages carry no schemas.
        partitioning: Of a table that is created. The partitioning of an existing one is checked
            when this is set.
        clustering: Up to 4 columns. None: by the primary key, which makes applying changes
            cheaper; `()` leaves it as it is.
        evolution: `"add"`: a column that the table lacks is added as a NULLABLE one before its
            first row, if the messages carry schemas. `"none"`: changes that have such a column
            fail.
        reconcile: What becomes of an existing table that differs. False: an error names each
            difference. True: `max_staleness` and clustering are changed, the table gets the label
            that created ones have, by which a replacement of its rows is refused, and an error
            names what BigQuery cannot change in place.
        parked: Keep its changes as dead letters, untried, so that the stream's other tables go
            on while this one is mended.

    Raises:
        ConfigurationError: A partition, more columns than BigQuery takes, or values that are none.
    """

    table: str | TableRef
    primary_key: Sequence[str] = ()
    max_staleness: timedelta | None = None
    schema: Sequence[SchemaField] = ()
    partitioning: TimePartitioning | RangePartitioning | None = None
    clustering: Sequence[str] | None = None
    evolution: Evolution = "add"
    reconcile: bool = False
    parked: bool = False

    def __post_init__(self) -> None:
        if self.evolution not in ("none", "add"):
            raise ConfigurationError(f"evolution={self.evolution!r}: it is 'none' or 'add'.")
        for name, limit in (("clustering", MAX_CLUSTERING), ("primary_key", MAX_PRIMARY_KEY)):
            columns = getattr(self, name)
            if isinstance(columns, str):
                raise ConfigurationError(f"{name}={columns!r}: write a list of column names.")
            if columns is not None and len(columns) > limit:
                raise ConfigurationError(f"{name} takes {limit} columns at most.")
        if "$" in str(self.table):
            raise ConfigurationError(
                f"{self.table} is one partition: changes are applied to a whole table."
            )
        if self.max_staleness is not None and self.max_staleness < timedelta(0):
            raise ConfigurationError(
                f"max_staleness={self.max_staleness}: it is no time before now. timedelta(0) "
                "clears it."
            )


@dataclass(frozen=True)
class DeadLetters:
    """Failed events are kept in a table, from which they can be applied again.

    Attributes:
        table: Its address. It is created when it is missing. Several streams may share one.
    """

    table: str | TableRef


FailedRowPolicy: TypeAlias = Literal["fail", "drop"] | DeadLetters


def check_policy(policy: object) -> None:
    """Refuse what is no policy for failed rows.

    Raises:
        ConfigurationError: It is none.
    """
    if policy not in ("fail", "drop") and not isinstance(policy, DeadLetters):
        raise ConfigurationError(
            f"failed_rows={policy!r}: it is 'fail', 'drop' or DeadLetters('dataset.table')."
        )
