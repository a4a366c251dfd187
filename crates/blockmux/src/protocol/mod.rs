//! The protocols that Blockmux has, in one list that every command reads: [`PROTOCOLS`].
//!
//! A protocol is a module here and a line of that list. URLs as volumes and the commands `info` and
//! `discover` take its [`Remote`], the bench the sizes of its messages and how to reach it, and
//! `serve` its [`Frontend`].

mod alua;
mod aoe;
pub(crate) mod frontend;
mod frontends;
pub(crate) mod iscsi;
mod nbd;
pub(crate) mod nvme_tcp;
pub(crate) mod policy;
pub(crate) mod secret;
mod srp;
mod units;

#[cfg(test)]
pub(crate) use {aoe::AOE, iscsi::ISCSI, nbd::NBD, nvme_tcp::NVME_TCP};

pub(crate) use frontends::{Frontends, KeyError, Listening, anchor};
pub(crate) use units::Units;

use crate::failure::Failure;
use crate::reset::What;
use blockmux_lab::ceiling::{MessageShape, Transport};
use blockmux_volume::Volume;
use frontend::Frontend;
use serde::Serialize;
use serde_json::Value;
use std::fmt;
use std::sync::Arc;

/// Every protocol that Blockmux has, in the order in which people see them.
pub(crate) const PROTOCOLS: &[&Protocol] = &[
    &nbd::NBD,
    &iscsi::ISCSI,
    &iscsi::ISER,
    &nvme_tcp::NVME_TCP,
    &nvme_tcp::NVME_RDMA,
    &srp::SRP,
    &aoe::AOE,
];

/// One protocol.
pub(crate) struct Protocol {
    /// As rows and suites call it, and the option of `serve` that names its listeners.
    pub(crate) name: &'static str,
    /// As people write it.
    pub(crate) title: &'static str,
    pub(crate) carrier: Carrier,
    /// Whether it is served, and in the bench's short list, without having been named.
    pub(crate) is_unasked: bool,
    /// Where it listens unless told otherwise.
    pub(crate) port: u16,
    /// What `serve --help` says of its listeners: how they are written, and what they do.
    pub(crate) listener_help: [&'static str; 2],
    /// How its URLs begin, in lower case and without `://`, and what sockets they lead to.
    pub(crate) schemes: &'static [(&'static str, Transport)],
    /// Schemes of its that are not spoken; [`Protocol::remote`] says why.
    pub(crate) unspoken_schemes: &'static [&'static str],
    /// What its URLs look like, for who has written something else.
    pub(crate) url_forms: &'static [&'static str],
    /// The longest description of an export, in bytes.
    pub(crate) max_description: usize,
    /// The largest logical block of a volume, in bytes.
    pub(crate) max_logical_block: u32,
    /// Sizes of its messages as both sides here agree on them.
    pub(crate) shape: MessageShape,
    /// What serves it, before anything is said of it.
    pub(crate) frontend: fn() -> Box<dyn Frontend>,
    /// Reads a URL that begins with one of its schemes.
    pub(crate) remote: fn(&str) -> Result<Box<dyn Remote>, Failure>,
    /// The protocol whose listeners and whose frontend serve this one too.
    pub(crate) served_with: Option<&'static str>,
}

/// What carries a protocol, and so where it is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Carrier {
    /// Connections over stream sockets.
    Stream,
    /// Frames of network interfaces. They are served only where somebody names an interface, and
    /// opening one takes CAP_NET_RAW.
    Frames,
}

/// What a URL names: a volume on a server, and the server.
pub(crate) trait Remote {
    /// Reaches the volume for I/O. `connections` is how many each core opens if the URL does not
    /// say, and the server lets several be used.
    ///
    /// # Errors
    /// If the server cannot be reached or does not have the volume.
    fn open(&self, connections: u32) -> Result<Arc<dyn Volume>, Failure>;

    /// Where the volume is, whatever the URL says of the way there.
    fn place(&self) -> String;

