"""What WRITE_TRUNCATE and WRITE_TRUNCATE_DATA keep, and what they replace."""

import pytest
from google.api_core import exceptions
from google.cloud import bigquery

COLUMNS = "id INT64 NOT NULL, name STRING, day DATE, PRIMARY KEY (id) NOT ENFORCED"
LAYOUT = "PARTITION BY day CLUSTER BY name OPTIONS (description = 'kept')"
NEW = [
    bigquery.SchemaField("id", "STRING"),
    bigquery.SchemaField("day", "DATE", "REQUIRED", description="new"),
    bigquery.SchemaField("name", "STRING"),
    bigquery.SchemaField("more", "INT64"),
]


@pytest.fixture
def table(lab):
    name = lab.make(COLUMNS, LAYOUT)
    lab.load(name, [{"id": 1, "name": "a", "day": "2026-08-01"}])
    return name


def by_load(lab, table, rows, **options):
    lab.load(table, rows, **options)


def by_query(lab, table, rows, **options):
    values = ", ".join(f"({row['id']}, '{row['name']}', DATE '{row['day']}')" for row in rows)
    kind = "ARRAY<STRUCT<id INT64, name STRING, day DATE>>"
    config = bigquery.QueryJobConfig(destination=table, **options)
    lab.client.query(f"SELECT * FROM UNNEST({kind}[{values}])", job_config=config).result()


def by_copy(lab, table, rows, **options):
    staging = lab.make("id INT64, name STRING, day DATE", "PARTITION BY day CLUSTER BY name")
    lab.load(staging, rows)
    lab.client.copy_table(staging, table, job_config=bigquery.CopyJobConfig(**options)).result()


def keys(table):
    constraints = table.table_constraints
    return constraints and constraints.primary_key and constraints.primary_key.columns


def shape(table):
    return [(field.name, field.field_type, field.mode) for field in table.schema]


@pytest.mark.parametrize("put", [by_load, by_query, by_copy])
def test_write_truncate_data_keeps_schema_modes_and_keys(lab, table, put):
    before = lab.client.get_table(table)
    rows = [{"id": 2, "name": "b", "day": "2026-08-02"}]
    put(lab, table, rows, write_disposition="WRITE_TRUNCATE_DATA")
    after = lab.client.get_table(table)
    assert lab.rows(table, "id, name") == [(2, "b")]
    assert shape(after) == shape(before)
    assert shape(after)[0] == ("id", "INTEGER", "REQUIRED")
    assert keys(after) == ["id"]
    assert after.time_partitioning == before.time_partitioning
    assert after.clustering_fields == ["name"]
    assert after.description == "kept"
    # REQUIRED is still kept in fact: nothing changes when a row breaks it.
    with pytest.raises(exceptions.BadRequest):
        lab.load(table, [{"name": "no id"}], write_disposition="WRITE_TRUNCATE_DATA")
    assert lab.rows(table, "id, name") == [(2, "b")]


def test_write_truncate_data_takes_missing_and_new_columns(lab, table):
    lab.load(table, [{"id": 3}], write_disposition="WRITE_TRUNCATE_DATA")
    assert lab.rows(table) == [(3, None, None)]
    with pytest.raises(exceptions.BadRequest, match="Cannot add fields"):
        lab.load(table, [{"id": 4, "more": "x"}], write_disposition="WRITE_TRUNCATE_DATA")
    lab.load(
        table,
        [{"id": 4, "more": "x"}],
        write_disposition="WRITE_TRUNCATE_DATA",
        schema_update_options=["ALLOW_FIELD_ADDITION"],
    )
    assert lab.rows(table) == [(4, None, None, "x")]
    assert keys(lab.client.get_table(table)) == ["id"]


def test_write_truncate_replaces_schema_and_drops_keys(lab, table):
    rows = [{"id": "x", "name": "n", "day": "2026-08-02", "more": 1}]
    lab.load(table, rows, schema=NEW, write_disposition="WRITE_TRUNCATE")
    after = lab.client.get_table(table)
    assert shape(after) == [
        ("id", "STRING", "NULLABLE"),
        ("day", "DATE", "REQUIRED"),
        ("name", "STRING", "NULLABLE"),
        ("more", "INTEGER", "NULLABLE"),
    ]
    assert after.schema[1].description == "new"
    assert keys(after) is None
    assert (after.time_partitioning.field, after.clustering_fields) == ("day", ["name"])
    assert after.description == "kept"
    assert lab.rows(table, "id, more") == [("x", 1)]


