"""The floors of the house, as a user's process sees them."""

import subprocess
import sys

import pytest

import dagster_bq_connector


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import dagster_bq_connector.read.rows, dagster_bq_connector.read.session",
        "import dagster_bq_connector.write.default_stream, dagster_bq_connector.write.file_loads",
        "import dagster_bq_connector.ledger, dagster_bq_connector.ledger.__main__",
        "import dagster_bq_connector.cdc.envelope.debezium_json, dagster_bq_connector.cdc.fold",
        "from dagster_bq_connector import TableRef, TableOptions, ConnectorError",
    ],
)
def test_the_lower_floor_leaves_dagster_out(statement: str) -> None:
    loaded = modules_after(statement)
    assert "dagster" not in loaded
    assert "dagster_gcp" not in loaded
    assert "polars" not in loaded


def test_importing_the_package_costs_nothing() -> None:
    loaded = modules_after("import dagster_bq_connector, dagster_bq_connector.local")
    for name in ("dagster", "google.cloud.bigquery", "pyarrow", "grpc", "duckdb", "local_bigquery"):
        assert name not in loaded


def test_every_public_name_is_there_and_documented() -> None:
    for name in dagster_bq_connector.__all__:
        assert getattr(dagster_bq_connector, name).__doc__, name
    assert set(dagster_bq_connector.__all__) <= set(dir(dagster_bq_connector))
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = dagster_bq_connector.Nonsense
