"""What is made of it: tables that read only the columns and the day they need."""

import datetime

import dagster as dg
import polars as pl

from dagster_bq_connector import BigQueryReader, BigQueryWriter
from flights.defs import tables

KEYS = ["flight_date", "origin", "time_hour"]


@dg.asset(
    partitions_def=tables.days,
    backfill_policy=dg.BackfillPolicy.single_run(),
    deps=["flights"],
    group_name="derived",
    kinds={"bigquery", "polars"},
)
def delays_by_carrier(
    context: dg.AssetExecutionContext, reader: BigQueryReader, writer: BigQueryWriter
) -> dg.MaterializeResult:
    """How late each carrier's planes left, hour by hour."""
    rows = reader.read(
        "flights.flights",
        columns=["flight_date", "carrier", "hour", "dep_delay"],
        where=tables.flights.where(context),
    ).to_polars()
    delays = rows.group_by("flight_date", "carrier", "hour").agg(
        pl.len().cast(pl.Int64).alias("flights"),
        pl.col("dep_delay").is_null().sum().cast(pl.Int64).alias("cancelled"),
        pl.col("dep_delay").mean().alias("mean_delay"),
    )
    return writer.replace(delays, tables.delays_by_carrier.for_run(context)).to_materialize_result()


@dg.asset(
    partitions_def=tables.days,
    backfill_policy=dg.BackfillPolicy.single_run(),
    deps=["flights", "weather"],
    group_name="derived",
    kinds={"bigquery", "polars"},
)
def delays_by_weather(
    context: dg.AssetExecutionContext, reader: BigQueryReader, weather_writer: BigQueryWriter
) -> dg.MaterializeResult:
    """How late planes left each airport, hour by hour, beside the weather of that hour."""
    flights = reader.read(
        "flights.flights", columns=[*KEYS, "dep_delay"], where=tables.flights.where(context)
    ).to_polars()
    weather = reader.read(
        "flights.weather",
        columns=["origin", "time_hour", "temp", "wind_speed", "precip", "visib"],
        where=tables.flights.where(context, column="time_hour"),
    ).to_polars()
    delays = (
        flights.group_by(KEYS)
        .agg(
            pl.len().cast(pl.Int64).alias("flights"),
            pl.col("dep_delay").mean().alias("mean_delay"),
        )
        .join(weather, on=["origin", "time_hour"], how="left")
    )
    result = weather_writer.replace(delays, tables.delays_by_weather.for_run(context))
    return result.to_materialize_result()


@dg.asset(
    partitions_def=tables.days,
    backfill_policy=dg.BackfillPolicy.single_run(),
    deps=["flights"],
    group_name="derived",
    kinds={"bigquery", "polars"},
)
def late_flights(
    context: dg.AssetExecutionContext, reader: BigQueryReader, late_writer: BigQueryWriter
) -> dg.MaterializeResult:
    """What left more than two hours late, added day by day: a retry adds nothing twice."""
    rows = reader.read(
        tables.flights.for_run(context),
        columns=["flight_date", "carrier", "flight", "origin", "dest", "dep_delay"],
        where="dep_delay > 120",
    )
    return late_writer.append(rows, "flights.late_flights").to_materialize_result()


@dg.asset(
    partitions_def=tables.days,
    backfill_policy=dg.BackfillPolicy.single_run(),
    deps=["flights"],
    group_name="derived",
    kinds={"bigquery", "polars"},
)
def load_log(context: dg.AssetExecutionContext, log_writer: BigQueryWriter) -> dg.MaterializeResult:
    """When each day was loaded: it is seen at once, and a row that comes twice does no harm."""
    days = pl.Series("flight_date", context.partition_keys).str.to_date()
    rows = pl.DataFrame([days]).with_columns(loaded_at=datetime.datetime.now(datetime.UTC))
    return log_writer.append(rows, "flights.load_log").to_materialize_result()
