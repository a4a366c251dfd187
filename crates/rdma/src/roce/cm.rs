//! Connection management of one connection (volume 1, §12): set-up, refusal, and release.
//!
//! ```text
//!   active: REQ ──▶                                  passive: REQ ──▶ Requested
//!           REP ──▶ Accepted, sends RTU                       (session) sends REP or REJ
//!           REJ ──▶ Rejected                                  RTU, or a packet ──▶ Established
//!   either: sends DREQ, DREP ──▶ Released            other:   DREQ ──▶ Released, sends DREP
//! ```
//! Messages are datagrams and may be lost: a message that is to be answered is repeated until then,
//! a limited number of times, and a repeated message gets its answer again. What is sent to a peer
//! that has not shown that it receives it is repeated less often: the request may be forged, and
//! an honest peer repeats it. While the session has not decided about a request, a repetition is
//! answered by MRA, which asks for more time.
//!
//! An established connection rejects another request of its peer's queue pair: a peer that was
//! restarted may use the number again. It goes on itself, because the request may be forged.

use super::RoceConfig;
use super::encode::PacketHead;
use super::guid::is_guid;
use super::psn::Psn;
use blockmux_wire::roce::bth::{P_KEY_DEFAULT, QP_GSI, U24};
use blockmux_wire::roce::cm::{
    ANSWERS_REP, ANSWERS_REQ, CmAttribute, CmDrep, CmDreq, CmMessage, CmMra, CmRej, CmRep, CmReq, CmRtu,
    IP_CM_LEN, IpCmHeader, MAD_LEN, MadHeader, REQ_PRIVATE_DATA, RejectReason, code_of_mtu, gid, mtu_of_code,
    service_id,
};
use blockmux_wire::roce::eth::{Deth, Q_KEY_GSI, timeout_ns};
use blockmux_wire::roce::opcode::RoceOpcode;
use std::time::{Duration, Instant};
use zerocopy::{BE, FromBytes, FromZeros, IntoBytes, U16, U32, U64};

/// State of connection management.
pub(super) struct CmConnection {
    numbers: RoceNumbers,
    phase: CmPhase,
    /// The peer's number of the connection, and its queue pair.
    peer_comm_id: u32,
    peer_qp: u32,
    transaction_id: u64,
    /// RDMA Reads that this side supports in flight.
    reads: u32,
    /// The body of the REQ, REP or REJ, which may have to be repeated.
    set_up: SetUpMessage,
    /// Messages to send.
    due: DueMessages,
    repetition: Option<Repetition>,
    /// Number of datagrams sent.
    sent: u32,
}

/// Numbers of one end of a connection. A peer that could predict them could forge packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoceNumbers {
    /// Number of the queue pair, in 24 bits; unique on its UDP port, and above 1.
    pub queue_pair: u32,
    /// The first packet sequence number that the peer has to use, in 24 bits.
    pub first_psn: u32,
    /// Communication identifier, unique on its UDP port.
    pub comm_id: u32,
    /// Identifies the process to its peers.
    pub guid: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CmPhase {
    /// Passive: no request has arrived.
    Listening,
    /// Active: the request is unanswered.
    Requesting,
    /// Passive: the session has to decide.
    Requested,
    /// Passive: the reply is unanswered.
    Accepted,
    /// Passive: the request was refused.
    Rejected,
    Established,
    /// A DREQ of this side is unanswered.
    Releasing,
    Released,
}

enum SetUpMessage {
    None,
    Req(Box<CmReq>),
    Rep(Box<CmRep>),
    Rej(Box<CmRej>),
}

/// Messages to send, at most one of each kind.
#[derive(Clone, Copy, Default)]
struct DueMessages {
    /// The REQ, REP or REJ.
    set_up: bool,
    ready_to_use: bool,
    more_time: bool,
    release: bool,
    released: bool,
    rejects: Option<StaleRequest>,
}

/// A request that is rejected, because its queue pair is that of this connection.
#[derive(Clone, Copy)]
struct StaleRequest {
    transaction_id: u64,
    comm_id: U32<BE>,
}

/// The repetition of the message that the current phase wants to have answered.
#[derive(Clone, Copy)]
struct Repetition {
    at: Instant,
    left: u8,
}

