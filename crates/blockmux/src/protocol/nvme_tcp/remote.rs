//! NVMe/TCP and NVMe/RDMA URLs: connecting to a namespace, describing it, and discovery.

use super::hosts::{NO_TLS_IDENTITY, read_secret, read_tls_key};
use super::referrals::{self, DiscoveryLog, address_of};
use crate::failure::Failure;
use crate::output::both_sizes;
use crate::process::machine::machine_id;
use crate::protocol::fabric::{target_advice, with_fabric};
use crate::protocol::reach;
use crate::protocol::{Description, DiscoveredExport, Discovery, NOT_QUERIED, Remote};
use blockmux_engine::carrier::connection::Broken;
use blockmux_engine::net::socket::Address;
use blockmux_engine::net::zone;
use blockmux_engine::protocol::nvme::initiator::{
    self, NvmeCarrier, NvmeConnectError, NvmeEndpoint, NvmeOverTcp, host_nqn_of,
};
use blockmux_engine::protocol::nvme::{GeneratedKeys, IdentityOrder};
use blockmux_engine::remote::{CurrentSecrets, Policy};
use blockmux_proto::fabrics::url::{IoPolicy, NvmeUrl, Portals, read_uuid};
use blockmux_proto::names::volume_uuid::VolumeUuid;
use blockmux_proto::nvme::auth::psk::{ConfiguredPsk, PskHash};
use blockmux_proto::nvme::auth::{AuthFailure, HostSecrets};
use blockmux_proto::nvme::nqn::Nqn;
use blockmux_proto::nvme_tcp::client::{
    ControllerInfo, Digests, FoundSubsystem, HostId, Names, NamespaceInfo, NvmeRefused,
};
use blockmux_volume::Volume;
use blockmux_wire::nvme::status::ConnectStatus;
use blockmux_wire::nvmeof::fabrics::{DISCOVERY_NQN, SubsystemType, TransportType};
use serde_json::{Value, json};
use std::collections::{BTreeSet, HashSet};
use std::io::ErrorKind;
use std::sync::Arc;

/// Parses a URL and reads the files of secrets and keys that it names.
pub(super) fn of_url(text: &str) -> Result<Box<dyn Remote>, Failure> {
    let url: NvmeUrl = reach::read(text)?;
    for name in url.subsystem.iter().chain(&url.host_nqn) {
        if let Some(violation) = name.violation() {
            tracing::warn!("{url}: `{name}`: {violation}; it is sent as it is");
        }
        if !name.fits_tls_identity() && (url.tls_key_file.is_some() || url.concat) {
            return Err(Failure::request(format!("{url}: `{name}`: {NO_TLS_IDENTITY}")));
        }
    }
    let secrets = secrets(&url)?.map(|known| {
        let url = url.clone();
        CurrentSecrets::new(known, move || secrets(&url).ok().flatten())
    });
    let tls_key = url.tls_key_file.clone().map(|path| -> Result<_, Failure> {
        Ok(CurrentSecrets::new(read_tls_key(&path)?, move || read_tls_key(&path).ok()))
    });
    let tls_key = tls_key.transpose()?;
    let (identity_order, generated_keys) = (Arc::default(), url.concat.then(Arc::default));
    Ok(match url.rdma {
        None => {
            let digests = Digests { header: url.header_digest, data: url.data_digest };
            let over = NvmeOverTcp { digests };
            Box::new(NvmeRemote { url, over, secrets, tls_key, identity_order, generated_keys })
        }
        Some(rdma) => with_fabric!(rdma, over => {
            Box::new(NvmeRemote { url, over, secrets, tls_key, identity_order, generated_keys })
        }),
    })
}

struct NvmeRemote<C> {
    url: NvmeUrl,
    /// The transport of the connections.
    over: C,
    /// DH-HMAC-CHAP secrets of this host and, for mutual authentication, of the controller.
    secrets: Option<Arc<CurrentSecrets<HostSecrets>>>,
    tls_key: Option<Arc<CurrentSecrets<ConfiguredPsk>>>,
    /// The order of the TLS key's identities that the target accepts.
    identity_order: Arc<IdentityOrder>,
    /// TLS keys that secure channel concatenation has generated, if it is used.
    generated_keys: Option<Arc<GeneratedKeys>>,
}

