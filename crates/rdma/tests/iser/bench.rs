//! Fixtures: a target with two volumes, and an initiator at the other end of an in-memory
//! connection. [`ManualSession`] is a session whose other end is the test itself.

use blockmux_proto::driver::audit_event::AuditEvent;
use blockmux_proto::driver::session::{CoreHandle, Initiator, ProtocolError, Timed};
use blockmux_proto::driver::target::{IoSource, SessionStage, TargetLifecycle};
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_proto::iscsi::client::{
    BurstSize, IscsiDiscoverySession, IscsiInitiatorConfig, IscsiInitiatorSession, SessionPurpose,
    default_proposal,
};
use blockmux_proto::iscsi::login::operational::OperationalParameters;
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::iscsi::node::{Chap, IscsiAccess, IscsiNode, Portal, TargetNode};
use blockmux_proto::iscsi::server::{IscsiTargetSession, IserTargetSession, LocalSessions};
use blockmux_proto::rdma::testing::Recorder;
use blockmux_proto::rdma::{Event, RdmaConnections, RdmaSession, Stag, WorkRequest};
use blockmux_proto::scsi::{self, LogicalUnit, Lun, UnitIdentity};
use blockmux_rdma::Driven;
use blockmux_rdma::loopback::{self, Loopback, LoopbackAdapter};
use blockmux_volume::conformance::TestCore;
use blockmux_volume::{
    Channel, Completion, Io, IoError, MemVolume, Op, Output, Pool, Seg, SgList, Tag, Waker,
};
use blockmux_wire::iscsi::Bhs;
use blockmux_wire::iser::ControlHeader;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;
use zerocopy::FromBytes;

pub(crate) const TARGET: &str = "iqn.2026-11.com.example:disk";
pub(crate) const INITIATOR: &str = "iqn.2026-11.com.example:me";
pub(crate) const SIZE: u64 = 8 << 20;

/// A target with two logical units.
pub(crate) struct ServedTarget {
    pub(crate) node: Arc<IscsiNode>,
    pub(crate) exports: Exports,
    pub(crate) local: Rc<LocalSessions>,
    pub(crate) pool: Pool,
}

impl ServedTarget {
    pub(crate) fn new(offer: OperationalParameters, chap: Option<Chap>) -> ServedTarget {
        ServedTarget::named(TARGET, offer, chap)
    }

    pub(crate) fn named(name: &str, offer: OperationalParameters, chap: Option<Chap>) -> ServedTarget {
        let export = |name: &str| Export {
            name: name.into(),
            description: String::new(),
            read_only: false,
            volume: Arc::new(MemVolume::new(SIZE)),
        };
        let exports = Exports::new(vec![export("a"), export("b")]);
        let unit = |at: u32| {
            let export = exports.get(VolumeId(at)).unwrap();
            LogicalUnit::new(UnitIdentity::of(&export.name), export.volume.clone())
        };
        let view = scsi::ScsiTarget::new(name, Vec::new());
        let view = view.with_unit(0, VolumeId(0), unit(0)).with_unit(1, VolumeId(1), unit(1));
        let access = IscsiAccess { initiator: None, chap, target: Arc::new(view) };
        let portals = vec![Portal { address: "192.0.2.1:3260".parse().unwrap(), listener: 1, group_tag: 1 }];
        let mut target = TargetNode::new(Name::new(name).unwrap(), portals, vec![access]);
        target.offer = offer;
        let node = Arc::new(IscsiNode::new(vec![target]));
        let local = LocalSessions::new(CoreHandle::new(()));
        ServedTarget { node, exports, local, pool: Pool::new(512 << 20) }
    }

    /// A target session without a connection.
    pub(crate) fn session(&self) -> IserTargetSession {
        let (node, pool) = (self.node.clone(), self.pool.clone());
        let session = IscsiTargetSession::among(&self.local, node, 1, pool, [3; 32], Instant::now());
        IserTargetSession::new(session)
    }
}

/// A session with its driver.
pub(crate) trait Pumped {
    /// Runs the driver; returns whether there was progress.
    fn pump(&mut self) -> bool;
}

impl Pumped for Driven<Loopback, IserTargetSession> {
    fn pump(&mut self) -> bool {
        Driven::pump(self)
    }
}

impl Pumped for Driven<Loopback, IscsiInitiatorSession> {
    fn pump(&mut self) -> bool {
        self.pump_connection(0)
    }
}

impl Pumped for Driven<Loopback, IscsiDiscoverySession> {
    fn pump(&mut self) -> bool {
        Driven::pump(self)
    }
}

/// A target session with its volumes: a minimal engine.
pub(crate) struct TargetEnd<D = Driven<Loopback, IserTargetSession>> {
    pub(crate) driven: D,
    channels: Vec<Box<dyn Channel>>,
    /// Whether I/O stays in `submitted` instead of being executed immediately.
    pub(crate) holds_io: bool,
    pub(crate) submitted: VecDeque<(VolumeId, Io)>,
    /// I/O that was cancelled.
    pub(crate) cancelled: Vec<(VolumeId, Tag)>,
}

