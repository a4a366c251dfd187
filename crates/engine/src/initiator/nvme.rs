//! Reaching namespaces of NVMe/TCP subsystems.
//!
//! Each channel has, by each path, an association of its own: an admin queue, which its link holds
//! as its control, and I/O queues of the controller that the admin queue got, which are the
//! connections of one session. When one is lost, all are made anew, with another controller, and
//! what had not completed is replayed there. Decision 14 says why.
//!
//! Several places may lead to one namespace. It is recognised by what names it; a place that leads
//! to another one is refused, and one that does not answer when the volume is opened may do so
//! later.

use super::seeds::Seeds;
use super::{Dialer, GeneratedKeys, Opening, Paths, Policy, RemoteVolume, TlsKeys, check_unchanged};
use crate::blocking::{self, run_secured};
use crate::connection::Broken;
use crate::nvme_tcp::tls_key;
use crate::socket::Address;
use blockmux_proto::fabrics::host::uuid_text;
use blockmux_proto::nvme::auth::psk::{ConfiguredPsk, TlsPsk};
use blockmux_proto::nvme::auth::{Concatenation, HostCredentials, HostSecrets};
use blockmux_proto::nvme_tcp::client::{
    AdminConfig, AdminSession, Ask, ControllerInfo, Digests, FoundSubsystem, Names, NamespaceInfo,
    NvmeRefused, QueueConfig, QueueSession,
};
use blockmux_proto::session::PathRank;
use blockmux_tls::Psk;
use blockmux_volume::{Pool, VolumeInfo};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::warn;

/// How to reach one namespace.
#[derive(Clone, Debug)]
pub struct NvmeEndpoint {
    /// Where the subsystem is.
    pub address: Address,
    /// Other places that lead to the same namespace: each is a path of its own.
    pub further: Vec<Address>,
    /// How requests are shared among paths.
    pub policy: Policy,
    /// Who connects, and where to.
    pub names: Names,
    /// What we prove, and what the controller has to.
    pub secrets: Option<Arc<HostSecrets>>,
    /// Which of its namespaces.
    pub nsid: u32,
    /// What to ask for.
    pub digests: Digests,
    /// Entries of each I/O queue, 2 to 1,024.
    pub entries: u16,
    /// Keep alive timeout; zero: none.
    pub keep_alive: Duration,
    /// I/O queues of each channel by each path, as far as the controller gives them out.
    pub queues: u16,
    /// How long to try again when a connection is lost, before I/O fails.
    pub reconnect_timeout: Duration,
    /// How long an answer may take before the connection counts as lost, as [`Paths::timeout`].
    pub timeout: Option<Duration>,
    /// The key that every connection is secured with; `None`: without TLS.
    pub tls_key: Option<ConfiguredPsk>,
    /// The version of its identity, 0 or 1; `None`: both are offered.
    pub tls_identity: Option<u8>,
    /// Whether the kernel makes the records of TLS where it can.
    pub ktls: bool,
    /// Secure channel concatenation, which takes `secrets` and no `tls_key`: the keys that were
    /// made; `None`: it is not done.
    pub generated_keys: Option<Arc<GeneratedKeys>>,
}

/// Why a namespace cannot be reached.
pub type NvmeConnectError = blocking::BlockingConnectError<NvmeRefused>;

/// What a controller told of itself and of one of its namespaces.
#[derive(Clone, Debug)]
pub struct NvmeDescription {
    /// The controller.
    pub controller: ControllerInfo,
    /// The namespace.
    pub namespace: NamespaceInfo,
}

/// Reaches the namespace for I/O: connects once to learn what it is like.
///
/// # Errors
/// If the subsystem cannot be reached or does not have the namespace.
pub fn connect(endpoint: NvmeEndpoint) -> Result<RemoteVolume<NvmeDialer>, NvmeConnectError> {
    let dialer = NvmeDialer::new(endpoint)?;
    let (info, patience) = (dialer.first.volume_info(), dialer.endpoint.reconnect_timeout);
    let designator = dialer.first.identity.clone();
    Ok(RemoteVolume::new(dialer, info, 1, patience).with_designator(designator))
}

