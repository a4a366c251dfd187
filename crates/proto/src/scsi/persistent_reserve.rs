//! PERSISTENT RESERVE IN and OUT (SPC-5).

use super::Status;
use super::nexus::{TransportId, is_port_of};
use super::sense::Sense;
use super::task::{Action, Context, Failure, Outcome, Work, answer};
use crate::iscsi::name::Name;
use crate::served::{Drain, Move, Notices, Preempt, Refused, Register, Registrant, Reservations, SaveTicket};
use blockmux_volume::Output;
use blockmux_wire::scsi::opcode::{persistent_reserve_in, persistent_reserve_out as out};
use blockmux_wire::scsi::reservation::*;
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use std::collections::BTreeMap;
use std::sync::Arc;
use zerocopy::{FromBytes, IntoBytes, U16, U32, U64};

pub(super) fn reserve_in(cx: &mut Context<'_>) -> Outcome {
    let cdb = &cx.command.cdb;
    let can_persist = cx.unit.unit.served.store().is_some();
    let (is_reserved, all) =
        cx.unit.unit.served.look(|table| (table.reserved_by.is_some(), table.reservations.clone()));
    // SPC-2, the PERSISTENT RESERVE IN command: in conflict with any RESERVE, the nexus's own included.
    if is_reserved {
        return Err(Failure::status(Status::RESERVATION_CONFLICT));
    }
    let body = match u16::from(cdb.byte(1) & 0x1f) {
        persistent_reserve_in::READ_KEYS => {
            all.registrations.iter().flat_map(|registration| registration.key.to_be_bytes()).collect()
        }
        persistent_reserve_in::READ_RESERVATION => reservation(&all),
        persistent_reserve_in::READ_FULL_STATUS => {
            full_status(&all, &cx.unit.unit.look(|state| state.ports.clone()))
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
        obsolete: [0; 5],
        scope_and_type: held.kind.0,
        obsolete_too: [0; 2],
    };
    descriptor.as_bytes().to_vec()
}

/// Every registrant, and which of them holds the reservation; `ports` are the identifiers of those that are there.
fn full_status(all: &Reservations, ports: &BTreeMap<Arc<str>, u16>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut gone = Vec::new();
    for registration in &all.registrations {
        let held = all.reservation.as_ref().filter(|_| all.holds(&registration.who));
        let descriptor = FullStatusDescriptor {
            reservation_key: U64::new(registration.key),
            reserved: [0; 4],
            flags: if held.is_some() { R_HOLDER } else { 0 },
            scope_and_type: held.map_or(0, |held| held.kind.0),
            reserved_too: [0; 4],
            relative_target_port_identifier: U16::new(match ports.get(&registration.who.port) {
                Some(id) => *id,
                None => id_of_gone(&mut gone, &registration.who.port, ports),
            }),
            additional_descriptor_length: U32::new(0),
        };
        let id = transport_id(&registration.who);
        let additional_descriptor_length = U32::new(id.len() as u32);
        bytes.extend(FullStatusDescriptor { additional_descriptor_length, ..descriptor }.as_bytes());
        bytes.extend(&*id);
    }
    bytes
}

/// What initiators are told of a registrant. An NVMe host has no TransportID: it gets one of no specific protocol
/// (SPC-5), with its identifier at the end.
fn transport_id(who: &Registrant) -> Arc<[u8]> {
    who.nvme_host().map_or_else(
        || who.initiator.clone(),
        |host| [&[0x0f, 0, 0, 0, 0, 0, 0, 0][..], &host].concat().into(),
    )
}

/// A port that was there before a restart and is no more has a number that none has which is there, for 0 is none; ports
/// count from 1 on, so it comes from the other end.
fn id_of_gone<'a>(gone: &mut Vec<&'a str>, port: &'a str, ports: &BTreeMap<Arc<str>, u16>) -> u16 {
    let place = gone.iter().position(|known| *known == port).unwrap_or_else(|| {
        gone.push(port);
        gone.len().saturating_sub(1)
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

pub(super) fn reserve_out(cx: &mut Context<'_>) -> Outcome {
    let cdb = &cx.command.cdb;
    let (scope, kind) = (cdb.byte(2) >> 4, ReservationType(cdb.byte(2) & 0x0f));
    // SPC-5, the PERSISTENT RESERVE OUT service actions: scope and type count where a reservation is made or released.
    // A preemption does not always make one.
    let action = u16::from(cdb.byte(1) & 0x1f);
    if matches!(action, out::RESERVE | out::RELEASE) {
        if scope != 0 {
            return Err(Sense::cdb_bit(2, 7).into());
        }
        if kind.name().is_none() {
            return Err(Sense::cdb_bit(2, 3).into());
        }
    }
    let len = cdb.u32(5) as usize;
    let has_more = matches!(action, out::REGISTER | out::REGISTER_AND_MOVE);
    if len != size_of::<ReserveOut>() && !(has_more && (size_of::<ReserveOut>()..=MAX_LIST).contains(&len)) {
        return Err(Sense::illegal(Asc::PARAMETER_LIST_LENGTH_ERROR).into());
    }
    cx.parameters(len, size_of::<ReserveOut>(), change)
}

/// Carries the service action out, tells whom it concerns, and keeps what must survive.
fn change(cx: &mut Context<'_>, bytes: &[u8]) -> Outcome {
    let action = u16::from(cx.command.cdb.byte(1) & 0x1f);
    let wanted = Wanted::parse(cx, action, bytes)?;
    let who = cx.nexus.registrant();
    let served = &cx.unit.unit.served;
    if wanted.persists() && served.store().is_none() {
        return Err(Sense::in_parameters(20).into());
    }
    let ticket = served.change(action == out::PREEMPT_AND_ABORT, |table| {
        // SPC-2, "Reservations": a RESERVE that is held keeps persistent reservations out.
        if table.reserved_by.is_some() {
            return Err(Failure::status(Status::RESERVATION_CONFLICT));
        }
        wanted.apply(&mut table.reservations, &who)
    })?;
    cx.unit.refresh();
    let drain = takes_away(action).then(|| Drain::new(&cx.unit.unit.served));
    let mut settling = Settling { drain, ticket };
    let outcome = settling.on_resume(cx);
    if matches!(outcome, Ok(Action::Wait)) {
        cx.work(settling);
    }
    outcome
}

/// Whether the service action keeps somebody out who was in, so that what was admitted before has to be over.
fn takes_away(action: u16) -> bool {
    matches!(action, out::RESERVE | out::PREEMPT | out::PREEMPT_AND_ABORT | out::REGISTER_AND_MOVE)
}

/// One service action with its parameters.
enum Wanted {
    Register {
        key: Option<u64>,
        new_key: u64,
        whom: Vec<Registrant>,
        persists: bool,
    },
    Reserve {
        key: u64,
        kind: ReservationType,
    },
    Release {
        key: u64,
        kind: ReservationType,
    },
    Clear {
        key: u64,
    },
    /// And whether scope and type are ones that a reservation can have.
    Preempt(Preempt, bool),
    Move(Move),
}

impl Wanted {
    fn parse(cx: &Context<'_>, action: u16, bytes: &[u8]) -> Result<Wanted, Sense> {
        if action == out::REGISTER_AND_MOVE {
            return Wanted::parse_move(cx, bytes);
        }
        let (list, rest) = ReserveOut::ref_from_prefix(bytes).map_err(|_| Sense::in_parameters(0))?;
        let key = list.reservation_key.get();
        let other_key = list.service_action_reservation_key.get();
        let kind = ReservationType(cx.command.cdb.byte(2) & 0x0f);
        match action {
            out::REGISTER | out::REGISTER_AND_IGNORE_EXISTING_KEY => {
                let ignores = action == out::REGISTER_AND_IGNORE_EXISTING_KEY;
                let persists = list.flags & APTPL != 0;
                let whom = whom(cx, list.flags, rest)?;
                let key = (!ignores).then_some(key);
                Ok(Wanted::Register { key, new_key: other_key, whom, persists })
            }
            out::RESERVE => Ok(Wanted::Reserve { key, kind }),
            out::RELEASE => Ok(Wanted::Release { key, kind }),
            out::CLEAR => Ok(Wanted::Clear { key }),
            _ => {
                let is_whole_unit = cx.command.cdb.byte(2) >> 4 == 0;
                let makes_sense = is_whole_unit && kind.name().is_some();
                Ok(Wanted::Preempt(Preempt { key, victim_key: other_key, kind }, makes_sense))
            }
        }
    }

    fn parse_move(cx: &Context<'_>, bytes: &[u8]) -> Result<Wanted, Sense> {
        let (list, rest) = RegisterAndMove::ref_from_prefix(bytes).map_err(|_| Sense::in_parameters(0))?;
        let port = list.relative_target_port_identifier.get();
        let port = port_name(cx, port).ok_or(Sense::in_parameters(18))?;
        let ids = transport_ids(cx, rest, list.transport_id_length.get() as usize, 20)?;
        // A node is not one port that the reservation could be moved to.
        let [TransportId::Port(id)] = ids.as_slice() else { return Err(Sense::in_parameters(20)) };
        Ok(Wanted::Move(Move {
            key: list.reservation_key.get(),
            new_key: list.service_action_reservation_key.get(),
            to: Registrant { initiator: id.clone(), port },
            unregister: list.flags & UNREG != 0,
            persists: list.flags & APTPL != 0,
        }))
    }

    fn persists(&self) -> bool {
        matches!(self, Wanted::Register { persists: true, .. } | Wanted::Move(Move { persists: true, .. }))
    }

    fn apply(&self, all: &mut Reservations, who: &Registrant) -> Result<Notices, Failure> {
        let result = match self {
            Wanted::Register { key, new_key, whom, persists } => {
                // SPC-5, "Registering": others are only registered by one who was not registered itself.
                if whom.len() > 1
                    && all.key_of(who).is_some()
                    && whom.iter().any(|other| other.initiator != who.initiator)
                {
                    return Err(Sense::in_parameters(20).into());
                }
                all.register(who, &Register { key: *key, new_key: *new_key, whom, persists: *persists })
            }
            Wanted::Reserve { key, kind } => all.reserve(who, *key, *kind).map(|()| Notices::new()),
            Wanted::Release { key, kind } => all.release(who, *key, *kind),
            Wanted::Clear { key } => all.clear(who, *key),
            Wanted::Preempt(what, makes_sense) => {
                let holds_key = all.key_of(who) == Some(what.key);
                if holds_key && !makes_sense && all.is_taken_over(what.victim_key) {
                    return Err(Sense::cdb_bit(2, 7).into());
                }
                all.preempt(who, what)
            }
            Wanted::Move(what) => all.register_and_move(who, what),
        };
        result.map_err(refusal)
    }
}

fn refusal(refused: Refused) -> Failure {
    match refused {
        Refused::Conflict => Failure::status(Status::RESERVATION_CONFLICT),
        Refused::InvalidRelease => Sense::illegal(Asc::INVALID_RELEASE_OF_PERSISTENT_RESERVATION).into(),
        Refused::NoKey => Sense::in_parameters(8).into(),
        Refused::ToItself => Sense::in_parameters(24).into(),
        Refused::Full => Sense::illegal(Asc::INSUFFICIENT_REGISTRATION_RESOURCES).into(),
    }
}

/// Who is registered: the nexus; with SPEC_I_PT each listed initiator port, and where a node is listed, those of its ports
/// that are logged in; with ALL_TG_PT all of them on every target port.
fn whom(cx: &Context<'_>, flags: u8, rest: &[u8]) -> Result<Vec<Registrant>, Sense> {
    let own = cx.nexus.registrant();
    let mut initiators = vec![own.initiator.clone()];
    if flags & SPEC_I_PT != 0 {
        if u16::from(cx.command.cdb.byte(1) & 0x1f) != out::REGISTER {
            return Err(Sense::in_parameters(20));
        }
        let (length, list) = rest.split_first_chunk().ok_or(Sense::in_parameters(24))?;
        for id in transport_ids(cx, list, u32::from_be_bytes(*length) as usize, 24)? {
            match id {
                TransportId::Port(id) => initiators.push(id),
                TransportId::Node(node) => initiators.extend(ports_of(cx, &node)?),
            }
        }
    } else if !rest.is_empty() {
        return Err(Sense::illegal(Asc::PARAMETER_LIST_LENGTH_ERROR));
    }
    let ports = match flags & ALL_TG_PT {
        0 => vec![own.port],
        _ => cx.target.ports.iter().map(|port| port.name.clone()).collect(),
    };
    let each = initiators.iter().flat_map(|initiator| {
        ports.iter().map(|port| Registrant { initiator: initiator.clone(), port: port.clone() })
    });
    Ok(each.collect())
}

/// The ports of a node that are logged in.
fn ports_of(cx: &Context<'_>, node: &Name) -> Result<Vec<Arc<[u8]>>, Sense> {
    let mut ports: Vec<_> = cx.unit.unit.look(|state| {
        let initiators = state.nexuses.iter().map(|nexus| nexus.who.initiator.clone());
        initiators.filter(|initiator| is_port_of(initiator, node)).collect()
    });
    ports.sort_unstable();
    ports.dedup();
    if ports.is_empty() { Err(Sense::in_parameters(24)) } else { Ok(ports) }
}

/// The name of a port that leads to the unit, also through another target.
fn port_name(cx: &Context<'_>, relative_id: u16) -> Option<Arc<str>> {
    let own = cx.target.ports.iter().find(|port| port.relative_id == relative_id);
    own.map(|port| port.name.clone()).or_else(|| {
        cx.unit.unit.look(|state| {
            let found = state.ports.iter().find(|(_, id)| **id == relative_id);
            found.map(|(name, _)| name.clone())
        })
    })
}

/// Reads a list of TransportIDs; `field` is where its length was.
fn transport_ids(
    cx: &Context<'_>,
    list: &[u8],
    length: usize,
    field: u16,
) -> Result<Vec<TransportId>, Sense> {
    let mut rest = list.get(..length).ok_or(Sense::illegal(Asc::PARAMETER_LIST_LENGTH_ERROR))?;
    let mut ids = Vec::new();
    while let [first, _, high, low, ..] = *rest {
        let len = match first & 0x0f {
            // SPC-5, TransportIDs: an iSCSI TransportID says how long it is, all others have 24 bytes.
            0x05 => usize::from(u16::from_be_bytes([high, low])).saturating_add(4),
            _ => 24,
        };
        // Of the longest iSCSI name, an ISID and padding. Each is kept for as long as it is registered.
        let (id, after) = rest
            .split_at_checked(len)
            .filter(|_| len <= MAX_TRANSPORT_ID)
            .ok_or(Sense::in_parameters(field))?;
        ids.push(TransportId::read(id, cx.nexus.protocol()).ok_or(Sense::in_parameters(field))?);
        rest = after;
    }
    if rest.is_empty() { Ok(ids) } else { Err(Sense::in_parameters(field)) }
}

/// The change is made. What was admitted before may still be in flight, of whatever protocol; and an image is being kept.
struct Settling {
    drain: Option<Drain>,
    ticket: Option<SaveTicket>,
}

impl Work for Settling {
    fn on_io(&mut self, _cx: &mut Context<'_>, _output: Output) -> Outcome {
        Err(Failure::internal())
    }

    fn on_resume(&mut self, cx: &mut Context<'_>) -> Outcome {
        if self.drain.as_ref().is_some_and(|drain| !drain.is_over()) {
            return Ok(Action::Wait);
        }
        let Some(ticket) = self.ticket else { return Ok(Action::good()) };
        match cx.unit.unit.served.store().and_then(|store| store.is_saved(ticket)) {
            None => Ok(Action::Wait),
            Some(true) => Ok(Action::good()),
            Some(false) => {
                cx.unit.unit.served.take_back(ticket);
                Err(Sense::new(SenseKey::HARDWARE_ERROR, Asc::WRITE_ERROR).into())
            }
        }
    }
}

/// The longest parameter list, in bytes: some hundred TransportIDs.
const MAX_LIST: usize = 32 << 10;
/// The longest TransportID, in bytes.
const MAX_TRANSPORT_ID: usize = 256;

#[cfg(test)]
mod tests {
    use super::full_status;
    use crate::scsi::testing::{Bench, Client, answer, command};
    use crate::scsi::{Identity, LogicalUnit, Lun, Status, Step};
    use crate::served::{Registrant, Registration, ReservationStore, Reservations, SaveTicket, Served};
    use blockmux_volume::MemVolume;
    use std::collections::BTreeMap;
    use std::sync::{Arc, Mutex};

    fn list(key: u64, other_key: u64, flags: u8) -> Vec<u8> {
        let mut list = [key.to_be_bytes(), other_key.to_be_bytes()].concat();
        list.extend([0, 0, 0, 0, flags, 0, 0, 0]);
        list
    }

    fn out(client: &mut Client, action: u8, kind: u8, list: &[u8]) -> Status {
        let cdb = [0x5f, action, kind, 0, 0, 0, 0, 0, list.len() as u8, 0];
        client.run_with(&cdb, list).status
    }

    fn register(client: &mut Client, key: u64) {
        assert_eq!(out(client, 6, 0, &list(0, key, 0)), Status::GOOD);
    }

    fn keys(client: &mut Client) -> Vec<u8> {
        client.run(&[0x5e, 0, 0, 0, 0, 0, 0, 1, 0, 0]).good()
    }

    const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    const WRITE: [u8; 10] = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];

    #[test]
    fn keys_are_read_with_their_generation() {
        let bench = Bench::new();
        let (mut a, mut b) = (bench.client("a"), bench.client("b"));
        assert_eq!(keys(&mut a), [0; 8]);
        register(&mut a, 1);
        register(&mut b, 2);
        assert_eq!(keys(&mut a), [0, 0, 0, 2, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2]);
        assert_eq!(a.run(&[0x5e, 0, 0, 0, 0, 0, 0, 0, 8, 0]).good(), [0, 0, 0, 2, 0, 0, 0, 16]);
        assert_eq!(out(&mut a, 0, 0, &list(0, 9, 0)), Status::RESERVATION_CONFLICT);
        assert_eq!(out(&mut a, 0, 0, &list(1, 0, 0)), Status::GOOD);
        assert_eq!(keys(&mut a)[..8], [0, 0, 0, 3, 0, 0, 0, 8]);
        for action in 4..32 {
            assert_eq!(a.run(&[0x5e, action, 0, 0, 0, 0, 0, 1, 0, 0]).check(), (5, 0x2400));
        }
    }

    #[test]
    fn a_reservation_keeps_others_out_as_its_type_says() {
        let table =
            [(1, [true, false], [true, false]), (3, [false; 2], [false; 2]), (5, [true; 2], [true, false])];
        let table = table.into_iter().chain([
            (6, [true; 2], [false; 2]),
            (7, [true; 2], [true, false]),
            (8, [true; 2], [false; 2]),
        ]);
        for (kind, registered, stranger) in table {
            let bench = Bench::new();
            let (mut a, mut b) = (bench.client("a"), bench.client("b"));
            register(&mut a, 1);
            register(&mut b, 2);
            assert_eq!(out(&mut a, 1, kind, &list(1, 0, 0)), Status::GOOD);
            let access = |client: &mut Client| {
                let read = client.run(&READ).status == Status::GOOD;
                [read, client.run_with(&WRITE, &[0; 512]).status == Status::GOOD]
            };
            assert_eq!(access(&mut a), [true; 2], "type {kind}");
            assert_eq!(access(&mut b), registered, "type {kind}");
            assert_eq!(out(&mut b, 0, 0, &list(2, 0, 0)), Status::GOOD);
            assert_eq!(access(&mut b), stranger, "type {kind}");
            b.run(&[0; 6]).good();
            let held = a.run(&[0x5e, 1, 0, 0, 0, 0, 0, 1, 0, 0]).good();
            assert_eq!((held[15], held[21]), (if kind >= 7 { 0 } else { 1 }, kind));
            assert_eq!(out(&mut a, 2, kind, &list(1, 0, 0)), Status::GOOD);
            assert_eq!(access(&mut b), [true; 2]);
        }
    }

    /// Or else a disk that is only written by another looks like one without a write cache to be flushed.
    #[test]
    fn who_may_read_may_sense_modes_and_not_select_them() {
        let bench = Bench::new();
        let (mut a, mut b) = (bench.client("a"), bench.client("b"));
        register(&mut a, 1);
        assert_eq!(out(&mut a, 1, 1, &list(1, 0, 0)), Status::GOOD);
        b.run(&[0x1a, 0, 0x3f, 0, 255, 0]).good();
        b.run(&[0x5a, 0, 0x3f, 0, 0, 0, 0, 0, 255, 0]).good();
        assert_eq!(b.run_with(&[0x15, 0x10, 0, 0, 4, 0], &[0; 4]).status, Status::RESERVATION_CONFLICT);
    }

    #[test]
    fn every_command_meets_an_exclusive_access_as_the_tables_say() {
        let bench = Bench::new();
        let (mut a, mut b) = (bench.client("a"), bench.client("b"));
        register(&mut a, 1);
        assert_eq!(out(&mut a, 1, 3, &list(1, 0, 0)), Status::GOOD);
        let allowed: [&[u8]; 9] = [
            &[0; 6],
            &[0x12, 0, 0, 0, 36, 0],
            &[0x03, 0, 0, 0, 18, 0],
            &[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0],
            &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            &[0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0],
            &[0x5e, 0, 0, 0, 0, 0, 0, 0, 8, 0],
            &[0x1b, 0, 0, 0, 1, 0],
            &[0x1e, 0, 0, 0, 0, 0],
        ];
        for cdb in allowed {
            b.run(cdb).good();
        }
        let refused: [&[u8]; 12] = [
            &READ,
            &WRITE,
            &[0x1a, 0, 0x3f, 0, 255, 0],
            &[0x15, 0x10, 0, 0, 4, 0],
            &[0x1b, 0, 0, 0, 0, 0],
            &[0x1e, 0, 0, 0, 1, 0],
            &[0x2f, 0, 0, 0, 0, 0, 0, 0, 1, 0],
            &[0x34, 0, 0, 0, 0, 0, 0, 0, 1, 0],
            &[0x35, 0, 0, 0, 0, 0, 0, 0, 1, 0],
            &[0x42, 0, 0, 0, 0, 0, 0, 0, 8, 0],
            &[0x89, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0],
            &[0x16, 0, 0, 0, 0, 0],
        ];
        for cdb in refused {
            assert_eq!(b.run(cdb).status, Status::RESERVATION_CONFLICT, "{cdb:x?}");
        }
    }

    #[test]
    fn preempt_tells_the_victim_and_abort_ends_its_tasks() {
        let bench = Bench::new();
        let (mut a, mut b) = (bench.client("a"), bench.client("b"));
        register(&mut a, 1);
        register(&mut b, 2);
        assert_eq!(out(&mut a, 1, 3, &list(1, 0, 0)), Status::GOOD);
        let (mut task, step) = a.server.begin(&command(Lun::new(0), &WRITE, 512));
        assert!(matches!(step, Step::DataOut { len: 512 }));
        assert_eq!(out(&mut b, 5, 3, &list(2, 1, 0)), Status::GOOD);
        let Step::Done(response) = a.turn(&mut task, step, &[0; 512], &mut 0) else {
            panic!("it is aborted")
        };
        assert_eq!(answer(response).status, Status::TASK_ABORTED);
        assert_eq!(a.run(&[0; 6]).check(), (6, 0x2a05));
        assert_eq!(a.run(&READ).status, Status::RESERVATION_CONFLICT);
        b.run(&READ).good();
    }

    #[test]
    fn full_status_names_every_registrant_and_the_holder() {
        let bench = Bench::new();
        let (mut a, mut b) = (bench.client("a"), bench.client("b"));
        register(&mut a, 1);
        register(&mut b, 2);
        assert_eq!(out(&mut b, 1, 5, &list(2, 0, 0)), Status::GOOD);
        let status = a.run(&[0x5e, 3, 0, 0, 0, 0, 0, 4, 0, 0]).good();
        let id = a.server.nexus().initiator.clone();
        let len = 24 + id.len();
        assert_eq!(status.len(), 8 + 2 * len);
        assert_eq!((status[15], &status[20..22], &status[26..28]), (1, &[0, 0][..], &[0, 1][..]));
        assert_eq!(status[32..8 + len], *id);
        assert_eq!(status[8 + len + 12..8 + len + 14], [1, 5]);
    }

    #[test]
    fn ports_that_are_gone_have_numbers_of_their_own() {
        let ports: BTreeMap<Arc<str>, u16> = [("here".into(), 1), ("far".into(), u16::MAX)].into();
        let registered = |port: &str| Registration {
            who: Registrant { initiator: vec![0; 24].into(), port: port.into() },
            key: 1,
        };
        let registrations = ["here", "gone", "lost", "gone", "far"].map(registered).into();
        let status = full_status(&Reservations { registrations, ..Reservations::default() }, &ports);
        let ids = status.chunks(48).map(|descriptor| u16::from_be_bytes([descriptor[18], descriptor[19]]));
        assert_eq!(ids.collect::<Vec<_>>(), [1, 0xfffe, 0xfffd, 0xfffe, 0xffff]);
    }

    #[test]
    fn register_and_move_hands_the_reservation_over() {
        let bench = Bench::new();
        let (mut a, mut b) = (bench.client("a"), bench.client("b"));
        register(&mut a, 1);
        assert_eq!(out(&mut a, 1, 3, &list(1, 0, 0)), Status::GOOD);
        let id = b.server.nexus().initiator.clone();
        let mut to = [1_u64.to_be_bytes(), 7_u64.to_be_bytes()].concat();
        to.extend([0, 2, 0, 1]);
        to.extend((id.len() as u32).to_be_bytes());
        to.extend(&*id);
        assert_eq!(out(&mut a, 7, 0, &to), Status::GOOD);
        b.run(&READ).good();
        assert_eq!(a.run(&READ).status, Status::RESERVATION_CONFLICT);
        to[19] = 9;
        assert_eq!(out(&mut b, 7, 0, &to), Status::CHECK_CONDITION);
        // Nor to its own port, through whatever port of the target.
        for port in [1, 2] {
            (to[7], to[19]) = (7, port);
            let cdb = [0x5f, 7, 0, 0, 0, 0, 0, 0, to.len() as u8, 0];
            assert_eq!(b.run_with(&cdb, &to).check(), (5, 0x2600), "port {port}");
        }
        to[24] = 0x46;
        assert_eq!(out(&mut b, 7, 0, &to), Status::CHECK_CONDITION, "another protocol");
    }

    #[test]
    fn a_node_that_is_listed_is_each_of_its_ports_that_is_there() {
        let bench = Bench::new();
        let (mut a, mut b) = (bench.client("a"), bench.client("b"));
        let mut register = list(0, 5, 8);
        let node = b"iqn.2026-11.i:b\0\0\0\0\0";
        register.extend([0, 0, 0, 24, 5, 0, 0, 20]);
        register.extend(node);
        assert_eq!(out(&mut a, 0, 0, &register), Status::GOOD);
        assert_eq!(out(&mut a, 1, 5, &list(5, 0, 0)), Status::GOOD);
        b.run_with(&WRITE, &[0; 512]).good();
        assert_eq!(out(&mut a, 6, 0, &list(0, 0, 0)), Status::GOOD);
        register[32 + 14] = b'c';
        assert_eq!(out(&mut a, 0, 0, &register), Status::CHECK_CONDITION, "nobody knows its ports");
    }

    #[test]
    fn who_may_read_may_ask_what_there_is_to_ask() {
        let bench = Bench::new();
        let (mut a, mut b) = (bench.client("a"), bench.client("b"));
        register(&mut a, 1);
        assert_eq!(out(&mut a, 1, 1, &list(1, 0, 0)), Status::GOOD);
        b.run(&[0xa3, 0x0c, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]).good();
        b.run(&[0xa3, 0x0d, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0]).good();
    }

    #[test]
    fn scope_and_type_of_a_preemption_count_where_it_takes_the_reservation_over() {
        let bench = Bench::new();
        let (mut a, mut b) = (bench.client("a"), bench.client("b"));
        register(&mut a, 1);
        register(&mut b, 2);
        assert_eq!(out(&mut a, 1, 3, &list(1, 0, 0)), Status::GOOD);
        let preempt = |kind| [0x5f, 4, kind, 0, 0, 0, 0, 0, 24, 0];
        for kind in [0, 2, 0x13] {
            assert_eq!(b.run_with(&preempt(kind), &list(2, 1, 0)).check(), (5, 0x2400), "{kind}");
            assert_eq!(b.run_with(&preempt(kind), &list(9, 1, 0)).status, Status::RESERVATION_CONFLICT);
        }
        assert_eq!(out(&mut a, 4, 0x10, &list(1, 2, 0)), Status::GOOD);
        assert_eq!(keys(&mut a).len(), 8 + 8);
    }

    #[test]
    fn others_are_registered_by_spec_i_pt_and_all_target_ports() {
        let bench = Bench::new();
        let (mut a, b) = (bench.client("a"), bench.client("b"));
        let id = b.server.nexus().initiator.clone();
        let mut both = list(0, 5, 8 | 4);
        both.extend((id.len() as u32).to_be_bytes());
        both.extend(&*id);
        assert_eq!(out(&mut a, 0, 0, &both), Status::GOOD);
        assert_eq!(keys(&mut a).len(), 8 + 4 * 8);
        assert_eq!(out(&mut a, 6, 0, &list(0, 5, 8)), Status::CHECK_CONDITION);
        let mut long = list(5, 5, 8);
        long.extend([0, 0, 1, 4, 0x45, 0, 1, 0]);
        long.resize(24 + 4 + 0x104, b'x');
        let cdb = [0x5f, 0, 0, 0, 0, 0, 0, 1, 0x20, 0];
        assert_eq!(a.run_with(&cdb, &long).check(), (5, 0x2600), "no name is that long");
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let mut a = Bench::new().client("a");
        register(&mut a, 1);
        for (action, kind) in [(1, 2), (1, 0), (1, 0x13), (8, 0), (9, 0)] {
            assert_eq!(out(&mut a, action, kind, &list(1, 0, 0)), Status::CHECK_CONDITION, "{action} {kind}");
        }
        assert_eq!(a.run_with(&[0x5f, 0, 0, 0, 0, 0, 0, 0, 23, 0], &[0; 24]).check(), (5, 0x1a00));
        assert_eq!(a.run_with(&[0x5f, 1, 1, 0, 0, 0, 0, 0, 25, 0], &[0; 25]).check(), (5, 0x1a00));
        assert_eq!(a.run_with(&[0x5f, 6, 0, 0, 0, 0, 0, 0, 24, 0], &list(0, 1, 1)).check(), (5, 0x2600));
        assert_eq!(a.run(&[0x5e, 2, 0, 0, 0, 0, 0, 0, 8, 0]).good(), [0, 8, 0x0c, 0x80, 0xea, 1, 0, 0]);
    }

    #[derive(Default)]
    struct Shelf {
        images: Mutex<Vec<Vec<u8>>>,
        is_slow: Mutex<bool>,
        is_full: Mutex<bool>,
    }

    impl ReservationStore for Shelf {
        fn save(&self, image: &[u8]) -> SaveTicket {
            let mut images = self.images.lock().unwrap();
            images.push(image.to_vec());
            SaveTicket(images.len() as u64)
        }

        fn is_saved(&self, _ticket: SaveTicket) -> Option<bool> {
            (!*self.is_slow.lock().unwrap()).then_some(!*self.is_full.lock().unwrap())
        }
    }

    #[test]
    fn what_cannot_be_kept_has_changed_nothing() {
        let (shelf, volume) = (Arc::new(Shelf::default()), Arc::new(MemVolume::new(1 << 20)));
        let served = Served::with_store(volume.clone(), shelf.clone(), &[]).unwrap();
        let bench = Bench::around(LogicalUnit::over(Identity::of("a"), &served), volume);
        let (mut a, mut b) = (bench.client("a"), bench.client("b"));
        assert_eq!(out(&mut a, 6, 0, &list(0, 1, 1)), Status::GOOD);
        *shelf.is_full.lock().unwrap() = true;
        let reserve = a.run_with(&[0x5f, 1, 3, 0, 0, 0, 0, 0, 24, 0], &list(1, 0, 0));
        assert_eq!(reserve.check(), (4, 0x0c00));
        assert_eq!(b.run(&[0x5e, 1, 0, 0, 0, 0, 0, 0, 8, 0]).good(), [0, 0, 0, 1, 0, 0, 0, 0]);
        b.run_with(&WRITE, &[0; 512]).good();
        *shelf.is_full.lock().unwrap() = false;
        assert_eq!(out(&mut a, 1, 3, &list(1, 0, 0)), Status::GOOD);
        assert_eq!(b.run(&READ).status, Status::RESERVATION_CONFLICT);
    }

    #[test]
    fn what_is_to_persist_is_kept_before_the_answer_and_comes_back() {
        let shelf = Arc::new(Shelf::default());
        let volume = Arc::new(MemVolume::new(1 << 20));
        let bench = |image: &[u8]| {
            let served = Served::with_store(volume.clone(), shelf.clone(), image).unwrap();
            Bench::around(LogicalUnit::over(Identity::of("a"), &served), volume.clone())
        };
        let first = bench(&[]);
        let mut a = first.client("a");
        assert_eq!(out(&mut a, 6, 0, &list(0, 1, 1)), Status::GOOD);
        *shelf.is_slow.lock().unwrap() = true;
        let cdb = [0x5f, 1, 3, 0, 0, 0, 0, 0, 24, 0];
        let (mut task, step) = a.server.begin(&command(Lun::new(0), &cdb, 24));
        assert!(matches!(a.turn(&mut task, step, &list(1, 0, 0), &mut 0), Step::Wait));
        assert!(matches!(a.server.resume(&mut task), Step::Wait));
        *shelf.is_slow.lock().unwrap() = false;
        assert!(
            matches!(a.server.resume(&mut task), Step::Done(response) if response.status == Status::GOOD)
        );
        let image = shelf.images.lock().unwrap().last().cloned().unwrap();
        let second = bench(&image);
        assert_eq!(second.client("b").run(&READ).status, Status::RESERVATION_CONFLICT);
        let mut a = second.client("a");
        a.run(&READ).good();
        assert_eq!(a.run(&[0x5e, 2, 0, 0, 0, 0, 0, 0, 8, 0]).good()[2..4], [0x0d, 0x81]);
        assert_eq!(out(&mut a, 6, 0, &list(0, 1, 0)), Status::GOOD);
        assert_eq!(shelf.images.lock().unwrap().last().unwrap(), &[]);
    }
}
