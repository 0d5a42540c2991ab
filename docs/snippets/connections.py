"""Ways to connect. Nothing is opened or looked up before it is used."""

import dagster as dg

from dagster_bq_connector import BigQueryResource

plain = BigQueryResource(project="my-project", location="EU")

with_a_key = BigQueryResource(project="my-project", gcp_credentials=dg.EnvVar("BIGQUERY_KEY"))

as_another = BigQueryResource(
    project="my-project",
    impersonate_service_account="writer@my-project.iam.gserviceaccount.com",
    quota_project="my-project",
)

read_there_pay_here = BigQueryResource(
    project="bigquery-public-data", billing_project="my-project", location="US"
)

regional = BigQueryResource(
    project="my-project",
    location="europe-west3",
    api_endpoint="https://bigquery.europe-west3.rep.googleapis.com",
    storage_endpoint="bigquerystorage.europe-west3.rep.googleapis.com",
    cloud_storage_endpoint="https://storage.europe-west3.rep.googleapis.com",
)

careful = BigQueryResource(
    project="my-project",
    priority="BATCH",
    maximum_bytes_billed=10 * 1024**3,
    job_timeout_seconds=3600,
    labels={"team": "shop"},
    deadline_seconds=600,
)
