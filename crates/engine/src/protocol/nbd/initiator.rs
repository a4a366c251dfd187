//! Connecting to an export of an NBD server.

use crate::carrier::blocking::{self, LoginTimeouts, run_session};
use crate::carrier::connection::Broken;
use crate::carrier::tls::ClientTls;
use crate::net::socket::Address;
use crate::remote::{Dialer, Opening, Paths, RemoteVolume, TlsKeys, check_unchanged};
use blockmux_proto::driver::session::NoControl;
use blockmux_proto::nbd::client::{
    ExportInfo, ListedExport, NbdFeatures, NbdHandshakeRefusal, NbdInitiatorConfig, NbdInitiatorSession,
    NbdSessionMode,
};
use blockmux_volume::{Pool, VolumeInfo};
use std::time::{Duration, Instant};
use tracing::warn;

/// Address and parameters of one export.
#[derive(Clone, Debug)]
pub struct NbdEndpoint {
    /// The server's address.
    pub address: Address,
    /// The export's name; empty for the default export.
    pub export: String,
    /// Connections of each channel, if the server permits several (NBD_FLAG_CAN_MULTI_CONN).
    pub connections: u32,
    /// How long to reconnect before I/O fails.
    pub reconnect_timeout: Duration,
    /// How long a reply may take before the connection counts as lost, as [`Paths::timeout`].
    pub timeout: Option<Duration>,
    /// TLS credentials; `None`: TLS is not requested.
    pub tls: Option<ClientTls>,
}

/// Why an export cannot be reached.
pub type NbdConnectError = blocking::BlockingConnectError<NbdHandshakeRefusal>;

/// Connects to the export for I/O; connects once to query it.
///
/// # Errors
/// If the server cannot be reached or does not have the export.
pub fn connect(endpoint: NbdEndpoint) -> Result<RemoteVolume<NbdDialer>, NbdConnectError> {
    let session = ask(&endpoint.address, endpoint.tls.as_ref(), &endpoint.export, NbdSessionMode::Info)?;
    let silent = || NbdConnectError::silent(&endpoint.address);
    let export = session.export().ok_or_else(silent)?;
    let info = export.volume_info();
    let rest = export.size.saturating_sub(info.size);
    if rest > 0 {
        // No request can reach the bytes after the last whole block ("Size constraints").
        let (address, block) = (&endpoint.address, info.logical_block);
        warn!("{address}: its last {rest} bytes are not a whole block of {block} bytes and are left out");
    }
    let connections = if info.shared_flush { endpoint.connections } else { 1 };
    let timeout = endpoint.reconnect_timeout;
    let paths = Paths { timeout: endpoint.timeout, ..Paths::to(&endpoint.address) };
    let dialer = NbdDialer { endpoint, paths, first: info.clone() };
    Ok(RemoteVolume::new(dialer, info, connections, timeout))
}

/// Queries the description of one export.
///
/// # Errors
/// As for [`connect`].
pub fn describe(
    address: &Address,
    tls: Option<&ClientTls>,
    export: &str,
) -> Result<ExportInfo, NbdConnectError> {
    let session = ask(address, tls, export, NbdSessionMode::Info)?;
    session.export().cloned().ok_or_else(|| NbdConnectError::silent(address))
}

/// Lists the exports of a server; also returns the number of exports that the list leaves out.
///
/// # Errors
/// If the server cannot be reached or refuses to list.
pub fn list(address: &Address, tls: Option<&ClientTls>) -> Result<(Vec<ListedExport>, u64), NbdConnectError> {
    let session = ask(address, tls, "", NbdSessionMode::List)?;
    Ok((session.exports().to_vec(), session.exports_left_out()))
}

/// Runs one handshake.
fn ask(
    address: &Address,
    tls: Option<&ClientTls>,
    export: &str,
    mode: NbdSessionMode,
) -> Result<NbdInitiatorSession, NbdConnectError> {
    let config = NbdInitiatorConfig { export: export.to_owned(), mode, features: NbdFeatures::default() };
    let session = NbdInitiatorSession::new(config, Pool::new(LOG_IN_POOL), Instant::now());
    let mut session = if tls.is_some() { session.with_tls() } else { session };
    let ran = tls.map(ClientTls::secure).transpose().map_err(Broken::from).and_then(|secure| {
        run_session(address, secure, &mut session, LOG_IN_TIMEOUTS, NbdInitiatorSession::is_over)
    });
    ran.map_err(|broken| NbdConnectError::broken(address, broken))?;
    match session.refusal() {
        Some(refused) => Err(NbdConnectError::refused(address, refused.clone())),
        None => Ok(session),
    }
}

/// Dials one export of an NBD server.
pub struct NbdDialer {
    endpoint: NbdEndpoint,
    paths: Paths,
    /// The export as it was when the volume was opened.
    first: VolumeInfo,
}

impl TlsKeys for NbdDialer {
    fn keys(&self) -> Option<ClientTls> {
        self.endpoint.tls.clone()
    }
}

impl Dialer for NbdDialer {
    type Session = NbdInitiatorSession;
    type Control = NoControl;

    fn paths(&self) -> &Paths {
        &self.paths
    }

    fn session(&self, opening: &Opening<'_, NoControl>) -> NbdInitiatorSession {
        let config = NbdInitiatorConfig {
            export: self.endpoint.export.clone(),
            mode: NbdSessionMode::Go,
            features: NbdFeatures::default(),
        };
        let session = NbdInitiatorSession::new(config, opening.pool.clone(), opening.now);
        if self.endpoint.tls.is_some() { session.with_tls() } else { session }
    }

    fn tls(&self) -> Option<&dyn TlsKeys> {
        Some(self)
    }

    fn check(&self, session: &NbdInitiatorSession) -> Result<(), String> {
        let export = session.export().ok_or("the server has not described the export")?;
        check_unchanged(&self.first, &export.volume_info(), self.endpoint.connections)
    }

    fn refusal(&self, session: &NbdInitiatorSession) -> Option<String> {
        session.refusal().filter(|refused| !refused.is_retryable()).map(ToString::to_string)
    }
}

/// Timeouts of a handshake. The greeting of a slow server arrives well within its timeout.
const LOG_IN_TIMEOUTS: LoginTimeouts = LoginTimeouts {
    total: Duration::from_secs(10),
    greeting: Some((
        Duration::from_secs(3),
        "NBD servers speak first, so this port probably serves another protocol, such as iSCSI or NVMe/TCP",
    )),
};
/// Pool of a handshake, in bytes.
const LOG_IN_POOL: usize = 4 << 20;
