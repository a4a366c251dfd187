//! PDUs from the host. The drawing is in the module above.

use super::NvmeTcpTargetSession;
use super::link::MAX_BORROWED_PAYLOAD;
use crate::digest;
use crate::nvme_tcp::pdu::{self, HostViolation};
use crate::session::{Demand, ProtocolError};
use blockmux_volume::{Chunk, Crc32c, Seg};
use blockmux_wire::nvmeof::tcp::*;
use std::mem::offset_of;
use zerocopy::FromBytes;

/// What the next bytes are.
pub(super) enum AwaitedNvmePdu {
    /// The PDU that initializes the connection: so many bytes of it.
    IcReq(usize),
    /// A PDU: at least so many bytes of it, in one piece.
    Head(usize),
    /// Data of a command, whole and in one piece, with its digest.
    Data(ArrivingH2cData),
    /// Data straight into its place.
    Place(ArrivingH2cData, Seg),
    /// The digest of what was placed.
    Tail(ArrivingH2cData, Crc32c),
}

/// The data of one H2CData.
#[derive(Clone, Copy)]
pub(super) struct ArrivingH2cData {
    slot: usize,
    /// In bytes.
    len: usize,
}

impl NvmeTcpTargetSession {
    pub(super) fn wants(&self) -> Demand {
        match &self.transport.awaiting {
            AwaitedNvmePdu::Head(_) if !self.listens() => Demand::Nothing,
            AwaitedNvmePdu::IcReq(len) | AwaitedNvmePdu::Head(len) => Demand::Bytes(*len),
            AwaitedNvmePdu::Data(arriving) => {
                Demand::Bytes(arriving.len.saturating_add(self.transport.digests.data_len()))
            }
            AwaitedNvmePdu::Place(_, place) => Demand::Place(place.clone().into()),
            AwaitedNvmePdu::Tail(..) => Demand::Bytes(DIGEST_LEN),
        }
    }

    /// Whether the next PDU may be looked at. Its command has an entry of the queue, if the host
    /// keeps to its size.
    #[inline]
    fn listens(&self) -> bool {
        self.takes_commands() && self.transport.is_read()
    }

    /// One PDU or a part of its data; `None` if more bytes are needed, or the host has to read
    /// first.
    #[inline]
    pub(super) fn step(&mut self, input: &Chunk, at: usize) -> Result<Option<usize>, ProtocolError> {
        let unread = input.unread().get(at..).unwrap_or_default();
        match self.transport.awaiting {
            AwaitedNvmePdu::IcReq(_) => self.initialize(unread),
            AwaitedNvmePdu::Head(_) => self.on_pdu(input, at, unread),
            AwaitedNvmePdu::Data(arriving) => {
                let len = arriving.len.saturating_add(self.transport.digests.data_len());
                let Some(whole) = unread.get(..len) else { return Ok(None) };
                let (covered, sent) = whole.split_at(arriving.len);
                let is_good = !self.transport.digests.data || digest::of(covered) == sent;
                self.transport.awaiting = AwaitedNvmePdu::Head(COMMON_HEADER_LEN);
                self.on_borrowed(arriving, input.lend(at, arriving.len), is_good);
                Ok(Some(len))
            }
            AwaitedNvmePdu::Tail(arriving, crc) => {
                let Some(sent) = unread.get(..DIGEST_LEN) else { return Ok(None) };
                self.transport.awaiting = AwaitedNvmePdu::Head(COMMON_HEADER_LEN);
                self.arrived(arriving, sent == crc.to_le_bytes());
                Ok(Some(DIGEST_LEN))
            }
            AwaitedNvmePdu::Place(..) => Ok(None),
        }
    }

    /// The memory of [`Demand::Place`] is full.
    pub(super) fn placed(&mut self) {
        let AwaitedNvmePdu::Place(arriving, place) = &self.transport.awaiting else { return };
        let arriving = *arriving;
        if self.transport.digests.data {
            let mut crc = Crc32c::default();
            crc.add_seg(place);
            self.transport.awaiting = AwaitedNvmePdu::Tail(arriving, crc);
        } else {
            self.transport.awaiting = AwaitedNvmePdu::Head(COMMON_HEADER_LEN);
            self.arrived(arriving, true);
        }
    }

    /// Ends the connection with the last word that the transport has for this.
    fn terminate<T>(&mut self, violation: &HostViolation, pdu: &[u8]) -> Result<T, ProtocolError> {
        self.end();
        // A host's own last word is not answered, however wrong it is (TCP Transport 1.0 §3.5.1).
        if pdu.first() != Some(&PduType::H2C_TERM_REQ.0) {
            self.transport.termination(violation, pdu);
        }
        Err(violation.error)
    }

