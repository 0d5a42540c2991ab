"""Who changes the ledger learns the truth, whatever becomes of the answers."""

import os
import random
import threading
from collections.abc import Callable, Iterator

import pytest

from dagster_bq_connector import BigQueryResource
from dagster_bq_connector.errors import (
    AccessDeniedError,
    ConnectorError,
    DatasetNotFoundError,
    LedgerError,
    QuotaError,
    TableNotFoundError,
    UnreachableError,
)
from dagster_bq_connector.ledger import Ledger
from support.http_proxy import CUT, DROPPED, LOST, PASSED, Call, HttpProxy, Verdict
from support.ledgers import (
    HOMES,
    STREAM,
    at_once,
    created,
    increment,
    ledger_at,
    ledger_through,
    move_on,
    proxy_to,
)

RACERS = 20 if os.environ.get("SOAK") else 8

pytestmark = pytest.mark.local_only("a proxy stands between, which has no certificate of Google's")

UNAVAILABLE = Verdict(status=503, reason="backendError")
UNAVAILABLE_BEFORE = Verdict(arrives=False, status=503, reason="backendError")
RATE_LIMITED = Verdict(
    arrives=False,
    status=403,
    reason="rateLimitExceeded",
    text="Exceeded rate limits: too many table update operations for this table.",
)
TOO_MANY = Verdict(arrives=False, status=429, reason="rateLimitExceeded", text="Slow down.")
STALE = Verdict(status=412, reason="conditionNotMet", text="Precondition Failed")
TAKEN = Verdict(status=409, reason="duplicate", text="Already Exists: Table p:d.t")
FAULTS = {
    "lost": [LOST],
    "lost twice": [LOST, LOST],
    "dropped": [DROPPED],
    "cut": [CUT],
    "dropped, then lost": [DROPPED, LOST],
    "503 after it was taken": [UNAVAILABLE],
    "503 before it was taken": [UNAVAILABLE_BEFORE],
    "500 after it was taken": [Verdict(status=500)],
    "502 after it was taken": [Verdict(status=502)],
    "408 after it was taken": [Verdict(status=408)],
    "412 after it was taken": [STALE],
    "409 after it was taken": [TAKEN],
    "429": [TOO_MANY, TOO_MANY],
    "403 rateLimitExceeded": [RATE_LIMITED],
    "429, then lost": [TOO_MANY, LOST],
    "lost, then 429": [LOST, TOO_MANY],
}


@pytest.fixture(params=HOMES)
def home(request: pytest.FixtureRequest, dataset: str, staging: str) -> str:
    return dataset if request.param == "bigquery" else staging


@pytest.fixture
def proxy(bigquery: BigQueryResource, home: str) -> Iterator[HttpProxy]:
    with proxy_to(bigquery, home) as proxy:
        yield proxy


@pytest.fixture
def direct(bigquery: BigQueryResource, home: str) -> Ledger:
    return ledger_at(bigquery, home)


@pytest.fixture
def ledger(bigquery: BigQueryResource, home: str, proxy: HttpProxy) -> Ledger:
    return ledger_through(proxy, bigquery, home)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_creation_wins_whatever_was_answered(
    ledger: Ledger, direct: Ledger, proxy: HttpProxy, fault: str
) -> None:
    proxy.on_changes(*FAULTS[fault])
    written = ledger.create(STREAM, {"by": "me"})
    assert written.won
    assert written.entry == direct.get(STREAM)
    assert written.entry
    assert (written.entry.version, written.entry.value) == (1, {"by": "me"})


@pytest.mark.parametrize("fault", FAULTS)
def test_a_change_wins_whatever_was_answered(
    ledger: Ledger, direct: Ledger, proxy: HttpProxy, fault: str
) -> None:
    entry = created(direct)
    proxy.on_changes(*FAULTS[fault])
    written = ledger.compare_and_set(entry, {"by": "me"})
    assert written.won
    assert written.entry == direct.get(STREAM)
    assert written.entry
    assert (written.entry.version, written.entry.value) == (2, {"by": "me"})


@pytest.mark.parametrize("fault", FAULTS)
def test_who_lost_the_race_is_told_so_whatever_was_answered(
    ledger: Ledger, direct: Ledger, proxy: HttpProxy, fault: str
) -> None:
    entry = created(direct)
    increment(direct)
    proxy.on_changes(*FAULTS[fault])
    written = ledger.compare_and_set(entry, {"by": "me"})
    assert not written.won
    assert written.entry == direct.get(STREAM)
    proxy.on_changes(*FAULTS[fault])
    again = ledger.create(STREAM, {"by": "me"})
    assert (again.won, again.entry) == (False, direct.get(STREAM))


