"""The exceptions of the library. What makes one of a verdict of BigQuery is in faults.py."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

# Named again, so that who handles errors has them from one place.
from dagster_bq_connector.faults import Fault as Fault
from dagster_bq_connector.faults import classify as classify
from dagster_bq_connector.faults import classify_answer as classify_answer
from dagster_bq_connector.faults import error_text as error_text


class ConnectorError(Exception):
    """Base of everything that this library raises on purpose.

    Its `__cause__` is the failure of Google's client that led to it, if one did.
    """


class ConfigurationError(ConnectorError):
    """The resource cannot work as it is configured, whatever the data."""


class InvalidNameError(ConnectorError, ValueError):
    """A table, dataset or project name that BigQuery does not take, or no address at all."""


class DatasetNotFoundError(ConnectorError):
    """The dataset does not exist, or may not be seen with these credentials."""


class TableNotFoundError(ConnectorError):
    """The table does not exist, or may not be seen with these credentials."""


class TableMismatchError(ConnectorError):
    """The table exists, but not with the layout that was asked for."""


class SchemaError(ConnectorError):
    """Columns that cannot be stored in the table, or a type that BigQuery does not have."""


class PartitionError(ConnectorError):
    """A partition key or a row that does not belong to the partitions of the operation."""


class UnsupportedError(ConnectorError):
    """The write method cannot do what was asked. Raised before anything is written."""


class SourceFileError(ConnectorError):
    """A file to be loaded that is missing, or is not what it should be. Nothing was changed."""


class WriteKeyError(ConnectorError):
    """A write key that is missing, or that was used for another write. Nothing was changed."""


class UnknownOutcomeError(ConnectorError):
    """Whether a write has happened cannot be known from here: the error says how to find out."""


class AccessDeniedError(ConnectorError):
    """BigQuery or Cloud Storage refused the credentials."""


class RefusedError(ConnectorError):
    """BigQuery refused the request for a reason that no retry mends."""


class PartitionFilterError(RefusedError):
    """The table can be read only with a filter on the column that partitions it: pass `where`."""


class RequestTooLargeError(RefusedError):
    """One request was larger than the server takes. Writers halve their limit and send again."""

    fault = Fault.TOO_LARGE


class QuotaError(ConnectorError):
    """BigQuery allows no more for now."""


class UnreachableError(ConnectorError):
    """No answer within the deadline. The last failure is the cause of this error."""


class OrderBreakError(ConnectorError):
    """The order of a change stream's source is lost. Nothing was applied from there on.

    Attributes:
        noted (Mapping[str, Any]): What the ordering profile must find in its state when the break
            is acknowledged; JSON.
    """

    def __init__(self, message: str, noted: Mapping[str, Any] | None = None) -> None:
        self.noted = dict(noted or {})
        super().__init__(message)


class StreamStoppedError(ConnectorError):
    """A change stream that waits until an operator has dealt with why it was stopped.

    Attributes:
        stream (str): Its name.
        reason (str): Why it was stopped.
    """

    def __init__(self, stream: str, reason: str) -> None:
        self.stream, self.reason = stream, reason
        super().__init__(
            f"Stream {stream!r} is stopped, and nothing was applied: {reason} When that is dealt "
            f"with: python -m dagster_bq_connector.cdc acknowledge {stream}"
        )


class PlanMismatchError(ConnectorError):
    """A run that was launched for a plan which does not begin where its stream stands now."""


class LeaseLostError(ConnectorError):
    """A run whose change stream was taken over by another. Nothing is lost."""


class LedgerError(ConnectorError):
    """An entry of the ledger that cannot be kept, read or changed as it was asked for."""


class SourceMissingError(ConnectorError):
    """A topic, folder or bucket of a source of changes that does not exist. Nothing was read."""


class ChangesLostError(ConnectorError):
    """Changes that were not read are no longer in their source. The stream stands where it was."""


class SourceChangedError(ConnectorError):
    """A source of changes that is not what the stream's position was taken of.

    Such as a topic that was created anew, or a file that came among those that are read already.
    """


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A row that no retry can save.

    Attributes:
        index: Position of the row in the data that was given, from 0.
        reason: What is wrong with it.
        column: The column at fault, when it is known.
    """

    index: int
    reason: str
    column: str | None = None

    def moved(self, by: int) -> FailedRow:
        """The same row, counted from `by` rows earlier."""
        return replace(self, index=self.index + by)

    def __str__(self) -> str:
        place = f"row {self.index}" + (f", column {self.column!r}" if self.column else "")
        return f"{place}: {self.reason}"


