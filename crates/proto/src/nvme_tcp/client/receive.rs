//! Receives PDUs and places read data.
//!
//! ```text
//!   Head ──capsule, R2T, complete short C2HData──▶ done
//!    └──── long C2HData ──▶ Placing, directly into the I/O's memory ──▶ Tail: digest ──▶ done
//! ```
//! A short read without its own buffer borrows the receive buffer if that holds all of its data;
//! otherwise data is copied. Data may arrive in any order, each byte once. A wrong data digest does
//! not end the connection: the command fails and is sent again (TCP Transport 1.0 §3.5.2).

use super::link::{NvmeStreamState, TcpHostLink};
use super::pdu::{self, ControllerViolation, NvmeTcpHeader, ParsedNvmePdu};
use crate::digest;
use crate::fabrics::host::{Commands, DataTransfer};
use crate::initiator::coverage::RangeError;
use crate::slots::SlotKey;
use blockmux_volume::{Chunk, Crc32c, SgList};
use blockmux_wire::nvme::status::{NvmeStatus, StatusField};
use blockmux_wire::nvme::{CQE_LEN, Cqe};
use blockmux_wire::nvmeof::tcp::{
    DATA_LEN, DIGEST_LEN, Data, FLAG_LAST, FLAG_SUCCESS, FatalError, NvmeTcpR2t, PduType,
};
use zerocopy::{FromZeros, transmute_ref};

/// Result of a step.
enum ReceiveStep {
    Took(usize),
    Incomplete,
}

impl TcpHostLink {
    /// Handles the PDUs in `input` from `at` on; returns the offset where it stopped.
    #[inline]
    pub(super) fn receive(
        &mut self,
        input: &Chunk,
        mut at: usize,
        commands: &mut impl Commands,
    ) -> Result<usize, ControllerViolation> {
        let bytes = input.unread();
        loop {
            let rest = bytes.get(at..).unwrap_or_default();
            let step = match &self.stream_state {
                NvmeStreamState::Head(_) => self.on_head(input, at, rest, commands)?,
                NvmeStreamState::Placing { .. } => ReceiveStep::Incomplete,
                NvmeStreamState::Tail { .. } => self.on_tail(rest, commands)?,
            };
            match step {
                ReceiveStep::Took(len) => at = at.saturating_add(len),
                ReceiveStep::Incomplete => return Ok(at),
            }
        }
    }

    /// Handles the end of placed data ([`NvmeStreamState::Placing`]).
    pub(super) fn placed(&mut self, commands: &mut impl Commands) -> Result<(), ControllerViolation> {
        match std::mem::replace(&mut self.stream_state, NvmeStreamState::Head(DATA_LEN)) {
            NvmeStreamState::Placing { header, key, place } => {
                if !self.parameters.digests.data {
                    return on_data(commands, key, transmute_ref!(&header));
                }
                let mut crc = Crc32c::default();
                crc.add_list(&place);
                self.stream_state = NvmeStreamState::Tail { header, key, crc };
            }
            other => self.stream_state = other,
        }
        Ok(())
    }

    #[inline]
    fn on_head(
        &mut self,
        input: &Chunk,
        at: usize,
        rest: &[u8],
        commands: &mut impl Commands,
    ) -> Result<ReceiveStep, ControllerViolation> {
        if let Some(header) = rest.first_chunk() {
            self.last_header = *header;
        }
        let head = match pdu::parse(rest, self.parameters.digests)? {
            ParsedNvmePdu::Incomplete(len) => {
                self.stream_state = NvmeStreamState::Head(len);
                return Ok(ReceiveStep::Incomplete);
            }
            ParsedNvmePdu::Head(head) => head,
        };
        let whole = head.data_end(self.parameters.digests);
        match head.kind {
            PduType::CAPSULE_RESP => on_response(commands, &head.as_response().cqe)?,
            PduType::R2T => self.on_r2t(head.as_r2t(), commands)?,
            _ => return self.on_data_head(input, at, rest, &head, commands),
        }
        self.stream_state = NvmeStreamState::Head(DATA_LEN);
        Ok(ReceiveStep::Took(whole))
    }

