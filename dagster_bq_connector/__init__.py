"""Move data into and out of BigQuery from Dagster.

The names below are the whole public surface. Each is loaded when it is first used, so that the
lower floor (reading, writing, tables) can be used without importing Dagster.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster_bq_connector.assets import cdc_assets as cdc_assets
    from dagster_bq_connector.cdc.envelope.debezium_json import DebeziumJson as DebeziumJson
    from dagster_bq_connector.cdc.ordering.postgres import PostgresLsn as PostgresLsn
    from dagster_bq_connector.cdc.table import CdcTable as CdcTable
    from dagster_bq_connector.cdc.table import DeadLetters as DeadLetters
    from dagster_bq_connector.cdc_sources import FileSource as FileSource
    from dagster_bq_connector.cdc_sources import KafkaSource as KafkaSource
    from dagster_bq_connector.errors import ConnectorError as ConnectorError
    from dagster_bq_connector.errors import FailedRowsError as FailedRowsError
    from dagster_bq_connector.exactly_once_writer import ExactlyOnceWriter as ExactlyOnceWriter
    from dagster_bq_connector.file_loads_writer import FileLoadsWriter as FileLoadsWriter
    from dagster_bq_connector.io_manager import BigQueryIOManager as BigQueryIOManager
    from dagster_bq_connector.partitions import DailyTable as DailyTable
    from dagster_bq_connector.resources import BigQueryReader as BigQueryReader
    from dagster_bq_connector.resources import BigQueryResource as BigQueryResource
    from dagster_bq_connector.sensors import build_cdc_sensor as build_cdc_sensor
    from dagster_bq_connector.table.options import RangePartitioning as RangePartitioning
    from dagster_bq_connector.table.options import TableOptions as TableOptions
    from dagster_bq_connector.table.options import TimePartitioning as TimePartitioning
    from dagster_bq_connector.table.ref import TableRef as TableRef
    from dagster_bq_connector.table.row_slice import RowSlice as RowSlice
    from dagster_bq_connector.writers import BigQueryWriter as BigQueryWriter
    from dagster_bq_connector.writers import DefaultStreamWriter as DefaultStreamWriter

__version__ = "0.1.0"

_HOMES = {
    "BigQueryIOManager": "io_manager",
    "BigQueryReader": "resources",
    "BigQueryResource": "resources",
    "BigQueryWriter": "writers",
    "CdcTable": "cdc.table",
    "ConnectorError": "errors",
    "DailyTable": "partitions",
    "DeadLetters": "cdc.table",
    "DebeziumJson": "cdc.envelope.debezium_json",
    "DefaultStreamWriter": "writers",
    "ExactlyOnceWriter": "exactly_once_writer",
    "FailedRowsError": "errors",
    "FileLoadsWriter": "file_loads_writer",
    "FileSource": "cdc_sources",
    "KafkaSource": "cdc_sources",
    "PostgresLsn": "cdc.ordering.postgres",
    "RangePartitioning": "table.options",
    "RowSlice": "table.row_slice",
    "TableOptions": "table.options",
    "TableRef": "table.ref",
    "TimePartitioning": "table.options",
    "build_cdc_sensor": "sensors",
    "cdc_assets": "assets",
}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]  # built from one list


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
