"""A write stream of one attempt against a Storage API that ends its calls."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pyarrow as pa
import pytest

from dagster_bq_connector.progress import Progress
from dagster_bq_connector.retry import Backoff
from dagster_bq_connector.write.connection import Connection, append_rows
from dagster_bq_connector.write.encode import ArrowEncoder
from dagster_bq_connector.write.own_stream import OwnStream
from dagster_bq_connector.write.piece import Piece
from support.fake_storage import FakeStorage, Received, Request, acknowledged

NAME = "projects/p/datasets/d/tables/t/streams/s"


@pytest.mark.local_only("a scripted server stands in for the Storage API")
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_call_that_ends_since_its_first_rows_exist_says_nothing_of_the_others(
    storage: FakeStorage, channel: grpc.Channel, pieces: int
) -> None:
    received = Received()

    def append(requests: Iterator[Request], context: grpc.ServicerContext) -> Any:
        decode = received.call()
        for request in requests:
            ids = decode(request)["id"].to_pylist()
            if ids == [0]:
                context.abort(grpc.StatusCode.ALREADY_EXISTS, "The offset is within the stream.")
            assert request.offset == ids[0]
            received.ids += ids
            yield acknowledged(ids[0])

    def connect(first: Callable[[bytes], bytes], name: str) -> Connection:
        return Connection(append_rows(channel, name), first, backoff=Backoff(deadline=10))

    storage.append = append
    batches = [pa.record_batch({"id": pa.array([n], pa.int64())}) for n in range(pieces + 1)]
    clients: Any = SimpleNamespace(request_limit=None)
    encoder = ArrowEncoder(batches[0].schema, NAME)
    with Progress("Appending", print) as progress:
        stream = OwnStream(NAME, encoder, connect, clients, progress, 10)
        for number, batch in enumerate(batches[:-1]):
            stream.send(Piece(batch, number))
        stream.settle()
        stream.send(Piece(batches[-1], pieces))
        stream.settle()
        stream.close()
    assert stream.rows == pieces + 1
    assert received.ids == list(range(1, pieces + 1))
