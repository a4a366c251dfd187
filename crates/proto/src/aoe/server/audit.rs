//! The stations that use disks, for the audit log. AoE has no login and no logout: a station is
//! added with its first ATA command for a disk, and removed when it has sent nothing for
//! [`STATION_TIMEOUT`].

use crate::aoe::AoeAddress;
use crate::driver::audit_event::{AuditEvent, AuditEvents, Login};
use crate::volume_state::UserMeter;
use blockmux_volume::Io;
use blockmux_wire::ethernet::Mac;
use std::borrow::Cow;
use std::time::{Duration, Instant};

/// The list of stations, and their events for the log.
#[derive(Default)]
pub(super) struct StationAudit {
    events: AuditEvents,
    /// The stations, unordered.
    stations: Vec<KnownStation>,
    /// Index of the station that sent the last command.
    latest: usize,
    /// When to check for stations that have expired.
    pub(super) next_expiry: Option<Instant>,
    /// The refusal that was logged last; it is logged once although the station retransmits.
    refused: Option<(Mac, AoeAddress)>,
}

/// A station and a disk that it uses.
struct KnownStation {
    mac: Mac,
    disk: AoeAddress,
    last_heard: Instant,
    meter: UserMeter,
}

impl StationAudit {
    #[inline]
    pub(super) fn pop(&mut self) -> Option<AuditEvent> {
        self.events.pop()
    }

    /// Records an ATA command of a station for a disk.
    #[inline]
    pub(super) fn on_command(&mut self, mac: Mac, disk: AoeAddress, now: Instant) {
        match self.find(mac, disk) {
            Some(station) => station.last_heard = now,
            None => self.add(mac, disk, now),
        }
    }

    /// Records a config query, which shows that the station is alive but uses no disk.
    pub(super) fn on_query(&mut self, mac: Mac, now: Instant) {
        self.stations
            .iter_mut()
            .filter(|station| station.mac == mac)
            .for_each(|station| station.last_heard = now);
    }

    /// Counts the start of an I/O of a station.
    #[inline]
    pub(super) fn count_io(&mut self, mac: Mac, disk: AoeAddress, io: &Io) {
        if let Some(station) = self.find(mac, disk) {
            station.meter.count(io);
        }
    }

    /// Counts the failure of an I/O of a station.
    #[cold]
    pub(super) fn failed(&mut self, mac: Mac, disk: AoeAddress) {
        if let Some(station) = self.find(mac, disk) {
            station.meter.fail();
        }
    }

    /// Removes the stations that have expired.
    #[cold]
    pub(super) fn expire(&mut self, now: Instant) {
        if self.next_expiry.is_none_or(|at| at > now) {
            return;
        }
        while let Some(at) = self.stations.iter().position(|station| expires_at(station) <= now) {
            self.remove(at, "the station sent nothing for five minutes");
        }
        self.next_expiry = self.stations.iter().map(expires_at).min();
    }

    /// Removes the stations of the disks for which `stays` returns `false`.
    #[cold]
    pub(super) fn retain_disks(&mut self, stays: impl Fn(AoeAddress) -> bool) {
        while let Some(at) = self.stations.iter().position(|station| !stays(station.disk)) {
            self.remove(at, "the disk is no longer served");
        }
    }

    /// Logs that a disk refused the commands of a station.
    #[cold]
    pub(super) fn refused(&mut self, mac: Mac, disk: AoeAddress, reason: &'static str) {
        if self.refused.replace((mac, disk)) != Some((mac, disk)) {
            let reason = Cow::from(reason);
            self.push(mac, disk, AuditEvent::Refused { login: login(mac, disk), reason });
        }
    }

    /// Logs that a station requested a change of a disk's mask list or reservation.
    #[cold]
    pub(super) fn changed(&mut self, mac: Mac, disk: AoeAddress, change: &'static str, is_done: bool) {
        let unit = format!("disk {disk}");
        self.push(mac, disk, AuditEvent::Reservation { unit, change, is_done });
    }

