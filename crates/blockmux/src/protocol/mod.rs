//! The protocols that Blockmux has: one table, which every command reads.
//!
//! A protocol is a module here and an entry of [`PROTOCOLS`]. `serve` takes from it how to listen and what to announce,
//! URLs as volumes and the commands `info` and `discover` take its [`Remote`], and the bench both of them and the
//! sizes of its messages. AoE has no listeners and stands beside the table: its URLs are found by [`of_url`], and
//! `serve` has it by [`aoe::Serving`].

pub(crate) mod aoe;
pub(crate) mod iscsi;
mod nbd;
pub(crate) mod nvme_tcp;
pub(crate) mod policy;
mod secret;

pub(crate) use aoe::AOE;
pub(crate) use iscsi::{ISCSI, ISER};
pub(crate) use nbd::NBD;
pub(crate) use nvme_tcp::NVME_TCP;

use crate::failure::Failure;
use crate::reset::What;
use blockmux_engine::listener::Serve;
use blockmux_engine::socket::Address;
use blockmux_lab::ceiling::{MessageShape, Transport};
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::fabrics::controller::node::Referral;
use blockmux_proto::iscsi::node::Chap;
use blockmux_proto::scsi::AccessState;
use blockmux_volume::Volume;
use blockmux_wire::nvme::log::AnaState;
use policy::{LiveAccess, Policy, TargetAccess};
use serde::Serialize;
use serde_json::Value;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

/// One protocol over stream sockets.
pub(crate) struct Protocol {
    /// As rows and suites call it, and the option of `serve` that names its listeners.
    pub(crate) name: &'static str,
    /// As people write it.
    pub(crate) title: &'static str,
    /// Where it listens unless told otherwise.
    pub(crate) port: u16,
    /// How its URLs begin, in lower case and without `://`, and what sockets they lead to.
    pub(crate) schemes: &'static [(&'static str, Transport)],
    /// Schemes of its that are not spoken; [`Protocol::remote`] says why.
    pub(crate) unspoken_schemes: &'static [&'static str],
    /// What its URLs look like, for who has written something else.
    pub(crate) url_forms: &'static [&'static str],
    /// The longest description of an export, in bytes.
    pub(crate) max_description: usize,
    /// The largest logical block of a volume, in bytes.
    pub(crate) max_logical_block: u32,
    /// Sizes of its messages as both sides here agree on them.
    pub(crate) shape: MessageShape,
    /// Whether volumes of these names can be served as the settings say; if not, why, and what to do.
    pub(crate) check: fn(&Settings, &[&str]) -> Result<(), String>,
    /// Whether somebody may use a volume without having proved who it is.
    pub(crate) is_open: fn(&Settings) -> bool,
    /// Its configured targets, and who may use their volumes; without any, each volume is an export
    /// of its own.
    pub(crate) targets: fn(&Settings) -> Vec<TargetAccess>,
    /// Serves to accepted connections.
    pub(crate) serve: fn(&Service<'_>) -> Started,
    /// How clients reach a volume where we serve it.
    pub(crate) ways: fn(&Settings, &Portal, &Named) -> Vec<Way>,
    /// Reaches the export of that name at an address where we serve it, over one connection; `None` if there is only
    /// the target's side yet.
    pub(crate) connect: Option<Connect>,
    /// Reads a URL that begins with one of its schemes.
    pub(crate) remote: fn(&str) -> Result<Box<dyn Remote>, Failure>,
    /// The protocol whose listeners serve this one too; [`Protocol::serve`] of both is the same.
    pub(crate) served_with: Option<&'static str>,
}

/// From an address and an export's name to the volume, or why there is none.
pub(crate) type Connect = fn(&Address, &str) -> Result<Arc<dyn Volume>, String>;

