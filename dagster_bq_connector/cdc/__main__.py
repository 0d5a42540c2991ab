"""`python -m dagster_bq_connector.cdc`. It reads Dagster's definitions, so it lives upstairs."""

import sys

from dagster_bq_connector.cdc_command import main

if __name__ == "__main__":
    sys.exit(main())
