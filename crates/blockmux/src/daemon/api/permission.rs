//! The role that each request requires.
//!
//! It follows from the method, so that a new route cannot forget it: reading requires `read`,
//! everything else `administer`, except for the requests in [`OPERATE`]. The OpenAPI document shows
//! it as `x-role`.

use super::reply::refusal;
use crate::api::{ApiError, ErrorCode};
use crate::daemon::config_audit::Caller;
use crate::daemon::role::Role;
use crate::output::{masked, shortened};
use axum::extract::{MatchedPath, Request};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::Response;
use blockmux_engine::serve::audit::AUDIT;
use tracing::warn;

/// Whether a request is for everybody who can connect. What these paths return contains no data;
/// the script of the page sends the token with its own requests.
pub(super) fn is_public(method: &Method, path: &str) -> bool {
    is_read(method) && PUBLIC.contains(&path)
}

/// The role that a request for a route requires, if it requires any.
pub(super) fn required_role(method: &Method, route: &str) -> Option<Role> {
    if is_public(method, route) {
        return None;
    }
    let is_operation = OPERATE.iter().any(|(own, path)| own == method && *path == route);
    Some(match is_read(method) {
        true => Role::Read,
        false if is_operation => Role::Operate,
        false => Role::Administer,
    })
}

/// Refuses a request whose client has a lower role than the route requires. Runs when the route is
/// known.
pub(super) async fn check_role(request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().map_or("", MatchedPath::as_str);
    let Some(required) = required_role(request.method(), route) else { return next.run(request).await };
    let what = format!("{} {}", request.method(), request.uri().path());
    let client = request.extensions().get::<ApiClient>();
    let client = client.ok_or_else(|| ApiError::failed("internal error: the client is not known"));
    match client.and_then(|client| client.require(required, &what)) {
        Ok(()) => next.run(request).await,
        Err(error) => refusal(error),
    }
}

/// The client of a request that was admitted.
#[derive(Clone)]
pub(super) struct ApiClient {
    pub(super) caller: Caller,
    pub(super) role: Role,
}

impl ApiClient {
    /// Checks that the client has at least this role, and logs a refusal; `what` is requested.
    ///
    /// # Errors
    /// If it has a lower one; the message says what to do.
    pub(super) fn require(&self, required: Role, what: &str) -> Result<(), ApiError> {
        let ApiClient { caller: peer, role } = self;
        if *role >= required {
            return Ok(());
        }
        let (subject, token) = (peer.subject(), peer.token());
        let what = masked(&shortened(what));
        let reason = format!("it requires the role {required}, and the client has the role {role}");
        warn!(target: AUDIT, protocol = "api", %peer, subject, token, reason, "request refused: {what}");
        let advice =
            format!("use a token or a certificate with role = \"{required}\" in the daemon's config");
        Err(ApiError::new(ErrorCode::Forbidden, format!("{what}: {reason}; {advice}")))
    }
}

/// Whether requests with this method change nothing.
fn is_read(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD)
}

/// The paths that need no credentials: the live page, probes, and the version.
const PUBLIC: [&str; 4] = ["/", "/healthz", "/readyz", "/v1/version"];
/// The requests that change what is running and neither add nor remove data, targets, clients or
/// secrets.
pub(super) const OPERATE: [(Method, &str); 13] = [
    (Method::DELETE, "/v1/sessions/{session}"),
    (Method::POST, "/v1/volumes/{name}/resize"),
    (Method::POST, "/v1/volumes/{name}/limits"),
    (Method::POST, "/v1/volumes/{name}/activate"),
    (Method::POST, "/v1/volumes/{name}/deactivate"),
    (Method::POST, "/v1/volumes/{name}/snapshots"),
    (Method::POST, "/v1/cluster/move"),
    (Method::POST, "/v1/cluster/drain"),
    (Method::POST, "/v1/cluster/undrain"),
    (Method::POST, "/v1/attachments"),
    (Method::DELETE, "/v1/attachments/{volume}"),
    (Method::POST, "/v1/config/save"),
    (Method::POST, "/v1/log"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_reading_exactly_a_public_path_needs_no_credentials() {
        for path in PUBLIC {
            assert!(is_public(&Method::GET, path) && is_public(&Method::HEAD, path), "{path}");
            assert!(!is_public(&Method::POST, path) && !is_public(&Method::OPTIONS, path), "{path}");
        }
        for path in ["", "//", "/healthz/", "/healthz/..", "/HEALTHZ", "/v1/version/x", "/v1/status", "/%2f"]
        {
            assert!(!is_public(&Method::GET, path), "{path}");
        }
    }

    #[test]
    fn an_unknown_route_requires_the_highest_role_of_its_method() {
        for method in [Method::POST, Method::PUT, Method::DELETE, Method::PATCH, Method::OPTIONS] {
            for path in PUBLIC.into_iter().chain(["", "/v1/new", "/v1/volumes", "/v1/volumes/{name}"]) {
                assert_eq!(required_role(&method, path), Some(Role::Administer), "{method} {path}");
            }
        }
        assert_eq!(required_role(&Method::GET, "/v1/new"), Some(Role::Read));
        assert_eq!(required_role(&Method::HEAD, "/v1/new"), Some(Role::Read));
        assert_eq!(required_role(&Method::GET, "/healthz"), None);
        for (method, route) in OPERATE {
            assert_eq!(required_role(&method, route), Some(Role::Operate), "{method} {route}");
        }
    }
}
