//! What must hold for a volume that clients share.
//!
//! Each block says which write it is from ([`Stamp`]), so every write is checked when it begins and
//! when it is executed:
//! - No write of a client begins or is executed between the response to a PREEMPT of its key and
//!   its next registration. If the PREEMPT does not wait for I/O in flight, what has begun goes on,
//!   and a COMPARE AND WRITE that has read may write.
//! - No write of a connection begins or is executed after the client's next login.
//! - A COMPARE AND WRITE is executed only on the content that it has compared, and fails only if
//!   the block had other content.
//! - Writes begin no faster than the limit allows.
//! - What was acknowledged was executed, what was refused was not, and reads return a content that
//!   the block had in the meantime.

use blockmux_engine::sim::BLOCK;
use std::collections::HashSet;
use std::time::{Duration, Instant};

/// Which write a block is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    /// Unique, and 0 for a block that was never written.
    pub(super) id: u64,
    pub(super) client: u64,
    /// Number of the client's login.
    pub(super) login: u64,
    /// Of a COMPARE AND WRITE: the write that the block was compared with.
    pub(super) expected: Option<u64>,
}

impl Stamp {
    pub(super) fn of(block: &[u8]) -> Stamp {
        let number = |nth: usize| u64::from_le_bytes(block[nth * 8..][..8].try_into().unwrap());
        let expected = (number(3) > 0).then(|| number(4));
        Stamp { id: number(0), client: number(1), login: number(2), expected }
    }

    pub(super) fn block(self) -> Vec<u8> {
        let (is_compared, expected) = (self.expected.is_some().into(), self.expected.unwrap_or(0));
        let numbers = [self.id, self.client, self.login, is_compared, expected];
        let mut block: Vec<u8> = numbers.into_iter().flat_map(u64::to_le_bytes).collect();
        block.resize(BLOCK, self.id as u8);
        block
    }
}

/// The history of a volume of zeroes.
pub(super) struct Checker {
    clients: Vec<ClientRights>,
    /// The writes of each block, oldest first, with the moment of each.
    blocks: Vec<Vec<(Moment, u64)>>,
    moment: Moment,
    executed: HashSet<u64>,
    refused: HashSet<u64>,
    /// When the limit's tokens would be full again.
    full_at: Option<Instant>,
    faults: Vec<String>,
    /// Number of checks of each kind that could have failed.
    pub(super) counts: Counts,
}

/// A point in the order of all events.
pub(super) type Moment = u64;

/// How often a run did what it is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) executed: u64,
    pub(super) compared: u64,
    pub(super) miscompared: u64,
    pub(super) conflicts: u64,
    pub(super) preempted: u64,
    pub(super) logins: u64,
    /// Connections that were lost while a write was in flight.
    pub(super) orphaned: u64,
}

#[derive(Clone, Default)]
struct ClientRights {
    /// The latest successful login.
    login: u64,
    /// Number of registrations sent.
    registrations: u64,
    /// Whether the last one has no response yet.
    is_registering: bool,
    /// Whether its key was preempted since.
    is_preempted: bool,
    /// Whether that preemption has waited for its I/O.
    is_drained: bool,
}

impl Checker {
    pub(super) fn new(clients: usize, blocks: u64) -> Checker {
        Checker {
            clients: vec![ClientRights::default(); clients],
            blocks: (0..blocks).map(|_| vec![(0, 0)]).collect(),
            moment: 0,
            executed: HashSet::new(),
            refused: HashSet::new(),
            full_at: None,
            faults: Vec::new(),
            counts: Counts::default(),
        }
    }

    pub(super) fn fault(&mut self, what: String) {
        self.faults.push(what);
    }

    pub(super) fn first_fault(&self) -> Option<&String> {
        self.faults.first()
    }

    /// The current moment.
    pub(super) fn now(&self) -> Moment {
        self.moment
    }

    /// The target submits a write to the volume.
    pub(super) fn on_begin(&mut self, stamp: Stamp, now: Instant) {
        let client = &self.clients[stamp.client as usize];
        let is_excluded = client.is_drained || client.is_preempted && stamp.expected.is_none();
        self.check_rights("began", stamp, is_excluded);
        let full_at = self.full_at.map_or(now, |at| at.max(now)) + PERIOD;
        self.full_at = Some(full_at);
        if full_at - now > BURST + PERIOD * MAX_UNCHARGED {
            self.fault(format!("{stamp:?} began {:?} before the limit allows it", full_at - now));
        }
    }