impl<D: Pumped + TargetLifecycle> TargetEnd<D> {
    pub(crate) fn new(served: &ServedTarget, mut driven: D) -> TargetEnd<D> {
        let core = TestCore::new().as_core();
        let depth = driven.source().depth();
        let open = |export: &Export| export.volume.open(&core, depth, Waker::idle()).unwrap();
        TargetEnd {
            driven,
            channels: served.exports.iter().map(|(_, export)| open(&export)).collect(),
            holds_io: false,
            submitted: VecDeque::new(),
            cancelled: Vec::new(),
        }
    }

    /// Runs turns until there is no progress; returns whether there was any.
    pub(crate) fn run(&mut self) -> bool {
        let mut has_moved = false;
        loop {
            self.driven.on_turn(Instant::now());
            let mut moves = self.driven.pump();
            while let Some((volume, io)) = self.driven.source().poll_io() {
                if self.driven.source().begin(volume, &io, false).is_ok() {
                    self.submitted.push_back((volume, io));
                }
            }
            while let Some(cancelled) = self.driven.source().poll_cancel() {
                self.cancelled.push(cancelled);
            }
            while !self.holds_io && !self.submitted.is_empty() {
                self.finish_one();
                moves = true;
            }
            if !moves {
                return has_moved;
            }
            has_moved = true;
        }
    }

    /// Executes the oldest held I/O on its volume.
    pub(crate) fn finish_one(&mut self) {
        let (volume, io) = self.submitted.pop_front().expect("an I/O is held");
        let channel = &mut self.channels[volume.0 as usize];
        let mut done: Vec<Completion> = Vec::new();
        channel.submit(io);
        channel.kick();
        channel.poll(&mut done);
        done.into_iter().for_each(|done| self.driven.source().on_io(done, Instant::now()));
    }
}

/// Both sides of a connection.
pub(crate) struct InitiatorAndTarget<S> {
    pub(crate) client: Driven<Loopback, S>,
    pub(crate) server: TargetEnd,
}

/// Connects a session to the target.
pub(crate) fn connect<S>(session: S, served: &ServedTarget) -> InitiatorAndTarget<S> {
    connect_on(
        session,
        served,
        &[LoopbackAdapter::with_room(usize::MAX), LoopbackAdapter::with_room(usize::MAX)],
    )
}

/// Connects over the adapters of the initiator and of the target.
pub(crate) fn connect_on<S>(
    session: S,
    served: &ServedTarget,
    adapters: &[Arc<LoopbackAdapter>; 2],
) -> InitiatorAndTarget<S> {
    let (active, passive) = (initiator(default_proposal()).endpoint(), served.session().endpoint());
    let (active, passive) = loopback::pair_on(&active, &passive, [9; 32], adapters);
    let driven = Driven::new(served.session(), passive, Instant::now());
    InitiatorAndTarget {
        client: Driven::new(session, active, Instant::now()),
        server: TargetEnd::new(served, driven),
    }
}

impl<S> InitiatorAndTarget<S>
where
    Driven<Loopback, S>: Pumped,
{
    /// Runs both sides until neither makes progress.
    pub(crate) fn run(&mut self) {
        while self.client.pump() | self.server.run() {}
    }
}

pub(crate) fn config(proposal: OperationalParameters) -> IscsiInitiatorConfig {
    IscsiInitiatorConfig {
        initiator: Name::new(INITIATOR).unwrap(),
        target: Name::new(TARGET).unwrap(),
        lun: Lun::new(0),
        purpose: SessionPurpose::Use,
        chap: None,
        proposal,
        isid: [0x80, 0, 0, 0, 0, 1],
        burst: BurstSize::default(),
    }
}

pub(crate) fn initiator(proposal: OperationalParameters) -> IscsiInitiatorSession {
    IscsiInitiatorSession::over_rdma(config(proposal), Pool::new(64 << 20), [5; 32], Instant::now())
}

impl InitiatorAndTarget<IscsiInitiatorSession> {
    /// Both sides after login and discovery of the logical unit.
    pub(crate) fn ready(
        proposal: OperationalParameters,
        offer: OperationalParameters,
    ) -> InitiatorAndTarget<IscsiInitiatorSession> {
        let mut pair = connect(initiator(proposal), &ServedTarget::new(offer, None));
        pair.run();
        let session = pair.client.session();
        assert!(session.is_ready(), "{:?} {:?}", session.refused(), pair.client.broken());
        pair
    }

