//! A cluster in the memory of this process, for tests without one: functions in the place of
//! librados's, with objects, watchers, notifications, clients that are refused, and clients whose
//! calls do not return. It has no images.
#![expect(unsafe_code, reason = "stands in for a library in C, which uses memory by address")]

use crate::cluster::Cluster;
use crate::library::{
    LIBRADOS_CREATE_EXCLUSIVE, Library, RadosFunctions, RbdFunctions, rados_callback_t, rados_completion_t,
    rados_ioctx_t, rados_t, rados_watchcb2_t, rados_watcherrcb_t, rados_write_op_t,
};
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::NonNull;
use std::slice;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

/// A cluster, and what a test does to its clients.
#[derive(Clone, Default)]
pub struct FakeCluster(Arc<SharedCluster>);

#[derive(Default)]
struct SharedCluster {
    state: Mutex<ClusterState>,
    /// Clients hang no longer.
    freed: Condvar,
    /// Held while watchers are called.
    callbacks: Mutex<()>,
}

#[derive(Default)]
struct ClusterState {
    objects: BTreeMap<String, Vec<u8>>,
    watchers: BTreeMap<u64, FakeWatcher>,
    clients: u64,
    last_number: u64,
    refused: BTreeSet<String>,
    hung: BTreeSet<String>,
    /// They send and receive no notifications.
    cut: BTreeSet<String>,
    /// Notifications that were acknowledged, with the watcher's number.
    acknowledged: BTreeSet<(u64, u64)>,
}

#[derive(Clone)]
struct FakeWatcher {
    object: String,
    client: String,
    notified: rados_watchcb2_t,
    interrupted: rados_watcherrcb_t,
    argument: *mut c_void,
}
// SAFETY: its address is given to callbacks only, which may be called anywhere.
unsafe impl Send for FakeWatcher {}

/// What is behind the handles of a connection and of its pools.
struct FakeClient {
    cluster: Arc<SharedCluster>,
    address: String,
}

enum FakeStep {
    Create { is_exclusive: bool },
    AssertExists,
    Compare(Vec<u8>),
    WriteFull(Vec<u8>),
}

struct FakeNotified {
    call: rados_callback_t,
    argument: *mut c_void,
    result: c_int,
}

impl FakeCluster {
    /// A new client.
    #[must_use]
    pub fn connect(&self) -> Cluster {
        let mut state = self.0.state();
        state.clients += 1;
        let address = format!("192.0.2.1:0/{}", state.clients);
        let client = Arc::new(FakeClient { cluster: self.0.clone(), address });
        Cluster::of_client(library(), Arc::into_raw(client).cast_mut().cast())
    }

    /// The clients that are refused.
    #[must_use]
    pub fn refused(&self) -> Vec<String> {
        self.0.state().refused.iter().cloned().collect()
    }

    /// Calls of this client do not return from now on, or no longer.
    pub fn hang(&self, client: &str, hangs: bool) {
        change(&mut self.0.state().hung, client, hangs);
        self.0.freed.notify_all();
    }

    /// This client is told of no notifications, and those that it sends are lost, from now on, or
    /// no longer.
    pub fn cut(&self, client: &str, is_cut: bool) {
        change(&mut self.0.state().cut, client, is_cut);
    }

    /// All watches of this client are interrupted, and it is told so.
    pub fn interrupt(&self, client: &str) {
        let _calling = self.0.callbacks.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.0.state();
        let all = std::mem::take(&mut state.watchers);
        let (gone, kept): (BTreeMap<_, _>, _) =
            all.into_iter().partition(|(_, watcher)| watcher.client == client);
        state.watchers = kept;
        drop(state);
        for (cookie, watcher) in gone {
            // SAFETY: the argument of the watch, which has not ended: its end waits for callbacks.
            unsafe { (watcher.interrupted)(watcher.argument, cookie, -libc::ENOTCONN) };
        }
    }

