"""The demo as a newcomer meets it: Dagster's page in a real browser, and Ctrl-C at the end."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import (
    ElementClickInterceptedException,
    ElementNotInteractableException,
    NoSuchElementException,
    StaleElementReferenceException,
    TimeoutException,
)
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from flights import source
from flights.defs.resources import RECORDED
from flights.demo import WEEK
from flights.demo_bookings import DAYS

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(sys.platform != "linux", reason="the browser is Debian's"),
]

DAY = "2013-02-14"  # the demo loads days of January
LOADED = WEEK[:1]  # each of a week would show no more, and take its time
PROGRAM = "import sys, flights.demo as demo; demo.WEEK = demo.WEEK[:1]; sys.exit(demo.main())"
START_SECONDS = 600
PAGE_SECONDS = 300
STOP_SECONDS = 120
MARK = "FLIGHTS_BROWSER_TEST"

CHROMIUM = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1500,1300",
]


def family(mark: str) -> dict[int, str]:
    """The command lines of every process that inherited the mark, whoever its parent is now."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        # A process may end while it is looked at; one that has ended has no environment left.
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(folder.name)] = command.decode(errors="replace")[:200]
    return found


@dataclass
class Demo:
    process: subprocess.Popen[bytes]
    url: str
    log: Path
    mark: str

    def tail(self) -> str:
        dagster = self.log.parent / "dagster" / "log"
        logs = [log.read_text(errors="replace") for log in (self.log, dagster) if log.exists()]
        return "\n".join(log.replace("\r", "\n")[-4000:] for log in logs)

    def wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the demo ended early:\n{self.tail()}"
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/server_info"):
                return
            time.sleep(0.5)
        pytest.fail(f"no page at {self.url} after {START_SECONDS} s:\n{self.tail()}")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """What `make demo` starts, with one day of flights."""
    folder, mark = tmp_path_factory.mktemp("demo"), uuid.uuid4().hex
    (folder / "notes.txt").write_text("of somebody else")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", PROGRAM, "--port", str(port), "--home", str(folder)]
    log = folder / "demo.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {MARK: mark, "GRPC_VERBOSITY": "NONE"},
            start_new_session=True,  # like a terminal: a group that Ctrl-C is sent to
        )
    try:
        demo = Demo(process, f"http://127.0.0.1:{port}", log, mark)
        demo.wait_until_it_answers()
        yield demo
    finally:
        for pid in family(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


class Page:
    """The browser, used by what one sees."""

    def __init__(self, driver: webdriver.Chrome, folder: Path) -> None:
        self._driver, self._folder = driver, folder

    @property
    def text(self) -> str:
        return self._driver.find_element(By.TAG_NAME, "body").text

    def open(self, url: str) -> None:
        self._driver.get(url)

    def screenshot(self, name: str) -> Path:
        path = self._folder / f"{name}.png"
        self._driver.save_screenshot(path)
        return path

    def click(self, xpath: str) -> None:
        """Click on what may still be drawn anew, or covered."""

        def click(driver: webdriver.Chrome) -> bool:
            driver.find_element(By.XPATH, xpath).click()
            return True

        self._until(click, f"nothing to click at {xpath}")

    def write(self, xpath: str, text: str) -> None:
        def write(driver: webdriver.Chrome) -> bool:
            field = driver.find_element(By.XPATH, xpath)
            field.click()
            field.send_keys(text, Keys.TAB)
            return True

        self._until(write, f"nowhere to write at {xpath}")

    def until_shown(self, *texts: str) -> None:
        """Wait until all the texts stand on the page."""
        self._until(
            lambda _: all(text in self.text for text in texts),
            f"the page does not show all of {texts}",
        )

    def until_shown_as(self, metadata: dict[str, Any]) -> None:
        """Wait until an asset's overview shows the values; each stands below its name and time."""

        def shown(_: webdriver.Chrome) -> bool:
            text = f"{self.text}\n"
            return all(
                re.search(rf"\n{re.escape(name)}\n[^\n]+\n{re.escape(str(value))}\n", text)
                for name, value in metadata.items()
            )

        self._until(shown, f"the page does not show all of {metadata}")

    def until_gone(self, text: str) -> None:
        self._until(lambda _: text not in self.text, f"the page still shows {text!r}")

    def until_run_succeeded(self, partition: str) -> None:
        """Wait, on the page of runs, for a run of a partition to become green."""

        def succeeded(_: webdriver.Chrome) -> bool:
            # Every run's row ends in its button "View".
            rows = [row for row in self.text.split("\nView\n") if f"partition: {partition}" in row]
            if any("Failure" in row for row in rows):
                pytest.fail(f"the run of {partition} failed")
            return any("Success" in row for row in rows)

        self._until(succeeded, f"no run of {partition} became a success")

    def _until(self, step: Callable[[webdriver.Chrome], Any], problem: str) -> None:
        passing = (
            NoSuchElementException,
            StaleElementReferenceException,
            ElementClickInterceptedException,
            ElementNotInteractableException,
        )
        try:
            WebDriverWait(self._driver, PAGE_SECONDS, 0.3, passing).until(step)
        except TimeoutException:
            pytest.fail(f"{problem} after {PAGE_SECONDS} s")


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    options = webdriver.ChromeOptions()
    # Named, so that selenium looks for no browser or driver of its own on the internet.
    options.binary_location = shutil.which("chromium") or "/usr/bin/chromium"
    driver_path = shutil.which("chromedriver") or "/usr/bin/chromedriver"
    for argument in (*CHROMIUM, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(executable_path=driver_path))
    try:
        yield Page(driver, tmp_path)
    finally:
        driver.quit()


@contextlib.contextmanager
def explained(page: Page, demo: Demo) -> Iterator[None]:
    """Say with a failure what was on the page."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"Screenshot: {page.screenshot('failure')}")
        error.add_note(f"The page:\n{page.text}")
        error.add_note(f"The demo's output:\n{demo.tail()}")
        raise


def test_the_sensor_launches_a_run_of_changes_that_came(demo: Demo, page: Page) -> None:
    """The demo feeds the last day when its page is there; nobody presses anything."""
    lines = (RECORDED / f"{DAYS[-1]}.ndjson").read_text().splitlines()
    values = [value for line in lines if (value := json.loads(line)["value"])]
    of_bookings = [value for value in values if value["source"]["table"] == "bookings"]
    last = {(value["after"] or value["before"])["id"]: value["op"] for value in of_bookings}
    deletes = sum(operation == "d" for operation in last.values())
    coordinates = [json.loads(value["source"]["sequence"]) for value in values]
    sequences = sorted(f"{int(commit):016X}/{int(lsn):016X}" for commit, lsn in coordinates)
    with explained(page, demo):
        page.open(f"{demo.url}/locations/flights/sensors/bookings_sensor")
        page.until_shown("1 run requested", "Running\nFrequency ~5 sec")
        page.screenshot("1-run-requested")
        position = f'"file": "{DAYS[-1]}.ndjson"'
        page.until_shown('Cursor\n{ "streams": { "bookings": { "said": "no changes"', position)
        page.until_shown(
            f'"plans": {1 + len(DAYS)}', f'"lines": {len(lines)}', '"lag": { "messages": 0'
        )
        page.screenshot("2-cursor")

        page.open(f"{demo.url}/assets/flights/bookings")
        names = {
            "upserts": len(last) - deletes,
            "deletes": deletes,
            "superseded": len(of_bookings) - len(last),
            "messages": len(lines),
            "lag": 0,
            "lag_seconds": 0,
            "first_sequence": sequences[0],
            "last_sequence": sequences[-1],
        }
        page.until_shown_as({f"dagster_bq/{name}": value for name, value in names.items()})
        page.until_shown("price\nNUMERIC", "Latest materialization")
        page.screenshot("3-asset")


def test_materialize_one_partition_in_the_page(demo: Demo, page: Page) -> None:
    rows = source.flights_of([DAY]).num_rows
    dialog = "//*[@role='dialog']"
    with explained(page, demo):
        page.open(f"{demo.url}/assets/flights")
        page.until_shown("Every flight that left New York", "Column name", "flight_date")
        page.screenshot("1-asset")
        page.click("//button[starts-with(normalize-space(.), 'Materialize') and not(@disabled)]")
        page.write(f"{dialog}//input[@type='text']", DAY)
        page.until_shown("Partition selection\n1 partition")
        page.screenshot("2-dialog")
        page.click(f"{dialog}//button[normalize-space(.)='Launch 1 run' and not(@disabled)]")
        page.until_gone("Launch runs to materialize flights")

        page.open(f"{demo.url}/runs")
        page.until_run_succeeded(DAY)
        page.screenshot("3-runs")

        page.open(f"{demo.url}/assets/flights?view=partitions&partition={DAY}")
        page.until_shown(
            f"{DAY}\nMaterialized",
            "dagster/table_name\nlocal-project.flights.flights",
            f"dagster/partition_row_count\n{rows}",
        )
        page.screenshot("4-partition")
        page.click("//*[normalize-space(text())='[Show Table Schema]']")
        page.until_shown("flight_date\nDATE", "carrier\nSTRING", "time_hour\nTIMESTAMP")
        page.screenshot("5-schema")

        page.open(f"{demo.url}/assets/flights")
        page.until_shown("Latest materialization\n", DAY, "flight_date\nDATE")
        page.until_shown(f"\n{rows}\n")
        page.screenshot("6-overview")


def test_every_row_of_every_table_is_read_back(demo: Demo) -> None:
    printed = demo.log.read_text(errors="replace")
    lines = r"^  (\w+): ([\d,]+) rows went in, ([\d,]+) came out: (.*)$"
    said = {name: rest for name, *rest in re.findall(lines, printed, re.M)}
    expected = {"flights": source.flights_of(LOADED).num_rows} | {
        name: source.table(name).num_rows for name in ("weather", "planes", "airports", "airlines")
    }
    assert said == {
        name: [f"{rows:,}", f"{rows:,}", "all read back"] for name, rows in expected.items()
    }
    rows = r"^  (\w+): ([\d,]+) rows at the source, ([\d,]+) here: all of them equal$"
    followed = {name: (there, here) for name, there, here in re.findall(rows, printed, re.M)}
    assert set(followed) == {"bookings", "passengers"}
    assert all(there == here for there, here in followed.values())
    days = re.findall(r"^  (2013-01-\d\d) +\d+ +\d+  \w.*  (\w+)", printed, re.M)
    assert [day for day, _ in days] == DAYS[:-1], "the last day comes with the page"
    assert days[-1][1] == "gone"
    before_the_page = printed.partition(demo.url)[0]
    assert "Traceback" not in before_the_page
    assert "WARNING" not in before_the_page
    assert (demo.log.parent / "notes.txt").exists(), "the demo removed a file that is not its own"


def test_ctrl_c_ends_the_demo_and_all_that_it_started(demo: Demo) -> None:
    started = "\n".join(family(demo.mark).values())
    for part in ("flights.demo", "dagster dev", "dagster_webserver", "_daemon", "fake-gcs-server"):
        assert part in started
    os.killpg(demo.process.pid, signal.SIGINT)
    try:
        status = demo.process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.fail(f"still there: {family(demo.mark)}\n{demo.tail()}")
    assert status == 0, demo.tail()
    assert family(demo.mark) == {}
    assert "Traceback" not in demo.tail()
