//! I/O under way at one logical unit, from its commands to its completion, and commands of the
//! queue itself: those of the bring-up, and questions about what has changed.
//!
//! The target may be made to abort a command. Nobody knows what that command has done by then, so
//! its I/O is handed back once no other command of it is under way, and may be done again as a
//! whole.

use super::access::UnitAccess;
use super::bring_up::{MOST_DATA_IN, UnitProbe, UnitProbeResult, UnitRefused};
use super::changes::{UnitChanges, question};
use super::plan::{STATUS_LEN, ScsiCommandKind, ScsiPlan, UNMAP_LEN, UnitCapabilities};
use super::sense::SenseCode;
use super::unit::UnitInfo;
use super::{completion_class, extents};
use crate::io_queue::{self, CommandSet, CompletionClass, DataTransfer, Zeroes, memory};
use crate::job;
use crate::scsi::{Lun, ScsiStatus};
use crate::slots::SlotKey;
use blockmux_volume::{Extent, Io, IoError, Memory, Op, Pool, SgList};
use blockmux_wire::scsi::provisioning::{UnmapDescriptor, UnmapHeader};
use std::collections::VecDeque;
use zerocopy::IntoBytes;

/// I/O under way at one logical unit. `T` is what a transport keeps beside each command.
pub(crate) type ScsiQueue<T> = io_queue::CommandQueue<RemoteUnit, T>;
/// A command, whose CDB is padded with zeroes.
pub(crate) type ScsiRequest = io_queue::CommandRequest<[u8; 16]>;
pub(super) type ScsiQueuedCommand<T> = io_queue::QueuedCommand<RemoteUnit, T>;
pub(super) type ScsiJob = job::IoJob<ScsiCommandKind>;
pub(super) type ScsiPiece = job::CommandPiece<ScsiCommandKind>;

/// What is known of the unit, and what is to be asked.
pub(crate) struct RemoteUnit {
    pub(super) bring_up: Option<UnitProbe>,
    /// The bring-up's command is under way, or waits.
    pub(super) asked: bool,
    pub(super) unit: Option<UnitInfo>,
    pub(super) changes: UnitChanges,
    pub(super) access: UnitAccess,
    pub(super) luns: Vec<Lun>,
    pub(super) terms: UnitCapabilities,
    zeroes: Zeroes,
    /// Commands to send again in a while.
    pub(super) later: VecDeque<ScsiPiece>,
    /// Nothing new is sent: what is left is for another session.
    is_draining: bool,
}

/// How a command ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScsiOutcome<'a> {
    /// The status.
    pub(crate) status: ScsiStatus,
    /// As it came; may be empty.
    pub(crate) sense: &'a [u8],
    /// How much data moved, in bytes.
    pub(crate) moved: u32,
}

impl<T: Default> ScsiQueue<T> {
    /// For the unit `lun`, of which nothing is known yet.
    pub(crate) fn new(lun: Lun, pool: Pool) -> ScsiQueue<T> {
        let unknown = UnitInfo { block_len: 512, physical_block_len: 512, ..UnitInfo::default() };
        let unit = RemoteUnit {
            bring_up: Some(UnitProbe::new(lun)),
            asked: false,
            unit: None,
            changes: UnitChanges::default(),
            access: UnitAccess::default(),
            luns: Vec::new(),
            terms: UnitCapabilities::new(&unknown),
            zeroes: Zeroes::default(),
            later: VecDeque::new(),
            is_draining: false,
        };
        ScsiQueue::of(unit, unknown.volume_info(), pool)
    }

    /// The unit, once it is known.
    pub(crate) fn unit(&self) -> Option<&UnitInfo> {
        self.set.unit.as_ref()
    }

    /// The target's logical units, as far as they were told.
    pub(crate) fn luns(&self) -> &[Lun] {
        self.set.bring_up.as_ref().map_or(&self.set.luns, |bring_up| bring_up.luns())
    }

