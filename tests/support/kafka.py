"""A Kafka broker of the tests' own (noida-db), and what they put into it."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

START_SECONDS = 30


class KafkaBroker:
    """A broker process. What it holds outlives a restart, and a kill."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        # Without the library's own log: a broker that is stopped would fill it.
        self._settings: dict[str, Any] = {"bootstrap.servers": self.address, "log_level": 0}
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._admin: AdminClient | None = None

    def start(self) -> None:
        program = Path(str(files("noida_db").joinpath("noida-db")))
        program.chmod(0o755)  # the wheel's file has no such bit
        command = [str(program), "start", "--only", "kafka", "--kafka-port", str(self.port)]
        self._process = subprocess.Popen(
            [*command, "--data-dir", str(self._folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        end = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            assert self._process.poll() is None, "the broker ended"
            assert time.monotonic() < end, "the broker does not listen"
            time.sleep(0.02)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def hold(self) -> None:
        """Let it answer nothing, with its connections open."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    @property
    def admin(self) -> AdminClient:
        if self._admin is None:
            self._admin = AdminClient(self._settings)
        return self._admin

    def create(self, topic: str | None = None, partitions: int = 1) -> str:
        """A topic that keeps its messages for ever: by default one that no other test has."""
        topic = topic or f"shop.{uuid.uuid4().hex[:12]}"
        new = NewTopic(topic, partitions, 1, config={"retention.ms": "-1"})
        self.admin.create_topics([new])[topic].result(10)
        return topic

    def delete(self, topic: str) -> None:
        self.admin.delete_topics([topic])[topic].result(10)

    def grow(self, topic: str, partitions: int) -> None:
        self.admin.create_partitions([NewPartitions(topic, partitions)])[topic].result(10)

    def expire(self, topic: str, before: int, partition: int = 0) -> None:
        """Delete what comes before an offset."""
        asked = [TopicPartition(topic, partition, before)]
        for future in self.admin.delete_records(asked).values():
            future.result(10)

    def produce(
        self,
        topic: str,
        values: Sequence[bytes | None],
        partition: int = 0,
        key: bytes | None = b"k",
        **settings: Any,
    ) -> None:
        producer = Producer({**self._settings, **settings})
        for number, value in enumerate(values):
            producer.produce(topic, value, key, partition)
            if number % 10_000 == 9_999:
                producer.flush(30)
        assert producer.flush(30) == 0

    @contextlib.contextmanager
    def transaction(self, topic: str, values: Sequence[bytes], partition: int = 0) -> Iterator[Any]:
        """A transaction with these messages in it, which the test ends."""
        name = uuid.uuid4().hex
        producer = Producer({**self._settings, "transactional.id": name})
        producer.init_transactions(30)
        producer.begin_transaction()
        for value in values:
            producer.produce(topic, value, b"k", partition)
        producer.flush(30)
        yield producer

    def commit(self, topic: str, values: Sequence[bytes], partition: int = 0) -> None:
        with self.transaction(topic, values, partition) as producer:
            producer.commit_transaction(30)

    def abort(self, topic: str, values: Sequence[bytes], partition: int = 0) -> None:
        with self.transaction(topic, values, partition) as producer:
            producer.abort_transaction(30)


@contextlib.contextmanager
def kafka_broker(folder: Path) -> Iterator[KafkaBroker]:
    """A broker that runs until the block ends."""
    broker = KafkaBroker(folder)
    broker.start()
    try:
        yield broker
    finally:
        broker.stop(signal.SIGKILL)


class RefusingLogins:
    """Stands before a broker, and answers every login that it is refused.

    The tests' broker lets everybody in. Of Kafka's protocol this knows one call: 36,
    SaslAuthenticate, whose answer it replaces with error 58.
    """

    REFUSED = struct.pack(">hh", 58, 14) + b"wrong password" + struct.pack(">iq", 0, 0)

    def __init__(self, broker: KafkaBroker) -> None:
        self._broker = broker
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=[client], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with (
            contextlib.suppress(OSError, struct.error),
            client,
            socket.create_connection(("127.0.0.1", self._broker.port)) as server,
        ):
            while request := _frame(client):
                call, _, number = struct.unpack_from(">hhi", request)
                if call == 36:
                    answer = struct.pack(">i", number) + self.REFUSED
                else:
                    server.sendall(struct.pack(">i", len(request)) + request)
                    answer = _frame(server)
                client.sendall(struct.pack(">i", len(answer)) + answer)


def _frame(connection: socket.socket) -> bytes:
    with connection.makefile("rb", buffering=0) as file:
        size = struct.unpack(">i", _exactly(file, 4))[0]
        return _exactly(file, size)


def _exactly(file: Any, size: int) -> bytes:
    content = b""
    while len(content) < size:
        more = file.read(size - len(content))
        if not more:
            raise OSError("closed")
        content += more
    return content
