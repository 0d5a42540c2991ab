"""What the pages on change streams show is what the library and its command do."""

import inspect
import json
import re
import runpy
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from dagster_bq_connector import (
    BigQueryResource,
    DebeziumJson,
    FileLoadsWriter,
    PostgresLsn,
    TableOptions,
    cdc_assets,
    sensors,
)
from dagster_bq_connector.cdc.envelope.connect import Meaning, column_of
from dagster_bq_connector.cdc.source.files import FileMessages
from dagster_bq_connector.cdc.source.kafka_offsets import Place
from dagster_bq_connector.cdc.source.source import Lag
from dagster_bq_connector.cdc.stream import Pace
from dagster_bq_connector.cdc_command import main
from dagster_bq_connector.local import LocalBigQuery
from dagster_bq_connector.sensors import build_cdc_sensor
from support.debezium import CAPTURED, batch, event

DOCS = Path(__file__).parents[2] / "docs"
SNIPPET = DOCS / "snippets" / "change_stream.py"
COMMAND = "$ python -m dagster_bq_connector.cdc -m shop.definitions "
VARIES = (
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME"),
    (r"\d{4}-\d\d-\d\dT[0-9:.]+\+00:00", "TIME"),
    (r"\d\d:\d\d:\d\d UTC", "TIME"),
    (r'"newest": \d+', '"newest": N'),
    (r'"[0-9a-f]{12,24}"', '"DIGEST"'),
    (r"(\d+)-[0-9a-f]{12}", r"\1-DIGEST"),
    (r"/\S+/changes", "changes"),
)


def page(name: str) -> str:
    return (DOCS / name).read_text()


