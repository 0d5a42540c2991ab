"""`make demo`: a week of flights in and out of a local BigQuery, then Dagster in the browser.

Ends with status 1 when a row that went in was not read back.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from datetime import date, timedelta
from pathlib import Path

import dagster as dg
import polars as pl
from tqdm import tqdm

from dagster_bq_connector import BigQueryReader, BigQueryResource
from dagster_bq_connector.local import LocalBigQuery
from flights import source
from flights.definitions import defs

WEEK = [str(date(2013, 1, 1) + timedelta(days=n)) for n in range(7)]
BUCKET = "flights-staging"
QUIET = {"loggers": {"console": {"config": {"log_level": "ERROR"}}}}
INSTANCE = "telemetry:\n  enabled: false\n"


def main() -> int:
    """Run the demo."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--no-ui", action="store_true", help="end after the result")
    arguments.add_argument("--port", type=int, default=3000, help="of Dagster's page")
    arguments.add_argument("--home", type=Path, default=Path(".demo"), help="folder for its data")
    options = arguments.parse_args()
    home: Path = options.home.absolute()
    shutil.rmtree(home, ignore_errors=True)
    (home / "dagster").mkdir(parents=True)
    (home / "dagster" / "dagster.yaml").write_text(INSTANCE)
    print("Starting a local BigQuery ...", flush=True)
    with LocalBigQuery(data_dir=home / "bigquery") as local:
        os.environ.update(local.environment, DAGSTER_HOME=str(home / "dagster"))
        complete = load_week()
        if options.no_ui or not complete:
            return 0 if complete else 1
        return serve(options.port)


def load_week() -> bool:
    """Materialize a week, read it back, print what came. Returns whether every row did."""
    bigquery = BigQueryResource(project=dg.EnvVar("GOOGLE_CLOUD_PROJECT").get_value())
    connected = bigquery.connect()
    connected.clients.cloud_storage(connected.project).create_bucket(BUCKET)
    started = time.monotonic()
    steps = [("reference", None), *(("daily", day) for day in WEEK)]
    definitions, rows = defs(), 0
    with dg.DagsterInstance.get() as instance, tqdm(steps, unit="run", desc="Materializing") as bar:
        for job, partition in bar:
            bar.set_postfix_str(f"{job} {partition or ''}".strip())
            result = definitions.resolve_job_def(job).execute_in_process(
                instance=instance, partition_key=partition, run_config=QUIET
            )
            written = sum(
                int(str(event.materialization.metadata["dagster_bq/rows"].value))
                for event in result.get_asset_materialization_events()
            )
            rows += written
            bar.write(f"  {job} {partition or '(whole tables)'}: {written:,} rows")
    print(f"{rows:,} rows materialized in {time.monotonic() - started:.1f} s\n")
    return read_back(BigQueryReader(bigquery=bigquery))


def read_back(reader: BigQueryReader) -> bool:
    """Compare every table with its source, row by row; print a small result."""
    complete = True
    sources = {"flights": source.flights_of(WEEK)} | {
        name: source.table(name) for name in ("weather", "planes", "airports", "airlines")
    }
    for name, table in sources.items():
        got = reader.read(f"flights.{name}", columns=table.schema.names).to_polars()
        went_in = pl.DataFrame(table).cast(got.schema)
        same = went_in.sort(went_in.columns).equals(got.sort(got.columns))
        complete = complete and same
        verdict = "all read back" if same else "NOT what was read back"
        print(f"  {name}: {table.num_rows:,} rows went in, {got.height:,} came out: {verdict}")
    delays = reader.read("flights.delays_by_carrier", where="hour BETWEEN 6 AND 9").to_polars()
    latest = (
        delays.group_by("carrier")
        .agg(pl.col("flights").sum(), pl.col("mean_delay").mean().round(1))
        .sort("mean_delay", descending=True)
        .head(5)
    )
    print("\nThe latest carriers between six and ten in the morning, in minutes:")
    print(latest)
    return complete


def serve(port: int) -> int:
    """Run `dagster dev` until Ctrl-C."""
    page = f"http://127.0.0.1:{port}"
    print(f"\nDagster is at {page} (Ctrl-C ends it). Press Materialize.", flush=True)
    command = [sys.executable, "-m", "dagster", "dev", "-m", "flights.definitions"]
    command += ["-h", "127.0.0.1", "-p", str(port), "--log-level", "warning"]
    server = subprocess.Popen(command)
    try:
        return server.wait()
    except KeyboardInterrupt:  # it got the same signal
        server.wait()
        return 0


if __name__ == "__main__":
    sys.exit(main())
