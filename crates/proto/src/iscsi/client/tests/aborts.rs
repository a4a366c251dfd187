//! Commands without a response, and the fate of their I/O.

use super::connections;
use super::script::*;
use crate::driver::session::{Connections, Initiator, Overdue};
use crate::iscsi::client::SessionPurpose;
use crate::scsi::{ScsiStatus, Sense};
use blockmux_volume::{Memory, Op, SgList};
use blockmux_wire::iscsi::scsi::*;
use blockmux_wire::iscsi::{FLAG_FINAL, IscsiOpcode};
use blockmux_wire::scsi::sense::{Asc, SenseKey};

const WHOLE: &str = "InitialR2T=No\0MaxRecvDataSegmentLength=262144\0FirstBurstLength=65536\0\
                     MaxBurstLength=65536\0";
const LIMIT: u32 = 4;
const GIVE_UP: Option<&str> = Some("to abort pending commands");
const RESET_UNIT: Option<&str> = Some("to reset the logical unit");
const RESET_TARGET: Option<&str> = Some("to reset itself");
const DONE: FunctionResponse = FunctionResponse::FUNCTION_COMPLETE;
const UNKNOWN: FunctionResponse = FunctionResponse::TASK_DOES_NOT_EXIST;

fn ready() -> ScriptedClient {
    ScriptedClient::ready(WHOLE, 1 << 20)
}

/// Ticks until a command is overdue.
fn wait(client: &mut ScriptedClient) {
    for _ in 0..LIMIT {
        assert!(client.session.tick() < LIMIT && client.session.abort_overdue(LIMIT).is_none());
    }
    assert_eq!(client.session.tick(), LIMIT);
}

/// A session with an overdue command on each of two connections; the second connection is selected.
fn overdue_on_two_connections(error_recovery_level: u32) -> (ScriptedClient, InitiatorPdu, InitiatorPdu) {
    let mut client = connections::ready(2, error_recovery_level);
    client.read(1, 0, connections::BURST);
    let first = client.command();
    client.read(2, 0, 512);
    client.select(1);
    let second = client.command();
    wait(&mut client);
    assert_eq!(client.session.abort_overdue(LIMIT), GIVE_UP);
    (client, first, second)
}

/// Expects a single request: the abort of this command.
fn abort_of(client: &mut ScriptedClient, command: &InitiatorPdu) -> TaskManagementFunctionRequest {
    let [pdu] = client.sent().try_into().unwrap();
    let request: TaskManagementFunctionRequest = pdu.as_a();
    let scsi: ScsiCommand = command.as_a();
    assert_eq!((request.opcode, request.function), (0x42, 0x81));
    assert_eq!((request.referenced_task_tag, request.ref_cmd_sn), (scsi.initiator_task_tag, scsi.cmd_sn));
    assert_eq!(request.lun, scsi.lun);
    assert_ne!(request.initiator_task_tag, scsi.initiator_task_tag);
    request
}

/// A command that gets no response in time, and the request to abort it.
fn late(client: &mut ScriptedClient) -> (InitiatorPdu, TaskManagementFunctionRequest) {
    let command = client.command();
    wait(client);
    assert_eq!(client.session.abort_overdue(LIMIT), GIVE_UP);
    let request = abort_of(client, &command);
    (command, request)
}

/// The only returned I/O.
fn aborted(client: &mut ScriptedClient) -> (u64, Op, Option<SgList>) {
    let io = client.session.poll_returned().expect("an I/O");
    assert!(client.session.poll_returned().is_none() && client.session.poll_done().is_none());
    (io.tag.0, io.op, io.data)
}

#[test]
fn a_command_without_a_response_is_aborted_and_its_io_returned() {
    for response in [DONE, UNKNOWN] {
        let mut client = ready();
        client.write(1, 0, &pattern(512));
        let (command, request) = late(&mut client);
        assert_eq!(
            request.cmd_sn.get(),
            command.as_a::<ScsiCommand>().cmd_sn.get() + 1,
            "an immediate request does not advance CmdSN"
        );
        // Its tag stays in use and its I/O is not returned before the response.
        client.read(2, 0, 512);
        let other = client.command();
        assert_ne!(other.tag() & 0xffff, command.tag() & 0xffff);
        assert!(client.session.poll_returned().is_none());
        client.answer_task(&request, response).unwrap();
        let (tag, op, data) = aborted(&mut client);
        assert_eq!((tag, op, data.unwrap().to_vec()), (1, Op::Write { fua: false }, pattern(512)));
        client.data(&other, &pattern(512));
        assert_eq!(client.done_data(), pattern(512));
        // Even then the tag is not reused immediately.
        for _ in 0..2 {
            client.read(3, 0, 512);
            let next = client.command();
            assert_ne!(next.tag(), command.tag());
            client.data(&next, &pattern(512));
            assert!(client.done().1.is_ok());
        }
        assert_eq!(client.session.tick(), 0);
    }
}

