//! Receives PDUs from the host; `mod.rs` has a state diagram.

use super::NvmeTcpTargetSession;
use super::link::{ArrivingH2cData, AwaitedNvmePdu, MAX_BORROWED_PAYLOAD};
use crate::digest;
use crate::driver::session::{Demand, ProtocolError};
use crate::nvme_tcp::pdu::{self, HostViolation};
use blockmux_volume::{Chunk, Crc32c, Seg};
use blockmux_wire::nvmeof::tcp::*;
use std::mem::offset_of;
use zerocopy::FromBytes;

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

    /// Whether the next PDU may be handled. A host that respects its queue size always has an entry
    /// for its command.
    #[inline]
    fn listens(&self) -> bool {
        self.takes_commands() && self.transport.is_read()
    }

    /// Handles one PDU or part of its data; returns the consumed bytes, or `None` if more bytes are
    /// needed or the host has to read first.
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
                self.on_borrowed(arriving, input.slice(at, arriving.len), is_good);
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

    /// Handles the end of placed data ([`Demand::Place`]).
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

    /// Ends the connection with a C2HTermReq for this violation.
    fn terminate<T>(&mut self, violation: &HostViolation, pdu: &[u8]) -> Result<T, ProtocolError> {
        self.end();
        // A H2CTermReq is not answered, even a malformed one (TCP Transport 1.0 §3.5.1).
        if pdu.first() != Some(&PduType::H2C_TERM_REQ.0) {
            self.transport.termination(violation, pdu);
        }
        Err(violation.error)
    }

    fn initialize(&mut self, unread: &[u8]) -> Result<Option<usize>, ProtocolError> {
        let Ok((common, _)) = CommonHeader::read_from_prefix(unread) else { return Ok(None) };
        let pdu = unread.get(..IC_LEN.min(unread.len())).unwrap_or_default();
        let field = HostViolation::field;
        // Checked before the whole PDU has arrived: a peer of another protocol may send no more.
        let wrong = if PduType(common.pdu_type) != PduType::IC_REQ {
            let what = "sent another PDU before ICReq";
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
            let what = "asked for an unsupported PDU format version";
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

    /// Handles a whole capsule, or the header of an H2CData.
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
                let borrow = || input.slice(at.saturating_add(begin), covered.len());
                self.on_command(&capsule.sqe, covered.len(), borrow, is_good)?;
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
            FatalError::INVALID_PDU_HEADER_FIELD => "ended the connection: it rejects a PDU header field",
            FatalError::PDU_SEQUENCE_ERROR => "ended the connection: it reports a PDU sequence error",
            FatalError::HEADER_DIGEST_ERROR => "ended the connection: it reports a header digest error",
            FatalError::DATA_TRANSFER_OUT_OF_RANGE => "ended the connection: it reports data out of range",
            FatalError::DATA_TRANSFER_LIMIT_EXCEEDED => "ended the connection: it reports too many R2Ts",
            FatalError::UNSUPPORTED_PARAMETER => "ended the connection: it rejects a parameter",
            _ => "ended the connection with a fatal error",
        };
        Err(ProtocolError { what, reference: "TCP Transport 1.0 §3.6.2.4" })
    }

    /// Checks the header of an H2CData, and determines where its data goes.
    fn on_data_head(&mut self, data: &Data, data_len: usize) -> Result<(), HostViolation> {
        let slot = usize::from(data.ttag.get());
        let Some(entry) = self.fetching(slot) else {
            return Err(HostViolation::field(offset_of!(Data, ttag), "sent data that was not requested"));
        };
        if entry.sqe.cid != data.cccid {
            return Err(HostViolation::field(offset_of!(Data, cccid), "sent data of another command"));
        }
        if data.datal.get() as usize != data_len {
            return Err(HostViolation::field(
                offset_of!(Data, datal),
                "sent data whose DATAL does not match its PDU",
            ));
        }
        let (offset, left) =
            (data.datao.get() as usize, entry.data_out.saturating_sub(entry.transfer.received));
        let is_last = data.common.flags & FLAG_LAST != 0;
        if offset != entry.transfer.received || data_len > left {
            let what = "sent data outside of the requested range";
            // FEI is reserved for this error (TCP Transport 1.0 §3.6.2.4).
            return Err(HostViolation::new(FatalError::DATA_TRANSFER_OUT_OF_RANGE, 0, what));
        }
        if is_last != (data_len == left) {
            let what = "sent data with a wrong LAST_PDU flag";
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

    /// Receives data directly into its command's memory, which was allocated before the R2T.
    fn place(&mut self, arriving: ArrivingH2cData) {
        let Some(entry) = self.fetching(arriving.slot) else { return };
        if let Some(memory) = &entry.memory {
            self.transport.awaiting =
                AwaitedNvmePdu::Place(arriving, memory.slice(entry.transfer.received, arriving.len));
        }
    }

    /// Handles data in the receive buffer. If it is all of the command's data, it is borrowed.
    fn on_borrowed(&mut self, arriving: ArrivingH2cData, borrowed: Seg, is_good: bool) {
        let Some(entry) = self.fetching(arriving.slot) else { return };
        if entry.memory.is_none() && entry.data_out == arriving.len {
            entry.memory = Some(borrowed);
            return self.arrived(arriving, is_good);
        }
        let received = entry.transfer.received;
        match self.memory_for(arriving.slot) {
            Some(memory) => {
                borrowed.copy_to_seg(&memory.slice(received, arriving.len));
                self.arrived(arriving, is_good);
            }
            // Without memory for a piece of short data, the command fails and the host retries.
            None => {
                if let Some(entry) = self.fetching(arriving.slot) {
                    entry.transfer.is_damaged = true;
                }
                self.arrived(arriving, is_good);
            }
        }
    }

    /// Handles the end of an H2CData.
    fn arrived(&mut self, arriving: ArrivingH2cData, is_good: bool) {
        let Some(entry) = self.fetching(arriving.slot) else { return };
        entry.transfer.is_damaged |= !is_good;
        entry.transfer.received = entry.transfer.received.saturating_add(arriving.len);
        if entry.transfer.received < entry.data_out {
            return;
        }
        if entry.transfer.is_damaged {
            // Not fatal (TCP Transport 1.0 §3.5.2): the command fails and may be retried.
            return self.on_data_lost(arriving.slot);
        }
        self.on_data(arriving.slot);
    }
}