    /// Handles the header of C2HData, with all its data if that is short.
    #[inline]
    fn on_data_head(
        &mut self,
        input: &Chunk,
        at: usize,
        rest: &[u8],
        head: &NvmeTcpHeader,
        commands: &mut impl Commands,
    ) -> Result<ReceiveStep, ControllerViolation> {
        let whole = head.data_end(self.parameters.digests);
        let end = head.data_at.saturating_add(head.data_len);
        let data = match rest.get(head.data_at..end) {
            Some(data) if rest.len() >= whole => data,
            _ if head.data_len <= WHOLE_DATA => {
                self.stream_state = NvmeStreamState::Head(whole);
                return Ok(ReceiveStep::Incomplete);
            }
            // Padding before the data is consumed with the header.
            _ if rest.len() < head.data_at => {
                self.stream_state = NvmeStreamState::Head(head.data_at);
                return Ok(ReceiveStep::Incomplete);
            }
            _ => {
                let key = check_data(commands, head.as_data())?;
                let place = place(commands, key, head.as_data())?;
                self.stream_state = NvmeStreamState::Placing { header: head.header, key, place };
                return Ok(ReceiveStep::Took(head.data_at));
            }
        };
        let key = check_data(commands, head.as_data())?;
        self.stream_state = NvmeStreamState::Head(DATA_LEN);
        let is_right = !self.parameters.digests.data || rest.get(end..whole) == Some(&digest::of(data)[..]);
        if !is_right {
            spoil(commands, key);
        } else if commands.can_borrow(key, data.len()) {
            commands.attach_borrowed(key, input.slice(at.saturating_add(head.data_at), data.len()));
        } else {
            place(commands, key, head.as_data())?.copy_from(data);
        }
        on_data(commands, key, head.as_data())?;
        Ok(ReceiveStep::Took(whole))
    }

    fn on_tail(
        &mut self,
        rest: &[u8],
        commands: &mut impl Commands,
    ) -> Result<ReceiveStep, ControllerViolation> {
        let NvmeStreamState::Tail { header, key, crc } = &self.stream_state else {
            return Ok(ReceiveStep::Incomplete);
        };
        let Some(sent) = rest.first_chunk::<DIGEST_LEN>() else { return Ok(ReceiveStep::Incomplete) };
        let (header, key, is_right) = (*header, *key, crc.to_le_bytes() == *sent);
        self.stream_state = NvmeStreamState::Head(DATA_LEN);
        if !is_right {
            spoil(commands, key);
        }
        on_data(commands, key, transmute_ref!(&header))?;
        Ok(ReceiveStep::Took(DIGEST_LEN))
    }

    /// Handles R2T. All requested data is sent immediately, so that no R2T is ever outstanding
    /// here.
    fn on_r2t(&mut self, r2t: &NvmeTcpR2t, commands: &mut impl Commands) -> Result<(), ControllerViolation> {
        let reference = "TCP Transport §3.6.2.10, R2T";
        let Some(key) = commands.find(r2t.cccid.get()) else {
            return Err(ControllerViolation::field(
                "requested data of a command that does not exist",
                8,
                reference,
            ));
        };
        let Some((progress, DataTransfer::Out(len))) = commands.transport(key) else {
            return Err(ControllerViolation::field(
                "requested data of a command that sends none",
                8,
                reference,
            ));
        };
        let (from, asked) = (r2t.r2to.get(), r2t.r2tl.get());
        let out_of_range =
            |what| ControllerViolation::new(what, FatalError::DATA_TRANSFER_OUT_OF_RANGE, reference);
        let Some(end) = from.checked_add(asked).filter(|end| asked > 0 && *end <= len) else {
            return Err(out_of_range("requested data beyond the command's data"));
        };
        if progress.moved.add(from, end).is_err() {
            return Err(out_of_range("requested the same data twice, or in too many pieces"));
        }
        self.send_data(key, r2t.ttag.get(), from, end, commands);
        Ok(())
    }
}

