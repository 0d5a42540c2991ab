"""The resource: what it accepts and refuses, and whom it may be mistaken for."""

import base64
import json
from pathlib import Path

import dagster as dg
import dagster_gcp
import google.auth.credentials
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.auth import impersonated_credentials
from google.cloud import bigquery
from pydantic import ValidationError

from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    DefaultStreamWriter,
    FileLoadsWriter,
)
from dagster_bq_connector.endpoints import Endpoint, Endpoints
from dagster_bq_connector.errors import ConfigurationError
from dagster_bq_connector.metadata import label_value

LOCAL = {
    "api_endpoint": "http://127.0.0.1:1",
    "storage_endpoint": "http://127.0.0.1:2",
    "cloud_storage_endpoint": "http://127.0.0.1:3",
}


def service_account(name: str) -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return json.dumps(
        {
            "type": "service_account",
            "project_id": f"project-of-{name}",
            "private_key": pem.decode(),
            "client_email": f"{name}@example.iam.gserviceaccount.com",
            "token_uri": "https://oauth2.googleapis.com/token",
        }
    )


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (BigQueryResource, {"project": "p", "datset": "d"}),
        (BigQueryReader, {"bigquery": BigQueryResource(project="p"), "max_stream": 1}),
        (DefaultStreamWriter, {"bigquery": BigQueryResource(project="p"), "staging": "gs://b"}),
        (
            FileLoadsWriter,
            {"bigquery": BigQueryResource(project="p"), "staging": "gs://b", "create_tables": True},
        ),
    ],
)
def test_a_misspelt_field_is_named(kind: type, arguments: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"(datset|max_stream|staging|create_tables)\n"):
        kind(**arguments)


def test_it_is_the_resource_of_dagster_gcp() -> None:
    resource = BigQueryResource(project="p", location="EU", **LOCAL)
    assert isinstance(resource, dagster_gcp.BigQueryResource)
    with resource.get_client() as client:
        assert isinstance(client, bigquery.Client)
        assert (client.project, client.location) == ("p", "EU")


def test_required_resource_keys_give_a_client() -> None:
    @dg.op(required_resource_keys={"bigquery"})
    def look(context: dg.OpExecutionContext) -> str:
        assert isinstance(context.resources.bigquery, bigquery.Client)
        return context.resources.bigquery.project

    @dg.job(resource_defs={"bigquery": BigQueryResource(project="p", **LOCAL)})
    def job() -> None:
        look()

    assert job.execute_in_process().output_for_node("look") == "p"


def test_no_project(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="set `project` on the resource"):
        BigQueryResource(**LOCAL).connect()
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "from-the-environment")
    assert BigQueryResource(**LOCAL).connect().project == "from-the-environment"


def test_no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    with (
        pytest.raises(ConfigurationError, match="gcloud auth application-default login"),
        BigQueryResource(project="p").get_client(),
    ):
        pass


def test_fields_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PROJECT", "from-env")

    @dg.asset
    def look(bigquery: BigQueryResource) -> str:
        with bigquery.get_client() as client:
            return client.project

    resources = {"bigquery": BigQueryResource(project=dg.EnvVar("MY_PROJECT"), **LOCAL)}
    assert dg.materialize([look], resources=resources).output_for_node("look") == "from-env"


def test_nested_copies_share_their_clients() -> None:
    seen: list[int] = []

    @dg.asset
    def look(
        bigquery: BigQueryResource, reader: BigQueryReader, writer: DefaultStreamWriter
    ) -> None:
        for resource in (bigquery, reader.bigquery, writer.bigquery):
            with resource.get_client() as client:
                seen.append(id(client))

    resource = BigQueryResource(project="p", **LOCAL)
    dg.materialize(
        [look],
        resources={
            "bigquery": resource,
            "reader": BigQueryReader(bigquery=resource),
            "writer": DefaultStreamWriter(bigquery=resource),
        },
    )
    assert len(seen) == 3
    assert len(set(seen)) == 1


