//! Sending: config queries, commands and retransmissions.

use super::commands::{AoeCommandKind, OutstandingCommand};
use super::congestion::STALL;
use super::path::SAFE_SECTORS;
use super::request::{AoeRequest, RequestPhase};
use super::{AoeInitiatorSession, MAX_REQUESTS, MAX_UNSENT, later};
use crate::aoe::SECTOR;
use crate::driver::frames::{MAX_HEAD, OutFrame, PortId, Station};
use crate::slots::SlotKey;
use blockmux_volume::{Completion, Io, IoError, SgList};
use blockmux_wire::aoe::{
    AOE_AFLAG_EXTENDED, AOE_AFLAG_WRITE, AOE_ATA_HEAD, AOE_VERSION, AoeCommand, AtaMessage, ConfigCommand,
    ConfigMessage, Header,
};
use blockmux_wire::ata::{self, DSM_TRIM};
use blockmux_wire::ethernet::Mac;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

impl AoeInitiatorSession {
    /// Sends commands of the waiting requests as far as the window allows.
    #[inline]
    pub(super) fn send_waiting(&mut self, now: Instant) {
        if self.query_at.is_some_and(|at| at <= now) {
            self.query(now);
        }
        if !self.fresh.is_empty() {
            self.take_fresh(now);
        }
        while self.commands.request_commands < self.congestion.window()
            && let Some(&key) = self.waiting.front()
        {
            let is_issued = self.requests.get_mut(key).is_none_or(|request| request.is_issued());
            if is_issued {
                self.waiting.pop_front();
            } else if !self.send_next_of(key, now) {
                return;
            }
        }
        self.congestion.on_sent(self.commands.request_commands);
    }

    fn take_fresh(&mut self, now: Instant) {
        if self.stops {
            let fresh = std::mem::take(&mut self.fresh);
            let failed = |io: Io| Completion { tag: io.tag, result: Err(IoError::PathLost) };
            self.done.extend(fresh.into_iter().map(failed));
            return;
        }
        let Some(disk) = &self.disk else { return };
        if self.requests.is_empty() {
            // No answer was expected before.
            self.last_heard = self.last_heard.max(now);
            let timeout_at = later(now, self.config.timeout);
            self.next_due = Some(self.next_due.map_or(timeout_at, |next| next.min(timeout_at)));
        }
        while self.requests.len() < MAX_REQUESTS
            && let Some(io) = self.fresh.pop_front()
        {
            match AoeRequest::new(io, disk, &self.pool) {
                Ok(request) => self.waiting.push_back(self.requests.insert(request)),
                Err((io, result)) => self.done.push_back(Completion { tag: io.tag, result }),
            }
        }
    }

    /// Sends the next command of a request; `false` if no path is available.
    fn send_next_of(&mut self, key: SlotKey, now: Instant) -> bool {
        let Some(path) = self.paths.choose(1, &self.ports) else {
            // A port that comes up wakes the session; the timeout runs in the meantime.
            let at = later(now, RETRY_WITHOUT_PATH);
            self.wake_at(at);
            return false;
        };
        let sectors = self.paths.all.get_mut(path).map_or(1, |path| path.sectors);
        let zeroes = self.zeroes();
        let Some(request) = self.requests.get_mut(key) else { return true };
        let Some(piece) = request.next_piece(sectors) else { return true };
        let what = match request.phase {
            RequestPhase::Read => AoeCommandKind::Read,
            RequestPhase::Write | RequestPhase::WriteZeroes => AoeCommandKind::Write,
            RequestPhase::Trim => AoeCommandKind::Trim,
            RequestPhase::Flush => AoeCommandKind::Flush,
        };
        let data = request.data_of(piece, &zeroes);
        let count = match what {
            AoeCommandKind::Trim => 1,
            AoeCommandKind::Flush => 0,
            _ => u8::try_from(piece.len / SECTOR).unwrap_or(u8::MAX),
        };
        let block = request.io.offset.saturating_add(piece.offset) / SECTOR;
        request.outstanding = request.outstanding.saturating_add(1);
        self.send_command(
            NewCommand { what, request: Some(key), block, sectors: count, offset: piece.offset, data, path },
            now,
        );
        true
    }

    /// Adds a command to the table and queues its frame.
    pub(super) fn send_command(&mut self, new: NewCommand, now: Instant) {
        let wait = if new.what.is_long() {
            self.congestion.long_after(1)
        } else {
            self.congestion.overtaken_after()
        };
        let due = later(now, wait);
        let NewCommand { what, request, block, sectors, offset, data, path } = new;
        let command = OutstandingCommand {
            what,
            request,
            block,
            sectors,
            offset,
            data,
            path,
            first_sent: now,
            sent: now,
            due,
            is_lost: false,
            was_overtaken: false,
            sends: 1,
        };
        if let Some(tag) = self.commands.insert(command) {
            self.push(tag);
            self.wake_at(due);
        }
    }

