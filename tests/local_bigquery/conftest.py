"""One embedded BigQuery for all tests of this folder, seen by Google's own clients only."""

import contextlib
import queue
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import pyarrow as pa
import pytest
from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import bigquery, storage
from google.cloud.bigquery_storage_v1 import BigQueryReadClient, BigQueryWriteClient, types
from google.cloud.bigquery_storage_v1.services.big_query_read.transports import (
    BigQueryReadGrpcTransport,
)
from google.cloud.bigquery_storage_v1.services.big_query_write.transports import (
    BigQueryWriteGrpcTransport,
)
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

KINDS = {
    "int64": descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
}
PROJECT = "lab-project"


class Rows:
    """A protobuf message type: `name -> int64 | string`, or one that is given."""

    def __init__(self, descriptor: descriptor_pb2.DescriptorProto | None = None, **fields: str):
        self.descriptor = descriptor or descriptor_pb2.DescriptorProto(name="Row")
        for number, (name, kind) in enumerate(fields.items(), start=1):
            self.descriptor.field.add(
                name=name,
                number=number,
                type=KINDS[kind],
                label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
            )
        package = f"lab_{uuid.uuid4().hex}"
        file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package)
        file.message_type.add().CopyFrom(self.descriptor)
        pool = descriptor_pool.DescriptorPool()
        pool.Add(file)
        self._message = message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"{package}.Row")
        )

    def encode(self, row: dict[str, Any]) -> bytes:
        given = {name: value for name, value in row.items() if value is not None}
        return self._message(**given).SerializeToString()


class Connection:
    """One AppendRows call, its answers in order."""

    def __init__(self, writer: BigQueryWriteClient, stream: str, rows: Rows | pa.Schema | None):
        self._writer, self._stream, self._rows = writer, stream, rows
        self._requests: queue.Queue[types.AppendRowsRequest | None] = queue.Queue()
        self._answers: Any = None

    def request(self, rows: list[Any], offset: int | None = None) -> types.AppendRowsRequest:
        request = types.AppendRowsRequest(write_stream=self._stream, offset=offset)
        if isinstance(self._rows, Rows):
            serialized = [row if isinstance(row, bytes) else self._rows.encode(row) for row in rows]
            request.proto_rows = types.AppendRowsRequest.ProtoData(
                writer_schema=types.ProtoSchema(proto_descriptor=self._rows.descriptor),
                rows=types.ProtoRows(serialized_rows=serialized),
            )
        else:
            assert self._rows is not None
            batch = pa.RecordBatch.from_pylist(rows, self._rows)
            request.arrow_rows = types.AppendRowsRequest.ArrowData(
                writer_schema=types.ArrowSchema(
                    serialized_schema=self._rows.serialize().to_pybytes()
                ),
                rows=types.ArrowRecordBatch(serialized_record_batch=batch.serialize().to_pybytes()),
            )
        return request

    def send(self, rows: list[Any], offset: int | None = None) -> types.AppendRowsResponse:
        return self.send_request(self.request(rows, offset))

    def send_request(self, request: types.AppendRowsRequest) -> types.AppendRowsResponse:
        self._requests.put(request)
        if self._answers is None:
            # The client waits for the first answer while it opens the call.
            self._answers = self._writer.append_rows(iter(self._requests.get, None))
        return next(self._answers)

    def close(self) -> None:
        self._requests.put(None)
        if self._answers is not None:
            with contextlib.suppress(Exception):
                list(self._answers)


def storage_code(details: Any) -> types.StorageError.StorageErrorCode:
    """The code of the StorageError among the details of a status or of an exception."""
    [detail] = details
    found = types.StorageError.pb(types.StorageError())
    assert detail.Unpack(found)
    return types.StorageError(found).code


