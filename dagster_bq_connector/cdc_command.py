"""`python -m dagster_bq_connector.cdc`: look at change streams, and mend them by hand."""

import argparse
import importlib
import importlib.util
import json
import sys
import tomllib
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg

from dagster_bq_connector.assets import STREAM, CdcStream
from dagster_bq_connector.cdc.apply.redrive import redrive
from dagster_bq_connector.cdc.event import name_of
from dagster_bq_connector.cdc.source.source import Lag, Position, Source
from dagster_bq_connector.cdc.watermark import StreamState, Watermark, acknowledged, moved_to
from dagster_bq_connector.errors import ConfigurationError, ConnectorError
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.resources import Connected

DEADLINE_SECONDS = 60.0  # somebody waits
DONE, FAILED, DECLINED = 0, 1, 3  # exit codes; argparse exits with 2
SHOWN_MESSAGES = 20


@dataclass(frozen=True)
class Opened:
    """A stream of the definitions, with what it is reached by."""

    stream: CdcStream
    connected: Connected
    source: Source
    watermark: Watermark

    def state(self) -> StreamState:
        """What the entry says; that of a stream that has not begun when there is none."""
        return self.watermark.read() or StreamState()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code.

    It is 0 when it was done, 1 when it failed, 2 for what cannot be read, 3 when a question was
    answered with no.
    """
    options = _parser().parse_args(arguments)
    try:
        definitions = _load(options)
        with _opened(definitions, options) as streams:
            return options.run(streams, options)
    except ConnectorError as error:
        print(error, file=sys.stderr)
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m dagster_bq_connector.cdc", description="Look at change streams, and mend them."
    )
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "-m",
        "--module",
        help="the module with the definitions; by default that of the dg project in this folder",
    )
    place.add_argument("-f", "--file", help="the Python file with the definitions")
    names = "list | show | reset | skip | acknowledge | redrive"
    commands = parser.add_subparsers(required=True, metavar=names)
    commands.add_parser(
        "list", help="one line a stream: what waits, and how it stands"
    ).set_defaults(run=_list)
    _command(commands, "show", _show, "all that is known of a stream, as JSON")
    reset = _command(commands, "reset", _reset, "give a stream another position")
    to = reset.add_mutually_exclusive_group(required=True)
    to.add_argument("--beginning", action="store_true", help="read all that the source has again")
    to.add_argument("--head", action="store_true", help="pass over all that the source has now")
    to.add_argument("--position", type=_position, metavar="JSON", help="as `show` shows one")
    skip = _command(commands, "skip", _skip, "pass over the next messages, which are shown")
    skip.add_argument("--messages", type=int, default=1, metavar="N", help="how many; 1 if not set")
    _command(commands, "acknowledge", _acknowledge, "let a stream that was stopped go on")
    again = _command(commands, "redrive", _redrive, "apply the dead letters of a stream again")
    again.add_argument("--drop", action="store_true", help="delete those that fail again")
    for name in ("reset", "skip", "acknowledge", "redrive"):
        commands.choices[name].add_argument("--yes", action="store_true", help="do not ask")
    return parser


def _command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text)
    command.add_argument("stream", help="the stream's name")
    command.set_defaults(run=run)
    return command


def _position(text: str) -> Position:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("no JSON object: a position is one, as `show` shows it")
    return value


def _load(options: argparse.Namespace) -> dg.Definitions:
    """The definitions that the options, or the project in this folder, name.

    Raises:
        ConfigurationError: There are none.
    """
    sys.path.insert(0, str(Path.cwd()))
    if options.file:
        spec = importlib.util.spec_from_file_location("definitions", options.file)
        if spec is None or spec.loader is None or not Path(options.file).is_file():
            raise ConfigurationError(f"{options.file} is no Python file.")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        name = options.module or _project_module()
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ConfigurationError(f"Module {name} cannot be imported: {error}.") from error
    for found in vars(module).values():
        if isinstance(found, dg.Definitions):
            return found
        if type(found).__name__ == "LazyDefinitions":  # what @dg.definitions makes: no public name
            return found()
    raise ConfigurationError(f"{module.__name__} has no dg.Definitions, and no @dg.definitions.")


def _project_module() -> str:
    file = Path("pyproject.toml")
    content = tomllib.loads(file.read_text()) if file.is_file() else {}
    project = content.get("tool", {}).get("dg", {}).get("project", {})
    root = project.get("root_module")
    if root is None:
        raise ConfigurationError("No dg project is in this folder: pass -m MODULE or -f FILE.")
    sys.path.insert(0, str(Path("src").resolve()))
    return project.get("code_location_target_module") or f"{root}.definitions"


@contextmanager
def _opened(definitions: dg.Definitions, options: argparse.Namespace) -> Generator[list[Opened]]:
    """The streams of the definitions, or the one that is named. Who only looks makes no ledger."""
    name: str | None = getattr(options, "stream", None)
    creates = options.run not in (_list, _show)
    found: dict[str, CdcStream] = {}
    for spec in definitions.resolve_all_asset_specs():
        if isinstance(stream := spec.metadata.get(STREAM), CdcStream):
            found[stream.name] = stream
    if name is not None and name not in found:
        known = ", ".join(map(repr, sorted(found))) or "none"
        raise ConfigurationError(f"No stream {name!r}; the definitions have {known}.")
    chosen = list(found.values()) if name is None else [found[name]]
    with ExitStack() as stack:
        resources: dict[str, Any] = {}
        for key in {key for stream in chosen for key in (stream.bigquery, stream.source)}:
            resources[key] = stack.enter_context(_resource(definitions.resources or {}, key))
        yield [_open(stream, resources, creates) for stream in chosen]


def _resource(resources: Mapping[str, Any], key: str) -> Any:
    given = resources.get(key)
    if not isinstance(given, dg.ConfigurableResource):
        raise ConfigurationError(f"The definitions have no resource {key!r} of the kind it takes.")
    return given.process_config_and_initialize_cm()


def _open(stream: CdcStream, resources: Mapping[str, Any], creates: bool) -> Opened:
    connected = stream.connect(resources)
    source = stream.open_source(resources, connected, DEADLINE_SECONDS)
    return Opened(stream, connected, source, stream.watermark(connected, DEADLINE_SECONDS, creates))


def _list(streams: Sequence[Opened], options: argparse.Namespace) -> int:
    result = DONE
    for opened in sorted(streams, key=lambda opened: opened.stream.name):
        name = opened.stream.name
        try:
            state = opened.state()
            lag = opened.source.lag(state.position)
        except ConnectorError as error:  # the others are shown nevertheless
            print(f"{name}: {error}", file=sys.stderr)
            result = FAILED
            continue
        print(f"{name}: {state.plans} plans committed, {_waiting(lag)}{_standing(state)}")
    return result


def _waiting(lag: Lag) -> str:
    since = f" since {lag.oldest:%Y-%m-%d %H:%M:%S} UTC" if lag.oldest else ""
    return f"{lag.changes:,} messages wait{since}"


def _standing(state: StreamState) -> str:
    """What is to be known of a stream, beside what waits."""
    said = ""
    if state.stopped:
        said += f"; STOPPED: {state.stopped}"
    if state.holder:
        said += f"; run {state.holder.run} was heard of at {state.holder.beat:%H:%M:%S} UTC"
    if (failure := state.failure) and not state.stopped:
        said += f"; the last {failure.count} run(s) failed: {failure.reason}"
    return said


def _show(streams: Sequence[Opened], options: argparse.Namespace) -> int:
    [opened] = streams
    state = opened.state()
    lag = opened.source.lag(state.position)
    oldest = lag.oldest.isoformat() if lag.oldest else None
    shown = {
        "stream": opened.stream.name,
        "entry": opened.watermark.place,
        "tables": {name: str(table.table) for name, table in opened.stream.tables.items()},
        "lag": {"messages": lag.changes, "oldest": oldest},
    }
    # The entry's own tables are digests.
    shown |= {name: value for name, value in state.to_json().items() if name != "tables"}
    print(json.dumps(shown, indent=2))
    return DONE


def _reset(streams: Sequence[Opened], options: argparse.Namespace) -> int:
    [opened] = streams
    before = opened.state()
    to: Position | None = options.position
    if options.head:
        to = opened.source.head()
    print(f"Stream {opened.stream.name!r} is to stand at {json.dumps(to)}.")
    if options.head or options.position:
        print("Changes that are passed over are in no table.")
    return _move(opened, options, before, to)


def _skip(streams: Sequence[Opened], options: argparse.Namespace) -> int:
    [opened] = streams
    before = opened.state()
    start = before.position
    stop = opened.source.plan(start, max(1, options.messages))
    if stop is None:
        print(f"Nothing waits in stream {opened.stream.name!r}.")
        return DONE
    count = 0
    for batch in opened.source.read(start, stop):
        for index in range(batch.num_rows):
            count += 1
            if count <= SHOWN_MESSAGES:
                key, value = (
                    batch.column("key")[index].as_py(),
                    batch.column("value")[index].as_py(),
                )
                print(f"{name_of(batch, index)}: key {_short(key)}, value {_short(value)}")
    if failure := opened.state().failure:
        first = "\n".join(failure.reason.splitlines()[:2])
        print(f"The last run failed, maybe for another message: {first}")
    print(f"{count} message(s) are to be passed over: they are in no table then.")
    return _move(opened, options, before, stop)


def _short(text: bytes | None) -> str:
    if text is None:
        return "none"
    shown = text.decode(errors="replace")
    return shown if len(shown) <= 200 else f"{shown[:199]}…"


def _move(
    opened: Opened, options: argparse.Namespace, before: StreamState, to: Position | None
) -> int:
    """Move a stream by hand, from what was shown. A run that is at work finds out, and ends."""
    if not _agreed(options):
        return DECLINED

    def edit(state: StreamState) -> StreamState:
        if (state.position, state.plan) != (before.position, before.plan):
            raise ConfigurationError(
                f"Stream {opened.stream.name!r} has moved on meanwhile: nothing was changed. Turn "
                "its sensor off, and try again."
            )
        return moved_to(state, to, opened.watermark.now())

    opened.watermark.change(edit)
    print("Done.")
    return DONE


def _acknowledge(streams: Sequence[Opened], options: argparse.Namespace) -> int:
    [opened] = streams
    if (reason := opened.state().stopped) is None:
        print(f"Stream {opened.stream.name!r} is not stopped.")
        return DONE
    print(f"Stream {opened.stream.name!r} is stopped: {reason}")
    if not _agreed(options):
        return DECLINED
    profile = opened.stream.ordering

    def edit(state: StreamState) -> StreamState:
        return acknowledged(state, profile.acknowledge(state.ordering))

    opened.watermark.change(edit)
    print("Done: it goes on with its next run.")
    return DONE


def _agreed(options: argparse.Namespace) -> bool:
    if options.yes:
        return True
    try:
        return input("Go on? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _redrive(streams: Sequence[Opened], options: argparse.Namespace) -> int:
    [opened] = streams
    name = opened.stream.name
    upsert = opened.stream.upsert(opened.connected, f"redrive {uuid.uuid4().hex[:8]}")
    answers: list[bool] = []

    def may_drop(count: int, events: Sequence[str]) -> bool:
        if not options.drop:
            return False
        _print_events(events)
        print(f"{count} dead letter(s) are to be deleted: what they change is in no table then.")
        answers.append(_agreed(options))
        return answers[-1]

    with Progress(f"Dead letters of {name}") as progress:
        done = redrive(upsert, progress, may_drop=may_drop)
    left = done.failed - done.dropped
    dropped = f"{done.dropped} failed again and are deleted; " if done.dropped else ""
    print(f"{done.applied} dead letter(s) were applied; {dropped}{left} failed again and stay.")
    if left and not options.drop:
        _print_events(done.failed_events)
    return DECLINED if answers == [False] else FAILED if left else DONE


def _print_events(events: Sequence[str]) -> None:
    for event in events:
        print(f"  {event}")
