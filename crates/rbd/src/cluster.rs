//! Connections to clusters.
//!
//! A connection has a dozen threads and 26 MB, so images that name the same cluster and user share
//! one. What it is to the cluster, one client, is also what the cluster blocklists: images that
//! must be fenced separately need connections of their own.
#![expect(unsafe_code, reason = "calls a library in C")]

use crate::error::{Errno, RbdError};
use crate::library::{Library, rados_t};
use std::env;
use std::ffi::{CStr, CString, c_char};
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak, mpsc};
use std::thread;
use std::time::Duration;

/// Which cluster, and as whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterOptions {
    /// Ceph's config; `None`: where Ceph's own programs look for it, `CEPH_CONF` included.
    pub conf: Option<PathBuf>,
    /// The user, without `client.`.
    pub user: String,
    /// The file with the user's key; `None`: as the config says.
    pub keyring: Option<PathBuf>,
    /// Time for connecting, in whole seconds.
    pub timeout: Duration,
}

impl ClusterOptions {
    /// The cluster of Ceph's usual config, as its usual user.
    #[must_use]
    pub fn new() -> ClusterOptions {
        ClusterOptions { conf: None, user: USER.to_owned(), keyring: None, timeout: TIMEOUT }
    }
}

impl Default for ClusterOptions {
    fn default() -> ClusterOptions {
        ClusterOptions::new()
    }
}

/// A connection to a cluster. Dropping it disconnects, which may block.
pub struct Cluster {
    pub(crate) library: &'static Library,
    pub(crate) handle: rados_t,
    pub(crate) user: String,
    fsid: String,
    is_blocklisted: AtomicBool,
    /// Called when the cluster is found to have blocklisted this client.
    on_blocklisted: Mutex<Vec<Weak<OnBlocklisted>>>,
    /// How the cluster names this client as the owner of a lock, once it has owned one.
    address: OnceLock<String>,
}
// SAFETY: librados allows calls from any thread, also several at the same time.
unsafe impl Send for Cluster {}
// SAFETY: librados allows calls from any thread, also several at the same time.
unsafe impl Sync for Cluster {}

impl Cluster {
    /// The connection with these options, which others may use already; connects if there is none.
    /// Blocks for as long as the timeout.
    ///
    /// # Errors
    /// If the cluster cannot be reached, or refuses the user.
    pub fn shared(options: &ClusterOptions) -> Result<Arc<Cluster>, RbdError> {
        if let Some(cluster) = find(options) {
            return Ok(cluster);
        }
        // Nobody waits for a lock while it connects. Of two that connect at the same time, both
        // keep their connection, and later images use the first.
        let cluster = Arc::new(Cluster::connect(options)?);
        let mut all = shared();
        all.retain(|(_, cluster)| cluster.strong_count() > 0);
        all.push((options.clone(), Arc::downgrade(&cluster)));
        Ok(cluster)
    }

    /// A connection that nobody shares: a client of its own, which can be fenced without others.
    /// Blocks for as long as the timeout.
    ///
    /// # Errors
    /// If the cluster cannot be reached, or refuses the user.
    pub fn connect(options: &ClusterOptions) -> Result<Cluster, RbdError> {
        let library = Library::load()?;
        let user = c_string("the user", &options.user)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a place for the handle, and a text that ends with a zero byte.
        let created = unsafe { (library.rados.rados_create)(&raw mut handle, user.as_ptr()) };
        RbdError::check("rados_create", created)?;
        let (is_blocklisted, on_blocklisted, address) = Default::default();
        let user = options.user.clone();
        // From now on dropping it frees the handle.
        let mut cluster =
            Cluster { library, handle, user, fsid: String::new(), is_blocklisted, on_blocklisted, address };
        cluster.configure(options)?;
        // SAFETY: the handle is valid and not connected.
        let connected = unsafe { (library.rados.rados_connect)(handle) };
        Errno::check(connected).map_err(|error| cluster.refusal(error, options))?;
        let mut fsid: [c_char; FSID_LEN] = [0; FSID_LEN];
        // SAFETY: the length is that of the memory.
        let found = unsafe { (library.rados.rados_cluster_fsid)(handle, fsid.as_mut_ptr(), fsid.len()) };
        RbdError::check("rados_cluster_fsid", found)?;
        cluster.fsid = text(&fsid);
        Ok(cluster)
    }

    /// A connection by functions that are not librados's.
    #[cfg(any(test, feature = "fake"))]
    pub(crate) fn of_library(library: &'static Library) -> Cluster {
        let (handle, user) = (std::ptr::null_mut(), USER.to_owned());
        let (is_blocklisted, on_blocklisted, address) = Default::default();
        Cluster { library, handle, user, fsid: String::new(), is_blocklisted, on_blocklisted, address }
    }

