//! Connection set-up: MPA's request and reply (RFC 5044 §7.1), with the extensions of RFC 6581.
//!
//! ```text
//!   active                                passive
//!     request: C, IRD ORD, RTR?   ──▶       limits ORD and IRD to what both sides support
//!                                 ◀──     reply: C R, IRD ORD, RTR
//!     RTR: an empty message       ──▶       may send from now on
//! ```
//! The passive side sends nothing before it has received an FPDU. The first FPDU, whether an RTR
//! message or not, shows that the active side is ready. A peer that asks for markers (M) is
//! rejected (decision 91).

use super::IwarpConfig;
use super::terminate::{BAD_REPLY, NO_RTR, ORD_ABOVE_IRD, TerminateReason, WANTS_MARKERS};
use blockmux_proto::driver::session::ProtocolError;
use blockmux_wire::iwarp::mpa::{
    ENHANCED_LEN, Enhanced, FLAG_CRC, FLAG_ENHANCED, FLAG_MARKERS, FLAG_REJECT, IRD_PEER_TO_PEER,
    IRD_RTR_SEND, KEY_REPLY, KEY_REQUEST, MAX_PRIVATE_DATA, ORD_RTR_READ, ORD_RTR_WRITE, READS_MASK,
    READS_UNSAID, REQ_REP_LEN, REVISION_1, REVISION_2, ReqRepFrame,
};
use zerocopy::{FromBytes, IntoBytes, U16};

/// Parameters that follow from a request and its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NegotiatedParameters {
    pub(super) has_crc: bool,
    /// RDMA Reads of this side that may be in flight.
    pub(super) ord: u32,
    /// RDMA Reads of the peer that may be in flight.
    pub(super) ird: u32,
    /// The RTR message that the active side sends first.
    pub(super) rtr: Option<Rtr>,
}

/// The RTR message, which lets the passive side send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rtr {
    Write,
    Read,
    Send,
}

/// A received MPA request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MpaRequest {
    flags: u8,
    rev: u8,
    enhanced: Option<Enhanced>,
}

/// Length in bytes of the frame that begins with `bytes`, or of its header if that has not arrived
/// whole; `None` if the private data is too long.
pub(super) fn frame_len(bytes: &[u8]) -> Option<usize> {
    let Ok((frame, _)) = ReqRepFrame::read_from_prefix(bytes) else { return Some(REQ_REP_LEN) };
    let data = usize::from(frame.pd_length.get());
    (data <= MAX_PRIVATE_DATA).then(|| REQ_REP_LEN.saturating_add(data))
}

/// Encodes an MPA request.
pub(super) fn request(config: &IwarpConfig, reads: u32, private_data: &[u8]) -> Vec<u8> {
    let enhanced = config.is_enhanced.then(|| {
        let (mut ird, mut ord) = (reads_of(reads), reads_of(reads));
        if config.is_peer_to_peer {
            ird |= IRD_PEER_TO_PEER;
            ord |= ORD_RTR_WRITE | if reads > 0 { ORD_RTR_READ } else { 0 };
        }
        Enhanced { ird: U16::new(ird), ord: U16::new(ord) }
    });
    let rev = if config.is_enhanced { REVISION_2 } else { REVISION_1 };
    let flags = if config.has_crc { FLAG_CRC } else { 0 };
    frame(KEY_REQUEST, flags, rev, enhanced, private_data)
}

impl MpaRequest {
    /// Reads a complete request and its private data.
    ///
    /// # Errors
    /// If this is not an MPA request, or one of an unknown revision. There is no way to tell the
    /// peer: the stream is closed.
    pub(super) fn read(bytes: &[u8]) -> Result<(MpaRequest, &[u8]), ProtocolError> {
        let (frame, data) = ReqRepFrame::read_from_prefix(bytes).map_err(|_| NO_REQUEST)?;
        if frame.key != KEY_REQUEST {
            return Err(NO_REQUEST);
        }
        if frame.rev != REVISION_1 && frame.rev != REVISION_2 {
            return Err(UNKNOWN_REVISION);
        }
        let (enhanced, data) = enhanced(&frame, data).ok_or(NO_REQUEST)?;
        Ok((MpaRequest { flags: frame.flags, rev: frame.rev, enhanced }, data))
    }

