"""The child process: Cloud Storage, the REST API and the Storage API behind one life.

It says one line of JSON on its standard output, its addresses or why it has none, and lives until
its standard input ends: the caller holds the other end of that pipe, so a caller that is killed
takes everything with it. (A parent-death signal would follow the *thread* that started this
process.)

Seams: gRPC is started here, since upstream's `server.start` has no options, from upstream's table
of handlers, after the modules of this package have changed it.
"""

import concurrent.futures
import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NoReturn, cast

from dagster_bq_connector.local import requirements
from dagster_bq_connector.local.gateway import HOST, Gateway
from dagster_bq_connector.local.requirements import StartError
from dagster_bq_connector.local.storage import cloud_storage

MESSAGE_LIMIT = 20 << 20  # bytes, of the transport; streams.py refuses above the service's limit
THREADS = 1024  # an open AppendRows call keeps one for as long as it is open
STOP_SECONDS = 5  # for what is under way; then it is cut off
LOCK_SECONDS = 3  # a killed caller's server needs a moment to follow it

Announce = Callable[..., None]


def serve(options: dict[str, Any], announce: Announce, gone: threading.Event) -> None:
    """Run until the caller is gone.

    Args:
        options: See launcher.py.
        announce: Says the one line; its keyword is `environment` or `error`.
        gone: Set when the caller is gone.

    Raises:
        StartError: Something that the caller can mend is wrong.
    """
    requirements.check()
    requirements.forget_settings()
    # Google's client and DuckDB would import it when it is installed, and nobody here needs it.
    sys.modules["pandas"] = cast("Any", None)
    data = Path(options["data_dir"])
    with _held(data), contextlib.ExitStack() as stack:
        requirements.provide_duckdb_extensions(data / "home")
        gateway = Gateway()
        stack.callback(gateway.server_close)
        port = stack.enter_context(cloud_storage(data / "storage", gateway.url, _storage_died))
        gateway.backend_port = port
        threading.Thread(target=gateway.serve_forever, daemon=True).start()
        stack.callback(gateway.shutdown)
        engine = _configure(data, options["project"], port)
        _extend(options, engine)
        storage_api = stack.enter_context(_storage_api())
        listener = socket.create_server((HOST, 0), backlog=128)  # takes calls from now on
        announce(
            environment={
                "BIGQUERY_EMULATOR_HOST": f"http://{HOST}:{listener.getsockname()[1]}",
                "BIGQUERY_STORAGE_EMULATOR_HOST": storage_api,
                "STORAGE_EMULATOR_HOST": gateway.url,
                "GOOGLE_CLOUD_PROJECT": options["project"],
            }
        )
        _serve_rest(listener, gone)


@contextlib.contextmanager
def _held(data: Path) -> Generator[None]:
    """Keep other servers out of the data folder for as long as this process lives."""
    with (data / "lock").open("a+") as lock:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    lock.seek(0)
                    owner = lock.read().strip() or "unknown"
                    text = f"{data} is in use by another local BigQuery (process {owner})."
                    raise StartError(text) from error
                time.sleep(0.05)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _configure(data: Path, project: str, storage_port: int) -> threading.Thread:
    """Settle upstream's settings, and open its engine while this thread imports the rest.

    Returns:
        The thread that opens it. What fails there fails again for whoever uses the engine.
    """
    from dagster_bq_connector.local.upstream import database, settings

    settings.data_dir = data / "bigquery"
    settings.default_project_id = project
    settings.default_dataset_id = "main"  # the lake's own schema: no dataset that nobody made
    # DuckDB reads objects past the gateway: it may hold the interpreter's lock while it waits.
    settings.storage_emulator_host = f"http://{HOST}:{storage_port}"

    def open_engine() -> None:
        # A core is left to who asks. With a thread on each, small queries take a quarter more CPU.
        threads = max(1, (os.cpu_count() or 1) - 1)
        database.connection().execute(f"SET threads = {threads}")

    opening = threading.Thread(target=open_engine, daemon=True)
    opening.start()
    return opening


