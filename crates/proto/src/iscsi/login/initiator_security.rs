//! The security stage of the initiator: AuthMethod and CHAP (RFC 7143 §12.1).

use super::chap::{ChapAlgorithm, ChapChallenge, MAX_BINARY, SEED_LEN};
use super::refused::IscsiRefused;
use super::security::ChapPairs;
use crate::driver::session::ProtocolError;
use crate::iscsi::node::Chap;
use crate::iscsi::text::{self, NONE, TextBuilder};

/// State of the authentication of both sides.
pub(super) struct ChapExchange {
    chap: Option<Chap>,
    /// Whether a login without authentication is acceptable.
    accepts_none: bool,
    /// The challenge for the target.
    own: ChapChallenge,
    state: ChapState,
}

enum ChapState {
    /// AuthMethod was offered.
    Offered,
    /// The CHAP algorithms were offered.
    Algorithms,
    /// The target's challenge was answered with this algorithm.
    Answered(ChapAlgorithm),
    Done,
}

/// The result of processing the target's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChapStep {
    /// The exchange continues, and the stage cannot end yet.
    Continue,
    /// This side has sent its last keys.
    Last,
    /// Nothing is left to send.
    Done,
}

impl ChapExchange {
    /// The exchange with these credentials, if there are any. Mutual authentication rules out the
    /// method None, except for discovery, which only names addresses: the targets there have to
    /// authenticate.
    pub(super) fn new(chap: Option<Chap>, is_discovery: bool, seed: [u8; SEED_LEN]) -> ChapExchange {
        let accepts_none = is_discovery || chap.as_ref().is_none_or(|chap| chap.target.is_none());
        ChapExchange { chap, accepts_none, own: ChapChallenge::from_seed(seed), state: ChapState::Offered }
    }

    /// Offers the authentication methods; returns whether credentials are configured.
    pub(super) fn offer(&mut self, out: &mut TextBuilder) -> bool {
        let methods = match (&self.chap, self.accepts_none) {
            (Some(_), false) => "CHAP",
            (Some(_), true) => "CHAP,None",
            (None, _) => NONE,
        };
        out.push("AuthMethod", methods);
        self.chap.is_some()
    }

    /// Whether the target's challenge was answered, and the target has not accepted the answer.
    pub(super) fn is_answered(&self) -> bool {
        matches!(self.state, ChapState::Answered(_))
    }

    /// Processes a complete text of the target. The inner error is a refusal by either side.
    pub(super) fn on_text(
        &mut self,
        whole: &[u8],
        out: &mut TextBuilder,
    ) -> Result<Result<ChapStep, IscsiRefused>, ProtocolError> {
        let mut method = None;
        let mut pairs = ChapPairs::default();
        for pair in text::pairs(whole) {
            let pair = pair.map_err(|_| error("sent malformed login text"))?;
            match pair.key {
                "AuthMethod" => method = Some(pair.value),
                "CHAP_A" => pairs.algorithms = Some(pair.value),
                "CHAP_N" => pairs.name = Some(pair.value),
                "CHAP_R" => pairs.response = Some(pair.value),
                "CHAP_I" => pairs.identifier = Some(pair.value),
                "CHAP_C" => pairs.challenge = Some(pair.value),
                _ => {}
            }
        }
        match self.state {
            ChapState::Offered => Ok(self.on_method(method, out)),
            ChapState::Algorithms => self.on_challenge(&pairs, out).map(Ok),
            ChapState::Answered(algorithm) => Ok(self.on_proof(algorithm, &pairs)),
            ChapState::Done => Ok(Ok(ChapStep::Done)),
        }
    }

    fn on_method(&mut self, method: Option<&str>, out: &mut TextBuilder) -> Result<ChapStep, IscsiRefused> {
        match (method, &self.chap) {
            (Some("CHAP"), Some(chap)) => {
                let numbers: Vec<String> =
                    chap.algorithms.iter().map(|algorithm| algorithm.number().to_string()).collect();
                out.push("CHAP_A", &numbers.join(","));
                self.state = ChapState::Algorithms;
                Ok(ChapStep::Continue)
            }
            // Without an AuthMethod key, None applies.
            (None | Some(NONE), _) if self.accepts_none => {
                self.state = ChapState::Done;
                Ok(ChapStep::Done)
            }
            (None | Some(NONE), _) => Err(IscsiRefused::MutualAuthFailed),
            _ => Err(IscsiRefused::NoCommonAuthMethod),
        }
    }

    /// Answers the target's challenge, and challenges the target if configured.
    fn on_challenge(
        &mut self,
        pairs: &ChapPairs<'_>,
        out: &mut TextBuilder,
    ) -> Result<ChapStep, ProtocolError> {
        let Some(chap) = &self.chap else { return Err(error("sent CHAP keys that were not requested")) };
        let number = |value: Option<&str>| value.and_then(text::parse_number);
        let algorithm = number(pairs.algorithms)
            .and_then(ChapAlgorithm::from_number)
            .filter(|algorithm| chap.algorithms.contains(algorithm));
        let algorithm = algorithm.ok_or_else(|| error("chose a CHAP algorithm that was not offered"))?;
        let identifier = number(pairs.identifier).and_then(|number| u8::try_from(number).ok());
        let challenge = pairs.challenge.and_then(|value| text::parse_binary(value, MAX_BINARY));
        let (Some(identifier), Some(challenge)) = (identifier, challenge) else {
            return Err(error("sent a malformed CHAP challenge"));
        };
        if challenge == self.own.bytes {
            return Err(error("sent this side's own CHAP challenge back"));
        }
        out.push("CHAP_N", chap.initiator.name());
        out.push_binary("CHAP_R", &algorithm.response(identifier, chap.initiator.secret(), &challenge));
        if chap.target.is_some() {
            out.push_number("CHAP_I", self.own.identifier.into());
            out.push_binary("CHAP_C", &self.own.bytes);
        }
        self.state = ChapState::Answered(algorithm);
        Ok(ChapStep::Last)
    }

    /// Checks the target's response, if it was challenged.
    fn on_proof(
        &mut self,
        algorithm: ChapAlgorithm,
        pairs: &ChapPairs<'_>,
    ) -> Result<ChapStep, IscsiRefused> {
        if let Some(expected) = self.chap.as_ref().and_then(|chap| chap.target.as_ref()) {
            let (Some(name), Some(response)) = (pairs.name, pairs.response) else {
                return Err(IscsiRefused::MutualAuthFailed);
            };
            let response = text::parse_binary(response, MAX_BINARY).unwrap_or_default();
            if !self.own.is_met(algorithm, expected, name, &response) {
                return Err(IscsiRefused::MutualAuthFailed);
            }
        }
        self.state = ChapState::Done;
        Ok(ChapStep::Done)
    }
}

pub(super) fn error(what: &'static str) -> ProtocolError {
    ProtocolError { what, reference: "RFC 7143 §6.3, Login Phase" }
}
