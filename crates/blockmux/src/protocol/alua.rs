//! Names of asymmetric access states of SCSI target ports (SPC-5) in the config and in commands.

use blockmux_proto::scsi::AccessState;
use serde::{Deserialize, Serialize};

/// Name of an asymmetric access state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
pub(crate) enum AluaStateName {
    /// The preferred path.
    #[serde(rename = "active/optimized")]
    #[value(name = "active/optimized")]
    Optimized,
    /// A slower path.
    #[serde(rename = "active/non-optimized")]
    #[value(name = "active/non-optimized")]
    NonOptimized,
    /// A path for failover: it accepts INQUIRY and reservations, but no I/O.
    #[serde(rename = "standby")]
    #[value(name = "standby")]
    Standby,
    /// A path that cannot be used now.
    #[serde(rename = "unavailable")]
    #[value(name = "unavailable")]
    Unavailable,
}

impl AluaStateName {
    /// The state's value on the wire.
    pub(crate) fn access_state(self) -> AccessState {
        match self {
            AluaStateName::Optimized => AccessState::ACTIVE_OPTIMIZED,
            AluaStateName::NonOptimized => AccessState::ACTIVE_NON_OPTIMIZED,
            AluaStateName::Standby => AccessState::STANDBY,
            AluaStateName::Unavailable => AccessState::UNAVAILABLE,
        }
    }
}
