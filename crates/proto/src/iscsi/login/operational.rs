//! Operational keys and their negotiation (RFC 7143 §13, RFC 7144 §7).
//!
//! `keys` has the table for both roles. One side proposes a key and the other answers; the answer
//! is a function of both values (`KeyRule`). The responder computes it, and the proposer checks
//! that it is possible. `MaxRecvDataSegmentLength` is declared by each side and not answered.
//!
//! Over RDMA some keys differ, see [`OperationalNegotiation::over_rdma`]; over TCP the keys of iSER
//! are unknown.

use super::keys::{KEY_COUNT, KEYS, KeyDefinition, KeyRule, PER_CONNECTION, bit};
use super::rdma::LoginSide;
use crate::iscsi::text::{self, IRRELEVANT, KeyValue, NO, NONE, NOT_UNDERSTOOD, REJECT, TextBuilder, YES};

/// An operational key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperationalKey {
    /// CRC32C header digests.
    HeaderDigest,
    /// CRC32C data digests.
    DataDigest,
    /// Maximum number of connections of a session.
    MaxConnections,
    /// Writes require an R2T before their data.
    InitialR2T,
    /// Commands may carry immediate data.
    ImmediateData,
    /// Maximum data segment length that the declaring side receives, in bytes.
    MaxRecvDataSegmentLength,
    /// Maximum length of a data sequence, in bytes.
    MaxBurstLength,
    /// Maximum unsolicited data of a command, in bytes.
    FirstBurstLength,
    /// Time before a reconnection, in seconds.
    DefaultTime2Wait,
    /// Time that tasks are retained after a connection loss, in seconds.
    DefaultTime2Retain,
    /// Maximum number of outstanding R2Ts of a command.
    MaxOutstandingR2T,
    /// PDUs of a sequence are in order.
    DataPDUInOrder,
    /// Sequences of a command are in order.
    DataSequenceInOrder,
    /// Error recovery level: 0, 1 or 2.
    ErrorRecoveryLevel,
    /// Reporting of aborts of other initiators' tasks.
    TaskReporting,
    /// Protocol version; 2 includes RFC 7144.
    #[expect(non_camel_case_types, reason = "the key's name")]
    iSCSIProtocolLevel,
    /// iSER is in use.
    RDMAExtensions,
    /// Maximum data segment length that the initiator receives over RDMA, in bytes.
    InitiatorRecvDataSegmentLength,
    /// Maximum data segment length that the target receives over RDMA, in bytes.
    TargetRecvDataSegmentLength,
    /// The advertised write buffer begins after the unsolicited data.
    TaggedBufferForSolicitedDataOnly,
    /// The connection begins with Hello messages.
    #[expect(non_camel_case_types, reason = "the key's name")]
    iSERHelloRequired,
    /// Maximum number of outstanding unexpected PDUs of the peer; 0 for no limit.
    MaxOutstandingUnexpectedPDUs,
}

/// A value for each key: Yes is 1, a choice is its index in the list of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperationalParameters {
    values: [u32; KEY_COUNT],
    /// Bit set of keys whose value is mandatory.
    pub(super) required: u32,
    /// MaxRecvDataSegmentLength of the peer, in bytes.
    pub(super) max_send_data_segment_length: u32,
}

/// Value of `HeaderDigest` and `DataDigest` for CRC32C.
pub const CRC32C: u32 = 1;

impl OperationalParameters {
    /// The default values before any negotiation.
    #[must_use]
    pub fn standard() -> OperationalParameters {
        let mut values = [0; KEY_COUNT];
        for (value, row) in values.iter_mut().zip(KEYS) {
            *value = row.default;
        }
        OperationalParameters {
            values,
            required: 0,
            max_send_data_segment_length: DEFAULT_DATA_SEGMENT_LENGTH,
        }
    }

    /// The value of a key; this side's value for `MaxRecvDataSegmentLength`.
    #[inline]
    #[must_use]
    pub fn get(&self, key: OperationalKey) -> u32 {
        self.values.get(key as usize).copied().unwrap_or_default()
    }

    /// Returns the parameters with a changed value.
    #[must_use]
    pub fn with(mut self, key: OperationalKey, value: u32) -> OperationalParameters {
        self.set(key, value);
        self
    }

