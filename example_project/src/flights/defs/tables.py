"""The tables of this project that have a partition a day."""

from dagster_bq_connector import DailyTable, TableOptions

ZONE = "America/New_York"

flights = DailyTable(
    "flights.flights",
    column="flight_date",
    timezone=ZONE,
    options=TableOptions(clustering=("carrier", "origin"), description="Departures from New York"),
)
delays_by_carrier = DailyTable("flights.delays_by_carrier", column="flight_date", timezone=ZONE)
delays_by_weather = DailyTable("flights.delays_by_weather", column="flight_date", timezone=ZONE)

days = flights.partitions_def("2013-01-01", end="2014-01-01")
