//! Captures of Linux 6.12 on both sides over siw, with one side replaced by this implementation.
//!
//! This side is made to post the kernel's work, receives what the other side sent, and has to send
//! the same bytes. Two things differ and are translated: steering tags, which each side chooses
//! itself, and padding, which siw does not clear. `crates/wire/tests/iwarp_captures.rs` describes
//! the captures.

use super::super::{Iwarp, IwarpConfig};
use super::{TestDriver, fpdu};
use crate::queue_pair::Provider;
use blockmux_proto::rdma::{Endpoint, Event, MessageHead, Remote, RemoteRights, Stag, WorkId, WorkRequest};
use blockmux_volume::{Memory, Pool, Seg, SgList};
use blockmux_wire::iwarp::ddp::{Control, TAGGED_LEN, Tagged, UNTAGGED_LEN, Untagged};
use blockmux_wire::iwarp::mpa::fpdu_len;
use blockmux_wire::iwarp::rdmap::{RdmapOpcode, ReadRequest};
use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;
use zerocopy::{FromBytes, IntoBytes, U32, U64};

const NVME: &[u8] = include_bytes!("../../../../wire/tests/data/nvme-siw.bin");
const SRP: &[u8] = include_bytes!("../../../../wire/tests/data/srp-siw-crc.bin");

/// The set-up frame of each side.
type SetupFrames = [Vec<u8>; 2];

/// The segments of both sides in the order of the capture, and the set-up frames before them.
fn segments(mut capture: &[u8]) -> (SetupFrames, Vec<(usize, Vec<u8>)>) {
    let (mut streams, mut setup, mut segments) =
        ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()], Vec::new());
    while let [side, a, b, c, d, rest @ ..] = capture {
        let side = usize::from(*side);
        let (bytes, rest) = rest.split_at(u32::from_be_bytes([*a, *b, *c, *d]) as usize);
        capture = rest;
        let stream: &mut Vec<u8> = &mut streams[side];
        stream.extend(bytes);
        if setup[side].is_empty() {
            let data = usize::from(u16::from_be_bytes([stream[18], stream[19]]));
            setup[side] = stream.drain(..20 + data).collect();
        }
        while let Some(length) = stream.first_chunk::<2>() {
            let len = u16::from_be_bytes(*length);
            if stream.len() < fpdu_len(len) {
                break;
            }
            let fpdu: Vec<u8> = stream.drain(..fpdu_len(len)).collect();
            segments.push((side, fpdu[2..2 + usize::from(len)].to_vec()));
        }
    }
    (setup, segments)
}

fn control(ulpdu: &[u8]) -> Control {
    Control::read_from_prefix(ulpdu).unwrap().0
}

/// Maps a steering tag and base offset of the capture to this side's memory.
#[derive(Default)]
struct StagTranslation(BTreeMap<u32, (u64, Remote)>);

impl StagTranslation {
    fn translate(&self, stag: u32, to: u64) -> (u32, u64) {
        let (base, ours) = self.0.get(&stag).expect("a known tag");
        (ours.stag.0, ours.address + (to - base))
    }

    /// A tagged segment with this side's tag and offset.
    fn tagged(&self, ulpdu: &[u8]) -> Vec<u8> {
        let (header, payload) = Tagged::read_from_prefix(ulpdu).unwrap();
        if payload.is_empty() {
            return ulpdu.to_vec();
        }
        let (stag, to) = self.translate(header.stag.get(), header.to.get());
        let header = Tagged { stag: U32::new(stag), to: U64::new(to), ..header };
        [header.as_bytes(), payload].concat()
    }
}

/// This side of the connection.
struct CaptureReplay {
    driver: TestDriver,
    has_crc: bool,
    /// The segments that it has to send, translated.
    expected: VecDeque<Vec<u8>>,
    compared: usize,
    /// The sink tags of this side's reads.
    sinks: StagTranslation,
    /// The body so far of a message or write in several segments.
    body: Vec<u8>,
    received: usize,
}

impl CaptureReplay {
    fn new(driver: TestDriver, has_crc: bool) -> CaptureReplay {
        let (sinks, expected) = (StagTranslation::default(), VecDeque::new());
        CaptureReplay { driver, has_crc, expected, compared: 0, sinks, body: Vec::new(), received: 0 }
    }

    fn receive(&mut self, ulpdu: &[u8]) {
        self.driver.push(&fpdu(ulpdu, self.has_crc));
        while self.driver.receive() {}
        for event in self.driver.events() {
            match event {
                Event::Received { .. } => self.driver.post(WorkRequest::Receive),
                Event::Done { result: Ok(()), .. } => {}
                other => panic!("{other:?}, {:?}", self.driver.error),
            }
            self.received += 1;
        }
    }

