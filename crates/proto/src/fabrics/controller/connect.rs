//! Connect: turns a connection into a queue (Base 2.0 §3.3.2.2, §6.3).

use super::node::{NvmeNode, SecureChannel};
use super::unconnected::ConnectPermit;
use crate::driver::computation::{Helpers, RunJob};
use crate::exports::VolumeId;
use crate::nvme::admin::AdminQueue;
use crate::nvme::association::{ConnectRefusal, HostIdentity, IoQueueGuard};
use crate::nvme::auth::controller::Authenticator;
use crate::nvme::auth::psk::TlsPsk;
use crate::nvme::event_queue::EventQueue;
use crate::nvme::io::{QueueOrigin, reach};
use crate::nvme::nqn::Nqn;
use crate::nvme::subsystem::{NamespaceView, Subsystem};
use crate::nvme::traffic::QueueCounts;
use crate::nvme::{HangUp, MQES, Notifier, NvmeOutcome};
use crate::volume_state::{Admissions, Epoch, RequiredAccess};
use blockmux_volume::SgList;
use blockmux_wire::nvme::status::{CONNECT_INVALID_DATA, ConnectStatus, NvmeStatus, StatusField};
use blockmux_wire::nvmeof::auth::{SC_C_NEW_TLS_PSK, SC_C_NONE, SC_C_REPLACE_TLS_PSK};
use blockmux_wire::nvmeof::fabrics::{
    CATTR_DISABLE_SQ_FLOW_CONTROL, CNTLID_DYNAMIC, CONNECT_DATA_LEN, Connect, ConnectData,
};
use core::net::{IpAddr, SocketAddr};
use std::mem::offset_of;
use std::sync::Arc;
use zerocopy::{FromZeros, IntoBytes};

/// The queue that a connection became.
pub(super) enum ConnectedQueue {
    Admin(Box<AdminQueue>),
    /// An I/O queue whose host still has to authenticate.
    Claimed(Box<ClaimedIoQueue>),
    Io(IoQueue),
}

/// An I/O queue that Connect asked for. Only this connection knows it, so it takes nothing from the
/// host that it claims to be; it enters the controller when that host is authenticated (decision
/// 69).
pub(super) struct ClaimedIoQueue {
    subsystem: Arc<Subsystem>,
    host: HostIdentity,
    cntlid: u16,
    qid: u16,
    port: u16,
}

/// An I/O queue with everything that its commands need; the controller itself may be on another
/// core.
pub(super) struct IoQueue {
    pub(super) subsystem: Arc<Subsystem>,
    /// The namespaces that are visible to the host.
    pub(super) view: NamespaceView,
    /// Checks reservations and range locks before each I/O, on the volumes that were used.
    pub(super) admissions: Admissions,
    pub(super) origin: QueueOrigin,
    pub(super) counts: QueueCounts,
    host: Nqn,
    /// Dropped last: by then no I/O of this queue can reach a volume.
    pub(super) guard: IoQueueGuard,
}

/// Properties of a host's connection.
#[derive(Default)]
pub(super) struct HostConnection {
    /// Held until the queue is connected and its host is authenticated.
    pub(super) permit: Option<ConnectPermit>,
    /// The local address that the host connected to; `None` if it is no IP address.
    pub(super) local: Option<SocketAddr>,
    /// The host's address; `None` if it has none.
    pub(super) peer_ip: Option<IpAddr>,
    /// Closes the connection, from any core.
    pub(super) hang_up: Option<HangUp>,
    /// The identifier of the port.
    pub(super) port: u16,
    /// Random seed for challenges.
    pub(super) seed: Option<[u8; 32]>,
    /// The TLS PSK of the connection.
    pub(super) secured: Option<Box<TlsPsk>>,
    /// SGL support of the transport, as in [`super::FabricsTransport::SGLS`].
    pub(super) sgls: u32,
    /// Wakes the session, from any core.
    pub(super) notifier: Option<Notifier>,
    /// Runs computations of the authentication on another thread.
    pub(super) run: Option<RunJob>,
}

impl HostConnection {
    /// Where the computations of the authentication run; they need the notifier.
    fn helpers(&self) -> Option<Helpers> {
        let (run, notify) = self.run.clone().zip(self.notifier.clone())?;
        Some(Helpers { run, notify })
    }
}

