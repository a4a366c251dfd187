//! Reservation Register, Acquire, Release and Report (NVMe Base Specification, "Reservations").
//!
//! The reservation table belongs to the volume and is shared with SCSI (decision 12). Its terms and
//! types are those of SPC, and this file translates them. A registrant is a host, by its NQN and
//! its 128-bit identifier (decision 70), across all controllers and subsystems.

use super::NvmeOutcome;
use super::io::{IoStep, QueueOrigin};
use super::subsystem::Namespace;
use crate::volume_state::{
    Drain, Epoch, NotChanged, Notice, Notices, Preempt, Register, Registrant, ReservationChange,
    ReservationRefused, Reservations, VolumeState,
};
use blockmux_volume::{Seg, SgList};
use blockmux_wire::nvme::Sqe;
use blockmux_wire::nvme::opcode::NvmOpcode;
use blockmux_wire::nvme::reservation::*;
use blockmux_wire::nvme::status::NvmeStatus;
use blockmux_wire::scsi::reservation::ScsiReservationType as SharedType;
use sha2::{Digest, Sha256};
use std::sync::Arc;
use zerocopy::{FromZeros, IntoBytes};

/// An outstanding reservation command.
pub(super) struct ReservationCommand {
    volume_state: Arc<VolumeState>,
    who: Registrant,
    /// The epoch in which the host's session began.
    epoch: Epoch,
    wanted: ReservationAction,
    /// The host's data.
    keys: ReservationKeys,
    /// The change, until it is made.
    change: Option<ReservationChange>,
    /// The change was made, and I/O that began before is ending.
    barrier: Option<Drain>,
}

#[derive(Clone, Copy)]
enum ReservationAction {
    Register {
        action: RegisterAction,
        ignores_key: bool,
        persists: Option<bool>,
    },
    Acquire {
        action: AcquireAction,
        kind: SharedType,
    },
    Release {
        action: ReleaseAction,
        kind: SharedType,
    },
    /// Report, with the length of the requested data in bytes.
    Report {
        len: usize,
    },
}

impl ReservationCommand {
    /// Checks a command of a host.
    pub(super) fn parse(
        namespace: &Namespace,
        origin: &QueueOrigin,
        sqe: &Sqe,
    ) -> Result<ReservationCommand, NvmeStatus> {
        let cdw10 = sqe.cdw10.get();
        // Bits 2:0, and IEKEY.
        let (action, ignores_key) = ((cdw10 & 7) as u8, cdw10 & IEKEY != 0);
        let wanted = match NvmOpcode(sqe.opcode) {
            NvmOpcode::RESERVATION_REGISTER => {
                let action = RegisterAction(action);
                if action.0 > RegisterAction::REPLACE.0 {
                    return Err(NvmeStatus::INVALID_FIELD_IN_COMMAND);
                }
                let persists = match cdw10.wrapping_shr(CPTPL_SHIFT) {
                    0 => None,
                    2 => Some(false),
                    3 if namespace.volume_state.has_shared_state() => Some(true),
                    _ => return Err(NvmeStatus::INVALID_FIELD_IN_COMMAND),
                };
                ReservationAction::Register { action, ignores_key, persists }
            }
            NvmOpcode::RESERVATION_REPORT => {
                if sqe.cdw11.get() & EDS == 0 {
                    // Fabrics hosts have 128-bit identifiers, which do not fit the short form.
                    return Err(NvmeStatus::HOST_IDENTIFIER_INCONSISTENT_FORMAT);
                }
                let len = usize::try_from(report_len(cdw10)).unwrap_or(usize::MAX);
                if len > super::MAX_DATA {
                    return Err(NvmeStatus::INVALID_FIELD_IN_COMMAND);
                }
                ReservationAction::Report { len }
            }
            // Since Base 1.3, IEKEY must be cleared for these.
            _ if ignores_key => return Err(NvmeStatus::INVALID_FIELD_IN_COMMAND),
            NvmOpcode::RESERVATION_ACQUIRE => {
                let action = AcquireAction(action);
                if action.0 > AcquireAction::PREEMPT_AND_ABORT.0 {
                    return Err(NvmeStatus::INVALID_FIELD_IN_COMMAND);
                }
                ReservationAction::Acquire {
                    action,
                    kind: shared_type(cdw10).ok_or(NvmeStatus::INVALID_FIELD_IN_COMMAND)?,
                }
            }
            _ => match ReleaseAction(action) {
                action @ ReleaseAction::RELEASE => {
                    let kind = shared_type(cdw10).ok_or(NvmeStatus::INVALID_FIELD_IN_COMMAND)?;
                    ReservationAction::Release { action, kind }
                }
                // Clear has no reservation type.
                action @ ReleaseAction::CLEAR => ReservationAction::Release { action, kind: SharedType(0) },
                _ => return Err(NvmeStatus::INVALID_FIELD_IN_COMMAND),
            },
        };
        let (volume_state, who) = (namespace.volume_state.clone(), origin.who.clone());
        let keys = ReservationKeys::new_zeroed();
        Ok(ReservationCommand {
            volume_state,
            who,
            epoch: origin.epoch,
            wanted,
            keys,
            change: None,
            barrier: None,
        })
    }

