import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dagster_bq_connector import TableRef
from dagster_bq_connector.errors import InvalidNameError


@pytest.mark.parametrize(
    ("text", "project", "dataset", "table", "partition"),
    [
        ("d.t", "mine", "d", "t", None),
        ("p-1.d.t", "p-1", "d", "t", None),
        ("p-1:d.t", "p-1", "d", "t", None),
        ("`p-1.d.t`", "p-1", "d", "t", None),
        ("`p-1`.`d`.`t`", "p-1", "d", "t", None),
        ("d.t$20260801", "mine", "d", "t", "20260801"),
        ("d.t$__NULL__", "mine", "d", "t", "__NULL__"),
        ("p-1:d.t$2026080113", "p-1", "d", "t", "2026080113"),
        ("`p-1`:`d`.`t$202608`", "p-1", "d", "t", "202608"),
        ("p-1.`d`.t", "p-1", "d", "t", None),
        ("example.com:p-1.d.t", "example.com:p-1", "d", "t", None),
        ("`example.com:p-1.d.t$20260801`", "example.com:p-1", "d", "t", "20260801"),
        ("example.com:p-1:d.t", "example.com:p-1", "d", "t", None),
        ("d.Überblick-1 2", "mine", "d", "Überblick-1 2", None),
        (" d.t\n", "mine", "d", "t", None),
        ("`d.t `", "mine", "d", "t ", None),
    ],
)
def test_addresses_are_read(
    text: str, project: str, dataset: str, table: str, partition: str | None
) -> None:
    ref = TableRef.parse(text, project="mine")
    assert (ref.project, ref.dataset, ref.table, ref.partition) == (
        project,
        dataset,
        table,
        partition,
    )
    assert TableRef.parse(str(ref)) == ref


def test_a_bare_table_needs_a_dataset() -> None:
    assert TableRef.parse("t", "p", "d") == TableRef("d", "t", "p")
    with pytest.raises(InvalidNameError, match="'t' names no dataset"):
        TableRef.parse("t", "p")


@pytest.mark.parametrize(
    ("text", "blame"),
    [
        ("d.a/b", "'a/b' is no table name .look at '/'"),
        ("d-1.t", "'d-1' is no dataset name"),
        ("p!.d.t", "'p!' is no project name .look at '!'"),
        ("d.t$2026-08-01", "'2026-08-01' is no partition name"),
        ("d.", "'' is no table name"),
        ("a.b.c.d", "is no table address"),
        ("p:t", "is no table address"),
        ("a:b:c:d.t", "'a:b:c' is no project name"),
        ("d.t$", "'' is no partition name"),
        ("`d.t", "a backtick too many or too few"),
        ("d.t;drop", "';'"),
        ("d." + "x" * 1025, "1,024 bytes"),
    ],
)
def test_a_bad_name_is_named(text: str, blame: str) -> None:
    with pytest.raises(InvalidNameError, match=blame):
        TableRef.parse(text, project="p")


WORD = st.text("abcXYZ019_", min_size=1, max_size=8)
TABLE = st.text(
    st.characters(codec="utf-8", categories=["L", "M", "N", "Pc", "Zs"]) | st.just("-"),
    min_size=1,
    max_size=12,
)
PROJECT = st.from_regex(r"([a-z0-9.-]{1,9}:)?[A-Za-z0-9][A-Za-z0-9_-]{0,9}", fullmatch=True)


@given(
    st.builds(TableRef, WORD, TABLE, st.none() | PROJECT, st.none() | WORD),
)
@example(TableRef("d", "t ", None, None))
@example(TableRef("d", "\u3000", "p", None))
def test_what_an_address_says_of_itself_is_read_as_the_same(ref: TableRef) -> None:
    assert TableRef.parse(str(ref)) == ref
    assert TableRef.parse(f"`{str(ref).strip('`')}`") == ref


def test_the_forms_of_an_address() -> None:
    ref = TableRef.parse("p.d.t$20260801")
    assert ref.path == "projects/p/datasets/d/tables/t"
    assert ref.to_api().table_id == "t$20260801"
    assert str(ref.at(None)) == "p.d.t"
    with pytest.raises(InvalidNameError, match="names no project"):
        _ = TableRef("d", "t").path
