"""One AppendRows call against a server that misbehaves in every way the service is known to."""

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
from dagster_bq_connector.retry import Backoff
from dagster_bq_connector.write.connection import AppendRefused, Connection, append_rows
from dagster_bq_connector.write.encode import ArrowEncoder, Request
from support.fake_storage import FakeStorage, acknowledged

STREAM = "projects/p/datasets/d/tables/t/streams/_default"
SCHEMA = pa.schema([("n", pa.int64())])
QUICK = Backoff(initial=0.01, cap=0.05, deadline=20)


def connect(channel: grpc.Channel, backoff: Backoff = QUICK, **options: float) -> Connection:
    encoder = ArrowEncoder(SCHEMA, STREAM)
    return Connection(append_rows(channel, STREAM), encoder.first, backoff=backoff, **options)


def payload(number: int, size: int = 1) -> bytes:
    batch = pa.record_batch([pa.array([number] * size, pa.int64())], schema=SCHEMA)
    [request] = ArrowEncoder(SCHEMA, STREAM).cut(batch, 2**24, 2**24)
    assert isinstance(request, Request)
    return request.payload


def number_in(request: types.AppendRowsRequest) -> int:
    data = request.arrow_rows.rows.serialized_record_batch
    return pa.ipc.read_record_batch(pa.py_buffer(data), SCHEMA)["n"][0].as_py()


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


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (grpc.StatusCode.ABORTED, "Closing the stream because it was inactive for 600 seconds."),
        (grpc.StatusCode.ABORTED, "Closing the stream because server is restarted."),
        (grpc.StatusCode.UNAVAILABLE, "Connection is draining"),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Exceeds 'AppendRows throughput' quota"),
    ],
)
def test_a_broken_call_is_opened_again_with_the_schema(
    storage: FakeStorage, channel: grpc.Channel, code: grpc.StatusCode, text: str
) -> None:
    """Public failure case 1: the first append after ten idle minutes."""
    schemas: list[bytes] = []

    def append(requests, context):
        for request in requests:
            schemas.append(request.arrow_rows.writer_schema.serialized_schema)
            if storage.append_calls == 2:
                context.abort(code, text)
            yield acknowledged(number_in(request))
            if storage.append_calls == 1:
                context.abort(code, text)

    storage.append = append
    connection = connect(channel)
    assert connection.send(payload(1)).result(timeout=20) == 1
    assert connection.send(payload(2)).result(timeout=20) == 2
    connection.close()
    assert storage.append_calls == 3
    assert all(schemas)


def test_what_was_not_acknowledged_is_sent_again_in_order(
    storage: FakeStorage, channel: grpc.Channel
) -> None:
    seen: list[list[int]] = []

    def append(requests, context):
        seen.append([])
        for request in requests:
            seen[-1].append(number_in(request))
            if storage.append_calls == 1 and len(seen[0]) == 5:
                context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            if storage.append_calls > 1 or len(seen[0]) <= 2:
                yield acknowledged(seen[-1][-1])

    storage.append = append
    connection = connect(channel)
    answers = [connection.send(payload(number)) for number in range(8)]
    assert [answer.result(timeout=20) for answer in answers] == list(range(8))
    connection.close()
    assert seen[0] == [0, 1, 2, 3, 4]
    assert seen[1] == [2, 3, 4, 5, 6, 7]


def test_no_success_within_the_deadline_keeps_the_real_cause(
    storage: FakeStorage, channel: grpc.Channel
) -> None:
    def append(_requests, context):
        context.abort(grpc.StatusCode.UNAVAILABLE, "the moon is in the way")
        yield acknowledged()

    storage.append = append
    connection = connect(channel, Backoff(initial=0.01, cap=0.05, deadline=0.3))
    answer = connection.send(payload(1))
    with pytest.raises(UnreachableError, match="the moon is in the way") as caught:
        answer.result(timeout=20)
    assert isinstance(caught.value.__cause__, grpc.RpcError)
    with pytest.raises(UnreachableError, match="the moon"):
        connection.send(payload(2))
    connection.abandon()


def test_an_answer_wakes_its_waiter_without_polling(
    storage: FakeStorage, channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Public failure case 6: ten appends of one row took a second or two each."""
    storage.append = lambda requests, _: (acknowledged(number_in(r)) for r in requests)
    connection = connect(channel)
    naps: list[float | None] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    for waited_on in (connection._changed, connection._ended):

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


def test_a_stalled_call_is_given_up_and_opened_again(
    storage: FakeStorage, channel: grpc.Channel
) -> None:
    def append(requests, context):
        if storage.append_calls == 1:
            next(requests)
            while context.is_active():
                time.sleep(0.01)
            return
        for request in requests:
            yield acknowledged(number_in(request))

    storage.append = append
    connection = connect(channel, stall=0.3)
    assert connection.send(payload(7)).result(timeout=20) == 7
    connection.close()
    assert storage.append_calls == 2


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


def test_closing_twice_and_closing_unused(channel: grpc.Channel) -> None:
    connection = connect(channel)
    connection.close()
    connection.close()
    with pytest.raises(UnreachableError, match="closed"):
        connection.send(payload(1))


def test_the_deadline_counts_from_the_last_success(
    storage: FakeStorage, channel: grpc.Channel
) -> None:
    """A blip, a success, an idle end, a rest, and another blip: nothing has failed for long."""

    def append(requests, context):
        for request in requests:
            if storage.append_calls in (1, 3):
                context.abort(grpc.StatusCode.UNAVAILABLE, "blip")
            yield acknowledged(number_in(request))
            context.abort(grpc.StatusCode.ABORTED, "inactive for 600 seconds")

    storage.append = append
    connection = connect(channel, Backoff(initial=0.01, cap=0.05, deadline=0.5))
    assert connection.send(payload(1)).result(timeout=20) == 1
    time.sleep(0.7)
    assert connection.send(payload(2)).result(timeout=20) == 2
    connection.close()
    assert storage.append_calls == 4


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


def test_the_window_recovers_from_throttling(storage: FakeStorage, channel: grpc.Channel) -> None:
    def append(requests, context):
        for request in requests:
            if storage.append_calls < 4:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "AppendRows throughput")
            yield acknowledged(number_in(request))

    storage.append = append
    one = len(payload(0, 1000))
    connection = connect(channel, window=8 * one)
    connection.send(payload(0, 1000)).result(timeout=20)
    narrow = connection._window
    for _ in range(10):
        connection.send(payload(0, 1000)).result(timeout=20)
    connection.close()
    assert narrow < 8 * one
    assert connection._window == 8 * one
