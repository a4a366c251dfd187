//! The admin queue of a controller: all commands except I/O (Base 2.0 §5).

use super::association::{AdminQueueGuard, HostIdentity};
use super::event_queue::{AbortReply, QueueEvent};
use super::events::Events;
use super::identify::{self, IdentifyContext};
use super::io::reach;
use super::log_page;
use super::property::Properties;
use super::subsystem::{Namespace, NamespaceView, Subsystem};
use super::temperature::TemperatureThresholds;
use super::{MAX_ABORTS, MAX_EVENT_REQUESTS, MAX_IO_QUEUES, NvmeOutcome};
use crate::volume_state::{Epoch, Notices, ReservationChange};
use blockmux_volume::{Seg, SgList};
use blockmux_wire::nvme::feature::*;
use blockmux_wire::nvme::opcode::AdminOpcode;
use blockmux_wire::nvme::status::NvmeStatus;
use blockmux_wire::nvme::{NSID_ALL, Sqe};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A controller. It lives on the core of its admin queue.
pub(crate) struct AdminQueue {
    pub(crate) subsystem: Arc<Subsystem>,
    pub(crate) guard: AdminQueueGuard,
    pub(crate) properties: Properties,
    pub(crate) host: HostIdentity,
    /// The namespaces that are visible to the host.
    view: NamespaceView,
    /// Identifier of the port that the host connected to.
    port: u16,
    /// The epoch in which the host connected.
    epoch: Epoch,
    /// Longest in-capsule data on I/O queues, in bytes.
    in_capsule: usize,
    /// SGL support of the transport, as in Identify Controller.
    sgls: u32,
    /// Keep Alive Timeout, in milliseconds; 0 for none.
    kato_ms: u32,
    /// Keep Alive Timeout of Connect, which is the default of the feature.
    connect_kato_ms: u32,
    behavior: [u8; HOST_BEHAVIOR_LEN],
    pub(crate) events: Events,
    /// Commands that wait for another queue or for storage, by their slots in the command table.
    waiting: Vec<(usize, AdminWait)>,
}

/// What a command waits for.
enum AdminWait {
    /// The result of an Abort for another queue, and the deadline, which begins at the first poll.
    Abort(AbortReply, Option<Instant>),
    /// Set Features of Reservation Persistence, with the value.
    Persistence(ReservationChange, bool),
}

/// The result of executing a command.
pub(crate) enum AdminResult {
    Done(NvmeOutcome),
    /// The command waits for an event.
    AwaitsEvent,
    /// The command waits for [`AdminQueue::poll_waiting`].
    Waiting,
    /// The command has aborted an Asynchronous Event Request in this slot: both are complete.
    Aborted(usize),
}

impl AdminQueue {
    pub(crate) fn new(
        subsystem: Arc<Subsystem>,
        guard: AdminQueueGuard,
        (host, port): (HostIdentity, u16),
        (in_capsule, sgls): (usize, u32),
        kato_ms: u32,
    ) -> AdminQueue {
        AdminQueue {
            view: subsystem.view(&host.nqn),
            subsystem,
            guard,
            properties: Properties::default(),
            host,
            port,
            epoch: Epoch::current(),
            in_capsule,
            sgls,
            kato_ms,
            connect_kato_ms: kato_ms,
            behavior: [0; HOST_BEHAVIOR_LEN],
            events: Events::default(),
            waiting: Vec::new(),
        }
    }

    /// Longest time without traffic: the timeout in units of KAS, and one unit more for the
    /// duration of commands and for clock differences.
    pub(crate) fn keep_alive(&self) -> Option<Duration> {
        let units = self.kato_ms.div_ceil(KAS_MS).saturating_add(1);
        (self.kato_ms > 0).then(|| Duration::from_millis(units.saturating_mul(KAS_MS).into()))
    }

    /// Length of the host's data for this command, in bytes.
    pub(crate) fn data_out(sqe: &Sqe) -> usize {
        match AdminOpcode(sqe.opcode) {
            AdminOpcode::SET_FEATURES => match FeatureId(sqe.cdw10.get() as u8) {
                FeatureId::HOST_BEHAVIOR_SUPPORT => HOST_BEHAVIOR_LEN,
                _ => 0,
            },
            _ => 0,
        }
    }

