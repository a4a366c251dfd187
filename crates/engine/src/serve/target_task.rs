//! The target's side of one connection: carrier, session, and a channel for each volume in use.
//!
//! The session outlives its connection until its I/O has ended, because the volume may still write
//! to its memory. Such a session does not count against the connection limit: see
//! [`Permit::orphan`] and [`blockmux_proto::volume_state::OrphanedUser`].

use crate::carrier::connection::{Broken, Connection, Inflow};
use crate::carrier::tls::Secure;
use crate::carrier::{Awaited, Carrier};
use crate::core::reactor::{Progress, Task};
use crate::net::host::Host;
use crate::serve::audit::Audit;
use crate::serve::listener::Permit;
use crate::serve::moves::{ArrivedConnection, Elsewhere, Moves};
use crate::serve::peer_buffers::PeerBuffers;
use crate::serve::peer_core::PeerCore;
use crate::serve::served_session::ServedSession;
use crate::serve::sessions::NOT_IN_CONFIG;
use blockmux_proto::driver::audit_event::AuditEvent;
use blockmux_proto::driver::session::{ProtocolError, StreamSession};
use blockmux_proto::driver::target::{SessionStage, TargetLifecycle};
use blockmux_proto::exports::Exports;
use blockmux_volume::{Core, PeerAccount, Pool, Waker};
use std::rc::Rc;
use std::time::Instant;
use tracing::{debug, info};

/// Serves one connection until either side closes it.
pub struct TargetTask<S: 'static, C: Carrier<S>> {
    carrier: C,
    served: ServedSession<S>,
    /// The core, with the peer's account.
    core: Rc<PeerCore<C::Host>>,
    buffers: PeerBuffers,
    moves: Moves<S, C::Handle>,
    /// Set when receiving has stopped. The connection ends when no I/O is in flight and all output
    /// is sent.
    ending: Option<Ending>,
    /// The peer has logged out, so that it knows that the rest of its requests will be executed.
    has_logged_out: bool,
    is_stop_sent: bool,
    /// The handshake is complete, and the permit was notified.
    is_established: bool,
    /// Released when the connection ends, here or on the core that it moved to.
    permit: Option<Permit>,
    audit: Audit,
}

/// A session that is to be served.
pub struct NewSession<S> {
    /// The session. Its volume ids are indices of `exports`.
    pub session: S,
    /// The handle of the core's pool that the session uses: it charges memory to this peer's
    /// account.
    pub pool: Pool,
    /// The volumes.
    pub exports: Exports,
}

/// What the connection of a session `S` over a stream `T` may do.
pub struct StreamOptions<S: 'static, T: 'static> {
    /// TLS, if the listener requires or permits it.
    pub secure: Option<Secure>,
    /// Where the connection may continue.
    pub elsewhere: Option<Elsewhere<S, T>>,
}

impl<S: 'static, T: 'static> Default for StreamOptions<S, T> {
    fn default() -> StreamOptions<S, T> {
        StreamOptions { secure: None, elsewhere: None }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// The remaining output is sent first.
    AfterOutput,
    /// The connection is lost.
    Closed,
    /// The connection is closed, and its session outlives it.
    Lingering,
}

impl<S: StreamSession + TargetLifecycle + 'static, H: Host> TargetTask<S, Connection<H>> {
    /// Serves a connection on `core`.
    pub fn spawn(
        core: &Rc<H>,
        arrival: ArrivedConnection<H::Stream>,
        session: NewSession<S>,
        options: StreamOptions<S, H::Stream>,
    ) {
        let ArrivedConnection { stream, unread, permit, .. } = arrival;
        let StreamOptions { secure, elsewhere } = options;
        let peer = permit.peer();
        let carrier = |waker: &Waker| {
            let helpers = |secure: Secure| secure.by_helpers(H::helpers(core, peer, waker));
            Connection::resumed(stream, &unread, core, waker).secured(secure.map(helpers))
        };
        Self::spawn_over(core, carrier, permit, session, elsewhere);
    }
}