def test_write_truncate_by_query_makes_columns_nullable(lab, table):
    rows = [{"id": 2, "name": "b", "day": "2026-08-02"}]
    by_query(lab, table, rows, write_disposition="WRITE_TRUNCATE")
    after = lab.client.get_table(table)
    assert {mode for _, _, mode in shape(after)} == {"NULLABLE"}
    assert keys(after) is None
    assert after.time_partitioning.field == "day"


def test_write_truncate_must_fit_the_partitioning(lab, table):
    before = lab.rows(table)
    schema = [bigquery.SchemaField("id", "INT64")]
    with pytest.raises(exceptions.BadRequest, match="partitioned"):
        lab.load(table, [{"id": 1}], schema=schema, write_disposition="WRITE_TRUNCATE")
    for disposition in ("WRITE_TRUNCATE", "WRITE_TRUNCATE_DATA", "WRITE_APPEND"):
        with pytest.raises(exceptions.BadRequest, match="Incompatible table partitioning"):
            lab.load(
                table,
                [{"id": 1, "name": "x", "day": "2026-08-01"}],
                write_disposition=disposition,
                time_partitioning=bigquery.TimePartitioning(type_="MONTH", field="day"),
            )
    assert lab.rows(table) == before
    assert lab.client.get_table(table).time_partitioning.type_ == "DAY"
    lab.load(
        table,
        [{"id": 2, "name": "x", "day": "2026-08-01"}],
        write_disposition="WRITE_TRUNCATE",
        time_partitioning=bigquery.TimePartitioning(type_="DAY", field="day"),
    )
    assert lab.rows(table, "id") == [(2,)]


def test_a_failed_replacement_changes_nothing(lab, table):
    for disposition in ("WRITE_TRUNCATE", "WRITE_TRUNCATE_DATA"):
        config = bigquery.QueryJobConfig(destination=table, write_disposition=disposition)
        text = "SELECT 1 AS id, 'x' AS name, IF(RAND() >= 0, ERROR('no'), DATE '2026-08-01') AS day"
        with pytest.raises(exceptions.GoogleAPICallError):
            lab.client.query(text, job_config=config).result()
    assert lab.rows(table, "id, name") == [(1, "a")]
    assert keys(lab.client.get_table(table)) == ["id"]


def test_a_query_may_read_what_it_replaces(lab, table):
    for disposition in ("WRITE_TRUNCATE_DATA", "WRITE_TRUNCATE"):
        config = bigquery.QueryJobConfig(destination=table, write_disposition=disposition)
        text = f"SELECT id + 10 AS id, name, day FROM `{table}`"
        lab.client.query(text, job_config=config).result()
    assert lab.rows(table, "id") == [(21,)]


def test_write_empty_fills_an_empty_table_and_keeps_it(lab):
    table = lab.make(COLUMNS, LAYOUT)
    rows = [{"id": 1, "name": "a", "day": "2026-08-01"}]
    lab.load(table, rows, write_disposition="WRITE_EMPTY")
    assert keys(lab.client.get_table(table)) == ["id"]
    with pytest.raises(exceptions.Conflict):
        lab.load(table, rows, write_disposition="WRITE_EMPTY")
    assert lab.rows(table, "id") == [(1,)]


def test_a_schemaless_table_takes_the_schema_of_its_first_job(lab):
    table = lab.name()
    made = bigquery.Table(table)
    made.description = "kept"
    lab.client.create_table(made)
    lab.load(table, [{"day": "2026-08-01", "name": "a"}], schema=NEW[1:3])
    after = lab.client.get_table(table)
    assert shape(after) == [("day", "DATE", "REQUIRED"), ("name", "STRING", "NULLABLE")]
    assert after.description == "kept"


def test_a_copy_brings_modes_keys_and_layout(lab, table):
    target = lab.name()
    lab.client.copy_table(table, target).result()
    before, after = lab.client.get_table(table), lab.client.get_table(target)
    assert shape(after) == shape(before)
    assert keys(after) == ["id"]
    assert after.time_partitioning == before.time_partitioning
    assert after.clustering_fields == before.clustering_fields
    plain = lab.make("id INT64, name STRING, day DATE")
    config = bigquery.CopyJobConfig(write_disposition="WRITE_TRUNCATE")
    with pytest.raises(exceptions.BadRequest, match="Incompatible table partitioning"):
        lab.client.copy_table(plain, target, job_config=config).result()
    assert lab.rows(target, "id") == [(1,)]


