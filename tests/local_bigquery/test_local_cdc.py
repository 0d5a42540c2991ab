"""Change data capture on the default stream."""

import pyarrow as pa
import pytest
from google.api_core import exceptions
from google.cloud.bigquery.table import PrimaryKey, TableConstraints

INVALID = 3
COLUMNS = "id INT64, name STRING, amount INT64, PRIMARY KEY (id) NOT ENFORCED"


@pytest.fixture
def changes(make_rows):
    return make_rows(
        id="int64",
        name="string",
        amount="int64",
        _CHANGE_TYPE="string",
        _CHANGE_SEQUENCE_NUMBER="string",
    )


@pytest.fixture
def table(lab):
    return lab.make(COLUMNS)


@pytest.fixture
def connection(lab, table, changes):
    return lab.connect(lab.default_stream(table), changes)


def upsert(id, name, sequence=None, **more):
    return {
        "id": id,
        "name": name,
        "_CHANGE_TYPE": "UPSERT",
        "_CHANGE_SEQUENCE_NUMBER": sequence,
    } | more


def delete(id, sequence=None):
    return {"id": id, "_CHANGE_TYPE": "DELETE", "_CHANGE_SEQUENCE_NUMBER": sequence}


def send(connection, *rows):
    answer = connection.send(list(rows))
    assert not answer.row_errors
    assert answer.error.code == 0
    assert "offset" not in answer.append_result


def test_upserts_and_deletes(lab, table, connection):
    send(connection, upsert(1, "a", "1"), upsert(2, "b", "1"), upsert(3, "c", "1"))
    send(connection, upsert(1, "A", "2"), delete(2, "2"), delete(9, "1"))
    assert lab.rows(table, "id, name") == [(1, "A"), (3, "c")]


def test_a_stale_change_is_ignored_and_of_equals_the_later_wins(lab, table, connection):
    send(connection, upsert(1, "new", "5"))
    send(connection, upsert(1, "stale", "4"))
    assert lab.rows(table, "name") == [("new",)]
    send(connection, delete(1, "4"))
    assert lab.rows(table, "name") == [("new",)]
    send(connection, upsert(1, "equal", "5"))
    assert lab.rows(table, "name") == [("equal",)]
    send(connection, delete(1, "5"))
    assert lab.rows(table) == []
    send(connection, upsert(1, "again", "5"))
    assert lab.rows(table, "name") == [("again",)]


def test_deletes_are_remembered(lab, table, connection):
    send(connection, upsert(1, "a", "1"), delete(1, "7"))
    send(connection, delete(2, "7"))  # of a row that never was
    send(connection, upsert(1, "late", "6"), upsert(2, "late", "6"))
    assert lab.rows(table) == []
    send(connection, upsert(1, "newer", "8"))
    assert lab.rows(table, "id, name") == [(1, "newer")]


def test_one_request_holds_a_history_in_any_order(lab, table, connection):
    send(
        connection,
        upsert(1, "third", "3"),
        upsert(1, "first", "1"),
        delete(1, "2"),
        upsert(2, "x", "2"),
        upsert(2, "y", "2"),
        delete(3, "2"),
        upsert(3, "z", "1"),
    )
    assert lab.rows(table, "id, name") == [(1, "third"), (2, "y")]


PAIRS = [
    ("F", "10"),
    ("9", "a"),
    ("0", "FFFFFFFFFFFFFFFF"),
    ("A/F", "A/10"),
    ("2/FF", "10/0"),
    ("0/0/0/1", "0/0/1/0"),
    (None, "0"),
]


def test_sequences_compare_as_hexadecimal_sections(lab, table, connection):
    pairs = list(enumerate(PAIRS))
    send(connection, *[upsert(id, "high", high) for id, (_, high) in pairs])
    send(connection, *[upsert(id, "low", low) for id, (low, _) in pairs])
    send(connection, *[upsert(id + 10, "low", low) for id, (low, _) in pairs])
    send(connection, *[upsert(id + 10, "high", high) for id, (_, high) in pairs])
    assert {name for _, name in lab.rows(table, "id, name")} == {"high"}
    assert len(lab.rows(table)) == 2 * len(PAIRS)


def test_upper_and_lower_case_and_leading_zeros_are_one_sequence(lab, table, connection):
    send(connection, upsert(1, "a", "AB/1"))
    send(connection, upsert(1, "b", "00ab/001"))
    assert lab.rows(table, "name") == [("b",)]


