//! This implementation's host against its target.

use crate::driver::session::{Connections, Control, Initiator, SecuredBy, StreamSession};
use crate::driver::transport::TransportInfo;
use crate::exports::{Export, Exports, VolumeId};
use crate::fabrics::controller::node::{FabricsPort, NvmeNode, SecureChannel};
use crate::names::volume_uuid::VolumeUuid;
use crate::nvme::auth::controller::tests::secrets;
use crate::nvme::auth::{AuthFailure, Concatenation, DhGroup, Hash, HostCredentials, HostSecrets};
use crate::nvme::nqn::Nqn;
use crate::nvme::subsystem::{Namespace, Subsystem};
use crate::nvme_tcp::client::*;
use crate::nvme_tcp::server::NvmeTcpTargetSession;
use crate::testing::{Driver, Pump, Streams};
use blockmux_volume::{MemVolume, Op, Pool, Seg, SgList};
use blockmux_wire::nvmeof::auth::{Explanation, MessageId, MessageType};
use blockmux_wire::nvmeof::fabrics::DISCOVERY_NQN;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

const HOST: &str = "nqn.2026-11.test:host";
const SUBSYSTEM: &str = "nqn.2026-11.test:disk";
const SIZE: u64 = 1 << 20;

/// A node with one namespace and one host, which may have secrets.
struct ServedSubsystem {
    node: Arc<NvmeNode>,
    exports: Exports,
}

fn nqn(name: &str) -> Nqn {
    Nqn::new(name).unwrap()
}

impl ServedSubsystem {
    fn with(secrets: Option<HostSecrets>) -> ServedSubsystem {
        let volume = Arc::new(MemVolume::new(SIZE));
        let export = Export { name: "a".into(), description: String::new(), read_only: false, volume };
        let exports = Exports::new(vec![export]);
        let served = exports.volume_state(VolumeId(0)).unwrap().clone();
        let namespace = Namespace::new(1, VolumeId(0), served, false, VolumeUuid::of_texts(&["a"]));
        let subsystem = Subsystem::new(nqn(SUBSYSTEM), "machine", vec![namespace], vec![nqn(HOST)]);
        let known = secrets.map(|secrets| (nqn(HOST), secrets)).into_iter().collect::<BTreeMap<_, _>>();
        let ports = vec![FabricsPort::new(1, "0.0.0.0:4420".parse().unwrap())];
        let node = NvmeNode::new(vec![Arc::new(subsystem.with_secrets(known))], ports, "machine");
        ServedSubsystem { node: Arc::new(node), exports }
    }

    /// A controller whose hosts may use TLS.
    fn with_tls(secrets: Option<HostSecrets>) -> ServedSubsystem {
        let ServedSubsystem { node, exports } = ServedSubsystem::with(secrets);
        let node = Arc::into_inner(node).unwrap().with_tls(Arc::default(), SecureChannel::NotRequired);
        ServedSubsystem { node: Arc::new(node), exports }
    }

    fn target(&self) -> Pump<NvmeTcpTargetSession> {
        Pump::new(self.session(), &self.exports)
    }

    /// A target session on a TLS connection with the key of `identity`.
    fn secured(&self, identity: &str) -> Pump<NvmeTcpTargetSession> {
        let mut session = self.session();
        session.on_secured(SecuredBy::Psk(identity.as_bytes()), Instant::now()).unwrap();
        Pump::new(session, &self.exports)
    }

    fn session(&self) -> NvmeTcpTargetSession {
        let session = NvmeTcpTargetSession::new(self.node.clone(), Pool::new(usize::MAX), Instant::now());
        session.with_seed([5; 32])
    }
}

/// Exchanges bytes until neither side sends any.
fn exchange_all<S: Streams>(host: &mut Driver<S>, target: &mut Pump<NvmeTcpTargetSession>) {
    loop {
        let sent = host.sent();
        let answer = target.exchange(&sent);
        if sent.is_empty() && answer.is_empty() {
            return;
        }
        host.feed(&answer).unwrap();
    }
}

fn names() -> Names {
    Names { host: nqn(HOST), host_id: [7; 16], subsystem: nqn(SUBSYSTEM) }
}

fn credentials(secrets: HostSecrets, seed: u8) -> HostCredentials {
    let concatenation = Concatenation::None;
    HostCredentials { secrets: Arc::new(secrets), seed: [seed; 32], concatenation }
}

