//! RoCEv2: its packets alone, and a hostile peer against the whole queue pair, on either side.
//!
//! ```text
//!   stream = record ...   record = 0, length, bytes                  a packet of these bytes
//!                                | 1, attribute, flip (2)            a message of connection management
//!                                | 2, opcode, PSN, key, offset,      a nearly valid packet
//!                                     length (2), flags
//! ```
//! In a nearly valid packet, the sequence number is relative to that which the queue pair expects
//! or has sent, key and offset select from the registered memory, the length is that of the
//! message, and a flag marks the packet as the network does.

use crate::choices::Choices;
use crate::queue_pair_owner::{self, QueuePairOwner};
use blockmux_proto::driver::session::Timed;
use blockmux_proto::rdma::QueuePair;
use blockmux_rdma::roce::{Roce, RoceConfig, RoceNumbers};
use blockmux_volume::{Chunk, Memory, Pool};
use blockmux_wire::roce::bth::{Bth, P_KEY_DEFAULT, QP_GSI, U24};
use blockmux_wire::roce::cm::{
    CmAttribute, CmDrep, CmDreq, CmMessage, CmMra, CmRej, CmRep, CmReq, CmRtu, IP_CM_LEN, IpCmHeader,
    MAD_LEN, MadHeader, gid,
};
use blockmux_wire::roce::eth::{Aeth, Deth, Q_KEY_GSI, Reth, Syndrome};
use blockmux_wire::roce::icrc::{Fragmentation, RoceAddresses, RoceFlow};
use blockmux_wire::roce::opcode::{ExtendedHeaders, RoceOpcode};
use blockmux_wire::roce::packet::{MIN_PACKET_LEN, RocePacket};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, FromZeros, IntoBytes, U16, U32, U64};

/// Reads `data` as a packet, and its payload as a message of connection management. The parts of a
/// packet are all of its bytes, and a packet with its ICRC is recognized as intact.
pub(crate) fn roce_packets(data: &[u8]) {
    if let Ok(packet) = RocePacket::parse(data) {
        let mut bytes = packet.bth.as_bytes().to_vec();
        packet.deth.into_iter().for_each(|header| bytes.extend(header.as_bytes()));
        packet.reth.into_iter().for_each(|header| bytes.extend(header.as_bytes()));
        if let Some(header) = packet.aeth {
            bytes.extend(header.as_bytes());
            assert_eq!(u8::from(Syndrome::from(header.syndrome)), header.syndrome);
        }
        packet.immediate.into_iter().chain(packet.invalidate).for_each(|word| bytes.extend(word.as_bytes()));
        assert_eq!(bytes.len(), packet.payload_at);
        bytes.extend(packet.payload);
        bytes.extend(packet.pad);
        bytes.extend(packet.icrc);
        assert_eq!(bytes, data);
        message(packet.payload);
        assert!(!format!("{packet:?}").is_empty());
    } else if let Ok((bth, _)) = Bth::ref_from_prefix(data) {
        assert!(
            data.len() < MIN_PACKET_LEN + bth.pad_len() + 24
                || bth.version() != 0
                || bth.opcode().headers().is_none(),
            "{bth:?} was refused without a reason"
        );
    }
    message(data);
    let (v4, v6) = (Ipv4Addr::new(192, 0, 2, 1), Ipv6Addr::LOCALHOST);
    let source_port = data.first_chunk().map_or(0, |port| u16::from_be_bytes(*port));
    let fragmentation = Fragmentation {
        identification: source_port.rotate_left(5),
        dont_fragment: data.len().is_multiple_of(2),
    };
    for addresses in
        [RoceAddresses::V4 { source: v4, destination: v4 }, RoceAddresses::V6 { source: v6, destination: v6 }]
    {
        let flow = RoceFlow { addresses, source_port };
        let found = flow.recover(data);
        assert!(found.is_none_or(|found| flow.is_intact(found, data)));
        let sealed = [data, &flow.icrc(fragmentation, data)].concat();
        assert!(flow.is_intact(fragmentation, &sealed));
        let is_v4 = matches!(addresses, RoceAddresses::V4 { .. });
        let expected = if is_v4 { fragmentation } else { Fragmentation::default() };
        // Longer packets do not exist.
        assert!(flow.recover(&sealed) == Some(expected) || data.len() > 4500);
    }
}