    fn initialize(&mut self, unread: &[u8]) -> Result<Option<usize>, ProtocolError> {
        let Ok((common, _)) = CommonHeader::read_from_prefix(unread) else { return Ok(None) };
        let pdu = unread.get(..IC_LEN.min(unread.len())).unwrap_or_default();
        let field = HostViolation::field;
        // Whoever begins with something else hears of it at once: there may be no more to come.
        let wrong = if PduType(common.pdu_type) != PduType::IC_REQ {
            let what = "sent something else than ICReq first";
            Some(HostViolation::new(FatalError::PDU_SEQUENCE_ERROR, 0, what))
        } else if usize::from(common.hlen) != IC_LEN {
            Some(field(offset_of!(CommonHeader, hlen), "sent an ICReq with a header of a wrong length"))
        } else if common.plen.get() as usize != IC_LEN {
            Some(field(offset_of!(CommonHeader, plen), "sent an ICReq of a wrong length"))
        } else {
            None
        };
        if let Some(violation) = wrong {
            return self.terminate(&violation, pdu);
        }
        let Ok((request, _)) = IcReq::read_from_prefix(unread) else {
            self.transport.awaiting = AwaitedNvmePdu::IcReq(IC_LEN);
            return Ok(None);
        };
        let wrong = if request.pfv.get() != 0 {
            let offset = offset_of!(IcReq, pfv) as u32;
            let what = "asked for another format of PDUs than there is";
            Some(HostViolation::new(FatalError::UNSUPPORTED_PARAMETER, offset, what))
        } else if request.hpda > PDA_MAX {
            Some(field(offset_of!(IcReq, hpda), "asked for data aligned to more than 128 bytes"))
        } else {
            None
        };
        if let Some(violation) = wrong {
            return self.terminate(&violation, pdu);
        }
        self.transport.ic_resp(&request);
        self.transport.awaiting = AwaitedNvmePdu::Head(COMMON_HEADER_LEN);
        Ok(Some(IC_LEN))
    }

    /// The begin of a PDU is here: a capsule is taken whole, of data the header alone.
    #[inline]
    fn on_pdu(&mut self, input: &Chunk, at: usize, unread: &[u8]) -> Result<Option<usize>, ProtocolError> {
        if !self.listens() {
            return Ok(None);
        }
        let Ok((common, _)) = CommonHeader::read_from_prefix(unread) else { return Ok(None) };
        let digests = self.transport.digests;
        let frame = match pdu::check(&common, digests, self.transport.in_capsule) {
            Ok(frame) => frame,
            Err(violation) => {
                let head = usize::from(common.hlen).max(COMMON_HEADER_LEN);
                let begin = unread.get(..unread.len().min(head)).unwrap_or_default();
                return self.terminate(&violation, begin);
            }
        };
        let needs = if frame.kind == PduType::H2C_DATA { frame.data.0 } else { frame.len };
        let Some(pdu) = unread.get(..needs) else {
            self.transport.awaiting = AwaitedNvmePdu::Head(needs);
            return Ok(None);
        };
        if digests.header
            && frame.kind != PduType::H2C_TERM_REQ
            && let Err(violation) = pdu::check_header_digest(pdu, usize::from(common.hlen))
        {
            return self.terminate(&violation, pdu);
        }
        match frame.kind {
            PduType::CAPSULE_CMD => {
                let (begin, end) = frame.data;
                let covered = pdu.get(begin..end).unwrap_or_default();
                let is_good =
                    covered.is_empty() || !digests.data || pdu.get(end..) == Some(&digest::of(covered));
                let Ok((capsule, _)) = CapsuleCmd::read_from_prefix(pdu) else { return Ok(None) };
                let lend = || input.lend(at.saturating_add(begin), covered.len());
                self.on_command(&capsule.sqe, covered.len(), lend, is_good)?;
                self.transport.awaiting = AwaitedNvmePdu::Head(COMMON_HEADER_LEN);
            }
            PduType::H2C_DATA => {
                let Ok((data, _)) = Data::read_from_prefix(pdu) else { return Ok(None) };
                let data_len = frame.len.saturating_sub(frame.data.0).saturating_sub(digests.data_len());
                if let Err(violation) = self.on_data_head(&data, data_len) {
                    return self.terminate(&violation, pdu.get(..DATA_LEN).unwrap_or_default());
                }
            }
            _ => return self.on_termination(pdu),
        }
        Ok(Some(needs))
    }

