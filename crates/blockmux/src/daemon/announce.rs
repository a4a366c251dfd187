//! The output of a daemon that is ready: the URLs of each export, and commands that connect
//! standard clients.

use super::disks::DiskInfo;
use crate::failure::Failure;
use crate::output::{printable, shell_word};
use crate::process::machine::own_addresses;
use crate::protocol::Frontends;
use crate::protocol::address::ListenerAddress;
use crate::protocol::frontend::{ConnectInfo, Frontend, Portal, VolumeNames};
use crate::protocol::policy::{Policy, PolicyListener};
use crate::protocol::served_protocols;
use blockmux_engine::net::socket::Address;
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::names::rdma::TCP_TARGET_QUERY;
use blockmux_volume::units::human_size;
use serde::Serialize;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// All exports and how clients reach them.
pub(super) struct Announcement {
    exports: Vec<Announced>,
    /// iSCSI targets that redirect logins, and the address that they redirect to.
    moved: Vec<(String, String)>,
    /// URL of the HTTP API over TCP.
    api: Option<String>,
}

struct Announced {
    name: String,
    /// In bytes.
    size: u64,
    disk: Option<AnnouncedDisk>,
    /// URL and commands for each listener and address.
    connect: Vec<AnnouncedUrl>,
}

/// How clients connect to an export at one portal.
struct AnnouncedUrl {
    /// Name of the protocol.
    protocol: &'static str,
    info: ConnectInfo,
    /// The query of the portal's URLs over RDMA, which names their fabric.
    rdma_query: &'static str,
    /// Whether only clients on other machines can use it.
    is_for_others: bool,
}

/// The disk of a volume on this machine.
#[derive(Clone)]
struct AnnouncedDisk {
    path: String,
    /// What the path is: `device` or `socket`.
    path_is: &'static str,
}

/// Location of the clients that the announcement is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClientLocation {
    /// On this machine, as the command of `--run`.
    Local,
    /// Possibly on other machines.
    Anywhere,
}

/// Level of detail of the text form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AnnouncementDetail {
    /// The line `ready` only.
    ReadyLine,
    /// All URLs and commands if they fit into [`MAX_LINES`], else the first URL of each protocol.
    Short,
    /// All URLs and commands, also those for iPXE.
    Full,
}

/// Says how clients reach volumes.
pub(super) struct Announcer<'a> {
    policy: &'a Policy,
    listeners: Vec<(PolicyListener, &'a dyn Frontend, Vec<Portal>)>,
}

impl<'a> Announcer<'a> {
    /// The listeners as they are now.
    pub(super) fn new(
        frontends: &'a Frontends,
        policy: &'a Policy,
        clients: ClientLocation,
    ) -> Announcer<'a> {
        let listeners = policy.listeners().into_iter().filter_map(|listener| {
            let (frontend, portals) = (frontends.of(listener.protocol)?, portals(&listener, clients));
            Some((listener, frontend, portals))
        });
        Announcer { policy, listeners: listeners.collect() }
    }

    /// The URLs of a volume; none if it has been removed.
    pub(super) fn urls_of(&self, exports: &Exports, volume: VolumeId) -> Vec<String> {
        let named = VolumeNames::of(exports, volume).into_iter();
        named.flat_map(|named| self.connect(&named)).map(|url| url.info.url).collect()
    }

    fn connect(&self, named: &VolumeNames) -> Vec<AnnouncedUrl> {
        let mut connect = Vec::new();
        for (listener, frontend, portals) in &self.listeners {
            let spoken = served_protocols(listener.protocol);
            for protocol in spoken.filter(|own| self.policy.leads_to(own, &listener.place, &named.export)) {
                for portal in portals {
                    for info in frontend.connect_info(protocol, portal, named) {
                        let (rdma_query, is_for_others) = (portal.rdma_query, portal.is_for_others());
                        let protocol = protocol.name;
                        add_new(&mut connect, AnnouncedUrl { protocol, info, rdma_query, is_for_others });
                    }
                }
            }
        }
        connect
    }
}

