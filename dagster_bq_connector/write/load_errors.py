"""What BigQuery says of a load, as an error that names the remedy."""

from __future__ import annotations

import re

from dagster_bq_connector.errors import (
    ConfigurationError,
    ConnectorError,
    RefusedError,
    SourceFileError,
)

_LOCATIONS = re.compile(
    r"cannot read and write in different locations: source: (\S+), destination: ([\w-]+)", re.I
)
_MISSING = re.compile(r"not found: (?:uri|files?) (\S+)", re.I)
_UNREADABLE = re.compile(r"error while reading data|input .* is not in \w+ format", re.I)
_TAKEN = re.compile(r"already exists: table", re.I)


def load_error(error: ConnectorError) -> ConnectorError:
    """The same failure by its kind; as it is when nothing more is known."""
    text = str(error)
    if found := _LOCATIONS.search(text):
        return ConfigurationError(
            f"{text} The files are in {found[1]}, and the dataset is in {found[2]}: BigQuery does "
            f"not load from there. Use a bucket in {found[2]}. Nothing was changed."
        )
    if found := _MISSING.search(text):
        return SourceFileError(f"{found[1]} does not exist, so nothing was loaded. {text}")
    if _UNREADABLE.search(text):
        return SourceFileError(
            f"{text} Look whether the files have the format that the load was given, and the "
            "columns of the table. Nothing was changed."
        )
    if _TAKEN.search(text):
        return RefusedError(f"{text}: it has rows already, and if_empty=True. Nothing was changed.")
    return error
