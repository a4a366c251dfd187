//! How a connection begins: MPA's request and reply (RFC 5044 §7.1), and what RFC 6581 adds to
//! them.
//!
//! ```text
//!   active                                passive
//!     request: M C, IRD ORD, RTR? ──▶       grants no more reads than both can do
//!                                 ◀──     reply: M C R, IRD ORD, RTR
//!     RTR: an empty message       ──▶       and only now may send
//! ```
//! The passive side sends nothing before it has received something: the first FPDU that comes, RTR
//! or not, tells it that the other is ready.

use super::Config;
use super::wrong::{BAD_REPLY, MANY_READS_WANTED, NO_RTR, Wrong};
use blockmux_proto::session::ProtocolError;
use blockmux_wire::iwarp::mpa::{
    ENHANCED_LEN, Enhanced, FLAG_CRC, FLAG_ENHANCED, FLAG_MARKERS, FLAG_REJECT, IRD_PEER_TO_PEER,
    IRD_RTR_SEND, KEY_REPLY, KEY_REQUEST, MAX_PRIVATE_DATA, ORD_RTR_READ, ORD_RTR_WRITE, READS_MASK,
    READS_UNSAID, REQ_REP_LEN, REVISION_1, REVISION_2, ReqRepFrame,
};
use zerocopy::{FromBytes, IntoBytes, U16};

/// What both sides know once a request and its reply have been seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Agreement {
    pub(super) has_crc: bool,
    /// In what we send.
    pub(super) sends_markers: bool,
    /// RDMA Reads that we may have on their way.
    pub(super) ord: u32,
    /// RDMA Reads that the peer may have on their way.
    pub(super) ird: u32,
    /// What the active side sends first.
    pub(super) rtr: Option<Rtr>,
}

/// The message that tells the passive side that it may send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rtr {
    Write,
    Read,
    Send,
}

/// A request as it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    flags: u8,
    rev: u8,
    enhanced: Option<Enhanced>,
}

/// How many bytes the whole frame has that begins with `bytes`, as far as they tell; `None` if it
/// is too long.
pub(super) fn frame_len(bytes: &[u8]) -> Option<usize> {
    let Ok((frame, _)) = ReqRepFrame::read_from_prefix(bytes) else { return Some(REQ_REP_LEN) };
    let data = usize::from(frame.pd_length.get());
    (data <= MAX_PRIVATE_DATA).then(|| REQ_REP_LEN.saturating_add(data))
}

/// The request that asks for a connection.
pub(super) fn request(config: &Config, reads: u32, private_data: &[u8]) -> Vec<u8> {
    let enhanced = config.is_enhanced.then(|| {
        let (mut ird, mut ord) = (reads_of(reads), reads_of(reads));
        if config.is_peer_to_peer {
            ird |= IRD_PEER_TO_PEER;
            ord |= ORD_RTR_WRITE | if reads > 0 { ORD_RTR_READ } else { 0 };
        }
        Enhanced { ird: U16::new(ird), ord: U16::new(ord) }
    });
    let rev = if config.is_enhanced { REVISION_2 } else { REVISION_1 };
    frame(KEY_REQUEST, wishes(config), rev, enhanced, private_data)
}

impl Request {
    /// Reads a whole request and its private data.
    ///
    /// # Errors
    /// If it is none, or none of a revision that we know. There is no way to tell the peer: the
    /// stream is closed.
    pub(super) fn read(bytes: &[u8]) -> Result<(Request, &[u8]), ProtocolError> {
        let (frame, data) = ReqRepFrame::read_from_prefix(bytes).map_err(|_| NO_REQUEST)?;
        if frame.key != KEY_REQUEST {
            return Err(NO_REQUEST);
        }
        if frame.rev != REVISION_1 && frame.rev != REVISION_2 {
            return Err(UNKNOWN_REVISION);
        }
        let (enhanced, data) = enhanced(&frame, data).ok_or(NO_REQUEST)?;
        Ok((Request { flags: frame.flags, rev: frame.rev, enhanced }, data))
    }

    /// What the passive side, which has up to `reads` of each kind, makes of it.
    pub(super) fn agreement(&self, config: &Config, reads: u32) -> Agreement {
        let rtr = self.enhanced.filter(|enhanced| enhanced.ird.get() & IRD_PEER_TO_PEER != 0).map(rtr_of);
        // An RTR that reads has to be answered, whatever the numbers say.
        let least = u32::from(rtr == Some(Rtr::Read));
        Agreement {
            has_crc: config.has_crc || self.flags & FLAG_CRC != 0,
            sends_markers: self.flags & FLAG_MARKERS != 0,
            ord: self
                .enhanced
                .filter(Enhanced::says_reads)
                .map_or(reads, |asked| reads.min(asked.ird().into())),
            ird: reads.max(least),
            rtr,
        }
    }

