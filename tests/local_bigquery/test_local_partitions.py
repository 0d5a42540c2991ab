"""`table$20260801` as a destination and as a source."""

import datetime

import pytest
from google.api_core import exceptions
from google.cloud import bigquery

DAY1, DAY2 = "20260801", "20260802"
WHEN = {DAY1: "2026-08-01", DAY2: "2026-08-02"}
COLUMNS = "id INT64, day DATE"


@pytest.fixture
def table(lab):
    """Two days of two rows each."""
    name = lab.make(COLUMNS, "PARTITION BY day")
    lab.sql(
        f"INSERT INTO `{name}` VALUES (1, DATE '2026-08-01'), (2, DATE '2026-08-01'), "
        "(3, DATE '2026-08-02'), (4, DATE '2026-08-02')"
    )
    return name


def by_load(lab, destination, rows, **options):
    lab.load(destination, rows, **options)


def by_query(lab, destination, rows, **options):
    values = ", ".join(f"({row['id']}, DATE '{row['day']}')" for row in rows)
    text = f"SELECT * FROM UNNEST(ARRAY<STRUCT<id INT64, day DATE>>[{values}])"
    config = bigquery.QueryJobConfig(destination=destination, **options)
    lab.client.query(text, job_config=config).result()


def by_copy(lab, destination, rows, **options):
    staging = lab.make(COLUMNS, "PARTITION BY day" if len({row["day"] for row in rows}) else "")
    lab.load(staging, rows)
    config = bigquery.CopyJobConfig(**options)
    lab.client.copy_table(staging, destination, job_config=config).result()


METHODS = pytest.mark.parametrize("put", [by_load, by_query, by_copy])


def ids(lab, table):
    return [id for (id,) in lab.rows(table, "id")]


def no_ghosts(lab):
    return not [t.table_id for t in lab.client.list_tables(lab.dataset) if "$" in t.table_id]


@METHODS
def test_a_job_replaces_that_partition_only(lab, table, put):
    rows = [{"id": 7, "day": WHEN[DAY1]}, {"id": 8, "day": WHEN[DAY1]}]
    put(lab, f"{table}${DAY1}", rows, write_disposition="WRITE_TRUNCATE")
    assert ids(lab, table) == [3, 4, 7, 8]
    put(
        lab,
        f"{table}${DAY2}",
        rows[:0] or [{"id": 9, "day": WHEN[DAY2]}],
        write_disposition="WRITE_TRUNCATE_DATA",
    )
    assert ids(lab, table) == [7, 8, 9]
    put(lab, f"{table}${DAY1}", [{"id": 10, "day": WHEN[DAY1]}], write_disposition="WRITE_APPEND")
    assert ids(lab, table) == [10, 7, 8, 9]
    with pytest.raises(exceptions.Conflict):
        put(
            lab, f"{table}${DAY1}", [{"id": 11, "day": WHEN[DAY1]}], write_disposition="WRITE_EMPTY"
        )
    put(
        lab, f"{table}$20260803", [{"id": 12, "day": "2026-08-03"}], write_disposition="WRITE_EMPTY"
    )
    assert len(ids(lab, table)) == 5
    partitioning = lab.client.get_table(table).time_partitioning
    assert (partitioning.type_, partitioning.field) == ("DAY", "day")
    assert no_ghosts(lab)


@METHODS
@pytest.mark.parametrize("disposition", ["WRITE_TRUNCATE", "WRITE_APPEND"])
def test_rows_of_other_partitions_are_refused(lab, table, put, disposition):
    rows = [{"id": 7, "day": WHEN[DAY1]}, {"id": 8, "day": WHEN[DAY2]}]
    with pytest.raises(exceptions.BadRequest, match="belong to different partitions"):
        put(lab, f"{table}${DAY1}", rows, write_disposition=disposition)
    assert ids(lab, table) == [1, 2, 3, 4]
    assert no_ghosts(lab)


def test_a_query_that_reads_the_partition_it_replaces(lab, table):
    config = bigquery.QueryJobConfig(
        destination=f"{table}${DAY1}", write_disposition="WRITE_TRUNCATE"
    )
    text = f"SELECT id + 10 AS id, day FROM `{table}` WHERE day = '2026-08-01'"
    found = lab.client.query(text, job_config=config).result()
    assert sorted(row.id for row in found) == [11, 12]
    assert ids(lab, table) == [11, 12, 3, 4]


def test_a_partition_as_a_source(lab, table):
    assert ids(lab, f"{table}${DAY1}") == [1, 2]
    target = lab.name()
    lab.client.copy_table(f"{table}${DAY2}", target).result()
    assert ids(lab, target) == [3, 4]
    # Two partitions of one table, from one of them into the other: refused, they are other days.
    with pytest.raises(exceptions.BadRequest, match="belong to different partitions"):
        lab.client.copy_table(f"{table}${DAY2}", f"{table}${DAY1}").result()
    assert ids(lab, table) == [1, 2, 3, 4]


