//! Whole sessions with their bytes split in any way, and with errors in them.

use super::*;
use proptest::prelude::*;
use std::time::Instant;

/// One of each: ICReq, and the capsules and data of a queue, beginning with Connect.
fn everything(cntlid: u16, digests: u8) -> Vec<u8> {
    let host = TcpTestHost::new(&node());
    let host = TcpTestHost { digests, ..host };
    let mut bytes = ic_req(digests).as_bytes().to_vec();
    let (connect, data) = connect(NQN, 1, cntlid, 0);
    let numbered = |sqe: Sqe, cid: u16| Sqe { cid: cid.into(), ..sqe };
    bytes.extend(host.capsule(&numbered(connect, 1), data.as_bytes()));
    let write = nvm(NvmOpcode::WRITE, 1, 0, 4);
    let in_capsule = Sqe { dptr: SglDescriptor::in_capsule(0, 2048), ..write };
    bytes.extend(host.capsule(&numbered(in_capsule, 2), &pattern(2048)));
    for (cid, len) in [(3_u16, 8192_usize), (4, 80 << 10)] {
        bytes.extend(host.capsule(&numbered(nvm(NvmOpcode::WRITE, 1, 100, len as u32 / 512), cid), &[]));
        // The second outstanding command of this queue has the second slot.
        let r2t = NvmeTcpR2t { cccid: cid.into(), ttag: (cid - 2).into(), ..NvmeTcpR2t::new_zeroed() };
        bytes.extend(host.h2c_data(&r2t, 0, &pattern(len), true));
    }
    bytes.extend(host.capsule(&numbered(nvm(NvmOpcode::READ, 1, 1000, 8), 5), &[]));
    bytes.extend(host.capsule(&numbered(nvm(NvmOpcode::READ, 7, 0, 8), 6), &[]));
    bytes.extend(host.capsule(&numbered(nvm(NvmOpcode::FLUSH, 1, 0, 1), 7), &[]));
    bytes
}

/// The bytes that the target sends for these parts, received at most `step` bytes at a time. I/O
/// completes at the end, so that the order of completions does not depend on the splits.
fn answers(node: &(Arc<NvmeNode>, Exports), parts: &[&[u8]], step: usize) -> Vec<u8> {
    let host = TcpTestHost::new(node);
    let mut pump = host.pump.split_at(step);
    pump.holds_io = true;
    parts.iter().for_each(|part| pump.client_sends(part).unwrap());
    while !pump.submitted.is_empty() {
        pump.finish_one();
    }
    pump.sent()
}

#[test]
fn a_session_is_the_same_however_its_bytes_are_cut() {
    for digests in [0, DGST_HEADER | DGST_DATA] {
        let node = node();
        let (_admin, cntlid) = TcpTestHost::admin(&node, digests);
        let bytes = everything(cntlid, digests);
        let whole = answers(&node, &[&bytes], usize::MAX);
        assert!(whole.len() > IC_LEN + 4096 + 9 * 24, "{}", whole.len());
        for step in (1..150).chain([4095, 4096, 8192, 65_536]) {
            assert!(answers(&node, &[&bytes], step) == whole, "digests {digests} in steps of {step}");
        }
        // Every split position, except inside of long data.
        for cut in (0..2000).chain(bytes.len() - 300..bytes.len()) {
            let (front, back) = bytes.split_at(cut);
            assert!(answers(&node, &[front, back], usize::MAX) == whole, "digests {digests} cut at {cut}");
        }
    }
}

proptest! {
    #[test]
    fn bytes_with_errors_never_panic(
        digests in 0..4_u8,
        flips in prop::collection::vec((0..1_000_000_usize, any::<u8>()), 1..8),
        step in 1..5000_usize,
    ) {
        let node = node();
        let (_admin, cntlid) = TcpTestHost::admin(&node, digests);
        let mut bytes = everything(cntlid, digests);
        let len = bytes.len();
        // Errors in headers matter most, and most bytes are long data, which is left out.
        for (at, value) in flips {
            let at = at % (len - (80 << 10));
            bytes[if at < 3700 { at } else { at + (80 << 10) }] = value;
        }
        let mut pump = TcpTestHost::new(&node).pump.split_at(step);
        let _ = pump.client_sends(&bytes);
        let _ = pump.session.on_end(Instant::now());
    }
}