/// Describes one namespace.
///
/// # Errors
/// As for [`connect`].
pub fn describe(endpoint: &NvmeEndpoint) -> Result<NvmeDescription, NvmeConnectError> {
    let first = blocking::first_answer(endpoint.paths().map(|path| describe_by(&path)));
    first.unwrap_or_else(|| Err(NvmeConnectError::silent(&endpoint.address)))
}

/// Describes it as one path leads to it.
fn describe_by(endpoint: &NvmeEndpoint) -> Result<NvmeDescription, NvmeConnectError> {
    let session = ask(endpoint, Ask::Namespace(endpoint.nsid))?;
    let told = session.controller().cloned().zip(session.namespaces().first().cloned());
    let silent = || NvmeConnectError::silent(&endpoint.address);
    let (controller, namespace) = told.ok_or_else(silent)?;
    Ok(NvmeDescription { controller, namespace })
}

/// The namespaces of a subsystem that can be used.
///
/// # Errors
/// If the subsystem cannot be reached.
pub fn namespaces(endpoint: &NvmeEndpoint) -> Result<(ControllerInfo, Vec<NamespaceInfo>), NvmeConnectError> {
    let session = ask(endpoint, Ask::Namespaces)?;
    Ok((session.controller().cloned().unwrap_or_default(), session.namespaces().to_vec()))
}

/// What a discovery controller has in its log page, and how many entries more than we keep.
///
/// # Errors
/// If it cannot be reached or does not tell.
pub fn discover(endpoint: &NvmeEndpoint) -> Result<(Vec<FoundSubsystem>, u64), NvmeConnectError> {
    let session = ask(endpoint, Ask::Discovery)?;
    let (found, left_out) = session.found();
    Ok((found.to_vec(), left_out))
}

/// One admin queue from start to end, and before it another one if that has to make the key of this
/// one.
fn ask(endpoint: &NvmeEndpoint, ask: Ask) -> Result<AdminSession, NvmeConnectError> {
    let mut attempts = 1;
    loop {
        let keys = endpoint.tls_keys();
        let result = ask_over(endpoint, ask, keys.as_deref());
        let Some(generated) = endpoint.generated_keys.as_deref().filter(|_| attempts < MOST_ATTEMPTS) else {
            return result;
        };
        match (&result, &keys) {
            (Ok(session), _) if session.generated().is_some() => endpoint.keep_generated(session),
            (Err(NvmeConnectError::Broken { broken: Broken::Tls(_), .. }), Some(keys)) => {
                generated.forget(keys)
            }
            _ => return result,
        }
        attempts += 1;
    }
}

/// Asks one question on one connection, which is secured with one of the keys, if there are any.
fn ask_over(
    endpoint: &NvmeEndpoint,
    ask: Ask,
    keys: Option<&[Psk]>,
) -> Result<AdminSession, NvmeConnectError> {
    let address = &endpoint.address;
    let seeds = Seeds::new().map_err(|error| NvmeConnectError::broken(address, error))?;
    let config = endpoint.admin(ask, Duration::ZERO, endpoint.credentials(keys.is_some(), &seeds));
    let pool = Pool::new(CONNECT_POOL);
    let mut session = AdminSession::new(config, endpoint.digests, pool, Instant::now());
    // For so few records the kernel is not asked.
    let ran = super::secure(keys, false)
        .map_err(Broken::from)
        .and_then(|secure| run_secured(address, secure, &mut session, ASK_TIMEOUT, AdminSession::is_over));
    if let Some(refused) = session.refused() {
        return Err(NvmeConnectError::refused(address, refused.clone()));
    }
    match ran {
        // Only the good-bye is missing.
        Err(_) if session.controller().is_some() || session.generated().is_some() => Ok(session),
        Err(broken) => Err(NvmeConnectError::broken(address, broken)),
        Ok(()) if session.controller().is_none() && session.generated().is_none() => {
            Err(NvmeConnectError::silent(address))
        }
        Ok(()) => Ok(session),
    }
}

impl NvmeEndpoint {
    /// One endpoint for each of its paths, with that path alone.
    fn paths(&self) -> impl Iterator<Item = NvmeEndpoint> {
        let places = std::iter::once(&self.address).chain(&self.further);
        places.map(|address| NvmeEndpoint { address: address.clone(), further: Vec::new(), ..self.clone() })
    }

