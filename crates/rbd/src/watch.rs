//! Notifications about an object: every client that watches it gets what any client sends.
//!
//! ```text
//!   notify ──▶ the object's storage daemon ──▶ each watcher: on_notified, acknowledges ──┐
//!      ▲                                                                                 │
//!      └── `done`, when all watchers have acknowledged, or after the timeout ◀───────────┘
//! ```
//! Notifications have no history: what is sent while a watch is interrupted is lost, and
//! [`WatchEvent::Interrupted`] says so afterwards. A watch may also end without a word.
//!
//! Threads of librados call back, in order. Callbacks must neither block, nor call librados, nor
//! drop the last reference to a connection. One that panics ends the process.
#![expect(unsafe_code, reason = "calls a library in C, which calls back")]

use crate::error::{Errno, RbdError};
use crate::library::rados_completion_t;
use crate::object::PoolObject;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::slice;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What a watcher is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchEvent<'a> {
    /// A client has sent this, perhaps this one.
    Notified(&'a [u8]),
    /// Notifications may have been lost, and this watch gets no more of them.
    Interrupted(Errno),
}

/// What is called with each event.
pub type OnWatchEvent = Box<dyn Fn(WatchEvent<'_>) + Send + Sync>;

/// A watch of an object. Dropping it waits for the cluster, and for callbacks that have begun.
pub struct Watch {
    cookie: u64,
    /// What librados has the address of.
    argument: Box<WatchArgument>,
}

struct WatchArgument {
    object: Arc<PoolObject>,
    call: OnWatchEvent,
}

impl Watch {
    /// Watches an object that exists. Blocks for as long as the cluster does not answer.
    ///
    /// # Errors
    /// If the cluster refuses it, or there is no object.
    pub fn start(object: &Arc<PoolObject>, call: OnWatchEvent) -> Result<Watch, RbdError> {
        let (rados, pool) = (object.pool.rados(), object.pool.handle());
        let argument = Box::new(WatchArgument { object: object.clone(), call });
        let (mut cookie, address) = (0, (&raw const *argument).cast_mut().cast());
        let seconds = u32::try_from(WATCH_TIMEOUT.as_secs()).unwrap_or(u32::MAX);
        // SAFETY: the pool is open; a text and a place. The callbacks get an argument that lives
        // until no call of them begins or goes on.
        let watched = unsafe {
            (rados.rados_watch3)(
                pool,
                object.name.as_ptr(),
                &raw mut cookie,
                on_notified,
                on_interrupted,
                seconds,
                address,
            )
        };
        RbdError::check("rados_watch3", watched)?;
        Ok(Watch { cookie, argument })
    }

    /// Whether the cluster has confirmed the watch lately, as far as this process knows. Does not
    /// block.
    ///
    /// # Errors
    /// If notifications may have been lost.
    pub fn check(&self) -> Result<(), RbdError> {
        let pool = &self.argument.object.pool;
        // SAFETY: the pool is open, and the watch has not ended.
        let checked = unsafe { (pool.rados().rados_watch_check)(pool.handle(), self.cookie) };
        RbdError::check("rados_watch_check", checked).map(drop)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let pool = &self.argument.object.pool;
        // SAFETY: the watch has not ended, and the pool and the cluster are open. Also if the
        // cluster refuses it, no call begins after that, and none goes on after the second.
        unsafe {
            (pool.rados().rados_unwatch2)(pool.handle(), self.cookie);
            (pool.rados().rados_watch_flush)(pool.cluster().handle);
        }
    }
}

unsafe extern "C" fn on_notified(
    argument: *mut c_void,
    notification: u64,
    cookie: u64,
    _sender: u64,
    data: *mut c_void,
    len: usize,
) {
    // SAFETY: the argument of a watch, which lives until the last call has ended.
    let argument = unsafe { &*argument.cast::<WatchArgument>() };
    let (object, none) = (&argument.object, ptr::null());
    // SAFETY: the pool is open; a text, and no content. It sends a message without waiting.
    unsafe {
        (object.pool.rados().rados_notify_ack)(
            object.pool.handle(),
            object.name.as_ptr(),
            notification,
            cookie,
            none,
            0,
        );
    }
    let content = match data.is_null() {
        true => &[][..],
        // SAFETY: librados gives so many bytes for the time of the call.
        false => unsafe { slice::from_raw_parts(data.cast::<u8>(), len) },
    };
    (argument.call)(WatchEvent::Notified(content));
}

unsafe extern "C" fn on_interrupted(argument: *mut c_void, _cookie: u64, error: c_int) {
    // SAFETY: the argument of a watch, which lives until the last call has ended.
    let argument = unsafe { &*argument.cast::<WatchArgument>() };
    (argument.call)(WatchEvent::Interrupted(Errno(error.saturating_abs())));
}

/// Sends notifications about an object, and knows how many are not acknowledged yet. Dropping it
/// waits until all are, or have failed, because librados uses the pool until then.
pub struct Notifier {
    object: Arc<PoolObject>,
    in_flight: Arc<InFlightNotifications>,
}

#[derive(Default)]
struct InFlightNotifications {
    count: Mutex<usize>,
    fewer: Condvar,
}

impl InFlightNotifications {
    fn count(&self) -> MutexGuard<'_, usize> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remove(&self) {
        *self.count() -= 1;
        self.fewer.notify_all();
    }
}

