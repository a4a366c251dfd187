//! Two ends of a connection and the network between them, under a virtual clock.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

mod captures;
mod congestion;
mod hostile;
mod long_packets;
mod management;
mod port;
mod provider_conformance;
mod records;
mod recovery;
mod shared_link;

use super::guid::guid;
use super::{Roce, RoceConfig, RoceNumbers};
use crate::queue_pair::Violation;
use blockmux_proto::driver::session::Timed;
use blockmux_proto::rdma::Endpoint;
use blockmux_volume::random::SplitMix;
use blockmux_volume::{Chunk, Pool};
use blockmux_wire::roce::icrc::{Fragmentation, RoceAddresses, RoceFlow};
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

/// What the network does to packets. Chances are per thousand.
#[derive(Clone, Copy, Debug)]
pub(super) struct NetworkConditions {
    lost_per_mille: u64,
    duplicated_per_mille: u64,
    damaged_per_mille: u64,
    /// Most of the delay that packets have in addition to [`DELAY`], by which they overtake each
    /// other.
    jitter_us: u64,
}

pub(super) const PERFECT: NetworkConditions =
    NetworkConditions { lost_per_mille: 0, duplicated_per_mille: 0, damaged_per_mille: 0, jitter_us: 0 };

/// Both ends of a connection.
pub(super) struct RocePair {
    pub(super) ends: [Roce; 2],
    pub(super) now: Instant,
    network: Network,
    /// Time of the last packet that was sent.
    sent_at: Instant,
}

/// Packets in transit, by the time of their arrival and a number.
struct Network {
    conditions: NetworkConditions,
    random: SplitMix,
    in_transit: BTreeMap<(Instant, u64), (usize, Vec<u8>)>,
    sent: u64,
    is_broken: bool,
}

/// Settings of both ends.
#[derive(Clone, Copy, Debug)]
struct PairSettings {
    mtu: u16,
    window: u32,
    keep_alive: Option<Duration>,
    guids: [u64; 2],
}

impl PairSettings {
    /// The active end and the passive one.
    fn ends(self, endpoints: [&Endpoint; 2], seed: u64, now: Instant) -> [Roce; 2] {
        let mut random = SplitMix::new(seed);
        [0, 1].map(|side: usize| {
            let config = RoceConfig {
                local: ADDRESSES[side].into(),
                peer: ADDRESSES[1 - side].into(),
                service: 4420,
                source_port: 40_000,
                mtu: self.mtu,
                window: self.window,
                keep_alive: self.keep_alive,
            };
            let numbers = RoceNumbers {
                queue_pair: 2 + random.below(0xff_0000) as u32,
                // Every other connection soon has numbers that wrap.
                first_psn: if seed.is_multiple_of(2) { 0xff_fff0 } else { random.next() as u32 & 0xff_ffff },
                comm_id: random.next() as u32,
                guid: self.guids[side],
            };
            let create = [Roce::active, Roce::passive][side];
            let tags = [seed as u8 ^ (side as u8) << 7; 32];
            create(endpoints[side], config, numbers, Pool::new(1 << 20), tags, now)
        })
    }
}

impl Network {
    fn send(&mut self, to: usize, packet: &[u8], now: Instant) {
        let conditions = self.conditions;
        let mut happens = |per_mille: u64| per_mille > 0 && self.random.below(1000) < per_mille;
        let is_lost = happens(conditions.lost_per_mille);
        let copies = if happens(conditions.duplicated_per_mille) { 2 } else { 1 };
        let is_damaged = happens(conditions.damaged_per_mille);
        if is_lost || self.is_broken {
            return;
        }
        for _ in 0..copies {
            let mut packet = packet.to_vec();
            if is_damaged {
                let at = self.random.below(packet.len() as u64) as usize;
                packet[at] ^= 1 << self.random.below(8);
            }
            let jitter = self.random.below(conditions.jitter_us + 1);
            self.sent += 1;
            let arrival = now + DELAY + Duration::from_micros(jitter);
            self.in_transit.insert((arrival, self.sent), (to, packet));
        }
    }
}

