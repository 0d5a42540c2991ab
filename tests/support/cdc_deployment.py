"""Change streams of the tests' own, with their resources, in an instance of Dagster."""

from datetime import timedelta
from typing import Any

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
from support.change_files import ChangeFiles

COLUMNS = [SchemaField("id", "INTEGER"), SchemaField("name", "STRING")]
AT_ONCE: dict[str, Any] = {"min_rows": 1, "max_delay": timedelta(0)}


def stream(dataset: str, name: str = "orders", **more: Any) -> dg.AssetsDefinition:
    settings: dict[str, Any] = {
        "source": "changes",
        "format": DebeziumJson(),
        "ordering": PostgresLsn(),
        "tables": {"public.orders": CdcTable(f"{dataset}.{name}", schema=COLUMNS)},
        "ledger": dataset,
        **AT_ONCE,
    }
    return cdc_assets(name, **{**settings, **more})


class Deployment:
    """The streams of a test, their resources, and an instance of Dagster."""

    def __init__(
        self,
        bigquery: BigQueryResource,
        changes: ChangeFiles,
        instance: dg.DagsterInstance,
        *streams: dg.AssetsDefinition,
    ) -> None:
        self.bigquery, self.instance, self.streams = bigquery, instance, list(streams)
        self.resources: dict[str, Any] = {
            "bigquery": bigquery,
            "changes": FileSource(path=str(changes.folder)),
        }
        self.sensor = build_cdc_sensor(streams)
        self.cursor: str | None = None

    def materialize(self, **more: Any) -> dg.ExecuteInProcessResult:
        more.setdefault("instance", self.instance)
        return dg.materialize(self.streams[:1], resources=self.resources, **more)

    def tick(self) -> dg.SensorResult:
        context = dg.build_sensor_context(
            instance=self.instance, cursor=self.cursor, resources=self.resources
        )
        result = self.sensor(context)
        assert isinstance(result, dg.SensorResult)
        self.cursor = result.cursor
        return result

    def launched(self) -> dg.RunRequest:
        [request] = self.tick().run_requests or []
        return request

    def run(self, request: dg.RunRequest, **more: Any) -> dg.ExecuteInProcessResult:
        return self.materialize(run_config=request.run_config, tags=request.tags, **more)

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        with self.bigquery.get_client() as client:
            found = client.query_and_wait(f"SELECT id, name FROM {table} ORDER BY id")
            return [tuple(row.values()) for row in found]
