"""The snippets of the documentation are run, and what pages show is what was run."""

import re
import runpy
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_bq_connector import BigQueryReader, BigQueryResource, DefaultStreamWriter
from dagster_bq_connector.local import LocalBigQuery

ROOT = Path(__file__).parents[2]
SNIPPETS = ROOT / "docs" / "snippets"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture
def environment(local: LocalBigQuery, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in local.environment.items():
        monkeypatch.setenv(name, value)


def run(name: str) -> dict[str, Any]:
    return runpy.run_path(str(SNIPPETS / name))


def test_the_events_and_the_day_of_orders(
    environment: None, bigquery: BigQueryResource, reader: BigQueryReader
) -> None:
    connected = bigquery.connect()
    connected.clients.cloud_storage(connected.project).create_bucket("my-staging")
    events, orders = run("append_events.py"), run("daily_orders.py")
    events_job = events["defs"].resolve_implicit_global_asset_job_def()
    assert events_job.execute_in_process().success
    rows = reader.read("shop.events").to_arrow()
    assert sorted(rows["id"].to_pylist()) == [1, 2]
    import pyarrow as pa

    more = rows.slice(0, 1).set_column(
        2, "created_at", pa.array([1_785_542_400_000_000], pa.timestamp("us", "UTC"))
    )
    DefaultStreamWriter(bigquery=bigquery).append(more, "shop.events")
    job: dg.JobDefinition = orders["defs"].resolve_implicit_global_asset_job_def()
    assert job.execute_in_process(partition_key="2026-08-01").success
    assert reader.read("shop.orders_by_day").to_arrow().num_rows == 1


def test_the_notebook(environment: None) -> None:
    done = run("notebook.py")
    assert done["result"].rows == 3
    assert sorted(done["cheap"]["item"]) == ["pad", "pen"]


def test_the_local_bigquery(environment: None) -> None:
    assert run("local.py")["answer"] == 42


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_on_a_page_is_a_snippet(page: Path) -> None:
    snippets = {path.read_text().partition('"""\n')[2].strip() for path in SNIPPETS.glob("*.py")}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        assert any(block.strip() in text for text in snippets), f"not in a snippet:\n{block}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
