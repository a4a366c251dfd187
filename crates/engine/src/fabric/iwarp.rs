//! Software iWARP over TCP.

use super::{Fabric, Setup, StreamFabric};
use crate::core::reactor::EngineCore;
use blockmux_proto::rdma::Endpoint;
use blockmux_rdma::iwarp::{Iwarp, IwarpConfig, KEY_REQUEST};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The initiator's side of software iWARP.
#[derive(Debug, Default)]
pub struct IwarpFabric {
    has_crc: bool,
    /// How many paths have learnt to connect by RFC 5044 alone; all do so then. RFC 6581 is tried
    /// first.
    plain: Arc<AtomicUsize>,
    /// Whether this path has learnt it; a clone may be another path.
    has_learnt: AtomicBool,
}

impl Clone for IwarpFabric {
    fn clone(&self) -> IwarpFabric {
        IwarpFabric { has_crc: self.has_crc, plain: self.plain.clone(), has_learnt: false.into() }
    }
}

impl IwarpFabric {
    /// Requests CRCs of frames with `has_crc`; the peer may require them, too.
    #[must_use]
    pub fn new(has_crc: bool) -> IwarpFabric {
        IwarpFabric { has_crc, ..IwarpFabric::default() }
    }
}

impl Fabric for IwarpFabric {
    type QueuePair = Iwarp;
    type Host = EngineCore;

    fn connect(&self, endpoint: &Endpoint, setup: Setup) -> Iwarp {
        let is_enhanced = self.plain.load(Ordering::Relaxed) == 0;
        let config = IwarpConfig { has_crc: self.has_crc, is_enhanced, ..config(&setup) };
        Iwarp::active(endpoint, config, setup.pool, setup.seed, setup.now)
    }

    fn accept(endpoint: &Endpoint, setup: Setup) -> Iwarp {
        Iwarp::passive(endpoint, config(&setup), setup.pool, setup.seed, setup.now)
    }

    /// Whether the peer may support only RFC 5044 (RFC 6581 §10). If it takes no request of that
    /// form either, the form was not the reason, and later connections begin with RFC 6581 again,
    /// unless another path needs RFC 5044.
    fn retries(&self, closed: &Iwarp) -> bool {
        if closed.has_answered() {
            return false;
        }
        let was_enhanced = closed.is_enhanced();
        match (self.has_learnt.swap(was_enhanced, Ordering::Relaxed), was_enhanced) {
            (false, true) => drop(self.plain.fetch_add(1, Ordering::Relaxed)),
            (true, false) => drop(self.plain.fetch_sub(1, Ordering::Relaxed)),
            (true, true) | (false, false) => {}
        }
        was_enhanced
    }
}

impl StreamFabric for IwarpFabric {}

impl IwarpFabric {
    /// The first bytes of each connection, which no other protocol begins with: the key of an MPA
    /// request, which is text (RFC 5044 §7.1).
    pub(super) const REQUEST: &'static [u8] = &KEY_REQUEST;
}

fn config(setup: &Setup) -> IwarpConfig {
    let config = IwarpConfig::default();
    IwarpConfig { mss: setup.transport.segment_len.unwrap_or(config.mss), ..config }
}
