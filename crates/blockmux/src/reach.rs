//! From a URL to a server that answers.

use crate::failure::Failure;
use blockmux_engine::nbd::ConnectError;
use blockmux_engine::socket::Address;
use blockmux_proto::nbd::initiator::Refused;
use blockmux_proto::nbd::uri::{Server, Uri};
use std::net::ToSocketAddrs;

/// Reads the URL of a volume on another server.
pub(crate) fn parse_url(url: &str) -> Result<Uri, Failure> {
    let Some((scheme, _)) = url.split_once("://") else {
        return Err(Failure::request(format!("{url}: is not a URL; {SPOKEN}")));
    };
    let scheme = scheme.to_ascii_lowercase();
    if LATER.contains(&scheme.as_str()) {
        return Err(Failure::request(format!("{url}: {scheme} is not spoken yet; {SPOKEN}")));
    }
    if !scheme.starts_with("nbd") {
        return Err(Failure::request(format!("{url}: no protocol is called `{scheme}`; {SPOKEN}")));
    }
    url.parse().map_err(|error| Failure::request(format!("{url}: {error}")))
}

/// Asks every address of the server in turn, until one can be spoken to.
pub(crate) fn ask<T>(
    uri: &Uri,
    mut ask: impl FnMut(&Address) -> Result<T, ConnectError>,
) -> Result<T, Failure> {
    let mut last = None;
    for address in addresses(uri)? {
        match ask(&address) {
            Err(error @ ConnectError::Broken { .. }) => last = Some(error),
            other => return other.map_err(|error| refused(uri, &error)),
        }
    }
    Err(match last {
        Some(error) => refused(uri, &error),
        None => Failure::request(format!("{uri}: the host has no address; check its name")),
    })
}

fn addresses(uri: &Uri) -> Result<Vec<Address>, Failure> {
    match &uri.server {
        Server::Unix(path) => Ok(vec![Address::Unix(path.clone())]),
        Server::Tcp { host, port } => match (host.as_str(), *port).to_socket_addrs() {
            Ok(found) => Ok(found.map(Address::Tcp).collect()),
            Err(_) => Err(Failure::request(format!("{uri}: cannot find host `{host}`; check its name"))),
        },
    }
}

fn refused(uri: &Uri, error: &ConnectError) -> Failure {
    let advice = match error {
        ConnectError::Broken { .. } | ConnectError::Silent { .. } => {
            "check that an NBD server listens there".to_owned()
        }
        ConnectError::Refused { refused: Refused::UnknownExport { .. } | Refused::Closed { .. }, .. } => {
            let server = Uri { export: String::new(), ..uri.clone() };
            format!("`blockmux discover '{server}'` lists what it has")
        }
        ConnectError::Refused { .. } => "ask whoever runs the server".to_owned(),
    };
    Failure::request(format!("{uri}: {error}; {advice}"))
}

/// Schemes of protocols to come.
const LATER: [&str; 6] = ["iscsi", "iser", "srp", "nvme+tcp", "nvme+rdma", "aoe"];
const SPOKEN: &str = "use nbd://host/export or nbd+unix:///export?socket=PATH";
