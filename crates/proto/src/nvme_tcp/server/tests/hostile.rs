//! Protocol violations by hosts, and the C2HTermReq for each.

use super::*;
use crate::driver::session::Timed;
use crate::nvme::MAX_DATA;
use std::time::Duration;
use std::time::Instant;

/// Fatal error status and information that the host receives.
fn fatal(host: &mut TcpTestHost, bytes: &[u8]) -> (FatalError, u32) {
    let error = host.pump.client_sends(bytes);
    assert!(error.is_err(), "no error was reported");
    assert!(host.is_closed());
    let pdus = host.received();
    let last = pdus.last().unwrap();
    assert_eq!(last.kind(), PduType::C2H_TERM_REQ);
    let request = TermReq::read_from_bytes(&last.header).unwrap();
    (FatalError(request.fes.get()), request.fei.get())
}

#[test]
fn an_invalid_ic_req_is_answered_with_its_field() {
    let node = node();
    type Case<'a> = (&'a dyn Fn(&mut IcReq), FatalError, u32);
    let cases: [Case<'_>; 6] = [
        (&|request| request.common.pdu_type = 4, FatalError::PDU_SEQUENCE_ERROR, 0),
        (&|request| request.common.hlen = 127, FatalError::INVALID_PDU_HEADER_FIELD, 2),
        (&|request| request.common.plen = 129.into(), FatalError::INVALID_PDU_HEADER_FIELD, 4),
        (&|request| request.common.plen = u32::MAX.into(), FatalError::INVALID_PDU_HEADER_FIELD, 4),
        (&|request| request.pfv = 1.into(), FatalError::UNSUPPORTED_PARAMETER, 8),
        (&|request| request.hpda = 32, FatalError::INVALID_PDU_HEADER_FIELD, 10),
    ];
    for (change, status, offset) in cases {
        let mut request = ic_req(0);
        change(&mut request);
        assert_eq!(fatal(&mut TcpTestHost::new(&node), request.as_bytes()), (status, offset));
    }
}

#[test]
fn an_invalid_pdu_is_answered_with_its_fatal_error() {
    let node = node();
    let capsule = |change: &dyn Fn(&mut CommonHeader)| {
        let mut bytes = pdu(0, PduType::CAPSULE_CMD, 0, nvm(NvmOpcode::WRITE, 1, 0, 1).as_bytes(), &[0; 512]);
        change(CommonHeader::mut_from_prefix(&mut bytes).unwrap().0);
        bytes
    };
    let field = FatalError::INVALID_PDU_HEADER_FIELD;
    let cases = [
        (capsule(&|common| common.pdu_type = 5), field, 0),
        (capsule(&|common| common.pdu_type = 0xff), field, 0),
        (capsule(&|common| common.pdu_type = 0), FatalError::PDU_SEQUENCE_ERROR, 0),
        (capsule(&|common| common.hlen = 71), field, 2),
        (capsule(&|common| common.flags = FLAG_HDGST), field, 1),
        (capsule(&|common| common.flags = FLAG_DDGST), field, 1),
        (capsule(&|common| common.pdo = 71), field, 3),
        (capsule(&|common| common.pdo = 74), field, 3),
        (capsule(&|common| common.pdo = 255), field, 3),
        (capsule(&|common| common.plen = 8.into()), field, 4),
        (capsule(&|common| common.plen = (72 + 8193).into()), field, 4),
        (capsule(&|common| common.plen = u32::MAX.into()), field, 4),
        // Data that was not requested, and data without any.
        (pdu(0, PduType::H2C_DATA, FLAG_LAST, &[0; 16], &[0; 8]), field, 10),
        (pdu(0, PduType::H2C_DATA, FLAG_LAST, &[0; 16], &[]), field, 4),
    ];
    for (bytes, status, offset) in cases {
        let (mut io, _admin) = TcpTestHost::io(&node, 0);
        assert_eq!(fatal(&mut io, &bytes), (status, offset), "{:x?}", &bytes[..24]);
    }
    let mut long = pdu(0, PduType::H2C_DATA, FLAG_LAST, &[0; 16], &[0; 8]);
    long[4..8].copy_from_slice(&(24 + MAX_DATA as u32 + 4).to_le_bytes());
    let (mut io, _admin) = TcpTestHost::io(&node, 0);
    assert_eq!(fatal(&mut io, &long), (FatalError::DATA_TRANSFER_LIMIT_EXCEEDED, 0));
}

