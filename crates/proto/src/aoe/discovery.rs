//! Discovery: broadcasts a config query, and sends IDENTIFY DEVICE to each disk that answers.

use super::AoeAddress;
use super::identify::AtaDisk;
use crate::driver::frames::{Frame, FrameOutbox, FramePortInfo, MAX_HEAD, OutFrame, PortId, Station};
use crate::driver::session::{FrameSession, Timed};
use blockmux_volume::SgList;
use blockmux_wire::aoe::{
    ANY_SHELF, ANY_SLOT, AOE_ATA_HEAD, AOE_MAX_CONFIG, AOE_VERSION, AoeCommand, AtaMessage, ConfigMessage,
    Header,
};
use blockmux_wire::ata;
use blockmux_wire::ethernet::Mac;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// A disk that a station has reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundDisk {
    /// Address of the disk.
    pub address: AoeAddress,
    /// The station that reported it.
    pub station: Station,
    /// Buffer count: the maximum number of outstanding commands.
    pub buffer_count: u16,
    /// The maximum number of sectors in a frame.
    pub sector_count: u8,
    /// Firmware version.
    pub firmware_version: u16,
    /// Config string.
    pub config: Vec<u8>,
    /// Its IDENTIFY DEVICE data, if it answered that as well.
    pub disk: Option<AtaDisk>,
}

/// Discovers disks until a deadline.
pub struct AoeDiscoverySession {
    id: u8,
    ports: Vec<FramePortInfo>,
    found: Vec<FoundDisk>,
    left_out: u64,
    outbox: FrameOutbox,
    ask_at: Option<Instant>,
    ends: Instant,
}

impl AoeDiscoverySession {
    /// A session that sends queries until `ends`. `id` is the upper byte of its tags.
    #[must_use]
    pub fn new(id: u8, now: Instant, ends: Instant) -> AoeDiscoverySession {
        let outbox = FrameOutbox::default();
        AoeDiscoverySession {
            id,
            ports: Vec::new(),
            found: Vec::new(),
            left_out: 0,
            outbox,
            ask_at: Some(now),
            ends,
        }
    }

