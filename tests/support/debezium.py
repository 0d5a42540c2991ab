"""Messages of Debezium: those that were captured, and some made for a test."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from dagster_bq_connector.cdc.event import MESSAGES

CAPTURED = Path(__file__).parents[1] / "data" / "debezium" / "postgres"


def written(document: Any) -> bytes | None:
    if document is None or isinstance(document, bytes):
        return document
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def batch(*messages: tuple[Any, Any], topic: str = "shop.public.orders") -> pa.RecordBatch:
    """Messages of one topic, from keys and values."""
    return batch_of([(topic, key, value) for key, value in messages])


def batch_of(messages: list[tuple[str, Any, Any]]) -> pa.RecordBatch:
    """Messages from topics, keys and values."""
    arrays = [
        pa.array([topic for topic, _, _ in messages], pa.string()).dictionary_encode(),
        pa.array([0] * len(messages), pa.int32()),
        pa.array(range(len(messages)), pa.int64()),
        pa.array([written(key) for _, key, _ in messages], pa.binary()),
        pa.array([written(value) for _, _, value in messages], pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=MESSAGES)


def captured(schemas: bool) -> pa.RecordBatch:
    """A whole run of PostgreSQL's connector, as it was delivered."""
    name = "with_schema_all_in_order.json" if schemas else "all_in_order.json"
    found = json.loads((CAPTURED / name).read_text())
    return batch_of([(m["topic"], m["key"], m["value"]) for m in found])


def event(
    op: str = "u",
    after: Any = None,
    lsn: int = 20,
    committed: int | None = 10,
    table: str = "orders",
    **more: Any,
) -> dict[str, Any]:
    """An envelope of PostgreSQL; `more` replaces fields of its source."""
    sequence = json.dumps([None if committed is None else str(committed), str(lsn)])
    source = {"connector": "postgresql", "snapshot": "false", "db": "shop", "ts_ms": 1_000}
    source |= {"schema": "public", "table": table, "sequence": sequence, "lsn": lsn, **more}
    return {"before": None, "after": after, "source": source, "transaction": None, "op": op}


def with_schema(fields: list[dict[str, Any]], value: dict[str, Any]) -> dict[str, Any]:
    """The same envelope below the schema of its rows."""
    row = {"type": "struct", "fields": fields, "optional": True}
    parts = [{**row, "field": "before"}, {**row, "field": "after"}]
    schema = {"type": "struct", "fields": parts, "optional": False, "name": "shop.Envelope"}
    return {"schema": schema, "payload": value}
