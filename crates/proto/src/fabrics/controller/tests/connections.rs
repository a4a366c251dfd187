//! Connect, the states of a controller, discovery.

use super::*;
use crate::driver::session::{ProtocolError, Timed};
use crate::driver::target::{SessionStage, TargetLifecycle};
use crate::nvme::HangUp;
use blockmux_wire::nvme::identify::{IdentifyController, LPA_EXTENDED, OFCS_DISCONNECT};
use blockmux_wire::nvme::log::LogPage;
use blockmux_wire::nvme::status::ConnectStatus;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

#[test]
fn an_invalid_connect_is_refused_with_its_field() {
    let node = node();
    type Case<'a> = (&'a dyn Fn(&mut Connect, &mut ConnectData), ConnectStatus, u64);
    let cases: [Case<'_>; 9] = [
        (&|command, _| command.recfmt = 1.into(), ConnectStatus::CONNECT_INCOMPATIBLE_FORMAT, 0),
        (&|command, _| command.sqsize = 0.into(), ConnectStatus::CONNECT_INVALID_PARAMETERS, 44),
        (&|command, _| command.sqsize = 1024.into(), ConnectStatus::CONNECT_INVALID_PARAMETERS, 44),
        (&|_, data| data.cntlid = 1.into(), ConnectStatus::CONNECT_INVALID_PARAMETERS, 1 << 16 | 16),
        (&|_, data| data.subnqn = [b'x'; 256], ConnectStatus::CONNECT_INVALID_PARAMETERS, 1 << 16 | 256),
        (&|_, data| data.subnqn[4] = b'x', ConnectStatus::CONNECT_INVALID_PARAMETERS, 1 << 16 | 256),
        (&|_, data| data.hostnqn = [b'x'; 256], ConnectStatus::CONNECT_INVALID_PARAMETERS, 1 << 16 | 512),
        (&|_, data| data.hostid = [0; 16], ConnectStatus::CONNECT_INVALID_PARAMETERS, 1 << 16),
        (
            &|_, data| data.subnqn = Nqn::new(PRIVATE).unwrap().to_field(),
            ConnectStatus::CONNECT_INVALID_HOST,
            0,
        ),
    ];
    let mut host = FabricsTestHost::new(&node);
    for (change, status, result) in cases {
        let (command, mut data) = connect(NQN, 0, CNTLID_DYNAMIC, 0);
        let mut command = Connect::read_from_bytes(command.as_bytes()).unwrap();
        change(&mut command, &mut data);
        let (_, cqe) = host.run(Sqe::read_from_bytes(command.as_bytes()).unwrap(), data.as_bytes());
        assert_eq!((refusal(&cqe), cqe.result.get()), (status.into(), result));
    }
    // The connection still works after that.
    assert!(host.connect(0, CNTLID_DYNAMIC, 0).status.is_success());
    let again = host.connect(0, CNTLID_DYNAMIC, 0);
    assert_eq!(refusal(&again), NvmeStatus::COMMAND_SEQUENCE_ERROR);
}

#[test]
fn a_host_may_have_any_name_where_every_host_may_connect() {
    for name in ["blktests host/1", "NQN.2026-11.test:h", "iqn.2026-11.test:h"] {
        let mut host = FabricsTestHost::new(&node());
        let (command, data) = connect(NQN, 0, CNTLID_DYNAMIC, 0);
        let data = ConnectData { hostnqn: Nqn::new(name).unwrap().to_field(), ..data };
        assert!(host.run(command, data.as_bytes()).1.status.is_success(), "{name}");
    }
}

/// `spdk_nvme_perf -r 'trtype:TCP ... subnqn:...'` sends no HOSTNQN.
#[test]
fn a_host_without_an_nqn_may_use_an_open_subsystem_and_is_known_by_its_identifier() {
    let node = node();
    let unnamed = |subnqn, qid, cntlid, id| {
        let mut host = FabricsTestHost::new(&node);
        let (command, data) = connect(subnqn, qid, cntlid, 0);
        let data = ConnectData { hostnqn: [0; 256], hostid: [id; 16], ..data };
        let cqe = host.run(command, data.as_bytes()).1;
        (host, cqe)
    };
    let (_, cqe) = unnamed(PRIVATE, 0, CNTLID_DYNAMIC, 1);
    assert_eq!(refusal(&cqe), ConnectStatus::CONNECT_INVALID_HOST.into());
    assert!(unnamed(DISCOVERY_NQN, 0, CNTLID_DYNAMIC, 1).1.status.is_success());
    let (mut admin, cqe) = unnamed(NQN, 0, CNTLID_DYNAMIC, 1);
    assert!(cqe.status.is_success());
    admin.enable();
    let cntlid = cqe.result.get() as u16;
    let (_, other) = unnamed(NQN, 1, cntlid, 2);
    assert_eq!(other.status.status(), ConnectStatus::CONNECT_INVALID_PARAMETERS.into());
    let (mut io, cqe) = unnamed(NQN, 1, cntlid, 1);
    assert!(cqe.status.is_success());
    assert_eq!(io.run(nvm(NvmOpcode::READ, 1, 0, 1), &[]).0, [0; 512]);
}

