//! A session and its queue pair, joined: together they are what the engine drives.
//!
//! Over a provider that is a stream session below, such as software iWARP, [`Driven`] is a stream session too, and a
//! target or an initiator if its session is. So the engine's tasks drive iSER over TCP as they drive iSCSI.
//!
//! Work is fetched when bytes have come, and whenever the driver looks at what there is to send: all that one turn
//! brought goes out together, and what became possible by sending goes at once.

use crate::queue_pair::QueuePair;
use blockmux_proto::exports::VolumeId;
use blockmux_proto::outbox::Outbox;
use blockmux_proto::rdma::{Endpoint, Event, RdmaSession, Work};
use blockmux_proto::session::{
    Demand, Home, Initiator, PathRank, ProtocolError, StreamSession, Target, Timed,
};
use blockmux_volume::{Chunk, Completion, Io, Tag, Waker};
use std::time::Instant;

/// A session over a queue pair.
pub struct Driven<Q, S> {
    queue_pair: Q,
    session: S,
    /// What the peer did wrong by the session's rules. It was disconnected for that.
    broken: Option<ProtocolError>,
    /// `broken` has been told to the driver.
    is_told: bool,
    /// How much there was to send when nothing moved any more; `None` if something may move again. The driver looks often
    /// at what there is to send, and mostly nothing has changed since.
    settled: Option<usize>,
}

impl<Q: QueuePair, S: RdmaSession> Driven<Q, S> {
    /// Joins `session` with the queue pair that `connect` makes for it.
    pub fn new(session: S, connect: impl FnOnce(&Endpoint) -> Q) -> Driven<Q, S> {
        let queue_pair = connect(&session.endpoint());
        Driven { queue_pair, session, broken: None, is_told: false, settled: None }
    }

    /// The session.
    #[inline]
    pub fn session(&self) -> &S {
        &self.session
    }

    /// The session, to hand something in; [`Driven::pump`] takes what it then wants.
    #[inline]
    pub fn session_mut(&mut self) -> &mut S {
        self.settled = None;
        &mut self.session
    }

    /// The queue pair.
    #[inline]
    pub fn queue_pair(&self) -> &Q {
        &self.queue_pair
    }

    /// The queue pair, to be tuned.
    #[inline]
    pub fn queue_pair_mut(&mut self) -> &mut Q {
        self.settled = None;
        &mut self.queue_pair
    }

    /// Why the session has ended the connection, if it was the peer's fault.
    pub fn broken(&self) -> Option<ProtocolError> {
        self.broken
    }

    /// Hands in events and posts work until there is neither; whether there was any.
    ///
    /// That ends: what comes from the peer has come before, and what work leads to by itself is bounded by the endpoint.
    #[inline]
    pub fn pump(&mut self) -> bool {
        let mut has_moved = false;
        loop {
            let mut moves = false;
            while let Some(event) = self.queue_pair.poll() {
                moves = true;
                self.hand_in(event);
            }
            while self.broken.is_none()
                && let Some(work) = self.session.poll_work(self.queue_pair.room())
            {
                moves = true;
                self.queue_pair.post(work);
            }
            if !moves {
                return has_moved;
            }
            has_moved = true;
        }
    }

    #[inline]
    fn hand_in(&mut self, event: Event) {
        // A peer that is being left is not listened to; what it holds comes back all the same.
        if self.broken.is_some() && matches!(event, Event::Received { .. }) {
            return;
        }
        if let Err(error) = self.session.on_event(event)
            && self.broken.is_none()
        {
            self.part(error);
        }
    }

    /// Has the session's last words sent, and leaves.
    #[cold]
    fn part(&mut self, error: ProtocolError) {
        self.broken = Some(error);
        while let Some(work) = self.session.poll_work(self.queue_pair.room()) {
            self.queue_pair.post(work);
        }
        self.queue_pair.post(Work::Disconnect);
    }

    /// The session gave something away, and may have room now for something else.
    #[inline]
    fn unsettle_if(&mut self, has_given: bool) {
        if has_given {
            self.settled = None;
        }
    }

    /// Pumps after the queue pair took something, and says once what the peer did wrong.
    #[inline]
    fn settle<T>(&mut self, taken: Result<T, ProtocolError>) -> Result<T, ProtocolError> {
        self.settled = None;
        self.pump();
        match self.broken {
            Some(error) if !self.is_told => {
                self.is_told = true;
                Err(error)
            }
            _ => taken,
        }
    }
}

