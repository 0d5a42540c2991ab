"""A code location with one change stream, as the daemon's processes load it.

What the stream is stands in the environment, as `Spine` in JSON.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import dagster as dg
from dagster._core.launcher import DefaultRunLauncher

from dagster_bq_connector import (
    BigQueryResource,
    CdcTable,
    DebeziumJson,
    KafkaSource,
    PostgresLsn,
    build_cdc_sensor,
    cdc_assets,
)
from dagster_bq_connector.cdc import look
from support.workload_tables import TABLES

VARIABLE = "DAGSTER_BQ_TEST_SPINE"
STREAM = "spine"


@dataclass(frozen=True)
class Spine:
    """What the processes have to know.

    Attributes:
        fields: Of the BigQuery resource.
        dataset: Of the tables, and the ledger.
        kafka: The broker's address.
        topics: A pattern.
        schemas: Whether messages carry their schemas.
        lease_seconds: Of the stream.
        max_changes: A plan holds as many messages.
    """

    fields: dict[str, Any]
    dataset: str
    kafka: str
    topics: str
    schemas: bool
    lease_seconds: float = 30.0
    max_changes: int = 500

    def tables(self) -> dict[str, CdcTable]:
        return {
            table.name: CdcTable(
                self.table(table.name), schema=() if self.schemas else table.fields()
            )
            for table in TABLES
        }

    def table(self, source: str) -> str:
        """Where the changes of a source's table go."""
        return f"{self.dataset}.{source.split('.')[1]}"

    def assets(self) -> dg.AssetsDefinition:
        return cdc_assets(
            STREAM,
            source="topics",
            format=DebeziumJson(time_precision="microseconds"),
            ordering=PostgresLsn(),
            tables=self.tables(),
            ledger=self.dataset,
            min_rows=1,
            max_delay=timedelta(0),
            max_changes=self.max_changes,
            max_run_seconds=60,
            lease_seconds=self.lease_seconds,
        )

    def definitions(self) -> dg.Definitions:
        assets = self.assets()
        running = dg.DefaultSensorStatus.RUNNING
        return dg.Definitions(
            assets=[assets],
            sensors=[
                build_cdc_sensor([assets], minimum_interval_seconds=1, default_status=running)
            ],
            resources={
                "bigquery": BigQueryResource(**self.fields),
                "topics": KafkaSource(bootstrap_servers=self.kafka, topic=self.topics),
            },
            executor=dg.in_process_executor,
        )


class LateLauncher(DefaultRunLauncher):
    """Launches runs some seconds late, now and then."""

    DELAYS: Sequence[float] = (0, 0, 0, 3)

    def launch_run(self, context: Any) -> None:
        time.sleep(self.DELAYS[int(context.dagster_run.run_id[:2], 16) % len(self.DELAYS)])
        super().launch_run(context)


if VARIABLE in os.environ:
    # Runs are killed here again and again: a pause of minutes after a failure would be waited for.
    look.FIRST_PAUSE, look.LONGEST_PAUSE = timedelta(seconds=1), timedelta(seconds=3)
    defs = Spine(**json.loads(os.environ[VARIABLE])).definitions()