    /// Executes a command. `slot` is its slot in the command table, `find` returns the slot of the
    /// admin command with a CID, and `discovery` creates the discovery log.
    pub(crate) fn execute(
        &mut self,
        sqe: &Sqe,
        data: &SgList,
        slot: usize,
        find: &dyn Fn(u16) -> Option<usize>,
        discovery: &dyn Fn() -> Vec<u8>,
    ) -> AdminResult {
        if !self.properties.is_ready() {
            return AdminResult::Done(NvmeOutcome::failure(NvmeStatus::COMMAND_SEQUENCE_ERROR));
        }
        if !self.subsystem.is_current(&self.view) {
            self.view = self.subsystem.view(&self.host.nqn);
        }
        let opcode = AdminOpcode(sqe.opcode);
        let (cntlid, in_capsule) = (self.guard.cntlid, self.in_capsule);
        let context = IdentifyContext { cntlid, host: &self.host, in_capsule, sgls: self.sgls };
        let outcome = match opcode {
            AdminOpcode::IDENTIFY => match identify::page(&self.subsystem, &self.view, &context, sqe) {
                Ok(page) => NvmeOutcome::data(Seg::from_slice(&page).into(), 0),
                Err(status) => NvmeOutcome::failure(status),
            },
            AdminOpcode::GET_LOG_PAGE => {
                let features: Vec<FeatureId> =
                    (0..=u8::MAX).map(FeatureId).filter(|feature| self.has_feature(*feature)).collect();
                let logs = (&mut self.events, &*self.guard.errors);
                let has = |feature| features.contains(&feature);
                log_page::part((&self.subsystem, &self.view), logs, &has, (self.port, sqe), discovery)
            }
            AdminOpcode::KEEP_ALIVE => NvmeOutcome::success(0),
            AdminOpcode::ASYNC_EVENT_REQUEST if self.events.waiting.len() >= MAX_EVENT_REQUESTS => {
                NvmeOutcome::failure(NvmeStatus::ASYNCHRONOUS_EVENT_REQUEST_LIMIT_EXCEEDED)
            }
            AdminOpcode::ASYNC_EVENT_REQUEST => {
                self.events.waiting.push_back(slot);
                return AdminResult::AwaitsEvent;
            }
            AdminOpcode::SET_FEATURES => return self.set_feature(sqe, data, slot),
            AdminOpcode::GET_FEATURES => self.get_feature(sqe),
            AdminOpcode::ABORT if !self.subsystem.is_discovery => return self.abort(sqe, slot, find),
            _ => NvmeOutcome::failure(NvmeStatus::INVALID_COMMAND_OPCODE),
        };
        AdminResult::Done(outcome)
    }

    /// Handles an event from another core.
    pub(crate) fn on_event(&mut self, event: &QueueEvent) {
        let is_of_another = match event {
            QueueEvent::AnaChanged { port } => port.is_some_and(|port| port != self.port),
            QueueEvent::NamespaceChanged(nsid) | QueueEvent::Reservation { nsid, .. } => {
                !self.subsystem.shows(&self.host.nqn, *nsid)
            }
            _ => false,
        };
        if self.properties.is_ready() && !is_of_another {
            self.events.on_event(event);
        }
    }

