//! Which status an error of a volume becomes.

use super::Outcome;
use blockmux_volume::{IoError, Op};
use blockmux_wire::nvme::status::Status;

/// The end of a command whose I/O failed so.
pub(super) fn of_io_error(error: IoError, op: Op) -> Outcome {
    match error {
        IoError::OutOfRange => Outcome::failure(Status::LBA_OUT_OF_RANGE),
        IoError::Misaligned | IoError::BadLength => Outcome::failure(Status::INVALID_FIELD_IN_COMMAND),
        IoError::ReadOnly => Outcome::failure(Status::NAMESPACE_IS_WRITE_PROTECTED),
        IoError::Unsupported => Outcome::failure(Status::INVALID_COMMAND_OPCODE),
        IoError::Reserved => Outcome::failure(Status::RESERVATION_CONFLICT),
        IoError::NoSpace => Outcome::failure(Status::CAPACITY_EXCEEDED),
        IoError::Medium if op.is_write() || op == Op::Flush => Outcome::failure(Status::WRITE_FAULT),
        IoError::Medium => Outcome::failure(Status::UNRECOVERED_READ_ERROR),
        IoError::NoMemory => Outcome::retry(Status::NAMESPACE_NOT_READY),
        IoError::PathLost => Outcome::retry(Status::INTERNAL_PATH_ERROR),
        IoError::Aborted => Outcome::retry(Status::COMMAND_ABORT_REQUESTED),
        IoError::ShuttingDown => Outcome::retry(Status::COMMAND_ABORTED_DUE_TO_SQ_DELETION),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_has_its_status_and_says_whether_to_try_again() {
        let write = Op::Write { fua: false };
        let table = [
            (IoError::OutOfRange, Op::Read, Status::LBA_OUT_OF_RANGE, true),
            (IoError::Misaligned, Op::Read, Status::INVALID_FIELD_IN_COMMAND, true),
            (IoError::BadLength, Op::Read, Status::INVALID_FIELD_IN_COMMAND, true),
            (IoError::ReadOnly, write, Status::NAMESPACE_IS_WRITE_PROTECTED, true),
            (IoError::Unsupported, Op::Read, Status::INVALID_COMMAND_OPCODE, true),
            (IoError::Reserved, Op::Read, Status::RESERVATION_CONFLICT, true),
            (IoError::NoSpace, write, Status::CAPACITY_EXCEEDED, true),
            (IoError::Medium, write, Status::WRITE_FAULT, true),
            (IoError::Medium, Op::Flush, Status::WRITE_FAULT, true),
            (IoError::Medium, Op::Read, Status::UNRECOVERED_READ_ERROR, true),
            (IoError::NoMemory, Op::Read, Status::NAMESPACE_NOT_READY, false),
            (IoError::PathLost, Op::Read, Status::INTERNAL_PATH_ERROR, false),
            (IoError::Aborted, Op::Read, Status::COMMAND_ABORT_REQUESTED, false),
            (IoError::ShuttingDown, Op::Read, Status::COMMAND_ABORTED_DUE_TO_SQ_DELETION, false),
        ];
        for (error, op, status, is_final) in table {
            let outcome = of_io_error(error, op).status;
            assert_eq!((outcome.status(), outcome.do_not_retry()), (status, is_final), "{error}");
        }
    }
}
