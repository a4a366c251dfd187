//! What stations do, for whoever audits. AoE has no login: a station that asks what a disk is stands for one, once.

use crate::aoe::Address;
use crate::event::{AuditEvent, AuditEvents, Login};
use blockmux_wire::ethernet::Mac;
use std::borrow::Cow;
use std::collections::VecDeque;

/// Events of stations, and who was told of.
#[derive(Default)]
pub(super) struct StationAudit {
    events: AuditEvents,
    /// Stations that have identified a disk, the latest last.
    known: VecDeque<(Mac, Address)>,
    /// The refusal that was told last: a station repeats its commands many times a second.
    refused: Option<(Mac, Address)>,
}

impl StationAudit {
    #[inline]
    pub(super) fn pop(&mut self) -> Option<AuditEvent> {
        self.events.pop()
    }

    /// A station has identified a disk.
    #[cold]
    pub(super) fn identified(&mut self, who: Mac, disk: Address) {
        if self.known.contains(&(who, disk)) {
            return;
        }
        if self.known.len() >= MAX_KNOWN {
            self.known.pop_front();
        }
        self.known.push_back((who, disk));
        self.push(who, disk, AuditEvent::Login(login(who, disk)));
    }

    /// A command was not carried out, because of who sent it.
    #[cold]
    pub(super) fn refused(&mut self, who: Mac, disk: Address, reason: &'static str) {
        if self.refused.replace((who, disk)) != Some((who, disk)) {
            let reason = Cow::from(reason);
            self.push(who, disk, AuditEvent::Refused { login: login(who, disk), reason });
        }
    }

    /// A station has asked for a change of who may use a disk.
    #[cold]
    pub(super) fn changed(&mut self, who: Mac, disk: Address, change: &'static str, is_done: bool) {
        let unit = format!("disk {disk}");
        self.push(who, disk, AuditEvent::Reservation { unit, change, is_done });
    }

    fn push(&mut self, who: Mac, disk: Address, event: AuditEvent) {
        self.events.push(AuditEvent::ByStation { login: login(who, disk), event: Box::new(event) });
    }
}

fn login(who: Mac, disk: Address) -> Login {
    Login { protocol: "aoe", initiator: who.to_string(), target: disk.to_string() }
}

/// Stations and disks; of more, the oldest are told again.
const MAX_KNOWN: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_station_is_told_of_once_for_each_disk_and_refusals_are_not_repeated() {
        let (mut audit, who, disk) =
            (StationAudit::default(), Mac([2, 0, 0, 0, 0, 1]), Address { shelf: 7, slot: 3 });
        (0..1000).for_each(|_| audit.identified(who, disk));
        (0..1000).for_each(|_| audit.refused(who, disk, "why"));
        let events: Vec<_> = std::iter::from_fn(|| audit.pop()).collect();
        let [AuditEvent::ByStation { login: one, event: first }, AuditEvent::ByStation { event: second, .. }] =
            &events[..]
        else {
            panic!("{events:?}")
        };
        assert_eq!((&*one.initiator, &*one.target), ("02:00:00:00:00:01", "e7.3"));
        assert!(matches!(**first, AuditEvent::Login(_)) && matches!(**second, AuditEvent::Refused { .. }));
    }
}
