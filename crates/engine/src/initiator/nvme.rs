//! Reaching namespaces of NVMe/TCP subsystems.
//!
//! Each connection of a channel is an association of its own: an admin queue, which its link holds as its control, and
//! one I/O queue of the controller that the admin queue got. When either is lost, both are made anew, with another
//! controller, and what had not completed is replayed there. Decision 14 says why.

use super::{Dialer, RemoteVolume, check_unchanged};
use crate::blocking::{self, run_secured};
use crate::connection::Broken;
use crate::nvme_tcp::tls_key;
use crate::socket::Address;
use blockmux_proto::nvmeof::initiator::uuid_text;
use blockmux_proto::nvmeof::psk::{ConfiguredPsk, TlsPsk};
use blockmux_proto::nvmeof::tcp::initiator::{
    AdminConfig, AdminSession, Ask, ControllerInfo, Digests, FoundSubsystem, Names, NamespaceInfo,
    QueueConfig, QueueSession, Refused,
};
use blockmux_tls::Psk;
use blockmux_volume::{Pool, VolumeInfo};
use std::time::{Duration, Instant};

/// How to reach one namespace.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// Where the subsystem is.
    pub address: Address,
    /// Who connects, and where to.
    pub names: Names,
    /// Which of its namespaces.
    pub nsid: u32,
    /// What to ask for.
    pub digests: Digests,
    /// Entries of each I/O queue, 2 to 1,024.
    pub entries: u16,
    /// Keep alive timeout; zero: none.
    pub keep_alive: Duration,
    /// I/O queues of each channel.
    pub connections: u32,
    /// How long to try again when a connection is lost, before I/O fails.
    pub patience: Duration,
    /// The key that every connection is secured with; `None`: without TLS.
    pub tls_key: Option<ConfiguredPsk>,
    /// The version of its identity, 0 or 1; `None`: both are offered.
    pub tls_identity: Option<u8>,
}

/// Why a namespace cannot be reached.
pub type ConnectError = blocking::ConnectError<Refused>;

/// What a controller told of itself and of one of its namespaces.
#[derive(Clone, Debug)]
pub struct Description {
    /// The controller.
    pub controller: ControllerInfo,
    /// The namespace.
    pub namespace: NamespaceInfo,
}

/// Reaches the namespace for I/O: connects once to learn what it is like.
///
/// # Errors
/// If the subsystem cannot be reached or does not have the namespace.
pub fn connect(endpoint: Endpoint) -> Result<RemoteVolume<NvmeDialer>, ConnectError> {
    let dialer = NvmeDialer::new(endpoint)?;
    let (connections, patience) = (dialer.endpoint.connections, dialer.endpoint.patience);
    let info = dialer.first.volume_info();
    Ok(RemoteVolume::new(dialer, info, connections, patience))
}

/// Describes one namespace.
///
/// # Errors
/// As for [`connect`].
pub fn describe(endpoint: &Endpoint) -> Result<Description, ConnectError> {
    let session = ask(endpoint, Ask::Namespace(endpoint.nsid))?;
    let told = session.controller().cloned().zip(session.namespaces().first().cloned());
    let silent = || ConnectError::Silent { address: endpoint.address.clone() };
    let (controller, namespace) = told.ok_or_else(silent)?;
    Ok(Description { controller, namespace })
}

/// The namespaces of a subsystem that can be used.
///
/// # Errors
/// If the subsystem cannot be reached.
pub fn namespaces(endpoint: &Endpoint) -> Result<(ControllerInfo, Vec<NamespaceInfo>), ConnectError> {
    let session = ask(endpoint, Ask::Namespaces)?;
    Ok((session.controller().cloned().unwrap_or_default(), session.namespaces().to_vec()))
}

/// What a discovery controller has in its log page, and how many entries more than we keep.
///
/// # Errors
/// If it cannot be reached or does not tell.
pub fn discover(endpoint: &Endpoint) -> Result<(Vec<FoundSubsystem>, u64), ConnectError> {
    let session = ask(endpoint, Ask::Discovery)?;
    let (found, left_out) = session.found();
    Ok((found.to_vec(), left_out))
}

/// One admin queue from start to end.
fn ask(endpoint: &Endpoint, ask: Ask) -> Result<AdminSession, ConnectError> {
    let address = &endpoint.address;
    let config = endpoint.admin(ask, Duration::ZERO);
    let pool = Pool::new(CONNECT_POOL);
    let mut session = AdminSession::new(config, endpoint.digests, pool, Instant::now());
    let secure = super::secure(endpoint.tls_keys().as_deref());
    let ran = secure
        .map_err(Broken::from)
        .and_then(|secure| run_secured(address, secure, &mut session, ASK_TIMEOUT, AdminSession::is_over));
    if let Some(refused) = session.refused() {
        return Err(ConnectError::Refused { address: address.clone(), refused: *refused });
    }
    match ran {
        // Only the good-bye is missing.
        Err(_) if session.controller().is_some() => Ok(session),
        Err(broken) => Err(ConnectError::Broken { address: address.clone(), broken }),
        Ok(()) if session.controller().is_none() => Err(ConnectError::Silent { address: address.clone() }),
        Ok(()) => Ok(session),
    }
}