def test_a_copy_of_several_tables_brings_modes_keys_and_layout(lab, table):
    other, target = lab.make(COLUMNS, LAYOUT), lab.make(COLUMNS, LAYOUT)
    lab.load(other, [{"id": 2, "name": "b", "day": "2026-08-02"}])
    lab.load(target, [{"id": 9, "name": "old", "day": "2026-08-03"}])
    before = lab.client.get_table(target)
    config = bigquery.CopyJobConfig(write_disposition="WRITE_TRUNCATE")
    lab.client.copy_table([table, other], target, job_config=config).result()
    after = lab.client.get_table(target)
    assert lab.rows(target, "id") == [(1,), (2,)]
    assert (shape(after), keys(after)) == (shape(before), ["id"])
    assert after.time_partitioning == before.time_partitioning
    assert after.clustering_fields == before.clustering_fields


def test_changes_after_the_data_were_replaced(lab, make_rows):
    """WRITE_TRUNCATE_DATA leaves a CDC table able to go on, and WRITE_TRUNCATE does not."""
    table = lab.make("id INT64, name STRING, PRIMARY KEY (id) NOT ENFORCED")
    rows = make_rows(
        id="int64", name="string", _CHANGE_TYPE="string", _CHANGE_SEQUENCE_NUMBER="string"
    )
    change = {"id": 1, "_CHANGE_TYPE": "UPSERT", "_CHANGE_SEQUENCE_NUMBER": "5"}
    connection = lab.connect(lab.default_stream(table), rows)
    assert connection.send([change | {"name": "a"}]).error.code == 0
    lab.load(table, [{"id": 2, "name": "loaded"}], write_disposition="WRITE_TRUNCATE_DATA")
    assert lab.rows(table) == [(2, "loaded")]
    change["_CHANGE_SEQUENCE_NUMBER"] = "1"
    assert connection.send([change | {"name": "b"}]).error.code == 0
    assert lab.rows(table) == [(1, "b"), (2, "loaded")]
    lab.load(table, [{"id": 3, "name": "new"}], write_disposition="WRITE_TRUNCATE")
    answer = connection.send([change | {"name": "c"}])
    assert "primary key" in answer.error.message


ADDING = {
    "write_disposition": "WRITE_APPEND",
    "schema_update_options": ["ALLOW_FIELD_ADDITION"],
}


def test_a_failed_append_adds_no_columns(lab):
    table = lab.make("id INT64 NOT NULL")
    before = lab.client.get_table(table)
    config = bigquery.QueryJobConfig(destination=table, **ADDING)
    with pytest.raises(exceptions.BadRequest):
        lab.client.query("SELECT CAST(NULL AS INT64) AS id, 1 AS z", config).result()
    with pytest.raises(exceptions.BadRequest):
        lab.load(table, [{"z": 1}], autodetect=True, **ADDING)
    after = lab.client.get_table(table)
    assert (shape(after), after.etag) == (shape(before), before.etag)
    # And one that goes through adds them, and keeps modes, keys and rows.
    lab.client.query("SELECT 1 AS id, 1 AS z", config).result()
    lab.load(table, [{"id": 2, "y": "b"}], autodetect=True, **ADDING)
    after = lab.client.get_table(table)
    assert shape(after)[0] == ("id", "INTEGER", "REQUIRED")
    assert after.etag != before.etag
    assert lab.rows(table, "id, z, y") == [(1, 1, None), (2, None, "b")]


def test_an_append_that_adds_columns_may_read_its_table(lab, table):
    config = bigquery.QueryJobConfig(destination=table, **ADDING)
    text = f"SELECT id + 1 AS id, name, day, 'x' AS more FROM `{table}`"
    lab.client.query(text, config).result()
    assert lab.rows(table, "id, more") == [(1, None), (2, "x")]
    assert keys(lab.client.get_table(table)) == ["id"]


def test_a_session_adds_no_columns(lab, table):
    """Refused: its own transaction may hold the table."""
    config = bigquery.QueryJobConfig(destination=table, create_session=True, **ADDING)
    with pytest.raises(exceptions.GoogleAPICallError, match="In a session"):
        lab.client.query("SELECT 2 AS id, 'x' AS more", config).result()
    assert "more" not in [name for name, _, _ in shape(lab.client.get_table(table))]