def test_bad_sequences_and_change_types_are_row_errors(lab, table, connection):
    sequences = ["", "G", "1/", "/1", "1/2/3/4/5", "12345678901234567", "-1"]
    bad = [(upsert(2, "bad", each), "CHANGE_SEQUENCE_NUMBER") for each in sequences]
    kinds = ("INSERT", "upsert", "", None)
    bad += [(upsert(2, "bad", "1") | {"_CHANGE_TYPE": kind}, "CHANGE_TYPE") for kind in kinds]
    for row, word in bad:
        answer = connection.send([upsert(1, "good", "1"), row])
        assert answer.error.code == INVALID, row
        assert [error.index for error in answer.row_errors] == [1]
        assert word in answer.row_errors[0].message
    assert lab.rows(table) == []
    send(connection, upsert(1, "good", "1"))
    assert lab.rows(table, "id") == [(1,)]


def test_a_delete_needs_its_key_only(lab, changes):
    table = lab.make("id INT64 NOT NULL, name STRING NOT NULL, PRIMARY KEY (id) NOT ENFORCED")
    connection = lab.connect(lab.default_stream(table), changes_without_amount(changes))
    send(connection, upsert(1, "a", "1"))
    send(connection, delete(1, "2"))
    assert lab.rows(table) == []
    answer = connection.send([upsert(1, None, "3")])
    assert [error.index for error in answer.row_errors] == [0]
    answer = connection.send([{"_CHANGE_TYPE": "DELETE", "_CHANGE_SEQUENCE_NUMBER": "3"}])
    assert [error.index for error in answer.row_errors] == [0]


def changes_without_amount(changes):
    return type(changes)(
        id="int64", name="string", _CHANGE_TYPE="string", _CHANGE_SEQUENCE_NUMBER="string"
    )


def test_a_key_of_two_columns(lab, make_rows):
    table = lab.make("a INT64, b STRING, c INT64, PRIMARY KEY (a, b) NOT ENFORCED")
    rows = make_rows(
        a="int64", b="string", c="int64", _CHANGE_TYPE="string", _CHANGE_SEQUENCE_NUMBER="string"
    )
    connection = lab.connect(lab.default_stream(table), rows)
    base = {"_CHANGE_TYPE": "UPSERT", "_CHANGE_SEQUENCE_NUMBER": "1"}
    send(
        connection,
        base | {"a": 1, "b": "x", "c": 1},
        base | {"a": 1, "b": "y", "c": 2},
        base | {"a": 1, "b": "x", "c": 3},
    )
    assert lab.rows(table) == [(1, "x", 3), (1, "y", 2)]


def test_it_needs_a_primary_key(lab, changes):
    table = lab.make("id INT64, name STRING, amount INT64")
    answer = lab.connect(lab.default_stream(table), changes).send([upsert(1, "a", "1")])
    assert answer.error.code == INVALID
    assert "primary key" in answer.error.message
    assert lab.rows(table) == []


def test_arrow_and_other_streams_are_refused(lab, table, changes):
    schema = pa.schema([("id", pa.int64()), ("_CHANGE_TYPE", pa.string())])
    arrow = lab.connect(lab.default_stream(table), schema)
    answer = arrow.send([{"id": 1, "_CHANGE_TYPE": "UPSERT"}])
    assert answer.error.code == INVALID
    committed = lab.connect(lab.stream(table, "COMMITTED"), changes)
    assert committed.send([upsert(1, "a", "1")], 0).error.code == INVALID
    assert lab.rows(table) == []


def test_plain_rows_do_not_touch_the_order(lab, table, connection, make_rows):
    send(connection, upsert(1, "cdc", "5"))
    plain = lab.connect(lab.default_stream(table), make_rows(id="int64", name="string"))
    assert plain.send([{"id": 2, "name": "plain"}]).error.code == 0
    assert lab.rows(table, "id, name") == [(1, "cdc"), (2, "plain")]


def test_two_connections_keep_one_order(lab, table, changes, together):
    def write(index):
        connection = lab.connect(lab.default_stream(table), changes, lab.new_writer())
        for step in range(4):
            sequence = f"{step * 4 + index + 1:x}"
            send(connection, upsert(1, sequence, sequence), upsert(index + 10, "own", sequence))

    results = together([lambda index=index: write(index) for index in range(4)])
    assert results == [None] * 4
    assert lab.sql(f"SELECT name FROM `{table}` WHERE id = 1") == [("10",)]
    assert lab.sql(f"SELECT count(*) FROM `{table}`") == [(5,)]


