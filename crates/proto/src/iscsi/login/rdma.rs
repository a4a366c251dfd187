//! What a login agrees on over RDMA (RFC 7145 §6).

use super::keys::{Row, bit};
use super::operational::{DEFAULT_DATA_SEGMENT_LENGTH, NegotiationError, Operational, OperationalKey, parse};
use super::target::TargetLogin;
use crate::iscsi::text::{IRRELEVANT, NOT_UNDERSTOOD, REJECT};
use blockmux_wire::iscsi::U24;

/// Who negotiates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Who connects.
    Initiator,
    /// Who is connected to.
    Target,
}

impl TargetLogin {
    /// From now on the login is one over RDMA.
    pub(in crate::iscsi) fn set_over_rdma(&mut self) {
        self.is_over_rdma = true;
        self.operational = self.operational.clone().over_rdma(Side::Target);
    }

    /// A negotiation as this login has it.
    pub(super) fn as_it_goes(&self, operational: Operational) -> Operational {
        if self.is_over_rdma { operational.over_rdma(Side::Target) } else { operational }
    }
}

impl Operational {
    /// Negotiation over RDMA (RFC 7145 §6). There are no digests, for what is below has its own;
    /// what a side takes in one message is a number that both agree on, and unasked-for data is no
    /// more than one such message. No error is recovered from below the session.
    #[must_use]
    pub fn over_rdma(mut self, side: Side) -> Operational {
        let own = &mut self.own;
        own.required = 0;
        for key in
            [OperationalKey::HeaderDigest, OperationalKey::DataDigest, OperationalKey::ErrorRecoveryLevel]
        {
            own.set(key, 0);
        }
        own.set(OperationalKey::RDMAExtensions, 1);
        own.set(OperationalKey::TargetRecvDataSegmentLength, DEFAULT_DATA_SEGMENT_LENGTH);
        let taken = match side {
            Side::Initiator => DEFAULT_DATA_SEGMENT_LENGTH,
            // Whatever the initiator takes.
            Side::Target => U24::MAX,
        };
        own.set(OperationalKey::InitiatorRecvDataSegmentLength, taken);
        own.set(
            OperationalKey::FirstBurstLength,
            own.get(OperationalKey::FirstBurstLength).min(DEFAULT_DATA_SEGMENT_LENGTH),
        );
        self.iser = Some(side);
        self
    }

    /// Takes what is said without an answer. To an initiator that has said it a target may answer
    /// that it knows nothing of it: then it counts for nothing.
    pub(super) fn on_told(&mut self, row: &Row, value: &str) -> Result<(), NegotiationError> {
        let value = match value {
            REJECT | IRRELEVANT | NOT_UNDERSTOOD => row.default,
            value => parse(row, value).ok_or(NegotiationError::ImpossibleAnswer)?,
        };
        self.agreed.set(row.key, value);
        Ok(())
    }

