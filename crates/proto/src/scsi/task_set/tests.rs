//! Task management over an in-memory transport.
#![allow(clippy::arithmetic_side_effects, clippy::indexing_slicing, reason = "an overflow fails the test")]

use super::*;
use crate::exports::VolumeId;
use crate::scsi::testing::{DeviceBench, command};
use crate::scsi::{Lun, ManagementResponse, Response, ScsiStatus, Sense, TaskManagement};
use crate::volume_state::{NeededRange, NotAdmitted};
use blockmux_volume::{Channel, Completion, Io, Seg, SgList};
use std::time::Instant;

/// Data transfer state of a task: received bytes, and whether more are in flight.
#[derive(Default)]
struct TestProgress {
    here: Vec<u8>,
    is_open: bool,
}

/// A nexus with two drivers, 1 and 2.
struct TestTransport {
    tasks: TaskSet<TestProgress>,
    queues: [TaskQueue; 2],
    events: [Vec<TaskEvent>; 2],
    /// The current driver.
    owner: u32,
    now: Instant,
    channel: Box<dyn Channel>,
    /// Slots that wait for data, and the requested lengths.
    fetches: Vec<(usize, usize)>,
    responses: Vec<(u32, ScsiStatus)>,
    released: usize,
    /// Tags of completed functions, and the drivers that were notified.
    done: Vec<(u32, u32)>,
}

impl TestTransport {
    fn new(bench: &DeviceBench, name: &str) -> TestTransport {
        let client = bench.client(name);
        TestTransport {
            tasks: TaskSet::new(Some(client.server)),
            queues: Default::default(),
            events: Default::default(),
            owner: 1,
            now: Instant::now(),
            channel: client.channel,
            fetches: Vec::new(),
            responses: Vec::new(),
            released: 0,
            done: Vec::new(),
        }
    }

    fn at(&mut self, owner: u32) -> &mut TestTransport {
        self.owner = owner;
        self
    }

    /// Starts a command with this tag at the current driver; returns its slot.
    fn command(&mut self, tag: u32, cdb: &[u8], data_out_len: usize) -> usize {
        let slot = self.tasks.insert(self.owner, tag, LUN, TestProgress::default);
        self.start(slot, &command(LUN, cdb, data_out_len));
        slot
    }

    fn queue(&mut self) -> &mut TaskQueue {
        &mut self.queues[self.owner as usize - 1]
    }

    /// Submits the next I/O of the current driver.
    fn io(&mut self) -> Io {
        let (volume, io) = self.queue().poll_io().expect("an I/O");
        assert_eq!(volume, VolumeId(0));
        self.begin_io(volume, &io, false).expect("nothing excludes it");
        io
    }

    /// Completes an I/O of the current driver.
    fn finish(&mut self, io: Io) {
        let mut done: Vec<Completion> = Vec::new();
        self.channel.submit(io);
        self.channel.kick();
        while done.is_empty() {
            self.channel.poll(&mut done);
        }
        done.into_iter().for_each(|done| self.on_volume_io(done));
    }

    /// Processes the events of the current driver.
    fn read_events(&mut self) {
        let events = std::mem::take(&mut self.events[self.owner as usize - 1]);
        events.into_iter().for_each(|event| self.on_event(event));
    }
}

impl ScsiTransport for TestTransport {
    type Progress = TestProgress;

    fn parts(&mut self) -> TransportParts<'_, TestProgress> {
        let queue = &mut self.queues[self.owner as usize - 1];
        TransportParts { tasks: &mut self.tasks, queue, owner: self.owner, now: self.now }
    }

    fn fetch(&mut self, slot: usize, len: usize) -> Option<Result<SgList, Sense>> {
        let here = &mut self.tasks.get_mut(slot)?.progress.here;
        if here.len() < len {
            self.fetches.push((slot, len));
            return None;
        }
        Some(Ok(Seg::from_slice(&here.drain(..len).collect::<Vec<_>>()).into()))
    }

    fn is_receiving(progress: &TestProgress) -> bool {
        progress.is_open
    }

    fn is_fetching(&mut self, slot: usize) -> bool {
        self.tasks.get_mut(slot).is_some_and(|entry| entry.progress.is_open)
    }

    fn complete(&mut self, slot: usize, response: &mut Response) {
        let tag = self.tasks.get_mut(slot).expect("a task").tag;
        self.drop_task(slot);
        self.responses.push((tag, response.status));
    }

    fn release(&mut self, _slot: usize) {
        self.released += 1;
    }

    fn on_function_done(&mut self, done: FunctionDone) {
        self.done.push((self.owner, done.tag));
    }

    fn post(&mut self, owner: u32, event: TaskEvent) -> bool {
        let events = self.events.get_mut((owner as usize).wrapping_sub(1));
        events.map(|events| events.push(event)).is_some()
    }
}

