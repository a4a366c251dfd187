//! One RDMA channel of a session: its unsent messages, its registrations and its credits.
//!
//! The target may access a command's memory from before the command is sent until its response
//! arrives, or until the target reports that it has aborted the command. Commands are sent in
//! order, so one that waits for its registration delays the commands behind it; the queue pair
//! completes registrations in the same turn.

use super::login::{IMMEDIATE_OFFSET, LoginParameters};
use super::response::CommandOutcome;
use super::{MAX_COMMANDS, violation};
use crate::driver::session::ProtocolError;
use crate::rdma::{QueuePair, Remote, RemoteRights, Stag, WorkId};
use crate::slots::SlotKey;
use blockmux_volume::SgList;
use blockmux_wire::srp::{
    BufferFormat, DirectDescriptor, ImmediateDescriptor, SrpCommand, SrpHeader, SrpOpcode,
};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::time::Instant;
use zerocopy::IntoBytes;

/// One RDMA channel.
pub(super) struct Channel {
    pub(super) phase: InitiatorChannelPhase,
    /// Time by which its login has to be complete.
    pub(super) deadline: Instant,
    parameters: LoginParameters,
    /// Requests that the target accepts at present (its request limit).
    credits: i64,
    /// Number of its commands in flight.
    pub(super) in_flight: u32,
    /// Commands that have not been sent, oldest first.
    outgoing: VecDeque<Outgoing>,
    /// Keys to invalidate, and how the command of each ends afterwards.
    closing: VecDeque<(Stag, AfterClose)>,
    /// Messages other than commands, oldest first. They are sent after all unsent commands.
    messages: VecDeque<SmallVec<[u8; 64]>>,
    /// Number of consumed receive buffers that have to be posted again.
    receives: u32,
}

/// State of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InitiatorChannelPhase {
    /// The driver has to connect it.
    Wanted,
    /// It is connecting, with the login in the connection request.
    Connecting,
    Open,
    /// It is closing or closed.
    Over,
}

/// A command to send.
struct Outgoing {
    key: SlotKey,
    command: SrpCommand,
    data: CommandData,
}

/// The data of a command.
pub(super) enum CommandData {
    None,
    /// The data is sent with the command.
    Immediate(SgList),
    /// The target transfers the data by RDMA. This memory still has to be registered, with these
    /// access rights.
    Unregistered(SgList, RemoteRights),
    /// The registration was posted and has not completed.
    Registering,
    Registered(Remote),
}

/// Whether the target has a command and can access its memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Exposure {
    /// The command was not sent.
    #[default]
    No,
    /// The command was sent, with this key if the target has to access memory.
    Sent(Option<Stag>),
    /// The command has ended, and its key still has to be invalidated.
    Closing,
}

/// The transport's state of a command.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SrpCommandState {
    /// Index of its channel.
    pub(super) channel: usize,
    pub(super) exposure: Exposure,
}

/// How a command ends once the key of its memory is invalidated.
pub(super) enum AfterClose {
    /// With the result of its response.
    Finish(SlotKey, CommandOutcome),
    /// Aborted: its I/O is returned to the driver.
    Abort(SlotKey),
}

impl Channel {
    pub(super) fn new(phase: InitiatorChannelPhase, deadline: Instant) -> Channel {
        Channel {
            phase,
            deadline,
            parameters: LoginParameters { request_limit: 0, max_immediate: 0 },
            credits: 0,
            in_flight: 0,
            outgoing: VecDeque::new(),
            closing: VecDeque::new(),
            messages: VecDeque::new(),
            receives: 0,
        }
    }

    /// Opens the channel after a successful login.
    pub(super) fn open(&mut self, parameters: LoginParameters) {
        self.phase = InitiatorChannelPhase::Open;
        self.parameters = parameters;
        self.credits = parameters.request_limit;
    }

