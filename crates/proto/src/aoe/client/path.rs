//! The paths to a disk: each station that has answered for it, with the port of the answer.
//!
//! Commands use the paths in rotation. A path that has not answered several commands in a row is
//! skipped while others answer, and the config query is repeated until it answers.
//!
//! The maximum frame size is the minimum of what the target advertises, what the port allows and
//! what the network passes. The last one is probed: until a probe of a size has been answered,
//! frames have two sectors, which pass everywhere.

use crate::aoe::sectors_in;
use crate::driver::frames::{FramePortInfo, PortId, Station};
use std::time::Instant;

pub(super) struct AoePaths {
    pub(super) all: Vec<AoePath>,
    /// Index of the next path in rotation.
    next: usize,
}

#[derive(Clone, Debug)]
pub(super) struct AoePath {
    pub(super) station: Station,
    /// The maximum number of sectors that the target accepts in a frame.
    pub(super) target_sectors: u8,
    /// The number of sectors for which frames are known to pass.
    pub(super) sectors: u8,
    /// The number of sectors that is being probed.
    pub(super) probe: Option<u8>,
    /// Number of commands that timed out since the last answer.
    pub(super) silent: u32,
    /// Latest transmission time of the answered commands.
    pub(super) answered_up_to: Option<Instant>,
    /// When the last answer arrived.
    pub(super) last_heard: Option<Instant>,
    /// When the last loss probe was sent, and the number of them since the last answer.
    pub(super) loss_probed_at: Option<Instant>,
    pub(super) loss_probes: u32,
    /// When a frame of more than [`SAFE_SECTORS`] was last answered.
    pub(super) large_at: Option<Instant>,
}

impl AoePaths {
    pub(super) fn new() -> AoePaths {
        AoePaths { all: Vec::new(), next: 0 }
    }

    /// Index of the path to `station`.
    #[inline]
    pub(super) fn find(&self, station: Station) -> Option<usize> {
        self.all.iter().position(|path| path.station == station)
    }

    /// Adds or updates the path to a station that has answered for the disk.
    pub(super) fn on_config(&mut self, station: Station, target_sectors: u8, port: &FramePortInfo) {
        // Targets of the first protocol version send 0 and accept two sectors.
        let target_sectors = if target_sectors == 0 { SAFE_SECTORS } else { target_sectors };
        if let Some(path) = self.all.iter_mut().find(|path| path.station == station) {
            path.silent = 0;
            if path.target_sectors != target_sectors {
                path.target_sectors = target_sectors;
                path.measure(port);
            }
            return;
        }
        let mut path = AoePath {
            station,
            target_sectors,
            sectors: 1,
            probe: None,
            silent: 0,
            answered_up_to: None,
            last_heard: None,
            loss_probed_at: None,
            loss_probes: 0,
            large_at: None,
        };
        path.measure(port);
        // A restarted target may be at another station: a silent path on the same port has most
        // likely become this one.
        let is_dead = |path: &AoePath| path.is_silent() && path.station.port == station.port;
        if let Some(dead) = self.all.iter_mut().find(|path| is_dead(path)) {
            *dead = path;
        } else if self.all.len() < MAX_PATHS {
            self.all.push(path);
        }
    }

    /// Handles a change of a port.
    pub(super) fn on_port(&mut self, id: PortId, port: &FramePortInfo) {
        for path in self.all.iter_mut().filter(|path| path.station.port == id) {
            path.silent = 0;
            path.measure(port);
        }
    }