#[test]
fn a_read_is_answered_once_when_its_io_is_done() {
    let mut nexus = TestTransport::new(&DeviceBench::new(), "a");
    nexus.command(7, READ, 0);
    let io = nexus.io();
    assert!(nexus.responses.is_empty() && !nexus.queues[0].is_idle());
    nexus.finish(io);
    assert_eq!((nexus.responses, nexus.released), (vec![(7, ScsiStatus::GOOD)], 1));
    assert!(nexus.tasks.find(7).is_none() && nexus.queues[0].is_idle());
}

#[test]
fn a_write_fetches_its_data_before_it_reaches_the_volume() {
    let mut nexus = TestTransport::new(&DeviceBench::new(), "a");
    let slot = nexus.command(1, WRITE, 512);
    assert_eq!(nexus.fetches, [(slot, 512)]);
    assert!(nexus.queue().poll_io().is_none());
    nexus.deliver_data(slot, Ok(Seg::from_slice(&[3; 512]).into()));
    let io = nexus.io();
    assert_eq!(io.data.as_ref().map(SgList::to_vec), Some(vec![3; 512]));
    nexus.finish(io);
    assert_eq!(nexus.responses, [(1, ScsiStatus::GOOD)]);
}

#[test]
fn a_response_waits_for_data_that_is_still_to_come() {
    let mut nexus = TestTransport::new(&DeviceBench::new(), "a");
    let slot = nexus.command(1, WRITE, 512);
    nexus.tasks.get_mut(slot).unwrap().progress.is_open = true;
    nexus.tasks.fail(slot, Response::bare(ScsiStatus::BUSY));
    nexus.end_if_closed(slot);
    assert!(nexus.responses.is_empty());
    nexus.tasks.get_mut(slot).unwrap().progress.is_open = false;
    nexus.end_if_closed(slot);
    nexus.end_if_closed(slot);
    assert_eq!(nexus.responses, [(1, ScsiStatus::BUSY)]);
}

#[test]
fn a_task_waits_while_another_has_its_blocks_locked() {
    let mut nexus = TestTransport::new(&DeviceBench::new(), "a");
    let slot = nexus.command(1, COMPARE_AND_WRITE, 1024);
    nexus.deliver_data(slot, Ok(Seg::from_slice(&[0; 1024]).into()));
    let compare = nexus.io();
    nexus.command(2, READ, 0);
    let (volume, read) = nexus.queue().poll_io().expect("an I/O");
    assert_eq!(nexus.begin_io(volume, &read, false), Err(NotAdmitted::Locked(NeededRange::of_io((0, 512)))));
    nexus.finish(compare);
    let write = nexus.io();
    assert_eq!(nexus.begin_io(volume, &read, true), Err(NotAdmitted::Locked(NeededRange::of_io((0, 512)))));
    nexus.finish(write);
    assert_eq!(nexus.begin_io(volume, &read, true), Ok(()));
    nexus.finish(read);
    assert_eq!(nexus.responses, [(1, ScsiStatus::GOOD), (2, ScsiStatus::GOOD)]);
    assert!(!nexus.queue().is_waiting());
}

#[test]
fn abort_task_is_done_when_the_io_of_the_task_is() {
    let mut nexus = TestTransport::new(&DeviceBench::new(), "a");
    nexus.command(1, READ, 0);
    let io = nexus.io();
    nexus.command(2, WRITE, 512);
    assert!(nexus.tasks.has_task(1, LUN) && !nexus.tasks.has_task(1, Lun::new(1)));
    nexus.abort_task(100, 1);
    assert_eq!(nexus.queue().poll_cancel(), Some((VolumeId(0), io.tag)));
    assert!(nexus.done.is_empty() && !nexus.tasks.has_task(1, LUN), "the tag is free again");
    nexus.abort_task(101, 2);
    assert_eq!(nexus.done, [(1, 101)], "the task had nothing in flight");
    nexus.finish(io);
    assert_eq!(nexus.done, [(1, 101), (1, 100)]);
    assert_eq!((nexus.responses.len(), nexus.released), (0, 2));
}

#[test]
fn an_abort_waits_for_data_that_is_being_written_to_memory() {
    let mut nexus = TestTransport::new(&DeviceBench::new(), "a");
    let slot = nexus.command(1, WRITE, 512);
    nexus.tasks.get_mut(slot).unwrap().progress.is_open = true;
    nexus.abort_task(100, 1);
    assert!(nexus.done.is_empty() && nexus.tasks.has_aborted_without_io(1));
    nexus.drop_aborted(slot);
    assert_eq!((nexus.done, nexus.released), (vec![(1, 100)], 1));
}

#[test]
fn a_function_waits_for_the_tasks_of_another_driver() {
    let mut nexus = TestTransport::new(&DeviceBench::new(), "a");
    nexus.at(2).command(1, READ, 0);
    let io = nexus.io();
    nexus.command(2, WRITE, 512);
    let answer = nexus.at(1).manage_unit(100, TaskManagement::AbortTaskSet, LUN);
    assert_eq!((answer, nexus.queue().poll_cancel()), (ManagementResponse::FunctionComplete, None));
    nexus.at(2).read_events();
    assert_eq!(nexus.queue().poll_cancel(), Some((VolumeId(0), io.tag)));
    assert_eq!(nexus.released, 1, "the write had nothing in flight");
    nexus.finish(io);
    assert!(nexus.done.is_empty(), "the task's own driver notifies the requester");
    nexus.at(1).read_events();
    assert_eq!((nexus.done, nexus.released), (vec![(1, 100)], 2));
}