#[test]
fn data_before_the_abort_response_is_accepted_and_later_data_is_a_violation() {
    for is_late in [false, true] {
        let mut client = ready();
        let memory = SgList::one(Memory::from_heap(1024).seg(0, 1024));
        client.submit(1, Op::Read, 0, 1024, Some(memory.clone()));
        let (command, request) = late(&mut client);
        let half = client.data_in(&command, 0, 0, 0);
        client.send(&half, &pattern(512)).unwrap();
        let rest = client.data_in(&command, FLAG_FINAL | FLAG_STATUS, 1, 512);
        if is_late {
            client.stat_sn -= 1;
            client.answer_task(&request, DONE).unwrap();
            assert_eq!(aborted(&mut client).0, 1);
            memory.copy_from(&[7; 1024]);
            let error = client.send(&rest, &pattern(1024)[512..]).unwrap_err();
            assert_eq!(error.what, "sent data for an unknown task");
            assert_eq!(memory.to_vec(), [7; 1024]);
        } else {
            client.send(&rest, &pattern(1024)[512..]).unwrap();
            assert_eq!(client.done_data(), pattern(1024));
            client.answer_task(&request, UNKNOWN).unwrap();
            assert!(client.session.poll_returned().is_none());
            assert!(client.answer_task(&request, UNKNOWN).is_err(), "a second response to one request");
        }
    }
}

/// Expects a single request: this reset function.
fn reset(client: &mut ScriptedClient, function: Function) -> TaskManagementFunctionRequest {
    let [pdu] = client.sent().try_into().unwrap();
    let request: TaskManagementFunctionRequest = pdu.as_a();
    assert_eq!((request.opcode, request.function), (0x42, 0x80 | function.0));
    assert_eq!(request.referenced_task_tag.get(), u32::MAX);
    request
}

/// Expects this escalation at the next tick.
fn takes_the_step(client: &mut ScriptedClient, step: Option<&str>) {
    assert!(client.session.tick() >= LIMIT);
    assert_eq!(client.session.abort_overdue(LIMIT), step);
}

#[test]
fn failed_aborts_escalate_to_resets_and_a_new_connection() {
    for response in [Some(FunctionResponse::TASK_MANAGEMENT_FUNCTION_NOT_SUPPORTED), None] {
        let mut client = ready();
        client.write(1, 0, &pattern(512));
        let (_, request) = late(&mut client);
        let answer = |client: &mut ScriptedClient, request| {
            if let Some(response) = response {
                client.answer_task(request, response).unwrap();
            }
            assert!(client.session.poll_returned().is_none());
        };
        answer(&mut client, &request);
        takes_the_step(&mut client, RESET_UNIT);
        let request = reset(&mut client, Function::LOGICAL_UNIT_RESET);
        answer(&mut client, &request);
        takes_the_step(&mut client, RESET_TARGET);
        let request = reset(&mut client, Function::TARGET_WARM_RESET);
        answer(&mut client, &request);
        takes_the_step(&mut client, None);
        assert!(client.sent().is_empty());
        assert_eq!(client.session.take_unfinished().len(), 1);
    }
}

#[test]
fn after_a_reset_io_in_flight_is_returned_once_and_queued_io_is_sent() {
    for (steps, answered) in [(1, Function::LOGICAL_UNIT_RESET), (2, Function::TARGET_WARM_RESET)] {
        let mut client = ready();
        client.write(1, 0, &pattern(512));
        let (first, abort) = late(&mut client);
        client.read(2, 0, 512);
        let second = client.command();
        takes_the_step(&mut client, RESET_UNIT);
        let mut request = reset(&mut client, Function::LOGICAL_UNIT_RESET);
        if steps == 2 {
            takes_the_step(&mut client, RESET_TARGET);
            request = reset(&mut client, answered);
        }
        // A command sent now might or might not be covered by the reset.
        client.write(3, 0, &pattern(512));
        assert!(client.sent().is_empty());
        // One command completes normally, and the abandoned request is answered late.
        client.status(&first, ScsiStatus::GOOD, None);
        assert_eq!(client.done().0, 1);
        client.answer_task(&abort, UNKNOWN).unwrap();
        assert!(client.session.poll_returned().is_none());
        client.answer_task(&request, DONE).unwrap();
        assert_eq!(aborted(&mut client).0, 2);
        let third = client.command();
        assert!(third.tag() != first.tag() && third.tag() != second.tag());
        // The first command afterwards gets the unit attention of the reset, and is sent again.
        let reset = Sense::new(SenseKey::UNIT_ATTENTION, Asc::BUS_DEVICE_RESET_FUNCTION_OCCURRED);
        client.status(&third, ScsiStatus::CHECK_CONDITION, Some(reset));
        let again = client.command();
        client.status(&again, ScsiStatus::GOOD, None);
        assert_eq!((client.done().0, client.session.tick()), (3, 0));
        assert!(client.answer_task(&request, DONE).is_err(), "a second response to one request");
    }
}

