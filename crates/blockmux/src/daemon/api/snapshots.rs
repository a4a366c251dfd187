//! The routes about snapshots of volumes.

use super::ApiState;
use super::reply::{Body, Param, json};
use super::requests::Asked;
use crate::api::bodies::{CreateSnapshot, Message, ProtectSnapshot};
use crate::api::request::Request;
use crate::api::status::SnapshotStatus;
use crate::api::{ApiError, ErrorBody};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new()
        .routes(routes!(snapshots, create_snapshot))
        .routes(routes!(delete_snapshot, protect_snapshot))
}

/// Snapshots of a volume, oldest first
#[utoipa::path(
    get,
    path = "/v1/volumes/{name}/snapshots",
    responses(
        (status = 200, body = [SnapshotStatus]),
        (status = 409, body = ErrorBody, description = "The volume's kind has no snapshots"),
        (status = 500, body = ErrorBody, description = "The storage does not tell them")
    )
)]
async fn snapshots(
    State(shared): State<ApiState>,
    Param(volume): Param<String>,
) -> Result<Response, ApiError> {
    Ok(json(StatusCode::OK, &shared.query(Request::Snapshots { volume }).await?.json()))
}

/// Create a snapshot of a volume
///
/// It has all writes that were stable before.
#[utoipa::path(
    post,
    path = "/v1/volumes/{name}/snapshots",
    request_body = CreateSnapshot,
    responses(
        (status = 201, body = SnapshotStatus),
        (status = 409, body = ErrorBody, description = "The name is taken, the volume is read-only, or its kind has no snapshots")
    )
)]
async fn create_snapshot(
    asked: Asked,
    Param(volume): Param<String>,
    Body(CreateSnapshot { name }): Body<CreateSnapshot>,
) -> Response {
    asked.run(Request::CreateSnapshot { volume, name }, StatusCode::CREATED).await
}

/// Delete a snapshot of a volume
///
/// Its data is lost. One that a volume of the daemon serves, or that is protected, is not deleted.
#[utoipa::path(
    delete,
    path = "/v1/volumes/{name}/snapshots/{snapshot}",
    responses(
        (status = 200, body = Message),
        (status = 409, body = ErrorBody, description = "A volume serves it, or it is protected")
    )
)]
async fn delete_snapshot(asked: Asked, Param((volume, name)): Param<(String, String)>) -> Response {
    asked.run(Request::DeleteSnapshot { volume, name }, StatusCode::OK).await
}

/// Protect a snapshot from being deleted, or end that
#[utoipa::path(
    patch,
    path = "/v1/volumes/{name}/snapshots/{snapshot}",
    request_body = ProtectSnapshot,
    responses(
        (status = 200, body = Message),
        (status = 409, body = ErrorBody, description = "It has clones, or the storage cannot protect snapshots")
    )
)]
async fn protect_snapshot(
    asked: Asked,
    Param((volume, name)): Param<(String, String)>,
    Body(ProtectSnapshot { protected }): Body<ProtectSnapshot>,
) -> Response {
    asked.run(Request::ProtectSnapshot { volume, name, protected }, StatusCode::OK).await
}
