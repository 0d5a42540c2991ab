"""Application-created write streams: made, finalized and committed. Rows go by own_stream.py."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import grpc
from google.api_core.exceptions import GoogleAPICallError, RetryError
from google.cloud.bigquery_storage_v1 import BigQueryWriteClient, types

from dagster_bq_connector.errors import (
    Fault,
    RefusedError,
    UnknownOutcomeError,
    classify,
    error_text,
    explain,
)
from dagster_bq_connector.retry import ANSWER_SECONDS, PASSING, Backoff
from dagster_bq_connector.table.admin import EnsuredTable
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.write.steps import step

T = TypeVar("T")
Type = types.WriteStream.Type
_Code = types.StorageError.StorageErrorCode

# How long a table that was just created may be unknown to the Storage API: minutes, as users of
# several clients report.
NEW_TABLE_SECONDS = 120.0
_MISSING = frozenset({Fault.TABLE_MISSING, Fault.DENIED})  # what a table says that is not there yet
# What a commit says of a finalized stream that BigQuery has removed: of its state, by Google's
# reference, "a stream that is not finalized or is garbaged".
_GONE = frozenset({_Code.STREAM_NOT_FOUND, _Code.INVALID_STREAM_STATE})
_ERRORS = (GoogleAPICallError, RetryError, grpc.RpcError)


class StreamGone(RefusedError):
    """The stream does not exist, or not any more."""


class Streams:
    """The control calls of the Storage Write API, each tried again until a deadline."""

    def __init__(self, client: BigQueryWriteClient, deadline: float) -> None:
        """Use `client`; each call may go on for `deadline` seconds."""
        self._client, self._deadline = client, deadline

    def create(self, table: EnsuredTable, kind: Type) -> str:
        """Make a stream. One whose answer was lost is never used, and BigQuery removes it.

        Args:
            table: The table; one that was created lately is waited for.
            kind: `PENDING`, `BUFFERED` or `COMMITTED`.

        Returns:
            Its resource name.

        Raises:
            ConnectorError: It cannot be made.
        """
        stream = types.WriteStream(type_=kind)

        def create() -> str:
            return self._client.create_write_stream(
                parent=table.ref.path, write_stream=stream, retry=None, timeout=ANSWER_SECONDS
            ).name

        with step("create stream"):
            return self._call(_patient(create, table), f"A write stream of {table.ref}")

    def finalize(self, name: str) -> int:
        """Let the stream take no more rows. Repeating it does no harm.

        Returns:
            How many rows it holds.

        Raises:
            StreamGone: It is not there.
            ConnectorError: It cannot be finalized.
        """

        def finalize() -> int:
            answer = self._client.finalize_write_stream(
                name=name, retry=None, timeout=ANSWER_SECONDS
            )
            return int(answer.row_count)

        with step("finalize stream"):
            return self._call(finalize, f"Write stream {name}", {Fault.TABLE_MISSING})

    def commit(self, table: TableRef, names: Sequence[str]) -> None:
        """Make the rows of finalized pending streams visible, of all at once or of none.

        Streams that are all committed are so by an earlier call for the same names.

        Raises:
            UnknownOutcomeError: A stream is gone, or they are committed in part, so that it cannot
                be known.
            ConnectorError: They cannot be committed. Nothing is visible.
        """
        if not names:
            return
        request = types.BatchCommitWriteStreamsRequest(parent=table.path, write_streams=list(names))

        def commit() -> types.BatchCommitWriteStreamsResponse:
            return self._client.batch_commit_write_streams(
                request, retry=None, timeout=ANSWER_SECONDS
            )

        subject = f"The commit of {len(names)} write streams of {table}"
        try:
            with step("commit streams"):
                answer = self._call(commit, subject, {Fault.TABLE_MISSING})
        except StreamGone as gone:
            raise _unknown(table, str(gone)) from gone
        errors = {error.entity: error for error in answer.stream_errors}
        if not errors:
            return
        codes = {error.code for error in errors.values()}
        done = codes == {_Code.STREAM_ALREADY_COMMITTED}
        if done and len(errors) == len(set(names)):
            return
        told = "; ".join(f"{error.entity}: {error.error_message}" for error in errors.values())
        if done or codes & _GONE:
            raise _unknown(table, told)
        raise RefusedError(f"The write streams of {table} cannot be committed: {told}")

    def flush(self, name: str, rows: int, table: EnsuredTable | None = None) -> None:
        """Make the first rows of a buffered stream visible. Repeating it does no harm.

        Args:
            name: The stream.
            rows: How many are visible then.
            table: Its table, when that may have been created lately: then it is waited for.

        Raises:
            StreamGone: It is not there.
            ConnectorError: They cannot be flushed.
        """
        if not rows:
            return

        def flush() -> None:
            try:
                self._client.flush_rows(
                    types.FlushRowsRequest(write_stream=name, offset=rows - 1),
                    retry=None,
                    timeout=ANSWER_SECONDS,
                )
            except _ERRORS as error:
                if classify(error) is not Fault.TAKEN:  # they are visible already
                    raise

        call = _patient(flush, table) if table else flush
        with step("flush stream"):
            self._call(call, f"Write stream {name}", {Fault.TABLE_MISSING})

    def _call(
        self, function: Callable[[], T], subject: str, gone: Collection[Fault] = frozenset()
    ) -> T:
        """Call until a deadline; `gone` are the faults that say the same as a stream's own end."""
        backoff = Backoff(deadline=self._deadline)
        try:
            return backoff.call(function, repeat_on=PASSING)
        except _ERRORS as error:
            if classify(error) in {Fault.STREAM_OVER, *gone}:
                raise StreamGone(f"{subject}: {error_text(error)}") from error
            raise explain(error, subject) from error


def _unknown(table: TableRef, told: str) -> UnknownOutcomeError:
    return UnknownOutcomeError(
        f"Whether rows were appended to {table} cannot be known. Of the write streams that were "
        f"prepared for it, BigQuery says: {told.rstrip('.')}."
    )


def _patient(function: Callable[[], T], table: EnsuredTable) -> Callable[[], T]:
    """The same call, which waits until a new table is known to the Storage API."""
    left = NEW_TABLE_SECONDS - table.age
    if left <= 0:
        return function
    return lambda: Backoff(initial=0.25, deadline=left).call(function, repeat_on=_MISSING)
