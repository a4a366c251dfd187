//! Commands that get no answer, and what becomes of their I/O.

use super::connections;
use super::script::*;
use crate::iscsi::client::Mode;
use crate::scsi::{ScsiStatus, Sense};
use crate::session::{Connections, Initiator, Overdue};
use blockmux_volume::{Memory, Op, SgList};
use blockmux_wire::iscsi::scsi::*;
use blockmux_wire::iscsi::{FLAG_FINAL, IscsiOpcode};
use blockmux_wire::scsi::sense::{Asc, SenseKey};

const WHOLE: &str = "InitialR2T=No\0MaxRecvDataSegmentLength=262144\0FirstBurstLength=65536\0\
                     MaxBurstLength=65536\0";
const LOOKS: u32 = 4;
const GIVE_UP: Option<&str> = Some("to give up what it owes");
const RESET_UNIT: Option<&str> = Some("to reset the logical unit");
const RESET_TARGET: Option<&str> = Some("to reset itself");
const DONE: FunctionResponse = FunctionResponse::FUNCTION_COMPLETE;
const UNKNOWN: FunctionResponse = FunctionResponse::TASK_DOES_NOT_EXIST;

fn ready() -> Client {
    Client::ready(WHOLE, 1 << 20)
}

/// Looks until something has been under way for too long.
fn wait(client: &mut Client) {
    for _ in 0..LOOKS {
        assert!(client.session.look() < LOOKS && client.session.abort_overdue(LOOKS).is_none());
    }
    assert_eq!(client.session.look(), LOOKS);
}

/// A session with a command on each of two connections, both overdue; the second connection is
/// selected.
fn overdue_on_two_connections(error_recovery_level: u32) -> (Client, Pdu, Pdu) {
    let mut client = connections::ready(2, error_recovery_level);
    client.read(1, 0, connections::BURST);
    let first = client.command();
    client.read(2, 0, 512);
    client.select(1);
    let second = client.command();
    wait(&mut client);
    assert_eq!(client.session.abort_overdue(LOOKS), GIVE_UP);
    (client, first, second)
}

/// The one request that was sent: to abort this command.
fn abort_of(client: &mut Client, command: &Pdu) -> TaskManagementRequest {
    let [pdu] = client.sent().try_into().unwrap();
    let request: TaskManagementRequest = pdu.as_a();
    let scsi: ScsiCommand = command.as_a();
    assert_eq!((request.opcode, request.function), (0x42, 0x81));
    assert_eq!((request.referenced_task_tag, request.ref_cmd_sn), (scsi.initiator_task_tag, scsi.cmd_sn));
    assert_eq!(request.lun, scsi.lun);
    assert_ne!(request.initiator_task_tag, scsi.initiator_task_tag);
    request
}

/// The one command that was sent, which gets no answer in time, and the request to abort it.
fn late(client: &mut Client) -> (Pdu, TaskManagementRequest) {
    let command = client.command();
    wait(client);
    assert_eq!(client.session.abort_overdue(LOOKS), GIVE_UP);
    let request = abort_of(client, &command);
    (command, request)
}

/// The one I/O that was given up.
fn aborted(client: &mut Client) -> (u64, Op, Option<SgList>) {
    let io = client.session.poll_returned().expect("an I/O");
    assert!(client.session.poll_returned().is_none() && client.session.poll_done().is_none());
    (io.tag.0, io.op, io.data)
}

#[test]
fn a_command_without_an_answer_is_aborted_and_comes_back_when_that_is_answered() {
    for response in [DONE, UNKNOWN] {
        let mut client = ready();
        client.write(1, 0, &pattern(512));
        let (command, request) = late(&mut client);
        assert_eq!(request.cmd_sn.get(), command.as_a::<ScsiCommand>().cmd_sn.get() + 1, "takes no number");
        // Its tag is not free before that is answered, and its memory not handed back.
        client.read(2, 0, 512);
        let other = client.command();
        assert_ne!(other.tag() & 0xffff, command.tag() & 0xffff);
        assert!(client.session.poll_returned().is_none());
        client.answer_task(&request, response).unwrap();
        let (tag, op, data) = aborted(&mut client);
        assert_eq!((tag, op, data.unwrap().to_vec()), (1, Op::Write { fua: false }, pattern(512)));
        client.data(&other, &pattern(512));
        assert_eq!(client.done_data(), pattern(512));
        // Not even then is the tag the same one again.
        for _ in 0..2 {
            client.read(3, 0, 512);
            let next = client.command();
            assert_ne!(next.tag(), command.tag());
            client.data(&next, &pattern(512));
            assert!(client.done().1.is_ok());
        }
        assert_eq!(client.session.look(), 0);
    }
}

