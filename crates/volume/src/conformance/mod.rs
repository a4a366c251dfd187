//! The suite that every volume must pass.
//!
//! ```no_run
//! # use blockmux_volume::{MemVolume, conformance::{self, Harness}};
//! # use std::sync::Arc;
//! let volume = Arc::new(MemVolume::new(40 << 20));
//! conformance::run(&mut Harness::on_test_core(volume));
//! ```
//! A volume that needs its own kind of core brings that core, and a closure that runs its reactor:
//! [`Harness::new`]. The suite polls a channel only after a submission or a wake-up, so it finds a
//! volume that does not wake its user. It reports the failing case, the offset and the seed.

mod cases;
mod client;
mod clock;
mod random_io;
mod ranges;

pub use client::{Client, Failure};
pub use clock::TestCore;

use crate::random::{SplitMix, mix};
use crate::volume::{Core, Volume, VolumeInfo};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// A volume under test, and its core.
pub struct Harness<'a> {
    core: Rc<dyn Core>,
    volume: Arc<dyn Volume>,
    turn: CoreTurn<'a>,
    /// `false` for a volume that discards writes: contents are not compared then.
    pub keeps_data: bool,
    /// The volume's storage, opened read-only.
    pub read_only: Option<Arc<dyn Volume>>,
    /// Seed of all random sequences.
    pub seed: u64,
    /// Number of requests in the random test.
    pub random_ops: u32,
}

/// Runs the core once; `false` if nothing more will happen.
type CoreTurn<'a> = Rc<RefCell<dyn FnMut() -> bool + 'a>>;

impl<'a> Harness<'a> {
    /// A writable `volume` of at least [`MIN_SIZE`] bytes. The suite overwrites all of its
    /// content.
    ///
    /// `turn` runs the core's reactor once, without waiting for ever. It returns `false` if it
    /// knows that nothing more will happen.
    pub fn new(core: Rc<dyn Core>, volume: Arc<dyn Volume>, turn: impl FnMut() -> bool + 'a) -> Harness<'a> {
        Harness {
            core,
            volume,
            turn: Rc::new(RefCell::new(turn)),
            keeps_data: true,
            read_only: None,
            seed: 1,
            random_ops: 3000,
        }
    }

    /// A harness for a volume that needs only a clock.
    #[must_use]
    pub fn on_test_core(volume: Arc<dyn Volume>) -> Harness<'static> {
        let core = TestCore::new();
        Harness::new(core.as_core(), volume, move || core.jump())
    }

    /// The volume's properties.
    #[must_use]
    pub fn info(&self) -> VolumeInfo {
        self.volume.info()
    }

    /// Opens a channel to the volume, for a test outside the suite.
    ///
    /// # Errors
    /// If the volume does not open.
    pub fn client(&mut self, depth: u32) -> Result<Client<'a>, Failure> {
        Client::open(&self.core, &self.volume, depth, self.turn.clone())
    }

    fn read_only_client(&mut self) -> Result<Option<Client<'a>>, Failure> {
        let Some(volume) = &self.read_only else { return Ok(None) };
        Client::open(&self.core, volume, DEPTH, self.turn.clone()).map(Some)
    }

    /// Compares the content, unless the volume discards writes.
    fn expect_content(&self, client: &mut Client, offset: u64, expected: &[u8]) -> CaseResult {
        let found = client.read(offset, expected.len() as u64)?;
        self.compare(offset, &found, expected)
    }

    fn compare(&self, offset: u64, found: &[u8], expected: &[u8]) -> CaseResult {
        if found.len() != expected.len() {
            return fail!("read {} bytes at {offset}, not {}", found.len(), expected.len());
        }
        if !self.keeps_data || found == expected {
            return Ok(());
        }
        let at = found.iter().zip(expected).take_while(|(found, expected)| found == expected).count();
        let (found, expected) = (found[at], expected[at]);
        fail!("byte {} reads as {found:#04x}, not {expected:#04x}", offset + at as u64)
    }

    fn random(&self) -> SplitMix {
        SplitMix::new(mix(self.seed))
    }
}

/// Minimum size of a volume under test, in bytes. The largest transfers need
/// [`crate::MAX_TRANSFER`].
pub const MIN_SIZE: u64 = 4 << 20;

/// Runs all cases.
///
/// # Panics
/// If the volume fails a case; the message names it.
pub fn run(harness: &mut Harness) {
    let info = harness.info();
    assert!(info.size >= MIN_SIZE, "a volume under test has at least {MIN_SIZE} bytes: {info:?}");
    assert!(info.logical_block.is_power_of_two() && info.physical_block.is_power_of_two(), "{info:?}");
    assert!(info.logical_block <= info.physical_block && info.physical_block <= 64 << 10, "{info:?}");
    assert!(info.size.is_multiple_of(info.logical_block.into()), "{info:?}");
    for (name, case) in CASES {
        if let Err(Failure(what)) = case(harness) {
            panic!("conformance: {name} (seed {}): {what}; volume: {info:?}", harness.seed);
        }
    }
}

type CaseResult<T = ()> = Result<T, Failure>;
type ConformanceCase = fn(&mut Harness) -> CaseResult;

const CASES: &[(&str, ConformanceCase)] = &[
    ("written data reads back", cases::written_data_reads_back),
    ("scattered lists move every byte", cases::scattered_lists_move_every_byte),
    ("received memory can be written", cases::received_memory_can_be_written),
    ("borrowed memory outlives its channel", cases::borrowed_memory_outlives_its_channel),
    ("a full queue completes every tag once", cases::a_full_queue_completes_every_tag_once),
    ("invalid requests are refused and change nothing", cases::invalid_requests_are_refused),
    ("a read-only volume refuses writes", cases::a_read_only_volume_refuses_writes),
    ("stable writes and flushes complete", cases::stable_writes_and_flushes_complete),
    ("channels see each other's writes", cases::channels_see_each_others_writes),
    ("a cancelled request still completes once", cases::a_cancelled_request_completes_once),
    ("a channel dropped with I/O in flight does no harm", cases::a_dropped_channel_does_no_harm),
    ("zeroed ranges read as zeroes and their neighbours stay", ranges::zeroes_leave_neighbours_alone),
    ("discards leave neighbours alone", ranges::discards_leave_neighbours_alone),
    ("ranges larger than a transfer can be zeroed", ranges::large_ranges_can_be_zeroed),
    ("block status is correct", ranges::block_status_is_correct),
    ("a prefetch changes nothing", ranges::a_prefetch_changes_nothing),
    ("requests of no length complete", ranges::requests_of_no_length_complete),
    ("random I/O agrees with a model", random_io::agrees_with_a_model),
];

/// Requests in flight in cases that need a queue.
const DEPTH: u32 = 64;

/// Bytes that differ with each offset and each `salt`, so that misplaced and outdated data is
/// detected.
fn pattern(offset: u64, len: u64, salt: u64) -> Vec<u8> {
    let first = offset / 8 * 8;
    let mut bytes = vec![0; (offset + len).next_multiple_of(8).saturating_sub(first) as usize];
    let salt = mix(salt);
    for (word, place) in (offset / 8..).zip(bytes.chunks_exact_mut(8)) {
        place.copy_from_slice(&mix(word ^ salt).to_le_bytes());
    }
    bytes.drain(..(offset - first) as usize);
    bytes.truncate(len as usize);
    bytes
}

macro_rules! fail {
    ($($what:tt)*) => { Err($crate::conformance::Failure(format!($($what)*))) };
}
use fail;

#[cfg(test)]
mod tests;
