"""No call of the library may wait for the network without end.

Each call of a Google client has a timeout. The two streaming calls, AppendRows and ReadRows, live
as long as their data: they have a watch instead, which their own tests show.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import dagster_bq_connector

PACKAGE = Path(dagster_bq_connector.__file__).parent

# What the package calls of Google's clients, by name.
CALLS = {
    "batch_commit_write_streams",
    "cancel",
    "copy_table",
    "create_dataset",
    "create_read_session",
    "create_table",
    "create_write_stream",
    "delete",
    "delete_table",
    "done",
    "finalize_write_stream",
    "flush_rows",
    "get_bucket",
    "get_dataset",
    "get_job",
    "get_table",
    "list_blobs",
    "list_rows",
    "list_tables",
    "load_table_from_uri",
    "query",
    "query_and_wait",
    "reload",
    "result",
    "split_read_stream",
    "update_table",
    "upload_from_file",
}
# Receivers that are no client: answers in this process, and calls that a watch ends.
OURS = {"np", "sent.answer", "self._sent[0].answer", "self._call", "call", "ledger", "outcome"}


def network_calls() -> Iterator[tuple[str, ast.Call]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if PACKAGE / "local" in path.parents:  # the local BigQuery, which nothing else imports
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in CALLS
                and ast.unparse(node.func.value) not in OURS
            ):
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node


def test_every_call_of_a_client_has_a_timeout() -> None:
    found = dict(network_calls())
    assert len(found) > 10
    endless = [
        f"{place} {ast.unparse(call)}"
        for place, call in found.items()
        # `**options` are those of `rest_options`, which always has one.
        if not {"timeout", None} & {keyword.arg for keyword in call.keywords}
    ]
    assert endless == []