/// What both sides of a connection have agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RoceTerms {
    pub(super) peer_qp: u32,
    /// The first sequence number of this side's packets, which the peer has chosen.
    pub(super) first_psn: Psn,
    /// Payload of a full packet, in bytes.
    pub(super) mtu: u16,
    /// RDMA Reads that this side may have in flight.
    pub(super) reads: u32,
    /// RDMA Reads that the peer may have in flight.
    pub(super) peer_reads: u32,
    /// How often this side sends again when the peer had no receive buffer; 7 for any number.
    pub(super) not_ready_limit: u8,
    /// The GUID by which the peer identifies its adapter or process.
    pub(super) peer_guid: u64,
}

/// What a message of the peer means for the connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum CmOutcome {
    Nothing,
    /// Passive: a request with this private data.
    Requested(RoceTerms, Vec<u8>),
    /// Active: the request was accepted.
    Accepted(RoceTerms, Vec<u8>),
    /// Active: the request was refused; private data if the peer's application did so.
    Rejected(RejectReason, Vec<u8>),
    /// Passive: the peer has the reply.
    Established,
    /// Somebody requests a connection of the peer's queue pair.
    Stale,
    /// The peer has ended the connection, or has answered that this side does.
    Released,
}

impl CmConnection {
    /// The passive side, before a request.
    pub(super) fn passive(numbers: RoceNumbers, reads: u32) -> CmConnection {
        CmConnection {
            numbers,
            phase: CmPhase::Listening,
            peer_comm_id: 0,
            peer_qp: 0,
            transaction_id: 0,
            reads: reads.min(MAX_READS),
            set_up: SetUpMessage::None,
            due: DueMessages::default(),
            repetition: None,
            sent: 0,
        }
    }

    /// The active side, which sends a request with at most 56 bytes of private data.
    pub(super) fn active(
        numbers: RoceNumbers,
        reads: u32,
        config: &RoceConfig,
        private_data: &[u8],
    ) -> CmConnection {
        let mut cm = CmConnection::passive(numbers, reads);
        cm.phase = CmPhase::Requesting;
        cm.transaction_id = u64::from(numbers.comm_id) << 32 | u64::from(numbers.first_psn);
        cm.set_up = SetUpMessage::Req(Box::new(request(&numbers, cm.reads, config, private_data)));
        cm.due.set_up = true;
        cm
    }

    /// Whether the connection is established for both sides, so that this side may send.
    pub(super) fn is_established(&self) -> bool {
        matches!(self.phase, CmPhase::Established | CmPhase::Releasing)
    }

    /// Whether this side has asked to end the connection, or both have ended it.
    pub(super) fn is_releasing(&self) -> bool {
        matches!(self.phase, CmPhase::Releasing | CmPhase::Released)
    }

    /// Whether nothing is left to send or to wait for.
    pub(super) fn is_drained(&self) -> bool {
        let due = self.due;
        let is_due = due.set_up || due.ready_to_use || due.more_time || due.release || due.released;
        !is_due && due.rejects.is_none() && matches!(self.phase, CmPhase::Released | CmPhase::Rejected)
    }

    /// Handles a management datagram.
    pub(super) fn on_datagram(&mut self, mad: &[u8], config: &RoceConfig, now: Instant) -> CmOutcome {
        let Some((header, message)) = CmMessage::parse(mad) else { return CmOutcome::Nothing };
        if let CmMessage::Req(req) = message {
            return self.on_request(header, req, config);
        }
        if message.remote_comm_id() != Some(self.numbers.comm_id) {
            return CmOutcome::Nothing;
        }
        let is_of_peer = message.local_comm_id() == self.peer_comm_id;
        match message {
            CmMessage::Rep(rep) if self.phase == CmPhase::Requesting => self.on_reply(rep, config),
            CmMessage::Rej(rej) if self.phase == CmPhase::Requesting => {
                self.stop();
                let reason = RejectReason(rej.reason.get());
                let is_of_application = reason == RejectReason::CONSUMER;
                let data = if is_of_application { rej.private_data.to_vec() } else { Vec::new() };
                CmOutcome::Rejected(reason, data)
            }
            CmMessage::Mra(mra) => {
                let is_awaited = match self.phase {
                    CmPhase::Requesting => mra.answers() == ANSWERS_REQ,
                    CmPhase::Accepted => mra.answers() == ANSWERS_REP && is_of_peer,
                    _ => false,
                };
                if is_awaited && let Some(repetition) = &mut self.repetition {
                    let more_time = Duration::from_nanos(timeout_ns(mra.service_timeout >> 3));
                    let at = now.checked_add(RESPONSE_TIMEOUT.saturating_add(more_time));
                    repetition.at = at.unwrap_or(repetition.at);
                }
                CmOutcome::Nothing
            }
            _ if !is_of_peer => CmOutcome::Nothing,
            // The RTU was lost.
            CmMessage::Rep(_) if self.phase == CmPhase::Established => {
                self.due.ready_to_use = matches!(self.set_up, SetUpMessage::Req(_));
                CmOutcome::Nothing
            }
            CmMessage::Rtu(_) => self.establish(),
            CmMessage::Rej(_) if matches!(self.phase, CmPhase::Accepted | CmPhase::Established) => {
                self.stop();
                CmOutcome::Released
            }
            CmMessage::Dreq(dreq) if dreq.remote_qpn.get() == self.numbers.queue_pair => {
                self.transaction_id = header.transaction_id.get();
                self.stop();
                self.due.released = true;
                CmOutcome::Released
            }
            CmMessage::Drep(_) if self.phase == CmPhase::Releasing => {
                self.stop();
                CmOutcome::Released
            }
            _ => CmOutcome::Nothing,
        }
    }

