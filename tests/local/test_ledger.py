"""The ledger on both of its homes: values, versions, races, and what is refused."""

import threading
import uuid

import pytest
from google.cloud import bigquery as google_bigquery

from dagster_bq_connector import BigQueryResource
from dagster_bq_connector.errors import (
    ConfigurationError,
    DatasetNotFoundError,
    LedgerError,
)
from dagster_bq_connector.ledger import Key, Ledger
from dagster_bq_connector.ledger.bigquery import WRITE_LIFE
from support.http_proxy import Call, Verdict
from support.ledgers import (
    HOMES,
    STREAM,
    at_once,
    created,
    increment,
    ledger_at,
    ledger_through,
    names,
    proxy_to,
)

THROUGH_A_PROXY = pytest.mark.local_only(
    "a proxy stands between, without a certificate of Google's"
)


@pytest.fixture(params=HOMES)
def home(request: pytest.FixtureRequest, dataset: str, staging: str) -> str:
    return dataset if request.param == "bigquery" else staging


@pytest.fixture
def ledger(bigquery: BigQueryResource, home: str) -> Ledger:
    return ledger_at(bigquery, home)


def table_of(bigquery: BigQueryResource, ledger: Ledger, key: Key) -> google_bigquery.Table:
    return bigquery.connect().rest.get_table(ledger.place(key.name))


def test_the_life_of_an_entry(ledger: Ledger) -> None:
    assert ledger.get(STREAM) is None
    assert list(ledger.entries()) == []
    first = created(ledger, {"position": {"lsn": 2**63, "é": [1.5, None, True, "\ud800'\"\\"]}})
    assert (first.key, first.version) == (STREAM, 1)
    assert first.value == {"position": {"lsn": 2**63, "é": [1.5, None, True, "\ud800'\"\\"]}}
    assert ledger.get(STREAM) == ledger.find(STREAM.name) == first

    again = ledger.create(STREAM, {"mine": 1})
    assert (again.won, again.entry) == (False, first)

    second = ledger.compare_and_set(first, {"n": 2})
    assert second.won
    assert second.entry
    assert (second.entry.version, second.entry.value) == (2, {"n": 2})
    assert ledger.get(STREAM) == second.entry

    late = ledger.compare_and_set(first, {"n": 3})
    assert (late.won, late.entry) == (False, second.entry)
    with pytest.raises(LedgerError, match="is at version 2, not at version 1"):
        ledger.delete(first)

    ledger.delete(second.entry)
    assert ledger.get(STREAM) is None
    gone = ledger.compare_and_set(second.entry, {"n": 3})
    assert (gone.won, gone.entry) == (False, None)
    with pytest.raises(LedgerError, match="is not there"):
        ledger.delete(second.entry)
    assert created(ledger).version == 1


def test_the_history_is_bounded(ledger: Ledger) -> None:
    entry = created(ledger)
    for _ in range(40):
        written = ledger.compare_and_set(entry, {"n": 0})
        assert written.won
        assert written.entry
        entry = written.entry
    assert entry == ledger.get(STREAM)
    assert (entry.version, len(entry.history), len(set(entry.history))) == (41, 32, 32)


def test_entries_are_listed_by_kind(ledger: Ledger) -> None:
    for key in (STREAM, Key("write", "run 1, asset a"), Key("write", "x" * 5000)):
        created(ledger, key=key)
    assert names(list(ledger.entries("stream"))) == ["stream 'orders'"]
    assert len(list(ledger.entries("write"))) == 2
    assert len(list(ledger.entries())) == 3


def test_who_changes_his_dict_changes_no_entry(ledger: Ledger) -> None:
    value = {"list": [1]}
    entry = created(ledger, value)
    value["list"].append(2)
    assert entry.value == {"list": [1]}


@pytest.mark.parametrize("value", [{"x": float("nan")}, {"x": object()}, [1], "text", None])
def test_a_value_that_is_no_json_object_is_refused(ledger: Ledger, value: object) -> None:
    with pytest.raises(LedgerError, match=r"is no JSON|no dict"):
        ledger.create(STREAM, value)  # pyright: ignore[reportArgumentType]
    assert ledger.get(STREAM) is None


