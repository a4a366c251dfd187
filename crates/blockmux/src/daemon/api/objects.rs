//! The objects of the running config as resources: listed, shown, put, changed and deleted.
//!
//! A path is a key of the config file and a name, and within a target once more a key and a name.
//! OpenAPI has no parameter for several segments, so each depth has a path of its own; the deeper
//! ones are documented as the others, with more parameters ([`describe_parts`]).

use super::ApiState;
use super::reply::{Body, json, refusal};
use super::requests::{Asked, flag, query_pairs, tags};
use crate::api::edit::{ConfigEdit, EditOperation, EditOptions, ListQuery, ObjectList, ObjectPath};
use crate::api::plan::PlanReport;
use crate::api::request::{Answer, Request};
use crate::api::{ApiError, ErrorBody, ErrorCode};
use axum::Router;
use axum::extract::{FromRequestParts, RawPathParams, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use axum::routing::get;
use serde_json::{Map, Value};
use utoipa::openapi::OpenApi as Document;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// The paths of lists and of the objects in them.
pub(super) fn described() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(list_kinds)).routes(routes!(list_objects)).routes(routes!(
        show_object,
        put_object,
        set_object,
        remove_object
    ))
}

/// The paths of lists within objects, and of the objects there.
pub(super) fn of_parts() -> Router<ApiState> {
    Router::new()
        .route(PARTS, get(list_objects))
        .route(PART, get(show_object).put(put_object).patch(set_object).delete(remove_object))
}

/// Documents [`of_parts`].
pub(super) fn describe_parts(document: &mut Document) {
    for (from, to) in [(LIST, PARTS), (OBJECT, PART)] {
        let Some(mut item) = document.paths.paths.get(from).cloned() else { continue };
        let own = [&mut item.get, &mut item.put, &mut item.patch, &mut item.delete];
        for operation in own.into_iter().flatten() {
            operation.operation_id = operation.operation_id.take().map(|id| id + "_part");
        }
        document.paths.paths.insert(to.to_owned(), item);
    }
}

const LIST: &str = "/v1/objects/{kind}";
const OBJECT: &str = "/v1/objects/{kind}/{name}";
const PARTS: &str = "/v1/objects/{kind}/{name}/{part}";
const PART: &str = "/v1/objects/{kind}/{name}/{part}/{entry}";

/// The path and the options of a request for objects.
struct At {
    path: ObjectPath,
    query: ListQuery,
    options: EditOptions,
}

impl FromRequestParts<ApiState> for At {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &ApiState) -> Result<At, ApiError> {
        let path = RawPathParams::from_request_parts(parts, state).await.map_err(ApiError::not_found)?;
        let path = ObjectPath(path.iter().map(|(_, name)| name.to_owned()).collect());
        let [if_match, if_none_match] =
            [header::IF_MATCH, header::IF_NONE_MATCH].map(|name| tags(&parts.headers, &name));
        let mut options = EditOptions { if_match, if_none_match, ..EditOptions::default() };
        let mut query = ListQuery::default();
        for (key, value) in query_pairs(&parts.uri) {
            match key {
                "filter" => query.filter = value,
                "after" => query.after = Some(value),
                "limit" => {
                    let wrong = |_| ApiError::new(ErrorCode::Malformed, "limit: write a number");
                    query.limit = Some(value.parse().map_err(wrong)?);
                }
                "force" => options.force = flag(key, &value)?,
                "dry_run" => options.dry_run = flag(key, &value)?,
                _ => {
                    let text = "the query is unknown; write filter, after, limit, force or dry_run";
                    return Err(ApiError::new(ErrorCode::Malformed, text));
                }
            }
        }
        Ok(At { path, query, options })
    }
}

/// Lists of the config, each with the number of its objects
#[utoipa::path(get, path = "/v1/objects", responses((status = 200, body = ObjectList)))]
async fn list_kinds(State(shared): State<ApiState>, at: At) -> Response {
    list_objects(State(shared), at).await
}