def test_an_answer_that_does_not_come_is_waited_for_until_the_deadline(
    bigquery: BigQueryResource, home: str, direct: Ledger, proxy: HttpProxy
) -> None:
    entry = created(direct)
    go_on = threading.Event()
    answered: list[bool] = []
    proxy.on_changes(Verdict(then=lambda: answered.append(go_on.wait(60))))
    written = ledger_through(proxy, bigquery, home, deadline=2).compare_and_set(entry, {"n": 1})
    assert (written.won, answered) == (True, [])
    go_on.set()


@pytest.mark.parametrize("later", [1, 3, 31])
def test_a_win_is_known_after_others_have_moved_on(
    ledger: Ledger, direct: Ledger, proxy: HttpProxy, later: int
) -> None:
    entry = created(direct)
    proxy.on_changes(Verdict(status=0, then=lambda: move_on(direct, later)))
    written = ledger.compare_and_set(entry, {"n": 100})
    assert written.won
    assert written.entry == direct.get(STREAM)
    assert written.entry
    assert (written.entry.version, written.entry.value) == (2 + later, {"n": 100 + later})


def test_a_creation_is_known_after_others_have_moved_on(
    ledger: Ledger, direct: Ledger, proxy: HttpProxy
) -> None:
    proxy.on_changes(Verdict(status=503, then=lambda: move_on(direct, 5)))
    written = ledger.create(STREAM, {"n": 100})
    assert written.won
    assert written.entry
    assert (written.entry.version, written.entry.value) == (6, {"n": 105})


def test_a_loss_is_known_after_the_own_try_never_arrived(
    ledger: Ledger, direct: Ledger, proxy: HttpProxy
) -> None:
    entry = created(direct)
    proxy.on_changes(Verdict(arrives=False, status=0, then=lambda: move_on(direct, 3)))
    written = ledger.compare_and_set(entry, {"n": 100})
    assert not written.won
    assert written.entry
    assert (written.entry.version, written.entry.value) == (4, {"n": 3})


@pytest.mark.parametrize("arrives", [True, False])
def test_what_cannot_be_known_is_said(
    ledger: Ledger, direct: Ledger, proxy: HttpProxy, arrives: bool
) -> None:
    """Further back than the history reaches: a win looks like a loss."""
    entry = created(direct)
    proxy.on_changes(Verdict(arrives, status=0, then=lambda: move_on(direct, 33)))
    with pytest.raises(LedgerError, match=r"whether version 2 was written from here cannot be kno"):
        ledger.compare_and_set(entry, {"n": 100})
    # Without a lost answer it is known: what is as old as that was changed by somebody else.
    assert not ledger.compare_and_set(entry, {"n": 100}).won
    assert not ledger.create(STREAM, {"n": 100}).won


@pytest.mark.parametrize("arrives", [True, False])
def test_what_was_deleted_after_a_lost_answer_cannot_be_known(
    ledger: Ledger, direct: Ledger, proxy: HttpProxy, arrives: bool
) -> None:
    entry = created(direct)

    def delete() -> None:
        stands = direct.get(STREAM)
        assert stands
        direct.delete(stands)

    proxy.on_changes(Verdict(arrives, status=0, then=delete))
    with pytest.raises(LedgerError, match="and the entry was deleted by now"):
        ledger.compare_and_set(entry, {"n": 100})


@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize("later", [0, 1, 4])
def test_what_was_made_anew_after_a_lost_answer_cannot_be_known(
    ledger: Ledger, direct: Ledger, proxy: HttpProxy, arrives: bool, later: int
) -> None:
    created(direct)
    move_on(direct, 1)
    entry = direct.get(STREAM)
    assert entry

    def make_anew() -> None:
        stands = direct.get(STREAM)
        assert stands
        direct.delete(stands)
        created(direct)
        move_on(direct, later)

    proxy.on_changes(Verdict(arrives, status=0, then=make_anew))
    with pytest.raises(LedgerError, match=f"and the entry is at version {1 + later} by now"):
        ledger.compare_and_set(entry, {"n": 100})
    assert not ledger.compare_and_set(entry, {"n": 100}).won


def test_a_creation_that_never_arrived_loses_to_another(
    ledger: Ledger, direct: Ledger, proxy: HttpProxy
) -> None:
    proxy.on_changes(Verdict(arrives=False, status=0, then=lambda: created(direct)))
    written = ledger.create(STREAM, {"n": 100})
    assert (written.won, written.entry) == (False, direct.get(STREAM))


@pytest.mark.parametrize("verdict", [LOST, CUT, UNAVAILABLE, TOO_MANY], ids=str)
def test_a_read_is_repeated(
    ledger: Ledger, direct: Ledger, proxy: HttpProxy, verdict: Verdict
) -> None:
    entry = created(direct)
    left = iter([verdict, verdict])
    proxy.decide = lambda _call: next(left, PASSED)
    assert ledger.get(STREAM) == entry
    assert len(proxy.calls) == 3


