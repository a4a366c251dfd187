//! The SRP initiator: connecting to logical units.
//!
//! Each link logs in as an initiator port of its own: 8 bytes that no other link has, then our
//! GUID. A login makes the target end an earlier session of the same port. So a write of a lost
//! session cannot be executed after its link has reconnected, and no link ends the session of
//! another.
//!
//! Several addresses may lead to one unit, which is recognised by its designator and serial number.
//! An address that leads to another unit is refused; one that is down when the volume is opened may
//! come up later.

use crate::carrier::blocking::{self, FirstConnection, LoginConnection, run_retried};
use crate::carrier::connection::Broken;
use crate::fabric::{self, Fabric, Setup, StreamFabric};
use crate::net::socket::Address;
use crate::protocol::scsi_unit::{LOG_IN_POOL, LOG_IN_TIMEOUT, MANAGE_TIMEOUT, check_unit, first_unit};
use crate::remote::seeds::Seeds;
use crate::remote::{Dialer, Opening, Paths, Policy, RemoteVolume};
use crate::sys;
use blockmux_proto::driver::session::{NoControl, RetryRules};
use blockmux_proto::driver::transport::TransportInfo;
use blockmux_proto::scsi::Lun;
use blockmux_proto::srp::client::{
    LoginRejectReason, ResponseCode, SrpInitiatorConfig, SrpInitiatorSession, SrpRefused, SrpSessionMode,
    TaskManagementFunction, UnitInfo,
};
use blockmux_proto::srp::node::SrpPortId;
use blockmux_rdma::Driven;
use blockmux_volume::Pool;
use std::time::{Duration, Instant};

/// Address and login parameters of one logical unit.
#[derive(Clone, Debug)]
pub struct SrpEndpoint<F> {
    /// The target's address.
    pub address: Address,
    /// Other addresses of the same unit, each a path of its own.
    pub further: Vec<Address>,
    /// Last 8 bytes of our initiator port identifiers.
    pub initiator: [u8; 8],
    /// The target port.
    pub target: SrpPortId,
    /// The logical unit number.
    pub lun: Lun,
    /// RDMA channels of each session.
    pub channels: u32,
    /// Whether to request immediate data. If the target's information units are too short for it,
    /// another login does not request it.
    pub immediate_data: bool,
    /// The fabric of its connections.
    pub over: F,
    /// How long to reconnect before I/O fails.
    pub reconnect_timeout: Duration,
    /// How long a reply may take before the connection counts as lost, as [`Paths::timeout`].
    pub timeout: Option<Duration>,
}

/// Why a logical unit cannot be reached.
pub type SrpConnectError = blocking::BlockingConnectError<SrpRefused>;

/// A session with a target port.
type SrpSession<F> = Driven<<F as Fabric>::QueuePair, SrpInitiatorSession>;

/// Connects to the unit for I/O; logs in once to query it.
///
/// # Errors
/// If the target cannot be reached or does not have the unit.
pub fn connect<F: StreamFabric>(
    endpoint: SrpEndpoint<F>,
) -> Result<RemoteVolume<SrpDialer<F>, F::Host>, SrpConnectError> {
    let dialer = SrpDialer::new(endpoint)?;
    let (info, designator) = (dialer.first.volume_info(), dialer.first.designator.clone());
    let reconnect_timeout = dialer.endpoint.reconnect_timeout;
    Ok(RemoteVolume::new(dialer, info, 1, reconnect_timeout).with_designator(designator))
}

/// Queries the description of one unit.
///
/// # Errors
/// As for [`connect`].
pub fn describe<F: StreamFabric>(endpoint: &SrpEndpoint<F>) -> Result<UnitInfo, SrpConnectError> {
    let first = blocking::first_answer(endpoint.paths().map(|mut path| describe_by(&mut path)));
    first.unwrap_or_else(|| Err(SrpConnectError::silent(&endpoint.address)))
}

