//! An NVMe/TCP initiator session allocates nothing per I/O once it has seen its usual depth.
#![allow(unsafe_code, reason = "a counting allocator")]
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

use blockmux_proto::nvme::nqn::Nqn;
use blockmux_proto::nvmeof::tcp::initiator::{
    ControllerInfo, Digests, Names, NamespaceInfo, QueueConfig, QueueSession,
};
use blockmux_proto::session::{Demand, Initiator, StreamSession};
use blockmux_volume::{Chunk, Io, Memory, Op, Output, Pool, SgList, Tag};
use blockmux_wire::nvme::opcode::{Transfer, transfer};
use blockmux_wire::nvme::{Cqe, SglSubtype};
use blockmux_wire::nvmeof::tcp::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Instant;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The initiator, and a controller that does all at once.
struct Pair {
    initiator: QueueSession,
    /// What the initiator receives.
    chunk: Chunk,
    /// Allocations of the initiator.
    allocations: u64,
}

impl Pair {
    /// With so many bytes in a capsule.
    fn new(in_capsule: u32) -> Pair {
        let name = |name| Nqn::new(name).unwrap();
        let config = QueueConfig {
            names: Names { host: name("nqn.a"), host_id: [1; 16], subsystem: name("nqn.b") },
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
            qid: 1,
            entries: 64,
            digests: Digests::default(),
        };
        let initiator = QueueSession::new(config, Pool::new(16 << 20), Instant::now());
        let chunk = Chunk::new(Memory::from_heap(1 << 20));
        let mut pair = Pair { initiator, chunk, allocations: 0 };
        while !pair.initiator.is_ready() {
            pair.exchange();
        }
        pair
    }

    /// What `f` does to the initiator counts.
    fn counted<R>(&mut self, f: impl FnOnce(&mut QueueSession, &Chunk) -> R) -> R {
        let before = ALLOCATIONS.get();
        let result = f(&mut self.initiator, &self.chunk);
        self.allocations += ALLOCATIONS.get() - before;
        result
    }

    /// Bytes there, and bytes back.
    fn exchange(&mut self) {
        let back = answers(&self.initiator.outbox().take_bytes());
        self.chunk.recycle();
        self.chunk.extend(&back);
        while let Demand::Bytes(need) = self.initiator.demand() {
            if self.chunk.unread().len() < need {
                break;
            }
            let taken = self.counted(|initiator, chunk| initiator.on_bytes(chunk).unwrap());
            self.chunk.take(taken);
        }
    }

    /// Turns of I/O at depth 16, after some to get used to it.
    fn run(&mut self, io: impl Fn(u64) -> Io) -> u64 {
        for turn in 0..60 {
            if turn == 10 {
                self.allocations = 0;
            }
            for tag in 0..16 {
                let io = io(tag);
                self.counted(|initiator, _| initiator.submit(io));
            }
            let mut left = 16;
            while left > 0 {
                self.exchange();
                while let Some(done) = self.counted(|initiator, _| initiator.poll_done()) {
                    assert!(matches!(done.result, Ok(Output::Data(_) | Output::Nothing)));
                    left -= 1;
                }
            }
        }
        self.allocations
    }
}

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
                    let r2t = R2t { common, cccid: sqe.cid, r2tl: len, ..R2t::new_zeroed() };
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
        let mut pair = Pair::new(in_capsule);
        let memory = SgList::one(Memory::from_heap(4096).seg(0, 4096));
        let lent = |tag| Io::new(Tag(tag), Op::Read, tag * 4096, 4096);
        assert_eq!(pair.run(lent), 0, "{in_capsule}, reads");
        let into_memory = |tag| Io { data: Some(memory.clone()), ..lent(tag) };
        assert_eq!(pair.run(into_memory), 0, "{in_capsule}, reads into memory");
        let write = |tag| Io { op: Op::Write { fua: true }, data: Some(memory.clone()), ..lent(tag) };
        assert_eq!(pair.run(write), 0, "{in_capsule}, writes");
        assert_eq!(pair.run(|tag| Io::new(Tag(tag), Op::Flush, 0, 0)), 0, "{in_capsule}, flushes");
        let discard = |tag| Io { op: Op::Discard { fua: false }, ..lent(tag) };
        assert_eq!(pair.run(discard), 0, "{in_capsule}, discards");
    }
}