/// Objects of the running config, ordered by name
#[utoipa::path(
    get,
    path = "/v1/objects/{kind}",
    params(
        ("filter" = Option<String>, Query, description = "Only those whose names contain this"),
        ("after" = Option<String>, Query, description = "Only those behind this name"),
        ("limit" = Option<usize>, Query, description = "At most so many; a list has at most 1000")
    ),
    responses((status = 200, body = ObjectList))
)]
async fn list_objects(State(shared): State<ApiState>, At { path, query, .. }: At) -> Response {
    match shared.query(Request::List { path, query }).await {
        Ok(answer) => json(StatusCode::OK, &answer.json()),
        Err(error) => refusal(error),
    }
}

/// One object of the running config, with an ETag
///
/// `daemon/settings` has the keys that are no list.
#[utoipa::path(
    get,
    path = "/v1/objects/{kind}/{name}",
    responses(
        (status = 200, body = Object, headers(("ETag" = String, description = "Changes with the object")))
    )
)]
async fn show_object(State(shared): State<ApiState>, At { path, .. }: At) -> Response {
    match shared.query(Request::Show { path }).await {
        Ok(Answer::Object { object, tag }) => {
            let mut response = json(StatusCode::OK, &object);
            if let Ok(tag) = HeaderValue::from_str(&tag) {
                response.headers_mut().insert(header::ETAG, tag);
            }
            response
        }
        Ok(answer) => json(StatusCode::OK, &answer.json()),
        Err(error) => refusal(error),
    }
}

/// Create or replace an object of the running config
///
/// Its keys are those of the config file. After an error nothing has changed. With `If-None-Match:
/// *` it must be new.
#[utoipa::path(
    put,
    path = "/v1/objects/{kind}/{name}",
    params(
        ("dry_run" = Option<bool>, Query, description = "Only compute the changes"),
        ("If-Match" = Option<String>, Header, description = "The ETag that the object must have"),
        ("If-None-Match" = Option<String>, Header, description = "`*`: the object must be new")
    ),
    request_body = Object,
    responses(
        (status = 200, body = PlanReport),
        (status = 201, body = PlanReport, description = "The object is new, as `If-None-Match` demanded"),
        (status = 409, body = ErrorBody, description = "The state of the daemon does not allow it"),
        (status = 412, body = ErrorBody)
    )
)]
async fn put_object(asked: Asked, at: At, Body(object): Body<Map<String, Value>>) -> Response {
    asked.edit(at, EditOperation::Put(object)).await
}

/// Change keys of an object of the running config
///
/// The body is a JSON merge patch (RFC 7396): `null` removes a key.
#[utoipa::path(
    patch,
    path = "/v1/objects/{kind}/{name}",
    params(
        ("dry_run" = Option<bool>, Query, description = "Only compute the changes"),
        ("If-Match" = Option<String>, Header, description = "The ETag that the object must have")
    ),
    request_body = Object,
    responses(
        (status = 200, body = PlanReport),
        (status = 409, body = ErrorBody, description = "The state of the daemon does not allow it"),
        (status = 412, body = ErrorBody)
    )
)]
async fn set_object(asked: Asked, at: At, Body(patch): Body<Map<String, Value>>) -> Response {
    asked.edit(at, EditOperation::Set(patch)).await
}

/// Remove an object from the running config
///
/// What sessions use is removed only with `force`. A volume leaves the targets that have it.
#[utoipa::path(
    delete,
    path = "/v1/objects/{kind}/{name}",
    params(
        ("force" = Option<bool>, Query, description = "Also if sessions use it; their I/O fails"),
        ("dry_run" = Option<bool>, Query, description = "Only compute the changes"),
        ("If-Match" = Option<String>, Header, description = "The ETag that the object must have")
    ),
    responses(
        (status = 200, body = PlanReport),
        (status = 409, body = ErrorBody, description = "Sessions use it"),
        (status = 412, body = ErrorBody)
    )
)]
async fn remove_object(asked: Asked, at: At) -> Response {
    asked.edit(at, EditOperation::Remove).await
}

impl Asked {
    async fn edit(self, at: At, operation: EditOperation) -> Response {
        let At { path, options, .. } = at;
        let done = if options.must_be_new() { StatusCode::CREATED } else { StatusCode::OK };
        self.run(Request::Edit(ConfigEdit { path, operation, options }), done).await
    }
}
