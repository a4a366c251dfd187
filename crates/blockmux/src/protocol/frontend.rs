//! What `serve` asks of a protocol: its options and keys, its targets, what it announces, and what
//! can be changed of it.

use super::Protocol;
use super::frontends::KeyError;
use super::policy::{ListenerAddress, LiveAccess, Policy, TargetAccess};
use super::units::Units;
use crate::failure::Failure;
use blockmux_engine::cores::Cores;
use blockmux_engine::listener::Serve;
use blockmux_engine::sessions::Sessions;
use blockmux_proto::exports::{Exports, VolumeId};
use clap::error::ErrorKind;
use clap::{ArgMatches, Command};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use toml::de::Deserializer;

/// One protocol as a daemon serves it, with what the command line and the config file say of it.
/// Where a method has a default, that is what a protocol does of which nothing but listeners can be
/// said.
pub(crate) trait Frontend: Send + Sync {
    /// Adds its options beyond its listeners to those of `serve`.
    fn options(&self, command: Command) -> Command {
        command
    }

    /// Takes what the command line says by these options.
    ///
    /// # Errors
    /// If a value is wrong.
    fn take_options(&mut self, _matches: &ArgMatches) -> Result<(), clap::Error> {
        Ok(())
    }

    /// Its keys in the config file beyond its listeners.
    fn keys(&self) -> &'static [&'static str] {
        &[]
    }

    /// Takes what the config file says by these keys, and reads the files that it names; relative
    /// paths are below `directory`. What the command line has said stays.
    ///
    /// # Errors
    /// If a value or a file is wrong.
    fn take_keys(&mut self, _written: Deserializer<'_>, _directory: &Path) -> Result<(), KeyError> {
        Ok(())
    }

    /// Adds the commands of `ctl` that are its own.
    fn commands(&self, command: Command) -> Command {
        command
    }

    /// Reads one of them: its target, and what [`Live::change`] is told.
    ///
    /// # Errors
    /// If it is wrong, or none of them.
    fn read_command(&self, _matches: &ArgMatches) -> Result<(String, Value), clap::Error> {
        Err(clap::Error::new(ErrorKind::InvalidSubcommand))
    }

    /// Whether more is said of it than where it listens: that has to be right although nobody
    /// listens for it yet.
    fn is_configured(&self) -> bool {
        false
    }

    /// Whether it can serve volumes of these names, which are all that there are at the start, in
    /// order.
    ///
    /// # Errors
    /// Why not, and what to do.
    fn check(&mut self, _volumes: &[&str]) -> Result<(), String> {
        Ok(())
    }

    /// Its configured targets, and who may use their volumes; without any, each volume is an export
    /// of its own.
    fn targets(&self) -> Vec<TargetAccess> {
        Vec::new()
    }

    /// Whether clients must prove who they are before they use the exports that volumes are by
    /// themselves.
    fn restricts_exports(&self) -> bool {
        false
    }

    /// Begins to serve.
    ///
    /// # Errors
    /// If a place cannot be opened.
    fn serve(&self, service: &Service<'_>) -> Result<Started, Failure>;

    /// How clients of `protocol`, which is this one or is served with it, reach a volume at one of
    /// its places.
    fn ways(&self, protocol: &Protocol, portal: &Portal, named: &VolumeNames) -> Vec<Way>;
}

/// What one frontend serves, and where.
pub(crate) struct Service<'a> {
    pub(crate) exports: &'a Exports,
    /// The volumes as SCSI logical units.
    pub(crate) units: &'a Arc<Units>,
    /// Where clients come to.
    pub(crate) places: &'a [ListenerAddress],
    /// Which volumes are served where.
    pub(crate) policy: &'a Policy,
    /// What serves.
    pub(crate) cores: &'a Cores,
    /// Lists who uses what, where no connection does.
    pub(crate) sessions: &'a Sessions,
}

/// What serves one protocol.
pub(crate) struct Started {
    /// For the connections that come to each socket, in order.
    pub(crate) serve: Vec<Serve>,
    /// What can be changed meanwhile; `None` where the list of exports is all that there is.
    pub(crate) live: Option<Box<dyn Live>>,
}