@pytest.mark.parametrize("verdict", [LOST, CUT, DROPPED, UNAVAILABLE, TOO_MANY], ids=str)
def test_a_deletion_is_repeated(
    ledger: Ledger, direct: Ledger, proxy: HttpProxy, verdict: Verdict
) -> None:
    entry = created(direct)
    proxy.on_changes(verdict)
    ledger.delete(entry)
    assert direct.get(STREAM) is None


@pytest.mark.parametrize(
    ("verdict", "kind"),
    [
        (RATE_LIMITED, QuotaError),
        (TOO_MANY, QuotaError),
        (UNAVAILABLE_BEFORE, UnreachableError),
        (DROPPED, UnreachableError),
    ],
    ids=str,
)
def test_nothing_is_tried_beyond_the_deadline(
    bigquery: BigQueryResource,
    home: str,
    direct: Ledger,
    proxy: HttpProxy,
    verdict: Verdict,
    kind: type[ConnectorError],
) -> None:
    entry = created(direct)
    proxy.decide = lambda call: verdict if call.changes else PASSED
    ledger = ledger_through(proxy, bigquery, home, deadline=1)
    actions: list[Callable[[], object]] = [
        lambda: ledger.create(STREAM, {"n": 1}),
        lambda: ledger.compare_and_set(entry, {"n": 1}),
    ]
    for action in actions[1 if verdict.status in (0, 503) else 0 :]:
        with pytest.raises(kind, match="Ledger entry stream 'orders'") as caught:
            action()
        assert ("may have been written" in str(caught.value)) is (kind is UnreachableError)
    assert direct.get(STREAM) == entry


def test_a_change_that_nobody_can_look_at_may_have_been_made(
    bigquery: BigQueryResource, home: str, direct: Ledger, proxy: HttpProxy
) -> None:
    entry = created(direct)
    proxy.decide = lambda call: LOST if call.changes else UNAVAILABLE
    ledger = ledger_through(proxy, bigquery, home, deadline=1)
    with pytest.raises(UnreachableError, match="whose version 2 may have been written from here"):
        ledger.compare_and_set(entry, {"n": 1})
    assert len(proxy.changes) == 1


def test_a_dataset_that_may_not_be_made_is_named_with_what_to_do(
    bigquery: BigQueryResource,
) -> None:
    denied = Verdict(
        arrives=False,
        status=403,
        reason="accessDenied",
        text="Access Denied: User does not have bigquery.datasets.create permission.",
    )
    with proxy_to(bigquery, "_never_made") as proxy:
        proxy.decide = lambda call: (
            denied if call.path.endswith("/datasets?prettyPrint=false") else PASSED
        )
        with pytest.raises(DatasetNotFoundError, match=r"bq mk .*bigquery\.datasets\.create"):
            ledger_through(proxy, bigquery, "_never_made").create(STREAM, {"n": 0})


def test_what_is_denied_is_not_tried_again(
    ledger: Ledger, direct: Ledger, proxy: HttpProxy
) -> None:
    entry = created(direct)
    denied = Verdict(arrives=False, status=403, reason="accessDenied", text="Access Denied: x")
    hidden = Verdict(
        arrives=False,
        status=403,
        reason="accessDenied",
        text="Access Denied: Table p:d.t: Permission denied on it (or it may not exist).",
    )
    for verdict, kind in ((denied, AccessDeniedError), (hidden, TableNotFoundError)):
        actions: list[Callable[[], object]] = [
            lambda: ledger.get(STREAM),
            lambda: ledger.create(STREAM, {"n": 1}),
            lambda: ledger.compare_and_set(entry, {"n": 1}),
            lambda: ledger.delete(entry),
        ]
        for action in actions:
            proxy.decide = lambda _call, verdict=verdict: verdict
            with pytest.raises(kind):
                action()
    assert len(proxy.calls) == 8
    assert direct.get(STREAM) == entry


@pytest.mark.parametrize("seed", [1])
def test_many_race_to_count_while_a_third_of_the_answers_is_lost(
    bigquery: BigQueryResource, home: str, direct: Ledger, proxy: HttpProxy, seed: int
) -> None:
    chance = random.Random(seed)
    verdicts = (LOST, DROPPED, CUT, UNAVAILABLE, UNAVAILABLE_BEFORE, STALE, TOO_MANY)

    def decide(call: Call) -> Verdict:
        if chance.random() >= 1 / 3:
            return PASSED
        found = chance.choice(verdicts)
        return LOST if found is STALE and not call.changes else found

    proxy.decide = decide
    won = at_once(
        lambda number: ledger_through(proxy, bigquery, home).create(STREAM, {"n": 0}).won, RACERS
    )
    assert sum(won) == 1
    at_once(lambda _: increment(ledger_through(proxy, bigquery, home)), RACERS)
    entry = direct.get(STREAM)
    assert entry
    assert (entry.value, entry.version) == ({"n": RACERS}, RACERS + 1)
