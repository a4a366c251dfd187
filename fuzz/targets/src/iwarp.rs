//! iWARP: its frames alone, and a hostile peer against the whole queue pair, on either side.
//!
//! ```text
//!   stream = record ...   record = 0, length, bytes                               raw bytes
//!                                | 1, length, segment                             the segment in a frame
//!                                | 2, control (2), tag, offset, MSN, length (2)   a nearly valid segment
//! ```
//! In a nearly valid segment, tag and offset select from the registered memory, and the MSN is
//! relative to that of the queue.

use crate::choices::Choices;
use crate::queue_pair_owner::{self, QueuePairOwner};
use crate::wire::Wire;
use blockmux_proto::driver::session::{Demand, ProtocolError, StreamSession, Timed};
use blockmux_proto::rdma::QueuePair;
use blockmux_rdma::iwarp::{Iwarp, IwarpConfig, OUTBOX_FULL};
use blockmux_volume::{Crc32c, Pool};
use blockmux_wire::iwarp::ddp::{Control, TAGGED_LEN, Tagged, UNTAGGED_LEN, Untagged};
use blockmux_wire::iwarp::mpa::{Enhanced, ReqRepFrame, fpdu_len};
use blockmux_wire::iwarp::rdmap::{RdmapOpcode, ReadRequest, Terminate};
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// Reads `data` as each wire structure: each must accept any bytes, print, and be written as the
/// same bytes.
pub(crate) fn iwarp_frames(data: &[u8]) {
    fn again<T: FromBytes + IntoBytes + zerocopy::Immutable + std::fmt::Debug>(data: &[u8]) {
        if let Ok((value, rest)) = T::read_from_prefix(data) {
            assert_eq!(value.as_bytes(), &data[..data.len() - rest.len()]);
            assert!(!format!("{value:?}").is_empty());
        }
    }
    again::<ReqRepFrame>(data);
    again::<Enhanced>(data);
    again::<ReadRequest>(data);
    again::<Terminate>(data);
    let mut rest = data;
    while let [high, low, fpdu @ ..] = rest {
        let len = u16::from_be_bytes([*high, *low]);
        assert!(fpdu_len(len).is_multiple_of(4) && fpdu_len(len) >= usize::from(len) + 6);
        let ulpdu = &fpdu[..fpdu.len().min(len.into())];
        again::<Tagged>(ulpdu);
        again::<Untagged>(ulpdu);
        if let Ok((control, _)) = Control::read_from_prefix(ulpdu) {
            let flags = control.ddp & !3;
            assert_eq!(control.is_tagged(), flags & 0x80 != 0);
            let ours = Control::new(flags, control.opcode());
            assert_eq!((ours.is_last(), ours.opcode()), (control.is_last(), control.opcode()));
            assert!(!control.opcode().invalidates() || control.opcode().is_send());
        }
        rest = rest.get(fpdu_len(len)..).unwrap_or_default();
    }
}

/// Reads `data` as choices and records.
pub(crate) fn iwarp_peer(data: &[u8]) {
    let (mut choices, stream) = Choices::split(data);
    let bits = choices.byte();
    let config = IwarpConfig {
        has_crc: bits & 1 != 0,
        is_enhanced: bits & 16 == 0,
        is_peer_to_peer: bits & 32 == 0,
        mss: choices.of(&[0, 1448, 8948, 65_483]),
    };
    let (pool, now) = (Pool::new(choices.of(&[1 << 20, 0])), Instant::now());
    let is_active = bits & 64 != 0;
    let connect = if is_active { Iwarp::active } else { Iwarp::passive };
    let mut iwarp = connect(&queue_pair_owner::endpoint(), config, pool.clone(), [9; 32], now);
    let mut run = IwarpRun {
        owner: QueuePairOwner::new(&mut iwarp),
        iwarp,
        is_active,
        choices,
        records: &stream,
        wire: Wire::new(Vec::new()),
        msns: [0; 4],
        sinks: Vec::new(),
        has_crc: bits & 1 != 0,
        is_set_up: false,
        sent: Vec::new(),
        is_broken: false,
        now,
    };
    let mut quiet = 0;
    for _ in 0..MAX_TURNS {
        quiet = if run.turn() { 0 } else { quiet + 1 };
        if quiet == 2 {
            break;
        }
    }
    run.finish();
    assert_eq!(pool.out_bytes(), 0, "the pool has lost memory");
}

