"""The entries of writes in the ledger, as somebody may have set them by hand."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dagster_bq_connector.errors import LedgerError
from dagster_bq_connector.ledger import Entry
from dagster_bq_connector.write.key import WriteKey, other_purpose


def checked(
    entry: Entry, key: WriteKey, purpose: str, states: Collection[str], fields: Collection[str]
) -> Mapping[str, Any]:
    """The value of an entry, which is one of this write.

    Args:
        entry: As it was read.
        key: The write.
        purpose: What the key is used for.
        states: Those that the entry may be in.
        fields: What it holds beside `purpose` and `state`.

    Raises:
        WriteKeyError: The key was used for something else.
        LedgerError: Something is missing, or the state is none.
    """
    value = entry.value
    if value.get("purpose", purpose) != purpose:
        raise other_purpose(key, f"ledger entry {entry.key.name}")
    missing = [name for name in ("purpose", "state", *fields) if name not in value]
    if missing:
        raise LedgerError(
            f"Ledger entry {entry.key.name} lacks {', '.join(missing)}: `set` of python -m "
            "dagster_bq_connector.ledger gives an entry a whole new value. Nothing was changed: "
            "set all that is there, with one thing changed, or delete the entry if the rows of "
            f"{key.text!r} are not in the table."
        )
    if value["state"] not in states:
        raise LedgerError(
            f"Ledger entry {entry.key.name} has the state {value['state']!r}, which is none of "
            f"{', '.join(states)}. Nothing was changed: set it."
        )
    return value
