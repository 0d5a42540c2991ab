"""A Storage API that only acknowledges and only serves prepared bytes, in a process of its own."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from google.cloud.bigquery_storage_v1 import types

from benchmarks.data import batches

ACKNOWLEDGED = b"\x0a\x00"  # an AppendRowsResponse with an empty append_result
PACKAGE = "google.cloud.bigquery.storage.v1"


def append(requests: Iterator[bytes], _context: object) -> Iterator[bytes]:
    for _ in requests:
        yield ACKNOWLEDGED


def serve(rows: int, streams: int, times: int) -> None:
    prepared = batches(rows)
    responses = [
        types.ReadRowsResponse.serialize(
            types.ReadRowsResponse(
                arrow_record_batch=types.ArrowRecordBatch(
                    serialized_record_batch=batch.serialize().to_pybytes()
                ),
                row_count=batch.num_rows,
            )
        )
        for batch in prepared
    ]
    session = types.ReadSession(
        name="s",
        arrow_schema=types.ArrowSchema(
            serialized_schema=prepared[0].schema.serialize().to_pybytes()
        ),
        data_format=types.DataFormat.ARROW,
        streams=[types.ReadStream(name=f"s/{number}") for number in range(streams)],
    )
    made = types.ReadSession.serialize(session)
    read = grpc.unary_stream_rpc_method_handler(lambda *_: iter(responses * times))
    open_session = grpc.unary_unary_rpc_method_handler(lambda _request, _context: made)
    server = grpc.server(
        ThreadPoolExecutor(max_workers=16),
        options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)],
    )
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(
                f"{PACKAGE}.BigQueryWrite",
                {"AppendRows": grpc.stream_stream_rpc_method_handler(append)},
            ),
            grpc.method_handlers_generic_handler(
                f"{PACKAGE}.BigQueryRead",
                {"ReadRows": read, "CreateReadSession": open_session},
            ),
        ]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    sys.stdin.read()
    server.stop(None)


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
