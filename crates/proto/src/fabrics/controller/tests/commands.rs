//! Commands, features and log pages.

use super::*;
use crate::driver::session::Timed;
use crate::exports::Export;
use crate::names::volume_uuid::VolumeUuid;
use crate::nvme::identity::GivenIdentity;
use crate::volume_state::{Epoch, VolumeState};
use blockmux_volume::{Fault, FaultVolume, MemVolume, Op, OpKind, OpSet};
use blockmux_wire::nvme::feature::{EXHID, FeatureId, Select};
use blockmux_wire::nvme::identify::{
    IdentifyController, IdentifyNamespace, NSATTR_WRITE_PROTECTED, ONCS_COMPARE,
};
use blockmux_wire::nvme::log::{ErrorEntry, SmartLog};
use blockmux_wire::nvme::nvm::{CopySource, DSM_DEALLOCATE, FUA};
use std::time::{Duration, Instant};

#[test]
fn sqhd_counts_completions_round_the_queue() {
    let (mut io, _admin) = FabricsTestHost::io(&node());
    let flush = nvm(NvmOpcode::FLUSH, 1, 0, 1);
    let heads: Vec<u16> = (0..40).map(|_| io.run(flush, &[]).1.sqhd.get()).collect();
    // Connect was the first command, and the queue has 32 entries.
    assert_eq!((heads[0], heads[30], heads[31]), (2, 0, 1));
}

#[test]
fn compare_verify_write_zeroes_copy_and_deallocate_work() {
    let (mut io, _admin) = FabricsTestHost::io(&node());
    let data = pattern(4096);
    assert!(io.run(nvm(NvmOpcode::WRITE, 1, 8, 8), &data).1.status.is_success());
    let compare = nvm(NvmOpcode::COMPARE, 1, 8, 8);
    assert!(io.run(compare, &data).1.status.is_success());
    let mut other = data.clone();
    other[4095] ^= 1;
    assert_eq!(refusal(&io.run(compare, &other).1), NvmeStatus::COMPARE_FAILURE);
    assert!(io.run(nvm(NvmOpcode::VERIFY, 1, 0, 64), &[]).1.status.is_success());
    // Two ranges, contiguous at the destination, to block 100.
    let ranges = copy_sources(&[(12, 3), (8, 3)]);
    let copy = Sqe { cdw12: 1.into(), ..nvm(NvmOpcode::COPY, 1, 100, 1) };
    assert!(io.run(copy, &ranges).1.status.is_success());
    let (copied, _) = io.run(nvm(NvmOpcode::READ, 1, 100, 8), &[]);
    assert!(copied == [&data[2048..], &data[..2048]].concat());
    assert!(io.run(nvm(NvmOpcode::WRITE_ZEROES, 1, 9, 2), &[]).1.status.is_success());
    let (read, _) = io.run(nvm(NvmOpcode::READ, 1, 8, 4), &[]);
    assert!(read == [&data[..512], &[0; 1024], &data[1536..2048]].concat());
    let mut dsm = Vec::new();
    for slba in [8_u64, 11] {
        dsm.extend([0; 4]);
        dsm.extend(1_u32.to_le_bytes());
        dsm.extend(slba.to_le_bytes());
    }
    let deallocate =
        Sqe { cdw10: 1.into(), cdw11: DSM_DEALLOCATE.into(), ..nvm(NvmOpcode::DATASET_MANAGEMENT, 1, 0, 1) };
    assert!(io.run(deallocate, &dsm).1.status.is_success());
    assert!(io.run(nvm(NvmOpcode::READ, 1, 8, 4), &[]).0 == [0; 2048]);
    // Linux sends a whole page for one range.
    dsm.resize(4096, 0);
    let deallocate = Sqe { cdw10: 0.into(), ..deallocate };
    assert!(io.run(deallocate, &dsm).1.status.is_success());
}