/// What is said of protocols beyond their listeners.
#[derive(Clone, Debug, Default)]
pub(crate) struct Settings {
    /// Which volumes are served where.
    pub(crate) policy: Policy,
    /// Targets of iSCSI; without any, each volume is a target of its own.
    pub(crate) iscsi: Vec<iscsi::ConfiguredTarget>,
    /// What discovery over iSCSI asks for.
    pub(crate) iscsi_discovery: Option<Chap>,
    /// Subsystems of NVMe; without any, each volume is a subsystem of its own.
    pub(crate) nvme: Vec<nvme_tcp::ConfiguredSubsystem>,
    /// Data in capsules of NVMe/TCP, in bytes; `None`: as usual.
    pub(crate) nvme_in_capsule: Option<usize>,
    /// Where else hosts of NVMe may discover.
    pub(crate) nvme_referrals: Vec<Referral>,
    /// The discovery subsystem has a unique name of its own.
    pub(crate) nvme_discovery_is_unique: bool,
    /// Whether hosts have to come by TLS.
    pub(crate) nvme_tcp_treq: nvme_tcp::Treq,
    /// Whether the kernel makes the records of TLS where it can; `None`: it does.
    pub(crate) nvme_tcp_ktls: Option<bool>,
}

/// What one protocol serves.
pub(crate) struct Service<'a> {
    pub(crate) exports: &'a Exports,
    /// Where it listens.
    pub(crate) addresses: &'a [Address],
    pub(crate) settings: &'a Settings,
}

/// What serves one protocol.
pub(crate) struct Started {
    /// For the connections that come to each address, in order.
    pub(crate) serve: Vec<Serve>,
    /// What can be changed meanwhile; `None` where the list of exports is all that there is.
    pub(crate) live: Option<Box<dyn Live>>,
}

/// What can be changed of a protocol while it is served. Targets are those of iSCSI and subsystems of NVMe. No core calls
/// this.
pub(crate) trait Live: Send {
    /// A volume has come: where no targets are configured, it is one of its own.
    fn add(&self, volume: VolumeId);

    /// A volume goes, whatever targets have it; they are told by their protocol's means.
    fn remove(&self, volume: VolumeId);

    /// Whether it has a target of that name.
    fn has(&self, target: &str) -> bool;

    /// The protocol whose targets these are.
    fn protocol(&self) -> &'static Protocol;

    /// A target with whether everybody who can connect may use all of its volumes; `None` if there
    /// is none.
    fn access_of(&self, target: &str) -> Option<LiveAccess>;

    /// The targets that have a volume.
    fn targets_of(&self, volume: VolumeId) -> Vec<LiveAccess>;

    /// Makes a volume a logical unit or a namespace of a target; answers its number.
    ///
    /// # Errors
    /// If its number is taken or none; what to do.
    fn attach(&self, target: &str, volume: VolumeId, place: &Place) -> Result<u32, String>;

    /// Takes one away.
    ///
    /// # Errors
    /// If there is none.
    fn detach(&self, target: &str, number: u32) -> Result<(), String>;

    /// Lets a host use a subsystem, or changes what holds for it.
    ///
    /// # Errors
    /// If everybody may use it, or a file of the host's is wrong.
    fn add_host(&self, target: &str, _host: &nvme_tcp::HostEntry) -> Result<(), String> {
        Err(format!("{target}: iSCSI's initiators are in the config file; name a subsystem of NVMe"))
    }

    /// Lets a host use a subsystem no more, and ends what it has there.
    ///
    /// # Errors
    /// If there is no such host.
    fn remove_host(&self, target: &str, _host: &str) -> Result<(), String> {
        Err(format!("{target}: iSCSI's initiators are in the config file; name a subsystem of NVMe"))
    }

    /// Reads the files of one host again, or of all; answers how many hosts have some.
    ///
    /// # Errors
    /// If a file is wrong; then nothing has changed.
    fn read_keys(&self, target: &str, _host: Option<&str>) -> Result<u32, String> {
        Err(format!("{target}: iSCSI's initiators are in the config file; name a subsystem of NVMe"))
    }

    /// Sets how listeners lead to an ANA group: the one that is named, or all.
    ///
    /// # Errors
    /// If there is no such group or listener.
    fn set_ana_state(
        &self,
        target: &str,
        _group: u32,
        _state: AnaState,
        _at: Option<SocketAddr>,
    ) -> Result<(), String> {
        Err(format!("{target}: iSCSI has no ANA groups; name a subsystem of NVMe, or say `alua`"))
    }

