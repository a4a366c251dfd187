//! Commands in flight and their answers.

use super::AoeTargetSession;
use crate::aoe::AoeAddress;
use crate::aoe::error::{AoeRefusal, refusal};
use crate::driver::frames::Station;
use crate::exports::VolumeId;
use crate::slots::SlotKey;
use crate::volume_state::IoGuard;
use blockmux_volume::{IoError, Output, SgList};
use blockmux_wire::aoe::{AtaMessage, Header};
use blockmux_wire::ata::{ATA_SECTOR, ATA_STATUS_DRDY, TrimRange};
use smallvec::SmallVec;
use std::time::Instant;
use zerocopy::IntoBytes;

/// A command in flight, with what its answer needs.
pub(super) struct PendingAoeCommand {
    pub(super) from: Station,
    /// Header of the answer.
    pub(super) answer: Header,
    /// Registers of the request.
    pub(super) registers: AtaMessage,
    pub(super) volume: VolumeId,
    pub(super) kind: ReplyForm,
    /// Remaining ranges of a trim, the next one last.
    pub(super) ranges: SmallVec<[TrimRange; 1]>,
    /// Whether it is in the list of recent writes.
    pub(super) is_recent: bool,
    /// Time of arrival.
    pub(super) now: Instant,
    /// Counts its I/O while it is in flight.
    pub(super) guard: Option<IoGuard>,
    /// Whether its I/O has begun.
    pub(super) has_begun: bool,
}

impl PendingAoeCommand {
    /// Address of its disk.
    #[inline]
    pub(super) fn disk(&self) -> AoeAddress {
        AoeAddress { shelf: self.answer.major.get(), slot: self.answer.minor }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplyForm {
    Read,
    /// A read whose data is not sent.
    Verify,
    Write,
    Trim,
    Flush,
}

impl AoeTargetSession {
    /// Handles the completion of a command's I/O.
    #[inline]
    pub(super) fn finish(&mut self, key: SlotKey, result: Result<Output, IoError>) {
        let Some(mut pending) = self.pending.remove(key) else { return };
        pending.guard = None;
        if std::mem::take(&mut pending.has_begun) {
            self.begun = self.begun.saturating_sub(1);
        }
        let mac = pending.from.mac;
        if let Some(own) = self.in_flight.get_mut(&mac) {
            *own = own.saturating_sub(1);
            if *own == 0 {
                self.in_flight.remove(&mac);
            }
        }
        let asked = usize::from(pending.registers.sector_count).saturating_mul(ATA_SECTOR);
        match (pending.kind, result) {
            (_, Err(error)) => {
                self.audit.failed(mac, pending.disk());
                self.fail(&pending, error);
            }
            (ReplyForm::Trim, Ok(_)) => self.trim(pending),
            (ReplyForm::Read, Ok(output)) => {
                let data = output.into_data();
                if data.len() == asked {
                    self.succeed(&pending, data);
                } else {
                    // The volume returned another kind of output than the command needs.
                    self.fail(&pending, IoError::Medium);
                }
            }
            (_, Ok(_)) => self.succeed(&pending, SgList::default()),
        }
    }

    #[inline]
    pub(super) fn succeed(&mut self, pending: &PendingAoeCommand, data: SgList) {
        self.answer_registers(pending, ATA_STATUS_DRDY, 0, data);
    }

    pub(super) fn fail(&mut self, pending: &PendingAoeCommand, error: IoError) {
        let is_write = matches!(pending.kind, ReplyForm::Write | ReplyForm::Trim);
        let refusal = refusal(error, is_write);
        if let AoeRefusal::Registers { status, error } = refusal {
            return self.answer_registers(pending, status, error, SgList::default());
        }
        self.drop_command(pending);
        if let AoeRefusal::Code(code) = refusal {
            self.refuse(pending.from, pending.answer, pending.registers.as_bytes(), code);
        }
    }

    /// Drops a command without an answer, so that its retransmission is carried out.
    pub(super) fn drop_command(&mut self, pending: &PendingAoeCommand) {
        if pending.is_recent {
            self.recent_writes.on_dropped(pending.from.mac, pending.answer.tag.get());
        }
    }

    #[inline]
    pub(super) fn answer_registers(
        &mut self,
        pending: &PendingAoeCommand,
        status: u8,
        error: u8,
        data: SgList,
    ) {
        if pending.is_recent {
            let tag = pending.answer.tag.get();
            self.recent_writes.on_answer(pending.from.mac, tag, status, error, pending.now);
        }
        let mut registers = with_status(pending.registers, status, error);
        if status == ATA_STATUS_DRDY {
            registers.sector_count = 0;
        }
        self.answer(pending.from, pending.answer, registers.as_bytes(), data);
    }
}

/// The registers of an answer.
pub(super) fn with_status(registers: AtaMessage, status: u8, error: u8) -> AtaMessage {
    AtaMessage { command_or_status: status, error_or_feature: error, reserved: [0; 2], ..registers }
}
