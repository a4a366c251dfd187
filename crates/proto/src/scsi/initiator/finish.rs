//! How commands end, and what that makes of their I/O.

use super::bring_up::{Learned, UnitRefused};
use super::extents;
use super::job::Piece;
use super::news::question;
use super::plan::{Kind, Terms};
use super::queue::Queue;
use super::sense::SenseCode;
use super::verdict::{self, Verdict};
use crate::job::Next;
use crate::scsi::Status;
use crate::slots::Key;
use blockmux_volume::{Completion, Extent, IoError, Op, Output};

/// How a command ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outcome<'a> {
    /// The status.
    pub(crate) status: Status,
    /// As it came; may be empty.
    pub(crate) sense: &'a [u8],
    /// How much data moved, in bytes.
    pub(crate) moved: u32,
}

impl<T: Default> Queue<T> {
    /// A command has ended.
    ///
    /// # Errors
    /// If the unit turns out to be no volume for us.
    #[inline]
    pub(crate) fn finish(&mut self, key: Key, outcome: Outcome<'_>) -> Result<(), UnitRefused> {
        let Some(command) = self.commands.get_mut(key) else { return Ok(()) };
        let (piece, is_whole) = (command.piece, command.is_whole(outcome.moved));
        let sense = match outcome.status {
            Status::CHECK_CONDITION => SenseCode::parse(outcome.sense),
            _ => None,
        };
        let mut verdict = verdict::of(outcome.status, sense);
        if let Some(code) = sense {
            self.on_sense(code);
        }
        let Some(job) = piece.job else { return self.on_answer(key, verdict, sense, outcome.moved) };
        if verdict == Verdict::Good && !is_whole {
            verdict = Verdict::Failed(IoError::Medium);
        }
        if piece.kind == Kind::Status && verdict == Verdict::Good {
            self.on_lba_status(key, job, outcome.moved);
        } else {
            self.commands.discard(key);
        }
        self.finish_piece(piece, job, verdict);
        if !self.waiting.is_empty() {
            self.give_memory();
        }
        Ok(())
    }

    /// An answer to the bring-up.
    fn on_answer(
        &mut self,
        key: Key,
        verdict: Verdict,
        sense: Option<SenseCode>,
        moved: u32,
    ) -> Result<(), UnitRefused> {
        let Some(command) = self.commands.remove(key) else { return Ok(()) };
        if let Some(question) = question(command.piece.kind) {
            self.on_news(question, verdict, &command, moved);
            return Ok(());
        }
        let Some(bring_up) = &mut self.bring_up else { return Ok(()) };
        let data = command.received(moved);
        match bring_up.on_done(verdict, sense, &data)? {
            Learned::More => self.asked = false,
            Learned::Later => self.later.push_back(command.piece),
            Learned::All => {
                if let Some(bring_up) = self.bring_up.take() {
                    let (unit, luns) = bring_up.into_parts();
                    (self.terms, self.info) = (Terms::new(&unit), unit.volume_info());
                    (self.unit, self.luns) = (Some(unit), luns);
                    self.news.on_size(self.info.size);
                    self.ask_for_access();
                }
            }
        }
        Ok(())
    }

    fn on_lba_status(&mut self, key: Key, job: Key, moved: u32) {
        let Some(command) = self.commands.remove(key) else { return };
        let data = command.received(moved);
        let Some(job) = self.jobs.get_mut(job) else { return };
        let blocks = self.terms.blocks(job.io.offset, job.io.len);
        let asked = job.io.len.wrapping_shr(self.terms.block_len.trailing_zeros());
        let (block_len, is_zero) = (self.terms.block_len, self.terms.unmapped_is_zero);
        job.extents = extents::parse(&data, blocks.lba, asked, block_len, is_zero);
    }

    /// A part of a job has ended: goes on with the job.
    #[inline]
    fn finish_piece(&mut self, piece: Piece, key: Key, verdict: Verdict) {
        let Some(job) = self.jobs.get_mut(key) else { return };
        match verdict {
            Verdict::Good => {}
            Verdict::Again | Verdict::Later if piece.tries < MAX_TRIES => {
                let piece = piece.again();
                let queue = if verdict == Verdict::Again { &mut self.again } else { &mut self.later };
                return queue.push_back(piece);
            }
            Verdict::Again => job.fail(IoError::Aborted),
            Verdict::Later => job.fail(IoError::NoMemory),
            Verdict::Elsewhere => {
                job.is_misplaced = self.access.has_others;
                job.fail(IoError::PathLost);
            }
            Verdict::Illegal(_) => {
                if let Some(again) = self.do_otherwise(piece, key) {
                    return self.again.push_back(again);
                }
            }
            Verdict::Failed(error) => job.fail(error),
        }
        self.end_piece(key);
    }

    /// A command of a job is over: sends more of it, or completes it.
    #[inline]
    pub(super) fn end_piece(&mut self, key: Key) {
        let Some(job) = self.jobs.get_mut(key) else { return };
        match job.end_piece() {
            Next::Send => self.ready.push_back(key),
            Next::Complete => self.complete(key),
            Next::Wait => {}
        }
    }

    /// The unit does not know a command: does the same with others that it may know, or fails the job. A piece that is
    /// returned is to be sent instead.
    #[cold]
    fn do_otherwise(&mut self, piece: Piece, key: Key) -> Option<Piece> {
        let job = self.jobs.get_mut(key)?;
        match piece.kind {
            Kind::WriteSame { .. } => {
                self.terms.write_same = None;
                match job.io.op {
                    Op::WriteZeroes { only_fast: false, fua, .. } => {
                        job.go_back(piece.offset, self.terms.written_zeroes(fua));
                    }
                    _ => job.fail(IoError::Unsupported),
                }
            }
            // What is no longer needed may stay.
            Kind::Unmap => {
                self.terms.unmap = None;
                job.issued = job.io.len;
            }
            Kind::Status => {
                self.terms.lba_status = false;
                job.extents = vec![Extent::data(job.io.len)];
            }
            Kind::Flush if self.terms.long_flush => {
                self.terms.long_flush = false;
                return Some(piece);
            }
            // A unit without cache needs no command to empty it.
            Kind::Flush if !self.terms.write_cache => {}
            _ => job.fail(IoError::Unsupported),
        }
        None
    }

    #[inline]
    fn complete(&mut self, key: Key) {
        let Some(job) = self.jobs.remove(key) else { return };
        if job.is_misplaced && job.error == Some(IoError::PathLost) {
            return self.access.misplaced.push(job.io);
        }
        if job.is_aborted && job.error == Some(IoError::PathLost) {
            return self.aborted.push_back(job.io);
        }
        let (tag, op) = (job.io.tag, job.io.op);
        let result = match job.error {
            Some(error) => Err(error),
            None => Ok(match op {
                Op::Read => Output::Data(job.io.data.or(job.buffer).unwrap_or_default()),
                // It is never wrong to take for data what the unit does not tell.
                Op::BlockStatus if job.extents.is_empty() => Output::Extents(vec![Extent::data(job.io.len)]),
                Op::BlockStatus => Output::Extents(job.extents),
                _ => Output::Nothing,
            }),
        };
        self.done.push_back(Completion { tag, result });
    }
}

/// Unit attentions, aborts and busy answers that one command may meet. With the pauses of transports, a unit may be
/// busy for half a minute.
pub(super) const MAX_TRIES: u32 = 64;
