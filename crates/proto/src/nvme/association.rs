//! Controllers and their queues, which may be on different cores (decision 13).
//!
//! An association is a host's controller with all of its queues. Its admin queue owns it; each I/O
//! queue is registered in it once its host is authenticated (decision 69). The registration is
//! accessed when a queue connects, when the controller is enabled or disabled, and when a queue
//! ends, but never for a command. The association ends with its admin queue: then the connections
//! of all I/O queues are closed, on whatever core they are. The host gets no new controller of this
//! subsystem before all of them have ended, because a late write of the old association could
//! otherwise overwrite one of the new association.

use super::errors::ErrorLog;
use super::event_queue::{AbortOrder, AbortReply, EventQueue, QueueEvent};
use super::nqn::Nqn;
use super::{MAX_IO_QUEUES, MQES};
use crate::driver::session::HangUp;
use crate::volume_state::Registrant;
use blockmux_wire::nvmeof::fabrics::CNTLID_MAX;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The controllers of a subsystem.
#[derive(Default)]
pub(crate) struct Associations {
    live: Mutex<LiveControllers>,
}

#[derive(Default)]
struct LiveControllers {
    controllers: BTreeMap<u16, Controller>,
    last: u16,
    /// The subsystem was removed.
    is_closed: bool,
}

/// The state of a controller that all cores share.
struct Controller {
    host: HostIdentity,
    /// The host's identity in reservations.
    registrant: Registrant,
    events: Arc<EventQueue>,
    /// Closes the admin queue's connection.
    hang_up: Option<HangUp>,
    errors: Arc<ErrorLog>,
    /// Connected I/O queues.
    queues: Vec<IoQueueEntry>,
    /// Whether CC.EN is set and no shutdown was requested.
    is_enabled: bool,
    /// Whether its admin queue has ended.
    is_over: bool,
    /// Whether its host is authenticated, or does not have to be to use the subsystem. Otherwise it
    /// does not count against the limits of the host that it claims to be.
    is_counted: bool,
}

/// A connected I/O queue.
struct IoQueueEntry {
    qid: u16,
    hang_up: Option<HangUp>,
    events: Arc<EventQueue>,
}

/// The identity of a host in Connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostIdentity {
    pub(crate) nqn: Nqn,
    pub(crate) id: [u8; 16],
}

impl HostIdentity {
    /// Whether a connection of `other` may belong to a controller of this host. The NQN decides:
    /// some hosts use another identifier for each queue, and Linux's target and SPDK accept that.
    /// For an empty NQN the identifier decides.
    fn is_same(&self, other: &HostIdentity) -> bool {
        self.nqn == other.nqn && (!self.nqn.is_empty() || self.id == other.id)
    }
}

/// Registration of a controller and its admin queue; dropping it ends the association.
pub(crate) struct AdminQueueGuard {
    associations: Arc<Associations>,
    pub(crate) cntlid: u16,
    /// Error log of the controller.
    pub(crate) errors: Arc<ErrorLog>,
}

/// Registration of an I/O queue in its association; dropping it ends the registration.
pub(crate) struct IoQueueGuard {
    associations: Arc<Associations>,
    cntlid: u16,
    pub(crate) qid: u16,
    /// The controller's host, as a registrant.
    pub(crate) registrant: Registrant,
    /// Error log of the controller.
    pub(crate) errors: Arc<ErrorLog>,
}

/// Reason for not connecting a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectRefusal {
    /// The previous association of this host has not ended yet; try again.
    Later,
    /// The limit of controllers is reached, for the subsystem or for this host.
    Full,
    /// The subsystem was removed.
    Closed,
    /// The controller does not exist, or belongs to another host.
    NoController,
    /// The controller is not enabled.
    NotEnabled,
    /// The queue identifier is out of range.
    WrongQueue,
    /// The queue is connected already.
    Taken,
}

impl Associations {
    /// Sets the identifier of the next controller; an invalid one stands for the first.
    pub(crate) fn begin_at(&self, cntlid: u16) {
        self.live().last = cntlid.saturating_sub(1).min(CNTLID_MAX);
    }