impl<Q: QueuePair, S: RdmaSession> Timed for Driven<Q, S> {
    #[inline]
    fn poll_timeout(&self) -> Option<Instant> {
        match (self.queue_pair.poll_timeout(), self.session.poll_timeout()) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        }
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        let is_due = |when: Option<Instant>| when.is_some_and(|when| when <= now);
        let mut result = Ok(());
        if is_due(self.queue_pair.poll_timeout()) {
            result = self.queue_pair.on_timeout(now);
        }
        if is_due(self.session.poll_timeout())
            && let Err(error) = self.session.on_timeout(now)
            && self.broken.is_none()
        {
            self.part(error);
        }
        self.settle(result)
    }
}

impl<Q: QueuePair + StreamSession, S: RdmaSession> StreamSession for Driven<Q, S> {
    #[inline]
    fn demand(&self) -> Demand {
        self.queue_pair.demand()
    }

    #[inline]
    fn on_bytes(&mut self, input: &Chunk) -> Result<usize, ProtocolError> {
        let taken = self.queue_pair.on_bytes(input);
        self.settle(taken)
    }

    #[inline]
    fn on_placed(&mut self) -> Result<(), ProtocolError> {
        let taken = self.queue_pair.on_placed();
        self.settle(taken)
    }

    fn on_end(&mut self) -> Result<(), ProtocolError> {
        let ended = self.queue_pair.on_end();
        self.settle(ended)
    }

    #[inline]
    fn outbox(&mut self) -> &mut Outbox {
        // What was sent meanwhile has made room.
        if self.settled != Some(self.queue_pair.outbox().len()) {
            self.pump();
            self.settled = Some(self.queue_pair.outbox().len());
        }
        self.queue_pair.outbox()
    }
}

impl<Q: QueuePair, S: RdmaSession + Target> Target for Driven<Q, S> {
    fn depth(&self) -> u32 {
        self.session.depth()
    }

    #[inline]
    fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
        let io = self.session.poll_io();
        self.unsettle_if(io.is_some());
        io
    }

    #[inline]
    fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
        let cancelled = self.session.poll_cancel();
        self.unsettle_if(cancelled.is_some());
        cancelled
    }

    #[inline]
    fn on_io(&mut self, done: Completion) {
        self.session_mut().on_io(done);
    }

    fn on_start(&mut self, waker: &Waker) {
        self.session_mut().on_start(waker);
    }

    #[inline]
    fn on_turn(&mut self) {
        self.session_mut().on_turn();
    }

    fn moves_to(&self) -> Option<Home> {
        self.session.moves_to()
    }

    fn owed(&self) -> Option<u64> {
        self.session.owed()
    }

    #[inline]
    fn is_established(&self) -> bool {
        self.session.is_established()
    }

    fn lingers(&self) -> bool {
        self.session.lingers()
    }

    fn on_stop(&mut self) {
        self.session_mut().on_stop();
    }
}

impl<Q: QueuePair, S: RdmaSession + Initiator> Initiator for Driven<Q, S> {
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
        self.unsettle_if(done.is_some());
        done
    }

    fn poll_size(&mut self) -> Option<u64> {
        let size = self.session.poll_size();
        self.unsettle_if(size.is_some());
        size
    }

    fn resize(&mut self, size: u64) {
        self.session_mut().resize(size);
    }

    fn take_unfinished(&mut self) -> Vec<Io> {
        self.session_mut().take_unfinished()
    }

    #[inline]
    fn path_rank(&self) -> PathRank {
        self.session.path_rank()
    }

    #[inline]
    fn poll_misplaced(&mut self) -> Option<Io> {
        let io = self.session.poll_misplaced();
        self.unsettle_if(io.is_some());
        io
    }

    fn on_stop(&mut self) {
        self.session_mut().on_stop();
    }
}

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]
mod tests {
    use super::*;
    use crate::loopback::{self, Loopback};
    use blockmux_proto::rdma::{Access, Head, Remote, WorkError, WorkId};
    use blockmux_volume::{Seg, SgList};

    /// Asks by a message for its memory to be filled, and answers such messages.
    #[derive(Default)]
    struct Filler {
        is_active: bool,
        /// Asks for so many.
        asks: u32,
        work: Vec<Work>,
        memory: SgList,
        answers: u32,
        flushed: u32,
        is_over: bool,
    }

