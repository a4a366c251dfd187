//! Tasks that outlive their connection (error recovery level 2).

use super::connections::{Scene, function_response, join_request, logout, logout_result, manage, names};
use super::*;
use crate::driver::session::Timed;
use crate::driver::target::{IoSource, SessionStage, TargetLifecycle};
use crate::scsi::ScsiStatus;
use std::time::Duration;
use std::time::Instant;

const LEVEL_2: &str = "ErrorRecoveryLevel=2\0DefaultTime2Wait=2\0DefaultTime2Retain=10\0";

/// A leading connection whose responses so far are acknowledged.
fn lead(scene: &Scene, keys: &str) -> (ScriptedInitiator, u16) {
    let (mut leading, tsih) = scene.lead(&format!("{LEVEL_2}{keys}"));
    leading.acknowledge(103);
    (leading, tsih)
}

impl ScriptedInitiator {
    /// Breaks the connection; its driver continues.
    fn lose(&mut self) {
        let _ = self.pump.session.on_end(Instant::now());
        assert!(self.is_closed() && self.pump.session.stage() == SessionStage::Lingering);
        drop(self.receive());
    }

    fn reassign(&mut self, itt: u32, exp_data_sn: u32) -> Vec<TargetPdu> {
        let mut request = manage(Function::TASK_REASSIGN, 0, itt);
        request.exp_data_sn = exp_data_sn.into();
        self.exchange(&request, b"")
    }

    /// Advances the clock; returns whether the connection is still lingering.
    fn wait(&mut self, time: Duration) -> bool {
        assert!(self.turn().is_empty());
        let Some(begin) = self.pump.session.poll_timeout() else { return false };
        let mut now = begin;
        while now <= begin + time
            && let Some(next) = self.pump.session.poll_timeout()
        {
            now = next.max(now);
            self.pump.session.on_timeout(now).unwrap();
        }
        self.pump.session.stage() == SessionStage::Lingering
    }

    /// Received PDUs other than messages about lost connections.
    fn responses(&mut self) -> Vec<TargetPdu> {
        let mut responses = self.turn();
        responses.retain(|pdu| pdu.bhs.opcode() != IscsiOpcode::ASYNC_MESSAGE);
        responses
    }
}

#[test]
fn a_reassigned_read_continues_and_is_answered_on_the_new_connection() {
    for (begins_before, ends_before) in [(true, true), (true, false), (false, false)] {
        let scene = Scene::new();
        let (mut first, tsih) = lead(&scene, "");
        let mut second = scene.join(tsih, 8, "");
        scene.command(&mut second, 0, &write10(0, 1), None, Some(&[7; 512]));
        first.pump.holds_io = true;
        let itt = scene.cmd_sn();
        assert!(scene.command(&mut first, 0, &read10(0, 1), Some(512), None).is_empty());
        assert!(begins_before || !first.pump.submitted.is_empty());
        first.lose();
        let [event] = second.turn().try_into().unwrap();
        let event: AsyncMessage = event.as_a();
        assert_eq!(AsyncEvent(event.async_event), AsyncEvent::CONNECTION_DROP);
        assert_eq!((event.parameter1.get(), event.parameter2.get(), event.parameter3.get()), (7, 2, 10));
        if ends_before {
            first.pump.finish_one();
            assert!(first.receive().is_empty(), "the connection is gone, so no response is sent");
        }
        let mut responses = second.reassign(itt, 0);
        assert_eq!(function_response(&responses.remove(0)), FunctionResponse::FUNCTION_COMPLETE);
        if !ends_before {
            assert!(responses.is_empty());
            assert!(first.turn().is_empty());
            first.pump.finish_one();
            responses = second.turn();
        }
        let bytes: Vec<u8> = responses.iter().flat_map(|pdu| pdu.data.clone()).collect();
        assert_eq!(bytes, [7; 512]);
        assert!(!first.wait(Duration::ZERO), "the session has ended");
        let [gone] = second.reassign(itt, 0).try_into().unwrap();
        assert_eq!(function_response(&gone), FunctionResponse::TASK_DOES_NOT_EXIST);
    }
}

