//! The controller without a transport: each command gets its data, and yields its I/O step by step.
#![allow(clippy::arithmetic_side_effects, clippy::indexing_slicing, reason = "an overflow fails the test")]

use super::admin::{AdminQueue, AdminResult};
use super::association::HostIdentity;
use super::event_queue::{EventQueue, QueueEvent};
use super::io::{IoCommand, IoStep, QueueOrigin};
use super::nqn::Nqn;
use super::subsystem::{Namespace, NamespaceView, Subsystem};
use super::{MAX_DATA, MAX_EVENT_REQUESTS, NvmeOutcome};
use crate::exports::VolumeId;
use crate::names::volume_uuid::VolumeUuid;
use crate::volume_state::{Epoch, Registrant, VolumeState};
use blockmux_volume::conformance::TestCore;
use blockmux_volume::{Channel, Io, IoError, MemVolume, Op, Output, Seg, SgList, Tag, Volume, Waker};
use blockmux_wire::nvme::identify::IdentifyController;
use blockmux_wire::nvme::nvm::{CopySource, DSM_DEALLOCATE, DsmRange, FUA};
use blockmux_wire::nvme::opcode::{AdminOpcode, NvmOpcode};
use blockmux_wire::nvme::property::CC;
use blockmux_wire::nvme::status::NvmeStatus;
use blockmux_wire::nvme::{NSID_ALL, Sqe};
use std::sync::Arc;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// A subsystem with two namespaces of 512-byte blocks, of which the second is read-only, and an I/O
/// queue of a host.
struct Bench {
    subsystem: Arc<Subsystem>,
    view: NamespaceView,
    origin: QueueOrigin,
    channels: Vec<Box<dyn Channel>>,
}

impl Bench {
    fn new() -> Bench {
        let volumes: Vec<Arc<dyn Volume>> =
            (0..2).map(|_| -> Arc<dyn Volume> { Arc::new(MemVolume::new(SIZE)) }).collect();
        let namespaces = (0..).zip(&volumes).map(|(nth, volume)| {
            let (state, uuid) = (VolumeState::new(volume.clone()), VolumeUuid::of_texts(&[&nth.to_string()]));
            Namespace::new(nth + 1, VolumeId(nth), state, nth == 1, uuid)
        });
        let nqn = Nqn::new("nqn.2026-11.com.example:disk").unwrap();
        let subsystem = Arc::new(Subsystem::new(nqn, "machine", namespaces.collect(), Vec::new()));
        let core = TestCore::new().as_core();
        Bench {
            view: subsystem.view(&host().nqn),
            origin: QueueOrigin {
                who: Registrant::of_nvme_host(host().nqn.as_str(), host().id),
                port: 1,
                epoch: Epoch::current(),
            },
            subsystem,
            channels: volumes.iter().map(|volume| volume.open(&core, 1, Waker::idle()).unwrap()).collect(),
        }
    }

    fn parse(&self, sqe: &Sqe) -> Result<IoCommand, NvmeStatus> {
        IoCommand::parse(&self.subsystem, &self.view, &self.origin, sqe)
    }

    /// Carries out an I/O.
    fn execute(&mut self, volume: VolumeId, io: Io) -> Result<Output, IoError> {
        let (channel, mut done) = (&mut self.channels[volume.0 as usize], Vec::new());
        channel.submit(io);
        channel.kick();
        channel.poll(&mut done);
        done.pop().expect("a volume in memory completes at once").result
    }

    /// Carries out every step; returns the outcome, and the volume, operation and range of each
    /// I/O.
    fn steps(
        &mut self,
        mut step: impl FnMut(Option<Result<Output, IoError>>) -> IoStep,
    ) -> (NvmeOutcome, Vec<DoneIo>) {
        let (mut done, mut result) = (Vec::new(), None);
        loop {
            match step(result) {
                IoStep::Io(request) => {
                    let (volume, op, range) = (request.volume, request.op, (request.offset, request.len));
                    done.push((volume.0, op, range));
                    let io = Io { tag: Tag(0), op, offset: range.0, len: range.1, data: request.data };
                    result = Some(self.execute(volume, io));
                }
                IoStep::Done(outcome) => return (outcome, done),
                IoStep::Wait => panic!("nothing else is to be waited for"),
            }
        }
    }

