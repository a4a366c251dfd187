//! A scripted controller at the other end of a queue pair that records the posted work.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

use super::*;
use crate::driver::session::Initiator;
use crate::fabrics::host::testing::{ScriptedSubsystem, controller, names, namespace};
use crate::fabrics::host::{AdminConfig, ControllerQuery, NvmeRefused, QueueConfig};
use crate::rdma::WorkRequest;
use crate::rdma::testing::Recorder;
use blockmux_volume::{Io, Op, Tag};
use blockmux_wire::nvme::identify::{SGLS_ALIGNED_ANY, SGLS_KEYED, SGLS_OFFSET};
use blockmux_wire::nvme::status::{NvmeStatus, StatusField};
use std::time::Duration;
use zerocopy::{FromBytes, FromZeros};

/// A host's queue, and the work that it posts.
struct TestQueue {
    session: NvmeRdmaQueueSession,
    works: Recorder,
}

impl TestQueue {
    /// A queue connected to a controller with `receives` receive buffers.
    fn connected(receives: u16) -> TestQueue {
        let now = Instant::now();
        let (names, controller, namespace) = (names(), controller(), namespace());
        let config = QueueConfig { names, credentials: None, controller, namespace, queues: 1, entries: 8 };
        let session = NvmeRdmaQueueSession::new(config, (), Pool::new(1 << 20), now);
        let mut queue = TestQueue { session, works: Recorder::default() };
        queue.event(Event::Connected { private_data: cm::accept(receives) }).unwrap();
        let connect = queue.sent();
        assert_eq!(connect.dptr, SglDescriptor::in_capsule(0, 1024));
        queue.complete(connect.cid.get(), None).unwrap();
        assert!(queue.session.is_ready());
        queue
    }

    fn event(&mut self, event: Event) -> Result<(), ProtocolError> {
        self.session.connection(0).on_event(event, Instant::now())
    }

    fn next(&mut self) -> Option<WorkRequest> {
        loop {
            match self.works.next(&mut self.session.connection(0), 10)? {
                WorkRequest::Receive => {}
                work => return Some(work),
            }
        }
    }

    /// The next command that the queue sends. Its buffer gets the key 7.
    fn sent(&mut self) -> Sqe {
        loop {
            match self.next().expect("a command") {
                WorkRequest::Register { id, local, .. } => {
                    let remote = Remote { stag: Stag(7), address: 100, len: local.len() as u32 };
                    self.event(Event::Registered { id, remote }).unwrap();
                }
                WorkRequest::Send { head, .. } => return Sqe::read_from_bytes(&head).unwrap(),
                other => panic!("{other:?}"),
            }
        }
    }

    fn complete(&mut self, cid: u16, invalidated: Option<Stag>) -> Result<(), ProtocolError> {
        let status = StatusField::new(NvmeStatus::SUCCESSFUL_COMPLETION);
        let cqe = Cqe { cid: cid.into(), status, ..Cqe::new_zeroed() };
        self.event(Event::Received { message: Seg::from_slice(cqe.as_bytes()), invalidated, written: None })
    }

    fn read(&mut self, tag: u64) {
        self.session.submit(Io { tag: Tag(tag), op: Op::Read, offset: 0, len: 4096, data: None });
    }

    /// A queue with one read in flight, and the CID of that read.
    fn reading() -> (TestQueue, u16) {
        let mut queue = TestQueue::connected(8);
        queue.read(1);
        let sqe = queue.sent();
        assert_eq!(sqe.dptr, SglDescriptor::keyed(100, 4096, 7, true));
        (queue, sqe.cid.get())
    }
}

#[test]
fn a_command_completes_once_its_key_is_invalidated() {
    let (mut queue, cid) = TestQueue::reading();
    queue.complete(cid, Some(Stag(7))).unwrap();
    assert!(queue.session.poll_done().unwrap().result.is_ok());
    let (mut queue, cid) = TestQueue::reading();
    queue.complete(cid, None).unwrap();
    assert!(queue.session.poll_done().is_none(), "the controller can still write");
    assert!(matches!(queue.next(), Some(WorkRequest::Invalidate { stag: Stag(7) })));
    assert!(queue.session.poll_done().unwrap().result.is_ok());
}

#[test]
fn a_controller_that_violates_the_protocol_loses_its_connection() {
    let (mut queue, cid) = TestQueue::reading();
    assert!(queue.complete(cid, Some(Stag(8))).is_err(), "another key");
    let (mut queue, cid) = TestQueue::reading();
    assert!(queue.complete(cid ^ 1, None).is_err(), "no such command");
    let (mut queue, cid) = TestQueue::reading();
    queue.complete(cid, None).unwrap();
    assert!(queue.complete(cid, None).is_err(), "completed twice");
    let (mut queue, _) = TestQueue::reading();
    let message = Seg::from_slice(&[0; CQE_LEN - 1]);
    assert!(queue.event(Event::Received { message, invalidated: None, written: None }).is_err(), "too short");
    let mut queue = TestQueue::connected(8);
    queue.read(1);
    let Some(WorkRequest::Register { id, .. }) = queue.next() else { panic!("nothing is registered") };
    // The generation and the slot are in both the identifier and the CID.
    let cid = ((id.0 >> 16) as u16) << 10 | id.0 as u16;
    let early = queue.complete(cid, None).unwrap_err();
    assert_eq!(early.what, "completed a command that was not sent");
    let (mut queue, _) = TestQueue::reading();
    let lost = queue.event(Event::Disconnected).unwrap_err();
    assert!(lost.what.contains("in the middle of commands") && lost.reference == REFERENCE);
}

