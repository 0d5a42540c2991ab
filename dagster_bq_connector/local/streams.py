"""Storage Write: every append is checked when it arrives, and a commit lands whole or not at all.

Upstream decodes requests and keeps the streams; this module decides. Rows go to the stream's stage
first (staging.py) and are published at once (default, committed), up to an offset (buffered) or
together (pending). A stream ends with its table: another of the same name takes none of its rows.

Seams: `write.Stream` (ours has a lock and a stage) and five handlers of the gRPC table
`server.SERVICES`.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import duckdb
import grpc
import pyarrow as pa
from google.cloud.bigquery_storage_v1 import types
from google.protobuf.message import DecodeError

from dagster_bq_connector.local import arrow_rows, cdc, proto_rows
from dagster_bq_connector.local.faults import INVALID, Code, StorageFault
from dagster_bq_connector.local.staging import Row, Stage, identity, publish_rows, transaction
from dagster_bq_connector.local.upstream import Reference, database, read, server, tables, write

SERVICE = "google.cloud.bigquery.storage.v1.BigQueryWrite"
REQUEST_LIMIT = 10 * 1024 * 1024  # bytes, as the service says it in its refusals
DEFAULT_VALUE = types.AppendRowsRequest.MissingValueInterpretation.DEFAULT_VALUE
BAD_ROWS = "Errors found while processing rows. Please refer to the row_errors field for details."
Type = types.WriteStream.Type


@dataclass
class Stream:
    """A write stream: `count` rows accepted, `flushed` of them in the table, the rest in the stage.

    The fields up to `committed` are those that upstream sets and reads.
    """

    name: str
    table: Reference
    type: Any
    created: Any
    count: int = 0
    flushed: int = 0
    finalized: bool = False
    committed: Any = None
    lock: threading.RLock = field(default_factory=threading.RLock)
    stage: Stage | None = None
    identity: str | None = None

    def __post_init__(self):
        self.identity = identity(*self.table)

    @property
    def is_default(self) -> bool:
        return self.name.endswith("/streams/_default")

    def check_table(self) -> None:
        """Refuse a table that was made after the stream, unless the stream is its default one.

        Raises:
            StorageFault: STREAM_NOT_FOUND.
        """
        if self.is_default:
            return
        current = identity(*self.table)
        self.identity = self.identity or current  # it comes with a table's first columns
        if current not in (None, self.identity):
            text = "Requested entity was not found: the stream's table was deleted or replaced."
            code = grpc.StatusCode.NOT_FOUND
            raise StorageFault(code, text, Code.STREAM_NOT_FOUND, self.name)

    def take(self, rows: list[Row] | pa.RecordBatch) -> list[Row]:
        """Accept all the rows or none. Returns the row errors."""
        stage = self._open_stage()
        if errors := stage.insert(rows, start=self.count):
            return errors
        if self.type == Type.COMMITTED:
            try:
                self.show(self.count + len(rows))
            finally:
                stage.discard()
        self.count += len(rows)
        return []

    def show(self, stop: int) -> None:
        """Make the rows before offset `stop` visible."""
        if self.stage:
            with database.writing(*self.table), database.cursor() as cur:
                publish_rows(cur, lambda: self.publish(cur, self.flushed, stop))
        self.flushed = stop

    def publish(self, cur: duckdb.DuckDBPyConnection, start: int, stop: int) -> None:
        """Copy rows into the table, in the cursor's transaction."""
        if self.stage:
            self.stage.publish(cur, start, stop)
            # Once the transaction holds the table: if that is replaced now, the commit fails.
            self.check_table()

    def _open_stage(self) -> Stage:
        """The stage; a new one when the table of a default stream was replaced meanwhile.

        Such a stream's stage is empty between appends, so nothing is lost.
        """
        stage = self.stage
        if stage and self.is_default and stage.identity != identity(*self.table):
            stage.drop()
            stage = None
        self.stage = stage or Stage(self.table)
        return self.stage


def stream_of(name: str) -> Stream:
    """The stream of that name; a default stream is made when first used.

    Raises:
        StorageFault: STREAM_NOT_FOUND, also of a stream whose table was replaced.
    """
    try:
        stream: Stream = write._stream(name)
    except read.StorageError as error:
        text = "Requested entity was not found."
        raise StorageFault(error.code, text, Code.STREAM_NOT_FOUND, name) from error
    stream.check_table()
    return stream