/// Lists the logical units of a target port; the endpoint's own LUN need not exist.
///
/// # Errors
/// If the target cannot be reached or rejects the login.
pub fn luns<F: StreamFabric>(endpoint: &SrpEndpoint<F>) -> Result<Vec<Lun>, SrpConnectError> {
    let session = run_blocking(&mut endpoint.clone(), SrpSessionMode::Describe)?;
    match session.session().refused() {
        Some(refused) if !matches!(refused, SrpRefused::Unit(_)) => {
            Err(SrpConnectError::refused(&endpoint.address, refused.clone()))
        }
        _ => Ok(session.session().luns().to_vec()),
    }
}

/// Sends a task management function over a session of its own and returns the response.
///
/// # Errors
/// If the target cannot be reached, rejects the login, or does not respond.
pub fn manage<F: StreamFabric>(
    endpoint: &SrpEndpoint<F>,
    function: TaskManagementFunction,
) -> Result<ResponseCode, SrpConnectError> {
    let session = run_blocking(&mut endpoint.clone(), SrpSessionMode::Manage(function))?;
    let described = session.session();
    described.managed().ok_or_else(|| match described.refused() {
        Some(refused) => SrpConnectError::refused(&endpoint.address, refused.clone()),
        None => SrpConnectError::silent(&endpoint.address),
    })
}

/// Queries the description over one path. Sets in `endpoint` what the target supports.
fn describe_by<F: StreamFabric>(endpoint: &mut SrpEndpoint<F>) -> Result<UnitInfo, SrpConnectError> {
    let session = run_blocking(endpoint, SrpSessionMode::Describe)?;
    let described = session.session();
    match described.refused() {
        Some(refused) => Err(SrpConnectError::refused(&endpoint.address, refused.clone())),
        None => described.unit().cloned().ok_or_else(|| SrpConnectError::silent(&endpoint.address)),
    }
}

/// Runs one blocking session. Sets in `endpoint` what the target supports.
fn run_blocking<F: StreamFabric>(
    endpoint: &mut SrpEndpoint<F>,
    mode: SrpSessionMode,
) -> Result<SrpSession<F>, SrpConnectError> {
    loop {
        let address = &endpoint.address;
        let random = SrpRandomness::new(address)?;
        let open = |transport| {
            let config = endpoint.config(mode, random.port(endpoint, 0));
            let setup = random.setup(Pool::new(LOG_IN_POOL), transport, Instant::now());
            endpoint.session(config, RetryRules::default(), setup)
        };
        let is_over = |session: &FirstConnection<'_, SrpSession<F>>| session.0.session().is_over();
        let timeout = if mode == SrpSessionMode::Describe { LOG_IN_TIMEOUT } else { MANAGE_TIMEOUT };
        let run = |connection: LoginConnection<'_>, session: &mut SrpSession<F>| {
            connection.run(None, &mut FirstConnection(session), timeout, is_over)
        };
        let retries = |closed: &SrpSession<F>| endpoint.over.retries(closed.queue_pair());
        let (session, ran) = run_retried::<F::Host, _>(address, open, run, retries);
        let described = session.session();
        let too_large = Some(&SrpRefused::Login(LoginRejectReason::IU_LENGTH_TOO_LARGE));
        if described.refused() == too_large && endpoint.immediate_data {
            endpoint.immediate_data = false;
            continue;
        }
        return match ran {
            // Only the logout failed.
            Err(_)
                if described.unit().is_some()
                    || described.refused().is_some()
                    || described.managed().is_some() =>
            {
                Ok(session)
            }
            Err(broken) => Err(SrpConnectError::broken(address, broken)),
            Ok(()) => Ok(session),
        };
    }
}

impl<F: StreamFabric> SrpEndpoint<F> {
    /// One endpoint for each address, with that address alone.
    fn paths(&self) -> impl Iterator<Item = SrpEndpoint<F>> {
        std::iter::once(&self.address).chain(&self.further).map(|address| self.with_address(address))
    }

    fn with_address(&self, address: &Address) -> SrpEndpoint<F> {
        SrpEndpoint { address: address.clone(), further: Vec::new(), ..self.clone() }
    }

