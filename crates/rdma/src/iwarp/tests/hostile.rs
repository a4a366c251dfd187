//! A peer that violates the protocol: each violation gets the Terminate message of the RFCs, and no
//! memory is touched that was not granted.

use super::{
    READ, RESPONSE, SEND, TestDriver, WRITE, ample, connected, fpdu, read_request, tagged, ulpdus, untagged,
};
use crate::queue_pair::{Fault, Provider, Violation};
use crate::regions::Refusal;
use blockmux_proto::rdma::{Endpoint, Event, Remote, RemoteRights, Stag, WorkError, WorkId, WorkRequest};
use blockmux_volume::random::mix;
use blockmux_volume::{Memory, SgList};

/// Granted memory between memory that was not granted.
struct GrantedMemory {
    whole: Memory,
    /// The readable and the writable region.
    read: Remote,
    write: Remote,
}

const SIZE: usize = 64 << 10;
const GAP: usize = 4096;
const CLEAN: u8 = 0xcc;

impl GrantedMemory {
    fn new(driver: &mut TestDriver) -> GrantedMemory {
        let whole = Memory::from_heap(3 * GAP + 2 * SIZE);
        whole.seg(0, whole.len()).copy_from(&vec![CLEAN; whole.len()]);
        let mut grant = |at, access| {
            driver.post(WorkRequest::Register { id: WorkId(0), local: whole.seg(at, SIZE).into(), access });
            match driver.iwarp.poll() {
                Some(Event::Registered { remote, .. }) => remote,
                other => panic!("{other:?}"),
            }
        };
        let read = grant(GAP, RemoteRights::RemoteRead);
        let write = grant(2 * GAP + SIZE, RemoteRights::RemoteWrite);
        GrantedMemory { whole, read, write }
    }

    /// Offset of the writable region.
    const WRITABLE: usize = 2 * GAP + SIZE;

    fn bytes(&self) -> Vec<u8> {
        self.whole.seg(0, self.whole.len()).to_vec()
    }

    fn is_clean_but_for(&self, at: usize, len: usize) -> bool {
        let bytes = self.bytes();
        let (begin, end) = (Self::WRITABLE + at, Self::WRITABLE + at + len);
        bytes[..begin].iter().chain(&bytes[end..]).all(|byte| *byte == CLEAN)
    }
}

/// The sent Terminate message: layer and type, code, and the quoted headers.
fn sent_terminate(driver: &mut TestDriver) -> (u8, u8, Vec<u8>) {
    let sent = ulpdus(&driver.sent(usize::MAX));
    let last = sent.last().expect("something was sent");
    assert_eq!(last[..18], untagged([0x41, 0x47], 0, [2, 1, 0], b""), "it is a Terminate message");
    (last[18], last[19], last[20..].to_vec())
}

/// Sends segments, which depend on the granted memory, and returns the Terminate codes that the end
/// sends.
fn outcome_of(is_active: bool, has_crc: bool, segments: &dyn Fn(&GrantedMemory) -> Vec<Vec<u8>>) -> (u8, u8) {
    let endpoint = Endpoint { receives: 2, receive_len: 100, reads: 2, ..ample() };
    let mut driver = connected(is_active, &endpoint, has_crc);
    let field = GrantedMemory::new(&mut driver);
    let bad = segments(&field);
    for ulpdu in &bad {
        driver.push(&fpdu(ulpdu, has_crc));
        while driver.receive() {}
    }
    let error = driver.error.expect("a violation is reported");
    assert!(error.reference.starts_with("RFC 50"), "{error}");
    let (layer, code, copied) = sent_terminate(&mut driver);
    let events = driver.events();
    assert!(matches!(events.last(), Some(Event::Disconnected)), "{events:?}");
    assert!(field.is_clean_but_for(0, 0), "memory was touched");
    assert!(matches!(driver.iwarp.fault(), Some(Fault::Peer(_))) && driver.has_left());
    let wrong = bad.last().unwrap();
    if copied[0] & 0x80 != 0 {
        assert_eq!(copied[2..4], (wrong.len() as u16).to_be_bytes());
        assert_eq!(copied[4..], wrong[..copied.len() - 4]);
    }
    (layer, code)
}

type Segments = Box<dyn Fn(&GrantedMemory) -> Vec<Vec<u8>>>;

