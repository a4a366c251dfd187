//! The AoE target: any number of disks at any number of ports.
//!
//! ```text
//!   on_frame ─▶ header ─▶ mask ─┬▶ command.rs: registers ─▶ recent_writes.rs ─▶ poll_io
//!                               └▶ control.rs: config string, masks, reservation ─▶ store
//!   frames  ◀─ reply.rs: registers and data ◀── on_io
//! ```
//! Every answer goes to the port and the station that the request came from. Malformed requests get
//! no answer; valid requests that cannot be carried out get an error. Limits: [`DEPTH`] commands in
//! flight, `DEPTH_PER_INITIATOR` of each initiator, and `MAX_UNSENT` unsent frames. Frames beyond a
//! limit are dropped, and the initiator retransmits them.

mod audit;
mod command;
mod control;
mod recent_writes;
mod reply;
mod tag_counter;
#[cfg(test)]
pub(in crate::aoe) mod tests;

use self::audit::StationAudit;
use self::control::SaveWaiter;
use self::recent_writes::RecentWrites;
use self::reply::{PendingAoeCommand, ReplyForm};
use super::AoeAddress;
use super::disks::{AoeDisk, AoeDisks};
use super::unit::{AoeUnit, DiskSettings};
use crate::driver::audit_event::AuditEvent;
use crate::driver::frames::{Frame, FrameOutbox, FramePortInfo, OutFrame, PortId, Station};
use crate::driver::session::{FrameSession, Timed};
use crate::driver::target::{Charge, IoSource, SessionStage, TargetLifecycle};
use crate::exports::{Export, Exports, VolumeId};
use crate::names::volume_uuid::VolumeUuid;
use crate::slots::{SlotKey, Slots};
use crate::volume_state::{Admissions, NotAdmitted, RequiredAccess, SessionlessUser};
use blockmux_volume::{Completion, Cost, Io, IoError, SgList, Tag, Waker};
use blockmux_wire::aoe::{
    ANY_SHELF, ANY_SLOT, AOE_FLAG_ERROR, AOE_FLAG_RESPONSE, AOE_VERSION, AoeCommand, ErrorCode, Header,
};
use blockmux_wire::ethernet::Mac;
use foldhash::HashMap;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;
use zerocopy::{FromBytes, IntoBytes};

/// Session of an AoE target, which answers the frames of all initiators.
pub struct AoeTargetSession {
    exports: Exports,
    admissions: Admissions,
    /// The list of disks, and the version of the copy in `disks`.
    list: AoeDisks,
    version: u32,
    /// The disks, sorted by address.
    disks: Vec<ServedDisk>,
    /// The addresses of all disks so far; a disk's number is its index.
    numbers: Vec<AoeAddress>,
    ports: Vec<FramePortInfo>,
    pending: Slots<PendingAoeCommand>,
    /// Number of commands of each initiator that has any.
    in_flight: HashMap<Mac, u32>,
    /// Number of commands whose I/O has begun.
    begun: usize,
    recent_writes: RecentWrites,
    audit: StationAudit,
    ready: VecDeque<(VolumeId, Io)>,
    /// Requests whose changes are being stored, and when to poll the store again.
    waiting: Vec<SaveWaiter>,
    poll_at: Option<Instant>,
    outbox: FrameOutbox,
    stops: bool,
}

/// A disk, and a copy of its settings.
struct ServedDisk {
    unit: AoeUnit,
    /// The ports at which it is served; `None` for all.
    ports: Option<Vec<PortId>>,
    /// Number of the disk, which stays when others are added or removed.
    number: u16,
    /// Export of its volume.
    export: Arc<Export>,
    uuid: Option<VolumeUuid>,
    version: u32,
    settings: DiskSettings,
    /// Keeps the volume here.
    _user: SessionlessUser,
}

impl AoeTargetSession {
    /// A target with these disks, whose volumes are in `exports`.
    #[must_use]
    pub fn new(exports: Exports, list: AoeDisks) -> AoeTargetSession {
        let mut session = AoeTargetSession {
            exports,
            admissions: Admissions::new(std::iter::empty(), None),
            version: list.version(),
            list,
            disks: Vec::new(),
            numbers: Vec::new(),
            ports: Vec::new(),
            pending: Slots::default(),
            in_flight: HashMap::default(),
            begun: 0,
            recent_writes: RecentWrites::default(),
            audit: StationAudit::default(),
            ready: VecDeque::new(),
            waiting: Vec::new(),
            poll_at: None,
            outbox: FrameOutbox::default(),
            stops: false,
        };
        session.renew_disks();
        session
    }

