//! Parses the messages of a target: SRP_RSP and the target's own requests.

use super::violation;
use crate::driver::session::ProtocolError;
use crate::scsi::ScsiStatus;
use crate::scsi::initiator::{DataTransfer, ScsiOutcome};
use blockmux_volume::Seg;
use blockmux_wire::srp::{ResponseCode, ResponseFlags, SrpResponse, TaskManagementResponseData};
use smallvec::SmallVec;
use zerocopy::{FromBytes, IntoBytes};

/// Result of a command.
pub(super) struct CommandOutcome {
    status: ScsiStatus,
    /// Sense data; empty for most commands.
    sense: SenseData,
    /// Length of the transferred data, in bytes.
    moved: u32,
}

/// Sense data. The part that the initiator's queue reads fits without an allocation.
type SenseData = SmallVec<[u8; 32]>;

impl CommandOutcome {
    /// Parses the response to a command with this data transfer.
    ///
    /// # Errors
    /// If its lengths do not match.
    #[inline]
    pub(super) fn read(
        response: &SrpResponse,
        message: &Seg,
        transfer: DataTransfer,
    ) -> Result<CommandOutcome, ProtocolError> {
        let (code, sense) = data_of(response, message)?;
        let left_out = |flag: u8, count: u32, len: u32| {
            let residual = if response.flags & flag == 0 { 0 } else { count };
            len.checked_sub(residual).ok_or(violation("reported a residual longer than the command's data"))
        };
        let moved = match transfer {
            DataTransfer::Nothing => 0,
            DataTransfer::In(len) => left_out(ResponseFlags::DIUNDER, response.data_in_res_cnt.get(), len)?,
            DataTransfer::Out(len) => left_out(ResponseFlags::DOUNDER, response.data_out_res_cnt.get(), len)?,
        };
        if code.is_some_and(|code| code != ResponseCode::NO_FAILURE) {
            // The response has no SCSI status then, so the result of the command is unknown.
            let (status, sense) = (ScsiStatus::CHECK_CONDITION, SenseData::new());
            return Ok(CommandOutcome { status, sense, moved: 0 });
        }
        Ok(CommandOutcome { status: ScsiStatus(response.status), sense, moved })
    }

    #[inline]
    pub(super) fn as_scsi(&self) -> ScsiOutcome<'_> {
        ScsiOutcome { status: self.status, sense: &self.sense, moved: self.moved }
    }
}

/// Parses the response to a task management function.
///
/// # Errors
/// If the response has no response data.
pub(super) fn function_code(response: &SrpResponse, message: &Seg) -> Result<ResponseCode, ProtocolError> {
    let (code, _) = data_of(response, message)?;
    code.ok_or(violation("answered a task management function without response data"))
}

/// RSP_CODE, if the response has response data, and the sense data.
#[inline]
fn data_of(
    response: &SrpResponse,
    message: &Seg,
) -> Result<(Option<ResponseCode>, SenseData), ProtocolError> {
    let has = |flag: u8| response.flags & flag != 0;
    if !has(ResponseFlags::RSPVALID | ResponseFlags::SNSVALID) {
        return Ok((None, SenseData::new()));
    }
    let len_of = |flag: u8, len: u32| if has(flag) { len as usize } else { 0 };
    let data_len = len_of(ResponseFlags::RSPVALID, response.resp_data_len.get());
    let sense_len = len_of(ResponseFlags::SNSVALID, response.sense_data_len.get());
    let begin = size_of::<SrpResponse>().saturating_add(data_len);
    if begin.saturating_add(sense_len) > message.len() {
        return Err(TOO_SHORT);
    }
    let mut code = None;
    if has(ResponseFlags::RSPVALID) {
        if data_len < size_of::<TaskManagementResponseData>() {
            return Err(TOO_SHORT);
        }
        let data: TaskManagementResponseData = read(message, size_of::<SrpResponse>())?;
        code = Some(ResponseCode(data.rsp_code));
    }
    let mut sense = SenseData::from_elem(0, sense_len);
    message.slice(begin, sense_len).copy_to(&mut sense);
    Ok((code, sense))
}