fn each(one: impl Fn(&GrantedMemory) -> Vec<u8> + 'static) -> Segments {
    Box::new(move |field| vec![one(field)])
}

fn faults_of_untagged_segments() -> Vec<(&'static str, Segments, (u8, u8))> {
    let message =
        |control, place: [u32; 3], len: usize| each(move |_| untagged(control, 0, place, &vec![1; len]));
    let read = |place: [u32; 3]| {
        each(move |field| {
            untagged(READ, 0, place, &read_request((1, 0), 8, (field.read.stag.0, field.read.address)))
        })
    };
    vec![
        ("version of DDP", message([0x42, 0x43], [0, 1, 0], 4), (0x12, 6)),
        ("queue", message(SEND, [3, 1, 0], 4), (0x12, 1)),
        ("queue of all bits", message(SEND, [u32::MAX, 1, 0], 4), (0x12, 1)),
        ("version of RDMAP", message([0x41, 0x83], [0, 1, 0], 4), (0x02, 5)),
        ("opcode that there is not", message([0x41, 0x4f], [0, 1, 0], 4), (0x02, 6)),
        ("send among reads", message(SEND, [1, 1, 0], 28), (0x02, 6)),
        ("read among sends", read([0, 1, 0]), (0x02, 6)),
        ("terminate among sends", message([0x41, 0x47], [0, 1, 0], 4), (0x02, 6)),
        ("write that is untagged", message([0x41, 0x40], [0, 1, 0], 4), (0x02, 6)),
        ("response that is untagged", message([0x41, 0x42], [0, 1, 0], 4), (0x02, 6)),
        ("message of number 0", message(SEND, [0, 0, 0], 4), (0x12, 3)),
        ("message that was skipped to", message(SEND, [0, 2, 0], 4), (0x12, 3)),
        ("offset of a first segment", message(SEND, [0, 1, 4], 4), (0x12, 4)),
        ("message too long", message(SEND, [0, 1, 0], 101), (0x12, 5)),
        (
            "message too long by its second segment",
            Box::new(|_| {
                vec![untagged([0x01, 0x43], 0, [0, 1, 0], &[1; 60]), untagged(SEND, 0, [0, 1, 60], &[1; 41])]
            }),
            (0x12, 5),
        ),
        (
            "offset of a second segment",
            Box::new(|_| {
                vec![untagged([0x01, 0x43], 0, [0, 1, 0], &[1; 60]), untagged(SEND, 0, [0, 1, 59], &[1; 4])]
            }),
            (0x12, 4),
        ),
        (
            "opcode of a second segment",
            Box::new(|_| {
                vec![
                    untagged([0x01, 0x43], 0, [0, 1, 0], &[1; 60]),
                    untagged([0x41, 0x45], 0, [0, 1, 60], b""),
                ]
            }),
            (0x02, 6),
        ),
        (
            "message without a buffer",
            Box::new(|_| (1..4).map(|msn| untagged(SEND, 0, [0, msn, 0], b"x")).collect()),
            (0x12, 2),
        ),
        ("closing what is not open", each(|_| untagged([0x41, 0x44], 77, [0, 1, 0], b"x")), (0x02, 9)),
        ("read of number 0", read([1, 0, 0]), (0x12, 3)),
        ("read with an offset", read([1, 1, 4]), (0x12, 4)),
        ("read that is short", message(READ, [1, 1, 0], 27), (0x02, 0xff)),
        ("read that is long", message(READ, [1, 1, 0], 29), (0x12, 5)),
        ("read that is not whole", message([0x01, 0x41], [1, 1, 0], 28), (0x02, 0xff)),
        ("frame that is too short", each(|_| vec![0x41; 13]), (0x20, 3)),
        ("frame that is too short for an untagged header", each(|_| vec![0x41; 17]), (0x20, 3)),
    ]
}

