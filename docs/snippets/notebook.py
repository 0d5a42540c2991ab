"""The same outside of Dagster, as in a notebook."""

import polars as pl

from dagster_bq_connector import BigQueryReader, BigQueryResource, DefaultStreamWriter

bigquery = BigQueryResource(location="EU")  # the project comes from the environment
writer = DefaultStreamWriter(bigquery=bigquery, create_dataset=True)
reader = BigQueryReader(bigquery=bigquery)

prices = pl.DataFrame({"item": ["pen", "ink", "pad"], "price": [1.2, 7.5, 3.1]})
result = writer.append(prices, "shop.prices")
cheap = reader.read("shop.prices", columns=["item"], where="price < 5").to_polars()