def rows_of(text: str, heading: str) -> list[list[str]]:
    """The rows of the table that begins with a heading, without their marks of code."""
    table = text[text.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def same(text: str) -> str:
    for pattern, name in VARIES:
        text = re.sub(pattern, name, text)
    return text.strip()


class Shop:
    """The stream of the first page, with a folder of changes and an instance of Dagster."""

    def __init__(self, folder: Path, bigquery: BigQueryResource, instance: Any) -> None:
        self.folder, self.bigquery, self._instance = folder, bigquery, instance
        folder.mkdir()
        self.lsn = 104
        self.put(blocks(page("change-streams.md"), "json")[0])

    def put(self, *lines: str) -> None:
        number = len(list(self.folder.iterdir())) + 1
        text = "".join(f"{line.strip()}\n" for line in lines)
        (self.folder / f"{number:04}.ndjson").write_text(text)

    def line(self, op: str, id_: int, row: Any, **source: Any) -> str:
        self.lsn += 1
        value = event(op, row, self.lsn, self.lsn - 1, "customers", **source)
        return json.dumps({"topic": "shop.public.customers", "key": {"id": id_}, "value": value})

    def run(self, file: Path = SNIPPET) -> bool:
        definitions: dg.Definitions = runpy.run_path(str(file))["defs"]
        job = definitions.resolve_implicit_global_asset_job_def()
        return job.execute_in_process(instance=self._instance, raise_on_error=False).success

    def rows(self) -> list[tuple[Any, ...]]:
        with self.bigquery.get_client() as client:
            found = client.query_and_wait("SELECT id, name, city FROM crm.customers ORDER BY id")
            return [tuple(row.values()) for row in found]


@pytest.fixture
def shop(
    local: LocalBigQuery,
    bigquery: BigQueryResource,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    for name, value in local.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CHANGES", str(tmp_path / "changes"))
    with bigquery.get_client() as client:
        client.delete_dataset("crm", delete_contents=True, not_found_ok=True)
        client.create_dataset("crm")
        client.delete_dataset("_dagster_bq", delete_contents=True, not_found_ok=True)
    with dg.DagsterInstance.ephemeral() as instance:
        yield Shop(tmp_path / "changes", bigquery, instance)


@pytest.fixture
def command(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., None]:
    """Runs a command that the page shows, says yes, and compares what it says."""

    def yes(question: str) -> str:
        print(f"{question}y")
        return "y"

    monkeypatch.setattr("builtins.input", yes)

    def run(arguments: str, file: Path = SNIPPET) -> None:
        shown = blocks(page("operating-streams.md"), "text")
        [wanted] = [text for text in shown if text.startswith(f"{COMMAND}{arguments}\n")]
        capsys.readouterr()
        assert main(["-f", str(file), *arguments.split()]) == 0
        assert same(capsys.readouterr().out) == same(wanted.partition("\n")[2])

    return run


ANN = {"id": 1, "name": "Ann", "city": "Nice"}
DAN = {"id": 4, "name": "Dan", "city": "Ulm"}


def test_the_first_stream(shop: Shop) -> None:
    text = page("change-streams.md")
    assert shop.run()
    [row] = rows_of(text, "| id | name | city |")
    assert shop.rows() == [(int(row[0]), *row[1:])]


def test_the_metadata_of_the_first_stream(shop: Shop) -> None:
    definitions: dg.Definitions = runpy.run_path(str(SNIPPET))["defs"]
    job = definitions.resolve_implicit_global_asset_job_def()
    [event_] = job.execute_in_process().asset_materializations_for_node("shop")
    metadata = {name: value.value for name, value in event_.metadata.items()}
    for names, values, _ in rows_of(page("change-streams.md"), "| metadata | here | |"):
        for name, value in zip(names.split(", "), values.split(", "), strict=False):
            key = name.strip("`")
            if value:
                assert metadata[key] == float(value), key
            elif key not in ("dagster_bq/other_tables", "dagster_bq/replayed"):
                assert key in metadata


def test_lag(shop: Shop, command: Callable[..., None]) -> None:
    shop.run()
    shop.put(shop.line("u", 1, ANN), shop.line("c", 4, DAN))
    command("list")
    command("show shop")


def test_skipping(shop: Shop, command: Callable[..., None]) -> None:
    shop.run()
    shop.put(shop.line("u", 1, ANN | {"city": 7}))
    assert not shop.run()
    command("skip shop")
    assert shop.run()
    assert shop.rows() == [(1, "Ann", "Nice")]


def test_acknowledging(shop: Shop, command: Callable[..., None]) -> None:
    shop.run()
    shop.lsn = 10
    shop.put(shop.line("c", 4, DAN, ts_ms=1_785_542_500_000))
    assert not shop.run()
    command("acknowledge shop")
    assert shop.run()
    assert shop.rows()[-1] == (4, "Dan", "Ulm")


def test_resetting_is_a_replay(shop: Shop, command: Callable[..., None]) -> None:
    shop.run()
    command("reset shop --beginning")
    assert shop.run()
    assert shop.rows() == [(1, "Ann", "Nice")]


def test_redriving(shop: Shop, command: Callable[..., None], tmp_path: Path) -> None:
    text = SNIPPET.read_text().replace("    DebeziumJson,", "    DeadLetters,\n    DebeziumJson,")
    delay = "    max_delay=timedelta(minutes=1),\n"
    assert delay in text
    kept = text.replace(delay, '    failed_rows=DeadLetters("crm.dead_letters"),\n')
    staleness = "max_staleness=timedelta(minutes=10),"
    (parked := tmp_path / "parked.py").write_text(
        kept.replace(staleness, f"{staleness} parked=True,")
    )
    (mended := tmp_path / "mended.py").write_text(kept)
    shop.run()
    shop.put(shop.line("u", 1, ANN | {"city": "Metz"}), shop.line("c", 4, DAN))
    assert shop.run(parked)
    assert shop.rows() == [(1, "Ann", "Nice")]
    command("redrive shop", mended)
    assert shop.rows() == [(1, "Ann", "Metz"), (4, "Dan", "Ulm")]


def test_a_table_that_was_loaded_before(shop: Shop, load_writer: FileLoadsWriter) -> None:
    rows = [{"id": 1, "name": "Ann", "city": "Ulm"}, {"id": 9, "name": "Zoe", "city": "Metz"}]
    options = TableOptions(primary_key=("id",), clustering=("id",))
    load_writer.append(pa.Table.from_pylist(rows), "crm.customers", options)
    with shop.bigquery.get_client() as client:
        table = client.get_table("crm.customers")
        table.max_staleness = "0-0 0 0:10:0"
        client.update_table(table, ["max_staleness"])
    assert shop.run()
    assert shop.rows() == [(1, "Ann", "Nice"), (9, "Zoe", "Metz")]


def test_commands_and_their_options_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(page("operating-streams.md"), "| command | |")
    assert len(rows) == 6
    for name, text in rows:
        with pytest.raises(SystemExit) as ended:
            main([name.strip("`").split()[0], "--help"])
        assert ended.value.code == 0
        help_ = capsys.readouterr().out
        for option in re.findall(r"--\w+", text):
            assert option in help_
    for file in DOCS.glob("*.md"):
        for name in re.findall(r"dagster_bq_connector\.cdc (?:-m \S+ )?(\w+)", file.read_text()):
            assert name in str(rows), f"{file.name}: {name}"


def test_settings_are_what_the_page_says() -> None:
    defaults = inspect.signature(cdc_assets).parameters
    for name, value, _ in rows_of(page("change-streams.md"), "| setting of `cdc_assets` |"):
        default = defaults[name.strip("`")].default
        seconds = default.total_seconds() if isinstance(default, timedelta) else default
        assert seconds == float(value.removesuffix(" s"))
    interval = inspect.signature(build_cdc_sensor).parameters["minimum_interval_seconds"].default
    assert interval == 30
    assert sensors.BUDGET_SECONDS == 40
    assert sensors.BUDGET_SECONDS - sensors.STREAM_SECONDS == 8


def runs_a_day(changes_a_second: float, max_delay: timedelta) -> int:
    """Runs a day in ten simulated days, with ticks every 30 s and runs of 20 s at least.

    A run applies what is there when it begins, and goes on while what is left is worth it.
    """
    pace = Pace(max_delay=max_delay)
    begin, applied, now, runs = datetime(2026, 8, 1, tzinfo=UTC), 0.0, 0.0, 0

    def arrived(at: float) -> int:
        return int(at * changes_a_second + 0.5)

    def is_due(at: float) -> bool:
        there = arrived(at) - arrived(applied)
        if not there:
            return False
        oldest = begin + timedelta(seconds=(arrived(applied) + 0.5) / changes_a_second)
        return pace.is_due(Lag(there, oldest), lambda: begin + timedelta(seconds=at))

    while now < 10 * 86_400:
        if is_due(now):
            runs, until = runs + 1, now + pace.max_run_seconds
            applied, now = now, now + 20
            while now < until and is_due(now):
                applied, now = now, now + 20
        now = (now // 30 + 1) * 30
    return round(runs / 10)


def test_runs_per_day_are_what_the_settings_imply() -> None:
    rates = {"none": 0.0, "one an hour": 1 / 3600, "one a second": 1.0, "1,000 a second": 1e3}
    units = {"minute": 60, "minutes": 60, "hour": 3600}
    for changes, delay, runs in rows_of(page("operating-streams.md"), "| changes | `max_delay` |"):
        number, _, unit = delay.partition(" ")
        seconds = 60 if delay == "any" else int(number) * units[unit]
        assert runs_a_day(rates[changes], timedelta(seconds=seconds)) == int(runs), changes


def test_types_are_what_the_schemas_of_a_real_table_become() -> None:
    """Each column's schema is as Debezium 3.6 wrote it by the settings of the page."""
    schemas = json.loads((CAPTURED / "types_with_schema.json").read_text())
    for names, wanted in rows_of(page("postgresql.md"), "| PostgreSQL | BigQuery |"):
        for name in re.findall("`([^`]+)`", names):
            column = column_of(name, Meaning.of(schemas.pop(name)))
            mode = ", REPEATED" if column.mode == "REPEATED" else ""
            assert f"{column.field_type}{mode}" == wanted, name
    assert not schemas, "types that the page leaves out"


def test_sequences_are_what_the_profile_makes() -> None:
    rows = rows_of(page("postgresql.md"), "| `source.sequence` |")
    for pair, wanted in rows:
        value = event(after={"id": 1})
        value["source"] |= {"sequence": pair.strip("`"), "lsn": None}
        profile = PostgresLsn()
        found = DebeziumJson().events(batch(({"id": 1}, value)), profile)
        assert profile.sequences(found.changes)[0].to_pylist() == [wanted.strip("`")]


def test_settings_that_are_explained_are_those_of_the_connector() -> None:
    [text] = blocks(page("postgresql.md"), "json")
    config = json.loads(text)["config"]
    for name, _ in rows_of(page("postgresql.md"), "| setting | why so |"):
        for each in re.findall("`([^`]+)`", name):
            assert any(key.endswith(each) for key in config), each


def test_the_setting_that_unwrapped_messages_need() -> None:
    found = DebeziumJson().events(batch(({"id": 1}, {"id": 1, "__op": "c"})), PostgresLsn())
    [setting] = re.findall("`(add\\.fields=[^`]+)`", page("postgresql.md"))
    assert setting in found.failed[0].reason


def test_positions_and_lines_are_what_sources_take(tmp_path: Path) -> None:
    offsets, line, place = blocks(page("kafka.md"), "json")
    assert Place.of(json.loads(offsets)).as_position() == json.loads(offsets)
    (tmp_path / "0001.ndjson").write_text(line)
    source = FileMessages(str(tmp_path))
    assert source.head().keys() == json.loads(place).keys()
    [messages] = source.read(None, source.head())
    found = DebeziumJson().events(messages, PostgresLsn())
    assert found.changes.column("operation").to_pylist() == ["d"]
