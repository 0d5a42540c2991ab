"""Rows are added over the Storage Write API as they come."""

import dagster as dg
import pyarrow as pa

from dagster_bq_connector import (
    BigQueryResource,
    DefaultStreamWriter,
    TableOptions,
    TimePartitioning,
)

LAYOUT = TableOptions(TimePartitioning("created_at"), clustering=("id",))


@dg.asset(kinds={"bigquery"})
def events(writer: DefaultStreamWriter) -> dg.MaterializeResult:
    rows = pa.table({"id": [1, 2], "amount": [9.5, 3.0]}).append_column(
        "created_at", pa.array([0, 86_400_000_000], pa.timestamp("us", "UTC"))
    )
    return writer.append(rows, "shop.events", LAYOUT).to_materialize_result()


bigquery = BigQueryResource(project=dg.EnvVar("GOOGLE_CLOUD_PROJECT"), location="EU")
defs = dg.Definitions(
    assets=[events],
    resources={"writer": DefaultStreamWriter(bigquery=bigquery, create_dataset=True)},
)