    /// The reply that takes the connection, or refuses it.
    pub(super) fn reply(
        &self,
        config: &Config,
        agreement: &Agreement,
        is_taken: bool,
        data: &[u8],
    ) -> Vec<u8> {
        let enhanced = self.enhanced.map(|asked| {
            let mut ird = reads_of(agreement.ird).min(asked.ord());
            let mut ord = reads_of(agreement.ord);
            if !asked.says_reads() {
                (ird, ord) = (READS_UNSAID, READS_UNSAID);
            }
            match agreement.rtr {
                Some(Rtr::Write) => ord |= ORD_RTR_WRITE,
                Some(Rtr::Read) => ord |= ORD_RTR_READ,
                Some(Rtr::Send) => ird |= IRD_RTR_SEND,
                None => {}
            }
            ird |= agreement.rtr.map_or(0, |_| IRD_PEER_TO_PEER);
            Enhanced { ird: U16::new(ird), ord: U16::new(ord) }
        });
        let crc = if agreement.has_crc { FLAG_CRC } else { 0 };
        let reject = if is_taken { 0 } else { FLAG_REJECT };
        frame(KEY_REPLY, wishes(config) | crc | reject, self.rev, enhanced, data)
    }
}

/// What a reply says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Taken(Agreement, Vec<u8>),
    Refused(Vec<u8>),
    /// Refused by who knows no other revision than the first, and was not asked by that.
    Misunderstood(Vec<u8>),
}

/// Reads a whole reply to [`request`].
///
/// # Errors
/// What is wrong with it, which the peer is to be told.
pub(super) fn answer(bytes: &[u8], config: &Config, reads: u32) -> Result<Answer, Wrong> {
    let (frame, data) = ReqRepFrame::read_from_prefix(bytes).map_err(|_| BAD_REPLY)?;
    if frame.key != KEY_REPLY || (frame.rev != REVISION_1 && frame.rev != REVISION_2) {
        return Err(BAD_REPLY);
    }
    let (granted, data) = enhanced(&frame, data).ok_or(BAD_REPLY)?;
    // Who knows no other revision ought to have closed the connection (RFC 6581 §10); an answer by
    // which both know where they are is as good.
    let is_plain = config.is_enhanced && frame.rev == REVISION_1 && frame.flags & FLAG_ENHANCED == 0;
    if frame.flags & FLAG_REJECT != 0 {
        let private_data = data.to_vec();
        return Ok(if is_plain {
            Answer::Misunderstood(private_data)
        } else {
            Answer::Refused(private_data)
        });
    }
    if granted.is_some() != config.is_enhanced && !is_plain {
        return Err(BAD_REPLY);
    }
    let said = granted.filter(Enhanced::says_reads);
    let granted_ird = said.map_or(reads, |granted| granted.ird().into());
    if said.is_some_and(|granted| u32::from(granted.ord()) > reads) {
        return Err(MANY_READS_WANTED);
    }
    let rtr = match granted.filter(|_| config.is_peer_to_peer) {
        Some(granted) if granted.ord.get() & ORD_RTR_WRITE != 0 => Some(Rtr::Write),
        Some(granted) if granted.ord.get() & ORD_RTR_READ != 0 && reads > 0 => Some(Rtr::Read),
        Some(_) => return Err(NO_RTR),
        None => None,
    };
    let agreement = Agreement {
        has_crc: config.has_crc || frame.flags & FLAG_CRC != 0,
        sends_markers: frame.flags & FLAG_MARKERS != 0,
        ord: reads.min(granted_ird),
        ird: reads,
        rtr,
    };
    Ok(Answer::Taken(agreement, data.to_vec()))
}

/// The first of the offered ones in the order in which we like them; a Write if none is.
fn rtr_of(enhanced: Enhanced) -> Rtr {
    match (enhanced.ord.get() & (ORD_RTR_WRITE | ORD_RTR_READ), enhanced.ird.get() & IRD_RTR_SEND) {
        (ORD_RTR_READ, _) => Rtr::Read,
        (0, IRD_RTR_SEND) => Rtr::Send,
        _ => Rtr::Write,
    }
}

/// What RFC 6581 puts before private data, and the rest; `None` if it ought to be there and is not.
fn enhanced<'a>(frame: &ReqRepFrame, data: &'a [u8]) -> Option<(Option<Enhanced>, &'a [u8])> {
    let data = data.get(..frame.pd_length.get().into())?;
    if frame.rev != REVISION_2 || frame.flags & FLAG_ENHANCED == 0 {
        return Some((None, data));
    }
    let (enhanced, data) = Enhanced::read_from_prefix(data).ok()?;
    Some((Some(enhanced), data))
}

