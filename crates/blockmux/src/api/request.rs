//! Requests to a daemon and its answers. `cli/ctl/routes.rs` makes HTTP requests of them, and
//! `daemon/api/` reads those; `daemon/control.rs` executes them.

use crate::api::bodies::{
    AddVolume, Added, AttachVolume, Attached, AttachedDevice, Attachment, LimitVolume, Resized, SecretInfo,
    SecretText,
};
use crate::api::cluster::{ClusterChange, ClusterStatus};
use crate::api::edit::{ConfigEdit, ListQuery, ObjectList, ObjectPath};
use crate::api::fragment::{ApplyOptions, Fragment, FragmentContent};
use crate::api::plan::PlanReport;
use crate::api::status::{SessionStatus, SnapshotStatus, Status};
use crate::api::{ApiError, ErrorBody};
use crate::protocol::frontend::Change;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;

/// A request to a daemon, from the command line or over HTTP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// Show volumes, clients and I/O counters.
    Status,
    /// List the sessions.
    Sessions,
    /// End the sessions of an address or of an initiator.
    Disconnect { session: String },
    /// Resize a volume, to its own size by default; a smaller size discards data.
    Resize { name: String, size: Option<u64>, shrink: bool },
    /// Serve a volume that several daemons serve in turns.
    Activate { volume: String, take: bool },
    /// Let another daemon serve a volume.
    Deactivate { volume: String },
    /// Limit a volume's I/O.
    Limit { name: String, limits: LimitVolume },
    /// Export a new volume.
    Add(AddVolume),
    /// Stop exporting a volume.
    Remove { name: String, force: bool },
    /// Show the group of gateways.
    Cluster,
    /// Change the group of gateways.
    ClusterChange(ClusterChange),
    /// List the snapshots of a volume.
    Snapshots { volume: String },
    /// Create a snapshot of a volume.
    CreateSnapshot { volume: String, name: String },
    /// Delete a snapshot of a volume.
    DeleteSnapshot { volume: String, name: String },
    /// Protect a snapshot of a volume from being deleted, or end that.
    ProtectSnapshot { volume: String, name: String, protected: bool },
    /// List the secrets that were written.
    Secrets,
    /// Write a secret.
    WriteSecret { name: String, value: SecretText },
    /// Remove a secret.
    RemoveSecret { name: String, force: bool },
    /// List objects of the config.
    List { path: ObjectPath, query: ListQuery },
    /// Show an object of the config.
    Show { path: ObjectPath },
    /// Change an object of the config.
    Edit(ConfigEdit),
    /// Add a volume to a subsystem or a target.
    Attach { target: String, unit: AttachVolume },
    /// Remove a namespace or logical unit.
    Detach { target: String, number: u32, force: bool },
    /// Attach a volume as a disk of the daemon's machine.
    AttachDisk(Attachment),
    /// Flush and detach the disk of a volume.
    DetachDisk { volume: String, force: bool },
    /// Load the config file again.
    Reload,
    /// Show what a reload would change.
    Diff,
    /// Show the config, as JSON or as TOML.
    Export { as_json: bool },
    /// Apply a part of a config.
    Apply { fragment: Fragment, options: ApplyOptions },
    /// Write the config into the config file.
    Save,
    /// Show log levels, or change them.
    Log { levels: Option<String> },
    /// A protocol-specific change of a target.
    Change(Change),
}

