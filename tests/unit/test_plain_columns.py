"""Columns that Parquet cannot carry: their plain form, and the SQL that undoes it."""

import pyarrow as pa
import pytest
from google.cloud.bigquery import SchemaField

from dagster_bq_connector.write.plain import (
    ROW,
    is_loadable,
    misfit,
    plain_batch,
    plain_columns,
    plain_schema,
    selected,
)

INTERVAL = SchemaField("i", "INTERVAL")
RANGE = SchemaField("r", "RANGE", range_element_type="DATE")
JSON = SchemaField("j", "JSON")
NESTED = SchemaField("s", "RECORD", fields=[SchemaField("a", "INT64"), JSON, INTERVAL])


@pytest.mark.parametrize("column", [JSON, INTERVAL, RANGE, NESTED])
def test_what_a_load_job_takes(column: SchemaField) -> None:
    plain = [SchemaField("g", "GEOGRAPHY"), SchemaField("t", "TIME"), SchemaField("n", "NUMERIC")]
    assert is_loadable(plain)
    assert not is_loadable([*plain, column])
    assert is_loadable(plain_columns([column]))


def test_plain_columns_are_never_required() -> None:
    columns = [
        SchemaField("n", "INT64", "REQUIRED"),
        SchemaField("text", "STRING", max_length=3),
        SchemaField("js", "JSON", "REPEATED"),
        RANGE,
    ]
    assert plain_columns(columns) == [
        SchemaField("n", "INTEGER"),
        SchemaField("text", "STRING"),
        SchemaField("js", "STRING", "REPEATED"),
        SchemaField(
            "r", "RECORD", fields=[SchemaField("start", "DATE"), SchemaField("end", "DATE")]
        ),
        SchemaField(ROW, "INTEGER", "REQUIRED"),
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((14, 3, 14_706_789_000_000), "1-2 3 4:5:6.789000"),
        ((-14, -3, -14_706_000_001_000), "-1-2 -3 -4:5:6.000001"),
        ((0, 0, 0), "0-0 0 0:0:0.000000"),
        ((-1, 5, -1000), "-0-1 5 -0:0:0.000001"),
        ((120_000, 0, 0), "10000-0 0 0:0:0.000000"),
        ((0, 0, 1), "0-0 0 0:0:0.000000001"),  # which BigQuery refuses: nothing is rounded here
        (None, None),
    ],
)
def test_an_interval_is_text(value: tuple[int, int, int] | None, expected: str | None) -> None:
    values = pa.array([None, value, (1, 1, 1000)], pa.month_day_nano_interval())
    rows = pa.record_batch({"i": values}).slice(1, 2)
    plain = plain_batch(rows, [INTERVAL], 40)
    assert plain["i"].to_pylist() == [expected, "0-1 1 0:0:0.000001"]
    assert plain[ROW].to_pylist() == [40, 41]


def test_intervals_in_structs_and_lists() -> None:
    column = SchemaField("s", "RECORD", "REPEATED", fields=[INTERVAL, SchemaField("n", "INT64")])
    kind = pa.list_(pa.struct([("i", pa.month_day_nano_interval()), ("n", pa.int64())]))
    values = [[{"i": (1, 0, 0), "n": 1}, None], [], [{"i": None, "n": 2}]]
    rows = pa.record_batch({"s": pa.array([[], *values], kind)}).slice(1)
    plain = plain_batch(rows, [column], 0)
    assert plain["s"].to_pylist() == [
        [{"i": "0-1 0 0:0:0.000000", "n": 1}, None],
        [],
        [{"i": None, "n": 2}],
    ]
    assert plain.schema == plain_schema(rows.schema, [column])


def test_the_sql_that_gives_columns_their_types_again() -> None:
    lists = SchemaField("js", "JSON", "REPEATED")
    assert selected([SchemaField("n", "INT64"), JSON, INTERVAL]) == (
        "`n` AS `n`, PARSE_JSON(`j`, wide_number_mode=>'exact') AS `j`, "
        "CAST(`i` AS INTERVAL) AS `i`"
    )
    assert selected([RANGE]) == "IF(`r` IS NULL, NULL, RANGE(`r`.`start`, `r`.`end`)) AS `r`"
    assert selected([lists]) == (
        "ARRAY(SELECT PARSE_JSON(e0, wide_number_mode=>'exact') FROM UNNEST(`js`) AS e0 "
        "WITH OFFSET AS o0 ORDER BY o0) AS `js`"
    )
    assert selected([NESTED]) == (
        "IF(`s` IS NULL, NULL, STRUCT(`s`.`a` AS `a`, "
        "PARSE_JSON(`s`.`j`, wide_number_mode=>'exact') AS `j`, "
        "CAST(`s`.`i` AS INTERVAL) AS `i`)) AS `s`"
    )


def test_the_sql_that_finds_what_is_no_value() -> None:
    assert misfit(SchemaField("n", "INT64")) == ""
    assert misfit(RANGE) == "COALESCE(`r`.`start` >= `r`.`end`, FALSE)"
    assert misfit(NESTED).count(" OR ") == 1
    assert misfit(SchemaField("js", "JSON", "REPEATED")).startswith("EXISTS(SELECT 1 FROM UNNEST")