    /// Finds a station, trying the latest one first: consecutive commands are mostly of one
    /// station.
    #[inline]
    fn find(&mut self, mac: Mac, disk: AoeAddress) -> Option<&mut KnownStation> {
        let is = |station: &KnownStation| (station.mac, station.disk) == (mac, disk);
        if !self.stations.get(self.latest).is_some_and(is) {
            self.latest = self.stations.iter().position(is)?;
        }
        self.stations.get_mut(self.latest)
    }

    #[cold]
    fn add(&mut self, mac: Mac, disk: AoeAddress, now: Instant) {
        if self.stations.len() >= MAX_KNOWN
            && let Some((at, _)) =
                self.stations.iter().enumerate().min_by_key(|(_, station)| station.last_heard)
        {
            self.remove(at, "the list of stations is full, and this one sent nothing for the longest time");
        }
        let meter = UserMeter::default();
        self.events.push(AuditEvent::StationLoggedIn { login: login(mac, disk), meter: meter.reader() });
        let station = KnownStation { mac, disk, last_heard: now, meter };
        self.next_expiry.get_or_insert(expires_at(&station));
        self.latest = self.stations.len();
        self.stations.push(station);
    }

    fn remove(&mut self, at: usize, reason: &'static str) {
        let KnownStation { mac, disk, .. } = self.stations.swap_remove(at);
        self.push(mac, disk, AuditEvent::Logout { reason });
    }

    fn push(&mut self, mac: Mac, disk: AoeAddress, event: AuditEvent) {
        self.events.push(AuditEvent::ByStation { login: login(mac, disk), event: Box::new(event) });
    }
}

fn expires_at(station: &KnownStation) -> Instant {
    station.last_heard.checked_add(STATION_TIMEOUT).unwrap_or(station.last_heard)
}

fn login(mac: Mac, disk: AoeAddress) -> Login {
    let (initiator, target) = (mac.to_string(), disk.to_string());
    Login { protocol: "aoe", initiator, target, is_authenticated: false }
}

/// A station without a frame for this long has expired. Linux sends a query every minute.
const STATION_TIMEOUT: Duration = Duration::from_secs(300);
/// The maximum number of entries per core; a station has one for each disk that it uses.
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
    fn a_station_logs_in_once_for_each_disk_and_logs_out_after_long_silence() {
        let (mut audit, mac, start) = (StationAudit::default(), mac(1), Instant::now());
        (0..1000).for_each(|_| audit.on_command(mac, DISK, start));
        audit.count_io(mac, DISK, &Io::new(Tag(0), Op::Read, 0, 4096));
        audit.failed(mac, DISK);
        (0..1000).for_each(|_| audit.refused(mac, DISK, "why"));
        let told = events(&mut audit);
        let [AuditEvent::StationLoggedIn { login, meter }, AuditEvent::ByStation { event, .. }] = &told[..]
        else {
            panic!("{told:?}")
        };
        assert_eq!((&*login.initiator, &*login.target), ("02:00:00:00:00:01", "e7.3"));
        let traffic = meter.added_to(VolumeTraffic::default());
        assert_eq!((traffic.reads, traffic.read_bytes, traffic.failed), (1, 4096, 1));
        assert!(matches!(**event, AuditEvent::Refused { .. }));
        audit.on_query(mac, start + STATION_TIMEOUT / 2);
        audit.expire(start + STATION_TIMEOUT);
        assert_eq!(events(&mut audit), [], "it was heard of meanwhile");
        audit.expire(audit.next_expiry.unwrap());
        let told = events(&mut audit);
        assert!(told.len() == 1 && is_departure(&told[0]), "{told:?}");
        assert_eq!(audit.next_expiry, None);
        audit.on_command(mac, DISK, start + STATION_TIMEOUT * 2);
        assert!(matches!(events(&mut audit)[..], [AuditEvent::StationLoggedIn { .. }]));
    }

    #[test]
    fn beyond_the_limit_the_longest_silent_station_is_removed() {
        let (mut audit, start) = (StationAudit::default(), Instant::now());
        for nth in 0..=MAX_KNOWN as u16 {
            audit.on_command(mac(nth), DISK, start + Duration::from_secs(nth.into()));
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
