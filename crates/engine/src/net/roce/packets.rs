//! Packets that have arrived for one connection, as records.

use blockmux_rdma::roce::records::{HEAD_LEN, MARKED};

/// A bounded queue of records. What does not fit is lost, as in the buffer of a socket.
#[derive(Default)]
pub(super) struct RecordQueue {
    bytes: Vec<u8>,
    /// Bytes at the front that were taken.
    taken: usize,
}

impl RecordQueue {
    /// Appends a packet, which the network may have marked.
    pub(super) fn push(&mut self, packet: &[u8], is_marked: bool) {
        let Some(len) = u16::try_from(packet.len()).ok().filter(|len| len & MARKED == 0) else { return };
        let head = if is_marked { len | MARKED } else { len };
        if self.len() + HEAD_LEN + packet.len() > MAX_QUEUED {
            return;
        }
        if self.taken > 0 && self.bytes.len() + HEAD_LEN + packet.len() > self.bytes.capacity() {
            self.bytes.drain(..self.taken);
            self.taken = 0;
        }
        self.bytes.extend_from_slice(&head.to_be_bytes());
        self.bytes.extend_from_slice(packet);
    }

    /// Number of bytes in the queue.
    pub(super) fn len(&self) -> usize {
        self.bytes.len() - self.taken
    }

    /// Removes at most `most` bytes from the front and passes them to `take`.
    pub(super) fn take(&mut self, most: usize, take: impl FnOnce(&[u8])) -> usize {
        let len = self.len().min(most);
        take(&self.bytes[self.taken..self.taken + len]);
        self.taken += len;
        if self.taken == self.bytes.len() {
            self.bytes.clear();
            self.taken = 0;
            if self.bytes.capacity() > KEPT {
                self.bytes = Vec::new();
            }
        }
        len
    }
}

/// Most bytes in a queue: the reads that a connection may have in flight fit several times.
const MAX_QUEUED: usize = 4 << 20;
/// Memory that an empty queue keeps, in bytes.
const KEPT: usize = 256 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_out_as_they_were_put_in_and_the_queue_has_a_limit() {
        let head = |round: u8| if round % 2 == 1 { 3000 | MARKED } else { 3000 };
        let mut queue = RecordQueue::default();
        let mut out = Vec::new();
        for round in 0..100_u8 {
            queue.push(&[round; 3000], round % 2 == 1);
            queue.take(1000, |bytes| out.extend_from_slice(bytes));
        }
        while queue.take(999, |bytes| out.extend_from_slice(bytes)) > 0 {}
        let expected: Vec<u8> =
            (0..100_u8).flat_map(|round| [&head(round).to_be_bytes()[..], &[round; 3000]].concat()).collect();
        assert!(out == expected);
        (0..2000).for_each(|_| queue.push(&[0; 4096], false));
        assert_eq!(queue.len(), MAX_QUEUED / (4096 + HEAD_LEN) * (4096 + HEAD_LEN));
    }
}
