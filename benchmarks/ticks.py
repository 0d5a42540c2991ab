"""A tick of the CDC sensor over a hundred idle streams, each with a topic of its own."""

import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import dagster as dg
from google.cloud.bigquery import SchemaField

from benchmarks.report import Report
from dagster_bq_connector import (
    BigQueryResource,
    CdcTable,
    DebeziumJson,
    KafkaSource,
    PostgresLsn,
    build_cdc_sensor,
    cdc_assets,
)
from dagster_bq_connector.local import LocalBigQuery
from tests.support.kafka import kafka_broker

STREAMS = 100
TICKS = 5


def stream(number: int) -> dg.AssetsDefinition:
    table = CdcTable(f"bench.t{number}", schema=[SchemaField("id", "INTEGER")])
    return cdc_assets(
        f"stream_{number}",
        source=f"topic_{number}",
        format=DebeziumJson(),
        ordering=PostgresLsn(),
        tables={"public.t": table},
    )


def run(report: Report) -> None:
    report.section(f"A sensor's tick over {STREAMS} idle streams of Kafka")
    with (
        LocalBigQuery() as local,
        tempfile.TemporaryDirectory() as folder,
        kafka_broker(Path(folder)) as kafka,
        dg.DagsterInstance.ephemeral() as instance,
    ):
        at = local.environment
        bigquery = BigQueryResource(
            project=at["GOOGLE_CLOUD_PROJECT"],
            location="US",
            api_endpoint=at["BIGQUERY_EMULATOR_HOST"],
            storage_endpoint=f"http://{at['BIGQUERY_STORAGE_EMULATOR_HOST']}",
            cloud_storage_endpoint=at["STORAGE_EMULATOR_HOST"],
        )
        resources: dict[str, Any] = {"bigquery": bigquery}
        for number in range(STREAMS):
            source = KafkaSource(bootstrap_servers=kafka.address, topic=kafka.create())
            resources[f"topic_{number}"] = source
        sensor = build_cdc_sensor([stream(number) for number in range(STREAMS)])
        seconds = [_tick(sensor, instance, resources) for _ in range(TICKS + 1)][1:]
        with bigquery.get_client() as client:
            queries = sum(job.job_type == "query" for job in client.list_jobs(timeout=60))
    report.result("a tick, the slowest of five", max(seconds), " s", -5)
    report.result("query jobs", queries, "")


def _tick(sensor: Any, instance: dg.DagsterInstance, resources: dict[str, Any]) -> float:
    context = dg.build_sensor_context(instance=instance, resources=resources)
    context.log.setLevel(logging.WARNING)  # a line a stream
    began = time.perf_counter()
    found = sensor(context)
    assert found.skip_reason is not None
    assert found.skip_reason.skip_message.count("no changes") == STREAMS
    return time.perf_counter() - began
