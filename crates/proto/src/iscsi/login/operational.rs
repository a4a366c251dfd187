//! Operational keys: what each may say, and what two say together (RFC 7143 §13, RFC 7144 §7).
//!
//! `keys` has the one table of both roles. A key is proposed by one side and answered by the other;
//! the answer is a function of both sides' values (`Rule`). So the responder computes it, and the
//! proposer checks that what came could have been computed. Only `MaxRecvDataSegmentLength` is
//! declared and never answered: each side has its own.
//!
//! Over RDMA some keys are different, see [`Operational::over_rdma`]; on a byte stream the keys of
//! iSER are unknown.

use super::keys::{KEY_COUNT, KEYS, OF_CONNECTIONS, Row, Rule, bit};
use super::rdma::Side;
use crate::iscsi::text::{self, IRRELEVANT, NO, NONE, NOT_UNDERSTOOD, Pair, REJECT, Text, YES};

/// An operational key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperationalKey {
    /// CRC32C over headers?
    HeaderDigest,
    /// CRC32C over data?
    DataDigest,
    /// In one session.
    MaxConnections,
    /// Every write waits for an R2T.
    InitialR2T,
    /// Data may come with the command.
    ImmediateData,
    /// The longest data segment that the declaring side takes, in bytes.
    MaxRecvDataSegmentLength,
    /// The longest sequence of data, in bytes.
    MaxBurstLength,
    /// The most unsolicited data of a command, in bytes.
    FirstBurstLength,
    /// In seconds.
    DefaultTime2Wait,
    /// In seconds.
    DefaultTime2Retain,
    /// Of one command.
    MaxOutstandingR2T,
    /// The PDUs of a sequence come in order.
    DataPDUInOrder,
    /// The sequences of a command come in order.
    DataSequenceInOrder,
    /// 0, 1 or 2.
    ErrorRecoveryLevel,
    /// How the aborting of other initiators' tasks is told.
    TaskReporting,
    /// Which document; RFC 7144 is 2.
    #[expect(non_camel_case_types, reason = "the key's name")]
    iSCSIProtocolLevel,
    /// This is iSER.
    RDMAExtensions,
    /// The longest data segment that the initiator takes over RDMA, in bytes.
    InitiatorRecvDataSegmentLength,
    /// The longest data segment that the target takes over RDMA, in bytes.
    TargetRecvDataSegmentLength,
    /// What the header of a write names begins behind the data that comes unasked.
    TaggedBufferForSolicitedDataOnly,
    /// The first messages are greetings.
    #[expect(non_camel_case_types, reason = "the key's name")]
    iSERHelloRequired,
    /// How many PDUs the peer takes that it did not ask for; 0: as many as come.
    MaxOutstandingUnexpectedPDUs,
}

/// One value of each key, as a number: Yes is 1, a choice is its place in the list of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperationalParameters {
    values: [u32; KEY_COUNT],
    /// Keys whose value is the only one that will do, one bit each.
    pub(super) required: u32,
    /// The longest data segment that the peer takes, in bytes.
    pub(super) max_send_data_segment_length: u32,
}

/// The value of `HeaderDigest` and `DataDigest` that stands for CRC32C.
pub const CRC32C: u32 = 1;

impl OperationalParameters {
    /// What holds before anything is negotiated.
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

    /// The value of a key; for `MaxRecvDataSegmentLength`, one's own.
    #[inline]
    #[must_use]
    pub fn get(&self, key: OperationalKey) -> u32 {
        self.values.get(key as usize).copied().unwrap_or_default()
    }

    /// These parameters with this value of one key.
    #[must_use]
    pub fn with(mut self, key: OperationalKey, value: u32) -> OperationalParameters {
        self.set(key, value);
        self
    }

    /// Requires that a login ends with no other value of this key than this side's own: for
    /// digests.
    #[must_use]
    pub fn requiring(mut self, key: OperationalKey) -> OperationalParameters {
        self.required |= bit(key);
        self
    }

    fn is_required(&self, key: OperationalKey) -> bool {
        self.required & bit(key) != 0
    }

    /// Whether a key says Yes, or a digest is on.
    #[inline]
    #[must_use]
    pub fn is_on(&self, key: OperationalKey) -> bool {
        self.get(key) == 1
    }

