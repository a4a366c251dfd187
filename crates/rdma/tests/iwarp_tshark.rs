//! tshark dissects a capture of this implementation's traffic without reporting malformed packets.
//!
//! Without tshark the test prints a line that begins with `skipped: ` and passes.
#![allow(clippy::arithmetic_side_effects, clippy::indexing_slicing, reason = "an overflow fails the test")]

mod tshark;

use blockmux_proto::driver::session::{Demand, StreamSession};
use blockmux_proto::rdma::{Event, MessageHead, QueuePair, Remote, RemoteRights, Stag, WorkId, WorkRequest};
use blockmux_rdma::Provider;
use blockmux_rdma::iwarp::{Iwarp, IwarpConfig};
use blockmux_volume::{Chunk, Pool};
use blockmux_wire::iwarp::mpa::fpdu_len;
use std::time::Instant;
use tshark::{Pcap, endpoint, memory};

/// A connection that is recorded as network frames.
struct Capture {
    ends: [Iwarp; 2],
    inbound: [Vec<u8>; 2],
    pcap: Pcap,
    /// TCP sequence number of the next byte of each side.
    sequence: [u32; 2],
    /// Whether each side has sent its set-up frame.
    is_set_up: [bool; 2],
}

impl Capture {
    fn new(config: &IwarpConfig) -> Capture {
        let endpoint = endpoint();
        let (pool, now) = (Pool::new(1 << 20), Instant::now());
        let active = Iwarp::active(&endpoint, config.clone(), pool.clone(), [1; 32], now);
        let passive = Iwarp::passive(&endpoint, config.clone(), pool, [2; 32], now);
        let mut capture = Capture {
            ends: [active, passive],
            inbound: Default::default(),
            pcap: Pcap::new(),
            sequence: [100, 900],
            is_set_up: [false; 2],
        };
        capture.segment(0, SYN, &[]);
        capture.segment(1, SYN | ACK, &[]);
        capture
    }

