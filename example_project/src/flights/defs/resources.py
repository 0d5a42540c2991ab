"""The connection. The emulators' variables, when they are set, decide where it leads."""

import os
from pathlib import Path

import dagster as dg

from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    DefaultStreamWriter,
    ExactlyOnceWriter,
    FileLoadsWriter,
    FileSource,
    KafkaSource,
)

RECORDED = Path(__file__).parents[1] / "data" / "changes"


def changes() -> FileSource | KafkaSource:
    """Where the changes of bookings come from: recorded files, or Debezium's topics in Kafka."""
    if broker := os.environ.get("FLIGHTS_KAFKA"):
        topics = r"^airline\.public\.(bookings|passengers)$"
        return KafkaSource(bootstrap_servers=broker, topic=topics)
    return FileSource(path=os.environ.get("FLIGHTS_CHANGES") or str(RECORDED))


@dg.definitions
def resources() -> dg.Definitions:
    """BigQuery, a reader, and a writer of each method: a line here says which asset has which."""
    bigquery = BigQueryResource(
        project=dg.EnvVar("GOOGLE_CLOUD_PROJECT"),
        location=os.environ.get("FLIGHTS_LOCATION", "US"),
    )
    staging = os.environ.get("FLIGHTS_STAGING", "gs://flights-staging")
    loads = FileLoadsWriter(bigquery=bigquery, staging=staging, create_dataset=True)
    once = ExactlyOnceWriter(bigquery=bigquery, create_dataset=True)
    stream = DefaultStreamWriter(bigquery=bigquery, create_dataset=True)
    return dg.Definitions(
        resources={
            "bigquery": bigquery,
            "reader": BigQueryReader(bigquery=bigquery),
            "writer": loads,
            "weather_writer": once,
            "late_writer": once,
            "log_writer": stream,
            "changes": changes(),
        },
        # On a laptop: a process for each step would take longer than most of its steps.
        executor=dg.in_process_executor,
    )
