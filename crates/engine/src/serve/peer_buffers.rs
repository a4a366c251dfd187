//! Slow peers. One is tolerated, unless it holds receive buffers without sending the rest of its
//! data, or does not read its replies: if the pool is short, such a peer is disconnected after
//! [`HELD_BUFFERS_TIMEOUT`]. So is a peer that has closed its side while the session cannot accept
//! its remaining input, unless I/O for it is in flight.
//!
//! The two checks are separate: one looks after a minute whether the peer owes data, the other
//! every half second whether it transfers data (`StallWatch`). Each ends connections that the
//! other must not end.

use crate::carrier::connection::Broken;
use crate::carrier::{Awaited, Carrier};
use crate::serve::peer_core::PeerCore;
use crate::serve::served_session::ServedSession;
use crate::serve::stall::StallWatch;
use blockmux_proto::driver::session::ProtocolError;
use blockmux_proto::driver::target::TargetLifecycle;
use blockmux_volume::Core;
use std::time::{Duration, Instant};

/// Observes the buffers that one peer holds.
#[derive(Default)]
pub(crate) struct PeerBuffers {
    /// Number of times that the output was sent completely.
    sent_outputs: u64,
    /// Made when the peer holds buffers, and kept for [`HELD_BUFFERS_TIMEOUT`], so that requests
    /// allocate nothing. Most connections idle.
    observation: Option<Box<Observation>>,
}

#[derive(Default)]
struct Observation {
    /// Set while the peer holds buffers.
    held: Option<HeldBuffers>,
    /// Set while the peer holds payload buffers: observes whether it transfers data.
    stall: Option<StallWatch>,
}

#[derive(Clone, Copy)]
struct HeldBuffers {
    /// When the peer is checked again.
    until: Instant,
    /// Requests received and outputs sent until the last check.
    moved: u64,
    /// Data that the peer was asked for and has not sent.
    owed: Option<u64>,
}

impl PeerBuffers {
    /// The peer has taken all output.
    #[inline]
    pub(crate) fn on_output_sent(&mut self) {
        self.sent_outputs += 1;
    }

    /// Checks the peer.
    ///
    /// # Errors
    /// If its connection must end.
    #[inline]
    pub(crate) fn check<S: TargetLifecycle, C: Carrier<S>>(
        &mut self,
        served: &mut ServedSession<S>,
        carrier: &C,
        core: &PeerCore<C::Host>,
    ) -> Result<(), Broken> {
        if let Some(held) = self.observation.as_ref().and_then(|observation| observation.held) {
            self.check_held(held, served, carrier, core)?;
        }
        let Some(account) = core.pool.account() else { return Ok(()) };
        if account.is_waiting() || core.pool.is_short() {
            account.set_moved(carrier.moved_bytes());
        }
        if self.stall().is_none() { Ok(()) } else { self.check_stall(served, carrier, core) }
    }

    #[inline]
    fn stall(&mut self) -> Option<&mut StallWatch> {
        self.observation.as_mut()?.stall.as_mut()
    }

    /// Disconnects a peer that has held buffers without progress since the last check, if others
    /// need them.
    #[cold]
    fn check_held<S: TargetLifecycle, C: Carrier<S>>(
        &mut self,
        held: HeldBuffers,
        served: &mut ServedSession<S>,
        carrier: &C,
        core: &PeerCore<C::Host>,
    ) -> Result<(), ProtocolError> {
        if core.now() < held.until {
            return Ok(());
        }
        self.observation.iter_mut().for_each(|observation| observation.held = None);
        self.observation.take_if(|observation| observation.stall.is_none());
        let is_still = held.moved == self.moved(served);
        if is_still && is_abandoned(served, carrier) {
            return Err(ProtocolError {
                what: "closed its side, and its unread input could not be processed for a minute",
                reference: "this server's limit",
            });
        }
        // Other traffic does not excuse the missing data.
        let owes = held.owed.is_some() && held.owed == served.session.owed();
        if core.pool.is_short() && (owes || is_still && holds_buffers(served, carrier)) {
            return Err(ProtocolError {
                what: "held buffers for a minute without progress while others need them",
                reference: "this server's limit",
            });
        }
        Ok(())
    }

    /// Checks whether a peer that holds buffers transfers data, and ends the connection if it was
    /// evicted.
    #[cold]
    fn check_stall<S: TargetLifecycle, C: Carrier<S>>(
        &mut self,
        served: &mut ServedSession<S>,
        carrier: &C,
        core: &PeerCore<C::Host>,
    ) -> Result<(), Broken> {
        let (Some(account), Some(stall)) = (core.pool.account(), self.stall()) else { return Ok(()) };
        if account.is_evicted() {
            return Err(Broken::Evicted(account.held_bytes()));
        }
        let is_moving = account.is_stalled() && stall.has_transferred(carrier.transferred_bytes());
        if is_moving || !holds_buffers(served, carrier) || account.caused_bytes() == 0 {
            account.resume();
            self.observation.iter_mut().for_each(|observation| observation.stall = None);
            return Ok(());
        }
        let now = core.now();
        if now < stall.next_check {
            return Ok(());
        }
        stall.check(now, carrier.moved_bytes(), carrier.transferred_bytes(), &core.pool);
        if account.is_evicted() {
            return Err(Broken::Evicted(account.held_bytes()));
        }
        core.wake_at(stall.next_check, served.channels.waker());
        Ok(())
    }

    /// Begins to observe a peer that holds buffers, before its task waits.
    pub(crate) fn park<S: TargetLifecycle, C: Carrier<S>>(
        &mut self,
        served: &mut ServedSession<S>,
        carrier: &C,
        core: &PeerCore<C::Host>,
    ) {
        let holds = holds_buffers(served, carrier);
        if !holds && !is_abandoned(served, carrier) {
            return;
        }
        let moved = self.moved(served);
        let observation = self.observation.get_or_insert_default();
        if observation.held.is_none() {
            let until = core.now() + HELD_BUFFERS_TIMEOUT;
            observation.held = Some(HeldBuffers { until, moved, owed: served.session.owed() });
            core.wake_at(until, served.channels.waker());
        }
        if observation.stall.is_none()
            && core.pool.account().is_some_and(|account| account.held_bytes() > 0)
            && holds
        {
            let stall = StallWatch::new(core.now(), carrier.moved_bytes());
            core.wake_at(stall.next_check, served.channels.waker());
            observation.stall = Some(stall);
        }
    }

    /// Progress of the peer: requests received and outputs sent.
    fn moved<S>(&self, served: &ServedSession<S>) -> u64 {
        served.channels.submitted() + self.sent_outputs
    }
}

/// Whether the peer causes buffers to be held: by unread replies, by data that it owes, or by an
/// incomplete message.
fn holds_buffers<S: TargetLifecycle, C: Carrier<S>>(served: &mut ServedSession<S>, carrier: &C) -> bool {
    carrier.has_output(&mut served.session)
        || served.session.owed().is_some()
        || carrier.awaits(&served.session) == Awaited::Rest
}

/// Whether the peer has closed its side while none of its requests is in flight.
fn is_abandoned<S, C: Carrier<S>>(served: &ServedSession<S>, carrier: &C) -> bool {
    carrier.is_abandoned() && served.channels.is_idle()
}

/// How long a peer may hold buffers that others need.
pub const HELD_BUFFERS_TIMEOUT: Duration = Duration::from_secs(60);
