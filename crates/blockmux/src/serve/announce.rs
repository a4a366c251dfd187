//! What a daemon says when it is ready: for each export its URLs, and commands that connect
//! standard clients.

use crate::failure::Failure;
use crate::machine::own_addresses;
use crate::output::{printable, shell_word};
use crate::protocol::Frontends;
use crate::protocol::frontend::{Portal, VolumeNames, Way};
use crate::protocol::policy::{ListenerAddress, Policy};
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
    /// URL of the HTTP API over TCP.
    api: Option<String>,
}

struct Announced {
    name: String,
    /// In bytes.
    size: u64,
    /// One for each listener and address, with the name of its protocol.
    ways: Vec<(&'static str, Way)>,
}

/// Who wants to reach the exports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asker {
    /// A program on this machine.
    Here,
    /// People, who may be elsewhere.
    Anywhere,
}

/// How much is printed for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Amount {
    /// `ready`.
    Nothing,
    /// One export with everything, and of several what fits into [`MOST_LINES`].
    Short,
    /// All URLs and commands.
    Everything,
}

impl Announcement {
    /// Every export on every listener.
    pub(super) fn new(
        exports: &Exports,
        frontends: &Frontends,
        policy: &Policy,
        asker: Asker,
    ) -> Announcement {
        let listeners = policy.listeners();
        let listeners = listeners.iter().filter_map(|listener| {
            let frontend = frontends.of(listener.protocol)?;
            Some((listener, frontend, portals(&listener.place, asker)))
        });
        let listeners: Vec<_> = listeners.collect();
        let announced = exports.iter().filter_map(|(volume, export)| {
            let named = VolumeNames::of(exports, volume)?;
            let mut ways = Vec::new();
            for (listener, frontend, portals) in &listeners {
                let spoken = listener.protocol.spoken_here();
                for protocol in spoken.filter(|own| policy.leads_to(own, &listener.place, &named.export)) {
                    let own = portals.iter().flat_map(|portal| frontend.ways(protocol, portal, &named));
                    ways.extend(own.map(|way| (protocol.name, way)));
                }
            }
            Some(Announced { ways, size: export.volume.info().size, name: named.export })
        });
        Announcement { exports: announced.collect(), moved: policy.moved(), api: None }
    }

    /// Announces the API, too.
    pub(super) fn with_api(self, api: Option<String>) -> Announcement {
        Announcement { api, ..self }
    }

    /// How the export of that name is reached.
    pub(super) fn urls_of(&self, name: &str) -> Vec<String> {
        let own = self.exports.iter().filter(|export| export.name == name).flat_map(|export| &export.ways);
        own.map(|(_, way)| way.url.clone()).collect()
    }

    /// For people, with `ready` as the last line.
    pub(super) fn text(&self, amount: Amount) -> String {
        let mut lines = if amount == Amount::Nothing { Vec::new() } else { self.lines() };
        if amount == Amount::Short && self.exports.len() > 1 && lines.len() > MOST_LINES {
            lines.clear();
            let mut shown = 0;
            for export in &self.exports {
                let own = export.in_short();
                if lines.len() + own.len() >= MOST_LINES {
                    break;
                }
                lines.extend(own);
                shown += 1;
            }
            lines.push(match self.exports.len() - shown {
                0 => "--verbose prints all URLs, and commands for clients".to_owned(),
                left_out => {
                    format!("and {left_out} more; --verbose prints all URLs, and commands for clients")
                }
            });
        }
        if amount != Amount::Nothing {
            lines.extend(self.api.iter().map(|url| format!("API  {url}")));
        }
        lines.push("ready".to_owned());
        lines.join("\n")
    }

    /// Everything about every export.
    fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for export in &self.exports {
            lines.push(format!("{}  {}", export.name, human_size(export.size)));
            if export.ways.is_empty() {
                lines.push(format!("  {OUT_OF_REACH}"));
            }
            for (_, way) in &export.ways {
                lines.push(format!("  {}", printable(&shell_word(&way.url))));
                lines.extend(way.commands.iter().map(|command| format!("    {}", printable(command))));
            }
        }
        for (target, place) in &self.moved {
            lines.extend([target.clone(), format!("  has moved: initiators are sent to {place}")]);
        }
        lines
    }

    /// One line for programs.
    pub(super) fn json(&self) -> Result<String, Failure> {
        let exports = self.exports.iter().map(|export| ExportJson {
            name: &export.name,
            size: export.size,
            urls: export.ways.iter().map(|(_, way)| way.url.as_str()).collect(),
            commands: export.ways.iter().flat_map(|(_, way)| &way.commands).map(String::as_str).collect(),
        });
        let json = Json { ready: true, exports: exports.collect(), api: self.api.as_deref() };
        serde_json::to_string(&json).map_err(Failure::run)
    }

    /// What the command of `--run` finds in its environment: all URLs, the first of each protocol,
    /// and the first of all under the names that nbdkit gives it.
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

