"""How a table is laid out when it is created."""

from datetime import timedelta

import pyarrow as pa

from dagster_bq_connector import (
    BigQueryResource,
    DefaultStreamWriter,
    RangePartitioning,
    TableOptions,
    TimePartitioning,
)

ORDERS = TableOptions(
    partitioning=TimePartitioning("created_at", "month", expiration=timedelta(days=800)),
    clustering=("customer", "id"),
    primary_key=("id",),
    require_partition_filter=True,
    description="One row an order.",
    labels={"team": "shop"},
)

CUSTOMERS = TableOptions(
    partitioning=RangePartitioning("id", start=0, end=1_000_000, interval=10_000)
)

orders = pa.table(
    {"id": [1, 2], "customer": ["ann", "bob"]},
    schema=pa.schema([pa.field("id", pa.int64(), nullable=False), ("customer", pa.string())]),
).append_column("created_at", pa.array([0, 0], pa.timestamp("us", "UTC")))

bigquery = BigQueryResource(location="EU")
writer = DefaultStreamWriter(bigquery=bigquery, create_dataset=True)
result = writer.append(orders, "shop.orders", ORDERS)
customers = writer.append(pa.table({"id": [7]}), "shop.customers", CUSTOMERS)