def test_twenty_race_to_create_and_one_wins(ledger: Ledger) -> None:
    results = at_once(lambda number: ledger.create(STREAM, {"by": number}), 20)
    winners = [number for number, written in enumerate(results) if written.won]
    assert len(winners) == 1
    assert {written.entry.value["by"] for written in results if written.entry} == set(winners)


def test_twenty_race_to_count(ledger: Ledger) -> None:
    created(ledger)
    at_once(lambda _: increment(ledger), 20)
    entry = ledger.get(STREAM)
    assert entry
    assert (entry.value, entry.version) == ({"n": 20}, 21)


@THROUGH_A_PROXY
def test_fifty_writers_of_different_keys_do_not_wait_for_each_other(
    bigquery: BigQueryResource, home: str
) -> None:
    """One is held up in the middle of its change, while the others come to their ends."""
    held, release = threading.Event(), threading.Event()
    with proxy_to(bigquery, home) as proxy:
        ledger = ledger_through(proxy, bigquery, home, deadline=120)
        stuck = Key("write", "stuck")

        def hold() -> None:
            held.set()
            assert release.wait(timeout=120)

        def decide(call: Call) -> Verdict:
            mine = call.changes and b"stuck" in call.body
            return Verdict(then=hold) if mine else Verdict()

        proxy.decide = decide

        def write(number: int) -> bool:
            if number == 0:
                return ledger.create(stuck, {"n": 0}).won
            if number == 49:
                assert held.wait(timeout=60)
            key = Key("write", f"run {number}")
            return ledger.compare_and_set(created(ledger, key=key), {"n": 1}).won

        done: list[bool] = []
        waiting = threading.Thread(target=lambda: done.append(write(0)))
        waiting.start()
        assert all(at_once(lambda number: write(number + 1), 49))
        assert not done
        release.set()
        waiting.join(timeout=60)
        assert done == [True]


def test_what_is_no_entry_is_named(bigquery: BigQueryResource, dataset: str) -> None:
    ledger = ledger_at(bigquery, dataset)
    entry = created(ledger)
    client = bigquery.connect().rest
    table = table_of(bigquery, ledger, STREAM)
    for text in (
        None,
        "by hand",
        "[]",
        "{}",
        '{"key":"orders","version":1,"value":{},"nonces":[]}',
    ):
        table.description = text
        table = client.update_table(table, ["description"])
        with pytest.raises(LedgerError, match="is no entry of the ledger, or was edited by hand"):
            ledger.get(STREAM)
    other = google_bigquery.Table(f"{client.project}.{dataset}.{Key('stream', 'other').name}")
    other.description = table.description = (
        f'{{"key":"orders","version":1,"value":{{}},"nonces":["{entry.history[0]}"]}}'
    )
    client.create_table(other)
    with pytest.raises(LedgerError, match="holds another key, 'orders'"):
        ledger.get(Key("stream", "other"))
    with pytest.raises(LedgerError, match="is no name of a ledger entry"):
        ledger.find("stream_x")


def test_tables_of_others_are_left_alone(bigquery: BigQueryResource, dataset: str) -> None:
    ledger = ledger_at(bigquery, dataset)
    bigquery.connect().rest.create_table(f"{dataset}.write_orders")
    created(ledger)
    assert names(list(ledger.entries())) == ["stream 'orders'"]


def test_tables_of_writes_expire_and_those_of_streams_do_not(
    bigquery: BigQueryResource, dataset: str
) -> None:
    ledger, client = ledger_at(bigquery, dataset), bigquery.connect().rest
    write = Key("write", "run 1")
    for key in (write, STREAM):
        created(ledger, key=key)
    made = table_of(bigquery, ledger, write)
    assert made.created
    assert made.expires
    assert abs((made.expires - made.created - WRITE_LIFE).total_seconds()) < 60
    assert table_of(bigquery, ledger, STREAM).expires is None
    # A dataset may give its tables an expiration: the next change takes it from a stream's.
    given = table_of(bigquery, ledger, STREAM)
    given.expires = made.expires
    client.update_table(given, ["expires"])
    for key in (write, STREAM):
        increment(ledger, key)
    # A write may go on for longer than that, and each change keeps its entry.
    changed = table_of(bigquery, ledger, write).expires
    assert changed
    assert changed > made.expires
    assert table_of(bigquery, ledger, STREAM).expires is None


