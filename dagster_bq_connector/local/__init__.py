"""An embedded BigQuery and Cloud Storage for development and tests.

`local-bigquery` behind a thin extension of ours, and `fake-gcs-server` behind a gateway of ours::

    launcher.py      the caller's side: starts everything as one child process
    server.py        the child: puts the parts together and serves them until the caller is gone
    requirements.py  what the child needs, and how to say what is missing
    storage.py       the fake-gcs-server process
    gateway.py       generation preconditions in front of it
    conditions.py    what a Cloud Storage request touches, and under which preconditions
    upstream.py      the one door to local-bigquery
    catalog.py       what exists, asked of the lake's own records
    faults.py        StorageError inside google.rpc.Status
    staging.py       hidden tables that hold rows which are checked but not yet visible
    streams.py       Storage Write: checked appends, atomic commits, repeatable flushes
    cdc.py           change data capture on the default stream
    sessions.py      Storage Read: frozen sessions, snapshot_time
    arrow.py         Storage Read: the types of rows as the service sends them
    partitions.py    table$20260801 as a name of rows
    destinations.py  where load, copy and query jobs put their rows
    loads.py         bytes of files that know their types
    metadata.py      compare-and-set on tables, one winner a job id, max_staleness

Each module of the server has one `install()`, which names every seam of local-bigquery that it
uses. Importing this package costs nothing: all of that is loaded in the child process.
"""

from dagster_bq_connector.local.launcher import LocalBigQuery

__all__ = ["LocalBigQuery"]