DML = [
    "UPDATE `{}` SET name = 'x' WHERE id = 1",
    "MERGE `{}` AS t USING (SELECT 1 AS id) AS s ON t.id = s.id WHEN MATCHED THEN DELETE",
    "DELETE FROM `{}` WHERE id = 1",
    "DELETE `{}` WHERE true",
    "TRUNCATE TABLE `{}`",
]


def test_dml_is_refused_once_changes_came(lab, table, connection):
    lab.sql(f"INSERT INTO `{table}` (id, name) VALUES (7, 'dml')")
    for statement in DML:
        lab.sql(statement.format(table))
    assert lab.rows(table) == []
    send(connection, upsert(1, "a", "1"))
    for statement in DML:
        with pytest.raises(exceptions.BadRequest, match="change data capture"):
            lab.sql(statement.format(table))
    assert lab.rows(table, "id, name") == [(1, "a")]


def test_a_replaced_table_forgets_the_order(lab, table, connection):
    send(connection, upsert(1, "a", "5"))
    lab.sql(f"CREATE OR REPLACE TABLE `{table}` ({COLUMNS})")
    send(connection, upsert(1, "b", "1"))
    assert lab.rows(table, "name") == [("b",)]


def by_ddl(lab, table, columns):
    lab.sql(f"ALTER TABLE `{table}` DROP PRIMARY KEY")
    lab.sql(f"ALTER TABLE `{table}` ADD PRIMARY KEY ({columns}) NOT ENFORCED")


def by_rest(lab, table, columns):
    resource = lab.client.get_table(table)
    resource.table_constraints = TableConstraints(PrimaryKey([columns]), None)
    lab.client.update_table(resource, ["table_constraints"])


@pytest.mark.parametrize("change", [by_ddl, by_rest])
def test_another_primary_key_forgets_the_order(lab, table, connection, change):
    send(connection, upsert(1, "a", "9", amount=5))
    change(lab, table, "amount")
    # Amount 1 is another row than id 1, whose sequence is not its own.
    send(connection, upsert(7, "b", "1", amount=1))
    assert lab.rows(table, "id, name, amount") == [(1, "a", 5), (7, "b", 1)]


def test_other_changes_of_a_table_keep_the_order(lab, table, connection):
    send(connection, upsert(1, "a", "9"))
    lab.sql(f"ALTER TABLE `{table}` SET OPTIONS (description = 'x')")
    lab.sql(f"ALTER TABLE `{table}` ADD COLUMN more INT64")
    resource = lab.client.get_table(table)
    resource.description = "y"
    lab.client.update_table(resource, ["description"])
    new_id = lab.name().split(".")[-1]
    lab.sql(f"ALTER TABLE `{table}` RENAME TO {new_id}")
    renamed = lab.connect(lab.default_stream(lab.name(new_id)), connection._rows)
    send(renamed, upsert(1, "stale", "8"))
    assert lab.rows(lab.name(new_id), "name") == [("a",)]


def test_columns_of_any_name(lab, make_rows):
    names = ("key", "position", "sequence", "offset", "known", "last")
    columns = ", ".join(f"`{name}` INT64" for name in names)
    table = lab.make(f"id INT64, {columns}, PRIMARY KEY (id) NOT ENFORCED")
    kinds = dict.fromkeys(("id", *names), "int64") | dict.fromkeys(
        ("_CHANGE_TYPE", "_CHANGE_SEQUENCE_NUMBER"), "string"
    )
    connection = lab.connect(lab.default_stream(table), make_rows(**kinds))
    base = {"_CHANGE_TYPE": "UPSERT"} | dict.fromkeys(names, 7)
    given = [(1, "1"), (2, "3"), (2, "2")]
    rows = [base | {"id": id, "_CHANGE_SEQUENCE_NUMBER": sequence} for id, sequence in given]
    rows[1] |= dict.fromkeys(names, 8)
    send(connection, *rows)
    assert lab.rows(table) == [(1, *[7] * 6), (2, *[8] * 6)]


def test_columns_may_be_added_while_changes_come(lab, table, changes, together):
    def send_changes():
        connection = lab.connect(lab.default_stream(table), changes)
        for number in range(15):
            send(connection, upsert(number, "a", "1"))

    def add_columns():
        for number in range(5):
            lab.sql(f"ALTER TABLE `{table}` ADD COLUMN more_{number} INT64")

    assert together([send_changes, add_columns]) == [None, None]
    assert len(lab.rows(table, "id")) == 15
