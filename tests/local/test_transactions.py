"""The transaction that replaces a slice: its races, its failures, and what is left of it."""

import datetime as dt
import threading
from collections.abc import Callable
from typing import Any

import pytest
from google.api_core import exceptions as api
from google.cloud import bigquery as google
from google.cloud.bigquery import QueryJob

from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    BigQueryWriter,
    ExactlyOnceWriter,
    FileLoadsWriter,
    TableOptions,
)
from dagster_bq_connector.errors import RefusedError, UnsupportedError
from dagster_bq_connector.write import jobs, proof, transaction
from support.changes import upsert
from support.slices import content, regions, rows_of, tables


def test_a_transaction_that_another_one_excludes_is_tried_again(
    dataset: str,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"{dataset}.t"
    load_writer.replace(rows_of(("de", 1), ("at", 2)), name)
    script, tried = transaction._Change.script, list[str]()
    said = "Transaction is aborted due to concurrent update against table x"

    def excluded_twice(self: transaction._Change) -> str:
        tried.append(self.staging.table)
        text = script(self)
        if len(tried) > 2:
            return text
        return text.replace("COMMIT", f"RAISE USING MESSAGE = '{said}'; COMMIT")

    monkeypatch.setattr(transaction._Change, "script", excluded_twice)
    result = load_writer.replace(rows_of(("de", 9)), regions(name, "de"))
    assert len(tried) == 3
    assert result.jobs[-1].endswith("_2")
    assert content(reader, name) == [("at", 2), ("de", 9)]


def test_writers_of_one_table_at_once(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader, bigquery: BigQueryResource
) -> None:
    name, keys = f"{dataset}.t", ["a", "b", "c", "d"]
    load_writer.replace(rows_of(*((key, 0) for key in keys)), name)
    failures: list[Exception] = []

    def write(key: str) -> None:
        try:
            load_writer.replace(rows_of((key, 1), (key, 2)), regions(name, key))
        except Exception as error:  # noqa: BLE001  # shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=write, args=[key]) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert content(reader, name) == [(key, n) for key in keys for n in (1, 2)]
    assert tables(bigquery, dataset) == ["t"]


def test_a_lost_answer_adopts_the_job(
    dataset: str,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The repeated insertion meets its own job, which has run or runs."""
    name = f"{dataset}.t"
    load_writer.replace(rows_of(("de", 1)), name)
    query, sent = google.Client.query, list[str]()

    def twice(self: google.Client, sql: str, *arguments: Any, **options: Any) -> QueryJob:
        if "job_id" in options:
            sent.append(options["job_id"])
            query(self, sql, *arguments, **options)
        return query(self, sql, *arguments, **options)

    monkeypatch.setattr(google.Client, "query", twice)
    load_writer.replace(rows_of(("de", 2)), regions(name, "de"))
    load_writer.append(rows_of(("dE", 3)), regions(name, "de", column="LOWER(region)"))
    assert len(sent) == len(set(sent)) == 4  # of the appended slice two more, which check its rows
    assert content(reader, name) == [("dE", 3), ("de", 2)]


def test_an_append_is_one_statement(
    dataset: str, load_writer: FileLoadsWriter, reader: BigQueryReader, bigquery: BigQueryResource
) -> None:
    """A script that is cancelled after its COMMIT has failed, and yet has changed the table."""
    name = f"{dataset}.t"
    load_writer.replace(rows_of(("de", 1)), name)
    result = load_writer.append(rows_of(("dE", 2)), regions(name, "de", column="LOWER(region)"))
    with bigquery.get_client() as client:
        job: Any = client.get_job(result.jobs[-1])
    assert job.statement_type == "INSERT"
    assert content(reader, name) == [("dE", 2), ("de", 1)]


def test_a_broken_transaction_changes_nothing(
    dataset: str,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
    bigquery: BigQueryResource,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"{dataset}.t"
    load_writer.replace(rows_of(("de", 1), ("at", 2)), name)
    script = transaction._Change.script
    monkeypatch.setattr(
        transaction._Change,
        "script",
        lambda self: script(self).replace("@@row_count != 1", "@@row_count != 7"),
    )
    with pytest.raises(RefusedError, match="does not hold the 1 rows that were staged"):
        load_writer.replace(rows_of(("de", 9)), regions(name, "de"))
    assert content(reader, name) == [("at", 2), ("de", 1)]
    assert tables(bigquery, dataset) == ["t"]


def test_an_interrupted_transaction_is_cancelled(
    dataset: str,
    load_writer: FileLoadsWriter,
    bigquery: BigQueryResource,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dagster's Terminate arrives as an exception, wherever the main thread is."""
    name, cancelled = f"{dataset}.t", list[str]()
    load_writer.replace(rows_of(("de", 1)), name)
    cancel: Callable[..., bool] = QueryJob.cancel

    def noted(self: QueryJob, **options: Any) -> bool:
        cancelled.append(str(self.job_id))
        return cancel(self, **options)

    wait = proof.wait_for

    def interrupted(job: jobs.Job, *arguments: Any) -> None:
        if isinstance(job, QueryJob):
            raise KeyboardInterrupt
        wait(job, *arguments)

    monkeypatch.setattr(QueryJob, "cancel", noted)
    monkeypatch.setattr(proof, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_writer.replace(rows_of(("de", 9)), regions(name, "de"))
    assert len(cancelled) == 1
    assert tables(bigquery, dataset) == ["t"]


@pytest.mark.parametrize("by_streams", [False, True])
def test_a_table_that_changes_stream_into(
    dataset: str,
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
    fields: dict[str, Any],
    bigquery: BigQueryResource,
    by_streams: bool,
) -> None:
    """Public failure case 19: BigQuery refuses the DELETE; the error says why, and what to do."""
    name = f"{dataset}.t"
    once = ExactlyOnceWriter(bigquery=bigquery, ledger=f"{dataset}_ledger")
    writer: BigQueryWriter = once if by_streams else load_writer
    options = TableOptions(primary_key=("n",))
    load_writer.replace(rows_of(("de", 1)), name, options)
    upsert(fields, f"projects/{fields['project']}/datasets/{dataset}/tables/t", n=2, region="de")
    before = content(reader, name)
    assert before == [("de", 1), ("de", 2)]
    with pytest.raises(UnsupportedError, match="change data capture streams into it.*replace ano"):
        writer.replace(rows_of(("de", 9)), regions(name, "de"), key=f"{dataset} k")
    assert content(reader, name) == before
    assert tables(bigquery, dataset) == ["t"]


@pytest.mark.parametrize(
    "said",
    [
        "UPDATE or DELETE statement over table t would affect rows in the streaming buffer, which "
        "is not supported",
        "DELETE/UPDATE/MERGE DMLs are currently not supported over tables that had UPSERT streams.",
    ],
)
def test_what_the_service_says_of_tables_that_take_no_delete(
    dataset: str,
    load_writer: FileLoadsWriter,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
) -> None:
    """Public failure case 29: rows that were just streamed, which a transaction does not change."""
    name = f"{dataset}.t"
    load_writer.replace(rows_of(("de", 1)), name)
    script = f"BEGIN TRANSACTION; RAISE USING MESSAGE = '{said}'; COMMIT TRANSACTION;"
    monkeypatch.setattr(transaction._Change, "script", lambda self: script)
    with pytest.raises(UnsupportedError, match="t was not changed: .*(30 minutes|by CDC)"):
        load_writer.replace(rows_of(("de", 9)), regions(name, "de"))


def test_a_staging_table_is_encrypted_as_its_destination(
    dataset: str, load_writer: FileLoadsWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, key = f"{dataset}.t", "projects/p/locations/us/keyRings/r/cryptoKeys/k"
    load_writer.replace(rows_of(("de", 1)), name)
    made: list[google.Table] = []
    create, get = google.Client.create_table, google.Client.get_table

    def encrypted(self: google.Client, *arguments: Any, **options: Any) -> google.Table:
        table = get(self, *arguments, **options)
        table.encryption_configuration = google.EncryptionConfiguration(kms_key_name=key)
        return table

    def noted(self: google.Client, table: google.Table, **options: Any) -> google.Table:
        made.append(table)
        return create(self, table, **options)

    monkeypatch.setattr(google.Client, "get_table", encrypted)
    monkeypatch.setattr(google.Client, "create_table", noted)
    load_writer.replace(rows_of(("de", 9)), regions(name, "de"))
    [staging] = made
    assert staging.encryption_configuration.kms_key_name == key


def test_a_staging_table_expires_by_itself(
    dataset: str,
    load_writer: FileLoadsWriter,
    bigquery: BigQueryResource,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it cannot be dropped, too."""
    name = f"{dataset}.t"
    monkeypatch.setattr(
        google.Client, "delete_table", lambda *_, **__: (_ for _ in ()).throw(api.Forbidden("no"))
    )
    load_writer.replace(rows_of(("de", 1)), regions(name, "de"))
    [left] = [table for table in tables(bigquery, dataset) if table != "t"]
    assert left.startswith("_dagster_bq_")
    with bigquery.get_client() as client:
        table = client.get_table(f"{dataset}.{left}")
    assert table.expires is not None
    assert table.created is not None
    assert dt.timedelta(hours=23) < table.expires - table.created < dt.timedelta(hours=25)


def test_an_interrupted_insertion_is_cancelled(
    dataset: str,
    load_writer: FileLoadsWriter,
    bigquery: BigQueryResource,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request may have arrived: its job must not go on by itself."""
    name, cancelled = f"{dataset}.t", list[str]()
    load_writer.replace(rows_of(("de", 1)), name)
    query, cancel = google.Client.query, QueryJob.cancel

    def interrupted(self: google.Client, *arguments: Any, **options: Any) -> QueryJob:
        query(self, *arguments, **options)
        raise KeyboardInterrupt

    def noted(self: QueryJob, **options: Any) -> bool:
        cancelled.append(str(self.job_id))
        return cancel(self, **options)

    monkeypatch.setattr(google.Client, "query", interrupted)
    monkeypatch.setattr(QueryJob, "cancel", noted)
    with pytest.raises(KeyboardInterrupt):
        load_writer.replace(rows_of(("de", 9)), regions(name, "de"))
    assert len(cancelled) == 1
    assert tables(bigquery, dataset) == ["t"]
