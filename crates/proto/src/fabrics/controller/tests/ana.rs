//! ANA: groups of namespaces with different states at two ports.

use super::*;
use crate::driver::session::Timed;
use crate::exports::Export;
use crate::names::volume_uuid::VolumeUuid;
use crate::nvme::ana::AnaGroup;
use crate::volume_state::{TestCluster, VolumeState};
use blockmux_wire::nvme::feature::{AEC_ANA_CHANGE, FeatureId};
use blockmux_wire::nvme::identify::{CMIC_ANA, IdentifyController, IdentifyNamespace};
use blockmux_wire::nvme::log::AnaState;
use blockmux_wire::nvme::reservation::EDS;
use std::collections::BTreeMap;

/// Namespace 1 in group 5, which is inaccessible at port 2; namespace 2 in no configured group.
fn asymmetric() -> ((Arc<NvmeNode>, Exports), Arc<Subsystem>) {
    let exports = Exports::new(vec![export("a"), export("b")]);
    let namespaces = [0, 1].map(|at: u32| {
        let volume_state = exports.volume_state(VolumeId(at)).unwrap().clone();
        Namespace::new(
            at + 1,
            VolumeId(at),
            volume_state,
            false,
            VolumeUuid::of_texts(&[&format!("volume {at}")]),
        )
    });
    let states = BTreeMap::from([(1, AnaState::NON_OPTIMIZED), (2, AnaState::INACCESSIBLE)]);
    let groups = vec![AnaGroup { id: 5, namespaces: vec![1], states }];
    let subsystem = Subsystem::new(Nqn::new(NQN).unwrap(), "machine", namespaces.into(), Vec::new());
    let subsystem = Arc::new(subsystem.with_ana(groups, &[1, 2]));
    let ports = [1, 2].map(|id| FabricsPort::new(id, "0.0.0.0:4420".parse().unwrap()));
    let node = NvmeNode::new(vec![subsystem.clone()], ports.into(), "machine");
    ((Arc::new(node), exports), subsystem)
}

/// An I/O queue and its admin queue, both connected through this port.
fn at_port(node: &(Arc<NvmeNode>, Exports), port: u16) -> (FabricsTestHost, FabricsTestHost) {
    let open = |qid, cntlid| {
        let mut host = FabricsTestHost::new(node);
        host.pump.session = queue(node, Pool::new(usize::MAX), host.now).at_port(port);
        let cqe = host.connect(qid, cntlid, 0);
        assert!(cqe.status.is_success());
        (host, cqe.result.get() as u16)
    };
    let (mut admin, cntlid) = open(0, CNTLID_DYNAMIC);
    admin.enable();
    (open(1, cntlid).0, admin)
}

fn log(host: &mut FabricsTestHost, flags: u32) -> Vec<u8> {
    host.run(admin(AdminOpcode::GET_LOG_PAGE, 0, 63 << 16 | flags | 0x0c, 0, 256), &[]).0
}

#[test]
fn each_port_reports_the_state_of_each_group() {
    let (node, _) = asymmetric();
    let (mut io, mut queue) = at_port(&node, 1);
    let (mut cut, mut cut_queue) = at_port(&node, 2);
    let page = queue.run(admin(AdminOpcode::IDENTIFY, 0, 1, 0, 4096), &[]).0;
    let page = IdentifyController::read_from_bytes(&page).unwrap();
    assert!(page.cmic & CMIC_ANA != 0 && page.oaes.get() & AEC_ANA_CHANGE != 0);
    assert_eq!((page.nanagrpid.get(), page.anagrpmax.get(), page.anacap), (2, 6, 0x47));
    let group = |host: &mut FabricsTestHost, nsid| {
        let page = host.run(admin(AdminOpcode::IDENTIFY, nsid, 0, 0, 4096), &[]).0;
        IdentifyNamespace::read_from_bytes(&page).unwrap().anagrpid.get()
    };
    assert_eq!((group(&mut queue, 1), group(&mut queue, 2)), (5, 6));
    for (host, state) in [(&mut queue, 2), (&mut cut_queue, 3)] {
        let page = log(host, 0);
        // Two groups of one namespace each.
        assert_eq!((page[8], page[16], page[20], page[32], page[48]), (2, 5, 1, state, 1));
        assert_eq!((page[52], page[56], page[68], page[84]), (6, 1, 1, 2));
        let page = log(host, 1 << 8);
        assert_eq!((page[16], page[20], page[32], page[48]), (5, 0, state, 6));
    }
    assert!(io.run(nvm(NvmOpcode::READ, 1, 0, 1), &[]).1.status.is_success());
    for sqe in [nvm(NvmOpcode::READ, 1, 0, 1), nvm(NvmOpcode::FLUSH, 1, 0, 1)] {
        let status = cut.run(sqe, &[]).1.status;
        assert_eq!(status.status(), NvmeStatus::ASYMMETRIC_ACCESS_INACCESSIBLE);
        assert!(!status.do_not_retry(), "another path may succeed");
    }
    assert!(cut.run(nvm(NvmOpcode::READ, 2, 0, 1), &[]).1.status.is_success());
    // Namespace-specific features are refused too.
    for opcode in [AdminOpcode::GET_FEATURES, AdminOpcode::SET_FEATURES] {
        for fid in [FeatureId::RESERVATION_NOTIFICATION_MASK, FeatureId::RESERVATION_PERSISTENCE] {
            let sqe = |nsid| admin(opcode, nsid, fid.0.into(), 0, 0);
            let status = cut_queue.run(sqe(1), &[]).1.status;
            assert_eq!(status.status(), NvmeStatus::ASYMMETRIC_ACCESS_INACCESSIBLE);
            assert!(!status.do_not_retry());
            assert!(cut_queue.run(sqe(2), &[]).1.status.is_success());
            assert!(queue.run(sqe(1), &[]).1.status.is_success());
        }
    }
}

