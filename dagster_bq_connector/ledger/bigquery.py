"""The ledger's home without set-up: tiny tables of a hidden dataset, JSON in the description."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

from google.api_core.exceptions import NotFound, PreconditionFailed
from google.cloud import bigquery

from dagster_bq_connector.errors import (
    DatasetNotFoundError,
    Fault,
    LedgerError,
    classify,
    error_text,
    explain,
)
from dagster_bq_connector.ledger.entry import Key, Kind, Ledger, is_gone, kind_of
from dagster_bq_connector.retry import Backoff, rest_options
from dagster_bq_connector.table.admin import REST_ERRORS

DATASET = "_dagster_bq"  # hidden in Google's console, as all that begin with an underscore
MAX_DOCUMENT = 16_384  # characters of a description (BigQuery's quotas page)
# A run is repeated within days, while who keeps a project's history looks back a month or two.
# BigQuery's sandbox keeps no table longer.
WRITE_LIFE = datetime.timedelta(days=60)


class BigQueryLedger(Ledger):
    """A table a key, without rows; its etag is what is compared.

    Reading and changing metadata is free, and takes a tenth of a second. BigQuery takes 5 changes
    of a table's metadata in 10 seconds; what is too much waits.

    Tables of writes expire 60 days after their last change: a long write may go on for longer, and
    without its entry it would begin anew. Those of streams never do: a change takes away the
    expiration that a dataset gives to its tables.
    """

    def __init__(
        self,
        client: bigquery.Client,
        project: str,
        dataset: str = DATASET,
        location: str | None = None,
        create: bool = True,
        deadline: float = 300.0,
    ) -> None:
        """Use `project.dataset`; nothing is reached yet.

        Args:
            client: Calls BigQuery. No job is run.
            project: The project of the dataset.
            dataset: Holds nothing but the ledger.
            location: Where a missing dataset is made; where the client's jobs run when None.
            create: Make the dataset when it is missing.
            deadline: Seconds that a call may go on without success.
        """
        super().__init__(deadline)
        self._client, self._create, self._location = client, create, location or client.location
        self._dataset = bigquery.DatasetReference(project, dataset)
        self._patient: Any = rest_options(deadline)
        # A repeated change must be looked at before it is repeated again: not by Google's client.
        self._once: Any = {**self._patient, "retry": None}

    def place(self, name: str) -> str:
        """The table's address."""
        return f"{self._dataset.project}.{self._dataset.dataset_id}.{name}"

    def _read(self, name: str) -> tuple[str, str] | None:
        try:
            table = self._client.get_table(self._dataset.table(name), **self._once)
        except NotFound as error:
            if not is_gone(error):
                raise
            if classify(error) is Fault.DATASET_MISSING and not self._create:
                raise self._missing(error) from error
            return None
        return table.description or "", str(table.etag)

    def _put(self, key: Key, document: str, token: str | None) -> str:
        if len(document) > MAX_DOCUMENT:
            raise LedgerError(
                f"Ledger entry {key} takes {len(document):,} characters, and the description of a "
                f"table ({self.place(key.name)}) holds {MAX_DOCUMENT:,}: keep the ledger in Cloud "
                'Storage, which takes any size: ledger="gs://bucket/prefix".'
            )
        table = bigquery.Table(self._dataset.table(key.name))
        table.description = document
        if key.kind == "write":
            table.expires = datetime.datetime.now(datetime.UTC) + WRITE_LIFE
        if token is None:
            return self._insert(table)
        changed = bigquery.Table.from_api_repr({**table.to_api_repr(), "etag": token})
        fields = ["description", "expires"]  # None takes it away
        return str(self._client.update_table(changed, fields, **self._once).etag)

    def _insert(self, table: bigquery.Table) -> str:
        def insert() -> str:
            return str(self._client.create_table(table, **self._once).etag)

        try:
            return insert()
        except NotFound as error:
            if classify(error) is not Fault.DATASET_MISSING:
                raise
            self._create_dataset(error)
        return Backoff(deadline=self._deadline).call(insert, repeat_on={Fault.DATASET_MISSING})

    def _create_dataset(self, missing: NotFound) -> None:
        """Make it. Losing that race is success."""
        if not self._create:
            raise self._missing(missing) from missing
        dataset = bigquery.Dataset(self._dataset)
        dataset.location = self._location
        dataset.description = "The ledger of dagster-bq-connector: an entry a table. Keep it."
        try:
            self._client.create_dataset(dataset, **self._patient)
        except REST_ERRORS as error:
            if classify(error) is Fault.TAKEN:
                return
            if classify(error) is Fault.DENIED:
                raise self._missing(error) from error
            raise explain(error, f"Dataset {self._dataset}") from error

    def _missing(self, error: Exception) -> DatasetNotFoundError:
        project, name = self._dataset.project, self._dataset.dataset_id
        location = self._location or "US"
        return DatasetNotFoundError(
            f"The ledger's dataset {project}.{name} does not exist, and was not to be created or "
            f"could not be. Create it (bq mk --location={location} --dataset {project}:{name}) and "
            "grant bigquery.tables.get, .create, .update, .list and .delete on it "
            f"(roles/bigquery.dataEditor). BigQuery said: {error_text(error)}"
        )

    def _remove(self, name: str, token: str) -> None:
        """BigQuery deletes without a condition: the etag is compared just before."""
        reference = self._dataset.table(name)
        if self._client.get_table(reference, **self._once).etag != token:
            raise PreconditionFailed(f"{self.place(name)} has changed.")
        self._client.delete_table(reference, **self._once)

    def _names(self, kind: Kind) -> Iterator[str]:
        try:
            for table in self._client.list_tables(self._dataset, **self._patient):
                if kind_of(table.table_id) == kind:
                    yield table.table_id
        except REST_ERRORS as error:
            if is_gone(error):
                if self._create:
                    return
                raise self._missing(error) from error
            raise explain(error, f"Dataset {self._dataset}") from error