    /// I/O of which no command was sent.
    #[inline]
    pub(crate) fn unsent(&self) -> usize {
        let asks = usize::from(self.set.changes.has_questions());
        self.ready.len().saturating_add(self.again.len()).saturating_add(asks)
    }

    /// Whether no command is under way.
    pub(crate) fn is_quiet(&self) -> bool {
        self.commands.is_empty()
    }

    /// Whether something is to be sent again in a while: then call [`Queue::resume`].
    pub(crate) fn has_later(&self) -> bool {
        !self.set.later.is_empty()
    }

    /// Sends again what met a busy unit.
    pub(crate) fn resume(&mut self) {
        self.again.append(&mut self.set.later);
    }

    /// As [`Initiator::look`](crate::session::Initiator::look).
    pub(crate) fn look(&mut self) -> u32 {
        if self.commands.is_empty() && self.set.later.is_empty() {
            // There is no command yet that could be answered: the target takes none.
            return self.jobs.look(|_| false);
        }
        self.jobs.look_away();
        self.commands.look(ScsiQueuedCommand::is_long)
    }

    /// Sends nothing new; what is under way ends, the rest stays for [`Queue::take_unfinished`].
    pub(crate) fn drain(&mut self) {
        self.set.is_draining = true;
    }

    /// Sends again after all: there is no other session to come.
    pub(crate) fn undrain(&mut self) {
        self.set.is_draining = false;
    }

    /// All I/O that has not completed, oldest first.
    pub(crate) fn take_unfinished(&mut self) -> Vec<Io> {
        self.set.later.clear();
        let mut jobs = self.take_jobs();
        jobs.sort_unstable_by_key(|(age, _)| *age);
        jobs.into_iter().map(|(_, io)| io).collect()
    }

