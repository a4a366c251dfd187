//! The target's end of a connection over the in-memory provider.

use blockmux_proto::driver::target::{IoSource, TargetLifecycle};
use blockmux_proto::exports::{Exports, VolumeId};
use blockmux_proto::rdma::{Endpoint, RdmaSession};
use blockmux_rdma::Driven;
use blockmux_rdma::loopback::{self, Loopback};
use blockmux_volume::conformance::TestCore;
use blockmux_volume::{Channel, Completion, Waker};
use std::time::Instant;

/// A target's session with its queue pair and its volume: a minimal engine.
pub(crate) struct LoopbackTarget<S> {
    pub(crate) driven: Driven<Loopback, S>,
    channel: Box<dyn Channel>,
}

impl<S: RdmaSession + TargetLifecycle> LoopbackTarget<S> {
    /// Connects an initiator's endpoint to a session that serves one volume: the target's end, and
    /// the initiator's.
    pub(crate) fn connect(
        endpoint: &Endpoint,
        mut session: S,
        exports: &Exports,
    ) -> (LoopbackTarget<S>, Loopback) {
        let (active, passive) = loopback::pair(endpoint, &session.endpoint(), [9; 32]);
        let (core, depth) = (TestCore::new().as_core(), session.source().depth());
        let channel = exports.get(VolumeId(0)).unwrap().volume.open(&core, depth, Waker::idle()).unwrap();
        (LoopbackTarget { driven: Driven::new(session, passive, Instant::now()), channel }, active)
    }

    /// Runs one turn; returns whether there was progress.
    pub(crate) fn pump(&mut self) -> bool {
        self.driven.on_turn(Instant::now());
        let mut has_moved = self.driven.pump();
        while let Some((volume, io)) = self.driven.source().poll_io() {
            has_moved = true;
            if self.driven.source().begin(volume, &io, false).is_err() {
                continue;
            }
            let mut done: Vec<Completion> = Vec::new();
            self.channel.submit(io);
            self.channel.kick();
            self.channel.poll(&mut done);
            done.into_iter().for_each(|done| self.driven.source().on_io(done, Instant::now()));
        }
        has_moved
    }
}
