//! Protocol violations by a controller, and the H2CTermReq for each.

use super::script::*;
use crate::driver::session::StreamSession;
use crate::nvme_tcp::client::*;
use crate::testing::Driver;
use blockmux_volume::Pool;
use blockmux_wire::nvmeof::tcp::*;
use proptest::prelude::*;
use std::time::{Duration, Instant};
use zerocopy::{FromZeros, IntoBytes};

/// A queue with an outstanding read of 8 KiB and a write of 16 KiB, and their CIDs.
fn busy(format: WireFormat) -> (ScriptedQueue, u16, u16) {
    let mut queue = ScriptedQueue::ready(format);
    queue.driver.read(1, 0, 8192);
    let read = queue.command().cid();
    queue.write(2, 0, &pattern(16384));
    let write = queue.command().cid();
    (queue, read, write)
}

fn with(mut bytes: Vec<u8>, at: usize, value: u8) -> Vec<u8> {
    bytes[at] = value;
    bytes
}

/// Linux's host believed a header length of 255 (CVE-2025-21927), and took data for a command
/// without any (CVE-2026-89482).
#[test]
fn a_malformed_pdu_is_answered_with_its_field() {
    use FatalError as F;
    type Case = (&'static str, fn(u16, u16) -> Vec<u8>, FatalError, u32);
    let field = F::INVALID_PDU_HEADER_FIELD;
    let range = F::DATA_TRANSFER_OUT_OF_RANGE;
    let cases: [Case; 19] = [
        ("unexpected type", |r, _| with(PLAIN.good(r), 0, 0x08), field, 0),
        ("unexpected type", |r, _| with(PLAIN.good(r), 0, 0x04), field, 0),
        ("wrong length", |r, _| with(PLAIN.good(r), 2, 25), field, 2),
        ("header digest flag", |r, _| with(PLAIN.good(r), 1, FLAG_HDGST), field, 1),
        ("data whose digest flag", |r, _| with(PLAIN.data(r, 0, &[0; 512], 0), 1, FLAG_DDGST), field, 1),
        ("does not match its parts", |r, _| with(PLAIN.good(r), 4, 28), field, 4),
        ("does not match its parts", |r, _| with(PLAIN.data(r, 0, &[0; 512], 0), 4, 25), field, 4),
        ("wrong offset", |r, _| with(PLAIN.data(r, 0, &[0; 512], 0), 3, 20), field, 3),
        ("wrong offset", |r, _| with(PLAIN.data(r, 0, &[0; 512], 0), 3, 26), field, 3),
        ("length 0", |r, _| PLAIN.data(r, 0, &[], 0), field, 16),
        ("completed a command", |r, _| PLAIN.good(r.wrapping_add(1024)), field, 20),
        ("data of a command that does not exist", |r, _| PLAIN.data(r ^ 0x200, 0, &[0; 512], 0), field, 8),
        ("receives none", |_, w| PLAIN.data(w, 0, &[0; 512], 0), field, 8),
        ("more data", |r, _| PLAIN.data(r, 8192, &[0; 512], 0), range, 0),
        ("more data", |r, _| PLAIN.data(r, u32::MAX, &[0; 512], 0), range, 0),
        ("SUCCESS before", |r, _| PLAIN.data(r, 0, &[0; 512], FLAG_SUCCESS), field, 1),
        ("the same data twice", |r, _| PLAIN.data(r, 0, &[0; 512], 0).repeat(2), range, 0),
        ("sends none", |r, _| PLAIN.r2t(r, 0, 0, 512), field, 8),
        ("beyond the command's data", |_, w| PLAIN.r2t(w, 0, 16000, 512), range, 0),
    ];
    for (words, bytes, fes, fei) in cases {
        let (mut queue, read, write) = busy(PLAIN);
        let error = queue.feed(&bytes(read, write)).unwrap_err();
        assert!(error.what.contains(words), "{words}: {error}");
        assert_eq!(termination(&mut queue.driver, PLAIN), Some((fes, fei)), "{words}");
    }
}

/// Linux's host sent the data of a repeated R2T (CVE-2025-38264).
#[test]
fn data_is_requested_once() {
    let (mut queue, _, write) = busy(PLAIN);
    queue.feed(&PLAIN.r2t(write, 1, 0, 8192)).unwrap();
    let error = queue.feed(&PLAIN.r2t(write, 2, 4096, 8192)).unwrap_err();
    assert!(error.what.contains("the same data twice"));
    let (mut queue, _, write) = busy(PLAIN);
    assert!(queue.feed(&PLAIN.r2t(write, 1, 0, 0)).is_err());
    assert!(queue.feed(&PLAIN.r2t(write ^ 1 << 10, 1, 0, 512)).is_err());
}

#[test]
fn a_wrong_header_digest_ends_the_connection() {
    let (mut queue, read, _) = busy(BOTH);
    let bytes = with(BOTH.good(read), 25, 0xee);
    let fei = u32::from_le_bytes(bytes[24..28].try_into().unwrap());
    let error = queue.feed(&bytes).unwrap_err();
    assert_eq!(error.what, "sent a header whose digest is wrong");
    assert_eq!(termination(&mut queue.driver, BOTH), Some((FatalError::HEADER_DIGEST_ERROR, fei)));
}

#[test]
fn a_controller_that_ends_the_connection_is_not_answered() {
    let (mut queue, ..) = busy(PLAIN);
    let request = TermReq {
        common: common(PduType::C2H_TERM_REQ, DATA_LEN, 48),
        fes: FatalError::DATA_TRANSFER_OUT_OF_RANGE.0.into(),
        ..TermReq::new_zeroed()
    };
    let error = queue.feed(request.as_bytes()).unwrap_err();
    assert_eq!(error.what, "ended the connection: data out of range");
    assert_eq!(termination(&mut queue.driver, PLAIN), None);
}

#[test]
fn an_invalid_ic_resp_is_refused() {
    let cases: [(&str, usize, u8, u32); 6] = [
        ("of a wrong length", 2, 127, 2),
        ("format version", 8, 1, 8),
        ("aligned to more", 10, 32, 10),
        ("digests", 11, 1, 11),
        ("below 4096 bytes", 13, 15, 12),
        ("4096 bytes", 12, 2, 12),
    ];
    for (words, at, value, fei) in cases {
        let mut queue = ScriptedQueue::fresh(PLAIN, namespace(), 128);
        queue.sent();
        let error = queue.feed(&with(PLAIN.ic_resp(), at, value)).unwrap_err();
        assert!(error.what.contains(words), "{words}: {error}");
        assert_eq!(termination(&mut queue.driver, PLAIN).map(|term_req| term_req.1), Some(fei), "{words}");
    }
    let mut queue = ScriptedQueue::fresh(PLAIN, namespace(), 128);
    assert!(queue.feed(&PLAIN.good(0)).is_err());
    let term_req = termination(&mut queue.driver, PLAIN).map(|term_req| term_req.0);
    assert_eq!(term_req, Some(FatalError::PDU_SEQUENCE_ERROR));
}

#[test]
fn an_end_is_an_error_only_within_commands() {
    let mut queue = ScriptedQueue::ready(PLAIN);
    assert!(queue.driver.stream().on_end(Instant::now()).is_ok());
    let (mut queue, ..) = busy(PLAIN);
    assert!(queue.driver.stream().on_end(Instant::now()).is_err());
    let mut queue = ScriptedQueue::fresh(PLAIN, namespace(), 128);
    assert!(queue.driver.stream().on_end(Instant::now()).is_err());
}

proptest! {
    #[test]
    fn any_bytes_are_pdus_or_an_error(
        chunks in prop::collection::vec((0_u8..12, 0_u8..4, prop::collection::vec(any::<u8>(), 0..40)), 0..12),
        step in 1_usize..64,
    ) {
        let (mut queue, read, write) = busy(PLAIN);
        queue.driver.step = step;
        for (kind, which, noise) in chunks {
            let cid = if which & 1 == 0 { read } else { write };
            let bytes = match kind {
                0 => PLAIN.good(cid),
                1..=3 => PLAIN.data(cid, u32::from(which) * 2048, &noise, which),
                4..=6 => PLAIN.r2t(cid, which.into(), u32::from(which) * 4096, noise.len() as u32 * 100),
                _ => noise,
            };
            if queue.feed(&bytes).is_err() {
                return Ok(());
            }
            queue.driver.sent();
        }
    }

    #[test]
    fn any_answers_bring_an_admin_queue_up_or_to_an_end(
        noise in prop::collection::vec(any::<u8>(), 4096..4097),
        results in prop::collection::vec(any::<u64>(), 20..21),
        status in any::<u16>(),
    ) {
        let config = AdminConfig { names: names(), credentials: None, queues: 1, query: ControllerQuery::Namespaces, keep_alive: Duration::ZERO };
        let session = NvmeTcpAdminSession::new(config, PLAIN.digests, Pool::new(1 << 20), Instant::now());
        let mut driver = Driver::of(session, usize::MAX);
        driver.sent();
        prop_assert!(driver.feed(&PLAIN.ic_resp()).is_ok());
        for (round, result) in results.into_iter().enumerate() {
            for pdu in PLAIN.pdus(&driver.sent()) {
                let len = match pdu.sqe().opcode {
                    6 => 4096,
                    _ => 0,
                };
                if len > 0 {
                    prop_assert!(driver.feed(&PLAIN.data(pdu.cid(), 0, &noise, FLAG_LAST)).is_ok());
                }
                // Succeeds long enough to reach commands with data, mostly.
                let status = if round > 8 { status & !1 } else { 0 };
                let field = blockmux_wire::nvme::status::StatusField(status.into());
                let result = if round == 5 { 1 } else { result & !(3 << 17) };
                if !driver.is_closing() {
                    prop_assert!(driver.feed(&PLAIN.response(pdu.cid(), field, result)).is_ok());
                }
            }
        }
        prop_assert!(driver.session.namespaces().len() <= 1024);
    }
}
