//! What an initiator hears: who has the disk, and what became of commands.

use super::flight::{Flight, FlightKind};
use super::path::SAFE_SECTORS;
use super::{AtaDisk, InitiatorSession, later};
use crate::aoe::{SECTOR, error};
use crate::frames::{Frame, Station};
use blockmux_volume::{IoError, SgList};
use blockmux_wire::aoe::{
    AOE_ATA_HEAD, AOE_VERSION, AoeCommand, AtaMessage, ConfigMessage, ErrorCode, Header,
};
use std::time::{Duration, Instant};
use zerocopy::FromBytes;

impl InitiatorSession {
    /// A frame has come, from anybody. What does not answer a question of ours is dropped.
    #[inline]
    pub(super) fn take_frame(&mut self, frame: &Frame<'_>, now: Instant) {
        let Ok((header, message)) = Header::read_from_prefix(frame.bytes()) else { return };
        let address = self.config.address;
        let is_ours = header.major.get() == address.shelf && header.minor == address.slot;
        if !header.is_response() || header.version() != AOE_VERSION || !is_ours {
            return;
        }
        match AoeCommand(header.command) {
            AoeCommand::ISSUE_ATA_COMMAND => self.on_answer(&header, frame, now),
            AoeCommand::QUERY_CONFIG_INFORMATION if !header.is_error() => {
                self.on_config(&header, message, frame.from, now)
            }
            _ => {}
        }
    }

    /// Somebody has the disk. It may have said so without being asked.
    fn on_config(&mut self, header: &Header, message: &[u8], from: Station, now: Instant) {
        let Ok((config, _)) = ConfigMessage::read_from_prefix(message) else { return };
        let Some(port) = self.port(from.port).copied() else { return };
        if from.mac.is_group() {
            return;
        }
        self.paths.on_config(from, config.sector_count, &port);
        self.pace.set_most(u32::from(config.buffer_count.get()).min(super::flight::MAX_PIECES));
        self.heard = self.heard.max(now);
        if let Some(sent) = self.asked_at.filter(|_| header.tag.get() == self.ask_tag()) {
            self.pace.on_first_answer(now.saturating_duration_since(sent));
        }
        let path = self.paths.find(from);
        if let Some(path) = path
            && header.tag.get() == 0
        {
            // The target has been started: whatever it was asked before is lost. Perhaps it is
            // another station now.
            self.flights
                .iter_mut()
                .filter(|flight| now.saturating_duration_since(flight.sent) >= NOT_AT_ONCE)
                .for_each(|flight| (flight.path, flight.due, flight.at_once) = (path, now, true));
            self.look_at(now);
        }
        match (&self.disk, path) {
            (None, Some(path)) => self.identify(path, now),
            _ => self.probe_paths(now),
        }
    }

    /// A command is answered.
    #[inline]
    fn on_answer(&mut self, header: &Header, frame: &Frame<'_>, now: Instant) {
        let tag = header.tag.get();
        let Some(path_at) = self.paths.find(frame.from) else { return };
        let Some(flight) = self.flights.get_mut(tag) else { return };
        let Some(registers) =
            frame.bytes().get(size_of::<Header>()..).and_then(|rest| AtaMessage::read_from_prefix(rest).ok())
        else {
            return;
        };
        let is_write = flight.what.is_write();
        let result = if header.is_error() {
            Err(error::of_code(ErrorCode(header.error)))
        } else {
            error::of_registers(registers.0.command_or_status, registers.0.error_or_feature, is_write)
        };
        let len = usize::from(flight.sectors).saturating_mul(SECTOR as usize);
        let brings_data = matches!(flight.what, FlightKind::Read | FlightKind::Probe | FlightKind::Identify);
        if result.is_ok() && brings_data && frame.lend(AOE_ATA_HEAD, len).is_none() {
            // Cut short on its way, or by a target that does not know its own frames: as good as
            // lost.
            return;
        }
        let since = now.saturating_duration_since(flight.sent);
        let is_long = flight.what.is_long();
        let round_trip = (flight.sends == 1).then_some(since);
        let is_of_last = flight.sends == 1 || self.pace.is_answerable(since);
        let answers = if is_of_last { flight.sent } else { flight.first_sent };
        let repeated = flight.was_overtaken.then(|| now.saturating_duration_since(flight.first_sent));
        let is_large =
            flight.sectors > SAFE_SECTORS && matches!(flight.what, FlightKind::Read | FlightKind::Write);
        self.heard = self.heard.max(now);
        let mut was_quiet = false;
        if let Some(path) = self.paths.get_mut(path_at) {
            was_quiet = path.listens > 0;
            path.on_answer(answers, now);
            if is_large && result.is_ok() {
                path.large_at = Some(now);
            }
        }
        if let Some(time) = round_trip.filter(|_| is_long) {
            self.pace.on_long_answer(time);
        }
        self.pace.on_answer(round_trip.filter(|_| !is_long));
        if was_quiet {
            self.retry_now(path_at, now);
        }
        match repeated {
            Some(_) if is_of_last => self.pace.on_needed(),
            Some(late) => self.pace.on_needless(late),
            None => {}
        }
        if result == Err(IoError::BadLength) && is_large {
            // The target takes less than it said, as when its interface was changed.
            if let Some(path) = self.paths.get_mut(path_at) {
                path.on_large_lost();
            }
            self.cut_smaller(tag);
            return self.probe_paths(now);
        }
        self.land(tag, result, frame, now);
    }

