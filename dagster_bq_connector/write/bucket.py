"""Buckets and files of Cloud Storage: their addresses, their sizes, and where they are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from google.api_core.exceptions import NotFound
from google.cloud import storage
from google.cloud.storage.retry import DEFAULT_RETRY

from dagster_bq_connector.errors import ConfigurationError, Fault, classify, explain
from dagster_bq_connector.retry import rest_options
from dagster_bq_connector.table.admin import REST_ERRORS

_BUCKET = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")  # as Google's client takes them
# A bucket never moves: its location is asked for once by a process.
_locations: dict[tuple[str, str], str] = {}


@dataclass(frozen=True, slots=True)
class File:
    """A file in Cloud Storage.

    Attributes:
        uri: Its address, `gs://bucket/name`.
        bytes: Its size.
        rows: How many rows it holds; None when that is not known.
    """

    uri: str
    bytes: int
    rows: int | None = None


def parsed(uri: str) -> tuple[str, str] | None:
    """The bucket and the name of `gs://bucket/name`, or None when it is no such address."""
    scheme, _, path = uri.partition("gs://")
    bucket, _, name = path.partition("/")
    return (bucket, name) if not scheme and _BUCKET.fullmatch(bucket) else None


def storage_options(deadline: float) -> Any:
    """What each call of the Cloud Storage client is given."""
    timeout = rest_options(deadline)["timeout"]
    return {"timeout": timeout, "retry": DEFAULT_RETRY.with_timeout(deadline)}


def check_bucket(
    client: storage.Client, bucket: str, location: str | None, deadline: float
) -> None:
    """Refuse a bucket from which a dataset cannot be loaded.

    Where the bucket is cannot be seen without `storage.buckets.get`; then BigQuery decides.

    Args:
        client: Reaches the bucket.
        bucket: Its name.
        location: That of the dataset, if it is known.
        deadline: Seconds that a call may go on without success.

    Raises:
        ConfigurationError: The bucket does not exist, or is elsewhere.
        UnreachableError: No answer within the deadline.
    """
    place = (str(client.api_endpoint), bucket)
    if place not in _locations:
        try:
            found: Any = client.get_bucket(bucket, **storage_options(deadline))
        except NotFound as error:
            raise no_bucket(bucket) from error
        except REST_ERRORS as error:
            if classify(error) is Fault.DENIED:
                return
            raise explain(error, f"Bucket gs://{bucket}") from error
        _locations[place] = str(found.location)
    if location and tells_location(client) and apart(location, _locations[place]):
        raise ConfigurationError(
            f"The bucket gs://{bucket} is in {_locations[place]}, and the dataset is in "
            f"{location}: BigQuery does not load from there. Use a bucket in {location}. Nothing "
            "was changed."
        )


def no_bucket(bucket: str) -> ConfigurationError:
    """The error for a bucket that does not exist."""
    return ConfigurationError(
        f"The bucket gs://{bucket} does not exist: look at its name, or create it in the datasets' "
        f"location (gcloud storage buckets create gs://{bucket})."
    )


def tells_location(client: storage.Client) -> bool:
    """Whether the location of a bucket means something: all buckets of an emulator have one."""
    return not str(client.api_endpoint).startswith("http://")


def apart(dataset: str, bucket: str) -> bool:
    """Whether it is certain that a dataset cannot be loaded from a bucket, by their locations.

    A dataset in the US takes all buckets, one in the EU those of Europe, one in a region those in
    it. Whether a bucket of several regions serves a region is left to BigQuery.
    """
    home, place = dataset.upper(), bucket.upper()
    if home in ("US", place):
        return False
    if home == "EU":
        return not place.startswith("EU")
    return "-" in place
