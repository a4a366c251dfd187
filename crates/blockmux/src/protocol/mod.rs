//! The list of all protocols, which every command uses: [`PROTOCOLS`].
//!
//! Each protocol is a module here and an entry of the list. URLs as volumes and the commands `info`
//! and `discover` use its [`Remote`], the bench uses its message sizes and URL schemes, and `serve`
//! uses its [`Frontend`].

mod alua;
mod aoe;
pub(crate) mod certificates;
pub(crate) mod frontend;
mod frontends;
pub(crate) mod iscsi;
mod lun_map;
mod nbd;
pub(crate) mod nvme_tcp;
pub(crate) mod policy;
pub(crate) mod secret;
mod srp;
mod units;

#[cfg(test)]
pub(crate) use {aoe::AOE, iscsi::ISCSI, nbd::NBD, nvme_tcp::NVME_TCP};

pub(crate) use frontends::{ConfiguredListener, Frontends, KeyError, anchor};
pub(crate) use units::LogicalUnits;

use crate::failure::Failure;
use crate::reset::ResetFunction;
use blockmux_lab::ceiling::{MessageShape, Transport};
use blockmux_volume::Volume;
use frontend::Frontend;
use serde::Serialize;
use serde_json::Value;
use std::fmt;
use std::sync::Arc;

/// All protocols, in the order of output and help.
pub(crate) const PROTOCOLS: &[&Protocol] = &[
    &nbd::NBD,
    &iscsi::ISCSI,
    &iscsi::ISER,
    &nvme_tcp::NVME_TCP,
    &nvme_tcp::NVME_RDMA,
    &srp::SRP,
    &aoe::AOE,
];

/// The properties of one protocol.
pub(crate) struct Protocol {
    /// Name in tables and suites, and of the option of `serve` for its listeners.
    pub(crate) name: &'static str,
    /// Name in text for people.
    pub(crate) title: &'static str,
    pub(crate) carrier: Carrier,
    /// Whether `serve` and the bench include it by default.
    pub(crate) is_default: bool,
    /// Default port.
    pub(crate) port: u16,
    /// Value name and help text of the option of `serve` for its listeners.
    pub(crate) listener_help: [&'static str; 2],
    /// URL schemes in lower case without `://`, and the kind of socket of each.
    pub(crate) schemes: &'static [(&'static str, Transport)],
    /// URL schemes of the protocol that are not supported; [`Protocol::remote`] returns the reason.
    pub(crate) unsupported_schemes: &'static [&'static str],
    /// The forms of the protocol's URLs, for error messages.
    pub(crate) url_forms: &'static [&'static str],
    /// Maximum length of an export's description, in bytes.
    pub(crate) max_description: usize,
    /// Maximum logical block size of a volume, in bytes.
    pub(crate) max_logical_block: u32,
    /// Message sizes between a Blockmux target and a Blockmux initiator.
    pub(crate) shape: MessageShape,
    /// Creates the frontend without settings.
    pub(crate) frontend: fn() -> Box<dyn Frontend>,
    /// Parses a URL with one of the protocol's schemes.
    pub(crate) remote: fn(&str) -> Result<Box<dyn Remote>, Failure>,
    /// Name of the protocol whose listeners and frontend also serve this one.
    pub(crate) served_with: Option<&'static str>,
}

/// The lower layer that carries a protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Carrier {
    /// Connections over stream sockets.
    Stream,
    /// Ethernet frames of network interfaces. They are served only at configured interfaces, and
    /// require CAP_NET_RAW.
    Frames,
}

/// The volume and the server that a URL names.
pub(crate) trait Remote {
    /// Connects to the volume for I/O. `connections` is the number of connections of each core, if
    /// the URL gives none and the server permits several.
    ///
    /// # Errors
    /// If the server cannot be reached or does not have the volume.
    fn open(&self, connections: u32) -> Result<Arc<dyn Volume>, Failure>;

    /// Identifies the volume independently of the path and the parameters of the URL.
    fn volume_key(&self) -> String;

    /// Queries the description of the volume.
    ///
    /// # Errors
    /// If the server cannot be reached or does not have the volume.
    fn describe(&self) -> Result<Description, Failure>;

    /// Lists the exports of the server.
    ///
    /// # Errors
    /// If the server cannot be reached or does not list them.
    fn discover(&self) -> Result<Discovery, Failure>;

    /// Requests a reset function; returns what was reset, in a sentence for people.
    ///
    /// # Errors
    /// If the server cannot be reached or rejects the function.
    fn reset(&self, _function: ResetFunction) -> Result<&'static str, Failure> {
        Err(Failure::request(
            "only iSCSI, iSER and SRP logical units can be reset; use iscsi://host/target-name/lun",
        ))
    }
}

