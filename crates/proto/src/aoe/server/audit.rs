//! The stations that use disks, for whoever audits. AoE has no login and no logout: a station comes
//! with its first ATA command for a disk, and has left when nothing was heard of it for
//! [`SILENT_AFTER`].

use crate::aoe::AoeAddress;
use crate::event::{AuditEvent, AuditEvents, Login};
use crate::volume_state::UserMeter;
use blockmux_volume::Io;
use blockmux_wire::ethernet::Mac;
use std::borrow::Cow;
use std::time::{Duration, Instant};

/// Stations, and events of them.
#[derive(Default)]
pub(super) struct StationAudit {
    events: AuditEvents,
    /// Those that are there, in no order.
    stations: Vec<KnownStation>,
    /// The place of the one that was heard of last.
    latest: usize,
    /// When the next of them may have left.
    look_at: Option<Instant>,
    /// The refusal that was told last: a station repeats its commands many times a second.
    refused: Option<(Mac, AoeAddress)>,
}

/// A station and a disk that it uses.
struct KnownStation {
    who: Mac,
    disk: AoeAddress,
    heard: Instant,
    meter: UserMeter,
}

impl StationAudit {
    #[inline]
    pub(super) fn pop(&mut self) -> Option<AuditEvent> {
        self.events.pop()
    }

    /// When to look whether a station has left.
    #[inline]
    pub(super) fn look_at(&self) -> Option<Instant> {
        self.look_at
    }

    /// A station has a command carried out by a disk.
    #[inline]
    pub(super) fn heard(&mut self, who: Mac, disk: AoeAddress, now: Instant) {
        match self.find(who, disk) {
            Some(station) => station.heard = now,
            None => self.come(who, disk, now),
        }
    }

    /// A station asks who is there, which says nothing of a disk but that the station is.
    pub(super) fn asked(&mut self, who: Mac, now: Instant) {
        self.stations.iter_mut().filter(|station| station.who == who).for_each(|station| station.heard = now);
    }

    /// A station's request begins.
    #[inline]
    pub(super) fn count(&mut self, who: Mac, disk: AoeAddress, io: &Io) {
        if let Some(station) = self.find(who, disk) {
            station.meter.count(io);
        }
    }

    /// A station's request has failed.
    #[cold]
    pub(super) fn failed(&mut self, who: Mac, disk: AoeAddress) {
        if let Some(station) = self.find(who, disk) {
            station.meter.fail();
        }
    }

    /// Takes leave of those that were silent for long.
    #[cold]
    pub(super) fn look(&mut self, now: Instant) {
        if self.look_at.is_none_or(|at| at > now) {
            return;
        }
        while let Some(at) = self.stations.iter().position(|station| left_at(station) <= now) {
            self.leave(at, "nothing was heard of it for five minutes");
        }
        self.look_at = self.stations.iter().map(left_at).min();
    }

    /// A command was not carried out, because of who sent it.
    #[cold]
    pub(super) fn refused(&mut self, who: Mac, disk: AoeAddress, reason: &'static str) {
        if self.refused.replace((who, disk)) != Some((who, disk)) {
            let reason = Cow::from(reason);
            self.push(who, disk, AuditEvent::Refused { login: login(who, disk), reason });
        }
    }

    /// A station has asked for a change of who may use a disk.
    #[cold]
    pub(super) fn changed(&mut self, who: Mac, disk: AoeAddress, change: &'static str, is_done: bool) {
        let unit = format!("disk {disk}");
        self.push(who, disk, AuditEvent::Reservation { unit, change, is_done });
    }

    /// Several commands in a row are mostly of one station.
    #[inline]
    fn find(&mut self, who: Mac, disk: AoeAddress) -> Option<&mut KnownStation> {
        let is = |station: &KnownStation| (station.who, station.disk) == (who, disk);
        if !self.stations.get(self.latest).is_some_and(is) {
            self.latest = self.stations.iter().position(is)?;
        }
        self.stations.get_mut(self.latest)
    }

