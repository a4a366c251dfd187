//! ATA commands: translates the registers to I/O, or refuses the command.

use super::recent_writes::{WriteHistory, WriteIdentity};
use super::reply::{PendingAoeCommand, ReplyForm};
use super::{AoeTargetSession, NO_TAG, tag};
use crate::aoe::{SECTOR, identify, sectors_in};
use crate::driver::frames::Frame;
use blockmux_volume::{Crc32c, Io, IoError, Op, Seg, SgList};
use blockmux_wire::aoe::{AOE_ATA_HEAD, AtaMessage, ErrorCode, Header};
use blockmux_wire::ata::{ATA_SECTOR, ATA_STATUS_DRDY, AtaCommand, DSM_TRIM, POWER_ACTIVE, TrimRange};
use smallvec::SmallVec;
use std::time::Instant;
use zerocopy::{FromBytes, IntoBytes};

impl AoeTargetSession {
    /// Handles an ATA command for the disk with index `at`.
    #[inline]
    pub(super) fn on_ata(&mut self, at: usize, answer: Header, frame: &Frame<'_>, now: Instant) {
        let from = frame.from;
        let Some(rest) = frame.bytes().get(size_of::<Header>()..) else { return };
        let Ok((registers, data)) = AtaMessage::read_from_prefix(rest) else { return };
        let Some(disk) = self.disks.get(at) else { return };
        let (command, volume) = (AtaCommand(registers.command_or_status), disk.unit.volume);
        let number = disk.number;
        if command != AtaCommand::IDENTIFY_DEVICE && disk.is_reserved_against(from.mac) {
            self.audit.refused(from.mac, disk.unit.address, "the disk is reserved for others");
            return self.refuse(from, answer, registers.as_bytes(), ErrorCode::TARGET_IS_RESERVED);
        }
        self.audit.on_command(from.mac, disk.unit.address, now);
        let kind = match command {
            AtaCommand::READ_SECTORS | AtaCommand::READ_SECTORS_EXT => ReplyForm::Read,
            AtaCommand::WRITE_SECTORS | AtaCommand::WRITE_SECTORS_EXT => ReplyForm::Write,
            AtaCommand::READ_VERIFY_SECTORS | AtaCommand::READ_VERIFY_SECTORS_EXT => ReplyForm::Verify,
            AtaCommand::FLUSH_CACHE | AtaCommand::FLUSH_CACHE_EXT => ReplyForm::Flush,
            AtaCommand::DATA_SET_MANAGEMENT if registers.error_or_feature & DSM_TRIM != 0 => ReplyForm::Trim,
            _ => {
                self.recent_writes.on_other(from.mac, number, answer.tag.get(), now);
                return self.without_io(at, answer, registers, frame, now);
            }
        };
        if !self.has_room(from.mac, kind) {
            return;
        }
        let ranges = SmallVec::new();
        let pending = PendingAoeCommand {
            from,
            answer,
            registers,
            volume,
            kind,
            ranges,
            is_recent: false,
            now,
            guard: None,
            has_begun: false,
        };
        if kind == ReplyForm::Flush {
            self.recent_writes.on_other(from.mac, number, answer.tag.get(), now);
            return self.start(pending, Io::new(NO_TAG, Op::Flush, 0, 0));
        }
        // The command decides between 28 and 48 address bits, not the flag.
        let most = self.port(from.port).map_or(0, |port| sectors_in(port.mtu));
        let sectors = registers.sector_count;
        if sectors == 0 || sectors > most {
            return self.refuse(from, answer, registers.as_bytes(), ErrorCode::BAD_ARGUMENT_PARAMETER);
        }
        let bytes = usize::from(sectors).saturating_mul(ATA_SECTOR);
        if kind == ReplyForm::Write || kind == ReplyForm::Trim {
            let Some(seg) = data.get(..bytes).and_then(|_| frame.slice(AOE_ATA_HEAD, bytes)) else {
                return self.refuse(from, answer, registers.as_bytes(), ErrorCode::BAD_ARGUMENT_PARAMETER);
            };
            return self.on_change(at, pending, data.get(..bytes).unwrap_or_default(), seg);
        }
        self.recent_writes.on_other(from.mac, number, answer.tag.get(), now);
        let offset = block(command, &registers).saturating_mul(SECTOR);
        self.start(pending, Io::new(NO_TAG, Op::Read, offset, bytes as u64));
    }

