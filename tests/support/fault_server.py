"""A BigQuery that fails by a schedule: proxies on real sockets between a writer and a local one."""

import queue
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Self

import grpc
from google.cloud.bigquery_storage_v1 import types
from google.rpc import status_pb2

from support.fake_storage import WRITE, Response, refused
from support.fault_schedule import (
    CONFLICT,
    ENDINGS,
    LOST,
    SCHEMA_LAG,
    STALE,
    STALL,
    STREAM_STATE,
    THROTTLED,
    Fired,
    Schedule,
)
from support.http_proxy import CUT, DROPPED, PASSED, Call, HttpProxy, Verdict
from support.http_proxy import LOST as ANSWER_LOST

Code = types.StorageError.StorageErrorCode
_Request: Any = types.AppendRowsRequest.pb()
_UNARY = ("CreateWriteStream", "FinalizeWriteStream", "BatchCommitWriteStreams", "FlushRows")
DETAILS = "grpc-status-details-bin"
_LIMIT = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]

ANSWERS: dict[str, Response] = {
    THROTTLED: Response(error=status_pb2.Status(code=8, message="AppendRows throughput")),
    SCHEMA_LAG: refused(Code.SCHEMA_MISMATCH_EXTRA_FIELDS, "Input schema has more fields: 'n'."),
    STREAM_STATE: refused(Code.INVALID_STREAM_STATE, "The stream is in an invalid state."),
}
VERDICTS = {
    "HTTP answer lost": ANSWER_LOST,
    "HTTP request lost": DROPPED,
    "HTTP answer cut": CUT,
    "HTTP stall": Verdict(stalls=True),
    "429": Verdict(False, 429, "rateLimitExceeded", "Slow down."),
    "403 rateLimitExceeded": Verdict(False, 403, "rateLimitExceeded", "Exceeded rate limits."),
    "503 before it was taken": Verdict(False, 503, "backendError"),
    "503 after it was taken": Verdict(status=503, reason="backendError"),
    CONFLICT: Verdict(status=409, reason="duplicate", text="Already Exists"),
    STALE: Verdict(status=412, reason="conditionNotMet", text="Precondition Failed"),
}
JOB_MISSING = Verdict(False, 404, "notFound", "Not found: Job, in location US")
_ROUTES = [
    ("jobs.insert", "POST", re.compile(r".*/projects/[^/]+/jobs")),
    ("jobs.get", "GET", re.compile(r".*/projects/[^/]+/jobs/[^/]+")),
    ("tables.get", "GET", re.compile(r".*/datasets/[^/]+/tables/[^/]+")),
    ("tables.insert", "POST", re.compile(r".*/datasets/[^/]+/tables")),
    ("tables.patch", "PATCH", re.compile(r".*/datasets/[^/]+/tables/[^/]+")),
    ("upload", "POST", re.compile(r"/upload/storage/.*")),
]


def call_of(call: Call) -> str | None:
    """The name of an HTTP call that may fail."""
    path = call.path.partition("?")[0]
    for name, method, pattern in _ROUTES:
        if call.method == method and pattern.fullmatch(path):
            return name
    return None