    /// Whether a command waits for [`AdminQueue::poll_waiting`].
    pub(crate) fn waits(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// The next waiting command that is complete: its slot and outcome.
    pub(crate) fn poll_waiting(&mut self, now: Instant) -> Option<(usize, NvmeOutcome)> {
        let outcomes = self.waiting.iter_mut().map(|(_, waiting)| waiting.outcome_by(now));
        let (place, outcome) = outcomes.enumerate().find_map(|(place, outcome)| Some((place, outcome?)))?;
        Some((self.waiting.remove(place).0, outcome))
    }

    /// Executes Abort. On the admin queue, only event requests stay outstanding long enough to be
    /// aborted. An I/O queue may be on another core and gets an event. Bit 0 of the result says
    /// that the command was not aborted.
    fn abort(&mut self, sqe: &Sqe, slot: usize, find: &dyn Fn(u16) -> Option<usize>) -> AdminResult {
        let [sqid_low, sqid_high, cid_low, cid_high] = sqe.cdw10.get().to_le_bytes();
        let (sqid, cid) =
            (u16::from_le_bytes([sqid_low, sqid_high]), u16::from_le_bytes([cid_low, cid_high]));
        if sqid != 0 {
            let aborts = self.waiting.iter().filter(|(_, waiting)| matches!(waiting, AdminWait::Abort(..)));
            if aborts.count() >= MAX_ABORTS {
                return AdminResult::Done(NvmeOutcome::retry(NvmeStatus::ABORT_COMMAND_LIMIT_EXCEEDED));
            }
            return match self.guard.abort(sqid, cid) {
                Some(reply) => self.wait(slot, AdminWait::Abort(reply, None)),
                None => AdminResult::Done(NvmeOutcome::success(NOT_ABORTED)),
            };
        }
        match find(cid).filter(|&event| self.events.abort(event)) {
            Some(event) => AdminResult::Aborted(event),
            None => AdminResult::Done(NvmeOutcome::success(NOT_ABORTED)),
        }
    }

    fn wait(&mut self, slot: usize, mut waiting: AdminWait) -> AdminResult {
        match waiting.outcome() {
            Some(outcome) => AdminResult::Done(outcome),
            None => {
                self.waiting.push((slot, waiting));
                AdminResult::Waiting
            }
        }
    }

    fn set_feature(&mut self, sqe: &Sqe, data: &SgList, slot: usize) -> AdminResult {
        // Bits 7:0.
        if FeatureId(sqe.cdw10.get() as u8) != FeatureId::RESERVATION_PERSISTENCE
            || self.subsystem.is_discovery
        {
            return AdminResult::Done(self.set_plain_feature(sqe, data));
        }
        if sqe.cdw10.get() & SAVE != 0 {
            return AdminResult::Done(NvmeOutcome::failure(NvmeStatus::FEATURE_IDENTIFIER_NOT_SAVEABLE));
        }
        match self.set_persistence(sqe.nsid.get(), sqe.cdw11.get() & PTPL != 0) {
            Ok(setting) => self.wait(slot, setting),
            Err(status) => AdminResult::Done(NvmeOutcome::refusal(status)),
        }
    }

    /// Sets Reservation Persistence: whether reservations of a namespace survive a restart.
    fn set_persistence(&self, nsid: u32, persists: bool) -> Result<AdminWait, NvmeStatus> {
        let volume_state = &self.of_one_namespace(nsid)?.volume_state;
        if persists && !volume_state.has_shared_state() {
            return Err(NvmeStatus::INVALID_FIELD_IN_COMMAND);
        }
        Ok(AdminWait::Persistence(ReservationChange::new(volume_state, self.epoch, false), persists))
    }

    /// The namespace of a namespace-specific feature, if it is accessible through the port (Base
    /// 2.0 §8.1.3).
    fn of_one_namespace(&self, nsid: u32) -> Result<&Namespace, NvmeStatus> {
        let namespace = self.view.namespace(nsid).ok_or(NvmeStatus::INVALID_NAMESPACE_OR_FORMAT)?;
        reach(&self.subsystem, namespace, self.port)?;
        Ok(namespace)
    }

    /// Sets the Reservation Notification Mask of one namespace or of all.
    fn set_mask(&mut self, nsid: u32, mask: u32) -> NvmeOutcome {
        if mask & !NOTIFICATION_MASK != 0 {
            return NvmeOutcome::failure(NvmeStatus::INVALID_FIELD_IN_COMMAND);
        }
        if nsid != NSID_ALL
            && let Err(status) = self.of_one_namespace(nsid)
        {
            return NvmeOutcome::refusal(status);
        }
        let all = self.view.iter().map(|namespace| namespace.nsid);
        all.filter(|&own| nsid == NSID_ALL || own == nsid).for_each(|own| self.events.set_mask(own, mask));
        NvmeOutcome::success(0)
    }

    fn set_plain_feature(&mut self, sqe: &Sqe, data: &SgList) -> NvmeOutcome {
        if sqe.cdw10.get() & SAVE != 0 {
            return NvmeOutcome::failure(NvmeStatus::FEATURE_IDENTIFIER_NOT_SAVEABLE);
        }
        let value = sqe.cdw11.get();
        // Bits 7:0.
        let feature = FeatureId(sqe.cdw10.get() as u8);
        if !self.has_feature(feature) {
            return NvmeOutcome::failure(NvmeStatus::INVALID_FIELD_IN_COMMAND);
        }
        if log_page::is_for_one_namespace(sqe)
            && !is_of_namespace(feature)
            && feature != FeatureId::ERROR_RECOVERY
        {
            return NvmeOutcome::failure(NvmeStatus::FEATURE_NOT_NAMESPACE_SPECIFIC);
        }
        match feature {
            FeatureId::NUMBER_OF_QUEUES => {
                let (submission, completion) = (value & 0xffff, value >> 16);
                if submission == 0xffff || completion == 0xffff {
                    return NvmeOutcome::failure(NvmeStatus::INVALID_FIELD_IN_COMMAND);
                }
                if self.guard.has_queues() {
                    return NvmeOutcome::failure(NvmeStatus::COMMAND_SEQUENCE_ERROR);
                }
                return NvmeOutcome::success(NUMBER_OF_QUEUES.into());
            }
            FeatureId::KEEP_ALIVE_TIMER => self.kato_ms = value,
            FeatureId::ASYNCHRONOUS_EVENT_CONFIGURATION => self.events.configuration = value,
            FeatureId::TEMPERATURE_THRESHOLD => {
                if let Err(status) = self.events.thresholds.set(value) {
                    return NvmeOutcome::failure(status);
                }
                self.events.on_thresholds();
            }
            FeatureId::RESERVATION_NOTIFICATION_MASK => return self.set_mask(sqe.nsid.get(), value),
            FeatureId::HOST_BEHAVIOR_SUPPORT => data.copy_to(&mut self.behavior),
            // Over fabrics, Connect sets it.
            FeatureId::HOST_IDENTIFIER => return NvmeOutcome::failure(NvmeStatus::COMMAND_SEQUENCE_ERROR),
            // Setting the current value succeeds, for instance that the volume's cache is enabled.
            _ if self.current(feature) == Some(value) => {}
            _ => return NvmeOutcome::failure(NvmeStatus::FEATURE_NOT_CHANGEABLE),
        }
        NvmeOutcome::success(0)
    }

    fn get_feature(&self, sqe: &Sqe) -> NvmeOutcome {
        // Bits 7:0 and 10:8.
        let (feature, select) = (FeatureId(sqe.cdw10.get() as u8), Select((sqe.cdw10.get() >> 8 & 7) as u8));
        if !self.has_feature(feature) || select.0 > Select::SUPPORTED_CAPABILITIES.0 {
            return NvmeOutcome::failure(NvmeStatus::INVALID_FIELD_IN_COMMAND);
        }
        if select == Select::SUPPORTED_CAPABILITIES {
            let is_changeable = matches!(
                feature,
                FeatureId::KEEP_ALIVE_TIMER
                    | FeatureId::ASYNCHRONOUS_EVENT_CONFIGURATION
                    | FeatureId::TEMPERATURE_THRESHOLD
                    | FeatureId::HOST_BEHAVIOR_SUPPORT
                    | FeatureId::NUMBER_OF_QUEUES
            );
            let own = if is_of_namespace(feature) {
                CAPABILITY_CHANGEABLE | CAPABILITY_NAMESPACE_SPECIFIC
            } else if is_changeable {
                CAPABILITY_CHANGEABLE
            } else {
                0
            };
            return NvmeOutcome::success(own.into());
        }
        // No feature can be saved, so that the saved value is the default.
        let is_default = select != Select::CURRENT;
        if is_of_namespace(feature) {
            return self
                .get_of_namespace(feature, sqe.nsid.get())
                .map_or_else(NvmeOutcome::refusal, |value| {
                    NvmeOutcome::success(if is_default { 0 } else { value })
                });
        }
        match feature {
            FeatureId::ASYNCHRONOUS_EVENT_CONFIGURATION if is_default => NvmeOutcome::success(0),
            FeatureId::KEEP_ALIVE_TIMER if is_default => NvmeOutcome::success(self.connect_kato_ms.into()),
            FeatureId::HOST_BEHAVIOR_SUPPORT if is_default => {
                NvmeOutcome::data(Seg::from_slice(&[0; HOST_BEHAVIOR_LEN]).into(), 0)
            }
            FeatureId::HOST_BEHAVIOR_SUPPORT => NvmeOutcome::data(Seg::from_slice(&self.behavior).into(), 0),
            FeatureId::HOST_IDENTIFIER if sqe.cdw11.get() & EXHID == 0 => {
                // Fabrics hosts have 128-bit identifiers only.
                NvmeOutcome::failure(NvmeStatus::INVALID_FIELD_IN_COMMAND)
            }
            FeatureId::HOST_IDENTIFIER => NvmeOutcome::data(Seg::from_slice(&self.host.id).into(), 0),
            FeatureId::TEMPERATURE_THRESHOLD => {
                let thresholds =
                    if is_default { TemperatureThresholds::default() } else { self.events.thresholds };
                let value = thresholds.get(sqe.cdw11.get());
                value.map_or_else(NvmeOutcome::failure, |value| NvmeOutcome::success(value.into()))
            }
            _ => NvmeOutcome::success(self.current(feature).unwrap_or_default().into()),
        }
    }

    fn get_of_namespace(&self, feature: FeatureId, nsid: u32) -> Result<u64, NvmeStatus> {
        let namespace = self.of_one_namespace(nsid)?;
        Ok(match feature {
            FeatureId::RESERVATION_NOTIFICATION_MASK => self.events.mask(nsid).into(),
            _ => namespace.volume_state.with_table(|table| table.reservations.persists).into(),
        })
    }

    fn has_feature(&self, feature: FeatureId) -> bool {
        let is_for_all =
            matches!(feature, FeatureId::ASYNCHRONOUS_EVENT_CONFIGURATION | FeatureId::KEEP_ALIVE_TIMER);
        let is_with_data = matches!(feature, FeatureId::HOST_BEHAVIOR_SUPPORT | FeatureId::HOST_IDENTIFIER);
        is_for_all
            || !self.subsystem.is_discovery
                && (is_with_data || is_of_namespace(feature) || self.current(feature).is_some())
    }

    /// The current value of a feature without data.
    fn current(&self, feature: FeatureId) -> Option<u32> {
        match feature {
            FeatureId::ARBITRATION
            | FeatureId::POWER_MANAGEMENT
            | FeatureId::TEMPERATURE_THRESHOLD
            | FeatureId::ERROR_RECOVERY
            | FeatureId::WRITE_ATOMICITY_NORMAL
            | FeatureId::IO_COMMAND_SET_PROFILE => Some(0),
            // The feature does not exist without a cache.
            FeatureId::VOLATILE_WRITE_CACHE => {
                self.view.iter().any(|namespace| namespace.has_cache).then_some(WCE)
            }
            FeatureId::NUMBER_OF_QUEUES => Some(NUMBER_OF_QUEUES),
            FeatureId::ASYNCHRONOUS_EVENT_CONFIGURATION => Some(self.events.configuration),
            FeatureId::KEEP_ALIVE_TIMER => Some(self.kato_ms),
            _ => None,
        }
    }
}

impl AdminWait {
    /// The outcome of the command, once it is known or the deadline has passed.
    fn outcome_by(&mut self, now: Instant) -> Option<NvmeOutcome> {
        let known = self.outcome();
        if let (None, AdminWait::Abort(reply, until)) = (&known, self) {
            let until = *until.get_or_insert_with(|| now.checked_add(ABORT_TIMEOUT).unwrap_or(now));
            return (now >= until).then(|| abort_outcome(reply.give_up()));
        }
        known
    }

