//! How commands of an I/O queue end, and what that makes of their I/O.

use super::job::Piece;
use super::plan::Kind;
use super::queue::{Connecting, Queue};
use super::refused::Refused;
use super::verdict::{self, Verdict};
use crate::slots::Key;
use blockmux_volume::{Completion, IoError, Op, Output};
use blockmux_wire::nvme::Cqe;
use blockmux_wire::nvmeof::fabrics::AUTHREQ_ATR;

impl Queue {
    /// A command has ended.
    #[inline]
    pub(super) fn on_finished(&mut self, key: Key, cqe: &Cqe) {
        let Some(command) = self.commands.remove(key) else { return };
        let Some(job) = command.piece.job else {
            self.connecting = on_connected(cqe);
            return;
        };
        let mut verdict = verdict::of(cqe.status);
        if verdict == Verdict::Good && command.progress.is_corrupt {
            verdict = Verdict::Later(IoError::Medium);
        } else if verdict == Verdict::Good && !command.progress.is_whole(command.transfer) {
            verdict = Verdict::Failed(IoError::Medium);
        }
        self.finish_piece(command.piece, job, verdict);
        if !self.waiting.is_empty() {
            self.give_memory();
        }
    }

    /// A part of a job has ended: goes on with the job.
    #[inline]
    fn finish_piece(&mut self, piece: Piece, key: Key, verdict: Verdict) {
        let Some(job) = self.jobs.get_mut(key) else { return };
        match verdict {
            Verdict::Good => {}
            Verdict::Later(_) if piece.tries < MAX_TRIES => {
                // Memory that was lent is not written to again.
                if job.io.len == piece.len && piece.kind == Kind::Read && is_lent(job) {
                    job.buffer = None;
                }
                let piece = Piece { tries: piece.tries.saturating_add(1), ..piece };
                return self.later.push_back(piece);
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

/// What the answer to Connect of an I/O queue means.
fn on_connected(cqe: &Cqe) -> Connecting {
    if !cqe.status.is_success() {
        return Connecting::Refused(Refused::Connect(cqe.status));
    }
    if cqe.result.get() as u32 & AUTHREQ_ATR != 0 {
        return Connecting::Refused(Refused::Authentication);
    }
    Connecting::Connected
}

/// How often one command is sent again. With the pauses between them, a namespace may be out of reach for half a
/// minute.
const MAX_TRIES: u32 = 64;
