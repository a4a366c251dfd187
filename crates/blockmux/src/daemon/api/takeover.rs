//! `POST /v1/takeover`: upgrades the connection for a process that takes over from the daemon (RFC
//! 9110 §7.8). The messages after the response are described in `serve/takeover/`.

use super::reply::refusal;
use super::{ApiState, Io};
use crate::api::{ApiError, ErrorCode};
use crate::daemon::takeover::UPGRADE;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use hyper::upgrade::{self, OnUpgrade};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use tracing::warn;

/// Marks requests that arrived at the control socket.
#[derive(Clone, Copy)]
pub(super) struct ByOwner;

/// Upgrades the connection and gives it to
/// [`TakeoverServer`](crate::daemon::takeover::TakeoverServer).
pub(super) async fn take_over(State(shared): State<ApiState>, mut request: Request) -> Response {
    if request.extensions().get::<ByOwner>().is_none() {
        let text = "a takeover is possible only at the control socket; use --takeover unix:PATH";
        return refusal(ApiError::new(ErrorCode::Conflict, text));
    }
    if request.headers().get(header::UPGRADE).is_none_or(|asked| asked != UPGRADE) {
        let text = format!(
            "this is for 'serve --takeover' of the same version; the request must have `Upgrade: {UPGRADE}`"
        );
        return refusal(ApiError::new(ErrorCode::Invalid, text));
    }
    let upgraded = upgrade::on(&mut request);
    tokio::spawn(async move {
        match connection(upgraded).await {
            // The offer takes locks, which may block.
            Ok(stream) => drop(tokio::task::spawn_blocking(move || shared.successors.offer(stream))),
            Err(error) => warn!("a takeover failed before it began: {error}; this daemon continues to serve"),
        }
    });
    let headers = [
        (header::CONNECTION, HeaderValue::from_static("upgrade")),
        (header::UPGRADE, HeaderValue::from_static(UPGRADE)),
    ];
    (StatusCode::SWITCHING_PROTOCOLS, headers).into_response()
}

/// Waits until the response has been sent; returns the connection.
async fn connection(upgraded: OnUpgrade) -> io::Result<UnixStream> {
    let upgraded = upgraded.await.map_err(io::Error::other)?;
    let parts = upgraded.downcast::<Io>().map_err(|_| io::ErrorKind::Unsupported)?;
    let stream = &parts.io.inner().as_ref().get_ref().get_ref().stream;
    // The runtime owns this file descriptor, so the takeover gets a duplicate. It is that of a Unix
    // socket, because no other request is by the owner.
    Ok(stream.as_fd().try_clone_to_owned()?.into())
}