    /// Posts the work that leads to this segment of the kernel.
    fn say(&mut self, ulpdu: &[u8]) {
        let control = control(ulpdu);
        let header_len = if control.is_tagged() { TAGGED_LEN } else { UNTAGGED_LEN };
        let mut ours = ulpdu.to_vec();
        self.body.extend(&ulpdu[header_len..]);
        match control.opcode() {
            RdmapOpcode::RDMA_READ_RESPONSE => self.body.clear(),
            RdmapOpcode::RDMA_READ_REQUEST => ours = self.read(ulpdu),
            _ if !control.is_last() => {}
            RdmapOpcode::RDMA_WRITE => {
                let header = Tagged::read_from_prefix(ulpdu).unwrap().0;
                let len = self.body.len();
                // The offset is that of the last segment.
                let address = header.to.get() - (len - (ulpdu.len() - TAGGED_LEN)) as u64;
                let remote = Remote { stag: Stag(header.stag.get()), address, len: len as u32 };
                let local = Seg::from_slice(&std::mem::take(&mut self.body)).into();
                self.driver.post(WorkRequest::Write { id: WorkId(0), local, remote });
            }
            opcode => {
                let header = Untagged::read_from_prefix(ulpdu).unwrap().0;
                let body = std::mem::take(&mut self.body);
                let (head, payload) = body.split_at(body.len().min(100));
                let invalidate = opcode.invalidates().then(|| Stag(header.invalidate_stag.get()));
                let is_solicited = opcode.0 >= RdmapOpcode::SEND_WITH_SE.0;
                let (head, payload) = (MessageHead::from_slice(head), SgList::one(Seg::from_slice(payload)));
                self.driver.post(WorkRequest::Send {
                    id: WorkId(0),
                    head,
                    payload,
                    invalidate,
                    is_solicited,
                });
            }
        }
        self.expected.push_back(ours);
        self.compare();
    }

    /// Posts a read of the kernel; returns its segment with this side's sink tag.
    fn read(&mut self, ulpdu: &[u8]) -> Vec<u8> {
        let request = ReadRequest::read_from_bytes(&std::mem::take(&mut self.body)[..]).unwrap();
        let (address, len) = (request.src_to.get(), request.rdma_rd_sz.get());
        let local = Memory::from_heap(len as usize).seg(0, len as usize).into();
        let remote = Remote { stag: Stag(request.src_stag.get()), address, len };
        self.driver.post(WorkRequest::Read { id: WorkId(0), local, remote });
        let number = self.sinks.0.len() as u32 + 1;
        let sink = Remote { stag: Stag(1 << 31 | number), address: 0, len };
        self.sinks.0.insert(request.sink_stag.get(), (request.sink_to.get(), sink));
        let ours = ReadRequest { sink_stag: U32::new(sink.stag.0), sink_to: U64::new(0), ..request };
        [&ulpdu[..UNTAGGED_LEN], ours.as_bytes()].concat()
    }

    fn compare(&mut self) {
        let mut sent = &self.driver.sent(usize::MAX)[..];
        while !sent.is_empty() {
            let expected =
                fpdu(&self.expected.pop_front().expect("it sends no more than the kernel"), self.has_crc);
            let (ours, rest) = sent.split_at(expected.len().min(sent.len()));
            assert!(ours == expected, "frame {}", self.compared);
            (sent, self.compared) = (rest, self.compared + 1);
        }
    }
}

fn endpoint(reads: u32) -> Endpoint {
    Endpoint {
        receives: 64,
        receive_len: 16 << 10,
        sends: 64,
        reads,
        regions: 64,
        private_data: Vec::new(),
        without_invalidation: None,
    }
}

/// This implementation in place of the kernel's target.
fn answer_the_kernel(capture: &[u8], mss: usize) -> (CaptureReplay, [Vec<u8>; 2], Vec<u8>) {
    let (setup, segments) = segments(capture);
    let config = IwarpConfig { mss, is_peer_to_peer: false, ..IwarpConfig::default() };
    let iwarp = Iwarp::passive(&endpoint(128), config, Pool::new(1 << 20), [3; 32], Instant::now());
    let mut driver = TestDriver::new(iwarp, usize::MAX);
    driver.push(&setup[0]);
    while driver.receive() {}
    assert!(
        matches!(&driver.events()[..], [Event::Requested { private_data, .. }] if setup[0].ends_with(private_data))
    );
    driver.post(WorkRequest::Accept { private_data: setup[1][24..].to_vec() });
    let reply = driver.sent(usize::MAX);
    assert!(matches!(&driver.events()[..], [Event::Connected { .. }]));
    let mut replay = CaptureReplay::new(driver, setup[0][16] & 0x40 != 0);
    for (side, ulpdu) in segments {
        match side {
            0 if control(&ulpdu).is_tagged() => replay.receive(&replay.sinks.tagged(&ulpdu)),
            0 => replay.receive(&ulpdu),
            _ => replay.say(&ulpdu),
        }
        replay.compare();
    }
    assert!(replay.expected.is_empty(), "it sends no less than the kernel");
    (replay, setup, reply)
}

#[test]
fn the_kernels_nvme_host_gets_the_same_bytes_as_from_the_kernel() {
    let (replay, setup, reply) = answer_the_kernel(NVME, 8944);
    assert_eq!(reply, setup[1]);
    assert_eq!((replay.compared, replay.received > 30), (19, true));
}

