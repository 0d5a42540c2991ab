"""Which names of columns BigQuery takes."""

import pyarrow as pa
import pytest
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.errors import SchemaError
from dagster_bq_connector.schema.names import has_flexible_name
from dagster_bq_connector.schema.types import table_fields


def fields_of(*names: str) -> list[SchemaField]:
    return table_fields(pa.schema([(name, pa.int64()) for name in names]))


@pytest.mark.parametrize(
    ("name", "flexible"),
    [
        ("plain_1", False),
        ("_x", False),
        ("select", False),
        ("CamelCase", False),
        ("order-no", True),
        ("7up", True),
        ("überflüssig", True),
        ("e\u0301", True),  # a mark of its own
        ("列", True),
        ("two words", True),
        ("a\u3000b", True),
        ("a&b%c=d+e:f'g<h>i#j|k", True),
        ("en–dash", True),
        ("x" * 300, False),
        ("partition", False),
        ("my_PARTITION", False),
    ],
)
def test_a_name_is_kept_as_it_is(name: str, flexible: bool) -> None:
    """Public failure case 48: dashes, leading digits, keywords and umlauts are names, too."""
    [column] = fields_of(name)
    assert column.name == name
    assert has_flexible_name(column) is flexible
    outer = SchemaField("outer", "RECORD", fields=[column])
    assert has_flexible_name(outer) is flexible


@pytest.mark.parametrize(
    ("name", "blame"),
    [
        ("", "'' has no name: give it one"),
        ("a.b", r"'a\.b' holds '\.', which no column name may hold: rename it"),
        ("a/b!c/", "holds '/', '!'"),
        ("tab\there", r"holds '\\t'"),
        ("price$", r"holds '\$'"),
        ("back`tick", "holds '`'"),
        ("smile☺", "holds '☺'"),
        ("x" * 301, "a name of 301 characters, and BigQuery takes 300: shorten it"),
        ("_PARTITIONTIME", "'_PARTITIONTIME' begins with _PARTITION, which BigQuery keeps"),
        ("_table_x", "begins with _TABLE_"),
        ("_FILE_NAME", "begins with _FILE_"),
        ("_row_timestamp", "begins with _ROW_TIMESTAMP"),
        ("__root__", "begins with __ROOT__"),
        ("_ColIdentifier_1", "begins with _COLIDENTIFIER"),
        ("_CHANGE_TYPE", "begins with _CHANGE_TYPE"),
        ("_change_sequence_number", "begins with _CHANGE_SEQUENCE_NUMBER"),
        ("_CHANGE_TIMESTAMP", "begins with _CHANGE_TIMESTAMP"),
    ],
)
def test_a_name_that_bigquery_does_not_take_is_refused(name: str, blame: str) -> None:
    with pytest.raises(SchemaError, match=blame):
        fields_of("fine", name)


def test_fields_of_structs_are_named_with_their_path() -> None:
    inner = pa.struct([("fine", pa.int64()), ("a.b", pa.int64())])
    for kind in (pa.struct([("in", inner)]), pa.list_(pa.struct([("in", inner)]))):
        with pytest.raises(SchemaError, match=r"'out\.in\.a\.b' holds '\.'"):
            table_fields(pa.schema([("out", kind)]))


@pytest.mark.parametrize(
    ("one", "other"), [("Id", "ID"), ("Straße", "STRASSE"), ("Übung", "übung"), ("a", "a")]
)
def test_names_that_differ_by_case_only_are_refused(one: str, other: str) -> None:
    with pytest.raises(SchemaError, match=f"'{one}' and '{other}' are one column.*rename one"):
        fields_of(one, "between", other)