/// The result of a successful Connect.
pub(super) struct Connected {
    pub(super) queue: ConnectedQueue,
    /// Events from other cores; an I/O queue whose host has to authenticate gets none yet.
    pub(super) events: Option<Arc<EventQueue>>,
    /// Present if the host can authenticate; unless it is done, the host has to before any other
    /// command.
    pub(super) authenticator: Option<Box<Authenticator>>,
    pub(super) cntlid: u16,
    /// Number of entries of the submission queue.
    pub(super) size: u16,
    /// Whether SQ flow control is enabled, so that completions carry SQHD.
    pub(super) has_flow_control: bool,
}

/// Reason for not connecting a queue.
#[derive(Debug)]
pub(super) enum NotConnected {
    /// The previous association of this host has not ended yet; try again.
    Later,
    Refused(NvmeOutcome),
}

/// Executes a Connect command.
pub(super) fn connect(
    node: &NvmeNode,
    command: &Connect,
    data: &SgList,
    connection: &HostConnection,
) -> Result<Connected, NotConnected> {
    let HostConnection { hang_up, notifier, port, seed, .. } = connection;
    let (port, secured) = (*port, connection.secured.as_deref());
    let mut connect_data = ConnectData::new_zeroed();
    if data.len() != CONNECT_DATA_LEN {
        return Err(refused(NvmeStatus::DATA_SGL_LENGTH_INVALID));
    }
    data.copy_to(connect_data.as_mut_bytes());
    if command.recfmt.get() != 0 {
        return Err(refused(ConnectStatus::CONNECT_INCOMPATIBLE_FORMAT));
    }
    let sqsize = command.sqsize.get();
    if sqsize == 0 || sqsize > MQES {
        return Err(invalid(offset_of!(Connect, sqsize), false));
    }
    let found =
        Nqn::of_field(&connect_data.subnqn).and_then(|nqn| node.find(&nqn).map(|subsystem| (nqn, subsystem)));
    // A subsystem that is not reachable through this port counts as unknown.
    let Some((asked, subsystem)) = found.as_ref().filter(|(_, subsystem)| subsystem.is_at(port)) else {
        return Err(invalid(offset_of!(ConnectData, subnqn), true));
    };
    // SPDK's host sends an empty HOSTNQN by default. No allow-list contains it; where every host
    // may connect, SPDK's and Linux's targets accept it too.
    let Some(host) = Nqn::of_host_field(&connect_data.hostnqn) else {
        return Err(invalid(offset_of!(ConnectData, hostnqn), true));
    };
    if connect_data.hostid == [0; 16] {
        return Err(invalid(offset_of!(ConnectData, hostid), true));
    }
    let is_allowed = subsystem.admits(&host) && subsystem.admits_address(connection.peer_ip);
    if !is_allowed || !is_secured_enough(node, &host, (asked, &subsystem.nqn), secured) {
        return Err(refused(ConnectStatus::CONNECT_INVALID_HOST));
    }
    // A generated PSK proves that the host was authenticated when it was generated.
    let is_authenticated = secured.is_some_and(TlsPsk::is_generated);
    let authenticator = match (subsystem.secrets_of(&host), *seed) {
        (None, _) => None,
        (Some(_), None) if is_authenticated => None,
        // Authentication is not possible without random numbers.
        (Some(_), None) => return Err(refused(NvmeStatus::INTERNAL_ERROR)),
        (Some(_), Some(seed)) => {
            let authenticator = Authenticator::new(host.as_str(), subsystem.nqn.as_str(), seed);
            // PSKs are generated on admin queues only, which hosts can reconnect with them.
            let sc_c = match secured {
                _ if command.qid.get() != 0 || node.secure_channel() == SecureChannel::None => SC_C_NONE,
                None => SC_C_NEW_TLS_PSK,
                Some(_) => SC_C_REPLACE_TLS_PSK,
            };
            let authenticator = authenticator.with_secure_channel(sc_c).with_helpers(connection.helpers());
            Some(Box::new(if is_authenticated { authenticator.authenticated() } else { authenticator }))
        }
    };
    let is_authenticated = authenticator.as_ref().is_none_or(|authenticator| authenticator.is_done());
    // Discovery is open to everybody, so its controllers have no limits that a stranger could use
    // up for the host that it claims to be.
    let has_proof = secured.is_some() || authenticator.is_some();
    let is_counted = is_authenticated && (has_proof || !subsystem.is_discovery);
    let host = HostIdentity { nqn: host, id: connect_data.hostid };
    let (queue, events, cntlid) = match command.qid.get() {
        0 => {
            let events = EventQueue::new(notifier.clone());
            let host = (host, port, connection.sgls);
            let (queue, cntlid) = admin(
                node,
                subsystem,
                host,
                (command, &connect_data),
                (hang_up.clone(), &events, is_counted),
            )?;
            (queue, Some(events), cntlid)
        }
        qid => {
            let (subsystem, cntlid) = (subsystem.clone(), connect_data.cntlid.get());
            let claim = ClaimedIoQueue { subsystem, host, cntlid, qid, port };
            let (queue, events) = io(claim, is_authenticated, connection).map_err(no_io_queue)?;
            (queue, events, cntlid)
        }
    };
    // Checked again, because a host that was removed meanwhile had no controller yet that could
    // have been ended.
    if !subsystem.admits(queue.host()) {
        return Err(refused(ConnectStatus::CONNECT_INVALID_HOST));
    }
    let has_flow_control = command.cattr & CATTR_DISABLE_SQ_FLOW_CONTROL == 0;
    Ok(Connected { queue, events, authenticator, cntlid, size: sqsize.saturating_add(1), has_flow_control })
}

