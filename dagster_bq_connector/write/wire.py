"""Values of an Arrow column become protobuf wire bytes, all rows at once.

What every row writes is a list of parts, which stand one after the other:

- `Short`: a few bytes, made here. They lie at equal distances, and a row uses the first of them.
- `Long`: bytes that are in a buffer already, of strings for example.

What stands where a column is null is encoded like all else: message.py leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Numbers: TypeAlias = "np.ndarray[tuple[int], np.dtype[Any]]"
Sizes: TypeAlias = "int | Numbers"  # bytes of every row: one number for all, or one a row

_compute: Any = pc  # its stubs know a part of what it takes
_SECOND = 1_000_000  # microseconds
_DAY = 86_400 * _SECOND
# How the lowest 56 bits come to stand seven a byte: the upper halves of all lanes move up.
_HALVES = (
    (28, 4, 0x000000000FFFFFFF),
    (14, 2, 0x00003FFF00003FFF),
    (7, 1, 0x007F007F007F007F),
)
# For varints of 0 to 10 bytes: the bits of the first eight that say that another byte follows.
_MORE = np.array([0x8080808080808080 & (1 << 8 * max(0, n - 1)) - 1 for n in range(11)], np.uint64)


@dataclass(slots=True)
class Short:
    """A few bytes of every row: single bytes, and words, one after the other."""

    words: Sequence[int | Numbers]
    sizes: Sizes


@dataclass(slots=True)
class Long:
    """Bytes of every row that lie in `data`, from `starts`, in the order of the rows."""

    data: Numbers
    starts: Numbers
    sizes: Sizes


Part: TypeAlias = Short | Long
Values: TypeAlias = Callable[[Any], list[Part]]


def varints(values: Numbers) -> Short:
    """Numbers (uint64) as protobuf writes them: seven bits a byte, the lowest first."""
    most = int(values.max())
    if most < 0x80:
        return Short([values.astype(np.uint8)], 1)
    longest = _varint_size(most)
    sizes: Sizes = longest
    if _varint_size(int(values.min())) < longest:
        sizes = _sizes(values, [1 << 7 * size for size in range(1, longest)])
    words = [_spread(values, longest) | _MORE[sizes]]
    if longest > 8:
        rest = (values >> 56).astype(np.uint16)
        words.append(rest | rest >> 7 << 8)  # its eighth bit says by itself that a byte follows
    return Short(words, sizes)


def _varint_size(value: int) -> int:
    return max(1, -(-value.bit_length() // 7))


def _sizes(values: Numbers, bounds: Sequence[int]) -> Numbers:
    """One byte, and another for every bound that a value reaches."""
    sizes = np.ones(len(values), np.uint8)
    for bound in bounds:
        sizes += values >= bound
    return sizes.astype(np.int64)


def _spread(values: Numbers, longest: int) -> Numbers:
    spread = values & (1 << 56) - 1
    for bits, shift, lanes in _HALVES:
        if longest * 7 > bits:
            upper = spread & lanes << bits
            spread += upper * ((1 << shift) - 1)  # minus itself where it was, plus where it goes
    return spread


def booleans(array: pa.Array[Any]) -> list[Part]:
    """BOOLEAN."""
    return [Short([_numbers(array.cast(pa.uint8()), np.uint8)], 1)]


def doubles(array: pa.Array[Any]) -> list[Part]:
    """FLOAT."""
    return [Short([_numbers(array, np.float64)], 8)]


def integers(array: pa.Array[Any]) -> list[Part]:
    """INTEGER, and TIMESTAMP as microseconds since 1970. Negative ones take ten bytes."""
    return [varints(_numbers(array, np.uint64))]


def dates(array: pa.Array[Any]) -> list[Part]:
    """DATE: days since 1970."""
    return [varints(_numbers(array, np.int32).astype(np.int64).view(np.uint64))]


def datetimes(array: pa.Array[Any]) -> list[Part]:
    """DATETIME: year, month, day and the time packed into bits (Google's CivilTimeEncoder)."""
    micros = _numbers(array, np.int64)
    days = micros // _DAY
    packed = _civil_dates(days) << 37 | _civil_times(micros - days * _DAY)
    return [varints(packed.view(np.uint64))]


def times(array: pa.Array[Any]) -> list[Part]:
    """TIME: hour, minute, second and microsecond packed into bits (Google's CivilTimeEncoder)."""
    return [varints(_civil_times(_numbers(array, np.int64)).view(np.uint64))]


def _civil_dates(days: Numbers) -> Numbers:
    """Year (from bit 9), month (from bit 5) and day."""
    first, last = int(days.min()), int(days.max())
    if last - first < len(days) // 2:  # each day but once
        return _civil_dates(np.arange(first, last + 1))[days - first]
    moments: Any = days.view("M8[D]")
    months = moments.astype("M8[M]")
    month = months.view(np.int64) + 1970 * 12
    day = (moments - months.astype("M8[D]")).view(np.int64) + 1
    return month // 12 << 9 | month % 12 + 1 << 5 | day


def _civil_times(micros: Numbers) -> Numbers:
    """Hour (from bit 32), minute (from 26), second (from 20) and microsecond of a day."""
    seconds = micros // _SECOND
    minutes = seconds // 60
    hours = minutes // 60
    clock = hours << 12 | minutes - hours * 60 << 6 | seconds - minutes * 60
    return clock << 20 | micros - seconds * _SECOND


def texts(array: pa.Array[Any]) -> list[Part]:
    """STRING, BYTES, JSON and GEOGRAPHY."""
    _, offsets, data = array.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(array) + 1, array.offset * 4).astype(np.int64)
    sizes = np.diff(bounds)
    used = np.frombuffer(data or b"", np.uint8)[bounds[0] : bounds[-1]]
    return [varints(sizes.view(np.uint64)), Long(used, bounds[:-1] - bounds[0], sizes)]


