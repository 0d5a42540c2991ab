"""Files that are in Cloud Storage already are loaded once, as BigQuery takes them."""

import datetime as dt
import io
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import dagster_gcp
import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from google.cloud import storage

from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    DailyTable,
    FileLoadsWriter,
    RowSlice,
    TableOptions,
    TimePartitioning,
)
from dagster_bq_connector.errors import (
    AccessDeniedError,
    ConfigurationError,
    ConnectorError,
    RefusedError,
    SchemaError,
    SourceFileError,
    TableNotFoundError,
    UnsupportedError,
    WriteKeyError,
    explain,
)
from dagster_bq_connector.write import bucket, load_errors, parts
from support.http_proxy import PASSED, Call, HttpProxy, Verdict
from support.service import BUCKET

SCHEMA = pa.schema([("n", pa.int64()), ("day", pa.date32()), ("text", pa.string())])
Put = Callable[[str, bytes], str]


@pytest.fixture
def put(bigquery: BigQueryResource, staging: str) -> Put:
    """Stores a file; gives its address."""
    connected = bigquery.connect()
    client = connected.clients.cloud_storage(connected.project)
    prefix = staging.removeprefix(f"gs://{BUCKET}/")

    def store(name: str, content: bytes) -> str:
        client.bucket(BUCKET).blob(f"{prefix}/given/{name}").upload_from_string(content)
        return f"{staging}/given/{name}"

    return store


def rows_of(*numbers: int, day: str = "2026-08-01") -> pa.Table:
    date = dt.date.fromisoformat(day)
    columns = [list(numbers), [date] * len(numbers), [f"row {n}" for n in numbers]]
    return pa.table(columns, schema=SCHEMA)


