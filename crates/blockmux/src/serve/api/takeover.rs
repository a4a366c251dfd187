//! `POST /v1/takeover`: a process that wants to take over from the daemon gets the connection
//! itself. What follows the answer is no HTTP, see `serve/takeover/`.

use super::endpoint::AnyStream;
use super::reply::refusal;
use super::{ApiState, Io};
use crate::api::{ApiError, ErrorCode};
use crate::serve::takeover::UPGRADE;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use hyper::upgrade::{self, OnUpgrade};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use tracing::warn;

/// Marks requests that came by the control socket.
#[derive(Clone, Copy)]
pub(super) struct ByOwner;

/// Hands the connection over.
pub(super) async fn take_over(State(shared): State<ApiState>, mut request: Request) -> Response {
    if request.extensions().get::<ByOwner>().is_none() {
        let text = "sockets can be handed over by the control socket alone; use --takeover unix:PATH";
        return refusal(ApiError::new(ErrorCode::Conflict, text));
    }
    if request.headers().get(header::UPGRADE).is_none_or(|asked| asked != UPGRADE) {
        let text = format!(
            "a takeover is asked for with `Upgrade: {UPGRADE}`; it is what 'serve --takeover' of the same version does"
        );
        return refusal(ApiError::new(ErrorCode::Invalid, text));
    }
    let upgraded = upgrade::on(&mut request);
    tokio::spawn(async move {
        match connection(upgraded).await {
            // Listing what is served takes locks.
            Ok(stream) => drop(tokio::task::spawn_blocking(move || shared.successors.offer(stream))),
            Err(error) => warn!("a takeover has ended before it began: {error}"),
        }
    });
    let headers = [
        (header::CONNECTION, HeaderValue::from_static("upgrade")),
        (header::UPGRADE, HeaderValue::from_static(UPGRADE)),
    ];
    (StatusCode::SWITCHING_PROTOCOLS, headers).into_response()
}

/// The connection, once the answer is sent.
async fn connection(upgraded: OnUpgrade) -> io::Result<UnixStream> {
    let upgraded = upgraded.await.map_err(io::Error::other)?;
    let parts = upgraded.downcast::<Io>().map_err(|_| io::ErrorKind::Unsupported)?;
    match parts.io.inner().as_ref().get_ref().get_ref() {
        // Another handle: this one belongs to the runtime.
        AnyStream::Unix(stream) => Ok(stream.as_fd().try_clone_to_owned()?.into()),
        AnyStream::Tcp(_) | AnyStream::Tls(_) => Err(io::ErrorKind::Unsupported.into()),
    }
}
