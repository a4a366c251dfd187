//! A host's side of one queue's authentication.
//!
//! ```text
//!   Send(Negotiate) ▶ Receive ─Challenge─▶ Send(Reply) ▶ Receive ─Success1─┬──────────────────▶ Over
//!                        │                                  │              └▶ Send(Success2) ──▶ Over
//!                        └────── protocol violation ────────┴▶ Send(Failure2) ▶ Over
//! ```
//! A host with a controller secret requires the controller to authenticate. It accepts neither a
//! Success1 without a response nor a controller that does not require authentication.
//!
//! A host that requests a secure channel always sends a challenge, from which the PSK is derived.
//! Without a controller secret its sequence number is 0, and the controller does not authenticate.

use super::{
    AuthAlgorithms, AuthDirection, AuthNames, ChallengeGenerator, DhGroup, Hash, HostSecrets, MAX_MESSAGE,
    ResponseInput, head, is_same,
};
use crate::nvme::auth::psk::InputPsk;
use crate::nvme::nqn::Nqn;
use blockmux_wire::nvmeof::auth::*;
use std::fmt;
use std::sync::Arc;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// A host's credentials for one queue.
#[derive(Clone)]
pub struct HostCredentials {
    /// The host's secret, and the controller's if that has to authenticate too.
    pub secrets: Arc<HostSecrets>,
    /// Random and secret; challenges and exponents are derived from it.
    pub seed: [u8; 32],
    /// State of secure channel concatenation.
    pub concatenation: Concatenation,
}

/// State of secure channel concatenation on a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Concatenation {
    /// Not requested.
    #[default]
    None,
    /// A PSK has to be generated, and the admin queue has to reconnect with it.
    Due,
    /// The connection uses a generated PSK, which has authenticated both sides.
    Done,
}

impl HostCredentials {
    /// The credentials for one queue, with a seed of its own.
    #[must_use]
    pub fn of_queue(self, qid: u16) -> HostCredentials {
        let mut seed = self.seed;
        let number = qid.to_le_bytes().into_iter();
        seed.iter_mut().rev().zip(number).for_each(|(byte, add)| *byte ^= add);
        HostCredentials { seed, ..self }
    }

    /// SC_C value for AUTH_Negotiate.
    fn sc_c(&self) -> u8 {
        match self.concatenation {
            Concatenation::Due => SC_C_NEW_TLS_PSK,
            Concatenation::None | Concatenation::Done => SC_C_NONE,
        }
    }
}

impl fmt::Debug for HostCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials")
    }
}

/// Reason for a failed authentication, as a host sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthFailure {
    /// The controller rejected the host, or the negotiation failed.
    #[error("controller rejected this host in DH-HMAC-CHAP: {}", said(*.0))]
    Rejected(Explanation),
    /// The controller closed the connection instead of its next message. Linux's does so when it
    /// rejects a host, and the end may overtake the message with the reason.
    #[error("controller closed the connection during DH-HMAC-CHAP: it probably rejected this host")]
    Closed,
    /// The controller's own response is wrong.
    #[error("controller failed to authenticate: wrong response")]
    WrongControllerResponse,
    /// The host requires the controller to authenticate, and the controller does not require
    /// authentication.
    #[error("controller has to authenticate and does not require DH-HMAC-CHAP")]
    NotRequired,
    /// The host needs a generated PSK, and the controller does not require authentication.
    #[error("controller does not require DH-HMAC-CHAP, so no key for a secure channel can be generated")]
    NoSecureChannel,
    /// The controller violated the DH-HMAC-CHAP protocol.
    #[error("controller {0}")]
    ProtocolViolation(&'static str),
}

/// The host's state of one queue's authentication.
pub struct HostAuthenticator {
    credentials: HostCredentials,
    names: AuthNames,
    random: ChallengeGenerator,
    t_id: u16,
    state: HostAuthState,
    /// What the controller has chosen.
    algorithms: Option<AuthAlgorithms>,
    /// The generated PSK, valid once authentication is finished.
    generated: Option<InputPsk>,
}

/// The next step of the authentication.
pub enum AuthStep<'a> {
    /// Send this message.
    Send(&'a [u8]),
    /// Receive the controller's next message, of at most [`MAX_MESSAGE`] bytes.
    Receive,
    /// Authentication is finished.
    Over(Result<(), AuthFailure>),
}

