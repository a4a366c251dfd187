//! PDUs as they come off the wire: headers, data segments, and where read data goes.
//!
//! ```text
//!   Head ──short segment, all of it here──▶ reply
//!    │ └─ long Data-In ──▶ Placing, straight into the I/O's memory ──▶ Tail: padding, digest ──▶ reply
//! ```
//! A short read's data is lent on from the receive buffer where it is all that was asked for, and copied elsewhere.

use super::full::FullFeature;
use super::lane::Lane;
use super::reply::error;
use crate::iscsi::digests::Digests;
use crate::iscsi::pdu::{self, Head, Parsed};
use crate::scsi::initiator::Transfer;
use crate::session::{Demand, ProtocolError};
use crate::slots::Key;
use blockmux_volume::{Chunk, Crc32c, SgList};
use blockmux_wire::iscsi::scsi::DataIn;
use blockmux_wire::iscsi::{BHS_LEN, Bhs, DIGEST_LEN, Opcode, padding};
use zerocopy::transmute_ref;

/// Where in the target's stream we are.
pub(super) enum Reading {
    /// At the begin of a PDU, of which so many bytes are needed in one piece.
    Head(usize),
    /// In a long Data-In, whose data goes to `place`.
    Placing { bhs: Bhs, key: Key, place: SgList },
    /// Behind it: padding and digest.
    Tail { bhs: Bhs, key: Key, crc: Crc32c },
    /// In a long Data-In that cannot be taken: so many bytes are to be dropped.
    Skipping(usize),
}

/// What a step did.
enum Step {
    Took(usize),
    Needs,
}

impl Reading {
    /// At the begin of a PDU.
    pub(super) const HEAD: Reading = Reading::Head(BHS_LEN);

    #[inline]
    pub(super) fn demand(&self, digests: Digests) -> Demand {
        match self {
            Reading::Head(need) => Demand::Bytes(*need),
            Reading::Placing { place, .. } => Demand::Place(place.clone()),
            Reading::Tail { bhs, .. } => Demand::Bytes(digests.tail_len(data_len(bhs))),
            Reading::Skipping(_) => Demand::Bytes(1),
        }
    }

    pub(super) fn is_between_pdus(&self) -> bool {
        matches!(self, Reading::Head(_))
    }
}

impl FullFeature {
    /// Takes all that can be taken of `input` from `at` on; returns where it stopped.
    #[inline]
    pub(super) fn receive(
        &mut self,
        lane: &mut Lane,
        input: &Chunk,
        mut at: usize,
    ) -> Result<usize, ProtocolError> {
        let bytes = input.unread();
        while !self.is_over() {
            let rest = bytes.get(at..).unwrap_or_default();
            let step = match &mut lane.reading {
                Reading::Head(_) => self.on_head(lane, input, at, rest)?,
                Reading::Placing { .. } => Step::Needs,
                Reading::Tail { .. } => self.on_tail(lane, rest)?,
                Reading::Skipping(left) => {
                    let here = rest.len().min(*left);
                    *left = left.saturating_sub(here);
                    if *left == 0 {
                        lane.reading = Reading::HEAD;
                    } else if here == 0 {
                        return Ok(at);
                    }
                    Step::Took(here)
                }
            };
            match step {
                Step::Took(len) => at = at.saturating_add(len),
                Step::Needs => return Ok(at),
            }
        }
        Ok(bytes.len())
    }

    /// The memory of [`Reading::Placing`] is full.
    pub(super) fn placed(&mut self, lane: &mut Lane) -> Result<(), ProtocolError> {
        let digests = lane.terms.digests;
        match std::mem::replace(&mut lane.reading, Reading::HEAD) {
            Reading::Placing { bhs, key, place } => {
                let mut crc = Crc32c::default();
                if digests.data {
                    crc.add_list(&place);
                }
                if digests.tail_len(data_len(&bhs)) == 0 {
                    return self.on_data_in(lane, key, transmute_ref!(&bhs));
                }
                lane.reading = Reading::Tail { bhs, key, crc };
            }
            other => lane.reading = other,
        }
        Ok(())
    }

