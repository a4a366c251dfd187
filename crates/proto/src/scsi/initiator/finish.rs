//! How commands end, and what that makes of their I/O.

use super::bring_up::{Learned, UnitRefused};
use super::extents;
use super::news::question;
use super::plan::{Kind, Terms};
use super::queue::{Command, Queue};
use super::sense::SenseCode;
use super::verdict;
use crate::io_queue::{Transfer, Verdict};
use crate::scsi::Status;
use crate::slots::Key;
use blockmux_volume::IoError;

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
        let (piece, is_whole) = (command.piece, is_whole(command, outcome.moved));
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
        if let Some(piece) = self.finish_piece(piece, job, verdict) {
            self.set.later.push_back(piece);
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
        let Some(bring_up) = &mut self.set.bring_up else { return Ok(()) };
        let data = received(&command, moved);
        match bring_up.on_done(verdict, sense, &data)? {
            Learned::More => self.set.asked = false,
            Learned::Later => self.set.later.push_back(command.piece),
            Learned::All => {
                if let Some(bring_up) = self.set.bring_up.take() {
                    let (unit, luns) = bring_up.into_parts();
                    (self.set.terms, self.info) = (Terms::new(&unit), unit.volume_info());
                    (self.set.unit, self.set.luns) = (Some(unit), luns);
                    self.set.news.on_size(self.info.size);
                    self.ask_for_access();
                }
            }
        }
        Ok(())
    }

    fn on_lba_status(&mut self, key: Key, job: Key, moved: u32) {
        let Some(command) = self.commands.remove(key) else { return };
        let data = received(&command, moved);
        let Some(job) = self.jobs.get_mut(job) else { return };
        let blocks = self.set.terms.blocks(job.io.offset, job.io.len);
        let asked = job.io.len.wrapping_shr(self.set.terms.block_len.trailing_zeros());
        let (block_len, is_zero) = (self.set.terms.block_len, self.set.terms.unmapped_is_zero);
        job.extents = extents::parse(&data, blocks.lba, asked, block_len, is_zero);
    }
}

/// Whether all the data moved that a successful command moves.
#[inline]
fn is_whole<T>(command: &Command<T>, moved: u32) -> bool {
    match command.transfer {
        Transfer::Nothing => true,
        Transfer::In(len) => moved == len || command.piece.kind == Kind::Status,
        Transfer::Out(len) => moved == len,
    }
}

/// The data-in that came, of a command with a payload of its own.
pub(super) fn received<T>(command: &Command<T>, moved: u32) -> Vec<u8> {
    let Some(payload) = &command.payload else { return Vec::new() };
    payload.slice(0, payload.len().min(moved as usize)).to_vec()
}
