"""What becomes of change events: rows of BigQuery tables, or failed events."""
