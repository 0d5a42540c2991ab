"""Storage Write: pending, buffered and committed streams."""

import threading

import pyarrow as pa
import pytest
from google.api_core import exceptions
from google.cloud import bigquery
from google.cloud.bigquery_storage_v1 import types

Code = types.StorageError.StorageErrorCode
OK = 0
INVALID, ALREADY_EXISTS, OUT_OF_RANGE = 3, 6, 11


@pytest.fixture
def rows(make_rows):
    return make_rows(id="int64", name="string")


@pytest.fixture
def table(lab):
    return lab.make("id INT64 NOT NULL, name STRING, day DATE")


def pending(lab, table, rows, batch, *, finalize=True):
    """A pending stream with a batch of rows."""
    name = lab.stream(table, "PENDING")
    assert lab.connect(name, rows).send(batch, 0).error.code == OK
    if finalize:
        count = lab.writer.finalize_write_stream(name=name).row_count
        assert count == len(batch)
    return name


def commit(lab, table, names):
    return lab.writer.batch_commit_write_streams(
        request={"parent": lab.path(table), "write_streams": names}
    )


@pytest.mark.parametrize("kind", ["PENDING", "BUFFERED", "COMMITTED"])
def test_rows_are_checked_when_they_are_appended(lab, table, rows, make_rows, kind):
    name = lab.stream(table, kind)
    connection = lab.connect(name, rows)
    assert connection.send([{"id": 1, "name": "a"}], 0).append_result.offset == 0
    answer = connection.send([{"id": 2}, {"id": 3}, {"name": "no id"}, {"id": 4}], 1)
    assert answer.error.code == INVALID
    assert [(each.index, each.code.name) for each in answer.row_errors] == [(2, "FIELDS_ERROR")]
    assert "id" in answer.row_errors[0].message
    # Nothing of that request was stored, and the offset did not move.
    assert connection.send([{"id": 5}], 1).append_result.offset == 1
    # A value that the column does not take: index and nothing stored, again.
    texts = lab.connect(name, make_rows(id="int64", day="string"))
    answer = texts.send([{"id": 6, "day": "2026-08-01"}, {"id": 7, "day": "no day"}], 2)
    assert [each.index for each in answer.row_errors] == [1]
    assert lab.writer.finalize_write_stream(name=name).row_count == 2
    if kind == "PENDING":
        assert lab.rows(table) == []
        assert commit(lab, table, [name]).commit_time
    elif kind == "BUFFERED":
        assert lab.rows(table) == []
        lab.writer.flush_rows(request={"write_stream": name, "offset": 1})
    assert lab.rows(table, "id, name") == [(1, "a"), (5, None)]


def test_arrow_rows_are_checked_too(lab, table):
    schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
    connection = lab.connect(lab.stream(table, "PENDING"), schema)
    answer = connection.send([{"id": 1}, {"id": None}], 0)
    assert [each.index for each in answer.row_errors] == [1]
    assert connection.send([{"id": 1}], 0).append_result.offset == 0


def test_offsets_say_what_happened(lab, table, rows, error_code):
    connection = lab.connect(lab.stream(table, "COMMITTED"), rows)
    assert connection.send([{"id": 1}, {"id": 2}], 0).error.code == OK
    again = connection.send([{"id": 1}, {"id": 2}], 0)
    assert again.error.code == ALREADY_EXISTS
    assert error_code(again.error) == Code.OFFSET_ALREADY_EXISTS
    beyond = connection.send([{"id": 9}], 3)
    assert beyond.error.code == OUT_OF_RANGE
    assert error_code(beyond.error) == Code.OFFSET_OUT_OF_RANGE
    assert connection.send([{"id": 3}], 2).append_result.offset == 2
    assert lab.rows(table, "id") == [(1,), (2,), (3,)]


def test_an_offset_is_taken_once(lab, table, rows, together):
    name = lab.stream(table, "PENDING")
    connections = [lab.connect(name, rows, lab.new_writer()) for _ in range(8)]
    answers = together(
        [
            lambda each=each, index=index: each.send([{"id": index}], 0)
            for index, each in enumerate(connections)
        ]
    )
    codes = sorted(answer.error.code for answer in answers)
    assert codes == [OK] + [ALREADY_EXISTS] * 7
    assert lab.writer.finalize_write_stream(name=name).row_count == 1
    commit(lab, table, [name])
    winner = [index for index, answer in enumerate(answers) if answer.error.code == OK]
    assert lab.rows(table, "id") == [(winner[0],)]


