//! Identification of a logical unit, command by command.
//!
//! ```text
//!   TEST UNIT READY ▶ REPORT LUNS ▶ INQUIRY ▶ VPD 00 ▶ 80 ▶ 83 ▶ B0 ▶ B1 ▶ B2
//!                     ▶ READ CAPACITY (16), or else (10) ▶ MODE SENSE, Caching page
//! ```
//! Only INQUIRY and a capacity are required. A unit that rejects other commands is assumed to lack
//! optional features.

use super::command;
use super::sense::SenseCode;
use super::unit::{Luns, MAX_LUNS, UnitInfo, UnmapLimits};
use crate::initiator::command_queue::CompletionClass;
use crate::scsi::Lun;
use blockmux_volume::IoError;
use blockmux_wire::scsi::capacity::{LBPME, LBPRZ, ReadCapacity10, ReadCapacity16};
use blockmux_wire::scsi::inquiry::{DEVICE_TYPE_BLOCK, TPGS_IMPLICIT_AND_EXPLICIT};
use blockmux_wire::scsi::mode::{DPOFUA, ModeHeader6, PAGE_ALL, PAGE_CACHING, WCE, WP};
use blockmux_wire::scsi::vpd::{
    ASSOCIATION_PORT, ASSOCIATION_UNIT, BlockDeviceCharacteristics, BlockLimits, DESIGNATOR_NAA,
    DESIGNATOR_PORT_GROUP, DESIGNATOR_T10_VENDOR, DesignatorHeader, LBPRZ_ZEROES, LBPU, LBPWS,
    LogicalBlockProvisioning, PAGE_BLOCK_LIMITS, PAGE_CHARACTERISTICS, PAGE_IDENTIFICATION,
    PAGE_PROVISIONING, PAGE_SERIAL, PAGE_SUPPORTED, VpdHeader,
};
use data_encoding::HEXLOWER;
use zerocopy::FromBytes;

/// Why a logical unit cannot be used as a volume.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnitRefused {
    /// No unit has this LUN.
    #[error("target has no logical unit {}", number(*.0))]
    NoSuchUnit(Lun),
    /// The unit is not a block device: a tape or a changer, for example.
    #[error("logical unit {} is not a disk: its device type is {device_type:#04x}", number(*.lun))]
    NotABlockDevice {
        /// The LUN.
        lun: Lun,
        /// PERIPHERAL DEVICE TYPE.
        device_type: u8,
    },
    /// The unit is not ready.
    #[error("logical unit {} is not ready: {why}", number(*.lun))]
    NotReady {
        /// The LUN.
        lun: Lun,
        /// Sense data of the response.
        why: UnitSense,
    },
    /// Another initiator has reserved the unit, so it does not report its capacity.
    #[error("logical unit {} is reserved by another initiator", number(*.0))]
    Reserved(Lun),
    /// A required command failed.
    #[error("logical unit {} refused {command}: {why}", number(*.lun))]
    Command {
        /// The LUN.
        lun: Lun,
        /// Name of the command.
        command: &'static str,
        /// Sense data of the response.
        why: UnitSense,
    },
    /// The unit's blocks have an unsupported length, or there are too many of them.
    #[error("logical unit {} has {blocks} blocks of {block_len} bytes, which is not supported", number(*.lun))]
    Geometry {
        /// The LUN.
        lun: Lun,
        /// Number of blocks.
        blocks: u64,
        /// Length of a block, in bytes.
        block_len: u32,
    },
    /// One of several paths leads to a different unit than the first one.
    #[error("leads to {unit}, not to {first} as {at} does")]
    DifferentUnit {
        /// The unit of this path.
        unit: String,
        /// The unit of the first path.
        first: String,
        /// Address of the first path.
        at: String,
    },
}

/// Sense data for a message, or its absence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitSense(pub Option<SenseCode>);

impl std::fmt::Display for UnitSense {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(code) => code.fmt(f),
            None => f.write_str("no sense data"),
        }
    }
}

impl UnitRefused {
    /// Whether a later attempt may succeed with a unit that was usable before.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, UnitRefused::NotReady { .. } | UnitRefused::NoSuchUnit(_) | UnitRefused::Reserved(_))
    }
}