    /// Makes this side's value of a key mandatory: the login fails with any other. Meant for
    /// digests.
    #[must_use]
    pub fn requiring(mut self, key: OperationalKey) -> OperationalParameters {
        self.required |= bit(key);
        self
    }

    fn is_required(&self, key: OperationalKey) -> bool {
        self.required & bit(key) != 0
    }

    /// Whether a key is Yes, or a digest is enabled.
    #[inline]
    #[must_use]
    pub fn is_on(&self, key: OperationalKey) -> bool {
        self.get(key) == 1
    }

    /// MaxRecvDataSegmentLength of the peer, in bytes.
    #[inline]
    #[must_use]
    pub fn max_send_data_segment_length(&self) -> usize {
        self.max_send_data_segment_length as usize
    }

    pub(super) fn set(&mut self, key: OperationalKey, value: u32) {
        if let Some(place) = self.values.get_mut(key as usize) {
            *place = value;
        }
    }
}

/// A violation of the negotiation rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NegotiationError {
    /// A key was sent twice (RFC 7143 §6.3).
    #[error("a key was negotiated twice")]
    Repeated,
    /// An answer that the rule of the key does not permit.
    #[error("an answer that the proposed value does not allow")]
    ImpossibleAnswer,
    /// A key that may be negotiated only during login.
    #[error("a key that may be negotiated only during login")]
    NotNow,
    /// A declared value out of bounds.
    #[error("a declared value that is out of bounds")]
    BadDeclaration,
    /// A mandatory value was not negotiated.
    #[error("a login without a value that this side requires")]
    Required,
    /// FirstBurstLength exceeds MaxBurstLength (RFC 7143 §13.14).
    #[error("FirstBurstLength above MaxBurstLength")]
    FirstBurstAboveMaxBurst,
    /// A login over RDMA without iSER (RFC 7145 §6).
    #[error("a login over RDMA without iSER")]
    NotIser,
}

/// A negotiation of operational keys, in either role.
#[derive(Clone, Debug)]
pub struct OperationalNegotiation {
    /// This side's values and limits.
    pub(super) own: OperationalParameters,
    pub(super) agreed: OperationalParameters,
    /// Bit set of keys that were answered or declared.
    pub(super) settled: u32,
    /// Bit set of keys that this side proposed and that are unanswered.
    proposed: u32,
    declared: bool,
    pub(super) is_discovery: bool,
    /// The connection is not the leading one: session-wide keys are settled.
    pub(super) joins: bool,
    /// This side's role, over RDMA.
    pub(super) iser: Option<LoginSide>,
}

impl OperationalNegotiation {
    /// A negotiation with this side's values `own`.
    #[must_use]
    pub fn new(own: OperationalParameters) -> OperationalNegotiation {
        let mut agreed = OperationalParameters::standard();
        agreed.set(OperationalKey::MaxRecvDataSegmentLength, DEFAULT_DATA_SEGMENT_LENGTH);
        OperationalNegotiation {
            own,
            agreed,
            settled: 0,
            proposed: 0,
            declared: false,
            is_discovery: false,
            joins: false,
            iser: None,
        }
    }

    /// A negotiation for a further connection of a session with the parameters `session`, whose
    /// session-wide keys are settled (RFC 7143 §13, "Leading Only").
    #[must_use]
    pub fn joining(own: OperationalParameters, session: OperationalParameters) -> OperationalNegotiation {
        let standard = OperationalParameters::standard();
        let mut agreed = session;
        for key in PER_CONNECTION {
            agreed.set(key, standard.get(key));
        }
        agreed.max_send_data_segment_length = DEFAULT_DATA_SEGMENT_LENGTH;
        OperationalNegotiation { agreed, joins: true, ..OperationalNegotiation::new(own) }
    }

    /// Marks the session as a discovery session, in which most keys are irrelevant.
    pub fn set_discovery(&mut self) {
        self.is_discovery = true;
        self.own.set(OperationalKey::ErrorRecoveryLevel, 0);
    }

    /// The values negotiated so far.
    #[must_use]
    pub fn agreed(&self) -> OperationalParameters {
        self.agreed
    }

    /// Whether all proposals were answered.
    #[must_use]
    pub fn is_answered(&self) -> bool {
        self.proposed == 0
    }

