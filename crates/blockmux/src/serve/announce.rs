//! What a daemon says when it is ready: for each export its URLs, and commands that connect standard clients.

use crate::failure::Failure;
use crate::output::{printable, shell_word};
use blockmux_engine::socket::Address;
use blockmux_proto::exports::Exports;
use blockmux_proto::nbd::uri::{DEFAULT_RECONNECT, Server, Uri};
use blockmux_volume::units::human_size;
use serde::Serialize;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// All exports and how to reach them.
#[derive(Serialize)]
pub(super) struct Announcement {
    ready: bool,
    exports: Vec<Announced>,
}

#[derive(Serialize)]
struct Announced {
    name: String,
    /// In bytes.
    size: u64,
    urls: Vec<String>,
    /// What a shell runs; all of the first URL, then of the next.
    commands: Vec<String>,
    /// As QEMU wrote it before there were URLs.
    #[serde(skip)]
    old_qemu: Vec<String>,
}

impl Announcement {
    /// Every export on every NBD listener.
    pub(super) fn new(exports: &Exports, nbd: &[Address]) -> Announcement {
        let announced = exports.iter().map(|(_, export)| {
            let uris: Vec<Uri> = nbd.iter().map(|address| uri(address, &export.name)).collect();
            Announced {
                name: export.name.clone(),
                size: export.volume.info().size,
                urls: uris.iter().map(Uri::to_string).collect(),
                commands: uris.iter().flat_map(commands).collect(),
                old_qemu: uris.iter().map(old_qemu).collect(),
            }
        });
        Announcement { ready: true, exports: announced.collect() }
    }

    /// For people, with `ready` as the last line.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for export in &self.exports {
            text += &format!("{}  {}\n", export.name, human_size(export.size));
            let of_each = export.commands.len() / export.urls.len().max(1);
            for (url, commands) in export.urls.iter().zip(export.commands.chunks(of_each.max(1))) {
                text += &format!("  {}\n", printable(url));
                commands.iter().for_each(|command| text += &format!("    {}\n", printable(command)));
            }
        }
        text + "ready"
    }

    /// One line for programs.
    pub(super) fn json(&self) -> Result<String, Failure> {
        serde_json::to_string(self).map_err(Failure::run)
    }

    /// What the command of `--run` finds in its environment.
    pub(super) fn environment(&self) -> Vec<(&'static str, String)> {
        let urls: Vec<&str> =
            self.exports.iter().flat_map(|export| &export.urls).map(String::as_str).collect();
        let first = urls.first().map(|url| (*url).to_owned()).unwrap_or_default();
        let old_qemu = self.exports.first().and_then(|export| export.old_qemu.first().cloned());
        vec![
            ("BLOCKMUX_URLS", urls.join(" ")),
            ("BLOCKMUX_URL", first.clone()),
            ("BLOCKMUX_NBD_URL", first.clone()),
            ("uri", first),
            ("nbd", old_qemu.unwrap_or_default()),
        ]
    }
}

fn uri(address: &Address, name: &str) -> Uri {
    let server = match address {
        Address::Unix(path) => Server::Unix(path.clone()),
        Address::Tcp(address) => {
            let address = reachable(*address);
            Server::Tcp { host: address.ip().to_string(), port: address.port() }
        }
    };
    Uri { server, export: name.to_owned(), connections: None, reconnect: DEFAULT_RECONNECT }
}

/// Where a client on this machine connects to a listener on all addresses.
fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

fn commands(uri: &Uri) -> [String; 3] {
    let (url, name) = (uri.to_string(), shell_word(&uri.export));
    let place = match &uri.server {
        Server::Tcp { host, port } => format!("{host} {port}"),
        Server::Unix(path) => format!("-unix {}", shell_word(&path.to_string_lossy())),
    };
    [
        format!("nbdinfo {}", shell_word(&url)),
        format!("qemu-img info {}", shell_word(&url)),
        format!("nbd-client {place} /dev/nbd0 -N {name}"),
    ]
}

fn old_qemu(uri: &Uri) -> String {
    match &uri.server {
        Server::Tcp { host, port } if host.contains(':') => {
            format!("nbd:[{host}]:{port}:exportname={}", uri.export)
        }
        Server::Tcp { host, port } => format!("nbd:{host}:{port}:exportname={}", uri.export),
        Server::Unix(path) => format!("nbd:unix:{}:exportname={}", path.display(), uri.export),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
        Announcement::new(&Exports::new(vec![export("a"), export("b")]), addresses)
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
