"""Every type goes into a table and comes back the same, nested and repeated."""

import os
import uuid

import pytest
from google.cloud import bigquery as google
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_bq_connector import BigQueryReader, BigQueryResource, DefaultStreamWriter
from support.every_type import EVERY_TYPE, multiset, tables

# BigQuery's Arrow rows have no TIME.
ARROW_TYPES = tuple(kind for kind in EVERY_TYPE if kind != "TIME")
ENCODINGS = {"arrow": ARROW_TYPES}
EXAMPLES = 400 if os.environ.get("SOAK") else 25


@pytest.mark.parametrize("encoding", ENCODINGS)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_what_is_appended_is_read_back(
    dataset: str,
    bigquery: BigQueryResource,
    stream_writer: DefaultStreamWriter,
    reader: BigQueryReader,
    encoding: str,
    data: st.DataObject,
) -> None:
    """Public failure cases 35, 41 and 42: dates of any year, null lists, JSON's own null."""
    fields, rows = data.draw(tables(ENCODINGS[encoding]))
    name = f"{dataset}.t{uuid.uuid4().hex[:12]}"
    with bigquery.get_client() as client:
        client.create_table(google.Table(f"{client.project}.{name}", schema=fields))
    assert stream_writer.append(rows, name).rows == rows.num_rows
    assert multiset(reader.read(name).to_arrow(), fields) == multiset(rows, fields)
