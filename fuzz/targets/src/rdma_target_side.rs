//! Driver of a target session over a queue pair with a hostile peer, and with volumes that fail
//! when the input requests it. Each protocol checks what its session sends.
//!
//! ```text
//!   stream = record ...      record = kind, length (2), bytes      a message
//! ```

use crate::choices::Choices;
use crate::records::Records;
use crate::served::Served;
use blockmux_proto::driver::session::ProtocolError;
use blockmux_proto::driver::target::{IoSource, TargetLifecycle};
use blockmux_proto::exports::Exports;
use blockmux_proto::rdma::testing::Recorder;
use blockmux_proto::rdma::{Event, RdmaSession, WorkError, WorkId, WorkRequest};
use blockmux_volume::{Pool, Seg, SgList};
use std::time::{Duration, Instant};

/// The checks of a protocol for its target.
pub(crate) trait RdmaProtocolChecks {
    /// The clock is advanced to deadlines within this time only.
    const NEAR: Duration;
    /// The maximum number of posted receive buffers.
    const MAX_RECEIVES: u64;
    /// The session's documented maximum data in flight, rounded up to whole buffers, in bytes.
    const MAX_POOLED: usize;

    /// Builds the message of a record, as valid as its kind requests.
    fn message(&mut self, kind: u8, bytes: Vec<u8>) -> Vec<u8>;

    /// Checks the private data with which the session accepts the connection.
    fn on_accept(&mut self, private_data: &[u8]);

    /// Checks a message of the session.
    fn on_send(&mut self, head: &[u8], payload: &SgList);
}

/// A session with its driver and volumes.
pub(crate) struct RdmaRun<'a, S, J> {
    choices: Choices<'a>,
    session: S,
    checks: J,
    queue_pair: Recorder,
    served: Served,
    messages: Records<'a>,
    pool: Pool,
    now: Instant,
    /// Sends, reads and writes in flight, with the memory that they hold.
    posted: Vec<(WorkId, WorkRequest)>,
    /// Number of posted receive buffers.
    receives: u64,
    /// Whether the connection is lost, or the initiator violated the protocol.
    is_over: bool,
    is_lost: bool,
}

impl<'a, S: RdmaSession + IoSource + TargetLifecycle, J: RdmaProtocolChecks> RdmaRun<'a, S, J> {
    /// Drives a session whose peer connects with `private_data` and sends the messages of `stream`.
    pub(crate) fn drive(
        (choices, stream): (Choices<'a>, &'a [u8]),
        (session, exports): (S, Exports),
        checks: J,
        private_data: Vec<u8>,
        (pool, now): (Pool, Instant),
    ) {
        let mut run = RdmaRun {
            served: Served::open(exports, &pool, session.depth()),
            receives: u64::from(session.endpoint().receives),
            choices,
            session,
            checks,
            queue_pair: Recorder::default(),
            messages: Records(stream),
            pool,
            now,
            posted: Vec::new(),
            is_over: false,
            is_lost: false,
        };
        run.event(Event::Requested { private_data, reads: 32 });
        for _ in 0..MAX_TURNS {
            if !run.turn() || run.choices.are_used_up() {
                break;
            }
        }
        run.finish();
    }

    /// Runs one turn of the driver; returns whether there was progress.
    fn turn(&mut self) -> bool {
        self.session.on_turn(Instant::now());
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
        self.check(result);
    }

    fn check(&mut self, result: Result<(), ProtocolError>) {
        if let Err(error) = result {
            let text = error.to_string();
            assert!(!text.contains('\n') && !error.what.is_empty() && !error.reference.is_empty());
            self.is_over = true;
        }
    }

    /// Delivers the next message, if a receive buffer is posted.
    fn receive(&mut self) -> bool {
        if self.is_over || self.receives == 0 {
            return false;
        }
        let Some(kind) = self.messages.kind() else { return false };
        let mut message = self.checks.message(kind, self.messages.bytes());
        message.truncate(self.session.endpoint().receive_len as usize);
        self.receives -= 1;
        self.event(Event::Received { message: Seg::from_slice(&message), invalidated: None, written: None });
        true
    }

    /// The session's next work request, given `room`.
    fn next_work(&mut self, room: usize) -> Option<WorkRequest> {
        self.queue_pair.next(&mut self.session, room)
    }

    /// Takes the session's work requests.
    fn post(&mut self) -> bool {
        let room = (self.session.endpoint().sends as usize).saturating_sub(self.posted.len());
        let before = (self.posted.len(), self.receives);
        loop {
            let room = room.min(1 + self.choices.below(32));
            let Some(work) = self.next_work(room) else { break };
            match &work {
                WorkRequest::Receive => self.receives += 1,
                WorkRequest::Accept { private_data } => {
                    self.checks.on_accept(private_data);
                    self.event(Event::Connected { private_data: Vec::new() });
                }
                WorkRequest::Reject { .. } => self.is_over = true,
                WorkRequest::Disconnect => {}
                WorkRequest::Send { id, head, payload, .. } => {
                    self.checks.on_send(head, payload);
                    self.posted.push((*id, work));
                }
                WorkRequest::Read { id, local, remote } => {
                    assert_eq!(local.len(), remote.len as usize);
                    assert!(local.is_writable());
                    self.posted.push((*id, work));
                }
                WorkRequest::Write { id, local, remote } => {
                    assert!(local.len() <= remote.len as usize);
                    self.posted.push((*id, work));
                }
                other => panic!("a target does not post {other:?}"),
            }
        }
        assert!(self.receives <= J::MAX_RECEIVES, "{} receive buffers", self.receives);
        assert!(self.pool.out_bytes() <= J::MAX_POOLED, "{} bytes are held", self.pool.out_bytes());
        before != (self.posted.len(), self.receives)
    }

    /// Completes one work request, usually with success.
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

    /// Ends the connection.
    fn lose(&mut self) {
        (self.is_over, self.is_lost) = (true, true);
        self.queue_pair.works.clear();
        for (id, _) in std::mem::take(&mut self.posted) {
            self.event(Event::Done { id, result: Err(WorkError::Flushed) });
        }
        self.event(Event::Disconnected);
        assert!(self.next_work(100).is_none());
    }

    /// Moves the clock to the session's next deadline if that is near.
    fn pass_time(&mut self) -> bool {
        match self.session.poll_timeout() {
            Some(when) if !self.is_over && when < self.now + J::NEAR => {
                self.now = when.max(self.now);
                let result = self.session.on_timeout(self.now);
                self.check(result);
                false
            }
            _ => false,
        }
    }

    /// Completes everything in flight.
    fn finish(mut self) {
        for _ in 0..MAX_TURNS {
            self.session.on_turn(Instant::now());
            let mut moved = self.receive() | self.served.poll_io(&mut self.session);
            self.served.complete_all(&mut self.session, &mut self.choices);
            moved |= !self.is_lost && self.post() | self.complete_work();
            self.pass_time();
            if !moved {
                break;
            }
        }
        if !self.is_lost {
            self.lose();
        }
        self.served.poll_io(&mut self.session);
        self.served.complete_all(&mut self.session, &mut self.choices);
        drop(self.session);
        drop(self.posted);
        assert_eq!(self.pool.out_bytes(), 0, "the pool has lost memory");
    }
}

const MAX_TURNS: usize = 1000;
