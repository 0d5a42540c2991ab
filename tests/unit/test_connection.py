"""One AppendRows call: what goes over it, in which order, and what becomes of each request."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import grpc
import pyarrow as pa
import pytest
from google.cloud.bigquery_storage_v1 import types
from google.rpc import status_pb2

from dagster_bq_connector.errors import Fault, RequestTooLargeError, UnreachableError
from dagster_bq_connector.write.connection import WINDOW_REQUESTS, AppendRefused, Connection
from dagster_bq_connector.write.encode import ArrowEncoder
from support.connections import QUICK, SCHEMA, STREAM, connect, number_in, payload
from support.fake_storage import FakeStorage, acknowledged


def test_requests_are_what_the_official_classes_say(
    storage: FakeStorage, channel: grpc.Channel
) -> None:
    seen: list[types.AppendRowsRequest] = []

    def append(requests, _context):
        for request in requests:
            seen.append(request)
            yield acknowledged()

    storage.append = append
    connection = connect(channel)
    for number in (1, 2):
        assert connection.send(payload(number)).result(timeout=20) is None
    connection.close()
    first, second = seen
    schema = pa.ipc.read_schema(pa.py_buffer(first.arrow_rows.writer_schema.serialized_schema))
    assert (first.write_stream, schema) == (STREAM, SCHEMA)
    assert first.trace_id
    assert (second.write_stream, second.arrow_rows.writer_schema.serialized_schema) == ("", b"")
    assert [number_in(request) for request in seen] == [1, 2]


def test_an_answer_wakes_its_waiter_without_polling(
    storage: FakeStorage, channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Public failure case 6: ten appends of one row took a second or two each."""
    storage.append = lambda requests, _: (acknowledged(number_in(r)) for r in requests)
    connection = connect(channel)
    naps: list[float | None] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    for waited_on in (connection._changed, connection._room, connection._ended):

        def watched(timeout: float | None = None, wait=waited_on.wait) -> bool:
            naps.append(timeout)
            return wait(timeout)

        monkeypatch.setattr(waited_on, "wait", watched)
    assert [connection.send(payload(n)).result(timeout=20) for n in range(10)] == list(range(10))
    connection.close()
    # Nobody looks again after a while, but for the watch, which looks for stalls.
    assert set(naps) == {None, connection._stall / 4}


@pytest.mark.parametrize("threads", [2, 8])
def test_every_sender_gets_its_own_answer(
    storage: FakeStorage, channel: grpc.Channel, threads: int
) -> None:
    """Public failure case 7: with two sending threads, answers went to the wrong requests."""
    storage.append = lambda requests, _: (acknowledged(number_in(r)) for r in requests)
    connection = connect(channel)
    answers: dict[int, Future[int | None]] = {}

    def send(first: int) -> None:
        for number in range(first, first + 1000):
            answers[number] = connection.send(payload(number))

    senders = [threading.Thread(target=send, args=[n * 1000]) for n in range(threads)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    connection.close()
    assert len(answers) == threads * 1000
    assert [n for n, answer in answers.items() if answer.result(timeout=0) != n] == []


def test_a_refused_request_leaves_the_others(storage: FakeStorage, channel: grpc.Channel) -> None:
    def append(requests, _context):
        for request in requests:
            if number_in(request) == 2:
                error = types.RowError(index=0, message="a bad number")
                status = status_pb2.Status(code=3, message="Errors found while processing rows.")
                yield types.AppendRowsResponse(error=status, row_errors=[error])
            else:
                yield acknowledged(number_in(request))

    storage.append = append
    connection = connect(channel)
    answers = [connection.send(payload(number)) for number in (1, 2, 3)]
    assert answers[0].result(timeout=20) == 1
    with pytest.raises(AppendRefused) as caught:
        answers[1].result(timeout=20)
    assert (caught.value.fault, caught.value.row_errors) == (Fault.ROWS, [(0, "a bad number")])
    assert answers[2].result(timeout=20) == 3
    connection.close()


def test_the_largest_request_is_to_blame_for_a_refused_size(
    storage: FakeStorage, channel: grpc.Channel
) -> None:
    def append(requests, context):
        for request in requests:
            size = request.__class__.pb(request).ByteSize()
            if size > 5000:
                text = f"AppendRows request too large: {size} limit 5000"
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
            yield acknowledged(number_in(request))

    storage.append = append
    connection = connect(channel)
    answers = [connection.send(payload(n, size)) for n, size in ((1, 1), (2, 2000), (3, 1))]
    with pytest.raises(RequestTooLargeError, match="limit 5000"):
        answers[1].result(timeout=20)
    assert [answers[0].result(timeout=20), answers[2].result(timeout=20)] == [1, 3]
    connection.close()


def test_the_window_bounds_what_is_in_flight(storage: FakeStorage, channel: grpc.Channel) -> None:
    go_on = threading.Event()

    def append(requests: Iterator[types.AppendRowsRequest], _context: object):
        for request in requests:
            go_on.wait(20)
            yield acknowledged(number_in(request))

    storage.append = append
    one = payload(0, 1000)
    connection = connect(channel, window=3 * len(one))
    sent: list[int] = []

    def send() -> None:
        for number in range(10):
            connection.send(payload(number, 1000))
            sent.append(number)

    sender = threading.Thread(target=send)
    sender.start()
    sender.join(timeout=1)
    assert len(sent) == 3
    go_on.set()
    sender.join(timeout=20)
    connection.close()
    assert len(sent) == 10


def test_small_requests_in_flight_are_bounded_by_their_number(
    storage: FakeStorage, channel: grpc.Channel
) -> None:
    go_on = threading.Event()

    def append(requests: Iterator[types.AppendRowsRequest], _context: object):
        for request in requests:
            go_on.wait(20)
            yield acknowledged(number_in(request))

    storage.append = append
    connection, one, answers = connect(channel), payload(0), list[Future[int | None]]()

    def send() -> None:
        for _ in range(1500):
            answers.append(connection.send(one))

    sender = threading.Thread(target=send)
    sender.start()
    end = time.monotonic() + 60
    while len(answers) < WINDOW_REQUESTS and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.5)
    in_flight = len(answers)
    go_on.set()
    sender.join(timeout=60)
    connection.close()
    assert in_flight == WINDOW_REQUESTS
    assert [answer.result(timeout=0) for answer in answers] == [0] * 1500


def test_closing_twice_and_closing_unused(channel: grpc.Channel) -> None:
    connection = connect(channel)
    connection.close()
    connection.close()
    with pytest.raises(UnreachableError, match="closed"):
        connection.send(payload(1))


def test_whatever_ends_the_sender_is_told_to_those_who_wait() -> None:
    def no_threads(_requests: Iterator[bytes]) -> object:
        raise RuntimeError("can't start new thread")

    connection = Connection(no_threads, bytes, backoff=QUICK)
    with pytest.raises(UnreachableError, match="can't start new thread"):
        connection.send(b"x").result(timeout=20)
    connection.abandon()


def test_an_answer_that_cannot_be_read_is_told() -> None:
    class Garbled(list[bytes]):
        def cancel(self) -> None: ...

    encoder = ArrowEncoder(SCHEMA, STREAM)
    connection = Connection(lambda _: Garbled([b"\xff\xff"]), encoder.first, backoff=QUICK)
    with pytest.raises(UnreachableError, match="the connection failed: DecodeError"):
        connection.send(payload(1)).result(timeout=20)
    connection.abandon()
