//! Seeds of sessions: random and unique, without a system call for each.

use crate::sys;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

/// Source of the seeds of one volume's sessions. Sessions hash them.
pub(crate) struct Seeds {
    key: [u8; LEN],
    taken: AtomicU64,
}

impl Seeds {
    /// Seeds with a random key.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub(crate) fn new() -> io::Result<Seeds> {
        Ok(Seeds { key: sys::random_bytes()?, taken: AtomicU64::new(0) })
    }

    /// The next unused seed.
    pub(crate) fn next(&self) -> [u8; LEN] {
        let count = self.taken.fetch_add(1, Ordering::Relaxed).to_be_bytes();
        let mut seed = self.key;
        seed.iter_mut().zip(count).for_each(|(byte, add)| *byte ^= add);
        seed
    }
}

const LEN: usize = 32;
