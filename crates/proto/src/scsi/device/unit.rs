//! A logical unit: a volume, and what every nexus shares about it beyond what all protocols do
//! ([`Served`]).
//!
//! [`LogicalUnit::generation`] grows with each change that some nexus must know of. A
//! [`DeviceServer`] keeps a [`View`] and takes the lock only when the generation is another than
//! the one its view was made of.
//!
//! [`DeviceServer`]: super::DeviceServer

use super::AccessState;
use super::alua::{self, AccessStates};
use super::nexus::{Nexus, TargetPort};
use super::sanitize::{Erased, Sanitize};

use super::tokens::Tokens;
use super::view::NexusView;
use crate::scsi::sense::Sense;
use crate::volume_state::{BlockAccess, Change, Holder, Notice, Registrant, VolumeState, Watcher};
use crate::volume_uuid::VolumeUuid;
use blockmux_volume::{Volume, VolumeInfo};
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// How a logical unit presents itself: its names in INQUIRY data and designators, and what it can
/// be asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitIdentity {
    /// T10 VENDOR IDENTIFICATION: 8 bytes of ASCII, filled up with spaces.
    pub vendor: [u8; 8],
    /// PRODUCT IDENTIFICATION, filled up with spaces.
    pub product: [u8; 16],
    /// PRODUCT REVISION LEVEL, filled up with spaces.
    pub revision: [u8; 4],
    /// The unit serial number in ASCII; the same on every path to the volume, and on no other
    /// volume.
    pub serial: String,
    /// The medium can be ejected and loaded: RMB of INQUIRY data.
    pub removable: bool,
    /// Refuse writes whatever the volume says.
    pub read_only: bool,
    /// NAA locally assigned identifier (SPC-5): the upper 4 bits are 3.
    pub naa: u64,
}

impl UnitIdentity {
    /// The identity of a volume of which nothing but a name is known.
    #[must_use]
    pub fn of(name: &str) -> UnitIdentity {
        UnitIdentity::of_volume(VolumeUuid::of_texts(&[name]))
    }

    /// The identity of the volume with this UUID.
    #[must_use]
    pub fn of_volume(uuid: VolumeUuid) -> UnitIdentity {
        UnitIdentity {
            vendor: *b"BLOCKMUX",
            product: *b"VOLUME          ",
            revision: *b"0001",
            serial: uuid.scsi_serial(),
            removable: false,
            read_only: false,
            naa: uuid.naa(),
        }
    }
}

/// A volume as a logical unit; all targets and sessions that lead to the volume share one.
pub struct LogicalUnit {
    pub(super) identity: UnitIdentity,
    pub(super) served: Arc<VolumeState>,
    generation: AtomicU64,
    /// Of its data.
    pub(super) tokens: Tokens,
    call: OnceLock<Box<dyn Fn() + Send + Sync>>,
    state: Mutex<UnitState>,
}

/// What nexuses share.
#[derive(Default)]
pub(super) struct UnitState {
    pub(super) nexuses: Vec<NexusState>,
    /// D_SENSE of the Control mode page.
    pub(super) descriptor_sense: bool,
    /// SWP of the Control mode page.
    pub(super) write_protected: bool,
    /// Of asymmetric access.
    pub(super) access_states: AccessStates,
    /// A sanitize operation that is not over.
    pub(super) sanitize: Option<Sanitize>,
    /// The last block erase that has succeeded.
    pub(super) erased: Option<Erased>,
    /// The medium of a removable unit is out.
    pub(super) ejected: bool,
    /// RELATIVE TARGET PORT IDENTIFIERs of all ports that lead here, by their names.
    pub(super) ports: BTreeMap<Arc<str>, u16>,
    /// The size at the last look, in bytes; 0: not looked yet.
    size: u64,
}

