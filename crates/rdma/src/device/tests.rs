//! Two queue pairs, joined by a model of a device: it executes the work of records in order, and
//! reports what the other end sees.

use super::records::{DeviceEvent, DeviceFailure, DeviceRemote, EventRecord, WORK_LEN, WorkRecord, WorkVerb};
use super::*;
use blockmux_proto::driver::outbox::OutboxPiece;
use blockmux_volume::Memory;

/// One end, with what the device knows of it.
struct TestEnd {
    queue_pair: DeviceQueuePair,
    /// Receive buffers that are posted.
    receives: u32,
    /// Key of each window, with the memory that it opens and whether it may be written.
    windows: Vec<(u32, Option<(Seg, bool)>)>,
    /// Keys of exposed memory by its number.
    exposed: Vec<(u32, Option<Seg>)>,
    /// Whether the device executes its work.
    is_running: bool,
}

struct TestPair {
    ends: [TestEnd; 2],
    /// Work that the device has taken and not executed, of each end.
    taken: [VecDeque<(WorkRecord, Vec<u8>, SgList)>; 2],
    is_confined: bool,
    /// Of memory that is exposed next.
    next_key: u32,
}

const ACTIVE: usize = 0;
const PASSIVE: usize = 1;

impl TestPair {
    fn new(active: &Endpoint, passive: &Endpoint) -> TestPair {
        TestPair::over(false, active, passive)
    }

    /// By devices without windows if `is_confined`.
    fn over(is_confined: bool, active: &Endpoint, passive: &Endpoint) -> TestPair {
        let now = Instant::now();
        let queue_pairs = [DeviceQueuePair::active(active, now), DeviceQueuePair::passive(passive, now)];
        let ends = queue_pairs.map(|queue_pair| TestEnd {
            queue_pair,
            receives: 0,
            windows: Vec::new(),
            exposed: Vec::new(),
            is_running: true,
        });
        let taken = [VecDeque::new(), VecDeque::new()];
        let mut pair = TestPair { ends, taken, is_confined, next_key: 0x40 };
        pair.report(ACTIVE, DeviceEvent::Resolved { is_confined }, &[]);
        pair
    }

    /// A connection, with all events of its beginning checked.
    fn connected(endpoint: &Endpoint) -> TestPair {
        TestPair::new(endpoint, endpoint).connect(&endpoint.private_data)
    }

    /// Connects, with the private data that the passive side is to see.
    fn connect(self, said: &[u8]) -> TestPair {
        let mut pair = self;
        pair.run();
        let [Event::Requested { private_data, reads }] = &pair.events(PASSIVE)[..] else { panic!() };
        assert_eq!((&private_data[..], *reads), (said, endpoint().reads));
        pair.post(PASSIVE, WorkRequest::Accept { private_data: b"welcome".to_vec() });
        pair.run();
        let [Event::Connected { private_data }] = &pair.events(ACTIVE)[..] else { panic!() };
        assert_eq!(private_data, b"welcome");
        assert!(
            matches!(&pair.events(PASSIVE)[..], [Event::Connected { private_data }] if private_data.is_empty())
        );
        pair
    }

    fn post(&mut self, side: usize, work: WorkRequest) {
        self.ends[side].queue_pair.post(work);
    }

    fn send(&mut self, side: usize, text: &[u8], invalidate: Option<Stag>) {
        self.ends[side].queue_pair.send(text, &SgList::default(), invalidate);
    }

    fn register(&mut self, side: usize, local: &SgList, access: RemoteRights) -> Remote {
        let remote = self.ends[side].queue_pair.register(WorkId(7), &mut local.clone(), access);
        remote.expect("a window is free")
    }

    fn events(&mut self, side: usize) -> Vec<Event> {
        std::iter::from_fn(|| self.ends[side].queue_pair.poll()).collect()
    }

    fn report(&mut self, side: usize, event: DeviceEvent, bytes: &[u8]) {
        let record = EventRecord { event, bytes: bytes.len() as u32 };
        let whole = [&record.to_bytes()[..], bytes].concat();
        // A part of a record is not taken.
        let part = Chunk::from_slice(&whole[..whole.len() - 1]);
        let queue_pair = &mut self.ends[side].queue_pair;
        assert_eq!(queue_pair.on_bytes(&part, Instant::now()), Ok(0));
        let Demand::Bytes(wanted) = queue_pair.demand() else { return };
        assert!(wanted <= whole.len());
        assert_eq!(queue_pair.on_bytes(&Chunk::from_slice(&whole), Instant::now()), Ok(whole.len()));
    }

