//! ATA over Ethernet: its properties, its frontend for `serve`, and its URLs.
//!
//! AoE has no connections and no listeners: it is served on network interfaces. A volume whose name
//! is a disk address, such as `e7.3`, is that disk; any other gets the slot of its position in the
//! list of volumes. A kernel filter distributes frames to the cores, so that one core gets all
//! frames of one initiator for one disk. AoE is served on configured interfaces only. It needs
//! `CAP_NET_RAW`, and every station on the network can use the disks.

mod live;
mod remote;
mod store;

use self::live::LiveAoe;
use super::frontend::{ConnectInfo, Frontend, LiveFrontend, Portal, Service, VolumeNames};
use super::{Carrier, KeyError, Protocol};
use crate::failure::Failure;
use crate::process::privileges::{self, START_WITH_PRIVILEGES};
use blockmux_engine::protocol::aoe::{self, Share};
use blockmux_lab::ceiling::{MessageShape, Transport};
use blockmux_proto::aoe::AoeAddress as Disk;
use blockmux_proto::aoe::disks::AoeDisks;
use blockmux_wire::aoe::{ANY_SHELF, ANY_SLOT};
use clap::{ArgMatches, Args, Command, FromArgMatches};
use rustix::thread::CapabilitySet;
use serde::Deserialize;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use toml::de::Deserializer;

/// ATA over Ethernet.
pub(crate) const AOE: Protocol = Protocol {
    name: "aoe",
    title: "ATA over Ethernet",
    carrier: Carrier::Frames,
    is_default: false,
    has_rdma: false,
    is_over_rdma: false,
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
    service_type: None,
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
#[derive(Default)]
struct Aoe {
    settings: AoeSettings,
    /// Number of volumes of the config.
    volumes: usize,
    /// The disks that are served; empty before the start.
    served: OnceLock<AoeDisks>,
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
        let shelf = self.shelf();
        if shelf == ANY_SHELF {
            return Err("aoe_shelf 65535 is the broadcast address; use 0 to 65534".to_owned());
        }
        self.volumes = volumes.len();
        let all = volumes.iter().enumerate();
        let mut disks =
            all.map(|(at, name)| disk_of(shelf, Some(at), name)).collect::<Option<Vec<Disk>>>().ok_or_else(|| {
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

    fn serve(&self, service: &Service<'_>) -> Result<Option<Box<dyn LiveFrontend>>, Failure> {
        let live = LiveAoe::new(self, service)?;
        start(service, &live.disks)?;
        // A frontend is served once.
        let _ = self.served.set(live.disks.clone());
        Ok(Some(Box::new(live)))
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
            ipxe: Some(format!("sanboot aoe:{disk}")),
            ..ConnectInfo::default()
        }]
    }
}

impl Aoe {
    /// The shelf of volumes whose names are not disk addresses.
    fn shelf(&self) -> u16 {
        self.settings.aoe_shelf.unwrap_or(0)
    }

    /// The address of a volume's disk; `None` if it is not served.
    fn disk_of(&self, named: &VolumeNames) -> Option<Disk> {
        match self.served.get() {
            Some(disks) => disks.of_volume(named.volume),
            None => disk_of(self.shelf(), Some(named.volume.0 as usize), &named.export),
        }
    }
}

/// The disk address of a volume: its name, or on the shelf the slot of its position in the list of
/// volumes. `None` if its name is no disk address, and the shelf has no such slot or the volume no
/// position.
fn disk_of(shelf: u16, at: Option<usize>, name: &str) -> Option<Disk> {
    let in_order = || {
        let slot = u8::try_from(at?).ok().filter(|slot| *slot != ANY_SLOT)?;
        Some(Disk { shelf, slot })
    };
    name.parse().ok().or_else(in_order)
}

/// Serves disks on the interfaces of a service, on up to [`MAX_CORES`] cores. One session of a core
/// has all interfaces: a retransmission that arrives at another one is recognized.
fn start(service: &Service<'_>, disks: &AoeDisks) -> Result<(), Failure> {
    let Service { exports, places, cores, sessions, .. } = service;
    let interfaces: Vec<String> = places.iter().map(ToString::to_string).collect();
    let of = cores.count().clamp(1, MAX_CORES);
    for nth in 0..of {
        let share = Share { nth: nth as u8, of: of as u8 };
        let (interfaces, disks) = (interfaces.clone(), disks.clone());
        let (exports, sessions) = ((*exports).clone(), (*sessions).clone());
        cores
            .ask(nth, move |core| aoe::serve(core, &interfaces, share, exports, disks, sessions))
            .ok_or_else(|| Failure::run("a core ended unexpectedly; start the daemon again with -v"))?
            .map_err(|error| cannot_open(&error))?;
    }
    Ok(())
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
        let shelf = |shelf| Aoe {
            settings: AoeSettings { aoe_shelf: Some(shelf), aoe_state: None },
            ..Aoe::default()
        };
        let mut aoe = shelf(7);
        assert_eq!(aoe.check(&["a", "b", "c", "d", "e1.200"]), Ok(()));
        let place = ListenerAddress::Interface("eth1".to_owned());
        let portal = Portal { listener: place.clone(), reached_at: place, rdma_query: "" };
        let ways = |at, name: &str| {
            let named = VolumeNames { volume: VolumeId(at), ..VolumeNames::plainly(name) };
            aoe.connect_info(&AOE, &portal, &named)
        };
        let urls = |at, name: &str| ways(at, name).into_iter().map(|way| way.url).collect::<Vec<_>>();
        assert_eq!(urls(3, "d"), ["aoe://eth1/e7.3"]);
        assert_eq!(urls(4, "e1.200"), ["aoe://eth1/e1.200"], "where its name says");
        assert_eq!(ways(3, "d")[0].ipxe.as_deref(), Some("sanboot aoe:e7.3"));
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