def test_a_label_set_meanwhile_is_no_change_of_the_entry(
    bigquery: BigQueryResource, dataset: str
) -> None:
    ledger = ledger_at(bigquery, dataset)
    entry = created(ledger)
    table = table_of(bigquery, ledger, STREAM)
    table.labels = {"team": "data"}
    bigquery.connect().rest.update_table(table, ["labels"])
    assert ledger.compare_and_set(entry, {"n": 1}).won
    assert table_of(bigquery, ledger, STREAM).labels == {"team": "data"}


@THROUGH_A_PROXY
def test_a_value_too_large_for_a_description_is_refused_before_it_is_sent(
    bigquery: BigQueryResource, dataset: str, staging: str
) -> None:
    with proxy_to(bigquery, dataset) as proxy:
        ledger = ledger_through(proxy, bigquery, dataset)
        entry = created(ledger)
        asked = len(proxy.calls)
        with pytest.raises(LedgerError, match=r'ledger="gs://bucket/prefix"') as caught:
            ledger.compare_and_set(entry, {"tokens": "é" * 3000})
        assert "and the description of a table" in str(caught.value)
        assert len(proxy.calls) == asked
    fits = 16_384 - len('{"key":"full","version":1,"value":{"t":""},"nonces":["0123456789abcdef"]}')
    full = created(ledger_at(bigquery, dataset), {"t": "x" * fits}, Key("stream", "full"))
    assert len(full.value["t"]) == fits
    with pytest.raises(LedgerError, match=r"takes 16,385 characters"):
        ledger_at(bigquery, dataset).create(Key("stream", "over"), {"t": "x" * (fits + 1)})
    large = created(ledger_at(bigquery, staging), {"tokens": "é" * 3_000_000})
    assert ledger_at(bigquery, staging).get(STREAM) == large


def test_the_dataset_is_made_on_first_use(bigquery: BigQueryResource) -> None:
    name = f"_ledger_{uuid.uuid4().hex[:12]}"
    client = bigquery.connect().rest
    try:
        assert ledger_at(bigquery, name).get(STREAM) is None
        results = at_once(lambda n: ledger_at(bigquery, name).create(STREAM, {"by": n}).won, 10)
        assert sum(results) == 1
        assert client.get_dataset(name).location == bigquery.location
    finally:
        client.delete_dataset(name, delete_contents=True, not_found_ok=True)


def test_a_missing_dataset_that_may_not_be_made_is_named(bigquery: BigQueryResource) -> None:
    ledger = ledger_at(bigquery, "_no_such_ledger", create=False)
    with pytest.raises(DatasetNotFoundError) as caught:
        ledger.create(STREAM, {"n": 0})
    project = bigquery.connect().project
    assert f"bq mk --location=US --dataset {project}:_no_such_ledger" in str(caught.value)
    assert "bigquery.tables.get, .create, .update, .list and .delete" in str(caught.value)
    with pytest.raises(DatasetNotFoundError):
        list(ledger.entries())


def test_a_missing_bucket_is_named(bigquery: BigQueryResource) -> None:
    bucket = f"no-such-bucket-{uuid.uuid4().hex}"
    ledger = ledger_at(bigquery, f"gs://{bucket}/ledger")
    with pytest.raises(ConfigurationError, match=f"gcloud storage buckets create gs://{bucket}"):
        ledger.create(STREAM, {"n": 0})


def test_objects_of_writes_and_of_streams_have_folders_of_their_own(
    bigquery: BigQueryResource, staging: str
) -> None:
    ledger, write = ledger_at(bigquery, staging), Key("write", "run 1")
    assert ledger.place(write.name) == f"{staging}/writes/{write.name}.json"
    assert ledger.place(STREAM.name) == f"{staging}/streams/{STREAM.name}.json"


@pytest.mark.parametrize("home", ["gs://", "gs://../x", "a.b.c d", "", "s3://bucket", "`x`"])
def test_a_home_that_is_none_is_refused(bigquery: BigQueryResource, home: str) -> None:
    with pytest.raises(ConfigurationError, match=r"gs://bucket/prefix"):
        ledger_at(bigquery, home)


def test_a_home_may_name_its_project(bigquery: BigQueryResource) -> None:
    for project in ("other-project", "example.com:other"):
        place = ledger_at(bigquery, f"{project}._dagster_bq").place("x")
        assert place == f"{project}._dagster_bq.x"