impl<C: NvmeCarrier> Remote for NvmeRemote<C> {
    fn open(&self, connections: u32) -> Result<Arc<dyn Volume>, Failure> {
        let subsystem = self.subsystem()?;
        let connections = self.url.connections.unwrap_or(connections);
        let further = self.further(subsystem)?;
        let volume = self.ask(|address| {
            let endpoint = self.endpoint(&self.url, address, subsystem, connections);
            initiator::connect(NvmeEndpoint { further: reach::beside(address, &further), ..endpoint })
        })?;
        Ok(Arc::new(volume))
    }

    /// A subsystem's NQN is globally unique; addresses are paths to it.
    fn volume_key(&self) -> String {
        let subsystem = self.url.subsystem.as_ref().map_or("", Nqn::as_str);
        format!("nvme {subsystem} {}", self.url.nsid)
    }

    fn describe(&self) -> Result<Description, Failure> {
        let subsystem = self.subsystem()?;
        let further = self.further(subsystem)?;
        let told = self.ask(|address| {
            let endpoint = self.endpoint(&self.url, address, subsystem, 1);
            initiator::describe(&NvmeEndpoint { further: reach::beside(address, &further), ..endpoint })
        })?;
        let (rows, json) = (self.rows(subsystem, &told), self.json(subsystem, &told));
        Ok(Description { rows, json, info: told.namespace.volume_info() })
    }

    /// Lists the namespaces of the URL's subsystem, or of all subsystems that the discovery
    /// controller reports.
    fn discover(&self) -> Result<Discovery, Failure> {
        self.ask(|address| self.list(address))
    }
}

impl<C: NvmeCarrier> NvmeRemote<C> {
    fn subsystem(&self) -> Result<&Nqn, Failure> {
        let found = self.url.subsystem.as_ref();
        found.ok_or_else(|| reach::names_no("subsystem", &self.url, "subsystem-nqn/nsid"))
    }

    fn endpoint(
        &self,
        url: &NvmeUrl,
        address: &Address,
        subsystem: &Nqn,
        connections: u32,
    ) -> NvmeEndpoint<C> {
        let (host, host_id) = host_of(url);
        NvmeEndpoint {
            address: address.clone(),
            further: Vec::new(),
            policy: match url.io_policy {
                IoPolicy::RoundRobin => Policy::RoundRobin,
                IoPolicy::QueueDepth => Policy::QueueDepth,
            },
            names: Names { host, host_id, subsystem: subsystem.clone() },
            secrets: self.secrets.clone(),
            nsid: url.nsid,
            over: self.over.clone(),
            entries: url.queue_size,
            keep_alive: url.keep_alive,
            // The URL parser limits it to MAX_CONNECTIONS.
            queues: connections as u16,
            reconnect_timeout: url.reconnect,
            timeout: reach::timeout(url.io_timeout),
            tls_key: self.tls_key.clone(),
            tls_identity: url.tls_identity,
            identity_order: self.identity_order.clone(),
            ktls: url.ktls,
            generated_keys: self.generated_keys.clone(),
        }
    }

    /// Whether the log entry is an NVM subsystem that is reached over the URL's transport.
    fn is_reachable(&self, found: &FoundSubsystem) -> bool {
        let transport = if self.url.rdma.is_some() { TransportType::RDMA } else { TransportType::TCP };
        TransportType(found.transport) == transport && SubsystemType(found.kind) == SubsystemType::NVM
    }

    /// The other portals of the URL, each at the first address of its host name. With `paths=all`
    /// also the portals that the discovery controller at the first portal reports.
    fn further(&self, subsystem: &Nqn) -> Result<Vec<Address>, Failure> {
        let mut paths = Vec::new();
        if self.url.all_paths {
            paths = self.ask(|address| {
                let (found, _) = self.discovered(address, &discovery_nqn())?;
                let is_own = |found: &&FoundSubsystem| {
                    self.is_reachable(found) && found.nqn.as_ref() == Some(subsystem)
                };
                Ok(found.iter().filter(is_own).filter_map(|found| address_of(found, address)).collect())
            })?;
        }
        reach::further(&self.url, &self.url.portals, paths)
    }

