"""What passengers book: two tables of an airline's PostgreSQL, followed change by change.

Debezium writes a message for each row that was inserted, updated or deleted there. The sensor looks
for messages, and launches a run that applies them in their order.
"""

import os
from datetime import timedelta

import dagster as dg
from google.cloud.bigquery import SchemaField

from dagster_bq_connector import CdcTable, DebeziumJson, PostgresLsn, build_cdc_sensor, cdc_assets

# The messages carry no schemas: what the columns are is said here. The keys come with the messages.
BOOKINGS = [
    SchemaField("id", "INTEGER"),
    SchemaField("flight_date", "DATE"),
    SchemaField("carrier", "STRING"),
    SchemaField("flight", "INTEGER"),
    SchemaField("origin", "STRING"),
    SchemaField("dest", "STRING"),
    SchemaField("passenger", "INTEGER"),
    SchemaField("seat", "STRING"),
    SchemaField("price", "NUMERIC"),
    SchemaField("status", "STRING"),
    SchemaField("updated_at", "TIMESTAMP"),
]
PASSENGERS = [
    SchemaField("id", "INTEGER"),
    SchemaField("name", "STRING"),
    SchemaField("email", "STRING"),
    SchemaField("tier", "STRING"),
    SchemaField("updated_at", "TIMESTAMP"),
]

changes = cdc_assets(
    "bookings",
    source="changes",
    format=DebeziumJson(decimal_handling="string"),  # the connector's decimal.handling.mode
    ordering=PostgresLsn(),
    tables={
        "public.bookings": CdcTable("flights.bookings", schema=BOOKINGS),
        "public.passengers": CdcTable("flights.passengers", schema=PASSENGERS),
    },
    max_delay=timedelta(seconds=5),
    group_name="bookings",
)

# On a local BigQuery it runs from the start. On Google Cloud it is turned on in the page.
is_local = "BIGQUERY_EMULATOR_HOST" in os.environ
bookings_sensor = build_cdc_sensor(
    [changes],
    name="bookings_sensor",
    minimum_interval_seconds=5,
    default_status=dg.DefaultSensorStatus.RUNNING if is_local else dg.DefaultSensorStatus.STOPPED,
)
