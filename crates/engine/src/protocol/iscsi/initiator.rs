//! The iSCSI initiator: connecting to logical units over TCP or RDMA.
//!
//! The first login offers every CHAP algorithm that the endpoint names. If the target rejects that,
//! another login offers MD5 alone: old targets know no other algorithm, or give the others
//! different numbers.
//!
//! Login redirection is followed up to four times in a row. Host names are resolved only when the
//! volume is opened, because resolving would block a core: a link follows redirections to
//! addresses, and to host names that were resolved then.
//!
//! Several portals may lead to one unit, which is recognised by its designator and serial number. A
//! portal that leads to another unit is refused; one that is down when the volume is opened may
//! come up later.

use super::datamover::IscsiSetup;
pub use super::datamover::{Datamover, OverTcp};
use crate::carrier::blocking::{self, FirstConnection, LoginConnection, run_retried};
use crate::carrier::connection::Broken;
use crate::fabric::Setup;
use crate::net::socket::Address;
use crate::net::zone;
use crate::protocol::scsi_unit::{LOG_IN_POOL, LOG_IN_TIMEOUT, MANAGE_TIMEOUT, check_unit, first_unit};
use crate::remote::redirections::Redirections;
use crate::remote::seeds::Seeds;
use crate::remote::{CurrentSecrets, Dialer, Opening, Paths, Policy, Redirection, RemoteVolume};
use crate::sys;
use blockmux_proto::driver::session::{NoControl, RetryRules};
use blockmux_proto::driver::transport::TransportInfo;
use blockmux_proto::iscsi::client::{
    BurstSize, FoundTarget, Function, FunctionResponse, IscsiDiscoverySession, IscsiInitiatorConfig,
    IscsiInitiatorSession, IscsiRefused, LoginStatus, SessionPurpose, TargetAddress, UnitInfo,
};
use blockmux_proto::iscsi::login::chap::ChapAlgorithm;
use blockmux_proto::iscsi::login::operational::OperationalParameters;
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::iscsi::node::Chap;
use blockmux_proto::scsi::Lun;
use blockmux_volume::Pool;
use std::net::ToSocketAddrs;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Address and login parameters of one logical unit.
#[derive(Clone, Debug)]
pub struct IscsiEndpoint {
    /// The portal.
    pub address: Address,
    /// Other portals of the same unit, each a path of its own.
    pub further: Vec<Address>,
    /// Our iSCSI name.
    pub initiator: Name,
    /// The target's iSCSI name.
    pub target: Name,
    /// The logical unit number.
    pub lun: Lun,
    /// CHAP credentials, if any.
    pub chap: Option<Chap>,
    /// CHAP credentials whose secrets may change while the volume is open, if there are any.
    pub current_chap: Option<Arc<CurrentSecrets<Chap>>>,
    /// Operational parameters to propose.
    pub proposal: OperationalParameters,
    /// Sessions of each channel over each path.
    pub connections: u32,
    /// How long to reconnect before I/O fails.
    pub reconnect_timeout: Duration,
    /// How long a reply may take before the connection counts as lost, as [`Paths::timeout`].
    pub timeout: Option<Duration>,
}

/// Why a logical unit cannot be reached.
pub type IscsiConnectError = blocking::BlockingConnectError<IscsiRefused>;

/// A target's description of one logical unit.
#[derive(Clone, Debug)]
pub struct IscsiDescription {
    /// The unit.
    pub unit: UnitInfo,
    /// The operational parameters that were negotiated.
    pub parameters: OperationalParameters,
}

/// Connects to the unit for I/O; logs in once to query it.
///
/// # Errors
/// If the target cannot be reached or does not have the unit.
pub fn connect<D: Datamover>(
    endpoint: IscsiEndpoint,
    over: D,
) -> Result<RemoteVolume<IscsiDialer<D>, D::Host>, IscsiConnectError> {
    let dialer = IscsiDialer::new(endpoint, over)?;
    let (connections, reconnect_timeout) = (dialer.endpoint.connections, dialer.endpoint.reconnect_timeout);
    let (info, designator) = (dialer.first.volume_info(), dialer.first.designator.clone());
    Ok(RemoteVolume::new(dialer, info, connections, reconnect_timeout).with_designator(designator))
}

