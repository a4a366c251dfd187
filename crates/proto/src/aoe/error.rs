//! Translation between a volume's errors and those of ATA and AoE, in both directions.

use blockmux_volume::IoError;
use blockmux_wire::aoe::ErrorCode;
use blockmux_wire::ata::{
    ATA_ERROR_ABRT, ATA_ERROR_IDNF, ATA_ERROR_UNC, ATA_STATUS_DF, ATA_STATUS_DRDY, ATA_STATUS_ERR,
};

/// The reply to a command that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AoeRefusal {
    /// ATA registers: status and error.
    Registers { status: u8, error: u8 },
    /// An AoE error code.
    Code(ErrorCode),
    /// No reply; the initiator retransmits the command.
    Silence,
}

/// The reply with which a target reports `error`.
pub(super) fn refusal(error: IoError, is_write: bool) -> AoeRefusal {
    let registers = |error| AoeRefusal::Registers { status: ATA_STATUS_DRDY | ATA_STATUS_ERR, error };
    match error {
        IoError::OutOfRange => registers(ATA_ERROR_IDNF),
        IoError::Misaligned | IoError::BadLength | IoError::Unsupported | IoError::Aborted => {
            registers(ATA_ERROR_ABRT)
        }
        // In the reply to a write, this bit means that the medium is write-protected.
        IoError::ReadOnly => registers(ATA_ERROR_ABRT | ATA_ERROR_UNC),
        IoError::Medium if !is_write => registers(ATA_ERROR_UNC),
        IoError::Medium | IoError::NoSpace => {
            AoeRefusal::Registers { status: ATA_STATUS_DRDY | ATA_STATUS_DF, error: 0 }
        }
        IoError::Reserved => AoeRefusal::Code(ErrorCode::TARGET_IS_RESERVED),
        IoError::PathLost | IoError::ShuttingDown | IoError::Fenced => {
            AoeRefusal::Code(ErrorCode::DEVICE_UNAVAILABLE)
        }
        IoError::NoMemory => AoeRefusal::Silence,
    }
}

/// The I/O error for the registers of a reply; `Ok` if the command succeeded.
pub(super) fn of_registers(status: u8, error: u8, is_write: bool) -> Result<(), IoError> {
    if status & ATA_STATUS_DF != 0 {
        return Err(IoError::Medium);
    }
    if status & ATA_STATUS_ERR == 0 {
        return Ok(());
    }
    Err(match error {
        _ if error & ATA_ERROR_IDNF != 0 => IoError::OutOfRange,
        _ if error & ATA_ERROR_UNC != 0 && is_write => IoError::ReadOnly,
        _ if error & ATA_ERROR_UNC != 0 => IoError::Medium,
        _ if error & ATA_ERROR_ABRT != 0 => IoError::Unsupported,
        _ => IoError::Medium,
    })
}

/// The I/O error for an AoE error code.
pub(super) fn of_code(code: ErrorCode) -> IoError {
    match code {
        ErrorCode::TARGET_IS_RESERVED => IoError::Reserved,
        ErrorCode::DEVICE_UNAVAILABLE => IoError::PathLost,
        ErrorCode::BAD_ARGUMENT_PARAMETER => IoError::BadLength,
        _ => IoError::Unsupported,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_translated_exactly_or_to_the_nearest_one() {
        use IoError as E;
        let all = [
            (E::OutOfRange, E::OutOfRange),
            (E::Misaligned, E::Unsupported),
            (E::BadLength, E::Unsupported),
            (E::ReadOnly, E::ReadOnly),
            (E::Unsupported, E::Unsupported),
            (E::Reserved, E::Reserved),
            (E::NoSpace, E::Medium),
            (E::Medium, E::Medium),
            (E::PathLost, E::PathLost),
            (E::Aborted, E::Unsupported),
            (E::ShuttingDown, E::PathLost),
            (E::Fenced, E::PathLost),
        ];
        for (sent, arrives) in all {
            let got = match refusal(sent, true) {
                AoeRefusal::Registers { status, error } => of_registers(status, error, true).unwrap_err(),
                AoeRefusal::Code(code) => of_code(code),
                AoeRefusal::Silence => panic!("{sent} is not answered"),
            };
            assert_eq!(got, arrives, "{sent}");
        }
        assert_eq!(refusal(E::NoMemory, true), AoeRefusal::Silence);
        let AoeRefusal::Registers { status, error } = refusal(E::Medium, false) else {
            panic!("it has registers")
        };
        assert_eq!(of_registers(status, error, false), Err(E::Medium));
        assert_eq!(of_registers(ATA_STATUS_DRDY, 0, true), Ok(()));
        assert_eq!(of_registers(0, 0, true), Ok(()), "vblade says nothing else of a flush");
    }
}