    /// Handles a write or trim with its data.
    fn on_change(&mut self, at: usize, mut pending: PendingAoeCommand, data: &[u8], seg: Seg) {
        let (mac, tag) = (pending.from.mac, pending.answer.tag.get());
        let registers = pending.registers;
        let Some(disk) = self.disks.get(at) else { return };
        if disk.export.read_only {
            return self.fail(&pending, IoError::ReadOnly);
        }
        let command = AtaCommand(registers.command_or_status);
        let identity = WriteIdentity {
            unit: disk.number,
            command: command.0,
            sectors: registers.sector_count,
            block: block(command, &registers),
            digest: Crc32c::of(data).value(),
        };
        match self.recent_writes.on_write(mac, tag, identity, pending.now) {
            WriteHistory::New => pending.is_recent = true,
            WriteHistory::InFlight => return,
            WriteHistory::Done { status, error } => {
                return self.answer_registers(&pending, status, error, SgList::default());
            }
        }
        if pending.kind == ReplyForm::Trim {
            let (ranges, _) = data.as_chunks::<8>();
            let ranges = ranges.iter().map(|range| TrimRange(u64::from_le_bytes(*range).into()));
            // In reverse order, because they are taken from the end.
            pending.ranges = ranges.filter(|range| range.count() > 0).rev().collect();
            return self.trim(pending);
        }
        let offset = identity.block.saturating_mul(SECTOR);
        let mut io = Io::new(NO_TAG, Op::Write { fua: false }, offset, data.len() as u64);
        io.data = Some(SgList::one(seg));
        self.start(pending, io);
    }

    /// Continues a trim with its next range, or completes it.
    pub(super) fn trim(&mut self, mut pending: PendingAoeCommand) {
        match pending.ranges.pop() {
            Some(range) => {
                let (offset, len) =
                    (range.block().saturating_mul(SECTOR), range.count().saturating_mul(SECTOR));
                let io = Io::new(NO_TAG, Op::Discard { fua: false }, offset, len);
                self.start(pending, io);
            }
            None => self.succeed(&pending, SgList::default()),
        }
    }

    /// Queues the I/O of a command for the driver.
    #[inline]
    pub(super) fn start(&mut self, pending: PendingAoeCommand, mut io: Io) {
        let own = self.in_flight.entry(pending.from.mac).or_default();
        *own = own.saturating_add(1);
        self.audit.count_io(pending.from.mac, pending.disk(), &io);
        let volume = pending.volume;
        io.tag = tag(self.pending.insert(pending));
        self.ready.push_back((volume, io));
    }

    /// Answers the commands that need no I/O.
    fn without_io(
        &mut self,
        at: usize,
        answer: Header,
        mut registers: AtaMessage,
        frame: &Frame<'_>,
        now: Instant,
    ) {
        let Some(volume) = self.disks.get(at).map(|disk| disk.unit.volume) else { return };
        let from = frame.from;
        let command = AtaCommand(registers.command_or_status);
        let pending = |registers| PendingAoeCommand {
            from,
            answer,
            registers,
            volume,
            kind: ReplyForm::Verify,
            ranges: SmallVec::new(),
            is_recent: false,
            now,
            guard: None,
            has_begun: false,
        };
        match command {
            AtaCommand::IDENTIFY_DEVICE if registers.sector_count != 1 => {
                self.refuse(from, answer, registers.as_bytes(), ErrorCode::BAD_ARGUMENT_PARAMETER);
            }
            AtaCommand::IDENTIFY_DEVICE => {
                let Some(disk) = self.disks.get(at) else { return };
                let data = identify::describe(disk.unit.address, disk.uuid, &disk.export.info());
                registers.sector_count = 0;
                let reply = super::reply::with_status(registers, ATA_STATUS_DRDY, 0);
                self.answer(from, answer, reply.as_bytes(), SgList::one(Seg::from_slice(data.as_bytes())));
            }
            AtaCommand::CHECK_POWER_MODE => {
                let mut reply = super::reply::with_status(registers, ATA_STATUS_DRDY, 0);
                reply.sector_count = POWER_ACTIVE;
                self.answer(from, answer, reply.as_bytes(), SgList::default());
            }
            // SMART, SET FEATURES and all other commands are not supported.
            _ => self.fail(&pending(registers), IoError::Unsupported),
        }
    }
}

/// The address of a command: 48 bits for EXT commands, else 28.
fn block(command: AtaCommand, registers: &AtaMessage) -> u64 {
    let [a, b, c, d, e, f] = registers.lba;
    match command {
        AtaCommand::READ_SECTORS_EXT
        | AtaCommand::WRITE_SECTORS_EXT
        | AtaCommand::READ_VERIFY_SECTORS_EXT => u64::from_le_bytes([a, b, c, d, e, f, 0, 0]),
        _ => u64::from_le_bytes([a, b, c, d & 0x0f, 0, 0, 0, 0]),
    }
}
