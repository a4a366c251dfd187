//! The live page: one HTML file without external resources, which requests its data from this API.
//!
//! The page itself contains no data and is served without a token. Its script asks the user for the
//! token if the API requires one. The Content-Security-Policy allows only its own script and style.

use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use data_encoding::BASE64;
use sha2::{Digest, Sha256};
use std::sync::OnceLock;

const SCRIPT: &str = include_str!("script.js");
const STYLE: &str = include_str!("style.css");
const BODY: &str = include_str!("body.html");

/// Responds with the page.
pub(super) async fn show() -> Response {
    static POLICY: OnceLock<HeaderValue> = OnceLock::new();
    let policy = POLICY.get_or_init(|| {
        let hash = |text: &str| BASE64.encode(&Sha256::digest(text));
        let policy = format!(
            "default-src 'none'; connect-src 'self'; img-src data:; script-src 'sha256-{}'; style-src 'sha256-{}'; \
             base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            hash(SCRIPT),
            hash(STYLE)
        );
        HeaderValue::from_str(&policy).unwrap_or(HeaderValue::from_static("default-src 'none'"))
    });
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8")),
        (header::CONTENT_SECURITY_POLICY, policy.clone()),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    ];
    (headers, html()).into_response()
}

fn html() -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>blockmux</title>\n\
         <link rel=\"icon\" href=\"data:,\">\n<style>{STYLE}</style>\n</head>\n<body>\n{BODY}\n\
         <script>{SCRIPT}</script>\n</body>\n</html>\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_no_external_resources() {
        let html = html();
        // The XML namespace of SVG is an identifier and not fetched.
        let addresses = html.replace("http://www.w3.org/2000/svg", "");
        for part in ["http:", "https:", "src=", "@import", "url("] {
            assert!(!addresses.contains(part), "{part}");
        }
        for part in ["innerHTML", "insertAdjacentHTML", "eval(", "style=\""] {
            assert!(!html.contains(part), "{part}");
        }
    }
}
