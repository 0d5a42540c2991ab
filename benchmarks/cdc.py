"""Debezium's JSON to change rows in protobuf: ours against a loop over rows."""

import base64
import datetime as dt
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from google.cloud.bigquery import SchemaField

from benchmarks.backend import STREAM
from benchmarks.protobuf import message_class
from benchmarks.report import Call, Report
from dagster_bq_connector.cdc.envelope.debezium_json import DebeziumJson
from dagster_bq_connector.cdc.event import MESSAGES
from dagster_bq_connector.cdc.fold import fold
from dagster_bq_connector.cdc.ordering.postgres import PostgresLsn
from dagster_bq_connector.schema.proto import row_type
from dagster_bq_connector.write.encode import Request
from dagster_bq_connector.write.protobuf import ProtobufEncoder

EVENTS = 50_000
BATCH = 10_000
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
COLUMNS = [
    SchemaField("id", "INTEGER", "REQUIRED"),
    SchemaField("customer", "STRING"),
    SchemaField("quantity", "INTEGER"),
    SchemaField("price", "FLOAT"),
    SchemaField("paid", "BOOLEAN"),
    SchemaField("amount", "NUMERIC", precision=12, scale=2),
    SchemaField("note", "STRING"),
    SchemaField("country", "STRING"),
    SchemaField("day", "DATE"),
    SchemaField("updated_at", "TIMESTAMP"),
]
PSEUDO = [SchemaField("_CHANGE_TYPE", "STRING"), SchemaField("_CHANGE_SEQUENCE_NUMBER", "STRING")]
# As Kafka Connect writes them before the payload.
KINDS: dict[str, dict[str, Any]] = {
    "id": {"type": "int64"},
    "quantity": {"type": "int32"},
    "price": {"type": "double"},
    "paid": {"type": "boolean"},
    "amount": {
        "type": "bytes",
        "name": "org.apache.kafka.connect.data.Decimal",
        "version": 1,
        "parameters": {"scale": "2", "connect.decimal.precision": "12"},
    },
    "day": {"type": "int32", "name": "io.debezium.time.Date", "version": 1},
    "updated_at": {"type": "string", "name": "io.debezium.time.ZonedTimestamp", "version": 1},
}
SOURCE: dict[str, dict[str, Any]] = {
    name: {"type": kind, "optional": optional}
    for name, kind, optional in (
        ("version", "string", False),
        ("connector", "string", False),
        ("name", "string", False),
        ("ts_ms", "int64", False),
        ("snapshot", "string", True),
        ("db", "string", False),
        ("sequence", "string", True),
        ("ts_us", "int64", True),
        ("ts_ns", "int64", True),
        ("schema", "string", False),
        ("table", "string", False),
        ("txId", "int64", True),
        ("lsn", "int64", True),
        ("xmin", "int64", True),
        ("origin", "string", True),
        ("origin_lsn", "int64", True),
    )
}
SOURCE["snapshot"] |= {
    "name": "io.debezium.data.Enum",
    "version": 1,
    "parameters": {
        "allowed": "true,first,first_in_data_collection,last_in_data_collection,last,false,"
        "incremental"
    },
    "default": "false",
}
BLOCK = {"id": "string", "total_order": "int64", "data_collection_order": "int64"}


def written(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def schema() -> bytes:
    """What Debezium 3.6 writes before each payload of a table with these columns."""
    row = [
        {**KINDS.get(column.name, {"type": "string"}), "optional": True, "field": column.name}
        for column in COLUMNS
    ]
    source = [{**kind, "field": name} for name, kind in SOURCE.items()]
    block = [{"type": kind, "optional": False, "field": name} for name, kind in BLOCK.items()]
    its = "shop.public.orders.Value"
    of_source, of_block = "io.debezium.connector.postgresql.Source", "event.block"
    fields = [
        {"type": "struct", "fields": row, "optional": True, "name": its, "field": "before"},
        {"type": "struct", "fields": row, "optional": True, "name": its, "field": "after"},
        _struct(source, False, of_source, "source"),
        _struct(block, True, of_block, "transaction"),
        {"type": "string", "optional": False, "field": "op"},
        *[
            {"type": "int64", "optional": True, "field": name}
            for name in ("ts_ms", "ts_us", "ts_ns")
        ],
    ]
    name = "shop.public.orders.Envelope"
    whole = {"type": "struct", "fields": fields, "optional": False, "name": name, "version": 2}
    return written(whole)


def _struct(fields: list[Any], optional: bool, name: str, field: str) -> dict[str, Any]:
    kind = {"type": "struct", "fields": fields, "optional": optional, "name": name}
    return {**kind, "version": 1, "field": field}


def events(keys: int) -> list[tuple[bytes, bytes]]:
    """Keys and values of updates, with the rows before and after."""
    random = np.random.default_rng(7)
    found: list[tuple[bytes, bytes]] = []
    for number, key in enumerate(random.integers(0, keys, EVENTS).tolist()):
        lsn = 31_302_040 + 8 * number
        row = {
            "id": key,
            "customer": f"{key:08x}-customer-{key % 977}",
            "quantity": number % 100,
            "price": number / 7,
            "paid": number % 2 == 0,
            "amount": base64.b64encode((number * 7).to_bytes(4, "big")).decode(),
            "note": f"changed {number} times",
            "country": ("DE", "FR", "US", "JP")[number % 4],
            "day": 20_000 + number % 300,
            "updated_at": f"2026-08-01T10:{number % 60:02d}:56.{number % 10**6:06d}Z",
        }
        ms = 1_795_988_909_317 + number
        source = {
            "version": "3.6.3.Final",
            "connector": "postgresql",
            "name": "shop",
            "ts_ms": ms,
            "snapshot": "false",
            "db": "shop",
            "sequence": f'["{lsn - 8}","{lsn}"]',
            "ts_us": ms * 1000,
            "ts_ns": ms * 10**6,
            "schema": "public",
            "table": "orders",
            "txId": number,
            "lsn": lsn,
            "xmin": None,
            "origin": None,
            "origin_lsn": None,
        }
        value = {"before": row, "after": row, "source": source, "transaction": None, "op": "u"}
        value |= {"ts_ms": ms + 180, "ts_us": (ms + 180) * 1000, "ts_ns": (ms + 180) * 10**6}
        found.append((written({"id": key}), written(value)))
    return found


def with_schemas(given: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    before, name = schema(), b'{"schema":%b,"payload":%b}'
    of_key = written({"type": "struct", "fields": [{"type": "int64", "field": "id"}]})
    return [(name % (of_key, key), name % (before, value)) for key, value in given]


def messages(given: list[tuple[bytes, bytes]]) -> list[pa.RecordBatch]:
    batches: list[pa.RecordBatch] = []
    for start in range(0, len(given), BATCH):
        part = given[start : start + BATCH]
        count = len(part)
        arrays = [
            pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), ["orders"]),
            pa.array([0] * count, pa.int32()),
            pa.array(range(start, start + count), pa.int64()),
            pa.array([key for key, _ in part], pa.binary()),
            pa.array([value for _, value in part], pa.binary()),
        ]
        batches.append(pa.RecordBatch.from_arrays(arrays, schema=MESSAGES))
    return batches


