//! A disk of a target, and the settings that initiators can change: config string, MAC mask list,
//! reservation.
//!
//! Settings change rarely and are read for every frame. They are behind a lock with a version
//! number, and each session has a copy that it refreshes when the version changes. With a store, a
//! change takes effect once it is on stable storage; later changes build on it in the meantime.

use super::AoeAddress;
use crate::exports::VolumeId;
use crate::volume_state::{Commit, SharedState, StateGeneration};
use blockmux_wire::aoe::AOE_MAX_CONFIG;
use blockmux_wire::ethernet::Mac;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The settings of a disk that initiators can change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskSettings {
    /// Config string, at most [`AOE_MAX_CONFIG`] bytes.
    pub config: Vec<u8>,
    /// MAC mask list: the stations whose requests the disk accepts; all if empty. At most
    /// [`MAX_MASKS`].
    pub masks: Vec<Mac>,
    /// Reservation: the stations that may use the disk; all if empty. At most [`MAX_RESERVED`].
    pub reserved: Vec<Mac>,
}

/// Stored settings that are damaged or not of an AoE disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not the stored settings of an AoE disk, or damaged")]
pub struct SettingsImageError;

/// A disk of a target; clones share their settings.
#[derive(Clone)]
pub struct AoeUnit {
    /// Address of the disk.
    pub address: AoeAddress,
    /// Volume of the disk.
    pub volume: VolumeId,
    shared: Arc<SharedUnit>,
}

struct SharedUnit {
    /// Incremented by every change that takes effect.
    version: AtomicU32,
    state: Mutex<AoeUnitState>,
    store: Option<Arc<dyn SharedState>>,
}

struct AoeUnitState {
    settings: DiskSettings,
    /// The generation of `settings` in the store.
    stored: StateGeneration,
    /// Changes that are being stored, in order; at most [`MAX_CHANGES`].
    next: VecDeque<(StateGeneration, DiskSettings)>,
}

/// Result of a change of settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SettingsChange<E> {
    /// The change has taken effect.
    Done,
    /// The change is being stored; see [`AoeUnit::is_changed`].
    Saving(StateGeneration),
    /// The caller's closure refused the change.
    Refused(E),
    /// Too many changes are being stored.
    Busy,
}

impl AoeUnit {
    /// A disk with these initial settings, and the store with their generation. Without a store,
    /// changes are lost when the process ends.
    #[must_use]
    pub fn new(
        address: AoeAddress,
        volume: VolumeId,
        settings: DiskSettings,
        store: Option<(Arc<dyn SharedState>, StateGeneration)>,
    ) -> AoeUnit {
        let (store, stored) = store.unzip();
        let stored = stored.unwrap_or_default();
        let state = Mutex::new(AoeUnitState { settings, stored, next: VecDeque::new() });
        AoeUnit { address, volume, shared: Arc::new(SharedUnit { version: AtomicU32::new(0), state, store }) }
    }

    /// The settings in effect.
    #[must_use]
    pub fn settings(&self) -> DiskSettings {
        self.state().settings.clone()
    }

    #[inline]
    pub(super) fn version(&self) -> u32 {
        self.shared.version.load(Ordering::Acquire)
    }

    /// Changes the settings and starts to store them, unless `change` refuses.
    pub(super) fn change<E>(
        &self,
        change: impl FnOnce(&mut DiskSettings) -> Result<(), E>,
    ) -> SettingsChange<E> {
        let mut state = self.state();
        self.settle(&mut state);
        let last = state.next.back().map_or(&state.settings, |(_, settings)| settings);
        let mut next = last.clone();
        if let Err(refused) = change(&mut next) {
            return SettingsChange::Refused(refused);
        }
        if next == *last {
            // It takes effect together with the pending change that it equals.
            return state
                .next
                .back()
                .map_or(SettingsChange::Done, |(proposal, _)| SettingsChange::Saving(*proposal));
        }
        let Some(store) = &self.shared.store else {
            self.take_effect(&mut state, next);
            return SettingsChange::Done;
        };
        if state.next.len() >= MAX_CHANGES {
            return SettingsChange::Busy;
        }
        let expected = state.next.back().map_or(state.stored, |(generation, _)| *generation);
        let generation = store.propose(expected, &next.to_image());
        state.next.push_back((generation, next));
        SettingsChange::Saving(generation)
    }

    /// Whether a change has taken effect; `None` while it is being stored, `Some(false)` if it
    /// could not be stored.
    pub(super) fn is_changed(&self, proposal: StateGeneration) -> Option<bool> {
        let outcome = self.shared.store.as_ref()?.outcome(proposal)?;
        self.settle(&mut self.state());
        Some(outcome == Commit::Committed)
    }

