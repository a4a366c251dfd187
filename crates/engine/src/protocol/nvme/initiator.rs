//! The NVMe initiator over TCP or RDMA: connecting to namespaces of subsystems.
//!
//! Each channel has an association of its own over each path: an admin queue, which is the link's
//! control session, and I/O queues of its controller, which are the connections of one session. If
//! a queue is lost, all are re-established with another controller, and uncompleted requests are
//! replayed. See decision 14.
//!
//! Several addresses may lead to one namespace, which is recognised by its identifiers. An address
//! that leads to another namespace is refused; one that is down when the volume is opened may come
//! up later.

pub use super::carrier::{NvmeCarrier, NvmeOverTcp};
use super::target::tls_key;
use super::{GeneratedKeys, IdentityOrder};
use crate::carrier::blocking::{self, LoginConnection, run_retried};
use crate::carrier::connection::Broken;
use crate::carrier::tls::{ClientTls, Secure};
use crate::fabric::Setup;
use crate::net::socket::Address;
use crate::remote::seeds::Seeds;
use crate::remote::{CurrentSecrets, Dialer, Opening, Paths, Policy, RemoteVolume, TlsKeys, check_unchanged};
use blockmux_proto::driver::session::PathRank;
use blockmux_proto::fabrics::host::{
    AdminConfig, AdminResults, ControllerInfo, ControllerQuery, FoundSubsystem, Names, NamespaceInfo,
    NvmeRefused, QueueConfig, uuid_text,
};
use blockmux_proto::nvme::auth::psk::{ConfiguredPsk, TlsPsk};
use blockmux_proto::nvme::auth::{Concatenation, HostCredentials, HostSecrets};
use blockmux_tls::{ClientCredentials, Psk, TlsError};
use blockmux_volume::{Pool, VolumeInfo};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::warn;

/// Address and connect parameters of one namespace.
#[derive(Clone, Debug)]
pub struct NvmeEndpoint<C = NvmeOverTcp> {
    /// The subsystem's address.
    pub address: Address,
    /// Other addresses of the same namespace, each a path of its own.
    pub further: Vec<Address>,
    /// How requests are distributed over paths.
    pub policy: Policy,
    /// Host and subsystem NQN.
    pub names: Names,
    /// DH-HMAC-CHAP secrets of host and controller.
    pub secrets: Option<Arc<CurrentSecrets<HostSecrets>>>,
    /// The namespace ID.
    pub nsid: u32,
    /// The transport of its connections.
    pub over: C,
    /// Entries of each I/O queue, 2 to 1,024.
    pub entries: u16,
    /// Keep alive timeout; zero: none.
    pub keep_alive: Duration,
    /// I/O queues of each channel over each path; the controller may grant fewer.
    pub queues: u16,
    /// How long to reconnect before I/O fails.
    pub reconnect_timeout: Duration,
    /// How long a reply may take before the connection counts as lost, as [`Paths::timeout`].
    pub timeout: Option<Duration>,
    /// Configured TLS PSK of every connection; `None`: without TLS.
    pub tls_key: Option<Arc<CurrentSecrets<ConfiguredPsk>>>,
    /// Version of the PSK identity, 0 or 1; `None`: both are offered.
    pub tls_identity: Option<u8>,
    /// Which of both is offered first.
    pub identity_order: Arc<IdentityOrder>,
    /// Whether kTLS is used where possible.
    pub ktls: bool,
    /// Generated keys of secure channel concatenation, which needs `secrets` and no `tls_key`;
    /// `None`: not used.
    pub generated_keys: Option<Arc<GeneratedKeys>>,
}

/// Why a namespace cannot be reached.
pub type NvmeConnectError = blocking::BlockingConnectError<NvmeRefused>;

/// Description of a controller and one of its namespaces.
#[derive(Clone, Debug)]
pub struct NvmeDescription {
    /// The controller.
    pub controller: ControllerInfo,
    /// The namespace.
    pub namespace: NamespaceInfo,
}

