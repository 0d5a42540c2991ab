"""`make demo-debezium`: bookings change in a real PostgreSQL, and Dagster follows them.

Debezium takes the changes to Kafka, and the sensor of the example project applies them to a local
BigQuery. Ends with status 1 when a table is not what it is in PostgreSQL.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import dagster as dg

from dagster_bq_connector import BigQueryResource
from dagster_bq_connector.local import LocalBigQuery
from flights.defs import bookings as definitions
from flights.demo import HOST, dagster, heed_signals, is_taken, prepare
from support.bookings import DAYS, NAMES, Bookings, booked
from support.chain import Chain
from support.comparing import compare_table

SEED = 20130108
STEPS_A_SECOND = 4
TELL_SECONDS = 5
# What a run has done of its stream's changes; those that a later one replaced were not sent.
COUNTED = ("upserts", "deletes", "superseded")
# Dagster's daemon and its first run take their time on a busy machine.
APPLIED_SECONDS = 300


def main() -> int:
    """Run the demo."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--no-ui", action="store_true", help="end after the comparison")
    arguments.add_argument("--port", type=int, default=3000, help="of Dagster's page")
    arguments.add_argument("--seconds", type=float, default=60, help="how long bookings change")
    arguments.add_argument("--home", type=Path, default=Path(".demo/debezium"), help="its folder")
    options = arguments.parse_args()
    port = None if options.no_ui else options.port
    if port and is_taken(port):
        arguments.error(f"port {port} is taken: choose another (PORT=3001 make demo-debezium)")
    heed_signals()
    try:
        return run(options.home.absolute(), port, options.seconds)
    except FileNotFoundError as error:  # a program of PostgreSQL, or Java
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped.")
        return 128 + signal.SIGINT


def run(home: Path, port: int | None, seconds: float) -> int:
    """Follow bookings for so long, compare; then, given a port, serve the page until Ctrl-C."""
    workspace = prepare(home, "bigquery", "debezium", "kafka")
    with ExitStack() as stack:
        print("Starting PostgreSQL, Kafka and Debezium ...", flush=True)
        bookings, chain = stack.enter_context(booked(home, SEED))
        print("Starting a local BigQuery ...", flush=True)
        local = stack.enter_context(LocalBigQuery(data_dir=home / "bigquery"))
        os.environ.update(local.environment)
        os.environ.update(DAGSTER_HOME=str(workspace.parent), FLIGHTS_KAFKA=chain.kafka.address)
        bigquery = BigQueryResource(project=local.environment["GOOGLE_CLOUD_PROJECT"])
        bigquery.connect().rest.create_dataset("flights", timeout=60)
        instance = stack.enter_context(dg.DagsterInstance.get())
        server = stack.enter_context(dagster(workspace, port))
        followed = Followed(bookings, chain, bigquery, instance)
        if port:
            print(f"The sensor: http://{HOST}:{port}/locations/flights/sensors/bookings_sensor")
        print(f"\nBookings change for {seconds:.0f} s.", flush=True)
        followed.change(seconds)
        equal = followed.is_caught_up() and followed.compare()
        if port and equal:
            print("\nCtrl-C ends it.", flush=True)
            with suppress(KeyboardInterrupt):
                return server.wait() or 1  # nobody asked it to end
        return 0 if equal else 1


@dataclass
class Followed:
    """Bookings at their source, and what the stream has made of them."""

    bookings: Bookings
    chain: Chain
    bigquery: BigQueryResource
    instance: dg.DagsterInstance

    def change(self, seconds: float) -> None:
        """Let bookings change, some a second, and tell how far the stream has come."""
        start = told = time.monotonic()
        for _ in self._steps():
            if (now := time.monotonic()) - start >= seconds:
                return
            if now - told >= TELL_SECONDS:
                told = now
                self.tell()
            time.sleep(1 / STEPS_A_SECOND)

    def is_caught_up(self) -> bool:
        """Wait until all is applied; whether it came to that."""
        self.chain.wait()
        ends = time.monotonic() + APPLIED_SECONDS
        while self.applied() < self.bookings.events and time.monotonic() < ends:
            time.sleep(1)
        self.tell()
        if self.applied() < self.bookings.events:
            print(f"Not all was applied within {APPLIED_SECONDS} s: look at the page of runs.")
            return False
        return True

    def compare(self) -> bool:
        """Compare the tables with PostgreSQL's, column by column; whether they are equal."""
        equal = True
        print()
        with self.chain.postgres.connect() as connection, self.bigquery.get_client() as client:
            for name in NAMES:
                table = f"{client.project}.flights.{name.partition('.')[2]}"
                found = compare_table(connection, name, client, table)
                verdict = f"NOT equal\n{found}" if str(found) else "all of them equal"
                print(f"  {name}: {found.rows:,} rows in PostgreSQL: {verdict}", flush=True)
                equal = equal and not str(found)
        return equal

    def tell(self) -> None:
        """Print how far it is."""
        made, applied = self.bookings.events, self.applied()
        print(f"  {time.strftime('%X')}  {made:,} changes made, {applied:,} applied", flush=True)

    def applied(self) -> int:
        """How many changes runs have applied."""
        found = 0
        for key in definitions.changes.keys:
            filters = dg.AssetRecordsFilter(asset_key=key)
            for record in self.instance.fetch_materializations(filters, limit=1_000).records:
                event = record.asset_materialization
                values = event.metadata if event else {}
                found += sum(int(str(values[f"dagster_bq/{name}"].value)) for name in COUNTED)
        return found

    def _steps(self) -> Iterator[None]:
        for day in DAYS:
            yield from self.bookings.steps(day)


if __name__ == "__main__":
    sys.exit(main())
