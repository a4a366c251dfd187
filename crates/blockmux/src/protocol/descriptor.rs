//! The properties of one protocol.

use super::carrier::Carrier;
use super::frontend::Frontend;
use super::remote::Remote;
use crate::failure::Failure;
use blockmux_lab::ceiling::{MessageShape, Transport};
use std::fmt;

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
    /// Whether its listeners serve a form over RDMA.
    pub(crate) has_rdma: bool,
    /// Whether it is over RDMA itself.
    pub(crate) is_over_rdma: bool,
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
    /// What its listeners are announced as by multicast DNS; `None` if no type is registered.
    pub(crate) service_type: Option<ServiceType>,
}

/// A type of services of DNS-based service discovery (RFC 6763).
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServiceType {
    /// As `_nbd._tcp`.
    pub(crate) name: &'static str,
    /// The keys and values of the TXT record.
    pub(crate) properties: &'static [(&'static str, &'static str)],
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

    /// The protocol's name in rows of the bench. Unix sockets have their own name, because they
    /// have their own ceiling.
    pub(crate) fn name_over(&self, transport: Transport) -> String {
        match transport {
            Transport::Tcp => self.name.to_owned(),
            Transport::Unix => format!("{}+unix", self.name),
        }
    }
}
