//! Messages of in-band authentication (DH-HMAC-CHAP), which Authentication Send and Receive carry
//! (Base 2.0 §8.13).

use crate::layout::layout;
use crate::nvme::Sqe;
use crate::open_enum::open_enum;
use zerocopy::{LittleEndian as LE, U16, U32};

layout! {
    /// AUTH_Negotiate; [`Protocol`]s follow.
    pub struct Negotiate(8) {
        /// [`MessageType::COMMON`] and [`MessageId::NEGOTIATE`].
        pub head: Head,
        /// SC_C: secure channel concatenation; 0 for none.
        pub sc_c: u8,
        /// NAPD: number of protocol descriptors that follow.
        pub napd: u8,
    }
}

/// SC_C: no secure channel concatenation.
pub const SC_C_NONE: u8 = 0;
/// SC_C: generate a TLS PSK on a connection without TLS.
pub const SC_C_NEW_TLS_PSK: u8 = 2;
/// SC_C: generate a TLS PSK that replaces the one of this connection.
pub const SC_C_REPLACE_TLS_PSK: u8 = 3;

layout! {
    /// The header of every message.
    pub struct Head(6) {
        /// AUTH_TYPE: [`MessageType`].
        pub auth_type: u8,
        /// AUTH_ID: [`MessageId`].
        pub auth_id: u8,
        pub reserved: [u8; 2] = 0,
        /// T_ID: transaction identifier, chosen by the host.
        pub t_id: U16<LE>,
    }

    /// The protocol descriptor of DH-HMAC-CHAP in [`Negotiate`].
    pub struct Protocol(64) {
        /// AuthID: [`AUTH_ID_DH_HMAC_CHAP`].
        pub auth_id: u8,
        pub reserved: u8 = 0,
        /// HALEN: number of hash functions.
        pub halen: u8,
        /// DHLEN: number of groups.
        pub dhlen: u8,
        /// [`HashId`]s.
        pub hash_ids: [u8; 30],
        /// [`DhGroupId`]s.
        pub dh_group_ids: [u8; 30],
    }

    /// DH-HMAC-CHAP_Challenge; the challenge and the controller's exponential follow.
    pub struct Challenge(16) {
        /// [`MessageType::DH_HMAC_CHAP`] and [`MessageId::CHALLENGE`].
        pub head: Head,
        /// HL: length of a hash, in bytes.
        pub hl: u8,
        pub reserved: u8 = 0,
        /// [`HashId`].
        pub hash_id: u8,
        /// [`DhGroupId`].
        pub dh_group_id: u8,
        /// DHVLEN: length of the exponential, in bytes.
        pub dhvlen: U16<LE>,
        /// SEQNUM: S1.
        pub seqnum: U32<LE>,
    }

    /// DH-HMAC-CHAP_Reply; the response, the host's challenge and its exponential follow.
    pub struct Reply(16) {
        /// [`MessageType::DH_HMAC_CHAP`] and [`MessageId::REPLY`].
        pub head: Head,
        /// HL: length of a hash, in bytes.
        pub hl: u8,
        pub reserved: u8 = 0,
        /// CVALID: 1 if the controller has to authenticate.
        pub cvalid: u8,
        pub reserved_9: u8 = 0,
        /// DHVLEN: length of the exponential, in bytes.
        pub dhvlen: U16<LE>,
        /// SEQNUM: S2.
        pub seqnum: U32<LE>,
    }

    /// DH-HMAC-CHAP_Success1; the controller's response follows.
    pub struct Success1(16) {
        /// [`MessageType::DH_HMAC_CHAP`] and [`MessageId::SUCCESS1`].
        pub head: Head,
        /// HL: length of a hash, in bytes.
        pub hl: u8,
        pub reserved: u8 = 0,
        /// RVALID: 1 if there is a response.
        pub rvalid: u8,
        pub reserved_9: [u8; 7] = 0,
    }

    /// AUTH_Failure1 of the controller and AUTH_Failure2 of the host.
    pub struct Failure(8) {
        /// [`MessageType::COMMON`] and [`MessageId::FAILURE1`] or [`MessageId::FAILURE2`].
        pub head: Head,
        /// [`REASON_AUTHENTICATION_FAILURE`].
        pub reason: u8,
        /// [`Explanation`].
        pub explanation: u8,
    }
}

open_enum! {
    /// AUTH_TYPE.
    pub enum MessageType(u8) {
        /// Messages common to all protocols.
        COMMON = 0x00,
        /// Messages of DH-HMAC-CHAP.
        DH_HMAC_CHAP = 0x01,
    }

    /// AUTH_ID.
    pub enum MessageId(u8) {
        /// [`Negotiate`].
        NEGOTIATE = 0x00,
        /// [`Challenge`].
        CHALLENGE = 0x01,
        /// [`Reply`].
        REPLY = 0x02,
        /// [`Success1`].
        SUCCESS1 = 0x03,
        /// DH-HMAC-CHAP_Success2: a [`Head`] and ten bytes.
        SUCCESS2 = 0x04,
        /// [`Failure`] of the host.
        FAILURE2 = 0xf0,
        /// [`Failure`] of the controller.
        FAILURE1 = 0xf1,
    }

    /// Hash functions.
    pub enum HashId(u8) {
        /// SHA-256.
        SHA_256 = 1,
        /// SHA-384.
        SHA_384 = 2,
        /// SHA-512.
        SHA_512 = 3,
    }

    /// Groups of the Diffie-Hellman exchange (RFC 7919).
    pub enum DhGroupId(u8) {
        /// The null group: no exchange.
        NULL = 0,
        /// 2,048 bits.
        FFDHE2048 = 1,
        /// 3,072 bits.
        FFDHE3072 = 2,
        /// 4,096 bits.
        FFDHE4096 = 3,
        /// 6,144 bits.
        FFDHE6144 = 4,
        /// 8,192 bits.
        FFDHE8192 = 5,
    }

    /// Explanation of an authentication failure.
    pub enum Explanation(u8) {
        /// The response is wrong.
        AUTHENTICATION_FAILED = 0x01,
        /// No protocol in common.
        PROTOCOL_NOT_USABLE = 0x02,
        /// The requested secure channel concatenation is not supported.
        SECURE_CHANNEL_CONCATENATION_MISMATCH = 0x03,
        /// No hash function in common.
        HASH_NOT_USABLE = 0x04,
        /// No group in common.
        DH_GROUP_NOT_USABLE = 0x05,
        /// A field of a message is invalid.
        INCORRECT_PAYLOAD = 0x06,
        /// The message is out of order.
        INCORRECT_MESSAGE = 0x07,
    }
}

/// The security protocol of Authentication Send and Receive: SECP, SPSP1 and SPSP0 in CDW10.
#[inline]
#[must_use]
pub const fn security_protocol(sqe: &Sqe) -> u32 {
    sqe.cdw10.get() >> 8
}

/// TL of Authentication Send and AL of Authentication Receive: the message's length, in bytes.
#[inline]
#[must_use]
pub const fn message_len(sqe: &Sqe) -> u32 {
    sqe.cdw11.get()
}

/// Security protocol of these messages: SECP E9h, SPSP1 and SPSP0 01h.
pub const SECURITY_PROTOCOL_NVME: u32 = 0xe9_0101;
/// AuthID of DH-HMAC-CHAP.
pub const AUTH_ID_DH_HMAC_CHAP: u8 = 1;
/// The only reason code of [`Failure`].
pub const REASON_AUTHENTICATION_FAILURE: u8 = 1;
