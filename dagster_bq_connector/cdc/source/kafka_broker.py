"""A Kafka cluster: how it is reached, and what it says of its topics."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_bq_connector.cdc.source.kafka_offsets import Offsets, Partition, Seen, missing
from dagster_bq_connector.errors import (
    AccessDeniedError,
    ConfigurationError,
    ConnectorError,
    RefusedError,
    SourceMissingError,
    UnreachableError,
)
from dagster_bq_connector.retry import Backoff

if TYPE_CHECKING:
    from confluent_kafka import Consumer
    from confluent_kafka.admin import AdminClient

T = TypeVar("T")

# Librdkafka asks for one, but nothing is committed to it: a stream stands where its ledger says.
GROUP = "dagster-bq-connector"
# What no pattern means.
INTERNAL = frozenset({"__consumer_offsets", "__transaction_state"})
# What is fetched ahead of what is read: by default it would be 64 MiB, and 50 MiB an answer.
QUEUE_KIBIBYTES = 16 * 1024
FETCH_BYTES = 8 * 1024 * 1024
# A cluster that has just started may not know all of its topics for a moment.
SETTLE_SECONDS = 3.0
LISTING_SECONDS = 5.0
FIELDS = {
    "bootstrap.servers": "bootstrap_servers",
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.username": "user",
    "sasl.password": "password",
    "ssl.ca.location": "ca_file",
}
READING: dict[str, Any] = {
    "group.id": GROUP,
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "isolation.level": "read_committed",
    "auto.offset.reset": "error",
    "queued.max.messages.kbytes": QUEUE_KIBIBYTES,
    "fetch.max.bytes": FETCH_BYTES,
}
TUNABLE = frozenset({"group.id", "queued.max.messages.kbytes", "fetch.max.bytes"})


@dataclass(frozen=True)
class KafkaOptions:
    """A Kafka cluster and the topics that a stream reads from it.

    Attributes:
        bootstrap_servers: `host:port`, or several with commas.
        topics: Their names, or regular expressions that begin with `^` and are matched with the
            beginning of a name. A topic that comes to match later is read from its beginning.
        security_protocol: `PLAINTEXT`, `SSL`, `SASL_PLAINTEXT` or `SASL_SSL`. By default `SASL_SSL`
            with a user or a mechanism, `SSL` with a file of certificates, else `PLAINTEXT`.
        sasl_mechanism: Such as `PLAIN`, `SCRAM-SHA-512` or `OAUTHBEARER`; by default `PLAIN`.
        user: Who logs in by SASL.
        password: That of the user.
        ca_file: A file with the certificates of the authorities that are trusted.
        settings: Settings of librdkafka for which there is no field.
        deadline: Seconds within which a call is answered, and a read makes progress.
    """

    bootstrap_servers: str
    topics: str | Sequence[str]
    security_protocol: str | None = None
    sasl_mechanism: str | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    deadline: float = 30.0

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigurationError: No topic, a pattern that is none, a setting that has a field or
                that reading rests on, or a user who would not be asked for.
        """
        if not self.names and not self.patterns:
            raise ConfigurationError("No topics: pass names, or a pattern that begins with ^.")
        for key in self.settings:
            if key in FIELDS:
                raise ConfigurationError(f"settings: {key} is set by {FIELDS[key]}.")
            if key in READING and key not in TUNABLE:
                raise ConfigurationError(f"settings: {key} cannot be set: reading rests on it.")
        if self.user and not self.protocol.startswith("SASL_"):
            raise ConfigurationError(
                f"A user, but security_protocol={self.protocol!r} asks for none: write SASL_SSL."
            )

    @property
    def names(self) -> list[str]:
        """The topics that are named."""
        return [topic for topic in self._topics if not topic.startswith("^")]

    @property
    def patterns(self) -> list[re.Pattern[str]]:
        """The patterns of others."""
        try:
            return [re.compile(topic) for topic in self._topics if topic.startswith("^")]
        except re.error as error:
            raise ConfigurationError(f"topics: a pattern cannot be read: {error}.") from error

    @property
    def protocol(self) -> str:
        """The security protocol."""
        if self.security_protocol:
            return self.security_protocol
        if self.user or self.sasl_mechanism:
            return "SASL_SSL"
        return "SSL" if self.ca_file else "PLAINTEXT"

    @property
    def _topics(self) -> list[str]:
        return [self.topics] if isinstance(self.topics, str) else list(self.topics)

    def wants(self, topic: str) -> bool:
        """Whether a topic is one of those that are read."""
        matched = any(pattern.match(topic) for pattern in self.patterns)
        return topic in self.names or (matched and topic not in INTERNAL)

    def client_settings(self) -> dict[str, Any]:
        """What every client of the cluster is given."""
        settings = {
            "bootstrap.servers": self.bootstrap_servers,
            "security.protocol": self.protocol,
            "sasl.mechanism": self.sasl_mechanism or ("PLAIN" if self.user else None),
            "sasl.username": self.user,
            "sasl.password": self.password,
            "ssl.ca.location": self.ca_file,
            "client.id": GROUP,
            "log_level": 2,  # what fails is raised: the library would log each try
            **self.settings,
        }
        return {key: value for key, value in settings.items() if value is not None}


