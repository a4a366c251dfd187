//! A hostile controller against both queues of the NVMe/TCP initiator: every request
//! completes exactly once.
//!
//! ```text
//!   stream = record ...      record = 0                        the well-behaved controller answers
//!                                   | kind, length (2), bytes  the hostile one sends these
//! ```
//! Bits of a kind: replace the CID by that of a recent command, which the high four bits select: 1,
//! in data and R2Ts; 2, in completions.

use crate::choices::Choices;
use crate::nvme_auth;
use crate::records::Records;
use crate::requests::{MAX_TURNS, Requests};
use crate::wire::Wire;
use blockmux_proto::driver::session::{Initiator, ProtocolError, StreamConnections, StreamSession, Timed};
use blockmux_proto::nvme::auth::{Concatenation, DhChapSecret, DhGroup, HostCredentials, HostSecrets};
use blockmux_proto::nvme::nqn::Nqn;
use blockmux_proto::nvme_tcp::client::{
    AdminConfig, ControllerInfo, ControllerQuery, Digests, Names, NamespaceInfo, NvmeTcpAdminSession,
    NvmeTcpQueueSession, QueueConfig,
};
use blockmux_volume::Pool;
use blockmux_wire::nvme::opcode::{Transfer, transfer};
use blockmux_wire::nvme::{Cqe, SglSubtype, Sqe};
use blockmux_wire::nvmeof::tcp::{
    CAPSULE_RESP_LEN, CapsuleCmd, CapsuleResp, CommonHeader, DATA_LEN, Data, FLAG_LAST, IC_LEN, IcResp,
    NvmeTcpR2t, PduType,
};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// Reads `data` as choices and records.
pub(crate) fn nvme_tcp_initiator(data: &[u8]) {
    let (mut choices, stream) = Choices::split(data);
    let first = choices.byte();
    let credentials = (first >= 128).then(credentials);
    match first % 4 {
        0 => run_admin(choices, credentials, &stream),
        _ => run_queue(choices, credentials, &stream),
    }
}

fn run_admin(mut choices: Choices<'_>, credentials: Option<HostCredentials>, stream: &[u8]) {
    let query = choices.of(&[
        ControllerQuery::Use(1),
        ControllerQuery::Namespace(1),
        ControllerQuery::Namespaces,
        ControllerQuery::Discovery,
    ]);
    let config =
        AdminConfig { names: names(), credentials, queues: 1, query, keep_alive: Duration::from_secs(5) };
    let now = Instant::now();
    let pool = Pool::new(1 << 20);
    let mut session = NvmeTcpAdminSession::new(config, Digests::default(), pool, now);
    let mut peer = Peer::new(stream);
    for _ in 0..MAX_TURNS {
        let moved = peer.turn(&mut session, &mut choices);
        let Ok(moved) = moved.inspect_err(check_error) else { break };
        if choices.byte() == 255
            && let Some(when) = session.poll_timeout()
            && session.on_timeout(when).inspect_err(check_error).is_err()
        {
            break;
        }
        if !moved && peer.is_done() {
            break;
        }
    }
    assert!(session.namespaces().len() <= 1024 && session.found().0.len() <= 10_000);
    if let Some(refused) = session.refused() {
        assert!(!refused.to_string().contains('\n'));
    }
}

