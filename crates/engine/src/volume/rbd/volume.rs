//! The volume: an open image, and what its cores share.

use super::channel::RbdChannel;
use super::current::CurrentImage;
use super::limit::{HeldByCall, within};
use super::member_client::MemberClient;
use super::state::{BLOCK, CurrentInfo, ImageState, whole_blocks};
use crate::core::reactor::EngineCore;
use blockmux_proto::volume_state::Transition;
use blockmux_rbd::cluster::{Cluster, ClusterOptions, why_it_hangs};
use blockmux_rbd::error::RbdError;
use blockmux_rbd::image::{Image, ImageDetails, ImageName};
use blockmux_volume::{
    Beyond, Channel, Core, IoError, Resize, ResizeError, SnapshotError, SnapshotInfo, Snapshots, Volume,
    VolumeInfo, Waker,
};
use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use tracing::warn;

/// An image of Ceph RBD.
pub struct RbdVolume {
    pub(super) current: Arc<CurrentImage>,
    identity: String,
    /// It is itself a snapshot, which has none.
    is_snapshot: bool,
    /// How the image is opened again.
    opening: Option<ImageOpening>,
    /// By whose client it is opened before it is owned; by that of its options if there is none.
    member: OnceLock<Arc<MemberClient>>,
}

#[derive(Clone)]
struct ImageOpening {
    cluster: ClusterOptions,
    name: ImageName,
    read_only: bool,
    on_start: fn(),
}

impl RbdVolume {
    /// Opens an image or a snapshot. Takes at most twice the timeout for connecting, for the
    /// cluster's connection and the image each, and some seconds to find out why that has passed.
    /// `on_start` is called by the thread from which all threads of the libraries begin, which
    /// inherit its capabilities.
    ///
    /// # Errors
    /// If the image cannot be opened.
    pub fn open(
        cluster: &ClusterOptions,
        name: &ImageName,
        read_only: bool,
        on_start: fn(),
    ) -> Result<RbdVolume, RbdError> {
        let opening = ImageOpening { cluster: cluster.clone(), name: name.clone(), read_only, on_start };
        let (image, has_changed) = opening.open(None, ())?;
        let volume = RbdVolume::of_image(image, name, has_changed);
        Ok(RbdVolume { opening: Some(opening), ..volume })
    }

    /// The volume of an open image. `has_changed` is set when the size may have changed.
    #[must_use]
    pub fn of_image(image: Arc<Image>, name: &ImageName, has_changed: Arc<AtomicBool>) -> RbdVolume {
        if image.details().has_cache {
            warn!("rbd:{name}: its pool or image turns a cache on, so writes are stable only after a flush");
        }
        let identity = image.details().identity.clone();
        let info = Arc::new(CurrentInfo::new(&info_of(image.details())));
        let state = state_of(image, name, has_changed, info);
        let (current, is_snapshot) = (CurrentImage::new(state), name.snapshot.is_some());
        RbdVolume { current, identity, is_snapshot, opening: None, member: OnceLock::new() }
    }

    /// The open image.
    pub(super) fn image(&self) -> Arc<Image> {
        self.current.get().image.clone()
    }

    /// Identifies the image, or the snapshot, for every program that opens it.
    #[must_use]
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// Has the image opened by the client of a group's member before it is owned, instead of the
    /// one of its options. Only the first call counts.
    pub fn open_by(&self, member: &Arc<MemberClient>) {
        // The first one stays.
        let _ = self.member.set(member.clone());
    }

    /// Opens the image by the client that is to own it: by that of a group's member, or by another
    /// one if the cluster has blocklisted the present one. Returns the image of this transition.
    /// Blocks as opening does; a call that does not return has the transition until it does.
    ///
    /// # Errors
    /// If it cannot be opened, another image has its name now, there is no client, or the
    /// transition was given up.
    pub(super) fn open_again(&self, transition: &Transition) -> Result<Arc<Image>, RbdError> {
        let Some(opening) = &self.opening else { return Ok(self.image()) };
        let client = self.member.get().map(|member| member.get().ok_or(RbdError::NoClient)).transpose()?;
        let is_wanted = || if transition.is_current() { Ok(()) } else { Err(RbdError::GivenUp) };
        // The next transition has another client.
        is_wanted()?;
        let is_right = |image: &Image| match &client {
            Some(client) => Arc::ptr_eq(image.cluster(), client),
            None => !image.cluster().is_blocklisted(),
        };
        let turn = transition.number();
        if let Some(image) = self.current.enter(turn, is_right)? {
            return Ok(image);
        }
        let (image, has_changed) = opening.open(client, transition.clone())?;
        is_wanted()?;
        self.replace_image(turn, image.clone(), &opening.name, has_changed)?;
        Ok(image)
    }

