//! Open images.
//!
//! The calls here block for as long as the cluster does not answer, so cores do not make them.
#![expect(unsafe_code, reason = "calls a library in C")]

mod snapshots;

pub use self::snapshots::Snapshot;
use self::snapshots::snapshot_identity;
use crate::cluster::{Cluster, c_string, text};
use crate::error::{Errno, RbdError};
use crate::library::{
    RBD_FEATURE_FAST_DIFF, RBD_FEATURE_STRIPINGV2, RBD_FLAGS_INVALID, RbdFunctions, rbd_config_option_t,
    rbd_image_t,
};
use crate::pool::Pool;
use blockmux_volume::Extent;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// What an image is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageName {
    /// The pool.
    pub pool: String,
    /// The namespace in the pool.
    pub namespace: Option<String>,
    /// The image.
    pub image: String,
    /// A snapshot of it.
    pub snapshot: Option<String>,
}

impl ImageName {
    /// The pool, and the namespace in it.
    fn place(&self) -> String {
        match &self.namespace {
            Some(namespace) => format!("{}/{namespace}", self.pool),
            None => self.pool.clone(),
        }
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.place(), self.image)?;
        self.snapshot.as_ref().map_or(Ok(()), |snapshot| write!(f, "@{snapshot}"))
    }
}

/// What is known of an image when it is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageDetails {
    /// Size in bytes, any number.
    pub size: u64,
    /// Writes are refused: it is a snapshot, or this user may only read.
    pub read_only: bool,
    /// Completed writes may be in a cache of this process, despite what this program asks for: the
    /// config of the pool or the image says so.
    pub has_cache: bool,
    /// A discard frees whole units of this many bytes, and keeps what is in others.
    pub discard_granularity: u64,
    /// The image can compare and write ranges within one aligned unit of this many bytes, a power
    /// of two; 0: none.
    pub compare_and_write_unit: u32,
    /// Consecutive bytes of the image in one object.
    pub stripe_unit: u64,
    /// Identifies the image, or the snapshot, for every program that opens it.
    pub identity: String,
}

/// An open image. Dropping it closes it on a thread of its own, because closing waits for requests
/// in flight and for the cluster.
pub struct Image {
    handles: Option<Handles>,
    details: ImageDetails,
}

/// What closing an image gives back.
struct Handles {
    image: rbd_image_t,
    watch: Option<u64>,
    /// The callback of the watch, which has its address.
    on_change: Box<OnChange>,
    /// Closed after the image.
    pool: Pool,
}
// SAFETY: librbd allows calls from any thread; the callback may be moved and called anywhere.
unsafe impl Send for Handles {}
// SAFETY: librbd allows calls from any thread, also several at the same time.
unsafe impl Sync for Handles {}

type OnChange = Box<dyn Fn() + Send + Sync>;

impl Image {
    /// Opens an image; `on_change` is called by a thread of librbd when its size may have changed,
    /// and must neither block nor call librbd. May block for ever.
    ///
    /// # Errors
    /// If the image cannot be opened.
    pub fn open(
        cluster: &Arc<Cluster>,
        name: &ImageName,
        read_only: bool,
        on_change: OnChange,
    ) -> Result<Arc<Image>, RbdError> {
        let pool = Pool::open(cluster, &name.pool, name.namespace.as_deref())?;
        open_images().add();
        let handles =
            Handles { image: std::ptr::null_mut(), watch: None, on_change: Box::new(on_change), pool };
        let details = ImageDetails {
            size: 0,
            read_only,
            has_cache: false,
            discard_granularity: 0,
            compare_and_write_unit: 0,
            stripe_unit: 0,
            identity: String::new(),
        };
        // From now on dropping it closes what was opened.
        let mut image = Image { handles: Some(handles), details };
        image.open_in_pool(name)?;
        image.details = image.query(name)?;
        Ok(Arc::new(image))
    }

    /// An image that is open by functions that are not librbd's.
    #[cfg(any(test, feature = "fake"))]
    pub(crate) fn of_handle(cluster: Arc<Cluster>, image: rbd_image_t, details: ImageDetails) -> Image {
        open_images().add();
        let on_change: OnChange = Box::new(|| {});
        let (on_change, pool) = (Box::new(on_change), Pool::of_cluster(cluster));
        Image { handles: Some(Handles { image, watch: None, on_change, pool }), details }
    }

