//! One RDMA channel of a session: what it has on its way to the target, and its credits.
//!
//! A command's memory is open to the target from before the command is sent until its response has
//! come, or the target has answered that it has aborted the command. Commands are sent in order, so
//! one whose memory is not registered yet holds up those behind it; the queue pair registers it in
//! the same turn.

use super::login::{ChannelTerms, IMMEDIATE_OFFSET};
use super::response::CommandOutcome;
use super::{MAX_COMMANDS, violation};
use crate::rdma::{QueuePair, Remote, RemoteRights, Stag, WorkId};
use crate::session::ProtocolError;
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
    pub(super) phase: ChannelPhase,
    /// When its login has to be over.
    pub(super) deadline: Instant,
    terms: ChannelTerms,
    /// Requests that the target takes now.
    credits: i64,
    /// Commands under way that belong to it.
    pub(super) in_flight: u32,
    /// Commands that a reset on another channel has ended, and whose responses may still come.
    pub(super) stale: u32,
    /// Commands that were not sent, oldest first.
    outgoing: VecDeque<Outgoing>,
    /// Memory to close, with what is then to be done.
    closing: VecDeque<(Stag, AfterClose)>,
    /// Other messages, oldest first. They follow the commands before them.
    messages: VecDeque<SmallVec<[u8; 64]>>,
    /// Receive buffers to give back.
    receives: u32,
}

/// How far a channel has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChannelPhase {
    /// The driver is to connect.
    Wanted,
    /// It connects, or the login is under way.
    Connecting,
    Open,
    /// Its end was asked for, or it is over.
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
    /// It goes with the command.
    Immediate(SgList),
    /// The target reaches it in this memory, which is to be registered.
    Closed(SgList, RemoteRights),
    /// The queue pair registers it.
    Asked,
    Registered(Remote),
}

/// Whether the target has a command, and reaches its memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Exposure {
    /// It was not sent.
    #[default]
    No,
    /// It was sent, with this key if the target is to reach memory.
    Sent(Option<Stag>),
    /// It has ended, and the key is still to be invalidated.
    Closing,
}

/// What the transport keeps beside a command.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CommandState {
    /// The number of its channel.
    pub(super) channel: usize,
    pub(super) exposure: Exposure,
}

/// How a command ends once its memory is closed.
pub(super) enum AfterClose {
    /// As its response has said.
    Finish(SlotKey, CommandOutcome),
    /// The target has aborted it.
    Abort(SlotKey),
}

impl Channel {
    pub(super) fn new(phase: ChannelPhase, deadline: Instant) -> Channel {
        Channel {
            phase,
            deadline,
            terms: ChannelTerms { request_limit: 0, most_immediate: 0 },
            credits: 0,
            in_flight: 0,
            stale: 0,
            outgoing: VecDeque::new(),
            closing: VecDeque::new(),
            messages: VecDeque::new(),
            receives: 0,
        }
    }

    /// The login is over.
    pub(super) fn open(&mut self, terms: ChannelTerms) {
        self.phase = ChannelPhase::Open;
        self.terms = terms;
        self.credits = terms.request_limit;
    }

