//! ATA over Ethernet, as the commands know it.
//!
//! It has no connections, so that nothing listens: interfaces are served, and a volume is a disk there by its place, or
//! where its name says, as `e7.3`. Each core takes its share of the frames, all of one initiator for one disk, by a filter
//! in the kernel. Nothing is served on raw frames unless an interface is named. That needs `CAP_NET_RAW`, and whoever is
//! on the network of an interface can use the disks.

mod remote;
mod store;

use super::policy::{Place, Policy, PolicyListener};
use super::{Protocol, Settings, Started, Way};
use crate::failure::Failure;
use crate::privileges::{self, START_WITH_PRIVILEGES};
use blockmux_engine::aoe::{self, ServeError, Share};
use blockmux_engine::cores::Cores;
use blockmux_engine::sessions::Sessions;
use blockmux_lab::ceiling::{MessageShape, Transport};
use blockmux_proto::aoe::Address as Disk;
use blockmux_proto::aoe::unit::Unit;
use blockmux_proto::exports::Exports;
use blockmux_wire::aoe::{ANY_SHELF, ANY_SLOT};
use rustix::thread::CapabilitySet;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::PathBuf;

/// AoE as a protocol of URLs. It is not among those with listeners.
pub(crate) const AOE: Protocol = Protocol {
    name: "aoe",
    title: "ATA over Ethernet",
    port: 0,
    schemes: &[("aoe", Transport::Tcp)],
    unspoken_schemes: &[],
    url_forms: &["aoe://IFACE/eSHELF.SLOT"],
    max_description: usize::MAX,
    max_logical_block: blockmux_wire::ata::ATA_SECTOR as u32,
    shape: MessageShape { read_request: 36, read_reply_head: 36, write_request_head: 36, write_reply: 36 },
    check: |_, _| Ok(()),
    is_open: |_: &Settings| true,
    targets: |_| Vec::new(),
    serve: |_| Started { serve: Vec::new(), live: None },
    ways: |_, _, _| Vec::new(),
    connect: None,
    remote: remote::of_url,
    served_with: None,
};

/// What is served where.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Serving {
    /// Network interfaces with the volumes that are named for them; none: nothing is served.
    pub(crate) interfaces: Vec<(String, Option<Vec<String>>)>,
    /// Disks that are not named by their address are in this shelf.
    pub(crate) shelf: u16,
    /// Where config strings, masks and reservations are kept.
    pub(crate) state: Option<PathBuf>,
}

impl Serving {
    /// Whether there is anything to do.
    pub(crate) fn is_wanted(&self) -> bool {
        !self.interfaces.is_empty()
    }

    /// Whether volumes of these names have addresses, each its own.
    pub(crate) fn check<'a>(&self, names: impl Iterator<Item = &'a str>) -> Result<(), Failure> {
        if self.shelf == ANY_SHELF {
            return Err(Failure::request("shelf 65535 means every shelf; use 0 to 65534"));
        }
        if !self.is_wanted() {
            return Ok(());
        }
        let mut disks = names
            .enumerate()
            .map(|(place, name)| self.disk(place, name))
            .collect::<Option<Vec<Disk>>>()
            .ok_or_else(|| {
                Failure::request(format!(
                    "a shelf has {ANY_SLOT} slots, and there are more volumes; name the others as disks of another, \
                     as e1.0"
                ))
            })?;
        disks.sort_unstable();
        match disks.iter().zip(disks.iter().skip(1)).find(|(disk, next)| disk == next) {
            Some((disk, _)) => Err(Failure::request(format!(
                "two volumes are disk {disk}: one that is not named by its address is in the slot of its place; \
                 name one of them as another disk"
            ))),
            None => Ok(()),
        }
    }

    /// The interfaces as listeners.
    pub(crate) fn listeners(&self) -> impl Iterator<Item = PolicyListener> {
        let listener = |(interface, volumes): &(String, Option<Vec<String>>)| PolicyListener {
            protocol: &AOE,
            place: Place::Interface(interface.clone()),
            volumes: volumes.clone(),
            is_asked: true,
        };
        self.interfaces.iter().map(listener)
    }

    /// How the volume at that place, of that name, is reached.
    pub(crate) fn ways(&self, policy: &Policy, place: usize, name: &str) -> Vec<Way> {
        let Some(disk) = self.disk(place, name) else { return Vec::new() };
        let is_here =
            |interface: &&String| policy.serves(&AOE, &Place::Interface((*interface).clone()), name);
        let way = |interface: &String| Way {
            url: format!("aoe://{interface}/{disk}"),
            commands: vec![
                "modprobe aoe".to_owned(),
                "aoe-discover && aoe-stat".to_owned(),
                format!("blockdev --getsize64 /dev/etherd/{disk}"),
            ],
            variables: Vec::new(),
        };
        self.interfaces.iter().map(|(interface, _)| interface).filter(is_here).map(way).collect()
    }

    /// Begins to serve.
    pub(crate) fn start(
        &self,
        cores: &Cores,
        exports: &Exports,
        policy: &Policy,
        sessions: &Sessions,
    ) -> Result<(), Failure> {
        if !self.is_wanted() {
            return Ok(());
        }
        let disks = exports.iter().enumerate().filter_map(|(place, (volume, export))| {
            self.disk(place, &export.name).map(|disk| (disk, volume, export.name.clone()))
        });
        let is_anywhere =
            |name: &str| self.listeners().any(|listener| policy.serves(&AOE, &listener.place, name));
        let units = disks.filter(|(.., name)| is_anywhere(name)).map(|(disk, volume, name)| {
            let (kept, store) = store::open(self.state.as_deref(), disk)?;
            Ok((name, Unit::new(disk, volume, kept, store)))
        });
        let units: Vec<(String, Unit)> = units.collect::<Result<_, Failure>>()?;
        self.groups().try_for_each(|(interfaces, place)| {
            let here = units.iter().filter(|(name, _)| policy.serves(&AOE, &place, name));
            let units: Vec<Unit> = here.map(|(_, unit)| unit.clone()).collect();
            start_at(cores, exports, &interfaces, &units, sessions)
        })
    }

    /// Interfaces that name the same volumes, and one of them. They share what is known of recent
    /// writes.
    fn groups(&self) -> impl Iterator<Item = (Vec<String>, Place)> {
        let mut groups: BTreeMap<&Option<Vec<String>>, Vec<String>> = BTreeMap::new();
        for (interface, volumes) in &self.interfaces {
            groups.entry(volumes).or_default().push(interface.clone());
        }
        groups.into_values().filter_map(|interfaces| {
            let place = Place::Interface(interfaces.first()?.clone());
            Some((interfaces, place))
        })
    }

    /// Where a volume is; `None` if its name is no address, and its place is beyond the shelf.
    fn disk(&self, place: usize, name: &str) -> Option<Disk> {
        let in_order = || {
            let slot = u8::try_from(place).ok().filter(|slot| *slot != ANY_SLOT)?;
            Some(Disk { shelf: self.shelf, slot })
        };
        name.parse().ok().or_else(in_order)
    }
}

