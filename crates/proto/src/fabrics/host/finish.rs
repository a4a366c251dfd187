//! How commands of an I/O queue end, and what that makes of their I/O.

use super::command::Transfer;
use super::job::{Command, Piece};
use super::plan::Kind;
use super::prove;
use super::queue::{Connecting, Queue};
use super::refused::Refused;
use super::verdict::{self, Verdict};
use crate::session::PathRank;
use crate::slots::Key;
use blockmux_volume::{Completion, IoError, Op, Output};
use blockmux_wire::nvme::Cqe;
use blockmux_wire::nvme::status::StatusField;
use std::time::Duration;

impl Queue {
    /// A command has ended.
    #[inline]
    pub(super) fn on_finished(&mut self, key: Key, cqe: &Cqe) {
        let Some(command) = self.commands.remove(key) else { return };
        let Some(job) = command.piece.job else {
            self.on_connecting(&command, cqe);
            return;
        };
        let mut verdict = verdict::of(cqe.status);
        if verdict == Verdict::Good && command.progress.is_corrupt {
            verdict = Verdict::Later(IoError::Medium);
        } else if verdict == Verdict::Good && !command.progress.is_whole(command.transfer) {
            verdict = Verdict::Failed(IoError::Medium);
        }
        match verdict {
            Verdict::Good => self.access.failing.on_good(),
            Verdict::Astray => self.access.failing.on_failure(),
            _ => {}
        }
        if verdict == Verdict::Elsewhere {
            // Whatever was told before, until the log page has been read again.
            self.access.rank = PathRank::Unusable;
            if !self.access.has_others {
                verdict = Verdict::Later(IoError::PathLost);
            }
        }
        let told = self.retry_delay(cqe.status);
        self.finish_piece(command.piece, job, verdict, told);
        if !self.waiting.is_empty() {
            self.give_memory();
        }
    }

    /// A command of the queue itself has ended: Connect, or one that proves who we are.
    #[cold]
    fn on_connecting(&mut self, command: &Command, cqe: &Cqe) {
        let next = match &mut self.connecting {
            Connecting::Proving(proving, is_asked) => {
                let is_whole = command.progress.is_whole(command.transfer) && !command.progress.is_corrupt;
                let data = match (command.transfer, &command.payload) {
                    (Transfer::In(_), Some(payload)) if is_whole => payload.to_vec(),
                    _ => Vec::new(),
                };
                *is_asked = false;
                proving.on_answer(cqe, &data).map(|is_done| is_done.then_some(Connecting::Connected))
            }
            _ if !cqe.status.is_success() => Err(Refused::Connect(cqe.status)),
            _ => {
                let asked = prove::asked_for(cqe.result.get(), self.credentials.as_ref(), &self.names);
                let connecting = |proving: Option<Box<_>>| match proving {
                    Some(proving) => Connecting::Proving(proving, false),
                    None => Connecting::Connected,
                };
                asked.map(|proving| Some(connecting(proving)))
            }
        };
        match next {
            Ok(None) => {}
            Ok(Some(next)) => self.connecting = next,
            Err(refused) => self.connecting = Connecting::Refused(refused),
        }
    }

    /// A part of a job has ended: goes on with the job.
    #[inline]
    fn finish_piece(&mut self, piece: Piece, key: Key, verdict: Verdict, told: Option<Duration>) {
        let Some(job) = self.jobs.get_mut(key) else { return };
        match verdict {
            Verdict::Good => {}
            Verdict::Later(_) if piece.tries < MAX_TRIES => {
                // Memory that was lent is not written to again.
                if job.io.len == piece.len && piece.kind == Kind::Read && is_lent(job) {
                    job.buffer = None;
                }
                let piece = piece.again();
                return self.later.push(piece, told);
            }
            Verdict::Elsewhere | Verdict::Astray => {
                job.is_misplaced = true;
                job.fail(IoError::PathLost);
            }
            Verdict::Illegal => self.do_otherwise(piece, key),
            Verdict::Later(error) | Verdict::Failed(error) => job.fail(error),
        }
        let Some(job) = self.jobs.get_mut(key) else { return };
        job.in_flight = job.in_flight.saturating_sub(1);
        if job.error.is_none() && job.has_more() {
            if !std::mem::replace(&mut job.is_ready, true) {
                self.ready.push_back(key);
            }
        } else if job.in_flight == 0 {
            self.complete(key);
        }
    }

    /// How long the controller wants the command not to be sent again, if it says so.
    #[inline]
    fn retry_delay(&self, status: StatusField) -> Option<Duration> {
        let which = usize::from(status.retry_delay()).checked_sub(1)?;
        self.retry_delays.get(which).copied().filter(|delay| !delay.is_zero())
    }

    /// The controller does not know a command after all: does the same with others, or fails the job.
    #[cold]
    fn do_otherwise(&mut self, piece: Piece, key: Key) {
        let Some(job) = self.jobs.get_mut(key) else { return };
        match (piece.kind, job.io.op) {
            (Kind::WriteZeroes { .. }, Op::WriteZeroes { only_fast: false, fua, .. }) => {
                self.terms.write_zeroes = None;
                job.go_back(piece.offset, self.terms.written_zeroes(fua));
            }
            // What is no longer needed may stay.
            (Kind::Deallocate, _) => {
                self.terms.deallocate = None;
                job.issued = job.io.len;
            }
            _ => job.fail(IoError::Unsupported),
        }
    }

    #[inline]
    fn complete(&mut self, key: Key) {
        let Some(job) = self.jobs.remove(key) else { return };
        if job.is_misplaced && job.error == Some(IoError::PathLost) {
            return self.access.misplaced.push(job.io);
        }
        let result = match job.error {
            Some(error) => Err(error),
            None if job.io.op == Op::Read => Ok(Output::Data(job.io.data.or(job.buffer).unwrap_or_default())),
            None => Ok(Output::Nothing),
        };
        self.done.push_back(Completion { tag: job.io.tag, result });
    }
}

fn is_lent(job: &super::job::Job) -> bool {
    job.buffer.as_ref().is_some_and(|list| list.segs().iter().any(|seg| !seg.is_writable()))
}

/// How often one command is sent again. With the pauses between them, a namespace may be out of reach for half a
/// minute.
const MAX_TRIES: u32 = 64;