    /// Whether it has ever been logged in.
    pub(super) fn was_open(&self) -> bool {
        self.terms.request_limit > 0
    }

    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.phase == ChannelPhase::Open
    }

    /// How many more commands may be sent now. Some credits are kept for task management.
    #[inline]
    pub(super) fn room(&self) -> u32 {
        if !self.is_open() {
            return 0;
        }
        let kept = self.terms.request_limit.saturating_sub(1).min(FUNCTION_CREDITS);
        let credits = u32::try_from(self.credits.saturating_sub(kept)).unwrap_or(0);
        credits.min(MAX_COMMANDS.saturating_sub(self.in_flight))
    }

    /// Whether another request may be sent beside commands.
    pub(super) fn has_credit(&self) -> bool {
        self.is_open() && self.credits > 0
    }

    /// REQUEST LIMIT DELTA, a signed number.
    ///
    /// # Errors
    /// If no target can mean that many.
    #[inline]
    pub(super) fn grant(&mut self, delta: u32) -> Result<(), ProtocolError> {
        self.credits = self.credits.saturating_add(delta.cast_signed().into());
        if self.credits.unsigned_abs() > MAX_CREDITS {
            return Err(violation("granted more requests than a request limit can be"));
        }
        Ok(())
    }

    /// The most data that goes with a command, in bytes.
    #[inline]
    pub(super) fn most_immediate(&self) -> u32 {
        self.terms.most_immediate
    }

    /// Queues a command. It takes a credit.
    #[inline]
    pub(super) fn push(&mut self, key: SlotKey, command: SrpCommand, data: CommandData) {
        self.in_flight = self.in_flight.saturating_add(1);
        self.credits = self.credits.saturating_sub(1);
        self.outgoing.push_back(Outgoing { key, command, data });
    }

    /// Queues a request that is no command. It takes a credit.
    pub(super) fn push_request(&mut self, request: &[u8]) {
        self.credits = self.credits.saturating_sub(1);
        self.messages.push_back(SmallVec::from_slice(request));
    }

    /// Answers SRP_CRED_REQ or SRP_AER_REQ.
    pub(super) fn push_answer(&mut self, opcode: SrpOpcode, tag: u64) {
        let answer = SrpHeader { opcode: opcode.0, tag: tag.into(), ..SrpHeader::default() };
        self.messages.push_back(SmallVec::from_slice(answer.as_bytes()));
    }

    /// A message has come, and taken a receive buffer.
    #[inline]
    pub(super) fn on_message(&mut self) {
        self.receives = self.receives.saturating_add(1);
    }

    /// A command is over.
    #[inline]
    pub(super) fn end_command(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// Closes memory whose command has ended; then the rest is done.
    pub(super) fn close(&mut self, stag: Stag, then: AfterClose) {
        self.closing.push_back((stag, then));
    }

    /// Closes the next memory. Returns what is to be done then.
    #[inline]
    pub(super) fn close_next(&mut self, queue_pair: &mut impl QueuePair) -> Option<AfterClose> {
        let (stag, then) = self.closing.pop_front()?;
        queue_pair.invalidate(stag);
        Some(then)
    }

    /// Memory is registered. What nobody waits for any more is nothing to anybody.
    pub(super) fn on_registered(&mut self, id: WorkId, remote: Remote) {
        let is_it =
            |next: &&mut Outgoing| matches!(next.data, CommandData::Asked) && registration(next.key) == id;
        if let Some(next) = self.outgoing.front_mut().filter(is_it) {
            next.data = CommandData::Registered(remote);
        }
    }

    /// Gives receive buffers back; whether there were any. A target that does not wait for answers
    /// to what it asks gets none.
    #[inline]
    pub(super) fn give_receives(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        if self.receives == 0 || self.messages.len() > MAX_MESSAGES {
            return false;
        }
        queue_pair.receive(std::mem::take(&mut self.receives));
        true
    }

    /// Sends the next command, or has its memory registered. Returns whether anything moved, and
    /// which command was sent, with its key.
    #[inline]
    pub(super) fn send_next(
        &mut self,
        queue_pair: &mut impl QueuePair,
    ) -> (bool, Option<(SlotKey, Option<Stag>)>) {
        let Some(next) = self.outgoing.front_mut().filter(|_| queue_pair.room() > 0) else {
            return (false, None);
        };
        if let CommandData::Closed(list, access) = &mut next.data {
            let registered = queue_pair.register(registration(next.key), list, *access);
            next.data = registered.map_or(CommandData::Asked, CommandData::Registered);
            if registered.is_none() {
                return (true, None);
            }
        }
        let nothing = SgList::default();
        let (head, len, payload, stag) = match &next.data {
            CommandData::Closed(..) | CommandData::Asked => return (false, None),
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

    /// Sends what is no command, once every command before it is sent; whether anything was sent.
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

    /// Whether everything was sent, and all memory whose command has ended is closed.
    #[inline]
    pub(super) fn is_settled(&self) -> bool {
        self.outgoing.is_empty() && self.messages.is_empty() && self.closing.is_empty()
    }

    /// The queue pair is gone, and with it every way that the target had to our memory.
    pub(super) fn clear(&mut self) {
        self.phase = ChannelPhase::Over;
        self.outgoing.clear();
        self.closing.clear();
        self.messages.clear();
        self.in_flight = 0;
    }
}

/// A command with a descriptor, filled up with zeroes.
#[inline]
fn head(command: &SrpCommand, descriptor: &[u8]) -> [u8; IMMEDIATE_OFFSET] {
    let mut head = [0; IMMEDIATE_OFFSET];
    let (place, rest) = head.split_at_mut(size_of::<SrpCommand>());
    place.copy_from_slice(command.as_bytes());
    rest.iter_mut().zip(descriptor).for_each(|(to, from)| *to = *from);
    head
}

/// The byte of SRP_CMD that says how data is described.
#[inline]
pub(super) fn buffer_format(data: &CommandData) -> u8 {
    match data {
        CommandData::None => BufferFormat::NONE.0,
        CommandData::Immediate(_) => BufferFormat::IMMEDIATE.0 << 4,
        CommandData::Closed(_, RemoteRights::RemoteRead) => BufferFormat::DIRECT.0 << 4,
        CommandData::Closed(..) | CommandData::Asked | CommandData::Registered(_) => BufferFormat::DIRECT.0,
    }
}

/// The number of a registration.
fn registration(key: SlotKey) -> WorkId {
    WorkId(REGISTRATION | u64::from(key.short()))
}

/// In the number of each registration.
const REGISTRATION: u64 = 1 << 32;

const DIRECT_LEN: usize = size_of::<SrpCommand>() + size_of::<DirectDescriptor>();

/// Credits that commands leave for task management, if the target grants that many.
const FUNCTION_CREDITS: i64 = 2;

/// REQUEST LIMIT is a signed number of 32 bits.
const MAX_CREDITS: u64 = 1 << 31;

/// Answers that may wait to be sent before receive buffers are withheld.
const MAX_MESSAGES: usize = 8;