/// Queries the description of one unit.
///
/// # Errors
/// As for [`connect`].
pub fn describe(
    endpoint: &IscsiEndpoint,
    over: &impl Datamover,
) -> Result<IscsiDescription, IscsiConnectError> {
    let described = |path| LoginOutcome::to(&path, over)?.description();
    let first = blocking::first_answer(endpoint.paths().map(described));
    first.unwrap_or_else(|| Err(IscsiConnectError::silent(&endpoint.address)))
}

/// Lists the logical units of a target; the endpoint's own LUN need not exist.
///
/// # Errors
/// If the target cannot be reached or refuses the login.
pub fn luns(endpoint: &IscsiEndpoint, over: &impl Datamover) -> Result<Vec<Lun>, IscsiConnectError> {
    let answer = LoginOutcome::to(endpoint, over)?;
    match answer.iscsi().refused() {
        Some(refused) if !matches!(refused, IscsiRefused::Unit(_)) => {
            Err(IscsiConnectError::refused(answer.address(), refused.clone()))
        }
        _ => Ok(answer.iscsi().luns().to_vec()),
    }
}

/// Sends a task management function over a session of its own and returns the response.
///
/// # Errors
/// If the target cannot be reached, refuses the login, or does not respond.
pub fn manage(
    endpoint: &IscsiEndpoint,
    over: &impl Datamover,
    function: Function,
) -> Result<FunctionResponse, IscsiConnectError> {
    let answer = LoginOutcome::to_mode(endpoint, over, SessionPurpose::Manage(function))?;
    if let Some(response) = answer.iscsi().function_response() {
        return Ok(response);
    }
    let refused = answer.iscsi().refused().cloned();
    Err(match refused {
        Some(refused) => IscsiConnectError::refused(answer.address(), refused),
        None => IscsiConnectError::silent(answer.address()),
    })
}

/// Lists the targets of a portal (SendTargets); also returns the number of targets that the list
/// leaves out.
///
/// # Errors
/// If the portal cannot be reached or refuses discovery.
pub fn discover<D: Datamover>(
    address: &Address,
    initiator: &Name,
    chap: Option<Chap>,
    over: &D,
) -> Result<(Vec<FoundTarget>, u64), IscsiConnectError> {
    let random = IscsiRandomness::new(address)?;
    let discover = |chap: Option<Chap>| {
        let open = |transport| {
            let with = random.with(Pool::new(LOG_IN_POOL), transport, Instant::now());
            over.discovery(initiator.clone(), chap.clone(), random.isid(0), with)
        };
        let is_over = |session: &D::Discovery| IscsiDiscoverySession::is_over(D::found(session));
        let run = |connection: LoginConnection<'_>, session: &mut D::Discovery| {
            connection.run(None, session, LOG_IN_TIMEOUT, is_over)
        };
        let (session, ran) =
            run_retried::<D::Host, _>(address, open, run, |closed| over.retries_discovery(closed));
        if D::found(&session).refused().is_none() {
            ran.map_err(|broken| IscsiConnectError::broken(address, broken))?;
        }
        Ok(session)
    };
    let refused = |session: &D::Discovery| D::found(session).refused().cloned();
    let mut session = try_algorithms(chap.clone(), discover, refused)?.0;
    // A portal that authenticates initiators in discovery may have no secret to prove itself.
    let one_way = chap.filter(|chap| chap.target.is_some()).map(|chap| Chap { target: None, ..chap });
    if one_way.is_some() && refused(&session).is_some_and(|refused| refused.is_about_chap()) {
        session = try_algorithms(one_way, discover, refused)?.0;
    }
    let found = D::found(&session);
    match found.refused() {
        Some(refused) => Err(IscsiConnectError::refused(address, refused.clone())),
        None => Ok((found.targets().to_vec(), found.left_out())),
    }
}

/// Result of one login, after redirections; it may be a refusal.
struct LoginOutcome<D: Datamover> {
    session: D::Session,
    /// The CHAP credentials that were used.
    chap: Option<Chap>,
    redirections: Redirections,
    /// Host names in redirections, with their resolved addresses.
    names: Vec<(TargetAddress, Address)>,
}