/// Connects to the namespace for I/O; connects once to query it.
///
/// # Errors
/// If the subsystem cannot be reached or does not have the namespace.
pub fn connect<C: NvmeCarrier>(
    endpoint: NvmeEndpoint<C>,
) -> Result<RemoteVolume<NvmeDialer<C>, C::Host>, NvmeConnectError> {
    let dialer = NvmeDialer::new(endpoint)?;
    let (info, reconnect_timeout) = (dialer.first.volume_info(), dialer.endpoint.reconnect_timeout);
    let designator = dialer.first.identity.clone();
    Ok(RemoteVolume::new(dialer, info, 1, reconnect_timeout).with_designator(designator))
}

/// Queries the description of one namespace.
///
/// # Errors
/// As for [`connect`].
pub fn describe<C: NvmeCarrier>(endpoint: &NvmeEndpoint<C>) -> Result<NvmeDescription, NvmeConnectError> {
    let first = blocking::first_answer(endpoint.paths().map(|path| describe_by(&path)));
    first.unwrap_or_else(|| Err(NvmeConnectError::silent(&endpoint.address)))
}

/// Queries the description over one path.
fn describe_by<C: NvmeCarrier>(endpoint: &NvmeEndpoint<C>) -> Result<NvmeDescription, NvmeConnectError> {
    let session = query(endpoint, ControllerQuery::Namespace(endpoint.nsid))?;
    let answers = C::answers(&session);
    let described = answers.controller.cloned().zip(answers.namespaces.first().cloned());
    let silent = || NvmeConnectError::silent(&endpoint.address);
    let (controller, namespace) = described.ok_or_else(silent)?;
    Ok(NvmeDescription { controller, namespace })
}

/// Lists the usable namespaces of a subsystem.
///
/// # Errors
/// If the subsystem cannot be reached.
pub fn namespaces<C: NvmeCarrier>(
    endpoint: &NvmeEndpoint<C>,
) -> Result<(ControllerInfo, Vec<NamespaceInfo>), NvmeConnectError> {
    let session = query(endpoint, ControllerQuery::Namespaces)?;
    let answers = C::answers(&session);
    Ok((answers.controller.cloned().unwrap_or_default(), answers.namespaces.to_vec()))
}

/// Reads the log page of a discovery controller; also returns the number of entries that the list
/// leaves out.
///
/// # Errors
/// If the controller cannot be reached or does not answer.
pub fn discover<C: NvmeCarrier>(
    endpoint: &NvmeEndpoint<C>,
) -> Result<(Vec<FoundSubsystem>, u64), NvmeConnectError> {
    let session = query(endpoint, ControllerQuery::Discovery)?;
    let (found, left_out) = C::answers(&session).found;
    Ok((found.to_vec(), left_out))
}

/// Runs one admin queue. Runs another one first if a TLS key must be generated for secure channel
/// concatenation, and another one after a handshake that failed for the key or its identity.
fn query<C: NvmeCarrier>(
    endpoint: &NvmeEndpoint<C>,
    query: ControllerQuery,
) -> Result<C::Admin, NvmeConnectError> {
    let mut attempts = 1;
    loop {
        let keys = endpoint.tls_keys();
        let result = query_over(endpoint, query, keys.as_ref());
        let goes_on = match (&result, &keys) {
            (Ok(session), _) if C::answers(session).generated.is_some() => {
                endpoint.keep_generated(C::answers(session));
                true
            }
            (Err(NvmeConnectError::Broken { broken: Broken::Tls(error), .. }), Some(keys)) => {
                // Both identities of a key have been the first in two attempts.
                endpoint.on_tls_failure(keys, error) && (endpoint.generated_keys.is_some() || attempts < 2)
            }
            _ => false,
        };
        if !goes_on || attempts >= MAX_ATTEMPTS {
            return result;
        }
        attempts += 1;
    }
}