    /// Queues the frame of a command.
    fn push(&mut self, tag: u32) {
        let has_48 = self.disk.as_ref().is_none_or(|disk| disk.lba48);
        let has_flush_ext = self.disk.as_ref().is_some_and(|disk| disk.flush_ext);
        let zeroes = self.zeroes();
        let Some(command) = self.commands.get_mut(tag) else { return };
        let Some(path) = self.paths.all.get_mut(command.path) else { return };
        let opcode = match command.what {
            AoeCommandKind::Read | AoeCommandKind::Probe if has_48 => ata::AtaCommand::READ_SECTORS_EXT,
            AoeCommandKind::Read | AoeCommandKind::Probe => ata::AtaCommand::READ_SECTORS,
            AoeCommandKind::Write if has_48 => ata::AtaCommand::WRITE_SECTORS_EXT,
            AoeCommandKind::Write => ata::AtaCommand::WRITE_SECTORS,
            AoeCommandKind::Trim => ata::AtaCommand::DATA_SET_MANAGEMENT,
            AoeCommandKind::Flush if has_flush_ext => ata::AtaCommand::FLUSH_CACHE_EXT,
            AoeCommandKind::Flush => ata::AtaCommand::FLUSH_CACHE,
            AoeCommandKind::Identify => ata::AtaCommand::IDENTIFY_DEVICE,
        };
        let is_addressed =
            matches!(command.what, AoeCommandKind::Read | AoeCommandKind::Write | AoeCommandKind::Probe);
        let is_extended = has_48 && is_addressed;
        let mut aflags = if is_extended { AOE_AFLAG_EXTENDED } else { 0 };
        if command.what.is_write() {
            aflags |= AOE_AFLAG_WRITE;
        }
        let block = if is_addressed { command.block } else { 0 };
        let registers = AtaMessage {
            aflags,
            error_or_feature: if command.what == AoeCommandKind::Trim { DSM_TRIM } else { 0 },
            sector_count: command.sectors,
            command_or_status: opcode.0,
            lba: if is_extended { AtaMessage::lba48(block) } else { AtaMessage::lba28(block) },
            reserved: [0; 2],
        };
        let data = match command.what {
            // As long as the answer, so that both directions are tested.
            AoeCommandKind::Probe => {
                SgList::one(zeroes.slice(0, usize::from(command.sectors).saturating_mul(SECTOR as usize)))
            }
            _ => command.data.clone(),
        };
        let head = self.config.head(AoeCommand::ISSUE_ATA_COMMAND, tag);
        let mut bytes = [0; AOE_ATA_HEAD];
        let (first, rest) = bytes.split_at_mut(size_of::<Header>());
        first.copy_from_slice(head.as_bytes());
        rest.copy_from_slice(registers.as_bytes());
        self.outbox.push_back(OutFrame::new(path.station, &bytes, data));
    }

    /// Broadcasts a config query for the disk at all ports, and schedules the next one if needed.
    pub(super) fn query(&mut self, now: Instant) {
        let mut bytes = [0; MAX_HEAD];
        self.queries = self.queries.saturating_add(1);
        self.asked_at = Some(now);
        let head = self.config.head(AoeCommand::QUERY_CONFIG_INFORMATION, self.query_tag());
        let query = ConfigMessage {
            buffer_count: 0.into(),
            firmware_version: 0.into(),
            sector_count: 0,
            version_and_command: AOE_VERSION << 4 | ConfigCommand::READ.0,
            string_length: 0.into(),
        };
        let parts = head.as_bytes().iter().chain(query.as_bytes());
        bytes.iter_mut().zip(parts).for_each(|(buffer, byte)| *buffer = *byte);
        let len = size_of::<Header>().saturating_add(size_of::<ConfigMessage>());
        let up = (0..).map(PortId).zip(&self.ports).filter(|(_, port)| port.is_up);
        for (port, _) in up {
            let all = Station { port, mac: Mac::BROADCAST };
            self.outbox.push_back(OutFrame::new(
                all,
                bytes.get(..len).unwrap_or_default(),
                SgList::default(),
            ));
        }
        let needs_answer = self.disk.is_none() || self.paths.all.iter().any(super::path::AoePath::is_silent);
        let pause = FIRST_QUERY_INTERVAL
            .saturating_mul(1u32.checked_shl(self.queries).unwrap_or(u32::MAX))
            .min(LAST_QUERY_INTERVAL);
        self.query_at = needs_answer.then(|| later(now, pause));
    }

    /// The tag of the latest config query; unsolicited config answers have 0.
    pub(super) fn query_tag(&self) -> u32 {
        u32::from(self.config.id) << 24 | (self.queries & 0xffff).max(1)
    }

