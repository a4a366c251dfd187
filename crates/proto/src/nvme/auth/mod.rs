//! In-band authentication with DH-HMAC-CHAP (Base 2.0 §8.13).
//!
//! ```text
//!   host ── AUTH_Negotiate ────▶ controller     which hash functions and groups it can
//!   host ◀── Challenge ───────── controller     C1, g^x
//!   host ── Reply ─────────────▶ controller     HMAC over C1, and if the controller is to prove itself: C2; g^y
//!   host ◀── Success1 ────────── controller     HMAC over C2
//!   host ── Success2 ──────────▶ controller     only if there was a C2
//! ```
//! Host and controller each have a [`DhChapSecret`], in the format that nvme-cli makes. With a
//! group, challenges are hashed with the key of a Diffie-Hellman exchange, so that who listens
//! cannot try secrets at home.
//!
//! A host may ask for a secure channel as well (SC_C): then both make a key of TLS of the exchange
//! and of both challenges, and the host comes back with it ([`psk`]).
//!
//! Private exponents have 512 bits, more than RFC 7919 asks for with any of its groups. A
//! controller does two exponentiations for each attempt, on the connection's core, for whoever
//! knows the name of a host that has a secret: who finds that too much leaves `ffdhe6144` and
//! `ffdhe8192` alone.
//!
//! `hash.rs` and `group.rs` have the mathematics, `secret.rs` the secrets, `psk.rs` the keys of
//! TLS, `controller.rs` a controller's side of one queue's authentication and `host.rs` a host's.

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

/// What a host has to prove, and what is proved to it. Both sides have the same.
#[derive(Clone, Debug)]
pub struct HostSecrets {
    /// The host's.
    pub host: DhChapSecret,
    /// The controller's: without it, who asks for a proof gets none, and a host asks for none.
    pub controller: Option<DhChapSecret>,
    /// The only hash function; `None`: the strongest that both can.
    pub hash: Option<Hash>,
    /// The only group; `None`: the first from 2,048 bits on that both can; of a host with a
    /// controller that can none, none.
    pub group: Option<DhGroup>,
}

/// Who proves itself to whom.
#[derive(Clone, Copy)]
enum AuthDirection {
    Host,
    Controller,
}

/// The two names in every response.
struct AuthNames {
    host: String,
    subsystem: String,
}

/// Everything that a response is made of.
struct ResponseInput<'a> {
    hash: Hash,
    /// C1 or C2, as it was sent.
    challenge: &'a [u8],
    /// S1 or S2.
    seqnum: u32,
    t_id: u16,
    /// The key of the Diffie-Hellman exchange, if there was one.
    session_key: Option<&'a [u8]>,
    /// What a secure channel is to be made of.
    sc_c: u8,
}

impl ResponseInput<'_> {
    /// The response to a challenge.
    fn response(&self, prover: AuthDirection, secret: &DhChapSecret, parties: &AuthNames) -> Vec<u8> {
        let (role, first, second) = match prover {
            AuthDirection::Host => ("HostHost", &parties.host, &parties.subsystem),
            AuthDirection::Controller => ("Controller", &parties.subsystem, &parties.host),
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

/// Random bytes from a seed that nobody else knows.
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

    /// Not 0.
    fn seqnum(&mut self) -> u32 {
        let [a, b, c, d, ..] = self.block();
        u32::from_le_bytes([a, b, c, d]).max(1)
    }
}

fn head(auth_type: u8, auth_id: u8, t_id: u16) -> Head {
    Head { auth_type, auth_id, reserved: [0; 2], t_id: t_id.into() }
}

/// Whether both are the same, in a time that does not tell where they differ.
fn is_same(one: &[u8], other: &[u8]) -> bool {
    let difference = one.iter().zip(other).fold(0, |all, (a, b)| all | (a ^ b));
    one.len() == other.len() && difference == 0
}

/// The longest message, in bytes.
pub const MAX_MESSAGE: usize = 4096;
