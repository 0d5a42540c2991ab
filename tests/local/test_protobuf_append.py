"""Rows as protobuf to the local BigQuery over its gRPC port, and back, of every type."""

import datetime as dt
import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from dateutil.relativedelta import relativedelta
from google.cloud.bigquery import SchemaField, Table
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dagster_bq_connector import BigQueryReader, BigQueryResource, DefaultStreamWriter
from dagster_bq_connector.errors import FailedRowsError
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.retry import Backoff
from dagster_bq_connector.schema.data import open_data
from dagster_bq_connector.table.admin import EnsuredTable
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.write import default_stream
from dagster_bq_connector.write.connection import Connection, append_rows
from dagster_bq_connector.write.encode import Request
from dagster_bq_connector.write.protobuf import ProtobufEncoder
from dagster_bq_connector.write.result import WriteResult
from support import protobuf_rows
from support.protobuf_rows import VALUES, WIRE, batch_of, decimals, exact

UTC = dt.UTC
# What the local BigQuery keeps: 18 digits after the point; intervals as Parquet has them.
DOCUMENT = '{"a": [1, null, "é"], "b": {}}'
KEPT: dict[str, st.SearchStrategy[Any]] = VALUES | {
    "BIGNUMERIC": decimals(38, 18),
    "JSON": st.just(DOCUMENT),
    "INTERVAL": st.builds(
        lambda months, days, millis: pa.MonthDayNano([months, days, millis * 10**6]),
        *(st.integers(0, 120_000), st.integers(0, 3_660_000), st.integers(0, 2**32 - 1)),
    ),
}


EDGES: dict[str, list[Any]] = {
    "BOOLEAN": [False, True],
    "INTEGER": [0, -1, -(2**63), 2**63 - 1],
    "FLOAT": [0.0, -0.0, float("nan"), float("inf"), float("-inf"), 5e-324],
    "NUMERIC": [Decimal(0), Decimal("-0.000000001"), Decimal("9" * 29 + "." + "9" * 9)],
    "BIGNUMERIC": [Decimal(0), Decimal("-0.000000000000000001"), Decimal("9" * 20 + ".5")],
    "STRING": ["", "é\0\n", "x" * 200],
    "BYTES": [b"", b"\0\xff", bytes(range(256))],
    "DATE": [dt.date(1970, 1, 1), dt.date(1969, 12, 31), dt.date(1, 1, 1), dt.date(9999, 12, 31)],
    "DATETIME": [dt.datetime(1970, 1, 1), dt.datetime(1, 1, 1), dt.datetime.max],
    "TIMESTAMP": [
        dt.datetime(1970, 1, 1, tzinfo=UTC),
        dt.datetime(1, 1, 1, tzinfo=UTC),
        dt.datetime.max.replace(tzinfo=UTC),
    ],
    "TIME": [dt.time(), dt.time(1, 2, 3, 4), dt.time.max],
    "JSON": [DOCUMENT],
    "GEOGRAPHY": ["POINT(1 2)"],
    "INTERVAL": [pa.MonthDayNano([0, 0, 0]), pa.MonthDayNano([14, 3, 3_723_004_000_000])],
}


def of_each_type(mode: str) -> list[SchemaField]:
    ranges = [
        SchemaField(f"range of {element}", "RANGE", mode, range_element_type=element)
        for element in protobuf_rows.RANGES
    ]
    return [*(SchemaField(kind, kind, mode) for kind in WIRE), *ranges]


def edges(column: SchemaField) -> list[Any]:
    if column.field_type != "RANGE":
        return EDGES[column.field_type]
    first, *_, last = EDGES[column.range_element_type.element_type]
    return [{"start": start, "end": end} for start in (None, first) for end in (None, last)]