def test_a_sensor_uses_it() -> None:
    @dg.sensor(job_name="job")
    def sensor(bigquery: BigQueryResource) -> dg.SkipReason:
        with bigquery.get_client() as client:
            return dg.SkipReason(client.project)

    context = dg.build_sensor_context(
        resources={"bigquery": BigQueryResource(project="p", **LOCAL)}
    )
    assert sensor(context).skip_message == "p"


def test_our_resources_accept_the_stock_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIGQUERY_EMULATOR_HOST", "http://127.0.0.1:1")
    stock = dagster_gcp.BigQueryResource(project="stock")
    for resource in (BigQueryReader(bigquery=stock), DefaultStreamWriter(bigquery=stock)):
        from dagster_bq_connector.resources import Connected

        assert Connected.to(resource.bigquery).rest.project == "stock"


def test_two_credentials_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    first, second = service_account("first"), service_account("second")
    one = BigQueryResource(gcp_credentials=first)
    two = BigQueryResource(gcp_credentials=base64.b64encode(second.encode()).decode())
    with one.get_client() as client, two.get_client() as other:
        assert client.project == "project-of-first"
        assert other.project == "project-of-second"
        mails = {c._credentials.service_account_email.split("@")[0] for c in (client, other)}
    assert mails == {"first", "second"}
    import os

    assert "GOOGLE_APPLICATION_CREDENTIALS" not in os.environ


def test_impersonation_with_delegates_and_a_quota_project() -> None:
    resource = BigQueryResource(
        project="p",
        gcp_credentials=service_account("source"),
        impersonate_service_account="target@example.iam.gserviceaccount.com",
        impersonation_delegates=["via@example.iam.gserviceaccount.com"],
        quota_project="pays",
    )
    credentials = resource.connect().clients.credentials
    assert isinstance(credentials, impersonated_credentials.Credentials)
    assert credentials.service_account_email == "target@example.iam.gserviceaccount.com"
    assert credentials._delegates == ["via@example.iam.gserviceaccount.com"]
    assert credentials.quota_project_id == "pays"


def test_the_key_is_never_shown() -> None:
    key = service_account("hidden")
    resource = BigQueryResource(project="p", gcp_credentials=key)
    shown = repr(resource) + str(resource) + repr(resource.connect().clients._given)
    assert "PRIVATE KEY" not in shown
    broken = BigQueryResource(project="p", gcp_credentials="not base64, but secret")
    with pytest.raises(ConfigurationError) as caught:
        _ = broken.connect().clients.credentials
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("field", list(LOCAL))
def test_credentials_never_go_over_plaintext(field: str) -> None:
    resource = BigQueryResource(
        project="p", gcp_credentials=service_account("a"), **{field: LOCAL[field]}
    )
    with pytest.raises(ConfigurationError, match=f"{LOCAL[field]} is an emulator or has no"):
        resource.connect()


@pytest.mark.parametrize("field", list(LOCAL))
def test_half_an_emulator_never_reaches_the_service(field: str) -> None:
    connected = BigQueryResource(project="p", **{field: LOCAL[field]}).connect()
    opened = {
        "api_endpoint": lambda: connected.rest,
        "storage_endpoint": lambda: connected.clients.channel,
        "cloud_storage_endpoint": lambda: connected.clients.cloud_storage("p"),
    }
    for name, open_it in opened.items():
        if name == field:
            open_it()
        else:
            with pytest.raises(ConfigurationError, match="would reach the real service"):
                open_it()


def test_emulators_are_called_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere.json")
    credentials = BigQueryResource(project="p", **LOCAL).connect().clients.credentials
    assert isinstance(credentials, google.auth.credentials.AnonymousCredentials)


def test_private_endpoints_keep_tls_and_credentials() -> None:
    resource = BigQueryResource(
        project="p",
        gcp_credentials=service_account("a"),
        api_endpoint="https://bigquery-mine.p.googleapis.com",
        storage_endpoint="bigquerystorage-mine.p.googleapis.com",
    )
    connected = resource.connect()
    assert connected.rest._connection.API_BASE_URL == "https://bigquery-mine.p.googleapis.com"
    assert connected.clients.endpoints.storage == Endpoint(
        "bigquerystorage-mine.p.googleapis.com", tls=True
    )
    assert connected.clients.channel is connected.clients.channel