fn wishes(config: &Config) -> u8 {
    let markers = if config.wants_markers { FLAG_MARKERS } else { 0 };
    let crc = if config.has_crc { FLAG_CRC } else { 0 };
    markers | crc
}

fn reads_of(reads: u32) -> u16 {
    // The largest number stands for one that is not negotiated.
    reads.min(u32::from(READS_MASK).saturating_sub(1)) as u16
}

fn frame(key: [u8; 16], flags: u8, rev: u8, enhanced: Option<Enhanced>, data: &[u8]) -> Vec<u8> {
    let own_len = if enhanced.is_some() { ENHANCED_LEN } else { 0 };
    let data = data.get(..data.len().min(MAX_PRIVATE_DATA.saturating_sub(own_len))).unwrap_or_default();
    let flags = flags | if enhanced.is_some() { FLAG_ENHANCED } else { 0 };
    // At most MAX_PRIVATE_DATA.
    let pd_length = U16::new(data.len().saturating_add(own_len) as u16);
    let mut bytes = ReqRepFrame { key, flags, rev, pd_length }.as_bytes().to_vec();
    if let Some(enhanced) = enhanced {
        bytes.extend_from_slice(enhanced.as_bytes());
    }
    bytes.extend_from_slice(data);
    bytes
}

const NO_REQUEST: ProtocolError =
    ProtocolError { what: "began with something that is no MPA request", reference: "RFC 5044 §7.1.2" };
const UNKNOWN_REVISION: ProtocolError =
    ProtocolError { what: "asked for an unknown revision of MPA", reference: "RFC 5044 §7.1.2" };

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]
mod tests {
    use super::*;

    fn config() -> Config {
        Config { is_peer_to_peer: false, ..Config::default() }
    }

    fn agree(asks: &Config, answers: &Config, reads: (u32, u32)) -> (Agreement, Result<Answer, Wrong>) {
        let request = request(asks, reads.0, b"ask");
        assert_eq!(frame_len(&request), Some(request.len()));
        let (request, data) = Request::read(&request).unwrap();
        assert_eq!(data, b"ask");
        let agreement = request.agreement(answers, reads.1);
        let reply = request.reply(answers, &agreement, true, b"answer");
        (agreement, answer(&reply, asks, reads.0))
    }

    /// As siw of Linux 6.12 began iSER's connection, on both sides.
    #[test]
    fn the_kernels_request_is_answered_as_the_kernel_did() {
        let bytes = b"MPA ID Req Frame\x10\x02\x00\x08\x00\x80\x00\x01\x80\x00\x00\x00";
        let (request, data) = Request::read(bytes).unwrap();
        assert_eq!(data, [0x80, 0, 0, 0]);
        let agreement = request.agreement(&config(), 128);
        assert_eq!((agreement.ord, agreement.ird, agreement.rtr), (128, 128, None));
        let reply = request.reply(&config(), &agreement, true, &[0x80, 0, 0, 0]);
        assert_eq!(reply, b"MPA ID Rep Frame\x10\x02\x00\x08\x00\x01\x00\x80\x80\x00\x00\x00");
    }

    #[test]
    fn crcs_are_used_if_either_side_wants_them_and_markers_where_their_receiver_does() {
        for bits in 0..16 {
            let [asks, answers] = [0, 2].map(|shift| Config {
                has_crc: bits >> shift & 1 != 0,
                wants_markers: bits >> shift & 2 != 0,
                ..config()
            });
            let (passive, active) = agree(&asks, &answers, (4, 4));
            let Ok(Answer::Taken(active, data)) = active else { panic!("{active:?}") };
            assert_eq!(data, b"answer");
            assert_eq!(active.has_crc, asks.has_crc || answers.has_crc);
            assert_eq!(passive.has_crc, active.has_crc);
            assert_eq!(
                (active.sends_markers, passive.sends_markers),
                (answers.wants_markers, asks.wants_markers)
            );
        }
    }

    #[test]
    fn nobody_reads_more_at_a_time_than_the_other_answers() {
        for (active, passive) in [(4, 16), (16, 4), (0, 4), (4, 0), (1 << 20, 1 << 20)] {
            let (there, here) = agree(&config(), &config(), (active, passive));
            let Ok(Answer::Taken(here, _)) = here else { panic!("{here:?}") };
            assert!(here.ord <= there.ird && there.ord <= here.ird, "{active} {passive}");
            let least = active.min(passive).min(0x3ffe);
            assert_eq!((here.ord, there.ord), (least, least));
        }
        let old = Config { is_enhanced: false, ..config() };
        let (there, here) = agree(&old, &config(), (4, 16));
        assert!(matches!(here, Ok(Answer::Taken(Agreement { ord: 4, ird: 4, .. }, _))));
        assert_eq!((there.ord, there.ird), (16, 16), "nothing was said about it");
    }

