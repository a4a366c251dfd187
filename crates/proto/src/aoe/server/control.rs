//! The commands other than ATA: config query, MAC mask list, reserve and release (AoEr11 sections
//! 3.2 to 3.4).
//!
//! A change is answered once it is stored. The store works on another thread and must be polled, so
//! the session polls it every [`POLL_INTERVAL`] while requests wait. At most [`MAX_WAITING`]
//! requests wait; further ones get no answer, and the initiator retransmits them.

use super::{AoeTargetSession, MAX_BUFFERS, refusing};
use crate::aoe::unit::{DiskSettings, MAX_MASKS, MAX_RESERVED, SettingsChange};
use crate::aoe::{AoeAddress, sectors_in};
use crate::driver::frames::{PortId, Station};
use crate::volume_state::StateGeneration;
use blockmux_volume::{Seg, SgList};
use blockmux_wire::aoe::{
    AOE_FLAG_RESPONSE, AOE_MAX_CONFIG, AOE_VERSION, AoeCommand, ConfigCommand, ConfigMessage,
    DirectiveCommand, ErrorCode, Header, MacDirective, MacMaskCommand, MacMaskError, MacMaskMessage,
    ReserveCommand, ReserveMessage,
};
use blockmux_wire::ethernet::Mac;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// The request to answer.
#[derive(Clone, Copy)]
enum SaveRequest {
    Config(ConfigCommand),
    Masks(MacMaskMessage),
    Reserved(ReserveMessage),
}

/// Result of a request.
enum SaveOutcome {
    /// The answer: success, or an error code.
    Answer(Option<ErrorCode>),
    /// The change is being stored.
    Wait(StateGeneration),
    /// The change cannot be started now; the request gets no answer.
    Silence,
}

/// A request that waits for its change to be stored.
pub(super) struct SaveWaiter {
    proposal: StateGeneration,
    answer: Header,
    from: Station,
    asked: SaveRequest,
}

impl AoeTargetSession {
    /// Handles a config query: reads, tests or sets the config string. A failed test gets no
    /// answer.
    pub(super) fn on_config(&mut self, at: usize, answer: Header, message: &[u8], from: Station) {
        let Ok((config, rest)) = ConfigMessage::read_from_prefix(message) else { return };
        let Some(disk) = self.disks.get(at) else { return };
        let command = config.command();
        let len = usize::from(config.string_length.get());
        let string = rest.get(..len).filter(|string| string.len() <= AOE_MAX_CONFIG);
        let has = &disk.settings.config;
        let refused = |code| SaveOutcome::Answer(Some(code));
        let outcome = match (command, string) {
            (ConfigCommand::READ, _) => SaveOutcome::Answer(None),
            (ConfigCommand::TEST, Some(string)) if string == has => SaveOutcome::Answer(None),
            (ConfigCommand::TEST_PREFIX, Some(string)) if has.starts_with(string) => {
                SaveOutcome::Answer(None)
            }
            (ConfigCommand::TEST | ConfigCommand::TEST_PREFIX, Some(_)) => return,
            (ConfigCommand::SET | ConfigCommand::FORCE_SET, Some(_))
                if disk.is_reserved_against(from.mac) =>
            {
                refused(ErrorCode::TARGET_IS_RESERVED)
            }
            (ConfigCommand::SET, Some(string)) if !has.is_empty() && string != has => {
                refused(ErrorCode::CONFIG_STRING_PRESENT)
            }
            (ConfigCommand::SET | ConfigCommand::FORCE_SET, Some(string)) => {
                let string = string.to_vec();
                self.change(at, |settings| {
                    settings.config = string;
                    Ok(())
                })
            }
            _ => refused(ErrorCode::BAD_ARGUMENT_PARAMETER),
        };
        self.answer_when_saved(at, answer, from, SaveRequest::Config(command), outcome);
    }

    /// Announces all disks to the stations at a port, as after a start, so that an initiator that
    /// waits for a disk need not query again.
    pub(super) fn advertise(&mut self, port: PortId) {
        for at in 0..self.disks.len() {
            let Some(disk) = self.disks.get_mut(at) else { return };
            disk.refresh();
            if !disk.is_at(port) {
                continue;
            }
            let request = Header {
                version_and_flags: AOE_VERSION << 4 | AOE_FLAG_RESPONSE,
                error: 0,
                major: 0.into(),
                minor: 0,
                command: AoeCommand::QUERY_CONFIG_INFORMATION.0,
                tag: 0.into(),
            };
            let answer = disk.answer_to(&request);
            let listeners = match disk.settings.masks.is_empty() {
                true => vec![Mac::BROADCAST],
                false => disk.settings.masks.clone(),
            };
            for mac in listeners {
                self.answer_config(at, answer, ConfigCommand::READ, Station { port, mac }, None);
            }
        }
    }

