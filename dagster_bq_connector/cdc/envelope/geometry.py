"""Points and other geometries: from well-known binary, as Debezium sends it, to well-known text."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from dagster_bq_connector.cdc.envelope.forms import Misfit, shown
from dagster_bq_connector.cdc.envelope.numbers import decoded

_NAMES = {
    1: "POINT",
    2: "LINESTRING",
    3: "POLYGON",
    4: "MULTIPOINT",
    5: "MULTILINESTRING",
    6: "MULTIPOLYGON",
    7: "GEOMETRYCOLLECTION",
}
_SRID, _HEIGHTS = 0x20000000, 0xC0000000  # PostGIS' flags
_WGS84 = 4326
_DEEPEST = 32


def well_known_text(value: Mapping[str, Any]) -> str:
    """The text of an object of `wkb` and perhaps `srid`, or of `x` and `y`.

    Raises:
        Misfit: It is none, is not of WGS 84, or has heights, which GEOGRAPHY does not.
    """
    srid, binary = value.get("srid"), value.get("wkb")
    if srid not in (None, 0, _WGS84):
        raise Misfit(
            f"SRID {srid} is not WGS 84 (4326), which GEOGRAPHY holds: transform it at the source"
        )
    if isinstance(binary, str):
        reader = _Reader(decoded(binary))
        try:
            return reader.geometry()
        except (struct.error, KeyError, IndexError):
            raise Misfit(f"{shown(binary)} is no well-known binary geometry") from None
    if {type(value.get("x")), type(value.get("y"))} <= {int, float}:
        return f"POINT({value['x']!r} {value['y']!r})"
    raise Misfit(f"{shown(dict(value))} is no geometry: it has no wkb")


class _Reader:
    """Reads one geometry from its bytes."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def geometry(self, named: bool = True, depth: int = 0) -> str:
        order = "<" if self._data[self._at] == 1 else ">"
        self._at += 1
        (kind,) = self._next(order + "I")
        if kind & _SRID:
            (srid,) = self._next(order + "I")
            if srid not in (0, _WGS84):
                raise Misfit(f"SRID {srid} is not WGS 84 (4326): transform it at the source")
        if kind & _HEIGHTS or kind & 0xFFFF > 1000 or depth > _DEEPEST:
            raise Misfit(
                "a geometry with heights does not fit GEOGRAPHY: make it flat (ST_Force2D)"
            )
        kind &= 0xFF
        name, body = _NAMES[kind], self._body(kind, order, depth)
        return f"{name}{body}" if named else body

    def _body(self, kind: int, order: str, depth: int) -> str:
        if kind == 1:
            return f"({self._point(order)})"
        (count,) = self._next(order + "I")
        if count * 4 > len(self._data):
            raise IndexError
        if not count:
            return " EMPTY"
        if kind == 2:
            parts = [self._point(order) for _ in range(count)]
        elif kind == 3:
            parts = [self._body(2, order, depth) for _ in range(count)]
        else:
            parts = [self.geometry(kind == 7, depth + 1) for _ in range(count)]
        return f"({', '.join(parts)})"

    def _point(self, order: str) -> str:
        x, y = self._next(order + "dd")
        return f"{x!r} {y!r}"

    def _next(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return found