/// Serves these units at these interfaces, on all cores that there is work for.
fn start_at(
    cores: &Cores,
    exports: &Exports,
    interfaces: &[String],
    units: &[Unit],
    sessions: &Sessions,
) -> Result<(), Failure> {
    let of = cores.count().clamp(1, MOST_CORES);
    for nth in 0..of {
        let share = Share { nth: nth as u8, of: of as u8 };
        let (interfaces, exports, units) = (interfaces.to_vec(), exports.clone(), units.to_vec());
        let sessions = sessions.clone();
        cores
            .ask(nth, move |core| aoe::serve(core, &interfaces, share, exports, units, sessions))
            .ok_or_else(|| Failure::run("a core has ended; start again with -v"))?
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

/// Why an interface cannot be used, and what to do.
fn cannot_open(port: &blockmux_engine::frames::target::PortError) -> Failure {
    let advice = match port.error.kind() {
        ErrorKind::PermissionDenied if privileges::has_given_up(CapabilitySet::NET_RAW) => {
            START_WITH_PRIVILEGES
        }
        ErrorKind::PermissionDenied => {
            "raw frames need CAP_NET_RAW; run as root, or give the program that capability"
        }
        ErrorKind::NetworkDown => "bring it up, as with `ip link set IFACE up`",
        _ => "`ip link` lists what there is",
    };
    Failure::request(format!("{port}; {advice}"))
}

/// Each frame passes the filters of all.
const MOST_CORES: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_are_the_slots_of_a_shelf_or_the_disks_that_they_are_named() {
        let interfaces = ["eth0", "eth1"].map(|name| (name.to_owned(), None)).to_vec();
        let serving = Serving { interfaces, shelf: 7, state: None };
        let volumes = ["a", "e1.200"].map(|name| (name.to_owned(), None));
        let policy = Policy::new(&Settings::default(), volumes.into_iter()).unwrap();
        let policy = policy.at(serving.listeners().collect(), false).unwrap();
        let urls = |place, name| {
            serving.ways(&policy, place, name).into_iter().map(|way| way.url).collect::<Vec<_>>()
        };
        assert_eq!(urls(3, "a"), ["aoe://eth0/e7.3", "aoe://eth1/e7.3"]);
        assert_eq!(urls(3, "e1.200"), ["aoe://eth0/e1.200", "aoe://eth1/e1.200"], "where its name says");
        let check = |names: &[&str]| serving.check(names.iter().copied()).map_err(|error| error.to_string());
        assert_eq!(check(&["a"; 255]), Ok(()));
        assert!(check(&["a"; 256]).unwrap_err().contains("a shelf has 255 slots"));
        assert_eq!(check(&[&["a"; 255][..], &["e8.0", "e8.1"]].concat()), Ok(()));
        assert!(check(&["a", "e7.0"]).unwrap_err().contains("two volumes are disk e7.0"));
        let every = Serving { shelf: 65_535, ..serving };
        assert!(every.check(["a"].into_iter()).unwrap_err().to_string().contains("every shelf"));
    }
}