    /// Whether the deadline has passed.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.ask_at.is_none()
    }

    /// The disks found, sorted by address, and the number of disks beyond the limit.
    #[must_use]
    pub fn into_found(mut self) -> (Vec<FoundDisk>, u64) {
        self.found.sort_by_key(|found| (found.address, found.station));
        (self.found, self.left_out)
    }

    fn ask(&mut self) {
        let up = (0..).map(PortId).zip(&self.ports).filter(|(_, port)| port.is_up);
        let all: Vec<Station> = up.map(|(port, _)| Station { port, mac: Mac::BROADCAST }).collect();
        let query = ConfigMessage { version_and_command: AOE_VERSION << 4, ..NO_CONFIG };
        let head = self.head(ANY_SHELF, ANY_SLOT, AoeCommand::QUERY_CONFIG_INFORMATION, 0);
        all.into_iter().for_each(|station| self.push(station, &head, query.as_bytes()));
        for at in 0..self.found.len() {
            self.identify(at);
        }
    }

    /// Sends IDENTIFY DEVICE to the disk with index `at`, unless it has answered.
    fn identify(&mut self, at: usize) {
        let Some(found) = self.found.get(at).filter(|found| found.disk.is_none()) else { return };
        let (station, address) = (found.station, found.address);
        let registers = AtaMessage {
            aflags: 0,
            error_or_feature: 0,
            sector_count: 1,
            command_or_status: ata::AtaCommand::IDENTIFY_DEVICE.0,
            lba: AtaMessage::lba28(0),
            reserved: [0; 2],
        };
        let head = self.head(address.shelf, address.slot, AoeCommand::ISSUE_ATA_COMMAND, at as u32);
        self.push(station, &head, registers.as_bytes());
    }

    fn head(&self, shelf: u16, slot: u8, command: AoeCommand, number: u32) -> Header {
        Header {
            version_and_flags: AOE_VERSION << 4,
            error: 0,
            major: shelf.into(),
            minor: slot,
            command: command.0,
            tag: (u32::from(self.id) << 24 | number).into(),
        }
    }

    fn push(&mut self, to: Station, head: &Header, message: &[u8]) {
        let mut bytes = [0; MAX_HEAD];
        let parts = head.as_bytes().iter().chain(message);
        bytes.iter_mut().zip(parts).for_each(|(place, byte)| *place = *byte);
        let len = size_of::<Header>().saturating_add(message.len());
        self.outbox.push_back(OutFrame::new(to, bytes.get(..len).unwrap_or_default(), SgList::default()));
    }

    fn on_config(&mut self, header: &Header, message: &[u8], station: Station) {
        let Ok((config, rest)) = ConfigMessage::read_from_prefix(message) else { return };
        let address = AoeAddress { shelf: header.major.get(), slot: header.minor };
        let is_known = self.found.iter().any(|found| found.address == address && found.station == station);
        let is_any = address.shelf == ANY_SHELF || address.slot == ANY_SLOT;
        if header.is_error() || is_known || is_any || station.mac.is_group() {
            return;
        }
        if self.found.len() >= MAX_FOUND {
            self.left_out = self.left_out.saturating_add(1);
            return;
        }
        let len = usize::from(config.string_length.get()).min(AOE_MAX_CONFIG);
        self.found.push(FoundDisk {
            address,
            station,
            buffer_count: config.buffer_count.get(),
            sector_count: config.sector_count,
            firmware_version: config.firmware_version.get(),
            config: rest.get(..len).unwrap_or_default().to_vec(),
            disk: None,
        });
        self.identify(self.found.len().saturating_sub(1));
    }

    fn on_identify(&mut self, header: &Header, frame: &Frame<'_>) {
        let tag = header.tag.get();
        let at = (tag & 0x00ff_ffff) as usize;
        if let Some(found) = self.found.get_mut(at).filter(|found| found.station == frame.from)
            && tag >> 24 == u32::from(self.id)
            && !header.is_error()
        {
            found.disk = frame.bytes().get(AOE_ATA_HEAD..).and_then(AtaDisk::from_bytes);
        }
    }
}

impl Timed for AoeDiscoverySession {
    fn poll_timeout(&self) -> Option<Instant> {
        self.ask_at.map(|at| at.min(self.ends))
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), crate::driver::session::ProtocolError> {
        if now >= self.ends {
            self.ask_at = None;
        } else if self.ask_at.is_some_and(|at| at <= now) {
            self.ask();
            self.ask_at = Some(now.checked_add(RETRY_INTERVAL).unwrap_or(now));
        }
        Ok(())
    }
}

impl FrameSession for AoeDiscoverySession {
    fn on_frame(&mut self, frame: &Frame<'_>, _now: Instant) {
        let Ok((header, message)) = Header::read_from_prefix(frame.bytes()) else { return };
        if !header.is_response() || header.version() != AOE_VERSION {
            return;
        }
        match AoeCommand(header.command) {
            AoeCommand::QUERY_CONFIG_INFORMATION => self.on_config(&header, message, frame.from),
            AoeCommand::ISSUE_ATA_COMMAND => self.on_identify(&header, frame),
            _ => {}
        }
    }

    fn on_port(&mut self, id: PortId, port: FramePortInfo, now: Instant) {
        let at = usize::from(id.0);
        if self.ports.len() <= at {
            self.ports.resize(at.saturating_add(1), FramePortInfo { is_up: false, ..port });
        }
        if let Some(place) = self.ports.get_mut(at) {
            *place = port;
        }
        self.ask_at = self.ask_at.map(|_| now);
    }

    fn frames(&mut self, _now: Instant) -> &mut FrameOutbox {
        &mut self.outbox
    }
}

const NO_CONFIG: ConfigMessage = ConfigMessage {
    buffer_count: zerocopy::U16::ZERO,
    firmware_version: zerocopy::U16::ZERO,
    sector_count: 0,
    version_and_command: 0,
    string_length: zerocopy::U16::ZERO,
};
/// The maximum number of disks in the result.
const MAX_FOUND: usize = 4096;
/// Interval of the queries; the network may lose a query or its answer.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
