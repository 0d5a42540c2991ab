"""What is stored of an entry, and under which name."""

import json

import pytest

from dagster_bq_connector.errors import LedgerError
from dagster_bq_connector.ledger import Key
from dagster_bq_connector.ledger.document import HISTORY, Document, new_nonce
from dagster_bq_connector.ledger.entry import kind_of


def test_a_name_is_its_kind_and_a_digest() -> None:
    key = Key("write", "asset orders, partition 2026-08-01, é" * 100)
    assert kind_of(key.name) == "write"
    assert len(key.name) == len("write_") + 40
    assert key.name != Key("write", key.text + " ").name
    assert key.name.partition("_")[2] == Key("stream", key.text).name.partition("_")[2]


@pytest.mark.parametrize(
    "name", ["", "write_", "orders", "write_" + "A" * 40, "stream_" + "0" * 39, "x_" + "0" * 40]
)
def test_other_names_are_none(name: str) -> None:
    assert kind_of(name) is None


def test_a_document_is_compact_ascii_and_comes_back() -> None:
    document = Document("é", {"a": [1, {"b": "ü"}], "c": None}, 3, ("01", "02"))
    content = document.to_json()
    assert content.isascii()
    assert " " not in content
    assert Document.from_json(content, "here") == document
    assert list(json.loads(content)) == ["key", "version", "value", "nonces"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "null",
        "7",
        '"text"',
        "[]",
        "{}",
        '{"key":"k","version":1,"value":{},"nonces":[]}',
        '{"key":"k","version":1,"value":{},"nonces":7}',
        '{"key":"k","version":1,"value":{},"nonces":{}}',
        '{"key":"k","version":1,"value":[],"nonces":["1"]}',
        '{"key":"k","version":"1","value":{},"nonces":["1"]}',
        '{"key":"k","version":true,"value":{},"nonces":["1"]}',
        '{"key":"k","version":0,"value":{},"nonces":["1"]}',
        '{"key":7,"version":1,"value":{},"nonces":["1"]}',
        '{"key":"k","version":1,"value":{},"nonces":[7]}',
    ],
)
def test_what_is_no_document_is_refused(content: str) -> None:
    with pytest.raises(LedgerError, match="here is no entry of the ledger"):
        Document.from_json(content, "here")


def test_a_value_without_end_is_refused() -> None:
    value: dict[str, object] = {}
    value["again"] = value
    with pytest.raises(LedgerError, match="is no JSON"):
        Document("k", value, 1, ("1",)).to_json()


def test_nonces_are_as_long_as_the_limit_of_a_description_expects() -> None:
    nonces = [new_nonce() for _ in range(HISTORY)]
    assert len(set(nonces)) == HISTORY
    assert len(json.dumps(nonces, separators=(",", ":"))) == HISTORY * 19 + 1