    /// Probes the frame size on each path where it is unknown and no probe is outstanding.
    pub(super) fn probe_paths(&mut self, now: Instant) {
        if self.disk.as_ref().is_none_or(|disk| disk.sectors < MAX_PROBE_SECTORS) {
            return;
        }
        let is_tried = |at: usize, commands: &super::AoeCommandTable| {
            commands.iter().any(|(_, command)| command.what == AoeCommandKind::Probe && command.path == at)
        };
        let wanted: Vec<(usize, u8)> =
            self.paths.all.iter_mut().enumerate().filter_map(|(at, path)| Some((at, path.probe?))).collect();
        for (path, sectors) in wanted {
            if !is_tried(path, &self.commands) {
                let data = SgList::default();
                self.send_command(
                    NewCommand {
                        what: AoeCommandKind::Probe,
                        request: None,
                        block: 0,
                        sectors,
                        offset: 0,
                        data,
                        path,
                    },
                    now,
                );
            }
        }
    }

    /// Sends IDENTIFY DEVICE.
    pub(super) fn identify(&mut self, path: usize, now: Instant) {
        if !self.commands.iter().any(|(_, command)| command.what == AoeCommandKind::Identify) {
            let data = SgList::default();
            self.send_command(
                NewCommand {
                    what: AoeCommandKind::Identify,
                    request: None,
                    block: 0,
                    sectors: 1,
                    offset: 0,
                    data,
                    path,
                },
                now,
            );
        }
    }

    /// Retransmits commands that are due, and fails requests that have timed out.
    pub(super) fn retransmit_due(&mut self, now: Instant) {
        if self.query_at.is_some_and(|at| at <= now) {
            self.query(now);
        }
        if self.next_due.is_none_or(|due| due > now) {
            return;
        }
        let timeout_at = self.config.timeout;
        if !self.requests.is_empty() && now.saturating_duration_since(self.last_heard) >= timeout_at {
            self.requests.keys_of(|_| true).into_iter().for_each(|key| self.fail(key, IoError::PathLost));
            self.waiting.clear();
        }
        let mut due = std::mem::take(&mut self.due);
        due.extend(self.commands.iter().filter(|(_, command)| command.due <= now).map(|(tag, _)| tag));
        due.drain(..).for_each(|tag| self.repeat(tag, now));
        self.due = due;
        let timeout_at = (!self.requests.is_empty()).then(|| later(self.last_heard, timeout_at));
        self.next_due = self.commands.iter().map(|(_, command)| command.due).chain(timeout_at).min();
    }

    /// Handles a command that is due: decides whether it is lost, and retransmits it.
    fn repeat(&mut self, tag: u32, now: Instant) {
        let Some(command) = self.commands.get_mut(tag) else { return };
        let (what, sends, first_sent, sent) = (command.what, command.sends, command.first_sent, command.sent);
        if let Some(key) = command.request
            && now.saturating_duration_since(first_sent) >= self.config.timeout
        {
            return self.fail(key, IoError::PathLost);
        }
        let (is_lost, path_at) = (command.is_lost, command.path);
        let Some(path) = self.paths.all.get_mut(path_at) else { return };
        let silent_since = path.silent_since(first_sent);
        let is_stall = is_lost || now.saturating_duration_since(silent_since) >= STALL;
        let is_overtaken = !what.is_long() && path.answered_up_to.is_some_and(|up_to| up_to > sent);
        if !is_overtaken && !is_stall && !what.is_long() {
            return self.send_loss_probe(tag, now);
        }
        if is_stall && !is_overtaken {
            path.silent = path.silent.saturating_add(1);
            if path.is_silent() && self.query_at.is_none() {
                (self.queries, self.query_at) = (0, Some(now));
            }
        }
        if self.give_up_size(tag, now) {
            return;
        }
        if what != AoeCommandKind::Probe && (is_overtaken || is_stall) {
            self.congestion.on_loss(sent, now);
        }
        let wait = match (is_overtaken, is_stall) {
            (true, _) => self.congestion.overtaken_after(),
            (_, true) => self.congestion.timeout(),
            // Other commands are answered, so it may only take long.
            _ => self.congestion.long_after(sends.saturating_add(1)),
        };
        if let Some(command) = self.commands.get_mut(tag) {
            (command.due, command.was_overtaken) = (later(now, wait), is_overtaken);
        }
        self.send_again(tag, now);
    }

