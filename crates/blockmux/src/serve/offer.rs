//! What a daemon offers to a process that takes over from it.

use blockmux_engine::socket::ListenerHandle;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Everything that can be handed over.
pub(super) struct Offered {
    pub(super) listeners: Vec<OfferedListener>,
    pub(super) volumes: Vec<VolumeOffer>,
    /// What runs, as a config file.
    pub(super) text: String,
}

/// A listener with its socket.
pub(super) type OfferedListener = (ListenerOffer, Arc<ListenerHandle>);

/// A listener of the process that serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ListenerOffer {
    /// Name of its protocol, [`CONTROL`] or [`API`].
    pub(super) kind: String,
    /// The address as it was asked for; its port may be 0.
    pub(super) asked: String,
    /// The process removes the file of this Unix socket.
    pub(super) owns_file: bool,
    /// The service manager has passed it by this name.
    pub(super) manager_name: Option<String>,
}

/// A volume of the process that serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct VolumeOffer {
    pub(super) name: String,
    /// As people may see it: without passwords.
    pub(super) spec: String,
    /// What its files and devices are known by: another path may lead to the same file, and the
    /// same relative path to another one.
    pub(super) data: Vec<String>,
    /// By which initiators know it.
    pub(super) uuid: Option<String>,
}

/// The listener of `--control`.
pub(super) const CONTROL: &str = "control";
/// The listener of `--api`.
pub(super) const API: &str = "api";