class FailedRowsError(ConnectorError):
    """Some rows can be saved by no retry. Each is named.

    Attributes:
        table (TableRef): The table.
        rows (list[FailedRow]): The failed rows, in the order of their index.
        written (int): How many rows of the same call are in the table: all the others after an
            append by the default stream, none after a load or an append that is exactly once; of a
            long append those up to its last checkpoint.
    """

    SHOWN = 10

    def __init__(
        self, table: object, rows: Sequence[FailedRow], written: int, remedy: str | None = None
    ) -> None:
        self.table, self.rows, self.written = table, list(rows), written
        shown = "\n".join(f"  {row}" for row in self.rows[: self.SHOWN])
        more = f"\n  … and {len(rows) - self.SHOWN} more" if len(rows) > self.SHOWN else ""
        remedy = remedy or ("append them alone" if written else "write all of the data again")
        super().__init__(
            f"{len(rows)} row(s) could not be written to {table}; {written} row(s) were. "
            f"Mend or drop these rows and {remedy}:\n{shown}{more}"
        )


class FailedEventsError(ConnectorError):
    """Change events that no retry can save, and that the stream may not pass over.

    Attributes:
        stream (str): The stream.
        events (list[str]): Each of them: its message, the column if one is at fault, the reason.
    """

    SHOWN = 10

    def __init__(self, stream: str, events: Sequence[str], remedy: str | None = None) -> None:
        self.stream, self.events = stream, list(events)
        shown = "\n".join(f"  {event}" for event in self.events[: self.SHOWN])
        more = f"\n  … and {len(events) - self.SHOWN} more" if len(events) > self.SHOWN else ""
        remedy = remedy or (
            "Mend what is named; or choose another policy for failed rows, 'drop' or "
            "DeadLetters(table); or skip them by giving the stream a position after them"
        )
        super().__init__(
            f"{len(events)} event(s) of stream {stream!r} cannot be applied:\n{shown}{more}\n"
            "The stream stands where it stood; what of its plan was applied is applied again, "
            f"which changes nothing. {remedy}."
        )


_DATASET = re.compile(r"not found: dataset (\S+)", re.I)


def explain(error: Exception, subject: object, location: str | None = None) -> ConnectorError:
    """A failure of a Google client as an error of ours that names the thing and the remedy.

    Args:
        error: What the client raised; it should be the cause of what is raised instead.
        subject: The table, job or file of the call.
        location: Where the caller's datasets are, if it knows.
    """
    if isinstance(error, ConnectorError):
        return error
    return explain_fault(classify(error), error_text(error), subject, location)


def explain_fault(
    fault: Fault, text: str, subject: object, location: str | None = None
) -> ConnectorError:
    """A fault as an error that names the thing, what the server said, and the remedy."""
    if fault is Fault.DATASET_MISSING:
        found = _DATASET.search(text)
        dataset = found[1] if found else "project:dataset"
        create = f"bq mk --location={location or 'LOCATION'} --dataset {dataset}"
        return DatasetNotFoundError(
            f"{subject}: dataset {dataset} does not exist. Create it ({create}), or set "
            f"create_dataset=True on the writer. BigQuery said: {text}"
        )
    if fault is Fault.TABLE_MISSING:
        return TableNotFoundError(
            f"{subject} does not exist, or these credentials may not see it. BigQuery said: {text}"
        )
    if fault is Fault.DENIED:
        return AccessDeniedError(f"{subject}: the credentials do not allow it: {text}")
    if fault is Fault.THROTTLED:
        return QuotaError(
            f"{subject}: BigQuery allows no more for now. Try later, or ask for more quota. "
            f"BigQuery said: {text}"
        )
    if fault is Fault.EXHAUSTED:
        return QuotaError(
            f"{subject}: a quota of a day or so is used up. It fills again over the day: write "
            f"less often, or ask for more quota. BigQuery said: {text}"
        )
    if fault is Fault.BROKEN:
        return UnreachableError(f"{subject}: no success within the deadline. Last failure: {text}")
    return RefusedError(f"{subject}: {text}")
