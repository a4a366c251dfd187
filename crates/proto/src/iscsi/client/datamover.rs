//! Over RDMA: what opens memory to the target in the place of Data-Out and Data-In (RFC 5047).
//!
//! ```text
//!   command ──▶ Register ──Registered──▶ Send, with the memory's name ──▶ target ──▶ response ──▶ done
//!                                                                             (closes the memory, or Invalidate does)
//! ```
//! A command's memory is open from before it is sent until its response has come, or the target has
//! answered that it gave the command up. Commands leave in the order of their numbers, so one whose
//! memory has no name yet holds up those behind it; the queue pair names it in the same turn.

use crate::iscsi::iser::HEADERS_LEN;
use crate::iscsi::unexpected::OfInitiator;
use crate::rdma::{QueuePair, Remote, RemoteRights, Stag, WorkId};
use crate::session::ProtocolError;
use crate::slots::SlotKey;
use blockmux_volume::SgList;
use blockmux_wire::iscsi::Bhs;
use blockmux_wire::iscsi::scsi::ScsiCommand;
use blockmux_wire::iser::{ControlHeader, HEADER_LEN};
use smallvec::SmallVec;
use std::collections::VecDeque;
use zerocopy::IntoBytes;

/// What one connection has on its way to a target.
#[derive(Default)]
pub(super) struct InitiatorDatamover {
    /// Commands that were not sent, oldest first.
    commands: VecDeque<Outgoing>,
    /// How many of them, from the oldest on, need not ask for a name any more.
    asked: usize,
    /// How many of them, from the oldest on, wait for no name any more: names come in the order of
    /// asking.
    named: usize,
    /// Memory to close, with what is then to be done.
    open: VecDeque<(Stag, AfterClose)>,
    /// What is to be done now that the queue pair has been told to close memory.
    closed: VecDeque<AfterClose>,
    /// Receive buffers to give back.
    pub(super) receives: u32,
    /// What was said beside commands.
    pub(super) unexpected: OfInitiator,
    /// Whether there is a queue pair whose end was not asked for.
    pub(super) is_connected: bool,
    /// What a response has broken whose command had to wait; the next call that can say so does.
    pub(super) broken: Option<ProtocolError>,
}

/// A command to send.
struct Outgoing {
    key: SlotKey,
    command: ScsiCommand,
    /// Immediate data.
    payload: SgList,
    memory: Memory,
}

impl Outgoing {
    /// What it is sent as, before its payload; `None` while its memory has no name.
    #[inline]
    fn head(&self) -> Option<[u8; HEADERS_LEN]> {
        let header = match self.memory {
            Memory::Closed(..) | Memory::Asked(_) => return None,
            Memory::None => ControlHeader::new(),
            Memory::Open(remote, RemoteRights::RemoteWrite) => {
                ControlHeader::new().with_read(remote.stag.0, remote.address)
            }
            Memory::Open(remote, RemoteRights::RemoteRead) => {
                ControlHeader::new().with_write(remote.stag.0, remote.address)
            }
        };
        let mut head = [0; HEADERS_LEN];
        let (place, rest) = head.split_at_mut(HEADER_LEN);
        place.copy_from_slice(header.as_bytes());
        rest.copy_from_slice(self.command.as_bytes());
        Some(head)
    }
}

/// A command's memory.
enum Memory {
    /// It has none that the target reaches by itself.
    None,
    /// To be opened.
    Closed(SgList, RemoteRights),
    /// The queue pair is at it.
    Asked(RemoteRights),
    Open(Remote, RemoteRights),
}

/// Whether a target reaches the memory of a command under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Exposure {
    /// It has none to open, or none that is open yet, or the target has closed it.
    #[default]
    None,
    /// The memory is open under this name.
    Open(Stag),
    /// The command has ended, and does so here when its memory is closed.
    Closing,
}

/// How a command ends once its memory is closed.
pub(super) enum AfterClose {
    /// By its response, which did not close the memory.
    Respond { bhs: Bhs, data: Data },
    /// The target has given it up.
    Abort(SlotKey),
}

