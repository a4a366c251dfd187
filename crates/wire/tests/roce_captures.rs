//! RoCEv2 as the Linux kernel's rxe (6.12) speaks it: the tests parse every packet of captured
//! connections, build it again, and check its ICRC.
//!
//! A capture in `tests/data/` is the IPv4 packets of both sides in the order of arrival, each after
//! its length (2 bytes, big-endian). `nvme-rxe.bin` is a whole connection of NVMe discovery and the
//! beginning of the next two; the others begin with the request for a connection, and
//! `srp-rxe.bin` ends with its release.
#![allow(
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    reason = "a wrong capture fails the test"
)]

use blockmux_wire::roce::UDP_PORT;
use blockmux_wire::roce::bth::{self, Bth, QP_GSI, U24};
use blockmux_wire::roce::cm::{
    self, CmAttribute, CmMessage, IpCmHeader, MadHeader, port_of_service_id, service_id,
};
use blockmux_wire::roce::eth::{Aeth, Deth, Q_KEY_GSI, Reth, Syndrome};
use blockmux_wire::roce::icrc::{Fragmentation, ICRC_LEN, IPV4_LEN, RoceAddresses, RoceFlow, UDP_LEN};
use blockmux_wire::roce::opcode::RoceOpcode;
use blockmux_wire::roce::packet::RocePacket;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use zerocopy::{FromBytes, IntoBytes, U16, U32, U64};

const NVME: &[u8] = include_bytes!("data/nvme-rxe.bin");
const SRP: &[u8] = include_bytes!("data/srp-rxe.bin");
const ISER: &[u8] = include_bytes!("data/iser-rxe.bin");

/// A captured packet.
struct Captured<'a> {
    flow: RoceFlow,
    fragmentation: Fragmentation,
    datagram: &'a [u8],
}

fn captured(mut capture: &[u8]) -> Vec<Captured<'_>> {
    let mut packets = Vec::new();
    while let [high, low, rest @ ..] = capture {
        let (ip, rest) = rest.split_at(u16::from_be_bytes([*high, *low]).into());
        capture = rest;
        let number = |at: usize| u16::from_be_bytes([ip[at], ip[at + 1]]);
        let address = |at: usize| Ipv4Addr::from(<[u8; 4]>::try_from(&ip[at..at + 4]).unwrap());
        assert_eq!((ip[0], number(2), ip[9], number(22)), (0x45, ip.len() as u16, 17, UDP_PORT));
        packets.push(Captured {
            flow: RoceFlow {
                addresses: RoceAddresses::V4 { source: address(12), destination: address(16) },
                source_port: number(20),
            },
            fragmentation: Fragmentation { identification: number(4), dont_fragment: ip[6] == 0x40 },
            datagram: &ip[IPV4_LEN + UDP_LEN..],
        });
    }
    packets
}

/// Builds a packet from its fields, and its ICRC.
fn build(captured: &Captured<'_>, packet: &RocePacket<'_>) -> Vec<u8> {
    let old = packet.bth;
    let flags = old.flags & (bth::FLAG_SOLICITED | bth::FLAG_MIGRATED) | bth::pad_flags(packet.payload.len());
    let ack_request = if old.requests_ack() { bth::FLAG_ACK_REQUEST } else { 0 };
    let bth = Bth {
        opcode: old.opcode().0,
        flags,
        p_key: U16::new(old.p_key.get()),
        congestion: 0,
        dest_qp: U24::new(old.dest_qp.get()),
        ack_request,
        psn: U24::new(old.psn.get()),
    };
    let mut bytes = bth.as_bytes().to_vec();
    if let Some(deth) = packet.deth {
        let deth = Deth { q_key: U32::new(deth.q_key.get()), reserved: 0, source_qp: deth.source_qp };
        bytes.extend(deth.as_bytes());
    }
    if let Some(reth) = packet.reth {
        let reth = Reth {
            virtual_address: U64::new(reth.virtual_address.get()),
            r_key: U32::new(reth.r_key.get()),
            dma_length: U32::new(reth.dma_length.get()),
        };
        bytes.extend(reth.as_bytes());
    }
    if let Some(aeth) = packet.aeth {
        let aeth = Aeth { syndrome: Syndrome::from(aeth.syndrome).into(), msn: U24::new(aeth.msn.get()) };
        bytes.extend(aeth.as_bytes());
    }
    packet.immediate.into_iter().chain(packet.invalidate).for_each(|word| bytes.extend(word.as_bytes()));
    assert_eq!(bytes.len(), packet.payload_at);
    bytes.extend(packet.payload);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes.extend(captured.flow.icrc(captured.fragmentation, &bytes));
    bytes
}

/// Parses all packets and builds them again; returns the number of packets of each opcode.
fn rebuild(capture: &[u8]) -> BTreeMap<u8, usize> {
    let mut counts = BTreeMap::new();
    for (captured, number) in captured(capture).iter().zip(0..) {
        let packet = RocePacket::parse(captured.datagram).unwrap();
        assert!(build(captured, &packet) == captured.datagram, "packet {number}: {packet:?}");
        assert!(captured.flow.is_intact(captured.fragmentation, captured.datagram));
        assert_eq!(captured.flow.recover(captured.datagram), Some(captured.fragmentation), "packet {number}");
        *counts.entry(packet.bth.opcode().0).or_default() += 1;
    }
    counts
}