impl<S: TargetLifecycle + 'static, C: Carrier<S> + 'static> TargetTask<S, C> {
    /// Serves a connection over the carrier that `carrier` makes; the task's waker is its argument.
    pub fn spawn_over(
        core: &Rc<C::Host>,
        carrier: impl FnOnce(&Waker) -> C,
        mut permit: Permit,
        session: NewSession<S>,
        elsewhere: Option<Elsewhere<S, C::Handle>>,
    ) {
        let NewSession { session, pool, exports } = session;
        permit.begin_login(core.now());
        let peer_core = Rc::new(PeerCore { core: core.clone(), pool });
        core.spawn(|waker| {
            let carrier = carrier(waker);
            peer_core.pool.account().into_iter().for_each(|account| account.set_waker(waker));
            permit.login_by().into_iter().for_each(|login_by| core.wake_at(login_by, waker));
            TargetTask {
                audit: Audit::new(carrier.peer()),
                carrier,
                served: ServedSession::start(session, exports, peer_core.clone(), waker, permit.origin()),
                core: peer_core,
                buffers: PeerBuffers::default(),
                moves: Moves::new(elsewhere),
                ending: None,
                has_logged_out: false,
                is_stop_sent: false,
                is_established: false,
                permit: Some(permit),
            }
        });
    }
}