def test_the_emulators_variables() -> None:
    variables = {
        "BIGQUERY_EMULATOR_HOST": "http://127.0.0.1:1",
        "BIGQUERY_STORAGE_EMULATOR_HOST": "127.0.0.1:2",
        "STORAGE_EMULATOR_HOST": "https://storage.test",
    }
    endpoints = Endpoints.resolve(environment=variables)
    assert endpoints == Endpoints(
        Endpoint("127.0.0.1:1", tls=False, emulator=True),
        Endpoint("127.0.0.1:2", tls=False, emulator=True),
        Endpoint("storage.test", tls=True, emulator=True),
    )
    assert Endpoints.resolve(environment={"BIGQUERY_EMULATOR_HOST": " "}) == Endpoints()
    given = Endpoints.resolve("https://rest.test", environment=variables)
    assert given.rest == Endpoint("rest.test", True)


@pytest.mark.parametrize("text", ["ftp://x", "http://x/path", "http://"])
def test_what_is_no_endpoint(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is no endpoint"):
        BigQueryResource(project="p", api_endpoint=text).connect()


def test_defaults_of_jobs() -> None:
    resource = BigQueryResource(
        project="p",
        billing_project="pays",
        priority="BATCH",
        maximum_bytes_billed=10**9,
        job_timeout_seconds=90,
        reservation="projects/p/locations/EU/reservations/r",
        labels={"team": "data"},
        **LOCAL,
    )
    with resource.get_client() as client:
        assert client.project == "pays"
        query = client.default_query_job_config
        load = client.default_load_job_config
    assert (query.priority, query.maximum_bytes_billed) == ("BATCH", 10**9)
    assert query.job_timeout_ms == load.job_timeout_ms
    assert int(query.job_timeout_ms) == 90_000
    assert query.labels == load.labels == {"team": "data"}
    assert query.reservation == "projects/p/locations/EU/reservations/r"


def test_no_writer_without_a_staging_address() -> None:
    with pytest.raises(ValidationError, match="staging"):
        FileLoadsWriter(bigquery=BigQueryResource(project="p"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flights", "flights"),
        ("shop/Orders", "shop__orders"),
        ("2026-08-01", "2026-08-01"),
    ],
)
def test_labels_that_need_no_digest(text: str, expected: str) -> None:
    assert label_value(text) == expected


def test_labels_stay_different_and_short() -> None:
    texts = ["2026-08-01-13:00", "2026-08-01-13_00", "a" * 70, "a" * 71, "ä b"]
    values = [label_value(text) for text in texts]
    assert len(set(values)) == len(texts)
    assert all(len(value) <= 63 for value in values)
    assert values[0].startswith("2026-08-01-13_00-")


def test_a_refused_value_is_not_shown() -> None:
    with pytest.raises(ValidationError) as caught:
        BigQueryResource(project="p", gcp_credentals="secret")  # misspelt
    assert "gcp_credentals" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_an_emulator_with_tls_is_an_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIGQUERY_EMULATOR_HOST", "https://emulator.test:9050")
    connected = BigQueryResource(project="p").connect()
    with pytest.raises(ConfigurationError, match="would reach the real service"):
        _ = connected.clients.channel
    with pytest.raises(ConfigurationError, match="is an emulator or has no TLS"):
        BigQueryResource(project="p", gcp_credentials=service_account("a")).connect()


def test_credentials_and_none_at_once() -> None:
    with pytest.raises(ConfigurationError, match="leave one out"):
        BigQueryResource(project="p", gcp_credentials="{}", anonymous=True).connect()


def test_the_deadline_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEADLINE", "7")
    resource = BigQueryResource(project="p", deadline_seconds=dg.EnvVar.int("DEADLINE"), **LOCAL)

    @dg.asset
    def look(bigquery: BigQueryResource) -> int:
        return int(bigquery.connect().deadline)

    assert dg.materialize([look], resources={"bigquery": resource}).output_for_node("look") == 7
    with pytest.raises(ConfigurationError, match="deadline_seconds=0"):
        BigQueryResource(project="p", deadline_seconds=0).connect()