    /// As irdma has it: A, B and the numbers that say nothing; a request with C and D, a reply with
    /// one of them.
    #[test]
    fn reads_that_are_not_spoken_of_are_left_to_others() {
        let unsaid = |ord: u16| Enhanced {
            ird: U16::new(IRD_PEER_TO_PEER | IRD_RTR_SEND | READS_UNSAID),
            ord: U16::new(ord | READS_UNSAID),
        };
        let enhanced = Some(unsaid(ORD_RTR_WRITE | ORD_RTR_READ));
        let request = Request { flags: FLAG_ENHANCED, rev: REVISION_2, enhanced };
        let config = Config::default();
        let agreement = request.agreement(&config, 8);
        assert_eq!((agreement.ord, agreement.ird, agreement.rtr), (8, 8, Some(Rtr::Write)));
        let reply = request.reply(&config, &agreement, true, &[]);
        assert_eq!(reply[REQ_REP_LEN..], [0xbf, 0xff, 0xbf, 0xff]);
        for (bit, rtr) in [(ORD_RTR_WRITE, Rtr::Write), (ORD_RTR_READ, Rtr::Read)] {
            let reply = frame(KEY_REPLY, 0, REVISION_2, Some(unsaid(bit)), &[]);
            let Ok(Answer::Taken(agreement, _)) = answer(&reply, &config, 8) else { panic!("it is taken") };
            assert_eq!((agreement.ord, agreement.ird, agreement.rtr), (8, 8, Some(rtr)));
        }
    }

    #[test]
    fn the_passive_side_takes_the_rtr_that_it_likes_best_of_those_offered() {
        let write = (IRD_PEER_TO_PEER, ORD_RTR_WRITE | ORD_RTR_READ, Rtr::Write);
        let read = (IRD_PEER_TO_PEER | IRD_RTR_SEND, ORD_RTR_READ, Rtr::Read);
        let send = (IRD_PEER_TO_PEER | IRD_RTR_SEND, 0, Rtr::Send);
        let none = (IRD_PEER_TO_PEER, 0, Rtr::Write);
        for (ird, ord, rtr) in [write, read, send, none] {
            let enhanced = Enhanced { ird: U16::new(ird), ord: U16::new(ord) };
            let request = Request { flags: FLAG_ENHANCED, rev: REVISION_2, enhanced: Some(enhanced) };
            let agreement = request.agreement(&config(), 0);
            assert_eq!((agreement.rtr, agreement.ird), (Some(rtr), u32::from(rtr == Rtr::Read)));
            let reply = request.reply(&config(), &agreement, true, &[]);
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
        let (_, active) = agree(&Config::default(), &config(), (4, 4));
        assert!(matches!(active, Ok(Answer::Taken(Agreement { rtr: Some(Rtr::Write), .. }, _))));
    }

    #[test]
    fn what_is_no_reply_is_told_to_the_peer() {
        let reply = |flags, rev, data: &[u8]| {
            let pd_length = U16::new(data.len() as u16);
            let mut bytes = ReqRepFrame { key: KEY_REPLY, flags, rev, pd_length }.as_bytes().to_vec();
            bytes.extend(data);
            answer(&bytes, &Config::default(), 4)
        };
        assert_eq!(reply(0, 2, &[]), Err(BAD_REPLY), "not enhanced");
        assert_eq!(reply(FLAG_ENHANCED, 1, &[0; 4]), Err(BAD_REPLY));
        assert_eq!(reply(FLAG_ENHANCED, 2, &[0; 3]), Err(BAD_REPLY));
        assert_eq!(reply(FLAG_ENHANCED, 3, &[0; 4]), Err(BAD_REPLY));
        assert_eq!(reply(FLAG_ENHANCED, 2, &[0x80, 4, 0x80, 5]), Err(MANY_READS_WANTED));
        assert_eq!(reply(FLAG_ENHANCED, 2, &[0x80, 4, 0, 4]), Err(NO_RTR));
        assert_eq!(reply(FLAG_REJECT, 1, b"no"), Ok(Answer::Misunderstood(b"no".to_vec())));
        assert_eq!(reply(FLAG_REJECT | FLAG_ENHANCED, 2, b"\0\0\0\0no"), Ok(Answer::Refused(b"no".to_vec())));
        assert_eq!(answer(&request(&config(), 4, &[]), &config(), 4), Err(BAD_REPLY));
    }

    #[test]
    fn what_is_no_request_is_not_answered() {
        let good = request(&config(), 4, b"data");
        assert_eq!(frame_len(b"MPA"), Some(20));
        let wrong = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            Request::read(&bytes).unwrap_err()
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
