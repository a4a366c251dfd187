//! A hostile controller against an I/O queue of the NVMe/RDMA initiator: every request
//! completes exactly once, and none while its memory is registered.
//!
//! ```text
//!   stream = record ...      record = 0                        the well-behaved controller answers
//!                                   | kind, length (2), bytes  the hostile one sends these
//! ```
//! Bits of a kind: 1, replace the CID by that of a recent command, which the high four bits select;
//! 2, invalidate the memory of this command.

use crate::choices::Choices;
use crate::nvme_tcp_initiator::{check_error, names, namespace};
use crate::records::Records;
use crate::requests::{MAX_TURNS, Requests, take_turns};
use blockmux_proto::driver::session::{Initiator, Timed};
use blockmux_proto::nvme_rdma::client::NvmeRdmaQueueSession;
use blockmux_proto::nvme_tcp::client::{ControllerInfo, QueueConfig};
use blockmux_proto::rdma::testing::Recorder;
use blockmux_proto::rdma::{Event, RdmaConnections, RdmaSession, Remote, Stag, WorkRequest};
use blockmux_volume::{Pool, Seg, SgList, VolumeInfo};
use blockmux_wire::nvme::{CQE_LEN, Cqe, SQE_LEN, Sqe};
use blockmux_wire::nvmeof::rdma::CmAccept;
use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// Reads `data` as choices and records.
pub(crate) fn nvme_rdma_initiator(data: &[u8]) {
    let (mut choices, stream) = Choices::split(data);
    let pool = Pool::new(choices.of(&[64 << 20, 64 << 20, 16 << 10]));
    let namespace = namespace(&mut choices);
    let info = namespace.volume_info();
    let config = QueueConfig {
        names: names(),
        credentials: None,
        controller: ControllerInfo { max_entries: 64, in_capsule: 8192, ..ControllerInfo::default() },
        namespace,
        queues: 1,
        entries: choices.of(&[64, 64, 2]),
    };
    let (crqsize, is_unbacked) =
        choices.of(&[(64_u16, false), (64, true), (2, false), (0, false), (2, true), (0, true)]);
    let now = Instant::now();
    let mut run = NvmeRdmaInitiatorRun {
        session: NvmeRdmaQueueSession::new(config, (), pool.clone(), now),
        queue_pair: Recorder { unbacked: is_unbacked.then(Default::default), ..Recorder::default() },
        choices,
        records: Records(&stream),
        pool,
        now,
        info,
        requests: Requests::default(),
        unseen: VecDeque::new(),
        commands: Vec::new(),
        open: BTreeMap::new(),
        last_stag: 0,
        is_over: false,
    };
    let accept = CmAccept { crqsize: crqsize.into(), ..CmAccept::default() };
    run.event(Event::Connected { private_data: accept.as_bytes().to_vec() });
    take_turns(|| run.turn());
    run.finish();
}

struct NvmeRdmaInitiatorRun<'a> {
    choices: Choices<'a>,
    session: NvmeRdmaQueueSession,
    queue_pair: Recorder,
    records: Records<'a>,
    pool: Pool,
    now: Instant,
    info: VolumeInfo,
    requests: Requests,
    /// Commands that the well-behaved controller has not received.
    unseen: VecDeque<Sqe>,
    /// The CID and the key of each command, the latest last.
    commands: Vec<(u16, Option<u32>)>,
    /// Memory that is registered for the controller, by key.
    open: BTreeMap<u32, SgList>,
    last_stag: u32,
    is_over: bool,
}

