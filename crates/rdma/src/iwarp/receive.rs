//! Receives FPDUs: checks them, and places or copies their payload.
//!
//! An FPDU is handled once it has arrived whole. The exception is a tagged FPDU with more than
//! [`PLACED_PAYLOAD`] bytes of payload that is only partly in the receive buffer: the rest is
//! received directly into its place, and its CRC is checked afterwards. A wrong CRC then ends the
//! connection; the bytes written until then lie within memory that the peer may write.
//!
//! All fields are checked before any memory is touched, in the order of the layers: MPA's length
//! and CRC; DDP's version, queue, MSN and offset; RDMAP's version and opcode; then the request
//! itself.

use super::messages::UntaggedQueues;
use super::setup::Rtr;
use super::terminate::{self, TerminateReason};
use super::transmit::PeerReadRequest;
use super::{Iwarp, IwarpPhase};
use blockmux_proto::driver::session::{Demand, ProtocolError};
use blockmux_proto::rdma::{Event, RemoteRights, Stag};
use blockmux_volume::{Chunk, Crc32c, Memory, Seg, SgList};
use blockmux_wire::iwarp::ddp::{
    Control, DDP_VERSION, QUEUE_READ, QUEUE_SEND, QUEUE_TERMINATE, TAGGED_LEN, Tagged, Untagged,
};
use blockmux_wire::iwarp::mpa::{CRC_LEN, LENGTH_LEN, REQ_REP_LEN, fpdu_len};
use blockmux_wire::iwarp::rdmap::{RDMAP_VERSION, RdmapOpcode};
use zerocopy::FromBytes;

/// State of the receiving side.
pub(super) struct ReceiveSide {
    state: ReceiveState,
    has_crc: bool,
    /// Rises with long tagged payloads and falls with short ones; see [`BULK`].
    bulk: u32,
    pub(super) untagged: UntaggedQueues,
}

/// What the next bytes of the stream are.
enum ReceiveState {
    /// A set-up frame or an FPDU, and how many bytes of it are needed.
    Frame(usize),
    /// Payload, received directly into its place.
    Place(TaggedPlacement),
    /// The padding and CRC that follow placed payload.
    Tail(TaggedPlacement),
}

/// Tagged payload that is received directly into its place.
struct TaggedPlacement {
    /// The MPA length and the tagged header.
    header: [u8; LENGTH_LEN + TAGGED_LEN],
    place: SgList,
    /// Whether the memory was invalidated meanwhile; the rest of the payload is then discarded.
    is_revoked: bool,
}

impl TaggedPlacement {
    fn tagged(&self) -> &[u8] {
        self.header.get(LENGTH_LEN..).unwrap_or_default()
    }

    /// Length of the ULPDU, in bytes.
    fn len(&self) -> u16 {
        self.header.first_chunk().map_or(0, |length| u16::from_be_bytes(*length))
    }

    /// Length of padding and CRC, in bytes.
    fn tail_len(&self) -> usize {
        fpdu_len(self.len()).saturating_sub(LENGTH_LEN).saturating_sub(self.len().into())
    }
}

impl ReceiveSide {
    pub(super) fn new(receives: u32) -> ReceiveSide {
        ReceiveSide {
            state: ReceiveState::Frame(REQ_REP_LEN),
            has_crc: false,
            bulk: 0,
            untagged: UntaggedQueues::new(receives),
        }
    }

    /// Number of bytes needed of an MPA request or reply.
    pub(super) fn setup_len(&self) -> usize {
        match self.state {
            ReceiveState::Frame(need) => need,
            ReceiveState::Place(_) | ReceiveState::Tail(_) => REQ_REP_LEN,
        }
    }

    /// Expects an MPA request or reply of `len` bytes.
    pub(super) fn need_setup(&mut self, len: usize) {
        self.state = ReceiveState::Frame(len);
    }

    /// Expects FPDUs from now on.
    pub(super) fn begin(&mut self, has_crc: bool) {
        self.state = ReceiveState::Frame(LENGTH_LEN);
        self.has_crc = has_crc;
    }

