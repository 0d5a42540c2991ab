"""A change stream: a table of PostgreSQL is kept up to date in BigQuery."""

from datetime import timedelta

import dagster as dg
from google.cloud.bigquery import SchemaField

from dagster_bq_connector import (
    BigQueryResource,
    CdcTable,
    DebeziumJson,
    FileSource,
    PostgresLsn,
    build_cdc_sensor,
    cdc_assets,
)

shop = cdc_assets(
    "shop",
    source="changes",
    format=DebeziumJson(),
    ordering=PostgresLsn(),
    tables={
        "public.customers": CdcTable(
            "crm.customers",
            schema=[
                SchemaField("id", "INTEGER"),
                SchemaField("name", "STRING"),
                SchemaField("city", "STRING"),
            ],
            max_staleness=timedelta(minutes=10),
        ),
    },
    max_delay=timedelta(minutes=1),
)
sensor = build_cdc_sensor([shop], default_status=dg.DefaultSensorStatus.RUNNING)

defs = dg.Definitions(
    assets=[shop],
    sensors=[sensor],
    resources={
        "bigquery": BigQueryResource(project=dg.EnvVar("GOOGLE_CLOUD_PROJECT"), location="EU"),
        "changes": FileSource(path=dg.EnvVar("CHANGES")),
    },
)
