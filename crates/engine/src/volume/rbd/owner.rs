//! Owning an image: one client has its exclusive lock, and all others are refused.

use super::volume::{RbdVolume, note_blocklisted};
use blockmux_rbd::error::RbdError;
use blockmux_rbd::image::Image;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;
use tracing::warn;

impl RbdVolume {
    /// Owns the image until it is closed. With `take`, the client that owns it is blocklisted
    /// first; otherwise one that does not answer is waited for, until the cluster has lost it.
    /// `on_start` is called by the thread that asks for the lock.
    ///
    /// # Errors
    /// If another client owns the image, or the image has no lock.
    pub fn own(&self, take: bool, on_start: fn()) -> Result<(), RbdError> {
        let image = self.image().clone();
        let waits = Arc::new(());
        let caller = Arc::downgrade(&waits);
        within_limit(move || {
            on_start();
            acquire(&image, take, || caller.strong_count() > 0)
        })
        .inspect_err(|error| note_blocklisted(self.image().cluster(), error))
    }
}

/// `is_awaited`: whether the caller still waits. A call that hung may go on when another host owns
/// the image, which must not be shut out then.
fn acquire(image: &Image, take: bool, is_awaited: impl Fn() -> bool) -> Result<(), RbdError> {
    let check = || if is_awaited() { Ok(()) } else { Err(RbdError::NoAnswer(LIMIT)) };
    let owner = if take { image.lock_owner()? } else { None };
    check()?;
    // Another image of this connection may still be closing: blocklisting that would end all.
    if let Some(owner) = owner.filter(|owner| !image.cluster().is_owner(owner)) {
        warn!("the image's lock is taken from {owner}: the cluster refuses all of its requests");
        image.break_lock(&owner)?;
    }
    check()?;
    image.acquire_lock()
}

/// Makes a call that may block for ever on a thread. After the limit nobody receives what it
/// returns, which is dropped then.
pub(super) fn within_limit<T: Send + 'static>(
    call: impl FnOnce() -> Result<T, RbdError> + Send + 'static,
) -> Result<T, RbdError> {
    let (sender, result) = mpsc::channel();
    let no_answer = || RbdError::NoAnswer(LIMIT);
    let run = move || drop(sender.send(call()));
    thread::Builder::new().name("rbd call".to_owned()).spawn(run).map_err(|_| no_answer())?;
    result.recv_timeout(LIMIT).unwrap_or_else(|_| Err(no_answer()))
}

/// The cluster loses a killed client, which may have the lock, after half a minute.
const LIMIT: Duration = Duration::from_secs(90);
