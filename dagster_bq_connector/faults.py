"""What a verdict of BigQuery means here, whichever client and code it comes with."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import google.auth.exceptions
import grpc
import requests
from google.api_core import exceptions as api
from google.cloud.bigquery_storage_v1 import types
from google.rpc import status_pb2

T = TypeVar("T")


class Fault(enum.Enum):
    """What a failure means for the one who made the call."""

    TOO_LARGE = "the request is too large: split it"
    ROWS = "some rows are bad: send the others without them"
    DATASET_MISSING = "the dataset does not exist"
    TABLE_MISSING = "the table does not exist, or not yet"
    SCHEMA_LAG = "a column of the request is not known, or not yet"
    EXHAUSTED = "a quota of hours is used up: waiting for minutes does not help"
    THROTTLED = "too much at once: wait, then repeat with less in flight"
    BROKEN = "the connection or the server went away: connect again and repeat"
    TAKEN = "it exists already"
    STALE = "somebody else changed it first"
    STREAM_OVER = "the stream takes no more rows"
    GAP = "rows before these are missing: go back to the last that was taken"
    DENIED = "the credentials do not allow it"
    REFUSED = "the request is wrong: no retry mends it"


# What `requests` raises of a connection, in the middle of an answer too.
_TRANSPORT = (
    requests.ConnectionError,
    requests.Timeout,
    requests.exceptions.ChunkedEncodingError,
    ConnectionError,
    TimeoutError,
)
_Grpc = grpc.StatusCode
_Storage = types.StorageError.StorageErrorCode
_Row = types.RowError.RowErrorCode


@dataclass(frozen=True, slots=True)
class _Verdicts:
    """What stands for one fault, in each of the languages that BigQuery speaks.

    Attributes:
        fault: What they mean.
        says: Words of a message. They decide before any code but a StorageError's does.
        storage: Codes of the Storage API's `StorageError`, which are the most exact.
        rows: Codes of its `RowError`.
        grpc: Status codes of gRPC.
        reasons: The `reason` of an error of the REST API.
        http: Status codes of HTTP.
    """

    fault: Fault
    says: str = ""
    storage: Sequence[int] = ()
    rows: Sequence[int] = ()
    grpc: Sequence[grpc.StatusCode] = ()
    reasons: Sequence[str] = ()
    http: Sequence[int] = ()


# The order is that in which the words are looked for.
_TABLE: Sequence[_Verdicts] = (
    _Verdicts(
        Fault.TOO_LARGE,
        says=r"request too large|message ?size is too large|message larger than max"
        r"|message exceeds maximum size|request payload size exceeds",
        http=(413,),
    ),
    _Verdicts(Fault.ROWS, rows=(_Row.ROW_ERROR_CODE_UNSPECIFIED, _Row.FIELDS_ERROR)),
    _Verdicts(Fault.DATASET_MISSING, says=r"not found: dataset"),
    _Verdicts(
        Fault.TABLE_MISSING,
        says=r"not found: table|or it may not exist",
        storage=(_Storage.TABLE_NOT_FOUND,),
        grpc=(_Grpc.NOT_FOUND,),
        reasons=("notFound",),
        http=(404,),
    ),
    _Verdicts(Fault.SCHEMA_LAG, storage=(_Storage.SCHEMA_MISMATCH_EXTRA_FIELDS,)),
    _Verdicts(
        Fault.EXHAUSTED,
        says=r"(quota|limit).* (per|a) (day|hour)|daily (quota|limit)"
        r"|quota for (imports or query appends|number of partition modifications|free query bytes)",
    ),
    _Verdicts(
        Fault.THROTTLED,
        says=r"quota.* ((per|a) (second|minute)|concurrent|queued)|request '.* throttled"
        # Of an upload's failure Cloud Storage's client leaves the reason in the text.
        r"|\brateLimitExceeded\b|exceeded rate limits",
        grpc=(_Grpc.RESOURCE_EXHAUSTED,),
        reasons=("rateLimitExceeded", "jobRateLimitExceeded"),
        http=(429,),
    ),
    _Verdicts(Fault.EXHAUSTED, reasons=("quotaExceeded",)),
    _Verdicts(
        Fault.BROKEN,
        storage=(_Storage.KMS_SERVICE_ERROR,),
        grpc=(
            _Grpc.ABORTED,
            _Grpc.CANCELLED,  # by the server: who cancels a call of ours does not ask
            _Grpc.DEADLINE_EXCEEDED,
            _Grpc.INTERNAL,
            _Grpc.UNAVAILABLE,
            _Grpc.UNKNOWN,  # such as "Stream removed", or nothing that gRPC could read
        ),
        reasons=(
            "backendError",
            "badGateway",
            "internalError",
            "jobBackendError",
            "jobInternalError",
            "tableUnavailable",
        ),
        http=(408, 500, 502, 503, 504),
    ),
    _Verdicts(
        Fault.TAKEN,
        storage=(_Storage.STREAM_ALREADY_COMMITTED, _Storage.OFFSET_ALREADY_EXISTS),
        grpc=(_Grpc.ALREADY_EXISTS,),
        reasons=("duplicate",),
        http=(409,),
    ),
    _Verdicts(
        Fault.STALE,
        says=r"concurrent update against|due to concurrent update",
        reasons=("conditionNotMet",),
        http=(412,),
    ),
    _Verdicts(
        Fault.STREAM_OVER,
        storage=(
            _Storage.STREAM_NOT_FOUND,
            _Storage.INVALID_STREAM_STATE,
            _Storage.STREAM_FINALIZED,
        ),
    ),
    _Verdicts(Fault.GAP, storage=(_Storage.OFFSET_OUT_OF_RANGE,), grpc=(_Grpc.OUT_OF_RANGE,)),
    _Verdicts(
        Fault.DENIED,
        # gRPC says UNAVAILABLE of a call for which no token is to be had.
        says=r"from plugin failed.*(invalid_(grant|client)|unauthorized_client|reauthentication)",
        storage=(_Storage.KMS_PERMISSION_DENIED,),
        grpc=(_Grpc.PERMISSION_DENIED, _Grpc.UNAUTHENTICATED),
        reasons=("accessDenied", "authError", "blocked", "forbidden"),
        http=(401, 403),
    ),
    _Verdicts(
        Fault.REFUSED,
        says=r"not found: (uri|files?|job|project)",
        storage=(
            _Storage.INVALID_STREAM_TYPE,
            _Storage.CMEK_NOT_PROVIDED,
            _Storage.INVALID_CMEK_PROVIDED,
            _Storage.CMEK_ENCRYPTION_ERROR,
        ),
        grpc=(
            _Grpc.INVALID_ARGUMENT,
            _Grpc.FAILED_PRECONDITION,
            _Grpc.UNIMPLEMENTED,
            _Grpc.DATA_LOSS,
            _Grpc.OK,  # in an error it contradicts itself
        ),
        reasons=(
            "billingNotEnabled",
            "billingTierLimitExceeded",
            "invalid",
            "invalidQuery",
            "invalidUser",
            "notImplemented",
            "resourceInUse",
            "resourcesExceeded",
            "responseTooLarge",
            "stopped",
            "timeout",  # of a job, which would run as long again
        ),
        http=(400, 405, 501),
    ),
)


def _index(pairs: Iterable[tuple[T, Fault]]) -> Mapping[T, Fault]:
    found: dict[T, Fault] = {}
    for verdict, fault in pairs:
        assert verdict not in found, f"{verdict} is decided twice"
        found[verdict] = fault
    return found


STORAGE_CODES = _index((code, row.fault) for row in _TABLE for code in row.storage)
ROW_CODES = _index((code, row.fault) for row in _TABLE for code in row.rows)
GRPC_CODES = _index((code, row.fault) for row in _TABLE for code in row.grpc)
HTTP_REASONS = _index((reason, row.fault) for row in _TABLE for reason in row.reasons)
HTTP_CODES = _index((code, row.fault) for row in _TABLE for code in row.http)
_MESSAGES = [(re.compile(row.says, re.I), row.fault) for row in _TABLE if row.says]
_GRPC_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


def classify(error: BaseException | status_pb2.Status) -> Fault:
    """Tell what a failure means.

    Args:
        error: A gRPC or HTTP failure as the Google clients raise it, a failure of the transport
            below them, an error of ours that carries its `fault`, or the `error` of an
            `AppendRowsResponse`.

    Returns:
        The one fault that decides what the caller does. What is not known is `REFUSED`: it is
        shown to a person rather than repeated.
    """
    if isinstance(error, status_pb2.Status):
        code = _GRPC_BY_NUMBER.get(error.code, grpc.StatusCode.UNKNOWN)
        return _by_code(code, error.message, _storage_codes(error))
    if isinstance(fault := getattr(error, "fault", None), Fault):
        return fault
    if isinstance(error, grpc.RpcError):
        return _by_code(error_code(error), error_text(error), _details(error))
    if isinstance(error, api.GoogleAPICallError):
        # One that came over gRPC carries the call, with what only its details say.
        if isinstance(error.response, grpc.RpcError):
            return classify(error.response)
        return _by_http(error)
    if isinstance(error, _TRANSPORT):
        return Fault.BROKEN
    if isinstance(error, google.auth.exceptions.TransportError):
        return Fault.BROKEN
    if isinstance(error, api.RetryError) and isinstance(error.cause, Exception):
        return classify(error.cause)
    if isinstance(error, google.auth.exceptions.GoogleAuthError):
        return Fault.DENIED
    answer = getattr(error, "response", None)  # of Cloud Storage's InvalidResponse
    if isinstance(answer, requests.Response):
        return _by_http(api.from_http_response(answer))
    return Fault.REFUSED


def classify_answer(response: Any) -> Fault:
    """Tell what the failure in an `AppendRowsResponse` means; row errors decide when it has any."""
    if response.row_errors:
        return ROW_CODES.get(response.row_errors[0].code, Fault.ROWS)
    return classify(response.error)


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


def _by_code(code: grpc.StatusCode, text: str, storage_codes: Sequence[int]) -> Fault:
    for storage_code in storage_codes:
        if storage_code in STORAGE_CODES:
            return STORAGE_CODES[storage_code]
    return _by_message(text) or GRPC_CODES[code]


def _by_message(text: str) -> Fault | None:
    return next((fault for pattern, fault in _MESSAGES if pattern.search(text)), None)


def _body_errors(error: api.GoogleAPICallError) -> Sequence[Any]:
    """The errors of an answer of Cloud Storage: its client takes them for plain text."""
    answer: Any = error.response
    try:
        return answer.json()["error"]["errors"]
    except (AttributeError, LookupError, TypeError, ValueError):  # no answer, or another body
        return ()


def _by_http(error: api.GoogleAPICallError) -> Fault:
    if fault := _by_message(error.message):
        return fault
    for detail in error.errors or _body_errors(error):
        reason = detail.get("reason") if isinstance(detail, dict) else None
        if reason and reason in HTTP_REASONS:
            return HTTP_REASONS[reason]
    if error.grpc_status_code is not None:
        return GRPC_CODES[error.grpc_status_code]
    return HTTP_CODES.get(int(error.code or 0), Fault.REFUSED)
