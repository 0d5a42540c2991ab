"""What a verdict means, whichever client and code it comes with."""

import google.auth.exceptions
import grpc
import pytest
import requests
from google.api_core import exceptions as api
from google.cloud.bigquery_storage_v1 import types
from google.cloud.storage.exceptions import InvalidResponse
from google.rpc import status_pb2

from dagster_bq_connector import faults
from dagster_bq_connector.errors import (
    DatasetNotFoundError,
    FailedRow,
    FailedRowsError,
    Fault,
    QuotaError,
    RefusedError,
    RequestTooLargeError,
    UnreachableError,
    classify,
    classify_answer,
    error_text,
    explain,
)
from dagster_bq_connector.retry import Backoff

Code = types.StorageError.StorageErrorCode


def invalid(status: int, body: str = "", method: str = "POST") -> InvalidResponse:
    """What Cloud Storage's client makes of an answer to an upload."""
    answer = requests.Response()
    answer.status_code, answer._content = status, body.encode()
    answer.request = requests.Request(method, "http://localhost/upload").prepare()
    return InvalidResponse(answer, "Request failed with status code", status)


def storage_status(code: int) -> status_pb2.Status:
    status = status_pb2.Status(code=3, message="no words")
    status.details.add().Pack(types.StorageError.pb(types.StorageError(code=code)))
    return status


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (storage_status(Code.TABLE_NOT_FOUND), Fault.TABLE_MISSING),
        (storage_status(Code.SCHEMA_MISMATCH_EXTRA_FIELDS), Fault.SCHEMA_LAG),
        (storage_status(Code.OFFSET_ALREADY_EXISTS), Fault.TAKEN),
        (storage_status(Code.STREAM_FINALIZED), Fault.STREAM_OVER),
        (storage_status(Code.KMS_SERVICE_ERROR), Fault.BROKEN),
        (storage_status(Code.KMS_PERMISSION_DENIED), Fault.DENIED),
        (storage_status(Code.CMEK_NOT_PROVIDED), Fault.REFUSED),
        (storage_status(Code.OFFSET_OUT_OF_RANGE), Fault.GAP),
        (storage_status(Code.STORAGE_ERROR_CODE_UNSPECIFIED), Fault.REFUSED),
        (storage_status(999), Fault.REFUSED),
        (status_pb2.Status(code=3, message="request too large: 2 limit 1"), Fault.TOO_LARGE),
        (status_pb2.Status(code=3, message="bad"), Fault.REFUSED),
        (status_pb2.Status(code=7, message="denied (or it may not exist)."), Fault.TABLE_MISSING),
        (status_pb2.Status(code=7, message="denied"), Fault.DENIED),
        (status_pb2.Status(code=10, message="stop"), Fault.BROKEN),
        (status_pb2.Status(code=8, message="quota"), Fault.THROTTLED),
        (status_pb2.Status(code=8, message="Exceeds 'AppendRows throughput'"), Fault.THROTTLED),
        (
            status_pb2.Status(code=14, message="Request 'AppendRows' from role 'x' throttled: y"),
            Fault.THROTTLED,
        ),
        (
            status_pb2.Status(code=8, message="Quota exceeded: limit 'Appends per day'"),
            Fault.EXHAUSTED,
        ),
        (
            status_pb2.Status(code=8, message="Received message larger than max (5 vs. 4)"),
            Fault.TOO_LARGE,
        ),
        (
            status_pb2.Status(code=3, message="MessageSize is too large. Max allow: 1 Actual: 2"),
            Fault.TOO_LARGE,
        ),
        (status_pb2.Status(code=999, message="?"), Fault.BROKEN),
        (
            status_pb2.Status(
                code=14,
                message="Getting metadata from plugin failed with error: ('invalid_grant: Revoked'",
            ),
            Fault.DENIED,
        ),
        (
            status_pb2.Status(
                code=14, message="Getting metadata from plugin failed with error: timed out"
            ),
            Fault.BROKEN,
        ),
        (api.NotFound("Not found: Dataset p:d"), Fault.DATASET_MISSING),
        (api.NotFound("Not found: Table p:d.t"), Fault.TABLE_MISSING),
        (api.Conflict("Already Exists: Job p:j"), Fault.TAKEN),
        (api.PreconditionFailed("etag"), Fault.STALE),
        (api.Forbidden("no", errors=[{"reason": "rateLimitExceeded"}]), Fault.THROTTLED),
        (api.Forbidden('POST u: {"error": {"reason": "rateLimitExceeded"}}'), Fault.THROTTLED),
        (api.Forbidden("no", errors=[{"reason": "accessDenied"}]), Fault.DENIED),
        (api.BadRequest("no"), Fault.REFUSED),
        (api.BadRequest("no", errors=[{"reason": "jobBackendError"}]), Fault.BROKEN),
        (
            api.Forbidden(
                "Quota exceeded: Your table exceeded quota for imports or query appends per table",
                errors=[{"reason": "quotaExceeded"}],
            ),
            Fault.EXHAUSTED,
        ),
        (api.Forbidden("Too much", errors=[{"reason": "quotaExceeded"}]), Fault.EXHAUSTED),
        (
            api.Forbidden(
                "Quota exceeded: max number of jobs that can be queued per project",
                errors=[{"reason": "quotaExceeded"}],
            ),
            Fault.THROTTLED,
        ),
        (api.Forbidden("no", errors=["in no known form"]), Fault.DENIED),
        (api.GoogleAPICallError("no code"), Fault.REFUSED),
        (api.ServiceUnavailable("no"), Fault.BROKEN),
        (api.InternalServerError("no"), Fault.BROKEN),
        (api.TooManyRequests("no"), Fault.THROTTLED),
        (api.RetryError("timeout", cause=api.NotFound("Not found: Table x")), Fault.TABLE_MISSING),
        (api.RetryError("timeout", cause=requests.ConnectionError("refused")), Fault.BROKEN),
        (requests.Timeout("slow"), Fault.BROKEN),
        (requests.exceptions.ChunkedEncodingError("20 of 74 bytes"), Fault.BROKEN),
        (api.RetryError("timeout", cause=invalid(503)), Fault.BROKEN),
        (invalid(403, '{"error": {"errors": [{"reason": "rateLimitExceeded"}]}}'), Fault.THROTTLED),
        (invalid(403, "no"), Fault.DENIED),
        (ConnectionResetError("gone"), Fault.BROKEN),
        (TimeoutError(), Fault.BROKEN),
        (google.auth.exceptions.TransportError("no"), Fault.BROKEN),
        (google.auth.exceptions.RefreshError("no"), Fault.DENIED),
        (RequestTooLargeError("no"), Fault.TOO_LARGE),
        (ValueError("what"), Fault.REFUSED),
    ],
)
def test_classify(error: BaseException | status_pb2.Status, fault: Fault) -> None:
    assert classify(error) is fault


