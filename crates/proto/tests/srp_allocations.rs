//! SRP sessions of both sides allocate nothing per I/O once they are warm.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

#[path = "../../volume/tests/counting/mod.rs"]
mod counting;

use blockmux_proto::driver::session::Initiator;
use blockmux_proto::driver::target::IoSource;
use blockmux_proto::exports::VolumeId;
use blockmux_proto::names::networks::AllowedNetworks;
use blockmux_proto::rdma::testing::Recorder;
use blockmux_proto::rdma::{Event, RdmaConnections, RdmaSession, Remote, Stag, WorkId, WorkRequest};
use blockmux_proto::scsi::{LogicalUnit, Lun, ScsiTarget, TargetPort, UnitIdentity};
use blockmux_proto::srp::client::{SrpInitiatorConfig, SrpInitiatorSession, SrpSessionMode};
use blockmux_proto::srp::node::{SrpAccess, SrpNode, SrpPortId, SrpTarget};
use blockmux_proto::srp::server::SrpTargetSession;
use blockmux_volume::conformance::TestCore;
use blockmux_volume::{
    Channel, Completion, Io, MemVolume, Memory, Op, Pool, Seg, SgList, Tag, Volume, Waker,
};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

const TARGET: SrpPortId = SrpPortId([2; 16]);
const DEPTH: u32 = 16;
const TURNS: usize = 200;
/// Turns that are not counted.
const WARM_UP: usize = 10;

/// Both sides, and the queue pairs between them.
struct Pair {
    initiator: SrpInitiatorSession,
    ours: Recorder,
    target: SrpTargetSession,
    theirs: Recorder,
    channel: Box<dyn Channel>,
    done: Vec<Completion>,
    /// The initiator's registered memory by key.
    open: Vec<(Stag, SgList)>,
    to_target: VecDeque<Seg>,
    to_initiator: VecDeque<Seg>,
    last_key: u32,
    /// Number of allocations of the initiator, and of the target.
    allocations: [u64; 2],
}

impl Pair {
    fn new() -> Pair {
        let now = Instant::now();
        let volume = Arc::new(MemVolume::new(1 << 20));
        let unit = LogicalUnit::new(UnitIdentity::of("disk0"), volume.clone());
        let port = TargetPort { relative_id: 1, group: 1, name: TARGET.name_string().into() };
        let units =
            ScsiTarget::new(&TARGET.name_string(), vec![port.clone()]).with_unit(0, VolumeId(0), unit);
        let access = vec![SrpAccess { initiator: None, target: Arc::new(units) }];
        let node = Arc::new(SrpNode::new(vec![SrpTarget {
            id: TARGET,
            port,
            access,
            networks: AllowedNetworks::default(),
        }]));
        let mut target = SrpTargetSession::new(node, Pool::new(16 << 20), Arc::new(|| {}), now);
        let config = SrpInitiatorConfig {
            initiator: SrpPortId([1; 16]),
            target: TARGET,
            lun: Lun::new(0),
            mode: SrpSessionMode::Use,
            channels: 1,
            immediate_data: true,
        };
        let mut initiator = SrpInitiatorSession::new(config, Pool::new(16 << 20), now);
        let private_data = RdmaConnections::endpoint(&initiator).private_data;
        target.on_event(Event::Requested { private_data, reads: 32 }, now).unwrap();
        let mut theirs = Recorder::default();
        let Some(WorkRequest::Accept { private_data }) = theirs.next(&mut target, 1000) else {
            panic!("the login is rejected")
        };
        target.on_event(Event::Connected { private_data: Vec::new() }, now).unwrap();
        initiator.connection(0).on_event(Event::Connected { private_data }, now).unwrap();
        let core = TestCore::new().as_core();
        let channel = volume.open(&core, target.depth(), Waker::idle()).unwrap();
        Pair {
            initiator,
            ours: Recorder::default(),
            target,
            theirs,
            channel,
            done: Vec::with_capacity(64),
            open: Vec::with_capacity(64),
            to_target: VecDeque::with_capacity(64),
            to_initiator: VecDeque::with_capacity(64),
            last_key: 0,
            allocations: [0; 2],
        }
    }

    /// Calls `act` for one side and counts its allocations.
    fn counted<T>(&mut self, side: usize, act: impl FnOnce(&mut Pair) -> T) -> T {
        let before = counting::of_this_thread();
        let result = act(self);
        self.allocations[side] += counting::of_this_thread() - before;
        result
    }

