//! A target's side of one connection: socket, session, and a channel for each volume that the peer uses.

use crate::connection::{Broken, Connection, Inflow};
use crate::host::Host;
use crate::listener::Permit;
use crate::reactor::{EngineCore, Progress, Task};
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::session::{Demand, Target};
use blockmux_volume::{Channel, Completion, Core, IoError, Waker};
use std::rc::Rc;
use tracing::{debug, warn};

/// Serves one connection until either side ends it.
pub struct TargetTask<S: Target, H: Host = EngineCore> {
    connection: Connection<H>,
    session: S,
    exports: Exports,
    /// Opened at the first I/O to a volume.
    channels: Vec<(VolumeId, Box<dyn Channel>)>,
    core: Rc<H>,
    waker: Waker,
    done: Vec<Completion>,
    in_flight: u32,
    /// Why no more is received; the connection ends once nothing is in flight and everything is sent.
    ending: Option<Ending>,
    told_to_stop: bool,
    /// Given back when the connection ends.
    _permit: Permit,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// The peer reads what is left to send.
    Softly,
    /// The socket is gone.
    Gone,
}

impl<S: Target + 'static, H: Host> TargetTask<S, H> {
    /// Serves `stream` on `core` with `session`, whose volume ids are places in `exports`.
    pub fn spawn(core: &Rc<H>, stream: H::Stream, session: S, exports: Exports, permit: Permit) {
        core.spawn(|waker| TargetTask {
            connection: Connection::new(stream, core, waker),
            session,
            exports,
            channels: Vec::new(),
            core: core.clone(),
            waker: waker.clone(),
            done: Vec::new(),
            in_flight: 0,
            ending: None,
            told_to_stop: false,
            _permit: permit,
        });
    }
}

impl<S: Target, H: Host> TargetTask<S, H> {
    /// Hands every I/O of the session to its channel and every completion back; answers whether there was any.
    #[inline]
    fn move_io(&mut self) -> bool {
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
        if self.in_flight == 0 {
            return any;
        }
        for (_, channel) in &mut self.channels {
            channel.kick();
            channel.poll(&mut self.done);
        }
        self.in_flight -= self.done.len() as u32;
        any |= !self.done.is_empty();
        for completion in self.done.drain(..) {
            self.session.on_io(completion);
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

    #[inline]
    fn turn(&mut self) -> Result<Progress, Broken> {
        let mut progress = Progress::Idle;
        if self.core.is_stopping() && !self.told_to_stop {
            self.told_to_stop = true;
            self.session.on_stop();
        }
        self.connection.check_deadline(&mut self.session)?;
        loop {
            let inflow = match self.ending {
                None => self.connection.receive(&mut self.session)?,
                Some(_) => Inflow::Finished,
            };
            match inflow {
                Inflow::More => progress = Progress::More,
                Inflow::Drained if progress == Progress::Idle => progress = Progress::Drained,
                Inflow::Finished if self.ending.is_none() => self.ending = Some(Ending::Softly),
                _ => {}
            }
            let moved = self.move_io();
            if self.connection.send(self.session.outbox())? || moved {
                progress = if progress == Progress::More { progress } else { Progress::Drained };
            }
            if inflow != Inflow::Blocked {
                return Ok(progress);
            }
            // The session may have begun to wait for a deadline just now; nothing else would wake it.
            self.connection.check_deadline(&mut self.session)?;
            // What was blocked by I/O in flight or by a full outbox may go on now.
            if matches!(self.session.demand(), Demand::Nothing) {
                return Ok(progress);
            }
        }
    }

    /// The connection is broken: whatever is in flight still completes, to nobody.
    fn on_broken(&mut self, broken: &Broken) {
        let peer = self.connection.peer();
        match broken {
            Broken::Protocol(error) => warn!(peer, "closing: peer {error}"),
            Broken::Socket(error) => debug!(peer, "connection lost: {error}"),
        }
        if matches!(broken, Broken::Protocol(_)) {
            // The session may have a last word for the peer.
            let _ = self.connection.send(self.session.outbox());
        }
        self.session.outbox().clear();
        self.ending = Some(Ending::Gone);
    }
}

impl<S: Target, H: Host> Task for TargetTask<S, H> {
    #[inline]
    fn run(&mut self) -> Progress {
        let mut progress = Progress::Idle;
        if self.ending != Some(Ending::Gone) {
            match self.turn() {
                Ok(made) => progress = made,
                Err(broken) => self.on_broken(&broken),
            }
        }
        if self.ending == Some(Ending::Gone) {
            self.move_io();
            self.session.outbox().clear();
        }
        if self.ending.is_some() && self.in_flight == 0 && self.session.outbox().is_empty() {
            debug!(peer = self.connection.peer(), "connection closed");
            return Progress::Done;
        }
        progress
    }

    fn is_polled(&self) -> bool {
        true
    }

    fn park(&mut self) {
        match self.ending {
            Some(Ending::Gone) => {}
            _ => self.connection.park(),
        }
    }
}
