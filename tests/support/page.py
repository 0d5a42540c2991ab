"""Dagster's page, as far as it launches runs: what it asks of the webserver, asked without one."""

import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import dagster as dg
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import PythonFileTarget
from dagster._daemon.auto_run_reexecution.auto_run_reexecution import retry_run
from dagster_graphql.cli import execute_query

TESTS = Path(__file__).parents[1]
# Runs are started at once: no daemon takes them from a queue.
AT_ONCE = {
    "run_coordinator": {
        "module": "dagster._core.run_coordinator",
        "class": "DefaultRunCoordinator",
    },
    "telemetry": {"enabled": False},
}
IN_THIS_PROCESS = {
    "run_launcher": {
        "module": "dagster._core.launcher.sync_in_memory_run_launcher",
        "class": "SyncInMemoryRunLauncher",
    }
}
# What the page gives for parameters: see `getReexecutionVariables` in its source.
LAUNCH = """
mutation Launch($executionParams: ExecutionParams!) {
  launched: launchRun(executionParams: $executionParams) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
  }
}
"""
RELAUNCH = """
mutation Relaunch($executionParams: ExecutionParams, $reexecutionParams: ReexecutionParams) {
  launched: launchRunReexecution(
    executionParams: $executionParams, reexecutionParams: $reexecutionParams
  ) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
  }
}
"""
TERMINATE = """
mutation Terminate($runId: String!) {
  terminateRun(runId: $runId) { __typename ... on PythonError { message } }
}
"""
NOT_COPIED = ("dagster/is_resume_retry", "dagster/step_selection")


class Page:
    """A workspace of one file, and an instance that is gone afterwards."""

    def __init__(self, path: Path, overrides: dict[str, Any] | None = None) -> None:
        self._path, self._overrides, self._stack = path, overrides, ExitStack()

    def __enter__(self) -> Self:
        # A process of a run that was terminated may still write there when the tests are over.
        home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.instance = self._stack.enter_context(
            dg.DagsterInstance.local_temp(
                self._stack.enter_context(home), AT_ONCE | (self._overrides or {})
            )
        )
        target = PythonFileTarget(str(self._path), None, str(TESTS), "tests")
        self._workspace = self._stack.enter_context(WorkspaceProcessContext(self.instance, target))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def launch(self, job: str, config: dict[str, Any], **tags: str) -> dg.DagsterRun:
        """Run a job, and wait for its end where runs are of this process."""
        params = {
            "selector": self._selector(job),
            "runConfigData": json.dumps(config),
            "executionMetadata": {"tags": [{"key": k, "value": v} for k, v in tags.items()]},
        }
        return self._launched(LAUNCH, {"executionParams": params})

    def again(self, run: dg.DagsterRun, strategy: str) -> dg.DagsterRun:
        """Re-execute by a strategy: `ALL_STEPS`, `FROM_FAILURE` or `FROM_ASSET_FAILURE`."""
        params = {"parentRunId": run.run_id, "strategy": strategy}
        return self._launched(RELAUNCH, {"reexecutionParams": params})

    def again_steps(self, run: dg.DagsterRun, *steps: str) -> dg.DagsterRun:
        """Re-execute the steps that somebody has selected."""
        family = {
            "dagster/parent_run_id": run.run_id,
            "dagster/root_run_id": run.root_run_id or run.run_id,
            "dagster/step_selection": ",".join(steps),
        }
        tags = {k: v for k, v in run.tags.items() if k not in NOT_COPIED} | family
        params = {
            "selector": self._selector(run.job_name),
            "runConfigData": json.dumps(run.run_config),
            "stepKeys": list(steps),
            "executionMetadata": {
                "parentRunId": run.run_id,
                "rootRunId": run.root_run_id or run.run_id,
                "tags": [{"key": key, "value": value} for key, value in tags.items()],
            },
        }
        return self._launched(RELAUNCH, {"executionParams": params})

    def retry(self, run: dg.DagsterRun) -> dg.DagsterRun:
        """What the daemon does for a run that failed and has retries left."""
        retry_run(run, self._workspace)
        return self.run(self.run(run.run_id).tags["dagster/auto_retry_run_id"])

    def terminate(self, run: dg.DagsterRun) -> None:
        """Press Terminate."""
        answer = execute_query(self._workspace, TERMINATE, {"runId": run.run_id})
        assert answer["data"]["terminateRun"]["__typename"] == "TerminateRunSuccess", answer

    def run(self, run_id: str) -> dg.DagsterRun:
        """A run as it is now."""
        run = self.instance.get_run_by_id(run_id)
        assert run is not None
        return run

    def ended(self, run: dg.DagsterRun, seconds: float = 120) -> dg.DagsterRun:
        """Wait for the end of a run."""
        end = time.monotonic() + seconds
        while not (now := self.run(run.run_id)).is_finished:
            assert time.monotonic() < end, now.status
            time.sleep(0.1)
        return now

    def _launched(self, mutation: str, variables: dict[str, Any]) -> dg.DagsterRun:
        answer = execute_query(self._workspace, mutation, variables)
        assert answer["data"]["launched"]["__typename"] == "LaunchRunSuccess", answer
        return self.run(answer["data"]["launched"]["run"]["runId"])

    def _selector(self, job: str) -> dict[str, Any]:
        context = self._workspace.create_request_context()
        [location] = context.code_locations
        [repository] = location.get_repositories()
        return {
            "repositoryLocationName": location.name,
            "repositoryName": repository,
            "pipelineName": job,
        }
