//! Responses to commands: Data-In PDUs and status (RFC 7143 §11.4, §11.7).

use super::replies::ResponseSender;
use super::retained::{RetainedPdu, SentResponse};
use super::sequence::CommandWindow;
use crate::scsi::{Response, ScsiStatus};
use blockmux_wire::iscsi::scsi::*;
use blockmux_wire::iscsi::{FLAG_FINAL, IscsiOpcode, RESERVED_TAG, U24};
use smallvec::SmallVec;
use std::ops::Range;
use zerocopy::transmute_ref;

/// Expected transfer lengths of a command, for the residual counts of its response.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpectedTransfer {
    pub(super) itt: u32,
    pub(super) lun: [u8; 8],
    /// Expected data-in, in bytes; `None` if the command reads nothing.
    pub(super) data_in: Option<u32>,
    /// Expected data-out, in bytes; `None` if the command writes nothing.
    pub(super) data_out: Option<u32>,
    /// Number of R2Ts sent.
    pub(super) r2ts: u32,
}

/// Layout of a response's data-in in PDUs, and the StatSN of its status.
#[derive(Clone, Copy, Debug)]
pub(super) struct DataInLayout {
    /// DataSN and buffer offset of the first PDU. Earlier PDUs had another layout and were
    /// received.
    pub(super) first: (u32, usize),
    /// Length of all data, in bytes.
    pub(super) len: usize,
    pub(super) max_burst: usize,
    pub(super) max_segment: usize,
    /// The last Data-In PDU carries the status (phase collapse).
    pub(super) is_phase_collapsed: bool,
    pub(super) stat_sn: u32,
    /// Tag of the latest R-Data SNACK, or 0.
    pub(super) snack_tag: u32,
    /// The last PDU of each burst requests a DataACK.
    pub(super) requests_ack: bool,
    /// First DataSN that is not acknowledged by a DataACK.
    pub(super) acked_data_sn: u32,
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

impl DataInLayout {
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

    /// The DataSN after the last PDU.
    pub(super) fn end(self) -> u32 {
        self.parts().last().map_or(self.first.0, |part| part.data_sn.wrapping_add(1))
    }

    /// Layout of the data from `data_sn` on with another segment length and a separate status.
    pub(super) fn resegmented(self, data_sn: u32, max_segment: usize, snack_tag: u32) -> DataInLayout {
        let offset = self.parts().find(|part| part.data_sn == data_sn).map_or(self.len, |part| part.offset);
        let first = (data_sn, offset);
        DataInLayout {
            first,
            max_segment,
            is_phase_collapsed: false,
            snack_tag,
            acked_data_sn: data_sn,
            ..self
        }
    }
}

impl ResponseSender {
    /// Ends a command: sends its data with phase collapse if possible, else data and a SCSI
    /// Response.
    #[inline]
    pub(super) fn command(&mut self, window: CommandWindow, expected: ExpectedTransfer, response: &Response) {
        let layout = DataInLayout { stat_sn: self.next_stat_sn(), ..self.layout(expected, response) };
        let len = layout.len;
        let data_sns = self.data_in(window, expected, response, layout, 0..u32::MAX);
        if !layout.is_phase_collapsed {
            self.status(window, expected, response, layout, data_sns);
        }
        if let Some(retained) = &mut self.retained
            && (len == 0 || !self.pool.is_short())
        {
            let sent = SentResponse { expected, response: response.clone(), layout };
            retained.retain(layout.stat_sn, RetainedPdu::Command(sent));
        }
    }

    /// The response of a command that cannot be sent on this connection, for TASK REASSIGN.
    pub(super) fn record(&self, expected: ExpectedTransfer, response: &Response) -> SentResponse {
        SentResponse { expected, response: response.clone(), layout: self.layout(expected, response) }
    }

    /// Ends a command over RDMA: writes its data to the initiator's memory, then sends the SCSI
    /// Response (RFC 5047, Put_Data and Send_Control).
    pub(super) fn command_over_rdma(
        &mut self,
        window: CommandWindow,
        slot: usize,
        expected: ExpectedTransfer,
        response: &mut Response,
    ) {
        let layout = DataInLayout { stat_sn: self.next_stat_sn(), ..self.layout(expected, response) };
        // Neither Data-In nor R2T PDUs were sent.
        self.status(window, ExpectedTransfer { r2ts: 0, ..expected }, response, layout, 0);
        if let (Some(mover), Some(message)) = (&mut self.mover, self.sender.back()) {
            let data_in = std::mem::take(&mut response.data_in);
            (message.data_in, message.invalidates) = mover.put(slot, data_in, layout.len);
        }
    }