/// The messages of connection management, each built again from its header and body.
fn messages(capture: &[u8]) -> Vec<(Captured<'_>, CmMessage<'_>)> {
    let mut messages = Vec::new();
    for captured in captured(capture) {
        let packet = RocePacket::parse(captured.datagram).unwrap();
        let Some(deth) = packet.deth else { continue };
        assert_eq!((packet.bth.dest_qp.get(), deth.source_qp.get()), (QP_GSI, QP_GSI));
        assert_eq!(deth.q_key.get(), Q_KEY_GSI);
        let (header, message) = CmMessage::parse(packet.payload).unwrap();
        let (attribute, body) = message.parts();
        let new = MadHeader::new(attribute, header.transaction_id.get());
        assert_eq!([new.as_bytes(), body].concat(), packet.payload);
        messages.push((captured, message));
    }
    messages
}

fn attributes(capture: &[u8]) -> Vec<CmAttribute> {
    messages(capture).iter().map(|(_, message)| message.parts().0).collect()
}

#[test]
fn every_packet_of_the_kernel_is_rebuilt_byte_for_byte_with_its_icrc() {
    let nvme = rebuild(NVME);
    assert!(nvme[&RoceOpcode::RC_SEND_ONLY_INVALIDATE.0] > 5 && nvme[&RoceOpcode::RC_WRITE_FIRST.0] > 0);
    let srp = rebuild(SRP);
    assert!(srp[&RoceOpcode::RC_SEND_FIRST.0] > 0 && srp[&RoceOpcode::RC_ACKNOWLEDGE.0] > 50);
    let iser = rebuild(ISER);
    assert!(iser[&RoceOpcode::RC_READ_REQUEST.0] > 0 && iser[&RoceOpcode::RC_READ_RESPONSE_MIDDLE.0] > 0);
}

#[test]
fn damage_of_every_kind_is_detected() {
    let mut passed = 0;
    let mut damaged_copies = 0;
    for (captured, seed) in captured(SRP).iter().zip(1_usize..) {
        for len in 0..captured.datagram.len().min(80) {
            passed += u32::from(captured.flow.recover(&captured.datagram[..len]).is_some());
            damaged_copies += 1;
        }
        let mut damaged = captured.datagram.to_vec();
        let at = damaged.len() - 1 - seed % (damaged.len() - 5);
        damaged[at] ^= (seed % 255 + 1) as u8;
        passed += u32::from(captured.flow.recover(&damaged).is_some());
        damaged_copies += 1;
    }
    // One of 32,768 is expected to pass.
    assert!(damaged_copies > 8000 && passed < 4, "{passed} of {damaged_copies}");
}

#[test]
fn connections_are_set_up_and_released_as_the_kernel_does() {
    let set_up = [CmAttribute::REQ, CmAttribute::REP, CmAttribute::RTU];
    let release = [CmAttribute::DREQ, CmAttribute::DREP];
    assert_eq!(attributes(ISER), set_up);
    assert_eq!(attributes(SRP), [&set_up[..], &release].concat());
    assert_eq!(attributes(NVME), [&set_up[..], &release, &set_up, &set_up].concat());
}

#[test]
fn a_request_has_the_fields_that_the_kernel_gave_it() {
    for (capture, port, rnr_retries) in [(ISER, 3260, 6), (SRP, 5555, 7), (NVME, 4420, 7)] {
        let messages = messages(capture);
        let [(captured, CmMessage::Req(req)), (_, CmMessage::Rep(rep)), (_, CmMessage::Rtu(rtu)), ..] =
            &messages[..]
        else {
            panic!("no connection is set up");
        };
        assert_eq!(port_of_service_id(req.service_id.get()), Some(port));
        assert_eq!(req.service_id.get(), service_id(port));
        assert_eq!((req.service_type(), req.retry_count(), req.rnr_retry_count()), (0, 7, rnr_retries));
        assert_eq!(cm::mtu_of_code(req.mtu_code()), Some(4096));
        let RoceAddresses::V4 { source, destination } = captured.flow.addresses else { panic!() };
        assert_eq!([req.local_gid, req.remote_gid], [source, destination].map(|ip| cm::gid(ip.into())));
        let (ip, _) = IpCmHeader::read_from_prefix(&req.private_data).unwrap();
        assert_eq!(ip, IpCmHeader::new(source.into(), ip.source_port.get(), destination.into()));
        assert_eq!(rep.remote_comm_id, req.local_comm_id);
        assert_eq!([rtu.local_comm_id, rtu.remote_comm_id], [req.local_comm_id, rep.local_comm_id]);
        assert_eq!(rep.rnr_retry_count(), 7);
        // The first packet of each side has the sequence number that the other one asked for.
        let first = |is_initiators: bool, qpn: U24| {
            let packets = self::captured(capture);
            let is_of_initiator = |other: &Captured<'_>| other.flow.addresses == captured.flow.addresses;
            let packets = packets.iter().filter(|other| is_of_initiator(other) == is_initiators);
            let mut packets = packets.map(|captured| *RocePacket::parse(captured.datagram).unwrap().bth);
            packets.find(|bth| bth.dest_qp == qpn && bth.opcode() != RoceOpcode::RC_ACKNOWLEDGE).unwrap().psn
        };
        let found = [first(false, req.local_qpn), first(true, rep.local_qpn)];
        assert_eq!(found, [req.starting_psn, rep.starting_psn]);
    }
}

#[test]
fn a_capture_cut_anywhere_is_parsed_or_refused() {
    for captured in captured(NVME) {
        for len in 0..captured.datagram.len() {
            if let Ok(packet) = RocePacket::parse(&captured.datagram[..len]) {
                assert!(packet.payload_at + packet.payload.len() + packet.pad.len() + ICRC_LEN == len);
            }
        }
    }
}
