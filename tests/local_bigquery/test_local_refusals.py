"""A server that refuses what the service may refuse: pending changes, missing tables."""

import pytest
from google.api_core import exceptions
from google.cloud import bigquery

from dagster_bq_connector.local import LocalBigQuery


@pytest.fixture(scope="module")
def lab(make_lab):
    with LocalBigQuery(refuse_streamed_tables=True, mask_missing_tables=True) as local:
        lab = make_lab(local.environment)
        lab.new_dataset()
        yield lab
        lab.close()


@pytest.fixture
def streamed(lab, make_rows):
    """A table that received a change."""
    table = lab.make("id INT64, day DATE, PRIMARY KEY (id) NOT ENFORCED", "PARTITION BY day")
    rows = make_rows(id="int64", day="string", _CHANGE_TYPE="string")
    change = {"id": 1, "day": "2026-08-01", "_CHANGE_TYPE": "UPSERT"}
    assert lab.connect(lab.default_stream(table), rows).send([change]).error.code == 0
    return table


def test_a_streamed_table_refuses_storage_reads_and_copies(lab, streamed):
    with pytest.raises(exceptions.FailedPrecondition, match="change data capture"):
        lab.session(streamed)
    target = lab.name()
    for source in (streamed, f"{streamed}$20260801", [lab.make("id INT64, day DATE"), streamed]):
        with pytest.raises(exceptions.BadRequest, match="change data capture"):
            lab.client.copy_table(source, target).result()
    with pytest.raises(exceptions.NotFound):
        lab.client.get_table(target)
    # A query is the way to read it.
    assert lab.sql(f"SELECT id FROM `{streamed}`") == [(1,)]


def test_other_tables_are_read_and_copied(lab, make_rows):
    table = lab.make("id INT64, PRIMARY KEY (id) NOT ENFORCED")
    connection = lab.connect(lab.default_stream(table), make_rows(id="int64"))
    assert connection.send([{"id": 1}]).error.code == 0
    assert lab.read(lab.session(table)) == [(1,)]
    target = lab.name()
    lab.client.copy_table(table, target).result()
    assert lab.rows(target) == [(1,)]


def test_a_replaced_table_is_read_again(lab, streamed):
    rows = [{"id": 2, "day": "2026-08-01"}]
    config = bigquery.LoadJobConfig(write_disposition="WRITE_TRUNCATE_DATA")
    lab.client.load_table_from_json(rows, streamed, job_config=config).result()
    assert [row[0] for row in lab.read(lab.session(streamed))] == [2]


def test_a_missing_table_is_permission_denied(lab, make_rows):
    table = lab.name()
    calls = (
        lambda: lab.session(table),
        lambda: lab.stream(table, "PENDING"),
        lambda: lab.connect(lab.default_stream(table), make_rows(id="int64")).send([{"id": 1}]),
        lambda: lab.writer.get_write_stream(name=lab.default_stream(table)),
    )
    for call in calls:
        with pytest.raises(exceptions.PermissionDenied, match="or it may not exist"):
            call()
    # REST says it as it is.
    with pytest.raises(exceptions.NotFound):
        lab.client.get_table(table)
