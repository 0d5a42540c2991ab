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
            text, version, nonces = found["key"], found["version"], found["nonces"]
            value = cast("object", found["value"])
            if not (isinstance(value, dict) and isinstance(text, str) and isinstance(version, int)):
                raise TypeError("its fields have other types")
            history = tuple(map(str, nonces[-HISTORY:]))
            if not history:
                raise ValueError("it has no nonce")
        except (ValueError, TypeError, KeyError) as error:
            raise LedgerError(
                f"{place} is no entry of the ledger, or was edited by hand ({error!r}). Look at "
                "it, and delete it if nothing there is needed."
            ) from error
        return cls(text, cast("dict[str, Any]", value), version, history)


def new_nonce() -> str:
    """Sixteen hexadecimal digits, which nobody else has."""
    return secrets.token_hex(8)
