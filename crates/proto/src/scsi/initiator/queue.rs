//! I/O in progress at one logical unit, and internal commands: those of the bring-up, and queries
//! of changed properties.
//!
//! After an aborted command it is unknown what the command did. Its I/O is returned when no other
//! command of it is in flight, and may be repeated as a whole.

use super::access::UnitAccess;
use super::bring_up::{MAX_DATA_IN, UnitProbe, UnitProbeResult, UnitRefused};
use super::changes::{UnitChanges, query};
use super::plan::{STATUS_LEN, ScsiCommandKind, ScsiPlan, UNMAP_LEN, UnitCapabilities};
use super::sense::SenseCode;
use super::unit::UnitInfo;
use super::{completion_class, extents};
use crate::initiator::command_queue::{self, CommandSet, CompletionClass, DataTransfer, Zeroes, memory};
use crate::initiator::job;
use crate::scsi::{Lun, ScsiStatus};
use crate::slots::SlotKey;
use blockmux_volume::{Extent, Io, IoError, Memory, Op, Pool, SgList};
use blockmux_wire::scsi::provisioning::{UnmapDescriptor, UnmapHeader};
use std::collections::VecDeque;
use std::time::Duration;
use zerocopy::IntoBytes;

/// I/O in progress at one logical unit. `T` is the transport's state of each command.
pub(crate) type ScsiQueue<T> = command_queue::CommandQueue<RemoteUnit, T>;
/// A command with a CDB padded by zeroes.
pub(crate) type ScsiRequest = command_queue::CommandRequest<[u8; 16]>;
pub(super) type ScsiQueuedCommand<T> = command_queue::QueuedCommand<RemoteUnit, T>;
pub(super) type ScsiJob = job::IoJob<ScsiCommandKind>;
pub(super) type ScsiPiece = job::CommandPiece<ScsiCommandKind>;

/// Properties of the unit, and outstanding queries.
pub(crate) struct RemoteUnit {
    pub(super) bring_up: Option<UnitProbe>,
    /// The command of the bring-up is in flight or queued.
    pub(super) is_probe_sent: bool,
    pub(super) unit: Option<UnitInfo>,
    pub(super) changes: UnitChanges,
    pub(super) access: UnitAccess,
    pub(super) luns: Vec<Lun>,
    pub(super) capabilities: UnitCapabilities,
    zeroes: Zeroes,
    /// Commands to send again after a delay.
    pub(super) delayed: VecDeque<ScsiPiece>,
    /// No new command is sent; unsent I/O is left for another session.
    is_draining: bool,
}

/// The result of a command.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScsiOutcome<'a> {
    /// The status.
    pub(crate) status: ScsiStatus,
    /// Sense data as received; may be empty.
    pub(crate) sense: &'a [u8],
    /// Number of bytes transferred.
    pub(crate) moved: u32,
}

impl<T: Default> ScsiQueue<T> {
    /// A queue for the unit `lun`, which has not been identified yet.
    pub(crate) fn new(lun: Lun, pool: Pool) -> ScsiQueue<T> {
        let unknown = UnitInfo { block_len: 512, physical_block_len: 512, ..UnitInfo::default() };
        let unit = RemoteUnit {
            bring_up: Some(UnitProbe::new(lun)),
            is_probe_sent: false,
            unit: None,
            changes: UnitChanges::default(),
            access: UnitAccess::default(),
            luns: Vec::new(),
            capabilities: UnitCapabilities::new(&unknown),
            zeroes: Zeroes::default(),
            delayed: VecDeque::new(),
            is_draining: false,
        };
        ScsiQueue::of(unit, unknown.volume_info(), pool)
    }

    /// The unit, once it is identified.
    pub(crate) fn unit(&self) -> Option<&UnitInfo> {
        self.set.unit.as_ref()
    }

    /// The target's logical units, as far as they were listed.
    pub(crate) fn luns(&self) -> &[Lun] {
        self.set.bring_up.as_ref().map_or(&self.set.luns, |bring_up| &bring_up.luns)
    }

    /// Number of unsent commands.
    #[inline]
    pub(crate) fn unsent(&self) -> usize {
        let asks = usize::from(self.set.changes.has_queries());
        self.ready.len().saturating_add(self.again.len()).saturating_add(asks)
    }

