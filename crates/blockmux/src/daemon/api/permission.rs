//! Which requests need credentials.

use axum::http::Method;

/// Whether a request is for everybody who can connect. What these paths return contains no data;
/// the script of the page sends the token with its own requests.
pub(super) fn is_public(method: &Method, path: &str) -> bool {
    is_read(method) && PUBLIC.contains(&path)
}

/// Whether requests with this method change nothing.
fn is_read(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD)
}

/// The paths that need no credentials: the live page, probes, and the version.
const PUBLIC: [&str; 4] = ["/", "/healthz", "/readyz", "/v1/version"];

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
}
