"""The write key: the identity of one logical write, which lands once however often it is tried."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from dagster_bq_connector.errors import WriteKeyError

DIGITS = 40  # hexadecimal digits of a digest: 160 bits do not meet by chance
PURPOSE_DIGITS = 16


@dataclass(frozen=True, slots=True)
class WriteKey:
    """What makes two tries the same write.

    Attributes:
        text: The identity, for people and for the digest.
        attempt: The id of this try, which no other try has.
    """

    text: str
    attempt: str

    @classmethod
    def of(cls, text: str) -> WriteKey:
        """A try of the write that `text` names."""
        return cls(text, uuid.uuid4().hex[:16])

    @classmethod
    def of_user(cls, text: str) -> WriteKey:
        """A try of the write that a user's text names.

        Raises:
            WriteKeyError: The text is empty or no text.
        """
        given: object = text
        if not isinstance(given, str) or not given.strip() or not _is_text(given):
            raise WriteKeyError(f"key={given!r}: a write key is a text that names one write.")
        return cls.of(f"key {text}")

    @classmethod
    def unique(cls) -> WriteKey:
        """A write that is never repeated: each call is another."""
        return cls.of(f"call {uuid.uuid4().hex}")

    @property
    def id(self) -> str:
        """The identity as 40 hexadecimal digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:DIGITS]


def _is_text(given: str) -> bool:
    """Whether it has bytes: half a surrogate has none."""
    try:
        return bool(given.encode())
    except UnicodeEncodeError:
        return False


def purpose_of(table: object, operation: str, columns: Sequence[str]) -> str:
    """What a key was used for, as 16 hexadecimal digits.

    Args:
        table: The table, or the slice of one.
        operation: `append` or `replace`.
        columns: The names of the data's columns; their order and case do not count.
    """
    names = sorted(name.casefold() for name in columns)
    text = json.dumps([str(table), operation, names])
    return hashlib.sha256(text.encode()).hexdigest()[:PURPOSE_DIGITS]


def other_purpose(key: WriteKey, found: str) -> WriteKeyError:
    """The error for a key that was used before, for something else.

    Args:
        key: The key.
        found: What bears it.
    """
    return WriteKeyError(
        f"Write key {key.text!r} was used already, by {found}, for another table, operation or "
        "set of columns. Nothing was changed: give this write a key of its own."
    )
