"""Etags, job ids, max_staleness."""

import uuid

import pytest
from google.api_core import exceptions
from google.cloud import bigquery

FIELDS = [bigquery.SchemaField("id", "INT64")]


def read_increment_patch(client, name, rounds):
    """Add 1 to the number in a table's description, `rounds` times. Returns how often it lost."""
    lost = 0
    while rounds:
        table = client.get_table(name)
        table.description = str(int(table.description) + 1)
        try:
            client.update_table(table, ["description"])  # sends If-Match
            rounds -= 1
        except exceptions.PreconditionFailed:
            lost += 1
    return lost


def test_an_etag_is_a_compare_and_set(lab, make_lab, together):
    name = lab.name()
    table = bigquery.Table(name, FIELDS)
    table.description = "0"
    lab.client.create_table(table)
    labs = [make_lab(lab.environment) for _ in range(4)]
    results = together(
        [lambda each=each: read_increment_patch(each.client, name, 6) for each in labs]
    )
    for each in labs:
        each.close()
    assert all(isinstance(lost, int) for lost in results), results
    assert lab.client.get_table(name).description == "24"


def test_of_writers_with_one_etag_one_wins(lab, together):
    name = lab.name()
    lab.client.create_table(bigquery.Table(name, FIELDS))
    for round in range(3):
        old = lab.client.get_table(name)

        def patch(number, old=old, round=round):
            mine = bigquery.Table.from_api_repr(old.to_api_repr())
            mine.description = f"{round}.{number}"
            return lab.client.update_table(mine, ["description"]).description

        results = together([lambda number=number: patch(number) for number in range(8)])
        won = [each for each in results if isinstance(each, str)]
        lost = [each for each in results if isinstance(each, exceptions.PreconditionFailed)]
        assert (len(won), len(lost)) == (1, 7), results
        assert lab.client.get_table(name).description == won[0]


def test_every_table_has_a_steady_etag(lab):
    """However it was made."""
    loaded, queried, made = lab.name(), lab.name(), lab.make("id INT64")
    lab.load(loaded, [{"id": 1}])
    lab.client.query("SELECT 1 AS id", bigquery.QueryJobConfig(destination=queried)).result()
    for name in (loaded, queried, made):
        first, second = lab.client.get_table(name), lab.client.get_table(name)
        assert first.etag
        assert (first.etag, first.created) == (second.etag, second.created)
        second.description = "x"
        third = lab.client.update_table(second, ["description"])
        assert third.etag != first.etag
        with pytest.raises(exceptions.PreconditionFailed):
            lab.client.update_table(first, ["description"])


def test_a_schema_change_with_an_old_etag_changes_nothing(lab):
    name = lab.make("id INT64")
    old, new = lab.client.get_table(name), lab.client.get_table(name)
    new.description = "x"
    lab.client.update_table(new, ["description"])
    old.schema = [*old.schema, bigquery.SchemaField("more", "STRING")]
    with pytest.raises(exceptions.PreconditionFailed):
        lab.client.update_table(old, ["schema"])
    assert [field.name for field in lab.client.get_table(name).schema] == ["id"]


@pytest.mark.parametrize("fields", [FIELDS, []])
def test_of_creators_one_wins(lab, together, fields):
    name = lab.name()

    def create(number):
        table = bigquery.Table(name, fields)
        table.description = str(number)
        return lab.client.create_table(table).description

    results = together([lambda number=number: create(number) for number in range(8)])
    won = [each for each in results if isinstance(each, str)]
    assert len(won) == 1
    assert sum(isinstance(each, exceptions.Conflict) for each in results) == 7, results
    assert lab.client.get_table(name).description == won[0]


def test_of_creators_of_a_dataset_one_wins(lab, together):
    name = f"d_{uuid.uuid4().hex}"
    results = together([lambda: lab.client.create_dataset(name).dataset_id] * 4)
    assert sorted(isinstance(each, exceptions.Conflict) for each in results) == [False] + [True] * 3


@pytest.mark.parametrize("kind", ["load", "query", "copy"])
def test_a_job_id_is_taken_once(lab, kind):
    table, source, job_id = lab.name(), lab.make("id INT64"), f"j_{uuid.uuid4().hex}"
    lab.sql(f"INSERT INTO `{source}` VALUES (1)")

    def run():
        if kind == "load":
            return lab.client.load_table_from_json([{"id": 1}], table, job_id=job_id)
        if kind == "copy":
            config = bigquery.CopyJobConfig(write_disposition="WRITE_APPEND")
            return lab.client.copy_table(source, table, job_id=job_id, job_config=config)
        config = bigquery.QueryJobConfig(destination=table, write_disposition="WRITE_APPEND")
        # Without the client's own retry, which gives up the id.
        return lab.client.query("SELECT 1 AS id", config, job_id=job_id, job_retry=None)

    run().result()
    with pytest.raises(exceptions.Conflict, match=job_id):
        run().result()
    assert lab.rows(table) == [(1,)]
    job = lab.client.get_job(job_id, location="US")
    assert (job.state, job.error_result) == ("DONE", None)


def test_of_callers_of_one_job_id_one_wins(lab, together):
    table, job_id = lab.name(), f"j_{uuid.uuid4().hex}"

    def run():
        return lab.client.load_table_from_json([{"id": 1}], table, job_id=job_id).result()

    results = together([run] * 8)
    assert sum(isinstance(each, exceptions.Conflict) for each in results) == 7, results
    assert lab.rows(table) == [(1,)]


