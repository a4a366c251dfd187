//! Configuration of an initiator session.

use crate::iscsi::login::operational::{OperationalKey, OperationalParameters};
use crate::iscsi::name::Name;
use crate::iscsi::node::Chap;
use crate::scsi::Lun;
use blockmux_wire::iscsi::scsi::Function;

/// Configuration of an initiator session.
#[derive(Clone, Debug)]
pub struct IscsiInitiatorConfig {
    /// Name of this initiator.
    pub initiator: Name,
    /// Name of the target.
    pub target: Name,
    /// The logical unit.
    pub lun: Lun,
    /// Purpose of the session.
    pub purpose: SessionPurpose,
    /// CHAP credentials of both directions; `None` to log in without authentication.
    pub chap: Option<Chap>,
    /// Proposed operational parameters; see [`default_proposal`].
    pub proposal: OperationalParameters,
    /// Initiator session ID, unique among the sessions of this initiator with the target: a login
    /// with the same ISID reinstates the session.
    pub isid: [u8; 6],
    /// Size of the bursts that alternate between connections.
    pub burst: BurstSize,
}

/// Maximum size of a burst of commands on one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BurstSize {
    /// Number of commands.
    pub commands: u32,
    /// Payload in bytes.
    pub bytes: u32,
}

impl Default for BurstSize {
    /// A queue of 4 KiB requests at depth 128 uses one connection, because several are slower;
    /// deeper queues and large I/O use several.
    fn default() -> BurstSize {
        BurstSize { commands: 128, bytes: 512 << 10 }
    }
}

/// Purpose of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionPurpose {
    /// Read and write the unit.
    Use,
    /// Identify the unit, then log out.
    Describe,
    /// Send this task management function, then log out, without accessing the unit.
    Manage(Function),
}

/// Maximum number of connections of a session.
pub const MAX_CONNECTIONS: u32 = 16;

/// The default proposal: unsolicited and immediate data, long bursts, no digests.
#[must_use]
pub fn default_proposal() -> OperationalParameters {
    OperationalParameters::standard()
        .with(OperationalKey::InitialR2T, 0)
        .with(OperationalKey::MaxRecvDataSegmentLength, 256 << 10)
        .with(OperationalKey::MaxBurstLength, 1 << 20)
        .with(OperationalKey::FirstBurstLength, 256 << 10)
        .with(OperationalKey::DefaultTime2Wait, 0)
        .with(OperationalKey::DefaultTime2Retain, 0)
        .with(OperationalKey::MaxOutstandingR2T, 8)
}
