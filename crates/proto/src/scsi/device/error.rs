//! Translation of volume errors to sense data.

use super::task::TaskFailure;
use crate::scsi::sense::Sense;
use crate::volume_state::{Fenced, NotChanged};
use blockmux_volume::{IoError, Op};
use blockmux_wire::scsi::sense::{Asc, SenseKey};

/// Sense data for an operation `op` that failed with `error`.
pub(super) fn from_io_error(error: IoError, op: Op) -> Sense {
    let (key, asc) = match (error, op) {
        (IoError::OutOfRange, _) => (SenseKey::ILLEGAL_REQUEST, Asc::LOGICAL_BLOCK_ADDRESS_OUT_OF_RANGE),
        (IoError::Misaligned | IoError::BadLength | IoError::Unsupported, _) => {
            (SenseKey::ILLEGAL_REQUEST, Asc::INVALID_FIELD_IN_CDB)
        }
        // No sense data expresses a RESERVATION CONFLICT at another device.
        (IoError::Reserved, _) => (SenseKey::ILLEGAL_REQUEST, Asc::ACCESS_DENIED_NO_ACCESS_RIGHTS),
        (IoError::ReadOnly, _) => (SenseKey::DATA_PROTECT, Asc::WRITE_PROTECTED),
        // SBC-4, thin provisioning: the unit is out of space.
        (IoError::NoSpace, _) => (SenseKey::DATA_PROTECT, Asc::SPACE_ALLOCATION_FAILED_WRITE_PROTECT),
        (IoError::Medium, op) if op.is_write() || op == Op::Flush => {
            (SenseKey::MEDIUM_ERROR, Asc::WRITE_ERROR)
        }
        (IoError::Medium, _) => (SenseKey::MEDIUM_ERROR, Asc::UNRECOVERED_READ_ERROR),
        (IoError::NoMemory, _) => (SenseKey::ABORTED_COMMAND, Asc::INSUFFICIENT_RESOURCES),
        (IoError::PathLost, _) => (SenseKey::NOT_READY, Asc::LOGICAL_UNIT_COMMUNICATION_FAILURE),
        (IoError::Aborted, _) => (SenseKey::ABORTED_COMMAND, Asc::NO_ADDITIONAL_SENSE_INFORMATION),
        (IoError::ShuttingDown, _) => (SenseKey::NOT_READY, Asc::BECOMING_READY),
        // Multipath drivers use another path.
        (IoError::Fenced, _) => (SenseKey::NOT_READY, Asc::TARGET_PORT_IN_UNAVAILABLE_STATE),
    };
    Sense::new(key, asc)
}

impl From<NotChanged<TaskFailure>> for TaskFailure {
    fn from(error: NotChanged<TaskFailure>) -> TaskFailure {
        match error {
            NotChanged::Refused(failure) => failure,
            NotChanged::NotStored => Sense::new(SenseKey::HARDWARE_ERROR, Asc::WRITE_ERROR).into(),
            NotChanged::Standby => Sense::new(SenseKey::NOT_READY, Asc::TARGET_PORT_IN_STANDBY_STATE).into(),
            NotChanged::Fenced => Fenced.into(),
        }
    }
}

impl From<Fenced> for TaskFailure {
    fn from(_: Fenced) -> TaskFailure {
        from_io_error(IoError::Fenced, Op::Read).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_volume_error_has_its_sense() {
        let write = Op::Write { fua: false };
        let table = [
            (IoError::OutOfRange, Op::Read, 0x05, 0x2100),
            (IoError::Misaligned, Op::Read, 0x05, 0x2400),
            (IoError::BadLength, write, 0x05, 0x2400),
            (IoError::Unsupported, Op::Prefetch, 0x05, 0x2400),
            (IoError::ReadOnly, write, 0x07, 0x2700),
            (IoError::Reserved, write, 0x05, 0x2002),
            (IoError::NoSpace, write, 0x07, 0x2707),
            (IoError::Medium, Op::Read, 0x03, 0x1100),
            (IoError::Medium, write, 0x03, 0x0c00),
            (IoError::Medium, Op::Flush, 0x03, 0x0c00),
            (IoError::NoMemory, Op::Read, 0x0b, 0x5503),
            (IoError::PathLost, Op::Read, 0x02, 0x0800),
            (IoError::Aborted, Op::Read, 0x0b, 0x0000),
            (IoError::ShuttingDown, Op::Read, 0x02, 0x0401),
            (IoError::Fenced, write, 0x02, 0x040c),
        ];
        for (error, op, key, asc) in table {
            let sense = from_io_error(error, op);
            assert_eq!((sense.key.0, sense.asc.0), (key, asc), "{error:?} of {op:?}");
        }
    }
}
