//! iSER sessions allocate nothing per I/O once they are warm.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

#[path = "../../volume/tests/counting/mod.rs"]
mod counting;

use blockmux_proto::driver::session::Initiator;
use blockmux_proto::driver::target::IoSource;
use blockmux_proto::exports::VolumeId;
use blockmux_proto::iscsi::client::{
    BurstSize, IscsiInitiatorConfig, IscsiInitiatorSession, SessionPurpose, default_proposal,
};
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::iscsi::node::{IscsiAccess, IscsiNode, Portal, TargetNode};
use blockmux_proto::iscsi::server::{IscsiTargetSession, IserTargetSession};
use blockmux_proto::rdma::testing::Recorder;
use blockmux_proto::rdma::{Event, RdmaConnections, RdmaSession, Remote, Stag, WorkId, WorkRequest};
use blockmux_proto::scsi::{LogicalUnit, Lun, ScsiTarget, UnitIdentity};
use blockmux_volume::conformance::TestCore;
use blockmux_volume::{
    Channel, Completion, Io, MemVolume, Memory, Op, Output, Pool, SgList, Tag, Volume, Waker,
};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

const NAME: &str = "iqn.2026-11.com.example:disk";
const DEPTH: u32 = 16;
const TURNS: usize = 200;
/// Turns that are not counted.
const WARM_UP: usize = 10;

fn target() -> (IserTargetSession, Arc<MemVolume>) {
    let volume = Arc::new(MemVolume::new(1 << 20));
    let unit = LogicalUnit::new(UnitIdentity::of("disk0"), volume.clone());
    let target = Arc::new(ScsiTarget::new(NAME, Vec::new()).with_unit(0, VolumeId(0), unit));
    let access = vec![IscsiAccess { initiator: None, chap: None, target }];
    let portals = vec![Portal { address: "192.0.2.1:3260".parse().unwrap(), listener: 1, group_tag: 1 }];
    let node = IscsiNode::new(vec![TargetNode::new(Name::new(NAME).unwrap(), portals, access)]);
    let session = IscsiTargetSession::new(Arc::new(node), 1, Pool::new(16 << 20), [1; 32], Instant::now());
    let mut session = IserTargetSession::new(session);
    session
        .on_event(Event::Requested { private_data: vec![0x80, 0, 0, 0], reads: 32 }, Instant::now())
        .unwrap();
    (session, volume)
}