    /// Registers a new controller for a host. `is_counted` says whether it counts against the
    /// limits of that host and of the subsystem.
    pub(crate) fn connect_admin(
        self: &Arc<Associations>,
        (host, is_counted): (HostIdentity, bool),
        hang_up: Option<HangUp>,
        events: Arc<EventQueue>,
    ) -> Result<AdminQueueGuard, ConnectRefusal> {
        let mut live = self.live();
        if live.is_closed {
            return Err(ConnectRefusal::Closed);
        }
        if live.controllers.values().any(|other| other.is_over && other.host == host) {
            return Err(ConnectRefusal::Later);
        }
        if is_counted && !live.has_room_for(&host.nqn) {
            return Err(ConnectRefusal::Full);
        }
        let cntlid = live.next().ok_or(ConnectRefusal::Full)?;
        let queues = Vec::new();
        let errors = Arc::<ErrorLog>::default();
        let log = errors.clone();
        let (is_enabled, is_over) = (false, false);
        let registrant = Registrant::of_nvme_host(host.nqn.as_str(), host.id);
        let controller = Controller {
            host,
            registrant,
            events,
            hang_up,
            errors: log,
            queues,
            is_enabled,
            is_over,
            is_counted,
        };
        live.controllers.insert(cntlid, controller);
        Ok(AdminQueueGuard { associations: self.clone(), cntlid, errors })
    }

    /// Whether [`Associations::connect_io`] would succeed now. Nothing is registered: a host that
    /// still has to authenticate must not take a queue from the one that it claims to be.
    pub(crate) fn check_io(&self, host: &HostIdentity, cntlid: u16, qid: u16) -> Result<(), ConnectRefusal> {
        self.live().joinable(host, cntlid, qid).map(|_controller| ())
    }

    /// Registers an I/O queue of a controller of this authenticated host. The registration carries
    /// the identity of the admin queue's host.
    pub(crate) fn connect_io(
        self: &Arc<Associations>,
        host: &HostIdentity,
        cntlid: u16,
        qid: u16,
        hang_up: Option<HangUp>,
        events: Arc<EventQueue>,
    ) -> Result<IoQueueGuard, ConnectRefusal> {
        let mut live = self.live();
        let controller = live.joinable(host, cntlid, qid)?;
        controller.queues.push(IoQueueEntry { qid, hang_up, events });
        let (registrant, errors) = (controller.registrant.clone(), controller.errors.clone());
        Ok(IoQueueGuard { associations: self.clone(), cntlid, qid, registrant, errors })
    }

    /// Refuses new connections and closes all existing ones.
    pub(crate) fn close(&self) {
        let mut live = self.live();
        live.is_closed = true;
        // The I/O queues end with the admin queue.
        live.controllers
            .values()
            .filter_map(|controller| controller.hang_up.as_ref())
            .for_each(|hang_up| hang_up());
    }

    /// Closes the connections of all controllers of a host.
    pub(crate) fn disconnect_host(&self, host: &Nqn) {
        self.of_name(host, |controller| controller.hang_up.iter().for_each(|hang_up| hang_up()));
    }

    /// Queues an event for each controller of the host with this NQN.
    pub(crate) fn notify_named(&self, host: &Nqn, event: impl Fn() -> QueueEvent) {
        self.of_name(host, |controller| controller.events.push(event()));
    }

    fn of_name(&self, host: &Nqn, each: impl Fn(&Controller)) {
        self.live().controllers.values().filter(|controller| controller.host.nqn == *host).for_each(each);
    }

    /// Identifiers of all controllers that count, in ascending order.
    pub(crate) fn controllers(&self) -> Vec<u16> {
        let live = self.live();
        let proved = live.controllers.iter().filter(|(_, controller)| controller.is_counted);
        proved.map(|(cntlid, _)| *cntlid).collect()
    }

    /// Queues an event for each controller.
    pub(crate) fn announce(&self, event: impl Fn() -> QueueEvent) {
        self.live().controllers.values().for_each(|controller| controller.events.push(event()));
    }

    /// Queues an event for each controller of a registrant.
    pub(crate) fn notify_host(&self, host: &Registrant, event: impl Fn() -> QueueEvent) {
        let live = self.live();
        let own = live.controllers.values().filter(|controller| controller.registrant == *host);
        own.for_each(|controller| controller.events.push(event()));
    }

    /// Queues an event for each I/O queue of a registrant.
    pub(crate) fn notify_io_queues(&self, host: &Registrant, event: impl Fn() -> QueueEvent) {
        let live = self.live();
        let own = live.controllers.values().filter(|controller| controller.registrant == *host);
        own.flat_map(|controller| &controller.queues).for_each(|queue| queue.events.push(event()));
    }

    fn live(&self) -> MutexGuard<'_, LiveControllers> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LiveControllers {
    /// The controller of this host, if an I/O queue with this identifier may join it now.
    fn joinable(
        &mut self,
        host: &HostIdentity,
        cntlid: u16,
        qid: u16,
    ) -> Result<&mut Controller, ConnectRefusal> {
        let controller =
            self.controllers.get_mut(&cntlid).filter(|found| found.host.is_same(host) && !found.is_over);
        let controller = controller.ok_or(ConnectRefusal::NoController)?;
        if !controller.is_enabled {
            return Err(ConnectRefusal::NotEnabled);
        }
        if qid == 0 || qid > MAX_IO_QUEUES {
            return Err(ConnectRefusal::WrongQueue);
        }
        if controller.queues.iter().any(|taken| taken.qid == qid) {
            return Err(ConnectRefusal::Taken);
        }
        Ok(controller)
    }