    fn on_request(&mut self, header: &MadHeader, req: &CmReq, config: &RoceConfig) -> CmOutcome {
        if self.phase != CmPhase::Listening {
            if req.local_comm_id.get() == self.peer_comm_id {
                match self.phase {
                    CmPhase::Requested => self.due.more_time = true,
                    CmPhase::Accepted | CmPhase::Rejected => self.due.set_up = true,
                    _ => {}
                }
            } else if self.is_established() && req.local_qpn.get() == self.peer_qp {
                let (transaction_id, comm_id) = (header.transaction_id.get(), req.local_comm_id);
                self.due.rejects = Some(StaleRequest { transaction_id, comm_id });
                return CmOutcome::Stale;
            }
            return CmOutcome::Nothing;
        }
        let (ip, private_data) = req.private_data.split_at(IP_CM_LEN);
        let Ok(ip) = IpCmHeader::read_from_bytes(ip) else { return CmOutcome::Nothing };
        let expected = IpCmHeader::new(config.peer, ip.source_port.get(), config.local);
        // The answer goes where the request came from, so a request that says another address is
        // forged, or was translated by a router, which the checksum of packets does not survive.
        if (IpCmHeader { version: 0, ..ip }) != expected || req.local_gid != gid(config.peer) {
            return CmOutcome::Nothing;
        }
        self.transaction_id = header.transaction_id.get();
        (self.peer_comm_id, self.peer_qp) = (req.local_comm_id.get(), req.local_qpn.get());
        self.phase = CmPhase::Requested;
        let mtu = mtu_of_code(req.mtu_code()).filter(|mtu| *mtu <= config.mtu);
        let mtu = match mtu {
            _ if ip.version != 0 => Err(RejectReason::UNSUPPORTED_REQUEST),
            _ if req.service_type() != 0 => Err(RejectReason::INVALID_SERVICE_TYPE),
            mtu => mtu.ok_or(RejectReason::INVALID_MTU),
        };
        let mtu = match mtu {
            Ok(mtu) => mtu,
            Err(reason) => {
                self.reject(reason, &[]);
                return CmOutcome::Released;
            }
        };
        let peer_guid = req.local_ca_guid.get();
        let terms = RoceTerms {
            peer_qp: self.peer_qp,
            first_psn: req.starting_psn.into(),
            mtu: long_mtu(config, peer_guid, req.local_q_key.get()).unwrap_or(mtu),
            reads: self.reads.min(req.responder_resources.into()),
            peer_reads: self.reads.min(req.initiator_depth.into()),
            not_ready_limit: req.rnr_retry_count(),
            peer_guid,
        };
        CmOutcome::Requested(terms, private_data.to_vec())
    }

    fn on_reply(&mut self, rep: &CmRep, config: &RoceConfig) -> CmOutcome {
        (self.peer_comm_id, self.peer_qp) = (rep.local_comm_id.get(), rep.local_qpn.get());
        self.phase = CmPhase::Established;
        self.repetition = None;
        self.due = DueMessages { ready_to_use: true, ..DueMessages::default() };
        let peer_guid = rep.local_ca_guid.get();
        let mtu = long_mtu(config, peer_guid, rep.local_q_key.get());
        let terms = RoceTerms {
            peer_qp: self.peer_qp,
            first_psn: rep.starting_psn.into(),
            mtu: mtu.unwrap_or(offered_mtu(config).1),
            reads: self.reads.min(rep.responder_resources.into()),
            peer_reads: self.reads.min(rep.initiator_depth.into()),
            not_ready_limit: rep.rnr_retry_count(),
            peer_guid,
        };
        CmOutcome::Accepted(terms, rep.private_data.to_vec())
    }