    /// Sets how the portal group of a listener leads to the logical units of a target, or how all do.
    ///
    /// # Errors
    /// If there is no such listener, or it is not alone in its group.
    fn set_access_state(
        &self,
        target: &str,
        _state: AccessState,
        _at: Option<SocketAddr>,
    ) -> Result<(), String> {
        Err(format!("{target}: NVMe has ANA groups instead; name a target of iSCSI, or say `ana`"))
    }
}

/// Where in a target.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Place {
    /// LUN or NSID; `None`: the lowest that is free.
    pub(crate) number: Option<u32>,
    /// ANAGRPID; `None`: the last group, if there are any.
    pub(crate) ana_group: Option<u32>,
}

/// A listener, and an address by which clients reach it: another one where it listens at all
/// addresses.
#[derive(Clone, Debug)]
pub(crate) struct Portal {
    pub(crate) listener: Address,
    pub(crate) address: Address,
}

impl Portal {
    /// The TCP addresses of both; `None` of a Unix socket.
    pub(crate) fn tcp(&self) -> Option<(SocketAddr, SocketAddr)> {
        match (&self.listener, &self.address) {
            (Address::Tcp(listener), Address::Tcp(address)) => Some((*listener, *address)),
            _ => None,
        }
    }

    /// A listener at this one address.
    #[cfg(test)]
    pub(crate) fn at(address: &str) -> Portal {
        let address = Address::Tcp(address.parse().expect("a test names addresses"));
        Portal { listener: address.clone(), address }
    }
}

/// What a volume that is served is called.
#[derive(Clone, Debug)]
pub(crate) struct Named {
    /// By NBD, and in the config file.
    pub(crate) export: String,
    /// Behind the prefixes of the target and the subsystem that it is where none are configured.
    pub(crate) target: String,
}

impl Named {
    /// The names of a volume, if it is still there.
    pub(crate) fn of(exports: &Exports, volume: VolumeId) -> Option<Named> {
        let (export, served) = exports.get(volume).zip(exports.served(volume))?;
        let target = served.target_name().unwrap_or(&export.name).to_owned();
        Some(Named { export: export.name.clone(), target })
    }

    /// The names of all volumes, in order.
    pub(crate) fn all(exports: &Exports) -> Vec<Named> {
        exports.iter().filter_map(|(volume, _)| Named::of(exports, volume)).collect()
    }

    /// The names of a volume whose own target is called as it is.
    #[cfg(test)]
    pub(crate) fn plainly(name: &str) -> Named {
        Named { export: name.to_owned(), target: name.to_owned() }
    }
}

/// How one export is reached through one listener.
pub(crate) struct Way {
    /// For our own initiator and for others.
    pub(crate) url: String,
    /// What a shell runs to connect standard clients.
    pub(crate) commands: Vec<String>,
    /// What the command of `--run` finds in its environment beside URLs, as other servers' users expect it.
    pub(crate) variables: Vec<(&'static str, String)>,
}

/// What a URL names: a volume on a server, and the server.
pub(crate) trait Remote {
    /// Reaches the volume for I/O. `connections` is how many each core opens if the URL does not say, and the server
    /// lets several be used.
    ///
    /// # Errors
    /// If the server cannot be reached or does not have the volume.
    fn open(&self, connections: u32) -> Result<Arc<dyn Volume>, Failure>;

    /// Where the volume is, whatever the URL says of the way there.
    fn place(&self) -> String;

    /// What the server tells of the volume.
    ///
    /// # Errors
    /// As for [`Remote::open`].
    fn describe(&self) -> Result<Description, Failure>;

    /// What the server exports.
    ///
    /// # Errors
    /// If the server cannot be reached or does not tell.
    fn discover(&self) -> Result<Found, Failure>;

    /// Has the server reset something; answers what it was.
    ///
    /// # Errors
    /// If the server cannot be reached or does not do it.
    fn reset(&self, _what: What) -> Result<&'static str, Failure> {
        Err(Failure::request("only units of iSCSI and iSER can be reset; write iscsi://host/target-name/lun"))
    }
}