/// A protocol that is served, and what can be changed of it.
pub(crate) type LiveProtocol = (&'static Protocol, Box<dyn Live>);

/// What can be changed of a protocol while it is served. Targets are those of iSCSI and subsystems
/// of NVMe. No core calls this.
pub(crate) trait Live: Send {
    /// A volume has come: where no targets are configured, it is one of its own.
    fn add(&self, volume: VolumeId);

    /// A volume goes, whatever targets have it; they are told by their protocol's means.
    fn remove(&self, volume: VolumeId);

    /// A target with whether everybody who can connect may use all of its volumes; `None` if there
    /// is none.
    fn access_of(&self, target: &str) -> Option<LiveAccess>;

    /// The targets that have a volume.
    fn targets_of(&self, volume: VolumeId) -> Vec<LiveAccess>;

    /// Makes a volume a logical unit or a namespace of a target; answers its number.
    ///
    /// # Errors
    /// If its number is taken or none; what to do.
    fn attach(&self, target: &str, volume: VolumeId, place: &TargetPlace) -> Result<u32, String>;

    /// Takes one away.
    ///
    /// # Errors
    /// If there is none.
    fn detach(&self, target: &str, number: u32) -> Result<(), String>;

    /// Does what one of its frontend's own commands asks of a target; answers what there is to say,
    /// if anything.
    ///
    /// # Errors
    /// What is wrong, and what to do.
    fn change(&self, target: &str, what: &Value) -> Result<Option<String>, String>;
}

/// What a command asks that one protocol alone knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Change {
    /// The protocol's name.
    pub(crate) protocol: String,
    pub(crate) target: String,
    /// In that protocol's words.
    pub(crate) what: Value,
}

/// Where in a target.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TargetPlace {
    /// LUN or NSID; `None`: the lowest that is free.
    pub(crate) number: Option<u32>,
    /// ANAGRPID; `None`: the last group, if there are any.
    pub(crate) ana_group: Option<u32>,
}

/// Where a protocol is served, and a place by which clients reach it: another one where it listens
/// at all addresses.
#[derive(Clone, Debug)]
pub(crate) struct Portal {
    pub(crate) listener: ListenerAddress,
    pub(crate) reached_at: ListenerAddress,
}

impl Portal {
    /// The TCP addresses of both; `None` of anything else.
    pub(crate) fn tcp(&self) -> Option<(SocketAddr, SocketAddr)> {
        Some((self.listener.tcp()?, self.reached_at.tcp()?))
    }

    /// A listener at this one address.
    #[cfg(test)]
    pub(crate) fn at(address: &str) -> Portal {
        use blockmux_engine::socket::Address;
        let place = ListenerAddress::Socket(Address::Tcp(address.parse().expect("a test names addresses")));
        Portal { listener: place.clone(), reached_at: place }
    }
}

/// What a volume that is served is called.
#[derive(Clone, Debug)]
pub(crate) struct VolumeNames {
    pub(crate) volume: VolumeId,
    /// By NBD, and in the config file.
    pub(crate) export: String,
    /// Behind the prefixes of the target and the subsystem that it is where none are configured.
    pub(crate) target: String,
}

impl VolumeNames {
    /// The names of a volume, if it is still there.
    pub(crate) fn of(exports: &Exports, volume: VolumeId) -> Option<VolumeNames> {
        let (export, served) = exports.get(volume).zip(exports.served(volume))?;
        let target = served.target_name().unwrap_or(&export.name).to_owned();
        Some(VolumeNames { volume, export: export.name.clone(), target })
    }

    /// The names of all volumes, in order.
    pub(crate) fn all(exports: &Exports) -> Vec<VolumeNames> {
        exports.iter().filter_map(|(volume, _)| VolumeNames::of(exports, volume)).collect()
    }

    /// The names of a volume whose own target is called as it is.
    #[cfg(test)]
    pub(crate) fn plainly(name: &str) -> VolumeNames {
        VolumeNames { volume: VolumeId(0), export: name.to_owned(), target: name.to_owned() }
    }
}

/// How one export is reached through one listener.
pub(crate) struct Way {
    /// For our own initiator and for others.
    pub(crate) url: String,
    /// What a shell runs to connect standard clients.
    pub(crate) commands: Vec<String>,
    /// What the command of `--run` finds in its environment beside URLs, as other servers' users
    /// expect it.
    pub(crate) variables: Vec<(&'static str, String)>,
}
