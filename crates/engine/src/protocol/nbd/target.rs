//! Serving NBD exports.

use crate::carrier::tls::Secure;
use crate::core::helpers;
use crate::core::reactor::EngineCore;
use crate::net::host::{ByteStream, NetworkStream};
use crate::net::socket::Stream;
use crate::serve::handover::{HandedOverConnection, SessionHandover};
use crate::serve::listener::{Permit, Serve};
use crate::serve::moves::{ArrivedConnection, Elsewhere, ProcessHandover};
use crate::serve::target_task::{NewSession, StreamOptions, TargetTask};
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::nbd::server::{NbdTargetSession, NbdTls};
use blockmux_tls::ServerCredentials;
use blockmux_volume::Core;
use std::rc::Rc;
use std::sync::Arc;
use tracing::warn;

/// TLS of an NBD server.
#[derive(Clone)]
pub struct NbdServerTls {
    /// What both sides authenticate with.
    pub credentials: ServerCredentials,
    /// Which clients have to use TLS, and which are allowed.
    pub policy: NbdTls,
    /// Whether the kernel processes the records (kTLS) where possible.
    pub ktls: bool,
}

/// Serves `exports` to each accepted connection, which may or must be upgraded to TLS if `tls` is
/// given.
#[must_use]
pub fn serve(exports: Exports, tls: Option<NbdServerTls>) -> Serve {
    helpers::prepare();
    Arc::new(move |core, stream, permit| {
        let pool = core.pool().for_peer_at(stream.peer_ip());
        // The selection of exports is only needed until the client has chosen one.
        let session = NbdTargetSession::new(exports.clone(), pool.clone(), core.now());
        let (session, secure) = match &tls {
            None => (session, None),
            Some(NbdServerTls { credentials, policy, ktls }) => {
                let secure = Secure::server(credentials.clone()).by_kernel(*ktls).on_demand();
                (session.with_tls(policy.clone()), Some(secure))
            }
        };
        let arrival = ArrivedConnection::new(stream, permit);
        let session = NewSession { session, pool, exports: exports.all() };
        TargetTask::spawn(core, arrival, session, options(secure));
    })
}

/// Serves a volume to a client of this machine that needs no handshake. Returns whether the volume
/// is there.
pub fn serve_negotiated(
    core: &Rc<EngineCore>,
    exports: &Exports,
    volume: VolumeId,
    stream: Stream,
    permit: Permit,
) -> bool {
    let pool = core.pool().for_peer();
    let Some(session) = NbdTargetSession::negotiated(exports, volume, pool.clone(), core.now()) else {
        return false;
    };
    let session = NewSession { session, pool, exports: exports.all() };
    TargetTask::spawn(core, ArrivedConnection::new(stream, permit), session, StreamOptions::default());
    true
}

/// Continues a session of another process: `stream` is its connection, without TLS; `unread` are
/// the bytes received and not parsed; `state` is the state of the session.
pub fn resume(
    core: &Rc<EngineCore>,
    exports: &Exports,
    (stream, unread, state): (Stream, Vec<u8>, &[u8]),
    permit: Permit,
) {
    let pool = core.pool().for_peer_at(stream.peer_ip());
    match NbdTargetSession::resumed(exports, pool.clone(), core.now(), state) {
        Ok(session) => {
            let arrival = ArrivedConnection { unread, ..ArrivedConnection::new(stream, permit) };
            let session = NewSession { session, pool, exports: exports.all() };
            TargetTask::spawn(core, arrival, session, options(None));
        }
        Err(error) => warn!("{}: a session that was handed over is closed: {error}", stream.peer()),
    }
}

/// NBD sessions move to another process, because NBD clients do not reconnect when their connection
/// ends.
static HANDOVER: ProcessHandover<NbdTargetSession, Stream> =
    ProcessHandover { hand_over: NbdTargetSession::hand_over, store: keep };

fn options(secure: Option<Secure>) -> StreamOptions<NbdTargetSession, Stream> {
    StreamOptions { secure, elsewhere: Some(Elsewhere::Process(&HANDOVER)) }
}

fn keep(session_handover: &SessionHandover, handed_over: HandedOverConnection<Stream>) {
    let peer = handed_over.peer.clone();
    if let Err(error) = session_handover.add(handed_over) {
        warn!("{peer}: its session cannot be handed over: {error}; raise the limit of open files");
    }
}