fn message(mad: &[u8]) {
    let Some((header, message)) = CmMessage::parse(mad) else { return };
    let (attribute, body) = message.parts();
    let new = MadHeader::new(attribute, header.transaction_id.get());
    assert!(header.is_cm() && new.attribute_id == header.attribute_id);
    assert_eq!([header.as_bytes(), body].concat(), mad);
    assert!(!format!("{message:?}").is_empty());
    if let CmMessage::Req(req) = message {
        assert!(req.mtu_code() < 16 && req.rnr_retry_count() < 8 && req.retry_count() < 8);
        assert!(IpCmHeader::read_from_prefix(&req.private_data).is_ok());
    }
}

/// Reads `data` as choices and records.
pub(crate) fn roce_peer(data: &[u8]) {
    let (mut choices, stream) = Choices::split(data);
    let bits = choices.byte();
    let mtu = choices.of(&[256, 512, 1024, 4096]);
    let config = RoceConfig {
        local: OURS.into(),
        peer: THEIRS.into(),
        service: 4420,
        source_port: 1,
        mtu,
        window: choices.of(&[1, 4, 64]),
        keep_alive: (bits & 4 != 0).then_some(Duration::from_secs(1)),
    };
    let numbers = RoceNumbers { queue_pair: 17, first_psn: FIRST_PSN, comm_id: 5, guid: 1 };
    let (pool, now) = (Pool::new(choices.of(&[1 << 20, 0])), Instant::now());
    let is_active = bits & 1 != 0;
    let create = if is_active { Roce::active } else { Roce::passive };
    let mut roce = create(&queue_pair_owner::endpoint(), config, numbers, pool.clone(), [9; 32], now);
    let mut run = RoceRun {
        owner: QueuePairOwner::new(&mut roce),
        roce,
        is_active,
        choices,
        records: &stream,
        packet: Chunk::new(Memory::from_heap(MAX_PACKET_LEN)),
        mtu: mtu.into(),
        expected: FIRST_PSN,
        sent: FIRST_PSN,
        now,
    };
    if bits & 2 == 0 {
        // Most inputs are to get beyond the set-up.
        run.manage(if is_active { CmAttribute::REP } else { CmAttribute::REQ }, [0, 0]);
        run.poll_events();
        run.manage(CmAttribute::RTU, [0, 0]);
    }
    for _ in 0..MAX_TURNS {
        if !run.turn() {
            break;
        }
    }
    run.finish();
    drop(run);
    assert_eq!(pool.out_bytes(), 0, "the pool has lost memory");
}

struct RoceRun<'a> {
    roce: Roce,
    owner: QueuePairOwner,
    is_active: bool,
    choices: Choices<'a>,
    /// The rest of the stream.
    records: &'a [u8],
    /// Memory for the packet that arrives. A buffer for each would be a page or more, of which
    /// AddressSanitizer keeps millions.
    packet: Chunk,
    mtu: usize,
    /// The sequence number that follows the peer's last request.
    expected: u32,
    /// The last sequence number that the queue pair has sent.
    sent: u32,
    now: Instant,
}