class Connection:
    """One AppendRows call: what its client said last of stream and schema."""

    def __init__(self):
        self._name = ""
        self._is_cdc = False
        self._decode: Callable[[Any, Any], Any] | None = None

    def answer(self, request: types.AppendRowsRequest) -> types.AppendRowsResponse:
        size = types.AppendRowsRequest.pb(request).ByteSize()
        if size > REQUEST_LIMIT:
            text = f"AppendRows request too large: {size} limit {REQUEST_LIMIT}"
            raise StorageFault(INVALID, text)
        self._name = request.write_stream or self._name
        stream = stream_of(self._name)
        response = types.AppendRowsResponse(write_stream=stream.name)
        try:
            rows = self._rows(request, stream)
            with stream.lock:
                _check_offset(request, stream)
                first = stream.count
                errors = cdc.apply(stream.table, rows) if self._is_cdc else stream.take(rows)
        except StorageFault as fault:
            response.error = fault.status()
            return response
        if errors:
            response.error = StorageFault(INVALID, BAD_ROWS, entity=stream.name).status()
            response.row_errors = list(map(_row_error, errors))
            return response
        response.append_result = types.AppendRowsResponse.AppendResult(
            offset=None if stream.is_default else first
        )
        return response

    def _rows(self, request: types.AppendRowsRequest, stream: Stream) -> Any:
        interpretations = dict(request.missing_value_interpretations).values()
        if DEFAULT_VALUE in (request.default_missing_value_interpretation, *interpretations):
            text = "Missing values are NULL here: DEFAULT_VALUE is not supported."
            raise StorageFault(grpc.StatusCode.UNIMPLEMENTED, text)
        fields = tables.columns(*stream.table)
        if names := _writer_columns(request):
            known = {field.name.casefold() for field in fields}
            self._adopt(names, known, request, stream)
        if self._decode is None:
            text = "The first request of a connection must carry a writer schema."
            raise StorageFault(INVALID, text, entity=stream.name)
        try:
            return self._decode(request, fields)
        except (DecodeError, pa.ArrowException) as error:
            text = f"Cannot decode the rows: {error}."
            raise StorageFault(INVALID, text, entity=stream.name) from error

    def _adopt(
        self, names: list[str], known: set[str], request: types.AppendRowsRequest, stream: Stream
    ) -> None:
        """Take a writer schema for this request and those that follow."""
        self._is_cdc, self._decode = cdc.CHANGE_TYPE in names, None
        if self._is_cdc and (not stream.is_default or "arrow_rows" in request):
            text = f"{cdc.CHANGE_TYPE} needs the default stream and protobuf rows."
            raise StorageFault(INVALID, text, entity=stream.name)
        own = cdc.PSEUDO_COLUMNS if self._is_cdc else ()
        extra = [name for name in names if name.casefold() not in known and name not in own]
        if extra:
            text = (
                "Input schema has more fields than BigQuery schema, "
                f"extra fields: '{','.join(extra)}'."
            )
            raise StorageFault(INVALID, text, Code.SCHEMA_MISMATCH_EXTRA_FIELDS, stream.name)
        self._decode = arrow_rows.decoder(request) or write._decoder(request)


def _check_offset(request: types.AppendRowsRequest, stream: Stream) -> None:
    if stream.finalized:
        text = "Stream has been finalized and cannot be appended."
        raise StorageFault(INVALID, text, Code.STREAM_FINALIZED, stream.name)
    if "offset" not in request:
        return
    if stream.is_default:
        text = "Offset must not be set on the default stream."
        raise StorageFault(INVALID, text, entity=stream.name)
    offset = _plain(request.offset)
    text = f"expected offset {stream.count}, received {offset}."
    if offset < stream.count:
        raise StorageFault(
            grpc.StatusCode.ALREADY_EXISTS,
            f"The offset is within stream, {text}",
            Code.OFFSET_ALREADY_EXISTS,
            stream.name,
        )
    if offset > stream.count:
        raise StorageFault(
            grpc.StatusCode.OUT_OF_RANGE,
            f"The offset is beyond stream, {text}",
            Code.OFFSET_OUT_OF_RANGE,
            stream.name,
        )


def _plain(offset: Any) -> int:
    """An Int64Value, which arrives as a number whatever its stub says."""
    return int(offset)


def _writer_columns(request: types.AppendRowsRequest) -> list[str]:
    if "arrow_rows" in request:
        schema = request.arrow_rows.writer_schema.serialized_schema
        return pa.ipc.read_schema(pa.py_buffer(schema)).names if schema else []
    descriptor = request.proto_rows.writer_schema.proto_descriptor
    return [proto_rows.column_name(field) for field in descriptor.field]


def _row_error(error: Row) -> types.RowError:
    return types.RowError(
        index=error["index"],
        code=types.RowError.RowErrorCode.FIELDS_ERROR,
        message=error["errors"][0]["message"],
    )