fn run_queue(mut choices: Choices<'_>, credentials: Option<HostCredentials>, stream: &[u8]) {
    let pool = Pool::new(choices.of(&[64 << 20, 64 << 20, 16 << 10]));
    let namespace = namespace(&mut choices);
    let info = namespace.volume_info();
    let config = QueueConfig {
        names: names(),
        credentials,
        controller: ControllerInfo { max_entries: 64, in_capsule: 8192, ..ControllerInfo::default() },
        namespace,
        queues: 1,
        entries: choices.of(&[64, 64, 2]),
    };
    let now = Instant::now();
    let mut session = NvmeTcpQueueSession::new(config, Digests::default(), pool.clone(), now);
    let (mut peer, mut requests, mut is_broken) = (Peer::new(stream), Requests::default(), false);
    for _ in 0..MAX_TURNS {
        let mut moved = requests.submit(&mut session, Some(info.clone()), &mut choices);
        match peer.turn(&mut session.connection(0), &mut choices) {
            Ok(has_moved) => moved |= has_moved,
            Err(error) => {
                check_error(&error);
                is_broken = true;
                break;
            }
        }
        moved |= requests.poll_done(&mut session);
        moved |= requests.poll_returned(&mut session);
        match choices.byte() {
            255 => session.on_stop(),
            254 => {
                let mut stream = session.connection(0);
                if let Some(when) = stream.poll_timeout()
                    && stream.on_timeout(when).inspect_err(check_error).is_err()
                {
                    is_broken = true;
                    break;
                }
            }
            _ => {}
        }
        if !moved && peer.is_done() {
            break;
        }
    }
    if !is_broken && let Err(error) = session.connection(0).on_end(Instant::now()) {
        check_error(&error);
    }
    requests.poll_done(&mut session);
    requests.poll_returned(&mut session);
    requests.take_back(&mut session);
    drop(session);
    drop(peer);
    assert_eq!(pool.out_bytes(), 0, "the pool has lost memory");
}

/// The controller's end of a connection.
struct Peer<'a> {
    records: Records<'a>,
    wire: Wire,
    /// PDUs of the host that the well-behaved controller has not answered.
    unseen: Vec<u8>,
    /// Identifiers of commands, the latest last.
    cids: Vec<u16>,
}

impl Peer<'_> {
    fn new(stream: &[u8]) -> Peer<'_> {
        Peer { records: Records(stream), wire: Wire::new(Vec::new()), unseen: Vec::new(), cids: Vec::new() }
    }

    fn is_done(&self) -> bool {
        self.records.are_over() && self.wire.is_drained()
    }

    /// Runs one turn of the driver; returns whether there was progress.
    fn turn<S: StreamSession>(
        &mut self,
        session: &mut S,
        choices: &mut Choices<'_>,
    ) -> Result<bool, ProtocolError> {
        let sent = session.outbox().take_bytes();
        let mut moved = !sent.is_empty();
        self.on_sent(&sent);
        moved |= self.wire.is_drained() && self.next_record();
        moved |= self.wire.turn(session, choices)?;
        Ok(moved)
    }

    /// Parses complete PDUs, and checks the rules for hosts.
    fn on_sent(&mut self, bytes: &[u8]) {
        self.unseen.extend(bytes);
        let mut rest = bytes;
        while let Ok((common, _)) = CommonHeader::read_from_prefix(rest) {
            let (pdu, tail) = rest.split_at_checked(common.plen.get() as usize).expect("it sends whole PDUs");
            rest = tail;
            match PduType(common.pdu_type) {
                PduType::IC_REQ | PduType::H2C_TERM_REQ | PduType::H2C_DATA => {}
                PduType::CAPSULE_CMD => {
                    let (capsule, _) = CapsuleCmd::read_from_prefix(pdu).expect("it is whole");
                    self.cids.push(capsule.sqe.cid.get());
                }
                other => panic!("a host does not send {other}"),
            }
        }
        assert!(rest.is_empty(), "it sends whole PDUs");
    }

    /// Delivers the controller's next message.
    fn next_record(&mut self) -> bool {
        let Some(kind) = self.records.kind() else { return false };
        if kind == 0 {
            let bytes = answers(&std::mem::take(&mut self.unseen));
            self.wire.push(&bytes);
            return true;
        }
        let mut bytes = self.records.bytes();
        let at = if kind & 1 != 0 { 8 } else { 20 };
        if kind & 3 != 0
            && bytes.len() >= DATA_LEN
            && let Some(cid) = self.cids.iter().rev().nth(usize::from(kind >> 4))
        {
            bytes[at..at + 2].copy_from_slice(&cid.to_le_bytes());
        }
        self.wire.push(&bytes);
        true
    }
}

