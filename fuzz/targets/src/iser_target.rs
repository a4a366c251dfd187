//! A hostile initiator against the iSER target, with volumes that fail when the input says so.
//!
//! ```text
//!   stream = record ...      record = kind, length (2), bytes      a message
//! ```
//! Bits of a kind: 1, the CmdSN is right; 2, it names memory for both directions; 4, behind the
//! bytes comes as much data as its PDU says.

use crate::choices::Choices;
use crate::iscsi_target::{exports, node};
use crate::records::Records;
use crate::served::Served;
use blockmux_proto::iscsi::server::{IserTargetSession, TargetSession};
use blockmux_proto::rdma::testing::Recorder;
use blockmux_proto::rdma::{Event, RdmaSession, WorkError, WorkId, WorkRequest};
use blockmux_proto::session::{ProtocolError, Target, Timed};
use blockmux_volume::{Pool, Seg};
use blockmux_wire::iscsi::Bhs;
use blockmux_wire::iscsi::session::NopIn;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, transmute_ref};

/// Reads `data` as choices and messages.
pub(crate) fn iser_target(data: &[u8]) {
    let (mut choices, stream) = Choices::split(data);
    let exports = exports();
    let pool = Pool::new(choices.of(&[usize::MAX, 64 << 10, 128 << 10, 1 << 20]));
    let now = Instant::now();
    let session = TargetSession::new(node(&exports), 1, pool.clone(), [0; 32], now);
    let session = IserTargetSession::new(session);
    let mut run = Run {
        served: Served::open(exports, &pool, session.depth()),
        receives: u64::from(session.endpoint().receives),
        session,
        queue_pair: Recorder::default(),
        choices,
        messages: Records(&stream),
        pool,
        now,
        posted: Vec::new(),
        exp_cmd_sn: 1,
        is_over: false,
        is_leaving: false,
    };
    let private_data = vec![run.choices.byte(); run.choices.below(8)];
    run.event(Event::Requested { private_data });
    for _ in 0..MAX_TURNS {
        if !run.turn() || run.choices.are_used_up() {
            break;
        }
    }
    run.finish();
}

struct Run<'a> {
    choices: Choices<'a>,
    session: IserTargetSession,
    queue_pair: Recorder,
    served: Served,
    messages: Records<'a>,
    pool: Pool,
    now: Instant,
    /// Sends, reads and writes that are not done, and the memory that they hold.
    posted: Vec<(WorkId, WorkRequest)>,
    /// Receive buffers.
    receives: u64,
    /// As the target said it last.
    exp_cmd_sn: u32,
    /// The connection is lost, or the initiator broke the protocol.
    is_over: bool,
    /// The session has asked for its end.
    is_leaving: bool,
}

