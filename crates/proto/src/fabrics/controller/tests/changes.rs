//! Changes at run time: namespaces, subsystems and hosts that are added or removed, and the
//! discovery log.

use super::*;
use crate::driver::audit_event::AuditEvent;
use crate::fabrics::controller::node::Referral;
use crate::names::networks::AllowedNetworks;
use crate::names::volume_uuid::VolumeUuid;
use crate::nvme::HangUp;
use crate::nvme::hosts::HostAccess;
use crate::nvme::identity::GivenIdentity;
use crate::nvme::subsystem::{AttachError, unique_discovery_nqn};
use blockmux_wire::nvme::NSID_ALL;
use blockmux_wire::nvme::feature::{AEC_DISCOVERY_CHANGE, AEC_NAMESPACE_ATTRIBUTE, FeatureId};
use blockmux_wire::nvme::identify::{IdentifyController, IdentifyNamespace};
use blockmux_wire::nvme::status::ConnectStatus;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A node with a subsystem without namespaces, and volumes for it.
fn empty() -> ((Arc<NvmeNode>, Exports), Arc<Subsystem>) {
    let exports = Exports::new(vec![export("a"), export("c")]);
    let masks = BTreeMap::from([(Nqn::new(HOST).unwrap(), BTreeSet::from([1, 2, 7]))]);
    let subsystem = Subsystem::new(Nqn::new(NQN).unwrap(), "machine", Vec::new(), Vec::new());
    let subsystem = Arc::new(subsystem.with_masks(masks));
    let ports = vec![FabricsPort::new(1, "192.0.2.1:4420".parse().unwrap())];
    ((Arc::new(NvmeNode::new(vec![subsystem.clone()], ports, "machine")), exports), subsystem)
}

fn namespace(exports: &Exports, nsid: u32, at: u32) -> Namespace {
    let volume_state = exports.volume_state(VolumeId(at)).unwrap();
    Namespace::new(nsid, VolumeId(at), volume_state, false, VolumeUuid::of_texts(&[&format!("volume {at}")]))
}

fn listens(host: &mut FabricsTestHost, notices: u32) {
    let fid = FeatureId::ASYNCHRONOUS_EVENT_CONFIGURATION.0.into();
    assert!(host.run(admin(AdminOpcode::SET_FEATURES, 0, fid, notices, 0), &[]).1.status.is_success());
}

fn changed(host: &mut FabricsTestHost) -> Vec<u8> {
    host.run(admin(AdminOpcode::GET_LOG_PAGE, NSID_ALL, 1023 << 16 | 4, 0, 4096), &[]).0
}

fn listed(host: &mut FabricsTestHost) -> [u8; 8] {
    let page = host.run(admin(AdminOpcode::IDENTIFY, 0, 2, 0, 4096), &[]).0;
    page[..8].try_into().unwrap()
}

