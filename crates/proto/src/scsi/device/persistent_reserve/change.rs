//! PERSISTENT RESERVE OUT: registers, reserves, releases, preempts and moves.

use crate::scsi::ScsiStatus;
use crate::scsi::device::nexus::{TransportId, is_port_of};
use crate::scsi::device::task::{CommandContext, HandlerAction, MultiStepCommand, TaskFailure, TaskOutcome};
use crate::scsi::iscsi_name::Name;
use crate::scsi::sense::Sense;
use crate::volume_state::{
    Drain, Move, Notices, Preempt, Register, Registrant, ReservationChange, ReservationRefused, Reservations,
};
use blockmux_volume::Output;
use blockmux_wire::scsi::opcode::persistent_reserve_out as out;
use blockmux_wire::scsi::reservation::*;
use blockmux_wire::scsi::sense::Asc;
use std::sync::Arc;
use zerocopy::FromBytes;

pub(in crate::scsi) fn reserve_out(cx: &mut CommandContext<'_>) -> TaskOutcome {
    let cdb = &cx.command.cdb;
    let (scope, kind) = (cdb.byte(2) >> 4, ScsiReservationType(cdb.byte(2) & 0x0f));
    // SPC-5, the PERSISTENT RESERVE OUT service actions: scope and type apply where a reservation
    // is made or released; a preemption does not always make one.
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

/// Executes the service action.
fn change(cx: &mut CommandContext<'_>, bytes: &[u8]) -> TaskOutcome {
    let action = u16::from(cx.command.cdb.byte(1) & 0x1f);
    let request = ReserveOutAction::parse(cx, action, bytes)?;
    let registrant = cx.unit.nexus().registrant();
    let volume_state = &cx.unit.unit.volume_state;
    if request.persists() && !volume_state.has_shared_state() {
        return Err(Sense::in_parameters(20).into());
    }
    let change = ReservationChange::new(volume_state, cx.unit.epoch, action == out::PREEMPT_AND_ABORT);
    let mut command = ReserveOutCommand {
        change,
        request,
        registrant,
        revokes_access: revokes_access(action),
        drain: None,
    };
    let outcome = command.on_resume(cx);
    if matches!(outcome, Ok(HandlerAction::Wait)) {
        cx.work(command);
    }
    outcome
}

/// Whether the service action revokes access, so that admitted I/O must finish before the response.
fn revokes_access(action: u16) -> bool {
    matches!(action, out::RESERVE | out::PREEMPT | out::PREEMPT_AND_ABORT | out::REGISTER_AND_MOVE)
}

/// A service action with its parameters.
enum ReserveOutAction {
    Register {
        key: Option<u64>,
        new_key: u64,
        registrants: Vec<Registrant>,
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
    /// PREEMPT, and whether scope and type are valid for a reservation.
    Preempt(Preempt, bool),
    Move(Move),
}

impl ReserveOutAction {
    fn parse(cx: &CommandContext<'_>, action: u16, bytes: &[u8]) -> Result<ReserveOutAction, Sense> {
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
                let registrants = affected_registrants(cx, list.flags, rest)?;
                let key = (!ignores).then_some(key);
                Ok(ReserveOutAction::Register { key, new_key: other_key, registrants, persists })
            }
            out::RESERVE => Ok(ReserveOutAction::Reserve { key, kind }),
            out::RELEASE => Ok(ReserveOutAction::Release { key, kind }),
            out::CLEAR => Ok(ReserveOutAction::Clear { key }),
            _ => {
                let is_whole_unit = cx.command.cdb.byte(2) >> 4 == 0;
                let has_valid_type = is_whole_unit && kind.name().is_some();
                Ok(ReserveOutAction::Preempt(Preempt { key, victim_key: other_key, kind }, has_valid_type))
            }
        }
    }

    fn parse_move(cx: &CommandContext<'_>, bytes: &[u8]) -> Result<ReserveOutAction, Sense> {
        let (list, rest) = RegisterAndMove::ref_from_prefix(bytes).map_err(|_| Sense::in_parameters(0))?;
        let port = list.relative_target_port_identifier.get();
        let port = port_name(cx, port).ok_or(Sense::in_parameters(18))?;
        let ids = transport_ids(cx, rest, list.transport_id_length.get() as usize, 20)?;
        // A node is not a single port that can take the reservation.
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

    fn apply(&self, all: &mut Reservations, registrant: &Registrant) -> Result<Notices, TaskFailure> {
        let result = match self {
            ReserveOutAction::Register { key, new_key, registrants, persists } => {
                // SPC-5, "Registering": only an unregistered nexus may register others.
                if registrants.len() > 1
                    && all.key_of(registrant).is_some()
                    && registrants.iter().any(|other| other.initiator != registrant.initiator)
                {
                    return Err(Sense::in_parameters(20).into());
                }
                all.register(
                    registrant,
                    &Register { key: *key, new_key: *new_key, registrants, persists: *persists },
                )
            }
            ReserveOutAction::Reserve { key, kind } => {
                all.reserve(registrant, *key, *kind).map(|()| Notices::new())
            }
            ReserveOutAction::Release { key, kind } => all.release(registrant, *key, *kind),
            ReserveOutAction::Clear { key } => all.clear(registrant, *key),
            ReserveOutAction::Preempt(what, has_valid_type) => {
                let holds_key = all.key_of(registrant) == Some(what.key);
                if holds_key && !has_valid_type && all.is_taken_over(what.victim_key) {
                    return Err(Sense::cdb_bit(2, 7).into());
                }
                all.preempt(registrant, what)
            }
            ReserveOutAction::Move(what) => all.register_and_move(registrant, what),
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

/// The registrants of the service action: the nexus; with SPEC_I_PT each listed initiator port, and
/// for a listed node its logged-in ports; with ALL_TG_PT each of them on every target port.
fn affected_registrants(cx: &CommandContext<'_>, flags: u8, rest: &[u8]) -> Result<Vec<Registrant>, Sense> {
    let own = cx.unit.nexus().registrant();
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

/// The logged-in ports of a node.
fn ports_of(cx: &CommandContext<'_>, node: &Name) -> Result<Vec<Arc<[u8]>>, Sense> {
    let mut ports = cx.target.states().logged_in(|initiator| is_port_of(initiator, node));
    ports.sort_unstable();
    ports.dedup();
    if ports.is_empty() { Err(Sense::in_parameters(24)) } else { Ok(ports) }
}

/// Name of a port of the unit, possibly of another target.
fn port_name(cx: &CommandContext<'_>, relative_id: u16) -> Option<Arc<str>> {
    let own = cx.target.ports().into_iter().find(|port| port.relative_id == relative_id);
    own.map(|port| port.name).or_else(|| {
        cx.unit.unit.read_state(|state| {
            let found = state.ports.iter().find(|(_, id)| **id == relative_id);
            found.map(|(name, _)| name.clone())
        })
    })
}

/// Parses a list of TransportIDs; `field` is the offset of its length field.
fn transport_ids(
    cx: &CommandContext<'_>,
    list: &[u8],
    length: usize,
    field: u16,
) -> Result<Vec<TransportId>, Sense> {
    let mut rest = list.get(..length).ok_or(Sense::illegal(Asc::PARAMETER_LIST_LENGTH_ERROR))?;
    let mut ids = Vec::new();
    while let [first, _, high, low, ..] = *rest {
        let len = match first & 0x0f {
            // SPC-5, TransportIDs: iSCSI TransportIDs have a length field; all others have 24
            // bytes.
            0x05 => usize::from(u16::from_be_bytes([high, low])).saturating_add(4),
            _ => 24,
        };
        // The limit fits the longest iSCSI name, an ISID and padding, because registrations retain
        // the TransportID.
        let (id, after) = rest
            .split_at_checked(len)
            .filter(|_| len <= MAX_TRANSPORT_ID)
            .ok_or(Sense::in_parameters(field))?;
        ids.push(TransportId::read(id, cx.unit.nexus().protocol()).ok_or(Sense::in_parameters(field))?);
        rest = after;
    }
    if rest.is_empty() { Ok(ids) } else { Err(Sense::in_parameters(field)) }
}

/// A command in progress: makes its change, then waits for I/O admitted earlier, over any protocol.
struct ReserveOutCommand {
    change: ReservationChange,
    request: ReserveOutAction,
    registrant: Registrant,
    revokes_access: bool,
    /// Since the change.
    drain: Option<Drain>,
}

impl MultiStepCommand for ReserveOutCommand {
    fn on_io(&mut self, _cx: &mut CommandContext<'_>, _output: Output) -> TaskOutcome {
        Err(TaskFailure::internal())
    }

    fn on_resume(&mut self, cx: &mut CommandContext<'_>) -> TaskOutcome {
        if let Some(drain) = &self.drain {
            return Ok(if drain.is_over() { HandlerAction::good() } else { HandlerAction::Wait });
        }
        let changed = self.change.poll(|table, reservations| {
            // SPC-2, "Reservations": RESERVE conflicts with persistent reservations.
            if table.reserved_by.is_some() {
                return Err(TaskFailure::status(ScsiStatus::RESERVATION_CONFLICT));
            }
            self.request.apply(reservations, &self.registrant)
        });
        if !changed? {
            return Ok(HandlerAction::Wait);
        }
        cx.unit.refresh();
        if !self.revokes_access {
            return Ok(HandlerAction::good());
        }
        self.drain = Some(Drain::new(&cx.unit.unit.volume_state));
        self.on_resume(cx)
    }
}

/// Maximum length of the parameter list, in bytes: about a hundred TransportIDs.
const MAX_LIST: usize = 32 << 10;
/// Maximum length of a TransportID, in bytes.
const MAX_TRANSPORT_ID: usize = 256;