/// A description of a volume in the terms of its protocol.
pub(crate) struct Description {
    /// Labels and values for people; empty values are not shown.
    pub(crate) rows: Vec<(&'static str, String)>,
    /// JSON object for programs, with at least `url` as given, `protocol`, `size` in bytes and
    /// `read_only`.
    pub(crate) json: Value,
}

/// The exports of a server.
#[derive(Serialize)]
pub(crate) struct Discovery {
    /// URL of the server.
    pub(crate) url: String,
    pub(crate) exports: Vec<DiscoveredExport>,
    /// Number of exports beyond the maximum that is kept.
    pub(crate) left_out: u64,
}

/// One export of a server.
#[derive(Serialize)]
pub(crate) struct DiscoveredExport {
    pub(crate) name: String,
    pub(crate) url: String,
    /// Description of the export, or the reason why it could not be queried.
    pub(crate) description: String,
    /// In bytes; `None` if the server did not report it, or it was not queried.
    pub(crate) size: Option<u64>,
}

impl fmt::Debug for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Protocol").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Protocol {
    /// The protocol's name in config files.
    pub(crate) fn key(&self) -> String {
        self.name.replace('-', "_")
    }

    /// Whether the protocol supports Unix sockets.
    pub(crate) fn has_unix_sockets(&self) -> bool {
        self.schemes.iter().any(|(_, transport)| *transport == Transport::Unix)
    }

    /// Whether the protocol is served without a configured listener: at its default port, or at a
    /// socket in the private directory of `--run`.
    pub(crate) fn is_served_by_default(&self) -> bool {
        self.served_with.is_none() && self.is_default
    }

    /// Name of the protocol whose frontend serves the listeners of this one.
    pub(crate) fn served_as(&self) -> &'static str {
        self.served_with.unwrap_or(self.name)
    }

    /// The protocols that this protocol's listeners serve: itself, and those that are served with
    /// it.
    pub(crate) fn served_protocols(&self) -> impl Iterator<Item = &'static Protocol> {
        let name = self.name;
        PROTOCOLS.iter().copied().filter(move |other| other.name == name || other.served_with == Some(name))
    }

    /// The protocol's name in rows of the bench. Unix sockets have their own name, because they
    /// have their own ceiling.
    pub(crate) fn name_over(&self, transport: Transport) -> String {
        match transport {
            Transport::Tcp => self.name.to_owned(),
            Transport::Unix => format!("{}+unix", self.name),
        }
    }
}

/// Description of an export at another address, which may be unreachable from here.
pub(crate) const NOT_QUERIED: &str = "at another address, which was not queried";

/// Every protocol that has its own frontend.
pub(crate) fn with_frontend() -> impl Iterator<Item = &'static Protocol> {
    PROTOCOLS.iter().copied().filter(|protocol| protocol.served_with.is_none())
}

/// The protocols over stream sockets.
pub(crate) fn stream_protocols() -> impl Iterator<Item = &'static Protocol> {
    PROTOCOLS.iter().copied().filter(|protocol| protocol.carrier == Carrier::Stream)
}

/// The protocol with this name.
pub(crate) fn by_name(name: &str) -> Option<&'static Protocol> {
    PROTOCOLS.iter().copied().find(|protocol| protocol.name == name)
}

/// The protocol of a URL and its kind of socket; `None` if the scheme is unknown.
pub(crate) fn of_url(url: &str) -> Option<(&'static Protocol, Transport)> {
    let (scheme, _) = url.split_once("://")?;
    PROTOCOLS.iter().find_map(|protocol| {
        let (_, transport) = protocol.schemes.iter().find(|(own, _)| scheme.eq_ignore_ascii_case(own))?;
        Some((*protocol, *transport))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_determines_the_protocol_and_the_kind_of_socket() {
        let name = |url| of_url(url).map(|(protocol, transport)| protocol.name_over(transport));
        assert_eq!(name("nbd://host/a").as_deref(), Some("nbd"));
        assert_eq!(name("NBD+UNIX:///a?socket=/s").as_deref(), Some("nbd+unix"));
        assert_eq!(name("nbds://host/a").as_deref(), Some("nbd"));
        assert_eq!(name("iser://host/iqn.a/0?rdma=iwarp").as_deref(), Some("iser"));
        assert_eq!(name("aoe://eth0/e1.2").as_deref(), Some("aoe"));
        assert_eq!(name("mem:1g"), None);
    }

    #[test]
    fn no_two_protocols_share_a_name_or_a_scheme() {
        let schemes = |protocol: &'static Protocol| {
            protocol
                .schemes
                .iter()
                .map(|(scheme, _)| *scheme)
                .chain(protocol.unsupported_schemes.iter().copied())
        };
        let lists: [Vec<&str>; 3] = [
            PROTOCOLS.iter().copied().flat_map(schemes).collect(),
            PROTOCOLS.iter().map(|protocol| protocol.name).collect(),
            PROTOCOLS.iter().map(|protocol| protocol.title).collect(),
        ];
        for mut names in lists {
            let all = names.len();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), all, "{names:?}");
        }
    }
}
