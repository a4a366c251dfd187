//! In-band authentication with DH-HMAC-CHAP (Base 2.0 §8.13).
//!
//! ```text
//!   host ── AUTH_Negotiate ────▶ controller     offered hash functions and groups
//!   host ◀── Challenge ───────── controller     C1, g^x
//!   host ── Reply ─────────────▶ controller     HMAC over C1, and if the controller has to authenticate: C2; g^y
//!   host ◀── Success1 ────────── controller     HMAC over C2
//!   host ── Success2 ──────────▶ controller     only if there was a C2
//! ```
//! Host and controller each have a [`DhChapSecret`], in nvme-cli's format. With a group, challenges
//! are augmented with the key of a Diffie-Hellman exchange, so that an eavesdropper cannot guess
//! secrets offline.
//!
//! A host may also request a secure channel (SC_C): both sides then derive a TLS PSK from the
//! exchange and both challenges, and the host reconnects with it ([`psk`]).
//!
//! Private exponents have 512 bits, more than RFC 7919 requires for any of its groups. A controller
//! computes two exponentiations for each attempt, for any peer that knows the NQN of a host with a
//! secret. So it starts a [`crate::driver::computation::Computation`] for each, which may run
//! elsewhere.
//!
//! `hash.rs` and `group.rs` have the mathematics, `secret.rs` the secrets, `psk.rs` the TLS PSKs,
//! `controller.rs` the controller's side of one queue's authentication and `host.rs` the host's.

pub mod controller;
mod group;
mod hash;
pub mod host;
mod interchange;
pub mod psk;
mod secret;

pub use group::DhGroup;
pub use hash::Hash;
pub use host::{AuthFailure, Concatenation, HostCredentials};
pub use secret::{DhChapSecret, SecretError};

use blockmux_wire::nvmeof::auth::Head;
use sha2::{Digest, Sha512};
use std::fmt;

/// The secrets of a host and the controller, known to both sides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostSecrets {
    /// The host's secret.
    pub host: DhChapSecret,
    /// The controller's secret. Without it, the controller does not answer a host's challenge, and
    /// a host does not send one.
    pub controller: Option<DhChapSecret>,
    /// The only hash function; `None` for the strongest that both sides support.
    pub hash: Option<Hash>,
    /// The only group; `None` for the first of at least 2,048 bits that both sides support, or the
    /// null group with a controller that supports no other.
    pub group: Option<DhGroup>,
}

/// The algorithms that a controller has chosen, for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuthAlgorithms {
    /// Hash function of the responses.
    pub hash: Hash,
    /// Group of the Diffie-Hellman exchange.
    pub group: DhGroup,
}

impl fmt::Display for AuthAlgorithms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, group {}", self.hash.name(), self.group.name())
    }
}

/// The side that authenticates.
#[derive(Clone, Copy)]
enum AuthDirection {
    Host,
    Controller,
}

/// The two NQNs in every response.
struct AuthNames {
    host: String,
    subsystem: String,
}

/// The input of a response.
struct ResponseInput<'a> {
    hash: Hash,
    /// C1 or C2, as it was sent.
    challenge: &'a [u8],
    /// S1 or S2.
    seqnum: u32,
    t_id: u16,
    /// The key of the Diffie-Hellman exchange, if there was one.
    session_key: Option<&'a [u8]>,
    /// The SC_C value.
    sc_c: u8,
}

impl ResponseInput<'_> {
    /// The response to a challenge.
    fn response(&self, prover: AuthDirection, secret: &DhChapSecret, names: &AuthNames) -> Vec<u8> {
        let (role, first, second) = match prover {
            AuthDirection::Host => ("HostHost", &names.host, &names.subsystem),
            AuthDirection::Controller => ("Controller", &names.subsystem, &names.host),
        };
        let challenge = match self.session_key {
            None => self.challenge.to_vec(),
            Some(key) => self.hash.hmac(&self.hash.digest(key), &[self.challenge]),
        };
        let key = secret.key_for(first);
        let parts: [&[u8]; 8] = [
            &challenge,
            &self.seqnum.to_le_bytes(),
            &self.t_id.to_le_bytes(),
            &[self.sc_c],
            role.as_bytes(),
            first.as_bytes(),
            &[0],
            second.as_bytes(),
        ];
        self.hash.hmac(&key, &parts)
    }
}

/// Generates random bytes from a secret seed.
struct ChallengeGenerator {
    seed: [u8; 32],
    taken: u64,
}

impl ChallengeGenerator {
    fn new(seed: [u8; 32]) -> ChallengeGenerator {
        ChallengeGenerator { seed, taken: 0 }
    }

    fn block(&mut self) -> [u8; 64] {
        self.taken = self.taken.wrapping_add(1);
        Sha512::new().chain_update(self.seed).chain_update(self.taken.to_le_bytes()).finalize().into()
    }

    /// A sequence number other than 0.
    fn seqnum(&mut self) -> u32 {
        let [a, b, c, d, ..] = self.block();
        u32::from_le_bytes([a, b, c, d]).max(1)
    }
}

fn head(auth_type: u8, auth_id: u8, t_id: u16) -> Head {
    Head { auth_type, auth_id, reserved: [0; 2], t_id: t_id.into() }
}

/// Compares in constant time.
fn is_same(one: &[u8], other: &[u8]) -> bool {
    let difference = one.iter().zip(other).fold(0, |all, (a, b)| all | (a ^ b));
    one.len() == other.len() && difference == 0
}

/// Longest message, in bytes.
pub const MAX_MESSAGE: usize = 4096;
