//! Registrations and the persistent reservation of a volume (SPC-5).
//!
//! This module knows no commands of a protocol: a caller requests a change, and gets the list of
//! registrants to notify. The terms and type numbers are those of SPC-5. NVMe has the same six
//! types and rules (NVM Express Base Specification, "Reservations"), so its hosts are registered in
//! the same table as SCSI nexuses.

use blockmux_wire::scsi::reservation::ScsiReservationType;
use std::sync::Arc;

/// Identity of a registrant, which stays the same over a restart of either side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Registrant {
    /// SCSI: TransportID of the initiator port; NVMe: host identifier and host NQN.
    pub(crate) initiator: Arc<[u8]>,
    /// SCSI: name of the target port; empty for NVMe, which registers hosts and not paths.
    pub(crate) port: Arc<str>,
}

impl Registrant {
    /// The identity of an NVMe host: both names, because authentication proves only the NQN
    /// (decision 70). The NQN ends with a NUL, so a host without one differs from a record of an
    /// earlier version, which has the identifier only.
    pub(crate) fn of_nvme_host(nqn: &str, id: [u8; 16]) -> Registrant {
        Registrant { initiator: [&id[..], nqn.as_bytes(), &[0]].concat().into(), port: "".into() }
    }

    /// The host identifier, if this is an NVMe host.
    pub(crate) fn nvme_host(&self) -> Option<[u8; 16]> {
        // A SCSI target port always has a name.
        if self.port.is_empty() { self.initiator.first_chunk().copied() } else { None }
    }

    /// Whether this is a record of an NVMe host without its NQN, as earlier versions wrote them.
    fn lacks_nqn(&self) -> bool {
        self.port.is_empty() && self.initiator.len() == size_of::<[u8; 16]>()
    }
}

/// A registration: registrant and key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Registration {
    pub(crate) who: Registrant,
    /// The reservation key; not 0.
    pub(crate) key: u64,
}

/// A persistent reservation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reservation {
    pub(crate) kind: ScsiReservationType,
    /// The holder; with an all-registrants type, the registrant that made the reservation.
    pub(crate) holder: Registrant,
}

/// Registrations and reservation of one volume. Without registrations there is no reservation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reservations {
    /// PRGENERATION: number of changes since the start.
    pub(crate) generation: u32,
    pub(crate) registrations: Vec<Registration>,
    pub(crate) reservation: Option<Reservation>,
    /// APTPL of the last registration: whether this persists through a restart.
    pub(crate) persists: bool,
}

/// Access to the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockAccess {
    pub(crate) reads: bool,
    pub(crate) writes: bool,
}

impl BlockAccess {
    pub(crate) const ALL: BlockAccess = BlockAccess { reads: true, writes: true };
    pub(crate) const NONE: BlockAccess = BlockAccess { reads: false, writes: false };
}

/// Reason for which a change is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReservationRefused {
    /// RESERVATION CONFLICT.
    Conflict,
    /// RELEASE with a type other than the reservation's.
    InvalidRelease,
    /// A key is 0 where that is not allowed.
    NoKey,
    /// REGISTER AND MOVE to the current holder.
    ToItself,
    /// The volume has [`MAX_REGISTRATIONS`] already.
    Full,
}

/// The registrants to notify, with their notices.
pub(crate) type Notices = Vec<(Registrant, Notice)>;

/// A notification of a change by another registrant, which each protocol sends in its own form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// All registrations were cleared, and the reservation with them.
    ReservationsPreempted,
    /// Its registration was removed.
    RegistrationsPreempted,
    /// The reservation was released or has another type now.
    ReservationsReleased,
}

/// Parameters of REGISTER.
pub(crate) struct Register<'a> {
    /// The expected current key; `None`: any.
    pub(crate) key: Option<u64>,
    pub(crate) new_key: u64,
    /// The registrants: the nexus itself, and further ones with SPEC_I_PT or ALL_TG_PT.
    pub(crate) registrants: &'a [Registrant],
    pub(crate) persists: bool,
}

