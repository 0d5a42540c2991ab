"""An HTTP server in front of a local service, which loses, delays and forges answers as told."""

import contextlib
import http.client
import json
import re
import select
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import urlsplit

HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding", "content-length", "host")
STALL_SECONDS = 120.0  # in which every client must have given up

# What Google's client asks of its own accord, once a bucket and when it likes: it is passed on.
BUCKET = re.compile(r"/storage/v1/b/[^/]+")


@dataclass(frozen=True)
class Verdict:
    """What becomes of a call.

    Attributes:
        arrives: Whether the service gets it.
        status: An answer in place of the service's; 0 means that the connection is closed without
            one, None that the service's own is passed on.
        reason: Google's word for it in that answer.
        text: Its message.
        content: The body of that answer, in place of an error.
        cut: Send only so many bytes of the service's answer, then close the connection.
        stalls: Whether nothing is answered and nothing closed, until the client has gone.
        then: Done when the service has the call, or would have it, and before any answer.
        seen: Done when the client has the answer, or has lost the connection.
    """

    arrives: bool = True
    status: int | None = None
    reason: str = ""
    text: str = "said by the proxy"
    content: bytes | None = None
    cut: int | None = None
    stalls: bool = False
    then: Callable[[], object] = field(default=lambda: None, repr=False)
    seen: Callable[[], object] = field(default=lambda: None, repr=False)


PASSED = Verdict()
LOST = Verdict(status=0)
DROPPED = Verdict(arrives=False, status=0)
CUT = Verdict(cut=20)


@dataclass(frozen=True)
class Call:
    method: str
    path: str
    body: bytes

    @property
    def changes(self) -> bool:
        return self.method not in ("GET", "HEAD")


class HttpProxy(ThreadingHTTPServer):
    """Set `decide`. Calls are kept in the order of their arrival."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = urlsplit(target).netloc
        self.decide: Callable[[Call], Verdict] = lambda _call: PASSED
        self.calls: list[Call] = []
        self.judges_buckets = False
        self._judging = threading.Lock()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def changes(self) -> list[Call]:
        return [call for call in self.calls if call.changes]

    def on_changes(self, *verdicts: Verdict) -> None:
        """Give these verdicts to the next changes, in their order, and pass all that follows."""
        left = iter(verdicts)
        self.decide = lambda call: next(left, PASSED) if call.changes else PASSED

    def judge(self, call: Call) -> Verdict:
        if not self.judges_buckets and BUCKET.fullmatch(urlsplit(call.path).path):
            return PASSED
        with self._judging:
            self.calls.append(call)
            return self.decide(call)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: that a client went away is what many tests are about."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: HttpProxy

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def relay(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        call = Call(self.command, self.path, body)
        verdict = self.server.judge(call)
        with self._forwarded(call) if verdict.arrives else contextlib.nullcontext() as answer:
            content = answer.read() if answer else b""
            verdict.then()
            if verdict.stalls:
                self._stall()
            elif verdict.status == 0:
                self.close_connection = True
            elif verdict.status:
                self._refuse(verdict)
            else:
                self._answer(answer, content, verdict.cut)
            verdict.seen()

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = relay

    @contextlib.contextmanager
    def _forwarded(self, call: Call) -> Iterator[http.client.HTTPResponse]:
        with contextlib.closing(http.client.HTTPConnection(self.server.target)) as connection:
            headers = {k: v for k, v in self.headers.items() if k.lower() not in HOP_BY_HOP}
            headers["Accept-Encoding"] = "identity"
            connection.request(call.method, call.path, call.body, headers)
            yield connection.getresponse()

    def _answer(self, answer: Any, content: bytes, cut: int | None) -> None:
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[:cut])
        self.close_connection = cut is not None

    def _stall(self) -> None:
        """Wait until the client gives up: it closes the connection, which makes it readable."""
        self.close_connection = True
        readable, _, _ = select.select([self.connection], [], [], STALL_SECONDS)
        assert readable, "the client waits without end"

    def _refuse(self, verdict: Verdict) -> None:
        problem = {"message": verdict.text, "domain": "global", "reason": verdict.reason}
        error = {"code": verdict.status, "message": verdict.text, "errors": [problem]}
        content = verdict.content or json.dumps({"error": error}).encode()
        self.send_response_only(verdict.status or 500)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
