//! The status of a daemon: its volumes, sessions and disks with their I/O counters.

use crate::api::limits::LimitsBody;
use blockmux_engine::serve::sessions::SessionInfo;
use blockmux_proto::volume_state::VolumeTraffic;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Connections and volumes of a daemon.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct Status {
    pub(crate) connections: usize,
    /// Maximum number of connections.
    pub(crate) max_connections: usize,
    /// Lost connections whose I/O has not ended; they are not counted in `connections`.
    pub(crate) orphaned_connections: usize,
    /// Connections of the listeners of each protocol.
    pub(crate) protocols: Vec<ProtocolStatus>,
    pub(crate) volumes: Vec<VolumeStatus>,
    /// Volumes that are attached as disks of the daemon's machine.
    #[serde(default)]
    pub(crate) attachments: Vec<AttachmentStatus>,
}

/// The listeners of a protocol. Those of iSCSI and NVMe/TCP also accept iSER and NVMe/RDMA; the
/// list of sessions has the protocol of each session.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct ProtocolStatus {
    pub(crate) name: String,
    pub(crate) connections: usize,
}

/// A snapshot of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct SnapshotStatus {
    pub(crate) name: String,
    /// Size of the volume then, in bytes.
    pub(crate) size: u64,
    /// When it was created, if the storage knows that.
    #[schema(example = "2026-11-30T12:00:00Z")]
    pub(crate) created: Option<String>,
    /// It cannot be deleted; `null` if the storage cannot protect snapshots.
    pub(crate) protected: Option<bool>,
    /// The volumes of this daemon that serve it.
    pub(crate) volumes: Vec<String>,
}

/// An exported volume and its I/O counters since it was exported.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct VolumeStatus {
    pub(crate) name: String,
    /// In bytes.
    pub(crate) size: u64,
    pub(crate) read_only: bool,
    /// Protocols over which it is exported.
    #[serde(default)]
    pub(crate) protocols: Vec<String>,
    /// iSCSI names, subsystem NQNs and SRP ports that have it.
    #[serde(default)]
    pub(crate) targets: Vec<String>,
    /// Networks from which clients may use it, if not all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) allow: Vec<String>,
    /// Open connections that use the volume.
    pub(crate) users: u64,
    /// Lost connections whose I/O on the volume has not ended.
    pub(crate) orphaned_connections: usize,
    #[serde(flatten)]
    pub(crate) traffic: TrafficStatus,
    /// Limits of all clients together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) limits: Option<LimitsBody>,
    /// Limits of each client.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) client_limits: Option<LimitsBody>,
    /// Present if limits have throttled requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) throttled: Option<ThrottleStatus>,
    /// Present if an initiator or host is registered or holds a reservation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reservation: Option<ReservationStatus>,
    /// For a volume that several daemons serve in turns: "active", "transitioning" or "standby".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) serving: Option<String>,
    /// Reconnects of a remote volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reconnects: Option<u64>,
    /// Present for a RAM volume that is populated ahead of use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) populated: Option<PopulatedStatus>,
}

/// I/O counters of a volume or a session.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub(crate) struct TrafficStatus {
    pub(crate) reads: u64,
    pub(crate) read_bytes: u64,
    pub(crate) writes: u64,
    pub(crate) written_bytes: u64,
    /// Flushes, discards, zeroing and all other requests.
    pub(crate) others: u64,
    pub(crate) failed: u64,
}

impl From<VolumeTraffic> for TrafficStatus {
    fn from(traffic: VolumeTraffic) -> TrafficStatus {
        let VolumeTraffic { reads, read_bytes, writes, written_bytes, others, failed, .. } = traffic;
        TrafficStatus { reads, read_bytes, writes, written_bytes, others, failed }
    }
}

impl TrafficStatus {
    /// Number of requests of all kinds.
    pub(crate) fn requests(&self) -> u64 {
        self.reads + self.writes + self.others
    }

    /// Number of bytes read and written.
    pub(crate) fn bytes(&self) -> u64 {
        self.read_bytes + self.written_bytes
    }

    /// Number of failed requests.
    pub(crate) fn failed(&self) -> u64 {
        self.failed
    }

    /// Adds the counters of another one.
    pub(crate) fn add(&mut self, more: &TrafficStatus) {
        self.reads += more.reads;
        self.read_bytes += more.read_bytes;
        self.writes += more.writes;
        self.written_bytes += more.written_bytes;
        self.others += more.others;
        self.failed += more.failed;
    }
}

/// Requests that limits have throttled.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct ThrottleStatus {
    /// Number of requests that wait now.
    pub(crate) pending: u64,
    /// Number of requests that were throttled since the volume was exported.
    pub(crate) requests: u64,
    /// Sum of the times for which they waited.
    pub(crate) seconds: f64,
}

/// Reservations of a volume.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct ReservationStatus {
    /// Number of registered initiators and hosts.
    pub(crate) registrants: usize,
    /// An initiator or host holds a reservation.
    pub(crate) reserved: bool,
}

/// Populated memory of a RAM volume, in bytes.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct PopulatedStatus {
    pub(crate) bytes: u64,
    pub(crate) of: u64,
}

/// A connection that has logged in.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct SessionStatus {
    pub(crate) protocol: String,
    /// Empty if the protocol has no names for initiators.
    pub(crate) initiator: String,
    pub(crate) target: String,
    /// Address and port.
    pub(crate) address: String,
    /// Time of the login in UTC, as RFC 3339.
    pub(crate) since: String,
    #[serde(flatten)]
    pub(crate) traffic: TrafficStatus,
}

impl From<SessionInfo> for SessionStatus {
    fn from(info: SessionInfo) -> SessionStatus {
        let SessionInfo { login, peer, since, traffic, .. } = info;
        let since = Timestamp::try_from(since).unwrap_or_default();
        SessionStatus {
            protocol: login.protocol.to_owned(),
            initiator: login.initiator,
            target: login.target,
            address: peer,
            since: format!("{since:.0}"),
            traffic: traffic.into(),
        }
    }
}

impl SessionStatus {
    /// A disk of the daemon's machine as one more client of its volume; `None` if it is not
    /// attached.
    pub(crate) fn of_disk(disk: &AttachmentStatus) -> Option<SessionStatus> {
        Some(SessionStatus {
            protocol: disk.via.clone()?,
            initiator: String::new(),
            target: disk.volume.clone(),
            address: disk.device.clone()?,
            since: String::new(),
            traffic: disk.traffic.clone(),
        })
    }
}

/// A volume that is attached as a disk of the daemon's machine, and the disk's I/O counters.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct AttachmentStatus {
    pub(crate) volume: String,
    /// `attaching`, `attached`, `detaching` or `failed`.
    pub(crate) state: String,
    /// Path of the disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "/dev/ublkb0")]
    pub(crate) device: Option<String>,
    /// How it is attached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "ublk")]
    pub(crate) via: Option<String>,
    pub(crate) read_only: bool,
    /// An earlier process had left the disk, and its requests have gone on.
    pub(crate) recovered: bool,
    /// Why it is not attached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
    #[serde(flatten)]
    pub(crate) traffic: TrafficStatus,
}