def _extend(options: dict[str, Any], engine: threading.Thread) -> None:
    """Install every module, once the engine is open."""
    from dagster_bq_connector.local import (
        catalog,
        cdc,
        destinations,
        faults,
        loads,
        metadata,
        partitions,
        proto_rows,
        sessions,
        staging,
        statements,
        streams,
    )

    # No query may run while the number of threads is set: DuckDB would end the very thread that
    # the query is on ("Resource deadlock avoided").
    engine.join()
    refuse = options["refuse_streamed_tables"]
    catalog.install()
    faults.install(mask_missing_tables=options["mask_missing_tables"])
    metadata.install()
    partitions.install()
    proto_rows.install()
    destinations.install()
    loads.install()
    streams.install()
    cdc.install(refuse_copies=refuse)
    statements.install()
    sessions.install(refuse_streamed=refuse)
    staging.sweep()


@contextlib.contextmanager
def _storage_api() -> Generator[str]:
    """The Storage Read and Write APIs on a free port. Yields its address."""
    import grpc

    from dagster_bq_connector.local.upstream import server as upstream

    limits = [
        ("grpc.max_receive_message_length", MESSAGE_LIMIT),
        ("grpc.max_send_message_length", -1),
    ]
    pool = concurrent.futures.ThreadPoolExecutor(max_workers=THREADS)
    server = grpc.server(pool, options=limits)
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(name, handlers)
            for name, handlers in upstream.SERVICES.items()
        ]
    )
    port = server.add_insecure_port(f"{HOST}:0")
    server.start()
    try:
        yield f"{HOST}:{port}"
    finally:
        server.stop(grace=None).wait()


def _serve_rest(listener: socket.socket, gone: threading.Event) -> None:
    import uvicorn

    from dagster_bq_connector.local.upstream import app

    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
    rest = uvicorn.Server(config)

    def stop() -> None:
        gone.wait()
        rest.should_exit = True

    threading.Thread(target=stop, daemon=True).start()
    rest.run(sockets=[listener])


def main(text: str) -> None:
    """Be the server. `text` is the options as JSON, see launcher.py. Never returns."""
    options = json.loads(text)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints goes to the log
    said, gone = threading.Event(), threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: threading.Thread(target=gone.set).start())
    threading.Thread(target=_follow_caller, args=[said, gone, options], daemon=True).start()

    def announce(**answer: Any) -> None:
        said.set()
        with contextlib.suppress(BrokenPipeError):  # the caller is gone, stdin will say so
            out.write(json.dumps(answer) + "\n")
            out.flush()

    try:
        serve(options, announce, gone)
    except StartError as error:
        announce(error=str(error))
        _exit()
    except BaseException as error:  # noqa: BLE001 - the last line of defence: logged, said, exit
        traceback.print_exc()
        if not said.is_set():
            announce(error=f"{type(error).__name__}: {error}")
        _exit()
    _leave(options)


def _follow_caller(said: threading.Event, gone: threading.Event, options: dict[str, Any]) -> None:
    while os.read(0, 1):
        pass  # until the caller closes its end or is gone
    if said.is_set():  # before, there is nothing under way
        gone.set()
        time.sleep(STOP_SECONDS)
    _leave(options)


def _storage_died() -> None:
    """Say it and end: without Cloud Storage every call on it would fail, one by one.

    The data stay, temporary or not: the caller reads the log there.
    """
    sys.stderr.write(
        "Cloud Storage (fake-gcs-server) ended by itself, killed perhaps for want of memory: "
        "the local BigQuery ends with it. Start it again.\n"
    )
    _exit()


def _leave(options: dict[str, Any]) -> None:
    if options["temporary"]:  # a caller that was killed cannot do it
        shutil.rmtree(options["data_dir"], ignore_errors=True)
    _exit()


def _exit() -> NoReturn:
    """Exit at once: a query under way in another thread must not keep the process.

    The whole process group ends, in case Cloud Storage lost its watchdog.
    """
    sys.stderr.flush()
    if os.getpgrp() == os.getpid():  # the launcher made it so
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
