//! Initialization of a controller, Keep Alive, and shutdown.

use super::*;
use crate::driver::session::{Control, Initiator, Timed};
use crate::nvme::nqn::Nqn;
use blockmux_wire::nvme::status::{ConnectStatus, NvmeStatus};
use blockmux_wire::nvmeof::fabrics::{DiscoveryEntry, DiscoveryHeader};
use std::time::Duration;
use zerocopy::IntoBytes;

fn admin(query: ControllerQuery, now: Instant) -> Driver<AdminSession> {
    let config = AdminConfig {
        names: names(),
        credentials: None,
        queues: 1,
        query,
        keep_alive: Duration::from_secs(5),
    };
    Driver::of(AdminSession::new(config, (), Pool::new(1 << 20), now), usize::MAX)
}

#[test]
fn acre_is_set_on_a_controller_with_retry_delays() {
    let mut now = Instant::now();
    for fails in [
        None,
        Some((AdminOpcode::SET_FEATURES.0, StatusField::final_one(NvmeStatus::INVALID_FIELD_IN_COMMAND))),
    ] {
        let mut subsystem = ScriptedSubsystem { crdt: [5, 0, 100], ..ScriptedSubsystem::default() };
        let mut driver = admin(ControllerQuery::Use(1), now);
        subsystem.fails = fails;
        bring_up(&mut driver, &mut subsystem);
        let behavior = subsystem.behavior.unwrap();
        assert_eq!((behavior.len(), behavior[0]), (512, 1), "ACRE");
        assert!(behavior[1..].iter().all(|byte| *byte == 0));
        if fails.is_none() {
            let delays = driver.session.controller().unwrap().retry_delays;
            assert_eq!(delays.map(|delay| delay.as_millis()), [500, 0, 10_000]);
        }
        now += Duration::from_secs(1);
    }
    let mut subsystem = ScriptedSubsystem::default();
    bring_up(&mut admin(ControllerQuery::Use(1), now), &mut subsystem);
    assert_eq!(subsystem.behavior, None, "no retry delays");
}

#[test]
fn a_session_that_only_queries_shuts_the_controller_down() {
    let mut driver = admin(ControllerQuery::Namespace(1), Instant::now());
    let mut subsystem = ScriptedSubsystem::default();
    let opcodes = bring_up(&mut driver, &mut subsystem);
    assert_eq!(opcodes.last(), Some(&0x7f), "Property Set of CC.SHN");
    assert!(driver.is_closing() && driver.session.is_over());
}

#[test]
fn all_namespaces_are_learned_except_unusable_ones() {
    let mut driver = admin(ControllerQuery::Namespaces, Instant::now());
    bring_up(&mut driver, &mut ScriptedSubsystem::default());
    let found: Vec<u32> = driver.session.namespaces().iter().map(|namespace| namespace.nsid).collect();
    assert_eq!(found, [1, 9], "namespace 3 is listed but inactive");
}

#[test]
fn a_discovery_log_is_read() {
    let header = DiscoveryHeader { genctr: 3.into(), numrec: 2.into(), ..DiscoveryHeader::new_zeroed() };
    let mut entry = DiscoveryEntry { trtype: 3, subtype: 2, ..DiscoveryEntry::new_zeroed() };
    entry.subnqn[..5].copy_from_slice(b"nqn.a");
    let log = [header.as_bytes(), entry.as_bytes(), entry.as_bytes()].concat();
    let mut driver = admin(ControllerQuery::Discovery, Instant::now());
    bring_up(&mut driver, &mut ScriptedSubsystem { log, ..ScriptedSubsystem::default() });
    let (found, left_out) = driver.session.found();
    assert_eq!((found.len(), left_out, found[1].nqn.clone()), (2, 0, Nqn::new("nqn.a")));
    assert!(driver.session.controller().is_some());
}

