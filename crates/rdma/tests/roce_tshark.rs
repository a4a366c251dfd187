//! tshark dissects a capture of this implementation's RoCEv2 packets without reporting malformed
//! ones, and reads the same fields in them.
//!
//! Without tshark the test prints a line that begins with `skipped: ` and passes.
#![allow(clippy::arithmetic_side_effects, clippy::indexing_slicing, reason = "an overflow fails the test")]

mod tshark;

use blockmux_proto::driver::session::Timed;
use blockmux_proto::rdma::{Event, QueuePair, Remote, RemoteRights, WorkId, WorkRequest};
use blockmux_rdma::Provider;
use blockmux_rdma::roce::{Roce, RoceConfig, RoceNumbers};
use blockmux_volume::{Chunk, Pool, SgList};
use blockmux_wire::roce::UDP_PORT;
use blockmux_wire::roce::icrc::{Fragmentation, RoceAddresses, RoceFlow};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};
use tshark::{Pcap, endpoint, memory};

/// A connection that is recorded as network frames.
struct Capture {
    ends: [Roce; 2],
    addresses: [IpAddr; 2],
    pcap: Pcap,
    /// Number of frames.
    frames: usize,
    /// Whether the network marks packets.
    marks: bool,
    now: Instant,
}

impl Capture {
    fn new(addresses: [IpAddr; 2]) -> Capture {
        let now = Instant::now();
        let end = |side: usize| {
            let (local, peer) = (addresses[side], addresses[1 - side]);
            let config = RoceConfig {
                local,
                peer,
                service: 3260,
                source_port: 40_000,
                mtu: 1024,
                window: 64,
                keep_alive: None,
            };
            let numbers = RoceNumbers {
                queue_pair: 0x1234 + side as u32,
                first_psn: 0xff_fffe,
                comm_id: 0xabc0 + side as u32,
                // One of this implementation, which is notified.
                guid: 0x42_4d58 << 40,
            };
            let create = [Roce::active, Roce::passive][side];
            create(&endpoint(), config, numbers, Pool::new(1 << 20), [side as u8; 32], now)
        };
        Capture { ends: [end(0), end(1)], addresses, pcap: Pcap::new(), frames: 0, marks: false, now }
    }

    /// Appends the ICRC to a packet, and records it; returns the datagram.
    fn record(&mut self, from: usize, mut packet: Vec<u8>) -> Vec<u8> {
        let fragmentation = Fragmentation { identification: 0, dont_fragment: true };
        let udp_len = packet.len() as u16 + 12;
        let (addresses, mut frame) = match [self.addresses[from], self.addresses[1 - from]] {
            [IpAddr::V4(source), IpAddr::V4(destination)] => {
                let mut ip = vec![0x45, 0];
                ip.extend((udp_len + 20).to_be_bytes());
                ip.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
                ip.extend(source.octets().into_iter().chain(destination.octets()));
                (RoceAddresses::V4 { source, destination }, ip)
            }
            [IpAddr::V6(source), IpAddr::V6(destination)] => {
                let mut ip = vec![0x60, 0, 0, 0];
                ip.extend(udp_len.to_be_bytes());
                ip.extend([17, 64]);
                ip.extend(source.octets().into_iter().chain(destination.octets()));
                (RoceAddresses::V6 { source, destination }, ip)
            }
            other => panic!("{other:?}"),
        };
        let flow = RoceFlow { addresses, source_port: 50_000 };
        packet.extend(flow.icrc(fragmentation, &packet));
        for number in [50_000, UDP_PORT, udp_len, 0] {
            frame.extend(number.to_be_bytes());
        }
        frame.extend(&packet);
        self.pcap.record(&frame);
        self.frames += 1;
        packet
    }