fn faults_of_memory() -> Vec<(&'static str, Segments, (u8, u8))> {
    type PickAddress = fn(&GrantedMemory) -> (u32, u64);
    let write = |pick: PickAddress, len: usize| {
        each(move |field| {
            let (stag, to) = pick(field);
            tagged(WRITE, stag, to, &vec![1; len])
        })
    };
    let read = |pick: PickAddress, len: u32| {
        each(move |field| untagged(READ, 0, [1, 1, 0], &read_request((1, 0), len, pick(field))))
    };
    let writable: PickAddress = |field| (field.write.stag.0, field.write.address);
    let readable: PickAddress = |field| (field.read.stag.0, field.read.address);
    let stale: PickAddress = |field| (field.write.stag.0 ^ 1, field.write.address);
    let before: PickAddress = |field| (field.write.stag.0, field.write.address - 1);
    let end: PickAddress = |field| (field.write.stag.0, field.write.address + SIZE as u64);
    let wraps: PickAddress = |field| (field.write.stag.0, u64::MAX - 2);
    vec![
        ("version of DDP", each(|_| tagged([0xc0, 0x40], 1, 1, b"x")), (0x11, 4)),
        ("version of RDMAP", each(|_| tagged([0xc1, 0x00], 1, 1, b"x")), (0x02, 5)),
        ("send that is tagged", each(|_| tagged([0xc1, 0x43], 1, 1, b"x")), (0x02, 6)),
        ("terminate that is tagged", each(|_| tagged([0xc1, 0x47], 1, 1, b"x")), (0x02, 6)),
        ("response to nothing", each(|_| tagged(RESPONSE, 1, 0, b"x")), (0x02, 6)),
        ("write under no name", write(|_| (0, 0), 1), (0x11, 0)),
        ("write under a stale name", write(stale, 1), (0x11, 0)),
        ("write before the memory", write(before, 4), (0x11, 1)),
        ("write behind the memory", write(end, 1), (0x11, 1)),
        ("write beyond the memory", write(writable, 65_000), (0x11, 1)),
        ("write that wraps", write(wraps, 4), (0x11, 3)),
        ("write where it may read", write(readable, 4), (0x01, 2)),
        ("read under no name", read(|_| (0, 0), 1), (0x01, 0)),
        ("read beyond the memory", read(readable, SIZE as u32 + 1), (0x01, 1)),
        ("read of all there is", read(readable, u32::MAX), (0x01, 1)),
        ("read that wraps", read(|field| (field.read.stag.0, u64::MAX - 2), 4), (0x01, 4)),
        ("read where it may write", read(writable, 4), (0x01, 2)),
    ]
}

#[test]
fn every_violation_by_an_untagged_segment_gets_its_terminate_message() {
    for is_active in [false, true] {
        for (what, segments, expected) in faults_of_untagged_segments() {
            assert_eq!(outcome_of(is_active, false, &segments), expected, "{what}");
            assert_eq!(outcome_of(is_active, true, &segments), expected, "{what}, with CRCs");
        }
    }
}

/// In Linux's software RoCE, an address plus a length wrapped (CVE-2026-98365).
#[test]
fn every_violation_by_a_tagged_segment_gets_its_terminate_message_and_touches_no_memory() {
    for is_active in [false, true] {
        for (what, segments, expected) in faults_of_memory() {
            // 65,000 bytes fit the region of 65,536, so the offset is moved.
            if what == "write beyond the memory" {
                let two: Segments = Box::new(|field| {
                    let to = field.write.address + SIZE as u64 - 64_999;
                    vec![tagged(WRITE, field.write.stag.0, to, &[1; 65_000])]
                });
                assert_eq!(outcome_of(is_active, false, &two), expected, "{what}");
                continue;
            }
            assert_eq!(outcome_of(is_active, false, &segments), expected, "{what}");
        }
    }
}

#[test]
fn more_reads_than_negotiated_are_refused() {
    // Two may be in flight, and none is answered because nothing is taken from the outbox.
    let mut driver = connected(false, &Endpoint { reads: 2, regions: 4, ..ample() }, false);
    let field = GrantedMemory::new(&mut driver);
    let source = (field.read.stag.0, field.read.address);
    // Enough reads to fill the outbox, and more that wait.
    let most = (super::super::OUTBOX_FULL / SIZE + 4) as u32;
    for msn in 1..=most {
        let request = untagged(READ, 0, [1, msn, 0], &read_request((1, 0), SIZE as u32, source));
        driver.push(&fpdu(&request, false));
        while driver.receive() {}
        drop(driver.events());
    }
    assert_eq!(driver.iwarp.fault(), Some(Fault::Peer(Violation::TooManyReads)));
    let (layer, code, copied) = sent_terminate(&mut driver);
    assert_eq!((layer, code, copied[0]), (0x12, 2, 0xe0));
}