/// What a logical unit knows of one nexus.
pub(super) struct NexusState {
    pub(super) key: NexusKey,
    pub(super) who: Registrant,
    /// The target port group of its port.
    group: u16,
    /// Counts how often its tasks were aborted by others.
    abort_epoch: u32,
    /// PREVENT of its last PREVENT ALLOW MEDIUM REMOVAL.
    pub(super) prevents_removal: bool,
    attentions: SmallVec<[Asc; MAX_ATTENTIONS]>,
}

/// One nexus of a logical unit, as long as its session lasts.
pub(super) type NexusKey = Holder;

impl LogicalUnit {
    /// A logical unit over a volume that nothing else serves.
    #[must_use]
    pub fn new(identity: UnitIdentity, volume: Arc<dyn Volume>) -> Arc<LogicalUnit> {
        LogicalUnit::over(identity, &VolumeState::new(volume))
    }

    /// A logical unit over a volume that others may serve, too: other units, and other protocols.
    #[must_use]
    pub fn over(identity: UnitIdentity, served: &Arc<VolumeState>) -> Arc<LogicalUnit> {
        let unit = Arc::new(LogicalUnit {
            identity,
            served: served.clone(),
            generation: AtomicU64::new(0),
            tokens: Tokens::default(),
            call: OnceLock::new(),
            state: Mutex::default(),
        });
        let watcher: Weak<LogicalUnit> = Arc::downgrade(&unit);
        served.watch(watcher);
        unit
    }

    /// Has `call` called whenever there is work that no command carries on, from any thread: then
    /// somebody's device server has to be asked for it ([`DeviceServer::poll_background`]). Only
    /// the first call of this counts.
    ///
    /// [`DeviceServer::poll_background`]: super::DeviceServer::poll_background
    pub fn on_background(&self, call: impl Fn() + Send + Sync + 'static) {
        // Whoever came first serves the unit, too.
        let _ = self.call.set(Box::new(call));
    }

    /// There is work that no command carries on.
    pub(super) fn call_background(&self) {
        if let Some(call) = self.call.get() {
            call();
        }
    }

    /// A second has passed for tokens; answers whether to go on counting.
    pub(crate) fn count_second(&self) -> bool {
        self.tokens.tick()
    }