#[test]
fn an_attached_namespace_is_reported_and_used_until_it_is_detached() {
    let (node, subsystem) = empty();
    let (mut io, mut queue) = FabricsTestHost::io(&node);
    listens(&mut queue, AEC_NAMESPACE_ATTRIBUTE);
    let mut events = [admin(AdminOpcode::ASYNC_EVENT_REQUEST, 0, 0, 0, 0); 2];
    events.iter_mut().for_each(|event| queue.send(event, &[]));
    assert_eq!(
        refusal(&io.run(nvm(NvmOpcode::READ, 7, 0, 1), &[]).1),
        NvmeStatus::INVALID_NAMESPACE_OR_FORMAT
    );
    let page = queue.run(admin(AdminOpcode::IDENTIFY, 7, 0, 0, 4096), &[]).0;
    assert_eq!(page, vec![0; 4096], "it could be attached");
    subsystem.attach(namespace(&node.1, 7, 0), None).unwrap();
    assert_eq!(subsystem.attach(namespace(&node.1, 7, 1), None), Err(AttachError::Taken(7)));
    let twin = namespace(&node.1, 8, 0);
    assert_eq!(subsystem.attach(twin.clone(), None), Err(AttachError::Twin(7)));
    let own = GivenIdentity { uuid: Some([5; 16]), ..GivenIdentity::default() };
    subsystem.attach(twin.with_identity(&own), None).unwrap();
    assert_eq!(subsystem.detach(|namespace| namespace.nsid == 8), [8]);
    queue.pump.turn();
    assert_eq!(queue.end_of(events[0]).1.result.get(), 0x04_0002);
    assert_eq!(
        (changed(&mut queue)[..8].to_vec(), listed(&mut queue)),
        (vec![7, 0, 0, 0, 0, 0, 0, 0], [7, 0, 0, 0, 0, 0, 0, 0])
    );
    let page = queue.run(admin(AdminOpcode::IDENTIFY, 7, 0, 0, 4096), &[]).0;
    assert_eq!(IdentifyNamespace::read_from_bytes(&page).unwrap().nsze.get(), SIZE / 512);
    assert!(io.run(nvm(NvmOpcode::WRITE, 7, 0, 1), &[7; 512]).1.status.is_success());
    // Outstanding commands end regularly; later ones find no namespace.
    io.pump.holds_io = true;
    let mut read = nvm(NvmOpcode::READ, 7, 0, 1);
    io.send(&mut read, &[]);
    assert_eq!(subsystem.detach(|namespace| namespace.volume == VolumeId(0)), [7]);
    io.pump.finish_one();
    assert_eq!(io.end_of(read).0, [7; 512]);
    io.pump.holds_io = false;
    assert_eq!(
        refusal(&io.run(nvm(NvmOpcode::READ, 7, 0, 1), &[]).1),
        NvmeStatus::INVALID_NAMESPACE_OR_FORMAT
    );
    queue.pump.turn();
    assert_eq!(queue.end_of(events[1]).1.result.get(), 0x04_0002);
    assert_eq!((changed(&mut queue)[0], listed(&mut queue)[0]), (7, 0));
}

#[test]
fn commands_that_wait_for_a_detached_volume_end() {
    use crate::volume_state::RangeGuard;
    let (node, subsystem) = empty();
    subsystem.attach(namespace(&node.1, 1, 0), None).unwrap();
    let (mut io, _queue) = FabricsTestHost::io(&node);
    let volume_state = node.1.volume_state(VolumeId(0)).unwrap();
    let guard = RangeGuard::lock(&volume_state, 0, 512).unwrap();
    let mut reads = [nvm(NvmOpcode::READ, 1, 0, 1); 2];
    reads.iter_mut().for_each(|read| io.send(read, &[]));
    // The namespace is detached while the reads wait.
    subsystem.detach(|_| true);
    assert!(node.1.remove("a").is_some());
    io.pump.turn();
    let ends: Vec<_> = io.received().iter().map(|sent| refusal(&sent.cqe())).collect();
    assert_eq!(ends, [NvmeStatus::INVALID_NAMESPACE_OR_FORMAT; 2]);
    drop(guard);
}

#[test]
fn a_removed_volume_is_an_invalid_namespace_before_its_namespace_is_detached() {
    let (node, subsystem) = empty();
    subsystem.attach(namespace(&node.1, 1, 0), None).unwrap();
    let (mut io, _queue) = FabricsTestHost::io(&node);
    assert!(io.run(nvm(NvmOpcode::READ, 1, 0, 1), &[]).1.status.is_success());
    assert!(node.1.remove("a").is_some());
    for opcode in [NvmOpcode::READ, NvmOpcode::FLUSH] {
        let status = refusal(&io.run(nvm(opcode, 1, 0, 1), &[]).1);
        assert_eq!(status, NvmeStatus::INVALID_NAMESPACE_OR_FORMAT, "{opcode:?}");
    }
}

#[test]
fn throttled_io_does_not_begin_once_its_namespace_is_detached() {
    use crate::driver::target::IoSource;
    use crate::volume_state::NotAdmitted;
    let (node, subsystem) = empty();
    subsystem.attach(namespace(&node.1, 1, 0), None).unwrap();
    let (mut io, _queue) = FabricsTestHost::io(&node);
    io.pump.throttles = true;
    let write = Sqe { dptr: SglDescriptor::in_capsule(0, 512), ..nvm(NvmOpcode::WRITE, 1, 0, 1) };
    io.send(&mut { write }, &[7; 512]);
    io.send(&mut { write }, &[7; 512]);
    let mut begin = || {
        let (volume, throttled) = io.pump.waiting.pop_front().unwrap();
        io.pump.session.begin(volume, &throttled, true)
    };
    assert_eq!(begin(), Ok(()));
    subsystem.detach(|_| true);
    assert_eq!(begin(), Err(NotAdmitted::Denied(blockmux_volume::IoError::PathLost)));
}

