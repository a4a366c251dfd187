//! A controller's side of one queue's authentication.

use super::{
    AuthAlgorithms, AuthDirection, AuthNames, ChallengeGenerator, DhGroup, Hash, HostSecrets, MAX_MESSAGE,
    ResponseInput, head, is_same,
};
use crate::driver::computation::{Computation, Helpers};
use crate::nvme::auth::psk::InputPsk;
use blockmux_wire::nvmeof::auth::*;
use std::sync::Arc;
use zerocopy::{FromBytes, IntoBytes};

/// The controller's state of one queue's authentication. A host may authenticate again at any time,
/// and each time with the secrets that are configured then, so that they can be replaced while it
/// is connected.
pub struct Authenticator {
    names: AuthNames,
    random: ChallengeGenerator,
    t_id: u16,
    state: ControllerAuthState,
    /// Where exponentiations run.
    helpers: Option<Helpers>,
    /// The SC_C value that a host may request, besides none.
    secure_channel: u8,
    /// The generated PSK, valid once authentication is finished.
    generated: Option<InputPsk>,
    /// Whether the host is authenticated, and the controller too if the host asked for it.
    is_done: bool,
    /// Why the authentication failed, for this side's log.
    failure_reason: &'static str,
    /// What was negotiated, for this side's log.
    algorithms: Option<AuthAlgorithms>,
}

/// Why a message of the host is refused.
struct AuthRejection {
    /// For the host.
    explanation: Explanation,
    /// For this side's log.
    reason: &'static str,
}

impl From<Explanation> for AuthRejection {
    fn from(explanation: Explanation) -> AuthRejection {
        AuthRejection { explanation, reason: reason(explanation) }
    }
}

/// The next message, and which side sends it.
enum ControllerAuthState {
    /// The host's AUTH_Negotiate.
    Negotiate,
    /// This side's challenge, once its exponential is computed.
    Exponential(NegotiatedAuth, Computation<Vec<u8>>),
    /// This side's challenge, with its exponential.
    Challenge(NegotiatedAuth, Vec<u8>),
    /// The host's reply.
    Reply(NegotiatedAuth),
    /// The outcome of the host's reply, once the session key is computed; `None` if the host's
    /// exponential is invalid.
    SessionKey(NegotiatedAuth, Vec<u8>, Computation<Option<Vec<u8>>>),
    /// This side's Success1, with the response to the host's challenge if there was one.
    Success1(Hash, Option<Vec<u8>>),
    /// The host's Success2.
    Success2,
    /// This side's Failure1.
    Failure(Explanation),
    /// The failure was reported; no message follows.
    Failed,
}

/// Negotiated parameters, and this side's share of the exchange.
#[derive(Clone)]
struct NegotiatedAuth {
    secrets: Arc<HostSecrets>,
    hash: Hash,
    group: DhGroup,
    challenge: Vec<u8>,
    seqnum: u32,
    private: [u8; 64],
    sc_c: u8,
}

impl Authenticator {
    /// Creates the state for a host and a subsystem with these NQNs. `seed` must be random and
    /// secret.
    #[must_use]
    pub fn new(host: &str, subsystem: &str, seed: [u8; 32]) -> Authenticator {
        Authenticator {
            names: AuthNames { host: host.to_owned(), subsystem: subsystem.to_owned() },
            random: ChallengeGenerator::new(seed),
            t_id: 0,
            state: ControllerAuthState::Negotiate,
            helpers: None,
            secure_channel: SC_C_NONE,
            generated: None,
            is_done: false,
            failure_reason: "",
            algorithms: None,
        }
    }

    /// Computes exponentials on another thread, if there are helpers.
    #[must_use]
    pub fn with_helpers(mut self, helpers: Option<Helpers>) -> Authenticator {
        self.helpers = helpers;
        self
    }

    /// Allows a host to request a secure channel with this SC_C value.
    #[must_use]
    pub fn with_secure_channel(mut self, sc_c: u8) -> Authenticator {
        self.secure_channel = sc_c;
        self
    }

    /// The state for a host that the PSK of its connection has authenticated. It may authenticate
    /// again.
    #[must_use]
    pub fn authenticated(self) -> Authenticator {
        Authenticator { is_done: true, ..self }
    }

    /// Takes the generated PSK, once the host is authenticated.
    pub fn take_generated(&mut self) -> Option<InputPsk> {
        if self.is_done { self.generated.take() } else { None }
    }