#[test]
fn a_reset_ends_the_commands_of_every_connection() {
    let (mut client, ..) = overdue_on_two_connections(0);
    takes_the_step(&mut client, RESET_UNIT);
    client.select(0);
    let [_abort, pdu] = client.sent().try_into().unwrap();
    client.answer_task(&pdu.as_a(), DONE).unwrap();
    let mut tags = [(); 2].map(|()| client.session.poll_returned().unwrap().tag.0);
    tags.sort_unstable();
    assert_eq!(tags, [1, 2]);
    assert!(client.session.poll_returned().is_none());
    assert!(!client.session.is_awaited(0) && !client.session.is_awaited(1));
}

#[test]
fn an_internal_command_prevents_a_reset() {
    let mut client = ready();
    client.write(1, 0, &pattern(512));
    let command = client.command();
    let changed = Sense::new(SenseKey::UNIT_ATTENTION, Asc::CAPACITY_DATA_HAS_CHANGED);
    client.status(&command, ScsiStatus::CHECK_CONDITION, Some(changed));
    let [_question, again] = client.sent().try_into().unwrap();
    wait(&mut client);
    assert_eq!(client.session.abort_overdue(LIMIT), GIVE_UP);
    abort_of(&mut client, &again);
    takes_the_step(&mut client, None);
    assert!(client.sent().is_empty());
}

#[test]
fn a_management_session_sends_one_function_and_logs_out_after_its_response() {
    for response in [DONE, FunctionResponse::FUNCTION_REJECTED] {
        let mut client =
            ScriptedClient::logged_in_for(SessionPurpose::Manage(Function::CLEAR_TASK_SET), WHOLE);
        let request = reset(&mut client, Function::CLEAR_TASK_SET);
        assert_eq!(client.session.function_response(), None);
        client.answer_task(&request, response).unwrap();
        assert_eq!(client.session.function_response(), Some(response));
        let [logout] = client.sent().try_into().unwrap();
        assert_eq!(logout.bhs.opcode(), IscsiOpcode::LOGOUT_REQUEST);
        assert!(client.session.unit().is_none() && client.session.refused().is_none());
    }
}

#[test]
fn all_overdue_commands_are_aborted_one_after_the_other() {
    let mut client = ready();
    for tag in 0..3 {
        client.write(tag, 0, &pattern(512));
    }
    let commands = client.sent();
    assert_eq!(client.session.tick(), 0);
    client.write(3, 0, &pattern(512));
    let young = client.command();
    (1..LIMIT).for_each(|age| assert_eq!(client.session.tick(), age));
    assert_eq!(client.session.tick(), LIMIT);
    assert_eq!(client.session.abort_overdue(LIMIT), GIVE_UP);
    let first = abort_of(&mut client, &commands[0]);
    // One of them completes normally meanwhile.
    client.status(&commands[1], ScsiStatus::GOOD, None);
    assert_eq!(client.done().0, 1);
    client.answer_task(&first, DONE).unwrap();
    assert_eq!(aborted(&mut client).0, 0);
    let third = abort_of(&mut client, &commands[2]);
    // A tick may find the abort in progress, if it was sent after the previous tick.
    assert!(client.session.tick() < LIMIT);
    client.answer_task(&third, DONE).unwrap();
    assert_eq!(aborted(&mut client).0, 2);
    assert!(client.sent().is_empty());
    client.status(&young, ScsiStatus::GOOD, None);
    assert_eq!(client.done().0, 3);
}

