//! A scripted host at the other end of a queue pair that records the posted work.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

use super::*;
use crate::driver::target::TargetLifecycle;
use crate::exports::Exports;
use crate::fabrics::controller::testing::*;
use crate::nvme_rdma::cm::tests::asking;
use crate::rdma::WorkRequest;
use crate::rdma::testing::Recorder;
use crate::testing::Pump;
use blockmux_wire::nvme::SglDescriptor;
use blockmux_wire::nvme::identify::{IdentifyController, SGLS_OFFSET, SGLS_TRANSPORT};
use blockmux_wire::nvme::opcode::{AdminOpcode, NvmOpcode};
use blockmux_wire::nvmeof::fabrics::CNTLID_DYNAMIC;
use blockmux_wire::nvmeof::rdma::{CmAccept, CmReject};
use zerocopy::FromBytes;

/// A host that uses a new key for each command.
struct RdmaTestHost {
    pump: Pump<NvmeRdmaTargetSession>,
    queue: Recorder,
    cid: u16,
    /// Free receive buffers of the target.
    receives: u32,
}

/// Result of a command: the data written to the host, the completion, and the key that it
/// invalidates.
type CommandEnd = (Vec<u8>, Cqe, Option<Stag>);

impl RdmaTestHost {
    fn new((node, exports): &(Arc<NvmeNode>, Exports)) -> RdmaTestHost {
        let session = NvmeRdmaTargetSession::new(node.clone(), Pool::new(usize::MAX), Instant::now());
        RdmaTestHost { pump: Pump::new(session, exports), queue: Recorder::default(), cid: 0, receives: 0 }
    }

    /// A host that is connected and has sent no command.
    fn open(node: &(Arc<NvmeNode>, Exports), qid: u16) -> RdmaTestHost {
        let mut host = RdmaTestHost::new(node);
        host.event(Event::Requested { private_data: asking(qid, 32, 31), reads: READS }).unwrap();
        let Some(WorkRequest::Accept { private_data }) = host.next() else { panic!("not accepted") };
        assert_eq!(CmAccept::read_from_bytes(&private_data).unwrap().crqsize.get(), 32);
        assert_eq!(host.receives, 32);
        host
    }

    fn admin(node: &(Arc<NvmeNode>, Exports)) -> (RdmaTestHost, u16) {
        let mut host = RdmaTestHost::open(node, 0);
        let (sqe, data) = connect(NQN, 0, CNTLID_DYNAMIC, 0);
        let (_, cqe, closed) = host.write(sqe, data.as_bytes());
        assert!(cqe.status.is_success() && closed == Some(Stag(1)));
        assert!(host.run(set_cc(CC_ENABLED)).1.status.is_success());
        (host, cqe.result.get() as u16)
    }

    /// An I/O queue, and the admin queue of its controller.
    fn io(node: &(Arc<NvmeNode>, Exports)) -> (RdmaTestHost, RdmaTestHost) {
        let (admin, cntlid) = RdmaTestHost::admin(node);
        let mut io = RdmaTestHost::open(node, 1);
        let (sqe, data) = connect(NQN, 1, cntlid, 0);
        assert!(io.in_capsule(sqe, data.as_bytes()).1.status.is_success());
        (io, admin)
    }

    fn event(&mut self, event: Event) -> Result<(), ProtocolError> {
        self.pump.session.on_event(event, Instant::now())?;
        self.pump.turn();
        Ok(())
    }

    /// The next work that the target posts; receive buffers are only counted.
    fn next(&mut self) -> Option<WorkRequest> {
        loop {
            self.pump.turn();
            match self.queue.next(&mut self.pump.session, 100)? {
                WorkRequest::Receive => self.receives += 1,
                work => return Some(work),
            }
        }
    }

    /// Sends a command with `data` in its capsule.
    fn send(&mut self, sqe: &mut Sqe, data: &[u8]) -> Result<(), ProtocolError> {
        self.cid += 1;
        sqe.cid = self.cid.into();
        let mut message = sqe.as_bytes().to_vec();
        message.extend(data);
        self.receives -= 1;
        self.event(Event::Received { message: Seg::from_slice(&message), invalidated: None, written: None })
    }

