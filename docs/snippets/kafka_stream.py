"""A change stream from Kafka: two topics, two tables, and dead letters for what fails."""

from datetime import timedelta

import dagster as dg

from dagster_bq_connector import (
    BigQueryResource,
    CdcTable,
    DeadLetters,
    DebeziumJson,
    KafkaSource,
    PostgresLsn,
    build_cdc_sensor,
    cdc_assets,
)

shop_topics = KafkaSource(
    bootstrap_servers=dg.EnvVar("KAFKA"),
    topic=r"^shop\.public\.(orders|customers)$",
)

shop = cdc_assets(
    "shop_by_kafka",
    source="shop_topics",
    format=DebeziumJson(),
    ordering=PostgresLsn(),
    tables={
        "public.orders": CdcTable("crm.orders"),
        "public.customers": CdcTable("crm.buyers", max_staleness=timedelta(minutes=10)),
    },
    failed_rows=DeadLetters("crm.dead_letters"),
)

defs = dg.Definitions(
    assets=[shop],
    sensors=[build_cdc_sensor([shop])],
    resources={
        "bigquery": BigQueryResource(project=dg.EnvVar("GOOGLE_CLOUD_PROJECT"), location="EU"),
        "shop_topics": shop_topics,
    },
)