/// State of the identification.
pub(super) struct UnitProbe {
    lun: Lun,
    step: UnitProbeStep,
    /// Number of retries of the current step.
    tries: u32,
    unit: UnitInfo,
    /// The target's logical units, as far as they were listed.
    pub(super) luns: Luns,
    /// Supported VPD pages.
    pages: Vec<u8>,
    /// The unit has target port groups.
    is_asymmetric: bool,
}

/// The result of a step.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum UnitProbeResult {
    /// Send the next command.
    More,
    /// Send the last command again after a delay.
    Later,
    /// The unit is identified.
    All,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum UnitProbeStep {
    TestUnitReady,
    ReportLuns,
    Inquiry,
    Page(u8),
    Capacity16,
    Capacity10,
    Caching,
}

impl UnitProbe {
    pub(super) fn new(lun: Lun) -> UnitProbe {
        UnitProbe {
            lun,
            step: UnitProbeStep::TestUnitReady,
            tries: 0,
            unit: UnitInfo::default(),
            luns: Vec::new(),
            pages: Vec::new(),
            is_asymmetric: false,
        }
    }

    /// The next command and its allocation length.
    pub(super) fn command(&self) -> ([u8; 16], u32) {
        match self.step {
            UnitProbeStep::TestUnitReady => ([0; 16], 0),
            UnitProbeStep::ReportLuns => (command::report_luns(LUNS_LEN), LUNS_LEN),
            UnitProbeStep::Inquiry => (command::inquiry(None, INQUIRY_LEN), INQUIRY_LEN.into()),
            UnitProbeStep::Page(page) => (command::inquiry(Some(page), PAGE_LEN), PAGE_LEN.into()),
            UnitProbeStep::Capacity16 => {
                (command::read_capacity_16(command::CAPACITY_16_LEN), command::CAPACITY_16_LEN)
            }
            UnitProbeStep::Capacity10 => (command::read_capacity_10(), command::CAPACITY_10_LEN),
            UnitProbeStep::Caching => (command::mode_sense_6(PAGE_CACHING, MODE_LEN), MODE_LEN.into()),
        }
    }

    /// Processes the result of a command.
    pub(super) fn on_done(
        &mut self,
        class: CompletionClass,
        sense: Option<SenseCode>,
        data: &[u8],
    ) -> Result<UnitProbeResult, UnitRefused> {
        match class {
            CompletionClass::Again if self.tries < MAX_TRIES => {
                self.tries = self.tries.saturating_add(1);
                return Ok(UnitProbeResult::More);
            }
            CompletionClass::Later(_) if self.tries < MAX_TRIES => {
                self.tries = self.tries.saturating_add(1);
                return Ok(UnitProbeResult::Later);
            }
            _ => self.tries = 0,
        }
        let is_good = class == CompletionClass::Good;
        match self.step {
            UnitProbeStep::TestUnitReady => self.on_ready(class, sense)?,
            UnitProbeStep::ReportLuns => self.on_luns(if is_good { data } else { &[] }),
            UnitProbeStep::Inquiry => self.on_inquiry(is_good, sense, data)?,
            UnitProbeStep::Page(page) => self.on_page(page, if is_good { data } else { &[] }),
            UnitProbeStep::Capacity10 if class == CompletionClass::Failed(IoError::Reserved) => {
                return Err(UnitRefused::Reserved(self.lun));
            }
            UnitProbeStep::Capacity16 => self.on_capacity_16(is_good, data)?,
            UnitProbeStep::Capacity10 => self.on_capacity_10(is_good, sense, data)?,
            UnitProbeStep::Caching => {
                caching(if is_good { data } else { &[] }, &mut self.unit);
                return Ok(UnitProbeResult::All);
            }
        }
        Ok(UnitProbeResult::More)
    }

    /// The identified unit and the listed LUNs.
    pub(super) fn into_parts(self) -> (UnitInfo, Luns) {
        (self.unit, self.luns)
    }

    fn on_ready(&mut self, class: CompletionClass, sense: Option<SenseCode>) -> Result<(), UnitRefused> {
        // A missing unit still lists the others. Reservations do not prevent identification.
        let goes_on = match class {
            CompletionClass::Failed(IoError::PathLost) => sense.is_some_and(is_missing),
            CompletionClass::Good | CompletionClass::Illegal | CompletionClass::Failed(IoError::Reserved) => {
                true
            }
            _ => false,
        };
        if !goes_on {
            return Err(UnitRefused::NotReady { lun: self.lun, why: UnitSense(sense) });
        }
        self.step = UnitProbeStep::ReportLuns;
        Ok(())
    }

