//! Controller queues over a transport in memory: the commands of a host, and the calls to the
//! transport that follow. No byte is encoded; each transport has its own tests for that.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

mod ana;
mod authenticate;
mod bounds;
mod changes;
mod commands;
mod connections;
mod events;
mod fused;
mod reservations;

use super::node::{FabricsPort, NvmeNode};
use super::testing::*;
use super::{CommandSlot, ControllerQueue, DataPlace, Descriptor, FabricsTransport};
use crate::driver::session::ProtocolError;
use crate::exports::{Exports, VolumeId};
use crate::nvme::nqn::Nqn;
use crate::nvme::subsystem::{Namespace, Subsystem};
use crate::nvme::{HangUp, NvmeOutcome};
use crate::testing::Pump;
use blockmux_volume::{Pool, Seg};
use blockmux_wire::nvme::opcode::{AdminOpcode, NvmOpcode};
use blockmux_wire::nvme::status::NvmeStatus;
use blockmux_wire::nvme::{Cqe, SglDescriptor, SglSubtype, SglType, Sqe, property};
use blockmux_wire::nvmeof::fabrics::*;
use core::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// A transport that records the queue's calls, in order.
#[derive(Default)]
struct LoopbackTransport {
    sent: Vec<TransportCall>,
}

/// One call of the queue to its transport.
#[derive(Debug, Clone)]
enum TransportCall {
    Fetch(FetchCall),
    Done { data: Vec<u8>, cqe: Cqe },
}

/// A request to fetch a command's data.
#[derive(Debug, Clone, Copy)]
struct FetchCall {
    slot: usize,
    len: usize,
}

impl FabricsTransport for LoopbackTransport {
    const NAME: &'static str = "loopback";

    /// Delivered data, in bytes.
    type Transfer = usize;

    fn descriptor(sqe: &Sqe) -> Descriptor<usize> {
        let place = match (sqe.dptr.kind(), sqe.dptr.subtype()) {
            (SglType::DATA_BLOCK, SglSubtype::OFFSET) => Ok(DataPlace::Capsule(sqe.dptr.address.get())),
            (SglType::TRANSPORT_DATA_BLOCK, SglSubtype::TRANSPORT) => Ok(DataPlace::Host),
            _ => Err(NvmeStatus::SGL_DESCRIPTOR_TYPE_INVALID),
        };
        Descriptor { len: sqe.dptr.length.get() as usize, place, transfer: 0 }
    }

    fn needs_memory(len: usize) -> bool {
        len > MAX_BORROWED
    }

    fn fetch(&mut self, slot: usize, command: &mut CommandSlot<usize>) {
        let len = command.data_out;
        assert_eq!(command.memory.is_some(), len > MAX_BORROWED);
        self.sent.push(TransportCall::Fetch(FetchCall { slot, len }));
    }

    fn complete(&mut self, cid: u16, _delivered: usize, outcome: NvmeOutcome, sqhd: Option<u16>) {
        let cqe = outcome.cqe(cid, sqhd);
        self.sent.push(TransportCall::Done { data: outcome.data.to_vec(), cqe });
    }

    fn unsent(&self) -> usize {
        let done =
            |sent: &TransportCall| if let TransportCall::Done { data, .. } = sent { data.len() } else { 0 };
        self.sent.iter().map(done).sum()
    }
}

impl TransportCall {
    fn cqe(&self) -> Cqe {
        match self {
            TransportCall::Done { cqe, .. } => *cqe,
            TransportCall::Fetch(fetch) => panic!("{fetch:?}"),
        }
    }

    fn fetch(&self) -> FetchCall {
        match self {
            TransportCall::Fetch(fetch) => *fetch,
            TransportCall::Done { cqe, .. } => panic!("{cqe:?}"),
        }
    }
}

/// A queue over a transport in memory.
fn queue(node: &(Arc<NvmeNode>, Exports), pool: Pool, now: Instant) -> ControllerQueue<LoopbackTransport> {
    ControllerQueue::with_transport(LoopbackTransport::default(), node.0.clone(), pool, now)
}

/// A scripted host: sends commands, delivers fetched data, takes completions.
struct FabricsTestHost {
    pump: Pump<ControllerQueue<LoopbackTransport>>,
    cid: u16,
    /// The value of every byte of its host identifier.
    id: u8,
    nqn: &'static str,
    now: Instant,
}

impl FabricsTestHost {
    /// A host that is connected to a port and has sent nothing.
    fn new(node: &(Arc<NvmeNode>, Exports)) -> FabricsTestHost {
        FabricsTestHost::with_pool(node, Pool::new(usize::MAX))
    }

    fn with_pool(node: &(Arc<NvmeNode>, Exports), pool: Pool) -> FabricsTestHost {
        let now = Instant::now();
        FabricsTestHost { pump: Pump::new(queue(node, pool, now), &node.1), cid: 0, id: 1, nqn: HOST, now }
    }

    /// A host on a connection to `local` that `hang_up` closes.
    fn with_hang_up(
        node: &(Arc<NvmeNode>, Exports),
        hang_up: HangUp,
        local: Option<SocketAddr>,
    ) -> FabricsTestHost {
        let mut host = FabricsTestHost::new(node);
        let (permit, _) = node.0.begin_connect(None, hang_up.clone());
        let session = queue(node, Pool::new(usize::MAX), host.now);
        host.pump.session = session.admitted(permit, local, hang_up);
        host
    }