    /// Executes all work of both ends.
    fn run(&mut self) {
        loop {
            for side in [ACTIVE, PASSIVE] {
                self.take_work(side);
            }
            let next = [ACTIVE, PASSIVE].into_iter().find_map(|side| {
                let work = self.ends[side].is_running.then(|| self.taken[side].pop_front()).flatten();
                Some((side, work?))
            });
            let Some((side, (record, bytes, memory))) = next else { return };
            self.execute(side, &record, &bytes, memory);
        }
    }

    fn take_work(&mut self, side: usize) {
        let outbox = self.ends[side].queue_pair.outbox();
        let mut pieces = outbox.pieces();
        let mut heads: &[u8] = &[];
        loop {
            if heads.is_empty() {
                match pieces.next() {
                    Some(OutboxPiece::Head(bytes)) => heads = bytes,
                    Some(OutboxPiece::Payload(_)) => panic!("memory without work"),
                    None => break,
                }
            }
            let (record, rest) = heads.split_at(WORK_LEN);
            let record = WorkRecord::from_bytes(record).unwrap();
            let (bytes, rest) = rest.split_at(record.bytes.into());
            heads = rest;
            let mut memory = SgList::default();
            while memory.len() < record.memory as usize {
                let Some(OutboxPiece::Payload(seg)) = pieces.next() else { panic!("memory is missing") };
                memory.push(seg.clone());
            }
            self.taken[side].push_back((record, bytes.to_vec(), memory));
        }
        drop(pieces);
        let len = outbox.len();
        outbox.consume(len);
    }

    fn execute(&mut self, side: usize, record: &WorkRecord, bytes: &[u8], memory: SgList) {
        let (other, id) = (1 - side, record.id);
        let done = |result| DeviceEvent::Done { id, result };
        match record.verb {
            WorkVerb::Connect(queues) => {
                self.make(side, &queues);
                let is_confined = self.is_confined;
                self.report(other, DeviceEvent::Requested { reads: queues.reads, is_confined }, bytes);
            }
            WorkVerb::Accept(queues) => {
                self.make(side, &queues);
                for (side, data) in [(side, &[][..]), (other, bytes)] {
                    let keys = self.ends[side].windows.iter().flat_map(|(key, _)| key.to_be_bytes());
                    let bytes: Vec<u8> = keys.chain(data.iter().copied()).collect();
                    let windows = self.ends[side].windows.len() as u32;
                    self.report(side, DeviceEvent::Connected { windows, reads: queues.reads }, &bytes);
                }
            }
            WorkVerb::Reject => self.report(other, DeviceEvent::Refused, bytes),
            WorkVerb::Receive(count) => self.ends[side].receives += count,
            WorkVerb::Send { invalidate, .. } => {
                let Some(left) = self.ends[other].receives.checked_sub(1) else {
                    return self.report(side, done(Err(DeviceFailure::NoReceive)), &[]);
                };
                self.ends[other].receives = left;
                for (key, opened) in &mut self.ends[other].windows {
                    if Some(*key) == invalidate {
                        *opened = None;
                    }
                }
                let message = [bytes, &memory.to_vec()[..]].concat();
                self.report(other, DeviceEvent::Received { invalidated: invalidate }, &message);
                self.report(side, done(Ok(())), &[]);
            }
            WorkVerb::Read(remote) => {
                let result = self.remote(other, remote, memory.len(), false).map(|remote| {
                    SgList::one(remote).copy_to_list(&memory);
                });
                self.report(side, done(result), &[]);
            }
            WorkVerb::Write(remote) => {
                let result = self.remote(other, remote, memory.len(), true).map(|remote| {
                    memory.copy_to_list(&SgList::one(remote));
                });
                self.report(side, done(result), &[]);
            }
            WorkVerb::Bind { window, key, is_write } => {
                let [whole] = memory.segs() else { panic!("a window has one piece of memory") };
                let (known, opened) = &mut self.ends[side].windows[window as usize];
                assert!(opened.is_none() && *known >> 8 == key >> 8 && *known != key);
                (*known, *opened) = (key, Some((whole.clone(), is_write)));
            }
            WorkVerb::Close { window } => {
                let (key, opened) = &mut self.ends[side].windows[window as usize];
                *opened = None;
                // Another window has another key.
                *key += 0x1000_0000;
                let key = *key;
                self.report(side, DeviceEvent::Closed { window, key }, &[]);
            }
            WorkVerb::Expose { number } => {
                let exposed = &mut self.ends[side].exposed;
                exposed.resize(exposed.len().max(number as usize + 1), (0, None));
                assert!(exposed[number as usize].1.is_none(), "its place is vacant");
                let key = self.next_key;
                self.next_key += 1;
                exposed[number as usize] = (key, memory.segs().first().cloned());
                self.report(side, DeviceEvent::Exposed { number, key }, &[]);
            }
            WorkVerb::Conceal { number } => self.ends[side].exposed[number as usize].1 = None,
            WorkVerb::Disconnect => {
                for side in [side, other] {
                    self.ends[side].queue_pair.on_end(Instant::now()).unwrap();
                }
            }
        }
    }

