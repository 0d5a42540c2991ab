"""What a verdict means, whichever client and code it comes with."""

import google.auth.exceptions
import grpc
import pytest
import requests
from google.api_core import exceptions as api
from google.cloud.bigquery_storage_v1 import types
from google.rpc import status_pb2

from dagster_bq_connector.errors import (
    DatasetNotFoundError,
    FailedRow,
    FailedRowsError,
    Fault,
    RefusedError,
    RequestTooLargeError,
    UnreachableError,
    classify,
    error_text,
    explain,
)
from dagster_bq_connector.retry import Backoff

Code = types.StorageError.StorageErrorCode


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
        (status_pb2.Status(code=3, message="request too large: 2 limit 1"), Fault.TOO_LARGE),
        (status_pb2.Status(code=3, message="bad"), Fault.REFUSED),
        (status_pb2.Status(code=7, message="denied (or it may not exist)."), Fault.TABLE_MISSING),
        (status_pb2.Status(code=7, message="denied"), Fault.DENIED),
        (status_pb2.Status(code=10, message="stop"), Fault.BROKEN),
        (status_pb2.Status(code=8, message="quota"), Fault.THROTTLED),
        (api.NotFound("Not found: Dataset p:d"), Fault.DATASET_MISSING),
        (api.NotFound("Not found: Table p:d.t"), Fault.TABLE_MISSING),
        (api.Conflict("Already Exists: Job p:j"), Fault.TAKEN),
        (api.PreconditionFailed("etag"), Fault.STALE),
        (api.Forbidden("no", errors=[{"reason": "rateLimitExceeded"}]), Fault.THROTTLED),
        (api.Forbidden("no", errors=[{"reason": "accessDenied"}]), Fault.DENIED),
        (api.BadRequest("no"), Fault.REFUSED),
        (api.ServiceUnavailable("no"), Fault.BROKEN),
        (api.InternalServerError("no"), Fault.BROKEN),
        (api.TooManyRequests("no"), Fault.THROTTLED),
        (api.RetryError("timeout", cause=api.NotFound("Not found: Table x")), Fault.TABLE_MISSING),
        (api.RetryError("timeout", cause=requests.ConnectionError("refused")), Fault.BROKEN),
        (requests.Timeout("slow"), Fault.BROKEN),
        (ConnectionResetError("gone"), Fault.BROKEN),
        (google.auth.exceptions.TransportError("no"), Fault.BROKEN),
        (google.auth.exceptions.RefreshError("no"), Fault.DENIED),
        (RequestTooLargeError("no"), Fault.TOO_LARGE),
        (ValueError("what"), Fault.REFUSED),
    ],
)
def test_classify(error: BaseException | status_pb2.Status, fault: Fault) -> None:
    assert classify(error) is fault


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
    missing = explain(api.NotFound("GET http://x: Not found: Dataset p:d"), "Table p.d.t")
    assert isinstance(missing, DatasetNotFoundError)
    assert "bq mk --location=EU --dataset p:d" in str(missing)
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
