//! PERSISTENT RESERVE IN: keys, reservation, full status and capabilities.

use crate::scsi::ScsiStatus;
use crate::scsi::device::task::{
    CommandContext, HandlerAction, MultiStepCommand, TaskFailure, TaskOutcome, answer,
};
use crate::volume_state::{Registrant, ReservationChange, Reservations, Table};
use blockmux_volume::Output;
use blockmux_wire::scsi::opcode::persistent_reserve_in;
use blockmux_wire::scsi::reservation::*;
use std::collections::BTreeMap;
use std::sync::Arc;
use zerocopy::{FromZeros, IntoBytes, U16, U32, U64};

pub(in crate::scsi) fn reserve_in(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let confirm = ReservationChange::confirmation(&cx.unit.unit.volume_state, cx.unit.epoch);
    let mut command = ReserveInCommand { confirm };
    let outcome = command.on_resume(cx);
    if matches!(outcome, Ok(HandlerAction::Wait)) {
        cx.work(command);
    }
    outcome
}

/// A command in progress. A cluster manager may decide by its answer which host is shut out, so an
/// owner that was shut out itself must not answer.
struct ReserveInCommand {
    /// Of a volume that processes serve in turns.
    confirm: Option<ReservationChange>,
}

impl MultiStepCommand for ReserveInCommand {
    fn on_io(&mut self, _cx: &mut CommandContext<'_>, _output: Output) -> TaskOutcome {
        Err(TaskFailure::internal())
    }

    fn on_resume(&mut self, cx: &mut CommandContext<'_>) -> TaskOutcome {
        if let Some(confirm) = &mut self.confirm
            && !confirm.confirm(check)?
        {
            return Ok(HandlerAction::Wait);
        }
        report(cx)
    }
}

/// SPC-2, the PERSISTENT RESERVE IN command: conflicts with any RESERVE, including that of the
/// nexus.
fn check(table: &Table) -> Result<(), TaskFailure> {
    match table.reserved_by {
        None => Ok(()),
        Some(_) => Err(TaskFailure::status(ScsiStatus::RESERVATION_CONFLICT)),
    }
}

fn report(cx: &CommandContext<'_>) -> TaskOutcome {
    let (cdb, volume_state) = (&cx.command.cdb, &cx.unit.unit.volume_state);
    let can_persist = volume_state.has_shared_state();
    let all = volume_state.with_table(|table| check(table).map(|()| table.reservations.clone()))?;
    let body = match u16::from(cdb.byte(1) & 0x1f) {
        persistent_reserve_in::READ_KEYS => {
            all.registrations.iter().flat_map(|registration| registration.key.to_be_bytes()).collect()
        }
        persistent_reserve_in::READ_RESERVATION => reservation(&all),
        persistent_reserve_in::READ_FULL_STATUS => {
            full_status(&all, &cx.unit.unit.read_state(|state| state.ports.clone()))
        }
        _ => return answer(capabilities(&all, can_persist).as_bytes(), cdb.u16(7).into()),
    };
    let header = ReserveInHeader {
        generation: U32::new(all.generation),
        additional_length: U32::new(body.len() as u32),
    };
    answer(&[header.as_bytes(), &body].concat(), cdb.u16(7).into())
}

fn reservation(all: &Reservations) -> Vec<u8> {
    let Some(held) = &all.reservation else { return Vec::new() };
    let key = if held.kind.is_all_registrants() { 0 } else { all.key_of(&held.holder).unwrap_or(0) };
    let descriptor = ReservationDescriptor {
        reservation_key: U64::new(key),
        scope_and_type: held.kind.0,
        ..FromZeros::new_zeroed()
    };
    descriptor.as_bytes().to_vec()
}

/// READ FULL STATUS: all registrants and which of them hold the reservation. `ports` are the
/// relative identifiers of existing ports.
pub(super) fn full_status(all: &Reservations, ports: &BTreeMap<Arc<str>, u16>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut removed = Vec::new();
    for registration in &all.registrations {
        let held = all.reservation.as_ref().filter(|_| all.holds(&registration.who));
        let id = transport_id(&registration.who);
        let descriptor = FullStatusDescriptor {
            reservation_key: U64::new(registration.key),
            flags: if held.is_some() { R_HOLDER } else { 0 },
            scope_and_type: held.map_or(0, |held| held.kind.0),
            relative_target_port_identifier: U16::new(match ports.get(&registration.who.port) {
                Some(id) => *id,
                None => id_of_removed_port(&mut removed, &registration.who.port, ports),
            }),
            additional_descriptor_length: U32::new(id.len() as u32),
            ..FromZeros::new_zeroed()
        };
        bytes.extend(descriptor.as_bytes());
        bytes.extend(&*id);
    }
    bytes
}

/// TransportID of a registrant. NVMe hosts get one of "no specific protocol" (SPC-5) that ends with
/// the host identifier.
fn transport_id(registrant: &Registrant) -> Arc<[u8]> {
    registrant.nvme_host().map_or_else(
        || registrant.initiator.clone(),
        |host| [&[0x0f, 0, 0, 0, 0, 0, 0, 0][..], &host].concat().into(),
    )
}

/// Relative identifier of a port that no longer exists after a restart: a free number, counted down
/// from the highest because 0 is reserved.
fn id_of_removed_port<'a>(removed: &mut Vec<&'a str>, port: &'a str, ports: &BTreeMap<Arc<str>, u16>) -> u16 {
    let place = removed.iter().position(|known| *known == port).unwrap_or_else(|| {
        removed.push(port);
        removed.len().saturating_sub(1)
    });
    let is_free = |id: &u16| !ports.values().any(|used| used == id);
    (1..=u16::MAX).rev().filter(is_free).nth(place).unwrap_or(u16::MAX)
}

fn capabilities(all: &Reservations, can_persist: bool) -> Capabilities {
    Capabilities {
        length: U16::new(size_of::<Capabilities>() as u16),
        flags_2: SIP_C | ATP_C | if can_persist { PTPL_C } else { 0 },
        flags_3: TMV | if all.persists { PTPL_A } else { 0 },
        type_mask: U16::new(TYPE_MASK_ALL),
        reserved: [0; 2],
    }
}
