//! iSCSI and iSER URLs: connecting to a logical unit, describing it, resets, and discovery.

use super::config::{read_others_secret, warn_if_short};
use crate::failure::Failure;
use crate::protocol::ResetFunction;
use crate::protocol::fabric::{target_advice, with_fabric};
use crate::protocol::reach;
use crate::protocol::units::{unit_json, unit_rows};
use crate::protocol::{Description, DiscoveredExport, Discovery, NOT_QUERIED, Remote};
use blockmux_engine::carrier::connection::Broken;
use blockmux_engine::net::socket::Address;
use blockmux_engine::net::zone;
use blockmux_engine::protocol::iscsi::initiator::{
    self, Datamover, IscsiConnectError, IscsiEndpoint, OverTcp,
};
use blockmux_engine::remote::CurrentSecrets;
use blockmux_proto::iscsi::client::{
    FoundTarget, Function, FunctionResponse, IscsiRefused, TargetAddress, UnitInfo, UnitRefused,
    default_proposal,
};
use blockmux_proto::iscsi::login::chap::{ChapCredentials, ChapSecret};
use blockmux_proto::iscsi::login::operational::{CRC32C, OperationalKey, OperationalParameters};
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::iscsi::node::Chap;
use blockmux_proto::iscsi::url::{HostPort, IscsiUrl, Portals};
use blockmux_proto::scsi::Lun;
use blockmux_volume::Volume;
use blockmux_wire::iscsi::session::LoginStatus;
use serde_json::{Value, json};
use std::io::ErrorKind;
use std::sync::Arc;

/// Parses a URL and reads the files of secrets that it names.
pub(super) fn of_url(text: &str) -> Result<Box<dyn Remote>, Failure> {
    let url: IscsiUrl = reach::read(text)?;
    let chap = chap(&url)?;
    let current_chap = chap.clone().filter(|_| url.secret_file.is_some()).map(|known| {
        let url = url.clone();
        CurrentSecrets::new(known, move || self::chap(&url).ok().flatten())
    });
    let discovery_chap = discovery_chap(&url)?;
    let initiator = url.initiator.clone().unwrap_or_else(own_name);
    for name in url.target.iter().chain([&initiator]) {
        if let Some(violation) = name.violation() {
            tracing::warn!("{url}: `{name}`: {violation}; it is sent as it is");
        }
    }
    Ok(match url.rdma {
        None => Box::new(IscsiRemote { url, initiator, chap, current_chap, discovery_chap, over: OverTcp }),
        Some(rdma) => with_fabric!(rdma, over => {
            Box::new(IscsiRemote { url, initiator, chap, current_chap, discovery_chap, over })
        }),
    })
}

struct IscsiRemote<D> {
    url: IscsiUrl,
    initiator: Name,
    chap: Option<Chap>,
    /// The credentials for the target if their secrets are in files, which may change.
    current_chap: Option<Arc<CurrentSecrets<Chap>>>,
    /// CHAP for discovery, if it differs from that of the target.
    discovery_chap: Option<Chap>,
    over: D,
}

impl<D: Datamover> Remote for IscsiRemote<D> {
    fn open(&self, connections: u32) -> Result<Arc<dyn Volume>, Failure> {
        let target = self.target()?;
        let connections = self.url.connections.unwrap_or(connections);
        let further = self.further(target)?;
        let volume = self.ask(|address| {
            let endpoint = self.endpoint(address, target, connections);
            initiator::connect(
                IscsiEndpoint { further: reach::beside(address, &further), ..endpoint },
                self.over.clone(),
            )
        })?;
        Ok(Arc::new(volume))
    }

    /// A target's name is globally unique; portals are paths to it.
    fn volume_key(&self) -> String {
        let target = self.url.target.as_ref().map_or("", Name::prepared);
        format!("iscsi {target} {}", self.url.lun)
    }

    fn describe(&self) -> Result<Description, Failure> {
        let target = self.target()?;
        let further = self.further(target)?;
        let told = self.ask(|address| {
            let endpoint = self.endpoint(address, target, 1);
            initiator::describe(
                &IscsiEndpoint { further: reach::beside(address, &further), ..endpoint },
                &self.over,
            )
        })?;
        Ok(Description { rows: self.rows(&told), json: self.json(&told), info: told.unit.volume_info() })
    }