def parquet(rows: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(rows, sink)
    return sink.getvalue()


def avro(schema: Any, *rows: dict[str, Any]) -> bytes:
    sink = io.BytesIO()
    fastavro.writer(sink, {"type": "record", "name": "r", "fields": schema}, rows)
    return sink.getvalue()


def numbers(reader: BigQueryReader, table: str) -> list[int]:
    return sorted(reader.read(table, ["n"]).to_arrow()["n"].to_pylist())


def test_files_land_once_and_stay(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader, put: Put, staged: Any
) -> None:
    name, key = f"{dataset}.t", f"{dataset} files"
    uris = [put("a.parquet", parquet(rows_of(1, 2))), put("b.parquet", parquet(rows_of(3)))]
    first = load_writer.load_uris([*uris, uris[0]], name, schema=SCHEMA, key=key)
    again = load_writer.load_uris(uris, name, key=key)
    assert [first.rows, again.rows] == [3, 3]
    assert [first.replayed, again.replayed] == [False, True]
    assert first.bytes > 100
    assert (first.method, first.operation) == ("file_loads", "append")
    assert numbers(reader, name) == [1, 2, 3]
    assert len(staged()) == 2
    with pytest.raises(WriteKeyError, match="used already"):
        load_writer.append(rows_of(1), name, key=key)


def test_a_star_stands_for_any_text(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader, put: Put, staging: str
) -> None:
    for number in range(3):
        put(f"part-{number}.parquet", parquet(rows_of(number)))
    put("part-9.csv", b"not this one")
    result = load_writer.load_uris(f"{staging}/given/part-*.parquet", f"{dataset}.t", schema=SCHEMA)
    assert result.rows == 3
    assert numbers(reader, f"{dataset}.t") == [0, 1, 2]
    with pytest.raises(SourceFileError, match="does not exist"):
        load_writer.load_uris(f"{staging}/given/none-*", f"{dataset}.t")


def test_a_file_with_a_star_in_its_name_is_refused(
    dataset: str, load_writer: FileLoadsWriter, put: Put, staging: str
) -> None:
    """BigQuery would load with it what its name stands for, and that once more by its own name."""
    for name in ("part-*.parquet", "part-1.parquet"):
        put(name, parquet(rows_of(1)))
    with pytest.raises(SourceFileError, match=r"part-\*.parquet has a \* in its name"):
        load_writer.load_uris(f"{staging}/given/*", f"{dataset}.t", schema=SCHEMA)


@pytest.mark.parametrize(
    ("format_", "content", "more"),
    [
        ("csv", b"n,day,text\n1,2026-08-01,one\n2,2026-08-01,two\n", {"skip_leading_rows": 1}),
        (
            "json_lines",
            b'{"text": "one", "n": 1, "day": "2026-08-01"}\n{"n": 2, "text": "two", "day": null}\n',
            {},
        ),
        (
            "avro",
            avro(
                [
                    {"name": "n", "type": ["null", "long"]},
                    {"name": "day", "type": {"type": "int", "logicalType": "date"}},
                    {"name": "text", "type": "string"},
                ],
                {"n": 1, "day": dt.date(2026, 8, 1), "text": "one"},
                {"n": 2, "day": dt.date(2026, 8, 1), "text": "two"},
            ),
            {},
        ),
    ],
    ids=["csv", "json_lines", "avro"],
)
def test_formats(
    dataset: str,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
    put: Put,
    format_: Any,
    content: bytes,
    more: dict[str, Any],
) -> None:
    load_writer.append(rows_of(7), f"{dataset}.t")
    uri = put("rows", content)
    result = load_writer.load_uris(uri, f"{dataset}.t", format_, "replace", **more)
    assert result.rows == 2
    rows = reader.read(f"{dataset}.t").to_arrow().sort_by("n").to_pylist()
    assert [(row["n"], row["text"]) for row in rows] == [(1, "one"), (2, "two")]
    assert rows[0]["day"] == dt.date(2026, 8, 1)


def test_avro_times_are_times(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader, put: Put
) -> None:
    """Public failure case 44: timestamp-millis 1000 is a second after 1970, and no number."""
    at = {"type": "long", "logicalType": "timestamp-millis"}
    instant = dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=dt.UTC)
    content = avro([{"name": "at", "type": ["null", at]}], {"at": instant}, {"at": None})
    schema = pa.schema([("at", pa.timestamp("us", "UTC"))])
    load_writer.load_uris(put("a.avro", content), f"{dataset}.t", "avro", schema=schema)
    found = reader.read(f"{dataset}.t").to_arrow()
    assert found.schema.field("at").type == pa.timestamp("us", "UTC")
    assert sorted(found["at"].to_pylist(), key=str) == [instant, None]


def test_avro_columns_of_several_types_are_refused(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader, put: Put
) -> None:
    """Public failure case 44: of a union of three BigQuery would make a struct."""
    load_writer.append(rows_of(1), f"{dataset}.t")
    content = avro([{"name": "n", "type": ["null", "long", "string"]}], {"n": "x"})
    with pytest.raises(SchemaError, match="column 'n' is of several types"):
        load_writer.load_uris(put("a.avro", content), f"{dataset}.t", "avro")
    assert numbers(reader, f"{dataset}.t") == [1]


def test_our_own_files_carry_the_decimal_annotation(
    dataset: str, load_writer: FileLoadsWriter, bigquery: BigQueryResource, monkeypatch: Any
) -> None:
    """Public failure case 38: DECIMAL(38,9) is written as such, and not as bytes alone."""
    schemas: list[pq.ParquetSchema] = []
    upload = storage.Blob.upload_from_file

    def spy(self: storage.Blob, sink: Any, **options: Any) -> None:
        schemas.append(pq.ParquetFile(io.BytesIO(sink.getvalue())).schema)
        upload(self, sink, **options)

    monkeypatch.setattr(storage.Blob, "upload_from_file", spy)
    prices = pa.table({"price": pa.array([Decimal("1.5")], pa.decimal128(38, 9))})
    load_writer.append(prices, f"{dataset}.t")
    column = schemas[0].column(0)
    assert (column.logical_type.type, column.precision, column.scale) == ("DECIMAL", 38, 9)
    with bigquery.get_client() as client:
        assert client.get_table(f"{dataset}.t").schema[0].field_type == "NUMERIC"


