//! The table from completion status to what the host does next (Base 2.0 §3.3.3.2.1; NVM Command
//! Set 1.0 §3.2).

use crate::initiator::command_queue::CompletionClass;
use blockmux_volume::IoError;
use blockmux_wire::nvme::status::{NvmeStatus, StatusField};

/// The class of an I/O command's completion with status `field`. DNR makes every failure final.
#[inline]
pub(super) fn of(field: StatusField) -> CompletionClass {
    if field.is_success() {
        return CompletionClass::Good;
    }
    match of_failure(field.status()) {
        CompletionClass::Later(error) if field.do_not_retry() => CompletionClass::Failed(error),
        CompletionClass::Elsewhere | CompletionClass::Astray if field.do_not_retry() => {
            CompletionClass::Failed(IoError::PathLost)
        }
        // A retry delay means that a retry may succeed.
        CompletionClass::Failed(IoError::Medium) if !field.do_not_retry() && field.retry_delay() > 0 => {
            CompletionClass::Later(IoError::Medium)
        }
        class => class,
    }
}

#[cold]
fn of_failure(status: NvmeStatus) -> CompletionClass {
    match status {
        NvmeStatus::COMMAND_ABORT_REQUESTED
        | NvmeStatus::COMMANDS_ABORTED_DUE_TO_POWER_LOSS
        | NvmeStatus::COMMAND_ABORTED_DUE_TO_SQ_DELETION
        | NvmeStatus::COMMAND_ABORTED_DUE_TO_PREEMPT_AND_ABORT
        | NvmeStatus::COMMAND_INTERRUPTED => CompletionClass::Later(IoError::Aborted),
        NvmeStatus::TRANSIENT_TRANSPORT_ERROR
        | NvmeStatus::DATA_TRANSFER_ERROR
        | NvmeStatus::NAMESPACE_NOT_READY
        | NvmeStatus::FORMAT_IN_PROGRESS
        | NvmeStatus::SANITIZE_IN_PROGRESS => CompletionClass::Later(IoError::Medium),
        NvmeStatus::ASYMMETRIC_ACCESS_INACCESSIBLE
        | NvmeStatus::ASYMMETRIC_ACCESS_TRANSITION
        | NvmeStatus::ASYMMETRIC_ACCESS_PERSISTENT_LOSS => CompletionClass::Elsewhere,
        // Other Path Related Status (figure 99), known or not.
        status if status.is_path_related() => CompletionClass::Astray,
        NvmeStatus::INVALID_NAMESPACE_OR_FORMAT => CompletionClass::Failed(IoError::PathLost),
        NvmeStatus::INVALID_COMMAND_OPCODE
        | NvmeStatus::INVALID_FIELD_IN_COMMAND
        | NvmeStatus::COMMAND_SIZE_LIMIT_EXCEEDED => CompletionClass::Illegal,
        NvmeStatus::LBA_OUT_OF_RANGE => CompletionClass::Failed(IoError::OutOfRange),
        NvmeStatus::DATA_SGL_LENGTH_INVALID | NvmeStatus::ATOMIC_WRITE_UNIT_EXCEEDED => {
            CompletionClass::Failed(IoError::BadLength)
        }
        NvmeStatus::CAPACITY_EXCEEDED => CompletionClass::Failed(IoError::NoSpace),
        NvmeStatus::RESERVATION_CONFLICT => CompletionClass::Failed(IoError::Reserved),
        NvmeStatus::NAMESPACE_IS_WRITE_PROTECTED
        | NvmeStatus::ATTEMPTED_WRITE_TO_READ_ONLY_RANGE
        | NvmeStatus::OPERATION_DENIED
        | NvmeStatus::ACCESS_DENIED => CompletionClass::Failed(IoError::ReadOnly),
        _ => CompletionClass::Failed(IoError::Medium),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_its_class() {
        let of_new = |status| of(StatusField::new(status));
        assert_eq!(of_new(NvmeStatus::SUCCESSFUL_COMPLETION), CompletionClass::Good);
        assert_eq!(of_new(NvmeStatus::NAMESPACE_NOT_READY), CompletionClass::Later(IoError::Medium));
        assert_eq!(of_new(NvmeStatus::COMMAND_ABORT_REQUESTED), CompletionClass::Later(IoError::Aborted));
        for status in [
            NvmeStatus::INTERNAL_PATH_ERROR,
            NvmeStatus::CONTROLLER_PATHING_ERROR,
            NvmeStatus::HOST_PATHING_ERROR,
            NvmeStatus::COMMAND_ABORTED_BY_HOST,
            NvmeStatus(0x3ff),
        ] {
            assert_eq!(of_new(status), CompletionClass::Astray, "{status}");
            assert_eq!(of(StatusField::final_one(status)), CompletionClass::Failed(IoError::PathLost));
        }
        for status in [
            NvmeStatus::ASYMMETRIC_ACCESS_TRANSITION,
            NvmeStatus::ASYMMETRIC_ACCESS_INACCESSIBLE,
            NvmeStatus::ASYMMETRIC_ACCESS_PERSISTENT_LOSS,
        ] {
            assert_eq!(of_new(status), CompletionClass::Elsewhere);
            assert_eq!(of(StatusField::final_one(status)), CompletionClass::Failed(IoError::PathLost));
        }
        assert_eq!(of_new(NvmeStatus::INVALID_COMMAND_OPCODE), CompletionClass::Illegal);
        let failures = [
            (NvmeStatus::INVALID_NAMESPACE_OR_FORMAT, IoError::PathLost),
            (NvmeStatus::LBA_OUT_OF_RANGE, IoError::OutOfRange),
            (NvmeStatus::DATA_SGL_LENGTH_INVALID, IoError::BadLength),
            (NvmeStatus::CAPACITY_EXCEEDED, IoError::NoSpace),
            (NvmeStatus::RESERVATION_CONFLICT, IoError::Reserved),
            (NvmeStatus::NAMESPACE_IS_WRITE_PROTECTED, IoError::ReadOnly),
            (NvmeStatus::UNRECOVERED_READ_ERROR, IoError::Medium),
            (NvmeStatus(0x7ff), IoError::Medium),
        ];
        for (status, error) in failures {
            assert_eq!(of_new(status), CompletionClass::Failed(error), "{status}");
        }
    }

    #[test]
    fn dnr_prevents_retries() {
        let class = of(StatusField::final_one(NvmeStatus::NAMESPACE_NOT_READY));
        assert_eq!(class, CompletionClass::Failed(IoError::Medium));
    }

    #[test]
    fn a_retry_delay_leads_to_a_retry() {
        let with_delay = |status: NvmeStatus, delay: u8| of(StatusField::new(status).with_retry_delay(delay));
        assert_eq!(with_delay(NvmeStatus::INTERNAL_ERROR, 0), CompletionClass::Failed(IoError::Medium));
        for delay in 1..=3 {
            assert_eq!(
                with_delay(NvmeStatus::INTERNAL_ERROR, delay),
                CompletionClass::Later(IoError::Medium)
            );
            assert_eq!(
                with_delay(NvmeStatus::LBA_OUT_OF_RANGE, delay),
                CompletionClass::Failed(IoError::OutOfRange)
            );
        }
    }
}