#[test]
fn before_connect_and_enable_only_fabrics_commands_are_executed() {
    let node = node();
    let mut host = FabricsTestHost::new(&node);
    let identify = admin(AdminOpcode::IDENTIFY, 0, 1, 0, 4096);
    assert_eq!(refusal(&host.run(identify, &[]).1), NvmeStatus::COMMAND_SEQUENCE_ERROR);
    assert!(host.connect(0, CNTLID_DYNAMIC, 0).status.is_success());
    assert_eq!(refusal(&host.run(identify, &[]).1), NvmeStatus::COMMAND_SEQUENCE_ERROR);
    assert_eq!(host.csts(), 0);
    host.enable();
    assert_eq!(host.csts(), 1);
    assert_eq!(host.run(identify, &[]).0.len(), 4096);
}

#[test]
fn an_io_queue_belongs_to_a_controller_that_its_host_has_enabled() {
    let node = node();
    let (mut admin, cntlid) = FabricsTestHost::admin(&node);
    let mut io = FabricsTestHost::new(&node);
    // DNR is set only for permanent failures: a new association may succeed.
    let passing = |cqe: &Cqe| {
        assert!(!cqe.status.do_not_retry(), "{cqe:?}");
        cqe.status.status()
    };
    let wrong = io.connect(1, cntlid + 1, 0);
    assert_eq!((passing(&wrong).0, wrong.result.get()), (0x182, 1 << 16 | 16));
    let wrong = io.connect(999, cntlid, 0);
    assert_eq!((refusal(&wrong).0, wrong.result.get()), (0x182, 42));
    assert!(io.connect(1, cntlid, 0).status.is_success());
    let mut again = FabricsTestHost::new(&node);
    assert_eq!(passing(&again.connect(1, cntlid, 0)), NvmeStatus::COMMAND_SEQUENCE_ERROR);
    // While the controller is disabled, no queue can be connected; the reset completes once its
    // queues have ended.
    assert!(admin.set_cc(0x0046_0060).status.is_success());
    assert_eq!(passing(&again.connect(2, cntlid, 0)), NvmeStatus::COMMAND_SEQUENCE_ERROR);
    assert_eq!(admin.csts(), 1);
    drop(io);
    assert_eq!(admin.csts(), 0);
}

#[test]
fn the_io_queues_end_with_the_admin_queue_and_the_host_waits_for_them() {
    let node = node();
    let (admin, cntlid) = FabricsTestHost::admin(&node);
    let cuts = Arc::new(AtomicUsize::new(0));
    let hang_up: HangUp = {
        let cuts = cuts.clone();
        Arc::new(move || {
            cuts.fetch_add(1, Ordering::Relaxed);
        })
    };
    let mut io = FabricsTestHost::with_hang_up(&node, hang_up, None);
    assert!(io.connect(1, cntlid, 0).status.is_success());
    io.pump.holds_io = true;
    io.send(&mut nvm(NvmOpcode::WRITE, 1, 0, 1), &[]);
    drop(admin);
    assert_eq!(cuts.load(Ordering::Relaxed), 1);
    // The host reconnects and gets a controller once nothing of the old one is left.
    let mut next = FabricsTestHost::new(&node);
    let (mut command, data) = connect(NQN, 0, CNTLID_DYNAMIC, 0);
    next.send(&mut command, data.as_bytes());
    let soon = next.now + Duration::from_millis(5);
    next.pump.session.on_timeout(soon).unwrap();
    assert!(next.received().is_empty());
    drop(io);
    assert!(next.pump.session.poll_timeout().unwrap() <= soon + Duration::from_millis(1));
    next.pump.session.on_timeout(soon + Duration::from_millis(1)).unwrap();
    assert!(next.end_of(command).1.status.is_success());
}

