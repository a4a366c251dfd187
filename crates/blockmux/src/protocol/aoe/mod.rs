//! ATA over Ethernet: its properties, its frontend for `serve`, and its URLs.
//!
//! AoE has no connections and no listeners: it is served on network interfaces. A volume whose name
//! is a disk address, such as `e7.3`, is that disk; any other gets the slot of its position in the
//! list of volumes. A kernel filter distributes frames to the cores, so that one core gets all
//! frames of one initiator for one disk. AoE is served on configured interfaces only. It needs
//! `CAP_NET_RAW`, and every station on the network can use the disks.

mod remote;
mod store;

use super::frontend::{ConnectInfo, Frontend, LiveFrontend, Portal, Service, VolumeNames};
use super::{Carrier, KeyError, Protocol};
use crate::failure::Failure;
use crate::process::privileges::{self, START_WITH_PRIVILEGES};
use blockmux_engine::core::cores::Cores;
use blockmux_engine::protocol::aoe::{self, ServeError, Share};
use blockmux_engine::serve::sessions::Sessions;
use blockmux_lab::ceiling::{MessageShape, Transport};
use blockmux_proto::aoe::AoeAddress as Disk;
use blockmux_proto::aoe::unit::AoeUnit;
use blockmux_proto::exports::Exports;
use blockmux_wire::aoe::{ANY_SHELF, ANY_SLOT};
use clap::{ArgMatches, Args, Command, FromArgMatches};
use rustix::thread::CapabilitySet;
use serde::Deserialize;
use std::any::Any;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use toml::de::Deserializer;

/// ATA over Ethernet.
pub(crate) const AOE: Protocol = Protocol {
    name: "aoe",
    title: "ATA over Ethernet",
    carrier: Carrier::Frames,
    is_default: false,
    listener_help: ["IFACE", "Serve ATA over Ethernet at IFACE; repeatable"],
    port: 0,
    schemes: &[("aoe", Transport::Tcp)],
    unsupported_schemes: &[],
    url_forms: &["aoe://IFACE/eSHELF.SLOT"],
    max_description: usize::MAX,
    max_logical_block: blockmux_wire::ata::ATA_SECTOR as u32,
    shape: MessageShape { read_request: 36, read_reply_head: 36, write_request_head: 36, write_reply: 36 },
    frontend: || Box::<Aoe>::default(),
    remote: remote::of_url,
    served_with: None,
};

/// Settings of the command line; the config file has the same names.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct AoeSettings {
    /// Shelf of the AoE disks [default: 0]
    #[arg(long, value_name = "N")]
    aoe_shelf: Option<u16>,
    /// Directory for AoE config strings, MAC masks and reservations
    #[arg(long, value_name = "DIR")]
    aoe_state: Option<PathBuf>,
}

/// The frontend of AoE.
#[derive(Clone, Debug, Default)]
struct Aoe {
    settings: AoeSettings,
    /// Number of volumes at the start. Volumes that are added later are not exported over AoE.
    volumes: usize,
}

impl Frontend for Aoe {
    fn options(&self, command: Command) -> Command {
        AoeSettings::augment_args(command)
    }

    fn take_options(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.settings = AoeSettings::from_arg_matches(matches)?;
        Ok(())
    }

