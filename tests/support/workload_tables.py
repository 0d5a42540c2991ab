"""The tables of the tests' workload, and random values for each of their columns."""

import datetime as dt
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from random import Random
from typing import Any

from google.cloud.bigquery import SchemaField
from psycopg.types.json import Jsonb

Value = Callable[[Random], Any]
LARGE = 9_000  # characters: PostgreSQL keeps such a text beside its row
STATES = ("new", "paid", "sent", "gone")
LETTERS = "abcdefghijklmnopqrstuvwxyz äöüß Łódź 東京 🛒 '\"\\"
WHOLE_DIGITS = 20
SECONDS = 40_000  # of an interval: what the local BigQuery holds
# The column of BigQuery that holds each type of the source exactly.
COLUMNS = {
    "bigint": "INTEGER",
    "int": "INTEGER",
    "numeric": "BIGNUMERIC",
    "double precision": "FLOAT",
    "boolean": "BOOLEAN",
    "date": "DATE",
    "time": "TIME",
    "timestamp": "DATETIME",
    "timestamptz": "TIMESTAMP",
    "interval": "INTERVAL",
    "jsonb": "JSON",
    "bytea": "BYTES",
}


@dataclass(frozen=True)
class Table:
    """A table of the source.

    Attributes:
        name: With its schema.
        key: Of each column of the primary key its type and values.
        columns: Of each other column, likewise.
        later: Of columns that are added while the workload runs, likewise.
        large: The column with texts that are kept beside the row.
    """

    name: str
    key: dict[str, tuple[str, Value]]
    columns: dict[str, tuple[str, Value]]
    later: dict[str, tuple[str, Value]] = field(default_factory=dict[str, tuple[str, Value]])
    large: str = ""

    def create(self) -> list[str]:
        """The statements that make it."""
        columns = [f"{name} {kind}" for name, (kind, _) in (self.key | self.columns).items()]
        columns.append(f"PRIMARY KEY ({', '.join(self.key)})")
        made = [
            f"CREATE TABLE {self.name} ({', '.join(columns)})",
            f"ALTER TABLE {self.name} REPLICA IDENTITY FULL",
        ]
        if self.large:  # never compressed, so that its size is what it says
            made.append(f"ALTER TABLE {self.name} ALTER COLUMN {self.large} SET STORAGE EXTERNAL")
        return made

    def fields(self) -> list[SchemaField]:
        """The columns of a table for its rows, those that come later among them."""
        kinds = (self.key | self.columns | self.later).items()
        return [field_of(name, kind.removesuffix(" NOT NULL")) for name, (kind, _) in kinds]


def field_of(name: str, kind: str) -> SchemaField:
    """The column of BigQuery for one of the source."""
    if kind.endswith("[]"):
        return SchemaField(name, field_of(name, kind[:-2]).field_type, "REPEATED")
    if kind.startswith("numeric("):
        precision, scale = map(int, kind[8:-1].split(","))
        return SchemaField(name, "NUMERIC", precision=precision, scale=scale)
    return SchemaField(name, COLUMNS.get(kind, "STRING"))


def sometimes(value: Value, share: float = 0.15) -> Value:
    """Null for a share of the rows."""
    return lambda random: None if random.random() < share else value(random)


def integer(bits: int) -> Value:
    """Any of them, and often the ends."""
    least, most = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    def value(random: Random) -> int:
        return random.choice(
            (least, most, 0, random.randint(-999, 999), random.randint(least, most))
        )

    return value


def decimal(digits: int, scale: int) -> Value:
    return lambda random: Decimal(random.randint(1 - 10**digits, 10**digits - 1)).scaleb(-scale)


def unscaled(random: Random) -> Decimal:
    """A decimal with a scale of its own; before the point what the local BigQuery holds."""
    scale = random.randint(0, 12)
    return decimal(scale + random.randint(1, WHOLE_DIGITS), scale)(random)


def double(random: Random) -> float:
    special = (float("nan"), float("inf"), float("-inf"), 0.0, 5e-324, 1.7976931348623157e308)
    return random.choice((*special, random.uniform(-1e6, 1e6), random.gauss(0, 1)))


def text(longest: int) -> Value:
    return lambda random: "".join(random.choices(LETTERS, k=random.randint(0, longest)))