    /// Whether the host is authenticated.
    #[inline]
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.is_done
    }

    /// Whether authentication has failed and the failure was sent to the host.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        matches!(self.state, ControllerAuthState::Failed)
    }

    /// Why the authentication failed, and with which algorithms, for this side's log.
    #[must_use]
    pub fn why_failed(&self) -> String {
        let reason = self.failure_reason;
        match self.algorithms {
            Some(algorithms) => format!("{reason} ({algorithms})"),
            None => reason.to_owned(),
        }
    }

    /// Handles a message of the host, whose secrets are `secrets` at present.
    pub fn on_message(&mut self, message: &[u8], secrets: impl FnOnce() -> Option<Arc<HostSecrets>>) {
        let next = self.take(message, secrets);
        self.enter(next);
        self.is_computing();
    }

    /// Goes on with the next message, or with the report of a failure.
    fn enter(&mut self, next: Result<ControllerAuthState, AuthRejection>) {
        self.state = next.unwrap_or_else(|rejection| {
            self.is_done = false;
            self.failure_reason = rejection.reason;
            ControllerAuthState::Failure(rejection.explanation)
        });
    }

    /// Whether the next message to the host depends on a computation that is not done. Helpers
    /// notify the session when it is.
    pub fn is_computing(&mut self) -> bool {
        match &mut self.state {
            ControllerAuthState::Exponential(terms, exponential) => {
                let Some(exponential) = exponential.take() else { return true };
                self.state = ControllerAuthState::Challenge(terms.clone(), exponential);
            }
            ControllerAuthState::SessionKey(terms, reply, key) => {
                let Some(key) = key.take() else { return true };
                let (terms, reply) = (terms.clone(), std::mem::take(reply));
                let key = key.ok_or(AuthRejection::from(Explanation::INCORRECT_PAYLOAD));
                let next = key.and_then(|key| self.verify(&terms, &reply, Some(&key)));
                self.enter(next);
            }
            _ => {}
        }
        false
    }

    /// The next message to the host, if it is no longer than `most` bytes and does not depend on a
    /// computation that is not done.
    pub fn message(&mut self, most: usize) -> Option<Vec<u8>> {
        if self.is_computing() {
            return None;
        }
        let (message, next) = match &self.state {
            ControllerAuthState::Challenge(terms, exponential) => {
                (self.challenge(terms, exponential), ControllerAuthState::Reply(terms.clone()))
            }
            ControllerAuthState::Success1(hash, proof) => {
                let next = if proof.is_some() {
                    ControllerAuthState::Success2
                } else {
                    ControllerAuthState::Negotiate
                };
                (self.success_1(*hash, proof.as_deref()), next)
            }
            ControllerAuthState::Failure(explanation) => {
                (self.failure(*explanation), ControllerAuthState::Failed)
            }
            // The host has to send the next message.
            ControllerAuthState::Negotiate
            | ControllerAuthState::Reply(_)
            | ControllerAuthState::Success2 => {
                self.failure_reason = reason(Explanation::INCORRECT_MESSAGE);
                (self.failure(Explanation::INCORRECT_MESSAGE), ControllerAuthState::Failed)
            }
            ControllerAuthState::Failed
            | ControllerAuthState::Exponential(..)
            | ControllerAuthState::SessionKey(..) => return None,
        };
        if message.len() > most {
            return None;
        }
        self.is_done |= matches!(
            (&self.state, &next),
            (ControllerAuthState::Success1(..), ControllerAuthState::Negotiate)
        );
        self.is_done &= !matches!(next, ControllerAuthState::Failed);
        self.state = next;
        Some(message)
    }

    fn take(
        &mut self,
        message: &[u8],
        secrets: impl FnOnce() -> Option<Arc<HostSecrets>>,
    ) -> Result<ControllerAuthState, AuthRejection> {
        let (begin, _) = Head::read_from_prefix(message).map_err(|_| Explanation::INCORRECT_PAYLOAD)?;
        let is_common = MessageType(begin.auth_type) == MessageType::COMMON;
        let is_ours = begin.t_id.get() == self.t_id;
        match (&self.state, is_common, MessageId(begin.auth_id)) {
            // A host may authenticate again once authentication is finished.
            (ControllerAuthState::Negotiate, true, MessageId::NEGOTIATE) => {
                (self.t_id, self.algorithms) = (begin.t_id.get(), None);
                let secrets = secrets().ok_or(AuthRejection {
                    explanation: Explanation::AUTHENTICATION_FAILED,
                    reason: "the host no longer has a secret here",
                })?;
                let terms = self.negotiate(message, secrets)?;
                let (group, private) = (terms.group, terms.private);
                let exponential = self.compute(group, move || group.public(&private));
                Ok(ControllerAuthState::Exponential(terms, exponential))
            }
            (ControllerAuthState::Reply(terms), false, MessageId::REPLY) if is_ours => {
                let terms = terms.clone();
                self.reply(&terms, message)
            }
            (ControllerAuthState::Success2, false, MessageId::SUCCESS2) if is_ours => {
                self.is_done = true;
                Ok(ControllerAuthState::Negotiate)
            }
            // The host rejected the controller's response.
            (ControllerAuthState::Success2, true, MessageId::FAILURE2) => {
                self.failure_reason = "the host does not accept the controller's secret";
                Ok(ControllerAuthState::Failed)
            }
            _ => Err(Explanation::INCORRECT_MESSAGE.into()),
        }
    }

    /// Starts a computation in a group; the null group has none.
    fn compute<T: Send + 'static>(
        &self,
        group: DhGroup,
        compute: impl FnOnce() -> T + Send + 'static,
    ) -> Computation<T> {
        let helpers = self.helpers.as_ref().filter(|_| group != DhGroup::Null);
        Computation::start(helpers, compute)
    }

    /// Chooses hash function and group among those that the host offers.
    fn negotiate(
        &mut self,
        message: &[u8],
        secrets: Arc<HostSecrets>,
    ) -> Result<NegotiatedAuth, AuthRejection> {
        let wrong = Explanation::INCORRECT_PAYLOAD;
        let (negotiate, rest) = Negotiate::read_from_prefix(message).map_err(|_| wrong)?;
        let sc_c = negotiate.sc_c;
        if sc_c != SC_C_NONE && sc_c != self.secure_channel {
            return Err(Explanation::SECURE_CHANNEL_CONCATENATION_MISMATCH.into());
        }
        let len = usize::from(negotiate.napd).saturating_mul(size_of::<Protocol>());
        let protocols = <[Protocol]>::ref_from_bytes(rest.get(..len).ok_or(wrong)?).map_err(|_| wrong)?;
        let ours = protocols.iter().find(|protocol| protocol.auth_id == AUTH_ID_DH_HMAC_CHAP);
        let ours = ours.ok_or(Explanation::PROTOCOL_NOT_USABLE)?;
        let hashes = ours.hash_ids.get(..ours.halen.into()).ok_or(wrong)?;
        let groups = ours.dh_group_ids.get(..ours.dhlen.into()).ok_or(wrong)?;
        let is_usable = |hash: &Hash| {
            (sc_c == SC_C_NONE || hash.is_of_tls())
                && secrets.hash.is_none_or(|only| only == *hash)
                && hashes.contains(&hash.id().0)
        };
        let hash = Hash::ALL.into_iter().find(is_usable).ok_or(Explanation::HASH_NOT_USABLE)?;
        let is_usable = |group: &DhGroup| {
            let is_wanted = match secrets.group {
                Some(only) => only == *group,
                None => *group != DhGroup::Null,
            };
            // The PSK is derived from the exchange, so a group is needed.
            let is_wanted = is_wanted && (sc_c == SC_C_NONE || *group != DhGroup::Null);
            is_wanted && groups.contains(&group.id().0)
        };
        let group = DhGroup::ALL.into_iter().find(is_usable).ok_or(Explanation::DH_GROUP_NOT_USABLE)?;
        self.algorithms = Some(AuthAlgorithms { hash, group });
        let mut challenge = self.random.block().to_vec();
        challenge.truncate(hash.len());
        Ok(NegotiatedAuth {
            secrets,
            hash,
            group,
            challenge,
            seqnum: self.random.seqnum(),
            private: self.random.block(),
            sc_c,
        })
    }

    /// Checks the form of the host's reply, and starts to compute the session key.
    fn reply(
        &mut self,
        terms: &NegotiatedAuth,
        message: &[u8],
    ) -> Result<ControllerAuthState, AuthRejection> {
        let wrong = Explanation::INCORRECT_PAYLOAD;
        let (reply, rest) = Reply::read_from_prefix(message).map_err(|_| wrong)?;
        let NegotiatedAuth { hash, group, private, .. } = terms;
        let (hl, group, private) = (hash.len(), *group, *private);
        if usize::from(reply.hl) != hl || usize::from(reply.dhvlen.get()) != group.len() || reply.cvalid > 1 {
            return Err(wrong.into());
        }
        if group == DhGroup::Null {
            return self.verify(terms, message, None);
        }
        let exponential = rest.get(hl.saturating_mul(2)..).and_then(|rest| rest.get(..group.len()));
        let exponential = exponential.ok_or(wrong)?.to_vec();
        let key = self.compute(group, move || group.shared(&exponential, &private));
        Ok(ControllerAuthState::SessionKey(terms.clone(), message.to_vec(), key))
    }

    /// Checks the host's response, and creates this side's response if the host wants one.
    fn verify(
        &mut self,
        terms: &NegotiatedAuth,
        message: &[u8],
        key: Option<&[u8]>,
    ) -> Result<ControllerAuthState, AuthRejection> {
        let wrong = Explanation::INCORRECT_PAYLOAD;
        let (reply, rest) = Reply::read_from_prefix(message).map_err(|_| wrong)?;
        let NegotiatedAuth { secrets, hash, challenge, seqnum, sc_c, .. } = terms;
        let hl = hash.len();
        let (response, rest) = rest.split_at_checked(hl).ok_or(wrong)?;
        let (own_challenge, _) = rest.split_at_checked(hl).ok_or(wrong)?;
        let t_id = self.t_id;
        let proof =
            ResponseInput { hash: *hash, challenge, seqnum: *seqnum, t_id, session_key: key, sc_c: *sc_c };
        let expected = proof.response(AuthDirection::Host, &secrets.host, &self.names);
        if !is_same(response, &expected) {
            return Err(Explanation::AUTHENTICATION_FAILED.into());
        }
        self.generated = None;
        if let (true, Some(key)) = (*sc_c != SC_C_NONE, key) {
            if reply.cvalid == 0 {
                return Err(wrong.into());
            }
            let bytes = hash.hmac(&hash.digest(key), &[challenge, own_challenge]);
            self.generated = InputPsk::generated(*hash, bytes);
        }
        // With sequence number 0, the challenge serves the PSK only (Base 2.2 §8.3.4.5.4).
        let is_for_key = *sc_c != SC_C_NONE && reply.seqnum.get() == 0;
        if reply.cvalid == 0 || is_for_key {
            return Ok(ControllerAuthState::Success1(*hash, None));
        }
        let secret = secrets.controller.as_ref().ok_or(AuthRejection {
            explanation: Explanation::AUTHENTICATION_FAILED,
            reason: "the host wants the controller to authenticate, which has no dhchap_ctrl_secret_file",
        })?;
        let proof = ResponseInput { challenge: own_challenge, seqnum: reply.seqnum.get(), ..proof };
        let response = proof.response(AuthDirection::Controller, secret, &self.names);
        Ok(ControllerAuthState::Success1(*hash, Some(response)))
    }

    fn challenge(&self, terms: &NegotiatedAuth, public: &[u8]) -> Vec<u8> {
        let message = Challenge {
            head: head(MessageType::DH_HMAC_CHAP.0, MessageId::CHALLENGE.0, self.t_id),
            hl: terms.hash.len() as u8,
            reserved: 0,
            hash_id: terms.hash.id().0,
            dh_group_id: terms.group.id().0,
            // At most 1,024.
            dhvlen: (public.len() as u16).into(),
            seqnum: terms.seqnum.into(),
        };
        [message.as_bytes(), &terms.challenge, public].concat()
    }

    fn success_1(&self, hash: Hash, proof: Option<&[u8]>) -> Vec<u8> {
        let message = Success1 {
            head: head(MessageType::DH_HMAC_CHAP.0, MessageId::SUCCESS1.0, self.t_id),
            hl: hash.len() as u8,
            reserved: 0,
            rvalid: proof.is_some().into(),
            reserved_9: [0; 7],
        };
        let mut bytes = [message.as_bytes(), proof.unwrap_or_default()].concat();
        bytes.resize(size_of::<Success1>().saturating_add(hash.len()), 0);
        bytes
    }

    fn failure(&self, explanation: Explanation) -> Vec<u8> {
        let message = Failure {
            head: head(MessageType::COMMON.0, MessageId::FAILURE1.0, self.t_id),
            reason: REASON_AUTHENTICATION_FAILURE,
            explanation: explanation.0,
        };
        message.as_bytes().to_vec()
    }
}

