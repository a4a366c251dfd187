//! Hosts that have to authenticate.

use super::*;
use crate::driver::computation::Job;
use crate::driver::session::{ProtocolError, Timed};
use crate::driver::target::{SessionStage, TargetLifecycle};
use crate::names::volume_uuid::VolumeUuid;
use crate::nvme::auth::controller::tests::{negotiate, reply, secrets};
use crate::nvme::auth::host::{AuthStep, HostAuthenticator};
use crate::nvme::auth::{
    AuthFailure, Concatenation, DhChapSecret, DhGroup, Hash, HostCredentials, HostSecrets, MAX_MESSAGE,
};
use crate::nvme::hosts::HostAccess;
use blockmux_volume::Waker;
use blockmux_wire::nvme::log::LogPage;
use blockmux_wire::nvmeof::auth::{Explanation, SECURITY_PROTOCOL_NVME};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

/// A subsystem with one host, which has secrets.
fn guarded() -> (Arc<NvmeNode>, Exports) {
    guarded_for(&["nqn.h"])
}

/// A subsystem with these hosts, which have the same secrets.
fn guarded_for(hosts: &[&str]) -> (Arc<NvmeNode>, Exports) {
    let exports = Exports::new(vec![export("a")]);
    let volume_state = exports.volume_state(VolumeId(0)).unwrap().clone();
    let namespace = Namespace::new(1, VolumeId(0), volume_state, false, VolumeUuid::of_texts(&["a"]));
    let nqn = |name| Nqn::new(name).unwrap();
    let listed = hosts.iter().map(|host| nqn(host)).collect();
    let subsystem = Subsystem::new(nqn(NQN), "machine", vec![namespace], listed);
    let known: BTreeMap<_, _> =
        hosts.iter().map(|host| (nqn(host), secrets(None, Some(DhGroup::Ffdhe2048)))).collect();
    let subsystem = Arc::new(subsystem.with_secrets(known));
    let ports = vec![FabricsPort::new(1, "0.0.0.0:4420".parse().unwrap())];
    (Arc::new(NvmeNode::new(vec![subsystem], ports, "machine")), exports)
}

/// A host that is connected and not authenticated.
fn connected(node: &(Arc<NvmeNode>, Exports), qid: u16, cntlid: u16) -> (FabricsTestHost, Cqe) {
    let mut host = FabricsTestHost::new(node);
    let session = queue(node, Pool::new(usize::MAX), host.now).with_seed([5; 32]);
    host.pump.session = session;
    let (command, data) = connect(NQN, qid, cntlid, 0);
    let data = ConnectData { hostnqn: Nqn::new("nqn.h").unwrap().to_field(), ..data };
    let cqe = host.run(command, data.as_bytes()).1;
    (host, cqe)
}

fn send(host: &mut FabricsTestHost, message: &[u8]) -> Cqe {
    let sqe = authentication(FabricsType::AUTHENTICATION_SEND, message.len());
    host.run(sqe, message).1
}

fn receive(host: &mut FabricsTestHost, len: usize) -> Vec<u8> {
    let (message, cqe) = host.run(authentication(FabricsType::AUTHENTICATION_RECEIVE, len), &[]);
    assert!(cqe.status.is_success());
    message
}

fn authentication(kind: FabricsType, len: usize) -> Sqe {
    Sqe {
        opcode: AdminOpcode::FABRICS.0,
        flags: 0x40,
        nsid: u32::from(kind.0).into(),
        dptr: SglDescriptor::transport(len as u32),
        cdw10: (SECURITY_PROTOCOL_NVME << 8).into(),
        cdw11: (len as u32).into(),
        ..Sqe::new_zeroed()
    }
}

fn secret() -> DhChapSecret {
    secrets(None, None).host
}

/// Authenticates the host, which does not ask the controller to authenticate.
fn prove(host: &mut FabricsTestHost) {
    assert!(send(host, &negotiate(&[1, 2], &[0, 1])).status.is_success());
    let challenge = receive(host, 16 + 48 + 256);
    // `reply` uses the host NQN of the authenticator's own tests.
    let answer = reply(&challenge, &secret(), (false, 0), NQN).0;
    assert!(send(host, &answer).status.is_success());
    assert_eq!(receive(host, 16 + 48)[1], 3);
}

