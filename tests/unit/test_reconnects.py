"""What one AppendRows call does when the server ends it, stalls, drains or is away."""

import threading
import time

import grpc
import pytest

from dagster_bq_connector import retry
from dagster_bq_connector.errors import UnreachableError
from dagster_bq_connector.retry import Backoff
from support.connections import connect, number_in, payload
from support.fake_storage import FakeStorage, acknowledged


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


def test_a_server_that_restarts_time_and_again_stops_nothing(
    storage: FakeStorage, channel: grpc.Channel
) -> None:
    """Public failure case 3: ABORTED in the middle, far more often than any count of retries."""

    def append(requests, context):
        for answered, request in enumerate(requests):
            if answered == 1 and storage.append_calls <= 30:
                context.abort(grpc.StatusCode.ABORTED, "Closing: server is restarted.")
            yield acknowledged(number_in(request))

    storage.append = append
    waits: list[str] = []
    connection = connect(channel, tell=waits.append)
    answers = [connection.send(payload(number)) for number in range(60)]
    assert [answer.result(timeout=20) for answer in answers] == list(range(60))
    assert connection.reconnects == 30
    assert waits == []  # something was acknowledged between any two ends
    connection.close()


def test_draining_reconnects_at_once_and_exhaustion_waits_with_a_smaller_window(
    storage: FakeStorage, channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Public failure case 4: both in turn."""
    windows: list[int] = []

    def append(requests, context):
        next(requests)
        windows.append(connection._window)
        if storage.append_calls > 8:
            yield acknowledged(1)
        elif storage.append_calls % 2:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the connection is draining")
        else:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Exceeds 'AppendRows throughput'")

    storage.append = append
    waits: list[str] = []
    spread: list[float] = []
    monkeypatch.setattr(retry.random, "uniform", lambda *ends: spread.append(ends) or 1.0)
    connection = connect(channel, window=1024, tell=waits.append)
    assert connection.send(payload(1)).result(timeout=20) == 1
    connection.close()
    assert connection.reconnects == 8
    assert len(waits) == 4
    assert all("AppendRows throughput" in wait for wait in waits)
    assert set(spread) == {(0.75, 1.25)}
    assert windows == [1024, 1024, 512, 512, 256, 256, 128, 128, 64]


def test_a_server_that_is_away_is_not_asked_without_pause(channel: grpc.Channel) -> None:
    with grpc.insecure_channel("127.0.0.1:1") as nowhere:
        waits: list[str] = []
        connection = connect(nowhere, Backoff(initial=0.2, deadline=1), tell=waits.append)
        with pytest.raises(UnreachableError, match="Last: UNAVAILABLE"):
            connection.send(payload(1)).result(timeout=20)
        connection.abandon()
    assert 2 <= len(waits) <= 6
    assert connection.reconnects <= len(waits) + 2


def test_a_call_without_work_is_ended_and_opened_on_the_next_send(
    storage: FakeStorage, channel: grpc.Channel
) -> None:
    seen: list[int] = []
    ended = threading.Semaphore(0)

    def append(requests, context):
        context.add_callback(ended.release)
        for request in requests:
            seen.append(number_in(request))
            yield acknowledged(seen[-1])

    storage.append = append
    connection = connect(channel, idle=0.1)
    for number in range(5):
        assert connection.send(payload(number)).result(timeout=20) == number
        assert ended.acquire(timeout=20)
    connection.close()
    assert storage.append_calls == 5
    assert seen == list(range(5))
    assert connection.reconnects == 0


def test_a_send_that_meets_the_end_of_a_rest_is_neither_lost_nor_doubled(
    storage: FakeStorage, channel: grpc.Channel
) -> None:
    seen: list[int] = []

    def append(requests, _context):
        for request in requests:
            seen.append(number_in(request))
            yield acknowledged(seen[-1])

    storage.append = append
    connection = connect(channel, idle=0.02)
    for number in range(200):
        assert connection.send(payload(number)).result(timeout=20) == number
        time.sleep(0.02 + number % 10 * 0.001)  # about when the watch looks
    connection.close()
    assert seen == list(range(200))
    assert storage.append_calls > 1
    assert connection.reconnects == 0


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


def test_a_stalled_call_is_given_up_and_opened_again(
    storage: FakeStorage, channel: grpc.Channel
) -> None:
    """Public failure case 60: the server stops answering, and does not close."""

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


def test_a_server_that_always_stalls_is_named_as_the_cause(
    storage: FakeStorage, channel: grpc.Channel
) -> None:
    """Public failure case 60: it stalls for good."""

    def append(_requests, context):
        while context.is_active():
            time.sleep(0.01)
        yield from ()

    storage.append = append
    connection = connect(channel, Backoff(initial=0.01, deadline=0.5), stall=0.2)
    with pytest.raises(UnreachableError, match="nothing was acknowledged for 0 s") as caught:
        connection.send(payload(7)).result(timeout=20)
    assert isinstance(caught.value.__cause__, ConnectionError)
    connection.abandon()


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
