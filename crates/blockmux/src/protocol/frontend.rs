//! What `serve` asks of a protocol: its options and keys, its targets, what it announces, and what
//! can be changed of it.

use super::Protocol;
use super::frontends::KeyError;
use super::policy::{ListenerAddress, LiveAccess, Policy, TargetAccess};
use super::units::Units;
use crate::failure::Failure;
use blockmux_engine::cores::Cores;
use blockmux_engine::listener::{Permit, Serve};
use blockmux_engine::reactor::EngineCore;
use blockmux_engine::sessions::{SessionInfo, Sessions};
use blockmux_engine::socket::Stream;
use blockmux_proto::exports::{Exports, VolumeId};
use clap::error::ErrorKind;
use clap::{ArgMatches, Command};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::any::Any;
use std::net::SocketAddr;
use std::path::Path;
use std::rc::Rc;
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

    /// Its lists of targets in the config file.
    fn target_tables(&self) -> &'static [TargetTables] {
        &[]
    }

    /// Its keys, from the top level and with dots, that a change takes effect of at the next start
    /// only.
    fn fixed_keys(&self) -> &'static [&'static str] {
        &[]
    }

    /// Writes what one of its own commands has changed into a target's table of the config file, in
    /// the words of that file; answers whether the file has words for it.
    fn record(&self, _what: &Value, _target: &mut toml::Table) -> bool {
        false
    }

    /// The frontend itself, for the [`Live`] of its protocol.
    fn as_any(&self) -> &dyn Any;

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

    /// Begins to serve; `None` if it serves without listeners, so that nothing can be changed.
    ///
    /// # Errors
    /// If a place cannot be opened.
    fn serve(&self, service: &Service<'_>) -> Result<Option<Box<dyn Live>>, Failure>;

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

/// A list of targets in the config file: which of its keys are what, so that two configs can be
/// compared and the sessions found that a change affects.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TargetTables {
    /// The list's key.
    pub(crate) key: &'static str,
    /// The key of a target's name.
    pub(crate) name: &'static str,
    /// Keys of tables that map volumes by LUN or NSID; the first is written to.
    pub(crate) units: &'static [&'static str],
    /// Keys of lists that name initiators or hosts, and the key of the name in their entries;
    /// without one the entry is the name.
    pub(crate) peers: &'static [(&'static str, &'static str)],
    /// Keys of other lists of tables, and the key that tells their entries apart.
    pub(crate) parts: &'static [(&'static str, &'static str)],
}

/// A protocol that is served, and what can be changed of it.
pub(crate) type LiveProtocol = (&'static Protocol, Box<dyn Live>);

/// A session of the process that served before, between two requests.
pub(crate) struct HandedSession {
    /// Name of its protocol.
    pub(crate) protocol: String,
    /// The address of the listener that its connection came by.
    pub(crate) listener: String,
    pub(crate) stream: Stream,
    /// Bytes that were received and not parsed.
    pub(crate) unread: Vec<u8>,
    /// In its protocol's own form.
    pub(crate) state: Vec<u8>,
}

/// Continues a session on the calling core.
pub(crate) type Resume = Box<dyn FnOnce(&Rc<EngineCore>, HandedSession, Permit) + Send>;

/// A protocol while it is served, and what can be changed of it. Targets are those of iSCSI and SRP
/// and subsystems of NVMe; a protocol without any has the defaults. No core calls this.
pub(crate) trait Live: Send {
    /// What serves the connections that come to one of its places.
    fn serve(&self, place: &ListenerAddress) -> Serve;

    /// What continues sessions whose connections came to one of its places in the process that
    /// served before; `None` if its peers connect again by themselves.
    fn resume(&self, _place: &ListenerAddress) -> Option<Resume> {
        None
    }

    /// Follows another config of its protocol, which was checked as at a start: `desired` is that
    /// config's frontend, and `service` has its places and its policy. What is the same in both
    /// goes on without notice. Called before volumes go, and once more when others have come.
    fn follow(&self, desired: &dyn Frontend, service: &Service<'_>);

    /// Whether a session that began before the last [`Live::follow`] may go on.
    fn keeps(&self, session: &SessionInfo) -> bool;

    /// Sessions that may not go on had their time: disconnects what is left of them.
    fn settle(&self) {}

    /// A volume has come: where no targets are configured, it is one of its own.
    fn add(&self, _volume: VolumeId) {}

    /// A volume goes, whatever targets have it; they are told by their protocol's means.
    fn remove(&self, _volume: VolumeId) {}

    /// A target with whether everybody who can connect may use all of its volumes; `None` if there
    /// is none.
    fn access_of(&self, _target: &str) -> Option<LiveAccess> {
        None
    }

    /// The targets that have a volume.
    fn targets_of(&self, _volume: VolumeId) -> Vec<LiveAccess> {
        Vec::new()
    }

    /// Makes a volume a logical unit or a namespace of a target; answers its number.
    ///
    /// # Errors
    /// If its number is taken or none; what to do.
    fn attach(&self, target: &str, _volume: VolumeId, _place: &TargetPlace) -> Result<u32, String> {
        Err(format!("there is no target `{target}`"))
    }

    /// Takes one away.
    ///
    /// # Errors
    /// If there is none.
    fn detach(&self, target: &str, _number: u32) -> Result<(), String> {
        Err(format!("there is no target `{target}`"))
    }

    /// Does what one of its frontend's own commands asks of a target; answers what there is to say,
    /// if anything.
    ///
    /// # Errors
    /// What is wrong, and what to do.
    fn change(&self, target: &str, _what: &Value) -> Result<Option<String>, String> {
        Err(format!("there is no target `{target}`"))
    }
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
