//! Sending of PDUs: as bytes of a stream over TCP, or as messages over RDMA.
//!
//! Login and full feature phase of both sides pass typed headers to a [`Sender`]. Over TCP it
//! writes the PDU with digests and padding to the outbox. Over RDMA it queues the PDU until the
//! queue pair has room, with the data-in before it and the memory that it invalidates.

use super::digests::IscsiDigests;
use super::iser::HEADERS_LEN;
use crate::digest;
use crate::driver::outbox::Outbox;
use crate::rdma::target_mover::TargetMessage;
use crate::rdma::{MessageHead, QueuePair, Remote, Stag};
use blockmux_volume::{Crc32c, Pool, SgList};
use blockmux_wire::iscsi::{BHS_LEN, Bhs, padding};
use blockmux_wire::iser::{ControlHeader, HEADER_LEN};
use smallvec::SmallVec;
use std::collections::VecDeque;
use zerocopy::IntoBytes;

/// Sends the PDUs of one connection, in order.
#[derive(Default)]
pub(super) struct Sender {
    digests: IscsiDigests,
    outbox: Outbox,
    /// Over RDMA: messages that wait for the queue pair.
    messages: Option<VecDeque<ControlMessage>>,
}

/// A queued PDU of an iSER connection.
pub(super) struct ControlMessage {
    pub(super) bhs: Bhs,
    data: SmallVec<[u8; 64]>,
    /// For a target's response: data-in to write before it.
    pub(super) data_in: Option<(SgList, Remote)>,
    /// For a target's response: the initiator's memory that it invalidates.
    pub(super) invalidates: Option<Stag>,
}

impl Sender {
    /// A sender for RDMA messages or for a byte stream.
    pub(super) fn new(is_over_rdma: bool) -> Sender {
        Sender { messages: is_over_rdma.then(VecDeque::new), ..Sender::default() }
    }

    /// Whether PDUs become RDMA messages.
    pub(super) fn is_over_rdma(&self) -> bool {
        self.messages.is_some()
    }

    /// Enables the negotiated digests for all further PDUs.
    pub(super) fn set_digests(&mut self, digests: IscsiDigests) {
        self.digests = digests;
    }

    pub(super) fn digests(&self) -> IscsiDigests {
        self.digests
    }

    /// The outbox of the byte stream.
    #[inline]
    pub(super) fn outbox(&mut self) -> &mut Outbox {
        &mut self.outbox
    }

    /// Whether everything was sent.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.outbox.is_empty() && self.messages.as_ref().is_none_or(VecDeque::is_empty)
    }

    /// Number of queued bytes, without the data-in of messages.
    #[inline]
    pub(super) fn len(&self) -> usize {
        let messages = self.messages.as_ref().map_or(0, VecDeque::len);
        self.outbox.len().saturating_add(messages.saturating_mul(HEADERS_LEN))
    }

    /// Drops unsent PDUs and disables digests, for a new connection.
    pub(super) fn clear(&mut self) {
        self.outbox.clear();
        self.messages.iter_mut().for_each(VecDeque::clear);
        self.digests = IscsiDigests::default();
    }

    /// Sends a PDU and copies its data.
    #[inline]
    pub(super) fn push(&mut self, bhs: &Bhs, data: &[u8]) {
        if let Some(messages) = &mut self.messages {
            // The common case.
            let data = if data.is_empty() { SmallVec::new() } else { SmallVec::from_slice(data) };
            return messages.push_back(ControlMessage { bhs: *bhs, data, data_in: None, invalidates: None });
        }
        self.push_header(bhs);
        if data.is_empty() {
            return;
        }
        self.outbox.push_head(data);
        let mut crc = Crc32c::default();
        if self.digests.data {
            crc.add(data);
        }
        self.push_tail(data.len(), crc);
    }

    /// Sends a PDU with `len` bytes at `offset` of `data` over TCP. The data is borrowed, unless a
    /// data digest requires a copy in memory from `pool`.
    #[inline]
    pub(super) fn push_borrowed(
        &mut self,
        pool: &Pool,
        bhs: &Bhs,
        data: &SgList,
        (offset, len): (usize, usize),
    ) {
        self.push_header(bhs);
        let mut crc = Crc32c::default();
        if self.digests.data {
            crc = digest::push(&mut self.outbox, pool, &data.slice(offset, len));
        } else {
            self.outbox.push_part(data, offset, len);
        }
        self.push_tail(len, crc);
    }

    #[inline]
    fn push_header(&mut self, bhs: &Bhs) {
        self.outbox.push_head(bhs.as_bytes());
        if self.digests.header {
            self.outbox.push_head(&digest::of(bhs.as_bytes()));
        }
    }

    /// Adds padding and digest after `len` bytes of data.
    #[inline]
    fn push_tail(&mut self, len: usize, mut crc: Crc32c) {
        let padding = padding_of(len);
        if !padding.is_empty() {
            self.outbox.push_head(padding);
        }
        if self.digests.data {
            crc.add(padding);
            self.outbox.push_head(&crc.to_le_bytes());
        }
    }

    /// Over RDMA: the messages that wait for the queue pair.
    #[inline]
    pub(super) fn messages(&mut self) -> Option<&mut VecDeque<ControlMessage>> {
        self.messages.as_mut()
    }

    /// The latest message.
    #[inline]
    pub(super) fn back(&mut self) -> Option<&mut ControlMessage> {
        self.messages.as_mut()?.back_mut()
    }

    /// Sends messages without data-in while the queue pair has room and `admits` allows them;
    /// returns whether any was sent.
    pub(super) fn send_all(
        &mut self,
        queue_pair: &mut impl QueuePair,
        mut admits: impl FnMut(&Bhs) -> bool,
    ) -> bool {
        let mut has_sent = false;
        while queue_pair.room() > 0
            && let Some(messages) = &mut self.messages
            && let Some(message) = messages.front()
            && admits(&message.bhs)
        {
            message.send(queue_pair);
            messages.pop_front();
            has_sent = true;
        }
        has_sent
    }
}

