"""Retries of runs and re-executions from failure go on with a write; all others write anew.

The runs are asked for as Dagster's page and daemon ask for them, so that their tags are Dagster's.
"""

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.reconstruct import ReconstructableRepository

from dagster_bq_connector import BigQueryReader
from support import keyed_assets
from support.page import IN_THIS_PROCESS, Page
from support.service import BUCKET

FAILED, DONE = dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.SUCCESS


@pytest.fixture(scope="module")
def page(fields: dict[str, Any], bigquery: object) -> Iterator[Page]:
    name = f"keyed_{uuid.uuid4().hex[:12]}"
    connection = {"fields": fields, "ledger": name, "staging": f"gs://{BUCKET}/{name}"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(keyed_assets.CONNECTION, json.dumps(connection))
        with Page(Path(keyed_assets.__file__), IN_THIS_PROCESS) as page:
            yield page


@dataclass
class Story:
    """Runs that write to tables of one dataset, one after the other."""

    page: Page
    reader: BigQueryReader
    dataset: str
    flags: Path

    def begin(self, job: str = "all_assets") -> dg.DagsterRun:
        order = {"config": {"dataset": self.dataset, "flags": str(self.flags)}}
        ops = ["streams"] if job == "one_asset" else ["streams", "loads", "fine"]
        return self.page.launch(job, {"ops": dict.fromkeys(ops, order)})

    def failing(self, *assets: str) -> None:
        """From now on these fail, after they have written."""
        for path in self.flags.glob("fail *"):
            path.unlink()
        for asset in assets:
            (self.flags / f"fail {asset}").touch()

    def rows(self, *tables: str) -> list[int]:
        """How many rows there are in each."""
        return [self.reader.read(f"{self.dataset}.{each}").to_arrow().num_rows for each in tables]


@pytest.fixture
def story(page: Page, reader: BigQueryReader, dataset: str, tmp_path: Path) -> Story:
    return Story(page, reader, dataset, tmp_path)


def test_what_the_daemon_retries_lands_once(story: Story) -> None:
    story.failing("streams", "loads")
    first = story.begin()
    second = story.page.retry(first)
    story.failing()
    third = story.page.retry(second)
    assert [run.status for run in (first, second, third)] == [FAILED, FAILED, DONE]
    assert story.rows("streams", "loads", "fine") == [1, 1, 1]


def test_a_retry_of_all_steps_writes_none_again(story: Story, page: Page) -> None:
    story.failing("streams")
    first = story.begin()
    page.instance.add_run_tags(first.run_id, {"dagster/retry_strategy": "ALL_STEPS"})
    story.failing()
    assert page.retry(page.run(first.run_id)).status is DONE
    assert story.rows("streams", "loads", "fine") == [1, 1, 1]


def test_a_selection_from_a_retried_run_is_a_new_write(story: Story, page: Page) -> None:
    """The page copies the number of the retry, which must not make it one."""
    story.failing("streams")
    first = story.begin()
    retry = page.retry(first)
    chosen = page.again_steps(retry, "streams")
    assert chosen.tags["dagster/retry_number"] == retry.tags["dagster/retry_number"]
    story.failing()
    assert page.again_steps(chosen, "streams").status is DONE
    assert story.rows("streams", "fine") == [3, 1]


def test_a_retry_of_a_selection_lands_once(story: Story, page: Page) -> None:
    first = story.begin()
    story.failing("streams")
    chosen = page.again_steps(first, "streams")
    story.failing()
    assert page.retry(chosen).status is DONE
    assert story.rows("streams", "fine") == [2, 1]


@pytest.mark.parametrize("strategy", ["FROM_FAILURE", "FROM_ASSET_FAILURE"])
def test_from_failure_lands_once_and_all_again_writes_anew(
    story: Story, page: Page, strategy: str
) -> None:
    story.failing("streams", "loads")
    first = story.begin()
    second = page.again(first, strategy)
    story.failing()
    third = page.again(second, strategy)
    assert [run.status for run in (first, second, third)] == [FAILED, FAILED, DONE]
    assert story.rows("streams", "loads", "fine") == [1, 1, 1]
    assert page.again(third, "ALL_STEPS").status is DONE
    again = 2 if strategy == "FROM_FAILURE" else 1  # of which the third run knew nothing
    assert story.rows("streams", "loads", "fine") == [2, 2, again]


def test_all_again_is_a_new_write_after_a_failure_too(story: Story, page: Page) -> None:
    story.failing("streams")
    first = story.begin()
    story.failing()
    assert page.again(first, "ALL_STEPS").status is DONE
    assert story.rows("streams", "loads", "fine") == [2, 2, 2]


def test_of_assets_resumed_those_that_were_done_are_written_anew(story: Story, page: Page) -> None:
    """Their tag is copied to a re-execution of all; what it then goes on with is what failed."""
    story.failing("streams", "loads")
    first = story.begin()
    story.failing("loads")
    second = page.again(first, "FROM_ASSET_FAILURE")
    story.failing()
    third = page.again(second, "ALL_STEPS")
    assert third.tags["dagster/is_asset_resume_retry"] == "true"
    assert story.rows("streams", "loads", "fine") == [2, 1, 1]


def test_what_execute_job_does_from_failure_lands_once(story: Story, page: Page) -> None:
    """No tag says so. All steps, and steps that were done and are chosen, are new writes."""
    path = keyed_assets.__file__
    job = ReconstructableRepository.for_file(path, "defs").get_reconstructable_job("all_assets")

    def execute(options: dg.ReexecutionOptions) -> dg.DagsterRun:
        done = dg.execute_job(job, page.instance, reexecution_options=options)
        return page.run(done.run_id)

    story.failing("streams", "loads")
    first = story.begin()
    second = execute(dg.ReexecutionOptions.from_failure(first.run_id, page.instance))
    story.failing()
    third = execute(dg.ReexecutionOptions.from_failure(second.run_id, page.instance))
    assert [run.status for run in (first, second, third)] == [FAILED, FAILED, DONE]
    assert story.rows("streams", "loads", "fine") == [1, 1, 1]
    execute(dg.ReexecutionOptions(first.run_id))
    assert story.rows("streams", "loads", "fine") == [2, 2, 2]
    execute(dg.ReexecutionOptions(first.run_id, step_selection=["fine"]))
    execute(dg.ReexecutionOptions(third.run_id, step_selection=["streams"]))
    assert story.rows("streams", "loads", "fine") == [3, 2, 3]
