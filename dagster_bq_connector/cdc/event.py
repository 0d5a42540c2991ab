"""What a source gives: messages as they came, one row each."""

from __future__ import annotations

import pyarrow as pa

MESSAGES = pa.schema(
    [
        pa.field("topic", pa.dictionary(pa.int32(), pa.string())),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("key", pa.binary()),  # null: the message has none
        pa.field("value", pa.binary()),  # null: a tombstone
    ]
)