/// Runs one admin queue on one connection, with one of the TLS keys if there are any.
fn query_over<C: NvmeCarrier>(
    endpoint: &NvmeEndpoint<C>,
    query: ControllerQuery,
    keys: Option<&Arc<[Psk]>>,
) -> Result<C::Admin, NvmeConnectError> {
    let (address, over) = (&endpoint.address, &endpoint.over);
    let seeds = Seeds::new().map_err(|error| NvmeConnectError::broken(address, error))?;
    let open = |transport| {
        let config = endpoint.admin(query, Duration::ZERO, endpoint.credentials(keys.is_some(), &seeds));
        let pool = Pool::new(CONNECT_POOL);
        over.admin(config, Setup { pool, seed: seeds.next(), transport, now: Instant::now() })
    };
    let run = |connection: LoginConnection<'_>, session: &mut C::Admin| {
        let is_over = |session: &C::Admin| C::answers(session).is_over;
        connection.run(endpoint.secure(keys)?, session, ASK_TIMEOUT, is_over)
    };
    let (session, ran) = run_retried::<C::Host, _>(address, open, run, |closed| over.retries(closed));
    let answers = C::answers(&session);
    let has_result = answers.controller.is_some() || answers.generated.is_some();
    if let Some(refused) = answers.refused {
        return Err(NvmeConnectError::refused(address, refused.clone()));
    }
    match ran {
        // Only the shutdown failed.
        Err(_) if has_result => Ok(session),
        Err(broken) => Err(NvmeConnectError::broken(address, broken)),
        Ok(()) if !has_result => Err(NvmeConnectError::silent(address)),
        Ok(()) => Ok(session),
    }
}

impl<C: NvmeCarrier> NvmeEndpoint<C> {
    /// One endpoint for each path, with that path alone.
    fn paths(&self) -> impl Iterator<Item = NvmeEndpoint<C>> {
        let addresses = std::iter::once(&self.address).chain(&self.further);
        addresses.map(|address| NvmeEndpoint {
            address: address.clone(),
            further: Vec::new(),
            ..self.clone()
        })
    }

    fn admin(
        &self,
        query: ControllerQuery,
        keep_alive: Duration,
        credentials: Option<HostCredentials>,
    ) -> AdminConfig {
        AdminConfig { names: self.names.clone(), credentials, queues: self.queues, query, keep_alive }
    }

    /// DH-HMAC-CHAP credentials for one queue.
    fn credentials(&self, is_secured: bool, seeds: &Seeds) -> Option<HostCredentials> {
        let secrets = self.secrets.as_ref()?.get();
        let concatenation = match &self.generated_keys {
            None => Concatenation::None,
            Some(_) if is_secured => Concatenation::Done,
            Some(_) => Concatenation::Due,
        };
        Some(HostCredentials { secrets, seed: seeds.next(), concatenation })
    }

    /// Reads the secrets again if the controller refused this host for them.
    fn renews_secrets(&self, refused: Option<&NvmeRefused>) -> bool {
        let is_about_secrets =
            matches!(refused, Some(NvmeRefused::Authentication | NvmeRefused::AuthFailed { .. }));
        let secrets = self.secrets.as_ref().filter(|_| is_about_secrets);
        secrets.inspect(|secrets| secrets.read_again()).is_some()
    }

    /// Stores the key that the session has generated, for the next session.
    fn keep_generated(&self, answers: AdminResults<'_>) {
        if let (Some(key), Some(keys)) = (answers.generated, &self.generated_keys) {
            keys.keep(key, &self.names.host, &self.names.subsystem);
        }
    }

    /// The TLS keys for connections to the subsystem or the discovery controller.
    fn tls_keys(&self) -> Option<Arc<[Psk]>> {
        if let Some(generated) = &self.generated_keys {
            return generated.all();
        }
        let (key, host) = (self.tls_key.as_ref()?.get(), &self.names.host);
        let keys = key.retained(host).tls_psks(host, &self.names.subsystem);
        let is_offered = |key: &&TlsPsk| self.tls_identity.is_none_or(|version| key.version() == version);
        Some(self.identity_order.of(&keys.iter().filter(is_offered).map(tls_key).collect()))
    }

    /// Handles the failure of a connection with these TLS keys. Returns whether the next connection
    /// offers others, or in another order.
    fn on_tls_failure(&self, keys: &[Psk], error: &TlsError) -> bool {
        match (&self.generated_keys, &self.tls_key) {
            (Some(generated), _) => {
                generated.forget(keys);
                true
            }
            (None, Some(key)) => {
                key.read_again();
                self.identity_order.on_failure(keys, error)
            }
            (None, None) => false,
        }
    }