#[test]
fn an_unacknowledged_response_is_sent_from_exp_data_sn_on() {
    let data = pattern(4096);
    for (asked, segment, expected) in [(0, 1024, 4), (2, 1024, 2), (2, 512, 4), (4, 1024, 0), (99, 1024, 4)] {
        let scene = Scene::new();
        let (mut first, tsih) = lead(&scene, "MaxRecvDataSegmentLength=1024\0");
        let mut second = scene.join(tsih, 8, &format!("MaxRecvDataSegmentLength={segment}\0"));
        scene.command(&mut second, 0, &write10(0, 8), None, Some(&data));
        let itt = scene.cmd_sn();
        assert_eq!(scene.command(&mut first, 0, &read10(0, 8), Some(4096), None).len(), 4);
        first.lose();
        second.responses();
        // Values out of range are ignored (RFC 7143 §11.5.6).
        let exp_data_sn = if asked > 4 { 0 } else { asked };
        let responses = second.reassign(itt, asked);
        let (status, parts) = responses[1..].split_last().unwrap();
        let numbers: Vec<u32> = parts.iter().map(|pdu| pdu.as_a::<DataIn>().data_sn.get()).collect();
        assert_eq!(numbers, (exp_data_sn..exp_data_sn + expected).collect::<Vec<_>>());
        let bytes: Vec<u8> = parts.iter().flat_map(|pdu| pdu.data.clone()).collect();
        assert!(bytes == data[4096.min(exp_data_sn as usize * 1024)..], "{exp_data_sn} {segment}");
        let response = assert_good(status);
        assert_eq!(response.exp_data_sn.get(), exp_data_sn + expected);
        // It has this connection's next StatSN and can be lost again.
        let stat_sn = response.stat_sn.get();
        assert_eq!(stat_sn, responses[0].as_a::<TaskManagementFunctionResponse>().stat_sn.get() + 1);
        second.lose();
        let mut third = scene.join(tsih, 9, "");
        assert_eq!(third.reassign(itt, exp_data_sn).last().unwrap().bhs.opcode(), IscsiOpcode::SCSI_RESPONSE);
    }
}

#[test]
fn an_acknowledged_response_is_no_longer_retained() {
    let scene = Scene::new();
    let (mut first, tsih) = lead(&scene, "");
    let itt = scene.cmd_sn();
    let [answer] = scene.command(&mut first, 0, &[0; 6], None, None).try_into().unwrap();
    let mut next = scene.request(&mut first, 0, &[0; 6], None, None);
    next.exp_stat_sn = (answer.as_a::<ScsiResponse>().stat_sn.get() + 1).into();
    first.exchange(&next, b"");
    first.lose();
    let mut second = scene.join(tsih, 8, "");
    let [gone] = second.reassign(itt, 0).try_into().unwrap();
    assert_eq!(function_response(&gone), FunctionResponse::TASK_DOES_NOT_EXIST);
    let [found, _] = second.reassign(itt + 1, 0).try_into().unwrap();
    assert_eq!(function_response(&found), FunctionResponse::FUNCTION_COMPLETE);
}

/// Answers R2Ts with `data` until the command completes; returns the R2Ts.
fn give(
    initiator: &mut ScriptedInitiator,
    itt: u32,
    data: &[u8],
    mut responses: Vec<TargetPdu>,
) -> Vec<IscsiR2t> {
    let mut asked = Vec::new();
    loop {
        responses.retain(|pdu| pdu.bhs.opcode() != IscsiOpcode::TASK_MANAGEMENT_RESPONSE);
        let [answer] = responses.try_into().map_err(|responses| format!("{responses:?}")).unwrap();
        if answer.bhs.opcode() != IscsiOpcode::R2T {
            assert_good(&answer);
            return asked;
        }
        let r2t: IscsiR2t = answer.as_a();
        asked.push(r2t);
        let begin = r2t.buffer_offset.get() as usize;
        let end = begin + r2t.desired_data_transfer_length.get() as usize;
        let pdu = data_out(itt, r2t.target_transfer_tag.get(), 0, begin as u32, true);
        responses = initiator.exchange(&pdu, &data[begin..end]);
    }
}

