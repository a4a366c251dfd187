//! Answers to commands: data-in cut into PDUs, and status (RFC 7143 §11.4, §11.7).

use super::replies::ResponseSender;
use super::retained::{RetainedPdu, SentStatus};
use super::sequence::CommandWindow;
use crate::scsi::{Response, ScsiStatus};
use blockmux_wire::iscsi::scsi::*;
use blockmux_wire::iscsi::{FLAG_FINAL, IscsiOpcode, RESERVED_TAG, U24};
use smallvec::SmallVec;
use std::ops::Range;
use zerocopy::transmute_ref;

/// What a command's end is measured by.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpectedTransfer {
    pub(super) itt: u32,
    pub(super) lun: [u8; 8],
    /// How much data-in the initiator has room for, in bytes; `None`: it reads nothing.
    pub(super) data_in: Option<u32>,
    /// How much data-out it has, in bytes; `None`: it writes nothing.
    pub(super) data_out: Option<u32>,
    /// R2Ts sent.
    pub(super) r2ts: u32,
}

/// How an answer's data-in is cut into PDUs, and what number its status has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    /// DataSN and offset of the first PDU; what is before them was cut otherwise, and has come.
    pub(super) first: (u32, usize),
    /// Of all data, in bytes.
    pub(super) len: usize,
    pub(super) max_burst: usize,
    pub(super) max_segment: usize,
    /// The status is in the last of them.
    pub(super) collapses: bool,
    pub(super) stat_sn: u32,
    /// Of the R-Data SNACK that was obeyed last, or 0.
    pub(super) snack_tag: u32,
    /// The end of each burst asks for an acknowledgement.
    pub(super) asks: bool,
    /// Data-In PDUs before this one were acknowledged.
    pub(super) confirmed: u32,
}

/// One Data-In PDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DataInPart {
    data_sn: u32,
    offset: usize,
    len: usize,
    ends_burst: bool,
    is_last: bool,
}

impl Cut {
    #[inline]
    fn parts(self) -> impl Iterator<Item = DataInPart> {
        let (mut data_sn, mut offset) = self.first;
        let mut burst: usize = 0;
        std::iter::from_fn(move || {
            if offset >= self.len {
                return None;
            }
            let left_in_burst = self.max_burst.saturating_sub(burst);
            let len = self.len.saturating_sub(offset).min(self.max_segment).min(left_in_burst).max(1);
            let is_last = offset.saturating_add(len) == self.len;
            burst = burst.saturating_add(len);
            let ends_burst = is_last || burst >= self.max_burst;
            let part = DataInPart { data_sn, offset, len, ends_burst, is_last };
            if ends_burst {
                burst = 0;
            }
            offset = offset.saturating_add(len);
            data_sn = data_sn.wrapping_add(1);
            Some(part)
        })
    }

    /// The DataSN behind the last.
    pub(super) fn end(self) -> u32 {
        self.parts().last().map_or(self.first.0, |part| part.data_sn.wrapping_add(1))
    }

    /// The data from `data_sn` on, in segments of another length, with its status apart.
    pub(super) fn again(self, data_sn: u32, max_segment: usize, snack_tag: u32) -> Cut {
        let offset = self.parts().find(|part| part.data_sn == data_sn).map_or(self.len, |part| part.offset);
        let first = (data_sn, offset);
        Cut { first, max_segment, collapses: false, snack_tag, confirmed: data_sn, ..self }
    }
}

impl ResponseSender {
    /// Ends a command: data with the status in its last PDU if that can be, else a response.
    #[inline]
    pub(super) fn command(&mut self, window: CommandWindow, expected: ExpectedTransfer, response: &Response) {
        let cut = Cut { stat_sn: self.next_stat_sn(), ..self.cut(expected, response) };
        let len = cut.len;
        let data_sns = self.data_in(window, expected, response, cut, 0..u32::MAX);
        if !cut.collapses {
            self.status(window, expected, response, cut, data_sns);
        }
        if let Some(kept) = &mut self.retained
            && (len == 0 || !self.pool.is_short())
        {
            let outcome = SentStatus { expected, response: response.clone(), cut };
            kept.keep(cut.stat_sn, RetainedPdu::Command(outcome));
        }
    }

    /// The answer to a command that cannot be sent here.
    pub(super) fn outcome(&self, expected: ExpectedTransfer, response: &Response) -> SentStatus {
        SentStatus { expected, response: response.clone(), cut: self.cut(expected, response) }
    }

    /// Ends a command over RDMA: its data goes to where the initiator wants it, then its response
    /// (RFC 5047, Put_Data and Send_Control).
    pub(super) fn command_over_rdma(
        &mut self,
        window: CommandWindow,
        slot: usize,
        expected: ExpectedTransfer,
        response: &mut Response,
    ) {
        let cut = Cut { stat_sn: self.next_stat_sn(), ..self.cut(expected, response) };
        // Neither Data-In nor R2T was sent.
        self.status(window, ExpectedTransfer { r2ts: 0, ..expected }, response, cut, 0);
        if let (Some(mover), Some(message)) = (&mut self.mover, self.sender.back()) {
            let data_in = std::mem::take(&mut response.data_in);
            (message.data_in, message.closes) = mover.put(slot, data_in, cut.len);
        }
    }

    /// How an answer is cut that has no number yet.
    #[inline]
    fn cut(&self, expected: ExpectedTransfer, response: &Response) -> Cut {
        let room = expected.data_in.unwrap_or(0) as usize;
        let len = response.data_in.len().min(room);
        Cut {
            first: (0, 0),
            len,
            max_burst: self.max_burst,
            max_segment: self.max_segment,
            collapses: len > 0 && response.status == ScsiStatus::GOOD && expected.data_out.is_none(),
            stat_sn: 0,
            snack_tag: 0,
            asks: self.retained.is_some(),
            confirmed: 0,
        }
    }