    /// In the one order that all threads agree on, as `Drain` wants it.
    #[inline]
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }

    pub(super) fn info(&self) -> VolumeInfo {
        let info = self.served.volume().info();
        VolumeInfo { read_only: info.read_only || self.identity.read_only, ..info }
    }

    /// Looks at the shared state.
    pub(super) fn look<R>(&self, look: impl FnOnce(&UnitState) -> R) -> R {
        look(&self.lock())
    }

    /// Changes the shared state, and has every nexus look again.
    pub(super) fn change<R>(&self, change: impl FnOnce(&mut UnitState) -> R) -> R {
        let mut state = self.lock();
        let result = change(&mut state);
        // Within the lock: who sees the new generation and then locks sees the new state.
        self.generation.fetch_add(1, Ordering::Release);
        result
    }

    /// Adds a nexus; its first command is told of the power on (SAM-5 §5.14).
    pub(super) fn attach(&self, nexus: &Nexus) -> NexusKey {
        let key = self.served.new_holder();
        self.change(|state| {
            state.nexuses.push(NexusState {
                key,
                who: nexus.registrant(),
                group: nexus.target_port.group,
                abort_epoch: 0,
                prevents_removal: false,
                attentions: SmallVec::new(),
            });
            state.attend(key, Asc::POWER_ON_RESET_OR_BUS_DEVICE_RESET_OCCURRED);
            key
        })
    }

    /// Forgets a nexus whose session is over.
    pub(super) fn detach(&self, key: NexusKey) {
        self.change(|state| state.nexuses.retain(|nexus| nexus.key != key));
        self.served.release(Some(key));
    }

    /// SAM-5, "I_T nexus loss": what a nexus has for itself is over, and it is told.
    pub(super) fn lose_nexus(&self, key: NexusKey) {
        self.served.release(Some(key));
        self.change(|state| {
            if let Some(nexus) = state.nexus(key) {
                nexus.prevents_removal = false;
                nexus.abort_tasks();
                nexus.attend(Asc::I_T_NEXUS_LOSS_OCCURRED);
            }
        });
    }

    /// Knows these ports from now on as ways that lead here.
    pub(super) fn add_ports(&self, ports: &[TargetPort]) {
        let known = ports.iter().map(|port| (port.name.clone(), port.relative_id));
        self.change(|state| state.ports.extend(known));
    }

    /// SAM-5 §6.3.3, logical unit reset: what only lasts until one goes.
    pub(super) fn reset(&self) {
        self.served.release(None);
        self.change(UnitState::reset);
    }

    /// The state as `key` sees it, and the generation that this is true for.
    pub(super) fn view(&self, key: NexusKey) -> (u64, NexusView) {
        // What is asked of the volume comes first: with the lock of the unit held, that of the
        // volume is not taken.
        let asked = self.generation();
        let info = self.info();
        let who = self.look(|state| state.who(key));
        let (access, is_reserved_by_other, closed) = self.served.look(|table| {
            let is_reserved_by_other = table.reserved_by.is_some_and(|holder| holder != key);
            let access = who.as_ref().map_or(BlockAccess::ALL, |who| table.reservations.access(Some(who)));
            // By way of another unit, or for good.
            let sanitizing = table.is_closed.then_some(SANITIZING);
            (access, is_reserved_by_other, if table.is_retired { Some(GONE) } else { sanitizing })
        });
        let mut state = self.lock();
        // A change in between leads to another look.
        let mut generation = asked;
        if state.see_size(info.size, Some(key)) {
            let before = self.generation.fetch_add(1, Ordering::Release);
            if before == asked {
                generation = asked.wrapping_add(1);
            }
        }
        // Blocks of fewer than 512 bytes are no blocks of a disk.
        let block_len = info.logical_block.max(512);
        let abort_epoch = state.nexus(key).map_or(0, |nexus| nexus.abort_epoch);
        let view = NexusView {
            is_reserved: is_reserved_by_other || access != BlockAccess::ALL,
            access,
            is_reserved_by_other,
            abort_epoch,
            block_len,
            blocks: info.size.checked_div(block_len.into()).unwrap_or(0),
            has_attention: state.nexus(key).is_some_and(|nexus| !nexus.attentions.is_empty()),
            descriptor_sense: state.descriptor_sense,
            write_protected: state.write_protected,
            sanitizing: match &state.sanitize {
                Some(sanitize) => Some(sanitize.sense()),
                None => closed,
            },
            has_background: state.has_background(),
            not_ready: state.not_ready(key),
            port: state.port(key),
            info,
        };
        (generation, view)
    }

    /// The state as a registrant's nexus sees it; `None` if it has none.
    pub(super) fn view_of(&self, who: &Registrant) -> Option<NexusView> {
        let key = self.look(|state| {
            let own = state.nexuses.iter().find(|nexus| nexus.who == *who);
            own.map(|nexus| nexus.key)
        });
        key.map(|key| self.view(key).1)
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
        self.change(|state| match change {
            Change::Reservations { notices, aborts } => {
                for (who, notice) in *notices {
                    state.tell(who, *notice, *aborts);
                }
            }
            Change::Size => {
                state.see_size(self.served.volume().info().size, None);
            }
        });
    }
}

impl UnitState {
    /// Tells every nexus of a registrant what others have done to it.
    fn tell(&mut self, who: &Registrant, notice: Notice, aborts: bool) {
        let asc = match notice {
            Notice::ReservationsPreempted => Asc::RESERVATIONS_PREEMPTED,
            Notice::RegistrationsPreempted => Asc::REGISTRATIONS_PREEMPTED,
            Notice::ReservationsReleased => Asc::RESERVATIONS_RELEASED,
        };
        for nexus in self.nexuses.iter_mut().filter(|nexus| nexus.who == *who) {
            nexus.attend(asc);
            if aborts && notice == Notice::RegistrationsPreempted {
                nexus.abort_tasks();
            }
        }
    }

