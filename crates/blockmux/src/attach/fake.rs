//! A way to attach that makes no disk, for tests of what attaches and detaches.

use blockmux_engine::attach::{AttachError, AttachedAs, AttachedDisk, DetachError, DiskOptions};
use blockmux_proto::volume_state::Origin;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A disk that only says that it is there.
pub(crate) struct FakeDisk {
    path: PathBuf,
    outlives_process: bool,
    attached_as: AttachedAs,
}

/// What a test makes of a disk, and what has become of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FakeState {
    /// A test uses the disk.
    pub(crate) is_used: bool,
    /// It waits for another process.
    pub(crate) is_left: bool,
    /// It was removed, or removed by force.
    pub(crate) is_removed: bool,
    pub(crate) was_forced: bool,
}

impl FakeDisk {
    /// Attaches the volume with this name, unless the name begins with `broken`.
    pub(crate) fn attach(name: &str, options: DiskOptions) -> Result<FakeDisk, AttachError> {
        if name.starts_with("broken") {
            return Err(AttachError::Queue(io::ErrorKind::OutOfMemory.into()));
        }
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let path = PathBuf::from(format!("/dev/fake{}", NEXT.fetch_add(1, Ordering::Relaxed)));
        states().insert(path.clone(), FakeState::default());
        let (outlives_process, attached_as) = (options.data.is_some(), AttachedAs::New);
        Ok(FakeDisk { path, outlives_process, attached_as })
    }

    /// The disk, as one that a process that has ended had left.
    pub(crate) fn recovered(self) -> FakeDisk {
        FakeDisk { attached_as: AttachedAs::Recovered, ..self }
    }

    fn change(&self, change: impl FnMut(&mut FakeState)) {
        states().get_mut(&self.path).into_iter().for_each(change);
    }
}

impl AttachedDisk for FakeDisk {
    fn path(&self) -> PathBuf {
        self.path.clone()
    }

    fn attached_as(&self) -> AttachedAs {
        self.attached_as
    }

    fn origin(&self) -> Origin {
        Origin { protocol: "fake", listener: "nobody".into() }
    }

    fn outlives_process(&self) -> bool {
        self.outlives_process
    }

    fn check_unused(&self) -> Result<(), DetachError> {
        match state(&self.path).is_used {
            true => Err(DetachError::InUse { node: self.path.clone(), places: vec!["/mnt".to_owned()] }),
            false => Ok(()),
        }
    }

    fn leave(&self) {
        self.change(|state| state.is_left = true);
    }

    fn detach(&self) -> Result<(), DetachError> {
        self.check_unused()?;
        self.change(|state| state.is_removed = true);
        Ok(())
    }

    fn detach_by_force(&self) -> Result<(), DetachError> {
        self.change(|state| (state.is_removed, state.was_forced) = (true, true));
        Ok(())
    }
}

/// What has become of a disk.
pub(crate) fn state(path: &Path) -> FakeState {
    states().get(path).copied().unwrap_or_default()
}

/// Begins or ends to use a disk.
pub(crate) fn set_used(path: &Path, is_used: bool) {
    states().get_mut(path).into_iter().for_each(|state| state.is_used = is_used);
}

fn states() -> MutexGuard<'static, BTreeMap<PathBuf, FakeState>> {
    static STATES: Mutex<BTreeMap<PathBuf, FakeState>> = Mutex::new(BTreeMap::new());
    STATES.lock().unwrap_or_else(PoisonError::into_inner)
}
