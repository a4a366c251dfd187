//! The commands of a queue that are under way. A slot of the table is the tag of a command's I/O,
//! and names it to the transport.

use super::fused::FusedHalf;
use crate::nvme::event_queue::AbortOrder;
use crate::nvme::io::IoCommand;
use crate::volume_state::IoGuard;
use blockmux_volume::{Seg, SgList, Slab};
use blockmux_wire::nvme::Sqe;
use blockmux_wire::nvme::status::NvmeStatus;

/// One command.
pub struct CommandSlot<P> {
    pub(crate) sqe: Sqe,
    pub(super) work: CommandWork,
    pub(super) state: CommandState,
    /// The host's data, in bytes.
    pub(crate) data_out: usize,
    /// Where it goes, unless it is lent.
    pub(crate) memory: Option<Seg>,
    /// How far it has come, as the transport counts.
    pub(crate) progress: P,
    /// Tells what was begun or asked for earlier from what was later.
    pub(super) begun: u64,
    /// What this command counts for among the payload in flight, in bytes, once it does.
    pub(super) payload: usize,
    /// It is begun, or its data was asked for: what it moves is in flight.
    pub(super) is_counted: bool,
    /// Data that was asked for and is not here, in bytes: all or nothing.
    fetching: usize,
    /// Counts its I/O in flight.
    pub(super) io_guard: Option<IoGuard>,
    /// It is to end early.
    pub(super) abort: Option<PendingAbort>,
    /// It is half of a fused operation.
    pub(super) half: Option<Box<FusedHalf>>,
}

/// The early end of a command that cannot end at once.
pub(super) struct PendingAbort {
    pub(super) status: NvmeStatus,
    /// Who has asked for it and waits for an answer.
    pub(super) order: Option<AbortOrder>,
}

impl PendingAbort {
    /// Whether the host was told meanwhile that the command was not aborted.
    pub(super) fn is_given_up(&self) -> bool {
        self.order.as_ref().is_some_and(AbortOrder::is_given_up)
    }
}

/// Who carries a command out.
pub(super) enum CommandWork {
    Io(IoCommand),
    Admin,
    Fabrics,
}

/// What a command waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CommandState {
    /// Data that the host was asked for, or will be.
    Data,
    /// The volume.
    Io,
    /// The other half of its fused operation.
    Fused,
    /// Something else that is asked now and then.
    Other,
    /// An asynchronous event.
    Event,
    /// The end of an older association.
    Connect,
}

/// The table of commands. Slots are used again, so that it grows only to the deepest queue that
/// this host ever had.
#[derive(Default)]
pub(super) struct CommandTable<P> {
    entries: Slab<CommandSlot<P>>,
    /// Of each slot, side by side to be searched: the CID, or [`NO_CID`].
    cids: Vec<u32>,
    /// How many wait for events.
    events: usize,
    /// In flight, of all, in bytes.
    pub(super) payload: usize,
    /// Of that, what hosts were asked for and have not sent, in bytes.
    pub(super) fetching: usize,
    /// How many commands were begun, or their data asked for.
    begun: u64,
}

impl<P: Default> CommandSlot<P> {
    pub(super) fn new(sqe: Sqe, work: CommandWork, data_out: usize, payload: usize) -> CommandSlot<P> {
        CommandSlot {
            sqe,
            work,
            state: CommandState::Data,
            data_out,
            memory: None,
            progress: P::default(),
            begun: 0,
            payload,
            is_counted: false,
            fetching: 0,
            io_guard: None,
            abort: None,
            half: None,
        }
    }

    /// Has the command end early, unless it was told to already.
    pub(super) fn abort(&mut self, status: NvmeStatus, order: Option<AbortOrder>) {
        self.abort.get_or_insert(PendingAbort { status, order });
    }

    /// What was received, once all of it is here.
    pub(crate) fn take_memory(&mut self) -> SgList {
        self.memory.take().map_or_else(SgList::default, SgList::one)
    }
}

impl<P> CommandTable<P> {
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether none is under way but those that wait for events.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.len() <= self.events
    }

    /// How many there are but for those.
    #[inline]
    pub(super) fn under_way(&self) -> usize {
        self.len().saturating_sub(self.events)
    }

    /// What a command moves is in flight from now on until it is removed.
    #[inline]
    pub(super) fn count(&mut self, slot: usize) {
        let Some(entry) = self.entries.get_mut(slot) else { return };
        if !std::mem::replace(&mut entry.is_counted, true) {
            self.begun = self.begun.wrapping_add(1);
            entry.begun = self.begun;
            self.payload = self.payload.saturating_add(entry.payload);
        }
    }

    /// A command's data is asked for.
    #[inline]
    pub(super) fn begin_fetch(&mut self, slot: usize) {
        if let Some(entry) = self.entries.get_mut(slot) {
            entry.fetching = entry.data_out;
            self.fetching = self.fetching.saturating_add(entry.data_out);
        }
    }

    /// A command's data was sent, or comes no more.
    #[inline]
    pub(super) fn end_fetch(&mut self, slot: usize) {
        if let Some(entry) = self.entries.get_mut(slot) {
            self.fetching = self.fetching.saturating_sub(std::mem::take(&mut entry.fetching));
        }
    }

    /// The oldest data that was asked for and that memory waits for.
    pub(super) fn owed(&self) -> Option<u64> {
        let entries = self.entries.iter().map(|(_, entry)| entry);
        let asked = entries.filter(|entry| entry.memory.is_some() && entry.is_counted);
        asked.filter(|entry| entry.state == CommandState::Data).map(|entry| entry.begun).min()
    }

    #[inline]
    pub(super) fn insert(&mut self, entry: CommandSlot<P>) -> usize {
        let cid = entry.sqe.cid.get().into();
        let slot = self.entries.insert(entry);
        match self.cids.get_mut(slot) {
            Some(taken) => *taken = cid,
            None => self.cids.push(cid),
        }
        slot
    }

    /// All slots, taken or not.
    pub(super) fn slots(&self) -> std::ops::Range<usize> {
        0..self.entries.places()
    }

    #[inline]
    pub(super) fn get_mut(&mut self, slot: usize) -> Option<&mut CommandSlot<P>> {
        self.entries.get_mut(slot)
    }

    /// Has a command wait for an event.
    pub(super) fn wait_for_event(&mut self, slot: usize) {
        if let Some(entry) = self.get_mut(slot) {
            entry.state = CommandState::Event;
            self.events = self.events.saturating_add(1);
        }
    }

    /// Frees a slot.
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

    /// The slot of the command with that CID.
    #[inline]
    pub(super) fn find(&self, cid: u16) -> Option<usize> {
        // Every command asks, and mostly in vain. Without an early end they are compared several at
        // a time.
        let cid = u32::from(cid);
        let is_taken = self.cids.iter().fold(false, |is_taken, &taken| is_taken | (taken == cid));
        if !is_taken {
            return None;
        }
        self.cids.iter().position(|&taken| taken == cid)
    }
}

/// No CID.
const NO_CID: u32 = u32::MAX;
