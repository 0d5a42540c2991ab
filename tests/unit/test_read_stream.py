"""Reading from a Storage API that stalls, breaks, forgets and miscounts."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pyarrow as pa
import pytest
from google.cloud.bigquery_storage_v1 import BigQueryReadClient, types
from google.cloud.bigquery_storage_v1.services.big_query_read.transports import (
    BigQueryReadGrpcTransport,
)

from dagster_bq_connector.clients import CHANNEL_OPTIONS, LOOKAHEAD_BYTES
from dagster_bq_connector.errors import (
    AccessDeniedError,
    ConnectorError,
    RefusedError,
    UnreachableError,
)
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.read import rows as rows_module
from dagster_bq_connector.read import stream as read_stream
from dagster_bq_connector.read.message import Message
from dagster_bq_connector.read.request import ReadRequest
from dagster_bq_connector.read.rows import Rows
from dagster_bq_connector.read.session import create_session
from dagster_bq_connector.read.stream import StreamReader
from dagster_bq_connector.table.ref import TableRef
from support.fake_storage import FakeStorage
from support.served import SCHEMA, Served, response, stall

TABLE = TableRef("d", "t", "p")
KIB = 1024


def client_of(channel: grpc.Channel) -> BigQueryReadClient:
    return BigQueryReadClient(transport=BigQueryReadGrpcTransport(channel=channel))


def rows_of(channel: grpc.Channel, deadline: float = 20.0) -> Rows:
    session = create_session(client_of(channel), ReadRequest(TABLE), "p", deadline)

    def open_stream(stream: str) -> StreamReader:
        return StreamReader(channel, stream, deadline)

    return Rows([session], open_stream, lambda: Progress("reading", log=lambda _: None))


def numbers(rows: Rows) -> list[int]:
    return sorted(rows.to_arrow()["id"].to_pylist())


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "read-stream"]


def wait_for_rest(served: Served) -> None:
    """Until the server can send no more."""
    before = -1
    while before != served.sent:
        before = served.sent
        time.sleep(0.3)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (grpc.StatusCode.UNAVAILABLE, "The service is currently unavailable: draining"),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2"),
        (grpc.StatusCode.UNKNOWN, "Stream removed"),
        (grpc.StatusCode.ABORTED, "try again"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many concurrent read connections"),
    ],
)
def test_a_stream_goes_on_from_its_last_row(
    storage: FakeStorage, channel: grpc.Channel, code: grpc.StatusCode, text: str
) -> None:
    served = Served(storage, streams=1, messages=6, rows=10)
    storage.read = served.until(2, lambda context: context.abort(code, text), times=2)
    assert rows_of(channel).to_arrow()["id"].to_pylist() == list(range(60))
    assert served.offsets == [0, 20, 40]


def test_a_stream_that_stalls_is_opened_again(
    storage: FakeStorage, channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Public failure case 60: the server stops sending and does not close."""
    monkeypatch.setattr(read_stream, "IDLE_SECONDS", 0.5)
    served = Served(storage, streams=1, messages=4, rows=10)
    storage.read = served.until(1, stall)
    assert rows_of(channel).to_arrow()["id"].to_pylist() == list(range(40))
    assert served.offsets == [0, 10]