#[test]
fn the_refusal_of_a_controller_is_reported() {
    let refused = |subsystem: ScriptedSubsystem, nsid| {
        let mut driver = admin(ControllerQuery::Use(nsid), Instant::now());
        let mut subsystem = subsystem;
        bring_up(&mut driver, &mut subsystem);
        assert!(driver.is_closing() && driver.session.controller().is_none());
        driver.session.refused().unwrap().clone()
    };
    let fails = |opcode: AdminOpcode, status| {
        refused(ScriptedSubsystem { fails: Some((opcode.0, status)), ..ScriptedSubsystem::default() }, 1)
    };
    let host = StatusField::final_one(ConnectStatus::CONNECT_INVALID_HOST.into());
    assert_eq!(fails(AdminOpcode::FABRICS, host), NvmeRefused::Connect(host));
    let broken = StatusField::new(NvmeStatus::INTERNAL_ERROR);
    let identify = NvmeRefused::Command { what: "Identify Controller", status: broken };
    assert_eq!(fails(AdminOpcode::IDENTIFY, broken), identify);
    assert_eq!(fails(AdminOpcode::SET_FEATURES, broken), NvmeRefused::NoQueues);
    let with = |subsystem| refused(subsystem, 1);
    assert_eq!(
        with(ScriptedSubsystem { connect_result: 1 << 17 | 5, ..ScriptedSubsystem::default() }),
        NvmeRefused::Authentication
    );
    // ASCR: authentication, followed by a secure channel.
    assert_eq!(
        with(ScriptedSubsystem { connect_result: 1 << 18 | 5, ..ScriptedSubsystem::default() }),
        NvmeRefused::Authentication
    );
    assert_eq!(with(ScriptedSubsystem { csts: 2, ..ScriptedSubsystem::default() }), NvmeRefused::Fatal);
    assert_eq!(
        with(ScriptedSubsystem { blocks: 0, ..ScriptedSubsystem::default() }),
        NvmeRefused::NoNamespace(1)
    );
    let format = NvmeRefused::Format { nsid: 1, lbads: 12, metadata: 8 };
    assert_eq!(with(ScriptedSubsystem { metadata: 8, ..ScriptedSubsystem::default() }), format);
    assert_eq!(refused(ScriptedSubsystem::default(), 3), NvmeRefused::NoNamespace(3));
}

#[test]
fn a_controller_may_take_cap_to_to_become_ready() {
    let start = Instant::now();
    for (unready, becomes_ready) in [(50, true), (1000, false)] {
        let mut driver = admin(ControllerQuery::Use(1), start);
        let mut subsystem = ScriptedSubsystem { unready, ..ScriptedSubsystem::default() };
        bring_up(&mut driver, &mut subsystem);
        let mut now = start;
        while !driver.session.is_ready() && driver.session.refused().is_none() {
            now = now.max(driver.session.poll_timeout().unwrap());
            driver.session.on_timeout(now).unwrap();
            bring_up(&mut driver, &mut subsystem);
            assert!(now - start < Duration::from_secs(3));
        }
        assert_eq!(driver.session.is_ready(), becomes_ready);
        if !becomes_ready {
            assert_eq!(driver.session.refused(), Some(&NvmeRefused::NotReady(2)));
        }
    }
}

#[test]
fn a_controller_that_does_not_respond_is_abandoned() {
    let start = Instant::now();
    let mut driver = admin(ControllerQuery::Use(1), start);
    assert!(driver.session.on_timeout(start + Duration::from_secs(29)).is_ok());
    let error = driver.session.on_timeout(start + Duration::from_secs(30)).unwrap_err();
    assert_eq!(error.what, "did not complete its initialization within 30 seconds");
}

#[test]
fn the_association_is_kept_alive_and_its_loss_is_noticed() {
    let start = Instant::now();
    let mut driver = admin(ControllerQuery::Use(1), start);
    bring_up(&mut driver, &mut ScriptedSubsystem::default());
    let mut now = start;
    for _ in 0..3 {
        now = driver.session.poll_timeout().unwrap();
        driver.session.on_timeout(now).unwrap();
        let [keep_alive] = driver.session.sent().try_into().unwrap();
        assert_eq!(keep_alive.sqe.opcode, AdminOpcode::KEEP_ALIVE.0);
        driver.session.answer(keep_alive.cid(), &[], Some((StatusField::default(), 0)));
    }
    assert_eq!(now - start, Duration::from_millis(7500));
    let next = driver.session.poll_timeout().unwrap();
    driver.session.on_timeout(next).unwrap();
    let end = driver.session.poll_timeout().unwrap();
    let error = driver.session.on_timeout(end).unwrap_err();
    assert_eq!(error.what, "did not answer a Keep Alive in time");
}

