//! The interface between `serve` and a protocol: options and config keys, targets, URLs and client
//! commands, and changes at run time.

use super::Protocol;
use super::address::{ListenerAddress, matches_listener};
use super::fabric::{AcceptRdma, FabricPort};
use super::keys::KeyError;
use super::policy::{LiveAccess, Policy, TargetAccess};
use super::units::LogicalUnits;
use crate::failure::Failure;
use blockmux_engine::core::cores::Cores;
use blockmux_engine::core::reactor::EngineCore;
use blockmux_engine::net::socket::Stream;
use blockmux_engine::net::zone;
use blockmux_engine::serve::listener::{Permit, Serve};
use blockmux_engine::serve::sessions::{SessionInfo, Sessions};
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::names::rdma::UDP_TARGET_QUERY;
use clap::error::ErrorKind;
use clap::{ArgMatches, Command};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use toml::de::Deserializer;

/// A protocol with its settings from the command line and the config file. The default methods are
/// those of a protocol that has listeners only. The [`LiveFrontend`] of the protocol downcasts it.
pub(crate) trait Frontend: Any + Send + Sync {
    /// Adds the protocol's options to `serve`, except those for listeners.
    fn options(&self, command: Command) -> Command {
        command
    }

    /// Takes the values of the options that [`Frontend::options`] has added.
    ///
    /// # Errors
    /// If a value is invalid.
    fn take_options(&mut self, _matches: &ArgMatches) -> Result<(), clap::Error> {
        Ok(())
    }

    /// The protocol's keys in the config file, except that for listeners.
    fn keys(&self) -> &'static [&'static str] {
        &[]
    }

    /// Takes the values of [`Frontend::keys`] and reads the files that they name; relative paths
    /// are below `directory`. Options of the command line have priority.
    ///
    /// # Errors
    /// If a value or a file is invalid.
    fn take_keys(&mut self, _written: Deserializer<'_>, _directory: &Path) -> Result<(), KeyError> {
        Ok(())
    }

    /// The protocol's lists of targets in the config file.
    fn target_tables(&self) -> &'static [TargetTables] {
        &[]
    }

    /// The protocol's keys that take effect only at the next start, from the top level and joined
    /// by dots.
    fn fixed_keys(&self) -> &'static [&'static str] {
        &[]
    }

    /// The entry of a volume's own target in a config that names its targets; `None` for a protocol
    /// without targets.
    fn own_entry(&self, _named: &VolumeNames, _description: &str) -> Option<toml::Table> {
        None
    }

    /// Writes a command of [`Frontend::commands`] into the entry of its target in a config; returns
    /// a message for the user, if any. `listeners` are those of the protocol.
    ///
    /// # Errors
    /// If the target does not fit the command; the message says what to do.
    fn write_command(
        &self,
        _what: &Value,
        _target: &mut toml::Table,
        _listeners: &[NamedListener],
    ) -> Result<Option<String>, String> {
        Err("its protocol does not support this command".to_owned())
    }

    /// Adds the protocol's own commands to `ctl`.
    fn commands(&self, command: Command) -> Command {
        command
    }

    /// Reads a command of [`Frontend::commands`]: the target, and the change for
    /// [`Frontend::write_command`].
    ///
    /// # Errors
    /// If the command is invalid or belongs to another protocol.
    fn read_command(&self, _matches: &ArgMatches) -> Result<(String, Value), clap::Error> {
        Err(clap::Error::new(ErrorKind::InvalidSubcommand))
    }

    /// Whether the frontend has settings that must be checked even without a listener.
    fn is_configured(&self) -> bool {
        false
    }

    /// Checks the settings against the names of all volumes, in order.
    ///
    /// # Errors
    /// If the frontend cannot serve these volumes; the message says what to do.
    fn check(&mut self, _volumes: &[&str]) -> Result<(), String> {
        Ok(())
    }

    /// The configured targets with their access control. Without any, each volume is exported by
    /// default.
    fn targets(&self) -> Vec<TargetAccess> {
        Vec::new()
    }

    /// Whether the protocol's default exports require authentication.
    fn restricts_exports(&self) -> bool {
        false
    }

    /// Starts to serve; `None` for a protocol that is served with another one.
    ///
    /// # Errors
    /// If a network interface cannot be opened.
    fn serve(&self, service: &Service<'_>) -> Result<Option<Box<dyn LiveFrontend>>, Failure>;

    /// URLs and client commands for a volume at a portal. `protocol` is this protocol, or one that
    /// is served with it.
    fn connect_info(&self, protocol: &Protocol, portal: &Portal, named: &VolumeNames) -> Vec<ConnectInfo>;
}