    /// Declares this side's `MaxRecvDataSegmentLength`, once.
    pub fn declare(&mut self, out: &mut TextBuilder) {
        if self.iser.is_none() && !std::mem::replace(&mut self.declared, true) {
            let len = self.own.get(OperationalKey::MaxRecvDataSegmentLength);
            self.agreed.set(OperationalKey::MaxRecvDataSegmentLength, len);
            out.push_number(OperationalKey::MaxRecvDataSegmentLength.name(), len);
        }
    }

    /// Proposes all keys: an initiator's first operational request.
    pub fn propose_all(&mut self, out: &mut TextBuilder) {
        self.declare(out);
        for row in KEYS.iter().filter(|row| !matches!(row.rule, KeyRule::Declared(..))) {
            let is_irrelevant = self.is_discovery && row.normal_only || !self.proposes(row);
            if self.settled & bit(row.key) != 0 || is_irrelevant {
                continue;
            }
            self.proposed |= bit(row.key);
            let is_required = self.own.is_required(row.key);
            let own = match row.key {
                // With error recovery, which is proposed as well, the value must be 1.
                OperationalKey::MaxOutstandingR2T if self.own.get(OperationalKey::ErrorRecoveryLevel) > 0 => {
                    1
                }
                key => self.own.get(key),
            };
            out.push(row.name, &proposal(row, own, is_required));
        }
    }