/// What is behind a header: mostly nothing, and else a few bytes of sense data.
pub(super) type Data = SmallVec<[u8; 128]>;

impl InitiatorDatamover {
    /// Queues a command, with immediate data or with memory to open.
    #[inline]
    pub(super) fn push(
        &mut self,
        key: SlotKey,
        command: ScsiCommand,
        payload: SgList,
        memory: Option<(SgList, RemoteRights)>,
    ) {
        let memory = memory.map_or(Memory::None, |(list, access)| Memory::Closed(list, access));
        self.commands.push_back(Outgoing { key, command, payload, memory });
    }

    /// Has the next memory opened. Returns whose it is, and its name if that is known at once.
    #[inline]
    pub(super) fn open_memory(&mut self, queue_pair: &mut impl QueuePair) -> Option<(SlotKey, Option<Stag>)> {
        while let Some(outgoing) = self.commands.get_mut(self.asked) {
            self.asked = self.asked.saturating_add(1);
            let Memory::Closed(local, access) = &mut outgoing.memory else { continue };
            let access = *access;
            let id = WorkId(REGISTRATION | u64::from(outgoing.key.short()));
            let remote = queue_pair.register(id, local, access);
            outgoing.memory = remote.map_or(Memory::Asked(access), |remote| Memory::Open(remote, access));
            return Some((outgoing.key, remote.map(|remote| remote.stag)));
        }
        None
    }

    /// Memory has a name now. Returns whose it is; `None`: nobody's that waits for it.
    #[inline]
    pub(super) fn on_registered(&mut self, id: WorkId, remote: Remote) -> Option<SlotKey> {
        let is_it = |outgoing: &&mut Outgoing| {
            matches!(outgoing.memory, Memory::Asked(_))
                && id.0 == REGISTRATION | u64::from(outgoing.key.short())
        };
        let mut unnamed = self.commands.iter_mut().skip(self.named);
        let before = unnamed.len();
        let outgoing = unnamed.find(is_it)?;
        self.named = self.named.saturating_add(before.saturating_sub(unnamed.len()));
        if let Memory::Asked(access) = outgoing.memory {
            outgoing.memory = Memory::Open(remote, access);
        }
        Some(outgoing.key)
    }

    /// Sends the commands whose memory has a name, as far as there is room; whether any was sent.
    #[inline]
    pub(super) fn send_commands(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        let before = self.commands.len();
        while queue_pair.room() > 0
            && let Some(outgoing) = self.commands.front()
            && let Some(head) = outgoing.head()
        {
            queue_pair.send(&head, &outgoing.payload, None);
            self.commands.pop_front();
            self.asked = self.asked.saturating_sub(1);
            self.named = self.named.saturating_sub(1);
        }
        self.commands.len() < before
    }

    /// Closes memory whose command has ended; then the rest is done.
    pub(super) fn close(&mut self, stag: Stag, then: AfterClose) {
        self.open.push_back((stag, then));
    }

    /// Has memory closed whose commands have ended; whether there was any.
    #[inline]
    pub(super) fn close_memory(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        let has_any = !self.open.is_empty();
        while let Some((stag, then)) = self.open.pop_front() {
            queue_pair.invalidate(stag);
            self.closed.push_back(then);
        }
        has_any
    }

    /// The end of a command that has no memory open any more.
    #[inline]
    pub(super) fn next_closed(&mut self) -> Option<AfterClose> {
        self.closed.pop_front()
    }

    /// Whether every command has been sent.
    #[inline]
    pub(super) fn has_sent_commands(&self) -> bool {
        self.commands.is_empty()
    }

    /// Whether this command has not been sent.
    pub(super) fn is_unsent(&self, key: SlotKey) -> bool {
        self.commands.iter().any(|outgoing| outgoing.key == key)
    }
}

/// In the number of each registration.
const REGISTRATION: u64 = 1 << 32;

/// Commands of one connection under way at a time.
pub(super) const MAX_COMMANDS: u32 = 256;