def test_one_partition_is_loaded(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader, put: Put
) -> None:
    name, daily = f"{dataset}.t", DailyTable(f"{dataset}.t", column="day")
    layout = TableOptions(TimePartitioning("day"))
    load_writer.append([rows_of(1), rows_of(2, day="2026-08-02")], name, layout)
    uri = put("a.parquet", parquet(rows_of(5)))
    one = daily.for_keys(["2026-08-01"])
    result = load_writer.load_uris(uri, one, operation="replace")
    assert result.partitions == {"2026-08-01": 1}
    assert numbers(reader, name) == [2, 5]
    load_writer.load_uris(uri, f"{name}$20260801")
    assert numbers(reader, name) == [2, 5, 5]
    with pytest.raises(ConnectorError, match="partition"):
        load_writer.load_uris(uri, f"{name}$20260802")
    with pytest.raises(UnsupportedError, match="2 partitions"):
        load_writer.load_uris(uri, daily.for_keys(["2026-08-01", "2026-08-02"]))
    with pytest.raises(UnsupportedError, match="slice of the rows"):
        load_writer.load_uris(uri, RowSlice.by_keys(name, "text", ["a"]))  # pyright: ignore
    assert numbers(reader, name) == [2, 5, 5]


def test_json_columns_are_loaded_from_lines(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader, put: Put, bigquery: Any
) -> None:
    with bigquery.get_client() as client:
        client.query_and_wait(
            f"CREATE TABLE {dataset}.t (n INT64, day DATE, extra JSON) PARTITION BY day"
        )
    uri = put("a.json", b'{"n": 1, "day": "2026-08-01", "extra": {"a": 1}}\n')
    daily = DailyTable(f"{dataset}.t", column="day")
    result = load_writer.load_uris(uri, daily.for_keys(["2026-08-01"]), "json_lines", "replace")
    assert result.partitions == {"2026-08-01": 1}
    assert reader.read(f"{dataset}.t").to_arrow()["extra"].to_pylist() == ['{"a":1}']


def test_only_into_what_is_empty(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader, put: Put
) -> None:
    uri = put("a.parquet", parquet(rows_of(1)))
    load_writer.load_uris(uri, f"{dataset}.t", schema=SCHEMA, if_empty=True)
    with pytest.raises(RefusedError, match="has rows already, and if_empty=True"):
        load_writer.load_uris(uri, f"{dataset}.t", if_empty=True)
    assert numbers(reader, f"{dataset}.t") == [1]


def test_more_files_than_a_job_takes(
    dataset: str,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
    put: Put,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parts, "MAX_URIS", 2)
    uris = [put(f"{n}.parquet", parquet(rows_of(n))) for n in range(5)]
    for key in ("first", "first"):
        result = load_writer.load_uris(
            uris, f"{dataset}.t", schema=SCHEMA, key=f"{dataset} {key}", operation="replace"
        )
        assert result.rows == 5
    assert numbers(reader, f"{dataset}.t") == [0, 1, 2, 3, 4]


