"""A Storage API on a real socket, whose answers a test scripts: for what no local service can do.

It stalls, drains, refuses and forgets on demand. Nothing is stored.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pyarrow as pa
from google.cloud.bigquery_storage_v1 import types
from google.rpc import status_pb2

WRITE = "google.cloud.bigquery.storage.v1.BigQueryWrite"
READ = "google.cloud.bigquery.storage.v1.BigQueryRead"
Request = types.AppendRowsRequest
Response = types.AppendRowsResponse


def acknowledged(offset: int | None = None) -> Response:
    result = Response.AppendResult(offset=offset) if offset is not None else {}
    return Response(append_result=result)


def refused(code: int, text: str) -> Response:
    """An answer that carries one of the Storage API's own codes."""
    status = status_pb2.Status(code=grpc.StatusCode.INVALID_ARGUMENT.value[0], message=text)
    status.details.add().Pack(types.StorageError.pb(types.StorageError(code=code)))
    return Response(error=status)


class Received:
    """Decodes what the fake takes.

    Each call begins with its writer schema, so that `call` is asked for a decoder of each.
    """

    def __init__(self) -> None:
        self.schemas: list[pa.Schema] = []  # of the calls
        self.ids: list[int] = []  # of what was acknowledged
        self.sizes: list[int] = []

    def call(self) -> Callable[[Request], pa.RecordBatch]:
        """Decodes the requests of one call."""
        schema: pa.Schema | None = None

        def decode(request: Request) -> pa.RecordBatch:
            nonlocal schema
            if serialized := request.arrow_rows.writer_schema.serialized_schema:
                schema = pa.ipc.read_schema(pa.py_buffer(serialized))
                self.schemas.append(schema)
            assert schema is not None
            data = pa.py_buffer(request.arrow_rows.rows.serialized_record_batch)
            self.sizes.append(Request.pb(request).ByteSize())
            return pa.ipc.read_record_batch(data, schema)

        return decode

    def refusing(self, limit: int) -> Any:
        """An `append` that takes requests of `limit` bytes and refuses larger ones."""

        def append(requests: Iterator[Request], context: grpc.ServicerContext) -> Any:
            decode = self.call()
            for request in requests:
                ids = decode(request)["id"].to_pylist()
                size = Request.pb(request).ByteSize()
                if size > limit:
                    text = f"AppendRows request too large: {size} limit {limit}"
                    context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
                self.ids += ids
                yield acknowledged()

        return append


class FakeStorage:
    """The server. Set `append` and `read`; each call runs them in a thread of its own."""

    def __init__(self) -> None:
        self.append: Callable[[Iterator[Request], grpc.ServicerContext], Iterator[Response]]
        self.read: Callable[[types.ReadRowsRequest, grpc.ServicerContext], Iterator[Any]]
        self.session: types.ReadSession = types.ReadSession()
        self.create_session: Callable[
            [types.CreateReadSessionRequest, grpc.ServicerContext], types.ReadSession
        ] = lambda _request, _context: self.session
        self.append_calls = 0
        self._counting = threading.Lock()
        self._server = grpc.server(
            ThreadPoolExecutor(max_workers=32),
            options=[("grpc.max_receive_message_length", 64 * 1024 * 1024)],
        )
        write = grpc.stream_stream_rpc_method_handler(
            self._append, Request.deserialize, Response.serialize
        )
        rows = grpc.unary_stream_rpc_method_handler(
            lambda request, context: self.read(request, context),
            types.ReadRowsRequest.deserialize,
            types.ReadRowsResponse.serialize,
        )
        session = grpc.unary_unary_rpc_method_handler(
            lambda request, context: self.create_session(request, context),
            types.CreateReadSessionRequest.deserialize,
            types.ReadSession.serialize,
        )
        self._server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(WRITE, {"AppendRows": write}),
                grpc.method_handlers_generic_handler(
                    READ, {"ReadRows": rows, "CreateReadSession": session}
                ),
            ]
        )
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self.address = f"127.0.0.1:{self.port}"
        self._server.start()

    def _append(
        self, requests: Iterator[Request], context: grpc.ServicerContext
    ) -> Iterator[Response]:
        with self._counting:
            self.append_calls += 1
        yield from self.append(requests, context)

    def stop(self) -> None:
        self._server.stop(grace=None).wait()
