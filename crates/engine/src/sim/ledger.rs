//! Tracks what every block may contain after the writes that were acknowledged.
//!
//! A block's content is named by its *value*: zeroes are value 0, and [`content`] makes
//! recognizable bytes of any other. At most one write is in flight for a block at a time, so after
//! an acknowledged write the block holds exactly its value; a write that failed may have been done
//! or not.
//!
//! A crash may undo writes acknowledged since the last flush or FUA. A write in flight at a crash
//! may be acknowledged later by a target that has lost it, so either content is then possible,
//! unless it was FUA.

use blockmux_volume::random::mix;

/// Bytes in a block.
pub const BLOCK: usize = 512;

/// What every block of a volume may hold.
pub struct Ledger {
    blocks: Vec<Block>,
    /// Faults found, the first one first.
    faults: Vec<String>,
    /// Number of crashes.
    epoch: u32,
    /// Number of acknowledgements.
    serial: u64,
    stale_writes: u64,
}

/// One block.
struct Block {
    /// Values that a read may return, apart from a write in flight.
    current: Vec<u64>,
    in_flight: Option<u64>,
    /// Stale writes done while a write was in flight, so perhaps after it.
    stale: Vec<u64>,
    /// Values that stable storage may have held at `floor_serial`.
    floor: Vec<u64>,
    floor_serial: u64,
    /// Values that the block may have held since `floor_serial`, with the serial of each.
    since: Vec<(u64, u64)>,
}

/// A write or a flush in flight.
pub(super) struct Started {
    epoch: u32,
    serial: u64,
}

/// The writes that a flush covers: those acknowledged when it was submitted.
pub(super) struct Covered {
    started: Started,
    values: Vec<Vec<u64>>,
}

/// Result of a write.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum WriteResult {
    Done {
        fua: bool,
    },
    /// The block may also be unchanged.
    DoneOrNot,
}

impl Ledger {
    /// A volume of zeroes.
    #[must_use]
    pub fn new(blocks: u64) -> Ledger {
        let block = || Block {
            current: vec![0],
            in_flight: None,
            stale: Vec::new(),
            floor: vec![0],
            floor_serial: 0,
            since: Vec::new(),
        };
        Ledger {
            blocks: (0..blocks).map(|_| block()).collect(),
            faults: Vec::new(),
            epoch: 0,
            serial: 0,
            stale_writes: 0,
        }
    }

    /// Number of blocks.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Whether there are no blocks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Records a fault.
    pub fn fault(&mut self, what: String) {
        self.faults.push(what);
    }

    /// The first fault.
    #[must_use]
    pub fn first_fault(&self) -> Option<&str> {
        self.faults.first().map(String::as_str)
    }

    /// Number of writes that were executed again after they were acknowledged: the target of a lost
    /// connection still had them queued when they were replayed on the next connection.
    #[must_use]
    pub fn stale_writes(&self) -> u64 {
        self.stale_writes
    }

    /// The volume has done a write to `block`.
    pub fn on_executed(&mut self, block: u64, bytes: &[u8]) {
        let value = value_of(block, bytes);
        let Some(value) = value else {
            return self.fault(format!("block {block} was written with bytes that nobody sent"));
        };
        let block = &mut self.blocks[block as usize];
        if block.in_flight != Some(value) {
            self.stale_writes += 1;
            self.serial += 1;
            block.may_hold(value, self.serial);
            if block.in_flight.is_some() {
                block.stale.push(value);
            }
        }
    }

    /// The target has crashed.
    pub fn on_crash(&mut self) {
        self.epoch += 1;
        for block in &mut self.blocks {
            let since = block.since.iter().map(|(_, value)| *value);
            block.current = block.floor.iter().copied().chain(since).collect();
        }
    }

    /// Checks bytes that were read while nothing was written there.
    pub fn check(&mut self, who: &str, block: u64, bytes: &[u8]) {
        let value = value_of(block, bytes);
        let possible = &self.blocks[block as usize];
        let held = possible.current.iter().copied().chain(possible.in_flight);
        if !value.is_some_and(|value| held.clone().any(|held| held == value)) {
            let held: Vec<u64> = held.collect();
            self.fault(format!("{who}: block {block} holds {value:?}, expected one of {held:?}"));
        }
    }

    /// Whether the block may be zeroes.
    pub(super) fn may_be_zero(&self, block: u64) -> bool {
        self.blocks[block as usize].current.contains(&0)
    }

    pub(super) fn start(&self) -> Started {
        Started { epoch: self.epoch, serial: self.serial }
    }

    /// A write of `value` is submitted.
    pub(super) fn on_write(&mut self, block: u64, value: u64) {
        self.blocks[block as usize].in_flight = Some(value);
    }

