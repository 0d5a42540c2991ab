"""Cloud Storage: every generation precondition is a true compare-and-set."""

import gc
import io
import uuid

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
