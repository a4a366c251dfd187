//! DH-HMAC-CHAP between a host and a controller, with messages that an attacker modifies.
//!
//! Both sides must terminate, and neither may authenticate a peer without the secret. If a TLS key
//! is derived, it must be the same on both sides.

use crate::choices::Choices;
use blockmux_proto::nvme::auth::controller::Authenticator;
use blockmux_proto::nvme::auth::host::{AuthStep, HostAuthenticator};
use blockmux_proto::nvme::auth::{
    Concatenation, DhChapSecret, DhGroup, Hash, HostCredentials, HostSecrets, MAX_MESSAGE,
};
use blockmux_proto::nvme::nqn::Nqn;
use blockmux_wire::nvmeof::auth::SC_C_NEW_TLS_PSK;
use std::sync::Arc;

/// Reads `data` as choices and replacements of messages.
pub(crate) fn nvme_auth(data: &[u8]) {
    let (mut choices, stream) = Choices::split(data);
    let secret = |text| DhChapSecret::parse(text).expect("the secret is valid");
    let hash = choices.of(&[None, Some(Hash::Sha256), Some(Hash::Sha384), Some(Hash::Sha512)]);
    // An exponentiation takes longer than everything else.
    let group = choices.of(&[DhGroup::Null, DhGroup::Null, DhGroup::Null, DhGroup::Ffdhe2048]);
    let (asks, knows, is_known) = (choices.byte() & 1 == 0, choices.byte() & 1 == 0, choices.byte() & 1 == 0);
    let controller = HostSecrets {
        host: secret(OWN),
        controller: Some(secret(if is_known { CONTROLLERS } else { OTHER })),
        hash,
        group: Some(group),
    };
    let own = HostSecrets {
        host: secret(if knows { OWN } else { OTHER }),
        controller: asks.then(|| secret(CONTROLLERS)),
        hash: choices.of(&[None, hash]),
        group: Some(group),
    };
    let name = |name: &str| Nqn::new(name).expect("the name is valid");
    let concatenation =
        choices.of(&[Concatenation::None, Concatenation::Due, Concatenation::None, Concatenation::Done]);
    let makes_key = concatenation == Concatenation::Due;
    let can_make_key = group != DhGroup::Null && hash != Some(Hash::Sha512);
    let credentials = HostCredentials { secrets: Arc::new(own), seed: [1; 32], concatenation };
    let mut host = HostAuthenticator::new(credentials, &name("nqn.h"), &name("nqn.s"));
    let mut target = Authenticator::new("nqn.h", "nqn.s", [2; 32]).with_secure_channel(SC_C_NEW_TLS_PSK);
    let controller = Arc::new(controller);
    let (mut stream, mut is_spoiled, mut turns) = (&stream[..], false, 0);
    let outcome = loop {
        assert!(turns < MAX_TURNS, "a host has at most five messages");
        turns += 1;
        match host.turn() {
            AuthStep::Send(message) => {
                assert!(message.len() <= MAX_MESSAGE);
                let mut message = message.to_vec();
                is_spoiled |= spoil(&mut message, &mut choices, &mut stream);
                target.on_message(&message, || Some(controller.clone()));
                host.on_sent();
            }
            AuthStep::Receive => {
                let Some(mut message) = target.message(MAX_MESSAGE) else { return };
                assert!(message.len() <= MAX_MESSAGE);
                is_spoiled |= spoil(&mut message, &mut choices, &mut stream);
                host.on_message(&message);
            }
            AuthStep::Over(outcome) => break outcome,
        }
    };
    assert!(!target.is_done() || knows, "a host without the secret was authenticated");
    assert!(host.generated().is_none() || outcome.is_ok(), "a failed authentication has derived a key");
    if asks {
        assert!(outcome.is_err() || is_known, "a controller without the secret was authenticated");
    }
    if !is_spoiled {
        let is_possible = can_make_key || !makes_key;
        assert_eq!(outcome.is_ok(), is_possible && knows && (is_known || !asks));
        assert_eq!(target.is_done(), outcome.is_ok());
        assert_eq!(host.generated().is_some(), makes_key && outcome.is_ok());
        assert!(host.generated() == target.take_generated().as_ref(), "the two sides have different keys");
    }
}

/// Optionally modifies, truncates or replaces a message; returns whether it has changed.
pub(crate) fn spoil(message: &mut Vec<u8>, choices: &mut Choices<'_>, stream: &mut &[u8]) -> bool {
    let before = message.clone();
    match choices.byte() {
        0..=127 => {}
        128..=191 => {
            let at = (usize::from(choices.byte()) << 8 | usize::from(choices.byte())) % message.len();
            message[at] ^= choices.byte();
        }
        192..=223 => message.truncate(choices.byte().into()),
        _ => {
            let (other, rest) = stream.split_at(stream.len().min(choices.byte().into()));
            (*message, *stream) = (other.to_vec(), rest);
        }
    }
    *message != before
}

/// The host's secret.
pub(crate) const OWN: &str = "DHHC-1:00:AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAl7OaH:";
const CONTROLLERS: &str = "DHHC-1:01:xhpN8YQ0bpjH83p5yxlWLtSiXislYPoRsC6dIx1EcTfiGqn9:";
const OTHER: &str = "DHHC-1:00:ZWZnaGlqa2xtbm9wcXJzdHV2d3h5ent8fX5/gIGCg4QqhWEu:";
const MAX_TURNS: usize = 8;