    fn run(&mut self, sqe: &Sqe, data: &[u8]) -> (NvmeOutcome, Vec<DoneIo>) {
        let mut command = self.parse(sqe).expect("a valid command");
        assert_eq!(command.data_out(data.len()), data.len());
        let data: SgList = Seg::from_slice(data).into();
        self.steps(|result| match result {
            None => command.begin(data.clone()),
            Some(result) => command.on_io(result),
        })
    }

    fn read(&mut self, slba: u64, blocks: u32) -> Vec<u8> {
        self.run(&nvm(NvmOpcode::READ, 1, slba, blocks), &[]).0.data.to_vec()
    }

    fn write(&mut self, slba: u64, data: &[u8]) {
        let (outcome, _) = self.run(&nvm(NvmOpcode::WRITE, 1, slba, data.len() as u32 / 512), data);
        assert!(outcome.status.is_success());
    }

    /// The enabled controller of a host.
    fn admin(&self) -> AdminQueue {
        let events = EventQueue::new(None);
        let guard = self.subsystem.associations.connect_admin((host(), true), None, events).unwrap();
        AdminQueue::new(self.subsystem.clone(), guard, (host(), 1), (8192, 0), 0)
    }
}

/// Volume, operation, offset and length of an I/O.
type DoneIo = (u32, Op, (u64, u64));

fn host() -> HostIdentity {
    HostIdentity { nqn: Nqn::new("nqn.2026-11.com.example:host").unwrap(), id: [1; 16] }
}

fn nvm(opcode: NvmOpcode, nsid: u32, slba: u64, blocks: u32) -> Sqe {
    Sqe {
        opcode: opcode.0,
        nsid: nsid.into(),
        cdw10: (slba as u32).into(),
        cdw11: ((slba >> 32) as u32).into(),
        cdw12: (blocks - 1).into(),
        ..Sqe::new_zeroed()
    }
}

fn with_fua(sqe: Sqe) -> Sqe {
    Sqe { cdw12: (sqe.cdw12.get() | FUA).into(), ..sqe }
}

#[test]
fn a_command_is_refused_before_its_data_has_arrived() {
    let bench = Bench::new();
    let refusal = |sqe: Sqe| bench.parse(&sqe).err();
    let last = SIZE / 512 - 1;
    let too_long = MAX_DATA as u32 / 512 + 1;
    assert_eq!(refusal(nvm(NvmOpcode::WRITE, 1, last, 1)), None);
    for (sqe, status) in [
        (nvm(NvmOpcode::WRITE, 1, last, 2), NvmeStatus::LBA_OUT_OF_RANGE),
        (nvm(NvmOpcode::READ, 1, u64::MAX, 1), NvmeStatus::LBA_OUT_OF_RANGE),
        (nvm(NvmOpcode::READ, 1, 0, too_long), NvmeStatus::INVALID_FIELD_IN_COMMAND),
        (nvm(NvmOpcode::READ, 3, 0, 1), NvmeStatus::INVALID_NAMESPACE_OR_FORMAT),
        (nvm(NvmOpcode::WRITE, 2, 0, 1), NvmeStatus::NAMESPACE_IS_WRITE_PROTECTED),
        (nvm(NvmOpcode::COPY, 2, 0, 1), NvmeStatus::NAMESPACE_IS_WRITE_PROTECTED),
        (nvm(NvmOpcode::WRITE_UNCORRECTABLE, 1, 0, 1), NvmeStatus::INVALID_COMMAND_OPCODE),
    ] {
        assert_eq!(refusal(sqe), Some(status), "{sqe:?}");
    }
}