impl NvmeRdmaInitiatorRun<'_> {
    /// Runs one turn of the driver; returns whether there was progress.
    fn turn(&mut self) -> bool {
        let info = Some(self.info.clone());
        let mut moved = !self.is_over && self.requests.submit(&mut self.session, info, &mut self.choices);
        moved |= self.post();
        moved |= !self.is_over && self.next_record();
        moved |= self.post();
        moved |= self.requests.poll_done(&mut self.session);
        moved |= self.requests.poll_returned(&mut self.session);
        match self.choices.byte() {
            255 => self.session.on_stop(),
            254 => self.pass_time(),
            _ => {}
        }
        moved
    }

    fn event(&mut self, event: Event) {
        if let Err(error) = self.session.connection(0).on_event(event, Instant::now()) {
            check_error(&error);
            self.is_over = true;
        }
    }

    /// Takes the session's work requests as far as there is room.
    fn post(&mut self) -> bool {
        let mut moved = false;
        for _ in 0..MAX_TURNS {
            let room = self.choices.below(4);
            let Some(work) = self.queue_pair.next(&mut self.session.connection(0), room) else { break };
            moved = true;
            match work {
                WorkRequest::Receive | WorkRequest::Disconnect => {}
                WorkRequest::Register { id, local, .. } => {
                    self.last_stag += 1;
                    assert!(!local.is_empty());
                    let remote = Remote { stag: Stag(self.last_stag), address: 64, len: local.len() as u32 };
                    self.open.insert(self.last_stag, local);
                    assert!(self.open.len() <= self.session.endpoint().regions as usize);
                    self.event(Event::Registered { id, remote });
                }
                WorkRequest::Invalidate { stag } => drop(self.open.remove(&stag.0)),
                WorkRequest::Send { head, payload, invalidate: None, .. } => self.on_sent(&head, &payload),
                other => panic!("a host does not post {other:?}"),
            }
        }
        moved
    }

    /// Checks the rules for hosts.
    fn on_sent(&mut self, head: &[u8], payload: &SgList) {
        assert_eq!(head.len(), SQE_LEN);
        let sqe = Sqe::read_from_bytes(head).expect("a command");
        let (len, key) = sqe.dptr.length_and_key();
        let key = Some(key).filter(|_| payload.is_empty() && len > 0);
        assert!(payload.len() <= 8192);
        if let Some(key) = key {
            let unbacked = self.queue_pair.unbacked.as_ref();
            let lent = unbacked.and_then(|regions| regions.get(Stag(key))).map(Seg::len);
            let given = self.open.get(&key).map(SgList::len);
            assert_eq!(
                given.or(lent),
                Some(len as usize),
                "the command names registered memory of another length"
            );
        }
        self.commands.push((sqe.cid.get(), key));
        self.unseen.push_back(sqe);
    }

    /// Delivers the controller's next message.
    fn next_record(&mut self) -> bool {
        let Some(kind) = self.records.kind() else { return false };
        if kind == 0 {
            let Some(sqe) = self.unseen.pop_front() else { return true };
            let cid = sqe.cid.get();
            let key = self.commands.iter().rev().find(|(own, _)| *own == cid).and_then(|(_, key)| *key);
            // CNTLID of a Connect.
            let cqe = Cqe { result: 1.into(), cid: cid.into(), ..Cqe::new_zeroed() };
            self.receive(cqe.as_bytes(), key);
            return true;
        }
        let (mut bytes, mut key) = (self.records.bytes(), None);
        let meant = self.commands.iter().rev().nth(usize::from(kind >> 4)).copied();
        if let Some((cid, own)) = meant.filter(|_| bytes.len() >= CQE_LEN) {
            if kind & 1 != 0 {
                bytes[12..14].copy_from_slice(&cid.to_le_bytes());
            }
            key = own.filter(|_| kind & 2 != 0);
        }
        bytes.truncate(CQE_LEN);
        self.receive(&bytes, key);
        true
    }

    /// Delivers a message. `key` counts as invalidated only if it is valid, because a queue pair
    /// reports no others.
    fn receive(&mut self, message: &[u8], key: Option<u32>) {
        let key = key.map(Stag);
        let written = self.queue_pair.unbacked.as_mut().zip(key);
        let written = written.and_then(|(unbacked, key)| unbacked.invalidate(key));
        let invalidated = key.filter(|key| written.is_some() || self.open.remove(&key.0).is_some());
        self.event(Event::Received { message: Seg::from_slice(message), invalidated, written });
    }

    fn pass_time(&mut self) {
        let due = self.session.connection(0).poll_timeout();
        if let Some(when) = due.filter(|_| !self.is_over) {
            self.now = self.now.max(when);
            if let Err(error) = self.session.connection(0).on_timeout(self.now) {
                check_error(&error);
                self.is_over = true;
            }
        }
    }

    /// Ends the connection.
    fn finish(mut self) {
        self.requests.poll_done(&mut self.session);
        self.open.clear();
        self.queue_pair.works.clear();
        if let Err(error) = self.session.connection(0).on_event(Event::Disconnected, Instant::now()) {
            check_error(&error);
        }
        self.requests.poll_done(&mut self.session);
        self.requests.poll_returned(&mut self.session);
        self.requests.take_back(&mut self.session);
        drop(self.session);
        assert_eq!(self.pool.out_bytes(), 0, "the pool has lost memory");
    }
}
