"""The error index has every exception, and its example messages are what the library says."""

import datetime as dt
import re
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from google.api_core import exceptions as api
from google.cloud.bigquery import SchemaField

from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    DailyTable,
    DefaultStreamWriter,
    ExactlyOnceWriter,
    FailedRowsError,
    FileLoadsWriter,
    TableOptions,
    TableRef,
    TimePartitioning,
    errors,
)
from dagster_bq_connector.cdc.apply.upsert import Upsert
from dagster_bq_connector.cdc.envelope.debezium_json import DebeziumJson
from dagster_bq_connector.cdc.lease import Lease
from dagster_bq_connector.cdc.ordering.postgres import PostgresLsn
from dagster_bq_connector.cdc.source.files import FileMessages
from dagster_bq_connector.cdc.source.kafka_offsets import Seen, check
from dagster_bq_connector.cdc.stream import Request, Worker
from dagster_bq_connector.cdc.table import CdcTable
from dagster_bq_connector.cdc.watermark import Watermark
from dagster_bq_connector.errors import ConnectorError, FailedRow, explain
from dagster_bq_connector.ledger import BigQueryLedger, Key, open_ledger
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.write.key import purpose_of
from support.debezium import batch, event
from support.draining import EAGER, Written
from support.ledgers import ledger_at

DOCS = Path(__file__).parents[2] / "docs"
# The base of all, and one that the writers deal with themselves.
WITHOUT_EXAMPLE = {"ConnectorError", "RequestTooLargeError"}
CLASSES = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, ConnectorError)
}


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", (DOCS / "errors.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def examples(text: str) -> list[str]:
    return [found.strip() for found in re.findall(r"```text\n(.*?)```", text, re.DOTALL)]


def of_service(kind: type[api.GoogleAPICallError], reason: str, text: str) -> Exception:
    """What Google's client raises when the service says `text`."""
    return kind(text, errors=[{"reason": reason, "message": text}])


def said(action: Callable[[], object], kind: type[ConnectorError]) -> str:
    with pytest.raises(kind) as caught:
        action()
    assert type(caught.value) is kind
    return str(caught.value)


def test_an_order_that_is_lost() -> None:
    changes = batch(
        ({"id": 1}, event(lsn=901, committed=900, ts_ms=1_000)),
        ({"id": 1}, event(lsn=21, committed=20, ts_ms=60_000)),
    )
    profile = PostgresLsn()
    found = DebeziumJson().events(changes, profile)
    message = said(lambda: profile.advance({}, found), errors.OrderBreakError)
    assert message in examples(sections()["OrderBreakError"]), message


def test_messages_of_the_protocol(bigquery: BigQueryResource, dataset: str) -> None:
    watermark = Watermark(ledger_at(bigquery, dataset), "orders")
    run: Any = partial(
        Worker, watermark, FileMessages("."), Written(), EAGER, "run", bool, print, Progress
    )
    watermark.change(lambda state: replace(state, position={"n": 0}))
    request = Request("7-1c168adb00d2", {"n": 600}, {"n": 700})
    message = said(lambda: run().drain(request), errors.PlanMismatchError)
    assert message in examples(sections()["PlanMismatchError"]), message
    reason = "shop.public.orders[0]@1: it was committed after LSN 20, which is lower than 900."
    watermark.change(lambda state: replace(state, stopped=reason))
    message = said(lambda: run().drain(), errors.StreamStoppedError)
    assert message in examples(sections()["StreamStoppedError"]), message
    with Lease(watermark, "run", 60, bool, print) as lease:
        watermark.change(lambda state: replace(state, holder=None))
        message = said(lambda: lease.stop("", {}), errors.LeaseLostError)
    assert message in examples(sections()["LeaseLostError"]), message


def test_the_message_of_failed_events(bigquery: BigQueryResource, dataset: str) -> None:
    changes = batch(
        ({"id": 1}, event(after={"id": 1, "quantity": "three"})),
        ({"order": 2}, event(after={"id": 2, "quantity": 3})),
        ({"id": 3}, event(after={"id": 3, "quantity": 3})),
    )
    columns = [SchemaField("id", "INTEGER"), SchemaField("quantity", "INTEGER")]
    tables = {"public.orders": CdcTable(f"{dataset}.orders", schema=columns)}
    upsert = Upsert(bigquery.connect(), "orders", DebeziumJson(), PostgresLsn(), tables)
    message = said(
        lambda: upsert.apply([changes], {}, Progress("orders")), errors.FailedEventsError
    )
    message = message.replace(bigquery.connect().project, "my-project").replace(dataset, "shop")
    assert examples(sections()["FailedEventsError"]) == [message]


def test_every_exception_has_a_section_and_an_example() -> None:
    found = sections()
    assert list(found) == list(CLASSES), "in the order of errors.py"
    for name, text in found.items():
        assert bool(examples(text)) is (name not in WITHOUT_EXAMPLE), name


