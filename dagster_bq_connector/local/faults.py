"""Errors of the Storage API as the service gives them.

A StorageError is packed in the details of a google.rpc.Status. Seam: `server._abort`, the one place
where upstream turns an exception into a gRPC status.
"""

import re
from typing import Any

import grpc
from google.cloud.bigquery_storage_v1 import types
from google.rpc import status_pb2
from grpc_status import rpc_status

from dagster_bq_connector.local.upstream import errors, read, server

Code = types.StorageError.StorageErrorCode
LABEL = re.compile(r"Table ([^:\s]+):([^.\s]+)\.(\S+)")
MASKED = (
    r"Permission 'TABLES_UPDATE_DATA' denied on resource "
    r"'projects/\1/datasets/\2/tables/\3' (or it may not exist)."
)
INVALID = grpc.StatusCode.INVALID_ARGUMENT


class StorageFault(Exception):
    """A refusal.

    Attributes:
        code: The gRPC code.
        message: The text.
        storage_code: BigQuery's own code, when it has one.
        entity: The resource that it speaks of.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        storage_code: Code | None = None,
        entity: str = "",
    ):
        super().__init__(message)
        self.code = code
        self.message = message
        self.storage_code = storage_code
        self.entity = entity

    def status(self) -> status_pb2.Status:
        message = f"{self.message} Entity: {self.entity}" if self.entity else self.message
        status = status_pb2.Status(code=self.code.value[0], message=message)
        if self.storage_code:
            error = types.StorageError(
                code=self.storage_code, entity=self.entity, error_message=message
            )
            status.details.add().Pack(types.StorageError.pb(error))
        return status


def fault_of(error: Exception) -> StorageFault:
    """Any exception of ours, of upstream or of DuckDB as a StorageFault."""
    if isinstance(error, StorageFault):
        return error
    if isinstance(error, read.StorageError):
        plain: Any = error
        return StorageFault(plain.code, plain.message)
    known = errors.from_exception(error)
    code = server.CODES.get(known.reason, grpc.StatusCode.INTERNAL)
    missing = known.reason == "notFound" and LABEL.search(known.message)
    return StorageFault(code, known.message, Code.TABLE_NOT_FOUND if missing else None)


def masked(fault: StorageFault) -> StorageFault:
    """A missing table as a caller without rights on its dataset sees it."""
    match = LABEL.search(fault.message)
    if fault.storage_code != Code.TABLE_NOT_FOUND or match is None:
        return fault
    return StorageFault(grpc.StatusCode.PERMISSION_DENIED, match.expand(MASKED))


def install(mask_missing_tables: bool = False) -> None:
    def abort(context: grpc.ServicerContext, error: Exception) -> None:
        fault = fault_of(error)
        if mask_missing_tables:
            fault = masked(fault)
        context.abort_with_status(rpc_status.to_status(fault.status()))

    server._abort = abort
