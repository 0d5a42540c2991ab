"""A process that is killed in the middle of a transaction's steps leaves the table as it was."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dagster_bq_connector import BigQueryReader, BigQueryResource, FileLoadsWriter, TableRef
from dagster_bq_connector.table.row_slice import KeyFilter, RowSlice

# Stops for ever before or after one step, and says so.
PROGRAM = """
import json, sys, time
import pyarrow as pa
from dagster_bq_connector import BigQueryResource, FileLoadsWriter, TableRef
from dagster_bq_connector.table.row_slice import KeyFilter, RowSlice
from dagster_bq_connector.write import transaction

fields, dataset, staging, step = json.loads(sys.argv[1])
owner, name, after = {
    "before the load": (transaction, "start_load", False),
    "before the transaction": (transaction._Change, "commit", False),
    "after the transaction": (transaction._Change, "commit", True),
}[step]
original = getattr(owner, name)

def stopping(*arguments, **options):
    result = original(*arguments, **options) if after else None
    print("there", flush=True)
    time.sleep(3600)

setattr(owner, name, stopping)
writer = FileLoadsWriter(bigquery=BigQueryResource(**fields), staging=staging)
rows = pa.table({"region": ["de"], "n": [2]})
writer.replace(rows, RowSlice(TableRef(dataset, "t"), (("de", (KeyFilter("region", ("de",)),)),)))
"""


@pytest.mark.parametrize(
    ("step", "changed"),
    [
        ("before the load", False),
        ("before the transaction", False),
        ("after the transaction", True),
    ],
)
def test_a_killed_replace_of_a_slice(
    dataset: str,
    fields: dict[str, Any],
    load_writer: FileLoadsWriter,
    reader: BigQueryReader,
    bigquery: BigQueryResource,
    tmp_path: Path,
    step: str,
    changed: bool,
) -> None:
    load_writer.replace(pa.table({"region": ["de", "at"], "n": [1, 1]}), f"{dataset}.t")

    def content() -> list[tuple[object, ...]]:
        return sorted(
            (row["region"], row["n"]) for row in reader.read(f"{dataset}.t").to_arrow().to_pylist()
        )

    program = tmp_path / "replace.py"
    program.write_text(PROGRAM)
    given = json.dumps([fields, dataset, load_writer.staging, step])
    with subprocess.Popen(
        [sys.executable, program, given], stdout=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "there\n"
        finally:
            process.send_signal(signal.SIGKILL)
        process.wait()
    assert content() == [("at", 1), ("de", 2 if changed else 1)]
    with bigquery.get_client() as client:
        [left] = [table for table in client.list_tables(dataset) if table.table_id != "t"]
        assert client.get_table(left.reference).expires is not None
    slice_ = RowSlice(TableRef(dataset, "t"), (("de", (KeyFilter("region", ("de",)),)),))
    load_writer.replace(pa.table({"region": ["de"], "n": [3]}), slice_)
    assert content() == [("at", 1), ("de", 3)]
    with bigquery.get_client() as client:
        assert len(list(client.list_tables(dataset))) == 2
