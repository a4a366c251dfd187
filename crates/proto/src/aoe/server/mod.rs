//! The target: any number of disks at any number of ports.
//!
//! ```text
//!   on_frame ─▶ header: version, address ─▶ mask ─┬▶ command.rs: registers ─▶ recent.rs ─▶ Pending ─▶ poll_io
//!                                                 └▶ control.rs: config string, masks, reservation ─▶ saving.rs
//!   frames  ◀─ reply.rs: registers and data ◀── on_io
//! ```
//! Everything is answered to the port and the station that it came from. What makes no sense is not
//! answered; what makes sense and cannot be done is refused. Bounds: [`DEPTH`] commands in flight
//! and `DEPTH_OF_ONE` of each initiator, `MAX_UNSENT` frames that wait to be sent; what comes
//! beyond is lost, as in a network, and comes again.

mod audit;
mod command;
mod control;
mod count;
mod recent;
mod reply;
mod saving;
#[cfg(test)]
pub(in crate::aoe) mod tests;

use self::audit::StationAudit;
use self::recent::Recent;
use self::reply::PendingAoeCommand;
use self::saving::SaveWaiter;
use super::AoeAddress;
use super::unit::{AoeUnit, DiskSettings};
use crate::event::AuditEvent;
use crate::exports::{Export, Exports, VolumeId};
use crate::frames::{Frame, FrameOutbox, FramePortInfo, PortId, Station};
use crate::session::{FrameSession, SessionStage, Target, Timed};
use crate::slots::{SlotKey, Slots};
use crate::volume_state::Admissions;
use crate::volume_uuid::VolumeUuid;
use blockmux_volume::{Completion, Io, SgList, Tag, Waker};
use blockmux_wire::aoe::{
    ANY_SHELF, ANY_SLOT, AOE_FLAG_ERROR, AOE_FLAG_RESPONSE, AOE_VERSION, AoeCommand, ErrorCode, Header,
};
use blockmux_wire::ethernet::Mac;
use foldhash::HashMap;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;
use zerocopy::{FromBytes, IntoBytes};

/// Serves disks to whoever sends frames.
pub struct TargetSession {
    admissions: Admissions,
    /// In the order of their addresses.
    disks: Vec<ServedDisk>,
    ports: Vec<FramePortInfo>,
    pending: Slots<PendingAoeCommand>,
    /// Of each initiator that has any in flight.
    in_flight: HashMap<Mac, u32>,
    recent: Recent,
    audit: StationAudit,
    ready: VecDeque<(VolumeId, Io)>,
    /// Who waits for what is set to be kept, and when that is looked at again.
    waiting: Vec<SaveWaiter>,
    ask_at: Option<Instant>,
    outbox: FrameOutbox,
    stops: bool,
}

/// A disk, and a copy of what is set on it.
struct ServedDisk {
    unit: AoeUnit,
    /// Its volume, and whether it may be written.
    export: Arc<Export>,
    uuid: Option<VolumeUuid>,
    version: u32,
    settings: DiskSettings,
}

/// Two disks cannot have the same address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("two disks have the address {0}")]
pub struct DoubleAddress(pub AoeAddress);

impl TargetSession {
    /// A target with these disks, whose volumes are places in `exports`.
    ///
    /// # Errors
    /// If two have the same address.
    pub fn new(exports: Exports, mut units: Vec<AoeUnit>) -> Result<TargetSession, DoubleAddress> {
        units.sort_by_key(|unit| unit.address);
        for pair in units.windows(2) {
            if let [first, second] = pair
                && first.address == second.address
            {
                return Err(DoubleAddress(first.address));
            }
        }
        let served: Vec<_> =
            units.iter().filter_map(|unit| Some((unit.volume, exports.served(unit.volume)?))).collect();
        let admissions = Admissions::new(served.iter().map(|(volume, served)| (*volume, served)), None);
        let disk = |unit: AoeUnit| {
            let export = exports.get(unit.volume)?;
            let uuid = exports.served(unit.volume)?.uuid();
            Some(ServedDisk { version: unit.version(), settings: unit.settings(), export, uuid, unit })
        };
        Ok(TargetSession {
            admissions,
            disks: units.into_iter().filter_map(disk).collect(),
            ports: Vec::new(),
            pending: Slots::default(),
            in_flight: HashMap::default(),
            recent: Recent::default(),
            audit: StationAudit::default(),
            ready: VecDeque::new(),
            waiting: Vec::new(),
            ask_at: None,
            outbox: FrameOutbox::default(),
            stops: false,
        })
    }