    fn answer_config(
        &mut self,
        at: usize,
        answer: Header,
        command: ConfigCommand,
        to: Station,
        code: Option<ErrorCode>,
    ) {
        match command {
            ConfigCommand::SET => self.audit_change(at, to, "config string set", code.is_none()),
            ConfigCommand::FORCE_SET => self.audit_change(at, to, "config string force set", code.is_none()),
            _ => {}
        }
        let Some((port, disk)) = self.port(to.port).zip(self.disks.get(at)) else { return };
        let message = ConfigMessage {
            buffer_count: (port.buffers.clamp(1, MAX_BUFFERS) as u16).into(),
            firmware_version: FIRMWARE_VERSION.into(),
            sector_count: sectors_in(port.mtu),
            version_and_command: AOE_VERSION << 4 | command.0 & 0x0f,
            string_length: (disk.settings.config.len() as u16).into(),
        };
        let answer = code.map_or(answer, |code| refusing(answer, code));
        let string = match disk.settings.config.as_slice() {
            [] => SgList::default(),
            string => SgList::one(Seg::from_slice(string)),
        };
        self.answer(to, answer, message.as_bytes(), string);
    }

    /// Handles MAC mask list: reads or edits the list.
    pub(super) fn on_mask(&mut self, at: usize, answer: Header, message: &[u8], from: Station) {
        let Ok((request, rest)) = MacMaskMessage::read_from_prefix(message) else { return };
        let outcome = match MacMaskCommand(request.command) {
            MacMaskCommand::READ => SaveOutcome::Answer(None),
            MacMaskCommand::EDIT if self.is_reserved(at, from) => {
                SaveOutcome::Answer(Some(ErrorCode::TARGET_IS_RESERVED))
            }
            MacMaskCommand::EDIT => {
                let count = usize::from(request.count);
                match <[MacDirective]>::ref_from_prefix_with_elems(rest, count) {
                    Ok((directives, _)) => {
                        let mut refused = None;
                        let outcome = self.change(at, |settings| {
                            edit(settings, directives).map_err(|why| {
                                refused = Some(why);
                                ErrorCode::BAD_ARGUMENT_PARAMETER
                            })
                        });
                        if let Some((error, done)) = refused {
                            // The error is in the message, not the header, with the index of the
                            // failed directive.
                            let reply = MacMaskMessage { error: error.0, count: done, ..request };
                            return self.answer(from, answer, reply.as_bytes(), SgList::default());
                        }
                        outcome
                    }
                    Err(_) => SaveOutcome::Answer(Some(ErrorCode::BAD_ARGUMENT_PARAMETER)),
                }
            }
            _ => SaveOutcome::Answer(Some(ErrorCode::BAD_ARGUMENT_PARAMETER)),
        };
        self.answer_when_saved(at, answer, from, SaveRequest::Masks(request), outcome);
    }

    fn answer_masks(
        &mut self,
        at: usize,
        answer: Header,
        request: MacMaskMessage,
        from: Station,
        code: Option<ErrorCode>,
    ) {
        if MacMaskCommand(request.command) == MacMaskCommand::EDIT {
            self.audit_change(at, from, "MAC mask list", code.is_none());
        }
        let mut reply = MacMaskMessage { error: MacMaskError::NONE.0, count: 0, ..request };
        if let Some(code) = code {
            return self.refuse(from, answer, reply.as_bytes(), code);
        }
        let Some(disk) = self.disks.get(at) else { return };
        let masks = &disk.settings.masks;
        reply.count = masks.len() as u8;
        let entry = |mac: &Mac| MacDirective { reserved: 0, command: 0, mac: *mac };
        let list: Vec<MacDirective> = masks.iter().map(entry).collect();
        let data = bytes(list.as_bytes());
        self.answer(from, answer, reply.as_bytes(), data);
    }

    /// Handles reserve and release: reads or replaces the reservation; an empty list releases it.
    pub(super) fn on_reserve(&mut self, at: usize, answer: Header, message: &[u8], from: Station) {
        let Ok((request, rest)) = ReserveMessage::read_from_prefix(message) else { return };
        let refused = |code| SaveOutcome::Answer(Some(code));
        let outcome = match ReserveCommand(request.command) {
            ReserveCommand::READ => SaveOutcome::Answer(None),
            ReserveCommand::SET if self.is_reserved(at, from) => refused(ErrorCode::TARGET_IS_RESERVED),
            ReserveCommand::SET | ReserveCommand::FORCE_SET => {
                match <[Mac]>::ref_from_prefix_with_elems(rest, request.count.into()) {
                    Ok((macs, _)) if macs.len() <= MAX_RESERVED => self.change(at, |settings| {
                        settings.reserved = macs.to_vec();
                        Ok(())
                    }),
                    _ => refused(ErrorCode::BAD_ARGUMENT_PARAMETER),
                }
            }
            _ => refused(ErrorCode::BAD_ARGUMENT_PARAMETER),
        };
        self.answer_when_saved(at, answer, from, SaveRequest::Reserved(request), outcome);
    }