    /// Transports everything; returns the number of events.
    fn settle(&mut self) -> usize {
        let mut events = 0;
        loop {
            let before = (events, self.frames);
            for from in 0..2 {
                let mut packet = Vec::new();
                while self.ends[from].poll_transmit(self.now, &mut packet) {
                    let datagram = self.record(from, std::mem::take(&mut packet));
                    self.ends[1 - from]
                        .on_packet(&Chunk::from_slice(&datagram), self.marks, self.now)
                        .unwrap();
                }
                while let Some(event) = self.ends[from].poll() {
                    events += 1;
                    if matches!(event, Event::Requested { .. }) {
                        self.ends[from].accept(b"yes".to_vec());
                    }
                }
            }
            if before == (events, self.frames) {
                // An acknowledgement may wait.
                let soon = self.now + Duration::from_millis(1);
                if self.ends.iter().filter_map(Timed::poll_timeout).all(|due| due > soon) {
                    return events;
                }
                self.now = soon;
            }
        }
    }

    fn grant(&mut self, len: usize, access: RemoteRights) -> Remote {
        self.ends[1].register(WorkId(0), &mut memory(len), access).unwrap()
    }
}

/// Sets a connection up, does work of every kind, and releases it; returns the capture.
fn record_traffic(addresses: [IpAddr; 2]) -> Pcap {
    let mut capture = Capture::new(addresses);
    capture.settle();
    let write = capture.grant(3000, RemoteRights::RemoteWrite);
    let read = capture.grant(3000, RemoteRights::RemoteRead);
    let id = WorkId(1);
    capture.ends[0].send(b"one packet", &SgList::default(), None);
    capture.ends[0].send(b"three packets", &memory(2500), None);
    capture.ends[0].post(WorkRequest::Read { id, local: memory(3000), remote: read });
    capture.ends[0].post(WorkRequest::Write { id, local: memory(3000), remote: write });
    let short = Remote { len: 5, ..write };
    capture.ends[0].post(WorkRequest::Write { id, local: memory(5), remote: short });
    capture.ends[0].send(b"invalidates", &SgList::default(), Some(write.stag));
    capture.settle();
    capture.marks = true;
    capture.ends[0].send(b"meets congestion", &SgList::default(), None);
    capture.settle();
    capture.marks = false;
    capture.ends[0].disconnect();
    capture.settle();
    assert!(capture.ends.iter().all(|end| end.fault().is_none() && end.is_drained()));
    capture.pcap
}

#[test]
fn tshark_reads_our_packets_as_they_were_meant() {
    if !tshark::is_installed() {
        println!("skipped: tshark is not installed");
        return;
    }
    let v4 = [1, 2].map(|host| IpAddr::V4(Ipv4Addr::new(10, 0, 0, host)));
    let v6 = [1, 2].map(|host| IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, host)));
    for addresses in [v4, v6] {
        let pcap = record_traffic(addresses);
        // Its dissector of RPC takes any payload for its own.
        let common = ["--disable-protocol", "rpcordma"];
        let tshark = |arguments: &[&str]| pcap.dissect(&[&common, arguments].concat());
        let text = tshark(&["-V"]);
        assert!(!text.contains("Malformed"), "{text}");
        let fields = |name: &str| -> Vec<String> {
            let lines = tshark(&["-T", "fields", "-e", name]);
            lines.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
        };
        let mut opcodes = fields("infiniband.bth.opcode");
        opcodes.sort();
        opcodes.dedup();
        let mut expected: Vec<String> =
            [0, 1, 2, 4, 6, 7, 8, 10, 12, 13, 14, 15, 17, 23, 100, 129].iter().map(u8::to_string).collect();
        expected.sort();
        assert_eq!(opcodes, expected);
        let attributes = ["0x0010", "0x0013", "0x0014", "0x0015", "0x0016"];
        assert_eq!(fields("infiniband.mad.attributeid"), attributes);
        assert_eq!(fields("infiniband.cm.req.serviceid.dport"), ["0x0cbc"]);
        assert_eq!(fields("infiniband.cm.req.localqpn"), ["0x001234"]);
        assert_eq!(fields("infiniband.cm.req.startpsn"), ["0xfffffe"]);
        assert_eq!(fields("infiniband.cm.rep.localqpn"), ["0x001235"]);
        assert_eq!(fields("infiniband.cm.req.pppmtu"), ["0x03"]);
        assert_eq!(fields("infiniband.cm.req.rnrretrcount"), ["0x06"]);
        assert_eq!(fields("infiniband.reth.dmalen"), ["3000", "3000", "5"]);
        assert_eq!(fields("infiniband.bth.padcnt").iter().filter(|pad| *pad != "0").count(), 4);
    }
}
