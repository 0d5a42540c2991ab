"""What BigQuery answers to a commit, and whether the rows are there then."""

from typing import Any

import pytest
from google.api_core.exceptions import NotFound, PermissionDenied
from google.cloud.bigquery_storage_v1 import types

from dagster_bq_connector.errors import AccessDeniedError, RefusedError, UnknownOutcomeError
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.write.streams import Streams

Code = types.StorageError.StorageErrorCode
NAMES = ("a", "b")


class Client:
    """Answers a commit with errors of streams, or fails."""

    def __init__(self, errors: dict[str, Code], failure: Exception | None) -> None:
        self.errors, self.failure = errors, failure

    def batch_commit_write_streams(
        self, *_: object, **__: object
    ) -> types.BatchCommitWriteStreamsResponse:
        if self.failure is not None:
            raise self.failure
        told = [
            types.StorageError(code=code, entity=name, error_message=code.name)
            for name, code in self.errors.items()
        ]
        return types.BatchCommitWriteStreamsResponse(stream_errors=told)


def commit(errors: dict[str, Code] | None = None, failure: Exception | None = None) -> None:
    client: Any = Client(errors or {}, failure)
    Streams(client, 1).commit(TableRef("shop", "orders", "project"), NAMES)


def test_streams_that_are_all_committed_are_a_success() -> None:
    commit()
    commit(dict.fromkeys(NAMES, Code.STREAM_ALREADY_COMMITTED))


@pytest.mark.parametrize(
    "errors",
    [
        {"a": Code.STREAM_NOT_FOUND},
        {"a": Code.STREAM_NOT_FOUND, "b": Code.STREAM_ALREADY_COMMITTED},
        dict.fromkeys(NAMES, Code.INVALID_STREAM_STATE),
        {"a": Code.STREAM_ALREADY_COMMITTED},
    ],
)
def test_streams_that_are_gone_or_committed_in_part_are_not_guessed(
    errors: dict[str, Code],
) -> None:
    """Google's reference says INVALID_STREAM_STATE of a stream that is "garbaged"."""
    with pytest.raises(UnknownOutcomeError, match=f"cannot be known.*a: {errors['a'].name}"):
        commit(errors)


def test_a_commit_that_finds_nothing_is_not_guessed() -> None:
    with pytest.raises(UnknownOutcomeError, match="cannot be known.*Requested entity"):
        commit(failure=NotFound("Requested entity was not found."))


def test_other_failures_of_a_commit_change_nothing() -> None:
    with pytest.raises(RefusedError, match="cannot be committed: a: INVALID_STREAM_TYPE"):
        commit({"a": Code.INVALID_STREAM_TYPE})
    with pytest.raises(AccessDeniedError):
        commit(failure=PermissionDenied("No."))