    /// Initial layout of a response's data-in, without a StatSN.
    #[inline]
    fn layout(&self, expected: ExpectedTransfer, response: &Response) -> DataInLayout {
        let room = expected.data_in.unwrap_or(0) as usize;
        let len = response.data_in.len().min(room);
        DataInLayout {
            first: (0, 0),
            len,
            max_burst: self.max_burst,
            max_segment: self.max_segment,
            is_phase_collapsed: len > 0 && response.status == ScsiStatus::GOOD && expected.data_out.is_none(),
            stat_sn: 0,
            snack_tag: 0,
            requests_ack: self.retained.is_some(),
            acked_data_sn: 0,
        }
    }

    /// Sends the SCSI Response PDU.
    pub(super) fn status(
        &mut self,
        window: CommandWindow,
        expected: ExpectedTransfer,
        response: &Response,
        layout: DataInLayout,
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
            response: blockmux_wire::iscsi::scsi::ServiceResponse::COMMAND_COMPLETED_AT_TARGET.0,
            status: response.status.0,
            total_ahs_length: 0,
            data_segment_length: U24::new(data.len() as u32),
            status_qualifier: 0.into(),
            reserved: [0; 6],
            initiator_task_tag: expected.itt.into(),
            snack_tag: layout.snack_tag.into(),
            stat_sn: layout.stat_sn.into(),
            exp_cmd_sn: window.exp_cmd_sn().into(),
            max_cmd_sn: window.max_cmd_sn().into(),
            exp_data_sn: data_sns.wrapping_add(expected.r2ts).into(),
            bidirectional_read_residual_count: residual.bidirectional_count.into(),
            residual_count: residual.count.into(),
        };
        self.send(transmute_ref!(&pdu), &data);
    }

    /// Sends the Data-In PDUs of `layout` whose DataSN is in `data_sns`; returns the DataSN after
    /// the last of all.
    #[inline]
    pub(super) fn data_in(
        &mut self,
        window: CommandWindow,
        expected: ExpectedTransfer,
        response: &Response,
        layout: DataInLayout,
        data_sns: Range<u32>,
    ) -> u32 {
        let mut end = layout.first.0;
        for part in layout.parts() {
            end = part.data_sn.wrapping_add(1);
            if !data_sns.contains(&part.data_sn) {
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
            if part.is_last && layout.is_phase_collapsed {
                let residual = Residual::of(expected, response);
                pdu.flags |= FLAG_STATUS | residual.flags;
                pdu.status = response.status.0;
                pdu.stat_sn = layout.stat_sn.into();
                pdu.residual_count = residual.count.into();
            } else if part.ends_burst
                && !part.is_last
                && layout.requests_ack
                && layout.stat_sn != RESERVED_TAG
            {
                // The DataACK will carry the StatSN of the status that follows.
                pdu.flags |= FLAG_ACKNOWLEDGE;
                (pdu.target_transfer_tag, pdu.lun) = (layout.stat_sn.into(), expected.lun);
            }
            self.send_borrowed(transmute_ref!(&pdu), &response.data_in, (part.offset, part.len));
        }
        end
    }
}

/// Residual counts of a command (RFC 7143 §11.4.5).
struct Residual {
    flags: u8,
    count: u32,
    bidirectional_flags: u8,
    bidirectional_count: u32,
}

impl Residual {
    fn of(expected: ExpectedTransfer, response: &Response) -> Residual {
        // The residual count of a bidirectional command covers its data-out.
        let main = expected.data_out.or(expected.data_in).unwrap_or(0);
        let (flags, count) = match (expected.data_out, expected.data_in) {
            // No command of the device server transfers in both directions: only one of them
            // counts.
            (Some(_), Some(_)) if !response.data_in.is_empty() => difference(0, main),
            _ => difference(response.transfer_len, main),
        };
        let (mut bidirectional_flags, mut bidirectional_count) = (0, 0);
        if let (Some(_), Some(data_in)) = (expected.data_out, expected.data_in) {
            let (flags, count) = difference(response.data_in.len() as u64, data_in);
            // The o and u bits are two positions above O and U.
            (bidirectional_flags, bidirectional_count) = (flags << 2, count);
        }
        Residual { flags, count, bidirectional_flags, bidirectional_count }
    }
}

/// The overflow or underflow flag, and the residual count in bytes.
fn difference(moved: u64, expected: u32) -> (u8, u32) {
    let expected = u64::from(expected);
    let count = u32::try_from(moved.abs_diff(expected)).unwrap_or(u32::MAX);
    match moved.cmp(&expected) {
        std::cmp::Ordering::Less => (FLAG_UNDERFLOW, count),
        std::cmp::Ordering::Equal => (0, 0),
        std::cmp::Ordering::Greater => (FLAG_OVERFLOW, count),
    }
}