    fn admin(&self, ask: Ask, keep_alive: Duration, credentials: Option<HostCredentials>) -> AdminConfig {
        AdminConfig { names: self.names.clone(), credentials, queues: self.queues, ask, keep_alive }
    }

    /// For one queue.
    fn credentials(&self, is_secured: bool, seeds: &Seeds) -> Option<HostCredentials> {
        let secrets = self.secrets.clone()?;
        let concatenation = match &self.generated_keys {
            None => Concatenation::None,
            Some(_) if is_secured => Concatenation::Done,
            Some(_) => Concatenation::Due,
        };
        Some(HostCredentials { secrets, seed: seeds.next(), concatenation })
    }

    /// The session has made a key, which the next one comes with.
    fn keep_generated(&self, session: &AdminSession) {
        if let (Some(key), Some(keys)) = (session.generated(), &self.generated_keys) {
            keys.keep(key, &self.names.host, &self.names.subsystem);
        }
    }

    /// The keys for connections to the subsystem, or to discovery.
    fn tls_keys(&self) -> Option<Arc<[Psk]>> {
        if let Some(generated) = &self.generated_keys {
            return generated.all();
        }
        let (key, host) = (self.tls_key.as_ref()?, &self.names.host);
        let keys = key.retained(host).tls_psks(host, &self.names.subsystem);
        let is_offered = |key: &&TlsPsk| self.tls_identity.is_none_or(|version| key.version() == version);
        Some(keys.iter().filter(is_offered).map(tls_key).collect())
    }
}

/// Dials one namespace.
pub struct NvmeDialer {
    endpoint: NvmeEndpoint,
    paths: Paths,
    /// Those that are always the same.
    tls_keys: Option<Arc<[Psk]>>,
    /// As the namespace was when the volume was opened.
    first: NamespaceInfo,
    seeds: Seeds,
}

impl NvmeDialer {
    /// Connects once by each path to learn what the namespace is like.
    ///
    /// # Errors
    /// As for [`connect`].
    pub fn new(endpoint: NvmeEndpoint) -> Result<NvmeDialer, NvmeConnectError> {
        let mut seen: Option<(NamespaceInfo, Address)> = None;
        let mut lost = None;
        for path in endpoint.paths() {
            match describe_by(&path) {
                Ok(told) => {
                    let namespace = told.namespace;
                    if let Some((first, at)) = &seen {
                        is_same(first, &namespace, at)
                            .map_err(|refused| NvmeConnectError::refused(&path.address, refused))?;
                    }
                    seen = seen.or(Some((namespace, path.address)));
                }
                // It may be there later, and others may be there now.
                Err(error) if !endpoint.further.is_empty() && error.may_pass(NvmeRefused::may_pass) => {
                    warn!("one path less: {error}");
                    lost = lost.or(Some(error));
                }
                Err(error) => return Err(error),
            }
        }
        let silent = || NvmeConnectError::silent(&endpoint.address);
        let (first, _) = seen.ok_or_else(|| lost.unwrap_or_else(silent))?;
        NvmeDialer::of(endpoint, first)
    }

    /// Of a namespace that is known.
    ///
    /// # Errors
    /// If the system gives no random numbers.
    pub fn of(endpoint: NvmeEndpoint, first: NamespaceInfo) -> Result<NvmeDialer, NvmeConnectError> {
        let seeds = Seeds::new().map_err(|error| NvmeConnectError::broken(&endpoint.address, error))?;
        let tls_keys = endpoint.tls_keys().filter(|_| endpoint.generated_keys.is_none());
        let addresses = endpoint.paths().map(|path| path.address).collect();
        let paths = Paths { addresses, policy: endpoint.policy, timeout: endpoint.timeout };
        Ok(NvmeDialer { endpoint, paths, tls_keys, first, seeds })
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
        check_unchanged(&VolumeInfo { size: now.size, ..first }, &now, 1)
    }
}