    #[inline]
    pub(super) fn demand(&self) -> Demand {
        match &self.state {
            ReceiveState::Frame(need) => Demand::Bytes(*need),
            ReceiveState::Place(placing) => Demand::Place(placing.place.clone()),
            ReceiveState::Tail(placing) => Demand::Bytes(placing.tail_len()),
        }
    }

    /// Whether the stream mostly carries long tagged payloads, which are best received into their
    /// place.
    #[inline]
    pub(super) fn is_mostly_placed(&self) -> bool {
        self.bulk >= BULK
    }

    /// Counts a tagged segment with `payload` bytes.
    #[inline]
    fn weigh(&mut self, payload: usize) {
        self.bulk = match payload {
            LONG_PAYLOAD.. => self.bulk.saturating_add(BULK).min(2 * BULK),
            _ => self.bulk.saturating_sub(1),
        };
    }

    /// Whether the stream is within a frame or a message, where it must not end.
    pub(super) fn is_within(&self) -> bool {
        !matches!(self.state, ReceiveState::Frame(_)) || self.untagged.reassembly.is_some()
    }

    /// Redirects a write that is just arriving away from memory that is being invalidated.
    #[inline]
    pub(super) fn revoke(&mut self, stag: Stag) {
        if let ReceiveState::Place(placing) = &mut self.state
            && let Ok((header, _)) = Tagged::read_from_prefix(placing.tagged())
            && header.control.opcode() == RdmapOpcode::RDMA_WRITE
            && header.stag.get() == stag.0
        {
            let len = placing.place.len();
            placing.place = Memory::from_heap(len).seg(0, len).into();
            placing.is_revoked = true;
        }
    }

    /// Drops partial frames and messages at the end of the connection.
    pub(super) fn stop(&mut self) {
        self.state = ReceiveState::Frame(LENGTH_LEN);
        self.untagged.stop();
    }
}

impl Iwarp {
    /// Handles the FPDUs in `input`; returns how many bytes were consumed.
    #[inline]
    pub(super) fn on_fpdus(&mut self, input: &Chunk) -> Result<usize, ProtocolError> {
        let unread = input.unread();
        let mut at: usize = 0;
        loop {
            if self.phase == IwarpPhase::Closed {
                return Ok(unread.len());
            }
            // The session may post a receive buffer once it has handled the last message; the
            // driver passes the rest again.
            if at > 0 && self.receive_side.untagged.is_exhausted() && !self.events.is_empty() {
                return Ok(at);
            }
            let rest = unread.get(at..).unwrap_or_default();
            let taken = match self.receive_side.state {
                ReceiveState::Place(_) => return Ok(at),
                ReceiveState::Tail(_) => self.take_tail(rest)?,
                ReceiveState::Frame(_) => self.take_fpdu(input, at, rest)?,
            };
            match taken {
                0 => return Ok(at),
                _ => at = at.saturating_add(taken),
            }
        }
    }

