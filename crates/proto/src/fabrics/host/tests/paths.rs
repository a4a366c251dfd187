//! ANA states and path failures: what the admin queue learns, and how an I/O queue reacts.

use super::*;
use crate::driver::session::{Control, Initiator, PathRank, RetryRules, Timed};
use blockmux_volume::{IoError, Op};
use blockmux_wire::nvme::feature::{AEC_ANA_CHANGE, AEC_NAMESPACE_ATTRIBUTE};
use blockmux_wire::nvme::log::{AnaGroupDescriptor, AnaHeader, AnaState, LogPage};
use blockmux_wire::nvme::status::NvmeStatus;
use std::time::Duration;
use zerocopy::IntoBytes;

fn page(state: AnaState) -> Vec<u8> {
    let header = AnaHeader { nagd: 1.into(), ..AnaHeader::new_zeroed() };
    let group = AnaGroupDescriptor { agid: 1.into(), state: state.0, ..AnaGroupDescriptor::new_zeroed() };
    [header.as_bytes(), group.as_bytes()].concat()
}

/// A subsystem with ANA and these events.
fn subsystem(state: AnaState, oaes: u32) -> ScriptedSubsystem {
    ScriptedSubsystem { ana_group: 1, log: page(state), oaes, ..ScriptedSubsystem::default() }
}

fn admin(subsystem: &mut ScriptedSubsystem, now: Instant) -> Driver<AdminSession> {
    let (names, keep_alive) = (names(), Duration::ZERO);
    let config =
        AdminConfig { names, credentials: None, queues: 1, query: ControllerQuery::Use(1), keep_alive };
    let session = AdminSession::new(config, (), Pool::new(1 << 20), now);
    let mut driver = Driver::of(session, usize::MAX);
    bring_up(&mut driver, subsystem);
    driver
}

#[test]
fn the_log_page_is_read_before_the_first_io_and_after_each_change() {
    let mut subsystem = subsystem(AnaState::NON_OPTIMIZED, AEC_NAMESPACE_ATTRIBUTE | AEC_ANA_CHANGE);
    let mut driver = admin(&mut subsystem, Instant::now());
    assert!(driver.session.is_ready());
    assert_eq!(driver.session.poll_path_rank(), Some(PathRank::Good));
    assert_eq!(driver.session.poll_path_rank(), None);
    for (state, rank) in [(AnaState::INACCESSIBLE, PathRank::Unusable), (AnaState::OPTIMIZED, PathRank::Best)]
    {
        subsystem.log = page(state);
        let event = u64::from(LogPage::ASYMMETRIC_NAMESPACE_ACCESS.0) << 16 | 0x0302;
        let cid = subsystem.listening.take().unwrap();
        driver.session.answer(cid, &[], Some((StatusField::default(), event)));
        bring_up(&mut driver, &mut subsystem);
        assert_eq!(driver.session.poll_path_rank(), Some(rank));
        assert!(subsystem.listening.is_some());
    }
}

#[test]
fn the_log_page_is_polled_if_there_are_no_events() {
    let mut now = Instant::now();
    let mut subsystem = subsystem(AnaState::OPTIMIZED, 0);
    let mut driver = admin(&mut subsystem, now);
    assert_eq!(driver.session.poll_path_rank(), Some(PathRank::Best));
    subsystem.log = page(AnaState::NON_OPTIMIZED);
    for _ in 0..2 {
        now = driver.session.poll_timeout().unwrap().max(now) + Duration::from_secs(1);
        driver.session.on_timeout(now).unwrap();
        bring_up(&mut driver, &mut subsystem);
    }
    assert_eq!(driver.session.poll_path_rank(), Some(PathRank::Good));
}

#[test]
fn io_continues_if_the_log_page_cannot_be_read() {
    let mut subsystem = subsystem(AnaState::INACCESSIBLE, AEC_ANA_CHANGE);
    subsystem.fails = Some((0x02, StatusField::new(NvmeStatus::INTERNAL_ERROR)));
    let mut driver = admin(&mut subsystem, Instant::now());
    assert!(driver.session.is_ready());
    assert_eq!(driver.session.poll_path_rank(), None);
    subsystem.fails = None;
    driver.session.query_path_rank();
    bring_up(&mut driver, &mut subsystem);
    assert_eq!(driver.session.poll_path_rank(), Some(PathRank::Unusable));
}

#[test]
fn a_controller_that_never_returns_the_log_page_is_abandoned() {
    let now = Instant::now();
    let mut subsystem = subsystem(AnaState::OPTIMIZED, AEC_ANA_CHANGE);
    subsystem.is_silent_about_logs = true;
    let mut driver = admin(&mut subsystem, now);
    assert!(!driver.session.is_ready());
    assert_eq!(driver.session.poll_timeout(), Some(now + Duration::from_secs(30)));
    assert!(driver.session.on_timeout(now + Duration::from_secs(30)).is_err());
}