/// The messages arrive in one receive, but the peer has sent them one after the other.
#[test]
fn messages_in_one_receive_use_the_buffers_posted_for_earlier_ones() {
    let mut driver = connected(false, &Endpoint { receives: 2, ..ample() }, false);
    let message = |msn| fpdu(&untagged(SEND, 0, [0, msn, 0], &[msn as u8]), false);
    driver.push(&(1..=7).flat_map(message).collect::<Vec<u8>>());
    let mut events = Vec::new();
    while driver.receive() {
        for event in driver.events() {
            let Event::Received { message, .. } = event else { panic!("{event:?}") };
            events.extend(message.to_vec());
            driver.post(WorkRequest::Receive);
        }
    }
    assert_eq!((events, driver.error), (vec![1, 2, 3, 4, 5, 6, 7], None));
    // Receive buffers that are not posted again are missing.
    driver.push(&(8..=10).flat_map(message).collect::<Vec<u8>>());
    while driver.receive() {}
    assert_eq!(driver.iwarp.fault(), Some(Fault::Peer(Violation::NoReceive)));
}

/// An RDMA Read is answered with a range that was not requested.
#[test]
fn every_violation_by_a_read_response_gets_its_terminate_message_and_touches_no_memory() {
    type ReadResponse = fn(u32) -> Vec<u8>;
    let cases: [(ReadResponse, (u8, u8)); 6] = [
        (|sink| tagged(RESPONSE, sink ^ 1, 0, &[1; 64]), (0x11, 0)),
        (|sink| tagged(RESPONSE, sink, 1, &[1; 63]), (0x11, 1)),
        (|sink| tagged(RESPONSE, sink, 0, &[1; 65]), (0x11, 1)),
        (|sink| tagged(RESPONSE, sink, 0, &[1; 63]), (0x11, 1)),
        (|sink| tagged(RESPONSE, sink, u64::MAX, &[1; 64]), (0x11, 1)),
        (|sink| tagged(WRITE, sink, 0, &[1; 64]), (0x11, 0)),
    ];
    for (answer, expected) in cases {
        let mut driver = connected(true, &ample(), false);
        let memory = Memory::from_heap(192);
        let local: SgList = memory.seg(64, 64).into();
        let remote = Remote { stag: Stag(5), address: 0, len: 64 };
        driver.post(WorkRequest::Read { id: WorkId(3), local, remote });
        let sent = ulpdus(&driver.sent(usize::MAX));
        let sink = u32::from_be_bytes(sent[0][18..22].try_into().unwrap());
        driver.push(&fpdu(&answer(sink), false));
        while driver.receive() {}
        let (layer, code, _) = sent_terminate(&mut driver);
        assert_eq!((layer, code), expected);
        let events = driver.events();
        assert!(matches!(
            &events[..],
            [Event::Done { id: WorkId(3), result: Err(WorkError::Flushed) }, Event::Disconnected]
        ));
        assert_eq!(memory.seg(0, 192).to_vec(), [0; 192]);
    }
}

#[test]
fn a_wrong_crc_ends_the_connection_whether_payload_was_copied_or_placed() {
    for len in [64, 60_000] {
        for at in [0, 1] {
            let mut driver = connected(false, &ample(), true);
            let field = GrantedMemory::new(&mut driver);
            let mut bytes =
                fpdu(&tagged(WRITE, field.write.stag.0, field.write.address, &vec![1; len]), true);
            let last = bytes.len() - 1 - at * 40;
            bytes[last] ^= 1;
            // The second part arrives after the first was handled.
            for part in bytes.chunks(len / 2 + 60) {
                driver.push(part);
                while driver.receive() {}
            }
            assert_eq!(driver.places, usize::from(len > 4096));
            let (layer, code, copied) = sent_terminate(&mut driver);
            assert_eq!((layer, code, copied), (0x20, 2, vec![0, 0]));
            assert!(field.is_clean_but_for(0, len));
        }
    }
}

