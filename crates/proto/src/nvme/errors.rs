//! The error information log: failed commands of a controller. Queues on all cores write to it,
//! only when a command fails.

use blockmux_wire::nvme::Sqe;
use blockmux_wire::nvme::log::ErrorEntry;
use blockmux_wire::nvme::opcode::{AdminOpcode, NvmOpcode};
use blockmux_wire::nvme::status::{NvmeStatus, StatusField};
use blockmux_wire::nvmeof::fabrics::TransportType;
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use zerocopy::{FromZeros, IntoBytes};

/// The last failures of one controller.
#[derive(Default)]
pub(crate) struct ErrorLog {
    logged: Mutex<LoggedErrors>,
}

#[derive(Default)]
struct LoggedErrors {
    /// Entries, the most recent first.
    entries: VecDeque<ErrorEntry>,
    count: u64,
}

impl ErrorLog {
    /// Adds the failure of a command, and returns its status field, with More set if the log has an
    /// entry.
    #[cold]
    pub(crate) fn add(&self, qid: u16, sqe: &Sqe, status: StatusField) -> StatusField {
        if !is_remembered(status.status()) {
            return status;
        }
        let status = status.with_more();
        let mut log = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        log.count = log.count.checked_add(1).unwrap_or(1);
        log.entries.truncate(MAX_ERRORS.saturating_sub(1));
        let entry = ErrorEntry {
            error_count: log.count.into(),
            sqid: qid.into(),
            cid: sqe.cid,
            status: status.0,
            parameter_error_location: NO_LOCATION.into(),
            lba: if qid > 0 && has_lba(sqe) { sqe.slba() } else { 0 }.into(),
            nsid: sqe.nsid,
            trtype: TransportType::TCP.0,
            ..ErrorEntry::new_zeroed()
        };
        log.entries.push_front(entry);
        status
    }

    /// Number of failures.
    pub(super) fn count(&self) -> u64 {
        self.logged.lock().unwrap_or_else(PoisonError::into_inner).count
    }

    /// The log page, the most recent failure first.
    pub(super) fn page(&self) -> Vec<u8> {
        let log = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        let mut page: Vec<u8> = log.entries.iter().flat_map(|entry| entry.as_bytes().to_vec()).collect();
        page.resize(MAX_ERRORS.saturating_mul(size_of::<ErrorEntry>()), 0);
        page
    }
}

/// Whether the status is a failure of the command, not of the path or a requested abort.
fn is_remembered(status: NvmeStatus) -> bool {
    const PATH: u16 = 3;
    status.0 >> 8 != PATH
        && !matches!(
            status,
            NvmeStatus::COMMAND_ABORT_REQUESTED
                | NvmeStatus::COMMAND_ABORTED_DUE_TO_SQ_DELETION
                | NvmeStatus::COMMAND_ABORTED_DUE_TO_PREEMPT_AND_ABORT
                | NvmeStatus::COMMAND_ABORTED_DUE_TO_FAILED_FUSED_COMMAND
                | NvmeStatus::RESERVATION_CONFLICT
                | NvmeStatus::COMPARE_FAILURE
        )
}

fn has_lba(sqe: &Sqe) -> bool {
    AdminOpcode(sqe.opcode) != AdminOpcode::FABRICS
        && matches!(
            NvmOpcode(sqe.opcode),
            NvmOpcode::READ
                | NvmOpcode::WRITE
                | NvmOpcode::COMPARE
                | NvmOpcode::VERIFY
                | NvmOpcode::WRITE_ZEROES
        )
}

/// Number of entries of the log.
pub(super) const MAX_ERRORS: usize = 64;
/// Parameter Error Location without a location.
const NO_LOCATION: u16 = 0xffff;