#[test]
fn what_comes_before_the_answer_is_taken_and_what_comes_after_it_ends_the_session() {
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
            assert_eq!(error.what, "sent data for a task that is not there");
            assert_eq!(memory.to_vec(), [7; 1024]);
        } else {
            client.send(&rest, &pattern(1024)[512..]).unwrap();
            assert_eq!(client.done_data(), pattern(1024));
            client.answer_task(&request, UNKNOWN).unwrap();
            assert!(client.session.poll_returned().is_none());
            assert!(client.answer_task(&request, UNKNOWN).is_err(), "it is answered once");
        }
    }
}

/// The one request that was sent: for this function of the unit, or of the target.
fn reset(client: &mut Client, function: Function) -> TaskManagementRequest {
    let [pdu] = client.sent().try_into().unwrap();
    let request: TaskManagementRequest = pdu.as_a();
    assert_eq!((request.opcode, request.function), (0x42, 0x80 | function.0));
    assert_eq!(request.referenced_task_tag.get(), u32::MAX);
    request
}

/// The next look takes this step.
fn takes_the_step(client: &mut Client, step: Option<&str>) {
    assert!(client.session.look() >= LOOKS);
    assert_eq!(client.session.abort_overdue(LOOKS), step);
}

#[test]
fn what_cannot_be_aborted_ends_by_a_reset_of_the_unit_or_of_the_target_or_by_another_connection() {
    for response in [Some(FunctionResponse::TASK_MANAGEMENT_FUNCTION_NOT_SUPPORTED), None] {
        let mut client = ready();
        client.write(1, 0, &pattern(512));
        let (_, request) = late(&mut client);
        let answer = |client: &mut Client, request| {
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
fn after_a_reset_all_that_was_under_way_comes_back_once_and_what_waited_is_sent() {
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
        // Whether a command that is sent now would meet the reset nobody could say.
        client.write(3, 0, &pattern(512));
        assert!(client.sent().is_empty());
        // One ends by itself, and the request that was given up on is answered after all.
        client.status(&first, ScsiStatus::GOOD, None);
        assert_eq!(client.done().0, 1);
        client.answer_task(&abort, UNKNOWN).unwrap();
        assert!(client.session.poll_returned().is_none());
        client.answer_task(&request, DONE).unwrap();
        assert_eq!(aborted(&mut client).0, 2);
        let third = client.command();
        assert!(third.tag() != first.tag() && third.tag() != second.tag());
        // The first that is sent then is told of the reset, and sent again.
        let told = Sense::new(SenseKey::UNIT_ATTENTION, Asc::BUS_DEVICE_RESET_FUNCTION_OCCURRED);
        client.status(&third, ScsiStatus::CHECK_CONDITION, Some(told));
        let again = client.command();
        client.status(&again, ScsiStatus::GOOD, None);
        assert_eq!((client.done().0, client.session.look()), (3, 0));
        assert!(client.answer_task(&request, DONE).is_err(), "it is answered once");
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
fn a_question_of_the_session_itself_is_not_reset_away() {
    let mut client = ready();
    client.write(1, 0, &pattern(512));
    let command = client.command();
    let changed = Sense::new(SenseKey::UNIT_ATTENTION, Asc::CAPACITY_DATA_HAS_CHANGED);
    client.status(&command, ScsiStatus::CHECK_CONDITION, Some(changed));
    let [_question, again] = client.sent().try_into().unwrap();
    wait(&mut client);
    assert_eq!(client.session.abort_overdue(LOOKS), GIVE_UP);
    abort_of(&mut client, &again);
    takes_the_step(&mut client, None);
    assert!(client.sent().is_empty());
}

#[test]
fn a_session_that_is_to_manage_asks_for_one_function_and_leaves_with_the_answer() {
    for response in [DONE, FunctionResponse::FUNCTION_REJECTED] {
        let mut client = Client::logged_in_for(Mode::Manage(Function::CLEAR_TASK_SET), WHOLE);
        let request = reset(&mut client, Function::CLEAR_TASK_SET);
        assert_eq!(client.session.managed(), None);
        client.answer_task(&request, response).unwrap();
        assert_eq!(client.session.managed(), Some(response));
        let [logout] = client.sent().try_into().unwrap();
        assert_eq!(logout.bhs.opcode(), IscsiOpcode::LOGOUT_REQUEST);
        assert!(client.session.unit().is_none() && client.session.refused().is_none());
    }
}

#[test]
fn all_that_were_there_as_long_are_aborted_in_turn_and_no_others() {
    let mut client = ready();
    for tag in 0..3 {
        client.write(tag, 0, &pattern(512));
    }
    let commands = client.sent();
    assert_eq!(client.session.look(), 0);
    client.write(3, 0, &pattern(512));
    let young = client.command();
    (1..LOOKS).for_each(|look| assert_eq!(client.session.look(), look));
    assert_eq!(client.session.look(), LOOKS);
    assert_eq!(client.session.abort_overdue(LOOKS), GIVE_UP);
    let first = abort_of(&mut client, &commands[0]);
    // One of them ends by itself meanwhile.
    client.status(&commands[1], ScsiStatus::GOOD, None);
    assert_eq!(client.done().0, 1);
    client.answer_task(&first, DONE).unwrap();
    assert_eq!(aborted(&mut client).0, 0);
    let third = abort_of(&mut client, &commands[2]);
    // A look may find the abort of a command under way, if it was sent since the one before.
    assert!(client.session.look() < LOOKS);
    client.answer_task(&third, DONE).unwrap();
    assert_eq!(aborted(&mut client).0, 2);
    assert!(client.sent().is_empty());
    client.status(&young, ScsiStatus::GOOD, None);
    assert_eq!(client.done().0, 3);
}

#[test]
fn an_io_of_several_commands_comes_back_when_none_of_them_is_under_way() {
    for has_failed in [false, true] {
        let mut client = Client::logged_in(WHOLE);
        client.bring_up(&Unit { max_transfer: 8, ..Unit::default() });
        client.write(1, 0, &pattern(64 << 10));
        let commands = client.sent();
        assert_eq!(commands.len(), 4, "of sixteen");
        assert_eq!(client.session.look(), 0);
        // The others are younger, as their places were taken anew.
        client.status(&commands[1], ScsiStatus::GOOD, None);
        let fifth = client.command();
        (1..=LOOKS).for_each(|look| assert_eq!(client.session.look(), look));
        assert_eq!(client.session.abort_overdue(LOOKS), GIVE_UP);
        for command in [&commands[0], &commands[2], &commands[3]] {
            let request = abort_of(&mut client, command);
            client.answer_task(&request, DONE).unwrap();
            assert!(client.session.poll_returned().is_none());
        }
        assert!(client.sent().is_empty(), "no more of it is sent");
        if has_failed {
            let sense = Sense::new(SenseKey::MEDIUM_ERROR, Asc::UNRECOVERED_READ_ERROR);
            client.status(&fifth, ScsiStatus::CHECK_CONDITION, Some(sense));
        } else {
            client.status(&fifth, ScsiStatus::GOOD, None);
        }
        // What failed before that is not known to have failed for good.
        assert_eq!(aborted(&mut client).0, 1);
    }
}

#[test]
fn a_flush_has_four_times_as_long_and_is_aborted_alone() {
    let mut client = ready();
    client.submit(1, Op::Flush, 0, 0, None);
    let flush = client.command();
    client.write(2, 0, &pattern(512));
    let write = client.command();
    wait(&mut client);
    assert_eq!(client.session.abort_overdue(LOOKS), GIVE_UP);
    let request = abort_of(&mut client, &write);
    client.answer_task(&request, DONE).unwrap();
    assert_eq!(aborted(&mut client).0, 2);
    while client.session.look() < LOOKS {}
    assert_eq!(client.session.abort_overdue(LOOKS), GIVE_UP);
    let request = abort_of(&mut client, &flush);
    client.answer_task(&request, DONE).unwrap();
    assert_eq!(aborted(&mut client).0, 1);
}

#[test]
fn a_command_is_aborted_on_its_own_connection_and_not_over_another_one_s_answer() {
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
    // Its connection is lost before that is answered: its task is moved, and may be aborted again.
    assert!(client.session.on_lost(1, connections::now()) && client.session.poll_connect().is_some());
    client.forget_unread();
    client.exp_cmd_sn = second.as_a::<ScsiCommand>().cmd_sn.get() + 1;
    connections::log_in(&mut client, 1);
    let [moved] = client.sent().try_into().unwrap();
    assert!(client.answer_task(&request, DONE).is_err());
    assert!(connections::answer_move(&mut client, &moved, &second, DONE));
    while client.session.look() < LOOKS {}
    assert_eq!(client.session.abort_overdue(LOOKS), GIVE_UP);
    let request = abort_of(&mut client, &second);
    client.answer_task(&request, UNKNOWN).unwrap();
    assert_eq!(aborted(&mut client).0, 2);
    // With recovery, an answer that was asked for again may come now.
    let late = client.response(&second, ScsiStatus::GOOD);
    client.send(&late, &[]).unwrap();
}

#[test]
fn questions_of_the_session_itself_are_not_aborted() {
    let mut client = ready();
    client.write(1, 0, &pattern(512));
    let command = client.command();
    let changed = Sense::new(SenseKey::UNIT_ATTENTION, Asc::CAPACITY_DATA_HAS_CHANGED);
    client.status(&command, ScsiStatus::CHECK_CONDITION, Some(changed));
    let [_question, again] = client.sent().try_into().unwrap();
    wait(&mut client);
    assert_eq!(client.session.abort_overdue(LOOKS), GIVE_UP);
    let request = abort_of(&mut client, &again);
    client.answer_task(&request, DONE).unwrap();
    assert_eq!(aborted(&mut client).0, 1);
    while client.session.look() < LOOKS {}
    assert!(client.session.abort_overdue(LOOKS).is_none() && client.sent().is_empty());
}
