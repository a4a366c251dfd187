//! What a group needs of the volumes of this daemon.

use super::input::{ClientSender, Report};
use blockmux_group::{Epoch, Event};
use blockmux_rbd::cluster::Cluster;
use std::sync::Arc;

/// The volumes of a group, as this daemon serves them.
///
/// # Contract
/// The group's thread calls every method, and none of them blocks: what takes time runs elsewhere,
/// and [`VolumeReports`] say how it has ended. Calls come in this order: `begin`; any number of
/// `activate` and `deactivate`; `end_io`; and from the beginning again, with another client. A
/// volume is activated again only after a report that it is not active.
pub trait GroupVolumes: Send {
    /// A new client of the cluster: everything until [`GroupVolumes::end_io`] is done by this one,
    /// and reported by these reports.
    fn begin(&mut self, cluster: &Arc<Cluster>, reports: VolumeReports);

    /// Acquires the lock of the volume's image, reads its reservations, and then admits I/O, only
    /// of sessions that begin in this epoch. The client has the newest map of the cluster. The lock
    /// of a client that the cluster refuses is broken; if another client has it, this fails.
    ///
    /// Ends with [`VolumeReports::activated`] or [`VolumeReports::activation_failed`].
    fn activate(&mut self, activation: Activation);

    /// Admits no I/O to the volume from now on. When all that was admitted is complete, releases
    /// the lock, and then reports [`VolumeReports::deactivated`].
    fn deactivate(&mut self, volume: &str, epoch: Epoch);

    /// Admits no I/O to any volume after this returns; what is in flight may fail. Then, elsewhere,
    /// gives up what has not ended yet, and closes what the client has opened. A call that returns
    /// only now makes nothing active.
    fn end_io(&mut self);
}

/// A volume that this daemon is to serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Activation {
    /// Its name in the group.
    pub volume: String,
    /// What it is, as the group's config says.
    pub image: String,
    /// Of what is admitted.
    pub epoch: Epoch,
}

/// How what was asked of the volumes has ended. What is reported after
/// [`GroupVolumes::end_io`] is ignored. Does not block.
#[derive(Clone)]
pub struct VolumeReports(ClientSender);

impl VolumeReports {
    pub(super) fn new(sender: &ClientSender) -> VolumeReports {
        VolumeReports(sender.clone())
    }

    /// The volume admits I/O of this epoch.
    pub fn activated(&self, volume: &str, epoch: Epoch) {
        self.send(Event::Activated { volume: volume.to_owned(), epoch }, None);
    }

    /// The volume is not active, and this client does not hold its lock.
    pub fn activation_failed(&self, volume: &str, epoch: Epoch, why: &str) {
        let problem = format!("volume '{volume}' does not start: {why}");
        self.send(Event::ActivationFailed { volume: volume.to_owned(), epoch }, Some(problem));
    }

    /// All I/O of the volume is complete, and its lock is released.
    pub fn deactivated(&self, volume: &str, epoch: Epoch) {
        self.send(Event::Deactivated { volume: volume.to_owned(), epoch }, None);
    }

    /// The volume is active no longer, without having been asked. This client does not hold its
    /// lock, and all its I/O is complete or will be refused.
    pub fn lost(&self, volume: &str, epoch: Epoch, why: &str) {
        let problem = format!("volume '{volume}' was lost: {why}");
        self.send(Event::Lost { volume: volume.to_owned(), epoch }, Some(problem));
    }

    /// The cluster refuses the client, or has to: the member continues with another one, and the
    /// group fences this one if it had volumes.
    pub fn client_fenced(&self) {
        self.send(Event::OwnClientFenced, None);
    }

    fn send(&self, event: Event, problem: Option<String>) {
        self.0.send(Report::Volume { event, problem });
    }
}