    fn open_in_pool(&mut self, name: &ImageName) -> Result<(), RbdError> {
        let (image_name, snapshot) = (
            c_string("the image", &name.image)?,
            name.snapshot.as_deref().map(|name| c_string("the snapshot", name)),
        );
        let asks_read_only = self.details.read_only;
        let handles = self.handles_mut();
        let (cluster, pool) = (handles.pool.cluster().clone(), handles.pool.handle());
        let rbd = &cluster.library.rbd;
        let place = &raw mut handles.image;
        // SAFETY: the pool is open; a text, a place for the handle, and no snapshot.
        let opened = unsafe { (rbd.rbd_open)(pool, image_name.as_ptr(), place, std::ptr::null()) };
        let mut opened = Errno::check(opened);
        let may_not = |error: &Errno| [libc::EPERM, libc::EACCES, libc::EROFS].contains(&error.0);
        // Only an image that is open for writing has a watch, so that changes of its size are
        // noticed; but users who may only read can read.
        if asks_read_only && opened.as_ref().is_err_and(may_not) {
            // SAFETY: as above.
            opened = Errno::check(unsafe {
                (rbd.rbd_open_read_only)(pool, image_name.as_ptr(), place, std::ptr::null())
            });
        }
        if let Err(error) = opened {
            // What is there may be a handle that librbd has freed.
            handles.image = std::ptr::null_mut();
            return Err(match error.0 {
                libc::ENOENT => RbdError::NoImage { image: name.image.clone(), place: name.place() },
                _ if may_not(&error) => {
                    RbdError::NoPermission { user: cluster.user.clone(), pool: name.pool.clone() }
                }
                _ => RbdError::Call { call: "rbd_open", error },
            });
        }
        if let Some(snapshot) = snapshot.transpose()? {
            // SAFETY: the image is open; a text.
            let set = unsafe { (rbd.rbd_snap_set)(handles.image, snapshot.as_ptr()) };
            Errno::check(set).map_err(|error| match error.0 {
                libc::ENOENT => RbdError::NoSnapshot(name.snapshot.clone().unwrap_or_default()),
                _ => RbdError::Call { call: "rbd_snap_set", error },
            })?;
        }
        self.watch();
        Ok(())
    }

    /// Asks for calls when the image changes.
    fn watch(&mut self) {
        let handles = self.handles_mut();
        let (mut number, argument) = (0, (&raw const *handles.on_change).cast_mut().cast());
        let rbd = &handles.pool.cluster().library.rbd;
        // SAFETY: the image is open. The callback lives until the watch has ended: `Handles` drops
        // it after that.
        let watched = unsafe { (rbd.rbd_update_watch)(handles.image, &raw mut number, on_update, argument) };
        // Without it, a change is not noticed; the image works nevertheless.
        handles.watch = (watched == 0).then_some(number);
    }

    fn query(&self, name: &ImageName) -> Result<ImageDetails, RbdError> {
        let (handles, rbd) = self.parts();
        let mut id: [c_char; ID_LEN] = [0; ID_LEN];
        // SAFETY: the image is open, and the length is that of the memory.
        RbdError::check("rbd_get_id", unsafe { (rbd.rbd_get_id)(handles.image, id.as_mut_ptr(), id.len()) })?;
        // SAFETY: the pool is open.
        let pool = unsafe { (handles.pool.rados().rados_ioctx_get_id)(handles.pool.handle()) };
        let (fsid, id) = (handles.pool.cluster().fsid(), text(&id));
        let mut identity = format!("{fsid} pool {pool} image {id}");
        if let Some(snapshot) = &name.snapshot {
            let found = self.snapshots()?.into_iter().find(|found| found.name == *snapshot);
            let found = found.ok_or_else(|| RbdError::NoSnapshot(snapshot.clone()))?;
            identity = snapshot_identity(&identity, found.id);
        }
        let stripe_unit = self.number("rbd_get_stripe_unit", |rbd| rbd.rbd_get_stripe_unit)?;
        let options = self.options()?;
        let is_on = |name: &str| options.iter().any(|(key, value)| key == name && value == "true");
        let number = |name: &str| options.iter().find(|(key, _)| key == name)?.1.parse::<u64>().ok();
        let granularity =
            number("rbd_discard_granularity_bytes").filter(|_| is_on("rbd_skip_partial_discard"));
        Ok(ImageDetails {
            size: self.size()?,
            read_only: self.details.read_only || name.snapshot.is_some(),
            // Persistent caches are plugins.
            has_cache: is_on("rbd_cache")
                || options.iter().any(|(key, value)| key == "rbd_plugins" && !value.is_empty()),
            discard_granularity: granularity.unwrap_or(1).max(1),
            compare_and_write_unit: compared_unit(stripe_unit),
            stripe_unit,
            identity,
        })
    }