/// Source ranges of Copy: the first block, and the number of blocks, 0's based.
fn copy_sources(ranges: &[(u64, u16)]) -> Vec<u8> {
    let source = |&(slba, nlb): &(u64, u16)| {
        let source = CopySource { slba: slba.into(), nlb: nlb.into(), ..CopySource::new_zeroed() };
        source.as_bytes().to_vec()
    };
    ranges.iter().flat_map(source).collect()
}

#[test]
fn a_failed_copy_reports_the_first_range_that_was_not_copied() {
    let (mut io, mut queue) = FabricsTestHost::io(&bad_block(40));
    assert!(io.run(nvm(NvmOpcode::WRITE, 1, 8, 8), &pattern(4096)).1.status.is_success());
    let mut copy = Sqe { cdw12: 2.into(), ..nvm(NvmOpcode::COPY, 1, 100, 1) };
    let (_, cqe) = io.run(copy, &copy_sources(&[(8, 3), (12, 3), (40, 0)]));
    assert_eq!((refusal(&cqe), cqe.result.get()), (NvmeStatus::UNRECOVERED_READ_ERROR, 2));
    assert!(io.run(nvm(NvmOpcode::READ, 1, 100, 8), &[]).0 == pattern(4096), "two were copied");
    // A range beyond the end is refused before anything is copied.
    let (_, cqe) = io.run(copy, &copy_sources(&[(8, 3), (12, 3), (SIZE / 512, 0)]));
    assert_eq!((refusal(&cqe), cqe.result.get()), (NvmeStatus::LBA_OUT_OF_RANGE, 0));
    // The host aborts the command after one range, while the next is being read.
    io.pump.holds_io = true;
    let ranges = copy_sources(&[(8, 3), (12, 3), (16, 3)]);
    copy.dptr = SglDescriptor::in_capsule(0, ranges.len() as u32);
    io.send(&mut copy, &ranges);
    for _ in 0..2 {
        io.pump.finish_one();
        io.pump.turn();
    }
    let mut abort = admin(AdminOpcode::ABORT, 0, u32::from(copy.cid.get()) << 16 | 1, 0, 0);
    queue.send(&mut abort, &[]);
    io.pump.turn();
    io.pump.finish_one();
    let (_, cqe) = io.end_of(copy);
    assert_eq!((cqe.status.status(), cqe.result.get()), (NvmeStatus::COMMAND_ABORT_REQUESTED, 1));
}

#[test]
fn fua_and_flush_reach_the_volume() {
    let (mut io, _admin) = FabricsTestHost::io(&node());
    io.pump.holds_io = true;
    let fua = |sqe: Sqe| Sqe { cdw12: (sqe.cdw12.get() | FUA).into(), ..sqe };
    io.send(
        &mut Sqe { dptr: SglDescriptor::in_capsule(0, 512), ..fua(nvm(NvmOpcode::WRITE, 1, 0, 1)) },
        &[7; 512],
    );
    io.send(&mut fua(nvm(NvmOpcode::WRITE_ZEROES, 1, 0, 1)), &[]);
    io.send(&mut nvm(NvmOpcode::FLUSH, 1, 0, 1), &[]);
    io.send(&mut nvm(NvmOpcode::FLUSH, u32::MAX, 0, 1), &[]);
    let ops: Vec<(u32, Op)> = io.pump.submitted.iter().map(|(volume, io)| (volume.0, io.op)).collect();
    let zeroes = Op::WriteZeroes { fua: true, may_unmap: false, only_fast: false };
    assert_eq!(ops, [(0, Op::Write { fua: true }), (0, zeroes), (0, Op::Flush), (1, Op::Flush)]);
    while !io.pump.submitted.is_empty() {
        io.pump.finish_one();
        io.pump.turn();
    }
    // The flush of all namespaces was two I/Os.
    assert_eq!(io.received().len(), 4);
}