    /// Reads the log page of a discovery controller; also returns how many more entries it has.
    fn discovered(
        &self,
        address: &Address,
        nqn: &Nqn,
    ) -> Result<(Vec<FoundSubsystem>, u64), NvmeConnectError> {
        // Discovery uses no generated keys, because it need not authenticate.
        initiator::discover(&NvmeEndpoint {
            generated_keys: None,
            ..self.endpoint(&self.url, address, nqn, 1)
        })
    }

    /// Calls `ask` with one address of the host after another, until one can be reached.
    fn ask<T>(&self, ask: impl FnMut(&Address) -> Result<T, NvmeConnectError>) -> Result<T, Failure> {
        let addresses = reach::addresses(&self.url, &self.url.portals.first)?;
        reach::ask_each(&self.url, &addresses, ask)?.map_err(|error| self.refused(&error))
    }

    fn refused(&self, error: &NvmeConnectError) -> Failure {
        let url = &self.url;
        let list = format!("`blockmux discover '{}'` lists its subsystems", url.discovery());
        let (host, subsystem) = (host_of(url).0, url.subsystem.clone().unwrap_or_else(discovery_nqn));
        let advice = match error {
            NvmeConnectError::Broken { broken: Broken::Tls(_), .. } if url.concat => {
                "configure this host's secret at the target, or remove concat".to_owned()
            }
            NvmeConnectError::Broken { broken: Broken::Tls(_), .. } => {
                let key = self.tls_key.as_ref().map(|key| key.get());
                let offered = key.map(|key| offered_keys(&key, &host, &subsystem, url.tls_identity));
                format!(
                    "check tls_key_file, hostnqn and the subsystem's name{}",
                    offered.unwrap_or_default()
                )
            }
            NvmeConnectError::Broken { .. } | NvmeConnectError::Silent { .. } => {
                let what = if url.rdma.is_some() { "NVMe/RDMA" } else { "NVMe/TCP" };
                // A target that speaks only TLS closes the connection at the first bytes.
                let may_want_tls = url.rdma.is_none() && url.tls_key_file.is_none() && !is_closed_port(error);
                let tls = if may_want_tls { "; if it requires TLS, give ?tls_key_file=PATH" } else { "" };
                match target_advice(what, url.rdma, error) {
                    Some(advice) => format!("{advice}{tls}"),
                    None => return Failure::request(format!("{url}: {error}")),
                }
            }
            NvmeConnectError::Refused { refused, .. } => match refused {
                NvmeRefused::NoNamespace(_) => list,
                NvmeRefused::Authentication => {
                    "give the file of this host's secret, as ?dhchap_secret_file=PATH".to_owned()
                }
                NvmeRefused::AuthFailed { failure: AuthFailure::Rejected(_) | AuthFailure::Closed, .. } => {
                    format!(
                        "check dhchap_secret_file and hostnqn, and the algorithms that the target allows; the target must \
                         have this secret for the host {host} of {subsystem}, with the same second field (00 to 03)"
                    )
                }
                NvmeRefused::AuthFailed { failure: AuthFailure::WrongControllerResponse, .. } => {
                    format!(
                        "check dhchap_ctrl_secret_file and the address; the controller could not prove its identity to \
                         the host {host} of {subsystem}"
                    )
                }
                NvmeRefused::AuthFailed { failure: AuthFailure::NoSecureChannel, .. } => {
                    "configure secure channel concatenation at the target, or remove concat".to_owned()
                }
                NvmeRefused::AuthFailed { failure: AuthFailure::NotRequired, .. } => {
                    "configure authentication at the target, or remove dhchap_ctrl_secret_file".to_owned()
                }
                NvmeRefused::Connect(status) => match ConnectStatus(status.status().0) {
                    ConnectStatus::CONNECT_INVALID_HOST => {
                        "give the NQN of an allowed host as ?hostnqn=NQN, and its TLS key, if any, as ?tls_key_file=PATH"
                            .to_owned()
                    }
                    ConnectStatus::CONNECT_INVALID_PARAMETERS => list,
                    _ => "ask the target's administrator".to_owned(),
                },
                _ => "ask the target's administrator".to_owned(),
            },
        };
        Failure::request(format!("{url}: {error}; {advice}"))
    }