impl<D: Datamover> LoginOutcome<D> {
    fn to(endpoint: &IscsiEndpoint, over: &D) -> Result<LoginOutcome<D>, IscsiConnectError> {
        LoginOutcome::to_mode(endpoint, over, SessionPurpose::Describe)
    }

    fn to_mode(
        endpoint: &IscsiEndpoint,
        over: &D,
        purpose: SessionPurpose,
    ) -> Result<LoginOutcome<D>, IscsiConnectError> {
        let mut redirections = Redirections::from(endpoint.address.clone());
        let mut names = Vec::new();
        loop {
            let from = redirections.address().clone();
            let (session, chap) =
                query(&IscsiEndpoint { address: from.clone(), ..endpoint.clone() }, over, purpose)?;
            let Some(IscsiRefused::Moved { address: to, permanent }) = D::iscsi(&session).refused() else {
                redirections.settle();
                return Ok(LoginOutcome { session, chap, redirections, names });
            };
            let lost = |problem| {
                let refused = IscsiRefused::BadRedirect { from: from.to_string(), to: to.clone(), problem };
                IscsiConnectError::refused(&from, refused)
            };
            let place: TargetAddress = to.parse().map_err(lost)?;
            let address = resolve(&place, &from).ok_or_else(|| lost("a host that cannot be found"))?;
            names.push((place, address.clone()));
            redirections.follow(Redirection { address, is_permanent: *permanent }).map_err(lost)?;
        }
    }

    fn address(&self) -> &Address {
        self.redirections.address()
    }

    fn iscsi(&self) -> &IscsiInitiatorSession {
        D::iscsi(&self.session)
    }

    fn description(&self) -> Result<IscsiDescription, IscsiConnectError> {
        let (address, session) = (self.address(), self.iscsi());
        if let Some(refused) = session.refused() {
            return Err(IscsiConnectError::refused(address, refused.clone()));
        }
        let described = session.unit().cloned().zip(session.parameters().copied());
        let (unit, parameters) = described.ok_or_else(|| IscsiConnectError::silent(address))?;
        Ok(IscsiDescription { unit, parameters })
    }
}

/// The address that a target names in an answer to a connection to `asked`; blocks to resolve a
/// host name.
#[must_use]
pub fn resolve(place: &TargetAddress, asked: &Address) -> Option<Address> {
    let named = match zone::answered_ip(&place.host) {
        Some(ip) => (ip, place.port).into(),
        None => (place.host.as_str(), place.port).to_socket_addrs().ok()?.next()?,
    };
    Some(Address::Tcp(asked.complete(named)))
}

/// Logs in at one address; also returns the CHAP credentials that were used.
fn query<D: Datamover>(
    endpoint: &IscsiEndpoint,
    over: &D,
    purpose: SessionPurpose,
) -> Result<(D::Session, Option<Chap>), IscsiConnectError> {
    let ask = |chap| ask_once(&IscsiEndpoint { chap, ..endpoint.clone() }, over, purpose);
    try_algorithms(endpoint.chap.clone(), ask, |session| D::iscsi(session).refused().cloned())
}

/// Runs one blocking session with one set of CHAP credentials.
fn ask_once<D: Datamover>(
    endpoint: &IscsiEndpoint,
    over: &D,
    purpose: SessionPurpose,
) -> Result<D::Session, IscsiConnectError> {
    let address = &endpoint.address;
    let random = IscsiRandomness::new(address)?;
    let open = |transport| {
        let with = random.with(Pool::new(LOG_IN_POOL), transport, Instant::now());
        over.session(endpoint.config(purpose, random.isid(0)), RetryRules::default(), with)
    };
    let is_over = |session: &FirstConnection<'_, D::Session>| D::iscsi(session.0).is_over();
    let timeout = if purpose == SessionPurpose::Describe { LOG_IN_TIMEOUT } else { MANAGE_TIMEOUT };
    let run = |connection: LoginConnection<'_>, session: &mut D::Session| {
        connection.run(None, &mut FirstConnection(session), timeout, is_over)
    };
    let (session, ran) = run_retried::<D::Host, _>(address, open, run, |closed| over.retries(closed));
    let described = D::iscsi(&session);
    match ran {
        // Only the logout failed.
        Err(_)
            if described.unit().is_some()
                || described.refused().is_some()
                || described.function_response().is_some() =>
        {
            Ok(session)
        }
        Err(broken) => Err(IscsiConnectError::broken(address, broken)),
        Ok(()) => Ok(session),
    }
}

