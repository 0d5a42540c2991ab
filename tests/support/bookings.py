"""A week at the counters of New York's airports: what becomes of bookings of real flights.

Its seed alone decides what happens; the flights are those of the example project.
"""

import contextlib
import datetime as dt
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import psycopg

from flights import source
from support.chain import Chain
from support.kafka import kafka_broker
from support.postgres import postgres_server
from support.replication import Replication, Settings
from support.workload import Workload

NAMES = ("public.passengers", "public.bookings")
CREATE = (
    """CREATE TABLE passengers (id bigint PRIMARY KEY, name text NOT NULL, email text NOT NULL,
    tier text, updated_at timestamptz NOT NULL)""",
    """CREATE TABLE bookings (id bigint PRIMARY KEY, flight_date date NOT NULL, carrier text,
    flight int, origin text, dest text, passenger bigint, seat text, price numeric(8,2),
    status text NOT NULL, updated_at timestamptz NOT NULL)""",
    "ALTER TABLE passengers REPLICA IDENTITY FULL",
    "ALTER TABLE bookings REPLICA IDENTITY FULL",
)
FIRST = ("Ada", "Bo", "Chen", "Dara", "Efe", "Fay", "Gil", "Hana", "Ivo", "Jun", "Kai", "Lena")
LAST = ("Abel", "Brandt", "Costa", "Diaz", "Ek", "Fox", "Gruber", "Haddad", "Ito", "Juhl", "Kaya")
TIERS = (None, "silver", "gold")
DAYS = [dt.date(2013, 1, 1) + dt.timedelta(days=n) for n in range(7)]
BEFORE = 70  # passengers, and about as many bookings, before the first day
Row = dict[str, Any]
# Without their schemas, which would be four times as long, and with decimals that people can read.
FORM: dict[str, Any] = {
    "prefix": "airline",
    "schemas": False,
    "transactions": False,
    "more": {"decimal.handling.mode": "string"},
}


