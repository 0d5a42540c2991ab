"""Readers: for each type of column and each kind of JSON value, how the values become Arrow.

A reader of text takes an Arrow array of strings, any other a list of Python values; nulls are among
them. It reads all or raises: `values.py` then finds the ones at fault.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.cdc.envelope import numbers, times
from dagster_bq_connector.cdc.envelope.connect import DECIMAL, Meaning, column_of
from dagster_bq_connector.cdc.envelope.forms import Forms, Misfit, shown
from dagster_bq_connector.cdc.envelope.geometry import well_known_text
from dagster_bq_connector.schema.types import type_name

_compute: Any = pc  # its stubs know a part of what it takes
_encode = msgspec.json.Encoder().encode
_validate = msgspec.json.Decoder(msgspec.Raw).decode


@dataclass(frozen=True)
class Column:
    """A column of the table, and what is known of the values that go into it.

    Attributes:
        field: The column.
        meaning: What the messages' schema says of its values.
        forms: How they are written where it says nothing.
        nested: It is a part of a column: a value that was not sent is not looked for.
    """

    field: SchemaField
    meaning: Meaning | None
    forms: Forms
    nested: bool = False


Reader: TypeAlias = Callable[[Column, Any], Any]


def said(meaning: Meaning) -> str:
    """What a message's schema calls a type."""
    return meaning.name or meaning.type


def _same(column: Column, values: Any) -> Any:
    return values


def _booleans(column: Column, values: Any) -> Any:
    return pa.array(values, pa.bool_())


def _integers(column: Column, values: Any) -> Any:
    return numbers.integers(values, column.meaning)


def _integer_texts(column: Column, values: Any) -> Any:
    if column.meaning is not None and column.meaning.name == DECIMAL:
        return _decimal_texts(column, values)
    return numbers.bits(values)


def _floats(column: Column, values: Any) -> Any:
    return pa.array(values, pa.float64())


def _float_texts(column: Column, values: Any) -> Any:
    return numbers.floats_of_texts(values)


def _decimal_texts(column: Column, values: Any) -> Any:
    scale = column.field.scale if column.field.precision is None else column.field.scale or 0
    return numbers.decimals_of_texts(values, scale, column.meaning, column.forms)


def _decimal_objects(column: Column, values: Any) -> Any:
    return numbers.decimals_of_objects(values)


def _decimal_floats(column: Column, values: Any) -> Any:
    return numbers.decimals_of_floats(values)


def _string_texts(column: Column, values: Any) -> Any:
    if column.meaning is not None and column.meaning.name == DECIMAL:
        return numbers.decimal_texts(_decimal_texts(column, values))
    return values


def _string_integers(column: Column, values: Any) -> Any:
    """Integers as the text of what they mean."""
    meaning: Any = column.meaning
    if any(v is not None and times.infinity_of(v, meaning) for v in values):
        named = [None if v is None else times.infinity_of(v, meaning) for v in values]
        left = [v if name is None else None for v, name in zip(values, named, strict=True)]
        return _compute.coalesce(pa.array(named, pa.string()), _string_integers(column, left))
    kind = column_of("value", meaning).field_type
    if kind == "DATE":
        return times.days(values).cast(pa.string())
    if kind == "TIME":
        return times.clock(values, meaning, column.forms).cast(pa.string())
    if kind == "DATETIME":
        return times.instants(values, meaning, column.forms).cast(pa.string())
    return numbers.integers(values, meaning).cast(pa.string())


def _string_others(column: Column, values: Any) -> Any:
    return pa.array([None if v is None else _encode(v).decode() for v in values], pa.string())


def _string_objects(column: Column, values: Any) -> Any:
    texts = [None if v is None else f"{numbers.variable(v):f}" for v in values]
    return pa.array(texts, pa.string())


def _bytes(column: Column, values: Any) -> Any:
    if column.forms.binary == "hex" and (column.meaning is None or column.meaning.type == "string"):
        return pa.array([None if v is None else _unhex(v) for v in values.to_pylist()], pa.binary())
    decoded = [None if v is None else numbers.decoded(v) for v in values.to_pylist()]
    return pa.array(decoded, pa.binary())