enum HostAuthState {
    /// Send a message, then enter the next state.
    Send(Vec<u8>, Box<HostAuthState>),
    Challenge,
    /// Waits for Success1, after the reply.
    Success1(ExpectedResponse),
    Over(Result<(), AuthFailure>),
}

/// The expected response of the controller.
struct ExpectedResponse {
    hash: Hash,
    /// The expected bytes; `None` if no response was requested.
    expected: Option<Vec<u8>>,
}

/// This side's challenge, from which a PSK may be derived as well.
struct OwnChallenge {
    bytes: Vec<u8>,
    seqnum: u32,
}

/// Explanation for the controller, and reason for the user.
type AuthError = (Explanation, AuthFailure);

impl HostAuthenticator {
    /// Creates the state for a host and a subsystem with these NQNs.
    #[must_use]
    pub fn new(credentials: HostCredentials, host: &Nqn, subsystem: &Nqn) -> HostAuthenticator {
        let mut random = ChallengeGenerator::new(credentials.seed);
        let [a, b, ..] = random.block();
        let t_id = u16::from_le_bytes([a, b]);
        let negotiate = negotiate(&credentials, t_id);
        HostAuthenticator {
            credentials,
            names: AuthNames { host: host.as_str().to_owned(), subsystem: subsystem.as_str().to_owned() },
            random,
            t_id,
            state: HostAuthState::Send(negotiate, Box::new(HostAuthState::Challenge)),
            algorithms: None,
            generated: None,
        }
    }

    /// The generated PSK, if one was requested and authentication is finished.
    #[must_use]
    pub fn generated(&self) -> Option<&InputPsk> {
        self.generated.as_ref().filter(|_| matches!(self.state, HostAuthState::Over(Ok(()))))
    }

    /// What the controller has chosen; `None` before its challenge.
    #[must_use]
    pub fn algorithms(&self) -> Option<AuthAlgorithms> {
        self.algorithms
    }