/// Parses a structure at an offset of a message.
///
/// # Errors
/// If the message is too short.
#[inline]
pub(super) fn read<T: FromBytes + IntoBytes>(message: &Seg, offset: usize) -> Result<T, ProtocolError> {
    let mut value = T::new_zeroed();
    if message.len() < offset.saturating_add(size_of::<T>()) {
        return Err(TOO_SHORT);
    }
    message.slice(offset, size_of::<T>()).copy_to(value.as_mut_bytes());
    Ok(value)
}

pub(super) const TOO_SHORT: ProtocolError =
    violation("sent an information unit that is shorter than its fields say");

#[cfg(test)]
mod tests {
    use super::*;

    fn response() -> SrpResponse {
        SrpResponse { flags: 0, ..SrpResponse::default() }
    }

    fn outcome(response: SrpResponse, rest: &[u8], transfer: DataTransfer) -> (u8, Vec<u8>, u32) {
        let message = Seg::from_slice(&[response.as_bytes(), rest].concat());
        let outcome = CommandOutcome::read(&response, &message, transfer).unwrap();
        (outcome.status.0, outcome.sense.to_vec(), outcome.moved)
    }

    fn violation_in(response: SrpResponse, rest: &[u8], transfer: DataTransfer) -> &'static str {
        let message = Seg::from_slice(&[response.as_bytes(), rest].concat());
        CommandOutcome::read(&response, &message, transfer).err().unwrap().what
    }

    #[test]
    fn residual_counts_give_the_transferred_length() {
        let rest = |flags, out: u32, data_in: u32| SrpResponse {
            flags,
            data_out_res_cnt: out.into(),
            data_in_res_cnt: data_in.into(),
            ..response()
        };
        assert_eq!(outcome(response(), &[], DataTransfer::In(512)), (0, vec![], 512));
        let under = ResponseFlags::DIUNDER | ResponseFlags::DOUNDER;
        assert_eq!(outcome(rest(under, 9, 12), &[], DataTransfer::In(512)).2, 500);
        assert_eq!(outcome(rest(under, 9, 12), &[], DataTransfer::Out(512)).2, 503);
        assert_eq!(outcome(rest(0, 9, 12), &[], DataTransfer::Out(512)).2, 512);
        let over = rest(ResponseFlags::DIOVER, 0, 100);
        assert_eq!(outcome(over, &[], DataTransfer::In(512)).2, 512);
        assert!(violation_in(rest(under, 0, 513), &[], DataTransfer::In(512)).contains("residual longer"));
    }

    #[test]
    fn sense_data_follows_response_data() {
        let both = SrpResponse {
            flags: ResponseFlags::RSPVALID | ResponseFlags::SNSVALID,
            status: 2,
            resp_data_len: 4.into(),
            sense_data_len: 3.into(),
            ..response()
        };
        let data = [0, 0, 0, 0, 7, 8, 9];
        assert_eq!(outcome(both, &data, DataTransfer::Nothing), (2, vec![7, 8, 9], 0));
        assert!(violation_in(both, &data[..6], DataTransfer::Nothing).contains("shorter"));
        let huge = SrpResponse { resp_data_len: u32::MAX.into(), sense_data_len: u32::MAX.into(), ..both };
        assert!(violation_in(huge, &data, DataTransfer::Nothing).contains("shorter"));
        let none = SrpResponse { resp_data_len: 3.into(), ..both };
        assert!(violation_in(none, &data, DataTransfer::Nothing).contains("shorter"));
        // A length without its flag is ignored.
        let flagless = SrpResponse { flags: 0, ..huge };
        assert_eq!(outcome(flagless, &data, DataTransfer::Nothing), (2, vec![], 0));
    }

    #[test]
    fn a_response_code_replaces_the_status() {
        let failed = SrpResponse { flags: ResponseFlags::RSPVALID, resp_data_len: 4.into(), ..response() };
        assert_eq!(outcome(failed, &[0, 0, 0, 2], DataTransfer::In(8)), (2, vec![], 0));
        let message = Seg::from_slice(&[failed.as_bytes(), &[0, 0, 0, 5]].concat());
        assert_eq!(function_code(&failed, &message), Ok(ResponseCode::FUNCTION_FAILED));
        assert!(function_code(&response(), &message).unwrap_err().what.contains("without response data"));
    }
}
