"""The files that a load is asked for: which there are, and whether they are what they should be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fastavro
from google.cloud import storage

from dagster_bq_connector.errors import (
    ConfigurationError,
    Fault,
    SchemaError,
    SourceFileError,
    classify,
    explain,
)
from dagster_bq_connector.table.admin import REST_ERRORS
from dagster_bq_connector.write.bucket import File, check_bucket, parsed, storage_options
from dagster_bq_connector.write.jobs import FileFormat

LOOK_UPS = 8  # files that are looked up at once
_MAGIC: dict[FileFormat, bytes] = {"parquet": b"PAR1", "avro": b"Obj\x01"}


class SourceFiles:
    """Looks up files in Cloud Storage."""

    def __init__(self, client: storage.Client, deadline: float) -> None:
        """Use `client`; each call may go on for `deadline` seconds without success."""
        self._client, self._deadline = client, deadline
        self._options = storage_options(deadline)

    def find(
        self, uris: str | Sequence[str], file_format: FileFormat, location: str | None
    ) -> list[File]:
        """The files of addresses, each once.

        Args:
            uris: `gs://bucket/name`, one or several; one `*` in a name stands for any text.
            file_format: What they should be. The first one is looked into.
            location: That of the dataset.

        Raises:
            ConfigurationError: An address that is none, or a bucket that is missing or elsewhere.
            SourceFileError: A file is missing, has another format, or a * in its name.
            SchemaError: An Avro column of several types.
            AccessDeniedError: The credentials do not allow to see it.
        """
        given: object = [uris] if isinstance(uris, str) else uris
        if not isinstance(given, Iterable):
            raise ConfigurationError(
                f"uris is {type(uris).__name__}: pass one address, gs://bucket/name, or several."
            )
        addresses = list(dict.fromkeys(map(_address, given)))
        if not addresses:
            raise ConfigurationError("No files: pass one address, gs://bucket/name, or several.")
        for bucket in dict.fromkeys(bucket for bucket, _ in addresses):
            check_bucket(self._client, bucket, location, self._deadline)
        with ThreadPoolExecutor(LOOK_UPS) as pool:
            found = list(pool.map(self._look_up, addresses))
        files = list({file.uri: file for each in found for file in each}.values())
        self._check_format(files[0], file_format)
        return files

    def _look_up(self, address: tuple[str, str]) -> list[File]:
        bucket, name = address
        before, star, after = name.partition("*")
        uri = f"gs://{bucket}/{name}"
        try:
            if not star:
                blob: Any = self._client.bucket(bucket).blob(name)
                blob.reload(**self._options)
                return [File(uri, blob.size)]
            listed: Any = self._client.list_blobs(bucket, prefix=before, **self._options)
            shortest = len(before) + len(after)
            files = [
                File(f"gs://{bucket}/{blob.name}", blob.size)
                for blob in listed
                if blob.name.endswith(after) and len(blob.name) >= shortest
            ]
        except REST_ERRORS as error:
            if getattr(error, "code", None) == 404:
                raise _missing(uri) from error
            raise explain(error, f"File {uri}") from error
        if not files:
            raise _missing(uri)
        if wild := next((file.uri for file in files if "*" in file.uri), None):
            raise SourceFileError(
                f"{wild} has a * in its name, which BigQuery takes for any text, so that it would "
                "load other files with it. Nothing was loaded: rename it."
            )
        return files

    def _check_format(self, file: File, file_format: FileFormat) -> None:
        magic = _MAGIC.get(file_format)
        if magic is None:
            return
        bucket, name = _address(file.uri)
        blob: Any = self._client.bucket(bucket).blob(name)
        try:
            with blob.open("rb", chunk_size=256 * 1024, **self._options) as opened:
                begins = opened.read(len(magic))
                if begins == magic and file_format == "avro":
                    opened.seek(0)
                    _check_avro(file, opened)
        except REST_ERRORS as error:
            if classify(error) is not Fault.REFUSED:
                raise explain(error, f"File {file.uri}") from error
            begins = b""  # such as a range of an empty file
        if begins != magic:
            raise SourceFileError(
                f"{file.uri} is no {file_format} file: it begins with {begins!r}. Nothing was "
                "changed: pass its format (parquet, avro, csv or json_lines)."
            )


def _address(uri: object) -> tuple[str, str]:
    address = parsed(uri) if isinstance(uri, str) else None
    if address is None or not address[1] or address[1].count("*") > 1:
        raise ConfigurationError(f"{uri!r} is no file: write gs://bucket/name, with one * at most.")
    return address


def _missing(uri: str) -> SourceFileError:
    return SourceFileError(f"{uri} does not exist, so nothing was loaded: look at its name.")


def _check_avro(file: File, opened: Any) -> None:
    """Refuse columns of several types, of which BigQuery would make structs.

    Raises:
        SchemaError: There is one.
        SourceFileError: The file cannot be read.
    """
    try:
        schema: Any = fastavro.reader(opened).writer_schema
    except (ValueError, EOFError, KeyError) as error:
        raise SourceFileError(f"{file.uri} is no avro file that can be read: {error}.") from error
    for field in schema.get("fields", ()) if isinstance(schema, dict) else ():
        kinds = field["type"]
        if isinstance(kinds, list) and len([kind for kind in kinds if kind != "null"]) > 1:
            raise SchemaError(
                f"{file.uri}: column {field['name']!r} is of several types ({kinds}), and a column "
                "of BigQuery is of one. Nothing was changed: write the file with one type and null."
            )