    fn config(&self, mode: SrpSessionMode, initiator: SrpPortId) -> SrpInitiatorConfig {
        let SrpEndpoint { target, lun, channels, immediate_data, .. } = *self;
        SrpInitiatorConfig { initiator, target, lun, mode, channels, immediate_data }
    }

    fn session(&self, config: SrpInitiatorConfig, retries: RetryRules, setup: Setup) -> SrpSession<F> {
        let session = SrpInitiatorSession::new(config, setup.pool.clone(), setup.now);
        fabric::connect_several(&self.over, session.with_retries(retries), setup)
    }
}

/// Dials one logical unit.
pub struct SrpDialer<F> {
    endpoint: SrpEndpoint<F>,
    /// The unit as it was when the volume was opened.
    first: UnitInfo,
    paths: Paths,
    random: SrpRandomness,
}

impl<F: StreamFabric> SrpDialer<F> {
    /// Logs in once over each path to query the unit.
    ///
    /// # Errors
    /// As for [`connect`].
    pub fn new(mut endpoint: SrpEndpoint<F>) -> Result<SrpDialer<F>, SrpConnectError> {
        let addresses = (endpoint.address.clone(), endpoint.further.clone());
        let (first, _) = first_unit((&addresses.0, &addresses.1), SrpRefused::is_retryable, |address| {
            let mut path = endpoint.with_address(address);
            let unit = describe_by(&mut path)?;
            endpoint.immediate_data = path.immediate_data;
            Ok((unit, ()))
        })?;
        SrpDialer::of(endpoint, first)
    }

    /// A dialer for a unit that is known.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub fn of(endpoint: SrpEndpoint<F>, first: UnitInfo) -> Result<SrpDialer<F>, SrpConnectError> {
        let random = SrpRandomness::new(&endpoint.address)?;
        let addresses = endpoint.paths().map(|path| path.address).collect();
        let paths = Paths { addresses, policy: Policy::RoundRobin, timeout: endpoint.timeout };
        Ok(SrpDialer { endpoint, first, paths, random })
    }
}

impl<F: StreamFabric> Dialer for SrpDialer<F> {
    type Session = SrpSession<F>;
    type Control = NoControl;

    fn paths(&self) -> &Paths {
        &self.paths
    }

    fn session(&self, opening: &Opening<'_, NoControl>) -> SrpSession<F> {
        let config =
            self.endpoint.config(SrpSessionMode::Use, self.random.port(&self.endpoint, opening.link));
        let setup = self.random.setup(opening.pool.clone(), opening.transport, opening.now);
        self.endpoint.session(config, self.paths.retries(self.endpoint.reconnect_timeout), setup)
    }

    fn check(&self, session: &SrpSession<F>) -> Result<(), String> {
        check_unit(&self.first, session.session().unit(), 1)
    }

    fn refusal(&self, session: &SrpSession<F>) -> Option<String> {
        session.session().refused().filter(|refused| !refused.is_retryable()).map(ToString::to_string)
    }
}

/// Unpredictable numbers for sessions.
struct SrpRandomness {
    /// Seeds for memory region keys.
    seeds: Seeds,
    /// First 4 bytes of our initiator port identifiers; the link's number follows.
    number: [u8; 4],
}

impl SrpRandomness {
    fn new(address: &Address) -> Result<SrpRandomness, SrpConnectError> {
        let broken = |error| SrpConnectError::broken(address, Broken::Socket(error));
        Ok(SrpRandomness {
            seeds: Seeds::new().map_err(broken)?,
            number: sys::random_bytes().map_err(broken)?,
        })
    }

    fn setup(&self, pool: Pool, transport: TransportInfo, now: Instant) -> Setup {
        Setup { pool, seed: self.seeds.next(), transport, now }
    }

    /// The initiator port of a link.
    fn port<F>(&self, endpoint: &SrpEndpoint<F>, link: u32) -> SrpPortId {
        let ([a, b, c, d], [e, f, g, h]) = (self.number, link.to_be_bytes());
        let mut id = [0; 16];
        id[..8].copy_from_slice(&[a, b, c, d, e, f, g, h]);
        id[8..].copy_from_slice(&endpoint.initiator);
        SrpPortId(id)
    }
}
