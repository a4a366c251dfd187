//! Faults in the memory of RAM volumes before use, so that no serving core waits while the kernel
//! zeroes pages.
//!
//! [`populate_at_once`] works before the volume is used, in huge pages. The rest is left to
//! [`populate_in_background`]: in small pages, by threads of idle priority. A serving core may have
//! to wait until a page close to its own is populated, and zeroing a huge page takes milliseconds.
//! See decision 35.

use crate::sys;
use blockmux_volume::Pages;
use std::collections::VecDeque;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;
use std::time::Instant;
use tracing::debug;

/// Populates the first `len` bytes, at most until the time `end`, with one thread for each CPU, in
/// huge pages if `len` fills one; later faults use small pages. Returns the number of bytes
/// populated.
///
/// # Panics
/// If `pages` has fewer than `len` bytes.
pub fn populate_at_once(pages: &Pages, len: usize, end: Option<Instant>) -> usize {
    if len < CHUNK {
        pages.use_small_pages();
    }
    let next = AtomicUsize::new(0);
    let work = || {
        while end.is_none_or(|end| Instant::now() < end) {
            let offset = next.fetch_add(CHUNK, Ordering::Relaxed);
            if offset >= len {
                break;
            }
            pages.populate(offset, CHUNK.min(len - offset));
        }
    };
    let is_over = end.is_some_and(|end| Instant::now() >= end);
    // The calling thread is one of them: most volumes of a daemon with many need no other.
    let others = threads().min(len.div_ceil(CHUNK)).saturating_sub(1);
    thread::scope(|scope| {
        for _ in 0..if is_over { 0 } else { others } {
            let thread = thread::Builder::new().name("populate".to_owned());
            if let Err(error) = thread.spawn_scoped(scope, work) {
                debug!("cannot start a thread that populates memory: {error}");
            }
        }
        work();
    });
    pages.use_small_pages();
    next.into_inner().min(len)
}

/// Populates `from..to` in the background, after the ranges of earlier calls; ends early when the
/// pages are dropped. Each thread calls `on_start` first.
pub fn populate_in_background(pages: &Arc<Pages>, from: usize, to: usize, on_start: fn()) {
    if from >= to {
        return;
    }
    let mut queue = queue();
    queue.jobs.push_back(PopulateJob { pages: Arc::downgrade(pages), next: from, end: to });
    // Each job has a chunk at least.
    let chunks = queue.jobs.iter().take(threads()).map(|job| (job.end - job.next).div_ceil(CHUNK));
    let wanted = chunks.sum::<usize>().min(threads());
    while queue.threads < wanted {
        let thread = thread::Builder::new().name("populate".to_owned());
        match thread.spawn(move || run_background_thread(on_start)) {
            Ok(_) => queue.threads += 1,
            Err(error) => {
                debug!("cannot start a thread that populates memory: {error}");
                break;
            }
        }
    }
}

/// Bytes that are still to be populated in the background.
#[must_use]
pub fn pending_bytes() -> u64 {
    queue().jobs.iter().map(|job| (job.end - job.next) as u64).sum()
}

struct PopulateJob {
    pages: Weak<Pages>,
    next: usize,
    end: usize,
}

struct PopulateQueue {
    jobs: VecDeque<PopulateJob>,
    threads: usize,
}

fn queue() -> MutexGuard<'static, PopulateQueue> {
    QUEUE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn run_background_thread(on_start: fn()) {
    on_start();
    if let Err(error) = sys::use_idle_priority() {
        debug!("cannot lower the priority of a thread that populates memory: {error}");
    }
    while let Some((pages, offset, len)) = next_chunk() {
        pages.populate(offset, len);
    }
}

/// The next piece of work; if there is none, the calling thread must end.
fn next_chunk() -> Option<(Arc<Pages>, usize, usize)> {
    let mut queue = queue();
    while let Some(job) = queue.jobs.front_mut() {
        if let Some(pages) = job.pages.upgrade().filter(|_| job.next < job.end) {
            let offset = job.next;
            job.next = job.end.min(offset + CHUNK);
            return Some((pages, offset, job.next - offset));
        }
        queue.jobs.pop_front();
    }
    queue.threads -= 1;
    None
}