    fn on_luns(&mut self, data: &[u8]) {
        let luns = data.get(8..).unwrap_or_default().as_chunks::<8>().0;
        let reported = data.first_chunk().map_or(0, |len| u32::from_be_bytes(*len) / 8) as usize;
        self.luns =
            luns.iter().take(reported.min(MAX_LUNS)).map(|lun| Lun(u64::from_be_bytes(*lun))).collect();
        self.step = UnitProbeStep::Inquiry;
    }

    fn on_inquiry(
        &mut self,
        is_good: bool,
        sense: Option<SenseCode>,
        data: &[u8],
    ) -> Result<(), UnitRefused> {
        if !is_good && sense.is_some_and(is_missing) {
            return Err(UnitRefused::NoSuchUnit(self.lun));
        }
        let Some(&peripheral) = data.first().filter(|_| is_good) else {
            return Err(UnitRefused::Command { lun: self.lun, command: "INQUIRY", why: UnitSense(sense) });
        };
        if peripheral & QUALIFIER_MASK != 0 {
            return Err(UnitRefused::NoSuchUnit(self.lun));
        }
        if peripheral != DEVICE_TYPE_BLOCK {
            return Err(UnitRefused::NotABlockDevice { lun: self.lun, device_type: peripheral });
        }
        self.is_asymmetric = data.get(5).is_some_and(|flags| flags & TPGS_IMPLICIT_AND_EXPLICIT != 0);
        self.unit.vendor = text(data.get(8..16));
        self.unit.product = text(data.get(16..32));
        self.unit.revision = text(data.get(32..36));
        self.step = UnitProbeStep::Page(PAGE_SUPPORTED);
        Ok(())
    }

    fn on_page(&mut self, page: u8, data: &[u8]) {
        if let Ok((header, rest)) = VpdHeader::read_from_prefix(data)
            && header.page_code == page
        {
            let body = rest.get(..usize::from(header.page_length.get())).unwrap_or(rest);
            match page {
                PAGE_SUPPORTED => self.pages = body.to_vec(),
                PAGE_SERIAL => self.unit.serial = text(Some(body)),
                PAGE_IDENTIFICATION => {
                    self.unit.designator = designator(body);
                    self.unit.port_group = port_group(body).filter(|_| self.is_asymmetric);
                }
                PAGE_BLOCK_LIMITS => self.on_limits(body),
                PAGE_CHARACTERISTICS => {
                    let rate = padded::<BlockDeviceCharacteristics>(body).medium_rotation_rate.get();
                    self.unit.rotational = rate >= MIN_ROTATION_RATE;
                }
                _ => self.on_provisioning(body),
            }
        }
        let next = VPD_PAGES.iter().find(|page_code| **page_code > page && self.pages.contains(page_code));
        self.step = next.map_or(UnitProbeStep::Capacity16, |page| UnitProbeStep::Page(*page));
    }

    fn on_limits(&mut self, body: &[u8]) {
        let limits: BlockLimits = padded(body);
        self.unit.max_transfer = limits.maximum_transfer_length.get();
        self.unit.max_write_same = limits.maximum_write_same_length.get();
        let max_blocks = limits.maximum_unmap_lba_count.get();
        let has_room = max_blocks > 0 && limits.maximum_unmap_block_descriptor_count.get() > 0;
        let granularity = limits.optimal_unmap_granularity.get().max(1);
        // Valid only with LBPU; cleared otherwise.
        self.unit.unmap = has_room.then_some(UnmapLimits { max_blocks, granularity });
    }

    fn on_provisioning(&mut self, body: &[u8]) {
        let flags = padded::<LogicalBlockProvisioning>(body).flags;
        self.unit.write_same_unmaps = flags & LBPWS != 0;
        self.unit.unmapped_is_zero = flags & LBPRZ_ZEROES != 0;
        if flags & LBPU == 0 {
            self.unit.unmap = None;
        }
    }