def test_what_is_no_such_file(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader, put: Put, staging: str
) -> None:
    name = f"{dataset}.t"
    load_writer.append(rows_of(1), name)
    good, text = put("good.parquet", parquet(rows_of(2))), put("text", b"n,day,text\n")
    empty = put("empty", b"")
    wrong: list[tuple[type[ConnectorError], str, Any, Any]] = [
        (SourceFileError, "gone.parquet does not exist", [good, f"{staging}/gone.parquet"], {}),
        (SourceFileError, "is no parquet file: it begins with b'n,da'", text, {}),
        (SourceFileError, "is no avro file: it begins with b'PAR1'", good, {"format": "avro"}),
        (SourceFileError, "is no parquet file: it begins with b''", empty, {}),
        (SourceFileError, "have the format that the load was given", good, {"format": "csv"}),
        (ConfigurationError, "gs://no-such-bucket does not exist", "gs://no-such-bucket/a", {}),
        (ConfigurationError, "'/tmp/x' is no file", "/tmp/x", {}),
        (ConfigurationError, "one \\* at most", f"{staging}/*/*", {}),
        (ConfigurationError, "No files", [], {}),
        (ConfigurationError, "'gs://../a' is no file", "gs://../a", {}),
        (ConfigurationError, "uris is NoneType", None, {}),
        (ConfigurationError, "uris is PosixPath", Path("/tmp/x"), {}),
        (ConfigurationError, "is no file", [[good]], {}),
        (ConfigurationError, "schema is dict: pass a pyarrow.Schema", good, {"schema": {"n": int}}),
        (ConfigurationError, "='1': .* lines", good, {"format": "csv", "skip_leading_rows": "1"}),
        (ConfigurationError, "format='orc'", good, {"format": "orc"}),
        (ConfigurationError, "operation='merge'", good, {"operation": "merge"}),
        (ConfigurationError, "lines of CSV files", good, {"skip_leading_rows": 1}),
    ]
    for kind, text, uris, options in wrong:
        with pytest.raises(kind, match=text):
            load_writer.load_uris(uris, name, **options)
    with pytest.raises(TableNotFoundError, match="pass schema="):
        load_writer.load_uris(good, f"{dataset}.other")
    assert numbers(reader, name) == [1]


# Where things are


def in_location(bigquery: BigQueryResource, dataset: str, location: str) -> str:
    name = f"{dataset}_{location.replace('-', '_')}"
    with bigquery.get_client() as client:
        made = client.create_dataset(_dataset(client, name, location))
    assert made.location == location
    return name


def _dataset(client: Any, name: str, location: str) -> Any:
    from google.cloud import bigquery as google

    dataset = google.Dataset(f"{client.project}.{name}")
    dataset.location = location
    return dataset


@pytest.mark.local_only("it makes datasets in other locations")
def test_a_resource_in_another_location_writes_nothing(
    dataset: str, load_writer: FileLoadsWriter, bigquery: BigQueryResource, staged: Any, put: Put
) -> None:
    tokyo = in_location(bigquery, dataset, "asia-northeast1")
    told = "resource is US, and .* is in asia-northeast1"
    with pytest.raises(ConfigurationError, match=told):
        load_writer.append(rows_of(1), f"{tokyo}.t")
    assert staged() == []
    with pytest.raises(ConfigurationError, match=told):
        load_writer.load_uris(put("a.parquet", parquet(rows_of(1))), f"{tokyo}.t")


@pytest.mark.local_only("it makes datasets in other locations")
def test_a_bucket_in_another_location_loads_nothing(
    dataset: str,
    fields: dict[str, Any],
    bigquery: BigQueryResource,
    staging: str,
    put: Put,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bucket, "tells_location", lambda _: True)
    tokyo = in_location(bigquery, dataset, "asia-northeast1")
    there = BigQueryResource(**fields | {"location": "asia-northeast1"})
    writer = FileLoadsWriter(bigquery=there, staging=staging)
    uri = put("a.parquet", parquet(rows_of(1)))
    told = r"is in US-\S+, and the dataset is in asia-northeast1: .* Use a bucket in asia-northeas"
    for write in (
        lambda: writer.replace(rows_of(1), f"{tokyo}.t"),
        lambda: writer.load_uris(uri, f"{tokyo}.t", schema=SCHEMA),
    ):
        with pytest.raises(ConfigurationError, match=told):
            write()
    assert BigQueryReader(bigquery=there).read(f"{tokyo}.t").to_arrow().num_rows == 0


@pytest.mark.parametrize(
    ("dataset", "bucket_", "apart"),
    [
        ("US", "EUROPE-WEST1", False),
        ("EU", "EUROPE-WEST1", False),
        ("EU", "eur4", False),
        ("EU", "US-EAST1", True),
        ("EU", "US", True),
        ("europe-west1", "EUROPE-WEST1", False),
        ("europe-west1", "EUROPE-WEST4", True),
        ("europe-west1", "EU", False),
        ("us-central1", "NAM4", False),
    ],
)
def test_only_what_is_certain_is_refused(dataset: str, bucket_: str, apart: bool) -> None:
    assert bucket.apart(dataset, bucket_) is apart


