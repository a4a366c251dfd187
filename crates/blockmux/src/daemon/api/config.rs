//! The config as a resource: read, applied in parts, loaded again and saved.

use super::ApiState;
use super::reply::{content_type, json, object_of, with_headers};
use super::requests::{Asked, flag, query_pairs, tags};
use crate::api::bodies::Message;
use crate::api::fragment::{ApplyOptions, Fragment, FragmentContent, JSON, TOML};
use crate::api::plan::PlanReport;
use crate::api::request::{Answer, Request};
use crate::api::{ApiError, ErrorBody, ErrorCode};
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, Request as HttpRequest, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;
use std::path::PathBuf;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// The paths of this module.
pub(super) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::default()
        .routes(routes!(export))
        .routes(routes!(diff))
        .routes(routes!(reload))
        .routes(routes!(apply))
        .routes(routes!(save))
}

/// The config, with changes that wait for the next start
///
/// Its keys are those of a config file. With `Accept: application/toml` it is the text of one.
#[utoipa::path(
    get,
    path = "/v1/config",
    responses((
        status = 200,
        content((Object = "application/json"), (String = "application/toml")),
        headers(("ETag" = String, description = "Changes with the config"))
    ))
)]
async fn export(State(shared): State<ApiState>, headers: HeaderMap) -> Result<Response, ApiError> {
    let as_json = !prefers_toml(&headers);
    let Answer::Config { content, tag } = shared.query(Request::Export { as_json }).await? else {
        return Err(ApiError::failed("internal error: the config is not available"));
    };
    let mut response = match content {
        FragmentContent::Json(config) => json(StatusCode::OK, &config),
        FragmentContent::Toml(text) => with_headers(StatusCode::OK, TOML, text),
    };
    response.headers_mut().insert(header::VARY, HeaderValue::from_static("accept"));
    if let Ok(tag) = HeaderValue::from_str(&tag) {
        response.headers_mut().insert(header::ETAG, tag);
    }
    Ok(response)
}

/// Whether a client accepts TOML and does not name JSON before it.
fn prefers_toml(headers: &HeaderMap) -> bool {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let mut kinds = accepted.flat_map(|value| value.split(',')).map(content_type);
    kinds.find(|kind| kind == TOML || kind == JSON).is_some_and(|kind| kind == TOML)
}

/// The changes that a reload of the config file would make, and the sessions they would affect
#[utoipa::path(
    get,
    path = "/v1/config/diff",
    responses(
        (status = 200, body = PlanReport),
        (status = 409, body = ErrorBody, description = "There is no config file"),
        (status = 422, body = ErrorBody, description = "The config file is invalid")
    )
)]
async fn diff(State(shared): State<ApiState>) -> Result<Response, ApiError> {
    Ok(json(StatusCode::OK, &shared.query(Request::Diff).await?.json()))
}

/// Load the daemon's config file again and apply its changes
///
/// After an error nothing has changed.
#[utoipa::path(
    post,
    path = "/v1/config/reload",
    responses(
        (status = 200, body = PlanReport),
        (status = 409, body = ErrorBody, description = "There is no config file"),
        (status = 422, body = ErrorBody, description = "The config file is invalid")
    )
)]
async fn reload(asked: Asked) -> Response {
    asked.run(Request::Reload, StatusCode::OK).await
}

/// Apply a part of a config: add and change the entries that it names, keep everything else
///
/// It is an object with the keys of a config file, or TOML. Volumes in it need names. After an
/// error nothing has changed.
#[utoipa::path(
    post,
    path = "/v1/config/apply",
    params(
        ("prune" = Option<bool>, Query, description = "Remove the entries that its lists lack"),
        ("dry_run" = Option<bool>, Query, description = "Only compute the changes"),
        ("path" = Option<String>, Query, description = "Its file, for messages; relative paths in it are relative to the directory of that file, or else to the daemon's"),
        ("If-Match" = Option<String>, Header, description = "The ETag that the config must have")
    ),
    request_body(content((Object = "application/json"), (String = "application/toml"))),
    responses(
        (status = 200, body = PlanReport),
        (status = 409, body = ErrorBody, description = "Other changes come in between, again and again"),
        (status = 412, body = ErrorBody, description = "The config has another ETag"),
        (status = 415, body = ErrorBody, description = "The body is neither `application/json` nor `application/toml`")
    )
)]
async fn apply(asked: Asked, FragmentOfRequest { fragment, options }: FragmentOfRequest) -> Response {
    asked.run(Request::Apply { fragment, options }, StatusCode::OK).await
}

/// Extracts a fragment from a request's body, and how it is applied.
struct FragmentOfRequest {
    fragment: Fragment,
    options: ApplyOptions,
}

impl FromRequest<ApiState> for FragmentOfRequest {
    type Rejection = ApiError;

    async fn from_request(request: HttpRequest, state: &ApiState) -> Result<FragmentOfRequest, ApiError> {
        let if_match = tags(request.headers(), &header::IF_MATCH);
        let mut options = ApplyOptions { if_match, ..ApplyOptions::default() };
        let mut path = None;
        for (key, value) in query_pairs(request.uri()) {
            match key {
                "prune" => options.prune = flag(key, &value)?,
                "dry_run" => options.dry_run = flag(key, &value)?,
                "path" => path = Some(PathBuf::from(value)),
                _ => {
                    let text = "the query is unknown; write prune, dry_run or path";
                    return Err(ApiError::new(ErrorCode::Malformed, text));
                }
            }
        }
        let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
        let kind = content_type(kind.unwrap_or_default());
        let malformed = |error: BytesRejection| ApiError::new(ErrorCode::Malformed, error);
        let content = match &*kind {
            JSON => {
                let bytes = Bytes::from_request(request, state).await.map_err(malformed)?;
                FragmentContent::Json(object_of(&bytes)?)
            }
            TOML => {
                let bytes = Bytes::from_request(request, state).await.map_err(malformed)?;
                let text = String::from_utf8(bytes.into());
                let not_text = |_| ApiError::new(ErrorCode::Malformed, "the body is not UTF-8");
                FragmentContent::Toml(text.map_err(not_text)?)
            }
            _ => {
                let text = "the body must be JSON or TOML; send `Content-Type: application/json` or \
                            `application/toml`";
                return Err(ApiError::new(ErrorCode::UnsupportedMediaType, text));
            }
        };
        Ok(FragmentOfRequest { fragment: Fragment { path, content }, options })
    }
}

/// Write the running config into the daemon's config file; keep comments
#[utoipa::path(
    post,
    path = "/v1/config/save",
    responses(
        (status = 200, body = Message),
        (status = 409, body = ErrorBody, description = "There is no config file, or it was edited or cannot be written")
    )
)]
async fn save(asked: Asked) -> Response {
    asked.run(Request::Save, StatusCode::OK).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_config_is_json_unless_the_client_prefers_toml() {
        let prefers = |accept: &'static str| {
            prefers_toml(&[(header::ACCEPT, HeaderValue::from_static(accept))].into_iter().collect())
        };
        assert!(!prefers_toml(&HeaderMap::new()) && !prefers("*/*") && !prefers("application/json"));
        assert!(!prefers("application/json, application/toml"));
        assert!(prefers("application/toml") && prefers("Application/TOML; charset=utf-8, */*"));
    }
}