    /// The next step. Does not change the state.
    #[must_use]
    pub fn turn(&self) -> AuthStep<'_> {
        match &self.state {
            HostAuthState::Send(message, _) => AuthStep::Send(message),
            HostAuthState::Challenge | HostAuthState::Success1(_) => AuthStep::Receive,
            HostAuthState::Over(outcome) => AuthStep::Over(*outcome),
        }
    }

    /// The reason of a failure, available before it is sent to the controller.
    #[must_use]
    pub fn failure(&self) -> Option<AuthFailure> {
        let state = match &self.state {
            HostAuthState::Send(_, next) => &**next,
            state => state,
        };
        if let HostAuthState::Over(Err(unproved)) = state { Some(*unproved) } else { None }
    }

    /// Continues after the message was sent.
    pub fn on_sent(&mut self) {
        if let HostAuthState::Send(_, next) = &mut self.state {
            self.state = std::mem::replace(next, HostAuthState::Challenge);
        }
    }

    /// Handles a message of the controller, which may be followed by padding.
    pub fn on_message(&mut self, message: &[u8]) {
        self.state = self.take(message).unwrap_or_else(|(explanation, unproved)| {
            let failure = Failure {
                head: head(MessageType::COMMON.0, MessageId::FAILURE2.0, self.t_id),
                reason: REASON_AUTHENTICATION_FAILURE,
                explanation: explanation.0,
            };
            HostAuthState::Send(failure.as_bytes().to_vec(), Box::new(HostAuthState::Over(Err(unproved))))
        });
    }

    fn take(&mut self, message: &[u8]) -> Result<HostAuthState, AuthError> {
        let (begin, _) = Head::read_from_prefix(message).map_err(|_| payload("sent a truncated message"))?;
        let is_common = MessageType(begin.auth_type) == MessageType::COMMON;
        if is_common && MessageId(begin.auth_id) == MessageId::FAILURE1 {
            let (failure, _) =
                Failure::read_from_prefix(message).map_err(|_| payload("sent an incomplete failure"))?;
            return Ok(HostAuthState::Over(Err(AuthFailure::Rejected(Explanation(failure.explanation)))));
        }
        if begin.t_id.get() != self.t_id {
            return Err(out_of_turn("sent a message of another transaction"));
        }
        match (&self.state, is_common, MessageId(begin.auth_id)) {
            (HostAuthState::Challenge, false, MessageId::CHALLENGE) => self.answer(message),
            (HostAuthState::Success1(answered), false, MessageId::SUCCESS1) => {
                self.verify_controller(answered, message)
            }
            _ => Err(out_of_turn("sent a message of DH-HMAC-CHAP out of order")),
        }
    }

    /// Creates the reply to a challenge.
    fn answer(&mut self, message: &[u8]) -> Result<HostAuthState, AuthError> {
        let cut = || payload("sent a truncated challenge");
        let (header, rest) = Challenge::read_from_prefix(message).map_err(|_| cut())?;
        let secrets = self.credentials.secrets.clone();
        let sc_c = self.credentials.sc_c();
        let hash = hashes(&self.credentials).find(|hash| hash.id().0 == header.hash_id).ok_or((
            Explanation::HASH_NOT_USABLE,
            AuthFailure::ProtocolViolation("chose a hash function that it was not offered"),
        ))?;
        let group = groups(&self.credentials).find(|group| group.id().0 == header.dh_group_id).ok_or((
            Explanation::DH_GROUP_NOT_USABLE,
            AuthFailure::ProtocolViolation("chose a group that it was not offered"),
        ))?;
        self.algorithms = Some(AuthAlgorithms { hash, group });
        let (hl, dhvlen) = (usize::from(header.hl), usize::from(header.dhvlen.get()));
        if hl != hash.len() || dhvlen != group.len() {
            return Err(payload("sent a challenge with lengths of another hash function or group"));
        }
        let (challenge, rest) = rest.split_at_checked(hl).ok_or_else(cut)?;
        let exponential = rest.get(..dhvlen).ok_or_else(cut)?;
        let private = self.random.block();
        let session_key = match group {
            DhGroup::Null => None,
            group => {
                let key = group.shared(exponential, &private);
                Some(key.ok_or_else(|| payload("sent an invalid exponential"))?)
            }
        };
        let seqnum = header.seqnum.get();
        let proof = ResponseInput {
            hash,
            challenge,
            seqnum,
            t_id: self.t_id,
            sc_c,
            session_key: session_key.as_deref(),
        };
        let response = proof.response(AuthDirection::Host, &secrets.host, &self.names);
        let own = self.own_challenge(hl);
        let mut expected = None;
        if let Some(secret) = &secrets.controller {
            let proof = ResponseInput { challenge: &own.bytes, seqnum: own.seqnum, ..proof };
            expected = Some(proof.response(AuthDirection::Controller, secret, &self.names));
        }
        if let (SC_C_NEW_TLS_PSK, Some(key)) = (sc_c, &session_key) {
            let bytes = hash.hmac(&hash.digest(key), &[challenge, &own.bytes]);
            self.generated = InputPsk::generated(hash, bytes);
        }
        let reply = Reply {
            head: head(MessageType::DH_HMAC_CHAP.0, MessageId::REPLY.0, self.t_id),
            hl: header.hl,
            cvalid: (expected.is_some() || sc_c != SC_C_NONE).into(),
            dhvlen: header.dhvlen,
            seqnum: own.seqnum.into(),
            ..Reply::new_zeroed()
        };
        let reply = [reply.as_bytes(), &response, &own.bytes, &group.public(&private)].concat();
        Ok(HostAuthState::Send(reply, Box::new(HostAuthState::Success1(ExpectedResponse { hash, expected }))))
    }

    /// This side's challenge of `len` bytes; zeroes if no response is requested.
    fn own_challenge(&mut self, len: usize) -> OwnChallenge {
        let mut own = OwnChallenge { bytes: vec![0; len], seqnum: 0 };
        let proves = self.credentials.secrets.controller.is_some();
        if proves || self.credentials.sc_c() != SC_C_NONE {
            own.bytes.copy_from_slice(self.random.block().get(..len).unwrap_or_default());
        }
        if proves {
            own.seqnum = self.random.seqnum();
        }
        own
    }

    /// Checks the controller's response, if one was requested.
    fn verify_controller(
        &self,
        answered: &ExpectedResponse,
        message: &[u8],
    ) -> Result<HostAuthState, AuthError> {
        let cut = || payload("sent a truncated success");
        let (success, rest) = Success1::read_from_prefix(message).map_err(|_| cut())?;
        if usize::from(success.hl) != answered.hash.len() {
            return Err(payload("sent a success with the length of another hash function"));
        }
        let Some(expected) = &answered.expected else { return Ok(HostAuthState::Over(Ok(()))) };
        let response = rest.get(..expected.len()).ok_or_else(cut)?;
        if success.rvalid != 1 || !is_same(response, expected) {
            return Err((Explanation::AUTHENTICATION_FAILED, AuthFailure::WrongControllerResponse));
        }
        let mut success =
            head(MessageType::DH_HMAC_CHAP.0, MessageId::SUCCESS2.0, self.t_id).as_bytes().to_vec();
        success.resize(SUCCESS_2_LEN, 0);
        Ok(HostAuthState::Send(success, Box::new(HostAuthState::Over(Ok(())))))
    }
}

