"""Whole writes against what a user would otherwise do, on the same local BigQuery.

The local BigQuery is another process, so that CPU seconds and memory are those of the client.
Most of the time by the clock is the local BigQuery's own.
"""

import io
import multiprocessing
import os
import tempfile
import threading
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import dlt
import fastavro
import google.auth.credentials
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from dlt.common.configuration.specs import GcpServiceAccountCredentials
from google.cloud import bigquery

from benchmarks.data import batches
from benchmarks.io_manager import DATASET, managers, output_of
from benchmarks.read import resident
from benchmarks.report import Call, Report
from dagster_bq_connector import ExactlyOnceWriter, FileLoadsWriter

ROWS = 200_000
MEMORY_ROWS = 1_000_000
AVRO_ROWS = 20_000
MIB = 1024 * 1024
OTHERS = ("dagster-gcp-pandas' IO manager", "`load_table_from_dataframe`", "dlt, Parquet")
Ways = dict[str, Callable[[Any], object]]
# No telemetry; and the local BigQuery does not take the files of dlt's own tables compressed.
DLT = {"RUNTIME__DLTHUB_TELEMETRY": "false", "DATA_WRITER__DISABLE_COMPRESSION": "true"}


def run(report: Report) -> None:
    report.section(f"Whole writes, {ROWS:,} rows, local BigQuery")
    with _ways() as ways:
        inputs = _inputs(ways, ROWS)
        calls = {name: Call(partial(way, inputs[name]), ROWS) for name, way in ways.items()}
        figures = report.compare(calls, 3)
    for name in [name for name in figures if name not in OTHERS]:
        for other in OTHERS:
            ratio = figures[name].rows_cpu / figures[other].rows_cpu
            report.result(f"{name}, less client CPU than {other}", ratio, " times")
            ratio = figures[name].rows / figures[other].rows
            report.result(f"{name}, faster by the clock than {other}", ratio, " times")
    report.section(f"Whole writes, memory, {MEMORY_ROWS:,} rows")
    size = pa.Table.from_batches(batches(MEMORY_ROWS)).nbytes / MIB
    report.result("the rows, as Arrow", size, " MiB")
    for name in figures:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            report.result(f"{name}, grew by", fresh.submit(_growth, name).result(), " MiB")
    _staging(report)


@contextmanager
def _ways() -> Iterator[Ways]:
    """How rows get into a table: what others offer, and each method of ours."""
    with managers() as (ours, theirs), _pipeline(ours.writer.bigquery.project) as pipeline:
        loads: FileLoadsWriter = ours.writer
        once = ExactlyOnceWriter(bigquery=loads.bigquery)
        client = loads.bigquery.connect().rest
        settings = {"write_disposition": "replace", "loader_file_format": "parquet"}
        yield {
            OTHERS[0]: lambda frame: theirs.handle_output(output_of("theirs"), frame),
            OTHERS[1]: lambda frame: _load(client, frame),
            OTHERS[2]: lambda rows: pipeline.run(rows, table_name="loaded", **settings),
            "FileLoadsWriter.append": lambda rows: loads.append(rows, f"{DATASET}.loaded"),
            "FileLoadsWriter.replace": lambda rows: loads.replace(rows, f"{DATASET}.replaced"),
            "ExactlyOnceWriter.append": lambda rows: once.append(
                rows, f"{DATASET}.streamed", key=uuid.uuid4().hex
            ),
            "ExactlyOnceWriter.replace": lambda rows: once.replace(
                rows, f"{DATASET}.restreamed", key=uuid.uuid4().hex
            ),
        }


def _inputs(ways: Iterable[str], rows: int) -> dict[str, Any]:
    """The same rows for each way: a DataFrame for those that take no other."""
    table = pa.Table.from_batches(batches(rows))
    return {name: table.to_pandas() if name in OTHERS[:2] else table for name in ways}


def _staging(report: Report) -> None:
    """Files for load jobs: Parquet as it is staged, against Avro as it is usually made."""
    report.section("Files for load jobs, 12 mixed columns")
    table = pa.Table.from_batches(batches(AVRO_ROWS))
    large = pa.Table.from_batches(batches(ROWS))
    figures = report.compare(
        {
            "fastavro, from Arrow": Call(lambda: _avro(table), AVRO_ROWS),
            "ours, Parquet": Call(lambda: _parquet(large), ROWS),
        },
        3,
    )
    avro, parquet = figures.values()
    report.result(
        "rows a CPU second, of fastavro's", parquet.rows_cpu / avro.rows_cpu, " times", 20
    )


def _load(client: bigquery.Client, frame: pd.DataFrame) -> None:
    config = bigquery.LoadJobConfig(write_disposition="WRITE_TRUNCATE")
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        job = client.load_table_from_dataframe(frame, f"{DATASET}.frame", job_config=config)
    job.result()


@contextmanager
def _pipeline(project: str) -> Iterator[dlt.Pipeline]:
    """A pipeline of dlt into the local BigQuery."""
    login = GcpServiceAccountCredentials()
    login.project_id = project
    login._set_default_credentials(google.auth.credentials.AnonymousCredentials())
    with mock.patch.dict(os.environ, DLT), tempfile.TemporaryDirectory() as home:
        yield dlt.pipeline(
            "bench",
            destination=dlt.destinations.bigquery(credentials=login),
            dataset_name="bench_dlt",
            pipelines_dir=home,
        )


def _parquet(table: pa.Table) -> None:
    pq.write_table(table, io.BytesIO(), compression="zstd", use_dictionary=False)


def _avro(table: pa.Table) -> None:
    names: dict[str, Any] = {
        "int64": "long",
        "double": "double",
        "bool": "boolean",
        "string": "string",
        "date32[day]": {"type": "int", "logicalType": "date"},
        "timestamp[us, tz=UTC]": {"type": "long", "logicalType": "timestamp-micros"},
        "timestamp[us]": {"type": "long", "logicalType": "local-timestamp-micros"},
        "decimal128(38, 9)": {
            "type": "bytes",
            "logicalType": "decimal",
            "precision": 38,
            "scale": 9,
        },
    }
    fields = [
        {"name": field.name, "type": ["null", names[str(field.type)]]} for field in table.schema
    ]
    schema = fastavro.parse_schema({"type": "record", "name": "Row", "fields": fields})
    fastavro.writer(io.BytesIO(), schema, table.to_pylist(), codec="snappy")


def _growth(name: str) -> float:
    """By how many MiB a new process grows, at the most, in its first large write."""
    with _ways() as ways:
        ways[name](_inputs([name], 1_000)[name])
        rows = _inputs([name], MEMORY_ROWS)[name]
        before, peak, done = resident(), [0.0], threading.Event()

        def watch() -> None:
            while not done.wait(0.005):
                peak[0] = max(peak[0], resident())

        watcher = threading.Thread(target=watch)
        watcher.start()
        ways[name](rows)
        done.set()
        watcher.join()
        return max(0.0, peak[0] - before)