impl RoceRun<'_> {
    /// Runs one turn of the driver; returns whether there was progress.
    fn turn(&mut self) -> bool {
        let mut moved = self.owner.post(&mut self.roce, &mut self.choices);
        moved |= self.send();
        moved |= self.next_record();
        moved |= self.poll_events();
        match self.choices.byte() {
            255 => self.roce.disconnect(),
            254 => drop(self.roce.invalidate(self.owner.granted(1).stag)),
            253 => self.roce.on_unreachable(),
            240..253 => self.pass_time(),
            _ => {}
        }
        moved
    }

    fn poll_events(&mut self) -> bool {
        self.owner.poll_events(&mut self.roce, &mut self.choices)
    }

    fn receive(&mut self, packet: &[u8], is_marked: bool) {
        self.packet.take(self.packet.unread().len());
        if !self.packet.is_idle() {
            self.packet = Chunk::new(Memory::from_heap(MAX_PACKET_LEN));
        }
        self.packet.recycle();
        self.packet.extend(packet);
        if let Err(error) = self.roce.on_packet(&self.packet, is_marked, self.now) {
            let text = error.to_string();
            assert!(!text.contains('\n') && !error.reference.is_empty(), "{text}");
        }
    }

    fn pass_time(&mut self) {
        if let Some(when) = self.roce.poll_timeout() {
            self.now = self.now.max(when) + Duration::from_nanos(1);
            self.roce.on_timeout(self.now).ok();
            self.send();
            assert!(self.roce.poll_timeout().is_none_or(|next| next > self.now), "a timer stands still");
        }
    }

    /// Sends what the queue pair has to send; returns whether there was anything.
    fn send(&mut self) -> bool {
        let mut packet = Vec::new();
        let mut moved = false;
        while self.roce.poll_transmit(self.now, &mut packet) {
            moved = true;
            packet.extend([0; 4]);
            let parsed = RocePacket::parse(&packet).expect("what is sent is a packet");
            assert!(parsed.payload.len() <= self.mtu.max(MAD_LEN));
            if parsed.bth.dest_qp.get() != QP_GSI && is_request(parsed.bth.opcode()) {
                self.sent = parsed.bth.psn.get();
            }
            packet.clear();
        }
        moved
    }

    /// Delivers the peer's next packet.
    fn next_record(&mut self) -> bool {
        let Some((&kind, rest)) = self.records.split_first() else { return false };
        self.records = rest;
        match kind {
            1 => {
                let Some(([attribute, flip @ ..], rest)) = rest.split_first_chunk::<3>() else { return true };
                self.records = rest;
                self.manage(CmAttribute(u16::from(*attribute)), *flip);
            }
            2 => self.nearly_right(),
            _ => {
                let (len, rest) = rest.split_first().unwrap_or((&0, &[]));
                let (bytes, rest) = rest.split_at(rest.len().min((*len).into()));
                self.records = rest;
                self.receive(bytes, len & 1 != 0);
            }
        }
        true
    }

    /// Delivers a message of connection management that is right but for one flipped byte, if the
    /// second byte of `flip` is not 0.
    fn manage(&mut self, attribute: CmAttribute, flip: [u8; 2]) {
        let (local_comm_id, remote_comm_id) = (U32::new(9), U32::new(5));
        let (qpn, psn) = (U24::new(33), U24::new(FIRST_PSN));
        let body = match attribute {
            CmAttribute::REQ => {
                let mut req = CmReq {
                    local_comm_id,
                    local_qpn: qpn,
                    starting_psn: psn,
                    responder_resources: 2,
                    initiator_depth: 2,
                    path_mtu: 0x17,
                    local_gid: gid(THEIRS.into()),
                    ..CmReq::new_zeroed()
                };
                let ip = IpCmHeader::new(THEIRS.into(), 1, OURS.into());
                req.private_data[..IP_CM_LEN].copy_from_slice(ip.as_bytes());
                req.as_bytes().to_vec()
            }
            CmAttribute::REP => {
                let rep = CmRep {
                    local_comm_id,
                    remote_comm_id,
                    local_qpn: qpn,
                    starting_psn: psn,
                    responder_resources: 2,
                    initiator_depth: 2,
                    rnr_retry: 0x40,
                    ..CmRep::new_zeroed()
                };
                rep.as_bytes().to_vec()
            }
            CmAttribute::RTU => {
                CmRtu { local_comm_id, remote_comm_id, ..CmRtu::new_zeroed() }.as_bytes().to_vec()
            }
            CmAttribute::REJ => {
                CmRej { local_comm_id, remote_comm_id, ..CmRej::new_zeroed() }.as_bytes().to_vec()
            }
            CmAttribute::MRA => {
                let service_timeout = flip[1];
                CmMra { local_comm_id, remote_comm_id, service_timeout, ..CmMra::new_zeroed() }
                    .as_bytes()
                    .to_vec()
            }
            CmAttribute::DREQ => {
                let remote_qpn = U24::new(17);
                CmDreq { local_comm_id, remote_comm_id, remote_qpn, ..CmDreq::new_zeroed() }
                    .as_bytes()
                    .to_vec()
            }
            _ => CmDrep { local_comm_id, remote_comm_id, ..CmDrep::new_zeroed() }.as_bytes().to_vec(),
        };
        let bth = Bth {
            opcode: RoceOpcode::UD_SEND_ONLY.0,
            p_key: U16::new(P_KEY_DEFAULT),
            dest_qp: U24::new(QP_GSI),
            ..Bth::new_zeroed()
        };
        let deth = Deth { q_key: U32::new(Q_KEY_GSI), reserved: 0, source_qp: U24::new(QP_GSI) };
        let header = MadHeader::new(attribute, 1);
        let mut packet = [bth.as_bytes(), deth.as_bytes(), header.as_bytes(), &body, &[0; 4]].concat();
        let [at, change] = flip;
        packet[20 + usize::from(at)] ^= change;
        self.receive(&packet, false);
    }

    /// Delivers a packet whose fields are right or nearly so.
    fn nearly_right(&mut self) {
        let Some(([opcode, psn, key, offset, high, low, flags], rest)) =
            self.records.split_first_chunk::<7>()
        else {
            return;
        };
        self.records = rest;
        let opcode = RoceOpcode(*opcode);
        let len = usize::from(u16::from_be_bytes([*high, *low]));
        let granted = self.owner.granted(usize::from(key & 1));
        let r_key = if *key < 192 { granted.stag.0 } else { granted.stag.0 ^ 1 };
        let address = queue_pair_owner::address_near_edge(granted, len, *offset);
        let is_answer = !is_request(opcode);
        let base = if is_answer { self.sent } else { self.expected };
        // Mostly the right number.
        let step = if *psn < 128 { 0 } else { i32::from(*psn as i8) + 64 };
        let number = base.wrapping_add_signed(step);
        let headers = opcode.headers().unwrap_or(ExtendedHeaders::empty());
        let bth = Bth {
            opcode: opcode.0,
            // Flags include the length of a pad that may not be there.
            flags: flags & 0xb0,
            p_key: U16::new(P_KEY_DEFAULT),
            dest_qp: U24::new(17),
            ack_request: flags << 7,
            psn: U24::new(number),
            ..Bth::new_zeroed()
        };
        let mut packet = bth.as_bytes().to_vec();
        if headers.contains(ExtendedHeaders::RETH) {
            let reth = Reth {
                virtual_address: U64::new(address),
                r_key: U32::new(r_key),
                dma_length: U32::new(len as u32),
            };
            packet.extend(reth.as_bytes());
        }
        if headers.contains(ExtendedHeaders::AETH) {
            // The low byte of the length is free for an answer.
            packet.extend(Aeth { syndrome: *key, msn: U24::new(1) }.as_bytes());
        }
        if headers.intersects(ExtendedHeaders::IMMEDIATE | ExtendedHeaders::IETH) {
            packet.extend(r_key.to_be_bytes());
        }
        let is_read = opcode == RoceOpcode::RC_READ_REQUEST;
        let payload = if is_read || opcode == RoceOpcode::RC_ACKNOWLEDGE { 0 } else { len.min(self.mtu) };
        packet.resize(packet.len() + payload + bth.pad_len() * usize::from(flags & 2 == 0), 0xaa);
        packet.extend([0; 4]);
        if step == 0 && !is_answer {
            let packets = if is_read { len.div_ceil(self.mtu).max(1) } else { 1 };
            self.expected = self.expected.wrapping_add(packets as u32);
        }
        self.receive(&packet, flags & 4 != 0);
    }

    /// Loses the connection, and checks that nothing is left of it.
    fn finish(&mut self) {
        self.poll_events();
        self.roce.on_unreachable();
        self.send();
        self.poll_events();
        assert!(!self.send() && self.owner.messages() == 0, "is active: {}", self.is_active);
        self.owner.finish(&self.roce);
    }
}

fn is_request(opcode: RoceOpcode) -> bool {
    !matches!(opcode, RoceOpcode::RC_ACKNOWLEDGE | RoceOpcode::CONGESTION_NOTIFICATION)
        && opcode.read_response_place().is_none()
}

const OURS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const THEIRS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
/// Both sides' first sequence number, which wraps soon.
const FIRST_PSN: u32 = 0xff_fffc;
const MAX_TURNS: usize = 3000;
/// In bytes; longer than all that this file makes.
const MAX_PACKET_LEN: usize = 8192;