#[test]
fn a_host_that_is_silent_for_longer_than_its_keep_alive_timeout_loses_its_controller() {
    let node = node();
    let (mut admin, _) = FabricsTestHost::admin(&node);
    let mut time = admin.now;
    let mut pass = |admin: &mut FabricsTestHost, seconds: u32| -> Result<(), ProtocolError> {
        let until = time + Duration::from_secs(seconds.into());
        while let Some(next) = admin.pump.session.poll_timeout().filter(|&next| next <= until) {
            time = time.max(next);
            admin.pump.session.on_timeout(time)?;
        }
        time = until;
        Ok(())
    };
    for _ in 0..20 {
        pass(&mut admin, 3).unwrap();
        let keep_alive = super::admin(AdminOpcode::KEEP_ALIVE, 0, 0, 0, 0);
        assert!(admin.run(keep_alive, &[]).1.status.is_success());
    }
    let error = pass(&mut admin, 9).unwrap_err();
    assert_eq!(error.what, "did not keep its controller alive within its Keep Alive Timeout");
    assert!(admin.is_closed());
}

#[test]
fn a_connection_without_a_queue_times_out() {
    let mut host = FabricsTestHost::new(&node());
    let deadline = host.pump.session.poll_timeout().unwrap();
    assert_eq!(deadline, host.now + crate::fabrics::controller::queue::CONNECT_TIME);
    assert!(host.pump.session.on_timeout(deadline).is_err());
    assert!(host.is_closed());
}

#[test]
fn open_discovery_takes_nothing_that_other_hosts_need() {
    let node = node();
    let discover = || {
        let mut host = FabricsTestHost::new(&node);
        let (command, data) = connect(DISCOVERY_NQN, 0, CNTLID_DYNAMIC, 0);
        assert!(host.run(command, data.as_bytes()).1.status.is_success());
        assert_eq!(host.pump.session.stage(), SessionStage::Discovery);
        host
    };
    // All of them claim to be the same host, which has 512 controllers of a subsystem at most.
    let mut all: Vec<_> = (0..1100).map(|_| discover()).collect();
    all.last_mut().unwrap().enable();
}

#[test]
fn discovery_lists_the_subsystems_of_the_host() {
    let node = node();
    let mut host =
        FabricsTestHost::with_hang_up(&node, Arc::new(|| {}), Some("192.0.2.7:8009".parse().unwrap()));
    let (command, data) = connect(DISCOVERY_NQN, 0, CNTLID_DYNAMIC, 0);
    assert!(host.run(command, data.as_bytes()).1.status.is_success());
    host.enable();
    let (id, _) = host.run(admin(AdminOpcode::IDENTIFY, 0, 1, 0, 4096), &[]);
    assert_eq!(id[111], 2);
    // 4 KiB, which is longer than the page.
    let log = admin(AdminOpcode::GET_LOG_PAGE, 0, 1023 << 16 | u32::from(LogPage::DISCOVERY.0), 0, 4096);
    let (page, _) = host.run(log, &[]);
    let header = DiscoveryHeader::read_from_bytes(&page[..1024]).unwrap();
    assert_eq!(header.numrec.get(), 2);
    let entry = |n: usize| DiscoveryEntry::read_from_bytes(&page[n * 1024..][..1024]).unwrap();
    assert_eq!(SubsystemType(entry(1).subtype), SubsystemType::CURRENT_DISCOVERY);
    assert_eq!(entry(1).eflags.get(), EFLAGS_DUPRETINFO | EFLAGS_EPCSD, "hosts may stay");
    assert_eq!(entry(2).eflags.get(), 0);
    let disk = entry(2);
    assert_eq!(
        (SubsystemType(disk.subtype), Nqn::of_field(&disk.subnqn)),
        (SubsystemType::NVM, Nqn::new(NQN))
    );
    assert!(disk.traddr.starts_with(b"192.0.2.7 ") && disk.trsvcid.starts_with(b"4420 "));
    assert_eq!((disk.trtype, disk.adrfam, disk.portid.get()), (3, 1, 1));
    assert_eq!(page[3072..], [0; 1024]);
    // No I/O, and no other page except the list of supported pages.
    let supported = admin(AdminOpcode::GET_LOG_PAGE, 0, 255 << 16, 0, 1024);
    let page = host.run(supported, &[]).0;
    let lids: Vec<usize> = (0..256).filter(|lid| page[lid * 4] == 1).collect();
    assert_eq!(lids, [0, 0x70]);
    assert_eq!(id[261], LPA_EXTENDED);
    let smart = admin(AdminOpcode::GET_LOG_PAGE, 0, 127 << 16 | 2, 0, 512);
    assert_eq!(refusal(&host.run(smart, &[]).1), NvmeStatus::INVALID_LOG_PAGE);
}

