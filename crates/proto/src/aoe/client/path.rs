//! The ways to a disk: every station that has answered for it, through the port that the answer
//! came by.
//!
//! Commands go round them. One that does not answer several times in a row is passed over while
//! others do, and all stations are asked again from time to time until it answers.
//!
//! How large frames may be is what the target says, what the port takes, and what lies between lets
//! pass. The last is found by trying: until a frame of a size has come back, those of two sectors
//! are used, which pass everywhere.

use crate::aoe::sectors_in;
use crate::frames::{FramePortInfo, PortId, Station};
use std::time::Instant;

pub(super) struct Paths {
    paths: Vec<Path>,
    /// Whose turn it is.
    next: usize,
}

#[derive(Clone, Debug)]
pub(super) struct Path {
    pub(super) station: Station,
    /// What its target takes at most.
    pub(super) target_sectors: u8,
    /// Sectors of frames that are known to pass.
    pub(super) sectors: u8,
    /// What is tried.
    pub(super) probe: Option<u8>,
    /// Commands without an answer in time since the last answer.
    pub(super) silent: u32,
    /// When the latest of the commands was sent that were answered.
    pub(super) answered_up_to: Option<Instant>,
    /// When something was heard last.
    pub(super) heard: Option<Instant>,
    /// When a command was repeated last to hear something, and how often since something was.
    pub(super) listened: Option<Instant>,
    pub(super) listens: u32,
    /// When a frame of more sectors than are safe was answered last.
    pub(super) large_at: Option<Instant>,
}

impl Paths {
    pub(super) fn new() -> Paths {
        Paths { paths: Vec::new(), next: 0 }
    }

