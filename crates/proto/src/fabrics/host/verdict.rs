//! The one table from how a command ended to what becomes of it (Base 2.0 §3.3.3.2.1; NVM Command Set 1.0 §3.2).

use crate::io_queue::Verdict;
use blockmux_volume::IoError;
use blockmux_wire::nvme::status::{Status, StatusField};

/// What becomes of a command of an I/O queue that ended with `field`. DNR makes every failure final.
#[inline]
pub(super) fn of(field: StatusField) -> Verdict {
    if field.is_success() {
        return Verdict::Good;
    }
    match of_failure(field.status()) {
        Verdict::Later(error) if field.do_not_retry() => Verdict::Failed(error),
        Verdict::Elsewhere | Verdict::Astray if field.do_not_retry() => Verdict::Failed(IoError::PathLost),
        // The controller has something in mind if it says how long to wait.
        Verdict::Failed(IoError::Medium) if !field.do_not_retry() && field.retry_delay() > 0 => {
            Verdict::Later(IoError::Medium)
        }
        verdict => verdict,
    }
}

#[cold]
fn of_failure(status: Status) -> Verdict {
    match status {
        Status::COMMAND_ABORT_REQUESTED
        | Status::COMMANDS_ABORTED_DUE_TO_POWER_LOSS
        | Status::COMMAND_ABORTED_DUE_TO_SQ_DELETION
        | Status::COMMAND_ABORTED_DUE_TO_PREEMPT_AND_ABORT
        | Status::COMMAND_INTERRUPTED => Verdict::Later(IoError::Aborted),
        Status::TRANSIENT_TRANSPORT_ERROR
        | Status::DATA_TRANSFER_ERROR
        | Status::NAMESPACE_NOT_READY
        | Status::FORMAT_IN_PROGRESS
        | Status::SANITIZE_IN_PROGRESS => Verdict::Later(IoError::Medium),
        Status::ASYMMETRIC_ACCESS_INACCESSIBLE
        | Status::ASYMMETRIC_ACCESS_TRANSITION
        | Status::ASYMMETRIC_ACCESS_PERSISTENT_LOSS => Verdict::Elsewhere,
        // What is left of Path Related Status (figure 99), whether we know it or not.
        status if status.is_path_related() => Verdict::Astray,
        Status::INVALID_NAMESPACE_OR_FORMAT => Verdict::Failed(IoError::PathLost),
        Status::INVALID_COMMAND_OPCODE
        | Status::INVALID_FIELD_IN_COMMAND
        | Status::COMMAND_SIZE_LIMIT_EXCEEDED => Verdict::Illegal,
        Status::LBA_OUT_OF_RANGE => Verdict::Failed(IoError::OutOfRange),
        Status::DATA_SGL_LENGTH_INVALID | Status::ATOMIC_WRITE_UNIT_EXCEEDED => {
            Verdict::Failed(IoError::BadLength)
        }
        Status::CAPACITY_EXCEEDED => Verdict::Failed(IoError::NoSpace),
        Status::RESERVATION_CONFLICT => Verdict::Failed(IoError::Reserved),
        Status::NAMESPACE_IS_WRITE_PROTECTED
        | Status::ATTEMPTED_WRITE_TO_READ_ONLY_RANGE
        | Status::OPERATION_DENIED
        | Status::ACCESS_DENIED => Verdict::Failed(IoError::ReadOnly),
        _ => Verdict::Failed(IoError::Medium),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_its_verdict() {
        let of_new = |status| of(StatusField::new(status));
        assert_eq!(of_new(Status::SUCCESSFUL_COMPLETION), Verdict::Good);
        assert_eq!(of_new(Status::NAMESPACE_NOT_READY), Verdict::Later(IoError::Medium));
        assert_eq!(of_new(Status::COMMAND_ABORT_REQUESTED), Verdict::Later(IoError::Aborted));
        for status in [
            Status::INTERNAL_PATH_ERROR,
            Status::CONTROLLER_PATHING_ERROR,
            Status::HOST_PATHING_ERROR,
            Status::COMMAND_ABORTED_BY_HOST,
            Status(0x3ff),
        ] {
            assert_eq!(of_new(status), Verdict::Astray, "{status}");
            assert_eq!(of(StatusField::final_one(status)), Verdict::Failed(IoError::PathLost));
        }
        for status in [
            Status::ASYMMETRIC_ACCESS_TRANSITION,
            Status::ASYMMETRIC_ACCESS_INACCESSIBLE,
            Status::ASYMMETRIC_ACCESS_PERSISTENT_LOSS,
        ] {
            assert_eq!(of_new(status), Verdict::Elsewhere);
            assert_eq!(of(StatusField::final_one(status)), Verdict::Failed(IoError::PathLost));
        }
        assert_eq!(of_new(Status::INVALID_COMMAND_OPCODE), Verdict::Illegal);
        let failures = [
            (Status::INVALID_NAMESPACE_OR_FORMAT, IoError::PathLost),
            (Status::LBA_OUT_OF_RANGE, IoError::OutOfRange),
            (Status::DATA_SGL_LENGTH_INVALID, IoError::BadLength),
            (Status::CAPACITY_EXCEEDED, IoError::NoSpace),
            (Status::RESERVATION_CONFLICT, IoError::Reserved),
            (Status::NAMESPACE_IS_WRITE_PROTECTED, IoError::ReadOnly),
            (Status::UNRECOVERED_READ_ERROR, IoError::Medium),
            (Status(0x7ff), IoError::Medium),
        ];
        for (status, error) in failures {
            assert_eq!(of_new(status), Verdict::Failed(error), "{status}");
        }
    }

    #[test]
    fn what_is_not_to_be_tried_again_is_not() {
        let verdict = of(StatusField::final_one(Status::NAMESPACE_NOT_READY));
        assert_eq!(verdict, Verdict::Failed(IoError::Medium));
    }

    #[test]
    fn a_controller_that_says_how_long_to_wait_is_asked_again() {
        let with_delay = |status: Status, delay: u8| of(StatusField::new(status).with_retry_delay(delay));
        assert_eq!(with_delay(Status::INTERNAL_ERROR, 0), Verdict::Failed(IoError::Medium));
        for delay in 1..=3 {
            assert_eq!(with_delay(Status::INTERNAL_ERROR, delay), Verdict::Later(IoError::Medium));
            assert_eq!(with_delay(Status::LBA_OUT_OF_RANGE, delay), Verdict::Failed(IoError::OutOfRange));
        }
    }
}
