//! The outstanding commands of a queue. The slot of a command in the table is the tag of its I/O,
//! and identifies it to the transport.

use super::fused::FusedHalf;
use crate::nvme::event_queue::AbortOrder;
use crate::nvme::io::IoCommand;
use crate::volume_state::{AtomicRange, IoGuard};
use blockmux_volume::{Seg, SgList, Slab};
use blockmux_wire::nvme::Sqe;
use blockmux_wire::nvme::opcode::NvmOpcode;
use blockmux_wire::nvme::status::NvmeStatus;

/// An outstanding command.
pub struct CommandSlot<T> {
    pub(crate) sqe: Sqe,
    pub(super) work: CommandWork,
    pub(super) state: CommandState,
    /// Length of the host's data, in bytes.
    pub(crate) data_out: usize,
    /// Memory for the host's data, or the borrowed receive buffer that holds it.
    pub(crate) memory: Option<Seg>,
    pub(crate) transfer: T,
    /// Sequence number in the order in which commands began or their data was fetched.
    pub(super) begun: u64,
    /// Length of the payload that the command transfers, in bytes.
    pub(super) payload: usize,
    /// Whether `payload` counts as in flight, because the command has begun or its data is being
    /// fetched.
    pub(super) is_counted: bool,
    /// Length of data that is being fetched, in bytes: all of `data_out` or 0.
    fetching: usize,
    /// Counts the command's I/O as in flight at the volume.
    pub(super) io_guard: Option<IoGuard>,
    /// Present if the command has to be aborted.
    pub(super) abort: Option<PendingAbort>,
    /// Present if the command is half of a fused operation.
    pub(super) half: Option<Box<FusedHalf>>,
}

/// The abort of a command that cannot end immediately.
pub(super) struct PendingAbort {
    pub(super) status: NvmeStatus,
    /// The Abort command that requested it and waits for the result.
    pub(super) order: Option<AbortOrder>,
}

impl PendingAbort {
    /// Whether the Abort has meanwhile completed as "not aborted".
    pub(super) fn is_given_up(&self) -> bool {
        self.order.as_ref().is_some_and(AbortOrder::is_given_up)
    }
}

/// The module that executes a command.
pub(super) enum CommandWork {
    Io(IoCommand),
    Admin,
    Fabrics,
}

/// What an outstanding command waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CommandState {
    /// Data from the host, which is being fetched or will be.
    Data,
    /// I/O of the volume.
    Io,
    /// The other half of its fused operation.
    Fused,
    /// Something else, which is polled.
    Other,
    /// An asynchronous event.
    Event,
    /// The end of the host's previous association.
    Connect,
}

/// The command table. Slots are reused, so that the table grows only to the largest number of
/// commands that were ever outstanding.
pub(super) struct CommandTable<T> {
    entries: Slab<CommandSlot<T>>,
    /// The CID of each slot, or [`NO_CID`], contiguous for a fast search.
    cids: Vec<u32>,
    /// Number of commands that wait for events.
    events: usize,
    /// Payload in flight, in bytes.
    pub(super) payload: usize,
    /// The part of `payload` that is being fetched, in bytes.
    pub(super) fetching: usize,
    /// Number of commands that have begun or whose data was fetched.
    begun: u64,
}

impl<T> CommandSlot<T> {
    #[inline]
    fn new(sqe: Sqe, work: CommandWork, data_out: usize, payload: usize, transfer: T) -> CommandSlot<T> {
        CommandSlot {
            sqe,
            work,
            state: CommandState::Data,
            data_out,
            memory: None,
            transfer,
            begun: 0,
            payload,
            is_counted: false,
            fetching: 0,
            io_guard: None,
            abort: None,
            half: None,
        }
    }

    /// Whether the command does I/O, or waits for it as the second half of a fused operation.
    pub(super) fn does_io(&self) -> bool {
        self.state == CommandState::Io || self.state == CommandState::Other && self.half.is_some()
    }

    /// Requests the abort of the command, unless one was requested already.
    pub(super) fn abort(&mut self, status: NvmeStatus, order: Option<AbortOrder>) {
        self.abort.get_or_insert(PendingAbort { status, order });
    }

    /// The range that the command reads and writes atomically.
    pub(super) fn atomic_range(&mut self) -> Option<&mut AtomicRange> {
        match &mut self.work {
            CommandWork::Io(command) => command.atomic_range(),
            CommandWork::Admin | CommandWork::Fabrics => None,
        }
    }

    /// The reservation command and its namespace, if the command is one.
    #[inline]
    pub(super) fn reservation(&self) -> Option<(NvmOpcode, u32)> {
        match &self.work {
            CommandWork::Io(command) if command.is_reservation() => {
                Some((NvmOpcode(self.sqe.opcode), self.sqe.nsid.get()))
            }
            _ => None,
        }
    }