    /// Length of the host's data, in bytes.
    pub(super) fn data_out(&self) -> usize {
        match self.wanted {
            ReservationAction::Register { .. } | ReservationAction::Acquire { .. } => {
                size_of::<ReservationKeys>()
            }
            ReservationAction::Release { .. } => size_of::<u64>(),
            ReservationAction::Report { .. } => 0,
        }
    }

    /// Length of the data for the host, in bytes.
    pub(super) fn data_in(&self) -> usize {
        if let ReservationAction::Report { len } = self.wanted { len } else { 0 }
    }

    /// Begins the command, whose data has arrived: changes or reports the table.
    pub(super) fn begin(&mut self, data: &SgList) -> IoStep {
        // Of a longer buffer, only the beginning is used.
        let len = data.len().min(size_of::<ReservationKeys>());
        if let Some(field) = self.keys.as_mut_bytes().get_mut(..len) {
            data.slice(0, len).copy_to(field);
        }
        if self.volume_state.fences(self.epoch) {
            return IoStep::Done(NvmeOutcome::retry(NvmeStatus::INTERNAL_PATH_ERROR));
        }
        self.volume_state.adopt_record(&self.who);
        self.change = match self.wanted {
            // A cluster manager may decide by it which host is shut out.
            ReservationAction::Report { .. } => {
                ReservationChange::confirmation(&self.volume_state, self.epoch)
            }
            _ => Some(ReservationChange::new(&self.volume_state, self.epoch, self.aborts())),
        };
        self.resume()
    }

    /// Whether the commands of preempted hosts are aborted.
    fn aborts(&self) -> bool {
        matches!(self.wanted, ReservationAction::Acquire { action: AcquireAction::PREEMPT_AND_ABORT, .. })
    }

    /// Makes the change, and checks whether earlier I/O has ended.
    pub(super) fn resume(&mut self) -> IoStep {
        if let Some(change) = &mut self.change {
            let changed = change.poll(|table, reservations| {
                // A RESERVE of SPC-2 excludes all others, but may be found.
                if table.reserved_by.is_some() && !matches!(self.wanted, ReservationAction::Report { .. }) {
                    return Err(ReservationRefused::Conflict);
                }
                self.wanted.apply(reservations, &self.who, &self.keys)
            });
            match changed {
                Ok(false) => return IoStep::Wait,
                Ok(true) => self.change = None,
                Err(NotChanged::Refused(refused)) => {
                    return IoStep::Done(NvmeOutcome::failure(refusal(refused)));
                }
                Err(NotChanged::NotStored) => {
                    return IoStep::Done(NvmeOutcome::failure(NvmeStatus::INTERNAL_ERROR));
                }
                Err(NotChanged::Standby) => {
                    return IoStep::Done(NvmeOutcome::retry(NvmeStatus::ASYMMETRIC_ACCESS_INACCESSIBLE));
                }
                Err(NotChanged::Fenced) => {
                    return IoStep::Done(NvmeOutcome::retry(NvmeStatus::INTERNAL_PATH_ERROR));
                }
            }
            self.barrier = self.aborts().then(|| Drain::new(&self.volume_state));
        }
        if self.barrier.as_ref().is_some_and(|barrier| !barrier.is_over()) {
            return IoStep::Wait;
        }
        self.barrier = None;
        let ReservationAction::Report { len } = self.wanted else {
            return IoStep::Done(NvmeOutcome::success(0));
        };
        let mut report = self.volume_state.with_table(|table| report(&table.reservations, &self.who));
        report.resize(len, 0);
        IoStep::Done(NvmeOutcome::data(Seg::from_slice(&report).into(), 0))
    }
}

impl ReservationAction {
    fn apply(
        self,
        all: &mut Reservations,
        who: &Registrant,
        keys: &ReservationKeys,
    ) -> Result<Notices, ReservationRefused> {
        let (key, second) = (keys.crkey.get(), keys.second.get());
        match self {
            ReservationAction::Register { action, ignores_key, persists } => {
                let (own, persists) = (all.key_of(who), persists.unwrap_or(all.persists));
                let knows_key = own == Some(key);
                let is_allowed = match action {
                    RegisterAction::REGISTER => own.is_none_or(|own| own == second),
                    RegisterAction::UNREGISTER => own.is_some() && (ignores_key || knows_key),
                    _ => ignores_key || knows_key,
                };
                if !is_allowed {
                    return Err(ReservationRefused::Conflict);
                }
                let new_key = if action == RegisterAction::UNREGISTER { 0 } else { second };
                if new_key == 0 && action != RegisterAction::UNREGISTER {
                    return Err(ReservationRefused::NoKey);
                }
                let registrants = std::slice::from_ref(who);
                all.register(who, &Register { key: None, new_key, registrants, persists })
            }
            ReservationAction::Acquire { action: AcquireAction::ACQUIRE, kind } => {
                all.reserve(who, key, kind).map(|()| Notices::new())
            }
            ReservationAction::Acquire { kind, .. } => {
                all.preempt(who, &Preempt { key, victim_key: second, kind })
            }
            ReservationAction::Release { action: ReleaseAction::CLEAR, .. } => all.clear(who, key),
            ReservationAction::Release { kind, .. } => all.release(who, key, kind),
            ReservationAction::Report { .. } => Ok(Notices::new()),
        }
    }
}

