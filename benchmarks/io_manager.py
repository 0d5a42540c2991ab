"""The IO manager against that of dagster-gcp-pandas, on the same local BigQuery.

The local BigQuery is another process, so that CPU seconds are those of the client. Dagster's own
work around an IO manager is left out: its methods are called as Dagster calls them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import dagster as dg
import google.auth
import google.auth.credentials
import pandas as pd
import polars as pl
import pyarrow as pa
from dagster_gcp_pandas import BigQueryPandasIOManager
from google.cloud import bigquery as google_bigquery

from benchmarks.data import batches
from dagster_bq_connector import BigQueryIOManager, BigQueryResource, FileLoadsWriter
from dagster_bq_connector.local import LocalBigQuery
from dagster_bq_connector.resources import Connected

ROWS = 200_000
DATASET = "bench"


@contextmanager
def managers() -> Iterator[tuple[Any, Any]]:
    """Ours and theirs."""
    with LocalBigQuery() as local:
        at = local.environment
        bigquery = BigQueryResource(
            project=at["GOOGLE_CLOUD_PROJECT"],
            location="US",
            api_endpoint=at["BIGQUERY_EMULATOR_HOST"],
            storage_endpoint=f"http://{at['BIGQUERY_STORAGE_EMULATOR_HOST']}",
            cloud_storage_endpoint=at["STORAGE_EMULATOR_HOST"],
        )
        connected = bigquery.connect()
        connected.clients.cloud_storage(connected.project).create_bucket("staging")
        connected.rest.create_dataset(DATASET)
        writer = FileLoadsWriter(bigquery=bigquery, staging="gs://staging/bench")
        with _google_at(at["BIGQUERY_EMULATOR_HOST"], connected):
            theirs = BigQueryPandasIOManager(project=connected.project, dataset=DATASET)
            yield (
                BigQueryIOManager(writer=writer, dataset=DATASET),
                theirs.create_io_manager(None),
            )


@contextmanager
def _google_at(endpoint: str, connected: Connected) -> Iterator[None]:
    """Google's client without configuration, as theirs makes it, at the local BigQuery.

    It reads through the Storage API there, as it would on the service.
    """
    login = google.auth.credentials.AnonymousCredentials(), connected.project
    read = connected.clients._read_for_rest
    with (
        mock.patch.dict(os.environ, {"BIGQUERY_EMULATOR_HOST": endpoint}),
        mock.patch.object(google.auth, "default", lambda *_, **__: login),
        mock.patch.object(
            google_bigquery.Client, "_ensure_bqstorage_client", lambda *_, **__: read()
        ),
    ):
        yield


def _output(name: str) -> dg.OutputContext:
    return dg.build_output_context(asset_key=dg.AssetKey(name), resource_config=_config())


def _input(name: str, kind: type) -> dg.InputContext:
    return dg.build_input_context(
        asset_key=dg.AssetKey(name),
        upstream_output=_output(name),
        dagster_type=dg.PythonObjectDagsterType(kind),
        resource_config=_config(),
    )


def _config() -> dict[str, Any]:
    return {"project": "local-project", "dataset": DATASET}


def io_manager() -> None:
    table = pa.Table.from_batches(batches(ROWS))
    frames = {
        "Arrow": table,
        "Polars": pl.from_arrow(table),
        "pandas": table.to_pandas(types_mapper=pd.ArrowDtype),
    }
    plain = table.to_pandas()
    with managers() as (ours, theirs):
        print(f"IO manager, {ROWS:,} rows, local BigQuery:")
        ours.handle_output(_output("warm"), table.slice(0, 10))  # opens the clients
        theirs.handle_output(_output("warm_theirs"), plain.head(10))
        other = measure(
            "out: dagster-gcp-pandas", lambda: theirs.handle_output(_output("theirs"), plain)
        )
        for form, frame in frames.items():
            best = measure(f"out: ours, {form}", lambda: ours.handle_output(_output("ours"), frame))
            print(f"    {other / best:.1f} times less client CPU")
        other = measure(
            "in: dagster-gcp-pandas", lambda: theirs.load_input(_input("theirs", pd.DataFrame))
        )
        for form, frame in frames.items():
            kind = type(frame)
            best = measure(f"in: ours, {form}", lambda: ours.load_input(_input("ours", kind)))
            print(f"    {other / best:.1f} times less client CPU")