#[test]
fn no_more_commands_are_sent_than_the_controller_has_buffers_for() {
    let mut queue = TestQueue::connected(2);
    (1..=3).for_each(|tag| queue.read(tag));
    let first = queue.sent();
    queue.sent();
    assert!(queue.next().is_none());
    queue.complete(first.cid.get(), Some(Stag(7))).unwrap();
    queue.sent();
}

#[test]
fn a_rejection_is_explained() {
    let config = QueueConfig {
        names: names(),
        credentials: None,
        controller: controller(),
        namespace: namespace(),
        queues: 1,
        entries: 8,
    };
    let session = NvmeRdmaQueueSession::new(config, (), Pool::new(1 << 20), Instant::now());
    let asked = RdmaConnections::endpoint(&session).private_data;
    assert_eq!(cm::check_request(&asked), Ok(8));
    let mut queue = TestQueue { session, works: Recorder::default() };
    let private_data = cm::reject(blockmux_wire::nvmeof::rdma::CmStatus::INVALID_QID);
    let error = queue.event(Event::Refused { private_data }).unwrap_err();
    assert!(error.what.contains("no such queue"), "{error}");
}

/// Initializes a controller over an admin queue. Returns the longest in-capsule data of its I/O
/// queues, or why the host does not use it.
fn in_capsule_of(mut subsystem: ScriptedSubsystem) -> Result<u32, NvmeRefused> {
    let now = Instant::now();
    let keep_alive = Duration::from_secs(5);
    let config = AdminConfig {
        names: names(),
        credentials: None,
        queues: 1,
        query: ControllerQuery::Namespace(1),
        keep_alive,
    };
    let mut session = NvmeRdmaAdminSession::new(config, (), Pool::new(1 << 20), now);
    let mut works = Recorder::default();
    RdmaSession::on_event(&mut session, Event::Connected { private_data: cm::accept(32) }, now).unwrap();
    let mut memory = SgList::default();
    while let Some(work) = works.next(&mut session, 10) {
        let event = match work {
            WorkRequest::Register { id, local, .. } => {
                memory = local;
                let remote = Remote { stag: Stag(7), address: 100, len: memory.len() as u32 };
                Event::Registered { id, remote }
            }
            // The shutdown at the end is not completed.
            WorkRequest::Send { head, .. } if !session.is_over() => {
                let sqe = Sqe::read_from_bytes(&head).unwrap();
                let (data, status, result) = subsystem.answer(&sqe);
                if !data.is_empty() && memory.len() == data.len() {
                    memory.copy_from(&data);
                }
                let cqe = Cqe { cid: sqe.cid, status, result: result.into(), ..Cqe::new_zeroed() };
                Event::Received { message: Seg::from_slice(cqe.as_bytes()), invalidated: None, written: None }
            }
            _ => continue,
        };
        RdmaSession::on_event(&mut session, event, now).unwrap();
    }
    match session.refused() {
        Some(refused) => Err(refused.clone()),
        None => Ok(session.controller().expect("the controller is initialized").in_capsule),
    }
}

#[test]
fn in_capsule_data_and_the_controller_itself_depend_on_its_sgl_support() {
    let with =
        |sgls, icdoff| in_capsule_of(ScriptedSubsystem { sgls, icdoff, ..ScriptedSubsystem::default() });
    let keyed = SGLS_ALIGNED_ANY | SGLS_KEYED;
    assert_eq!(with(keyed | SGLS_OFFSET, 0), Ok(8192));
    assert_eq!(with(keyed | SGLS_OFFSET, 4), Ok(0), "data does not follow the command directly");
    assert_eq!(with(keyed, 0), Ok(0), "no offsets");
    let refused = with(SGLS_ALIGNED_ANY | SGLS_OFFSET, 0).unwrap_err();
    assert_eq!(refused, NvmeRefused::NoKeyedSgls(SGLS_ALIGNED_ANY | SGLS_OFFSET));
    assert!(refused.to_string().contains("no keyed SGLs") && !refused.is_retryable());
}

#[test]
fn a_controller_is_to_invalidate_the_keys_of_memory_that_does_not_keep_them() {
    let remote = Remote { stag: Stag(7), address: 4096, len: 512 };
    let sent = |keeps_keys| {
        let mut queue = Recorder { room: 1, keeps_keys, ..Recorder::default() };
        let mut sqe = Sqe::new_zeroed();
        sqe.send(&SgList::default(), Some((remote, RemoteRights::RemoteRead)), &mut queue);
        sqe.dptr
    };
    assert_eq!(sent(false), SglDescriptor::keyed(4096, 512, 7, true));
    assert_eq!(sent(true), SglDescriptor::keyed(4096, 512, 7, false));
}
