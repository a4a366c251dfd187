//! Captures of Linux 6.12 on both sides over rxe, with one side replaced by this implementation.
//!
//! This side has the numbers that the kernel's had, and receives what the other side sent. It has
//! to report the kernel's messages, and to send the kernel's answers.
//! `crates/wire/tests/roce_captures.rs` describes the captures.

use super::super::{Roce, RoceConfig, RoceNumbers};
use crate::queue_pair::Provider;
use blockmux_proto::rdma::{Endpoint, Event, QueuePair};
use blockmux_volume::{Chunk, Pool};
use blockmux_wire::roce::bth::QP_GSI;
use blockmux_wire::roce::cm::{CmMessage, CmRep, CmReq, IP_CM_LEN};
use blockmux_wire::roce::eth::Syndrome;
use blockmux_wire::roce::icrc::{IPV4_LEN, UDP_LEN};
use blockmux_wire::roce::opcode::RoceOpcode;
use blockmux_wire::roce::packet::RocePacket;
use std::net::Ipv4Addr;
use std::time::Instant;
use zerocopy::{FromZeros, IntoBytes};

const NVME: &[u8] = include_bytes!("../../../../wire/tests/data/nvme-rxe.bin");
const SRP: &[u8] = include_bytes!("../../../../wire/tests/data/srp-rxe.bin");
const ISER: &[u8] = include_bytes!("../../../../wire/tests/data/iser-rxe.bin");

/// The packets of both sides, with the sender: 0 for the side that connects.
fn packets(mut capture: &[u8]) -> Vec<(usize, &[u8])> {
    let mut packets = Vec::new();
    while let [high, low, rest @ ..] = capture {
        let (ip, rest) = rest.split_at(u16::from_be_bytes([*high, *low]).into());
        capture = rest;
        packets.push((usize::from(ip[15] == HOSTS[1].octets()[3]), &ip[IPV4_LEN + UDP_LEN..]));
    }
    packets
}

/// The request and the reply of the first connection.
fn set_up(capture: &[u8]) -> (CmReq, CmRep) {
    let mut found = (CmReq::new_zeroed(), CmRep::new_zeroed());
    for (_, packet) in packets(capture).into_iter().take(2) {
        match CmMessage::parse(RocePacket::parse(packet).unwrap().payload).unwrap().1 {
            CmMessage::Req(req) => found.0 = *req,
            CmMessage::Rep(rep) => found.1 = *rep,
            other => panic!("{other:?}"),
        }
    }
    found
}

fn config(side: usize, service: u16) -> RoceConfig {
    let (local, peer) = (HOSTS[side].into(), HOSTS[1 - side].into());
    RoceConfig { local, peer, service, source_port: 0, mtu: 4096, window: 128, keep_alive: None }
}

fn endpoint() -> Endpoint {
    Endpoint {
        receives: 1000,
        receive_len: 16_384,
        sends: 8,
        reads: 128,
        regions: 4,
        private_data: Vec::new(),
        without_invalidation: None,
    }
}

/// What this side sends now, without ICRCs.
fn sent(roce: &mut Roce, now: Instant) -> Vec<Vec<u8>> {
    let mut packets = Vec::new();
    loop {
        let mut packet = Vec::new();
        if !roce.poll_transmit(now, &mut packet) {
            return packets;
        }
        packets.push(packet);
    }
}

/// The passive side in place of the kernel's target, connected to the kernel's initiator.
fn connected_target(capture: &[u8], now: Instant) -> Roce {
    let (req, rep) = set_up(capture);
    let numbers = RoceNumbers {
        queue_pair: rep.local_qpn.get(),
        first_psn: rep.starting_psn.get(),
        comm_id: rep.local_comm_id.get(),
        guid: rep.local_ca_guid.get(),
    };
    let mut roce = Roce::passive(&endpoint(), config(1, 0), numbers, Pool::new(1 << 24), [1; 32], now);
    roce.on_packet(&Chunk::from_slice(packets(capture)[0].1), false, now).unwrap();
    match roce.poll() {
        Some(Event::Requested { private_data, reads }) => {
            assert_eq!(private_data, req.private_data[IP_CM_LEN..]);
            assert_eq!(reads, req.responder_resources.into());
        }
        other => panic!("{other:?}"),
    }
    roce.accept(rep.private_data[..56].to_vec());
    let sent = sent(&mut roce, now);
    let [reply] = &sent[..] else { panic!("{sent:?}") };
    let payload = &reply[20..];
    let Some((_, CmMessage::Rep(ours))) = CmMessage::parse(payload) else { panic!("{payload:?}") };
    // The kernel's target allows no reads by its initiator where the initiator wants none.
    assert_eq!(
        (ours.remote_comm_id, ours.local_qpn, ours.starting_psn, ours.responder_resources),
        (rep.remote_comm_id, rep.local_qpn, rep.starting_psn, req.initiator_depth)
    );
    // The peer's timeout grows with the delay.
    assert!(ours.ack_delay >> 3 <= rep.ack_delay >> 3, "{} above {}", ours.ack_delay, rep.ack_delay);
    roce
}