    /// The next command to send, if there is any.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<ScsiRequest> {
        if self.set.is_draining {
            return None;
        }
        if let Some(question) = self.set.changes.next() {
            return Some(self.begin(ScsiPiece::of_the_queue(ScsiCommandKind::Changes(question))));
        }
        if self.set.bring_up.is_some() && self.again.is_empty() {
            let is_due = !std::mem::replace(&mut self.set.asked, true);
            return is_due.then(|| self.begin(ScsiPiece::of_the_queue(ScsiCommandKind::Question)));
        }
        self.next_of_jobs()
    }

    /// The commands under way that `is_meant` picks, in no order.
    pub(crate) fn keys_of(&self, is_meant: impl Fn(&T) -> bool) -> Vec<SlotKey> {
        self.commands.keys_of(|command| is_meant(&command.transport))
    }

    /// A command under way, as it was when it was sent.
    pub(crate) fn request(&mut self, key: SlotKey) -> Option<ScsiRequest> {
        let command = self.commands.get_mut(key)?;
        Some(ScsiRequest { key, command: command.state, transfer: command.transfer })
    }

    /// The command that a peer names by the short form of its key.
    #[inline]
    pub(crate) fn find(&self, short: u32) -> Option<SlotKey> {
        self.commands.find(short)
    }

    /// A command has ended.
    ///
    /// # Errors
    /// If the unit turns out to be no volume for us.
    #[inline]
    pub(crate) fn finish(&mut self, key: SlotKey, outcome: ScsiOutcome<'_>) -> Result<(), UnitRefused> {
        let Some(command) = self.commands.get_mut(key) else { return Ok(()) };
        let (piece, is_whole) = (command.piece, is_whole(command, outcome.moved));
        let sense = match outcome.status {
            ScsiStatus::CHECK_CONDITION => SenseCode::parse(outcome.sense),
            _ => None,
        };
        let mut verdict = completion_class::of(outcome.status, sense);
        if let Some(code) = sense {
            self.on_sense(code);
        }
        let Some(job) = piece.job else { return self.on_answer(key, verdict, sense, outcome.moved) };
        if verdict == CompletionClass::Good && !is_whole {
            verdict = CompletionClass::Failed(IoError::Medium);
        }
        if piece.kind == ScsiCommandKind::Status && verdict == CompletionClass::Good {
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
        key: SlotKey,
        verdict: CompletionClass,
        sense: Option<SenseCode>,
        moved: u32,
    ) -> Result<(), UnitRefused> {
        let Some(command) = self.commands.remove(key) else { return Ok(()) };
        if let Some(question) = question(command.piece.kind) {
            self.on_changes(question, verdict, &command, moved);
            return Ok(());
        }
        let Some(bring_up) = &mut self.set.bring_up else { return Ok(()) };
        let data = received(&command, moved);
        match bring_up.on_done(verdict, sense, &data)? {
            UnitProbeResult::More => self.set.asked = false,
            UnitProbeResult::Later => self.set.later.push_back(command.piece),
            UnitProbeResult::All => {
                if let Some(bring_up) = self.set.bring_up.take() {
                    let (unit, luns) = bring_up.into_parts();
                    (self.set.terms, self.info) = (UnitCapabilities::new(&unit), unit.volume_info());
                    (self.set.unit, self.set.luns) = (Some(unit), luns);
                    self.set.changes.on_size(self.info.size);
                    self.ask_for_access();
                }
            }
        }
        Ok(())
    }

    fn on_lba_status(&mut self, key: SlotKey, job: SlotKey, moved: u32) {
        let Some(command) = self.commands.remove(key) else { return };
        let data = received(&command, moved);
        let Some(job) = self.jobs.get_mut(job) else { return };
        let blocks = self.set.terms.blocks(job.io.offset, job.io.len);
        let asked = job.io.len.wrapping_shr(self.set.terms.block_len.trailing_zeros());
        let (block_len, is_zero) = (self.set.terms.block_len, self.set.terms.unmapped_is_zero);
        job.extents = extents::parse(&data, blocks.lba, asked, block_len, is_zero);
    }

    /// The commands that the last so many looks have found too long under way, oldest first. None
    /// of them, if one is a command of the queue's own: that belongs to no I/O that could be done
    /// again.
    pub(crate) fn overdue(&mut self, looks: u32) -> Vec<SlotKey> {
        let overdue = self.commands.overdue(looks, ScsiQueuedCommand::is_long);
        let is_ours =
            |key: &SlotKey| self.commands.get_mut(*key).is_none_or(|command| command.piece.job.is_none());
        if overdue.iter().any(is_ours) { Vec::new() } else { overdue }
    }

    /// Whether a command of the queue's own is under way.
    pub(crate) fn has_own(&self) -> bool {
        !self.commands.keys_of(|command| command.piece.job.is_none()).is_empty()
    }

    /// The target has given up a command: it sends nothing for it any more.
    pub(crate) fn abort(&mut self, key: SlotKey) {
        let Some(ScsiQueuedCommand { piece, .. }) = self.commands.remove(key) else { return };
        let Some(key) = piece.job else { return };
        if let Some(job) = self.jobs.get_mut(key) {
            job.is_returned = true;
            job.fail(IoError::PathLost);
        }
        self.end_piece(key);
    }
}

impl CommandSet for RemoteUnit {
    type Kind = ScsiCommandKind;
    type Sent = [u8; 16];
    type CommandState = [u8; 16];

    #[inline]
    fn is_open(&self) -> bool {
        self.unit.is_some() && !self.is_draining
    }

    #[inline]
    fn plan(&self, op: Op) -> ScsiPlan {
        self.terms.plan(op)
    }

    #[inline]
    fn command(&self, piece: &ScsiPiece) -> ([u8; 16], DataTransfer) {
        match (&self.bring_up, piece.job) {
            (Some(bring_up), None) => {
                let (cdb, len) = bring_up.command();
                (cdb, if len == 0 { DataTransfer::Nothing } else { DataTransfer::In(len) })
            }
            _ => self.terms.cdb(piece.kind, piece.offset, piece.len),
        }
    }

