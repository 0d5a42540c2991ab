"""How many load jobs a table gets a day, as far as that can be seen from here.

BigQuery takes 1,500 a table a day, failed ones counted, and neither tells how many are left nor
raises that number. What can be seen without a question more: the jobs that this process started,
and when the table was last changed, by whomever. A process that loads once and ends sees the pace
of the others by the latter alone.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque

from dagster_bq_connector.table.ref import TableRef

DAY = 86_400.0
LOADS_A_DAY = 1_500
WARN_AT = 1_200  # jobs of this process: what is left is for those that it does not see
WARN_EVERY = 100
SLACK = 5.0  # seconds between the clock of BigQuery and ours

_started: defaultdict[TableRef, deque[float]] = defaultdict(deque)
_ended: dict[TableRef, float] = {}
_lock = threading.Lock()


def note_loads(table: TableRef, jobs: int, unchanged: float | None) -> str | None:
    """Count load jobs that are about to be started.

    Args:
        table: Their table, without partition.
        jobs: How many.
        unchanged: Seconds since the table was last changed; None for a new one.

    Returns:
        What a person should know about their pace, if anything.
    """
    now = time.monotonic()
    with _lock:
        started = _started[table]
        while started and started[0] <= now - DAY:
            started.popleft()
        since = now - _ended[table] if table in _ended else DAY
        before = len(started)
        started.extend([now] * jobs)
    counted = before + jobs
    limit = f"BigQuery takes {LOADS_A_DAY:,} a table a day, and the table is full then for hours"
    remedy = "Load more rows at a time, or append by stream."
    if counted >= WARN_AT and counted // WARN_EVERY > before // WARN_EVERY:
        return (
            f"{table}: this process has started {counted:,} load jobs within 24 hours; {limit}. "
            f"{remedy}"
        )
    pace = DAY / LOADS_A_DAY
    if unchanged is not None and unchanged < min(pace, since - SLACK):
        return (
            f"{table} was changed {unchanged:.0f} s ago, and by no load job of this process. If "
            f"that was one too, and they go on like this, they are more than one in {pace:.0f} s: "
            f"{limit}. {remedy}"
        )
    return None


def note_end(table: TableRef) -> None:
    """Load jobs of this process are over: the table was last changed by them."""
    with _lock:
        _ended[table] = time.monotonic()