    /// The write has completed.
    pub(super) fn on_written(&mut self, block: u64, started: &Started, ended: WriteResult) {
        self.serial += 1;
        let (serial, crashed) = (self.serial, started.epoch != self.epoch);
        let block = &mut self.blocks[block as usize];
        let Some(value) = block.in_flight.take() else { return };
        match ended {
            WriteResult::Done { fua: true } => {
                block.current = vec![value];
                (block.floor, block.floor_serial) = (vec![value], serial);
                block.since.clear();
            }
            WriteResult::Done { fua: false } if !crashed => {
                block.current.clear();
                block.may_hold(value, serial);
            }
            WriteResult::Done { .. } | WriteResult::DoneOrNot => block.may_hold(value, serial),
        }
        for value in std::mem::take(&mut block.stale) {
            block.may_hold(value, serial);
        }
    }

    /// A flush is submitted.
    pub(super) fn on_flush(&mut self) -> Covered {
        let values = self.blocks.iter().map(|block| block.current.clone()).collect();
        Covered { started: self.start(), values }
    }

    /// The flush has completed. A flush in flight at a crash may be done by a target that had
    /// already lost what it covers, so it then guarantees nothing.
    pub(super) fn on_flushed(&mut self, covered: Covered) {
        let Started { epoch, serial } = covered.started;
        if epoch != self.epoch {
            return;
        }
        for (block, values) in self.blocks.iter_mut().zip(covered.values) {
            if block.floor_serial <= serial {
                (block.floor, block.floor_serial) = (values, serial);
                block.since.retain(|(when, _)| *when > serial);
            }
        }
    }
}

impl Block {
    fn may_hold(&mut self, value: u64, serial: u64) {
        if !self.current.contains(&value) {
            self.current.push(value);
        }
        self.since.push((serial, value));
    }
}

/// The bytes of a block with that value.
pub(super) fn content(block: u64, value: u64) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK];
    if value != 0 {
        let mut word = value;
        for at in bytes.as_chunks_mut().0 {
            *at = word.to_le_bytes();
            word = mix(word.wrapping_add(block + 1));
        }
    }
    bytes
}

/// The value of a block's bytes, if they are consistent.
fn value_of(block: u64, bytes: &[u8]) -> Option<u64> {
    let value = u64::from_le_bytes(*bytes.first_chunk()?);
    (content(block, value) == bytes).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(ledger: &mut Ledger, value: u64, ended: WriteResult) {
        let started = ledger.start();
        ledger.on_write(0, value);
        ledger.on_written(0, &started, ended);
    }

    fn may_hold(ledger: &mut Ledger, value: u64) -> bool {
        let before = ledger.faults.len();
        ledger.check("test", 0, &content(0, value));
        ledger.faults.len() == before
    }

    const DONE: WriteResult = WriteResult::Done { fua: false };
    const FORCED: WriteResult = WriteResult::Done { fua: true };

    #[test]
    fn an_acknowledged_write_leaves_one_value() {
        let mut ledger = Ledger::new(1);
        write(&mut ledger, 1, DONE);
        assert!(may_hold(&mut ledger, 1) && !may_hold(&mut ledger, 0));
        write(&mut ledger, 2, WriteResult::DoneOrNot);
        assert!(may_hold(&mut ledger, 1) && may_hold(&mut ledger, 2));
    }

    #[test]
    fn a_crash_may_undo_unflushed_writes() {
        let mut ledger = Ledger::new(1);
        write(&mut ledger, 1, FORCED);
        write(&mut ledger, 2, DONE);
        let flush = ledger.on_flush();
        write(&mut ledger, 3, DONE);
        ledger.on_flushed(flush);
        ledger.on_crash();
        let held: Vec<_> = (0..4).filter(|&value| may_hold(&mut ledger, value)).collect();
        assert_eq!(held, [2, 3]);
    }

    #[test]
    fn a_flush_in_flight_at_a_crash_covers_nothing() {
        let mut ledger = Ledger::new(1);
        write(&mut ledger, 1, DONE);
        let flush = ledger.on_flush();
        ledger.on_crash();
        ledger.on_flushed(flush);
        ledger.on_crash();
        assert!(may_hold(&mut ledger, 0) && may_hold(&mut ledger, 1));
    }

    #[test]
    fn a_write_that_is_done_after_its_acknowledgement_is_stale() {
        let mut ledger = Ledger::new(1);
        write(&mut ledger, 1, DONE);
        write(&mut ledger, 2, DONE);
        ledger.on_executed(0, &content(0, 1));
        assert_eq!(ledger.stale_writes(), 1);
        assert!(may_hold(&mut ledger, 1));
    }

    #[test]
    fn torn_and_misplaced_blocks_are_found() {
        let mut ledger = Ledger::new(2);
        write(&mut ledger, 9, DONE);
        let mut torn = content(0, 9);
        torn[500] ^= 1;
        ledger.check("test", 0, &torn);
        ledger.check("test", 0, &content(1, 9));
        assert_eq!(ledger.faults.len(), 2);
    }
}
