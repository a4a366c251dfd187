//! The routes of the API. Each is one command of `blockmux ctl` or part of its output.

use super::permission::check_role;
use super::reply::{Body, Param, json};
use super::requests::Asked;
use super::{ApiState, cluster, config, document, health, metrics, objects, page, snapshots, takeover};
use crate::api::action::ActionStatus;
use crate::api::bodies::{
    ActivateVolume, AddVolume, Added, AttachVolume, Attached, AttachedDevice, Attachment, ChangeLog,
    ChangeTarget, LimitVolume, Message, ResizeVolume, Resized, SecretInfo, WriteSecret,
};
use crate::api::history::History;
use crate::api::request::{Answer, Request};
use crate::api::status::{AttachmentStatus, SessionStatus, Status, VolumeStatus};
use crate::api::{ApiError, ErrorBody, ErrorCode};
use crate::daemon::takeover::PATH as TAKEOVER;
use crate::protocol::frontend::Change;
use axum::Router;
use axum::extract::{DefaultBodyLimit, FromRequestParts, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::from_fn;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use std::sync::{Arc, PoisonError};
use utoipa::openapi::OpenApi as Document;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// The router of all paths.
pub(super) fn router(shared: ApiState) -> Router {
    let (router, document) = documented();
    let document = Arc::new(document);
    router
        .route("/openapi.json", get(move || async move { json(StatusCode::OK, &*document) }))
        .route("/", get(page::show))
        .route(TAKEOVER, post(takeover::take_over))
        .route_layer(from_fn(check_role))
        .fallback(|| async { ApiError::not_found("there is no such path; /openapi.json lists all paths") })
        .method_not_allowed_fallback(|| async {
            let text = "this path does not support the method; /openapi.json lists its methods";
            ApiError::new(ErrorCode::MethodNotAllowed, text)
        })
        // `guard` has limited the length.
        .layer(DefaultBodyLimit::disable())
        .with_state(shared)
}

/// The paths of the API, and their document.
fn documented() -> (Router<ApiState>, Document) {
    let (router, mut document) = described().split_for_parts();
    objects::describe_parts(&mut document);
    (router.merge(objects::of_parts()), document::complete(document))
}

/// The paths that the OpenAPI document describes.
fn described() -> OpenApiRouter<ApiState> {
    OpenApiRouter::with_openapi(document::base())
        .routes(routes!(status))
        .routes(routes!(sessions))
        .routes(routes!(disconnect))
        .routes(routes!(secrets))
        .routes(routes!(write_secret, remove_secret))
        .routes(routes!(volumes, add))
        .routes(routes!(volume, remove))
        .routes(routes!(resize))
        .routes(routes!(activate))
        .routes(routes!(deactivate))
        .routes(routes!(limit))
        .routes(routes!(attach))
        .routes(routes!(detach))
        .routes(routes!(change))
        .routes(routes!(attachments, attach_disk))
        .routes(routes!(detach_disk))
        .routes(routes!(log, change_log))
        .routes(routes!(actions))
        .routes(routes!(action))
        .routes(routes!(history))
        .routes(routes!(metrics))
        .merge(cluster::routes())
        .merge(snapshots::routes())
        .merge(config::routes())
        .merge(objects::described())
        .merge(health::routes())
}

impl ApiState {
    async fn status(&self) -> Result<Status, ApiError> {
        match self.query(Request::Status).await? {
            Answer::Status(status) => Ok(status),
            _ => Err(ApiError::failed("internal error: the status is not available")),
        }
    }
}

/// Volumes, connections and I/O counters
#[utoipa::path(get, path = "/v1/status", responses((status = 200, body = Status)))]
async fn status(State(shared): State<ApiState>) -> Result<Response, ApiError> {
    Ok(json(StatusCode::OK, &shared.status().await?))
}

/// Logged-in sessions with their start times and I/O counters
#[utoipa::path(get, path = "/v1/sessions", responses((status = 200, body = [SessionStatus])))]
async fn sessions(State(shared): State<ApiState>) -> Result<Response, ApiError> {
    Ok(json(StatusCode::OK, &shared.query(Request::Sessions).await?.json()))
}

/// End the sessions of an address or an initiator
///
/// I/O in flight completes. Most clients connect again.
#[utoipa::path(
    delete,
    path = "/v1/sessions/{session}",
    responses((status = 200, body = Message))
)]
async fn disconnect(asked: Asked, Param(session): Param<String>) -> Response {
    asked.run(Request::Disconnect { session }, StatusCode::OK).await
}

