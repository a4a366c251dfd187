//! The security stage, seen from the target: AuthMethod and CHAP (RFC 7143 §12.1).

use super::chap::{Algorithm, Challenge, MAX_BINARY};
use super::failure::{LoginFailure, authentication_failure, initiator_error};
use super::target::TargetLogin;
use crate::iscsi::node::Chap;
use crate::iscsi::text::{self, NONE, Pair, REJECT, Text};
use blockmux_wire::iscsi::session::Stage;

/// How far the initiator has proved who it is.
pub(super) enum Security {
    /// Nothing was said.
    Begins,
    /// CHAP it is; the algorithm is open.
    Chap,
    /// The initiator was challenged.
    Challenged { algorithm: Algorithm, challenge: Challenge },
    /// As much as is asked for.
    Done,
}

/// The pairs of one security request that go together.
#[derive(Default)]
pub(super) struct ChapPairs<'a> {
    pub(super) algorithms: Option<&'a str>,
    pub(super) name: Option<&'a str>,
    pub(super) response: Option<&'a str>,
    pub(super) identifier: Option<&'a str>,
    pub(super) challenge: Option<&'a str>,
}

impl TargetLogin {
    /// The first method of the initiator's list that is enough.
    pub(super) fn on_auth_method(&mut self, pair: Pair<'_>, out: &mut Text) -> Result<(), LoginFailure> {
        if self.stage != Stage::SECURITY_NEGOTIATION || !matches!(self.security, Security::Begins) {
            return Err(initiator_error("sent AuthMethod where it does not belong"));
        }
        let wanted = if self.chap().is_some() { "CHAP" } else { NONE };
        if !text::parse_list(pair.value).any(|method| method == wanted) {
            out.push(pair.key, REJECT);
            return Err(authentication_failure("offered no authentication that this target takes"));
        }
        out.push(pair.key, wanted);
        self.security = if wanted == NONE { Security::Done } else { Security::Chap };
        Ok(())
    }

    /// One step of CHAP (RFC 7143 §12.1.3).
    pub(super) fn on_chap(&mut self, pairs: &ChapPairs<'_>, out: &mut Text) -> Result<(), LoginFailure> {
        let any = [pairs.algorithms, pairs.name, pairs.response, pairs.identifier, pairs.challenge];
        if any.iter().all(Option::is_none) {
            return Ok(());
        }
        let Some(chap) = self.chap() else {
            return Err(authentication_failure("sent CHAP keys that nobody asked for"));
        };
        match &self.security {
            Security::Chap => {
                let list =
                    pairs.algorithms.ok_or_else(|| authentication_failure("sent CHAP keys out of turn"))?;
                let algorithm = text::parse_list(list)
                    .filter_map(|number| Algorithm::from_number(text::parse_number(number)?))
                    .find(|algorithm| chap.algorithms.contains(algorithm));
                let Some(algorithm) = algorithm else {
                    return Err(authentication_failure("offered no CHAP algorithm that this target takes"));
                };
                let challenge = Challenge::from_seed(self.seed);
                out.push_number("CHAP_A", algorithm.number());
                out.push_number("CHAP_I", challenge.identifier.into());
                out.push_binary("CHAP_C", &challenge.bytes);
                self.security = Security::Challenged { algorithm, challenge };
                Ok(())
            }
            Security::Challenged { algorithm, challenge } => {
                let (Some(name), Some(response)) = (pairs.name, pairs.response) else {
                    return Err(authentication_failure("sent CHAP keys out of turn"));
                };
                let response = text::parse_binary(response, MAX_BINARY).unwrap_or_default();
                if !challenge.is_met(*algorithm, &chap.initiator, name, &response) {
                    return Err(authentication_failure(WRONG_ANSWER));
                }
                let asked = counter_challenge(pairs)?;
                if let Some(asked) = asked {
                    prove_target(&chap, *algorithm, challenge, &asked, out)?;
                }
                self.security = Security::Done;
                Ok(())
            }
            Security::Begins | Security::Done => Err(authentication_failure("sent CHAP keys out of turn")),
        }
    }
}

impl LoginFailure {
    /// Whether a secret was guessed: then the answer has to wait.
    pub(in crate::iscsi) fn is_wrong_answer(&self) -> bool {
        self.what == WRONG_ANSWER
    }
}

/// What the initiator asks the target to prove, if it does.
fn counter_challenge(pairs: &ChapPairs<'_>) -> Result<Option<Challenge>, LoginFailure> {
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
    Ok(Some(Challenge { identifier, bytes }))
}

/// Answers the initiator's own challenge. A challenge that comes back is an attempt to have this
/// side compute the answer that the other owes (RFC 7143 §9.2.1).
fn prove_target(
    chap: &Chap,
    algorithm: Algorithm,
    own: &Challenge,
    asked: &Challenge,
    out: &mut Text,
) -> Result<(), LoginFailure> {
    let Some(credentials) = &chap.target else {
        return Err(authentication_failure("asked a target to authenticate that has no secret"));
    };
    if asked.bytes == own.bytes {
        return Err(authentication_failure("sent the target's own CHAP challenge back"));
    }
    out.push("CHAP_N", credentials.name());
    let response = algorithm.response(asked.identifier, credentials.secret(), &asked.bytes);
    out.push_binary("CHAP_R", &response);
    Ok(())
}

const WRONG_ANSWER: &str = "answered a CHAP challenge wrongly";
