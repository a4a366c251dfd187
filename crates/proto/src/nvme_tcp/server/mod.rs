//! The NVMe/TCP target: one session for one connection, which is one queue of a controller.
//!
//! ```text
//!   IcReq ──▶ Head ──capsule──▶ execute.rs ──▶ nvme::admin, nvme::io ──▶ send.rs
//!              ▲ │                   │                    ▲
//!              │ └─H2CData─▶ Data, Place, Tail            │ poll_io, on_io
//!              └──────────────── receive.rs               ▼
//!                                                       volume
//! ```
//! The first PDU initializes the connection, the first command is Connect and makes it an admin or an I/O queue. Data in
//! a capsule is lent from the receive buffer to the volume; else the host is asked for all of a command's data by one
//! R2T. Up to 64 KiB are lent, too, if they come in one PDU; for longer data memory is taken before it is asked for, so
//! that it never waits, and it is received straight there.
//!
//! A host that has to prove who it is does so before anything else (`authenticate.rs`). Two commands that are fused wait
//! for each other (`fused.rs`). What queues on other cores leave for this one is read at each turn (`letters.rs`).
//!
//! What bounds a session: 30 seconds until its queue is connected and its host has proved who it is; then as many
//! commands as the queue has entries, at most 1,024, and 4 that wait for events, and 1 MiB of answers that the host leaves
//! unread: until it reads them, it is not listened to. Every command that the queue has an entry for is taken, for the data of those before it lies behind
//! it in the same stream; but only 64 MiB of data are in flight and unsent, and the commands of more wait before they
//! are begun or their data is asked for. A host whose controller has a Keep Alive Timeout and that is
//! silent for longer loses all of its queues, whatever cores they are on (decision 13).
//!
//! A host that breaks the transport's rules gets a C2HTermReq with the fatal error that the specification names, and
//! the connection ends.

mod authenticate;
mod commands;
mod execute;
mod fused;
mod letters;
mod receive;
mod send;

#[cfg(test)]
mod tests;

use crate::exports::VolumeId;
use crate::fabrics::controller::connect::Queue;
use crate::fabrics::controller::node::Node;
use crate::fabrics::controller::unconnected::ConnectPermit;
use crate::nvme::auth::controller::Authenticator;
use crate::nvme::auth::psk::TlsPsk;
use crate::nvme::io::Wanted;
use crate::nvme::letters::Letterbox;
use crate::nvme::{HangUp, MAX_EVENT_REQUESTS, MQES, Ring};
use crate::outbox::Outbox;
use crate::session::{Demand, ProtocolError, StreamSession, Target, Timed};
use blockmux_volume::{Chunk, Completion, Io, Pool, SgList, Tag, Waker};
use blockmux_wire::nvmeof::tcp::COMMON_HEADER_LEN;
use commands::Commands;
use core::net::IpAddr;
use fused::Fusing;
use receive::Awaiting;
use send::Sender;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A host's connection to an NVMe/TCP target.
pub struct TargetSession {
    node: Arc<Node>,
    pool: Pool,
    outbox: Outbox,
    sender: Sender,
    awaiting: Awaiting,
    queue: Option<Queue>,
    /// The host has to prove who it is.
    authenticator: Option<Box<Authenticator>>,
    /// Entries of the submission queue: the most commands under way, but for those that wait for events.
    depth: usize,
    commands: Commands,
    /// In flight, but not yet taken by the driver.
    io: VecDeque<(VolumeId, Io)>,
    /// I/O of commands whose ranges are locked by others.
    held: VecDeque<(usize, Wanted)>,
    /// Commands that are asked now and then whether they can go on.
    waiting: VecDeque<usize>,
    /// I/O in flight that is to end early.
    cancels: VecDeque<(VolumeId, Tag)>,
    fusing: Fusing,
    /// What others leave for the queue.
    letters: Option<Arc<Letterbox>>,
    /// Commands that wait for room or memory before they are begun or their data is asked for, oldest first.
    grants: VecDeque<usize>,
    /// A Connect that waits for an older association to end, and its data.
    connecting: Option<(usize, SgList)>,
    /// I/O that has not completed.
    in_flight: usize,
    /// Nothing is accepted any more; what is in flight ends.
    stopping: bool,
    /// The connection ends.
    is_over: bool,
    clock: Clock,
    /// What the host has connected to, and how to cut its connection.
    local_ip: Option<IpAddr>,
    hang_up: Option<HangUp>,
    /// The port that the host has come by.
    port: u16,
    permit: Option<ConnectPermit>,
    /// Makes what has this session take a turn, from any core.
    bell: Option<Bell>,
    ring: Option<Ring>,
    /// For challenges.
    seed: Option<[u8; 32]>,
    /// The key that the connection is secured with.
    secured: Option<Box<TlsPsk>>,
}