    /// A client of a cluster by functions that are not librados's.
    #[cfg(any(test, feature = "fake"))]
    pub(crate) fn of_client(library: &'static Library, handle: rados_t) -> Cluster {
        let mut cluster = Cluster::of_library(library);
        cluster.handle = handle;
        cluster
    }

    fn configure(&self, options: &ClusterOptions) -> Result<(), RbdError> {
        let conf = options.conf.as_ref().map(|path| path_text("conf", path)).transpose()?;
        let path = conf.as_ref().map_or(std::ptr::null(), |path| path.as_ptr());
        // SAFETY: the handle is valid; the path is a text, or absent.
        let read = unsafe { (self.library.rados.rados_conf_read_file)(self.handle, path) };
        Errno::check(read).map_err(|error| {
            let path = options.conf.clone().or_else(|| env::var_os("CEPH_CONF").map(PathBuf::from));
            match path {
                Some(path) => {
                    RbdError::Conf { reason: unreadable(&path, error), path: path.display().to_string() }
                }
                None => RbdError::Conf { path: "ceph.conf".to_owned(), reason: error.to_string() },
            }
        })?;
        for (option, value) in OWN_OPTIONS {
            // A version that does not know an option works as this one sets it.
            let _ = self.set(option, &c_string("an option", value)?);
        }
        let seconds = options.timeout.as_secs().max(1).to_string();
        self.set(c"client_mount_timeout", &c_string("the timeout", &seconds)?)?;
        if let Some(keyring) = &options.keyring {
            self.set(c"keyring", &path_text("keyring", keyring)?)?;
        }
        Ok(())
    }

    fn set(&self, option: &CStr, value: &CStr) -> Result<(), RbdError> {
        // SAFETY: the handle is valid, and both texts end with a zero byte.
        let set =
            unsafe { (self.library.rados.rados_conf_set)(self.handle, option.as_ptr(), value.as_ptr()) };
        RbdError::check("rados_conf_set", set).map(drop)
    }

    /// Why the cluster cannot be reached.
    fn refusal(&self, error: Errno, options: &ClusterOptions) -> RbdError {
        let user = self.user.clone();
        match error.0 {
            libc::ETIMEDOUT => RbdError::NoMonitor { monitors: self.monitors(), waited: options.timeout },
            libc::ENOENT => RbdError::NoKey { user },
            libc::EPERM | libc::EACCES => RbdError::Refused { user, error },
            _ => RbdError::Call { call: "rados_connect", error },
        }
    }

    /// The addresses of the monitors in the config.
    fn monitors(&self) -> String {
        let mut monitors: [c_char; MAX_MONITORS] = [0; MAX_MONITORS];
        let (place, len) = (monitors.as_mut_ptr(), monitors.len());
        // SAFETY: the handle is valid; a text, and the length is that of the memory.
        let found =
            unsafe { (self.library.rados.rados_conf_get)(self.handle, c"mon_host".as_ptr(), place, len) };
        if found < 0 { "none is in the config".to_owned() } else { text(&monitors) }
    }

    /// The number of storage daemons that run, and of all. May block for ever.
    fn storage_daemons(&self) -> Result<StorageDaemons, RbdError> {
        let rados = &self.library.rados;
        let command = [c"{\"prefix\": \"osd stat\", \"format\": \"json\"}".as_ptr()];
        let (mut reply, mut len) = (std::ptr::null_mut(), 0);
        let (mut status, mut status_len) = (std::ptr::null_mut(), 0);
        let none = std::ptr::null();
        // SAFETY: the cluster is connected; one text, no input, and places for both replies.
        let told = unsafe {
            (rados.rados_mon_command)(
                self.handle,
                command.as_ptr(),
                command.len(),
                none,
                0,
                &raw mut reply,
                &raw mut len,
                &raw mut status,
                &raw mut status_len,
            )
        };
        let bytes = match reply.is_null() {
            true => Vec::new(),
            // SAFETY: librados has filled so many bytes.
            false => unsafe { std::slice::from_raw_parts(reply.cast::<u8>(), len) }.to_vec(),
        };
        for buffer in [reply, status] {
            // SAFETY: librados has allocated it, or it is null.
            unsafe { (rados.rados_buffer_free)(buffer) };
        }
        RbdError::check("rados_mon_command", told)?;
        StorageDaemons::read(&bytes)
            .ok_or(RbdError::Call { call: "rados_mon_command", error: Errno(libc::EBADMSG) })
    }

    /// The identifier of the cluster.
    #[must_use]
    pub fn fsid(&self) -> &str {
        &self.fsid
    }