def test_messages_of_our_own(
    bigquery: BigQueryResource,
    reader: BigQueryReader,
    stream_writer: DefaultStreamWriter,
    load_writer: FileLoadsWriter,
    dataset: str,
) -> None:
    connected = bigquery.connect()
    connected.clients.cloud_storage(connected.project).create_bucket("my-files")
    rows = pa.table({"id": [1], "day": [dt.date(2026, 8, 1)]})
    orders = f"{dataset}.orders"
    stream_writer.append(rows, orders)
    daily = DailyTable(f"{dataset}.by_day", column="day")
    project = bigquery.connect().project
    ledger = BigQueryLedger(bigquery.connect().rest, project)
    once = ExactlyOnceWriter(bigquery=bigquery, ledger=f"{dataset}_ledger")
    gone = f"projects/{project}/datasets/{dataset}/tables/orders/streams/gone"
    purpose = purpose_of(f"{project}.{orders}", "append", rows.column_names)
    prepared = {"state": "prepared", "purpose": purpose, "attempt": "0123456789abcdef"}
    prepared |= {"streams": [gone], "rows": 2, "bytes": 0, "partitions": {}}
    open_ledger(bigquery.connect().clients, project, f"{dataset}_ledger").create(
        Key("write", "key monday"), prepared
    )
    elsewhere = FileLoadsWriter(bigquery=bigquery, staging="gs://no-such-bucket/files")
    by_day = TableOptions(TimePartitioning("day"))
    other_day = pa.table({"id": [2], "day": [dt.date(2026, 8, 2)]})
    filtered = TableOptions(TimePartitioning("day"), require_partition_filter=True)
    stream_writer.append(rows, f"{dataset}.visits", filtered)
    coloured = rows.append_column("colour", pa.array(["red"]))
    orders_0 = ("shop.public.orders", 0)
    orders_topic = Seen({"shop.public.orders": ""}, {orders_0: 1200}, {orders_0: 1500})
    cases: list[tuple[type[ConnectorError], Callable[[], object]]] = [
        (errors.ConfigurationError, lambda: elsewhere.append(rows, orders)),
        (errors.InvalidNameError, lambda: TableRef.parse("orders")),
        (errors.DatasetNotFoundError, lambda: stream_writer.append(rows, "nowhere.orders")),
        (errors.TableNotFoundError, lambda: reader.read(f"{dataset}.order")),
        (errors.TableMismatchError, lambda: stream_writer.append(rows, orders, by_day)),
        (errors.SchemaError, lambda: stream_writer.append(coloured, orders)),
        (
            errors.PartitionError,
            lambda: load_writer.replace(other_day, daily.for_keys(["2026-08-01"])),
        ),
        (errors.PartitionFilterError, lambda: reader.read(f"{dataset}.visits")),
        (errors.UnsupportedError, lambda: stream_writer.replace(rows, orders)),
        (errors.WriteKeyError, lambda: once.append(rows, orders)),
        (errors.UnknownOutcomeError, lambda: once.append(rows, orders, key="monday")),
        (errors.LedgerError, lambda: ledger.create(Key("stream", "orders"), {"at": "x" * 20_000})),
        (
            errors.SourceFileError,
            lambda: load_writer.load_uris("gs://my-files/2026/orders.parquet", orders),
        ),
        (errors.SourceMissingError, FileMessages("/data/changes").head),
        (errors.ChangesLostError, lambda: check({orders_0: 700}, {}, orders_topic)),
        (errors.SourceChangedError, lambda: check({orders_0: 2000}, {}, orders_topic)),
    ]
    for kind, action in cases:
        message = said(action, kind)
        message = message.replace(project, "my-project").replace(dataset, "shop")
        message = message.replace(f"--location={bigquery.location}", "--location=EU")
        assert message in examples(sections()[kind.__name__]), message


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (
            "AccessDeniedError",
            of_service(
                api.Forbidden,
                "accessDenied",
                "Access Denied: Project my-project: User does not have bigquery.jobs.create "
                "permission in project my-project.",
            ),
        ),
        (
            "RefusedError",
            of_service(
                api.BadRequest,
                "invalid",
                "Some rows belong to different partitions rather than destination partition "
                "my-project:shop.orders$20260801",
            ),
        ),
        (
            "QuotaError",
            of_service(
                api.Forbidden,
                "quotaExceeded",
                "Quota exceeded: Your table exceeded quota for imports or query appends per table",
            ),
        ),
        (
            "UnreachableError",
            of_service(api.ServiceUnavailable, "backendError", "Please retry the request"),
        ),
    ],
)
def test_messages_of_the_service(kind: str, error: Exception) -> None:
    explained = explain(error, "Load into my-project.shop.orders (job dagster_bq_0123_orders)")
    assert type(explained) is CLASSES[kind]
    assert str(explained) in examples(sections()[kind])


def test_the_message_of_failed_rows(stream_writer: DefaultStreamWriter, dataset: str) -> None:
    table, fine = f"{dataset}.orders", pa.decimal128(20, 10)
    stream_writer.append(pa.table({"price": [Decimal("1.5")], "tags": [["new"]]}), table)
    rows = pa.table(
        {
            "price": pa.array([Decimal("1.0000000005"), Decimal(2)], fine),
            "tags": [["new"], ["old", None]],
        }
    )
    with pytest.raises(FailedRowsError) as caught:
        stream_writer.append(rows, table)
    positions = zip((17, 523), caught.value.rows, strict=True)
    failed = [FailedRow(index, row.reason, row.column) for index, row in positions]
    message = str(FailedRowsError("my-project.shop.orders", failed, written=998))
    assert examples(sections()["FailedRowsError"]) == [message]
    assert examples((DOCS / "failed-rows.md").read_text()) == [message]