/// The request in a few words, for actions and the audit log.
impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Request::Status => f.write_str("status"),
            Request::Sessions => f.write_str("sessions"),
            Request::Resize { name, size: Some(size), shrink } => {
                let shrink = if *shrink { ", also if that discards data" } else { "" };
                write!(f, "resize {name} to {size} bytes{shrink}")
            }
            Request::Resize { name, size: None, .. } => write!(f, "resize {name}"),
            Request::Activate { volume, take: false } => write!(f, "activate {volume}"),
            Request::Activate { volume, take: true } => write!(f, "activate {volume}, take it"),
            Request::Deactivate { volume } => write!(f, "deactivate {volume}"),
            Request::Limit { name, .. } => write!(f, "limit {name}"),
            Request::Add(added) => write!(f, "add {}", added.volume),
            Request::Remove { name, .. } => write!(f, "remove {name}"),
            Request::Attach { target, unit } => write!(f, "attach {} to {target}", unit.volume),
            Request::Detach { target, number, .. } => write!(f, "detach {number} from {target}"),
            Request::AttachDisk(disk) => write!(f, "attach disk {}", disk.volume),
            Request::DetachDisk { volume, .. } => write!(f, "detach disk {volume}"),
            Request::Reload => f.write_str("reload"),
            Request::Diff => f.write_str("diff"),
            Request::Export { .. } => f.write_str("export"),
            Request::Apply { fragment, options } => {
                let prune = if options.prune { ", and remove what its lists lack" } else { "" };
                write!(f, "apply {}{prune}", fragment.title().display())
            }
            Request::Save => f.write_str("save"),
            Request::Log { levels } => write!(f, "log {}", levels.as_deref().unwrap_or_default()),
            Request::Change(change) => write!(f, "change {}", change.target),
            Request::Disconnect { session } => write!(f, "disconnect {session}"),
            Request::Cluster => f.write_str("cluster status"),
            Request::ClusterChange(change) => change.fmt(f),
            Request::Snapshots { volume } => write!(f, "list snapshots of {volume}"),
            Request::CreateSnapshot { volume, name } => write!(f, "create snapshot {volume}@{name}"),
            Request::DeleteSnapshot { volume, name } => write!(f, "delete snapshot {volume}@{name}"),
            Request::ProtectSnapshot { volume, name, protected } => {
                write!(f, "{} snapshot {volume}@{name}", if *protected { "protect" } else { "unprotect" })
            }
            Request::Secrets => f.write_str("list secret"),
            Request::WriteSecret { name, .. } => write!(f, "write secret {name}"),
            Request::RemoveSecret { name, .. } => write!(f, "remove secret {name}"),
            Request::List { path, .. } => write!(f, "list {path}"),
            Request::Show { path } => write!(f, "show {path}"),
            Request::Edit(edit) => edit.fmt(f),
        }
    }
}

/// The daemon's answer to a [`Request`].
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    Status(Status),
    Sessions(Vec<SessionStatus>),
    Resized(Resized),
    Added(Added),
    /// Log levels by area.
    Levels(BTreeMap<String, String>),
    Attached(Attached),
    DiskAttached(AttachedDevice),
    /// Changes of a config that were made or would be made.
    Plan(PlanReport),
    /// The desired config.
    Config {
        content: FragmentContent,
        /// Its ETag.
        tag: String,
    },
    /// The group of gateways.
    Cluster(ClusterStatus),
    /// The snapshots of a volume.
    Snapshots(Vec<SnapshotStatus>),
    /// A snapshot that was created.
    Snapshot(SnapshotStatus),
    /// Secrets, without their values.
    Secrets(Vec<SecretInfo>),
    /// Objects of the config.
    Objects(ObjectList),
    /// An object of the config.
    Object {
        object: Value,
        /// Its ETag.
        tag: String,
    },
    /// An answer with a note for the user.
    Noted {
        answer: Box<Answer>,
        note: String,
    },
    /// Success with a message for the user.
    Message(String),
    /// Success.
    Done,
    /// Failure.
    Failed(ApiError),
}

impl Request {
    /// Whether it only asks what would change.
    pub(crate) fn is_dry_run(&self) -> bool {
        match self {
            Request::Edit(edit) => edit.options.dry_run,
            Request::Apply { options, .. } => options.dry_run,
            _ => false,
        }
    }
}

impl Answer {
    /// This answer with a note, if there is one.
    pub(crate) fn noted(self, note: Option<String>) -> Answer {
        match note {
            Some(note) => Answer::Noted { answer: Box::new(self), note },
            None => self,
        }
    }

    /// The body of the HTTP response, which `--json` prints.
    pub(crate) fn json(&self) -> Value {
        match self {
            Answer::Status(status) => json!(status),
            Answer::Sessions(sessions) => json!(sessions),
            Answer::Resized(resized) => json!(resized),
            Answer::Added(added) => json!(added),
            Answer::Levels(levels) => json!(levels),
            Answer::Attached(unit) => json!(unit),
            Answer::DiskAttached(disk) => json!(disk),
            Answer::Plan(report) => json!(report),
            Answer::Config { content: FragmentContent::Toml(text), .. } => json!(text),
            Answer::Config { content: FragmentContent::Json(config), .. } => json!(config),
            Answer::Cluster(status) => json!(status),
            Answer::Snapshots(list) => json!(list),
            Answer::Snapshot(snapshot) => json!(snapshot),
            Answer::Secrets(list) => json!(list),
            Answer::Objects(list) => json!(list),
            Answer::Object { object, .. } => object.clone(),
            Answer::Noted { answer, note } => {
                let mut body = answer.json();
                body.as_object_mut().into_iter().for_each(|body| {
                    body.insert("note".to_owned(), json!(note));
                });
                body
            }
            Answer::Message(text) => json!({ "message": text }),
            Answer::Done => json!({}),
            Answer::Failed(error) => json!(ErrorBody { error: error.clone() }),
        }
    }
}