fn admin(
    node: &NvmeNode,
    subsystem: &Arc<Subsystem>,
    (host, port, sgls): (HostIdentity, u16, u32),
    (command, connect_data): (&Connect, &ConnectData),
    (hang_up, events, is_counted): (Option<HangUp>, &Arc<EventQueue>, bool),
) -> Result<(ConnectedQueue, u16), NotConnected> {
    if connect_data.cntlid.get() != CNTLID_DYNAMIC {
        return Err(invalid(offset_of!(ConnectData, cntlid), true));
    }
    let who = (host.clone(), is_counted);
    let guard =
        subsystem.associations.connect_admin(who, hang_up, events.clone()).map_err(|why| match why {
            ConnectRefusal::Later => NotConnected::Later,
            ConnectRefusal::Closed => invalid(offset_of!(ConnectData, subnqn), true),
            _ => without_dnr(refused(ConnectStatus::CONNECT_CONTROLLER_BUSY)),
        })?;
    let cntlid = guard.cntlid;
    let capsules = (node.in_capsule, sgls);
    let queue = AdminQueue::new(subsystem.clone(), guard, (host, port), capsules, command.kato.get());
    Ok((ConnectedQueue::Admin(Box::new(queue)), cntlid))
}

/// An I/O queue in its controller, or only the claim if its host still has to authenticate.
fn io(
    claim: ClaimedIoQueue,
    is_authenticated: bool,
    connection: &HostConnection,
) -> Result<(ConnectedQueue, Option<Arc<EventQueue>>), ConnectRefusal> {
    if is_authenticated {
        let (queue, events) = claim.enter(connection)?;
        return Ok((ConnectedQueue::Io(queue), Some(events)));
    }
    claim.check()?;
    Ok((ConnectedQueue::Claimed(Box::new(claim)), None))
}

/// The refusal of an I/O queue.
fn no_io_queue(why: ConnectRefusal) -> NotConnected {
    match why {
        ConnectRefusal::NoController => without_dnr(invalid(offset_of!(ConnectData, cntlid), true)),
        ConnectRefusal::NotEnabled | ConnectRefusal::Taken => {
            without_dnr(refused(NvmeStatus::COMMAND_SEQUENCE_ERROR))
        }
        _ => invalid(offset_of!(Connect, qid), false),
    }
}

impl ClaimedIoQueue {
    /// Whether the queue could enter its controller now.
    fn check(&self) -> Result<(), ConnectRefusal> {
        self.subsystem.associations.check_io(&self.host, self.cntlid, self.qid)
    }