    fn on_termination(&mut self, pdu: &[u8]) -> Result<Option<usize>, ProtocolError> {
        self.end();
        let fes = TermReq::read_from_prefix(pdu).map_or(0, |(request, _)| request.fes.get());
        let what = match FatalError(fes) {
            FatalError::INVALID_PDU_HEADER_FIELD => "ended the connection: a field of ours is wrong",
            FatalError::PDU_SEQUENCE_ERROR => "ended the connection: a PDU of ours was out of place",
            FatalError::HEADER_DIGEST_ERROR => "ended the connection: a header digest of ours is wrong",
            FatalError::DATA_TRANSFER_OUT_OF_RANGE => "ended the connection: data of ours is out of range",
            FatalError::DATA_TRANSFER_LIMIT_EXCEEDED => "ended the connection: more R2Ts than it takes",
            FatalError::UNSUPPORTED_PARAMETER => "ended the connection: a value of ours is not supported",
            _ => "ended the connection for a reason of its own",
        };
        Err(ProtocolError { what, reference: "TCP Transport 1.0 §3.6.2.4" })
    }

    /// Checks the header of a command's data, and says where the data goes.
    fn on_data_head(&mut self, data: &Data, data_len: usize) -> Result<(), HostViolation> {
        let slot = usize::from(data.ttag.get());
        let Some(entry) = self.fetching(slot) else {
            return Err(HostViolation::field(offset_of!(Data, ttag), "sent data that was not asked for"));
        };
        if entry.sqe.cid != data.cccid {
            return Err(HostViolation::field(offset_of!(Data, cccid), "sent data of another command"));
        }
        if data.datal.get() as usize != data_len {
            return Err(HostViolation::field(
                offset_of!(Data, datal),
                "sent data of another length than it said",
            ));
        }
        let (offset, left) =
            (data.datao.get() as usize, entry.data_out.saturating_sub(entry.progress.received));
        let is_last = data.common.flags & FLAG_LAST != 0;
        if offset != entry.progress.received || data_len > left {
            let what = "sent data outside of what was asked for";
            // FEI is for fields and digests: here it is reserved (TCP Transport 1.0 §3.6.2.4).
            return Err(HostViolation::new(FatalError::DATA_TRANSFER_OUT_OF_RANGE, 0, what));
        }
        if is_last != (data_len == left) {
            let what = "sent data whose last PDU is not the last";
            return Err(HostViolation::field(offset_of!(CommonHeader, flags), what));
        }
        let arriving = ArrivingH2cData { slot, len: data_len };
        let is_short = data_len <= MAX_BORROWED_PAYLOAD;
        if is_short {
            self.transport.awaiting = AwaitedNvmePdu::Data(arriving);
        } else {
            self.place(arriving);
        }
        Ok(())
    }

    /// Has data received straight into its command's memory: so much was asked for only when that
    /// was there.
    fn place(&mut self, arriving: ArrivingH2cData) {
        let Some(entry) = self.fetching(arriving.slot) else { return };
        if let Some(memory) = &entry.memory {
            self.transport.awaiting =
                AwaitedNvmePdu::Place(arriving, memory.slice(entry.progress.received, arriving.len));
        }
    }

    /// Data lies in the receive buffer. If it is all that the command has, it stays there.
    fn on_borrowed(&mut self, arriving: ArrivingH2cData, lent: Seg, is_good: bool) {
        let Some(entry) = self.fetching(arriving.slot) else { return };
        if entry.memory.is_none() && entry.data_out == arriving.len {
            entry.memory = Some(lent);
            return self.arrived(arriving, is_good);
        }
        let received = entry.progress.received;
        match self.memory_for(arriving.slot) {
            Some(memory) => {
                lent.copy_to_seg(&memory.slice(received, arriving.len));
                self.arrived(arriving, is_good);
            }
            // The pieces of short data are short: whoever has no memory for them tries again.
            None => {
                if let Some(entry) = self.fetching(arriving.slot) {
                    entry.progress.is_damaged = true;
                }
                self.arrived(arriving, is_good);
            }
        }
    }

    /// Data is where it belongs.
    fn arrived(&mut self, arriving: ArrivingH2cData, is_good: bool) {
        let Some(entry) = self.fetching(arriving.slot) else { return };
        entry.progress.is_damaged |= !is_good;
        entry.progress.received = entry.progress.received.saturating_add(arriving.len);
        if entry.progress.received < entry.data_out {
            return;
        }
        if entry.progress.is_damaged {
            // TCP Transport 1.0 §3.5.2: not fatal, and worth another try.
            return self.on_data_lost(arriving.slot);
        }
        self.on_data(arriving.slot);
    }
}
