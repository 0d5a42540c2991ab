"""Messages of files, in a folder and in Cloud Storage: ranges of them, and what is noticed."""

import dataclasses
import datetime as dt
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pyarrow as pa
import pytest

from dagster_bq_connector import BigQueryResource
from dagster_bq_connector.cdc.event import MESSAGES, name_of
from dagster_bq_connector.cdc.source import files, folder, lines
from dagster_bq_connector.cdc.source.files import FileMessages
from dagster_bq_connector.cdc.source.source import Position
from dagster_bq_connector.errors import (
    AccessDeniedError,
    ChangesLostError,
    ConfigurationError,
    SourceChangedError,
    SourceMissingError,
)
from support.service import BUCKET


def line(number: int, topic: str = "shop.public.orders") -> bytes:
    return b'{"topic": "%s", "key": {"id": %d}, "value": {"op": "c"}}\n' % (topic.encode(), number)


def text(numbers: Iterable[int]) -> bytes:
    return b"".join(map(line, numbers))


class Place(ABC):
    """Where the files of a test are."""

    address: str

    @abstractmethod
    def put(self, name: str, content: bytes) -> None: ...

    @abstractmethod
    def delete(self, name: str) -> None: ...

    @property
    @abstractmethod
    def source(self) -> FileMessages: ...


class Disk(Place):
    def __init__(self, path: Path) -> None:
        self.path, self.address = path, str(path)

    def put(self, name: str, content: bytes) -> None:
        # As a writer does that shows whole files only, with the time of the content.
        place = self.path / name
        place.parent.mkdir(exist_ok=True)
        part = place.with_suffix(".part")
        part.write_bytes(content)
        os.utime(part, (1_700_000_000, 1_700_000_000))
        time.sleep(0.01)  # the clock of files moves every few milliseconds
        part.rename(place)

    def add(self, name: str, content: bytes) -> None:
        with (self.path / name).open("ab") as file:
            file.write(content)

    def delete(self, name: str) -> None:
        (self.path / name).unlink()

    @property
    def source(self) -> FileMessages:
        return FileMessages(self.address)


class Bucket(Place):
    def __init__(self, bigquery: BigQueryResource, staging: str) -> None:
        connected = bigquery.connect()
        self._client = connected.clients.cloud_storage(connected.project)
        self._bucket: Any = self._client.bucket(BUCKET)
        self._prefix = f"{staging.removeprefix(f'gs://{BUCKET}/')}/changes"
        self.address = f"{staging}/changes"

    def put(self, name: str, content: bytes) -> None:
        self._bucket.blob(f"{self._prefix}/{name}").upload_from_string(content)

    def delete(self, name: str) -> None:
        self._bucket.blob(f"{self._prefix}/{name}").delete()

    @property
    def source(self) -> FileMessages:
        return FileMessages(self.address, self._client)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


@pytest.fixture
def bucket(bigquery: BigQueryResource, staging: str) -> Bucket:
    return Bucket(bigquery, staging)


@pytest.fixture(params=["disk", "bucket"])
def place(request: pytest.FixtureRequest) -> Place:
    return request.getfixturevalue(request.param)


def planned(place: Place, start: Position | None = None, most: int = 1000) -> Position:
    stop = place.source.plan(start, most)
    assert stop is not None
    return json.loads(json.dumps(stop))  # as the ledger keeps it


def read(place: Place, start: Position | None, stop: Position) -> list[dict[str, Any]]:
    batches = list(place.source.read(start, stop))
    assert all(batch.num_rows and batch.schema == MESSAGES for batch in batches)
    return [row for batch in batches for row in batch.to_pylist()]


def ids(rows: list[dict[str, Any]]) -> list[int]:
    return [json.loads(row["key"])["id"] for row in rows]


def test_messages_come_as_they_are(place: Place) -> None:
    place.put(
        "1.ndjson",
        b'{"topic": "a", "partition": null, "key": {"id":  1.50}, "value": {"n" : 1e400}}\r\n'
        b'{"value": null, "topic": "b", "key": null, "more": [1]}\n'
        b'{"topic": "a", "value": "\\u00e4 \xc3\xa4"}\n',
    )
    stop = planned(place)
    [batch] = place.source.read(None, stop)
    assert batch.to_pylist() == [
        {
            "topic": "a",
            "partition": None,
            "offset": 1,
            "key": b'{"id":  1.50}',
            "value": b'{"n" : 1e400}',
        },
        {"topic": "b", "partition": None, "offset": 2, "key": None, "value": None},
        {
            "topic": "a",
            "partition": None,
            "offset": 3,
            "key": None,
            "value": b'"\\u00e4 \xc3\xa4"',
        },
    ]
    assert name_of(batch, 2) == f"{place.address}/1.ndjson, line 3"
    assert place.source.plan(stop, 10) is None
    assert place.source.head() == {**stop, "planned": place.source.head()["planned"]}


