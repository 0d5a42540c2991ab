"""What could lose changes of a stream, or let it stand still for ever: each was found by trying."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from confluent_kafka import Producer
from google.api_core.exceptions import NotFound
from google.cloud import bigquery as google

from dagster_bq_connector import BigQueryResource, CdcTable, FileSource, sensors
from dagster_bq_connector.assets import PlanConfig
from dagster_bq_connector.cdc.lease import Lease
from dagster_bq_connector.cdc.look import Runs, Tried, look
from dagster_bq_connector.cdc.source.files import FileMessages
from dagster_bq_connector.cdc.source.kafka import KafkaMessages
from dagster_bq_connector.cdc.source.kafka_broker import KafkaOptions
from dagster_bq_connector.cdc.stream import Pace, Request
from dagster_bq_connector.cdc.watermark import (
    Failure,
    Holder,
    Plan,
    StreamState,
    Watermark,
    failed,
    shortened,
    utc_now,
)
from dagster_bq_connector.cdc_command import main
from dagster_bq_connector.errors import ConfigurationError, PlanMismatchError, UnreachableError
from support.cdc_deployment import COLUMNS, Deployment, stream
from support.change_files import ChangeFiles
from support.draining import EAGER, Numbers
from support.kafka import kafka_broker
from support.ledgers import ledger_at

NO_RUNS = Runs(live=list, tried=lambda state: Tried(0, None), is_over=lambda run: False)
BAD = '{"topic": "shop.public.orders", "key": {"id": 2}, "value": 7}'


@pytest.fixture
def changes(tmp_path: Path) -> ChangeFiles:
    return ChangeFiles(tmp_path / "changes")


@pytest.fixture
def numbers(tmp_path: Path, bigquery: BigQueryResource, dataset: str) -> Numbers:
    folder = tmp_path / "numbers"
    folder.mkdir()
    return Numbers(folder, bigquery, dataset)


Deploy = Callable[..., Deployment]


@pytest.fixture
def deploy(bigquery: BigQueryResource, changes: ChangeFiles) -> Iterator[Deploy]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield lambda *streams: Deployment(bigquery, changes, instance, *streams)


def test_the_first_tick_does_not_need_a_ledger(
    deploy: Deploy, changes: ChangeFiles, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dataset is made by the first run, which only a tick launches."""
    deployment = deploy(stream(dataset, ledger="_not_made_yet"))
    changes.put(("c", 1, "ann"))

    def missing(client: google.Client, table: Any, **more: Any) -> google.Table:
        raise NotFound(f"Not found: Dataset {table.project}:{table.dataset_id}")  # as the service

    monkeypatch.setattr(google.Client, "get_table", missing)
    assert deployment.launched()


