//! Writes packets, from the base transport header to the pad.

use super::psn::Psn;
use blockmux_volume::SgList;
use blockmux_wire::roce::bth::{
    Bth, FLAG_ACK_REQUEST, FLAG_SOLICITED, P_KEY_DEFAULT, U24, pad_flags, pad_len,
};
use blockmux_wire::roce::eth::{Aeth, Syndrome};
use blockmux_wire::roce::opcode::RoceOpcode;
use zerocopy::{IntoBytes, U16};

/// The base transport header of a packet that is sent.
pub(super) struct PacketHead {
    pub(super) opcode: RoceOpcode,
    pub(super) dest_qp: u32,
    pub(super) psn: Psn,
    pub(super) is_solicited: bool,
    pub(super) requests_ack: bool,
    /// Length of the payload in bytes.
    pub(super) payload: usize,
}

impl PacketHead {
    /// A packet that neither is a solicited event nor requests an acknowledgement.
    #[inline]
    pub(super) fn new(opcode: RoceOpcode, dest_qp: u32, psn: Psn, payload: usize) -> PacketHead {
        PacketHead { opcode, dest_qp, psn, is_solicited: false, requests_ack: false, payload }
    }

    /// Appends the header.
    #[inline]
    pub(super) fn put(&self, packet: &mut Vec<u8>) {
        let solicited = if self.is_solicited { FLAG_SOLICITED } else { 0 };
        let bth = Bth {
            opcode: self.opcode.0,
            flags: solicited | pad_flags(self.payload),
            p_key: U16::new(P_KEY_DEFAULT),
            congestion: 0,
            dest_qp: U24::new(self.dest_qp),
            ack_request: if self.requests_ack { FLAG_ACK_REQUEST } else { 0 },
            psn: self.psn.into(),
        };
        packet.extend_from_slice(bth.as_bytes());
    }
}

/// Appends the header of an acknowledgement or a response.
#[inline]
pub(super) fn put_aeth(packet: &mut Vec<u8>, syndrome: Syndrome, msn: u32) {
    let aeth = Aeth { syndrome: syndrome.into(), msn: U24::new(msn) };
    packet.extend_from_slice(aeth.as_bytes());
}

/// Appends `len` bytes at `offset` of a list that has them.
#[inline]
pub(super) fn put_list(packet: &mut Vec<u8>, list: &SgList, offset: usize, len: usize) {
    match list.segs() {
        [seg] => seg.append_to(offset, len, packet),
        _ => list.slice(offset, len).segs().iter().for_each(|seg| seg.append_to(0, seg.len(), packet)),
    }
}

/// Appends the pad behind a payload of `len` bytes.
#[inline]
pub(super) fn put_pad(packet: &mut Vec<u8>, len: usize) {
    let end = packet.len().saturating_add(pad_len(len));
    packet.resize(end, 0);
}