/// Called when all watchers have acknowledged a notification, or with the reason why not.
pub type OnAcknowledged = Box<dyn FnOnce(Result<(), Errno>) + Send>;

/// A notification that is not acknowledged yet.
struct SentNotification {
    in_flight: Arc<InFlightNotifications>,
    object: Arc<PoolObject>,
    done: OnAcknowledged,
}

impl Notifier {
    /// For notifications about an object.
    #[must_use]
    pub fn new(object: &Arc<PoolObject>) -> Notifier {
        Notifier { object: object.clone(), in_flight: Arc::default() }
    }

    /// Sends `content` to all watchers of the object, which acknowledge it within
    /// [`NOTIFY_TIMEOUT`] or are not waited for. Does not block. Returns whether it was sent:
    /// not if [`MAX_NOTIFICATIONS`] are not acknowledged, or librados refuses it.
    pub fn notify(&self, content: &[u8], done: OnAcknowledged) -> bool {
        let (rados, pool) = (self.object.pool.rados(), self.object.pool.handle());
        let Ok(len) = c_int::try_from(content.len()) else { return false };
        {
            let mut count = self.in_flight.count();
            if *count >= MAX_NOTIFICATIONS {
                return false;
            }
            *count += 1;
        }
        let sent = SentNotification { in_flight: self.in_flight.clone(), object: self.object.clone(), done };
        let sent = Box::into_raw(Box::new(sent));
        let mut completion = ptr::null_mut();
        // SAFETY: the callback takes the box. A place for the completion.
        let made = unsafe {
            (rados.rados_aio_create_completion2)(sent.cast(), on_acknowledged, &raw mut completion)
        };
        if made < 0 {
            // SAFETY: it was a box, and librados has not taken it.
            return unsafe { give_up(sent) };
        }
        let timeout_ms = u64::try_from(NOTIFY_TIMEOUT.as_millis()).unwrap_or(u64::MAX);
        // SAFETY: the pool is open until all have completed; a text, bytes that are copied, and no
        // place for replies. librados calls back if, and only if, the call succeeds.
        let taken = unsafe {
            (rados.rados_aio_notify)(
                pool,
                self.object.name.as_ptr(),
                completion,
                content.as_ptr().cast(),
                len,
                timeout_ms,
                ptr::null_mut(),
                ptr::null_mut(),
            )
        };
        if taken < 0 {
            // SAFETY: it was created, and librados does not have it. The box: as above.
            return unsafe {
                (rados.rados_aio_release)(completion);
                give_up(sent)
            };
        }
        true
    }
}

/// # Safety
/// It was a box, and nobody else has it.
unsafe fn give_up(sent: *mut SentNotification) -> bool {
    // SAFETY: as the caller promised.
    let sent = unsafe { Box::from_raw(sent) };
    sent.in_flight.remove();
    false
}