    fn on_capacity_16(&mut self, is_good: bool, data: &[u8]) -> Result<(), UnitRefused> {
        let Some((capacity, _)) = ReadCapacity16::read_from_prefix(data)
            .ok()
            .filter(|_| is_good)
            .filter(|_| has_block_length(data))
        else {
            self.step = UnitProbeStep::Capacity10;
            return Ok(());
        };
        let last = capacity.returned_logical_block_address.get();
        let provisioning = capacity.provisioning_and_lowest_aligned_lba.get();
        self.unit.long_commands = true;
        self.unit.thin = provisioning & LBPME != 0;
        self.unit.unmapped_is_zero &= self.unit.thin;
        self.unit.unmapped_is_zero |= self.unit.thin && provisioning & LBPRZ != 0;
        if !self.unit.thin {
            self.unit.unmap = None;
        }
        let exponent = u32::from(capacity.logical_blocks_per_physical_block_exponent & EXPONENT_MASK);
        self.set_geometry(last, capacity.logical_block_length.get(), exponent)
    }

    fn on_capacity_10(
        &mut self,
        is_good: bool,
        sense: Option<SenseCode>,
        data: &[u8],
    ) -> Result<(), UnitRefused> {
        let Some((last, block_len)) = capacity(data, false).filter(|_| is_good) else {
            return Err(UnitRefused::Command {
                lun: self.lun,
                command: "READ CAPACITY",
                why: UnitSense(sense),
            });
        };
        self.unit.unmap = None;
        self.set_geometry(last, block_len, 0)
    }

    fn set_geometry(&mut self, last: u64, block_len: u32, exponent: u32) -> Result<(), UnitRefused> {
        let blocks = last.saturating_add(1);
        let is_possible = block_len.is_power_of_two()
            && (MIN_BLOCK_LEN..=MAX_BLOCK_LEN).contains(&block_len)
            && blocks.checked_mul(block_len.into()).is_some();
        if !is_possible {
            return Err(UnitRefused::Geometry { lun: self.lun, blocks, block_len });
        }
        let physical =
            block_len.checked_shl(exponent).filter(|len| *len > 0 && *len <= MAX_PHYSICAL_BLOCK_LEN);
        self.unit.blocks = blocks;
        self.unit.block_len = block_len;
        self.unit.physical_block_len = physical.unwrap_or(block_len);
        self.step = UnitProbeStep::Caching;
        Ok(())
    }
}

/// Processes the Caching page of MODE SENSE (6).
pub(super) fn caching(data: &[u8], unit: &mut UnitInfo) {
    let Ok((header, rest)) = ModeHeader6::read_from_prefix(data) else {
        // Without the page, a write cache is assumed so that flushes are sent.
        unit.write_cache = true;
        return;
    };
    unit.read_only = header.device_specific_parameter & WP != 0;
    unit.fua = header.device_specific_parameter & DPOFUA != 0;
    let page = rest.get(header.block_descriptor_length.into()..).unwrap_or_default();
    unit.write_cache = match page {
        [code, _, flags, ..] if code & PAGE_ALL == PAGE_CACHING => flags & WCE != 0,
        _ => true,
    };
}

/// The last LBA and the block length from READ CAPACITY (16) or (10).
pub(super) fn capacity(data: &[u8], is_long: bool) -> Option<(u64, u32)> {
    if is_long {
        let (capacity, _) = ReadCapacity16::read_from_prefix(data).ok().filter(|_| has_block_length(data))?;
        return Some((capacity.returned_logical_block_address.get(), capacity.logical_block_length.get()));
    }
    let (capacity, _) = ReadCapacity10::read_from_prefix(data).ok()?;
    Some((capacity.returned_logical_block_address.get().into(), capacity.logical_block_length.get()))
}

/// Whether the sense data reports a missing unit.
fn is_missing(code: SenseCode) -> bool {
    use blockmux_wire::scsi::sense::{Asc, SenseKey};
    code.key == SenseKey::ILLEGAL_REQUEST && code.asc == Asc::LOGICAL_UNIT_NOT_SUPPORTED
}

/// Whether READ CAPACITY (16) returned a block length.
fn has_block_length(data: &[u8]) -> bool {
    data.get(8..12).is_some_and(|len| len.iter().any(|byte| *byte != 0))
}

