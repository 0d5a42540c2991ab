"""Every type goes into a table and comes back the same, nested and repeated."""

import os
import uuid

import pyarrow as pa
import pytest
from google.cloud import bigquery as google
from google.cloud.bigquery import SchemaField
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    BigQueryWriter,
    DefaultStreamWriter,
)
from dagster_bq_connector.errors import FailedRowsError
from dagster_bq_connector.schema.types import table_fields
from support.every_type import EVERY_TYPE, multiset, tables

# BigQuery's Arrow rows have no TIME: a table that has one is written as protobuf.
ARROW_TYPES = tuple(kind for kind in EVERY_TYPE if kind != "TIME")
ENCODINGS = {"arrow": (ARROW_TYPES, []), "protobuf": (EVERY_TYPE, [SchemaField("time", "TIME")])}
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
    kinds, more = ENCODINGS[encoding]
    fields, rows = data.draw(tables(kinds, more))
    name = f"{dataset}.t{uuid.uuid4().hex[:12]}"
    with bigquery.get_client() as client:
        client.create_table(google.Table(f"{client.project}.{name}", schema=fields))
    assert stream_writer.append(rows, name).rows == rows.num_rows
    found = reader.read(name).to_arrow()
    assert multiset(found, fields) == multiset(rows, fields)
    # A table made for what was read would have the same columns.
    assert list(map(shape, table_fields(found.schema))) == list(map(shape, fields))


def shape(field: SchemaField) -> object:
    """What Arrow keeps of a column: of a record's fields not which are REQUIRED."""
    element = field.range_element_type and field.range_element_type.element_type
    fields = [shape(child) for child in field.fields]
    return field.name, field.field_type, field.mode == "REPEATED", element, fields


def test_json_null_is_not_null(
    dataset: str, bigquery: BigQueryResource, stream_writer: DefaultStreamWriter
) -> None:
    """Public failure case 42: JSON's null, a text in it, and no value are three things."""
    documents = ['{"a":1}', "null", None, '"x"', "[1,null]"]
    rows = pa.table({"id": range(5), "doc": pa.array(documents, pa.json_())})
    stream_writer.append(rows, f"{dataset}.docs")
    with bigquery.get_client() as client:
        found = client.query_and_wait(
            f"SELECT id, doc IS NULL, JSON_TYPE(doc) FROM {dataset}.docs ORDER BY id"
        )
        kinds = [tuple(row) for row in found]
    assert kinds == [
        (0, False, "object"),
        (1, False, "null"),
        (2, True, None),
        (3, False, "string"),
        (4, False, "array"),
    ]


def test_text_that_is_no_json_fails_its_row(
    dataset: str, stream_writer: DefaultStreamWriter, reader: BigQueryReader
) -> None:
    rows = pa.table({"id": [1, 2, 3], "doc": pa.array(["{}", "{no", "1"], pa.json_())})
    with pytest.raises(FailedRowsError) as caught:
        stream_writer.append(rows, f"{dataset}.docs")
    assert [row.index for row in caught.value.rows] == [1]
    assert sorted(reader.read(f"{dataset}.docs").to_arrow()["id"].to_pylist()) == [1, 3]


def test_polars_reads_datetimes_and_text(
    dataset: str, stream_writer: DefaultStreamWriter, reader: BigQueryReader
) -> None:
    """BigQuery marks DATETIME and JSON as extensions of its own, which Polars does not know."""
    pl = pytest.importorskip("polars")
    moment = pa.scalar(0, pa.timestamp("us"))
    documents = pa.array(["{}"], pa.json_())
    rows = pa.table(
        {"at": [moment], "doc": documents, "in": [{"at": moment}], "list": [[{"at": moment}]]}
    )
    stream_writer.append(rows, f"{dataset}.t")
    at = pl.Datetime("us")
    wanted = {"at": at, "doc": pl.String, "in": pl.Struct({"at": at})}
    wanted["list"] = pl.List(wanted["in"])
    read = reader.read(f"{dataset}.t")
    for frame in (read.to_polars(), pl.DataFrame(read)):
        assert frame.schema == pl.Schema(wanted)
    assert read.schema.field("doc").metadata == {b"ARROW:extension:name": b"google:sqlType:json"}


@pytest.mark.parametrize("kind", ["stream_writer", "load_writer"])
def test_a_fraction_of_a_second_keeps_its_leading_zeros(
    dataset: str, reader: BigQueryReader, request: pytest.FixtureRequest, kind: str
) -> None:
    """Public failure case 33: 1700000000004567 microseconds are 22:13:20.004567, not .4567."""
    writer: BigQueryWriter = request.getfixturevalue(kind)
    micros = pa.array([1700000000004567, -1, 1], pa.int64())
    rows = pa.table(
        {"at": micros.cast(pa.timestamp("us", "UTC")), "local": micros.cast(pa.timestamp("us"))}
    )
    writer.append(rows, f"{dataset}.t")
    found = reader.read(f"{dataset}.t", where="at > '2023-11-14'").to_arrow()
    assert [str(found[name][0]) for name in ("at", "local")] == [
        "2023-11-14 22:13:20.004567+00:00",
        "2023-11-14 22:13:20.004567",
    ]
    everything = reader.read(f"{dataset}.t").to_arrow().sort_by("at")
    assert everything["at"].cast(pa.int64()).to_pylist() == sorted(micros.to_pylist())
