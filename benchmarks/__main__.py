"""`make bench`: each path against the way a user would otherwise go, as ratios of one run.

Runs all, or those that are named, and writes RESULTS.md when it ran all.
"""

import sys

from benchmarks import append, cdc, io_manager, protobuf, read, ticks, write
from benchmarks.report import Report

PATHS = {
    "append": append,
    "protobuf": protobuf,
    "read": read,
    "cdc": cdc,
    "ticks": ticks,
    "io_manager": io_manager,
    "write": write,
}


def main(names: list[str]) -> None:
    if unknown := set(names) - set(PATHS):
        sys.exit(f"There is no benchmark {unknown.pop()!r}: choose from {', '.join(PATHS)}.")
    report = Report()
    for name in names or PATHS:
        PATHS[name].run(report)
    if not names:
        report.write()


if __name__ == "__main__":
    main(sys.argv[1:])
