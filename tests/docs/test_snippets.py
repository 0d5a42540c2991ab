"""The snippets of the documentation are run, and what pages show is what was run."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from dagster_bq_connector import BigQueryReader, BigQueryResource, DefaultStreamWriter
from dagster_bq_connector.local import LocalBigQuery
from support.debezium import event, with_schema, written
from support.kafka import kafka_broker

ROOT = Path(__file__).parents[2]
SNIPPETS = ROOT / "docs" / "snippets"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture
def environment(local: LocalBigQuery, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in local.environment.items():
        monkeypatch.setenv(name, value)


def run(name: str) -> dict[str, Any]:
    return runpy.run_path(str(SNIPPETS / name))


@pytest.fixture(scope="session")
def bucket(bigquery: BigQueryResource) -> None:
    """What the snippets call their own."""
    connected = bigquery.connect()
    connected.clients.cloud_storage(connected.project).create_bucket("my-staging")


def materialize(definitions: dg.Definitions, partition: str | None = None) -> None:
    job = definitions.resolve_implicit_global_asset_job_def()
    assert job.execute_in_process(partition_key=partition).success


def test_the_events_and_the_day_of_orders(
    environment: None, bucket: None, bigquery: BigQueryResource, reader: BigQueryReader
) -> None:
    events, orders = run("append_events.py"), run("daily_orders.py")
    materialize(events["defs"])
    rows = reader.read("shop.events").to_arrow()
    assert sorted(rows["id"].to_pylist()) == [1, 2]
    august = pa.array([1_785_542_400_000_000], pa.timestamp("us", "UTC"))
    more = rows.slice(0, 1).set_column(2, "created_at", august)
    DefaultStreamWriter(bigquery=bigquery).append(more, "shop.events")
    materialize(orders["defs"], "2026-08-01")
    assert reader.read("shop.orders_by_day").to_arrow().num_rows == 1


def test_replacing_twice_leaves_the_rows_once(
    environment: None, bucket: None, reader: BigQueryReader
) -> None:
    snippet = run("replace_tables.py")
    for _ in range(2):
        materialize(snippet["defs"])
    assert reader.read("shop.price_list").to_arrow().num_rows == 3
    assert reader.read("shop.stock").to_arrow().num_rows == 2
    assert sorted(reader.read("shop.stores").to_arrow()["city"].to_pylist()) == [
        "Metz",
        "Nice",
        "Ulm",
    ]


def test_a_long_append(environment: None, reader: BigQueryReader) -> None:
    materialize(run("long_append.py")["defs"])
    pages = reader.read("shop.page_events").to_arrow()["page"].to_pylist()
    assert sorted(pages) == [1, 2, 3]


def test_exactly_once(environment: None, reader: BigQueryReader) -> None:
    """A key of one's own lands once; a run that was asked for again appends again."""
    snippet = run("exactly_once.py")
    for _ in range(2):
        materialize(snippet["defs"], "2026-08-01")
    assert reader.read("shop.payments").to_arrow().num_rows == 4
    shops = reader.read("shop.refunds").to_arrow()["shop"].to_pylist()
    assert sorted(shops) == ["berlin", "paris"]


def test_loading_files(
    environment: None, bucket: None, bigquery: BigQueryResource, reader: BigQueryReader
) -> None:
    connected = bigquery.connect()
    files = connected.clients.cloud_storage(connected.project).bucket("my-staging")
    for name, line in (("a", "2026-08-01,pen,3"), ("b", "2026-08-01,ink,4")):
        csv = f"day,item,sold\n{line}\n"
        files.blob(f"sales/2026-08-01/{name}.csv").upload_from_string(csv)
    snippet = run("load_files.py")
    for _ in range(2):
        materialize(snippet["defs"], "2026-08-01")
    assert sorted(reader.read("shop.sales").to_arrow()["sold"].to_pylist()) == [3, 4]


def test_the_io_manager(environment: None, bucket: None, reader: BigQueryReader) -> None:
    snippet = run("io_manager.py")
    for _ in range(2):
        materialize(snippet["defs"], "2026-08-01")
    pages = reader.read("web.pages").to_polars().sort("page")
    assert pages.select("page", "visits").rows() == [("/", 1), ("/a", 1)]
    assert reader.read("web.visits").to_arrow().num_rows == 3