struct IwarpRun<'a> {
    iwarp: Iwarp,
    owner: QueuePairOwner,
    is_active: bool,
    choices: Choices<'a>,
    /// The rest of the stream.
    records: &'a [u8],
    wire: Wire,
    /// MSN of the peer's last message in each queue.
    msns: [u32; 4],
    /// Sink tags of the session's outstanding reads.
    sinks: Vec<u32>,
    has_crc: bool,
    /// Whether the peer has sent its set-up frame.
    is_set_up: bool,
    /// Bytes that the peer has received but not parsed.
    sent: Vec<u8>,
    is_broken: bool,
    now: Instant,
}

impl IwarpRun<'_> {
    /// Runs one turn of the driver; returns whether there was progress.
    fn turn(&mut self) -> bool {
        let mut moved = self.owner.post(&mut self.iwarp, &mut self.choices);
        moved |= self.send();
        moved |= self.wire.is_drained() && self.next_record();
        moved |= !self.is_broken && self.receive();
        moved |= self.owner.poll_events(&mut self.iwarp, &mut self.choices);
        match self.choices.byte() {
            255 => self.iwarp.disconnect(),
            254 => drop(self.iwarp.invalidate(self.owner.granted(1).stag)),
            253 => self.pass_time(),
            _ => {}
        }
        moved
    }

    fn receive(&mut self) -> bool {
        match self.wire.turn(&mut self.iwarp, &mut self.choices) {
            Ok(moved) => moved,
            Err(error) => self.on_error(error),
        }
    }

    fn on_error(&mut self, error: ProtocolError) -> bool {
        let text = error.to_string();
        assert!(
            !text.contains('\n')
                && (error.reference.starts_with("RFC ") || error.reference == "limit of this provider"),
            "{text}"
        );
        self.is_broken = true;
        true
    }

    fn pass_time(&mut self) {
        if let Some(when) = self.iwarp.poll_timeout() {
            self.now = self.now.max(when) + Duration::from_nanos(1);
            match self.iwarp.on_timeout(self.now) {
                // An unresponsive peer is nudged a limited number of times.
                Ok(()) => assert!(self.iwarp.poll_timeout().is_none_or(|next| next > self.now)),
                Err(error) => {
                    self.on_error(error);
                }
            }
        }
    }

    /// Delivers sent bytes to the peer, which parses them.
    fn send(&mut self) -> bool {
        assert!(self.iwarp.outbox().len() < OUTBOX_FULL + (66 << 10), "the outbox exceeds its limit");
        let bytes = self.iwarp.outbox().take_bytes();
        self.sent.extend(&bytes);
        if !self.is_set_up || self.sent.len() < 20 {
            return !bytes.is_empty();
        }
        if self.sent.starts_with(b"MPA ID Re") {
            self.has_crc |= self.sent[16] & 0x40 != 0;
            let data = usize::from(u16::from_be_bytes([self.sent[18], self.sent[19]]));
            self.sent.drain(..20 + data);
        }
        while let Some(length) = self.sent.first_chunk() {
            let len = u16::from_be_bytes(*length);
            if self.sent.len() < fpdu_len(len) {
                break;
            }
            let fpdu: Vec<u8> = self.sent.drain(..fpdu_len(len)).collect();
            let request =
                fpdu.get(2 + UNTAGGED_LEN..).filter(|_| fpdu[3] & 0x0f == RdmapOpcode::RDMA_READ_REQUEST.0);
            if let Some((request, _)) =
                request.and_then(|request| ReadRequest::read_from_prefix(request).ok())
            {
                self.sinks.push(request.sink_stag.get());
            }
        }
        !bytes.is_empty()
    }

    /// Delivers the peer's next message.
    fn next_record(&mut self) -> bool {
        let Some((&kind, rest)) = self.records.split_first() else { return false };
        self.records = rest;
        if !self.is_set_up && kind != 0 {
            self.is_set_up = true;
            self.set_up(kind);
            return true;
        }
        match kind {
            2 => self.nearly_right(),
            _ => {
                let bytes = self.bytes();
                if kind == 1 { self.frame(&bytes) } else { self.wire.push(&bytes) }
            }
        }
        true
    }

    /// The next bytes, preceded by their length.
    fn bytes(&mut self) -> Vec<u8> {
        let (len, rest) = self.records.split_first().unwrap_or((&0, &[]));
        let (bytes, rest) = rest.split_at(rest.len().min((*len).into()));
        self.records = rest;
        bytes.to_vec()
    }

    /// Sends a valid MPA request or reply.
    fn set_up(&mut self, kind: u8) {
        let key = if self.is_active { b"MPA ID Rep Frame" } else { b"MPA ID Req Frame" };
        let mut frame = key.to_vec();
        // By RFC 6581.
        let crc = if self.has_crc { 0x40 } else { 0 };
        let (ird, ord) = (0x80 & kind, (kind & 3) << 6);
        frame.extend([0x10 | crc, 2, 0, 6, ird, 2, ord, 2, kind, kind]);
        self.wire.push(&frame);
    }

    fn frame(&mut self, ulpdu: &[u8]) {
        let mut bytes = (ulpdu.len() as u16).to_be_bytes().to_vec();
        bytes.extend(ulpdu);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        let crc = if self.has_crc { Crc32c::of(&bytes).value() } else { 0 };
        bytes.extend(crc.to_le_bytes());
        self.wire.push(&bytes);
    }

    fn nearly_right(&mut self) {
        let Some((record, rest)) = self.records.split_first_chunk::<7>() else { return };
        self.records = rest;
        let [ddp, rdmap, name, offset, msn, high, low] = *record;
        let len = usize::from(u16::from_be_bytes([high, low])).min(65_500);
        let granted = self.owner.granted(usize::from(name & 1));
        let stag = match name >> 1 {
            0..=95 => granted.stag.0,
            96 => granted.stag.0 ^ 1,
            _ => self.sinks.last().copied().unwrap_or(name.into()),
        };
        let to = queue_pair_owner::address_near_edge(granted, len, offset);
        let mut ulpdu = vec![ddp, rdmap];
        if ddp & 0x80 != 0 {
            ulpdu.extend(stag.to_be_bytes());
            ulpdu.extend(to.to_be_bytes());
            assert_eq!(ulpdu.len(), TAGGED_LEN);
            ulpdu.resize(TAGGED_LEN + len, 0xaa);
        } else {
            let queue = match rdmap & 0x0f {
                1 => 1,
                7 => 2,
                _ => usize::from(offset & 0x80 != 0) * 3,
            };
            let number = self.msns[queue].wrapping_add(u32::from(msn) + 1);
            self.msns[queue] = if ddp & 0x40 != 0 { number } else { number.wrapping_sub(1) };
            ulpdu.extend(granted.stag.0.to_be_bytes());
            ulpdu.extend((queue as u32).to_be_bytes());
            ulpdu.extend(number.to_be_bytes());
            ulpdu.extend(u32::from(offset & 0x7f).to_be_bytes());
            assert_eq!(ulpdu.len(), UNTAGGED_LEN);
            if queue == 1 {
                ulpdu.extend([0; 12]);
                ulpdu.extend((len as u32).to_be_bytes());
                ulpdu.extend(stag.to_be_bytes());
                ulpdu.extend(to.to_be_bytes());
            } else {
                ulpdu.resize(UNTAGGED_LEN + len.min(4000), 0xbb);
            }
        }
        self.frame(&ulpdu);
    }

    /// Closes the connection, from the peer's side or ours.
    fn finish(&mut self) {
        if let Err(error) = self.iwarp.on_end(Instant::now()) {
            self.on_error(error);
        }
        assert!(self.iwarp.outbox().is_empty());
        self.owner.poll_events(&mut self.iwarp, &mut self.choices);
        assert!(matches!(self.iwarp.demand(), Demand::Close));
        self.owner.finish(&self.iwarp);
    }
}

const MAX_TURNS: usize = 3000;