#[test]
fn a_host_sees_and_is_notified_of_its_visible_namespaces() {
    let (node, subsystem) = empty();
    let (mut io, mut queue) = FabricsTestHost::io(&node);
    for (nsid, at) in [(2, 0), (3, 1)] {
        subsystem.attach(namespace(&node.1, nsid, at), None).unwrap();
    }
    queue.pump.turn();
    assert_eq!(
        (changed(&mut queue)[..8].to_vec(), listed(&mut queue)),
        (vec![2, 0, 0, 0, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0, 0, 0])
    );
    assert!(io.run(nvm(NvmOpcode::READ, 2, 0, 1), &[]).1.status.is_success());
    assert_eq!(
        refusal(&io.run(nvm(NvmOpcode::READ, 3, 0, 1), &[]).1),
        NvmeStatus::INVALID_NAMESPACE_OR_FORMAT
    );
}

/// The admin queue of a discovery controller with this NQN.
fn discoverer(node: &(Arc<NvmeNode>, Exports), nqn: &str) -> FabricsTestHost {
    let mut host = FabricsTestHost::new(node);
    let (command, data) = connect(nqn, 0, CNTLID_DYNAMIC, 0);
    assert!(host.run(command, data.as_bytes()).1.status.is_success());
    host.enable();
    host
}

/// GENCTR, NUMREC, and the subtype and NQN of each entry.
fn discovered(host: &mut FabricsTestHost) -> (u64, u64, Vec<(u8, String)>) {
    let page = host.run(admin(AdminOpcode::GET_LOG_PAGE, 0, 2047 << 16 | 0x70, 0, 8192), &[]).0;
    let number = |at: usize| u64::from_le_bytes(page[at..at + 8].try_into().unwrap());
    let entries = page[1024..].chunks(1024).filter(|entry| entry[0] != 0);
    let name =
        |entry: &[u8]| (entry[2], Nqn::of_field(entry[256..512].try_into().unwrap()).unwrap().to_string());
    (number(0), number(8), entries.map(name).collect())
}

#[test]
fn an_added_or_removed_subsystem_is_reported_to_discovery_hosts() {
    let (node, _) = empty();
    let mut host = discoverer(&node, DISCOVERY_NQN);
    listens(&mut host, AEC_DISCOVERY_CHANGE);
    let page = host.run(admin(AdminOpcode::IDENTIFY, 0, 1, 0, 4096), &[]).0;
    let page = IdentifyController::read_from_bytes(&page).unwrap();
    assert_eq!(page.oaes.get(), AEC_DISCOVERY_CHANGE);
    // `nvme disconnect -n` finds controllers by the NQN in Identify.
    let own = Nqn::of_field(&page.subnqn).unwrap();
    assert_eq!(own.as_str(), DISCOVERY_NQN);
    let entries = vec![(3, own.to_string()), (2, NQN.to_owned())];
    assert_eq!(discovered(&mut host), (1, 2, entries.clone()));
    let mut events = [admin(AdminOpcode::ASYNC_EVENT_REQUEST, 0, 0, 0, 0); 2];
    events.iter_mut().for_each(|event| host.send(event, &[]));
    let other = Subsystem::new(Nqn::new(PRIVATE).unwrap(), "machine", Vec::new(), Vec::new());
    let other = Arc::new(other);
    assert!(node.0.add(other.clone()) && !node.0.add(other));
    host.pump.turn();
    assert_eq!(host.end_of(events[0]).1.result.get(), 0x70_f002);
    let (mut with_other, next) = (entries.clone(), (2, PRIVATE.to_owned()));
    with_other.push(next);
    assert_eq!(discovered(&mut host), (2, 3, with_other));
    assert!(node.0.remove(&Nqn::new(PRIVATE).unwrap()));
    host.pump.turn();
    assert_eq!(host.end_of(events[1]).1.result.get(), 0x70_f002);
}

#[test]
fn a_discovery_controller_with_a_unique_name_is_reached_by_both() {
    let (node, exports) = empty().0;
    let node = Arc::into_inner(node).unwrap().with_unique_discovery_nqn("machine");
    let node = (Arc::new(node), exports);
    let own = unique_discovery_nqn("machine");
    for name in [own.as_str(), DISCOVERY_NQN] {
        let mut host = discoverer(&node, name);
        let page = host.run(admin(AdminOpcode::IDENTIFY, 0, 1, 0, 4096), &[]).0;
        let page = IdentifyController::read_from_bytes(&page).unwrap();
        assert_eq!(Nqn::of_field(&page.subnqn).unwrap(), own);
        let entries = vec![(3, own.to_string()), (2, NQN.to_owned())];
        assert_eq!(discovered(&mut host), (1, 2, entries));
    }
}

