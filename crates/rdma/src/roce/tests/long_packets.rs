//! Packets that are longer than the standard's, between two ends of this implementation.

use super::PairSettings;
use super::congestion::exchange;
use crate::queue_pair::Provider;
use crate::roce::guid::{guid, is_guid};
use blockmux_proto::rdma::{Endpoint, Event, QueuePair};
use blockmux_volume::{Seg, SgList};
use std::time::Instant;

#[test]
fn the_longest_packet_is_what_both_ends_allow() {
    let endpoint = Endpoint {
        receives: 4,
        receive_len: 20_000,
        sends: 4,
        reads: 1,
        regions: 1,
        private_data: Vec::new(),
        without_invalidation: None,
    };
    let own = [guid(0), guid(1)];
    for (guids, mtus, longest) in [
        (own, [9000, 9000], 8192),
        (own, [9000, 6001], 6000),
        (own, [6001, 9000], 6000),
        (own, [9000, 4097], 4096),
        (own, [4097, 9000], 4096),
        ([own[0], 7], [9000, 9000], 4096),
        ([7, own[1]], [9000, 9000], 4096),
    ] {
        let now = Instant::now();
        let [[active, _], [_, passive]] = mtus.map(|mtu| {
            PairSettings { mtu, window: 64, keep_alive: None, guids }.ends([&endpoint, &endpoint], 3, now)
        });
        let mut ends = [active, passive];
        exchange(&mut ends, now);
        assert!(matches!(ends[1].poll(), Some(Event::Requested { .. })));
        ends[1].accept(Vec::new());
        exchange(&mut ends, now);
        // An end with a GUID of another implementation stands for one.
        for side in [0, 1].into_iter().filter(|side| is_guid(guids[*side])) {
            let payload = SgList::one(Seg::from_slice(&[7; 10_000]));
            ends[side].send(b"head", &payload, None);
            let mut packet = Vec::new();
            assert!(ends[side].poll_transmit(now, &mut packet));
            assert_eq!(packet.len(), 12 + longest, "{guids:x?} {mtus:?}");
        }
    }
}