impl Announced {
    /// Its name, its size, and the first URL of each protocol, each in a line of its own if they do
    /// not fit into one.
    fn in_short(&self) -> Vec<String> {
        let name = format!("{}  {}", self.name, human_size(self.size));
        let mut protocols: Vec<&str> = Vec::new();
        let mut urls = Vec::new();
        for (protocol, way) in &self.ways {
            if !protocols.contains(protocol) {
                protocols.push(protocol);
                urls.push(format!("  {}", printable(&shell_word(&way.url))));
            }
        }
        if self.ways.is_empty() {
            urls.push(format!("  {OUT_OF_REACH}"));
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
    urls: Vec<&'a str>,
    /// What a shell runs; all of the first URL, then of the next.
    commands: Vec<&'a str>,
}

/// Where clients connect to a listener: one on all addresses has those of the machine, or loopback
/// for a client here.
fn portals(listener: &ListenerAddress, asker: Asker) -> Vec<Portal> {
    let places = match listener {
        // Whoever copies a command may be in another directory.
        ListenerAddress::Socket(Address::Unix(path)) => {
            let absolute = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            vec![ListenerAddress::Socket(Address::Unix(absolute))]
        }
        ListenerAddress::Socket(Address::Tcp(tcp)) if tcp.ip().is_unspecified() => {
            let loopback: IpAddr =
                if tcp.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
            let own = if asker == Asker::Here { Vec::new() } else { own_addresses(tcp.is_ipv4()) };
            let own = if own.is_empty() { vec![loopback] } else { own };
            let at = |ip| ListenerAddress::Socket(Address::Tcp(SocketAddr::new(ip, tcp.port())));
            own.into_iter().map(at).collect()
        }
        other => vec![other.clone()],
    };
    places.into_iter().map(|reached_at| Portal { listener: listener.clone(), reached_at }).collect()
}

/// Lines that are printed of several exports.
const MOST_LINES: usize = 20;
/// Columns of a line with several URLs.
const WIDTH: usize = 80;
const OUT_OF_REACH: &str =
    "is served by nobody: no listener or target leads to it (beside protected volumes it takes `protocols`)";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::NBD;
    use crate::protocol::policy::PolicyListener;
    use blockmux_proto::exports::Export;
    use blockmux_proto::networks::AllowedNetworks;
    use blockmux_volume::NullVolume;
    use std::sync::Arc;

    fn announcement(addresses: &[Address], names: &[&str]) -> Announcement {
        let export = |name: &str| Export {
            name: name.to_owned(),
            description: String::new(),
            read_only: false,
            volume: Arc::new(NullVolume::new(1 << 30)),
        };
        let exports = Exports::new(names.iter().map(|name| export(name)).collect());
        let asked = addresses.iter().map(|address| PolicyListener {
            protocol: &NBD,
            place: ListenerAddress::Socket(address.clone()),
            volumes: None,
            networks: AllowedNetworks::default(),
            is_asked: true,
        });
        let volumes = names.iter().map(|name| ((*name).to_owned(), None));
        let policy = Policy::new(Vec::new(), volumes).unwrap();
        let policy = policy.at(asked.collect(), false).unwrap();
        Announcement::new(&exports, &Frontends::default(), &policy, Asker::Here)
    }

    #[test]
    fn each_export_has_urls_and_commands_for_each_listener() {
        let unix = Address::Unix("/run/x y".into());
        let text = announcement(&[Address::Tcp("0.0.0.0:10809".parse().unwrap()), unix], &["a", "b"]);
        let text = text.text(Amount::Everything);
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
    fn of_many_exports_twenty_lines_are_printed_unless_all_or_none_are_asked_for() {
        let here = [Address::Tcp("127.0.0.1:10809".parse().unwrap())];
        let names: Vec<String> = (0..100).map(|number| format!("v{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let lines = |count: usize, amount| {
            let text = announcement(&here, &names[..count]).text(amount);
            text.lines().map(str::to_owned).collect::<Vec<_>>()
        };
        let short = lines(100, Amount::Short);
        assert_eq!((short.len(), short[0].as_str()), (21, "v0  1 GiB  nbd://127.0.0.1/v0"));
        assert!(short[19].starts_with("and 81 more; --verbose prints") && short[20] == "ready", "{short:?}");
        assert_eq!((lines(1, Amount::Short).len(), lines(4, Amount::Short).len()), (6, 21), "with commands");
        let five = lines(5, Amount::Short);
        assert!(five.len() == 7 && five[5].starts_with("--verbose prints"), "{five:?}");
        assert_eq!(lines(100, Amount::Everything).len(), 501);
        assert_eq!(lines(100, Amount::Nothing), ["ready"]);
    }

    #[test]
    fn a_listener_on_all_addresses_is_reached_by_those_of_the_machine() {
        let at = |listener: &str, asker| {
            let listener = ListenerAddress::Socket(Address::Tcp(listener.parse().unwrap()));
            portals(&listener, asker).into_iter().filter_map(|portal| portal.tcp()).collect::<Vec<_>>()
        };
        for (listener, loopback) in [("0.0.0.0:7", "127.0.0.1:7"), ("[::]:7", "[::1]:7")] {
            let listens: SocketAddr = listener.parse().unwrap();
            assert_eq!(at(listener, Asker::Here), [(listens, loopback.parse().unwrap())]);
            for (own, address) in at(listener, Asker::Anywhere) {
                assert!(own == listens && !address.ip().is_unspecified() && address.port() == 7, "{address}");
                assert_eq!(address.is_ipv4(), listens.is_ipv4());
            }
        }
    }

    #[test]
    fn a_command_finds_all_urls_in_its_environment() {
        let environment = announcement(&[Address::Tcp("[::]:7".parse().unwrap())], &["a", "b"]).environment();
        let value = |name| environment.iter().find(|(key, _)| *key == name).map(|(_, value)| value.as_str());
        assert_eq!(value("BLOCKMUX_URLS"), Some("nbd://[::1]:7/a nbd://[::1]:7/b"));
        assert_eq!(value("BLOCKMUX_NBD_URL"), Some("nbd://[::1]:7/a"));
        assert_eq!(value("nbd"), Some("nbd:[::1]:7:exportname=a"));
    }
}