const _: () = assert!(size_of::<Reply>() + 2 * 64 + 1024 <= MAX_MESSAGE);

/// The reason of a failure, for this side's log.
fn reason(explanation: Explanation) -> &'static str {
    match explanation {
        Explanation::AUTHENTICATION_FAILED => {
            "wrong secret, usually of another host NQN, or with another second field (00 to 03) than the one here"
        }
        Explanation::PROTOCOL_NOT_USABLE => "the host does not offer DH-HMAC-CHAP",
        Explanation::HASH_NOT_USABLE => "the host offers no hash function that is allowed here",
        Explanation::DH_GROUP_NOT_USABLE => {
            "the host offers no DH group that is allowed here, where null has to be allowed by dhchap_dhgroup"
        }
        Explanation::SECURE_CHANNEL_CONCATENATION_MISMATCH => {
            "the host asks for secure channel concatenation, which is not possible on this connection"
        }
        _ => "the host violated the protocol",
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::DhChapSecret;
    use super::super::secret::tests::PLAIN;
    use super::*;
    use std::ops::{Deref, DerefMut};
    use zerocopy::FromZeros;

    const HASHED: &str = "DHHC-1:01:xhpN8YQ0bpjH83p5yxlWLtSiXislYPoRsC6dIx1EcTfiGqn9:";

    pub(crate) fn secrets(hash: Option<Hash>, group: Option<DhGroup>) -> HostSecrets {
        let (host, controller) = (DhChapSecret::parse(PLAIN).unwrap(), DhChapSecret::parse(HASHED).unwrap());
        HostSecrets { host, controller: Some(controller), hash, group }
    }

    /// A controller, and the secrets that are configured for the host.
    pub(crate) struct ConfiguredController {
        authenticator: Authenticator,
        pub(crate) secrets: Option<Arc<HostSecrets>>,
    }

    impl ConfiguredController {
        pub(crate) fn with_secure_channel(self, sc_c: u8) -> ConfiguredController {
            ConfiguredController { authenticator: self.authenticator.with_secure_channel(sc_c), ..self }
        }

        pub(crate) fn on_message(&mut self, message: &[u8]) {
            self.authenticator.on_message(message, || self.secrets.clone());
        }
    }

    impl Deref for ConfiguredController {
        type Target = Authenticator;

        fn deref(&self) -> &Authenticator {
            &self.authenticator
        }
    }

    impl DerefMut for ConfiguredController {
        fn deref_mut(&mut self) -> &mut Authenticator {
            &mut self.authenticator
        }
    }

    pub(crate) fn authenticator(secrets: HostSecrets) -> ConfiguredController {
        let authenticator = Authenticator::new("nqn.h", "nqn.s", [5; 32]);
        ConfiguredController { authenticator, secrets: Some(Arc::new(secrets)) }
    }

    /// AUTH_Negotiate of a host that supports these.
    pub(crate) fn negotiate(hashes: &[u8], groups: &[u8]) -> Vec<u8> {
        let head = head(0, 0, 7);
        let mut protocol = Protocol { auth_id: 1, ..Protocol::new_zeroed() };
        (protocol.halen, protocol.dhlen) = (hashes.len() as u8, groups.len() as u8);
        protocol.hash_ids[..hashes.len()].copy_from_slice(hashes);
        protocol.dh_group_ids[..groups.len()].copy_from_slice(groups);
        [Negotiate { head, sc_c: 0, napd: 1 }.as_bytes(), protocol.as_bytes()].concat()
    }

    /// The host's reply to a challenge, and the key of the exchange.
    pub(crate) fn reply(
        challenge: &[u8],
        secret: &DhChapSecret,
        (asks, sc_c): (bool, u8),
        subsystem: &str,
    ) -> (Vec<u8>, Option<Vec<u8>>, Hash) {
        let (challenge, rest) = Challenge::read_from_prefix(challenge).unwrap();
        let hash = Hash::ALL.into_iter().find(|hash| hash.id().0 == challenge.hash_id).unwrap();
        let group = DhGroup::ALL.into_iter().find(|group| group.id().0 == challenge.dh_group_id).unwrap();
        let (c1, public) = rest.split_at(challenge.hl.into());
        let key = (group != DhGroup::Null).then(|| group.shared(public, &[3; 64]).unwrap());
        let proof = ResponseInput {
            hash,
            challenge: c1,
            seqnum: challenge.seqnum.get(),
            t_id: 7,
            session_key: key.as_deref(),
            sc_c,
        };
        let names = AuthNames { host: "nqn.h".into(), subsystem: subsystem.into() };
        let response = proof.response(AuthDirection::Host, secret, &names);
        let message = Reply {
            head: head(1, 2, 7),
            hl: challenge.hl,
            cvalid: asks.into(),
            dhvlen: challenge.dhvlen,
            seqnum: 99.into(),
            ..Reply::new_zeroed()
        };
        let c2 = vec![0xc2; hash.len()];
        ([message.as_bytes(), &response, &c2, &group.public(&[3; 64])].concat(), key, hash)
    }

    fn explanation(authenticator: &mut ConfiguredController) -> Explanation {
        let message = authenticator.message(MAX_MESSAGE).unwrap();
        let failure = Failure::read_from_bytes(&message).unwrap();
        assert_eq!((failure.head.auth_id, failure.head.t_id.get(), failure.reason), (0xf1, 7, 1));
        assert!(authenticator.has_failed() && !authenticator.is_done());
        Explanation(failure.explanation)
    }

    /// Corrupts a reply.
    type CorruptMessage = fn(&mut Vec<u8>);

    const SUCCESS_2: [u8; 16] = [1, 4, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

    #[test]
    fn both_sides_authenticate_with_every_hash_and_group() {
        for hash in Hash::ALL {
            for group in DhGroup::ALL {
                let secrets = secrets(Some(hash), Some(group));
                let (host, controller) = (secrets.host.clone(), secrets.controller.clone().unwrap());
                let mut target = authenticator(secrets);
                for asks in [false, true] {
                    target.on_message(&negotiate(&[1, 2, 3], &[0, 1, 2, 3, 4, 5]));
                    let challenge = target.message(MAX_MESSAGE).unwrap();
                    assert_eq!(challenge.len(), 16 + hash.len() + group.len());
                    let (reply, key, _) = reply(&challenge, &host, (asks, 0), "nqn.s");
                    target.on_message(&reply);
                    let success = target.message(MAX_MESSAGE).unwrap();
                    assert_eq!((success[1], success[8], success.len()), (3, asks.into(), 16 + hash.len()));
                    assert!(target.is_done(), "it was finished before the second time");
                    if asks {
                        let challenge = vec![0xc2; hash.len()];
                        let session_key = key.as_deref();
                        let proof = ResponseInput {
                            hash,
                            challenge: &challenge,
                            seqnum: 99,
                            t_id: 7,
                            session_key,
                            sc_c: 0,
                        };
                        let names = AuthNames { host: "nqn.h".into(), subsystem: "nqn.s".into() };
                        let expected = proof.response(AuthDirection::Controller, &controller, &names);
                        assert!(success[16..] == expected, "{hash:?} {group:?}");
                        target.on_message(&SUCCESS_2);
                        assert!(target.is_done() && !target.has_failed());
                    }
                }
            }
        }
    }

    #[test]
    fn each_authentication_uses_the_secrets_that_are_configured_then() {
        let [plain, hashed] = [PLAIN, HASHED].map(|text| DhChapSecret::parse(text).unwrap());
        let mut target = authenticator(secrets(None, Some(DhGroup::Null)));
        let authenticates = |target: &mut ConfiguredController, secret: &DhChapSecret| {
            target.on_message(&negotiate(&[1, 3], &[0, 1]));
            let challenge = target.message(MAX_MESSAGE).unwrap();
            target.on_message(&reply(&challenge, secret, (false, 0), "nqn.s").0);
            let is_success = target.message(MAX_MESSAGE).unwrap()[1] == MessageId::SUCCESS1.0;
            assert_eq!(target.is_done(), is_success);
            is_success.then_some((challenge[8], challenge[9]))
        };
        assert_eq!(authenticates(&mut target, &plain), Some((3, 0)));
        let replaced = HostSecrets { host: hashed.clone(), ..secrets(Some(Hash::Sha256), None) };
        target.secrets = Some(Arc::new(replaced));
        assert_eq!(authenticates(&mut target, &hashed), Some((1, 1)), "other algorithms too");
        assert_eq!(authenticates(&mut target, &plain), None, "the secret was replaced");
        // Secrets that are replaced in the middle apply from the next authentication on.
        let mut target = authenticator(secrets(None, None));
        target.on_message(&negotiate(&[1], &[1]));
        let challenge = target.message(MAX_MESSAGE).unwrap();
        target.secrets = None;
        target.on_message(&reply(&challenge, &plain, (false, 0), "nqn.s").0);
        target.message(MAX_MESSAGE).unwrap();
        assert!(target.is_done());
        target.on_message(&negotiate(&[1], &[1]));
        assert_eq!(explanation(&mut target), Explanation::AUTHENTICATION_FAILED);
    }

    #[test]
    fn a_controller_that_authenticates_waits_for_the_hosts_confirmation() {
        for last in [SUCCESS_2.to_vec(), vec![0, 0xf0, 0, 0, 7, 0, 1, 1]] {
            let mut target = authenticator(secrets(None, Some(DhGroup::Null)));
            target.on_message(&negotiate(&[1], &[0]));
            let challenge = target.message(MAX_MESSAGE).unwrap();
            target.on_message(&reply(&challenge, &DhChapSecret::parse(PLAIN).unwrap(), (true, 0), "nqn.s").0);
            target.message(MAX_MESSAGE).unwrap();
            assert!(!target.is_done());
            target.on_message(&last);
            assert_eq!((target.is_done(), target.has_failed()), (last.len() == 16, last.len() == 8));
        }
    }

    #[test]
    fn both_sides_generate_a_psk_if_the_host_requests_it() {
        for (seqnum, hashes, hash) in [(0, &[1, 2, 3][..], Hash::Sha384), (99, &[1], Hash::Sha256)] {
            let mut target = authenticator(secrets(None, None)).with_secure_channel(SC_C_NEW_TLS_PSK);
            let mut negotiate = negotiate(hashes, &[0, 1]);
            negotiate[6] = SC_C_NEW_TLS_PSK;
            target.on_message(&negotiate);
            let challenge = target.message(MAX_MESSAGE).unwrap();
            assert_eq!((challenge[8], challenge[9]), (hash.id().0, 1), "neither SHA-512 nor the null group");
            let plain = DhChapSecret::parse(PLAIN).unwrap();
            let (mut reply, key, _) = reply(&challenge, &plain, (true, SC_C_NEW_TLS_PSK), "nqn.s");
            reply[12..16].copy_from_slice(&u32::to_le_bytes(seqnum));
            target.on_message(&reply);
            assert!(target.take_generated().is_none(), "the host is not authenticated");
            let success = target.message(MAX_MESSAGE).unwrap();
            assert_eq!(success[8], u8::from(seqnum != 0));
            if seqnum != 0 {
                assert!(target.take_generated().is_none());
                target.on_message(&SUCCESS_2);
            }
            let (c1, c2) = (&challenge[16..16 + hash.len()], vec![0xc2; hash.len()]);
            let bytes = hash.hmac(&hash.digest(&key.unwrap()), &[c1, &c2]);
            assert!(target.take_generated() == InputPsk::generated(hash, bytes) && target.is_done());
            assert!(target.take_generated().is_none(), "it was taken");
        }
    }

    #[test]
    fn a_psk_is_generated_only_where_it_can_be_used() {
        let fails = |allowed: u8, hashes: &[u8], groups: &[u8]| {
            let mut target = authenticator(secrets(None, None)).with_secure_channel(allowed);
            let mut message = negotiate(hashes, groups);
            message[6] = SC_C_NEW_TLS_PSK;
            target.on_message(&message);
            explanation(&mut target)
        };
        assert_eq!(fails(SC_C_NONE, &[1], &[1]), Explanation::SECURE_CHANNEL_CONCATENATION_MISMATCH);
        assert_eq!(
            fails(SC_C_REPLACE_TLS_PSK, &[1], &[1]),
            Explanation::SECURE_CHANNEL_CONCATENATION_MISMATCH
        );
        assert_eq!(fails(SC_C_NEW_TLS_PSK, &[3], &[1]), Explanation::HASH_NOT_USABLE);
        assert_eq!(fails(SC_C_NEW_TLS_PSK, &[1], &[0]), Explanation::DH_GROUP_NOT_USABLE);
        // Without a challenge of the host, there is no key.
        let mut target = authenticator(secrets(None, None)).with_secure_channel(SC_C_NEW_TLS_PSK);
        let mut message = negotiate(&[1], &[1]);
        message[6] = SC_C_NEW_TLS_PSK;
        target.on_message(&message);
        let challenge = target.message(MAX_MESSAGE).unwrap();
        let plain = DhChapSecret::parse(PLAIN).unwrap();
        target.on_message(&reply(&challenge, &plain, (false, SC_C_NEW_TLS_PSK), "nqn.s").0);
        assert_eq!(explanation(&mut target), Explanation::INCORRECT_PAYLOAD);
        assert!(target.take_generated().is_none());
    }

    #[test]
    fn the_strongest_hash_and_a_group_are_selected_by_default() {
        let chosen = |groups: &[u8]| {
            let mut target = authenticator(secrets(None, None));
            target.on_message(&negotiate(&[1, 3, 2], groups));
            let message = target.message(MAX_MESSAGE).unwrap();
            (message[1], message.get(8).copied(), message.get(9).copied())
        };
        assert_eq!(chosen(&[0, 5, 2]), (1, Some(3), Some(2)));
        assert_eq!(chosen(&[0]).0, 0xf1, "without an exchange only if the secrets allow it");
    }

    /// Linux's controller believed the lengths of these lists (CVE-2026-64319, CVE-2026-90230).
    #[test]
    fn a_failed_negotiation_is_reported() {
        let fails = |message: &[u8]| {
            let mut target = authenticator(secrets(Some(Hash::Sha384), Some(DhGroup::Ffdhe2048)));
            target.on_message(message);
            assert!(target.why_failed() != "" && !target.why_failed().starts_with("wrong secret"));
            explanation(&mut target)
        };
        let good = negotiate(&[2], &[1]);
        let with = |at: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[at] = value;
            fails(&bytes)
        };
        assert_eq!(fails(&negotiate(&[1, 3], &[1])), Explanation::HASH_NOT_USABLE);
        assert_eq!(fails(&negotiate(&[2], &[0, 2])), Explanation::DH_GROUP_NOT_USABLE);
        assert_eq!(with(6, 1), Explanation::SECURE_CHANNEL_CONCATENATION_MISMATCH);
        assert_eq!(with(8, 9), Explanation::PROTOCOL_NOT_USABLE);
        for (at, value) in [(7, 2), (10, 31), (11, 31)] {
            assert_eq!(with(at, value), Explanation::INCORRECT_PAYLOAD, "{at}");
        }
        assert_eq!(with(7, 0), Explanation::PROTOCOL_NOT_USABLE);
    }

    #[test]
    fn a_host_without_the_secret_is_rejected() {
        let begun = |controller: bool| {
            let mut secrets = secrets(None, Some(DhGroup::Ffdhe2048));
            secrets.controller = secrets.controller.filter(|_| controller);
            let mut target = authenticator(secrets);
            target.on_message(&negotiate(&[1], &[1]));
            let challenge = target.message(MAX_MESSAGE).unwrap();
            (target, challenge)
        };
        let plain = DhChapSecret::parse(PLAIN).unwrap();
        let (mut target, challenge) = begun(true);
        target.on_message(&reply(&challenge, &DhChapSecret::parse(HASHED).unwrap(), (false, 0), "nqn.s").0);
        assert_eq!(explanation(&mut target), Explanation::AUTHENTICATION_FAILED);
        assert_eq!(target.message(MAX_MESSAGE), None, "the failure was reported");
        let (mut target, challenge) = begun(false);
        target.on_message(&reply(&challenge, &plain, (true, 0), "nqn.s").0);
        assert_eq!(explanation(&mut target), Explanation::AUTHENTICATION_FAILED);
        // An exponential of 0, a wrong length, a truncated message, another transaction, and the
        // wrong message.
        let right = |challenge: &[u8]| reply(challenge, &plain, (false, 0), "nqn.s").0;
        let corruptions: [(CorruptMessage, Explanation); 5] = [
            (|reply| reply[16 + 64..].fill(0), Explanation::INCORRECT_PAYLOAD),
            (|reply| reply[6] = 48, Explanation::INCORRECT_PAYLOAD),
            (|reply| reply.truncate(100), Explanation::INCORRECT_PAYLOAD),
            (|reply| reply[4] = 8, Explanation::INCORRECT_MESSAGE),
            (|reply| *reply = negotiate(&[1], &[1]), Explanation::INCORRECT_MESSAGE),
        ];
        for (spoil, said) in corruptions {
            let (mut target, challenge) = begun(true);
            let mut reply = right(&challenge);
            spoil(&mut reply);
            target.on_message(&reply);
            assert_eq!(explanation(&mut target), said);
        }
        // A host that receives before it has sent AUTH_Negotiate.
        let mut target = authenticator(secrets(None, None));
        target.t_id = 7;
        assert_eq!(explanation(&mut target), Explanation::INCORRECT_MESSAGE);
    }

    #[test]
    fn a_malformed_message_of_any_length_is_a_failure() {
        for len in 0..200 {
            for first in [0, 1] {
                let mut target = authenticator(secrets(None, None));
                target.on_message(&[&[first][..], &vec![0; len]].concat());
                assert!(target.message(3).is_none(), "there is no room for it");
                target.message(MAX_MESSAGE).unwrap();
                assert!(!target.is_done());
            }
        }
    }

    #[test]
    fn every_queue_gets_another_challenge() {
        let mut random = ChallengeGenerator::new([1; 32]);
        assert_ne!(random.block(), random.block());
        assert_ne!(ChallengeGenerator::new([2; 32]).block(), ChallengeGenerator::new([1; 32]).block());
    }
}