    /// Puts stored changes into effect, and drops those that could not be stored.
    fn settle(&self, state: &mut AoeUnitState) {
        let Some(store) = &self.shared.store else { return };
        while let Some((generation, _)) = state.next.front()
            && let Some(outcome) = store.outcome(*generation)
            && let Some((generation, next)) = state.next.pop_front()
        {
            match outcome {
                Commit::Committed => {
                    state.stored = generation;
                    self.take_effect(state, next);
                }
                // The next change builds on what is stored.
                Commit::Stale(stored) => {
                    if let Ok(settings) = DiskSettings::of_stored(&stored.image) {
                        state.stored = stored.generation;
                        self.take_effect(state, settings);
                    }
                }
                Commit::Failed => {}
            }
        }
    }

    fn take_effect(&self, state: &mut AoeUnitState, next: DiskSettings) {
        state.settings = next;
        self.shared.version.fetch_add(1, Ordering::Release);
    }

    fn state(&self) -> MutexGuard<'_, AoeUnitState> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DiskSettings {
    /// The settings as bytes: `magic 8 | config u16 | masks u16 | reserved u16 | the bytes of
    /// each`.
    #[must_use]
    pub fn to_image(&self) -> Vec<u8> {
        let mut image = MAGIC.to_vec();
        for count in [self.config.len(), self.masks.len(), self.reserved.len()] {
            image.extend((count as u16).to_be_bytes());
        }
        image.extend(&self.config);
        image.extend(self.masks.iter().chain(&self.reserved).flat_map(|mac| mac.0));
        image
    }

    /// The settings of a stored image; the defaults if nothing is stored.
    ///
    /// # Errors
    /// If the image is damaged or something else.
    pub fn of_stored(image: &[u8]) -> Result<DiskSettings, SettingsImageError> {
        if image.is_empty() { Ok(DiskSettings::default()) } else { DiskSettings::from_image(image) }
    }

    /// Parses the bytes of [`DiskSettings::to_image`].
    ///
    /// # Errors
    /// If they are damaged or something else.
    pub fn from_image(image: &[u8]) -> Result<DiskSettings, SettingsImageError> {
        let rest = image.strip_prefix(MAGIC).ok_or(SettingsImageError)?;
        let (counts, rest) = rest.split_first_chunk::<6>().ok_or(SettingsImageError)?;
        let [a, b, c, d, e, f] = *counts;
        let [config, masks, reserved] = [[a, b], [c, d], [e, f]].map(|n| usize::from(u16::from_be_bytes(n)));
        if config > AOE_MAX_CONFIG || masks > MAX_MASKS || reserved > MAX_RESERVED {
            return Err(SettingsImageError);
        }
        let (config, rest) = rest.split_at_checked(config).ok_or(SettingsImageError)?;
        let (macs, []) = rest.as_chunks::<6>() else { return Err(SettingsImageError) };
        let (first, second) = macs.split_at_checked(masks).ok_or(SettingsImageError)?;
        if second.len() != reserved {
            return Err(SettingsImageError);
        }
        let list = |macs: &[[u8; 6]]| macs.iter().copied().map(Mac).collect();
        Ok(DiskSettings { config: config.to_vec(), masks: list(first), reserved: list(second) })
    }
}

/// The maximum length of a MAC mask list: an answer with all of it fits a frame of 1,500 bytes.
pub const MAX_MASKS: usize = 128;
/// The maximum number of stations in a reservation: a list of them fits a frame of 1,500 bytes.
pub const MAX_RESERVED: usize = 240;

