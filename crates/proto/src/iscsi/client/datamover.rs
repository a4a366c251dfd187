//! Memory registration for commands over RDMA, instead of Data-Out and Data-In PDUs (RFC 5047).
//!
//! ```text
//!   command ──▶ Register ──Registered──▶ Send, with the STag ──▶ target ──▶ response ──▶ done
//!                                                                             (Send with Invalidate, or local Invalidate)
//! ```
//! A command's memory is registered from before it is sent until its response, or until the target
//! has answered its abort. Commands are sent in the order of CmdSN, so one without a completed
//! registration delays those after it; registrations complete in the same driver turn.

use crate::driver::session::ProtocolError;
use crate::iscsi::iser::HEADERS_LEN;
use crate::iscsi::unexpected::InitiatorUnexpectedPdus;
use crate::rdma::{QueuePair, Remote, RemoteRights, Stag, WorkId};
use crate::slots::SlotKey;
use blockmux_volume::SgList;
use blockmux_wire::iscsi::Bhs;
use blockmux_wire::iscsi::scsi::ScsiCommand;
use blockmux_wire::iser::{ControlHeader, HEADER_LEN};
use smallvec::SmallVec;
use std::collections::VecDeque;
use zerocopy::IntoBytes;

/// Queued commands and registrations of one connection.
#[derive(Default)]
pub(super) struct InitiatorDatamover {
    /// Unsent commands, oldest first.
    commands: VecDeque<IserQueuedCommand>,
    /// Number of them, from the oldest on, whose registration was posted or is not needed.
    posted_registrations: usize,
    /// Number of them, from the oldest on, whose registration has completed; registrations complete
    /// in order.
    completed_registrations: usize,
    /// STags to invalidate, and the action that follows.
    to_invalidate: VecDeque<(Stag, AfterInvalidation)>,
    /// Actions that follow posted invalidations.
    invalidated: VecDeque<AfterInvalidation>,
    /// Number of receive buffers to post again.
    pub(super) receives: u32,
    /// Counts unexpected PDUs (RFC 7145 §6.7.2).
    pub(super) unexpected: InitiatorUnexpectedPdus,
    /// Whether the queue pair is connected and no disconnect was requested.
    pub(super) is_connected: bool,
    /// Error of a delayed response; returned by the next call.
    pub(super) pending_error: Option<ProtocolError>,
}

/// A command to send.
struct IserQueuedCommand {
    key: SlotKey,
    command: ScsiCommand,
    /// Immediate data that follows the command.
    payload: SgList,
    memory: CommandMemory,
}