def test_a_commit_of_several_streams_is_atomic(lab, table, rows):
    good = [pending(lab, table, rows, [{"id": index}]) for index in range(3)]
    open_one = pending(lab, table, rows, [{"id": 9}], finalize=False)
    answer = commit(lab, table, [*good, open_one])
    assert not answer.commit_time
    [error] = answer.stream_errors
    assert (error.code, error.entity) == (Code.INVALID_STREAM_STATE, open_one)
    assert lab.rows(table) == []
    lab.writer.finalize_write_stream(name=open_one)
    seen = set()
    done = threading.Event()

    def look():
        while not done.is_set():
            [(count,)] = lab.sql(f"SELECT count(*) FROM `{table}`")
            seen.add(count)

    watcher = threading.Thread(target=look)
    watcher.start()
    answer = commit(lab, table, [*good, open_one])
    done.set()
    watcher.join()
    assert answer.commit_time
    assert seen <= {0, 4}
    assert lab.rows(table, "id") == [(0,), (1,), (2,), (9,)]


def test_a_second_commit_is_safe(lab, table, rows, together):
    name = pending(lab, table, rows, [{"id": 1}])
    answers = together([lambda: commit(lab, table, [name])] * 4)
    assert sum(bool(answer.commit_time) for answer in answers) == 1
    lost = [answer.stream_errors[0].code for answer in answers if not answer.commit_time]
    assert lost == [Code.STREAM_ALREADY_COMMITTED] * 3
    assert lab.rows(table, "id") == [(1,)]
    # With a stream beside it that is fine, neither is committed.
    other = pending(lab, table, rows, [{"id": 2}])
    answer = commit(lab, table, [name, other])
    assert [error.code for error in answer.stream_errors] == [Code.STREAM_ALREADY_COMMITTED]
    assert lab.rows(table, "id") == [(1,)]


def test_a_flush_is_inclusive_and_not_repeated(lab, table, rows, raised):
    name = lab.stream(table, "BUFFERED")
    lab.connect(name, rows).send([{"id": index} for index in range(5)], 0)

    def flush(offset):
        return lab.writer.flush_rows(request={"write_stream": name, "offset": offset}).offset

    assert lab.rows(table) == []
    assert flush(0) == 0
    assert lab.rows(table, "id") == [(0,)]
    assert flush(2) == 2
    assert lab.rows(table, "id") == [(0,), (1,), (2,)]
    for offset in (2, 1):
        with pytest.raises(exceptions.AlreadyExists) as caught:
            flush(offset)
        assert raised(caught.value) == Code.OFFSET_ALREADY_EXISTS
    with pytest.raises(exceptions.OutOfRange) as caught:
        flush(5)
    assert raised(caught.value) == Code.OFFSET_OUT_OF_RANGE
    assert lab.rows(table, "id") == [(0,), (1,), (2,)]
    lab.writer.finalize_write_stream(name=name)
    assert flush(4) == 4
    assert len(lab.rows(table)) == 5


def test_refusals_carry_their_code(lab, table, rows, make_rows, error_code, raised):
    finalized = pending(lab, table, rows, [{"id": 1}])
    answer = lab.connect(finalized, rows).send([{"id": 2}], 1)
    assert error_code(answer.error) == Code.STREAM_FINALIZED
    extra = lab.connect(lab.stream(table, "PENDING"), make_rows(id="int64", more="string"))
    answer = extra.send([{"id": 1, "more": "x"}], 0)
    assert error_code(answer.error) == Code.SCHEMA_MISMATCH_EXTRA_FIELDS
    nowhere = f"{lab.path(table)}/streams/nowhere"
    for call in (
        lambda: lab.connect(nowhere, rows).send([{"id": 1}], 0),
        lambda: lab.writer.finalize_write_stream(name=nowhere),
        lambda: lab.writer.flush_rows(request={"write_stream": nowhere, "offset": 0}),
    ):
        with pytest.raises(exceptions.GoogleAPICallError) as caught:
            call()
        assert raised(caught.value) == Code.STREAM_NOT_FOUND
    [error] = commit(lab, table, [nowhere]).stream_errors
    assert error.code == Code.STREAM_NOT_FOUND
    committed = lab.stream(table, "COMMITTED")
    with pytest.raises(exceptions.InvalidArgument) as caught:
        lab.writer.flush_rows(request={"write_stream": committed, "offset": 0})
    assert raised(caught.value) == Code.INVALID_STREAM_TYPE
    [error] = commit(lab, table, [committed]).stream_errors
    assert error.code == Code.INVALID_STREAM_TYPE


