//! FPDUs as they come: whose they are, whether they may, and where their payload goes.
//!
//! An FPDU is waited for whole, checked, and acted upon. Only of a tagged one with more than
//! [`PLACED_PAYLOAD`] bytes, of which not all is in the receive buffer, the rest is received where
//! it belongs; its CRC is checked behind that, and a wrong one ends the connection. What was
//! written until then lies within what the peer had been granted, as all that it writes.
//!
//! Everything that the peer says is checked before any memory is touched, in the order of the
//! layers: MPA's length and CRC, DDP's version, queue, number and offset, RDMAP's version and
//! opcode, then what the message asks for.

use super::messages::Queues;
use super::unframe::{Step, Unframer};
use super::wrong::{self, Wrong};
use super::{Iwarp, Phase};
use blockmux_proto::rdma::{Event, RemoteRights, Stag};
use blockmux_proto::session::{Demand, ProtocolError};
use blockmux_volume::{Chunk, Crc32c, Memory, Seg, SgList};
use blockmux_wire::iwarp::ddp::{Control, DDP_VERSION, TAGGED_LEN, Tagged, Untagged};
use blockmux_wire::iwarp::mpa::{CRC_LEN, LENGTH_LEN, REQ_REP_LEN, fpdu_len};
use blockmux_wire::iwarp::rdmap::{RDMAP_VERSION, RdmapOpcode};
use zerocopy::FromBytes;

/// The receiving side, as far as it has come.
pub(super) struct Arrival {
    state: State,
    has_crc: bool,
    /// Where we wanted markers.
    unframer: Option<Unframer>,
    /// Rises with long tagged payload, and falls with short.
    bulk: u32,
    pub(super) untagged: Queues,
}

/// What the next bytes are.
enum State {
    /// A frame, of which so many bytes are needed.
    Frame(usize),
    /// Payload, straight into its place.
    Place(Placing),
    /// Padding and CRC behind it.
    Tail(Placing),
}

/// Payload that is received into its place.
struct Placing {
    /// With the length before it.
    header: [u8; LENGTH_LEN + TAGGED_LEN],
    place: SgList,
    /// It was closed meanwhile: what still comes goes nowhere.
    is_revoked: bool,
}

impl Placing {
    fn tagged(&self) -> &[u8] {
        self.header.get(LENGTH_LEN..).unwrap_or_default()
    }

    /// Of the ULPDU, in bytes.
    fn len(&self) -> u16 {
        self.header.first_chunk().map_or(0, |length| u16::from_be_bytes(*length))
    }

    /// Of padding and CRC, in bytes.
    fn tail_len(&self) -> usize {
        fpdu_len(self.len()).saturating_sub(LENGTH_LEN).saturating_sub(self.len().into())
    }
}

impl Arrival {
    pub(super) fn new(receives: u32) -> Arrival {
        Arrival {
            state: State::Frame(REQ_REP_LEN),
            has_crc: false,
            unframer: None,
            bulk: 0,
            untagged: Queues::new(receives),
        }
    }

    /// How many bytes are needed of a request or reply.
    pub(super) fn setup_len(&self) -> usize {
        match self.state {
            State::Frame(need) => need,
            State::Place(_) | State::Tail(_) => REQ_REP_LEN,
        }
    }

    /// A request or reply of so many bytes is to come.
    pub(super) fn need_setup(&mut self, len: usize) {
        self.state = State::Frame(len);
    }

    /// FPDUs come from here on.
    pub(super) fn begin(&mut self, has_crc: bool, has_markers: bool) {
        self.state = State::Frame(LENGTH_LEN);
        self.has_crc = has_crc;
        self.unframer = has_markers.then(Unframer::default);
    }

    #[inline]
    pub(super) fn demand(&self) -> Demand {
        match &self.state {
            State::Frame(need) => Demand::Bytes(*need),
            State::Place(placing) => Demand::Place(placing.place.clone()),
            State::Tail(placing) => Demand::Bytes(placing.tail_len()),
        }
    }

    /// Whether what comes is mostly long tagged payload, to be received where it belongs.
    #[inline]
    pub(super) fn is_mostly_placed(&self) -> bool {
        self.bulk >= BULK
    }

    /// A tagged segment comes with so many bytes of payload.
    #[inline]
    fn weigh(&mut self, payload: usize) {
        self.bulk = match payload {
            LONG_PAYLOAD.. => self.bulk.saturating_add(BULK).min(2 * BULK),
            _ => self.bulk.saturating_sub(1),
        };
    }