/// The answers of a well-behaved controller; reads return zeroes.
fn answers(mut bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    while let Ok((common, _)) = CommonHeader::read_from_prefix(bytes) {
        let (pdu, rest) = bytes.split_at(common.plen.get() as usize);
        bytes = rest;
        match PduType(common.pdu_type) {
            PduType::IC_REQ => {
                let common = head(PduType::IC_RESP, IC_LEN, 0);
                let response = IcResp { common, maxh2cdata: 4096.into(), ..IcResp::new_zeroed() };
                out.extend(response.as_bytes());
            }
            PduType::CAPSULE_CMD => {
                let (capsule, _) = CapsuleCmd::read_from_prefix(pdu).expect("it was checked");
                answer(&capsule.sqe, &mut out);
            }
            PduType::H2C_DATA => {
                let (data, _) = Data::read_from_prefix(pdu).expect("it is whole");
                if data.common.flags & FLAG_LAST != 0 {
                    complete(data.cccid.get(), 0, &mut out);
                }
            }
            _ => {}
        }
    }
    out
}

fn answer(sqe: &Sqe, out: &mut Vec<u8>) {
    let (cid, len) = (sqe.cid.get(), sqe.dptr.length.get());
    let is_capsule = sqe.dptr.subtype() == SglSubtype::OFFSET;
    match transfer(sqe.opcode) {
        Transfer::ControllerToHost if len > 0 => {
            let common = head(PduType::C2H_DATA, DATA_LEN, len as usize);
            let data = Data { common, cccid: cid.into(), datal: len.into(), ..Data::new_zeroed() };
            out.extend(data.as_bytes());
            out.resize(out.len() + len as usize, 0);
            complete(cid, 0, out);
        }
        Transfer::HostToController if len > 0 && !is_capsule => {
            let common = head(PduType::R2T, DATA_LEN, 0);
            let r2t = NvmeTcpR2t { common, cccid: cid.into(), r2tl: len.into(), ..NvmeTcpR2t::new_zeroed() };
            out.extend(r2t.as_bytes());
        }
        // CSTS.RDY; other properties may have any value.
        _ => complete(cid, 1, out),
    }
}

fn complete(cid: u16, result: u64, out: &mut Vec<u8>) {
    let cqe = Cqe { result: result.into(), cid: cid.into(), ..Cqe::new_zeroed() };
    out.extend(CapsuleResp { common: head(PduType::CAPSULE_RESP, CAPSULE_RESP_LEN, 0), cqe }.as_bytes());
}

fn head(kind: PduType, hlen: usize, data: usize) -> CommonHeader {
    let pdo = if data > 0 { hlen as u8 } else { 0 };
    CommonHeader { pdu_type: kind.0, flags: 0, hlen: hlen as u8, pdo, plen: ((hlen + data) as u32).into() }
}

pub(crate) fn check_error(error: &ProtocolError) {
    let text = error.to_string();
    let reference = error.reference;
    let known = ["TCP Transport §", "RDMA Transport ", "NVMe Base "];
    let is_known = known.iter().any(|begin| reference.starts_with(begin));
    assert!(!text.contains('\n') && is_known, "{text}");
}

pub(crate) fn namespace(choices: &mut Choices<'_>) -> NamespaceInfo {
    let can = choices.byte();
    NamespaceInfo {
        nsid: 1,
        blocks: 1024,
        block_len: 512,
        physical_block: 512,
        write_cache: can & 1 != 0,
        max_transfer: choices.of(&[128 << 10, 4096, 512]),
        max_zeroes_blocks: (can & 2 != 0).then_some(16),
        zeroes_deallocate: can & 4 != 0,
        max_deallocate_blocks: (can & 8 != 0).then_some(64),
        deallocate_granularity: 4096,
        ..NamespaceInfo::default()
    }
}

pub(crate) fn names() -> Names {
    let name = |name: &str| Nqn::new(name).expect("the name is valid");
    Names { host: name("nqn.2026-11.t:host"), host_id: [1; 16], subsystem: name("nqn.2026-11.t:a") }
}

fn credentials() -> HostCredentials {
    let host = DhChapSecret::parse(nvme_auth::OWN).expect("the secret is valid");
    let secrets = HostSecrets { host, controller: None, hash: None, group: Some(DhGroup::Null) };
    HostCredentials { secrets: Arc::new(secrets), seed: [1; 32], concatenation: Concatenation::None }
}