    /// The peer has the reply: it says so, or it has sent a packet of the connection.
    pub(super) fn establish(&mut self) -> CmOutcome {
        if self.phase != CmPhase::Accepted {
            return CmOutcome::Nothing;
        }
        self.phase = CmPhase::Established;
        self.repetition = None;
        CmOutcome::Established
    }

    /// Passive: accepts the request.
    pub(super) fn accept(&mut self, terms: &RoceTerms, private_data: &[u8]) {
        // Both are at most [`MAX_READS`].
        let [peer_reads, reads] = [terms.peer_reads, terms.reads].map(|reads| reads as u8);
        let long_mtu = Some(terms.mtu).filter(|mtu| *mtu > MAX_MTU).unwrap_or_default();
        let mut rep = CmRep {
            local_comm_id: U32::new(self.numbers.comm_id),
            remote_comm_id: U32::new(self.peer_comm_id),
            local_q_key: U32::new(long_mtu.into()),
            local_qpn: U24::new(self.numbers.queue_pair),
            starting_psn: U24::new(self.numbers.first_psn),
            responder_resources: peer_reads,
            initiator_depth: reads,
            ack_delay: ACK_DELAY_CODE << 3,
            rnr_retry: NOT_READY_RETRIES << 5,
            local_ca_guid: U64::new(self.numbers.guid),
            ..CmRep::new_zeroed()
        };
        copy_to_start(&mut rep.private_data, private_data);
        self.set_up = SetUpMessage::Rep(Box::new(rep));
        self.due = DueMessages { set_up: true, ..DueMessages::default() };
        self.phase = CmPhase::Accepted;
    }

    /// Passive: refuses the request.
    pub(super) fn reject(&mut self, reason: RejectReason, private_data: &[u8]) {
        let mut rej = CmRej {
            local_comm_id: U32::new(self.numbers.comm_id),
            remote_comm_id: U32::new(self.peer_comm_id),
            message: ANSWERS_REQ,
            reason: U16::new(reason.0),
            ..CmRej::new_zeroed()
        };
        copy_to_start(&mut rej.private_data, private_data);
        self.set_up = SetUpMessage::Rej(Box::new(rej));
        self.due = DueMessages { set_up: true, ..DueMessages::default() };
        self.phase = CmPhase::Rejected;
    }

    /// Ends an established connection. A set-up that has not got so far just stops.
    pub(super) fn release(&mut self) {
        match self.phase {
            CmPhase::Established => {
                self.phase = CmPhase::Releasing;
                self.repetition = None;
                self.due.release = true;
            }
            CmPhase::Accepted => {
                self.stop();
                self.due.release = true;
            }
            CmPhase::Listening | CmPhase::Requesting | CmPhase::Requested => self.stop(),
            CmPhase::Releasing | CmPhase::Released | CmPhase::Rejected => {}
        }
    }

    /// Sends and repeats nothing more.
    pub(super) fn stop(&mut self) {
        self.phase = CmPhase::Released;
        self.due = DueMessages::default();
        self.repetition = None;
    }