    /// What a side takes is no declaration of its own over RDMA. A target does not insist on the
    /// word for what both sides do already; an initiator has said it, and has to hear it.
    pub(super) fn finish_rdma(&mut self, side: Side) -> Result<(), NegotiationError> {
        let is_answered = side == Side::Initiator || self.settled & bit(OperationalKey::RDMAExtensions) != 0;
        if is_answered && !self.agreed.is_on(OperationalKey::RDMAExtensions) && !self.joins {
            return Err(NegotiationError::NotIser);
        }
        self.agreed.set(OperationalKey::RDMAExtensions, 1);
        let (initiators, targets) =
            (OperationalKey::InitiatorRecvDataSegmentLength, OperationalKey::TargetRecvDataSegmentLength);
        let (own, peers) = match side {
            Side::Initiator => (initiators, targets),
            Side::Target => (targets, initiators),
        };
        self.agreed.set(OperationalKey::MaxRecvDataSegmentLength, self.agreed.get(own));
        self.agreed.max_send_data_segment_length = self.agreed.get(peers);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iscsi::client::wishes;
    use crate::iscsi::login::operational::CRC32C;
    use crate::iscsi::node::offer;
    use crate::iscsi::text::{Pair, Text};

    /// What one says to pairs of the other, and what is agreed on then.
    fn answers(operational: &mut Operational, pairs: &[(&str, &str)]) -> String {
        let mut out = Text::default();
        for (key, value) in pairs {
            operational.on_pair(Pair { key, value }, &mut out).unwrap();
        }
        String::from_utf8(out.as_bytes().to_vec()).unwrap()
    }

    #[test]
    fn a_target_answers_the_keys_of_iser() {
        let mut target = Operational::new(offer()).over_rdma(Side::Target);
        let said = answers(
            &mut target,
            &[
                ("HeaderDigest", "CRC32C,None"),
                ("ErrorRecoveryLevel", "2"),
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
        let expected = "HeaderDigest=None\0ErrorRecoveryLevel=0\0InitiatorRecvDataSegmentLength=262144\0\
            TargetRecvDataSegmentLength=8192\0FirstBurstLength=8192\0RDMAExtensions=Yes\0";
        assert_eq!(said, expected);
        let mut out = Text::default();
        target.declare(&mut out);
        assert!(out.as_bytes().is_empty(), "MaxRecvDataSegmentLength means nothing");
        let agreed = target.finish().unwrap();
        assert_eq!(agreed.get(OperationalKey::MaxRecvDataSegmentLength), 8192);
        assert_eq!(agreed.max_send_data_segment_length(), 262_144);
        assert!(!agreed.is_on(OperationalKey::TaggedBufferForSolicitedDataOnly));
    }

    #[test]
    fn a_target_does_not_insist_on_being_told_but_takes_a_no() {
        let silent = Operational::new(offer()).over_rdma(Side::Target).finish().unwrap();
        assert!(
            silent.is_on(OperationalKey::RDMAExtensions)
                && silent.is_on(OperationalKey::TaggedBufferForSolicitedDataOnly)
        );
        let mut target = Operational::new(offer()).over_rdma(Side::Target);
        assert_eq!(answers(&mut target, &[("RDMAExtensions", "No")]), "RDMAExtensions=No\0");
        assert_eq!(target.finish(), Err(NegotiationError::NotIser));
    }

    #[test]
    fn an_initiator_proposes_iser_and_wants_to_hear_it() {
        let wishes =
            wishes().with(OperationalKey::HeaderDigest, CRC32C).requiring(OperationalKey::HeaderDigest);
        for (answer, is_iser) in [("Yes", true), ("No", false), ("NotUnderstood", false), ("Reject", false)] {
            let mut initiator = Operational::new(wishes).over_rdma(Side::Initiator);
            let mut out = Text::default();
            initiator.propose_all(&mut out);
            let said = String::from_utf8(out.as_bytes().to_vec()).unwrap();
            for pair in [
                "RDMAExtensions=Yes",
                "InitiatorRecvDataSegmentLength=8192",
                "TargetRecvDataSegmentLength=8192",
                "FirstBurstLength=8192",
                "ErrorRecoveryLevel=0",
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
    fn over_tcp_nobody_knows_the_keys_of_iser() {
        let mut target = Operational::new(offer());
        let keys = ["RDMAExtensions", "TargetRecvDataSegmentLength", "MaxOutstandingUnexpectedPDUs"];
        let said = answers(&mut target, &keys.map(|key| (key, "Yes")));
        let expected = "RDMAExtensions=No\0TargetRecvDataSegmentLength=NotUnderstood\0\
            MaxOutstandingUnexpectedPDUs=NotUnderstood\0";
        assert_eq!(said, expected);
        let mut out = Text::default();
        Operational::new(wishes()).propose_all(&mut out);
        let said = String::from_utf8(out.as_bytes().to_vec()).unwrap();
        assert!(!said.contains("RDMA") && !said.contains("RecvDataSegmentLength=8192"), "{said:?}");
    }
}