def staleness(lab, table):
    _, dataset, name = table.split(".")
    return lab.sql(
        f"SELECT option_value FROM `{dataset}.INFORMATION_SCHEMA.TABLE_OPTIONS` "
        f"WHERE table_name = '{name}' AND option_name = 'max_staleness'"
    )


def test_max_staleness_is_visible(lab):
    by_ddl = lab.make("id INT64", "OPTIONS (max_staleness = INTERVAL 10 MINUTE)")
    assert staleness(lab, by_ddl) == [("0-0 0 0:10:0",)]
    lab.sql(f"ALTER TABLE `{by_ddl}` SET OPTIONS (max_staleness = INTERVAL 2 HOUR)")
    assert staleness(lab, by_ddl) == [("0-0 0 2:0:0",)]
    spelled = "INTERVAL '0-0 0 0:15:0' YEAR TO SECOND"
    lab.sql(f"ALTER TABLE `{by_ddl}` SET OPTIONS (max_staleness = {spelled})")
    assert staleness(lab, by_ddl) == [("0-0 0 0:15:0",)]
    lab.sql(f"ALTER TABLE `{by_ddl}` SET OPTIONS (max_staleness = NULL)")
    assert staleness(lab, by_ddl) == []
    by_rest = lab.name()
    resource = bigquery.Table(by_rest, FIELDS).to_api_repr() | {"maxStaleness": "0-0 0 1:0:0"}
    lab.client.create_table(bigquery.Table.from_api_repr(resource))
    assert staleness(lab, by_rest) == [("0-0 0 1:0:0",)]
    assert lab.client.get_table(by_rest).to_api_repr()["maxStaleness"] == "0-0 0 1:0:0"
    assert staleness(lab, lab.make("id INT64")) == []


def test_the_number_of_rows_is_true(lab):
    table = lab.make("id INT64")
    lab.sql(f"INSERT INTO `{table}` VALUES (1), (2), (3)")
    lab.sql(f"DELETE FROM `{table}` WHERE id > 1")
    assert lab.client.get_table(table).num_rows == 1


def test_no_dataset_is_there_that_nobody_made(lab):
    assert "local" not in {each.dataset_id for each in lab.client.list_datasets()}


@pytest.mark.parametrize(
    "change",
    [
        "ADD COLUMN more INT64",
        "DROP COLUMN name",
        "RENAME COLUMN name TO other",
        "ALTER COLUMN id DROP NOT NULL",
        "ALTER COLUMN name SET OPTIONS (description = 'x')",
        "ADD PRIMARY KEY (id) NOT ENFORCED",
        "SET OPTIONS (description = 'x')",
    ],
)
def test_an_alteration_gives_a_new_etag(lab, change):
    name = lab.make("id INT64 NOT NULL, name STRING")
    old = lab.client.get_table(name)
    lab.sql(f"ALTER TABLE `{name}` {change}")
    new = lab.client.get_table(name)
    assert new.etag != old.etag
    assert new.modified > old.modified
    old.description = "stale"
    with pytest.raises(exceptions.PreconditionFailed):
        lab.client.update_table(old, ["description"])
    new.description = "fresh"
    assert lab.client.update_table(new, ["description"]).description == "fresh"


def test_an_alteration_that_fails_half_way_gives_a_new_etag(lab):
    name = lab.make("id INT64")
    old = lab.client.get_table(name)
    with pytest.raises(exceptions.GoogleAPICallError):
        lab.sql(f"ALTER TABLE `{name}` ADD COLUMN more INT64, ADD COLUMN id INT64")
    assert lab.client.get_table(name).etag != old.etag


def test_a_renamed_table_leaves_nothing_behind(lab):
    name, other = lab.make("id INT64"), lab.name("renamed")
    lab.sql(f"ALTER TABLE `{name}` RENAME TO renamed")
    assert lab.client.get_table(other).etag
    with pytest.raises(exceptions.NotFound):
        lab.client.get_table(name)


def test_a_patch_adds_fields_to_structs(lab):
    table = lab.make("n INT64, s STRUCT<a INT64, t STRUCT<x INT64>>, many ARRAY<STRUCT<a INT64>>")
    lab.sql(f"INSERT INTO {table} VALUES (1, STRUCT(1, STRUCT(2)), [STRUCT(3)])")
    found = lab.client.get_table(table)
    text, number = bigquery.SchemaField("b", "STRING"), bigquery.SchemaField("a", "INTEGER")
    inner = bigquery.SchemaField("t", "RECORD", fields=[bigquery.SchemaField("x", "INTEGER"), text])
    found.schema = [
        bigquery.SchemaField("n", "INTEGER"),
        bigquery.SchemaField("s", "RECORD", fields=[number, inner, text]),
        bigquery.SchemaField("many", "RECORD", "REPEATED", fields=[number, text]),
    ]
    assert lab.client.update_table(found, ["schema"]).schema == found.schema
    lab.sql(f"INSERT INTO {table} VALUES (2, STRUCT(1, STRUCT(2, 'x'), 'y'), [STRUCT(3, 'z')])")
    assert lab.sql(f"SELECT s.t.b, s.b, many[0].b FROM {table} ORDER BY n") == [
        (None, None, None),
        ("x", "y", "z"),
    ]
    assert lab.client.get_table(table).schema == found.schema


def test_a_table_is_in_the_location_of_its_dataset(lab):
    dataset = bigquery.Dataset(f"{lab.client.project}.l{uuid.uuid4().hex}")
    dataset.location = "asia-northeast1"
    lab.client.create_dataset(dataset)
    table = bigquery.Table(dataset.reference.table("t"), FIELDS)
    assert lab.client.create_table(table).location == "asia-northeast1"
    assert lab.client.get_table(table).location == "asia-northeast1"