#[test]
fn the_missing_part_of_an_interrupted_write_is_requested() {
    let data = pattern(1024);
    for (keys, immediate) in [("ImmediateData=No\0", 0), ("InitialR2T=No\0", 256)] {
        let keys = format!("{keys}FirstBurstLength=512\0MaxBurstLength=512\0DataDigest=CRC32C\0");
        for at in (0..1400).step_by(7) {
            let scene = Scene::new();
            let (mut first, tsih) = lead(&scene, &keys);
            let mut second = scene.join(tsih, 8, "");
            let mut command = scene.request(&mut first, 0, &write10(0, 2), None, Some(1024));
            let itt = command.initiator_task_tag.get();
            let mut bytes;
            if immediate > 0 {
                command.flags &= !FLAG_FINAL;
                bytes = first.frame(command.as_bytes(), &data[..immediate]);
                for (data_sn, offset) in [(0, 256), (1, 384)] {
                    let pdu = data_out(itt, RESERVED_TAG, data_sn, offset, offset == 384);
                    let range = offset as usize..offset as usize + 128;
                    bytes.extend(first.frame(pdu.as_bytes(), &data[range]));
                }
            } else {
                let [r2t] = first.exchange(&command, b"").try_into().unwrap();
                bytes = Vec::new();
                for (data_sn, offset) in [(0, 0), (1, 256)] {
                    let ttt = r2t.as_a::<IscsiR2t>().target_transfer_tag.get();
                    let pdu = data_out(itt, ttt, data_sn, offset, offset == 256);
                    let range = offset as usize..offset as usize + 256;
                    bytes.extend(first.frame(pdu.as_bytes(), &data[range]));
                }
            }
            first.pump.client_sends(&bytes[..at.min(bytes.len())]).unwrap();
            let seen = first.receive().len() as u32;
            first.lose();
            second.responses();
            let responses = second.reassign(itt, seen + u32::from(immediate == 0));
            let is_known = function_response(&responses[0]) == FunctionResponse::FUNCTION_COMPLETE;
            if is_known {
                let asked = give(&mut second, itt, &data, responses);
                assert!(
                    asked
                        .iter()
                        .zip(0..)
                        .all(|(r2t, nth)| { r2t.r2t_sn.get() == seen + u32::from(immediate == 0) + nth })
                );
            } else {
                // The write was incomplete, so the initiator sends it again.
                command.flags |= FLAG_FINAL;
                let responses = second.exchange(&command, b"");
                give(&mut second, itt, &data, responses);
            }
            let read = scene.command(&mut second, 0, &read10(0, 2), Some(1024), None);
            let bytes: Vec<u8> = read.into_iter().flat_map(|pdu| pdu.data).collect();
            assert!(bytes == data, "{immediate} {at}");
        }
    }
}

#[test]
fn a_write_in_flight_executes_once_and_is_answered_on_the_new_connection() {
    let scene = Scene::new();
    let (mut first, tsih) = lead(&scene, "");
    let mut second = scene.join(tsih, 8, "");
    first.pump.holds_io = true;
    let itt = scene.cmd_sn();
    assert!(scene.command(&mut first, 0, &write10(0, 1), None, Some(&[7; 512])).is_empty());
    first.lose();
    second.responses();
    assert_eq!(second.reassign(itt, 0).len(), 1);
    assert!(second.pump.submitted.is_empty(), "the task is not executed again");
    first.pump.finish_one();
    let [answer] = second.turn().try_into().unwrap();
    assert_good(&answer);
}

#[test]
fn only_tasks_of_a_failed_connection_can_be_reassigned() {
    let scene = Scene::new();
    let (mut first, tsih) = lead(&scene, "");
    let mut second = scene.join(tsih, 8, "");
    first.pump.holds_io = true;
    let itt = scene.cmd_sn();
    assert!(scene.command(&mut first, 0, &read10(0, 1), Some(512), None).is_empty());
    for connection in [&mut first, &mut second] {
        let [answer] = connection.reassign(itt, 0).try_into().unwrap();
        assert_eq!(function_response(&answer), FunctionResponse::TASK_STILL_ALLEGIANT);
    }
    for unknown in 1000..2000 {
        let [answer] = second.reassign(unknown, 0).try_into().unwrap();
        assert_eq!(function_response(&answer), FunctionResponse::TASK_DOES_NOT_EXIST);
    }
}