    #[inline]
    fn on_head(
        &mut self,
        lane: &mut Lane,
        input: &Chunk,
        at: usize,
        rest: &[u8],
    ) -> Result<Step, ProtocolError> {
        let digests = lane.terms.digests;
        let head = match pdu::parse(rest, digests)? {
            Parsed::Needs(len) => {
                lane.reading = Reading::Head(len);
                return Ok(Step::Needs);
            }
            Parsed::Head(head) => head,
        };
        if head.data_len > lane.terms.max_receive_segment {
            return Err(error("sent a data segment above MaxRecvDataSegmentLength", "RFC 7143 §13.12"));
        }
        let is_data = head.bhs.opcode() == Opcode::DATA_IN;
        let (data, whole) = match head.segment(rest, digests) {
            Ok(found) => found,
            Err(whole) if head.data_len <= WHOLE_SEGMENT => {
                lane.reading = Reading::Head(whole);
                return Ok(Step::Needs);
            }
            Err(whole) if is_data => return self.begin_placing(lane, &head, whole),
            Err(_) => {
                return Err(error(
                    "sent more than 64 KiB with a PDU that carries no data of blocks",
                    "RFC 7143 §11",
                ));
            }
        };
        lane.reading = Reading::HEAD;
        if digests.data && !data.is_empty() {
            let covered = rest.get(head.len..whole.saturating_sub(DIGEST_LEN)).unwrap_or_default();
            let mut crc = Crc32c::default();
            crc.add(covered);
            if !rest.get(..whole).unwrap_or_default().ends_with(&crc.to_le_bytes()) {
                self.on_damaged(lane, &head.bhs)?;
                return Ok(Step::Took(whole));
            }
        }
        if is_data {
            let data_in: &DataIn = transmute_ref!(&head.bhs);
            if let Some(key) = self.check_data_in(lane, data_in)? {
                if self.queue.is_lendable(key, data.len()) {
                    self.queue.lend(key, input.lend(at.saturating_add(head.len), data.len()));
                } else if !data.is_empty() {
                    let place = self.place(key, data_in)?;
                    place.copy_from(data);
                }
                self.on_data_in(lane, key, data_in)?;
            }
        } else {
            self.on_pdu(lane, &head.bhs, data)?;
        }
        Ok(Step::Took(whole))
    }

    /// A long Data-In: its data goes to its place.
    fn begin_placing(&mut self, lane: &mut Lane, head: &Head, whole: usize) -> Result<Step, ProtocolError> {
        let data_in: &DataIn = transmute_ref!(&head.bhs);
        match self.check_data_in(lane, data_in)? {
            Some(key) => {
                let place = self.place(key, data_in)?;
                lane.reading = Reading::Placing { bhs: head.bhs, key, place };
            }
            None => lane.reading = Reading::Skipping(whole.saturating_sub(head.len)),
        }
        Ok(Step::Took(head.len))
    }

    fn on_tail(&mut self, lane: &mut Lane, rest: &[u8]) -> Result<Step, ProtocolError> {
        let Reading::Tail { bhs, key, crc } = &lane.reading else { return Ok(Step::Needs) };
        let (bhs, key, mut crc) = (*bhs, *key, *crc);
        let digests = lane.terms.digests;
        let len = digests.tail_len(data_len(&bhs));
        let Some(tail) = rest.get(..len) else { return Ok(Step::Needs) };
        lane.reading = Reading::HEAD;
        if digests.data {
            crc.add(tail.get(..padding(data_len(&bhs))).unwrap_or_default());
            if !tail.ends_with(&crc.to_le_bytes()) {
                self.on_damaged(lane, &bhs)?;
                return Ok(Step::Took(len));
            }
        }
        self.on_data_in(lane, key, transmute_ref!(&bhs))?;
        Ok(Step::Took(len))
    }

    /// Checks a Data-In before any of its data is looked at (RFC 7143 §11.7); data comes strictly in order, as
    /// DataPDUInOrder and DataSequenceInOrder say. `None`: it is to be dropped, at error recovery level 1 and above.
    #[inline]
    fn check_data_in(&mut self, lane: &mut Lane, data_in: &DataIn) -> Result<Option<Key>, ProtocolError> {
        let fault = |what| Err(error(what, "RFC 7143 §11.7"));
        let Some(key) = self.find(lane, data_in.initiator_task_tag.get()) else {
            // Something that was asked for twice may come after its task has ended.
            return if self.terms.level > 0 {
                Ok(None)
            } else {
                fault("sent data for a task that is not there")
            };
        };
        let Some((progress, Transfer::In(expected))) = self.queue.transport(key) else {
            return fault("sent data for a command that reads none");
        };
        let len = data_in.data_segment_length.get();
        if data_in.data_sn.get() != progress.data_sn && self.terms.level > 0 {
            return self.on_other_data(lane, key, data_in);
        }
        if data_in.buffer_offset.get() != progress.next || data_in.data_sn.get() != progress.data_sn {
            return fault("sent data out of order");
        }
        if progress.next.checked_add(len).is_none_or(|end| end > expected) {
            return fault("sent more data than was asked for");
        }
        Ok(Some(key))
    }

    /// The memory for a Data-In that was checked.
    #[inline]
    fn place(&mut self, key: Key, data_in: &DataIn) -> Result<SgList, ProtocolError> {
        let from = data_in.buffer_offset.get() as usize;
        let len = data_in.data_segment_length.get() as usize;
        let Some((list, base)) = self.queue.data_in(key) else {
            return Err(error("sent data for a command that reads none", "RFC 7143 §11.7"));
        };
        if base == 0 && from == 0 && list.len() == len {
            return Ok(list.clone());
        }
        Ok(list.slice(base.saturating_add(from), len))
    }
}

fn data_len(bhs: &Bhs) -> usize {
    bhs.data_segment_length.get() as usize
}

/// A segment up to this many bytes is waited for in the receive buffer: one large receive for many PDUs costs less
/// than a receive for each. With header and digests at most `MAX_DEMAND`.
const WHOLE_SEGMENT: usize = 64 << 10;