    /// Something is heard again on a path: what was not answered meanwhile is soon, or is lost.
    fn retry_now(&mut self, path: usize, now: Instant) {
        let soon = later(now, self.pace.overtaken_after());
        let flights = self.flights.iter_mut().filter(|flight| flight.path == path);
        flights.for_each(|flight| flight.due = flight.due.min(soon));
        self.look_at(soon);
    }

    /// Takes a command that was answered out of flight.
    fn land(&mut self, tag: u32, result: Result<(), IoError>, frame: &Frame<'_>, now: Instant) {
        let Some(flight) = self.flights.get_mut(tag) else { return };
        let (what, sectors) = (flight.what, flight.sectors);
        match what {
            FlightKind::Identify => {
                self.forget(tag);
                if result.is_ok() && self.disk.is_none() {
                    let data = frame.bytes().get(AOE_ATA_HEAD..).unwrap_or_default();
                    self.disk = AtaDisk::from_bytes(data);
                    self.probe_paths(now);
                }
                if self.disk.is_some() {
                    self.ask_at = None;
                }
            }
            FlightKind::Probe => {
                let flown = flight.path;
                self.forget(tag);
                if let Some(path) = self.paths.get_mut(flown) {
                    match result {
                        Ok(()) => path.on_probe_passed(sectors),
                        Err(_) => path.on_probe_lost(sectors),
                    }
                }
                self.probe_paths(now);
            }
            _ => self.land_piece(tag, result, frame),
        }
    }

    /// A piece of a request has been answered.
    #[inline]
    fn land_piece(&mut self, tag: u32, result: Result<(), IoError>, frame: &Frame<'_>) {
        let has_cache = self.disk.as_ref().is_some_and(|disk| disk.write_cache);
        let Some(flight) = self.flights.get_mut(tag) else { return };
        let Some(key) = flight.request else { return };
        let Some(request) = self.requests.get_mut(key) else { return };
        request.outstanding = request.outstanding.saturating_sub(1);
        match result {
            Ok(()) if flight.what == FlightKind::Read => take_data(request, flight, frame),
            Ok(()) => {}
            // Without a cache there is nothing to flush, and some targets then have no such
            // command.
            Err(IoError::Unsupported) if flight.what == FlightKind::Flush && !has_cache => {}
            Err(error) => request.error = request.error.or(Some(error)),
        }
        let is_over = request.outstanding == 0 && request.is_cut();
        let goes_on = is_over && request.goes_on();
        self.forget(tag);
        if goes_on {
            self.waiting.push_back(key);
        } else if is_over {
            self.complete(key);
        }
    }
}

/// Whoever forges what targets say has nothing sent more often than that.
const NOT_AT_ONCE: Duration = Duration::from_millis(10);

/// The data of a read: lent from the frame if it is all there is, else copied to its place.
#[inline]
fn take_data(request: &mut super::AoeRequest, flight: &Flight, frame: &Frame<'_>) {
    let len = usize::from(flight.sectors).saturating_mul(SECTOR as usize);
    let Some(seg) = frame.lend(AOE_ATA_HEAD, len) else { return };
    let data = SgList::one(seg);
    if request.place.is_none() && len as u64 == request.io.len {
        request.place = Some(data);
        return;
    }
    let offset = usize::try_from(flight.offset).unwrap_or(usize::MAX);
    data.copy_to_list(&request.place_for_pieces().slice(offset, len));
}