    fn rows(&self, subsystem: &Nqn, told: &initiator::NvmeDescription) -> Vec<(&'static str, String)> {
        let initiator::NvmeDescription { controller, namespace } = told;
        let access = if namespace.read_only { "read-only" } else { "read-write" };
        let cache = if namespace.write_cache { "writes are stable after a flush" } else { "none" };
        let device = format!("{} {}", controller.model, controller.firmware);
        vec![
            ("subsystem", subsystem.to_string()),
            ("namespace", namespace.nsid.to_string()),
            ("device", device.trim().to_owned()),
            ("serial", controller.serial.clone()),
            ("identity", namespace.identity.clone()),
            ("size", both_sizes(namespace.size())),
            ("access", access.to_owned()),
            ("blocks", format!("logical {}, physical {}", namespace.block_len, namespace.physical_block)),
            ("cache", cache.to_owned()),
            ("provisioning", provisioning(namespace).to_owned()),
            ("queues", self.queues(controller, namespace)),
        ]
    }

    fn queues(&self, controller: &ControllerInfo, namespace: &NamespaceInfo) -> String {
        let entries = controller.max_entries.min(self.url.queue_size.into());
        let queues = format!(
            "{entries} entries, maximum transfer {} bytes, in-capsule data {} bytes",
            namespace.max_transfer, controller.in_capsule
        );
        if self.url.rdma.is_some() {
            return queues;
        }
        let digest = |is_on| if is_on { "CRC32C" } else { "none" };
        let (header, data) = (digest(self.url.header_digest), digest(self.url.data_digest));
        format!("{queues}, header digest {header}, data digest {data}")
    }

    fn json(&self, subsystem: &Nqn, told: &initiator::NvmeDescription) -> Value {
        let initiator::NvmeDescription { controller, namespace } = told;
        let mut description = json!({
            "url": self.url.to_string(),
            "protocol": if self.url.rdma.is_some() { "nvme-rdma" } else { "nvme-tcp" },
            "subsystem": subsystem.as_str(),
            "nsid": namespace.nsid,
            "cntlid": controller.cntlid,
            "version": controller.version,
            "model": controller.model,
            "firmware": controller.firmware,
            "serial": controller.serial,
            "identity": namespace.identity,
            "size": namespace.size(),
            "read_only": namespace.read_only,
            "logical_block": namespace.block_len,
            "physical_block": namespace.physical_block,
            "write_cache": namespace.write_cache,
            "provisioning": provisioning(namespace),
            "optimal_io_boundary": namespace.noiob,
            "max_transfer": namespace.max_transfer,
            "max_entries": controller.max_entries,
            "in_capsule_data": controller.in_capsule,
        });
        if self.url.rdma.is_none() {
            description["header_digest"] = self.url.header_digest.into();
            description["data_digest"] = self.url.data_digest.into();
        }
        description
    }

