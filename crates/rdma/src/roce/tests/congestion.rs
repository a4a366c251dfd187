//! A congested link: who is notified, how the rate follows, and what a forger can do.

use super::PairSettings;
use super::shared_link::{Direction, LinkSettings, SharedLink};
use crate::queue_pair::Provider;
use crate::roce::Roce;
use crate::roce::guid::guid;
use blockmux_proto::driver::session::Timed;
use blockmux_proto::rdma::{Endpoint, Event, QueuePair};
use blockmux_volume::{Chunk, SgList};
use blockmux_wire::roce::bth::Bth;
use blockmux_wire::roce::opcode::RoceOpcode;
use blockmux_wire::roce::packet::RocePacket;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// A link of 1 Gbit/s with a round trip of 40 µs.
const LINK: LinkSettings = LinkSettings {
    rate: GIGABIT,
    delay: Duration::from_micros(20),
    marks_above: 40e3,
    drops_above: 1e6,
    lost_per_myriad: 0,
};
const GIGABIT: f64 = 125e6;

const fn ms(time: u64) -> Duration {
    Duration::from_millis(time)
}

/// The bytes of each connection as a part of what the link could have carried.
fn shares(link: &mut SharedLink, time: Duration) -> Vec<f64> {
    let capacity = link.settings.rate * time.as_secs_f64();
    link.run(time).into_iter().map(|bytes| bytes as f64 / capacity).collect()
}

#[test]
fn two_connections_share_a_link_whose_queue_stays_short() {
    for direction in [Direction::Writes, Direction::Reads] {
        let mut link = SharedLink::new(LINK);
        link.connect(1024, 128, direction);
        link.run(ms(60));
        link.connect(1024, 128, direction);
        link.run(ms(60));
        let shares = shares(&mut link, ms(200));
        let seen = link.observed;
        println!("{direction:?}: {shares:.2?} of the link, {seen:?}");
        assert!(seen.longest_queue < 2.0 * LINK.marks_above && seen.dropped == 0, "{seen:?}");
        // Headers are 7 % of it.
        assert!(shares.iter().sum::<f64>() > 0.85, "{shares:?}");
        assert!(shares.iter().all(|share| *share > 0.4), "{shares:?}");
        // Without marks the queue is as long as both windows.
        link.settings.marks_above = f64::INFINITY;
        link.run(ms(300));
        assert!(link.observed.longest_queue > 5.0 * LINK.marks_above, "{:?}", link.observed);
    }
}

#[test]
fn a_fast_link_is_used_again_soon_after_a_congestion() {
    let mut link = SharedLink::new(LinkSettings { rate: 10.0 * GIGABIT, marks_above: 100e3, ..LINK });
    link.connect(4096, 128, Direction::Writes);
    link.run(ms(100));
    let before = shares(&mut link, ms(10));
    for _ in 0..60 {
        link.run(Duration::from_micros(60));
        link.forge_notification(0);
    }
    let reduced = shares(&mut link, ms(5));
    link.run(ms(30));
    let after = shares(&mut link, ms(10));
    println!("{before:.2?}, reduced to {reduced:.2?}, then {after:.2?}");
    assert!(before[0] > 0.7 && reduced[0] < 0.4 && after[0] > 0.7);
}

#[test]
fn a_flood_of_forged_notifications_does_not_stop_a_connection() {
    for direction in [Direction::Writes, Direction::Reads] {
        let mut link = SharedLink::new(LINK);
        link.connect(4096, 128, direction);
        let before = link.run(ms(20))[0];
        let mut flooded = 0;
        for _ in 0..100_000 {
            link.forge_notification(0);
            flooded += link.run(Duration::from_micros(10))[0];
        }
        println!("{direction:?}: {before} bytes in 20 ms, {flooded} in 1 s of the flood");
        // The lowest rate, and the work that was posted before.
        assert!((1_100_000..2_500_000).contains(&flooded), "{flooded}");
        assert!(!link.connections[0].is_over);
        link.run(ms(200));
        let after = link.run(ms(20))[0];
        assert!(after > before / 2, "{after} of {before}");
    }
}

/// What go-back-N costs: the figures of decision 104.
#[test]
fn a_lost_packet_costs_what_is_in_flight() {
    for (window, rates) in [(32, [0.9, 0.8, 0.2]), (128, [0.9, 0.7, 0.2])] {
        for (lost_per_myriad, least) in [0, 10, 100].into_iter().zip(rates) {
            let rate = 10.0 * GIGABIT;
            let settings = LinkSettings { rate, marks_above: f64::INFINITY, lost_per_myriad, ..LINK };
            let mut link = SharedLink::new(settings);
            link.connect(4096, window, Direction::Writes);
            link.run(ms(5));
            let share = shares(&mut link, ms(100))[0];
            let lost = lost_per_myriad as f64 / 100.0;
            println!("window {window}, {lost} % lost: goodput {:.0} % of the link", share * 100.0);
            assert!(share > least, "{share}");
        }
    }
}

