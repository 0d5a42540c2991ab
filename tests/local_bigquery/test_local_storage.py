"""Cloud Storage: every generation precondition is a true compare-and-set."""

import gc
import io
import json
import urllib.error
import urllib.request
import uuid
from urllib.parse import quote

import pytest
from google.api_core import exceptions
from google.cloud import bigquery
from google.cloud.storage.exceptions import InvalidResponse

CHUNK = 256 * 1024
FAILED = exceptions.PreconditionFailed


@pytest.fixture(scope="module")
def bucket(session_lab):
    return session_lab.storage.create_bucket(f"bucket-{uuid.uuid4().hex}")


@pytest.fixture
def blob(bucket):
    """An object with the text `old`."""
    blob = bucket.blob(f"folder/{uuid.uuid4().hex} ä#?%.txt")
    blob.upload_from_string("old", if_generation_match=0)
    assert blob.generation
    return blob


def fresh(blob):
    """The same object, nothing known of it."""
    return blob.bucket.blob(blob.name)


def resumable(blob, data, **options):
    blob.chunk_size = CHUNK
    blob.upload_from_file(io.BytesIO(data), size=len(data), **options)


UPLOADS = pytest.mark.parametrize(
    "upload",
    [lambda blob, data, **options: blob.upload_from_string(data, **options), resumable],
    ids=["multipart", "resumable"],
)


@UPLOADS
def test_upload(bucket, blob, upload):
    data = b"x" * (CHUNK + 1)
    for wanted in (0, blob.generation - 1, blob.generation + 1):
        with pytest.raises(FAILED):
            upload(fresh(blob), data, if_generation_match=wanted)
    with pytest.raises(FAILED):
        upload(fresh(blob), data, if_generation_not_match=blob.generation)
    assert fresh(blob).download_as_bytes() == b"old"
    newer = fresh(blob)
    upload(newer, data, if_generation_match=blob.generation)
    assert newer.generation != blob.generation
    assert fresh(blob).download_as_bytes() == data
    absent = bucket.blob(f"absent-{uuid.uuid4().hex}")
    with pytest.raises(FAILED):
        upload(absent, data, if_generation_match=5)
    assert not absent.exists()
    upload(absent, data, if_generation_match=0)


@UPLOADS
def test_of_creators_one_wins(bucket, together, upload):
    name = f"race-{uuid.uuid4().hex}"

    def create(number):
        data = str(number).encode() * (CHUNK + 1)
        upload(bucket.blob(name), data, if_generation_match=0)
        return data

    results = together([lambda number=number: create(number) for number in range(6)])
    won = [each for each in results if isinstance(each, bytes)]
    assert len(won) == 1
    assert sum(isinstance(each, FAILED) for each in results) == 5, results
    assert bucket.blob(name).download_as_bytes() == won[0]


def test_no_increment_is_lost(bucket, together):
    name = f"counter-{uuid.uuid4().hex}"
    bucket.blob(name).upload_from_string("0")

    def increment(rounds):
        while rounds:
            blob = bucket.get_blob(name)
            try:
                number = int(blob.download_as_bytes(if_generation_match=blob.generation))
                mine = bucket.blob(name)
                mine.upload_from_string(str(number + 1), if_generation_match=blob.generation)
                rounds -= 1
            except FAILED:
                pass
            except exceptions.NotFound:  # a download of a generation that is gone
                pass

    assert together([lambda: increment(8)] * 4) == [None] * 4
    assert bucket.blob(name).download_as_bytes() == b"32"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_upload_that_was_overtaken_fails_at_its_end(bucket, blob):
    """The precondition held when the resumable upload began, and no longer when it ended."""
    slow = fresh(blob)
    slow.chunk_size = CHUNK
    file = slow.open("wb", if_generation_match=blob.generation)
    file.write(b"s" * (2 * CHUNK))  # under way
    fresh(blob).upload_from_string("fast", if_generation_match=blob.generation)
    file.write(b"s" * CHUNK)
    with pytest.raises(InvalidResponse) as caught:
        file.close()
    assert caught.value.response.status_code == 412
    del file, caught  # it tries once more to close itself, and says so
    gc.collect()
    assert fresh(blob).download_as_bytes() == b"fast"