    /// Handles a command on a path without any answer. More likely than a loss, one side gets no
    /// CPU time now. One command is retransmitted from time to time, and its answer shows which it
    /// is.
    fn send_loss_probe(&mut self, tag: u32, now: Instant) {
        let Some(command) = self.commands.get_mut(tag) else { return };
        let Some(path) = self.paths.all.get_mut(command.path) else { return };
        let silent_since = path.silent_since(command.first_sent);
        let last =
            path.loss_probed_at.map_or(silent_since, |loss_probed_at| loss_probed_at.max(silent_since));
        let next = later(last, self.congestion.loss_probe_after(path.loss_probes));
        if next > now {
            command.due = next.min(later(silent_since, STALL)).max(later(now, MIN_WAKEUP_DELAY));
            return;
        }
        if command.what == AoeCommandKind::Probe && command.sends >= MAX_PROBE_SENDS {
            // A lost frame-size probe does not mean that the path is silent.
            command.due = later(silent_since, STALL);
            return;
        }
        (path.loss_probed_at, path.loss_probes) = (Some(now), path.loss_probes.saturating_add(1));
        (command.due, command.was_overtaken) = (later(now, self.congestion.overtaken_after()), false);
        self.send_again(tag, now);
    }

    /// Whether to give up the size of a command: a probed size was lost too often, or a large
    /// command is to be split into smaller frames.
    fn give_up_size(&mut self, tag: u32, now: Instant) -> bool {
        let Some(command) = self.commands.get_mut(tag) else { return true };
        let Some(path) = self.paths.all.get_mut(command.path) else { return true };
        let is_large = command.sectors > SAFE_SECTORS
            && matches!(command.what, AoeCommandKind::Read | AoeCommandKind::Write);
        if command.what == AoeCommandKind::Probe && command.sends >= MAX_PROBE_SENDS {
            path.on_probe_lost(command.sectors);
            self.forget(tag);
        } else if is_large
            && command.sends >= MAX_LARGE_SENDS
            && path.large_at.is_none_or(|at| at < command.first_sent)
        {
            path.on_large_lost();
            self.split(tag);
        } else {
            return false;
        }
        self.probe_paths(now);
        true
    }

    fn send_again(&mut self, tag: u32, now: Instant) {
        if self.outbox.len() >= MAX_UNSENT {
            return;
        }
        let Some(command) = self.commands.get_mut(tag) else { return };
        if command.what != AoeCommandKind::Probe {
            // Other commands fit a frame that passes everywhere.
            let sectors = if matches!(command.what, AoeCommandKind::Read | AoeCommandKind::Write) {
                command.sectors
            } else {
                1
            };
            // On the same path while it answers: the target recognizes a write by its sender.
            let path = self.paths.all.get_mut(command.path);
            let stays = path.is_some_and(|path| !path.is_silent() && path.sectors >= sectors);
            if !stays {
                match self.paths.choose(sectors, &self.ports) {
                    Some(path) => command.path = path,
                    None if sectors > SAFE_SECTORS && self.paths.choose(1, &self.ports).is_some() => {
                        return self.split(tag);
                    }
                    None => return,
                }
            }
        }
        (command.sent, command.sends, command.is_lost) = (now, command.sends.saturating_add(1), false);
        self.push(tag);
    }

    /// Splits a command into smaller ones.
    pub(super) fn split(&mut self, tag: u32) {
        let Some(command) = self.commands.get_mut(tag) else { return };
        let (key, offset, len) =
            (command.request, command.offset, u64::from(command.sectors).saturating_mul(SECTOR));
        self.forget(tag);
        if let Some(key) = key
            && let Some(request) = self.requests.get_mut(key)
        {
            request.outstanding = request.outstanding.saturating_sub(1);
            request.reissue(offset, len);
            self.waiting.push_front(key);
        }
    }
}

/// Parameters of a new command.
pub(super) struct NewCommand {
    pub(super) what: AoeCommandKind,
    pub(super) request: Option<SlotKey>,
    pub(super) block: u64,
    pub(super) sectors: u8,
    pub(super) offset: u64,
    pub(super) data: SgList,
    pub(super) path: usize,
}

impl super::AoeInitiatorConfig {
    fn head(&self, command: AoeCommand, tag: u32) -> Header {
        Header {
            version_and_flags: AOE_VERSION << 4,
            error: 0,
            major: self.address.shelf.into(),
            minor: self.address.slot,
            command: command.0,
            tag: tag.into(),
        }
    }
}

/// The maximum number of sectors of a frame-size probe; a smaller disk uses small frames only.
const MAX_PROBE_SECTORS: u64 = 255;
/// Number of lost probes after which a size is given up.
const MAX_PROBE_SENDS: u32 = 5;
/// Number of transmissions after which a large command is split, if no other was answered.
const MAX_LARGE_SENDS: u32 = 5;
/// Interval of the first config queries, which doubles up to [`LAST_QUERY_INTERVAL`].
const FIRST_QUERY_INTERVAL: Duration = Duration::from_millis(5);
const LAST_QUERY_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of retries without a path.
const RETRY_WITHOUT_PATH: Duration = Duration::from_millis(50);
/// Minimum delay of a wake-up.
const MIN_WAKEUP_DELAY: Duration = Duration::from_micros(100);