impl Endpoint {
    fn admin(&self, ask: Ask, keep_alive: Duration) -> AdminConfig {
        AdminConfig { names: self.names.clone(), ask, keep_alive }
    }

    /// The keys for connections to the subsystem, or to discovery.
    fn tls_keys(&self) -> Option<Vec<Psk>> {
        let (key, host) = (self.tls_key.as_ref()?, &self.names.host);
        let keys = key.retained(host).tls_psks(host, &self.names.subsystem);
        let is_offered = |key: &&TlsPsk| self.tls_identity.is_none_or(|version| key.version() == version);
        Some(keys.iter().filter(is_offered).map(tls_key).collect())
    }
}

/// Dials one namespace.
pub struct NvmeDialer {
    endpoint: Endpoint,
    tls_keys: Option<Vec<Psk>>,
    /// As the namespace was when the volume was opened.
    first: NamespaceInfo,
}

impl NvmeDialer {
    /// Connects once to learn what the namespace is like.
    ///
    /// # Errors
    /// As for [`connect`].
    pub fn new(endpoint: Endpoint) -> Result<NvmeDialer, ConnectError> {
        let first = describe(&endpoint)?.namespace;
        Ok(NvmeDialer { tls_keys: endpoint.tls_keys(), endpoint, first })
    }

    /// The namespace as it was when it was first seen.
    #[must_use]
    pub fn volume_info(&self) -> VolumeInfo {
        self.first.volume_info()
    }

    /// Whether a namespace is the one that it is meant to be.
    fn check_namespace(&self, now: &NamespaceInfo) -> Result<(), String> {
        if now.identity != self.first.identity {
            let (now, first) = (&now.identity, &self.first.identity);
            return Err(format!("another namespace has its number now: {now}, and not {first}"));
        }
        // It may have grown or shrunk, which is told elsewhere.
        let (first, now) = (self.first.volume_info(), now.volume_info());
        check_unchanged(&VolumeInfo { size: now.size, ..first }, &now, self.endpoint.connections)
    }
}

impl Dialer for NvmeDialer {
    type Session = QueueSession;
    type Control = AdminSession;

    fn address(&self) -> &Address {
        &self.endpoint.address
    }

    fn tls_keys(&self) -> Option<&[Psk]> {
        self.tls_keys.as_deref()
    }

    fn control(&self, pool: &Pool, now: Instant) -> Option<AdminSession> {
        let config = self.endpoint.admin(Ask::Use(self.endpoint.nsid), self.endpoint.keep_alive);
        Some(AdminSession::new(config, self.endpoint.digests, pool.clone(), now))
    }

    fn session(&self, _link: u32, control: Option<&AdminSession>, pool: &Pool, now: Instant) -> QueueSession {
        let controller = control.and_then(AdminSession::controller).cloned().unwrap_or_default();
        let namespace = control.and_then(|control| control.namespaces().first()).unwrap_or(&self.first);
        let config = QueueConfig {
            names: self.endpoint.names.clone(),
            controller,
            namespace: namespace.clone(),
            qid: 1,
            entries: self.endpoint.entries,
            digests: self.endpoint.digests,
        };
        QueueSession::new(config, pool.clone(), now)
    }

    fn check(&self, _session: &QueueSession) -> Result<(), String> {
        // The control has found the namespace, and was checked.
        Ok(())
    }

    fn refusal(&self, session: &QueueSession) -> Option<String> {
        session.refused().filter(|refused| !refused.may_pass()).map(ToString::to_string)
    }

    fn control_refusal(&self, control: &AdminSession) -> Option<String> {
        if let Some(refused) = control.refused() {
            return (!refused.may_pass()).then(|| refused.to_string());
        }
        let namespace = control.controller().and_then(|_| control.namespaces().first())?;
        self.check_namespace(namespace).err()
    }
}

/// A host's name that is made from its identifier (NVMe Base 2.0 §4.5).
#[must_use]
pub fn host_nqn_of(id: &[u8; 16]) -> String {
    format!("nqn.2014-08.org.nvmexpress:uuid:{}", uuid_text(id))
}

const ASK_TIMEOUT: Duration = Duration::from_secs(10);
/// An admin queue has no payload to speak of.
const CONNECT_POOL: usize = 4 << 20;