def test_list_get_and_delete(lab, table):
    assert lab.client.get_table(f"{table}${DAY1}").num_rows == 2
    lab.sql(f"INSERT INTO `{table}` (id) VALUES (5)")
    assert sorted(lab.client.list_partitions(table)) == [DAY1, DAY2, "__NULL__"]
    dataset, name = table.split(".")[1:]
    listed = lab.sql(
        f"SELECT partition_id, total_rows FROM `{dataset}.INFORMATION_SCHEMA.PARTITIONS` "
        f"WHERE table_name = '{name}' ORDER BY 1"
    )
    assert listed == [(DAY1, 2), (DAY2, 2), ("__NULL__", 1)]
    lab.client.delete_table(f"{table}${DAY1}")
    assert ids(lab, table) == [3, 4, 5]
    lab.client.delete_table(f"{table}$__NULL__")
    assert ids(lab, table) == [3, 4]
    assert lab.client.get_table(table).num_rows == 2


UNITS = [
    ("PARTITION BY TIMESTAMP_TRUNC(at, HOUR)", "2026080113", "2026-08-01T13:20:00Z"),
    ("PARTITION BY TIMESTAMP_TRUNC(at, MONTH)", "202608", "2026-08-01T13:20:00Z"),
    ("PARTITION BY TIMESTAMP_TRUNC(at, YEAR)", "2026", "2026-08-01T13:20:00Z"),
    ("PARTITION BY RANGE_BUCKET(number, GENERATE_ARRAY(-100, 100, 10))", "-20", -11),
]


@pytest.mark.parametrize(("clause", "id", "value"), UNITS)
def test_every_unit(lab, clause, id, value):
    table = lab.make("id INT64, at TIMESTAMP, number INT64", clause)
    column, other = ("at", "2027-09-02T01:00:00Z") if "at," in clause else ("number", 35)
    lab.load(table, [{"id": 1, column: value}, {"id": 2, column: other}, {"id": 3}])
    into = {"write_disposition": "WRITE_TRUNCATE"}
    lab.load(f"{table}${id}", [{"id": 4, column: value}], **into)
    assert ids(lab, table) == [2, 3, 4]
    lab.load(f"{table}$__NULL__", [{"id": 5}], **into)
    assert ids(lab, table) == [2, 4, 5]
    for bad, rows in (
        (id, [{"id": 6}]),
        (id, [{"id": 6, column: other}]),
        ("__NULL__", [{"id": 6, column: value}]),
    ):
        with pytest.raises(exceptions.BadRequest, match="belong to different partitions"):
            lab.load(f"{table}${bad}", rows, **into)
    for bad in ("nonsense", "20269999", f"{id}0", ""):
        with pytest.raises(exceptions.GoogleAPICallError):
            lab.load(f"{table}${bad}", [{"id": 6, column: value}], **into)
    assert ids(lab, table) == [2, 4, 5]
    listed = set(lab.client.list_partitions(table))
    assert {id, "__NULL__"} < listed
    assert len(listed) == 3
    assert no_ghosts(lab)


@pytest.mark.parametrize("made_by", ["rest", "ddl"])
def test_ingestion_time(lab, made_by):
    if made_by == "ddl":
        table = lab.make("id INT64", "PARTITION BY _PARTITIONDATE")
    else:
        table = lab.name()
        made = bigquery.Table(table, [bigquery.SchemaField("id", "INT64", "REQUIRED")])
        made.time_partitioning = bigquery.TimePartitioning()
        lab.client.create_table(made)
        assert [field.name for field in lab.client.get_table(table).schema] == ["id"]
    into = {"write_disposition": "WRITE_TRUNCATE"}
    lab.load(f"{table}${DAY1}", [{"id": 1}, {"id": 2}], **into)
    lab.load(f"{table}${DAY2}", [{"id": 3}], **into)
    lab.load(table, [{"id": 4}])
    lab.load(f"{table}${DAY1}", [{"id": 5}], **into)
    today = datetime.datetime.now(datetime.UTC).date()
    found = lab.sql(f"SELECT id, DATE(_PARTITIONTIME) FROM `{table}` ORDER BY id")
    days = {3: datetime.date(2026, 8, 2), 4: today, 5: datetime.date(2026, 8, 1)}
    assert dict(found) == days
    assert ids(lab, f"{table}${DAY1}") == [5]
    assert lab.sql(f"SELECT * FROM `{table}` WHERE _PARTITIONDATE = '2026-08-02'") == [(3,)]
    assert {DAY1, DAY2} < set(lab.client.list_partitions(table))
    query = bigquery.QueryJobConfig(destination=f"{table}${DAY2}", **into)
    lab.client.query("SELECT 6 AS id", job_config=query).result()
    assert ids(lab, table) == [4, 5, 6]
    copied = lab.name()
    lab.client.copy_table(table, copied).result()
    assert ids(lab, f"{copied}${DAY1}") == [5]
    lab.client.copy_table(
        f"{table}${DAY1}", f"{copied}${DAY2}", job_config=bigquery.CopyJobConfig(**into)
    ).result()
    assert ids(lab, f"{copied}${DAY2}") == [5]
    # The whole table replaced: still partitioned.
    lab.load(table, [{"id": 8}], **into, schema=[bigquery.SchemaField("id", "INT64")])
    lab.load(f"{table}${DAY1}", [{"id": 9}], **into)
    assert ids(lab, table) == [8, 9]
    with pytest.raises(exceptions.BadRequest, match="Invalid partition id"):
        lab.load(f"{table}$__NULL__", [{"id": 9}], **into)
    assert no_ghosts(lab)