    fn discover(&self) -> Result<Discovery, Failure> {
        self.ask(|address| self.list(address))
    }

    fn reset(&self, function: ResetFunction) -> Result<&'static str, Failure> {
        let target = self.target()?;
        let (function, done) = match function {
            ResetFunction::Lun => (Function::LOGICAL_UNIT_RESET, "the logical unit is reset"),
            ResetFunction::Target => (Function::TARGET_WARM_RESET, "the target is reset"),
            ResetFunction::Cold => {
                (Function::TARGET_COLD_RESET, "the target is reset and all its sessions are closed")
            }
            ResetFunction::AbortTaskSet => {
                (Function::ABORT_TASK_SET, "the commands of this session are aborted")
            }
            ResetFunction::ClearTaskSet => {
                (Function::CLEAR_TASK_SET, "the commands of all sessions are aborted")
            }
        };
        let response =
            self.ask(|address| initiator::manage(&self.endpoint(address, target, 1), &self.over, function))?;
        let why = match response {
            FunctionResponse::FUNCTION_COMPLETE => return Ok(done),
            FunctionResponse::LUN_DOES_NOT_EXIST => "it has no such logical unit",
            FunctionResponse::TASK_MANAGEMENT_FUNCTION_NOT_SUPPORTED => "it does not support the function",
            FunctionResponse::FUNCTION_AUTHORIZATION_FAILED => "this initiator is not authorized",
            _ => "it rejected the function",
        };
        let url = &self.url;
        Err(Failure::run(format!("{url}: the target did not reset: {why} ({function}: {response})")))
    }
}

impl<D: Datamover> IscsiRemote<D> {
    fn target(&self) -> Result<&Name, Failure> {
        self.url.target.as_ref().ok_or_else(|| reach::names_no("target", &self.url, "target-name/lun"))
    }

    fn endpoint(&self, address: &Address, target: &Name, connections: u32) -> IscsiEndpoint {
        IscsiEndpoint {
            address: address.clone(),
            further: Vec::new(),
            initiator: self.initiator.clone(),
            target: target.clone(),
            lun: Lun::new(self.url.lun),
            chap: self.chap.clone(),
            current_chap: self.current_chap.clone(),
            proposal: self.proposal(),
            connections,
            reconnect_timeout: self.url.reconnect,
            timeout: reach::timeout(self.url.timeout),
        }
    }

    /// The login parameters to propose. A digest that the URL requests is required.
    fn proposal(&self) -> OperationalParameters {
        let digests = [
            (OperationalKey::HeaderDigest, self.url.header_digest),
            (OperationalKey::DataDigest, self.url.data_digest),
        ];
        let wanted = digests.into_iter().filter(|(_, is_wanted)| *is_wanted);
        let mut proposal = default_proposal()
            .with(OperationalKey::MaxConnections, self.url.max_connections)
            .with(OperationalKey::ErrorRecoveryLevel, self.url.error_recovery_level);
        if self.url.error_recovery_level == 2 {
            // Tasks of a lost connection can only be reassigned while the target retains them.
            proposal = proposal.with(OperationalKey::DefaultTime2Retain, RETAIN_S);
        }
        wanted.fold(proposal, |proposal, (key, _)| proposal.with(key, CRC32C).requiring(key))
    }

    /// The other portals of the URL, each at the first address of its host name. With `paths=all`
    /// also the portals that discovery at the first portal reports.
    fn further(&self, target: &Name) -> Result<Vec<Address>, Failure> {
        let mut found = Vec::new();
        if self.url.all_paths {
            found = self.ask(|address| self.portals(address, target))?;
        }
        reach::further(&self.url, &self.url.portals, found)
    }

    /// Discovers the targets at a portal; also returns how many more there are than the list holds.
    fn targets_at(&self, address: &Address) -> Result<(Vec<FoundTarget>, u64), IscsiConnectError> {
        let chap = self.discovery_chap.as_ref().or(self.chap.as_ref()).cloned();
        initiator::discover(address, &self.initiator, chap, &self.over)
    }