    /// Takes the received data, once it is complete.
    pub(crate) fn take_memory(&mut self) -> SgList {
        self.memory.take().map_or_else(SgList::default, SgList::one)
    }
}

impl<T> Default for CommandTable<T> {
    fn default() -> CommandTable<T> {
        let (entries, cids) = (Slab::default(), Vec::new());
        CommandTable { entries, cids, events: 0, payload: 0, fetching: 0, begun: 0 }
    }
}

impl<T> CommandTable<T> {
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether no command is outstanding except those that wait for events.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.len() <= self.events
    }

    /// Number of outstanding commands except those that wait for events.
    #[inline]
    pub(super) fn under_way(&self) -> usize {
        self.len().saturating_sub(self.events)
    }

    /// Counts the command's payload as in flight until the command is removed.
    #[inline]
    pub(super) fn count(&mut self, slot: usize) {
        let Some(entry) = self.entries.get_mut(slot) else { return };
        if !std::mem::replace(&mut entry.is_counted, true) {
            self.begun = self.begun.wrapping_add(1);
            entry.begun = self.begun;
            self.payload = self.payload.saturating_add(entry.payload);
        }
    }

    /// Counts the command's data as being fetched.
    #[inline]
    pub(super) fn begin_fetch(&mut self, slot: usize) {
        if let Some(entry) = self.entries.get_mut(slot) {
            entry.fetching = entry.data_out;
            self.fetching = self.fetching.saturating_add(entry.data_out);
        }
    }

    /// Stops counting the command's data as being fetched: it has arrived, or will not.
    #[inline]
    pub(super) fn end_fetch(&mut self, slot: usize) {
        if let Some(entry) = self.entries.get_mut(slot) {
            self.fetching = self.fetching.saturating_sub(std::mem::take(&mut entry.fetching));
        }
    }

    /// Sequence number of the oldest command whose memory waits for data from the host.
    pub(super) fn owed(&self) -> Option<u64> {
        let entries = self.entries.iter().map(|(_, entry)| entry);
        let asked = entries.filter(|entry| entry.memory.is_some() && entry.is_counted);
        asked.filter(|entry| entry.state == CommandState::Data).map(|entry| entry.begun).min()
    }

    /// Adds a command that has just arrived; returns its slot. Lengths are in bytes.
    #[inline]
    pub(super) fn insert(
        &mut self,
        sqe: &Sqe,
        work: CommandWork,
        data_out: usize,
        payload: usize,
        transfer: T,
    ) -> usize {
        let slot = self.entries.insert_with(|| CommandSlot::new(*sqe, work, data_out, payload, transfer));
        let cid = sqe.cid.get().into();
        match self.cids.get_mut(slot) {
            Some(taken) => *taken = cid,
            None => self.cids.push(cid),
        }
        slot
    }

    /// All slots, occupied or free.
    pub(super) fn slots(&self) -> std::ops::Range<usize> {
        0..self.entries.slots()
    }

    #[inline]
    pub(super) fn get_mut(&mut self, slot: usize) -> Option<&mut CommandSlot<T>> {
        self.entries.get_mut(slot)
    }

    /// Marks a command as waiting for an event.
    pub(super) fn wait_for_event(&mut self, slot: usize) {
        if let Some(entry) = self.get_mut(slot) {
            entry.state = CommandState::Event;
            self.events = self.events.saturating_add(1);
        }
    }

    /// Removes a command and frees its slot.
    #[inline]
    pub(super) fn remove(&mut self, slot: usize) {
        let Some(entry) = self.entries.get(slot) else { return };
        self.fetching = self.fetching.saturating_sub(entry.fetching);
        if entry.is_counted {
            self.payload = self.payload.saturating_sub(entry.payload);
        }
        if entry.state == CommandState::Event {
            self.events = self.events.saturating_sub(1);
        }
        self.entries.discard(slot);
        if let Some(taken) = self.cids.get_mut(slot) {
            *taken = NO_CID;
        }
    }

    /// The slot of the command with this CID.
    #[inline]
    pub(super) fn find(&self, cid: u16) -> Option<usize> {
        // Every command is looked up, and mostly not found. Without an early exit the compiler
        // compares several CIDs at a time.
        let cid = u32::from(cid);
        let is_taken = self.cids.iter().fold(false, |is_taken, &taken| is_taken | (taken == cid));
        if !is_taken {
            return None;
        }
        self.cids.iter().position(|&taken| taken == cid)
    }
}

/// Marks a free slot.
const NO_CID: u32 = u32::MAX;