#[test]
fn a_transition_is_awaited_for_anatt_and_no_longer() {
    for ends in [true, false] {
        let start = Instant::now();
        let mut subsystem = subsystem(AnaState::CHANGE, AEC_ANA_CHANGE);
        let mut driver = admin(&mut subsystem, start);
        assert_eq!(driver.session.poll_path_rank(), Some(PathRank::Unusable));
        let (mut now, mut result) = (start, Ok(()));
        while result.is_ok() && now < start + Duration::from_secs(60) {
            now = driver.session.poll_timeout().map_or(now, |at| at.max(now));
            now += Duration::from_millis(100);
            if ends && now > start + Duration::from_secs(u64::from(ANATT_S) - 5) {
                subsystem.log = page(AnaState::OPTIMIZED);
            }
            result = driver.session.on_timeout(now);
            bring_up(&mut driver, &mut subsystem);
        }
        assert_eq!(result.is_ok(), ends);
        let waited = now - start;
        let about = Duration::from_secs(ANATT_S.into());
        assert!(ends || (waited >= about && waited < about + Duration::from_secs(5)), "{waited:?}");
    }
}

/// A host whose write has ended with `status`, with or without other paths.
fn with_a_failed_write(status: NvmeStatus, has_others: bool) -> TestQueues {
    let mut client = TestQueues::ready();
    if has_others {
        client.driver.session =
            client.driver.session.with_retries(RetryRules { has_other_paths: true, ..RetryRules::default() });
    }
    client.write(7, 4096, &pattern(4096));
    let command = client.command();
    client.complete(command.cid(), StatusField::new(status), 0);
    client
}

#[test]
fn commands_to_an_inaccessible_namespace_are_handed_back_if_there_are_other_paths() {
    for status in [
        NvmeStatus::ASYMMETRIC_ACCESS_INACCESSIBLE,
        NvmeStatus::ASYMMETRIC_ACCESS_TRANSITION,
        NvmeStatus::ASYMMETRIC_ACCESS_PERSISTENT_LOSS,
    ] {
        for has_others in [true, false] {
            let mut client = with_a_failed_write(status, has_others);
            assert_eq!(client.driver.session.path_rank(), PathRank::Unusable);
            client.driver.assert_nothing_done();
            if has_others {
                let io = client.driver.session.poll_returned().unwrap();
                assert_eq!((io.tag.0, io.op, io.offset), (7, Op::Write { fua: false }, 4096));
                assert!(io.data.unwrap().to_vec() == pattern(4096));
            }
            assert!(client.driver.session.poll_returned().is_none());
            // Without other paths, the command is sent again after a delay.
            assert_eq!(client.driver.stream().poll_timeout().is_some(), !has_others);
            client.driver.session.set_path_rank(PathRank::Best);
            assert_eq!(client.driver.session.path_rank(), PathRank::Best);
        }
    }
}

#[test]
fn commands_that_fail_on_the_path_are_handed_back_and_the_path_pauses() {
    for status in [
        NvmeStatus::INTERNAL_PATH_ERROR,
        NvmeStatus::CONTROLLER_PATHING_ERROR,
        NvmeStatus::HOST_PATHING_ERROR,
    ] {
        for has_others in [true, false] {
            let mut client = with_a_failed_write(status, has_others);
            client.driver.assert_nothing_done();
            let session = &mut client.driver.session;
            let io = session.poll_returned().unwrap();
            assert_eq!((io.tag.0, io.op, io.offset), (7, Op::Write { fua: false }, 4096));
            assert!(io.data.unwrap().to_vec() == pattern(4096));
            assert_eq!(session.path_rank(), PathRank::Failing);
            // The pause holds whatever the ANA log page says.
            session.set_path_rank(PathRank::Good);
            assert_eq!(session.path_rank(), PathRank::Failing);
            session.queue(0).on_timeout(Instant::now()).unwrap();
            let end = session.queue(0).poll_timeout().unwrap();
            session.queue(0).on_timeout(end).unwrap();
            assert_eq!((session.path_rank(), session.queue(0).poll_timeout()), (PathRank::Good, None));
        }
    }
}

#[test]
fn a_command_that_no_path_can_do_fails() {
    let mut client = TestQueues::ready();
    client.driver.session =
        client.driver.session.with_retries(RetryRules { has_other_paths: true, ..RetryRules::default() });
    client.write(7, 4096, &pattern(4096));
    let command = client.command();
    let status = StatusField::final_one(NvmeStatus::ASYMMETRIC_ACCESS_PERSISTENT_LOSS);
    client.complete(command.cid(), status, 0);
    assert_eq!(client.driver.done_error(), IoError::PathLost);
    assert_eq!(client.driver.session.path_rank(), PathRank::Best);
}
