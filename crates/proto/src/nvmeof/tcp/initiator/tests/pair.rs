//! Our own two sides against each other.

use crate::exports::{Export, Exports, VolumeId};
use crate::nvme::nqn::Nqn;
use crate::nvme::subsystem::{Namespace, Subsystem};
use crate::nvmeof::auth::target::tests::secrets;
use crate::nvmeof::auth::{Credentials, DhGroup, Hash, HostSecrets, Unproved};
use crate::nvmeof::node::{Node, Port};
use crate::nvmeof::tcp::initiator::*;
use crate::nvmeof::tcp::target::TargetSession;
use crate::session::{Control, Initiator, StreamSession};
use crate::testing::{Driver, Pump};
use blockmux_volume::{MemVolume, Pool, Seg, SgList};
use blockmux_wire::nvmeof::auth::Explanation;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

const HOST: &str = "nqn.2026-11.test:host";
const SUBSYSTEM: &str = "nqn.2026-11.test:disk";
const SIZE: u64 = 1 << 20;

/// A node with one namespace, whose one host has these secrets if there are any.
struct Served {
    node: Arc<Node>,
    exports: Exports,
}

fn nqn(name: &str) -> Nqn {
    Nqn::new(name).unwrap()
}

impl Served {
    fn with(secrets: Option<HostSecrets>) -> Served {
        let volume = Arc::new(MemVolume::new(SIZE));
        let export = Export { name: "a".into(), description: String::new(), read_only: false, volume };
        let exports = Exports::new(vec![export]);
        let served = exports.served(VolumeId(0)).unwrap().clone();
        let namespace = Namespace::new(1, VolumeId(0), served, false, ("a", "machine"));
        let subsystem = Subsystem::new(nqn(SUBSYSTEM), "machine", vec![namespace], vec![nqn(HOST)]);
        let known = secrets.map(|secrets| (nqn(HOST), secrets)).into_iter().collect::<BTreeMap<_, _>>();
        let ports = vec![Port { id: 1, address: "0.0.0.0:4420".parse().unwrap() }];
        let node = Node::new(vec![Arc::new(subsystem.with_secrets(known))], ports, "machine");
        Served { node: Arc::new(node), exports }
    }

    fn target(&self) -> Pump<TargetSession> {
        let session = TargetSession::new(self.node.clone(), Pool::new(usize::MAX), Instant::now());
        Pump::new(session.with_seed([5; 32]), &self.exports)
    }
}

/// Lets both sides talk until neither has anything to say.
fn talk<S: StreamSession>(host: &mut Driver<S>, target: &mut Pump<TargetSession>) {
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

fn credentials(secrets: HostSecrets, seed: u8) -> Credentials {
    Credentials { secrets: Arc::new(secrets), seed: [seed; 32] }
}

/// The admin queue, after all that can be said.
fn brought_up(served: &Served, secrets: Option<HostSecrets>) -> (Driver<AdminSession>, Pump<TargetSession>) {
    let credentials = secrets.map(|secrets| credentials(secrets, 1));
    let config = AdminConfig { names: names(), credentials, ask: Ask::Use(1), keep_alive: Duration::ZERO };
    let session = AdminSession::new(config, Digests::default(), Pool::new(1 << 20), Instant::now());
    let (mut host, mut target) = (Driver::of(session, usize::MAX), served.target());
    talk(&mut host, &mut target);
    (host, target)
}

fn refused(served: &Served, secrets: Option<HostSecrets>) -> Refused {
    let (host, _target) = brought_up(served, secrets);
    assert!(host.is_closing() && !host.session.is_ready());
    host.session.refused().unwrap().clone()
}

/// An I/O queue beside an admin queue.
fn queue(
    served: &Served,
    admin: &Driver<AdminSession>,
    secrets: Option<HostSecrets>,
) -> (Driver<QueueSession>, Pump<TargetSession>) {
    let config = QueueConfig {
        names: names(),
        credentials: secrets.map(|secrets| credentials(secrets, 2)),
        controller: admin.session.controller().unwrap().clone(),
        namespace: admin.session.namespaces()[0].clone(),
        qid: 1,
        entries: 64,
        digests: Digests::default(),
    };
    let session = QueueSession::new(config, Pool::new(16 << 20), Instant::now());
    let (mut host, mut target) = (Driver::of(session, usize::MAX), served.target());
    talk(&mut host, &mut target);
    (host, target)
}

#[test]
fn both_queues_prove_who_they_are_with_every_hash_and_group() {
    for hash in Hash::ALL {
        for group in [DhGroup::Null, DhGroup::Ffdhe2048] {
            for asks in [false, true] {
                let both = secrets(Some(hash), Some(group));
                let own =
                    HostSecrets { controller: both.controller.clone().filter(|_| asks), ..both.clone() };
                let served = Served::with(Some(both));
                let (admin, _admin_target) = brought_up(&served, Some(own.clone()));
                assert!(admin.session.is_ready(), "{:?}", admin.session.refused());
                let (mut io, mut target) = queue(&served, &admin, Some(own));
                assert!(io.session.is_ready(), "{:?}", io.session.refused());
                io.submit(
                    1,
                    blockmux_volume::Op::Write { fua: false },
                    512,
                    512,
                    Some(SgList::one(Seg::from_slice(&[7; 512]))),
                );
                talk(&mut io, &mut target);
                assert_eq!(io.done().0, 1);
                io.read(2, 0, 1024);
                talk(&mut io, &mut target);
                assert_eq!(io.done_data()[511..513], [0, 7]);
            }
        }
    }
}

#[test]
fn who_has_no_secret_or_a_wrong_one_is_told_so() {
    let group = Some(DhGroup::Null);
    let right = secrets(None, group);
    let served = Served::with(Some(right.clone()));
    assert_eq!(refused(&served, None), Refused::Authentication);
    let wrong = HostSecrets { host: right.controller.clone().unwrap(), controller: None, ..right.clone() };
    let said = refused(&served, Some(wrong));
    assert_eq!(said, Refused::Proof(Unproved::Rejected(Explanation::AUTHENTICATION_FAILED)));
    let (admin, _target) = brought_up(&served, Some(right.clone()));
    let (io, _) = queue(&served, &admin, None);
    assert!(!io.session.is_ready() && io.is_closing());
    assert_eq!(io.session.refused(), Some(&Refused::Authentication));
}

#[test]
fn a_controller_that_cannot_prove_itself_or_does_not_ask_is_left() {
    let right = secrets(None, Some(DhGroup::Null));
    let own = HostSecrets { controller: Some(right.host.clone()), ..right.clone() };
    let served = Served::with(Some(right.clone()));
    assert_eq!(refused(&served, Some(own)), Refused::Proof(Unproved::Impostor));
    let open = Served::with(None);
    assert_eq!(refused(&open, Some(right.clone())), Refused::Proof(Unproved::NotAsked));
    let (admin, _target) = brought_up(&open, Some(HostSecrets { controller: None, ..right }));
    assert!(admin.session.is_ready(), "a secret that nobody asks for does no harm");
}