    /// Whether the channel has ever been logged in.
    pub(super) fn was_open(&self) -> bool {
        self.parameters.request_limit > 0
    }

    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.phase == InitiatorChannelPhase::Open
    }

    /// Number of further commands that may be sent now. Some credits are reserved for task
    /// management.
    #[inline]
    pub(super) fn room(&self) -> u32 {
        if !self.is_open() {
            return 0;
        }
        let kept = self.parameters.request_limit.saturating_sub(1).min(FUNCTION_CREDITS);
        let credits = u32::try_from(self.credits.saturating_sub(kept)).unwrap_or(0);
        credits.min(MAX_COMMANDS.saturating_sub(self.in_flight))
    }

    /// Whether a request other than a command may be sent.
    pub(super) fn has_credit(&self) -> bool {
        self.is_open() && self.credits > 0
    }

    /// Adds REQUEST LIMIT DELTA, a signed number, to the credits.
    ///
    /// # Errors
    /// If the credits exceed the range of a request limit.
    #[inline]
    pub(super) fn grant(&mut self, delta: u32) -> Result<(), ProtocolError> {
        self.credits = self.credits.saturating_add(delta.cast_signed().into());
        if self.credits.unsigned_abs() > MAX_CREDITS {
            return Err(violation("granted more requests than a request limit can be"));
        }
        Ok(())
    }

    /// Longest data that is sent with a command as immediate data, in bytes.
    #[inline]
    pub(super) fn max_immediate(&self) -> u32 {
        self.parameters.max_immediate
    }

    /// Queues a command, which consumes a credit.
    #[inline]
    pub(super) fn push(&mut self, key: SlotKey, command: SrpCommand, data: CommandData) {
        self.in_flight = self.in_flight.saturating_add(1);
        self.credits = self.credits.saturating_sub(1);
        self.outgoing.push_back(Outgoing { key, command, data });
    }

    /// Queues a request other than a command, which consumes a credit.
    pub(super) fn push_request(&mut self, request: &[u8]) {
        self.credits = self.credits.saturating_sub(1);
        self.messages.push_back(SmallVec::from_slice(request));
    }

    /// Queues the answer to SRP_CRED_REQ or SRP_AER_REQ.
    pub(super) fn push_answer(&mut self, opcode: SrpOpcode, tag: u64) {
        let answer = SrpHeader { opcode: opcode.0, tag: tag.into(), ..SrpHeader::default() };
        self.messages.push_back(SmallVec::from_slice(answer.as_bytes()));
    }

    /// Counts a received message, which has consumed a receive buffer.
    #[inline]
    pub(super) fn on_message(&mut self) {
        self.receives = self.receives.saturating_add(1);
    }

    /// Counts a completed command.
    #[inline]
    pub(super) fn end_command(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// Queues the invalidation of an ended command's key; `then` says how the command ends
    /// afterwards.
    pub(super) fn close(&mut self, stag: Stag, then: AfterClose) {
        self.closing.push_back((stag, then));
    }

    /// Invalidates the next key. Returns how its command ends.
    #[inline]
    pub(super) fn close_next(&mut self, queue_pair: &mut impl QueuePair) -> Option<AfterClose> {
        let (stag, then) = self.closing.pop_front()?;
        queue_pair.invalidate(stag);
        Some(then)
    }

    /// Completes a registration. One whose command no longer waits for it is ignored.
    pub(super) fn on_registered(&mut self, id: WorkId, remote: Remote) {
        let is_it = |next: &&mut Outgoing| {
            matches!(next.data, CommandData::Registering) && registration(next.key) == id
        };
        if let Some(next) = self.outgoing.front_mut().filter(is_it) {
            next.data = CommandData::Registered(remote);
        }
    }

    /// Posts consumed receive buffers again; returns whether there were any. It posts none while
    /// many answers to the target's requests are unsent, so a target cannot queue requests without
    /// limit.
    #[inline]
    pub(super) fn give_receives(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        if self.receives == 0 || self.messages.len() > MAX_MESSAGES {
            return false;
        }
        queue_pair.receive(std::mem::take(&mut self.receives));
        true
    }

    /// Sends the next command, or posts the registration of its memory. Returns whether there was
    /// progress, and the command that was sent with its key.
    #[inline]
    pub(super) fn send_next(
        &mut self,
        queue_pair: &mut impl QueuePair,
    ) -> (bool, Option<(SlotKey, Option<Stag>)>) {
        let Some(next) = self.outgoing.front_mut().filter(|_| queue_pair.room() > 0) else {
            return (false, None);
        };
        if let CommandData::Unregistered(list, access) = &mut next.data {
            let registered = queue_pair.register(registration(next.key), list, *access);
            next.data = registered.map_or(CommandData::Registering, CommandData::Registered);
            if registered.is_none() {
                return (true, None);
            }
        }
        let nothing = SgList::default();
        let (head, len, payload, stag) = match &next.data {
            CommandData::Unregistered(..) | CommandData::Registering => return (false, None),
            CommandData::None => (head(&next.command, &[]), size_of::<SrpCommand>(), &nothing, None),
            CommandData::Immediate(payload) => {
                let descriptor = ImmediateDescriptor { len: (payload.len() as u32).into() };
                (head(&next.command, descriptor.as_bytes()), IMMEDIATE_OFFSET, payload, None)
            }
            CommandData::Registered(Remote { stag, address, len }) => {
                let descriptor =
                    DirectDescriptor { va: (*address).into(), key: stag.0.into(), len: (*len).into() };
                (head(&next.command, descriptor.as_bytes()), DIRECT_LEN, &nothing, Some(*stag))
            }
        };
        queue_pair.send(head.get(..len).unwrap_or(&head), payload, None);
        let key = next.key;
        self.outgoing.pop_front();
        (true, Some((key, stag)))
    }

    /// Sends the messages other than commands, once all commands are sent; returns whether there
    /// were any.
    #[inline]
    pub(super) fn send_messages(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        let before = self.messages.len();
        while self.outgoing.is_empty()
            && queue_pair.room() > 0
            && let Some(message) = self.messages.pop_front()
        {
            queue_pair.send(&message, &SgList::default(), None);
        }
        self.messages.len() < before
    }

    /// Whether everything was sent, and the keys of all ended commands are invalidated.
    #[inline]
    pub(super) fn is_settled(&self) -> bool {
        self.outgoing.is_empty() && self.messages.is_empty() && self.closing.is_empty()
    }

    /// Drops the commands that were not sent.
    pub(super) fn drop_unsent(&mut self) {
        self.outgoing.clear();
    }

    /// Drops everything unsent after the queue pair has ended, which has invalidated all keys.
    pub(super) fn clear(&mut self) {
        self.phase = InitiatorChannelPhase::Over;
        self.outgoing.clear();
        self.closing.clear();
        self.messages.clear();
        self.in_flight = 0;
    }
}

