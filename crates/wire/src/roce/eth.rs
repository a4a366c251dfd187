//! Extended transport headers (volume 1, §9.3 and §9.7.5).

use crate::layout::layout;
use crate::open_enum::open_enum;
use crate::roce::bth::U24;
use zerocopy::{BigEndian as BE, U32, U64};

layout! {
    /// RDMA extended transport header, of RDMA Writes and RDMA Read requests.
    pub struct Reth(RETH_LEN) {
        /// Virtual address in the receiver's memory.
        pub virtual_address: U64<BE>,
        /// R_Key of that memory.
        pub r_key: U32<BE>,
        /// Length of the whole message in bytes.
        pub dma_length: U32<BE>,
    }

    /// ACK extended transport header, of acknowledgements and of RDMA Read responses.
    pub struct Aeth(AETH_LEN) {
        /// [`Syndrome`] as a byte.
        pub syndrome: u8,
        /// Message sequence number: how many messages the responder has completed.
        pub msn: U24,
    }
}

/// What an acknowledgement says: the byte of [`Aeth::syndrome`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syndrome {
    /// Positive, with the code of the receive buffers that are left ([`CREDITS_UNLIMITED`]).
    Ack(u8),
    /// The receiver was not ready: the code of the time to wait ([`rnr_timer_us`]).
    ReceiverNotReady(u8),
    /// Negative.
    Nak(NakCode),
    /// A reserved value.
    Reserved(u8),
}

impl From<u8> for Syndrome {
    #[inline]
    fn from(byte: u8) -> Syndrome {
        let value = byte & 0x1f;
        match byte >> 5 {
            0 => Syndrome::Ack(value),
            1 => Syndrome::ReceiverNotReady(value),
            3 => Syndrome::Nak(NakCode(value)),
            _ => Syndrome::Reserved(byte),
        }
    }
}

impl From<Syndrome> for u8 {
    #[inline]
    fn from(syndrome: Syndrome) -> u8 {
        match syndrome {
            Syndrome::Ack(credits) => credits & 0x1f,
            Syndrome::ReceiverNotReady(timer) => 0x20 | (timer & 0x1f),
            Syndrome::Nak(NakCode(code)) => 0x60 | (code & 0x1f),
            Syndrome::Reserved(byte) => byte,
        }
    }
}

open_enum! {
    /// Reasons of a negative acknowledgement.
    pub enum NakCode(u8) {
        /// A packet is missing before this one.
        PSN_SEQUENCE_ERROR = 0,
        /// The request breaks the protocol.
        INVALID_REQUEST = 1,
        /// The requester has no right to that memory.
        REMOTE_ACCESS_ERROR = 2,
        /// The responder cannot complete the request.
        REMOTE_OPERATIONAL_ERROR = 3,
        /// Of reliable datagrams only.
        INVALID_RD_REQUEST = 4,
    }
}

layout! {
    /// Datagram extended transport header.
    pub struct Deth(DETH_LEN) {
        /// Q_Key of the receiver's queue pair; [`Q_KEY_GSI`] for connection management.
        pub q_key: U32<BE>,
        pub reserved: u8 = 0,
        /// Number of the sender's queue pair.
        pub source_qp: U24,
    }
}

/// The time in microseconds that a code of [`Syndrome::ReceiverNotReady`] stands for (table 45).
#[inline]
#[must_use]
pub fn rnr_timer_us(code: u8) -> u32 {
    RNR_TIMERS_US.get(usize::from(code & 0x1f)).copied().unwrap_or_default()
}

/// The time that a code of five bits stands for in timeouts of acknowledgements and of connection
/// management: 4.096 microseconds times two to the power of the code. The result is in nanoseconds;
/// code 0 is no timeout.
#[inline]
#[must_use]
pub const fn timeout_ns(code: u8) -> u64 {
    4096 << (code & 0x1f)
}

const RNR_TIMERS_US: [u32; 32] = [
    655_360, 10, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960, 1280, 1920, 2560, 3840, 5120, 7680,
    10_240, 15_360, 20_480, 30_720, 40_960, 61_440, 81_920, 122_880, 163_840, 245_760, 327_680, 491_520,
];

/// The code of [`Syndrome::Ack`] by which a responder does not limit the requester's messages.
pub const CREDITS_UNLIMITED: u8 = 0x1f;
/// Q_Key of connection management.
pub const Q_KEY_GSI: u32 = 0x8001_0000;

/// Length of a RETH, in bytes.
pub const RETH_LEN: usize = 16;
/// Length of an AETH, in bytes.
pub const AETH_LEN: usize = 4;
/// Length of a DETH, in bytes.
pub const DETH_LEN: usize = 8;
/// Length of immediate data, and of an IETH, in bytes.
pub const IMMEDIATE_LEN: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromBytes;

    #[test]
    fn every_syndrome_is_read_and_written() {
        for byte in 0..=u8::MAX {
            assert_eq!(u8::from(Syndrome::from(byte)), byte);
        }
        assert_eq!(Syndrome::from(0x1f), Syndrome::Ack(CREDITS_UNLIMITED));
        assert_eq!(Syndrome::from(0x60), Syndrome::Nak(NakCode::PSN_SEQUENCE_ERROR));
        assert_eq!(Syndrome::from(0x62), Syndrome::Nak(NakCode::REMOTE_ACCESS_ERROR));
        assert_eq!(Syndrome::from(0x2e), Syndrome::ReceiverNotReady(14));
        assert_eq!(Syndrome::from(0x40), Syndrome::Reserved(0x40));
    }

    #[test]
    fn codes_stand_for_times() {
        assert_eq!([0, 1, 14, 31].map(rnr_timer_us), [655_360, 10, 1280, 491_520]);
        assert_eq!([1, 14, 20].map(timeout_ns), [8192, 67_108_864, 4_294_967_296]);
        assert!((2..32).all(|code| rnr_timer_us(code) > rnr_timer_us(code - 1)));
    }

    /// A read request that rxe of Linux 6.12 sent for NVMe.
    #[test]
    fn a_read_request_is_as_the_kernel_sent_it() {
        let bytes = [0xff, 0xff, 0x88, 0x80, 0x04, 0xda, 0xe4, 0, 0, 0, 0x03, 0xeb, 0, 0, 0x04, 0];
        let reth = Reth::ref_from_bytes(&bytes).unwrap();
        assert_eq!((reth.virtual_address.get(), reth.r_key.get()), (0xffff_8880_04da_e400, 0x3eb));
        assert_eq!(reth.dma_length.get(), 1024);
    }
}
