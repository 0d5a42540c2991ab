"""The JSON document in which a home of the ledger keeps an entry."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from dagster_bq_connector.errors import LedgerError

# Who lost the answer to a change finds it among so many later ones. The homes take a minute or half
# of one for as many, and who lost an answer looks at once. Each takes 19 characters of the 16,384
# that a description holds.
HISTORY = 32


class Document(NamedTuple):
    """What is stored of an entry.

    Attributes:
        text: The text of its key.
        value: A JSON object.
        version: 1 at creation, one more with each change.
        history: The nonces of the last versions, up to `HISTORY`, that of `version` last.
    """

    text: str
    value: Mapping[str, Any]
    version: int
    history: Sequence[str]

    def to_json(self) -> str:
        """The document in as few characters as it takes, all ASCII: bytes are characters then.

        Raises:
            LedgerError: The value is no JSON object.
        """
        content = {
            "key": self.text,
            "version": self.version,
            "value": self.value,
            "nonces": list(self.history),
        }
        try:
            return json.dumps(content, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise LedgerError(
                f"The value of the ledger entry {self.text!r} is no JSON: {error}. Pass a dict of "
                "strings, finite numbers, booleans, None, lists and dicts."
            ) from error

    @classmethod
    def from_json(cls, content: str, place: str) -> Document:
        """Read what is stored at `place`.

        Raises:
            LedgerError: It is no such document.
        """
        try:
            found = json.loads(content)
            text, version, value = found["key"], found["version"], found["value"]
            nonces = list(found["nonces"])
        except (ValueError, TypeError, KeyError) as error:
            raise _unreadable(place, repr(error)) from error
        if not (isinstance(text, str) and isinstance(value, dict)):
            raise _unreadable(place, "its key or its value has another type")
        if type(version) is not int or version < 1:
            raise _unreadable(place, "its version is no number from 1")
        if not nonces or not all(isinstance(nonce, str) for nonce in nonces):
            raise _unreadable(place, "it has no nonces")
        return cls(text, cast("dict[str, Any]", value), version, tuple(nonces[-HISTORY:]))


def new_nonce() -> str:
    """Sixteen hexadecimal digits, which nobody else has."""
    return secrets.token_hex(8)


def _unreadable(place: str, why: str) -> LedgerError:
    return LedgerError(
        f"{place} is no entry of the ledger, or was edited by hand: {why}. Look at it, and delete "
        "it if nothing there is needed."
    )