    /// Whether the stream cannot end here.
    pub(super) fn is_within(&self) -> bool {
        !matches!(self.state, State::Frame(_)) || self.untagged.is_within()
    }

    /// Memory is closed: what is just arriving for it goes nowhere.
    #[inline]
    pub(super) fn revoke(&mut self, stag: Stag) {
        if let State::Place(placing) = &mut self.state
            && let Ok((header, _)) = Tagged::read_from_prefix(placing.tagged())
            && header.control.opcode() == RdmapOpcode::RDMA_WRITE
            && header.stag.get() == stag.0
        {
            let len = placing.place.len();
            placing.place = Memory::from_heap(len).seg(0, len).into();
            placing.is_revoked = true;
        }
    }

    /// The connection is over.
    pub(super) fn stop(&mut self) {
        self.state = State::Frame(LENGTH_LEN);
        self.untagged.stop();
    }
}

impl Iwarp {
    /// Takes what there is of FPDUs.
    #[inline]
    pub(super) fn on_fpdus(&mut self, input: &Chunk) -> Result<usize, ProtocolError> {
        let unread = input.unread();
        let mut at: usize = 0;
        loop {
            if self.phase == Phase::Over {
                return Ok(unread.len());
            }
            // The last receive buffer may be given back once the session has seen what came in it:
            // the rest is shown again.
            if at > 0 && self.arrival.untagged.is_exhausted() && !self.events.is_empty() {
                return Ok(at);
            }
            let rest = unread.get(at..).unwrap_or_default();
            let taken = match self.arrival.state {
                State::Place(_) => return Ok(at),
                State::Tail(_) => self.take_tail(rest)?,
                State::Frame(_) if self.arrival.unframer.is_some() => self.take_marked(rest)?,
                State::Frame(_) => self.take_fpdu(input, at, rest)?,
            };
            match taken {
                0 => return Ok(at),
                _ => at = at.saturating_add(taken),
            }
        }
    }

    /// Takes an FPDU, or the header of one whose payload is to be placed; returns how many bytes, 0
    /// if more are needed.
    #[inline]
    fn take_fpdu(&mut self, input: &Chunk, at: usize, rest: &[u8]) -> Result<usize, ProtocolError> {
        let Some(length) = rest.first_chunk::<LENGTH_LEN>() else { return self.need(LENGTH_LEN) };
        let len = u16::from_be_bytes(*length);
        if usize::from(len) < TAGGED_LEN {
            return Err(self.terminate(wrong::SHORT_FRAME, &[], 0));
        }
        let total = fpdu_len(len);
        if let Some(fpdu) = rest.get(..total) {
            let end = LENGTH_LEN.saturating_add(len.into());
            let ulpdu = fpdu.get(LENGTH_LEN..end).unwrap_or_default();
            if self.arrival.has_crc && !is_intact(fpdu) {
                return Err(self.terminate(wrong::BAD_CRC, ulpdu, len.into()));
            }
            self.arrival.state = State::Frame(LENGTH_LEN);
            self.on_ulpdu(ulpdu, |offset, len| {
                input.lend(at.saturating_add(LENGTH_LEN).saturating_add(offset), len)
            })?;
            return Ok(total);
        }
        if usize::from(len) <= TAGGED_LEN.saturating_add(PLACED_PAYLOAD) {
            return self.need(total);
        }
        let Some(header) = rest.first_chunk() else {
            return self.need(LENGTH_LEN.saturating_add(TAGGED_LEN));
        };
        let ulpdu = rest.get(LENGTH_LEN..).unwrap_or_default();
        if !Control::read_from_prefix(ulpdu).is_ok_and(|(control, _)| control.is_tagged()) {
            return self.need(total);
        }
        let payload = usize::from(len).saturating_sub(TAGGED_LEN);
        self.arrival.weigh(payload);
        let place = tagged_header(ulpdu).and_then(|header| self.tagged_place(&header, payload));
        let place = match place {
            Ok(place) => place,
            Err(wrong) => return Err(self.terminate(wrong, ulpdu, len.into())),
        };
        self.arrival.state = State::Place(Placing { header: *header, place, is_revoked: false });
        Ok(header.len())
    }

    fn need(&mut self, bytes: usize) -> Result<usize, ProtocolError> {
        self.arrival.state = State::Frame(bytes);
        Ok(0)
    }

