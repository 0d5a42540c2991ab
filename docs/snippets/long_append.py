"""A long append is seen checkpoint by checkpoint, and goes on where it was left."""

from collections.abc import Iterator
from dataclasses import dataclass

import dagster as dg
import pyarrow as pa

from dagster_bq_connector import BigQueryResource, ExactlyOnceWriter


@dataclass
class Page:
    """Rows, and where they stand in their source."""

    number: int
    rows: pa.Table


def pages(after: int | None) -> Iterator[Page]:
    """A source that can begin anywhere."""
    for number in range((after or 0) + 1, 4):
        yield Page(number, pa.table({"page": [number], "text": [f"page {number}"]}))


@dg.asset(kinds={"bigquery"})
def events(writer: ExactlyOnceWriter) -> dg.MaterializeResult:
    with writer.open("shop.page_events") as write:
        for page in pages(after=write.position):
            write.append(page.rows)
            write.checkpoint(page.number)
    return write.result.to_materialize_result()


bigquery = BigQueryResource(project=dg.EnvVar("GOOGLE_CLOUD_PROJECT"), location="EU")
defs = dg.Definitions(
    assets=[events],
    resources={"writer": ExactlyOnceWriter(bigquery=bigquery, create_dataset=True)},
)