/// The Reservation Notification Log Page Type of a notice.
pub(super) fn notification(notice: Notice) -> u8 {
    match notice {
        Notice::RegistrationsPreempted => 1,
        Notice::ReservationsReleased => 2,
        Notice::ReservationsPreempted => 3,
    }
}

fn refusal(refused: ReservationRefused) -> NvmeStatus {
    match refused {
        ReservationRefused::Conflict => NvmeStatus::RESERVATION_CONFLICT,
        ReservationRefused::InvalidRelease | ReservationRefused::NoKey | ReservationRefused::ToItself => {
            NvmeStatus::INVALID_FIELD_IN_COMMAND
        }
        // There is no specific status.
        ReservationRefused::Full => NvmeStatus::INTERNAL_ERROR,
    }
}

/// The shared type of an RTYPE.
fn shared_type(cdw10: u32) -> Option<SharedType> {
    // Bits 15:8.
    let kind = NvmeReservationType(cdw10.wrapping_shr(RTYPE_SHIFT) as u8);
    TYPES.iter().find(|(own, _)| *own == kind).map(|(_, shared)| *shared)
}

/// The extended Reservation Status data structure, as `reader` sees it.
fn report(all: &Reservations, reader: &Registrant) -> Vec<u8> {
    let kind = all.reservation.as_ref().map(|reservation| reservation.kind);
    let rtype = TYPES.iter().find(|(_, shared)| Some(*shared) == kind).map_or(0, |(own, _)| own.0);
    let head = ReservationStatus {
        generation: all.generation.into(),
        rtype,
        // At most `MAX_REGISTRATIONS`.
        regstrnt: (all.registrations.len() as u16).into(),
        ptpls: all.persists.into(),
        ..ReservationStatus::new_zeroed()
    };
    let mut bytes = head.as_bytes().to_vec();
    bytes.resize(EXTENDED_STATUS_LEN, 0);
    for registration in &all.registrations {
        let registrant = RegistrantExtended {
            // As in the dynamic controller model.
            cntlid: u16::MAX.into(),
            rcsts: if all.holds(&registration.who) { RCSTS_HOLDER } else { 0 },
            rkey: registration.key.into(),
            hostid: host_identifier(&registration.who, reader),
            ..RegistrantExtended::new_zeroed()
        };
        bytes.extend(registrant.as_bytes());
    }
    bytes
}

/// The host identifier in a report. A hash is reported for SCSI initiator ports, whose names are
/// longer, and for another host with the identifier of the `reader`, which would take that host's
/// registration for its own.
fn host_identifier(who: &Registrant, reader: &Registrant) -> [u8; 16] {
    let own = reader.nvme_host().filter(|_| who != reader);
    if let Some(host) = who.nvme_host().filter(|host| Some(*host) != own) {
        return host;
    }
    let hash = Sha256::new().chain_update(&who.initiator).chain_update(who.port.as_bytes()).finalize();
    let mut id = [0; 16];
    id.iter_mut().zip(hash).for_each(|(to, from)| *to = from);
    id
}

/// Reservation types of NVMe and their shared equivalents; SPC uses other numbers for the six
/// types.
const TYPES: [(NvmeReservationType, SharedType); 6] = [
    (NvmeReservationType::WRITE_EXCLUSIVE, SharedType::WRITE_EXCLUSIVE),
    (NvmeReservationType::EXCLUSIVE_ACCESS, SharedType::EXCLUSIVE_ACCESS),
    (NvmeReservationType::WRITE_EXCLUSIVE_REGISTRANTS_ONLY, SharedType::WRITE_EXCLUSIVE_REGISTRANTS_ONLY),
    (NvmeReservationType::EXCLUSIVE_ACCESS_REGISTRANTS_ONLY, SharedType::EXCLUSIVE_ACCESS_REGISTRANTS_ONLY),
    (NvmeReservationType::WRITE_EXCLUSIVE_ALL_REGISTRANTS, SharedType::WRITE_EXCLUSIVE_ALL_REGISTRANTS),
    (NvmeReservationType::EXCLUSIVE_ACCESS_ALL_REGISTRANTS, SharedType::EXCLUSIVE_ACCESS_ALL_REGISTRANTS),
];
