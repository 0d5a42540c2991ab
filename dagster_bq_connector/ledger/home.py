"""A ledger's home, as one text names it."""

from __future__ import annotations

import re

from dagster_bq_connector.clients import Clients
from dagster_bq_connector.errors import ConfigurationError
from dagster_bq_connector.ledger.bigquery import DATASET, BigQueryLedger
from dagster_bq_connector.ledger.cloud_storage import CloudStorageLedger
from dagster_bq_connector.ledger.entry import Ledger

_DATASET = re.compile(r"(?:(?P<project>[A-Za-z0-9.:_-]+)\.)?(?P<dataset>[A-Za-z0-9_]+)")


def open_ledger(
    clients: Clients,
    project: str,
    home: str = DATASET,
    location: str | None = None,
    create: bool = True,
    deadline: float = 300.0,
) -> Ledger:
    """The ledger at `home`; nothing is reached yet.

    Args:
        clients: Where its client is taken from.
        project: Who calls, and whose dataset it is when `home` names no project.
        home: `dataset`, `project.dataset` or `gs://bucket/prefix`.
        location: Where a missing dataset is made.
        create: Make a missing dataset.
        deadline: Seconds that a call may go on without success.

    Raises:
        ConfigurationError: `home` is none of these, or there is no client for it.
    """
    if home.startswith("gs://"):
        return CloudStorageLedger(clients.cloud_storage(project), home, deadline)
    if (found := _DATASET.fullmatch(home)) is None:
        raise ConfigurationError(
            f"ledger={home!r}: write a dataset, project.dataset or gs://bucket/prefix."
        )
    client = clients.rest(project, location)
    owner = found["project"] or project
    return BigQueryLedger(client, owner, found["dataset"], location, create, deadline)
