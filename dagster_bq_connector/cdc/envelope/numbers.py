"""Decimals and other numbers, in every form that Debezium gives them."""

from __future__ import annotations

import binascii
import string
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from dagster_bq_connector.cdc.envelope import arrays
from dagster_bq_connector.cdc.envelope.connect import DECIMAL, Meaning
from dagster_bq_connector.cdc.envelope.forms import Forms, Misfit, shown

_WIDE = pa.decimal256(76, 38)
_MOST_OCTETS = 64  # twice what BIGNUMERIC has: numbers of any length are slow to print
# The value of each character of base64, -1 for all others.
_SIXES = np.full(256, -1, np.int8)
_SIXES[np.frombuffer(string.ascii_uppercase.encode(), np.uint8)] = np.arange(26)
_SIXES[np.frombuffer(string.ascii_lowercase.encode(), np.uint8)] = np.arange(26, 52)
_SIXES[np.frombuffer(string.digits.encode() + b"+/", np.uint8)] = np.arange(52, 64)


def decimals_of_texts(texts: Any, scale: int | None, meaning: Meaning | None, forms: Forms) -> Any:
    """Text: the bytes of the unscaled number, or its digits.

    Args:
        texts: Strings.
        scale: The scale that the table's column declares.
        meaning: A Decimal says the scale of bytes; any other text is digits.
        forms: Decides where there is no meaning.

    Raises:
        Misfit: One is no number.
    """
    if meaning is not None and meaning.name == DECIMAL:
        return scaled(_numbers(texts), int(meaning.parameters.get("scale", "0")))
    if meaning is not None or forms.decimal == "string":
        return _digits(texts)
    if scale is None:
        raise Misfit(
            f"{shown(texts[0].as_py())} is a decimal as bytes, and nothing says its scale: declare "
            "it on the table's column, as NUMERIC(10, 2), send schemas, or set "
            "decimal.handling.mode=string on the connector and "
            "DebeziumJson(decimal_handling='string')"
        )
    return scaled(_numbers(texts), scale)


def decimals_of_objects(values: Sequence[dict[str, Any] | None]) -> Any:
    """Objects of `scale` and `value`: decimals of any scale.

    Raises:
        Misfit: One is something else.
    """
    return pa.array([None if value is None else variable(value) for value in values], _WIDE)


def variable(value: dict[str, Any]) -> Decimal:
    """One decimal of any scale.

    Raises:
        Misfit: It is something else.
    """
    scale, unscaled = value.get("scale"), value.get("value")
    if type(scale) is not int or not isinstance(unscaled, str) or len(value) != 2:
        raise Misfit(f"{shown(value)} is no decimal: it has not just a scale and a value")
    return Decimal(f"{_unscaled([unscaled])[0]}E{-scale}")


def decimals_of_floats(values: Sequence[float | None]) -> Any:
    """Doubles, as decimal.handling.mode=double has it: the digits that were printed."""
    return pa.array([None if value is None else Decimal(repr(value)) for value in values], _WIDE)


def integers(values: Sequence[int | None], meaning: Meaning | None) -> Any:
    """Integers; those of MySQL that are unsigned as they were before Debezium made them signed."""
    try:
        found = arrays.integers(values)
    except OverflowError:
        return pa.array([None if v is None else Decimal(v) for v in values], pa.decimal256(76, 0))
    if meaning is None or not meaning.is_unsigned:
        return found
    raw = found.fill_null(0).to_numpy().view(np.uint64)
    return pa.array(raw, mask=found.is_null().to_numpy(zero_copy_only=False))