#[test]
fn identify_describes_the_subsystem() {
    let (mut host, cntlid) = FabricsTestHost::admin(&node());
    let mut identify = |cns: u32, nsid: u32| host.run(admin(AdminOpcode::IDENTIFY, nsid, cns, 0, 4096), &[]);
    let page = IdentifyController::read_from_bytes(&identify(1, 0).0).unwrap();
    assert_eq!((page.cntlid.get(), page.mdts, page.nn.get()), (cntlid, 8, 1024));
    assert_eq!((page.ioccsz.get() * 16, page.icdoff.get()), (64 + 8192, 0));
    assert_eq!((Nqn::of_field(&page.subnqn), page.vwc & 1), (Nqn::new(NQN), 0));
    assert!(page.oncs.get() & ONCS_COMPARE != 0);
    for (nsid, nsattr) in [(1, 0), (2, NSATTR_WRITE_PROTECTED)] {
        let page = IdentifyNamespace::read_from_bytes(&identify(0, nsid).0).unwrap();
        assert_eq!((page.nsze.get(), page.lbaf[0].lbads, page.nsattr), (SIZE / 512, 9, nsattr));
        assert_ne!(page.nguid, [0; 16]);
    }
    let list = |page: Vec<u8>| page.chunks(4).map(|id| id[0]).take_while(|&id| id > 0).collect::<Vec<u8>>();
    assert_eq!((list(identify(2, 0).0), list(identify(2, 1).0)), (vec![1, 2], vec![2]));
    let descriptors = identify(3, 1).0;
    assert_eq!((descriptors[0], descriptors[1], descriptors[20], descriptors[40]), (2, 16, 3, 4));
    assert_eq!(identify(0x13, 0).0[..4], [1, 0, cntlid as u8, 0]);
    assert_eq!(identify(6, 0).0[0], 8);
    assert_eq!(identify(0, 3).0, vec![0; 4096], "it could be attached");
    for (cns, nsid) in [(0, 0), (0, 1025), (0, u32::MAX), (3, 9), (8, 0)] {
        assert_eq!(refusal(&identify(cns, nsid).1), NvmeStatus::INVALID_NAMESPACE_OR_FORMAT, "{cns}");
    }
    assert_eq!(refusal(&identify(0x77, 0).1), NvmeStatus::INVALID_FIELD_IN_COMMAND);
    let short = host.run(admin(AdminOpcode::IDENTIFY, 0, 1, 0, 4095), &[]);
    assert_eq!(refusal(&short.1), NvmeStatus::DATA_SGL_LENGTH_INVALID);
}

#[test]
fn reported_log_pages_and_features_are_those_that_exist() {
    for is_discovery in [false, true] {
        let node = node();
        let (mut host, _) = if is_discovery {
            let mut host = FabricsTestHost::new(&node);
            let (command, data) = connect(DISCOVERY_NQN, 0, CNTLID_DYNAMIC, 0);
            assert!(host.run(command, data.as_bytes()).1.status.is_success());
            host.enable();
            (host, 0)
        } else {
            FabricsTestHost::admin(&node)
        };
        let mut numbers = |lid: u32| {
            let log = admin(AdminOpcode::GET_LOG_PAGE, u32::MAX, 255 << 16 | lid, 0, 1024);
            let (page, cqe) = host.run(log, &[]);
            let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
            (page.chunks(4).map(number).collect::<Vec<_>>(), cqe.status)
        };
        let supported = numbers(0).0;
        for lid in 0..=255_u32 {
            let status = numbers(lid).1;
            let is_there = status.is_success();
            assert!(is_there || status.status() == NvmeStatus::INVALID_LOG_PAGE);
            assert_eq!(supported[lid as usize], u32::from(is_there), "{lid:#x}");
        }
        assert_eq!(supported[0x13], 0, "there is no management interface");
        if is_discovery {
            continue;
        }
        let features = numbers(0x12).0;
        let scope = |fid: usize| features[fid] >> 20;
        assert_eq!((scope(0x07), scope(0x0b), scope(0x82), scope(0x83)), (2, 2, 1, 1));
        for fid in 1..=255_u32 {
            let get = admin(AdminOpcode::GET_FEATURES, 1, fid | 3 << 8, 0, 0);
            let get = if features[fid as usize] >> 20 == 1 { get } else { Sqe { nsid: 0.into(), ..get } };
            let is_there = host.run(get, &[]).1.status.is_success();
            assert_eq!(features[fid as usize] & 1, u32::from(is_there), "{fid:#x}");
        }
    }
}

