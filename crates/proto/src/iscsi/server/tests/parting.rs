//! A target that stops: who logs out, who does not, and what is in flight meanwhile.

use super::connections::{logout, logout_result};
use super::*;
use crate::session::{SessionStage, Target, Timed};
use std::time::Duration;
use std::time::Instant;

/// The event that is the only thing the target has sent, and its Parameter3.
fn event(initiator: &mut Initiator) -> (AsyncEvent, u16) {
    let [event] = initiator.receive().try_into().unwrap();
    assert_eq!(event.bhs.opcode(), IscsiOpcode::ASYNC_MESSAGE);
    let message: AsyncMessage = event.as_a();
    (AsyncEvent(message.async_event), message.parameter3.get())
}

/// Tells the session that it is so late.
fn pass(initiator: &mut Initiator, now: Instant) {
    initiator.pump.session.on_timeout(now).unwrap();
}

/// Logged in, with a read of a block that the volume has not done.
fn with_a_read_in_flight() -> Initiator {
    let mut initiator = Initiator::log_in("");
    initiator.pump.holds_io = true;
    assert!(initiator.command(0, &read10(0, 1), Some(512), None).is_empty());
    initiator
}

#[test]
fn a_target_that_stops_asks_for_a_logout_and_ends_what_it_has() {
    let mut initiator = with_a_read_in_flight();
    initiator.pump.session.on_stop(Instant::now());
    assert_eq!(event(&mut initiator), (AsyncEvent::LOGOUT_REQUEST, 1));
    initiator.pump.session.on_stop(Instant::now());
    let [busy] = initiator.command(0, &read10(0, 1), Some(512), None).try_into().unwrap();
    assert_eq!(busy.as_a::<ScsiResponse>().status, 8);
    initiator.pump.finish_one();
    let [data] = initiator.receive().try_into().unwrap();
    assert_eq!((data.bhs.opcode(), data.data.len()), (IscsiOpcode::DATA_IN, 512));
    assert!(!initiator.is_closed(), "it has time to log out");
    let [answer] = initiator.exchange(&logout(LogoutReason::CLOSE_SESSION, 7), b"").try_into().unwrap();
    assert_eq!(logout_result(&answer), LogoutResult::CLOSED_SUCCESSFULLY);
    assert!(initiator.is_closed());
}

#[test]
fn who_does_not_log_out_is_dropped_when_its_time_is_over() {
    let mut initiator = Initiator::log_in("");
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
fn what_is_in_flight_leaves_its_time_to_the_initiator() {
    let mut initiator = with_a_read_in_flight();
    initiator.pump.session.on_stop(Instant::now());
    assert_eq!(event(&mut initiator).0, AsyncEvent::LOGOUT_REQUEST);
    let start = Instant::now();
    for second in [0, 1, 2, 9] {
        pass(&mut initiator, start + Duration::from_secs(second));
    }
    assert!(initiator.receive().is_empty(), "a slow device does not cut its initiators off");
    initiator.pump.finish_one();
    assert_eq!(initiator.receive().len(), 1);
    for (second, is_closed) in [(10, false), (11, true)] {
        pass(&mut initiator, start + Duration::from_secs(second));
        assert_eq!(initiator.is_closed(), is_closed);
    }
}

#[test]
fn a_connection_that_is_lost_meanwhile_keeps_nothing_for_recovery() {
    let mut initiator = Initiator::log_in("ErrorRecoveryLevel=2\0DefaultTime2Retain=20\0");
    initiator.pump.session.on_stop(Instant::now());
    assert_eq!(event(&mut initiator).0, AsyncEvent::LOGOUT_REQUEST);
    initiator.pump.session.on_end(Instant::now()).unwrap();
    assert!(initiator.is_closed() && initiator.pump.session.stage() != SessionStage::Lingering);
}

#[test]
fn a_discovery_is_dropped_at_once() {
    let mut initiator = Initiator::connect();
    let text = format!("InitiatorName={INITIATOR}\0SessionType=Discovery\0");
    assert_eq!(initiator.login(0x87, text.as_bytes()).as_a::<LoginResponse>().status.get(), 0);
    initiator.pump.session.on_stop(Instant::now());
    assert_eq!(event(&mut initiator).0, AsyncEvent::SESSION_DROP);
    assert!(initiator.is_closed());
}
