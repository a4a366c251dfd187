//! The status for each error of a volume.

use super::NvmeOutcome;
use blockmux_volume::{IoError, Op};
use blockmux_wire::nvme::status::NvmeStatus;

/// The outcome of a command whose I/O failed.
pub(super) fn of_io_error(error: IoError, op: Op) -> NvmeOutcome {
    match error {
        IoError::OutOfRange => NvmeOutcome::failure(NvmeStatus::LBA_OUT_OF_RANGE),
        IoError::Misaligned | IoError::BadLength => {
            NvmeOutcome::failure(NvmeStatus::INVALID_FIELD_IN_COMMAND)
        }
        IoError::ReadOnly => NvmeOutcome::failure(NvmeStatus::NAMESPACE_IS_WRITE_PROTECTED),
        IoError::Unsupported => NvmeOutcome::failure(NvmeStatus::INVALID_COMMAND_OPCODE),
        IoError::Reserved => NvmeOutcome::failure(NvmeStatus::RESERVATION_CONFLICT),
        IoError::NoSpace => NvmeOutcome::failure(NvmeStatus::CAPACITY_EXCEEDED),
        IoError::Medium if op.is_write() || op == Op::Flush => NvmeOutcome::failure(NvmeStatus::WRITE_FAULT),
        IoError::Medium => NvmeOutcome::failure(NvmeStatus::UNRECOVERED_READ_ERROR),
        IoError::NoMemory => NvmeOutcome::retry(NvmeStatus::NAMESPACE_NOT_READY),
        IoError::PathLost | IoError::Fenced => NvmeOutcome::retry(NvmeStatus::INTERNAL_PATH_ERROR),
        IoError::Aborted => NvmeOutcome::retry(NvmeStatus::COMMAND_ABORT_REQUESTED),
        IoError::ShuttingDown => NvmeOutcome::retry(NvmeStatus::COMMAND_ABORTED_DUE_TO_SQ_DELETION),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_has_its_status_and_dnr() {
        let write = Op::Write { fua: false };
        let table = [
            (IoError::OutOfRange, Op::Read, NvmeStatus::LBA_OUT_OF_RANGE, true),
            (IoError::Misaligned, Op::Read, NvmeStatus::INVALID_FIELD_IN_COMMAND, true),
            (IoError::BadLength, Op::Read, NvmeStatus::INVALID_FIELD_IN_COMMAND, true),
            (IoError::ReadOnly, write, NvmeStatus::NAMESPACE_IS_WRITE_PROTECTED, true),
            (IoError::Unsupported, Op::Read, NvmeStatus::INVALID_COMMAND_OPCODE, true),
            (IoError::Reserved, Op::Read, NvmeStatus::RESERVATION_CONFLICT, true),
            (IoError::NoSpace, write, NvmeStatus::CAPACITY_EXCEEDED, true),
            (IoError::Medium, write, NvmeStatus::WRITE_FAULT, true),
            (IoError::Medium, Op::Flush, NvmeStatus::WRITE_FAULT, true),
            (IoError::Medium, Op::Read, NvmeStatus::UNRECOVERED_READ_ERROR, true),
            (IoError::NoMemory, Op::Read, NvmeStatus::NAMESPACE_NOT_READY, false),
            (IoError::PathLost, Op::Read, NvmeStatus::INTERNAL_PATH_ERROR, false),
            (IoError::Aborted, Op::Read, NvmeStatus::COMMAND_ABORT_REQUESTED, false),
            (IoError::ShuttingDown, Op::Read, NvmeStatus::COMMAND_ABORTED_DUE_TO_SQ_DELETION, false),
            (IoError::Fenced, write, NvmeStatus::INTERNAL_PATH_ERROR, false),
        ];
        for (error, op, status, is_final) in table {
            let outcome = of_io_error(error, op).status;
            assert_eq!((outcome.status(), outcome.do_not_retry()), (status, is_final), "{error}");
        }
    }
}
