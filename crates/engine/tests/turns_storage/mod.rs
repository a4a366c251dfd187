//! A volume that processes serve in turns, over a storage that answers as a test says.

use blockmux_proto::names::volume_uuid::VolumeUuid;
use blockmux_proto::volume_state::{
    Commit, NotAcquired, Ownership, OwnershipQuestion, SharedState, StateGeneration, StoredState, Transition,
    VolumeIdentity, VolumeState,
};
use blockmux_volume::MemVolume;
use std::sync::{Arc, Mutex};

/// The storage of one volume; clones are the same one.
#[derive(Clone, Default)]
pub(crate) struct TestStorage(Arc<StorageState>);

#[derive(Default)]
struct StorageState {
    calls: Mutex<Vec<String>>,
    failing: Mutex<Vec<&'static str>>,
    is_owned: Mutex<bool>,
    stored: Mutex<Vec<u8>>,
}

impl TestStorage {
    /// A volume over a new storage, which is standby.
    pub(crate) fn standby() -> (TestStorage, Arc<VolumeState>) {
        let storage = TestStorage::default();
        let identity = VolumeIdentity {
            uuid: VolumeUuid::of_texts(&["image"]),
            unit: Default::default(),
            target_name: "disk".to_owned(),
            disk_number: None,
            claim: Box::new(()),
        };
        let volume = Arc::new(MemVolume::new(1 << 20));
        let (ownership, shared) = (Arc::new(storage.clone()), Arc::new(storage.clone()));
        (storage, VolumeState::owned(volume, identity, ownership, shared, None).unwrap())
    }

    /// Sets which calls fail: `acquire`, `is_held`, `release`, or `answer`, which is the answer to
    /// an `acquire` that has succeeded.
    pub(crate) fn fail(&self, calls: &[&'static str]) {
        *self.0.failing.lock().unwrap() = calls.to_vec();
    }

    /// Sets what is stored of the reservations.
    pub(crate) fn store(&self, image: &[u8]) {
        *self.0.stored.lock().unwrap() = image.to_vec();
    }

    pub(crate) fn is_owned(&self) -> bool {
        *self.0.is_owned.lock().unwrap()
    }

    /// Lets another process take the volume.
    pub(crate) fn take(&self) {
        *self.0.is_owned.lock().unwrap() = false;
    }

    /// Notes a call, or what a test does meanwhile.
    pub(crate) fn note(&self, call: &str) {
        self.0.calls.lock().unwrap().push(call.to_owned());
    }

    /// The calls since the last time.
    pub(crate) fn calls(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.calls.lock().unwrap())
    }

    fn check(&self, call: &'static str) -> Result<(), String> {
        match self.0.failing.lock().unwrap().contains(&call) {
            true => Err(format!("{call} fails")),
            false => Ok(()),
        }
    }
}

impl Ownership for TestStorage {
    fn acquire(&self, take: bool, _transition: &Transition) -> Result<StoredState, NotAcquired> {
        let refused = |may_own| move |error| NotAcquired { error, may_own };
        self.note(if take { "acquire, take" } else { "acquire" });
        self.check("acquire").map_err(refused(false))?;
        *self.0.is_owned.lock().unwrap() = true;
        self.check("answer").map_err(refused(true))?;
        let image = self.0.stored.lock().unwrap().clone();
        Ok(StoredState { image, ..StoredState::default() })
    }

    fn question(&self) -> OwnershipQuestion {
        let storage = self.clone();
        Box::new(move || {
            storage.note("is_held");
            storage.check("is_held").map(|()| storage.is_owned())
        })
    }

    fn recheck(&self) {
        self.note("recheck");
    }

    fn release(&self, _transition: &Transition) -> Result<(), String> {
        self.note("release");
        self.check("release")?;
        *self.0.is_owned.lock().unwrap() = false;
        Ok(())
    }
}

impl SharedState for TestStorage {
    fn propose(&self, _expected: StateGeneration, _image: &[u8]) -> StateGeneration {
        StateGeneration(1)
    }

    fn outcome(&self, _proposal: StateGeneration) -> Option<Commit> {
        Some(Commit::Committed)
    }
}
