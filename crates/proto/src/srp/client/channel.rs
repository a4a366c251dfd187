//! One RDMA channel of a session: its commands, its other messages and its credits.

use super::login::{IMMEDIATE_OFFSET, LoginParameters};
use super::response::CommandOutcome;
use super::{MAX_COMMANDS, violation};
use crate::driver::session::ProtocolError;
use crate::rdma::exposure::{CommandData, ExposedCommand, ExposedCommands};
use crate::rdma::{QueuePair, Remote, RemoteRights};
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
pub(super) struct RdmaChannel {
    pub(super) phase: InitiatorChannelPhase,
    /// Time by which its login has to be complete.
    pub(super) deadline: Instant,
    parameters: LoginParameters,
    /// Requests that the target accepts at present (its request limit).
    credits: i64,
    pub(super) commands: ExposedCommands<SrpCommand, CommandOutcome>,
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

/// The transport's state of a command.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SrpCommandState {
    /// Index of its channel.
    pub(super) channel: usize,
}

impl RdmaChannel {
    pub(super) fn new(phase: InitiatorChannelPhase, deadline: Instant) -> RdmaChannel {
        RdmaChannel {
            phase,
            deadline,
            parameters: LoginParameters { request_limit: 0, max_immediate: 0 },
            credits: 0,
            commands: ExposedCommands::default(),
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
        credits.min(MAX_COMMANDS.saturating_sub(self.commands.in_flight()))
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
        self.credits = self.credits.saturating_sub(1);
        self.commands.push(key, command, data);
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

    /// Sends the messages other than commands, once all commands are sent; returns whether there
    /// were any.
    #[inline]
    pub(super) fn send_messages(&mut self, queue_pair: &mut impl QueuePair) -> bool {
        let before = self.messages.len();
        while self.commands.has_sent_all()
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
        self.commands.has_sent_all() && self.messages.is_empty() && !self.commands.is_closing()
    }

    /// Drops everything unsent after the queue pair has ended, which has invalidated all keys.
    pub(super) fn clear(&mut self) {
        self.phase = InitiatorChannelPhase::Over;
        self.commands = ExposedCommands::default();
        self.messages.clear();
    }
}

impl ExposedCommand for SrpCommand {
    #[inline]
    fn send(
        &mut self,
        payload: &SgList,
        exposed: Option<(Remote, RemoteRights)>,
        queue_pair: &mut impl QueuePair,
    ) {
        let mut head = [0; IMMEDIATE_OFFSET];
        let (place, rest) = head.split_at_mut(size_of::<SrpCommand>());
        let mut describe = |descriptor: &[u8]| {
            rest.iter_mut().zip(descriptor).for_each(|(to, from)| *to = *from);
            size_of::<SrpCommand>().saturating_add(descriptor.len())
        };
        let len = match exposed {
            Some((Remote { stag, address, len }, access)) => {
                self.buf_fmt = match access {
                    RemoteRights::RemoteRead => BufferFormat::DIRECT.0 << 4,
                    RemoteRights::RemoteWrite => BufferFormat::DIRECT.0,
                };
                let key = stag.0.into();
                describe(DirectDescriptor { va: address.into(), key, len: len.into() }.as_bytes())
            }
            None if payload.is_empty() => size_of::<SrpCommand>(),
            None => {
                self.buf_fmt = BufferFormat::IMMEDIATE.0 << 4;
                describe(ImmediateDescriptor { len: (payload.len() as u32).into() }.as_bytes());
                // Zeroes pad the descriptor.
                IMMEDIATE_OFFSET
            }
        };
        place.copy_from_slice(self.as_bytes());
        queue_pair.send(head.get(..len).unwrap_or(&head), payload, None);
    }
}

/// Credits reserved for task management, if the target grants that many.
const FUNCTION_CREDITS: i64 = 2;

/// Largest request limit: a signed number of 32 bits.
const MAX_CREDITS: u64 = 1 << 31;

/// Most unsent answers to the target's requests before no receive buffers are posted.
const MAX_MESSAGES: usize = 8;
