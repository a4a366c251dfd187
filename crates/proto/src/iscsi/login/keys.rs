//! The table of operational keys with their negotiation rules (RFC 7143 §13, RFC 7144 §7, RFC 7145
//! §6).

use super::operational::{DEFAULT_DATA_SEGMENT_LENGTH, OperationalKey};
use crate::iscsi::text::NONE;
use blockmux_wire::iscsi::U24;

/// Rule that combines the values of both sides (RFC 7143, section 6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyRule {
    /// Yes if either side says Yes.
    Or,
    /// Yes if both sides say Yes.
    And,
    /// The smaller number, within these bounds.
    Minimum(u32, u32),
    /// The larger number, within these bounds.
    Maximum(u32, u32),
    /// Each side declares a number of its own, within these bounds.
    Declared(u32, u32),
    /// The initiator declares Yes or No; there is no answer.
    DeclaredBool,
    /// Limit for the other side, without an answer: 0 for no limit, or at least 2.
    Limit,
    /// The first value of the proposer's list that the responder accepts; values are indexes of
    /// this list.
    FirstOf(&'static [&'static str]),
}

/// An entry of [`KEYS`].
pub(super) struct KeyDefinition {
    pub(super) key: OperationalKey,
    pub(super) name: &'static str,
    pub(super) rule: KeyRule,
    /// Value without negotiation.
    pub(super) default: u32,
    /// Whether the key is irrelevant in discovery sessions.
    pub(super) normal_only: bool,
    /// Whether the key exists only in iSER.
    pub(super) iser_only: bool,
}

pub(super) fn bit(key: OperationalKey) -> u32 {
    1_u32.wrapping_shl(key as u32)
}

impl OperationalKey {
    /// The key as written in text.
    #[must_use]
    pub fn name(self) -> &'static str {
        KEYS.get(self as usize).map_or("", |row| row.name)
    }
}

/// Keys that are negotiated for each connection.
pub(super) const PER_CONNECTION: [OperationalKey; 3] =
    [OperationalKey::HeaderDigest, OperationalKey::DataDigest, OperationalKey::MaxRecvDataSegmentLength];

pub(super) const KEY_COUNT: usize = OperationalKey::MaxOutstandingUnexpectedPDUs as usize + 1;

/// Ordered by strength: a higher index includes the lower ones.
const DIGESTS: &[&str] = &[NONE, "CRC32C"];

/// RFC 7143 §13.23.
const REPORTINGS: &[&str] = &["RFC3720", "ResponseFence", "FastAbort"];

/// All operational keys, in the order of [`OperationalKey`].
pub(super) const KEYS: &[KeyDefinition] = &[
    row(OperationalKey::HeaderDigest, "HeaderDigest", KeyRule::FirstOf(DIGESTS), 0, false),
    row(OperationalKey::DataDigest, "DataDigest", KeyRule::FirstOf(DIGESTS), 0, false),
    row(OperationalKey::MaxConnections, "MaxConnections", KeyRule::Minimum(1, 65_535), 1, true),
    row(OperationalKey::InitialR2T, "InitialR2T", KeyRule::Or, 1, true),
    row(OperationalKey::ImmediateData, "ImmediateData", KeyRule::And, 1, true),
    row(
        OperationalKey::MaxRecvDataSegmentLength,
        "MaxRecvDataSegmentLength",
        KeyRule::Declared(512, U24::MAX),
        DEFAULT_DATA_SEGMENT_LENGTH,
        false,
    ),
    row(OperationalKey::MaxBurstLength, "MaxBurstLength", KeyRule::Minimum(512, U24::MAX), 262_144, true),
    row(OperationalKey::FirstBurstLength, "FirstBurstLength", KeyRule::Minimum(512, U24::MAX), 65_536, true),
    row(OperationalKey::DefaultTime2Wait, "DefaultTime2Wait", KeyRule::Maximum(0, 3600), 2, false),
    row(OperationalKey::DefaultTime2Retain, "DefaultTime2Retain", KeyRule::Minimum(0, 3600), 20, false),
    row(OperationalKey::MaxOutstandingR2T, "MaxOutstandingR2T", KeyRule::Minimum(1, 65_535), 1, true),
    row(OperationalKey::DataPDUInOrder, "DataPDUInOrder", KeyRule::Or, 1, true),
    row(OperationalKey::DataSequenceInOrder, "DataSequenceInOrder", KeyRule::Or, 1, true),
    row(OperationalKey::ErrorRecoveryLevel, "ErrorRecoveryLevel", KeyRule::Minimum(0, 2), 0, false),
    row(OperationalKey::TaskReporting, "TaskReporting", KeyRule::FirstOf(REPORTINGS), 0, true),
    row(OperationalKey::iSCSIProtocolLevel, "iSCSIProtocolLevel", KeyRule::Minimum(0, 31), 1, true),
    iser_row(OperationalKey::RDMAExtensions, "RDMAExtensions", KeyRule::And, 0),
    iser_row(
        OperationalKey::InitiatorRecvDataSegmentLength,
        "InitiatorRecvDataSegmentLength",
        RECEIVED,
        8192,
    ),
    iser_row(OperationalKey::TargetRecvDataSegmentLength, "TargetRecvDataSegmentLength", RECEIVED, 8192),
    // RFC 7145 has another default, but Linux assumes this one without negotiation.
    iser_row(
        OperationalKey::TaggedBufferForSolicitedDataOnly,
        "TaggedBufferForSolicitedDataOnly",
        KeyRule::DeclaredBool,
        1,
    ),
    iser_row(OperationalKey::iSERHelloRequired, "iSERHelloRequired", KeyRule::DeclaredBool, 0),
    iser_row(OperationalKey::MaxOutstandingUnexpectedPDUs, "MaxOutstandingUnexpectedPDUs", KeyRule::Limit, 0),
];
const _: () = assert!(KEYS.len() == KEY_COUNT);

const fn row(
    key: OperationalKey,
    name: &'static str,
    rule: KeyRule,
    default: u32,
    normal_only: bool,
) -> KeyDefinition {
    KeyDefinition { key, name, rule, default, normal_only, iser_only: false }
}

const fn iser_row(key: OperationalKey, name: &'static str, rule: KeyRule, default: u32) -> KeyDefinition {
    KeyDefinition { key, name, rule, default, normal_only: false, iser_only: true }
}

/// Contents of an RDMA message besides headers.
const RECEIVED: KeyRule = KeyRule::Minimum(512, U24::MAX);
