//! Executes requests of the API: queries at once, changes as actions, on threads that may wait.

use super::ApiState;
use super::permission::ApiClient;
use super::reply::{json, refusal};
use crate::api::request::{Answer, Request};
use crate::api::{ApiError, ErrorCode};
use crate::daemon::role::Role;
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, header};
use axum::response::Response;
use percent_encoding::percent_decode_str;
use std::time::Duration;
use tokio::time;

impl ApiState {
    /// Executes a request that changes nothing.
    pub(super) async fn query(&self, request: Request) -> Result<Answer, ApiError> {
        let control = self.control.clone();
        let answer = tokio::task::spawn_blocking(move || control.answer(&request)).await;
        match answer {
            Ok(Answer::Failed(error)) => Err(error),
            Ok(answer) => Ok(answer),
            Err(error) => {
                Err(ApiError::failed(format!("the request failed: {error}; the daemon's log has the reason")))
            }
        }
    }

    /// The response for an action that is still running.
    fn accepted(&self, id: u64) -> Response {
        let mut response = json(StatusCode::ACCEPTED, &self.actions.get(id));
        if let Ok(location) = HeaderValue::from_str(&format!("/v1/actions/{id}")) {
            response.headers_mut().insert(header::LOCATION, location);
        }
        response
    }
}

/// The place for a change that a request asks for: who sent it, and how long the client waits for
/// its result.
pub(super) struct Asked {
    shared: ApiState,
    client: ApiClient,
    wait: Option<Duration>,
}

impl Asked {
    /// Executes a request that changes something as an action; `done` is the HTTP status of
    /// success.
    pub(super) async fn run(self, request: Request, done: StatusCode) -> Response {
        let Asked { shared, client, wait } = self;
        let running = match shared.actions.begin(request.to_string()).await {
            Ok(running) => running,
            Err(error) => return refusal(error),
        };
        let (id, control) = (running.id, shared.control.clone());
        let mut work = tokio::task::spawn_blocking(move || {
            let answer = control.change(&request, &client.caller, &|progress| running.set_progress(progress));
            running.end(&answer);
            answer
        });
        let answer = match wait {
            Some(wait_limit) => match time::timeout(wait_limit, &mut work).await {
                Ok(answer) => answer,
                Err(_) => return shared.accepted(id),
            },
            None => work.await,
        };
        match answer {
            Ok(Answer::Failed(error)) => refusal(error),
            Ok(answer) => json(done, &answer.json()),
            Err(error) => refusal(ApiError::failed(format!(
                "the request failed: {error}; the daemon's log has the reason"
            ))),
        }
    }

    /// Executes a request of a route for operators, and requires an administrator if it can lose
    /// data or shut somebody out: a route has one role.
    pub(super) async fn run_guarded(self, is_dangerous: bool, request: Request) -> Response {
        let required = if is_dangerous { Role::Administer } else { Role::Operate };
        match self.client.require(required, &request.to_string()) {
            Ok(()) => self.run(request, StatusCode::OK).await,
            Err(error) => refusal(error),
        }
    }
}

impl FromRequestParts<ApiState> for Asked {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, shared: &ApiState) -> Result<Asked, ApiError> {
        let client = parts.extensions.get::<ApiClient>().cloned();
        let client = client.ok_or_else(|| ApiError::failed("internal error: the client is not known"))?;
        Ok(Asked { shared: shared.clone(), client, wait: wait_limit(&parts.headers) })
    }
}

/// The pairs of a query, whose values are decoded.
pub(super) fn query_pairs(uri: &Uri) -> impl Iterator<Item = (&str, String)> {
    let pairs = uri.query().unwrap_or_default().split('&').filter(|pair| !pair.is_empty());
    pairs.map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (key, percent_decode_str(value).decode_utf8_lossy().into_owned())
    })
}

/// A value of a query that is true or false.
///
/// # Errors
/// If it is something else.
pub(super) fn flag(key: &str, value: &str) -> Result<bool, ApiError> {
    match value {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(ApiError::new(ErrorCode::Malformed, format!("{key}: write true or false"))),
    }
}

/// The tags of a conditional header, separated by commas. One that is no text is no tag of ours.
pub(super) fn tags(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    let lines: Vec<_> = headers.get_all(name).iter().map(|line| line.to_str().unwrap_or_default()).collect();
    (!lines.is_empty()).then(|| lines.join(","))
}

/// Time after which a client wants the URL of the action instead of its result (RFC 7240 §4.1 and
/// §4.3); `None` if the client waits for the result without limit.
fn wait_limit(headers: &HeaderMap) -> Option<Duration> {
    let preferences = headers.get_all("prefer").iter().filter_map(|value| value.to_str().ok());
    let preferences: Vec<_> = preferences.flat_map(|value| value.split([',', ';'])).map(str::trim).collect();
    if !preferences.contains(&"respond-async") {
        return None;
    }
    let wait = preferences.iter().find_map(|preference| preference.strip_prefix("wait=")?.parse().ok());
    Some(Duration::from_secs(wait.unwrap_or(0).min(MAX_WAIT)))
}

/// Maximum `wait` of a client, in seconds.
const MAX_WAIT: u64 = 30;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_waits_as_long_as_it_requests() {
        let wait = |value: &'static str| {
            let header = ("prefer".parse().unwrap(), HeaderValue::from_static(value));
            wait_limit(&[header].into_iter().collect()).map(|wait| wait.as_secs())
        };
        assert_eq!(wait_limit(&HeaderMap::new()), None);
        assert_eq!(wait("wait=5"), None);
        assert_eq!(wait("respond-async"), Some(0));
        assert_eq!(wait("respond-async, wait=5"), Some(5));
        assert_eq!(wait("wait=5; respond-async"), Some(5));
        assert_eq!(wait("respond-async, wait=1000"), Some(MAX_WAIT));
    }
}
