"""The example project: what its definitions say, and what its runs leave in BigQuery."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import dagster as dg
import polars as pl
import pytest
from polars.testing import assert_frame_equal

import flights
from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    BigQueryWriter,
    FileSource,
    KafkaSource,
)
from dagster_bq_connector.local import LocalBigQuery
from flights import source
from flights.definitions import defs
from flights.defs.resources import changes
from flights.demo import BUCKET, QUIET

PROJECT = Path(flights.__file__).parents[2]
CLI_SECONDS = 300
MATERIALIZE = ["-m", "dagster", "asset", "materialize", "-m", "flights.definitions"]
DAILY = ("flights", "delays_by_carrier", "delays_by_weather")
APPENDED = ("late_flights", "load_log")
REFERENCE = ("weather", "planes", "airports", "airlines")
FOLLOWED = ("flights/bookings", "flights/passengers")
MARCH = [str(date(2013, 3, 7) + timedelta(days=n)) for n in range(5)]  # and the summer time


@pytest.fixture(autouse=True)
def environment(
    local: LocalBigQuery, monkeypatch: pytest.MonkeyPatch, _no_emulator_variables: None
) -> Mapping[str, str]:
    """The example finds the local BigQuery by the emulators' variables."""
    for name, value in local.environment.items():
        monkeypatch.setenv(name, value)
    return local.environment


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DAGSTER_HOME, which the command line shares with the tests."""
    folder = tmp_path_factory.mktemp("dagster")
    (folder / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    return folder


@pytest.fixture(scope="module")
def instance(home: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.from_config(str(home)) as instance:
        yield instance


@pytest.fixture(scope="module")
def reference(
    bigquery: BigQueryResource, local: LocalBigQuery, instance: dg.DagsterInstance
) -> Iterator[None]:
    """The tables that have no partitions, loaded once; at the end the example's dataset goes."""
    connected = bigquery.connect()
    connected.clients.cloud_storage(connected.project).create_bucket(BUCKET)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in local.environment.items():
            patch.setenv(name, value)
        run("reference", None, instance)
    yield
    connected.rest.delete_dataset("flights", delete_contents=True)