impl Announcement {
    /// Collects every export on every listener.
    pub(super) fn new(
        exports: &Exports,
        frontends: &Frontends,
        policy: &Policy,
        clients: ClientLocation,
    ) -> Announcement {
        let announcer = Announcer::new(frontends, policy, clients);
        let announced = exports.iter().filter_map(|(volume, export)| {
            let named = VolumeNames::of(exports, volume)?;
            let connect = announcer.connect(&named);
            Some(Announced { connect, size: export.volume.info().size, name: named.export, disk: None })
        });
        Announcement { exports: announced.collect(), moved: policy.moved(), api: None }
    }

    /// Adds the URL of the API.
    pub(super) fn with_api(self, api: Option<String>) -> Announcement {
        Announcement { api, ..self }
    }

    /// Adds the disks of volumes.
    pub(super) fn with_disks(mut self, disks: &[DiskInfo]) -> Announcement {
        let exports = self.exports.iter_mut().map(|export| (export.name.clone(), export));
        let mut exports: HashMap<_, _> = exports.collect();
        for disk in disks {
            let export = exports.get_mut(&disk.volume);
            let disk = disk.device.as_ref().map(|device| AnnouncedDisk {
                path: device.path.display().to_string(),
                path_is: device.way.path_is(),
            });
            export.into_iter().for_each(|export| export.disk.clone_from(&disk));
        }
        self
    }

    /// Text for people; the last line is `ready`.
    pub(super) fn text(&self, detail: AnnouncementDetail) -> String {
        let mut lines = if detail == AnnouncementDetail::ReadyLine { Vec::new() } else { self.lines(detail) };
        if detail == AnnouncementDetail::Short && self.exports.len() > 1 && lines.len() > MAX_LINES {
            lines.clear();
            let mut shown = 0;
            for export in &self.exports {
                let own = export.in_short();
                if lines.len() + own.len() >= MAX_LINES {
                    break;
                }
                lines.extend(own);
                shown += 1;
            }
            lines.push(match self.exports.len() - shown {
                0 => "--verbose prints all URLs and client commands".to_owned(),
                left_out => {
                    format!("and {left_out} more; --verbose prints all URLs and client commands")
                }
            });
        }
        if detail != AnnouncementDetail::ReadyLine {
            lines.extend(self.api.iter().map(|url| format!("API  {url}")));
        }
        lines.push("ready".to_owned());
        lines.join("\n")
    }

    /// All URLs and commands of every export, and all redirected targets. Commands for iPXE are of
    /// use to few, so only the full detail has them.
    fn lines(&self, detail: AnnouncementDetail) -> Vec<String> {
        let mut lines = Vec::new();
        for export in &self.exports {
            lines.push(format!("{}  {}", export.name, human_size(export.size)));
            lines.extend(export.disk.iter().map(|disk| format!("  {}", printable(&disk.path))));
            if export.connect.is_empty() && export.disk.is_none() {
                lines.push(format!("  {UNREACHABLE}"));
            }
            for AnnouncedUrl { info, is_for_others, .. } in &export.connect {
                let from = if *is_for_others { FROM_OTHERS } else { "" };
                lines.push(format!("  {}{from}", printable(&shell_word(&info.url))));
                lines.extend(info.commands.iter().map(|command| format!("    {}", printable(command))));
                lines.extend(info.note.iter().map(|note| format!("    {}", printable(note))));
                let ipxe = info.ipxe.iter().filter(|_| detail == AnnouncementDetail::Full);
                lines.extend(ipxe.map(|commands| format!("    iPXE> {}", printable(commands))));
            }
        }
        for (target, place) in &self.moved {
            lines.extend([target.clone(), format!("  moved: initiators are redirected to {place}")]);
        }
        lines
    }

    /// The announcement as one line of JSON, for programs.
    pub(super) fn json(&self) -> Result<String, Failure> {
        let exports = self.exports.iter().map(|export| ExportJson {
            name: &export.name,
            size: export.size,
            device: export.disk.as_ref().map(|disk| disk.path.as_str()),
            urls: export.connect.iter().map(|url| url.info.url.as_str()).collect(),
            commands: export.commands(),
        });
        let json = Json { ready: true, exports: exports.collect(), api: self.api.as_deref() };
        serde_json::to_string(&json).map_err(Failure::run)
    }