def test_ranges_follow_each_other_in_the_order_of_names(place: Place) -> None:
    place.put("b/2.jsonl", text(range(10, 15)))
    place.put("a.ndjson", text(range(7)))
    place.put("b/1.json", text(range(7, 10)))
    place.put("empty.ndjson", b"")
    place.put("c.txt", b"no file of changes")
    place.put("c.ndjson", text(range(15, 17)))
    position: Position | None = None
    found: list[int] = []
    ends: list[tuple[str, int]] = []
    while (stop := place.source.plan(position, 4)) is not None:
        part = ids(read(place, position, stop))
        assert part == ids(read(place, position, stop))
        assert 0 < len(part) <= 4
        found += part
        position = stop
        ends.append((stop["file"], stop["lines"]))
    assert found == list(range(17))
    assert ends == [
        ("a.ndjson", 4),
        ("b/1.json", 1),
        ("b/2.jsonl", 2),
        ("c.ndjson", 1),
        ("c.ndjson", 2),
    ]
    assert ids(read(place, None, planned(place, most=17))) == list(range(17))


def test_the_last_line_of_a_growing_file_is_read_when_it_is_whole(disk: Disk) -> None:
    disk.put("1.ndjson", text(range(3)) + line(3)[:20])
    stop = planned(disk)
    assert ids(read(disk, None, stop)) == [0, 1, 2]
    assert disk.source.plan(stop, 10) is None
    assert disk.source.lag(stop).changes == 0
    disk.add("1.ndjson", line(3)[20:] + line(4))
    after = planned(disk, stop)
    disk.add("1.ndjson", line(5))  # after the plan
    rows = read(disk, stop, after)
    assert ids(rows) == [3, 4]
    assert [row["offset"] for row in rows] == [4, 5]
    assert ids(read(disk, after, planned(disk, after))) == [5]


def test_an_unfinished_file_that_others_follow_is_not_passed(disk: Disk) -> None:
    disk.put("1.ndjson", text(range(3)) + b'{"topic"')
    disk.put("2.ndjson", text(range(3, 5)))
    stop = planned(disk)
    assert ids(read(disk, None, stop)) == [0, 1, 2]
    with pytest.raises(SourceChangedError, match="1.ndjson does not end with a newline, and '2"):
        disk.source.plan(stop, 10)
    disk.add("1.ndjson", b': "a", "key": {"id": 9}, "value": 1}\n')
    assert ids(read(disk, stop, planned(disk, stop))) == [9, 3, 4]


def test_the_last_line_of_an_object_needs_no_newline(bucket: Bucket) -> None:
    bucket.put("1.ndjson", text(range(3)).rstrip())
    bucket.put("2.ndjson", text(range(3, 5)).rstrip())
    one = planned(bucket, most=3)
    assert (one["file"], one["lines"]) == ("1.ndjson", 3)
    two = planned(bucket, one)
    assert ids(read(bucket, None, one) + read(bucket, one, two)) == [0, 1, 2, 3, 4]
    assert bucket.source.lag(one).changes == 2
    assert bucket.source.plan(two, 1) is None


@pytest.mark.parametrize("deleted", [False, True])
def test_a_file_that_comes_late_is_noticed(place: Place, deleted: bool) -> None:
    for name in "bdf":
        place.put(f"{name}.ndjson", text([1, 2]))
    stop = planned(place)
    if deleted:  # files that are read may be deleted
        place.delete("b.ndjson")
        assert place.source.plan(stop, 10) is None
    time.sleep(0.02)
    place.put("c.ndjson", text([3]))
    place.put("g.ndjson", text([4]))
    for action in (lambda: place.source.plan(stop, 10), lambda: place.source.lag(stop)):
        with pytest.raises(SourceChangedError) as caught:
            action()
        assert f"{place.address} has files that came or changed" in str(caught.value)
        assert "'c.ndjson'" in str(caught.value)
        assert "Give them names after 'f.ndjson'" in str(caught.value)
    place.delete("c.ndjson")
    place.put("fc.ndjson", text([3]))
    assert ids(read(place, stop, planned(place, stop))) == [3, 4]