    /// Discovers all portals of the target.
    fn portals(&self, address: &Address, target: &Name) -> Result<Vec<Address>, IscsiConnectError> {
        let (targets, _) = self.targets_at(address)?;
        let is_own = |found: &FoundTarget| Name::new(&found.name).is_ok_and(|name| name == *target);
        let own = targets.into_iter().filter(is_own);
        let places = own.flat_map(|found| found.addresses);
        Ok(places.filter_map(|place| initiator::resolve(&place.parse().ok()?, address)).collect())
    }

    /// Calls `ask` with one address of the portal after another, until one can be reached.
    fn ask<T>(&self, ask: impl FnMut(&Address) -> Result<T, IscsiConnectError>) -> Result<T, Failure> {
        let addresses = reach::addresses(&self.url, &self.url.portals.first)?;
        reach::ask_each(&self.url, &addresses, ask)?.map_err(|error| self.refused(&error))
    }

    fn refused(&self, error: &IscsiConnectError) -> Failure {
        let url = &self.url;
        let advice = match error {
            IscsiConnectError::Broken { .. } | IscsiConnectError::Silent { .. } => {
                let what = if url.rdma.is_some() { "iSER" } else { "iSCSI" };
                match target_advice(what, url.rdma, error) {
                    Some(advice) => advice,
                    None => return Failure::request(format!("{url}: {error}")),
                }
            }
            IscsiConnectError::Refused { refused, .. } => match refused {
                IscsiRefused::Unit(UnitRefused::DifferentUnit { .. }) => {
                    "give only portals of one target".to_owned()
                }
                IscsiRefused::Login(LoginStatus::NOT_FOUND | LoginStatus::TARGET_REMOVED)
                | IscsiRefused::Unit(_) => {
                    format!("`blockmux discover '{}'` lists its targets", url.portal())
                }
                IscsiRefused::Login(LoginStatus::AUTHENTICATION_FAILURE)
                | IscsiRefused::NoCommonAuthMethod
                    if url.user.is_none() =>
                {
                    "give a user, as user@host and ?secret_file=PATH".to_owned()
                }
                IscsiRefused::Login(LoginStatus::AUTHENTICATION_FAILURE) | IscsiRefused::ChapResponse => {
                    let mutual = match url.mutual_user {
                        Some(_) => ", and that the target is configured for mutual CHAP",
                        None => "",
                    };
                    format!("check the user and the secret{mutual}")
                }
                IscsiRefused::MutualAuthFailed => "check mutual_user and mutual_secret_file".to_owned(),
                IscsiRefused::Login(LoginStatus::AUTHORIZATION_FAILURE) => {
                    format!(
                        "add {} to the target's ACL, or this machine's address to its `allow` list, or give another \
                         ?initiator=NAME",
                        self.initiator
                    )
                }
                IscsiRefused::Login(LoginStatus::INITIATOR_ERROR | LoginStatus::MISSING_PARAMETER)
                    if url.rdma.is_none() =>
                {
                    "the target may require digests or refuse them: try with or without \
                     ?header_digest=on&data_digest=on"
                        .to_owned()
                }
                IscsiRefused::Moved { .. } | IscsiRefused::BadRedirect { .. } => {
                    "ask the target's administrator for its address".to_owned()
                }
                _ => "ask the target's administrator".to_owned(),
            },
        };
        Failure::request(format!("{url}: {error}; {advice}"))
    }

    fn rows(&self, described: &initiator::IscsiDescription) -> Vec<(&'static str, String)> {
        let target = self.url.target.as_ref().map(Name::to_string).unwrap_or_default();
        let mut rows = unit_rows(target, self.url.lun, &described.unit);
        rows.push(("session", session(&described.parameters)));
        rows
    }

    fn json(&self, described: &initiator::IscsiDescription) -> Value {
        let initiator::IscsiDescription { unit, parameters } = described;
        let protocol = if self.url.rdma.is_some() { "iser" } else { "iscsi" };
        let target = self.url.target.as_ref().map(Name::as_str);
        let mut json = unit_json((self.url.to_string(), protocol), target, self.url.lun, unit);
        let session = json!({
            "header_digest": parameters.is_on(OperationalKey::HeaderDigest),
            "data_digest": parameters.is_on(OperationalKey::DataDigest),
            "immediate_data": parameters.is_on(OperationalKey::ImmediateData),
            "initial_r2t": parameters.is_on(OperationalKey::InitialR2T),
            "first_burst": parameters.get(OperationalKey::FirstBurstLength),
            "max_burst": parameters.get(OperationalKey::MaxBurstLength),
            "max_send_segment": parameters.max_send_data_segment_length(),
            "max_connections": parameters.get(OperationalKey::MaxConnections),
            "error_recovery_level": parameters.get(OperationalKey::ErrorRecoveryLevel),
        });
        for (key, value) in session.as_object().into_iter().flatten() {
            json[key] = value.clone();
        }
        json
    }

