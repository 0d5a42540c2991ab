"""Message keys in one canonical form, so that equal keys have equal bytes."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dagster_bq_connector.cdc.envelope.images import JSON_ERRORS

_compute: Any = pc  # its stubs know a part of what it takes
# One field, an integer or plain text, without space: as Kafka Connect writes most keys. It is
# canonical as it stands.
_CANONICAL = (
    r'^\{"[A-Za-z_][A-Za-z0-9_]*":(?:0|-?[1-9][0-9]{0,17}|"[ !#-\[\]-~]*")\}$'  # ASCII, no escapes
)
_encode = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder().decode
_NO_KEY = (
    "the message has no key, so it is not known which row it changes: give the source's table a "
    "primary key, or set message.key.columns on the connector"
)


def canonical_keys(given: pa.Array[Any]) -> tuple[pa.Array[Any], dict[int, str]]:
    """Bring keys to one form: without space, their fields by name.

    Args:
        given: JSON; empty or null for none.

    Returns:
        Binary, null for keys that failed; and for each of those, by its index, the reason.
    """
    canonical = _compute.match_substring_regex(given, _CANONICAL)
    if not given.null_count and _compute.all(canonical).as_py():
        return given, {}
    encoded: Any = _compute.fill_null(given, b"").dictionary_encode()
    reasons: dict[int, str] = {}
    found: list[bytes | None] = []
    for code, key in enumerate(encoded.dictionary.to_pylist()):
        try:
            found.append(_canonical(key))
        except (ValueError, *JSON_ERRORS) as error:
            reasons[code] = str(error)
            found.append(None)
    taken = pa.array(found, pa.binary()).take(encoded.indices)
    if not reasons:
        return taken, {}
    codes = encoded.indices.to_numpy()
    rows = np.flatnonzero(np.isin(codes, list(reasons))).tolist()
    return taken, {row: reasons[int(codes[row])] for row in rows}


def _canonical(key: bytes) -> bytes:
    if not key or key == b"null":
        raise ValueError(_NO_KEY)
    value = _decode(key)
    if not isinstance(value, dict) or not value:
        raise ValueError(
            f"the message's key is no JSON object of the key's columns but {key[:60]!r}: use the "
            "JSON converter for keys, too (key.converter)"
        )
    fields = cast("dict[str, Any]", value)
    for name, part in fields.items():
        if part is None:
            raise ValueError(f"the message's key has null in {name!r}, which no primary key has")
    return _encode(fields)
