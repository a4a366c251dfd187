//! Secrets of an initiator that may be replaced while its volume is open.
//!
//! Every connection authenticates with the secrets that were read last. They are read again when a
//! target refuses them: a user replaces a secret at both ends, one after the other, and
//! until then the link tries again. A helper thread reads, because a file may be on a file system
//! that does not answer.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Secrets, and how they are read again.
pub struct CurrentSecrets<T> {
    known: Mutex<Arc<T>>,
    read: Box<dyn Fn() -> Option<T> + Send + Sync>,
    is_reading: AtomicBool,
}

impl<T: Send + Sync + 'static> CurrentSecrets<T> {
    /// Secrets that `read` reads again. It returns `None` if they cannot be read or are invalid;
    /// then the previous ones stay.
    pub fn new(known: T, read: impl Fn() -> Option<T> + Send + Sync + 'static) -> Arc<CurrentSecrets<T>> {
        let (known, read) = (Mutex::new(Arc::new(known)), Box::new(read));
        Arc::new(CurrentSecrets { known, read, is_reading: AtomicBool::new(false) })
    }

    /// Secrets that never change.
    pub fn fixed(known: T) -> Arc<CurrentSecrets<T>> {
        CurrentSecrets::new(known, || None)
    }

    /// The secrets that were read last.
    pub fn get(&self) -> Arc<T> {
        self.lock().clone()
    }

    /// Reads the secrets again on another thread, unless one reads them already.
    pub(crate) fn read_again(self: &Arc<CurrentSecrets<T>>) {
        if self.is_reading.swap(true, Ordering::AcqRel) {
            return;
        }
        let own = self.clone();
        let read = move || {
            if let Some(secrets) = (own.read)() {
                *own.lock() = Arc::new(secrets);
            }
            own.is_reading.store(false, Ordering::Release);
        };
        if thread::Builder::new().name("secrets".to_owned()).spawn(read).is_err() {
            self.is_reading.store(false, Ordering::Release);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Arc<T>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> fmt::Debug for CurrentSecrets<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CurrentSecrets")
    }
}
