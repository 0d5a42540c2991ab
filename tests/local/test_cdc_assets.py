"""Change streams as assets and their sensor, in runs of Dagster."""

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_bq_connector import (
    BigQueryResource,
    CdcTable,
    DeadLetters,
    FileSource,
    KafkaSource,
    build_cdc_sensor,
    sensors,
)
from dagster_bq_connector.errors import ConfigurationError, LedgerError
from support.cdc_deployment import COLUMNS, Deployment, stream
from support.change_files import ChangeFiles
from support.ledgers import ledger_at


@pytest.fixture
def changes(tmp_path: Path) -> ChangeFiles:
    return ChangeFiles(tmp_path / "changes")


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture
def deployment(
    bigquery: BigQueryResource, changes: ChangeFiles, instance: dg.DagsterInstance, dataset: str
) -> Deployment:
    return Deployment(bigquery, changes, instance, stream(dataset))


def shown(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    [event] = result.asset_materializations_for_node("orders")
    return {name: value.value for name, value in event.metadata.items()}


def said(result: dg.SensorResult) -> str:
    assert result.skip_reason
    return str(result.skip_reason.skip_message)


def test_materialize_drains_a_stream(
    deployment: Deployment, changes: ChangeFiles, dataset: str, project: str
) -> None:
    changes.put(("c", 1, "ann"), ("c", 2, "bob"), ("u", 1, "eve"))
    changes.put(("d", 2, None), ("c", 3, "cat"))
    metadata = shown(deployment.materialize())
    assert deployment.rows(f"{dataset}.orders") == [(1, "eve"), (3, "cat")]
    counts = ("upserts", "deletes", "superseded", "failed", "messages", "plans", "lag")
    assert [metadata[f"dagster_bq/{name}"] for name in counts] == [3, 1, 1, 0, 5, 1, 0]
    assert metadata["dagster_bq/first_sequence"] == "0000000000000064/0000000000000065"
    assert metadata["dagster_bq/last_sequence"] == "0000000000000068/0000000000000069"
    assert metadata["dagster_bq/stop"]["file"] == "000001.ndjson"
    assert metadata["dagster/table_name"] == f"{project}.{dataset}.orders"
    assert [column.name for column in metadata["dagster/column_schema"].columns] == ["id", "name"]
    again = shown(deployment.materialize())
    assert (again["dagster_bq/plans"], again["dagster_bq/upserts"]) == (0, 0)
    assert again["dagster_bq/start"] == metadata["dagster_bq/stop"]


def test_a_stream_is_one_unit(
    bigquery: BigQueryResource, changes: ChangeFiles, instance: dg.DagsterInstance, dataset: str
) -> None:
    tables = {
        f"public.{name}": CdcTable(f"{dataset}.{name}", schema=COLUMNS) for name in ("orders", "c")
    }
    deployment = Deployment(bigquery, changes, instance, stream(dataset, tables=tables))
    changes.put(("c", 1, "ann"))
    ChangeFiles(changes.folder, "c").put_lines()  # nothing: a file without lines
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="asset job"):
        deployment.materialize(selection=[dg.AssetKey([dataset, "orders"])])
    result = deployment.materialize()
    keys = [event.asset_key for event in result.get_asset_materialization_events()]
    assert keys == [dg.AssetKey([dataset, "orders"]), dg.AssetKey([dataset, "c"])]


def test_a_tick_launches_a_run_that_the_next_one_sees(
    deployment: Deployment, changes: ChangeFiles, dataset: str
) -> None:
    assert said(deployment.tick()) == "orders: no changes"
    changes.put(("c", 1, "ann"))
    request = deployment.launched()
    assert request.run_key
    assert request.run_key.startswith("orders:1-")
    assert request.run_key.endswith(":0")
    assert request.tags["dagster_bq/stream"] == "orders"
    assert request.tags["dagster_bq/plan"] == request.run_key.split(":")[1]
    assert request.asset_selection == [dg.AssetKey([dataset, "orders"])]
    config = request.run_config["ops"]["orders"]["config"]
    assert config["start"] == "null"
    assert json.loads(config["stop"])["file"] == "000000.ndjson"
    assert deployment.run(request).success
    assert said(deployment.tick()) == "orders: no changes"
    assert deployment.rows(f"{dataset}.orders") == [(1, "ann")]


def test_the_cursor_can_be_read_by_people(deployment: Deployment, changes: ChangeFiles) -> None:
    changes.put(("c", 1, "ann"), ("c", 2, "bob"))
    request = deployment.launched()
    cursor = json.loads(deployment.cursor or "")["streams"]["orders"]
    assert cursor["said"].startswith("2 messages wait, the oldest since 20")
    assert cursor["lag"]["messages"] == 2
    assert cursor["launched"]["plan"] == request.tags["dagster_bq/plan"]
    assert (cursor["position"], cursor["plans"]) == (None, 0)
    deployment.run(request)
    deployment.tick()
    cursor = json.loads(deployment.cursor or "")["streams"]["orders"]
    assert (cursor["position"]["lines"], cursor["plans"]) == (2, 1)
    assert "launched" not in cursor


