"""The columns that a table gets when the data has more."""

import pytest
from google.cloud.bigquery import PolicyTagList, SchemaField

from dagster_bq_connector import TableOptions
from dagster_bq_connector.errors import ConfigurationError
from dagster_bq_connector.table.evolution import with_columns


def test_new_columns_come_last_and_are_nullable() -> None:
    old = [SchemaField("n", "INT64", "REQUIRED", description="kept")]
    wanted = [
        SchemaField("new", "STRING", "REQUIRED"),
        SchemaField("N", "FLOAT64"),
        SchemaField("list", "INT64", "REPEATED"),
    ]
    assert with_columns(old, wanted) == [
        *old,
        SchemaField("new", "STRING"),
        SchemaField("list", "INT64", "REPEATED"),
    ]


def test_fields_of_structs_are_added_and_the_rest_is_kept() -> None:
    tags = PolicyTagList(["projects/p/locations/eu/taxonomies/1/policyTags/2"])
    inner = SchemaField("b", "STRING", policy_tags=tags)
    old = [SchemaField("s", "RECORD", "REPEATED", description="d", fields=[inner])]
    wanted = [
        SchemaField(
            "S",
            "RECORD",
            "REPEATED",
            fields=[SchemaField("b", "STRING"), SchemaField("c", "INT64", "REQUIRED")],
        )
    ]
    [found] = with_columns(old, wanted)
    assert (found.name, found.description, found.mode) == ("s", "d", "REPEATED")
    assert [(field.name, field.mode) for field in found.fields] == [
        ("b", "NULLABLE"),
        ("c", "NULLABLE"),
    ]
    assert found.fields[0].policy_tags == tags


def test_nothing_new_is_no_change() -> None:
    old = [SchemaField("n", "INT64"), SchemaField("s", "RECORD", fields=[SchemaField("a", "DATE")])]
    assert with_columns(old, [SchemaField("S", "RECORD", fields=[SchemaField("A", "DATE")])]) == old
    assert with_columns(old, []) == old


def test_an_evolution_that_is_none() -> None:
    with pytest.raises(ConfigurationError, match="evolution='drop': it is 'none' or 'add'"):
        TableOptions(evolution="drop")  # type: ignore[arg-type]