    /// The outcome of the command, once it is known.
    fn outcome(&mut self) -> Option<NvmeOutcome> {
        match self {
            AdminWait::Abort(reply, _) => reply.was_aborted().map(abort_outcome),
            AdminWait::Persistence(change, persists) => {
                let changed = change.poll::<Infallible>(|_, reservations| {
                    reservations.persists = *persists;
                    Ok(Notices::new())
                });
                match changed {
                    Ok(is_made) => is_made.then(|| NvmeOutcome::success(0)),
                    Err(_) => Some(NvmeOutcome::failure(NvmeStatus::INTERNAL_ERROR)),
                }
            }
        }
    }
}

/// The outcome of an Abort.
fn abort_outcome(was_aborted: bool) -> NvmeOutcome {
    NvmeOutcome::success(if was_aborted { 0 } else { NOT_ABORTED })
}

/// Whether a feature is namespace specific.
fn is_of_namespace(feature: FeatureId) -> bool {
    matches!(feature, FeatureId::RESERVATION_NOTIFICATION_MASK | FeatureId::RESERVATION_PERSISTENCE)
}

/// Time limit of an Abort for a command whose data may never arrive, as in SPDK.
const ABORT_TIMEOUT: Duration = Duration::from_secs(1);

/// Bit 0 of the result of Abort.
const NOT_ABORTED: u64 = 1;
/// Number of submission and of completion queues, each 0's based.
const NUMBER_OF_QUEUES: u32 = (MAX_IO_QUEUES as u32 - 1) << 16 | (MAX_IO_QUEUES as u32 - 1);
/// KAS in milliseconds.
const KAS_MS: u32 = 1000;