    /// The parameters that the passive side derives from the request. It supports `reads` reads in
    /// each direction.
    pub(super) fn negotiated(&self, config: &IwarpConfig, reads: u32) -> NegotiatedParameters {
        let rtr = self.enhanced.filter(|enhanced| enhanced.ird.get() & IRD_PEER_TO_PEER != 0).map(rtr_of);
        // A zero-length Read as RTR message needs a response, whatever the negotiated IRD is.
        let least = u32::from(rtr == Some(Rtr::Read));
        NegotiatedParameters {
            has_crc: config.has_crc || self.flags & FLAG_CRC != 0,
            ord: self
                .enhanced
                .filter(Enhanced::says_reads)
                .map_or(reads, |asked| reads.min(asked.ird().into())),
            ird: reads.max(least),
            rtr,
        }
    }

    /// Whether the peer asks for markers.
    pub(super) fn wants_markers(&self) -> bool {
        self.flags & FLAG_MARKERS != 0
    }

    /// Encodes the reply that accepts or rejects the connection.
    pub(super) fn reply(&self, negotiated: &NegotiatedParameters, is_taken: bool, data: &[u8]) -> Vec<u8> {
        let enhanced = self.enhanced.map(|asked| {
            let mut ird = reads_of(negotiated.ird).min(asked.ord());
            let mut ord = reads_of(negotiated.ord);
            if !asked.says_reads() {
                (ird, ord) = (READS_UNSAID, READS_UNSAID);
            }
            match negotiated.rtr {
                Some(Rtr::Write) => ord |= ORD_RTR_WRITE,
                Some(Rtr::Read) => ord |= ORD_RTR_READ,
                Some(Rtr::Send) => ird |= IRD_RTR_SEND,
                None => {}
            }
            ird |= negotiated.rtr.map_or(0, |_| IRD_PEER_TO_PEER);
            Enhanced { ird: U16::new(ird), ord: U16::new(ord) }
        });
        let crc = if negotiated.has_crc { FLAG_CRC } else { 0 };
        let reject = if is_taken { 0 } else { FLAG_REJECT };
        frame(KEY_REPLY, crc | reject, self.rev, enhanced, data)
    }
}

/// A received MPA reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum MpaReply {
    Accepted(NegotiatedParameters, Vec<u8>),
    Rejected(Vec<u8>),
    /// A reject by a peer that supports only revision 1, to a request of revision 2.
    RejectedByRevision1(Vec<u8>),
}

/// Reads a complete reply to [`request`].
///
/// # Errors
/// The violation, which a Terminate message reports to the peer.
pub(super) fn answer(bytes: &[u8], config: &IwarpConfig, reads: u32) -> Result<MpaReply, TerminateReason> {
    let (frame, data) = ReqRepFrame::read_from_prefix(bytes).map_err(|_| BAD_REPLY)?;
    if frame.key != KEY_REPLY || (frame.rev != REVISION_1 && frame.rev != REVISION_2) {
        return Err(BAD_REPLY);
    }
    let (granted, data) = enhanced(&frame, data).ok_or(BAD_REPLY)?;
    // A peer that supports only revision 1 should have closed the stream (RFC 6581 §10). A reply of
    // revision 1 is unambiguous too, and is accepted.
    let is_plain = config.is_enhanced && frame.rev == REVISION_1 && frame.flags & FLAG_ENHANCED == 0;
    if frame.flags & FLAG_REJECT != 0 {
        let private_data = data.to_vec();
        return Ok(if is_plain {
            MpaReply::RejectedByRevision1(private_data)
        } else {
            MpaReply::Rejected(private_data)
        });
    }
    if frame.flags & FLAG_MARKERS != 0 {
        return Err(WANTS_MARKERS);
    }
    if granted.is_some() != config.is_enhanced && !is_plain {
        return Err(BAD_REPLY);
    }
    let said = granted.filter(Enhanced::says_reads);
    let granted_ird = said.map_or(reads, |granted| granted.ird().into());
    if said.is_some_and(|granted| u32::from(granted.ord()) > reads) {
        return Err(ORD_ABOVE_IRD);
    }
    let rtr = match granted.filter(|_| config.is_peer_to_peer) {
        Some(granted) if granted.ord.get() & ORD_RTR_WRITE != 0 => Some(Rtr::Write),
        Some(granted) if granted.ord.get() & ORD_RTR_READ != 0 && reads > 0 => Some(Rtr::Read),
        Some(_) => return Err(NO_RTR),
        None => None,
    };
    let negotiated = NegotiatedParameters {
        has_crc: config.has_crc || frame.flags & FLAG_CRC != 0,
        ord: reads.min(granted_ird),
        ird: reads,
        rtr,
    };
    Ok(MpaReply::Accepted(negotiated, data.to_vec()))
}

