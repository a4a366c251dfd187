//! Full feature phase: the state of a session, its window of commands, its deadlines and its end.

use super::receive::Reading;
use super::{LATE, UnitInfo, UnitRefused};
use crate::iscsi::digest::Digests;
use crate::iscsi::login::initiator::Established;
use crate::iscsi::login::operational::{Key as Name, Parameters};
use crate::outbox::Outbox;
use crate::scsi::Lun;
use crate::scsi::initiator::Queue;
use crate::session::{Demand, ProtocolError};
use blockmux_volume::{Chunk, Completion, Io, Pool};
use std::time::{Duration, Instant};

/// A session in full feature phase.
pub(super) struct FullFeature {
    pub(super) lun: Lun,
    pub(super) queue: Queue<Progress>,
    pub(super) terms: Terms,
    pub(super) pool: Pool,
    pub(super) reading: Reading,
    pub(super) cmd_sn: u32,
    pub(super) max_cmd_sn: u32,
    pub(super) exp_stat_sn: u32,
    /// Answers to the target's pings that may be unsent.
    pub(super) pongs: u32,
    ending: Ending,
    refused: Option<UnitRefused>,
    /// When the unit has to be known.
    deadline: Instant,
    timers: Timers,
}

/// What login agreed on, as far as every PDU depends on it.
#[derive(Clone, Copy)]
pub(super) struct Terms {
    pub(super) digests: Digests,
    pub(super) immediate_data: bool,
    pub(super) initial_r2t: bool,
    /// In bytes.
    pub(super) first_burst: u32,
    pub(super) max_burst: u32,
    pub(super) max_send_segment: u32,
    pub(super) max_receive_segment: usize,
}

/// How far a command's data has moved.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Progress {
    /// The next byte of data-in, or the first of data-out that was neither sent nor asked for.
    pub(super) next: u32,
    /// Of the next Data-In.
    pub(super) data_sn: u32,
    /// Of the next R2T.
    pub(super) r2t_sn: u32,
}

/// How far the session has come with ending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    No,
    /// The target asked for a logout: what was not sent is kept for another session.
    ByTarget,
    /// Our side is stopping: what was submitted completes here.
    ByUs,
    /// The logout request is out, nothing may follow.
    LoggingOut,
    /// It was answered, or the session was given up.
    Over,
}

struct Timers {
    /// The latest time that this session was told.
    now: Instant,
    next_tick: Instant,
    /// Something has come since the last tick.
    heard: bool,
    /// A ping is unanswered.
    pinged: bool,
    /// When to send again what met a busy unit; `None`: the time is to be asked for first.
    retry_at: Option<Instant>,
    pause: Duration,
}

impl FullFeature {
    pub(super) fn new(lun: Lun, established: Established, pool: Pool, deadline: Instant) -> FullFeature {
        let Established { parameters, cmd_sn, max_cmd_sn, exp_stat_sn } = established;
        let now = deadline.checked_sub(super::LOGIN_TIMEOUT).unwrap_or(deadline);
        FullFeature {
            lun,
            queue: Queue::new(lun, pool.clone()),
            terms: Terms::new(&parameters),
            pool,
            reading: Reading::HEAD,
            cmd_sn,
            max_cmd_sn,
            exp_stat_sn,
            pongs: 0,
            ending: Ending::No,
            refused: None,
            deadline,
            timers: Timers {
                now,
                next_tick: now.checked_add(PING_INTERVAL).unwrap_or(now),
                heard: true,
                pinged: false,
                retry_at: None,
                pause: FIRST_PAUSE,
            },
        }
    }

    /// What the bring-up has found, or why it failed.
    #[inline]
    pub(super) fn bring_up(&self) -> (Option<&UnitInfo>, Option<UnitRefused>) {
        (self.queue.unit(), self.refused.clone())
    }

    pub(super) fn luns(&self) -> &[Lun] {
        self.queue.luns()
    }

    pub(super) fn is_over(&self) -> bool {
        self.ending == Ending::Over
    }

