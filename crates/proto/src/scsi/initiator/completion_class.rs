//! Classification of command results (SAM-5 §5.3.1, SPC-5).

use super::sense::SenseCode;
use crate::initiator::command_queue::CompletionClass;
use blockmux_volume::IoError;
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use blockmux_wire::scsi::status::ScsiStatus;

/// The class of a command that ended with `status` and, for CHECK CONDITION, this sense data.
#[inline]
pub(super) fn of(status: ScsiStatus, sense: Option<SenseCode>) -> CompletionClass {
    match status {
        ScsiStatus::GOOD | ScsiStatus::CONDITION_MET => CompletionClass::Good,
        ScsiStatus::CHECK_CONDITION => sense.map_or(CompletionClass::Failed(IoError::Medium), of_sense),
        ScsiStatus::BUSY | ScsiStatus::TASK_SET_FULL | ScsiStatus::ACA_ACTIVE => {
            CompletionClass::Later(IoError::NoMemory)
        }
        ScsiStatus::RESERVATION_CONFLICT => CompletionClass::Failed(IoError::Reserved),
        ScsiStatus::TASK_ABORTED => CompletionClass::Again,
        _ => CompletionClass::Failed(IoError::Medium),
    }
}

#[cold]
fn of_sense(SenseCode { key, asc }: SenseCode) -> CompletionClass {
    match (key, asc) {
        (SenseKey::NO_SENSE | SenseKey::RECOVERED_ERROR | SenseKey::COMPLETED, _) => CompletionClass::Good,
        (SenseKey::UNIT_ATTENTION, _) => CompletionClass::Again,
        (SenseKey::ABORTED_COMMAND, Asc::INSUFFICIENT_RESOURCES) => CompletionClass::Later(IoError::NoMemory),
        (SenseKey::ABORTED_COMMAND, _) => CompletionClass::Again,
        (
            SenseKey::NOT_READY,
            Asc::BECOMING_READY | Asc::ASYMMETRIC_ACCESS_STATE_TRANSITION | Asc::SANITIZE_IN_PROGRESS,
        ) => CompletionClass::Later(IoError::NoMemory),
        (SenseKey::NOT_READY, Asc::TARGET_PORT_IN_STANDBY_STATE | Asc::TARGET_PORT_IN_UNAVAILABLE_STATE) => {
            CompletionClass::Elsewhere
        }
        (SenseKey::NOT_READY, Asc::LOGICAL_UNIT_COMMUNICATION_FAILURE)
        | (SenseKey::ILLEGAL_REQUEST, Asc::LOGICAL_UNIT_NOT_SUPPORTED) => {
            CompletionClass::Failed(IoError::PathLost)
        }
        (SenseKey::ILLEGAL_REQUEST, Asc::LOGICAL_BLOCK_ADDRESS_OUT_OF_RANGE) => {
            CompletionClass::Failed(IoError::OutOfRange)
        }
        (SenseKey::ILLEGAL_REQUEST, _) => CompletionClass::Illegal,
        (SenseKey::DATA_PROTECT, Asc::SPACE_ALLOCATION_FAILED_WRITE_PROTECT) => {
            CompletionClass::Failed(IoError::NoSpace)
        }
        (SenseKey::DATA_PROTECT, _) => CompletionClass::Failed(IoError::ReadOnly),
        _ => CompletionClass::Failed(IoError::Medium),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_its_completion_class() {
        let table = [
            (ScsiStatus::GOOD, CompletionClass::Good),
            (ScsiStatus::CONDITION_MET, CompletionClass::Good),
            (ScsiStatus::CHECK_CONDITION, CompletionClass::Failed(IoError::Medium)),
            (ScsiStatus::BUSY, CompletionClass::Later(IoError::NoMemory)),
            (ScsiStatus::TASK_SET_FULL, CompletionClass::Later(IoError::NoMemory)),
            (ScsiStatus::ACA_ACTIVE, CompletionClass::Later(IoError::NoMemory)),
            (ScsiStatus::RESERVATION_CONFLICT, CompletionClass::Failed(IoError::Reserved)),
            (ScsiStatus::TASK_ABORTED, CompletionClass::Again),
            (ScsiStatus(0x77), CompletionClass::Failed(IoError::Medium)),
        ];
        for (status, class) in table {
            assert_eq!(of(status, None), class, "{status}");
        }
    }

    #[test]
    fn every_sense_key_has_its_completion_class() {
        let failed = |error| CompletionClass::Failed(error);
        let table = [
            (0x0, 0x0000, CompletionClass::Good),
            (0x1, 0x1700, CompletionClass::Good),
            (0xf, 0x0000, CompletionClass::Good),
            (0x2, 0x0401, CompletionClass::Later(IoError::NoMemory)),
            (0x2, 0x040a, CompletionClass::Later(IoError::NoMemory)),
            (0x2, 0x041b, CompletionClass::Later(IoError::NoMemory)),
            (0x2, 0x040b, CompletionClass::Elsewhere),
            (0x2, 0x040c, CompletionClass::Elsewhere),
            (0x2, 0x0800, failed(IoError::PathLost)),
            (0x2, 0x3a00, failed(IoError::Medium)),
            (0x3, 0x1100, failed(IoError::Medium)),
            (0x4, 0x4400, failed(IoError::Medium)),
            (0x5, 0x2000, CompletionClass::Illegal),
            (0x5, 0x2400, CompletionClass::Illegal),
            (0x5, 0x2100, failed(IoError::OutOfRange)),
            (0x5, 0x2500, failed(IoError::PathLost)),
            (0x6, 0x2900, CompletionClass::Again),
            (0x6, 0x2a09, CompletionClass::Again),
            (0x7, 0x2700, failed(IoError::ReadOnly)),
            (0x7, 0x2707, failed(IoError::NoSpace)),
            (0xb, 0x0000, CompletionClass::Again),
            (0xb, 0x5503, CompletionClass::Later(IoError::NoMemory)),
            (0xe, 0x1d00, failed(IoError::Medium)),
        ];
        for (key, asc, class) in table {
            let code = SenseCode { key: SenseKey(key), asc: Asc(asc) };
            assert_eq!(of(ScsiStatus::CHECK_CONDITION, Some(code)), class, "{code}");
        }
    }
}