    fn list(&self, address: &Address) -> Result<Discovery, NvmeConnectError> {
        if let Some(subsystem) = &self.url.subsystem {
            let exports = self.namespaces(address, subsystem, &self.url)?;
            return Ok(Discovery { url: self.url.to_string(), exports, left_out: 0 });
        }
        let (found, left_out) = self.discovered(address, &discovery_nqn())?;
        let first = DiscoveryLog { address: address.clone(), found, left_out };
        let logs = referrals::follow(first, |address, nqn| self.discovered(address, nqn));
        let names: BTreeSet<_> =
            logs.iter().flat_map(|log| &log.found).filter_map(|found| found.nqn.as_ref()).collect();
        reach::warn_of_names(names.iter().filter_map(|name| Some((name.as_str(), name.violation()?))));
        let mut left_out = logs.iter().fold(0, |all: u64, log| all.saturating_add(log.left_out));
        let (mut exports, mut seen) = (Vec::new(), HashSet::new());
        let entries = logs.iter().flat_map(|log| log.found.iter().map(|found| (found, &log.address)));
        for (found, asked) in entries.filter(|(found, _)| self.is_reachable(found)) {
            let place = address_of(found, asked);
            let named = found.nqn.as_ref();
            let Some((nqn, url)) =
                named.and_then(|nqn| Some((nqn, self.url_of(address, (found, &place), nqn)?)))
            else {
                tracing::warn!("the server lists a subsystem whose name or port cannot be used");
                left_out = left_out.saturating_add(1);
                continue;
            };
            if !seen.insert(url.to_string()) {
                continue;
            }
            let is_here = url.portals.first == self.url.portals.first;
            let place = if is_here { Some(address.clone()) } else { place };
            // Other hosts may be unreachable, and each would cost a timeout.
            let Some(place) = place.filter(|place| logs.iter().any(|log| is_same_host(&log.address, place)))
            else {
                exports.push(unlisted(&url, NOT_QUERIED));
                continue;
            };
            match self.namespaces(&place, nqn, &url) {
                Ok(namespaces) => exports.extend(namespaces),
                Err(error) => {
                    tracing::warn!("subsystem {nqn}: {error}");
                    exports.push(unlisted(&url, "does not list its namespaces"));
                }
            }
        }
        Ok(Discovery { url: self.url.discovery().to_string(), exports, left_out })
    }

    fn namespaces(
        &self,
        address: &Address,
        nqn: &Nqn,
        url: &NvmeUrl,
    ) -> Result<Vec<DiscoveredExport>, NvmeConnectError> {
        let (controller, namespaces) = initiator::namespaces(&self.endpoint(url, address, nqn, 1))?;
        let of_namespace = |namespace: &NamespaceInfo| {
            export(&NvmeUrl { nsid: namespace.nsid, ..url.clone() }, &controller, namespace)
        };
        Ok(namespaces.iter().map(of_namespace).collect())
    }

    /// The URL of a discovered subsystem; with the portal of this URL if the address is the same.
    fn url_of(
        &self,
        address: &Address,
        (found, place): (&FoundSubsystem, &Option<Address>),
        nqn: &Nqn,
    ) -> Option<NvmeUrl> {
        let here = NvmeUrl { subsystem: Some(nqn.clone()), nsid: 1, ..self.url.clone() };
        if place.as_ref() == Some(address) {
            return Some(here);
        }
        let port = found.service.parse().ok().filter(|port| *port > 0)?;
        let host = match place {
            Some(Address::Tcp(tcp)) => zone::host_text(tcp),
            _ => found.address.clone(),
        };
        Some(NvmeUrl { portals: Portals::one((host, port)), ..here })
    }
}

/// Whether no program listens at the port.
fn is_closed_port(error: &NvmeConnectError) -> bool {
    matches!(error, NvmeConnectError::Broken { broken: Broken::Socket(error), .. }
        if error.kind() == ErrorKind::ConnectionRefused)
}

/// The well-known NQN of discovery controllers.
fn discovery_nqn() -> Nqn {
    Nqn::new(DISCOVERY_NQN).expect("a valid NQN")
}

/// Whether both addresses have the same IP address. If one is reachable, so is the other.
fn is_same_host(one: &Address, other: &Address) -> bool {
    match (one, other) {
        (Address::Tcp(one), Address::Tcp(other)) => one.ip() == other.ip(),
        (one, other) => one == other,
    }
}

fn export(url: &NvmeUrl, controller: &ControllerInfo, namespace: &NamespaceInfo) -> DiscoveredExport {
    let size = Some(namespace.size());
    DiscoveredExport { size, ..unlisted(url, &controller.model) }
}