    /// The options of librbd that hold for the image: the config's, the pool's and its own.
    fn options(&self) -> Result<Vec<(String, String)>, RbdError> {
        let (handles, rbd) = self.parts();
        let none = rbd_config_option_t { name: std::ptr::null_mut(), value: std::ptr::null_mut(), source: 0 };
        let (mut options, mut count) = (vec![none; MAX_OPTIONS], MAX_OPTIONS as c_int);
        // SAFETY: the image is open, and the count is that of the memory.
        let listed =
            unsafe { (rbd.rbd_config_image_list)(handles.image, options.as_mut_ptr(), &raw mut count) };
        RbdError::check("rbd_config_image_list", listed)?;
        let found = options.iter().take(usize::try_from(count).unwrap_or(0));
        // SAFETY: librbd has filled so many, with texts that it has allocated.
        let copy = |text: *mut c_char| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        let found = found.map(|option| (copy(option.name), copy(option.value))).collect();
        // SAFETY: what it has allocated is freed once, and not used again.
        unsafe { (rbd.rbd_config_image_list_cleanup)(options.as_mut_ptr(), count) };
        Ok(found)
    }

    /// What was known of the image when it was opened.
    #[must_use]
    pub fn details(&self) -> &ImageDetails {
        &self.details
    }

    /// The cluster of the image.
    #[must_use]
    pub fn cluster(&self) -> &Arc<Cluster> {
        self.parts().0.pool.cluster()
    }

    /// The current size in bytes.
    ///
    /// # Errors
    /// If the cluster does not tell it.
    pub fn size(&self) -> Result<u64, RbdError> {
        self.number("rbd_get_size", |rbd| rbd.rbd_get_size)
    }

    /// Changes the size, in bytes.
    ///
    /// # Errors
    /// If the cluster refuses that, or the image is larger and `may_shrink` is not set.
    pub fn resize(&self, size: u64, may_shrink: bool) -> Result<(), RbdError> {
        let (handles, rbd) = self.parts();
        // SAFETY: the image is open; the callback ignores its argument.
        let resized = unsafe {
            (rbd.rbd_resize2)(handles.image, size, may_shrink, ignore_progress, std::ptr::null_mut())
        };
        RbdError::check("rbd_resize2", resized).map(drop)
    }

    /// Which blocks of a range that is not empty have data, by the image's object map: objects of
    /// some megabytes. At least one extent from the start of the range; they may cover less than
    /// the range. `None`: the image has no map that is valid.
    ///
    /// # Errors
    /// If the cluster does not tell it.
    pub fn extents(&self, offset: u64, len: u64) -> Result<Option<Vec<Extent>>, RbdError> {
        let (handles, rbd) = self.parts();
        let features = self.number("rbd_get_features", |rbd| rbd.rbd_get_features)?;
        let flags = self.number("rbd_get_flags", |rbd| rbd.rbd_get_flags)?;
        if features & RBD_FEATURE_FAST_DIFF == 0 || flags & RBD_FLAGS_INVALID != 0 {
            return Ok(None);
        }
        let mut begin = offset;
        if handles.pool.cluster().library.version() < OFFSETS_FIXED {
            // It reports wrong offsets for a range that does not begin with an object.
            let overlap = self.number("rbd_get_overlap", |rbd| rbd.rbd_get_overlap)?;
            if features & RBD_FEATURE_STRIPINGV2 != 0 || overlap > 0 {
                return Ok(None);
            }
            begin = offset
                .checked_div(self.details.stripe_unit)
                .map_or(0, |number| number * self.details.stripe_unit);
        }
        let mut map = ExtentMap::new(offset, len);
        let (part, argument) = (offset + len - begin, (&raw mut map).cast());
        // SAFETY: the image is open; the callback has its argument only during the call.
        let walked = unsafe {
            (rbd.rbd_diff_iterate2)(handles.image, std::ptr::null(), begin, part, 1, 1, on_extent, argument)
        };
        if walked < 0 && !map.is_full() {
            RbdError::check("rbd_diff_iterate2", walked)?;
        }
        Ok(Some(map.finish()))
    }