def _unhex(text: str) -> bytes:
    try:
        return binascii.a2b_hex(text)
    except ValueError as error:
        raise Misfit(
            f"{shown(text)} is no hexadecimal text: {error}. If the connector has "
            "binary.handling.mode=bytes, set DebeziumJson(binary_handling='base64')"
        ) from None


def _days(column: Column, values: Any) -> Any:
    if column.meaning is not None and column.meaning.name not in times.DAYS:
        raise Misfit(f"an integer of the type {said(column.meaning)} is no date")
    return times.days(values)


def _dates(column: Column, values: Any) -> Any:
    return times.dates_of_texts(values)


def _clock(column: Column, values: Any) -> Any:
    return times.clock(values, column.meaning, column.forms)


def _clock_texts(column: Column, values: Any) -> Any:
    return times.clock_of_texts(values)


def _instants(column: Column, values: Any) -> Any:
    found = times.instants(values, column.meaning, column.forms)
    if type_name(column.field) == "TIMESTAMP":
        return found.cast(pa.timestamp(found.type.unit, "UTC"))
    return found


def _instant_texts(column: Column, values: Any) -> Any:
    return times.instants_of_texts(values, type_name(column.field))


def _durations(column: Column, values: Any) -> Any:
    return times.durations(values, column.meaning)


def _interval_texts(column: Column, values: Any) -> Any:
    return times.intervals_of_texts(values)


def _json_texts(column: Column, values: Any) -> Any:
    for text in values.to_pylist():
        if text is not None:
            try:
                _validate(text)
            except (msgspec.DecodeError, RecursionError) as error:
                raise Misfit(f"{shown(text)} is no JSON document: {error}") from None
    return values


def _geometries(column: Column, values: Any) -> Any:
    texts = [None if value is None else well_known_text(value) for value in values]
    return pa.array(texts, pa.string())


@dataclass(frozen=True)
class _Reader:
    read: Reader
    takes: Callable[[Column], bool] = lambda column: True


def _is_said(column: Column) -> bool:
    return column.meaning is not None


def _is_whole(column: Column) -> bool:
    """Whether text may be an integer: a decimal of bytes, or bits."""
    names = (DECIMAL, "io.debezium.data.Bits")
    return column.meaning is not None and column.meaning.name in names


READERS: dict[tuple[str, type], _Reader] = {
    ("BOOLEAN", bool): _Reader(_booleans),
    ("INTEGER", int): _Reader(_integers),
    ("INTEGER", str): _Reader(_integer_texts, _is_whole),
    ("FLOAT", int): _Reader(_integers),
    ("FLOAT", float): _Reader(_floats),
    ("FLOAT", str): _Reader(_float_texts),
    **{
        (name, kind): _Reader(reader)
        for name in ("NUMERIC", "BIGNUMERIC")
        for kind, reader in (
            (int, _integers),
            (float, _decimal_floats),
            (str, _decimal_texts),
            (dict, _decimal_objects),
        )
    },
    ("STRING", str): _Reader(_string_texts),
    ("STRING", int): _Reader(_string_integers, _is_said),
    ("STRING", float): _Reader(_string_others, _is_said),
    ("STRING", bool): _Reader(_string_others, _is_said),
    ("STRING", dict): _Reader(_string_objects),
    ("BYTES", str): _Reader(_bytes),
    ("DATE", int): _Reader(_days),
    ("DATE", str): _Reader(_dates),
    ("TIME", int): _Reader(_clock),
    ("TIME", str): _Reader(_clock_texts),
    ("DATETIME", int): _Reader(_instants),
    ("DATETIME", str): _Reader(_instant_texts),
    ("TIMESTAMP", int): _Reader(_instants),
    ("TIMESTAMP", str): _Reader(_instant_texts),
    ("INTERVAL", int): _Reader(_durations),
    ("INTERVAL", str): _Reader(_interval_texts),
    ("JSON", str): _Reader(_json_texts),
    **{("JSON", kind): _Reader(_string_others) for kind in (bool, int, float, list, dict)},
    ("GEOGRAPHY", str): _Reader(_same),
    ("GEOGRAPHY", dict): _Reader(_geometries),
}