    /// Whether no command is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.commands.is_empty()
    }

    /// Whether commands wait for a delay; then call [`ScsiQueue::resume`].
    pub(crate) fn has_delayed(&self) -> bool {
        !self.set.delayed.is_empty()
    }

    /// Sends delayed commands again, which have waited for `delay`.
    pub(crate) fn resume(&mut self, delay: Duration) {
        self.again.extend(self.set.delayed.drain(..).map(|piece| piece.after(delay)));
    }

    /// Ages pending commands: see [`Overdue::tick`](crate::driver::session::Overdue::tick).
    pub(crate) fn tick(&mut self) -> u32 {
        if self.commands.is_empty() && self.set.delayed.is_empty() {
            // The target accepts no command, so only whole I/O requests can age.
            return self.jobs.tick(|_| false);
        }
        self.jobs.reset_ticks();
        self.commands.tick(ScsiQueuedCommand::is_long)
    }

    /// Stops sending: commands in flight end, the rest is left for [`ScsiQueue::take_unfinished`].
    pub(crate) fn drain(&mut self) {
        self.set.is_draining = true;
    }

    /// Resumes sending, because no other session follows.
    pub(crate) fn undrain(&mut self) {
        self.set.is_draining = false;
    }

    /// Takes all incomplete I/O, oldest first.
    pub(crate) fn take_unfinished(&mut self) -> Vec<Io> {
        self.set.delayed.clear();
        let mut jobs = self.take_jobs();
        jobs.sort_unstable_by_key(|(age, _)| *age);
        jobs.into_iter().map(|(_, io)| io).collect()
    }

    /// The next command to send, if any.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<ScsiRequest> {
        if self.set.is_draining {
            return None;
        }
        if let Some(query) = self.set.changes.next() {
            return Some(self.begin(ScsiPiece::of_the_queue(ScsiCommandKind::Changes(query))));
        }
        if self.set.bring_up.is_some() && self.again.is_empty() {
            let is_due = !std::mem::replace(&mut self.set.is_probe_sent, true);
            return is_due.then(|| self.begin(ScsiPiece::of_the_queue(ScsiCommandKind::Probe)));
        }
        self.next_of_jobs()
    }

    /// Keys of the commands in flight that satisfy `predicate`, in no particular order.
    pub(crate) fn keys_of(&self, predicate: impl Fn(&T) -> bool) -> Vec<SlotKey> {
        self.commands.keys_of(|command| predicate(&command.transport))
    }

    /// A command in flight, as it was sent.
    pub(crate) fn request(&mut self, key: SlotKey) -> Option<ScsiRequest> {
        let command = self.commands.get_mut(key)?;
        Some(ScsiRequest { key, command: command.state, transfer: command.transfer })
    }

    /// The command with this short key, which a peer uses as its tag.
    #[inline]
    pub(crate) fn find(&self, short: u32) -> Option<SlotKey> {
        self.commands.find(short)
    }

    /// Processes the result of a command.
    ///
    /// # Errors
    /// If the unit turns out to be unusable as a volume.
    #[inline]
    pub(crate) fn finish(&mut self, key: SlotKey, outcome: ScsiOutcome<'_>) -> Result<(), UnitRefused> {
        let Some(command) = self.commands.get_mut(key) else { return Ok(()) };
        let (piece, is_whole) = (command.piece, is_whole(command, outcome.moved));
        let sense = match outcome.status {
            ScsiStatus::CHECK_CONDITION => SenseCode::parse(outcome.sense),
            _ => None,
        };
        let mut class = completion_class::of(outcome.status, sense);
        if let Some(code) = sense {
            self.on_sense(code);
        }
        let Some(job) = piece.job else { return self.on_answer(key, class, sense, outcome.moved) };
        if class == CompletionClass::Good && !is_whole {
            class = CompletionClass::Failed(IoError::Medium);
        }
        if piece.kind == ScsiCommandKind::Status && class == CompletionClass::Good {
            self.on_lba_status(key, job, outcome.moved);
        } else {
            self.commands.discard(key);
        }
        if let Some(piece) = self.finish_piece(piece, job, class) {
            self.set.delayed.push_back(piece);
        }
        Ok(())
    }

    /// Processes the result of an internal command.
    fn on_answer(
        &mut self,
        key: SlotKey,
        class: CompletionClass,
        sense: Option<SenseCode>,
        moved: u32,
    ) -> Result<(), UnitRefused> {
        let Some(command) = self.commands.remove(key) else { return Ok(()) };
        if let Some(query) = query(command.piece.kind) {
            self.on_changes(query, class, &command, moved);
            return Ok(());
        }
        let Some(bring_up) = &mut self.set.bring_up else { return Ok(()) };
        let data = received(&command, moved);
        match bring_up.on_done(class, sense, &data)? {
            UnitProbeResult::More => self.set.is_probe_sent = false,
            UnitProbeResult::Later => self.set.delayed.push_back(command.piece),
            UnitProbeResult::All => {
                if let Some(bring_up) = self.set.bring_up.take() {
                    let (unit, luns) = bring_up.into_parts();
                    (self.set.capabilities, self.info) = (UnitCapabilities::new(&unit), unit.volume_info());
                    (self.set.unit, self.set.luns) = (Some(unit), luns);
                    self.set.changes.on_size(self.info.size);
                    self.query_access();
                }
            }
        }
        Ok(())
    }

    fn on_lba_status(&mut self, key: SlotKey, job: SlotKey, moved: u32) {
        let Some(command) = self.commands.remove(key) else { return };
        let data = received(&command, moved);
        let Some(job) = self.jobs.get_mut(job) else { return };
        let blocks = self.set.capabilities.blocks(job.io.offset, job.io.len);
        let block_count = job.io.len.wrapping_shr(self.set.capabilities.block_len.trailing_zeros());
        let (block_len, is_zero) = (self.set.capabilities.block_len, self.set.capabilities.unmapped_is_zero);
        job.extents = extents::parse(&data, blocks.lba, block_count, block_len, is_zero);
    }

    /// Commands that have been in flight for more than `ticks` ticks, oldest first. Empty if one of
    /// them is an internal command, because that belongs to no I/O that could be repeated.
    pub(crate) fn overdue(&mut self, ticks: u32) -> Vec<SlotKey> {
        let overdue = self.commands.overdue(ticks, ScsiQueuedCommand::is_long);
        let is_internal =
            |key: &SlotKey| self.commands.get_mut(*key).is_none_or(|command| command.piece.job.is_none());
        if overdue.iter().any(is_internal) { Vec::new() } else { overdue }
    }

    /// Whether an internal command is in flight.
    pub(crate) fn has_internal(&self) -> bool {
        !self.commands.keys_of(|command| command.piece.job.is_none()).is_empty()
    }

    /// Ends a command that the target has aborted; the target accesses its data no more.
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
        self.capabilities.plan(op)
    }

    #[inline]
    fn command(&self, piece: &ScsiPiece) -> ([u8; 16], DataTransfer) {
        match (&self.bring_up, piece.job) {
            (Some(bring_up), None) => {
                let (cdb, len) = bring_up.command();
                (cdb, if len == 0 { DataTransfer::Nothing } else { DataTransfer::In(len) })
            }
            _ => self.capabilities.cdb(piece.kind, piece.offset, piece.len),
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
        let capabilities = &mut self.capabilities;
        match piece.kind {
            ScsiCommandKind::WriteSame { .. } => {
                capabilities.write_same = None;
                match job.io.op {
                    Op::WriteZeroes { only_fast: false, fua, .. } => {
                        job.go_back(piece.offset, capabilities.written_zeroes(fua));
                    }
                    _ => job.fail(IoError::Unsupported),
                }
            }
            // Blocks that are no longer needed may stay mapped.
            ScsiCommandKind::Unmap => {
                capabilities.unmap = None;
                job.issued = job.io.len;
            }
            ScsiCommandKind::Status => {
                capabilities.lba_status = false;
                job.extents = vec![Extent::data(job.io.len)];
            }
            ScsiCommandKind::Flush if capabilities.long_flush => {
                capabilities.long_flush = false;
                return Some(piece);
            }
            // A unit without a cache needs no flush.
            ScsiCommandKind::Flush if !capabilities.write_cache => {}
            _ => job.fail(IoError::Unsupported),
        }
        None
    }
}

