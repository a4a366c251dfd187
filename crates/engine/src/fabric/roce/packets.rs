//! Packets that have arrived for one connection, as records.

use crate::fabric::byte_queue::ByteQueue;
use blockmux_rdma::roce::record::{HEAD_LEN, RecordHead};

impl ByteQueue {
    /// Appends the record of a packet, which the network may have marked. One that does not fit is
    /// lost, as in the buffer of a socket.
    pub(super) fn push_packet(&mut self, packet: &[u8], is_marked: bool) {
        let Ok(len) = u16::try_from(packet.len()) else { return };
        if self.len() + HEAD_LEN + packet.len() > MAX_QUEUED {
            return;
        }
        self.make_room(HEAD_LEN + packet.len());
        self.push(&RecordHead::of_packet(len, is_marked).to_bytes());
        self.push(packet);
    }
}

/// Most bytes in a queue: the reads that a connection may have in flight fit several times.
const MAX_QUEUED: usize = 4 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_out_as_they_were_put_in_and_the_queue_has_a_limit() {
        let head = |round: u8| RecordHead::of_packet(3000, round % 2 == 1).to_bytes();
        let mut queue = ByteQueue::default();
        let mut out = Vec::new();
        for round in 0..100_u8 {
            queue.push_packet(&[round; 3000], round % 2 == 1);
            queue.take(1000, |bytes| out.extend_from_slice(bytes));
        }
        while queue.take(999, |bytes| out.extend_from_slice(bytes)) > 0 {}
        let expected: Vec<u8> =
            (0..100_u8).flat_map(|round| [&head(round)[..], &[round; 3000]].concat()).collect();
        assert!(out == expected);
        (0..2000).for_each(|_| queue.push_packet(&[0; 4096], false));
        assert_eq!(queue.len(), MAX_QUEUED / (4096 + HEAD_LEN) * (4096 + HEAD_LEN));
    }
}