    #[inline]
    fn payload(&mut self, piece: &ScsiPiece, pool: &Pool) -> Option<SgList> {
        match piece.kind {
            ScsiCommandKind::Read | ScsiCommandKind::Write { .. } | ScsiCommandKind::Flush => None,
            _ => Some(self.data(piece, pool)),
        }
    }

    #[inline]
    fn keep(cdb: &[u8; 16]) -> [u8; 16] {
        *cdb
    }

    #[cold]
    fn do_otherwise(&mut self, piece: ScsiPiece, job: &mut ScsiJob) -> Option<ScsiPiece> {
        let terms = &mut self.terms;
        match piece.kind {
            ScsiCommandKind::WriteSame { .. } => {
                terms.write_same = None;
                match job.io.op {
                    Op::WriteZeroes { only_fast: false, fua, .. } => {
                        job.go_back(piece.offset, terms.written_zeroes(fua));
                    }
                    _ => job.fail(IoError::Unsupported),
                }
            }
            // What is no longer needed may stay.
            ScsiCommandKind::Unmap => {
                terms.unmap = None;
                job.issued = job.io.len;
            }
            ScsiCommandKind::Status => {
                terms.lba_status = false;
                job.extents = vec![Extent::data(job.io.len)];
            }
            ScsiCommandKind::Flush if terms.long_flush => {
                terms.long_flush = false;
                return Some(piece);
            }
            // A unit without cache needs no command to empty it.
            ScsiCommandKind::Flush if !terms.write_cache => {}
            _ => job.fail(IoError::Unsupported),
        }
        None
    }
}

impl RemoteUnit {
    /// Data of a command that is not the I/O's own.
    fn data(&mut self, piece: &ScsiPiece, pool: &Pool) -> SgList {
        match piece.kind {
            ScsiCommandKind::Zeroes => self.zeroes.list(piece.len),
            ScsiCommandKind::WriteSame { .. } => self.zeroes.list(self.terms.block_len.into()),
            ScsiCommandKind::Unmap => {
                let blocks = self.terms.blocks(piece.offset, piece.len);
                let header = UnmapHeader {
                    unmap_data_length: (UNMAP_LEN.saturating_sub(2) as u16).into(),
                    unmap_block_descriptor_data_length: (size_of::<UnmapDescriptor>() as u16).into(),
                    reserved: [0; 4],
                };
                let descriptor = UnmapDescriptor {
                    logical_block_address: blocks.lba.into(),
                    number_of_logical_blocks: blocks.count.into(),
                    reserved: [0; 4],
                };
                let list = memory(pool, UNMAP_LEN as usize);
                let (head, tail) = (header.as_bytes(), descriptor.as_bytes());
                list.slice(0, head.len()).copy_from(head);
                list.slice(head.len(), tail.len()).copy_from(tail);
                list
            }
            ScsiCommandKind::Status => memory(pool, STATUS_LEN),
            _ => SgList::one(Memory::from_heap(MOST_DATA_IN).seg(0, MOST_DATA_IN)),
        }
    }
}

/// Whether all the data moved that a successful command moves.
#[inline]
fn is_whole<T>(command: &ScsiQueuedCommand<T>, moved: u32) -> bool {
    match command.transfer {
        DataTransfer::Nothing => true,
        DataTransfer::In(len) => moved == len || command.piece.kind == ScsiCommandKind::Status,
        DataTransfer::Out(len) => moved == len,
    }
}

/// The data-in that came, of a command with a payload of its own.
pub(super) fn received<T>(command: &ScsiQueuedCommand<T>, moved: u32) -> Vec<u8> {
    let Some(payload) = &command.payload else { return Vec::new() };
    payload.slice(0, payload.len().min(moved as usize)).to_vec()
}