    pub(super) fn get_mut(&mut self, at: usize) -> Option<&mut Path> {
        self.paths.get_mut(at)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (usize, &mut Path)> {
        self.paths.iter_mut().enumerate()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Path> {
        self.paths.iter()
    }

    /// The path to that station.
    #[inline]
    pub(super) fn find(&self, station: Station) -> Option<usize> {
        self.paths.iter().position(|path| path.station == station)
    }

    /// A station has answered for the disk, and takes so many sectors in a frame.
    pub(super) fn on_config(&mut self, station: Station, target_sectors: u8, port: &FramePortInfo) {
        // Targets of the first version said nothing, and took two.
        let target_sectors = if target_sectors == 0 { SAFE_SECTORS } else { target_sectors };
        if let Some(path) = self.paths.iter_mut().find(|path| path.station == station) {
            path.silent = 0;
            if path.target_sectors != target_sectors {
                path.target_sectors = target_sectors;
                path.measure(port);
            }
            return;
        }
        let mut path = Path {
            station,
            target_sectors,
            sectors: 1,
            probe: None,
            silent: 0,
            answered_up_to: None,
            heard: None,
            listened: None,
            listens: 0,
            large_at: None,
        };
        path.measure(port);
        // A target that was started again may be another station: one that is silent has most
        // likely become this one.
        let is_dead = |path: &Path| path.is_silent() && path.station.port == station.port;
        if let Some(dead) = self.paths.iter_mut().find(|path| is_dead(path)) {
            *dead = path;
        } else if self.paths.len() < MAX_PATHS {
            self.paths.push(path);
        }
    }

    /// A port has changed.
    pub(super) fn on_port(&mut self, id: PortId, port: &FramePortInfo) {
        for path in self.paths.iter_mut().filter(|path| path.station.port == id) {
            path.silent = 0;
            path.measure(port);
        }
    }

    /// The path for the next command, of at least so many sectors, among those at ports that are
    /// up: one that answers if there is any.
    #[inline]
    pub(super) fn choose(&mut self, sectors: u8, ports: &[FramePortInfo]) -> Option<usize> {
        let count = self.paths.len();
        let mut silent = None;
        for step in 0..count {
            let at = self.next.wrapping_add(step).checked_rem(count)?;
            let path = self.paths.get(at)?;
            if path.sectors < sectors || !ports.get(usize::from(path.station.port.0))?.is_up {
                continue;
            }
            if !path.is_silent() {
                self.next = at.wrapping_add(1);
                return Some(at);
            }
            silent = silent.or(Some(at));
        }
        if let Some(at) = silent {
            self.next = at.wrapping_add(1);
        }
        silent
    }
}

impl Path {
    pub(super) fn is_silent(&self) -> bool {
        self.silent >= SILENT_AFTER
    }

    /// A command that was sent at that time, or later, was answered.
    #[inline]
    pub(super) fn on_answer(&mut self, sent: Instant, now: Instant) {
        (self.silent, self.listens) = (0, 0);
        self.answered_up_to = self.answered_up_to.max(Some(sent));
        self.heard = Some(now);
    }

    /// Since when nothing is heard, of what was first sent at that time or before.
    pub(super) fn quiet_since(&self, first_sent: Instant) -> Instant {
        self.heard.map_or(first_sent, |heard| heard.max(first_sent))
    }

    /// Finds out again what size passes.
    fn measure(&mut self, port: &FramePortInfo) {
        let most = self.target_sectors.min(sectors_in(port.mtu)).max(1);
        self.sectors = most.min(SAFE_SECTORS);
        self.probe = (most > self.sectors).then_some(most);
    }

    /// Large frames do not pass any more, though they did: it is tried again what passes.
    pub(super) fn on_large_lost(&mut self) {
        self.probe = Some(self.sectors).filter(|sectors| *sectors > SAFE_SECTORS);
        self.sectors = self.sectors.min(SAFE_SECTORS);
    }

    /// What was tried has come back.
    pub(super) fn on_probe_passed(&mut self, sectors: u8) {
        if self.probe == Some(sectors) {
            (self.sectors, self.probe) = (sectors, None);
        }
    }

    /// It has not, several times: half of it is tried.
    pub(super) fn on_probe_lost(&mut self, sectors: u8) {
        if self.probe == Some(sectors) {
            self.probe = Some(sectors / 2).filter(|half| *half > SAFE_SECTORS);
        }
    }
}

/// As many sectors as a frame of 1,500 bytes holds.
pub(super) const SAFE_SECTORS: u8 = 2;
/// More than a host has interfaces on one network.
pub(super) const MAX_PATHS: usize = 16;
/// Some commands are lost on a good path too.
const SILENT_AFTER: u32 = 4;

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_wire::ethernet::Mac;

    const PORT: FramePortInfo = FramePortInfo { mac: Mac([2; 6]), mtu: 9000, buffers: 64, is_up: true };

    fn station(port: u16, last: u8) -> Station {
        Station { port: PortId(port), mac: Mac([2, 0, 0, 0, 0, last]) }
    }

    #[test]
    fn commands_go_round_the_paths_that_answer() {
        let (mut paths, mut ports) = (Paths::new(), [PORT; 2]);
        assert_eq!(paths.choose(1, &ports), None);
        paths.on_config(station(0, 1), 2, &PORT);
        paths.on_config(station(1, 2), 2, &PORT);
        paths.on_config(station(1, 2), 2, &PORT);
        let round = |paths: &mut Paths, ports: &[FramePortInfo]| [0; 4].map(|_| paths.choose(1, ports));
        assert_eq!(round(&mut paths, &ports), [Some(0), Some(1), Some(0), Some(1)]);
        paths.get_mut(0).unwrap().silent = SILENT_AFTER;
        assert_eq!(round(&mut paths, &ports), [Some(1); 4]);
        ports[1].is_up = false;
        assert_eq!(round(&mut paths, &ports), [Some(0); 4], "better than none");
        paths.on_config(station(0, 1), 2, &PORT);
        assert!(!paths.get_mut(0).unwrap().is_silent());
        assert_eq!(paths.choose(3, &ports), None, "it does not take so many sectors");
    }

    #[test]
    fn the_size_of_frames_is_tried_from_above() {
        let mut paths = Paths::new();
        paths.on_config(station(0, 1), 16, &PORT);
        let path = paths.get_mut(0).unwrap();
        assert_eq!((path.sectors, path.probe), (2, Some(16)));
        path.on_probe_lost(16);
        path.on_probe_lost(16);
        assert_eq!(path.probe, Some(8), "once for each size");
        path.on_probe_passed(16);
        assert_eq!(path.sectors, 2, "it came too late to be trusted");
        path.on_probe_passed(8);
        assert_eq!((path.sectors, path.probe), (8, None));
        paths.on_port(PortId(0), &FramePortInfo { mtu: 1500, ..PORT });
        assert_eq!((paths.get_mut(0).unwrap().sectors, paths.get_mut(0).unwrap().probe), (2, None));
        paths.on_config(station(0, 2), 0, &PORT);
        assert_eq!(paths.get_mut(1).unwrap().sectors, 2);
    }
}