    #[cold]
    fn come(&mut self, who: Mac, disk: AoeAddress, now: Instant) {
        if self.stations.len() >= MAX_KNOWN
            && let Some((at, _)) = self.stations.iter().enumerate().min_by_key(|(_, station)| station.heard)
        {
            self.leave(at, "more stations came than are listed, and this one was silent the longest");
        }
        let meter = UserMeter::default();
        self.events.push(AuditEvent::StationCame { login: login(who, disk), meter: meter.reader() });
        let station = KnownStation { who, disk, heard: now, meter };
        self.look_at.get_or_insert(left_at(&station));
        self.latest = self.stations.len();
        self.stations.push(station);
    }

    fn leave(&mut self, at: usize, reason: &'static str) {
        let KnownStation { who, disk, .. } = self.stations.swap_remove(at);
        self.push(who, disk, AuditEvent::Logout { reason });
    }

    fn push(&mut self, who: Mac, disk: AoeAddress, event: AuditEvent) {
        self.events.push(AuditEvent::ByStation { login: login(who, disk), event: Box::new(event) });
    }
}

fn left_at(station: &KnownStation) -> Instant {
    station.heard.checked_add(SILENT_AFTER).unwrap_or(station.heard)
}

fn login(who: Mac, disk: AoeAddress) -> Login {
    Login { protocol: "aoe", initiator: who.to_string(), target: disk.to_string() }
}

/// Linux asks who is there every minute.
const SILENT_AFTER: Duration = Duration::from_secs(300);
/// Stations that are listed for each core, once for each disk that they use.
const MAX_KNOWN: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume_state::VolumeTraffic;
    use blockmux_volume::{Op, Tag};

    const DISK: AoeAddress = AoeAddress { shelf: 7, slot: 3 };

    fn mac(last: u16) -> Mac {
        let [high, low] = last.to_be_bytes();
        Mac([2, 0, 0, 0, high, low])
    }

    fn events(audit: &mut StationAudit) -> Vec<AuditEvent> {
        std::iter::from_fn(|| audit.pop()).collect()
    }

    fn is_departure(event: &AuditEvent) -> bool {
        matches!(event, AuditEvent::ByStation { event, .. } if matches!(**event, AuditEvent::Logout { .. }))
    }

    #[test]
    fn a_station_comes_once_for_each_disk_is_counted_and_leaves_after_long_silence() {
        let (mut audit, who, start) = (StationAudit::default(), mac(1), Instant::now());
        (0..1000).for_each(|_| audit.heard(who, DISK, start));
        audit.count(who, DISK, &Io::new(Tag(0), Op::Read, 0, 4096));
        audit.failed(who, DISK);
        (0..1000).for_each(|_| audit.refused(who, DISK, "why"));
        let told = events(&mut audit);
        let [AuditEvent::StationCame { login, meter }, AuditEvent::ByStation { event, .. }] = &told[..]
        else {
            panic!("{told:?}")
        };
        assert_eq!((&*login.initiator, &*login.target), ("02:00:00:00:00:01", "e7.3"));
        let traffic = meter.added_to(VolumeTraffic::default());
        assert_eq!((traffic.reads, traffic.read_bytes, traffic.failed), (1, 4096, 1));
        assert!(matches!(**event, AuditEvent::Refused { .. }));
        audit.asked(who, start + SILENT_AFTER / 2);
        audit.look(start + SILENT_AFTER);
        assert_eq!(events(&mut audit), [], "it was heard of meanwhile");
        audit.look(audit.look_at().unwrap());
        let told = events(&mut audit);
        assert!(told.len() == 1 && is_departure(&told[0]), "{told:?}");
        assert_eq!(audit.look_at(), None);
        audit.heard(who, DISK, start + SILENT_AFTER * 2);
        assert!(matches!(events(&mut audit)[..], [AuditEvent::StationCame { .. }]));
    }

    #[test]
    fn of_too_many_stations_the_one_that_was_silent_the_longest_leaves() {
        let (mut audit, start) = (StationAudit::default(), Instant::now());
        for nth in 0..=MAX_KNOWN as u16 {
            audit.heard(mac(nth), DISK, start + Duration::from_secs(nth.into()));
            let told = events(&mut audit);
            assert_eq!(
                told.iter().filter(|event| is_departure(event)).count(),
                usize::from(nth == MAX_KNOWN as u16)
            );
        }
        assert_eq!(audit.stations.len(), MAX_KNOWN);
        assert!(audit.find(mac(0), DISK).is_none() && audit.find(mac(1), DISK).is_some());
    }
}