impl TlsKeys for NvmeDialer {
    fn keys(&self) -> Option<Arc<[Psk]>> {
        match &self.endpoint.generated_keys {
            None => self.tls_keys.clone(),
            Some(generated) => generated.all(),
        }
    }

    fn uses_ktls(&self) -> bool {
        self.endpoint.ktls
    }

    fn forget(&self, keys: &[Psk]) {
        if let Some(generated) = &self.endpoint.generated_keys {
            generated.forget(keys);
        }
    }
}

impl Dialer for NvmeDialer {
    type Session = QueueSession;
    type Control = AdminSession;

    fn paths(&self) -> &Paths {
        &self.paths
    }

    fn tls(&self) -> Option<&dyn TlsKeys> {
        Some(self)
    }

    fn control(&self, is_secured: bool, pool: &Pool, now: Instant) -> Option<AdminSession> {
        let endpoint = &self.endpoint;
        let credentials = endpoint.credentials(is_secured, &self.seeds);
        let config = endpoint.admin(Ask::Use(endpoint.nsid), endpoint.keep_alive, credentials);
        Some(AdminSession::new(config, endpoint.digests, pool.clone(), now))
    }

    fn take_preparation(&self, control: &AdminSession) -> bool {
        self.endpoint.keep_generated(control);
        control.generated().is_some()
    }

    fn session(&self, opening: &Opening<'_, AdminSession>) -> QueueSession {
        let control = opening.control;
        let controller = control.and_then(AdminSession::controller).cloned().unwrap_or_default();
        let queues = self.endpoint.queues.min(controller.io_queues);
        let namespace = control.and_then(|control| control.namespaces().first()).unwrap_or(&self.first);
        let config = QueueConfig {
            names: self.endpoint.names.clone(),
            // With concatenation no control is ready whose connection is not secured, and so is
            // this one.
            credentials: self.endpoint.credentials(true, &self.seeds),
            controller,
            namespace: namespace.clone(),
            queues,
            entries: self.endpoint.entries,
        };
        let (pool, now) = (opening.pool.clone(), opening.now);
        let session = QueueSession::new(config, self.endpoint.digests, pool, now);
        if self.paths.addresses.len() > 1 { session.with_other_paths() } else { session }
    }

    fn set_path_rank(&self, session: &mut QueueSession, rank: PathRank) {
        session.set_path_rank(rank);
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

/// Whether the namespace at the end of a path is the `first`, which was seen by way of `at`.
fn is_same(first: &NamespaceInfo, namespace: &NamespaceInfo, at: &Address) -> Result<(), NvmeRefused> {
    if !first.identity.is_empty() && first.identity == namespace.identity {
        return Ok(());
    }
    let name = |namespace: &NamespaceInfo| match namespace.identity.as_str() {
        "" => "a namespace without any name".to_owned(),
        identity => identity.to_owned(),
    };
    Err(NvmeRefused::AnotherNamespace { namespace: name(namespace), first: name(first), at: at.to_string() })
}

/// A host's name that is made from its identifier (NVMe Base 2.0 §4.5).
#[must_use]
pub fn host_nqn_of(id: &[u8; 16]) -> String {
    format!("nqn.2014-08.org.nvmexpress:uuid:{}", uuid_text(id))
}

/// How often keys are made and forgotten before whoever asks gives up.
const MOST_ATTEMPTS: u32 = 6;
const ASK_TIMEOUT: Duration = Duration::from_secs(10);
/// An admin queue has no payload to speak of.
const CONNECT_POOL: usize = 4 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_is_recognised_by_its_name_and_one_without_never() {
        let at = Address::Tcp(([192, 0, 2, 1], 4420).into());
        let named =
            |identity: &str| NamespaceInfo { identity: identity.to_owned(), ..NamespaceInfo::default() };
        let said = |first: &str, there: &str| {
            is_same(&named(first), &named(there), &at).map_err(|refused| refused.to_string())
        };
        assert_eq!(said("uuid.1", "uuid.1"), Ok(()));
        assert_eq!(
            said("uuid.1", "uuid.2").unwrap_err(),
            "leads to uuid.2, not to uuid.1 as 192.0.2.1:4420 does"
        );
        assert!(said("", "").unwrap_err().starts_with("leads to a namespace without any name"));
    }
}
