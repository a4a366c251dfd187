//! A session joined with its queue pair, which the engine drives as one.
//!
//! Over a provider that is itself a stream session, such as software iWARP, [`Driven`] is a stream
//! session too, and a target or an initiator if its session is one. So the engine's tasks drive
//! iSER over TCP as they drive iSCSI.
//!
//! The session posts work after bytes were received, and whenever the driver requests the outbox.
//! So the work of one turn is sent together, and work that waited for room in the queue pair
//! follows as soon as there is room. The driver requests the outbox often; if neither the session
//! nor the outbox has changed since the last time, the session is not called.
//!
//! An initiator's session may have several connections. Each is a `DrivenEnd` with its own queue
//! pair, created when the driver has connected it.

mod end;

use crate::queue_pair::Provider;
use blockmux_proto::driver::audit_event::AuditEvent;
use blockmux_proto::driver::outbox::Outbox;
use blockmux_proto::driver::session::{
    Connections, Control, Demand, Initiator, Overdue, PathRank, ProtocolError, StreamConnections,
    StreamSession, Timed,
};
use blockmux_proto::driver::target::{SessionStage, TargetLifecycle};
use blockmux_proto::driver::transport::TransportInfo;
use blockmux_proto::rdma::{Endpoint, RdmaConnections, RdmaSession};
use blockmux_volume::{Chunk, Completion, Io, Waker};
use end::{DrivenEnd, DriverCalls};
use std::time::{Duration, Instant};

/// A session over one queue pair or several.
pub struct Driven<Q, S> {
    first: DrivenEnd<Q>,
    /// The connections after the first, by connection number minus one.
    further: Vec<Option<Box<DrivenEnd<Q>>>>,
    session: S,
    connect: Option<Box<OpenQueuePair<Q>>>,
    calls: DriverCalls,
}

/// Creates the queue pair of a further connection, to the same address as the first.
type OpenQueuePair<Q> = dyn FnMut(&Endpoint, &TransportInfo, Instant) -> Q;

impl<Q: Provider, S> Driven<Q, S> {
    /// Joins `session` with the queue pair of its first connection.
    pub fn new(session: S, queue_pair: Q, now: Instant) -> Driven<Q, S> {
        let first = DrivenEnd::new(queue_pair);
        Driven { first, further: Vec::new(), session, connect: None, calls: DriverCalls { changes: 0, now } }
    }

    /// Allows several connections: `connect` creates the queue pair of each connection after the
    /// first.
    #[must_use]
    pub fn with_further(
        mut self,
        connect: impl FnMut(&Endpoint, &TransportInfo, Instant) -> Q + 'static,
    ) -> Driven<Q, S> {
        self.connect = Some(Box::new(connect));
        self
    }

    /// The session.
    #[inline]
    pub fn session(&self) -> &S {
        &self.session
    }

    /// The session, to be changed. The driver's next [`StreamSession::outbox`] takes the work that
    /// follows from it.
    #[inline]
    pub fn session_mut(&mut self) -> &mut S {
        self.calls.changes = self.calls.changes.wrapping_add(1);
        &mut self.session
    }

    /// The first queue pair.
    #[inline]
    pub fn queue_pair(&self) -> &Q {
        &self.first.queue_pair
    }

    /// The peer's protocol violation for which the session ended the first connection.
    pub fn broken(&self) -> Option<ProtocolError> {
        self.first.broken
    }

    /// Counts a change if the session returned something, because it may then have room for new
    /// work.
    #[inline]
    fn changed_by<T>(&mut self, given: Option<T>) -> Option<T> {
        self.calls.changes = self.calls.changes.wrapping_add(given.is_some().into());
        given
    }
}

impl<Q: Provider, S: RdmaSession> Driven<Q, S> {
    /// Passes events to the session and posts its work until nothing is left to do; returns whether
    /// there was anything.
    #[inline]
    pub fn pump(&mut self) -> bool {
        self.first.pump(&mut self.session, &mut self.calls)
    }
}