/// Makes what wakes a session from other threads of what wakes it on its own.
pub type Bell = Box<dyn FnOnce(&Waker) -> Ring>;

/// Deadlines.
struct Clock {
    /// A queue must be connected by then.
    connect_by: Instant,
    /// The next message of a host that proves who it is must have come by then; `None`: the time is to be asked for first.
    prove_by: Option<Instant>,
    /// When to ask the pool, locked ranges and older associations again.
    retry_at: Instant,
    /// When to look for letters.
    look_at: Instant,
    /// The next look at whether the host was heard of; `None` without Keep Alive.
    keep_alive: Option<KeepAlive>,
}

/// Whether the host keeps its controller alive (Base 2.0 §3.9).
struct KeepAlive {
    timeout: Duration,
    next_look: Instant,
    /// Something has come since the last look.
    heard: bool,
    /// Looks in a row at which nothing had.
    silent: u32,
}

impl TargetSession {
    /// A session for a host that has just connected. `pool` is the core's, for data from the host. The host has 30
    /// seconds from `now` on to connect a queue.
    #[must_use]
    pub fn new(node: Arc<Node>, pool: Pool, now: Instant) -> TargetSession {
        TargetSession {
            node,
            sender: Sender::new(pool.clone()),
            pool,
            outbox: Outbox::default(),
            awaiting: Awaiting::IcReq(COMMON_HEADER_LEN),
            queue: None,
            authenticator: None,
            depth: 1,
            commands: Commands::default(),
            io: VecDeque::new(),
            held: VecDeque::new(),
            waiting: VecDeque::new(),
            cancels: VecDeque::new(),
            fusing: Fusing::No,
            letters: None,
            grants: VecDeque::new(),
            connecting: None,
            in_flight: 0,
            stopping: false,
            is_over: false,
            clock: Clock {
                connect_by: now.checked_add(CONNECT_TIME).unwrap_or(now),
                prove_by: None,
                retry_at: now,
                look_at: now,
                keep_alive: None,
            },
            local_ip: None,
            hang_up: None,
            port: 0,
            permit: None,
            bell: None,
            ring: None,
            seed: None,
            secured: None,
        }
    }

    /// The same with leave to connect a queue, over a connection to `local_ip` that `hang_up` cuts: that is how an
    /// I/O queue ends with its controller.
    #[must_use]
    pub fn admitted(
        mut self,
        permit: ConnectPermit,
        local_ip: Option<IpAddr>,
        hang_up: HangUp,
    ) -> TargetSession {
        (self.permit, self.local_ip, self.hang_up) = (Some(permit), local_ip, Some(hang_up));
        self
    }

    /// The same with random bytes that nobody else knows, without which hosts cannot prove who they are.
    #[must_use]
    pub fn with_seed(mut self, seed: [u8; 32]) -> TargetSession {
        self.seed = Some(seed);
        self
    }

    /// The same for a host that has come by the port of this identifier.
    #[must_use]
    pub fn at_port(mut self, port: u16) -> TargetSession {
        self.port = port;
        self
    }

    /// The same with a bell, by which other cores have it take a turn. Without one it looks ten times a second for what
    /// they have for its host.
    #[must_use]
    pub fn with_bell(mut self, bell: Bell) -> TargetSession {
        self.bell = Some(bell);
        self
    }