class _Storage:
    """The Storage Write API: requests go on one by one, and the answers come back."""

    def __init__(self, target: str, decide: Callable[[str], str | None], fired: Fired) -> None:
        self._decide, self._fired = decide, fired
        self._channel = grpc.insecure_channel(target, options=_LIMIT)
        handlers = {name: self._handler(name) for name in _UNARY}
        handlers["AppendRows"] = grpc.stream_stream_rpc_method_handler(self._append)
        self._server = grpc.server(ThreadPoolExecutor(max_workers=32), options=_LIMIT)
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(WRITE, handlers)]
        )
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(grace=None).wait()
        self._channel.close()

    def _handler(self, name: str) -> grpc.RpcMethodHandler:
        method = self._channel.unary_unary(f"/{WRITE}/{name}")

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            fault = self._decide(name)
            self._end(fault, context)
            answer = self._ask(iter(lambda: method(request, timeout=60), None), context)
            self._keep(fault, context)
            return answer

        return grpc.unary_unary_rpc_method_handler(answer)

    def _append(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        onward: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        method = self._channel.stream_stream(f"/{WRITE}/AppendRows")
        call: Any = method(iter(onward.get, None))
        name, head = "AppendRows", b""
        try:
            for number, request in enumerate(requests):
                if not number:
                    name, head = _name_and_head(request)
                fault = self._decide(name)
                self._end(fault, context)
                if fault in ANSWERS:
                    self._fired.fault(fault)
                    yield Response.serialize(ANSWERS[fault])
                    continue
                # What was refused here was the first request of the service's call, not of ours.
                onward.put(head + request if number else request)
                head = b""
                answer = self._ask(call, context)
                self._keep(fault, context)
                yield answer
        except grpc.RpcError:  # the caller has gone
            return
        finally:
            onward.put(None)
            call.cancel()

    def _ask(self, answers: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """The next answer of the service, or its error."""
        try:
            return next(answers)
        except grpc.RpcError as failure:
            error: Any = failure
            kept = [pair for pair in error.trailing_metadata() or () if pair[0] == DETAILS]
            context.set_trailing_metadata(tuple(kept))
            context.abort(error.code(), error.details())

    def _end(self, fault: str | None, context: grpc.ServicerContext) -> None:
        """End a call before the service has it."""
        if fault in ENDINGS:
            self._fired.fault(fault)
            context.abort(*ENDINGS[fault])

    def _keep(self, fault: str | None, context: grpc.ServicerContext) -> None:
        """Do not give back the answer that the service gave."""
        if fault == LOST:
            self._fired.fault(fault)
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone with the answer")
        if fault == STALL:
            while context.is_active():
                time.sleep(0.01)
            self._fired.fault(fault)
            context.abort(grpc.StatusCode.CANCELLED, "the caller has gone")


def _name_and_head(request: bytes) -> tuple[str, bytes]:
    """What a call is, from its first request; and that request without its rows."""
    head = _Request.FromString(request)
    default = head.write_stream.endswith("/_default")
    head.ClearField("offset")
    for field in ("arrow_rows", "proto_rows"):
        if head.HasField(field):
            getattr(head, field).ClearField("rows")
    return "AppendRows, default stream" if default else "AppendRows", head.SerializeToString()


class FaultServer:
    """Proxies in front of the three services of a local BigQuery.

    Attributes:
        fields: Of a BigQuery resource that goes through them.
        fired: What the writer met.
        schedule: What fails; nothing when None.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        """Stand in front of the services that the fields of a resource name."""
        self.fired = Fired()
        self.schedule: Schedule | None = None
        self._storage = _Storage(
            fields["storage_endpoint"].removeprefix("http://"), self._decide, self.fired
        )
        self._rest = HttpProxy(fields["api_endpoint"])
        self._files = HttpProxy(fields["cloud_storage_endpoint"])
        self._rest.decide = self._files.decide = self._verdict
        self.fields = fields | {
            "api_endpoint": self._rest.url,
            "storage_endpoint": f"http://127.0.0.1:{self._storage.port}",
            "cloud_storage_endpoint": self._files.url,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._storage.stop()
        for proxy in (self._rest, self._files):
            proxy.__exit__()

    def _decide(self, call: str) -> str | None:
        self.fired.call(call)
        return self.schedule.fault(call) if self.schedule else None

    def _verdict(self, call: Call) -> Verdict:
        name = call_of(call)
        if name == "jobs.get" and "location=" not in call.path:
            return JOB_MISSING  # what the service says of a job elsewhere, if no location is named
        fault = self._decide(name) if name else None
        if fault is None:
            return PASSED
        return replace(VERDICTS[fault], seen=partial(self.fired.fault, fault))
