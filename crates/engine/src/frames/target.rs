//! A target on frames: ports, session, and a channel for each volume that is used.

use super::{FrameHost, Side, Wire};
use crate::reactor::{EngineCore, Progress, Task};
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::session::{FrameSession, Target};
use blockmux_volume::{Channel, Completion, Core, IoError, Waker};
use std::io;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Serves whoever sends frames until the core stops.
pub struct FrameTargetTask<S, H: FrameHost = EngineCore> {
    wire: Wire<H>,
    session: S,
    exports: Exports,
    /// Opened at the first I/O to a volume.
    channels: Vec<(VolumeId, Box<dyn Channel>)>,
    core: Rc<H>,
    waker: Waker,
    done: Vec<Completion>,
    in_flight: u32,
    /// When it ends at the latest, once it has been told to stop.
    ends: Option<Instant>,
}

/// An interface that cannot be served, and why.
#[derive(Debug, thiserror::Error)]
#[error("interface {interface}: {error}")]
pub struct PortError {
    /// Its name.
    pub interface: String,
    /// What the system says.
    pub error: io::Error,
}

impl<S: FrameSession + Target + 'static, H: FrameHost> FrameTargetTask<S, H> {
    /// Serves at `interfaces` on `core` with `session`, whose volume ids are places in `exports`.
    ///
    /// # Errors
    /// If an interface cannot be opened.
    pub fn spawn(core: &Rc<H>, interfaces: &[String], session: S, exports: Exports) -> Result<(), PortError> {
        let mut failed = None;
        core.try_spawn(|waker| match Wire::open(core, waker, interfaces, Side::Target) {
            Ok(wire) => Ok(FrameTargetTask {
                wire,
                session,
                exports,
                channels: Vec::new(),
                core: core.clone(),
                waker: waker.clone(),
                done: Vec::new(),
                in_flight: 0,
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

impl<S: FrameSession + Target, H: FrameHost> FrameTargetTask<S, H> {
    /// Hands every I/O of the session to its channel and every completion back, a few rounds of both.
    #[inline]
    fn move_io(&mut self) -> Progress {
        let mut progress = Progress::Idle;
        for round in 0..ROUNDS_PER_TURN {
            let submitted = self.submit_io();
            if submitted {
                progress = Progress::Drained;
            } else if round > 0 {
                return progress;
            }
            if self.in_flight == 0 {
                return progress;
            }
            for (_, channel) in &mut self.channels {
                channel.kick();
                channel.poll(&mut self.done);
            }
            if self.done.is_empty() {
                return progress;
            }
            self.in_flight -= self.done.len() as u32;
            progress = Progress::Drained;
            for completion in self.done.drain(..) {
                self.session.on_io(completion);
            }
        }
        Progress::More
    }

    #[inline]
    fn submit_io(&mut self) -> bool {
        let mut any = false;
        while let Some((volume, io)) = self.session.poll_io() {
            any = true;
            let tag = io.tag;
            match self.channel(volume) {
                Ok(channel) => {
                    channel.submit(io);
                    self.in_flight += 1;
                }
                Err(error) => self.session.on_io(Completion { tag, result: Err(error) }),
            }
        }
        any
    }

    #[inline]
    fn channel(&mut self, volume: VolumeId) -> Result<&mut Box<dyn Channel>, IoError> {
        if let Some(at) = self.channels.iter().position(|(id, _)| *id == volume) {
            return Ok(&mut self.channels[at].1);
        }
        let export = self.exports.get(volume).ok_or(IoError::PathLost)?;
        let core: Rc<dyn Core> = self.core.clone();
        let channel = export.volume.open(&core, self.session.depth(), self.waker.clone())?;
        self.channels.push((volume, channel));
        Ok(&mut self.channels.last_mut().ok_or(IoError::PathLost)?.1)
    }
}

impl<S: FrameSession + Target, H: FrameHost> Task for FrameTargetTask<S, H> {
    #[inline]
    fn run(&mut self) -> Progress {
        let now = self.core.now();
        if self.core.is_stopping() && self.ends.is_none() {
            self.session.on_stop();
            let ends = now + STOPS_WITHIN;
            self.ends = Some(ends);
            self.core.wake_at(ends, &self.waker);
        }
        self.wire.check_time(&mut self.session, now);
        let received = self.wire.receive(&mut self.session, now);
        let moved = self.move_io();
        let sent = self.wire.send(&mut self.session, now);
        self.wire.arm(&self.session, now);
        if let Some(ends) = self.ends {
            let is_idle = self.in_flight == 0 && self.session.frames(now).is_empty();
            if is_idle || now >= ends {
                return Progress::Done;
            }
        }
        match (received, moved) {
            (Progress::More, _) | (_, Progress::More) => Progress::More,
            (Progress::Idle, Progress::Idle) if !sent => Progress::Idle,
            _ if self.wire.is_stuck() => Progress::Drained,
            _ if sent && !self.session.frames(now).is_empty() => Progress::More,
            _ => Progress::Drained,
        }
    }

    fn is_polled(&self) -> bool {
        true
    }

    fn park(&mut self) {
        self.wire.park();
    }
}

/// Others get their turn after so many rounds of I/O that each led to the next.
const ROUNDS_PER_TURN: u32 = 16;
/// What is not sent by then, on an interface that is stuck, is lost.
const STOPS_WITHIN: Duration = Duration::from_secs(5);