/// The calls of a stream's driver for a session that is joined with an end of a connection.
/// [`Driven`] owns that end, and [`DrivenConnection`] borrows it.
macro_rules! stream_of_end {
    ($driven:ty, $driver:ident: $end:expr, $calls:expr) => {
        impl<Q: Provider, S: RdmaSession> Timed for $driven {
            #[inline]
            fn poll_timeout(&$driver) -> Option<Instant> {
                $end.poll_timeout(&$driver.session)
            }

            fn on_timeout(&mut $driver, now: Instant) -> Result<(), ProtocolError> {
                $end.on_timeout(&mut $driver.session, $calls, now)
            }

            #[inline]
            fn on_send(&mut $driver, now: impl FnOnce() -> Instant) {
                $end.queue_pair.on_send(now);
            }
        }

        impl<Q: Provider + StreamSession, S: RdmaSession> StreamSession for $driven {
            #[inline]
            fn demand(&$driver) -> Demand {
                $end.queue_pair.demand()
            }

            #[inline]
            fn on_bytes(&mut $driver, input: &Chunk, now: Instant) -> Result<usize, ProtocolError> {
                $driver.calls.now = now;
                let taken = $end.queue_pair.on_bytes(input, now);
                $end.settle(&mut $driver.session, $calls, taken)
            }

            #[inline]
            fn on_placed(&mut $driver, now: Instant) -> Result<(), ProtocolError> {
                $driver.calls.now = now;
                let taken = $end.queue_pair.on_placed(now);
                $end.settle(&mut $driver.session, $calls, taken)
            }

            #[inline]
            fn is_mostly_placed(&$driver) -> bool {
                $end.queue_pair.is_mostly_placed()
            }

            fn on_end(&mut $driver, now: Instant) -> Result<(), ProtocolError> {
                $driver.calls.now = now;
                let ended = $end.queue_pair.on_end(now);
                $end.settle(&mut $driver.session, $calls, ended)
            }

            #[inline]
            fn outbox(&mut $driver) -> &mut Outbox {
                $end.outbox(&mut $driver.session, $calls)
            }
        }
    };
}

stream_of_end!(Driven<Q, S>, self: self.first, &mut self.calls);
stream_of_end!(DrivenConnection<'_, Q, S>, self: self.end, self.calls);

impl<Q: Provider, S: RdmaSession + TargetLifecycle> TargetLifecycle for Driven<Q, S> {
    type Source = S::Source;

    #[inline]
    fn source(&mut self) -> &mut S::Source {
        self.session_mut().source()
    }

    fn protocol(&self) -> Option<&'static str> {
        self.session.protocol()
    }

    fn on_start(&mut self, waker: &Waker, now: Instant) {
        self.session_mut().on_start(waker, now);
    }

    #[inline]
    fn on_turn(&mut self, now: Instant) {
        self.calls.now = now;
        self.session_mut().on_turn(now);
    }

    #[inline]
    fn poll_event(&mut self) -> Option<AuditEvent> {
        self.session.poll_event()
    }

    fn owed(&self) -> Option<u64> {
        self.session.owed()
    }

    #[inline]
    fn stage(&self) -> SessionStage {
        self.session.stage()
    }

    fn on_stop(&mut self, now: Instant) {
        self.session_mut().on_stop(now);
    }
}

impl<Q: Provider, S: RdmaSession + Control> Control for Driven<Q, S> {
    fn is_ready(&self) -> bool {
        self.session.is_ready()
    }

    fn poll_size(&mut self) -> Option<u64> {
        let size = self.session.poll_size();
        self.changed_by(size)
    }

    fn poll_path_rank(&mut self) -> Option<PathRank> {
        let rank = self.session.poll_path_rank();
        self.changed_by(rank)
    }

    fn query_path_rank(&mut self) {
        self.session_mut().query_path_rank();
    }

    fn on_stop(&mut self) {
        self.session_mut().on_stop();
    }
}

impl<Q: Provider, S: Initiator> Initiator for Driven<Q, S> {
    #[inline]
    fn is_ready(&self) -> bool {
        self.session.is_ready()
    }

    #[inline]
    fn room(&self) -> usize {
        self.session.room()
    }

    #[inline]
    fn submit(&mut self, io: Io) {
        self.session_mut().submit(io);
    }

    #[inline]
    fn poll_done(&mut self) -> Option<Completion> {
        let done = self.session.poll_done();
        self.changed_by(done)
    }

    #[inline]
    fn poll_returned(&mut self) -> Option<Io> {
        let io = self.session.poll_returned();
        self.changed_by(io)
    }

    fn take_unfinished(&mut self) -> Vec<Io> {
        self.session_mut().take_unfinished()
    }

    fn poll_size(&mut self) -> Option<u64> {
        let size = self.session.poll_size();
        self.changed_by(size)
    }

    fn resize(&mut self, size: u64) {
        self.session_mut().resize(size);
    }

    #[inline]
    fn path_rank(&self) -> PathRank {
        self.session.path_rank()
    }

    fn on_stop(&mut self) {
        self.session_mut().on_stop();
    }
}