def ours(batches: list[pa.RecordBatch]) -> Callable[[], int]:
    """Batch after batch: changes, sequences, fold, the rows that are left, protobuf."""
    envelope, profile = DebeziumJson(), PostgresLsn()
    columns = [*COLUMNS, *PSEUDO]

    def call() -> int:
        size = 0
        for batch in batches:
            found = envelope.events(batch, profile)
            sequences, _ = profile.sequences(found.changes)
            changes = found.changes
            chosen = fold(changes.column("key"), changes.column("table"), sequences)
            rows = envelope.rows(found, chosen, COLUMNS)
            kinds = pa.repeat("UPSERT", rows.batch.num_rows)
            kept = sequences.take(pa.array(rows.kept))
            whole = pa.RecordBatch.from_arrays(
                [*rows.batch.columns, kinds, kept],
                schema=pa.schema(
                    [
                        *rows.batch.schema,
                        pa.field("_CHANGE_TYPE", pa.string()),
                        pa.field("_CHANGE_SEQUENCE_NUMBER", pa.string()),
                    ]
                ),
            )
            encoder = ProtobufEncoder(columns, whole.schema, STREAM)
            cuts = encoder.cut(whole, 2**23, 2**21)
            size += sum(len(cut.payload) for cut in cuts if isinstance(cut, Request))
        return size

    return call


def a_row_at_a_time(given: list[tuple[bytes, bytes]], embedded: bool) -> Callable[[], int]:
    """json.loads, the values as the columns want them, a protobuf message; each row alone."""
    message = message_class(row_type([*COLUMNS, *PSEUDO]))

    def call() -> int:
        size = 0
        for _, value in given:
            event = json.loads(value)
            if embedded:
                event = event["payload"]
            after, source = event["after"], event["source"]
            first, second = json.loads(source["sequence"])
            row = message()
            row.id = after["id"]
            row.customer = after["customer"]
            row.quantity = after["quantity"]
            row.price = after["price"]
            row.paid = after["paid"]
            unscaled = int.from_bytes(base64.b64decode(after["amount"]), "big", signed=True)
            scaled = unscaled * 10**7  # NUMERIC has nine digits after the point
            row.amount = scaled.to_bytes(scaled.bit_length() // 8 + 1, "little", signed=True)
            row.note = after["note"]
            row.country = after["country"]
            row.day = after["day"]
            moment = dt.datetime.fromisoformat(after["updated_at"])
            row.updated_at = (moment - EPOCH) // dt.timedelta(microseconds=1)
            row._CHANGE_TYPE = "DELETE" if event["op"] == "d" else "UPSERT"
            row._CHANGE_SEQUENCE_NUMBER = f"{int(first or 0):016X}/{int(second):016X}"
            size += len(row.SerializeToString())
        return size

    return call


def run(report: Report) -> None:
    report.section("Debezium JSON to change rows in protobuf, 10 columns, before and after")
    plain, folded = events(10**9), events(EVENTS // 10)
    for given, title, target in (
        (plain, "no key twice", 4),
        (folded, "ten changes a key", 5),
        (with_schemas(plain), "no key twice, schemas in the messages", 15),
    ):
        # Ten changes a key are so in each batch, too.
        batches = messages(sorted(given) if given is folded else given)
        size = sum(len(key) + len(value) for key, value in given)
        embedded = given is not plain and given is not folded
        found = report.compare(
            {
                f"ours, {title}": Call(ours(batches), EVENTS, size),
                f"a loop over rows, {title}": Call(a_row_at_a_time(given, embedded), EVENTS, size),
            },
            repeats=7,
        )
        best, other = found.values()
        report.result(
            f"events per CPU second, {title}", best.rows_cpu / other.rows_cpu, " times", target
        )
