//! A logical unit: a volume and the SCSI state that all nexuses share, in addition to the state of
//! all protocols ([`VolumeState`]).
//!
//! [`LogicalUnit::generation`] increases with each change that a nexus must notice. A
//! [`DeviceServer`] caches a [`NexusView`] and takes the lock only if the generation differs from
//! that of its view.
//!
//! [`DeviceServer`]: super::DeviceServer

use super::AccessState;
use super::alua::{self, AccessStates, GroupState};
use super::missed::{MissedAttentions, is_reset};
use super::nexus::{ItNexus, TargetPort};
use super::sanitize::{EraseRecord, Sanitize};
use super::tokens::Tokens;
use super::view::NexusView;
use crate::names::unit_identity::{DEFAULT_PRODUCT, DEFAULT_VENDOR, GivenUnitIdentity, UnitDesignator};
use crate::names::volume_uuid::VolumeUuid;
use crate::scsi::sense::Sense;
use crate::volume_state::{
    BlockAccess, Change, Holder, Notice, Registrant, ServingState, VolumeState, Watcher,
};
use blockmux_volume::{Volume, VolumeInfo};
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// Identity and properties of a logical unit, for INQUIRY data and designators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitIdentity {
    /// T10 VENDOR IDENTIFICATION: 8 bytes of ASCII, padded with spaces.
    pub vendor: [u8; 8],
    /// PRODUCT IDENTIFICATION, padded with spaces.
    pub product: [u8; 16],
    /// PRODUCT REVISION LEVEL, padded with spaces.
    pub revision: [u8; 4],
    /// Unit serial number in ASCII, identical on every path to the volume and unique to it.
    pub serial: String,
    /// Initially, the medium can be ejected and loaded (RMB of the INQUIRY data).
    pub removable: bool,
    /// Writes are rejected even if the volume is writable.
    pub read_only: bool,
    /// Designators of the unit (SPC-5, Device Identification VPD page).
    pub designators: Vec<UnitDesignator>,
}

impl UnitIdentity {
    /// The identity of a volume that is known only by name.
    #[must_use]
    pub fn of(name: &str) -> UnitIdentity {
        UnitIdentity::given(VolumeUuid::of_texts(&[name]), &GivenUnitIdentity::default())
    }

    /// The configured identity, completed by what is derived from the volume's UUID. Derived
    /// designators are complete by themselves, so they are left out if there is a configured one:
    /// an initiator could otherwise prefer a designator that the unit did not have before.
    #[must_use]
    pub fn given(uuid: VolumeUuid, given: &GivenUnitIdentity) -> UnitIdentity {
        let vendor = given.vendor.unwrap_or(DEFAULT_VENDOR);
        let serial = given.serial.as_ref().map_or_else(|| uuid.scsi_serial(), |own| own.as_str().to_owned());
        let derived = || {
            let naa = UnitDesignator::naa(&uuid.naa().to_be_bytes());
            // A serial number of more than 247 bytes fits in no designator.
            let t10 = UnitDesignator::t10_vendor(&[&vendor[..], serial.as_bytes()].concat());
            naa.into_iter().chain(t10).collect()
        };
        let designators = if given.designators.is_empty() { derived() } else { given.designators.clone() };
        UnitIdentity {
            vendor,
            product: given.product.unwrap_or(DEFAULT_PRODUCT),
            revision: given.revision.unwrap_or(*b"0001"),
            serial,
            removable: false,
            read_only: false,
            designators,
        }
    }
}

/// A volume as a logical unit, shared by all targets and sessions that provide access to it.
pub struct LogicalUnit {
    pub(super) identity: UnitIdentity,
    pub(super) volume_state: Arc<VolumeState>,
    generation: AtomicU64,
    /// ROD tokens of the unit's data. Their clock advances by a second with each tick.
    pub(crate) tokens: Tokens,
    background_callback: OnceLock<Box<dyn Fn() + Send + Sync>>,
    state: Mutex<UnitState>,
}