/// The messages that the capture's initiator has sent in single packets, up to the first data that
/// the target reads.
#[test]
fn the_kernels_initiator_gets_the_answers_of_the_kernels_target() {
    for capture in [NVME, SRP, ISER] {
        let now = Instant::now();
        let mut roce = connected_target(capture, now);
        assert!(roce.poll().is_none(), "the initiator has not answered");
        let (mut answers, mut answered) = (Vec::new(), 0);
        let queue_pairs = packets(capture).into_iter().find_map(|(from, packet)| {
            let packet = RocePacket::parse(packet).unwrap();
            (from == 0 && packet.bth.dest_qp.get() != QP_GSI).then_some(packet.bth.dest_qp)
        });
        for (from, datagram) in packets(capture).into_iter().skip(2) {
            let packet = RocePacket::parse(datagram).unwrap();
            if from == 1 {
                // The kernel's answer, which may come after further messages.
                if packet.bth.opcode() == RoceOpcode::RC_ACKNOWLEDGE {
                    let kernels = &datagram[..datagram.len() - 4];
                    assert!(answers.iter().any(|ours| ours == kernels), "{kernels:?} of {answers:?}");
                    let aeth = packet.aeth.unwrap();
                    assert!(matches!(Syndrome::from(aeth.syndrome), Syndrome::Ack(_)));
                    answered += 1;
                }
                continue;
            }
            if packet.bth.opcode() == RoceOpcode::RC_ACKNOWLEDGE {
                continue;
            }
            if !is_message(&packet) && packet.bth.dest_qp.get() != QP_GSI {
                break;
            }
            roce.on_packet(&Chunk::from_slice(datagram), false, now).unwrap();
            answers.extend(sent(&mut roce, now));
            if packet.bth.dest_qp.get() == QP_GSI {
                assert!(matches!(roce.poll(), Some(Event::Connected { .. })));
            }
            if is_message(&packet) {
                assert_eq!(Some(packet.bth.dest_qp), queue_pairs);
                match roce.poll() {
                    Some(Event::Received { message, invalidated: None, .. }) => {
                        assert_eq!(message.to_vec(), packet.payload);
                    }
                    other => panic!("{other:?} for {packet:?}"),
                }
            }
        }
        assert!(answered >= 1, "the initiator has sent no message");
        assert_eq!(roce.fault(), None);
    }
}

fn is_message(packet: &RocePacket<'_>) -> bool {
    packet.bth.opcode() == RoceOpcode::RC_SEND_ONLY
}

/// The request is the kernel's but for what each host chooses.
#[test]
fn a_request_is_as_the_kernel_makes_it() {
    for (capture, service) in [(NVME, 4420), (SRP, 5555), (ISER, 3260)] {
        let (req, rep) = set_up(capture);
        let numbers = RoceNumbers {
            queue_pair: req.local_qpn.get(),
            first_psn: req.starting_psn.get(),
            comm_id: req.local_comm_id.get(),
            guid: req.local_ca_guid.get(),
        };
        let private_data = req.private_data[IP_CM_LEN..].to_vec();
        let endpoint = Endpoint { private_data, ..endpoint() };
        let source_port = u16::from_be_bytes([req.private_data[2], req.private_data[3]]);
        let config = RoceConfig { source_port, ..config(0, service) };
        let now = Instant::now();
        let mut roce = Roce::active(&endpoint, config, numbers, Pool::new(1 << 20), [1; 32], now);
        let packets = sent(&mut roce, now);
        let [request] = &packets[..] else { panic!("{packets:?}") };
        let Some((_, CmMessage::Req(ours))) = CmMessage::parse(&request[20..]) else { panic!("{request:?}") };
        let expected = CmReq {
            responder_resources: ours.responder_resources,
            initiator_depth: ours.initiator_depth,
            remote_response: ours.remote_response,
            local_response: ours.local_response,
            path_mtu: ours.path_mtu,
            flow_label: ours.flow_label,
            ..req
        };
        assert_eq!(ours.as_bytes(), expected.as_bytes());
        assert_eq!((ours.mtu_code(), ours.service_type()), (req.mtu_code(), req.service_type()));
        // And the kernel's reply is understood.
        roce.on_packet(&Chunk::from_slice(self::packets(capture)[1].1), false, now).unwrap();
        match roce.poll() {
            Some(Event::Connected { private_data }) => assert_eq!(private_data, rep.private_data),
            other => panic!("{other:?}"),
        }
        let packets = sent(&mut roce, now);
        let ready = &self::packets(capture)[2].1;
        let [ours] = &packets[..] else { panic!("{packets:?}") };
        assert_eq!(ours[44..], ready[44..ready.len() - 4], "the RTU is the kernel's");
    }
}

const HOSTS: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 77, 0, 11), Ipv4Addr::new(10, 77, 0, 12)];