#[test]
fn a_change_is_reported_to_the_hosts_of_the_port() {
    let (node, subsystem) = asymmetric();
    let mut hosts = [1, 2].map(|port| at_port(&node, port));
    let mut events = [admin(AdminOpcode::ASYNC_EVENT_REQUEST, 0, 0, 0, 0); 2];
    for ((_, queue), event) in hosts.iter_mut().zip(&mut events) {
        let fid = FeatureId::ASYNCHRONOUS_EVENT_CONFIGURATION.0.into();
        assert!(
            queue.run(admin(AdminOpcode::SET_FEATURES, 0, fid, AEC_ANA_CHANGE, 0), &[]).1.status.is_success()
        );
        queue.send(event, &[]);
    }
    subsystem.set_ana_state(5, 2, AnaState::OPTIMIZED);
    subsystem.set_ana_state(5, 2, AnaState::OPTIMIZED);
    subsystem.set_ana_state(9, 2, AnaState::INACCESSIBLE);
    let [(_, other), (io, queue)] = &mut hosts;
    other.pump.turn();
    queue.pump.turn();
    assert!(other.received().is_empty());
    assert_eq!(queue.end_of(events[1]).1.result.get(), 0x0c_0302);
    let page = log(queue, 0);
    assert_eq!((page[0], page[24], page[32]), (1, 1, 1), "the count and the new state");
    assert!(io.run(nvm(NvmOpcode::READ, 1, 0, 1), &[]).1.status.is_success());
    subsystem.set_ana_state(5, 2, AnaState::CHANGE);
    let status = io.run(nvm(NvmOpcode::READ, 1, 0, 1), &[]).1.status.status();
    assert_eq!(status, NvmeStatus::ASYMMETRIC_ACCESS_TRANSITION);
}

#[test]
fn a_namespace_that_another_process_serves_is_inaccessible_in_a_subsystem_without_ana_too() {
    let process = TestCluster::default().process();
    let export = Export {
        name: "a".into(),
        description: String::new(),
        read_only: false,
        volume: process.volume().clone(),
    };
    let exports = Exports::with_states(vec![(export, process.clone())]);
    let subsystem = Subsystem::new(Nqn::new(NQN).unwrap(), "machine", Vec::new(), Vec::new());
    let subsystem = Arc::new(subsystem.with_ana(Vec::new(), &[1]));
    let uuid = VolumeUuid::of_texts(&["image"]);
    subsystem.attach(Namespace::new(1, VolumeId(0), process, false, uuid), None).unwrap();
    let ports = [FabricsPort::new(1, "0.0.0.0:4420".parse().unwrap())];
    let node = (Arc::new(NvmeNode::new(vec![subsystem], ports.into(), "machine")), exports);
    let status = at_port(&node, 1).0.run(nvm(NvmOpcode::READ, 1, 0, 1), &[]).1.status;
    assert_eq!(status.status(), NvmeStatus::ASYMMETRIC_ACCESS_INACCESSIBLE);
    assert!(!status.do_not_retry(), "another path may succeed");
}

/// A subsystem with this volume as namespace 3.
fn serving_in_turns(process: &Arc<VolumeState>) -> (Arc<NvmeNode>, Exports) {
    let volume = process.volume().clone();
    let export = Export { name: "a".into(), description: String::new(), read_only: false, volume };
    let exports = Exports::with_states(vec![(export, process.clone())]);
    let uuid = VolumeUuid::of_texts(&["image"]);
    let namespace = Namespace::new(3, VolumeId(0), process.clone(), false, uuid);
    let subsystem = Subsystem::new(Nqn::new(NQN).unwrap(), "machine", vec![namespace], Vec::new());
    let subsystem = Arc::new(subsystem.with_ana(Vec::new(), &[1]));
    let ports = [FabricsPort::new(1, "0.0.0.0:4420".parse().unwrap())];
    (Arc::new(NvmeNode::new(vec![subsystem], ports.into(), "machine")), exports)
}

