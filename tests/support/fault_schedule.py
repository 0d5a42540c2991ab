"""Which call of a write fails, and how: by a seed, so that a schedule can be run again."""

import random
import threading
from collections import Counter

import grpc

# How a call of gRPC is ended by the service, and in which words.
ENDINGS = {
    "UNAVAILABLE": (grpc.StatusCode.UNAVAILABLE, "Connection is draining"),
    "ABORTED, idle": (grpc.StatusCode.ABORTED, "inactive for 600 seconds"),
    "ABORTED, restart": (grpc.StatusCode.ABORTED, "server is restarted"),
    "INTERNAL": (grpc.StatusCode.INTERNAL, "Received RST_STREAM"),
    "RESOURCE_EXHAUSTED": (grpc.StatusCode.RESOURCE_EXHAUSTED, "AppendRows throughput"),
    "DEADLINE_EXCEEDED": (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline exceeded"),
    "PERMISSION_DENIED, new table": (
        grpc.StatusCode.PERMISSION_DENIED,
        "Permission 'TABLES_UPDATE_DATA' denied on resource 'the table' (or it may not exist).",
    ),
}
ANYWHERE = tuple(name for name in ENDINGS if not name.startswith("PERMISSION_DENIED"))
LOST, STALL = "acknowledgement lost", "stall"
STREAM_STATE, SCHEMA_LAG = "INVALID_STREAM_STATE", "SCHEMA_MISMATCH_EXTRA_FIELDS"
THROTTLED, NEW_TABLE = "RESOURCE_EXHAUSTED in the answer", "PERMISSION_DENIED, new table"
GRPC_CALL = (*ANYWHERE, LOST, STALL)
HTTP_CALL = (
    "HTTP answer lost",
    "HTTP request lost",
    "HTTP answer cut",
    "HTTP stall",
    "429",
    "403 rateLimitExceeded",
    "503 before it was taken",
    "503 after it was taken",
)
CONFLICT, STALE = "409 after it was taken, without a location", "412 after it was made"

# What may befall each call.
CALLS: dict[str, tuple[str, ...]] = {
    "AppendRows": (THROTTLED, SCHEMA_LAG, STREAM_STATE, *GRPC_CALL),
    "AppendRows, default stream": (NEW_TABLE, THROTTLED, SCHEMA_LAG, STREAM_STATE, *GRPC_CALL),
    "CreateWriteStream": (NEW_TABLE, *GRPC_CALL),
    "FinalizeWriteStream": GRPC_CALL,
    "BatchCommitWriteStreams": GRPC_CALL,
    "FlushRows": GRPC_CALL,
    "jobs.insert": (CONFLICT, *HTTP_CALL),
    "jobs.get": HTTP_CALL,
    "tables.get": HTTP_CALL,
    "tables.insert": (CONFLICT, *HTTP_CALL),
    "tables.patch": (STALE, *HTTP_CALL),
    "upload": (STALE, *HTTP_CALL),
}
FAULTS = tuple(dict.fromkeys(fault for faults in CALLS.values() for fault in faults))
# Of the calls that a method makes once for many writes, most fail, and each time in another way.
SELDOM = {"tables.insert": 20}
LASTING = (SCHEMA_LAG, NEW_TABLE)  # they go on for a while
LASTS = 3
OUTAGES = ("UNAVAILABLE", "503 before it was taken", "RESOURCE_EXHAUSTED", "429")


class Schedule:
    """The faults of one write.

    Each kind of call has a chance of its own and an order of its own, so that the threads of a
    write do not change each other's.

    Attributes:
        outage: A call that fails each time, until the write gives up.
        kill: The step at which the first attempt is abandoned; None when it is not.
        twin: Whether two attempts run at once.
    """

    def __init__(self, seed: str, number: int) -> None:
        """The schedule with that number, of those of a seed."""
        self._random = {call: random.Random(f"{seed} {number} {call}") for call in CALLS}
        self._next = {call: number // SELDOM.get(call, 1) for call in CALLS}
        self._lasting: dict[str, list[str]] = {call: [] for call in CALLS}
        chance = random.Random(f"{seed} {number}")
        self._rate = chance.choice((0.1, 0.2, 0.3, 0.4))
        self.outage = chance.choice(list(CALLS)) if number % 25 == 24 else None
        self.kill = chance.randrange(1, 24) if chance.random() < 0.25 else None
        self.twin = chance.random() < 0.15

    def fault(self, call: str) -> str | None:
        """What befalls the next call of that kind."""
        if call == self.outage:
            return next(fault for fault in OUTAGES if fault in CALLS[call])
        if self._lasting[call]:
            return self._lasting[call].pop()
        rate = self._rate * 2 if call in SELDOM else self._rate
        if self._random[call].random() >= rate:
            return None
        fault = CALLS[call][self._next[call] % len(CALLS[call])]
        self._next[call] += 1
        if fault in LASTING:
            self._lasting[call] = [fault] * (LASTS - 1)
        return fault


class Fired:
    """Counts what the writer met.

    Attributes:
        calls: Calls, by kind.
        faults: Faults that fired, by name.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()

    def call(self, name: str) -> None:
        with self._lock:
            self.calls[name] += 1

    def fault(self, name: str) -> None:
        with self._lock:
            self.faults[name] += 1