#[test]
fn a_reset_waits_for_the_io_of_another_nexus() {
    let bench = DeviceBench::new();
    let (mut one, mut other) = (TestTransport::new(&bench, "a"), TestTransport::new(&bench, "b"));
    other.command(1, READ, 0);
    let io = other.io();
    one.manage_unit(100, TaskManagement::LogicalUnitReset, LUN);
    one.resume_waiting();
    assert!(one.done.is_empty() && one.queue().is_waiting());
    other.finish(io);
    assert_eq!(other.responses, [(1, ScsiStatus::TASK_ABORTED)]);
    one.resume_waiting();
    assert_eq!(one.done, [(1, 100)]);
    one.reset_target(101, true);
    assert_eq!(one.done, [(1, 100), (1, 101)]);
}

#[test]
fn a_function_whose_requester_has_ended_is_not_answered() {
    let mut nexus = TestTransport::new(&DeviceBench::new(), "a");
    nexus.command(1, READ, 0);
    let io = nexus.io();
    nexus.reset_nexus(100);
    nexus.forget_functions();
    nexus.finish(io);
    assert!(nexus.done.is_empty() && nexus.tasks.has_room_for_function());
    assert_eq!(nexus.released, 1);
}

#[test]
fn pending_functions_are_bounded() {
    let mut nexus = TestTransport::new(&DeviceBench::new(), "a");
    let ios: Vec<_> = (0..16)
        .map(|tag| {
            nexus.command(tag, READ, 0);
            assert!(nexus.tasks.has_room_for_function());
            let io = nexus.io();
            nexus.abort_task(100 + tag, tag);
            io
        })
        .collect();
    assert!(!nexus.tasks.has_room_for_function());
    nexus.finish(ios[0].clone());
    assert!(nexus.tasks.has_room_for_function());
}

#[test]
fn a_driver_that_has_ended_leaves_no_task() {
    let mut nexus = TestTransport::new(&DeviceBench::new(), "a");
    nexus.command(1, READ, 0);
    nexus.command(2, WRITE, 512);
    nexus.abort_tasks(|_| true, None);
    nexus.abandon();
    assert_eq!((nexus.released, nexus.responses.len()), (2, 0));
    assert!(nexus.tasks.slots_of(1).is_empty());
}

#[test]
fn io_of_a_task_that_moved_completes_at_its_new_driver() {
    let mut nexus = TestTransport::new(&DeviceBench::new(), "a");
    let slot = nexus.command(1, READ, 0);
    let io = nexus.io();
    nexus.tasks.get_mut(slot).unwrap().owner = 2;
    nexus.finish(io);
    assert!(nexus.responses.is_empty());
    nexus.at(2).read_events();
    assert_eq!(nexus.responses, [(1, ScsiStatus::GOOD)]);
}

#[test]
fn background_work_continues_without_a_session_and_pauses() {
    let bench = DeviceBench::new();
    let mut client = bench.client("a");
    let list = [&[1, 0, 2, 0][..], &[7; 512]].concat();
    client.run_with(&OVERWRITE_IMMEDIATELY, &list).good();
    let (mut work, mut channel) = (BackgroundWork::new(bench.target.clone(), Instant::now()), client.channel);
    drop(client.server);
    let (mut now, mut pauses) = (Instant::now(), 0);
    while work.on_turn(now) {
        let mut done: Vec<Completion> = Vec::new();
        match work.poll_io() {
            Some((_, io)) => channel.submit(io),
            None => {
                // The pause begins with the preceding completion.
                let until = work.poll_timeout().expect("a pause");
                assert!(until > now && work.on_turn(now) && work.poll_io().is_none());
                assert_eq!(work.poll_timeout(), Some(until));
                (now, pauses) = (until, pauses + 1);
                continue;
            }
        }
        channel.kick();
        while done.is_empty() {
            channel.poll(&mut done);
        }
        done.into_iter().for_each(|done| work.on_io(done, now));
    }
    assert!(pauses > 0);
    let mut client = bench.fresh_client("b");
    assert_eq!(client.run(&[0; 6]).check(), (6, 0x2900));
    assert_eq!(client.run(READ).good(), vec![7; 512]);
    assert!(!BackgroundWork::new(bench.target.clone(), now).on_turn(now), "nothing is left to do");
}

const LUN: Lun = Lun(0);
/// SANITIZE, OVERWRITE with IMMED, and its parameter list of 516 bytes.
const OVERWRITE_IMMEDIATELY: [u8; 10] = [0x48, 0x81, 0, 0, 0, 0, 0, 2, 4, 0];
/// READ (10) of block 0.
const READ: &[u8] = &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
/// WRITE (10) of block 0.
const WRITE: &[u8] = &[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
/// COMPARE AND WRITE of block 0.
const COMPARE_AND_WRITE: &[u8] = &[0x89, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0];
