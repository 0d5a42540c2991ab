"""Folders of files, on a disk or in Cloud Storage: what is in them, and bytes of it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from google.cloud import storage

from dagster_bq_connector.errors import (
    AccessDeniedError,
    ChangesLostError,
    ConfigurationError,
    SourceMissingError,
    explain,
)
from dagster_bq_connector.table.admin import REST_ERRORS
from dagster_bq_connector.write.bucket import no_bucket, parsed, storage_options

# Other files are left alone, so that a writer can give a file its name when it is whole.
SUFFIXES = (".ndjson", ".jsonl", ".json")
CHUNK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of changes.

    Attributes:
        name: Its path in the folder, with `/`.
        size: In bytes.
        checksum: Of its content, when the folder has one at hand; else empty.
        created: When it came to the folder under this name, in nanoseconds since 1970 by the
            folder's clock. On a disk: when it was last changed or renamed.
        version: Which of the objects that had this name it is; 0 on a disk.
    """

    name: str
    size: int
    checksum: str
    created: int
    version: int = 0


class Folder(ABC):
    """Files below one address, in the order of their names.

    Attributes:
        address: The folder's, as people write it.
        grows: Whether a file may be seen while it is being written.
    """

    address: str
    grows: bool

    @abstractmethod
    def files(self) -> list[SourceFile]:
        """All files of changes, in the order of their names."""

    @abstractmethod
    def read(self, file: SourceFile, begin: int, end: int) -> bytes:
        """The bytes `[begin, end)` of a file, which are there."""

    def chunks(self, file: SourceFile, begin: int, end: int) -> Iterator[bytes]:
        """The same in pieces of `CHUNK_BYTES`."""
        for at in range(begin, end, CHUNK_BYTES):
            yield self.read(file, at, min(at + CHUNK_BYTES, end))

    def name(self, file: str) -> str:
        """A file as it is named to people."""
        return f"{self.address}/{file}"

    def cut(self, file: str) -> ChangesLostError:
        """The error for a file that was there a moment ago, or was longer."""
        return ChangesLostError(
            f"{self.name(file)} was taken away or cut while it was read: put it back as it was. "
            "Nothing was skipped."
        )


class LocalFolder(Folder):
    """A folder of a disk. Its files may grow."""

    grows = True

    def __init__(self, path: str) -> None:
        """Use the folder at `path`; nothing is looked at yet."""
        self._path = Path(path)
        self.address = path.rstrip("/") or "/"

    def files(self) -> list[SourceFile]:
        """All files of changes, in the order of their names."""
        if not self._path.is_dir():
            raise SourceMissingError(
                f"The folder {self.address} does not exist, or is none: look at its name, or "
                "create it."
            )

        def fail(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):  # taken away while it was looked at
                raise error

        found: list[SourceFile] = []
        try:
            for folder, _, names in os.walk(self._path, onerror=fail):
                paths = [Path(folder, name) for name in names if name.endswith(SUFFIXES)]
                found += filter(None, map(self._file, paths))
        except OSError as error:
            raise self._refused(error) from error
        return sorted(found, key=lambda file: file.name)

    def read(self, file: SourceFile, begin: int, end: int) -> bytes:
        """The bytes `[begin, end)` of a file, which are there."""
        try:
            with (self._path / file.name).open("rb") as opened:
                opened.seek(begin)
                content = opened.read(end - begin)
        except FileNotFoundError as error:
            raise self.cut(file.name) from error
        except OSError as error:
            raise self._refused(error) from error
        if len(content) != end - begin:
            raise self.cut(file.name)
        return content

    def _file(self, path: Path) -> SourceFile | None:
        try:
            status = path.stat()
        except FileNotFoundError:
            return None
        # A file that is moved here keeps the time of its content: the time of the move counts.
        created = max(status.st_mtime_ns, status.st_ctime_ns)
        return SourceFile(path.relative_to(self._path).as_posix(), status.st_size, "", created)

    def _refused(self, error: OSError) -> AccessDeniedError:
        return AccessDeniedError(
            f"The folder {self.address} cannot be read: {error}. Let this user read it."
        )


class BucketFolder(Folder):
    """The objects below a prefix of a bucket. An object never changes, and comes as a whole."""

    grows = False

    def __init__(self, address: str, client: storage.Client, deadline: float) -> None:
        """Use `address`, a `gs://bucket/prefix`; nothing is reached yet."""
        place = parsed(address)
        if place is None:
            raise ConfigurationError(f"{address!r}: write gs://bucket/prefix.")
        bucket, prefix = place
        self._options = storage_options(deadline)
        self._bucket: Any = client.bucket(bucket)
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self.address = f"gs://{bucket}/{self._prefix}".rstrip("/")

    def files(self) -> list[SourceFile]:
        """All files of changes, in the order of their names."""
        try:
            listed: list[Any] = list(
                self._bucket.list_blobs(
                    prefix=self._prefix,
                    fields="items(name,size,crc32c,generation,timeCreated),nextPageToken",
                    **self._options,
                )
            )
        except REST_ERRORS as error:
            if getattr(error, "code", None) == 404:
                raise SourceMissingError(str(no_bucket(self._bucket.name))) from error
            raise explain(error, f"Folder {self.address}") from error
        files = [self._file(blob) for blob in listed if blob.name.endswith(SUFFIXES)]
        return sorted(files, key=lambda file: file.name)

    def read(self, file: SourceFile, begin: int, end: int) -> bytes:
        """The bytes `[begin, end)` of a file, which are there."""
        blob = self._bucket.blob(self._prefix + file.name)
        try:
            content = blob.download_as_bytes(
                start=begin, end=end - 1, if_generation_match=file.version, **self._options
            )
        except REST_ERRORS as error:
            # 412: another object has its name by now; 416: the object is shorter.
            if getattr(error, "code", None) in (404, 412, 416):
                raise self.cut(file.name) from error
            raise explain(error, f"File {self.name(file.name)}") from error
        if len(content) != end - begin:
            raise self.cut(file.name)
        return content

    def _file(self, blob: Any) -> SourceFile:
        created = int(blob.time_created.timestamp() * 1_000_000) * 1000
        name = blob.name.removeprefix(self._prefix)
        return SourceFile(name, blob.size, blob.crc32c or "", created, int(blob.generation))


def open_folder(place: str, client: storage.Client | None, deadline: float) -> Folder:
    """The folder at `place`, a path or `gs://bucket/prefix`; nothing is looked at yet.

    Raises:
        ConfigurationError: There is no client for it, or `place` is no address.
    """
    if not place.startswith("gs://"):
        return LocalFolder(place)
    if client is None:
        raise ConfigurationError(f"{place}: pass a client of Cloud Storage.")
    return BucketFolder(place, client, deadline)


def digest(files: Sequence[SourceFile]) -> str:
    """One text for which files there are and what is in them, as far as that is at hand."""
    told = "".join(f"{file.name}\0{file.size}\0{file.checksum}\n" for file in files)
    return blake2b(told.encode(errors="surrogateescape"), digest_size=12).hexdigest()