#[test]
fn an_owner_that_is_shut_out_reports_no_reservations_of_before() {
    let cluster = TestCluster::default();
    let process = cluster.process();
    cluster.promote(&process);
    let (mut io, _queue) = at_port(&serving_in_turns(&process), 1);
    let report = Sqe {
        cdw10: 1023.into(),
        cdw11: EDS.into(),
        dptr: SglDescriptor::transport(4096),
        ..nvm(NvmOpcode::RESERVATION_REPORT, 3, 0, 1)
    };
    let (page, cqe) = io.run(report, &[]);
    assert!(cqe.status.is_success() && page.len() == 4096);
    // Whether another process has the volume is not known.
    cluster.fail(true);
    assert_eq!(io.run(report, &[]).1.status.status(), NvmeStatus::INTERNAL_ERROR);
    cluster.fail(false);
    cluster.hang(true);
    let mut waiting = report;
    io.send(&mut waiting, &[]);
    assert!(io.received().is_empty() && process.lose());
    let now = io.pump.session.poll_timeout().unwrap();
    io.pump.session.on_timeout(now).unwrap();
    io.pump.turn();
    let status = io.end_of(waiting).1.status.status();
    assert_eq!(status, NvmeStatus::ASYMMETRIC_ACCESS_INACCESSIBLE);
    // It is a session of before, which must connect again.
    cluster.hang(false);
    cluster.promote(&process);
    assert_eq!(io.run(report, &[]).1.status.status(), NvmeStatus::INTERNAL_PATH_ERROR);
}

#[test]
fn a_namespace_that_another_process_serves_is_inaccessible() {
    let cluster = TestCluster::default();
    let process = cluster.process();
    let (mut io, mut queue) = at_port(&serving_in_turns(&process), 1);
    let page = queue.run(admin(AdminOpcode::IDENTIFY, 0, 1, 0, 4096), &[]).0;
    let page = IdentifyController::read_from_bytes(&page).unwrap();
    assert!(page.cmic & CMIC_ANA != 0 && page.oaes.get() & AEC_ANA_CHANGE != 0);
    assert_eq!((page.nanagrpid.get(), page.anagrpmax.get()), (1024, 1024));
    let page = queue.run(admin(AdminOpcode::IDENTIFY, 3, 0, 0, 4096), &[]).0;
    assert_eq!(IdentifyNamespace::read_from_bytes(&page).unwrap().anagrpid.get(), 3);
    let fid = FeatureId::ASYNCHRONOUS_EVENT_CONFIGURATION.0.into();
    queue.run(admin(AdminOpcode::SET_FEATURES, 0, fid, AEC_ANA_CHANGE, 0), &[]);
    let mut expect = |queue: &mut FabricsTestHost, state: AnaState, count: u8| {
        let page = log(queue, 0);
        assert_eq!((page[8], page[16], page[20], page[32], page[48]), (1, 3, 1, state.0, 3));
        assert_eq!((page[0], page[24]), (count, count), "the changes");
        let status = io.run(nvm(NvmOpcode::READ, 3, 0, 1), &[]).1.status;
        match state {
            AnaState::OPTIMIZED => assert!(status.is_success()),
            _ => assert_eq!(status.status(), NvmeStatus::ASYMMETRIC_ACCESS_INACCESSIBLE),
        }
        assert!(!status.do_not_retry());
    };
    let event = |queue: &mut FabricsTestHost, change: &dyn Fn()| {
        let mut event = admin(AdminOpcode::ASYNC_EVENT_REQUEST, 0, 0, 0, 0);
        queue.send(&mut event, &[]);
        change();
        queue.pump.turn();
        assert_eq!(queue.end_of(event).1.result.get(), 0x0c_0302);
    };
    expect(&mut queue, AnaState::INACCESSIBLE, 1);
    event(&mut queue, &|| cluster.promote(&process));
    expect(&mut queue, AnaState::OPTIMIZED, 2);
    event(&mut queue, &|| assert!(process.lose()));
    expect(&mut queue, AnaState::INACCESSIBLE, 3);
}

#[test]
fn throttled_io_does_not_begin_once_its_path_is_inaccessible() {
    use crate::driver::target::IoSource;
    use crate::volume_state::NotAdmitted;
    use blockmux_volume::IoError;
    let (node, subsystem) = asymmetric();
    let (mut io, _queue) = at_port(&node, 1);
    io.pump.throttles = true;
    io.send(&mut nvm(NvmOpcode::READ, 1, 0, 1), &[]);
    io.send(&mut nvm(NvmOpcode::READ, 1, 0, 1), &[]);
    let mut begin = || {
        let (volume, throttled) = io.pump.waiting.pop_front().unwrap();
        io.pump.session.begin(volume, &throttled, true)
    };
    assert_eq!(begin(), Ok(()));
    subsystem.set_ana_state(5, 1, AnaState::INACCESSIBLE);
    assert_eq!(begin(), Err(NotAdmitted::Denied(IoError::PathLost)));
}
