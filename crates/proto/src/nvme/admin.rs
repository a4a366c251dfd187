//! The admin queue of a controller: everything but I/O (Base 2.0 §5).

use super::association::{AdminPlace, Host};
use super::identify::{self, Asker};
use super::log_page;
use super::property::Properties;
use super::subsystem::Subsystem;
use super::{MAX_EVENT_REQUESTS, MAX_IO_QUEUES, Outcome};
use blockmux_volume::{Seg, SgList};
use blockmux_wire::nvme::Sqe;
use blockmux_wire::nvme::feature::*;
use blockmux_wire::nvme::opcode::AdminOpcode;
use blockmux_wire::nvme::status::Status;
use std::sync::Arc;
use std::time::Duration;

/// A controller, where its admin queue is.
pub(crate) struct AdminQueue {
    pub(crate) subsystem: Arc<Subsystem>,
    pub(crate) place: AdminPlace,
    pub(crate) properties: Properties,
    pub(crate) host: Host,
    /// Data that a command's capsule on an I/O queue may have, in bytes.
    in_capsule: usize,
    /// Keep Alive Timeout, in milliseconds; 0 is none.
    kato_ms: u32,
    event_configuration: u32,
    behavior: [u8; HOST_BEHAVIOR_LEN],
    timestamp: [u8; 8],
    /// Asynchronous Event Requests that wait, by their places in the transport's table.
    events: Vec<usize>,
}

/// What becomes of a command.
pub(crate) enum Admin {
    Done(Outcome),
    /// It waits for an event.
    Held,
    /// It aborts another command, which waits for an event: both are over.
    Aborted(usize),
}

impl AdminQueue {
    pub(crate) fn new(
        subsystem: Arc<Subsystem>,
        place: AdminPlace,
        host: Host,
        in_capsule: usize,
        kato_ms: u32,
    ) -> AdminQueue {
        AdminQueue {
            subsystem,
            place,
            properties: Properties::default(),
            host,
            in_capsule,
            kato_ms,
            event_configuration: 0,
            behavior: [0; HOST_BEHAVIOR_LEN],
            timestamp: [0; 8],
            events: Vec::new(),
        }
    }

    /// How long the host may be silent: its timeout, in whole units of KAS, and one more, since commands and clocks
    /// take their time.
    pub(crate) fn keep_alive(&self) -> Option<Duration> {
        let units = self.kato_ms.div_ceil(KAS_MS).saturating_add(1);
        (self.kato_ms > 0).then(|| Duration::from_millis(units.saturating_mul(KAS_MS).into()))
    }

    /// The data that the host sends with this command, in bytes.
    pub(crate) fn data_out(sqe: &Sqe) -> usize {
        match AdminOpcode(sqe.opcode) {
            AdminOpcode::SET_FEATURES => match FeatureId(sqe.cdw10.get() as u8) {
                FeatureId::HOST_BEHAVIOR_SUPPORT => HOST_BEHAVIOR_LEN,
                FeatureId::TIMESTAMP => 8,
                _ => 0,
            },
            _ => 0,
        }
    }

    /// Carries a command out. `slot` is its place in the transport's table, `find` finds the place of the admin command
    /// with a CID, and `discovery` makes the discovery log.
    pub(crate) fn execute(
        &mut self,
        sqe: &Sqe,
        data: &SgList,
        slot: usize,
        find: &dyn Fn(u16) -> Option<usize>,
        discovery: &dyn Fn() -> Vec<u8>,
    ) -> Admin {
        if !self.properties.is_ready() {
            return Admin::Done(Outcome::failure(Status::COMMAND_SEQUENCE_ERROR));
        }
        let opcode = AdminOpcode(sqe.opcode);
        let asker = Asker { cntlid: self.place.cntlid, host: &self.host, in_capsule: self.in_capsule };
        let outcome = match opcode {
            AdminOpcode::IDENTIFY => match identify::page(&self.subsystem, &asker, sqe) {
                Ok(page) => Outcome::data(Seg::from_slice(&page).into(), 0),
                Err(status) => Outcome::failure(status),
            },
            AdminOpcode::GET_LOG_PAGE => log_page::part(&self.subsystem, sqe, discovery),
            AdminOpcode::KEEP_ALIVE => Outcome::success(0),
            AdminOpcode::ASYNC_EVENT_REQUEST if self.events.len() >= MAX_EVENT_REQUESTS => {
                Outcome::failure(Status::ASYNCHRONOUS_EVENT_REQUEST_LIMIT_EXCEEDED)
            }
            AdminOpcode::ASYNC_EVENT_REQUEST => {
                self.events.push(slot);
                return Admin::Held;
            }
            AdminOpcode::SET_FEATURES => self.set_feature(sqe, data),
            AdminOpcode::GET_FEATURES => self.get_feature(sqe),
            AdminOpcode::ABORT if !self.subsystem.is_discovery => return self.abort(sqe, find),
            _ => Outcome::failure(Status::INVALID_COMMAND_OPCODE),
        };
        Admin::Done(outcome)
    }