    impl Filler {
        fn ask(&mut self) {
            self.memory = SgList::one(Seg::from_slice(&[0; 8]));
            let (id, local) = (WorkId(0), self.memory.clone());
            self.work.push(Work::Register { id, local, access: Access::RemoteWrite });
        }

        fn send(&mut self, bytes: &[u8], invalidate: Option<blockmux_proto::rdma::Stag>) {
            let (id, head) = (WorkId(1), Head::from_slice(bytes));
            let payload = SgList::default();
            self.work.push(Work::Send { id, head, payload, invalidate, is_solicited: false });
        }

        fn answer(&mut self, message: &[u8]) -> Result<(), ProtocolError> {
            let stag = message.get(..4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_be_bytes);
            let address = message.get(4..12).and_then(|bytes| bytes.try_into().ok()).map(u64::from_be_bytes);
            let (Some(stag), Some(address)) = (stag, address) else { return Err(GIBBERISH) };
            let remote = Remote { stag: blockmux_proto::rdma::Stag(stag), address, len: 8 };
            let local = SgList::one(Seg::from_slice(b"filled!!"));
            self.work.push(Work::Write { id: WorkId(2), local, remote });
            self.send(b"", Some(remote.stag));
            self.work.push(Work::Receive);
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
            }
        }

        fn on_event(&mut self, event: Event) -> Result<(), ProtocolError> {
            match event {
                Event::Requested { .. } => self.work.push(Work::Accept { private_data: Vec::new() }),
                Event::Connected { .. } if self.is_active => self.ask(),
                Event::Registered { remote, .. } => {
                    let mut message = remote.stag.0.to_be_bytes().to_vec();
                    message.extend(remote.address.to_be_bytes());
                    self.send(&message, None);
                }
                Event::Received { message, invalidated: Some(_) } if message.is_empty() => {
                    assert_eq!(self.memory.to_vec(), b"filled!!");
                    self.answers += 1;
                    self.work.push(Work::Receive);
                    match self.asks == self.answers {
                        true => self.work.push(Work::Disconnect),
                        false => self.ask(),
                    }
                }
                Event::Received { message, .. } => return self.answer(&message.to_vec()),
                Event::Done { result: Err(WorkError::Flushed), .. } => self.flushed += 1,
                Event::Disconnected => self.is_over = true,
                _ => {}
            }
            Ok(())
        }

        fn poll_work(&mut self, room: usize) -> Option<Work> {
            let needs_room = matches!(self.work.first()?, Work::Send { .. } | Work::Write { .. });
            (!needs_room || room > 0).then(|| self.work.remove(0))
        }
    }

    type End = Driven<Loopback, Filler>;

    fn pair(asks: u32) -> (End, End) {
        let session = || Filler { asks, ..Filler::default() };
        let (active, passive) = loopback::pair(&session().endpoint(), &session().endpoint(), [1; 32]);
        let first = Driven::new(Filler { is_active: true, ..session() }, |_| active);
        (first, Driven::new(session(), |_| passive))
    }

    const GIBBERISH: ProtocolError = ProtocolError { what: "sent gibberish", reference: "the test" };

    #[test]
    fn two_sessions_talk_until_one_of_them_leaves() {
        let (mut active, mut passive) = pair(10);
        while active.pump() | passive.pump() {}
        assert_eq!((active.session().answers, active.session().is_over), (10, true));
        assert!(passive.session().is_over && passive.broken().is_none());
    }

    #[test]
    fn a_session_that_is_told_gibberish_ends_the_connection_and_still_gets_its_work_back() {
        let (mut active, mut passive) = pair(1000);
        while active.session().answers < 5 {
            active.pump();
            passive.pump();
        }
        active.session_mut().work.clear();
        active.session_mut().send(b"what?", None);
        active.session_mut().send(b"what?", None);
        while active.pump() | passive.pump() {}
        assert_eq!(passive.broken(), Some(GIBBERISH));
        assert!(active.session().is_over && passive.session().is_over);
        assert!(active.broken().is_none());
    }

    #[test]
    fn a_connection_that_is_lost_at_any_point_is_over_on_both_sides() {
        // Two to connect, and three each time that one asks.
        for pieces in 0..32 {
            let (mut active, mut passive) = pair(10);
            active.queue_pair().cut_after(pieces);
            while active.pump() | passive.pump() {}
            assert!(active.session().is_over && passive.session().is_over, "after {pieces}");
            assert!(active.session().answers < 10 && active.broken().or(passive.broken()).is_none());
        }
    }
}