def test_what_bigquery_says_of_locations_and_files() -> None:
    texts: list[tuple[str, type[ConnectorError], str]] = [
        (
            "Cannot read and write in different locations: source: US, destination: EU",
            ConfigurationError,
            "Use a bucket in EU",
        ),
        ("Not found: URI gs://b/gone.avro", SourceFileError, "gs://b/gone.avro does not exist"),
        (
            "Error while reading data, error message: Input file is not in Parquet format.",
            SourceFileError,
            "have the format",
        ),
        ("Something else", RefusedError, "Something else"),
    ]
    for text, kind, told in texts:
        error = load_errors.load_error(explain(Exception(text), "Load into p.d.t (job j)"))
        assert type(error) is kind
        assert told in str(error)
        assert "p.d.t" in str(error)


# Other ways to Cloud Storage


@pytest.fixture
def storage_proxy(fields: dict[str, Any]) -> Iterator[HttpProxy]:
    with HttpProxy(fields["cloud_storage_endpoint"]) as proxy:
        yield proxy


def through(proxy: HttpProxy, fields: dict[str, Any], staging: str) -> FileLoadsWriter:
    connection = BigQueryResource(**fields | {"cloud_storage_endpoint": proxy.url})
    bucket._locations.clear()
    return FileLoadsWriter(bigquery=connection, staging=staging)


@pytest.mark.local_only("a proxy stands between, which has no certificate of Google's")
def test_a_prefix_that_cannot_be_written(
    dataset: str,
    fields: dict[str, Any],
    staging: str,
    reader: BigQueryReader,
    storage_proxy: HttpProxy,
) -> None:
    """It is told with the file's name, and whoever may not see the bucket's location goes on."""
    writer = through(storage_proxy, fields, staging)
    denied = Verdict(arrives=False, status=403, reason="forbidden", text="no objects.create here")
    looked: list[str] = []

    def deny_bucket(call: Call) -> Verdict:
        is_bucket = call.method == "GET" and "/o" not in call.path.split("?")[0].partition("/b/")[2]
        looked.extend([call.path] if is_bucket else [])
        return denied if is_bucket else PASSED

    storage_proxy.judges_buckets, storage_proxy.decide = True, deny_bucket
    writer.append(rows_of(1), f"{dataset}.t")
    assert looked
    storage_proxy.decide = lambda call: denied if call.changes else PASSED
    with pytest.raises(AccessDeniedError, match=rf"Staging file {staging}.*no objects.create here"):
        writer.replace(rows_of(2), f"{dataset}.t")
    assert numbers(reader, f"{dataset}.t") == [1]


@pytest.mark.local_only("the stock resource finds the local Cloud Storage by a variable")
def test_the_stock_resource_of_cloud_storage(
    dataset: str,
    bigquery: BigQueryResource,
    fields: dict[str, Any],
    staging: str,
    reader: BigQueryReader,
    put: Put,
    monkeypatch: pytest.MonkeyPatch,
    storage_proxy: HttpProxy,
) -> None:
    gcs = dagster_gcp.GCSResource(project=fields["project"])
    writer = FileLoadsWriter(bigquery=bigquery, staging=staging, gcs=gcs)
    monkeypatch.setattr("google.auth.default", lambda *_, **__: (_anonymous(), "p"))
    with pytest.raises(ConfigurationError, match="bigquery is an emulator and gcs is not"):
        writer.append(rows_of(1), f"{dataset}.t")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", storage_proxy.url)
    writer.append(rows_of(1), f"{dataset}.t")
    writer.load_uris(put("a.parquet", parquet(rows_of(2))), f"{dataset}.t")
    assert len([call for call in storage_proxy.calls if call.method == "POST"]) >= 1
    assert numbers(reader, f"{dataset}.t") == [1, 2]


def _anonymous() -> Any:
    from google.auth.credentials import AnonymousCredentials

    return AnonymousCredentials()