def test_a_missing_table_is_not_found(lab, rows, raised):
    table = lab.name()
    for call in (
        lambda: lab.stream(table, "PENDING"),
        lambda: lab.connect(lab.default_stream(table), rows).send([{"id": 1}]),
        lambda: lab.session(table),
        lambda: commit(lab, table, []),
    ):
        with pytest.raises(exceptions.NotFound) as caught:
            call()
        assert raised(caught.value) == Code.TABLE_NOT_FOUND


def test_a_broken_request_does_not_break_the_connection(lab, table, rows):
    connection = lab.connect(lab.stream(table, "COMMITTED"), rows)
    assert connection.send([b"\xff\xff\xff"], 0).error.code == INVALID
    assert connection.send([{"id": 1}], 0).error.code == OK


def test_requests_up_to_10_mib(lab, table, rows):
    connection = lab.connect(lab.stream(table, "PENDING"), rows)
    text = "x" * 100_000
    batch = [{"id": index, "name": text} for index in range(99)]
    request = connection.request(batch, 0)
    size = types.AppendRowsRequest.pb(request).ByteSize()
    assert 9.4 * 2**20 < size < 10 * 2**20
    assert connection.send_request(request).append_result.offset == 0
    large = connection.request([*batch, *batch[:7]], 99)
    size = types.AppendRowsRequest.pb(large).ByteSize()
    assert size > 10 * 2**20
    with pytest.raises(exceptions.InvalidArgument) as caught:
        connection.send_request(large)
    assert f"AppendRows request too large: {size} limit 10485760" in str(caught.value)


def test_many_idle_connections_do_not_block_reads(lab, table, rows):
    writers = [lab.new_writer() for _ in range(4)]
    connections = [
        lab.connect(lab.default_stream(table), rows, writers[index % 4]) for index in range(40)
    ]
    for connection in connections:
        assert connection.send([{"id": 1}]).error.code == OK
    assert len(lab.read(lab.session(table))) == 40
    for connection in connections:
        connection.close()


def test_columns_added_while_streams_are_open(lab, table, rows, make_rows):
    streams = [lab.stream(table, kind) for kind in ("PENDING", "COMMITTED")]
    streams.append(lab.default_stream(table))
    connections = [lab.connect(name, rows) for name in streams]
    for connection in connections:
        assert connection.send([{"id": 1, "name": "old"}]).error.code == OK
    lab.sql(f"ALTER TABLE `{table}` ADD COLUMN more STRING")
    for connection in connections:  # as they are
        assert connection.send([{"id": 2, "name": "old"}]).error.code == OK
    for name in streams:  # and with the new schema, on a new connection
        new = lab.connect(name, make_rows(id="int64", more="string"))
        assert new.send([{"id": 3, "more": "new"}]).error.code == OK
    assert lab.writer.finalize_write_stream(name=streams[0]).row_count == 3
    assert commit(lab, table, streams[:1]).commit_time
    expected = [(1, None)] * 3 + [(2, None)] * 3 + [(3, "new")] * 3
    assert lab.rows(table, "id, more") == sorted(expected, key=repr)


def test_the_default_stream_shows_rows_at_once_and_takes_no_offset(lab, table, rows):
    connection = lab.connect(lab.default_stream(table), rows)
    answer = connection.send([{"id": 1}])
    assert "offset" not in answer.append_result
    assert lab.rows(table, "id") == [(1,)]
    assert connection.send([{"id": 2}], 1).error.code == INVALID
    assert connection.send([{"id": 2}, {"name": "no id"}]).row_errors[0].index == 1
    assert lab.rows(table, "id") == [(1,)]
    # Its table replaced under it: the next append goes into the new one.
    lab.sql(f"CREATE OR REPLACE TABLE `{table}` (id INT64, name STRING)")
    assert connection.send([{"id": 3}]).error.code == OK
    assert lab.rows(table, "id") == [(3,)]