def test_every_code_is_decided_on_purpose() -> None:
    assert set(grpc.StatusCode) == set(faults.GRPC_CODES)
    # The code that says nothing leaves it to the words and the status code.
    assert set(Code) - {Code.STORAGE_ERROR_CODE_UNSPECIFIED} == set(faults.STORAGE_CODES)
    assert set(types.RowError.RowErrorCode) == set(faults.ROW_CODES)


@pytest.mark.parametrize("code", list(Code))
def test_the_storage_code_decides_before_words_and_status(code: int) -> None:
    status = status_pb2.Status(code=8, message="request too large")
    status.details.add().Pack(types.StorageError.pb(types.StorageError(code=code)))
    assert classify(status) is faults.STORAGE_CODES.get(code, Fault.TOO_LARGE)


def test_row_errors_decide_what_an_answer_means() -> None:
    pb = types.AppendRowsResponse.pb()
    status = status_pb2.Status(code=8, message="quota")
    assert classify_answer(pb(error=status)) is Fault.THROTTLED
    for code in (0, 1, 77):
        answer = pb(error=status, row_errors=[{"index": 0, "code": code}])
        assert classify_answer(answer) is Fault.ROWS


def test_a_quota_names_what_to_do() -> None:
    spent = api.Forbidden("x", errors=[{"reason": "quotaExceeded", "message": "Imports a day."}])
    error = explain(spent, "Load job j")
    assert isinstance(error, QuotaError)
    assert str(error).startswith("Load job j: a quota of a day or so is used up.")
    assert str(error).endswith("BigQuery said: Imports a day.")
    assert "ask for more quota" in str(error)
    assert isinstance(explain(api.TooManyRequests("slow"), "Table t"), QuotaError)


def test_a_call_that_failed_carries_its_storage_code(storage, channel) -> None:
    from grpc_status import rpc_status

    def append(_requests, context):
        context.abort_with_status(rpc_status.to_status(storage_status(Code.STREAM_NOT_FOUND)))
        yield

    storage.append = append
    method = channel.stream_stream("/google.cloud.bigquery.storage.v1.BigQueryWrite/AppendRows")
    with pytest.raises(grpc.RpcError) as caught:
        list(method(iter([b""])))
    assert classify(caught.value) is Fault.STREAM_OVER
    assert error_text(caught.value) == "INVALID_ARGUMENT: no words"


def test_explain_names_the_thing_and_the_remedy() -> None:
    not_found = api.NotFound("GET http://x: Not found: Dataset p:d")
    missing = explain(not_found, "Table p.d.t", "US")
    assert isinstance(missing, DatasetNotFoundError)
    assert "(bq mk --location=US --dataset p:d)" in str(missing)
    assert "--location=LOCATION" in str(explain(not_found, "Table p.d.t"))
    assert "create_dataset=True" in str(missing)
    gone = explain(requests.ConnectionError("refused"), "Table p.d.t")
    assert isinstance(gone, UnreachableError)
    bad = api.BadRequest("POST http://x: bad", errors=[{"message": "bad", "reason": "invalid"}])
    assert str(explain(bad, "Job j")) == "Job j: bad"
    assert isinstance(explain(bad, "Job j"), RefusedError)
    assert explain(missing, "other") is missing


def test_failed_rows_are_named_up_to_ten() -> None:
    rows = [FailedRow(n, "bad", "c") for n in range(12)]
    text = str(FailedRowsError("p.d.t", rows, 5))
    assert text.startswith("12 row(s) could not be written to p.d.t; 5 row(s) were.")
    assert "row 9, column 'c': bad" in text
    assert "row 10" not in text
    assert "and 2 more" in text


def test_backoff_repeats_what_passes_and_nothing_else() -> None:
    tries: list[int] = []

    def call() -> str:
        tries.append(1)
        if len(tries) < 4:
            raise ConnectionResetError("gone")
        return "done"

    quick = Backoff(initial=0.001, cap=0.002, deadline=20)
    assert quick.call(call) == "done"
    assert len(tries) == 4
    with pytest.raises(ValueError, match="no"):
        quick.call(lambda: (_ for _ in ()).throw(ValueError("no")))


def test_pauses_grow_to_the_cap_with_jitter_and_end() -> None:
    pauses = list(Backoff(initial=1, cap=8, attempts=6, deadline=1000).pauses())
    for pause, nominal in zip(pauses, (1, 2, 4, 8, 8, 8), strict=True):
        assert 0.75 * nominal <= pause <= 1.25 * nominal
    assert len(set(pauses)) == 6
    assert list(Backoff(deadline=0).pauses()) == []
