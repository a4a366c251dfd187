//! Asynchronous events, and aborted commands.

use super::*;
use crate::driver::session::Timed;
use blockmux_volume::{Completion, IoError};
use blockmux_wire::nvme::feature::{AEC_NAMESPACE_ATTRIBUTE, AEC_TEMPERATURE, FeatureId};
use blockmux_wire::nvme::identify::{Cns, IDENTIFY_LEN, IdentifyController};
use blockmux_wire::nvme::log::{RAE, SmartLog};
use std::time::Instant;

fn wants_events(host: &mut FabricsTestHost) {
    let fid = FeatureId::ASYNCHRONOUS_EVENT_CONFIGURATION.0.into();
    let set = admin(AdminOpcode::SET_FEATURES, 0, fid, AEC_NAMESPACE_ATTRIBUTE, 0);
    assert!(host.run(set, &[]).1.status.is_success());
}

/// Critical warnings and composite temperature.
fn smart(host: &mut FabricsTestHost) -> (u8, u16) {
    let log = admin(AdminOpcode::GET_LOG_PAGE, u32::MAX, 127 << 16 | 2, 0, 512);
    let smart = SmartLog::read_from_bytes(&host.run(log, &[]).0).unwrap();
    (smart.critical_warning, smart.composite_temperature.get())
}

#[test]
fn a_temperature_threshold_is_set_and_a_crossed_one_is_reported_until_the_log_is_read() {
    let (mut host, _) = FabricsTestHost::admin(&node());
    let fid = u32::from(FeatureId::TEMPERATURE_THRESHOLD.0);
    let set = |value: u32| admin(AdminOpcode::SET_FEATURES, 0, fid, value, 0);
    let over_and_under = |host: &mut FabricsTestHost, select: u32| {
        [0, 1 << 20].map(|which| {
            let get = admin(AdminOpcode::GET_FEATURES, 0, select << 8 | fid, which, 0);
            host.run(get, &[]).1.result.get()
        })
    };
    let identify = admin(AdminOpcode::IDENTIFY, 0, Cns::CONTROLLER.0.into(), 0, IDENTIFY_LEN as u32);
    let identity = IdentifyController::read_from_bytes(&host.run(identify, &[]).0).unwrap();
    let warning = u64::from(identity.wctemp.get());
    assert!(warning > 300 && identity.cctemp >= identity.wctemp, "the temperature is no warning");
    assert_eq!(over_and_under(&mut host, 0), [warning, 0]);
    let configuration = FeatureId::ASYNCHRONOUS_EVENT_CONFIGURATION.0.into();
    let wants = admin(AdminOpcode::SET_FEATURES, 0, configuration, AEC_TEMPERATURE, 0);
    assert!(host.run(wants, &[]).1.status.is_success());
    let mut event = admin(AdminOpcode::ASYNC_EVENT_REQUEST, 0, 0, 0, 0);
    host.send(&mut event, &[]);
    // As the operator of a disk would set them: nothing is too hot or too cold.
    for value in [343, 1 << 20 | 273] {
        assert!(host.run(set(value), &[]).1.status.is_success());
    }
    assert_eq!(over_and_under(&mut host, 0), [343, 273]);
    assert_eq!((over_and_under(&mut host, 1), smart(&mut host)), ([warning, 0], (0, 300)));
    // All sensors: too hot.
    host.send(&mut set(0xf << 16 | 300), &[]);
    let [set_done, reported] = host.received().try_into().unwrap();
    assert!(set_done.cqe().status.is_success());
    assert_eq!((reported.cqe().cid, reported.cqe().result.get()), (event.cid, 0x02_0101));
    host.send(&mut event, &[]);
    assert!(host.run(set(1 << 20 | 300), &[]).1.status.is_success(), "it is not reported twice");
    assert_eq!(smart(&mut host), (1 << 1, 300));
    for absent in [1 << 16 | 300, 9 << 16 | 300, 2 << 20 | 300] {
        assert_eq!(refusal(&host.run(set(absent), &[]).1), NvmeStatus::INVALID_FIELD_IN_COMMAND);
    }
    let capabilities = admin(AdminOpcode::GET_FEATURES, 0, 3 << 8 | fid, 0, 0);
    assert_eq!(host.run(capabilities, &[]).1.result.get(), 4, "changeable");
}