def test_the_notebook(environment: None, reader: BigQueryReader) -> None:
    done = run("notebook.py")
    assert done["result"].rows == 3
    assert sorted(done["cheap"]["item"]) == ["pad", "pen"]
    assert done["total"] == pytest.approx(11.8)
    assert done["dear"]["item"].to_list() == ["ink"]
    assert reader.read("shop.cheap_prices").to_arrow().num_rows == 2


def test_the_options_of_tables(environment: None, bigquery: BigQueryResource) -> None:
    done = run("table_options.py")
    assert (done["result"].rows, done["customers"].rows) == (2, 1)
    with bigquery.get_client() as client:
        orders, customers = client.get_table("shop.orders"), client.get_table("shop.customers")
    assert done["ORDERS"].differences(orders) == []
    assert done["CUSTOMERS"].differences(customers) == []


def test_failed_rows_are_kept(environment: None, reader: BigQueryReader) -> None:
    materialize(run("failed_rows.py")["defs"])
    assert sorted(reader.read("lab.readings").to_arrow()["sensor"].to_pylist()) == ["a", "c"]
    [kept] = reader.read("lab.failed_readings").to_arrow().to_pylist()
    assert json.loads(kept["row"]) == {"sensor": "b", "celsius": [20.1, None]}
    assert "null in the array" in kept["reason"]


def test_a_change_stream(
    environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it makes of changes is in test_change_streams.py."""
    monkeypatch.setenv("CHANGES", str(tmp_path))
    definitions = run("change_stream.py")["defs"]
    sensor = definitions.resolve_sensor_def("cdc_sensor")
    with dg.DagsterInstance.ephemeral() as instance:
        context = dg.build_sensor_context(instance=instance, resources=definitions.resources)
        assert "shop: no changes" in str(sensor(context).skip_reason)


def test_a_change_stream_from_kafka(
    environment: None,
    bigquery: BigQueryResource,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = [{"field": "id", "type": "int64"}, {"field": "note", "type": "string"}]
    with bigquery.get_client() as client, kafka_broker(tmp_path) as broker:
        client.create_dataset("crm", exists_ok=True)
        monkeypatch.setenv("KAFKA", broker.address)
        for number, table in enumerate(("orders", "customers", "prices"), 1):
            row = {"id": number, "note": "new"}
            value = with_schema(fields, event("c", row, 100 + number, 100, table))
            topic = broker.create(f"shop.public.{table}")
            broker.produce(topic, [written(value) or b""], key=b'{"id":%d}' % number)
        broker.produce("shop.public.orders", [b"no JSON"], key=b'{"id":4}')
        materialize(run("kafka_stream.py")["defs"])
        sql = "SELECT id, note FROM crm.orders UNION ALL SELECT id, note FROM crm.buyers ORDER BY 1"
        assert [tuple(row) for row in client.query_and_wait(sql)] == [(1, "new"), (2, "new")]
        [letter] = client.query_and_wait("SELECT source, value FROM crm.dead_letters")
        assert tuple(letter) == ("shop.public.orders[0]@1", b"no JSON")


def test_every_login_to_kafka_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", "secret")
    connected = BigQueryResource(project="my-project").connect()
    for source in run("kafka_logins.py")["sources"]:
        assert "secret" not in repr(source)
        with source.process_config_and_initialize_cm() as opened:
            opened.open_source(connected, 1.0)


def test_every_connection_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIGQUERY_KEY", '{"type": "service_account"}')
    resources = [each for each in run("connections.py").values() if type(each) is BigQueryResource]
    assert len(resources) == 6
    for resource in resources:
        assert resource.connect().project == resource.project


def test_the_local_bigquery(environment: None) -> None:
    assert run("local.py")["answer"] == 42


def test_every_snippet_is_run() -> None:
    here = Path(__file__).read_text()
    for path in SNIPPETS.glob("*.py"):
        assert f'run("{path.name}")' in here, path.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_on_a_page_is_a_snippet(page: Path) -> None:
    snippets = {path.read_text().partition('"""\n')[2].strip() for path in SNIPPETS.glob("*.py")}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        assert any(block.strip() in text for text in snippets), f"not in a snippet:\n{block}"