#[test]
fn io_of_several_commands_is_returned_when_none_is_in_flight() {
    for has_failed in [false, true] {
        let mut client = ScriptedClient::logged_in(WHOLE);
        client.bring_up(&Unit { max_transfer: 8, ..Unit::default() });
        client.write(1, 0, &pattern(64 << 10));
        let commands = client.sent();
        assert_eq!(commands.len(), 4, "four of the sixteen pieces");
        assert_eq!(client.session.tick(), 0);
        // The others are younger, because their slots were reused.
        client.status(&commands[1], ScsiStatus::GOOD, None);
        let fifth = client.command();
        (1..=LIMIT).for_each(|age| assert_eq!(client.session.tick(), age));
        assert_eq!(client.session.abort_overdue(LIMIT), GIVE_UP);
        for command in [&commands[0], &commands[2], &commands[3]] {
            let request = abort_of(&mut client, command);
            client.answer_task(&request, DONE).unwrap();
            assert!(client.session.poll_returned().is_none());
        }
        assert!(client.sent().is_empty(), "no further piece is sent");
        if has_failed {
            let sense = Sense::new(SenseKey::MEDIUM_ERROR, Asc::UNRECOVERED_READ_ERROR);
            client.status(&fifth, ScsiStatus::CHECK_CONDITION, Some(sense));
        } else {
            client.status(&fifth, ScsiStatus::GOOD, None);
        }
        // A failure before the abort is not known to be final.
        assert_eq!(aborted(&mut client).0, 1);
    }
}

#[test]
fn a_flush_has_four_times_the_timeout_and_is_aborted_alone() {
    let mut client = ready();
    client.submit(1, Op::Flush, 0, 0, None);
    let flush = client.command();
    client.write(2, 0, &pattern(512));
    let write = client.command();
    wait(&mut client);
    assert_eq!(client.session.abort_overdue(LIMIT), GIVE_UP);
    let request = abort_of(&mut client, &write);
    client.answer_task(&request, DONE).unwrap();
    assert_eq!(aborted(&mut client).0, 2);
    while client.session.tick() < LIMIT {}
    assert_eq!(client.session.abort_overdue(LIMIT), GIVE_UP);
    let request = abort_of(&mut client, &flush);
    client.answer_task(&request, DONE).unwrap();
    assert_eq!(aborted(&mut client).0, 1);
}

#[test]
fn a_command_is_aborted_on_its_own_connection_and_only_its_response_counts() {
    let (mut client, first, second) = overdue_on_two_connections(2);
    assert!(client.sent().is_empty());
    client.select(0);
    let request = abort_of(&mut client, &first);
    client.select(1);
    assert!(client.answer_task(&request, DONE).is_err());
    client.select(0);
    client.answer_task(&request, DONE).unwrap();
    assert_eq!(aborted(&mut client).0, 1);
    client.select(1);
    let request = abort_of(&mut client, &second);
    // The connection is lost before the response: the task is reassigned and may be aborted again.
    assert!(client.session.on_lost(1, connections::now()) && client.session.poll_connect().is_some());
    client.forget_unread();
    client.exp_cmd_sn = second.as_a::<ScsiCommand>().cmd_sn.get() + 1;
    connections::log_in(&mut client, 1);
    let [moved] = client.sent().try_into().unwrap();
    assert!(client.answer_task(&request, DONE).is_err());
    assert!(connections::answer_move(&mut client, &moved, &second, DONE));
    while client.session.tick() < LIMIT {}
    assert_eq!(client.session.abort_overdue(LIMIT), GIVE_UP);
    let request = abort_of(&mut client, &second);
    client.answer_task(&request, UNKNOWN).unwrap();
    assert_eq!(aborted(&mut client).0, 2);
    // With error recovery, a response that was requested again may arrive now.
    let late = client.response(&second, ScsiStatus::GOOD);
    client.send(&late, &[]).unwrap();
}

#[test]
fn internal_commands_are_not_aborted() {
    let mut client = ready();
    client.write(1, 0, &pattern(512));
    let command = client.command();
    let changed = Sense::new(SenseKey::UNIT_ATTENTION, Asc::CAPACITY_DATA_HAS_CHANGED);
    client.status(&command, ScsiStatus::CHECK_CONDITION, Some(changed));
    let [_question, again] = client.sent().try_into().unwrap();
    wait(&mut client);
    assert_eq!(client.session.abort_overdue(LIMIT), GIVE_UP);
    let request = abort_of(&mut client, &again);
    client.answer_task(&request, DONE).unwrap();
    assert_eq!(aborted(&mut client).0, 1);
    while client.session.tick() < LIMIT {}
    assert!(client.session.abort_overdue(LIMIT).is_none() && client.sent().is_empty());
}
