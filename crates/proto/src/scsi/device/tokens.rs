//! ROD tokens: they represent data and let an initiator copy it without transferring it (SPC-5,
//! SBC-4).
//!
//! A volume keeps no old versions of its blocks, so the ROD type is "point in time copy, change
//! vulnerable": a change of a represented block cancels the token. Tokens are unguessable. A token
//! expires after its inactivity timeout. A background task counts the seconds, because a device
//! server has no clock.

use super::nexus::ItNexus;
use super::unit::{LogicalUnit, UnitIdentity};
use crate::volume_state::Watch;
use blockmux_wire::scsi::copy::*;
use blockmux_wire::scsi::sense::Asc;
use sha2::{Digest, Sha256};
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use zerocopy::{FromZeros, IntoBytes, U16, U32, U64};

/// Encoded token.
pub(super) type TokenBytes = [u8; ROD_TOKEN_LEN];

/// Offset and length, in bytes, of the ranges that a token represents.
pub(super) type TokenRanges = Arc<[(u64, u64)]>;

/// Tokens of one logical unit. Invalid tokens remain until their place is needed.
#[derive(Default)]
pub(crate) struct Tokens(Mutex<TokenTable>);

#[derive(Default)]
struct TokenTable {
    /// Ordered by creation, oldest first.
    tokens: Vec<Token>,
    /// Clock in seconds; runs while there are valid tokens.
    now: u64,
    /// A task runs the clock.
    has_clock: bool,
}

struct Token {
    bytes: Box<TokenBytes>,
    ranges: TokenRanges,
    /// Inactivity timeout, in seconds.
    timeout: u32,
    used_at: u64,
    state: TokenState,
}

enum TokenState {
    Valid(Watch),
    /// The token is invalid: INVALID TOKEN OPERATION with this code.
    Invalid(Asc),
}

impl Tokens {
    /// Adds a token for the ranges of `watch`; `None` if [`MAX_TOKENS`] tokens are valid.
    pub(super) fn add(
        &self,
        bytes: Box<TokenBytes>,
        ranges: TokenRanges,
        timeout: u32,
        watch: Watch,
    ) -> Option<()> {
        let mut table = self.lock();
        table.cancel_changed();
        if table.tokens.len() >= MAX_TOKENS {
            let over = table.tokens.iter().position(|token| matches!(token.state, TokenState::Invalid(_)))?;
            table.tokens.remove(over);
        }
        let used_at = table.now;
        table.tokens.push(Token { bytes, ranges, timeout, used_at, state: TokenState::Valid(watch) });
        Some(())
    }

    /// Looks up a token and restarts its inactivity timeout; `None` if it is unknown.
    pub(super) fn find(&self, bytes: &TokenBytes) -> Option<Result<TokenRanges, Asc>> {
        let mut table = self.lock();
        table.cancel_changed();
        let now = table.now;
        let token = table.tokens.iter_mut().find(|token| is_equal(&token.bytes, bytes))?;
        Some(match token.state {
            TokenState::Invalid(why) => Err(why),
            TokenState::Valid(_) => {
                token.used_at = now;
                Ok(token.ranges.clone())
            }
        })
    }

    /// Invalidates a token.
    pub(super) fn delete(&self, bytes: &TokenBytes) {
        if let Some(token) = self.lock().tokens.iter_mut().find(|token| is_equal(&token.bytes, bytes)) {
            token.state = TokenState::Invalid(Asc::TOKEN_DELETED);
        }
    }

    /// Cancels all tokens, because the data may change without their watches.
    pub(super) fn cancel_all(&self) {
        for token in &mut self.lock().tokens {
            if matches!(token.state, TokenState::Valid(_)) {
                token.state = TokenState::Invalid(Asc::TOKEN_CANCELLED);
            }
        }
    }

    /// Advances the clock by a second; returns whether it must continue.
    pub(crate) fn tick(&self) -> bool {
        let mut table = self.lock();
        table.cancel_changed();
        table.now = table.now.saturating_add(1);
        let now = table.now;
        for token in &mut table.tokens {
            let idle = now.saturating_sub(token.used_at);
            if matches!(token.state, TokenState::Valid(_)) && idle >= token.timeout.into() {
                token.state = TokenState::Invalid(Asc::TOKEN_EXPIRED);
            }
        }
        table.has_clock = table.has_valid();
        table.has_clock
    }