    /// The places of all requests for events, which wait no more.
    pub(crate) fn take_events(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.events)
    }

    /// Abort: of the admin queue only those commands are there long enough that wait for events. Commands of I/O
    /// queues are on other cores, and are left alone: bit 0 of the result says so.
    fn abort(&mut self, sqe: &Sqe, find: &dyn Fn(u16) -> Option<usize>) -> Admin {
        let [sqid_low, sqid_high, cid_low, cid_high] = sqe.cdw10.get().to_le_bytes();
        let (sqid, cid) =
            (u16::from_le_bytes([sqid_low, sqid_high]), u16::from_le_bytes([cid_low, cid_high]));
        let found = if sqid == 0 { find(cid) } else { None };
        let place = found.and_then(|slot| self.events.iter().position(|&event| event == slot));
        match place {
            Some(place) => Admin::Aborted(self.events.swap_remove(place)),
            None => Admin::Done(Outcome::success(1)),
        }
    }

    fn set_feature(&mut self, sqe: &Sqe, data: &SgList) -> Outcome {
        if sqe.cdw10.get() & SAVE != 0 {
            return Outcome::failure(Status::FEATURE_IDENTIFIER_NOT_SAVEABLE);
        }
        let value = sqe.cdw11.get();
        // The low byte.
        let feature = FeatureId(sqe.cdw10.get() as u8);
        if !self.has_feature(feature) {
            return Outcome::failure(Status::INVALID_FIELD_IN_COMMAND);
        }
        match feature {
            FeatureId::NUMBER_OF_QUEUES => {
                let (submission, completion) = (value & 0xffff, value >> 16);
                if submission == 0xffff || completion == 0xffff {
                    return Outcome::failure(Status::INVALID_FIELD_IN_COMMAND);
                }
                return Outcome::success(NUMBER_OF_QUEUES.into());
            }
            FeatureId::KEEP_ALIVE_TIMER => self.kato_ms = value,
            FeatureId::ASYNCHRONOUS_EVENT_CONFIGURATION => self.event_configuration = value,
            FeatureId::HOST_BEHAVIOR_SUPPORT => data.copy_to(&mut self.behavior),
            FeatureId::TIMESTAMP => data.copy_to(&mut self.timestamp),
            // The volume's cache is on or not there, and everything else is as it is.
            _ if self.current(feature) == Some(value) => {}
            _ => return Outcome::failure(Status::FEATURE_NOT_CHANGEABLE),
        }
        Outcome::success(0)
    }

    fn get_feature(&self, sqe: &Sqe) -> Outcome {
        // The low byte, and three bits.
        let (feature, select) = (FeatureId(sqe.cdw10.get() as u8), Select((sqe.cdw10.get() >> 8 & 7) as u8));
        if !self.has_feature(feature) || select.0 > Select::SUPPORTED_CAPABILITIES.0 {
            return Outcome::failure(Status::INVALID_FIELD_IN_COMMAND);
        }
        if select == Select::SUPPORTED_CAPABILITIES {
            let is_changeable = matches!(
                feature,
                FeatureId::KEEP_ALIVE_TIMER
                    | FeatureId::ASYNCHRONOUS_EVENT_CONFIGURATION
                    | FeatureId::HOST_BEHAVIOR_SUPPORT
                    | FeatureId::TIMESTAMP
                    | FeatureId::NUMBER_OF_QUEUES
            );
            return Outcome::success(if is_changeable { CAPABILITY_CHANGEABLE } else { 0 }.into());
        }
        match feature {
            FeatureId::HOST_BEHAVIOR_SUPPORT => Outcome::data(Seg::from_slice(&self.behavior).into(), 0),
            FeatureId::TIMESTAMP => Outcome::data(Seg::from_slice(&self.timestamp).into(), 0),
            FeatureId::HOST_IDENTIFIER if sqe.cdw11.get() & EXHID == 0 => {
                // Fabrics have identifiers of 128 bits only.
                Outcome::failure(Status::INVALID_FIELD_IN_COMMAND)
            }
            FeatureId::HOST_IDENTIFIER => Outcome::data(Seg::from_slice(&self.host.id).into(), 0),
            _ => Outcome::success(self.current(feature).unwrap_or_default().into()),
        }
    }

    fn has_feature(&self, feature: FeatureId) -> bool {
        let is_for_all =
            matches!(feature, FeatureId::ASYNCHRONOUS_EVENT_CONFIGURATION | FeatureId::KEEP_ALIVE_TIMER);
        let is_with_data = matches!(
            feature,
            FeatureId::HOST_BEHAVIOR_SUPPORT | FeatureId::TIMESTAMP | FeatureId::HOST_IDENTIFIER
        );
        is_for_all || !self.subsystem.is_discovery && (is_with_data || self.current(feature).is_some())
    }

    /// The value of a feature without data.
    fn current(&self, feature: FeatureId) -> Option<u32> {
        let has_cache = || self.subsystem.namespaces.iter().any(|namespace| namespace.info().write_cache);
        match feature {
            FeatureId::ARBITRATION
            | FeatureId::POWER_MANAGEMENT
            | FeatureId::TEMPERATURE_THRESHOLD
            | FeatureId::ERROR_RECOVERY
            | FeatureId::WRITE_ATOMICITY_NORMAL
            | FeatureId::IO_COMMAND_SET_PROFILE => Some(0),
            FeatureId::VOLATILE_WRITE_CACHE => Some(if has_cache() { WCE } else { 0 }),
            FeatureId::NUMBER_OF_QUEUES => Some(NUMBER_OF_QUEUES),
            FeatureId::ASYNCHRONOUS_EVENT_CONFIGURATION => Some(self.event_configuration),
            FeatureId::KEEP_ALIVE_TIMER => Some(self.kato_ms),
            _ => None,
        }
    }
}

/// As many submission as completion queues, each less one.
const NUMBER_OF_QUEUES: u32 = (MAX_IO_QUEUES as u32 - 1) << 16 | (MAX_IO_QUEUES as u32 - 1);
/// KAS in milliseconds.
const KAS_MS: u32 = 1000;
