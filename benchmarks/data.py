"""Twelve mixed columns, as a table of orders has them."""

import datetime as dt

import numpy as np
import pyarrow as pa

BATCH = 10_000


def batches(rows: int) -> list[pa.RecordBatch]:
    """`rows` rows in batches of ten thousand."""
    random = np.random.default_rng(7)
    start = dt.datetime(2026, 8, 1, tzinfo=dt.UTC)
    base = int(start.timestamp() * 1_000_000)
    words = np.array([f"{n:08x}-customer-{n % 977}" for n in range(10_000)])
    cents = pa.array(random.integers(0, 10**6, rows)).cast(pa.decimal128(38, 0))
    table = pa.table(
        {
            "id": np.arange(rows),
            "quantity": random.integers(0, 100, rows),
            "price": random.random(rows),
            "weight": random.random(rows),
            "paid": random.random(rows) < 0.5,
            "customer": words[random.integers(0, len(words), rows)],
            "note": words[random.integers(0, len(words), rows)],
            "country": np.array(["DE", "FR", "US", "JP"])[random.integers(0, 4, rows)],
            "amount": cents.cast(pa.decimal128(38, 9)),
            "day": pa.array(random.integers(20_000, 20_300, rows), pa.int32()).cast(pa.date32()),
            "created_at": pa.array(base + np.arange(rows), pa.timestamp("us", "UTC")),
            "civil": pa.array(base + np.arange(rows), pa.timestamp("us")),
        }
    )
    return table.to_batches(max_chunksize=BATCH)
