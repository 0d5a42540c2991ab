"""`make demo`: a week of flights and bookings in a local BigQuery, then Dagster in the browser.

Ends with status 1 when a row is not what it is at its source.
"""

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from pathlib import Path

import dagster as dg
import polars as pl
from tqdm import tqdm

from dagster_bq_connector import BigQueryReader, BigQueryResource
from dagster_bq_connector.local import LocalBigQuery
from flights import demo_bookings, source
from flights.definitions import defs

WEEK = [str(date(2013, 1, 1) + timedelta(days=n)) for n in range(7)]
BUCKET = "flights-staging"
QUIET = {"loggers": {"console": {"config": {"log_level": "ERROR"}}}}
INSTANCE = "telemetry:\n  enabled: false\nnux:\n  enabled: false\n"
WORKSPACE = """\
load_from:
  - python_module:
      module_name: flights.definitions
      location_name: flights
"""
HOST = "127.0.0.1"
STOP_SECONDS = 60  # dagster gives each of its own processes as long


def main() -> int:
    """Run the demo."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--no-ui", action="store_true", help="end after the result")
    arguments.add_argument("--port", type=int, default=3000, help="of Dagster's page")
    arguments.add_argument("--home", type=Path, default=Path(".demo"), help="folder for its data")
    options = arguments.parse_args()
    if not options.no_ui and is_taken(options.port):
        arguments.error(f"port {options.port} is taken: choose another (PORT=3001 make demo)")
    heed_signals()
    try:
        return run(options.home.absolute(), None if options.no_ui else options.port)
    except (KeyboardInterrupt, dg.DagsterExecutionInterruptedError):
        print("\nStopped.")
        return 128 + signal.SIGINT


def heed_signals() -> None:
    """Let whatever ends a program from outside raise KeyboardInterrupt: all is ended in order."""
    # A shell ignores SIGINT for what it starts in the background, and dagster would inherit that.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
        signal.signal(signal.SIGHUP, signal.default_int_handler)


def run(home: Path, port: int | None) -> int:
    """Load and read back; then, given a port, serve the page. Returns the exit status."""
    workspace = prepare(home, "bigquery", "changes")
    changes = home / "changes"
    print("Starting a local BigQuery ...", flush=True)
    with LocalBigQuery(data_dir=home / "bigquery") as local:
        os.environ.update(local.environment)
        os.environ.update(DAGSTER_HOME=str(workspace.parent), FLIGHTS_CHANGES=str(changes))
        bigquery = BigQueryResource(project=dg.EnvVar("GOOGLE_CLOUD_PROJECT").get_value())
        # With the page, the last day comes when somebody can see what the sensor makes of it.
        days = demo_bookings.DAYS if port is None else demo_bookings.DAYS[:-1]
        complete = load_week(bigquery)
        complete = replay_bookings(bigquery, changes, days) and complete
        if port is None or not complete:
            return 0 if complete else 1
        return serve(port, workspace, lambda page: last_day(page, changes))


def prepare(home: Path, *folders: str) -> Path:
    """Begin anew in a folder, and configure Dagster there.

    Args:
        home: The folder.
        folders: Those in it that an earlier demo filled, beside Dagster's. Nothing else is touched.

    Returns:
        Dagster's workspace file; it stands in DAGSTER_HOME.
    """
    for folder in (*folders, "dagster"):
        shutil.rmtree(home / folder, ignore_errors=True)
    workspace = home / "dagster" / "workspace.yaml"
    workspace.parent.mkdir(parents=True)
    workspace.with_name("dagster.yaml").write_text(INSTANCE)
    workspace.write_text(WORKSPACE)
    return workspace


def load_week(bigquery: BigQueryResource) -> bool:
    """Materialize a week, read it back, print what came. Returns whether every row did."""
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


def replay_bookings(bigquery: BigQueryResource, changes: Path, days: list[str]) -> bool:
    """Apply the changes of some days, print what came. Returns whether the tables are right."""
    print()
    with dg.DagsterInstance.get() as instance:
        files = [demo_bookings.BEFORE, *days]
        demo_bookings.replay(defs(), instance, bigquery, changes, files, QUIET)
    return demo_bookings.compare(bigquery, changes)


def last_day(page: str, changes: Path) -> None:
    """Let the changes of the last day come while the page is there."""
    day = demo_bookings.DAYS[-1]
    demo_bookings.feed(changes, day)
    print(
        f"\nThe changes of {day} have just come to {changes}: within seconds the sensor\n"
        f"{page}/locations/flights/sensors/bookings_sensor launches a run that applies them."
    )


def serve(port: int, workspace: Path, once_there: Callable[[str], None]) -> int:
    """Run Dagster until Ctrl-C; `once_there` is told the address of its page."""
    try:
        with dagster(workspace, port) as server:
            if server.poll() is None:
                once_there(f"http://{HOST}:{port}")
                sys.stdout.flush()
            return server.wait() or 1  # nobody asked it to end
    except KeyboardInterrupt:
        return 0


@contextlib.contextmanager
def dagster(workspace: Path, port: int | None) -> Iterator[subprocess.Popen[bytes]]:
    """Dagster in a process of its own: with its page, once that is there, or the daemon alone."""
    log = workspace.with_name("log")
    print(f"\nStarting Dagster, which logs to {log} ...", flush=True)
    # `dg dev` supersedes it, but looks for newer versions of itself on the internet.
    quiet = "ignore:Function `dev_command` is superseded"
    command = [sys.executable, "-W", quiet, "-m", "dagster", "dev", "-h", HOST, "-p", str(port)]
    if port is None:
        command = [str(Path(sys.executable).with_name("dagster-daemon")), "run"]
    command += ["-w", str(workspace), "--log-level", "warning"]
    # In a session of its own, so that it gets one signal, from here, however this one is stopped.
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while port and server.poll() is None and not is_taken(port):
            time.sleep(0.2)
        if port and server.poll() is None:
            page = f"http://{HOST}:{port}/assets/flights"
            print(f"Dagster is at {page} (Ctrl-C ends it). Press Materialize.", flush=True)
        yield server
        if server.poll() is not None:
            print(f"\nDagster ended:\n{log.read_text(errors='replace')[-2000:]}", file=sys.stderr)
    finally:
        print("\nStopping Dagster ...", flush=True)
        end(server)


def is_taken(port: int) -> bool:
    """Whether something listens on a port of this machine."""
    with socket.socket() as client:
        return client.connect_ex((HOST, port)) == 0


def end(server: subprocess.Popen[bytes]) -> None:
    """Ask Dagster to end, and make sure that nothing of it stays: runs, code servers."""
    try:
        server.send_signal(signal.SIGINT)
        server.wait(STOP_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
