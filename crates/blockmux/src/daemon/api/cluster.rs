//! The routes about the group of gateways that the daemon belongs to.

use super::ApiState;
use super::reply::{Body, json};
use super::requests::Asked;
use crate::api::bodies::Message;
use crate::api::cluster::{
    ClusterChange, ClusterStatus, FencedMember, MoveVolume, NamedMember, RemovedVolume,
};
use crate::api::request::Request;
use crate::api::{ApiError, ErrorBody};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new()
        .routes(routes!(cluster))
        .routes(routes!(move_volume))
        .routes(routes!(drain))
        .routes(routes!(undrain))
        .routes(routes!(fence))
        .routes(routes!(remove_volume))
}

/// The group of gateways: its members, and who serves which volume
#[utoipa::path(
    get,
    path = "/v1/cluster",
    responses(
        (status = 200, body = ClusterStatus),
        (status = 409, body = ErrorBody, description = "The daemon belongs to no group")
    )
)]
async fn cluster(State(shared): State<ApiState>) -> Result<Response, ApiError> {
    Ok(json(StatusCode::OK, &shared.query(Request::Cluster).await?.json()))
}

/// Have a gateway serve a volume
///
/// It moves when its present gateway has completed its I/O, and stays while the chosen one is up.
/// Without a member, any gateway may serve it.
#[utoipa::path(
    post,
    path = "/v1/cluster/move",
    request_body = MoveVolume,
    responses(
        (status = 200, body = Message),
        (status = 404, body = ErrorBody, description = "The group has no such volume or gateway"),
        (status = 409, body = ErrorBody, description = "The daemon belongs to no group, or the gateway is not up")
    )
)]
async fn move_volume(asked: Asked, Body(volume): Body<MoveVolume>) -> Response {
    change(asked, ClusterChange::Move(volume)).await
}

/// Move the volumes of a gateway to others
///
/// It has none until it is undrained, also if it starts again.
#[utoipa::path(
    post,
    path = "/v1/cluster/drain",
    request_body = NamedMember,
    responses(
        (status = 200, body = Message),
        (status = 404, body = ErrorBody, description = "The group has none of this name"),
        (status = 409, body = ErrorBody, description = "The daemon belongs to no group")
    )
)]
async fn drain(asked: Asked, Body(member): Body<NamedMember>) -> Response {
    change(asked, ClusterChange::Drain(member)).await
}

/// Let a gateway serve volumes again
#[utoipa::path(
    post,
    path = "/v1/cluster/undrain",
    request_body = NamedMember,
    responses(
        (status = 200, body = Message),
        (status = 404, body = ErrorBody, description = "The group has none of this name"),
        (status = 409, body = ErrorBody, description = "The daemon belongs to no group")
    )
)]
async fn undrain(asked: Asked, Body(member): Body<NamedMember>) -> Response {
    change(asked, ClusterChange::Undrain(member)).await
}

/// Shut a gateway out of the cluster, so that others take its volumes over at once
///
/// What it has in flight fails. One that runs joins again.
#[utoipa::path(
    post,
    path = "/v1/cluster/fence",
    request_body = FencedMember,
    responses(
        (status = 200, body = Message),
        (status = 404, body = ErrorBody, description = "The group has none of this name"),
        (status = 409, body = ErrorBody, description = "The daemon belongs to no group")
    )
)]
async fn fence(asked: Asked, Body(member): Body<FencedMember>) -> Response {
    change(asked, ClusterChange::Fence(member)).await
}

/// Remove a volume from the group
///
/// No gateway serves it any longer. One whose config has it adds it again when it starts.
#[utoipa::path(
    post,
    path = "/v1/cluster/remove",
    request_body = RemovedVolume,
    responses(
        (status = 200, body = Message),
        (status = 404, body = ErrorBody, description = "The group has none of this name"),
        (status = 409, body = ErrorBody, description = "The daemon belongs to no group")
    )
)]
async fn remove_volume(asked: Asked, Body(volume): Body<RemovedVolume>) -> Response {
    change(asked, ClusterChange::Remove(volume)).await
}

async fn change(asked: Asked, change: ClusterChange) -> Response {
    asked.run(Request::ClusterChange(change), StatusCode::OK).await
}
