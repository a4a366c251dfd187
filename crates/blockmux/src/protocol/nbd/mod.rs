//! NBD, as the commands know it.

mod remote;

use super::policy::Place;
use super::{Protocol, Started, Way};
use crate::output::shell_word;
use blockmux_engine::nbd::{self, Endpoint};
use blockmux_engine::socket::Address;
use blockmux_lab::ceiling::{MessageShape, Transport};
use blockmux_proto::nbd::uri::{DEFAULT_RECONNECT, DEFAULT_TIMEOUT, Server, Uri};
use blockmux_volume::Volume;
use blockmux_wire::nbd::{NBD_DEFAULT_PORT, NBD_MAX_MINIMUM_BLOCK, NBD_MAX_STRING};
use std::sync::Arc;
use std::time::Duration;

/// NBD's entry in the table.
pub(crate) const NBD: Protocol = Protocol {
    name: "nbd",
    title: "NBD",
    port: NBD_DEFAULT_PORT,
    schemes: &[("nbd", Transport::Tcp), ("nbd+unix", Transport::Unix)],
    unspoken_schemes: &["nbds", "nbds+unix"],
    url_forms: &["nbd://host/export", "nbd+unix:///export?socket=PATH"],
    max_description: NBD_MAX_STRING,
    max_logical_block: NBD_MAX_MINIMUM_BLOCK,
    // Extended headers: request; reply with the offset of its data; request; reply without data.
    shape: MessageShape { read_request: 32, read_reply_head: 40, write_request_head: 32, write_reply: 32 },
    check: |_, _| Ok(()),
    is_open: |_| true,
    targets: |_| Vec::new(),
    serve: |service| {
        let serve = service.addresses.iter().map(|address| {
            let (policy, place) = (service.settings.policy.clone(), Place::Socket(address.clone()));
            nbd::serve(service.exports.offering(move |volume| policy.serves(&NBD, &place, volume)))
        });
        // A client finds what is there when it connects.
        Started { serve: serve.collect(), live: None }
    },
    ways: |_, portal, named| vec![way(&portal.address, &named.export)],
    connect: Some(connect),
    remote: remote::of_url,
    served_with: None,
};

fn way(address: &Address, name: &str) -> Way {
    let server = match address {
        Address::Unix(path) => Server::Unix(path.clone()),
        Address::Tcp(address) => Server::Tcp { host: address.ip().to_string(), port: address.port() },
    };
    let export = name.to_owned();
    let (reconnect, timeout) = (DEFAULT_RECONNECT, DEFAULT_TIMEOUT);
    let uri = Uri { server, export, connections: None, reconnect, timeout };
    Way { url: uri.to_string(), commands: commands(&uri).into(), variables: vec![("nbd", old_qemu(&uri))] }
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
        format!("nbd-client {place} /dev/nbd0 -N {name} {FOR_LOST_CONNECTIONS}"),
    ]
}

/// As QEMU wrote it before there were URLs, and as nbdkit hands it to its own commands.
fn old_qemu(uri: &Uri) -> String {
    match &uri.server {
        Server::Tcp { host, port } if host.contains(':') => {
            format!("nbd:[{host}]:{port}:exportname={}", uri.export)
        }
        Server::Tcp { host, port } => format!("nbd:{host}:{port}:exportname={}", uri.export),
        Server::Unix(path) => format!("nbd:unix:{}:exportname={}", path.display(), uri.export),
    }
}

fn connect(address: &Address, export: &str) -> Result<Arc<dyn Volume>, String> {
    let endpoint = Endpoint {
        address: address.clone(),
        export: export.to_owned(),
        connections: 1,
        patience: OWN_PATIENCE,
        timeout: Some(DEFAULT_TIMEOUT),
    };
    let volume = nbd::connect(endpoint).map_err(|error| error.to_string())?;
    Ok(Arc::new(volume))
}

/// When a connection breaks, the kernel sends its requests again by another one, but only after the
/// time-out, which is 30 s unless told otherwise. No option makes new connections after a restart:
/// see docs/VOLUMES.md.
const FOR_LOST_CONNECTIONS: &str = "-connections 4 -timeout 10";
/// Whoever serves to itself has nobody to wait for.
const OWN_PATIENCE: Duration = Duration::from_secs(5);
