"""Where the services listen, and the rule that half an emulator never reaches a real one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from dagster_bq_connector.errors import ConfigurationError

_VARIABLES = {
    "rest": "BIGQUERY_EMULATOR_HOST",
    "storage": "BIGQUERY_STORAGE_EMULATOR_HOST",
    "cloud_storage": "STORAGE_EMULATOR_HOST",
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a service listens. Without TLS it is an emulator or a test server.

    Attributes:
        address: `host:port`, or the URL of a REST service without its path.
        tls: Whether the connection is encrypted.
        emulator: Whether it is an emulator, by the variable that it comes from or for want of TLS.
    """

    address: str
    tls: bool
    emulator: bool = False

    @classmethod
    def parse(cls, text: str, tls: bool, emulator: bool = False) -> Endpoint:
        """Read `https://host`, `http://host:port` or `host:port`, for which `tls` decides."""
        scheme, found, address = text.rpartition("://")
        address = address.removesuffix("/")
        if found and scheme not in ("http", "https"):
            raise ConfigurationError(f"{text!r} is no endpoint: it starts with {scheme}://.")
        if not address or "/" in address:
            raise ConfigurationError(f"{text!r} is no endpoint: write host:port or a URL.")
        tls = scheme == "https" if found else tls
        return cls(address, tls, emulator or not tls)

    @property
    def url(self) -> str:
        """The address as a URL."""
        return f"{'https' if self.tls else 'http'}://{self.address}"


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where BigQuery's REST API, its Storage API and Cloud Storage listen; the service if None."""

    rest: Endpoint | None = None
    storage: Endpoint | None = None
    cloud_storage: Endpoint | None = None

    @classmethod
    def resolve(
        cls,
        rest: str | None = None,
        storage: str | None = None,
        cloud_storage: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Endpoints:
        """What is given, else what the emulators' environment variables say, else the service.

        Args:
            rest: URL of the REST API; `BIGQUERY_EMULATOR_HOST` otherwise.
            storage: Address of the Storage API; `BIGQUERY_STORAGE_EMULATOR_HOST` otherwise.
            cloud_storage: URL of Cloud Storage; `STORAGE_EMULATOR_HOST` otherwise.
            environment: The variables to read; those of this process when None.
        """
        variables = os.environ if environment is None else environment

        def endpoint(given: str | None, variable: str) -> Endpoint | None:
            if given:
                return Endpoint.parse(given, tls=True)
            set_to = variables.get(variable, "").strip()
            return Endpoint.parse(set_to, tls=False, emulator=True) if set_to else None

        return cls(
            endpoint(rest, _VARIABLES["rest"]),
            endpoint(storage, _VARIABLES["storage"]),
            endpoint(cloud_storage, _VARIABLES["cloud_storage"]),
        )

    @property
    def emulators(self) -> list[str]:
        """The addresses of emulators."""
        return [e.url for e in (self.rest, self.storage, self.cloud_storage) if e and e.emulator]

    def check(self, service: str) -> None:
        """Refuse to reach the real `service` (a field's name) when another one is an emulator.

        Raises:
            ConfigurationError: Half an emulator.
        """
        endpoint: Endpoint | None = getattr(self, service)
        if self.emulators and not (endpoint and endpoint.emulator):
            variable = _VARIABLES[service]
            raise ConfigurationError(
                f"{self.emulators[0]} is an emulator, but the endpoint of {service} is not: the "
                f"call would reach the real service. Set {variable} or the endpoint field too."
            )
