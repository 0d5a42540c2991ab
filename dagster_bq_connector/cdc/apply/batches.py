"""Small batches of messages are put together: each has a cost of its own, whatever it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

# To parse, fold and encode a batch takes some milliseconds even of one message, and the last
# change of a key is written once a batch.
MOST_ROWS = 50_000
MOST_BYTES = 32 * 1024 * 1024


def put_together(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Put batches that follow each other together, as far as they are of one file or of Kafka.

    Args:
        batches: Of the schema MESSAGES. None is cut.
    """
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        more, bigger = rows + batch.num_rows, size + batch.nbytes
        full = more > MOST_ROWS or bigger > MOST_BYTES
        if held and (full or not batch.schema.equals(held[0].schema, check_metadata=True)):
            yield _one(held)
            held, more, bigger = [], batch.num_rows, batch.nbytes
        if batch.num_rows:
            held.append(batch)
            rows, size = more, bigger
    if held:
        yield _one(held)


def _one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    table = pa.Table.from_batches(batches).unify_dictionaries().combine_chunks()
    [batch] = table.to_batches()
    return batch