    /// The longest data segment that the peer takes, in bytes.
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

/// A peer that negotiates as it may not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NegotiationError {
    /// A key was sent twice (RFC 7143 §6.3).
    #[error("a key was negotiated twice")]
    Repeated,
    /// An answer that no rule gives.
    #[error("an answer that the proposed value does not allow")]
    ImpossibleAnswer,
    /// A key that only a login may negotiate, after the login.
    #[error("a key that only a login negotiates")]
    NotNow,
    /// A declaration that is out of its bounds.
    #[error("a declared value that is out of bounds")]
    BadDeclaration,
    /// A value that this side does not go without was not agreed on.
    #[error("a login without what this side requires")]
    Required,
    /// More unsolicited data than a sequence holds (RFC 7143 §13.14).
    #[error("FirstBurstLength above MaxBurstLength")]
    FirstBurstAboveMaxBurst,
    /// Over RDMA, but not iSER (RFC 7145 §6).
    #[error("a login over RDMA that does not want iSER")]
    NotIser,
}

/// One negotiation of operational keys, of either role.
#[derive(Clone, Debug)]
pub struct Operational {
    /// What this side wants, and its limits.
    pub(super) own: OperationalParameters,
    pub(super) agreed: OperationalParameters,
    /// Keys that were answered or declared, one bit each.
    pub(super) settled: u32,
    /// Keys that this side proposed and the peer has not answered, one bit each.
    proposed: u32,
    declared: bool,
    pub(super) is_discovery: bool,
    /// Of a connection that is not the leading one: keys that are the session's are settled.
    pub(super) joins: bool,
    /// Who this is, over RDMA.
    pub(super) iser: Option<Side>,
}

