//! Asymmetric access states of SCSI target ports (SPC-5), as people write them.

use blockmux_proto::scsi::AccessState;
use serde::{Deserialize, Serialize};

/// An asymmetric access state, by the specification's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
pub(crate) enum AluaStateName {
    /// Preferred.
    #[serde(rename = "active/optimized")]
    #[value(name = "active/optimized")]
    Optimized,
    /// Works, but slower.
    #[serde(rename = "active/non-optimized")]
    #[value(name = "active/non-optimized")]
    NonOptimized,
    /// For a failover: takes reservations and inquiries, but no I/O.
    #[serde(rename = "standby")]
    #[value(name = "standby")]
    Standby,
    /// Cannot be used now.
    #[serde(rename = "unavailable")]
    #[value(name = "unavailable")]
    Unavailable,
}

impl AluaStateName {
    /// As it is on the wire.
    pub(crate) fn word(self) -> AccessState {
        match self {
            AluaStateName::Optimized => AccessState::ACTIVE_OPTIMIZED,
            AluaStateName::NonOptimized => AccessState::ACTIVE_NON_OPTIMIZED,
            AluaStateName::Standby => AccessState::STANDBY,
            AluaStateName::Unavailable => AccessState::UNAVAILABLE,
        }
    }
}
