//! Software iWARP over TCP.

use super::{Fabric, Setup, StreamFabric};
use blockmux_proto::rdma::Endpoint;
use blockmux_rdma::iwarp::{Iwarp, IwarpConfig, KEY_REQUEST};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The initiator's side of software iWARP.
#[derive(Clone, Debug, Default)]
pub struct IwarpFabric {
    has_crc: bool,
    /// Whether to connect by RFC 5044 alone. RFC 6581 is tried first.
    is_plain: Arc<AtomicBool>,
}

impl IwarpFabric {
    /// Requests CRCs of frames with `has_crc`; the peer may require them, too.
    #[must_use]
    pub fn new(has_crc: bool) -> IwarpFabric {
        IwarpFabric { has_crc, is_plain: Arc::default() }
    }

    /// Begins with RFC 5044 if `is_plain`.
    #[must_use]
    pub fn with_plain(self, is_plain: bool) -> IwarpFabric {
        IwarpFabric { is_plain: Arc::new(is_plain.into()), ..self }
    }
}

impl Fabric for IwarpFabric {
    type QueuePair = Iwarp;

    fn connect(&self, endpoint: &Endpoint, setup: Setup) -> Iwarp {
        let is_enhanced = !self.is_plain.load(Ordering::Relaxed);
        let config = IwarpConfig { has_crc: self.has_crc, is_enhanced, ..config(&setup) };
        Iwarp::active(endpoint, config, setup.pool, setup.seed, setup.now)
    }

    fn accept(endpoint: &Endpoint, setup: Setup) -> Iwarp {
        Iwarp::passive(endpoint, config(&setup), setup.pool, setup.seed, setup.now)
    }

    /// Whether the peer may support only RFC 5044 (RFC 6581 §10). If it takes no request of that
    /// form either, the form was not the reason, and later connections begin with RFC 6581 again.
    fn retries(&self, closed: &Iwarp) -> bool {
        if closed.has_answered() {
            return false;
        }
        let was_enhanced = closed.is_enhanced();
        self.is_plain.store(was_enhanced, Ordering::Relaxed);
        was_enhanced
    }
}

impl StreamFabric for IwarpFabric {
    /// The key of an MPA request, which is text (RFC 5044 §7.1).
    const REQUEST: &'static [u8] = &KEY_REQUEST;
}

fn config(setup: &Setup) -> IwarpConfig {
    let config = IwarpConfig::default();
    IwarpConfig { mss: setup.segment_len.unwrap_or(config.mss), ..config }
}
