//! One disk of a target, and what initiators set on it: config string, MAC mask list, reservation.
//!
//! All of that is rare, and read with every frame. So it is kept behind a lock with a number that
//! changes with it, and a session has its own copy, which it takes again when the number is
//! another. A change counts once it is on stable storage, if it is to outlive the target; that
//! takes its time elsewhere, and the next change builds on it meanwhile.

use super::AoeAddress;
use crate::exports::VolumeId;
use crate::volume_state::{ReservationStore, SaveTicket};
use blockmux_wire::aoe::AOE_MAX_CONFIG;
use blockmux_wire::ethernet::Mac;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What initiators have set on a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskSettings {
    /// The config string, at most [`AOE_MAX_CONFIG`] bytes.
    pub config: Vec<u8>,
    /// Who is listened to; everybody if it is empty. At most [`MAX_MASKS`].
    pub masks: Vec<Mac>,
    /// Who may use it; everybody if it is empty. At most [`MAX_RESERVED`].
    pub reserved: Vec<Mac>,
}

/// An image that is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not what is kept of an AoE disk, or damaged")]
pub struct SettingsImageError;

/// One disk; a clone is the same.
#[derive(Clone)]
pub struct AoeUnit {
    /// Where it is.
    pub address: AoeAddress,
    /// What it is.
    pub volume: VolumeId,
    shared: Arc<SharedUnit>,
}

struct SharedUnit {
    /// Changes with what is kept.
    version: AtomicU32,
    state: Mutex<AoeUnitState>,
    store: Option<Arc<dyn ReservationStore>>,
}

struct AoeUnitState {
    settings: DiskSettings,
    /// What it is to become, in the order of changes; at most [`MAX_CHANGES`].
    next: VecDeque<(SaveTicket, DiskSettings)>,
}

/// What becomes of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Changed<E> {
    /// It counts.
    Done,
    /// It will, or not: [`Unit::is_changed`] tells.
    Saving(SaveTicket),
    /// It was refused.
    Refused(E),
    /// Others are under way.
    Busy,
}

impl AoeUnit {
    /// A disk on which `kept` is set already; without a store, changes end with the process.
    #[must_use]
    pub fn new(
        address: AoeAddress,
        volume: VolumeId,
        kept: DiskSettings,
        store: Option<Arc<dyn ReservationStore>>,
    ) -> AoeUnit {
        let state = Mutex::new(AoeUnitState { settings: kept, next: VecDeque::new() });
        AoeUnit { address, volume, shared: Arc::new(SharedUnit { version: AtomicU32::new(0), state, store }) }
    }

    /// What is set now.
    #[must_use]
    pub fn settings(&self) -> DiskSettings {
        self.state().settings.clone()
    }

    #[inline]
    pub(super) fn version(&self) -> u32 {
        self.shared.version.load(Ordering::Acquire)
    }

    /// Changes what is set, if `change` does not refuse, and begins to keep it.
    pub(super) fn change<E>(&self, change: impl FnOnce(&mut DiskSettings) -> Result<(), E>) -> Changed<E> {
        let mut state = self.state();
        let last = state.next.back().map_or(&state.settings, |(_, kept)| kept);
        let mut next = last.clone();
        if let Err(refused) = change(&mut next) {
            return Changed::Refused(refused);
        }
        if next == *last {
            // It counts when that does which it is the same as.
            return state.next.back().map_or(Changed::Done, |(ticket, _)| Changed::Saving(*ticket));
        }
        let Some(store) = &self.shared.store else {
            self.settle(&mut state, next);
            return Changed::Done;
        };
        if state.next.len() >= MAX_CHANGES {
            return Changed::Busy;
        }
        let ticket = store.save(&next.to_image());
        state.next.push_back((ticket, next));
        Changed::Saving(ticket)
    }

    /// Whether that change counts; `None` while that is not known, `Some(false)` if it could not be
    /// kept.
    pub(super) fn is_changed(&self, ticket: SaveTicket) -> Option<bool> {
        let saved = self.shared.store.as_ref()?.is_saved(ticket)?;
        let mut state = self.state();
        while let Some((first, _)) = state.next.front()
            && *first <= ticket
            && let Some((_, next)) = state.next.pop_front()
        {
            if saved {
                self.settle(&mut state, next);
            }
        }
        Some(saved)
    }