    /// The content of an object; empty if there is none.
    #[must_use]
    pub fn content(&self, object: &str) -> Vec<u8> {
        self.0.state().objects.get(object).cloned().unwrap_or_default()
    }

    /// Removes an object, or gives it other content.
    pub fn set_content(&self, object: &str, content: Option<&[u8]>) {
        let mut state = self.0.state();
        match content {
            Some(content) => state.objects.insert(object.to_owned(), content.to_vec()),
            None => state.objects.remove(object),
        };
    }

    /// The number of watches.
    #[must_use]
    pub fn watches(&self) -> usize {
        self.0.state().watchers.len()
    }
}

fn change(set: &mut BTreeSet<String>, client: &str, is_in: bool) {
    if is_in {
        set.insert(client.to_owned());
    } else {
        set.remove(client);
    }
}

impl SharedCluster {
    fn state(&self) -> MutexGuard<'_, ClusterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state, once the client does not hang; an error number if the cluster refuses it.
    fn call(&self, client: &str) -> Result<MutexGuard<'_, ClusterState>, c_int> {
        let is_hung = |state: &mut ClusterState| state.hung.contains(client);
        let state = self.freed.wait_while(self.state(), is_hung).unwrap_or_else(PoisonError::into_inner);
        if state.refused.contains(client) { Err(libc::ESHUTDOWN) } else { Ok(state) }
    }

    /// Calls the watchers of an object, and returns whether all have acknowledged it.
    fn notify(&self, object: &str, content: &[u8]) -> bool {
        let _calling = self.callbacks.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.state();
        state.last_number += 1;
        let number = state.last_number;
        let is_watching = |watcher: &FakeWatcher| watcher.object == object;
        let watchers: Vec<(u64, FakeWatcher)> = state
            .watchers
            .iter()
            .filter(|(_, watcher)| is_watching(watcher) && !state.refused.contains(&watcher.client))
            .map(|(cookie, watcher)| (*cookie, watcher.clone()))
            .collect();
        let cut = state.cut.clone();
        drop(state);
        for (cookie, watcher) in watchers.iter().filter(|(_, watcher)| !cut.contains(&watcher.client)) {
            let (data, len) = (content.as_ptr().cast_mut().cast(), content.len());
            // SAFETY: the argument of the watch, which has not ended: its end waits for callbacks.
            unsafe { (watcher.notified)(watcher.argument, number, *cookie, 0, data, len) };
        }
        let mut state = self.state();
        let is_acknowledged =
            watchers.iter().all(|(cookie, _)| state.acknowledged.contains(&(number, *cookie)));
        state.acknowledged.retain(|(of, _)| *of != number);
        is_acknowledged
    }
}

impl ClusterState {
    fn operate(&mut self, object: &str, steps: &[FakeStep]) -> c_int {
        let mut content = self.objects.get(object).cloned();
        for step in steps {
            match step {
                FakeStep::Create { is_exclusive: true } if content.is_some() => return -libc::EEXIST,
                FakeStep::Create { .. } => content = Some(content.unwrap_or_default()),
                FakeStep::AssertExists if content.is_none() => return -libc::ENOENT,
                FakeStep::AssertExists => {}
                FakeStep::Compare(expected) => {
                    let found = content.iter().flatten().copied().chain(std::iter::repeat(0));
                    if let Some(at) = expected.iter().zip(found).position(|(byte, found)| *byte != found) {
                        return -4095 - at as c_int;
                    }
                }
                FakeStep::WriteFull(new) => content = Some(new.clone()),
            }
        }
        self.objects.extend(content.map(|content| (object.to_owned(), content)));
        0
    }
}

/// # Safety
/// It is a handle of a connection or a pool that is open.
unsafe fn client<'a>(handle: *mut c_void) -> &'a FakeClient {
    // SAFETY: as the caller promised; such handles are made of an `Arc`.
    unsafe { &*handle.cast::<FakeClient>() }
}