    /// Chooses the path for the next command among those that accept `sectors` and whose port is
    /// up; one that answers, if there is any.
    #[inline]
    pub(super) fn choose(&mut self, sectors: u8, ports: &[FramePortInfo]) -> Option<usize> {
        let count = self.all.len();
        let mut silent = None;
        for step in 0..count {
            let at = self.next.wrapping_add(step).checked_rem(count)?;
            let path = self.all.get(at)?;
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

impl AoePath {
    pub(super) fn is_silent(&self) -> bool {
        self.silent >= SILENT_AFTER
    }

    /// Records an answer to a command that was sent at `sent`.
    #[inline]
    pub(super) fn on_answer(&mut self, sent: Instant, now: Instant) {
        (self.silent, self.loss_probes) = (0, 0);
        self.answered_up_to = self.answered_up_to.max(Some(sent));
        self.last_heard = Some(now);
    }

    /// Since when commands first sent at `first_sent` or earlier have had no answer.
    pub(super) fn silent_since(&self, first_sent: Instant) -> Instant {
        self.last_heard.map_or(first_sent, |last_heard| last_heard.max(first_sent))
    }

    /// Starts to probe the frame size.
    fn measure(&mut self, port: &FramePortInfo) {
        let max_sectors = self.target_sectors.min(sectors_in(port.mtu)).max(1);
        self.sectors = max_sectors.min(SAFE_SECTORS);
        self.probe = (max_sectors > self.sectors).then_some(max_sectors);
    }

    /// Large frames no longer pass: probes the frame size again.
    pub(super) fn on_large_lost(&mut self) {
        self.probe = Some(self.sectors).filter(|sectors| *sectors > SAFE_SECTORS);
        self.sectors = self.sectors.min(SAFE_SECTORS);
    }

    /// A probe of this size was answered.
    pub(super) fn on_probe_passed(&mut self, sectors: u8) {
        if self.probe == Some(sectors) {
            (self.sectors, self.probe) = (sectors, None);
        }
    }

    /// Probes of this size were lost several times: probes half of it.
    pub(super) fn on_probe_lost(&mut self, sectors: u8) {
        if self.probe == Some(sectors) {
            self.probe = Some(sectors / 2).filter(|half| *half > SAFE_SECTORS);
        }
    }
}

/// The number of sectors in a frame of 1,500 bytes.
pub(super) const SAFE_SECTORS: u8 = 2;
/// The maximum number of paths to a disk.
pub(super) const MAX_PATHS: usize = 16;
/// The number of consecutive timeouts after which a path counts as silent.
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
    fn commands_rotate_over_the_paths_that_answer() {
        let (mut paths, mut ports) = (AoePaths::new(), [PORT; 2]);
        assert_eq!(paths.choose(1, &ports), None);
        paths.on_config(station(0, 1), 2, &PORT);
        paths.on_config(station(1, 2), 2, &PORT);
        paths.on_config(station(1, 2), 2, &PORT);
        let round = |paths: &mut AoePaths, ports: &[FramePortInfo]| [0; 4].map(|_| paths.choose(1, ports));
        assert_eq!(round(&mut paths, &ports), [Some(0), Some(1), Some(0), Some(1)]);
        paths.all[0].silent = SILENT_AFTER;
        assert_eq!(round(&mut paths, &ports), [Some(1); 4]);
        ports[1].is_up = false;
        assert_eq!(round(&mut paths, &ports), [Some(0); 4], "better than none");
        paths.on_config(station(0, 1), 2, &PORT);
        assert!(!paths.all[0].is_silent());
        assert_eq!(paths.choose(3, &ports), None, "it does not take so many sectors");
    }

    #[test]
    fn frame_sizes_are_probed_from_the_largest_down() {
        let mut paths = AoePaths::new();
        paths.on_config(station(0, 1), 16, &PORT);
        let path = &mut paths.all[0];
        assert_eq!((path.sectors, path.probe), (2, Some(16)));
        path.on_probe_lost(16);
        path.on_probe_lost(16);
        assert_eq!(path.probe, Some(8), "once for each size");
        path.on_probe_passed(16);
        assert_eq!(path.sectors, 2, "it came too late to be trusted");
        path.on_probe_passed(8);
        assert_eq!((path.sectors, path.probe), (8, None));
        paths.on_port(PortId(0), &FramePortInfo { mtu: 1500, ..PORT });
        assert_eq!((paths.all[0].sectors, paths.all[0].probe), (2, None));
        paths.on_config(station(0, 2), 0, &PORT);
        assert_eq!(paths.all[1].sectors, 2);
    }
}
