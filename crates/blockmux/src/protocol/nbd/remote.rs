//! NBD URLs: connecting to an export, describing it, and listing the exports of a server.

use super::{NBD, tls};
use crate::failure::Failure;
use crate::output::both_sizes;
use crate::process::privileges::{self, START_WITH_PRIVILEGES};
use crate::protocol::reach;
use crate::protocol::{Description, DiscoveredExport, Discovery, Remote};
use blockmux_engine::carrier::connection::Broken;
use blockmux_engine::carrier::tls::ClientTls;
use blockmux_engine::net::socket::Address;
use blockmux_engine::protocol::nbd::initiator::{self, NbdConnectError, NbdEndpoint};
use blockmux_proto::nbd::client::{BlockSize, ExportInfo, HeaderFormat, ListedExport, NbdHandshakeRefusal};
use blockmux_proto::nbd::uri::{NbdServer, NbdUri, TlsFiles};
use blockmux_volume::Volume;
use blockmux_wire::nbd::handshake::TransmissionFlags;
use rustix::thread::CapabilitySet;
use serde_json::{Value, json};
use std::io::ErrorKind;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread;

/// Parses a URL and reads the files of credentials that it names.
pub(super) fn of_url(url: &str) -> Result<Box<dyn Remote>, Failure> {
    let uri = reach::read(url)?;
    Ok(Box::new(NbdRemote { url: url.to_owned(), tls: tls::of_uri(&uri)?, uri }))
}

struct NbdRemote {
    /// The URL as given.
    url: String,
    uri: NbdUri,
    tls: Option<ClientTls>,
}

impl Remote for NbdRemote {
    fn open(&self, connections: u32) -> Result<Arc<dyn Volume>, Failure> {
        let NbdRemote { uri, tls, .. } = self;
        let volume = ask(uri, |address| {
            initiator::connect(NbdEndpoint {
                tls: tls.clone(),
                address: address.clone(),
                export: uri.export.clone(),
                connections: uri.connections.unwrap_or(connections),
                reconnect_timeout: uri.reconnect,
                timeout: reach::timeout(uri.timeout),
            })
        })?;
        Ok(Arc::new(volume))
    }

    fn volume_key(&self) -> String {
        let NbdUri { server, export, .. } = &self.uri;
        match server {
            NbdServer::Unix(path) => {
                let path = path.canonicalize().unwrap_or_else(|_| path.clone());
                format!("nbd+unix {} {export}", path.display())
            }
            NbdServer::Tcp((host, port)) => format!("nbd {} {port} {export}", host.to_lowercase()),
        }
    }

    fn describe(&self) -> Result<Description, Failure> {
        let NbdRemote { url, uri, tls } = self;
        let export = ask(uri, |address| initiator::describe(address, tls.as_ref(), &uri.export))?;
        Ok(Description { rows: rows(&export), json: json(url, &export), info: export.volume_info() })
    }

    fn discover(&self) -> Result<Discovery, Failure> {
        let server = server_of(&self.uri);
        ask(&server, |address| list(&server, self.tls.as_ref(), address))
    }
}

/// Calls `ask` with one address of the server after another, until one can be reached.
fn ask<T>(uri: &NbdUri, ask: impl FnMut(&Address) -> Result<T, NbdConnectError>) -> Result<T, Failure> {
    let addresses = match &uri.server {
        NbdServer::Unix(path) => vec![Address::Unix(path.clone())],
        NbdServer::Tcp(portal) => reach::addresses(uri, portal)?,
    };
    reach::ask_each(uri, &addresses, ask)?.map_err(|error| refused(uri, &error))
}

fn refused(uri: &NbdUri, error: &NbdConnectError) -> Failure {
    let advice = match error {
        NbdConnectError::Broken { broken: Broken::Socket(socket), .. }
            if socket.kind() == ErrorKind::PermissionDenied =>
        {
            match privileges::has_dropped(CapabilitySet::DAC_OVERRIDE) {
                true => START_WITH_PRIVILEGES.to_owned(),
                false => "check the owner and the mode of the socket and of its directories".to_owned(),
            }
        }
        NbdConnectError::Broken { broken: Broken::Tls(_), .. } => {
            match uri.tls.as_ref().map(|tls| &tls.credentials) {
                Some(TlsFiles::Psk { .. }) => "check tls-psk-file and the user before the host".to_owned(),
                _ => "check tls-certificates, tls-hostname and the server's certificate".to_owned(),
            }
        }
        NbdConnectError::Refused { refused: NbdHandshakeRefusal::TlsRequired { message, .. }, .. } => {
            let credentials = "with tls-certificates=DIR or tls-psk-file=FILE";
            // Our own server says it already.
            match message.contains("nbds://") {
                true => credentials.to_owned(),
                false => format!("use nbds:// instead of nbd://, {credentials}"),
            }
        }
        NbdConnectError::Refused { refused: NbdHandshakeRefusal::NoTls { .. }, .. } => {
            "use nbd:// to connect without TLS".to_owned()
        }
        // With TLS 1.3 a server refuses a client's certificate after the client has finished its
        // handshake.
        NbdConnectError::Broken { .. } | NbdConnectError::Silent { .. } if uri.tls.is_some() => {
            "check that an NBD server listens there, and accepts the client's certificate".to_owned()
        }
        NbdConnectError::Broken { .. } | NbdConnectError::Silent { .. } => {
            "check that an NBD server listens there".to_owned()
        }
        NbdConnectError::Refused {
            refused: NbdHandshakeRefusal::UnknownExport { .. } | NbdHandshakeRefusal::Closed { .. },
            ..
        } => {
            format!("`blockmux discover '{}'` lists its exports", server_of(uri))
        }
        NbdConnectError::Refused { .. } => "ask the server's administrator".to_owned(),
    };
    Failure::request(format!("{uri}: {error}; {advice}"))
}