    /// Whether the limits allow one more controller that counts. Others are bounded by the limits
    /// of connections.
    fn has_room_for(&self, host: &Nqn) -> bool {
        let proved = || self.controllers.values().filter(|other| other.is_counted);
        proved().count() < MAX_CONTROLLERS
            && proved().filter(|other| other.host.nqn == *host).count() < MAX_OF_HOST
    }

    /// The identifier that was unused for the longest time.
    fn next(&mut self) -> Option<u16> {
        if self.controllers.len() >= usize::from(CNTLID_MAX) {
            return None;
        }
        loop {
            self.last = if self.last >= CNTLID_MAX { 1 } else { self.last.saturating_add(1) };
            if !self.controllers.contains_key(&self.last) {
                return Some(self.last);
            }
        }
    }
}

impl Controller {
    fn close_queues(&self) {
        self.queues.iter().filter_map(|queue| queue.hang_up.as_ref()).for_each(|hang_up| hang_up());
    }
}

impl AdminQueueGuard {
    /// Marks the host as authenticated; returns whether the limits allow the controller.
    pub(crate) fn set_authenticated(&self) -> bool {
        let mut live = self.associations.live();
        let Some(own) = live.controllers.get(&self.cntlid) else { return false };
        let has_room = own.is_counted || live.has_room_for(&own.host.nqn);
        if let Some(own) = live.controllers.get_mut(&self.cntlid).filter(|_| has_room) {
            own.is_counted = true;
        }
        has_room
    }

    /// Enables the controller: I/O queues may connect.
    pub(crate) fn enable(&self) {
        self.with(|controller| controller.is_enabled = true);
    }

    /// Disables the controller or begins its shutdown: all I/O queues end.
    pub(crate) fn disable(&self) {
        self.with(|controller| {
            controller.is_enabled = false;
            controller.close_queues();
        });
    }

    /// Whether an I/O queue is connected, or its connection was closed and it has not ended yet.
    pub(crate) fn has_queues(&self) -> bool {
        self.with(|controller| !controller.queues.is_empty()).unwrap_or_default()
    }

    /// Requests the abort of a command on an I/O queue of this controller; `None` if there is no
    /// such queue.
    pub(crate) fn abort(&self, qid: u16, cid: u16) -> Option<AbortReply> {
        self.with(|controller| {
            let queue = controller.queues.iter().find(|queue| queue.qid == qid)?;
            let (order, reply) = AbortOrder::new(cid);
            queue.events.push(QueueEvent::Abort(order));
            Some(reply)
        })?
    }

    fn with<R>(&self, look: impl FnOnce(&mut Controller) -> R) -> Option<R> {
        self.associations.live().controllers.get_mut(&self.cntlid).map(look)
    }
}

impl Drop for AdminQueueGuard {
    fn drop(&mut self) {
        let mut live = self.associations.live();
        let Some(controller) = live.controllers.get_mut(&self.cntlid) else { return };
        controller.is_over = true;
        controller.close_queues();
        if controller.queues.is_empty() {
            live.controllers.remove(&self.cntlid);
        }
    }
}

impl Drop for IoQueueGuard {
    fn drop(&mut self) {
        let mut live = self.associations.live();
        let Some(controller) = live.controllers.get_mut(&self.cntlid) else { return };
        controller.queues.retain(|queue| queue.qid != self.qid);
        if controller.is_over && controller.queues.is_empty() {
            live.controllers.remove(&self.cntlid);
        }
    }
}