    #[inline]
    pub(super) fn demand(&self, outbox: &Outbox) -> Demand {
        if self.ending == Ending::Over {
            return Demand::Close;
        }
        if self.pongs >= MAX_PONGS && !outbox.is_empty() {
            return Demand::Nothing;
        }
        self.reading.demand(self.terms.digests)
    }

    #[inline]
    pub(super) fn on_bytes(
        &mut self,
        input: &Chunk,
        start: usize,
        outbox: &mut Outbox,
    ) -> Result<usize, ProtocolError> {
        self.timers.heard = true;
        if outbox.is_empty() {
            self.pongs = 0;
        }
        let taken = self.receive(input, start, outbox)?;
        self.advance(outbox);
        Ok(taken)
    }

    #[inline]
    pub(super) fn on_placed(&mut self, outbox: &mut Outbox) -> Result<(), ProtocolError> {
        self.timers.heard = true;
        self.placed()?;
        self.advance(outbox);
        Ok(())
    }

    /// The target has closed its side; whether it may.
    pub(super) fn on_end(&mut self) -> bool {
        let is_allowed = self.queue.is_quiet() && self.reading.is_between_pdus();
        self.ending = Ending::Over;
        is_allowed
    }

    #[inline]
    pub(super) fn room(&self) -> usize {
        if self.ending != Ending::No {
            return 0;
        }
        let window = self.window().saturating_sub(self.queue.unsent());
        self.queue.room().min(window)
    }

    #[inline]
    pub(super) fn submit(&mut self, io: Io, outbox: &mut Outbox) {
        self.queue.submit(io);
        self.send_commands(outbox);
    }

    #[inline]
    pub(super) fn poll_done(&mut self) -> Option<Completion> {
        self.queue.poll_done()
    }

    pub(super) fn take_unfinished(&mut self) -> Vec<Io> {
        self.ending = Ending::Over;
        self.reading = Reading::HEAD;
        self.queue.take_unfinished()
    }

    /// Ends softly once everything is complete; before the unit is known, at once.
    pub(super) fn stop(&mut self, outbox: &mut Outbox) {
        if matches!(self.ending, Ending::No | Ending::ByTarget) {
            self.ending = Ending::ByUs;
            self.queue.close();
            // What was kept for another session has none to come.
            self.queue.undrain();
            if self.queue.unit().is_none() {
                self.queue.drain();
            }
        }
        self.advance(outbox);
    }

    /// The target wants the session to end: what is under way ends here.
    pub(super) fn leave(&mut self) {
        if self.ending == Ending::No {
            self.ending = Ending::ByTarget;
            self.queue.drain();
        }
    }

    /// The logout was answered.
    pub(super) fn on_logged_out(&mut self) -> Result<(), ProtocolError> {
        if self.ending != Ending::LoggingOut {
            return Err(super::reply::error("answered a logout that was not asked for", "RFC 7143 §11.15"));
        }
        self.ending = Ending::Over;
        Ok(())
    }

    /// The unit turned out to be none for us.
    pub(super) fn refuse(&mut self, refused: UnitRefused) {
        self.refused.get_or_insert(refused);
    }

    /// Sends what may be sent, and logs out when it is time.
    #[inline]
    pub(super) fn advance(&mut self, outbox: &mut Outbox) {
        if self.queue.is_strange() {
            // A new session asks what it is now.
            self.leave();
        }
        self.send_commands(outbox);
        let is_due = match self.ending {
            Ending::No | Ending::LoggingOut | Ending::Over => false,
            Ending::ByTarget => self.queue.is_quiet(),
            Ending::ByUs if self.queue.unit().is_none() => self.queue.is_quiet(),
            Ending::ByUs => self.queue.is_empty(),
        };
        if is_due {
            self.send_logout(outbox);
            self.ending = Ending::LoggingOut;
        }
    }

    /// Whether commands may be sent at all.
    #[inline]
    pub(super) fn may_send(&self) -> bool {
        !matches!(self.ending, Ending::LoggingOut | Ending::Over)
    }