    fn answer_reserved(
        &mut self,
        at: usize,
        answer: Header,
        request: ReserveMessage,
        from: Station,
        code: Option<ErrorCode>,
    ) {
        match ReserveCommand(request.command) {
            ReserveCommand::SET => self.audit_change(at, from, "Reserve/Release set", code.is_none()),
            ReserveCommand::FORCE_SET => {
                self.audit_change(at, from, "Reserve/Release force set", code.is_none())
            }
            _ => {}
        }
        let mut reply = ReserveMessage { count: 0, ..request };
        if let Some(code) = code {
            return self.refuse(from, answer, reply.as_bytes(), code);
        }
        let Some(disk) = self.disks.get(at) else { return };
        reply.count = disk.settings.reserved.len() as u8;
        let data = bytes(disk.settings.reserved.as_bytes());
        self.answer(from, answer, reply.as_bytes(), data);
    }

    /// Changes the settings of a disk.
    fn change(
        &mut self,
        at: usize,
        change: impl FnOnce(&mut DiskSettings) -> Result<(), ErrorCode>,
    ) -> SaveOutcome {
        let Some(disk) = self.disks.get_mut(at) else { return SaveOutcome::Silence };
        let changed = disk.unit.change(change);
        disk.refresh();
        match changed {
            SettingsChange::Done => SaveOutcome::Answer(None),
            SettingsChange::Refused(code) => SaveOutcome::Answer(Some(code)),
            SettingsChange::Saving(_) if self.waiting.len() >= MAX_WAITING => SaveOutcome::Silence,
            SettingsChange::Saving(proposal) => SaveOutcome::Wait(proposal),
            SettingsChange::Busy => SaveOutcome::Silence,
        }
    }

    /// Answers the request now, or when the change is stored.
    fn answer_when_saved(
        &mut self,
        at: usize,
        answer: Header,
        from: Station,
        asked: SaveRequest,
        outcome: SaveOutcome,
    ) {
        match outcome {
            SaveOutcome::Answer(code) => self.answer_asked(at, answer, from, asked, code),
            SaveOutcome::Wait(proposal) => self.waiting.push(SaveWaiter { proposal, answer, from, asked }),
            SaveOutcome::Silence => {}
        }
    }

    /// Answers the requests whose changes are stored or have failed, and schedules the next poll
    /// for the others.
    pub(super) fn poll_changes(&mut self, now: Instant) {
        let mut still = Vec::new();
        for waiting in std::mem::take(&mut self.waiting) {
            let SaveWaiter { proposal, answer, from, asked } = waiting;
            let address = AoeAddress { shelf: answer.major.get(), slot: answer.minor };
            // The requests of a disk that is no longer served get no answer.
            let Some(at) = self.position(address) else { continue };
            let Some(disk) = self.disks.get_mut(at) else { continue };
            match disk.unit.is_changed(proposal) {
                None => still.push(waiting),
                Some(is_saved) => {
                    disk.refresh();
                    // A change that cannot be stored does not take effect.
                    let code = (!is_saved).then_some(ErrorCode::DEVICE_UNAVAILABLE);
                    self.answer_asked(at, answer, from, asked, code);
                }
            }
        }
        self.waiting = still;
        self.poll_at = if self.waiting.is_empty() { None } else { now.checked_add(POLL_INTERVAL) };
    }

    fn answer_asked(
        &mut self,
        at: usize,
        answer: Header,
        from: Station,
        asked: SaveRequest,
        code: Option<ErrorCode>,
    ) {
        match asked {
            SaveRequest::Config(command) => self.answer_config(at, answer, command, from, code),
            SaveRequest::Masks(request) => self.answer_masks(at, answer, request, from, code),
            SaveRequest::Reserved(request) => self.answer_reserved(at, answer, request, from, code),
        }
    }

    fn audit_change(&mut self, at: usize, from: Station, change: &'static str, is_done: bool) {
        if let Some(disk) = self.disks.get(at) {
            self.audit.changed(from.mac, disk.unit.address, change, is_done);
        }
    }

    fn is_reserved(&self, at: usize, from: Station) -> bool {
        self.disks.get(at).is_some_and(|disk| disk.is_reserved_against(from.mac))
    }
}

/// Applies the directives in order, all or none. On failure returns the error and the index of the
/// failed directive.
fn edit(settings: &mut DiskSettings, directives: &[MacDirective]) -> Result<(), (MacMaskError, u8)> {
    for (done, directive) in (0..).zip(directives) {
        let has = settings.masks.contains(&directive.mac);
        match DirectiveCommand(directive.command) {
            DirectiveCommand::NONE => {}
            DirectiveCommand::ADD if has => {}
            DirectiveCommand::ADD if settings.masks.len() >= MAX_MASKS => {
                return Err((MacMaskError::LIST_FULL, done));
            }
            DirectiveCommand::ADD => settings.masks.push(directive.mac),
            DirectiveCommand::DELETE => settings.masks.retain(|mac| *mac != directive.mac),
            _ => return Err((MacMaskError::BAD_DIRECTIVE, done)),
        }
    }
    Ok(())
}

fn bytes(bytes: &[u8]) -> SgList {
    if bytes.is_empty() { SgList::default() } else { SgList::one(Seg::from_slice(bytes)) }
}

const FIRMWARE_VERSION: u16 = 1;
/// Interval of polling the store; about the time of a disk's flush.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// The maximum number of waiting requests.
const MAX_WAITING: usize = 64;
