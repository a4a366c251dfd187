//! The table of operational keys: their names, and what two values of one make together (RFC 7143
//! §13, RFC 7144 §7, RFC 7145 §6).

use super::operational::{DEFAULT_DATA_SEGMENT_LENGTH, OperationalKey};
use crate::iscsi::text::NONE;
use blockmux_wire::iscsi::U24;

/// What both sides' values make together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// Yes if either says so.
    Or,
    /// Yes if both say so.
    And,
    /// The lesser number, within bounds.
    Minimum(u32, u32),
    /// The greater number, within bounds.
    Maximum(u32, u32),
    /// Each side's own number, within bounds.
    Declared(u32, u32),
    /// Yes or No as the initiator says, without an answer.
    Told,
    /// How many the other side may have: 0, which is no limit, or 2 and more. Without an answer.
    Limit,
    /// The first of the proposer's list that the responder takes; values are places in this one.
    FirstOf(&'static [&'static str]),
}

/// A row of [`KEYS`].
pub(super) struct Row {
    pub(super) key: OperationalKey,
    pub(super) name: &'static str,
    pub(super) rule: Rule,
    /// What holds when nobody proposes the key.
    pub(super) default: u32,
    /// Whether it means nothing in a discovery session.
    pub(super) normal_only: bool,
    /// Whether only iSER knows it.
    pub(super) iser_only: bool,
}

pub(super) fn bit(key: OperationalKey) -> u32 {
    1_u32.wrapping_shl(key as u32)
}

impl OperationalKey {
    /// As it is written in a login's text.
    #[must_use]
    pub fn name(self) -> &'static str {
        KEYS.get(self as usize).map_or("", |row| row.name)
    }
}

/// Keys that each connection of a session has for itself.
pub(super) const OF_CONNECTIONS: [OperationalKey; 3] =
    [OperationalKey::HeaderDigest, OperationalKey::DataDigest, OperationalKey::MaxRecvDataSegmentLength];

pub(super) const KEY_COUNT: usize = OperationalKey::MaxOutstandingUnexpectedPDUs as usize + 1;

/// Ordered so that a greater place includes the lesser ones.
const DIGESTS: &[&str] = &[NONE, "CRC32C"];

/// RFC 7143 §13.23.
const REPORTINGS: &[&str] = &["RFC3720", "ResponseFence", "FastAbort"];

/// Every operational key, in the order of [`Key`].
pub(super) const KEYS: &[Row] = &[
    row(OperationalKey::HeaderDigest, "HeaderDigest", Rule::FirstOf(DIGESTS), 0, false),
    row(OperationalKey::DataDigest, "DataDigest", Rule::FirstOf(DIGESTS), 0, false),
    row(OperationalKey::MaxConnections, "MaxConnections", Rule::Minimum(1, 65_535), 1, true),
    row(OperationalKey::InitialR2T, "InitialR2T", Rule::Or, 1, true),
    row(OperationalKey::ImmediateData, "ImmediateData", Rule::And, 1, true),
    row(
        OperationalKey::MaxRecvDataSegmentLength,
        "MaxRecvDataSegmentLength",
        Rule::Declared(512, U24::MAX),
        DEFAULT_DATA_SEGMENT_LENGTH,
        false,
    ),
    row(OperationalKey::MaxBurstLength, "MaxBurstLength", Rule::Minimum(512, U24::MAX), 262_144, true),
    row(OperationalKey::FirstBurstLength, "FirstBurstLength", Rule::Minimum(512, U24::MAX), 65_536, true),
    row(OperationalKey::DefaultTime2Wait, "DefaultTime2Wait", Rule::Maximum(0, 3600), 2, false),
    row(OperationalKey::DefaultTime2Retain, "DefaultTime2Retain", Rule::Minimum(0, 3600), 20, false),
    row(OperationalKey::MaxOutstandingR2T, "MaxOutstandingR2T", Rule::Minimum(1, 65_535), 1, true),
    row(OperationalKey::DataPDUInOrder, "DataPDUInOrder", Rule::Or, 1, true),
    row(OperationalKey::DataSequenceInOrder, "DataSequenceInOrder", Rule::Or, 1, true),
    row(OperationalKey::ErrorRecoveryLevel, "ErrorRecoveryLevel", Rule::Minimum(0, 2), 0, false),
    row(OperationalKey::TaskReporting, "TaskReporting", Rule::FirstOf(REPORTINGS), 0, true),
    row(OperationalKey::iSCSIProtocolLevel, "iSCSIProtocolLevel", Rule::Minimum(0, 31), 1, true),
    iser_row(OperationalKey::RDMAExtensions, "RDMAExtensions", Rule::And, 0),
    iser_row(
        OperationalKey::InitiatorRecvDataSegmentLength,
        "InitiatorRecvDataSegmentLength",
        RECEIVED,
        8192,
    ),
    iser_row(OperationalKey::TargetRecvDataSegmentLength, "TargetRecvDataSegmentLength", RECEIVED, 8192),
    // Linux does so without a word, whatever RFC 7145 has as the default.
    iser_row(
        OperationalKey::TaggedBufferForSolicitedDataOnly,
        "TaggedBufferForSolicitedDataOnly",
        Rule::Told,
        1,
    ),
    iser_row(OperationalKey::iSERHelloRequired, "iSERHelloRequired", Rule::Told, 0),
    iser_row(OperationalKey::MaxOutstandingUnexpectedPDUs, "MaxOutstandingUnexpectedPDUs", Rule::Limit, 0),
];
const _: () = assert!(KEYS.len() == KEY_COUNT);

const fn row(key: OperationalKey, name: &'static str, rule: Rule, default: u32, normal_only: bool) -> Row {
    Row { key, name, rule, default, normal_only, iser_only: false }
}

const fn iser_row(key: OperationalKey, name: &'static str, rule: Rule, default: u32) -> Row {
    Row { key, name, rule, default, normal_only: false, iser_only: true }
}

/// What a message over RDMA may hold besides headers.
const RECEIVED: Rule = Rule::Minimum(512, U24::MAX);
