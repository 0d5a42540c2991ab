"""Changes from files: NDJSON in a folder or below a `gs://` prefix, in the order of their names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import blake2b

import numpy as np
import pyarrow as pa
from google.cloud import storage

from dagster_bq_connector.cdc.source.folder import SourceFile, digest, open_folder
from dagster_bq_connector.cdc.source.lines import NEWLINE, messages_of
from dagster_bq_connector.cdc.source.source import Lag, Position, Source
from dagster_bq_connector.errors import ChangesLostError, SourceChangedError

# A file that has another checksum, or none, is known again by so much of it before the position.
REMEMBERED_BYTES = 4096
# Lines are counted in so many bytes for the lag; those of the rest are estimated from them.
COUNTED_BYTES = 16 * 1024 * 1024
RESET = "or give the stream another position"


@dataclass(frozen=True, slots=True)
class _Place:
    """A position.

    Attributes:
        file: The file in which it is; empty before the first.
        bytes: How much of it is before the position: whole lines.
        lines: How many lines these are.
        size: How large the file was then.
        checksum: That of the file, when the folder has one.
        ends: A hash of the last bytes before the position.
        files: How many files come before this one.
        before: A hash of which these are, and of their content as far as it is known.
        newest: When the newest file of the folder came, in nanoseconds since 1970.
        planned: A hash of the files that the range to here began with, without this one.
    """

    file: str = ""
    bytes: int = 0
    lines: int = 0
    size: int = 0
    checksum: str = ""
    ends: str = ""
    files: int = 0
    before: str = ""
    newest: int = 0
    planned: str = ""


@dataclass(frozen=True, slots=True)
class _Piece:
    """What is read of a file: `[begin, end)`, whose first line has the number `line`."""

    file: SourceFile
    begin: int
    end: int
    line: int


class FileMessages(Source):
    """The messages in files, each line `{"topic": ..., "key": ..., "value": ...}`.

    Files are those with the suffixes .ndjson, .jsonl and .json, in subfolders too; they are read in
    the order of their names, and their order is that of the changes. So a name says the time, and
    none that comes later sorts before one that is there: that, and a file that is changed after it
    was read, is noticed and is an error. A file of a disk may grow while it is the last one: it
    is read to its last newline. Files that are read may be deleted.

    A file's content is known by its checksum in Cloud Storage; on a disk by its size, and by what
    is before the position.
    """

    def __init__(
        self, place: str, client: storage.Client | None = None, deadline: float = 60.0
    ) -> None:
        """Read from `place`; nothing is looked at yet.

        Args:
            place: The path of a folder, or `gs://bucket/prefix`.
            client: Reaches Cloud Storage.
            deadline: Seconds that a call of it may go on without success.

        Raises:
            ConfigurationError: `place` is no address, or needs a client.
        """
        self._folder = open_folder(place, client, deadline)

    def head(self) -> Position:
        """The position after all that is there now."""
        files = self._folder.files()
        if not files:
            return asdict(_Place())
        end, lines = self._cut(files[-1], 0, None)
        return asdict(self._place(files, _Piece(files[-1], 0, end, 1), lines, ()))

    def plan(self, start: Position | None, max_changes: int) -> Position | None:
        """Where a range that begins at `start` should end; None when there is nothing to read.

        A blank line counts as a message.

        Raises:
            SourceMissingError: The folder or bucket does not exist.
            ChangesLostError: The file that was being read is gone.
            SourceChangedError: A file came or changed among those that are read, or one whose
                last line is not finished keeps others from being read.
        """
        begin, files = self._begin(start), self._folder.files()
        unread = self._unread(begin, files)
        planned: list[_Piece] = []
        lines = 0
        for number, piece in enumerate(unread):
            end, found = self._cut(piece.file, piece.begin, max_changes)
            if end > piece.begin:
                planned.append(_Piece(piece.file, piece.begin, end, piece.line))
                lines, max_changes = piece.line - 1 + found, max_changes - found
            if end < piece.end or not max_changes:
                if not planned and number + 1 < len(unread):
                    raise self._unfinished(piece, unread[number + 1].file)
                break
        if not planned:
            return None
        return asdict(self._place(files, planned[-1], lines, [one.file for one in planned[:-1]]))

    def read(self, start: Position | None, stop: Position) -> Iterator[pa.RecordBatch]:
        """The messages of exactly `[start, stop)`; the columns are those of `MESSAGES`.

        A message's offset is the number of its line, from 1.

        Raises:
            SourceMissingError: The folder or bucket does not exist.
            ChangesLostError: A file of the range is gone.
            SourceChangedError: A file of the range is not what was planned.
        """
        begin, end, files = self._begin(start), self._begin(stop), self._folder.files()
        pieces = [piece for piece in self._unread(begin, files, end) if piece.file.name <= end.file]
        last = pieces.pop() if pieces and pieces[-1].file.name == end.file else None
        if last is None:
            raise ChangesLostError(
                f"{self._folder.name(end.file)} is gone, and a range that ends in it was planned: "
                f"put it back, {RESET}."
            )
        self._check_same(last.file, end)
        if digest([piece.file for piece in pieces]) != end.planned:
            raise SourceChangedError(
                f"The files of {self._folder.address} that come before {end.file!r} and are not "
                "read yet are not those of the plan: one came, changed or was taken away. Put back "
                "what is missing, and give a file that came a name after it; a file that others "
                f"follow must not change. Nothing was skipped. If that cannot be mended, {RESET}."
            )
        for piece in [*pieces, _Piece(last.file, last.begin, end.bytes, last.line)]:
            chunks = self._folder.chunks(piece.file, piece.begin, piece.end)
            name = self._folder.name(piece.file.name)
            yield from messages_of(chunks, name, piece.line, piece.end == piece.file.size)

    def lag(self, position: Position | None) -> Lag:
        """What there is after `position`: lines, bytes and files, and when the first came.

        Of a file that was read in part, what is left has been waiting since the position at most.

        Raises:
            ConnectorError: As `plan`.
        """
        begin = self._begin(position)
        pieces = self._unread(begin, self._folder.files())
        size = sum(piece.end - piece.begin for piece in pieces)
        counted = lines = 0
        for piece in pieces:
            if counted >= COUNTED_BYTES:
                break
            end = min(piece.end, piece.begin + COUNTED_BYTES - counted)
            for chunk in self._folder.chunks(piece.file, piece.begin, end):
                lines += chunk.count(NEWLINE)
            lines += end == piece.file.size and not self._folder.grows and self._open_end(piece)
            counted += end - piece.begin
        changes = max(lines, round(lines * size / counted)) if counted else 0
        if not changes:
            return Lag(0, None, size, len(pieces))
        since = begin.newest if pieces[0].begin else pieces[0].file.created
        return Lag(changes, datetime.fromtimestamp(since / 1e9, UTC), size, len(pieces))

    def _begin(self, position: Position | None) -> _Place:
        try:
            return _Place(**position) if position else _Place(before=digest(()))
        except TypeError as error:
            raise SourceChangedError(
                "The stream's position was not taken of files, which are its source. Read what it "
                f"was taken of, {RESET}. It is {position!r}."
            ) from error

    def _unread(
        self, begin: _Place, files: Sequence[SourceFile], end: _Place | None = None
    ) -> list[_Piece]:
        """What there is after a position, once what is before it is known to be the same.

        Args:
            begin: The position.
            files: The folder's.
            end: Where a planned range ends: files that came after it was planned, and before the
                position, are told with the next plan.
        """
        if end is None:
            self._check_before(begin, files)
        pieces: list[_Piece] = []
        found = not begin.file or begin.bytes >= begin.size
        for file in files:
            if file.name == begin.file:
                found = True
                self._check_same(file, begin)
                if file.size > begin.bytes:
                    pieces.append(_Piece(file, begin.bytes, file.size, begin.lines + 1))
            elif file.name > begin.file and file.size:
                pieces.append(_Piece(file, 0, file.size, 1))
        if not found:
            raise ChangesLostError(
                f"{self._folder.name(begin.file)} is gone, and only {begin.bytes} of its "
                f"{begin.size} bytes were read: put it back, {RESET}."
            )
        return pieces

    def _check_before(self, begin: _Place, files: Sequence[SourceFile]) -> None:
        """Refuse files that sort before the position and were not there when it was taken."""
        before = [file for file in files if file.name < begin.file]
        if digest(before) == begin.before:
            return
        late = [file for file in before if file.created > begin.newest]
        if not late and len(before) <= begin.files:
            return  # files that are read were deleted
        names = ", ".join(repr(file.name) for file in late[:5]) or "one, which cannot be told"
        more = f" and {len(late) - 5} more" if len(late) > 5 else ""
        raise SourceChangedError(
            f"{self._folder.address} has files that came or changed after those were read that "
            f"follow them: {names}{more}. They would never be read. Give them names after "
            f"{begin.file!r} (whole files: of one that changed, a new file with the new lines "
            f"alone), or take them away if they are not wanted, {RESET}."
        )

    def _check_same(self, file: SourceFile, place: _Place) -> None:
        """Refuse a file that is not the one in which a position was taken."""
        if file.checksum and (file.checksum, file.size) == (place.checksum, place.size):
            return
        if file.size < place.bytes or self._ends(file, place.bytes) != place.ends:
            raise SourceChangedError(
                f"{self._folder.name(file.name)} is not the file of which {place.bytes} bytes "
                f"({place.lines} lines) were read: it was replaced. Put the old one back and give "
                f"the new one a name after it, {RESET}."
            )

    def _place(
        self,
        files: Sequence[SourceFile],
        last: _Piece,
        lines: int,
        planned: Sequence[SourceFile],
    ) -> _Place:
        """The position at the end of `last`."""
        before = [file for file in files if file.name < last.file.name]
        return _Place(
            file=last.file.name,
            bytes=last.end,
            lines=lines,
            size=last.file.size,
            checksum=last.file.checksum,
            ends=self._ends(last.file, last.end),
            files=len(before),
            before=digest(before),
            newest=max(file.created for file in files),
            planned=digest(planned),
        )

    def _ends(self, file: SourceFile, end: int) -> str:
        begin = max(0, end - REMEMBERED_BYTES)
        content = self._folder.read(file, begin, end) if end else b""
        return blake2b(content, digest_size=12).hexdigest()

    def _cut(self, file: SourceFile, begin: int, most: int | None) -> tuple[int, int]:
        """Where at most so many lines from `begin` on end, and how many they are."""
        lines, end, at = 0, begin, begin
        for chunk in self._folder.chunks(file, begin, file.size):
            found = chunk.count(NEWLINE)
            if most is not None and lines + found >= most:
                newlines = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord(NEWLINE))
                return at + int(newlines[most - lines - 1]) + 1, most
            lines += found
            end = at + chunk.rfind(NEWLINE) + 1 if found else end
            at += len(chunk)
        if end < file.size and not self._folder.grows:  # an object is whole, and so its last line
            return file.size, lines + 1
        return end, lines

    def _open_end(self, piece: _Piece) -> bool:
        return self._folder.read(piece.file, piece.end - 1, piece.end) != NEWLINE

    def _unfinished(self, piece: _Piece, after: SourceFile) -> SourceChangedError:
        return SourceChangedError(
            f"{self._folder.name(piece.file.name)} does not end with a newline, and "
            f"{after.name!r} comes after it: its last line may still be written, and is not "
            "skipped. End it with a newline, or take the rest of the line away."
        )