    /// The response that ends a command, apart from its data.
    pub(super) fn status(
        &mut self,
        window: CommandWindow,
        expected: ExpectedTransfer,
        response: &Response,
        cut: Cut,
        data_sns: u32,
    ) {
        let residual = Residual::of(expected, response);
        let mut data = SmallVec::<[u8; 64]>::new();
        if let Some(sense) = &response.sense {
            let sense = sense.to_bytes();
            data.extend_from_slice(&(sense.len() as u16).to_be_bytes());
            data.extend_from_slice(&sense);
        }
        let pdu = ScsiResponse {
            opcode: IscsiOpcode::SCSI_RESPONSE.0,
            flags: FLAG_FINAL | residual.flags | residual.bidirectional_flags,
            response: blockmux_wire::iscsi::scsi::Response::COMMAND_COMPLETED_AT_TARGET.0,
            status: response.status.0,
            total_ahs_length: 0,
            data_segment_length: U24::new(data.len() as u32),
            status_qualifier: 0.into(),
            reserved: [0; 6],
            initiator_task_tag: expected.itt.into(),
            snack_tag: cut.snack_tag.into(),
            stat_sn: cut.stat_sn.into(),
            exp_cmd_sn: window.exp_cmd_sn().into(),
            max_cmd_sn: window.max_cmd_sn().into(),
            exp_data_sn: data_sns.wrapping_add(expected.r2ts).into(),
            bidirectional_read_residual_count: residual.bidirectional_count.into(),
            residual_count: residual.count.into(),
        };
        self.send(transmute_ref!(&pdu), &data);
    }

    /// Sends data in the PDUs of `cut` whose DataSN is `wanted`; returns the DataSN behind the last
    /// of all.
    #[inline]
    pub(super) fn data_in(
        &mut self,
        window: CommandWindow,
        expected: ExpectedTransfer,
        response: &Response,
        cut: Cut,
        wanted: Range<u32>,
    ) -> u32 {
        let mut end = cut.first.0;
        for part in cut.parts() {
            end = part.data_sn.wrapping_add(1);
            if !wanted.contains(&part.data_sn) {
                continue;
            }
            let mut pdu = DataIn {
                opcode: IscsiOpcode::DATA_IN.0,
                flags: if part.ends_burst { FLAG_FINAL } else { 0 },
                reserved: 0,
                status: 0,
                total_ahs_length: 0,
                data_segment_length: U24::new(part.len as u32),
                lun: [0; 8],
                initiator_task_tag: expected.itt.into(),
                target_transfer_tag: RESERVED_TAG.into(),
                stat_sn: 0.into(),
                exp_cmd_sn: window.exp_cmd_sn().into(),
                max_cmd_sn: window.max_cmd_sn().into(),
                data_sn: part.data_sn.into(),
                buffer_offset: (part.offset as u32).into(),
                residual_count: 0.into(),
            };
            if part.is_last && cut.collapses {
                let residual = Residual::of(expected, response);
                pdu.flags |= FLAG_STATUS | residual.flags;
                pdu.status = response.status.0;
                pdu.stat_sn = cut.stat_sn.into();
                pdu.residual_count = residual.count.into();
            } else if part.ends_burst && !part.is_last && cut.asks && cut.stat_sn != RESERVED_TAG {
                // Its answer will say the number of the status that is to come.
                pdu.flags |= FLAG_ACKNOWLEDGE;
                (pdu.target_transfer_tag, pdu.lun) = (cut.stat_sn.into(), expected.lun);
            }
            self.send_borrowed(transmute_ref!(&pdu), &response.data_in, (part.offset, part.len));
        }
        end
    }
}

/// What a command moved less or more than expected (RFC 7143 §11.4.5).
struct Residual {
    flags: u8,
    count: u32,
    bidirectional_flags: u8,
    bidirectional_count: u32,
}

impl Residual {
    fn of(expected: ExpectedTransfer, response: &Response) -> Residual {
        // Of a bidirectional command, the count is of its data-out.
        let main = expected.data_out.or(expected.data_in).unwrap_or(0);
        let (flags, count) = match (expected.data_out, expected.data_in) {
            // No command of the device server moves both ways: only one of them is its transfer.
            (Some(_), Some(_)) if !response.data_in.is_empty() => difference(0, main),
            _ => difference(response.transfer_len, main),
        };
        let (mut bidirectional_flags, mut bidirectional_count) = (0, 0);
        if let (Some(_), Some(data_in)) = (expected.data_out, expected.data_in) {
            let (flags, count) = difference(response.data_in.len() as u64, data_in);
            // The o and u bits lie two places above O and U.
            (bidirectional_flags, bidirectional_count) = (flags << 2, count);
        }
        Residual { flags, count, bidirectional_flags, bidirectional_count }
    }
}

/// O or U, and by how much.
fn difference(moved: u64, expected: u32) -> (u8, u32) {
    let expected = u64::from(expected);
    let count = u32::try_from(moved.abs_diff(expected)).unwrap_or(u32::MAX);
    match moved.cmp(&expected) {
        std::cmp::Ordering::Less => (FLAG_UNDERFLOW, count),
        std::cmp::Ordering::Equal => (0, 0),
        std::cmp::Ordering::Greater => (FLAG_OVERFLOW, count),
    }
}