def decimals(array: pa.Array[Any]) -> list[Part]:
    """NUMERIC and BIGNUMERIC: the scaled integer, two's complement, lowest byte first.

    In as few bytes as it takes, which is what Google's BigDecimalByteStringEncoder writes.
    """
    count = array.type.bit_width // 64
    words: Any = _numbers(array, (np.int64, count))
    sizes = _signed_sizes(words[:, 0])
    used = 1
    for index in range(1, count):
        word = words[:, index]
        beyond = word != words[:, index - 1] >> 63  # more than the sign of what is below
        if beyond.any():
            sizes = np.where(beyond, 8 * index + _signed_sizes(word), sizes)
            used = index + 1
    return [Short([sizes.astype(np.uint8), *(words[:, index] for index in range(used))], sizes + 1)]


def _signed_sizes(values: Numbers) -> Numbers:
    """Bytes that hold a number and its sign, at least one."""
    bits = (values ^ values >> 63).view(np.uint64)
    longest = int(bits.max()).bit_length() // 8 + 1
    return _sizes(bits, [1 << 8 * size - 1 for size in range(1, longest)])


def intervals(array: pa.Array[Any]) -> list[Part]:
    """INTERVAL as text: Y-M D H:M:S.F, each of the three with its own sign."""
    kind = np.dtype([("months", np.int32), ("days", np.int32), ("nanos", np.int64)])
    values: Any = _numbers(array, kind)
    months, nanos = values["months"].astype(np.int64), values["nanos"]
    month = np.abs(months)
    left = np.abs(nanos).view(np.uint64)  # right for the lowest number, too
    seconds, fraction = left // 10**9, left % 10**9
    digits = 9 if (fraction % 1000).any() else 6
    point = _compute.if_else(pa.array(fraction != 0), ".", "")
    text = _compute.utf8_lpad(_text(fraction // 10 ** (9 - digits)), digits, "0")
    pieces = (
        *(_sign(months), _text(month // 12), "-", _text(month % 12), " "),
        *(_text(values["days"]), " "),
        *(_sign(nanos), _text(seconds // 3600), ":", _text(seconds // 60 % 60), ":"),
        *(_text(seconds % 60), point, _compute.if_else(pa.array(fraction != 0), text, "")),
    )
    return texts(_compute.binary_join_element_wise(*pieces, ""))


def _sign(values: Numbers) -> pa.Array[Any]:
    return _compute.if_else(pa.array(values < 0), "-", "")


def _text(values: Numbers) -> pa.Array[Any]:
    return pa.array(values).cast(pa.string())


def _numbers(array: pa.Array[Any], kind: Any) -> Numbers:
    """The values of a column as they lie in memory."""
    dtype: Any = np.dtype(kind)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)


VALUES: dict[str, Values] = {
    "BOOLEAN": booleans,
    "INTEGER": integers,
    "FLOAT": doubles,
    "NUMERIC": decimals,
    "BIGNUMERIC": decimals,
    "STRING": texts,
    "BYTES": texts,
    "DATE": dates,
    "DATETIME": datetimes,
    "TIMESTAMP": integers,
    "TIME": times,
    "JSON": texts,
    "GEOGRAPHY": texts,
    "INTERVAL": intervals,
}