def append(requests: Iterable[types.AppendRowsRequest]) -> Iterator[types.AppendRowsResponse]:
    connection = Connection()
    return map(connection.answer, requests)


def create(request: types.CreateWriteStreamRequest) -> types.WriteStream:
    if request.write_stream.type_ not in (Type.COMMITTED, Type.PENDING, Type.BUFFERED):
        raise StorageFault(INVALID, "A stream's type must be COMMITTED, PENDING or BUFFERED.")
    return write.create(request)


def finalize(request: types.FinalizeWriteStreamRequest) -> types.FinalizeWriteStreamResponse:
    if request.name.endswith("/streams/_default"):
        return write.finalize(request)  # upstream refuses it
    stream = stream_of(request.name)
    with stream.lock:
        return write.finalize(request)


def _commit_error(name: str, parent: Reference) -> types.StorageError | None:
    try:
        stream = stream_of(name)
    except StorageFault as fault:
        return types.StorageError(code=fault.storage_code, entity=name, error_message=fault.message)
    wrong_type = f"Stream must be created in pending mode, actual: {stream.type.name}"
    problems = (
        (stream.type != Type.PENDING, Code.INVALID_STREAM_TYPE, wrong_type),
        (stream.table != parent, Code.INVALID_STREAM_STATE, "Stream belongs to another table"),
        (stream.committed, Code.STREAM_ALREADY_COMMITTED, "Stream has been committed"),
        (not stream.finalized, Code.INVALID_STREAM_STATE, "Stream is not finalized"),
    )
    for holds, code, message in problems:
        if holds:
            return types.StorageError(code=code, entity=name, error_message=message)
    return None


def commit(request: types.BatchCommitWriteStreamsRequest) -> types.BatchCommitWriteStreamsResponse:
    """All the streams in one transaction. The table's lock decides between two commits of one."""
    parent = read.table(request.parent)
    tables.load(*parent)
    with database.writing(*parent), database.cursor() as cur:
        errors = [_commit_error(name, parent) for name in request.write_streams]
        if any(errors):
            return types.BatchCommitWriteStreamsResponse(stream_errors=list(filter(None, errors)))
        streams = [stream_of(name) for name in dict.fromkeys(request.write_streams)]
        with transaction(cur):
            for stream in streams:
                stream.publish(cur, 0, stream.count)
        now = write._now()
        for stream in streams:
            stream.committed = now
            if stream.stage:
                stream.stage.drop()
    return types.BatchCommitWriteStreamsResponse(commit_time=now)


def flush(request: types.FlushRowsRequest) -> types.FlushRowsResponse:
    """Show the rows up to and including `offset`. What is shown already is ALREADY_EXISTS."""
    stream = stream_of(request.write_stream)
    if stream.type != Type.BUFFERED:
        text = f"Stream must be created in buffered mode, actual: {stream.type.name}."
        raise StorageFault(INVALID, text, Code.INVALID_STREAM_TYPE, stream.name)
    with stream.lock:
        offset = _plain(request.offset) if "offset" in request else stream.count - 1
        if offset >= stream.count or offset < 0:
            text = (
                f"Offset {offset} is beyond the end of the stream, which has {stream.count} rows."
            )
            code = grpc.StatusCode.OUT_OF_RANGE
            raise StorageFault(code, text, Code.OFFSET_OUT_OF_RANGE, stream.name)
        if offset < stream.flushed:
            text = f"Rows up to offset {stream.flushed - 1} have been flushed already."
            code = grpc.StatusCode.ALREADY_EXISTS
            raise StorageFault(code, text, Code.OFFSET_ALREADY_EXISTS, stream.name)
        stream.show(offset + 1)
    return types.FlushRowsResponse(offset=offset)


def install() -> None:
    write.Stream = Stream
    handlers = server.SERVICES[SERVICE]
    handlers["AppendRows"] = server._streaming(
        append, types.AppendRowsRequest, types.AppendRowsResponse, bidirectional=True
    )
    for name, function, request, response in (
        ("CreateWriteStream", create, types.CreateWriteStreamRequest, types.WriteStream),
        (
            "FinalizeWriteStream",
            finalize,
            types.FinalizeWriteStreamRequest,
            types.FinalizeWriteStreamResponse,
        ),
        (
            "BatchCommitWriteStreams",
            commit,
            types.BatchCommitWriteStreamsRequest,
            types.BatchCommitWriteStreamsResponse,
        ),
        ("FlushRows", flush, types.FlushRowsRequest, types.FlushRowsResponse),
    ):
        handlers[name] = server._unary(function, request, response)