#[test]
fn an_authenticated_host_may_use_each_queue() {
    let node = guarded();
    let (mut admin_queue, cqe) = connected(&node, 0, CNTLID_DYNAMIC);
    let cntlid = cqe.result.get() as u16;
    assert_eq!(cqe.result.get(), u64::from(AUTHREQ_ATR | u32::from(cntlid)));
    assert_eq!(refusal(&admin_queue.set_cc(0x0046_0061)), NvmeStatus::AUTHENTICATION_REQUIRED);
    let keep_alive = admin(AdminOpcode::KEEP_ALIVE, 0, 0, 0, 0);
    assert_eq!(refusal(&admin_queue.run(keep_alive, &[]).1), NvmeStatus::AUTHENTICATION_REQUIRED);
    prove(&mut admin_queue);
    admin_queue.enable();
    let (mut io, cqe) = connected(&node, 1, cntlid);
    assert!(cqe.status.is_success());
    let read = nvm(NvmOpcode::READ, 1, 0, 1);
    assert_eq!(refusal(&io.run(read, &[]).1), NvmeStatus::AUTHENTICATION_REQUIRED);
    let fused = Sqe { flags: 0x41, ..nvm(NvmOpcode::COMPARE, 1, 0, 1) };
    assert_eq!(refusal(&io.run(fused, &[0; 512]).1), NvmeStatus::AUTHENTICATION_REQUIRED);
    prove(&mut io);
    assert!(io.run(read, &[]).1.status.is_success());
    // A host may authenticate again at any time.
    prove(&mut admin_queue);
    assert!(admin_queue.run(keep_alive, &[]).1.status.is_success());
}

/// An authenticated host's enabled controller, and its identifier.
fn proved_admin(node: &(Arc<NvmeNode>, Exports)) -> (FabricsTestHost, u16) {
    let (mut admin_queue, cqe) = connected(node, 0, CNTLID_DYNAMIC);
    prove(&mut admin_queue);
    admin_queue.enable();
    (admin_queue, cqe.result.get() as u16)
}

#[test]
fn a_host_without_the_secret_takes_no_queue_and_no_log_entry_of_the_host_that_it_claims_to_be() {
    let node = guarded();
    let (mut admin_queue, cntlid) = proved_admin(&node);
    let read = nvm(NvmOpcode::READ, 1, 0, 1);
    let claim = |qid| {
        let (mut attacker, cqe) = connected(&node, qid, cntlid);
        assert!(cqe.status.is_success(), "queue {qid}");
        assert_eq!(refusal(&attacker.run(read, &[]).1), NvmeStatus::AUTHENTICATION_REQUIRED);
        attacker
    };
    let mut attackers: Vec<_> = (1..=128).map(claim).collect();
    let errors = |admin_queue: &mut FabricsTestHost| {
        let log =
            admin(AdminOpcode::GET_LOG_PAGE, 0, 15 << 16 | u32::from(LogPage::ERROR_INFORMATION.0), 0, 64);
        admin_queue.run(log, &[]).0
    };
    assert_eq!(errors(&mut admin_queue)[..8], [0; 8], "no entry");
    let mut queues = Vec::new();
    for qid in [1, 2, 128] {
        attackers.push(claim(qid));
        let (mut io, cqe) = connected(&node, qid, cntlid);
        assert!(cqe.status.is_success(), "queue {qid}");
        attackers.push(claim(qid));
        prove(&mut io);
        assert!(io.run(read, &[]).1.status.is_success(), "queue {qid}");
        // From now on it is the host's.
        let (_, late) = connected(&node, qid, cntlid);
        assert_eq!(late.status.status(), NvmeStatus::COMMAND_SEQUENCE_ERROR);
        queues.push(io);
    }
    // The end of the attackers' connections frees nothing of the host.
    drop(attackers);
    for (io, qid) in queues.iter_mut().zip([1, 2, 128]) {
        assert!(io.run(read, &[]).1.status.is_success());
        assert!(!connected(&node, qid, cntlid).1.status.is_success());
    }
    drop(queues);
    assert!(admin_queue.set_cc(0x0046_0060).status.is_success());
    assert_eq!(admin_queue.csts(), 0, "no queue of others delays the reset");
}

#[test]
fn of_two_connections_that_authenticate_for_one_queue_the_second_is_closed() {
    let node = guarded();
    let (_admin_queue, cntlid) = proved_admin(&node);
    let [mut first, mut second] = [(); 2].map(|()| connected(&node, 1, cntlid).0);
    prove(&mut first);
    prove(&mut second);
    assert!(second.is_closed() && !first.is_closed());
    let read = nvm(NvmOpcode::READ, 1, 0, 1);
    assert!(first.run(read, &[]).1.status.is_success());
}

