//! ATA over Ethernet: volumes as ATA disks on a local network, without IP (AoEr11).
//!
//! A target ([`server`]) has any number of disks, each with an [`AoeAddress`], and answers the
//! requests that arrive at its ports. An initiator ([`client`]) finds one disk by a broadcast and
//! is a queue to it. [`discovery`] lists all disks that answer.
//!
//! AoE has no connections. The network may lose, duplicate and reorder frames, and only the
//! initiator recovers: it retransmits commands without an answer. `server/recent_writes.rs` and
//! `client/commands.rs` describe what that requires of both sides.

pub mod address;
pub mod client;
pub mod discovery;
pub mod disks;
mod error;
mod identify;
pub mod server;
#[cfg(test)]
mod tests;
pub mod unit;
pub mod url;

pub use address::AoeAddress;
/// For packet filters: the response flag is in the first byte, the command in byte 5, the tag from
/// byte 6 on.
pub use blockmux_wire::aoe::{AOE_FLAG_RESPONSE, AoeCommand};

use blockmux_wire::aoe::AOE_ATA_HEAD;
use blockmux_wire::ata::ATA_SECTOR;

/// The maximum number of sectors in a frame on a link with this MTU in bytes: 2 for 1,500, 17 for
/// 9,000.
#[must_use]
pub fn sectors_in(mtu: u32) -> u8 {
    let data = (mtu as usize).saturating_sub(AOE_ATA_HEAD);
    u8::try_from(data.checked_div(ATA_SECTOR).unwrap_or(0)).unwrap_or(u8::MAX)
}

/// Sector size in bytes.
pub(crate) const SECTOR: u64 = ATA_SECTOR as u64;
