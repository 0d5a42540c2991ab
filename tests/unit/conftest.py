from collections.abc import Iterator

import grpc
import pytest

from support.fake_storage import FakeStorage


@pytest.fixture
def storage() -> Iterator[FakeStorage]:
    server = FakeStorage()
    yield server
    server.stop()


@pytest.fixture
def channel(storage: FakeStorage) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(storage.address) as channel:
        yield channel