    /// How many more commands the target takes (RFC 7143 §4.2.2.1).
    #[inline]
    pub(super) fn window(&self) -> usize {
        let left = self.max_cmd_sn.wrapping_sub(self.cmd_sn).wrapping_add(1);
        if left > SERIAL_HALF { 0 } else { left as usize }
    }

    /// Takes the numbers that every PDU of a target has.
    #[inline]
    pub(super) fn on_numbers(&mut self, exp_cmd_sn: u32, max_cmd_sn: u32) {
        // One less than ExpCmdSN is a closed window; less than that says nothing.
        let is_sane = max_cmd_sn.wrapping_sub(exp_cmd_sn).wrapping_add(1) <= SERIAL_HALF;
        let is_newer = max_cmd_sn.wrapping_sub(self.max_cmd_sn) <= SERIAL_HALF;
        if is_sane && is_newer {
            self.max_cmd_sn = max_cmd_sn;
        }
    }

    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        if self.ending == Ending::Over {
            return None;
        }
        let mut next = self.timers.next_tick;
        if self.queue.unit().is_none() {
            next = next.min(self.deadline);
        }
        if self.queue.has_later() {
            next = next.min(self.timers.retry_at.unwrap_or(self.timers.now));
        }
        Some(next)
    }

    pub(super) fn on_timeout(&mut self, now: Instant, outbox: &mut Outbox) -> Result<(), ProtocolError> {
        self.timers.now = now;
        if self.queue.unit().is_none() && now >= self.deadline {
            return Err(LATE);
        }
        self.retry(now, outbox);
        if now < self.timers.next_tick {
            return Ok(());
        }
        self.timers.next_tick = now.checked_add(PING_INTERVAL).unwrap_or(now);
        if std::mem::take(&mut self.timers.heard) {
            self.timers.pinged = false;
        } else if std::mem::replace(&mut self.timers.pinged, true) || !self.may_send() {
            return Err(ProtocolError {
                what: "did not answer within 10 seconds",
                reference: "RFC 7143 §11.18, NOP-Out",
            });
        } else {
            self.send_ping(outbox);
        }
        Ok(())
    }

    /// Sends again what met a busy unit, with growing pauses as long as it stays busy.
    fn retry(&mut self, now: Instant, outbox: &mut Outbox) {
        if !self.queue.has_later() {
            (self.timers.retry_at, self.timers.pause) = (None, FIRST_PAUSE);
            return;
        }
        match self.timers.retry_at {
            None => self.timers.retry_at = now.checked_add(self.timers.pause),
            Some(when) if now >= when => {
                self.timers.retry_at = None;
                self.timers.pause = self.timers.pause.saturating_mul(2).min(LONGEST_PAUSE);
                self.queue.resume();
                self.advance(outbox);
            }
            Some(_) => {}
        }
    }
}

impl Terms {
    fn new(parameters: &Parameters) -> Terms {
        Terms {
            digests: Digests {
                header: parameters.is_on(Name::HeaderDigest),
                data: parameters.is_on(Name::DataDigest),
            },
            immediate_data: parameters.is_on(Name::ImmediateData),
            initial_r2t: parameters.is_on(Name::InitialR2T),
            first_burst: parameters.get(Name::FirstBurstLength),
            max_burst: parameters.get(Name::MaxBurstLength),
            max_send_segment: parameters.max_send_data_segment_length() as u32,
            max_receive_segment: parameters.get(Name::MaxRecvDataSegmentLength) as usize,
        }
    }
}

/// Serial numbers further apart than this are behind each other (RFC 1982).
const SERIAL_HALF: u32 = 1 << 31;

/// How long a target may be silent before it is pinged, and then until it is given up.
const PING_INTERVAL: Duration = Duration::from_secs(10);

/// Between two attempts at a busy unit.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Answers to pings that may wait to be sent; then nothing more is received.
const MAX_PONGS: u32 = 256;