    /// Takes over the list of disks. I/O that has begun on a disk that is gone completes, and what
    /// has not begun is refused. New disks are announced.
    #[cold]
    fn renew_disks(&mut self) {
        self.version = self.list.version();
        let mut before = std::mem::take(&mut self.disks);
        let mut has_new = false;
        for AoeDisk { unit, ports } in self.list.list() {
            let is_it =
                |disk: &ServedDisk| (disk.unit.address, disk.unit.volume) == (unit.address, unit.volume);
            let disk = match before.iter().position(is_it) {
                Some(at) => Some(ServedDisk { ports, ..before.swap_remove(at) }),
                None => self.new_disk(unit, ports).inspect(|_| has_new = true),
            };
            self.disks.extend(disk);
        }
        let disks = &self.disks;
        self.admissions.retain(|volume| disks.iter().any(|disk| disk.unit.volume == volume));
        self.audit.retain_disks(|address| disks.iter().any(|disk| disk.unit.address == address));
        if has_new {
            let up = self.ports.iter().zip(0..).filter(|(port, _)| port.is_up);
            let up: Vec<_> = up.map(|(_, id)| PortId(id)).collect();
            up.into_iter().for_each(|id| self.advertise(id));
        }
    }

    /// A disk that was not served before; `None` if its volume was removed.
    fn new_disk(&mut self, unit: AoeUnit, ports: Option<Vec<PortId>>) -> Option<ServedDisk> {
        let export = self.exports.get(unit.volume)?;
        let volume_state = self.exports.volume_state(unit.volume)?;
        let user = SessionlessUser::new(&volume_state, self.admissions.begin_again());
        self.admissions.add(unit.volume, &volume_state, None);
        let known = self.numbers.iter().position(|address| *address == unit.address);
        let number = known.unwrap_or(self.numbers.len()) as u16;
        if known.is_none() {
            self.numbers.push(unit.address);
        }
        let (version, settings, uuid) = (unit.version(), unit.settings(), volume_state.uuid());
        Some(ServedDisk { unit, ports, number, export, uuid, version, settings, _user: user })
    }

    /// The index of a disk.
    fn position(&self, address: AoeAddress) -> Option<usize> {
        self.disks.binary_search_by_key(&address, |disk| disk.unit.address).ok()
    }

    /// Whether no command is in flight and no frame unsent.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.pending.is_empty() && self.outbox.is_empty()
    }

    /// The index range that contains the disks that a request addresses.
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

    /// Queues an answer: `header`, `message`, then `data`.
    fn answer(&mut self, to: Station, header: Header, message: &[u8], data: SgList) {
        let mut head = [0; crate::driver::frames::MAX_HEAD];
        let len = size_of::<Header>();
        let (first, rest) = head.split_at_mut(len);
        first.copy_from_slice(header.as_bytes());
        let (place, _) = rest.split_at_mut(message.len().min(rest.len()));
        place.copy_from_slice(message);
        let head = head.get(..len.saturating_add(message.len())).unwrap_or_default();
        self.outbox.push_back(OutFrame::new(to, head, data));
    }

    /// Queues an AoE error; the request's message is sent back unchanged.
    fn refuse(&mut self, to: Station, header: Header, message: &[u8], code: ErrorCode) {
        self.answer(to, refusing(header, code), message, SgList::default());
    }

    /// Whether another command of this initiator may be started. Commands that the driver holds,
    /// because limits throttle them or their range is locked, leave room for those of others.
    fn has_room(&self, mac: Mac, kind: ReplyForm) -> bool {
        let in_flight = self.in_flight.get(&mac).copied().unwrap_or_default();
        self.pending.len() < DEPTH as usize
            && in_flight < DEPTH_PER_INITIATOR
            && (kind == ReplyForm::Flush || self.waiting() == 0 || self.has_room_to_wait(mac))
    }

    /// Number of commands that the driver has taken and not begun.
    fn waiting(&self) -> usize {
        self.pending.len().saturating_sub(self.begun).saturating_sub(self.ready.len())
    }

    #[cold]
    fn has_room_to_wait(&self, mac: Mac) -> bool {
        let most = if self.waiting() < MAX_WAITING { MAX_WAITING_PER_INITIATOR } else { 1 };
        self.pending.count_of(|pending| pending.from.mac == mac && !pending.has_begun) < most
    }
}

impl ServedDisk {
    /// Refreshes the copy of the settings.
    #[inline]
    fn refresh(&mut self) {
        let version = self.unit.version();
        if version != self.version {
            (self.version, self.settings) = (version, self.unit.settings());
        }
    }

    /// Whether a request addresses this disk, directly or by a broadcast shelf or slot.
    fn is_named_by(&self, request: &Header) -> bool {
        let AoeAddress { shelf, slot } = self.unit.address;
        [shelf, ANY_SHELF].contains(&request.major.get()) && [slot, ANY_SLOT].contains(&request.minor)
    }

    fn is_at(&self, port: PortId) -> bool {
        self.ports.as_ref().is_none_or(|ports| ports.contains(&port))
    }

