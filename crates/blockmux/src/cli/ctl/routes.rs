//! Maps each command to its HTTP request, and the response to an answer.

use super::objects;
use crate::api::bodies::{
    ActivateVolume, ChangeLog, ChangeTarget, CreateSnapshot, Message, ProtectSnapshot, ResizeVolume,
};
use crate::api::client::{Call, CallBody, segment};
use crate::api::cluster::ClusterChange;
use crate::api::fragment::{ApplyOptions, Fragment, FragmentContent, JSON, TOML};
use crate::api::request::{Answer, Request};
use serde_json::{Value, json};

/// The HTTP request of a command.
pub(super) fn call(request: &Request) -> Call {
    match request {
        Request::Status => Call::new("GET", "/v1/status"),
        Request::Sessions => Call::new("GET", "/v1/sessions"),
        Request::Resize { name, size, shrink } => {
            let body = json!(ResizeVolume { size: *size, shrink: *shrink });
            with_body("POST", format!("/v1/volumes/{}/resize", segment(name)), body)
        }
        Request::Limit { name, limits } => {
            with_body("POST", format!("/v1/volumes/{}/limits", segment(name)), json!(limits))
        }
        Request::Add(volume) => with_body("POST", "/v1/volumes".to_owned(), json!(volume)),
        Request::Remove { name, force } => {
            Call::new("DELETE", format!("/v1/volumes/{}{}", segment(name), force_query(*force)))
        }
        Request::Attach { target, unit } => {
            with_body("POST", format!("/v1/targets/{}/units", segment(target)), json!(unit))
        }
        Request::Detach { target, number, force } => {
            let query = force_query(*force);
            Call::new("DELETE", format!("/v1/targets/{}/units/{number}{query}", segment(target)))
        }
        Request::AttachDisk(disk) => with_body("POST", "/v1/attachments".to_owned(), json!(disk)),
        Request::DetachDisk { volume, force } => {
            let query = force_query(*force);
            Call::new("DELETE", format!("/v1/attachments/{}{query}", segment(volume)))
        }
        Request::Reload => Call::new("POST", "/v1/config/reload"),
        Request::Diff => Call::new("GET", "/v1/config/diff"),
        Request::Export { as_json } => {
            let accept = if *as_json { JSON } else { TOML };
            Call { accept, ..Call::new("GET", "/v1/config") }
        }
        Request::Apply { fragment, options } => apply(fragment, options),
        Request::Save => Call::new("POST", "/v1/config/save"),
        Request::Log { levels: None } => Call::new("GET", "/v1/log"),
        Request::Log { levels: Some(levels) } => {
            with_body("POST", "/v1/log".to_owned(), json!(ChangeLog { levels: levels.clone() }))
        }
        Request::Disconnect { session } => Call::new("DELETE", format!("/v1/sessions/{}", segment(session))),
        Request::Activate { volume, take } => activate(volume, *take),
        Request::Deactivate { volume } => Call::new("POST", volume_path(volume, "deactivate")),
        Request::Cluster => Call::new("GET", "/v1/cluster"),
        Request::ClusterChange(change) => change_cluster(change),
        Request::Snapshots { volume } => Call::new("GET", snapshots_path(volume)),
        Request::CreateSnapshot { volume, name } => create_snapshot(volume, name),
        Request::DeleteSnapshot { volume, name } => Call::new("DELETE", snapshot_path(volume, name)),
        Request::ProtectSnapshot { volume, name, protected } => protect_snapshot(volume, name, *protected),
        Request::Secrets => Call::new("GET", "/v1/secrets"),
        Request::WriteSecret { name, value } => {
            let body = json!({ "value": value.0.as_str() });
            with_body("PUT", format!("/v1/secrets/{}", segment(name)), body)
        }
        Request::RemoveSecret { name, force } => {
            Call::new("DELETE", format!("/v1/secrets/{}{}", segment(name), force_query(*force)))
        }
        Request::List { path, query } => Call::new("GET", objects::list_path(path, query)),
        Request::Show { path } => Call::new("GET", objects::path(path)),
        Request::Edit(edit) => objects::call(edit),
        Request::Change(change) => {
            let body = json!(ChangeTarget { protocol: change.protocol.clone(), what: change.what.clone() });
            with_body("POST", format!("/v1/targets/{}/changes", segment(&change.target)), body)
        }
    }
}

/// Parses the body of a response.
///
/// # Errors
/// If it has another format.
pub(super) fn answer(request: &Request, body: Value) -> Result<Answer, serde_json::Error> {
    let note = body.get("note").and_then(Value::as_str).map(str::to_owned);
    Ok(plain_answer(request, body)?.noted(note))
}

