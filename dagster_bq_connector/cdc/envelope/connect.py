"""The schemas that Kafka Connect's JSON converter puts into each message, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from google.cloud.bigquery import SchemaField

from dagster_bq_connector.schema.types import MAX_BIGNUMERIC, MAX_NUMERIC

DECIMAL = "org.apache.kafka.connect.data.Decimal"
VARIABLE_DECIMAL = "io.debezium.data.VariableScaleDecimal"
GEOMETRIES = tuple(f"io.debezium.data.geometry.{name}" for name in ("Point", "Geometry"))
GEOGRAPHY = "io.debezium.data.geometry.Geography"
# What the connectors add with `datatype.propagate.source.type` or `column.propagate.source.type`.
SOURCE_TYPE = "__debezium.source.column.type"


@dataclass(frozen=True)
class Meaning:
    """What a message's schema says of a value.

    Attributes:
        type: Connect's type: `int32`, `string`, `bytes`, `struct`, `array`, and so on.
        name: The semantic type, as `io.debezium.time.MicroTimestamp`; empty when there is none.
        parameters: Of the semantic type, as its scale.
        fields: Of a struct, in their order.
        items: Of an array.
        optional: Whether it may be null.
    """

    type: str
    name: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict[str, str])
    fields: Mapping[str, Meaning] = field(default_factory=dict[str, "Meaning"])
    items: Meaning | None = None
    optional: bool = True

    @classmethod
    def of(cls, schema: Any) -> Meaning:
        """Read a schema.

        Raises:
            ValueError: It is none.
        """
        if not isinstance(schema, dict) or not isinstance(schema.get("type"), str):
            raise ValueError("the embedded schema is none of Kafka Connect")
        given = cast("dict[str, Any]", schema)
        fields = cast("Sequence[dict[str, Any]]", given.get("fields") or ())
        items = given.get("items")
        return cls(
            given["type"],
            str(given.get("name") or ""),
            {str(key): str(value) for key, value in (given.get("parameters") or {}).items()},
            {str(child.get("field")): cls.of(child) for child in fields},
            None if items is None else cls.of(items),
            bool(given.get("optional", False)),
        )

    @property
    def is_unsigned(self) -> bool:
        """Whether it is an unsigned 64-bit integer of MySQL, printed as a signed one."""
        return (
            self.type == "int64"
            and SOURCE_TYPE in self.parameters
            and (self.parameters[SOURCE_TYPE].upper().startswith("BIGINT UNSIGNED"))
        )


_BY_NAME = {
    "io.debezium.time.Date": "DATE",
    "io.debezium.time.IsoDate": "DATE",
    "org.apache.kafka.connect.data.Date": "DATE",
    "io.debezium.time.Time": "TIME",
    "io.debezium.time.MicroTime": "TIME",
    "io.debezium.time.NanoTime": "TIME",
    "io.debezium.time.IsoTime": "TIME",
    "io.debezium.time.ZonedTime": "TIME",
    "org.apache.kafka.connect.data.Time": "TIME",
    "io.debezium.time.Timestamp": "DATETIME",
    "io.debezium.time.MicroTimestamp": "DATETIME",
    "io.debezium.time.NanoTimestamp": "DATETIME",
    "io.debezium.time.IsoTimestamp": "DATETIME",
    "org.apache.kafka.connect.data.Timestamp": "DATETIME",
    "io.debezium.time.ZonedTimestamp": "TIMESTAMP",
    "io.debezium.time.MicroDuration": "INTERVAL",
    "io.debezium.time.NanoDuration": "INTERVAL",
    "io.debezium.time.Interval": "INTERVAL",
    "io.debezium.data.Json": "JSON",
    VARIABLE_DECIMAL: "BIGNUMERIC",
    **dict.fromkeys((*GEOMETRIES, GEOGRAPHY), "GEOGRAPHY"),
}
_BY_TYPE = {
    **dict.fromkeys(("int8", "int16", "int32", "int64"), "INTEGER"),
    **dict.fromkeys(("float", "float32", "float64", "double"), "FLOAT"),
    "boolean": "BOOLEAN",
    "string": "STRING",
    "bytes": "BYTES",
    "map": "JSON",
}


def column_of(name: str, meaning: Meaning) -> SchemaField:
    """The BigQuery column that holds a source's column exactly.

    A decimal with more digits than BIGNUMERIC takes becomes a STRING; a `timestamp` without time
    zone a DATETIME; an array REPEATED, or JSON when it is one of arrays; a map JSON.
    """
    if meaning.type == "array" and meaning.items is not None:
        if meaning.items.type == "array":
            return SchemaField(name, "JSON")
        element = column_of(name, meaning.items)
        return SchemaField(name, element.field_type, "REPEATED", fields=element.fields)
    if meaning.name == DECIMAL:
        return _decimal(name, meaning)
    if meaning.is_unsigned:
        return SchemaField(name, "NUMERIC")
    if kind := _BY_NAME.get(meaning.name):
        return SchemaField(name, kind)
    if meaning.type == "struct":
        children = [column_of(child, its) for child, its in meaning.fields.items()]
        return SchemaField(name, "RECORD", fields=children)
    return SchemaField(name, _BY_TYPE.get(meaning.type, "STRING"))


def _decimal(name: str, meaning: Meaning) -> SchemaField:
    scale = int(meaning.parameters.get("scale", "0"))
    precision = meaning.parameters.get("connect.decimal.precision")
    whole = int(precision) - scale if precision else MAX_NUMERIC[0]
    for kind, most in (("NUMERIC", MAX_NUMERIC), ("BIGNUMERIC", MAX_BIGNUMERIC)):
        if whole <= most[0] and scale <= most[1]:
            return SchemaField(name, kind)
    return SchemaField(name, "STRING")
