"""The site builds without a warning and without a network, and the pages hold together."""

import inspect
import re
import socket
from html.parser import HTMLParser
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

import dagster_bq_connector
from dagster_bq_connector import (
    BigQueryReader,
    BigQueryResource,
    BigQueryWriter,
    ExactlyOnceWriter,
    FileLoadsWriter,
)
from dagster_bq_connector.schema.types import SCALARS

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ROOT / "example_project" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"\]\(([^()\s]+)\)")
# BigQuery's names in SQL for those of its REST API.
SQL_NAMES = {"BOOLEAN": "BOOL", "INTEGER": "INT64", "FLOAT": "FLOAT64"}


class Html(HTMLParser):
    """What a page names itself, and what a browser would fetch for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.fetched = set[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("id"):
            self.ids.add(str(given["id"]))
        if tag in ("script", "img", "link", "iframe"):
            self.fetched.append(given.get("src") or given.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it. A warning ends the build."""
    folder = tmp_path_factory.mktemp("site")

    def refuse(*_: object) -> None:
        raise AssertionError("building the site reached for the network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder)))
    return folder


def test_a_browser_fetches_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").rglob("*.md")))  # and one for what is not found
    for page in pages:
        for address in Html(page.read_text()).fetched:
            assert "//" not in address, f"{page.name} fetches {address}"


def test_the_reference_has_every_public_name_and_every_field(site: Path) -> None:
    ids = set[str]()
    for page in (site / "reference").glob("*.html"):
        ids |= Html(page.read_text()).ids
    documented = {i.rpartition(".")[2] for i in ids if i.startswith("dagster_bq_connector.")}
    assert set(dagster_bq_connector.__all__) <= documented
    kinds = (BigQueryResource, BigQueryReader, BigQueryWriter, ExactlyOnceWriter, FileLoadsWriter)
    for kind in kinds:
        for name in inspect.get_annotations(kind):
            if name not in ("bigquery", "gcs"):  # in the text of the class
                assert f"dagster_bq_connector.{kind.__name__}.{name}" in ids


def slug(heading: str) -> str:
    """The anchor of a heading, as the site and code hosts make it."""
    plain = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere_on_a_code_host_too(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", found.read_text(), flags=re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.name} links to {target}"


def test_promises_name_tests_that_are_there() -> None:
    text = (ROOT / "docs" / "promises.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    promises = [row for row in rows if not row.startswith("| promise |")]
    for row in promises:
        tests = re.findall(r"`(tests/[^`]+)`", row)
        assert tests, f"shown by nothing: {row}"
        for path in tests:
            assert (ROOT / path).exists(), path
        assert row.endswith(("| not yet run |", "| needs none |")), row


def test_every_type_is_on_its_page() -> None:
    text = (ROOT / "docs" / "types.md").read_text()
    for name in SCALARS:
        assert f"| {SQL_NAMES.get(name, name)} |" in text, name
