//! Responses, and extractors for requests whose errors have the API's format.

use crate::api::fragment::JSON;
use crate::api::{ApiError, ErrorBody, ErrorCode, distinct_keys};
use crate::output::printable_json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::request::Parts;
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use blockmux_volume::spec::with_hidden_secrets;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Extracts the JSON body of a request.
pub(super) struct Body<T>(pub(super) T);

/// Extracts the parameters of the path.
pub(super) struct Param<T>(pub(super) T);

/// The media type of a JSON merge patch (RFC 7396 §4).
const MERGE_PATCH: &str = "application/merge-patch+json";

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Body<T>, ApiError> {
        let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
        let kind = content_type(kind.unwrap_or_default());
        let is_patch = request.method() == Method::PATCH;
        if kind != JSON && !(is_patch && kind == MERGE_PATCH) {
            let text = "the body must be JSON; send `Content-Type: application/json`";
            return Err(ApiError::new(ErrorCode::UnsupportedMediaType, text));
        }
        let malformed = |error: BytesRejection| ApiError::new(ErrorCode::Malformed, error);
        let bytes = Bytes::from_request(request, state).await.map_err(malformed)?;
        object_of(&bytes).map(Body)
    }
}

/// The type of a media type, without its parameters.
pub(super) fn content_type(kind: &str) -> String {
    kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

/// Reads an object of JSON.
///
/// # Errors
/// If it is none, has a key twice, or has other keys or values.
pub(super) fn object_of<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    distinct_keys::check(bytes)
        .map_err(|twice| ApiError::invalid(format!("the body is invalid: {twice}")))?;
    let body = serde_json::from_slice(bytes).map_err(|error| {
        let code = if error.is_data() { ErrorCode::Invalid } else { ErrorCode::Malformed };
        ApiError::new(code, format!("the body is invalid: {}", with_hidden_secrets(&error.to_string())))
    })?;
    // serde also reads a struct from an array of its fields' values.
    if !bytes.trim_ascii_start().starts_with(b"{") {
        return Err(ApiError::invalid("the body is an array; send an object"));
    }
    Ok(body)
}

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Param<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Param<T>, ApiError> {
        let Path(value) = Path::from_request_parts(parts, state)
            .await
            .map_err(|error| ApiError::not_found(format!("no such path: {}", error.body_text())))?;
        Ok(Param(value))
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        refusal(self)
    }
}

/// A response that reports an error.
pub(super) fn refusal(error: ApiError) -> Response {
    let status = StatusCode::from_u16(error.code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    json(status, &ErrorBody { error })
}

/// A JSON response that must not be cached. Names of clients in it neither control a terminal nor
/// hide or reorder what stands beside them.
pub(super) fn json(status: StatusCode, body: &impl Serialize) -> Response {
    let mut text = match serde_json::to_string(body) {
        Ok(text) => printable_json(&text).into_owned(),
        Err(error) => return refusal(ApiError::failed(error)),
    };
    text.push('\n');
    with_headers(status, JSON, text)
}

/// A response of text that must not be cached.
pub(super) fn with_headers(status: StatusCode, kind: &'static str, text: String) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static(kind)),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    ];
    (status, headers, text.into_bytes()).into_response()
}