@pytest.mark.parametrize(
    "cursor", [None, "", "7", "[]", '{"streams": 3}', '{"streams": {"orders": 1}}']
)
def test_a_cursor_that_is_wiped_or_none_changes_nothing(
    deployment: Deployment, changes: ChangeFiles, cursor: str | None
) -> None:
    changes.put(("c", 1, "ann"))
    deployment.run(deployment.launched())
    deployment.cursor = cursor
    assert said(deployment.tick()) == "orders: no changes"
    changes.put(("c", 2, "bob"))
    request = deployment.launched()
    assert request.tags["dagster_bq/plan"].startswith("2-")


def test_a_run_that_failed_is_tried_again_under_another_key(
    deployment: Deployment, changes: ChangeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes.put(("c", 1, "ann"))
    changes.put_lines('{"topic": "shop.public.orders", "key": {"id": 2}, "value": 7}')
    first = deployment.launched()
    failed = deployment.run(first, raise_on_error=False)
    assert not failed.success
    assert "the last run failed, the next begins at" in said(deployment.tick())
    monkeypatch.setattr("dagster_bq_connector.cdc.look.FIRST_PAUSE", timedelta(0))
    second = deployment.launched()
    assert second.tags["dagster_bq/plan"] == first.tags["dagster_bq/plan"]
    assert (first.run_key or "").replace(":0", ":1") == second.run_key


def test_a_run_that_fails_shows_what_it_committed_before(
    bigquery: BigQueryResource, instance: dg.DagsterInstance, changes: ChangeFiles, dataset: str
) -> None:
    deployment = Deployment(bigquery, changes, instance, stream(dataset, max_changes=2))
    changes.put(("c", 1, "ann"), ("c", 2, "bob"))
    changes.put_lines('{"topic": "shop.public.orders", "key": {"id": 3}, "value": 7}')
    key = dg.AssetKey([dataset, "orders"])
    for _ in range(2):  # the second one commits nothing
        assert not deployment.materialize(raise_on_error=False).success
    assert instance.fetch_materializations(key, limit=9).records == []  # for it has failed
    [record] = instance.fetch_observations(key, limit=9).records
    event = record.asset_observation
    assert event is not None
    metadata = {name: value.value for name, value in event.metadata.items()}
    assert (metadata["dagster_bq/upserts"], metadata["dagster_bq/plans"]) == (2, 1)
    assert metadata["dagster_bq/stop"]["file"] == "000000.ndjson"
    assert deployment.rows(f"{dataset}.orders") == [(1, "ann"), (2, "bob")]
    ledger = ledger_at(bigquery, dataset)
    for entry in ledger.entries():
        ledger.delete(entry)
    with pytest.raises(LedgerError, match="a run has shown the position"):
        deployment.materialize()


@pytest.mark.parametrize(
    ("status", "waits"),
    [
        (dg.DagsterRunStatus.NOT_STARTED, True),
        (dg.DagsterRunStatus.STARTED, True),
        (dg.DagsterRunStatus.CANCELED, False),
    ],
)
def test_a_live_run_is_waited_for(
    deployment: Deployment,
    changes: ChangeFiles,
    status: dg.DagsterRunStatus,
    waits: bool,
) -> None:
    changes.put(("c", 1, "ann"))
    request = deployment.launched()
    jobs = dg.Definitions(assets=deployment.streams, resources=deployment.resources)
    job = jobs.resolve_implicit_global_asset_job_def()
    deployment.instance.create_run_for_job(job, tags=dict(request.tags), status=status)
    result = deployment.tick()
    assert bool(result.run_requests) is not waits
    if waits:
        assert "is being started" in said(result) or "is beginning" in said(result)


def test_two_daemons_launch_the_same_run(deployment: Deployment, changes: ChangeFiles) -> None:
    changes.put(("c", 1, "ann"))
    first, second = deployment.launched(), deployment.launched()
    assert first.run_key == second.run_key
    assert shown(deployment.run(first))["dagster_bq/upserts"] == 1
    metadata = shown(deployment.run(second))
    assert metadata["dagster_bq/replayed"] is True
    assert metadata["dagster_bq/plans"] == 0


def test_a_run_for_another_position_is_not_tried_again(
    deployment: Deployment, changes: ChangeFiles
) -> None:
    changes.put(("c", 1, "ann"))
    request = deployment.launched()
    config = request.run_config["ops"]["orders"]["config"]
    config["start"] = json.dumps({"file": "elsewhere"})
    result = deployment.run(request, raise_on_error=False)
    assert not result.success
    [failure] = [event for event in result.all_events if event.is_step_failure]
    assert "launched for plan" in failure.event_specific_data.error.message
    run = deployment.instance.get_run_by_id(result.run_id)
    assert run
    assert run.tags["dagster/max_retries"] == "0"


def test_one_stream_that_cannot_be_looked_at_leaves_the_others(
    bigquery: BigQueryResource, changes: ChangeFiles, instance: dg.DagsterInstance, dataset: str
) -> None:
    lost = stream(dataset, "lost", source="nowhere")
    deployment = Deployment(bigquery, changes, instance, lost, stream(dataset))
    deployment.resources["nowhere"] = FileSource(path=str(changes.folder / "none"))
    changes.put(("c", 1, "ann"))
    assert deployment.launched().tags["dagster_bq/stream"] == "orders"
    deployment.streams.reverse()
    deployment.run(deployment.launched())
    with pytest.raises(dg.Failure, match=r"Stream 'lost': The folder .* does not exist"):
        deployment.tick()


def test_a_tick_ends_in_time_and_the_next_goes_on(
    bigquery: BigQueryResource,
    changes: ChangeFiles,
    instance: dg.DagsterInstance,
    dataset: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = [stream(dataset, name) for name in ("a", "b", "c")]
    deployment = Deployment(bigquery, changes, instance, *streams)
    monkeypatch.setattr(sensors, "BUDGET_SECONDS", 0.0)
    looked = [said(deployment.tick()) for _ in range(4)]
    assert looked == ["a: no changes", "b: no changes", "c: no changes", "a: no changes"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"apply": "merge"}, "apply='merge'"),
        ({"tables": {}}, "tables is empty"),
        ({"tables": {"orders": CdcTable("d.t")}}, "write schema.table"),
        ({"tables": {"a.b": CdcTable("d.t"), "a.c": CdcTable("d.t")}}, "one destination"),
        ({"failed_rows": "skip"}, "failed_rows='skip'"),
        ({"truncates": "apply"}, "truncates='apply'"),
        ({"tables": {"a.b": CdcTable("d.t", parked=True)}}, "DeadLetters"),
        ({"min_rows": 0}, "min_rows=0"),
        ({"name": " "}, "needs a name"),
    ],
)
def test_definitions_that_cannot_work_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        stream("d", **settings)