    pub(crate) fn call(
        &mut self,
        op: Op,
        offset: u64,
        len: u64,
        data: Option<SgList>,
    ) -> Result<Output, IoError> {
        assert!(self.client.room() > 0);
        self.client.submit(Io { tag: Tag(offset), op, offset, len, data });
        self.run();
        let Completion { tag, result } = self.client.poll_done().expect("a completion");
        assert!(tag == Tag(offset) && self.client.poll_done().is_none());
        result
    }

    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) {
        self.call(Op::Write { fua: false }, offset, data.len() as u64, Some(list(data))).unwrap();
    }

    pub(crate) fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        self.call(Op::Read, offset, len as u64, None).unwrap().into_data().to_vec()
    }
}

/// A session whose work the test examines and completes.
pub(crate) struct ManualSession<S> {
    pub(crate) session: S,
    pub(crate) works: VecDeque<WorkRequest>,
    queue_pair: Recorder,
    /// Receive buffers that the session has posted.
    pub(crate) receives: u32,
}

/// A session that a test drives manually, over its first connection.
pub(crate) trait ManuallyDriven {
    /// The next work of the session, if the queue pair has this much room.
    fn next_work(&mut self, queue_pair: &mut Recorder, room: usize) -> Option<WorkRequest>;

    fn handle(&mut self, event: Event) -> Result<(), ProtocolError>;
}

impl ManuallyDriven for IserTargetSession {
    fn next_work(&mut self, queue_pair: &mut Recorder, room: usize) -> Option<WorkRequest> {
        queue_pair.next(self, room)
    }

    fn handle(&mut self, event: Event) -> Result<(), ProtocolError> {
        self.on_event(event, Instant::now())
    }
}

impl ManuallyDriven for IscsiInitiatorSession {
    fn next_work(&mut self, queue_pair: &mut Recorder, room: usize) -> Option<WorkRequest> {
        queue_pair.next(&mut self.connection(0), room)
    }

    fn handle(&mut self, event: Event) -> Result<(), ProtocolError> {
        self.connection(0).on_event(event, Instant::now())
    }
}

impl<S: ManuallyDriven> ManualSession<S> {
    pub(crate) fn new(session: S) -> ManualSession<S> {
        ManualSession { session, works: VecDeque::new(), queue_pair: Recorder::default(), receives: 0 }
    }

    /// Takes all work of the session; returns whether there was any.
    pub(crate) fn take(&mut self) -> bool {
        let before = self.works.len();
        while let Some(work) = self.next_work(1000) {
            match work {
                WorkRequest::Receive => self.receives += 1,
                work => self.works.push_back(work),
            }
        }
        self.works.len() > before
    }

    /// The next work of the session, if the queue pair has this much room.
    pub(crate) fn next_work(&mut self, room: usize) -> Option<WorkRequest> {
        self.session.next_work(&mut self.queue_pair, room)
    }

    /// Delivers a message, and takes all work that follows.
    pub(crate) fn receive(&mut self, message: &[u8], invalidated: Option<Stag>) -> Result<(), ProtocolError> {
        let message = Seg::from_slice(message);
        self.session.handle(Event::Received { message, invalidated, written: None })?;
        self.take();
        Ok(())
    }

    /// The next work, which must be a message: the invalidated tag, the iSER header, the BHS and
    /// the data.
    pub(crate) fn message(&mut self) -> (Option<Stag>, ControlHeader, Bhs, Vec<u8>) {
        match self.works.pop_front() {
            Some(WorkRequest::Send { head, payload, invalidate, is_solicited: false, .. }) => {
                let (header, rest) = ControlHeader::read_from_prefix(&head).unwrap();
                let (bhs, rest) = Bhs::read_from_prefix(rest).unwrap();
                (invalidate, header, bhs, [rest, &payload.to_vec()].concat())
            }
            other => panic!("{other:?}"),
        }
    }
}

impl Timed for ManualSession<IserTargetSession> {}

impl TargetLifecycle for ManualSession<IserTargetSession> {
    type Source = IserTargetSession;

    fn source(&mut self) -> &mut IserTargetSession {
        &mut self.session
    }

    fn on_start(&mut self, waker: &Waker, now: Instant) {
        self.session.on_start(waker, now);
    }

    fn on_turn(&mut self, now: Instant) {
        self.session.on_turn(now);
    }

    fn stage(&self) -> SessionStage {
        self.session.stage()
    }

    fn owed(&self) -> Option<u64> {
        self.session.owed()
    }

    fn poll_event(&mut self) -> Option<AuditEvent> {
        self.session.poll_event()
    }

    fn on_stop(&mut self, now: Instant) {
        self.session.on_stop(now);
    }
}

impl Pumped for ManualSession<IserTargetSession> {
    fn pump(&mut self) -> bool {
        self.take()
    }
}

pub(crate) fn list(data: &[u8]) -> SgList {
    SgList::one(Seg::from_slice(data))
}

pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8 ^ (i >> 9) as u8).collect()
}
