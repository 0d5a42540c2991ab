"""`python -m dagster_bq_connector.ledger`: look at the ledger, and mend it by hand."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from dagster_bq_connector.clients import shared_clients
from dagster_bq_connector.credentials import Credentials
from dagster_bq_connector.endpoints import Endpoints
from dagster_bq_connector.errors import ConnectorError, LedgerError
from dagster_bq_connector.ledger.bigquery import DATASET
from dagster_bq_connector.ledger.entry import KINDS, Entry, Key, Ledger, kind_of
from dagster_bq_connector.ledger.home import open_ledger

DEADLINE_SECONDS = 60.0  # somebody waits
SHOWN = 60  # characters of a key in the list
DONE, FAILED, DECLINED = 0, 1, 3  # exit codes; argparse exits with 2
KEY_HELP = "write:TEXT or stream:TEXT, or the name that `list` shows"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code.

    It is 0 when it was done, 1 when it failed, 2 for what cannot be read, 3 when a question was
    answered with no.
    """
    options = _parser().parse_args(arguments)
    try:
        clients = shared_clients(Endpoints.resolve(), Credentials())
        project = options.project or clients.default_project()
        ledger = open_ledger(
            clients, project, options.ledger, options.location, False, DEADLINE_SECONDS
        )
        return options.run(ledger, options)
    except ConnectorError as error:
        print(error, file=sys.stderr)
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m dagster_bq_connector.ledger", description="Look at the ledger, and mend it."
    )
    parser.add_argument("--project", help="GOOGLE_CLOUD_PROJECT or that of the credentials if none")
    parser.add_argument("--location", help="where the dataset is")
    parser.add_argument(
        "--ledger", default=DATASET, metavar="HOME", help="dataset, project.dataset, gs://bucket/…"
    )
    commands = parser.add_subparsers(required=True, metavar="list | show | set | delete")
    listing = commands.add_parser("list", help="one line an entry: version, name, key")
    listing.add_argument("--kind", choices=KINDS)
    listing.set_defaults(run=_list)
    show = commands.add_parser("show", help="an entry with its value")
    show.add_argument("key", help=KEY_HELP)
    show.set_defaults(run=_show)
    change = commands.add_parser("set", help="give an entry another value")
    change.add_argument("key", help=KEY_HELP)
    change.add_argument("value", metavar="JSON", type=_json, help="a JSON object, the whole value")
    change.set_defaults(run=_set)
    delete = commands.add_parser("delete", help="delete an entry")
    delete.add_argument("key", help=KEY_HELP)
    delete.set_defaults(run=_delete)
    for command in (change, delete):
        command.add_argument(
            "--version", type=int, required=True, help="the version that `show` showed"
        )
        command.add_argument("--yes", action="store_true", help="do not ask")
    return parser


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('no JSON object, such as {"position": 7}')
    return value


def _list(ledger: Ledger, options: argparse.Namespace) -> int:
    result = DONE
    for name in ledger.names(options.kind):
        try:
            entry = ledger.find(name)
        except LedgerError as error:  # the others are there nevertheless
            print(error, file=sys.stderr)
            result = FAILED
            continue
        if entry is None:
            continue
        text = entry.key.text
        short = text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
        print(f"{entry.version:>8}  {name:<47}  {short!r}")
    return result


def _show(ledger: Ledger, options: argparse.Namespace) -> int:
    entry = _entry(ledger, options.key)
    print(f"{entry.key} at version {entry.version} in {ledger.place(entry.key.name)}")
    print(_pretty(entry))
    return DONE


def _set(ledger: Ledger, options: argparse.Namespace) -> int:
    entry = _entry(ledger, options.key, options.version)
    print(f"{entry.key} at version {entry.version} in {ledger.place(entry.key.name)} is now")
    print(_pretty(entry))
    print(f"and becomes\n{json.dumps(options.value, indent=2)}")
    if not _agreed(options):
        return DECLINED
    written = ledger.compare_and_set(entry, options.value)
    if not written.won:
        now = f"it is at version {written.entry.version}" if written.entry else "it was deleted"
        raise LedgerError(f"{entry.key} was changed by somebody else meanwhile: {now}.")
    print(f"Done: version {entry.version + 1}.")
    return DONE


def _delete(ledger: Ledger, options: argparse.Namespace) -> int:
    entry = _entry(ledger, options.key, options.version)
    print(f"This deletes {entry.key} at version {entry.version}, {ledger.place(entry.key.name)}:")
    print(_pretty(entry))
    print(
        "A write of that key may then be done a second time."
        if entry.key.kind == "write"
        else "The stream then has no position: it must not run meanwhile."
    )
    if not _agreed(options):
        return DECLINED
    ledger.delete(entry)
    print("Done: deleted.")
    return DONE


def _entry(ledger: Ledger, given: str, version: int | None = None) -> Entry:
    """The entry of a key or a name, at that version when one is given."""
    keys = [Key(k, given.removeprefix(f"{k}:")) for k in KINDS if given.startswith(f"{k}:")]
    if keys:
        entry = ledger.get(keys[0])
    elif kind_of(given):
        entry = ledger.find(given)
    else:
        raise LedgerError(f"{given!r} is no key: write {KEY_HELP}.")
    if entry is None:
        raise LedgerError(f"There is no entry {given}. `list` shows what there is.")
    if version not in (None, entry.version):
        raise LedgerError(
            f"{entry.key} is at version {entry.version}, not {version}: show it, and think again."
        )
    return entry


def _pretty(entry: Entry) -> str:
    return json.dumps(entry.value, indent=2)


def _agreed(options: argparse.Namespace) -> bool:
    if options.yes:
        return True
    try:
        answer = input("Do it? [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() in ("y", "yes"):
        return True
    print("Nothing was changed.")
    return False


if __name__ == "__main__":
    sys.exit(main())