def test_a_late_file_is_noticed_whatever_the_clock_says(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = folder.LocalFolder._file
    monkeypatch.setattr(
        folder.LocalFolder, "_file", lambda *one: dataclasses.replace(look(*one), created=1)
    )
    disk.put("b.ndjson", text([1, 2]))
    stop = planned(disk)
    disk.put("a.ndjson", text([3]))
    with pytest.raises(SourceChangedError, match="one, which cannot be told"):
        disk.source.plan(stop, 10)


def test_a_file_that_comes_between_plan_and_read_is_noticed(place: Place) -> None:
    place.put("b.ndjson", text([1, 2]))
    stop = planned(place, most=1)
    place.put("a.ndjson", text([3]))
    with pytest.raises(SourceChangedError, match="those of the plan"):
        read(place, None, stop)
    place.delete("a.ndjson")
    assert ids(read(place, None, stop)) == [1]
    # Of one that comes before the range, the next plan tells: the range is what it was.
    after = planned(place, stop)
    place.put("a.ndjson", text([3]))
    assert ids(read(place, stop, after)) == [2]
    with pytest.raises(SourceChangedError, match="'a.ndjson'"):
        place.source.plan(after, 10)


def test_a_file_that_changed_after_it_was_read_is_noticed(place: Place) -> None:
    place.put("a.ndjson", text([1]))
    place.put("b.ndjson", text([2]))
    stop = planned(place)
    time.sleep(0.02)
    place.put("a.ndjson", text([1, 3]))
    with pytest.raises(SourceChangedError, match="came or changed .*'a.ndjson'"):
        place.source.plan(stop, 10)


def test_a_file_that_was_replaced_is_noticed(place: Place) -> None:
    place.put("a.ndjson", text([1, 2, 3]))
    stop = planned(place, most=2)
    place.put("a.ndjson", text([1, 9, 3, 4]))
    match = "is not the file of which .* bytes .2 lines. were read"
    for action in (
        lambda: place.source.plan(stop, 10),
        lambda: place.source.lag(stop),
        lambda: read(place, None, stop),
    ):
        with pytest.raises(SourceChangedError, match=match):
            action()
    place.put("a.ndjson", text([1]))
    with pytest.raises(SourceChangedError, match=match):
        place.source.plan(stop, 10)
    place.put("a.ndjson", text([1, 2, 3, 4]))  # as it was, and more
    assert ids(read(place, stop, planned(place, stop))) == [3, 4]


def test_a_file_that_is_gone_unread_is_a_loss(place: Place) -> None:
    place.put("a.ndjson", text([1, 2, 3]))
    place.put("b.ndjson", text([4]))
    part, stop = planned(place, most=2), planned(place)
    place.delete("a.ndjson")
    with pytest.raises(ChangesLostError, match="a.ndjson is gone, and only"):
        place.source.plan(part, 10)
    with pytest.raises(SourceChangedError, match="those of the plan"):
        read(place, None, stop)
    place.put("a.ndjson", text([1, 2, 3]))
    assert ids(read(place, None, stop)) == [1, 2, 3, 4]
    place.delete("b.ndjson")
    with pytest.raises(ChangesLostError, match="b.ndjson is gone, and a range that ends in it"):
        read(place, None, stop)
    # All of it was read: it may go.
    assert place.source.plan(stop, 10) is None


def test_a_file_may_not_grow_once_others_follow_it(disk: Disk) -> None:
    disk.put("a.ndjson", text([1]))
    disk.put("b.ndjson", text([2]))
    stop = planned(disk)
    disk.add("a.ndjson", line(3))
    with pytest.raises(SourceChangedError, match="those of the plan"):
        read(disk, None, stop)


def test_lines_that_are_no_message_fail_by_their_names(place: Place) -> None:
    bad = [
        b"nonsense",
        b'{"topic": 1, "value": {}}',
        b'{"key": {}, "value": {}}',
        b'{"topic": "a"}',
    ]
    content = line(1) + b"\n  \n" + b"\n".join(bad) + b"\n" + line(2)
    place.put("a.ndjson", content)
    [batch] = place.source.read(None, planned(place))
    rows = batch.to_pylist()
    assert [row["offset"] for row in rows] == [1, 4, 5, 6, 7, 8]
    assert [(row["topic"], row["key"], row["value"]) for row in rows[1:5]] == [
        ("", None, one) for one in bad
    ]
    assert name_of(batch, 1) == f"{place.address}/a.ndjson, line 4"
    assert ids([rows[0], rows[5]]) == [1, 2]


def test_lag(place: Place) -> None:
    begun = dt.datetime.now(dt.UTC)
    place.put("a.ndjson", text(range(4)))
    all_of_it = place.source.lag(None)
    assert (all_of_it.changes, all_of_it.files) == (4, 1)
    assert all_of_it.bytes == len(text(range(4)))
    assert all_of_it.oldest is not None
    assert abs(all_of_it.oldest - begun) < dt.timedelta(seconds=20)
    part = planned(place, most=3)
    time.sleep(0.05)
    place.put("b.ndjson", text(range(5)))
    behind = place.source.lag(part)
    assert (behind.changes, behind.files, behind.oldest) == (6, 2, all_of_it.oldest)
    assert_nothing(place, place.source.head())


def assert_nothing(place: Place, position: Position | None) -> None:
    lag = place.source.lag(position)
    assert (lag.changes, lag.oldest, lag.bytes, lag.files) == (0, None, 0, 0)


def test_lag_of_much_is_estimated(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.put("a.ndjson", text(range(100, 900)))
    monkeypatch.setattr(files, "COUNTED_BYTES", 10 * len(line(100)))
    assert disk.source.lag(None).changes == 800


def test_an_empty_folder(place: Place) -> None:
    if isinstance(place, Bucket):
        place.put("other.txt", b"")
    head = place.source.head()
    assert place.source.plan(None, 10) is None
    assert place.source.plan(head, 10) is None
    place.put("a.ndjson", text([1]))
    assert ids(read(place, head, planned(place, head))) == [1]


def test_lines_longer_than_what_is_read_at_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = b'{"topic": "a", "key": {"id": 5}, "value": "%s"}\n' % (b"x" * 5000)
    place.put("a.ndjson", line(1) + long + line(2) + long)
    monkeypatch.setattr(folder, "CHUNK_BYTES", 700)
    one = planned(place, most=2)
    assert ids(read(place, None, one)) == [1, 5]
    assert ids(read(place, one, planned(place, one))) == [2, 5]
    numbers = [row["offset"] for row in read(place, None, planned(place))]
    assert numbers == [1, 2, 3, 4]


def test_batches_are_bounded(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.put("a.ndjson", text(range(1000)))
    monkeypatch.setattr(lines, "BATCH_ROWS", 70)
    batches = list(disk.source.read(None, planned(disk)))
    assert max(batch.num_rows for batch in batches) == 70
    assert ids([row for batch in batches for row in batch.to_pylist()]) == list(range(1000))


@hypothesis.given(
    parts=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    most=st.integers(1, 12),
    chunk=st.integers(1, 200),
    newline=st.booleans(),
)
@hypothesis.settings(max_examples=60)
def test_every_cut_of_files_gives_each_line_once(
    tmp_path_factory: pytest.TempPathFactory,
    parts: list[int],
    most: int,
    chunk: int,
    newline: bool,
) -> None:
    disk = Disk(tmp_path_factory.mktemp("files"))
    number = 0
    for index, count in enumerate(parts):
        content = text(range(number, number + count))
        last = index == len(parts) - 1
        (disk.path / f"{index}.ndjson").write_bytes(
            content + b'{"topic"' if last and not newline else content
        )
        number += count
    found: list[int] = []
    position: Position | None = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "CHUNK_BYTES", chunk)
        while (stop := disk.source.plan(position, most)) is not None:
            rows = ids(read(disk, position, stop))
            assert len(rows) == min(most, number - len(found))
            found, position = found + rows, stop
    assert found == list(range(number))


def test_places_that_cannot_be_read(
    place: Place, tmp_path: Path, bigquery: BigQueryResource
) -> None:
    connected = bigquery.connect()
    client = connected.clients.cloud_storage(connected.project)
    cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (
            SourceMissingError,
            "The folder .*/none does not exist",
            FileMessages(str(tmp_path / "none")).head,
        ),
        (
            SourceMissingError,
            "bucket gs://no-such-bucket-of-ours does not exist",
            FileMessages("gs://no-such-bucket-of-ours/a", client).head,
        ),
        (ConfigurationError, "pass a client", lambda: FileMessages("gs://bucket/a")),
        (ConfigurationError, "write gs://bucket/prefix", lambda: FileMessages("gs://", client)),
        (
            SourceChangedError,
            "was not taken of files",
            lambda: place.source.plan({"offsets": {}}, 1),
        ),
    ]
    for kind, match, action in cases:
        with pytest.raises(kind, match=match):
            action()


def test_a_folder_that_may_not_be_read(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.put("a.ndjson", text([1]))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("Permission denied: 'a.ndjson'")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(AccessDeniedError, match="cannot be read: Permission denied"):
        disk.source.plan(None, 1)


def test_dangling_links_are_left_out(disk: Disk) -> None:
    (disk.path / "a.ndjson").symlink_to(disk.path / "none")
    assert disk.source.plan(None, 1) is None


def test_topics_are_a_dictionary(disk: Disk) -> None:
    disk.put("a.ndjson", line(1, "a") + line(2, "b") + line(3, "a"))
    [batch] = disk.source.read(None, planned(disk))
    topics: Any = batch["topic"]
    assert isinstance(topics, pa.DictionaryArray)
    assert topics.dictionary.to_pylist() == ["a", "b"]