#[test]
fn each_command_is_the_io_that_it_needs_and_no_more() {
    let mut bench = Bench::new();
    let fua_read = with_fua(nvm(NvmOpcode::READ, 1, 2, 1));
    // A volume in memory has no cache to flush first.
    assert_eq!(bench.run(&fua_read, &[]).1, [(0, Op::Read, (1024, 512))]);
    let fua_write = with_fua(nvm(NvmOpcode::WRITE, 1, 2, 1));
    assert_eq!(bench.run(&fua_write, &[7; 512]).1, [(0, Op::Write { fua: true }, (1024, 512))]);
    assert_eq!(bench.run(&nvm(NvmOpcode::VERIFY, 2, 0, 8), &[]).1, [(1, Op::Read, (0, 4096))]);
    assert_eq!(bench.run(&nvm(NvmOpcode::FLUSH, 2, 0, 1), &[]).1, [(1, Op::Flush, (0, 0))]);
    let mut flushed = bench.run(&nvm(NvmOpcode::FLUSH, NSID_ALL, 0, 1), &[]).1;
    flushed.sort_unstable_by_key(|(volume, ..)| *volume);
    assert_eq!(flushed, [(0, Op::Flush, (0, 0)), (1, Op::Flush, (0, 0))]);
    let (outcome, ios) = bench.run(&nvm(NvmOpcode::COMPARE, 1, 2, 1), &[8; 512]);
    assert_eq!((outcome.status.status(), ios.len()), (NvmeStatus::COMPARE_FAILURE, 1));
}

#[test]
fn the_ranges_of_copy_and_deallocate_are_done_in_order_one_at_a_time() {
    let mut bench = Bench::new();
    bench.write(0, &[[1; 512], [2; 512], [3; 512]].concat());
    let source =
        |slba: u64, nlb: u16| CopySource { slba: slba.into(), nlb: nlb.into(), ..CopySource::new_zeroed() };
    let sources = [source(2, 0), source(0, 1)].map(|source| source.as_bytes().to_vec()).concat();
    let copy = Sqe { cdw12: 1.into(), ..nvm(NvmOpcode::COPY, 1, 8, 1) };
    let write = Op::Write { fua: false };
    let (outcome, ios) = bench.run(&copy, &sources);
    assert!(outcome.status.is_success());
    assert_eq!(
        ios,
        [
            (0, Op::Read, (1024, 512)),
            (0, write, (8 * 512, 512)),
            (0, Op::Read, (0, 1024)),
            (0, write, (9 * 512, 1024)),
        ]
    );
    assert_eq!(bench.read(8, 3), [[3; 512], [1; 512], [2; 512]].concat());
    let range =
        |slba: u64, nlb: u32| DsmRange { slba: slba.into(), nlb: nlb.into(), ..DsmRange::new_zeroed() };
    let ranges = [range(8, 1), range(0, 0), range(10, 1)].map(|range| range.as_bytes().to_vec()).concat();
    let deallocate =
        Sqe { cdw10: 2.into(), cdw11: DSM_DEALLOCATE.into(), ..nvm(NvmOpcode::DATASET_MANAGEMENT, 1, 0, 1) };
    let (_, ios) = bench.run(&deallocate, &ranges);
    assert_eq!(ios.iter().map(|(.., range)| *range).collect::<Vec<_>>(), [(8 * 512, 512), (10 * 512, 512)]);
    assert_eq!(bench.read(8, 3), [[0; 512], [1; 512], [0; 512]].concat());
}

#[test]
fn a_fused_write_follows_only_a_successful_compare_and_both_get_an_outcome() {
    let mut bench = Bench::new();
    bench.write(4, &[1; 512]);
    let failed_fused = NvmeStatus::COMMAND_ABORTED_DUE_TO_FAILED_FUSED_COMMAND;
    for (expected, statuses, ios) in [
        (1, [NvmeStatus::SUCCESSFUL_COMPLETION; 2], 2),
        (1, [NvmeStatus::COMPARE_FAILURE, failed_fused], 1),
        (2, [NvmeStatus::SUCCESSFUL_COMPLETION; 2], 2),
    ] {
        let compare = bench.parse(&nvm(NvmOpcode::COMPARE, 1, 4, 1)).unwrap();
        let write = nvm(NvmOpcode::WRITE, 1, 4, 1);
        let mut both = bench.parse(&write).unwrap();
        both.fuse(&bench.view, &write, &compare).unwrap();
        let [expected, data] = [[expected; 512], [2; 512]].map(|block| SgList::from(Seg::from_slice(&block)));
        let (outcome, done) = bench.steps(|result| match result {
            None => both.begin_fused(expected.clone(), data.clone()),
            Some(result) => both.on_io(result),
        });
        let (first, second) = both.fused_outcomes(&outcome);
        assert_eq!([first, second].map(|outcome| outcome.status.status()), statuses);
        assert_eq!(done.len(), ios);
    }
    let other_blocks = bench.parse(&nvm(NvmOpcode::COMPARE, 1, 5, 1)).unwrap();
    let write = nvm(NvmOpcode::WRITE, 1, 4, 1);
    let mut both = bench.parse(&write).unwrap();
    assert_eq!(both.fuse(&bench.view, &write, &other_blocks), Err(NvmeStatus::INVALID_FIELD_IN_COMMAND));
}

