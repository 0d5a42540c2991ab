"""Transactions, required partition filters and INTERVAL, by Google's client."""

import threading

import pytest
from dateutil.relativedelta import relativedelta
from google.api_core import exceptions


def script(table: str, *statements: str) -> str:
    inner = "".join(f"{statement.format(table=table)}; " for statement in statements)
    return f"BEGIN TRANSACTION; {inner}COMMIT TRANSACTION;"


def test_a_transaction_changes_rows_at_once_or_not_at_all(lab):
    table = lab.make("k STRING, n INT64 NOT NULL")
    lab.sql(f"INSERT INTO {table} VALUES ('a', 1), ('b', 2)")
    remove, add = "DELETE FROM {table} WHERE k = 'a'", "INSERT INTO {table} VALUES ('a', 3)"
    for broken in (
        "INSERT INTO {table} VALUES ('a', NULL)",
        "IF @@row_count != 2 THEN RAISE USING MESSAGE = 'counted'; END IF",
        "SELECT ERROR('stop')",
    ):
        with pytest.raises(exceptions.BadRequest):
            lab.sql(script(table, remove, add, broken))
        assert lab.rows(table, "k, n") == [("a", 1), ("b", 2)]
    counted = "IF @@row_count != 1 THEN RAISE USING MESSAGE = 'counted'; END IF"
    lab.sql(script(table, remove, add, counted))
    assert lab.rows(table, "k, n") == [("a", 3), ("b", 2)]


def test_of_concurrent_transactions_on_a_table_losers_are_told_so(lab):
    table = lab.make("k INT64, n INT64")
    lab.sql(f"INSERT INTO {table} SELECT 0, n FROM UNNEST(GENERATE_ARRAY(1, 100000)) AS n")
    lab.sql(f"INSERT INTO {table} SELECT 1, n FROM UNNEST(GENERATE_ARRAY(1, 100000)) AS n")
    texts: list[str] = []

    def change(key: int) -> None:
        remove = f"DELETE FROM {{table}} WHERE k = {key}"
        try:
            lab.sql(script(table, remove, f"INSERT INTO {{table}} VALUES ({key}, {key})"))
            texts.append("done")
        except exceptions.BadRequest as error:
            texts.append(error.message)

    for _ in range(10):  # until two of them meet
        threads = [threading.Thread(target=change, args=[key]) for key in (0, 1, 0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if set(texts) != {"done"}:
            break
    losers = [text for text in texts if text != "done"]
    assert losers
    for text in losers:
        assert "Transaction is aborted due to concurrent update against table" in text
        assert text.rstrip(".").endswith(table.replace(".", ":", 1))
    found = lab.sql(f"SELECT COUNT(*) FROM {table} GROUP BY k")
    assert "done" in texts
    assert sorted(found) in ([(1,), (1,)], [(1,), (100_000,)])


def test_readers_see_the_table_before_or_after_a_transaction(lab):
    table = lab.make("n INT64")
    lab.sql(f"INSERT INTO {table} SELECT n FROM UNNEST(GENERATE_ARRAY(1, 1000)) AS n")
    seen: set[int] = set()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            [(count,)] = lab.sql(f"SELECT COUNT(*) FROM {table}")
            seen.add(count)

    reader = threading.Thread(target=read)
    reader.start()
    fill = "INSERT INTO {table} SELECT n FROM UNNEST(GENERATE_ARRAY(1, 1000)) AS n"
    for _ in range(8):
        lab.sql(script(table, "DELETE FROM {table} WHERE TRUE", fill))
    stop.set()
    reader.join()
    assert seen == {1000}


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM {table} WHERE n = 1",
        "UPDATE {table} SET n = 2 WHERE n = 1",
    ],
)
def test_a_required_partition_filter_is_required_of_dml(lab, statement):
    table = lab.make(
        "n INT64, day DATE", "PARTITION BY day OPTIONS (require_partition_filter=true)"
    )
    lab.sql(f"INSERT INTO {table} VALUES (1, '2026-08-01')")
    every = "(day IS NULL OR day IS NOT NULL)"
    with pytest.raises(exceptions.BadRequest, match="without a filter over column.*'day'"):
        lab.sql(statement.format(table=table))
    lab.sql(statement.replace("n = 1", f"n = 1 AND {every}").format(table=table))
    assert lab.sql(f"SELECT n FROM {table} WHERE {every}") in ([], [(2,)])


@pytest.mark.parametrize(
    ("text", "months", "days", "microseconds"),
    [
        ("1-2 3 4:5:6.789", 14, 3, 14_706_789_000),
        ("-1-2 -3 -4:5:6.000001", -14, -3, -14_706_000_001),
        ("0-0 0 0:0:0", 0, 0, 0),
        ("+10000-0 0 87840000:0:0", 120_000, 0, 87_840_000 * 3_600_000_000),
    ],
)
def test_text_becomes_an_interval(lab, text, months, days, microseconds):
    [(value,)] = lab.sql(f"SELECT CAST('{text}' AS INTERVAL)")
    expected = relativedelta(months=months, days=days, microseconds=microseconds)
    assert value.normalized() == expected.normalized()
    assert lab.sql(f"SELECT CAST(CAST('{text}' AS INTERVAL) AS INTERVAL) IS NULL") == [(False,)]


def test_text_that_is_no_interval(lab):
    for text in ("1 day", "P1Y", "1-2 3 4:5:6.1234567", ""):
        with pytest.raises(exceptions.BadRequest, match="Invalid INTERVAL value"):
            lab.sql(f"SELECT CAST('{text}' AS INTERVAL)")
        assert lab.sql(f"SELECT SAFE_CAST('{text}' AS INTERVAL)") == [(None,)]
    assert lab.sql("SELECT CAST(CAST(NULL AS STRING) AS INTERVAL)") == [(None,)]