/// Encodes AUTH_Negotiate with what the secrets allow.
fn negotiate(credentials: &HostCredentials, t_id: u16) -> Vec<u8> {
    let mut protocol = Protocol { auth_id: AUTH_ID_DH_HMAC_CHAP, ..Protocol::new_zeroed() };
    for (place, hash) in protocol.hash_ids.iter_mut().zip(hashes(credentials)) {
        *place = hash.id().0;
        protocol.halen = protocol.halen.saturating_add(1);
    }
    for (place, group) in protocol.dh_group_ids.iter_mut().zip(groups(credentials)) {
        *place = group.id().0;
        protocol.dhlen = protocol.dhlen.saturating_add(1);
    }
    let head = head(MessageType::COMMON.0, MessageId::NEGOTIATE.0, t_id);
    [Negotiate { head, sc_c: credentials.sc_c(), napd: 1 }.as_bytes(), protocol.as_bytes()].concat()
}

/// Offered hash functions, the strongest first; for a PSK only those of a cipher suite.
fn hashes(credentials: &HostCredentials) -> impl Iterator<Item = Hash> + use<> {
    let (only, makes_key) = (credentials.secrets.hash, credentials.sc_c() != SC_C_NONE);
    let is_usable = move |hash: &Hash| hash.is_of_tls() || !makes_key;
    Hash::ALL.into_iter().filter(move |hash| is_usable(hash) && only.is_none_or(|only| only == *hash))
}

/// Offered groups, the fastest first, and the null group last; for a PSK without the null group.
fn groups(credentials: &HostCredentials) -> impl Iterator<Item = DhGroup> + use<> {
    let (only, makes_key) = (credentials.secrets.group, credentials.sc_c() != SC_C_NONE);
    let is_usable = move |group: &DhGroup| *group != DhGroup::Null || !makes_key;
    let [none, all @ ..] = DhGroup::ALL;
    let all = all.into_iter().chain([none]);
    all.filter(move |group| is_usable(group) && only.is_none_or(|only| only == *group))
}

fn payload(what: &'static str) -> AuthError {
    (Explanation::INCORRECT_PAYLOAD, AuthFailure::ProtocolViolation(what))
}

fn out_of_turn(what: &'static str) -> AuthError {
    (Explanation::INCORRECT_MESSAGE, AuthFailure::ProtocolViolation(what))
}

fn said(explanation: Explanation) -> String {
    let words = |name: &str| name.to_lowercase().replace('_', " ");
    explanation.name().map_or_else(|| format!("explanation {:#04x}", explanation.0), words)
}

/// Length of Success2: a header and ten bytes.
const SUCCESS_2_LEN: usize = 16;
const _: () = assert!(size_of::<Reply>() + 2 * 64 + 1024 <= MAX_MESSAGE);

#[cfg(test)]
mod tests {
    use super::super::DhChapSecret;
    use super::super::controller::tests::{
        ConfiguredController, authenticator as controller, negotiate, secrets,
    };
    use super::*;

    fn nqn(name: &str) -> Nqn {
        Nqn::new(name).unwrap()
    }

    fn applicant(secrets: HostSecrets) -> HostAuthenticator {
        applicant_for(secrets, Concatenation::None)
    }

    fn applicant_for(secrets: HostSecrets, concatenation: Concatenation) -> HostAuthenticator {
        let credentials = HostCredentials { secrets: Arc::new(secrets), seed: [9; 32], concatenation };
        HostAuthenticator::new(credentials, &nqn("nqn.h"), &nqn("nqn.s"))
    }

    fn due(host: &HostAuthenticator) -> Vec<u8> {
        match host.turn() {
            AuthStep::Send(message) => message.to_vec(),
            _ => panic!("nothing is to be sent"),
        }
    }

    /// Exchanges messages until the host is finished.
    fn talk(host: &mut HostAuthenticator, target: &mut ConfiguredController) -> Result<(), AuthFailure> {
        for _ in 0..8 {
            match host.turn() {
                AuthStep::Send(message) => {
                    target.on_message(message);
                    host.on_sent();
                }
                AuthStep::Receive => {
                    let mut message = target.message(MAX_MESSAGE).unwrap();
                    message.resize(MAX_MESSAGE, 0);
                    host.on_message(&message);
                }
                AuthStep::Over(outcome) => return outcome,
            }
        }
        panic!("it goes on and on");
    }