def test_a_sensor_takes_change_streams_only() -> None:
    @dg.asset
    def other() -> None: ...

    with pytest.raises(ConfigurationError, match="no change stream"):
        build_cdc_sensor([other])
    with pytest.raises(ConfigurationError, match="each name once"):
        build_cdc_sensor([stream("d"), stream("d")])
    with pytest.raises(ConfigurationError, match="at least one"):
        build_cdc_sensor([])


def test_assets_keep_their_stream_when_their_specs_are_changed(
    deployment: Deployment, changes: ChangeFiles, bigquery: BigQueryResource, dataset: str
) -> None:
    owned = stream(dataset).map_asset_specs(
        lambda spec: spec.replace_attributes(owners=["team:shop"])
    )
    deployment = Deployment(bigquery, changes, deployment.instance, owned)
    changes.put(("c", 1, "ann"))
    assert deployment.run(deployment.launched()).success


def test_other_tables_and_dead_letters_are_shown(
    bigquery: BigQueryResource, changes: ChangeFiles, instance: dg.DagsterInstance, dataset: str
) -> None:
    letters = DeadLetters(f"{dataset}.letters")
    deployment = Deployment(bigquery, changes, instance, stream(dataset, failed_rows=letters))
    changes.put(("c", 1, "ann"))
    changes.put_lines('{"topic": "shop.public.orders", "key": {"id": 2}, "value": 7}')
    changes.table = "customers"
    changes.put(("c", 1, "ann"))
    metadata = shown(deployment.materialize())
    assert metadata["dagster_bq/other_tables"] == {"public.customers": 1}
    with bigquery.get_client() as client:
        [row] = client.query_and_wait(f"SELECT source, reason FROM {dataset}.letters")
    assert row["source"].endswith("000001.ndjson, line 1")


def test_a_stream_whose_entry_is_gone_does_not_begin_anew(
    deployment: Deployment, changes: ChangeFiles, bigquery: BigQueryResource, dataset: str
) -> None:
    """The source may have forgotten what came after the position."""
    changes.put(("c", 1, "ann"))
    deployment.materialize()
    ledger = ledger_at(bigquery, dataset)
    [entry] = ledger.entries()
    ledger.delete(entry)
    with pytest.raises(LedgerError, match=r"entry is gone.*a run has shown the position .*reset"):
        deployment.materialize()


def test_a_variable_of_the_environment_is_no_address() -> None:
    with pytest.raises(ConfigurationError, match="EnvVar is read by resources only"):
        stream("d", ledger=dg.EnvVar("LEDGER"))


def test_the_secrets_of_a_source_are_in_no_definition() -> None:
    source = KafkaSource(bootstrap_servers="k:9092", topic="t", user="u", password="s3cret")
    assert "s3cret" not in repr(source)
