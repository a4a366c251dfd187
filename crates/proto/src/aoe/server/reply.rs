//! Commands in flight, and their answers.

use super::TargetSession;
use crate::aoe::AoeAddress;
use crate::aoe::error::{AoeRefusal, refusal};
use crate::exports::VolumeId;
use crate::frames::Station;
use crate::slots::SlotKey;
use crate::volume_state::IoGuard;
use blockmux_volume::{IoError, Output, SgList};
use blockmux_wire::aoe::{AtaMessage, Header};
use blockmux_wire::ata::{ATA_SECTOR, ATA_STATUS_DRDY, TrimRange};
use smallvec::SmallVec;
use std::time::Instant;
use zerocopy::IntoBytes;

/// A command and what its answer needs.
pub(super) struct PendingAoeCommand {
    pub(super) from: Station,
    /// The answer's head.
    pub(super) answer: Header,
    /// The request's.
    pub(super) registers: AtaMessage,
    pub(super) volume: VolumeId,
    pub(super) kind: ReplyForm,
    /// What a trim has left to do, the next one last.
    pub(super) ranges: SmallVec<[TrimRange; 1]>,
    /// It is among the initiator's recent writes.
    pub(super) is_recent: bool,
    /// When it came.
    pub(super) now: Instant,
    /// Its I/O is in flight.
    pub(super) guard: Option<IoGuard>,
}

impl PendingAoeCommand {
    /// The disk that it is for.
    #[inline]
    pub(super) fn disk(&self) -> AoeAddress {
        AoeAddress { shelf: self.answer.major.get(), slot: self.answer.minor }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplyForm {
    Read,
    /// A read whose data goes nowhere.
    Verify,
    Write,
    Trim,
    Flush,
}

impl TargetSession {
    /// The volume has done what was asked.
    #[inline]
    pub(super) fn finish(&mut self, key: SlotKey, result: Result<Output, IoError>) {
        let Some(mut pending) = self.pending.remove(key) else { return };
        pending.guard = None;
        let who = pending.from.mac;
        if let Some(count) = self.in_flight.get_mut(&who) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.in_flight.remove(&who);
            }
        }
        let asked = usize::from(pending.registers.sector_count).saturating_mul(ATA_SECTOR);
        match (pending.kind, result) {
            (_, Err(error)) => {
                self.audit.failed(who, pending.disk());
                self.fail(&pending, error);
            }
            (ReplyForm::Trim, Ok(_)) => self.trim(pending),
            (ReplyForm::Read, Ok(output)) => {
                let data = output.into_data();
                if data.len() == asked {
                    self.succeed(&pending, data);
                } else {
                    // A volume that answers with the wrong thing.
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
        self.keep_silent(pending);
        if let AoeRefusal::Code(code) = refusal {
            self.refuse(pending.from, pending.answer, pending.registers.as_bytes(), code);
        }
    }

    /// The command was not done, and is when it is sent again.
    pub(super) fn keep_silent(&mut self, pending: &PendingAoeCommand) {
        if pending.is_recent {
            self.recent.on_silence(pending.from.mac, pending.answer.tag.get());
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
            self.recent.on_answer(pending.from.mac, tag, status, error, pending.now);
        }
        let mut registers = with_status(pending.registers, status, error);
        if status == ATA_STATUS_DRDY {
            registers.sector_count = 0;
        }
        self.answer(pending.from, pending.answer, registers.as_bytes(), data);
    }
}

/// The registers after a command.
pub(super) fn with_status(registers: AtaMessage, status: u8, error: u8) -> AtaMessage {
    AtaMessage { command_or_status: status, error_or_feature: error, reserved: [0; 2], ..registers }
}