def large_text(random: Random) -> str:
    """Mostly one that is kept beside the row."""
    if random.random() < 0.3:
        return text(20)(random)
    return random.randbytes(LARGE // 2 + random.randint(0, 200)).hex()


def date(random: Random) -> dt.date:
    edges = (dt.date.min, dt.date(1969, 12, 31), dt.date(2024, 2, 29), dt.date.max)
    return random.choice((*edges, dt.date.fromordinal(random.randint(700_000, 760_000))))


def time(random: Random) -> dt.time:
    return random.choice((dt.time.min, dt.time.max, moment(random).time()))


def moment(random: Random) -> dt.datetime:
    start = dt.datetime(1900, 1, 1)
    return start + dt.timedelta(microseconds=random.randrange(300 * 365 * 86_400 * 10**6))


def instant(random: Random) -> dt.datetime:
    """With the offset of some place."""
    zone = dt.timezone(dt.timedelta(minutes=random.choice((0, 0, 60, -300, 345))))
    return moment(random).replace(tzinfo=zone)


def interval(random: Random) -> str:
    months, days = random.randint(0, 400), random.randint(0, 500)
    return f"{months} months {days} days {random.randint(0, SECONDS * 1000)} milliseconds"


def document(random: Random) -> Any:
    plain: list[Any] = [None, True, 12, -3.5, "é", [1, [2]], {"a": {"b": []}}]
    return random.choice((*plain, {"n": random.randint(0, 99), "tags": random.sample(STATES, 2)}))


def json_document(random: Random) -> Jsonb:
    return Jsonb(document(random), dumps=lambda value: json.dumps(value, ensure_ascii=False))


def some(value: Value) -> Value:
    return lambda random: [value(random) for _ in range(random.randint(0, 3))]


def identifier(random: Random) -> uuid.UUID:
    return uuid.UUID(int=random.getrandbits(128))


def address(random: Random) -> str:
    return random.choice(("10.1.2.3", "192.168.0.0/16", "::1", "2001:db8::ff00:42:8329"))


ORDERS = Table(
    "public.orders",
    key={"id": ("bigint", lambda random: random.randint(1, 10**6))},
    columns={
        "quantity": ("int", sometimes(integer(32))),
        "reference": ("bigint", sometimes(integer(64))),
        "amount": ("numeric(12,2)", sometimes(decimal(12, 2))),
        "weight": ("numeric", sometimes(unscaled)),
        "rating": ("double precision", sometimes(double)),
        "title": ("text NOT NULL", text(30)),
        "note": ("text", sometimes(large_text)),
        "gift": ("boolean", sometimes(lambda random: random.random() < 0.5)),
        "due": ("date", sometimes(date)),
        "opens": ("time", sometimes(time)),
        "made": ("timestamp", sometimes(moment)),
        "seen": ("timestamptz", sometimes(instant)),
        "patience": ("interval", sometimes(interval)),
        "trace": ("uuid", sometimes(identifier)),
        "extra": ("jsonb", sometimes(json_document)),
        "seal": ("bytea", sometimes(lambda random: random.randbytes(random.randint(0, 40)))),
        "parts": ("int[]", sometimes(some(integer(32)))),
        "tags": ("text[]", sometimes(some(text(8)))),
        "state": ("state", sometimes(lambda random: random.choice(STATES))),
        "origin": ("inet", sometimes(address)),
    },
    later={
        "discount": ("numeric(6,3)", sometimes(decimal(6, 3))),
        "coupon": ("text", sometimes(text(10))),
        "shipped": ("timestamptz", sometimes(instant)),
    },
    large="note",
)
CUSTOMERS = Table(
    "public.customers",
    key={
        "region": ("text", lambda random: random.choice(("eu", "us", "Köln", "東京"))),
        "code": ("text", lambda random: f"c-{random.randint(1, 10**5)}"),
    },
    columns={
        "name": ("text", sometimes(text(20))),
        "balance": ("numeric(12,2)", sometimes(decimal(12, 2))),
        "biography": ("text", sometimes(large_text)),
        "joined": ("timestamptz", sometimes(instant)),
    },
    later={"nickname": ("text", sometimes(text(10)))},
    large="biography",
)
STOCK = Table(
    "public.stock",
    key={"item": ("uuid", lambda random: uuid.UUID(int=random.randint(1, 10**6)))},
    columns={"quantity": ("int", integer(32)), "place": ("text", sometimes(text(6)))},
)
TABLES = (ORDERS, CUSTOMERS, STOCK)
TYPES = f"CREATE TYPE state AS ENUM ({', '.join(map(repr, STATES))})"