    /// Continues with an image that another client has opened, for the turn that begins with the
    /// transition of this number.
    ///
    /// # Errors
    /// If it is another image, or a later turn has one already.
    pub fn replace_image(
        &self,
        turn: u64,
        image: Arc<Image>,
        name: &ImageName,
        has_changed: Arc<AtomicBool>,
    ) -> Result<(), RbdError> {
        if image.details().identity != self.identity {
            return Err(RbdError::OtherImage(name.to_string()));
        }
        self.current.set(turn, state_of(image, name, has_changed, self.current.shared_info().clone()))
    }

    /// Asks for the size with the next [`Volume::refresh_size`].
    pub(super) fn note_change(&self) {
        self.current.get().has_changed.store(true, Ordering::Relaxed);
    }
}

impl ImageOpening {
    /// Opens the image by a client, or by the one of its options. `held` is dropped when that has
    /// returned: the image of a cluster without enough storage daemons opens when they are back,
    /// perhaps never; then nobody receives it, and it is closed.
    fn open(
        &self,
        client: Option<Arc<Cluster>>,
        held: impl HeldByCall,
    ) -> Result<(Arc<Image>, Arc<AtomicBool>), RbdError> {
        let own = self.clone();
        let open = move || {
            (own.on_start)();
            open_image(client, &own)
        };
        within(self.cluster.timeout * 2, open, drop, held).map_err(|error| match error {
            RbdError::NoAnswer(waited) => why_it_hangs(&self.cluster, waited),
            error => error,
        })
    }
}

fn state_of(
    image: Arc<Image>,
    name: &ImageName,
    has_changed: Arc<AtomicBool>,
    now: Arc<CurrentInfo>,
) -> Arc<ImageState> {
    Arc::new(ImageState {
        name: name.to_string(),
        first: info_of(image.details()),
        now,
        image,
        has_changed,
        id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
        status: Arc::default(),
    })
}

fn open_image(
    client: Option<Arc<Cluster>>,
    ImageOpening { cluster, name, read_only, .. }: &ImageOpening,
) -> Result<(Arc<Image>, Arc<AtomicBool>), RbdError> {
    let cluster = client.map_or_else(|| Cluster::shared(cluster), Ok)?;
    let has_changed = Arc::new(AtomicBool::new(false));
    let changed = has_changed.clone();
    let on_change = Box::new(move || changed.store(true, Ordering::Relaxed));
    let opened = Image::open(&cluster, name, *read_only, on_change);
    opened.map(|image| (image, has_changed)).inspect_err(|error| note_blocklisted(&cluster, error))
}

/// Notes that the cluster has blocklisted a client, so that the next image gets another connection.
pub(super) fn note_blocklisted(cluster: &Cluster, error: &RbdError) {
    if error.is_blocklisted() {
        cluster.note_blocklisted();
    }
}

fn info_of(image: &ImageDetails) -> VolumeInfo {
    let granularity = u32::try_from(image.discard_granularity.max(BLOCK)).unwrap_or(u32::MAX);
    VolumeInfo {
        read_only: image.read_only,
        write_cache: image.has_cache,
        preferred_block: PREFERRED_BLOCK,
        discard_granularity: granularity,
        fast_zeroes: true,
        compare_and_write_unit: compared_unit(image.compare_and_write_unit),
        ..VolumeInfo::new(whole_blocks(image.size))
    }
}

/// A unit smaller than a block is none.
fn compared_unit(unit: u32) -> u32 {
    if u64::from(unit) < BLOCK { 0 } else { unit }
}

impl Volume for RbdVolume {
    fn info(&self) -> VolumeInfo {
        self.current.info()
    }

    fn refresh_size(&self) -> u64 {
        self.current.get().refresh()
    }

    fn resize(&self, to: Resize) -> Result<u64, ResizeError> {
        let Resize::Bytes { size, beyond } = to else { return Ok(self.refresh_size()) };
        let state = self.current.get();
        let now = state.refresh();
        if state.first.read_only {
            return Err(ResizeError::ReadOnly);
        }
        if size == 0 || !size.is_multiple_of(BLOCK) {
            return Err(ResizeError::BadSize { size, block: BLOCK as u32 });
        }
        beyond.check(now, size)?;
        if beyond == Beyond::Keep && size < now {
            // An image has no place for what it no longer shows.
            return Err(ResizeError::WouldLose { now, size });
        }
        let resized = state.image.resize(size, size < now);
        let system = |error| ResizeError::System { action: "resize", source: io::Error::other(error) };
        resized.map_err(system)?;
        state.has_changed.store(true, Ordering::Relaxed);
        Ok(state.refresh())
    }