def client_library() -> Any:
    """The package `confluent_kafka`.

    Raises:
        ConfigurationError: It is not installed.
    """
    try:
        import confluent_kafka
        from confluent_kafka import admin  # pyright: ignore[reportUnusedImport]  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            'Kafka needs the package confluent-kafka: pip install "dagster-bq-connector[kafka]".'
        ) from error
    return confluent_kafka


class Broker:
    """Asks a cluster. Nothing is reached before the first question."""

    def __init__(self, options: KafkaOptions) -> None:
        """Use the cluster of `options`.

        Raises:
            ConfigurationError: The package for Kafka is missing.
        """
        self.options, self.library = options, client_library()
        self._admin: AdminClient | None = None
        self._end = 0.0  # when the answers to all questions of a call must be there
        self._said = ""  # the last that a client reported
        self._denial: str | None = None

    def see(self, topics: Iterable[str], more: bool = True) -> Seen:
        """What there is of some topics.

        Args:
            topics: Their names.
            more: See all that the options ask for, and only those of `topics` that they do.

        Raises:
            SourceMissingError: A topic of these, or one that is named, does not exist.
            AccessDeniedError: The cluster refuses the credentials.
            UnreachableError: No answer within the deadline.
        """
        self._end = time.monotonic() + self.options.deadline
        if more:
            topics = [*filter(self.options.wants, topics), *self._wanted()]
        ids, partitions = self._topics(sorted(set(topics)))
        kinds = self.library.admin.OffsetSpec
        first = self._offsets(partitions, kinds.earliest())
        return Seen(ids, first, self._offsets(partitions, kinds.latest()))

    def consumer(self, **settings: Any) -> Consumer:
        """A consumer for this process alone; who asks for it closes it."""
        self._said, self._denial = "", None
        return self._open(self.library.Consumer, {**READING, **settings})

    def check_login(self) -> None:
        """Raise what a client reported of its login.

        Raises:
            AccessDeniedError: The cluster refuses the credentials.
        """
        if self._denial:
            raise AccessDeniedError(
                f"Kafka at {self.options.bootstrap_servers} refuses the login: {self._denial}. "
                "Look at user, password, sasl_mechanism, security_protocol and ca_file."
            )

    def unreachable(self, doing: str) -> UnreachableError:
        """The error for no answer within the deadline."""
        said = f" Last report: {self._said}" if self._said else ""
        return UnreachableError(
            f"Kafka at {self.options.bootstrap_servers}: {doing}: no answer within "
            f"{self.options.deadline:g} s. Look at the address, security_protocol "
            f"({self.options.protocol}) and the network.{said}"
        )

    def explain(self, error: Any, subject: str) -> ConnectorError | None:
        """A `KafkaError` as an error of ours; None when waiting may help."""
        codes, code = self.library.KafkaError, error.code()
        if code in (codes.UNKNOWN_TOPIC_OR_PART, codes._UNKNOWN_TOPIC, codes._UNKNOWN_PARTITION):
            return missing(subject)
        if code in (
            codes.TOPIC_AUTHORIZATION_FAILED,
            codes.CLUSTER_AUTHORIZATION_FAILED,
            codes.SASL_AUTHENTICATION_FAILED,
            codes._AUTHENTICATION,
        ):
            return AccessDeniedError(
                f"Kafka: {subject!r} may not be read with these credentials: {error.str()}. "
                "Allow READ and DESCRIBE of the topic."
            )
        waits = (
            codes._TIMED_OUT,
            codes._TRANSPORT,
            codes._ALL_BROKERS_DOWN,
            codes._RESOLVE,
            codes._SSL,  # a server that stops in a handshake, too
            codes._BAD_MSG,  # an answer that was cut off
            codes._NOENT,  # a partition without a leader for now
            codes._WAIT_CACHE,
            codes.LEADER_NOT_AVAILABLE,
            codes.NOT_LEADER_FOR_PARTITION,
            codes.REQUEST_TIMED_OUT,
            codes.OFFSET_NOT_AVAILABLE,
            codes.UNKNOWN_LEADER_EPOCH,
            codes.FENCED_LEADER_EPOCH,
            codes.BROKER_NOT_AVAILABLE,
            codes.NETWORK_EXCEPTION,
            codes.GROUP_AUTHORIZATION_FAILED,  # no group is used
        )
        if code in waits or error.retriable():
            self._said = self._said or error.str()
            return None
        return RefusedError(f"Kafka: {subject!r}: {error.str()} ({error.name()})")

    def _wanted(self) -> list[str]:
        if not self.options.patterns:
            return self.options.names
        # It waits for an answer whatever is reported meanwhile: in pieces, so that a login that is
        # refused is told at once.
        listed: Any = self._asked(
            "topics", lambda admin, left: admin.list_topics(timeout=min(left, LISTING_SECONDS))
        )
        return [*filter(self.options.wants, listed.topics), *self.options.names]

    def _topics(self, names: Sequence[str]) -> tuple[dict[str, str], list[Partition]]:
        """Ids of topics, and all their partitions."""
        if not names:
            return {}, []
        asked = self.library.TopicCollection(names)
        found = self._all(
            names,
            lambda admin, left: _any(admin.describe_topics(asked, request_timeout=left)),
            str,
        )
        ids = {name: _id(topic.topic_id) for name, topic in found.items()}
        return ids, [(name, one.id) for name, topic in found.items() for one in topic.partitions]

    def _offsets(self, partitions: Sequence[Partition], kind: Any) -> Offsets:
        if not partitions:
            return {}
        committed = self.library.IsolationLevel.READ_COMMITTED
        asked = {self.library.TopicPartition(*partition): kind for partition in partitions}
        found = self._all(
            asked,
            lambda admin, left: _any(
                admin.list_offsets(asked, isolation_level=committed, request_timeout=left)
            ),
            lambda partition: partition.topic,
        )
        return {(key.topic, key.partition): answer.offset for key, answer in found.items()}

    def _all(
        self,
        keys: Iterable[T],
        ask: Callable[[AdminClient, float], Mapping[T, futures.Future[Any]]],
        topic_of: Callable[[T], str],
    ) -> dict[T, Any]:
        """The answers to a question of many parts; parts that may be tried again are.

        All parts are asked again, since they travel in one request.
        """
        subject = topic_of(next(iter(keys)))

        def answers(admin: AdminClient, left: float) -> dict[T, Any]:
            asked = ask(admin, left)
            self._wait(admin, asked.values(), left)
            found: dict[T, Any] = {}
            for key, future in asked.items():
                try:
                    found[key] = future.result(timeout=0)
                except self.library.KafkaException as error:
                    if explained := self.explain(error.args[0], topic_of(key)):
                        raise explained from error
                    raise
            return found

        return self._asked(subject, answers)

    def _wait(self, admin: AdminClient, asked: Iterable[futures.Future[Any]], left: float) -> None:
        """Wait for answers, and for word of a login that failed meanwhile."""
        end = time.monotonic() + left + 1
        waiting = set(asked)
        while waiting:
            waiting = futures.wait(waiting, 0.1).not_done
            admin.poll(0)
            self.check_login()
            if time.monotonic() > end:
                raise self.unreachable("a question about topics")

    def _asked(self, subject: str, ask: Callable[[AdminClient, float], T]) -> T:
        """An answer, whatever failures that pass come before it within the deadline.

        `ask` takes the seconds that are left.
        """
        begun, end = time.monotonic(), self._end
        self._said, self._denial = "", None
        if self._admin is None:
            self._admin = self._open(self.library.admin.AdminClient, {})
        pauses = Backoff(deadline=self.options.deadline, cap=1.0).pauses()
        while True:
            try:
                return ask(self._admin, max(0.1, end - time.monotonic()))
            except SourceMissingError:
                if time.monotonic() > min(end, begun + SETTLE_SECONDS):
                    raise
            except self.library.KafkaException as error:
                self._admin.poll(0)
                self.check_login()
                if explained := self.explain(error.args[0], subject):
                    raise explained from error
                if time.monotonic() + 1.0 > end:
                    raise self.unreachable(f"a question about {subject!r}") from error
            time.sleep(next(pauses, 0.1))

    def _open(self, kind: Callable[..., T], settings: Mapping[str, Any]) -> T:
        given = {**settings, **self.options.client_settings(), "error_cb": self._report}
        try:
            return kind(given, logger=logging.getLogger("dagster_bq_connector.kafka"))
        except (self.library.KafkaException, ValueError, TypeError) as error:
            text = str(error)
            secrets = [self.options.password, *self.options.settings.values()]
            for secret in secrets:
                text = text.replace(str(secret), "…") if secret else text
            raise ConfigurationError(f"Kafka cannot be used as it is set: {text}") from None

    def _report(self, error: Any) -> None:
        """Keep what a client tells beside its answers."""
        codes = self.library.KafkaError
        if not self._said or error.code() != codes._ALL_BROKERS_DOWN:  # which follows its cause
            self._said = error.str()
        if error.code() in (codes._AUTHENTICATION, codes.SASL_AUTHENTICATION_FAILED):
            self._denial = error.str()


def _any(answers: Any) -> Any:
    """The same, for the type checker: the client's futures are annotated in part only."""
    return answers


def _id(given: Any) -> str:
    """A topic's id as text; empty where the broker gives none."""
    text = str(given)
    return "" if not text.strip("A=") else text
