//! The device server: executes commands in steps, independent of the transport (SAM-5, SPC-5,
//! SBC-4).
//!
//! ```text
//!   transport ──Command──▶ DeviceServer::begin ─┬─▶ TaskStep::DataOut ──────▶ on_data_out ─┐
//!      ▲                                        ├─▶ TaskStep::Io ───────────▶ on_io ───────┤
//!      │                                        ├─▶ TaskStep::Wait, Pause ──▶ resume ──────┤
//!      └──────────── Response ◀── TaskStep::Done ◀──────────────────────────────────────────┘
//! ```
//! A [`ScsiTarget`] maps LUNs to [`LogicalUnit`]s, which all sessions share and which hold the mode
//! pages and unit attentions of a volume. State that other protocols share, such as reservations
//! and locked ranges, is in [`crate::volume_state`]. Each session has one [`DeviceServer`] on its
//! own core, for its I_T nexus. The device server caches the shared state that READ and WRITE need;
//! one atomic load validates the cache, so these commands take no lock and allocate nothing.
//!
//! One table maps operation codes to their handlers and to the data of REPORT SUPPORTED OPERATION
//! CODES. Each family of commands is one file.

mod cdb;
mod error;
mod missed;
mod nexus;
mod open_nexus;
mod server;
mod table;
mod target;
mod target_list;
mod task;
mod unit;
mod units;
mod view;

mod alua;
mod cache;
mod capacity;
mod compare;
mod defects;
mod diagnostic;
mod extended_copy;
mod format;
mod inquiry;
mod luns;
mod mode;
mod persistent_reserve;
mod provisioning;
mod read_write;
mod ready;
mod report;
mod reserve;
mod sanitize;
mod start_stop;
mod token_copy;
mod tokens;
mod verify;
mod vpd;
mod write_same;

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

pub use cdb::Cdb;
pub use nexus::{ItNexus, TargetPort};
pub(crate) use open_nexus::OpenNexus;
pub use server::{DeviceServer, ManagementResponse, TaskManagement};
pub use target::{
    LunMapping, MAX_LUN, PortGroupStates, ScsiTarget, ShownLuns, UnitChange, UnitSource, UnitWatcher,
};
pub use target_list::{ListedTarget, NamedTargets, TargetList};
pub use task::Task;
pub(crate) use task::TaskFailure;
pub use unit::{LogicalUnit, UnitIdentity};

pub use blockmux_wire::scsi::alua::AccessState;

use super::{Lun, ScsiStatus};
use crate::exports::VolumeId;
use crate::scsi::sense::Sense;
use blockmux_volume::{Io, SgList};
use std::time::Duration;

/// A command from the transport (SAM-5 §5.1, Execute Command).
#[derive(Clone, Copy, Debug)]
pub struct Command {
    /// LUN that the command addresses.
    pub lun: Lun,
    /// The command descriptor block.
    pub cdb: Cdb,
    /// Task attribute.
    pub attribute: TaskAttribute,
    /// Length of the initiator's data-out, in bytes.
    pub data_out_len: u32,
    /// Length of the initiator's data-in buffer, in bytes.
    pub data_in_len: u32,
}

/// Task attribute (SAM-5 §8.6). Commands of one nexus may execute in any order, so the attribute is
/// only recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TaskAttribute {
    /// Executed in any order.
    #[default]
    Simple,
    /// Executed in the order received.
    Ordered,
    /// Executed before all others.
    HeadOfQueue,
    /// Handles an auto contingent allegiance, which this device server never establishes.
    Aca,
}

/// The next step of a task.
#[derive(Debug)]
pub enum TaskStep {
    /// The transport fetches the next `len` bytes of data-out, at most
    /// [`blockmux_volume::MAX_TRANSFER`] and never 0, and calls [`DeviceServer::on_data_out`].
    DataOut {
        /// Length in bytes.
        len: usize,
    },
    /// The transport submits an I/O to the volume of a logical unit and calls
    /// [`DeviceServer::on_io`].
    Io {
        /// The volume, as the target identifies it.
        volume: VolumeId,
        /// The I/O; the transport sets its tag.
        io: Io,
    },
    /// The task waits for another task, possibly of another nexus. The transport calls
    /// [`DeviceServer::resume`] after each completion of the session, and after a millisecond
    /// without one.
    Wait,
    /// The task leaves the volume to other I/O for this long. The transport then calls
    /// [`DeviceServer::resume`].
    Pause(Duration),
    /// The task has ended; the transport drops it.
    Done(Response),
}

/// The response to a task.
#[derive(Clone, Debug)]
pub struct Response {
    /// The status.
    pub status: ScsiStatus,
    /// Sense data of a CHECK CONDITION status.
    pub sense: Option<Sense>,
    /// Data for the initiator. It may exceed the initiator's buffer; the transport then sends the
    /// part that fits.
    pub data_in: SgList,
    /// Length that the CDB requests, in bytes. The residual count is its difference to the
    /// initiator's expected length.
    pub transfer_len: u64,
    /// The CDB requests data-out.
    pub is_data_out: bool,
}

impl Response {
    /// A status without sense data or data-in.
    pub(crate) fn bare(status: ScsiStatus) -> Response {
        Response { status, sense: None, data_in: SgList::default(), transfer_len: 0, is_data_out: false }
    }

    /// CHECK CONDITION without data-in.
    pub(crate) fn failed(sense: Sense) -> Response {
        Response { sense: Some(sense), ..Response::bare(ScsiStatus::CHECK_CONDITION) }
    }
}
