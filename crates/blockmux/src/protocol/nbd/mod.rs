//! NBD, as the commands know it.

mod remote;

use super::frontend::{Frontend, Portal, Service, Started, VolumeNames, Way};
use super::{Carrier, Protocol};
use crate::failure::Failure;
use crate::output::shell_word;
use blockmux_engine::nbd;
use blockmux_engine::socket::Address;
use blockmux_lab::ceiling::{MessageShape, Transport};
use blockmux_proto::nbd::uri::{DEFAULT_RECONNECT, DEFAULT_TIMEOUT, NbdServer, NbdUri};
use blockmux_wire::nbd::{NBD_DEFAULT_PORT, NBD_MAX_MINIMUM_BLOCK, NBD_MAX_STRING};

pub(crate) const NBD: Protocol = Protocol {
    name: "nbd",
    title: "NBD",
    carrier: Carrier::Stream,
    listener_help: ["ADDR|unix:PATH", "Serve NBD at ADDR; repeatable [default: 127.0.0.1:10809]"],
    port: NBD_DEFAULT_PORT,
    schemes: &[("nbd", Transport::Tcp), ("nbd+unix", Transport::Unix)],
    unspoken_schemes: &["nbds", "nbds+unix"],
    url_forms: &["nbd://host/export", "nbd+unix:///export?socket=PATH"],
    max_description: NBD_MAX_STRING,
    max_logical_block: NBD_MAX_MINIMUM_BLOCK,
    // Extended headers: request; reply with the offset of its data; request; reply without data.
    shape: MessageShape { read_request: 32, read_reply_head: 40, write_request_head: 32, write_reply: 32 },
    frontend: || Box::new(Nbd),
    remote: remote::of_url,
    served_with: None,
};

/// Every volume is an export.
struct Nbd;

impl Frontend for Nbd {
    fn serve(&self, service: &Service<'_>) -> Result<Started, Failure> {
        let serve = service.places.iter().cloned().map(|place| {
            let policy = service.policy.clone();
            nbd::serve(service.exports.offering(move |volume| policy.serves(&NBD, &place, volume)))
        });
        // A client finds what is there when it connects.
        Ok(Started { serve: serve.collect(), live: None })
    }

    fn ways(&self, _: &Protocol, portal: &Portal, named: &VolumeNames) -> Vec<Way> {
        portal.reached_at.socket().map(|address| way(address, &named.export)).into_iter().collect()
    }
}

fn way(address: &Address, name: &str) -> Way {
    let server = match address {
        Address::Unix(path) => NbdServer::Unix(path.clone()),
        Address::Tcp(address) => NbdServer::Tcp((address.ip().to_string(), address.port())),
    };
    let export = name.to_owned();
    let (reconnect, timeout) = (DEFAULT_RECONNECT, DEFAULT_TIMEOUT);
    let uri = NbdUri { server, export, connections: None, reconnect, timeout };
    Way { url: uri.to_string(), commands: commands(&uri).into(), variables: vec![("nbd", old_qemu(&uri))] }
}

fn commands(uri: &NbdUri) -> [String; 3] {
    let (url, name) = (uri.to_string(), shell_word(&uri.export));
    let place = match &uri.server {
        NbdServer::Tcp((host, port)) => format!("{host} {port}"),
        NbdServer::Unix(path) => format!("-unix {}", shell_word(&path.to_string_lossy())),
    };
    [
        format!("nbdinfo {}", shell_word(&url)),
        format!("qemu-img info {}", shell_word(&url)),
        format!("nbd-client {place} /dev/nbd0 -N {name} {FOR_LOST_CONNECTIONS}"),
    ]
}

/// As QEMU wrote it before there were URLs, and as nbdkit hands it to its own commands.
fn old_qemu(uri: &NbdUri) -> String {
    match &uri.server {
        NbdServer::Tcp((host, port)) if host.contains(':') => {
            format!("nbd:[{host}]:{port}:exportname={}", uri.export)
        }
        NbdServer::Tcp((host, port)) => format!("nbd:{host}:{port}:exportname={}", uri.export),
        NbdServer::Unix(path) => format!("nbd:unix:{}:exportname={}", path.display(), uri.export),
    }
}

/// When a connection breaks, the kernel sends its requests again by another one, but only after the
/// time-out, which is 30 s unless told otherwise. No option makes new connections after a restart:
/// see docs/guides/nbd.md.
const FOR_LOST_CONNECTIONS: &str = "-connections 4 -timeout 10";