#[test]
fn a_connection_is_removed_for_recovery_by_another_by_itself_or_by_its_successor() {
    for way in 0..3 {
        let scene = Scene::new();
        let (mut first, tsih) = lead(&scene, "");
        first.pump.holds_io = true;
        let itt = scene.cmd_sn();
        assert!(scene.command(&mut first, 0, &read10(0, 1), Some(512), None).is_empty());
        let remove = |cid| logout(LogoutReasonCode::REMOVE_CONNECTION_FOR_RECOVERY, cid);
        let mut second = match way {
            0 => {
                let mut second = scene.join(tsih, 8, "");
                assert!(second.exchange(&remove(7), b"").is_empty());
                assert!(first.turn().is_empty());
                let [answer] = second.turn().try_into().unwrap();
                let response: LogoutResponse = answer.as_a();
                assert_eq!(logout_result(&answer), LogoutResult::CLOSED_SUCCESSFULLY);
                assert_eq!((response.time2wait.get(), response.time2retain.get()), (2, 10));
                second
            }
            1 => {
                let [answer] = first.exchange(&remove(7), b"").try_into().unwrap();
                assert_eq!(logout_result(&answer), LogoutResult::CLOSED_SUCCESSFULLY);
                scene.join(tsih, 8, "")
            }
            _ => {
                let mut again = scene.connect(1);
                assert!(again.exchange(&join_request(tsih, 7), names().as_bytes()).is_empty());
                assert!(first.turn().is_empty());
                let due = again.pump.session.poll_timeout().unwrap();
                again.pump.session.on_timeout(due).unwrap();
                assert_eq!(again.receive()[0].as_a::<IscsiLoginResponse>().status.get(), 0);
                again
            }
        };
        assert!(first.is_closed() && first.pump.session.stage() == SessionStage::Lingering);
        if way < 2 {
            let [again] = second.exchange(&remove(7), b"").try_into().unwrap();
            assert_eq!(logout_result(&again), LogoutResult::CLOSED_SUCCESSFULLY);
        }
        let [unknown] = second.exchange(&remove(99), b"").try_into().unwrap();
        assert_eq!(logout_result(&unknown), LogoutResult::CID_NOT_FOUND);
        assert_eq!(second.reassign(itt, 0).len(), 1);
        first.pump.finish_one();
        assert_eq!(second.turn().len(), 1);
    }
}

#[test]
fn tasks_that_are_not_reassigned_end_after_time2wait_and_time2retain() {
    let scene = Scene::new();
    let (mut first, tsih) = lead(&scene, "ImmediateData=No\0");
    let mut second = scene.join(tsih, 8, "");
    let command = scene.request(&mut first, 0, &write10(0, 1), None, Some(512));
    let itt = command.initiator_task_tag.get();
    assert_eq!(first.exchange(&command, b"").len(), 1);
    first.lose();
    second.responses();
    assert!(first.wait(Duration::from_millis(11_900)));
    assert!(!first.wait(Duration::from_millis(200)));
    let [gone] = second.reassign(itt, 0).try_into().unwrap();
    assert_eq!(function_response(&gone), FunctionResponse::TASK_DOES_NOT_EXIST);
    assert_good(&scene.command(&mut second, 0, &[0; 6], None, None)[0]);
    // Without any connection, the session ends.
    second.lose();
    assert!(second.wait(Duration::from_millis(11_900)));
    assert!(!second.wait(Duration::from_millis(200)));
    let mut late = scene.connect(1);
    let status = late.login_error(&join_request(tsih, 9), names().as_bytes()).0;
    assert_eq!(status, LoginStatus::SESSION_DOES_NOT_EXIST);
}

/// A session of the same initiator through another port.
fn other_port(scene: &Scene, port: u8) -> ScriptedInitiator {
    let mut other = scene.connect(1);
    let mut request = login_request(0x87);
    request.isid = [0x80, 9, 9, 9, 9, port];
    let [response] = other.exchange(&request, names().as_bytes()).try_into().unwrap();
    assert_eq!(response.as_a::<IscsiLoginResponse>().status.get(), 0);
    other
}