    fn settle(&self, state: &mut AoeUnitState, next: DiskSettings) {
        state.settings = next;
        self.shared.version.fetch_add(1, Ordering::Release);
    }

    fn state(&self) -> MutexGuard<'_, AoeUnitState> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DiskSettings {
    /// `magic 8 | config u16 | masks u16 | reserved u16 | the bytes of each`.
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

    /// What [`DiskSettings::to_image`] made.
    ///
    /// # Errors
    /// If it did not.
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

/// Entries of a MAC mask list: as many as the answer to one request holds in a frame of 1,500
/// bytes.
pub const MAX_MASKS: usize = 128;
/// Addresses that a disk is reserved for: as many as a frame of 1,500 bytes holds.
pub const MAX_RESERVED: usize = 240;

/// Changes of one disk that are not kept yet; what is asked beyond is not answered, and comes
/// again.
const MAX_CHANGES: usize = 16;
const MAGIC: &[u8] = b"BmxAoE01";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_holds_all_that_is_kept() {
        let kept = DiskSettings {
            config: b"host:alpha".to_vec(),
            masks: vec![Mac([2, 0, 0, 0, 0, 1])],
            reserved: vec![Mac([2, 0, 0, 0, 0, 2]), Mac([2, 0, 0, 0, 0, 3])],
        };
        let image = kept.to_image();
        assert_eq!(DiskSettings::from_image(&image), Ok(kept));
        assert_eq!(
            DiskSettings::from_image(&DiskSettings::default().to_image()),
            Ok(DiskSettings::default())
        );
        for len in 0..image.len() {
            assert_eq!(DiskSettings::from_image(&image[..len]), Err(SettingsImageError), "{len} bytes");
        }
    }

    /// Says of each image what a test has it say.
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

    impl ReservationStore for Slow {
        fn save(&self, _image: &[u8]) -> SaveTicket {
            let mut state = self.0.lock().unwrap();
            state.0 = state.0.saturating_add(1);
            SaveTicket(state.0)
        }

        fn is_saved(&self, ticket: SaveTicket) -> Option<bool> {
            let (_, saved, failed) = *self.0.lock().unwrap();
            if ticket.0 <= saved { Some(true) } else { (ticket.0 <= failed).then_some(false) }
        }
    }

    fn set(unit: &AoeUnit, config: &[u8]) -> Changed<()> {
        unit.change(|kept| {
            kept.config = config.to_vec();
            Ok(())
        })
    }

    fn unit(store: Option<Arc<dyn ReservationStore>>) -> AoeUnit {
        AoeUnit::new(AoeAddress { shelf: 0, slot: 0 }, VolumeId(0), DiskSettings::default(), store)
    }

    #[test]
    fn a_change_counts_once_it_is_kept() {
        let store = Arc::new(Slow::default());
        let unit = unit(Some(store.clone()));
        let Changed::Saving(first) = set(&unit, b"a") else { panic!("it takes its time") };
        let Changed::Saving(second) = set(&unit, b"b") else { panic!("it takes its time") };
        assert_eq!(set(&unit, b"b"), Changed::Saving(second), "the same again");
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
    fn a_change_that_cannot_be_kept_does_not_count() {
        let store = Arc::new(Slow::default());
        let unit = unit(Some(store.clone()));
        let Changed::Saving(first) = set(&unit, b"a") else { panic!("it takes its time") };
        let Changed::Saving(second) = set(&unit, b"b") else { panic!("it takes its time") };
        store.fail_up_to(second.0);
        assert_eq!([first, second].map(|ticket| unit.is_changed(ticket)), [Some(false); 2]);
        assert_eq!((unit.settings(), unit.version()), (DiskSettings::default(), 0));
        assert_eq!(set(&unit, b""), Changed::Done, "it is what it was");
        for nth in 0..MAX_CHANGES {
            assert!(matches!(set(&unit, &[nth as u8]), Changed::Saving(_)));
        }
        assert_eq!(set(&unit, b"more"), Changed::Busy);
    }

    #[test]
    fn what_is_not_kept_counts_at_once() {
        let unit = unit(None);
        assert_eq!((set(&unit, b"x"), unit.version()), (Changed::Done, 1));
        assert_eq!((set(&unit, b"x"), unit.version()), (Changed::Done, 1), "nothing is new");
    }
}