/// An admin queue after the exchange of all its messages, and its target.
fn brought_up(
    served: &ServedSubsystem,
    secrets: Option<HostSecrets>,
) -> (Driver<NvmeTcpAdminSession>, Pump<NvmeTcpTargetSession>) {
    let credentials = secrets.map(|secrets| credentials(secrets, 1));
    let config = AdminConfig {
        names: names(),
        credentials,
        queues: 3,
        query: ControllerQuery::Use(1),
        keep_alive: Duration::ZERO,
    };
    let session = NvmeTcpAdminSession::new(config, Digests::default(), Pool::new(1 << 20), Instant::now());
    let (mut host, mut target) = (Driver::of(session, usize::MAX), served.target());
    exchange_all(&mut host, &mut target);
    (host, target)
}

fn refused(served: &ServedSubsystem, secrets: Option<HostSecrets>) -> NvmeRefused {
    let (mut host, _target) = brought_up(served, secrets);
    assert!(host.is_closing() && !host.session.is_ready());
    host.session.refused().unwrap().clone()
}

/// An I/O queue of the controller of `admin`.
fn queue(
    served: &ServedSubsystem,
    admin: &Driver<NvmeTcpAdminSession>,
    secrets: Option<HostSecrets>,
) -> (Driver<NvmeTcpQueueSession>, Pump<NvmeTcpTargetSession>) {
    let session = queues(admin, secrets, 1);
    let (mut host, mut target) = (Driver::of(session, usize::MAX), served.target());
    exchange_all(&mut host, &mut target);
    (host, target)
}

/// A session with `queues` I/O queues, none of them connected.
fn queues(
    admin: &Driver<NvmeTcpAdminSession>,
    secrets: Option<HostSecrets>,
    queues: u16,
) -> NvmeTcpQueueSession {
    let config = QueueConfig {
        names: names(),
        credentials: secrets.map(|secrets| credentials(secrets, 2)),
        controller: admin.session.controller().unwrap().clone(),
        namespace: admin.session.namespaces()[0].clone(),
        queues,
        entries: 64,
    };
    NvmeTcpQueueSession::new(config, Digests::default(), Pool::new(16 << 20), Instant::now())
}

/// Connects every I/O queue of a session; the targets are in the order of its queues.
fn connected(
    served: &ServedSubsystem,
    session: NvmeTcpQueueSession,
) -> (Driver<NvmeTcpQueueSession>, Vec<Pump<NvmeTcpTargetSession>>) {
    let mut host = Driver::of(session, usize::MAX);
    let mut targets = vec![served.target()];
    assert_eq!(host.session.poll_connect(), None, "the first comes first");
    exchange_all(&mut host, &mut targets[0]);
    while let Some((connection, now)) = host.session.poll_connect() {
        assert_eq!(connection, targets.len());
        targets.push(served.target());
        host.session.on_connected(connection, &TransportInfo::default(), now);
        host.connection = connection;
        exchange_all(&mut host, &mut targets[connection]);
    }
    (host, targets)
}

fn write(host: &mut Driver<NvmeTcpQueueSession>, tag: u64) {
    let data = SgList::one(Seg::from_slice(&[tag as u8; 512]));
    host.submit(tag, Op::Write { fua: false }, tag * 512, 512, Some(data));
}

/// Tags of the completed I/O.
fn done(host: &mut Driver<NvmeTcpQueueSession>) -> Vec<u64> {
    let done = std::iter::from_fn(|| host.session.poll_done());
    done.map(|done| done.result.map(|_| done.tag.0).unwrap()).collect()
}

#[test]
fn both_queues_authenticate_with_every_hash_and_group() {
    for hash in Hash::ALL {
        for group in [DhGroup::Null, DhGroup::Ffdhe2048] {
            for asks in [false, true] {
                let both = secrets(Some(hash), Some(group));
                let own =
                    HostSecrets { controller: both.controller.clone().filter(|_| asks), ..both.clone() };
                let served = ServedSubsystem::with(Some(both));
                let (admin, _admin_target) = brought_up(&served, Some(own.clone()));
                assert!(admin.session.is_ready(), "{:?}", admin.session.refused());
                let (mut io, mut target) = queue(&served, &admin, Some(own));
                assert!(io.session.is_ready(), "{:?}", io.session.refused());
                write(&mut io, 1);
                exchange_all(&mut io, &mut target);
                assert_eq!(io.done().0, 1);
                io.read(2, 0, 1024);
                exchange_all(&mut io, &mut target);
                assert_eq!(io.done_data()[511..513], [0, 1]);
            }
        }
    }
}