    /// Calls a function that tells a number.
    fn number(
        &self,
        call: &'static str,
        function: impl Fn(&RbdFunctions) -> unsafe extern "C" fn(rbd_image_t, *mut u64) -> c_int,
    ) -> Result<u64, RbdError> {
        let (handles, rbd) = self.parts();
        let mut number = 0;
        // SAFETY: the image is open, and there is a place for the number.
        RbdError::check(call, unsafe { function(rbd)(handles.image, &raw mut number) })?;
        Ok(number)
    }

    fn parts(&self) -> (&Handles, &'static RbdFunctions) {
        let handles = self.handles.as_ref().expect("only dropping takes them");
        (handles, &handles.pool.cluster().library.rbd)
    }

    fn handles_mut(&mut self) -> &mut Handles {
        self.handles.as_mut().expect("only dropping takes them")
    }

    /// The pool with the image's namespace, for objects beside the image.
    pub(crate) fn pool(&self) -> &Pool {
        &self.parts().0.pool
    }

    /// The handle and the functions, for requests.
    pub(crate) fn raw(&self) -> (rbd_image_t, &'static RbdFunctions) {
        let (handles, rbd) = self.parts();
        (handles.image, rbd)
    }
}

/// The units within which ranges can be compared, from a stripe unit, both in bytes. librbd refuses
/// ranges that cross a stripe unit, and aborts the process if a range of more than half of one
/// differs near its end.
fn compared_unit(stripe_unit: u64) -> u32 {
    let half = stripe_unit / 2;
    if half == 0 { 0 } else { MAX_COMPARED.min(1 << half.trailing_zeros().min(31)) }
}

impl Drop for Image {
    fn drop(&mut self) {
        let Some(handles) = self.handles.take() else { return };
        let close = move || {
            drop(handles);
            open_images().remove();
        };
        // Without a thread, the closure is dropped here, and with it the handles: that blocks, but
        // loses nothing.
        if thread::Builder::new().name("rbd close".to_owned()).spawn(close).is_err() {
            open_images().remove();
        }
    }
}

impl Drop for Handles {
    fn drop(&mut self) {
        let library = self.pool.cluster().library;
        if !self.image.is_null() {
            if let Some(watch) = self.watch {
                // SAFETY: the image is open. No call of the callback begins or goes on after that.
                unsafe { (library.rbd.rbd_update_unwatch)(self.image, watch) };
            }
            // SAFETY: nobody else has the handle. librbd ends the requests that it still has, whose
            // memory stays until then ([`RequestQueue`](crate::requests::RequestQueue)).
            unsafe { (library.rbd.rbd_close)(self.image) };
        }
    }
}

unsafe extern "C" fn on_update(argument: *mut c_void) {
    // SAFETY: the argument of the watch, which lives until that has ended.
    let call = unsafe { &*argument.cast::<OnChange>() };
    call();
}

unsafe extern "C" fn ignore_progress(_done: u64, _of: u64, _argument: *mut c_void) -> c_int {
    0
}

unsafe extern "C" fn on_extent(offset: u64, len: usize, exists: c_int, argument: *mut c_void) -> c_int {
    // SAFETY: the argument of the call that is under way, which nobody else uses meanwhile.
    let map = unsafe { &mut *argument.cast::<ExtentMap>() };
    map.add(offset, len as u64, exists != 0);
    // An error ends the call.
    if map.is_full() { -libc::ECANCELED } else { 0 }
}

/// The extents of a range, made from the parts of it that have data.
struct ExtentMap {
    at: u64,
    end: u64,
    extents: Vec<Extent>,
}

impl ExtentMap {
    fn new(offset: u64, len: u64) -> ExtentMap {
        ExtentMap { at: offset, end: offset + len, extents: Vec::new() }
    }