    /// Lists the logical units of all targets at the portal.
    fn list(&self, address: &Address) -> Result<Discovery, IscsiConnectError> {
        let (targets, mut left_out) = self.targets_at(address)?;
        let names: Vec<_> = targets.iter().filter_map(|target| Name::new(&target.name).ok()).collect();
        reach::warn_of_names(names.iter().filter_map(|name| Some((name.as_str(), name.violation()?))));
        let mut exports = Vec::new();
        let mut is_silent = false;
        for target in &targets {
            let name = match Name::new(&target.name) {
                Ok(name) => name,
                Err(error) => {
                    tracing::warn!("the server lists a target that has no usable name: {error}");
                    left_out += 1;
                    continue;
                }
            };
            let portals = Portals::one(self.portal_of(address, target));
            let url = IscsiUrl { target: Some(name.clone()), lun: 0, portals, ..self.url.clone() };
            if url.portals.first != self.url.portals.first {
                exports.push(DiscoveredExport { description: NOT_QUERIED.to_owned(), ..found(&url, None) });
                continue;
            }
            // After a timeout the others would time out as well.
            if is_silent {
                exports.push(found(&url, None));
                continue;
            }
            match self.units(address, &name, &url) {
                Ok(units) => exports.extend(units),
                Err(error) => {
                    let requires_chap = requires_chap(&error);
                    if !requires_chap {
                        tracing::warn!("target {name}: {error}");
                    }
                    is_silent = is_no_answer(&error);
                    let description =
                        if requires_chap { self.authentication_required() } else { "" }.to_owned();
                    exports.push(DiscoveredExport { description, ..found(&url, None) });
                }
            }
        }
        Ok(Discovery { url: self.url.portal().to_string(), exports, left_out })
    }