def test_a_stream_that_takes_all_the_time_leaves_some_to_others(
    deploy: Deploy, changes: ChangeFiles, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = deploy(stream(dataset, "lost", source="nowhere"), stream(dataset))
    deployment.resources["nowhere"] = FileSource(path=str(changes.folder / "none"))
    changes.put(("c", 1, "ann"))
    monkeypatch.setattr(sensors, "BUDGET_SECONDS", 0.0)
    first = deployment.tick()
    assert "does not exist" in str(first.skip_reason)
    assert deployment.launched().tags["dagster_bq/stream"] == "orders"


def test_an_error_of_any_kind_leaves_the_other_streams(
    deploy: Deploy, changes: ChangeFiles, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = deploy(stream(dataset, "odd", source="odd"), stream(dataset))
    deployment.resources["odd"] = FileSource(path=str(changes.folder / "odd"))
    changes.put(("c", 1, "ann"))
    plan = FileMessages.plan

    def fail(self: FileMessages, *given: Any) -> Any:
        if "odd" in self._folder.address:
            raise OverflowError("year 55000 is out of range")
        return plan(self, *given)

    monkeypatch.setattr(FileMessages, "plan", fail)
    deployment.streams.reverse()
    deployment.run(deployment.launched())
    with pytest.raises(dg.Failure, match=r"'odd': OverflowError\('year 55000"):
        deployment.tick()


def test_a_try_has_a_key_of_its_own_whatever_the_clocks_say(
    deploy: Deploy,
    changes: ChangeFiles,
    bigquery: BigQueryResource,
    dataset: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A key that was used is never launched again: the stream would stand still for ever."""
    monkeypatch.setattr("dagster_bq_connector.cdc.look.FIRST_PAUSE", timedelta(0))
    deployment = deploy(stream(dataset))
    changes.put(("c", 1, "ann"))
    deployment.run(deployment.launched())
    watermark = Watermark(ledger_at(bigquery, dataset), "orders")
    ahead = watermark.now() + timedelta(hours=7)
    watermark.change(lambda state: dataclasses.replace(state, moved=ahead))
    changes.put_lines(BAD)
    keys: list[str] = []
    for _ in range(3):
        request = deployment.launched()
        keys.append(request.run_key or "")
        tags = {**request.tags, "dagster/run_key": keys[-1]}  # as the daemon does
        request = dg.RunRequest(run_config=request.run_config, tags=tags)
        result = deployment.run(request, raise_on_error=False)
        assert not result.success
    assert [key.rpartition(":")[2] for key in keys] == ["0", "1", "2"]
    for run in deployment.instance.get_runs()[-2:]:  # old runs are deleted
        deployment.instance.delete_run(run.run_id)
    assert (deployment.launched().run_key or "").endswith(":3")


def test_a_cursor_of_other_types_changes_nothing(deploy: Deploy, dataset: str) -> None:
    deployment = deploy(stream(dataset))
    deployment.cursor = json.dumps({"streams": {"orders": {"plans": ["x"]}}})
    assert "no changes" in str(deployment.tick().skip_reason)


def test_a_break_within_a_plan_can_be_acknowledged(
    deploy: Deploy,
    changes: ChangeFiles,
    bigquery: BigQueryResource,
    dataset: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What comes before the break is in the same plan, which is applied anew."""
    deployment = deploy(stream(dataset))
    definitions = dg.Definitions(assets=deployment.streams, resources=deployment.resources)
    monkeypatch.setattr("dagster_bq_connector.cdc_command._load", lambda options: definitions)
    changes.lsn = 1_000
    changes.put(("c", 1, "ann"), ts_ms=1_000)
    changes.lsn = 10
    changes.put(("c", 2, "bob"), ts_ms=900_000)
    changes.lsn = 1_010
    changes.put(("c", 3, "cat"), ts_ms=2_000)  # of the old history: of another partition
    changes.lsn = 20
    changes.put(("c", 4, "dan"), ts_ms=901_500)
    assert not deployment.materialize(raise_on_error=False).success
    watermark = Watermark(ledger_at(bigquery, dataset), "orders")
    before = watermark.read() or StreamState()
    assert before.plan
    assert main(["acknowledge", "orders", "--yes"]) == 0
    after = watermark.read() or StreamState()
    # The topics may be others by now, and those of before are not to be read into new tables.
    assert after.plan is None
    assert after.plan_to(before.plan.stop, 1).id != before.plan.id
    assert deployment.materialize().success
    assert [row[0] for row in deployment.rows(f"{dataset}.orders")] == [1, 2, 3, 4]
    changes.lsn = 5
    changes.put(("c", 5, "eve"), ts_ms=1_900_000)
    assert not deployment.materialize(raise_on_error=False).success  # the next break is one


def test_what_was_committed_is_reported_when_the_source_fails_then(numbers: Numbers) -> None:
    numbers.put(150)

    class Failing(FileMessages):
        def lag(self, position: Any) -> Any:
            raise UnreachableError("the folder does not answer")

    drained = numbers.worker(source=Failing(str(numbers.folder))).drain()
    assert [applied.messages for applied in drained.applied] == [100]
    assert drained.lag is None
    assert numbers.state.failure is None
    assert "the folder does not answer" in numbers.said[-1]


def test_a_run_whose_source_does_not_tell_the_lag_is_no_failure(
    deploy: Deploy, changes: ChangeFiles, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: FileMessages, position: Any) -> Any:
        raise UnreachableError("the folder does not answer")

    monkeypatch.setattr(FileMessages, "lag", fail)
    changes.put(("c", 1, "ann"))
    [event] = deploy(stream(dataset)).materialize().asset_materializations_for_node("orders")
    assert event.metadata["dagster_bq/upserts"].value == 1
    assert "dagster_bq/lag" not in event.metadata


@pytest.mark.parametrize("stop", [None, {}, {"file": "zzz"}])
def test_a_plan_that_was_written_by_hand_never_gets_into_the_entry(
    numbers: Numbers, stop: Any
) -> None:
    """There it would stay, since a plan stays until it is committed."""
    numbers.put(10)
    with pytest.raises(PlanMismatchError, match="or it was written by hand"):
        numbers.worker().drain(Request("mine", None, stop))
    assert numbers.state.plan is None
    assert len(numbers.worker().drain().plans) == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"plan": "1-a", "start": "{"}, "are JSON: "),
        ({"stop": '{"file": "a"}'}, "A range without the id of its plan"),
    ],
)
def test_a_config_that_was_written_by_hand_is_told(fields: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{reason}.*Leave the config empty"):
        PlanConfig(**fields).to_request()
    assert PlanConfig().to_request() is None


def test_a_plan_is_what_will_be_read_of_it() -> None:
    given: Any = {"offsets": {2: 1, 10: 5}, "places": (1, 2)}
    plan = StreamState().plan_to(given, 5)
    assert plan.stop == {"offsets": {"2": 1, "10": 5}, "places": [1, 2]}
    assert Plan.of(1, None, plan.stop, 5).id == plan.id


def test_a_run_that_took_no_plan_does_not_uncount_those_that_died_of_it(numbers: Numbers) -> None:
    numbers.put(100)
    died = numbers.source.plan(None, 100)
    assert died

    def lose(state: StreamState) -> StreamState:
        return dataclasses.replace(
            state, plan=dataclasses.replace(state.plan_to(died, 100), lost=2)
        )

    numbers.watermark.change(lose)
    gone = FileMessages(str(numbers.folder / "none"))
    with pytest.raises(Exception, match="does not exist"):
        numbers.worker(source=gone).drain()
    assert numbers.state.plan
    assert numbers.state.plan.lost == 2
    assert [applied.messages for applied in numbers.worker().drain().applied] == [50, 50]


def test_a_skip_is_of_what_was_shown(
    deploy: Deploy, changes: ChangeFiles, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = deploy(stream(dataset))
    definitions = dg.Definitions(assets=deployment.streams, resources=deployment.resources)
    monkeypatch.setattr("dagster_bq_connector.cdc_command._load", lambda options: definitions)
    changes.put(("c", 1, "ann"), ("c", 2, "bob"))
    read = FileMessages.read

    def slow(self: FileMessages, *given: Any) -> Any:
        monkeypatch.setattr(FileMessages, "read", read)
        assert deployment.materialize().success  # a run while the messages are shown
        return read(self, *given)

    monkeypatch.setattr(FileMessages, "read", slow)
    assert main(["skip", "orders", "--yes"]) == 1
    changes.put(("c", 3, "cat"))
    assert deployment.materialize().success
    assert [row[0] for row in deployment.rows(f"{dataset}.orders")] == [1, 2, 3]


def test_a_message_of_the_year_55000_is_applied(tmp_path: Path) -> None:
    with kafka_broker(tmp_path) as broker:
        topic = broker.create()
        producer = Producer({"bootstrap.servers": broker.address})
        producer.produce(topic, b"{}", timestamp=time.time_ns() // 1_000)  # Kafka's are of ms
        assert producer.flush(30) == 0
        lag = KafkaMessages(KafkaOptions(broker.address, topic)).lag(None)
    assert lag.changes == 1
    assert Pace().is_due(lag, utc_now)


@pytest.mark.parametrize("hours", [-24 * 365, 24 * 365])
def test_a_holder_of_a_wrong_clock_is_not_waited_for(numbers: Numbers, hours: int) -> None:
    numbers.put(10)
    at = numbers.now() + timedelta(hours=hours)
    holder, failure = Holder("dead", "0", at), Failure(3, at, "no such column")
    numbers.watermark.change(
        lambda state: dataclasses.replace(state, holder=holder, failure=failure)
    )
    assert look(numbers.watermark, numbers.source, numbers.pace, NO_RUNS, 0).plan
    assert numbers.worker().drain().plans


def test_a_run_that_waited_for_its_turn_has_all_its_time(
    numbers: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers.put(250)
    numbers.pace = dataclasses.replace(EAGER, max_run_seconds=60)
    clock = [0.0]
    monkeypatch.setattr("dagster_bq_connector.cdc.stream.time.monotonic", lambda: clock[0])

    class Late(Lease):
        def __enter__(self) -> Any:
            clock[0] += 120
            return super().__enter__()

    monkeypatch.setattr("dagster_bq_connector.cdc.stream.Lease", Late)
    assert len(numbers.worker().drain().plans) == 3


@pytest.mark.parametrize("text", ["x" * 2_000, "ü" * 2_000, "🙂" * 2_000, '"\n' * 2_000])
def test_a_reason_takes_no_more_room_than_it_should(text: str) -> None:
    state = failed(StreamState(stopped=shortened(text)), text, Numbers.now())
    assert len(json.dumps(state.to_json())) < 1_300
    assert shortened("short: ü") == "short: ü"


def test_names_that_an_op_cannot_have_stay_apart(deploy: Deploy, dataset: str) -> None:
    streams = [stream(dataset, name, tables=tables(dataset, n)) for n, name in enumerate(NAMES)]
    deployment = deploy(*streams)
    definitions = dg.Definitions(assets=streams, resources=deployment.resources)
    job = definitions.resolve_implicit_global_asset_job_def()
    assert len({node.name for node in job.nodes}) == len(NAMES)


NAMES = ["a_b", "a-b", "a.b", "bestellöng", "bestellüng"]


def tables(dataset: str, number: int) -> dict[str, CdcTable]:
    return {"public.orders": CdcTable(f"{dataset}.t{number}", schema=COLUMNS)}


@pytest.mark.parametrize(
    "keys",
    [{"source": "my-topic"}, {"source": "from"}, {"source": "config"}, {"bigquery": "context"}],
)
def test_keys_that_resources_cannot_have_here_are_told(keys: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="cannot be the key of a resource here"):
        stream("d", **keys)


@pytest.fixture
def begun(bigquery: BigQueryResource, changes: ChangeFiles, dataset: str) -> Deployment:
    """A deployment whose stream has applied one change."""
    instance = dg.DagsterInstance.ephemeral()
    deployment = Deployment(bigquery, changes, instance, stream(dataset))
    changes.put(("c", 1, "ann"))
    deployment.materialize()
    return deployment


def test_two_deployments_with_one_name_and_ledger_are_told(
    begun: Deployment, changes: ChangeFiles, dataset: str
) -> None:
    """Each would take a part of the changes, without a word."""
    changes.put(("c", 2, "bob"))
    laptop = {"public.orders": CdcTable(f"{dataset}.of_a_laptop", schema=COLUMNS)}
    laptops = stream(dataset, tables=laptop)
    other = Deployment(begun.bigquery, changes, begun.instance, laptops)
    with pytest.raises(dg.Failure, match=r"another table than .*of_a_laptop so far"):
        other.materialize()
    begun.materialize()
    assert begun.rows(f"{dataset}.orders") == [(1, "ann"), (2, "bob")]


def test_a_stream_that_gets_another_table_goes_on(
    begun: Deployment, changes: ChangeFiles, dataset: str
) -> None:
    tables = {
        f"public.{name}": CdcTable(f"{dataset}.{name}", schema=COLUMNS)
        for name in ("orders", "customers")
    }
    changes.table = "customers"
    changes.put(("c", 7, "eve"))
    more = stream(dataset, tables=tables)
    Deployment(begun.bigquery, changes, begun.instance, more).materialize()
    assert begun.rows(f"{dataset}.customers") == [(7, "eve")]