    /// TLS state of a connection for one admin queue. kTLS is not worthwhile for so few records.
    fn secure(&self, keys: Option<&Arc<[Psk]>>) -> Result<Option<Secure>, TlsError> {
        keys.map(|keys| Secure::client(&ClientCredentials::Psks(keys.clone()))).transpose()
    }
}

/// Dials one namespace.
pub struct NvmeDialer<C = NvmeOverTcp> {
    endpoint: NvmeEndpoint<C>,
    paths: Paths,
    /// The namespace as it was when the volume was opened.
    first: NamespaceInfo,
    seeds: Seeds,
}

impl<C: NvmeCarrier> NvmeDialer<C> {
    /// Connects once over each path to query the namespace.
    ///
    /// # Errors
    /// As for [`connect`].
    pub fn new(endpoint: NvmeEndpoint<C>) -> Result<NvmeDialer<C>, NvmeConnectError> {
        let mut seen: Option<(NamespaceInfo, Address)> = None;
        let mut lost = None;
        for path in endpoint.paths() {
            match describe_by(&path) {
                Ok(NvmeDescription { namespace, .. }) => {
                    if let Some((first, at)) = &seen {
                        is_same(first, &namespace, at)
                            .map_err(|refused| NvmeConnectError::refused(&path.address, refused))?;
                    }
                    seen = seen.or(Some((namespace, path.address)));
                }
                // The address may come up later, and others may be up now.
                Err(error)
                    if !endpoint.further.is_empty() && error.is_retryable(NvmeRefused::is_retryable) =>
                {
                    warn!("a path cannot be used: {error}");
                    lost = lost.or(Some(error));
                }
                Err(error) => return Err(error),
            }
        }
        let silent = || NvmeConnectError::silent(&endpoint.address);
        let (first, _) = seen.ok_or_else(|| lost.unwrap_or_else(silent))?;
        NvmeDialer::of(endpoint, first)
    }

    /// A dialer for a namespace that is known.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub fn of(endpoint: NvmeEndpoint<C>, first: NamespaceInfo) -> Result<NvmeDialer<C>, NvmeConnectError> {
        let seeds = Seeds::new().map_err(|error| NvmeConnectError::broken(&endpoint.address, error))?;
        let addresses = endpoint.paths().map(|path| path.address).collect();
        let paths = Paths { addresses, policy: endpoint.policy, timeout: endpoint.timeout };
        Ok(NvmeDialer { endpoint, paths, first, seeds })
    }

    /// Checks that a namespace is the expected one.
    fn check_namespace(&self, now: &NamespaceInfo) -> Result<(), String> {
        if now.identity != self.first.identity {
            let (now, first) = (&now.identity, &self.first.identity);
            return Err(format!("its namespace ID leads to another namespace now: {now} instead of {first}"));
        }
        // The size may differ; resizes are handled elsewhere.
        let (first, now) = (self.first.volume_info(), now.volume_info());
        check_unchanged(&VolumeInfo { size: now.size, ..first }, &now, 1)
    }
}

impl<C: NvmeCarrier> TlsKeys for NvmeDialer<C> {
    fn keys(&self) -> Option<ClientTls> {
        let credentials = ClientCredentials::Psks(self.endpoint.tls_keys()?);
        Some(ClientTls { credentials, ktls: self.endpoint.ktls, is_on_demand: false })
    }

    fn on_failure(&self, rejected: &ClientTls, error: &TlsError) {
        if let ClientCredentials::Psks(keys) = &rejected.credentials {
            self.endpoint.on_tls_failure(keys, error);
        }
    }
}

impl<C: NvmeCarrier> Dialer for NvmeDialer<C> {
    type Session = C::Queues;
    type Control = C::Admin;

    fn paths(&self) -> &Paths {
        &self.paths
    }

    fn tls(&self) -> Option<&dyn TlsKeys> {
        Some(self)
    }