    /// Whether there are valid tokens and no clock runs.
    pub(super) fn needs_clock(&self) -> bool {
        let table = self.lock();
        !table.has_clock && table.has_valid()
    }

    /// Claims the clock; if `true`, the caller must call [`Tokens::tick`] every second.
    pub(super) fn claim_clock(&self) -> bool {
        let mut table = self.lock();
        let claims = !table.has_clock && table.has_valid();
        table.has_clock |= claims;
        claims
    }

    fn lock(&self) -> MutexGuard<'_, TokenTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TokenTable {
    fn has_valid(&self) -> bool {
        self.tokens.iter().any(|token| matches!(token.state, TokenState::Valid(_)))
    }

    /// Cancels tokens with changed blocks.
    fn cancel_changed(&mut self) {
        for token in &mut self.tokens {
            if matches!(&token.state, TokenState::Valid(watch) if watch.has_changed()) {
                token.state = TokenState::Invalid(Asc::TOKEN_CANCELLED);
            }
        }
    }
}

/// Creates a token for `len` bytes of a unit.
pub(super) fn new_token(unit: &LogicalUnit, nexus: &ItNexus, block_len: u32, len: u64) -> Box<TokenBytes> {
    let secret = random_secret(nexus);
    let (identifier, _) = secret.split_first_chunk::<8>().unwrap_or((&[0; 8], &[]));
    let head = RodTokenHead {
        rod_type: U32::new(ROD_CHANGE_VULNERABLE),
        length: U16::new(ROD_TOKEN_LENGTH_FIELD),
        identifier: U64::new(u64::from_be_bytes(*identifier)),
        creator: creator(&unit.identity, block_len),
        bytes_represented: [U64::ZERO, U64::new(len)],
        logical_block_length: U32::new(block_len),
        ..FromZeros::new_zeroed()
    };
    let mut bytes = Box::new([0; ROD_TOKEN_LEN]);
    // The header is followed by the omitted target device descriptor, then by the secret.
    let parts = head.as_bytes().iter().chain(&[0; 128]).chain(&secret);
    bytes.iter_mut().zip(parts).for_each(|(place, byte)| *place = *byte);
    bytes
}

/// Whether the token is the block zero ROD token (SBC-4).
pub(super) fn is_zero_token(bytes: &TokenBytes) -> bool {
    bytes.starts_with(&ROD_ZERO.to_be_bytes()) && bytes.iter().skip(8).all(|&byte| byte == 0)
}

/// The unit as the creator of a token, by its first designator that fits in the descriptor. If none
/// does, the descriptor names no unit: only its vendor looks at that of a token.
fn creator(identity: &UnitIdentity, block_len: u32) -> IdentificationCscd {
    let mut cscd = IdentificationCscd {
        descriptor_type: CSCD_IDENTIFICATION,
        disk_block_length: U32::new(block_len),
        ..IdentificationCscd::new_zeroed()
    };
    let own = identity.designators.iter().find(|own| own.bytes().len() <= cscd.designator.len());
    if let Some(own) = own {
        cscd.code_set = own.code_set();
        cscd.association_and_type = own.designator_type();
        cscd.designator_length = own.bytes().len() as u8;
        cscd.designator.iter_mut().zip(own.bytes()).for_each(|(place, byte)| *place = *byte);
    }
    cscd
}

/// 32 unpredictable bytes, unique for each call: a hash over a process-wide secret from the random
/// seeds of the standard library's hash maps.
fn random_secret(nexus: &ItNexus) -> [u8; 32] {
    static SECRET: OnceLock<[u8; 32]> = OnceLock::new();
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let secret = SECRET.get_or_init(|| {
        let mut hash = Sha256::new();
        for _ in 0..8 {
            hash.update(RandomState::new().build_hasher().finish().to_be_bytes());
        }
        hash.finalize().into()
    });
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let hash = Sha256::new().chain_update(secret).chain_update(count.to_be_bytes());
    hash.chain_update(&*nexus.initiator).finalize().into()
}

/// Compares in constant time.
fn is_equal(a: &TokenBytes, b: &TokenBytes) -> bool {
    a.iter().zip(b).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}

/// Maximum number of tokens of one logical unit.
pub(super) const MAX_TOKENS: usize = 128;
/// MAXIMUM INACTIVITY TIMEOUT, in seconds.
pub(super) const MAX_TIMEOUT: u32 = 3600;
/// DEFAULT INACTIVITY TIMEOUT, in seconds.
pub(super) const DEFAULT_TIMEOUT: u32 = 60;
