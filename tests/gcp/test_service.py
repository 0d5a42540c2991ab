"""What only a real project can show, beside tests/local, which runs on it unchanged.

`make test-gcp` runs both; CONTRIBUTING.md says how.
"""

from decimal import Decimal

import pyarrow as pa
import pytest
from google.cloud.bigquery import SchemaField, Table

from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    DefaultStreamWriter,
    FileLoadsWriter,
    TableOptions,
)
from support.service import ON_SERVICE

pytestmark = pytest.mark.skipif(not ON_SERVICE, reason="needs a real project")

SPANS = pa.array(
    [pa.MonthDayNano([-14, 3, -1_000]), pa.MonthDayNano([0, 0, 5_000_000_000_000_000])],
    pa.month_day_nano_interval(),
)
WIDE = pa.array(
    [Decimal("99999999999999999999999999999999999999.5"), Decimal("-1E-38")], pa.decimal256(76, 38)
)


@pytest.mark.parametrize("method", ["stream", "load"])
def test_what_the_local_bigquery_cannot_hold(
    method: str,
    dataset: str,
    reader: BigQueryReader,
    stream_writer: DefaultStreamWriter,
    load_writer: FileLoadsWriter,
) -> None:
    """All 38 digits after the point of a BIGNUMERIC; intervals that are negative or long."""
    rows = pa.table({"id": [0, 1], "wide": WIDE, "span": SPANS})
    writer = stream_writer if method == "stream" else load_writer
    assert writer.append(rows, f"{dataset}.t").rows == 2
    got = reader.read(f"{dataset}.t").to_arrow().sort_by("id")
    assert got.to_pydict() == rows.to_pydict()


def test_a_column_that_was_added_just_now_is_waited_for(
    dataset: str,
    bigquery: BigQueryResource,
    reader: BigQueryReader,
    stream_writer: DefaultStreamWriter,
) -> None:
    with bigquery.get_client() as client:
        client.create_table(Table(f"{client.project}.{dataset}.t", [SchemaField("id", "INTEGER")]))
    stream_writer.append(pa.table({"id": [1]}), f"{dataset}.t")
    wider = pa.table({"id": [2], "added": ["x"]})
    stream_writer.append(wider, f"{dataset}.t", TableOptions(evolution="add"))
    rows = reader.read(f"{dataset}.t").to_arrow().sort_by("id").to_pylist()
    assert rows == [{"id": 1, "added": None}, {"id": 2, "added": "x"}]