    /// A host and a controller, and the controller's challenge.
    fn challenged(asks: bool) -> (HostAuthenticator, ConfiguredController, Vec<u8>) {
        let group = Some(DhGroup::Ffdhe2048);
        let controller_secret = secrets(None, group).controller.filter(|_| asks);
        let mut host = applicant(HostSecrets { controller: controller_secret, ..secrets(None, group) });
        let mut target = controller(secrets(None, group));
        target.on_message(&due(&host));
        host.on_sent();
        let challenge = target.message(MAX_MESSAGE).unwrap();
        (host, target, challenge)
    }

    #[test]
    fn a_host_and_our_controller_agree_with_every_hash_and_group() {
        for hash in Hash::ALL {
            for group in DhGroup::ALL {
                // Slow combinations run once: responses do not depend on which side asks.
                let is_long = !matches!(group, DhGroup::Null | DhGroup::Ffdhe2048);
                if is_long && hash != Hash::Sha384 {
                    continue;
                }
                for asks in if is_long { &[true][..] } else { &[false, true] } {
                    let both = secrets(Some(hash), Some(group));
                    let controllers = both.controller.clone().filter(|_| *asks);
                    let own = HostSecrets { controller: controllers, ..both.clone() };
                    let (mut host, mut target) = (applicant(own), controller(both));
                    assert_eq!(talk(&mut host, &mut target), Ok(()), "{hash:?} {group:?}");
                    assert!(target.is_done());
                }
            }
        }
    }

    #[test]
    fn by_default_everything_is_offered_and_the_null_group_last() {
        let message = due(&applicant(secrets(None, None)));
        let (hashes, groups) = ([3, 2, 1], [1, 2, 3, 4, 5, 0]);
        let mut expected = negotiate(&hashes, &groups);
        expected[4..6].copy_from_slice(&message[4..6]);
        assert_eq!(message, expected);
        let mut host = applicant(secrets(None, None));
        assert_eq!(talk(&mut host, &mut controller(secrets(None, None))), Ok(()));
    }

    #[test]
    fn both_sides_generate_the_same_psk_with_and_without_a_controller_secret() {
        for hash in [Hash::Sha256, Hash::Sha384] {
            for asks in [false, true] {
                let both = secrets(Some(hash), Some(DhGroup::Ffdhe2048));
                let own =
                    HostSecrets { controller: both.controller.clone().filter(|_| asks), ..both.clone() };
                let mut host = applicant_for(own.clone(), Concatenation::Due);
                let mut target = controller(both.clone()).with_secure_channel(SC_C_NEW_TLS_PSK);
                assert!(host.generated().is_none());
                assert_eq!(talk(&mut host, &mut target), Ok(()));
                assert!(host.generated().is_some() && host.generated() == target.take_generated().as_ref());
                // A connection with a generated PSK generates no other.
                let mut host = applicant_for(own, Concatenation::Done);
                assert_eq!(talk(&mut host, &mut controller(both)), Ok(()));
                assert!(host.generated().is_none());
            }
        }
    }

    #[test]
    fn a_psk_is_requested_only_with_suitable_hashes_and_groups() {
        let message = due(&applicant_for(secrets(None, None), Concatenation::Due));
        let mut expected = negotiate(&[2, 1], &[1, 2, 3, 4, 5]);
        expected[4..6].copy_from_slice(&message[4..6]);
        expected[6] = SC_C_NEW_TLS_PSK;
        assert_eq!(message, expected);
        // A controller that generates no PSK reports it, and a controller with a wrong response
        // gets none.
        let both = secrets(None, Some(DhGroup::Ffdhe2048));
        let mismatch = AuthFailure::Rejected(Explanation::SECURE_CHANNEL_CONCATENATION_MISMATCH);
        let mut host = applicant_for(both.clone(), Concatenation::Due);
        assert_eq!(talk(&mut host, &mut controller(both.clone())), Err(mismatch));
        let impostor = HostSecrets { controller: Some(both.host.clone()), ..both.clone() };
        let mut host = applicant_for(both, Concatenation::Due);
        let mut target = controller(impostor).with_secure_channel(SC_C_NEW_TLS_PSK);
        assert_eq!(talk(&mut host, &mut target), Err(AuthFailure::WrongControllerResponse));
        assert!(host.generated().is_none() && target.take_generated().is_none());
    }