/// State that nexuses share.
#[derive(Default)]
pub(super) struct UnitState {
    /// The nexuses that have sent a command to the unit.
    pub(super) nexuses: BTreeMap<NexusKey, NexusState>,
    /// What the others have missed.
    pub(super) missed: MissedAttentions,
    /// D_SENSE of the Control mode page.
    pub(super) descriptor_sense: bool,
    /// SWP of the Control mode page.
    pub(super) write_protected: bool,
    /// ALUA states of target port groups, while this process serves the volume.
    pub(super) access_states: AccessStates,
    /// Whether this process serves the volume.
    serving: ServingState,
    /// The current or failed sanitize operation.
    pub(super) sanitize: Option<Sanitize>,
    /// The last successful block erase.
    pub(super) erased: Option<EraseRecord>,
    /// The medium can be ejected and loaded.
    pub(super) removable: bool,
    /// The medium of a removable unit is ejected.
    pub(super) ejected: bool,
    /// RELATIVE TARGET PORT IDENTIFIERs of all ports of the unit, by port name.
    pub(super) ports: BTreeMap<Arc<str>, u16>,
    /// The volume's size when it was last checked, in bytes; 0 if it was not checked.
    size: u64,
}

/// State of one nexus.
pub(super) struct NexusState {
    pub(super) registrant: Registrant,
    /// The last addition or removal of a unit of the target that it knows, or is notified of.
    inventory: u64,
    /// The write protection of its LUN that it knows, or is notified of.
    is_read_only: bool,
    /// Number of times that its tasks were aborted by others.
    abort_epoch: u32,
    /// PREVENT of the latest PREVENT ALLOW MEDIUM REMOVAL.
    pub(super) prevents_removal: bool,
    attentions: SmallVec<[Asc; MAX_ATTENTIONS]>,
}

/// Identifies a nexus of a logical unit while the nexus exists.
pub(super) type NexusKey = Holder;

impl LogicalUnit {
    /// A logical unit for a volume that nothing else serves.
    #[must_use]
    pub fn new(identity: UnitIdentity, volume: Arc<dyn Volume>) -> Arc<LogicalUnit> {
        LogicalUnit::over(identity, &VolumeState::new(volume))
    }

    /// A logical unit for a volume that other units and protocols may serve.
    #[must_use]
    pub fn over(identity: UnitIdentity, volume_state: &Arc<VolumeState>) -> Arc<LogicalUnit> {
        let size = volume_state.volume().info().size;
        let state = UnitState { size, removable: identity.removable, ..UnitState::default() };
        let unit = Arc::new(LogicalUnit {
            identity,
            volume_state: volume_state.clone(),
            generation: AtomicU64::new(0),
            tokens: Tokens::default(),
            background_callback: OnceLock::new(),
            state: Mutex::new(state),
        });
        let watcher: Weak<LogicalUnit> = Arc::downgrade(&unit);
        volume_state.watch(watcher);
        // The table is locked, as during a change.
        volume_state.with_table(|table| unit.change(|state| state.serving = table.serving));
        unit
    }

    /// Registers a callback for background work. It may be called from any thread; a device server
    /// must then call [`DeviceServer::poll_background`]. Only the first registration takes effect.
    ///
    /// [`DeviceServer::poll_background`]: super::DeviceServer::poll_background
    pub fn on_background(&self, call: impl Fn() + Send + Sync + 'static) {
        // The first registrant serves the unit.
        let _ = self.background_callback.set(Box::new(call));
    }

    /// Notifies the callback of background work.
    pub(super) fn notify_background(&self) {
        if let Some(call) = self.background_callback.get() {
            call();
        }
    }

