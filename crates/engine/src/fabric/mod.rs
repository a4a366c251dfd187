//! Queue pairs for any protocol, on both sides of a connection.
//!
//! A session specifies its queue pair, including its private data ([`Endpoint`]); this module sets
//! up a provider accordingly. Software iWARP is the only provider so far. It runs over a byte
//! stream, so the engine's stream tasks drive it (decision 51).

use blockmux_proto::rdma::{Endpoint, RdmaConnections, RdmaSession};
use blockmux_rdma::iwarp::{Iwarp, IwarpConfig, KEY_REQUEST};
use blockmux_rdma::{Driven, Seed};
use blockmux_volume::Pool;
use std::time::Instant;

/// Parameters of every queue pair.
pub(crate) struct Setup {
    /// The core's pool.
    pub(crate) pool: Pool,
    /// Seed of memory region keys: random and unique.
    pub(crate) seed: Seed,
    /// Maximum segment size of the stream in bytes, if known.
    pub(crate) segment_len: Option<usize>,
    /// The current time.
    pub(crate) now: Instant,
}

impl Setup {
    fn config(&self, config: IwarpConfig) -> IwarpConfig {
        IwarpConfig { mss: self.segment_len.unwrap_or(config.mss), ..config }
    }
}

/// Whether a connection that begins with these bytes, at least [`REQUEST_LEN`], requests a queue
/// pair: with the text of an MPA request's key (RFC 5044 §7.1).
pub(crate) fn is_request(begin: &[u8]) -> bool {
    begin.starts_with(&KEY_REQUEST)
}

/// Number of bytes by which a request is recognised.
pub(crate) const REQUEST_LEN: usize = KEY_REQUEST.len();

/// A session joined with its queue pair.
pub(crate) type OverFabric<S> = Driven<Iwarp, S>;

/// Accepts a connection that requests a queue pair.
pub(crate) fn accept<S: RdmaSession>(session: S, setup: Setup) -> OverFabric<S> {
    let config = setup.config(IwarpConfig::default());
    let queue_pair = Iwarp::passive(&session.endpoint(), config, setup.pool, setup.seed, setup.now);
    Driven::new(session, queue_pair, setup.now)
}

/// The software iWARP transport over TCP.
#[derive(Clone, Copy, Debug, Default)]
pub struct OverIwarp {
    /// Whether to request CRCs on FPDUs; the peer may require them, too.
    pub has_crc: bool,
    /// Whether to connect by RFC 5044 alone. Otherwise RFC 6581 is tried first, and RFC 5044 only
    /// if the target does not support that.
    pub is_plain: bool,
}

impl OverIwarp {
    fn config(self) -> IwarpConfig {
        IwarpConfig { has_crc: self.has_crc, is_enhanced: !self.is_plain, ..IwarpConfig::default() }
    }

    /// The oldest variant of connecting, for targets that support no other. `None` if this is the
    /// oldest variant.
    pub(crate) fn older(self) -> Option<OverIwarp> {
        (!self.is_plain).then_some(OverIwarp { is_plain: true, ..self })
    }

    fn queue_pair(self, endpoint: &Endpoint, setup: Setup) -> Iwarp {
        let config = setup.config(self.config());
        Iwarp::active(endpoint, config, setup.pool, setup.seed, setup.now)
    }

    /// Connects a session of one connection.
    pub(crate) fn connect<S: RdmaSession>(self, session: S, setup: Setup) -> Driven<Iwarp, S> {
        let now = setup.now;
        let queue_pair = self.queue_pair(&session.endpoint(), setup);
        Driven::new(session, queue_pair, now)
    }

    /// Connects a session of several connections, each with its own queue pair.
    pub(crate) fn connect_several<S: RdmaConnections>(self, session: S, setup: Setup) -> Driven<Iwarp, S> {
        let (first_seed, pool, mut count) = (setup.seed, setup.pool.clone(), 0_u64);
        let further = move |first: &Iwarp, endpoint: &Endpoint, now| {
            let config = IwarpConfig { mss: first.mss(), ..self.config() };
            // Seeds of different sessions differ in the first eight bytes; seeds of one session's
            // connections differ in the last eight.
            count += 1;
            let (mut seed, count) = (first_seed, count.to_be_bytes());
            seed.iter_mut().rev().zip(count.iter().rev()).for_each(|(byte, add)| *byte ^= add);
            Iwarp::active(endpoint, config, pool.clone(), seed, now)
        };
        let now = setup.now;
        let first = self.queue_pair(&session.endpoint(), setup);
        Driven::new(session, first, now).with_further(further)
    }
}
