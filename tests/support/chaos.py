"""What happens to a deployment with a change stream: by a seed, again and again."""

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from random import Random

from support.daemons import kill
from support.lasting_bigquery import LastingBigQuery
from support.whole import Whole

WORKER_SECONDS = 60
TRIES = 5
PAUSED_LEASES = 3  # time for another run to be launched, and to take the stream


class Chaos:
    """Faults of all kinds, each in its turn.

    Attributes:
        counts: How often each happened.
    """

    def __init__(self, whole: Whole, bigquery: LastingBigQuery, seed: int) -> None:
        self._whole, self._bigquery = whole, bigquery
        self._random = Random(seed)
        self._names = self._daemons = 0
        self._left: list[str] = []
        self._paused: list[threading.Timer] = []
        self.counts: Counter[str] = Counter()
        self.faults: dict[str, Callable[[], bool]] = {
            "a run's worker killed": self._kill_worker,
            "the daemon killed": self._kill_daemon,
            "the local BigQuery killed": self._kill_bigquery,
            "Kafka killed": self._kill_kafka,
            "Debezium killed": self._kill_debezium,
            "a code server killed": self._kill_code_server,
            "PostgreSQL killed": self._kill_postgres,
            "a worker paused past its lease": self._pause_worker,
            "two daemons at once": self._another_daemon,
            "cursors wiped": self._wipe_cursors,
            "the code location renamed": self._rename,
        }

    @property
    def kills(self) -> int:
        """How many processes were killed."""
        return sum(count for name, count in self.counts.items() if name.endswith("killed"))

    def strike(self) -> str:
        """Let one thing happen. All happen before one of them happens again."""
        if not self._left:
            self._left = list(self.faults)
            self._random.shuffle(self._left)
        name = self._left.pop()
        time.sleep(self._random.uniform(0, 3))
        if self.faults[name]():
            self.counts[name] += 1
        return name

    def settle(self) -> None:
        """Let what is paused go on, and leave one daemon."""
        for timer in self._paused:
            timer.join()
        while self._whole.deployment.daemons > 1:
            self._whole.deployment.kill_daemon()

    def _at_work(self) -> tuple[int, str] | None:
        """The process of the run that holds the stream, and what tells its hold from others."""
        end, changed = time.monotonic() + WORKER_SECONDS, 0.0
        while time.monotonic() < end:
            holder = self._whole.state.holder
            if holder and (pid := self._whole.deployment.worker_of(holder.run)):
                return pid, holder.nonce
            if time.monotonic() - changed > 2:  # so that there is something to do
                self._whole.running.run(20)
                changed = time.monotonic()
            time.sleep(0.05)
        return None

    def _stopped(self) -> int | None:
        """A process that stands still while it holds the stream."""
        for _ in range(TRIES):
            found = self._at_work()
            if found is None or not kill(found[0], signal.SIGSTOP):
                continue
            holder = self._whole.state.holder
            if holder and holder.nonce == found[1]:
                return found[0]
            kill(found[0], signal.SIGCONT)  # it was done
        return None

    def _kill_worker(self) -> bool:
        """One that holds the stream."""
        pid = self._stopped()
        return pid is not None and kill(pid, signal.SIGKILL)

    def _pause_worker(self) -> bool:
        """For longer than its lease, while it holds the stream: another run may take it."""
        if (pid := self._stopped()) is None:
            return False
        seconds = self._whole.spine.lease_seconds * PAUSED_LEASES
        self._paused.append(threading.Timer(seconds, kill, (pid, signal.SIGCONT)))
        self._paused[-1].start()
        return True

    def _kill_daemon(self) -> bool:
        """Those that follow may be of another mind about retries and launches."""
        deployment = self._whole.deployment
        deployment.kill_daemon()
        retries, late = self._daemons % 2 == 0, self._daemons % 4 < 2  # each beside each
        self._daemons += 1
        deployment.configure(retries, late)
        self.counts["retries on" if retries else "retries off"] += 1
        self.counts["launches late" if late else "launches at once"] += 1
        deployment.start_daemon()
        return True

    def _another_daemon(self) -> bool:
        self._whole.deployment.start_daemon()
        return True

    def _rename(self) -> bool:
        deployment = self._whole.deployment
        self._names += 1
        deployment.locate(f"name-{self._names}")
        while deployment.daemons:
            deployment.kill_daemon()
        deployment.start_daemon()
        return True

    def _kill_code_server(self) -> bool:
        found = self._whole.deployment.code_servers()
        return bool(found) and kill(self._random.choice(found), signal.SIGKILL)

    def _wipe_cursors(self) -> bool:
        return self._whole.deployment.wipe_cursors() > 0

    def _kill_bigquery(self) -> bool:
        self._bigquery.kill()
        return True

    def _kill_kafka(self) -> bool:
        self._whole.running.kill_kafka()
        return True

    def _kill_debezium(self) -> bool:
        self._whole.running.replication.restart(signal.SIGKILL)
        return True

    def _kill_postgres(self) -> bool:
        self._whole.running.postgres.restart(signal.SIGKILL)
        return True