fn threads() -> usize {
    // Asking reads files of the control groups.
    static CPUS: OnceLock<usize> = OnceLock::new();
    *CPUS.get_or_init(|| thread::available_parallelism().map_or(1, NonZero::get).min(MAX_THREADS))
}

static QUEUE: Mutex<PopulateQueue> = Mutex::new(PopulateQueue { jobs: VecDeque::new(), threads: 0 });
/// Bytes populated at a time: one huge page.
const CHUNK: usize = 2 << 20;
/// Maximum number of threads; more would contend in the kernel's allocator.
const MAX_THREADS: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::memory::map_pages;
    use blockmux_volume::{Memory, Populated};

    const LEN: usize = 9 << 20;

    /// Resident bytes of the mapping that contains `address`.
    fn resident(address: usize) -> usize {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut is_here = false;
        for line in maps.lines() {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            let number = |text| usize::from_str_radix(text, 16).ok();
            if let Some((Some(start), Some(end))) = range.map(|(start, end)| (number(start), number(end))) {
                is_here = (start..end).contains(&address);
            } else if let Some(kib) = line.strip_prefix("Rss:").filter(|_| is_here) {
                return kib.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10;
            }
        }
        panic!("no mapping at {address:x}");
    }

    #[test]
    fn populating_makes_pages_resident_and_keeps_their_content() {
        let pages = map_pages(LEN).unwrap();
        let seg = Memory::from_pages(&pages).seg(0, LEN);
        pages.expect_populated(LEN);
        Memory::from_pages(&pages).seg(5000, 3).copy_from(b"abc");
        assert_eq!(populate_at_once(&pages, LEN, None), LEN);
        assert!(resident(seg.as_ptr() as usize) >= LEN);
        assert_eq!(pages.populated(), Some(Populated { bytes: LEN as u64, of: LEN as u64 }));
        assert_eq!(&seg.to_vec()[4999..5004], b"\0abc\0");
    }

    #[test]
    fn a_page_touched_before_it_is_populated_is_small() {
        let pages = map_pages(LEN).unwrap();
        assert_eq!(populate_at_once(&pages, LEN, Some(Instant::now())), 0);
        let first = Memory::from_pages(&pages).seg(4 << 20, 1);
        first.copy_from(b"a");
        assert!(resident(first.as_ptr() as usize) <= 256 << 10);
    }

    #[test]
    fn a_volume_smaller_than_a_huge_page_occupies_no_more_than_its_size() {
        let pages = map_pages(LEN).unwrap();
        assert_eq!(populate_at_once(&pages, 64 << 10, None), 64 << 10);
        let first = Memory::from_pages(&pages).seg(0, 1);
        assert!((64 << 10..=256 << 10).contains(&resident(first.as_ptr() as usize)));
    }

    #[test]
    fn populating_in_the_background_finishes_and_loses_no_write() {
        let pages = map_pages(LEN).unwrap();
        let seg = Memory::from_pages(&pages).seg(0, LEN);
        pages.expect_populated(LEN);
        pages.use_small_pages();
        populate_in_background(&pages, 0, LEN, || {});
        for at in (0..LEN).step_by(4096) {
            Memory::from_pages(&pages).seg(at, 1).copy_from(b"x");
        }
        while pages.populated().is_some_and(|now| now.bytes < now.of) {
            thread::yield_now();
        }
        assert!(
            seg.to_vec().chunks(4096).all(|page| page[0] == b'x' && page[1..].iter().all(|&byte| byte == 0))
        );
    }

    #[test]
    fn populating_stops_when_the_pages_are_dropped() {
        let pages = map_pages(1 << 30).unwrap();
        populate_in_background(&pages, 0, 1 << 30, || {});
        drop(pages);
        while pending_bytes() > 0 {
            thread::yield_now();
        }
    }
}