    /// A host with an enabled controller, and the controller's identifier.
    fn admin(node: &(Arc<NvmeNode>, Exports)) -> (FabricsTestHost, u16) {
        FabricsTestHost::admin_of(node, 1)
    }

    /// A host with this host identifier and an enabled controller.
    fn admin_of(node: &(Arc<NvmeNode>, Exports), id: u8) -> (FabricsTestHost, u16) {
        let mut host = FabricsTestHost::new(node);
        host.id = id;
        let cqe = host.connect(0, CNTLID_DYNAMIC, 0);
        assert!(cqe.status.is_success());
        host.enable();
        (host, cqe.result.get() as u16)
    }

    /// An I/O queue, and the admin queue of its controller.
    fn io(node: &(Arc<NvmeNode>, Exports)) -> (FabricsTestHost, FabricsTestHost) {
        FabricsTestHost::io_of(node, 1)
    }

    /// An I/O queue and its admin queue, of a host with this host identifier.
    fn io_of(node: &(Arc<NvmeNode>, Exports), id: u8) -> (FabricsTestHost, FabricsTestHost) {
        FabricsTestHost::io_named(node, HOST, id)
    }

    /// An I/O queue and its admin queue, of a host with this NQN and host identifier.
    fn io_named(
        node: &(Arc<NvmeNode>, Exports),
        nqn: &'static str,
        id: u8,
    ) -> (FabricsTestHost, FabricsTestHost) {
        let [mut admin, mut io] = [(); 2].map(|()| FabricsTestHost { id, nqn, ..FabricsTestHost::new(node) });
        let cqe = admin.connect(0, CNTLID_DYNAMIC, 0);
        assert!(cqe.status.is_success());
        admin.enable();
        let cntlid = cqe.result.get() as u16;
        assert!(io.connect(1, cntlid, 0).status.is_success());
        (io, admin)
    }

    fn enable(&mut self) {
        assert!(self.set_cc(CC_ENABLED).status.is_success());
    }

    fn set_cc(&mut self, value: u64) -> Cqe {
        self.run(set_cc(value), &[]).1
    }

    fn csts(&mut self) -> u64 {
        let get = PropertyCommand {
            opcode: AdminOpcode::FABRICS.0,
            flags: 0x40,
            fctype: FabricsType::PROPERTY_GET.0,
            ofst: property::CSTS.into(),
            ..PropertyCommand::new_zeroed()
        };
        self.run(Sqe::read_from_bytes(get.as_bytes()).unwrap(), &[]).1.result.get()
    }

    fn connect(&mut self, qid: u16, cntlid: u16, cattr: u8) -> Cqe {
        let (command, data) = connect(NQN, qid, cntlid, cattr);
        let hostnqn = Nqn::new(self.nqn).unwrap().to_field();
        let data = ConnectData { hostid: [self.id; 16], hostnqn, ..data };
        self.run(command, data.as_bytes()).1
    }

    /// Sends a command with in-capsule data and takes its result: data and completion.
    fn run(&mut self, mut sqe: Sqe, data: &[u8]) -> (Vec<u8>, Cqe) {
        if !data.is_empty() {
            sqe.dptr = SglDescriptor::in_capsule(0, data.len() as u32);
        }
        self.send(&mut sqe, data);
        self.end_of(sqe)
    }

    fn end_of(&mut self, sqe: Sqe) -> (Vec<u8>, Cqe) {
        let [end] = self.received().try_into().unwrap();
        let TransportCall::Done { data, cqe } = end else { panic!("{end:?}") };
        assert_eq!(cqe.cid, sqe.cid);
        (data, cqe)
    }

    /// Sends a command with in-capsule data.
    fn send(&mut self, sqe: &mut Sqe, data: &[u8]) {
        self.cid += 1;
        sqe.cid = self.cid.into();
        self.deliver_command(sqe, data).unwrap();
    }

    fn deliver_command(&mut self, sqe: &Sqe, data: &[u8]) -> Result<(), ProtocolError> {
        let session = &mut self.pump.session;
        session.on_traffic(self.pump.now);
        assert!(session.takes_commands() && !session.is_over());
        session.on_command(sqe, data.len(), || Seg::from_slice(data), true)?;
        self.pump.turn();
        Ok(())
    }

    /// Delivers part of the fetched data.
    fn deliver(&mut self, fetch: FetchCall, offset: usize, data: &[u8]) {
        let session = &mut self.pump.session;
        let memory = session.memory_for(fetch.slot).unwrap();
        memory.slice(offset, data.len()).copy_from(data);
        let entry = session.fetching(fetch.slot).unwrap();
        entry.transfer += data.len();
        if entry.transfer == fetch.len {
            session.on_data(fetch.slot);
        }
        self.pump.turn();
    }

    /// Takes the recorded calls.
    fn received(&mut self) -> Vec<TransportCall> {
        std::mem::take(&mut self.pump.session.transport.sent)
    }

    /// Takes the only recorded call, which is a fetch.
    fn fetch(&mut self) -> FetchCall {
        let [fetch] = self.received().try_into().unwrap();
        fetch.fetch()
    }

    fn is_closed(&self) -> bool {
        self.pump.session.is_finished()
    }
}

/// Data up to this many bytes is borrowed from the transport and needs no memory of the queue.
const MAX_BORROWED: usize = 64 << 10;
