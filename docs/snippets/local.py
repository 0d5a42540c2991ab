"""A local BigQuery for tests: real ports, Google's own clients, no cloud account."""

import os

from google.auth.credentials import AnonymousCredentials
from google.cloud import bigquery

from dagster_bq_connector.local import LocalBigQuery

with LocalBigQuery() as local:
    os.environ.update(local.environment)
    project = local.environment["GOOGLE_CLOUD_PROJECT"]
    client = bigquery.Client(project=project, credentials=AnonymousCredentials())
    client.create_dataset("shop")
    [row] = client.query_and_wait("SELECT 6 * 7 AS answer")
    answer = row["answer"]