#[test]
fn a_page_that_does_not_fit_is_not_marked_as_read() {
    let exports = Exports::new(vec![export("a")]);
    let subsystem = Subsystem::new(Nqn::new(NQN).unwrap(), "machine", Vec::new(), Vec::new());
    let subsystem = Arc::new(subsystem);
    let node = (Arc::new(NvmeNode::new(vec![subsystem.clone()], Vec::new(), "machine")), exports);
    let (mut host, _) = FabricsTestHost::admin(&node);
    let namespace = Namespace::new(
        3,
        VolumeId(0),
        node.1.volume_state(VolumeId(0)).unwrap(),
        false,
        VolumeUuid::of_texts(&["a"]),
    );
    subsystem.attach(namespace, None).unwrap();
    host.pump.turn();
    let read = |len: u32, offset: u32| Sqe {
        cdw12: offset.into(),
        ..admin(AdminOpcode::GET_LOG_PAGE, u32::MAX, 1023 << 16 | 4, 0, len)
    };
    let in_capsule = Sqe { dptr: SglDescriptor::in_capsule(0, 4096), ..read(4096, 0) };
    for wrong in [read(4092, 0), read(4096, 4100), read(0, 0), in_capsule] {
        assert!(!host.run(wrong, &[]).1.status.is_success());
    }
    assert_eq!(host.run(read(4096, 0), &[]).0[..8], [3, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(host.run(read(4096, 0), &[]).0[..4], [0; 4]);
}

#[test]
fn configured_names_and_identifiers_are_reported() {
    let exports = Exports::new(vec![export("a")]);
    let given = GivenIdentity { nguid: Some([1; 16]), eui64: Some([2; 8]), uuid: Some([3; 16]) };
    let namespace = Namespace::new(
        1,
        VolumeId(0),
        exports.volume_state(VolumeId(0)).unwrap(),
        false,
        VolumeUuid::of_texts(&["a"]),
    );
    let namespaces = vec![namespace.with_identity(&given)];
    let subsystem = Subsystem::new(Nqn::new(NQN).unwrap(), "machine", namespaces, Vec::new());
    let subsystem = subsystem.with_serial_number("4711".into()).with_model_number("Disk of ours".into());
    let node = Arc::new(NvmeNode::new(vec![Arc::new(subsystem)], Vec::new(), "machine"));
    let (mut host, _) = FabricsTestHost::admin(&(node, exports));
    let mut identify =
        |cns: u32, nsid: u32| host.run(admin(AdminOpcode::IDENTIFY, nsid, cns, 0, 4096), &[]).0;
    let page = IdentifyController::read_from_bytes(&identify(1, 0)).unwrap();
    assert_eq!((&page.sn, &page.mn[..14]), (b"4711                ", &b"Disk of ours  "[..]));
    let page = IdentifyNamespace::read_from_bytes(&identify(0, 1)).unwrap();
    assert_eq!((page.nguid, page.eui64), ([1; 16], [2; 8]));
    let mut expected = vec![1, 8, 0, 0];
    expected.extend([2; 8]);
    expected.extend([2, 16, 0, 0]);
    expected.extend([1; 16]);
    expected.extend([3, 16, 0, 0]);
    expected.extend([3; 16]);
    expected.extend([4, 1, 0, 0, 0, 0]);
    assert_eq!(identify(3, 1)[..expected.len()], expected);
}

/// Linux's controller took any offset into its discovery log (CVE-2026-64320).
#[test]
fn log_pages_may_be_read_in_parts() {
    let (mut host, _) = FabricsTestHost::admin(&node());
    for (lid, len) in [(0, 1024), (1, 64), (2, 512), (3, 512), (4, 4096), (5, 4096), (0x12, 1024)] {
        let log = admin(AdminOpcode::GET_LOG_PAGE, u32::MAX, (len / 4 - 1) << 16 | lid, 0, len);
        let (page, cqe) = host.run(log, &[]);
        assert!(cqe.status.is_success() && page.len() == len as usize, "{lid}");
        let part =
            Sqe { cdw12: 8.into(), ..admin(AdminOpcode::GET_LOG_PAGE, u32::MAX, 3 << 16 | lid, 0, 16) };
        assert_eq!(host.run(part, &[]).0, page[8..24]);
    }
    let wrong = |cdw12: u32, lid: u32| Sqe {
        cdw12: cdw12.into(),
        ..admin(AdminOpcode::GET_LOG_PAGE, 0, 3 << 16 | lid, 0, 16)
    };
    for (sqe, status) in [
        (wrong(2, 2), NvmeStatus::INVALID_FIELD_IN_COMMAND),
        (wrong(516, 2), NvmeStatus::INVALID_FIELD_IN_COMMAND),
        (wrong(0, 0xc0), NvmeStatus::INVALID_LOG_PAGE),
        (wrong(0, 0x70), NvmeStatus::INVALID_LOG_PAGE),
        // No page is namespace specific.
        (Sqe { nsid: 1.into(), ..wrong(0, 2) }, NvmeStatus::INVALID_FIELD_IN_COMMAND),
    ] {
        assert_eq!(refusal(&host.run(sqe, &[]).1), status);
    }
    let long = admin(AdminOpcode::GET_LOG_PAGE, 0, 0xffff << 16 | 2, 0xffff, u32::MAX);
    assert_eq!(refusal(&host.run(long, &[]).1), NvmeStatus::INVALID_FIELD_IN_COMMAND);
}

#[test]
fn features_are_set_and_read() {
    let (mut host, _) = FabricsTestHost::admin(&node());
    let mut set = |fid: FeatureId, value: u32| {
        host.run(admin(AdminOpcode::SET_FEATURES, 0, fid.0.into(), value, 0), &[]).1
    };
    assert_eq!(set(FeatureId::NUMBER_OF_QUEUES, 3 << 16 | 3).result.get(), 127 << 16 | 127);
    assert_eq!(refusal(&set(FeatureId::NUMBER_OF_QUEUES, 0xffff)), NvmeStatus::INVALID_FIELD_IN_COMMAND);
    assert!(set(FeatureId::ASYNCHRONOUS_EVENT_CONFIGURATION, 0x900).status.is_success());
    assert!(set(FeatureId::KEEP_ALIVE_TIMER, 9000).status.is_success());
    assert_eq!(refusal(&set(FeatureId::ARBITRATION, 1)), NvmeStatus::FEATURE_NOT_CHANGEABLE);
    // There is no cache, and Connect has set the host identifier.
    for value in [0, 1] {
        let refused = refusal(&set(FeatureId::VOLATILE_WRITE_CACHE, value));
        assert_eq!(refused, NvmeStatus::INVALID_FIELD_IN_COMMAND);
    }
    assert_eq!(refusal(&set(FeatureId::HOST_IDENTIFIER, EXHID)), NvmeStatus::COMMAND_SEQUENCE_ERROR);
    for absent in [FeatureId(0xc5), FeatureId::TIMESTAMP] {
        assert_eq!(refusal(&set(absent, 1)), NvmeStatus::INVALID_FIELD_IN_COMMAND);
    }
    let fid = u32::from(FeatureId::ASYNCHRONOUS_EVENT_CONFIGURATION.0);
    let of_one = host.run(admin(AdminOpcode::SET_FEATURES, 1, fid, 0, 0), &[]).1;
    assert_eq!(refusal(&of_one), NvmeStatus::FEATURE_NOT_NAMESPACE_SPECIFIC);
    let mut get = |cdw10: u32, cdw11: u32, room: u32| {
        host.run(admin(AdminOpcode::GET_FEATURES, 0, cdw10, cdw11, room), &[])
    };
    assert_eq!(get(FeatureId::ASYNCHRONOUS_EVENT_CONFIGURATION.0.into(), 0, 0).1.result.get(), 0x900);
    assert_eq!(get(FeatureId::KEEP_ALIVE_TIMER.0.into(), 0, 0).1.result.get(), 9000);
    assert_eq!(get(3 << 8 | u32::from(FeatureId::KEEP_ALIVE_TIMER.0), 0, 0).1.result.get(), 4);
    assert_eq!(get(FeatureId::HOST_IDENTIFIER.0.into(), EXHID, 16).0, [1; 16]);
    let behavior = admin(AdminOpcode::SET_FEATURES, 0, FeatureId::HOST_BEHAVIOR_SUPPORT.0.into(), 0, 0);
    assert!(host.run(behavior, &[3; 512]).1.status.is_success());
    let behavior = admin(AdminOpcode::GET_FEATURES, 0, FeatureId::HOST_BEHAVIOR_SUPPORT.0.into(), 0, 512);
    assert_eq!(host.run(behavior, &[]).0, [3; 512]);
}

#[test]
fn a_features_default_is_independent_of_its_value() {
    let (mut host, _) = FabricsTestHost::admin(&node());
    let behavior = admin(AdminOpcode::SET_FEATURES, 0, FeatureId::HOST_BEHAVIOR_SUPPORT.0.into(), 0, 0);
    assert!(host.run(behavior, &[3; 512]).1.status.is_success());
    let set = [
        (FeatureId::ASYNCHRONOUS_EVENT_CONFIGURATION, 0, 0x100, 0),
        // The value in Connect.
        (FeatureId::KEEP_ALIVE_TIMER, 0, 9000, 4000),
        (FeatureId::RESERVATION_NOTIFICATION_MASK, 1, 0b1110, 0),
    ];
    for (fid, nsid, value, default) in set {
        let sqe = admin(AdminOpcode::SET_FEATURES, nsid, fid.0.into(), value, 0);
        assert!(host.run(sqe, &[]).1.status.is_success());
        let mut get = |select: Select| {
            let cdw10 = u32::from(select.0) << 8 | u32::from(fid.0);
            host.run(admin(AdminOpcode::GET_FEATURES, nsid, cdw10, 0, 0), &[]).1.result.get()
        };
        assert_eq!(get(Select::CURRENT), u64::from(value), "{fid}");
        // Nothing was saved, so the saved value is the default.
        assert_eq!((get(Select::DEFAULT), get(Select::SAVED)), (default, default), "{fid}");
    }
    let fid = u32::from(FeatureId::HOST_BEHAVIOR_SUPPORT.0);
    let get = admin(AdminOpcode::GET_FEATURES, 0, u32::from(Select::DEFAULT.0) << 8 | fid, 0, 512);
    assert_eq!(host.run(get, &[]).0, [0; 512]);
    let beyond = admin(AdminOpcode::GET_FEATURES, 0, 4 << 8 | fid, 0, 512);
    assert_eq!(refusal(&host.run(beyond, &[]).1), NvmeStatus::INVALID_FIELD_IN_COMMAND);
}

#[test]
fn the_number_of_queues_is_negotiated_before_there_are_any() {
    let (io, mut queue) = FabricsTestHost::io(&node());
    let set = admin(AdminOpcode::SET_FEATURES, 0, FeatureId::NUMBER_OF_QUEUES.0.into(), 3 << 16 | 3, 0);
    assert_eq!(refusal(&queue.run(set, &[]).1), NvmeStatus::COMMAND_SEQUENCE_ERROR);
    drop(io);
    assert!(queue.run(set, &[]).1.status.is_success());
}

#[test]
fn event_requests_are_bounded_and_can_be_aborted() {
    let (mut host, _) = FabricsTestHost::admin(&node());
    let event = admin(AdminOpcode::ASYNC_EVENT_REQUEST, 0, 0, 0, 0);
    let mut waiting = Vec::new();
    for _ in 0..4 {
        let mut sqe = event;
        host.send(&mut sqe, &[]);
        waiting.push(sqe.cid.get());
        assert!(host.received().is_empty());
    }
    let more = host.run(event, &[]).1;
    assert_eq!(refusal(&more), NvmeStatus::ASYNCHRONOUS_EVENT_REQUEST_LIMIT_EXCEEDED);
    let mut abort = admin(AdminOpcode::ABORT, 0, u32::from(waiting[1]) << 16, 0, 0);
    host.send(&mut abort, &[]);
    let all = host.received();
    let (aborted, cqe) = (all[0].cqe(), all[1].cqe());
    assert_eq!((aborted.cid.get(), refusal(&aborted)), (waiting[1], NvmeStatus::COMMAND_ABORT_REQUESTED));
    assert_eq!((cqe.cid, cqe.result.get()), (abort.cid, 0));
    // A command that does not exist is not aborted, and neither is one of another queue.
    for cdw10 in [u32::from(waiting[1]) << 16, u32::from(waiting[0]) << 16 | 1] {
        assert_eq!(host.run(admin(AdminOpcode::ABORT, 0, cdw10, 0, 0), &[]).1.result.get(), 1);
    }
}

#[test]
fn a_reservation_of_another_protocol_excludes_the_host() {
    let node = node();
    let (mut io, _admin) = FabricsTestHost::io(&node);
    let volume_state: std::sync::Arc<VolumeState> = node.1.volume_state(VolumeId(0)).unwrap();
    let holder = crate::volume_state::Holder { nexus: 1, unit: 0 };
    assert_eq!(volume_state.reserve(holder, Epoch::current()).ok(), Some(Some(true)));
    let (_, cqe) = io.run(nvm(NvmOpcode::READ, 1, 0, 1), &[]);
    assert_eq!(refusal(&cqe), NvmeStatus::RESERVATION_CONFLICT);
    assert_eq!(
        refusal(&io.run(nvm(NvmOpcode::WRITE, 1, 0, 1), &[7; 512]).1),
        NvmeStatus::RESERVATION_CONFLICT
    );
    assert_eq!(refusal(&io.run(nvm(NvmOpcode::FLUSH, 1, 0, 1), &[]).1), NvmeStatus::RESERVATION_CONFLICT);
    volume_state.release(Some(holder));
    assert!(io.run(nvm(NvmOpcode::READ, 1, 0, 1), &[]).1.status.is_success());
}

#[test]
fn a_command_waits_for_a_locked_range() {
    use crate::volume_state::RangeGuard;
    let node = node();
    let (mut io, _admin) = FabricsTestHost::io(&node);
    let guard = RangeGuard::lock(&node.1.volume_state(VolumeId(0)).unwrap(), 0, 512).unwrap();
    let mut read = nvm(NvmOpcode::READ, 1, 0, 1);
    io.send(&mut read, &[]);
    assert!(io.received().is_empty());
    assert!(io.run(nvm(NvmOpcode::READ, 1, 1, 1), &[]).1.status.is_success());
    drop(guard);
    io.pump.turn();
    assert!(io.end_of(read).1.status.is_success());
}

#[test]
fn a_stopping_target_finishes_outstanding_io_and_completes_no_new_commands() {
    let node = node();
    let (mut io, mut admin_queue) = FabricsTestHost::io(&node);
    io.pump.holds_io = true;
    let mut read = nvm(NvmOpcode::READ, 1, 0, 8);
    io.send(&mut read, &[]);
    crate::driver::target::TargetLifecycle::on_stop(&mut io.pump.session, Instant::now());
    crate::driver::target::TargetLifecycle::on_stop(&mut admin_queue.pump.session, Instant::now());
    // The I/O queue would end with the admin queue.
    assert!(!io.is_closed() && !admin_queue.is_closed());
    assert!(admin_queue.run(admin(AdminOpcode::KEEP_ALIVE, 0, 0, 0, 0), &[]).1.status.is_success());
    admin_queue.send(&mut admin(AdminOpcode::IDENTIFY, 0, 1, 0, 4096), &[]);
    assert!(admin_queue.received().is_empty());
    // New commands are not completed: the host would retry a failed one immediately and only a few
    // times.
    io.send(&mut nvm(NvmOpcode::READ, 1, 8, 8), &[]);
    let mut write = nvm(NvmOpcode::WRITE, 1, 0, 1);
    write.dptr = SglDescriptor::in_capsule(0, 512);
    io.send(&mut write, &[7; 512]);
    assert!(io.received().is_empty() && !io.is_closed());
    io.pump.finish_one();
    assert!(io.is_closed() && io.pump.submitted.is_empty());
    assert!(io.end_of(read).1.status.is_success() && !admin_queue.is_closed());
    let soon = Instant::now() + Duration::from_millis(200);
    assert!(admin_queue.pump.session.poll_timeout().unwrap() < soon, "it looks again");
    drop(io);
    assert!(admin_queue.is_closed() && admin_queue.pump.session.poll_timeout().is_none_or(|at| at > soon));
}

/// A node with an unreadable block on the first volume.
fn bad_block(block: u64) -> (Arc<NvmeNode>, Exports) {
    let ops = OpSet::NONE.with(OpKind::Read);
    let fault = Fault { ops, offset: block * 512, size: Some(512), ..Fault::default() };
    let volume = Arc::new(FaultVolume::new(Arc::new(MemVolume::new(SIZE)), fault));
    serve(Exports::new(vec![Export { volume, ..export("a") }, export("b")]))
}

#[test]
fn a_read_of_bad_blocks_fails_and_is_in_the_error_log() {
    let (mut io, mut queue) = FabricsTestHost::io(&bad_block(5));
    let read = io.run(nvm(NvmOpcode::READ, 1, 0, 8), &[]).1;
    assert_eq!(refusal(&read), NvmeStatus::UNRECOVERED_READ_ERROR);
    assert!(read.status.more(), "the error log has an entry");
    assert!(io.run(nvm(NvmOpcode::READ, 1, 0, 5), &[]).1.status.is_success());
    assert_eq!(refusal(&io.run(nvm(NvmOpcode::VERIFY, 1, 5, 1), &[]).1), NvmeStatus::UNRECOVERED_READ_ERROR);
    // The most recent failure comes first.
    let log = admin(AdminOpcode::GET_LOG_PAGE, u32::MAX, 1023 << 16 | 1, 0, 4096);
    let page = queue.run(log, &[]).0;
    let entries: Vec<_> = page.chunks(64).map(|entry| ErrorEntry::read_from_bytes(entry).unwrap()).collect();
    let summary =
        |entry: &ErrorEntry| (entry.error_count.get(), entry.sqid.get(), entry.lba.get(), entry.nsid.get());
    assert_eq!(entries.iter().take(2).map(summary).collect::<Vec<_>>(), [(2, 1, 5, 1), (1, 1, 0, 1)]);
    assert_eq!(entries[0].status.get() >> 1 & 0x7ff, NvmeStatus::UNRECOVERED_READ_ERROR.0);
    assert_eq!(entries.iter().filter(|entry| entry.error_count.get() > 0).count(), 2);
}

#[test]
fn the_error_log_keeps_the_last_failures_and_counts_all() {
    let (mut io, mut queue) = FabricsTestHost::io(&node());
    for _ in 0..100 {
        refusal(&io.run(nvm(NvmOpcode::READ, 9, 0, 1), &[]).1);
    }
    let log = admin(AdminOpcode::GET_LOG_PAGE, u32::MAX, 1023 << 16 | 1, 0, 4096);
    let page = queue.run(log, &[]).0;
    assert_eq!((page[0], page[63 * 64], page[64 * 63 + 8]), (100, 37, 1));
    // A miscompare or reservation conflict is not logged.
    assert!(
        io.run(nvm(NvmOpcode::COMPARE, 1, 0, 1), &[7; 512]).1.status.status() == NvmeStatus::COMPARE_FAILURE
    );
    let smart = admin(AdminOpcode::GET_LOG_PAGE, u32::MAX, 127 << 16 | 2, 0, 512);
    let smart = SmartLog::read_from_bytes(&queue.run(smart, &[]).0).unwrap();
    assert_eq!(smart.error_information_log_entries.get(), 100);
}