/// A command with its descriptor, padded with zeroes to the offset of immediate data.
#[inline]
fn head(command: &SrpCommand, descriptor: &[u8]) -> [u8; IMMEDIATE_OFFSET] {
    let mut head = [0; IMMEDIATE_OFFSET];
    let (place, rest) = head.split_at_mut(size_of::<SrpCommand>());
    place.copy_from_slice(command.as_bytes());
    rest.iter_mut().zip(descriptor).for_each(|(to, from)| *to = *from);
    head
}

/// BUF_FMT of SRP_CMD: the formats of both data buffer descriptors.
#[inline]
pub(super) fn buffer_format(data: &CommandData) -> u8 {
    match data {
        CommandData::None => BufferFormat::NONE.0,
        CommandData::Immediate(_) => BufferFormat::IMMEDIATE.0 << 4,
        CommandData::Unregistered(_, RemoteRights::RemoteRead) => BufferFormat::DIRECT.0 << 4,
        CommandData::Unregistered(..) | CommandData::Registering | CommandData::Registered(_) => {
            BufferFormat::DIRECT.0
        }
    }
}

/// The work request identifier of a command's registration.
fn registration(key: SlotKey) -> WorkId {
    WorkId(REGISTRATION | u64::from(key.short()))
}

/// Bit in the work request identifier of each registration.
const REGISTRATION: u64 = 1 << 32;

const DIRECT_LEN: usize = size_of::<SrpCommand>() + size_of::<DirectDescriptor>();

/// Credits reserved for task management, if the target grants that many.
const FUNCTION_CREDITS: i64 = 2;

/// Largest request limit: a signed number of 32 bits.
const MAX_CREDITS: u64 = 1 << 31;

/// Most unsent answers to the target's requests before no receive buffers are posted.
const MAX_MESSAGES: usize = 8;