def test_delete(blob, together):
    for wanted in (0, blob.generation + 1):
        with pytest.raises(FAILED):
            fresh(blob).delete(if_generation_match=wanted)
    with pytest.raises(FAILED):
        fresh(blob).delete(if_generation_not_match=blob.generation)
    assert blob.exists()
    with pytest.raises(exceptions.NotFound):
        blob.bucket.delete_blob(blob.name, generation=blob.generation + 1)
    assert blob.exists()
    delete = lambda: fresh(blob).delete(if_generation_match=blob.generation)  # noqa: E731
    results = together([delete] * 4)
    assert results.count(None) == 1
    assert not blob.exists()
    with pytest.raises(exceptions.NotFound):
        fresh(blob).delete(if_generation_match=blob.generation)


def test_download_and_metadata(blob):
    wrong = blob.generation + 1
    with pytest.raises(FAILED):
        fresh(blob).download_as_bytes(if_generation_match=wrong)
    with pytest.raises(FAILED):
        fresh(blob).reload(if_generation_match=wrong)
    with pytest.raises(FAILED):
        fresh(blob).exists(if_generation_match=0)
    assert fresh(blob).download_as_bytes(if_generation_match=blob.generation) == b"old"
    fresh(blob).reload(if_generation_match=blob.generation)
    with pytest.raises(exceptions.NotModified):
        fresh(blob).reload(if_generation_not_match=blob.generation)
    assert fresh(blob).download_as_bytes(if_generation_not_match=wrong) == b"old"
    gone = blob.bucket.blob(blob.name, generation=wrong)
    with pytest.raises(exceptions.NotFound):
        gone.download_as_bytes()


def test_patch(blob):
    other = fresh(blob)
    other.metadata = {"a": "1"}
    with pytest.raises(FAILED):
        other.patch(if_generation_match=blob.generation + 1)
    assert not blob.bucket.get_blob(blob.name).metadata
    other.metadata = {"a": "2"}
    other.patch(if_generation_match=blob.generation)
    assert blob.bucket.get_blob(blob.name).metadata == {"a": "2"}


def test_compose(bucket, blob):
    parts = []
    for text in ("one ", "two"):
        parts.append(bucket.blob(uuid.uuid4().hex))
        parts[-1].upload_from_string(text)
    for wanted in (0, blob.generation + 1):
        with pytest.raises(FAILED):
            fresh(blob).compose(parts, if_generation_match=wanted)
    with pytest.raises(FAILED):
        fresh(blob).compose(
            parts, if_source_generation_match=[parts[0].generation, parts[0].generation]
        )
    assert fresh(blob).download_as_bytes() == b"old"
    fresh(blob).compose(
        parts,
        if_generation_match=blob.generation,
        if_source_generation_match=[part.generation for part in parts],
    )
    assert fresh(blob).download_as_bytes() == b"one two"
    new = bucket.blob(uuid.uuid4().hex)
    new.compose(parts, if_generation_match=0)
    with pytest.raises(FAILED):
        new.compose(parts, if_generation_match=0)


def test_rewrite_and_copy(bucket, blob):
    source = bucket.blob(uuid.uuid4().hex)
    source.upload_from_string("new")
    with pytest.raises(FAILED):
        fresh(blob).rewrite(source, if_generation_match=0)
    with pytest.raises(FAILED):
        fresh(blob).rewrite(source, if_source_generation_match=source.generation + 1)
    with pytest.raises(FAILED):
        bucket.copy_blob(source, bucket, blob.name, if_generation_match=0)
    with pytest.raises(exceptions.NotFound):
        bucket.copy_blob(source, bucket, blob.name, source_generation=source.generation + 1)
    assert fresh(blob).download_as_bytes() == b"old"
    fresh(blob).rewrite(
        source,
        if_generation_match=blob.generation,
        if_source_generation_match=source.generation,
    )
    assert fresh(blob).download_as_bytes() == b"new"
    bucket.copy_blob(source, bucket, uuid.uuid4().hex, if_generation_match=0)


