//! The volume and the server that a URL names.

use crate::failure::Failure;
use blockmux_volume::{Volume, VolumeInfo};
use serde::Serialize;
use serde_json::Value;
use std::sync::Arc;

/// The volume and the server that a URL names.
pub(crate) trait Remote {
    /// Connects to the volume for I/O. `connections` is the number of connections of each core, if
    /// the URL gives none and the server permits several.
    ///
    /// # Errors
    /// If the server cannot be reached or does not have the volume.
    fn open(&self, connections: u32) -> Result<Arc<dyn Volume>, Failure>;

    /// Identifies the volume independently of the path and the parameters of the URL.
    fn volume_key(&self) -> String;

    /// Queries the description of the volume.
    ///
    /// # Errors
    /// If the server cannot be reached or does not have the volume.
    fn describe(&self) -> Result<Description, Failure>;

    /// Lists the exports of the server.
    ///
    /// # Errors
    /// If the server cannot be reached or does not list them.
    fn discover(&self) -> Result<Discovery, Failure>;

    /// Requests a reset function; returns what was reset, in a sentence for people.
    ///
    /// # Errors
    /// If the server cannot be reached or rejects the function.
    fn reset(&self, _function: ResetFunction) -> Result<&'static str, Failure> {
        Err(Failure::request(
            "only iSCSI, iSER and SRP logical units can be reset; use iscsi://host/target-name/lun",
        ))
    }
}

/// Task management functions of RFC 7143 that do not refer to a single task. SRP has those for one
/// logical unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ResetFunction {
    /// LOGICAL UNIT RESET: abort the commands of all initiators
    Lun,
    /// TARGET WARM RESET: abort all commands of all logical units of the target
    Target,
    /// TARGET COLD RESET: abort all commands of the target and close all sessions
    Cold,
    /// ABORT TASK SET: abort the commands of this session, which has none
    AbortTaskSet,
    /// CLEAR TASK SET: abort the commands of all sessions with the logical unit
    ClearTaskSet,
}

/// A description of a volume in the terms of its protocol.
pub(crate) struct Description {
    /// Labels and values for people; empty values are not shown.
    pub(crate) rows: Vec<(&'static str, String)>,
    /// JSON object for programs, with at least `url` as given, `protocol`, `size` in bytes and
    /// `read_only`.
    pub(crate) json: Value,
    /// The volume's properties, as far as the protocol reports them.
    pub(crate) info: VolumeInfo,
}

/// The exports of a server.
#[derive(Serialize)]
pub(crate) struct Discovery {
    /// URL of the server.
    pub(crate) url: String,
    pub(crate) exports: Vec<DiscoveredExport>,
    /// Number of exports beyond the maximum that is kept.
    pub(crate) left_out: u64,
}

/// One export of a server.
#[derive(Serialize)]
pub(crate) struct DiscoveredExport {
    pub(crate) name: String,
    pub(crate) url: String,
    /// Description of the export, or the reason why it could not be queried.
    pub(crate) description: String,
    /// In bytes; `None` if the server did not report it, or it was not queried.
    pub(crate) size: Option<u64>,
}

/// Description of an export at another address, which may be unreachable from here.
pub(crate) const NOT_QUERIED: &str = "at another address, which was not queried";