impl RemoteUnit {
    /// Payload of a command whose data is not that of the I/O.
    fn data(&mut self, piece: &ScsiPiece, pool: &Pool) -> SgList {
        match piece.kind {
            ScsiCommandKind::Zeroes => self.zeroes.list(piece.len),
            ScsiCommandKind::WriteSame { .. } => self.zeroes.list(self.capabilities.block_len.into()),
            ScsiCommandKind::Unmap => {
                let blocks = self.capabilities.blocks(piece.offset, piece.len);
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
            _ => SgList::one(Memory::from_heap(MAX_DATA_IN).seg(0, MAX_DATA_IN)),
        }
    }
}

/// Whether a successful command transferred all its data.
#[inline]
fn is_whole<T>(command: &ScsiQueuedCommand<T>, moved: u32) -> bool {
    match command.transfer {
        DataTransfer::Nothing => true,
        DataTransfer::In(len) => moved == len || command.piece.kind == ScsiCommandKind::Status,
        DataTransfer::Out(len) => moved == len,
    }
}

/// The data-in of a command with its own payload.
pub(super) fn received<T>(command: &ScsiQueuedCommand<T>, moved: u32) -> Vec<u8> {
    let Some(payload) = &command.payload else { return Vec::new() };
    payload.slice(0, payload.len().min(moved as usize)).to_vec()
}
