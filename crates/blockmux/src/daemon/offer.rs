//! The offer of a daemon to a process that takes over from it: its listeners and volumes.

use blockmux_engine::net::socket::ListenerHandle;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The listeners and volumes that can be handed over.
pub(super) struct DaemonOffer {
    pub(super) listeners: Vec<OfferedListener>,
    pub(super) volumes: Vec<VolumeOffer>,
    /// The volumes that are attached as disks.
    pub(super) attachments: Vec<String>,
    /// The running config, as the text of a config file.
    pub(super) text: String,
}

/// A listener and its socket.
pub(super) type OfferedListener = (ListenerOffer, Arc<ListenerHandle>);

/// A listener of the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ListenerOffer {
    /// Name of its protocol, [`CONTROL`] or [`API`].
    pub(super) kind: String,
    /// The configured address; its port may be 0.
    pub(super) asked: String,
    /// Whether the listener is a Unix socket whose file the daemon removes when it ends.
    pub(super) owns_file: bool,
    /// The name by which the service manager passed the socket (`LISTEN_FDNAMES`).
    pub(super) manager_name: Option<String>,
}

/// A volume of the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct VolumeOffer {
    pub(super) name: String,
    /// The spec without passwords.
    pub(super) spec: String,
    /// Keys of the files and block devices that the volume consists of. Paths do not identify them:
    /// one file can have several paths, and a relative path depends on the working directory.
    pub(super) data: Vec<String>,
    /// The UUID from which initiators get the volume's identifiers.
    pub(super) uuid: Option<String>,
}

/// The listener of `--control`.
pub(super) const CONTROL: &str = "control";
/// The listener of `--api`.
pub(super) const API: &str = "api";
