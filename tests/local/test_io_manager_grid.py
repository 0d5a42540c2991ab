"""The IO manager: every kind of partitions x every form of rows x every layout of the table.

A run has every two of these together; `make soak` has all three. At its end the table of what
passed is printed (tests/conftest.py).
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from google.cloud import bigquery as google

from dagster_bq_connector import (
    BigQueryIOManager,
    BigQueryReader,
    BigQueryResource,
    FileLoadsWriter,
    TableOptions,
    TimePartitioning,
)
from dagster_bq_connector.schema.types import table_fields
from support.partitioned_assets import FORMS, KINDS, SCHEMA, as_form, as_table, ids, rows_of

LAYOUTS = ("new", "plain", "partitioned")
CELLS = [
    (kind, form, layout)
    for k, kind in enumerate(KINDS)
    for f, form in enumerate(FORMS)
    for n, layout in enumerate(LAYOUTS)
    if (k + f) % len(LAYOUTS) == n or os.environ.get("SOAK")
]
_PARTITIONED = {"hourly": ("at", "hour"), "monthly": ("day", "month")}


def create(client: google.Client, address: str, kind: str, layout: str) -> None:
    if layout == "new":
        return
    table = google.Table(f"{client.project}.{address}", schema=table_fields(SCHEMA))
    column, granularity = _PARTITIONED.get(kind, ("day", "day"))
    if layout == "partitioned":
        TableOptions(TimePartitioning(column, granularity), clustering=("city",)).apply(table)
    client.create_table(table)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.mark.parametrize(("kind", "form", "layout"), CELLS)
def test_grid(
    kind: str,
    form: str,
    layout: str,
    dataset: str,
    bigquery: BigQueryResource,
    reader: BigQueryReader,
    load_writer: FileLoadsWriter,
    instance: dg.DagsterInstance,
) -> None:
    definition, expression, keys = KINDS[kind]
    if isinstance(definition, dg.DynamicPartitionsDefinition):
        instance.add_dynamic_partitions("cities", list(keys))
    with bigquery.get_client() as client:
        create(client, f"{dataset}.table", kind, layout)
    resources = {"io_manager": BigQueryIOManager(writer=load_writer, dataset=dataset)}
    given: dict[str, Any] = {}
    taken: dict[str, Any] = {}

    @dg.asset(
        partitions_def=definition,
        metadata={"partition_expr": expression} if expression else {},
        backfill_policy=dg.BackfillPolicy.single_run() if definition else None,
    )
    def table() -> FORMS[form]:
        return as_form(given["rows"], form)

    @dg.asset(partitions_def=definition)
    def same(table: FORMS[form]) -> None:
        taken["same"] = table

    @dg.asset(ins={"table": dg.AssetIn(metadata={"columns": ["id"], "where": "id >= 100"})})
    def everything(table: FORMS[form]) -> None:
        taken["everything"] = table

    def run(asset: dg.AssetsDefinition, keys: Sequence[str] = ()) -> list[Any]:
        tags = {}
        if len(keys) == 2:
            names = ("dagster/asset_partition_range_start", "dagster/asset_partition_range_end")
            tags = dict(zip(names, keys, strict=True))
        result = dg.materialize(
            [table, same, everything],
            selection=[asset],
            resources=resources,
            instance=instance,
            partition_key=keys[0] if len(keys) == 1 else None,
            tags=tags,
        )
        return [event.materialization for event in result.get_asset_materialization_events()]

    both, [first, second] = keys if definition else (), keys
    given["rows"] = rows_of(keys, 3)
    shown = run(table, both)
    assert ids(reader.read(f"{dataset}.table").to_arrow()) == [0, 1, 2, 3, 4, 5]
    if definition:
        counts = {m.partition: m.metadata["dagster/partition_row_count"].value for m in shown}
        assert counts == {first: 3, second: 3}
    given["rows"] = rows_of([first], 1, first=100)
    [one] = run(table, [first] if definition else [])
    assert one.metadata["dagster_bq/rows"].value == 1
    left = [3, 4, 5, 100] if definition else [100]
    assert ids(reader.read(f"{dataset}.table").to_arrow()) == left
    run(same, [second] if definition else [])
    assert isinstance(taken["same"], FORMS[form])
    assert ids(taken["same"]) == ([3, 4, 5] if definition else [100])
    assert as_table(taken["same"]).column_names == SCHEMA.names
    if layout == "new":
        run(everything)
        assert isinstance(taken["everything"], FORMS[form])
        assert as_table(taken["everything"]).to_pydict() == {"id": [100]}
    if definition and form == "arrow":  # no row of another partition gets in
        given["rows"] = pa.concat_tables([rows_of([first], 1), rows_of([second], 1)])
        with pytest.raises(Exception, match="Row 1 belongs to"):
            run(table, [first])
        assert ids(reader.read(f"{dataset}.table").to_arrow()) == left