    /// Processes all operational pairs of a text; keys that affect the answers to others are
    /// processed first.
    ///
    /// # Errors
    /// See [`OperationalNegotiation::on_pair`].
    pub fn on_pairs<'a>(
        &mut self,
        pairs: impl Iterator<Item = KeyValue<'a>> + Clone,
        out: &mut TextBuilder,
    ) -> Result<(), NegotiationError> {
        let comes_first = |pair: &KeyValue<'_>| PROCESSED_FIRST.contains(&pair.key);
        let mut in_order = pairs.clone().filter(comes_first).chain(pairs.filter(|pair| !comes_first(pair)));
        in_order.try_for_each(|pair| self.on_pair(pair, out))
    }

    /// Proposes the per-connection keys: the first operational request of a further connection,
    /// which may contain no others (RFC 7143 §13, "Leading Only").
    pub fn propose_connection(&mut self, out: &mut TextBuilder) {
        self.declare(out);
        let is_digest = |row: &&KeyDefinition| {
            matches!(row.key, OperationalKey::HeaderDigest | OperationalKey::DataDigest)
        };
        for row in KEYS.iter().filter(is_digest) {
            self.proposed |= bit(row.key);
            let is_required = self.own.is_required(row.key);
            out.push(row.name, &proposal(row, self.own.get(row.key), is_required));
        }
    }

    /// Processes a pair during login: an answer to a proposal, or a proposal whose answer is
    /// written to `out`. Unknown keys are answered with `NotUnderstood`.
    ///
    /// # Errors
    /// If the peer violates the negotiation rules.
    pub fn on_pair(&mut self, pair: KeyValue<'_>, out: &mut TextBuilder) -> Result<(), NegotiationError> {
        let Some(row) = self.find(pair.key) else {
            self.on_other_key(pair, out);
            return Ok(());
        };
        match row.rule {
            KeyRule::Declared(least, most) => return self.on_declaration(pair.value, least, most),
            KeyRule::DeclaredBool | KeyRule::Limit => return self.on_declared(row, pair.value),
            _ => {}
        }
        if self.settled & bit(row.key) != 0 {
            return Err(NegotiationError::Repeated);
        }
        self.settled |= bit(row.key);
        if self.proposed & bit(row.key) != 0 {
            self.proposed &= !bit(row.key);
            return self.on_answer(row, pair.value);
        }
        if self.is_discovery && row.normal_only || self.joins && !PER_CONNECTION.contains(&row.key) {
            out.push(row.name, IRRELEVANT);
            return Ok(());
        }
        let own = match row.key {
            OperationalKey::MaxOutstandingR2T if self.recovers() => 1,
            // MaxOutstandingR2T was negotiated in an earlier request, and its value stands.
            OperationalKey::ErrorRecoveryLevel if self.agreed.get(OperationalKey::MaxOutstandingR2T) > 1 => 0,
            key => self.own.get(key),
        };
        match answer(row, pair.value, own, self.own.is_required(row.key)) {
            Some(value) => {
                self.agreed.set(row.key, value);
                out.push(row.name, &format(row, value));
            }
            None => out.push(row.name, REJECT),
        }
        Ok(())
    }

    /// Processes a pair in full feature phase, where only `MaxRecvDataSegmentLength` may change
    /// (RFC 7143 §13.12).
    ///
    /// # Errors
    /// If the key may be negotiated only during login.
    pub fn on_later_pair(
        &mut self,
        pair: KeyValue<'_>,
        out: &mut TextBuilder,
    ) -> Result<(), NegotiationError> {
        match self.find(pair.key).map(|row| row.rule) {
            Some(KeyRule::Declared(least, most)) => self.on_declaration(pair.value, least, most),
            Some(_) => Err(NegotiationError::NotNow),
            None => {
                self.on_other_key(pair, out);
                Ok(())
            }
        }
    }

    /// Checks dependencies between keys at the end of the login.
    ///
    /// # Errors
    /// If a mandatory value was not negotiated, or if `FirstBurstLength` exceeds `MaxBurstLength`.
    /// A default `FirstBurstLength` is reduced instead.
    pub fn finish(&mut self) -> Result<OperationalParameters, NegotiationError> {
        let is_missing = |row: &&KeyDefinition| {
            self.own.is_required(row.key) && self.agreed.get(row.key) != self.own.get(row.key)
        };
        if KEYS.iter().any(|row| is_missing(&row)) {
            return Err(NegotiationError::Required);
        }
        if self.recovers() {
            self.agreed.set(OperationalKey::MaxOutstandingR2T, 1);
        }
        let max_burst = self.agreed.get(OperationalKey::MaxBurstLength);
        if self.agreed.get(OperationalKey::FirstBurstLength) > max_burst {
            if self.settled & bit(OperationalKey::FirstBurstLength) != 0
                && self.settled & bit(OperationalKey::MaxBurstLength) != 0
            {
                return Err(NegotiationError::FirstBurstAboveMaxBurst);
            }
            self.agreed.set(OperationalKey::FirstBurstLength, max_burst);
        }
        if let Some(side) = self.iser {
            self.finish_rdma(side)?;
        }
        Ok(self.agreed)
    }

    /// The definition of a key, where the key exists.
    fn find(&self, name: &str) -> Option<&'static KeyDefinition> {
        KEYS.iter().find(|row| row.name == name && (!row.iser_only || self.iser.is_some()))
    }

    /// Whether an initiator proposes a key: no digests over RDMA, no iSER keys over TCP.
    fn proposes(&self, row: &KeyDefinition) -> bool {
        match self.iser {
            None => !row.iser_only,
            Some(_) => {
                !matches!(row.rule, KeyRule::DeclaredBool | KeyRule::Limit)
                    && row.key != OperationalKey::HeaderDigest
                    && row.key != OperationalKey::DataDigest
            }
        }
    }

    /// Whether error recovery requires a single outstanding R2T (RFC 7143 §13.19).
    fn recovers(&self) -> bool {
        self.agreed.get(OperationalKey::ErrorRecoveryLevel) > 0
            && self.agreed.is_on(OperationalKey::DataSequenceInOrder)
    }

    /// Answers keys outside the table. Markers are obsolete but must be understood (RFC 7143
    /// §13.25); over TCP, iSER is declined (RFC 7145 §6). `NotUnderstood` itself is never answered,
    /// to avoid an endless exchange.
    fn on_other_key(&self, pair: KeyValue<'_>, out: &mut TextBuilder) {
        let answer = match pair.key {
            "IFMarker" | "OFMarker" | "RDMAExtensions" => NO,
            "IFMarkInt" | "OFMarkInt" => REJECT,
            key if self.iser.is_some() && DECLARED_OVER_RDMA.contains(&key) => return,
            _ if pair.value == NOT_UNDERSTOOD => return,
            _ => NOT_UNDERSTOOD,
        };
        out.push(pair.key, answer);
    }

    fn on_declaration(&mut self, value: &str, least: u32, most: u32) -> Result<(), NegotiationError> {
        if self.iser.is_some() {
            // The key has no meaning over RDMA.
            return Ok(());
        }
        let len = text::parse_number(value).filter(|len| (least..=most).contains(len));
        self.agreed.max_send_data_segment_length = len.ok_or(NegotiationError::BadDeclaration)?;
        Ok(())
    }

    fn on_answer(&mut self, row: &KeyDefinition, value: &str) -> Result<(), NegotiationError> {
        if [REJECT, IRRELEVANT, NOT_UNDERSTOOD].contains(&value) {
            // The default value applies.
            return Ok(());
        }
        let own = self.own.get(row.key);
        let value = parse(row, value).ok_or(NegotiationError::ImpossibleAnswer)?;
        let is_possible = match row.rule {
            KeyRule::Or => value >= own,
            KeyRule::And | KeyRule::Minimum(..) | KeyRule::FirstOf(_) => value <= own,
            KeyRule::Maximum(..) => value >= own,
            KeyRule::Declared(..) | KeyRule::DeclaredBool | KeyRule::Limit => false,
        };
        if !is_possible {
            return Err(NegotiationError::ImpossibleAnswer);
        }
        self.agreed.set(row.key, value);
        Ok(())
    }
}

