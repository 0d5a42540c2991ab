"""Changes of a real PostgreSQL come to BigQuery by a real daemon: the tables are the source's.

Debezium reads the source's log into Kafka; a sensor launches runs, which are processes of their
own. `make test` makes a few hundred changes, `make soak` 20,000.
"""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from support.chain import chain
from support.daemons import Deployment, until
from support.soak_report import table, write_section
from support.spine import Spine
from support.whole import Whole, totals

SOAK = bool(os.environ.get("SOAK"))
SEED = int(os.environ.get("SOAK_SEED", "20260801"))
CHANGES = 20_000 if SOAK else 300
PARTS = 40 if SOAK else 3
LET_WAIT = 5  # parts: noida-db answers with all that waits, and clients take 100 MB
WAIT_SECONDS = 900 if SOAK else 240
pytestmark = pytest.mark.local_only("its processes connect to servers of this machine")


def test_the_tables_are_those_of_the_source(
    fields: dict[str, Any], dataset: str, tmp_path: Path
) -> None:
    began = time.monotonic()
    with chain(tmp_path / "chain", SEED) as running:
        spine = Spine(fields, dataset, running.kafka.address, r"^shop\.public\.", schemas=True)
        with Deployment(tmp_path / "dagster", spine) as deployment:
            whole = Whole(running, deployment, spine)
            deployment.start_daemon()
            for part in range(PARTS):  # while it runs
                running.run(CHANGES // PARTS)
                if part % LET_WAIT == LET_WAIT - 1:
                    whole.wait(WAIT_SECONDS)
            whole.wait(WAIT_SECONDS)
            until(lambda: not deployment.live(), WAIT_SECONDS, whole.said)
            differences = whole.differences()
            statuses = deployment.statuses()
        counts, workload = totals(differences), running.workload
    if SOAK:
        report(whole, counts, statuses, time.monotonic() - began)
    assert {name: str(each) for name, each in differences.items()} == dict.fromkeys(differences, "")
    assert all(each.rows > 10 for each in differences.values())
    assert workload.changes >= CHANGES
    assert statuses["SUCCESS"] == sum(statuses.values())


def report(whole: Whole, counts: Any, statuses: dict[str, int], seconds: float) -> None:
    workload = whole.running.workload
    rows = [(kind, f"{count:,}") for kind, count in sorted(workload.counts.items())]
    rows += [(f"runs: {name}", f"{count:,}") for name, count in statuses.items()]
    rows += [(f"compared: {name}", f"{count:,}") for name, count in counts.items()]
    text = (
        "PostgreSQL with REPLICA IDENTITY FULL, Debezium, Kafka, a daemon with the sensor, the\n"
        "local BigQuery. Afterwards the tables are compared with the source's, column by column.\n"
        f"\n{table(('', ''), rows)}"
    )
    write_section("Changes of PostgreSQL by a daemon", SEED, seconds, text)