/// A connected host, and how often its connection was closed.
fn with_hang_up(node: &(Arc<NvmeNode>, Exports)) -> (FabricsTestHost, Arc<AtomicUsize>) {
    let (cuts, mut host) = (Arc::new(AtomicUsize::new(0)), FabricsTestHost::new(node));
    let hang_up: HangUp = {
        let cuts = cuts.clone();
        Arc::new(move || {
            cuts.fetch_add(1, Ordering::Relaxed);
        })
    };
    let (permit, _) = node.0.begin_connect(None, hang_up.clone());
    let session = queue(node, Pool::new(usize::MAX), host.now);
    host.pump.session = session.admitted(permit, None, hang_up);
    (host, cuts)
}

#[test]
fn a_subsystem_is_available_only_to_hosts_in_its_networks() {
    let (node, subsystem) = empty();
    let from = |client: [u8; 4]| {
        let mut host = FabricsTestHost::new(&node);
        let hang_up: HangUp = Arc::new(|| {});
        let (permit, _) = node.0.begin_connect(Some(client.into()), hang_up.clone());
        let session = queue(&node, Pool::new(usize::MAX), host.now);
        host.pump.session = session.admitted(permit, None, hang_up);
        host
    };
    let discoverer = |client| {
        let mut host = from(client);
        let (command, data) = connect(DISCOVERY_NQN, 0, CNTLID_DYNAMIC, 0);
        assert!(host.run(command, data.as_bytes()).1.status.is_success());
        host.enable();
        host
    };
    let names = |host: &mut FabricsTestHost| {
        discovered(host).2.into_iter().map(|(subtype, _)| subtype).collect::<Vec<_>>()
    };
    let (inside, outside) = ([192, 0, 2, 7], [192, 0, 3, 7]);
    let mut near = discoverer(inside);
    let mut far = discoverer(outside);
    listens(&mut far, AEC_DISCOVERY_CHANGE);
    far.send(&mut admin(AdminOpcode::ASYNC_EVENT_REQUEST, 0, 0, 0, 0), &[]);
    assert_eq!((names(&mut near), names(&mut far)), (vec![3, 2], vec![3, 2]));
    node.0.set_networks_of(&subsystem, AllowedNetworks::only(&["192.0.2.0/24".parse().unwrap()]));
    far.pump.turn();
    assert_eq!(far.received().len(), 1, "the log has changed");
    assert_eq!((names(&mut near), names(&mut far)), (vec![3, 2], vec![3]));
    let refused = NvmeStatus::from(ConnectStatus::CONNECT_INVALID_HOST);
    let mut stranger = from(outside);
    assert_eq!(refusal(&stranger.connect(0, CNTLID_DYNAMIC, 0)), refused);
    assert!(matches!(
        stranger.pump.session.audit.pop(),
        Some(AuditEvent::Refused { ref reason, .. }) if reason.contains("its address is not in an allow-list")
    ));
    assert!(from(inside).connect(0, CNTLID_DYNAMIC, 0).status.is_success());
}