/// The structure at the start of `body`, extended by zeroes because older pages are shorter.
fn padded<T: FromBytes + zerocopy::IntoBytes>(body: &[u8]) -> T {
    let mut value = T::new_zeroed();
    value.as_mut_bytes().iter_mut().zip(body).for_each(|(to, from)| *to = *from);
    value
}

/// ASCII padded by blanks; control characters become blanks.
fn text(bytes: Option<&[u8]>) -> String {
    let printable = |byte: &u8| if (0x20..0x7f).contains(byte) { char::from(*byte) } else { ' ' };
    bytes.unwrap_or_default().iter().map(printable).collect::<String>().trim().to_owned()
}

/// Target port group of the port that returned the page.
fn port_group(mut body: &[u8]) -> Option<u16> {
    while let Ok((header, rest)) = DesignatorHeader::read_from_prefix(body) {
        let (name, rest) = rest.split_at_checked(header.designator_length.into())?;
        body = rest;
        let kind = header.association_and_type & (ASSOCIATION_MASK | DESIGNATOR_TYPE_MASK);
        if let ([_, _, group @ ..], true) = (name, kind == ASSOCIATION_PORT | DESIGNATOR_PORT_GROUP) {
            return group.first_chunk().map(|group| u16::from_be_bytes(*group));
        }
    }
    None
}

/// The first NAA designator of the unit, otherwise its EUI-64, otherwise its T10 vendor ID
/// designator.
fn designator(mut body: &[u8]) -> String {
    let (mut eui, mut t10) = (String::new(), String::new());
    while let Ok((header, rest)) = DesignatorHeader::read_from_prefix(body) {
        let Some((name, rest)) = rest.split_at_checked(header.designator_length.into()) else { break };
        body = rest;
        if header.association_and_type & ASSOCIATION_MASK != ASSOCIATION_UNIT {
            continue;
        }
        match header.association_and_type & DESIGNATOR_TYPE_MASK {
            DESIGNATOR_NAA => return format!("naa.{}", HEXLOWER.encode(name)),
            DESIGNATOR_EUI if eui.is_empty() => eui = format!("eui.{}", HEXLOWER.encode(name)),
            DESIGNATOR_T10_VENDOR if t10.is_empty() => t10 = format!("t10.{}", text(Some(name))),
            _ => {}
        }
    }
    if eui.is_empty() { t10 } else { eui }
}

fn number(lun: Lun) -> String {
    lun.number().map_or_else(|| format!("{:#018x}", lun.0), |number| number.to_string())
}

/// Queried VPD pages, in ascending order.
const VPD_PAGES: [u8; 5] =
    [PAGE_SERIAL, PAGE_IDENTIFICATION, PAGE_BLOCK_LIMITS, PAGE_CHARACTERISTICS, PAGE_PROVISIONING];

/// Maximum number of retries of one command, for unit attentions and similar.
const MAX_TRIES: u32 = 64;

const INQUIRY_LEN: u16 = 96;
const PAGE_LEN: u16 = 255;
pub(super) const MODE_LEN: u8 = 192;
const LUNS_LEN: u32 = 8 + 8 * MAX_LUNS as u32;

/// Maximum allocation length of these commands, in bytes.
pub(super) const MAX_DATA_IN: usize = LUNS_LEN as usize;

/// PERIPHERAL QUALIFIER.
const QUALIFIER_MASK: u8 = 0b111 << 5;
/// LOGICAL BLOCKS PER PHYSICAL BLOCK EXPONENT.
const EXPONENT_MASK: u8 = 0x0f;
/// MEDIUM ROTATION RATE: smaller values are not a number of rotations per minute (SBC-4).
const MIN_ROTATION_RATE: u16 = 0x0401;
const ASSOCIATION_MASK: u8 = 0b11 << 4;
const DESIGNATOR_TYPE_MASK: u8 = 0x0f;
/// DESIGNATOR TYPE: EUI-64 based.
const DESIGNATOR_EUI: u8 = 2;

/// Limits of the logical block length, in bytes.
const MIN_BLOCK_LEN: u32 = 512;
const MAX_BLOCK_LEN: u32 = 64 << 10;
/// Maximum physical block length, in bytes; larger values are ignored.
const MAX_PHYSICAL_BLOCK_LEN: u32 = 1 << 20;