impl<Q: Provider, S: Overdue> Overdue for Driven<Q, S> {
    fn tick(&mut self) -> u32 {
        self.session.tick()
    }

    fn abort_overdue(&mut self, ticks: u32) -> Option<&'static str> {
        self.session_mut().abort_overdue(ticks)
    }
}

impl<Q: Provider, S: RdmaConnections> Connections for Driven<Q, S> {
    #[inline]
    fn poll_connect(&mut self) -> Option<(usize, Instant)> {
        self.connect.as_ref()?;
        self.session.poll_connect()
    }

    fn on_connected(&mut self, connection: usize, transport: &TransportInfo, now: Instant) {
        let (Some(connect), Some(place)) = (&mut self.connect, connection.checked_sub(1)) else { return };
        let endpoint = self.session.connection(connection).endpoint();
        let end = DrivenEnd::new(connect(&endpoint, transport, now));
        self.further.resize_with(self.further.len().max(connection), || None);
        if let Some(slot) = self.further.get_mut(place) {
            *slot = Some(Box::new(end));
        }
        self.session_mut().on_connected(connection, transport, now);
    }

    fn on_lost(&mut self, connection: usize, now: Instant) -> bool {
        // Dropping the queue pair invalidates all memory that the peer could access.
        if let Some(slot) = connection.checked_sub(1).and_then(|place| self.further.get_mut(place)) {
            *slot = None;
        }
        self.session_mut().on_lost(connection, now)
    }

    #[inline]
    fn latest(&self) -> usize {
        self.session.latest()
    }

    #[inline]
    fn is_awaited(&self, connection: usize) -> bool {
        self.session.is_awaited(connection)
    }

    fn reconnects_after(&self) -> Duration {
        self.session.reconnects_after()
    }
}

impl<Q: Provider + StreamSession, S: RdmaConnections> StreamConnections for Driven<Q, S> {
    #[inline]
    fn connection(&mut self, connection: usize) -> impl StreamSession {
        self.driven(connection)
    }
}

impl<Q: Provider, S: RdmaConnections> Driven<Q, S> {
    /// The connection with this number, or the first if there is none.
    #[inline]
    fn driven(&mut self, connection: usize) -> DrivenConnection<'_, Q, impl RdmaSession> {
        let further = connection.checked_sub(1).and_then(|place| self.further.get_mut(place)?.as_deref_mut());
        let (end, connection) = further.map_or((&mut self.first, 0), |end| (end, connection));
        DrivenConnection { end, session: self.session.connection(connection), calls: &mut self.calls }
    }

    /// [`Driven::pump`] for one connection.
    pub fn pump_connection(&mut self, connection: usize) -> bool {
        let DrivenConnection { end, mut session, calls } = self.driven(connection);
        end.pump(&mut session, calls)
    }
}

/// One connection of an initiator's session.
struct DrivenConnection<'a, Q, S> {
    end: &'a mut DrivenEnd<Q>,
    /// The session's view of this connection.
    session: S,
    calls: &'a mut DriverCalls,
}

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]
mod tests {
    use super::*;
    use crate::loopback::{self, Loopback};
    use blockmux_proto::rdma::{
        Event, MessageHead, QueuePair, Remote, RemoteRights, WorkError, WorkId, WorkRequest,
    };
    use blockmux_volume::{Seg, SgList};

    /// A session that asks its peer to fill a buffer, and fills buffers for its peer.
    #[derive(Default)]
    struct Filler {
        is_active: bool,
        /// Number of requests to send.
        asks: u32,
        work: Vec<WorkRequest>,
        memory: SgList,
        answers: u32,
        /// Messages from the peer that were not valid.
        gibberish: u32,
        flushed: u32,
        is_over: bool,
    }

    impl Filler {
        fn ask(&mut self) {
            self.memory = SgList::one(Seg::from_slice(&[0; 8]));
            let (id, local) = (WorkId(0), self.memory.clone());
            self.work.push(WorkRequest::Register { id, local, access: RemoteRights::RemoteWrite });
        }

        fn send(&mut self, bytes: &[u8], invalidate: Option<blockmux_proto::rdma::Stag>) {
            let (id, head) = (WorkId(1), MessageHead::from_slice(bytes));
            let payload = SgList::default();
            self.work.push(WorkRequest::Send { id, head, payload, invalidate, is_solicited: false });
        }

