//! An NVMe/TCP initiator session allocates nothing per I/O once it is warm.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

mod counted_initiator;
#[path = "../../volume/tests/counting/mod.rs"]
mod counting;

use blockmux_proto::nvme::nqn::Nqn;
use blockmux_proto::nvme_tcp::client::{
    ControllerInfo, Digests, Names, NamespaceInfo, NvmeTcpQueueSession, QueueConfig,
};
use blockmux_volume::Pool;
use blockmux_wire::nvme::opcode::{Transfer, transfer};
use blockmux_wire::nvme::{Cqe, SglSubtype};
use blockmux_wire::nvmeof::tcp::*;
use counted_initiator::CountedInitiator;
use std::time::Instant;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// A session with this many bytes of in-capsule data.
fn session(in_capsule: u32) -> NvmeTcpQueueSession {
    let name = |name| Nqn::new(name).unwrap();
    let config = QueueConfig {
        names: Names { host: name("nqn.a"), host_id: [1; 16], subsystem: name("nqn.b") },
        credentials: None,
        controller: ControllerInfo { max_entries: 64, in_capsule, ..ControllerInfo::default() },
        namespace: NamespaceInfo {
            nsid: 1,
            blocks: 2048,
            block_len: 512,
            write_cache: true,
            max_transfer: 1 << 20,
            max_zeroes_blocks: Some(2048),
            max_deallocate_blocks: Some(2048),
            ..NamespaceInfo::default()
        },
        queues: 1,
        entries: 64,
    };
    NvmeTcpQueueSession::new(config, Digests::default(), Pool::new(16 << 20), Instant::now())
}

/// The replies of a controller that completes all commands at once.
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
            PduType::H2C_DATA => {
                let (data, _) = Data::read_from_prefix(pdu).unwrap();
                complete(data.cccid.get(), &mut out);
            }
            _ => {
                let (capsule, _) = CapsuleCmd::read_from_prefix(pdu).unwrap();
                let (sqe, len) = (capsule.sqe, capsule.sqe.dptr.length);
                let is_capsule = sqe.dptr.subtype() == SglSubtype::OFFSET;
                if transfer(sqe.opcode) == Transfer::ControllerToHost {
                    let common = head(PduType::C2H_DATA, DATA_LEN, len.get() as usize);
                    let data = Data { common, cccid: sqe.cid, datal: len, ..Data::new_zeroed() };
                    out.extend(data.as_bytes());
                    out.resize(out.len() + len.get() as usize, 0);
                } else if len.get() > 0 && !is_capsule {
                    let common = head(PduType::R2T, DATA_LEN, 0);
                    let r2t = NvmeTcpR2t { common, cccid: sqe.cid, r2tl: len, ..NvmeTcpR2t::new_zeroed() };
                    out.extend(r2t.as_bytes());
                    continue;
                }
                complete(sqe.cid.get(), &mut out);
            }
        }
    }
    out
}

fn complete(cid: u16, out: &mut Vec<u8>) {
    let cqe = Cqe { cid: cid.into(), ..Cqe::new_zeroed() };
    out.extend(CapsuleResp { common: head(PduType::CAPSULE_RESP, CAPSULE_RESP_LEN, 0), cqe }.as_bytes());
}

fn head(kind: PduType, hlen: usize, data: usize) -> CommonHeader {
    let pdo = if data > 0 { hlen as u8 } else { 0 };
    CommonHeader { pdu_type: kind.0, flags: 0, hlen: hlen as u8, pdo, plen: ((hlen + data) as u32).into() }
}

#[test]
fn reads_writes_flushes_and_discards_allocate_nothing() {
    for in_capsule in [0, 8192] {
        let mut initiator = CountedInitiator::new(session(in_capsule), answers);
        initiator.assert_io_allocates_nothing(&format!("{in_capsule} bytes in a capsule"));
    }
}