/// Linux's controller did not check length and offset (CVE-2023-6356, CVE-2023-6535,
/// CVE-2023-6536, CVE-2026-22998).
#[test]
fn data_outside_of_the_requested_range_is_fatal() {
    let node = node();
    let cases: [(usize, usize, u16, bool, FatalError, u32); 6] = [
        (512, 1024, 0, false, FatalError::DATA_TRANSFER_OUT_OF_RANGE, 0),
        (0, 16384 + 4, 0, true, FatalError::DATA_TRANSFER_OUT_OF_RANGE, 0),
        (0, 512, 0, true, FatalError::INVALID_PDU_HEADER_FIELD, 1),
        (0, 16384, 0, false, FatalError::INVALID_PDU_HEADER_FIELD, 1),
        (0, 16384, 1, true, FatalError::INVALID_PDU_HEADER_FIELD, 8),
        (usize::MAX, 16384, 0, true, FatalError::DATA_TRANSFER_OUT_OF_RANGE, 0),
    ];
    for (offset, len, other_cid, is_last, status, place) in cases {
        let (mut io, _admin) = TcpTestHost::io(&node, 0);
        io.send(&mut nvm(NvmOpcode::WRITE, 1, 0, 32), &[]);
        let r2t: NvmeTcpR2t = io.received()[0].as_a();
        let r2t = NvmeTcpR2t { cccid: (r2t.cccid.get() + other_cid).into(), ..r2t };
        let bytes = io.h2c_data(&r2t, offset, &vec![0; len], is_last);
        assert_eq!(fatal(&mut io, &bytes), (status, place));
        assert!(io.pump.submitted.is_empty());
    }
}

#[test]
fn a_wrong_header_digest_is_fatal_and_a_wrong_data_digest_is_not() {
    let node = node();
    let (mut io, _admin) = TcpTestHost::io(&node, 3);
    let write = Sqe { dptr: SglDescriptor::in_capsule(0, 512), ..nvm(NvmOpcode::WRITE, 1, 0, 1) };
    let good = io.capsule(&write, &[7; 512]);
    let mut bytes = good.clone();
    *bytes.last_mut().unwrap() ^= 1;
    io.pump.client_sends(&bytes).unwrap();
    let cqe = io.received()[0].cqe();
    assert_eq!(
        (cqe.status.status(), cqe.status.do_not_retry()),
        (NvmeStatus::TRANSIENT_TRANSPORT_ERROR, false)
    );
    // Data that was requested by R2T, short and long.
    for blocks in [32, 256] {
        let mut write = nvm(NvmOpcode::WRITE, 1, 0, blocks);
        io.send(&mut write, &[]);
        let r2t: NvmeTcpR2t = io.received()[0].as_a();
        let mut bytes = io.h2c_data(&r2t, 0, &vec![7; blocks as usize * 512], true);
        *bytes.last_mut().unwrap() ^= 1;
        io.pump.client_sends(&bytes).unwrap();
        assert_eq!(io.end_of(write).1.status.status(), NvmeStatus::TRANSIENT_TRANSPORT_ERROR);
    }
    assert_eq!(io.run(nvm(NvmOpcode::READ, 1, 0, 1), &[]).0, [0; 512]);
    let mut bytes = good;
    bytes[72] ^= 1;
    let sent = u32::from_le_bytes(bytes[72..76].try_into().unwrap());
    assert_eq!(fatal(&mut io, &bytes), (FatalError::HEADER_DIGEST_ERROR, sent));
}

/// An I/O queue with `entries` entries, and its admin queue.
fn deep(node: &(Arc<NvmeNode>, Exports), pool: &Pool, entries: u32) -> (TcpTestHost, TcpTestHost) {
    let (admin, cntlid) = TcpTestHost::admin(node, 0);
    let mut io = TcpTestHost::with_pool((&node.0, &node.1), pool.clone());
    io.pump.exchange(ic_req(0).as_bytes());
    let (mut command, data) = connect(NQN, 1, cntlid, 0);
    command.cdw11 = (entries - 1).into();
    assert!(io.run(command, data.as_bytes()).1.status.is_success());
    (io, admin)
}

/// Sends all requested data until nothing more is requested; returns how many commands have
/// completed.
fn answer_all(io: &mut TcpTestHost) -> usize {
    let mut ended = 0;
    loop {
        io.pump.run().unwrap();
        let pdus = io.received();
        if pdus.is_empty() {
            return ended;
        }
        for pdu in pdus {
            if pdu.kind() != PduType::R2T {
                assert!(pdu.cqe().status.is_success());
                ended += 1;
                continue;
            }
            let r2t: NvmeTcpR2t = pdu.as_a();
            let bytes = io.h2c_data(&r2t, 0, &vec![7; r2t.r2tl.get() as usize], true);
            io.pump.client_sends(&bytes).unwrap();
        }
    }
}

