"""The one door to local-bigquery 0.4.0.

It ships no types for its users, so its modules are `Any` here, in one place. What we change in it
is changed in three kinds of seams, best first: registries that it offers (`server.SERVICES`,
`runner.HANDLERS`, `options.TABLE_OPTIONS`), module functions that it looks up through their module
(one assignment reaches every caller), and one class (`write.Stream`). Registries are changed in
place and functions on their module, so nothing depends on the order of imports.
"""

from typing import Any

from local_bigquery import app as _app
from local_bigquery import errors as _errors
from local_bigquery import models as _models
from local_bigquery.catalog import datasets as _datasets
from local_bigquery.catalog import ddl as _ddl
from local_bigquery.catalog import metadata as _metadata
from local_bigquery.catalog import names as _names
from local_bigquery.catalog import options as _options
from local_bigquery.catalog import tabledata as _tabledata
from local_bigquery.catalog import tables as _tables
from local_bigquery.engine import database as _database
from local_bigquery.engine import results as _results
from local_bigquery.engine import types as _types
from local_bigquery.grpc import read as _read
from local_bigquery.grpc import server as _server
from local_bigquery.grpc import write as _write
from local_bigquery.jobs import copy as _copy
from local_bigquery.jobs import load as _load
from local_bigquery.jobs import query as _query
from local_bigquery.jobs import runner as _runner
from local_bigquery.jobs import store as _store
from local_bigquery.settings import settings as _settings
from local_bigquery.sql import translate as _translation
from local_bigquery.sql.rules import information_schema as _information_schema
from local_bigquery.sql.rules import partitions as _hiding

BigQueryError = _errors.BigQueryError

app: Any = _app
copy: Any = _copy
database: Any = _database
datasets: Any = _datasets
ddl: Any = _ddl
errors: Any = _errors
hiding: Any = _hiding
information_schema: Any = _information_schema
load: Any = _load
metadata: Any = _metadata
models: Any = _models
names: Any = _names
options: Any = _options
query: Any = _query
read: Any = _read
results: Any = _results
runner: Any = _runner
server: Any = _server
settings: Any = _settings
store: Any = _store
tabledata: Any = _tabledata
tables: Any = _tables
translation: Any = _translation
types: Any = _types
write: Any = _write

Reference = tuple[str, str, str]