    /// Adds a part, which may be outside of the range. Parts come in order.
    fn add(&mut self, offset: u64, len: u64, exists: bool) {
        let begin = offset.clamp(self.at, self.end);
        let end = offset.saturating_add(len).clamp(begin, self.end);
        if exists && end > begin && !self.is_full() {
            self.push(begin, true);
            self.push(end, false);
        }
    }

    /// Adds what is up to `to`, unless that is nothing.
    fn push(&mut self, to: u64, is_hole: bool) {
        let len = to - self.at;
        self.at = to;
        match self.extents.last_mut() {
            _ if len == 0 => {}
            Some(last) if last.hole == is_hole => last.len += len,
            _ => self.extents.push(Extent { len, hole: is_hole, zero: is_hole }),
        }
    }

    fn is_full(&self) -> bool {
        self.extents.len() >= MAX_EXTENTS
    }

    fn finish(mut self) -> Vec<Extent> {
        if !self.is_full() {
            self.push(self.end, true);
        }
        self.extents
    }
}

/// The images that are open, or being closed.
struct OpenImages {
    count: Mutex<usize>,
    fewer: Condvar,
}

fn open_images() -> &'static OpenImages {
    static OPEN: OpenImages = OpenImages { count: Mutex::new(0), fewer: Condvar::new() };
    &OPEN
}

impl OpenImages {
    fn count(&self) -> MutexGuard<'_, usize> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self) {
        *self.count() += 1;
    }

    fn remove(&self) {
        *self.count() -= 1;
        self.fewer.notify_all();
    }
}

/// Waits until all images are closed, for the end of the process: an image that is not closed keeps
/// its lock and its watch at the cluster, and others wait half a minute for them. Returns `false`
/// after the timeout; then the libraries' threads still run.
pub fn wait_until_closed(timeout: Duration) -> bool {
    let open = open_images();
    let waited = open.fewer.wait_timeout_while(open.count(), timeout, |count| *count > 0);
    *waited.unwrap_or_else(PoisonError::into_inner).0 == 0
}

/// The first version whose diffs may begin anywhere.
const OFFSETS_FIXED: (c_int, c_int) = (1, 17);
/// Extents in one reply.
const MAX_EXTENTS: usize = 1024;
/// Most bytes that are compared and written, which are copied for librbd.
const MAX_COMPARED: u32 = 64 << 10;
/// Options of librbd; version 16 has 69.
const MAX_OPTIONS: usize = 512;
/// An image's identifier is a text of some 14 characters.
const ID_LEN: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    const HOLE: bool = true;

    fn extents(map: ExtentMap) -> Vec<(u64, bool)> {
        map.finish().into_iter().map(|extent| (extent.len, extent.hole)).collect()
    }

    #[test]
    fn what_is_not_reported_is_a_hole() {
        let mut map = ExtentMap::new(100, 100);
        map.add(90, 20, true);
        map.add(120, 10, true);
        map.add(130, 10, true);
        map.add(140, 10, false);
        map.add(190, 50, true);
        assert_eq!(extents(map), [(10, !HOLE), (10, HOLE), (20, !HOLE), (50, HOLE), (10, !HOLE)]);
        assert_eq!(extents(ExtentMap::new(8, 8)), [(8, HOLE)]);
    }

    #[test]
    fn a_range_that_is_compared_is_at_most_half_a_stripe_unit() {
        let units = [4 << 20, 128 << 10, 64 << 10, 160 << 10, 512, 1, 0];
        assert_eq!(units.map(compared_unit), [65_536, 65_536, 32_768, 16_384, 256, 0, 0]);
    }

    #[test]
    fn parts_outside_of_the_range_are_left_out() {
        let mut map = ExtentMap::new(100, 100);
        map.add(0, 100, true);
        map.add(200, u64::MAX, true);
        assert_eq!(extents(map), [(100, HOLE)]);
    }

    #[test]
    fn a_reply_is_bounded() {
        let mut map = ExtentMap::new(0, u64::MAX);
        for nth in 0..5_000 {
            map.add(nth * 8, 4, true);
        }
        assert!(map.is_full());
        let found = map.finish();
        assert!(found.len() <= MAX_EXTENTS + 1, "{}", found.len());
        assert_eq!(found.iter().map(|extent| extent.len).sum::<u64>() % 8, 4, "it ends with data");
    }
}