def test_the_edges_of_any_rows_come_back_alone_in_lists_and_in_structs(
    bigquery: BigQueryResource, dataset: str
) -> None:
    single, listed = of_each_type("NULLABLE"), of_each_type("REPEATED")
    columns = [
        SchemaField("id", "INTEGER", "REQUIRED"),
        *single,
        SchemaField("lists", "RECORD", fields=listed),
        SchemaField("7 of-each", "RECORD", "REPEATED", fields=single),
    ]
    lists = {column.name: edges(column) for column in single}
    empty = {column.name: [] for column in single}
    nothing: dict[str, Any] = {column.name: None for column in single}
    each = [
        {name: values[number % len(values)] for name, values in lists.items()}
        for number in range(max(map(len, lists.values())))
    ]
    rows = [row | {"lists": empty, "7 of-each": each} for row in each]
    rows += [nothing | {"lists": None, "7 of-each": []}]
    rows += [nothing | {"lists": lists, "7 of-each": [nothing, each[0]]}]
    rows = [{"id": number} | row for number, row in enumerate(rows)]
    with bigquery.get_client() as client:
        table = client.create_table(Table(f"{client.project}.{dataset}.edges", columns))
        append(bigquery, table, batch_of(columns, rows))
        found = sorted(map(dict, client.list_rows(table)), key=lambda row: row["id"])
    assert list(map(comparable, found)) == list(map(comparable, rows))


def append(bigquery: BigQueryResource, table: Table, batch: pa.RecordBatch) -> None:
    """Send a batch in the wire types as protobuf."""
    clients = bigquery.connect().clients
    stream = f"{TableRef.parse(str(table.reference)).path}/streams/_default"
    encoder = ProtobufEncoder(table.schema, batch.schema, stream)
    connection = Connection(
        append_rows(clients.channel, stream), encoder.first, backoff=Backoff(deadline=30)
    )
    for cut in encoder.cut(batch, 2**23, 2**21):
        assert isinstance(cut, Request)
        connection.send(cut.payload).result()
    connection.close()