/// Parameters of PREEMPT.
pub(crate) struct Preempt {
    pub(crate) key: u64,
    /// The key whose registrations are removed.
    pub(crate) victim_key: u64,
    pub(crate) kind: ScsiReservationType,
}

/// Parameters of REGISTER AND MOVE.
pub(crate) struct Move {
    pub(crate) key: u64,
    pub(crate) new_key: u64,
    pub(crate) to: Registrant,
    pub(crate) unregister: bool,
    pub(crate) persists: bool,
}

impl Reservations {
    /// The access of `who` (SPC-5 table 66); `None` is a client that cannot register.
    pub(crate) fn access(&self, who: Option<&Registrant>) -> BlockAccess {
        let Some(reservation) = &self.reservation else { return BlockAccess::ALL };
        let kind = reservation.kind;
        let has_access = who.is_some_and(|who| match kind.admits_registrants() {
            true => self.key_of(who).is_some(),
            false => reservation.holder == *who,
        });
        BlockAccess { reads: has_access || kind.is_write_exclusive(), writes: has_access }
    }

    /// Whether `who` holds the reservation.
    pub(crate) fn holds(&self, who: &Registrant) -> bool {
        self.reservation.as_ref().is_some_and(|reservation| match reservation.kind.is_all_registrants() {
            true => self.key_of(who).is_some(),
            false => reservation.holder == *who,
        })
    }

    /// Whether a record of an earlier version stands for this NVMe host or another with its
    /// identifier.
    pub(crate) fn has_record_without_nqn(&self, who: &Registrant) -> bool {
        let is_its = |other: &Registrant| other.lacks_nqn() && other.nvme_host() == who.nvme_host();
        self.registrations.iter().any(|registration| is_its(&registration.who))
    }

    /// Gives the record of an earlier version to this NVMe host, unless it has its own; returns
    /// whether there was one.
    pub(crate) fn adopt_record_without_nqn(&mut self, who: &Registrant) -> bool {
        if !self.has_record_without_nqn(who) || self.key_of(who).is_some() {
            return false;
        }
        let id = who.nvme_host();
        let recorded = self.registrations.iter_mut().map(|registration| &mut registration.who);
        let holder = self.reservation.iter_mut().map(|reservation| &mut reservation.holder);
        for record in recorded.chain(holder).filter(|record| record.lacks_nqn() && record.nvme_host() == id) {
            record.clone_from(who);
        }
        true
    }

    pub(crate) fn key_of(&self, who: &Registrant) -> Option<u64> {
        self.registrations.iter().find(|registration| registration.who == *who).map(|found| found.key)
    }

    /// REGISTER and REGISTER AND IGNORE EXISTING KEY (SPC-5).
    pub(crate) fn register(
        &mut self,
        who: &Registrant,
        what: &Register<'_>,
    ) -> Result<Notices, ReservationRefused> {
        if what.key.is_some_and(|key| key != self.key_of(who).unwrap_or(0)) {
            return Err(ReservationRefused::Conflict);
        }
        if what.new_key == 0 {
            if self.key_of(who).is_none() {
                return Ok(Notices::new());
            }
            self.bump();
            self.persists = what.persists;
            return Ok(self.unregister(who));
        }
        let newcomers = what.registrants.iter().filter(|who| self.key_of(who).is_none()).count();
        if self.registrations.len().saturating_add(newcomers) > MAX_REGISTRATIONS {
            return Err(ReservationRefused::Full);
        }
        for registrant in what.registrants {
            self.set_key(registrant, what.new_key);
        }
        self.bump();
        self.persists = what.persists;
        Ok(Notices::new())
    }

    /// RESERVE (SPC-5).
    pub(crate) fn reserve(
        &mut self,
        who: &Registrant,
        key: u64,
        kind: ScsiReservationType,
    ) -> Result<(), ReservationRefused> {
        self.check_key(who, key)?;
        match &self.reservation {
            Some(held) if held.kind == kind && self.holds(who) => Ok(()),
            Some(_) => Err(ReservationRefused::Conflict),
            None => {
                self.reservation = Some(Reservation { kind, holder: who.clone() });
                Ok(())
            }
        }
    }

