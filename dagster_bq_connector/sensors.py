"""`build_cdc_sensor`: looks at change streams, and launches a run where changes are worth one."""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import dagster as dg

from dagster_bq_connector.assets import PLAN, START, STREAM, CdcStream, is_run_over, stream_of
from dagster_bq_connector.cdc.look import LaunchedRun, Runs, Seen, Tried, look
from dagster_bq_connector.cdc.watermark import StreamState, start_name, utc_now
from dagster_bq_connector.errors import ConfigurationError, ConnectorError
from dagster_bq_connector.resource_arguments import taking

# Dagster gives a tick 60 seconds, and evaluates it anew beside the old one when it takes longer
# (DAGSTER_SENSOR_GRPC_TIMEOUT_SECONDS). Its own polling sensors end 20 seconds before.
BUDGET_SECONDS = 40.0
# A stream takes four calls that may wait for somebody: the ledger, the source's plan and its lag.
CALL_SECONDS = 8.0
STREAM_SECONDS = 4 * CALL_SECONDS
STREAMS_AT_ONCE = 8
# Runs that are looked at of those launched from one position, or for one plan; the newest.
MOST_RUNS = 100
# So far the clocks of Dagster's database and of those who run streams may be apart.
CLOCKS = timedelta(minutes=1)
RUN_KEY = "dagster/run_key"

PHASES: dict[dg.DagsterRunStatus, Literal["queued", "starting", "running"]] = {
    dg.DagsterRunStatus.QUEUED: "queued",
    dg.DagsterRunStatus.NOT_STARTED: "starting",
    dg.DagsterRunStatus.STARTING: "starting",
    dg.DagsterRunStatus.STARTED: "running",
    dg.DagsterRunStatus.CANCELING: "running",
}


def build_cdc_sensor(
    assets: Sequence[dg.AssetsDefinition],
    *,
    name: str = "cdc_sensor",
    minimum_interval_seconds: int = 30,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
) -> dg.SensorDefinition:
    """A sensor that launches runs of change streams.

    A tick reads each stream's ledger entry, asks its source what waits, and launches a run when
    that is worth one: see `min_rows` and `max_delay` of `cdc_assets`. It runs no query and changes
    nothing. It launches one run a stream at most, and none beside one that is under way. After a
    run that failed the next one waits, from half a minute up to an hour.

    The cursor shows people where each stream stands. Where to go on is never read from it: it may
    be wiped, and two daemons may tick at once. A tick fails when a stream is stopped or cannot be
    looked at, no other stream has changes, and there was time for all.

    Args:
        assets: What `cdc_assets` gave, once for each stream.
        name: The sensor's name.
        minimum_interval_seconds: Seconds between ticks.
        default_status: Whether it runs when it was not turned on or off by hand.

    Raises:
        ConfigurationError: One of them is no change stream, or two have one name.
    """
    streams = {stream_of(each).name: (stream_of(each), list(each.keys)) for each in assets}
    if not streams or len(streams) < len(assets):
        raise ConfigurationError(
            "build_cdc_sensor takes what cdc_assets gave: at least one stream, and each name once."
        )
    found = [stream for stream, _ in streams.values()]
    if len({stream.bigquery for stream in found}) > 1:
        raise ConfigurationError(
            "The streams of one sensor have one BigQuery resource: build a sensor for each."
        )

    def evaluate(context: dg.SensorEvaluationContext, **resources: Any) -> dg.SensorResult:
        return _Tick(context, streams, resources).evaluate()

    sources = {stream.source for stream in found}
    described = {"context": dg.SensorEvaluationContext}
    function = taking(evaluate, found[0].bigquery, sources, **described)
    return dg.sensor(
        name=name,
        target=list(assets),
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description=f"Launches runs of the change streams {', '.join(streams)}.",
    )(function)