    pub(super) fn nexus(&mut self, key: NexusKey) -> Option<&mut NexusState> {
        self.nexuses.iter_mut().find(|nexus| nexus.key == key)
    }

    fn has_background(&self) -> bool {
        self.sanitize.as_ref().is_some_and(Sanitize::is_abandoned)
    }

    fn who(&self, key: NexusKey) -> Option<Registrant> {
        self.nexuses.iter().find(|nexus| nexus.key == key).map(|nexus| nexus.who.clone())
    }

    /// The state of the nexus's target port group.
    fn port(&self, key: NexusKey) -> AccessState {
        let group = self.nexuses.iter().find(|nexus| nexus.key == key).map(|nexus| nexus.group);
        group.and_then(|group| self.access_states.get(&group)).copied().unwrap_or_default().access
    }

    fn not_ready(&self, key: NexusKey) -> Option<Sense> {
        if let Some(sense) = alua::not_ready(self.port(key)) {
            return Some(sense);
        }
        self.ejected.then_some(Sense::new(SenseKey::NOT_READY, Asc::MEDIUM_NOT_PRESENT))
    }

    fn reset(&mut self) {
        self.nexuses.iter_mut().for_each(|nexus| nexus.prevents_removal = false);
        (self.descriptor_sense, self.write_protected) = (false, false);
        self.abort_all_tasks();
        self.attend_all(None, Asc::BUS_DEVICE_RESET_FUNCTION_OCCURRED);
    }

    /// Aborts the tasks of every nexus.
    pub(super) fn abort_all_tasks(&mut self) {
        self.nexuses.iter_mut().for_each(NexusState::abort_tasks);
    }

    /// Establishes a unit attention for one nexus.
    pub(super) fn attend(&mut self, key: NexusKey, what: Asc) {
        if let Some(nexus) = self.nexus(key) {
            nexus.attend(what);
        }
    }

    /// Establishes a unit attention for every nexus but `except`.
    pub(super) fn attend_all(&mut self, except: Option<NexusKey>, what: Asc) {
        for nexus in self.nexuses.iter_mut().filter(|nexus| Some(nexus.key) != except) {
            nexus.attend(what);
        }
    }

    /// Tells every nexus but `except` if the size is another than it was; answers whether it is.
    fn see_size(&mut self, size: u64, except: Option<NexusKey>) -> bool {
        let is_other = self.size != 0 && self.size != size;
        if is_other {
            self.attend_all(except, Asc::CAPACITY_DATA_HAS_CHANGED);
        }
        self.size = size;
        is_other
    }
}

impl NexusState {
    /// Its tasks end with TASK ABORTED, each with its next step.
    pub(super) fn abort_tasks(&mut self) {
        self.abort_epoch = self.abort_epoch.wrapping_add(1);
    }

    pub(super) fn attend(&mut self, what: Asc) {
        // SAM-5 §5.14: the same condition again adds nothing; and a reset makes all older ones
        // meaningless.
        let is_reset = what.0 >> 8 == Asc::POWER_ON_RESET_OR_BUS_DEVICE_RESET_OCCURRED.0 >> 8;
        if is_reset {
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

/// Why a unit is not ready whose volume is sanitized.
pub(super) const SANITIZING: Sense = Sense::new(SenseKey::NOT_READY, Asc::SANITIZE_IN_PROGRESS);
/// Why nothing is done with a unit whose volume is not served any more.
const GONE: Sense = Sense::new(SenseKey::ILLEGAL_REQUEST, Asc::LOGICAL_UNIT_NOT_SUPPORTED);
/// The most unit attentions that wait for a nexus; beyond, the oldest is lost.
const MAX_ATTENTIONS: usize = 8;