#[test]
fn a_queue_that_authenticates_after_its_controller_was_reset_is_closed() {
    let node = guarded();
    let (mut admin_queue, cntlid) = proved_admin(&node);
    let (mut io, _) = connected(&node, 1, cntlid);
    assert!(admin_queue.set_cc(0x0046_0060).status.is_success());
    assert_eq!(admin_queue.csts(), 0, "the queue is not a part of the controller yet");
    prove(&mut io);
    assert!(io.is_closed());
}

#[test]
fn a_connection_counts_as_established_once_its_host_is_authenticated() {
    let node = guarded();
    let (mut host, _) = connected(&node, 0, CNTLID_DYNAMIC);
    assert_eq!(host.pump.session.stage(), SessionStage::Handshake);
    prove(&mut host);
    assert_eq!(host.pump.session.stage(), SessionStage::Established);
}

/// Authenticates the host with these secrets, and the controller if one of them is its.
fn authenticate(host: &mut FabricsTestHost, own: &HostSecrets) -> Result<(), AuthFailure> {
    let (secrets, concatenation) = (Arc::new(own.clone()), Concatenation::None);
    let credentials = HostCredentials { secrets, seed: [host.cid as u8; 32], concatenation };
    let [name, subsystem] = ["nqn.h", NQN].map(|name| Nqn::new(name).unwrap());
    let mut applicant = HostAuthenticator::new(credentials, &name, &subsystem);
    loop {
        match applicant.turn() {
            AuthStep::Send(message) => {
                assert!(send(host, message).status.is_success());
                applicant.on_sent();
            }
            AuthStep::Receive => applicant.on_message(&receive(host, MAX_MESSAGE)),
            AuthStep::Over(outcome) => return outcome,
        }
    }
}

/// After blktests nvme/045: each secret and algorithm is replaced at the controller, then at the
/// connected host, which authenticates every queue again.
#[test]
fn a_connected_host_authenticates_again_with_secrets_that_were_replaced() {
    let node = guarded();
    let replace = |own: &HostSecrets| {
        let subsystem = node.0.find(&Nqn::new(NQN).unwrap()).unwrap();
        let access = HostAccess { namespaces: None, secrets: Some(Arc::new(own.clone())) };
        node.0.set_host(&subsystem, &Nqn::new("nqn.h").unwrap(), access).unwrap();
    };
    let mut own = secrets(None, Some(DhGroup::Ffdhe2048));
    let (mut admin_queue, cqe) = connected(&node, 0, CNTLID_DYNAMIC);
    assert_eq!(authenticate(&mut admin_queue, &own), Ok(()));
    admin_queue.enable();
    let (mut io, _) = connected(&node, 1, cqe.result.get() as u16);
    assert_eq!(authenticate(&mut io, &own), Ok(()));
    let (first, original) = (own.host.clone(), own.clone());
    type Replace = fn(&mut HostSecrets, DhChapSecret);
    let changes: [Replace; 5] = [
        |_, _| {},
        |own, _| std::mem::swap(&mut own.host, own.controller.as_mut().unwrap()),
        |own, first| own.controller = Some(first),
        |own, _| (own.group, own.controller) = (Some(DhGroup::Ffdhe3072), None),
        |own, _| own.hash = Some(Hash::Sha512),
    ];
    for change in changes {
        change(&mut own, first.clone());
        replace(&own);
        for queue in [&mut admin_queue, &mut io] {
            assert_eq!(authenticate(queue, &own), Ok(()));
        }
        assert!(io.run(nvm(NvmOpcode::READ, 1, 0, 1), &[]).1.status.is_success());
    }
    // A secret that was replaced authenticates no more.
    let unusable = Err(AuthFailure::Rejected(Explanation::DH_GROUP_NOT_USABLE));
    assert_eq!(authenticate(&mut io, &original), unusable);
    assert!(io.is_closed() && !admin_queue.is_closed());
}