    /// RELEASE (SPC-5).
    pub(crate) fn release(
        &mut self,
        who: &Registrant,
        key: u64,
        kind: ScsiReservationType,
    ) -> Result<Notices, ReservationRefused> {
        self.check_key(who, key)?;
        let holds = self.holds(who);
        match &self.reservation {
            Some(held) if holds && held.kind != kind => Err(ReservationRefused::InvalidRelease),
            Some(_) if holds => Ok(self.drop_reservation(who)),
            _ => Ok(Notices::new()),
        }
    }

    /// CLEAR (SPC-5).
    pub(crate) fn clear(&mut self, who: &Registrant, key: u64) -> Result<Notices, ReservationRefused> {
        self.check_key(who, key)?;
        self.bump();
        self.reservation = None;
        let gone = std::mem::take(&mut self.registrations).into_iter();
        let others = gone.filter(|registration| registration.who != *who);
        Ok(others.map(|registration| (registration.who, Notice::ReservationsPreempted)).collect())
    }

    /// PREEMPT and PREEMPT AND ABORT (SPC-5). Every notified registrant has lost its registration,
    /// except for those that get RESERVATIONS RELEASED.
    pub(crate) fn preempt(
        &mut self,
        who: &Registrant,
        what: &Preempt,
    ) -> Result<Notices, ReservationRefused> {
        self.check_key(who, what.key)?;
        let held = self.reservation.clone();
        let takes_over = self.is_taken_over(what.victim_key);
        // Even for the holder, where Linux's target changes the type instead: Base 2.0 §8.19.7 has
        // this command aborted with Invalid Field, SPC-5 with INVALID FIELD IN PARAMETER LIST, and
        // SPDK's target refuses it, too.
        if what.victim_key == 0 && !takes_over {
            return Err(ReservationRefused::NoKey);
        }
        let is_victim =
            |registration: &Registration| what.victim_key == 0 || registration.key == what.victim_key;
        if !self.registrations.iter().any(is_victim) {
            return Err(ReservationRefused::Conflict);
        }
        self.bump();
        let mut notices = Notices::new();
        self.registrations.retain(|registration| {
            let stays = registration.who == *who || !is_victim(registration);
            if !stays {
                notices.push((registration.who.clone(), Notice::RegistrationsPreempted));
            }
            stays
        });
        if takes_over {
            // The remaining registrants are notified that the type has changed.
            if held.is_some_and(|held| held.kind != what.kind) {
                notices.extend(self.others(who).map(|other| (other, Notice::ReservationsReleased)));
            }
            self.reservation = Some(Reservation { kind: what.kind, holder: who.clone() });
        }
        Ok(notices)
    }

    /// Whether a PREEMPT of this key takes over the reservation, instead of only removing
    /// registrations.
    pub(crate) fn is_taken_over(&self, victim_key: u64) -> bool {
        match &self.reservation {
            None => false,
            Some(held) if held.kind.is_all_registrants() => victim_key == 0,
            Some(held) => self.key_of(&held.holder) == Some(victim_key),
        }
    }

    /// REGISTER AND MOVE (SPC-5).
    pub(crate) fn register_and_move(
        &mut self,
        who: &Registrant,
        what: &Move,
    ) -> Result<Notices, ReservationRefused> {
        self.check_key(who, what.key)?;
        if what.new_key == 0 {
            return Err(ReservationRefused::NoKey);
        }
        let kind = match &self.reservation {
            Some(held) if held.holder == *who && !held.kind.is_all_registrants() => held.kind,
            _ => return Err(ReservationRefused::Conflict),
        };
        // Through any target port.
        if what.to.initiator == who.initiator {
            return Err(ReservationRefused::ToItself);
        }
        if self.key_of(&what.to).is_none() && self.registrations.len() >= MAX_REGISTRATIONS {
            return Err(ReservationRefused::Full);
        }
        self.set_key(&what.to, what.new_key);
        self.reservation = Some(Reservation { kind, holder: what.to.clone() });
        self.bump();
        self.persists = what.persists;
        Ok(if what.unregister { self.unregister(who) } else { Notices::new() })
    }