#[test]
fn a_pool_that_is_short_delays_commands_and_not_the_data_of_others() {
    let pool = Pool::new(4 << 20);
    let (mut io, _admin) = deep(&node(), &pool, 128);
    let others = pool.take_payload(1 << 20);
    for _ in 0..30 {
        io.send(&mut nvm(NvmOpcode::WRITE, 1, 0, 512), &[]);
    }
    assert!(pool.is_short());
    assert!(matches!(io.pump.session.demand(), Demand::Bytes(_)));
    // Data of waiting commands was not requested.
    let asked = io.pump.session.outbox().len() / DATA_LEN;
    assert!((1..30).contains(&asked));
    assert_eq!(answer_all(&mut io), 30);
    drop(others);
    assert_eq!(pool.out_bytes(), 0);
}

#[test]
fn a_host_that_reads_nothing_has_no_timer_for_what_waits_behind_its_data() {
    let (mut io, _admin) = deep(&node(), &Pool::new(4 << 20), 128);
    for _ in 0..128 {
        io.send(&mut nvm(NvmOpcode::READ, 1, 0, 512), &[]);
    }
    let soon = Instant::now() + Duration::from_secs(1);
    assert!(io.pump.session.poll_timeout().is_none_or(|at| at > soon));
}

#[test]
fn data_of_a_waiting_command_is_not_accepted() {
    let (mut io, _admin) = deep(&node(), &Pool::new(4 << 20), 128);
    for _ in 0..30 {
        io.send(&mut nvm(NvmOpcode::WRITE, 1, 0, 512), &[]);
    }
    let (cccid, ttag) = (io.cid.into(), 29.into());
    let early = NvmeTcpR2t { cccid, ttag, ..NvmeTcpR2t::new_zeroed() };
    let bytes = io.h2c_data(&early, 0, &[7; 512], false);
    assert_eq!(fatal(&mut io, &bytes), (FatalError::INVALID_PDU_HEADER_FIELD, 10));
}

#[test]
fn a_short_and_wrong_first_pdu_is_answered_immediately() {
    let node = node();
    let head =
        |kind, hlen, plen: u32| CommonHeader { pdu_type: kind, flags: 0, hlen, pdo: 0, plen: plen.into() };
    let cases = [
        (head(0xff, 8, 0), FatalError::PDU_SEQUENCE_ERROR, 0),
        (head(PduType::CAPSULE_CMD.0, 72, 72), FatalError::PDU_SEQUENCE_ERROR, 0),
        (head(PduType::IC_REQ.0, 128, 0), FatalError::INVALID_PDU_HEADER_FIELD, 4),
    ];
    for (common, status, offset) in cases {
        assert_eq!(fatal(&mut TcpTestHost::new(&node), common.as_bytes()), (status, offset));
    }
    let mut in_pieces = TcpTestHost::new(&node);
    for byte in ic_req(0).as_bytes() {
        assert!(in_pieces.pump.sent().is_empty());
        in_pieces.pump.client_sends(&[*byte]).unwrap();
    }
    assert_eq!(in_pieces.pump.sent().len(), IC_LEN);
}

#[test]
fn nothing_is_received_from_a_host_that_does_not_read() {
    let (mut io, _admin) = TcpTestHost::io(&node(), 0);
    let bytes: Vec<u8> = (0..60_000_u16)
        .flat_map(|cid| io.capsule(&Sqe { cid: cid.into(), ..nvm(NvmOpcode::FLUSH, 9, 0, 1) }, &[]))
        .collect();
    io.pump.client_sends(&bytes).unwrap();
    assert!(matches!(io.pump.session.demand(), Demand::Nothing));
    assert!(io.pump.session.outbox().len() < 1 << 21);
    let first = io.received().len();
    io.pump.run().unwrap();
    assert_eq!(first + io.received().len(), 60_000);
}

#[test]
fn an_incomplete_write_changes_nothing() {
    let node = node();
    let (mut io, _admin) = TcpTestHost::io(&node, 0);
    let write = Sqe { dptr: SglDescriptor::in_capsule(0, 512), ..nvm(NvmOpcode::WRITE, 1, 0, 1) };
    let bytes = io.capsule(&write, &[7; 512]);
    for cut in 0..bytes.len() {
        io.pump.client_sends(&bytes[..cut]).unwrap();
        let _ = io.pump.session.on_end(Instant::now());
        assert!(io.is_closed() && io.received().is_empty());
        drop(io);
        // Its controller still exists.
        io = TcpTestHost::initialized(&node, 0);
        assert!(io.connect(1, 1, 0).status.is_success(), "cut at {cut}");
    }
    assert_eq!(io.run(nvm(NvmOpcode::READ, 1, 0, 1), &[]).0, [0; 512]);
}