#[test]
fn a_host_that_fails_to_authenticate_gets_the_reason_and_loses_its_connection() {
    let node = guarded();
    let (mut host, _) = connected(&node, 0, CNTLID_DYNAMIC);
    assert!(send(&mut host, &negotiate(&[1], &[1])).status.is_success());
    let challenge = receive(&mut host, 16 + 32 + 256);
    let other = secrets(None, None).controller.unwrap();
    assert!(send(&mut host, &reply(&challenge, &other, (false, 0), NQN).0).status.is_success());
    assert!(!host.is_closed());
    let failure = receive(&mut host, 64);
    assert_eq!((failure[1], failure[7]), (0xf1, Explanation::AUTHENTICATION_FAILED.0));
    assert!(host.is_closed());
}

#[test]
fn a_host_that_takes_too_long_to_authenticate_loses_its_connection() {
    let node = guarded();
    let (mut host, _) = connected(&node, 0, CNTLID_DYNAMIC);
    let at = host.pump.session.poll_timeout().unwrap();
    assert!(at <= host.now + Duration::from_secs(30));
    assert!(host.pump.session.on_timeout(host.now + Duration::from_secs(30)).is_err());
    // Each message has half of that time.
    let (mut host, _) = connected(&node, 0, CNTLID_DYNAMIC);
    let start = host.now;
    let at = |seconds| start + Duration::from_secs(seconds);
    host.pump.session.on_timeout(at(10)).unwrap();
    host.pump.now = at(10);
    assert!(send(&mut host, &negotiate(&[1, 2], &[0, 1])).status.is_success());
    host.pump.session.on_timeout(at(20)).unwrap();
    host.pump.session.on_timeout(at(24)).unwrap();
    let error = host.pump.session.on_timeout(at(25)).unwrap_err();
    assert_eq!(error.what, "did not continue its authentication within 15 seconds");
}

#[test]
fn a_host_may_authenticate_for_longer_than_its_keep_alive_timeout() {
    let node = guarded();
    let (mut host, _) = connected(&node, 0, CNTLID_DYNAMIC);
    let pass = |host: &mut FabricsTestHost, until: Duration| {
        let until = host.now + until;
        while let Some(next) = host.pump.session.poll_timeout().filter(|&next| next <= until) {
            host.pump.session.on_timeout(next)?;
        }
        Ok::<_, ProtocolError>(())
    };
    // It cannot send Keep Alive yet, and its timeout is 4 seconds.
    pass(&mut host, Duration::from_secs(14)).unwrap();
    prove(&mut host);
    host.enable();
    let error = pass(&mut host, Duration::from_secs(60)).unwrap_err();
    assert_eq!(error.what, "did not keep its controller alive within its Keep Alive Timeout");
}

/// Linux's controller answered into a buffer that was too short, and returned the stale bytes
/// behind its answer (CVE-2026-72130, CVE-2026-80791).
#[test]
fn invalid_authentication_commands_are_refused() {
    let node = guarded();
    let (mut host, _) = connected(&node, 0, CNTLID_DYNAMIC);
    let receive = authentication(FabricsType::AUTHENTICATION_RECEIVE, 64);
    for wrong in [
        Sqe { cdw10: 0.into(), ..receive },
        Sqe { cdw11: 0.into(), ..receive },
        Sqe { cdw11: 4097.into(), ..receive },
        Sqe { cdw10: 0.into(), ..authentication(FabricsType::AUTHENTICATION_SEND, 64) },
    ] {
        assert_eq!(refusal(&host.run(wrong, &[]).1), NvmeStatus::INVALID_FIELD_IN_COMMAND);
    }
    let long = Sqe { cdw11: 128.into(), ..receive };
    assert_eq!(refusal(&host.run(long, &[]).1), NvmeStatus::DATA_SGL_LENGTH_INVALID);
    // A host that does not have to authenticate.
    let (mut plain, _) = FabricsTestHost::admin(&super::node());
    assert_eq!(refusal(&plain.run(receive, &[]).1), NvmeStatus::INVALID_FIELD_IN_COMMAND);
    // Without random numbers, authentication is not possible.
    let mut host = FabricsTestHost::new(&node);
    let (command, data) = connect(NQN, 0, CNTLID_DYNAMIC, 0);
    let data = ConnectData { hostnqn: Nqn::new("nqn.h").unwrap().to_field(), ..data };
    assert_eq!(refusal(&host.run(command, data.as_bytes()).1), NvmeStatus::INTERNAL_ERROR);
}