    /// Whether nothing is in flight and nothing left to send.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.pending.is_empty() && self.outbox.is_empty()
    }

    /// The places among which the disks are that a request is for, as a range.
    fn addressed(&self, header: &Header) -> std::ops::Range<usize> {
        let (shelf, slot) = (header.major.get(), header.minor);
        if shelf == ANY_SHELF {
            return 0..self.disks.len();
        }
        let at = |disk: &ServedDisk| (disk.unit.address.shelf, disk.unit.address.slot);
        let first = if slot == ANY_SLOT { 0 } else { slot };
        self.disks.partition_point(|disk| at(disk) < (shelf, first))
            ..self.disks.partition_point(|disk| at(disk) <= (shelf, slot))
    }

    fn port(&self, id: PortId) -> Option<&FramePortInfo> {
        self.ports.get(usize::from(id.0))
    }

    /// Answers with `message` and data behind it.
    fn answer(&mut self, to: Station, header: Header, message: &[u8], data: SgList) {
        let mut head = [0; crate::frames::MAX_HEAD];
        let len = size_of::<Header>();
        let (first, rest) = head.split_at_mut(len);
        first.copy_from_slice(header.as_bytes());
        let (place, _) = rest.split_at_mut(message.len().min(rest.len()));
        place.copy_from_slice(message);
        let head = head.get(..len.saturating_add(message.len())).unwrap_or_default();
        self.outbox.push(to, head, data);
    }

    /// Refuses with AoE's own error; the message goes back as it came.
    fn refuse(&mut self, to: Station, header: Header, message: &[u8], code: ErrorCode) {
        self.answer(to, refusing(header, code), message, SgList::default());
    }

    /// Whether there is room for another command of that initiator.
    fn has_room(&self, who: Mac) -> bool {
        self.pending.len() < DEPTH as usize
            && self.in_flight.get(&who).is_none_or(|count| *count < DEPTH_OF_ONE)
    }
}

impl ServedDisk {
    /// Brings the copy up to date.
    #[inline]
    fn refresh(&mut self) {
        let version = self.unit.version();
        if version != self.version {
            (self.version, self.settings) = (version, self.unit.settings());
        }
    }

    /// Whether a request names this disk, or all of its shelf or slot.
    fn is_named_by(&self, request: &Header) -> bool {
        let AoeAddress { shelf, slot } = self.unit.address;
        [shelf, ANY_SHELF].contains(&request.major.get()) && [slot, ANY_SLOT].contains(&request.minor)
    }

    fn listens_to(&self, who: Mac) -> bool {
        self.settings.masks.is_empty() || self.settings.masks.contains(&who)
    }

    /// Whether it is reserved for others.
    fn is_reserved_from(&self, who: Mac) -> bool {
        !self.settings.reserved.is_empty() && !self.settings.reserved.contains(&who)
    }

    /// The head of an answer to `request`.
    fn answer_to(&self, request: &Header) -> Header {
        Header {
            version_and_flags: AOE_VERSION << 4 | AOE_FLAG_RESPONSE,
            error: 0,
            major: self.unit.address.shelf.into(),
            minor: self.unit.address.slot,
            ..*request
        }
    }
}

impl Timed for TargetSession {
    #[inline]
    fn poll_timeout(&self) -> Option<Instant> {
        [self.ask_at, self.audit.look_at()].into_iter().flatten().min()
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), crate::session::ProtocolError> {
        self.look_at_changes(now);
        self.audit.look(now);
        Ok(())
    }
}