/// Secrets that were written, without their values
#[utoipa::path(get, path = "/v1/secrets", responses((status = 200, body = [SecretInfo])))]
async fn secrets(State(shared): State<ApiState>) -> Result<Response, ApiError> {
    Ok(json(StatusCode::OK, &shared.query(Request::Secrets).await?.json()))
}

/// Write a secret into a private file of the daemon's state directory
///
/// The config names it as `secret:NAME`. What uses it reads it again.
#[utoipa::path(
    put,
    path = "/v1/secrets/{name}",
    request_body = WriteSecret,
    responses(
        (status = 200, body = [SecretInfo]),
        (status = 409, body = ErrorBody, description = "The daemon has no state directory")
    )
)]
async fn write_secret(
    asked: Asked,
    Param(name): Param<String>,
    Body(WriteSecret { value }): Body<WriteSecret>,
) -> Response {
    asked.run(Request::WriteSecret { name, value }, StatusCode::OK).await
}

/// Remove a secret that the config does not use
#[utoipa::path(
    delete,
    path = "/v1/secrets/{name}",
    params(("force" = Option<bool>, Query, description = "Also if the config uses it")),
    responses(
        (status = 200, body = Message),
        (status = 409, body = ErrorBody, description = "The config uses it")
    )
)]
async fn remove_secret(asked: Asked, Param(name): Param<String>, Force(force): Force) -> Response {
    asked.run(Request::RemoveSecret { name, force }, StatusCode::OK).await
}

/// All volumes
#[utoipa::path(get, path = "/v1/volumes", responses((status = 200, body = [VolumeStatus])))]
async fn volumes(State(shared): State<ApiState>) -> Result<Response, ApiError> {
    Ok(json(StatusCode::OK, &shared.status().await?.volumes))
}

/// One volume
#[utoipa::path(
    get,
    path = "/v1/volumes/{name}",
    responses((status = 200, body = VolumeStatus))
)]
async fn volume(State(shared): State<ApiState>, Param(name): Param<String>) -> Result<Response, ApiError> {
    let all = shared.status().await?.volumes;
    let found = all.iter().find(|volume| volume.name == name);
    let found = found.ok_or_else(|| ApiError::not_found(format!("no volume has the name `{name}`")))?;
    Ok(json(StatusCode::OK, found))
}

/// Export one more volume
#[utoipa::path(
    post,
    path = "/v1/volumes",
    request_body = AddVolume,
    responses(
        (status = 201, body = Added),
        (status = 409, body = ErrorBody, description = "The name or the data is in use, or access would be too open")
    )
)]
async fn add(asked: Asked, Body(body): Body<AddVolume>) -> Response {
    asked.run(Request::Add(body), StatusCode::CREATED).await
}

/// Stop exporting a volume
///
/// Waits for I/O in flight and flushes the volume. A volume that clients use is removed only with
/// `force`.
#[utoipa::path(
    delete,
    path = "/v1/volumes/{name}",
    params(("force" = Option<bool>, Query, description = "Also if clients use it; their I/O fails")),
    responses(
        (status = 200, body = Message),
        (status = 409, body = ErrorBody, description = "Clients use the volume"),
        (status = 500, body = ErrorBody, description = "The volume was removed but could not be flushed")
    )
)]
async fn remove(asked: Asked, Param(name): Param<String>, Force(force): Force) -> Response {
    asked.run(Request::Remove { name, force }, StatusCode::OK).await
}

/// Extracts `?force=true`: whether what is in use may be taken away.
struct Force(bool);

impl FromRequestParts<ApiState> for Force {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &ApiState) -> Result<Force, ApiError> {
        match parts.uri.query().unwrap_or_default() {
            "" | "force=false" => Ok(Force(false)),
            "force=true" => Ok(Force(true)),
            _ => {
                let text = "the query is unknown; leave it out, or write force=true";
                Err(ApiError::new(ErrorCode::Malformed, text))
            }
        }
    }
}

