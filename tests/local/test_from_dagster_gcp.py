"""Tables that dagster-gcp-pandas' IO manager wrote are read, and then written, by this one."""

from typing import Any

import dagster as dg
import google.auth
import google.auth.credentials
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from dagster_gcp_pandas import BigQueryPandasIOManager
from google.cloud import bigquery as google_bigquery

from dagster_bq_connector import BigQueryIOManager, BigQueryReader, FileLoadsWriter
from support.partitioned_assets import CITIES, DAILY, ids


@pytest.fixture
def theirs(fields: dict[str, Any], dataset: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Their IO manager; it knows neither endpoints nor anonymous access.

    Google's client would read the rows from the real Storage API, also beside an emulator.
    """
    monkeypatch.setenv("BIGQUERY_EMULATOR_HOST", fields["api_endpoint"])
    anonymous = google.auth.credentials.AnonymousCredentials()
    monkeypatch.setattr(google.auth, "default", lambda *_, **__: (anonymous, fields["project"]))
    monkeypatch.setattr(google_bigquery.Client, "_ensure_bqstorage_client", lambda *_, **__: None)
    return BigQueryPandasIOManager(project=fields["project"], dataset=dataset)


def frame(day: str, *numbers: int, city: str = "berlin") -> pd.DataFrame:
    at = pd.Timestamp(f"{day}T12:00:00Z")
    return pd.DataFrame({"id": list(numbers), "at": at, "city": city})


@pytest.mark.local_only("it logs dagster-gcp in as nobody")
def test_a_table_changes_hands(
    theirs: Any, load_writer: FileLoadsWriter, reader: BigQueryReader, dataset: str
) -> None:
    ours = BigQueryIOManager(writer=load_writer, dataset=dataset)
    given: dict[str, Any] = {}
    taken: dict[str, Any] = {}

    @dg.asset
    def whole() -> pd.DataFrame:
        return given["whole"]

    @dg.asset(partitions_def=DAILY, metadata={"partition_expr": "at"})
    def by_day() -> pd.DataFrame:
        return given["by_day"]

    @dg.asset(partitions_def=CITIES, metadata={"partition_expr": "city"})
    def by_city() -> pd.DataFrame:
        return given["by_city"]

    @dg.asset(partitions_def=DAILY, ins={"by_day": dg.AssetIn(metadata={"columns": ["id"]})})
    def after(by_day: pl.DataFrame) -> None:
        taken["after"] = by_day

    @dg.asset(partitions_def=DAILY)
    def after_in_pandas(by_day: pd.DataFrame) -> None:
        taken["pandas"] = by_day

    def run(io_manager: Any, asset: Any, key: str | None = None, **values: Any) -> None:
        given.update(values)
        assets = [whole, by_day, by_city, after, after_in_pandas]
        dg.materialize(
            assets, selection=[asset], partition_key=key, resources={"io_manager": io_manager}
        )

    run(theirs, whole, whole=frame("2026-08-01", 1, 2))
    for day in ("2026-08-01", "2026-08-02"):
        run(theirs, by_day, day, by_day=frame(day, int(day[-2:]), 10))
    for city in ("berlin", "paris"):
        run(theirs, by_city, city, by_city=frame("2026-08-01", 1, city=city))

    # Theirs are upper-case in the table; BigQuery, and columns=, ignore case.
    assert reader.read(f"{dataset}.whole").to_arrow().column_names == ["ID", "AT", "CITY"]
    run(ours, after, "2026-08-01")
    assert sorted(taken["after"]["ID"]) == [1, 10]

    run(ours, whole, whole=frame("2026-08-03", 7))
    assert reader.read(f"{dataset}.whole").to_arrow()["ID"].to_pylist() == [7]
    run(ours, by_day, "2026-08-02", by_day=frame("2026-08-02", 20, 21, 22))
    assert _ids(reader, f"{dataset}.by_day") == [1, 10, 20, 21, 22]
    run(ours, by_city, "paris", by_city=frame("2026-08-09", 5, 6, city="paris"))
    assert _ids(reader, f"{dataset}.by_city") == [1, 5, 6]
    run(ours, by_day, "2026-08-02", by_day=frame("2026-08-02").astype({"id": "int64"}))
    assert _ids(reader, f"{dataset}.by_day") == [1, 10]

    # And back again, for those who change their mind.
    run(theirs, after_in_pandas, "2026-08-01")
    assert sorted(taken["pandas"]["id"]) == [1, 10]


def _ids(reader: BigQueryReader, table: str) -> list[int]:
    return ids(pa.table({"id": reader.read(table).to_arrow()["ID"]}))
