"""tests/SOAK.md: a section for each long proof, which writes its own and leaves the others."""

import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

REPORT = Path(__file__).parents[1] / "SOAK.md"
HEAD = """# Long proofs

Written by `make soak`. Everything ran against servers on this machine, nothing on the service.
"""


def write_section(title: str, seed: int | None, seconds: float, text: str) -> None:
    """Put a section in the place of the one with its title, or at the end."""
    run = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()
    seeded = f"seed {seed}, " if seed is not None else ""
    when = f"Commit {commit}, {datetime.now(UTC):%Y-%m-%d}, {seeded}{seconds:.0f} s."
    section = f"## {title}\n\n{when}\n\n{text.strip()}\n"
    found = REPORT.read_text() if REPORT.exists() else HEAD
    head, *sections = re.split(r"(?m)^(?=## )", found)
    titles = [each.partition("\n")[0] for each in sections]
    if f"## {title}" in titles:
        sections[titles.index(f"## {title}")] = section
    else:
        sections.append(section)
    REPORT.write_text("\n".join(each.strip() + "\n" for each in (head, *sections)))


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table of Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