#[test]
fn a_write_to_memory_that_is_invalidated_meanwhile_is_discarded() {
    let mut driver = connected(false, &ample(), false);
    let field = GrantedMemory::new(&mut driver);
    let bytes = fpdu(&tagged(WRITE, field.write.stag.0, field.write.address, &[1; 60_000]), false);
    let (first, second) = bytes.split_at(20_000);
    driver.push(first);
    while driver.receive() {}
    driver.post(WorkRequest::Invalidate { stag: field.write.stag });
    let before = field.bytes();
    driver.push(second);
    while driver.receive() {}
    assert!(field.bytes() == before, "memory was written after it was closed");
    assert_eq!(driver.iwarp.fault(), Some(Fault::Peer(Violation::Refused(Refusal::InvalidStag))));
    let (layer, code, _) = sent_terminate(&mut driver);
    assert_eq!((layer, code), (0x11, 0));
}

#[test]
fn a_read_of_memory_that_is_invalidated_before_its_response_is_refused() {
    let mut driver = connected(false, &ample(), false);
    let field = GrantedMemory::new(&mut driver);
    let source = (field.read.stag.0, field.read.address);
    let request = untagged(READ, 0, [1, 1, 0], &read_request((1, 0), 64, source));
    driver.push(&fpdu(&request, false));
    while driver.receive() {}
    driver.post(WorkRequest::Invalidate { stag: field.read.stag });
    assert!(matches!(&driver.events()[..], [Event::Disconnected]));
    let (layer, code, copied) = sent_terminate(&mut driver);
    assert_eq!((layer, code), (0x01, 0));
    assert_eq!(copied[4..], request);
}

#[test]
fn a_terminate_message_of_the_peer_ends_the_connection_and_is_recorded() {
    let cases: [(&[u8], Violation); 6] = [
        (&[0x11, 0, 0, 0], Violation::Refused(Refusal::InvalidStag)),
        (&[0x12, 2, 0, 0], Violation::NoReceive),
        (&[0x12, 5, 0, 0], Violation::TooLong),
        (&[0x00, 0, 0, 0], Violation::Other),
        (&[0xff; 40], Violation::Other),
        (&[], Violation::Other),
    ];
    for (body, violation) in cases {
        let mut driver = connected(true, &ample(), false);
        driver.push(&fpdu(&untagged([0x41, 0x47], 0, [2, 1, 0], body), false));
        while driver.receive() {}
        assert_eq!(driver.iwarp.fault(), Some(Fault::Ours(violation)));
        assert!(matches!(&driver.events()[..], [Event::Disconnected]));
        assert!(driver.error.is_some() && driver.sent(usize::MAX).is_empty());
    }
}

/// Segments near every border of the granted memory, some of them in pieces: only writable memory
/// changes, and only by writes that lie within it.
#[test]
fn nothing_is_written_outside_of_registered_memory() {
    let mut refused = 0;
    for round in 0..1000_u64 {
        let mut draw = mix(round);
        let mut below = |end: u64| {
            draw = mix(draw);
            draw % end
        };
        let has_crc = below(2) == 0;
        let mut driver = connected(below(2) == 0, &ample(), has_crc);
        let field = GrantedMemory::new(&mut driver);
        let [stag, other] = [field.write.stag.0, field.read.stag.0];
        let name = [stag, stag, stag, stag, other, stag ^ 1, 0][below(7) as usize];
        let len = [0, 1, 100, 5000, 60_000, 65_500][below(6) as usize];
        let edge = [0, 1, SIZE as u64 - len, SIZE as u64, SIZE as u64 - 1, u64::MAX][below(6) as usize];
        let to = field.write.address.wrapping_add(edge).wrapping_add(below(3)).wrapping_sub(1);
        let bytes = fpdu(&tagged(WRITE, name, to, &vec![round as u8 | 1; len as usize]), has_crc);
        for part in bytes.chunks(1 + below(bytes.len() as u64) as usize) {
            driver.push(part);
            while driver.receive() {}
        }
        let at = to.wrapping_sub(field.write.address);
        let is_granted = len == 0 || (name == stag && at < SIZE as u64 && at + len <= SIZE as u64);
        assert_eq!(driver.error.is_none(), is_granted, "{len} bytes at {at:x} of {name:x}");
        let (at, len) = if is_granted && len > 0 { (at as usize, len as usize) } else { (0, 0) };
        assert!(field.is_clean_but_for(at, len));
        let begin = GrantedMemory::WRITABLE + at;
        assert!(field.bytes()[begin..begin + len].iter().all(|byte| *byte == round as u8 | 1));
        refused += u32::from(!is_granted);
    }
    assert!((200..800).contains(&refused), "{refused}");
}
