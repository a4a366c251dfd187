//! What a unit attention says has changed, and asking about it again (SPC-5, SBC-4).
//!
//! The command that met the attention is sent again, and before it a question: for the capacity,
//! the cache, or how well the path leads there. What was learned holds for what is submitted from
//! then on. A unit whose INQUIRY data has changed may be another one altogether: then the transport
//! is told to begin anew, which asks everything again.

use super::bring_up::{MODE_LEN, MOST_DATA_IN, caching, capacity};
use super::command;
use super::plan::ScsiCommandKind;
use super::queue::{ScsiQueue, ScsiQueuedCommand, received};
use super::sense::SenseCode;
use crate::io_queue::{CompletionClass, DataTransfer, MAX_TRIES};
use blockmux_wire::scsi::mode::PAGE_CACHING;
use blockmux_wire::scsi::sense::{Asc, SenseKey};

/// What is asked again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnitQuery {
    Capacity,
    Caching,
    Access,
}

/// What has changed and was not asked about yet.
#[derive(Default)]
pub(super) struct UnitChanges {
    capacity_is_due: bool,
    caching_is_due: bool,
    access_is_due: bool,
    /// The unit's size, in bytes, since nobody has taken it.
    size: Option<u64>,
    /// The unit may be another one.
    is_strange: bool,
}

impl UnitChanges {
    /// The next question, if any is due.
    #[inline]
    pub(super) fn next(&mut self) -> Option<UnitQuery> {
        if std::mem::take(&mut self.capacity_is_due) {
            return Some(UnitQuery::Capacity);
        }
        if std::mem::take(&mut self.access_is_due) {
            return Some(UnitQuery::Access);
        }
        std::mem::take(&mut self.caching_is_due).then_some(UnitQuery::Caching)
    }

    #[inline]
    pub(super) fn has_questions(&self) -> bool {
        self.capacity_is_due || self.caching_is_due || self.access_is_due
    }

    pub(super) fn ask_for_access(&mut self) {
        self.access_is_due = true;
    }

    /// The size is known, or another one.
    pub(super) fn on_size(&mut self, bytes: u64) {
        self.size = Some(bytes);
    }
}

impl UnitQuery {
    pub(super) fn command(self, is_long: bool) -> ([u8; 16], DataTransfer) {
        match self {
            UnitQuery::Capacity if is_long => (
                command::read_capacity_16(command::CAPACITY_16_LEN),
                DataTransfer::In(command::CAPACITY_16_LEN),
            ),
            UnitQuery::Capacity => (command::read_capacity_10(), DataTransfer::In(command::CAPACITY_10_LEN)),
            UnitQuery::Access => {
                let room = MOST_DATA_IN as u32;
                (command::report_target_port_groups(room), DataTransfer::In(room))
            }
            UnitQuery::Caching => {
                (command::mode_sense_6(PAGE_CACHING, MODE_LEN), DataTransfer::In(MODE_LEN.into()))
            }
        }
    }
}

impl<T: Default> ScsiQueue<T> {
    /// The unit's size, once when it is known and whenever it has changed since.
    #[inline]
    pub(crate) fn poll_size(&mut self) -> Option<u64> {
        self.set.changes.size.take()
    }

    /// Whether the unit may have become another one.
    #[inline]
    pub(crate) fn is_strange(&self) -> bool {
        self.set.changes.is_strange
    }

    /// Somebody else has learned that the unit has another size.
    pub(crate) fn resize(&mut self, bytes: u64) {
        if let Some(unit) = &mut self.set.unit {
            unit.blocks = bytes.wrapping_shr(unit.block_len.trailing_zeros());
            self.info.size = bytes;
        }
    }

    /// A command has met sense data, or the target reports some by itself.
    #[cold]
    pub(crate) fn on_sense(&mut self, code: SenseCode) {
        let Some(unit) = &self.set.unit else { return };
        if code.key == SenseKey::NOT_READY && unit.port_group.is_some() {
            self.set.access.on_sense(code.asc);
        }
        if code.key != SenseKey::UNIT_ATTENTION {
            return;
        }
        match code.asc {
            Asc::CAPACITY_DATA_HAS_CHANGED => self.set.changes.capacity_is_due = true,
            Asc::PARAMETERS_CHANGED | Asc::MODE_PARAMETERS_CHANGED => self.set.changes.caching_is_due = true,
            Asc::ASYMMETRIC_ACCESS_STATE_CHANGED => self.ask_for_access(),
            Asc::INQUIRY_DATA_HAS_CHANGED => self.set.changes.is_strange = true,
            _ => {}
        }
    }

    /// A question was answered. Without an answer, what was known goes on.
    pub(super) fn on_changes(
        &mut self,
        question: UnitQuery,
        verdict: CompletionClass,
        command: &ScsiQueuedCommand<T>,
        moved: u32,
    ) {
        let piece = command.piece;
        let again = piece.again();
        match verdict {
            CompletionClass::Again if piece.tries < MAX_TRIES => return self.again.push_back(again),
            CompletionClass::Later(_) if piece.tries < MAX_TRIES => return self.set.later.push_back(again),
            CompletionClass::Good => {}
            _ => return,
        }
        let data = received(command, moved);
        match question {
            UnitQuery::Capacity => self.on_capacity(&data),
            UnitQuery::Caching => self.on_caching(&data),
            UnitQuery::Access => {
                if let Some(group) = self.set.unit.as_ref().and_then(|unit| unit.port_group) {
                    self.set.access.on_report(&data, group);
                }
            }
        }
    }

    fn on_capacity(&mut self, data: &[u8]) {
        let Some(unit) = &mut self.set.unit else { return };
        let Some((last, block_len)) = capacity(data, unit.long_commands) else { return };
        let blocks = last.saturating_add(1);
        if block_len != unit.block_len || blocks.checked_mul(block_len.into()).is_none() {
            self.set.changes.is_strange = true;
            return;
        }
        unit.blocks = blocks;
        self.info.size = unit.size();
        self.set.changes.on_size(self.info.size);
    }

    fn on_caching(&mut self, data: &[u8]) {
        let Some(unit) = &mut self.set.unit else { return };
        caching(data, unit);
        self.info.read_only = unit.read_only;
        self.set.terms.set_caching(unit);
    }
}

/// Whether this is a question of ours.
pub(super) fn question(kind: ScsiCommandKind) -> Option<UnitQuery> {
    match kind {
        ScsiCommandKind::Changes(question) => Some(question),
        _ => None,
    }
}