/// Resize a volume and notify its clients
///
/// `shrink` requires the role `administer`, because data is lost.
#[utoipa::path(
    post,
    path = "/v1/volumes/{name}/resize",
    request_body = ResizeVolume,
    responses(
        (status = 200, body = Resized),
        (status = 409, body = ErrorBody, description = "The volume cannot be resized, is read-only, or would lose data and `shrink` is not true")
    )
)]
async fn resize(
    asked: Asked,
    Param(name): Param<String>,
    Body(ResizeVolume { size, shrink }): Body<ResizeVolume>,
) -> Response {
    asked.run_guarded(shrink, Request::Resize { name, size, shrink }).await
}

/// Make a volume active
///
/// The daemon acquires the image, and takes over the reservations beside it. Sessions that have
/// begun before the volume was last active here end. `take` requires the role `administer`, because
/// the daemon that serves the volume is shut out.
#[utoipa::path(
    post,
    path = "/v1/volumes/{name}/activate",
    request_body = ActivateVolume,
    responses(
        (status = 200, body = Message),
        (status = 409, body = ErrorBody, description = "Daemons do not serve the volume in turns, or it is becoming active or standby"),
        (status = 500, body = ErrorBody, description = "Another daemon serves the volume, or the cluster does not answer; the message names the step")
    )
)]
async fn activate(
    asked: Asked,
    Param(volume): Param<String>,
    Body(ActivateVolume { take }): Body<ActivateVolume>,
) -> Response {
    asked.run_guarded(take, Request::Activate { volume, take }).await
}

/// Make a volume standby
///
/// The daemon refuses I/O, completes what is in flight, stores all reservations and releases the
/// image. Sessions end, and clients may connect again at once.
#[utoipa::path(
    post,
    path = "/v1/volumes/{name}/deactivate",
    responses(
        (status = 200, body = Message),
        (status = 409, body = ErrorBody, description = "Daemons do not serve the volume in turns, or it is becoming active or standby"),
        (status = 500, body = ErrorBody, description = "I/O has not ended, or the cluster does not answer; the message names the step")
    )
)]
async fn deactivate(asked: Asked, Param(volume): Param<String>) -> Response {
    asked.run(Request::Deactivate { volume }, StatusCode::OK).await
}

/// Limit a volume's I/O
///
/// New limits apply immediately, also to throttled requests.
#[utoipa::path(
    post,
    path = "/v1/volumes/{name}/limits",
    request_body = LimitVolume,
    responses((status = 200, body = Message))
)]
async fn limit(asked: Asked, Param(name): Param<String>, Body(limits): Body<LimitVolume>) -> Response {
    asked.run(Request::Limit { name, limits }, StatusCode::OK).await
}

/// Add a volume to a subsystem or a target
#[utoipa::path(
    post,
    path = "/v1/targets/{target}/units",
    request_body = AttachVolume,
    responses(
        (status = 201, body = Attached),
        (status = 409, body = ErrorBody, description = "The number is taken, or access would be too open")
    )
)]
async fn attach(asked: Asked, Param(target): Param<String>, Body(unit): Body<AttachVolume>) -> Response {
    asked.run(Request::Attach { target, unit }, StatusCode::CREATED).await
}

/// Remove a namespace or logical unit; keep exporting its volume elsewhere
///
/// While the target or subsystem has sessions, only with `force`.
#[utoipa::path(
    delete,
    path = "/v1/targets/{target}/units/{number}",
    params(
        ("number" = u32, Path, description = "NSID or LUN"),
        ("force" = Option<bool>, Query, description = "Also if it has sessions; their I/O to the unit fails")
    ),
    responses(
        (status = 200, body = Message),
        (status = 409, body = ErrorBody, description = "It has sessions")
    )
)]
async fn detach(
    asked: Asked,
    Param((target, number)): Param<(String, u32)>,
    Force(force): Force,
) -> Response {
    asked.run(Request::Detach { target, number, force }, StatusCode::OK).await
}

