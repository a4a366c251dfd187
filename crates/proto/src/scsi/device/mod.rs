//! The device server: commands in, steps out, for every transport (SAM-5, SPC-5, SBC-4).
//!
//! ```text
//!   transport ──Command──▶ DeviceServer::begin ──▶ Step::DataOut ──▶ on_data_out ─┐
//!      ▲                                      ├──▶ Step::Io ───────▶ on_io ───────┤
//!      │                              ├──▶ Step::Wait, Step::Pause ▶ resume ──────┤
//!      └───────────── Response ◀── Step::Done ◀───────────────────────────────────┘
//! ```
//! A [`ScsiTarget`] maps LUNs to [`LogicalUnit`]s, which all sessions share: they hold mode pages
//! and unit attentions beside the volume. What other protocols share too, reservations and locked
//! ranges, is in [`crate::volume_state`]. A session has one [`DeviceServer`], on its own core; it
//! is one I_T nexus. It keeps a copy of what a READ or WRITE needs to know of the shared state, and
//! one atomic load tells whether the copy is still good, so that those commands take no lock and
//! allocate nothing.
//!
//! One table maps operation codes to what carries them out and to what REPORT SUPPORTED OPERATION
//! CODES says; each family of commands is a file.

mod cdb;
mod error;
mod nexus;
mod server;
mod table;
mod target;
mod task;
mod unit;
mod units;
mod view;

mod alua;
mod cache;
mod capacity;
mod compare;
mod defects;
mod extended_copy;
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
pub use nexus::{Nexus, TargetPort};
pub use server::{DeviceServer, ManagementResponse, TaskManagement};
pub use target::{MAX_LUN, PortGroupStates, ScsiTarget, UnitChange, UnitSource, UnitWatcher};
pub use task::Task;
pub use unit::{LogicalUnit, UnitIdentity};

pub use blockmux_wire::scsi::alua::AccessState;

use super::{Lun, ScsiStatus};
use crate::exports::VolumeId;
use crate::scsi::sense::Sense;
use blockmux_volume::{Io, SgList};
use std::time::Duration;

/// What a transport hands over (SAM-5 §5.1, Execute Command).
#[derive(Clone, Copy, Debug)]
pub struct Command {
    /// The logical unit that it is for.
    pub lun: Lun,
    /// What to do.
    pub cdb: Cdb,
    /// How it stands to other commands.
    pub attribute: TaskAttribute,
    /// How much data-out the initiator has, in bytes.
    pub data_out_len: u32,
    /// How much data-in the initiator has room for, in bytes.
    pub data_in_len: u32,
}

/// SAM-5 §8.6. Commands of one nexus may run in any order, so only what the initiator asked for is
/// kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TaskAttribute {
    /// In any order.
    #[default]
    Simple,
    /// In the order received.
    Ordered,
    /// Before all others.
    HeadOfQueue,
    /// Handles an auto contingent allegiance, which this device server never establishes.
    Aca,
}

/// What a task wants next.
#[derive(Debug)]
pub enum Step {
    /// The next `len` bytes of data-out in memory, at most [`blockmux_volume::MAX_TRANSFER`] and
    /// never 0; then [`DeviceServer::on_data_out`].
    DataOut {
        /// In bytes.
        len: usize,
    },
    /// I/O on the volume of a logical unit; then [`DeviceServer::on_io`].
    Io {
        /// The volume, as the target names it.
        volume: VolumeId,
        /// The transport sets its tag.
        io: Io,
    },
    /// Another task holds it up, of any nexus. Ask again with [`DeviceServer::resume`] after each
    /// completion of the session, and after a millisecond without one.
    Wait,
    /// To leave the volume to others for that long; then [`DeviceServer::resume`].
    Pause(Duration),
    /// The end; drop the task.
    Done(Response),
}

/// How a task ended.
#[derive(Clone, Debug)]
pub struct Response {
    /// The status.
    pub status: ScsiStatus,
    /// With CHECK CONDITION: why.
    pub sense: Option<Sense>,
    /// Data for the initiator; may be more than it has room for, and then the transport sends what
    /// fits.
    pub data_in: SgList,
    /// What the command would move if the initiator's buffers were as long as its CDB says, in
    /// bytes. The residual is the difference to what the initiator expects.
    pub transfer_len: u64,
}

impl Response {
    /// A bare status.
    pub(crate) fn bare(status: ScsiStatus) -> Response {
        Response { status, sense: None, data_in: SgList::default(), transfer_len: 0 }
    }

    /// CHECK CONDITION, without data.
    pub(crate) fn failed(sense: Sense) -> Response {
        Response { sense: Some(sense), ..Response::bare(ScsiStatus::CHECK_CONDITION) }
    }
}