    fn keys(&self) -> &'static [&'static str] {
        &["aoe_shelf", "aoe_state"]
    }

    fn take_keys(&mut self, written: Deserializer<'_>, directory: &Path) -> Result<(), KeyError> {
        let AoeSettings { aoe_shelf, aoe_state } = AoeSettings::deserialize(written)?;
        self.settings.aoe_shelf = self.settings.aoe_shelf.or(aoe_shelf);
        self.settings.aoe_state =
            self.settings.aoe_state.take().or(aoe_state.map(|path| directory.join(path)));
        Ok(())
    }

    /// An invalid shelf must be refused even if AoE is not served.
    fn is_configured(&self) -> bool {
        self.shelf() == ANY_SHELF
    }

    /// Checks that every volume has a disk address and that addresses are unique.
    fn check(&mut self, volumes: &[&str]) -> Result<(), String> {
        if self.shelf() == ANY_SHELF {
            return Err("aoe_shelf 65535 is the broadcast address; use 0 to 65534".to_owned());
        }
        self.volumes = volumes.len();
        let all = volumes.iter().enumerate();
        let mut disks =
            all.map(|(at, name)| self.disk(at, name)).collect::<Option<Vec<Disk>>>().ok_or_else(|| {
                format!(
                    "there are more volumes than the {ANY_SLOT} slots of a shelf; give the others the names of disks \
                     of another shelf, such as e1.0"
                )
            })?;
        disks.sort_unstable();
        match disks.iter().zip(disks.iter().skip(1)).find(|(disk, next)| disk == next) {
            Some((disk, _)) => Err(format!(
                "two volumes are disk {disk}: a volume whose name is not a disk address gets the slot of its position; \
                 give one of them the name of another disk, such as e1.0"
            )),
            None => Ok(()),
        }
    }

    fn fixed_keys(&self) -> &'static [&'static str] {
        &["aoe", "aoe_shelf", "aoe_state"]
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn serve(&self, service: &Service<'_>) -> Result<Option<Box<dyn LiveFrontend>>, Failure> {
        let Service { exports, places, policy, cores, sessions, .. } = service;
        let all = VolumeNames::all(exports).into_iter();
        let here = all.filter(|named| places.iter().any(|place| policy.serves(&AOE, place, &named.export)));
        let units = here.filter_map(|named| Some((self.disk_of(&named)?, named))).map(|(disk, named)| {
            let (disk_settings, store) = store::open(self.settings.aoe_state.as_deref(), disk)?;
            let unit = AoeUnit::new(disk, named.volume, disk_settings, store);
            Ok((named.export, unit))
        });
        let units: Vec<(String, AoeUnit)> = units.collect::<Result<_, Failure>>()?;
        // Interfaces with the same disks share their list of recent writes.
        let mut groups: BTreeMap<Vec<&str>, Vec<String>> = BTreeMap::new();
        for place in *places {
            let names = units.iter().map(|(name, _)| name.as_str());
            let names = names.filter(|name| policy.serves(&AOE, place, name)).collect();
            groups.entry(names).or_default().push(place.to_string());
        }
        for (names, interfaces) in groups {
            let units = units.iter().filter(|(name, _)| names.contains(&name.as_str()));
            let units: Vec<AoeUnit> = units.map(|(_, unit)| unit.clone()).collect();
            start_at(cores, exports, &interfaces, &units, sessions)?;
        }
        Ok(None)
    }

    fn connect_info(&self, _: &Protocol, portal: &Portal, named: &VolumeNames) -> Vec<ConnectInfo> {
        let Some(disk) = self.disk_of(named) else { return Vec::new() };
        vec![ConnectInfo {
            url: format!("aoe://{}/{disk}", portal.reached_at),
            commands: vec![
                "modprobe aoe".to_owned(),
                "aoe-discover && aoe-stat".to_owned(),
                format!("blockdev --getsize64 /dev/etherd/{disk}"),
            ],
            variables: Vec::new(),
        }]
    }
}

impl Aoe {
    /// The shelf of volumes whose names are not disk addresses.
    fn shelf(&self) -> u16 {
        self.settings.aoe_shelf.unwrap_or(0)
    }

    /// The address of a volume's disk; `None` if the volume was added later.
    fn disk_of(&self, named: &VolumeNames) -> Option<Disk> {
        let at = named.volume.0 as usize;
        if at < self.volumes { self.disk(at, &named.export) } else { None }
    }