/// The resources with which a frontend serves.
pub(crate) struct Service<'a> {
    pub(crate) exports: &'a Exports,
    /// The SCSI logical units of the volumes.
    pub(crate) units: &'a Arc<LogicalUnits>,
    /// The listeners of the protocol.
    pub(crate) places: &'a [ListenerAddress],
    /// Which volumes are exported at which listeners.
    pub(crate) policy: &'a Policy,
    /// The cores that serve.
    pub(crate) cores: &'a Cores,
    /// Session list for protocols without connections.
    pub(crate) sessions: &'a Sessions,
}

/// The structure of a list of targets in the config file, for comparing two configs and for finding
/// the sessions that a change affects.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TargetTables {
    /// The key of the list.
    pub(crate) key: &'static str,
    /// The key of a target's name.
    pub(crate) name: &'static str,
    /// Keys of tables that map LUNs or NSIDs to volumes; `ctl` changes are written to the first.
    pub(crate) units: &'static [&'static str],
    /// The lowest LUN or NSID.
    pub(crate) first_unit: u32,
    /// Keys of lists of initiators or hosts, and the key of the name in their entries; it is empty
    /// if the entry itself is the name.
    pub(crate) peers: &'static [(&'static str, &'static str)],
    /// Keys of other lists of tables, and the key that identifies their entries.
    pub(crate) parts: &'static [(&'static str, &'static str)],
    /// The key of a value, or of values by listener, whose change ends the sessions there, and the
    /// default port.
    pub(crate) port_name: Option<(&'static str, u16)>,
}

/// The targets that have each volume.
pub(crate) type TargetsByVolume = BTreeMap<VolumeId, Vec<LiveAccess>>;

/// A protocol that is served, with its running frontend.
pub(crate) type LiveProtocol = (&'static Protocol, Arc<dyn LiveFrontend>);

/// A session between two requests that another process hands over.
pub(crate) struct HandedSession {
    /// Name of its protocol.
    pub(crate) protocol: String,
    /// Address of the listener that accepted the connection.
    pub(crate) listener: String,
    pub(crate) stream: Stream,
    /// Bytes that were received and not parsed.
    pub(crate) unread: Vec<u8>,
    /// State of the session, in the format of its protocol.
    pub(crate) state: Vec<u8>,
}

/// Continues a session on the calling core.
pub(crate) type Resume = Box<dyn FnOnce(&Rc<EngineCore>, HandedSession, Permit) + Send>;

/// The running part of a frontend, which changes at run time. Targets are iSCSI targets, SRP target
/// ports and NVMe subsystems; a protocol without targets uses the default methods. Cores do not
/// call these methods. Methods that change something are called by one change at a time, the others
/// also during a change, so an implementation holds its locks only for moments.
pub(crate) trait LiveFrontend: Send + Sync {
    /// The function that serves the connections of a listener.
    fn serve(&self, place: &ListenerAddress) -> Serve;

    /// What accepts connections over RDMA to a listener that has this port, too; `None` for a
    /// protocol without a form over RDMA.
    fn serve_rdma(&self, _place: &ListenerAddress, _port: FabricPort) -> Option<AcceptRdma> {
        None
    }

    /// The function that continues sessions of a listener which another process hands over; `None`
    /// if the clients reconnect instead.
    fn resume(&self, _place: &ListenerAddress) -> Option<Resume> {
        None
    }

    /// Applies a new config, which was checked as at a start: `desired` is the frontend of that
    /// config, `service` has its listeners and its policy. Parts that are equal in both configs are
    /// not disturbed. Called before volumes are removed, and again after new ones were added.
    fn reconfigure(&self, desired: &dyn Frontend, service: &Service<'_>);

    /// The targets that keep a unit in the config of `desired`, but with other identifiers, so that
    /// clients lose the disk that they use and find another one.
    fn targets_with_other_identities(&self, _desired: &dyn Frontend) -> BTreeSet<String> {
        BTreeSet::new()
    }

    /// Whether a session that began before the last [`LiveFrontend::reconfigure`] is still allowed.
    fn may_continue(&self, session: &SessionInfo) -> bool;

    /// Disconnects the sessions that are no longer allowed and have not ended in time.
    fn disconnect_remaining(&self) {}

    /// Removes volumes from all targets and notifies their clients.
    fn remove(&self, _volumes: &BTreeSet<VolumeId>) {}

    /// The access control of a target; `None` if there is no such target.
    fn access_of(&self, _target: &str) -> Option<LiveAccess> {
        None
    }

    /// The targets that have each volume.
    fn targets_by_volume(&self) -> TargetsByVolume {
        TargetsByVolume::new()
    }

    /// The targets that sessions of each volume name.
    fn session_targets(&self) -> Vec<(VolumeId, String)> {
        let of_volume = |(volume, all): (VolumeId, Vec<LiveAccess>)| {
            all.into_iter().map(move |access| (volume, access.target))
        };
        self.targets_by_volume().into_iter().flat_map(of_volume).collect()
    }

    /// Whether the protocol serves a volume that is added now only after the next start, although
    /// the policy allows it.
    fn waits_for_start(&self, _policy: &Policy, _volume: &str) -> bool {
        false
    }
}

/// A protocol-specific command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Change {
    /// The protocol's name.
    pub(crate) protocol: String,
    pub(crate) target: String,
    /// The command, in the format of the protocol's frontend.
    pub(crate) what: Value,
}

/// A listener as a config has it, and the address to which it is bound. They differ if the config
/// leaves the port to the system.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NamedListener {
    pub(crate) written: SocketAddr,
    pub(crate) address: SocketAddr,
}