def test_a_sibling_that_trickles_hides_no_stall(
    storage: FakeStorage, channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Public failure case 60: only one of two streams stalls."""
    monkeypatch.setattr(read_stream, "IDLE_SECONDS", 0.5)
    served = Served(storage, streams=2, messages=8, rows=10)
    whole, stalled, reopened = served.read, threading.Event(), threading.Event()

    def uneven(request: Any, context: Any) -> Iterator[Any]:
        if request.read_stream == "s/0" and not stalled.is_set():
            stalled.set()
            stall(context)
            return
        if request.read_stream == "s/0":
            reopened.set()
            yield from whole(request, context)
            return
        for message in whole(request, context):
            if not reopened.is_set():
                time.sleep(0.3)
            yield message
        assert reopened.wait(20)  # the trickle goes on until the other stream was opened again

    storage.read = uneven
    assert numbers(rows_of(channel)) == sorted([*range(80), *range(80)])


def test_a_stall_without_end_ends_at_the_deadline(
    storage: FakeStorage, channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Public failure case 60: nothing ever comes."""
    monkeypatch.setattr(read_stream, "IDLE_SECONDS", 0.5)
    served = Served(storage, streams=1, messages=4, rows=10)
    storage.read = served.until(0, stall, times=10**6)
    blame = "Read stream s/0: no row within the deadline.*nothing came"
    with pytest.raises(UnreachableError, match=blame):
        rows_of(channel, deadline=2).to_arrow()


def test_a_session_that_is_never_answered_ends_at_the_deadline(
    storage: FakeStorage, channel: grpc.Channel
) -> None:
    """Public failure case 60, before the first row."""
    storage.create_session = lambda request, context: stall(context) or types.ReadSession()
    with pytest.raises(UnreachableError, match="Reading p.d.t: no success within the deadline"):
        rows_of(channel, deadline=1)


@contextmanager
def swallowing(port: int, after: int) -> Iterator[tuple[str, threading.Event]]:
    """A way to `port` whose first connection carries so many bytes back, then nothing more.

    Neither end of it is told, as when a network goes away.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    swallowed, ends = threading.Event(), []

    def pump(source: socket.socket, sink: socket.socket, limit: int | None) -> None:
        carried = 0
        while data := source.recv(64 * KIB):
            carried += len(data)
            if limit is not None and carried > limit:
                swallowed.set()
            if not (swallowed.is_set() and limit is not None):
                sink.sendall(data)

    def accept() -> None:
        while True:
            near, _ = listener.accept()
            far = socket.create_connection(("127.0.0.1", port))
            first = not ends
            ends.extend([near, far])
            back = after if first else None
            for ways in ((near, far, None), (far, near, back)):
                threading.Thread(target=quietly, args=[pump, *ways], daemon=True).start()

    def quietly(function: Callable[..., None], *arguments: object) -> None:
        try:
            function(*arguments)
        except OSError:  # the other end is closed
            return

    threading.Thread(target=quietly, args=[accept], daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", swallowed
    finally:
        for end in [listener, *ends]:
            end.close()


def test_a_network_that_goes_away_is_noticed_by_pings(storage: FakeStorage) -> None:
    """Public failure case 60: neither side closes, and a new call would use the dead connection."""
    served = Served(storage, streams=1, messages=50, rows=KIB)
    hurried = dict.fromkeys(
        ["grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"], 1000
    )
    options = [(name, hurried.get(name, value)) for name, value in CHANNEL_OPTIONS]
    with (
        swallowing(storage.port, after=200 * KIB) as (address, swallowed),
        grpc.insecure_channel(address, options=options) as channel,
    ):
        rows = rows_of(channel, deadline=60)
        assert rows.to_arrow()["id"].to_pylist() == list(range(50 * KIB))
        assert swallowed.is_set()
    assert len(served.offsets) == 2


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            grpc.StatusCode.FAILED_PRECONDITION,
            "there was an error operating on 's/0': session expired at 2026-08-01T00:00:00+00:00",
        ),
        (grpc.StatusCode.INVALID_ARGUMENT, "Stream expired"),
        (grpc.StatusCode.NOT_FOUND, "Not found: Stream s/0"),
    ],
)
def test_a_session_that_is_over_says_to_read_again(
    storage: FakeStorage, channel: grpc.Channel, code: grpc.StatusCode, said: str
) -> None:
    served = Served(storage, streams=1, messages=4, rows=10)
    storage.read = served.until(2, lambda context: context.abort(code, said))
    with pytest.raises(RefusedError, match="lasts six hours. Read the table again") as caught:
        rows_of(channel).to_arrow()
    assert said in str(caught.value)
    assert len(served.offsets) == 1


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, RefusedError),
        (grpc.StatusCode.PERMISSION_DENIED, AccessDeniedError),
    ],
)
def test_a_refusal_ends_the_read_and_keeps_the_reason(
    storage: FakeStorage, channel: grpc.Channel, code: grpc.StatusCode, kind: type[ConnectorError]
) -> None:
    served = Served(storage, streams=3, messages=10**6, rows=10)
    whole = served.read

    def one_is_refused(request: Any, context: Any) -> Iterator[Any]:
        if request.read_stream == "s/1":
            context.abort(code, "the reason")
        yield from whole(request, context)

    storage.read = one_is_refused
    with pytest.raises(kind, match="the reason"):
        rows_of(channel).to_arrow()
    wait_until(lambda: not readers() and not served.open, "a stream is still read")


def leave_by_break(rows: Rows) -> None:
    for _ in rows:
        break


def leave_by_close(rows: Rows) -> None:
    batches = iter(rows)
    next(batches)
    batches.close()


def leave_by_an_exception(rows: Rows) -> None:
    def consume() -> None:
        for batch in rows:
            batch.num_rows / 0

    with pytest.raises(ZeroDivisionError):
        consume()


def leave_by_dropping_the_reader(rows: Rows) -> None:
    reader = rows.to_reader()
    reader.read_next_batch()
    del reader


def leave_by_closing_the_reader(rows: Rows) -> None:
    with rows.to_reader() as reader:
        reader.read_next_batch()


def leave_by_dropping_the_stream(rows: Rows) -> None:
    reader = pa.RecordBatchReader.from_stream(rows)
    reader.read_next_batch()
    del reader


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_break,
        leave_by_close,
        leave_by_an_exception,
        leave_by_dropping_the_reader,
        leave_by_closing_the_reader,
        leave_by_dropping_the_stream,
    ],
)
def test_who_leaves_early_leaves_nothing_behind(
    storage: FakeStorage, channel: grpc.Channel, leave: Callable[[Rows], None]
) -> None:
    served = Served(storage, streams=4, messages=10**6, rows=KIB)
    stalling = served.until(1, stall, times=10**6)

    def some_stall(request: Any, context: Any) -> Iterator[Any]:
        return (stalling if request.read_stream == "s/3" else served.read)(request, context)

    storage.read = some_stall
    leave(rows_of(channel))
    wait_until(lambda: not readers() and not served.open, "a thread or a call is left")


def test_rows_can_be_read_by_two_threads_and_again(
    storage: FakeStorage, channel: grpc.Channel
) -> None:
    Served(storage, streams=3, messages=20, rows=10)
    rows = rows_of(channel)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(numbers, [rows, rows])
    assert first == second == numbers(rows) == sorted(list(range(200)) * 3)


def test_what_grpc_receives_ahead_is_bounded(storage: FakeStorage) -> None:
    """Public failure case 59: it would go on to receive for as long as the server sends."""
    size, streams = 64 * KIB, 12
    served = Served(storage, streams=streams, messages=10**6, rows=size // 8)
    with grpc.insecure_channel(storage.address, options=CHANNEL_OPTIONS) as channel:
        method = channel.unary_stream(read_stream.METHOD)
        names = [f"s/{number}" for number in range(streams)]
        calls = [
            method(types.ReadRowsRequest.serialize(types.ReadRowsRequest(read_stream=name)))
            for name in names
        ]
        for call in calls:
            for _ in range(100):  # it would have measured the connection by then
                next(call)
        wait_for_rest(served)
        for call in calls:
            call.cancel()
    # Some messages lie in the buffers of the sending side. Without the option it is twice as much.
    ahead = served.sent - 100 * streams
    assert ahead * size <= streams * 1.5 * LOOKAHEAD_BYTES


def test_a_read_that_nobody_takes_ends_to_fetch(
    storage: FakeStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Public failure case 59: two hundred megabytes, and a consumer that rests after the first."""
    size, streams, held = 256 * KIB, 4, 4096 * KIB
    monkeypatch.setattr(rows_module, "_held", lambda streams: held)
    served = Served(storage, streams=streams, messages=200, rows=size // 8)
    with grpc.insecure_channel(storage.address, options=CHANNEL_OPTIONS) as channel:
        batches = iter(rows_of(channel))
        next(batches)
        wait_for_rest(served)
        assert served.sent * size <= size + held + streams * (LOOKAHEAD_BYTES + 8 * size)
        assert served.sent * size >= held
        assert sum(batch.num_rows for batch in batches) == (200 * streams - 1) * served.rows


def test_a_server_that_miscounts_is_not_trusted(
    storage: FakeStorage, channel: grpc.Channel
) -> None:
    """By its count a stream is resumed, so rows would be lost or doubled."""
    served = Served(storage, streams=1, messages=1, rows=10)
    wrong = response(range(10))
    wrong.row_count = 9
    storage.read = lambda request, context: iter([wrong])
    with pytest.raises(RefusedError, match="sent 10 rows and counted 9"):
        rows_of(channel).to_arrow()
    assert served.sent == 0


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"stats": {"progress": {"at_response_start": 0.25, "at_response_end": 0.5}}},
        {"throttle_state": {"throttle_percent": 50}},
        {"arrow_schema": {"serialized_schema": SCHEMA.serialize().to_pybytes()}},
        {"uncompressed_byte_size": 2**40},
    ],
)
def test_a_message_is_cut_up_as_protobuf_would(extra: dict[str, Any]) -> None:
    whole = response(range(300))
    for name, value in extra.items():
        setattr(whole, name, value)
    message = Message.parse(types.ReadRowsResponse.serialize(whole))
    assert message.rows == 300
    assert bytes(message.data) == whole.arrow_record_batch.serialized_record_batch
    assert message.decode(SCHEMA)["id"].to_pylist() == list(range(300))


def test_fields_of_the_future_are_skipped() -> None:
    known = types.ReadRowsResponse.serialize(response(range(3)))
    fixed32, fixed64 = b"\xfd\x06" + b"\x01" * 4, b"\xf9\x06" + b"\x02" * 8  # field 111
    varint, text = b"\xf8\x06\xff\xff\x01", b"\xfa\x06\x03abc"
    message = Message.parse(fixed32 + varint + known + fixed64 + text)
    assert message.decode(SCHEMA)["id"].to_pylist() == [0, 1, 2]


def test_a_message_without_rows_is_none() -> None:
    assert Message.parse(b"").rows == 0
    throttled = types.ReadRowsResponse(throttle_state={"throttle_percent": 100})
    assert Message.parse(types.ReadRowsResponse.serialize(throttled)).rows == 0


def test_the_buffers_of_rows_are_aligned() -> None:
    """In the message they lie anywhere: other libraries would copy them, or fail."""
    for length in range(1, 20):
        whole = response(range(length))
        whole.stats = {"progress": {"at_response_end": 1 / length}}
        batch = Message.parse(types.ReadRowsResponse.serialize(whole)).decode(SCHEMA)
        assert batch["id"].buffers()[1].address % 8 == 0
