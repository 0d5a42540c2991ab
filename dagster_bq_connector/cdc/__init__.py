"""Change data capture: changes of a source database become rows of BigQuery, in order."""
