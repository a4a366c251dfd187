//! Properties of the unit that changed according to a unit attention (SPC-5, SBC-4).
//!
//! The command that met the unit attention is sent again, after a query of the capacity, the
//! caching page or the ALUA state. The result applies to later I/O. After INQUIRY DATA HAS CHANGED
//! the unit may be a different one: the transport must start a new session, which identifies it
//! again.

use super::bring_up::{MAX_DATA_IN, MODE_LEN, caching, capacity};
use super::command;
use super::plan::ScsiCommandKind;
use super::queue::{ScsiQueue, ScsiQueuedCommand, received};
use super::sense::SenseCode;
use crate::initiator::command_queue::{CompletionClass, DataTransfer, MAX_TRIES};
use blockmux_wire::scsi::mode::PAGE_CACHING;
use blockmux_wire::scsi::sense::{Asc, SenseKey};

/// A property to query again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnitQuery {
    Capacity,
    Caching,
    Access,
}

/// Changed properties that were not queried yet.
#[derive(Default)]
pub(super) struct UnitChanges {
    capacity_due: bool,
    caching_due: bool,
    access_due: bool,
    /// The unit's size in bytes, until it is polled.
    size: Option<u64>,
    /// The unit may be a different one.
    has_unit_changed: bool,
}

impl UnitChanges {
    /// The next query, if any is due.
    #[inline]
    pub(super) fn next(&mut self) -> Option<UnitQuery> {
        if std::mem::take(&mut self.capacity_due) {
            return Some(UnitQuery::Capacity);
        }
        if std::mem::take(&mut self.access_due) {
            return Some(UnitQuery::Access);
        }
        std::mem::take(&mut self.caching_due).then_some(UnitQuery::Caching)
    }

    #[inline]
    pub(super) fn has_queries(&self) -> bool {
        self.capacity_due || self.caching_due || self.access_due
    }

    pub(super) fn query_access(&mut self) {
        self.access_due = true;
    }

    /// Records the unit's size.
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
                let room = MAX_DATA_IN as u32;
                (command::report_target_port_groups(room), DataTransfer::In(room))
            }
            UnitQuery::Caching => {
                (command::mode_sense_6(PAGE_CACHING, MODE_LEN), DataTransfer::In(MODE_LEN.into()))
            }
        }
    }
}

impl<T: Default> ScsiQueue<T> {
    /// The unit's size in bytes, once when it becomes known and after each change.
    #[inline]
    pub(crate) fn poll_size(&mut self) -> Option<u64> {
        self.set.changes.size.take()
    }

    /// Whether the unit may have become a different one.
    #[inline]
    pub(crate) fn has_unit_changed(&self) -> bool {
        self.set.changes.has_unit_changed
    }

    /// Sets the unit's size, which another session has learned.
    pub(crate) fn resize(&mut self, bytes: u64) {
        if let Some(unit) = &mut self.set.unit {
            unit.blocks = bytes.wrapping_shr(unit.block_len.trailing_zeros());
            self.info.size = bytes;
        }
    }

    /// Processes sense data of a command or of an asynchronous event.
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
            Asc::CAPACITY_DATA_HAS_CHANGED => self.set.changes.capacity_due = true,
            Asc::PARAMETERS_CHANGED | Asc::MODE_PARAMETERS_CHANGED => self.set.changes.caching_due = true,
            Asc::ASYMMETRIC_ACCESS_STATE_CHANGED => self.query_access(),
            Asc::INQUIRY_DATA_HAS_CHANGED => self.set.changes.has_unit_changed = true,
            _ => {}
        }
    }

    /// Processes the result of a query. If it failed, the known value stays.
    pub(super) fn on_changes(
        &mut self,
        query: UnitQuery,
        class: CompletionClass,
        command: &ScsiQueuedCommand<T>,
        moved: u32,
    ) {
        let piece = command.piece;
        let again = piece.again();
        match class {
            CompletionClass::Again if piece.tries < MAX_TRIES => return self.again.push_back(again),
            CompletionClass::Later(_) if self.may_retry(&piece) => return self.set.delayed.push_back(again),
            CompletionClass::Good => {}
            _ => return,
        }
        let data = received(command, moved);
        match query {
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
            self.set.changes.has_unit_changed = true;
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
        self.set.capabilities.set_caching(unit);
    }
}

/// The query of a command, if it is one.
pub(super) fn query(kind: ScsiCommandKind) -> Option<UnitQuery> {
    match kind {
        ScsiCommandKind::Changes(query) => Some(query),
        _ => None,
    }
}