impl TargetMessage for ControlMessage {
    #[inline]
    fn next_write(&mut self) -> Option<(SgList, Remote)> {
        self.data_in.take()
    }

    #[inline]
    fn send(&self, queue_pair: &mut impl QueuePair) {
        let mut headers = [0; HEADERS_LEN];
        let (header, place) = headers.split_at_mut(HEADER_LEN);
        header.copy_from_slice(ControlHeader::new().as_bytes());
        place.copy_from_slice(self.bhs.as_bytes());
        // The common case.
        if self.data.is_empty() {
            return queue_pair.send(&headers, &SgList::default(), self.invalidates);
        }
        let mut message = MessageHead::from_slice(&headers);
        message.extend_from_slice(&self.data);
        message.extend_from_slice(padding_of(self.data.len()));
        queue_pair.send(&message, &SgList::default(), self.invalidates);
    }
}

/// The padding after `len` bytes of data.
#[inline]
fn padding_of(len: usize) -> &'static [u8] {
    [0; 3].get(..padding(len)).unwrap_or_default()
}

const _: () = assert!(HEADERS_LEN == HEADER_LEN + BHS_LEN);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rdma::WorkRequest;
    use crate::rdma::testing::Recorder;
    use blockmux_wire::iscsi::U24;
    use zerocopy::FromZeros;

    fn bhs(data_len: u32) -> Bhs {
        let mut bhs = Bhs::new_zeroed();
        (bhs.opcode, bhs.data_segment_length) = (0x21, U24::new(data_len));
        bhs
    }

    #[test]
    fn a_pdu_becomes_a_message_with_padding_and_the_invalidated_stag() {
        let mut sender = Sender::new(true);
        for len in [0, 3, 8] {
            sender.push(&bhs(len), &vec![7; len as usize]);
        }
        sender.back().unwrap().invalidates = Some(Stag(5));
        assert!(sender.outbox().is_empty() && !sender.is_empty() && sender.len() >= 3 * BHS_LEN);
        let mut queue = Recorder { room: 2, ..Recorder::default() };
        assert!(sender.send_all(&mut queue, |_| true) && !sender.send_all(&mut queue, |_| true));
        queue.room = 5;
        assert!(
            !sender.send_all(&mut queue, |bhs| bhs.data_segment_length.get() == 0),
            "`admits` rejects it"
        );
        assert!(sender.send_all(&mut queue, |_| true) && sender.is_empty());
        let mut found = Vec::new();
        while let Some(WorkRequest::Send { head, payload, invalidate, .. }) = queue.works.pop_front() {
            assert!(head[0] == 0x10 && head[HEADER_LEN] == 0x21 && payload.is_empty());
            found.push((head.len(), invalidate));
        }
        assert_eq!(found, [(76, None), (80, None), (84, Some(Stag(5)))]);
    }

    #[test]
    fn a_pdu_is_bytes_with_padding_and_digests() {
        for (header, data, len) in [(false, false, 48 + 4), (true, false, 48 + 8), (true, true, 48 + 12)] {
            let mut sender = Sender::default();
            sender.set_digests(IscsiDigests { header, data });
            sender.push(&bhs(3), &[1, 2, 3]);
            assert_eq!((sender.outbox().take_bytes().len(), sender.messages().is_none()), (len, true));
        }
    }
}
