//! The list of all protocols, which every command uses: [`PROTOCOLS`].
//!
//! Each protocol is a module here and an entry of the list. URLs as volumes and the commands `info`
//! and `discover` use its [`Remote`], the bench uses its message sizes and URL schemes, and `serve`
//! uses its [`Frontend`](frontend::Frontend).

pub(crate) mod address;
mod alua;
mod aoe;
mod carrier;
mod configured;
mod descriptor;
pub(crate) mod fabric;
pub(crate) mod frontend;
mod frontends;
pub(crate) mod iscsi;
mod keys;
mod listeners;
mod lun_map;
mod nbd;
pub(crate) mod nvme_tcp;
pub(crate) mod policy;
pub(crate) mod reach;
mod remote;
mod srp;
mod units;

#[cfg(test)]
pub(crate) use {aoe::AOE, iscsi::ISCSI, nbd::NBD, nvme_tcp::NVME_TCP};

pub(crate) use carrier::Carrier;
pub(crate) use descriptor::{Protocol, ServiceType};
pub(crate) use frontends::{ConfiguredListener, Frontends};
pub(crate) use keys::{FilePlaces, KeyError, anchor};
pub(crate) use remote::{Description, DiscoveredExport, Discovery, NOT_QUERIED, Remote, ResetFunction};
pub(crate) use units::LogicalUnits;

use blockmux_lab::ceiling::Transport;

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

/// The protocols that the listeners of `served` serve: itself, and those that are served with it.
pub(crate) fn served_protocols(served: &Protocol) -> impl Iterator<Item = &'static Protocol> {
    let name = served.name;
    PROTOCOLS.iter().copied().filter(move |other| other.name == name || other.served_with == Some(name))
}

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