def comparable(value: Any) -> Any:
    """A value as it went in, and as Google's client gives it, in one form."""
    if isinstance(value, dict):
        return {name: comparable(one) for name, one in value.items()}
    if isinstance(value, list):
        return [comparable(one) for one in value]
    if isinstance(value, pa.MonthDayNano):
        months, days, nanos = value
        return relativedelta(months=months, days=days, microseconds=nanos // 1000)
    return json.loads(value) if value == DOCUMENT else exact(value)


@settings(
    max_examples=20,
    deadline=None,
    phases=[Phase.generate],  # each example takes a table: what fails is not made smaller
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_rows_of_any_columns_come_back(
    data: st.DataObject, bigquery: BigQueryResource, dataset: str
) -> None:
    columns = data.draw(protobuf_rows.columns(depth=2))
    rows = data.draw(protobuf_rows.rows(columns, KEPT))
    columns = [SchemaField("__id", "INTEGER", "REQUIRED"), *columns]
    rows = [row | {"__id": number} for number, row in enumerate(rows)]
    with bigquery.get_client() as client:
        name = f"{client.project}.{dataset}.any_rows"
        client.delete_table(name, not_found_ok=True)
        table = client.create_table(Table(name, columns))
        append(bigquery, table, batch_of(columns, rows))
        found = [dict(row) for row in client.list_rows(table)]
    found.sort(key=lambda row: row["__id"])
    assert list(map(comparable, found)) == list(map(comparable, rows))


def append_as_protobuf(bigquery: BigQueryResource, data: Any, table: Table) -> WriteResult:
    """What DefaultStreamWriter does, but as protobuf whatever the types."""
    connected = bigquery.connect()
    ensured = EnsuredTable(TableRef.parse(str(table.reference)), table.schema, age=0)
    with Progress("append", log=lambda _: None) as progress:
        return default_stream.append(
            connected.clients, ensured, open_data(data), progress, 60, encoder=ProtobufEncoder
        )


def test_time_goes_as_protobuf_without_being_asked(
    dataset: str, stream_writer: DefaultStreamWriter, reader: BigQueryReader
) -> None:
    times = [dt.time(1, 2, 3, 4), None, dt.time.max, dt.time()]
    rows = pa.table(
        {
            "id": range(4),
            "t": pa.array(times, pa.time64("us")),
            "s": pa.array([[{"t": time}] for time in times]),
            "Ü-1": pa.array([1, None, 2, None]),
        }
    )
    result = stream_writer.append(rows, f"{dataset}.clock")
    assert (result.rows, result.bytes > 0) == (4, True)
    back = reader.read(f"{dataset}.clock").to_arrow().sort_by("id")
    assert back.to_pylist() == rows.to_pylist()
    assert back.schema.field("t").type == pa.time64("us")


def test_rows_that_fail_are_named_and_the_others_are_in(
    bigquery: BigQueryResource, dataset: str
) -> None:
    """Too large for a request, refused by the server, and refused before: by their positions."""
    columns = [
        SchemaField("id", "INTEGER", "REQUIRED"),
        SchemaField("doc", "JSON"),
        SchemaField("t", "TIME"),
    ]
    documents = ["{}", "{", "[" + "1," * 5_500_000 + "1]", "[]", "null"]
    rows = pa.table(
        {
            "id": pa.array([0, 1, 2, 3, None]),
            "doc": documents,
            "t": pa.array([dt.time(1, 2)] * 5, pa.time64("us")),
        }
    )
    with bigquery.get_client() as client:
        table = client.create_table(Table(f"{client.project}.{dataset}.some", columns))
        with pytest.raises(FailedRowsError) as caught:
            append_as_protobuf(bigquery, rows, table)
        assert sorted(row["id"] for row in client.list_rows(table)) == [0, 3]
    failed = {row.index: row.reason for row in caught.value.rows}
    assert set(failed) == {1, 2, 4}
    assert failed[2].startswith("it takes 11,000,")
    assert caught.value.written == 2


def test_many_rows_go_in_many_requests(bigquery: BigQueryResource, dataset: str) -> None:
    rows = pa.table({"id": range(30_000), "s": ["é" * (n % 300) for n in range(30_000)]})
    columns = [SchemaField("id", "INTEGER"), SchemaField("s", "STRING")]
    with bigquery.get_client() as client:
        table = client.create_table(Table(f"{client.project}.{dataset}.many", columns))
        result = append_as_protobuf(bigquery, rows, table)
        assert result.rows == 30_000
        assert result.bytes > 2 * default_stream.PREFERRED_BYTES
        check = f"SELECT count(*), sum(id), sum(length(s)) FROM `{table.reference}`"
        [row] = client.query_and_wait(check)
    assert tuple(row) == (30_000, sum(range(30_000)), sum(n % 300 for n in range(30_000)))


def test_changes_go_with_their_two_pseudo_columns(bigquery: BigQueryResource, dataset: str) -> None:
    """The encoder takes them as columns that the table does not have."""
    with bigquery.get_client() as client:
        name = f"{client.project}.{dataset}.changes"
        key = "PRIMARY KEY (id) NOT ENFORCED"
        client.query_and_wait(f"CREATE TABLE `{name}` (id INT64, at TIME, {key})")
        table = client.get_table(name)
        pseudo = [
            SchemaField("_CHANGE_TYPE", "STRING"),
            SchemaField("_CHANGE_SEQUENCE_NUMBER", "STRING"),
        ]
        table.schema, columns = [*table.schema, *pseudo], [*table.schema, *pseudo]
        changes = [
            (1, dt.time(1), "UPSERT", "2"),
            (1, dt.time(2), "UPSERT", "1"),
            (2, dt.time(3), "UPSERT", "1"),
            (2, None, "DELETE", "A"),
        ]
        names = [column.name for column in columns]
        rows = [dict(zip(names, change, strict=True)) for change in changes]
        append(bigquery, table, batch_of(columns, rows))
        assert [tuple(row) for row in client.list_rows(name)] == [(1, dt.time(1))]
