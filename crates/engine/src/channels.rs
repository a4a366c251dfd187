//! The channels of a target session: one to each volume that it uses, opened at the first I/O.

use crate::reactor::Progress;
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::served::Meter;
use blockmux_proto::session::Target;
use blockmux_volume::{Channel, Completion, Core, IoError, Waker};
use std::rc::Rc;

/// A session's channels, and what is in flight in them.
pub(crate) struct Channels {
    exports: Exports,
    open: Vec<Open>,
    core: Rc<dyn Core>,
    waker: Waker,
    done: Vec<Completion>,
    in_flight: u32,
    submitted: u64,
    /// The change of `exports` up to which channels of volumes that are gone have been closed.
    seen: u64,
}

/// One of them.
struct Open {
    volume: VolumeId,
    channel: Box<dyn Channel>,
    meter: Meter,
}

impl Channels {
    /// For a session whose volume ids are places in `exports`; completions wake `waker`.
    pub(crate) fn new(exports: Exports, core: Rc<dyn Core>, waker: Waker) -> Channels {
        let seen = exports.changes();
        Channels {
            exports,
            open: Vec::new(),
            core,
            waker,
            done: Vec::new(),
            in_flight: 0,
            submitted: 0,
            seen,
        }
    }

    /// Whether nothing is in flight.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    /// How many I/O the session ever had.
    #[inline]
    pub(crate) fn submitted(&self) -> u64 {
        self.submitted
    }

    /// Hands every I/O of the session to its channel and every completion back. A completion may lead to the next I/O,
    /// as with commands of several steps: there is more to do if that still goes on after so many rounds.
    #[inline]
    pub(crate) fn move_io(&mut self, session: &mut impl Target) -> Progress {
        if self.exports.changes() != self.seen && self.is_idle() {
            self.seen = self.exports.changes();
            self.open.retain(|open| self.exports.get(open.volume).is_some());
        }
        let mut progress = Progress::Idle;
        for round in 0..ROUNDS_PER_TURN {
            let submitted = self.submit_io(session);
            if submitted {
                progress = Progress::Drained;
            } else if round > 0 {
                return progress;
            }
            if self.in_flight == 0 {
                return progress;
            }
            for Open { channel, meter, .. } in &mut self.open {
                let before = self.done.len();
                channel.kick();
                channel.poll(&mut self.done);
                self.done[before..].iter().filter(|done| done.result.is_err()).for_each(|_| meter.fail());
            }
            if self.done.is_empty() {
                return progress;
            }
            self.in_flight -= self.done.len() as u32;
            progress = Progress::Drained;
            for completion in self.done.drain(..) {
                session.on_io(completion);
            }
        }
        Progress::More
    }

    /// Submits and cancels what the session wants; answers whether anything was submitted.
    #[inline]
    fn submit_io(&mut self, session: &mut impl Target) -> bool {
        let before = self.submitted;
        while let Some((volume, io)) = session.poll_io() {
            self.submitted += 1;
            let tag = io.tag;
            match self.channel(volume, session.depth()) {
                Ok(Open { channel, meter, .. }) => match meter.begin(&io) {
                    Ok(()) => {
                        channel.submit(io);
                        self.in_flight += 1;
                    }
                    Err(error) => {
                        meter.fail();
                        session.on_io(Completion { tag, result: Err(error) });
                    }
                },
                Err(error) => session.on_io(Completion { tag, result: Err(error) }),
            }
        }
        while let Some((volume, tag)) = session.poll_cancel() {
            if let Some(open) = self.open.iter_mut().find(|open| open.volume == volume) {
                open.channel.cancel(tag);
            }
        }
        self.submitted > before
    }

    #[inline]
    fn channel(&mut self, volume: VolumeId, depth: u32) -> Result<&mut Open, IoError> {
        if let Some(at) = self.open.iter().position(|open| open.volume == volume) {
            return Ok(&mut self.open[at]);
        }
        let served = self.exports.served(volume).ok_or(IoError::PathLost)?;
        let channel = served.volume().open(&self.core, depth, self.waker.clone())?;
        self.open.push(Open { volume, channel, meter: Meter::new(&served) });
        self.open.last_mut().ok_or(IoError::PathLost)
    }
}

/// Others get their turn after so many rounds of I/O that each led to the next.
const ROUNDS_PER_TURN: u32 = 16;
