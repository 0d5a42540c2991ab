"""The ledger's home for large values: an object of Cloud Storage a key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.api_core.exceptions import NotFound
from google.cloud import storage
from google.cloud.storage.retry import DEFAULT_RETRY

from dagster_bq_connector.errors import ConfigurationError, explain
from dagster_bq_connector.ledger.entry import Key, Kind, Ledger, is_gone, kind_of
from dagster_bq_connector.retry import rest_options
from dagster_bq_connector.table.admin import REST_ERRORS

SUFFIX = ".json"


class CloudStorageLedger(Ledger):
    """An object a key; its generation is what is compared.

    Objects of writes are under `<prefix>/writes/`, those of streams under `<prefix>/streams/`: a
    lifecycle rule of the bucket deletes the former after 60 days, and must not touch the latter.
    Nothing is deleted without such a rule, and what it deletes is counted from an object's last
    change. Cloud Storage takes one change of an object a second; what is too much waits.
    """

    def __init__(self, client: storage.Client, home: str, deadline: float = 300.0) -> None:
        """Use `home`, a `gs://bucket/prefix`; nothing is reached yet.

        Args:
            client: Calls Cloud Storage.
            home: The bucket exists; the prefix may be left out.
            deadline: Seconds that a call may go on without success.

        Raises:
            ConfigurationError: `home` is no such address.
        """
        super().__init__(deadline)
        scheme, _, path = home.partition("gs://")
        bucket, _, prefix = path.partition("/")
        if scheme or not bucket:
            raise ConfigurationError(f"ledger={home!r}: write gs://bucket/prefix.")
        rest = rest_options(deadline)
        retry = DEFAULT_RETRY.with_timeout(deadline)
        self._patient: Any = {"timeout": rest["timeout"], "retry": retry}
        # A repeated change must be looked at before it is repeated again: not by Google's client.
        self._once: Any = {"timeout": rest["timeout"], "retry": None}
        try:
            self._bucket = client.bucket(bucket)
        except ValueError as error:  # no bucket has such a name
            raise ConfigurationError(
                f"ledger={home!r}: {error} Write gs://bucket/prefix."
            ) from None
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""

    def place(self, name: str) -> str:
        """The object's address."""
        return f"gs://{self._bucket.name}/{self._path(name)}"

    def _folder(self, kind: Kind) -> str:
        return f"{self._prefix}{kind}s/"

    def _path(self, name: str) -> str:
        return f"{self._folder(kind_of(name) or 'stream')}{name}{SUFFIX}"

    def _read(self, name: str) -> tuple[str, str] | None:
        blob = self._bucket.blob(self._path(name))
        try:
            content = blob.download_as_bytes(**self._once)
        except NotFound as error:
            if not is_gone(error):
                raise
            return None
        # Of the same answer as the content: a second call could tell that of a later one.
        return content.decode(errors="replace"), str(blob.generation)

    def _put(self, key: Key, document: str, token: str | None) -> str:
        blob = self._bucket.blob(self._path(key.name))
        blob.cache_control = "no-store"  # else who reads a public object may read an old one
        try:
            blob.upload_from_string(
                document,
                content_type="application/json",
                if_generation_match=int(token or 0),  # 0: there is none
                **self._once,
            )
        except NotFound as error:  # never of the object: one that is gone fails the condition
            raise ConfigurationError(
                f"The ledger's bucket gs://{self._bucket.name} does not exist: create it "
                f"(gcloud storage buckets create gs://{self._bucket.name})."
            ) from error
        return str(blob.generation)

    def _remove(self, name: str, token: str) -> None:
        blob = self._bucket.blob(self._path(name))
        blob.delete(if_generation_match=int(token), **self._once)

    def _names(self, kind: Kind) -> Iterator[str]:
        try:
            for blob in self._bucket.list_blobs(prefix=self._folder(kind), **self._patient):
                name = blob.name.rpartition("/")[2].removesuffix(SUFFIX)
                if blob.name == self._path(name):
                    yield name
        except REST_ERRORS as error:
            raise explain(error, f"Ledger gs://{self._bucket.name}/{self._prefix}") from error