/// Chooses among the offered RTR messages, in the order of preference; a Write if none was offered.
fn rtr_of(enhanced: Enhanced) -> Rtr {
    match (enhanced.ord.get() & (ORD_RTR_WRITE | ORD_RTR_READ), enhanced.ird.get() & IRD_RTR_SEND) {
        (ORD_RTR_READ, _) => Rtr::Read,
        (0, IRD_RTR_SEND) => Rtr::Send,
        _ => Rtr::Write,
    }
}

/// Splits the enhanced set-up data of RFC 6581 from the private data; `None` if it is missing.
fn enhanced<'a>(frame: &ReqRepFrame, data: &'a [u8]) -> Option<(Option<Enhanced>, &'a [u8])> {
    let data = data.get(..frame.pd_length.get().into())?;
    if frame.rev != REVISION_2 || frame.flags & FLAG_ENHANCED == 0 {
        return Some((None, data));
    }
    let (enhanced, data) = Enhanced::read_from_prefix(data).ok()?;
    Some((Some(enhanced), data))
}

fn reads_of(reads: u32) -> u16 {
    // The largest number means "not negotiated".
    reads.min(u32::from(READS_MASK).saturating_sub(1)) as u16
}

fn frame(key: [u8; 16], flags: u8, rev: u8, enhanced: Option<Enhanced>, data: &[u8]) -> Vec<u8> {
    let own_len = if enhanced.is_some() { ENHANCED_LEN } else { 0 };
    let data = data.get(..data.len().min(MAX_PRIVATE_DATA.saturating_sub(own_len))).unwrap_or_default();
    let flags = flags | if enhanced.is_some() { FLAG_ENHANCED } else { 0 };
    // At most `MAX_PRIVATE_DATA`.
    let pd_length = U16::new(data.len().saturating_add(own_len) as u16);
    let mut bytes = ReqRepFrame { key, flags, rev, pd_length }.as_bytes().to_vec();
    if let Some(enhanced) = enhanced {
        bytes.extend_from_slice(enhanced.as_bytes());
    }
    bytes.extend_from_slice(data);
    bytes
}

const NO_REQUEST: ProtocolError =
    ProtocolError { what: "did not begin with an MPA request", reference: "RFC 5044 §7.1.2" };
const UNKNOWN_REVISION: ProtocolError =
    ProtocolError { what: "asked for an unknown revision of MPA", reference: "RFC 5044 §7.1.2" };

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]
mod tests {
    use super::*;

    fn config() -> IwarpConfig {
        IwarpConfig { is_peer_to_peer: false, ..IwarpConfig::default() }
    }

    fn agree(
        asks: &IwarpConfig,
        answers: &IwarpConfig,
        reads: (u32, u32),
    ) -> (NegotiatedParameters, Result<MpaReply, TerminateReason>) {
        let request = request(asks, reads.0, b"ask");
        assert_eq!(frame_len(&request), Some(request.len()));
        let (request, data) = MpaRequest::read(&request).unwrap();
        assert_eq!(data, b"ask");
        let negotiated = request.negotiated(answers, reads.1);
        let reply = request.reply(&negotiated, true, b"answer");
        (negotiated, answer(&reply, asks, reads.0))
    }

