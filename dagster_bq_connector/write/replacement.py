"""Replace by streams: rows are streamed into a staging table, and put into place by one job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from dagster_bq_connector.errors import (
    FailedRow,
    FailedRowsError,
    PartitionError,
    RefusedError,
    UnknownOutcomeError,
)
from dagster_bq_connector.progress import Progress
from dagster_bq_connector.schema.conform import Conformer
from dagster_bq_connector.schema.data import Batches
from dagster_bq_connector.table.admin import EnsuredTable
from dagster_bq_connector.write.exactly_once import Sending
from dagster_bq_connector.write.jobs import JobSettings
from dagster_bq_connector.write.key import purpose_of
from dagster_bq_connector.write.own_stream import OwnStreams, RowsRefused
from dagster_bq_connector.write.piece import Piece
from dagster_bq_connector.write.plain import ROW, plain_batch, plain_columns, plain_schema
from dagster_bq_connector.write.pool import POOL_BYTES
from dagster_bq_connector.write.proof import Outcome, Provers
from dagster_bq_connector.write.result import NOTHING_WRITTEN, WriteResult
from dagster_bq_connector.write.streams import Type
from dagster_bq_connector.write.targets import Targets
from dagster_bq_connector.write.transaction import Filled, StagingTables, write_staged


def replace_rows(
    sending: Sending, settings: JobSettings, targets: Targets, data: Batches, progress: Progress
) -> WriteResult:
    """Stream rows into staging tables, then replace each target by one job.

    Args:
        sending: How the rows are sent.
        settings: Of the jobs; see `write/proof.py` for what makes the write land once.
        targets: What is replaced.
        data: The rows; not read when another attempt has done the write.
        progress: Counts acknowledged rows, then tells of the jobs.

    Returns:
        What was written.

    Raises:
        SchemaError, FailedRowsError, PartitionError: The rows do not fit. Nothing was changed.
        WriteKeyError: The key was used for something else. Nothing was changed.
        UnsupportedError: BigQuery takes no DELETE on the table. Nothing was changed.
        RefusedError: BigQuery failed a job. Of several targets, the error says which were written.
    """
    purpose = purpose_of(targets, settings.operation, data.schema.names)
    provers = Provers(settings, purpose, progress)
    outcome = Outcome("exactly_once", targets, settings.operation)
    if done := provers.found(targets):
        return outcome.result(done)
    write_staged(provers, targets, partial(_fill, sending, data), outcome)
    return outcome.result(provers.proofs)


def _fill(
    sending: Sending,
    data: Batches,
    settings: JobSettings,
    targets: Targets,
    tables: StagingTables,
    progress: Progress,
) -> Filled:
    """Fill the staging tables of a replacement by pending streams, which are then committed.

    They belong to this attempt, so that the ledger need not know of them.
    """
    conform = Conformer(data.schema, targets.columns, complete=True)
    schema, columns = plain_schema(conform.schema, targets.columns), plain_columns(targets.columns)
    open_streams = dict[str, OwnStreams]()
    for target in targets.targets:
        ref = tables.create(target, columns)
        staged = EnsuredTable(ref, columns, age=0.0)
        open_streams[target.id] = sending.open(staged, schema, Type.PENDING)
    failed, position, rows = list[FailedRow](), 0, Counter[str]()
    try:
        for batch in data.batches:
            conformed = conform(batch)
            failed += [row.moved(position) for row in conformed.failed]
            if not failed:
                plain = plain_batch(conformed.batch, targets.columns, position)
                for target, part in targets.split(plain, position):
                    open_streams[target].send(Piece(part, part.column(ROW).to_numpy()))
                    rows[target] += part.num_rows
                _bound(list(open_streams.values()))
            position += batch.num_rows
        if failed:
            raise FailedRowsError(targets.table, failed, written=0)
        for target in targets.targets:
            counts = open_streams[target.id].finish()
            sending.streams.commit(tables.of(target), list(counts))
    except PartitionError as error:
        raise PartitionError(f"{error} {NOTHING_WRITTEN}") from None
    except UnknownOutcomeError as error:  # of staged rows alone
        raise RefusedError(f"{error} {NOTHING_WRITTEN}") from error
    except RowsRefused as refused:
        raise FailedRowsError(targets.table, [*failed, *refused.rows], written=0) from refused
    finally:
        for each in open_streams.values():
            each.abandon()
    size = sum(each.bytes for each in open_streams.values())
    return Filled({target.id: rows[target.id] for target in targets.targets}, size)


def _bound(targets: Sequence[OwnStreams]) -> None:
    """Keep rows of all targets together within the bytes that those of one may take."""
    while len(targets) > 1 and sum(each.held for each in targets) > POOL_BYTES:
        max(targets, key=lambda each: each.held).acknowledged()