/// The maximum number of changes of one disk that are being stored; further requests get no answer,
/// and the initiator retransmits them.
const MAX_CHANGES: usize = 16;
const MAGIC: &[u8] = b"BmxAoE01";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume_state::StoredState;

    #[test]
    fn an_image_contains_all_persistent_state() {
        let settings = DiskSettings {
            config: b"host:alpha".to_vec(),
            masks: vec![Mac([2, 0, 0, 0, 0, 1])],
            reserved: vec![Mac([2, 0, 0, 0, 0, 2]), Mac([2, 0, 0, 0, 0, 3])],
        };
        let image = settings.to_image();
        assert_eq!(DiskSettings::from_image(&image), Ok(settings));
        assert_eq!(
            DiskSettings::from_image(&DiskSettings::default().to_image()),
            Ok(DiskSettings::default())
        );
        for len in 0..image.len() {
            assert_eq!(DiskSettings::from_image(&image[..len]), Err(SettingsImageError), "{len} bytes");
        }
    }

    /// A store whose results the test sets.
    #[derive(Default)]
    struct Slow(Mutex<(u64, u64, u64)>);

    impl Slow {
        fn save_up_to(&self, saved: u64) {
            self.0.lock().unwrap().1 = saved;
        }

        fn fail_up_to(&self, failed: u64) {
            self.0.lock().unwrap().2 = failed;
        }
    }

    impl SharedState for Slow {
        fn propose(&self, _expected: StateGeneration, _image: &[u8]) -> StateGeneration {
            let mut state = self.0.lock().unwrap();
            state.0 = state.0.saturating_add(1);
            StateGeneration(state.0)
        }

        fn outcome(&self, proposal: StateGeneration) -> Option<Commit> {
            let (_, saved, failed) = *self.0.lock().unwrap();
            match proposal.0 {
                proposal if proposal <= saved => Some(Commit::Committed),
                proposal => (proposal <= failed).then_some(Commit::Failed),
            }
        }
    }

    fn set(unit: &AoeUnit, config: &[u8]) -> SettingsChange<()> {
        unit.change(|settings| {
            settings.config = config.to_vec();
            Ok(())
        })
    }

    fn unit(store: Option<Arc<dyn SharedState>>) -> AoeUnit {
        let store = store.map(|store| (store, StateGeneration::default()));
        AoeUnit::new(AoeAddress { shelf: 0, slot: 0 }, VolumeId(0), DiskSettings::default(), store)
    }

    #[test]
    fn a_change_takes_effect_once_it_is_stored() {
        let store = Arc::new(Slow::default());
        let unit = unit(Some(store.clone()));
        let SettingsChange::Saving(first) = set(&unit, b"a") else { panic!("it takes its time") };
        let SettingsChange::Saving(second) = set(&unit, b"b") else { panic!("it takes its time") };
        assert_eq!(set(&unit, b"b"), SettingsChange::Saving(second), "the same again");
        assert_eq!((unit.is_changed(first), unit.settings().config, unit.version()), (None, vec![], 0));
        store.save_up_to(first.0);
        assert_eq!((unit.is_changed(first), unit.settings().config), (Some(true), b"a".to_vec()));
        store.save_up_to(second.0);
        assert_eq!((unit.is_changed(second), unit.settings().config), (Some(true), b"b".to_vec()));
        assert_eq!(
            (unit.is_changed(first), unit.settings().config),
            (Some(true), b"b".to_vec()),
            "asked late"
        );
    }

    #[test]
    fn a_change_that_cannot_be_stored_has_no_effect() {
        let store = Arc::new(Slow::default());
        let unit = unit(Some(store.clone()));
        let SettingsChange::Saving(first) = set(&unit, b"a") else { panic!("it takes its time") };
        let SettingsChange::Saving(second) = set(&unit, b"b") else { panic!("it takes its time") };
        store.fail_up_to(second.0);
        assert_eq!([first, second].map(|change| unit.is_changed(change)), [Some(false); 2]);
        assert_eq!((unit.settings(), unit.version()), (DiskSettings::default(), 0));
        assert_eq!(set(&unit, b""), SettingsChange::Done, "it is what it was");
        for nth in 0..MAX_CHANGES {
            assert!(matches!(set(&unit, &[nth as u8]), SettingsChange::Saving(_)));
        }
        assert_eq!(set(&unit, b"more"), SettingsChange::Busy);
    }

    /// Rejects every proposal, because a program has stored this meanwhile.
    struct Elsewhere(DiskSettings);

    impl SharedState for Elsewhere {
        fn propose(&self, expected: StateGeneration, _image: &[u8]) -> StateGeneration {
            StateGeneration(expected.0.saturating_add(1))
        }

        fn outcome(&self, _proposal: StateGeneration) -> Option<Commit> {
            Some(Commit::Stale(StoredState { generation: StateGeneration(9), image: self.0.to_image() }))
        }
    }

    #[test]
    fn a_change_that_comes_after_one_of_another_program_takes_over_its_settings() {
        let theirs = DiskSettings { config: b"theirs".to_vec(), ..DiskSettings::default() };
        let unit = unit(Some(Arc::new(Elsewhere(theirs.clone()))));
        let SettingsChange::Saving(change) = set(&unit, b"ours") else { panic!("it takes its time") };
        assert_eq!((unit.is_changed(change), unit.settings()), (Some(false), theirs));
        assert_eq!(set(&unit, b"ours"), SettingsChange::Saving(StateGeneration(10)), "it builds on theirs");
    }

    #[test]
    fn a_change_that_need_not_be_stored_takes_effect_at_once() {
        let unit = unit(None);
        assert_eq!((set(&unit, b"x"), unit.version()), (SettingsChange::Done, 1));
        assert_eq!((set(&unit, b"x"), unit.version()), (SettingsChange::Done, 1), "nothing is new");
    }
}