#[test]
fn a_termination_request_of_the_host_is_not_answered() {
    for (hlen, plen, what) in [
        (24, 24, "ended the connection: it reports a header digest error"),
        // Malformed ones are not answered either.
        (24, 23, "sent a PDU of a wrong length"),
        (24, 153, "sent a PDU of a wrong length"),
        (128, 128, "sent a header of a wrong length"),
        (0, 24, "sent a header of a wrong length"),
    ] {
        let (mut io, _admin) = TcpTestHost::io(&node(), 3);
        let common =
            CommonHeader { pdu_type: PduType::H2C_TERM_REQ.0, flags: 0, hlen, pdo: 0, plen: plen.into() };
        let fes = FatalError::HEADER_DIGEST_ERROR.0.into();
        let request = TermReq { common, fes, fei: 0.into(), reserved: [0; 10] };
        let error = io.pump.client_sends(request.as_bytes()).unwrap_err();
        assert_eq!(error.what, what);
        assert!(io.is_closed() && io.received().is_empty());
    }
}

/// Linux's controller took such data for a command without a request (CVE-2023-6356,
/// CVE-2023-6535, CVE-2023-6536, CVE-2026-22998).
#[test]
fn data_before_connect_or_for_a_command_that_awaits_none_is_fatal() {
    let node = node();
    let not_requested = (FatalError::INVALID_PDU_HEADER_FIELD, 10);
    for ttag in [0, 1, 31, u16::MAX] {
        for len in [4, 512, 8192] {
            let r2t = |cccid: u16| NvmeTcpR2t {
                cccid: cccid.into(),
                ttag: ttag.into(),
                ..NvmeTcpR2t::new_zeroed()
            };
            let mut host = TcpTestHost::initialized(&node, 0);
            let bytes = host.h2c_data(&r2t(0), 0, &vec![7; len], true);
            assert_eq!(fatal(&mut host, &bytes), not_requested, "before Connect");
            let (mut io, _admin) = TcpTestHost::io(&node, 0);
            io.pump.holds_io = true;
            // Slot 0 reads, and slot 1 has its data already.
            io.send(&mut nvm(NvmOpcode::READ, 1, 0, 1), &[]);
            let write = nvm(NvmOpcode::WRITE, 1, 0, 1);
            io.send(&mut Sqe { dptr: SglDescriptor::in_capsule(0, 512), ..write }, &[7; 512]);
            assert_eq!(io.pump.submitted.len(), 2);
            let bytes = io.h2c_data(&r2t(1 + ttag.min(1)), 0, &vec![7; len], true);
            assert_eq!(fatal(&mut io, &bytes), not_requested, "for the command in slot {ttag}");
            assert_eq!(io.pump.submitted.len(), 2);
        }
    }
}

/// Linux's controller accepted one with a digest (CVE-2026-89969).
#[test]
fn a_second_ic_req_is_fatal_and_changes_no_digest() {
    let node = node();
    for (before, after) in [(0, 3), (3, 0), (1, 2), (3, 3)] {
        for is_connected in [false, true] {
            let mut host = TcpTestHost::initialized(&node, before);
            if is_connected {
                assert!(host.connect(0, CNTLID_DYNAMIC, 0).status.is_success());
            }
            let (error, offset) = fatal(&mut host, ic_req(after).as_bytes());
            assert_eq!((error, offset), (FatalError::PDU_SEQUENCE_ERROR, 0), "{before} and {after}");
        }
    }
}

/// Linux's controller received on after a fatal error (CVE-2026-52989).
#[test]
fn no_byte_behind_a_violation_is_taken() {
    let node = node();
    let capsule = pdu(0, PduType::CAPSULE_CMD, 0, nvm(NvmOpcode::WRITE, 1, 0, 1).as_bytes(), &[7; 512]);
    let violations = [
        ic_req(0).as_bytes().to_vec(),
        [&[5][..], &capsule[1..]].concat(),
        pdu(0, PduType::H2C_DATA, FLAG_LAST, &[0; 16], &[0; 8]),
        pdu(0, PduType::H2C_TERM_REQ, 0, &[0; 16], &[]),
    ];
    for violation in violations {
        let (mut io, _admin) = TcpTestHost::io(&node, 0);
        io.pump.holds_io = true;
        let write = Sqe { dptr: SglDescriptor::in_capsule(0, 512), ..nvm(NvmOpcode::WRITE, 1, 0, 1) };
        let good = io.capsule(&write, &[7; 512]);
        io.pump.client_sends(&[&violation[..], &good].concat()).unwrap_err();
        assert!(io.is_closed() && io.received().iter().all(|pdu| pdu.kind() == PduType::C2H_TERM_REQ));
        let untaken = io.pump.untaken();
        assert!(untaken >= good.len());
        io.pump.client_sends(&good).unwrap();
        assert_eq!(io.pump.untaken(), untaken + good.len());
        assert!(io.pump.submitted.is_empty() && io.received().is_empty());
    }
}