    /// Appends the next message to `packet`; returns whether there is one.
    pub(super) fn transmit(&mut self, now: Instant, packet: &mut Vec<u8>) -> bool {
        let comm_ids = (U32::new(self.numbers.comm_id), U32::new(self.peer_comm_id));
        let (local_comm_id, remote_comm_id) = comm_ids;
        let due = &mut self.due;
        if let Some(StaleRequest { transaction_id, comm_id }) = due.rejects.take() {
            put_reject(packet, self.sent, transaction_id, comm_id, RejectReason::STALE_CONNECTION);
            self.sent = self.sent.wrapping_add(1);
            return true;
        }
        if std::mem::take(&mut due.set_up) {
            let (attribute, body) = match &self.set_up {
                SetUpMessage::None => return false,
                SetUpMessage::Req(req) => (CmAttribute::REQ, req.as_bytes()),
                SetUpMessage::Rep(rep) => (CmAttribute::REP, rep.as_bytes()),
                SetUpMessage::Rej(rej) => (CmAttribute::REJ, rej.as_bytes()),
            };
            put_message(packet, self.sent, self.transaction_id, attribute, body);
        } else if std::mem::take(&mut due.ready_to_use) {
            let rtu = CmRtu { local_comm_id, remote_comm_id, ..CmRtu::new_zeroed() };
            put_message(packet, self.sent, self.transaction_id, CmAttribute::RTU, rtu.as_bytes());
        } else if std::mem::take(&mut due.more_time) {
            let service_timeout = MRA_TIMEOUT_CODE << 3;
            let mra = CmMra {
                local_comm_id,
                remote_comm_id,
                message: ANSWERS_REQ,
                service_timeout,
                ..CmMra::new_zeroed()
            };
            put_message(packet, self.sent, self.transaction_id, CmAttribute::MRA, mra.as_bytes());
        } else if std::mem::take(&mut due.release) {
            let remote_qpn = U24::new(self.peer_qp);
            let dreq = CmDreq { local_comm_id, remote_comm_id, remote_qpn, ..CmDreq::new_zeroed() };
            put_message(packet, self.sent, self.transaction_id, CmAttribute::DREQ, dreq.as_bytes());
        } else if std::mem::take(&mut due.released) {
            let drep = CmDrep { local_comm_id, remote_comm_id, ..CmDrep::new_zeroed() };
            put_message(packet, self.sent, self.transaction_id, CmAttribute::DREP, drep.as_bytes());
        } else {
            return false;
        }
        self.sent = self.sent.wrapping_add(1);
        let retries = match self.phase {
            CmPhase::Requesting => MAX_CM_RETRIES,
            CmPhase::Accepted => REPLY_RETRIES,
            CmPhase::Releasing => RELEASE_RETRIES,
            _ => return true,
        };
        if self.repetition.is_none() {
            self.repetition = now.checked_add(RESPONSE_TIMEOUT).map(|at| Repetition { at, left: retries });
        }
        true
    }

    /// When [`CmConnection::on_timeout`] is due.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.repetition.map(|repetition| repetition.at)
    }

    /// Repeats a message that was not answered in time; returns `false` if that was done often
    /// enough, and the peer does not answer.
    pub(super) fn on_timeout(&mut self, now: Instant) -> bool {
        let Some(repetition) = &mut self.repetition else { return true };
        if now < repetition.at {
            return true;
        }
        if repetition.left == 0 && self.phase == CmPhase::Accepted {
            // The time limit of the set-up remains.
            self.repetition = None;
            return true;
        }
        if repetition.left == 0 {
            self.stop();
            return false;
        }
        let at = now.checked_add(RESPONSE_TIMEOUT).unwrap_or(now);
        *repetition = Repetition { at, left: repetition.left.saturating_sub(1) };
        match self.phase {
            CmPhase::Releasing => self.due.release = true,
            _ => self.due.set_up = true,
        }
        true
    }
}

/// The body of a request for a connection.
fn request(numbers: &RoceNumbers, reads: u32, config: &RoceConfig, private_data: &[u8]) -> CmReq {
    // At most [`MAX_READS`].
    let reads = reads as u8;
    let mut req = CmReq {
        local_comm_id: U32::new(numbers.comm_id),
        service_id: U64::new(service_id(config.service)),
        local_q_key: U32::new(long_limit(config)),
        local_ca_guid: U64::new(numbers.guid),
        local_qpn: U24::new(numbers.queue_pair),
        responder_resources: reads,
        initiator_depth: reads,
        remote_response: RESPONSE_CODE << 3,
        starting_psn: U24::new(numbers.first_psn),
        local_response: RESPONSE_CODE << 3 | ACK_RETRIES,
        p_key: U16::new(P_KEY_DEFAULT),
        path_mtu: offered_mtu(config).0 << 4 | NOT_READY_RETRIES,
        max_cm_retries: MAX_CM_RETRIES << 4,
        local_lid: U16::new(NO_LID),
        remote_lid: U16::new(NO_LID),
        local_gid: gid(config.local),
        remote_gid: gid(config.peer),
        hop_limit: HOP_LIMIT,
        ack_timeout: ACK_TIMEOUT_CODE << 3,
        ..CmReq::new_zeroed()
    };
    let ip = IpCmHeader::new(config.local, config.source_port, config.peer);
    let (header, rest) = req.private_data.split_at_mut(IP_CM_LEN);
    copy_to_start(header, ip.as_bytes());
    copy_to_start(rest, private_data);
    req
}