/// An entry for a subsystem whose namespaces are unknown: namespace 1, which most subsystems have.
fn unlisted(url: &NvmeUrl, description: &str) -> DiscoveredExport {
    DiscoveredExport {
        name: url.subsystem.as_ref().map(|nqn| format!("{nqn}/{}", url.nsid)).unwrap_or_default(),
        url: url.to_string(),
        description: description.to_owned(),
        size: None,
    }
}

fn provisioning(namespace: &NamespaceInfo) -> &'static str {
    match (namespace.max_deallocate_blocks.is_some(), namespace.is_thin) {
        (true, true) => "thin",
        (true, false) => "deallocates",
        (false, _) => "full",
    }
}

/// DH-HMAC-CHAP secrets from the URL; `None` without a secret file.
fn secrets(url: &NvmeUrl) -> Result<Option<HostSecrets>, Failure> {
    let Some(path) = &url.secret_file else { return Ok(None) };
    let host = read_secret(path)?;
    let controller = url.ctrl_secret_file.as_deref().map(read_secret).transpose()?;
    if controller.as_ref() == Some(&host) {
        return Err(Failure::request(format!(
            "{url}: both secrets are the same; the controller must have another secret"
        )));
    }
    let (hash, group) = (url.dhchap_hash, url.dhchap_dhgroup);
    Ok(Some(HostSecrets { host, controller, hash, group }))
}

/// The host identifier in the host's NQN, or one that is derived from the NQN.
fn id_of_nqn(nqn: &Nqn) -> HostId {
    let uuid = nqn.as_str().rsplit_once("uuid:").and_then(|(_, uuid)| read_uuid(uuid));
    uuid.unwrap_or_else(|| hash(nqn.as_str()))
}

/// The default host identifier of this machine.
fn own_id() -> HostId {
    let uname = rustix::system::uname();
    hash(&format!("{} {}", uname.nodename().to_string_lossy(), machine_id()))
}

/// Derives a host identifier from a text.
fn hash(text: &str) -> HostId {
    VolumeUuid::of_texts(&["host", text]).to_bytes()
}

/// The host NQN and the host identifier of a URL, or this machine's.
fn host_of(url: &NvmeUrl) -> (Nqn, HostId) {
    let host_id = url.host_id.or_else(|| url.host_nqn.as_ref().map(id_of_nqn)).unwrap_or_else(own_id);
    let own = || Nqn::new(&host_nqn_of(&host_id)).expect("only allowed characters are used");
    (url.host_nqn.clone().unwrap_or_else(own), host_id)
}

/// The identities by which a TLS key was offered, for a message; they name the hash function and
/// both NQNs, and are no secret.
fn offered_keys(key: &ConfiguredPsk, host: &Nqn, subsystem: &Nqn, version: Option<u8>) -> String {
    let all = key.retained(host).tls_psks(host, subsystem);
    let offered: Vec<_> =
        all.iter().filter(|key| version.is_none_or(|version| key.version() == version)).collect();
    let Some((first, others)) = offered.split_first() else { return String::new() };
    let hash = match first.hash {
        PskHash::Sha256 => "SHA-256",
        PskHash::Sha384 => "SHA-384",
    };
    let others = others.iter().filter_map(|other| other.identity.split(' ').next());
    let others: String = others.map(|version| format!(" and as {version} of the same names")).collect();
    format!(
        "; a key for {hash} was offered as {}{others}, which the target must have and derive alike: libnvme before 1.16 \
         derives others",
        first.identity
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_identifier_is_taken_from_the_nqn() {
        let id = [0x11; 16];
        assert_eq!(id_of_nqn(&Nqn::new(&host_nqn_of(&id)).unwrap()), id);
        let other = id_of_nqn(&Nqn::new("nqn.2026-11.test:host").unwrap());
        assert_eq!((other[6] >> 4, other[8] >> 6), (8, 2));
        assert_eq!(other, hash("nqn.2026-11.test:host"));
        assert_ne!(other, hash("nqn.2026-11.test:other"));
    }
}