    fn accepts(&self, mac: Mac) -> bool {
        self.settings.masks.is_empty() || self.settings.masks.contains(&mac)
    }

    /// Whether the disk is reserved for other stations than `mac`.
    fn is_reserved_against(&self, mac: Mac) -> bool {
        !self.settings.reserved.is_empty() && !self.settings.reserved.contains(&mac)
    }

    /// The header of the answer to `request`.
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

impl Timed for AoeTargetSession {
    #[inline]
    fn poll_timeout(&self) -> Option<Instant> {
        [self.poll_at, self.audit.next_expiry].into_iter().flatten().min()
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), crate::driver::session::ProtocolError> {
        self.poll_changes(now);
        self.audit.expire(now);
        Ok(())
    }
}

impl FrameSession for AoeTargetSession {
    fn on_frame(&mut self, frame: &Frame<'_>, now: Instant) {
        let Ok((header, rest)) = Header::read_from_prefix(frame.bytes()) else { return };
        // A group address is no valid sender: the answer would be a broadcast.
        if header.is_response() || frame.from.mac.is_group() || self.stops || self.outbox.len() >= MAX_UNSENT
        {
            return;
        }
        let command = AoeCommand(header.command);
        let is_for_all = header.major.get() == ANY_SHELF || header.minor == ANY_SLOT;
        if is_for_all && command != AoeCommand::QUERY_CONFIG_INFORMATION {
            // Other commands are not valid as a broadcast.
            return;
        }
        if command == AoeCommand::QUERY_CONFIG_INFORMATION {
            self.audit.on_query(frame.from.mac, now);
        }
        for at in self.addressed(&header) {
            let Some(disk) = self.disks.get_mut(at) else { return };
            disk.refresh();
            if !disk.is_named_by(&header) || !disk.is_at(frame.from.port) {
                continue;
            }
            if !disk.accepts(frame.from.mac) {
                if !is_for_all {
                    self.audit.refused(
                        frame.from.mac,
                        disk.unit.address,
                        "its address is not in the disk's MAC mask list",
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
            self.poll_changes(now);
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

impl IoSource for AoeTargetSession {
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

    fn charge(&mut self, io: &Io) -> Charge {
        let pending = self.pending.get_mut(SlotKey(io.tag.0));
        Charge { cost: Cost::of(io), station: pending.map(|pending| pending.from.mac) }
    }

    #[inline]
    fn begin(&mut self, volume: VolumeId, io: &Io, _is_late: bool) -> Result<(), NotAdmitted<IoError>> {
        let key = SlotKey(io.tag.0);
        let needs = RequiredAccess::of(io.op);
        match self.admissions.admit(volume, io.op, (io.offset, io.len), needs, None) {
            Ok(guard) => {
                if let Some(pending) = self.pending.get_mut(key) {
                    (pending.guard, pending.has_begun) = (guard, true);
                    self.begun = self.begun.saturating_add(1);
                }
                Ok(())
            }
            Err(NotAdmitted::Denied(error)) => {
                self.finish(key, Err(error));
                Err(NotAdmitted::Denied(error))
            }
            Err(wait) => Err(wait),
        }
    }
}

impl TargetLifecycle for AoeTargetSession {
    type Source = Self;

    #[inline]
    fn source(&mut self) -> &mut Self {
        self
    }

    fn on_start(&mut self, _waker: &Waker, _now: Instant) {}

    #[inline]
    fn on_turn(&mut self, _now: Instant) {
        if self.list.version() != self.version {
            self.renew_disks();
        }
    }

    #[inline]
    fn poll_event(&mut self) -> Option<AuditEvent> {
        self.audit.pop()
    }

    /// AoE has no handshake.
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

/// The header of an answer with an AoE error.
fn refusing(header: Header, code: ErrorCode) -> Header {
    let version_and_flags = header.version_and_flags | AOE_FLAG_ERROR;
    Header { version_and_flags, error: code.0, ..header }
}

/// The tag of the I/O of the command with this key.
fn tag(key: SlotKey) -> Tag {
    Tag(key.0)
}

/// Placeholder until the I/O gets its tag.
const NO_TAG: Tag = Tag(0);
/// The maximum number of commands in flight.
pub const DEPTH: u32 = 1024;
/// The maximum number of commands in flight of one initiator: twice the advertised buffer count.
const DEPTH_PER_INITIATOR: u32 = 2 * MAX_BUFFERS;
/// The maximum number of commands that wait to begin; beyond it, one of each initiator.
const MAX_WAITING: usize = DEPTH as usize / 2;
/// The maximum number of commands of one initiator that wait to begin.
const MAX_WAITING_PER_INITIATOR: usize = 32;
/// The maximum buffer count that is advertised to initiators.
const MAX_BUFFERS: u32 = 128;
/// The maximum number of unsent frames; a broadcast query may exceed it by the number of disks.
const MAX_UNSENT: usize = 4096;
