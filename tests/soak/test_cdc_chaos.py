"""A change stream while everything around it is killed: no row is lost, none doubled, none late.

After a few faults, which fall while changes are on their way, the stream must catch up by itself.
`make test` has a few faults; `make soak` at least 30 kills, and writes tests/SOAK.md.
"""

import os
import time
from collections import Counter
from pathlib import Path

import pytest

from dagster_bq_connector import BigQueryResource
from support.chain import chain
from support.chaos import Chaos
from support.daemons import Deployment
from support.lasting_bigquery import LastingBigQuery
from support.soak_report import table, write_section
from support.spine import Spine
from support.whole import Whole, totals
from support.workload import COLUMN_EVERY

SOAK = bool(os.environ.get("SOAK"))
SEED = int(os.environ.get("SOAK_SEED", "20260801"))
KILLS = 30 if SOAK else 2
STRIKES = 6 if SOAK else 2  # between two times that the stream has to catch up
QUICK = ("a run's worker killed", "the local BigQuery killed")  # of `make test`
CHANGES = 60  # before each of them
WITH_ALL_COLUMNS = 3 * COLUMN_EVERY + CHANGES  # the tables are made with all that come
LEASE_SECONDS = 15.0
# A stream that has not caught up by then is stuck: it waits for a lease, for the daemons to see
# that runs are gone, and for new processes to start.
STUCK_SECONDS = 300
TAKEN = "another run has taken it over"  # of LeaseLostError
pytestmark = pytest.mark.local_only("its processes connect to servers of this machine")


def test_nothing_is_lost_doubled_or_stuck(tmp_path: Path) -> None:
    began, rounds = time.monotonic(), 0
    with (
        LastingBigQuery(tmp_path / "bigquery") as bigquery,
        chain(tmp_path / "chain", SEED, schemas=False, partitions=2) as running,
    ):
        with BigQueryResource(**bigquery.fields).get_client() as client:
            client.create_dataset("spine", timeout=60)
        spine = Spine(
            bigquery.fields,
            "spine",
            running.kafka.address,
            r"^shop\.public\.",
            schemas=False,
            lease_seconds=LEASE_SECONDS,
        )
        with Deployment(tmp_path / "dagster", spine) as deployment:
            whole = Whole(running, deployment, spine)
            chaos = Chaos(whole, bigquery, SEED)
            if not SOAK:
                chaos.faults = {name: chaos.faults[name] for name in QUICK}
            deployment.start_daemon()
            running.run(WITH_ALL_COLUMNS)
            compared: Counter[str] = Counter()
            while chaos.kills < KILLS or not (SOAK or rounds):
                for _ in range(STRIKES):
                    running.run(CHANGES)
                    print(chaos.strike(), flush=True)
                chaos.settle()
                running.run(CHANGES)
                whole.wait(STUCK_SECONDS)
                rounds += 1
                differences = whole.differences()
                compared = totals(differences)
                if SOAK:
                    print(rounds, dict(chaos.counts), dict(compared), flush=True)
                    report(whole, chaos.counts, compared, chaos.kills, time.monotonic() - began)
                # At each of them: later changes would hide a row that was lost.
                found = {name: str(each) for name, each in differences.items()}
                assert found == dict.fromkeys(differences, "")
            taken = deployment.failures(TAKEN)
    assert all(each.rows > 10 for each in differences.values())
    if SOAK:
        settings = {"retries on", "retries off", "launches late", "launches at once"}
        assert set(chaos.faults) | settings <= set(chaos.counts)
        assert taken > 0  # or no pause was one past a lease


def report(
    whole: Whole, faults: Counter[str], compared: Counter[str], kills: int, seconds: float
) -> None:
    rows = [(name, f"{count:,}") for name, count in sorted(faults.items())]
    rows.append(("kills", f"{kills:,}"))
    rows.append(("runs that found their lease taken", f"{whole.deployment.failures(TAKEN):,}"))
    rows += [(f"runs: {name}", f"{n:,}") for name, n in sorted(whole.deployment.statuses().items())]
    rows.append(("changes at the source", f"{whole.running.workload.changes:,}"))
    rows += [(f"compared: {name}", f"{count:,}") for name, count in compared.items()]
    text = (
        "Faults fall while changes are on their way; after every sixth the stream has to catch up\n"
        f"by itself within {STUCK_SECONDS} s, its lease being {LEASE_SECONDS:g} s, and the tables "
        "are compared. A worker is killed or paused only while it holds the stream.\n\n"
        f"{table(('', ''), rows)}"
    )
    write_section("A change stream under kills", SEED, seconds, text)