#[test]
fn a_host_with_a_wrong_secret_gets_the_reason() {
    let group = Some(DhGroup::Null);
    let right = secrets(None, group);
    let served = ServedSubsystem::with(Some(right.clone()));
    assert_eq!(refused(&served, None), NvmeRefused::Authentication);
    let wrong = HostSecrets { host: right.controller.clone().unwrap(), controller: None, ..right.clone() };
    let said = refused(&served, Some(wrong));
    assert_eq!(said.auth_failure(), Some(AuthFailure::Rejected(Explanation::AUTHENTICATION_FAILED)));
    let (admin, _target) = brought_up(&served, Some(right.clone()));
    let (mut io, _) = queue(&served, &admin, None);
    assert!(!io.session.is_ready() && io.is_closing());
    assert_eq!(io.session.refused(), Some(&NvmeRefused::Authentication));
}

#[test]
fn a_controller_that_fails_to_authenticate_is_disconnected() {
    let right = secrets(None, Some(DhGroup::Null));
    let own = HostSecrets { controller: Some(right.host.clone()), ..right.clone() };
    let served = ServedSubsystem::with(Some(right.clone()));
    assert_eq!(
        refused(&served, Some(own.clone())).auth_failure(),
        Some(AuthFailure::WrongControllerResponse)
    );
    // The same holds if the controller closes the connection as soon as it learns that.
    let (mut host, mut target) = (admin(own, Concatenation::None), served.target());
    loop {
        let sent = host.sent();
        if sent.get(72..74) == Some(&[MessageType::COMMON.0, MessageId::FAILURE2.0]) {
            break;
        }
        assert!(!sent.is_empty());
        host.feed(&target.exchange(&sent)).unwrap();
    }
    assert!(host.session.refused().is_none() && host.session.on_end(Instant::now()).is_err());
    let failure = host.session.refused().and_then(NvmeRefused::auth_failure);
    assert_eq!(failure, Some(AuthFailure::WrongControllerResponse));
    let open = ServedSubsystem::with(None);
    assert_eq!(refused(&open, Some(right.clone())).auth_failure(), Some(AuthFailure::NotRequired));
    let (admin, _target) = brought_up(&open, Some(HostSecrets { controller: None, ..right }));
    assert!(admin.session.is_ready(), "an unused secret does no harm");
}

#[test]
fn discovery_does_not_require_that_the_controller_authenticates() {
    let own = secrets(None, Some(DhGroup::Null));
    assert!(own.controller.is_some());
    let served = ServedSubsystem::with(Some(own.clone()));
    let names = Names { subsystem: nqn(DISCOVERY_NQN), ..names() };
    let config = AdminConfig {
        names,
        credentials: Some(credentials(own, 1)),
        queues: 1,
        query: ControllerQuery::Discovery,
        keep_alive: Duration::ZERO,
    };
    let session = NvmeTcpAdminSession::new(config, Digests::default(), Pool::new(1 << 20), Instant::now());
    let mut host = Driver::of(session, usize::MAX);
    exchange_all(&mut host, &mut served.target());
    assert!(host.session.is_over() && host.session.refused().is_none(), "{:?}", host.session.refused());
}

/// An admin queue with this state of secure channel concatenation.
fn admin(secrets: HostSecrets, concatenation: Concatenation) -> Driver<NvmeTcpAdminSession> {
    let credentials = Some(HostCredentials { concatenation, ..credentials(secrets, 1) });
    let query = ControllerQuery::Use(1);
    let config = AdminConfig { names: names(), credentials, queues: 1, query, keep_alive: Duration::ZERO };
    let session = NvmeTcpAdminSession::new(config, Digests::default(), Pool::new(1 << 20), Instant::now());
    Driver::of(session, usize::MAX)
}