/// An established connection between two ends with these GUIDs.
fn connected(guids: [u64; 2]) -> ([Roce; 2], Instant) {
    let endpoint = Endpoint {
        receives: 64,
        receive_len: 100,
        sends: 64,
        reads: 1,
        regions: 1,
        private_data: Vec::new(),
        without_invalidation: None,
    };
    let now = Instant::now();
    let settings = PairSettings { mtu: 1024, window: 64, keep_alive: None, guids };
    let mut ends = settings.ends([&endpoint, &endpoint], 3, now);
    exchange(&mut ends, now);
    assert!(matches!(ends[1].poll(), Some(Event::Requested { .. })));
    ends[1].accept(Vec::new());
    exchange(&mut ends, now);
    (ends, now)
}

/// Delivers everything that both ends have to send; returns the opcodes.
pub(super) fn exchange(ends: &mut [Roce; 2], now: Instant) -> Vec<RoceOpcode> {
    let mut opcodes = Vec::new();
    loop {
        let before = opcodes.len();
        for side in 0..2 {
            let mut packet = Vec::new();
            while ends[side].poll_transmit(now, &mut packet) {
                packet.extend([0; 4]);
                opcodes.push(RocePacket::parse(&packet).unwrap().bth.opcode());
                ends[1 - side].on_packet(&Chunk::from_slice(&packet), false, now).unwrap();
                packet.clear();
            }
        }
        if opcodes.len() == before {
            return opcodes;
        }
    }
}

/// Delivers a packet of the peer, which was marked, and returns what is sent.
fn marked(ends: &mut [Roce; 2], now: Instant) -> Vec<RoceOpcode> {
    // It is not limited itself.
    ends[0].congestion.stop();
    ends[0].send(b"marked", &SgList::default(), None);
    let mut packet = Vec::new();
    assert!(ends[0].poll_transmit(now, &mut packet));
    packet.extend([0; 4]);
    ends[1].on_packet(&Chunk::from_slice(&packet), true, now).unwrap();
    exchange(ends, now)
}

const CNP: RoceOpcode = RoceOpcode::CONGESTION_NOTIFICATION;

#[test]
fn marks_are_answered_by_one_notification_in_fifty_microseconds() {
    let (mut ends, begun) = connected([guid(1), guid(2)]);
    let (mut notified, mut acknowledged) = (Vec::new(), Vec::new());
    for time in (0..200).step_by(10) {
        let sent = marked(&mut ends, begun + Duration::from_micros(time));
        if sent.contains(&RoceOpcode::RC_ACKNOWLEDGE) {
            acknowledged.push(time);
        }
        if sent.contains(&CNP) {
            notified.push(time);
        }
    }
    assert_eq!(notified, [0, 50, 100, 150]);
    // An acknowledgement waits for 32 packets, or 100 us.
    assert_eq!(acknowledged, [100]);
    assert_eq!(ends[1].poll_timeout(), Some(begun + Duration::from_micros(210)));
    // A mark that was too early for a notification has no late one, and notifications have none.
    assert_eq!(exchange(&mut ends, begun + ms(10)), [RoceOpcode::RC_ACKNOWLEDGE]);
    let mut packet = Bth::notification(0).as_bytes().to_vec();
    packet.resize(32, 0);
    ends[1].on_packet(&Chunk::from_slice(&packet), true, begun + ms(10)).unwrap();
    assert_eq!(exchange(&mut ends, begun + ms(10)), []);
}

#[test]
fn a_peer_that_may_not_know_notifications_gets_none_before_its_own() {
    let (mut ends, now) = connected([7, guid(2)]);
    assert_eq!(marked(&mut ends, now), [RoceOpcode::RC_ACKNOWLEDGE]);
    let mut packet = Bth::notification(0).as_bytes().to_vec();
    packet.resize(32, 0);
    ends[1].on_packet(&Chunk::from_slice(&packet), false, now).unwrap();
    assert_eq!(marked(&mut ends, now), [CNP, RoceOpcode::RC_ACKNOWLEDGE]);
}

#[test]
fn without_notifications_nothing_waits_and_no_timer_runs() {
    let (mut ends, now) = connected([guid(1), guid(2)]);
    for _ in 0..50 {
        ends[0].send(&[0; 60], &SgList::default(), None);
    }
    assert_eq!(exchange(&mut ends, now).len(), 51, "50 packets and an acknowledgement");
    assert_eq!(ends.each_ref().map(Timed::poll_timeout), [None, None]);
}