/// The responder's answer to a proposal; `None` if no proposed value is acceptable.
fn answer(row: &KeyDefinition, proposed: &str, own: u32, is_required: bool) -> Option<u32> {
    match row.rule {
        KeyRule::Or => Some(parse(row, proposed)? | own),
        KeyRule::And => Some(parse(row, proposed)? & own),
        KeyRule::Minimum(..) => Some(parse(row, proposed)?.min(own)),
        KeyRule::Maximum(..) => Some(parse(row, proposed)?.max(own)),
        KeyRule::FirstOf(values) => text::parse_list(proposed)
            .filter_map(|choice| values.iter().position(|value| *value == choice))
            .filter_map(|place| u32::try_from(place).ok())
            .find(|place| *place == own || (*place < own && !is_required)),
        KeyRule::Declared(..) | KeyRule::DeclaredBool | KeyRule::Limit => None,
    }
}

/// Parses a value.
pub(super) fn parse(row: &KeyDefinition, value: &str) -> Option<u32> {
    match row.rule {
        KeyRule::Or | KeyRule::And | KeyRule::DeclaredBool => text::parse_bool(value).map(u32::from),
        KeyRule::Minimum(least, most) | KeyRule::Maximum(least, most) | KeyRule::Declared(least, most) => {
            text::parse_number(value).filter(|number| (least..=most).contains(number))
        }
        // Larger numbers count as no limit.
        KeyRule::Limit => text::parse_number(value).filter(|number| *number != 1),
        KeyRule::FirstOf(values) => {
            values.iter().position(|known| *known == value).and_then(|place| u32::try_from(place).ok())
        }
    }
}

/// Formats a value.
fn format(row: &KeyDefinition, value: u32) -> String {
    match row.rule {
        KeyRule::Or | KeyRule::And | KeyRule::DeclaredBool => String::from(if value == 1 { YES } else { NO }),
        KeyRule::Minimum(..) | KeyRule::Maximum(..) | KeyRule::Declared(..) | KeyRule::Limit => {
            value.to_string()
        }
        KeyRule::FirstOf(values) => String::from(*values.get(value as usize).unwrap_or(&NONE)),
    }
}

/// The text of a proposal: a value, or a list from the strongest to the weakest acceptable value.
fn proposal(row: &KeyDefinition, own: u32, is_required: bool) -> String {
    match row.rule {
        KeyRule::FirstOf(values) if !is_required => {
            let taken = values.iter().take((own as usize).saturating_add(1));
            taken.rev().copied().collect::<Vec<_>>().join(",")
        }
        _ => format(row, own),
    }
}

/// Default of `MaxRecvDataSegmentLength`, in bytes; also the limit during login (RFC 7143 §13.12).
pub const DEFAULT_DATA_SEGMENT_LENGTH: u32 = 8192;

/// Keys that an initiator declares over RDMA without an answer, and that have no effect here.
const DECLARED_OVER_RDMA: [&str; 1] = ["MaxAHSLength"];