fn plain_answer(request: &Request, body: Value) -> Result<Answer, serde_json::Error> {
    Ok(match request {
        Request::Status => Answer::Status(serde_json::from_value(body)?),
        Request::Sessions => Answer::Sessions(serde_json::from_value(body)?),
        Request::Resize { .. } => Answer::Resized(serde_json::from_value(body)?),
        Request::Add(_) => Answer::Added(serde_json::from_value(body)?),
        Request::Attach { .. } => Answer::Attached(serde_json::from_value(body)?),
        Request::AttachDisk(_) => Answer::DiskAttached(serde_json::from_value(body)?),
        Request::Cluster => Answer::Cluster(serde_json::from_value(body)?),
        Request::Snapshots { .. } => Answer::Snapshots(serde_json::from_value(body)?),
        Request::CreateSnapshot { .. } => Answer::Snapshot(serde_json::from_value(body)?),
        Request::Remove { .. }
        | Request::Detach { .. }
        | Request::DetachDisk { .. }
        | Request::DeleteSnapshot { .. }
        | Request::ProtectSnapshot { .. } => Answer::Done,
        Request::Log { .. } => Answer::Levels(serde_json::from_value(body)?),
        Request::Secrets | Request::WriteSecret { .. } => Answer::Secrets(serde_json::from_value(body)?),
        Request::List { .. } => Answer::Objects(serde_json::from_value(body)?),
        Request::Show { .. } => Answer::Object { object: body, tag: String::new() },
        Request::Reload | Request::Diff | Request::Apply { .. } | Request::Edit(_) => {
            Answer::Plan(serde_json::from_value(body)?)
        }
        Request::Export { as_json: true } => {
            let content = FragmentContent::Json(serde_json::from_value(body)?);
            Answer::Config { content, tag: String::new() }
        }
        Request::Export { as_json: false } => {
            let content = FragmentContent::Toml(serde_json::from_value(body)?);
            Answer::Config { content, tag: String::new() }
        }
        Request::Change(_)
        | Request::Limit { .. }
        | Request::Activate { .. }
        | Request::Deactivate { .. }
        | Request::ClusterChange(_)
        | Request::Save
        | Request::Disconnect { .. }
        | Request::RemoveSecret { .. } => match serde_json::from_value(body)? {
            Message { message: Some(text) } => Answer::Message(text),
            Message { message: None } => Answer::Done,
        },
    })
}

/// The HTTP request that applies a fragment.
fn apply(Fragment { path, content }: &Fragment, options: &ApplyOptions) -> Call {
    let ApplyOptions { prune, dry_run, if_match } = options;
    let path = path.as_ref().map(|path| format!("path={}", segment(&path.display().to_string())));
    let flags = [("prune=true", *prune), ("dry_run=true", *dry_run)];
    let flags = flags.into_iter().filter(|(_, is_set)| *is_set).map(|(flag, _)| flag.to_owned());
    let query: Vec<_> = path.into_iter().chain(flags).collect();
    let body = match content {
        FragmentContent::Toml(text) => CallBody::Toml(text.clone()),
        FragmentContent::Json(object) => CallBody::Json(json!(object)),
    };
    Call {
        headers: if_match.iter().map(|tag| ("If-Match", tag.clone())).collect(),
        body: Some(body),
        ..Call::new("POST", format!("/v1/config/apply?{}", query.join("&")))
    }
}

fn activate(volume: &str, take: bool) -> Call {
    with_body("POST", volume_path(volume, "activate"), json!(ActivateVolume { take }))
}

fn change_cluster(change: &ClusterChange) -> Call {
    let (command, body) = match change {
        ClusterChange::Move(volume) => ("move", json!(volume)),
        ClusterChange::Drain(member) => ("drain", json!(member)),
        ClusterChange::Undrain(member) => ("undrain", json!(member)),
        ClusterChange::Fence(member) => ("fence", json!(member)),
        ClusterChange::Remove(volume) => ("remove", json!(volume)),
    };
    with_body("POST", format!("/v1/cluster/{command}"), body)
}

fn create_snapshot(volume: &str, name: &str) -> Call {
    with_body("POST", snapshots_path(volume), json!(CreateSnapshot { name: name.to_owned() }))
}

fn protect_snapshot(volume: &str, name: &str, protected: bool) -> Call {
    with_body("PATCH", snapshot_path(volume, name), json!(ProtectSnapshot { protected }))
}

fn snapshot_path(volume: &str, name: &str) -> String {
    format!("{}/{}", snapshots_path(volume), segment(name))
}

/// The path of a volume's snapshots.
fn snapshots_path(volume: &str) -> String {
    volume_path(volume, "snapshots")
}

/// A path below that of a volume.
fn volume_path(volume: &str, what: &str) -> String {
    format!("/v1/volumes/{}/{what}", segment(volume))
}

fn force_query(force: bool) -> &'static str {
    if force { "?force=true" } else { "" }
}

fn with_body(method: &'static str, path: String, body: Value) -> Call {
    Call { body: Some(CallBody::Json(body)), ..Call::new(method, path) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::bodies::{AttachVolume, Attached};

    #[test]
    fn names_are_escaped_in_paths_and_absent_values_are_omitted_from_bodies() {
        let target = "iqn.x:a/b".to_owned();
        let unit = AttachVolume { volume: "v".to_owned(), number: None, ana_group: Some(2) };
        let request = Request::Attach { target, unit };
        let call = call(&request);
        assert_eq!((call.method, &*call.path), ("POST", "/v1/targets/iqn%2Ex%3Aa%2Fb/units"));
        assert_eq!(call.body, Some(CallBody::Json(json!({ "volume": "v", "ana_group": 2 }))));
        assert!(matches!(
            answer(&request, json!({ "number": 3 })),
            Ok(Answer::Attached(Attached { number: 3 }))
        ));
        assert!(answer(&request, json!({ "size": 3 })).is_err());
    }
}