#[test]
fn below_level_2_the_tasks_of_a_lost_session_end_and_its_nexus_lasts_for_time2wait_and_time2retain() {
    const RESERVE: [u8; 6] = [0x16, 0, 0, 0, 0, 0];
    for (times, lasts) in
        [("DefaultTime2Wait=2\0DefaultTime2Retain=10\0", true), ("DefaultTime2Retain=0\0", false)]
    {
        let scene = Scene::new();
        let (mut first, tsih) = scene.lead(times);
        assert_good(&scene.command(&mut first, 0, &RESERVE, None, None)[0]);
        first.pump.holds_io = true;
        assert!(scene.command(&mut first, 0, &write10(0, 1), None, Some(&[7; 512])).is_empty());
        let _ = first.pump.session.on_end(Instant::now());
        assert!(first.is_closed());
        assert_eq!(first.pump.session.stage() == SessionStage::Lingering, lasts);
        assert!(first.pump.session.poll_cancel().is_some(), "the canceled task is no longer needed");
        // The session is not continued: commands in flight on it are lost.
        let mut late = scene.connect(1);
        let status = late.login_error(&join_request(tsih, 7), names().as_bytes()).0;
        assert_eq!(status, LoginStatus::SESSION_DOES_NOT_EXIST);
        if !lasts {
            continue;
        }
        let mut other = other_port(&scene, 1);
        let mut asks = || {
            let answer = other.command(0, &write10(0, 1), None, Some(&[1; 512]));
            ScsiStatus(answer[0].as_a::<ScsiResponse>().status)
        };
        assert_eq!([asks(), asks()], [ScsiStatus::CHECK_CONDITION, ScsiStatus::RESERVATION_CONFLICT]);
        first.pump.holds_io = false;
        assert!(first.wait(Duration::from_millis(11_900)));
        assert_eq!(asks(), ScsiStatus::RESERVATION_CONFLICT);
        assert!(!first.wait(Duration::from_millis(200)));
        drop(first);
        assert_eq!(asks(), ScsiStatus::GOOD);
    }
}

#[test]
fn a_retained_session_ends_when_its_initiator_logs_in_again() {
    let scene = Scene::new();
    let (mut first, _) = scene.lead("DefaultTime2Retain=3600\0");
    first.lose();
    let mut again = scene.connect(1);
    assert!(again.exchange(&login_request(0x87), names().as_bytes()).is_empty());
    assert!(!first.wait(Duration::ZERO));
    drop(first);
    let until = again.pump.session.poll_timeout().unwrap();
    again.pump.session.on_timeout(until).unwrap();
    let [response] = again.receive().try_into().unwrap();
    assert_eq!(response.as_a::<IscsiLoginResponse>().status.get(), 0);
}

#[test]
fn a_session_without_connections_continues_with_the_next_one() {
    let scene = Scene::new();
    let (mut first, tsih) = lead(&scene, "");
    let lost = scene.request(&mut first, 0, &write10(0, 1), None, Some(512));
    assert!(
        scene.command(&mut first, 0, &read10(0, 1), Some(512), None).is_empty(),
        "the command waits for an earlier CmdSN"
    );
    let waited = scene.cmd_sn() - 1;
    first.lose();
    assert!(first.wait(Duration::from_secs(1)), "the session waits for reinstatement");
    let mut second = scene.join(tsih, 7, "");
    assert!(!first.wait(Duration::ZERO), "the failed connection has no tasks left");
    // The command that never executed is sent again with its CmdSN.
    assert_good(&second.exchange(&lost, &[7; 512])[0]);
    second.cmd_sn = waited;
    let read = second.request(0, &read10(0, 1), Some(512), None);
    let [read] = second.exchange(&read, b"").try_into().unwrap();
    assert_eq!(read.data, [7; 512]);
}

#[test]
fn a_new_session_does_not_wait_for_a_retained_nexus() {
    let scene = Scene::new();
    let (mut first, _) = lead(&scene, "ImmediateData=No\0");
    let command = scene.request(&mut first, 0, &write10(0, 1), None, Some(512));
    first.exchange(&command, b"");
    first.lose();
    let mut again = scene.connect(1);
    assert!(again.exchange(&login_request(0x87), names().as_bytes()).is_empty());
    assert!(!first.wait(Duration::ZERO));
    drop(first);
    let due = again.pump.session.poll_timeout().unwrap();
    again.pump.session.on_timeout(due).unwrap();
    assert_eq!(again.receive().len(), 1);
}