    /// Environment variables for the command of `--run`: all URLs, the first URL of each protocol,
    /// the variables that nbdkit sets for the first URL, and the disks, named as by `attach`.
    pub(super) fn environment(&self) -> Vec<(String, String)> {
        let connect = || self.exports.iter().flat_map(|export| &export.connect);
        let urls: Vec<&str> = connect().map(|url| url.info.url.as_str()).collect();
        let first = urls.first().copied().unwrap_or_default().to_owned();
        let mut environment = vec![
            ("BLOCKMUX_URLS".to_owned(), urls.join(" ")),
            ("BLOCKMUX_URL".to_owned(), first.clone()),
            ("uri".to_owned(), first),
        ];
        for AnnouncedUrl { protocol, info, .. } in connect() {
            let key = format!("BLOCKMUX_{}_URL", protocol.to_ascii_uppercase().replace('-', "_"));
            if environment.iter().all(|(known, _)| *known != key) {
                environment.push((key, info.url.clone()));
                environment
                    .extend(info.variables.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
            }
        }
        for AnnouncedDisk { path, path_is } in self.disks() {
            let key = format!("BLOCKMUX_{}", path_is.to_ascii_uppercase());
            if environment.iter().all(|(known, _)| *known != key) {
                let same = self.disks().filter(|disk| disk.path_is == *path_is);
                let all: Vec<&str> = same.map(|disk| disk.path.as_str()).collect();
                environment.push((format!("{key}S"), all.join(" ")));
                environment.extend([key, (*path_is).to_owned()].map(|name| (name, path.clone())));
            }
        }
        environment
    }

    fn disks(&self) -> impl Iterator<Item = &AnnouncedDisk> {
        self.exports.iter().filter_map(|export| export.disk.as_ref())
    }
}

impl Announced {
    /// All commands, each once: some reach the volume over any fabric.
    fn commands(&self) -> Vec<&str> {
        let mut commands = Vec::new();
        for command in self.connect.iter().flat_map(|url| &url.info.commands) {
            if !commands.contains(&command.as_str()) {
                commands.push(command.as_str());
            }
        }
        commands
    }

    /// Name, size and the first URL of each protocol: in one line if they fit, else in a line each.
    fn in_short(&self) -> Vec<String> {
        let name = format!("{}  {}", self.name, human_size(self.size));
        let mut protocols: Vec<&str> = Vec::new();
        let mut urls: Vec<_> = self.disk.iter().map(|disk| format!("  {}", printable(&disk.path))).collect();
        for AnnouncedUrl { protocol, info, .. } in &self.connect {
            if !protocols.contains(protocol) {
                protocols.push(protocol);
                urls.push(format!("  {}", printable(&shell_word(&info.url))));
            }
        }
        if urls.is_empty() {
            urls.push(format!("  {UNREACHABLE}"));
        }
        let line = format!("{name}{}", urls.concat());
        if line.chars().count() <= WIDTH { vec![line] } else { [vec![name], urls].concat() }
    }
}

#[derive(Serialize)]
struct Json<'a> {
    ready: bool,
    exports: Vec<ExportJson<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    api: Option<&'a str>,
}

#[derive(Serialize)]
struct ExportJson<'a> {
    name: &'a str,
    /// In bytes.
    size: u64,
    /// The path of its disk on this machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<&'a str>,
    urls: Vec<&'a str>,
    /// Shell commands for clients, in the order of `urls`; a URL may have several.
    commands: Vec<&'a str>,
}

/// Adds how clients connect, without what is listed already: protocols over TCP have the same URLs
/// at all fabrics of a listener, and standard clients the same commands for all LUNs of a target.
fn add_new(connect: &mut Vec<AnnouncedUrl>, mut url: AnnouncedUrl) {
    let rdma_query = url.rdma_query;
    let same_fabric = || connect.iter().filter(|known| known.rdma_query == rdma_query);
    let is_known = |command: &String| same_fabric().any(|known| known.info.commands.contains(command));
    url.info.commands.retain(|command| !is_known(command));
    url.info.note.take_if(|note| connect.iter().any(|known| known.info.note.as_ref() == Some(note)));
    if connect.iter().all(|known| known.info.url != url.info.url) {
        connect.push(url);
    }
}