def floats_of_texts(texts: Any) -> Any:
    """What JSON has no number for.

    Raises:
        Misfit: It is something else.
    """
    names = {None: None, "NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}
    values = texts.to_pylist()
    if wrong := set(values) - set(names):
        raise Misfit(f"{shown(wrong.pop())} is text, and no number")
    return pa.array([names[value] for value in values], pa.float64())


def bits(texts: Any) -> Any:
    """Bit strings as numbers: Debezium writes their bytes lowest first."""
    values = [v if v is None else int.from_bytes(decoded(v), "little") for v in texts.to_pylist()]
    return integers(values, None)


def scaled(unscaled: Any, scale: int) -> Any:
    """Numbers, Arrow's or Python's, with a point put `scale` digits before their end."""
    if 0 <= scale <= 19:
        try:
            whole: Any = pa.array(unscaled, pa.int64()).cast(pa.decimal128(38, 0))
        except OverflowError:
            pass
        else:
            kind = pa.decimal128(38, scale)
            return pa.Array.from_buffers(kind, len(whole), whole.buffers(), offset=whole.offset)
    items = unscaled.to_pylist() if isinstance(unscaled, pa.Array) else unscaled
    return pa.array([v if v is None else Decimal(f"{v}E{-scale}") for v in items], _WIDE)


def decimal_texts(array: Any) -> Any:
    """Decimals as text, without an exponent."""
    return pa.array([v if v is None else f"{v:f}" for v in array.to_pylist()], pa.string())


def decoded(text: str) -> bytes:
    """The bytes of base64.

    Raises:
        Misfit: It is something else.
    """
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:  # text beyond ASCII, too
        raise Misfit(f"{shown(text)} is no base64: {error}") from None


def _numbers(texts: Any) -> Any:
    """Numbers as base64: 64-bit ones by columns, others one by one."""
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(texts) + 1, texts.offset * 4)
    starts, sizes = bounds[:-1], np.diff(bounds)
    used = np.frombuffer(data or b"", np.uint8)
    found = np.zeros(len(texts), np.int64)
    for size in np.flatnonzero(np.bincount(sizes)).tolist():
        if size % 4 or size > 12:
            return _unscaled(texts.to_pylist())
        rows = np.flatnonzero(sizes == size)
        text = used[starts[rows] + np.arange(size)[:, None]]  # a row for each character
        if size and not _decode_into(found, rows, text):
            return _unscaled(texts.to_pylist())
    if (sizes[texts.is_valid().to_numpy(zero_copy_only=False)] == 0).any():
        raise Misfit("empty text is no decimal: mend it")
    mask = texts.is_null().to_numpy(zero_copy_only=False) if texts.null_count else None
    return pa.array(found, mask=mask)


def _decode_into(found: Any, rows: Any, text: Any) -> bool:
    """Decode texts of one length, of up to eight bytes each. False when some cannot be.

    Args:
        found: Takes the numbers.
        rows: Where in it each belongs.
        text: Base64: the first characters of all texts, the second ones, and so on.
    """
    padded = text[-2:] == ord("=")
    padding = padded[1].astype(np.int8) + (padded[0] & padded[1])
    for count in np.flatnonzero(np.bincount(padding)).tolist():
        places = np.flatnonzero(padding == count)
        digits = _SIXES[text[: len(text) - count, places]]
        octets = len(text) // 4 * 3 - count
        if octets > 8 or (digits < 0).any():
            return False
        value = np.zeros(len(places), np.uint64)
        for sixes in digits[:-1].astype(np.uint64):
            value <<= np.uint64(6)
            value |= sixes
        spare = len(digits) * 6 - octets * 8  # bits of the last character that mean nothing
        value = value << np.uint64(6 - spare) | digits[-1].astype(np.uint64) >> np.uint64(spare)
        shift = np.int64(64 - 8 * octets)
        found[rows[places]] = value.view(np.int64) << shift >> shift
    return True


def _unscaled(texts: Sequence[str | None]) -> list[int | None]:
    decode = partial(binascii.a2b_base64, strict_mode=True)
    signed = partial(int.from_bytes, byteorder="big", signed=True)
    try:
        octets = [None if text is None else decode(text) for text in texts]
    except ValueError:
        raise Misfit(
            f"{shown(texts[0])} is no decimal as bytes, which is base64: if the connector has "
            "decimal.handling.mode=string, set DebeziumJson(decimal_handling='string')"
        ) from None
    if any(len(value) > _MOST_OCTETS for value in octets if value is not None):
        raise Misfit(
            "a decimal has more digits than BIGNUMERIC holds: use a STRING column, as text"
        )
    return [None if value is None else signed(value) for value in octets]


def _digits(texts: Any) -> Any:
    try:
        return texts.cast(_WIDE)
    except pa.ArrowInvalid:
        return pa.array([None if t is None else _parsed(t) for t in texts.to_pylist()], _WIDE)


def _parsed(text: str) -> Decimal:
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise Misfit(
            f"{shown(text)} is no decimal number: if it is its bytes, the connector has "
            "decimal.handling.mode=precise: set DebeziumJson(decimal_handling='precise')"
        ) from None
    if not value.is_finite():
        raise Misfit(f"{text} is no number that a decimal column can hold: use a STRING column")
    return value
