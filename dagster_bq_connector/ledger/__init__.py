"""Where the library keeps what must outlive a run: one JSON value a key."""

from dagster_bq_connector.ledger.bigquery import BigQueryLedger as BigQueryLedger
from dagster_bq_connector.ledger.cloud_storage import CloudStorageLedger as CloudStorageLedger
from dagster_bq_connector.ledger.entry import Entry as Entry
from dagster_bq_connector.ledger.entry import Key as Key
from dagster_bq_connector.ledger.entry import Kind as Kind
from dagster_bq_connector.ledger.entry import Ledger as Ledger
from dagster_bq_connector.ledger.entry import Written as Written
from dagster_bq_connector.ledger.home import open_ledger as open_ledger