/// Most controllers of one subsystem.
pub(crate) const MAX_CONTROLLERS: usize = 1024;
/// Most controllers of one host, so that some remain for others.
pub(crate) const MAX_OF_HOST: usize = MAX_CONTROLLERS / 2;
const _: () = assert!(MAX_IO_QUEUES <= MQES && MAX_CONTROLLERS < CNTLID_MAX as usize);

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn host(n: u8) -> HostIdentity {
        HostIdentity { nqn: Nqn::new("nqn.host").unwrap(), id: [n; 16] }
    }

    #[test]
    fn an_io_queue_needs_an_enabled_controller_of_its_host() {
        let all = Arc::new(Associations::default());
        let admin = all.connect_admin((host(1), true), None, EventQueue::new(None)).unwrap();
        let connect = |host: &HostIdentity, cntlid, qid| {
            all.connect_io(host, cntlid, qid, None, EventQueue::new(None)).map(|_place| ())
        };
        assert_eq!(connect(&host(1), admin.cntlid, 1), Err(ConnectRefusal::NotEnabled));
        admin.enable();
        let other = HostIdentity { nqn: Nqn::new("nqn.other").unwrap(), ..host(1) };
        assert_eq!(connect(&other, admin.cntlid, 1), Err(ConnectRefusal::NoController));
        assert_eq!(connect(&host(1), 99, 1), Err(ConnectRefusal::NoController));
        assert_eq!(connect(&host(1), admin.cntlid, 0), Err(ConnectRefusal::WrongQueue));
        assert_eq!(connect(&host(1), admin.cntlid, MAX_IO_QUEUES + 1), Err(ConnectRefusal::WrongQueue));
        let place = all.connect_io(&host(2), admin.cntlid, 1, None, EventQueue::new(None)).unwrap();
        assert_eq!(place.registrant.nvme_host(), Some(host(1).id));
        assert_eq!(connect(&host(1), admin.cntlid, 1), Err(ConnectRefusal::Taken));
        drop(place);
        assert_eq!(connect(&host(1), admin.cntlid, 1), Ok(()));
    }

    #[test]
    fn an_association_ends_with_its_admin_queue_and_its_host_waits_for_the_end() {
        let all = Arc::new(Associations::default());
        let admin = all.connect_admin((host(1), true), None, EventQueue::new(None)).unwrap();
        admin.enable();
        let cuts = Arc::new(AtomicUsize::new(0));
        let hang_up: HangUp = {
            let cuts = cuts.clone();
            Arc::new(move || {
                cuts.fetch_add(1, Ordering::Relaxed);
            })
        };
        let queue = all.connect_io(&host(1), admin.cntlid, 1, Some(hang_up), EventQueue::new(None)).unwrap();
        // A second path of the same host has a controller of its own.
        let other = all.connect_admin((host(1), true), None, EventQueue::new(None)).unwrap();
        assert_ne!(other.cntlid, admin.cntlid);
        drop(admin);
        assert_eq!(cuts.load(Ordering::Relaxed), 1);
        assert_eq!(
            all.connect_admin((host(1), true), None, EventQueue::new(None)).err(),
            Some(ConnectRefusal::Later)
        );
        assert!(all.connect_admin((host(2), true), None, EventQueue::new(None)).is_ok());
        drop(queue);
        assert!(all.connect_admin((host(1), true), None, EventQueue::new(None)).is_ok());
        assert_eq!(all.controllers(), [other.cntlid]);
    }

    #[test]
    fn a_disabled_controller_has_queues_until_they_are_dropped() {
        let all = Arc::new(Associations::default());
        let admin = all.connect_admin((host(1), true), None, EventQueue::new(None)).unwrap();
        admin.enable();
        let queue = all.connect_io(&host(1), admin.cntlid, 1, None, EventQueue::new(None)).unwrap();
        admin.disable();
        assert!(admin.has_queues());
        drop(queue);
        assert!(!admin.has_queues());
    }

    #[test]
    fn controllers_are_limited_in_total_and_per_host() {
        let all = Arc::new(Associations::default());
        let connect_as = |name: &str, n: u8, is_counted| {
            let host = HostIdentity { nqn: Nqn::new(name).unwrap(), id: [n; 16] };
            all.connect_admin((host, is_counted), None, EventQueue::new(None))
        };
        let connect = |name: &str, n: u8| connect_as(name, n, true);
        // The host identifiers do not matter.
        let greedy: Vec<_> = (0..MAX_OF_HOST).map(|n| connect("nqn.a", n as u8).unwrap()).collect();
        assert_eq!(connect("nqn.a", 0).err(), Some(ConnectRefusal::Full));
        let others: Vec<_> = (MAX_OF_HOST..MAX_CONTROLLERS).map(|_| connect("nqn.b", 0).unwrap()).collect();
        assert_eq!(connect("nqn.c", 0).err(), Some(ConnectRefusal::Full));
        // Hosts that are not authenticated as `nqn.c` do not count against its limit;
        // authentication fails while the limit is reached.
        let unproved: Vec<_> = (0..2000).map(|_| connect_as("nqn.c", 0, false).unwrap()).collect();
        assert!(!unproved[0].set_authenticated());
        drop(greedy);
        assert!(unproved[0].set_authenticated());
        assert!(connect("nqn.c", 0).is_ok() && connect("nqn.a", 0).is_ok());
        drop(others);
    }
}
