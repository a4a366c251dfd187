//! Operational negotiation over RDMA (RFC 7145 §6).

use super::keys::{KeyDefinition, bit};
use super::operational::{
    DEFAULT_DATA_SEGMENT_LENGTH, NegotiationError, OperationalKey, OperationalNegotiation, parse,
};
use super::target::TargetLogin;
use crate::iscsi::text::{IRRELEVANT, NOT_UNDERSTOOD, REJECT};
use blockmux_wire::iscsi::U24;

/// The role of this side in a login.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoginSide {
    /// The side that connects.
    Initiator,
    /// The side that accepts connections.
    Target,
}

impl TargetLogin {
    /// Switches the login to RDMA.
    pub(in crate::iscsi) fn set_over_rdma(&mut self) {
        self.is_over_rdma = true;
        self.operational = self.operational.clone().over_rdma(LoginSide::Target);
    }

    /// Whether the login uses RDMA. It then never joins a session.
    pub(in crate::iscsi) fn is_over_rdma(&self) -> bool {
        self.is_over_rdma
    }

    /// Applies the RDMA rules to a negotiation if this login uses RDMA.
    pub(super) fn with_transport(&self, operational: OperationalNegotiation) -> OperationalNegotiation {
        if self.is_over_rdma { operational.over_rdma(LoginSide::Target) } else { operational }
    }
}

impl OperationalNegotiation {
    /// Switches the negotiation to RDMA (RFC 7145 §6): no digests, because lower layers have their
    /// own; negotiated message lengths; unsolicited data of at most one message; error recovery
    /// level 0; one connection (decision 91).
    #[must_use]
    pub fn over_rdma(mut self, side: LoginSide) -> OperationalNegotiation {
        let own = &mut self.own;
        own.required = 0;
        for key in
            [OperationalKey::HeaderDigest, OperationalKey::DataDigest, OperationalKey::ErrorRecoveryLevel]
        {
            own.set(key, 0);
        }
        own.set(OperationalKey::MaxConnections, 1);
        own.set(OperationalKey::RDMAExtensions, 1);
        own.set(OperationalKey::TargetRecvDataSegmentLength, DEFAULT_DATA_SEGMENT_LENGTH);
        let taken = match side {
            LoginSide::Initiator => DEFAULT_DATA_SEGMENT_LENGTH,
            // Any length that the initiator accepts.
            LoginSide::Target => U24::MAX,
        };
        own.set(OperationalKey::InitiatorRecvDataSegmentLength, taken);
        own.set(
            OperationalKey::FirstBurstLength,
            own.get(OperationalKey::FirstBurstLength).min(DEFAULT_DATA_SEGMENT_LENGTH),
        );
        self.iser = Some(side);
        self
    }

    /// Processes a declaration without an answer. If the target answers an initiator's declaration
    /// with "not understood", it has no effect.
    pub(super) fn on_declared(&mut self, row: &KeyDefinition, value: &str) -> Result<(), NegotiationError> {
        let value = match value {
            REJECT | IRRELEVANT | NOT_UNDERSTOOD => row.default,
            value => parse(row, value).ok_or(NegotiationError::ImpossibleAnswer)?,
        };
        self.agreed.set(row.key, value);
        Ok(())
    }