/// Change a protocol-specific setting of a target
///
/// iSCSI: `{"alua": {"state": "standby", "at": "192.0.2.1:3260"}}`. NVMe: `{"ana": {"group": 1,
/// "state": "inaccessible", "at": null}}`, `{"add_host": {"host": {...}}}`, `{"remove_host":
/// {"hostnqn": "..."}}`, `{"read_keys": {"hostnqn": "..."}}`.
#[utoipa::path(
    post,
    path = "/v1/targets/{target}/changes",
    request_body = ChangeTarget,
    responses((status = 200, body = Message))
)]
async fn change(
    asked: Asked,
    Param(target): Param<String>,
    Body(ChangeTarget { protocol, what }): Body<ChangeTarget>,
) -> Response {
    let request = Request::Change(Change { protocol, target, what });
    asked.run(request, StatusCode::OK).await
}

/// Volumes that are attached as disks of the daemon's machine
#[utoipa::path(get, path = "/v1/attachments", responses((status = 200, body = [AttachmentStatus])))]
async fn attachments(State(shared): State<ApiState>) -> Result<Response, ApiError> {
    Ok(json(StatusCode::OK, &shared.status().await?.attachments))
}

/// Attach a volume as a disk of the daemon's machine
#[utoipa::path(
    post,
    path = "/v1/attachments",
    request_body = Attachment,
    responses(
        (status = 201, body = AttachedDevice),
        (status = 404, body = ErrorBody, description = "There is no such volume"),
        (status = 409, body = ErrorBody, description = "The volume is attached already"),
        (status = 500, body = ErrorBody, description = "The machine cannot attach it")
    )
)]
async fn attach_disk(asked: Asked, Body(disk): Body<Attachment>) -> Response {
    asked.run(Request::AttachDisk(disk), StatusCode::CREATED).await
}

/// Flush and detach the disk of a volume; keep exporting the volume
///
/// A disk that is in use is detached only with `force`.
#[utoipa::path(
    delete,
    path = "/v1/attachments/{volume}",
    params(("force" = Option<bool>, Query, description = "Also if the disk is in use; its users' I/O fails")),
    responses(
        (status = 200, body = Message),
        (status = 409, body = ErrorBody, description = "The disk is in use"),
        (status = 500, body = ErrorBody, description = "The disk cannot be flushed or removed")
    )
)]
async fn detach_disk(asked: Asked, Param(volume): Param<String>, Force(force): Force) -> Response {
    asked.run(Request::DetachDisk { volume, force }, StatusCode::OK).await
}

/// Log levels by area
#[utoipa::path(get, path = "/v1/log", responses((status = 200, body = BTreeMap<String, String>)))]
async fn log(State(shared): State<ApiState>) -> Result<Response, ApiError> {
    Ok(json(StatusCode::OK, &shared.query(Request::Log { levels: None }).await?.json()))
}

/// Change log levels until the daemon stops
#[utoipa::path(
    post,
    path = "/v1/log",
    request_body = ChangeLog,
    responses((status = 200, body = BTreeMap<String, String>))
)]
async fn change_log(asked: Asked, Body(ChangeLog { levels }): Body<ChangeLog>) -> Response {
    asked.run(Request::Log { levels: Some(levels) }, StatusCode::OK).await
}

/// Running and recent actions: requests that change something
#[utoipa::path(get, path = "/v1/actions", responses((status = 200, body = [ActionStatus])))]
async fn actions(State(shared): State<ApiState>) -> Response {
    json(StatusCode::OK, &shared.actions.list())
}

/// One action
#[utoipa::path(
    get,
    path = "/v1/actions/{id}",
    params(("id" = u64, Path, description = "Number of the action")),
    responses((status = 200, body = ActionStatus))
)]
async fn action(State(shared): State<ApiState>, Param(id): Param<u64>) -> Result<Response, ApiError> {
    let found = shared.actions.get(id);
    let found = found
        .ok_or_else(|| ApiError::not_found(format!("action {id} does not exist or has been discarded")))?;
    Ok(json(StatusCode::OK, &found))
}

/// I/O rates and latencies of the last second and the last hour
#[utoipa::path(get, path = "/v1/history", responses((status = 200, body = History)))]
async fn history(State(shared): State<ApiState>) -> Response {
    let history = shared.samples.lock().unwrap_or_else(PoisonError::into_inner).history();
    json(StatusCode::OK, &history)
}