    /// Whether that much data may be in flight beside what is.
    #[inline]
    fn has_room(&self, data_len: usize) -> bool {
        let payload = self.commands.payload.saturating_add(self.outbox.len()).saturating_add(data_len);
        let is_alone = self.commands.payload == 0 && self.outbox.is_empty();
        payload <= blockmux_volume::SHORT_PAYLOAD
            || payload <= PAYLOAD_IN_FLIGHT
                && (is_alone || payload <= self.pool.peer_share() && !self.pool.is_short())
    }

    /// Looks whether the host is still there.
    fn check_keep_alive(&mut self, now: Instant) -> Result<(), ProtocolError> {
        // Who is still proving itself may not send Keep Alive yet, and has `connect_by` to be done.
        let is_authentic = self.is_authentic();
        let Some(keep_alive) = self.clock.keep_alive.as_mut().filter(|it| it.next_look <= now) else {
            return Ok(());
        };
        keep_alive.heard |= !is_authentic;
        let pause = keep_alive.timeout.checked_div(LOOKS).unwrap_or_default();
        keep_alive.next_look = now.checked_add(pause).unwrap_or(now);
        keep_alive.silent =
            if std::mem::take(&mut keep_alive.heard) { 0 } else { keep_alive.silent.saturating_add(1) };
        if keep_alive.silent > LOOKS {
            self.is_over = true;
            return Err(ProtocolError {
                what: "did not keep its controller alive within its Keep Alive Timeout",
                reference: "NVMe Base 2.0 §3.9",
            });
        }
        Ok(())
    }

    /// A new timeout; `None` is none.
    fn set_keep_alive(&mut self, timeout: Option<Duration>) {
        if self.clock.keep_alive.as_ref().map(|it| it.timeout) == timeout {
            return;
        }
        // The first look is made as soon as somebody says what time it is.
        let next_look = self.clock.retry_at;
        self.clock.keep_alive =
            timeout.map(|timeout| KeepAlive { timeout, next_look, heard: true, silent: 0 });
    }

    /// Whether there is a queue that may be used.
    fn is_usable(&self) -> bool {
        self.queue.is_some() && self.is_authentic()
    }

    /// Whether the host has proved who it is, or need not.
    #[inline]
    fn is_authentic(&self) -> bool {
        self.authenticator.as_ref().is_none_or(|authenticator| authenticator.is_done())
    }

    /// Whether the host is proving who it is.
    fn is_proving(&self) -> bool {
        self.queue.is_some() && !self.is_authentic()
    }

    /// Whether it has to look for letters itself.
    fn looks(&self) -> bool {
        let is_rung = self.letters.as_ref().is_none_or(|letters| letters.is_rung());
        !is_rung && matches!(&self.queue, Some(Queue::Admin(admin)) if admin.waits_for_events())
    }

    fn waits(&self) -> bool {
        !self.held.is_empty()
            || !self.waiting.is_empty()
            || matches!(&self.queue, Some(Queue::Admin(admin)) if admin.waits())
            || !self.grants.is_empty()
            || self.connecting.is_some()
    }
}

impl Timed for TargetSession {
    fn poll_timeout(&self) -> Option<Instant> {
        if self.is_over {
            return None;
        }
        let connect = if !self.is_usable() { Some(self.clock.connect_by) } else { None };
        let prove = self.is_proving().then(|| self.clock.prove_by.unwrap_or(self.clock.retry_at));
        let retry = if self.waits() { Some(self.clock.retry_at) } else { None };
        let keep_alive = self.clock.keep_alive.as_ref().map(|keep_alive| keep_alive.next_look);
        let look = if self.looks() { Some(self.clock.look_at) } else { None };
        [connect, prove, retry, keep_alive, look].into_iter().flatten().min()
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        if !self.is_usable() && now >= self.clock.connect_by {
            self.is_over = true;
            return Err(ProtocolError {
                what: "did not connect a queue, and prove who it is, within 30 seconds",
                reference: "NVMe Base 2.0 §3.3.2.2",
            });
        }
        if self.is_proving()
            && now >= *self.clock.prove_by.get_or_insert(now.checked_add(PROVE_TIME).unwrap_or(now))
        {
            self.is_over = true;
            return Err(ProtocolError {
                what: "did not go on proving who it is within 15 seconds",
                reference: "NVMe Base 2.0 §8.13.2",
            });
        }
        self.clock.retry_at = now.checked_add(RETRY).unwrap_or(now);
        self.clock.look_at = now.checked_add(LOOK).unwrap_or(now);
        self.read_letters();
        self.resume();
        self.check_keep_alive(now)
    }
}

