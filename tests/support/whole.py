"""The whole way of a change: PostgreSQL, Debezium, Kafka, Dagster's daemon, the local BigQuery."""

from collections import Counter
from contextlib import closing
from dataclasses import dataclass

from google.cloud import bigquery as google

from dagster_bq_connector import BigQueryResource
from dagster_bq_connector.cdc.source.kafka import KafkaMessages
from dagster_bq_connector.cdc.source.kafka_broker import KafkaOptions
from dagster_bq_connector.cdc.watermark import StreamState, Watermark
from dagster_bq_connector.ledger import open_ledger
from support.chain import Chain
from support.comparing import Difference, compare_table
from support.daemons import Deployment, until
from support.spine import STREAM, Spine
from support.workload_tables import TABLES


@dataclass
class Whole:
    """All of it, running.

    Attributes:
        running: What is in front of the library.
        deployment: Dagster.
        spine: The stream.
    """

    running: Chain
    deployment: Deployment
    spine: Spine

    @property
    def state(self) -> StreamState:
        """Where the stream stands."""
        connected = BigQueryResource(**self.spine.fields).connect()
        ledger = open_ledger(
            connected.clients,
            connected.billing_project,
            self.spine.dataset,
            connected.location,
            False,
            30.0,
        )
        return Watermark(ledger, STREAM).read() or StreamState()

    def is_caught_up(self) -> bool:
        """Whether all that is in Kafka is committed, and nobody is at work."""
        state = self.state
        if state.position is None or state.plan or state.holder:
            return False
        options = KafkaOptions(self.spine.kafka, self.running.topics(), deadline=30.0)
        return KafkaMessages(options).plan(state.position, 1) is None

    def wait(self, seconds: float) -> None:
        """Wait until every change that was committed at the source is in BigQuery's tables."""
        self.running.wait()
        until(self.is_caught_up, seconds, self.said)

    def said(self) -> str:
        """What there is to know of a stream that does not get on."""
        return f"{self.state}\n{self.deployment.statuses()}\n{self.deployment.log}"

    def differences(self) -> dict[str, Difference]:
        """Each table compared with the source's."""
        client: google.Client
        found: dict[str, Difference] = {}
        resource = BigQueryResource(**self.spine.fields)
        with (
            self.running.postgres.connect() as connection,
            resource.get_client() as client,
            closing(client),
        ):
            for table in TABLES:
                address = f"{client.project}.{self.spine.table(table.name)}"
                found[table.name] = compare_table(connection, table.name, client, address)
        return found


def totals(differences: dict[str, Difference]) -> Counter[str]:
    """The differences of all tables: how many rows there are, and how many of each kind."""
    counts: Counter[str] = Counter()
    for each in differences.values():
        counts["rows"] += each.rows
        counts.update(each.counts)
    return counts