    /// Takes the result of the command that was sent last.
    fn end(&mut self) -> CommandEnd {
        let mut data = Vec::new();
        loop {
            match self.next().expect("an completion") {
                WorkRequest::Write { id, local, remote } => {
                    assert_eq!(remote.stag, Stag(self.cid.into()));
                    assert_eq!(remote.address, ADDRESS);
                    data = local.to_vec();
                    self.event(Event::Done { id, result: Ok(()) }).unwrap();
                }
                WorkRequest::Send { head, invalidate, .. } => {
                    assert_eq!(self.receives, 32, "the buffer was given back before the completion");
                    let cqe = Cqe::read_from_bytes(&head).unwrap();
                    assert_eq!(cqe.cid.get(), self.cid);
                    assert_eq!(self.pump.session.transport.unsent(), 0);
                    return (data, cqe, invalidate);
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// Runs a command that transfers no data or reads data, with the length of its descriptor.
    fn run(&mut self, mut sqe: Sqe) -> CommandEnd {
        sqe.dptr = self.keyed(sqe.dptr.length.get());
        self.send(&mut sqe, &[]).unwrap();
        self.end()
    }

    /// Runs a command whose data the target reads from the host.
    fn write(&mut self, mut sqe: Sqe, data: &[u8]) -> CommandEnd {
        sqe.dptr = self.keyed(data.len() as u32);
        self.send(&mut sqe, &[]).unwrap();
        let (id, remote) = self.read(data);
        assert_eq!((remote.stag, remote.len as usize), (Stag(self.cid.into()), data.len()));
        self.event(Event::Done { id, result: Ok(()) }).unwrap();
        self.end()
    }

    /// Executes the RDMA Read that the target posts next.
    fn read(&mut self, data: &[u8]) -> (WorkId, Remote) {
        let Some(WorkRequest::Read { id, local, remote }) = self.next() else { panic!("no read") };
        assert_eq!((local.len(), remote.address), (data.len(), ADDRESS));
        local.copy_from(data);
        (id, remote)
    }

    fn in_capsule(&mut self, mut sqe: Sqe, data: &[u8]) -> CommandEnd {
        sqe.dptr = SglDescriptor::in_capsule(0, data.len() as u32);
        self.send(&mut sqe, data).unwrap();
        self.end()
    }

    /// Descriptor of the next command's buffer.
    fn keyed(&self, len: u32) -> SglDescriptor {
        SglDescriptor::keyed(ADDRESS, len, u32::from(self.cid) + 1, true)
    }
}

const ADDRESS: u64 = 0x1_0000_1000;

#[test]
fn an_invalid_connection_request_is_rejected_with_its_status() {
    let cases = [
        (vec![0; 4], CmStatus::INVALID_LENGTH),
        (asking(129, 32, 31), CmStatus::INVALID_QID),
        (asking(0, 32, 2000), CmStatus::INVALID_HSQSIZE),
        (asking(0, 0, 31), CmStatus::INVALID_HRQSIZE),
    ];
    for (private_data, status) in cases {
        let mut host = RdmaTestHost::new(&node());
        assert!(host.event(Event::Requested { private_data, reads: READS }).is_err());
        let Some(WorkRequest::Reject { private_data }) = host.next() else { panic!("{status:?}") };
        let reject = CmReject::read_from_bytes(&private_data).unwrap();
        assert_eq!(CmStatus(reject.sts.get()), status);
        assert!(host.next().is_none() && host.pump.session.is_finished());
    }
}

#[test]
fn no_more_rdma_reads_are_posted_than_the_host_supports() {
    let mut host = RdmaTestHost::new(&node());
    assert!(host.event(Event::Requested { private_data: asking(0, 32, 31), reads: 0 }).is_err());
    let Some(WorkRequest::Reject { private_data }) = host.next() else { panic!("not rejected") };
    assert_eq!(private_data, cm::reject(CmStatus::INVALID_IRD));
    for (reads, limit) in [(4, 4), (100, READS)] {
        let mut host = RdmaTestHost::new(&node());
        host.event(Event::Requested { private_data: asking(0, 32, 31), reads }).unwrap();
        assert_eq!(host.pump.session.transport.mover.max_reads, limit);
    }
}

#[test]
fn a_command_before_connect_has_completed_ends_the_connection() {
    let node = node();
    let (io, admin) = RdmaTestHost::io(&node);
    drop(admin);
    // Connect waits until nothing of the host's old controller is left.
    let mut host = RdmaTestHost::open(&node, 0);
    let (mut sqe, data) = connect(NQN, 0, CNTLID_DYNAMIC, 0);
    sqe.dptr = host.keyed(data.as_bytes().len() as u32);
    host.send(&mut sqe, &[]).unwrap();
    let (id, _) = host.read(data.as_bytes());
    host.event(Event::Done { id, result: Ok(()) }).unwrap();
    assert!(host.next().is_none());
    host.send(&mut set_cc(CC_ENABLED), &[]).unwrap_err();
    drop(io);
}

#[test]
fn a_target_that_stops_has_no_resources() {
    let mut host = RdmaTestHost::new(&node());
    host.pump.session.on_stop(Instant::now());
    assert!(host.event(Event::Requested { private_data: asking(0, 32, 31), reads: READS }).is_err());
    let Some(WorkRequest::Reject { private_data }) = host.next() else { panic!("not rejected") };
    assert_eq!(private_data, cm::reject(CmStatus::NO_RESOURCES));
}

#[test]
fn identify_reports_the_supported_descriptors() {
    let (mut host, _) = RdmaTestHost::admin(&node());
    let (data, cqe, closed) = host.run(admin(AdminOpcode::IDENTIFY, 0, 1, 0, 4096));
    assert!(cqe.status.is_success() && closed.is_some());
    let page = IdentifyController::read_from_bytes(&data).unwrap();
    assert_eq!(page.sgls.get() & (SGLS_KEYED | SGLS_OFFSET | SGLS_TRANSPORT), SGLS_KEYED | SGLS_OFFSET);
    assert_eq!((page.ioccsz.get() * 16, page.icdoff.get()), (64 + 8192, 0));
    assert_eq!(host.pump.session.endpoint().receive_len, 64 + 8192);
}

#[test]
fn a_log_page_comes_into_memory_with_a_key() {
    let (mut host, _) = RdmaTestHost::admin(&node());
    let error_log = 1 | 15 << 16;
    let (data, cqe, _) = host.run(admin(AdminOpcode::GET_LOG_PAGE, u32::MAX, error_log, 0, 64));
    assert!(cqe.status.is_success() && data.len() == 64, "{cqe:?}");
}

#[test]
fn data_is_transferred_by_capsule_by_read_and_by_write() {
    let (mut host, _admin) = RdmaTestHost::io(&node());
    let (short, long) = (pattern(4096), pattern(64 << 10));
    let (_, cqe, closed) = host.in_capsule(nvm(NvmOpcode::WRITE, 1, 0, 8), &short);
    assert!(cqe.status.is_success() && closed.is_none(), "it names no memory");
    assert!(host.write(nvm(NvmOpcode::WRITE, 1, 8, 128), &long).1.status.is_success());
    let (data, cqe, closed) = host.run(nvm(NvmOpcode::READ, 1, 0, 136));
    assert!(cqe.status.is_success() && closed == Some(Stag(host.cid.into())));
    assert!(data == [short, long].concat());
    // Without the subtype, the host invalidates the key itself.
    let mut read = nvm(NvmOpcode::READ, 1, 0, 1);
    read.dptr = SglDescriptor::keyed(ADDRESS, 512, u32::from(host.cid) + 1, false);
    host.send(&mut read, &[]).unwrap();
    let (data, _, closed) = host.end();
    assert_eq!((data.len(), closed), (512, None));
}

#[test]
fn a_descriptor_that_does_not_fit_its_command_is_refused_and_moves_nothing() {
    let (mut host, mut admin_host) = RdmaTestHost::io(&node());
    let write = nvm(NvmOpcode::WRITE, 1, 0, 1);
    let read = nvm(NvmOpcode::READ, 1, 0, 1);
    let key = |len| SglDescriptor::keyed(ADDRESS, len, 7, false);
    let keyed_segment = SglDescriptor { identifier: 0x41, ..key(512) };
    let cases = [
        (write, key(511), NvmeStatus::DATA_SGL_LENGTH_INVALID),
        (write, key(0), NvmeStatus::DATA_SGL_LENGTH_INVALID),
        (write, SglDescriptor::transport(512), NvmeStatus::SGL_DESCRIPTOR_TYPE_INVALID),
        (write, keyed_segment, NvmeStatus::SGL_DESCRIPTOR_TYPE_INVALID),
        (write, SglDescriptor::in_capsule(1, 512), NvmeStatus::SGL_OFFSET_INVALID),
        (write, SglDescriptor::in_capsule(u64::MAX, 512), NvmeStatus::SGL_OFFSET_INVALID),
        (read, key(513), NvmeStatus::DATA_SGL_LENGTH_INVALID),
        (read, SglDescriptor::in_capsule(0, 512), NvmeStatus::SGL_DESCRIPTOR_TYPE_INVALID),
    ];
    for (sqe, dptr, status) in cases {
        host.send(&mut Sqe { dptr, ..sqe }, &[0; 512]).unwrap();
        let (data, cqe, _) = host.end();
        assert_eq!((data.len(), cqe.status.status()), (0, status), "{dptr:?}");
    }
    for dptr in [key(4095), SglDescriptor::in_capsule(0, 4096)] {
        let identify = Sqe { dptr, ..admin(AdminOpcode::IDENTIFY, 0, 1, 0, 4096) };
        admin_host.send(&mut identify.clone(), &[0; 4096]).unwrap();
        let (data, cqe, _) = admin_host.end();
        assert_eq!((data.len(), cqe.status.status()), (0, NvmeStatus::DATA_SGL_LENGTH_INVALID));
    }
}

#[test]
fn a_failed_command_invalidates_its_memory_too() {
    let (mut host, _admin) = RdmaTestHost::io(&node());
    let (data, cqe, closed) = host.run(nvm(NvmOpcode::READ, 9, 0, 1));
    assert_eq!(cqe.status.status(), NvmeStatus::INVALID_NAMESPACE_OR_FORMAT);
    assert_eq!((data.len(), closed), (0, Some(Stag(host.cid.into()))));
}

#[test]
fn a_message_that_is_not_a_command_ends_its_connection() {
    let (mut host, _admin) = RdmaTestHost::io(&node());
    let message = Seg::from_slice(&[0; SQE_LEN - 1]);
    assert!(host.event(Event::Received { message, invalidated: None, written: None }).is_err());
}

#[test]
fn a_host_with_more_commands_than_entries_is_disconnected() {
    let (mut host, _admin) = RdmaTestHost::io(&node());
    host.pump.holds_io = true;
    let results = [(); 33].map(|()| {
        host.receives += 1;
        let mut read = nvm(NvmOpcode::READ, 1, 0, 1);
        read.dptr = host.keyed(512);
        host.send(&mut read, &[])
    });
    assert!(results[..32].iter().all(Result::is_ok) && results[32].is_err());
    assert!(matches!(host.next(), Some(WorkRequest::Disconnect)));
}

#[test]
fn an_answer_waits_for_room_behind_its_data() {
    let (mut host, _admin) = RdmaTestHost::io(&node());
    let mut read = nvm(NvmOpcode::READ, 1, 0, 1);
    read.dptr = host.keyed(512);
    host.send(&mut read, &[]).unwrap();
    assert!(host.queue.next(&mut host.pump.session, 0).is_none());
    let Some(WorkRequest::Write { id, .. }) = host.queue.next(&mut host.pump.session, 1) else { panic!() };
    assert!(host.queue.next(&mut host.pump.session, 0).is_none());
    assert_eq!(host.pump.session.transport.unsent(), 512);
    host.event(Event::Done { id, result: Ok(()) }).unwrap();
    assert_eq!(host.end().1.cid, read.cid);
}

#[test]
fn no_more_reads_are_posted_than_may_be_on_their_way() {
    let (node, exports) = node();
    let (mut host, _admin) = RdmaTestHost::io(&(node, exports));
    host.receives += 10;
    for _ in 0..31 {
        let mut write = nvm(NvmOpcode::WRITE, 1, 0, 1);
        write.dptr = host.keyed(512);
        host.send(&mut write, &[]).unwrap();
    }
    let reads = std::iter::from_fn(|| host.next()).count();
    assert_eq!(reads, 31);
    host.pump.session.transport.mover.max_reads = 31;
    let mut write = nvm(NvmOpcode::WRITE, 1, 0, 1);
    write.dptr = host.keyed(512);
    host.send(&mut write, &[]).unwrap();
    assert!(host.next().is_none());
}

#[test]
fn a_connection_that_is_lost_with_a_read_on_its_way_is_over() {
    let (mut host, _admin) = RdmaTestHost::io(&node());
    let mut write = nvm(NvmOpcode::WRITE, 1, 0, 1);
    write.dptr = host.keyed(512);
    host.send(&mut write, &[]).unwrap();
    let (id, _) = host.read(&[1; 512]);
    host.event(Event::Done { id, result: Err(WorkError::Flushed) }).unwrap();
    host.event(Event::Disconnected).unwrap();
    assert!(host.next().is_none() && host.pump.session.is_finished());
    assert!(host.pump.submitted.is_empty(), "nothing of it was written");
}