    /// The volume has done a write.
    pub(super) fn on_executed(&mut self, block: u64, stamp: Stamp) {
        let is_excluded = self.clients[stamp.client as usize].is_drained;
        self.check_rights("was executed", stamp, is_excluded);
        self.moment += 1;
        let writes = &mut self.blocks[block as usize];
        let (_, before) = writes[writes.len() - 1];
        writes.push((self.moment, stamp.id));
        self.counts.executed += 1;
        if stamp.expected.is_some_and(|expected| expected != before) {
            self.fault(format!("{stamp:?} was executed on block {block} after write {before}"));
        }
        if !self.executed.insert(stamp.id) || self.refused.contains(&stamp.id) {
            self.fault(format!("{stamp:?} was executed twice or after it was refused"));
        }
    }

    fn check_rights(&mut self, what: &str, stamp: Stamp, is_excluded: bool) {
        let login = self.clients[stamp.client as usize].login;
        if is_excluded {
            self.fault(format!("{stamp:?} {what} after its client was preempted"));
        } else if stamp.login < login {
            self.fault(format!("{stamp:?} {what} after login {login} of its client"));
        }
    }

    pub(super) fn on_login(&mut self, client: usize, login: u64) {
        self.clients[client].login = login;
        // Commands of the lost connection have ended, and this one may have been executed.
        self.clients[client].is_registering = false;
        self.counts.logins += 1;
    }

    pub(super) fn on_registering(&mut self, client: usize) {
        let rights = &mut self.clients[client];
        rights.registrations += 1;
        (rights.is_registering, rights.is_preempted, rights.is_drained) = (true, false, false);
    }

    pub(super) fn on_registered(&mut self, client: usize) {
        self.clients[client].is_registering = false;
    }

    /// A client is about to be preempted. Returns what [`Checker::on_preempted`] needs; `None` if
    /// it is registering, so that nobody knows which comes first.
    pub(super) fn preempting(&self, victim: usize) -> Option<u64> {
        let rights = &self.clients[victim];
        (!rights.is_registering).then_some(rights.registrations)
    }

    /// A client was preempted, and its I/O `is_drained`. It may have registered again meanwhile.
    pub(super) fn on_preempted(&mut self, victim: usize, registrations: u64, is_drained: bool) {
        let rights = &mut self.clients[victim];
        if rights.registrations == registrations {
            rights.is_preempted = true;
            rights.is_drained |= is_drained;
        }
        self.counts.preempted += 1;
    }

    /// A read that was sent at `since` returned `stamp`.
    pub(super) fn on_read(&mut self, block: u64, stamp: Stamp, since: Moment) {
        if !self.had_since(block, since).any(|id| id == stamp.id) {
            self.fault(format!("a read of block {block} returned {stamp:?}, which it did not hold"));
        }
    }

    pub(super) fn on_written(&mut self, stamp: Stamp) {
        self.counts.compared += u64::from(stamp.expected.is_some());
        if !self.executed.contains(&stamp.id) {
            self.fault(format!("{stamp:?} was acknowledged and not executed"));
        }
    }

    pub(super) fn on_refused(&mut self, stamp: Stamp) {
        self.refused.insert(stamp.id);
        if self.executed.contains(&stamp.id) {
            self.fault(format!("{stamp:?} was refused and executed"));
        }
    }

    /// A COMPARE AND WRITE that was sent at `since` found other content.
    pub(super) fn on_miscompare(&mut self, block: u64, stamp: Stamp, since: Moment) {
        self.counts.miscompared += 1;
        let expected = stamp.expected;
        if self.had_since(block, since).all(|id| Some(id) == expected) {
            self.fault(format!("{stamp:?} failed, and block {block} held what it expected"));
        }
        self.on_refused(stamp);
    }

    /// The content of a block at the end.
    pub(super) fn on_end(&mut self, block: u64, stamp: Stamp) {
        self.on_read(block, stamp, self.moment);
    }

    /// The writes that the block held at some time from `since` on.
    fn had_since(&self, block: u64, since: Moment) -> impl Iterator<Item = u64> {
        let writes = &self.blocks[block as usize];
        let first = writes.iter().rposition(|(moment, _)| *moment <= since).unwrap_or(0);
        writes[first..].iter().map(|(_, id)| *id)
    }
}

/// Writes per second that the limit allows.
pub(super) const WRITES_PER_S: u64 = 100;
const PERIOD: Duration = Duration::from_nanos(1_000_000_000 / WRITES_PER_S);
/// Writes that may begin at once.
pub(super) const BURST: Duration = Duration::from_millis(10);
/// COMPARE AND WRITE commands in flight: each was charged before it read.
const MAX_UNCHARGED: u32 = 12;