    /// The cluster has blocklisted this client, for good: later images get another connection.
    pub fn note_blocklisted(&self) {
        if self.is_blocklisted.swap(true, Ordering::SeqCst) {
            return;
        }
        self.call_all();
    }

    /// Has `call` called, on any thread, when the cluster is found to have blocklisted this client;
    /// at once if it has before; and never when the caller has dropped it. It must neither block
    /// nor use an image of the cluster.
    pub fn on_blocklisted(&self, call: &Arc<OnBlocklisted>) {
        let mut calls = self.calls();
        if calls.len() == calls.capacity() {
            calls.retain(|call| call.strong_count() > 0);
        }
        calls.push(Arc::downgrade(call));
        drop(calls);
        // Found meanwhile, so nobody else calls it.
        if self.is_blocklisted.load(Ordering::SeqCst) {
            self.call_all();
        }
    }

    fn call_all(&self) {
        let all = std::mem::take(&mut *self.calls());
        all.iter().filter_map(Weak::upgrade).for_each(|call| call());
    }

    fn calls(&self) -> MutexGuard<'_, Vec<Weak<OnBlocklisted>>> {
        self.on_blocklisted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes how the cluster names this client as the owner of a lock.
    pub(crate) fn note_address(&self, address: String) {
        // It stays the same as long as the connection.
        let _ = self.address.set(address);
    }

    /// Whether this client is the owner of a lock with this address.
    #[must_use]
    pub fn is_owner(&self, owner: &str) -> bool {
        self.address.get().is_some_and(|address| address == owner)
    }

    /// Whether the cluster has blocklisted this client.
    #[must_use]
    pub fn is_blocklisted(&self) -> bool {
        self.is_blocklisted.load(Ordering::SeqCst)
    }
}

/// Called when the cluster is found to have blocklisted a client.
pub type OnBlocklisted = dyn Fn() + Send + Sync;

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: nobody else has the handle; images and pools hold the cluster.
        unsafe { (self.library.rados.rados_shutdown)(self.handle) };
    }
}

/// Why librados has not read a config: it says of all but bad lines that the file is not there.
fn unreadable(path: &Path, error: Errno) -> String {
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => "it is a directory".to_owned(),
        Ok(_) if error.0 == libc::EINVAL => "it has a line that is none of a config".to_owned(),
        Ok(found) if found.is_file() => match File::open(path) {
            Ok(_) => error.to_string(),
            Err(own) => own.to_string(),
        },
        Ok(_) => "it is no file".to_owned(),
        Err(own) => own.to_string(),
    }
}

/// Why an image has not opened after the time `waited`: asks the monitors, for at most 5 s.
#[must_use]
pub fn why_it_hangs(options: &ClusterOptions, waited: Duration) -> RbdError {
    let Some(cluster) = find(options) else {
        let monitors = options
            .conf
            .as_ref()
            .map_or("those of ceph.conf".to_owned(), |conf| format!("those of {}", conf.display()));
        return RbdError::NoMonitor { monitors, waited };
    };
    let (sender, told) = mpsc::channel();
    let ask = move || drop(sender.send(cluster.storage_daemons()));
    if thread::Builder::new().name("rbd status".to_owned()).spawn(ask).is_err() {
        return RbdError::OpenTimeout(waited);
    }
    match told.recv_timeout(STATUS_TIMEOUT) {
        Ok(Ok(StorageDaemons { up, all })) => RbdError::NoStorage { up, all, waited },
        // A user without that right.
        Ok(Err(_)) => RbdError::OpenTimeout(waited),
        Err(_) => RbdError::MonitorsLost(waited),
    }
}

/// The numbers of a cluster's storage daemons.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
struct StorageDaemons {
    #[serde(rename = "num_up_osds")]
    up: u64,
    #[serde(rename = "num_osds")]
    all: u64,
}

impl StorageDaemons {
    /// Reads the reply of the monitors to `osd stat`. Old versions have it in another object.
    fn read(reply: &[u8]) -> Option<StorageDaemons> {
        let reply: serde_json::Value = serde_json::from_slice(reply).ok()?;
        let inner = reply.get("osdmap").cloned();
        serde_json::from_value(inner.unwrap_or(reply)).ok()
    }
}

type SharedClusters = Vec<(ClusterOptions, Weak<Cluster>)>;

fn shared() -> MutexGuard<'static, SharedClusters> {
    static SHARED: Mutex<SharedClusters> = Mutex::new(Vec::new());
    SHARED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn find(options: &ClusterOptions) -> Option<Arc<Cluster>> {
    let same: Vec<_> = {
        let all = shared();
        all.iter().filter(|(of, _)| of == options).filter_map(|(_, cluster)| cluster.upgrade()).collect()
    };
    // The last user of a connection disconnects, which may block: the lock is free then.
    same.into_iter().find(|cluster| !cluster.is_blocklisted())
}

