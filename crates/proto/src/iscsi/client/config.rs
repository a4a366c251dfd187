//! What a session is to reach, and how.

use crate::iscsi::login::operational::{OperationalKey, OperationalParameters};
use crate::iscsi::name::Name;
use crate::iscsi::node::Chap;
use crate::scsi::Lun;
use blockmux_wire::iscsi::scsi::Function;

/// What to reach, and how.
#[derive(Clone, Debug)]
pub struct Config {
    /// Our own name.
    pub initiator: Name,
    /// The target's.
    pub target: Name,
    /// Which of its logical units.
    pub lun: Lun,
    /// What for.
    pub mode: Mode,
    /// What to prove, and what the target has to; `None`: nothing.
    pub chap: Option<Chap>,
    /// What to propose; see [`wishes`].
    pub wishes: OperationalParameters,
    /// Unique among the sessions of one initiator with one target: another with the same ends the
    /// first.
    pub isid: [u8; 6],
    /// How many commands go on one connection before another one is thought of.
    pub burst: BurstSize,
}

/// What is one connection's to carry, of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BurstSize {
    /// So many commands,
    pub commands: u32,
    /// or so many bytes.
    pub bytes: u32,
}

impl Default for BurstSize {
    /// So much that a queue of 4 KiB at depth 128 needs one connection, for it is slower over
    /// several, and so little that connections share what is deeper, and what large I/O moves.
    fn default() -> BurstSize {
        BurstSize { commands: 128, bytes: 512 << 10 }
    }
}

/// What a session is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// To read and write the unit.
    Use,
    /// To learn everything about the unit, and leave.
    Describe,
    /// To have the target do this, and leave without a look at the unit.
    Manage(Function),
}

/// The most connections of one session.
pub const MAX_CONNECTIONS: u32 = 16;

/// What an initiator proposes unless it is told otherwise: data at once and in long bursts, no
/// digests.
#[must_use]
pub fn wishes() -> OperationalParameters {
    OperationalParameters::standard()
        .with(OperationalKey::InitialR2T, 0)
        .with(OperationalKey::MaxRecvDataSegmentLength, 256 << 10)
        .with(OperationalKey::MaxBurstLength, 1 << 20)
        .with(OperationalKey::FirstBurstLength, 256 << 10)
        .with(OperationalKey::DefaultTime2Wait, 0)
        .with(OperationalKey::DefaultTime2Retain, 0)
        .with(OperationalKey::MaxOutstandingR2T, 8)
}
