"""Whole writes against what a user would otherwise do, on the same local BigQuery.

The local BigQuery is another process, so that CPU seconds and memory are those of the client.
Most of the time by the clock is the local BigQuery's own.
"""

import io
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import fastavro
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from google.cloud import bigquery

from benchmarks.data import batches
from benchmarks.io_manager import DATASET, managers, output_of
from benchmarks.read import resident
from benchmarks.report import Call, Report
from dagster_bq_connector import ExactlyOnceWriter, FileLoadsWriter

ROWS = 200_000
AVRO_ROWS = 20_000
MIB = 1024 * 1024
OTHERS = ("dagster-gcp-pandas' IO manager", "`load_table_from_dataframe`")


def run(report: Report) -> None:
    table = pa.Table.from_batches(batches(ROWS))
    frame = table.to_pandas()
    with managers() as (ours, theirs):
        report.section(f"Whole writes, {ROWS:,} rows, local BigQuery")
        loads: FileLoadsWriter = ours.writer
        once = ExactlyOnceWriter(bigquery=loads.bigquery)
        client = loads.bigquery.connect().rest
        calls = {
            OTHERS[0]: lambda: theirs.handle_output(output_of("theirs"), frame),
            OTHERS[1]: lambda: _load(client, frame),
            "FileLoadsWriter.append": lambda: loads.append(table, f"{DATASET}.loaded"),
            "FileLoadsWriter.replace": lambda: loads.replace(table, f"{DATASET}.replaced"),
            "ExactlyOnceWriter.append": lambda: once.append(
                table, f"{DATASET}.streamed", key=uuid.uuid4().hex
            ),
            "ExactlyOnceWriter.replace": lambda: once.replace(
                table, f"{DATASET}.restreamed", key=uuid.uuid4().hex
            ),
        }
        figures = report.compare({name: Call(call, ROWS) for name, call in calls.items()}, 3)
        for name, call in calls.items():
            report.result(f"{name}, resident memory grew by at most", _growth(call), " MiB")
        for name, figure in figures.items():
            for other in OTHERS if name not in OTHERS else ():
                ratio = figure.rows_cpu / figures[other].rows_cpu
                report.result(f"{name}, less client CPU than {other}", ratio, " times")
                ratio = figure.rows / figures[other].rows
                report.result(f"{name}, faster by the clock than {other}", ratio, " times")
    _staging(report)


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
    client.load_table_from_dataframe(frame, f"{DATASET}.frame", job_config=config).result()


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


def _growth(call: Callable[[], object]) -> float:
    """By how many MiB the process grows in one more call."""
    before, peak, done = resident(), [0.0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], resident())
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        call()
    finally:
        done.set()
        watcher.join()
    return max(0.0, peak[0] - before)