#[test]
fn the_kernels_srp_initiator_gets_the_same_bytes_as_from_the_kernel() {
    let (replay, _, _) = answer_the_kernel(SRP, 8928);
    assert_eq!((replay.compared, replay.received > 60), (58, true));
}

/// Registers memory for each tag of the kernel's initiator: the memory that the target writes, and
/// the memory that it reads or invalidates.
fn open_memory(driver: &mut TestDriver, segments: &[(usize, Vec<u8>)]) -> [StagTranslation; 2] {
    let mut writes = BTreeMap::<u32, (u64, u64)>::new();
    let (mut reads, mut answer) = (Vec::new(), Vec::new());
    for (side, ulpdu) in segments {
        let control = control(ulpdu);
        match control.opcode() {
            RdmapOpcode::RDMA_WRITE => {
                let (header, payload) = Tagged::read_from_prefix(ulpdu).unwrap();
                let (begin, end) = (header.to.get(), header.to.get() + payload.len() as u64);
                let range = writes.entry(header.stag.get()).or_insert((begin, end));
                *range = (range.0.min(begin), range.1.max(end));
            }
            RdmapOpcode::RDMA_READ_REQUEST => {
                reads.push(ReadRequest::read_from_bytes(&ulpdu[UNTAGGED_LEN..]).unwrap())
            }
            RdmapOpcode::RDMA_READ_RESPONSE => answer.extend(&ulpdu[TAGGED_LEN..]),
            opcode if *side == 1 && opcode.invalidates() => {
                let stag = Untagged::read_from_prefix(ulpdu).unwrap().0.invalidate_stag.get();
                writes.entry(stag).or_insert((0, 1));
            }
            _ => {}
        }
    }
    let mut open = |local: SgList, access| {
        driver.post(WorkRequest::Register { id: WorkId(0), local, access });
        match driver.iwarp.poll() {
            Some(Event::Registered { remote, .. }) => remote,
            other => panic!("{other:?}"),
        }
    };
    let [mut written, mut read] = [StagTranslation::default(), StagTranslation::default()];
    for request in reads {
        let rest = answer.split_off(request.rdma_rd_sz.get() as usize);
        let remote =
            open(Seg::from_slice(&std::mem::replace(&mut answer, rest)).into(), RemoteRights::RemoteRead);
        writes.remove(&request.src_stag.get());
        read.0.insert(request.src_stag.get(), (request.src_to.get(), remote));
    }
    for (stag, (begin, end)) in writes {
        let len = (end - begin) as usize;
        let remote = open(Memory::from_heap(len).seg(0, len).into(), RemoteRights::RemoteWrite);
        written.0.insert(stag, (begin, remote));
    }
    [written, read]
}

#[test]
fn the_kernels_nvme_controller_gets_the_same_bytes_as_from_the_kernel() {
    let (setup, segments) = segments(NVME);
    let config = IwarpConfig { mss: 8944, is_peer_to_peer: false, ..IwarpConfig::default() };
    let endpoint = Endpoint { private_data: setup[0][24..].to_vec(), ..endpoint(128) };
    let iwarp = Iwarp::active(&endpoint, config, Pool::new(1 << 20), [3; 32], Instant::now());
    let mut driver = TestDriver::new(iwarp, usize::MAX);
    let mut request = driver.sent(usize::MAX);
    assert_eq!(request[20..24], [0, 128, 0, 128]);
    // The kernel's host supports no reads of its own (ORD 0).
    request[23] = 0;
    assert_eq!(request, setup[0]);
    driver.push(&setup[1]);
    while driver.receive() {}
    assert!(
        matches!(&driver.events()[..], [Event::Connected { private_data }] if setup[1].ends_with(private_data))
    );
    let [written, read] = open_memory(&mut driver, &segments);
    let mut replay = CaptureReplay::new(driver, false);
    for (side, ulpdu) in segments {
        if side == 0 {
            replay.say(&ulpdu);
            continue;
        }
        let (control, mut segment) = (control(&ulpdu), ulpdu.clone());
        if control.is_tagged() {
            segment = written.tagged(&ulpdu);
        } else if control.opcode() == RdmapOpcode::RDMA_READ_REQUEST {
            let request = ReadRequest::read_from_bytes(&ulpdu[UNTAGGED_LEN..]).unwrap();
            let (stag, to) = read.translate(request.src_stag.get(), request.src_to.get());
            let ours = ReadRequest { src_stag: U32::new(stag), src_to: U64::new(to), ..request };
            segment = [&ulpdu[..UNTAGGED_LEN], ours.as_bytes()].concat();
        } else if control.opcode().invalidates() {
            let header = Untagged::read_from_prefix(&ulpdu).unwrap().0;
            let stag = header.invalidate_stag.get();
            let names = if written.0.contains_key(&stag) { &written } else { &read };
            let header = Untagged { invalidate_stag: U32::new(names.0[&stag].1.stag.0), ..header };
            segment = [header.as_bytes(), &ulpdu[UNTAGGED_LEN..]].concat();
        }
        // A response is sent immediately here, and later in the capture.
        replay.receive(&segment);
    }
    replay.compare();
    assert_eq!((replay.compared, replay.expected.len()), (16, 0));
}
