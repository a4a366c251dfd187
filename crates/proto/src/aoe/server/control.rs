//! The commands other than ATA: config query, MAC mask list, reserve and release (AoEr11 sections
//! 3.2 to 3.4).
//!
//! A change is answered once it is stored; see `save.rs`.

use super::save::{SaveOutcome, SaveRequest};
use super::{AoeTargetSession, MAX_BUFFERS, refusing};
use crate::aoe::sectors_in;
use crate::aoe::unit::{DiskSettings, MAX_MASKS, MAX_RESERVED};
use crate::frames::{PortId, Station};
use blockmux_volume::{Seg, SgList};
use blockmux_wire::aoe::{
    AOE_FLAG_RESPONSE, AOE_MAX_CONFIG, AOE_VERSION, AoeCommand, ConfigCommand, ConfigMessage,
    DirectiveCommand, ErrorCode, Header, MacDirective, MacMaskCommand, MacMaskError, MacMaskMessage,
    ReserveCommand, ReserveMessage,
};
use blockmux_wire::ethernet::Mac;
use zerocopy::{FromBytes, IntoBytes};

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

    pub(super) fn answer_config(
        &mut self,
        at: usize,
        answer: Header,
        command: ConfigCommand,
        to: Station,
        code: Option<ErrorCode>,
    ) {
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

    pub(super) fn answer_masks(
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

    pub(super) fn answer_reserved(
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