impl<S: TargetLifecycle + 'static, C: Carrier<S>> TargetTask<S, C> {
    /// The protocol of the connection, as its listener or its first bytes tell.
    fn protocol(&self) -> &'static str {
        let of_listener = || self.permit.as_ref().map_or("", Permit::protocol);
        self.served.session.protocol().unwrap_or_else(of_listener)
    }

    #[inline]
    fn turn(&mut self, now: Instant) -> Result<Progress, Broken> {
        self.check_end(now)?;
        self.carrier.check_deadline(&mut self.served.session)?;
        self.buffers.check(&mut self.served, &self.carrier, &self.core)?;
        let mut progress = Progress::Idle;
        loop {
            let inflow = match self.ending {
                None => self.carrier.receive(&mut self.served.session)?,
                Some(_) => Inflow::Finished,
            };
            match inflow {
                Inflow::More => progress = Progress::More,
                Inflow::Drained => progress = progress.max(Progress::Drained),
                Inflow::Finished if self.ending.is_none() => self.ending = Some(Ending::AfterOutput),
                _ => {}
            }
            if self.audit.session().is_none() {
                // The limits of each client need the client before its first request.
                self.log_events();
            }
            let moved = self.served.move_io(now);
            let sent = self.carrier.send(&mut self.served.session)?;
            if sent && !self.carrier.has_output(&mut self.served.session) {
                self.buffers.on_output_sent();
            }
            progress = progress.max(moved).max(if sent { Progress::Drained } else { Progress::Idle });
            // The session may have set a new deadline, which must be armed before the task parks.
            self.carrier.check_new_deadline(&mut self.served.session)?;
            if inflow != Inflow::Blocked || moved == Progress::More {
                return Ok(progress);
            }
            // Input that was blocked by I/O in flight or a full outbox may be accepted now.
            if self.carrier.awaits(&self.served.session) == Awaited::Nothing {
                return Ok(progress);
            }
        }
    }

    /// Checks whether the session must end: because it was asked to, or its login is late.
    #[inline]
    fn check_end(&mut self, now: Instant) -> Result<(), Broken> {
        let session = self.audit.session();
        let (is_draining, must_close) =
            session.map_or((false, false), |session| (session.is_draining(), session.must_close()));
        if (is_draining || self.core.is_stopping()) && !self.is_stop_sent && !self.is_due_in_process() {
            self.is_stop_sent = true;
            self.served.stop(now);
        }
        if must_close {
            return Err(Broken::SessionEnded(self.end_reason()));
        }
        let login_by = || self.permit.as_ref().and_then(Permit::login_by);
        if !self.is_established && login_by().is_some_and(|login_by| now >= login_by) {
            return Err(LATE_LOGIN.into());
        }
        Ok(())
    }

    /// Why the session was asked to end.
    fn end_reason(&self) -> &'static str {
        self.audit.session().map_or(NOT_IN_CONFIG, |session| session.end_reason())
    }

    /// Whether the session outlives its connection.
    #[inline]
    fn lingers(&self) -> bool {
        self.served.session.stage() == SessionStage::Lingering
    }

    /// Whether the permit was given to a new connection.
    fn is_replaced(&self) -> bool {
        self.permit.as_ref().is_some_and(Permit::is_replaced)
    }

    /// Whether the connection is closed or lost.
    #[inline]
    fn is_closed(&self) -> bool {
        matches!(self.ending, Some(Ending::Closed | Ending::Lingering))
    }

    /// Runs a session without a connection: its timers and its I/O.
    fn linger(&mut self, now: Instant) -> Progress {
        if self.ending != Some(Ending::Lingering) {
            self.log_end();
            debug!(peer = &*self.carrier.peer(), "connection closed; its session lingers");
            self.carrier.close();
            self.ending = Some(Ending::Lingering);
            self.permit.iter_mut().for_each(Permit::linger);
        }
        let progress = self.served.move_io(now);
        // There is no peer for its output, and a missed deadline has no connection to close.
        let _ = self.carrier.check_deadline(&mut self.served.session);
        self.carrier.drop_output(&mut self.served.session);
        match self.served.move_io(now) {
            Progress::Idle => progress,
            moved => moved,
        }
    }

    /// Releases the permit of a peer that has disconnected, whose I/O in flight continues. What
    /// is throttled is aborted if the peer has not logged out: it may have died.
    #[cold]
    fn orphan(&mut self) {
        self.log_end();
        self.served.channels.orphan(!self.has_logged_out);
        if let Some(permit) = &mut self.permit {
            permit.orphan();
        }
        if self.is_closed() {
            self.carrier.close();
        }
    }

    /// Logs the session's events.
    #[inline]
    fn log_events(&mut self) {
        while let Some(event) = self.served.session.poll_event() {
            self.has_logged_out |= matches!(event, AuditEvent::Logout { .. });
            if let Some(permit) = &self.permit {
                self.audit.on_event(event, permit.sessions(), |volume| self.served.channels.name(volume));
            }
            if let Some(session) = self.audit.session() {
                self.served.channels.count_for(session);
            }
        }
    }

    /// Logs an orderly end of the connection, unless the session has logged it.
    fn log_end(&mut self) {
        match (self.is_stop_sent, self.served.session.is_close_a_logout()) {
            _ if self.is_replaced() => self.audit.on_end(true, REPLACED),
            (true, _) if !self.core.is_stopping() => self.audit.on_end(true, self.end_reason()),
            (true, _) => self.audit.on_end(true, "the target stops"),
            (false, true) => self.audit.on_end(true, "the client closed the connection"),
            (false, false) => self.audit.on_end(false, "the peer closed it without logging out"),
        }
    }

    /// Whether the connection should move to another process instead of ending.
    #[cold]
    fn is_due_in_process(&mut self) -> bool {
        let (session, waker) = (&self.served.session, self.served.channels.waker());
        self.moves.is_due_in_process(session, &self.carrier, self.permit.as_ref(), &*self.core, waker)
    }

    /// Moves the connection elsewhere if it should; returns whether it did.
    #[inline]
    fn leave(&mut self) -> bool {
        if !self.is_established
            && self.moves.to_owner_core(&self.served.session, &mut self.carrier, &mut self.permit)
        {
            return true;
        }
        let is_over = self.is_stop_sent || self.ending.is_some();
        if is_over || !self.core.is_stopping() || !self.is_due_in_process() {
            return false;
        }
        let permit = self.permit.as_ref();
        let has_moved = self.moves.hand_to_process(&mut self.served, &mut self.carrier, permit);
        if has_moved {
            self.audit.on_end(true, TAKEN_OVER);
        }
        has_moved
    }

    /// Handles a failed connection: I/O in flight completes, and its replies are dropped.
    fn on_broken(&mut self, broken: &Broken) {
        self.log_events();
        let reason = match broken {
            Broken::Protocol(error) => format!("peer {error}"),
            Broken::Tls(error) => format!("peer {error}"),
            Broken::Keys(_) | Broken::Evicted(_) | Broken::SessionEnded(_) => broken.to_string(),
            Broken::Socket(error) => error.to_string(),
        };
        match broken {
            _ if self.audit.is_logged_in() => {}
            Broken::Socket(_) => debug!(peer = &*self.carrier.peer(), "connection lost: {reason}"),
            _ => self.audit.on_refused(self.protocol(), &reason),
        }
        if matches!(broken, Broken::Protocol(_) | Broken::Tls(_)) {
            // The session or TLS may have an error message for the peer.
            let _ = self.carrier.send(&mut self.served.session);
        }
        // The error was logged; I/O in flight for the peer may be aborted.
        self.carrier.end(&mut self.served.session);
        // The session may have a more precise reason.
        self.log_events();
        if self.is_replaced() {
            self.audit.on_end(true, REPLACED);
        }
        self.audit.on_end(false, &reason);
        self.carrier.drop_output(&mut self.served.session);
        self.ending = Some(Ending::Closed);
    }

    /// The handshake is complete.
    #[cold]
    fn establish(&mut self) {
        self.is_established = true;
        self.carrier.end_handshake(&mut self.served.session);
        let is_discovery = self.served.session.stage() == SessionStage::Discovery;
        self.permit.iter_mut().for_each(match is_discovery {
            true => Permit::discover,
            false => Permit::establish,
        });
        self.moves.on_established(&self.carrier, self.permit.as_ref());
    }

    #[inline]
    fn take_turn(&mut self) -> Progress {
        let mut progress = Progress::Idle;
        let now = self.core.now();
        self.served.session.on_turn(now);
        if !self.is_closed() {
            match self.turn(now) {
                Ok(made) => progress = made,
                Err(broken) => self.on_broken(&broken),
            }
        }
        let is_new = !self.is_established && self.served.session.stage() != SessionStage::Handshake;
        if is_new {
            self.establish();
        }
        self.log_events();
        // Checked after the session was listed: a concurrent change of the allowed networks then
        // finds the session in the list, or is seen here.
        if is_new && self.permit.as_ref().is_some_and(|permit| !permit.is_admitted()) {
            self.on_broken(&Broken::SessionEnded(NOT_ALLOWED));
        }
        if self.leave() {
            return Progress::Done;
        }
        if self.ending.is_some() { self.end(progress, now) } else { progress }
    }

    /// Runs a connection that ends: its output, its I/O in flight, then its session if that
    /// lingers.
    #[cold]
    fn end(&mut self, mut progress: Progress, now: Instant) -> Progress {
        if self.is_closed() {
            if self.core.is_stopping() {
                self.served.channels.lift_limits();
            }
            if !self.lingers() {
                self.core.pool.account().into_iter().for_each(PeerAccount::close);
            }
            if self.served.move_io(now) == Progress::More {
                progress = Progress::More;
            }
            self.carrier.drop_output(&mut self.served.session);
        }
        let is_sent = !self.carrier.has_output(&mut self.served.session);
        if is_sent && self.lingers() {
            if self.is_replaced() {
                info!(peer = &*self.carrier.peer(), "session dropped: {REPLACED}");
            }
            if self.core.is_stopping() || self.is_replaced() {
                self.served.stop(now);
            }
            progress = self.linger(now);
        }
        if !self.is_stop_sent && !self.served.channels.is_idle() && !self.lingers() {
            self.orphan();
        }
        if self.served.channels.is_idle() && is_sent && !self.lingers() {
            self.log_end();
            debug!(peer = &*self.carrier.peer(), "connection closed");
            return Progress::Done;
        }
        progress
    }
}