    /// Takes an FPDU with markers.
    fn take_marked(&mut self, rest: &[u8]) -> Result<usize, ProtocolError> {
        let Some(mut unframer) = self.arrival.unframer.take() else { return Ok(0) };
        let taken = match unframer.take(rest) {
            Ok(Step::Needs(bytes)) => self.need(bytes),
            Ok(Step::Whole(stuffed)) => {
                let fpdu = unframer.fpdu();
                let len = fpdu.first_chunk().map_or(0, |length| u16::from_be_bytes(*length)).into();
                let ulpdu = fpdu.get(LENGTH_LEN..).and_then(|rest| rest.get(..len)).unwrap_or_default();
                if self.arrival.has_crc && !rest.get(..stuffed).is_some_and(is_intact) {
                    Err(self.terminate(wrong::BAD_CRC, ulpdu, len))
                } else {
                    self.arrival.state = State::Frame(LENGTH_LEN);
                    let keep = |offset: usize, len: usize| {
                        Seg::from_slice(
                            ulpdu.get(offset..).and_then(|rest| rest.get(..len)).unwrap_or_default(),
                        )
                    };
                    self.on_ulpdu(ulpdu, keep).map(|()| stuffed)
                }
            }
            Err(wrong) => Err(self.terminate(wrong, &[], 0)),
        };
        self.arrival.unframer = Some(unframer);
        taken
    }

    /// The payload that was to be placed is there.
    pub(super) fn place_is_full(&mut self) -> Result<(), ProtocolError> {
        match std::mem::replace(&mut self.arrival.state, State::Frame(LENGTH_LEN)) {
            State::Place(placing) if placing.is_revoked => {
                let wrong = Wrong::write(crate::Refusal::InvalidStag);
                Err(self.terminate(wrong, placing.tagged(), placing.len().into()))
            }
            State::Place(placing) => {
                self.arrival.state = State::Tail(placing);
                Ok(())
            }
            other => {
                self.arrival.state = other;
                Ok(())
            }
        }
    }

    /// Takes padding and CRC behind payload that was placed.
    fn take_tail(&mut self, rest: &[u8]) -> Result<usize, ProtocolError> {
        let State::Tail(placing) = &self.arrival.state else { return Ok(0) };
        let Some(tail) = rest.get(..placing.tail_len()) else { return Ok(0) };
        if self.arrival.has_crc {
            let (padding, sent) = tail.split_at(tail.len().saturating_sub(CRC_LEN));
            let mut crc = Crc32c::of(&placing.header);
            // Who may write there may do so meanwhile, and has broken its own CRC then.
            crc.add_list(&placing.place);
            crc.add(padding);
            if sent != crc.to_le_bytes() {
                let (header, len) = (placing.header, placing.len());
                let ulpdu = header.get(LENGTH_LEN..).unwrap_or_default();
                return Err(self.terminate(wrong::BAD_CRC, ulpdu, len.into()));
            }
        }
        let (header, payload) = (placing.header, placing.place.len());
        self.arrival.state = State::Frame(LENGTH_LEN);
        self.on_first();
        self.on_tagged(header.get(LENGTH_LEN..).unwrap_or_default(), payload);
        Ok(tail.len())
    }

    /// Acts upon a segment that is whole. `lend` makes a part of it last.
    #[inline]
    fn on_ulpdu(
        &mut self,
        ulpdu: &[u8],
        lend: impl FnOnce(usize, usize) -> Seg,
    ) -> Result<(), ProtocolError> {
        self.on_first();
        let control = Control::read_from_prefix(ulpdu).map(|(control, _)| control);
        let done = match control {
            Ok(control) if control.is_tagged() => {
                let payload = ulpdu.get(TAGGED_LEN..).unwrap_or_default();
                self.take_tagged(ulpdu, payload)
            }
            Ok(_) => match Untagged::read_from_prefix(ulpdu) {
                Ok((header, body)) => self.on_untagged(&header, body, ulpdu, lend)?,
                Err(_) => Err(wrong::SHORT_FRAME),
            },
            Err(_) => Err(wrong::SHORT_FRAME),
        };
        done.map_err(|wrong| self.terminate(wrong, ulpdu, ulpdu.len()))
    }

    /// The peer has sent something, and so is ready for what we send.
    #[inline]
    fn on_first(&mut self) {
        if self.is_first {
            (self.is_first, self.transmitter.may_send) = (false, true);
            self.deadline = None;
        }
    }

