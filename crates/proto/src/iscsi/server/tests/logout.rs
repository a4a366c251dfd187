//! A stopping target: logouts, missing logouts, and commands in flight.

use super::connections::{logout, logout_result};
use super::*;
use crate::driver::session::Timed;
use crate::driver::target::{SessionStage, TargetLifecycle};
use std::time::Duration;
use std::time::Instant;

/// The only PDU that the target has sent: its event and Parameter3.
fn event(initiator: &mut ScriptedInitiator) -> (AsyncEvent, u16) {
    let [event] = initiator.receive().try_into().unwrap();
    assert_eq!(event.bhs.opcode(), IscsiOpcode::ASYNC_MESSAGE);
    let message: AsyncMessage = event.as_a();
    (AsyncEvent(message.async_event), message.parameter3.get())
}

/// Advances the session's clock to `now`.
fn pass(initiator: &mut ScriptedInitiator, now: Instant) {
    initiator.pump.session.on_timeout(now).unwrap();
}

/// A session with a read that the volume has not completed.
fn with_a_read_in_flight() -> ScriptedInitiator {
    let mut initiator = ScriptedInitiator::log_in("");
    initiator.pump.holds_io = true;
    assert!(initiator.command(0, &read10(0, 1), Some(512), None).is_empty());
    initiator
}

#[test]
fn a_stopping_target_requests_a_logout_and_completes_commands_in_flight() {
    let mut initiator = with_a_read_in_flight();
    initiator.pump.session.on_stop(Instant::now());
    assert_eq!(event(&mut initiator), (AsyncEvent::LOGOUT_REQUEST, 1));
    initiator.pump.session.on_stop(Instant::now());
    let [busy] = initiator.command(0, &read10(0, 1), Some(512), None).try_into().unwrap();
    assert_eq!(busy.as_a::<ScsiResponse>().status, 8);
    initiator.pump.finish_one();
    let [data] = initiator.receive().try_into().unwrap();
    assert_eq!((data.bhs.opcode(), data.data.len()), (IscsiOpcode::DATA_IN, 512));
    assert!(!initiator.is_closed(), "the logout deadline has not passed");
    let [answer] = initiator.exchange(&logout(LogoutReasonCode::CLOSE_SESSION, 7), b"").try_into().unwrap();
    assert_eq!(logout_result(&answer), LogoutResult::CLOSED_SUCCESSFULLY);
    assert!(initiator.is_closed());
}

#[test]
fn an_initiator_that_does_not_log_out_is_dropped_after_its_deadline() {
    let mut initiator = ScriptedInitiator::log_in("");
    initiator.pump.session.on_stop(Instant::now());
    assert_eq!(event(&mut initiator), (AsyncEvent::LOGOUT_REQUEST, 1));
    let start = initiator.pump.session.poll_timeout().unwrap().max(Instant::now());
    pass(&mut initiator, start);
    assert_eq!(initiator.pump.session.poll_timeout(), Some(start + Duration::from_secs(1)));
    pass(&mut initiator, start + Duration::from_millis(999));
    assert!(initiator.receive().is_empty() && !initiator.is_closed());
    pass(&mut initiator, start + Duration::from_secs(1));
    assert_eq!(event(&mut initiator).0, AsyncEvent::SESSION_DROP);
    assert!(initiator.is_closed());
}

#[test]
fn the_logout_deadline_starts_after_the_commands_in_flight() {
    let mut initiator = with_a_read_in_flight();
    initiator.pump.session.on_stop(Instant::now());
    assert_eq!(event(&mut initiator).0, AsyncEvent::LOGOUT_REQUEST);
    let start = Instant::now();
    for second in [0, 1, 2, 9] {
        pass(&mut initiator, start + Duration::from_secs(second));
    }
    assert!(initiator.receive().is_empty(), "the deadline does not count while commands are in flight");
    initiator.pump.finish_one();
    assert_eq!(initiator.receive().len(), 1);
    for (second, is_closed) in [(10, false), (11, true)] {
        pass(&mut initiator, start + Duration::from_secs(second));
        assert_eq!(initiator.is_closed(), is_closed);
    }
}

#[test]
fn a_connection_lost_while_the_target_stops_retains_nothing() {
    let mut initiator = ScriptedInitiator::log_in("ErrorRecoveryLevel=2\0DefaultTime2Retain=20\0");
    initiator.pump.session.on_stop(Instant::now());
    assert_eq!(event(&mut initiator).0, AsyncEvent::LOGOUT_REQUEST);
    initiator.pump.session.on_end(Instant::now()).unwrap();
    assert!(initiator.is_closed() && initiator.pump.session.stage() != SessionStage::Lingering);
}

#[test]
fn a_discovery_is_dropped_at_once() {
    let mut initiator = ScriptedInitiator::connect();
    let text = format!("InitiatorName={INITIATOR}\0SessionType=Discovery\0");
    assert_eq!(initiator.login(0x87, text.as_bytes()).as_a::<IscsiLoginResponse>().status.get(), 0);
    initiator.pump.session.on_stop(Instant::now());
    assert_eq!(event(&mut initiator).0, AsyncEvent::SESSION_DROP);
    assert!(initiator.is_closed());
}
