//! `TargetTask` over a queue pair that is not over a stream: the in-memory provider carries SRP.

mod sides;

use blockmux_engine::carrier::connection::{Broken, Inflow};
use blockmux_engine::carrier::{Awaited, Carrier};
use blockmux_engine::serve::listener::ConnectionLimit;
use blockmux_engine::serve::target_task::{NewSession, TargetTask};
use blockmux_engine::sim::{NetworkConditions, SimCore, SimNet, World};
use blockmux_proto::driver::session::Initiator;
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_proto::rdma::{Event, QueuePair, RdmaConnections, RdmaSession};
use blockmux_proto::scsi::Lun;
use blockmux_proto::srp::client::{SrpInitiatorConfig, SrpInitiatorSession, SrpSessionMode};
use blockmux_proto::srp::node::SrpPortId;
use blockmux_proto::srp::server::SrpTargetSession;
use blockmux_proto::volume_state::VolumeState;
use blockmux_rdma::loopback::{self, Loopback};
use blockmux_rdma::{Driven, Provider};
use blockmux_volume::{Core, Io, MemVolume, Op, Output, Pool, Seg, SgList, Tag, Waker};
use sides::srp;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Passes the events of a queue pair to its session, and the session's work to the queue pair.
struct LoopbackCarrier {
    queue_pair: Loopback,
    core: Rc<SimCore>,
    waker: Waker,
    is_over: bool,
}

impl<S: RdmaSession> Carrier<S> for LoopbackCarrier {
    type Host = SimCore;
    type Handle = ();

    fn receive(&mut self, session: &mut S) -> Result<Inflow, Broken> {
        let mut inflow = Inflow::Empty;
        while let Some(event) = self.queue_pair.poll() {
            inflow = Inflow::Drained;
            self.is_over |= matches!(event, Event::Disconnected | Event::Refused { .. });
            session.on_event(event, self.core.now())?;
        }
        Ok(if self.is_over { Inflow::Finished } else { inflow })
    }

    fn send(&mut self, session: &mut S) -> Result<bool, Broken> {
        let mut any = false;
        while session.work(&mut self.queue_pair) {
            any = true;
        }
        Ok(any)
    }

    fn check_deadline(&mut self, session: &mut S) -> Result<(), Broken> {
        let now = self.core.now();
        if session.poll_timeout().is_some_and(|when| when <= now) {
            session.on_timeout(now)?;
        }
        Ok(())
    }

    fn check_new_deadline(&mut self, session: &mut S) -> Result<(), Broken> {
        self.check_deadline(session)
    }

    fn park(&mut self) {
        // A queue pair of hardware has a completion channel instead.
        self.core.wake_at(self.core.now() + POLL, &self.waker);
    }

    fn end(&mut self, _session: &mut S) {
        self.queue_pair.disconnect();
    }

    fn close(&mut self) {
        self.queue_pair.disconnect();
    }

    fn hand_over(&mut self) -> ((), Vec<u8>) {
        ((), Vec::new())
    }

    fn awaits(&self, _session: &S) -> Awaited {
        Awaited::Message
    }

    fn has_output(&self, _session: &mut S) -> bool {
        false
    }

    fn drop_output(&mut self, _session: &mut S) {}

    fn end_handshake(&mut self, _session: &mut S) {}

    fn peer(&self) -> Arc<str> {
        "loopback".into()
    }

    fn is_abandoned(&self) -> bool {
        false
    }

    fn is_secured(&self) -> bool {
        false
    }

    fn transferred_bytes(&self) -> u64 {
        0
    }

    fn moved_bytes(&self) -> u64 {
        0
    }
}

/// An initiator whose target is a task of a core.
struct Connected {
    world: World,
    initiator: Driven<Loopback, SrpInitiatorSession>,
    limit: ConnectionLimit,
    volume_state: Arc<VolumeState>,
}

impl Connected {
    fn new() -> Connected {
        let mut world = World::new(SimNet::new(1, NetworkConditions::FAIR));
        let core = world.add_core(512 << 20);
        let volume = Arc::new(MemVolume::new(1 << 20));
        let export = Export { name: "a".into(), description: String::new(), read_only: false, volume };
        let exports = Exports::new(vec![export]);
        let volume_state = exports.volume_state(VolumeId(0)).unwrap();
        let config = SrpInitiatorConfig {
            initiator: SrpPortId([7; 16]),
            target: srp::port(0),
            lun: Lun::new(0),
            mode: SrpSessionMode::Use,
            channels: 1,
            immediate_data: true,
        };
        let initiator = SrpInitiatorSession::new(config, Pool::new(16 << 20), core.now());
        let (node, pool) = (srp::node(&exports), core.pool().for_peer());
        let session = SrpTargetSession::new(node, pool.clone(), Arc::new(|| {}), core.now());
        let (active, passive) =
            loopback::pair(&RdmaConnections::endpoint(&initiator), &session.endpoint(), [9; 32]);
        let carrier = |waker: &Waker| LoopbackCarrier {
            queue_pair: passive,
            core: core.clone(),
            waker: waker.clone(),
            is_over: false,
        };
        let limit = ConnectionLimit::new(1);
        let session = NewSession { session, pool, exports };
        TargetTask::spawn_over(&core, carrier, limit.permit().unwrap(), session, None);
        let initiator = Driven::new(initiator, active, core.now());
        let mut connected = Connected { world, initiator, limit, volume_state };
        connected.run();
        assert!(connected.initiator.is_ready());
        connected
    }

    fn run(&mut self) {
        for _ in 0..100 {
            self.initiator.pump_connection(0);
            self.world.run_for(POLL).unwrap();
        }
        self.initiator.pump_connection(0);
    }
}

#[test]
fn a_queue_pair_that_is_not_a_stream_carries_a_session_of_a_target() {
    let mut connected = Connected::new();
    let data = SgList::one(Seg::from_slice(&[7; 4096]));
    let write = Io { tag: Tag(1), op: Op::Write { fua: false }, offset: 512, len: 4096, data: Some(data) };
    connected.initiator.submit(write);
    connected.run();
    assert!(connected.initiator.poll_done().unwrap().result.is_ok());
    connected.initiator.submit(Io::new(Tag(2), Op::Read, 0, 1024));
    connected.run();
    let read = connected.initiator.poll_done().unwrap().result.map(Output::into_data).unwrap();
    assert_eq!(read.to_vec(), [[0; 512], [7; 512]].concat());
    let traffic = connected.volume_state.traffic();
    assert_eq!((traffic.users, traffic.reads, traffic.writes), (1, 1, 1));
    Initiator::on_stop(&mut connected.initiator);
    connected.run();
    assert_eq!((connected.limit.open(), connected.volume_state.traffic().users), (0, 0));
}

#[test]
fn a_task_ends_with_its_queue_pair() {
    let mut connected = Connected::new();
    connected.initiator.queue_pair().break_after(0);
    connected.run();
    assert_eq!(connected.limit.open(), 0);
}

const POLL: Duration = Duration::from_millis(1);
