"""Long work shows that it moves: a bar where a person looks, log lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from tqdm.auto import tqdm

INTERVAL_SECONDS = 10.0

Log = Callable[[str], None]


class Progress:
    """Counts rows of one piece of work.

    With a `log`, a line goes there every ten seconds and nothing for work that is shorter. Without
    one, a progress bar is drawn when standard error is a terminal, or in a notebook.
    """

    def __init__(self, what: str, log: Log | None = None, total: int | None = None) -> None:
        """Name the work, such as `reading shop.orders`; `total` is its rows when known."""
        self._what, self._log, self._total = what, log, total
        self._started = self._said = time.monotonic()
        self._rows = 0
        self._lock = threading.Lock()
        hidden = log is not None or not (sys.stderr.isatty() or "ipykernel" in sys.modules)
        self._bar = tqdm(
            desc=what,
            total=total,
            unit="row",
            unit_scale=True,
            leave=False,
            disable=hidden,
            delay=1,
        )

    def advance(self, rows: int) -> None:
        """Count `rows` more. Any thread may."""
        with self._lock:
            self._rows += rows
            self._bar.update(rows)
            rate = self._rows / max(time.monotonic() - self._started, 1e-9)
            of = f" of {self._total:,}" if self._total else ""
            self._say(f"{self._rows:,}{of} rows, {rate:,.0f} rows/s")

    def wait(self, state: str) -> None:
        """Tell what is waited for, such as `3 of 31 load jobs done`. Call it often."""
        with self._lock:
            self._bar.set_postfix_str(state)
            self._say(state)

    def _say(self, text: str) -> None:
        now = time.monotonic()
        if self._log is not None and now - self._said >= INTERVAL_SECONDS:
            self._said = now
            self._log(f"{self._what}: {text}")

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
