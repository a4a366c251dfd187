//! Unit attentions for nexuses that have logged in and sent no command to the unit yet. Such a
//! nexus has no state in the unit, so the unit records what happens, and up to which nexus it
//! concerns.

use super::open_nexus::{NexusId, latest};
use crate::volume_state::{MAX_REGISTRATIONS, Registrant};
use blockmux_wire::scsi::sense::Asc;
use smallvec::SmallVec;
use std::collections::VecDeque;

/// What nexuses without state in the unit have missed.
#[derive(Default)]
pub(super) struct MissedAttentions {
    /// Conditions of every nexus, each once, oldest first, with the latest nexus that it concerns.
    of_all: SmallVec<[(Asc, NexusId); 4]>,
    /// Conditions of registrants, oldest first; at most [`MAX_REGISTRATIONS`].
    of_registrants: VecDeque<(Registrant, Asc, NexusId)>,
}

impl MissedAttentions {
    /// Records a condition of every nexus that is logged in.
    pub(super) fn record(&mut self, what: Asc) {
        if is_reset(what) {
            // A reset supersedes all older conditions.
            self.of_all.clear();
            self.of_registrants.clear();
        }
        self.of_all.retain(|(other, _)| *other != what);
        self.of_all.push((what, latest()));
    }

    /// Records a condition of a registrant's nexuses.
    pub(super) fn record_for(&mut self, registrant: &Registrant, what: Asc) {
        if self.of_registrants.len() >= MAX_REGISTRATIONS {
            self.of_registrants.pop_front();
        }
        self.of_registrants.push_back((registrant.clone(), what, latest()));
    }

    /// What a nexus of this registrant has missed, oldest first.
    pub(super) fn of(&self, nexus: NexusId, registrant: &Registrant) -> impl Iterator<Item = Asc> {
        let of_all = self.of_all.iter().filter(move |(_, latest)| nexus <= *latest).map(|(what, _)| *what);
        let own = move |(who, _, latest): &&(Registrant, Asc, NexusId)| nexus <= *latest && who == registrant;
        of_all.chain(self.of_registrants.iter().filter(own).map(|(_, what, _)| *what))
    }
}

/// Whether a condition supersedes all older ones (SAM-5 §5.14).
pub(super) fn is_reset(what: Asc) -> bool {
    what.0 >> 8 == Asc::POWER_ON_RESET_OR_BUS_DEVICE_RESET_OCCURRED.0 >> 8
}