impl RocePair {
    /// The active end and the passive one.
    pub(super) fn new(
        endpoints: [&Endpoint; 2],
        mtu: u16,
        window: u32,
        conditions: NetworkConditions,
        seed: u64,
    ) -> RocePair {
        let now = Instant::now();
        // Ends of this implementation acknowledge later, and notify each other.
        let guids = if seed.is_multiple_of(2) { [0, 1] } else { [guid(0), guid(1)] };
        let ends = PairSettings { mtu, window, keep_alive: None, guids }.ends(endpoints, seed, now);
        let random = SplitMix::new(seed);
        let network = Network { conditions, random, in_transit: BTreeMap::new(), sent: 0, is_broken: false };
        RocePair { ends, now, network, sent_at: now }
    }

    /// Sends what both ends have to send, then delivers one packet or lets time pass until a timer;
    /// returns whether there was either.
    pub(super) fn turn(&mut self) -> bool {
        for side in 0..2 {
            self.send(side);
        }
        let arrival = self.network.in_transit.first_key_value().map(|((arrival, _), _)| *arrival);
        let timeouts = self.ends.iter().filter_map(Roce::poll_timeout);
        let timeout = timeouts.min().filter(|when| *when <= self.sent_at + QUIET || arrival.is_some());
        match (arrival, timeout) {
            (Some(arrival), timeout) if timeout.is_none_or(|timeout| arrival <= timeout) => {
                self.now = self.now.max(arrival);
                self.deliver();
            }
            (_, Some(timeout)) => {
                self.now = self.now.max(timeout);
                for end in &mut self.ends {
                    // The end of the connection is an event, too.
                    end.on_timeout(self.now).ok();
                }
            }
            (_, None) => return false,
        }
        true
    }

    fn send(&mut self, side: usize) {
        let mut packet = Vec::new();
        while self.ends[side].poll_transmit(self.now, &mut packet) {
            assert!(packet.len().is_multiple_of(4), "a packet is not padded");
            packet.extend(flow(side).icrc(FRAGMENTATION, &packet));
            self.network.send(1 - side, &packet, self.now);
            self.sent_at = self.now;
            packet.clear();
        }
    }

    fn deliver(&mut self) {
        let Some((_, (side, packet))) = self.network.in_transit.pop_first() else { return };
        if flow(1 - side).recover(&packet) == Some(FRAGMENTATION) {
            // As above.
            self.ends[side].on_packet(&Chunk::from_slice(&packet), false, self.now).ok();
        }
    }

    /// Loses all packets from now on, and tells the ends.
    pub(super) fn lose(&mut self) {
        self.network.is_broken = true;
        self.network.in_transit.clear();
        self.ends.iter_mut().for_each(Roce::on_unreachable);
    }
}

/// What the peer reports of a violation by negative acknowledgements, which have few codes.
fn reported(violation: Violation) -> Violation {
    match violation {
        Violation::Refused(_) => Violation::Access,
        Violation::NoReceive => Violation::NoReceive,
        _ => Violation::Other,
    }
}

/// The flow of packets that one side sends.
fn flow(side: usize) -> RoceFlow {
    let (source, destination) = (ADDRESSES[side], ADDRESSES[1 - side]);
    RoceFlow { addresses: RoceAddresses::V4 { source, destination }, source_port: 50_000 }
}

pub(super) const ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2)];
const FRAGMENTATION: Fragmentation = Fragmentation { identification: 0, dont_fragment: true };
/// Delay of every packet.
const DELAY: Duration = Duration::from_micros(20);
/// A connection that sends nothing for so long has nothing to repeat: longer than every timeout but
/// those of a session that does not answer.
const QUIET: Duration = Duration::from_secs(3);