@dataclass
class Lab:
    """Google's clients, opened on one server."""

    environment: dict[str, str]
    connections: list[Connection] = field(default_factory=list)

    def __post_init__(self):
        project = self.environment["GOOGLE_CLOUD_PROJECT"]
        rest = self.environment["BIGQUERY_EMULATOR_HOST"]
        cloud_storage = self.environment["STORAGE_EMULATOR_HOST"]
        self.client = bigquery.Client(
            project=project,
            credentials=AnonymousCredentials(),
            client_options=ClientOptions(api_endpoint=rest),
        )
        self.storage = storage.Client(
            project=project,
            credentials=AnonymousCredentials(),
            client_options=ClientOptions(api_endpoint=cloud_storage),
        )
        self.channels = []
        self.reader = self.new_reader()
        self.writer = self.new_writer()
        self.dataset = ""

    def channel(self) -> grpc.Channel:
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        address = self.environment["BIGQUERY_STORAGE_EMULATOR_HOST"]
        self.channels.append(grpc.insecure_channel(address, options=unlimited))
        return self.channels[-1]

    def new_reader(self) -> BigQueryReadClient:
        return BigQueryReadClient(transport=BigQueryReadGrpcTransport(channel=self.channel()))

    def new_writer(self) -> BigQueryWriteClient:
        return BigQueryWriteClient(transport=BigQueryWriteGrpcTransport(channel=self.channel()))

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for channel in self.channels:
            channel.close()
        self.client.close()
        self.storage.close()

    def new_dataset(self) -> None:
        self.dataset = f"d_{uuid.uuid4().hex[:12]}"
        self.client.create_dataset(self.dataset)

    def name(self, table_id: str | None = None) -> str:
        return f"{self.client.project}.{self.dataset}.{table_id or f't_{uuid.uuid4().hex[:12]}'}"

    def make(self, columns: str, rest: str = "") -> str:
        """CREATE TABLE with the columns and whatever follows them."""
        name = self.name()
        self.sql(f"CREATE TABLE `{name}` ({columns}) {rest}")
        return name

    def sql(self, text: str, **options: Any) -> list[tuple[Any, ...]]:
        config = bigquery.QueryJobConfig(**options)
        return [tuple(row) for row in self.client.query_and_wait(text, job_config=config)]

    def rows(self, table: str, columns: str = "") -> list[tuple[Any, ...]]:
        """The rows of a table or partition, in a fixed order; by default all their columns."""
        found = self.client.list_rows(table)
        names = columns.split(", ") if columns else [field.name for field in found.schema]
        return sorted((tuple(row[name] for name in names) for row in found), key=repr)

    def load(self, table: str, rows: list[dict[str, Any]], **options: Any) -> None:
        config = bigquery.LoadJobConfig(**options)
        self.client.load_table_from_json(rows, table, job_config=config).result()

    def path(self, table: str) -> str:
        project, dataset, table_id = table.split(".")
        return f"projects/{project}/datasets/{dataset}/tables/{table_id}"

    def default_stream(self, table: str) -> str:
        return f"{self.path(table)}/streams/_default"

    def stream(self, table: str, kind: str) -> str:
        created = self.writer.create_write_stream(
            parent=self.path(table),
            write_stream=types.WriteStream(type_=types.WriteStream.Type[kind]),
        )
        return created.name

    def connect(
        self,
        stream: str,
        rows: Rows | pa.Schema | None,
        writer: BigQueryWriteClient | None = None,
    ) -> Connection:
        connection = Connection(writer or self.writer, stream, rows)
        self.connections.append(connection)
        return connection

    def session(self, table: str, **options: Any) -> types.ReadSession:
        return self.reader.create_read_session(
            parent=f"projects/{self.client.project}",
            read_session=types.ReadSession(
                table=self.path(table), data_format=types.DataFormat.ARROW, **options
            ),
        )

    def read(self, session: types.ReadSession, offset: int = 0) -> list[tuple[Any, ...]]:
        """The rows of all streams, in a fixed order; those of one, from an offset."""
        schema = pa.ipc.read_schema(pa.py_buffer(session.arrow_schema.serialized_schema))
        found: list[tuple[Any, ...]] = []
        for stream in session.streams:
            for answer in self.reader.read_rows(stream.name, offset=offset):
                data = pa.py_buffer(answer.arrow_record_batch.serialized_record_batch)
                rows = pa.ipc.read_record_batch(data, schema).to_pylist()
                found += [tuple(row.values()) for row in rows]
        return found if offset else sorted(found, key=repr)


def start(*options: str) -> tuple[subprocess.Popen[str], dict[str, str]]:
    """`python -m dagster_bq_connector.local`, ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dagster_bq_connector.local", "--follow-stdin", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    environment = {}
    for line in process.stdout:
        if line == "ready\n":
            return process, environment
        key, _, value = line.strip().partition("=")
        environment[key] = value
    raise AssertionError(f"it ended with {process.wait()}")


def stop(process: subprocess.Popen[str]) -> int:
    """Close the pipe that it follows. Returns its exit code."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    code = process.wait(20)
    process.stdout.close()
    return code


@pytest.fixture(scope="session")
def local_environment() -> Iterator[dict[str, str]]:
    process, environment = start("--project", PROJECT)
    yield environment
    assert stop(process) == 0


@pytest.fixture(scope="session")
def session_lab(local_environment) -> Iterator[Lab]:
    lab = Lab(local_environment)
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def lab(session_lab) -> Iterator[Lab]:
    session_lab.new_dataset()
    yield session_lab
    session_lab.client.delete_dataset(session_lab.dataset, delete_contents=True)


@pytest.fixture(scope="session")
def make_lab():
    """Lab(environment): clients on another server; close them yourself."""
    return Lab


@pytest.fixture(scope="session")
def make_rows():
    """Rows(name="int64" | "string", ...)."""
    return Rows


@pytest.fixture(scope="session")
def error_code():
    """The StorageErrorCode of a Status."""
    return lambda status: storage_code(status.details)


@pytest.fixture(scope="session")
def raised():
    """The StorageErrorCode of an exception of the clients."""
    return lambda error: storage_code(error.details)


@pytest.fixture(scope="session")
def command():
    """`start` and `stop` of the command line."""
    return start, stop


@pytest.fixture(scope="session")
def together():
    """Call functions in threads, all let go at once. Gives their results or exceptions."""

    def run(functions):
        gate = threading.Barrier(len(functions))

        def call(function):
            gate.wait()
            try:
                return function()
            except Exception as error:  # noqa: BLE001 - the test looks at it
                return error

        with ThreadPoolExecutor(len(functions)) as pool:
            return list(pool.map(call, functions))

    return run
