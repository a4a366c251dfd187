//! What a daemon says when it is ready: for each export its URLs, and commands that connect standard clients.

use crate::failure::Failure;
use crate::output::printable;
use crate::protocol::aoe::Serving;
use crate::protocol::iscsi::redirects;
use crate::protocol::policy::Policy;
use crate::protocol::{AOE, Protocol, Settings, Way};
use blockmux_engine::socket::Address;
use blockmux_proto::exports::Exports;
use blockmux_volume::units::human_size;
use serde::Serialize;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// All exports and how to reach them.
pub(super) struct Announcement {
    exports: Vec<Announced>,
    /// Targets that are elsewhere, and where.
    moved: Vec<(String, String)>,
}

struct Announced {
    name: String,
    /// In bytes.
    size: u64,
    /// One for each listener, with the name of its protocol.
    ways: Vec<(&'static str, Way)>,
}

impl Announcement {
    /// Every export on every listener.
    pub(super) fn new(
        exports: &Exports,
        listeners: &[(&'static Protocol, Address)],
        settings: &Settings,
    ) -> Announcement {
        let announced = exports.iter().map(|(_, export)| {
            let spoken = listeners.iter().flat_map(|(listener, address)| {
                listener.spoken_here().map(move |protocol| (protocol, address))
            });
            let spoken = spoken
                .filter(|(protocol, address)| settings.policy.leads_to(protocol, address, &export.name));
            let ways = spoken.flat_map(|(protocol, address)| {
                let ways = (protocol.ways)(settings, &reachable(address), &export.name);
                ways.into_iter().map(|way| (protocol.name, way))
            });
            Announced { name: export.name.clone(), size: export.volume.info().size, ways: ways.collect() }
        });
        let moved = redirects(settings).map(|(target, place)| (target.to_owned(), place.to_owned()));
        Announcement { exports: announced.collect(), moved: moved.collect() }
    }

    /// Adds how each export is reached over AoE.
    pub(super) fn with_disks(mut self, aoe: &Serving, policy: &Policy) -> Announcement {
        for (place, export) in self.exports.iter_mut().enumerate() {
            export.ways.extend(aoe.ways(policy, place, &export.name).into_iter().map(|way| (AOE.name, way)));
        }
        self
    }

    /// How the export of that name is reached.
    pub(super) fn urls_of(&self, name: &str) -> Vec<String> {
        let own = self.exports.iter().filter(|export| export.name == name).flat_map(|export| &export.ways);
        own.map(|(_, way)| way.url.clone()).collect()
    }

    /// For people, with `ready` as the last line.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for export in &self.exports {
            text += &format!("{}  {}\n", export.name, human_size(export.size));
            if export.ways.is_empty() {
                text += "  is out of reach: no listener, or no target of the config, leads to it\n";
            }
            for (_, way) in &export.ways {
                text += &format!("  {}\n", printable(&way.url));
                way.commands.iter().for_each(|command| text += &format!("    {}\n", printable(command)));
            }
        }
        for (target, place) in &self.moved {
            text += &format!("{target}\n  has moved: initiators are sent to {place}\n");
        }
        text + "ready"
    }

    /// One line for programs.
    pub(super) fn json(&self) -> Result<String, Failure> {
        let exports = self.exports.iter().map(|export| ExportJson {
            name: &export.name,
            size: export.size,
            urls: export.ways.iter().map(|(_, way)| way.url.as_str()).collect(),
            commands: export.ways.iter().flat_map(|(_, way)| &way.commands).map(String::as_str).collect(),
        });
        serde_json::to_string(&Json { ready: true, exports: exports.collect() }).map_err(Failure::run)
    }