/// Keys that `MaxOutstandingR2T` depends on (RFC 7143 §13.19).
const PROCESSED_FIRST: [&str; 2] = ["ErrorRecoveryLevel", "DataSequenceInOrder"];

#[cfg(test)]
mod tests {
    use super::*;

    fn default_proposal() -> OperationalParameters {
        OperationalParameters::standard()
            .with(OperationalKey::HeaderDigest, CRC32C)
            .with(OperationalKey::InitialR2T, 0)
            .with(OperationalKey::MaxBurstLength, 1 << 20)
            .with(OperationalKey::DefaultTime2Wait, 1)
            .with(OperationalKey::MaxOutstandingR2T, 4)
            .with(OperationalKey::MaxRecvDataSegmentLength, 262_144)
    }

    fn pair<'a>(key: &'a str, value: &'a str) -> KeyValue<'a> {
        KeyValue { key, value }
    }

    fn answer_to(key: &str, value: &str) -> String {
        let mut out = TextBuilder::default();
        OperationalNegotiation::new(default_proposal()).on_pair(pair(key, value), &mut out).unwrap();
        String::from_utf8(out.as_bytes().to_vec()).unwrap()
    }

    #[test]
    fn key_definitions_are_in_key_order() {
        for (place, row) in KEYS.iter().enumerate() {
            assert_eq!(row.key as usize, place, "{}", row.name);
        }
    }

    #[test]
    fn a_mandatory_value_is_negotiated_or_the_login_fails() {
        let proposal = OperationalParameters::standard()
            .with(OperationalKey::HeaderDigest, CRC32C)
            .requiring(OperationalKey::HeaderDigest);
        for (proposed, answer, expected) in
            [("None,CRC32C", "CRC32C", Ok(CRC32C)), ("None", "Reject", Err(NegotiationError::Required))]
        {
            let (mut operational, mut out) = (OperationalNegotiation::new(proposal), TextBuilder::default());
            operational.on_pair(pair("HeaderDigest", proposed), &mut out).unwrap();
            assert_eq!(out.as_bytes(), format!("HeaderDigest={answer}\0").as_bytes());
            assert_eq!(operational.finish().map(|agreed| agreed.get(OperationalKey::HeaderDigest)), expected);
        }
        assert_eq!(
            OperationalNegotiation::new(proposal).finish(),
            Err(NegotiationError::Required),
            "neither side sent the key"
        );
        let (mut operational, mut out) = (OperationalNegotiation::new(proposal), TextBuilder::default());
        operational.propose_all(&mut out);
        assert!(out.as_bytes().windows(21).any(|bytes| bytes == b"\0HeaderDigest=CRC32C\0"));
    }

    #[test]
    fn each_rule_gives_its_answer() {
        let cases = [
            ("HeaderDigest", "CRC32C,None", "CRC32C"),
            ("HeaderDigest", "None,CRC32C", "None"),
            ("HeaderDigest", "X-com.example.sum,CRC32C", "CRC32C"),
            ("DataDigest", "CRC32C,None", "None"),
            ("DataDigest", "CRC32C", "Reject"),
            ("InitialR2T", "Yes", "Yes"),
            ("InitialR2T", "No", "No"),
            ("InitialR2T", "Maybe", "Reject"),
            ("ImmediateData", "No", "No"),
            ("MaxBurstLength", "16776192", "1048576"),
            ("MaxBurstLength", "511", "Reject"),
            ("MaxBurstLength", "0x20000", "131072"),
            ("FirstBurstLength", "16777216", "Reject"),
            ("DefaultTime2Wait", "0", "1"),
            ("DefaultTime2Wait", "3601", "Reject"),
            ("DefaultTime2Retain", "0", "0"),
            ("MaxOutstandingR2T", "0", "Reject"),
            ("MaxOutstandingR2T", "9", "4"),
            ("DataPDUInOrder", "No", "Yes"),
            ("DataSequenceInOrder", "No", "Yes"),
            ("ErrorRecoveryLevel", "2", "0"),
            ("MaxConnections", "8", "1"),
            ("TaskReporting", "FastAbort,RFC3720", "RFC3720"),
            ("iSCSIProtocolLevel", "2", "1"),
            ("IFMarker", "Yes", "No"),
            ("OFMarkInt", "2048~8192", "Reject"),
            ("RDMAExtensions", "Yes", "No"),
            ("X-com.example.speed", "11", "NotUnderstood"),
        ];
        for (key, value, expected) in cases {
            assert_eq!(answer_to(key, value), format!("{key}={expected}\0"), "{key}={value}");
        }
        assert_eq!(answer_to("X-com.example.speed", "NotUnderstood"), "");
        assert_eq!(answer_to("MaxRecvDataSegmentLength", "512"), "");
    }

