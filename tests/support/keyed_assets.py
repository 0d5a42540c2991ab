"""Assets that append to tables by the two writers that know keys, and fail as they are told."""

import json
import os
from pathlib import Path

import dagster as dg
import pyarrow as pa

from dagster_bq_connector import BigQueryResource, ExactlyOnceWriter, FileLoadsWriter

CONNECTION = "DAGSTER_BQ_TEST_CONNECTION"  # fields, ledger and staging as JSON, for all processes


class Order(dg.Config):
    """Where to, and where the flags lie that say what happens."""

    dataset: str
    flags: str

    def told(self, flag: str) -> bool:
        return (Path(self.flags) / flag).exists()


def rows_of(order: Order) -> pa.Table:
    """Other rows in each run, so that it is seen whose they are."""
    path = Path(order.flags) / "number"
    number = int(path.read_text()) if path.exists() else 0
    path.write_text(str(number + 1))
    return pa.table({"number": pa.array([number], pa.int64())})


@dg.asset
def streams(context: dg.AssetExecutionContext, config: Order, once: ExactlyOnceWriter) -> None:
    once.append(rows_of(config), f"{config.dataset}.streams")
    if config.told("fail streams"):
        raise RuntimeError("after the write")


@dg.asset
def loads(context: dg.AssetExecutionContext, config: Order, load: FileLoadsWriter) -> None:
    load.append(rows_of(config), f"{config.dataset}.loads")
    if config.told("fail loads"):
        raise RuntimeError("after the write")


@dg.asset
def fine(config: Order, once: ExactlyOnceWriter) -> None:
    once.append(rows_of(config), f"{config.dataset}.fine")


assets = [streams, loads, fine]
if CONNECTION in os.environ:
    connection = json.loads(os.environ[CONNECTION])
    bigquery = BigQueryResource(**connection["fields"])
    defs = dg.Definitions(
        assets=assets,
        jobs=[
            dg.define_asset_job("all_assets", assets, executor_def=dg.in_process_executor),
            dg.define_asset_job("one_asset", [streams], executor_def=dg.in_process_executor),
        ],
        resources={
            "once": ExactlyOnceWriter(bigquery=bigquery, ledger=connection["ledger"]),
            "load": FileLoadsWriter(bigquery=bigquery, staging=connection["staging"]),
        },
    )
