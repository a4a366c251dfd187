//! The protocols that can be measured: how to serve and reach a volume, and what a message looks like.

use blockmux_engine::listener::Serve;
use blockmux_engine::nbd::{self, Endpoint};
use blockmux_engine::socket::Address;
use blockmux_lab::ceiling::{MessageShape, Transport};
use blockmux_proto::exports::Exports;
use blockmux_volume::Volume;
use std::sync::Arc;
use std::time::Duration;

/// One protocol over stream sockets.
pub(super) struct Protocol {
    /// As rows and suites call it.
    pub(super) name: &'static str,
    /// How its URLs begin, and what sockets they lead to.
    pub(super) schemes: &'static [(&'static str, Transport)],
    /// Sizes of its messages as both sides here agree on them.
    pub(super) shape: MessageShape,
    /// Serves exports to accepted connections.
    pub(super) serve: fn(Exports) -> Serve,
    /// Reaches the export [`EXPORT`] at an address.
    pub(super) connect: fn(&Address) -> Result<Arc<dyn Volume>, String>,
}

impl Protocol {
    /// Its name in rows: sockets of another kind have a ceiling of their own.
    pub(super) fn name_over(&self, transport: Transport) -> String {
        match transport {
            Transport::Tcp => self.name.to_owned(),
            Transport::Unix => format!("{}+unix", self.name),
        }
    }
}

/// Every protocol that Blockmux has.
pub(super) const PROTOCOLS: &[Protocol] = &[Protocol {
    name: "nbd",
    schemes: &[("nbd://", Transport::Tcp), ("nbd+unix://", Transport::Unix)],
    // Extended headers: request; reply with the offset of its data; request; reply without data.
    shape: MessageShape { read_request: 32, read_reply_head: 40, write_request_head: 32, write_reply: 32 },
    serve: nbd::serve,
    connect: |address| {
        let endpoint = Endpoint {
            address: address.clone(),
            export: EXPORT.to_owned(),
            connections: 1,
            patience: PATIENCE,
        };
        nbd::connect(endpoint)
            .map(|volume| Arc::new(volume) as Arc<dyn Volume>)
            .map_err(|error| error.to_string())
    },
}];

/// The protocol of that name.
pub(super) fn by_name(name: &str) -> Option<&'static Protocol> {
    PROTOCOLS.iter().find(|protocol| protocol.name == name)
}

/// The protocol of a URL, and its sockets.
pub(super) fn of_url(url: &str) -> Option<(&'static Protocol, Transport)> {
    PROTOCOLS.iter().find_map(|protocol| {
        let (_, transport) = protocol.schemes.iter().find(|(scheme, _)| url.starts_with(scheme))?;
        Some((protocol, *transport))
    })
}

/// The name under which the bench exports its volume.
pub(super) const EXPORT: &str = "bench";
const PATIENCE: Duration = Duration::from_secs(5);