/// An iSER header that names memory for both directions, and a PDU: opcode, flags,
/// DataSegmentLength, tag, CmdSN, CDB.
fn message(opcode: u8, flags: u8, data: &[u8], tag: u32, cmd_sn: u32, cdb: &[u8; 16]) -> Memory {
    let mut bytes = vec![0x1c, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
    bytes.extend([0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0]);
    bytes.extend([opcode, flags, 0, 0]);
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend([0; 8]);
    bytes.extend(tag.to_be_bytes());
    bytes.extend(4096_u32.to_be_bytes());
    bytes.extend(cmd_sn.to_be_bytes());
    bytes.extend([0; 4]);
    bytes.extend(cdb);
    bytes.extend(data);
    let memory = Memory::from_heap(bytes.len());
    memory.seg(0, bytes.len()).copy_from(&bytes);
    memory
}

/// READ(10) or WRITE(10) of 4 KiB at block 8.
fn command(opcode: u8) -> [u8; 16] {
    [opcode, 0, 0, 0, 0, 8, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0]
}

#[test]
fn a_target_allocates_nothing_for_rdma_writes_and_reads() {
    let (mut session, _) = target();
    let text = format!("InitiatorName=iqn.2026-11.com.example:me\0TargetName={NAME}\0");
    let receive = |session: &mut IserTargetSession, memory: &Memory| {
        let message = memory.seg(0, memory.len());
        session
            .on_event(Event::Received { message, invalidated: None, written: None }, Instant::now())
            .unwrap();
    };
    receive(&mut session, &message(0x43, 0x87, text.as_bytes(), 0, 0, &[0; 16]));
    receive(&mut session, &message(1, 0x81, &[], 1, 0, &[0; 16]));
    let mut queue_pair = Recorder::default();
    let (mut cmd_sn, mut allocations) = (0, 0);
    let lent = Memory::from_heap(4096);
    let (mut messages, mut ios, mut dones) = (Vec::new(), Vec::with_capacity(64), Vec::with_capacity(64));
    let data = vec![7; 4096];
    for turn in 0..TURNS {
        messages.clear();
        for tag in 0..DEPTH {
            // Reads, writes with all their data, and writes whose data the target reads.
            for (nth, (flags, cdb, data)) in
                [(0xc1, 0x28, &[][..]), (0xa1, 0x2a, &data), (0xa1, 0x2a, &[])].into_iter().enumerate()
            {
                cmd_sn += 1;
                let tag = tag * 3 + nth as u32;
                messages.push(message(1, flags, data, tag, cmd_sn, &command(cdb)));
            }
        }
        let before = counting::of_this_thread();
        messages.iter().for_each(|message| receive(&mut session, message));
        let mut sent = 0;
        for _ in 0..3 {
            while let Some(work) = queue_pair.next(&mut session, 1000) {
                match work {
                    WorkRequest::Read { id, .. } | WorkRequest::Write { id, .. } => dones.push(id),
                    WorkRequest::Send { .. } => sent += 1,
                    _ => {}
                }
            }
            for id in dones.drain(..) {
                session.on_event(Event::Done { id, result: Ok(()) }, Instant::now()).unwrap();
            }
            while let Some((volume, io)) = session.poll_io() {
                session.begin(volume, &io, false).expect("nothing excludes it");
                ios.push((io.tag, io.op));
            }
            for (tag, op) in ios.drain(..) {
                let output =
                    if op == Op::Read { Output::Data(lent.seg(0, 4096).into()) } else { Output::Nothing };
                session.on_io(Completion { tag, result: Ok(output) }, Instant::now());
            }
        }
        if turn >= WARM_UP {
            allocations += counting::of_this_thread() - before;
            assert_eq!(sent, 3 * DEPTH, "every command is answered");
        }
    }
    assert_eq!(allocations, 0);
}

/// A target session, which serves the initiator under test.
struct CountedPeer {
    session: IserTargetSession,
    queue_pair: Recorder,
    channel: Box<dyn Channel>,
}

impl CountedPeer {
    fn new() -> CountedPeer {
        let (session, volume) = target();
        let core = TestCore::new().as_core();
        let channel = volume.open(&core, session.depth(), Waker::idle()).unwrap();
        CountedPeer { session, queue_pair: Recorder::default(), channel }
    }

    /// Passes a message to the target and executes its RDMA operations until it answers.
    fn answer(&mut self, message: SgList, open: &[(Stag, SgList)]) -> (SgList, Option<Stag>) {
        let message = blockmux_volume::Seg::from_slice(&message.to_vec());
        self.session
            .on_event(Event::Received { message, invalidated: None, written: None }, Instant::now())
            .unwrap();
        let memory = |stag: Stag| &open.iter().find(|(name, _)| *name == stag).unwrap().1;
        loop {
            match self.queue_pair.next(&mut self.session, 1000) {
                Some(WorkRequest::Send { head, invalidate, .. }) => {
                    return (SgList::one(blockmux_volume::Seg::from_slice(&head)), invalidate);
                }
                Some(WorkRequest::Write { id, local, remote }) => {
                    local.copy_to_list(memory(remote.stag));
                    self.session.on_event(Event::Done { id, result: Ok(()) }, Instant::now()).unwrap();
                }
                Some(WorkRequest::Read { id, local, remote }) => {
                    memory(remote.stag).slice(0, local.len()).copy_to_list(&local);
                    self.session.on_event(Event::Done { id, result: Ok(()) }, Instant::now()).unwrap();
                }
                Some(_) => {}
                None => self.do_io(),
            }
        }
    }

    fn do_io(&mut self) {
        let (volume, io) = self.session.poll_io().expect("the target answers everything");
        self.session.begin(volume, &io, false).expect("nothing excludes it");
        self.channel.submit(io);
        self.channel.kick();
        let mut done = Vec::new();
        self.channel.poll(&mut done);
        done.into_iter().for_each(|done| self.session.on_io(done, Instant::now()));
    }
}

/// An initiator whose allocations are counted; the test is its queue pair.
struct Counted {
    session: IscsiInitiatorSession,
    queue_pair: Recorder,
    peer: CountedPeer,
    open: Vec<(Stag, SgList)>,
    messages: VecDeque<SgList>,
    next_stag: u32,
    /// Whether responses invalidate memory (Send with Invalidate).
    closes: bool,
    allocations: u64,
}

impl Counted {
    fn new(closes: bool) -> Counted {
        let config = IscsiInitiatorConfig {
            initiator: Name::new("iqn.2026-11.com.example:me").unwrap(),
            target: Name::new(NAME).unwrap(),
            lun: Lun::new(0),
            purpose: SessionPurpose::Use,
            chap: None,
            proposal: default_proposal(),
            isid: [0x80, 0, 0, 0, 0, 1],
            burst: BurstSize::default(),
        };
        let session = IscsiInitiatorSession::over_rdma(config, Pool::new(16 << 20), [5; 32], Instant::now());
        Counted {
            session,
            queue_pair: Recorder::default(),
            peer: CountedPeer::new(),
            open: Vec::with_capacity(64),
            messages: VecDeque::with_capacity(64),
            next_stag: 0,
            closes,
            allocations: 0,
        }
    }

    /// Takes the session's work and counts its allocations.
    fn take(&mut self) {
        loop {
            let before = counting::of_this_thread();
            let work = self.queue_pair.next(&mut self.session.connection(0), 1000);
            self.allocations += counting::of_this_thread() - before;
            match work {
                Some(WorkRequest::Register { id, local, .. }) => self.register(id, local),
                Some(WorkRequest::Invalidate { stag }) => self.open.retain(|(open, _)| *open != stag),
                Some(WorkRequest::Send { head, payload, .. }) => {
                    let mut message = SgList::one(blockmux_volume::Seg::from_slice(&head));
                    payload.segs().iter().for_each(|seg| message.push(seg.clone()));
                    self.messages.push_back(message);
                }
                Some(_) => {}
                None => return,
            }
        }
    }

    fn register(&mut self, id: WorkId, local: SgList) {
        self.next_stag += 1;
        let remote = Remote { stag: Stag(self.next_stag), address: 0, len: local.len() as u32 };
        self.open.push((remote.stag, local));
        self.event(Event::Registered { id, remote });
    }

    fn event(&mut self, event: Event) {
        let before = counting::of_this_thread();
        self.session.connection(0).on_event(event, Instant::now()).unwrap();
        self.allocations += counting::of_this_thread() - before;
    }

    /// Passes messages until none is left.
    fn run(&mut self) {
        self.take();
        while let Some(message) = self.messages.pop_front() {
            let (answer, invalidated) = self.peer.answer(message, &self.open);
            let invalidated = invalidated.filter(|_| self.closes);
            if let Some(stag) = invalidated {
                self.open.retain(|(open, _)| *open != stag);
            }
            self.event(Event::Received { message: answer.segs()[0].clone(), invalidated, written: None });
            self.take();
        }
    }

    fn submit(&mut self, tag: u64, op: Op, len: u64, data: Option<SgList>) {
        let before = counting::of_this_thread();
        self.session.submit(Io { tag: Tag(tag), op, offset: 65_536, len, data });
        self.allocations += counting::of_this_thread() - before;
    }
}

#[test]
fn an_initiator_allocates_nothing_for_registrations() {
    let (room, data) = (Memory::from_heap(4096), Memory::from_heap(16_384));
    for closes in [true, false] {
        let mut counted = Counted::new(closes);
        counted.run();
        assert!(counted.session.is_ready());
        for turn in 0..TURNS {
            if turn == WARM_UP {
                counted.allocations = 0;
            }
            for tag in 0..u64::from(DEPTH) {
                counted.submit(3 * tag, Op::Read, 4096, Some(room.seg(0, 4096).into()));
                counted.submit(3 * tag + 1, Op::Write { fua: false }, 4096, Some(data.seg(0, 4096).into()));
                counted.submit(
                    3 * tag + 2,
                    Op::Write { fua: false },
                    16_384,
                    Some(data.seg(0, 16_384).into()),
                );
            }
            counted.run();
            let mut done = 0;
            while let Some(completion) = counted.session.poll_done() {
                assert!(completion.result.is_ok());
                done += 1;
            }
            assert_eq!((done, counted.open.len()), (3 * DEPTH, 0));
        }
        assert_eq!(counted.allocations, 0, "the target invalidates memory: {closes}");
    }
}