def test_what_it_cannot_keep_it_refuses(blob):
    """Never taken and ignored."""
    metageneration = {"if_metageneration_match": 1}
    calls = (
        lambda: fresh(blob).delete(**metageneration),
        lambda: fresh(blob).reload(**metageneration),
        lambda: fresh(blob).upload_from_string("x", **metageneration),
        lambda: fresh(blob).reload(if_etag_match="x"),
        lambda: blob.bucket.reload(**metageneration),
    )
    for call in calls:
        with pytest.raises(exceptions.MethodNotImplemented):
            call()
    with pytest.raises(exceptions.MethodNotImplemented), blob.client.batch():
        fresh(blob).delete()
    assert fresh(blob).download_as_bytes() == b"old"


def test_large_bodies_ranges_and_listing(session_lab, bucket):
    data = bytes(range(256)) * (24 << 12)  # 24 MiB
    blob = bucket.blob("large/one")
    blob.upload_from_string(data)
    assert bucket.blob("large/one").download_as_bytes() == data
    assert blob.download_as_bytes(start=1000, end=1999) == data[1000:2000]
    resumable(bucket.blob("large/two"), data[: 5 * CHUNK + 7])
    bucket.blob("large/deep/three").upload_from_string("")
    listed = session_lab.storage.list_blobs(bucket, prefix="large/", delimiter="/")
    assert [(each.name, each.size) for each in listed] == [
        ("large/one", len(data)),
        ("large/two", 5 * CHUNK + 7),
    ]
    assert listed.prefixes == {"large/deep/"}
    with bucket.blob("large/one").open("rb") as file:
        file.seek(20 << 20)
        assert file.read(256) == bytes(range(256))


def test_jobs_load_and_extract_through_it(lab, bucket):
    uri = f"gs://{bucket.name}/rows/{uuid.uuid4().hex}"
    bucket.blob(f"{uri.split('/', 3)[3]}.json").upload_from_string('{"id": 1}\n{"id": 2}\n')
    table = lab.make("id INT64")
    config = bigquery.LoadJobConfig(source_format="NEWLINE_DELIMITED_JSON")
    lab.client.load_table_from_uri(f"{uri}*", table, job_config=config).result()
    assert lab.rows(table) == [(1,), (2,)]
    lab.client.extract_table(table, f"{uri}-out.csv").result()
    text = bucket.blob(f"{uri.split('/', 3)[3]}-out.csv").download_as_bytes()
    assert sorted(text.split()) == [b"1", b"2", b"id"]


BAD_NAMES = (
    "a//b",
    "/a",
    "a/",
    ".",
    "..",
    "a/./b",
    "../other-bucket/x",
    "../../../../../tmp/x",
    "a\nb",
    "a\0b",
    "n" * 236,
    "a/" + "ä" * 118,
    "/".join(["n" * 100] * 11),
)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_are_no_path_of_one_file_are_refused(bucket, blob, name):
    """However they come in. With 400, since clients try again for minutes after a 500."""
    bad = lambda: bucket.blob(name)  # noqa: E731
    calls = [
        lambda: bad().upload_from_string("x"),
        lambda: resumable(bad(), b"x" * (CHUNK + 1)),
        lambda: bad().create_resumable_upload_session(size=1),
        lambda: fresh(blob).compose([bad()]),
    ]
    if name not in (".", ".."):  # the client takes these out of its URLs
        calls += [
            lambda: bad().compose([blob]),
            lambda: bad().rewrite(blob),
            lambda: bucket.copy_blob(blob, bucket, name),
        ]
        if len(name) < 1000:  # reading that one does no harm
            calls += [
                lambda: bad().exists(),
                lambda: bad().download_as_bytes(),
                lambda: bad().delete(),
                lambda: fresh(blob).rewrite(bad()),
            ]
    for call in calls:
        with pytest.raises(exceptions.BadRequest, match=r"local Cloud Storage|1024 bytes"):
            call()
    assert fresh(blob).download_as_bytes() == b"old"