@pytest.fixture(scope="module")
def one_day(reference: None, local: LocalBigQuery, instance: dg.DagsterInstance) -> str:
    """A day that was written once before, which several tests look at."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in local.environment.items():
            patch.setenv(name, value)
        assert run("daily", "2013-02-09", instance).success
    return "2013-02-09"


def run(job: str, partition: str | None, instance: dg.DagsterInstance) -> Any:
    return (
        defs()
        .resolve_job_def(job)
        .execute_in_process(partition_key=partition, instance=instance, run_config=QUIET)
    )


def contents(reader: BigQueryReader, table: str, days: list[str]) -> pl.DataFrame:
    """The rows of some days, in one order."""
    first, last = min(days), max(days)
    where = f"flight_date BETWEEN '{first}' AND '{last}'"
    frame = reader.read(f"flights.{table}", where=where).to_polars()
    return frame.sort(frame.columns)


def expected(table: str, days: list[str]) -> pl.DataFrame:
    """The same, made from the source alone."""
    rows = pl.DataFrame(source.flights()).filter(
        pl.col("flight_date").is_in([date.fromisoformat(day) for day in days])
    )
    delay, count = pl.col("dep_delay"), pl.len().cast(pl.Int64).alias("flights")
    if table == "delays_by_carrier":
        rows = rows.group_by("flight_date", "carrier", "hour").agg(
            count,
            delay.is_null().sum().cast(pl.Int64).alias("cancelled"),
            delay.mean().alias("mean_delay"),
        )
    elif table == "delays_by_weather":
        # Every hour of the year is joined: no window of a day can have cut off what belongs here.
        weather = pl.DataFrame(source.table("weather")).select(
            "origin", "time_hour", "temp", "wind_speed", "precip", "visib"
        )
        rows = (
            rows.group_by("flight_date", "origin", "time_hour")
            .agg(count, delay.mean().alias("mean_delay"))
            .join(weather, on=["origin", "time_hour"], how="left")
        )
    return rows.sort(rows.columns)


def assert_as_in_the_source(reader: BigQueryReader, days: list[str]) -> None:
    for table in DAILY:
        got, wanted = contents(reader, table, days), expected(table, days)
        assert wanted.height
        assert_frame_equal(got, wanted.cast(dict(got.schema)), check_exact=False, abs_tol=1e-9)


def materialization(
    instance: dg.DagsterInstance, asset: str, partition: str | None
) -> Mapping[str, Any]:
    """The metadata of the latest materialization of a partition, or of an asset without any."""
    records = instance.fetch_materializations(
        dg.AssetRecordsFilter(
            asset_key=dg.AssetKey(asset), asset_partitions=[partition] if partition else None
        ),
        limit=1,
    ).records
    assert records, f"{asset} {partition} was never materialized"
    event = records[0].asset_materialization
    assert event is not None
    return {key: value.value for key, value in event.metadata.items()}


def test_check_defs_finds_nothing_wrong(environment: Mapping[str, str]) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("dg"), "check", "defs"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=CLI_SECONDS,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All definitions loaded successfully" in done.stdout + done.stderr


def test_definitions_hold_every_asset_job_schedule_and_sensor() -> None:
    repository = defs().get_repository_def()
    assets = {key.to_user_string() for key in repository.assets_defs_by_key}
    assert assets == {*DAILY, *APPENDED, *REFERENCE, *FOLLOWED}
    jobs = {job.name for job in repository.get_all_jobs() if not job.name.startswith("__")}
    assert jobs == {"daily", "reference"}
    assert [schedule.name for schedule in repository.schedule_defs] == ["replay_daily"]
    assert [sensor.name for sensor in repository.sensor_defs] == ["bookings_sensor"]
    days = repository.get_job("daily").partitions_def
    assert days is not None
    keys = days.get_partition_keys()
    assert (keys[0], keys[-1], len(keys)) == ("2013-01-01", "2013-12-31", 365)


@pytest.mark.parametrize(
    ("variable", "kind"), [("FLIGHTS_CHANGES", FileSource), ("FLIGHTS_KAFKA", KafkaSource)]
)
def test_changes_come_from_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, variable: str, kind: type
) -> None:
    recorded = changes()
    assert isinstance(recorded, FileSource)
    assert len(list(Path(recorded.path).glob("*.ndjson"))) == 8
    monkeypatch.setenv(variable, "somewhere:9092")
    source = changes()
    assert isinstance(source, kind)
    assert "somewhere:9092" in repr(source)


def test_the_sensor_is_on_by_itself_on_a_local_bigquery_only() -> None:
    program = (
        "import importlib, os; from flights.defs import bookings; "
        "print(bookings.bookings_sensor.default_status.name); "
        "os.environ['BIGQUERY_EMULATOR_HOST'] = 'localhost:1'; importlib.reload(bookings); "
        "print(bookings.bookings_sensor.default_status.name)"
    )
    elsewhere = {name: value for name, value in os.environ.items() if "EMULATOR" not in name}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=elsewhere, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["STOPPED", "RUNNING"]


@pytest.mark.parametrize(
    ("today", "replayed"),
    [
        (date(2028, 2, 29), "2013-02-28"),
        (date(2028, 3, 1), "2013-03-01"),
        (date(2026, 12, 31), "2013-12-31"),
        (date(2027, 1, 1), "2013-01-01"),
    ],
)
def test_schedule_replays_the_same_day_of_2013(today: date, replayed: str) -> None:
    at = datetime(today.year, today.month, today.day, 6, tzinfo=ZoneInfo("America/New_York"))
    repository = defs().get_repository_def()
    with dg.build_schedule_context(
        scheduled_execution_time=at, repository_def=repository
    ) as context:
        tick = repository.get_schedule_def("replay_daily").evaluate_tick(context)
    requests = tick.run_requests
    assert requests is not None
    assert [(each.partition_key, each.run_key) for each in requests] == [
        (replayed, today.isoformat())
    ]


def test_a_partition_outside_of_the_year_is_an_error_that_names_it(
    instance: dg.DagsterInstance,
) -> None:
    with pytest.raises(Exception, match="2012-12-31"):
        run("daily", "2012-12-31", instance)


# On the second and third the clocks in New York change: they have 23 and 25 hours.
@pytest.mark.parametrize("day", ["2013-02-08", "2013-03-10", "2013-11-03"])
def test_daily_leaves_the_day_as_the_source_has_it(
    reference: None, reader: BigQueryReader, instance: dg.DagsterInstance, day: str
) -> None:
    assert run("daily", day, instance).success
    assert_as_in_the_source(reader, [day])
    weather = contents(reader, "delays_by_weather", [day])
    assert weather["temp"].is_not_null().any(), "no flight met its weather"
    for asset in DAILY:
        metadata = materialization(instance, asset, day)
        assert metadata["dagster/partition_row_count"] == expected(asset, [day]).height


def test_every_method_writes_its_asset(
    one_day: str, reader: BigQueryReader, instance: dg.DagsterInstance
) -> None:
    day = one_day
    methods = {
        asset: materialization(instance, asset, day)["dagster_bq/write_method"]
        for asset in (*DAILY, *APPENDED)
    }
    assert methods == {
        "flights": "file_loads",
        "delays_by_carrier": "file_loads",
        "delays_by_weather": "exactly_once",
        "late_flights": "exactly_once",
        "load_log": "default_stream",
    }
    late = pl.DataFrame(source.flights_of([day])).filter(pl.col("dep_delay") > 120)
    assert reader.read("flights.late_flights", where=f"flight_date = '{day}'").to_arrow().num_rows
    assert materialization(instance, "late_flights", day)["dagster_bq/rows"] == late.height
    assert reader.read("flights.load_log", where=f"flight_date = '{day}'").to_arrow().num_rows == 1


def test_each_asset_may_have_each_writer() -> None:
    """Whichever writes first makes the dataset, so that a method is changed by its line alone."""
    resources = defs().resources or {}
    writers = [each for each in resources.values() if isinstance(each, BigQueryWriter)]
    assert len(writers) == 4
    assert all(writer.create_dataset for writer in writers)


def test_the_whole_tables_say_what_they_are(
    reference: None, reader: BigQueryReader, instance: dg.DagsterInstance
) -> None:
    for name in REFERENCE:
        table = source.table(name)
        metadata = materialization(instance, name, None)
        assert metadata["dagster/row_count"] == table.num_rows
        assert metadata["dagster/table_name"] == f"local-project.flights.{name}"
        columns = metadata["dagster/column_schema"].columns
        assert [column.name for column in columns] == table.schema.names
        assert reader.read(f"flights.{name}").to_arrow().num_rows == table.num_rows


def test_the_same_day_twice_is_there_once(
    one_day: str, reader: BigQueryReader, instance: dg.DagsterInstance
) -> None:
    assert_as_in_the_source(reader, [one_day])
    assert run("daily", one_day, instance).success
    assert_as_in_the_source(reader, [one_day])


def test_delays_by_carrier_reads_its_columns_of_its_day_only(
    one_day: str,  # another day, which a read without a filter would find
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, opened = BigQueryReader.read, []

    def watched(self: BigQueryReader, table: Any, *arguments: Any, **named: Any) -> Any:
        rows = read(self, table, *arguments, **named)
        opened.append((table, rows))
        return rows

    monkeypatch.setattr(BigQueryReader, "read", watched)
    day = "2013-06-02"
    job = defs().resolve_job_def("daily")
    for asset in ("flights", "delays_by_carrier"):
        job.execute_in_process(
            partition_key=day,
            instance=instance,
            run_config=QUIET,
            asset_selection=[dg.AssetKey(asset)],
        )
    [(table, rows)] = opened
    assert table == "flights.flights"
    # The session's own columns are those that travel.
    assert sorted(rows.sessions[0].source.names) == ["carrier", "dep_delay", "flight_date", "hour"]
    came = rows.to_arrow()
    assert came.num_rows == source.flights_of([day]).num_rows
    assert set(came["flight_date"].to_pylist()) == {date.fromisoformat(day)}


def test_days_in_one_run_are_what_a_run_a_day_leaves(
    reference: None,
    bigquery: BigQueryResource,
    reader: BigQueryReader,
    instance: dg.DagsterInstance,
    home: Path,
    environment: Mapping[str, str],
) -> None:
    some = MARCH[-2:]
    for day in some:
        assert run("daily", day, instance).success
    one_by_one = {table: contents(reader, table, some) for table in DAILY}
    with bigquery.get_client() as client:
        for table in DAILY:  # so that what is compared below is the second one's work
            client.query_and_wait(
                f"DELETE FROM flights.{table} WHERE flight_date <= '{some[-1]}'"
                f" AND flight_date >= '{some[0]}'"
            )
            assert contents(reader, table, some).is_empty()

    # A person's command for the first table, a backfill's tags for those that are made of it.
    done = subprocess.run(
        [
            sys.executable,
            *MATERIALIZE,
            "--select",
            "flights",
            "--partition-range",
            f"{MARCH[0]}...{MARCH[-1]}",
        ],
        capture_output=True,
        text=True,
        timeout=CLI_SECONDS,
        cwd=home,
        env=os.environ | environment | {"DAGSTER_HOME": str(home)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    defs().resolve_job_def("daily").execute_in_process(
        instance=instance,
        run_config=QUIET,
        asset_selection=[dg.AssetKey(name) for name in DAILY[1:]],
        tags={
            "dagster/asset_partition_range_start": MARCH[0],
            "dagster/asset_partition_range_end": MARCH[-1],
        },
    )

    assert_as_in_the_source(reader, MARCH)
    for table, frame in one_by_one.items():
        assert_frame_equal(contents(reader, table, some), frame)
    for asset in DAILY:
        sizes = {
            str(day): rows
            for day, rows in expected(asset, MARCH).group_by("flight_date").len().iter_rows()
        }
        for day in MARCH:
            metadata = materialization(instance, asset, day)
            assert metadata["dagster/partition_row_count"] == sizes[day]
            assert metadata["dagster/table_name"] == f"local-project.flights.{asset}"
            columns = {
                column.name: column.type for column in metadata["dagster/column_schema"].columns
            }
            assert columns["flight_date"] == "DATE"
