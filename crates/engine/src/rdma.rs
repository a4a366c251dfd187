//! Queue pairs for any protocol: how a connection gets one, on both sides, and of which provider.
//!
//! A session says what it needs of its queue pair, its private data included ([`Endpoint`]); here a
//! provider is set up with that. Software iWARP is the only one yet. It runs over a byte stream, so
//! that the engine's stream tasks drive it (decision 51).

mod port;

use blockmux_proto::rdma::{Endpoint, RdmaConnections, RdmaSession};
use blockmux_rdma::iwarp::{Config, Iwarp};
use blockmux_rdma::{Driven, Seed};
use blockmux_volume::Pool;
pub(crate) use port::PortSession;
use std::time::Instant;

/// What every queue pair is made with.
pub(crate) struct Setup {
    /// The core's.
    pub(crate) pool: Pool,
    /// For the names of memory: random, and no other session has it.
    pub(crate) seed: Seed,
    /// How many bytes the segments of its stream have, where that is known.
    pub(crate) segment_len: Option<usize>,
    /// Now.
    pub(crate) now: Instant,
}

impl Setup {
    fn config(&self, config: Config) -> Config {
        Config { mss: self.segment_len.unwrap_or(config.mss), ..config }
    }
}

/// Accepts a connection that asks for a queue pair.
pub(crate) fn accept<S: RdmaSession>(session: S, setup: Setup) -> Driven<Iwarp, S> {
    let config = setup.config(Config::default());
    let queue_pair = Iwarp::passive(&session.endpoint(), config, setup.pool, setup.seed, setup.now);
    Driven::new(session, queue_pair, setup.now)
}

/// Connects by software iWARP, over TCP.
#[derive(Clone, Copy, Debug, Default)]
pub struct OverIwarp {
    /// Whether its frames are to have CRCs; the target may want them too.
    pub has_crc: bool,
    /// Whether connections begin by RFC 5044 alone. Without it that is tried where a target does
    /// not know RFC 6581.
    pub is_plain: bool,
}

impl OverIwarp {
    fn config(self) -> Config {
        Config { has_crc: self.has_crc, is_enhanced: !self.is_plain, ..Config::default() }
    }

    /// The oldest way to connect, for a target that knows no other; `None`: this is it.
    pub(crate) fn older(self) -> Option<OverIwarp> {
        (!self.is_plain).then_some(OverIwarp { is_plain: true, ..self })
    }

    fn queue_pair(self, endpoint: &Endpoint, setup: Setup) -> Iwarp {
        let config = setup.config(self.config());
        Iwarp::active(endpoint, config, setup.pool, setup.seed, setup.now)
    }

    /// A session of one connection.
    pub(crate) fn connect<S: RdmaSession>(self, session: S, setup: Setup) -> Driven<Iwarp, S> {
        let now = setup.now;
        let queue_pair = self.queue_pair(&session.endpoint(), setup);
        Driven::new(session, queue_pair, now)
    }

    /// A session that may have several connections, each with a queue pair of its own.
    pub(crate) fn connect_several<S: RdmaConnections>(self, session: S, setup: Setup) -> Driven<Iwarp, S> {
        let (first_seed, pool, mut count) = (setup.seed, setup.pool.clone(), 0_u64);
        let further = move |first: &Iwarp, endpoint: &Endpoint, now| {
            let config = Config { mss: first.mss(), ..self.config() };
            // Of the seeds of sessions, the first eight bytes differ; of their connections, the
            // last.
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