impl Run<'_> {
    /// Some of what a driver does; whether anything moved.
    fn turn(&mut self) -> bool {
        let mut moved = self.receive();
        moved |= self.served.poll_io(&mut self.session);
        moved |= self.served.complete_some(&mut self.session, &mut self.choices);
        moved |= self.post();
        if self.choices.byte() < 192 {
            moved |= self.complete_work();
        }
        match self.choices.byte() {
            255 => self.session.on_stop(Instant::now()),
            254 => self.lose(),
            _ => {}
        }
        moved | self.pass_time()
    }

    fn event(&mut self, event: Event) {
        let result = self.session.on_event(event, Instant::now());
        self.judge(result);
    }

    fn judge(&mut self, result: Result<(), ProtocolError>) {
        if let Err(error) = result {
            let text = error.to_string();
            assert!(!text.contains('\n') && !error.what.is_empty() && !error.reference.is_empty());
            self.is_over = true;
        }
    }

    /// The next message, if there is a buffer for it.
    fn receive(&mut self) -> bool {
        if self.is_over || self.receives == 0 {
            return false;
        }
        let Some(kind) = self.messages.kind() else { return false };
        let mut message = self.messages.bytes();
        if message.len() >= HEADERS {
            if kind & 1 != 0 {
                message[28 + 24..28 + 28].copy_from_slice(&self.exp_cmd_sn.to_be_bytes());
            }
            if kind & 2 != 0 {
                message[0] = 0x1c;
            }
            if kind & 4 != 0 {
                let len = u32::from_be_bytes([0, message[33], message[34], message[35]]) as usize;
                message.resize(message.len() + len.min(MAX_DATA), 7);
            }
        }
        message.truncate(self.session.endpoint().receive_len as usize);
        self.receives -= 1;
        self.event(Event::Received { message: Seg::from_slice(&message), invalidated: None });
        true
    }

    /// The next thing that the session asks, with that much room.
    fn next_work(&mut self, room: usize) -> Option<WorkRequest> {
        self.queue_pair.next(&mut self.session, room)
    }

    /// Takes the session's work.
    fn post(&mut self) -> bool {
        let room = (self.session.endpoint().sends as usize).saturating_sub(self.posted.len());
        let before = (self.posted.len(), self.receives);
        loop {
            let room = room.min(1 + self.choices.below(32));
            let Some(work) = self.next_work(room) else { break };
            match &work {
                WorkRequest::Receive => self.receives += 1,
                WorkRequest::Accept { private_data } => assert_eq!(private_data.len(), 4),
                WorkRequest::Disconnect => self.is_leaving = true,
                WorkRequest::Send { id, head, payload, .. } => {
                    let (bhs, _) = Bhs::read_from_prefix(&head[28..]).expect("messages are PDUs");
                    let len = bhs.data_segment_length.get() as usize;
                    assert!(head.len() + payload.len() >= HEADERS + len && head[0] == 0x10);
                    let common: &NopIn = transmute_ref!(&bhs);
                    self.exp_cmd_sn = common.exp_cmd_sn.get();
                    self.posted.push((*id, work));
                }
                WorkRequest::Read { id, local, remote } => {
                    assert_eq!(local.len(), remote.len as usize);
                    assert!(local.segs().iter().all(Seg::is_writable));
                    self.posted.push((*id, work));
                }
                WorkRequest::Write { id, local, remote } => {
                    assert!(local.len() <= remote.len as usize);
                    self.posted.push((*id, work));
                }
                other => panic!("a target does not post {other:?}"),
            }
        }
        assert!(self.receives <= MAX_RECEIVES, "{} receive buffers", self.receives);
        assert!(self.pool.out_bytes() <= MAX_POOLED, "{} bytes are held", self.pool.out_bytes());
        before != (self.posted.len(), self.receives)
    }

    /// One piece of work ends, well mostly.
    fn complete_work(&mut self) -> bool {
        if self.posted.is_empty() {
            return false;
        }
        let at = self.choices.below(self.posted.len().min(256));
        let (id, _) = self.posted.remove(at);
        let fails = self.choices.byte() >= 250;
        let result = if fails { Err(WorkError::RemoteAccess) } else { Ok(()) };
        self.event(Event::Done { id, result });
        if fails {
            self.lose();
        }
        true
    }

    /// The connection is lost.
    fn lose(&mut self) {
        self.is_over = true;
        self.queue_pair.works.clear();
        for (id, _) in std::mem::take(&mut self.posted) {
            self.event(Event::Done { id, result: Err(WorkError::Flushed) });
        }
        self.event(Event::Disconnected);
        assert!(self.session.is_over() && self.next_work(100).is_none());
    }

    /// Moves the clock to the session's next deadline if that is near: not to that of the login, or
    /// of a ping.
    fn pass_time(&mut self) -> bool {
        match self.session.poll_timeout() {
            Some(when) if !self.is_over && when < self.now + Duration::from_secs(10) => {
                self.now = when.max(self.now);
                let result = self.session.on_timeout(self.now);
                self.judge(result);
                false
            }
            _ => false,
        }
    }

    /// Lets everything that began come to its end.
    fn finish(mut self) {
        for _ in 0..MAX_TURNS {
            let mut moved = self.receive() | self.served.poll_io(&mut self.session);
            self.served.complete_all(&mut self.session, &mut self.choices);
            moved |= !self.session.is_over() && self.post() | self.complete_work();
            self.pass_time();
            if !moved {
                break;
            }
        }
        if !self.session.is_over() {
            self.lose();
        }
        self.served.poll_io(&mut self.session);
        self.served.complete_all(&mut self.session, &mut self.choices);
        drop(self.session);
        drop(self.posted);
        assert_eq!(self.pool.out_bytes(), 0, "memory is lost");
    }
}

/// Of iSER and of iSCSI, in bytes.
const HEADERS: usize = 28 + 48;
/// With one message, in bytes.
const MAX_DATA: usize = 8192;
/// What the session has at first, and what unasked-for data may add.
const MAX_RECEIVES: u64 = 560 + 31 * 256;
/// In bytes: the data-out in flight that the session promises, rounded up to whole buffers.
const MAX_POOLED: usize = 256 << 20;
const MAX_TURNS: usize = 1000;