/// A volume in its protocol's own words.
pub(crate) struct Description {
    /// For people; an empty value is not shown.
    pub(crate) rows: Vec<(&'static str, String)>,
    /// For programs: an object with `url` as it was given, `protocol`, `size` in bytes and `read_only` at least.
    pub(crate) json: Value,
}

/// What a server exports.
#[derive(Serialize)]
pub(crate) struct Found {
    /// The server's.
    pub(crate) url: String,
    pub(crate) exports: Vec<FoundExport>,
    /// Listed by the server beyond what we keep.
    pub(crate) left_out: u64,
}

/// One export of a server.
#[derive(Serialize)]
pub(crate) struct FoundExport {
    pub(crate) name: String,
    pub(crate) url: String,
    /// What it is, or why nothing is known of it.
    pub(crate) description: String,
    /// In bytes; `None` if the server did not tell, or was not asked.
    pub(crate) size: Option<u64>,
}

impl fmt::Debug for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Protocol").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Protocol {
    /// Whether its listeners may be Unix sockets.
    pub(crate) fn has_unix_sockets(&self) -> bool {
        self.schemes.iter().any(|(_, transport)| *transport == Transport::Unix)
    }

    /// The protocol that its listeners are served as.
    pub(crate) fn served_as(&self) -> &'static str {
        self.served_with.unwrap_or(self.name)
    }

    /// What its listeners serve: itself, and what is served with it.
    pub(crate) fn spoken_here(&self) -> impl Iterator<Item = &'static Protocol> {
        let name = self.name;
        PROTOCOLS.iter().copied().filter(move |other| other.name == name || other.served_with == Some(name))
    }

    /// Why it is not measured while it has no initiator.
    pub(crate) fn no_initiator(&self) -> String {
        format!("{} is served, but cannot be reached by this Blockmux yet", self.title)
    }

    /// Its name in rows: sockets of another kind have a ceiling of their own.
    pub(crate) fn name_over(&self, transport: Transport) -> String {
        match transport {
            Transport::Tcp => self.name.to_owned(),
            Transport::Unix => format!("{}+unix", self.name),
        }
    }
}

/// Every protocol with listeners that Blockmux has.
pub(crate) const PROTOCOLS: &[&Protocol] = &[&NBD, &ISCSI, &ISER, &NVME_TCP];

/// What there is to say of an export that others have, who may be out of our reach.
pub(crate) const ELSEWHERE: &str = "at another address, which was not asked";

/// Every protocol that has URLs.
pub(crate) fn spoken() -> impl Iterator<Item = &'static Protocol> {
    PROTOCOLS.iter().copied().chain([&AOE])
}

/// The protocol of that name.
pub(crate) fn by_name(name: &str) -> Option<&'static Protocol> {
    PROTOCOLS.iter().copied().find(|protocol| protocol.name == name)
}

/// The protocol of a URL, and its sockets.
pub(crate) fn of_url(url: &str) -> Option<(&'static Protocol, Transport)> {
    let (scheme, _) = url.split_once("://")?;
    spoken().find_map(|protocol| {
        let (_, transport) = protocol.schemes.iter().find(|(own, _)| scheme.eq_ignore_ascii_case(own))?;
        Some((protocol, *transport))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_leads_to_its_protocol_and_its_sockets() {
        let name = |url| of_url(url).map(|(protocol, transport)| protocol.name_over(transport));
        assert_eq!(name("nbd://host/a").as_deref(), Some("nbd"));
        assert_eq!(name("NBD+UNIX:///a?socket=/s").as_deref(), Some("nbd+unix"));
        assert_eq!(name("nbds://host/a"), None);
        assert_eq!(name("iser://host/iqn.a/0?rdma=iwarp").as_deref(), Some("iser"));
        assert_eq!(name("aoe://eth0/e1.2").as_deref(), Some("aoe"));
        assert_eq!(name("mem:1g"), None);
    }

    #[test]
    fn no_two_protocols_share_a_name_or_a_scheme() {
        let schemes = |protocol: &'static Protocol| {
            protocol
                .schemes
                .iter()
                .map(|(scheme, _)| *scheme)
                .chain(protocol.unspoken_schemes.iter().copied())
        };
        let lists: [Vec<&str>; 3] = [
            spoken().flat_map(schemes).collect(),
            spoken().map(|protocol| protocol.name).collect(),
            spoken().map(|protocol| protocol.title).collect(),
        ];
        for mut names in lists {
            let all = names.len();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), all, "{names:?}");
        }
    }
}