    /// Handles an FPDU, or the header of one whose payload is to be placed. Returns the consumed
    /// bytes, 0 if more are needed.
    #[inline]
    fn take_fpdu(&mut self, input: &Chunk, at: usize, rest: &[u8]) -> Result<usize, ProtocolError> {
        let Some(length) = rest.first_chunk::<LENGTH_LEN>() else { return self.need(LENGTH_LEN) };
        let len = u16::from_be_bytes(*length);
        if usize::from(len) < TAGGED_LEN {
            return Err(self.terminate(terminate::SHORT_FRAME, &[], 0));
        }
        let total = fpdu_len(len);
        if let Some(fpdu) = rest.get(..total) {
            let end = LENGTH_LEN.saturating_add(len.into());
            let ulpdu = fpdu.get(LENGTH_LEN..end).unwrap_or_default();
            if self.receive_side.has_crc && !is_intact(fpdu) {
                return Err(self.terminate(terminate::BAD_CRC, ulpdu, len.into()));
            }
            self.receive_side.state = ReceiveState::Frame(LENGTH_LEN);
            self.on_ulpdu(ulpdu, |offset, len| {
                input.slice(at.saturating_add(LENGTH_LEN).saturating_add(offset), len)
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
        self.receive_side.weigh(payload);
        let place = tagged_header(ulpdu).and_then(|header| self.tagged_place(&header, payload));
        let place = match place {
            Ok(place) => place,
            Err(reason) => return Err(self.terminate(reason, ulpdu, len.into())),
        };
        self.receive_side.state =
            ReceiveState::Place(TaggedPlacement { header: *header, place, is_revoked: false });
        Ok(header.len())
    }

    fn need(&mut self, bytes: usize) -> Result<usize, ProtocolError> {
        self.receive_side.state = ReceiveState::Frame(bytes);
        Ok(0)
    }

    /// Handles the end of placed payload.
    pub(super) fn place_is_full(&mut self) -> Result<(), ProtocolError> {
        match std::mem::replace(&mut self.receive_side.state, ReceiveState::Frame(LENGTH_LEN)) {
            ReceiveState::Place(placing) if placing.is_revoked => {
                let reason = TerminateReason::write(crate::Refusal::InvalidStag);
                Err(self.terminate(reason, placing.tagged(), placing.len().into()))
            }
            ReceiveState::Place(placing) => {
                self.receive_side.state = ReceiveState::Tail(placing);
                Ok(())
            }
            other => {
                self.receive_side.state = other;
                Ok(())
            }
        }
    }

    /// Handles the padding and CRC that follow placed payload.
    fn take_tail(&mut self, rest: &[u8]) -> Result<usize, ProtocolError> {
        let ReceiveState::Tail(placing) = &self.receive_side.state else { return Ok(0) };
        let Some(tail) = rest.get(..placing.tail_len()) else { return Ok(0) };
        if self.receive_side.has_crc {
            let (padding, sent) = tail.split_at(tail.len().saturating_sub(CRC_LEN));
            let mut crc = Crc32c::of(&placing.header);
            // A peer that overwrites this memory meanwhile only breaks its own CRC.
            crc.add_list(&placing.place);
            crc.add(padding);
            if sent != crc.to_le_bytes() {
                let (header, len) = (placing.header, placing.len());
                let ulpdu = header.get(LENGTH_LEN..).unwrap_or_default();
                return Err(self.terminate(terminate::BAD_CRC, ulpdu, len.into()));
            }
        }
        let (header, payload) = (placing.header, placing.place.len());
        self.receive_side.state = ReceiveState::Frame(LENGTH_LEN);
        self.on_first();
        self.on_tagged(header.get(LENGTH_LEN..).unwrap_or_default(), payload);
        Ok(tail.len())
    }

    /// Handles a whole segment. `borrow` borrows a part of it from the receive buffer.
    #[inline]
    fn on_ulpdu(
        &mut self,
        ulpdu: &[u8],
        borrow: impl FnOnce(usize, usize) -> Seg,
    ) -> Result<(), ProtocolError> {
        self.on_first();
        let control = Control::read_from_prefix(ulpdu).map(|(control, _)| control);
        let done = match control {
            Ok(control) if control.is_tagged() => {
                let payload = ulpdu.get(TAGGED_LEN..).unwrap_or_default();
                self.take_tagged(ulpdu, payload, || borrow(TAGGED_LEN, payload.len()))
            }
            Ok(_) => match Untagged::read_from_prefix(ulpdu) {
                Ok((header, body)) => self.on_untagged(&header, body, ulpdu, borrow)?,
                Err(_) => Err(terminate::SHORT_FRAME),
            },
            Err(_) => Err(terminate::SHORT_FRAME),
        };
        done.map_err(|reason| self.terminate(reason, ulpdu, ulpdu.len()))
    }

    /// Handles the first FPDU of the peer, which shows that it is ready to receive.
    #[inline]
    fn on_first(&mut self) {
        if self.is_first {
            (self.is_first, self.transmitter.may_send) = (false, true);
            self.deadline = None;
        }
    }

    /// Copies the payload of a tagged segment to its place, if the peer may write there. A place
    /// without memory borrows it.
    #[inline]
    fn take_tagged(
        &mut self,
        ulpdu: &[u8],
        payload: &[u8],
        borrow: impl FnOnce() -> Seg,
    ) -> Result<(), TerminateReason> {
        let header = tagged_header(ulpdu)?;
        self.receive_side.weigh(payload.len());
        if header.control.opcode() == RdmapOpcode::RDMA_WRITE && !payload.is_empty() {
            let stag = Stag(header.stag.get());
            let written = self.regions.write(stag, header.to.get(), payload, borrow);
            return written.map_err(TerminateReason::write);
        }
        self.tagged_place(&header, payload.len())?.copy_from(payload);
        self.on_tagged(ulpdu, payload.len());
        Ok(())
    }

    /// The place of a tagged segment's payload, if the peer may write there.
    #[inline]
    fn tagged_place(&mut self, header: &Tagged, payload: usize) -> Result<SgList, TerminateReason> {
        // A ULPDU's length has 16 bits.
        let len = payload as u32;
        match header.control.opcode() {
            // An empty write may have any tag (RFC 5041 §7.1).
            RdmapOpcode::RDMA_WRITE if len == 0 => Ok(SgList::default()),
            RdmapOpcode::RDMA_WRITE => {
                let stag = Stag(header.stag.get());
                self.regions.place(stag, header.to.get(), len).map_err(TerminateReason::write)
            }
            RdmapOpcode::RDMA_READ_RESPONSE => {
                let reading = self.pending.reading().ok_or(terminate::BAD_OPCODE)?;
                if header.stag.get() != reading.sink {
                    return Err(terminate::SINK_STAG);
                }
                let end = reading.filled.checked_add(len).ok_or(terminate::SINK_BOUNDS)?;
                if header.to.get() != u64::from(reading.filled)
                    || end > reading.len
                    || (header.control.is_last() && end < reading.len)
                {
                    return Err(terminate::SINK_BOUNDS);
                }
                if reading.filled == 0 && len == reading.len {
                    return Ok(reading.local.clone());
                }
                Ok(reading.local.slice(reading.filled as usize, payload))
            }
            _ => Err(terminate::BAD_OPCODE),
        }
    }

    /// Handles a tagged segment whose payload is in its place: the last segment of a response
    /// completes its read.
    #[inline]
    fn on_tagged(&mut self, ulpdu: &[u8], payload: usize) {
        let Ok((control, _)) = Control::read_from_prefix(ulpdu) else { return };
        if control.opcode() != RdmapOpcode::RDMA_READ_RESPONSE {
            return;
        }
        if let Some(reading) = self.pending.reading() {
            // `tagged_place` has checked that it stays within the read's length.
            reading.filled = reading.filled.saturating_add(payload as u32);
        }
        if control.is_last()
            && let Some(id) = self.pending.pop_read()
        {
            self.events.push_back(Event::Done { id, result: Ok(()) });
        }
    }

    /// Handles an untagged segment. The outer error is that of a Terminate message, which ends the
    /// connection; the inner one is a violation that this side has to report.
    #[inline]
    fn on_untagged(
        &mut self,
        header: &Untagged,
        body: &[u8],
        ulpdu: &[u8],
        borrow: impl FnOnce(usize, usize) -> Seg,
    ) -> Result<Result<(), TerminateReason>, ProtocolError> {
        let (control, queue) = (header.control, header.qn.get());
        if control.ddp_version() != DDP_VERSION {
            return Ok(Err(terminate::UNTAGGED_VERSION));
        }
        if queue > QUEUE_TERMINATE {
            return Ok(Err(terminate::BAD_QUEUE));
        }
        if control.rdmap_version() != RDMAP_VERSION {
            return Ok(Err(terminate::RDMAP_VERSION));
        }
        match (queue, control.opcode()) {
            (QUEUE_SEND, opcode) if opcode.is_send() => Ok(self.on_send(header, body, borrow)),
            (QUEUE_READ, RdmapOpcode::RDMA_READ_REQUEST) => Ok(self.on_read(header, body, ulpdu)),
            (QUEUE_TERMINATE, RdmapOpcode::TERMINATE) => Err(self.on_terminate(body)),
            _ => Ok(Err(terminate::BAD_OPCODE)),
        }
    }

    /// Handles a segment of a Send message.
    #[inline]
    fn on_send(
        &mut self,
        header: &Untagged,
        body: &[u8],
        borrow: impl FnOnce(usize, usize) -> Seg,
    ) -> Result<(), TerminateReason> {
        let ends_setup = self.negotiated.rtr == Some(Rtr::Send);
        let (queues, receive_len) = (&mut self.receive_side.untagged, self.endpoint.receive_len as usize);
        let message = queues.on_send((header, body), ends_setup, receive_len, &self.pool, borrow)?;
        let Some(message) = message else { return Ok(()) };
        let stag = Stag(header.invalidate_stag.get());
        let invalidated = header.control.opcode().invalidates().then_some(stag);
        let written = match invalidated {
            Some(stag) => self.regions.invalidate(stag).map_err(|_| terminate::CANNOT_INVALIDATE)?,
            None => None,
        };
        self.events.push_back(Event::Received { message, invalidated, written });
        Ok(())
    }

    /// Handles a Read Request: checks it and queues its response.
    #[inline]
    fn on_read(&mut self, header: &Untagged, body: &[u8], ulpdu: &[u8]) -> Result<(), TerminateReason> {
        let request = self.receive_side.untagged.on_read(header, body)?;
        if self.transmitter.unanswered_reads() >= self.negotiated.ird as usize {
            return Err(terminate::TOO_MANY_READS);
        }
        let len = request.rdma_rd_sz.get();
        if len > 0 {
            let stag = Stag(request.src_stag.get());
            self.regions
                .check_grant(stag, request.src_to.get(), len, RemoteRights::RemoteRead)
                .map_err(TerminateReason::read)?;
        }
        let asked: PeerReadRequest = ulpdu.try_into().map_err(|_| terminate::SHORT_READ)?;
        self.transmitter.peer_reads.push_back(asked);
        Ok(())
    }
}

/// Reads the header of a tagged segment and checks its DDP and RDMAP versions.
#[inline]
fn tagged_header(ulpdu: &[u8]) -> Result<Tagged, TerminateReason> {
    let Ok((header, _)) = Tagged::read_from_prefix(ulpdu) else { return Err(terminate::SHORT_FRAME) };
    if header.control.ddp_version() != DDP_VERSION {
        return Err(terminate::TAGGED_VERSION);
    }
    if header.control.rdmap_version() != RDMAP_VERSION {
        return Err(terminate::RDMAP_VERSION);
    }
    Ok(header)
}

/// Whether the CRC at the end of an FPDU is correct.
#[inline]
fn is_intact(fpdu: &[u8]) -> bool {
    let (covered, sent) = fpdu.split_at(fpdu.len().saturating_sub(CRC_LEN));
    Crc32c::of(covered).to_le_bytes() == sent
}

/// Tagged payload of up to this many bytes is received into the receive buffer and copied. Longer
/// payload is placed: the driver's next receive fills the place and the buffer behind it in one
/// call, so placing costs no extra call. Payload that is this short has mostly arrived already.
pub(super) const PLACED_PAYLOAD: usize = 4 << 10;

/// Tagged payload from this many bytes on is long: a receive into its place is cheaper than a copy.
const LONG_PAYLOAD: usize = 16 << 10;

/// Number of short payloads that may arrive for each long one while the stream still counts as
/// mostly placed.
const BULK: u32 = 4;
