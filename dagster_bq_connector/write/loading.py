"""Files are put into their targets: by one load job each, or by several and one copy.

What is more than a load job takes is loaded into temporary tables, and one copy job puts these into
the target. The steps of an attempt, and what is left when the process dies between them:

    1. the temporary tables are made, in the dataset of the target and like it
                                          they are dropped by BigQuery a day later
    2. load jobs fill them                the same; the target is as it was
    3. one copy job, under an id that all attempts share (see proof.py)
                                          BigQuery ends it by itself, with all of it or nothing
    4. the temporary tables are dropped   they are dropped by BigQuery a day later
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.cloud import bigquery

from dagster_bq_connector.errors import UnsupportedError, explain
from dagster_bq_connector.retry import rest_options
from dagster_bq_connector.table.admin import REST_ERRORS
from dagster_bq_connector.table.ref import TableRef
from dagster_bq_connector.write.bucket import File
from dagster_bq_connector.write.jobs import PARQUET, JobSettings, Source, start_copy, start_load
from dagster_bq_connector.write.load_errors import load_error
from dagster_bq_connector.write.load_pace import note_end, note_loads
from dagster_bq_connector.write.parts import in_parts, rows_in, temporary_load
from dagster_bq_connector.write.proof import Outcome, Provers, Work
from dagster_bq_connector.write.targets import Target, Targets
from dagster_bq_connector.write.transaction import StagingTables

MAX_COPY_SOURCES = 1_200  # tables of one copy job, as BigQuery limits them


@dataclass(frozen=True)
class Loading:
    """How files are put into place.

    Attributes:
        provers: Runs the jobs that put them there; it has their proofs afterwards.
        targets: Where they go.
        source: What they are.
        if_empty: Whether a target that has rows is refused.
    """

    provers: Provers
    targets: Targets
    source: Source = PARQUET
    if_empty: bool = False

    def run(self, files: Mapping[str, Sequence[File]], outcome: Outcome) -> None:
        """Put files into place.

        Args:
            files: The files of each target, by its id.
            outcome: Is told of the jobs before the proofs.

        Raises:
            UnsupportedError: They are more than one write takes. No job was started.
            ConfigurationError: The files are elsewhere than the dataset. Nothing was changed.
            SourceFileError: A file is missing, or cannot be read. Nothing was changed.
            RefusedError: BigQuery failed a job. Of several targets, the error says which were
                written.
        """
        plan = {target.id: in_parts(files[target.id]) for target in self.targets.targets}
        for target in self.targets.targets:
            _check_parts(target, len(plan[target.id]))
        tables = StagingTables(self._settings)
        self._note_pace()
        try:
            copies = self._fill(plan, tables, outcome)
            self.provers.run(
                [
                    copies[target.id] if target.id in copies else self._load(target, plan)
                    for target in self.targets.targets
                ]
            )
        finally:
            for table in {target.ref.at(None) for target in self.targets.targets}:
                note_end(table)
            tables.drop()

    @property
    def _settings(self) -> JobSettings:
        return self.provers.settings

    def _note_pace(self) -> None:
        by_table = dict[TableRef, list[Target]]()
        for target in self.targets.targets:
            by_table.setdefault(target.ref.at(None), []).append(target)
        for table, targets in by_table.items():
            if warning := note_loads(table, len(targets), targets[0].unchanged):
                self._settings.warn(warning)

    def _load(self, target: Target, plan: Mapping[str, list[list[File]]]) -> Work:
        """The load of a target's files by one job."""
        [files] = plan[target.id]
        disposition = self._disposition(target)
        if disposition == bigquery.WriteDisposition.WRITE_TRUNCATE and not target.ref.partition:
            disposition = bigquery.WriteDisposition.WRITE_TRUNCATE_DATA  # schema and keys stay
        uris, destination = [file.uri for file in files], target.ref.to_api()

        def insert(job_id: str, labels: Mapping[str, str]) -> bigquery.LoadJob:
            config = self._settings.load_config(
                self.targets.columns, disposition, labels, self.source
            )
            return start_load(self._settings, uris, destination, config, job_id)

        what = f"Load into {target.ref}"
        return Work(target.id, target.key, what, insert, rows_in(files), load_error)

    def _fill(
        self, plan: Mapping[str, list[list[File]]], tables: StagingTables, outcome: Outcome
    ) -> Mapping[str, Work]:
        """Load what is too much for one job into temporary tables. Gives the copies that remain."""
        large = [target for target in self.targets.targets if len(plan[target.id]) > 1]
        filled, loads = dict[str, list[TableRef]](), list[Work]()
        for target in large:
            table = self._table(target)
            filled[target.id] = []
            for part in plan[target.id]:
                name = f"part_{len(loads)}"
                made = tables.create_like(target, table, len(filled[target.id]))
                ref = made.at(target.ref.partition)
                loads.append(
                    temporary_load(self._settings, ref, table.schema, part, self.source, name)
                )
                filled[target.id].append(ref)
        if not loads:
            return {}
        settings, purpose = self._settings, self.provers.purpose
        loaders = Provers(settings, purpose, self.provers.progress, temporary=True)
        proofs = iter(loaders.run(loads))
        outcome.jobs += [proof.id for proof in loaders.proofs]
        copies = dict[str, Work]()
        for target in large:
            rows = {ref: next(proofs).rows for ref in filled[target.id]}
            copies[target.id] = self._copy(target, rows)
        return copies

    def _copy(self, target: Target, tables: Mapping[TableRef, int]) -> Work:
        """The copy of temporary tables, with their rows, into a target."""
        # A partition without rows may not exist.
        refs = [ref for ref, rows in tables.items() if rows] or list(tables)[:1]
        sources, destination = [ref.to_api() for ref in refs], target.ref.to_api()

        def insert(job_id: str, labels: Mapping[str, str]) -> bigquery.CopyJob:
            config = bigquery.CopyJobConfig(
                write_disposition=self._disposition(target),
                create_disposition=bigquery.CreateDisposition.CREATE_NEVER,
                labels=dict(labels),
            )
            if target.encryption is not None:
                config.destination_encryption_configuration = target.encryption
            return start_copy(self._settings, sources, destination, config, job_id)

        what, rows = f"Copy into {target.ref}", sum(tables.values())
        return Work(target.id, target.key, what, insert, rows, load_error)

    def _disposition(self, target: Target) -> str:
        if self.if_empty:
            return bigquery.WriteDisposition.WRITE_EMPTY
        if self._settings.operation == "append":
            return bigquery.WriteDisposition.WRITE_APPEND
        return bigquery.WriteDisposition.WRITE_TRUNCATE

    def _table(self, target: Target) -> bigquery.Table:
        options: Any = rest_options(self._settings.deadline)
        try:
            return self._settings.client.get_table(target.ref.at(None).to_api(), **options)
        except REST_ERRORS as error:
            raise explain(error, f"Table {target.ref}") from error


def _check_parts(target: Target, parts: int) -> None:
    """Refuse, before any job, more than one copy can put into place.

    Raises:
        UnsupportedError: It is more.
    """
    if parts > MAX_COPY_SOURCES:
        raise UnsupportedError(
            f"{target.ref}: the files are {parts:,} load jobs, and one copy takes the tables of "
            f"{MAX_COPY_SOURCES:,}. Nothing was changed: write fewer rows at a time, or load fewer "
            "and larger files."
        )