impl FrameSession for TargetSession {
    fn on_frame(&mut self, frame: &Frame<'_>, now: Instant) {
        let Ok((header, rest)) = Header::read_from_prefix(frame.bytes()) else { return };
        // Nobody is a group; what is answered to one is answered to everybody.
        if header.is_response() || frame.from.mac.is_group() || self.stops || self.outbox.len() >= MAX_UNSENT
        {
            return;
        }
        let command = AoeCommand(header.command);
        let is_for_all = header.major.get() == ANY_SHELF || header.minor == ANY_SLOT;
        if is_for_all && command != AoeCommand::QUERY_CONFIG_INFORMATION {
            // Nobody means to read or change all disks at once.
            return;
        }
        if command == AoeCommand::QUERY_CONFIG_INFORMATION {
            self.audit.asked(frame.from.mac, now);
        }
        for at in self.addressed(&header) {
            let Some(disk) = self.disks.get_mut(at) else { return };
            disk.refresh();
            if !disk.is_named_by(&header) {
                continue;
            }
            if !disk.listens_to(frame.from.mac) {
                if !is_for_all {
                    self.audit.refused(
                        frame.from.mac,
                        disk.unit.address,
                        "the MAC mask list of the disk lacks it",
                    );
                }
                continue;
            }
            let answer = disk.answer_to(&header);
            if header.version() != AOE_VERSION {
                self.refuse(frame.from, answer, &[], ErrorCode::UNSUPPORTED_VERSION);
                continue;
            }
            match command {
                AoeCommand::ISSUE_ATA_COMMAND => self.on_ata(at, answer, frame, now),
                AoeCommand::QUERY_CONFIG_INFORMATION => self.on_config(at, answer, rest, frame.from),
                AoeCommand::MAC_MASK_LIST => self.on_mask(at, answer, rest, frame.from),
                AoeCommand::RESERVE_RELEASE => self.on_reserve(at, answer, rest, frame.from),
                _ => self.refuse(frame.from, answer, &[], ErrorCode::UNRECOGNIZED_COMMAND_CODE),
            }
        }
        if !self.waiting.is_empty() {
            self.look_at_changes(now);
        }
    }

    fn on_port(&mut self, id: PortId, port: FramePortInfo, _now: Instant) {
        let at = usize::from(id.0);
        let down = FramePortInfo { is_up: false, ..port };
        if self.ports.len() <= at {
            self.ports.resize(at.saturating_add(1), down);
        }
        let was_up = self.port(id).is_some_and(|old| *old == port);
        if let Some(place) = self.ports.get_mut(at) {
            *place = port;
        }
        if port.is_up && !was_up {
            self.advertise(id);
        }
    }

    fn frames(&mut self, _now: Instant) -> &mut FrameOutbox {
        &mut self.outbox
    }
}

impl Target for TargetSession {
    fn depth(&self) -> u32 {
        DEPTH
    }

    #[inline]
    fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
        self.ready.pop_front()
    }

    fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
        None
    }

    fn on_io(&mut self, done: Completion, _now: Instant) {
        self.finish(SlotKey(done.tag.0), done.result);
    }

    fn on_start(&mut self, _waker: &Waker, _now: Instant) {}

    fn on_turn(&mut self, _now: Instant) {}

    #[inline]
    fn poll_event(&mut self) -> Option<AuditEvent> {
        self.audit.pop()
    }

    /// There is no handshake.
    fn stage(&self) -> SessionStage {
        SessionStage::Established
    }

    fn owed(&self) -> Option<u64> {
        None
    }

    fn on_stop(&mut self, _now: Instant) {
        self.stops = true;
    }
}

/// The head of an answer that refuses with AoE's own error.
fn refusing(header: Header, code: ErrorCode) -> Header {
    let version_and_flags = header.version_and_flags | AOE_FLAG_ERROR;
    Header { version_and_flags, error: code.0, ..header }
}

/// The key of a command in flight as its tag.
fn tag(key: SlotKey) -> Tag {
    Tag(key.0)
}

/// Of I/O that gets its tag when it is put in flight.
const NO_TAG: Tag = Tag(0);
/// Commands in flight.
pub const DEPTH: u32 = 1024;
/// Commands of one initiator in flight: twice what it is told.
const DEPTH_OF_ONE: u32 = 2 * MAX_BUFFERS;
/// The most commands that initiators are told to have outstanding.
const MAX_BUFFERS: u32 = 128;
/// Frames that wait to be sent; a query of all shelves may go beyond by as many disks as there are.
const MAX_UNSENT: usize = 4096;
