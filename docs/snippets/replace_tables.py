"""A whole table, a partition of another and some rows of a third are replaced at once."""

import datetime as dt

import dagster as dg
import polars as pl

from dagster_bq_connector import (
    BigQueryResource,
    BigQueryWriter,
    FileLoadsWriter,
    RowSlice,
    TableOptions,
    TimePartitioning,
)


@dg.asset(kinds={"bigquery"})
def price_list(writer: BigQueryWriter) -> dg.MaterializeResult:
    prices = pl.DataFrame({"item": ["pen", "ink", "pad"], "price": [1.2, 7.5, 3.1]})
    return writer.replace(prices, "shop.price_list").to_materialize_result()


BY_DAY = TableOptions(TimePartitioning("day"))


@dg.asset(kinds={"bigquery"})
def stock(writer: BigQueryWriter) -> dg.MaterializeResult:
    counted = pl.DataFrame({"day": [dt.date(2026, 8, 1)] * 2, "item": ["pen", "ink"]})
    return writer.replace(counted, "shop.stock$20260801", BY_DAY).to_materialize_result()


EUROPE = RowSlice.by_keys("shop.stores", "country", ["de", "fr"])


@dg.asset(kinds={"bigquery"})
def european_stores(writer: BigQueryWriter) -> dg.MaterializeResult:
    stores = pl.DataFrame({"country": ["de", "fr", "fr"], "city": ["Ulm", "Metz", "Nice"]})
    return writer.replace(stores, EUROPE).to_materialize_result()


bigquery = BigQueryResource(project=dg.EnvVar("GOOGLE_CLOUD_PROJECT"), location="EU")
defs = dg.Definitions(
    assets=[price_list, stock, european_stores],
    resources={
        "writer": FileLoadsWriter(
            bigquery=bigquery, staging="gs://my-staging/dagster", create_dataset=True
        ),
    },
)
