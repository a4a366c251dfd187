//! What an initiator sends: questions, commands, and what was not answered once more.

use super::flight::{Flight, FlightKind};
use super::pace::STALL;
use super::path::SAFE_SECTORS;
use super::request::{AoeRequest, RequestPhase};
use super::{InitiatorSession, MAX_REQUESTS, MAX_UNSENT, later};
use crate::aoe::SECTOR;
use crate::frames::{MAX_HEAD, PortId, Station};
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

impl InitiatorSession {
    /// Makes commands of what waits, as long as the window takes them.
    #[inline]
    pub(super) fn send_what_fits(&mut self, now: Instant) {
        if self.ask_at.is_some_and(|at| at <= now) {
            self.ask(now);
        }
        if !self.fresh.is_empty() {
            self.take_fresh(now);
        }
        while self.flights.of_requests() < self.pace.window()
            && let Some(&key) = self.waiting.front()
        {
            let is_cut = self.requests.get_mut(key).is_none_or(|request| request.is_cut());
            if is_cut {
                self.waiting.pop_front();
            } else if !self.send_next_of(key, now) {
                return;
            }
        }
        self.pace.on_sent(self.flights.of_requests());
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
            // It was not waited for anything before.
            self.heard = self.heard.max(now);
            let patience = later(now, self.config.timeout);
            self.next_due = Some(self.next_due.map_or(patience, |next| next.min(patience)));
        }
        while self.requests.len() < MAX_REQUESTS
            && let Some(io) = self.fresh.pop_front()
        {
            match AoeRequest::new(io, disk, &self.pool, now) {
                Ok(request) => self.waiting.push_back(self.requests.insert(request)),
                Err((io, result)) => self.done.push_back(Completion { tag: io.tag, result }),
            }
        }
    }

    /// Sends the next command of a request; `false` if there is no path for it now.
    fn send_next_of(&mut self, key: SlotKey, now: Instant) -> bool {
        let Some(path) = self.paths.choose(1, &self.ports) else {
            // Whatever comes up wakes it; patience runs meanwhile.
            let at = later(now, LOOK_AGAIN);
            self.look_at(at);
            return false;
        };
        let sectors = self.paths.get_mut(path).map_or(1, |path| path.sectors);
        let zeroes = self.zeroes();
        let Some(request) = self.requests.get_mut(key) else { return true };
        let Some(piece) = request.next_piece(sectors) else { return true };
        let what = match request.work {
            RequestPhase::Read => FlightKind::Read,
            RequestPhase::Write | RequestPhase::WriteZeroes => FlightKind::Write,
            RequestPhase::Trim => FlightKind::Trim,
            RequestPhase::Flush => FlightKind::Flush,
        };
        let data = request.data_of(piece, &zeroes);
        let count = match what {
            FlightKind::Trim => 1,
            FlightKind::Flush => 0,
            _ => u8::try_from(piece.len / SECTOR).unwrap_or(u8::MAX),
        };
        let block = request.io.offset.saturating_add(piece.offset) / SECTOR;
        request.outstanding = request.outstanding.saturating_add(1);
        self.launch(
            Launch { what, request: Some(key), block, sectors: count, offset: piece.offset, data, path },
            now,
        );
        true
    }

    /// Puts a command in flight and into the outbox.
    pub(super) fn launch(&mut self, launch: Launch, now: Instant) {
        let wait = if launch.what.is_long() { self.pace.long_after(1) } else { self.pace.overtaken_after() };
        let due = later(now, wait);
        let Launch { what, request, block, sectors, offset, data, path } = launch;
        let flight = Flight {
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
            at_once: false,
            was_overtaken: false,
            sends: 1,
        };
        if let Some(tag) = self.flights.insert(flight) {
            self.push(tag);
            self.look_at(due);
        }
    }

    /// Puts the frame of a command into the outbox.
    fn push(&mut self, tag: u32) {
        let has_48 = self.disk.as_ref().is_none_or(|disk| disk.lba48);
        let has_flush_ext = self.disk.as_ref().is_some_and(|disk| disk.flush_ext);
        let zeroes = self.zeroes();
        let Some(flight) = self.flights.get_mut(tag) else { return };
        let Some(path) = self.paths.get_mut(flight.path) else { return };
        let command = match flight.what {
            FlightKind::Read | FlightKind::Probe if has_48 => ata::AtaCommand::READ_SECTORS_EXT,
            FlightKind::Read | FlightKind::Probe => ata::AtaCommand::READ_SECTORS,
            FlightKind::Write if has_48 => ata::AtaCommand::WRITE_SECTORS_EXT,
            FlightKind::Write => ata::AtaCommand::WRITE_SECTORS,
            FlightKind::Trim => ata::AtaCommand::DATA_SET_MANAGEMENT,
            FlightKind::Flush if has_flush_ext => ata::AtaCommand::FLUSH_CACHE_EXT,
            FlightKind::Flush => ata::AtaCommand::FLUSH_CACHE,
            FlightKind::Identify => ata::AtaCommand::IDENTIFY_DEVICE,
        };
        let is_addressed = matches!(flight.what, FlightKind::Read | FlightKind::Write | FlightKind::Probe);
        let is_extended = has_48 && is_addressed;
        let mut aflags = if is_extended { AOE_AFLAG_EXTENDED } else { 0 };
        if flight.what.is_write() {
            aflags |= AOE_AFLAG_WRITE;
        }
        let block = if is_addressed { flight.block } else { 0 };
        let registers = AtaMessage {
            aflags,
            error_or_feature: if flight.what == FlightKind::Trim { DSM_TRIM } else { 0 },
            sector_count: flight.sectors,
            command_or_status: command.0,
            lba: if is_extended { AtaMessage::lba48(block) } else { AtaMessage::lba28(block) },
            reserved: [0; 2],
        };
        let data = match flight.what {
            // As long as the answer, so that both ways are tried.
            FlightKind::Probe => {
                SgList::one(zeroes.slice(0, usize::from(flight.sectors).saturating_mul(SECTOR as usize)))
            }
            _ => flight.data.clone(),
        };
        let head = self.config.head(AoeCommand::ISSUE_ATA_COMMAND, tag);
        let mut bytes = [0; AOE_ATA_HEAD];
        let (first, rest) = bytes.split_at_mut(size_of::<Header>());
        first.copy_from_slice(head.as_bytes());
        rest.copy_from_slice(registers.as_bytes());
        self.outbox.push(path.station, &bytes, data);
    }

    /// Asks all stations at all ports for the disk, and sees to it that they are asked again if
    /// need be.
    pub(super) fn ask(&mut self, now: Instant) {
        let mut bytes = [0; MAX_HEAD];
        self.asked = self.asked.saturating_add(1);
        self.asked_at = Some(now);
        let head = self.config.head(AoeCommand::QUERY_CONFIG_INFORMATION, self.ask_tag());
        let query = ConfigMessage {
            buffer_count: 0.into(),
            firmware_version: 0.into(),
            sector_count: 0,
            version_and_command: AOE_VERSION << 4 | ConfigCommand::READ.0,
            string_length: 0.into(),
        };
        let parts = head.as_bytes().iter().chain(query.as_bytes());
        bytes.iter_mut().zip(parts).for_each(|(place, byte)| *place = *byte);
        let len = size_of::<Header>().saturating_add(size_of::<ConfigMessage>());
        let up = (0..).map(PortId).zip(&self.ports).filter(|(_, port)| port.is_up);
        for (port, _) in up {
            let all = Station { port, mac: Mac::BROADCAST };
            self.outbox.push(all, bytes.get(..len).unwrap_or_default(), SgList::default());
        }
        let needs_answer = self.disk.is_none() || self.paths.iter().any(super::path::Path::is_silent);
        let pause = ASK_SOON.saturating_mul(1u32.checked_shl(self.asked).unwrap_or(u32::MAX)).min(ASK_LATER);
        self.ask_at = needs_answer.then(|| later(now, pause));
    }

    /// The tag of the latest question for the disk. What is answered to nobody's question has 0
    /// there.
    pub(super) fn ask_tag(&self) -> u32 {
        u32::from(self.config.id) << 24 | (self.asked & 0xffff).max(1)
    }

    /// Tries how large frames may be, on each path where that is not known and not being tried.
    pub(super) fn probe_paths(&mut self, now: Instant) {
        if self.disk.as_ref().is_none_or(|disk| disk.sectors < LARGEST_PROBE) {
            return;
        }
        let is_tried = |at: usize, flights: &super::Flights| {
            flights.iter().any(|(_, flight)| flight.what == FlightKind::Probe && flight.path == at)
        };
        let wanted: Vec<(usize, u8)> =
            self.paths.iter_mut().filter_map(|(at, path)| Some((at, path.probe?))).collect();
        for (path, sectors) in wanted {
            if !is_tried(path, &self.flights) {
                let data = SgList::default();
                self.launch(
                    Launch {
                        what: FlightKind::Probe,
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

    /// Asks the disk what it is like.
    pub(super) fn identify(&mut self, path: usize, now: Instant) {
        if !self.flights.iter().any(|(_, flight)| flight.what == FlightKind::Identify) {
            let data = SgList::default();
            self.launch(
                Launch {
                    what: FlightKind::Identify,
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

    /// Sends again what was not answered in time, and fails what has waited too long.
    pub(super) fn repeat_what_is_due(&mut self, now: Instant) {
        if self.ask_at.is_some_and(|at| at <= now) {
            self.ask(now);
        }
        if self.next_due.is_none_or(|due| due > now) {
            return;
        }
        let patience = self.config.timeout;
        if !self.requests.is_empty() && now.saturating_duration_since(self.heard) >= patience {
            self.requests.keys_of(|_| true).into_iter().for_each(|key| self.fail(key, IoError::PathLost));
            self.waiting.clear();
        }
        let mut due = std::mem::take(&mut self.due);
        due.extend(self.flights.iter().filter(|(_, flight)| flight.due <= now).map(|(tag, _)| tag));
        due.drain(..).for_each(|tag| self.repeat(tag, now));
        self.due = due;
        let patience = (!self.requests.is_empty()).then(|| later(self.heard, patience));
        self.next_due = self.flights.iter().map(|(_, flight)| flight.due).chain(patience).min();
    }

    /// A command was not answered in the time that was given it.
    fn repeat(&mut self, tag: u32, now: Instant) {
        let Some(flight) = self.flights.get_mut(tag) else { return };
        let (what, sends, first_sent, sent) = (flight.what, flight.sends, flight.first_sent, flight.sent);
        if let Some(key) = flight.request
            && now.saturating_duration_since(first_sent) >= self.config.timeout
        {
            return self.fail(key, IoError::PathLost);
        }
        let (at_once, path_at) = (flight.at_once, flight.path);
        let Some(path) = self.paths.get_mut(path_at) else { return };
        let quiet_since = path.quiet_since(first_sent);
        let is_stall = at_once || now.saturating_duration_since(quiet_since) >= STALL;
        let is_overtaken = !what.is_long() && path.answered_up_to.is_some_and(|up_to| up_to > sent);
        if !is_overtaken && !is_stall && !what.is_long() {
            return self.listen(tag, now);
        }
        if is_stall && !is_overtaken {
            path.silent = path.silent.saturating_add(1);
            if path.is_silent() && self.ask_at.is_none() {
                (self.asked, self.ask_at) = (0, Some(now));
            }
        }
        if self.is_given_up(tag, now) {
            return;
        }
        if what != FlightKind::Probe && (is_overtaken || is_stall) {
            self.pace.on_loss(sent, now);
        }
        let wait = match (is_overtaken, is_stall) {
            (true, _) => self.pace.overtaken_after(),
            (_, true) => self.pace.timeout(),
            // Others are answered: it may only take long.
            _ => self.pace.long_after(sends.saturating_add(1)),
        };
        if let Some(flight) = self.flights.get_mut(tag) {
            (flight.due, flight.was_overtaken) = (later(now, wait), is_overtaken);
        }
        self.send_again(tag, now);
    }

    /// Nothing that was sent later is answered either: rather than a frame lost, somebody has no
    /// processor now. One command is repeated from time to time, so that the answer shows which it
    /// is.
    fn listen(&mut self, tag: u32, now: Instant) {
        let Some(flight) = self.flights.get_mut(tag) else { return };
        let Some(path) = self.paths.get_mut(flight.path) else { return };
        let quiet_since = path.quiet_since(flight.first_sent);
        let last = path.listened.map_or(quiet_since, |listened| listened.max(quiet_since));
        let next = later(last, self.pace.listen_after(path.listens));
        if next > now {
            flight.due = next.min(later(quiet_since, STALL)).max(later(now, SOON));
            return;
        }
        if flight.what == FlightKind::Probe && flight.sends >= PROBES {
            // A size that does not pass tells nothing of the path.
            flight.due = later(quiet_since, STALL);
            return;
        }
        (path.listened, path.listens) = (Some(now), path.listens.saturating_add(1));
        (flight.due, flight.was_overtaken) = (later(now, self.pace.overtaken_after()), false);
        self.send_again(tag, now);
    }

    /// A size that was tried often enough does not pass, and what was sent so long in vain is sent
    /// in smaller frames.
    fn is_given_up(&mut self, tag: u32, now: Instant) -> bool {
        let Some(flight) = self.flights.get_mut(tag) else { return true };
        let Some(path) = self.paths.get_mut(flight.path) else { return true };
        let is_large =
            flight.sectors > SAFE_SECTORS && matches!(flight.what, FlightKind::Read | FlightKind::Write);
        if flight.what == FlightKind::Probe && flight.sends >= PROBES {
            path.on_probe_lost(flight.sectors);
            self.forget(tag);
        } else if is_large
            && flight.sends >= LARGE_SENDS
            && path.large_at.is_none_or(|at| at < flight.first_sent)
        {
            path.on_large_lost();
            self.cut_smaller(tag);
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
        let Some(flight) = self.flights.get_mut(tag) else { return };
        if flight.what != FlightKind::Probe {
            // Trims and the like are not larger than what passes everywhere.
            let sectors =
                if matches!(flight.what, FlightKind::Read | FlightKind::Write) { flight.sectors } else { 1 };
            // The same path again while it answers: only there the target knows the write by its
            // sender.
            let path = self.paths.get_mut(flight.path);
            let stays = path.is_some_and(|path| !path.is_silent() && path.sectors >= sectors);
            if !stays {
                match self.paths.choose(sectors, &self.ports) {
                    Some(path) => flight.path = path,
                    None if sectors > SAFE_SECTORS && self.paths.choose(1, &self.ports).is_some() => {
                        return self.cut_smaller(tag);
                    }
                    None => return,
                }
            }
        }
        (flight.sent, flight.sends, flight.at_once) = (now, flight.sends.saturating_add(1), false);
        self.push(tag);
    }

    /// Makes a command's piece into smaller ones.
    pub(super) fn cut_smaller(&mut self, tag: u32) {
        let Some(flight) = self.flights.get_mut(tag) else { return };
        let (key, offset, len) =
            (flight.request, flight.offset, u64::from(flight.sectors).saturating_mul(SECTOR));
        self.forget(tag);
        if let Some(key) = key
            && let Some(request) = self.requests.get_mut(key)
        {
            request.outstanding = request.outstanding.saturating_sub(1);
            request.cut_again(offset, len);
            self.waiting.push_front(key);
        }
    }
}

/// A command to be sent.
pub(super) struct Launch {
    pub(super) what: FlightKind,
    pub(super) request: Option<SlotKey>,
    pub(super) block: u64,
    pub(super) sectors: u8,
    pub(super) offset: u64,
    pub(super) data: SgList,
    pub(super) path: usize,
}

impl super::Config {
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

/// A disk that has fewer is read in small frames only.
const LARGEST_PROBE: u64 = 255;
/// A size that was tried so often does not pass.
const PROBES: u32 = 5;
/// A large command that was sent so often, while no other was answered, is made into small ones.
const LARGE_SENDS: u32 = 5;
/// All stations are asked again after twice that, then after twice as long each time, until it is
/// this.
const ASK_SOON: Duration = Duration::from_millis(5);
const ASK_LATER: Duration = Duration::from_secs(1);
/// When there is no path.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// Nothing is looked at again sooner.
const SOON: Duration = Duration::from_micros(100);