def test_default_values_are_refused_and_missing_values_are_null(lab, rows):
    table = lab.make("id INT64, name STRING DEFAULT 'filled'")
    connection = lab.connect(lab.default_stream(table), rows)
    assert connection.send([{"id": 1}]).error.code == OK
    request = connection.request([{"id": 2}])
    request.default_missing_value_interpretation = "DEFAULT_VALUE"
    assert connection.send_request(request).error.code == 12
    assert lab.rows(table) == [(1, None)]
    assert isinstance(lab.client.get_table(table), bigquery.Table)


COLUMNS = "id INT64, name STRING"


def replace_by_ddl(lab, table):
    lab.sql(f"CREATE OR REPLACE TABLE `{table}` ({COLUMNS})")


def replace_by_new(lab, table):
    lab.client.delete_table(table)
    lab.sql(f"CREATE TABLE `{table}` ({COLUMNS})")


@pytest.mark.parametrize("replace", [replace_by_ddl, replace_by_new])
def test_a_stream_ends_with_its_table(lab, rows, raised, replace):
    table = lab.make(COLUMNS)
    done, unfinished = (pending(lab, table, rows, [{"id": 1}], finalize=each) for each in (1, 0))
    unused = lab.stream(table, "PENDING")
    buffered, committed = lab.stream(table, "BUFFERED"), lab.stream(table, "COMMITTED")
    for name in (buffered, committed):
        assert lab.connect(name, rows).send([{"id": 2}, {"id": 3}], 0).error.code == OK
    open_one = lab.connect(committed, rows)
    assert open_one.send([{"id": 4}], 2).error.code == OK
    replace(lab, table)
    answer = commit(lab, table, [done])
    assert not answer.commit_time
    [error] = answer.stream_errors
    assert (error.code, error.entity) == (Code.STREAM_NOT_FOUND, done)
    for call in (
        lambda: lab.writer.flush_rows(request={"write_stream": buffered, "offset": 0}),
        lambda: lab.writer.finalize_write_stream(name=unfinished),
        lambda: lab.connect(unused, rows).send([{"id": 5}], 0),
        lambda: lab.connect(buffered, rows).send([{"id": 5}], 2),
        lambda: lab.connect(committed, rows).send([{"id": 5}], 0),
        lambda: open_one.send([{"id": 5}], 3),
    ):
        with pytest.raises(exceptions.NotFound) as caught:
            call()
        assert raised(caught.value) == Code.STREAM_NOT_FOUND
    assert lab.rows(table) == []
    # A stream of the new table, and what was made of altered ones, go on.
    fresh = pending(lab, table, rows, [{"id": 6}])
    lab.sql(f"ALTER TABLE `{table}` ADD COLUMN more STRING")
    lab.sql(f"TRUNCATE TABLE `{table}`")
    assert commit(lab, table, [fresh]).commit_time
    assert lab.rows(table, "id") == [(6,)]


def test_a_stream_of_a_dropped_table_finds_no_table(lab, rows):
    table = lab.make(COLUMNS)
    done, buffered = pending(lab, table, rows, [{"id": 1}]), lab.stream(table, "BUFFERED")
    assert lab.connect(buffered, rows).send([{"id": 2}], 0).error.code == OK
    lab.client.delete_table(table)
    for call in (
        lambda: commit(lab, table, [done]),
        lambda: lab.writer.flush_rows(request={"write_stream": buffered, "offset": 0}),
        lambda: lab.connect(buffered, rows).send([{"id": 3}], 1),
    ):
        with pytest.raises(exceptions.NotFound):
            call()
    # The old stream is of no use to a later table either.
    lab.sql(f"CREATE TABLE `{table}` ({COLUMNS})")
    assert commit(lab, table, [done]).stream_errors[0].code == Code.STREAM_NOT_FOUND
    assert lab.rows(table) == []
