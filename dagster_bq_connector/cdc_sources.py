"""Sources of change streams as resources: what a stream reads its changes from."""

from abc import ABC, abstractmethod
from typing import Any

import dagster as dg
from pydantic import Field

from dagster_bq_connector.cdc.source.files import FileMessages
from dagster_bq_connector.cdc.source.kafka import KafkaMessages
from dagster_bq_connector.cdc.source.kafka_broker import KafkaOptions
from dagster_bq_connector.cdc.source.source import Source
from dagster_bq_connector.resources import STRICT, Connected


class CdcSource(dg.ConfigurableResource[Any], ABC):
    """A source of changes. A stream names it by its resource key."""

    model_config = STRICT

    @abstractmethod
    def open_source(self, connected: Connected, deadline: float) -> Source:
        """The source; nothing is reached yet.

        Args:
            connected: The connection of the stream's BigQuery resource.
            deadline: Seconds within which a call must be answered.

        Raises:
            ConfigurationError: The settings do not go together, or a package is missing.
        """


class KafkaSource(CdcSource):
    """Topics of Kafka.

    Only committed messages are read. No consumer group is used: a stream stands where its ledger
    entry says. Needs `pip install "dagster-bq-connector[kafka]"`.

    Example:
        ```python
        orders_topic = KafkaSource(
            bootstrap_servers="kafka.example.com:9093",
            topic="shop.public.orders",
            user="dagster",
            password=dg.EnvVar("KAFKA_PASSWORD"),
        )
        ```
    """

    bootstrap_servers: str = Field(description="host:port, or several with commas.")
    topic: str = Field(
        description="The topic; or several, by a regular expression that begins with ^, such as "
        r"^shop\.public\.(orders|customers)$. A topic that comes to match later is read, too.",
    )
    security_protocol: str | None = Field(
        default=None,
        description="PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL. By default SASL_SSL with a user, "
        "SSL with a file of certificates, else PLAINTEXT.",
    )
    sasl_mechanism: str | None = Field(
        default=None, description="PLAIN when not set; SCRAM-SHA-512, OAUTHBEARER, ..."
    )
    user: str | None = Field(default=None, description="Who logs in by SASL.")
    password: str | None = Field(default=None, repr=False, description="The user's password.")
    ca_file: str | None = Field(
        default=None, description="A file with the certificates of trusted authorities."
    )
    settings: dict[str, str] = Field(
        default={}, repr=False, description="Other settings of librdkafka."
    )

    def open_source(self, connected: Connected, deadline: float) -> Source:
        """See `CdcSource`."""
        options = KafkaOptions(
            bootstrap_servers=self.bootstrap_servers,
            topics=self.topic,
            security_protocol=self.security_protocol,
            sasl_mechanism=self.sasl_mechanism,
            user=self.user,
            password=self.password,
            ca_file=self.ca_file,
            settings=self.settings,
            deadline=deadline,
        )
        return KafkaMessages(options)


class FileSource(CdcSource):
    """NDJSON files in a folder or below a `gs://` prefix, read in the order of their names.

    Each line is `{"topic": ..., "key": ..., "value": ...}`. A name that comes later must sort after
    those that are there.

    Example:
        ```python
        recorded = FileSource(path="gs://my-changes/shop/")
        ```
    """

    path: str = Field(description="A folder, or gs://bucket/prefix.")

    def open_source(self, connected: Connected, deadline: float) -> Source:
        """See `CdcSource`."""
        is_remote = self.path.startswith("gs://")
        client = connected.clients.cloud_storage(connected.billing_project) if is_remote else None
        return FileMessages(self.path, client, deadline)