/// Metrics in the OpenMetrics text format
#[utoipa::path(
    get,
    path = "/metrics",
    responses((status = 200, body = String, content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8"))
)]
async fn metrics(State(shared): State<ApiState>) -> Result<Response, ApiError> {
    let control = shared.control.clone();
    let text = tokio::task::spawn_blocking(move || metrics::render(&control)).await;
    let text = text
        .map_err(|error| ApiError::failed(format!("no metrics: {error}; the daemon's log has the reason")))?;
    let kind = HeaderValue::from_static(metrics::CONTENT_TYPE);
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}

#[cfg(test)]
mod tests {
    use super::super::permission::OPERATE;
    use super::*;
    use std::collections::BTreeSet;

    /// The complete document.
    fn document_json() -> serde_json::Value {
        let (_, document) = documented();
        serde_json::to_value(document).unwrap()
    }

    /// All operations of a document, each with its method and path.
    fn operations(document: &serde_json::Value) -> Vec<(String, &serde_json::Value)> {
        let mut all = Vec::new();
        for (path, methods) in document["paths"].as_object().unwrap() {
            let methods = methods.as_object().unwrap().iter();
            all.extend(methods.map(|(method, operation)| (format!("{method} {path}"), operation)));
        }
        all
    }

    #[test]
    fn every_path_documents_its_errors() {
        let document = document_json();
        assert_eq!(document["paths"].as_object().unwrap().len(), 42);
        for (name, operation) in operations(&document).iter().filter(|(name, _)| name.contains('{')) {
            assert!(operation["responses"]["404"].is_object(), "{name}");
        }
        assert_eq!(document["info"]["title"], "blockmux");
    }

    /// What openapi-spec-validator and generators of clients require.
    #[test]
    fn every_operation_has_an_id_a_tag_a_role_credentials_and_described_responses() {
        let document = document_json();
        let schemes = document["components"]["securitySchemes"].as_object().unwrap();
        let (mut ids, mut public, mut operable) = (BTreeSet::new(), Vec::new(), 0);
        for (name, operation) in operations(&document) {
            assert!(ids.insert(operation["operationId"].as_str().unwrap()), "{name}");
            assert_eq!(operation["tags"].as_array().unwrap().len(), 1, "{name}");
            assert!(operation["summary"].is_string(), "{name}");
            let responses = operation["responses"].as_object().unwrap();
            for (status, response) in responses {
                assert!(
                    response["description"].as_str().is_some_and(|text| !text.is_empty()),
                    "{name} {status}"
                );
            }
            let role = operation["x-role"].as_str().unwrap();
            match operation["security"].as_array().unwrap().as_slice() {
                [] => {
                    assert_eq!(role, "none", "{name}");
                    public.push(name.clone());
                }
                alternatives => {
                    assert!(responses.contains_key("401") && responses.contains_key("403"), "{name}");
                    assert_eq!(role == "read", name.starts_with("get "), "{name}");
                    for (scheme, roles) in alternatives.iter().flat_map(|one| one.as_object().unwrap()) {
                        assert!(
                            schemes.contains_key(scheme) && *roles == serde_json::json!([role]),
                            "{name}"
                        );
                    }
                }
            }
            let is_operation = OPERATE
                .iter()
                .any(|(method, path)| format!("{} {path}", method.as_str().to_lowercase()) == *name);
            assert_eq!(role == "operate", is_operation, "{name}");
            operable += usize::from(is_operation);
        }
        assert_eq!(operable, OPERATE.len(), "a route in the list does not exist");
        assert_eq!(public, ["get /healthz", "get /readyz", "get /v1/version"]);
    }

    /// utoipa does not read them from the handlers: its feature for that compiles regular
    /// expressions.
    #[test]
    fn every_operation_documents_the_parameters_of_its_path() {
        let document = document_json();
        let mut documented = 0;
        for (operation_name, operation) in operations(&document) {
            let names =
                operation_name.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
            for name in names {
                let parameters = operation["parameters"].as_array().unwrap();
                let is_it = |one: &&serde_json::Value| one["name"] == name && one["in"] == "path";
                assert_eq!(parameters.iter().filter(is_it).count(), 1, "{operation_name}: {name}");
                documented += 1;
            }
        }
        assert!(documented > 0);
    }
}