    /// The set-up of an iSER connection between two Linux 6.12 machines over siw.
    #[test]
    fn the_kernels_request_is_answered_as_the_kernel_did() {
        let bytes = b"MPA ID Req Frame\x10\x02\x00\x08\x00\x80\x00\x01\x80\x00\x00\x00";
        let (request, data) = MpaRequest::read(bytes).unwrap();
        assert_eq!(data, [0x80, 0, 0, 0]);
        let negotiated = request.negotiated(&config(), 128);
        assert_eq!((negotiated.ord, negotiated.ird, negotiated.rtr), (128, 128, None));
        let reply = request.reply(&negotiated, true, &[0x80, 0, 0, 0]);
        assert_eq!(reply, b"MPA ID Rep Frame\x10\x02\x00\x08\x00\x01\x00\x80\x80\x00\x00\x00");
    }

    #[test]
    fn crcs_are_used_if_either_side_requests_them() {
        for (asks, answers) in [(false, false), (true, false), (false, true), (true, true)] {
            let with = |has_crc| IwarpConfig { has_crc, ..config() };
            let (passive, active) = agree(&with(asks), &with(answers), (4, 4));
            let Ok(MpaReply::Accepted(active, data)) = active else { panic!("{active:?}") };
            assert_eq!(data, b"answer");
            assert_eq!((active.has_crc, passive.has_crc), (asks || answers, asks || answers));
        }
    }

    #[test]
    fn neither_side_has_more_reads_in_flight_than_the_other_supports() {
        for (active, passive) in [(4, 16), (16, 4), (0, 4), (4, 0), (1 << 20, 1 << 20)] {
            let (there, here) = agree(&config(), &config(), (active, passive));
            let Ok(MpaReply::Accepted(here, _)) = here else { panic!("{here:?}") };
            assert!(here.ord <= there.ird && there.ord <= here.ird, "{active} {passive}");
            let least = active.min(passive).min(0x3ffe);
            assert_eq!((here.ord, there.ord), (least, least));
        }
        let old = IwarpConfig { is_enhanced: false, ..config() };
        let (there, here) = agree(&old, &config(), (4, 16));
        assert!(matches!(here, Ok(MpaReply::Accepted(NegotiatedParameters { ord: 4, ird: 4, .. }, _))));
        assert_eq!((there.ord, there.ird), (16, 16), "revision 1 does not negotiate it");
    }

    /// The setup message that irdma sends has the control flags A and B, with ORD and IRD "not
    /// negotiated". A request offers C and D, and a reply has one of them.
    #[test]
    fn read_limits_that_are_not_negotiated_stay_those_of_the_endpoint() {
        let unsaid = |ord: u16| Enhanced {
            ird: U16::new(IRD_PEER_TO_PEER | IRD_RTR_SEND | READS_UNSAID),
            ord: U16::new(ord | READS_UNSAID),
        };
        let enhanced = Some(unsaid(ORD_RTR_WRITE | ORD_RTR_READ));
        let request = MpaRequest { flags: FLAG_ENHANCED, rev: REVISION_2, enhanced };
        let config = IwarpConfig::default();
        let negotiated = request.negotiated(&config, 8);
        assert_eq!((negotiated.ord, negotiated.ird, negotiated.rtr), (8, 8, Some(Rtr::Write)));
        let reply = request.reply(&negotiated, true, &[]);
        assert_eq!(reply[REQ_REP_LEN..], [0xbf, 0xff, 0xbf, 0xff]);
        for (bit, rtr) in [(ORD_RTR_WRITE, Rtr::Write), (ORD_RTR_READ, Rtr::Read)] {
            let reply = frame(KEY_REPLY, 0, REVISION_2, Some(unsaid(bit)), &[]);
            let Ok(MpaReply::Accepted(negotiated, _)) = answer(&reply, &config, 8) else {
                panic!("it is taken")
            };
            assert_eq!((negotiated.ord, negotiated.ird, negotiated.rtr), (8, 8, Some(rtr)));
        }
    }

