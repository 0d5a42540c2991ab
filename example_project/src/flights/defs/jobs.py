"""One job for a day, one for the whole tables, and a schedule that replays 2013."""

import datetime

import dagster as dg

from flights.defs import tables
from flights.source import YEAR

reference = dg.define_asset_job(
    "reference", selection=["weather", "planes", "airports", "airlines"]
)
daily = dg.define_asset_job(
    "daily",
    selection=["flights", "delays_by_carrier", "delays_by_weather", "late_flights", "load_log"],
    partitions_def=tables.days,
)


@dg.schedule(job=daily, cron_schedule="0 6 * * *", execution_timezone=tables.ZONE)
def replay_daily(context: dg.ScheduleEvaluationContext) -> dg.RunRequest:
    """Every morning the flights of the same day of 2013."""
    today = context.scheduled_execution_time.date()
    day = min(today.day, 28) if today.month == 2 else today.day  # 2013 had no 29 February
    then = datetime.date(YEAR, today.month, day).isoformat()
    return dg.RunRequest(run_key=today.isoformat(), partition_key=then)