    fn make(&mut self, side: usize, queues: &DeviceQueues) {
        self.ends[side].receives += queues.receives;
        let windows = if self.is_confined { 0 } else { queues.windows };
        self.ends[side].windows = (1..=windows).map(|index| (index << 8, None)).collect();
    }

    fn remote(
        &self,
        side: usize,
        remote: DeviceRemote,
        len: usize,
        is_write: bool,
    ) -> Result<Seg, DeviceFailure> {
        let windows = self.ends[side].windows.iter();
        let found = windows.filter(|(key, _)| *key == remote.key).find_map(|(_, opened)| opened.as_ref());
        let found = found.filter(|(_, may_be_written)| *may_be_written == is_write);
        let exposed = self.ends[side].exposed.iter().find(|(key, _)| *key == remote.key);
        let exposed = exposed.and_then(|(_, seg)| seg.as_ref());
        let seg = found.map(|(seg, _)| seg).or(exposed).ok_or(DeviceFailure::RemoteAccess)?;
        let start = remote.address - seg.as_ptr().addr() as u64;
        Ok(seg.slice(start as usize, len))
    }
}

fn endpoint() -> Endpoint {
    Endpoint {
        receives: 2,
        receive_len: 64,
        sends: 4,
        reads: 2,
        regions: 1,
        private_data: b"hello".to_vec(),
        without_invalidation: None,
    }
}

fn memory(bytes: &[u8]) -> SgList {
    SgList::one(Seg::from_slice(bytes))
}

fn blank(len: usize) -> SgList {
    SgList::one(Memory::from_heap(len).seg(0, len))
}

