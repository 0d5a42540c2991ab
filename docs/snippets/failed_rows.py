"""Rows that BigQuery does not take are kept in a table of their own, and the run goes on."""

import json

import dagster as dg
import pyarrow as pa

from dagster_bq_connector import BigQueryResource, DefaultStreamWriter, FailedRowsError


@dg.asset(kinds={"bigquery"})
def readings(writer: DefaultStreamWriter) -> dg.MaterializeResult:
    rows = pa.table({"sensor": ["a", "b", "c"], "celsius": [[21.5], [20.1, None], [20.9]]})
    try:
        return writer.append(rows, "lab.readings").to_materialize_result()
    except FailedRowsError as error:
        failed = rows.take([row.index for row in error.rows]).to_pylist()
        kept = pa.table(
            {
                "row": [json.dumps(row, default=str) for row in failed],
                "reason": [str(row) for row in error.rows],
            }
        )
        writer.append(kept, "lab.failed_readings")
        return dg.MaterializeResult(
            metadata={"dagster_bq/rows": error.written, "failed_rows": len(failed)}
        )


bigquery = BigQueryResource(project=dg.EnvVar("GOOGLE_CLOUD_PROJECT"), location="EU")
defs = dg.Definitions(
    assets=[readings],
    resources={"writer": DefaultStreamWriter(bigquery=bigquery, create_dataset=True)},
)