impl StreamSession for TargetSession {
    fn demand(&self) -> Demand {
        if self.is_over || (self.stopping && self.commands.is_idle()) {
            return Demand::Close;
        }
        self.wants()
    }

    #[inline]
    fn on_bytes(&mut self, input: &Chunk) -> Result<usize, ProtocolError> {
        if let Some(keep_alive) = &mut self.clock.keep_alive {
            keep_alive.heard = true;
        }
        let mut at: usize = 0;
        while !self.is_over
            && let Some(taken) = self.step(input, at)?
        {
            at = at.saturating_add(taken);
        }
        Ok(at)
    }

    fn on_secured(&mut self, identity: &[u8]) -> Result<(), ProtocolError> {
        let gone = ProtocolError {
            what: "used a TLS key that is not there any more",
            reference: "TCP Transport 1.1 §3.6.1",
        };
        self.secured = Some(Box::new(self.node.keyring().find(identity).ok_or(gone)?));
        Ok(())
    }

    fn on_placed(&mut self) -> Result<(), ProtocolError> {
        self.placed();
        Ok(())
    }

    fn on_end(&mut self) -> Result<(), ProtocolError> {
        let was_over = std::mem::replace(&mut self.is_over, true);
        self.held.clear();
        self.waiting.clear();
        self.grants.clear();
        self.connecting = None;
        match self.awaiting {
            Awaiting::Head(_) | Awaiting::IcReq(_) => Ok(()),
            _ if was_over => Ok(()),
            _ => Err(ProtocolError {
                what: "left in the middle of a PDU's data",
                reference: "TCP Transport 1.0 §3.6",
            }),
        }
    }

    #[inline]
    fn outbox(&mut self) -> &mut Outbox {
        &mut self.outbox
    }
}

impl Target for TargetSession {
    fn depth(&self) -> u32 {
        MAX_COMMANDS as u32
    }

    #[inline]
    fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
        self.io.pop_front()
    }

    fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
        self.cancels.pop_front()
    }

    fn on_start(&mut self, waker: &Waker) {
        self.ring = self.bell.take().map(|bell| bell(waker));
    }

    #[inline]
    fn on_turn(&mut self) {
        self.read_letters();
        // What was sent meanwhile has made room.
        if !self.grants.is_empty() {
            self.grant();
        }
    }

    #[inline]
    fn on_io(&mut self, done: Completion) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.io_done(done);
        if self.waits() {
            self.resume();
        }
    }

    #[inline]
    fn is_established(&self) -> bool {
        self.queue.is_some()
    }

    fn owed(&self) -> Option<u64> {
        self.commands.owed()
    }

    fn on_stop(&mut self) {
        self.stopping = true;
        self.end_fusing();
    }
}

/// The most commands of one queue: its entries, and those that wait for events.
const MAX_COMMANDS: usize = MQES as usize + 1 + MAX_EVENT_REQUESTS;
/// The most data of one session, in bytes, what waits in its outbox included.
const PAYLOAD_IN_FLIGHT: usize = 64 << 20;
/// Until a queue is connected.
const CONNECT_TIME: Duration = Duration::from_secs(30);
/// For each message of a host that proves who it is: to compute with the largest group takes seconds at most.
const PROVE_TIME: Duration = Duration::from_secs(15);
/// How often an empty pool, locked ranges and older associations are asked again, apart from each completion.
const RETRY: Duration = Duration::from_millis(1);
/// How often who is not rung for looks for letters.
const LOOK: Duration = Duration::from_millis(100);
/// How often it is looked whether the host was heard of, in a Keep Alive Timeout.
const LOOKS: u32 = 4;
