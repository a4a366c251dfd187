//! PERSISTENT RESERVE OUT: registrations and reservations are made, taken over, handed over and
//! given up.

use crate::scsi::ScsiStatus;
use crate::scsi::device::nexus::{TransportId, is_port_of};
use crate::scsi::device::task::{Action, Context, MultiStepCommand, TaskFailure, TaskOutcome};
use crate::scsi::iscsi_name::Name;
use crate::scsi::sense::Sense;
use crate::volume_state::{
    Drain, Move, Notices, Preempt, Register, Registrant, ReservationRefused, Reservations, SaveTicket,
};
use blockmux_volume::Output;
use blockmux_wire::scsi::opcode::persistent_reserve_out as out;
use blockmux_wire::scsi::reservation::*;
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use std::sync::Arc;
use zerocopy::FromBytes;

pub(in crate::scsi) fn reserve_out(cx: &mut Context<'_>) -> TaskOutcome {
    let cdb = &cx.command.cdb;
    let (scope, kind) = (cdb.byte(2) >> 4, ScsiReservationType(cdb.byte(2) & 0x0f));
    // SPC-5, the PERSISTENT RESERVE OUT service actions: scope and type count where a reservation
    // is made or released. A preemption does not always make one.
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
fn change(cx: &mut Context<'_>, bytes: &[u8]) -> TaskOutcome {
    let action = u16::from(cx.command.cdb.byte(1) & 0x1f);
    let wanted = ReserveOutAction::parse(cx, action, bytes)?;
    let who = cx.nexus.registrant();
    let served = &cx.unit.unit.served;
    if wanted.persists() && served.store().is_none() {
        return Err(Sense::in_parameters(20).into());
    }
    let ticket = served.change(action == out::PREEMPT_AND_ABORT, |table| {
        // SPC-2, "Reservations": a RESERVE that is held keeps persistent reservations out.
        if table.reserved_by.is_some() {
            return Err(TaskFailure::status(ScsiStatus::RESERVATION_CONFLICT));
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

/// Whether the service action keeps somebody out who was in, so that what was admitted before has
/// to be over.
fn takes_away(action: u16) -> bool {
    matches!(action, out::RESERVE | out::PREEMPT | out::PREEMPT_AND_ABORT | out::REGISTER_AND_MOVE)
}

/// One service action with its parameters.
enum ReserveOutAction {
    Register {
        key: Option<u64>,
        new_key: u64,
        whom: Vec<Registrant>,
        persists: bool,
    },
    Reserve {
        key: u64,
        kind: ScsiReservationType,
    },
    Release {
        key: u64,
        kind: ScsiReservationType,
    },
    Clear {
        key: u64,
    },
    /// And whether scope and type are ones that a reservation can have.
    Preempt(Preempt, bool),
    Move(Move),
}

impl ReserveOutAction {
    fn parse(cx: &Context<'_>, action: u16, bytes: &[u8]) -> Result<ReserveOutAction, Sense> {
        if action == out::REGISTER_AND_MOVE {
            return ReserveOutAction::parse_move(cx, bytes);
        }
        let (list, rest) = ReserveOut::ref_from_prefix(bytes).map_err(|_| Sense::in_parameters(0))?;
        let key = list.reservation_key.get();
        let other_key = list.service_action_reservation_key.get();
        let kind = ScsiReservationType(cx.command.cdb.byte(2) & 0x0f);
        match action {
            out::REGISTER | out::REGISTER_AND_IGNORE_EXISTING_KEY => {
                let ignores = action == out::REGISTER_AND_IGNORE_EXISTING_KEY;
                let persists = list.flags & APTPL != 0;
                let whom = whom(cx, list.flags, rest)?;
                let key = (!ignores).then_some(key);
                Ok(ReserveOutAction::Register { key, new_key: other_key, whom, persists })
            }
            out::RESERVE => Ok(ReserveOutAction::Reserve { key, kind }),
            out::RELEASE => Ok(ReserveOutAction::Release { key, kind }),
            out::CLEAR => Ok(ReserveOutAction::Clear { key }),
            _ => {
                let is_whole_unit = cx.command.cdb.byte(2) >> 4 == 0;
                let makes_sense = is_whole_unit && kind.name().is_some();
                Ok(ReserveOutAction::Preempt(Preempt { key, victim_key: other_key, kind }, makes_sense))
            }
        }
    }

    fn parse_move(cx: &Context<'_>, bytes: &[u8]) -> Result<ReserveOutAction, Sense> {
        let (list, rest) = RegisterAndMove::ref_from_prefix(bytes).map_err(|_| Sense::in_parameters(0))?;
        let port = list.relative_target_port_identifier.get();
        let port = port_name(cx, port).ok_or(Sense::in_parameters(18))?;
        let ids = transport_ids(cx, rest, list.transport_id_length.get() as usize, 20)?;
        // A node is not one port that the reservation could be moved to.
        let [TransportId::Port(id)] = ids.as_slice() else { return Err(Sense::in_parameters(20)) };
        Ok(ReserveOutAction::Move(Move {
            key: list.reservation_key.get(),
            new_key: list.service_action_reservation_key.get(),
            to: Registrant { initiator: id.clone(), port },
            unregister: list.flags & UNREG != 0,
            persists: list.flags & APTPL != 0,
        }))
    }

    fn persists(&self) -> bool {
        matches!(
            self,
            ReserveOutAction::Register { persists: true, .. }
                | ReserveOutAction::Move(Move { persists: true, .. })
        )
    }

    fn apply(&self, all: &mut Reservations, who: &Registrant) -> Result<Notices, TaskFailure> {
        let result = match self {
            ReserveOutAction::Register { key, new_key, whom, persists } => {
                // SPC-5, "Registering": others are only registered by one who was not registered
                // itself.
                if whom.len() > 1
                    && all.key_of(who).is_some()
                    && whom.iter().any(|other| other.initiator != who.initiator)
                {
                    return Err(Sense::in_parameters(20).into());
                }
                all.register(who, &Register { key: *key, new_key: *new_key, whom, persists: *persists })
            }
            ReserveOutAction::Reserve { key, kind } => all.reserve(who, *key, *kind).map(|()| Notices::new()),
            ReserveOutAction::Release { key, kind } => all.release(who, *key, *kind),
            ReserveOutAction::Clear { key } => all.clear(who, *key),
            ReserveOutAction::Preempt(what, makes_sense) => {
                let holds_key = all.key_of(who) == Some(what.key);
                if holds_key && !makes_sense && all.is_taken_over(what.victim_key) {
                    return Err(Sense::cdb_bit(2, 7).into());
                }
                all.preempt(who, what)
            }
            ReserveOutAction::Move(what) => all.register_and_move(who, what),
        };
        result.map_err(refusal)
    }
}

fn refusal(refused: ReservationRefused) -> TaskFailure {
    match refused {
        ReservationRefused::Conflict => TaskFailure::status(ScsiStatus::RESERVATION_CONFLICT),
        ReservationRefused::InvalidRelease => {
            Sense::illegal(Asc::INVALID_RELEASE_OF_PERSISTENT_RESERVATION).into()
        }
        ReservationRefused::NoKey => Sense::in_parameters(8).into(),
        ReservationRefused::ToItself => Sense::in_parameters(24).into(),
        ReservationRefused::Full => Sense::illegal(Asc::INSUFFICIENT_REGISTRATION_RESOURCES).into(),
    }
}

/// Who is registered: the nexus; with SPEC_I_PT each listed initiator port, and where a node is
/// listed, those of its ports that are logged in; with ALL_TG_PT all of them on every target port.
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
        _ => cx.target.ports().into_iter().map(|port| port.name).collect(),
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
    let own = cx.target.ports().into_iter().find(|port| port.relative_id == relative_id);
    own.map(|port| port.name).or_else(|| {
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
            // SPC-5, TransportIDs: an iSCSI TransportID says how long it is, all others have 24
            // bytes.
            0x05 => usize::from(u16::from_be_bytes([high, low])).saturating_add(4),
            _ => 24,
        };
        // Of the longest iSCSI name, an ISID and padding. Each is kept for as long as it is
        // registered.
        let (id, after) = rest
            .split_at_checked(len)
            .filter(|_| len <= MAX_TRANSPORT_ID)
            .ok_or(Sense::in_parameters(field))?;
        ids.push(TransportId::read(id, cx.nexus.protocol()).ok_or(Sense::in_parameters(field))?);
        rest = after;
    }
    if rest.is_empty() { Ok(ids) } else { Err(Sense::in_parameters(field)) }
}

/// The change is made. What was admitted before may still be in flight, of whatever protocol; and
/// an image is being kept.
struct Settling {
    drain: Option<Drain>,
    ticket: Option<SaveTicket>,
}

impl MultiStepCommand for Settling {
    fn on_io(&mut self, _cx: &mut Context<'_>, _output: Output) -> TaskOutcome {
        Err(TaskFailure::internal())
    }

    fn on_resume(&mut self, cx: &mut Context<'_>) -> TaskOutcome {
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
