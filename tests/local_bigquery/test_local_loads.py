"""Load jobs of the local BigQuery that run at once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from dagster_bq_connector import BigQueryReader, BigQueryResource, FileLoadsWriter
from dagster_bq_connector.local import LocalBigQuery


def test_the_first_load_jobs_may_run_at_once() -> None:
    """What a server makes for the first of them, none of the others is failed by."""
    with LocalBigQuery() as local:
        environment = local.environment
        bigquery = BigQueryResource(
            project=environment["GOOGLE_CLOUD_PROJECT"],
            location="US",
            api_endpoint=environment["BIGQUERY_EMULATOR_HOST"],
            storage_endpoint=f"http://{environment['BIGQUERY_STORAGE_EMULATOR_HOST']}",
            cloud_storage_endpoint=environment["STORAGE_EMULATOR_HOST"],
        )
        connected = bigquery.connect()
        connected.clients.cloud_storage(connected.project).create_bucket("staging")
        connected.rest.create_dataset("d")
        writer = FileLoadsWriter(bigquery=bigquery, staging="gs://staging/files")
        begin = threading.Barrier(6)

        def load(number: int) -> int:
            begin.wait(timeout=60)
            return writer.append(pa.table({"n": [number]}), f"d.t{number}").rows

        with ThreadPoolExecutor(6) as pool:
            assert sum(pool.map(load, range(6))) == 6
        reader = BigQueryReader(bigquery=bigquery)
        assert [reader.read(f"d.t{n}").to_arrow()["n"].to_pylist() for n in range(6)] == [
            [n] for n in range(6)
        ]