    /// The generation, sequentially consistent because `Drain` requires it.
    #[inline]
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }

    /// Whether several processes export the volume, and one serves it.
    pub(super) fn is_owned(&self) -> bool {
        self.volume_state.ownership().is_some()
    }

    pub(super) fn info(&self) -> VolumeInfo {
        let info = self.volume_state.volume().info();
        VolumeInfo { read_only: info.read_only || self.identity.read_only, ..info }
    }

    /// Reads the shared state.
    pub(super) fn read_state<R>(&self, read: impl FnOnce(&UnitState) -> R) -> R {
        read(&self.lock())
    }

    /// Changes the shared state and invalidates the views of all nexuses.
    pub(super) fn change<R>(&self, change: impl FnOnce(&mut UnitState) -> R) -> R {
        let mut state = self.lock();
        let result = change(&mut state);
        // Within the lock: a reader of the new generation finds the new state.
        self.generation.fetch_add(1, Ordering::Release);
        result
    }

    /// Adds a nexus with a power-on unit attention (SAM-5 §5.14), and what it has missed since its
    /// login. `inventory` is the generation that last added or removed a unit of the target, and
    /// `has_changed` tells whether that was after the login and the addition of this unit.
    pub(super) fn attach(
        &self,
        key: NexusKey,
        registrant: Registrant,
        (inventory, has_changed): (u64, bool),
        is_read_only: bool,
    ) {
        let mut state = self.lock();
        let mut nexus = NexusState {
            registrant,
            inventory,
            is_read_only,
            abort_epoch: 0,
            prevents_removal: false,
            attentions: SmallVec::new(),
        };
        nexus.establish_attention(Asc::POWER_ON_RESET_OR_BUS_DEVICE_RESET_OCCURRED);
        let missed: SmallVec<[Asc; MAX_ATTENTIONS]> = state.missed.of(key.nexus, &nexus.registrant).collect();
        missed.into_iter().for_each(|what| nexus.establish_attention(what));
        if has_changed {
            nexus.establish_attention(Asc::REPORTED_LUNS_DATA_HAS_CHANGED);
        }
        // No other nexus's view depends on this one.
        state.nexuses.insert(key, nexus);
    }

    /// Removes a nexus after its end.
    pub(super) fn detach(&self, key: NexusKey) {
        self.lock().nexuses.remove(&key);
        self.volume_state.release(Some(key));
    }

    /// Notifies a nexus that the target's units have changed, unless another session of the nexus
    /// has noticed that before.
    pub(super) fn on_inventory_change(&self, key: NexusKey, inventory: u64) {
        self.change(|state| {
            if let Some(nexus) = state.nexus(key).filter(|nexus| nexus.inventory < inventory) {
                nexus.inventory = inventory;
                nexus.establish_attention(Asc::REPORTED_LUNS_DATA_HAS_CHANGED);
            }
        });
    }

    /// Notifies a nexus that the WP bit of its mode parameter header has changed, unless another
    /// session of the nexus has noticed that before.
    pub(super) fn on_protection_change(&self, key: NexusKey, is_read_only: bool) {
        self.change(|state| {
            if let Some(nexus) = state.nexus(key).filter(|nexus| nexus.is_read_only != is_read_only) {
                nexus.is_read_only = is_read_only;
                nexus.establish_attention(Asc::MODE_PARAMETERS_CHANGED);
            }
        });
    }

    /// SAM-5, I_T nexus loss: clears the state of the nexus and establishes a unit attention.
    pub(super) fn on_nexus_loss(&self, key: NexusKey) {
        self.volume_state.release(Some(key));
        self.change(|state| {
            if let Some(nexus) = state.nexus(key) {
                nexus.prevents_removal = false;
                nexus.abort_tasks();
                nexus.establish_attention(Asc::I_T_NEXUS_LOSS_OCCURRED);
            }
        });
    }

    /// Makes the medium removable or fixed, and notifies the initiators. A fixed medium is loaded.
    pub fn set_removable(&self, removable: bool) {
        if self.read_state(|state| state.removable) == removable {
            return;
        }
        self.change(|state| {
            state.removable = removable;
            state.ejected &= removable;
            state.establish_attention_for_all(None, Asc::INQUIRY_DATA_HAS_CHANGED);
        });
    }

    /// Adds ports that provide access to the unit.
    pub(super) fn add_ports(&self, ports: &[TargetPort]) {
        let known = ports.iter().map(|port| (port.name.clone(), port.relative_id));
        self.change(|state| state.ports.extend(known));
    }

    /// SAM-5 §6.3.3, logical unit reset: clears the state that lasts until a reset.
    pub(super) fn reset(&self) {
        self.volume_state.release(None);
        self.change(UnitState::reset);
    }

    /// The view of a nexus, with its generation. The nexus need not have state in the unit.
    /// `is_read_only` is the write protection of its LUN.
    pub(super) fn view(&self, key: NexusKey, nexus: &ItNexus, is_read_only: bool) -> (u64, NexusView) {
        // Lock order: the volume's state is read before the unit's lock is taken.
        let asked = self.generation();
        let mut info = self.info();
        info.read_only |= is_read_only;
        let registrant = nexus.registrant();
        let (access, is_reserved_by_other, closed) = self.volume_state.with_table(|table| {
            if table.serving == ServingState::Standby && !table.is_retired {
                // The reservations are those of the process that serves the volume.
                return (BlockAccess::ALL, false, None);
            }
            let is_reserved_by_other = table.reserved_by.is_some_and(|holder| holder != key);
            let access = table.reservations.access(Some(&registrant));
            // A sanitize operation through another unit, or a volume that is no longer served.
            let sanitizing = table.is_closed.then_some(SANITIZING);
            (access, is_reserved_by_other, if table.is_retired { Some(UNIT_REMOVED) } else { sanitizing })
        });
        let mut state = self.lock();
        // A change in between leads to another refresh.
        let mut generation = asked;
        if state.record_size(info.size, Some(key)) {
            let before = self.generation.fetch_add(1, Ordering::Release);
            if before == asked {
                generation = asked.wrapping_add(1);
            }
        }
        // Disks have no blocks of fewer than 512 bytes.
        let block_len = info.logical_block.max(512);
        let (abort_epoch, has_attention) =
            state.nexus(key).map_or((0, false), |own| (own.abort_epoch, !own.attentions.is_empty()));
        let port = state.port(nexus.target_port.group);
        let view = NexusView {
            is_reserved: is_reserved_by_other || access != BlockAccess::ALL,
            access,
            is_reserved_by_other,
            abort_epoch,
            block_len,
            blocks: info.size.checked_div(block_len.into()).unwrap_or(0),
            has_attention,
            descriptor_sense: state.descriptor_sense,
            write_protected: state.write_protected,
            sanitizing: match &state.sanitize {
                Some(sanitize) => Some(sanitize.sense()),
                None => closed,
            },
            not_ready: state.not_ready(port),
            is_served: state.serving == ServingState::Active,
            port,
            info,
        };
        (generation, view)
    }

    /// Takes the oldest unit attention of a nexus.
    pub(super) fn take_attention(&self, key: NexusKey) -> Option<Asc> {
        self.change(|state| {
            let nexus = state.nexus(key)?;
            (!nexus.attentions.is_empty()).then(|| nexus.attentions.remove(0))
        })
    }

    fn lock(&self) -> MutexGuard<'_, UnitState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watcher for LogicalUnit {
    fn on_change(&self, change: &Change<'_>) {
        if matches!(change, Change::Serving(ServingState::Standby)) {
            self.tokens.cancel_all();
        }
        self.change(|state| match change {
            Change::Reservations { notices, aborts } => {
                for (registrant, notice) in *notices {
                    state.notify_registrant(registrant, *notice, *aborts);
                }
            }
            Change::Size => {
                state.record_size(self.volume_state.volume().info().size, None);
            }
            Change::Serving(serving) => {
                if *serving == ServingState::Standby {
                    // The data may change elsewhere, and an operation ends with its epoch.
                    (state.erased, state.sanitize) = (None, None);
                }
                if std::mem::replace(&mut state.serving, *serving) != *serving {
                    state.establish_attention_for_all(None, Asc::ASYMMETRIC_ACCESS_STATE_CHANGED);
                }
            }
        });
    }
}

