//! Checks of a request before it is routed: the client's credentials, and the length of the body.

use super::REQUEST_TIMEOUT;
use super::endpoint::ApiPeer;
use super::permission::is_public;
use super::reply::refusal;
use crate::api::{ApiError, ErrorCode};
use aws_lc_rs::constant_time::verify_slices_are_equal;
use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::Response;
use blockmux_engine::serve::audit::AUDIT;
use tokio::time;
use tracing::warn;

/// Checks a request and reads its whole body.
///
/// # Errors
/// The response that refuses the request.
pub(super) async fn admit(peer: &ApiPeer, request: Request) -> Result<Request, Response> {
    if let Some(reason) = &peer.refusal {
        warn!(target: AUDIT, protocol = "api", %peer, "login refused: {reason}");
        return Err(refusal(ApiError::new(ErrorCode::Forbidden, reason)));
    }
    // A browser with a client certificate uses it for requests of every site's pages.
    let site = request.headers().get(FETCH_SITE);
    if !is_page(&request) && site.is_some_and(|site| site != "same-origin" && site != "none") {
        let reason = "the request comes from a page of another site; open this daemon's own page";
        warn!(target: AUDIT, protocol = "api", %peer, "login refused: {reason}");
        return Err(refusal(ApiError::new(ErrorCode::Forbidden, reason)));
    }
    let is_public = is_public(request.method(), request.uri().path());
    if let Some(token) = peer.credentials.as_ref().and_then(|own| own.token.as_ref())
        && !is_public
        && let Err(reason) = check_token(request.headers(), token.as_bytes())
    {
        warn!(target: AUDIT, protocol = "api", %peer, "login refused: {reason}");
        let error =
            ApiError::new(ErrorCode::Unauthorized, format!("{reason}; send it as `Authorization: Bearer`"));
        let mut response = refusal(error);
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        return Err(response);
    }
    let (parts, body) = request.into_parts();
    // Nobody makes the daemon buffer data without credentials.
    let max_body = if is_public { 0 } else { MAX_BODY };
    let body = match time::timeout(REQUEST_TIMEOUT, to_bytes(body, max_body)).await {
        Ok(Ok(body)) => body,
        Ok(Err(error)) => {
            let text = error.to_string();
            let (code, text) = match text.contains("length limit") {
                true => (
                    ErrorCode::TooLarge,
                    format!("the body is longer than {max_body} bytes; send less at a time"),
                ),
                false => (ErrorCode::Malformed, format!("the body cannot be read: {text}")),
            };
            return Err(refusal(ApiError::new(code, text)));
        }
        Err(_) => {
            let text =
                format!("the body did not arrive within {} s; send it at once", REQUEST_TIMEOUT.as_secs());
            return Err(refusal(ApiError::new(ErrorCode::Timeout, text)));
        }
    };
    Ok(Request::from_parts(parts, Body::from(body)))
}

/// Whether the request is for the live page, to which other sites may have links.
fn is_page(request: &Request) -> bool {
    request.uri().path() == "/"
}

fn check_token(headers: &HeaderMap, token: &[u8]) -> Result<(), &'static str> {
    let Some(sent) = headers.get(header::AUTHORIZATION) else { return Err("the API requires a token") };
    let sent = sent.as_bytes();
    let scheme = sent.get(..BEARER.len()).filter(|scheme| scheme.eq_ignore_ascii_case(BEARER));
    let Some(sent) = scheme.map(|_| sent[BEARER.len()..].trim_ascii()) else {
        return Err("the API requires a bearer token");
    };
    verify_slices_are_equal(sent, token).map_err(|_| "the token is wrong")
}

/// Tells where a browser's request comes from (Fetch Metadata).
const FETCH_SITE: &str = "sec-fetch-site";
const BEARER: &[u8] = b"Bearer ";
/// Maximum length of a request's body, in bytes: a config file of tens of thousands of volumes.
const MAX_BODY: usize = 4 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_token_is_accepted() {
        let check = |value: Option<&str>| {
            let value = value.map(|value| (header::AUTHORIZATION, HeaderValue::from_str(value).unwrap()));
            check_token(&value.into_iter().collect(), b"secret-token")
        };
        for value in ["Bearer secret-token", "bearer  secret-token "] {
            assert_eq!(check(Some(value)), Ok(()));
        }
        assert_eq!(check(None), Err("the API requires a token"));
        for value in ["Basic secret-token", "secret-token", "", "Bearer"] {
            assert_eq!(check(Some(value)), Err("the API requires a bearer token"), "{value}");
        }
        for value in ["Bearer ", "Bearer secret-toke", "Bearer secret-token2", "Bearer SECRET-TOKEN"] {
            assert_eq!(check(Some(value)), Err("the token is wrong"), "{value}");
        }
    }
}
