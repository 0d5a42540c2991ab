"""Lines of JSON become messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dagster_bq_connector.cdc.event import FILE, MESSAGES
from dagster_bq_connector.cdc.source.source import BATCH_ROWS

NEWLINE = b"\n"


class _Line(msgspec.Struct, gc=False):
    """A line of a file: a message as Kafka would have it. What else it holds is left out."""

    topic: str
    value: msgspec.Raw
    key: msgspec.Raw = msgspec.Raw(b"null")


_DECODER = msgspec.json.Decoder(_Line)


def messages_of(
    chunks: Iterable[bytes], file: str, first: int, last_is_whole: bool
) -> Iterator[pa.RecordBatch]:
    """The messages of a piece of a file.

    A line that is no message comes without topic and key, with the whole line as its value, so
    that it fails where the others are decoded, by its name. Blank lines are left out.

    Args:
        chunks: The bytes of the piece, which begins with a line.
        file: The file's name, for people.
        first: The number of its first line, from 1.
        last_is_whole: Read what comes after the last newline, too.
    """
    schema = MESSAGES.with_metadata({FILE: file.encode(errors="surrogateescape")})
    for lines in _whole_lines(chunks, last_is_whole):
        decoded, numbers = _decode(lines, first)
        first += lines.count(NEWLINE)
        for at in range(0, len(decoded), BATCH_ROWS):
            part = slice(at, at + BATCH_ROWS)
            yield _batch(decoded[part], numbers[part], schema)


def _whole_lines(chunks: Iterable[bytes], last_is_whole: bool) -> Iterator[bytes]:
    begun: list[bytes] = []
    for chunk in chunks:
        end = chunk.rfind(NEWLINE) + 1
        if not end:
            begun.append(chunk)
            continue
        yield b"".join([*begun, chunk[:end]]) if begun else chunk[:end]
        begun = [chunk[end:]] if end < len(chunk) else []
    if begun and last_is_whole:
        yield b"".join(begun)


def _decode(lines: bytes, first: int) -> tuple[Sequence[_Line], np.ndarray]:
    """The messages, and the numbers of their lines."""
    count = lines.count(NEWLINE) + (not lines.endswith(NEWLINE))
    try:
        decoded = _DECODER.decode_lines(lines)
        if len(decoded) == count:
            return decoded, np.arange(first, first + count)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass
    # Something is no message, or blank: find out which.
    each = [(number, line) for number, line in enumerate(lines.split(NEWLINE), first)]
    kept = [(number, _decode_one(line)) for number, line in each if line.strip()]
    return [line for _, line in kept], np.array([number for number, _ in kept], np.int64)


def _decode_one(line: bytes) -> _Line:
    try:
        return _DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _Line("", msgspec.Raw(line))


def _batch(lines: Sequence[_Line], numbers: np.ndarray, schema: pa.Schema) -> pa.RecordBatch:
    topics = pa.array([line.topic for line in lines], pa.string()).dictionary_encode()
    columns = [
        topics.cast(schema.field("topic").type),
        pa.nulls(len(lines), pa.int32()),
        pa.array(numbers, pa.int64()),
        _texts([line.key for line in lines]),
        _texts([line.value for line in lines]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _texts(texts: Sequence[msgspec.Raw]) -> Any:
    """The JSON texts as they are in the file; null for a null."""
    ends = np.zeros(len(texts) + 1, np.int32)
    np.cumsum(np.fromiter(map(len, texts), np.int32, len(texts)), out=ends[1:])
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(texts))]
    column = pa.Array.from_buffers(pa.binary(), len(texts), buffers)
    absent = pc.equal(column, pa.scalar(b"null", pa.binary()))
    return pc.if_else(absent, pa.scalar(None, pa.binary()), column)