#[test]
fn a_controller_executes_admin_commands_only_while_it_is_enabled() {
    let bench = Bench::new();
    let mut queue = bench.admin();
    let identify =
        Sqe { opcode: AdminOpcode::IDENTIFY.0, cdw10: 1.into(), dptr: page(), ..Sqe::new_zeroed() };
    assert_eq!(done(execute(&mut queue, &identify, 0)).status.status(), NvmeStatus::COMMAND_SEQUENCE_ERROR);
    for (cc, is_ready) in [(ENABLED, true), (0, false), (ENABLED, true), (ENABLED | SHUT_DOWN, false)] {
        let AdminQueue { properties, guard, .. } = &mut queue;
        properties.set(guard, CC, false, cc).unwrap();
        assert_eq!(done(execute(&mut queue, &identify, 0)).status.is_success(), is_ready, "{cc:#x}");
    }
    let AdminQueue { properties, guard, .. } = &mut queue;
    properties.set(guard, CC, false, 0).unwrap();
    properties.set(guard, CC, false, ENABLED).unwrap();
    let page = done(execute(&mut queue, &identify, 0)).data.to_vec();
    let page = IdentifyController::read_from_bytes(&page).unwrap();
    assert_eq!((page.cntlid.get(), page.nn.get() > 0), (queue.guard.cntlid, true));
}

#[test]
fn event_requests_wait_for_events_until_they_are_aborted() {
    let bench = Bench::new();
    let mut queue = bench.admin();
    let AdminQueue { properties, guard, .. } = &mut queue;
    properties.set(guard, CC, false, ENABLED).unwrap();
    let request = Sqe { opcode: AdminOpcode::ASYNC_EVENT_REQUEST.0, ..Sqe::new_zeroed() };
    for slot in 0..MAX_EVENT_REQUESTS {
        assert!(matches!(execute(&mut queue, &request, slot), AdminResult::AwaitsEvent));
    }
    let status = done(execute(&mut queue, &request, 9)).status.status();
    assert_eq!(status, NvmeStatus::ASYNCHRONOUS_EVENT_REQUEST_LIMIT_EXCEEDED);
    // A CID of these tests is its slot.
    let abort = Sqe { opcode: AdminOpcode::ABORT.0, cdw10: (2_u32 << 16).into(), ..Sqe::new_zeroed() };
    assert!(matches!(execute(&mut queue, &abort, 9), AdminResult::Aborted(2)));
    assert_eq!(done(execute(&mut queue, &abort, 9)).result, 1, "it was not aborted twice");
    // Namespace Attribute Notices.
    queue.on_event(&QueueEvent::NamespaceChanged(1));
    assert_eq!(queue.events.next(), None, "the host has not asked for them");
    let ask = Sqe {
        opcode: AdminOpcode::SET_FEATURES.0,
        cdw10: 0x0b.into(),
        cdw11: (1 << 8).into(),
        ..Sqe::new_zeroed()
    };
    assert!(done(execute(&mut queue, &ask, 9)).status.is_success());
    queue.on_event(&QueueEvent::NamespaceChanged(1));
    assert!(queue.events.next().is_some() && !queue.events.waiting.is_empty());
}

fn execute(queue: &mut AdminQueue, sqe: &Sqe, slot: usize) -> AdminResult {
    queue.execute(sqe, &SgList::default(), slot, &|cid| Some(cid.into()), &Vec::new)
}

fn done(result: AdminResult) -> NvmeOutcome {
    match result {
        AdminResult::Done(outcome) => outcome,
        _ => panic!("the command is not done"),
    }
}

/// The data pointer of a command that returns a page.
fn page() -> blockmux_wire::nvme::SglDescriptor {
    blockmux_wire::nvme::SglDescriptor::transport(4096)
}

const SIZE: u64 = 4 << 20;
/// CC.EN, with the entry sizes of both queues.
const ENABLED: u64 = 0x0046_0001;
/// CC.SHN: normal shutdown.
const SHUT_DOWN: u64 = 1 << 14;
