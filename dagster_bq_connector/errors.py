"""The exceptions of the library, and `classify`: what a verdict of BigQuery means here."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import google.auth.exceptions
import grpc
import requests
from google.api_core import exceptions as api
from google.cloud.bigquery_storage_v1 import types
from google.rpc import status_pb2


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


class AccessDeniedError(ConnectorError):
    """BigQuery or Cloud Storage refused the credentials."""


class RefusedError(ConnectorError):
    """BigQuery refused the request for a reason that no retry mends."""


class RequestTooLargeError(RefusedError):
    """One request was larger than the server takes. Writers halve their limit and send again."""


class QuotaError(ConnectorError):
    """BigQuery allows no more for now."""


class UnreachableError(ConnectorError):
    """No answer within the deadline. The last failure is the cause of this error."""


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
            append by stream, none after a load.
    """

    SHOWN = 10

    def __init__(self, table: object, rows: Sequence[FailedRow], written: int) -> None:
        self.table, self.rows, self.written = table, list(rows), written
        shown = "\n".join(f"  {row}" for row in self.rows[: self.SHOWN])
        more = f"\n  … and {len(rows) - self.SHOWN} more" if len(rows) > self.SHOWN else ""
        super().__init__(
            f"{len(rows)} row(s) could not be written to {table}; {written} row(s) were. "
            "Mend or drop these rows and append them alone:\n" + shown + more
        )


class Fault(enum.Enum):
    """What a failure means for the one who made the call."""

    BROKEN = "the connection or the server went away: connect again and repeat"
    THROTTLED = "too much at once: wait, then repeat with less in flight"
    TAKEN = "it exists already"
    STALE = "somebody else changed it first"
    DATASET_MISSING = "the dataset does not exist"
    TABLE_MISSING = "the table does not exist, or not yet"
    SCHEMA_LAG = "a column of the request is not known yet"
    STREAM_OVER = "the stream takes no more rows"
    TOO_LARGE = "the request is too large: split it"
    ROWS = "some rows are bad: send the others without them"
    DENIED = "the credentials do not allow it"
    REFUSED = "the request is wrong: no retry mends it"


_Code = types.StorageError.StorageErrorCode

# What is said in words only, most telling first. It decides before any code does.
_MESSAGES: tuple[tuple[re.Pattern[str], Fault], ...] = (
    (re.compile(r"request too large|message larger than max", re.I), Fault.TOO_LARGE),
    (re.compile(r"not found: dataset", re.I), Fault.DATASET_MISSING),
    (re.compile(r"not found: (uri|files?|job|project)", re.I), Fault.REFUSED),
    (re.compile(r"not found: table|or it may not exist", re.I), Fault.TABLE_MISSING),
    (re.compile(r"concurrent update against|due to concurrent update", re.I), Fault.STALE),
    (re.compile(r"inactive for \d+ seconds|server is restarted|draining", re.I), Fault.BROKEN),
)
_STORAGE_CODES: dict[int, Fault] = {
    _Code.TABLE_NOT_FOUND: Fault.TABLE_MISSING,
    _Code.STREAM_ALREADY_COMMITTED: Fault.TAKEN,
    _Code.STREAM_NOT_FOUND: Fault.STREAM_OVER,
    _Code.INVALID_STREAM_STATE: Fault.STREAM_OVER,
    _Code.STREAM_FINALIZED: Fault.STREAM_OVER,
    _Code.SCHEMA_MISMATCH_EXTRA_FIELDS: Fault.SCHEMA_LAG,
    _Code.OFFSET_ALREADY_EXISTS: Fault.TAKEN,
    _Code.KMS_SERVICE_ERROR: Fault.BROKEN,
    _Code.KMS_PERMISSION_DENIED: Fault.DENIED,
}
_GRPC_CODES: dict[grpc.StatusCode, Fault] = {
    grpc.StatusCode.ABORTED: Fault.BROKEN,
    grpc.StatusCode.CANCELLED: Fault.BROKEN,
    grpc.StatusCode.DEADLINE_EXCEEDED: Fault.BROKEN,
    grpc.StatusCode.INTERNAL: Fault.BROKEN,
    grpc.StatusCode.UNAVAILABLE: Fault.BROKEN,
    grpc.StatusCode.UNKNOWN: Fault.BROKEN,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Fault.THROTTLED,
    grpc.StatusCode.ALREADY_EXISTS: Fault.TAKEN,
    grpc.StatusCode.NOT_FOUND: Fault.TABLE_MISSING,
    grpc.StatusCode.PERMISSION_DENIED: Fault.DENIED,
    grpc.StatusCode.UNAUTHENTICATED: Fault.DENIED,
}
_HTTP_REASONS: dict[str, Fault] = {
    "backendError": Fault.BROKEN,
    "badGateway": Fault.BROKEN,
    "internalError": Fault.BROKEN,
    "rateLimitExceeded": Fault.THROTTLED,
    "jobRateLimitExceeded": Fault.THROTTLED,
    "quotaExceeded": Fault.THROTTLED,
    "duplicate": Fault.TAKEN,
    "accessDenied": Fault.DENIED,
}
_HTTP_CODES: dict[int, Fault] = {
    401: Fault.DENIED,
    403: Fault.DENIED,
    404: Fault.TABLE_MISSING,
    408: Fault.BROKEN,
    409: Fault.TAKEN,
    412: Fault.STALE,
    413: Fault.TOO_LARGE,
    429: Fault.THROTTLED,
    500: Fault.BROKEN,
    502: Fault.BROKEN,
    503: Fault.BROKEN,
    504: Fault.BROKEN,
}
_GRPC_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


