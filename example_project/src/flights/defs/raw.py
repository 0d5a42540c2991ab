"""What comes from outside: flights day by day, the rest as whole tables."""

import dagster as dg

from dagster_bq_connector import BigQueryWriter
from flights import source
from flights.defs import tables


@dg.asset(
    partitions_def=tables.days,
    backfill_policy=dg.BackfillPolicy.single_run(),
    group_name="raw",
    kinds={"bigquery"},
    metadata={"dagster/table_name": tables.flights.table},
)
def flights(context: dg.AssetExecutionContext, writer: BigQueryWriter) -> dg.MaterializeResult:
    """Every flight that left New York, by the day on which it was to leave."""
    rows = source.flights_of(context.partition_keys)
    return writer.replace(rows, tables.flights.for_run(context)).to_materialize_result()


def _whole(name: str, description: str) -> dg.AssetsDefinition:
    @dg.asset(
        name=name,
        description=description,
        group_name="raw",
        kinds={"bigquery"},
        metadata={"dagster/table_name": f"flights.{name}"},
    )
    def whole(writer: BigQueryWriter) -> dg.MaterializeResult:
        return writer.replace(source.table(name), f"flights.{name}").to_materialize_result()

    return whole


weather = _whole("weather", "The weather at each airport, hour by hour.")
planes = _whole("planes", "The planes, by tail number.")
airports = _whole("airports", "The airports, by FAA code.")
airlines = _whole("airlines", "The airlines, by carrier code.")
