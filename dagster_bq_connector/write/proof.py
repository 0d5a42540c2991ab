"""Jobs that prove a write: their ids are made from its key, so that each runs with success once.

An attempt first inserts the job under the key's id. If one is there already, some attempt was here
before: its job is awaited, and its success is this write's success. A job that failed has changed
nothing, and the next id is taken. BigQuery keeps job ids for months, of the project that runs the
jobs; so the proof holds within that project.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.cloud import bigquery

from dagster_bq_connector.errors import (
    ConnectorError,
    Fault,
    RefusedError,
    classify,
    error_text,
    explain,
)
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.retry import PASSING, Backoff, rest_options
from dagster_bq_connector.table.admin import REST_ERRORS
from dagster_bq_connector.write.jobs import (
    Job,
    JobSettings,
    Running,
    cancel_all,
    check_rows,
    wait_for,
)
from dagster_bq_connector.write.key import other_purpose
from dagster_bq_connector.write.result import Operation, WriteMethod, WriteResult
from dagster_bq_connector.write.steps import step
from dagster_bq_connector.write.targets import Targets

PURPOSE, ATTEMPT, ROWS = "dagster_bq_write", "dagster_bq_attempt", "dagster_bq_rows"
# What may pass when the same work is done again by another job.
_AGAIN = PASSING | {Fault.STALE}


@dataclass(frozen=True)
class Work:
    """What one job of a write does.

    Attributes:
        name: What tells it from the other jobs of the write; empty when it has but one.
        key: The partition key that it stands for; empty when there is none.
        what: What it does, for errors.
        insert: Inserts the job under an id, with the labels that are given.
        rows: How many rows it writes; None when only the job will know.
        explained: Makes the error of its failure clearer, when it can.
        step: What its insertion is called.
    """

    name: str
    key: str
    what: str
    insert: Callable[[str, Mapping[str, str]], Job]
    rows: int | None
    explained: Callable[[ConnectorError], ConnectorError] = lambda error: error
    step: str = "insert job"


@dataclass(frozen=True)
class Proof:
    """A job that was done.

    Attributes:
        id: Its id.
        rows: How many rows it wrote.
        replayed: Whether another attempt's job had done it.
    """

    id: str
    rows: int
    replayed: bool


@dataclass
class _Try:
    """The job that stands for a work now."""

    work: Work
    running: Running
    ours: bool
    number: int = 0
    pauses: Iterator[float] | None = None


@dataclass
class Provers:
    """Runs the jobs of one write.

    Attributes:
        settings: Of the jobs.
        purpose: What the key is used for; see `purpose_of`.
        progress: Is told what is waited for.
        temporary: Whether the jobs fill what this attempt alone has, and so prove nothing: their
            ids are the attempt's, and a failure leaves nothing.
        proofs: The jobs that have succeeded, in the order of their works.
        done: The names of those works.
    """

    settings: JobSettings
    purpose: str
    progress: Progress
    temporary: bool = False
    proofs: list[Proof] = field(default_factory=list[Proof])
    done: list[str] = field(default_factory=list[str])

    def found(self, targets: Targets) -> list[Proof] | None:
        """The jobs of an earlier attempt, when all of them have succeeded.

        Raises:
            RefusedError: The columns of the table were others then, and the write is done in part;
                or a load brought other rows than were staged.
        """
        proofs = self._proofs([target.id for target in targets.targets])
        # The jobs of a write are inserted in their order.
        if proofs or not targets.others or not self._first(targets.others[0]):
            return proofs
        proofs = self._proofs(targets.others)
        standing = [job for name in targets.others if (job := self._standing(name))]
        if proofs or not standing:
            return proofs
        raise RefusedError(
            f"The columns of {targets.table} were others at an earlier attempt at this write, "
            f"which is done in part, or still under way, by {len(standing)} of "
            f"{len(targets.others)} jobs ({', '.join(str(job.job_id) for job in standing)}). "
            "Nothing was changed now: let these end, then write what is missing under another key."
        )

    def run(self, works: Sequence[Work]) -> list[Proof]:
        """Start all jobs, and wait until each is done.

        Raises:
            ConnectorError: A job failed. `proofs` has those that succeeded; the others are over.
        """
        tries: list[_Try] = []
        refused: ConnectorError | None = None
        try:
            for work in works:
                try:
                    tries.append(self._start(work, 0))
                except ConnectorError as error:
                    refused = error
                    break
            failures = self._finish(tries)
        except BaseException:  # Dagster's Terminate and Ctrl-C arrive as exceptions
            cancel_all([each.running for each in tries if each.ours])
            raise
        if refused:
            failures.append(refused)
        if failures:
            raise failures[0] if len(works) == 1 else self._unfinished(len(works), failures)
        return self.proofs

    def _finish(self, tries: Sequence[_Try]) -> list[ConnectorError]:
        failures: list[ConnectorError] = []
        for each in tries:
            state = f"{len(self.proofs)} of {len(tries)} jobs done"
            try:
                self.proofs.append(self._settle(each, state))
                self.done.append(each.work.key or each.work.name)
            except ConnectorError as error:
                failures.append(error)
        return failures

    def _unfinished(self, jobs: int, errors: Sequence[ConnectorError]) -> ConnectorError:
        named = self.done and not self.temporary
        done = f"Only {', '.join(self.done)} were written" if named else "Nothing was changed"
        texts = "\n".join(f"  {error}" for error in errors)
        error = RefusedError(
            f"{done}: {len(errors)} of {jobs} load jobs failed:\n{texts}"
            if self.temporary
            else f"{done}, of {jobs} partitions or tables; run the others again:\n{texts}"
        )
        error.__cause__ = errors[0]
        return error

    def _settle(self, each: _Try, state: str) -> Proof:
        """Wait for the success of a work, by one job or the next."""
        options: Any = rest_options(self.settings.deadline)
        while True:
            running = each.running
            try:
                wait_for(running.job, options, lambda: self.progress.wait(state))
                check_rows(running)
            except REST_ERRORS as error:
                self._pause(each, error)
                self._restart(each)
            else:
                return Proof(running.id, _rows(running.job), not each.ours)

    def _pause(self, each: _Try, error: Exception) -> None:
        """Wait before the next job, if another one may succeed where this has failed."""
        running = each.running
        failure = explain(error, f"{running.what} (job {running.id})")
        failure.__cause__ = error
        if running.job.error_result is None:  # how it ended is not known
            raise failure
        if not each.ours:
            return  # an earlier attempt's, of which nothing is left
        if each.pauses is None:
            each.pauses = Backoff(initial=1.0, deadline=self.settings.deadline).pauses()
        pause = next(each.pauses, None) if classify(error) in _AGAIN else None
        if pause is None:
            raise each.work.explained(failure)
        self.progress.wait(f"trying again in {pause:.0f} s: {error_text(error)}")
        time.sleep(pause)

    def _restart(self, each: _Try) -> None:
        again = self._start(each.work, each.number + 1)
        each.running, each.ours, each.number = again.running, again.ours, again.number

    def _start(self, work: Work, number: int) -> _Try:
        """Insert the job under the first id that is free, or adopt one that has not failed."""
        labels = dict(self.settings.labels) | {
            PURPOSE: self.purpose,
            ATTEMPT: self.settings.key.attempt,
        }
        if work.rows is not None:
            labels[ROWS] = str(work.rows)
        name_of = self.settings.job_id if self.temporary else self.settings.proof_id
        while True:
            job_id = name_of(work.name, number)
            with step(work.step):
                job = self._insert(work, job_id, labels)
            self._check_purpose(job)
            ours = job.labels.get(ATTEMPT) == self.settings.key.attempt
            if ours or job.error_result is None:
                return _Try(work, Running(job_id, job, work.what, _staged(job)), ours, number)
            number += 1

    def _insert(self, work: Work, job_id: str, labels: Mapping[str, str]) -> Job:
        try:
            return work.insert(job_id, labels)
        except ConnectorError as error:
            explained = work.explained(error)
            raise explained from (error if explained is not error else error.__cause__)

    def _proofs(self, names: Sequence[str]) -> list[Proof] | None:
        """The jobs that have done works, when there is one for each."""
        proofs = list[Proof]()
        for name in names:
            job = self._standing(name)
            if job is None or job.state != "DONE":
                return None
            job_id = str(job.job_id)
            check_rows(Running(job_id, job, "The load of an earlier attempt", _staged(job)))
            proofs.append(Proof(job_id, _rows(job), True))
        return proofs

    def _first(self, name: str) -> Job | None:
        """The first job of an earlier attempt for a work, however it ended."""
        return self._look_up(self.settings.proof_id(name, 0))

    def _standing(self, name: str) -> Job | None:
        """The job of an earlier attempt that has done a work, or is at it."""
        number = 0
        while (job := self._look_up(self.settings.proof_id(name, number))) is not None:
            self._check_purpose(job)
            if job.error_result is None:
                return job
            number += 1
        return None

    def _look_up(self, job_id: str) -> Job | None:
        client = self.settings.client
        options: Any = rest_options(self.settings.deadline)
        try:
            job: Any = client.get_job(job_id, location=self.settings.location, **options)
        except REST_ERRORS as error:
            if getattr(error, "code", None) == 404:
                return None
            raise explain(error, f"Job {job_id}") from error
        return job

    def _check_purpose(self, job: Job) -> None:
        if job.labels.get(PURPOSE) != self.purpose:
            raise other_purpose(self.settings.key, f"job {job.job_id}")


def _staged(job: Job) -> int | None:
    """How many rows the attempt that inserted a job had for it, if that is known."""
    return int(job.labels[ROWS]) if ROWS in job.labels else None


def _rows(job: Job) -> int:
    """How many rows a job wrote: by its label, else by what BigQuery says of a load."""
    if (staged := _staged(job)) is not None:
        return staged
    return int(job.output_rows or 0) if isinstance(job, bigquery.LoadJob) else 0


@dataclass
class Outcome:
    """What is known of a write by jobs, for its result.

    Attributes:
        method: How the rows go.
        targets: Where they go.
        operation: What is done.
        bytes: Bytes that were sent or staged.
        jobs: The ids of the jobs before the proofs.
        counts: Rows by partition key, as far as BigQuery counted them.
    """

    method: WriteMethod
    targets: Targets
    operation: Operation
    bytes: int = 0
    jobs: list[str] = field(default_factory=list[str])
    counts: Mapping[str, int] = field(default_factory=dict[str, int])

    def result(self, proofs: Sequence[Proof]) -> WriteResult:
        """What was written, by the jobs that prove it."""
        targets = self.targets
        same = len(proofs) == len(targets.targets)  # and not those of other columns
        by_target = {
            target.key: proof.rows
            for target, proof in zip(targets.targets if same else [], proofs, strict=same)
            if target.key
        }
        replayed = all(proof.replayed for proof in proofs)
        counted = {} if replayed else self.counts or dict(targets.counts)
        return WriteResult(
            table=targets.table,
            method=self.method,
            operation=self.operation,
            rows=sum(proof.rows for proof in proofs),
            bytes=self.bytes,
            columns=targets.columns,
            partitions=counted or by_target,
            jobs=[*self.jobs, *(proof.id for proof in proofs)],
            replayed=replayed,
        )