impl NamedListener {
    /// The one that is bound to the address.
    ///
    /// # Errors
    /// If there is none; the message names those that there are.
    pub(crate) fn find(all: &[NamedListener], at: SocketAddr) -> Result<NamedListener, String> {
        let found = all.iter().find(|own| own.address == at).copied();
        found.ok_or_else(|| {
            let known: Vec<String> = all.iter().map(|own| zone::address_text(&own.address)).collect();
            let at = zone::address_text(&at);
            format!("{at} is not a listener; use one of {}", known.join(", "))
        })
    }

    /// Whether an address in a config is the listener's.
    pub(crate) fn is_at(&self, written: &SocketAddr) -> bool {
        *written == self.written || matches_listener(written, &self.address)
    }
}

/// A listener, and an address at which clients reach it. They differ if the listener is bound to
/// the unspecified address.
#[derive(Clone, Debug)]
pub(crate) struct Portal {
    pub(crate) listener: ListenerAddress,
    pub(crate) reached_at: ListenerAddress,
    /// The query of URLs of protocols over RDMA, which names the fabric there.
    pub(crate) rdma_query: &'static str,
}

impl Portal {
    /// Both TCP addresses; `None` for a Unix socket or an interface.
    pub(crate) fn tcp(&self) -> Option<(SocketAddr, SocketAddr)> {
        Some((self.listener.tcp()?, self.reached_at.tcp()?))
    }

    /// Whether only clients on other machines reach it. All connections of RoCEv2 at an address use
    /// one UDP port, which the listener has. A client on this machine takes an address of loopback,
    /// of which there are many over IPv4, unless the listener has all addresses.
    pub(crate) fn is_for_others(&self) -> bool {
        let has_all = |listener: SocketAddr| listener.is_ipv6() || listener.ip().is_unspecified();
        self.rdma_query == UDP_TARGET_QUERY && self.listener.tcp().is_some_and(has_all)
    }

    /// A portal whose listener is bound to this address.
    #[cfg(test)]
    pub(crate) fn at(address: &str) -> Portal {
        use blockmux_engine::net::socket::Address;
        use blockmux_proto::names::rdma::TCP_TARGET_QUERY;
        let place = ListenerAddress::Socket(Address::Tcp(address.parse().expect("a test names addresses")));
        Portal { listener: place.clone(), reached_at: place, rdma_query: TCP_TARGET_QUERY }
    }
}

/// The names of an exported volume, and what else clients have to know of it.
#[derive(Clone, Debug)]
pub(crate) struct VolumeNames {
    pub(crate) volume: VolumeId,
    /// Name of the NBD export and of the volume in the config file.
    pub(crate) export: String,
    /// Name of the volume's default target and subsystem, behind their prefixes.
    pub(crate) target: String,
    /// Logical block size in bytes.
    pub(crate) block_len: u32,
}

impl VolumeNames {
    /// The names of a volume; `None` if it has been removed.
    pub(crate) fn of(exports: &Exports, volume: VolumeId) -> Option<VolumeNames> {
        let (export, volume_state) = exports.get(volume).zip(exports.volume_state(volume))?;
        let target = volume_state.target_name().unwrap_or(&export.name).to_owned();
        let block_len = export.volume.info().logical_block;
        Some(VolumeNames { volume, export: export.name.clone(), target, block_len })
    }

    /// The names of all volumes, in order.
    pub(crate) fn all(exports: &Exports) -> Vec<VolumeNames> {
        exports.iter().filter_map(|(volume, _)| VolumeNames::of(exports, volume)).collect()
    }

    /// The names of a volume whose default target has the volume's name.
    #[cfg(test)]
    pub(crate) fn plainly(name: &str) -> VolumeNames {
        let (export, target) = (name.to_owned(), name.to_owned());
        VolumeNames { volume: VolumeId(0), export, target, block_len: 512 }
    }
}

/// How clients connect to one export at one portal.
#[derive(Default)]
pub(crate) struct ConnectInfo {
    pub(crate) url: String,
    /// Shell commands that connect standard clients.
    pub(crate) commands: Vec<String>,
    /// A comment on them, for people.
    pub(crate) note: Option<String>,
    /// Environment variables for the command of `--run` in addition to URLs, for compatibility with
    /// other servers.
    pub(crate) variables: Vec<(&'static str, String)>,
    /// Commands for the shell of iPXE, joined by `&&`, that boot from the export; `None` if iPXE
    /// cannot use it.
    pub(crate) ipxe: Option<String>,
}