impl IserQueuedCommand {
    /// The iSER header and BHS, before the payload; `None` while the registration is incomplete.
    #[inline]
    fn head(&self) -> Option<[u8; HEADERS_LEN]> {
        let header = match self.memory {
            CommandMemory::Closed(..) | CommandMemory::Posted(_) => return None,
            CommandMemory::None => ControlHeader::new(),
            CommandMemory::Open(remote, RemoteRights::RemoteWrite) => {
                ControlHeader::new().with_read(remote.stag.0, remote.address)
            }
            CommandMemory::Open(remote, RemoteRights::RemoteRead) => {
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

/// Registration of a queued command's memory.
enum CommandMemory {
    /// No memory for the target to access.
    None,
    /// Not registered yet.
    Closed(SgList, RemoteRights),
    /// The registration was posted.
    Posted(RemoteRights),
    Open(Remote, RemoteRights),
}

/// Whether the target can access the memory of a command in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum RegistrationState {
    /// The target cannot access the memory: it is not registered, or the target has invalidated it.
    #[default]
    None,
    /// The memory is registered with this STag.
    Open(Stag),
    /// The command has ended and waits for the local invalidation.
    Closing,
}

/// Completion of a command whose memory was invalidated.
pub(super) enum AfterInvalidation {
    /// The response arrived and did not invalidate the memory.
    Respond { bhs: Bhs, data: ResponseData },
    /// The target has aborted the command.
    Abort(SlotKey),
}

/// Data segment of a response: usually empty, otherwise a few bytes of sense data.
pub(super) type ResponseData = SmallVec<[u8; 128]>;

impl InitiatorDatamover {
    /// Queues a command, with immediate data or with memory to register.
    #[inline]
    pub(super) fn push(
        &mut self,
        key: SlotKey,
        command: ScsiCommand,
        payload: SgList,
        memory: Option<(SgList, RemoteRights)>,
    ) {
        let memory = memory.map_or(CommandMemory::None, |(list, access)| CommandMemory::Closed(list, access));
        self.commands.push_back(IserQueuedCommand { key, command, payload, memory });
    }

    /// Posts the next registration; returns its command, and the STag if known immediately.
    #[inline]
    pub(super) fn post_registration(
        &mut self,
        queue_pair: &mut impl QueuePair,
    ) -> Option<(SlotKey, Option<Stag>)> {
        while let Some(queued) = self.commands.get_mut(self.posted_registrations) {
            self.posted_registrations = self.posted_registrations.saturating_add(1);
            let CommandMemory::Closed(local, access) = &mut queued.memory else { continue };
            let access = *access;
            let id = WorkId(REGISTRATION | u64::from(queued.key.short()));
            let remote = queue_pair.register(id, local, access);
            queued.memory =
                remote.map_or(CommandMemory::Posted(access), |remote| CommandMemory::Open(remote, access));
            return Some((queued.key, remote.map(|remote| remote.stag)));
        }
        None
    }

    /// Completes a registration; returns its command, or `None` if it is unknown.
    #[inline]
    pub(super) fn on_registered(&mut self, id: WorkId, remote: Remote) -> Option<SlotKey> {
        let is_match = |queued: &&mut IserQueuedCommand| {
            matches!(queued.memory, CommandMemory::Posted(_))
                && id.0 == REGISTRATION | u64::from(queued.key.short())
        };
        let mut incomplete = self.commands.iter_mut().skip(self.completed_registrations);
        let before = incomplete.len();
        let queued = incomplete.find(is_match)?;
        self.completed_registrations =
            self.completed_registrations.saturating_add(before.saturating_sub(incomplete.len()));
        if let CommandMemory::Posted(access) = queued.memory {
            queued.memory = CommandMemory::Open(remote, access);
        }
        Some(queued.key)
    }

    /// Sends commands with completed registrations while there is room; returns whether any was
    /// sent.
    #[inline]
    pub(super) fn send_commands(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        let before = self.commands.len();
        while queue_pair.room() > 0
            && let Some(queued) = self.commands.front()
            && let Some(head) = queued.head()
        {
            queue_pair.send(&head, &queued.payload, None);
            self.commands.pop_front();
            self.posted_registrations = self.posted_registrations.saturating_sub(1);
            self.completed_registrations = self.completed_registrations.saturating_sub(1);
        }
        self.commands.len() < before
    }

    /// Queues the invalidation of an ended command's memory.
    pub(super) fn close(&mut self, stag: Stag, then: AfterInvalidation) {
        self.to_invalidate.push_back((stag, then));
    }

    /// Posts the queued invalidations; returns whether there were any.
    #[inline]
    pub(super) fn post_invalidations(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        let has_any = !self.to_invalidate.is_empty();
        while let Some((stag, then)) = self.to_invalidate.pop_front() {
            queue_pair.invalidate(stag);
            self.invalidated.push_back(then);
        }
        has_any
    }

    /// The next command whose memory was invalidated.
    #[inline]
    pub(super) fn next_invalidated(&mut self) -> Option<AfterInvalidation> {
        self.invalidated.pop_front()
    }

    /// Whether all commands were sent.
    #[inline]
    pub(super) fn has_sent_commands(&self) -> bool {
        self.commands.is_empty()
    }

    /// Whether this command was not sent yet.
    pub(super) fn is_unsent(&self, key: SlotKey) -> bool {
        self.commands.iter().any(|queued| queued.key == key)
    }
}

/// Marks work request numbers of registrations.
const REGISTRATION: u64 = 1 << 32;

/// Maximum number of commands in flight on one connection.
pub(super) const MAX_COMMANDS: u32 = 256;