    /// Removes a registration. The reservation is released with its holder, or with the last
    /// registrant (SPC-5).
    fn unregister(&mut self, who: &Registrant) -> Notices {
        let held = self.holds(who);
        self.registrations.retain(|registration| registration.who != *who);
        let outlives =
            self.reservation.as_ref().is_some_and(|reservation| reservation.kind.is_all_registrants())
                && !self.registrations.is_empty();
        if held && !outlives { self.drop_reservation(who) } else { Notices::new() }
    }

    /// Removes the reservation, and notifies the other registrants that had access.
    fn drop_reservation(&mut self, who: &Registrant) -> Notices {
        match self.reservation.take() {
            Some(held) if held.kind.admits_registrants() => {
                self.others(who).map(|other| (other, Notice::ReservationsReleased)).collect()
            }
            _ => Notices::new(),
        }
    }

    fn others(&self, who: &Registrant) -> impl Iterator<Item = Registrant> {
        let others = self.registrations.iter().filter(move |registration| registration.who != *who);
        others.map(|registration| registration.who.clone())
    }

    fn check_key(&self, who: &Registrant, key: u64) -> Result<(), ReservationRefused> {
        if self.key_of(who) == Some(key) { Ok(()) } else { Err(ReservationRefused::Conflict) }
    }

    fn set_key(&mut self, who: &Registrant, key: u64) {
        match self.registrations.iter_mut().find(|registration| registration.who == *who) {
            Some(registration) => registration.key = key,
            None => self.registrations.push(Registration { who: who.clone(), key }),
        }
    }

    fn bump(&mut self) {
        self.generation = self.generation.wrapping_add(1);
    }
}

