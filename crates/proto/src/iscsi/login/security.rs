//! The security stage of the target: AuthMethod and CHAP (RFC 7143 §12.1).

use super::chap::{ChapAlgorithm, ChapChallenge, MAX_BINARY};
use super::failure::{LoginFailure, authentication_failure, initiator_error};
use super::target::TargetLogin;
use crate::iscsi::node::Chap;
use crate::iscsi::text::{self, KeyValue, NONE, REJECT, TextBuilder};
use blockmux_wire::iscsi::session::Stage;

/// Progress of the initiator's authentication.
pub(super) enum SecurityState {
    /// No method was negotiated.
    NotStarted,
    /// CHAP was selected; the algorithm is open.
    Chap,
    /// The initiator was challenged.
    Challenged { algorithm: ChapAlgorithm, challenge: ChapChallenge },
    /// Authentication is complete, or not required.
    Done { is_authenticated: bool },
}

impl SecurityState {
    /// No authentication is required.
    pub(super) const NOT_REQUIRED: SecurityState = SecurityState::Done { is_authenticated: false };
}

/// The CHAP keys of one request.
#[derive(Default)]
pub(super) struct ChapPairs<'a> {
    pub(super) algorithms: Option<&'a str>,
    pub(super) name: Option<&'a str>,
    pub(super) response: Option<&'a str>,
    pub(super) identifier: Option<&'a str>,
    pub(super) challenge: Option<&'a str>,
}

impl TargetLogin {
    /// Selects the first sufficient method of the initiator's list.
    pub(super) fn on_auth_method(
        &mut self,
        pair: KeyValue<'_>,
        out: &mut TextBuilder,
    ) -> Result<(), LoginFailure> {
        if self.stage != Stage::SECURITY_NEGOTIATION || !matches!(self.security, SecurityState::NotStarted) {
            return Err(initiator_error("sent AuthMethod where it does not belong"));
        }
        let method = if self.chap().is_some() { "CHAP" } else { NONE };
        if !text::parse_list(pair.value).any(|offered| offered == method) {
            out.push(pair.key, REJECT);
            return Err(authentication_failure("offered no authentication method that this target accepts"));
        }
        out.push(pair.key, method);
        self.security = match method {
            NONE => SecurityState::NOT_REQUIRED,
            _ => SecurityState::Chap,
        };
        Ok(())
    }

    /// Processes a CHAP step (RFC 7143 §12.1.3).
    pub(super) fn on_chap(
        &mut self,
        pairs: &ChapPairs<'_>,
        out: &mut TextBuilder,
    ) -> Result<(), LoginFailure> {
        let any = [pairs.algorithms, pairs.name, pairs.response, pairs.identifier, pairs.challenge];
        if any.iter().all(Option::is_none) {
            return Ok(());
        }
        let Some(chap) = self.chap() else {
            return Err(authentication_failure("sent CHAP keys that were not requested"));
        };
        match &self.security {
            SecurityState::Chap => {
                let list =
                    pairs.algorithms.ok_or_else(|| authentication_failure("sent CHAP keys out of order"))?;
                let algorithm = text::parse_list(list)
                    .filter_map(|number| ChapAlgorithm::from_number(text::parse_number(number)?))
                    .find(|algorithm| chap.algorithms.contains(algorithm));
                let Some(algorithm) = algorithm else {
                    return Err(authentication_failure("offered no CHAP algorithm that this target accepts"));
                };
                let challenge = ChapChallenge::from_seed(self.seed);
                out.push_number("CHAP_A", algorithm.number());
                out.push_number("CHAP_I", challenge.identifier.into());
                out.push_binary("CHAP_C", &challenge.bytes);
                self.security = SecurityState::Challenged { algorithm, challenge };
                Ok(())
            }
            SecurityState::Challenged { algorithm, challenge } => {
                let (Some(name), Some(response)) = (pairs.name, pairs.response) else {
                    return Err(authentication_failure("sent CHAP keys out of order"));
                };
                let response = text::parse_binary(response, MAX_BINARY).unwrap_or_default();
                if !challenge.is_met(*algorithm, &chap.initiator, name, &response) {
                    return Err(authentication_failure(WRONG_RESPONSE));
                }
                let peer = mutual_challenge(pairs)?;
                if let Some(peer) = peer {
                    answer_challenge(&chap, *algorithm, challenge, &peer, out)?;
                }
                self.security = SecurityState::Done { is_authenticated: true };
                Ok(())
            }
            SecurityState::NotStarted | SecurityState::Done { .. } => {
                Err(authentication_failure("sent CHAP keys out of order"))
            }
        }
    }
}

impl LoginFailure {
    /// Whether the CHAP response was wrong, so that the refusal must be delayed.
    pub(in crate::iscsi) fn is_wrong_chap_response(&self) -> bool {
        self.what == WRONG_RESPONSE
    }
}

/// The initiator's challenge for mutual authentication, if it sent one.
fn mutual_challenge(pairs: &ChapPairs<'_>) -> Result<Option<ChapChallenge>, LoginFailure> {
    let (Some(identifier), Some(challenge)) = (pairs.identifier, pairs.challenge) else {
        return match (pairs.identifier, pairs.challenge) {
            (None, None) => Ok(None),
            _ => Err(authentication_failure("sent CHAP_I without CHAP_C, or the reverse")),
        };
    };
    let identifier = text::parse_number(identifier).and_then(|number| u8::try_from(number).ok());
    let (Some(identifier), Some(bytes)) = (identifier, text::parse_binary(challenge, MAX_BINARY)) else {
        return Err(authentication_failure("sent a malformed CHAP challenge"));
    };
    Ok(Some(ChapChallenge { identifier, bytes }))
}

/// Answers the initiator's challenge. A reflected challenge is rejected: its response would be the
/// one that the initiator owes (RFC 7143 §9.2.1).
fn answer_challenge(
    chap: &Chap,
    algorithm: ChapAlgorithm,
    own: &ChapChallenge,
    peer: &ChapChallenge,
    out: &mut TextBuilder,
) -> Result<(), LoginFailure> {
    let Some(credentials) = &chap.target else {
        return Err(authentication_failure("requested mutual authentication from a target without a secret"));
    };
    if peer.bytes == own.bytes {
        return Err(authentication_failure("sent the target's own CHAP challenge back"));
    }
    out.push("CHAP_N", credentials.name());
    let response = algorithm.response(peer.identifier, credentials.secret(), &peer.bytes);
    out.push_binary("CHAP_R", &response);
    Ok(())
}

const WRONG_RESPONSE: &str = "sent a wrong CHAP response";
