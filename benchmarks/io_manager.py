"""The IO manager against that of dagster-gcp-pandas, on the same local BigQuery.

The local BigQuery is another process, so that CPU seconds are those of the client. Dagster's own
work around an IO manager is left out: its methods are called as Dagster calls them.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
from google.cloud.bigquery_storage_v1 import types

from benchmarks.data import batches
from benchmarks.report import Call, Report
from dagster_bq_connector import (
    BigQueryIOManager,
    BigQueryReader,
    BigQueryResource,
    FileLoadsWriter,
)
from dagster_bq_connector.local import LocalBigQuery
from dagster_bq_connector.read.stream import METHOD
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

    def _read(*_: object, **__: object) -> Any:
        return connected.clients._read_for_rest()

    with (
        mock.patch.dict(os.environ, {"BIGQUERY_EMULATOR_HOST": endpoint}),
        mock.patch.object(google.auth, "default", return_value=login),
        mock.patch.object(google_bigquery.Client, "_ensure_bqstorage_client", side_effect=_read),
    ):
        yield


def output_of(name: str) -> dg.OutputContext:
    return dg.build_output_context(
        name="result", asset_key=dg.AssetKey(name), resource_config=_config()
    )


def _input(name: str, kind: type) -> dg.InputContext:
    return dg.build_input_context(
        asset_key=dg.AssetKey(name),
        upstream_output=output_of(name),
        dagster_type=dg.PythonObjectDagsterType(kind),
        resource_config=_config(),
    )


def _config() -> dict[str, Any]:
    return {"project": "local-project", "dataset": DATASET}


def run(report: Report) -> None:
    table = pa.Table.from_batches(batches(ROWS))
    polars, plain = pl.from_arrow(table), table.to_pandas()
    frames = {
        "Arrow": table,
        "Polars": polars,
        "pandas": table.to_pandas(types_mapper=pd.ArrowDtype),
    }
    with managers() as (ours, theirs):
        report.section(f"IO manager, {ROWS:,} rows, local BigQuery")
        out = {
            "out: dagster-gcp-pandas": _call(
                theirs.handle_output, lambda: output_of("theirs"), plain
            )
        }
        into = {
            "in: dagster-gcp-pandas": _call(
                theirs.load_input, lambda: _input("theirs", pd.DataFrame)
            )
        }
        for form, frame in frames.items():
            kind = type(frame)
            out[f"out: ours, {form}"] = _call(ours.handle_output, lambda: output_of("ours"), frame)
            into[f"in: ours, {form}"] = _call(ours.load_input, partial(_input, "ours", kind))
        into["in: gRPC alone, nothing parsed"] = Call(partial(_drain, ours, "ours"), ROWS)
        for calls in (out, into):
            other, *best = report.compare(calls, repeats=3).items()
            for name, figure in best:
                aim = 10 if name in ("in: ours, Arrow", "in: ours, Polars") else None
                ratio = figure.rows_cpu / other[1].rows_cpu
                report.result(f"{name}, less client CPU", ratio, " times", aim)


def _drain(ours: Any, name: str) -> None:
    """Receive the bytes of a table, which is the least that a read takes."""
    bigquery = ours.writer.bigquery
    [session] = BigQueryReader(bigquery=bigquery).read(f"{DATASET}.{name}").sessions
    method = bigquery.connect().clients.channel.unary_stream(METHOD)
    for stream in session.streams:
        for _ in method(types.ReadRowsRequest.serialize(types.ReadRowsRequest(read_stream=stream))):
            pass


def _call(method: Any, context: Callable[[], Any], *arguments: Any) -> Call:
    """A method with a context that was never used."""
    return Call(method, ROWS, prepare=lambda: (context(), *arguments))
