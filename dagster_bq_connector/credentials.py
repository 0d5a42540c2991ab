"""Who calls: the credentials that a resource names, or those of the environment."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass, field
from typing import Any

import google.auth
import google.auth.credentials
import google.auth.impersonated_credentials
import google.oauth2.service_account
from google.auth.exceptions import DefaultCredentialsError

from dagster_bq_connector.errors import ConfigurationError

SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
GOOGLE = "googleapis.com"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who calls. Application Default Credentials when nothing is set.

    Attributes:
        service_account_json: A service account's key: its JSON, or that in base64.
        impersonate: The service account to act as.
        delegates: The chain of service accounts that leads to `impersonate`.
        quota_project: The project that is charged for the calls' quota.
        universe_domain: The cloud that is called, `googleapis.com` by default.
        anonymous: Send no credentials. Emulators are called so without being asked.
    """

    service_account_json: str | None = field(default=None, repr=False)
    impersonate: str | None = None
    delegates: tuple[str, ...] = ()
    quota_project: str | None = None
    universe_domain: str = GOOGLE
    anonymous: bool = False

    @property
    def given(self) -> bool:
        """Whether somebody chose an identity, rather than the environment's default."""
        return bool(self.service_account_json or self.impersonate)

    def load(self) -> tuple[google.auth.credentials.Credentials, str | None]:
        """The credentials object, and the project that they belong to when they name one.

        Raises:
            ConfigurationError: There are none, or they cannot be read.
        """
        if self.anonymous:
            return google.auth.credentials.AnonymousCredentials(), None
        source, project = self._source()
        if self.impersonate:
            source = google.auth.impersonated_credentials.Credentials(
                source_credentials=source,
                target_principal=self.impersonate,
                delegates=list(self.delegates),
                target_scopes=list(SCOPES),
            )
        if self.quota_project and isinstance(
            source, google.auth.credentials.CredentialsWithQuotaProject
        ):
            source = source.with_quota_project(self.quota_project)
        return source, project

    def _source(self) -> tuple[google.auth.credentials.Credentials, str | None]:
        if self.service_account_json:
            info = _service_account_info(self.service_account_json)
            try:
                credentials = google.oauth2.service_account.Credentials.from_service_account_info(
                    info, scopes=SCOPES
                )
            except ValueError as error:
                raise ConfigurationError(
                    f"gcp_credentials is no service account key: {error}"
                ) from error
            return credentials, info.get("project_id")
        try:
            return google.auth.default(scopes=SCOPES)
        except DefaultCredentialsError as error:
            raise ConfigurationError(
                "No Google credentials were found. Run `gcloud auth application-default login`, "
                "set gcp_credentials on the resource, or point it at a local BigQuery "
                "(python -m dagster_bq_connector.local)."
            ) from error


def _service_account_info(text: str) -> dict[str, Any]:
    """The key's JSON. The text itself never enters an error message."""
    try:
        plain = text if text.lstrip().startswith("{") else base64.b64decode(text).decode()
        info = json.loads(plain)
    except (binascii.Error, UnicodeDecodeError, json.JSONDecodeError):
        info = None
    if not isinstance(info, dict):
        raise ConfigurationError(
            "gcp_credentials must hold a service account's JSON key, as it is or in base64."
        )
    return info