impl UnitState {
    /// Notifies all nexuses of a registrant of a change by others.
    fn notify_registrant(&mut self, registrant: &Registrant, notice: Notice, aborts: bool) {
        let asc = match notice {
            Notice::ReservationsPreempted => Asc::RESERVATIONS_PREEMPTED,
            Notice::RegistrationsPreempted => Asc::REGISTRATIONS_PREEMPTED,
            Notice::ReservationsReleased => Asc::RESERVATIONS_RELEASED,
        };
        if registrant.nvme_host().is_none() {
            self.missed.record_for(registrant, asc);
        }
        for nexus in self.nexuses.values_mut().filter(|nexus| nexus.registrant == *registrant) {
            nexus.establish_attention(asc);
            if aborts && notice == Notice::RegistrationsPreempted {
                nexus.abort_tasks();
            }
        }
    }

    pub(super) fn nexus(&mut self, key: NexusKey) -> Option<&mut NexusState> {
        self.nexuses.get_mut(&key)
    }

    /// Whether background work is unclaimed.
    pub(super) fn has_background(&self) -> bool {
        self.sanitize.as_ref().is_some_and(Sanitize::is_unclaimed)
    }

    /// ALUA state of a target port group.
    fn port(&self, group: u16) -> AccessState {
        self.group_state(group).access
    }