    /// Copies the payload of a tagged segment to where it belongs, if it may be there.
    #[inline]
    fn take_tagged(&mut self, ulpdu: &[u8], payload: &[u8]) -> Result<(), Wrong> {
        let header = tagged_header(ulpdu)?;
        self.arrival.weigh(payload.len());
        if header.control.opcode() == RdmapOpcode::RDMA_WRITE && !payload.is_empty() {
            let stag = Stag(header.stag.get());
            return self.regions.write(stag, header.to.get(), payload).map_err(Wrong::write);
        }
        self.tagged_place(&header, payload.len())?.copy_from(payload);
        self.on_tagged(ulpdu, payload.len());
        Ok(())
    }

    /// Where the payload of a tagged segment belongs, if it may be there.
    #[inline]
    fn tagged_place(&mut self, header: &Tagged, payload: usize) -> Result<SgList, Wrong> {
        // A ULPDU has a length of 16 bits.
        let len = payload as u32;
        match header.control.opcode() {
            // Of a name under which nothing is written, nothing is asked (RFC 5041 §7.1).
            RdmapOpcode::RDMA_WRITE if len == 0 => Ok(SgList::default()),
            RdmapOpcode::RDMA_WRITE => {
                let stag = Stag(header.stag.get());
                self.regions
                    .look_up(stag, header.to.get(), len, RemoteRights::RemoteWrite)
                    .map_err(Wrong::write)
            }
            RdmapOpcode::RDMA_READ_RESPONSE => {
                let reading = self.pending.reading().ok_or(wrong::BAD_OPCODE)?;
                if header.stag.get() != reading.sink {
                    return Err(wrong::SINK_STAG);
                }
                let end = reading.filled.checked_add(len).ok_or(wrong::SINK_BOUNDS)?;
                if header.to.get() != u64::from(reading.filled)
                    || end > reading.len
                    || (header.control.is_last() && end < reading.len)
                {
                    return Err(wrong::SINK_BOUNDS);
                }
                if reading.filled == 0 && len == reading.len {
                    return Ok(reading.local.clone());
                }
                Ok(reading.local.slice(reading.filled as usize, payload))
            }
            _ => Err(wrong::BAD_OPCODE),
        }
    }

    /// The payload of a tagged segment is where it belongs.
    #[inline]
    fn on_tagged(&mut self, ulpdu: &[u8], payload: usize) {
        let Ok((control, _)) = Control::read_from_prefix(ulpdu) else { return };
        if control.opcode() != RdmapOpcode::RDMA_READ_RESPONSE {
            return;
        }
        if let Some(reading) = self.pending.reading() {
            // No further than its length, which was checked.
            reading.filled = reading.filled.saturating_add(payload as u32);
        }
        if control.is_last()
            && let Some(id) = self.pending.pop_read()
        {
            self.events.push_back(Event::Done { id, result: Ok(()) });
        }
    }
}

/// The header of a tagged segment, of versions that we know.
#[inline]
fn tagged_header(ulpdu: &[u8]) -> Result<Tagged, Wrong> {
    let Ok((header, _)) = Tagged::read_from_prefix(ulpdu) else { return Err(wrong::SHORT_FRAME) };
    if header.control.ddp_version() != DDP_VERSION {
        return Err(wrong::TAGGED_VERSION);
    }
    if header.control.rdmap_version() != RDMAP_VERSION {
        return Err(wrong::RDMAP_VERSION);
    }
    Ok(header)
}

/// Whether the CRC at the end of an FPDU is that of the rest.
#[inline]
fn is_intact(fpdu: &[u8]) -> bool {
    let (covered, sent) = fpdu.split_at(fpdu.len().saturating_sub(CRC_LEN));
    Crc32c::of(covered).to_le_bytes() == sent
}

/// In bytes: of tagged payload up to this, all is waited for in the receive buffer, and then
/// copied. The driver's next receive fills the rest of the place and the buffer behind it in one
/// call, so that placing costs no call of its own; but what is this short has mostly come already.
pub(super) const PLACED_PAYLOAD: usize = 4 << 10;

/// In bytes: tagged payload of this length is worth a receive of its own, rather than a copy.
const LONG_PAYLOAD: usize = 16 << 10;

/// How many segments with short payload may come for one with long payload, where that is mostly
/// placed.
const BULK: u32 = 4;