def test_names_of_the_greatest_length_are_kept(bucket):
    name = "n" * 235 + "/" + "ä" * 117
    bucket.blob(name).upload_from_string("x")
    assert bucket.get_blob(name).name == name
    assert bucket.blob(name).download_as_bytes() == b"x"


def ask(session_lab, method, path, body=None, **headers):
    """The status of a call that the clients do not make."""
    host = session_lab.environment["STORAGE_EMULATOR_HOST"]
    request = urllib.request.Request(host + path, body, headers, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_other_ways_of_naming_an_object(session_lab, bucket):
    upload = f"/upload/storage/v1/b/{bucket.name}/o"
    bad = "..%2Fother%2Fx"
    described = json.dumps({"name": "../other/x"}).encode()
    form = {"Content-Type": "multipart/form-data; boundary=q"}
    calls = (
        ("POST", f"{upload}?uploadType=media&name={bad}", b"x", {}, 400),
        ("POST", f"{upload}?uploadType=media&name={bad}&name=good", b"x", {}, 400),
        ("POST", f"{upload}?uploadType=resumable&name={bad}", b"{}", {}, 400),
        ("POST", f"{upload}?uploadType=resumable", described, {}, 400),
        ("GET", f"/{bucket.name}/{bad}", None, {}, 400),
        ("DELETE", f"/{bucket.name}/{bad}", None, {}, 400),
        ("GET", "/storage/v1/b/%2e%2e", None, {}, 400),
        ("GET", f"/download/storage/v1/b/{bucket.name}/o/{bad}", None, {}, 400),
        ("PUT", f"/{bucket.name}/x?uploadType=media", b"x", {}, 501),
        ("POST", f"/{bucket.name}", b"--q--", form, 501),
        ("GET", f"/{bucket.name}/", None, {}, 200),
        ("GET", f"/storage/v1/b/{bucket.name}/o?prefix=a/", None, {}, 200),
    )
    found = [ask(session_lab, *call[:3], **call[3])[0] for call in calls]
    assert found == [call[4] for call in calls]


def test_a_file_in_the_way_of_a_folder_is_said(bucket, blob):
    top = uuid.uuid4().hex
    bucket.blob(f"{top}/a").upload_from_string("x")
    calls = [
        lambda name: bucket.blob(name).upload_from_string("y"),
        lambda name: resumable(bucket.blob(name), b"y" * (CHUNK + 1)),
        lambda name: bucket.blob(name).compose([blob]),
        lambda name: bucket.blob(name).rewrite(blob),
    ]
    for call in calls:
        for name in (top, f"{top}/a/b"):
            with pytest.raises(exceptions.BadRequest, match="keeps objects as files"):
                call(name)
    assert bucket.blob(f"{top}/a").download_as_bytes() == b"x"
    assert not bucket.blob(top).exists()
    with pytest.raises(exceptions.NotFound, match=r"No such object.*absent"):
        fresh(blob).compose([bucket.blob("absent")])


def test_calls_that_it_does_not_know_are_no_names(session_lab, bucket, blob):
    for generation in (None, blob.generation):
        with pytest.raises(exceptions.MethodNotImplemented, match="moveTo is not supported"):
            bucket.move_blob(blob, "moved", if_generation_match=generation)
    with pytest.raises(exceptions.MethodNotImplemented, match="restore is not supported"):
        bucket.restore_blob(blob.name, generation=blob.generation)
    assert fresh(blob).download_as_bytes() == b"old"
    path = f"/storage/v1/b/{bucket.name}/o/{quote('x/moveTo/o/y', safe='')}"
    assert ask(session_lab, "GET", path)[0] == 404  # that is a name