    fn control(&self, is_secured: bool, opening: &Opening<'_, C::Admin>) -> Option<C::Admin> {
        let endpoint = &self.endpoint;
        let credentials = endpoint.credentials(is_secured, &self.seeds);
        let config = endpoint.admin(ControllerQuery::Use(endpoint.nsid), endpoint.keep_alive, credentials);
        let with = Setup {
            pool: opening.pool.clone(),
            seed: self.seeds.next(),
            transport: opening.transport,
            now: opening.now,
        };
        Some(endpoint.over.admin(config, with))
    }

    fn take_preparation(&self, control: &C::Admin) -> bool {
        let answers = C::answers(control);
        self.endpoint.keep_generated(answers);
        answers.generated.is_some()
    }

    fn session(&self, opening: &Opening<'_, C::Admin>) -> C::Queues {
        let control = opening.control.map(C::answers);
        let controller = control.and_then(|control| control.controller).cloned().unwrap_or_default();
        let queues = self.endpoint.queues.min(controller.io_queues);
        let namespace = control.and_then(|control| control.namespaces.first()).unwrap_or(&self.first);
        let config = QueueConfig {
            names: self.endpoint.names.clone(),
            // With concatenation, an I/O queue is only opened with TLS, as its control session was.
            credentials: self.endpoint.credentials(true, &self.seeds),
            controller,
            namespace: namespace.clone(),
            queues,
            entries: self.endpoint.entries,
        };
        let with = Setup {
            pool: opening.pool.clone(),
            seed: self.seeds.next(),
            transport: opening.transport,
            now: opening.now,
        };
        self.endpoint.over.queues(config, self.paths.retries(self.endpoint.reconnect_timeout), with)
    }

    fn set_path_rank(&self, session: &mut C::Queues, rank: PathRank) {
        C::set_path_rank(session, rank);
    }

    fn check(&self, _session: &C::Queues) -> Result<(), String> {
        // The control session has found and checked the namespace.
        Ok(())
    }

    fn refusal(&self, session: &C::Queues) -> Option<String> {
        C::refused(session).filter(|refused| !refused.is_retryable()).map(ToString::to_string)
    }

    fn renews_control_secrets(&self, control: &C::Admin) -> bool {
        self.endpoint.renews_secrets(C::answers(control).refused)
    }

    fn renews_secrets(&self, session: &C::Queues) -> bool {
        self.endpoint.renews_secrets(C::refused(session))
    }

    fn control_refusal(&self, control: &C::Admin) -> Option<String> {
        let answers = C::answers(control);
        if let Some(refused) = answers.refused {
            return (!refused.is_retryable()).then(|| refused.to_string());
        }
        let namespace = answers.controller.and_then(|_| answers.namespaces.first())?;
        self.check_namespace(namespace).err()
    }
}

/// Checks that the namespace at the end of a path is `first`, which was seen at the address `at`.
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

/// A host NQN made from a host identifier (NVMe Base 2.0 §4.5).
#[must_use]
pub fn host_nqn_of(id: &[u8; 16]) -> String {
    format!("nqn.2014-08.org.nvmexpress:uuid:{}", uuid_text(id))
}

/// Maximum number of attempts to generate a key that the target accepts.
const MAX_ATTEMPTS: u32 = 6;
const ASK_TIMEOUT: Duration = Duration::from_secs(10);
/// Pool of an admin session, in bytes.
const CONNECT_POOL: usize = 4 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_is_recognised_by_its_name_and_an_unnamed_one_never_is() {
        let at = Address::Tcp(([192, 0, 2, 1], 4420).into());
        let named =
            |identity: &str| NamespaceInfo { identity: identity.to_owned(), ..NamespaceInfo::default() };
        let check = |first: &str, there: &str| {
            is_same(&named(first), &named(there), &at).map_err(|refused| refused.to_string())
        };
        assert_eq!(check("uuid.1", "uuid.1"), Ok(()));
        assert_eq!(
            check("uuid.1", "uuid.2").unwrap_err(),
            "leads to uuid.2, not to uuid.1 as 192.0.2.1:4420 does"
        );
        assert!(check("", "").unwrap_err().starts_with("leads to a namespace without any name"));
    }
}
