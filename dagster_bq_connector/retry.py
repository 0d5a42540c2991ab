"""How long to wait before another try, and when to give up."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TypedDict, TypeVar

from google.api_core.retry import Retry
from google.cloud.bigquery import DEFAULT_RETRY

from dagster_bq_connector.errors import Fault, classify

T = TypeVar("T")

JITTER = 0.25
ANSWER_SECONDS = 60.0
PASSING = frozenset({Fault.BROKEN, Fault.THROTTLED})


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double, each moved by up to 25 percent so that clients do not come together.

    Attributes:
        initial: The first pause, in seconds.
        cap: The longest pause, in seconds.
        attempts: How many pauses at most; without end when None.
        deadline: Seconds from the first failure until no further try is made.
    """

    initial: float = 0.1
    cap: float = 30.0
    attempts: int | None = None
    deadline: float = 300.0

    def pauses(self) -> Iterator[float]:
        """Yield the seconds to wait before each further try, until no try is left."""
        end = time.monotonic() + self.deadline
        pause, count = self.initial, 0
        while self.attempts is None or count < self.attempts:
            left = end - time.monotonic()
            if left <= 0:
                return
            yield min(left, pause * random.uniform(1 - JITTER, 1 + JITTER))
            pause, count = min(self.cap, pause * 2), count + 1

    def call(self, function: Callable[[], T], repeat_on: Collection[Fault] = PASSING) -> T:
        """Call until it succeeds, fails for a fault not in `repeat_on`, or no try is left.

        Raises:
            Exception: The last failure, as `function` raised it.
        """
        pauses = self.pauses()
        while True:
            try:
                return function()
            except Exception as error:
                pause = next(pauses, None) if classify(error) in repeat_on else None
                if pause is None:
                    raise
            time.sleep(pause)


class RestOptions(TypedDict):
    """What every call of Google's REST client is given."""

    retry: Retry
    timeout: float


def rest_options(deadline: float) -> RestOptions:
    """Retry what passes for `deadline` seconds; a single answer may take a minute of them."""
    return {
        "retry": DEFAULT_RETRY.with_timeout(deadline),
        "timeout": min(deadline, ANSWER_SECONDS),
    }
