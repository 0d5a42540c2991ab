"""Measures calls against each other in one run, prints what was found, and writes RESULTS.md."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")
REPEATS = 5
PACKAGES = (
    "pyarrow",
    "grpcio",
    "protobuf",
    "numpy",
    "polars",
    "pandas",
    "dagster",
    "dagster-gcp-pandas",
    "dlt",
    "google-cloud-bigquery",
    "google-cloud-bigquery-storage",
    "local-bigquery",
)


@dataclass(frozen=True)
class Call:
    """One way to do a thing, and how many rows and bytes it moves.

    What `prepare` gives is handed to `run`; it is not measured.
    """

    run: Callable[..., object]
    rows: int
    bytes: int = 0
    prepare: Callable[[], Sequence[object]] = tuple


@dataclass(frozen=True)
class Figure:
    """Seconds of each repetition, by the clock and of this process' CPU time."""

    call: Call
    wall: list[float]
    cpu: list[float]

    def rate(self, seconds: list[float]) -> float:
        return self.call.rows / statistics.median(seconds)

    @property
    def rows(self) -> float:
        """Rows a second, of the median repetition."""
        return self.rate(self.wall)

    @property
    def rows_cpu(self) -> float:
        """Rows a CPU second, of the median repetition."""
        return self.rate(self.cpu)


@dataclass
class Report:
    """What a run has found."""

    lines: list[str] = field(default_factory=list)

    def section(self, title: str) -> None:
        self._say(f"\n## {title}")

    def compare(self, calls: Mapping[str, Call], repeats: int = REPEATS) -> dict[str, Figure]:
        """Run each call once to warm up, then all of them in turn, `repeats` times."""
        figures = {name: Figure(call, [], []) for name, call in calls.items()}
        for repeat in range(-1, repeats):
            for figure in figures.values():
                prepared = figure.call.prepare()
                wall, cpu = time.perf_counter(), time.process_time()
                figure.call.run(*prepared)
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                if repeat >= 0:
                    figure.wall.append(wall)
                    figure.cpu.append(cpu)
        self._say("")
        self._say("| | rows/s: median (best) | rows per CPU s: median (best) | MB/s |")
        self._say("|---|---:|---:|---:|")
        for name, figure in figures.items():
            rows, size = figure.call.rows, figure.call.bytes
            speed = f"{size / 1e6 / statistics.median(figure.wall):,.0f}" if size else ""
            self._say(
                f"| {name} | {figure.rows:,.0f} ({rows / min(figure.wall):,.0f}) "
                f"| {figure.rows_cpu:,.0f} ({rows / min(figure.cpu):,.0f}) | {speed} |"
            )
        self._say("")
        return figures

    def result(self, text: str, value: float, unit: str, target: float | None = None) -> None:
        """State a ratio, or another figure, and whether it is what was aimed at.

        Args:
            text: What it is.
            value: The figure.
            unit: What follows the figure.
            target: At least this, or, when it is negative, at most its absolute value.
        """
        verdict = ""
        if target is not None:
            met = value >= target if target >= 0 else value <= -target
            bound = "at least" if target >= 0 else "at most"
            verdict = f" (aim: {bound} {abs(target):,g}{unit}: {'met' if met else '**missed**'})"
        shown = f"{value:,.2f}" if abs(value) < 10 else f"{value:,.0f}"
        self._say(f"- {text}: **{shown}{unit}**{verdict}")

    def write(self) -> None:
        """Write RESULTS.md."""
        RESULTS.write_text(f"{_head()}\n".lstrip() + "\n".join(self.lines) + "\n")

    def _say(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)


def _head() -> str:
    versions = "\n".join(f"| {name} | {importlib.metadata.version(name)} |" for name in PACKAGES)
    here = RESULTS.parent
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"""# Results

Written by `make bench`. Each section was measured in one run: every way once to warm up, then all
in turn, {REPEATS} times where it is quick and 3 where it is not. Ratios are of the medians. The
server is another process, on loopback; where it only acknowledges, or only serves prepared bytes,
the figures are those of the client. CPU seconds are of the client's process. There is no network
and no TLS, so these are no figures of the service.

| | |
|---|---|
| processor | {_processor()}, {os.cpu_count()} cores |
| memory | {memory:.0f} GiB |
| system | {platform.system()} {platform.release()}, Python {platform.python_version()} |
| date, commit | {dt.date.today().isoformat()}, {commit.stdout.strip() or "unknown"} |
{versions}
"""


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
