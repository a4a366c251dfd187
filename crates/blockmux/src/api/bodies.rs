//! Bodies of requests and responses of the API.

use crate::api::limits::LimitsBody;
use crate::attach::way::Way;
use crate::spec_text::SpecText;
use blockmux_engine::attach::DiskName;
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use std::fmt;
use std::marker::PhantomData;
use std::path::PathBuf;
use utoipa::ToSchema;
use zeroize::Zeroizing;

/// A volume to export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AddVolume {
    /// `[NAME=]VOLUME`, as for `blockmux serve`; paths are those of the daemon.
    pub(crate) volume: SpecText,
    /// Refuse writes.
    #[serde(default)]
    pub(crate) read_only: bool,
    /// Description that discovery shows.
    #[serde(default)]
    pub(crate) description: String,
    /// Protocols that export the volume; by default all, or none if a target restricts the volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) protocols: Option<Vec<String>>,
    /// Networks in CIDR notation from which clients may use the volume; by default all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) allow: Option<Vec<String>>,
    /// Limits of all clients together.
    #[serde(default, deserialize_with = "object", skip_serializing_if = "Option::is_none")]
    pub(crate) limits: Option<LimitsBody>,
    /// Limits of each client.
    #[serde(default, deserialize_with = "object", skip_serializing_if = "Option::is_none")]
    pub(crate) client_limits: Option<LimitsBody>,
}

/// A new size of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ResizeVolume {
    /// In bytes; by default the current size of the file or device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) size: Option<u64>,
    /// Allow a smaller size; the data beyond it is lost.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) shrink: bool,
}

/// How a volume becomes active.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ActivateVolume {
    /// Shut out the daemon that serves it now.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) take: bool,
}

/// A snapshot to create.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CreateSnapshot {
    /// Its name.
    #[schema(example = "monday")]
    pub(crate) name: String,
}

/// A change of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProtectSnapshot {
    /// Whether it is protected from being deleted.
    pub(crate) protected: bool,
}

/// New limits of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct LimitVolume {
    /// Limits of all clients together, instead of the current ones; `{}`: none.
    #[serde(default, deserialize_with = "object", skip_serializing_if = "Option::is_none")]
    pub(crate) limits: Option<LimitsBody>,
    /// Limits of each client, instead of the current ones; `{}`: none.
    #[serde(default, deserialize_with = "object", skip_serializing_if = "Option::is_none")]
    pub(crate) client_limits: Option<LimitsBody>,
}

/// A volume to attach to a target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AttachVolume {
    /// Name of the volume.
    pub(crate) volume: String,
    /// NSID or LUN; by default the lowest free one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) number: Option<u32>,
    /// ANAGRPID; by default in no `ana_group`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ana_group: Option<u32>,
}

/// A volume to attach as a disk of the daemon's machine. It is also an `[[attachment]]` of the
/// config, where a volume has at most one, which the volume's name identifies (docs/decisions,
/// number 100).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = AttachDisk)]
pub(crate) struct Attachment {
    /// Name of the volume.
    pub(crate) volume: String,
    /// How to attach it; by default the best way that the machine has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, example = "ublk")]
    pub(crate) via: Option<Way>,
    /// Unix socket at which virtual machines find the disk, by vhost-user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, example = "/run/disk.sock")]
    pub(crate) socket: Option<PathBuf>,
    /// Its name below `/dev/blockmux`.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "disk_name")]
    #[schema(value_type = Option<String>)]
    pub(crate) name: Option<DiskName>,
    /// Refuse writes of the disk, also if the volume is writable.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) read_only: bool,
}

/// A disk's name as text.
mod disk_name {
    use super::DiskName;
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

    pub(super) fn serialize<S: Serializer>(name: &Option<DiskName>, to: S) -> Result<S::Ok, S::Error> {
        name.as_ref().map(DiskName::to_string).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<DiskName>, D::Error> {
        let text = Option::<String>::deserialize(from)?;
        text.map(|text| text.parse()).transpose().map_err(de::Error::custom)
    }
}

/// A protocol-specific change of a target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChangeTarget {
    /// The protocol's name.
    #[schema(example = "nvme-tcp")]
    pub(crate) protocol: String,
    /// The change, in the format of that protocol.
    #[schema(value_type = Object)]
    pub(crate) what: Value,
}

/// New levels of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChangeLog {
    /// `AREA=LEVEL,...`, as for `--log`; other areas keep their levels.
    #[schema(example = "protocol=debug,audit=off")]
    pub(crate) levels: String,
}

/// The name and the URLs of a volume that was added.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Added {
    pub(crate) name: String,
    pub(crate) urls: Vec<String>,
    /// Protocols in the volume's `protocols` that have no listener.
    pub(crate) protocols_without_listener: Vec<String>,
}

/// The size of a volume that was resized.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Resized {
    /// In bytes.
    pub(crate) size: u64,
}

/// The number of a unit that was attached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Attached {
    /// NSID or LUN.
    pub(crate) number: u32,
}

/// The disk of a volume that was attached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct AttachedDevice {
    /// Path of the disk.
    #[schema(example = "/dev/ublkb0")]
    pub(crate) device: String,
}

/// What the daemon does as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum DaemonStage {
    /// Not everything is open.
    Starting,
    /// All volumes are open, and all listeners accept connections.
    Serving,
    /// I/O in flight completes, and no more connections are accepted.
    Stopping,
}

/// The health of a daemon that runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct DaemonHealth {
    pub(crate) state: DaemonStage,
}

/// The name and the version of the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct DaemonVersion {
    #[schema(example = "blockmux")]
    pub(crate) name: String,
    #[schema(example = "0.1.0")]
    pub(crate) version: String,
}

/// A secret to write. It is not returned by any request.
#[derive(Clone, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct WriteSecret {
    /// One line, or a file of keys.
    #[schema(value_type = String, format = Password, write_only)]
    pub(crate) value: SecretText,
}

/// The text of a secret. Debug output and serialization have no place for it.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(from = "String")]
pub(crate) struct SecretText(pub(crate) Zeroizing<String>);

impl From<String> for SecretText {
    fn from(text: String) -> SecretText {
        SecretText(Zeroizing::new(text))
    }
}

impl fmt::Debug for SecretText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

/// A secret that was written, without its value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct SecretInfo {
    /// The config names it as `secret:NAME`, for example in `secret_file`.
    #[schema(example = "host1")]
    pub(crate) name: String,
    /// Its file, for the URLs of remote volumes.
    #[schema(example = "/var/lib/blockmux/secrets/host1")]
    pub(crate) path: String,
    /// Keys of the running config that name it.
    pub(crate) used_by: Vec<String>,
}

/// A message about a change that was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Message {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) message: Option<String>,
}

/// Reads an object or `null`. A derived `Deserialize` also reads an array of the fields' values,
/// which the API's document does not permit.
fn object<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    struct Object<T>(PhantomData<T>);
    impl<'de, T: Deserialize<'de>> Visitor<'de> for Object<T> {
        type Value = Option<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_unit<E>(self) -> Result<Option<T>, E> {
            Ok(None)
        }

        fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<Option<T>, M::Error> {
            T::deserialize(MapAccessDeserializer::new(map)).map(Some)
        }
    }
    deserializer.deserialize_any(Object(PhantomData))
}