    #[test]
    fn both_sides_negotiate_the_same_values() {
        let mut initiator =
            OperationalNegotiation::new(default_proposal().with(OperationalKey::DataDigest, CRC32C));
        let mut target =
            OperationalNegotiation::new(default_proposal().with(OperationalKey::MaxBurstLength, 65_536));
        let (mut there, mut back) = (TextBuilder::default(), TextBuilder::default());
        initiator.propose_all(&mut there);
        assert!(!initiator.is_answered());
        for pair in text::pairs(there.as_bytes()) {
            target.on_pair(pair.unwrap(), &mut back).unwrap();
        }
        target.declare(&mut back);
        for pair in text::pairs(back.as_bytes()) {
            initiator.on_pair(pair.unwrap(), &mut TextBuilder::default()).unwrap();
        }
        assert!(initiator.is_answered());
        assert_eq!(initiator.finish(), target.finish());
        let agreed = target.agreed();
        assert_eq!(
            (agreed.get(OperationalKey::MaxBurstLength), agreed.get(OperationalKey::FirstBurstLength)),
            (65_536, 65_536)
        );
        assert!(agreed.is_on(OperationalKey::HeaderDigest) && !agreed.is_on(OperationalKey::DataDigest));
        assert_eq!(agreed.max_send_data_segment_length(), 262_144);
    }

    #[test]
    fn with_recovery_there_is_one_r2t_at_a_time() {
        for keys in [["ErrorRecoveryLevel", "MaxOutstandingR2T"], ["MaxOutstandingR2T", "ErrorRecoveryLevel"]]
        {
            let mut target =
                OperationalNegotiation::new(default_proposal().with(OperationalKey::ErrorRecoveryLevel, 1));
            let mut out = TextBuilder::default();
            target.on_pairs(keys.into_iter().map(|key| pair(key, "2")), &mut out).unwrap();
            assert_eq!(out.as_bytes(), b"ErrorRecoveryLevel=1\0MaxOutstandingR2T=1\0", "{keys:?}");
            let agreed = target.finish().unwrap();
            let both = (
                agreed.get(OperationalKey::ErrorRecoveryLevel),
                agreed.get(OperationalKey::MaxOutstandingR2T),
            );
            assert_eq!(both, (1, 1), "{keys:?}");
        }
        let mut late =
            OperationalNegotiation::new(default_proposal().with(OperationalKey::ErrorRecoveryLevel, 1));
        let mut out = TextBuilder::default();
        for key in ["MaxOutstandingR2T", "ErrorRecoveryLevel"] {
            late.on_pair(pair(key, "2"), &mut out).unwrap();
        }
        assert_eq!(out.as_bytes(), b"MaxOutstandingR2T=2\0ErrorRecoveryLevel=0\0");
        let mut initiator =
            OperationalNegotiation::new(default_proposal().with(OperationalKey::ErrorRecoveryLevel, 1));
        let mut out = TextBuilder::default();
        initiator.propose_all(&mut out);
        let proposed = text::pairs(out.as_bytes()).map(Result::unwrap);
        let r2ts = proposed.filter(|pair| pair.key == "MaxOutstandingR2T").map(|pair| pair.value);
        assert_eq!(r2ts.collect::<Vec<_>>(), ["1"]);
        let mut discovery =
            OperationalNegotiation::new(default_proposal().with(OperationalKey::ErrorRecoveryLevel, 1));
        discovery.set_discovery();
        let mut out = TextBuilder::default();
        discovery.on_pair(pair("ErrorRecoveryLevel", "2"), &mut out).unwrap();
        assert_eq!(out.as_bytes(), b"ErrorRecoveryLevel=0\0");
    }