impl Operational {
    /// A negotiation in which this side wants `own`.
    #[must_use]
    pub fn new(own: OperationalParameters) -> Operational {
        let mut agreed = OperationalParameters::standard();
        agreed.set(OperationalKey::MaxRecvDataSegmentLength, DEFAULT_DATA_SEGMENT_LENGTH);
        Operational {
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

    /// Negotiation for another connection of a session that agreed on `session`: what is not the
    /// connection's own stays (RFC 7143 §13, "Leading Only").
    #[must_use]
    pub fn joining(own: OperationalParameters, session: OperationalParameters) -> Operational {
        let standard = OperationalParameters::standard();
        let mut agreed = session;
        for key in OF_CONNECTIONS {
            agreed.set(key, standard.get(key));
        }
        agreed.max_send_data_segment_length = DEFAULT_DATA_SEGMENT_LENGTH;
        Operational { agreed, joins: true, ..Operational::new(own) }
    }

    /// The session discovers only: most keys are irrelevant.
    pub fn set_discovery(&mut self) {
        self.is_discovery = true;
        self.own.set(OperationalKey::ErrorRecoveryLevel, 0);
    }

    /// What is agreed on so far.
    #[must_use]
    pub fn agreed(&self) -> OperationalParameters {
        self.agreed
    }

    /// Whether everything that this side proposed has its answer.
    #[must_use]
    pub fn is_answered(&self) -> bool {
        self.proposed == 0
    }

    /// Declares one's own `MaxRecvDataSegmentLength`, once.
    pub fn declare(&mut self, out: &mut Text) {
        if self.iser.is_none() && !std::mem::replace(&mut self.declared, true) {
            let len = self.own.get(OperationalKey::MaxRecvDataSegmentLength);
            self.agreed.set(OperationalKey::MaxRecvDataSegmentLength, len);
            out.push_number(OperationalKey::MaxRecvDataSegmentLength.name(), len);
        }
    }

    /// Proposes every key: an initiator's first operational request.
    pub fn propose_all(&mut self, out: &mut Text) {
        self.declare(out);
        for row in KEYS.iter().filter(|row| !matches!(row.rule, Rule::Declared(..))) {
            let is_moot = self.is_discovery && row.normal_only || !self.proposes(row);
            if self.settled & bit(row.key) != 0 || is_moot {
                continue;
            }
            self.proposed |= bit(row.key);
            let is_required = self.own.is_required(row.key);
            let own = match row.key {
                // As it has to be with recovery, which is proposed beside it.
                OperationalKey::MaxOutstandingR2T if self.own.get(OperationalKey::ErrorRecoveryLevel) > 0 => {
                    1
                }
                key => self.own.get(key),
            };
            out.push(row.name, &proposal(row, own, is_required));
        }
    }

    /// Takes all pairs of a text that are not about security, those first on which answers to
    /// others depend.
    ///
    /// # Errors
    /// As for [`Operational::on_pair`].
    pub fn on_pairs<'a>(
        &mut self,
        pairs: impl Iterator<Item = Pair<'a>> + Clone,
        out: &mut Text,
    ) -> Result<(), NegotiationError> {
        let comes_first = |pair: &Pair<'_>| FIRST.contains(&pair.key);
        let mut in_order = pairs.clone().filter(comes_first).chain(pairs.filter(|pair| !comes_first(pair)));
        in_order.try_for_each(|pair| self.on_pair(pair, out))
    }

    /// Proposes what each connection has for itself: the first operational request of a connection
    /// that joins a session, which may name nothing else (RFC 7143 §13, "leading only").
    pub fn propose_connection(&mut self, out: &mut Text) {
        self.declare(out);
        let is_digest =
            |row: &&Row| matches!(row.key, OperationalKey::HeaderDigest | OperationalKey::DataDigest);
        let is_stream = self.iser.is_none();
        self.joins |= !is_stream;
        for row in KEYS.iter().filter(|row| is_stream && is_digest(row)) {
            self.proposed |= bit(row.key);
            let is_required = self.own.is_required(row.key);
            out.push(row.name, &proposal(row, self.own.get(row.key), is_required));
        }
    }

    /// Takes a pair of a login: an answer to what was proposed, or a proposal, whose answer is
    /// written to `out`. Any key may come here; unknown ones are answered so.
    ///
    /// # Errors
    /// If the peer negotiates as it may not.
    pub fn on_pair(&mut self, pair: Pair<'_>, out: &mut Text) -> Result<(), NegotiationError> {
        let Some(row) = self.find(pair.key) else {
            self.on_other_key(pair, out);
            return Ok(());
        };
        match row.rule {
            Rule::Declared(least, most) => return self.on_declaration(pair.value, least, most),
            Rule::Told | Rule::Limit => return self.on_told(row, pair.value),
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
        if self.is_discovery && row.normal_only || self.joins && !OF_CONNECTIONS.contains(&row.key) {
            out.push(row.name, IRRELEVANT);
            return Ok(());
        }
        let own = match row.key {
            OperationalKey::MaxOutstandingR2T if self.recovers() => 1,
            // That key came before, in a request of its own, and its answer stands.
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

    /// Takes a pair in full feature phase, where only `MaxRecvDataSegmentLength` may change (RFC
    /// 7143 §13.12).
    ///
    /// # Errors
    /// If the key can be negotiated only in a login.
    pub fn on_later_pair(&mut self, pair: Pair<'_>, out: &mut Text) -> Result<(), NegotiationError> {
        match self.find(pair.key).map(|row| row.rule) {
            Some(Rule::Declared(least, most)) => self.on_declaration(pair.value, least, most),
            Some(_) => Err(NegotiationError::NotNow),
            None => {
                self.on_other_key(pair, out);
                Ok(())
            }
        }
    }

    /// Checks what must fit together at the end.
    ///
    /// # Errors
    /// If `FirstBurstLength` came out above `MaxBurstLength`. Where nobody named the former, its
    /// default gives way. If what is required was not agreed on.
    pub fn finish(&mut self) -> Result<OperationalParameters, NegotiationError> {
        let is_missing =
            |row: &&Row| self.own.is_required(row.key) && self.agreed.get(row.key) != self.own.get(row.key);
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

    /// The key of that name, where it means something.
    fn find(&self, name: &str) -> Option<&'static Row> {
        KEYS.iter().find(|row| row.name == name && (!row.iser_only || self.iser.is_some()))
    }

    /// Whether an initiator proposes a key: over RDMA no digests, elsewhere nothing of iSER.
    fn proposes(&self, row: &Row) -> bool {
        match self.iser {
            None => !row.iser_only,
            Some(_) => {
                !matches!(row.rule, Rule::Told | Rule::Limit)
                    && row.key != OperationalKey::HeaderDigest
                    && row.key != OperationalKey::DataDigest
            }
        }
    }

    /// Whether one R2T at a time is all that can be recovered (RFC 7143 §13.19).
    fn recovers(&self) -> bool {
        self.agreed.get(OperationalKey::ErrorRecoveryLevel) > 0
            && self.agreed.is_on(OperationalKey::DataSequenceInOrder)
    }

    /// Keys without a row: markers are obsolete and must still be understood (RFC 7143 §13.25); on
    /// a byte stream this is no iSER (RFC 7145 §6). An answer to a key that this side never sent is
    /// not answered, lest two sides never end.
    fn on_other_key(&self, pair: Pair<'_>, out: &mut Text) {
        let answer = match pair.key {
            "IFMarker" | "OFMarker" | "RDMAExtensions" => NO,
            "IFMarkInt" | "OFMarkInt" => REJECT,
            key if self.iser.is_some() && TOLD_OVER_RDMA.contains(&key) => return,
            _ if pair.value == NOT_UNDERSTOOD => return,
            _ => NOT_UNDERSTOOD,
        };
        out.push(pair.key, answer);
    }

    fn on_declaration(&mut self, value: &str, least: u32, most: u32) -> Result<(), NegotiationError> {
        if self.iser.is_some() {
            // It means nothing over RDMA.
            return Ok(());
        }
        let len = text::parse_number(value).filter(|len| (least..=most).contains(len));
        self.agreed.max_send_data_segment_length = len.ok_or(NegotiationError::BadDeclaration)?;
        Ok(())
    }

    fn on_answer(&mut self, row: &Row, value: &str) -> Result<(), NegotiationError> {
        if [REJECT, IRRELEVANT, NOT_UNDERSTOOD].contains(&value) {
            // The default holds.
            return Ok(());
        }
        let own = self.own.get(row.key);
        let value = parse(row, value).ok_or(NegotiationError::ImpossibleAnswer)?;
        let is_possible = match row.rule {
            Rule::Or => value >= own,
            Rule::And | Rule::Minimum(..) | Rule::FirstOf(_) => value <= own,
            Rule::Maximum(..) => value >= own,
            Rule::Declared(..) | Rule::Told | Rule::Limit => false,
        };
        if !is_possible {
            return Err(NegotiationError::ImpossibleAnswer);
        }
        self.agreed.set(row.key, value);
        Ok(())
    }
}

/// The responder's answer to a proposal; `None` if it can take no value of it.
fn answer(row: &Row, proposed: &str, own: u32, is_required: bool) -> Option<u32> {
    match row.rule {
        Rule::Or => Some(parse(row, proposed)? | own),
        Rule::And => Some(parse(row, proposed)? & own),
        Rule::Minimum(..) => Some(parse(row, proposed)?.min(own)),
        Rule::Maximum(..) => Some(parse(row, proposed)?.max(own)),
        Rule::FirstOf(values) => text::parse_list(proposed)
            .filter_map(|choice| values.iter().position(|value| *value == choice))
            .filter_map(|place| u32::try_from(place).ok())
            .find(|place| *place == own || (*place < own && !is_required)),
        Rule::Declared(..) | Rule::Told | Rule::Limit => None,
    }
}

/// One value, as the peer wrote it.
pub(super) fn parse(row: &Row, value: &str) -> Option<u32> {
    match row.rule {
        Rule::Or | Rule::And | Rule::Told => text::parse_bool(value).map(u32::from),
        Rule::Minimum(least, most) | Rule::Maximum(least, most) | Rule::Declared(least, most) => {
            text::parse_number(value).filter(|number| (least..=most).contains(number))
        }
        // Numbers beyond what fits are no limit for anybody.
        Rule::Limit => text::parse_number(value).filter(|number| *number != 1),
        Rule::FirstOf(values) => {
            values.iter().position(|known| *known == value).and_then(|place| u32::try_from(place).ok())
        }
    }
}

/// One value, as it is sent.
fn format(row: &Row, value: u32) -> String {
    match row.rule {
        Rule::Or | Rule::And | Rule::Told => String::from(if value == 1 { YES } else { NO }),
        Rule::Minimum(..) | Rule::Maximum(..) | Rule::Declared(..) | Rule::Limit => value.to_string(),
        Rule::FirstOf(values) => String::from(*values.get(value as usize).unwrap_or(&NONE)),
    }
}

/// What a proposer sends: one value, or a list from the best that it takes down to the least.
fn proposal(row: &Row, own: u32, is_required: bool) -> String {
    match row.rule {
        Rule::FirstOf(values) if !is_required => {
            let taken = values.iter().take((own as usize).saturating_add(1));
            taken.rev().copied().collect::<Vec<_>>().join(",")
        }
        _ => format(row, own),
    }
}

/// Of `MaxRecvDataSegmentLength`, in bytes; also what holds during login (RFC 7143 §13.12).
pub const DEFAULT_DATA_SEGMENT_LENGTH: u32 = 8192;

/// What an initiator says over RDMA without expecting an answer, and what makes no difference here.
const TOLD_OVER_RDMA: [&str; 1] = ["MaxAHSLength"];

/// What `MaxOutstandingR2T` depends on (RFC 7143 §13.19).
const FIRST: [&str; 2] = ["ErrorRecoveryLevel", "DataSequenceInOrder"];

#[cfg(test)]
mod tests {
    use super::*;

    fn wishes() -> OperationalParameters {
        OperationalParameters::standard()
            .with(OperationalKey::HeaderDigest, CRC32C)
            .with(OperationalKey::InitialR2T, 0)
            .with(OperationalKey::MaxBurstLength, 1 << 20)
            .with(OperationalKey::DefaultTime2Wait, 1)
            .with(OperationalKey::MaxOutstandingR2T, 4)
            .with(OperationalKey::MaxRecvDataSegmentLength, 262_144)
    }

    fn pair<'a>(key: &'a str, value: &'a str) -> Pair<'a> {
        Pair { key, value }
    }

    fn answer_to(key: &str, value: &str) -> String {
        let mut out = Text::default();
        Operational::new(wishes()).on_pair(pair(key, value), &mut out).unwrap();
        String::from_utf8(out.as_bytes().to_vec()).unwrap()
    }

    #[test]
    fn rows_are_where_their_keys_say() {
        for (place, row) in KEYS.iter().enumerate() {
            assert_eq!(row.key as usize, place, "{}", row.name);
        }
    }

    #[test]
    fn what_is_required_is_agreed_on_or_the_login_fails() {
        let wanted = OperationalParameters::standard()
            .with(OperationalKey::HeaderDigest, CRC32C)
            .requiring(OperationalKey::HeaderDigest);
        for (proposed, answer, expected) in
            [("None,CRC32C", "CRC32C", Ok(CRC32C)), ("None", "Reject", Err(NegotiationError::Required))]
        {
            let (mut operational, mut out) = (Operational::new(wanted), Text::default());
            operational.on_pair(pair("HeaderDigest", proposed), &mut out).unwrap();
            assert_eq!(out.as_bytes(), format!("HeaderDigest={answer}\0").as_bytes());
            assert_eq!(operational.finish().map(|agreed| agreed.get(OperationalKey::HeaderDigest)), expected);
        }
        assert_eq!(Operational::new(wanted).finish(), Err(NegotiationError::Required), "nobody named it");
        let (mut operational, mut out) = (Operational::new(wanted), Text::default());
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
    fn two_sides_agree_on_the_same() {
        let mut initiator = Operational::new(wishes().with(OperationalKey::DataDigest, CRC32C));
        let mut target = Operational::new(wishes().with(OperationalKey::MaxBurstLength, 65_536));
        let (mut there, mut back) = (Text::default(), Text::default());
        initiator.propose_all(&mut there);
        assert!(!initiator.is_answered());
        for pair in text::pairs(there.as_bytes()) {
            target.on_pair(pair.unwrap(), &mut back).unwrap();
        }
        target.declare(&mut back);
        for pair in text::pairs(back.as_bytes()) {
            initiator.on_pair(pair.unwrap(), &mut Text::default()).unwrap();
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
            let mut target = Operational::new(wishes().with(OperationalKey::ErrorRecoveryLevel, 1));
            let mut out = Text::default();
            target.on_pairs(keys.into_iter().map(|key| pair(key, "2")), &mut out).unwrap();
            assert_eq!(out.as_bytes(), b"ErrorRecoveryLevel=1\0MaxOutstandingR2T=1\0", "{keys:?}");
            let agreed = target.finish().unwrap();
            let both = (
                agreed.get(OperationalKey::ErrorRecoveryLevel),
                agreed.get(OperationalKey::MaxOutstandingR2T),
            );
            assert_eq!(both, (1, 1), "{keys:?}");
        }
        let mut late = Operational::new(wishes().with(OperationalKey::ErrorRecoveryLevel, 1));
        let mut out = Text::default();
        for key in ["MaxOutstandingR2T", "ErrorRecoveryLevel"] {
            late.on_pair(pair(key, "2"), &mut out).unwrap();
        }
        assert_eq!(out.as_bytes(), b"MaxOutstandingR2T=2\0ErrorRecoveryLevel=0\0");
        let mut initiator = Operational::new(wishes().with(OperationalKey::ErrorRecoveryLevel, 1));
        let mut out = Text::default();
        initiator.propose_all(&mut out);
        let proposed = text::pairs(out.as_bytes()).map(Result::unwrap);
        let r2ts = proposed.filter(|pair| pair.key == "MaxOutstandingR2T").map(|pair| pair.value);
        assert_eq!(r2ts.collect::<Vec<_>>(), ["1"]);
        let mut discovery = Operational::new(wishes().with(OperationalKey::ErrorRecoveryLevel, 1));
        discovery.set_discovery();
        let mut out = Text::default();
        discovery.on_pair(pair("ErrorRecoveryLevel", "2"), &mut out).unwrap();
        assert_eq!(out.as_bytes(), b"ErrorRecoveryLevel=0\0");
    }

    #[test]
    fn another_connection_negotiates_what_is_its_own_and_nothing_else() {
        let session =
            wishes().with(OperationalKey::MaxBurstLength, 4096).with(OperationalKey::FirstBurstLength, 512);
        let mut target = Operational::joining(wishes(), session);
        let mut out = Text::default();
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
    fn an_answer_must_be_possible() {
        let impossible = [
            ("InitialR2T", "Maybe"),
            ("MaxBurstLength", "2097152"),
            ("DefaultTime2Wait", "0"),
            ("HeaderDigest", "MD5"),
            ("DataDigest", "CRC32C"),
        ];
        for (key, value) in impossible {
            let mut initiator = Operational::new(wishes());
            initiator.propose_all(&mut Text::default());
            let result = initiator.on_pair(pair(key, value), &mut Text::default());
            assert_eq!(result, Err(NegotiationError::ImpossibleAnswer), "{key}={value}");
        }
        let mut initiator = Operational::new(wishes());
        initiator.propose_all(&mut Text::default());
        assert_eq!(initiator.on_pair(pair("HeaderDigest", "Reject"), &mut Text::default()), Ok(()));
        assert!(!initiator.agreed().is_on(OperationalKey::HeaderDigest));
    }

    #[test]
    fn a_key_is_negotiated_once_and_only_in_a_login() {
        let mut target = Operational::new(wishes());
        let mut out = Text::default();
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
        let mut target = Operational::new(wishes());
        target.on_pair(pair("MaxBurstLength", "4096"), &mut Text::default()).unwrap();
        assert_eq!(target.clone().finish().unwrap().get(OperationalKey::FirstBurstLength), 4096);
        target.on_pair(pair("FirstBurstLength", "8192"), &mut Text::default()).unwrap();
        assert_eq!(target.finish(), Err(NegotiationError::FirstBurstAboveMaxBurst));
    }

    #[test]
    fn a_discovery_session_has_no_keys_of_data() {
        let mut target = Operational::new(wishes());
        target.set_discovery();
        let mut out = Text::default();
        target.on_pair(pair("InitialR2T", "No"), &mut out).unwrap();
        target.on_pair(pair("HeaderDigest", "CRC32C"), &mut out).unwrap();
        assert_eq!(out.as_bytes(), b"InitialR2T=Irrelevant\0HeaderDigest=CRC32C\0");
    }
}
