//! Receiving frames: config answers, which name the stations of the disk, and answers to commands.

use super::commands::{AoeCommandKind, OutstandingCommand};
use super::path::SAFE_SECTORS;
use super::{AoeInitiatorSession, AtaDisk, later};
use crate::aoe::{SECTOR, error};
use crate::driver::frames::{Frame, Station};
use blockmux_volume::{IoError, SgList};
use blockmux_wire::aoe::{
    AOE_ATA_HEAD, AOE_VERSION, AoeCommand, AtaMessage, ConfigMessage, ErrorCode, Header,
};
use std::time::{Duration, Instant};
use zerocopy::FromBytes;

impl AoeInitiatorSession {
    /// Handles a frame from any station. Frames that answer no command of this session are dropped.
    #[inline]
    pub(super) fn receive_frame(&mut self, frame: &Frame<'_>, now: Instant) {
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

    /// Handles the config answer of a station that has the disk; it may be unsolicited.
    fn on_config(&mut self, header: &Header, message: &[u8], from: Station, now: Instant) {
        let Ok((config, _)) = ConfigMessage::read_from_prefix(message) else { return };
        let Some(port) = self.port(from.port).copied() else { return };
        if from.mac.is_group() {
            return;
        }
        self.paths.on_config(from, config.sector_count, &port);
        self.congestion.set_max(u32::from(config.buffer_count.get()).min(super::commands::MAX_PIECES));
        self.last_heard = self.last_heard.max(now);
        if let Some(sent) = self.asked_at.filter(|_| header.tag.get() == self.query_tag()) {
            self.congestion.on_first_answer(now.saturating_duration_since(sent));
        }
        let path = self.paths.find(from);
        if let Some(path) = path
            && header.tag.get() == 0
        {
            // The target has restarted, perhaps on another station: all outstanding commands are
            // lost.
            self.commands
                .iter_mut()
                .filter(|command| now.saturating_duration_since(command.sent) >= MIN_RESTART_INTERVAL)
                .for_each(|command| (command.path, command.due, command.is_lost) = (path, now, true));
            self.wake_at(now);
        }
        match (&self.disk, path) {
            (None, Some(path)) => self.identify(path, now),
            _ => self.probe_paths(now),
        }
    }

    /// Handles the answer to a command.
    #[inline]
    fn on_answer(&mut self, header: &Header, frame: &Frame<'_>, now: Instant) {
        let tag = header.tag.get();
        let Some(path_at) = self.paths.find(frame.from) else { return };
        let Some(command) = self.commands.get_mut(tag) else { return };
        let Some(registers) =
            frame.bytes().get(size_of::<Header>()..).and_then(|rest| AtaMessage::read_from_prefix(rest).ok())
        else {
            return;
        };
        let is_write = command.what.is_write();
        let result = if header.is_error() {
            Err(error::of_code(ErrorCode(header.error)))
        } else {
            error::of_registers(registers.0.command_or_status, registers.0.error_or_feature, is_write)
        };
        let len = usize::from(command.sectors).saturating_mul(SECTOR as usize);
        let brings_data =
            matches!(command.what, AoeCommandKind::Read | AoeCommandKind::Probe | AoeCommandKind::Identify);
        if result.is_ok() && brings_data && frame.slice(AOE_ATA_HEAD, len).is_none() {
            // The answer is truncated: it counts as lost.
            return;
        }
        let since = now.saturating_duration_since(command.sent);
        let is_long = command.what.is_long();
        let round_trip = (command.sends == 1).then_some(since);
        let is_of_last = command.sends == 1 || self.congestion.is_answerable(since);
        let answers = if is_of_last { command.sent } else { command.first_sent };
        let repeated = command.was_overtaken.then(|| now.saturating_duration_since(command.first_sent));
        let is_large = command.sectors > SAFE_SECTORS
            && matches!(command.what, AoeCommandKind::Read | AoeCommandKind::Write);
        self.last_heard = self.last_heard.max(now);
        let mut was_silent = false;
        if let Some(path) = self.paths.all.get_mut(path_at) {
            was_silent = path.loss_probes > 0;
            path.on_answer(answers, now);
            if is_large && result.is_ok() {
                path.large_at = Some(now);
            }
        }
        if let Some(time) = round_trip.filter(|_| is_long) {
            self.congestion.on_long_answer(time);
        }
        self.congestion.on_answer(round_trip.filter(|_| !is_long));
        if was_silent {
            self.retry_now(path_at, now);
        }
        match repeated {
            Some(_) if is_of_last => self.congestion.on_needed_retry(),
            Some(late) => self.congestion.on_needless_retry(late),
            None => {}
        }
        if result == Err(IoError::BadLength) && is_large {
            // The target accepts fewer sectors than it advertised, for example after a change of
            // its MTU.
            if let Some(path) = self.paths.all.get_mut(path_at) {
                path.on_large_lost();
            }
            self.split(tag);
            return self.probe_paths(now);
        }
        self.finish_command(tag, result, frame, now);
    }

    /// Handles the first answer on a path after a silence: commands of the path that are not
    /// answered soon after it count as lost, and are retransmitted then.
    fn retry_now(&mut self, path: usize, now: Instant) {
        let soon = later(now, self.congestion.overtaken_after());
        let commands = self.commands.iter_mut().filter(|command| command.path == path);
        commands.for_each(|command| command.due = command.due.min(soon));
        self.wake_at(soon);
    }

    /// Removes an answered command, and handles its result.
    fn finish_command(&mut self, tag: u32, result: Result<(), IoError>, frame: &Frame<'_>, now: Instant) {
        let Some(command) = self.commands.get_mut(tag) else { return };
        let (what, sectors) = (command.what, command.sectors);
        match what {
            AoeCommandKind::Identify => {
                self.forget(tag);
                if result.is_ok() && self.disk.is_none() {
                    let data = frame.bytes().get(AOE_ATA_HEAD..).unwrap_or_default();
                    self.disk = AtaDisk::from_bytes(data);
                    self.probe_paths(now);
                }
                if self.disk.is_some() {
                    self.query_at = None;
                }
            }
            AoeCommandKind::Probe => {
                let flown = command.path;
                self.forget(tag);
                if let Some(path) = self.paths.all.get_mut(flown) {
                    match result {
                        Ok(()) => path.on_probe_passed(sectors),
                        Err(_) => path.on_probe_lost(sectors),
                    }
                }
                self.probe_paths(now);
            }
            _ => self.finish_piece(tag, result, frame),
        }
    }

    /// Handles the result of a request's piece.
    #[inline]
    fn finish_piece(&mut self, tag: u32, result: Result<(), IoError>, frame: &Frame<'_>) {
        let has_cache = self.disk.as_ref().is_some_and(|disk| disk.write_cache);
        let Some(command) = self.commands.get_mut(tag) else { return };
        let Some(key) = command.request else { return };
        let Some(request) = self.requests.get_mut(key) else { return };
        request.outstanding = request.outstanding.saturating_sub(1);
        match result {
            Ok(()) if command.what == AoeCommandKind::Read => take_data(request, command, frame),
            Ok(()) => {}
            // Some targets without a write cache have no flush command, and need none.
            Err(IoError::Unsupported) if command.what == AoeCommandKind::Flush && !has_cache => {}
            Err(error) => request.error = request.error.or(Some(error)),
        }
        let is_over = request.outstanding == 0 && request.is_issued();
        let next_phase = is_over && request.next_phase();
        self.forget(tag);
        if next_phase {
            self.waiting.push_back(key);
        } else if is_over {
            self.complete(key);
        }
    }
}

/// Minimum interval between restarts of a target. It limits the retransmissions that forged config
/// answers can cause.
const MIN_RESTART_INTERVAL: Duration = Duration::from_millis(10);

/// Takes the data of a read: borrowed from the frame if the frame contains all of it, else copied.
#[inline]
fn take_data(request: &mut super::AoeRequest, command: &OutstandingCommand, frame: &Frame<'_>) {
    let len = usize::from(command.sectors).saturating_mul(SECTOR as usize);
    let Some(seg) = frame.slice(AOE_ATA_HEAD, len) else { return };
    let data = SgList::one(seg);
    if request.buffer.is_none() && len as u64 == request.io.len {
        request.buffer = Some(data);
        return;
    }
    let offset = usize::try_from(command.offset).unwrap_or(usize::MAX);
    data.copy_to_list(&request.buffer_for_pieces().slice(offset, len));
}
