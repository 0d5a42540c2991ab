"""The same outside of Dagster, as in a notebook."""

import polars as pl
import pyarrow.compute as pc

from dagster_bq_connector import BigQueryReader, BigQueryResource, DefaultStreamWriter

bigquery = BigQueryResource(location="EU")  # the project comes from the environment
writer = DefaultStreamWriter(bigquery=bigquery, create_dataset=True)
reader = BigQueryReader(bigquery=bigquery)

prices = pl.DataFrame({"item": ["pen", "ink", "pad"], "price": [1.2, 7.5, 3.1]})
result = writer.append(prices, "shop.prices")
cheap = reader.read("shop.prices", columns=["item"], where="price < 5").to_polars()

total = 0.0
for batch in reader.read("shop.prices", columns=["price"]):
    total += pc.sum(batch["price"]).as_py()

writer.append(reader.read("shop.prices", where="price < 5"), "shop.cheap_prices")

dear = reader.scan("shop.prices").filter(pl.col("price") > 5).select("item").collect()
