//! A target over raw frames: ports, session, and a channel for each volume in use.

use crate::core::reactor::{EngineCore, Progress, Task};
use crate::net::frames::{FrameHost, FramePorts, PortError, Share, Side};
use crate::serve::audit::StationAudits;
use crate::serve::served_session::ServedSession;
use crate::serve::sessions::Sessions;
use blockmux_proto::driver::session::FrameSession;
use blockmux_proto::driver::target::TargetLifecycle;
use blockmux_proto::exports::Exports;
use blockmux_proto::volume_state::Origin;
use blockmux_volume::Waker;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Serves AoE requests until the core stops.
pub struct FrameTargetTask<S, H: FrameHost = EngineCore> {
    ports: FramePorts<H>,
    served: ServedSession<S>,
    stations: StationAudits,
    core: Rc<H>,
    waker: Waker,
    /// Deadline of stopping.
    ends: Option<Instant>,
}

impl<S: FrameSession + TargetLifecycle + 'static, H: FrameHost> FrameTargetTask<S, H> {
    /// Serves this core's share of the requests at `interfaces` with `session`, whose volume ids
    /// are indices of `exports`; `sessions` lists the stations that use it.
    ///
    /// # Errors
    /// If an interface cannot be opened.
    pub fn spawn(
        core: &Rc<H>,
        interfaces: &[String],
        share: Share,
        session: S,
        exports: Exports,
        sessions: Sessions,
    ) -> Result<(), PortError> {
        let mut failed = None;
        core.try_spawn(|waker| match FramePorts::open(core, waker, interfaces, Side::Target(share)) {
            Ok(ports) => Ok(FrameTargetTask {
                ports,
                served: ServedSession::start(session, exports, core.clone(), waker, origin(interfaces)),
                stations: StationAudits::new(sessions),
                core: core.clone(),
                waker: waker.clone(),
                ends: None,
            }),
            Err((interface, error)) => {
                failed = Some(PortError { interface, error });
                Err(())
            }
        });
        failed.map_or(Ok(()), Err)
    }
}

impl<S: FrameSession + TargetLifecycle, H: FrameHost> Task for FrameTargetTask<S, H> {
    #[inline]
    fn run(&mut self) -> Progress {
        let now = self.core.now();
        if self.core.is_stopping() && self.ends.is_none() {
            self.served.stop(now);
            let ends = now + STOP_TIMEOUT;
            self.ends = Some(ends);
            self.core.wake_at(ends, &self.waker);
        }
        self.served.session.on_turn(now);
        let received = self.ports.take_in(&mut self.served.session, now);
        let moved = self.served.move_io(now);
        while let Some(event) = self.served.session.poll_event() {
            self.stations.on_event(event, |volume| self.served.channels.name(volume));
        }
        let sent = self.ports.send(&mut self.served.session, now);
        self.ports.arm(&self.served.session, now);
        let has_output = !self.served.session.frames(now).is_empty();
        if let Some(ends) = self.ends {
            let is_idle = self.served.channels.is_idle() && !has_output;
            if is_idle || now >= ends {
                return Progress::Done;
            }
        }
        let sent = match sent {
            true if has_output && !self.ports.is_stuck() => Progress::More,
            true => Progress::Drained,
            false => Progress::Idle,
        };
        received.max(moved).max(sent)
    }

    fn is_polled(&self) -> bool {
        true
    }

    fn park(&mut self) {
        self.ports.park();
    }
}

/// The origin of the requests of all interfaces of a session.
fn origin(interfaces: &[String]) -> Origin {
    Origin { protocol: "aoe", listener: interfaces.join(",").into() }
}

/// Longest time to send the remaining replies when the core stops.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