/// Handles a completion.
#[inline]
fn on_response(commands: &mut impl Commands, cqe: &Cqe) -> Result<(), ControllerViolation> {
    let Some(key) = commands.find(cqe.cid.get()) else {
        let offset = (DATA_LEN - CQE_LEN + 12) as u32;
        return Err(ControllerViolation::field(
            "completed a command that does not exist",
            offset,
            "NVMe Base §3.3.3.2",
        ));
    };
    commands.finish(key, cqe);
    Ok(())
}

/// Checks C2HData before its data is used.
#[inline]
fn check_data(commands: &mut impl Commands, data: &Data) -> Result<SlotKey, ControllerViolation> {
    let Some(key) = commands.find(data.cccid.get()) else {
        return Err(ControllerViolation::field("sent data of a command that does not exist", 8, C2H_DATA));
    };
    let Some((progress, DataTransfer::In(len))) = commands.transport(key) else {
        return Err(ControllerViolation::field("sent data of a command that receives none", 8, C2H_DATA));
    };
    let from = data.datao.get();
    let out_of_range =
        |what| ControllerViolation::new(what, FatalError::DATA_TRANSFER_OUT_OF_RANGE, C2H_DATA);
    let Some(end) = from.checked_add(data.datal.get()).filter(|end| *end <= len) else {
        return Err(out_of_range("sent more data than was requested"));
    };
    if data.common.flags & (FLAG_SUCCESS | FLAG_LAST) == FLAG_SUCCESS {
        return Err(ControllerViolation::field("set SUCCESS before the last data", 1, C2H_DATA));
    }
    match progress.moved.add(from, end) {
        Ok(()) => Ok(key),
        Err(RangeError::Overlap) => Err(out_of_range("sent the same data twice")),
        Err(RangeError::TooScattered) => {
            Err(out_of_range("sent data in too many pieces with gaps between them"))
        }
    }
}

/// The memory for the data of a checked C2HData.
#[inline]
fn place(commands: &mut impl Commands, key: SlotKey, data: &Data) -> Result<SgList, ControllerViolation> {
    let (from, len) = (data.datao.get() as usize, data.datal.get() as usize);
    let Some((list, base)) = commands.data_in(key) else {
        return Err(ControllerViolation::field("sent data of a command that receives none", 8, C2H_DATA));
    };
    if base == 0 && from == 0 && list.len() == len {
        return Ok(list.clone());
    }
    Ok(list.slice(base.saturating_add(from), len))
}

/// Handles the end of a C2HData; with the SUCCESS flag it also completes the command.
#[inline]
fn on_data(commands: &mut impl Commands, key: SlotKey, data: &Data) -> Result<(), ControllerViolation> {
    if data.common.flags & FLAG_SUCCESS != 0 {
        let status = StatusField::new(NvmeStatus::SUCCESSFUL_COMPLETION);
        commands.finish(key, &Cqe { cid: data.cccid, status, ..Cqe::new_zeroed() });
    }
    Ok(())
}

/// Marks a command as corrupt because of a wrong digest, so that a success is not accepted.
#[cold]
fn spoil(commands: &mut impl Commands, key: SlotKey) {
    if let Some((progress, _)) = commands.transport(key) {
        progress.is_corrupt = true;
    }
}

const C2H_DATA: &str = "TCP Transport §3.6.2.9, C2HData";
/// Data of up to this many bytes is received into the receive buffer: one large receive for many
/// PDUs costs less than one for each. With header, padding and digests it is at most `MAX_DEMAND`.
const WHOLE_DATA: usize = 64 << 10;
