//! ATA over Ethernet: volumes as ATA disks on a local network, without IP (AoEr11).
//!
//! A target has any number of disks, each with an [`AoeAddress`], and answers whatever comes at its
//! ports: [`server`]. An initiator finds one disk by asking all stations, and is then a queue to
//! it: [`client`]. Who answers at all is found by [`discovery`].
//!
//! There are no connections. Frames get lost, are doubled and overtake each other, and only the
//! initiator does anything about it: it sends again what was not answered. What that asks of both
//! sides is told in `server/recent.rs` and `client/flight.rs`.

pub mod address;
pub mod client;
pub mod discovery;
mod error;
mod identify;
pub mod server;
#[cfg(test)]
mod tests;
pub mod unit;
pub mod url;

pub use address::AoeAddress;
/// What a filter of frames looks at: a flag of the first byte, the command in byte 5, the tag from
/// byte 6 on.
pub use blockmux_wire::aoe::{AOE_FLAG_RESPONSE, AoeCommand};

use blockmux_wire::aoe::AOE_ATA_HEAD;
use blockmux_wire::ata::ATA_SECTOR;

/// How many sectors a frame carries at most, on a link that takes so many bytes behind the Ethernet
/// header: 2 of the usual 1,500 bytes, 17 of 9,000.
#[must_use]
pub fn sectors_in(mtu: u32) -> u8 {
    let data = (mtu as usize).saturating_sub(AOE_ATA_HEAD);
    u8::try_from(data.checked_div(ATA_SECTOR).unwrap_or(0)).unwrap_or(u8::MAX)
}

/// In bytes.
pub(crate) const SECTOR: u64 = ATA_SECTOR as u64;