class _Tick:
    """One tick: several streams at once, each of which mostly waits for answers."""

    def __init__(
        self,
        context: dg.SensorEvaluationContext,
        streams: Mapping[str, tuple[CdcStream, Sequence[dg.AssetKey]]],
        resources: Mapping[str, Any],
    ) -> None:
        self._context, self._streams, self._resources = context, streams, resources
        self._shown, self._next = _read_cursor(context.cursor)
        self._ends = time.monotonic() + BUDGET_SECONDS
        self._instance_lock = threading.Lock()

    def evaluate(self) -> dg.SensorResult:
        order = self._order()
        with ThreadPoolExecutor(STREAMS_AT_ONCE) as pool:
            looks = list(pool.map(self._look, order, [True] + [False] * (len(order) - 1)))
        requests: list[dg.RunRequest] = []
        problems: list[str] = []
        reasons: list[str] = []
        late: list[str] = []
        for name, seen in zip(order, looks, strict=True):
            if seen is None:
                late.append(name)
            elif isinstance(seen, Exception):
                text = str(seen) if isinstance(seen, ConnectorError) else repr(seen)
                problems.append(f"Stream {name!r}: {text}")
                self._context.log.error(problems[-1], exc_info=seen)
            else:
                reasons.append(f"{name}: {seen.reason}")
                self._context.log.info(f"Stream {reasons[-1]}")
                self._shown[name] = _for_people(seen)
                requests += _requests(self._context.instance, *self._streams[name], seen)
        # A tick that fails keeps no cursor: the next one would begin with the same stream again,
        # and those after one that takes all the time would never be looked at.
        if problems and not requests and not late:
            raise dg.Failure("\n".join(problems), allow_retries=False)
        shown = {name: self._shown.get(name) for name in self._streams}
        # The next tick begins with a stream that this one had no time for.
        cursor = json.dumps({"streams": shown, "next": late[0] if late else ""}, indent=2)
        skipped = None if requests else dg.SkipReason("; ".join([*problems, *reasons]))
        return dg.SensorResult(run_requests=requests, skip_reason=skipped, cursor=cursor)

    def _order(self) -> list[str]:
        """All streams, from the one that the last tick had no time for."""
        names = list(self._streams)
        first = names.index(self._next) if self._next in names else 0
        return names[first:] + names[:first]

    def _look(self, name: str, is_first: bool) -> Seen | Exception | None:
        """What a stream is like; None when no time is left to find out."""
        if not is_first and time.monotonic() + STREAM_SECONDS > self._ends:
            return None
        stream, _ = self._streams[name]
        known = self._shown.get(name) or {}
        try:
            connected = stream.connect(self._resources)
            return look(
                stream.watermark(connected, CALL_SECONDS, create=False),
                stream.open_source(self._resources, connected, CALL_SECONDS),
                stream.pace,
                self._runs(name),
                _number(known.get("plans")),
            )
        except Exception as error:  # noqa: BLE001  # of any kind: it leaves the other streams
            return error

    def _runs(self, name: str) -> Runs:
        """What Dagster knows. Its storages may not be asked by several threads at once."""
        instance, lock = self._context.instance, self._instance_lock

        def live() -> list[LaunchedRun]:
            with lock:
                return _live(instance, name)

        def tried(state: StreamState) -> Tried:
            with lock:
                return _tried(instance, name, state)

        def is_over(run: str) -> bool:
            with lock:
                return is_run_over(instance, run)

        return Runs(live, tried, is_over)


def _requests(
    instance: dg.DagsterInstance, stream: CdcStream, keys: Sequence[dg.AssetKey], seen: Seen
) -> list[dg.RunRequest]:
    """The run of a plan. Its key counts the tries: Dagster never launches one key twice."""
    plan = seen.plan
    if plan is None:
        return []
    attempt = _attempt(instance, stream.name, plan.id)
    config = {"plan": plan.id, "start": json.dumps(plan.start), "stop": json.dumps(plan.stop)}
    request = dg.RunRequest(
        run_key=f"{stream.name}:{plan.id}:{attempt}",
        run_config={"ops": {stream.op: {"config": config}}},
        tags={STREAM: stream.name, PLAN: plan.id, START: start_name(plan.start)},
        asset_selection=list(keys),
    )
    return [request]


def _attempt(instance: dg.DagsterInstance, name: str, plan: str) -> int:
    """Which try of a plan the next run is: one more than the newest keys say.

    It is not told by how many runs there are alone, since runs are deleted, nor by any clock.
    """
    filters = dg.RunsFilter(tags={STREAM: name, PLAN: plan})
    runs = instance.get_runs(filters, limit=MOST_RUNS)
    tried = [run.tags.get(RUN_KEY, "").rpartition(":")[2] for run in runs]
    return max(len(runs), *(_number(each) + 1 for each in tried if each), 0)


def _live(instance: dg.DagsterInstance, name: str) -> list[LaunchedRun]:
    filters = dg.RunsFilter(tags={STREAM: name}, statuses=list(PHASES))
    found: list[LaunchedRun] = []
    for record in instance.get_run_records(filters):
        run = record.dagster_run
        started = datetime.fromtimestamp(record.start_time, UTC) if record.start_time else None
        since = started or record.update_timestamp  # it may have been queued for long
        found.append(LaunchedRun(run.run_id, PHASES[run.status], since))
    return found


def _tried(instance: dg.DagsterInstance, name: str, state: StreamState) -> Tried:
    tags = {STREAM: name, START: start_name(state.position)}
    after = state.moved and state.moved - CLOCKS
    filters = dg.RunsFilter(tags=tags, created_after=after)
    records = instance.get_run_records(filters, limit=MOST_RUNS)
    ends = [record.end_time for record in records if record.end_time]
    return Tried(len(records), datetime.fromtimestamp(max(ends), UTC) if ends else None)


def _for_people(seen: Seen) -> dict[str, Any]:
    """What the cursor shows of a stream."""
    state, lag = seen.state, seen.lag
    shown: dict[str, Any] = {
        "said": seen.reason,
        "at": utc_now().isoformat(timespec="seconds"),
        "position": state.position,
        "plans": state.plans,
    }
    if seen.plan:
        shown["launched"] = {"plan": seen.plan.id, "stop": seen.plan.stop}
    if lag:
        oldest = lag.oldest.isoformat(timespec="seconds") if lag.oldest else None
        shown["lag"] = {"messages": lag.changes, "oldest": oldest}
    return shown


def _read_cursor(text: str | None) -> tuple[dict[str, Any], str]:
    """What the last tick showed, and the stream that the next one begins with."""
    try:
        found = json.loads(text or "{}")
        shown = {name: dict(each) for name, each in (found.get("streams") or {}).items() if each}
        return shown, str(found.get("next") or "")
    except (ValueError, TypeError, AttributeError):
        return {}, ""  # it was set by hand, and is only for people


def _number(value: object) -> int:
    """A number of a text that people can edit; 0 when it is none."""
    try:
        return max(0, int(str(value)))
    except ValueError:
        return 0