    /// Records a TCP segment from one side to the other.
    fn segment(&mut self, from: usize, flags: u8, data: &[u8]) {
        let mut frame = vec![0x45, 0];
        frame.extend((40 + data.len() as u16).to_be_bytes());
        frame.extend([0, 0, 0x40, 0, 64, 6, 0, 0]);
        frame.extend([10, 0, 0, from as u8, 10, 0, 0, 1 - from as u8]);
        let ports: [u16; 2] = [40_000, 9_999];
        frame.extend(ports[from].to_be_bytes());
        frame.extend(ports[1 - from].to_be_bytes());
        frame.extend(self.sequence[from].to_be_bytes());
        frame.extend(if flags & ACK != 0 { self.sequence[1 - from] } else { 0 }.to_be_bytes());
        frame.extend([0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
        frame.extend(data);
        self.pcap.record(&frame);
        self.sequence[from] += data.len() as u32 + u32::from(flags & SYN != 0);
    }

    /// Length of the first frame in `bytes`.
    fn frame_len(&mut self, from: usize, bytes: &[u8]) -> usize {
        if !std::mem::replace(&mut self.is_set_up[from], true) {
            return bytes.len();
        }
        fpdu_len(u16::from_be_bytes([bytes[0], bytes[1]]))
    }

    /// Transports everything, one FPDU in each segment; returns the number of events.
    fn settle(&mut self) -> usize {
        let mut events = 0;
        loop {
            let mut has_moved = false;
            for from in 0..2 {
                while let Some(event) = self.ends[from].poll() {
                    events += 1;
                    if matches!(event, Event::Requested { .. }) {
                        self.ends[from].post(WorkRequest::Accept { private_data: b"yes".to_vec() });
                    }
                    has_moved = true;
                }
                let bytes = self.ends[from].outbox().take_bytes();
                let mut rest = &bytes[..];
                while !rest.is_empty() {
                    let (frame, later) = rest.split_at(self.frame_len(from, rest));
                    self.segment(from, ACK | PUSH, frame);
                    rest = later;
                }
                has_moved |= !bytes.is_empty();
                self.inbound[1 - from].extend(&bytes);
                self.deliver(1 - from);
            }
            if !has_moved {
                return events;
            }
        }
    }

    fn deliver(&mut self, to: usize) {
        let (end, inbound) = (&mut self.ends[to], &mut self.inbound[to]);
        while let Demand::Bytes(least) = end.demand()
            && inbound.len() >= least
        {
            match end.on_bytes(&Chunk::from_slice(inbound), Instant::now()) {
                Ok(taken) => drop(inbound.drain(..taken)),
                Err(_) => return inbound.clear(),
            }
        }
    }

    fn grant(&mut self, len: usize, access: RemoteRights) -> Remote {
        let local = memory(len);
        self.ends[1].post(WorkRequest::Register { id: WorkId(0), local, access });
        match self.ends[1].poll() {
            Some(Event::Registered { remote, .. }) => remote,
            other => panic!("{other:?}"),
        }
    }

    fn post(&mut self, work: WorkRequest) {
        self.ends[0].post(work);
        assert!(self.settle() > 0);
    }
}

/// Sends work of every kind, and a Terminate message at the end; returns the capture.
fn record_traffic(config: &IwarpConfig) -> Pcap {
    let mut capture = Capture::new(config);
    capture.settle();
    let write = capture.grant(40_000, RemoteRights::RemoteWrite);
    let closed = capture.grant(10, RemoteRights::RemoteWrite);
    let read = capture.grant(40_000, RemoteRights::RemoteRead);
    let id = WorkId(1);
    for (len, invalidate, is_solicited) in
        [(0, None, false), (3, None, true), (9000, Some(closed.stag), false), (5, Some(write.stag), true)]
    {
        let len_before = Remote { len: 40_000, ..write };
        if is_solicited {
            capture.post(WorkRequest::Write { id, local: memory(40_000), remote: len_before });
        }
        let (head, payload) = (MessageHead::from_slice(&[0; 20]), memory(len));
        capture.post(WorkRequest::Send { id, head, payload, invalidate, is_solicited });
        if invalidate.is_none() {
            capture.post(WorkRequest::Read {
                id,
                local: memory(39_999),
                remote: Remote { len: 39_999, ..read },
            });
        }
    }
    capture.ends[0].post(WorkRequest::Write {
        id,
        local: memory(8),
        remote: Remote { stag: Stag(4), address: 0, len: 8 },
    });
    capture.settle();
    assert!(capture.ends.iter().all(|end| end.fault().is_some()), "the last one is refused");
    capture.pcap
}

#[test]
fn tshark_finds_nothing_malformed_in_our_traffic() {
    if !tshark::is_installed() {
        println!("skipped: tshark is not installed");
        return;
    }
    for has_crc in [false, true] {
        let config = IwarpConfig { has_crc, mss: SEGMENT, ..IwarpConfig::default() };
        let text = record_traffic(&config).dissect(&["-o", "tcp.try_heuristic_first:TRUE", "-V"]);
        for mark in ["Malformed", "Bad CRC", "Bad length", "NOT set"] {
            assert!(!text.contains(mark), "{}", around(&text, mark));
        }
        let count = |what: &str| text.matches(what).count();
        let opcodes =
            [("Write", 11), ("Read Request", 2), ("Read Response", 10), ("Send ", 0), ("Terminate", 1)];
        for (opcode, least) in opcodes {
            let found = count(&format!("OpCode: {opcode}"));
            assert!(found >= least, "{found} of {opcode}");
        }
        for opcode in ["Send (", "Send with Invalidate (", "Send with SE (", "Send with SE and Invalidate ("]
        {
            assert!(count(&format!("OpCode: {opcode}")) > 0, "no {opcode}");
        }
        assert_eq!(count("Good CRC") > 25, has_crc);
    }
}

/// The frame that contains `mark`.
fn around<'a>(text: &'a str, mark: &str) -> &'a str {
    let at = text.find(mark).unwrap_or_default();
    let begin = text[..at].rfind("\nFrame ").unwrap_or_default();
    &text[begin..text[at..].find("\nFrame ").map_or(text.len(), |end| at + end)]
}

const SYN: u8 = 2;
const PUSH: u8 = 8;
const ACK: u8 = 16;
/// Segment size with jumbo frames, in bytes.
const SEGMENT: usize = 8948;