#[test]
fn the_oldest_of_too_many_failed_connections_ends() {
    let scene = Scene::new();
    let (mut leading, tsih) = lead(&scene, "");
    let mut failed = Vec::new();
    for _ in 0..6 {
        let mut connection = scene.join(tsih, 8, "");
        connection.pump.holds_io = true;
        let itt = scene.cmd_sn();
        assert!(scene.command(&mut connection, 0, &read10(0, 1), Some(512), None).is_empty());
        connection.lose();
        failed.push((connection, itt));
    }
    leading.responses();
    let lingers: Vec<bool> = failed
        .iter_mut()
        .map(|(connection, _)| {
            connection.turn();
            connection.pump.session.stage() == SessionStage::Lingering
        })
        .collect();
    assert_eq!(lingers, [false, false, true, true, true, true]);
    for (at, (_, itt)) in failed.iter().enumerate() {
        let [answer] = leading.reassign(*itt, 0).try_into().unwrap();
        let expected =
            if at < 2 { FunctionResponse::TASK_DOES_NOT_EXIST } else { FunctionResponse::FUNCTION_COMPLETE };
        assert_eq!(function_response(&answer), expected, "{at}");
    }
}

#[test]
fn a_task_of_a_failed_connection_can_be_aborted_before_and_after_it_was_taken() {
    for is_taken in [false, true] {
        for is_in_flight in [false, true] {
            let scene = Scene::new();
            let (mut first, tsih) = lead(&scene, "ImmediateData=No\0");
            let mut second = scene.join(tsih, 8, "");
            first.pump.holds_io = true;
            let (cdb, reads, writes) = match is_in_flight {
                true => (read10(0, 1), Some(512), None),
                false => (write10(0, 1), None, Some(512)),
            };
            let command = scene.request(&mut first, 0, &cdb, reads, writes);
            let itt = command.initiator_task_tag.get();
            first.exchange(&command, b"");
            first.lose();
            second.responses();
            if is_taken {
                second.reassign(itt, 1);
            }
            let responses = second.exchange(&manage(Function::ABORT_TASK, 0, itt), b"");
            first.turn();
            let answer = match is_in_flight {
                true => {
                    assert!(responses.is_empty());
                    assert_eq!(first.pump.cancelled.len(), 1);
                    first.pump.finish_one();
                    second.turn()
                }
                false if is_taken => responses,
                false => second.turn(),
            };
            let [answer] = answer.try_into().unwrap();
            assert_eq!(function_response(&answer), FunctionResponse::FUNCTION_COMPLETE);
            assert!(!first.wait(Duration::ZERO), "{is_taken} {is_in_flight}");
            assert_good(&scene.command(&mut second, 0, &[0; 6], None, None)[0]);
        }
    }
}

#[test]
fn the_slot_of_a_reassigned_task_stays_occupied_until_its_io_completes() {
    let scene = Scene::new();
    let (mut first, tsih) = lead(&scene, "");
    let (mut second, mut third) = (scene.join(tsih, 8, ""), scene.join(tsih, 9, ""));
    first.pump.holds_io = true;
    let itt = scene.cmd_sn();
    assert!(scene.command(&mut first, 0, &read10(0, 1), Some(512), None).is_empty());
    first.lose();
    second.responses();
    second.reassign(itt, 0);
    drop(second);
    third.responses();
    // No other task may use this slot meanwhile.
    third.pump.holds_io = true;
    assert!(scene.command(&mut third, 0, &read10(0, 1), Some(512), None).is_empty());
    assert_ne!(third.pump.submitted[0].1.tag, first.pump.submitted[0].1.tag);
    first.pump.finish_one();
    third.pump.finish_one();
    assert_eq!(third.responses().len(), 1);
}

#[test]
fn a_reassigned_task_fails_when_the_driver_of_its_io_ends() {
    let scene = Scene::new();
    let (mut first, tsih) = lead(&scene, "");
    let mut second = scene.join(tsih, 8, "");
    first.pump.holds_io = true;
    let itt = scene.cmd_sn();
    assert!(scene.command(&mut first, 0, &read10(0, 1), Some(512), None).is_empty());
    first.lose();
    second.responses();
    second.reassign(itt, 0);
    drop(first);
    let [answer] = second.responses().try_into().unwrap();
    assert_eq!(answer.as_a::<ScsiResponse>().status, 2);
}