    /// Completes the negotiation over RDMA. A target does not require RDMAExtensions; an initiator
    /// has proposed it and requires the answer, but not in a discovery session, where the key is
    /// irrelevant (RFC 7145 §6.3): LIO answers "No" there.
    pub(super) fn finish_rdma(&mut self, side: LoginSide) -> Result<(), NegotiationError> {
        let is_answered = match side {
            LoginSide::Initiator => !self.is_discovery,
            LoginSide::Target => self.settled & bit(OperationalKey::RDMAExtensions) != 0,
        };
        if is_answered && !self.agreed.is_on(OperationalKey::RDMAExtensions) {
            return Err(NegotiationError::NotIser);
        }
        self.agreed.set(OperationalKey::RDMAExtensions, 1);
        let (initiators, targets) =
            (OperationalKey::InitiatorRecvDataSegmentLength, OperationalKey::TargetRecvDataSegmentLength);
        let (own, peers) = match side {
            LoginSide::Initiator => (initiators, targets),
            LoginSide::Target => (targets, initiators),
        };
        self.agreed.set(OperationalKey::MaxRecvDataSegmentLength, self.agreed.get(own));
        self.agreed.max_send_data_segment_length = self.agreed.get(peers);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iscsi::client::default_proposal;
    use crate::iscsi::login::operational::CRC32C;
    use crate::iscsi::node::offer;
    use crate::iscsi::text::{KeyValue, TextBuilder};

    /// Negotiates pairs of the peer; returns this side's text.
    fn answers(operational: &mut OperationalNegotiation, pairs: &[(&str, &str)]) -> String {
        let mut out = TextBuilder::default();
        for (key, value) in pairs {
            operational.on_pair(KeyValue { key, value }, &mut out).unwrap();
        }
        String::from_utf8(out.as_bytes().to_vec()).unwrap()
    }

    #[test]
    fn a_target_answers_the_keys_of_iser() {
        let mut target = OperationalNegotiation::new(offer()).over_rdma(LoginSide::Target);
        let said = answers(
            &mut target,
            &[
                ("HeaderDigest", "CRC32C,None"),
                ("ErrorRecoveryLevel", "2"),
                ("MaxConnections", "4"),
                ("InitiatorRecvDataSegmentLength", "262144"),
                ("TargetRecvDataSegmentLength", "65536"),
                ("FirstBurstLength", "262144"),
                ("RDMAExtensions", "Yes"),
                ("MaxRecvDataSegmentLength", "1"),
                ("MaxOutstandingUnexpectedPDUs", "8"),
                ("MaxAHSLength", "0"),
                ("iSERHelloRequired", "No"),
                ("TaggedBufferForSolicitedDataOnly", "No"),
            ],
        );
        let expected = "HeaderDigest=None\0ErrorRecoveryLevel=0\0MaxConnections=1\0InitiatorRecvDataSegmentLength=262144\0\
            TargetRecvDataSegmentLength=8192\0FirstBurstLength=8192\0RDMAExtensions=Yes\0";
        assert_eq!(said, expected);
        let mut out = TextBuilder::default();
        target.declare(&mut out);
        assert!(out.as_bytes().is_empty(), "MaxRecvDataSegmentLength means nothing");
        let agreed = target.finish().unwrap();
        assert_eq!(agreed.get(OperationalKey::MaxRecvDataSegmentLength), 8192);
        assert_eq!(agreed.max_send_data_segment_length(), 262_144);
        assert!(!agreed.is_on(OperationalKey::TaggedBufferForSolicitedDataOnly));
    }

    #[test]
    fn a_target_does_not_require_rdma_extensions_but_honours_no() {
        let silent = OperationalNegotiation::new(offer()).over_rdma(LoginSide::Target).finish().unwrap();
        assert!(
            silent.is_on(OperationalKey::RDMAExtensions)
                && silent.is_on(OperationalKey::TaggedBufferForSolicitedDataOnly)
        );
        let mut target = OperationalNegotiation::new(offer()).over_rdma(LoginSide::Target);
        assert_eq!(answers(&mut target, &[("RDMAExtensions", "No")]), "RDMAExtensions=No\0");
        assert_eq!(target.finish(), Err(NegotiationError::NotIser));
    }

    #[test]
    fn an_initiator_proposes_iser_and_requires_the_answer() {
        let proposal = default_proposal()
            .with(OperationalKey::MaxConnections, 4)
            .with(OperationalKey::HeaderDigest, CRC32C)
            .requiring(OperationalKey::HeaderDigest);
        for (answer, is_iser) in [("Yes", true), ("No", false), ("NotUnderstood", false), ("Reject", false)] {
            let mut initiator = OperationalNegotiation::new(proposal).over_rdma(LoginSide::Initiator);
            let mut out = TextBuilder::default();
            initiator.propose_all(&mut out);
            let said = String::from_utf8(out.as_bytes().to_vec()).unwrap();
            for pair in [
                "RDMAExtensions=Yes",
                "InitiatorRecvDataSegmentLength=8192",
                "TargetRecvDataSegmentLength=8192",
                "FirstBurstLength=8192",
                "ErrorRecoveryLevel=0",
                "MaxConnections=1",
            ] {
                assert!(said.split('\0').any(|said| said == pair), "{pair} is not in {said:?}");
            }
            assert!(!said.contains("Digest=") && !said.contains("MaxRecvDataSegmentLength"), "{said:?}");
            answers(&mut initiator, &[("RDMAExtensions", answer), ("TargetRecvDataSegmentLength", "512")]);
            let agreed = initiator.finish();
            assert_eq!(agreed.is_ok(), is_iser, "{answer}");
            if let Ok(agreed) = agreed {
                assert_eq!(agreed.max_send_data_segment_length(), 512);
            }
        }
    }

    #[test]
    fn an_initiator_discovers_by_iser_whatever_the_target_answers() {
        for answer in ["Yes", "No", "Irrelevant"] {
            let mut initiator = OperationalNegotiation::new(default_proposal());
            initiator.set_discovery();
            let mut initiator = initiator.over_rdma(LoginSide::Initiator);
            initiator.propose_all(&mut TextBuilder::default());
            answers(&mut initiator, &[("RDMAExtensions", answer), ("TargetRecvDataSegmentLength", "512")]);
            let agreed = initiator.finish().unwrap();
            assert!(agreed.is_on(OperationalKey::RDMAExtensions), "{answer}");
            assert_eq!(agreed.max_send_data_segment_length(), 512, "{answer}");
        }
    }

    #[test]
    fn over_tcp_iser_keys_are_unknown() {
        let mut target = OperationalNegotiation::new(offer());
        let keys = ["RDMAExtensions", "TargetRecvDataSegmentLength", "MaxOutstandingUnexpectedPDUs"];
        let said = answers(&mut target, &keys.map(|key| (key, "Yes")));
        let expected = "RDMAExtensions=No\0TargetRecvDataSegmentLength=NotUnderstood\0\
            MaxOutstandingUnexpectedPDUs=NotUnderstood\0";
        assert_eq!(said, expected);
        let mut out = TextBuilder::default();
        OperationalNegotiation::new(default_proposal()).propose_all(&mut out);
        let said = String::from_utf8(out.as_bytes().to_vec()).unwrap();
        assert!(!said.contains("RDMA") && !said.contains("RecvDataSegmentLength=8192"), "{said:?}");
    }
}
