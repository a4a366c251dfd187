//! ROD tokens: names of data for whoever has them, to be written elsewhere without passing through
//! an initiator (SPC-5, SBC-4).
//!
//! A volume keeps no old versions of its blocks, so that a token can only promise "point in time
//! copy, change vulnerable": it stands for the blocks as they were, and is cancelled by whatever
//! changes one of them. A token cannot be guessed, and is good for as long as it is in use: what is
//! idle for its inactivity timeout expires. Seconds are counted by work in the background, for a
//! device server has no clock.

use super::nexus::Nexus;
use super::unit::{LogicalUnit, UnitIdentity};
use crate::volume_state::Watch;
use blockmux_wire::scsi::copy::*;
use blockmux_wire::scsi::sense::Asc;
use blockmux_wire::scsi::vpd::DESIGNATOR_NAA;
use sha2::{Digest, Sha256};
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use zerocopy::{FromZeros, IntoBytes, U16, U32, U64};

/// A token's bytes.
pub(super) type TokenBytes = [u8; ROD_TOKEN_LEN];

/// Offset and length in bytes of what a token stands for.
pub(super) type TokenRanges = Arc<[(u64, u64)]>;

/// The tokens of one logical unit's data, those that are not good any more until others need their
/// place.
#[derive(Default)]
pub(super) struct Tokens(Mutex<TokenTable>);

#[derive(Default)]
struct TokenTable {
    /// Oldest first.
    tokens: Vec<Token>,
    /// Counts while there are tokens, in seconds.
    now: u64,
    /// Somebody counts.
    is_counted: bool,
}

struct Token {
    bytes: Box<TokenBytes>,
    ranges: TokenRanges,
    /// In seconds.
    timeout: u32,
    used_at: u64,
    fate: Fate,
}

enum Fate {
    Good(Watch),
    /// INVALID TOKEN OPERATION, and why.
    Over(Asc),
}

impl Tokens {
    /// Makes a token of what is watched; `None` if there are [`MAX_TOKENS`] that are good.
    pub(super) fn add(
        &self,
        bytes: Box<TokenBytes>,
        ranges: TokenRanges,
        timeout: u32,
        watch: Watch,
    ) -> Option<()> {
        let mut table = self.lock();
        table.see_changes();
        if table.tokens.len() >= MAX_TOKENS {
            let over = table.tokens.iter().position(|token| matches!(token.fate, Fate::Over(_)))?;
            table.tokens.remove(over);
        }
        let used_at = table.now;
        table.tokens.push(Token { bytes, ranges, timeout, used_at, fate: Fate::Good(watch) });
        Some(())
    }

    /// The ranges that a token stands for, which is used now; `None` if there is no such token.
    pub(super) fn find(&self, bytes: &TokenBytes) -> Option<Result<TokenRanges, Asc>> {
        let mut table = self.lock();
        table.see_changes();
        let now = table.now;
        let token = table.tokens.iter_mut().find(|token| is_equal(&token.bytes, bytes))?;
        Some(match token.fate {
            Fate::Over(why) => Err(why),
            Fate::Good(_) => {
                token.used_at = now;
                Ok(token.ranges.clone())
            }
        })
    }

    /// Ends a token.
    pub(super) fn delete(&self, bytes: &TokenBytes) {
        if let Some(token) = self.lock().tokens.iter_mut().find(|token| is_equal(&token.bytes, bytes)) {
            token.fate = Fate::Over(Asc::TOKEN_DELETED);
        }
    }

    /// A second has passed; answers whether seconds still count.
    pub(super) fn tick(&self) -> bool {
        let mut table = self.lock();
        table.see_changes();
        table.now = table.now.saturating_add(1);
        let now = table.now;
        for token in &mut table.tokens {
            let idle = now.saturating_sub(token.used_at);
            if matches!(token.fate, Fate::Good(_)) && idle >= token.timeout.into() {
                token.fate = Fate::Over(Asc::TOKEN_EXPIRED);
            }
        }
        table.is_counted = table.has_good();
        table.is_counted
    }

    /// Whether there are tokens and nobody counts their seconds.
    pub(super) fn lacks_clock(&self) -> bool {
        let table = self.lock();
        !table.is_counted && table.has_good()
    }

    /// Whether the caller has to count seconds from now on, by [`Tokens::tick`].
    pub(super) fn claim_clock(&self) -> bool {
        let mut table = self.lock();
        let claims = !table.is_counted && table.has_good();
        table.is_counted |= claims;
        claims
    }

    fn lock(&self) -> MutexGuard<'_, TokenTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TokenTable {
    fn has_good(&self) -> bool {
        self.tokens.iter().any(|token| matches!(token.fate, Fate::Good(_)))
    }

    /// Cancels the tokens whose blocks have changed.
    fn see_changes(&mut self) {
        for token in &mut self.tokens {
            if matches!(&token.fate, Fate::Good(watch) if watch.has_changed()) {
                token.fate = Fate::Over(Asc::TOKEN_CANCELLED);
            }
        }
    }
}

/// A new token for so many bytes of a unit.
pub(super) fn new_token(unit: &LogicalUnit, nexus: &Nexus, block_len: u32, len: u64) -> Box<TokenBytes> {
    let secret = unguessable(nexus);
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
    // Behind the head: the target device's descriptor, which is left out, then what only we read.
    let parts = head.as_bytes().iter().chain(&[0; 128]).chain(&secret);
    bytes.iter_mut().zip(parts).for_each(|(place, byte)| *place = *byte);
    bytes
}

/// Whether the token stands for zeroes without end (SBC-4).
pub(super) fn is_zero_token(bytes: &TokenBytes) -> bool {
    bytes.starts_with(&ROD_ZERO.to_be_bytes()) && bytes.iter().skip(8).all(|&byte| byte == 0)
}

fn creator(identity: &UnitIdentity, block_len: u32) -> IdentificationCscd {
    let mut cscd = IdentificationCscd {
        descriptor_type: CSCD_IDENTIFICATION,
        code_set: 1,
        association_and_type: DESIGNATOR_NAA,
        designator_length: 8,
        disk_block_length: U32::new(block_len),
        ..IdentificationCscd::new_zeroed()
    };
    let naa = identity.naa.to_be_bytes();
    cscd.designator.iter_mut().zip(naa).for_each(|(place, byte)| *place = byte);
    cscd
}

/// 32 bytes that nobody guesses, others each time: a hash over a secret of this process, which
/// begins with what the system gives hash tables against just such guesses.
fn unguessable(nexus: &Nexus) -> [u8; 32] {
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

/// Takes as long wherever they differ.
fn is_equal(a: &TokenBytes, b: &TokenBytes) -> bool {
    a.iter().zip(b).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}

/// Of one logical unit.
pub(super) const MAX_TOKENS: usize = 128;
/// MAXIMUM INACTIVITY TIMEOUT, in seconds.
pub(super) const MAX_TIMEOUT: u32 = 3600;
/// DEFAULT INACTIVITY TIMEOUT, in seconds.
pub(super) const DEFAULT_TIMEOUT: u32 = 60;
