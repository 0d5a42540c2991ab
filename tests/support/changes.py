"""One change of change data capture, by Google's own client."""

from typing import Any

import grpc
from google.cloud.bigquery_storage_v1 import BigQueryWriteClient, types
from google.cloud.bigquery_storage_v1.services.big_query_write.transports import (
    BigQueryWriteGrpcTransport,
)
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_KINDS = {
    int: descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    str: descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
}


def upsert(fields: dict[str, Any], table: str, **row: int | str) -> None:
    """Stream one UPSERT into the table at a resource path, which has a primary key.

    Args:
        fields: The fields of a BigQueryResource.
        table: `projects/p/datasets/d/tables/t`.
        row: The values of the row.
    """
    values = {**row, "_CHANGE_TYPE": "UPSERT"}
    descriptor = descriptor_pb2.DescriptorProto(name="Change")
    for number, (name, value) in enumerate(values.items(), start=1):
        label = descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
        descriptor.field.add(name=name, number=number, type=_KINDS[type(value)], label=label)
    file = descriptor_pb2.FileDescriptorProto(name="change.proto", package="change")
    file.message_type.add().CopyFrom(descriptor)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    message = message_factory.GetMessageClass(pool.FindMessageTypeByName("change.Change"))
    rows = types.AppendRowsRequest.ProtoData(
        writer_schema=types.ProtoSchema(proto_descriptor=descriptor),
        rows=types.ProtoRows(serialized_rows=[message(**values).SerializeToString()]),
    )
    request = types.AppendRowsRequest(write_stream=f"{table}/streams/_default", proto_rows=rows)
    address = fields["storage_endpoint"].removeprefix("http://")
    with grpc.insecure_channel(address) as channel:
        client = BigQueryWriteClient(transport=BigQueryWriteGrpcTransport(channel=channel))
        answer = next(iter(client.append_rows(iter([request]))))
    assert not answer.error.code, answer.error
    assert not answer.row_errors, answer.row_errors
