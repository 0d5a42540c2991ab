"""What the sources share, as a user's process sees it."""

import subprocess
import sys

import pyarrow as pa
import pytest

from dagster_bq_connector.cdc.event import FILE, MESSAGES, name_of


@pytest.mark.parametrize("room", ["files", "kafka"])
def test_a_source_is_imported_without_dagster_and_without_the_package_for_kafka(room: str) -> None:
    code = f"import sys, dagster_bq_connector.cdc.source.{room}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"dagster", "dagster_gcp", "confluent_kafka"} & set(done.stdout.split())


def test_messages_are_named_to_people() -> None:
    rows = [{"topic": "shop.orders", "partition": 3, "offset": 17, "key": None, "value": None}]
    messages = pa.RecordBatch.from_pylist(rows, MESSAGES)
    assert name_of(messages, 0) == "shop.orders[3]@17"
    of_file = messages.replace_schema_metadata({FILE: b"gs://changes/a.ndjson"})
    assert name_of(of_file, 0) == "gs://changes/a.ndjson, line 17"