fn changed(host: &mut FabricsTestHost, flags: u32) -> Vec<u8> {
    let log = admin(AdminOpcode::GET_LOG_PAGE, u32::MAX, 1023 << 16 | flags | 4, 0, 4096);
    host.run(log, &[]).0
}

#[test]
fn a_new_size_is_reported_once_until_the_list_is_read() {
    let node = node();
    let (mut host, _) = FabricsTestHost::admin(&node);
    let (mut deaf, _) = FabricsTestHost::admin_of(&node, 2);
    wants_events(&mut host);
    let mut events = [admin(AdminOpcode::ASYNC_EVENT_REQUEST, 0, 0, 0, 0); 2];
    events.iter_mut().for_each(|event| host.send(event, &[]));
    deaf.send(&mut events[1].clone(), &[]);
    for _ in 0..2 {
        node.1.volume_state(VolumeId(0)).unwrap().on_resize();
    }
    // Without a notifier the queue polls.
    let now = host.pump.session.poll_timeout().unwrap();
    host.pump.session.on_timeout(now).unwrap();
    assert_eq!(host.end_of(events[0]).1.result.get(), 0x04_0002);
    node.1.volume_state(VolumeId(1)).unwrap().on_resize();
    host.pump.turn();
    assert!(host.received().is_empty());
    assert_eq!(changed(&mut host, RAE)[..12], [1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(changed(&mut host, 0)[..5], [1, 0, 0, 0, 2]);
    assert_eq!(changed(&mut host, 0)[..5], [0; 5]);
    node.1.volume_state(VolumeId(1)).unwrap().on_resize();
    host.pump.turn();
    assert_eq!(host.end_of(events[1]).1.result.get(), 0x04_0002);
    deaf.pump.turn();
    assert!(deaf.received().is_empty());
    assert_eq!(changed(&mut deaf, 0)[..5], [1, 0, 0, 0, 2], "the list is maintained without events");
}

/// SPDK's host has four outstanding event requests, and writes CC.SHN with the CID of one of them.
#[test]
fn a_command_may_reuse_the_cid_of_an_event_request_but_not_of_another_command() {
    let node = node();
    let (mut host, _) = FabricsTestHost::admin(&node);
    wants_events(&mut host);
    let mut events = [admin(AdminOpcode::ASYNC_EVENT_REQUEST, 0, 0, 0, 0); 4];
    events.iter_mut().for_each(|event| host.send(event, &[]));
    host.cid = events[3].cid.get() - 1;
    assert_eq!(host.csts(), 1);
    // Three are left, and there is room for one more.
    node.1.volume_state(VolumeId(0)).unwrap().on_resize();
    host.pump.session.on_timeout(host.now).unwrap();
    assert_eq!(host.end_of(events[0]).1.result.get(), 0x04_0002);
    let mut more = [admin(AdminOpcode::ASYNC_EVENT_REQUEST, 0, 0, 0, 0); 2];
    more.iter_mut().for_each(|event| host.send(event, &[]));
    assert!(host.received().is_empty());
    let fifth = host.run(admin(AdminOpcode::ASYNC_EVENT_REQUEST, 0, 0, 0, 0), &[]).1;
    assert_eq!(fifth.status.status(), NvmeStatus::ASYNCHRONOUS_EVENT_REQUEST_LIMIT_EXCEEDED);
    host.cid = more[1].cid.get() - 1;
    assert!(host.set_cc(0x0046_4061).status.is_success());
    assert_eq!(host.csts() & 0b1100, 0b1000, "shutdown is complete");

    let (mut io, _admin) = FabricsTestHost::io(&node);
    io.pump.holds_io = true;
    let mut read = nvm(NvmOpcode::READ, 1, 0, 1);
    io.send(&mut read, &[]);
    io.cid = read.cid.get() - 1;
    assert_eq!(refusal(&io.run(nvm(NvmOpcode::READ, 1, 8, 1), &[]).1), NvmeStatus::COMMAND_ID_CONFLICT);
    io.pump.finish_one();
    assert!(io.end_of(read).1.status.is_success());
}

#[test]
fn an_abort_ends_a_command_of_an_io_queue_as_early_as_its_volume_can() {
    for is_ended_early in [true, false] {
        let (mut io, mut queue) = FabricsTestHost::io(&node());
        io.pump.holds_io = true;
        let mut read = nvm(NvmOpcode::READ, 1, 0, 1);
        io.send(&mut read, &[]);
        let mut abort = admin(AdminOpcode::ABORT, 0, u32::from(read.cid.get()) << 16 | 1, 0, 0);
        queue.send(&mut abort, &[]);
        assert!(queue.received().is_empty(), "the I/O queue has not handled it");
        io.pump.turn();
        assert_eq!(io.pump.cancelled.len(), 1);
        if is_ended_early {
            let (_, cut) = io.pump.submitted.pop_front().unwrap();
            let done = Completion { tag: cut.tag, result: Err(IoError::Aborted) };
            crate::driver::target::IoSource::on_io(&mut io.pump.session, done, Instant::now());
            let cqe = io.received()[0].cqe();
            assert_eq!(cqe.status.status(), NvmeStatus::COMMAND_ABORT_REQUESTED);
            assert!(!cqe.status.do_not_retry());
        } else {
            io.pump.finish_one();
            assert!(io.end_of(read).1.status.is_success());
        }
        let now = queue.pump.session.poll_timeout().unwrap();
        queue.pump.session.on_timeout(now).unwrap();
        assert_eq!(queue.end_of(abort).1.result.get(), u64::from(!is_ended_early));
    }
}

#[test]
fn an_abort_of_either_half_ends_a_fused_operation_that_has_begun() {
    use crate::volume_state::RangeGuard;
    let node = node();
    let volume_state = node.1.volume_state(VolumeId(0)).unwrap();
    for (half, waits_for_lock) in [(0, false), (1, false), (0, true), (1, true)] {
        let (mut io, mut queue) = FabricsTestHost::io(&node);
        io.pump.holds_io = true;
        let guard = waits_for_lock.then(|| RangeGuard::lock(&volume_state, 0, 512).unwrap());
        let mut halves = [(NvmOpcode::COMPARE, 0x41), (NvmOpcode::WRITE, 0x42)].map(|(opcode, flags)| Sqe {
            flags,
            dptr: SglDescriptor::in_capsule(0, 512),
            ..nvm(opcode, 1, 0, 1)
        });
        halves.iter_mut().for_each(|half| io.send(half, &[0; 512]));
        let cid = u32::from(halves[half].cid.get());
        let mut abort = admin(AdminOpcode::ABORT, 0, cid << 16 | 1, 0, 0);
        queue.send(&mut abort, &[]);
        io.pump.turn();
        if !waits_for_lock {
            assert_eq!(io.pump.cancelled.len(), 1);
            let (_, read) = io.pump.submitted.pop_front().unwrap();
            let done = Completion { tag: read.tag, result: Err(IoError::Aborted) };
            crate::driver::target::IoSource::on_io(&mut io.pump.session, done, Instant::now());
        }
        let ends: Vec<_> = io.received().iter().map(|sent| sent.cqe().status.status()).collect();
        assert_eq!(
            ends,
            [NvmeStatus::COMMAND_ABORT_REQUESTED, NvmeStatus::COMMAND_ABORTED_DUE_TO_FAILED_FUSED_COMMAND]
        );
        let now = queue.pump.session.poll_timeout().unwrap();
        queue.pump.session.on_timeout(now).unwrap();
        assert_eq!(queue.end_of(abort).1.result.get(), 0, "it was aborted");
        drop(guard);
    }
}

#[test]
fn a_waiting_command_is_aborted_immediately_or_with_its_data() {
    use crate::volume_state::RangeGuard;
    let node = node();
    let (mut io, mut queue) = FabricsTestHost::io(&node);
    let guard = RangeGuard::lock(&node.1.volume_state(VolumeId(0)).unwrap(), 0, 512).unwrap();
    let mut held = nvm(NvmOpcode::READ, 1, 0, 1);
    io.send(&mut held, &[]);
    let mut write = nvm(NvmOpcode::WRITE, 1, 8, 1);
    io.send(&mut write, &[]);
    let fetch = io.fetch();
    let mut aborts =
        [held, write].map(|sqe| admin(AdminOpcode::ABORT, 0, u32::from(sqe.cid.get()) << 16 | 1, 0, 0));
    aborts.iter_mut().for_each(|abort| queue.send(abort, &[]));
    io.pump.turn();
    assert_eq!(io.end_of(held).1.status.status(), NvmeStatus::COMMAND_ABORT_REQUESTED);
    io.deliver(fetch, 0, &[7; 512]);
    assert_eq!(io.end_of(write).1.status.status(), NvmeStatus::COMMAND_ABORT_REQUESTED);
    queue.pump.session.on_timeout(queue.now).unwrap();
    let answers: Vec<u64> = queue.received().iter().map(|sent| sent.cqe().result.get()).collect();
    assert_eq!(answers, [0, 0]);
    drop(guard);
    assert_eq!(io.run(nvm(NvmOpcode::READ, 1, 8, 1), &[]).0, [0; 512], "it was not written");
}

#[test]
fn an_abort_waits_one_second_for_a_command_without_its_data() {
    let (mut io, mut queue) = FabricsTestHost::io(&node());
    let mut write = nvm(NvmOpcode::WRITE, 1, 8, 1);
    io.send(&mut write, &[]);
    let fetch = io.fetch();
    let mut abort = admin(AdminOpcode::ABORT, 0, u32::from(write.cid.get()) << 16 | 1, 0, 0);
    queue.send(&mut abort, &[]);
    io.pump.turn();
    let begin = queue.now;
    let mut waited = std::time::Duration::ZERO;
    while waited <= std::time::Duration::from_secs(2) && queue.received().is_empty() {
        let now = queue.pump.session.poll_timeout().unwrap();
        queue.pump.session.on_timeout(now).unwrap();
        waited = now - begin;
        if let [answer] = &queue.received()[..] {
            assert_eq!(answer.cqe().result.get(), 1, "not aborted");
            break;
        }
    }
    assert!((1..2).contains(&waited.as_secs()), "{waited:?}");
    io.deliver(fetch, 0, &[7; 512]);
    assert!(io.end_of(write).1.status.is_success(), "the Abort reported that the command continues");
}

#[test]
fn pending_aborts_are_bounded_and_end_with_a_lost_queue() {
    let (mut io, mut queue) = FabricsTestHost::io(&node());
    io.pump.holds_io = true;
    let mut read = nvm(NvmOpcode::READ, 1, 0, 1);
    io.send(&mut read, &[]);
    let abort = admin(AdminOpcode::ABORT, 0, u32::from(read.cid.get()) << 16 | 1, 0, 0);
    let mut aborts = [abort; 4];
    aborts.iter_mut().for_each(|abort| queue.send(abort, &[]));
    let more = queue.run(abort, &[]).1;
    assert_eq!(more.status.status(), NvmeStatus::ABORT_COMMAND_LIMIT_EXCEEDED);
    drop(io);
    queue.pump.session.on_timeout(queue.now).unwrap();
    assert_eq!(queue.received().iter().filter(|sent| sent.cqe().result.get() == 1).count(), 4);
    assert_eq!(queue.run(abort, &[]).1.result.get(), 1, "the queue no longer exists");
}

#[test]
fn the_smart_log_counts_io() {
    let (mut io, mut queue) = FabricsTestHost::io(&node());
    assert!(io.run(nvm(NvmOpcode::WRITE, 1, 0, 1), &[7; 512]).1.status.is_success());
    for _ in 0..2 {
        assert!(io.run(nvm(NvmOpcode::READ, 1, 0, 2048), &[]).1.status.is_success());
    }
    drop(io);
    let log = admin(AdminOpcode::GET_LOG_PAGE, u32::MAX, 127 << 16 | 2, 0, 512);
    let page = SmartLog::read_from_bytes(&queue.run(log, &[]).0).unwrap();
    let counts =
        [page.host_read_commands, page.host_write_commands, page.data_units_read, page.data_units_written];
    assert_eq!(counts.map(|count| count.get()), [2, 1, 5, 1]);
}