    /// Enters the queue, whose host is authenticated, in its controller.
    pub(super) fn enter(
        &self,
        connection: &HostConnection,
    ) -> Result<(IoQueue, Arc<EventQueue>), ConnectRefusal> {
        let ClaimedIoQueue { subsystem, host, cntlid, qid, port } = self;
        let events = EventQueue::new(connection.notifier.clone());
        let hang_up = connection.hang_up.clone();
        let guard = subsystem.associations.connect_io(host, *cntlid, *qid, hang_up, events.clone())?;
        let who = guard.registrant.clone();
        let mut queue = IoQueue {
            view: NamespaceView::default(),
            admissions: Admissions::new(std::iter::empty(), Some(&who)),
            origin: QueueOrigin { who, port: *port, epoch: Epoch::current() },
            counts: subsystem.traffic.counts(),
            host: host.nqn.clone(),
            subsystem: subsystem.clone(),
            guard,
        };
        queue.refresh_view();
        Ok((queue, events))
    }
}

impl ConnectedQueue {
    /// The host that owns this queue, or claims to be its owner.
    pub(super) fn host(&self) -> &Nqn {
        match self {
            ConnectedQueue::Admin(admin) => &admin.host.nqn,
            ConnectedQueue::Claimed(claim) => &claim.host.nqn,
            ConnectedQueue::Io(io) => &io.host,
        }
    }

    pub(super) fn subsystem(&self) -> &Arc<Subsystem> {
        match self {
            ConnectedQueue::Admin(admin) => &admin.subsystem,
            ConnectedQueue::Claimed(claim) => &claim.subsystem,
            ConnectedQueue::Io(io) => &io.subsystem,
        }
    }
}

impl IoQueue {
    /// Refreshes the view of the namespaces if they have changed.
    #[inline]
    pub(super) fn refresh_view_if_changed(&mut self) {
        if !self.subsystem.is_current(&self.view) {
            self.refresh_view();
        }
    }

    /// Whether a namespace on the volume is still attached, its ANA state permits I/O, and it is
    /// writable if `needs` says so.
    pub(super) fn reaches(&mut self, volume: VolumeId, needs: RequiredAccess) -> bool {
        self.refresh_view_if_changed();
        self.view.iter().find(|namespace| namespace.volume == volume).is_some_and(|namespace| {
            reach(&self.subsystem, namespace, self.origin.port).is_ok()
                && !(namespace.read_only && needs == RequiredAccess::Writing)
        })
    }

    #[cold]
    fn refresh_view(&mut self) {
        self.view = self.subsystem.view(&self.host);
        let view = &self.view;
        self.admissions.retain(|volume| view.iter().any(|namespace| namespace.volume == volume));
    }

    /// Prepares the first I/O on the volume; returns whether a visible namespace has it.
    #[cold]
    pub(super) fn begin_use(&mut self, volume: VolumeId) -> bool {
        self.refresh_view_if_changed();
        let Some(namespace) = self.view.iter().find(|namespace| namespace.volume == volume) else {
            return false;
        };
        self.admissions.add(volume, &namespace.volume_state, Some(&self.origin.who));
        true
    }
}

/// Whether the connection's TLS satisfies the subsystem. Its key must belong to this host and to
/// the subsystem by the requested name, which may be the well-known discovery NQN. A connection
/// without TLS is accepted if the host has no configured key, or only discovers.
fn is_secured_enough(
    node: &NvmeNode,
    host: &Nqn,
    (asked, subsystem): (&Nqn, &Nqn),
    secured: Option<&TlsPsk>,
) -> bool {
    match secured {
        Some(key) => key.is_for(host, asked),
        None => *subsystem == node.discovery.nqn || !node.keyring.has_retained(host, subsystem),
    }
}

fn refused(status: impl Into<NvmeStatus>) -> NotConnected {
    NotConnected::Refused(NvmeOutcome::failure(status))
}

/// Clears DNR: the host may succeed later or with a new association. Linux takes a single DNR to
/// mean that the controller will never exist again, and removes its disks.
fn without_dnr(refused: NotConnected) -> NotConnected {
    match refused {
        NotConnected::Refused(outcome) => NotConnected::Refused(NvmeOutcome {
            status: StatusField::new(outcome.status.status()),
            ..outcome
        }),
        NotConnected::Later => NotConnected::Later,
    }
}

/// A failure that names the invalid field at `offset` of the command, or of its data.
fn invalid(offset: usize, in_data: bool) -> NotConnected {
    let place = offset as u32 | if in_data { CONNECT_INVALID_DATA } else { 0 };
    let outcome = NvmeOutcome::failure(ConnectStatus::CONNECT_INVALID_PARAMETERS);
    NotConnected::Refused(NvmeOutcome { result: place.into(), ..outcome })
}