    fn tell_initiator(&mut self, event: Event) {
        self.counted(0, |pair| pair.initiator.connection(0).on_event(event, Instant::now()).unwrap());
    }

    fn tell_target(&mut self, event: Event) {
        self.counted(1, |pair| pair.target.on_event(event, Instant::now()).unwrap());
    }

    fn run(&mut self) {
        loop {
            let moved = self.carry_to_target() | self.carry_to_initiator() | self.do_io();
            if !moved {
                return;
            }
        }
    }

    fn carry_to_target(&mut self) -> bool {
        while let Some(work) = self.counted(0, |pair| pair.ours.next(&mut pair.initiator.connection(0), 1000))
        {
            match work {
                WorkRequest::Register { id, local, .. } => self.register(id, local),
                WorkRequest::Invalidate { stag } => self.open.retain(|(open, _)| *open != stag),
                WorkRequest::Send { head, payload, .. } => {
                    let message = [&head[..], &payload.to_vec()].concat();
                    self.to_target.push_back(Seg::from_slice(&message));
                }
                _ => {}
            }
        }
        let mut moved = false;
        while let Some(message) = self.to_target.pop_front() {
            moved = true;
            self.tell_target(Event::Received { message, invalidated: None, written: None });
        }
        moved
    }

    fn register(&mut self, id: WorkId, local: SgList) {
        self.last_key += 1;
        let remote = Remote { stag: Stag(self.last_key), address: 0, len: local.len() as u32 };
        self.open.push((remote.stag, local));
        self.tell_initiator(Event::Registered { id, remote });
    }

    fn carry_to_initiator(&mut self) -> bool {
        let memory = |open: &[(Stag, SgList)], stag| {
            open.iter().find(|(own, _)| *own == stag).map(|(_, list)| list.clone()).expect("open memory")
        };
        while let Some(work) = self.counted(1, |pair| pair.theirs.next(&mut pair.target, 1000)) {
            match work {
                WorkRequest::Read { id, local, remote } => {
                    memory(&self.open, remote.stag).slice(0, local.len()).copy_to_list(&local);
                    self.tell_target(Event::Done { id, result: Ok(()) });
                }
                WorkRequest::Write { id, local, remote } => {
                    local.copy_to_list(&memory(&self.open, remote.stag));
                    self.tell_target(Event::Done { id, result: Ok(()) });
                }
                WorkRequest::Send { head, .. } => self.to_initiator.push_back(Seg::from_slice(&head)),
                _ => {}
            }
        }
        let mut moved = false;
        while let Some(message) = self.to_initiator.pop_front() {
            moved = true;
            self.tell_initiator(Event::Received { message, invalidated: None, written: None });
        }
        moved
    }

    fn do_io(&mut self) -> bool {
        let mut moved = false;
        while let Some((volume, io)) = self.counted(1, |pair| pair.target.poll_io()) {
            moved = true;
            self.counted(1, |pair| pair.target.begin(volume, &io, false)).expect("nothing excludes it");
            self.channel.submit(io);
        }
        self.channel.kick();
        self.channel.poll(&mut self.done);
        while let Some(done) = self.done.pop() {
            self.counted(1, |pair| pair.target.on_io(done, Instant::now()));
        }
        moved
    }

    fn submit(&mut self, tag: u64, op: Op, len: usize, data: &Memory) {
        let io =
            Io { tag: Tag(tag), op, offset: 65_536, len: len as u64, data: Some(data.seg(0, len).into()) };
        self.counted(0, |pair| pair.initiator.submit(io));
    }
}

#[test]
fn sessions_allocate_nothing_with_every_way_to_transfer_data() {
    let (room, data) = (Memory::from_heap(4096), Memory::from_heap(16_384));
    let mut pair = Pair::new();
    pair.run();
    assert!(pair.initiator.is_ready());
    for turn in 0..TURNS {
        if turn == WARM_UP {
            pair.allocations = [0; 2];
        }
        for tag in 0..u64::from(DEPTH) {
            pair.submit(3 * tag, Op::Read, 4096, &room);
            // Immediate data, and data that the target reads.
            pair.submit(3 * tag + 1, Op::Write { fua: false }, 4096, &data);
            pair.submit(3 * tag + 2, Op::Write { fua: false }, 16_384, &data);
        }
        pair.run();
        let mut done = 0;
        while let Some(completion) = pair.initiator.poll_done() {
            assert!(completion.result.is_ok());
            done += 1;
        }
        assert_eq!((done, pair.open.len()), (3 * DEPTH, 0));
    }
    assert_eq!(pair.allocations, [0; 2]);
}