class Bookings:
    """The tables, and what changes in them day by day.

    Attributes:
        changes: Rows that were changed, by table and kind, those before the first day left out.
    """

    def __init__(self, connection: psycopg.Connection[Any], seed: int) -> None:
        self._connection, self._random = connection, Random(seed)
        self._clock = dt.datetime(2012, 12, 31, 20, tzinfo=dt.UTC)
        self._flights = {day: source.flights_of([str(day)]).to_pylist() for day in DAYS}
        self._passengers: dict[int, Row] = {}
        self._bookings: dict[int, Row] = {}
        self._numbers = {"passengers": 1000, "bookings": 50_000}
        self.changes: Counter[str] = Counter()

    def create(self) -> None:
        """Make the tables, with what was there before the first day."""
        for statement in CREATE:
            self._connection.execute(statement.encode())
        for _ in range(BEFORE):
            self._new_passenger()
            self._new_booking(DAYS[0])
        self.changes.clear()

    @property
    def events(self) -> int:
        """How many changes of rows Debezium makes of all that was there and came since."""
        # A row whose key changes is deleted under the old one, and inserted under the new.
        return 2 * BEFORE + self.changes.total() + self.changes["passengers key change"]

    def day(self, day: dt.date) -> None:
        """What happens on a day, in the order of the clock."""
        for _ in self.steps(day):
            pass

    def steps(self, day: dt.date) -> Iterator[None]:
        """The same, one thing after the other."""
        self._clock = dt.datetime.combine(day, dt.time(5), dt.UTC)
        acts: list[Callable[[], None]] = []
        acts += [self._new_passenger] * 12
        acts += [lambda: self._new_booking(day)] * 72
        acts += [self._other_seat] * 28 + [self._other_price] * 14 + [self._cancel] * 10
        acts += [lambda: self._rebook(day)] * 6 + [self._other_email] * 4
        acts += [self._merge, self._new_number]
        self._random.shuffle(acts)
        self._remove_cancelled()
        for act in acts:
            yield
            act()
        yield
        self._fly(day)

    def _now(self) -> dt.datetime:
        self._clock += dt.timedelta(microseconds=self._random.randrange(1, 400 * 10**6))
        return self._clock

    def _insert(self, table: str, row: Row) -> None:
        row["updated_at"] = self._now()
        places = ", ".join(["%s"] * len(row))
        statement = f"INSERT INTO {table} ({', '.join(row)}) VALUES ({places})"
        self._connection.execute(statement.encode(), list(row.values()))
        self.changes[f"{table} insert"] += 1

    def _update(self, table: str, row: Row, kind: str = "update", **changed: Any) -> None:
        changed["updated_at"] = self._now()
        parts = ", ".join(f"{name} = %s" for name in changed)
        statement = f"UPDATE {table} SET {parts} WHERE id = %s"
        self._connection.execute(statement.encode(), [*changed.values(), row["id"]])
        row.update(changed)
        self.changes[f"{table} {kind}"] += 1

    def _delete(self, table: str, row: Row) -> None:
        self._connection.execute(f"DELETE FROM {table} WHERE id = %s".encode(), [row["id"]])
        self.changes[f"{table} delete"] += 1

    def _number(self, table: str) -> int:
        self._numbers[table] += self._random.randint(1, 4)
        return self._numbers[table]

    def _any(self, rows: Sequence[Row]) -> Row:
        return self._random.choice(rows)

    def _open(self) -> list[Row]:
        return [row for row in self._bookings.values() if row["status"] == "booked"]

    def _new_passenger(self) -> None:
        first, last = self._random.choice(FIRST), self._random.choice(LAST)
        number = self._number("passengers")
        email = f"{first}.{last}.{number}@example.com".lower()
        row = {"id": number, "name": f"{first} {last}", "email": email}
        self._passengers[number] = row | {"tier": self._random.choice(TIERS)}
        self._insert("passengers", self._passengers[number])

    def _flight(self, day: dt.date) -> Row:
        """A flight of this day or a later one."""
        left = [each for each in DAYS if each >= day]
        flight = self._any(self._flights[self._random.choice(left)])
        names = ("flight_date", "carrier", "flight", "origin", "dest")
        return {name: flight[name] for name in names}

    def _seat(self) -> str:
        return f"{self._random.randint(1, 32)}{self._random.choice('ABCDEF')}"

    def _price(self) -> Decimal:
        return Decimal(self._random.randint(4_000, 90_000)) / 100

    def _new_booking(self, day: dt.date) -> None:
        number = self._number("bookings")
        passenger = self._any(list(self._passengers.values()))["id"]
        row = {"id": number, **self._flight(day), "passenger": passenger, "seat": self._seat()}
        self._bookings[number] = row | {"price": self._price(), "status": "booked"}
        self._insert("bookings", self._bookings[number])

    def _other_seat(self) -> None:
        self._update("bookings", self._any(self._open()), seat=self._seat())

    def _other_price(self) -> None:
        self._update("bookings", self._any(self._open()), price=self._price())

    def _cancel(self) -> None:
        self._update("bookings", self._any(self._open()), status="cancelled", seat=None)

    def _rebook(self, day: dt.date) -> None:
        self._update("bookings", self._any(self._open()), **self._flight(day), seat=self._seat())

    def _other_email(self) -> None:
        row = self._any(list(self._passengers.values()))
        self._update("passengers", row, email=f"{row['id']}@example.org")

    def _merge(self) -> None:
        """A passenger who was there twice: a transaction of several rows."""
        kept, gone = self._random.sample(list(self._passengers.values()), 2)
        with self._connection.transaction():
            for row in self._bookings.values():
                if row["passenger"] == gone["id"]:
                    self._update("bookings", row, passenger=kept["id"])
            self._delete("passengers", self._passengers.pop(gone["id"]))

    def _new_number(self) -> None:
        """A passenger whose number changes, and with it the key."""
        row = self._any(list(self._passengers.values()))
        old, new = row["id"], self._number("passengers")
        with self._connection.transaction():
            self._update("passengers", row, "key change", id=new)
            self._passengers[new] = self._passengers.pop(old)
            for booking in self._bookings.values():
                if booking["passenger"] == old:
                    self._update("bookings", booking, passenger=new)

    def _remove_cancelled(self) -> None:
        """Those of the days before, in one transaction."""
        gone = [row for row in self._bookings.values() if row["status"] == "cancelled"]
        with self._connection.transaction():
            for row in gone:
                self._delete("bookings", self._bookings.pop(row["id"]))

    def _fly(self, day: dt.date) -> None:
        for row in self._open():
            if row["flight_date"] == day:
                self._update("bookings", row, status="flown")


@contextlib.contextmanager
def booked(folder: Path, seed: int) -> Iterator[tuple[Bookings, Chain]]:
    """Bookings in a PostgreSQL of their own, from which Debezium takes them to Kafka.

    Args:
        folder: For what Debezium and Kafka keep.
        seed: Of the bookings.
    """
    with (
        postgres_server() as postgres,
        kafka_broker(folder / "kafka") as kafka,
        postgres.connect() as connection,
    ):
        bookings = Bookings(connection, seed)
        bookings.create()
        place = str(folder / "debezium")
        replication = Replication(Settings(postgres.port, kafka.address, place, NAMES, **FORM))
        try:
            replication.start()
            running = Chain(postgres, kafka, replication, Workload(seed))
            running.wait()
            yield bookings, running
        finally:
            replication.stop()