    /// What the server tells of the volume.
    ///
    /// # Errors
    /// As for [`Remote::open`].
    fn describe(&self) -> Result<Description, Failure>;

    /// What the server exports.
    ///
    /// # Errors
    /// If the server cannot be reached or does not tell.
    fn discover(&self) -> Result<Found, Failure>;

    /// Has the server reset something; answers what it was.
    ///
    /// # Errors
    /// If the server cannot be reached or does not do it.
    fn reset(&self, _what: What) -> Result<&'static str, Failure> {
        Err(Failure::request(
            "only units of iSCSI, iSER and SRP can be reset; write iscsi://host/target-name/lun",
        ))
    }
}

/// A volume in its protocol's own words.
pub(crate) struct Description {
    /// For people; an empty value is not shown.
    pub(crate) rows: Vec<(&'static str, String)>,
    /// For programs: an object with `url` as it was given, `protocol`, `size` in bytes and
    /// `read_only` at least.
    pub(crate) json: Value,
}

/// What a server exports.
#[derive(Serialize)]
pub(crate) struct Found {
    /// The server's.
    pub(crate) url: String,
    pub(crate) exports: Vec<FoundExport>,
    /// Listed by the server beyond what we keep.
    pub(crate) left_out: u64,
}

/// One export of a server.
#[derive(Serialize)]
pub(crate) struct FoundExport {
    pub(crate) name: String,
    pub(crate) url: String,
    /// What it is, or why nothing is known of it.
    pub(crate) description: String,
    /// In bytes; `None` if the server did not tell, or was not asked.
    pub(crate) size: Option<u64>,
}

impl fmt::Debug for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Protocol").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Protocol {
    /// Its name in config files.
    pub(crate) fn key(&self) -> String {
        self.name.replace('-', "_")
    }

    /// Whether its listeners may be Unix sockets.
    pub(crate) fn has_unix_sockets(&self) -> bool {
        self.schemes.iter().any(|(_, transport)| *transport == Transport::Unix)
    }

    /// Whether it is served at its own port, or in a private directory, if nobody says where to
    /// serve.
    pub(crate) fn is_served_unasked(&self) -> bool {
        self.served_with.is_none() && self.is_unasked
    }

    /// The protocol that its listeners are served as.
    pub(crate) fn served_as(&self) -> &'static str {
        self.served_with.unwrap_or(self.name)
    }

    /// What its listeners serve: itself, and what is served with it.
    pub(crate) fn spoken_here(&self) -> impl Iterator<Item = &'static Protocol> {
        let name = self.name;
        PROTOCOLS.iter().copied().filter(move |other| other.name == name || other.served_with == Some(name))
    }

    /// Its name in rows: sockets of another kind have a ceiling of their own.
    pub(crate) fn name_over(&self, transport: Transport) -> String {
        match transport {
            Transport::Tcp => self.name.to_owned(),
            Transport::Unix => format!("{}+unix", self.name),
        }
    }
}

/// What there is to say of an export that others have, who may be out of our reach.
pub(crate) const ELSEWHERE: &str = "at another address, which was not asked";

/// Every protocol with a frontend of its own.
pub(crate) fn served() -> impl Iterator<Item = &'static Protocol> {
    PROTOCOLS.iter().copied().filter(|protocol| protocol.served_with.is_none())
}

/// The protocols that the bench can serve and reach over any sockets.
pub(crate) fn over_sockets() -> impl Iterator<Item = &'static Protocol> {
    PROTOCOLS.iter().copied().filter(|protocol| protocol.carrier == Carrier::Stream)
}

/// The protocol of that name.
pub(crate) fn by_name(name: &str) -> Option<&'static Protocol> {
    PROTOCOLS.iter().copied().find(|protocol| protocol.name == name)
}

/// The protocol of a URL, and its sockets.
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
    fn a_url_leads_to_its_protocol_and_its_sockets() {
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
                .chain(protocol.unspoken_schemes.iter().copied())
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
