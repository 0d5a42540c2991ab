"""Cloud Storage with generation preconditions that are true compare-and-sets.

fake-gcs-server keeps them on some calls and ignores them on others. This HTTP server stands in
front of it: it takes the locks of the objects that a request touches, compares their generations,
and only then lets the request through. Bodies are spooled before a lock is taken, so a slow client
holds none.

Jobs of the local BigQuery itself (load, extract) read and write past it, see server.py.
"""

import contextlib
import http.client
import json
import tempfile
import threading
import weakref
from collections.abc import Generator, Iterable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import IO, Any
from urllib.parse import parse_qs, quote, urlsplit

from dagster_bq_connector.local.conditions import (
    Condition,
    Refused,
    Request,
    collision,
    conditions,
    refuse_unsupported,
)

HOST = "127.0.0.1"
MEMORY_LIMIT = 4 << 20  # bytes of a body kept in memory; more go to a temporary file
BLOCK = 1 << 20
# They speak of one connection, not of the message.
HOP_BY_HOP = ("connection", "keep-alive", "proxy-connection", "te", "transfer-encoding", "upgrade")


class _ObjectLock:
    """A lock that the registry forgets when nobody holds or awaits it."""

    def __init__(self):
        self.lock = threading.Lock()


class Gateway(ThreadingHTTPServer):
    """The server that clients see; `backend_port` is where fake-gcs-server listens."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self):
        super().__init__((HOST, 0), Handler)
        self.backend_port = 0
        self._uploads: dict[str, Condition] = {}
        self._registry = threading.Lock()
        self._locks: weakref.WeakValueDictionary[tuple[str, str], _ObjectLock] = (
            weakref.WeakValueDictionary()
        )

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}"

    @contextlib.contextmanager
    def locked(self, objects: Iterable[Condition]) -> Generator[None]:
        """Hold the locks of all the objects, taken in one order."""
        keys = sorted({(each.bucket, each.name) for each in objects})
        with self._registry:
            locks = [self._locks.setdefault(key, _ObjectLock()) for key in keys]
        with contextlib.ExitStack() as stack:
            for each in locks:
                stack.enter_context(each.lock)
            yield

    def wanted(self, request: Request) -> list[Condition]:
        """The conditions of a request; those of a resumable upload count again at its end."""
        refuse_unsupported(request)
        upload = self._uploads.get(request.upload_id or "")
        if upload is not None:
            return [upload] if request.ends_upload else []
        return conditions(request)

    def remember(self, request: Request, wanted: list[Condition], answer: http.client.HTTPResponse):
        """Keep the conditions of an upload from its first request to its last."""
        if request.starts_upload and answer.status == HTTPStatus.OK:
            query = parse_qs(urlsplit(answer.headers.get("Location", "")).query)
            self._uploads[query["upload_id"][0]] = wanted[0]
        elif request.upload_id and answer.status in (HTTPStatus.OK, HTTPStatus.CREATED):
            self._uploads.pop(request.upload_id, None)

    def generation(self, bucket: str, name: str) -> int:
        """The generation of the live object, 0 when there is none."""
        connection = http.client.HTTPConnection(HOST, self.backend_port)
        with contextlib.closing(connection):
            path = f"/storage/v1/b/{quote(bucket, safe='')}/o/{quote(name, safe='')}"
            connection.request("GET", path)
            answer = connection.getresponse()
            if answer.status == HTTPStatus.NOT_FOUND:
                return 0
            if answer.status != HTTPStatus.OK:
                raise Refused(answer.status, "backendError", f"Cannot read {bucket}/{name}.")
            return int(json.load(answer)["generation"])


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Gateway  # pyright: ignore[reportIncompatibleVariableOverride]  # ours

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a line a request would bury the log."""

    def relay(self) -> None:
        """Answer one request of whatever method."""
        with tempfile.SpooledTemporaryFile(MEMORY_LIMIT) as body:
            self._spool(body)
            body.seek(0)
            request = Request(self.command, self.path, self.headers, body)
            try:
                self._pass(request)
            except Refused as refusal:
                self._refuse(refusal)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = relay

    def _pass(self, request: Request) -> None:
        wanted = self.server.wanted(request)
        connection = http.client.HTTPConnection(HOST, self.server.backend_port)
        with contextlib.closing(connection):
            with self.server.locked(wanted):
                for condition in wanted:
                    if not condition.is_void:
                        condition.check(self.server.generation(condition.bucket, condition.name))
                answer = self._forward(connection, request)
                self.server.remember(request, wanted, answer)
                # The answer to a write says that it is done; a read has its file open by now.
                content = None if request.reads else answer.read()
            if content and answer.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                self._explain(content, wanted)
            self._reply(answer, content)

    def _explain(self, content: bytes, wanted: list[Condition]) -> None:
        """Put a refusal that says why in place of a failure that would be tried again."""
        for each in wanted:
            if each.must_exist and not self.server.generation(each.bucket, each.name):
                raise Refused(404, "notFound", f"No such object: {each.bucket}/{each.name}")
        made = [each.name for each in wanted if not each.must_exist]
        if made and (refusal := collision(content, made[0])):
            raise refusal

    def _spool(self, body: IO[bytes]) -> None:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while size := int(self.rfile.readline().split(b";")[0], 16):
                self._copy(size, body)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass  # trailers
        else:
            self._copy(int(self.headers.get("Content-Length") or 0), body)

    def _copy(self, size: int, body: IO[bytes]) -> None:
        while size:
            block = self.rfile.read(min(size, BLOCK))
            if not block:
                raise ConnectionAbortedError("the client went away")
            body.write(block)
            size -= len(block)

    def _forward(
        self, connection: http.client.HTTPConnection, request: Request
    ) -> http.client.HTTPResponse:
        request.body.seek(0, 2)
        size = request.body.tell()
        request.body.seek(0)
        connection.putrequest(
            request.method, request.target, skip_host=True, skip_accept_encoding=True
        )
        for name, value in self.headers.items():
            if name.lower() not in (*HOP_BY_HOP, "content-length", "expect"):
                connection.putheader(name, value)
        if size or request.method in ("POST", "PUT", "PATCH"):
            connection.putheader("Content-Length", str(size))
        connection.endheaders()
        while block := request.body.read(BLOCK):
            connection.send(block)
        return connection.getresponse()

    def _reply(self, answer: http.client.HTTPResponse, content: bytes | None) -> None:
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in (*HOP_BY_HOP, "content-length"):
                self.send_header(name, value)
        if content is not None:
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            return
        length = answer.headers.get("Content-Length")
        if length is None and self.command != "HEAD":
            content = answer.read()  # without a length: listings, which are small
            length = str(len(content))
        if length is not None:
            self.send_header("Content-Length", length)
        self.end_headers()
        if content is not None:
            self.wfile.write(content)
        elif self.command != "HEAD":
            while block := answer.read(BLOCK):
                self.wfile.write(block)

    def _refuse(self, refusal: Refused) -> None:
        text = str(refusal)
        problem = {"message": text, "domain": "global", "reason": refusal.reason}
        error = {"code": refusal.status, "message": text, "errors": [problem]}
        content = b"" if refusal.status == HTTPStatus.NOT_MODIFIED else _encoded({"error": error})
        self.send_response_only(refusal.status)
        self.send_header("Content-Type", "application/json; charset=UTF-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _encoded(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()