#[test]
fn a_subsystem_is_available_and_discovered_only_on_its_ports() {
    let exports = Exports::new(vec![export("a")]);
    let (all, some) = ("nqn.2026-11.com.example:all", "nqn.2026-11.com.example:some");
    let subsystem = |name: &str| Subsystem::new(Nqn::new(name).unwrap(), "machine", Vec::new(), Vec::new());
    let subsystems = vec![
        Arc::new(subsystem(all)),
        Arc::new(subsystem(some).with_ports([2, 3].into())),
        Arc::new(subsystem(NQN).with_ports([].into())),
    ];
    let address = |port: u16| format!("192.0.2.1:{port}").parse().unwrap();
    let ports = [4420, 4421, 8009].into_iter().zip(1..).map(|(port, id)| FabricsPort::new(id, address(port)));
    let node = (Arc::new(NvmeNode::new(subsystems, ports.collect(), "machine")), exports);
    let host_at = |port| {
        let mut host = FabricsTestHost::new(&node);
        let session = queue(&node, Pool::new(usize::MAX), host.now);
        host.pump.session = session.at_port(port);
        host
    };
    for (name, reached) in [(all, [true, true, true]), (some, [false, true, true]), (NQN, [false; 3])] {
        for (port, reached) in (1..).zip(reached) {
            let (command, data) = connect(name, 0, CNTLID_DYNAMIC, 0);
            let (_, cqe) = host_at(port).run(command, data.as_bytes());
            assert_eq!(cqe.status.is_success(), reached, "{name} by port {port}");
            if !reached {
                assert_eq!(refusal(&cqe), ConnectStatus::CONNECT_INVALID_PARAMETERS.into());
                // The offset of SUBNQN in the data.
                assert_eq!(cqe.result.get(), 1 << 16 | 256);
            }
        }
    }
    let mut discovery = host_at(1);
    let (command, data) = connect(DISCOVERY_NQN, 0, CNTLID_DYNAMIC, 0);
    assert!(discovery.run(command, data.as_bytes()).1.status.is_success());
    discovery.enable();
    let len = 1024 * 16;
    let log = discovery.run(admin(AdminOpcode::GET_LOG_PAGE, 0, (len / 4 - 1) << 16 | 0x70, 0, len), &[]).0;
    let (header, rest) = DiscoveryHeader::read_from_prefix(&log).unwrap();
    let entries = rest.chunks(1024).take(header.numrec.get() as usize);
    let entries = entries.map(|entry| DiscoveryEntry::read_from_bytes(entry).unwrap());
    let listed: Vec<_> = entries
        .filter(|entry| entry.subtype == SubsystemType::NVM.0)
        .map(|entry| (Nqn::of_field(&entry.subnqn).unwrap().to_string(), entry.portid.get()))
        .collect();
    let expected = [(all, 1), (all, 2), (some, 2), (some, 3)].map(|(name, port)| (name.to_owned(), port));
    assert_eq!(listed, expected);
}

#[test]
fn disconnect_ends_an_io_queue_and_no_admin_queue() {
    let (mut io, mut admin) = FabricsTestHost::io(&node());
    let page = admin.run(super::admin(AdminOpcode::IDENTIFY, 0, 1, 0, 4096), &[]).0;
    assert_eq!(IdentifyController::read_from_bytes(&page).unwrap().ofcs.get(), OFCS_DISCONNECT);
    let disconnect = Sqe {
        opcode: AdminOpcode::FABRICS.0,
        flags: 0x40,
        nsid: u32::from(FabricsType::DISCONNECT.0).into(),
        ..Sqe::new_zeroed()
    };
    assert_eq!(refusal(&admin.run(disconnect, &[]).1), NvmeStatus::DISCONNECT_INVALID_QUEUE_TYPE);
    assert!(!admin.is_closed());
    // Its completion is the last of the queue.
    io.pump.holds_io = true;
    let (mut read, mut last) = (nvm(NvmOpcode::READ, 1, 0, 1), disconnect);
    io.send(&mut read, &[]);
    io.send(&mut last, &[]);
    assert!(io.received().is_empty() && !io.is_closed());
    io.pump.finish_one();
    let answers: Vec<TransportCall> = io.received();
    let cids: Vec<_> = answers.iter().map(|sent| sent.cqe().cid).collect();
    assert_eq!(cids, [read.cid, last.cid]);
    assert!(answers.iter().all(|sent| sent.cqe().status.is_success()) && io.is_closed());
    let (mut idle, _admin) = FabricsTestHost::io(&node());
    assert!(idle.run(disconnect, &[]).1.status.is_success());
    assert!(idle.is_closed());
}