#[test]
fn messages_arrive_in_order_and_complete() {
    let mut pair = TestPair::connected(&endpoint());
    assert_eq!(pair.ends[ACTIVE].queue_pair.room(), 4);
    pair.send(ACTIVE, b"first", None);
    let payload = memory(b"-payload");
    pair.ends[ACTIVE].queue_pair.send(b"second", &payload, None);
    assert_eq!(pair.ends[ACTIVE].queue_pair.room(), 2);
    pair.run();
    let received: Vec<_> = pair.events(PASSIVE);
    let texts: Vec<_> = received
        .iter()
        .map(|event| match event {
            Event::Received { message, invalidated: None, .. } => message.to_vec(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(texts, [b"first".to_vec(), b"second-payload".to_vec()]);
    assert_eq!(pair.events(ACTIVE).len(), 2);
    assert_eq!(pair.ends[ACTIVE].queue_pair.room(), 4);
}

#[test]
fn reads_and_writes_reach_exactly_what_a_window_opens() {
    let mut pair = TestPair::connected(&endpoint());
    let source = pair.register(ACTIVE, &memory(b"0123456789"), RemoteRights::RemoteRead);
    let local = blank(4);
    let part = Remote { address: source.address + 3, len: 4, ..source };
    pair.post(PASSIVE, WorkRequest::Read { id: WorkId(1), local: local.clone(), remote: part });
    pair.run();
    assert_eq!(local.to_vec(), b"3456");
    pair.post(ACTIVE, WorkRequest::Invalidate { stag: source.stag });
    pair.run();
    let target = blank(5);
    let sink = pair.register(ACTIVE, &target, RemoteRights::RemoteWrite);
    assert_ne!(sink.stag, source.stag);
    pair.post(PASSIVE, WorkRequest::Write { id: WorkId(2), local: memory(b"abcde"), remote: sink });
    pair.send(PASSIVE, b"done", Some(sink.stag));
    pair.run();
    assert_eq!(target.to_vec(), b"abcde");
    let [Event::Received { invalidated, .. }] = &pair.events(ACTIVE)[..] else { panic!() };
    assert_eq!(*invalidated, Some(sink.stag));
    // The peer's reads and writes of closed memory fail.
    pair.post(PASSIVE, WorkRequest::Write { id: WorkId(3), local: memory(b"later"), remote: sink });
    pair.run();
    assert_eq!(target.to_vec(), b"abcde");
    let last = pair.events(PASSIVE).pop();
    assert!(matches!(last, Some(Event::Done { id: WorkId(3), result: Err(WorkError::RemoteAccess) })));
    assert_eq!(pair.ends[PASSIVE].queue_pair.fault(), Some(Fault::Ours(Violation::Access)));
}

#[test]
fn registrations_wait_for_the_connection_and_for_a_window() {
    let mut pair = TestPair::new(&endpoint(), &endpoint());
    for id in [WorkId(1), WorkId(2)] {
        let access = RemoteRights::RemoteRead;
        pair.post(ACTIVE, WorkRequest::Register { id, local: memory(b"data"), access });
    }
    pair.run();
    pair.post(PASSIVE, WorkRequest::Accept { private_data: Vec::new() });
    pair.run();
    let events = pair.events(ACTIVE);
    let [Event::Connected { .. }, Event::Registered { id: WorkId(1), remote }] = &events[..] else {
        panic!("{events:?}")
    };
    pair.post(ACTIVE, WorkRequest::Invalidate { stag: remote.stag });
    assert!(pair.events(ACTIVE).is_empty(), "the window is still being closed");
    pair.run();
    assert!(matches!(&pair.events(ACTIVE)[..], [Event::Registered { id: WorkId(2), .. }]));
}

#[test]
fn a_message_that_invalidates_unknown_memory_ends_the_connection() {
    let mut pair = TestPair::connected(&endpoint());
    pair.send(PASSIVE, b"closes", Some(Stag(0x9900)));
    pair.run();
    assert!(matches!(&pair.events(ACTIVE)[..], [Event::Disconnected]));
    assert!(matches!(pair.ends[ACTIVE].queue_pair.demand(), Demand::Close));
}

#[test]
fn an_invalidation_that_is_reported_after_the_key_was_closed_ends_nothing() {
    let mut pair = TestPair::connected(&endpoint());
    let remote = pair.register(ACTIVE, &memory(b"data"), RemoteRights::RemoteRead);
    pair.post(ACTIVE, WorkRequest::Invalidate { stag: remote.stag });
    pair.run();
    // The device executed it before the window was closed.
    let received = DeviceEvent::Received { invalidated: Some(remote.stag.0) };
    pair.report(ACTIVE, received, b"late");
    let events = pair.events(ACTIVE);
    let [Event::Received { invalidated, .. }] = &events[..] else { panic!("{events:?}") };
    assert_eq!(*invalidated, Some(remote.stag));
    pair.report(ACTIVE, received, b"again");
    assert!(matches!(&pair.events(ACTIVE)[..], [Event::Disconnected]));
    assert_eq!(pair.ends[ACTIVE].queue_pair.fault(), Some(Fault::Peer(Violation::Access)));
}

#[test]
fn a_disconnect_comes_after_all_posted_work() {
    let mut pair = TestPair::connected(&endpoint());
    pair.ends[ACTIVE].is_running = false;
    pair.send(ACTIVE, b"last words", None);
    pair.post(ACTIVE, WorkRequest::Disconnect);
    pair.post(ACTIVE, WorkRequest::Disconnect);
    pair.send(ACTIVE, b"too late", None);
    pair.run();
    assert!(matches!(&pair.events(ACTIVE)[..], [Event::Done { result: Err(WorkError::Flushed), .. }]));
    pair.ends[ACTIVE].is_running = true;
    pair.run();
    assert!(matches!(&pair.events(ACTIVE)[..], [Event::Done { result: Ok(()), .. }, Event::Disconnected]));
    assert!(matches!(&pair.events(PASSIVE)[..], [Event::Received { .. }, Event::Disconnected]));
}

#[test]
fn work_behind_a_read_may_complete_before_it() {
    let mut pair = TestPair::connected(&endpoint());
    let remote = pair.register(PASSIVE, &memory(b"data"), RemoteRights::RemoteRead);
    pair.run();
    pair.ends[ACTIVE].is_running = false;
    pair.post(ACTIVE, WorkRequest::Read { id: WorkId(5), local: blank(4), remote });
    pair.send(ACTIVE, b"behind", None);
    pair.run();
    let done = |id| DeviceEvent::Done { id, result: Ok(()) };
    for (id, room) in [(0, 3), (5, 4)] {
        pair.report(ACTIVE, done(id), &[]);
        let events = pair.events(ACTIVE);
        assert!(matches!(&events[..], [Event::Done { id: found, result: Ok(()) }] if found.0 == id));
        assert_eq!(pair.ends[ACTIVE].queue_pair.room(), room);
    }
    pair.report(ACTIVE, done(5), &[]);
    assert!(pair.events(ACTIVE).is_empty(), "it has completed before");
}

#[test]
fn the_end_flushes_work_and_registrations_in_their_order() {
    let mut pair = TestPair::connected(&endpoint());
    pair.ends[ACTIVE].is_running = false;
    let remote = pair.register(PASSIVE, &memory(b"data"), RemoteRights::RemoteRead);
    pair.send(ACTIVE, b"one", None);
    pair.post(ACTIVE, WorkRequest::Read { id: WorkId(5), local: blank(4), remote });
    pair.register(ACTIVE, &blank(1), RemoteRights::RemoteWrite);
    let access = RemoteRights::RemoteWrite;
    pair.post(ACTIVE, WorkRequest::Register { id: WorkId(6), local: blank(1), access });
    pair.ends[ACTIVE].queue_pair.on_end(Instant::now()).unwrap();
    let ids: Vec<_> = pair
        .events(ACTIVE)
        .iter()
        .map(|event| match event {
            Event::Done { id, result: Err(WorkError::Flushed) } => id.0,
            Event::Disconnected => u64::MAX,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(ids, [0, 5, 6, u64::MAX]);
    pair.send(ACTIVE, b"after", None);
    pair.ends[ACTIVE].queue_pair.on_end(Instant::now()).unwrap();
    assert!(matches!(&pair.events(ACTIVE)[..], [Event::Done { result: Err(WorkError::Flushed), .. }]));
}

#[test]
fn work_that_cannot_be_done_fails_and_ends_the_connection() {
    let tries: [fn(Remote) -> WorkRequest; 3] = [
        |remote| WorkRequest::Read { id: WorkId(1), local: blank(9), remote },
        |remote| WorkRequest::Write { id: WorkId(1), local: blank(11), remote },
        |_| WorkRequest::Register {
            id: WorkId(1),
            local: SgList::one(Chunk::from_slice(b"lent").slice(0, 4)),
            access: RemoteRights::RemoteWrite,
        },
    ];
    for attempt in tries {
        let mut pair = TestPair::connected(&endpoint());
        let remote = pair.register(PASSIVE, &blank(10), RemoteRights::RemoteWrite);
        pair.post(ACTIVE, attempt(remote));
        let events = pair.events(ACTIVE);
        assert!(
            matches!(
                &events[..],
                [Event::Done { id: WorkId(1), result: Err(WorkError::Local) }, Event::Disconnected]
            ),
            "{events:?}"
        );
        let due = pair.ends[ACTIVE].queue_pair.poll_timeout().expect("the driver has to notice");
        pair.ends[ACTIVE].queue_pair.on_timeout(due).unwrap();
        assert_eq!(pair.ends[ACTIVE].queue_pair.poll_timeout(), None);
    }
}

#[test]
fn a_rejection_is_handed_over_before_the_connection_is_closed() {
    let mut pair = TestPair::new(&endpoint(), &endpoint());
    pair.run();
    pair.events(PASSIVE);
    pair.post(PASSIVE, WorkRequest::Reject { private_data: b"no".to_vec() });
    assert!(matches!(pair.ends[PASSIVE].queue_pair.demand(), Demand::Bytes(_)));
    pair.run();
    assert!(matches!(pair.ends[PASSIVE].queue_pair.demand(), Demand::Close));
    assert!(matches!(&pair.events(PASSIVE)[..], [Event::Disconnected]));
    let [Event::Refused { private_data }] = &pair.events(ACTIVE)[..] else { panic!() };
    assert_eq!(private_data, b"no");
}

#[test]
fn a_peer_without_a_receive_buffer_is_this_sides_fault() {
    let mut pair = TestPair::connected(&endpoint());
    (0..3).for_each(|_| pair.send(ACTIVE, b"message", None));
    pair.run();
    assert_eq!(pair.ends[ACTIVE].queue_pair.fault(), Some(Fault::Ours(Violation::NoReceive)));
}

/// An endpoint with two registrations, on devices without windows.
fn confined() -> TestPair {
    let endpoint = Endpoint { regions: 2, without_invalidation: Some(b"keep".to_vec()), ..endpoint() };
    TestPair::over(true, &endpoint, &endpoint).connect(b"keep")
}

#[test]
fn a_confined_connection_gives_its_peer_copies() {
    let mut pair = confined();
    let queue_pair = &mut pair.ends[ACTIVE].queue_pair;
    assert!(!queue_pair.is_invalidated_by_peers());
    let source = memory(b"0123456789");
    for id in [WorkId(1), WorkId(2)] {
        assert_eq!(queue_pair.register(id, &mut source.clone(), RemoteRights::RemoteRead), None);
    }
    pair.run();
    let events = pair.events(ACTIVE);
    let [Event::Registered { id: WorkId(1), remote }, Event::Registered { id: WorkId(2), remote: other }] =
        &events[..]
    else {
        panic!("{events:?}")
    };
    assert_ne!(remote.stag, other.stag);
    let local = blank(4);
    let part = Remote { address: remote.address + 3, len: 4, ..*remote };
    pair.post(PASSIVE, WorkRequest::Read { id: WorkId(3), local: local.clone(), remote: part });
    pair.run();
    assert_eq!(local.to_vec(), b"3456");
    // A buffer that is free again is opened at once, with the key that it has.
    pair.post(ACTIVE, WorkRequest::Invalidate { stag: other.stag });
    let target = blank(5);
    let sink = pair.register(ACTIVE, &target, RemoteRights::RemoteWrite);
    assert_eq!(sink.stag, other.stag);
    pair.post(PASSIVE, WorkRequest::Write { id: WorkId(4), local: memory(b"abcde"), remote: sink });
    pair.run();
    assert_eq!(target.to_vec(), [0; 5]);
    pair.post(ACTIVE, WorkRequest::Invalidate { stag: sink.stag });
    assert_eq!(target.to_vec(), b"abcde");
}

#[test]
fn registrations_of_a_confined_connection_wait_for_one_that_ends() {
    let mut pair = confined();
    for id in 1..=3 {
        let access = RemoteRights::RemoteRead;
        pair.post(ACTIVE, WorkRequest::Register { id: WorkId(id), local: memory(b"data"), access });
    }
    pair.run();
    let events = pair.events(ACTIVE);
    let [Event::Registered { remote, .. }, Event::Registered { .. }] = &events[..] else {
        panic!("{events:?}")
    };
    pair.post(ACTIVE, WorkRequest::Invalidate { stag: remote.stag });
    assert!(matches!(&pair.events(ACTIVE)[..], [Event::Registered { id: WorkId(3), .. }]));
}

#[test]
fn a_buffer_whose_key_the_peer_invalidates_is_replaced() {
    let mut pair = confined();
    let target = blank(5);
    let access = RemoteRights::RemoteWrite;
    pair.post(ACTIVE, WorkRequest::Register { id: WorkId(1), local: target.clone(), access });
    pair.run();
    let events = pair.events(ACTIVE);
    let [Event::Registered { remote, .. }] = &events[..] else { panic!("{events:?}") };
    pair.post(PASSIVE, WorkRequest::Write { id: WorkId(2), local: memory(b"abcde"), remote: *remote });
    pair.send(PASSIVE, b"done", Some(remote.stag));
    pair.run();
    assert_eq!(target.to_vec(), b"abcde");
    assert!(pair.ends[ACTIVE].exposed[0].1.is_none(), "the owner is told");
    assert!(matches!(&pair.events(ACTIVE)[..], [Event::Received { invalidated: Some(_), .. }]));
    pair.post(ACTIVE, WorkRequest::Register { id: WorkId(3), local: target, access });
    pair.run();
    let events = pair.events(ACTIVE);
    let [Event::Registered { id: WorkId(3), remote: other }] = &events[..] else { panic!("{events:?}") };
    assert_ne!(other.stag, remote.stag);
}