    #[test]
    fn the_passive_side_chooses_its_preferred_rtr_of_those_offered() {
        let write = (IRD_PEER_TO_PEER, ORD_RTR_WRITE | ORD_RTR_READ, Rtr::Write);
        let read = (IRD_PEER_TO_PEER | IRD_RTR_SEND, ORD_RTR_READ, Rtr::Read);
        let send = (IRD_PEER_TO_PEER | IRD_RTR_SEND, 0, Rtr::Send);
        let none = (IRD_PEER_TO_PEER, 0, Rtr::Write);
        for (ird, ord, rtr) in [write, read, send, none] {
            let enhanced = Enhanced { ird: U16::new(ird), ord: U16::new(ord) };
            let request = MpaRequest { flags: FLAG_ENHANCED, rev: REVISION_2, enhanced: Some(enhanced) };
            let negotiated = request.negotiated(&config(), 0);
            assert_eq!((negotiated.rtr, negotiated.ird), (Some(rtr), u32::from(rtr == Rtr::Read)));
            let reply = request.reply(&negotiated, true, &[]);
            let bits = [reply[20] & 0xc0, reply[22] & 0xc0];
            assert_eq!(
                bits,
                match rtr {
                    Rtr::Write => [0x80, 0x80],
                    Rtr::Read => [0x80, 0x40],
                    Rtr::Send => [0xc0, 0],
                }
            );
        }
        let (_, active) = agree(&IwarpConfig::default(), &config(), (4, 4));
        assert!(matches!(
            active,
            Ok(MpaReply::Accepted(NegotiatedParameters { rtr: Some(Rtr::Write), .. }, _))
        ));
    }

    #[test]
    fn a_malformed_reply_is_reported_to_the_peer() {
        let reply = |flags, rev, data: &[u8]| {
            let pd_length = U16::new(data.len() as u16);
            let mut bytes = ReqRepFrame { key: KEY_REPLY, flags, rev, pd_length }.as_bytes().to_vec();
            bytes.extend(data);
            answer(&bytes, &IwarpConfig::default(), 4)
        };
        assert_eq!(reply(0, 2, &[]), Err(BAD_REPLY), "not enhanced");
        assert_eq!(reply(FLAG_ENHANCED, 1, &[0; 4]), Err(BAD_REPLY));
        assert_eq!(reply(FLAG_ENHANCED, 2, &[0; 3]), Err(BAD_REPLY));
        assert_eq!(reply(FLAG_ENHANCED, 3, &[0; 4]), Err(BAD_REPLY));
        assert_eq!(reply(FLAG_ENHANCED | FLAG_MARKERS, 2, &[0x80, 4, 0x80, 4]), Err(WANTS_MARKERS));
        assert_eq!(reply(FLAG_ENHANCED, 2, &[0x80, 4, 0x80, 5]), Err(ORD_ABOVE_IRD));
        assert_eq!(reply(FLAG_ENHANCED, 2, &[0x80, 4, 0, 4]), Err(NO_RTR));
        assert_eq!(reply(FLAG_REJECT, 1, b"no"), Ok(MpaReply::RejectedByRevision1(b"no".to_vec())));
        assert_eq!(
            reply(FLAG_REJECT | FLAG_ENHANCED, 2, b"\0\0\0\0no"),
            Ok(MpaReply::Rejected(b"no".to_vec()))
        );
        assert_eq!(answer(&request(&config(), 4, &[]), &config(), 4), Err(BAD_REPLY));
    }

    #[test]
    fn a_malformed_request_is_not_answered() {
        let good = request(&config(), 4, b"data");
        assert_eq!(frame_len(b"MPA"), Some(20));
        let wrong = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            MpaRequest::read(&bytes).unwrap_err()
        };
        assert_eq!((wrong(0, b'm'), wrong(5, b'x')), (NO_REQUEST, NO_REQUEST));
        assert_eq!((wrong(17, 0), wrong(17, 3)), (UNKNOWN_REVISION, UNKNOWN_REVISION));
        assert_eq!((wrong(19, 3), wrong(19, 200)), (NO_REQUEST, NO_REQUEST));
        let mut long = good.clone();
        long[18..20].copy_from_slice(&513_u16.to_be_bytes());
        assert_eq!(frame_len(&long), None);
        long[18..20].copy_from_slice(&512_u16.to_be_bytes());
        assert_eq!(frame_len(&long), Some(532));
    }
}