/// The addresses at which these clients reach a listener, each with its fabrics. Clients that may
/// be on other machines use the address that the listener advertises. A listener on the unspecified
/// address is reached at every address of the machine, or at loopback by local clients.
fn portals(listener: &PolicyListener, clients: ClientLocation) -> Vec<Portal> {
    let advertised = listener.advertised_address().filter(|_| clients == ClientLocation::Anywhere);
    let places = match &listener.place {
        _ if advertised.is_some() => advertised.into_iter().map(ListenerAddress::of_tcp).collect(),
        // A command may be copied into a shell in another directory.
        ListenerAddress::Socket(Address::Unix(path)) => {
            let absolute = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            vec![ListenerAddress::Socket(Address::Unix(absolute))]
        }
        ListenerAddress::Socket(Address::Tcp(tcp)) if tcp.ip().is_unspecified() => {
            let loopback: IpAddr =
                if tcp.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
            let own =
                if clients == ClientLocation::Local { Vec::new() } else { own_addresses(tcp.is_ipv4()) };
            let own = if own.is_empty() { vec![loopback] } else { own };
            let at = |ip| ListenerAddress::Socket(Address::Tcp(SocketAddr::new(ip, tcp.port())));
            own.into_iter().map(at).collect()
        }
        other => vec![other.clone()],
    };
    let fabrics = std::iter::once(TCP_TARGET_QUERY).chain(listener.fabric.map(|fabric| fabric.query));
    let at = |reached_at: ListenerAddress| {
        let listener = listener.place.clone();
        fabrics.clone().map(move |rdma_query| Portal {
            listener: listener.clone(),
            reached_at: reached_at.clone(),
            rdma_query,
        })
    };
    let all = places.into_iter().flat_map(at);
    all.filter(|portal| clients == ClientLocation::Anywhere || !portal.is_for_others()).collect()
}