@pytest.mark.parametrize("field", ["day", None])
def test_a_destination_that_does_not_exist_yet(lab, field):
    table = lab.name()
    schema = [bigquery.SchemaField("id", "INT64", "REQUIRED"), bigquery.SchemaField("day", "DATE")]
    options = {
        "schema": schema,
        "time_partitioning": bigquery.TimePartitioning(field=field),
        "write_disposition": "WRITE_TRUNCATE",
    }
    if field:
        with pytest.raises(exceptions.BadRequest, match="belong to different partitions"):
            lab.load(f"{table}${DAY1}", [{"id": 1, "day": WHEN[DAY2]}], **options)
    with pytest.raises(exceptions.BadRequest, match="not partitioned"):
        lab.load(f"{table}${DAY1}", [{"id": 1, "day": WHEN[DAY1]}], schema=schema)
    with pytest.raises(exceptions.NotFound):
        lab.client.get_table(table)
    lab.load(f"{table}${DAY1}", [{"id": 1, "day": WHEN[DAY1]}], **options)
    lab.load(f"{table}${DAY2}", [{"id": 2, "day": WHEN[DAY2]}], **options)
    assert ids(lab, table) == [1, 2]
    assert ids(lab, f"{table}${DAY2}") == [2]
    made = lab.client.get_table(table)
    assert made.time_partitioning.field == field
    assert [each.mode for each in made.schema] == ["REQUIRED", "NULLABLE"]
    assert no_ghosts(lab)


def test_a_decorator_on_a_plain_table_is_refused(lab):
    table = lab.make(COLUMNS)
    for put in (by_load, by_query, by_copy):
        with pytest.raises(exceptions.BadRequest, match="not partitioned"):
            put(lab, f"{table}${DAY1}", [{"id": 1, "day": WHEN[DAY1]}])
    with pytest.raises(exceptions.BadRequest, match="not partitioned"):
        lab.client.delete_table(f"{table}${DAY1}")
    assert no_ghosts(lab)


def test_schema_update_while_a_partition_is_replaced(lab, table):
    lab.load(
        f"{table}${DAY1}",
        [{"id": 7, "day": WHEN[DAY1], "more": "x"}],
        write_disposition="WRITE_TRUNCATE",
        schema_update_options=["ALLOW_FIELD_ADDITION"],
        schema=[
            bigquery.SchemaField("id", "INT64"),
            bigquery.SchemaField("day", "DATE"),
            bigquery.SchemaField("more", "STRING"),
        ],
    )
    assert lab.rows(table, "id, more") == [(3, None), (4, None), (7, "x")]
    with pytest.raises(exceptions.BadRequest, match="Cannot add fields"):
        lab.load(
            f"{table}${DAY1}",
            [{"id": 8, "day": WHEN[DAY1], "again": "x"}],
            write_disposition="WRITE_TRUNCATE",
        )
    assert ids(lab, table) == [3, 4, 7]


def test_a_replaced_partition_appears_at_once(lab, table, together):
    seen = set()

    def look():
        for _ in range(12):
            seen.add(tuple(ids(lab, f"{table}${DAY1}")))

    def replace():
        for start in (10, 20, 30):
            rows = [{"id": start + index, "day": WHEN[DAY1]} for index in range(2)]
            by_load(lab, f"{table}${DAY1}", rows, write_disposition="WRITE_TRUNCATE")

    assert together([look, replace]) == [None, None]
    assert seen <= {(1, 2), (10, 11), (20, 21), (30, 31)}
    assert ids(lab, table) == [3, 30, 31, 4]