pub(crate) fn c_string(what: &'static str, text: &str) -> Result<CString, RbdError> {
    CString::new(text).ok().filter(|text| !text.is_empty()).ok_or(RbdError::Name(what))
}

fn path_text(what: &'static str, path: &std::path::Path) -> Result<CString, RbdError> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| RbdError::Name(what))
}

/// The text up to the first zero byte, or all of it.
pub(crate) fn text(bytes: &[c_char]) -> String {
    let bytes: Vec<u8> = bytes.iter().map(|byte| *byte as u8).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Options that hold whatever the config says: a write is stable when it completes; its memory is
/// not copied, because a request completes only once nothing refers to it; a core never waits; who
/// loses the lock by force is fenced; and the error that a call returns says what the libraries
/// would print.
const OWN_OPTIONS: [(&CStr, &str); 6] = [
    (c"rbd_cache", "false"),
    (c"rbd_disable_zero_copy_writes", "false"),
    (c"rbd_non_blocking_aio", "true"),
    (c"rbd_blocklist_on_break_lock", "true"),
    (c"log_to_stderr", "false"),
    (c"err_to_stderr", "false"),
];
/// Time for which a client stays fenced. A process that was stopped for a day is refused when it
/// goes on; by default Ceph forgets such a client after an hour.
pub const FENCED_FOR: Duration = Duration::from_secs(7 * 24 * 3600);
/// The user that Ceph's own programs are by default.
pub const USER: &str = "admin";
/// Time for connecting, by default.
pub const TIMEOUT: Duration = Duration::from_secs(30);
/// Time for the monitors to say how many storage daemons run.
const STATUS_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of the addresses of monitors, in bytes.
const MAX_MONITORS: usize = 1024;
/// A UUID as text, and a zero byte.
const FSID_LEN: usize = 37;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_a_zero_byte_is_refused() {
        assert!(c_string("the user", "admin").is_ok());
        for bad in ["", "a\0b"] {
            assert_eq!(c_string("the user", bad).unwrap_err().to_string(), "the user is not a name for Ceph");
        }
    }

    #[test]
    fn calls_for_a_blocklisted_client_take_no_room_once_nobody_waits_for_them() {
        use std::sync::atomic::AtomicU32;
        let cluster = Cluster::of_library(crate::fake::library());
        let called = Arc::new(AtomicU32::new(0));
        let call = || {
            let called = called.clone();
            let count = move || {
                called.fetch_add(1, Ordering::SeqCst);
            };
            Arc::new(count) as Arc<OnBlocklisted>
        };
        let kept = call();
        cluster.on_blocklisted(&kept);
        (0..1000).for_each(|_| cluster.on_blocklisted(&call()));
        assert!(cluster.calls().capacity() < 64);
        cluster.note_blocklisted();
        assert_eq!(called.load(Ordering::SeqCst), 1);
        cluster.on_blocklisted(&kept);
        assert_eq!(called.load(Ordering::SeqCst), 2, "it is so already");
    }

    #[test]
    fn the_numbers_of_storage_daemons_are_read_from_the_reply_of_each_version() {
        let expected = Some(StorageDaemons { up: 1, all: 3 });
        let reply = br#"{"epoch":15,"num_osds":3,"num_up_osds":1,"osd_up_since":0,"num_in_osds":3}"#;
        assert_eq!(StorageDaemons::read(reply), expected);
        let old = br#"{"osdmap":{"epoch":15,"num_osds":3,"num_up_osds":1}}"#;
        assert_eq!(StorageDaemons::read(old), expected);
        for bad in [&b""[..], b"[]", b"{}", br#"{"num_osds":-1,"num_up_osds":1}"#, b"\xff"] {
            assert_eq!(StorageDaemons::read(bad), None);
        }
    }

    #[test]
    fn a_config_that_cannot_be_read_is_named_with_the_reason() {
        for (path, why) in [
            ("/nonexistent/ceph.conf", "No such file or directory"),
            ("/etc", "it is a directory; give its path, as in conf="),
            ("/proc/version/ceph.conf", "Not a directory"),
        ] {
            let conf = Some(PathBuf::from(path));
            let options = ClusterOptions { conf, ..ClusterOptions::new() };
            match Cluster::shared(&options) {
                Err(RbdError::Library(error)) => return println!("skipped: {error}"),
                Err(error) => {
                    let text = error.to_string();
                    let expected = format!("cannot read Ceph's config {path}: {why}");
                    assert!(text.starts_with(&expected), "{text}");
                }
                Ok(_) => panic!("{path} is no config"),
            }
        }
    }
}