#[test]
fn a_message_waits_for_its_computation_on_another_thread() {
    let node = guarded();
    let jobs = Arc::new(Mutex::new(Vec::new()));
    let queued = jobs.clone();
    let mut host = FabricsTestHost::new(&node);
    host.pump.session = queue(&node, Pool::new(usize::MAX), host.now)
        .with_seed([5; 32])
        .computing_by(Arc::new(move |job| queued.lock().unwrap().push(job)))
        .with_notifier(Box::new(|_| Arc::new(|| ())));
    host.pump.session.on_start(&Waker::idle(), host.now);
    let (command, data) = connect(NQN, 0, CNTLID_DYNAMIC, 0);
    let data = ConnectData { hostnqn: Nqn::new("nqn.h").unwrap().to_field(), ..data };
    assert!(host.run(command, data.as_bytes()).1.status.is_success());
    // The reply to a message that was computed by the only job.
    let computed = |host: &mut FabricsTestHost, len| {
        let mut sqe = authentication(FabricsType::AUTHENTICATION_RECEIVE, len);
        host.send(&mut sqe, &[]);
        assert_eq!(host.received().len(), 0);
        let mut jobs: Vec<Job> = std::mem::take(&mut *jobs.lock().unwrap());
        assert_eq!(jobs.len(), 1);
        jobs.remove(0).run();
        host.pump.session.on_turn(host.now);
        host.end_of(sqe).0
    };
    assert!(send(&mut host, &negotiate(&[1, 2], &[0, 1])).status.is_success());
    let challenge = computed(&mut host, 16 + 48 + 256);
    assert!(send(&mut host, &reply(&challenge, &secret(), (false, 0), NQN).0).status.is_success());
    assert_eq!(computed(&mut host, 16 + 48)[1], 3);
    host.enable();
    // A second command for the same message is a mistake of the host.
    assert!(send(&mut host, &negotiate(&[1, 2], &[0, 1])).status.is_success());
    let receive = authentication(FabricsType::AUTHENTICATION_RECEIVE, 16 + 48 + 256);
    host.send(&mut { receive }, &[]);
    assert_eq!(refusal(&host.run(receive, &[]).1), NvmeStatus::COMMAND_SEQUENCE_ERROR);
}

/// Linux's controller freed the key of the first message while the second used it
/// (CVE-2026-99441).
#[test]
fn a_message_that_overlaps_the_computation_of_another_fails_the_authentication() {
    let node = guarded();
    let jobs = Arc::new(Mutex::new(Vec::<Job>::new()));
    for waits in [false, true] {
        let queued = jobs.clone();
        let mut host = FabricsTestHost::new(&node);
        host.pump.session = queue(&node, Pool::new(usize::MAX), host.now)
            .with_seed([5; 32])
            .computing_by(Arc::new(move |job| queued.lock().unwrap().push(job)))
            .with_notifier(Box::new(|_| Arc::new(|| ())));
        host.pump.session.on_start(&Waker::idle(), host.now);
        let (command, data) = connect(NQN, 0, CNTLID_DYNAMIC, 0);
        let data = ConnectData { hostnqn: Nqn::new("nqn.h").unwrap().to_field(), ..data };
        assert!(host.run(command, data.as_bytes()).1.status.is_success());
        assert!(send(&mut host, &negotiate(&[1, 2], &[0, 1])).status.is_success());
        let mut receiving = authentication(FabricsType::AUTHENTICATION_RECEIVE, 64);
        if waits {
            host.send(&mut receiving, &[]);
            assert_eq!(host.received().len(), 0);
        }
        let message = negotiate(&[1, 2], &[0, 1]);
        let mut sending = authentication(FabricsType::AUTHENTICATION_SEND, message.len());
        sending.dptr = SglDescriptor::in_capsule(0, message.len() as u32);
        host.send(&mut sending, &message);
        if !waits {
            host.send(&mut receiving, &[]);
        }
        let ends: Vec<_> = host
            .received()
            .into_iter()
            .map(|end| if let TransportCall::Done { data, cqe } = end { (data, cqe) } else { panic!() })
            .collect();
        assert!(ends.iter().all(|(_, cqe)| cqe.status.is_success()) && ends.len() == 2, "waits: {waits}");
        let failure = &ends.iter().find(|(_, cqe)| cqe.cid == receiving.cid).unwrap().0;
        assert_eq!((failure[1], failure[7]), (0xf1, Explanation::INCORRECT_MESSAGE.0));
        // The first computation has nobody to tell its result.
        jobs.lock().unwrap().drain(..).for_each(|job| job.run());
        host.pump.session.on_turn(host.now);
        assert!(host.is_closed() && host.received().is_empty());
    }
}