        fn answer(&mut self, message: &[u8]) -> Result<(), ProtocolError> {
            let stag = message.get(..4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_be_bytes);
            let address = message.get(4..12).and_then(|bytes| bytes.try_into().ok()).map(u64::from_be_bytes);
            let (Some(stag), Some(address)) = (stag, address) else { return Err(GIBBERISH) };
            let remote = Remote { stag: blockmux_proto::rdma::Stag(stag), address, len: 8 };
            let local = SgList::one(Seg::from_slice(b"filled!!"));
            self.work.push(WorkRequest::Write { id: WorkId(2), local, remote });
            self.send(b"", Some(remote.stag));
            self.work.push(WorkRequest::Receive);
            Ok(())
        }
    }

    impl Timed for Filler {}

    impl RdmaSession for Filler {
        fn endpoint(&self) -> Endpoint {
            Endpoint {
                receives: 1,
                receive_len: 16,
                sends: 2,
                reads: 0,
                regions: 1,
                private_data: Vec::new(),
                without_invalidation: None,
            }
        }

        fn on_event(&mut self, event: Event, _now: Instant) -> Result<(), ProtocolError> {
            match event {
                Event::Requested { .. } => self.work.push(WorkRequest::Accept { private_data: Vec::new() }),
                Event::Connected { .. } if self.is_active => self.ask(),
                Event::Registered { remote, .. } => {
                    let mut message = remote.stag.0.to_be_bytes().to_vec();
                    message.extend(remote.address.to_be_bytes());
                    self.send(&message, None);
                }
                Event::Received { message, invalidated: Some(_), .. } if message.is_empty() => {
                    assert_eq!(self.memory.to_vec(), b"filled!!");
                    self.answers += 1;
                    self.work.push(WorkRequest::Receive);
                    match self.asks == self.answers {
                        true => self.work.push(WorkRequest::Disconnect),
                        false => self.ask(),
                    }
                }
                Event::Received { message, .. } => {
                    return self.answer(&message.to_vec()).inspect_err(|_| self.gibberish += 1);
                }
                Event::Done { result: Err(WorkError::Flushed), .. } => self.flushed += 1,
                Event::Disconnected => self.is_over = true,
                _ => {}
            }
            Ok(())
        }

        fn work(&mut self, queue_pair: &mut impl QueuePair) -> bool {
            let before = self.work.len();
            while let Some(work) = self.work.first()
                && (queue_pair.room() > 0
                    || !matches!(work, WorkRequest::Send { .. } | WorkRequest::Write { .. }))
            {
                queue_pair.post(self.work.remove(0));
            }
            self.work.len() < before
        }
    }

    type FillerEnd = Driven<Loopback, Filler>;

    fn pair(asks: u32) -> (FillerEnd, FillerEnd) {
        let session = || Filler { asks, ..Filler::default() };
        let (active, passive) = loopback::pair(&session().endpoint(), &session().endpoint(), [1; 32]);
        let first = Driven::new(Filler { is_active: true, ..session() }, active, Instant::now());
        (first, Driven::new(session(), passive, Instant::now()))
    }

    const GIBBERISH: ProtocolError = ProtocolError { what: "sent gibberish", reference: "the test" };

    #[test]
    fn two_sessions_exchange_messages_until_one_disconnects() {
        let (mut active, mut passive) = pair(10);
        while active.pump() | passive.pump() {}
        assert_eq!((active.session().answers, active.session().is_over), (10, true));
        assert!(passive.session().is_over && passive.broken().is_none());
    }

    /// Others received on after a fatal error (CVE-2026-52989), or processed what came after the
    /// error of a queue pair (CVE-2026-93107).
    #[test]
    fn after_a_protocol_violation_no_message_is_taken_and_all_work_completes() {
        let (mut active, mut passive) = pair(1000);
        passive.session_mut().work.push(WorkRequest::Receive);
        while active.session().answers < 5 {
            active.pump();
            passive.pump();
        }
        active.session_mut().work.clear();
        active.session_mut().send(b"what?", None);
        active.session_mut().send(b"what?", None);
        while active.pump() | passive.pump() {}
        assert_eq!((passive.broken(), passive.session().gibberish), (Some(GIBBERISH), 1));
        assert!(active.session().is_over && passive.session().is_over);
        assert!(active.broken().is_none());
    }

    #[test]
    fn a_connection_lost_at_any_point_ends_on_both_sides() {
        // Two packets to connect, and three for each request.
        for pieces in 0..32 {
            let (mut active, mut passive) = pair(10);
            active.queue_pair().break_after(pieces);
            while active.pump() | passive.pump() {}
            assert!(active.session().is_over && passive.session().is_over, "after {pieces}");
            assert!(active.session().answers < 10 && active.broken().or(passive.broken()).is_none());
        }
    }
}