    #[test]
    fn a_further_connection_negotiates_only_per_connection_keys() {
        let session = default_proposal()
            .with(OperationalKey::MaxBurstLength, 4096)
            .with(OperationalKey::FirstBurstLength, 512);
        let mut target = OperationalNegotiation::joining(default_proposal(), session);
        let mut out = TextBuilder::default();
        for (key, value) in [("HeaderDigest", "CRC32C"), ("MaxBurstLength", "8192"), ("InitialR2T", "Yes")] {
            target.on_pair(pair(key, value), &mut out).unwrap();
        }
        assert_eq!(
            out.as_bytes(),
            b"HeaderDigest=CRC32C\0MaxBurstLength=Irrelevant\0InitialR2T=Irrelevant\0"
        );
        let agreed = target.finish().unwrap();
        assert_eq!(
            (agreed.get(OperationalKey::MaxBurstLength), agreed.get(OperationalKey::InitialR2T)),
            (4096, 0)
        );
        assert_eq!(agreed.max_send_data_segment_length(), 8192);
        assert!(agreed.is_on(OperationalKey::HeaderDigest) && !agreed.is_on(OperationalKey::DataDigest));
    }

    #[test]
    fn an_impossible_answer_is_a_violation() {
        let impossible = [
            ("InitialR2T", "Maybe"),
            ("MaxBurstLength", "2097152"),
            ("DefaultTime2Wait", "0"),
            ("HeaderDigest", "MD5"),
            ("DataDigest", "CRC32C"),
        ];
        for (key, value) in impossible {
            let mut initiator = OperationalNegotiation::new(default_proposal());
            initiator.propose_all(&mut TextBuilder::default());
            let result = initiator.on_pair(pair(key, value), &mut TextBuilder::default());
            assert_eq!(result, Err(NegotiationError::ImpossibleAnswer), "{key}={value}");
        }
        let mut initiator = OperationalNegotiation::new(default_proposal());
        initiator.propose_all(&mut TextBuilder::default());
        assert_eq!(initiator.on_pair(pair("HeaderDigest", "Reject"), &mut TextBuilder::default()), Ok(()));
        assert!(!initiator.agreed().is_on(OperationalKey::HeaderDigest));
    }

    #[test]
    fn a_key_is_negotiated_once_and_only_in_a_login() {
        let mut target = OperationalNegotiation::new(default_proposal());
        let mut out = TextBuilder::default();
        target.on_pair(pair("ImmediateData", "Yes"), &mut out).unwrap();
        let again = target.on_pair(pair("ImmediateData", "Yes"), &mut out);
        assert_eq!(again, Err(NegotiationError::Repeated));
        let later = target.on_later_pair(pair("MaxBurstLength", "512"), &mut out);
        assert_eq!(later, Err(NegotiationError::NotNow));
        assert_eq!(target.on_later_pair(pair("MaxRecvDataSegmentLength", "4096"), &mut out), Ok(()));
        assert_eq!(target.agreed().max_send_data_segment_length(), 4096);
        let bad = target.on_later_pair(pair("MaxRecvDataSegmentLength", "100"), &mut out);
        assert_eq!(bad, Err(NegotiationError::BadDeclaration));
    }

    #[test]
    fn a_first_burst_fits_the_longest_burst() {
        let mut target = OperationalNegotiation::new(default_proposal());
        target.on_pair(pair("MaxBurstLength", "4096"), &mut TextBuilder::default()).unwrap();
        assert_eq!(target.clone().finish().unwrap().get(OperationalKey::FirstBurstLength), 4096);
        target.on_pair(pair("FirstBurstLength", "8192"), &mut TextBuilder::default()).unwrap();
        assert_eq!(target.finish(), Err(NegotiationError::FirstBurstAboveMaxBurst));
    }

    #[test]
    fn a_discovery_session_has_no_keys_of_data() {
        let mut target = OperationalNegotiation::new(default_proposal());
        target.set_discovery();
        let mut out = TextBuilder::default();
        target.on_pair(pair("InitialR2T", "No"), &mut out).unwrap();
        target.on_pair(pair("HeaderDigest", "CRC32C"), &mut out).unwrap();
        assert_eq!(out.as_bytes(), b"InitialR2T=Irrelevant\0HeaderDigest=CRC32C\0");
    }
}