impl Drop for Notifier {
    fn drop(&mut self) {
        let (mut count, fewer) = (self.in_flight.count(), &self.in_flight.fewer);
        while *count > 0 {
            count = fewer.wait(count).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

unsafe extern "C" fn on_acknowledged(completion: rados_completion_t, argument: *mut c_void) {
    // SAFETY: it was a box, and librados calls back once.
    let sent = unsafe { Box::from_raw(argument.cast::<SentNotification>()) };
    let SentNotification { in_flight, object, done } = *sent;
    let rados = object.pool.rados();
    // SAFETY: the completion has its result, and is not used after this.
    let result = unsafe {
        let result = (rados.rados_aio_get_return_value)(completion);
        (rados.rados_aio_release)(completion);
        result
    };
    done(Errno::check(result).map(drop));
    // The notifier, which waits for this, has a reference, too: this is not the last one.
    drop(object);
    in_flight.remove();
}

/// Time after which the cluster forgets a watcher that it does not hear of.
const WATCH_TIMEOUT: Duration = Duration::from_secs(30);
/// Time for watchers to acknowledge a notification; whole seconds.
pub const NOTIFY_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum number of notifications of a notifier that are not acknowledged.
pub const MAX_NOTIFICATIONS: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Cluster;
    use crate::fake_cluster::{FakeCluster, POOL};
    use crate::pool::Pool;
    use std::sync::mpsc::{self, Receiver};

    fn object(cluster: &Arc<Cluster>) -> Arc<PoolObject> {
        Arc::new(PoolObject::new(Pool::open(cluster, POOL, None).unwrap(), "table").unwrap())
    }

    type Told = Receiver<Result<Vec<u8>, Errno>>;

    /// A client with its address, the object, and a watch of it with what that was told.
    fn watcher(fake: &FakeCluster) -> (String, Arc<PoolObject>, Watch, Told) {
        let cluster = Arc::new(fake.connect());
        let object = object(&cluster);
        object.create().unwrap();
        let (sender, told) = mpsc::channel();
        let call = move |event: WatchEvent<'_>| {
            let event = match event {
                WatchEvent::Notified(content) => Ok(content.to_vec()),
                WatchEvent::Interrupted(error) => Err(error),
            };
            sender.send(event).unwrap();
        };
        let watch = Watch::start(&object, Box::new(call)).unwrap();
        (cluster.client_address().unwrap(), object, watch, told)
    }

    /// What has become of a notification.
    fn notified(notifier: &Notifier, content: &[u8]) -> Result<(), Errno> {
        let (sender, done) = mpsc::channel();
        assert!(notifier.notify(content, Box::new(move |result| sender.send(result).unwrap())));
        done.recv().unwrap()
    }

    #[test]
    fn every_watcher_is_notified_and_one_that_does_not_hear_it_is_not_waited_for() {
        let fake = FakeCluster::default();
        let [(_, object, _watch, first), (other, _, watch, second)] = [(); 2].map(|()| watcher(&fake));
        let notifier = Notifier::new(&object);
        assert_eq!(notified(&notifier, b"one"), Ok(()));
        fake.cut(&other, true);
        assert_eq!(notified(&notifier, b"two"), Err(Errno(libc::ETIMEDOUT)));
        fake.cut(&other, false);
        drop(watch);
        assert_eq!(notified(&notifier, b""), Ok(()));
        let all = |told: Receiver<_>| told.try_iter().map(Result::unwrap).collect::<Vec<Vec<u8>>>();
        assert_eq!(all(first), [&b"one"[..], b"two", b""]);
        assert_eq!(all(second), [b"one"]);
    }

    #[test]
    fn a_watch_that_is_interrupted_says_so_and_an_object_that_does_not_exist_has_none() {
        let fake = FakeCluster::default();
        let (own, object, watch, told) = watcher(&fake);
        assert!(watch.check().is_ok());
        fake.interrupt(&own);
        assert_eq!(told.try_recv(), Ok(Err(Errno(libc::ENOTCONN))));
        assert!(watch.check().is_err());
        fake.set_content("table", None);
        let refused = Watch::start(&object, Box::new(|_| {}));
        assert!(matches!(refused, Err(RbdError::Call { error: Errno(libc::ENOENT), .. })));
    }

    #[test]
    fn a_client_that_is_fenced_is_refused() {
        let fake = FakeCluster::default();
        let (own, object, watch, told) = watcher(&fake);
        let other = fake.connect();
        other.fence(&own).unwrap();
        let notifier = Notifier::new(&object);
        assert_eq!(notified(&notifier, b"late"), Err(Errno(libc::ESHUTDOWN)));
        for refused in [object.read(1).err(), object.replace(b"", b"late").err(), object.create().err()] {
            let Some(RbdError::Call { error, .. }) = refused else { panic!("it is not refused") };
            assert_eq!(error, Errno(libc::ESHUTDOWN));
        }
        drop(watch);
        assert!(told.try_recv().is_err() && fake.watches() == 0 && fake.content("table").is_empty());
    }
}
