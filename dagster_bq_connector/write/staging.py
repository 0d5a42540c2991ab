"""Rows become Parquet files in Cloud Storage, of bounded size and under a name of one attempt."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from google.api_core.exceptions import NotFound
from google.cloud import storage
from google.cloud.storage.retry import DEFAULT_RETRY

from dagster_bq_connector.errors import (
    ConfigurationError,
    ConnectorError,
    Fault,
    classify,
    explain,
)
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.retry import Backoff, rest_options
from dagster_bq_connector.table.admin import REST_ERRORS
from dagster_bq_connector.write.bucket import File, check_bucket, no_bucket, parsed
from dagster_bq_connector.write.steps import step

# Bytes of Arrow that become one file, and that all files in the making may hold.
FILE_BYTES = 64 * 1024 * 1024
BUFFER_BYTES = 256 * 1024 * 1024
CLEAR_SECONDS = 30.0  # in which a deletion succeeds: who terminates a run waits for the last one


@dataclass
class Staged:
    """Files in Cloud Storage and what is in them."""

    files: list[File] = field(default_factory=list[File])
    rows: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files)


class Staging:
    """Writes Parquet files under a prefix that belongs to one attempt alone."""

    def __init__(self, client: storage.Client, home: str, attempt: str, deadline: float) -> None:
        """Use `home`, a `gs://bucket/prefix`, for one attempt; nothing is reached yet.

        Raises:
            ConfigurationError: `home` is no such address.
        """
        if (address := parsed(home)) is None or "*" in home:  # a load job looks for what fits it
            raise ConfigurationError(f"staging={home!r}: write gs://bucket or gs://bucket/prefix.")
        self._name, prefix = address
        self._deadline, rest = deadline, rest_options(deadline)
        retry = DEFAULT_RETRY.with_timeout(deadline)
        self._options: Any = {"timeout": rest["timeout"], "retry": retry}
        self._prefix = "/".join(filter(None, [prefix.strip("/"), attempt]))
        self._client, self._deadline = client, deadline
        self._bucket = client.bucket(self._name)
        self._blobs: list[storage.Blob] = []

    def check(self, location: str | None) -> None:
        """Refuse a bucket from which a dataset in `location` cannot be loaded.

        Raises:
            ConfigurationError: It does not exist, or is elsewhere.
        """
        check_bucket(self._client, self._name, location, self._deadline)

    def write(self, batches: list[pa.RecordBatch], staged: Staged) -> None:
        """Write one file.

        Raises:
            ConnectorError: It could not be stored.
        """
        sink = io.BytesIO()
        table = pa.Table.from_batches(batches)
        # Of what Parquet offers, zstd without dictionaries is the smallest at that speed.
        pq.write_table(table, sink, compression="zstd", use_dictionary=False)
        blob = self._bucket.blob(f"{self._prefix}/{len(self._blobs):06d}.parquet")
        size = sink.tell()
        self._blobs.append(blob)
        uri = f"gs://{self._name}/{blob.name}"

        def upload() -> None:
            sink.seek(0)
            blob.upload_from_file(sink, size=size, if_generation_match=0, **self._options)

        try:
            with step("stage file"):  # a 403 may be a limit of rates, which the client fails for
                Backoff(deadline=self._deadline).call(upload, repeat_on={Fault.THROTTLED})
        except REST_ERRORS as error:
            # The name is this attempt's own: what stands there is this file, stored by a try
            # whose answer was lost.
            if classify(error) is not Fault.STALE:
                raise self._explain(error, uri) from error
        staged.files.append(File(uri, size, table.num_rows))
        staged.rows += table.num_rows

    def clear(self) -> None:
        """Delete this attempt's files. When that fails, the rest is left to the bucket's rules.

        A failure that passes is waited for, so that one of them does not leave all other files.
        """
        retry = DEFAULT_RETRY.with_timeout(min(self._deadline, CLEAR_SECONDS))
        for blob in self._blobs:
            try:
                with step("delete file"):
                    blob.delete(timeout=self._options["timeout"], retry=retry)
            except NotFound:  # it was never stored, or the answer to its deletion was lost
                continue
            except REST_ERRORS:
                return

    def _explain(self, error: Exception, uri: str) -> ConnectorError:
        if isinstance(error, NotFound):
            return no_bucket(self._name)
        return explain(error, f"Staging file {uri}")


class Stager:
    """Collects rows by target and stages them in files of bounded size."""

    def __init__(self, staging: Staging, progress: Progress) -> None:
        """Write through `staging`; count rows in `progress`."""
        self._staging, self._progress = staging, progress
        self._buffers: dict[str, list[pa.RecordBatch]] = defaultdict(list)
        self._held: dict[str, int] = defaultdict(int)
        self.staged: dict[str, Staged] = defaultdict(Staged)

    def add(self, target: str, batch: pa.RecordBatch) -> None:
        """Keep the rows of one target until they fill a file."""
        rows = max(1, batch.num_rows * FILE_BYTES // max(1, batch.nbytes))
        for start in range(0, batch.num_rows, rows):
            self._keep(target, batch.slice(start, rows))

    def _keep(self, target: str, batch: pa.RecordBatch) -> None:
        self._buffers[target].append(batch)
        self._held[target] += batch.nbytes
        if self._held[target] >= FILE_BYTES:
            self._flush(target)
        elif sum(self._held.values()) >= BUFFER_BYTES:
            self._flush(max(self._held, key=self._held.__getitem__))
        self._progress.advance(batch.num_rows)

    def finish(self, targets: Iterable[str], schema: pa.Schema) -> None:
        """Stage what is left. A target without rows gets a file without rows."""
        empty = pa.RecordBatch.from_pylist([], schema=schema)
        for target in targets:
            if self._buffers[target] or not self.staged[target].files:
                self._buffers[target].append(empty)
                self._flush(target)

    def _flush(self, target: str) -> None:
        self._staging.write(self._buffers.pop(target), self.staged[target])
        self._held.pop(target, None)