/// The payload of a full packet that two ends of this implementation agree on beyond the standard,
/// if the path has room for it. Each says its limit in the Q_Key, which reliable connections do not
/// have.
fn long_mtu(config: &RoceConfig, peer_guid: u64, q_key: u32) -> Option<u16> {
    let mtu = u16::try_from(q_key.min(long_limit(config))).ok()?;
    // Whole words need no pad.
    Some(mtu & !3).filter(|mtu| *mtu > MAX_MTU && is_guid(peer_guid))
}

/// The longest packet that this side says; 0 if it is one of the standard.
fn long_limit(config: &RoceConfig) -> u32 {
    if config.mtu > MAX_MTU { config.mtu.min(LONG_MTU).into() } else { 0 }
}

/// The path MTU that a configuration allows: its code, and its bytes.
fn offered_mtu(config: &RoceConfig) -> (u8, u16) {
    let code = code_of_mtu(config.mtu).unwrap_or(1);
    (code, mtu_of_code(code).unwrap_or(MIN_MTU))
}

/// Copies as much of `data` as there is place.
fn copy_to_start(place: &mut [u8], data: &[u8]) {
    place.iter_mut().zip(data).for_each(|(place, byte)| *place = *byte);
}

/// Appends a packet with a message.
pub(super) fn put_message(
    packet: &mut Vec<u8>,
    psn: u32,
    transaction_id: u64,
    attribute: CmAttribute,
    body: &[u8],
) {
    let opcode = RoceOpcode::UD_SEND_ONLY;
    PacketHead::new(opcode, QP_GSI, Psn::new(psn), MAD_LEN).put(packet);
    let deth = Deth { q_key: U32::new(Q_KEY_GSI), reserved: 0, source_qp: U24::new(QP_GSI) };
    packet.extend_from_slice(deth.as_bytes());
    packet.extend_from_slice(MadHeader::new(attribute, transaction_id).as_bytes());
    packet.extend_from_slice(body);
}

/// Appends a packet that rejects a request for which there is no connection.
pub(super) fn put_reject(
    packet: &mut Vec<u8>,
    psn: u32,
    transaction_id: u64,
    requester: U32<BE>,
    reason: RejectReason,
) {
    let rej = CmRej { remote_comm_id: requester, reason: U16::new(reason.0), ..CmRej::new_zeroed() };
    put_message(packet, psn, transaction_id, CmAttribute::REJ, rej.as_bytes());
}

/// Longest private data of a request, in bytes.
pub(super) const PRIVATE_DATA: usize = REQ_PRIVATE_DATA - IP_CM_LEN;

/// Code of the time after which a message is repeated, 1.07 s.
const RESPONSE_CODE: u8 = 18;
const RESPONSE_TIMEOUT: Duration = Duration::from_nanos(timeout_ns(RESPONSE_CODE));
/// Code of the time that an MRA asks for, 4.3 s.
const MRA_TIMEOUT_CODE: u8 = 20;
/// How often requests are repeated, and may be by the peer.
const MAX_CM_RETRIES: u8 = 15;
/// How often a reply is repeated, beside one answer to each repeated request.
const REPLY_RETRIES: u8 = 3;
/// How often a DREQ is repeated.
const RELEASE_RETRIES: u8 = 4;
/// How often the peer shall repeat packets that are not acknowledged: as often as can be said.
const ACK_RETRIES: u8 = 7;
/// Code of the peer's timeout for acknowledgements, 0.54 s, which Linux's initiators ask for, too.
/// A peer that repeats packets before this side has read them fills its receive buffer for good.
const ACK_TIMEOUT_CODE: u8 = 17;
/// Code of the delay of this side's acknowledgements, 17 ms. Linux waits for at least twice that
/// before it sends a packet again, and for half a second if that is longer.
const ACK_DELAY_CODE: u8 = 12;
/// How often the peer shall send again when this side had no receive buffer. 7 would be any number
/// of times.
const NOT_READY_RETRIES: u8 = 6;
/// Most RDMA Reads in flight that can be said.
const MAX_READS: u32 = u8::MAX as u32;
/// The permissive LID, where there is none.
const NO_LID: u16 = 0xffff;
const HOP_LIMIT: u8 = 64;
const MIN_MTU: u16 = 256;
/// The longest path MTU of the standard.
const MAX_MTU: u16 = 4096;
/// The longest of this implementation: a block of 4 KiB with the header of its message is one
/// packet, and a jumbo frame has room for it.
const LONG_MTU: u16 = 8192;
