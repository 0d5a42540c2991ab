"""A local BigQuery for tests: real ports, Google's own clients, no cloud account."""

import os

from google.auth.credentials import AnonymousCredentials
from google.cloud import bigquery, storage

from dagster_bq_connector.local import LocalBigQuery

with LocalBigQuery() as local:
    os.environ.update(local.environment)
    project = local.environment["GOOGLE_CLOUD_PROJECT"]
    nobody = AnonymousCredentials()
    client = bigquery.Client(project=project, credentials=nobody)
    client.create_dataset("shop")
    storage.Client(project=project, credentials=nobody).create_bucket("my-staging")
    [row] = client.query_and_wait("SELECT 6 * 7 AS answer")
    answer = row["answer"]
