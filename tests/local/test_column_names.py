"""Names of columns that are no identifiers go in and come out as they are."""

import pyarrow as pa
import pytest
from google.cloud import bigquery as google
from google.cloud.bigquery import SchemaField

from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    DefaultStreamWriter,
    FileLoadsWriter,
)
from dagster_bq_connector.errors import SchemaError

NAMES = ["order-no", "7up", "select", "überflüssig", "two words", "a&b%c=d+e:f'g<h>i#j|k", "Case"]
NESTED = {"in-side": 1, "列": "x"}


def rows(*numbers: int) -> pa.Table:
    return pa.table({name: list(numbers) for name in NAMES} | {"str-uct": [NESTED] * len(numbers)})


@pytest.mark.parametrize("writer", ["stream_writer", "load_writer"])
def test_flexible_names(
    writer: str, dataset: str, reader: BigQueryReader, request: pytest.FixtureRequest
) -> None:
    """Public failure case 48: dashes, leading digits, keywords and umlauts in names."""
    write: DefaultStreamWriter | FileLoadsWriter = request.getfixturevalue(writer)
    table = f"{dataset}.names"
    write.append(rows(1, 2), table)
    write.append(rows(3), table)
    got = reader.read(table).to_arrow()
    assert got.schema.names == [*NAMES, "str-uct"]
    assert sorted(got["order-no"].to_pylist()) == [1, 2, 3]
    assert got["str-uct"].to_pylist() == [NESTED] * 3
    chosen = reader.read(
        table, columns=["überflüssig", "7UP"], where="`order-no` > 1 AND `str-uct`.`in-side` = 1"
    ).to_arrow()
    assert chosen.schema.names == ["überflüssig", "7up"]
    assert sorted(chosen["7up"].to_pylist()) == [2, 3]


def test_a_load_job_is_told_of_flexible_names(
    dataset: str, bigquery: BigQueryResource, load_writer: FileLoadsWriter
) -> None:
    flexible = load_writer.append(rows(1), f"{dataset}.flexible")
    plain = load_writer.append(pa.table({"Case": [1]}), f"{dataset}.plain")
    with bigquery.get_client() as client:
        jobs = [client.get_job(result.jobs[0]).to_api_repr() for result in (flexible, plain)]
    maps = [job["configuration"]["load"].get("columnNameCharacterMap") for job in jobs]
    assert maps == ["V2", None]


@pytest.mark.parametrize(
    ("name", "blame"),
    [("a.b", r"'a\.b' holds '\.'"), ("_PARTITIONTIME", "begins with _PARTITION"), ("", "no name")],
)
def test_a_name_that_no_column_may_have_makes_no_table(
    dataset: str,
    bigquery: BigQueryResource,
    stream_writer: DefaultStreamWriter,
    name: str,
    blame: str,
) -> None:
    with pytest.raises(SchemaError, match=blame):
        stream_writer.append(pa.table({"id": [1], name: [2]}), f"{dataset}.t")
    with bigquery.get_client() as client:
        assert list(client.list_tables(dataset)) == []


def test_the_table_keeps_the_case_of_its_names(
    dataset: str,
    bigquery: BigQueryResource,
    stream_writer: DefaultStreamWriter,
    reader: BigQueryReader,
) -> None:
    with bigquery.get_client() as client:
        fields = [SchemaField("OrderId", "INTEGER"), SchemaField("Ünit", "STRING")]
        client.create_table(google.Table(f"{client.project}.{dataset}.t", schema=fields))
    stream_writer.append(pa.table({"orderid": [1], "ÜNIT": ["a"]}), f"{dataset}.t")
    assert reader.read(f"{dataset}.t").to_arrow().to_pylist() == [{"OrderId": 1, "Ünit": "a"}]


def test_names_that_a_change_of_case_would_make_one(
    dataset: str,
    stream_writer: DefaultStreamWriter,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
) -> None:
    """Public failure case 47: no name is changed, so FirstName and First_Name do not collide."""
    rows = pa.table({"FirstName": ["a"], "First_Name": ["b"], "first name": ["c"]})
    for writer in (stream_writer, load_writer):
        name = f"{dataset}.{type(writer).__name__}"
        writer.append(rows, name)
        assert reader.read(name).to_arrow().to_pylist() == rows.to_pylist()