    /// Whether this process serves the volume.
    pub(super) fn is_served(&self) -> bool {
        self.serving == ServingState::Active
    }

    /// State of a target port group.
    pub(super) fn group_state(&self, group: u16) -> GroupState {
        self.access_states.get(&group).copied().unwrap_or_default().while_serving(self.serving)
    }

    fn not_ready(&self, port: AccessState) -> Option<Sense> {
        if let Some(sense) = alua::not_ready(port) {
            return Some(sense);
        }
        self.ejected.then_some(Sense::new(SenseKey::NOT_READY, Asc::MEDIUM_NOT_PRESENT))
    }

    fn reset(&mut self) {
        self.nexuses.values_mut().for_each(|nexus| nexus.prevents_removal = false);
        (self.descriptor_sense, self.write_protected) = (false, false);
        self.abort_all_tasks();
        self.establish_attention_for_all(None, Asc::BUS_DEVICE_RESET_FUNCTION_OCCURRED);
    }

    /// Aborts the tasks of all nexuses.
    pub(super) fn abort_all_tasks(&mut self) {
        self.nexuses.values_mut().for_each(NexusState::abort_tasks);
    }

    /// Establishes a unit attention for all nexuses but `except`.
    pub(super) fn establish_attention_for_all(&mut self, except: Option<NexusKey>, what: Asc) {
        self.missed.record(what);
        for (_, nexus) in self.nexuses.iter_mut().filter(|(key, _)| Some(**key) != except) {
            nexus.establish_attention(what);
        }
    }

    /// Records the volume's size; establishes unit attentions and returns `true` if it has changed.
    fn record_size(&mut self, size: u64, except: Option<NexusKey>) -> bool {
        let is_other = self.size != 0 && self.size != size;
        if is_other {
            self.establish_attention_for_all(except, Asc::CAPACITY_DATA_HAS_CHANGED);
        }
        self.size = size;
        is_other
    }
}

impl NexusState {
    /// Aborts the nexus's tasks: each ends with TASK ABORTED at its next step.
    pub(super) fn abort_tasks(&mut self) {
        self.abort_epoch = self.abort_epoch.wrapping_add(1);
    }

    pub(super) fn establish_attention(&mut self, what: Asc) {
        // SAM-5 §5.14: a repeated condition adds nothing, and a reset supersedes all older
        // conditions.
        if is_reset(what) {
            self.attentions.clear();
        }
        if !self.attentions.contains(&what) {
            if self.attentions.len() == MAX_ATTENTIONS {
                self.attentions.remove(0);
            }
            self.attentions.push(what);
        }
    }
}

/// NOT READY sense data of a unit during a sanitize operation.
pub(super) const SANITIZING: Sense = Sense::new(SenseKey::NOT_READY, Asc::SANITIZE_IN_PROGRESS);
/// NOT READY sense data of a unit during a format.
pub(super) const FORMATTING: Sense = Sense::new(SenseKey::NOT_READY, Asc::FORMAT_IN_PROGRESS);
/// Sense data of a unit whose volume is no longer served.
pub(super) const UNIT_REMOVED: Sense = Sense::new(SenseKey::ILLEGAL_REQUEST, Asc::LOGICAL_UNIT_NOT_SUPPORTED);
/// Maximum number of pending unit attentions of a nexus; beyond it the oldest is dropped.
const MAX_ATTENTIONS: usize = 8;