def classify(error: BaseException | status_pb2.Status) -> Fault:
    """Tell what a failure means.

    Args:
        error: A gRPC or HTTP failure as the Google clients raise it, a failure of the transport
            below them, or the `error` of an `AppendRowsResponse`.

    Returns:
        The one fault that decides what the caller does. What is not known is `REFUSED`: it is
        shown to a person rather than repeated.
    """
    if isinstance(error, status_pb2.Status):
        return _by_status(error)
    if isinstance(error, RequestTooLargeError):
        return Fault.TOO_LARGE
    if isinstance(error, grpc.RpcError):
        return _by_code(error_code(error), error_text(error), _details(error))
    if isinstance(error, api.GoogleAPICallError):
        return _by_http(error)
    if isinstance(error, (requests.ConnectionError, requests.Timeout, ConnectionError)):
        return Fault.BROKEN
    if isinstance(error, google.auth.exceptions.TransportError):
        return Fault.BROKEN
    if isinstance(error, api.RetryError) and isinstance(error.cause, Exception):
        return classify(error.cause)
    if isinstance(error, google.auth.exceptions.GoogleAuthError):
        return Fault.DENIED
    return Fault.REFUSED


def error_code(error: grpc.RpcError) -> grpc.StatusCode:
    """The status code of a failed call; `UNKNOWN` when it carries none."""
    return error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN


def error_text(error: BaseException | status_pb2.Status) -> str:
    """What the server said, in one line without the wrapping of the client libraries."""
    if isinstance(error, status_pb2.Status):
        return error.message
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details() or 'no details'}"
    if isinstance(error, api.GoogleAPICallError):
        said = [detail.get("message") for detail in error.errors if isinstance(detail, dict)]
        return str(said[0]) if said and said[0] else error.message
    return str(error) or type(error).__name__


def _details(error: grpc.RpcError) -> Sequence[int]:
    """The StorageError codes that a failed call carries in its trailing metadata."""
    trailing: Any = error.trailing_metadata() if isinstance(error, grpc.Call) else None
    for key, value in trailing or ():
        if key == "grpc-status-details-bin":
            return _storage_codes(status_pb2.Status.FromString(value))
    return ()


def _storage_codes(status: status_pb2.Status) -> list[int]:
    codes: list[int] = []
    for detail in status.details:
        found = types.StorageError.pb()()
        if detail.Is(found.DESCRIPTOR) and detail.Unpack(found):
            codes.append(int(found.code))
    return codes


def _by_status(status: status_pb2.Status) -> Fault:
    code = _GRPC_BY_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN)
    return _by_code(code, status.message, _storage_codes(status))


def _by_code(code: grpc.StatusCode, text: str, storage_codes: Sequence[int]) -> Fault:
    for storage_code in storage_codes:
        if storage_code in _STORAGE_CODES:
            return _STORAGE_CODES[storage_code]
    return _by_message(text) or _GRPC_CODES.get(code, Fault.REFUSED)


def _by_message(text: str) -> Fault | None:
    return next((fault for pattern, fault in _MESSAGES if pattern.search(text)), None)


def _by_http(error: api.GoogleAPICallError) -> Fault:
    if fault := _by_message(error.message):
        return fault
    for detail in error.errors:
        reason = detail.get("reason") if isinstance(detail, dict) else None
        if reason in _HTTP_REASONS:
            return _HTTP_REASONS[reason]
    if error.grpc_status_code is not None:
        return _GRPC_CODES.get(error.grpc_status_code, Fault.REFUSED)
    return _HTTP_CODES.get(int(error.code or 0), Fault.REFUSED)


_DATASET = re.compile(r"not found: dataset (\S+)", re.I)


def explain(error: Exception, subject: object) -> ConnectorError:
    """A failure of a Google client as an error of ours that names the thing and the remedy.

    Args:
        error: What the client raised; it should be the cause of what is raised instead.
        subject: The table, job or file of the call.
    """
    if isinstance(error, ConnectorError):
        return error
    fault, text = classify(error), error_text(error)
    if fault is Fault.DATASET_MISSING:
        found = _DATASET.search(text)
        dataset = found[1] if found else "project:dataset"
        return DatasetNotFoundError(
            f"{subject}: dataset {dataset} does not exist. Create it (bq mk --location=EU "
            f"--dataset {dataset}), or set create_dataset=True on the writer. BigQuery said: {text}"
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
    if fault is Fault.BROKEN:
        return UnreachableError(f"{subject}: no success within the deadline. Last failure: {text}")
    return RefusedError(f"{subject}: {text}")