    /// The description of a target that requires authentication.
    fn authentication_required(&self) -> &'static str {
        match self.chap {
            None => "requires a user and a secret",
            Some(_) => "requires another user or secret",
        }
    }

    /// The disks among a target's logical units.
    fn units(
        &self,
        address: &Address,
        name: &Name,
        url: &IscsiUrl,
    ) -> Result<Vec<DiscoveredExport>, IscsiConnectError> {
        let endpoint = self.endpoint(address, name, 1);
        let mut units = Vec::new();
        for lun in initiator::luns(&IscsiEndpoint { lun: Lun::new(0), ..endpoint.clone() }, &self.over)? {
            let Some(number) = lun.number() else { continue };
            let url = IscsiUrl { lun: number, ..url.clone() };
            match initiator::describe(&IscsiEndpoint { lun, ..endpoint.clone() }, &self.over) {
                Ok(told) => units.push(found(&url, Some(&told.unit))),
                // Some targets have a storage controller at LUN 0.
                Err(IscsiConnectError::Refused { refused: IscsiRefused::Unit(refused), .. }) => {
                    tracing::debug!("target {name}: {refused}");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(units)
    }

    /// The portal of a discovered target: this portal, if it is among the target's addresses or the
    /// target has none.
    fn portal_of(&self, address: &Address, target: &FoundTarget) -> HostPort {
        let places: Vec<TargetAddress> =
            target.addresses.iter().filter_map(|place| place.parse().ok()).collect();
        let named = |place: &TargetAddress| {
            let ip = zone::answered_ip(&place.host)?;
            Some(address.complete((ip, place.port).into()))
        };
        let is_here = |place: &TargetAddress| named(place).map(Address::Tcp).as_ref() == Some(address);
        match places.first().filter(|_| !places.iter().any(is_here)) {
            None => self.url.portals.first.clone(),
            Some(place) => {
                let host = named(place).map_or_else(|| place.host.clone(), |ip| zone::host_text(&ip));
                (host, place.port)
            }
        }
    }
}

fn found(url: &IscsiUrl, unit: Option<&UnitInfo>) -> DiscoveredExport {
    let description = unit.map(|unit| format!("{} {}", unit.vendor, unit.product).trim().to_owned());
    DiscoveredExport {
        name: url.target.as_ref().map(|target| format!("{target}/{}", url.lun)).unwrap_or_default(),
        url: url.to_string(),
        description: description.unwrap_or_default(),
        size: unit.map(UnitInfo::size),
    }
}

/// Whether the login failed because the target requires authentication or other credentials.
fn requires_chap(error: &IscsiConnectError) -> bool {
    let IscsiConnectError::Refused { refused, .. } = error else { return false };
    matches!(
        refused,
        IscsiRefused::Login(LoginStatus::AUTHENTICATION_FAILURE)
            | IscsiRefused::ChapResponse
            | IscsiRefused::NoCommonAuthMethod
    )
}

/// Whether the target did not answer in time.
fn is_no_answer(error: &IscsiConnectError) -> bool {
    matches!(error, IscsiConnectError::Broken { broken: Broken::Socket(error), .. }
        if error.kind() == ErrorKind::TimedOut)
}

fn session(parameters: &OperationalParameters) -> String {
    let digest = |key| if parameters.is_on(key) { "CRC32C" } else { "none" };
    let (header, data) = (digest(OperationalKey::HeaderDigest), digest(OperationalKey::DataDigest));
    let (first, burst) =
        (parameters.get(OperationalKey::FirstBurstLength), parameters.get(OperationalKey::MaxBurstLength));
    let (most, level) =
        (parameters.get(OperationalKey::MaxConnections), parameters.get(OperationalKey::ErrorRecoveryLevel));
    format!(
        "header digest {header}, data digest {data}, first burst {first}, longest burst {burst}, \
         connections {most}, error recovery level {level}"
    )
}

/// CHAP for the target, from the URL; `None` without a user.
fn chap(url: &IscsiUrl) -> Result<Option<Chap>, Failure> {
    let Some(user) = &url.user else { return Ok(None) };
    let own = match (&url.password, &url.secret_file) {
        (Some(password), _) => {
            warn_if_short(&url.to_string(), password);
            password.clone()
        }
        (None, Some(path)) => read_others_secret(path)?,
        (None, None) => return Ok(None),
    };
    let target = match (&url.mutual_user, &url.mutual_secret_file) {
        (Some(name), Some(path)) => {
            let secret = read_others_secret(path)?;
            if secret == own {
                // RFC 7143 §9.2.1 forbids equal secrets: either side could make the other compute
                // its response.
                return Err(Failure::request(format!(
                    "{url}: both secrets are the same; the target must have another secret"
                )));
            }
            Some(credentials(url, name, secret)?)
        }
        _ => None,
    };
    let initiator = credentials(url, user, own)?;
    Ok(Some(Chap { initiator, target, algorithms: url.chap_a.clone() }))
}

/// CHAP for discovery only, from the URL.
fn discovery_chap(url: &IscsiUrl) -> Result<Option<Chap>, Failure> {
    let Some((user, path)) = url.discovery_user.as_ref().zip(url.discovery_secret_file.as_ref()) else {
        return Ok(None);
    };
    let initiator = credentials(url, user, read_others_secret(path)?)?;
    Ok(Some(Chap { initiator, target: None, algorithms: url.chap_a.clone() }))
}

fn credentials(url: &IscsiUrl, name: &str, secret: ChapSecret) -> Result<ChapCredentials, Failure> {
    ChapCredentials::new(name, secret)
        .ok_or_else(|| Failure::request(format!("{url}: user `{name}`: must have 1 to 255 bytes")))
}

/// The default initiator name of this machine.
fn own_name() -> Name {
    let uname = rustix::system::uname();
    let host = uname.nodename().to_string_lossy().to_lowercase();
    let fits = |letter: char| letter.is_ascii_alphanumeric() || letter == '.';
    let host: String = host.chars().map(|letter| if fits(letter) { letter } else { '-' }).take(64).collect();
    Name::new(&format!("{OWN_NAME}{host}")).expect("only allowed characters are used")
}

/// Proposed DefaultTime2Retain, in seconds.
const RETAIN_S: u32 = 20;
/// Prefix of the default initiator name.
const OWN_NAME: &str = "iqn.2026-11.blockmux.initiator:";
