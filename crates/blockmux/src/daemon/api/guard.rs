//! Checks of a request before it is routed: the client's credentials, and the length of the body.

use super::REQUEST_TIMEOUT;
use super::endpoint::ApiPeer;
use super::permission::{ApiClient, is_public};
use super::reply::refusal;
use crate::api::{ApiError, ErrorCode};
use crate::daemon::access::RequiredToken;
use crate::daemon::config_audit::Caller;
use aws_lc_rs::constant_time::verify_slices_are_equal;
use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::Response;
use blockmux_engine::serve::audit::AUDIT;
use tokio::time;
use tracing::warn;

/// Checks a request and reads its whole body. Unless it is for everybody, it gets an [`ApiClient`].
///
/// # Errors
/// The response that refuses the request.
pub(super) async fn admit(peer: &ApiPeer, mut request: Request) -> Result<Request, Response> {
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
    if !is_public {
        let client = identify(peer, request.headers()).map_err(|reason| {
            warn!(target: AUDIT, protocol = "api", %peer, "login refused: {reason}");
            let advice = "send it as `Authorization: Bearer`";
            let mut response = refusal(ApiError::new(ErrorCode::Unauthorized, format!("{reason}; {advice}")));
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            response
        })?;
        request.extensions_mut().insert(client);
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

/// The client of a request: that of the connection, with the token of the request if one is
/// required. A client with a certificate and a token has the lower of their roles.
fn identify(peer: &ApiPeer, headers: &HeaderMap) -> Result<ApiClient, &'static str> {
    let mut client = ApiClient { caller: peer.caller.clone(), role: peer.role };
    let required = peer.credentials.as_ref().map_or(&[][..], |own| &own.tokens);
    if !required.is_empty() {
        let sent = find_token(headers, required)?;
        client.role = client.role.min(sent.role);
        if let Caller::Client { token, .. } = &mut client.caller {
            *token = Some(sent.name.clone());
        }
    }
    Ok(client)
}

/// The token that a request has.
fn find_token<'a>(headers: &HeaderMap, all: &'a [RequiredToken]) -> Result<&'a RequiredToken, &'static str> {
    let Some(sent) = headers.get(header::AUTHORIZATION) else { return Err("the API requires a token") };
    let sent = sent.as_bytes();
    let scheme = sent.get(..BEARER.len()).filter(|scheme| scheme.eq_ignore_ascii_case(BEARER));
    let Some(sent) = scheme.map(|_| sent[BEARER.len()..].trim_ascii()) else {
        return Err("the API requires a bearer token");
    };
    // Every token is compared, so that the time does not tell which one is similar.
    let with = |found, own: &'a RequiredToken| match verify_slices_are_equal(sent, own.token.as_bytes()) {
        Ok(()) => Some(own),
        Err(_) => found,
    };
    all.iter().fold(None, with).ok_or("the token is wrong")
}

/// Tells where a browser's request comes from (Fetch Metadata).
const FETCH_SITE: &str = "sec-fetch-site";
const BEARER: &[u8] = b"Bearer ";
/// Maximum length of a request's body, in bytes: a config file of tens of thousands of volumes.
const MAX_BODY: usize = 4 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::access::RequiredCredentials;
    use crate::daemon::role::Role;
    use std::sync::Arc;
    use zeroize::Zeroizing;

    fn tokens() -> Vec<RequiredToken> {
        let all = [("default", Role::Administer, "secret-token"), ("scraper", Role::Read, "other-token")];
        let token = |(name, role, token): (&str, Role, &str)| RequiredToken {
            name: name.to_owned(),
            role,
            token: Zeroizing::new(token.to_owned()),
        };
        all.into_iter().map(token).collect()
    }

    fn headers(authorization: Option<&str>) -> HeaderMap {
        let value = authorization.map(|value| (header::AUTHORIZATION, HeaderValue::from_str(value).unwrap()));
        value.into_iter().collect()
    }

    #[test]
    fn only_a_whole_token_is_accepted() {
        let all = tokens();
        let check = |value: Option<&str>| find_token(&headers(value), &all).map(|own| own.name.as_str());
        for value in ["Bearer secret-token", "bearer  secret-token "] {
            assert_eq!(check(Some(value)), Ok("default"));
        }
        assert_eq!(check(Some("Bearer other-token")), Ok("scraper"));
        assert_eq!(check(None), Err("the API requires a token"));
        for value in ["Basic secret-token", "secret-token", "", "Bearer"] {
            assert_eq!(check(Some(value)), Err("the API requires a bearer token"), "{value}");
        }
        for value in ["Bearer ", "Bearer secret-toke", "Bearer secret-token2", "Bearer SECRET-TOKEN"] {
            assert_eq!(check(Some(value)), Err("the token is wrong"), "{value}");
        }
    }

    #[test]
    fn a_client_has_the_lower_role_of_its_certificate_and_its_token() {
        let client = |certificate: Role, tokens: Vec<RequiredToken>, token: &str| {
            let (address, subject) = ("192.0.2.1:5".to_owned(), Some("CN=a".to_owned()));
            let peer = ApiPeer {
                caller: Caller::Client { address, subject, token: None },
                role: certificate,
                credentials: Some(Arc::new(RequiredCredentials { tokens, tls: None })),
                refusal: None,
            };
            let client = identify(&peer, &headers(Some(&format!("Bearer {token}"))));
            client.map(|client| (client.role, client.caller.token().to_owned()))
        };
        let found = |role, name: &str| Ok((role, name.to_owned()));
        assert_eq!(client(Role::Operate, tokens(), "secret-token"), found(Role::Operate, "default"));
        assert_eq!(client(Role::Operate, tokens(), "other-token"), found(Role::Read, "scraper"));
        assert_eq!(client(Role::Operate, Vec::new(), "any"), found(Role::Operate, "-"));
        assert_eq!(client(Role::Operate, tokens(), "any"), Err("the token is wrong"));
    }
}