/// Runs a session with these CHAP credentials. If the target refuses them before it has chosen an
/// algorithm, and MD5 is one of several, runs a second one that offers MD5 alone: some targets
/// understand no list. Also returns the credentials of the last session.
fn try_algorithms<S>(
    chap: Option<Chap>,
    run: impl Fn(Option<Chap>) -> Result<S, IscsiConnectError>,
    refused: impl Fn(&S) -> Option<IscsiRefused>,
) -> Result<(S, Option<Chap>), IscsiConnectError> {
    let session = run(chap.clone())?;
    let has_others =
        |chap: &&Chap| chap.algorithms.len() > 1 && chap.algorithms.contains(&ChapAlgorithm::Md5);
    let plain = chap.as_ref().filter(has_others);
    match (plain, refused(&session)) {
        (Some(plain), Some(refused)) if refused.is_about_chap() && refused != IscsiRefused::ChapResponse => {
            let plain = Some(Chap { algorithms: vec![ChapAlgorithm::Md5], ..plain.clone() });
            Ok((run(plain.clone())?, plain))
        }
        _ => Ok((session, chap)),
    }
}

impl IscsiEndpoint {
    /// One endpoint for each portal, with that portal alone.
    fn paths(&self) -> impl Iterator<Item = IscsiEndpoint> {
        std::iter::once(&self.address).chain(&self.further).map(|address| self.with_address(address))
    }

    fn with_address(&self, address: &Address) -> IscsiEndpoint {
        IscsiEndpoint { address: address.clone(), further: Vec::new(), ..self.clone() }
    }

    fn config(&self, purpose: SessionPurpose, isid: [u8; 6]) -> IscsiInitiatorConfig {
        IscsiInitiatorConfig {
            initiator: self.initiator.clone(),
            target: self.target.clone(),
            lun: self.lun,
            purpose,
            chap: self.chap.clone(),
            proposal: self.proposal,
            isid,
            burst: BurstSize::default(),
        }
    }
}

/// Dials one logical unit.
pub struct IscsiDialer<D: Datamover = OverTcp> {
    endpoint: IscsiEndpoint,
    over: D,
    /// The unit as it was when the volume was opened.
    first: UnitInfo,
    /// The initial address of each path.
    paths: Paths,
    /// Host names in redirections, as resolved when the volume was opened.
    names: Vec<(TargetAddress, Address)>,
    random: IscsiRandomness,
}

impl<D: Datamover> IscsiDialer<D> {
    /// Logs in once to query the unit.
    ///
    /// # Errors
    /// As for [`connect`].
    pub fn new(endpoint: IscsiEndpoint, over: D) -> Result<IscsiDialer<D>, IscsiConnectError> {
        let random = IscsiRandomness::new(&endpoint.address)?;
        let addresses = (&endpoint.address, &endpoint.further[..]);
        let (first, found) = first_unit(addresses, IscsiRefused::is_retryable, |address| {
            let answer = LoginOutcome::to(&endpoint.with_address(address), &over)?;
            let unit = answer.description()?.unit;
            Ok((unit, (answer.chap, answer.redirections.initial.clone(), answer.names)))
        })?;
        let (mut addresses, mut names, mut chap) = (Vec::new(), Vec::new(), None);
        for (path, found) in endpoint.paths().zip(found) {
            let Some((used, initial, more)) = found else {
                addresses.push(path.address);
                continue;
            };
            addresses.push(initial);
            names.extend(more);
            chap = chap.or(Some(used));
        }
        let chap = chap.flatten();
        let paths = Paths { addresses, policy: Policy::RoundRobin, timeout: endpoint.timeout };
        Ok(IscsiDialer { endpoint: IscsiEndpoint { chap, ..endpoint }, over, first, paths, names, random })
    }