    /// The disk address of the volume at position `at`; `None` if its name is not a disk address
    /// and the shelf has no slot `at`.
    fn disk(&self, at: usize, name: &str) -> Option<Disk> {
        let in_order = || {
            let slot = u8::try_from(at).ok().filter(|slot| *slot != ANY_SLOT)?;
            Some(Disk { shelf: self.shelf(), slot })
        };
        name.parse().ok().or_else(in_order)
    }
}

/// Serves units on interfaces, on up to [`MAX_CORES`] cores.
fn start_at(
    cores: &Cores,
    exports: &Exports,
    interfaces: &[String],
    units: &[AoeUnit],
    sessions: &Sessions,
) -> Result<(), Failure> {
    let of = cores.count().clamp(1, MAX_CORES);
    for nth in 0..of {
        let share = Share { nth: nth as u8, of: of as u8 };
        let (interfaces, exports, units) = (interfaces.to_vec(), exports.clone(), units.to_vec());
        let sessions = sessions.clone();
        cores
            .ask(nth, move |core| aoe::serve(core, &interfaces, share, exports, units, sessions))
            .ok_or_else(|| Failure::run("a core ended unexpectedly; start the daemon again with -v"))?
            .map_err(|error| cannot_serve(&error))?;
    }
    Ok(())
}

fn cannot_serve(error: &ServeError) -> Failure {
    match error {
        ServeError::Port(port) => cannot_open(port),
        ServeError::Address(_) => Failure::request(error),
    }
}

/// The failure of an interface that cannot be opened, with advice.
fn cannot_open(port: &blockmux_engine::net::frames::PortError) -> Failure {
    let advice = match port.error.kind() {
        ErrorKind::PermissionDenied if privileges::has_dropped(CapabilitySet::NET_RAW) => {
            START_WITH_PRIVILEGES
        }
        ErrorKind::PermissionDenied => {
            "raw frames need CAP_NET_RAW; run as root, or grant that capability to the program"
        }
        ErrorKind::NetworkDown => "bring it up with `ip link set IFACE up`",
        _ => "`ip link` lists the interfaces",
    };
    Failure::request(format!("{port}; {advice}"))
}

/// Maximum number of cores that serve one interface. Each frame passes the filters of all of them.
const MAX_CORES: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::address::ListenerAddress;
    use blockmux_proto::exports::VolumeId;

    #[test]
    fn volumes_are_slots_of_a_shelf_or_the_disks_with_their_names() {
        let shelf =
            |shelf| Aoe { settings: AoeSettings { aoe_shelf: Some(shelf), aoe_state: None }, volumes: 0 };
        let mut aoe = shelf(7);
        assert_eq!(aoe.check(&["a", "b", "c", "d", "e1.200"]), Ok(()));
        let place = ListenerAddress::Interface("eth1".to_owned());
        let portal = Portal { listener: place.clone(), reached_at: place };
        let urls = |at, name: &str| {
            let named = VolumeNames { volume: VolumeId(at), ..VolumeNames::plainly(name) };
            aoe.connect_info(&AOE, &portal, &named).into_iter().map(|way| way.url).collect::<Vec<_>>()
        };
        assert_eq!(urls(3, "d"), ["aoe://eth1/e7.3"]);
        assert_eq!(urls(4, "e1.200"), ["aoe://eth1/e1.200"], "where its name says");
        assert!(urls(5, "e1.201").is_empty(), "it came later");
        let mut check = |names: &[&str]| aoe.check(names);
        assert_eq!(check(&["a"; 255]), Ok(()));
        assert!(check(&["a"; 256]).unwrap_err().contains("than the 255 slots of a shelf"));
        assert_eq!(check(&[&["a"; 255][..], &["e8.0", "e8.1"]].concat()), Ok(()));
        assert!(check(&["a", "e7.0"]).unwrap_err().contains("two volumes are disk e7.0"));
        let mut every = shelf(65_535);
        assert!(
            every.is_configured() && every.check(&["a"]).unwrap_err().contains("is the broadcast address")
        );
    }
}