    /// What the command of `--run` finds in its environment: all URLs, the first of each protocol, and the first of
    /// all under the names that nbdkit gives it.
    pub(super) fn environment(&self) -> Vec<(String, String)> {
        let ways = || self.exports.iter().flat_map(|export| &export.ways);
        let urls: Vec<&str> = ways().map(|(_, way)| way.url.as_str()).collect();
        let first = urls.first().copied().unwrap_or_default().to_owned();
        let mut environment = vec![
            ("BLOCKMUX_URLS".to_owned(), urls.join(" ")),
            ("BLOCKMUX_URL".to_owned(), first.clone()),
            ("uri".to_owned(), first),
        ];
        for (protocol, way) in ways() {
            let key = format!("BLOCKMUX_{}_URL", protocol.to_ascii_uppercase().replace('-', "_"));
            if environment.iter().all(|(known, _)| *known != key) {
                environment.push((key, way.url.clone()));
                environment
                    .extend(way.variables.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
            }
        }
        environment
    }
}

#[derive(Serialize)]
struct Json<'a> {
    ready: bool,
    exports: Vec<ExportJson<'a>>,
}

#[derive(Serialize)]
struct ExportJson<'a> {
    name: &'a str,
    /// In bytes.
    size: u64,
    urls: Vec<&'a str>,
    /// What a shell runs; all of the first URL, then of the next.
    commands: Vec<&'a str>,
}

/// Where a client on this machine connects to a listener on all addresses.
fn reachable(address: &Address) -> Address {
    let tcp = match address {
        Address::Tcp(tcp) => tcp,
        // Whoever copies a command may be in another directory.
        Address::Unix(path) => {
            return Address::Unix(std::path::absolute(path).unwrap_or_else(|_| path.clone()));
        }
    };
    let ip = match tcp.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    Address::Tcp(SocketAddr::new(ip, tcp.port()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::NBD;
    use crate::protocol::policy::{Place, PolicyListener};
    use blockmux_proto::exports::Export;
    use blockmux_volume::NullVolume;
    use std::sync::Arc;

    fn announcement(addresses: &[Address]) -> Announcement {
        let export = |name: &str| Export {
            name: name.to_owned(),
            description: String::new(),
            read_only: false,
            volume: Arc::new(NullVolume::new(1 << 30)),
        };
        let listeners: Vec<_> = addresses.iter().map(|address| (&NBD, address.clone())).collect();
        let asked = listeners.iter().map(|(protocol, address)| PolicyListener {
            protocol,
            place: Place::Socket(address.clone()),
            volumes: None,
            is_asked: true,
        });
        let volumes = ["a", "b"].map(|name| (name.to_owned(), None));
        let policy = Policy::new(&Settings::default(), volumes.into_iter()).unwrap();
        let policy = policy.at(asked.collect(), false).unwrap();
        let settings = Settings { policy, ..Settings::default() };
        Announcement::new(&Exports::new(vec![export("a"), export("b")]), &listeners, &settings)
    }

    #[test]
    fn each_export_has_urls_and_commands_for_each_listener() {
        let unix = Address::Unix("/run/x y".into());
        let text = announcement(&[Address::Tcp("0.0.0.0:10809".parse().unwrap()), unix]).text();
        let expected = "\
a  1 GiB
  nbd://127.0.0.1/a
    nbdinfo nbd://127.0.0.1/a
    qemu-img info nbd://127.0.0.1/a
    nbd-client 127.0.0.1 10809 /dev/nbd0 -N a
  nbd+unix:///a?socket=/run/x%20y
    nbdinfo 'nbd+unix:///a?socket=/run/x%20y'
    qemu-img info 'nbd+unix:///a?socket=/run/x%20y'
    nbd-client -unix '/run/x y' /dev/nbd0 -N a
b  1 GiB
";
        assert!(text.starts_with(expected), "{text}");
        assert!(text.ends_with("-N b\nready"), "{text}");
    }

    #[test]
    fn a_command_finds_all_urls_in_its_environment() {
        let environment = announcement(&[Address::Tcp("[::]:7".parse().unwrap())]).environment();
        let value = |name| environment.iter().find(|(key, _)| *key == name).map(|(_, value)| value.as_str());
        assert_eq!(value("BLOCKMUX_URLS"), Some("nbd://[::1]:7/a nbd://[::1]:7/b"));
        assert_eq!(value("BLOCKMUX_NBD_URL"), Some("nbd://[::1]:7/a"));
        assert_eq!(value("nbd"), Some("nbd:[::1]:7:exportname=a"));
    }
}
