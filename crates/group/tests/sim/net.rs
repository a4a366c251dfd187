//! Time, delays, cuts and the trace: what carries messages between the parts of the simulation.

use super::cluster::Packet;
use super::gateway::Input;
use super::initiator::Reply;
use super::world::Fault;
use blockmux_volume::random::SplitMix;
use std::collections::{BTreeMap, BTreeSet};

/// What happens at a time.
#[derive(Clone, Debug)]
pub(crate) enum Happening {
    /// A process of a gateway gets something.
    Gateway { gateway: usize, process: u64, input: Input },
    /// A request reaches the cluster.
    Cluster(Packet),
    /// A storage daemon gets a map of the cluster.
    Map { osd: usize, epoch: u64 },
    /// An initiator gets something.
    Initiator { initiator: usize, reply: Reply },
    /// Something breaks, or is repaired.
    Fault(Fault),
    /// The operator looks whether commands are done.
    Operator,
}

pub(crate) struct Net {
    /// In milliseconds.
    pub(crate) now: u64,
    pub(crate) random: SplitMix,
    queue: BTreeMap<(u64, u64), Happening>,
    sent: u64,
    /// Gateways that do not reach the cluster, and what waits until they do.
    pub(crate) cut_from_cluster: BTreeSet<usize>,
    /// Gateways that initiators do not reach.
    pub(crate) cut_from_initiators: BTreeSet<usize>,
    /// Notifications of the first gateway do not reach the second one.
    pub(crate) deaf: BTreeSet<(usize, usize)>,
    held: Vec<(usize, Happening)>,
    /// Whether delays are short and nothing is lost.
    pub(crate) is_calm: bool,
    trace: Option<Vec<String>>,
}

impl Net {
    pub(crate) fn new(seed: u64, is_traced: bool) -> Net {
        Net {
            now: 0,
            random: SplitMix::new(seed),
            queue: BTreeMap::new(),
            sent: 0,
            cut_from_cluster: BTreeSet::new(),
            cut_from_initiators: BTreeSet::new(),
            deaf: BTreeSet::new(),
            held: Vec::new(),
            is_calm: false,
            trace: is_traced.then(Vec::new),
        }
    }

    /// Writes a line of the trace, which is only made when a seed has failed.
    pub(crate) fn note(&mut self, line: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:>9.3} {}", self.now as f64 / 1e3, line()));
        }
    }

    pub(crate) fn trace(self) -> Vec<String> {
        self.trace.unwrap_or_default()
    }

    pub(crate) fn next(&mut self) -> Option<Happening> {
        let ((at, _), happening) = self.queue.pop_first()?;
        self.now = at;
        Some(happening)
    }

    pub(crate) fn after(&mut self, delay: u64, happening: Happening) {
        self.sent += 1;
        self.queue.insert((self.now + delay, self.sent), happening);
    }

    /// Whether something with this chance in a hundred happens, if anything goes wrong now.
    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        let draw = self.random.below(100);
        !self.is_calm && draw < percent
    }

    fn delay(&mut self) -> u64 {
        let usual = 1 + self.random.below(4);
        if self.chance(3) { usual + self.random.below(400) } else { usual }
    }

    /// Sends over the link between a gateway and the cluster.
    pub(crate) fn storage(&mut self, gateway: usize, happening: Happening) {
        let delay = self.delay();
        if self.cut_from_cluster.contains(&gateway) {
            self.held.push((gateway, happening));
        } else {
            self.after(delay, happening);
        }
    }

    /// Whether a message may arrive over that link; otherwise it waits until the link is repaired.
    pub(crate) fn arrives(&mut self, gateway: usize, happening: &Happening) -> bool {
        let is_cut = self.cut_from_cluster.contains(&gateway);
        if is_cut {
            self.held.push((gateway, happening.clone()));
        }
        !is_cut
    }

    /// Repairs the link. What has waited arrives late, in any order.
    pub(crate) fn repair(&mut self, gateway: usize) {
        self.cut_from_cluster.remove(&gateway);
        let (waited, rest): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.held).into_iter().partition(|(of, _)| *of == gateway);
        self.held = rest;
        for (_, happening) in waited {
            let delay = self.random.below(300);
            self.after(delay, happening);
        }
    }

    /// Sends between an initiator and a gateway. While they do not reach each other, messages are
    /// late, as if they waited in a buffer, or lost.
    pub(crate) fn front(&mut self, gateway: usize, happening: Happening) {
        let mut delay = self.delay();
        if self.cut_from_initiators.contains(&gateway) {
            if self.random.below(2) == 0 {
                return;
            }
            delay += self.random.below(6000);
        }
        self.after(delay, happening);
    }

    /// Sends a notification, which is late, lost or doubled at times.
    pub(crate) fn notify(&mut self, from: usize, to: usize, happening: Happening) {
        if self.deaf.contains(&(from, to)) || self.cut_from_cluster.contains(&to) || self.chance(4) {
            return;
        }
        for _ in 0..if self.chance(4) { 2 } else { 1 } {
            let delay = self.delay();
            self.after(delay, happening.clone());
        }
    }
}