    #[test]
    fn a_wrong_secret_is_reported_for_the_right_side() {
        let group = Some(DhGroup::Ffdhe2048);
        let right = secrets(None, group);
        let other = right.controller.clone().unwrap();
        let mut host = applicant(HostSecrets { host: other, ..right.clone() });
        let failed = AuthFailure::Rejected(Explanation::AUTHENTICATION_FAILED);
        assert_eq!(talk(&mut host, &mut controller(right.clone())), Err(failed));
        assert_eq!(
            failed.to_string(),
            "controller rejected this host in DH-HMAC-CHAP: authentication failed"
        );
        let impostor = HostSecrets { controller: Some(right.host.clone()), ..right.clone() };
        let mut target = controller(impostor);
        assert_eq!(talk(&mut applicant(right), &mut target), Err(AuthFailure::WrongControllerResponse));
        assert!(target.has_failed() && !target.is_done());
        let narrow = |hash| secrets(Some(hash), group);
        let unusable = Err(AuthFailure::Rejected(Explanation::HASH_NOT_USABLE));
        let mut host = applicant(narrow(Hash::Sha256));
        assert_eq!(talk(&mut host, &mut controller(narrow(Hash::Sha384))), unusable);
    }

    /// Corrupts a message.
    type CorruptMessage = fn(&mut Vec<u8>);

    #[test]
    fn an_invalid_challenge_is_answered_with_a_failure() {
        let corruptions: [(CorruptMessage, Explanation); 9] = [
            (|message| message.truncate(5), Explanation::INCORRECT_PAYLOAD),
            (|message| message.truncate(100), Explanation::INCORRECT_PAYLOAD),
            (|message| message[4] ^= 1, Explanation::INCORRECT_MESSAGE),
            (|message| message[1] = MessageId::SUCCESS1.0, Explanation::INCORRECT_MESSAGE),
            (|message| message[6] = 32, Explanation::INCORRECT_PAYLOAD),
            (|message| message[8] = 9, Explanation::HASH_NOT_USABLE),
            (|message| message[9] = 5, Explanation::DH_GROUP_NOT_USABLE),
            (|message| message[11] = 4, Explanation::INCORRECT_PAYLOAD),
            (|message| message[16 + 64..].fill(0), Explanation::INCORRECT_PAYLOAD),
        ];
        for (nth, (spoil, said)) in corruptions.into_iter().enumerate() {
            let (mut host, _, mut challenge) = challenged(false);
            spoil(&mut challenge);
            host.on_message(&challenge);
            let failure = Failure::read_from_bytes(&due(&host)).unwrap();
            assert_eq!((failure.head.auth_id, failure.explanation), (0xf0, said.0), "{nth}");
            host.on_sent();
            assert!(matches!(host.turn(), AuthStep::Over(Err(AuthFailure::ProtocolViolation(_)))), "{nth}");
        }
    }

    #[test]
    fn a_controller_cannot_evade_its_authentication() {
        let corruptions: [(CorruptMessage, bool); 4] = [
            (|message| message[8] = 0, true),
            (|message| message[16] ^= 1, true),
            (|message| message[6] = 32, false),
            (|message| message.truncate(20), false),
        ];
        for (spoil, is_impostor) in corruptions {
            let (mut host, mut target, challenge) = challenged(true);
            host.on_message(&challenge);
            target.on_message(&due(&host));
            host.on_sent();
            let mut success = target.message(MAX_MESSAGE).unwrap();
            spoil(&mut success);
            host.on_message(&success);
            target.on_message(&due(&host));
            host.on_sent();
            let AuthStep::Over(Err(unproved)) = host.turn() else { panic!("it is believed") };
            assert_eq!(unproved == AuthFailure::WrongControllerResponse, is_impostor);
            assert!(!target.is_done());
        }
    }

    #[test]
    fn debug_output_shows_no_secret() {
        let (secrets, concatenation) = (Arc::new(secrets(None, None)), Concatenation::None);
        let credentials = HostCredentials { secrets, seed: [0x77; 32], concatenation };
        assert_eq!(format!("{credentials:?}"), "Credentials");
        assert!(
            DhChapSecret::parse("DHHC-1:00:secret:")
                .is_err_and(|error| !error.to_string().contains("secret:"))
        );
    }
}