#[test]
fn a_host_is_added_and_removed_without_affecting_others() {
    let exports = Exports::new(vec![export("a")]);
    let (name, other) = (Nqn::new(HOST).unwrap(), Nqn::new("nqn.2026-11.test:other").unwrap());
    let subsystem = Subsystem::new(Nqn::new(NQN).unwrap(), "machine", Vec::new(), Vec::new()).closed();
    let subsystem = Arc::new(subsystem);
    let ports = vec![FabricsPort::new(1, "192.0.2.1:4420".parse().unwrap())];
    let node = (Arc::new(NvmeNode::new(vec![subsystem.clone()], ports, "machine")), exports);
    subsystem.attach(namespace(&node.1, 1, 0), None).unwrap();
    let refused = NvmeStatus::from(ConnectStatus::CONNECT_INVALID_HOST);
    assert_eq!(refusal(&FabricsTestHost::new(&node).connect(0, CNTLID_DYNAMIC, 0)), refused);
    let mut discoverer = discoverer(&node, DISCOVERY_NQN);
    listens(&mut discoverer, AEC_DISCOVERY_CHANGE);
    let mut events = [admin(AdminOpcode::ASYNC_EVENT_REQUEST, 0, 0, 0, 0); 2];
    events.iter_mut().for_each(|event| discoverer.send(event, &[]));
    assert_eq!(discovered(&mut discoverer).1, 1, "discovery alone");
    node.0.set_host(&subsystem, &other, HostAccess::default()).unwrap();
    discoverer.pump.turn();
    assert!(discoverer.received().is_empty(), "that does not concern it");
    node.0.set_host(&subsystem, &name, HostAccess::default()).unwrap();
    discoverer.pump.turn();
    assert_eq!(discoverer.end_of(events[0]).1.result.get(), 0x70_f002);
    assert_eq!(discovered(&mut discoverer).1, 2);

    let (mut queue, cuts) = with_hang_up(&node);
    assert!(queue.connect(0, CNTLID_DYNAMIC, 0).status.is_success());
    queue.enable();
    listens(&mut queue, AEC_NAMESPACE_ATTRIBUTE);
    let mut shown = admin(AdminOpcode::ASYNC_EVENT_REQUEST, 0, 0, 0, 0);
    queue.send(&mut shown, &[]);
    let blind = HostAccess { namespaces: Some([7].into()), ..HostAccess::default() };
    node.0.set_host(&subsystem, &name, blind).unwrap();
    queue.pump.turn();
    assert_eq!(queue.end_of(shown).1.result.get(), 0x04_0002);
    assert_eq!((changed(&mut queue)[..4].to_vec(), listed(&mut queue)), (vec![1, 0, 0, 0], [0; 8]));

    let remove = |host: &Nqn| {
        let was_listed = node.0.withdraw_host(&subsystem, host);
        if was_listed {
            subsystem.disconnect_host(host);
        }
        was_listed
    };
    assert!(remove(&other));
    assert_eq!(cuts.load(Ordering::Relaxed), 0);
    assert!(remove(&name) && !remove(&name));
    assert_eq!(cuts.load(Ordering::Relaxed), 1);
    assert_eq!(refusal(&FabricsTestHost::new(&node).connect(0, CNTLID_DYNAMIC, 0)), refused);
    discoverer.pump.turn();
    assert_eq!(discoverer.end_of(events[1]).1.result.get(), 0x70_f002);
    assert_eq!(discovered(&mut discoverer).1, 1);
    let open = Subsystem::new(Nqn::new(PRIVATE).unwrap(), "machine", Vec::new(), Vec::new());
    assert!(node.0.set_host(&open, &name, HostAccess::default()).is_err());
}

#[test]
fn the_hosts_of_a_removed_subsystem_are_disconnected() {
    let (node, _) = empty();
    let (mut host, cuts) = with_hang_up(&node);
    assert!(host.connect(0, CNTLID_DYNAMIC, 0).status.is_success());
    assert!(node.0.remove(&Nqn::new(NQN).unwrap()) && !node.0.remove(&Nqn::new(NQN).unwrap()));
    assert_eq!(cuts.load(Ordering::Relaxed), 1);
    let mut again = FabricsTestHost::new(&node);
    assert_eq!(refusal(&again.connect(0, CNTLID_DYNAMIC, 0)).0, 0x182);
}

#[test]
fn referrals_follow_the_entries_of_this_node() {
    let (node, exports) = empty().0;
    let node = Arc::into_inner(node).unwrap();
    let referral =
        Referral { address: "[2001:db8::1]:8009".parse().unwrap(), nqn: Nqn::new(DISCOVERY_NQN).unwrap() };
    let node = (Arc::new(node.with_referrals(vec![referral])), exports);
    let mut host = discoverer(&node, DISCOVERY_NQN);
    let (_, count, entries) = discovered(&mut host);
    assert_eq!((count, entries[2].clone()), (3, (1, DISCOVERY_NQN.to_owned())));
    let page = host.run(admin(AdminOpcode::GET_LOG_PAGE, 0, 2047 << 16 | 0x70, 0, 8192), &[]).0;
    let entry = &page[3 * 1024..];
    assert_eq!(
        (&entry[..2], &entry[32..36], &entry[512..523]),
        (&[3, 2][..], &b"8009"[..], &b"2001:db8::1"[..])
    );
}