    /// The current credentials, with the algorithms that the target has accepted.
    fn chap(&self) -> Option<Chap> {
        let accepted = self.endpoint.chap.as_ref()?;
        let current = self.endpoint.current_chap.as_ref().map(|current| current.get());
        let current = current.as_deref().unwrap_or(accepted).clone();
        Some(Chap { algorithms: accepted.algorithms.clone(), ..current })
    }
}

impl<D: Datamover> Dialer for IscsiDialer<D> {
    type Session = D::Session;
    type Control = NoControl;

    fn paths(&self) -> &Paths {
        &self.paths
    }

    fn session(&self, opening: &Opening<'_, NoControl>) -> D::Session {
        let config = self.endpoint.config(SessionPurpose::Use, self.random.isid(opening.link));
        let config = IscsiInitiatorConfig { chap: self.chap(), ..config };
        let with = self.random.with(opening.pool.clone(), opening.transport, opening.now);
        self.over.session(config, self.paths.retries(self.endpoint.reconnect_timeout), with)
    }

    fn check(&self, session: &D::Session) -> Result<(), String> {
        check_unit(&self.first, D::iscsi(session).unit(), self.endpoint.connections)
    }

    fn renews_secrets(&self, session: &D::Session) -> bool {
        let is_about_secrets = matches!(
            D::iscsi(session).refused(),
            Some(
                IscsiRefused::Login(LoginStatus::AUTHENTICATION_FAILURE)
                    | IscsiRefused::ChapResponse
                    | IscsiRefused::MutualAuthFailed
            )
        );
        let secrets = self.endpoint.current_chap.as_ref().filter(|_| is_about_secrets);
        secrets.inspect(|secrets| secrets.read_again()).is_some()
    }

    fn refusal(&self, session: &D::Session) -> Option<String> {
        D::iscsi(session).refused().filter(|refused| !refused.is_retryable()).map(ToString::to_string)
    }

    fn moved(&self, session: &D::Session, from: &Address) -> Option<Result<Redirection, String>> {
        let refused = D::iscsi(session).refused();
        let Some(IscsiRefused::Moved { address: to, permanent }) = refused else { return None };
        let place: TargetAddress = match to.parse() {
            Ok(place) => place,
            Err(problem) => return Some(Err(format!("target redirects to {to}, {problem}"))),
        };
        let known =
            || self.names.iter().find(|(known, _)| (&known.host, known.port) == (&place.host, place.port));
        let found = match zone::answered_ip(&place.host) {
            Some(ip) => Some(Address::Tcp(from.complete((ip, place.port).into()))),
            None => known().map(|(_, address)| address.clone()),
        };
        let lost = || {
            format!("target redirects to {to}, a host name that was not resolved when the volume was opened")
        };
        Some(found.map(|address| Redirection { address, is_permanent: *permanent }).ok_or_else(lost))
    }
}

/// Unpredictable numbers for sessions.
struct IscsiRandomness {
    seeds: Seeds,
    /// Seeds for memory region keys.
    region_seeds: Seeds,
    /// Random part of our ISIDs (RFC 7143 §11.12.5).
    number: [u8; 3],
}

impl IscsiRandomness {
    fn new(address: &Address) -> Result<IscsiRandomness, IscsiConnectError> {
        let broken = |error| IscsiConnectError::broken(address, Broken::Socket(error));
        let (seeds, region_seeds) = (Seeds::new().map_err(broken)?, Seeds::new().map_err(broken)?);
        Ok(IscsiRandomness { seeds, region_seeds, number: sys::random_bytes().map_err(broken)? })
    }

    /// Parameters of one session.
    fn with(&self, pool: Pool, transport: TransportInfo, now: Instant) -> IscsiSetup {
        let connection = Setup { pool, seed: self.region_seeds.next(), transport, now };
        IscsiSetup { connection, seed: self.seeds.next() }
    }

    /// The ISID of a link: type "random", with the link number as qualifier.
    fn isid(&self, link: u32) -> [u8; 6] {
        let ([a, b, c], [.., d, e]) = (self.number, link.to_be_bytes());
        [ISID_RANDOM, a, b, c, d, e]
    }
}

const ISID_RANDOM: u8 = 0b10 << 6;