impl<S: TargetLifecycle + 'static, C: Carrier<S>> Task for TargetTask<S, C> {
    #[inline]
    fn run(&mut self) -> Progress {
        let progress = self.take_turn();
        self.core.pool.end_turn();
        progress
    }

    fn is_polled(&self) -> bool {
        true
    }

    fn park(&mut self) {
        if !self.is_closed() {
            self.buffers.park(&mut self.served, &self.carrier, &self.core);
            self.carrier.park();
        }
    }
}

/// The logged reason when another process continues the session.
const TAKEN_OVER: &str = "another process continues the session";
/// The logged reason when the connection was closed for a new one.
const REPLACED: &str = "a new connection needs its share of --max-connections";
/// The logged reason when the listener no longer accepts the peer's address.
const NOT_ALLOWED: &str = "the listener's `allow` list no longer has its address";
const LATE_LOGIN: ProtocolError =
    ProtocolError { what: "did not log in within `login_timeout`", reference: "this server's limit" };

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::reactor::{PollPolicy, Reactor};
    use crate::net::host::{ByteStream, NetworkStream};
    use crate::net::socket::Address;
    use crate::net::socket::{Listener, Stream};
    use crate::serve::listener::ConnectionLimit;
    use crate::serve::peer_buffers::HELD_BUFFERS_TIMEOUT;
    use crate::sim::{NetworkConditions, SimCore, SimNet, SimStream, World};

    use blockmux_proto::driver::outbox::Outbox;
    use blockmux_proto::driver::session::{Demand, Timed};
    use blockmux_proto::driver::target::IoSource;
    use blockmux_proto::exports::{Export, VolumeId};
    use blockmux_proto::nbd::server::NbdTargetSession;
    use blockmux_proto::volume_state::NotAdmitted;
    use blockmux_volume::{
        Chunk, Completion, DelayVolume, Delays, Io, IoError, MemVolume, Memory, Tag, Volume,
    };
    use std::cell::{Cell, RefCell};
    use std::io;
    use std::sync::Arc;
    use std::time::Duration;

    /// The task of an idle NBD connection, which is most of its memory.
    #[test]
    fn a_task_of_nbd_has_at_most_1024_bytes() {
        let len = size_of::<TargetTask<NbdTargetSession, Connection>>();
        assert!(len <= 1024, "{len} bytes");
    }

    /// A target with 16 MiB of buffers; long payload may use half of them.
    struct BufferTest {
        world: World,
        clients: Rc<SimCore>,
        target: Rc<SimCore>,
        limit: ConnectionLimit,
    }

    /// A client that sends only given bytes.
    struct Peer(SimStream);

    impl BufferTest {
        fn new() -> BufferTest {
            let mut world =
                World::new(SimNet::new(1, NetworkConditions { window: 64 << 10, ..NetworkConditions::FAIR }));
            let (clients, target) = (world.add_core(0), world.add_core(16 << 20));
            let volume = Arc::new(MemVolume::new(8 << 20));
            let export =
                Export { name: "disk0".to_owned(), description: String::new(), read_only: false, volume };
            let (exports, limit) = (Exports::new(vec![export]), ConnectionLimit::new(usize::MAX));
            let permits = limit.clone();
            world.net().listen(&target, &address(), move |core, stream| {
                let pool = core.pool().for_peer();
                let session = NbdTargetSession::new(exports.clone(), pool.clone(), core.now());
                let permit = permits.permit().unwrap();
                let session = NewSession { session, pool, exports: exports.clone() };
                TargetTask::spawn(
                    core,
                    ArrivedConnection::new(stream, permit),
                    session,
                    StreamOptions::default(),
                );
            });
            BufferTest { world, clients, target, limit }
        }

        /// A client in the transmission phase with simple replies, with a request of `len_mib` MiB
        /// in flight.
        fn client(&self, command: u8, len_mib: u8, payload: &[u8]) -> Peer {
            let mut peer = Peer(self.clients.connect(&address()).unwrap());
            peer.send(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0");
            let mut request = [0; 28];
            request[..4].copy_from_slice(b"\x25\x60\x95\x13");
            (request[7], request[25]) = (command, len_mib << 4);
            peer.send(&request);
            peer.send(payload);
            self.pass(Duration::from_secs(1));
            peer
        }

        fn pass(&self, time: Duration) {
            self.world.run_for(time).unwrap();
        }
    }

    impl Peer {
        fn send(&mut self, bytes: &[u8]) {
            let mut outbox = Outbox::default();
            outbox.push_head(bytes);
            while !outbox.is_empty() {
                self.0.send(&mut outbox).expect("it fits the window");
            }
        }

        fn is_closed(&mut self) -> bool {
            let mut chunk = Chunk::new(Memory::from_heap(256 << 10));
            loop {
                match self.0.receive(&mut chunk, usize::MAX) {
                    Ok(0) => return true,
                    Ok(_) => {}
                    Err(error) => return error.kind() != io::ErrorKind::WouldBlock,
                }
            }
        }
    }

    fn address() -> Address {
        Address::Unix("/target".into())
    }

    const READ: u8 = 0;
    const WRITE: u8 = 1;
    const DISCONNECT: u8 = 2;

    #[test]
    fn a_peer_that_holds_buffers_is_closed_if_others_wait_and_after_a_minute_if_they_are_short() {
        let test = BufferTest::new();
        let mut writers = [0; 2].map(|_| test.client(WRITE, 4, &[7; 4000]));
        let mut reader = test.client(READ, 1, b"");
        let mut idle = test.client(READ, 0, b"");
        assert!(test.target.pool().is_short());
        test.pass(Duration::from_secs(5));
        // The second writer waited for the buffers of the first one; nobody waits for its buffers
        // now.
        assert_eq!(writers.each_mut().map(Peer::is_closed), [true, false]);
        assert!(![&mut reader, &mut idle].into_iter().any(Peer::is_closed));
        // Sending a little now and then is not enough.
        writers[1].send(&[7; 4000]);
        test.pass(HELD_BUFFERS_TIMEOUT * 2);
        assert!(writers.iter_mut().all(Peer::is_closed));
        assert!(!idle.is_closed(), "it holds no buffers");
        assert_eq!(test.target.pool().out_bytes(), 0);
    }

    #[test]
    fn a_peer_that_sends_none_of_its_announced_data_is_closed() {
        let test = BufferTest::new();
        let mut writers = [0; 2].map(|_| test.client(WRITE, 4, b""));
        assert!(test.target.pool().is_short());
        test.pass(HELD_BUFFERS_TIMEOUT * 3);
        assert!(writers.iter_mut().all(Peer::is_closed));
        assert_eq!(test.target.pool().out_bytes(), 0);
    }

    #[test]
    fn a_peer_that_exceeds_the_login_timeout_is_disconnected_and_others_are_not() {
        let setting = BufferTest::new();
        let mut before = Peer(setting.clients.connect(&address()).unwrap());
        setting.pass(Duration::from_secs(1));
        setting.limit.set_login_timeout(Some(Duration::from_secs(5)));
        let mut late = Peer(setting.clients.connect(&address()).unwrap());
        late.send(b"\0\0\0\x03");
        let mut idle = setting.client(READ, 0, b"");
        setting.pass(Duration::from_secs(3));
        assert!(!late.is_closed());
        setting.pass(Duration::from_secs(3));
        assert!(late.is_closed() && !idle.is_closed());
        assert!(!before.is_closed(), "only the protocol's own timeout applies to it");
        setting.pass(Duration::from_secs(30));
        assert!(before.is_closed() && !idle.is_closed());
    }

    /// A session that accepts no input; or, if the peer owes it data, answers every byte with one
    /// byte.
    #[derive(Default)]
    struct BlockedSession {
        outbox: Outbox,
        owed: Option<u64>,
        /// Every byte is a violation; how many calls brought some.
        violations: Option<Rc<Cell<u32>>>,
        /// Held until the data arrives.
        _memory: Vec<Memory>,
    }

    impl BlockedSession {
        fn serve<H: Host>(self, core: &Rc<H>, stream: H::Stream, permit: Permit) {
            let exports = Exports::new(Vec::new());
            let session = NewSession { session: self, pool: core.pool().for_peer(), exports };
            TargetTask::spawn(
                core,
                ArrivedConnection::new(stream, permit),
                session,
                StreamOptions::default(),
            );
        }
    }

    impl Timed for BlockedSession {}

    impl StreamSession for BlockedSession {
        fn demand(&self) -> Demand {
            let takes_bytes = self.owed.is_some() || self.violations.is_some();
            if takes_bytes { Demand::Bytes(1) } else { Demand::Nothing }
        }

        fn on_bytes(&mut self, input: &Chunk, _now: Instant) -> Result<usize, ProtocolError> {
            if let Some(violations) = &self.violations {
                violations.set(violations.get() + 1);
                return Err(ProtocolError { what: "sent gibberish", reference: "the test" });
            }
            self.outbox.push_head(input.unread());
            Ok(input.unread().len())
        }

        fn on_placed(&mut self, _now: Instant) -> Result<(), ProtocolError> {
            Ok(())
        }

        fn on_end(&mut self, _now: Instant) -> Result<(), ProtocolError> {
            Ok(())
        }

        fn outbox(&mut self) -> &mut Outbox {
            &mut self.outbox
        }
    }

    impl IoSource for BlockedSession {
        fn depth(&self) -> u32 {
            1
        }

        fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
            None
        }

        fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
            None
        }

        fn on_io(&mut self, _done: Completion, _now: Instant) {}

        fn begin(&mut self, _: VolumeId, _: &Io, _: bool) -> Result<(), NotAdmitted<IoError>> {
            Ok(())
        }
    }

    impl TargetLifecycle for BlockedSession {
        type Source = Self;

        fn source(&mut self) -> &mut Self {
            self
        }

        fn on_start(&mut self, _waker: &Waker, _now: Instant) {}

        fn on_turn(&mut self, _now: Instant) {}

        fn stage(&self) -> SessionStage {
            SessionStage::Established
        }

        fn poll_event(&mut self) -> Option<AuditEvent> {
            None
        }

        fn owed(&self) -> Option<u64> {
            self.owed
        }

        fn on_stop(&mut self, _now: Instant) {}
    }

    /// A world with a connection whose session accepts no input, with its stream and its limit.
    fn blocked_connection() -> (World, Peer, SimStream, ConnectionLimit) {
        let mut world = World::new(SimNet::new(1, NetworkConditions::FAIR));
        let (clients, target) = (world.add_core(0), world.add_core(16 << 20));
        let (limit, accepted) = (ConnectionLimit::new(1), Rc::new(RefCell::new(None)));
        let (permits, stream_of) = (limit.clone(), accepted.clone());
        world.net().listen(&target, &address(), move |core, stream| {
            *stream_of.borrow_mut() = Some(stream.share());
            BlockedSession::default().serve(core, stream, permits.permit().unwrap());
        });
        let mut peer = Peer(clients.connect(&address()).unwrap());
        peer.send(b"unread");
        world.run_for(HELD_BUFFERS_TIMEOUT).unwrap();
        assert_eq!(limit.open(), 1);
        let stream = accepted.borrow_mut().take().unwrap();
        (world, peer, stream, limit)
    }

    #[test]
    fn lost_connections_with_endless_io_do_not_count_against_the_limit() {
        let mut world = World::new(SimNet::new(1, NetworkConditions::FAIR));
        let (clients, target) = (world.add_core(0), world.add_core(16 << 20));
        let for_ever = Delays { read: Duration::from_secs(1 << 30), ..Delays::default() };
        let hangs = Arc::new(DelayVolume::new(Arc::new(MemVolume::new(8 << 20)), for_ever));
        let volumes: [(&str, Arc<dyn Volume>); 2] = [("a", hangs), ("b", Arc::new(MemVolume::new(8 << 20)))];
        let export = |(name, volume): (&str, Arc<dyn Volume>)| Export {
            name: name.to_owned(),
            description: String::new(),
            read_only: false,
            volume,
        };
        let exports = Exports::new(volumes.map(export).into());
        let (limit, volume_state) = (ConnectionLimit::new(2), exports.volume_state(VolumeId(0)).unwrap());
        let permits = limit.clone();
        world.net().listen(&target, &address(), move |core, stream| {
            let pool = core.pool().for_peer();
            let session = NbdTargetSession::new(exports.clone(), pool.clone(), core.now());
            let permit = permits.permit().expect("there is room for one more");
            let session = NewSession { session, pool, exports: exports.clone() };
            TargetTask::spawn(
                core,
                ArrivedConnection::new(stream, permit),
                session,
                StreamOptions::default(),
            );
        });
        let client = |name: &str, last: &[u8]| {
            let mut peer = Peer(clients.connect(&address()).unwrap());
            peer.send(&[b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\x01", name.as_bytes()].concat());
            for command in [&[READ][..], last].concat() {
                let mut request = [0; 28];
                request[..4].copy_from_slice(b"\x25\x60\x95\x13");
                (request[7], request[26]) = (command, 2);
                peer.send(&request);
            }
            world.run_for(Duration::from_secs(1)).unwrap();
            peer
        };
        let mut stays = client("b", &[]);
        let mut disconnected = Vec::new();
        for left in 1..=20 {
            // Every second client logs out and keeps the socket open.
            let peer = client("a", if left % 2 == 0 { &[DISCONNECT] } else { &[] });
            if left % 2 != 0 {
                assert_eq!(limit.open(), 2, "the connection is open");
                peer.0.close();
                world.run_for(Duration::from_secs(1)).unwrap();
            }
            disconnected.push(peer);
            assert_eq!((limit.open(), limit.orphaned(), volume_state.orphans()), (1, left, left));
        }
        assert!(!stays.is_closed());
    }

    #[test]
    fn a_peer_that_never_sends_requested_data_is_closed_despite_other_traffic() {
        for is_short in [false, true] {
            let mut world = World::new(SimNet::new(1, NetworkConditions::FAIR));
            let (clients, target) = (world.add_core(0), world.add_core(16 << 20));
            let limit = ConnectionLimit::new(1);
            let permits = limit.clone();
            world.net().listen(&target, &address(), move |core, stream| {
                let len = if is_short { 4 << 20 } else { 4 << 10 };
                let _memory = core.pool().take_payload(len).into_iter().collect();
                let session = BlockedSession { owed: Some(1), _memory, ..BlockedSession::default() };
                session.serve(core, stream, permits.permit().unwrap());
            });
            let mut peer = Peer(clients.connect(&address()).unwrap());
            for _ in 0..3 {
                world.run_for(HELD_BUFFERS_TIMEOUT / 4).unwrap();
                assert_eq!(limit.open(), 1);
                peer.send(b"ping");
            }
            world.run_for(HELD_BUFFERS_TIMEOUT * 2).unwrap();
            assert_eq!((limit.open(), target.pool().is_short()), (usize::from(!is_short), false));
        }
    }

    /// NVMe/TCP in Linux received on after a fatal error (CVE-2026-52989).
    #[test]
    fn after_a_violation_no_further_byte_of_the_peer_is_taken() {
        let mut world = World::new(SimNet::new(1, NetworkConditions::FAIR));
        let (clients, target) = (world.add_core(0), world.add_core(16 << 20));
        let (limit, violations) = (ConnectionLimit::new(1), Rc::new(Cell::new(0)));
        let (permits, counted) = (limit.clone(), violations.clone());
        world.net().listen(&target, &address(), move |core, stream| {
            let violations = Some(counted.clone());
            let session = BlockedSession { violations, ..BlockedSession::default() };
            session.serve(core, stream, permits.permit().unwrap());
        });
        let mut peer = Peer(clients.connect(&address()).unwrap());
        (0..3).for_each(|_| peer.send(&[7; 4000]));
        world.run_for(Duration::from_secs(1)).unwrap();
        assert_eq!((violations.get(), limit.open()), (1, 0));
        assert!(peer.is_closed());
    }

    #[test]
    fn a_connection_that_was_shut_down_ends_although_its_session_takes_no_input() {
        let (world, _peer, stream, limit) = blocked_connection();
        stream.close();
        world.run_for(Duration::from_secs(1)).unwrap();
        assert_eq!(limit.open(), 0);
    }

    #[test]
    fn a_peer_that_closes_while_its_session_takes_no_input_is_dropped_after_a_minute() {
        let (world, peer, _stream, limit) = blocked_connection();
        peer.0.close();
        world.run_for(HELD_BUFFERS_TIMEOUT / 2).unwrap();
        assert_eq!(limit.open(), 1);
        world.run_for(HELD_BUFFERS_TIMEOUT).unwrap();
        assert_eq!(limit.open(), 0);
    }

    #[test]
    fn the_ring_reports_the_end_of_a_socket_that_is_not_read() {
        let (mut reactor, _inbox) = Reactor::new(PollPolicy::Never, 1 << 20).unwrap();
        let listener = Listener::bind(&Address::Tcp("127.0.0.1:0".parse().unwrap())).unwrap();
        let _peer = Stream::connect(listener.address()).unwrap();
        // The listener does not block.
        let stream = std::iter::repeat_with(|| listener.accept()).find_map(Result::ok).unwrap();
        let (hang_up, limit) = (stream.hang_up(), ConnectionLimit::new(1));
        let core = reactor.core().clone();
        BlockedSession::default().serve(&core, stream, limit.permit().unwrap());
        let cutter = std::thread::spawn(move || hang_up());
        reactor.run_until(|| limit.open() == 0).unwrap();
        cutter.join().unwrap();
    }

    #[test]
    fn a_peer_that_holds_buffers_that_nobody_needs_is_not_closed() {
        let test = BufferTest::new();
        let mut writer = test.client(WRITE, 1, &[7; 4000]);
        let mut reader = test.client(READ, 4, b"");
        test.pass(HELD_BUFFERS_TIMEOUT * 10);
        assert!(!writer.is_closed() && !reader.is_closed());
    }
}
