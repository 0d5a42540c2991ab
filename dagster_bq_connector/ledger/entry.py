"""The ledger: one JSON value a key, changed only by compare-and-set, whichever home keeps it."""

from __future__ import annotations

import abc
import hashlib
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast

from google.api_core.exceptions import NotFound

from dagster_bq_connector.errors import Fault, LedgerError, classify, explain
from dagster_bq_connector.ledger.document import HISTORY, Document, new_nonce
from dagster_bq_connector.retry import PASSING, Backoff
from dagster_bq_connector.table.admin import REST_ERRORS

Kind: TypeAlias = Literal["write", "stream"]
KINDS: tuple[Kind, ...] = ("write", "stream")

# BigQuery takes 5 changes of a table's metadata in 10 seconds, Cloud Storage one of an object a
# second: after the longest pause there is room again.
LONGEST_PAUSE = 10.0
# What the service says of a change that it did not make because something else stands there.
OVERTAKEN = frozenset({Fault.TAKEN, Fault.STALE})
GONE = frozenset({Fault.TABLE_MISSING, Fault.DATASET_MISSING})
_NAME = re.compile(r"(write|stream)_[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Key:
    """Of an entry.

    Attributes:
        kind: Whether it speaks of a write or of a stream.
        text: The write key, or the stream's name: for people, of any length.
    """

    kind: Kind
    text: str

    @property
    def name(self) -> str:
        """Its name in the home: the kind and 160 bits of the text's SHA-256."""
        return f"{self.kind}_{hashlib.sha256(self.text.encode()).hexdigest()[:40]}"

    def __str__(self) -> str:
        return f"{self.kind} {self.text!r}"


@dataclass(frozen=True, slots=True)
class Entry:
    """What stood under a key when it was read.

    Attributes:
        key: Its key.
        value: A JSON object.
        version: 1 at creation, one more with each change.
        token: What the home compares: an etag or a generation.
        history: Nonces of the last versions, for the next change.
    """

    key: Key
    value: Mapping[str, Any]
    version: int
    token: str
    history: tuple[str, ...] = field(repr=False)

    def is_version_of(self, other: Entry) -> bool:
        """Whether both are the same version, even if the home's token is another by now."""
        return self.version == other.version and self.history[-1] == other.history[-1]

    def nonce_of(self, version: int) -> str | None:
        """The nonce of a version, None when the history does not reach back to it."""
        back = self.version - version
        return self.history[-1 - back] if 0 <= back < len(self.history) else None


@dataclass(frozen=True, slots=True)
class Written:
    """How a change ended.

    Attributes:
        entry: What stands now. After a win it may be a later version than one's own, when others
            changed the entry before its answer was known. None when the entry was deleted.
        won: Whether this change was made.
    """

    entry: Entry | None
    won: bool


class Ledger(abc.ABC):
    """One JSON value a key, changed only by compare-and-set. Safe to use from several threads.

    Of any number of racing changes one wins, and each caller learns the truth about its own, also
    when the answer to it was lost: a document holds the nonces of its last 32 versions, so that
    one's own nonce at the expected version means that one won, even when others have changed the
    entry since. No lock is held, so that changes of different keys do not wait for each other.
    """

    def __init__(self, deadline: float) -> None:
        """Let each call go on for `deadline` seconds without success."""
        self._deadline = deadline

    def get(self, key: Key) -> Entry | None:
        """What stands under a key, None if nothing does.

        Raises:
            LedgerError: What stands there is no entry, or that of another key.
            ConnectorError: The home cannot be reached, or does not allow it.
        """
        return self._find(key.name, f"Ledger entry {key} ({self.place(key.name)})")

    def find(self, name: str) -> Entry | None:
        """What stands under a name in the home, such as `write_` and 40 hexadecimal digits.

        Raises:
            LedgerError: It is no such name, or what stands there is no entry.
            ConnectorError: The home cannot be reached, or does not allow it.
        """
        if kind_of(name) is None:
            raise LedgerError(
                f"{name!r} is no name of a ledger entry: these are write_ or stream_ and 40 "
                "hexadecimal digits."
            )
        return self._find(name, f"Ledger entry {self.place(name)}")

    def create(self, key: Key, value: Mapping[str, Any]) -> Written:
        """Make an entry if there is none.

        Returns:
            The entry that stands now, and whether it was made here.

        Raises:
            LedgerError: The value is no JSON object or too large for the home, or it cannot be
                known who won.
            ConnectorError: The home cannot be reached, or does not allow it.
        """
        return self._change(key, None, value)

    def compare_and_set(self, entry: Entry, value: Mapping[str, Any]) -> Written:
        """Give an entry another value if it is still the version that was read.

        Args:
            entry: What was read, or written last.
            value: Its new value, a JSON object.

        Returns:
            The entry that stands now, and whether the change was made. A change that lost
            because the entry was deleted has none.

        Raises:
            LedgerError: The value is no JSON object or too large for the home, or it cannot be
                known whether the change was made.
            ConnectorError: The home cannot be reached, or does not allow it.
        """
        return self._change(entry.key, entry, value)

    def delete(self, entry: Entry) -> None:
        """Delete an entry if it is still the version that was read. For repair only.

        Whoever is changing the entry at the same time may be told that he won, or make it anew:
        stop what uses the entry first.

        Raises:
            LedgerError: Another version stands there, or none.
            ConnectorError: The home cannot be reached, or does not allow it.
        """
        name, subject = entry.key.name, f"Ledger entry {entry.key} ({self.place(entry.key.name)})"
        stands = self.get(entry.key)
        if stands is None or not stands.is_version_of(entry):
            raise LedgerError(_moved(subject, entry, stands))
        try:
            Backoff(deadline=self._deadline).call(lambda: self._remove(name, stands.token))
        except REST_ERRORS as error:
            if is_gone(error):  # by an earlier try, whose answer was lost
                return
            if classify(error) in OVERTAKEN:
                raise LedgerError(_moved(subject, entry, self.get(entry.key))) from error
            raise explain(error, subject) from error

    def entries(self, kind: Kind | None = None) -> Iterator[Entry]:
        """All entries, or those of one kind, in no order. One call each: for people.

        Raises:
            LedgerError: Something under a name of the ledger is no entry.
            ConnectorError: The home cannot be reached, or does not allow it.
        """
        for name in self.names(kind):
            if (entry := self.find(name)) is not None:  # it may be gone since it was listed
                yield entry

    def names(self, kind: Kind | None = None) -> Iterator[str]:
        """The names of all entries, or of those of one kind, in no order.

        Raises:
            ConnectorError: The home cannot be reached, or does not allow it.
        """
        for each in KINDS if kind is None else (kind,):
            yield from self._names(each)

    @abc.abstractmethod
    def place(self, name: str) -> str:
        """Where the entry of that name is, for people."""

    @abc.abstractmethod
    def _read(self, name: str) -> tuple[str, str] | None:
        """The document and its token, None if there is none. One try."""

    @abc.abstractmethod
    def _put(self, key: Key, document: str, token: str | None) -> str:
        """Store if what stands has that token, or if nothing stands when it is None. One try.

        Returns:
            The new token.

        Raises:
            NotFound: There is nothing to change.
        """

    @abc.abstractmethod
    def _remove(self, name: str, token: str) -> None:
        """Delete what has that token. One try."""

    @abc.abstractmethod
    def _names(self, kind: Kind) -> Iterator[str]:
        """The names of the entries of a kind."""

    def _find(self, name: str, subject: str) -> Entry | None:
        try:
            found = Backoff(deadline=self._deadline).call(lambda: self._read(name))
        except REST_ERRORS as error:
            raise explain(error, subject) from error
        if found is None:
            return None
        content, token = found
        document = Document.from_json(content, self.place(name))
        key = Key("write" if name.startswith("write_") else "stream", document.text)
        if key.name != name:
            raise LedgerError(
                f"{subject} holds another key, {document.text!r}: it was copied or renamed by "
                "hand. Look at it, and delete it if nothing there is needed."
            )
        return Entry(key, document.value, document.version, token, tuple(document.history))

    def _change(self, key: Key, before: Entry | None, value: Mapping[str, Any]) -> Written:
        """Try until it is known who won. A change whose answer was lost may have been made."""
        change = _Change.of(key, before, value, f"Ledger entry {key} ({self.place(key.name)})")
        content = change.mine.to_json()
        token = before.token if before else None
        pauses = Backoff(cap=LONGEST_PAUSE, deadline=self._deadline).pauses()
        while True:
            try:
                return Written(change.entry(content, self._put(key, content, token)), won=True)
            except REST_ERRORS as error:
                fault, failure = classify(error), error
            if not is_gone(failure) and fault not in PASSING | OVERTAKEN:
                raise explain(failure, change.doubtful_subject) from failure
            change.in_doubt = change.in_doubt or fault is Fault.BROKEN
            if fault is not Fault.THROTTLED or change.in_doubt:
                stands = self._find(key.name, change.doubtful_subject)
                if (won := change.won(stands)) is not None:
                    return Written(stands, won)
                token = stands.token if stands else None
            if (pause := next(pauses, None)) is None:
                raise explain(failure, change.doubtful_subject) from failure
            time.sleep(pause)


@dataclass
class _Change:
    """One change of an entry, from its first try to the knowledge of who won.

    Attributes:
        key: Of the entry.
        before: What it changes; None when it makes the entry.
        mine: What it stores.
        subject: The entry, for errors.
        in_doubt: Whether an answer was lost, so that a try may have succeeded.
    """

    key: Key
    before: Entry | None
    mine: Document
    subject: str
    in_doubt: bool = False

    @classmethod
    def of(cls, key: Key, before: Entry | None, value: Mapping[str, Any], subject: str) -> _Change:
        given: object = value
        if not isinstance(given, Mapping):
            raise LedgerError(f"{subject}: its value is {type(given).__name__}, no dict.")
        version, history = (before.version + 1, before.history) if before else (1, ())
        history = (*history, new_nonce())[-HISTORY:]
        return cls(key, before, Document(key.text, dict(value), version, history), subject)

    def entry(self, content: str, token: str) -> Entry:
        """What was stored, as it would be read: nobody who changes his dict changes the entry."""
        stored = Document.from_json(content, self.subject)
        return Entry(self.key, stored.value, stored.version, token, tuple(stored.history))

    @property
    def doubtful_subject(self) -> str:
        """The entry, for errors that leave it open whether a try has succeeded."""
        if not self.in_doubt:
            return self.subject
        return f"{self.subject}, whose version {self.mine.version} may have been written from here"

    def won(self, stands: Entry | None) -> bool | None:
        """Who won, told by what stands now; None when nobody did yet.

        Raises:
            LedgerError: It cannot be known.
        """
        if stands is None and self.before is None:
            return None
        if stands is not None:
            if self.before and stands.is_version_of(self.before):
                return None  # the token is another: somebody set a label, or the like
            found = stands.nonce_of(self.mine.version)
            if found == self.mine.history[-1]:
                return True
            if found is not None and not (self.in_doubt and self._is_another(stands)):
                return False
        if self.in_doubt:
            state = f"is at version {stands.version}" if stands else "was deleted"
            raise LedgerError(
                f"{self.subject}: whether version {self.mine.version} was written from here cannot "
                f"be known: the answer was lost, and the entry {state} by now. Read it, and "
                "compare its value with what was to be written."
            )
        return False

    def _is_another(self, stands: Entry) -> bool:
        """Whether the entry was deleted and made anew, told by the version that it had before."""
        if self.before is None:
            return False
        found = stands.nonce_of(self.before.version)
        return found not in (None, self.before.history[-1])


def kind_of(name: str) -> Kind | None:
    """The kind of the entry that has this name in its home, None if no entry has such a name."""
    found = _NAME.fullmatch(name)
    return cast("Kind", found[1]) if found else None


def is_gone(error: Exception) -> bool:
    """Whether nothing is there. A refusal may say so too, of what one may not see."""
    return isinstance(error, NotFound) and classify(error) in GONE


def _moved(subject: str, entry: Entry, stands: Entry | None) -> str:
    state = f"is at version {stands.version}" if stands else "is not there"
    return f"{subject} {state}, not at version {entry.version} as it was read. Read it again."