/// # Safety
/// It is a text.
unsafe fn text_of(text: *const c_char) -> String {
    // SAFETY: as the caller promised.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// # Safety
/// There are so many bytes.
unsafe fn bytes_of(bytes: *const c_char, len: usize) -> Vec<u8> {
    // SAFETY: as the caller promised.
    unsafe { slice::from_raw_parts(bytes.cast::<u8>(), len) }.to_vec()
}

unsafe extern "C" fn shut_down(cluster: rados_t) {
    // SAFETY: connecting has made the handle of it, and nobody uses that any longer.
    drop(unsafe { Arc::from_raw(cluster.cast_const().cast::<FakeClient>()) });
}

unsafe extern "C" fn get_addresses(cluster: rados_t, place: *mut *mut c_char) -> c_int {
    // SAFETY: an open connection.
    let address = format!("v2:{}", unsafe { client(cluster) }.address);
    let address = CString::new(address).unwrap_or_default();
    // SAFETY: a text, and a place.
    unsafe { *place = libc::strdup(address.as_ptr()) };
    0
}

unsafe extern "C" fn add_to_blocklist(cluster: rados_t, address: *mut c_char, _seconds: u32) -> c_int {
    // SAFETY: an open connection, and a text.
    let (client, address) = unsafe { (client(cluster), text_of(address)) };
    // Monitors refuse nobody, but a client that hangs does not reach them.
    let mut state = client.cluster.call(&client.address).unwrap_or_else(|_| client.cluster.state());
    state.refused.insert(address);
    0
}

unsafe extern "C" fn wait_for_map(cluster: rados_t) -> c_int {
    // SAFETY: an open connection.
    let client = unsafe { client(cluster) };
    drop(client.cluster.call(&client.address));
    0
}

unsafe extern "C" fn create_pool(cluster: rados_t, name: *const c_char, place: *mut rados_ioctx_t) -> c_int {
    // SAFETY: a text.
    if unsafe { text_of(name) } != POOL {
        return -libc::ENOENT;
    }
    // SAFETY: an open connection, of which the pool is another reference; and a place.
    unsafe {
        Arc::increment_strong_count(cluster.cast_const().cast::<FakeClient>());
        *place = cluster;
    }
    0
}

unsafe extern "C" fn read(
    pool: rados_ioctx_t,
    object: *const c_char,
    place: *mut c_char,
    most: usize,
    _offset: u64,
) -> c_int {
    // SAFETY: an open pool, and a text.
    let (client, object) = unsafe { (client(pool), text_of(object)) };
    let state = match client.cluster.call(&client.address) {
        Ok(state) => state,
        Err(errno) => return -errno,
    };
    let Some(content) = state.objects.get(&object) else { return -libc::ENOENT };
    let len = content.len().min(most);
    // SAFETY: there is place for `most` bytes.
    unsafe { place.cast::<u8>().copy_from(content.as_ptr(), len) };
    len as c_int
}

unsafe extern "C" fn create_operation() -> rados_write_op_t {
    Box::into_raw(Box::new(Vec::<FakeStep>::new())).cast()
}

unsafe extern "C" fn release_operation(operation: rados_write_op_t) {
    // SAFETY: it was a box, and is released once.
    drop(unsafe { Box::from_raw(operation.cast::<Vec<FakeStep>>()) });
}

unsafe fn add_step(operation: rados_write_op_t, step: FakeStep) {
    // SAFETY: the operation is valid.
    unsafe { (*operation.cast::<Vec<FakeStep>>()).push(step) };
}

unsafe extern "C" fn add_create(operation: rados_write_op_t, flag: c_int, _category: *const c_char) {
    let is_exclusive = flag == LIBRADOS_CREATE_EXCLUSIVE;
    // SAFETY: the operation is valid.
    unsafe { add_step(operation, FakeStep::Create { is_exclusive }) };
}

unsafe extern "C" fn add_assert_exists(operation: rados_write_op_t) {
    // SAFETY: the operation is valid.
    unsafe { add_step(operation, FakeStep::AssertExists) };
}

unsafe extern "C" fn add_compare(
    operation: rados_write_op_t,
    expected: *const c_char,
    len: usize,
    _offset: u64,
    _result: *mut c_int,
) {
    // SAFETY: the operation is valid, and there are so many bytes.
    unsafe { add_step(operation, FakeStep::Compare(bytes_of(expected, len))) };
}

unsafe extern "C" fn add_write_full(operation: rados_write_op_t, content: *const c_char, len: usize) {
    // SAFETY: the operation is valid, and there are so many bytes.
    unsafe { add_step(operation, FakeStep::WriteFull(bytes_of(content, len))) };
}

unsafe extern "C" fn operate(
    operation: rados_write_op_t,
    pool: rados_ioctx_t,
    object: *const c_char,
    _time: *mut libc::time_t,
    _flags: c_int,
) -> c_int {
    // SAFETY: a valid operation, an open pool, and a text.
    let (steps, client, object) =
        unsafe { (&*operation.cast::<Vec<FakeStep>>(), client(pool), text_of(object)) };
    match client.cluster.call(&client.address) {
        Ok(mut state) => state.operate(&object, steps),
        Err(errno) => -errno,
    }
}

unsafe extern "C" fn watch(
    pool: rados_ioctx_t,
    object: *const c_char,
    place: *mut u64,
    notified: rados_watchcb2_t,
    interrupted: rados_watcherrcb_t,
    _seconds: u32,
    argument: *mut c_void,
) -> c_int {
    // SAFETY: an open pool, and a text.
    let (client, object) = unsafe { (client(pool), text_of(object)) };
    let mut state = match client.cluster.call(&client.address) {
        Ok(state) => state,
        Err(errno) => return -errno,
    };
    if !state.objects.contains_key(&object) {
        return -libc::ENOENT;
    }
    state.last_number += 1;
    let (cookie, client) = (state.last_number, client.address.clone());
    state.watchers.insert(cookie, FakeWatcher { object, client, notified, interrupted, argument });
    // SAFETY: there is a place.
    unsafe { *place = cookie };
    0
}

unsafe extern "C" fn check_watch(pool: rados_ioctx_t, cookie: u64) -> c_int {
    // SAFETY: an open pool.
    let state = unsafe { client(pool) }.cluster.state();
    if state.watchers.contains_key(&cookie) { 0 } else { -libc::ENOTCONN }
}

unsafe extern "C" fn unwatch(pool: rados_ioctx_t, cookie: u64) -> c_int {
    // SAFETY: an open pool.
    let client = unsafe { client(pool) };
    // It is forgotten at once, and the cluster is told when it answers.
    client.cluster.state().watchers.remove(&cookie);
    client.cluster.call(&client.address).map_or_else(|errno| -errno, |_| 0)
}

unsafe extern "C" fn flush_watches(cluster: rados_t) -> c_int {
    // SAFETY: an open connection.
    let client = unsafe { client(cluster) };
    drop(client.cluster.callbacks.lock().unwrap_or_else(PoisonError::into_inner));
    0
}

unsafe extern "C" fn acknowledge(
    pool: rados_ioctx_t,
    _object: *const c_char,
    notification: u64,
    cookie: u64,
    _content: *const c_char,
    _len: c_int,
) -> c_int {
    // SAFETY: an open pool.
    unsafe { client(pool) }.cluster.state().acknowledged.insert((notification, cookie));
    0
}

unsafe extern "C" fn create_completion(
    argument: *mut c_void,
    call: rados_callback_t,
    place: *mut rados_completion_t,
) -> c_int {
    let completion = Box::new(FakeNotified { call, argument, result: 0 });
    // SAFETY: there is a place.
    unsafe { *place = Box::into_raw(completion).cast() };
    0
}

/// Calls back before it returns, as librados may.
unsafe extern "C" fn notify(
    pool: rados_ioctx_t,
    object: *const c_char,
    completion: rados_completion_t,
    content: *const c_char,
    len: c_int,
    _timeout_ms: u64,
    _replies: *mut *mut c_char,
    _replies_len: *mut usize,
) -> c_int {
    // SAFETY: an open pool, and a text.
    let (client, object) = unsafe { (client(pool), text_of(object)) };
    // SAFETY: there are so many bytes.
    let content = unsafe { bytes_of(content, usize::try_from(len).unwrap_or(0)) };
    let (is_refused, is_cut) = {
        let state = client.cluster.state();
        (state.refused.contains(&client.address), state.cut.contains(&client.address))
    };
    let result = match is_refused {
        true => -libc::ESHUTDOWN,
        false if !is_cut && client.cluster.notify(&object, &content) => 0,
        false => -libc::ETIMEDOUT,
    };
    let completion = completion.cast::<FakeNotified>();
    // SAFETY: the completion is released by the callback only.
    let (call, argument) = unsafe {
        (*completion).result = result;
        ((*completion).call, (*completion).argument)
    };
    // SAFETY: both were given together, and one call is expected.
    unsafe { call(completion.cast(), argument) };
    0
}

unsafe extern "C" fn return_value(completion: rados_completion_t) -> c_int {
    // SAFETY: it was not released yet.
    unsafe { (*completion.cast::<FakeNotified>()).result }
}

unsafe extern "C" fn release(completion: rados_completion_t) {
    // SAFETY: it was a box, and is released once.
    drop(unsafe { Box::from_raw(completion.cast::<FakeNotified>()) });
}

/// In the place of functions that no test may call.
unsafe extern "C" fn unexpected() {
    unreachable!("a function that the fake cluster lacks");
}

/// The functions, by the names of those that they stand in for.
fn function(name: &str) -> *const () {
    match name.trim_end_matches('\0') {
        // A pool is one more reference to its connection.
        "rados_shutdown" | "rados_ioctx_destroy" => shut_down as *const (),
        "rados_getaddrs" => get_addresses as *const (),
        "rados_blocklist_add" => add_to_blocklist as *const (),
        "rados_wait_for_latest_osdmap" => wait_for_map as *const (),
        "rados_ioctx_create" => create_pool as *const (),
        "rados_read" => read as *const (),
        "rados_create_write_op" => create_operation as *const (),
        "rados_release_write_op" => release_operation as *const (),
        "rados_write_op_create" => add_create as *const (),
        "rados_write_op_assert_exists" => add_assert_exists as *const (),
        "rados_write_op_cmpext" => add_compare as *const (),
        "rados_write_op_write_full" => add_write_full as *const (),
        "rados_write_op_operate" => operate as *const (),
        "rados_watch3" => watch as *const (),
        "rados_watch_check" => check_watch as *const (),
        "rados_unwatch2" => unwatch as *const (),
        "rados_watch_flush" => flush_watches as *const (),
        "rados_notify_ack" => acknowledge as *const (),
        "rados_aio_create_completion2" => create_completion as *const (),
        "rados_aio_notify" => notify as *const (),
        "rados_aio_get_return_value" => return_value as *const (),
        "rados_aio_release" => release as *const (),
        _ => unexpected as *const (),
    }
}

fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    let find = |name: &'static str| {
        let address = NonNull::new(function(name).cast_mut().cast::<c_void>());
        Ok::<_, Infallible>(address.unwrap_or(NonNull::dangling()))
    };
    LIBRARY.get_or_init(|| {
        // SAFETY: each has the type of the function of its name.
        let Ok(rbd) = unsafe { RbdFunctions::find(find) };
        // SAFETY: as above.
        let Ok(rados) = unsafe { RadosFunctions::find(find) };
        Library { rados, rbd }
    })
}

/// The only pool.
pub const POOL: &str = "rbd";
