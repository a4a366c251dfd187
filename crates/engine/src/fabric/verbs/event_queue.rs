//! Records of events that a session has not taken yet.

use crate::fabric::byte_queue::ByteQueue;
use blockmux_rdma::device::records::{DeviceEvent, EVENT_LEN, EventRecord};
use blockmux_volume::Seg;

// The receive buffers and the work in flight bound the length of the queue.
impl ByteQueue {
    /// Appends an event with the bytes behind it.
    pub(super) fn push_event(&mut self, event: DeviceEvent, parts: &[&[u8]]) {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        self.push_head(event, len);
        parts.iter().for_each(|part| self.push(part));
    }

    /// Appends an event with a message.
    pub(super) fn push_message(&mut self, event: DeviceEvent, message: &Seg) {
        self.push_head(event, message.len());
        message.copy_to(self.push_zeroes(message.len()));
    }

    fn push_head(&mut self, event: DeviceEvent, len: usize) {
        self.make_room(EVENT_LEN + len);
        // Messages are at most as long as their receive buffers.
        let record = EventRecord { event, bytes: u32::try_from(len).unwrap_or(u32::MAX) };
        self.push(&record.to_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_out_as_they_were_put_in() {
        let mut queue = ByteQueue::default();
        let (mut out, mut expected) = (Vec::new(), Vec::new());
        for round in 0..100_u8 {
            let event = DeviceEvent::Received { invalidated: Some(round.into()) };
            queue.push_message(event, &Seg::from_slice(&[round; 300]));
            queue.push_event(DeviceEvent::Refused, &[b"ab", b"c"]);
            expected.extend(EventRecord { event, bytes: 300 }.to_bytes());
            expected.extend([round; 300]);
            expected.extend(EventRecord { event: DeviceEvent::Refused, bytes: 3 }.to_bytes());
            expected.extend(b"abc");
            queue.take(200, |bytes| out.extend_from_slice(bytes));
        }
        assert_eq!(queue.len(), 100 * (2 * EVENT_LEN + 303) - 100 * 200);
        while queue.take(999, |bytes| out.extend_from_slice(bytes)) > 0 {}
        assert!(out == expected);
    }
}