#[test]
fn every_change_of_size_is_reported() {
    let mut driver = admin(ControllerQuery::Use(1), Instant::now());
    let mut subsystem =
        ScriptedSubsystem { oaes: 1 << 8, log: vec![0; 4096], ..ScriptedSubsystem::default() };
    let opcodes = bring_up(&mut driver, &mut subsystem);
    assert_eq!(opcodes[9..], [9, 9, 12], "Number of Queues, event configuration, the event request");
    assert_eq!((driver.session.poll_size(), driver.session.poll_size()), (Some(4_096_000), None));
    for blocks in [2000, 500] {
        subsystem.blocks = blocks;
        let cid = subsystem.listening.take().unwrap();
        driver.session.answer(cid, &[], Some((StatusField::default(), 0x04_0002)));
        let opcodes = bring_up(&mut driver, &mut subsystem);
        assert_eq!(opcodes, [2, 6, 6, 12], "the log page, the namespace and its descriptors");
        assert_eq!(driver.session.poll_size(), Some(blocks * 4096));
    }
    // A namespace that no longer exists has no new size, and an event request that failed is not
    // repeated.
    subsystem.blocks = 0;
    let cid = subsystem.listening.take().unwrap();
    driver.session.answer(cid, &[], Some((StatusField::default(), 0x04_0002)));
    assert_eq!(bring_up(&mut driver, &mut subsystem), [2, 6, 12]);
    assert_eq!(driver.session.poll_size(), None);
    let cid = subsystem.listening.take().unwrap();
    let limit = StatusField::final_one(NvmeStatus::ASYNCHRONOUS_EVENT_REQUEST_LIMIT_EXCEEDED);
    driver.session.answer(cid, &[], Some((limit, 0)));
    assert_eq!(bring_up(&mut driver, &mut subsystem), []);
    assert!(driver.session.is_ready());
}

#[test]
fn a_replaced_namespace_is_not_used_any_more() {
    type Change = fn(&mut ScriptedSubsystem);
    let changes: [(Change, bool); 3] = [
        (|subsystem| subsystem.uuid = 0x5b, true),
        (|subsystem| (subsystem.lbads, subsystem.blocks) = (9, 8000), true),
        (|subsystem| subsystem.blocks = 8000, false),
    ];
    for (change, is_another) in changes {
        let mut driver = admin(ControllerQuery::Use(1), Instant::now());
        let mut subsystem =
            ScriptedSubsystem { oaes: 1 << 8, log: vec![0; 4096], ..ScriptedSubsystem::default() };
        bring_up(&mut driver, &mut subsystem);
        assert!(driver.session.poll_size().is_some());
        change(&mut subsystem);
        let cid = subsystem.listening.take().unwrap();
        driver.session.answer(cid, &[], Some((StatusField::default(), 0x04_0002)));
        bring_up(&mut driver, &mut subsystem);
        let refused = is_another.then_some(&NvmeRefused::Replaced(1));
        assert_eq!((driver.is_closing(), driver.session.refused()), (is_another, refused));
        assert_eq!(
            driver.session.poll_size().is_none(),
            is_another,
            "the size of a replaced namespace is not reported"
        );
    }
}

#[test]
fn no_events_are_requested_from_a_controller_without_them() {
    let mut driver = admin(ControllerQuery::Use(1), Instant::now());
    let mut subsystem = ScriptedSubsystem::default();
    bring_up(&mut driver, &mut subsystem);
    assert_eq!((subsystem.listening, driver.session.poll_size()), (None, Some(4_096_000)));
}

#[test]
fn a_stop_shuts_the_controller_down_once() {
    let mut driver = admin(ControllerQuery::Use(1), Instant::now());
    bring_up(&mut driver, &mut ScriptedSubsystem::default());
    driver.session.on_stop();
    driver.session.on_stop();
    let [shutdown] = driver.session.sent().try_into().unwrap();
    assert_eq!((shutdown.sqe.opcode, shutdown.sqe.cdw12.get() >> 14 & 3), (0x7f, 1));
    assert!(driver.is_closing());
}

#[test]
fn an_io_queue_connects_to_the_controller_of_the_admin_queue() {
    let mut client = TestQueues::fresh(namespace(), 2000);
    let connect = client.command();
    let connect_sqe = connect.sqe;
    // QID and SQSIZE.
    assert_eq!(connect_sqe.cdw10.get() >> 16, 1);
    assert_eq!(connect_sqe.cdw11.get() & 0xffff, 1023);
    assert_eq!((connect.data[..16].to_vec(), &connect.data[16..18]), (vec![7; 16], &[5, 0][..]));
    assert!(!client.driver.session.is_ready());
    let busy = StatusField::new(ConnectStatus::CONNECT_CONTROLLER_BUSY.into());
    client.complete(connect.cid(), busy, 0);
    assert_eq!(client.driver.session.refused(), Some(&NvmeRefused::Connect(busy)));
    assert!(client.driver.is_closing());
}