    fn snapshots(&self) -> Option<&dyn Snapshots> {
        if self.is_snapshot { None } else { Some(self) }
    }

    fn snapshots_in_use(&self) -> Vec<String> {
        if self.is_snapshot { vec![self.identity().to_owned()] } else { Vec::new() }
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        let engine = EngineCore::from_core(core).ok_or(IoError::Unsupported)?;
        let channel = RbdChannel::open(&self.current, engine, core, depth, waker)?;
        Ok(Box::new(channel))
    }
}

impl Snapshots for RbdVolume {
    fn list(&self) -> Result<Vec<SnapshotInfo>, SnapshotError> {
        self.current.get().list()
    }

    fn create(&self, name: &str) -> Result<SnapshotInfo, SnapshotError> {
        self.current.get().create(name)
    }

    fn delete(&self, name: &str) -> Result<(), SnapshotError> {
        self.current.get().delete(name)
    }

    fn protect(&self, name: &str, is_protected: bool) -> Result<(), SnapshotError> {
        self.current.get().protect(name, is_protected)
    }
}

/// Identifies volumes on their cores.
static NEXT_ID: AtomicU64 = AtomicU64::new(0);
/// Ceph's storage daemons allocate units of up to this many bytes; its kernel driver prefers them.
const PREFERRED_BLOCK: u32 = 64 << 10;

#[cfg(test)]
mod tests {
    use super::super::{RadosState, RbdOwnership};
    use super::*;
    use crate::volume::turns::{self, TurnError};
    use blockmux_proto::names::volume_uuid::VolumeUuid;
    use blockmux_proto::volume_state::{TransitionRefused, VolumeIdentity, VolumeState};
    use blockmux_rbd::fake::FakeImage;
    use std::convert::Infallible;
    use std::sync::{Condvar, Mutex};
    use std::thread;
    use std::time::Duration;

    /// Whether images open.
    static OPENS: (Mutex<bool>, Condvar) = (Mutex::new(false), Condvar::new());

    fn wait_until_it_opens() {
        let opens = OPENS.0.lock().unwrap();
        drop(OPENS.1.wait_while(opens, |opens| !*opens).unwrap());
    }

    #[test]
    fn while_an_image_does_not_open_no_other_thread_opens_it() {
        let image = FakeImage::new(1 << 20).open(false);
        image.cluster().note_blocklisted();
        let (pool, name) = ("rbd".to_owned(), "fake".to_owned());
        let name = ImageName { pool, namespace: None, image: name, snapshot: None };
        let conf = Some("/dev/null/ceph.conf".into());
        let opening = ImageOpening {
            cluster: ClusterOptions { conf, timeout: Duration::ZERO, ..ClusterOptions::new() },
            name: name.clone(),
            read_only: false,
            on_start: wait_until_it_opens,
        };
        let volume = RbdVolume::of_image(image, &name, Arc::default());
        let volume = Arc::new(RbdVolume { opening: Some(opening), ..volume });
        let ownership = RbdOwnership::new(volume.clone(), RadosState::unowned(), || {});
        let identity = VolumeIdentity {
            uuid: VolumeUuid::of_texts(&["image"]),
            unit: Default::default(),
            target_name: "disk".to_owned(),
            disk_number: None,
            claim: Box::new(()),
        };
        let state = VolumeState::owned(volume, identity, ownership, RadosState::unowned(), None).unwrap();
        let go = || turns::activate(&state, false, || {}, |_| Ok::<_, Infallible>(()));
        let is_failed = || matches!(go(), Err(TurnError::Failed { may_own: false, .. }));
        assert!(is_failed(), "it is given up");
        assert_eq!(go(), Err(TurnError::Refused(TransitionRefused::Busy)));
        *OPENS.0.lock().unwrap() = true;
        OPENS.1.notify_all();
        while state.is_in_transition() {
            thread::yield_now();
        }
        assert!(is_failed(), "it is opened again");
    }

    #[test]
    fn a_volume_says_what_the_image_does() {
        let image = ImageDetails {
            size: (1 << 20) + 700,
            read_only: true,
            has_cache: false,
            discard_granularity: 64 << 10,
            compare_and_write_unit: 256,
            stripe_unit: 512,
            identity: String::new(),
        };
        let info = info_of(&image);
        assert_eq!((info.size, info.read_only, info.write_cache), ((1 << 20) + 512, true, false));
        assert_eq!((info.discard_granularity, info.compare_and_write_unit), (64 << 10, 0));
        let cached = info_of(&ImageDetails { has_cache: true, discard_granularity: 1, ..image });
        assert_eq!((cached.write_cache, cached.discard_granularity), (true, 512));
    }
}