/// Behind a URL that only clients on other machines can use.
const FROM_OTHERS: &str = "  (from other machines)";
/// Maximum number of lines that [`AnnouncementDetail::Short`] prints for several exports.
const MAX_LINES: usize = 20;
/// Maximum length of a line with several URLs, in characters.
const WIDTH: usize = 80;
const UNREACHABLE: &str = "is not reachable: no listener or target exports it; check `protocols` of the \
                           volume, which it needs if other volumes are protected";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::way::Way;
    use crate::daemon::disks::DeviceInfo;
    use crate::protocol::NBD;
    use crate::protocol::fabric::RdmaFabric;
    use crate::protocol::policy::AdvertisedAddress;
    use blockmux_proto::exports::Export;
    use blockmux_proto::names::rdma::UDP_TARGET_QUERY;
    use blockmux_proto::volume_state::VolumeTraffic;
    use blockmux_volume::NullVolume;
    use std::sync::Arc;

    fn listener(address: Address) -> PolicyListener {
        PolicyListener::at(&NBD, ListenerAddress::Socket(address))
    }

    fn announcement(addresses: &[Address], names: &[&str]) -> Announcement {
        let export = |name: &str| Export {
            name: name.to_owned(),
            description: String::new(),
            read_only: false,
            volume: Arc::new(NullVolume::new(1 << 30)),
        };
        let exports = Exports::new(names.iter().map(|name| export(name)).collect());
        let asked = addresses.iter().cloned().map(listener);
        let volumes = names.iter().map(|name| ((*name).to_owned(), None));
        let policy = Policy::new(Vec::new(), volumes).unwrap();
        let policy = policy.at(asked.collect(), false).unwrap();
        Announcement::new(&exports, &Frontends::default(), &policy, ClientLocation::Local)
    }

    #[test]
    fn each_export_has_urls_and_commands_for_each_listener() {
        let unix = Address::Unix("/run/x y".into());
        let text = announcement(&[Address::Tcp("0.0.0.0:10809".parse().unwrap()), unix], &["a", "b"]);
        let text = text.text(AnnouncementDetail::Full);
        let expected = "\
a  1 GiB
  nbd://127.0.0.1/a
    nbdinfo nbd://127.0.0.1/a
    qemu-img info nbd://127.0.0.1/a
    nbd-client 127.0.0.1 10809 /dev/nbd0 -N a -connections 4 -timeout 10
  'nbd+unix:///a?socket=/run/x%20y'
    nbdinfo 'nbd+unix:///a?socket=/run/x%20y'
    qemu-img info 'nbd+unix:///a?socket=/run/x%20y'
    nbd-client -unix '/run/x y' /dev/nbd0 -N a -connections 4 -timeout 10
b  1 GiB
";
        assert!(text.starts_with(expected), "{text}");
        assert!(text.ends_with(" -timeout 10\nready"), "{text}");
    }

    #[test]
    fn many_exports_are_shortened_to_twenty_lines_unless_all_or_none_are_requested() {
        let here = [Address::Tcp("127.0.0.1:10809".parse().unwrap())];
        let names: Vec<String> = (0..100).map(|number| format!("v{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let lines = |count: usize, detail| {
            let text = announcement(&here, &names[..count]).text(detail);
            text.lines().map(str::to_owned).collect::<Vec<_>>()
        };
        let short = lines(100, AnnouncementDetail::Short);
        assert_eq!((short.len(), short[0].as_str()), (21, "v0  1 GiB  nbd://127.0.0.1/v0"));
        assert!(short[19].starts_with("and 81 more; --verbose prints") && short[20] == "ready", "{short:?}");
        assert_eq!(
            (lines(1, AnnouncementDetail::Short).len(), lines(4, AnnouncementDetail::Short).len()),
            (6, 21),
            "with commands"
        );
        let five = lines(5, AnnouncementDetail::Short);
        assert!(five.len() == 7 && five[5].starts_with("--verbose prints"), "{five:?}");
        assert_eq!(lines(100, AnnouncementDetail::Full).len(), 501);
        assert_eq!(lines(100, AnnouncementDetail::ReadyLine), ["ready"]);
    }

    #[test]
    fn a_listener_on_the_unspecified_address_is_reached_at_the_addresses_of_the_machine() {
        let at = |address: &str, clients| {
            let listener = listener(Address::Tcp(address.parse().unwrap()));
            portals(&listener, clients).into_iter().filter_map(|portal| portal.tcp()).collect::<Vec<_>>()
        };
        for (listener, loopback) in [("0.0.0.0:7", "127.0.0.1:7"), ("[::]:7", "[::1]:7")] {
            let listens: SocketAddr = listener.parse().unwrap();
            assert_eq!(at(listener, ClientLocation::Local), [(listens, loopback.parse().unwrap())]);
            for (own, address) in at(listener, ClientLocation::Anywhere) {
                assert!(own == listens && !address.ip().is_unspecified() && address.port() == 7, "{address}");
                assert_eq!(address.is_ipv4(), listens.is_ipv4());
            }
        }
    }

    #[test]
    fn an_advertised_address_is_for_clients_that_may_be_on_other_machines() {
        for (advertised, expected) in
            [("203.0.113.7:99", "203.0.113.7:99"), ("203.0.113.7:0", "203.0.113.7:7")]
        {
            let listener = PolicyListener {
                advertised: Some(AdvertisedAddress {
                    written: advertised.parse().unwrap(),
                    found: Some(advertised.parse().unwrap()),
                }),
                ..listener(Address::Tcp("0.0.0.0:7".parse().unwrap()))
            };
            let told =
                |clients| portals(&listener, clients).iter().filter_map(Portal::tcp).collect::<Vec<_>>();
            let own: SocketAddr = "0.0.0.0:7".parse().unwrap();
            assert_eq!(told(ClientLocation::Anywhere), [(own, expected.parse().unwrap())]);
            assert_eq!(told(ClientLocation::Local), [(own, "127.0.0.1:7".parse().unwrap())]);
        }
    }

    /// One process has the UDP port of RoCEv2 at an address.
    #[test]
    fn rocev2_at_all_addresses_is_announced_for_other_machines() {
        let fabrics = |address: &str, clients| {
            let listener = listener(Address::Tcp(address.parse().unwrap()));
            let listener = PolicyListener {
                fabric: RdmaFabric::of_listeners().find(|known| known.name == "roce"),
                ..listener
            };
            let mut found: Vec<_> = portals(&listener, clients)
                .iter()
                .map(|portal| (portal.rdma_query, portal.is_for_others()))
                .collect();
            found.dedup();
            found
        };
        let (iwarp, roce) = (TCP_TARGET_QUERY, UDP_TARGET_QUERY);
        for at_all in ["0.0.0.0:7", "[::]:7", "[::1]:7"] {
            assert_eq!(fabrics(at_all, ClientLocation::Local), [(iwarp, false)], "{at_all}");
            let anywhere = fabrics(at_all, ClientLocation::Anywhere);
            assert_eq!(anywhere[..2], [(iwarp, false), (roce, true)], "{at_all}");
        }
        for clients in [ClientLocation::Local, ClientLocation::Anywhere] {
            assert_eq!(fabrics("192.0.2.1:7", clients), [(iwarp, false), (roce, false)]);
        }
    }

    #[test]
    fn clients_get_their_command_for_each_fabric_and_once_for_all_luns_of_a_target() {
        let mut connect = Vec::new();
        for (url, rdma_query) in [("a/0", "?rdma=iwarp"), ("a/1", "?rdma=iwarp"), ("b/0", "?rdma=roce")] {
            let (url, commands) = (url.to_owned(), vec!["log in to a".to_owned()]);
            let note = Some("# or otherwise".to_owned());
            let info = ConnectInfo { url, commands, note, ..ConnectInfo::default() };
            add_new(&mut connect, AnnouncedUrl { protocol: "iser", info, rdma_query, is_for_others: false });
        }
        let export = Announced { name: "a".to_owned(), size: 1 << 20, disk: None, connect };
        assert_eq!(export.commands(), ["log in to a"]);
        let announcement = Announcement { exports: vec![export], moved: Vec::new(), api: None };
        let text = announcement.text(AnnouncementDetail::Full);
        let expected =
            "a  1 MiB\n  a/0\n    log in to a\n    # or otherwise\n  a/1\n  b/0\n    log in to a\nready";
        assert_eq!(text, expected);
    }

    #[test]
    fn the_environment_of_a_command_has_all_urls() {
        let environment = announcement(&[Address::Tcp("[::]:7".parse().unwrap())], &["a", "b"]).environment();
        let value = |name| environment.iter().find(|(key, _)| *key == name).map(|(_, value)| value.as_str());
        assert_eq!(value("BLOCKMUX_URLS"), Some("nbd://[::1]:7/a nbd://[::1]:7/b"));
        assert_eq!(value("BLOCKMUX_NBD_URL"), Some("nbd://[::1]:7/a"));
        assert_eq!(value("nbd"), Some("nbd:[::1]:7:exportname=a"));
    }

    #[test]
    fn the_environment_of_a_command_has_all_disks_by_what_their_paths_are() {
        let disk = |volume: &str, way, path: &str| DiskInfo {
            volume: volume.to_owned(),
            read_only: false,
            state: "attached",
            error: None,
            device: Some(DeviceInfo {
                path: path.into(),
                way,
                is_recovered: false,
                traffic: VolumeTraffic::default(),
            }),
        };
        let disks = [
            disk("b", Way::Nbd, "/dev/nbd0"),
            disk("c", Way::VhostUser, "/run/c.sock"),
            disk("a", Way::Ublk, "/dev/ublkb0"),
        ];
        let here = [Address::Tcp("127.0.0.1:7".parse().unwrap())];
        let environment = announcement(&here, &["a", "b", "c", "d"]).with_disks(&disks).environment();
        let value = |name| environment.iter().find(|(key, _)| *key == name).map(|(_, value)| value.as_str());
        assert_eq!(value("BLOCKMUX_DEVICES"), Some("/dev/ublkb0 /dev/nbd0"), "in the order of the volumes");
        assert_eq!((value("BLOCKMUX_DEVICE"), value("device")), (Some("/dev/ublkb0"), Some("/dev/ublkb0")));
        assert_eq!((value("BLOCKMUX_SOCKETS"), value("socket")), (Some("/run/c.sock"), Some("/run/c.sock")));
        let environment = announcement(&here, &["a"]).environment();
        assert!(environment.iter().all(|(name, _)| name != "device" && name != "BLOCKMUX_DEVICES"));
    }
}