fn server_of(uri: &NbdUri) -> NbdUri {
    NbdUri { export: String::new(), ..uri.clone() }
}

fn rows(export: &ExportInfo) -> Vec<(&'static str, String)> {
    let access = if is_read_only(export) { "read-only" } else { "read-write" };
    let constraints = |sizes: BlockSize| {
        let (least, preferred, most) = (sizes.minimum, sizes.preferred, sizes.maximum_payload);
        format!("minimum {least}, preferred {preferred}, maximum payload {most}")
    };
    vec![
        ("export", export.name.clone()),
        ("description", export.description.clone()),
        ("size", both_sizes(export.size)),
        ("access", access.to_owned()),
        ("blocks", export.block_size.map_or_else(|| "no constraints".to_owned(), constraints)),
        ("flags", flags(export).join(" ")),
        ("contexts", export.contexts.join(" ")),
        ("headers", headers(export.headers).to_owned()),
    ]
}

fn json(url: &str, export: &ExportInfo) -> Value {
    let block_size = export.block_size.map(|sizes| {
        json!({
            "minimum": sizes.minimum,
            "preferred": sizes.preferred,
            "maximum_payload": sizes.maximum_payload,
        })
    });
    json!({
        "url": url,
        "protocol": NBD.name,
        "export": export.name,
        "description": export.description,
        "size": export.size,
        "read_only": is_read_only(export),
        "block_size": block_size,
        "flags": flags(export),
        "contexts": export.contexts,
        "headers": headers(export.headers),
    })
}

fn is_read_only(export: &ExportInfo) -> bool {
    export.flags.contains(TransmissionFlags::READ_ONLY)
}

fn flags(export: &ExportInfo) -> Vec<&'static str> {
    export.flags.iter_names().map(|(name, _)| name).collect()
}

fn headers(headers: HeaderFormat) -> &'static str {
    match headers {
        HeaderFormat::Simple => "simple",
        HeaderFormat::Structured => "structured",
        HeaderFormat::Extended => "extended",
    }
}

fn list(uri: &NbdUri, tls: Option<&ClientTls>, address: &Address) -> Result<Discovery, NbdConnectError> {
    let (listed, left_out) = initiator::list(address, tls)?;
    // A server may open an export only when it is requested, which takes time.
    let mut exports = Vec::with_capacity(listed.len());
    for some in listed.chunks(AT_A_TIME) {
        let described = describe_all(address, tls, some);
        let is_silent = described.iter().any(is_no_answer);
        exports.extend(some.iter().zip(described).map(|(listed, answer)| found(uri, listed, answer.ok())));
        if is_silent {
            // The other exports would time out as well.
            break;
        }
    }
    let asked = exports.len();
    if asked < listed.len() {
        tracing::warn!("{address}: does not answer; {} exports were not queried", listed.len() - asked);
    }
    exports.extend(listed[asked..].iter().map(|listed| found(uri, listed, None)));
    Ok(Discovery { url: uri.to_string(), exports, left_out })
}

/// Describes exports in parallel, each over its own connection. Exports for which the server closed
/// the connection are described again one by one, because servers limit connections.
fn describe_all(
    address: &Address,
    tls: Option<&ClientTls>,
    listed: &[ListedExport],
) -> Vec<Result<ExportInfo, NbdConnectError>> {
    let described: Vec<_> = thread::scope(|scope| {
        let ask = |name| move || initiator::describe(address, tls, name);
        let asked: Vec<_> = listed.iter().map(|export| scope.spawn(ask(&export.name))).collect();
        // Passes on a panic of the thread.
        asked.into_iter().map(|asked| asked.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    });
    let all = listed.iter().zip(described);
    all.map(|(listed, described)| {
        let described = match described {
            Err(NbdConnectError::Broken { .. }) if !is_no_answer(&described) => {
                initiator::describe(address, tls, &listed.name)
            }
            described => described,
        };
        described.inspect_err(|error| tracing::warn!("export {:?}: {error}", listed.name))
    })
    .collect()
}

/// Whether the server did not answer in time.
fn is_no_answer(described: &Result<ExportInfo, NbdConnectError>) -> bool {
    matches!(described, Err(NbdConnectError::Broken { broken: Broken::Socket(error), .. })
        if error.kind() == ErrorKind::TimedOut)
}

fn found(uri: &NbdUri, listed: &ListedExport, described: Option<ExportInfo>) -> DiscoveredExport {
    DiscoveredExport {
        url: NbdUri { export: listed.name.clone(), ..uri.clone() }.to_string(),
        name: listed.name.clone(),
        description: listed.description.clone(),
        size: described.map(|export| export.size),
    }
}

/// Maximum number of connections to the server while it is queried.
const AT_A_TIME: usize = 16;