/// The maximum number of registrations of one volume.
pub(crate) const MAX_REGISTRATIONS: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    type Kind = ScsiReservationType;

    fn who(name: &str) -> Registrant {
        Registrant { initiator: name.as_bytes().into(), port: "t,1".into() }
    }

    /// A table in which `a`, `b` and `c` are registered with the keys 1, 2 and 3.
    fn three() -> Reservations {
        let mut all = Reservations::default();
        for (key, name) in [(1, "a"), (2, "b"), (3, "c")] {
            let what = Register { key: Some(0), new_key: key, registrants: &[who(name)], persists: false };
            assert_eq!(all.register(&who(name), &what), Ok(vec![]));
        }
        all
    }

    #[test]
    fn each_reservation_type_grants_access_to_the_right_initiators() {
        // Holder, registered, not registered: each may read, may write.
        let table = [
            (Kind::WRITE_EXCLUSIVE, ["rw", "r", "r"]),
            (Kind::EXCLUSIVE_ACCESS, ["rw", "", ""]),
            (Kind::WRITE_EXCLUSIVE_REGISTRANTS_ONLY, ["rw", "rw", "r"]),
            (Kind::EXCLUSIVE_ACCESS_REGISTRANTS_ONLY, ["rw", "rw", ""]),
            (Kind::WRITE_EXCLUSIVE_ALL_REGISTRANTS, ["rw", "rw", "r"]),
            (Kind::EXCLUSIVE_ACCESS_ALL_REGISTRANTS, ["rw", "rw", ""]),
        ];
        for (kind, expected) in table {
            let mut all = three();
            all.reserve(&who("a"), 1, kind).unwrap();
            let access = ["a", "b", "x"].map(|name| {
                let access = all.access(Some(&who(name)));
                format!("{}{}", if access.reads { "r" } else { "" }, if access.writes { "w" } else { "" })
            });
            assert_eq!(access, expected, "{kind}");
        }
    }

    #[test]
    fn only_the_right_key_registers_again() {
        let mut all = three();
        let again = |key, new_key| Register { key, new_key, registrants: &[], persists: false };
        assert_eq!(all.register(&who("a"), &again(Some(9), 5)), Err(ReservationRefused::Conflict));
        assert_eq!(all.register(&who("x"), &again(Some(9), 5)), Err(ReservationRefused::Conflict));
        assert_eq!(all.generation, 3);
        let what = Register { key: None, new_key: 7, registrants: &[who("a")], persists: true };
        all.register(&who("a"), &what).unwrap();
        assert_eq!((all.key_of(&who("a")), all.generation, all.persists), (Some(7), 4, true));
        all.register(&who("a"), &again(Some(7), 0)).unwrap();
        assert_eq!((all.key_of(&who("a")), all.generation, all.persists), (None, 5, false));
        all.register(&who("a"), &again(Some(0), 0)).unwrap();
        assert_eq!(all.generation, 5);
    }

    #[test]
    fn a_reservation_ends_with_its_holder_or_with_the_last_registrant() {
        let leave = Register { key: None, new_key: 0, registrants: &[], persists: false };
        let mut all = three();
        all.reserve(&who("a"), 1, Kind::WRITE_EXCLUSIVE).unwrap();
        assert_eq!(all.register(&who("a"), &leave), Ok(vec![]));
        assert_eq!(all.reservation, None);
        let mut all = three();
        all.reserve(&who("a"), 1, Kind::WRITE_EXCLUSIVE_REGISTRANTS_ONLY).unwrap();
        let told = ["b", "c"].map(|name| (who(name), Notice::ReservationsReleased));
        assert_eq!(all.register(&who("a"), &leave), Ok(told.to_vec()));
        let mut all = three();
        all.reserve(&who("a"), 1, Kind::WRITE_EXCLUSIVE_ALL_REGISTRANTS).unwrap();
        for name in ["a", "b"] {
            assert_eq!(all.register(&who(name), &leave), Ok(vec![]));
            assert!(all.reservation.is_some());
        }
        all.register(&who("c"), &leave).unwrap();
        assert_eq!(all.reservation, None);
    }

    #[test]
    fn a_second_reservation_conflicts_unless_it_is_the_same() {
        let mut all = three();
        all.reserve(&who("a"), 1, Kind::EXCLUSIVE_ACCESS).unwrap();
        assert_eq!(all.reserve(&who("a"), 1, Kind::EXCLUSIVE_ACCESS), Ok(()));
        assert_eq!(all.reserve(&who("a"), 1, Kind::WRITE_EXCLUSIVE), Err(ReservationRefused::Conflict));
        assert_eq!(all.reserve(&who("b"), 2, Kind::EXCLUSIVE_ACCESS), Err(ReservationRefused::Conflict));
        assert_eq!(all.reserve(&who("x"), 0, Kind::EXCLUSIVE_ACCESS), Err(ReservationRefused::Conflict));
        assert_eq!(all.generation, 3);
    }

    #[test]
    fn a_release_is_the_holder_s_and_of_the_right_type() {
        let mut all = three();
        all.reserve(&who("a"), 1, Kind::EXCLUSIVE_ACCESS_REGISTRANTS_ONLY).unwrap();
        assert_eq!(all.release(&who("b"), 2, Kind::EXCLUSIVE_ACCESS_REGISTRANTS_ONLY), Ok(vec![]));
        assert!(all.reservation.is_some());
        assert_eq!(
            all.release(&who("a"), 1, Kind::EXCLUSIVE_ACCESS),
            Err(ReservationRefused::InvalidRelease)
        );
        let told = all.release(&who("a"), 1, Kind::EXCLUSIVE_ACCESS_REGISTRANTS_ONLY).unwrap();
        assert_eq!(told.len(), 2);
        assert_eq!(all.release(&who("a"), 1, Kind::EXCLUSIVE_ACCESS), Ok(vec![]));
    }

    #[test]
    fn clear_removes_everything_and_notifies_the_others() {
        let mut all = three();
        all.reserve(&who("a"), 1, Kind::EXCLUSIVE_ACCESS).unwrap();
        assert_eq!(all.clear(&who("x"), 0), Err(ReservationRefused::Conflict));
        let told = ["a", "c"].map(|name| (who(name), Notice::ReservationsPreempted));
        assert_eq!(all.clear(&who("b"), 2), Ok(told.to_vec()));
        assert_eq!((all.registrations.len(), all.reservation, all.generation), (0, None, 4));
    }

    #[test]
    fn preempting_the_holder_takes_over_its_reservation() {
        let mut all = three();
        all.reserve(&who("a"), 1, Kind::EXCLUSIVE_ACCESS_REGISTRANTS_ONLY).unwrap();
        let what = Preempt { key: 2, victim_key: 1, kind: Kind::WRITE_EXCLUSIVE };
        let told = vec![(who("a"), Notice::RegistrationsPreempted), (who("c"), Notice::ReservationsReleased)];
        assert_eq!(all.preempt(&who("b"), &what), Ok(told));
        assert_eq!(all.reservation, Some(Reservation { kind: Kind::WRITE_EXCLUSIVE, holder: who("b") }));
        assert_eq!(all.key_of(&who("a")), None);
    }

    #[test]
    fn preempting_another_only_removes_its_registration() {
        let mut all = three();
        all.reserve(&who("a"), 1, Kind::EXCLUSIVE_ACCESS).unwrap();
        let preempt = |victim_key| Preempt { key: 2, victim_key, kind: Kind::WRITE_EXCLUSIVE };
        assert_eq!(all.preempt(&who("b"), &preempt(9)), Err(ReservationRefused::Conflict));
        assert_eq!(all.preempt(&who("b"), &preempt(0)), Err(ReservationRefused::NoKey));
        assert_eq!(all.preempt(&who("b"), &preempt(3)), Ok(vec![(who("c"), Notice::RegistrationsPreempted)]));
        assert!(all.holds(&who("a")));
        let own = Preempt { key: 1, victim_key: 1, kind: Kind::WRITE_EXCLUSIVE };
        assert_eq!(all.preempt(&who("a"), &own), Ok(vec![(who("b"), Notice::ReservationsReleased)]));
        assert_eq!(all.reservation.unwrap().kind, Kind::WRITE_EXCLUSIVE);
    }

    #[test]
    fn all_registrants_are_preempted_by_key_0() {
        let mut all = three();
        all.reserve(&who("a"), 1, Kind::EXCLUSIVE_ACCESS_ALL_REGISTRANTS).unwrap();
        let preempt = |victim_key| Preempt { key: 2, victim_key, kind: Kind::EXCLUSIVE_ACCESS };
        all.preempt(&who("b"), &preempt(1)).unwrap();
        assert_eq!(all.reservation.as_ref().unwrap().kind, Kind::EXCLUSIVE_ACCESS_ALL_REGISTRANTS);
        assert_eq!(all.preempt(&who("b"), &preempt(0)), Ok(vec![(who("c"), Notice::RegistrationsPreempted)]));
        assert_eq!(all.reservation, Some(Reservation { kind: Kind::EXCLUSIVE_ACCESS, holder: who("b") }));
    }

    #[test]
    fn a_reservation_moves_to_the_given_registrant() {
        let mut all = three();
        let to = |to| Move { key: 1, new_key: 8, to, unregister: true, persists: false };
        assert_eq!(all.register_and_move(&who("a"), &to(who("x"))), Err(ReservationRefused::Conflict));
        all.reserve(&who("a"), 1, Kind::WRITE_EXCLUSIVE).unwrap();
        assert_eq!(all.register_and_move(&who("a"), &to(who("a"))), Err(ReservationRefused::ToItself));
        assert_eq!(all.register_and_move(&who("a"), &to(who("x"))), Ok(vec![]));
        assert!(all.holds(&who("x")) && all.key_of(&who("x")) == Some(8) && all.key_of(&who("a")).is_none());
    }

    /// SPDK wrote the 17th registrant beyond the end of its file (CVE-2025-57275).
    #[test]
    fn the_number_of_registrations_is_limited() {
        let mut all = three();
        let registrants: Vec<Registrant> = (0..=MAX_REGISTRATIONS).map(|i| who(&i.to_string())).collect();
        let what = Register { key: None, new_key: 4, registrants: &registrants, persists: false };
        assert_eq!(all.register(&who("0"), &what), Err(ReservationRefused::Full));
        assert_eq!(all.registrations.len(), 3);
    }
}
