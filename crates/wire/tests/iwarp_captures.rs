//! iWARP as the Linux kernel's siw (6.12) speaks it: the tests parse every frame of captured
//! connections and build it again.
//!
//! A capture in `tests/data/` holds the bytes of both sides in wire order. Each record is the
//! sender (1 byte: `0` connects, `1` listens), a length (4 bytes, big-endian) and that many bytes
//! of the sender's stream. `nvme-siw.bin` is a whole connection of NVMe discovery;
//! `srp-siw-crc.bin` (with CRCs) and `iser-siw.bin` end between two frames.
#![allow(
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    reason = "a wrong capture fails the test"
)]

use blockmux_wire::iwarp::ddp::{
    Control, FLAG_LAST, FLAG_TAGGED, TAGGED_LEN, Tagged, UNTAGGED_LEN, Untagged,
};
use blockmux_wire::iwarp::mpa::{self, CRC_LEN, Enhanced, ReqRepFrame};
use blockmux_wire::iwarp::rdmap::{RdmapOpcode, ReadRequest};
use std::collections::BTreeMap;
use zerocopy::{FromBytes, IntoBytes, U32, U64};

const NVME: &[u8] = include_bytes!("data/nvme-siw.bin");
const SRP: &[u8] = include_bytes!("data/srp-siw-crc.bin");
const ISER: &[u8] = include_bytes!("data/iser-siw.bin");

/// Returns the bytes that one side sent.
fn side(mut capture: &[u8], sender: u8) -> Vec<u8> {
    let mut stream = Vec::new();
    while let [side, a, b, c, d, rest @ ..] = capture {
        let (bytes, rest) = rest.split_at(u32::from_be_bytes([*a, *b, *c, *d]) as usize);
        if *side == sender {
            stream.extend(bytes);
        }
        capture = rest;
    }
    stream
}

/// Parses an MPA request or reply frame, encodes it again, and returns it with the new bytes.
fn parse_begin(stream: &[u8]) -> (ReqRepFrame, Option<Enhanced>, Vec<u8>) {
    let (frame, rest) = ReqRepFrame::read_from_prefix(stream).unwrap();
    let data = &rest[..frame.pd_length.get().into()];
    let enhanced = (frame.flags & mpa::FLAG_ENHANCED != 0).then(|| Enhanced::read_from_prefix(data).unwrap());
    let (enhanced, data) = match enhanced {
        Some((enhanced, data)) => (Some(enhanced), data),
        None => (None, data),
    };
    let mut bytes = frame.as_bytes().to_vec();
    enhanced.iter().for_each(|enhanced| bytes.extend(enhanced.as_bytes()));
    bytes.extend(data);
    (frame, enhanced, bytes)
}

/// Builds an FPDU from its fields. The padding is copied, as siw does not clear it.
fn build_fpdu(header: &[u8], body: &[u8], fpdu: &[u8], has_crc: bool) -> Vec<u8> {
    let len = header.len() + body.len();
    let mut bytes = (len as u16).to_be_bytes().to_vec();
    bytes.extend(header);
    bytes.extend(body);
    let padding = fpdu.len() - CRC_LEN - mpa::padding(len as u16);
    bytes.extend(&fpdu[padding..fpdu.len() - CRC_LEN]);
    let crc = if has_crc { crc32c(&bytes) } else { 0 };
    bytes.extend(crc.to_le_bytes());
    bytes
}

/// Parses a stream and builds it again; returns the number of segments of each control field.
fn rebuild(stream: &[u8]) -> BTreeMap<(u8, u8), usize> {
    let (frame, _, mut bytes) = parse_begin(stream);
    let has_crc = frame.flags & mpa::FLAG_CRC != 0;
    let mut counts = BTreeMap::new();
    let mut msns = [1; 3];
    while bytes.len() < stream.len() {
        let fpdu = &stream[bytes.len()..];
        let len = u16::from_be_bytes([fpdu[0], fpdu[1]]);
        let fpdu = &fpdu[..mpa::fpdu_len(len)];
        let ulpdu = &fpdu[2..2 + usize::from(len)];
        let control = Control::read_from_prefix(ulpdu).unwrap().0;
        assert_eq!(Control::new(control.ddp & (FLAG_TAGGED | FLAG_LAST), control.opcode()), control);
        *counts.entry((control.ddp, control.rdmap)).or_default() += 1;
        if control.is_tagged() {
            let header = Tagged::read_from_prefix(ulpdu).unwrap().0;
            let header = Tagged { control, stag: header.stag, to: U64::new(header.to.get()) };
            bytes.extend(build_fpdu(header.as_bytes(), &ulpdu[TAGGED_LEN..], fpdu, has_crc));
        } else {
            let header = Untagged::read_from_prefix(ulpdu).unwrap().0;
            let queue = header.qn.get() as usize;
            let header = Untagged { msn: U32::new(msns[queue]), mo: U32::new(0), ..header };
            msns[queue] += 1;
            let mut body = ulpdu[UNTAGGED_LEN..].to_vec();
            if control.opcode() == RdmapOpcode::RDMA_READ_REQUEST {
                let request = ReadRequest::read_from_bytes(&body[..]).unwrap();
                assert!(request.rdma_rd_sz.get() <= 64 << 10);
                body = request.as_bytes().to_vec();
            } else {
                assert!(control.opcode().is_send() && queue == 0);
                assert_eq!(control.opcode().invalidates(), header.invalidate_stag.get() != 0);
            }
            bytes.extend(build_fpdu(header.as_bytes(), &body, fpdu, has_crc));
        }
        assert!(bytes.ends_with(fpdu), "frame of {len} bytes before {}", bytes.len());
    }
    assert!(bytes == stream);
    counts
}

/// CRC-32C bit by bit, as this crate has no other implementation.
fn crc32c(bytes: &[u8]) -> u32 {
    let byte = |crc: u32, byte: &u8| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ ((crc & 1) * 0x82f6_3b78))
    };
    !bytes.iter().fold(u32::MAX, byte)
}

#[test]
fn a_whole_connection_of_the_kernel_is_rebuilt_byte_for_byte() {
    let host = rebuild(&side(NVME, 0));
    assert_eq!(host, BTreeMap::from([((0x41, 0x43), 15), ((0xc1, 0x42), 1)]));
    let controller = rebuild(&side(NVME, 1));
    let expected = [((0x41, 0x41), 1), ((0x41, 0x43), 9), ((0x41, 0x44), 5), ((0xc1, 0x40), 4)];
    assert_eq!(controller, BTreeMap::from(expected));
}

#[test]
fn messages_in_several_segments_with_crcs_are_rebuilt_byte_for_byte() {
    let initiator = rebuild(&side(SRP, 0));
    assert!(initiator[&(0x81, 0x42)] == 5 && initiator[&(0xc1, 0x42)] == 1, "{initiator:?}");
    let target = rebuild(&side(SRP, 1));
    assert!(target[&(0xc1, 0x40)] > 20 && target[&(0x41, 0x41)] == 1, "{target:?}");
}

#[test]
fn an_iser_connection_begins_as_the_kernel_began_it() {
    for from in 0..2 {
        assert!(rebuild(&side(ISER, from)).values().sum::<usize>() > 10);
        let (_, enhanced, bytes) = parse_begin(&side(ISER, from));
        let enhanced = enhanced.unwrap();
        let reads = [(128, 1), (1, 128)][usize::from(from)];
        assert_eq!((enhanced.ird(), enhanced.ord()), reads);
        assert_eq!(bytes[24..], [0x80, 0, 0, 0], "iSER's own private data");
    }
}