#[test]
fn a_host_generates_a_psk_and_reconnects_with_it() {
    let both = secrets(None, Some(DhGroup::Ffdhe2048));
    for asks in [false, true] {
        let own = HostSecrets { controller: both.controller.clone().filter(|_| asks), ..both.clone() };
        let served = ServedSubsystem::with_tls(Some(both.clone()));
        let mut first = admin(own.clone(), Concatenation::Due);
        exchange_all(&mut first, &mut served.target());
        assert!(first.session.is_over() && first.session.refused().is_none());
        assert!(
            !first.session.is_ready() && first.session.controller().is_none(),
            "no other command was sent"
        );
        let key = first.session.generated().unwrap().tls_psks(&nqn(HOST), &nqn(SUBSYSTEM)).remove(0);
        assert!(served.node.keyring().find(key.identity.as_bytes()).unwrap() == key);
        // The PSK has authenticated both sides; no authentication is required or missed.
        let mut second = admin(own.clone(), Concatenation::Done);
        let mut held = served.secured(&key.identity);
        exchange_all(&mut second, &mut held);
        assert!(second.session.is_ready(), "{:?}", second.session.refused());
        let io = queues(&second, None, 1);
        let (mut io, mut target) = (Driver::of(io, usize::MAX), served.secured(&key.identity));
        exchange_all(&mut io, &mut target);
        write(&mut io, 1);
        exchange_all(&mut io, &mut target);
        assert_eq!(io.done().0, 1);
    }
}

#[test]
fn a_host_that_needs_a_psk_does_not_continue_without_one() {
    let both = secrets(None, Some(DhGroup::Ffdhe2048));
    let refused = |served: ServedSubsystem| {
        let mut host = admin(both.clone(), Concatenation::Due);
        exchange_all(&mut host, &mut served.target());
        assert!(host.session.generated().is_none() && !host.session.is_ready());
        host.session.refused().unwrap().auth_failure()
    };
    assert_eq!(refused(ServedSubsystem::with_tls(None)), Some(AuthFailure::NoSecureChannel));
    let mismatch = AuthFailure::Rejected(Explanation::SECURE_CHANNEL_CONCATENATION_MISMATCH);
    assert_eq!(refused(ServedSubsystem::with(Some(both.clone()))), Some(mismatch));
}

#[test]
fn several_queues_of_one_controller_share_what_is_submitted() {
    let secrets = secrets(None, Some(DhGroup::Null));
    for own in [None, Some(secrets)] {
        let served = ServedSubsystem::with(own.clone());
        let (admin, _admin_target) = brought_up(&served, own.clone());
        assert_eq!(admin.session.controller().unwrap().io_queues, 3, "as many as were requested");
        let (mut host, mut targets) = connected(&served, queues(&admin, own, 3));
        assert_eq!((targets.len(), host.session.poll_connect()), (3, None));
        assert_eq!(host.session.room(), 3 * 1024);
        (0..6).for_each(|tag| write(&mut host, tag));
        for (connection, target) in targets.iter_mut().enumerate() {
            host.connection = connection;
            exchange_all(&mut host, target);
            assert_eq!(done(&mut host), [connection as u64, connection as u64 + 3], "in turn");
        }
    }
}

#[test]
fn the_loss_of_a_queue_ends_the_session_and_returns_requests_oldest_first() {
    let served = ServedSubsystem::with(None);
    let (admin, _admin_target) = brought_up(&served, None);
    let (mut host, mut targets) = connected(&served, queues(&admin, None, 3));
    (0..7).for_each(|tag| write(&mut host, tag));
    host.connection = 1;
    exchange_all(&mut host, &mut targets[1]);
    assert!(!host.session.on_lost(1, Instant::now()));
    let unfinished: Vec<u64> = host.session.take_unfinished().iter().map(|io| io.tag.0).collect();
    assert_eq!(unfinished, [0, 2, 3, 5, 6]);
    assert_eq!(done(&mut host), [1, 4]);
}

#[test]
fn the_session_continues_without_a_queue_that_cannot_be_connected() {
    let served = ServedSubsystem::with(None);
    let (admin, _admin_target) = brought_up(&served, None);
    let mut host = Driver::of(queues(&admin, None, 3), usize::MAX);
    let mut target = served.target();
    exchange_all(&mut host, &mut target);
    let now = Instant::now();
    assert_eq!(host.session.poll_connect().map(|(connection, _)| connection), Some(1));
    assert!(host.session.on_lost(1, now), "it could not be dialled");
    assert_eq!(host.session.poll_connect().map(|(connection, _)| connection), Some(2));
    host.session.on_connected(2, &TransportInfo::default(), now);
    assert!(host.session.on_lost(2, now), "the queue was not in use");
    assert_eq!(host.session.poll_connect(), None, "neither is dialled again");
    (0..3).for_each(|tag| write(&mut host, tag));
    host.connection = 0;
    exchange_all(&mut host, &mut target);
    assert_eq!(done(&mut host), [0, 1, 2]);
    host.session.on_stop();
    assert!(host.session.is_over());
}
